//! Diffusion stages in processes of their own: what each message means for requests and families.

#![allow(clippy::float_cmp, reason = "counts and gauges are exact")]

mod pipeline_support;

use omnitap::{
    host::identity::{Change, Flavor, Role},
    metrics::catalogue::Family,
    pipeline::tracker::Limits,
    wire::{
        diffusion::{Diffusion, DiffusionAdd, DiffusionMetrics, DiffusionResult, Images, ResultKind},
        message::{FinishReason, Message, SchedulerStats},
    },
};
use pipeline_support::{API, Play, add, assert_close, engine, first, key_of, last};
use rstest::rstest;

/// Sockets of the API server to the first and second replica of the diffusion stage.
const LANES: [u64; 2] = [70, 71];

const NONE: [f64; 0] = [];

const fn picture(replica: u32) -> u32 {
    300 + replica
}

fn role(stage: Option<u32>, replica: u32) -> Role {
    Role::DiffusionStage {
        stage,
        replica: Some(replica),
    }
}

/// One LLM stage and one diffusion stage behind it.
fn pictures(replicas: u32) -> Play {
    let mut play = Play::omni(1);
    for replica in 0..replicas {
        play.start(picture(replica), role(Some(1), replica));
    }
    play
}

fn say(play: &mut Play, at_ms: u64, replica: u32, message: Diffusion<'_>) {
    play.send(at_ms, picture(replica), &Message::Diffusion(message));
}

fn ask(play: &mut Play, at_ms: u64, lane: usize, id: &str) {
    let steps = Some(20);
    let message = Diffusion::Add(DiffusionAdd {
        request_id: id,
        size: 700,
        steps,
    });
    play.send_on(at_ms, API, LANES[lane], &Message::Diffusion(message));
}

fn leave(play: &mut Play, at_ms: u64, lane: usize, id: &str) {
    let message = Message::Diffusion(Diffusion::Abort(vec![id]));
    play.send_on(at_ms, API, LANES[lane], &message);
}

fn metrics() -> DiffusionMetrics {
    DiffusionMetrics {
        steps: Some(30),
        preprocess_ms: Some(0.0),
        exec_ms: Some(3000.0),
        postprocess_ms: Some(25.0),
        waiting: Some(0),
        ..DiffusionMetrics::default()
    }
}

fn result(id: &str) -> DiffusionResult<'_> {
    DiffusionResult {
        request_id: id,
        finished: Some(true),
        kind: Some(ResultKind::Image),
        images: Some(Images {
            count: 2,
            pixels: Some(2 << 20),
        }),
        metrics: Some(metrics()),
        peak_memory_mb: Some(512.25),
        ..DiffusionResult::default()
    }
}

/// The sample of a stage's replica.
fn seen(play: &Play, family: Family, replica: u32) -> Vec<f64> {
    play.sink.seen_at(family, (Some(1), Some(replica)), &[])
}

fn generation(play: &Play) -> Vec<f64> {
    let at = (Some(1), Some(0));
    play.sink.seen_at(Family::OmniStageGenTimeS, at, &["diffusion"])
}

/// What of the pipeline's own families was skipped, and why.
fn skipped(play: &Play) -> Vec<(Family, &'static str)> {
    let of_pipeline = |(family, _): &&(Family, &str)| {
        family.name().starts_with("vllm_omni:") && !family.name().contains(":transfer_")
    };
    play.sink.skipped.keys().filter(of_pipeline).copied().collect()
}

fn words_then_picture(play: &mut Play, id: &str) {
    play.add(100, 0, add(id, 0));
    play.out(200, 0, vec![first(id), last(id, FinishReason::Length)]);
    ask(play, 210, 0, id);
}

/// Size, tx and in-flight of the hops between the first replicas of both stages.
fn hops(play: &Play) -> [Vec<f64>; 3] {
    [
        Family::OmniTransferSizeBytes,
        Family::OmniTransferTxS,
        Family::OmniTransferInFlightS,
    ]
    .map(|family| play.sink.seen_at(family, (None, None), &["0", "0", "1", "0"]))
}

