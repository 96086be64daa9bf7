//! Named plays of exchanges over HTTP beside the messages between the API server and its stages.

#![allow(
    clippy::float_cmp,
    reason = "counts are exact, and the player simulation is compared to the bit"
)]

mod pipeline_support;

use omnitap::{
    host::identity::{Flavor, Role},
    metrics::catalogue::Family,
    pipeline::{audio::Continuity, tracker::Limits},
    wire::{
        http::note::{Ask, AudioChunk, End, Endpoint, ImageAnswer, Note},
        message::{Audio, FinishReason, Message, Output},
    },
};
use pipeline_support::{API, Play, add, add_streamed, assert_close, engine, first, last};
use proptest::prelude::*;
use rstest::rstest;

fn audio(id: &str, frames: u64) -> Output<'_> {
    Output {
        request_id: id,
        audio: Some(Audio {
            frames,
            sample_rate: Some(24_000),
        }),
        ..Output::default()
    }
}

fn last_audio(id: &str, frames: u64) -> Output<'_> {
    Output {
        finish_reason: Some(FinishReason::Stop),
        ..audio(id, frames)
    }
}

/// A request for streamed speech that is given to both stages, and whose first audio is there at 1.2 s.
fn speaking() -> Play {
    let mut play = Play::omni(2);
    play.asks(1_000, 1, Endpoint::Speech, Ask::default());
    play.add(1_010, 0, add_streamed("speech-a", 1_001));
    play.add(1_010, 1, add_streamed("speech-a", 1_001));
    play.answers(1_011, 1, 200, true);
    play.out(1_100, 0, vec![first("speech-a")]);
    play.out(1_200, 1, vec![audio("speech-a", 12_000)]);
    play
}

fn aborted(play: &Play, reason: &str) -> f64 {
    play.sink.total(Family::OmniSpeechStreamAbortedTotal, &[reason])
}

// ---- first packet and continuity ----

#[test]
fn a_stream_is_measured_where_it_is_written() {
    let mut play = speaking();
    play.writes(1_210, 1, 24_000);
    // Its frames come in time, its write does not: 0.2 s after the player ran dry.
    play.out(1_300, 1, vec![audio("speech-a", 12_000)]);
    play.writes(1_910, 1, 24_000);
    play.out(1_950, 0, vec![last("speech-a", FinishReason::Stop)]);
    play.out(2_000, 1, vec![last_audio("speech-a", 6_000)]);
    play.writes(2_100, 1, 12_000);
    play.ends(2_101, 1, End::Whole);
    let sink = &play.sink;
    assert_close(&sink.seen(Family::OmniAudioTtfpS, 1), &[0.210]);
    assert_close(&sink.seen(Family::OmniAudioUnderrunS, 1), &[0.200]);
    assert_eq!(sink.sum(Family::OmniAudioContinuityOkTotal), 0.0);
    assert_eq!(sink.total(Family::OmniSpeechStreamCompletedTotal, &[]), 1.0);
    assert_eq!(sink.sum(Family::OmniSpeechStreamAbortedTotal), 0.0);
    // What is not about writing stays with the frames.
    assert_close(&sink.seen(Family::OmniAudioDurationS, 1), &[1.25]);
    assert_eq!(sink.total(Family::OmniRequestsSuccessTotal, &["stop"]), 1.0);
    assert_eq!(play.tracker.tracked_exchanges(), 0);
}

#[test]
fn a_stream_may_be_written_when_its_request_is_over() {
    let mut play = speaking();
    play.out(1_205, 0, vec![last("speech-a", FinishReason::Stop)]);
    play.out(1_206, 1, vec![last_audio("speech-a", 6_000)]);
    play.writes(1_250, 1, 24_000);
    play.writes(1_260, 1, 12_000);
    play.ends(1_270, 1, End::Whole);
    assert_close(&play.sink.seen(Family::OmniAudioTtfpS, 1), &[0.250]);
    assert_close(&play.sink.seen(Family::OmniAudioUnderrunS, 1), &[0.0]);
    assert_eq!(
        play.sink.counter(Family::OmniAudioContinuityOkTotal, 1, &["100"]),
        1.0
    );
    assert_eq!(play.tracker.tracked_exchanges(), 0);
}

