//! Records of requests that are over: what became of one, at each stage and on each edge.
//!
//! They are made only where somebody wants them. A record is given out a moment after its request's end, for word of its
//! last payloads may come behind it.

use std::{borrow::Cow, sync::Arc};

use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};

use super::{
    book::{Part, UNKNOWN},
    edges::Hop,
    places::End,
};
use crate::metrics::number::as_f64;

/// Stages and edges of a record: its pipeline says how many there are, and may say anything.
const MAX_ROWS: usize = 64;

/// Records of a pipeline that wait for word of their last payloads.
const MAX_HELD: usize = 4096;

/// Bytes of a name that a record keeps.
const MAX_NAME: usize = 256;

/// What became of a request. Times are milliseconds; what was not seen is `null`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RequestRecord {
    /// Its id inside the pipeline.
    pub request_id: String,
    /// The model, as `vllm_omni:*` has it.
    pub model: Option<String>,
    /// The pipeline's root process.
    pub pipeline_pid: u32,
    /// When it arrived, by the wall clock.
    pub arrived_unix_ms: Option<u64>,
    /// When it was over.
    pub ended_unix_ms: Option<u64>,
    /// From its arrival to its end.
    pub e2e_ms: Option<f64>,
    /// How it ended.
    pub outcome: Outcome,
    /// Why: as `finished_reason` of `vllm_omni:requests_success_total` where it finished, else as `reason` of
    /// `vllm_omni:requests_failed_total`.
    pub reason: Cow<'static, str>,
    /// Tokens of the prompt, at the first stage.
    pub prompt_tokens: Option<u32>,
    /// Tokens that its stages generated.
    pub generated_tokens: u64,
    /// A row for each stage that was given it.
    pub stages: Vec<StageRecord>,
    /// A row for each edge and connector that payloads of it went over.
    pub transfers: Vec<TransferRecord>,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Its last stage finished.
    Finished,
    /// The API server took it back.
    Aborted,
    /// A stage failed, or it ended for a reason that is not seen.
    Failed,
    /// Nothing was seen of it for long.
    TimedOut,
}

impl Outcome {
    /// As in JSON.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Aborted => "aborted",
            Self::Failed => "failed",
            Self::TimedOut => "timed_out",
        }
    }
}

/// What a stage did for a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StageRecord {
    /// `stage` of the families.
    pub stage: Option<u32>,
    /// `replica` of the families.
    pub replica: Option<u32>,
    /// `llm` or `diffusion`, as `stage_type` has it.
    #[serde(rename = "type")]
    pub kind: Cow<'static, str>,
    /// Why it finished; `null`: it had not when the request ended.
    pub finish_reason: Option<Cow<'static, str>>,
    /// In its scheduler's queue, as `vllm:request_queue_time_seconds` and `vllm_omni:stage_in_queue_s` have it.
    pub queue_ms: Option<f64>,
    /// From the request's arrival here to the first token, as `vllm:time_to_first_token_seconds` has it.
    pub first_token_ms: Option<f64>,
    /// From hand-over to finish, as `vllm_omni:stage_gen_time_s` has it.
    pub gen_time_ms: Option<f64>,
    /// Tokens that it was given.
    pub prompt_tokens: Option<u32>,
    /// Tokens that it generated.
    pub generated_tokens: u64,
}

/// What went over an edge for a request: sums over its payloads, `null` where one of them lacks the value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TransferRecord {
    /// Sender.
    pub from_stage: u32,
    /// Sender.
    pub from_replica: u32,
    /// Receiver.
    pub to_stage: u32,
    /// Receiver.
    pub to_replica: u32,
    /// What moved it.
    pub connector: Cow<'static, str>,
    /// Payloads.
    pub payloads: u64,
    /// Bytes of them.
    pub size_bytes: Option<u64>,
    /// At the sender.
    pub tx_ms: Option<f64>,
    /// At the receiver.
    pub rx_ms: Option<f64>,
    /// Between the two.
    pub in_flight_ms: Option<f64>,
}