/// From the start on all that the words' stage gives to a connector is seen.
fn attend(play: &mut Play) {
    let (key, seen) = (key_of(engine(0, 0)), true);
    play.change(0, &Change::Payloads { key, seen });
}

/// What the words are made into travels in the request: the stages have no connector.
#[rstest]
#[case::with_a_picture(Diffusion::Result(result("r")))]
#[case::with_a_part_of_it(Diffusion::Result(DiffusionResult { finished: Some(false), ..result("r") }))]
#[case::that_fails(Diffusion::Error { request_id: "r", waiting: None })]
fn the_request_is_a_hop_between_the_stages(#[case] answer: Diffusion<'_>) {
    let mut play = pictures(1);
    attend(&mut play);
    words_then_picture(&mut play, "r");
    assert_eq!(
        hops(&play),
        [NONE, NONE, NONE],
        "who has it is not known before it answers"
    );
    say(&mut play, 4_210, 0, answer.clone());
    // Said again, it is no other hop.
    say(&mut play, 4_220, 0, answer);
    let [sizes, tx, in_flight] = hops(&play);
    assert_eq!((sizes, in_flight), (vec![700.0], vec![]));
    assert_close(&tx, &[0.01]);
}

/// The cache of the words' stage goes through shared memory: the request beside it is no hop of its own.
#[test]
fn a_connector_between_the_stages_counts_alone() {
    let mut play = pictures(1);
    attend(&mut play);
    let key = "omni_0_to_1_kv_cache_r-1a2b3c4d";
    play.add(100, 0, add("r-1a2b3c4d", 0));
    let outputs = vec![first("r-1a2b3c4d"), last("r-1a2b3c4d", FinishReason::Length)];
    play.out(200, 0, outputs);
    play.put(engine(0, 0), key, 283, (201, 202));
    ask(&mut play, 210, 0, "r-1a2b3c4d");
    play.get(picture(0), key, (212, 213));
    say(&mut play, 4_210, 0, Diffusion::Result(result("r-1a2b3c4d")));
    assert_eq!(hops(&play)[0], [283.0]);
}

/// Where the request was given to the picture's stage before the words were done, its input comes another way.
#[test]
fn a_request_before_the_words_is_no_hop() {
    let mut play = pictures(1);
    attend(&mut play);
    play.add(100, 0, add("r", 0));
    ask(&mut play, 110, 0, "r");
    play.out(200, 0, vec![first("r"), last("r", FinishReason::Length)]);
    say(&mut play, 4_210, 0, Diffusion::Result(result("r")));
    assert_eq!(hops(&play), [NONE, NONE, NONE]);
}

#[test]
fn a_connector_that_is_not_read_may_have_moved_the_words() {
    let mut play = pictures(1);
    let (key, seen) = (key_of(engine(0, 0)), false);
    play.change(0, &Change::Payloads { key, seen });
    words_then_picture(&mut play, "r");
    say(&mut play, 4_210, 0, Diffusion::Result(result("r")));
    assert_eq!(hops(&play), [NONE, NONE, NONE]);
    assert_eq!(
        play.sink
            .skips(Family::OmniTransferSizeBytes, "connector_not_seen"),
        1
    );
}

