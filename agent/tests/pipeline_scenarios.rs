//! Named plays of a pipeline's messages, with the exact observations that they must give.

#![allow(
    clippy::float_cmp,
    reason = "counts are exact, and the player simulation is compared to the bit"
)]

mod pipeline_support;

use omnitap::{
    host::identity::{Change, Flavor, PipelineId, Role},
    metrics::catalogue::Family,
    pipeline::{audio::Continuity, tracker::Limits},
    wire::message::{
        Add, Audio, CacheStats, EngineOutputs, FinishReason, KvEviction, KvWait, Message, Output, PerfStats,
        Ready, SchedulerStats, SpecDecode, Utility,
    },
};
use pipeline_support::{
    API, Play, add, add_streamed, assert_close, engine, first, first_with_events, frame, last, pipeline,
    process, token,
};
use rstest::rstest;

const WHOLE: (Option<u32>, Option<u32>) = (None, None);

fn at(stage: u32, replica: u32) -> (Option<u32>, Option<u32>) {
    (Some(stage), Some(replica))
}

fn audio(id: &str, frames: u64, sample_rate: Option<u32>) -> Output<'_> {
    Output {
        request_id: id,
        audio: Some(Audio { frames, sample_rate }),
        ..Output::default()
    }
}

fn last_audio(id: &str, frames: u64) -> Output<'_> {
    Output {
        finish_reason: Some(FinishReason::Stop),
        ..audio(id, frames, Some(24_000))
    }
}

// ---- one request, all its families ----

#[test]
fn a_request_of_plain_vllm_gives_what_vllm_computes() {
    let mut play = Play::plain(1);
    play.add(1_005, 0, add("cmpl-a-0-12345678", 1_000));
    play.out(
        1_100,
        0,
        vec![first_with_events("cmpl-a-0-12345678", 1.010, 1.030)],
    );
    play.out(1_150, 0, vec![token("cmpl-a-0-12345678")]);
    play.out(1_220, 0, vec![last("cmpl-a-0-12345678", FinishReason::Length)]);

    let sink = &play.sink;
    assert_close(&sink.seen(Family::VllmTimeToFirstTokenSeconds, 0), &[0.100]);
    assert_close(
        &sink.seen(Family::VllmInterTokenLatencySeconds, 0),
        &[0.050, 0.070],
    );
    assert_close(&sink.seen(Family::VllmE2eRequestLatencySeconds, 0), &[0.220]);
    assert_close(&sink.seen(Family::VllmRequestQueueTimeSeconds, 0), &[0.020]);
    assert_close(&sink.seen(Family::VllmRequestPrefillTimeSeconds, 0), &[0.069]);
    assert_close(&sink.seen(Family::VllmRequestDecodeTimeSeconds, 0), &[0.120]);
    assert_close(&sink.seen(Family::VllmRequestInferenceTimeSeconds, 0), &[0.189]);
    assert_close(
        &sink.seen(Family::VllmRequestTimePerOutputTokenSeconds, 0),
        &[0.060],
    );
    assert_eq!(sink.seen(Family::VllmRequestPromptTokens, 0), [10.0]);
    assert_eq!(sink.seen(Family::VllmRequestGenerationTokens, 0), [3.0]);
    assert_eq!(sink.seen(Family::VllmRequestPrefillKvComputedTokens, 0), [5.0]);
    assert_eq!(sink.seen(Family::VllmRequestParamsMaxTokens, 0), [16.0]);
    assert_eq!(sink.seen(Family::VllmRequestParamsN, 0), [1.0]);
    assert_eq!(sink.seen(Family::VllmRequestMaxNumGenerationTokens, 0), [3.0]);
    assert_eq!(sink.seen(Family::VllmRequestNumPreemptions, 0), [0.0]);
    assert_eq!(sink.seen(Family::VllmIterationTokensTotal, 0), [6.0, 1.0, 1.0]);
    let count = |family, extra: &[&str]| sink.counter(family, 0, extra);
    assert_eq!(count(Family::VllmPromptTokensTotal, &[]), 10.0);
    assert_eq!(count(Family::VllmPromptTokensCachedTotal, &[]), 5.0);
    assert_eq!(
        count(Family::VllmPromptTokensBySourceTotal, &["local_compute"]),
        5.0
    );
    assert_eq!(
        count(Family::VllmPromptTokensBySourceTotal, &["local_cache_hit"]),
        4.0
    );
    assert_eq!(
        count(Family::VllmPromptTokensBySourceTotal, &["external_kv_transfer"]),
        1.0
    );
    assert_eq!(count(Family::VllmGenerationTokensTotal, &[]), 3.0);
    assert_eq!(count(Family::VllmRequestSuccessTotal, &["length"]), 1.0);
    assert_eq!(count(Family::VllmRequestSuccessTotal, &["stop"]), 0.0);
    assert_eq!(sink.sum(Family::OmniRequestsSuccessTotal), 0.0);
    assert_eq!(play.tracker.tracked_requests(), 0);
}

#[test]
fn a_single_token_request_has_a_time_per_token_of_zero() {
    let mut play = Play::plain(1);
    play.add(0, 0, add("r", 0));
    let only = Output {
        finish_reason: Some(FinishReason::Stop),
        ..first("r")
    };
    play.out(80, 0, vec![only]);

    assert_close(
        &play.sink.seen(Family::VllmRequestTimePerOutputTokenSeconds, 0),
        &[0.0],
    );
    assert_close(&play.sink.seen(Family::VllmRequestDecodeTimeSeconds, 0), &[0.0]);
    assert_close(&play.sink.seen(Family::VllmTimeToFirstTokenSeconds, 0), &[0.080]);
}

#[test]
fn children_exist_as_soon_as_the_longest_sequence_is_known() {
    let play = Play::plain(1);
    let sink = &play.sink;
    assert_eq!(sink.counter(Family::VllmMmCacheHitsTotal, 0, &[]), 0.0);
    assert_eq!(
        sink.counter(Family::VllmRequestSuccessTotal, 0, &["repetition"]),
        0.0
    );
    assert_eq!(sink.counter(Family::VllmEstimatedFlopsPerGpuTotal, 0, &[]), 0.0);
    assert!(
        sink.samples
            .contains_key(&(Family::VllmRequestParamsN, (Some(0), Some(0), vec![])))
    );
    assert_eq!(
        sink.gauge(Family::VllmEngineSleepState, at(0, 0), &["awake"]),
        Some(1.0)
    );
    assert_eq!(
        sink.gauge(Family::VllmEngineSleepState, at(0, 0), &["discard_all"]),
        Some(0.0)
    );
    assert_eq!(sink.gauge(Family::VllmKvCacheUsagePerc, at(0, 0), &[]), Some(0.0));
    assert_eq!(sink.scope_at(at(0, 0)).max_model_len, Some(4096));
    // Conditional families have children only once their feature shows.
    assert_eq!(sink.sum(Family::VllmSpecDecodeNumDraftsTotal), 0.0);
    assert!(!sink.counters.keys().any(|(family, _)| matches!(
        family,
        Family::VllmSpecDecodeNumDraftsTotal | Family::VllmCorruptedRequestsTotal
    )));
}

#[test]
fn a_starting_engine_gets_its_buckets_from_its_ready_message() {
    let mut play = Play::of(Flavor::Omni, Limits::default());
    let mut unknown = pipeline(1, Flavor::Omni);
    unknown.max_model_len = None;
    play.change(0, &Change::Pipeline(unknown));
    play.start(API, Role::ApiServer);
    play.start_engine(0, 0);
    play.start_engine(1, 0);
    play.send(100, engine(0, 0), &Message::Handshake);
    play.send(100, engine(1, 0), &Message::Handshake);
    play.tick(90_000);
    assert!(play.sink.counters.keys().all(|(_, labels)| labels.0.is_none()));

    let ready = |max_model_len| {
        Message::Ready(Ready {
            max_model_len: Some(max_model_len),
            vllm_version: None,
        })
    };
    // The first stage decides for all of them, in whatever order they tell.
    play.send(91_000, engine(1, 0), &ready(8192));
    play.send(95_000, engine(0, 0), &ready(2048));
    assert_eq!(play.sink.scope_at(at(0, 0)).max_model_len, Some(2048));
    assert_eq!(play.sink.scope_at(at(1, 0)).max_model_len, Some(2048));
}

