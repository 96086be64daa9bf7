//! Cost of the pipeline state for one message: a single token, and a batch of 64.

use std::hint::black_box;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use omnitap::{
    host::identity::{Change, Flavor, Pipeline, PipelineId, Process, ProcessKey, Role, Versions},
    metrics::catalogue::Family,
    pipeline::{
        sink::{ExtraId, Scope, ScopeId, Sink},
        tracker::{Limits, Tracker},
    },
    wire::message::{Add, EngineOutputs, FinishReason, Message, Output, PrefillStats},
};

/// Takes everything and keeps nothing.
struct Nothing;

impl Sink for Nothing {
    fn scope(&mut self, scope: &Scope) -> ScopeId {
        ScopeId(scope.stage.map_or(0, |stage| stage + 1))
    }
    fn extra(&mut self, values: &[&str]) -> ExtraId {
        ExtraId(u32::from(!values.is_empty()))
    }
    fn add(&mut self, family: Family, scope: ScopeId, extra: ExtraId, by: f64) {
        black_box((family, scope, extra, by));
    }
    fn observe(&mut self, family: Family, scope: ScopeId, extra: ExtraId, value: f64, times: u64) {
        black_box((family, scope, extra, value, times));
    }
    fn set(&mut self, family: Family, scope: ScopeId, extra: ExtraId, value: f64) {
        black_box((family, scope, extra, value));
    }
    fn skip(&mut self, family: Family, reason: &'static str) {
        black_box((family, reason));
    }
    fn retire(&mut self, scope: ScopeId) {
        black_box(scope);
    }
}

const API: u32 = 100;
const ENGINE: u32 = 200;
const SOCKET: u64 = 0x7f00_1234_5678;

fn idle_tracker() -> Tracker {
    let key = |pid| ProcessKey { pid, start_ticks: 1 };
    let process = |pid, role| {
        Change::Process(Process {
            key: key(pid),
            parent: 1,
            role,
            pipeline: PipelineId(1),
            container: None,
        })
    };
    let mut tracker = Tracker::new(Limits::default());
    tracker.set_wall_offset(0);
    let stage = Role::LlmStage {
        stage: Some(0),
        replica: Some(0),
    };
    for change in [
        Change::Pipeline(Pipeline {
            id: PipelineId(1),
            flavor: Flavor::Omni,
            model: Some("org/model".to_owned()),
            served_model: None,
            versions: Versions::default(),
            max_model_len: Some(4096),
            root: key(API),
        }),
        process(API, Role::ApiServer),
        process(ENGINE, stage),
    ] {
        tracker.change(&change, 0, &mut Nothing);
    }
    tracker
}

fn ids(count: u32) -> Vec<String> {
    (0..count)
        .map(|number| format!("chatcmpl-{number:08x}a1b2c3d4e5f60718-{number:08x}"))
        .collect()
}

fn outputs<'a>(ids: &'a [String], each: impl Fn(&'a str) -> Output<'a>, timestamp: f64) -> Message<'a> {
    Message::Outputs(EngineOutputs {
        outputs: ids.iter().map(|id| each(id)).collect(),
        timestamp: Some(timestamp),
        ..EngineOutputs::default()
    })
}

fn first(id: &str) -> Output<'_> {
    Output {
        prefill: Some(PrefillStats {
            prompt_tokens: 100,
            computed_tokens: 100,
            ..PrefillStats::default()
        }),
        ..token(id)
    }
}

fn token(id: &str) -> Output<'_> {
    Output {
        request_id: id,
        new_tokens: 1,
        ..Output::default()
    }
}

fn last(id: &str) -> Output<'_> {
    Output {
        finish_reason: Some(FinishReason::Stop),
        ..token(id)
    }
}

/// A tracker in which all of `ids` are in their decode phase.
fn decoding(ids: &[String]) -> Tracker {
    let mut tracker = idle_tracker();
    for id in ids {
        add(&mut tracker, id);
    }
    tracker.message(ENGINE, 1, 2_000_000, &outputs(ids, first, 0.002), &mut Nothing);
    tracker
}

fn add(tracker: &mut Tracker, id: &str) {
    let add = Message::Add(Add {
        request_id: id,
        prompt_tokens: Some(100),
        arrival: Some(0.001),
        max_tokens: Some(128),
        n: 1,
        ..Add::default()
    });
    tracker.message(API, SOCKET, 1_000_000, &add, &mut Nothing);
}

fn state(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("pipeline");
    for batch in [1_u32, 64] {
        let ids = ids(batch);
        let mut tracker = decoding(&ids);
        let message = outputs(&ids, token, 0.003);
        group.throughput(Throughput::Elements(u64::from(batch)));
        group.bench_function(format!("decode_step_of_{batch}"), |bencher| {
            bencher.iter(|| tracker.message(ENGINE, 1, 3_000_000, black_box(&message), &mut Nothing));
        });
    }

    // The worst order: no output where the last frame had it, among many open requests.
    let many = ids(10_000);
    let mut tracker = decoding(&many);
    let steps: Vec<Message<'_>> = many.chunks(64).map(|ids| outputs(ids, token, 0.003)).collect();
    let mut step = 0;
    group.throughput(Throughput::Elements(64));
    group.bench_function("unpredicted_step_of_64_among_10000", |bencher| {
        bencher.iter(|| {
            step = (step + 1) % (steps.len() - 1);
            if let Some(message) = steps.get(step) {
                tracker.message(ENGINE, 1, 3_000_000, black_box(message), &mut Nothing);
            }
        });
    });

    let one = ids(1);
    group.throughput(Throughput::Elements(1));
    group.bench_function("whole_request_of_3_messages", |bencher| {
        bencher.iter_batched(
            idle_tracker,
            |mut tracker| {
                for id in &one {
                    add(&mut tracker, id);
                }
                tracker.message(ENGINE, 1, 2_000_000, &outputs(&one, first, 0.002), &mut Nothing);
                tracker.message(ENGINE, 1, 3_000_000, &outputs(&one, last, 0.003), &mut Nothing);
                tracker
            },
            BatchSize::SmallInput,
        );
    });
    group.finish();
}

criterion_group!(benches, state);
criterion_main!(benches);