#[test]
fn a_request_through_both_stages() {
    let mut play = pictures(1);
    words_then_picture(&mut play, "r");
    assert_eq!(play.tracker.tracked_requests(), 1);
    say(
        &mut play,
        4_210,
        0,
        Diffusion::Result(DiffusionResult {
            metrics: Some(DiffusionMetrics {
                queue_wait_ms: Some(0.0),
                vae_decode_ms: Some(400.0),
                forward_ms: Some(2000.0),
                kv_recv_ms: Some(8.0),
                ..metrics()
            }),
            ..result("r")
        }),
    );
    let samples = [
        (Family::OmniDiffusionExecS, 3.0),
        // The steps that were asked for, not those that the engine names.
        (Family::OmniDiffusionExecPerStepS, 3.0 / 20.0),
        (Family::OmniDiffusionPreprocessS, 0.0),
        (Family::OmniDiffusionPostprocessS, 0.025),
        (Family::OmniStageInQueueS, 0.0),
        (Family::OmniVaeDecodeS, 0.4),
        (Family::OmniDiffusionForwardS, 2.0),
        (Family::OmniDenoiseStepLatencyS, 0.1),
        (Family::OmniDiffusionKvLoadS, 0.008),
        (Family::OmniNumInferenceSteps, 20.0),
        (Family::OmniImagePixels, 2_097_152.0),
        (Family::OmniImageTtfpS, 4.0),
    ];
    for (family, value) in samples {
        assert_close(&seen(&play, family, 0), &[value]);
    }
    assert_close(&generation(&play), &[4.0]);
    let sink = &play.sink;
    assert_eq!(sink.counter(Family::OmniImageCountTotal, 1, &[]), 2.0);
    assert_eq!(
        sink.gauge(Family::OmniPeakMemoryMb, (Some(1), Some(0)), &[]),
        Some(512.25)
    );
    assert_close(&sink.seen_whole(Family::OmniE2eRequestLatencyS), &[4.21]);
    assert_eq!(sink.total(Family::OmniRequestsSuccessTotal, &["stop"]), 1.0);
    assert_eq!(sink.sum(Family::OmniRequestsSuccessTotal), 1.0);
    assert_eq!(sink.total(Family::OmniPromptTokensTotal, &[]), 10.0);
    assert_eq!(sink.total(Family::OmniGenerationTokensTotal, &[]), 2.0);
    assert_eq!(skipped(&play), []);
    assert_eq!(play.tracker.tracked_requests(), 0);
}

#[test]
fn what_an_engine_does_not_report_gives_no_sample() {
    let mut play = pictures(1);
    words_then_picture(&mut play, "r");
    let nothing = DiffusionResult {
        metrics: Some(DiffusionMetrics::default()),
        peak_memory_mb: Some(0.0),
        ..result("r")
    };
    say(&mut play, 1_000, 0, Diffusion::Result(nothing));
    let families = [
        Family::OmniDiffusionExecS,
        Family::OmniDiffusionExecPerStepS,
        Family::OmniDiffusionPreprocessS,
        Family::OmniDiffusionPostprocessS,
        Family::OmniStageInQueueS,
        Family::OmniVaeDecodeS,
        Family::OmniDiffusionForwardS,
        Family::OmniDenoiseStepLatencyS,
        Family::OmniDiffusionKvLoadS,
    ];
    for family in families {
        assert_eq!(seen(&play, family, 0), NONE, "{family:?}");
    }
    assert_eq!(
        play.sink.gauge(Family::OmniPeakMemoryMb, (Some(1), Some(0)), &[]),
        None
    );
    assert_eq!(skipped(&play), []);
}

#[rstest]
#[case::infinite(f64::INFINITY)]
#[case::not_a_number(f64::NAN)]
#[case::negative(-1.0)]
fn an_absurd_time_is_skipped(#[case] ms: f64) {
    let mut play = pictures(1);
    words_then_picture(&mut play, "r");
    let absurd = DiffusionResult {
        metrics: Some(DiffusionMetrics {
            exec_ms: Some(ms),
            ..metrics()
        }),
        peak_memory_mb: Some(ms),
        ..result("r")
    };
    say(&mut play, 1_000, 0, Diffusion::Result(absurd));
    assert_eq!(seen(&play, Family::OmniDiffusionExecS, 0), NONE);
    assert_eq!(play.sink.skips(Family::OmniDiffusionExecS, "not_plausible"), 1);
    assert_eq!(
        play.sink.gauge(Family::OmniPeakMemoryMb, (Some(1), Some(0)), &[]),
        None
    );
}

#[test]
fn a_last_result_that_comes_again_counts_once() {
    let mut play = pictures(1);
    words_then_picture(&mut play, "r");
    for at_ms in [1_000, 1_001, 9_000] {
        say(&mut play, at_ms, 0, Diffusion::Result(result("r")));
        play.tick(at_ms);
    }
    assert_eq!(generation(&play).len(), 1);
    assert_eq!(seen(&play, Family::OmniDiffusionExecS, 0).len(), 1);
    assert_eq!(play.sink.counter(Family::OmniImageCountTotal, 1, &[]), 2.0);
    assert_eq!(play.sink.sum(Family::OmniRequestsSuccessTotal), 1.0);
}