#[test]
fn an_idle_engine_that_ran_before_the_agent_gets_its_children_after_a_while() {
    let mut play = Play::of(Flavor::Vllm, Limits::default());
    let mut unknown = pipeline(1, Flavor::Vllm);
    unknown.max_model_len = None;
    play.change(0, &Change::Pipeline(unknown));
    play.start_engine(0, 0);
    play.tick(4_000);
    assert!(play.sink.counters.is_empty());
    play.tick(5_000);
    assert_eq!(play.sink.counter(Family::VllmGenerationTokensTotal, 0, &[]), 0.0);
}

// ---- whole pipelines ----

#[test]
fn a_request_over_two_stages_in_turn() {
    let mut play = Play::omni(2);
    play.add(1_010, 0, add("speech-a", 1_000));
    play.out(1_100, 0, vec![first("speech-a")]);
    play.tick(1_150);
    assert_eq!((play.running(), play.waiting()), (Some(1.0), Some(0.0)));
    play.out(1_200, 0, vec![last("speech-a", FinishReason::Stop)]);
    assert_eq!(play.sink.total(Family::OmniRequestsSuccessTotal, &["stop"]), 0.0);
    play.add(1_210, 1, add("speech-a", 1_205));
    play.out(1_300, 1, vec![first("speech-a")]);
    play.out(1_500, 1, vec![last("speech-a", FinishReason::Length)]);
    play.tick(1_600);

    let sink = &play.sink;
    assert_eq!(sink.total(Family::OmniRequestsSuccessTotal, &["length"]), 1.0);
    assert_eq!(sink.sum(Family::OmniRequestsSuccessTotal), 1.0);
    assert_eq!(sink.sum(Family::OmniRequestsFailedTotal), 0.0);
    assert_close(&sink.seen_whole(Family::OmniE2eRequestLatencyS), &[0.500]);
    assert_eq!(sink.total(Family::OmniPromptTokensTotal, &[]), 10.0);
    assert_eq!(sink.total(Family::OmniGenerationTokensTotal, &[]), 4.0);
    let stage_gen = |stage| sink.seen_at(Family::OmniStageGenTimeS, at(stage, 0), &["llm"]);
    assert_close(&stage_gen(0), &[0.190]);
    assert_close(&stage_gen(1), &[0.290]);
    assert_close(&sink.seen(Family::VllmTimeToFirstTokenSeconds, 1), &[0.095]);
    assert_eq!(
        sink.seen(Family::VllmRequestParamsN, 0),
        Vec::<f64>::new(),
        "vLLM-Omni never observes it"
    );
    assert_eq!((play.running(), play.waiting()), (Some(0.0), Some(0.0)));
    assert_eq!(play.tracker.tracked_requests(), 0);
}

#[test]
fn stages_that_are_given_a_request_at_once_are_told_apart_by_order() {
    let mut play = Play::omni(3);
    // Socket addresses say nothing by themselves.
    for (socket, arrival) in [(77, 1_000), (5, 1_001), (300, 1_002)] {
        play.add(arrival, socket, add("r", arrival));
    }
    play.out(1_101, 1, vec![first("r")]);
    play.out(1_102, 2, vec![first("r")]);
    play.out(1_103, 0, vec![first("r")]);
    for stage in [2, 0, 1] {
        play.out(
            1_200 + u64::from(stage),
            stage,
            vec![last("r", FinishReason::Stop)],
        );
    }
    for (stage, ttft) in [(0, 0.103), (1, 0.100), (2, 0.100)] {
        assert_close(
            &play.sink.seen(Family::VllmTimeToFirstTokenSeconds, stage),
            &[ttft],
        );
    }
    assert_close(&play.sink.seen_whole(Family::OmniE2eRequestLatencyS), &[0.202]);
}

#[test]
fn a_socket_stays_tied_to_its_engine() {
    let mut play = Play::omni(2);
    play.add(0, 9, add("warm", 0));
    play.add(0, 4, add("warm", 0));
    for stage in [0, 1] {
        play.out(50, stage, vec![first("warm")]);
        play.out(60, stage, vec![last("warm", FinishReason::Stop)]);
    }
    // Only stage 1's ADD of this one is read; its engine is known by now.
    play.add(1_000, 4, add("r", 1_000));
    play.out(1_100, 1, vec![first("r")]);
    play.out(1_110, 1, vec![last("r", FinishReason::Stop)]);
    assert_close(
        &play.sink.seen(Family::VllmTimeToFirstTokenSeconds, 1),
        &[0.050, 0.100],
    );
    // The pipeline's own latency would need the first stage's ADD.
    assert_close(&play.sink.seen_whole(Family::OmniE2eRequestLatencyS), &[0.060]);
    assert_eq!(
        play.sink.skips(Family::OmniE2eRequestLatencyS, "start_not_seen"),
        1
    );
}

#[test]
fn a_request_that_ends_before_the_last_stage_completes_after_a_grace_time() {
    let mut play = Play::omni(2);
    play.add(0, 0, add("text", 0));
    play.out(100, 0, vec![first("text")]);
    play.out(200, 0, vec![last("text", FinishReason::Stop)]);
    play.tick(1_000);
    assert_eq!(play.sink.sum(Family::OmniRequestsSuccessTotal), 0.0);
    assert_eq!(play.running(), Some(0.0), "nothing is being done for it");
    play.tick(5_200);
    assert_eq!(play.sink.total(Family::OmniRequestsSuccessTotal, &["stop"]), 1.0);
    assert_close(&play.sink.seen_whole(Family::OmniE2eRequestLatencyS), &[0.200]);
}

#[test]
fn a_late_next_stage_puts_the_completion_off() {
    let mut play = Play::omni(3);
    play.add(0, 0, add("r", 0));
    play.out(100, 0, vec![first("r"), last("r", FinishReason::Stop)]);
    play.add(4_000, 1, add("r", 4_000));
    play.tick(6_000);
    assert_eq!(play.sink.sum(Family::OmniRequestsSuccessTotal), 0.0);
    play.out(9_000, 1, vec![first("r"), last("r", FinishReason::Stop)]);
    play.tick(9_500);
    assert_eq!(play.sink.sum(Family::OmniRequestsSuccessTotal), 0.0);
    play.tick(14_100);
    assert_eq!(play.sink.sum(Family::OmniRequestsSuccessTotal), 1.0);
    assert_close(&play.sink.seen_whole(Family::OmniE2eRequestLatencyS), &[9.0]);
}

#[test]
fn a_guiding_companion_is_no_request_of_its_own() {
    let mut play = Play::omni(2);
    play.add(0, 0, add("r", 0));
    play.add(1, 0, add("r__cfg_text", 0));
    play.out(50, 0, vec![first("r"), first("r__cfg_text")]);
    play.tick(60);
    assert_eq!(play.running(), Some(1.0));
    play.out(
        100,
        0,
        vec![
            last("r", FinishReason::Stop),
            last("r__cfg_text", FinishReason::Stop),
        ],
    );
    play.add(110, 1, add("r", 110));
    play.out(200, 1, vec![first("r"), last("r", FinishReason::Stop)]);

    assert_eq!(play.sink.sum(Family::OmniRequestsSuccessTotal), 1.0);
    assert_eq!(play.sink.total(Family::OmniGenerationTokensTotal, &[]), 4.0);
    assert_eq!(
        play.sink
            .seen_at(Family::OmniStageGenTimeS, at(0, 0), &["llm"])
            .len(),
        1
    );
    // The engine did work for it, and its own families say so.
    assert_eq!(play.sink.counter(Family::VllmGenerationTokensTotal, 0, &[]), 4.0);
    assert_eq!(play.tracker.tracked_requests(), 0);
}

#[test]
fn tokens_that_an_engine_reports_only_in_sum_are_counted_but_not_timed() {
    let mut play = Play::omni(2);
    play.add(0, 0, add("r", 0));
    play.add(0, 1, add("r", 0));
    let sum = Output {
        finish_reason: Some(FinishReason::Stop),
        num_generation_tokens: Some(40),
        ..first("r")
    };
    play.out(500, 0, vec![sum]);
    play.out(600, 1, vec![first("r"), last("r", FinishReason::Stop)]);

    let sink = &play.sink;
    assert_eq!(sink.counter(Family::VllmGenerationTokensTotal, 0, &[]), 40.0);
    assert_eq!(sink.seen(Family::VllmRequestGenerationTokens, 0), [40.0]);
    assert_close(&sink.seen(Family::VllmE2eRequestLatencySeconds, 0), &[0.500]);
    for family in [
        Family::VllmTimeToFirstTokenSeconds,
        Family::VllmRequestDecodeTimeSeconds,
        Family::VllmRequestTimePerOutputTokenSeconds,
    ] {
        assert_eq!(sink.seen(family, 0), Vec::<f64>::new());
        assert_eq!(sink.skips(family, "tokens_summed"), 1);
    }
    assert_eq!(sink.total(Family::OmniGenerationTokensTotal, &[]), 42.0);
}

