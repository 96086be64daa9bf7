//! KV caches that several ranks hand on, by frames as Mori's connector sends them: from the bytes to the text.

#![allow(
    clippy::unwrap_used,
    clippy::float_cmp,
    reason = "a failed unwrap is a failed test; sums of whole numbers are exact"
)]

mod pipeline_support;

use std::{collections::VecDeque, time::Duration};

use omnitap::{
    host::identity::{Change, Flavor, Process, Role},
    metrics::{registry::Limits as RegistryLimits, text::Format},
    observer::Observer,
    pipeline::tracker::Limits,
    wire::frame::Frame,
};
use pipeline_support::{MS, engine, pipeline, process};
use proptest::prelude::*;
use rmp_serde::to_vec_named;
use serde::Serialize;

// As the connector has them: maps, in this order.

#[derive(Serialize)]
struct Query {
    request_id: String,
}

#[derive(Serialize)]
struct Info {
    request_id: String,
    data_size: u64,
    is_fast_path: bool,
}

#[derive(Serialize)]
struct Pull<'a> {
    request_id: String,
    engine_desc_packed: &'a Bytes,
    mem_desc_packed: &'a Bytes,
    dst_offset: u64,
    length: u64,
}

struct Bytes;

impl Serialize for Bytes {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&[0xc1; 300])
    }
}

/// A worker's pid.
fn worker(stage: u32, rank: u32) -> u32 {
    engine(stage, 0) + 1_000 + rank
}

/// Pairs of ranks that a cache passes between, as `get_kv_target_ranks` has them: each rank of the larger side once.
fn pairs(from: u32, to: u32) -> Vec<(u32, u32)> {
    let most = from.max(to);
    (0..most)
        .map(|rank| (rank * from / most, rank * to / most))
        .collect()
}

/// What is sent, in its order: whether by the receiver, and the payload.
type Messages = VecDeque<(bool, Vec<u8>)>;

/// What is sent for one key.
fn messages(key: &str, size: u64, with_query: bool) -> Messages {
    let request_id = || format!("{key}@0_1");
    let query = [
        b"query_info".to_vec(),
        to_vec_named(&Query {
            request_id: request_id(),
        })
        .unwrap(),
    ]
    .concat();
    let info = to_vec_named(&Info {
        request_id: request_id(),
        data_size: size,
        is_fast_path: true,
    });
    let pull = to_vec_named(&Pull {
        request_id: request_id(),
        engine_desc_packed: &Bytes,
        mem_desc_packed: &Bytes,
        dst_offset: 4096,
        length: size,
    });
    let mut all = VecDeque::from([
        (true, query.clone()),
        (false, b"info_not_found".to_vec()),
        (true, query),
        (false, info.unwrap()),
        (true, pull.unwrap()),
        (false, b"trans_done".to_vec()),
    ]);
    if !with_query {
        all.drain(..4);
    }
    all
}

struct Run {
    observer: Observer,
    now_ms: u64,
}

impl Run {
    fn new(from: u32, to: u32) -> Self {
        let limits = RegistryLimits {
            max_series: 10_000,
            retention: Duration::from_mins(15),
        };
        let mut observer = Observer::new(limits, Limits::default());
        observer.change(&Change::Pipeline(pipeline(1, Flavor::Omni)), 0);
        for (stage, ranks) in [(0, from), (1, to)] {
            let role = Role::LlmStage {
                stage: Some(stage),
                replica: Some(0),
            };
            observer.change(&Change::Process(process(1, engine(stage, 0), role)), 0);
            for rank in 0..ranks {
                let worker = Process {
                    parent: engine(stage, 0),
                    ..process(1, worker(stage, rank), Role::Worker)
                };
                observer.change(&Change::Process(worker), 0);
            }
        }
        Self {
            observer,
            now_ms: 1_000,
        }
    }