#[test]
fn the_first_image_of_a_stream_is_the_first_packet_and_the_last_result_ends_it() {
    let mut play = pictures(1);
    words_then_picture(&mut play, "r");
    let start = DiffusionResult {
        is_start: true,
        finished: Some(false),
        images: Some(Images::default()),
        ..result("r")
    };
    say(&mut play, 300, 0, Diffusion::Result(start));
    for at_ms in [1_210, 2_210] {
        let part = DiffusionResult {
            finished: Some(false),
            ..result("r")
        };
        say(&mut play, at_ms, 0, Diffusion::Result(part));
    }
    assert_eq!(generation(&play), NONE);
    say(&mut play, 3_210, 0, Diffusion::Result(result("r")));
    assert_close(&seen(&play, Family::OmniImageTtfpS, 0), &[1.0]);
    assert_close(&generation(&play), &[3.0]);
    assert_eq!(seen(&play, Family::OmniDiffusionExecS, 0).len(), 1);
}

#[test]
fn a_video_is_no_image() {
    let mut play = pictures(1);
    words_then_picture(&mut play, "r");
    let video = DiffusionResult {
        kind: Some(ResultKind::Other),
        metrics: Some(DiffusionMetrics {
            forward_ms: Some(10.0),
            ..metrics()
        }),
        ..result("r")
    };
    say(&mut play, 1_000, 0, Diffusion::Result(video));
    assert_eq!(seen(&play, Family::OmniDiffusionForwardS, 0).len(), 1);
    for family in [
        Family::OmniDenoiseStepLatencyS,
        Family::OmniImagePixels,
        Family::OmniImageTtfpS,
    ] {
        assert_eq!(seen(&play, family, 0), NONE, "{family:?}");
    }
    assert_eq!(play.sink.sum(Family::OmniImageCountTotal), 0.0);
}

#[test]
fn a_frame_that_was_cut_still_ends_its_request() {
    let mut play = pictures(1);
    words_then_picture(&mut play, "r");
    let cut = DiffusionResult {
        request_id: "r",
        peak_memory_mb: Some(7.0),
        ..DiffusionResult::default()
    };
    say(&mut play, 1_210, 0, Diffusion::Result(cut));
    assert_close(&generation(&play), &[1.0]);
    assert_eq!(play.sink.sum(Family::OmniRequestsSuccessTotal), 1.0);
    assert_eq!(play.sink.skips(Family::OmniDiffusionExecS, "frame_cut"), 1);
    assert_eq!(play.sink.skips(Family::OmniImagePixels, "frame_cut"), 1);
    // The request told the steps.
    assert_eq!(seen(&play, Family::OmniNumInferenceSteps, 0), [20.0]);
}

#[test]
fn a_failed_request_is_a_stage_error_once() {
    let mut play = pictures(1);
    for id in ["a", "b"] {
        words_then_picture(&mut play, id);
    }
    let error = Diffusion::Error {
        request_id: "a",
        waiting: Some(1),
    };
    say(&mut play, 500, 0, error);
    let failed = DiffusionResult {
        failed: true,
        ..result("b")
    };
    say(&mut play, 600, 0, Diffusion::Result(failed));
    // The API process then aborts what is left of them.
    for id in ["a", "b"] {
        leave(&mut play, 700, 0, id);
    }
    play.tick(60_000);
    assert_eq!(
        play.sink.total(Family::OmniRequestsFailedTotal, &["stage_error"]),
        2.0
    );
    assert_eq!(play.sink.sum(Family::OmniRequestsFailedTotal), 2.0);
    assert_eq!(play.sink.total(Family::OmniRequestsSuccessTotal, &["abort"]), 2.0);
    assert_eq!(generation(&play), NONE);
    play.tick(200_000);
    assert_eq!(play.tracker.tracked_requests(), 0);
}