// ---- order, and agents that come late ----

#[rstest]
#[case::first_token_before_its_add(vec![first("r")], vec![last("r", FinishReason::Stop)])]
#[case::whole_request_before_its_add(vec![first("r"), last("r", FinishReason::Stop)], vec![])]
fn an_add_that_is_read_late_still_dates_the_request(
    #[case] before: Vec<Output<'_>>,
    #[case] after: Vec<Output<'_>>,
) {
    for mut play in [Play::plain(1), Play::omni(1)] {
        play.out(1_100, 0, before.clone());
        play.add(1_003, 0, add("r", 1_000));
        if !after.is_empty() {
            play.out(1_100, 0, after.clone());
        }
        assert_close(&play.sink.seen(Family::VllmTimeToFirstTokenSeconds, 0), &[0.100]);
        assert_close(&play.sink.seen(Family::VllmE2eRequestLatencySeconds, 0), &[0.100]);
        assert_eq!(play.sink.seen(Family::VllmRequestPromptTokens, 0), [10.0]);
        assert_eq!(play.tracker.tracked_requests(), 0);
    }
}

#[test]
fn a_finish_whose_add_never_comes_is_counted_without_its_start() {
    let mut play = Play::omni(1);
    play.out(1_000, 0, vec![first("r"), last("r", FinishReason::Stop)]);
    play.tick(1_500);
    assert_eq!(
        play.sink.counter(Family::VllmRequestSuccessTotal, 0, &["stop"]),
        0.0
    );
    play.tick(2_001);
    assert_eq!(
        play.sink.counter(Family::VllmRequestSuccessTotal, 0, &["stop"]),
        1.0
    );
    assert_eq!(play.sink.total(Family::OmniRequestsSuccessTotal, &["stop"]), 1.0);
    assert_eq!(
        play.sink
            .skips(Family::VllmE2eRequestLatencySeconds, "start_not_seen"),
        1
    );
    assert_eq!(
        play.sink.skips(Family::OmniE2eRequestLatencyS, "start_not_seen"),
        1
    );
    assert_eq!(play.sink.seen(Family::VllmRequestGenerationTokens, 0), [2.0]);
}

#[test]
fn a_request_from_before_the_agent_gives_tokens_and_its_finish_only() {
    let mut play = Play::omni(2);
    play.out(1_000, 0, vec![token("old")]);
    play.tick(1_001);
    assert_eq!(play.running(), Some(1.0));
    play.out(1_050, 0, vec![token("old")]);
    play.out(1_100, 0, vec![last("old", FinishReason::Stop)]);
    play.add(1_110, 1, add("old", 1_110));
    play.out(1_300, 1, vec![first("old"), last("old", FinishReason::Stop)]);
    play.tick(1_400);

    let sink = &play.sink;
    assert_eq!(sink.counter(Family::VllmGenerationTokensTotal, 0, &[]), 3.0);
    assert_eq!(sink.counter(Family::VllmRequestSuccessTotal, 0, &["stop"]), 1.0);
    assert_close(
        &sink.seen(Family::VllmInterTokenLatencySeconds, 0),
        &[0.050, 0.050],
    );
    for family in [
        Family::VllmTimeToFirstTokenSeconds,
        Family::VllmE2eRequestLatencySeconds,
        Family::VllmRequestGenerationTokens,
        Family::VllmRequestDecodeTimeSeconds,
        Family::VllmRequestPromptTokens,
    ] {
        assert_eq!(sink.seen(family, 0), Vec::<f64>::new(), "{family:?}");
    }
    assert_eq!(
        sink.skips(Family::VllmE2eRequestLatencySeconds, "start_not_seen"),
        1
    );
    // Its second stage was seen whole.
    assert_close(&sink.seen(Family::VllmE2eRequestLatencySeconds, 1), &[0.190]);
    assert_eq!(sink.total(Family::OmniRequestsSuccessTotal, &["stop"]), 1.0);
    assert_eq!(sink.seen_whole(Family::OmniE2eRequestLatencyS), Vec::<f64>::new());
    assert_eq!(play.running(), Some(0.0));
}

#[test]
fn the_remote_replicas_of_a_headless_node_have_engine_families_alone() {
    let mut play = Play::of(Flavor::Omni, Limits::default());
    play.start(API, Role::Headless);
    play.start_engine(2, 1);
    play.out_at(
        1_000,
        engine(2, 1),
        vec![
            first_with_events("r", 0.900, 0.950),
            last("r", FinishReason::Stop),
        ],
    );
    play.tick(2_500);
    let sink = &play.sink;
    assert_eq!(
        sink.counter_at(Family::VllmRequestSuccessTotal, at(2, 1), &["stop"]),
        Some(1.0)
    );
    assert_close(
        &sink.seen_at(Family::VllmRequestQueueTimeSeconds, at(2, 1), &[]),
        &[0.050],
    );
    assert_eq!(play.running(), None);
    assert_eq!(sink.sum(Family::OmniRequestsSuccessTotal), 0.0);
    assert_eq!(play.tracker.tracked_requests(), 0);
}

#[rstest]
#[case::not_given(None)]
#[case::from_the_future(Some(1_800_000_010.0))]
#[case::from_another_clock(Some(12.0))]
#[case::not_a_number(Some(f64::NAN))]
fn an_absurd_arrival_time_gives_way_to_the_time_of_the_add(#[case] arrival: Option<f64>) {
    let mut play = Play::plain(1);
    play.add(
        1_000,
        0,
        Add {
            arrival,
            ..add("r", 0)
        },
    );
    play.out(1_100, 0, vec![first("r")]);
    assert_close(&play.sink.seen(Family::VllmTimeToFirstTokenSeconds, 0), &[0.100]);
}

#[test]
fn a_message_that_is_seen_twice_counts_once() {
    let mut play = Play::omni(1);
    play.add(0, 0, add("r", 0));
    play.out(10, 0, vec![first("r")]);
    for _ in 0..2 {
        play.out(20, 0, vec![last("r", FinishReason::Stop)]);
    }
    assert_eq!(play.sink.total(Family::OmniRequestsSuccessTotal, &["stop"]), 1.0);
    assert_eq!(play.sink.counter(Family::VllmGenerationTokensTotal, 0, &[]), 2.0);
    assert_eq!(play.tracker.tracked_requests(), 0);
}

#[test]
fn a_clock_that_runs_backwards_gives_no_sample() {
    let mut play = Play::plain(1);
    play.add(0, 0, add("r", 0));
    play.out(100, 0, vec![first("r")]);
    for timestamp in [0.05, f64::INFINITY] {
        let outputs = EngineOutputs {
            timestamp: Some(timestamp),
            ..frame(200, vec![token("r")])
        };
        play.send(200, engine(0, 0), &Message::Outputs(outputs));
    }
    assert_eq!(
        play.sink
            .skips(Family::VllmInterTokenLatencySeconds, "not_plausible"),
        1
    );
    // The infinite one was replaced by the time of the frame.
    assert_close(&play.sink.seen(Family::VllmInterTokenLatencySeconds, 0), &[0.150]);
}

// ---- aborts, errors, deaths ----

#[test]
fn a_client_that_leaves_is_one_failure() {
    let mut play = Play::omni(2);
    play.add(0, 0, add("r", 0));
    play.add(0, 1, add("r", 0));
    play.out(100, 0, vec![first("r")]);
    // One ABORT for each stage; the engines answer, and may have sent a token before they read it.
    play.abort(150, 0, "r");
    play.abort(150, 1, "r");
    play.tick(160);
    assert_eq!(play.running(), Some(0.0));
    play.out(170, 0, vec![token("r")]);
    let answer = Output {
        request_id: "r",
        finish_reason: Some(FinishReason::Abort),
        ..Output::default()
    };
    play.out(180, 0, vec![answer.clone()]);
    play.out(180, 1, vec![answer.clone()]);
    play.tick(2_200);
    play.out(2_300, 1, vec![answer]);
    play.tick(70_000);

    let sink = &play.sink;
    assert_eq!(sink.total(Family::OmniRequestsSuccessTotal, &["abort"]), 1.0);
    assert_eq!(
        sink.total(Family::OmniRequestsFailedTotal, &["client_disconnect"]),
        1.0
    );
    assert_eq!(sink.sum(Family::OmniRequestsFailedTotal), 1.0);
    assert_eq!(sink.seen_whole(Family::OmniE2eRequestLatencyS), Vec::<f64>::new());
    assert_eq!(
        sink.counter(Family::VllmRequestSuccessTotal, 0, &["abort"]),
        0.0,
        "the API process drops what comes after its abort"
    );
    assert_eq!(sink.counter(Family::VllmGenerationTokensTotal, 0, &[]), 1.0);
    assert_eq!(play.tracker.tracked_requests(), 0);
}

