//! Recorded frames for the tests of `wire`: what `tests/frames/generate.py` writes.

#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "shared by several test binaries that each use a part of it; a failed unwrap is a failed test"
)]

use std::path::Path;

use omnitap::{
    host::identity::{Flavor, Role, Versions},
    wire::{
        assemble::{Content, Decoded, Decoder},
        frame::Frame,
        message::{Add, EngineOutputs, FinishReason, Message, Output, OutputKind, SchedulerStats},
    },
};
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// One line of a fixture.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Case {
    pub(crate) name: String,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) flavor: Flavor,
    pub(crate) vllm: Option<String>,
    pub(crate) omni: Option<String>,
    hex: String,
    pub(crate) aux: Vec<u64>,
    pub(crate) want: Value,
}

/// The cases of all fixtures.
pub(crate) fn cases() -> Vec<Case> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/frames");
    ["rows.jsonl", "real-0.30.jsonl"]
        .into_iter()
        .flat_map(|name| {
            let text = std::fs::read_to_string(dir.join(name)).unwrap();
            text.lines()
                .map(|line| serde_json::from_str(line).unwrap())
                .collect::<Vec<Case>>()
        })
        .collect()
}

pub(crate) fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

pub(crate) const PID: u32 = 4711;

impl Case {
    pub(crate) fn payload(&self) -> Vec<u8> {
        bytes(&self.hex)
    }

    pub(crate) fn versions(&self) -> Versions {
        Versions {
            vllm: self.vllm.clone(),
            omni: self.omni.clone(),
        }
    }

    /// Whether an engine sends it.
    pub(crate) fn is_from_engine(&self) -> bool {
        matches!(self.kind.as_str(), "outputs" | "ready")
    }

    fn role(&self) -> Role {
        if self.is_from_engine() {
            Role::LlmStage {
                stage: Some(0),
                replica: Some(0),
            }
        } else {
            Role::ApiServer
        }
    }

    /// A decoder that knows the sender.
    pub(crate) fn decoder(&self, versions: &Versions) -> Decoder {
        let mut decoder = Decoder::new();
        decoder.process_known(PID, self.role(), self.flavor, versions);
        decoder
    }

    /// Sends the parts in front of the payload, which has `head` and `tail` of `size` bytes.
    pub(crate) fn decode<'a>(
        &self,
        decoder: &mut Decoder,
        size: usize,
        head: &'a [u8],
        tail: &'a [u8],
    ) -> Decoded<'a> {
        self.envelope(decoder);
        decoder.frame(&Frame {
            more: !self.aux.is_empty(),
            size: size as u64,
            tail,
            ..frame(head)
        })
    }

    /// Sends identity and request type.
    pub(crate) fn envelope(&self, decoder: &mut Decoder) {
        let request: &[u8] = match self.kind.as_str() {
            "add" => &[0],
            "abort" => &[1],
            "wave" => &[2],
            "utility" => &[3],
            _ => return,
        };
        decoder.frame(&Frame {
            more: true,
            ..frame(&[1, 0])
        });
        decoder.frame(&Frame {
            more: true,
            ..frame(request)
        });
    }
}

/// A single-part frame that is wholly there.
pub(crate) fn frame(bytes: &[u8]) -> Frame<'_> {
    Frame {
        time_ns: 5_021_300_000_000,
        pid: PID,
        tid: PID + 1,
        socket: 0x7f00_0000_1000,
        content: 0x7f00_0000_2000,
        size: bytes.len() as u64,
        more: false,
        aux: false,
        head: bytes,
        tail: &[],
    }
}

/// What was decoded, in the form of the fixtures: fields that say nothing are left out.
pub(crate) fn said(decoded: &Decoded<'_>) -> Value {
    let Content::Message { message, .. } = &decoded.content else {
        return json!(format!("{decoded:?}"));
    };
    match message {
        Message::Outputs(outputs) => outputs_said(outputs),
        Message::Add(add) => add_said(add),
        Message::Abort(ids) => json!(ids),
        Message::Utility(utility) => json!([utility.method, utility.level]),
        Message::Ready(ready) => json!([ready.max_model_len, ready.vllm_version]),
        Message::StartDpWave => Value::Null,
        Message::Handshake | Message::EngineDead | Message::Connector { .. } | Message::Diffusion(_) => {
            json!(format!("{message:?}"))
        }
    }
}