#[test]
fn a_client_that_leaves_is_no_sample_of_the_stage() {
    let mut play = pictures(1);
    words_then_picture(&mut play, "r");
    leave(&mut play, 500, 0, "r");
    say(&mut play, 600, 0, Diffusion::Snapshot { waiting: Some(0) });
    // It was nearly done.
    say(&mut play, 650, 0, Diffusion::Result(result("r")));
    play.tick(10_000);
    assert_eq!(
        play.sink
            .total(Family::OmniRequestsFailedTotal, &["client_disconnect"]),
        1.0
    );
    assert_eq!(play.sink.sum(Family::OmniRequestsSuccessTotal), 1.0);
    assert_eq!(generation(&play), NONE);
    assert_eq!(seen(&play, Family::OmniDiffusionExecS, 0), NONE);
}

#[rstest]
#[case::says_so(true)]
#[case::is_gone(false)]
fn a_replica_that_dies_takes_its_requests_with_it(#[case] says_so: bool) {
    let mut play = pictures(2);
    // Until the first result nobody knows which socket leads where.
    ask(&mut play, 0, 0, "a");
    ask(&mut play, 0, 1, "b");
    say(&mut play, 100, 0, Diffusion::Result(result("a")));
    ask(&mut play, 200, 0, "c");
    if says_so {
        play.send(300, picture(1), &Message::EngineDead);
    } else {
        play.stop(300, picture(1));
    }
    say(&mut play, 400, 0, Diffusion::Result(result("c")));
    play.tick(10_000);
    assert_eq!(
        play.sink.total(Family::OmniRequestsFailedTotal, &["stage_error"]),
        1.0
    );
    assert_eq!(play.sink.total(Family::OmniRequestsSuccessTotal, &["stop"]), 2.0);
}

#[test]
fn the_only_diffusion_stage_has_all_requests_before_it_has_answered() {
    let mut play = pictures(1);
    words_then_picture(&mut play, "r");
    play.stop(300, picture(0));
    assert_eq!(
        play.sink.total(Family::OmniRequestsFailedTotal, &["stage_error"]),
        1.0
    );
}

#[test]
fn two_replicas_share_a_stage() {
    let mut play = pictures(2);
    for (lane, id) in ["a", "b"].into_iter().enumerate() {
        ask(&mut play, 210, lane, id);
    }
    say(&mut play, 1_210, 1, Diffusion::Result(result("b")));
    say(&mut play, 2_210, 0, Diffusion::Result(result("a")));
    assert_eq!(seen(&play, Family::OmniDiffusionExecS, 0).len(), 1);
    assert_eq!(seen(&play, Family::OmniDiffusionExecS, 1).len(), 1);
}

#[test]
fn waiting_requests_are_what_the_schedulers_said_last() {
    let mut play = pictures(2);
    let waiting = |play: &mut Play, at_ms: u64| {
        play.tick(at_ms);
        let gauge = |replica| {
            play.sink
                .gauge(Family::OmniStageWaitingRequests, (Some(1), Some(replica)), &[])
        };
        let whole = |family| play.sink.gauge(family, (None, None), &[]).unwrap_or_default();
        (
            (gauge(0), gauge(1)),
            (
                whole(Family::OmniNumRequestsRunning),
                whole(Family::OmniNumRequestsWaiting),
            ),
        )
    };
    for id in ["a", "b", "c", "d"] {
        ask(&mut play, 0, 0, id);
    }
    assert_eq!(waiting(&mut play, 10), ((None, None), (4.0, 0.0)));
    let with = |id, waiting| DiffusionResult {
        metrics: Some(DiffusionMetrics {
            waiting: Some(waiting),
            ..metrics()
        }),
        ..result(id)
    };
    say(&mut play, 1_000, 0, Diffusion::Result(with("a", 2)));
    assert_eq!(waiting(&mut play, 1_001), ((Some(2.0), None), (1.0, 2.0)));
    say(&mut play, 2_000, 1, Diffusion::Snapshot { waiting: Some(1) });
    assert_eq!(waiting(&mut play, 20_000), ((Some(2.0), Some(1.0)), (0.0, 3.0)));
    // Nothing more is said: they count until nothing is open.
    for id in ["b", "c", "d"] {
        leave(&mut play, 21_000, 0, id);
    }
    assert_eq!(waiting(&mut play, 30_000), ((Some(0.0), Some(0.0)), (0.0, 0.0)));
}

