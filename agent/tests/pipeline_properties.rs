//! Random interleavings of everything that can happen to a pipeline.

#![allow(clippy::float_cmp, reason = "counts and gauges are exact")]

mod pipeline_support;

use omnitap::{
    host::identity::{Flavor, PipelineId, Role},
    metrics::catalogue::Family,
    pipeline::{records::Outcome, tracker::Limits},
    wire::{
        diffusion::{Diffusion, DiffusionAdd, DiffusionMetrics, DiffusionResult, Images, ResultKind},
        message::{Add, Audio, FinishReason, Message, Output, OutputKind, SchedulerStats},
    },
};
use pipeline_support::{API, Play, add, engine, frame};
use proptest::prelude::*;

const STAGES: u32 = 3;
const REQUESTS: usize = 8;
const MAX_REQUESTS: usize = 6;
/// Replicas of the diffusion stage behind the LLM stages: their processes, and the API server's sockets to them.
const PICTURES: [u32; 2] = [300, 301];
const LANES: [u64; 2] = [70, 71];

fn picture_role(replica: usize) -> Role {
    Role::DiffusionStage {
        stage: Some(STAGES),
        replica: u32::try_from(replica).ok(),
    }
}

#[derive(Clone, Debug)]
enum Step {
    Add {
        request: usize,
        stage: u32,
        resumable: bool,
        has_stop_strings: bool,
    },
    Output {
        request: usize,
        stage: u32,
        is_first: bool,
        tokens: u32,
        finish: Option<usize>,
        segment: bool,
        audio: Option<u64>,
        summed: Option<u32>,
        lost: u32,
        timestamp: Option<f64>,
    },
    Finished {
        request: usize,
        stage: u32,
    },
    Abort {
        request: usize,
        stage: u32,
    },
    Stats {
        stage: u32,
        running: u64,
        waiting: u64,
    },
    Dead {
        stage: u32,
    },
    Restart {
        stage: u32,
    },
    RestartApi,
    Picture {
        request: usize,
        replica: usize,
        what: Picture,
    },
    Tick,
    Wait {
        ms: u64,
    },
}

/// What happens at a replica of the diffusion stage.
#[derive(Clone, Debug)]
enum Picture {
    Add {
        steps: Option<u32>,
    },
    Abort,
    Result {
        finished: Option<bool>,
        is_start: bool,
        failed: bool,
        images: Option<u32>,
        ms: Option<f64>,
        waiting: u64,
    },
    Error,
    Snapshot {
        waiting: u64,
    },
    Dead,
    Restart,
}

fn picture() -> impl Strategy<Value = Picture> {
    let result = (
        prop::option::weighted(0.9, prop::bool::weighted(0.8)),
        prop::bool::weighted(0.1),
        prop::bool::weighted(0.1),
        prop::option::of(0_u32..4),
        prop::option::of(prop::num::f64::ANY),
        any::<u64>(),
    );
    prop_oneof![
        4 => prop::option::of(0_u32..50).prop_map(|steps| Picture::Add { steps }),
        1 => Just(Picture::Abort),
        5 => result.prop_map(|(finished, is_start, failed, images, ms, waiting)| Picture::Result {
            finished, is_start, failed, images, ms, waiting,
        }),
        1 => Just(Picture::Error),
        1 => any::<u64>().prop_map(|waiting| Picture::Snapshot { waiting }),
        1 => Just(Picture::Dead),
        1 => Just(Picture::Restart),
    ]
}