fn sparse(pairs: impl IntoIterator<Item = (&'static str, Value)>) -> Value {
    let says = |value: &Value| match value {
        Value::Null => false,
        Value::Array(items) => !items.is_empty(),
        _ => true,
    };
    Value::Object(
        pairs
            .into_iter()
            .filter(|(_, value)| says(value))
            .map(|(name, value)| (name.to_owned(), value))
            .collect::<Map<_, _>>(),
    )
}

/// Counts and flags that can't be absent: left out where they are 0 or false.
fn set<T: Default + PartialEq + Into<Value>>(value: T) -> Value {
    if value == T::default() {
        Value::Null
    } else {
        value.into()
    }
}

fn outputs_said(outputs: &EngineOutputs<'_>) -> Value {
    sparse([
        ("engine_index", set(outputs.engine_index)),
        ("outputs", outputs.outputs.iter().map(output_said).collect()),
        ("stats", outputs.stats.as_ref().map_or(Value::Null, stats_said)),
        ("timestamp", json!(outputs.timestamp)),
        ("finished", json!(outputs.finished_requests)),
        ("utility_reply", set(outputs.is_utility_reply)),
        ("lost", set(outputs.outputs_lost)),
    ])
}

fn output_said(output: &Output<'_>) -> Value {
    let events = output.events;
    let has_events = events != omnitap::wire::message::Events::default();
    let events = json!([events.queued, events.scheduled, events.preemptions]);
    sparse([
        ("request_id", json!(output.request_id)),
        ("new_tokens", set(output.new_tokens)),
        ("finish", json!(output.finish_reason.map(FinishReason::as_str))),
        ("events", if has_events { events } else { Value::Null }),
        (
            "kv_wait",
            output
                .kv_wait
                .map_or(Value::Null, |wait| json!([wait.seconds, wait.connector_type])),
        ),
        (
            "prefill",
            output.prefill.map_or(Value::Null, |stats| {
                json!([
                    stats.prompt_tokens,
                    stats.computed_tokens,
                    stats.cached_tokens,
                    stats.local_cached_tokens,
                    stats.external_cached_tokens
                ])
            }),
        ),
        ("nans", set(output.nans_in_logits)),
        (
            "audio",
            output
                .audio
                .map_or(Value::Null, |audio| json!([audio.frames, audio.sample_rate])),
        ),
        ("segment_finished", set(output.segment_finished)),
        ("num_generation_tokens", json!(output.num_generation_tokens)),
    ])
}

fn stats_said(stats: &SchedulerStats<'_>) -> Value {
    let cache = |stats: Option<omnitap::wire::message::CacheStats>| {
        stats.map_or(Value::Null, |stats| json!([stats.queries, stats.hits]))
    };
    sparse([
        ("running", json!(stats.running)),
        ("waiting", json!(stats.waiting)),
        ("skipped_waiting", json!(stats.skipped_waiting)),
        ("kv_cache_usage", json!(stats.kv_cache_usage)),
        ("prefix_cache", cache(stats.prefix_cache)),
        ("external_prefix_cache", cache(stats.external_prefix_cache)),
        (
            "kv_evictions",
            stats
                .kv_evictions
                .iter()
                .map(|eviction| json!([eviction.lifetime_s, eviction.idle_s, eviction.reuse_gaps_s]))
                .collect(),
        ),
        (
            "spec_decode",
            stats.spec_decode.as_ref().map_or(Value::Null, |stats| {
                json!([
                    stats.drafts,
                    stats.draft_tokens,
                    stats.accepted_tokens,
                    stats.accepted_per_position
                ])
            }),
        ),
        ("waiting_lora", json!(stats.waiting_lora)),
        ("running_lora", json!(stats.running_lora)),
        (
            "perf",
            stats.perf.map_or(Value::Null, |perf| {
                json!([perf.flops, perf.read_bytes, perf.write_bytes])
            }),
        ),
    ])
}

fn add_said(add: &Add<'_>) -> Value {
    sparse([
        ("request_id", json!(add.request_id)),
        ("prompt_tokens", json!(add.prompt_tokens)),
        ("arrival", json!(add.arrival)),
        ("max_tokens", json!(add.max_tokens)),
        ("n", json!(add.n)),
        ("client_index", json!(add.client_index)),
        ("resumable", set(add.resumable)),
        ("external_req_id", json!(add.external_req_id)),
        ("pooling", set(add.is_pooling)),
        (
            "output_kind",
            match add.output_kind {
                OutputKind::Cumulative => Value::Null,
                OutputKind::Delta => json!("delta"),
                OutputKind::FinalOnly => json!("final_only"),
            },
        ),
        ("stop", set(add.has_stop_strings)),
    ])
}