#[test]
fn an_abort_that_no_engine_answers_leaves_nothing_behind() {
    let mut play = Play::plain(1);
    play.add(0, 0, add("r", 0));
    play.abort(10, 0, "r");
    play.out(20, 0, vec![first("r")]);
    play.tick(3_000);
    play.tick(64_000);
    assert_eq!(play.sink.sum(Family::VllmRequestSuccessTotal), 0.0);
    assert_eq!(play.tracker.tracked_requests(), 0);
}

#[rstest]
#[case::right_after_an_output(55, "stop", 1.0)]
#[case::long_after_the_last_output(500, "stop", 0.0)]
fn an_abort_right_after_an_output_means_a_stop_string(
    #[case] abort_ms: u64,
    #[case] reason: &str,
    #[case] counted: f64,
) {
    let mut play = Play::plain(1);
    let with_stop = Add {
        has_stop_strings: true,
        ..add("r", 0)
    };
    play.add(0, 0, with_stop);
    play.out(20, 0, vec![first("r")]);
    play.out(50, 0, vec![token("r")]);
    play.abort(abort_ms, 0, "r");
    play.out(abort_ms + 10, 0, vec![token("r")]);
    assert_eq!(
        play.sink.counter(Family::VllmRequestSuccessTotal, 0, &[reason]),
        counted
    );
    assert_eq!(play.sink.counter(Family::VllmGenerationTokensTotal, 0, &[]), 2.0);
    if counted > 0.0 {
        assert_close(&play.sink.seen(Family::VllmE2eRequestLatencySeconds, 0), &[0.050]);
    }
    play.tick(70_000);
    assert_eq!(play.tracker.tracked_requests(), 0);
}

#[test]
fn a_stop_string_in_the_first_stage_lets_the_request_go_on() {
    let mut play = Play::omni(2);
    let with_stop = Add {
        has_stop_strings: true,
        ..add("r", 0)
    };
    play.add(0, 0, with_stop);
    play.out(50, 0, vec![first("r")]);
    play.abort(52, 0, "r");
    play.add(60, 1, add("r", 60));
    // The stage's scheduler answers the abort with a finish of its own.
    let answer = Output {
        request_id: "r",
        finish_reason: Some(FinishReason::Abort),
        ..Output::default()
    };
    play.out(65, 0, vec![answer]);
    play.out(200, 1, vec![first("r"), last("r", FinishReason::Stop)]);
    assert_eq!(play.sink.total(Family::OmniRequestsSuccessTotal, &["stop"]), 1.0);
    assert_eq!(play.sink.sum(Family::OmniRequestsFailedTotal), 0.0);
    assert_close(&play.sink.seen_whole(Family::OmniE2eRequestLatencyS), &[0.200]);
}

#[test]
fn an_error_in_a_stage_fails_the_request_once() {
    let mut play = Play::omni(2);
    play.add(0, 0, add("r", 0));
    play.add(0, 1, add("r", 0));
    play.out(100, 0, vec![first("r")]);
    play.out(150, 1, vec![last("r", FinishReason::Error)]);
    play.abort(151, 0, "r");
    play.out(160, 0, vec![last("r", FinishReason::Abort)]);
    play.tick(3_000);
    let sink = &play.sink;
    assert_eq!(sink.total(Family::OmniRequestsSuccessTotal, &["abort"]), 1.0);
    assert_eq!(sink.total(Family::OmniRequestsFailedTotal, &["stage_error"]), 1.0);
    assert_eq!(sink.sum(Family::OmniRequestsFailedTotal), 1.0);
    assert_eq!(sink.counter(Family::VllmRequestSuccessTotal, 1, &["error"]), 1.0);
}

#[rstest]
#[case::it_says_so(true)]
#[case::its_process_is_gone(false)]
fn a_dead_engine_fails_what_it_had(#[case] says_so: bool) {
    let mut play = Play::omni(2);
    play.add(0, 0, add("warm", 0));
    play.add(0, 1, add("warm", 0));
    for stage in [0, 1] {
        play.out(10, stage, vec![first("warm"), last("warm", FinishReason::Stop)]);
    }
    for id in ["at-0", "at-1", "given-to-1"] {
        play.add(100, 0, add(id, 100));
        play.out(110, 0, vec![first(id)]);
    }
    for id in ["at-1", "given-to-1"] {
        play.out(120, 0, vec![last(id, FinishReason::Stop)]);
        play.add(130, 1, add(id, 130));
    }
    play.out(140, 1, vec![first("at-1")]);
    play.stats(
        140,
        1,
        SchedulerStats {
            running: 1,
            waiting: 1,
            ..SchedulerStats::default()
        },
    );
    play.tick(150);
    assert_eq!((play.running(), play.waiting()), (Some(2.0), Some(1.0)));
    if says_so {
        play.send(200, engine(1, 0), &Message::EngineDead);
    }
    play.stop(210, engine(1, 0));
    play.tick(220);

    assert_eq!(
        play.sink.total(Family::OmniRequestsFailedTotal, &["stage_error"]),
        2.0
    );
    assert_eq!((play.running(), play.waiting()), (Some(1.0), Some(0.0)));
    assert_eq!(
        play.sink.gauge(Family::VllmNumRequestsRunning, at(1, 0), &[]),
        None
    );
    assert_eq!(
        play.sink.gauge(Family::OmniStageWaitingRequests, at(1, 0), &[]),
        None
    );
    assert_eq!(
        play.sink.counter(Family::VllmRequestSuccessTotal, 1, &["stop"]),
        1.0,
        "counters stay"
    );
}

#[test]
fn aborts_that_a_dead_engine_caused_are_not_the_clients() {
    let mut play = Play::omni(2);
    play.add(0, 0, add("r", 0));
    play.add(0, 1, add("r", 0));
    play.out(10, 0, vec![first("r")]);
    play.out(10, 1, vec![first("r")]);
    // The API process notices first and tells the stage that lives.
    play.abort(500, 0, "r");
    play.stop(900, engine(1, 0));
    play.tick(3_000);
    assert_eq!(
        play.sink.total(Family::OmniRequestsFailedTotal, &["stage_error"]),
        1.0
    );
    assert_eq!(play.sink.sum(Family::OmniRequestsFailedTotal), 1.0);
}

#[test]
fn a_restarted_engine_serves_under_the_same_labels() {
    let mut play = Play::omni(1);
    play.add(0, 3, add("a", 0));
    play.out(10, 0, vec![first("a"), last("a", FinishReason::Stop)]);
    play.stop(100, engine(0, 0));
    let reborn = Role::LlmStage {
        stage: Some(0),
        replica: Some(0),
    };
    play.start(555, reborn);
    play.add(200, 4, add("b", 200));
    play.out_at(300, 555, vec![first("b"), last("b", FinishReason::Length)]);
    assert_eq!(
        play.sink.counter(Family::VllmRequestSuccessTotal, 0, &["stop"]),
        1.0
    );
    assert_eq!(
        play.sink.counter(Family::VllmRequestSuccessTotal, 0, &["length"]),
        1.0
    );
    assert_close(
        &play.sink.seen(Family::VllmTimeToFirstTokenSeconds, 0),
        &[0.010, 0.100],
    );
}

#[test]
fn a_restarted_pipeline_counts_on_and_its_open_requests_are_lost() {
    let mut play = Play::omni(1);
    play.add(0, 0, add("a", 0));
    play.out(10, 0, vec![first("a"), last("a", FinishReason::Stop)]);
    play.add(50, 0, add("lost", 50));
    play.change(100, &Change::PipelineGone(PipelineId(1)));
    assert_eq!(
        play.sink.total(Family::OmniRequestsFailedTotal, &["unknown"]),
        1.0
    );
    assert_eq!(play.running(), None);
    assert_eq!(play.sink.retired.len(), 2);

    play.change(200, &Change::Pipeline(pipeline(2, Flavor::Omni)));
    play.change(200, &Change::Process(process(2, 1_100, Role::ApiServer)));
    let role = Role::LlmStage {
        stage: Some(0),
        replica: Some(0),
    };
    play.change(200, &Change::Process(process(2, 1_200, role)));
    play.send_on(300, 1_100, 0, &Message::Add(add("b", 300)));
    play.out_at(400, 1_200, vec![first("b"), last("b", FinishReason::Stop)]);
    assert_eq!(play.sink.total(Family::OmniRequestsSuccessTotal, &["stop"]), 2.0);
    assert_eq!(
        play.sink.counter(Family::VllmRequestSuccessTotal, 0, &["stop"]),
        2.0
    );
}