fn show(play: &mut Play, names: &mut Names, now: u64, (request, replica): (usize, usize), what: &Picture) {
    let (pid, lane) = (PICTURES[replica], LANES[replica]);
    let id = names.names[request].clone();
    let say = |play: &mut Play, message| play.send(now, pid, &Message::Diffusion(message));
    let ask = |play: &mut Play, message| play.send_on(now, API, lane, &Message::Diffusion(message));
    match *what {
        Picture::Add { steps } => {
            let add = DiffusionAdd {
                request_id: &id,
                size: 100,
                steps,
            };
            ask(play, Diffusion::Add(add));
        }
        Picture::Abort => {
            ask(play, Diffusion::Abort(vec![&id]));
            names.renew(request);
        }
        Picture::Result {
            finished,
            is_start,
            failed,
            images,
            ms,
            waiting,
        } => {
            let result = DiffusionResult {
                request_id: &id,
                finished,
                is_start,
                failed,
                kind: images.map(|_| ResultKind::Image),
                images: images.map(|count| Images {
                    count,
                    pixels: Some(u64::from(count) * 4096),
                }),
                metrics: images.map(|_| DiffusionMetrics {
                    exec_ms: ms,
                    queue_wait_ms: ms,
                    waiting: Some(waiting),
                    ..DiffusionMetrics::default()
                }),
                peak_memory_mb: ms,
            };
            say(play, Diffusion::Result(result));
        }
        Picture::Error => say(
            play,
            Diffusion::Error {
                request_id: &id,
                waiting: None,
            },
        ),
        Picture::Snapshot { waiting } => say(
            play,
            Diffusion::Snapshot {
                waiting: Some(waiting),
            },
        ),
        Picture::Dead => play.send(now, pid, &Message::EngineDead),
        Picture::Restart => {
            play.stop(now, pid);
            play.start(pid, picture_role(replica));
        }
    }
}

fn step() -> impl Strategy<Value = Step> {
    let request = 0..REQUESTS;
    let stage = 0..STAGES;
    prop_oneof![
        6 => (request.clone(), stage.clone(), any::<bool>(), any::<bool>()).prop_map(
            |(request, stage, resumable, has_stop_strings)| Step::Add {
                request,
                stage,
                resumable: resumable && has_stop_strings,
                has_stop_strings,
            }
        ),
        12 => (
            (request.clone(), stage.clone(), any::<bool>(), 0_u32..3, prop::option::weighted(0.3, 0_usize..5)),
            (prop::bool::weighted(0.1), prop::option::of(0_u64..5_000), prop::option::weighted(0.1, 0_u32..50)),
            (prop::sample::select(vec![0_u32, 0, 0, 1]), prop::option::weighted(0.9, prop::num::f64::ANY)),
        )
            .prop_map(
                |((request, stage, is_first, tokens, finish), (segment, audio, summed), (lost, timestamp))| {
                    Step::Output {
                        request,
                        stage,
                        is_first,
                        tokens,
                        finish,
                        segment,
                        audio,
                        summed,
                        lost,
                        timestamp,
                    }
                }
            ),
        1 => (request.clone(), stage.clone()).prop_map(|(request, stage)| Step::Finished { request, stage }),
        2 => (request.clone(), stage.clone()).prop_map(|(request, stage)| Step::Abort { request, stage }),
        8 => (request, 0..PICTURES.len(), picture())
            .prop_map(|(request, replica, what)| Step::Picture { request, replica, what }),
        1 => (stage.clone(), 0_u64..9, 0_u64..9)
            .prop_map(|(stage, running, waiting)| Step::Stats { stage, running, waiting }),
        1 => stage.clone().prop_map(|stage| Step::Dead { stage }),
        1 => stage.prop_map(|stage| Step::Restart { stage }),
        1 => Just(Step::RestartApi),
        2 => Just(Step::Tick),
        4 => (0_u64..4_000).prop_map(|ms| Step::Wait { ms }),
    ]
}

/// Ids of one run: an aborted request never comes back under its id.
struct Names {
    names: Vec<String>,
    number: usize,
}

impl Names {
    fn new() -> Self {
        Self {
            names: (0..REQUESTS).map(|request| format!("r{request}-0")).collect(),
            number: 0,
        }
    }

    fn renew(&mut self, request: usize) {
        self.number += 1;
        self.names[request] = format!("r{request}-{}", self.number);
    }
}