#[test]
fn requests_that_came_by_no_exchange_are_measured_at_their_frames() {
    let mut play = speaking();
    play.writes(1_210, 1, 24_000);
    play.add(2_000, 0, add_streamed("speech-b", 2_000));
    play.add(2_000, 1, add_streamed("speech-b", 2_000));
    play.out(2_050, 0, vec![first("speech-b")]);
    play.out(2_100, 1, vec![audio("speech-b", 12_000)]);
    assert_close(&play.sink.seen(Family::OmniAudioTtfpS, 1), &[0.210, 0.100]);
}

#[rstest]
#[case::of_the_client(Some(8_000), None, 8_000)]
#[case::of_the_answer(Some(8_000), Some(16_000), 16_000)]
#[case::of_the_stage(None, None, 24_000)]
fn the_rate_that_a_player_runs_at(#[case] asked: Option<u32>, #[case] told: Option<u32>, #[case] rate: u64) {
    let mut play = Play::omni(1);
    let ask = Ask {
        sample_rate: asked,
        ..Ask::default()
    };
    play.asks(0, 1, Endpoint::Speech, ask);
    play.add(1, 0, add_streamed("speech-a", 1));
    play.answers(2, 1, 200, true);
    play.out(10, 0, vec![audio("speech-a", 1_000)]);
    let chunk = AudioChunk {
        bytes: 2 * rate,
        sample_rate: told,
        channels: None,
    };
    play.http(100, 1, Note::Audio(chunk));
    // A second of sound, and 1.5 s until the next chunk.
    play.http(1_600, 1, Note::Audio(chunk));
    play.ends(1_700, 1, End::Whole);
    assert_close(&play.sink.seen(Family::OmniAudioUnderrunS, 0), &[0.5]);
}

#[test]
fn chunks_of_unknown_size_give_a_first_packet_and_nothing_else() {
    let mut play = speaking();
    play.writes(1_210, 1, 0);
    play.ends(1_300, 1, End::Whole);
    assert_close(&play.sink.seen(Family::OmniAudioTtfpS, 1), &[0.210]);
    assert_eq!(play.sink.skips(Family::OmniAudioUnderrunS, "chunks_not_clear"), 1);
}

#[test]
fn whole_files_have_no_first_packet() {
    let mut play = Play::omni(1);
    play.asks(0, 1, Endpoint::Speech, Ask::default());
    play.add(5, 0, add("speech-a", 1));
    play.out(100, 0, vec![last_audio("speech-a", 24_000)]);
    play.answers(120, 1, 200, false);
    play.ends(121, 1, End::Whole);
    assert!(play.sink.seen(Family::OmniAudioTtfpS, 0).is_empty());
    assert_eq!(play.sink.sum(Family::OmniSpeechStreamCompletedTotal), 0.0);
    assert_eq!(play.sink.total(Family::OmniRequestsSuccessTotal, &["stop"]), 1.0);
}

// ---- how streams end ----

#[rstest]
#[case::engine_awaited(Endpoint::Speech, false, "cancelled")]
#[case::half_written(Endpoint::Speech, true, "closed")]
#[case::websocket(Endpoint::Sentence, false, "closed")]
fn a_client_that_leaves_a_stream(#[case] endpoint: Endpoint, #[case] mid_chunk: bool, #[case] reason: &str) {
    let mut play = Play::omni(1);
    play.asks(1_000, 1, endpoint, Ask::default());
    play.answers(1_000, 1, 200, true);
    play.add(1_010, 0, add_streamed("speech-a", 1_000));
    play.out(1_100, 0, vec![audio("speech-a", 24_000)]);
    play.writes(1_110, 1, 48_000);
    play.ends(1_200, 1, End::ClientLeft { mid_chunk });
    play.abort(1_201, 0, "speech-a");
    play.tick(9_000);
    assert_eq!(aborted(&play, reason), 1.0);
    assert_eq!(play.sink.sum(Family::OmniSpeechStreamAbortedTotal), 1.0);
    assert_eq!(play.sink.sum(Family::OmniSpeechStreamCompletedTotal), 0.0);
    assert!(play.sink.seen(Family::OmniAudioUnderrunS, 0).is_empty());
    let failed = play
        .sink
        .total(Family::OmniRequestsFailedTotal, &["client_disconnect"]);
    assert_eq!(failed, 1.0);
    assert_eq!(play.sink.total(Family::OmniRequestsSuccessTotal, &["abort"]), 1.0);
    play.tick(90_000);
    assert_eq!(play.tracker.tracked_exchanges(), 0);
}