#[test]
fn a_request_without_news_is_given_up() {
    let mut play = Play::omni(2);
    play.add(0, 0, add("r", 0));
    play.out(1_000, 0, vec![first("r")]);
    play.tick(1_700_000);
    assert_eq!(play.running(), Some(1.0));
    play.tick(1_802_000);
    assert_eq!(play.running(), Some(0.0));
    assert_eq!(play.sink.skips(Family::OmniE2eRequestLatencyS, "timed_out"), 1);
    play.tick(1_900_000);
    assert_eq!(play.tracker.tracked_requests(), 0);
}

#[test]
fn the_cap_on_open_requests_holds_and_counts() {
    let limits = Limits {
        max_requests: 2,
        ..Limits::default()
    };
    let mut play = Play::of(Flavor::Vllm, limits);
    play.start(API, Role::ApiServer);
    play.start_engine(0, 0);
    for id in ["a", "b", "c"] {
        play.add(0, 0, add(id, 0));
    }
    play.out(10, 0, vec![first("a"), first("b"), first("c")]);
    assert_eq!(play.tracker.tracked_requests(), 2);
    assert_eq!(
        play.sink
            .skips(Family::VllmE2eRequestLatencySeconds, "too_many_open"),
        1
    );
    assert_eq!(play.sink.counter(Family::VllmGenerationTokensTotal, 0, &[]), 3.0);
    assert_eq!(play.sink.seen(Family::VllmTimeToFirstTokenSeconds, 0).len(), 2);
}

// ---- replicas, workers, pipelines side by side ----

#[test]
fn replicas_of_a_stage_have_series_of_their_own() {
    let mut play = Play::omni(1);
    play.start_engine(0, 1);
    play.add(0, 10, add("a", 0));
    play.add(0, 11, add("b", 0));
    play.out_at(100, engine(0, 1), vec![first("b")]);
    play.out_at(120, engine(0, 0), vec![first("a")]);
    play.out_at(150, engine(0, 0), vec![last("a", FinishReason::Stop)]);
    play.out_at(160, engine(0, 1), vec![last("b", FinishReason::Stop)]);
    let ttft = |replica| {
        play.sink
            .seen_at(Family::VllmTimeToFirstTokenSeconds, at(0, replica), &[])
    };
    assert_close(&ttft(0), &[0.120]);
    assert_close(&ttft(1), &[0.100]);
    assert_eq!(play.sink.sum(Family::OmniRequestsSuccessTotal), 2.0);
}

#[test]
fn data_parallel_processes_of_one_replica_add_up() {
    let mut play = Play::omni(1);
    let role = Role::LlmStage {
        stage: Some(0),
        replica: Some(0),
    };
    play.start(777, role);
    let busy = |running, kv_cache_usage| SchedulerStats {
        running,
        kv_cache_usage,
        ..SchedulerStats::default()
    };
    play.stats_at(10, engine(0, 0), busy(2, 0.5));
    play.stats_at(10, 777, busy(3, 0.25));
    play.tick(20);
    assert_eq!(
        play.sink.gauge(Family::VllmNumRequestsRunning, at(0, 0), &[]),
        Some(5.0)
    );
    assert_eq!(
        play.sink.gauge(Family::VllmKvCacheUsagePerc, at(0, 0), &[]),
        Some(0.375)
    );
    play.stop(30, 777);
    play.tick(40);
    assert_eq!(
        play.sink.gauge(Family::VllmNumRequestsRunning, at(0, 0), &[]),
        Some(2.0)
    );
}

#[test]
fn plain_vllm_with_several_workers_and_ranks() {
    let mut play = Play::plain(2);
    play.start(101, Role::ApiWorker { index: 1 });
    play.add(0, 0, add("a", 0));
    play.send_on(0, 101, 0, &Message::Add(add("b", 0)));
    play.out_at(100, engine(0, 1), vec![first("a"), first("b")]);
    play.out_at(
        200,
        engine(0, 1),
        vec![last("a", FinishReason::Stop), last("b", FinishReason::Stop)],
    );
    let e2e = play
        .sink
        .seen_at(Family::VllmE2eRequestLatencySeconds, at(0, 1), &[]);
    assert_close(&e2e, &[0.200, 0.200]);
    assert_eq!(
        play.sink
            .counter_at(Family::VllmGenerationTokensTotal, at(0, 0), &[]),
        Some(0.0)
    );
}

#[test]
fn an_api_worker_that_dies_takes_its_own_requests_along() {
    let mut play = Play::omni(1);
    play.start(101, Role::ApiWorker { index: 1 });
    play.add(0, 0, add("a", 0));
    play.send_on(0, 101, 9, &Message::Add(add("b", 0)));
    play.stop(50, 101);
    assert_eq!(
        play.sink.total(Family::OmniRequestsFailedTotal, &["unknown"]),
        1.0
    );
    assert_eq!(play.tracker.open_requests(PipelineId(1)), 1);
}

#[test]
fn samples_of_one_prompt_are_requests_whose_number_is_seen_at_the_end() {
    let mut play = Play::plain(1);
    let ids = ["0_cmpl-p", "1_cmpl-p", "2_cmpl-p"];
    for id in ids {
        play.add(0, 0, add(id, 0));
    }
    play.out(50, 0, ids.map(first).to_vec());
    play.out(60, 0, vec![last(ids[1], FinishReason::Stop)]);
    play.out(70, 0, vec![token(ids[0]), last(ids[2], FinishReason::Stop)]);
    assert_eq!(play.sink.seen(Family::VllmRequestParamsN, 0), Vec::<f64>::new());
    play.out(80, 0, vec![last(ids[0], FinishReason::Stop)]);
    assert_eq!(play.sink.seen(Family::VllmRequestParamsN, 0), [3.0]);
    assert_eq!(
        play.sink.seen(Family::VllmRequestMaxNumGenerationTokens, 0),
        [3.0]
    );
    assert_eq!(
        play.sink.counter(Family::VllmRequestSuccessTotal, 0, &["stop"]),
        3.0
    );
}

#[test]
fn two_pipelines_of_one_model_keep_their_requests_apart() {
    let mut play = Play::omni(1);
    play.change(0, &Change::Pipeline(pipeline(2, Flavor::Omni)));
    play.change(0, &Change::Process(process(2, 1_100, Role::ApiServer)));
    let role = Role::LlmStage {
        stage: Some(0),
        replica: Some(0),
    };
    play.change(0, &Change::Process(process(2, 1_200, role)));
    play.add(0, 0, add("same", 0));
    play.send_on(500, 1_100, 0, &Message::Add(add("same", 500)));
    play.out(1_000, 0, vec![first("same"), last("same", FinishReason::Stop)]);
    play.tick(1_000);
    assert_eq!(play.running(), Some(1.0));
    play.out_at(
        1_000,
        1_200,
        vec![first("same"), last("same", FinishReason::Stop)],
    );
    assert_close(&play.sink.seen_whole(Family::OmniE2eRequestLatencyS), &[1.0, 0.5]);
}

#[test]
fn processes_that_are_found_before_their_pipeline_are_adopted() {
    let mut play = Play::of(Flavor::Omni, Limits::default());
    play.change(0, &Change::Process(process(2, 1_100, Role::ApiServer)));
    let role = Role::LlmStage {
        stage: None,
        replica: None,
    };
    play.change(0, &Change::Process(process(2, 1_200, role)));
    play.change(5, &Change::Pipeline(pipeline(2, Flavor::Omni)));
    play.send_on(10, 1_100, 0, &Message::Add(add("r", 10)));
    play.out_at(20, 1_200, vec![first("r")]);
    assert_eq!(
        play.sink
            .skips(Family::VllmGenerationTokensTotal, "unknown_identity"),
        1
    );
    let known = Role::LlmStage {
        stage: Some(0),
        replica: Some(0),
    };
    play.change(30, &Change::Process(process(2, 1_200, known)));
    play.out_at(40, 1_200, vec![token("r"), last("r", FinishReason::Stop)]);
    assert_eq!(play.sink.counter(Family::VllmGenerationTokensTotal, 0, &[]), 2.0);
    assert_close(&play.sink.seen_whole(Family::OmniE2eRequestLatencyS), &[0.030]);
}