    fn send(&mut self, pid: u32, socket: u64, parts: &[&[u8]]) {
        self.now_ms += 1;
        for (at, part) in parts.iter().enumerate() {
            let frame = Frame {
                time_ns: self.now_ms * MS,
                pid,
                tid: pid,
                socket,
                content: self.now_ms * 64 + at as u64,
                size: part.len() as u64,
                more: at + 1 < parts.len(),
                aux: false,
                head: part,
                tail: &[],
            };
            let _ = self.observer.frame(&frame);
        }
    }

    /// One message between two ranks. A receiver has a socket for each sender, which has a number for each receiver.
    fn pass(&mut self, (from, to): (u32, u32), by_receiver: bool, payload: &[u8]) {
        if by_receiver {
            self.send(worker(1, to), 0x100 + u64::from(from), &[payload]);
        } else {
            let number = [&[0][..], &(77 + to).to_be_bytes()].concat();
            self.send(worker(0, from), 0x200, &[&number, &[], payload]);
        }
    }

    fn value(&mut self, line: &str) -> f64 {
        self.observer.tick((self.now_ms + 10_000) * MS);
        let mut out = Vec::new();
        self.observer.exposition().render(&mut out, Format::Text);
        let text = String::from_utf8(out).unwrap();
        let values = text.lines().filter_map(|found| found.strip_prefix(line));
        values.filter_map(|value| value.trim().parse::<f64>().ok()).sum()
    }
}

const EDGE: &str = r#"{from_replica="0",from_stage="0",model_name="org/model",to_replica="0",to_stage="1"}"#;

proptest! {
    /// Whatever the numbers of ranks, and in whatever order they speak: one hop for each key, all on one edge.
    #[test]
    fn each_ranks_share_is_a_hop_of_its_replica(
        from in 0..3_u32,
        to in 0..3_u32,
        requests in 1..4_u32,
        with_query: bool,
        turns in prop::collection::vec(any::<prop::sample::Index>(), 200),
    ) {
        let (from, to) = (1 << from, 1 << to);
        let mut run = Run::new(from, to);
        // Each pair of ranks does one request after the other.
        let mut work: Vec<((u32, u32), Messages)> = Vec::new();
        let (mut hops, mut bytes) = (0_u32, 0_u64);
        for pair in pairs(from, to) {
            let mut all = VecDeque::new();
            for request in 0..requests {
                let size = 1_000 + u64::from(hops);
                let id = format!("chatcmpl-{request}-1a2b3c4d");
                let key = if from.max(to) == 1 {
                    format!("omni_0_to_1_kv_cache_{id}")
                } else {
                    format!("{id}_0_0_{}_{}", pair.0, pair.1)
                };
                all.extend(messages(&key, size, with_query));
                (hops, bytes) = (hops + 1, bytes + size);
            }
            work.push((pair, all));
        }
        let mut turns = turns.into_iter().cycle();
        while !work.is_empty() {
            let at = turns.next().unwrap().index(work.len());
            let (pair, all) = &mut work[at];
            let (pair, next) = (*pair, all.pop_front());
            match next {
                Some((by_receiver, payload)) => run.pass(pair, by_receiver, &payload),
                None => drop(work.remove(at)),
            }
        }
        let counted = run.value(&format!("vllm_omni:transfer_size_bytes_count{EDGE} "));
        let open = run.value("omnitap_transfers_open ");
        #[allow(clippy::cast_precision_loss, reason = "some thousands")]
        let bytes = bytes as f64;
        if with_query {
            prop_assert_eq!(counted, f64::from(hops));
            prop_assert_eq!(run.value(&format!("vllm_omni:transfer_size_bytes_sum{EDGE} ")), bytes);
            prop_assert_eq!(run.value(&format!("vllm_omni:transfer_rx_s_count{EDGE} ")), f64::from(hops));
            prop_assert_eq!(open, 0.0);
        } else {
            // Several receivers that never asked for a size can't be told apart while they wait at the same time.
            prop_assert!(counted + open <= f64::from(hops));
        }
        prop_assert_eq!(run.value("omnitap_transfer_stage_mismatches_total "), 0.0);
    }
}