/// Plays the steps, then lets everything time out.
fn run(play: &mut Play, steps: &[Step]) {
    let mut names = Names::new();
    let mut now = 1_000;
    for step in steps {
        now += 1;
        match step {
            Step::Add {
                request,
                stage,
                resumable,
                has_stop_strings,
            } => {
                let add = Add {
                    resumable: *resumable,
                    has_stop_strings: *has_stop_strings,
                    output_kind: if *resumable {
                        OutputKind::Delta
                    } else {
                        OutputKind::Cumulative
                    },
                    ..add(&names.names[*request], now)
                };
                play.add(now, u64::from(*stage), add);
            }
            Step::Output {
                request,
                stage,
                is_first,
                tokens,
                finish,
                segment,
                audio,
                summed,
                lost,
                timestamp,
            } => {
                let id = names.names[*request].as_str();
                let output = Output {
                    new_tokens: *tokens,
                    finish_reason: finish.map(|reason| FinishReason::ALL[reason]),
                    segment_finished: *segment,
                    audio: audio.map(|frames| Audio {
                        frames,
                        sample_rate: (frames % 2 == 0).then_some(24_000),
                    }),
                    num_generation_tokens: *summed,
                    ..if *is_first {
                        pipeline_support::first(id)
                    } else {
                        pipeline_support::token(id)
                    }
                };
                let mut message = frame(now, vec![output]);
                message.outputs_lost = *lost;
                message.timestamp = timestamp.map_or(message.timestamp, Some);
                play.send(now, engine(*stage, 0), &Message::Outputs(message));
            }
            Step::Finished { request, stage } => {
                let mut message = frame(now, Vec::new());
                message.finished_requests = vec![&names.names[*request]];
                play.send(now, engine(*stage, 0), &Message::Outputs(message));
            }
            Step::Abort { request, stage } => {
                play.abort(now, u64::from(*stage), &names.names[*request]);
                names.renew(*request);
            }
            Step::Stats {
                stage,
                running,
                waiting,
            } => play.stats(
                now,
                *stage,
                SchedulerStats {
                    running: *running,
                    waiting: *waiting,
                    ..SchedulerStats::default()
                },
            ),
            Step::Dead { stage } => play.send(now, engine(*stage, 0), &Message::EngineDead),
            Step::Restart { stage } => {
                play.stop(now, engine(*stage, 0));
                play.start_engine(*stage, 0);
            }
            Step::RestartApi => {
                play.stop(now, API);
                play.start(API, Role::ApiServer);
            }
            Step::Picture {
                request,
                replica,
                what,
            } => show(play, &mut names, now, (*request, *replica), what),
            Step::Tick => play.tick(now),
            Step::Wait { ms } => now += ms,
        }
    }
    for minutes in 1..=40 {
        play.tick(now + minutes * 60_000);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn whatever_happens_requests_are_conserved_and_nothing_stays(
        steps in prop::collection::vec(step(), 1..120),
        is_plain in any::<bool>(),
    ) {
        let flavor = if is_plain { Flavor::Vllm } else { Flavor::Omni };
        let limits = Limits { max_requests: MAX_REQUESTS, ..Limits::default() };
        let mut play = Play::of(flavor, limits);
        play.start(API, Role::ApiServer);
        for stage in 0..STAGES {
            play.start_engine(stage, 0);
        }
        for (replica, &pid) in PICTURES.iter().enumerate() {
            play.start(pid, picture_role(replica));
        }
        play.tracker.want_records(true);
        run(&mut play, &steps);

        let mut records = Vec::new();
        prop_assert_eq!(play.tracker.take_records(u64::MAX, &mut records), 0);
        let sink = &play.sink;
        let ended = sink.sum(Family::OmniRequestsSuccessTotal);
        let failed = sink.sum(Family::OmniRequestsFailedTotal);
        prop_assert!(failed <= ended, "each failure is one of the requests that ended");
        let with_families = records.iter().filter(|record| record.outcome != Outcome::TimedOut).count();
        if !is_plain {
            let counted = f64::from(u32::try_from(with_families).expect("few"));
            prop_assert_eq!(counted, ended, "each request that is counted leaves a record");
        }
        prop_assert_eq!(play.tracker.tracked_requests(), 0);
        prop_assert_eq!(play.tracker.open_requests(PipelineId(1)), 0);
        for family in [Family::OmniNumRequestsRunning, Family::OmniNumRequestsWaiting] {
            prop_assert_eq!(sink.gauge(family, (None, None), &[]).unwrap_or(0.0), 0.0);
        }
        for replica in 0..PICTURES.len() {
            let at = (Some(STAGES), u32::try_from(replica).ok());
            let waiting = sink.gauge(Family::OmniStageWaitingRequests, at, &[]);
            prop_assert!(waiting.is_none_or(|waiting| waiting == 0.0), "{:?} still wait", waiting);
        }
        for stage in 0..STAGES {
            for family in [
                Family::VllmNumRequestsRunning,
                Family::VllmNumRequestsWaiting,
                Family::VllmKvCacheUsagePerc,
            ] {
                let value = sink.gauge(family, (Some(stage), Some(0)), &[]);
                prop_assert_eq!(value, Some(0.0), "{:?} of stage {}", family, stage);
            }
        }
        for ((family, _), samples) in &sink.samples {
            prop_assert!(
                samples.iter().all(|value| value.is_finite() && *value >= 0.0),
                "{:?} {:?}", family, samples
            );
        }
    }

    /// Every request that is started and ends, in whatever way and order, is counted exactly once.
    #[test]
    fn every_started_request_is_counted_once(
        ends in prop::collection::vec((0_u32..STAGES, 0_u8..4, 0_u64..3_000), 1..40),
    ) {
        let mut play = Play::of(Flavor::Omni, Limits::default());
        play.start(API, Role::ApiServer);
        for stage in 0..STAGES {
            play.start_engine(stage, 0);
        }
        let names: Vec<String> = (0..ends.len()).map(|number| format!("r{number}")).collect();
        for id in &names {
            for stage in 0..STAGES {
                play.add(10, u64::from(stage), add(id, 10));
            }
            for stage in 0..STAGES {
                play.out(20, stage, vec![pipeline_support::first(id)]);
            }
        }
        for (id, (at_stage, how, wait)) in names.iter().zip(&ends) {
            let now = 1_000 + wait;
            match how {
                0 => play.abort(now, u64::from(*at_stage), id),
                1 => play.out(now, *at_stage, vec![pipeline_support::last(id, FinishReason::Error)]),
                2 => play.out(now, *at_stage, vec![pipeline_support::last(id, FinishReason::Abort)]),
                _ => {}
            }
            // The rest arrives all the same; late outputs must change nothing.
            for stage in (0..STAGES).chain(0..STAGES) {
                play.out(now + 5, stage, vec![pipeline_support::last(id, FinishReason::Stop)]);
            }
        }
        play.tick(100_000);
        prop_assert_eq!(play.tracker.tracked_requests(), 0);
        let count = |how: &[u8]| ends.iter().filter(|end| how.contains(&end.1)).count();
        let exact = |value: usize| f64::from(u32::try_from(value).unwrap());
        let sink = &play.sink;
        prop_assert_eq!(sink.total(Family::OmniRequestsSuccessTotal, &["stop"]), exact(count(&[3])));
        prop_assert_eq!(sink.total(Family::OmniRequestsSuccessTotal, &["abort"]), exact(count(&[0, 1, 2])));
        prop_assert_eq!(sink.sum(Family::OmniRequestsSuccessTotal), exact(ends.len()));
        prop_assert_eq!(
            sink.total(Family::OmniRequestsFailedTotal, &["client_disconnect"]), exact(count(&[0])));
        prop_assert_eq!(sink.total(Family::OmniRequestsFailedTotal, &["stage_error"]), exact(count(&[1])));
        prop_assert_eq!(sink.total(Family::OmniRequestsFailedTotal, &["unknown"]), exact(count(&[2])));
        prop_assert_eq!(sink.seen_whole(Family::OmniE2eRequestLatencyS).len(), count(&[3]));
    }
}