#[test]
fn a_pipeline_whose_model_is_not_known_is_served_as_unknown() {
    let mut play = Play::of(Flavor::Omni, Limits::default());
    let mut unknown = pipeline(1, Flavor::Omni);
    unknown.model = None;
    unknown.served_model = None;
    play.change(0, &Change::Pipeline(unknown));
    play.start(API, Role::ApiServer);
    play.start_engine(0, 0);
    play.tick(20_000);
    play.add(20_000, 0, add("r", 20_000));
    play.out(20_010, 0, vec![first("r")]);
    assert_eq!(play.sink.counter(Family::VllmGenerationTokensTotal, 0, &[]), 1.0);
    let names = |play: &Play| {
        let scope = play.sink.scope_at((Some(0), Some(0)));
        (scope.model.clone(), scope.served_model.clone())
    };
    assert_eq!(names(&play), ("unknown".to_owned(), "unknown".to_owned()));
    assert!(play.sink.retired.is_empty());

    // Its name is told at last: series begin anew under it, and the old ones end.
    let mut known = pipeline(1, Flavor::Omni);
    known.model = Some("org/late".to_owned());
    known.served_model = None;
    play.change(20_020, &Change::Pipeline(known.clone()));
    play.out(20_030, 0, vec![token("r")]);
    assert_eq!(play.sink.retired.len(), 2);
    let last = play.sink.scopes().last().map(|scope| scope.model.as_str());
    assert_eq!(last, Some("org/late"));
    // Told again, it changes nothing.
    play.change(20_040, &Change::Pipeline(known));
    assert_eq!(play.sink.retired.len(), 2);
}

// ---- segments ----

#[test]
fn a_session_is_one_request_with_a_first_token_in_each_segment() {
    let mut play = Play::omni(1);
    let segment = |id, arrival, resumable| Add {
        resumable,
        ..add(id, arrival)
    };
    let segment_end = Output {
        finish_reason: Some(FinishReason::Stop),
        segment_finished: true,
        ..token("rt")
    };
    play.add(0, 0, segment("rt", 0, true));
    play.out(50, 0, vec![first("rt")]);
    // Sent while the engine is busy with the first.
    play.add(70, 0, segment("rt", 70, true));
    play.out(100, 0, vec![segment_end.clone()]);
    play.out(130, 0, vec![first("rt")]);
    play.out(150, 0, vec![segment_end]);
    // Sent while the engine waits.
    play.add(1_000, 0, segment("rt", 1_000, true));
    play.out(1_040, 0, vec![first("rt")]);
    play.add(1_050, 0, segment("rt", 1_050, false));
    play.out(1_060, 0, vec![last("rt", FinishReason::Stop)]);

    let sink = &play.sink;
    assert_close(
        &sink.seen(Family::VllmTimeToFirstTokenSeconds, 0),
        &[0.050, 0.060, 0.040],
    );
    assert_eq!(sink.counter(Family::VllmRequestSuccessTotal, 0, &["stop"]), 1.0);
    assert_eq!(sink.total(Family::OmniRequestsSuccessTotal, &["stop"]), 1.0);
    assert_close(&sink.seen_whole(Family::OmniE2eRequestLatencyS), &[1.060]);
    assert_eq!(sink.seen(Family::VllmRequestPromptTokens, 0), [30.0]);
}

#[test]
fn in_plain_vllm_a_finish_ends_a_segment_while_more_input_is_to_come() {
    let mut play = Play::plain(1);
    let segment = |arrival, resumable| Add {
        resumable,
        ..add("rt", arrival)
    };
    play.add(0, 0, segment(0, true));
    play.out(50, 0, vec![first("rt"), last("rt", FinishReason::Length)]);
    assert_eq!(play.sink.sum(Family::VllmRequestSuccessTotal), 0.0);
    // The input ends while the engine waits: nothing more is computed.
    play.add(100, 0, segment(100, false));
    assert_eq!(play.sink.sum(Family::VllmRequestSuccessTotal), 0.0);
    assert_eq!(play.tracker.tracked_requests(), 0);
}

// ---- scheduler statistics ----

#[test]
fn scheduler_statistics_become_gauges_and_counters() {
    let mut play = Play::omni(2);
    for id in ["a", "b", "c"] {
        play.add(0, 0, add(id, 0));
    }
    play.out(10, 0, vec![first("a")]);
    let stats = SchedulerStats {
        running: 1,
        waiting: 2,
        skipped_waiting: Some(3),
        kv_cache_usage: 0.25,
        prefix_cache: Some(CacheStats {
            queries: 100,
            hits: 60,
        }),
        external_prefix_cache: Some(CacheStats { queries: 40, hits: 8 }),
        kv_evictions: vec![KvEviction {
            lifetime_s: 3.0,
            idle_s: 1.0,
            reuse_gaps_s: vec![0.5, 0.25],
        }],
        spec_decode: Some(SpecDecode {
            drafts: 4,
            draft_tokens: 12,
            accepted_tokens: 7,
            accepted_per_position: vec![4, 2, 1],
        }),
        waiting_lora: vec!["x"],
        running_lora: vec!["y", "z"],
        perf: Some(PerfStats {
            flops: 1e12,
            read_bytes: 5e9,
            write_bytes: 1e9,
        }),
    };
    play.stats(1_000, 0, stats.clone());
    play.stats(2_000, 0, stats);
    play.tick(2_100);

    let sink = &play.sink;
    let gauge = |family, extra: &[&str]| sink.gauge(family, at(0, 0), extra).unwrap();
    assert_eq!(gauge(Family::VllmNumRequestsRunning, &[]), 1.0);
    assert_eq!(gauge(Family::VllmNumRequestsWaiting, &[]), 5.0);
    assert_eq!(gauge(Family::VllmNumRequestsWaitingByReason, &["capacity"]), 2.0);
    assert_eq!(gauge(Family::VllmNumRequestsWaitingByReason, &["deferred"]), 3.0);
    assert_eq!(gauge(Family::VllmKvCacheUsagePerc, &[]), 0.25);
    assert_eq!(gauge(Family::OmniStageWaitingRequests, &[]), 2.0);
    assert_eq!(
        gauge(Family::VllmLoraRequestsInfo, &["", "x", "y,z"]),
        1_800_000_002.0
    );
    assert_eq!((play.running(), play.waiting()), (Some(1.0), Some(2.0)));
    let count = |family, extra: &[&str]| sink.counter(family, 0, extra);
    assert_eq!(count(Family::VllmPrefixCacheQueriesTotal, &[]), 200.0);
    assert_eq!(count(Family::VllmPrefixCacheHitsTotal, &[]), 120.0);
    assert_eq!(count(Family::VllmExternalPrefixCacheQueriesTotal, &[]), 80.0);
    assert_eq!(count(Family::VllmExternalPrefixCacheHitsTotal, &[]), 16.0);
    assert_eq!(count(Family::VllmSpecDecodeNumDraftsTotal, &[]), 8.0);
    assert_eq!(count(Family::VllmSpecDecodeNumDraftTokensTotal, &[]), 24.0);
    assert_eq!(count(Family::VllmSpecDecodeNumAcceptedTokensTotal, &[]), 14.0);
    assert_eq!(
        count(Family::VllmSpecDecodeNumAcceptedTokensPerPosTotal, &["1"]),
        4.0
    );
    assert_eq!(count(Family::VllmEstimatedFlopsPerGpuTotal, &[]), 2e12);
    assert_eq!(count(Family::VllmEstimatedReadBytesPerGpuTotal, &[]), 1e10);
    assert_eq!(count(Family::VllmEstimatedWriteBytesPerGpuTotal, &[]), 2e9);
    assert_eq!(
        sink.seen(Family::VllmKvBlockReuseGapSeconds, 0),
        [0.5, 0.25, 0.5, 0.25]
    );
    assert_eq!(sink.seen(Family::VllmKvBlockLifetimeSeconds, 0), [3.0, 3.0]);
    assert_eq!(
        sink.seen(Family::VllmKvBlockIdleBeforeEvictSeconds, 0),
        [1.0, 1.0]
    );
    assert_eq!(
        sink.seen(Family::VllmIterationTokensTotal, 0).len(),
        1,
        "a message without outputs is no iteration"
    );
}

