//! Decoding of an engine's frames: the work that the reader thread does for each frame in the ring buffer.
//!
//! `benches/msgspec_decode.py` measures the engine's own client on the same bytes in the same units.

use std::{hint::black_box, path::Path};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use omnitap::{
    host::identity::{Flavor, Role, Versions},
    wire::{
        assemble::{Content, Decoder},
        engine::{self, Payload},
        frame::Frame,
        layout::Layouts,
        message::Message,
    },
};
use serde_json::Value;

/// Names of fixtures that both benchmarks decode; `msgspec_decode.py` has the same list.
const FRAMES: [(&str, u64); 8] = [
    ("real vllm 0.30.0: decode token", 1),
    ("real vllm 0.30.0: 64 decode tokens", 64),
    ("real vllm 0.30.0: first token", 1),
    ("real vllm 0.30.0: first token with statistics", 1),
    ("real omni 0.30.0: decode token", 1),
    ("real omni 0.30.0: 64 decode tokens", 64),
    ("real omni 0.30.0: first token", 1),
    ("real omni 0.30.0: first token with statistics", 1),
];

fn fixtures() -> Vec<(String, Vec<u8>)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/frames/real-0.30.jsonl");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines()
        .filter_map(|line| {
            let case: Value = serde_json::from_str(line).ok()?;
            let hex = case.get("hex")?.as_str()?.as_bytes();
            let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
            Some((
                case.get("name")?.as_str()?.to_owned(),
                hex.chunks(2).map_while(byte).collect(),
            ))
        })
        .collect()
}

fn decode(criterion: &mut Criterion) {
    let fixtures = fixtures();
    for (name, outputs) in FRAMES {
        let Some((_, bytes)) = fixtures.iter().find(|(found, _)| found == name) else {
            continue;
        };
        let is_omni = name.contains("omni");
        let version = Some("0.30.0".to_owned());
        let versions = Versions {
            vllm: version.clone(),
            omni: version.filter(|_| is_omni),
        };
        let flavor = if is_omni { Flavor::Omni } else { Flavor::Vllm };
        let layouts = Layouts::new(flavor, &versions);

        let mut group = criterion.benchmark_group("wire");
        group.throughput(Throughput::Elements(outputs));
        // The payload alone: what msgspec's decoder does.
        group.bench_function(format!("decode/{name}"), |bencher| {
            bencher.iter(|| {
                let seen = engine::outputs(Payload::whole(black_box(bytes)), &layouts);
                seen.map_or(0, |seen| black_box(seen).message.outputs.len())
            });
        });
        // With all that the agent does for a frame before the state machines.
        let mut decoder = Decoder::new();
        decoder.process_known(
            7,
            Role::LlmStage {
                stage: Some(0),
                replica: Some(0),
            },
            flavor,
            &versions,
        );
        let frame = Frame {
            time_ns: 1,
            pid: 7,
            tid: 8,
            socket: 9,
            content: 10,
            size: bytes.len() as u64,
            more: false,
            aux: false,
            head: bytes,
            tail: &[],
        };
        group.bench_function(format!("frame/{name}"), |bencher| {
            bencher.iter(|| match black_box(decoder.frame(black_box(&frame))).content {
                Content::Message {
                    message: Message::Outputs(outputs),
                    ..
                } => outputs.outputs.len(),
                _ => 0,
            });
        });
        group.finish();
    }
}

criterion_group!(benches, decode);
criterion_main!(benches);