#[rstest]
#[case::told_in_the_stream(End::Failed, false, "error")]
#[case::cut(End::Cut, false, "error")]
#[case::engine_dead(End::Failed, true, "engine_dead")]
fn a_stream_that_fails(#[case] end: End, #[case] dies: bool, #[case] reason: &str) {
    let mut play = speaking();
    play.writes(1_210, 1, 24_000);
    play.ends(1_300, 1, end);
    if dies {
        play.send(1_350, engine(1, 0), &Message::EngineDead);
    }
    play.tick(2_000);
    assert_eq!(
        play.sink.sum(Family::OmniSpeechStreamAbortedTotal),
        0.0,
        "not settled"
    );
    play.tick(4_000);
    assert_eq!(aborted(&play, reason), 1.0);
    assert_eq!(play.sink.sum(Family::OmniSpeechStreamAbortedTotal), 1.0);
    assert!(play.sink.seen(Family::OmniAudioUnderrunS, 1).is_empty());
}

#[test]
fn a_stream_whose_end_was_lost_is_counted_as_nothing_but_that() {
    let mut play = speaking();
    play.writes(1_210, 1, 24_000);
    play.ends(1_300, 1, End::Lost);
    play.tick(9_000);
    assert_eq!(play.sink.sum(Family::OmniSpeechStreamCompletedTotal), 0.0);
    assert_eq!(play.sink.sum(Family::OmniSpeechStreamAbortedTotal), 0.0);
    for family in [Family::OmniSpeechStreamCompletedTotal, Family::OmniAudioUnderrunS] {
        assert_eq!(play.sink.skips(family, "events_lost"), 1);
    }
}

#[test]
fn a_stream_without_samples_is_complete_all_the_same() {
    let mut play = speaking();
    play.ends(1_300, 1, End::Whole);
    assert_eq!(play.sink.total(Family::OmniSpeechStreamCompletedTotal, &[]), 1.0);
    assert!(play.sink.seen(Family::OmniAudioTtfpS, 1).is_empty());
}

#[test]
fn refused_requests_count_as_nothing() {
    let mut play = Play::omni(1);
    play.asks(0, 1, Endpoint::Speech, Ask::default());
    play.answers(5, 1, 422, false);
    play.ends(6, 1, End::Whole);
    play.tick(9_000);
    for family in [
        Family::OmniSpeechStreamCompletedTotal,
        Family::OmniSpeechStreamAbortedTotal,
        Family::OmniRequestsFailedTotal,
        Family::OmniRequestsSuccessTotal,
    ] {
        assert_eq!(play.sink.sum(family), 0.0, "{family:?}");
    }
}

// ---- joins ----

/// Two replicas of an audio stage, on sockets that are known by one request each.
fn two_replicas() -> Play {
    let mut play = Play::omni(0);
    play.start_engine(0, 0);
    play.start_engine(0, 1);
    for (socket, replica, id) in [(0, 0, "warm-a"), (1, 1, "warm-b")] {
        play.add(1, socket, add(id, 0));
        play.out_at(2, engine(0, replica), vec![last_audio(id, 10)]);
    }
    play
}

#[test]
fn arrivals_tell_exchanges_apart() {
    let mut play = two_replicas();
    play.asks(1_000, 1, Endpoint::Speech, Ask::default());
    play.asks(1_050, 2, Endpoint::Speech, Ask::default());
    // The later one is given to its stage first.
    play.add(1_060, 1, add_streamed("speech-b", 1_051));
    play.add(1_070, 0, add_streamed("speech-a", 1_001));
    play.out_at(1_100, engine(0, 1), vec![audio("speech-b", 2_400)]);
    play.out_at(1_100, engine(0, 0), vec![audio("speech-a", 2_400)]);
    play.writes(1_150, 1, 4_800);
    play.writes(1_160, 2, 4_800);
    let seen = |replica| {
        play.sink
            .seen_at(Family::OmniAudioTtfpS, (Some(0), Some(replica)), &[])
    };
    assert_close(&seen(0), &[0.150]);
    assert_close(&seen(1), &[0.110]);
    assert_eq!(play.tracker.ambiguous_joins(), 0);
}