#[test]
fn a_last_snapshot_does_not_outlive_the_work() {
    let mut play = Play::omni(1);
    play.add(0, 0, add("r", 0));
    play.out(10, 0, vec![first("r")]);
    play.stats(
        20,
        0,
        SchedulerStats {
            running: 1,
            waiting: 4,
            kv_cache_usage: 0.5,
            ..SchedulerStats::default()
        },
    );
    // Open, however long it takes: the snapshot stands.
    play.tick(60_000);
    assert_eq!(
        play.sink.gauge(Family::VllmNumRequestsRunning, at(0, 0), &[]),
        Some(1.0)
    );
    assert_eq!(play.waiting(), Some(1.0), "no more wait than are open");
    play.out(60_010, 0, vec![last("r", FinishReason::Stop)]);
    play.tick(60_020);
    assert_eq!((play.running(), play.waiting()), (Some(0.0), Some(0.0)));
    for family in [
        Family::VllmNumRequestsRunning,
        Family::VllmNumRequestsWaiting,
        Family::VllmKvCacheUsagePerc,
        Family::OmniStageWaitingRequests,
    ] {
        assert_eq!(play.sink.gauge(family, at(0, 0), &[]), Some(0.0), "{family:?}");
    }
}

#[test]
fn without_statistics_running_is_what_the_engine_has_answered_for() {
    let mut play = Play::plain(1);
    play.add(0, 0, add("a", 0));
    play.add(0, 0, add("b", 0));
    play.out(10, 0, vec![first("a")]);
    play.tick(20);
    assert_eq!(
        play.sink.gauge(Family::VllmNumRequestsRunning, at(0, 0), &[]),
        Some(1.0)
    );
    play.out(30, 0, vec![last("a", FinishReason::Stop)]);
    assert_eq!(
        play.sink.skips(Family::VllmRequestQueueTimeSeconds, "no_events"),
        1
    );
}

#[rstest]
#[case::weights(Some(1), ["0", "1", "0"])]
#[case::by_default(None, ["0", "1", "0"])]
#[case::all(Some(2), ["0", "0", "1"])]
#[case::pause(Some(0), ["0", "0", "0"])]
fn sleep_and_wake_up(#[case] level: Option<i64>, #[case] states: [&str; 3]) {
    let mut play = Play::plain(1);
    let call = |method, level| Message::Utility(Utility { method, level });
    let read = |play: &Play| {
        ["awake", "weights_offloaded", "discard_all"].map(|state| {
            play.sink
                .gauge(Family::VllmEngineSleepState, at(0, 0), &[state])
                .unwrap()
                .to_string()
        })
    };
    play.send(10, API, &call("reset_prefix_cache", None));
    assert_eq!(read(&play), ["1", "0", "0"]);
    play.send(20, API, &call("sleep", level));
    assert_eq!(read(&play), states);
    play.send(30, API, &call("wake_up", None));
    assert_eq!(read(&play), ["1", "0", "0"]);
}

#[test]
fn preemptions_and_corrupted_requests() {
    let mut play = Play::plain(1);
    play.add(0, 0, add("r", 0));
    play.out(10, 0, vec![first_with_events("r", 0.001, 0.002)]);
    let mut preempted = token("r");
    preempted.events.preemptions = 2;
    preempted.events.scheduled = Some(0.015);
    preempted.nans_in_logits = 3;
    play.out(20, 0, vec![preempted]);
    play.out(30, 0, vec![last("r", FinishReason::Repetition)]);
    let sink = &play.sink;
    assert_eq!(sink.counter(Family::VllmNumPreemptionsTotal, 0, &[]), 2.0);
    assert_eq!(sink.seen(Family::VllmRequestNumPreemptions, 0), [2.0]);
    assert_close(&sink.seen(Family::VllmRequestQueueTimeSeconds, 0), &[0.001]);
    assert_eq!(sink.counter(Family::VllmCorruptedRequestsTotal, 0, &[]), 1.0);
    assert_eq!(
        sink.counter(Family::VllmRequestSuccessTotal, 0, &["repetition"]),
        1.0
    );
}

#[test]
fn preemptions_are_missing_where_events_are() {
    let mut play = Play::omni(2);
    play.add(0, 0, add("r", 0));
    let mut without_events = first("r");
    without_events.events = omnitap::wire::message::Events::default();
    play.out(10, 0, vec![without_events]);
    play.out(20, 0, vec![last("r", FinishReason::Stop)]);
    let none: [f64; 0] = [];
    assert_eq!(play.sink.seen(Family::VllmRequestNumPreemptions, 0), none);
}

#[test]
fn waits_for_a_kv_transfer() {
    let mut play = Play::omni(2);
    play.add(0, 0, add("r", 0));
    let wait = |seconds, connector_type| Output {
        kv_wait: Some(KvWait {
            seconds,
            connector_type,
        }),
        ..first("r")
    };
    for (seconds, connector_type) in [
        (0.25, "MooncakeStoreConnector"),
        (0.0, "unknown"),
        (-1.0, "unknown"),
        (f64::INFINITY, "unknown"),
    ] {
        play.out(10, 0, vec![wait(seconds, connector_type)]);
    }
    play.out(20, 0, vec![last("r", FinishReason::Stop)]);
    let mut late = wait(0.5, "MooncakeStoreConnector");
    (late.new_tokens, late.prefill) = (0, None);
    play.out(30, 0, vec![late]);
    let seen = |connector| play.sink.seen_at(Family::OmniKvWaitS, WHOLE, &[connector]);
    assert_eq!(
        seen("MooncakeStoreConnector"),
        [0.25, 0.5],
        "the second ends after the request"
    );
    assert_eq!(seen("unknown"), [0.0]);
}

#[test]
fn a_cut_frame_spoils_only_what_it_hides() {
    let mut play = Play::plain(1);
    for id in ["a", "b"] {
        play.add(0, 0, add(id, 0));
    }
    play.out(100, 0, vec![first("a"), first("b")]);
    let cut = EngineOutputs {
        outputs_lost: 1,
        ..frame(150, vec![token("a")])
    };
    play.send(150, engine(0, 0), &Message::Outputs(cut));
    play.out(180, 0, vec![token("a"), token("b")]);
    play.out(200, 0, vec![token("a"), token("b")]);
    assert_close(
        &play.sink.seen(Family::VllmInterTokenLatencySeconds, 0),
        &[0.050, 0.030, 0.020, 0.020],
    );
    assert_eq!(
        play.sink.skips(Family::VllmInterTokenLatencySeconds, "frame_cut"),
        1
    );
    assert_eq!(play.sink.skips(Family::VllmIterationTokensTotal, "frame_cut"), 1);
    assert_eq!(play.sink.seen(Family::VllmIterationTokensTotal, 0).len(), 3);
    // The finish of b lies in a cut part too; the engine's list still names it.
    let cut = EngineOutputs {
        outputs_lost: 1,
        finished_requests: vec!["b"],
        ..frame(220, vec![token("a")])
    };
    play.send(220, engine(0, 0), &Message::Outputs(cut));
    assert_eq!(
        play.sink
            .skips(Family::VllmRequestSuccessTotal, "finish_not_seen"),
        1
    );
    assert_eq!(play.tracker.tracked_requests(), 1);
}

// ---- audio ----

#[test]
fn a_streamed_audio_request() {
    let mut play = Play::omni(2);
    play.add(1_000, 0, add_streamed("speech-a", 1_000));
    play.add(1_000, 1, add_streamed("speech-a", 1_000));
    play.out(1_100, 0, vec![first("speech-a")]);
    play.out(1_150, 1, vec![audio("speech-a", 0, None)]);
    play.out(1_200, 1, vec![audio("speech-a", 12_000, Some(24_000))]);
    play.out(1_900, 1, vec![audio("speech-a", 12_000, None)]);
    play.out(1_950, 0, vec![last("speech-a", FinishReason::Stop)]);
    play.out(2_200, 1, vec![last_audio("speech-a", 6_000)]);

    let sink = &play.sink;
    assert_close(&sink.seen(Family::OmniAudioTtfpS, 1), &[0.200]);
    assert_close(&sink.seen(Family::OmniAudioDurationS, 1), &[1.25]);
    assert_close(&sink.seen(Family::OmniAudioRtf, 1), &[1.2 / 1.25]);
    assert_eq!(sink.counter(Family::OmniAudioFramesTotal, 1, &[]), 30_000.0);
    // Chunk 2 is 0.2 s late; chunk 3 comes in time again.
    assert_close(&sink.seen(Family::OmniAudioUnderrunS, 1), &[0.200]);
    assert_eq!(sink.sum(Family::OmniAudioContinuityOkTotal), 0.0);
    assert_eq!(sink.sum(Family::OmniAudioSkippedRequestsTotal), 0.0);
    assert_eq!(sink.total(Family::OmniRequestsSuccessTotal, &["stop"]), 1.0);
}