/// A request that is under way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpenRequest {
    /// Its id inside the pipeline.
    pub request_id: String,
    /// The model, as `vllm_omni:*` has it.
    pub model: Option<String>,
    /// The pipeline's root process.
    pub pipeline_pid: u32,
    /// Since its arrival.
    pub age_ms: Option<f64>,
    /// The stages that were given it, in that order.
    pub stages: Vec<OpenStage>,
}

/// Where a request stands at a stage.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpenStage {
    /// `stage` of the families.
    pub stage: Option<u32>,
    /// `replica` of the families.
    pub replica: Option<u32>,
    /// Whether it has answered, or finished.
    pub state: OpenState,
    /// Tokens that it has generated.
    pub generated_tokens: u64,
}

/// How far a stage is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OpenState {
    /// It was given the request, and has not answered.
    Given,
    /// It has answered.
    Running,
    /// It has finished.
    Finished,
}

/// What moves a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Connector {
    SharedMemory,
    /// Mooncake's store and Yuanrong's data system.
    Store,
    /// Mooncake's, Mori and Yuanrong's.
    TransferEngine,
    Nixl,
    /// None: the payload is part of the request.
    Request,
}

impl Connector {
    fn as_str(self) -> &'static str {
        match self {
            Self::SharedMemory => "shared_memory",
            Self::Store => "store",
            Self::TransferEngine => "transfer_engine",
            Self::Nixl => "nixl",
            Self::Request => "request",
        }
    }
}

/// A stage's times and tokens, in seconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Figures {
    pub(super) queue_s: Option<f64>,
    pub(super) first_token_s: Option<f64>,
    pub(super) prompt_tokens: Option<u32>,
}

impl Figures {
    /// Of a share that no stage has answered for.
    pub(super) fn given(part: &Part) -> Self {
        let has_prompt = part.prompt_tokens != UNKNOWN && part.diffusion.is_none();
        Self {
            prompt_tokens: has_prompt.then_some(part.prompt_tokens),
            ..Self::default()
        }
    }
}

/// Rows of a request that is under way.
#[derive(Debug, Default)]
pub(super) struct Draft {
    /// When it was cut short.
    pub(super) end_ns: Option<u64>,
    stages: Vec<StageRecord>,
    transfers: Vec<TransferRecord>,
}

impl Draft {
    pub(super) fn stage(&mut self, stage: StageRecord) {
        if self.stages.len() < MAX_ROWS {
            self.stages.push(stage);
        }
    }

    /// What a stage that has finished generated.
    pub(super) fn generated(&self, stage: Option<u32>, replica: Option<u32>) -> Option<u64> {
        let mut rows = self.stages.iter();
        let row = rows.find(|row| (row.stage, row.replica) == (stage, replica))?;
        Some(row.generated_tokens)
    }

    pub(super) fn transfer(&mut self, from: End, to: End, connector: Connector, hop: &Hop) {
        add_hop(&mut self.transfers, from, to, connector, hop);
    }

    /// The rows, in the order of the stages.
    pub(super) fn rows(mut self) -> (Vec<StageRecord>, Vec<TransferRecord>) {
        self.stages
            .sort_by_key(|row| (row.stage.unwrap_or(u32::MAX), row.replica));
        sort(&mut self.transfers);
        (self.stages, self.transfers)
    }
}

fn sort(transfers: &mut [TransferRecord]) {
    transfers.sort_by_key(|row| (row.from_stage, row.from_replica, row.to_stage, row.to_replica));
}