#[test]
fn exchanges_that_are_alike_give_no_replica() {
    let mut play = two_replicas();
    play.asks(1_000, 1, Endpoint::Speech, Ask::default());
    play.asks(1_001, 2, Endpoint::Speech, Ask::default());
    play.add(1_010, 0, add_streamed("speech-a", 1_002));
    play.add(1_010, 1, add_streamed("speech-b", 1_002));
    for (replica, id) in [(0, "speech-a"), (1, "speech-b")] {
        play.out_at(1_100, engine(0, replica), vec![audio(id, 2_400)]);
    }
    for exchange in [1, 2] {
        play.answers(1_110, exchange, 200, true);
        play.writes(1_150, exchange, 4_800);
        play.ends(1_160, exchange, End::Whole);
    }
    assert_eq!(play.sink.skips(Family::OmniAudioTtfpS, "ambiguous_join"), 2);
    assert_eq!(play.tracker.ambiguous_joins(), 1);
    assert_eq!(play.sink.total(Family::OmniSpeechStreamCompletedTotal, &[]), 2.0);
}

#[test]
fn with_one_replica_it_does_not_matter_whose_stream_it_is() {
    let mut play = Play::omni(1);
    for exchange in [1, 2] {
        play.asks(1_000, exchange, Endpoint::Speech, Ask::default());
    }
    for id in ["speech-a", "speech-b"] {
        play.add(1_010, 0, add_streamed(id, 1_001));
        play.out(1_100, 0, vec![audio(id, 2_400)]);
    }
    play.writes(1_150, 1, 4_800);
    play.writes(1_160, 2, 4_800);
    assert_close(&play.sink.seen(Family::OmniAudioTtfpS, 0), &[0.150, 0.160]);
}

#[test]
fn a_stream_keeps_its_samples_when_its_request_was_taken_for_anothers() {
    let mut play = speaking();
    play.writes(1_210, 1, 24_000);
    // The process was busy: it took neither arrival right after reading. The first request goes to the second
    // exchange, which streams on when that request has been given up.
    play.asks(2_000, 2, Endpoint::Speech, Ask::default());
    play.asks(2_030, 3, Endpoint::Speech, Ask::default());
    play.add(2_060, 0, add_streamed("speech-b", 2_050));
    play.add(2_061, 0, add_streamed("speech-c", 2_051));
    play.abort(2_250, 0, "speech-b");
    play.tick(4_000);
    play.answers(4_000, 3, 200, true);
    play.writes(4_030, 3, 24_000);
    play.writes(4_040, 3, 24_000);
    play.ends(4_050, 3, End::Whole);
    assert_close(&play.sink.seen(Family::OmniAudioTtfpS, 1), &[0.210, 2.0]);
    assert_eq!(play.sink.seen(Family::OmniAudioUnderrunS, 1).len(), 1);
}

#[test]
fn the_id_in_an_answer_settles_a_guess() {
    let mut play = two_replicas();
    for exchange in [1, 2] {
        play.asks(1_000, exchange, Endpoint::Chat, Ask::default());
    }
    play.add(1_010, 0, add_streamed("chatcmpl-a-11111111", 1_001));
    play.add(1_010, 1, add_streamed("chatcmpl-b-22222222", 1_001));
    play.out_at(1_100, engine(0, 0), vec![audio("chatcmpl-a-11111111", 2_400)]);
    play.out_at(1_100, engine(0, 1), vec![audio("chatcmpl-b-22222222", 2_400)]);
    // Joined in their order, which was the wrong one.
    play.http(1_110, 1, Note::Named("chatcmpl-b".into()));
    play.writes(1_120, 1, 4_800);
    play.http(1_130, 2, Note::Named("chatcmpl-a".into()));
    play.writes(1_140, 2, 4_800);
    let seen = |replica| {
        play.sink
            .seen_at(Family::OmniAudioTtfpS, (Some(0), Some(replica)), &[])
    };
    assert_close(&seen(1), &[0.120]);
    assert_close(&seen(0), &[0.140]);
}