#[test]
fn a_waiting_diffusion_stage_keeps_no_old_figure_of_an_llm_stage_alive() {
    let mut play = pictures(1);
    words_then_picture(&mut play, "r");
    let stats = SchedulerStats {
        running: 1,
        waiting: 1,
        ..SchedulerStats::default()
    };
    play.stats(250, 0, stats);
    play.tick(60_000);
    let at = (Some(0), Some(0));
    assert_eq!(
        play.sink.gauge(Family::VllmNumRequestsRunning, at, &[]),
        Some(0.0)
    );
    assert_eq!(
        play.sink.gauge(Family::OmniNumRequestsRunning, (None, None), &[]),
        Some(1.0)
    );
}

#[test]
fn a_result_whose_request_was_before_the_agent_has_its_own_figures_alone() {
    let mut play = pictures(1);
    say(&mut play, 1_000, 0, Diffusion::Result(result("r")));
    assert_close(&seen(&play, Family::OmniDiffusionExecS, 0), &[3.0]);
    // The engine names the steps, too.
    assert_eq!(seen(&play, Family::OmniNumInferenceSteps, 0), [30.0]);
    assert_eq!(generation(&play), NONE);
    assert_eq!(play.sink.sum(Family::OmniRequestsSuccessTotal), 1.0);
    for family in [
        Family::OmniStageGenTimeS,
        Family::OmniImageTtfpS,
        Family::OmniE2eRequestLatencyS,
    ] {
        assert_eq!(play.sink.skips(family, "start_not_seen"), 1, "{family:?}");
    }
}

#[test]
fn a_pipeline_of_diffusion_alone_starts_with_its_request() {
    let mut play = Play::of(Flavor::Omni, Limits::default());
    play.start(API, Role::ApiServer);
    play.start(picture(0), role(Some(0), 0));
    ask(&mut play, 1_000, 0, "r");
    say(&mut play, 3_000, 0, Diffusion::Result(result("r")));
    assert_close(&play.sink.seen_whole(Family::OmniE2eRequestLatencyS), &[2.0]);
    assert_eq!(play.sink.total(Family::OmniPromptTokensTotal, &[]), 0.0);
    assert_eq!(skipped(&play), []);
}

#[test]
fn a_request_that_needs_no_picture_is_complete_after_a_while() {
    let mut play = pictures(1);
    play.add(0, 0, add("r", 0));
    play.out(100, 0, vec![first("r"), last("r", FinishReason::Stop)]);
    play.tick(1_000);
    assert_eq!(play.sink.sum(Family::OmniRequestsSuccessTotal), 0.0);
    play.tick(10_000);
    assert_eq!(play.sink.total(Family::OmniRequestsSuccessTotal, &["stop"]), 1.0);
    // A picture that comes later still is no second request.
    ask(&mut play, 11_000, 0, "r");
    assert_eq!(play.sink.skips(Family::OmniStageGenTimeS, "request_over"), 1);
    say(&mut play, 12_000, 0, Diffusion::Result(result("r")));
    play.tick(30_000);
    assert_eq!(play.sink.sum(Family::OmniRequestsSuccessTotal), 1.0);
}

#[test]
fn a_stage_that_nobody_can_name_completes_requests_without_samples_of_its_own() {
    let mut play = Play::omni(1);
    play.start(
        picture(0),
        Role::DiffusionStage {
            stage: None,
            replica: None,
        },
    );
    words_then_picture(&mut play, "r");
    say(&mut play, 1_210, 0, Diffusion::Result(result("r")));
    assert_close(&play.sink.seen_whole(Family::OmniE2eRequestLatencyS), &[1.21]);
    assert_eq!(play.sink.skips(Family::OmniDiffusionExecS, "unknown_identity"), 1);
    assert_eq!(play.sink.sum(Family::OmniImageCountTotal), 0.0);
}

#[test]
fn what_a_diffusion_stage_says_counts_from_it_alone() {
    let mut play = pictures(1);
    words_then_picture(&mut play, "r");
    let message = Message::Diffusion(Diffusion::Result(result("r")));
    play.send(1_000, engine(0, 0), &message);
    play.send(1_000, API, &message);
    assert_eq!(play.tracker.tracked_requests(), 1);
    assert_eq!(play.sink.sum(Family::OmniRequestsSuccessTotal), 0.0);
}