fn add_hop(rows: &mut Vec<TransferRecord>, from: End, to: End, connector: Connector, hop: &Hop) {
    let ends = (from.stage, from.replica, to.stage, to.replica);
    let is_it = |row: &TransferRecord| {
        (row.from_stage, row.from_replica, row.to_stage, row.to_replica) == ends
            && row.connector == connector.as_str()
    };
    let at = match rows.iter().position(is_it) {
        Some(at) => at,
        None if rows.len() < MAX_ROWS => {
            rows.push(TransferRecord {
                from_stage: from.stage,
                from_replica: from.replica,
                to_stage: to.stage,
                to_replica: to.replica,
                connector: connector.as_str().into(),
                payloads: 0,
                size_bytes: Some(0),
                tx_ms: Some(0.0),
                rx_ms: Some(0.0),
                in_flight_ms: Some(0.0),
            });
            rows.len() - 1
        }
        None => return,
    };
    let Some(row) = rows.get_mut(at) else { return };
    row.payloads += 1;
    row.size_bytes = row
        .size_bytes
        .zip(hop.size.ok())
        .map(|(sum, size)| sum.saturating_add(whole(size)));
    for (sum, value) in [
        (&mut row.tx_ms, hop.tx),
        (&mut row.rx_ms, hop.rx),
        (&mut row.in_flight_ms, hop.in_flight),
    ] {
        *sum = sum.zip(value.ok()).map(|(sum, value)| round(sum + value * 1e3));
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "sizes are whole numbers from 0 on; a cast of floats saturates"
)]
fn whole(bytes: f64) -> u64 {
    bytes as u64
}

/// Whole microseconds: what the clocks are good for.
fn round(ms: f64) -> f64 {
    (ms * 1e3).round() / 1e3
}

/// Seconds as milliseconds.
pub(super) fn ms(seconds: f64) -> f64 {
    round(seconds * 1e3)
}

/// A monotonic time by the wall clock, in milliseconds since the Unix epoch.
pub(super) fn unix_ms(time_ns: u64, wall_offset_ns: Option<i64>) -> Option<u64> {
    let wall_ns = i64::try_from(time_ns).ok()?.checked_add(wall_offset_ns?)?;
    Some(u64::try_from(wall_ns).ok()? / 1_000_000)
}

/// A name as records have it: of bounded length, and one line.
pub(super) fn name(text: &str) -> String {
    let mut name = String::with_capacity(text.len().min(MAX_NAME));
    for c in text.chars() {
        if name.len() + c.len_utf8() > MAX_NAME {
            break;
        }
        name.push(if c.is_control() { '\u{fffd}' } else { c });
    }
    name
}

/// Nanoseconds as milliseconds.
pub(super) fn age_ms(now_ns: u64, since_ns: u64) -> f64 {
    ms(as_f64(now_ns.saturating_sub(since_ns)) / 1e9)
}

/// Records of one pipeline that wait for word of their last payloads.
#[derive(Debug, Default)]
pub(super) struct Held {
    by_id: FxHashMap<Arc<str>, (u64, RequestRecord)>,
    /// Those whose id came again meanwhile.
    over: Vec<RequestRecord>,
    refused: u64,
}

impl Held {
    pub(super) fn insert(&mut self, id: Arc<str>, record: RequestRecord, until_ns: u64) {
        if self.by_id.len() + self.over.len() >= MAX_HELD {
            self.refused += 1;
            return;
        }
        if let Some((_, before)) = self.by_id.insert(id, (until_ns, record)) {
            self.over.push(before);
        }
    }

    /// A payload of a request that is over has arrived.
    pub(super) fn transfer(&mut self, id: &str, from: End, to: End, connector: Connector, hop: &Hop) {
        if let Some((_, record)) = self.by_id.get_mut(id) {
            add_hop(&mut record.transfers, from, to, connector, hop);
            sort(&mut record.transfers);
        }
    }

    /// Takes out what has waited until `now_ns`, in the order of the requests' ends. Gives the number of those that
    /// there was no room for.
    pub(super) fn take(&mut self, now_ns: u64, out: &mut Vec<RequestRecord>) -> u64 {
        let before = out.len();
        out.append(&mut self.over);
        let over = self.by_id.extract_if(|_, (until_ns, _)| *until_ns <= now_ns);
        out.extend(over.map(|(_, (_, record))| record));
        if let Some(new) = out.get_mut(before..) {
            new.sort_by(|a, b| {
                let key = |record: &RequestRecord| record.ended_unix_ms;
                key(a).cmp(&key(b)).then_with(|| a.request_id.cmp(&b.request_id))
            });
        }
        std::mem::take(&mut self.refused)
    }
}