#[test]
fn an_id_that_the_client_asked_for_is_heeded() {
    let mut play = two_replicas();
    for (exchange, name) in [(1, "x1"), (2, "x2")] {
        let asked = Note::Asked {
            endpoint: Endpoint::Chat,
            request_id: Some(name.into()),
        };
        play.http(1_000, exchange, asked);
        play.http(1_000, exchange, Note::Read(Ask::default()));
    }
    play.add(1_010, 0, add_streamed("chatcmpl-x2-11111111", 1_001));
    play.out_at(1_100, engine(0, 0), vec![audio("chatcmpl-x2-11111111", 2_400)]);
    play.writes(1_150, 2, 4_800);
    assert_close(
        &play.sink.seen_at(Family::OmniAudioTtfpS, (Some(0), Some(0)), &[]),
        &[0.150],
    );
    assert_eq!(play.tracker.ambiguous_joins(), 0);
}

#[test]
fn requests_of_other_kinds_and_times_are_not_joined() {
    let mut play = Play::omni(1);
    play.asks(1_000, 1, Endpoint::Speech, Ask::default());
    play.add(1_010, 0, add_streamed("chatcmpl-a", 1_001));
    // Came in long before the exchange did.
    play.add(1_020, 0, add_streamed("speech-b", 500));
    play.out(
        1_100,
        0,
        vec![audio("chatcmpl-a", 2_400), audio("speech-b", 2_400)],
    );
    play.writes(1_110, 1, 4_800);
    assert_eq!(play.sink.skips(Family::OmniAudioTtfpS, "not_joined"), 1);
    assert_close(&play.sink.seen(Family::OmniAudioTtfpS, 0), &[0.099, 0.600]);
}

// ---- failures ----

#[test]
fn an_abort_while_the_client_is_there_is_the_api_s() {
    let mut play = speaking();
    play.abort(1_300, 0, "speech-a");
    play.abort(1_300, 1, "speech-a");
    play.tick(9_000);
    assert_eq!(
        play.sink
            .total(Family::OmniRequestsFailedTotal, &["client_abort"]),
        1.0
    );
    assert_eq!(play.sink.sum(Family::OmniRequestsFailedTotal), 1.0);
    assert_eq!(play.sink.total(Family::OmniRequestsSuccessTotal, &["abort"]), 1.0);
}

#[test]
fn an_abort_without_an_exchange_is_taken_for_a_client_that_left() {
    let mut play = Play::omni(1);
    play.add(0, 0, add("speech-a", 0));
    play.abort(100, 0, "speech-a");
    play.tick(9_000);
    let failed = play
        .sink
        .total(Family::OmniRequestsFailedTotal, &["client_disconnect"]);
    assert_eq!(failed, 1.0);
}

// ---- waiting ----

#[test]
fn requests_that_no_stage_was_given_yet_wait() {
    let mut play = Play::omni(1);
    let asked = Note::Asked {
        endpoint: Endpoint::Speech,
        request_id: None,
    };
    play.http(1_000, 1, asked);
    play.tick(1_001);
    assert_eq!(play.waiting(), Some(0.0), "its body is still on its way");
    play.http(1_002, 1, Note::Read(Ask::default()));
    play.tick(1_003);
    assert_eq!((play.running(), play.waiting()), (Some(0.0), Some(1.0)));
    play.add(1_010, 0, add("speech-a", 1_001));
    play.tick(1_011);
    assert_eq!((play.running(), play.waiting()), (Some(1.0), Some(0.0)));
    // One that is refused is gone.
    play.asks(1_020, 2, Endpoint::Chat, Ask::default());
    play.tick(1_021);
    assert_eq!(play.waiting(), Some(1.0));
    play.answers(1_022, 2, 400, false);
    play.tick(1_023);
    assert_eq!(play.waiting(), Some(0.0));
}

// ---- images ----

fn image_answer() -> ImageAnswer {
    ImageAnswer {
        count: None,
        size: Some((512, 256)),
        queue_wait_ms: Some(0.0),
        preprocess_ms: Some(1.5),
        stage_gen_ms: vec![(0, 120.75)],
        first_image_ms: Some(118.5),
        vae_decode_s: Some(0.02),
        denoise_s: Some(0.1),
        peak_memory_mb: Some(4096.5),
    }
}

