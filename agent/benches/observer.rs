//! The whole work for a captured frame: decode, state, observation in the registry.
//!
//! The frames are those of `wire.rs`, sent by an engine whose requests the agent saw coming.

#![allow(missing_docs, reason = "criterion's macros make public functions")]

use std::{hint::black_box, path::Path, time::Duration};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use omnitap::{
    host::identity::{Change, Flavor, Pipeline, PipelineId, Process, ProcessKey, Role, Versions},
    metrics::{registry::Limits, text::Format},
    observer::{Observer, Taken},
    pipeline::tracker::Limits as TrackerLimits,
    wire::{
        engine::{self, Payload},
        frame::Frame,
        layout::Layouts,
    },
};
use serde_json::Value;

const API: u32 = 100;
const ENGINE: u32 = 200;
const FRAMES: [(&str, u64); 4] = [
    ("real vllm 0.30.0: decode token", 1),
    ("real vllm 0.30.0: 64 decode tokens", 64),
    ("real omni 0.30.0: decode token", 1),
    ("real omni 0.30.0: 64 decode tokens", 64),
];

fn fixture(name: &str) -> Option<Vec<u8>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/frames/real-0.30.jsonl");
    let text = std::fs::read_to_string(path).ok()?;
    let case = text
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .find(|case| case.get("name").and_then(Value::as_str) == Some(name))?;
    let hex = case.get("hex")?.as_str()?.as_bytes();
    hex.chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok())
        .collect()
}

fn frame(pid: u32, time_ns: u64, bytes: &[u8], more: bool) -> Frame<'_> {
    Frame {
        time_ns,
        pid,
        tid: pid,
        socket: 9,
        content: 10,
        size: bytes.len() as u64,
        more,
        aux: false,
        head: bytes,
        tail: &[],
    }
}

/// `EngineCoreRequest` with 20 elements, or vLLM-Omni's with 24: an id, three prompt tokens, an arrival time.
fn add(id: &str, flavor: Flavor) -> Vec<u8> {
    const NIL: u8 = 0xc0;
    let len: u8 = if flavor == Flavor::Omni { 24 } else { 21 };
    let mut bytes = vec![0xdc, 0, len, 0xd9, u8::try_from(id.len()).unwrap_or(u8::MAX)];
    bytes.extend(id.as_bytes());
    bytes.extend([0x93, 1, 2, 3, NIL, 0x80, NIL, 0xcb]);
    bytes.extend(1.5e9_f64.to_be_bytes());
    bytes.extend(std::iter::repeat_n(NIL, usize::from(len) - 6));
    bytes
}

/// An observer that watches one engine, with the requests of `outputs` open.
fn observer(flavor: Flavor, outputs: &[u8]) -> Observer {
    let key = |pid| ProcessKey { pid, start_ticks: 1 };
    let version = Some("0.30.0".to_owned());
    let versions = Versions {
        vllm: version.clone(),
        omni: version.filter(|_| flavor == Flavor::Omni),
    };
    let limits = Limits {
        max_series: 100_000,
        retention: Duration::from_mins(15),
    };
    let mut observer = Observer::new(limits, TrackerLimits::default());
    observer.wall_offset(0);
    let process = |pid, role| {
        Change::Process(Process {
            key: key(pid),
            parent: 1,
            role,
            pipeline: PipelineId(1),
            container: None,
        })
    };
    let stage = Role::LlmStage {
        stage: Some(0),
        replica: Some(0),
    };
    let pipeline = Pipeline {
        id: PipelineId(1),
        flavor,
        model: Some("org/model".to_owned()),
        served_model: None,
        versions: versions.clone(),
        max_model_len: Some(4096),
        root: key(API),
    };
    for change in [
        Change::Pipeline(pipeline),
        process(API, Role::ApiServer),
        process(ENGINE, stage),
    ] {
        observer.change(&change, 0);
    }
    let layouts = Layouts::new(flavor, &versions);
    let ids = engine::outputs(Payload::whole(outputs), &layouts).map(|seen| {
        seen.message
            .outputs
            .iter()
            .map(|o| o.request_id.to_owned())
            .collect::<Vec<_>>()
    });
    for id in ids.unwrap_or_default() {
        for (part, more) in [(&[0, 0][..], true), (&[0], true), (&add(&id, flavor), false)] {
            observer.frame(&frame(API, 1_000, part, more));
        }
    }
    observer
}

fn whole(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("observer");
    for (name, outputs) in FRAMES {
        let Some(bytes) = fixture(name) else { continue };
        let flavor = if name.contains("omni") {
            Flavor::Omni
        } else {
            Flavor::Vllm
        };
        let mut observer = observer(flavor, &bytes);
        let frame = frame(ENGINE, 2_000_000, &bytes, false);
        group.throughput(Throughput::Elements(outputs));
        group.bench_function(name, |bencher| {
            bencher.iter(|| matches!(black_box(observer.frame(black_box(&frame))), Taken::Known(_)));
        });
        // That the frames did what they should: each output is a token.
        let mut page = Vec::new();
        observer.exposition().render(&mut page, Format::Text);
        let page = String::from_utf8_lossy(&page);
        assert!(page.contains("vllm:generation_tokens_total{"), "{page}");
    }
    group.finish();
}

criterion_group!(benches, whole);
criterion_main!(benches);
