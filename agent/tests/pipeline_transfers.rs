//! Transfers between stages: what is paired, what is counted as skipped, and that nothing stays.

mod pipeline_support;

use std::time::Duration;

use omnitap::{
    host::identity::{Change, Flavor, PipelineId, Process, Role},
    metrics::{catalogue::Family, registry::Limits as RegistryLimits, text::Format},
    observer::Observer,
    pipeline::{
        tracker::Limits,
        transfers::{ShmTaken, TransferCounts},
    },
    record::{Entry, Item, OwnedShm},
    wire::{control::Control, shm::ShmEvent},
};
use pipeline_support::{API, MS, Play, Recorder, assert_close, engine, pipeline, process};
use proptest::prelude::*;
use rstest::rstest;

const SIZE: Family = Family::OmniTransferSizeBytes;
const TX: Family = Family::OmniTransferTxS;
const RX: Family = Family::OmniTransferRxS;
const IN_FLIGHT: Family = Family::OmniTransferInFlightS;
const ALL: [Family; 4] = [SIZE, TX, RX, IN_FLIGHT];

/// As the server makes it: the client's id and eight characters.
const KEY: &str = "speech-0123456789abcdef-1a2b3c4d_0_2";

type Edge = [&'static str; 4];
const EDGE: Edge = ["0", "0", "1", "0"];

fn seen(sink: &Recorder, family: Family, edge: Edge) -> Vec<f64> {
    sink.seen_at(family, (None, None), &edge)
}

/// Size, tx, rx, in-flight of an edge's only hop.
#[track_caller]
fn assert_hop(sink: &Recorder, edge: Edge, values: [f64; 4]) {
    for (family, value) in ALL.into_iter().zip(values) {
        assert_close(&seen(sink, family, edge), &[value]);
    }
}

fn skips(sink: &Recorder, reason: &'static str) -> [u64; 4] {
    ALL.map(|family| sink.skips(family, reason))
}

fn hops(sink: &Recorder) -> usize {
    sink.samples
        .iter()
        .filter(|((family, _), _)| *family == SIZE)
        .map(|(_, samples)| samples.len())
        .sum()
}

#[rstest]
#[case::put_first(false)]
#[case::get_first(true)]
fn a_put_and_a_get_are_one_hop(#[case] get_first: bool) {
    let mut play = Play::omni(2);
    if get_first {
        play.get(engine(1, 0), KEY, (1_010, 1_014));
        assert_eq!(play.tracker.transfers().open, 1);
    }
    // The name as `shm_open` is given it.
    play.put(engine(0, 0), &format!("/{KEY}"), 283, (1_000, 1_003));
    if !get_first {
        assert_eq!(play.tracker.transfers().open, 1);
        play.get(engine(1, 0), KEY, (1_010, 1_014));
    }
    assert_hop(&play.sink, EDGE, [283.0, 0.003, 0.004, 0.007]);
    assert_eq!(play.tracker.transfers(), TransferCounts::default());
    assert!(play.sink.skipped.is_empty());
    assert!(play.tracker.has_transfers(PipelineId(1)));
}

#[test]
fn a_receiver_that_opens_before_the_sender_is_done_waits_for_nothing() {
    let mut play = Play::omni(2);
    play.put(engine(0, 0), KEY, 8, (1_000, 1_005));
    play.get(engine(1, 0), KEY, (1_004, 1_009));
    assert_hop(&play.sink, EDGE, [8.0, 0.005, 0.005, 0.0]);
}

#[test]
fn every_chunk_of_a_request_is_a_hop() {
    let mut play = Play::omni(3);
    for chunk in 0..4 {
        let key = format!("speech-a-1a2b3c4d_0_{chunk}");
        play.put(engine(0, 0), &key, 100 + chunk, (1_000, 1_001));
        play.get(engine(1, 0), &key, (1_002, 1_003));
    }
    play.put(engine(1, 0), "speech-a-1a2b3c4d_1_0", 7, (1_010, 1_011));
    play.get(engine(2, 0), "speech-a-1a2b3c4d_1_0", (1_012, 1_013));
    assert_eq!(seen(&play.sink, SIZE, EDGE), [100.0, 101.0, 102.0, 103.0]);
    assert_eq!(seen(&play.sink, SIZE, ["1", "0", "2", "0"]), [7.0]);
}

#[test]
fn ranks_of_a_kv_cache_share_the_labels_of_their_replica() {
    let mut play = Play::omni(2);
    for (worker, parent) in [
        (900, engine(0, 0)),
        (901, engine(0, 0)),
        (910, engine(1, 0)),
        (911, 910),
    ] {
        let worker = Process {
            parent,
            ..process(1, worker, Role::Worker)
        };
        play.change(0, &Change::Process(worker));
    }
    for rank in 0..2_u32 {
        let key = format!("chatcmpl-a-1a2b3c4d_0_0_{rank}_{rank}");
        play.put(900 + rank, &key, 10, (1_000, 1_001));
        play.get(910 + rank, &key, (1_002, 1_003));
    }
    let whole = "omni_0_to_1_kv_cache_chatcmpl-b-1a2b3c4d";
    play.put(engine(0, 0), whole, 20, (1_000, 1_001));
    play.get(engine(1, 0), whole, (1_002, 1_003));
    assert_eq!(seen(&play.sink, SIZE, EDGE), [10.0, 10.0, 20.0]);
}

#[test]
fn a_key_that_is_used_again_starts_anew() {
    let mut play = Play::omni(2);
    play.put(engine(0, 0), KEY, 1, (1_000, 1_001));
    play.get(engine(1, 0), KEY, (1_002, 1_003));
    play.put(engine(0, 0), KEY, 2, (2_000, 2_001));
    // This one replaces it before it is taken.
    play.put(engine(0, 0), KEY, 3, (3_000, 3_001));
    play.get(engine(1, 0), KEY, (3_002, 3_003));
    assert_eq!(seen(&play.sink, SIZE, EDGE), [1.0, 3.0]);
    assert_eq!(skips(&play.sink, "key_reused"), [1, 1, 0, 0]);
    assert_eq!(play.tracker.transfers().open, 0);
}

#[test]
fn a_get_never_pairs_with_a_put_that_came_after_it() {
    let mut play = Play::omni(2);
    play.put(engine(0, 0), KEY, 2, (2_000, 2_001));
    play.get(engine(1, 0), KEY, (1_002, 1_003));
    assert_eq!(hops(&play.sink), 0);
    play.put(engine(0, 0), KEY, 1, (1_000, 1_001));
    play.get(engine(1, 0), KEY, (2_002, 2_003));
    assert_eq!(seen(&play.sink, SIZE, EDGE), [1.0, 2.0]);
    assert_close(&seen(&play.sink, IN_FLIGHT, EDGE), &[0.001, 0.001]);
}

#[test]
fn a_late_put_does_not_replace_a_newer_one() {
    let mut play = Play::omni(2);
    play.put(engine(0, 0), KEY, 2, (2_000, 2_001));
    play.put(engine(0, 0), KEY, 1, (1_000, 1_001));
    play.get(engine(1, 0), KEY, (2_002, 2_003));
    assert_eq!(seen(&play.sink, SIZE, EDGE), [2.0]);
    assert_eq!(skips(&play.sink, "key_reused"), [1, 1, 0, 0]);
}

#[test]
fn a_payload_that_its_sender_removes_was_never_taken() {
    let mut play = Play::omni(2);
    play.put(engine(0, 0), KEY, 1, (1_000, 1_001));
    play.unlink(engine(0, 0), KEY, 1_500);
    assert_eq!(skips(&play.sink, "never_taken"), [1, 1, 0, 0]);
    assert_eq!(play.tracker.transfers().open, 0);
    // A segment of that name that was there before: the put removes it, then makes its own.
    play.put(engine(0, 0), KEY, 5, (2_000, 2_003));
    play.unlink(engine(0, 0), KEY, 2_001);
    play.get(engine(1, 0), KEY, (2_004, 2_005));
    assert_eq!(seen(&play.sink, SIZE, EDGE), [5.0]);
}

#[test]
fn a_payload_that_nobody_takes_is_given_up_after_a_while() {
    let mut play = Play::omni(2);
    play.put(engine(0, 0), KEY, 1, (1_000, 1_001));
    play.tick(301_000);
    assert_eq!(play.tracker.transfers().open, 1);
    play.tick(301_001);
    assert_eq!(play.tracker.transfers().open, 0);
    assert_eq!(skips(&play.sink, "never_taken"), [1, 1, 0, 0]);
}

#[test]
fn a_get_without_its_put_gives_the_receivers_time() {
    let mut play = Play::omni(2);
    play.get(engine(1, 0), KEY, (1_000, 1_004));
    play.tick(2_000);
    assert_eq!(
        play.tracker.transfers().open,
        1,
        "its put may still be on its way"
    );
    play.tick(2_004);
    assert_close(&seen(&play.sink, RX, EDGE), &[0.004]);
    assert_eq!(skips(&play.sink, "put_not_seen"), [1, 1, 0, 1]);
    assert_eq!(play.tracker.transfers().open, 0);

    // With two replicas either may have sent it.
    play.start_engine(0, 1);
    play.get(engine(1, 0), KEY, (3_000, 3_004));
    play.tick(5_000);
    assert_eq!(seen(&play.sink, RX, EDGE).len(), 1);
    assert_eq!(skips(&play.sink, "unknown_replica"), [1, 1, 1, 1]);
}

#[rstest]
#[case::mooncake("speech-a-1a2b3c4d_0_2@0_1")]
#[case::kv_cache("omni_0_to_1_kv_cache_speech-a-1a2b3c4d@0_1")]
#[case::yuanrong("speech-a-1a2b3c4d_0_2:0_1")]
fn objects_of_a_store_are_hops_too(#[case] key: &str) {
    let mut play = Play::omni(2);
    play.put(engine(0, 0), key, 283, (1_000, 1_003));
    play.get(engine(1, 0), key, (1_010, 1_014));
    assert_hop(&play.sink, EDGE, [283.0, 0.003, 0.004, 0.007]);
    // It stays in the store: whoever takes it again may have got it from anywhere.
    play.get(engine(1, 0), key, (2_010, 2_014));
    play.tick(4_000);
    assert_eq!(hops(&play.sink), 1);
    assert_eq!(skips(&play.sink, "unknown_replica"), [1; 4]);
}

/// The client of Yuanrong's data system waits inside the get for what is not there yet.
#[test]
fn an_object_is_not_received_before_it_was_put() {
    let mut play = Play::omni(2);
    let key = "speech-a-1a2b3c4d_0_2:0_1";
    play.put(engine(0, 0), key, 283, (1_000, 1_003));
    play.get(engine(1, 0), key, (200, 1_005));
    assert_hop(&play.sink, EDGE, [283.0, 0.003, 0.002, 0.0]);
}

#[rstest]
#[case::another_programs("model/weights@0_1")]
#[case::no_stages("speech-a-1a2b3c4d_0_2@east")]
#[case::of_nothing("@0_1")]
fn other_objects_are_left_alone(#[case] key: &str) {
    let mut play = Play::omni(2);
    play.put(engine(0, 0), key, 283, (1_000, 1_003));
    assert_eq!(play.tracker.transfers(), TransferCounts::default());
}

#[test]
fn replicas_have_edges_of_their_own() {
    let mut play = Play::omni(2);
    play.start_engine(0, 1);
    play.start_engine(1, 1);
    play.put(engine(0, 1), KEY, 1, (1_000, 1_001));
    play.get(engine(1, 0), KEY, (1_002, 1_003));
    play.put(engine(0, 0), "a-b_0_0", 2, (1_000, 1_001));
    play.get(engine(1, 1), "a-b_0_0", (1_002, 1_003));
    assert_eq!(seen(&play.sink, SIZE, ["0", "1", "1", "0"]), [1.0]);
    assert_eq!(seen(&play.sink, SIZE, ["0", "0", "1", "1"]), [2.0]);
}

#[test]
fn what_a_process_put_before_it_ended_may_still_be_taken() {
    let mut play = Play::omni(2);
    play.put(engine(0, 0), KEY, 1, (1_000, 1_001));
    play.stop(1_100, engine(0, 0));
    play.get(engine(1, 0), KEY, (1_102, 1_103));
    assert_eq!(seen(&play.sink, SIZE, EDGE), [1.0]);
}

#[test]
fn a_process_that_is_killed_a_hundred_times_leaves_nothing() {
    let mut play = Play::omni(2);
    for round in 0..100 {
        let now = 10_000 + round * 20_000;
        let key = format!("speech-{round}-1a2b3c4d_0_0");
        play.put(engine(0, 0), &key, 1, (now, now + 1));
        play.control(now, (engine(1, 0), 7), None, Control::Pull { key: &key, size: 1 });
        play.control(
            now,
            (engine(1, 0), 8),
            None,
            Control::Claim {
                key: &key,
                claim: &key,
            },
        );
        play.control(
            now,
            (engine(0, 0), 9),
            Some(1),
            Control::Offer {
                claim: &key,
                size: None,
            },
        );
        for pid in [engine(0, 0), engine(1, 0)] {
            play.stop(now + 100, pid);
        }
        for stage in [0, 1] {
            play.start_engine(stage, 0);
        }
        play.tick(now + 10_100);
        assert_eq!(play.tracker.transfers().open, 0, "round {round}");
    }
    assert_eq!(hops(&play.sink), 0);
    assert_eq!(skips(&play.sink, "sender_gone"), [100, 100, 0, 0]);
    assert_eq!(skips(&play.sink, "receiver_gone"), [200; 4]);
}

#[test]
fn a_restarted_sender_under_the_same_pid_is_another_process() {
    let mut play = Play::omni(2);
    play.put(engine(0, 0), KEY, 1, (1_000, 1_001));
    play.stop(1_100, engine(0, 0));
    play.start_engine(0, 0);
    play.put(engine(0, 0), KEY, 2, (1_200, 1_201));
    play.get(engine(1, 0), KEY, (1_202, 1_203));
    assert_eq!(seen(&play.sink, SIZE, EDGE), [2.0]);
}

#[test]
fn an_end_without_a_replica_gives_no_sample() {
    let mut play = Play::omni(1);
    let role = Role::DiffusionStage {
        stage: None,
        replica: None,
    };
    play.start(engine(1, 0), role);
    play.put(engine(0, 0), KEY, 1, (1_000, 1_001));
    play.get(engine(1, 0), KEY, (1_002, 1_003));
    assert_eq!(hops(&play.sink), 0);
    assert_eq!(skips(&play.sink, "unknown_replica"), [1; 4]);

    // What is told between the two ends comes in time.
    play.put(engine(1, 0), "a-b_1_0", 5, (2_000, 2_001));
    let role = Role::DiffusionStage {
        stage: Some(1),
        replica: Some(0),
    };
    play.start(engine(1, 0), role);
    play.start_engine(2, 0);
    play.get(engine(2, 0), "a-b_1_0", (2_002, 2_003));
    assert_eq!(seen(&play.sink, SIZE, ["1", "0", "2", "0"]), [5.0]);
}

#[test]
fn the_roles_win_over_the_key() {
    let mut play = Play::omni(2);
    let key = "omni_4_to_1_kv_cache_chatcmpl-a-1a2b3c4d";
    play.put(engine(0, 0), key, 1, (1_000, 1_001));
    play.get(engine(1, 0), key, (1_002, 1_003));
    assert_eq!(seen(&play.sink, SIZE, EDGE), [1.0]);
    assert_eq!(play.tracker.transfers().stage_mismatches, 1);
}

#[test]
fn an_api_server_that_runs_a_stage_inside_is_named_by_the_key() {
    let mut play = Play::omni(1);
    let key = "omni_0_to_1_kv_cache_chatcmpl-a-1a2b3c4d";
    play.put(engine(0, 0), key, 1, (1_000, 1_001));
    play.get(API, key, (1_002, 1_003));
    assert_eq!(seen(&play.sink, SIZE, EDGE), [1.0]);
}

#[test]
fn too_many_payloads_push_the_oldest_out() {
    let limits = Limits {
        max_transfers: 2,
        ..Limits::default()
    };
    let mut play = Play::of(Flavor::Omni, limits);
    play.start_engine(0, 0);
    play.start_engine(1, 0);
    for chunk in 0..3 {
        play.put(engine(0, 0), &format!("a-b_0_{chunk}"), chunk, (1_000, 1_001));
    }
    assert_eq!(play.tracker.transfers().open, 2);
    assert_eq!(skips(&play.sink, "table_full"), [1, 1, 0, 0]);
    for chunk in 1..3 {
        play.get(engine(1, 0), &format!("a-b_0_{chunk}"), (1_002, 1_003));
    }
    assert_eq!(seen(&play.sink, SIZE, EDGE), [1.0, 2.0]);
}

#[test]
fn equal_keys_of_two_pipelines_are_different_payloads() {
    let mut play = Play::omni(2);
    play.change(0, &Change::Pipeline(pipeline(2, Flavor::Omni)));
    for (stage, pid) in [(0, 500), (1, 510)] {
        let role = Role::LlmStage {
            stage: Some(stage),
            replica: Some(7),
        };
        play.change(0, &Change::Process(process(2, pid, role)));
    }
    play.put(engine(0, 0), KEY, 1, (1_000, 1_001));
    play.put(500, KEY, 2, (1_000, 1_001));
    play.get(510, KEY, (1_002, 1_003));
    play.get(engine(1, 0), KEY, (1_002, 1_003));
    assert_eq!(seen(&play.sink, SIZE, EDGE), [1.0]);
    assert_eq!(seen(&play.sink, SIZE, ["0", "7", "1", "7"]), [2.0]);
}

#[test]
fn a_pipeline_that_ends_takes_its_transfers_along() {
    let mut play = Play::omni(2);
    play.put(engine(0, 0), KEY, 1, (1_000, 1_001));
    play.get(engine(1, 0), "a-b_0_0", (1_002, 1_003));
    play.change(2_000, &Change::PipelineGone(PipelineId(1)));
    assert_eq!(play.tracker.transfers().open, 0);
    assert_eq!(skips(&play.sink, "pipeline_ended"), [1, 1, 1, 0]);
    assert!(!play.put(engine(0, 0), KEY, 1, (1_000, 1_001)));
}

#[test]
fn a_pipeline_without_a_model_name_has_transfers_too() {
    let mut play = Play::of(Flavor::Omni, Limits::default());
    let mut unnamed = pipeline(1, Flavor::Omni);
    (unnamed.model, unnamed.served_model) = (None, None);
    play.change(0, &Change::Pipeline(unnamed));
    play.start_engine(0, 0);
    play.start_engine(1, 0);
    play.put(engine(0, 0), KEY, 1, (1_000, 1_001));
    play.get(engine(1, 0), KEY, (1_002, 1_003));
    assert_eq!(seen(&play.sink, SIZE, EDGE), [1.0]);
    assert_eq!(play.sink.scope_at((None, None)).model, "unknown");
}

#[test]
fn a_process_that_is_not_known_is_told_so() {
    let mut play = Play::omni(1);
    assert!(!play.put(4_711, KEY, 1, (1_000, 1_001)));
    assert!(play.put(engine(0, 0), "psm_1a2b3c4d", 1, (1_000, 1_001)));
    assert_eq!(play.tracker.transfers().open, 0);
}

#[test]
fn plain_vllm_has_no_transfers() {
    let mut play = Play::plain(1);
    play.put(engine(0, 0), KEY, 1, (1_000, 1_001));
    assert_eq!(play.tracker.transfers().open, 0);
}

// ---- transfers that are arranged over ZMQ ----

const STAGED: &str = "speech-0123456789abcdef-1a2b3c4d_0_2@0_1";
const NOT_ON_THE_WIRE: [u64; 4] = [0, 1, 0, 1];

#[rstest]
#[case::with_a_query(true)]
#[case::with_the_size_known_before(false)]
fn a_pull_runs_from_the_request_to_the_done(#[case] query: bool) {
    let mut play = Play::omni(2);
    let (receiver, sender) = ((engine(1, 0), 7), (engine(0, 0), 9));
    if query {
        play.control(1_000, receiver, None, Control::Query { key: STAGED });
        let info = Control::Info {
            key: STAGED,
            size: 4096,
        };
        play.control(1_001, sender, Some(77), info);
    }
    let pull = Control::Pull {
        key: STAGED,
        size: 4096,
    };
    play.control(1_002, receiver, None, pull);
    assert_eq!(play.tracker.transfers().open, 1);
    play.control(1_010, sender, Some(77), Control::Done { written: true });
    assert_close(&seen(&play.sink, SIZE, EDGE), &[4096.0]);
    assert_close(&seen(&play.sink, RX, EDGE), &[0.008]);
    assert_eq!(skips(&play.sink, "not_on_the_wire"), NOT_ON_THE_WIRE);
    assert_eq!(play.tracker.transfers(), TransferCounts::default());
}

#[test]
fn answers_to_several_receivers_are_told_apart_by_their_numbers() {
    let mut play = Play::omni(2);
    play.start_engine(1, 1);
    let sender = (engine(0, 0), 9);
    let receivers = [
        ((engine(1, 0), 7), 70, "a-b_0_0@0_1"),
        ((engine(1, 1), 7), 71, "c-d_0_0@0_1"),
    ];
    for (receiver, number, key) in receivers {
        play.control(1_000, receiver, None, Control::Query { key });
        play.control(1_001, sender, Some(number), Control::Info { key, size: 5 });
    }
    for (receiver, _, key) in receivers {
        play.control(1_002, receiver, None, Control::Pull { key, size: 5 });
    }
    play.control(1_006, sender, Some(71), Control::Done { written: true });
    play.control(1_009, sender, Some(70), Control::Done { written: true });
    assert_close(&seen(&play.sink, RX, EDGE), &[0.007]);
    assert_close(&seen(&play.sink, RX, ["0", "0", "1", "1"]), &[0.004]);
}

#[test]
fn done_without_a_way_to_tell_whose_is_no_sample() {
    let mut play = Play::omni(2);
    play.start_engine(1, 1);
    let sender = (engine(0, 0), 9);
    for (replica, key) in [(0, "a-b_0_0@0_1"), (1, "c-d_0_0@0_1")] {
        play.control(
            1_000,
            (engine(1, replica), 7),
            None,
            Control::Pull { key, size: 5 },
        );
    }
    play.control(1_006, sender, Some(71), Control::Done { written: true });
    assert_eq!(hops(&play.sink), 0);
    play.control(
        1_010,
        (engine(1, 0), 7),
        None,
        Control::Query { key: "a-b_0_1@0_1" },
    );
    assert_eq!(skips(&play.sink, "done_not_seen"), [1; 4]);
    play.tick(302_000);
    assert_eq!(skips(&play.sink, "done_not_seen"), [2; 4]);
    assert_eq!(play.tracker.transfers().open, 0);
}

#[test]
fn transfers_that_fail_or_have_their_receiver_elsewhere_are_counted() {
    let mut play = Play::omni(2);
    let sender = (engine(0, 0), 9);
    play.control(1_000, sender, Some(1), Control::Done { written: true });
    assert_eq!(skips(&play.sink, "receiver_not_seen"), [1; 4]);
    let pull = Control::Pull { key: STAGED, size: 5 };
    play.control(1_001, (engine(1, 0), 7), None, pull);
    play.control(1_002, sender, Some(2), Control::Done { written: false });
    assert_eq!(skips(&play.sink, "failed"), [1; 4]);
    assert_eq!(hops(&play.sink), 0);
}

#[test]
fn a_read_runs_from_the_offer_to_the_release() {
    let mut play = Play::omni(2);
    let (receiver, sender) = ((engine(1, 0), 7), (engine(0, 0), 9));
    // Polls for what is not there yet.
    for claim in ["c0", "c1"] {
        play.control(990, receiver, None, Control::Claim { key: KEY, claim });
        play.control(991, sender, Some(3), Control::Nothing);
    }
    play.control(
        1_000,
        receiver,
        None,
        Control::Claim {
            key: KEY,
            claim: "c2",
        },
    );
    let offer = Control::Offer {
        claim: "c2",
        size: Some(262_144),
    };
    play.control(1_001, sender, Some(3), offer);
    // Released by another thread, on a socket of its own.
    let released = Control::Released {
        key: KEY,
        claim: "c2",
    };
    play.control(1_005, (engine(1, 0), 8), None, released);
    assert_close(&seen(&play.sink, SIZE, EDGE), &[262_144.0]);
    assert_close(&seen(&play.sink, RX, EDGE), &[0.004]);
    assert_eq!(skips(&play.sink, "not_on_the_wire"), NOT_ON_THE_WIRE);
    assert_eq!(play.tracker.transfers(), TransferCounts::default());
}

/// What the sender offers on another host, or before the agent looked, is read all the same.
#[test]
fn a_read_whose_question_was_not_seen_is_a_hop() {
    let mut play = Play::omni(2);
    let claim = "c2";
    let offer = Control::Offer { claim, size: Some(5) };
    play.control(1_001, (engine(0, 0), 9), Some(3), offer);
    let released = Control::Released { key: KEY, claim };
    play.control(1_005, (engine(1, 0), 8), None, released);
    assert_eq!(seen(&play.sink, SIZE, EDGE), [5.0]);
    assert_close(&seen(&play.sink, RX, EDGE), &[0.004]);
}

#[test]
fn ends_of_reads_on_other_hosts_are_counted() {
    let mut play = Play::omni(2);
    let (receiver, sender) = ((engine(1, 0), 7), (engine(0, 0), 9));
    let claim = "c";
    play.control(1_000, receiver, None, Control::Claim { key: KEY, claim });
    play.control(1_005, receiver, None, Control::Released { key: KEY, claim });
    play.control(1_006, receiver, None, Control::Read { key: STAGED });
    assert_eq!(skips(&play.sink, "offer_not_seen"), [2; 4]);
    let offer = Control::Offer {
        claim: "d",
        size: None,
    };
    play.control(1_007, sender, Some(3), offer);
    let ready = Control::Ready { key: STAGED, size: 5 };
    play.control(1_008, sender, Some(3), ready);
    assert_eq!(play.tracker.transfers().open, 2);
    play.tick(302_000);
    assert_eq!(skips(&play.sink, "receiver_not_seen"), [2; 4]);
    assert_eq!(play.tracker.transfers().open, 0);
}

/// Yuanrong's transfer engine: asked as Mooncake's, read as NIXL's.
#[test]
fn a_read_runs_from_the_answer_to_the_clean_up() {
    let mut play = Play::omni(2);
    let (receiver, sender) = ((engine(1, 0), 7), (engine(0, 0), 9));
    play.control(990, receiver, None, Control::Query { key: STAGED });
    play.control(991, sender, Some(3), Control::Nothing);
    // The first read fails.
    for at in [1_000, 2_000] {
        play.control(at, receiver, None, Control::Query { key: STAGED });
        let ready = Control::Ready {
            key: STAGED,
            size: 262_144,
        };
        play.control(at + 1, sender, Some(3), ready);
        assert_eq!(play.tracker.transfers().open, 1);
    }
    play.control(2_005, receiver, None, Control::Read { key: STAGED });
    play.control(2_006, sender, Some(3), Control::Nothing);
    assert_eq!(seen(&play.sink, SIZE, EDGE), [262_144.0]);
    assert_close(&seen(&play.sink, RX, EDGE), &[0.004]);
    assert_eq!(skips(&play.sink, "done_not_seen"), [1; 4]);
    assert_eq!(skips(&play.sink, "not_on_the_wire"), NOT_ON_THE_WIRE);
    assert_eq!(play.tracker.transfers(), TransferCounts::default());
}

#[test]
fn an_offer_whose_size_was_cut_off_has_its_time() {
    let mut play = Play::omni(2);
    let claim = "c";
    let offer = Control::Offer { claim, size: None };
    play.control(1_000, (engine(0, 0), 9), Some(3), offer);
    play.control(
        1_004,
        (engine(1, 0), 7),
        None,
        Control::Released { key: KEY, claim },
    );
    assert_close(&seen(&play.sink, RX, EDGE), &[0.004]);
    assert_eq!(skips(&play.sink, "frame_cut"), [1, 0, 0, 0]);
}

#[test]
fn equal_keys_and_attempts_of_two_pipelines_are_told_apart() {
    let mut play = Play::omni(2);
    play.change(0, &Change::Pipeline(pipeline(2, Flavor::Omni)));
    for (stage, pid) in [(0, 500), (1, 510)] {
        let role = Role::LlmStage {
            stage: Some(stage),
            replica: Some(7),
        };
        play.change(0, &Change::Process(process(2, pid, role)));
    }
    let ends = [(engine(0, 0), engine(1, 0), 1), (500, 510, 2)];
    // Their sockets have the same addresses and numbers.
    for (_, receiver, size) in ends {
        let pull = Control::Pull { key: STAGED, size };
        play.control(1_000, (receiver, 7), None, pull);
    }
    for (sender, ..) in ends {
        play.control(1_001, (sender, 9), Some(3), Control::Done { written: true });
    }
    let claim = "c";
    for (_, receiver, _) in ends {
        play.control(1_002, (receiver, 7), None, Control::Claim { key: KEY, claim });
    }
    for (sender, _, size) in ends {
        let size = Some(size + 10);
        play.control(1_003, (sender, 9), Some(3), Control::Offer { claim, size });
    }
    for (_, receiver, _) in ends {
        play.control(1_004, (receiver, 7), None, Control::Released { key: KEY, claim });
    }
    assert_eq!(seen(&play.sink, SIZE, EDGE), [1.0, 11.0]);
    assert_eq!(seen(&play.sink, SIZE, ["0", "7", "1", "7"]), [2.0, 12.0]);
    assert_eq!(play.tracker.transfers(), TransferCounts::default());
}

/// A number that libzmq gives to another socket is the other's from then on.
#[test]
fn numbers_of_receivers_are_used_again() {
    let mut play = Play::omni(2);
    play.start_engine(1, 1);
    let sender = (engine(0, 0), 9);
    for (at, replica) in [(1_000, 0), (2_000, 1)] {
        let receiver = (engine(1, replica), 7);
        play.control(at, receiver, None, Control::Query { key: STAGED });
        let info = Control::Info { key: STAGED, size: 5 };
        play.control(at + 1, sender, Some(3), info);
        let pull = Control::Pull { key: STAGED, size: 5 };
        play.control(at + 2, receiver, None, pull);
        play.control(at + 9, sender, Some(3), Control::Done { written: true });
        play.stop(at + 10, engine(1, replica));
    }
    assert_eq!(seen(&play.sink, SIZE, EDGE), [5.0]);
    assert_eq!(seen(&play.sink, SIZE, ["0", "0", "1", "1"]), [5.0]);
}

#[test]
fn a_pipeline_that_ends_takes_its_messages_along() {
    let mut play = Play::omni(2);
    let pull = Control::Pull { key: STAGED, size: 5 };
    play.control(1_000, (engine(1, 0), 7), None, pull);
    let offer = Control::Offer {
        claim: "c",
        size: None,
    };
    play.control(1_001, (engine(0, 0), 9), Some(3), offer);
    assert_eq!(play.tracker.transfers().open, 2);
    play.change(2_000, &Change::PipelineGone(PipelineId(1)));
    assert_eq!(play.tracker.transfers().open, 0);
    assert_eq!(skips(&play.sink, "pipeline_ended"), [2; 4]);
}

#[test]
fn too_many_sockets_and_offers_are_counted() {
    let limits = Limits {
        max_transfers: 2,
        ..Limits::default()
    };
    let mut play = Play::of(Flavor::Omni, limits);
    play.start_engine(0, 0);
    play.start_engine(1, 0);
    for claim in ["a", "b", "c"] {
        let offer = Control::Offer { claim, size: None };
        play.control(1_000, (engine(0, 0), 9), Some(3), offer);
    }
    assert_eq!(skips(&play.sink, "table_full"), [1; 4]);
    assert_eq!(play.tracker.transfers().open, 2);
    for socket in 0..5_000 {
        let pull = Control::Pull { key: STAGED, size: 5 };
        play.control(1_000, (engine(1, 0), socket), None, pull);
    }
    assert_eq!(skips(&play.sink, "table_full"), [1 + 5_000 - 4_096; 4]);
    assert_eq!(play.tracker.transfers().open, 2 + 4_096);
}

// ---- all the way to the text ----

#[test]
fn a_recorded_transfer_is_served() {
    let limits = RegistryLimits {
        max_series: 10_000,
        retention: Duration::from_mins(15),
    };
    let mut observer = Observer::new(limits, Limits::default());
    let mut take = |t, item| observer.replay(&Entry { t: t * MS, item });
    take(0, Item::Change(Change::Pipeline(pipeline(1, Flavor::Omni))));
    for stage in [0, 1] {
        let role = Role::LlmStage {
            stage: Some(stage),
            replica: Some(0),
        };
        let process = process(1, engine(stage, 0), role);
        take(0, Item::Change(Change::Process(process)));
    }
    let put = ShmEvent::Put {
        pid: engine(0, 0),
        tid: 1,
        name: KEY,
        size: 283,
        start_ns: 1_000 * MS,
        done_ns: 1_002 * MS,
    };
    let get = ShmEvent::Get {
        pid: engine(1, 0),
        tid: 1,
        name: KEY,
        start_ns: 1_010 * MS,
        done_ns: 1_014 * MS,
    };
    let unlinked = |name| ShmEvent::Unlinked {
        pid: 1,
        tid: 1,
        name,
        time_ns: 0,
    };
    for event in [put, get, unlinked(KEY)] {
        let (t, owned) = OwnedShm::new(&event);
        take(t / MS, Item::Shm(owned));
    }
    take(2_000, Item::Tick);
    let mut out = Vec::new();
    observer.exposition().render(&mut out, Format::Text);
    let text = String::from_utf8_lossy(&out);
    let edge = r#"{from_replica="0",from_stage="0",model_name="org/model",to_replica="0",to_stage="1"}"#;
    for line in [
        format!("vllm_omni:transfer_size_bytes_sum{edge} 283.0"),
        format!("vllm_omni:transfer_tx_s_sum{edge} 0.002"),
        format!("vllm_omni:transfer_rx_s_sum{edge} 0.004"),
        format!("vllm_omni:transfer_in_flight_s_sum{edge} 0.008"),
        format!("vllm_omni:transfer_size_bytes_count{edge} 1.0"),
        "omnitap_transfers_open 0.0".to_owned(),
        "omnitap_transfer_stage_mismatches_total 0.0".to_owned(),
        r#"omnitap_samples_skipped_total{family="vllm_omni:transfer_size_bytes",reason="unknown_process"} 1.0"#
            .to_owned(),
        r#"omnitap_source_state{family="vllm_omni:transfer_tx_s",pipeline="1",source="transfer"} 1.0"#
            .to_owned(),
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is missing");
    }
    assert_eq!(observer.shm(&unlinked("psm_1a2b3c4d")), ShmTaken::Foreign);
    assert_eq!(observer.shm(&unlinked(KEY)), ShmTaken::Unknown);
    assert_eq!(observer.shm(&put), ShmTaken::Known);
}

// ---- whatever the order ----

#[derive(Clone, Copy, Debug)]
struct Payload {
    from: u32,
    to: u32,
    size: u64,
    tx: u64,
    wait: u64,
    rx: u64,
}

fn payloads() -> impl Strategy<Value = (Vec<Payload>, Vec<(usize, bool)>)> {
    let payload = (
        0..3_u32,
        0..3_u32,
        0..1_000_000_u64,
        0..20_u64,
        0..20_u64,
        0..20_u64,
    )
        .prop_map(|(from, to, size, tx, wait, rx)| Payload {
            from,
            to,
            size,
            tx,
            wait,
            rx,
        });
    prop::collection::vec(payload, 1..40).prop_flat_map(|payloads| {
        let ends: Vec<(usize, bool)> = (0..payloads.len())
            .flat_map(|index| [(index, false), (index, true)])
            .collect();
        (Just(payloads), Just(ends).prop_shuffle())
    })
}

proptest! {
    /// Any interleaving of puts and gets of several processes gives each hop once, with its own values.
    #[test]
    fn every_payload_is_one_hop((payloads, ends) in payloads()) {
        let mut play = Play::omni(2);
        for replica in 1..3 {
            play.start_engine(0, replica);
            play.start_engine(1, replica);
        }
        let key = |index: usize| format!("r-{index}_0_0");
        for (index, is_get) in ends {
            let Payload { from, to, size, tx, wait, rx } = payloads[index];
            if is_get {
                play.get(engine(1, to), &key(index), (1_000 + tx + wait, 1_000 + tx + wait + rx));
            } else {
                play.put(engine(0, from), &key(index), size, (1_000, 1_000 + tx));
            }
            prop_assert!(play.tracker.transfers().open <= payloads.len());
        }
        prop_assert_eq!(play.tracker.transfers().open, 0);
        prop_assert!(play.sink.skipped.is_empty());
        prop_assert_eq!(hops(&play.sink), payloads.len());
        let sorted = |mut values: Vec<u64>| { values.sort_unstable(); values };
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small and not negative")]
        let told = |family, from: u32, to: u32, scale: f64| {
            let edge = ["0".to_owned(), from.to_string(), "1".to_owned(), to.to_string()];
            let edge: Vec<&str> = edge.iter().map(String::as_str).collect();
            let values = play.sink.seen_at(family, (None, None), &edge);
            sorted(values.iter().map(|value| (value * scale).round() as u64).collect())
        };
        for from in 0..3 {
            for to in 0..3 {
                let of = |value: fn(&Payload) -> u64| {
                    sorted(payloads.iter().filter(|p| (p.from, p.to) == (from, to)).map(value).collect())
                };
                prop_assert_eq!(told(SIZE, from, to, 1.0), of(|p| p.size));
                prop_assert_eq!(told(TX, from, to, 1e3), of(|p| p.tx));
                prop_assert_eq!(told(RX, from, to, 1e3), of(|p| p.rx));
                prop_assert_eq!(told(IN_FLIGHT, from, to, 1e3), of(|p| p.wait));
            }
        }
    }

    /// Whatever happens to a few keys, nothing is counted twice, and nothing stays.
    #[test]
    fn no_end_is_used_twice(steps in prop::collection::vec((0..4_u8, 0..3_u8, 0..400_u64), 1..100)) {
        let limits = Limits { max_transfers: 2, ..Limits::default() };
        let mut play = Play::of(Flavor::Omni, limits);
        play.start_engine(0, 0);
        play.start_engine(1, 0);
        let (mut puts, mut gets) = (0, 0);
        for (what, key, at) in steps {
            let (name, at) = (format!("r-{key}_0_0"), 1_000 + at);
            match what {
                0 => {
                    puts += 1;
                    play.put(engine(0, 0), &name, 1, (at, at + 5));
                }
                1 => {
                    gets += 1;
                    play.get(engine(1, 0), &name, (at, at + 5));
                }
                2 => play.unlink(engine(0, 0), &name, at),
                _ => play.tick(at),
            }
            prop_assert!(play.tracker.transfers().open <= 4);
        }
        play.tick(1_000_000);
        prop_assert_eq!(play.tracker.transfers().open, 0);
        let lost = |family| {
            let skipped = play.sink.skipped.iter().filter(|((of, _), _)| *of == family);
            skipped.map(|(_, count)| *count).sum::<u64>()
        };
        let whole = hops(&play.sink) as u64;
        let alone = seen(&play.sink, RX, EDGE).len() as u64;
        prop_assert_eq!(alone, gets, "each get has its time");
        let without_put = play.sink.skips(SIZE, "put_not_seen");
        prop_assert_eq!(whole + lost(SIZE) - without_put, puts, "each put is a hop or is counted");
        prop_assert_eq!(whole + without_put, gets);
    }
}