#[test]
fn a_stream_that_is_given_up_has_had_its_first_packet() {
    let mut play = Play::omni(2);
    play.add(1_000, 0, add_streamed("speech-a", 1_000));
    play.add(1_000, 1, add_streamed("speech-a", 1_000));
    play.out(1_100, 0, vec![first("speech-a")]);
    play.out(1_200, 1, vec![audio("speech-a", 12_000, Some(24_000))]);
    play.out(1_250, 1, vec![audio("speech-a", 12_000, None)]);
    play.abort(1_300, 0, "speech-a");
    play.abort(1_300, 1, "speech-a");
    play.tick(10_000);
    assert_close(&play.sink.seen(Family::OmniAudioTtfpS, 1), &[0.200]);
    assert_eq!(play.sink.seen(Family::OmniAudioUnderrunS, 1), Vec::<f64>::new());
}

#[test]
fn a_player_that_never_runs_dry_is_continuous() {
    let mut play = Play::omni(1);
    play.add(0, 0, add_streamed("r", 0));
    play.out(100, 0, vec![audio("r", 24_000, Some(24_000))]);
    play.out(1_150, 0, vec![audio("r", 24_000, None)]);
    play.out(1_200, 0, vec![last_audio("r", 24_000)]);
    assert_close(&play.sink.seen(Family::OmniAudioUnderrunS, 0), &[0.050]);
    assert_eq!(
        play.sink.counter(Family::OmniAudioContinuityOkTotal, 0, &["100"]),
        1.0
    );
}

#[rstest]
#[case::asks_for_one_output(omnitap::wire::message::OutputKind::FinalOnly, 0)]
#[case::does_not_tell(omnitap::wire::message::OutputKind::Cumulative, 1)]
fn audio_that_is_not_known_to_be_streamed_has_no_first_packet(
    #[case] output_kind: omnitap::wire::message::OutputKind,
    #[case] skipped: u64,
) {
    let mut play = Play::omni(1);
    let whole = Add {
        output_kind,
        ..add("r", 0)
    };
    play.add(0, 0, whole);
    play.out(100, 0, vec![audio("r", 24_000, Some(16_000))]);
    play.out(200, 0, vec![last_audio("r", 8_000)]);
    let sink = &play.sink;
    assert_close(&sink.seen(Family::OmniAudioDurationS, 0), &[2.0]);
    assert_close(&sink.seen(Family::OmniAudioRtf, 0), &[0.1]);
    assert_eq!(sink.seen(Family::OmniAudioTtfpS, 0), Vec::<f64>::new());
    assert_eq!(sink.seen(Family::OmniAudioUnderrunS, 0), Vec::<f64>::new());
    assert_eq!(sink.skips(Family::OmniAudioTtfpS, "streaming_unknown"), skipped);
}

#[test]
fn a_silent_audio_request_is_counted_as_such() {
    let mut play = Play::omni(1);
    for (id, frames) in [("loud", 100), ("empty", 0)] {
        play.add(0, 0, add_streamed(id, 0));
        play.out(100, 0, vec![last_audio(id, frames)]);
    }
    play.add(0, 0, add_streamed("nothing", 0));
    play.out(200, 0, vec![last("nothing", FinishReason::Stop)]);
    let sink = &play.sink;
    assert_eq!(
        sink.counter(Family::OmniAudioSkippedRequestsTotal, 0, &["no_audio_data"]),
        2.0
    );
    assert_eq!(sink.seen(Family::OmniAudioDurationS, 0).len(), 1);
    assert_eq!(sink.seen(Family::OmniAudioUnderrunS, 0).len(), 1);
}

#[test]
fn text_of_a_pipeline_with_audio_is_not_silent_audio() {
    let mut play = Play::omni(2);
    play.add(0, 0, add("text", 0));
    play.out(100, 0, vec![first("text"), last("text", FinishReason::Stop)]);
    play.tick(6_000);
    assert_eq!(play.sink.sum(Family::OmniRequestsSuccessTotal), 1.0);
    assert_eq!(play.sink.sum(Family::OmniAudioSkippedRequestsTotal), 0.0);
}

#[test]
fn audio_that_began_before_the_agent_counts_its_frames_alone() {
    let mut play = Play::omni(1);
    play.out(100, 0, vec![audio("old", 1_000, Some(24_000))]);
    play.out(200, 0, vec![last_audio("old", 500)]);
    let sink = &play.sink;
    assert_eq!(sink.counter(Family::OmniAudioFramesTotal, 0, &[]), 1_500.0);
    assert_eq!(sink.seen(Family::OmniAudioDurationS, 0), Vec::<f64>::new());
    assert_eq!(sink.skips(Family::OmniAudioDurationS, "start_not_seen"), 1);
    assert_eq!(sink.skips(Family::OmniAudioRtf, "start_not_seen"), 1);
}

#[test]
fn a_sample_rate_that_changes_spoils_the_player_alone() {
    let mut play = Play::omni(1);
    play.add(0, 0, add_streamed("r", 0));
    play.out(100, 0, vec![audio("r", 1_000, None)]);
    let end = Output {
        finish_reason: Some(FinishReason::Stop),
        ..audio("r", 7_000, Some(16_000))
    };
    play.out(200, 0, vec![end]);
    assert_close(&play.sink.seen(Family::OmniAudioDurationS, 0), &[0.5]);
    assert_eq!(play.sink.seen(Family::OmniAudioUnderrunS, 0), Vec::<f64>::new());
    assert_eq!(
        play.sink.skips(Family::OmniAudioUnderrunS, "sample_rate_changed"),
        1
    );
}

#[test]
fn an_aborted_audio_request_gives_no_audio_sample() {
    let mut play = Play::omni(1);
    play.add(0, 0, add_streamed("r", 0));
    play.out(100, 0, vec![audio("r", 1_000, Some(24_000))]);
    play.abort(150, 0, "r");
    play.tick(3_000);
    assert_eq!(play.sink.sum(Family::OmniAudioFramesTotal), 0.0);
    assert_eq!(play.sink.seen(Family::OmniAudioUnderrunS, 0), Vec::<f64>::new());
}

/// The worked examples of docs/wire.md section "Audio continuity", to the bit.
#[rstest]
#[case::in_time(&[0.5, 0.9, 1.6], &[48_000, 48_000, 24_000], 24_000, 1, 0.0, 0, true)]
#[case::deficits_accumulate(&[0.2, 0.75, 1.35], &[24_000; 3], 24_000, 1, 0.150_000_000_000_000_16, 2, false)]
#[case::never_rebased(&[0.0, 1.0, 2.0, 3.0], &[24_000; 4], 24_000, 1, 1.5, 3, false)]
#[case::exactly_at_the_threshold(&[0.0, 0.6], &[24_000; 2], 24_000, 1, 0.1, 1, true)]
#[case::just_above(&[0.0, 0.600_000_1], &[24_000; 2], 24_000, 1, 0.100_000_100_000_000_05, 1, false)]
#[case::two_channels(&[0.0, 0.6], &[24_000; 2], 24_000, 2, 0.35, 1, false)]
#[case::equal_times(&[0.0, 0.0, 2.0], &[24_000; 3], 24_000, 1, 1.0, 1, false)]
#[case::one_chunk(&[7.0], &[24_000], 24_000, 1, 0.0, 0, true)]
#[case::no_chunk(&[], &[], 24_000, 1, 0.0, 0, true)]
#[case::no_rate(&[0.0, 9.0], &[1, 1], 0, 1, 0.0, 0, true)]
fn the_player_simulation(
    #[case] times: &[f64],
    #[case] bytes: &[u64],
    #[case] sample_rate: u32,
    #[case] channels: u64,
    #[case] max_underrun_s: f64,
    #[case] underruns: u32,
    #[case] is_continuous: bool,
) {
    let mut player = Continuity::new(sample_rate, 2, channels);
    for (&time, &bytes) in times.iter().zip(bytes) {
        player.push(time, bytes);
    }
    assert_eq!(player.max_underrun_s().to_bits(), max_underrun_s.to_bits());
    assert_eq!(player.underruns(), underruns);
    assert_eq!(player.is_continuous(0.1), is_continuous);
}