/// A pipeline whose only stage runs inside its API process.
fn inline() -> Play {
    let mut play = Play::of(Flavor::Omni, Limits::default());
    play.start(API, Role::ApiServer);
    play
}

#[test]
fn an_image_of_a_stage_inside_the_api_process() {
    let mut play = inline();
    let ask = Ask {
        images: Some(2),
        steps: Some(20),
        ..Ask::default()
    };
    play.asks(1_000, 1, Endpoint::Images, ask);
    play.tick(1_001);
    assert_eq!((play.running(), play.waiting()), (Some(1.0), Some(0.0)));
    play.answers(1_150, 1, 200, false);
    play.http(1_151, 1, Note::Images(image_answer()));
    play.ends(1_152, 1, End::Whole);
    play.tick(1_153);
    assert_eq!((play.running(), play.waiting()), (Some(0.0), Some(0.0)));
    let sink = &play.sink;
    let at = (Some(0), Some(0));
    assert_eq!(
        sink.seen_at(Family::OmniStageGenTimeS, at, &["diffusion"]),
        [0.120_75]
    );
    assert_eq!(
        sink.seen_whole(Family::OmniRequestQueueWaitS),
        [0.0],
        "a measured 0 counts"
    );
    assert_eq!(sink.seen_whole(Family::OmniNumInferenceSteps), [20.0]);
    assert_eq!(sink.total(Family::OmniImageCountTotal, &[]), 2.0);
    assert_eq!(sink.seen_whole(Family::OmniImagePixels), [262_144.0]);
    assert_eq!(sink.seen_at(Family::OmniImageTtfpS, at, &[]), [0.1185]);
    assert_eq!(sink.seen_at(Family::OmniVaeDecodeS, at, &[]), [0.02]);
    assert_eq!(sink.seen_at(Family::OmniDiffusionForwardS, at, &[]), [0.1]);
    assert_close(&sink.seen_at(Family::OmniDenoiseStepLatencyS, at, &[]), &[0.005]);
    assert_eq!(sink.gauge(Family::OmniPeakMemoryMb, at, &[]), Some(4096.5));
    assert_close(&sink.seen_whole(Family::OmniE2eRequestLatencyS), &[0.122_25]);
    assert_eq!(sink.total(Family::OmniRequestsSuccessTotal, &["stop"]), 1.0);
    assert_eq!(sink.sum(Family::OmniRequestsFailedTotal), 0.0);
}

#[rstest]
#[case::failed(End::Whole, Some(500), "stage_error")]
#[case::client_left(End::ClientLeft { mid_chunk: false }, None, "client_disconnect")]
fn an_image_that_is_not_made(#[case] end: End, #[case] status: Option<u16>, #[case] reason: &str) {
    let mut play = inline();
    play.asks(1_000, 1, Endpoint::Images, Ask::default());
    if let Some(status) = status {
        play.answers(1_100, 1, status, false);
    }
    play.ends(1_101, 1, end);
    assert_eq!(play.sink.total(Family::OmniRequestsFailedTotal, &[reason]), 1.0);
    assert_eq!(play.sink.sum(Family::OmniRequestsFailedTotal), 1.0);
    assert_eq!(play.sink.total(Family::OmniRequestsSuccessTotal, &["abort"]), 1.0);
    assert_eq!(play.sink.sum(Family::OmniImageCountTotal), 0.0);
}

#[test]
fn a_refused_image_counts_as_nothing() {
    let mut play = inline();
    play.asks(1_000, 1, Endpoint::Images, Ask::default());
    play.answers(1_100, 1, 400, false);
    play.ends(1_101, 1, End::Whole);
    assert_eq!(play.sink.sum(Family::OmniRequestsFailedTotal), 0.0);
    assert_eq!(play.sink.sum(Family::OmniRequestsSuccessTotal), 0.0);
}

#[test]
fn of_a_stage_in_a_process_the_answer_gives_the_wait_alone() {
    let mut play = Play::omni(1);
    let role = Role::DiffusionStage {
        stage: Some(1),
        replica: Some(0),
    };
    play.start(300, role);
    play.asks(1_000, 1, Endpoint::Images, Ask::default());
    play.answers(1_100, 1, 200, false);
    play.http(1_100, 1, Note::Images(image_answer()));
    play.ends(1_101, 1, End::Whole);
    assert_eq!(play.sink.seen_whole(Family::OmniRequestQueueWaitS), [0.0]);
    for family in [Family::OmniImageCountTotal, Family::OmniRequestsSuccessTotal] {
        assert_eq!(play.sink.sum(family), 0.0, "{family:?}");
    }
    assert!(play.sink.seen_whole(Family::OmniNumInferenceSteps).is_empty());
}

// ---- the end of things ----

#[test]
fn an_api_process_takes_its_exchanges_with_it() {
    let mut play = speaking();
    play.asks(1_220, 2, Endpoint::Chat, Ask::default());
    play.stop(1_300, API);
    assert_eq!(play.tracker.tracked_exchanges(), 0);
    assert_eq!(
        play.sink.total(Family::OmniRequestsFailedTotal, &["unknown"]),
        1.0
    );
}

#[test]
fn exchanges_that_nothing_is_heard_of_are_given_up() {
    let mut play = Play::omni(1);
    play.asks(0, 1, Endpoint::Chat, Ask::default());
    play.tick(3_600_000);
    assert_eq!(play.tracker.tracked_exchanges(), 0);
    assert_eq!(
        play.sink
            .skips(Family::OmniSpeechStreamCompletedTotal, "timed_out"),
        1
    );
}

// ---- the player ----

/// The batch computation of the reference: worst deficit and number of late chunks.
fn reference(chunks: &[(f64, u64)], bytes_per_s: f64) -> (f64, u32) {
    let (mut worst, mut late, mut received) = (0.0_f64, 0, 0.0);
    for (number, (time, bytes)) in chunks.iter().enumerate() {
        if number > 0 {
            let deficit = ((time - chunks[0].0) * bytes_per_s - received) / bytes_per_s;
            if deficit > 0.0 {
                worst = worst.max(deficit);
                late += 1;
            }
        }
        #[allow(clippy::cast_precision_loss, reason = "small numbers of bytes")]
        let bytes = *bytes as f64;
        received += bytes;
    }
    (worst, late)
}

proptest! {
    #[test]
    fn the_player_is_the_reference_to_the_bit(
        gaps in prop::collection::vec((prop_oneof![2 => Just(0.0), 8 => 0.0..2.0_f64], 0_u64..200_000), 1..40),
        start in 0.0..1e6_f64,
    ) {
        let mut time = start;
        let chunks: Vec<(f64, u64)> = gaps
            .into_iter()
            .map(|(gap, bytes)| {
                time += gap;
                (time, bytes)
            })
            .collect();
        let mut player = Continuity::new(24_000, 2, 1);
        for (time, bytes) in &chunks {
            player.push(*time, *bytes);
        }
        let (worst, late) = reference(&chunks, 48_000.0);
        prop_assert_eq!(player.max_underrun_s().to_bits(), worst.to_bits());
        prop_assert_eq!(player.underruns(), late);
    }

    #[test]
    fn a_single_chunk_never_runs_dry(time in 0.0..1e6_f64, bytes in any::<u64>()) {
        let mut player = Continuity::new(24_000, 2, 1);
        player.push(time, bytes);
        prop_assert_eq!((player.max_underrun_s(), player.underruns()), (0.0, 0));
    }

    /// Of chunks that come at one time the order does not matter to those that follow.
    #[test]
    fn chunks_at_one_time_may_change_places(
        bytes in prop::collection::vec(0_u64..100_000, 2..10), gap in 0.0..10.0_f64,
    ) {
        let play = |bytes: &mut dyn Iterator<Item = &u64>| {
            let mut player = Continuity::new(24_000, 2, 1);
            for bytes in bytes {
                player.push(5.0, *bytes);
            }
            player.push(5.0 + gap, 1);
            player.max_underrun_s().to_bits()
        };
        prop_assert_eq!(play(&mut bytes.iter()), play(&mut bytes.iter().rev()));
    }
}
