//! Payloads that travel inside a request: what counts as a transfer, and that no payload counts twice.

mod pipeline_support;

use omnitap::{
    host::identity::{Change, Process, Role},
    metrics::catalogue::Family,
    wire::{
        assemble::{Aux, FrameType},
        control::Control,
        message::{Add, FinishReason},
    },
};
use pipeline_support::{
    API, MS, Play, add, assert_close, engine, first, first_with_events, key_of, last, process,
};
use rstest::rstest;

const SIZE: Family = Family::OmniTransferSizeBytes;
const TX: Family = Family::OmniTransferTxS;
const RX: Family = Family::OmniTransferRxS;
const IN_FLIGHT: Family = Family::OmniTransferInFlightS;
const ALL: [Family; 4] = [SIZE, TX, RX, IN_FLIGHT];

const ID: &str = "cmpl-a-1a2b3c4d";
const KEY: &str = "cmpl-a-1a2b3c4d_0_0";
const EDGE: [&str; 4] = ["0", "0", "1", "0"];

fn sized(id: &str, size: u64) -> Add<'_> {
    Add { size, ..add(id, 0) }
}

fn seen(play: &Play, family: Family, edge: [&str; 4]) -> Vec<f64> {
    play.sink.seen_at(family, (None, None), &edge)
}

fn skips(play: &Play, reason: &'static str) -> [u64; 4] {
    ALL.map(|family| play.sink.skips(family, reason))
}

fn hops(play: &Play) -> usize {
    let sizes = play
        .sink
        .samples
        .iter()
        .filter(|((family, _), _)| *family == SIZE);
    sizes.map(|(_, samples)| samples.len()).sum()
}

/// A pipeline of which all payloads are seen from 100 ms on.
fn attended(stages: u32) -> Play {
    let mut play = Play::omni(stages);
    for stage in 0..stages {
        see(&mut play, engine(stage, 0), 100);
    }
    play
}

fn see(play: &mut Play, pid: u32, at_ms: u64) {
    let (key, seen) = (key_of(pid), true);
    play.change(at_ms, &Change::Payloads { key, seen });
}

/// A request goes through stage 0, and then to stage 1.
fn forward(play: &mut Play, id: &str, from_ms: u64, size: u64) {
    play.add(from_ms, 0, sized(id, 10));
    play.out(from_ms + 10, 0, vec![first(id)]);
    play.out(from_ms + 20, 0, vec![last(id, FinishReason::Stop)]);
    play.add(from_ms + 23, 1, sized(id, size));
}

#[test]
fn a_request_with_the_output_of_the_stage_before_is_a_hop() {
    let mut play = attended(2);
    forward(&mut play, ID, 1_000, 700);
    assert_eq!(hops(&play), 0, "who has it is not known before it answers");
    // Queued 4 ms after it was sent.
    play.out(1_040, 1, vec![first_with_events(ID, 1.027, 1.028)]);
    assert_eq!(seen(&play, SIZE, EDGE), [700.0]);
    assert_close(&seen(&play, TX, EDGE), &[0.003]);
    assert_close(&seen(&play, IN_FLIGHT, EDGE), &[0.004]);
    assert_eq!(skips(&play, "not_on_the_wire"), [0, 0, 1, 0]);
    // Its further outputs are none.
    play.out(1_050, 1, vec![last(ID, FinishReason::Stop)]);
    assert_eq!(hops(&play), 1);
}

#[test]
fn without_statistics_nobody_says_when_it_was_taken() {
    let mut play = attended(2);
    forward(&mut play, ID, 1_000, 700);
    play.out(1_040, 1, vec![first(ID)]);
    assert_eq!(hops(&play), 1);
    assert_eq!(skips(&play, "not_on_the_wire"), [0, 0, 1, 1]);
}

#[test]
fn tensors_and_arrays_of_the_request_belong_to_its_size() {
    let mut play = attended(2);
    forward(&mut play, ID, 1_000, 700);
    let aux = |message_ms: u64, socket, size| Aux {
        socket,
        message_time_ns: message_ms * MS,
        of: FrameType::Add,
        size,
    };
    play.tracker.aux(API, aux(1_023, 1, 4_000));
    play.tracker.aux(API, aux(1_023, 1, 300));
    // Of other messages, sockets and processes.
    play.tracker.aux(API, aux(1_022, 1, 1_000_000));
    play.tracker.aux(API, aux(1_023, 2, 1_000_000));
    play.tracker.aux(engine(0, 0), aux(1_023, 1, 1_000_000));
    let outputs = Aux {
        of: FrameType::Outputs,
        ..aux(1_023, 1, 1_000_000)
    };
    play.tracker.aux(API, outputs);
    play.out(1_040, 1, vec![first(ID)]);
    assert_eq!(seen(&play, SIZE, EDGE), [5_000.0]);
}

#[test]
fn every_stage_of_a_chain_gets_it_from_the_one_before() {
    let mut play = attended(3);
    forward(&mut play, ID, 1_000, 700);
    play.out(1_040, 1, vec![first(ID)]);
    play.out(1_050, 1, vec![last(ID, FinishReason::Stop)]);
    play.add(1_051, 2, sized(ID, 80));
    play.out(1_060, 2, vec![last(ID, FinishReason::Stop)]);
    assert_eq!(seen(&play, SIZE, EDGE), [700.0]);
    assert_eq!(seen(&play, SIZE, ["1", "0", "2", "0"]), [80.0]);
    assert_close(&seen(&play, TX, ["1", "0", "2", "0"]), &[0.001]);
}

/// With asynchronous chunks all stages are given the request at once: their input comes from a connector.
#[test]
fn a_request_that_comes_before_the_output_is_no_hop() {
    let mut play = attended(2);
    play.add(1_000, 0, sized(ID, 700));
    play.add(1_001, 1, sized(ID, 700));
    play.out(1_010, 0, vec![first(ID)]);
    play.out(1_015, 1, vec![first(ID)]);
    play.out(1_020, 0, vec![last(ID, FinishReason::Stop)]);
    play.out(1_030, 1, vec![last(ID, FinishReason::Stop)]);
    assert_eq!(hops(&play), 0);
    assert!(play.sink.skipped.keys().all(|(family, _)| !ALL.contains(family)));
}

/// The connector's hop is the one that counts, whenever its ends are seen.
#[rstest]
#[case::put_before_the_request(1_015)]
#[case::put_after_the_request(1_030)]
fn an_edge_with_a_connector_counts_its_hops_alone(#[case] put_ms: u64) {
    let mut play = attended(2);
    play.add(1_000, 0, sized(ID, 10));
    let put_at = |play: &mut Play, now_ms: u64| {
        if put_ms <= now_ms
            && !play
                .tracker
                .has_transfers(process(1, 1, Role::ApiServer).pipeline)
        {
            play.put(engine(0, 0), KEY, 283, (put_ms, put_ms + 1));
        }
    };
    play.out(1_010, 0, vec![first(ID)]);
    put_at(&mut play, 1_019);
    play.out(1_020, 0, vec![last(ID, FinishReason::Stop)]);
    play.add(1_023, 1, sized(ID, 700));
    put_at(&mut play, 1_035);
    play.get(engine(1, 0), KEY, (1_036, 1_037));
    play.out(1_040, 1, vec![first(ID)]);
    assert_eq!(seen(&play, SIZE, EDGE), [283.0]);
    // Nor does it count a later request, whose connector may not have been looked at yet.
    forward(&mut play, "cmpl-b-1a2b3c4d", 2_000, 700);
    play.out(2_040, 1, vec![first("cmpl-b-1a2b3c4d")]);
    assert_eq!(hops(&play), 1);
}

#[rstest]
#[case::query(engine(1, 0), Control::Query { key: "cmpl-a-1a2b3c4d_0_0@0_1" })]
#[case::pull(engine(1, 0), Control::Pull { key: "cmpl-a-1a2b3c4d_0_0@0_1", size: 9 })]
#[case::claim(engine(1, 0), Control::Claim { key: KEY, claim: "c" })]
#[case::offer_to_another_host(engine(0, 0), Control::Offer { claim: "c", size: None })]
#[case::yuanrong_to_another_host(engine(0, 0), Control::Ready { key: "cmpl-a-1a2b3c4d_0_0@0_1", size: 9 })]
#[case::yuanrong_from_another_host(engine(1, 0), Control::Read { key: "cmpl-a-1a2b3c4d_0_0@0_1" })]
#[case::done_to_another_host(engine(0, 0), Control::Done { written: true })]
fn messages_of_a_connector_tell_of_it_too(#[case] pid: u32, #[case] control: Control<'_>) {
    let mut play = attended(2);
    forward(&mut play, ID, 1_000, 700);
    play.control(1_030, (pid, 9), Some(1), control);
    play.out(1_040, 1, vec![first(ID)]);
    assert_eq!(hops(&play), 0);
    assert_eq!(skips(&play, "connector_not_seen"), [0; 4]);
}

/// Also where the payload was put into a store, and nobody on this host takes it.
#[rstest]
#[case::mooncake("cmpl-a-1a2b3c4d_0_0@0_1")]
#[case::yuanrong("cmpl-a-1a2b3c4d_0_0:0_1")]
fn objects_of_a_store_tell_of_it_too(#[case] key: &str) {
    let mut play = attended(2);
    forward(&mut play, ID, 1_000, 700);
    play.put(engine(0, 0), key, 283, (1_024, 1_025));
    play.out(1_040, 1, vec![first(ID)]);
    assert_eq!(hops(&play), 0);
    assert_eq!(skips(&play, "connector_not_seen"), [0; 4]);
}

#[test]
fn other_edges_of_the_pipeline_have_their_own_ways() {
    let mut play = attended(3);
    forward(&mut play, ID, 1_000, 700);
    play.out(1_040, 1, vec![first(ID)]);
    // From stage 1 on a connector is used.
    play.out(1_050, 1, vec![last(ID, FinishReason::Stop)]);
    play.put(engine(1, 0), "cmpl-a-1a2b3c4d_1_0", 44, (1_051, 1_052));
    play.add(1_053, 2, sized(ID, 80));
    play.get(engine(2, 0), "cmpl-a-1a2b3c4d_1_0", (1_054, 1_055));
    play.out(1_060, 2, vec![last(ID, FinishReason::Stop)]);
    assert_eq!(seen(&play, SIZE, EDGE), [700.0]);
    assert_eq!(seen(&play, SIZE, ["1", "0", "2", "0"]), [44.0]);
}

#[rstest]
#[case::probes_never(None)]
#[case::probes_after_the_first_stage_had_begun(Some(1_001))]
fn a_connector_that_would_not_have_been_seen_may_have_moved_it(#[case] seen_ms: Option<u64>) {
    let mut play = Play::omni(2);
    if let Some(at_ms) = seen_ms {
        see(&mut play, engine(0, 0), at_ms);
    }
    forward(&mut play, ID, 1_000, 700);
    play.out(1_040, 1, vec![first(ID)]);
    assert_eq!(hops(&play), 0);
    assert_eq!(skips(&play, "connector_not_seen"), [1; 4]);
}

#[test]
fn workers_may_run_the_connector() {
    let mut play = attended(2);
    let worker = Process {
        parent: engine(0, 0),
        ..process(1, 900, Role::Worker)
    };
    play.change(200, &Change::Process(worker));
    forward(&mut play, ID, 1_000, 700);
    play.out(1_040, 1, vec![first(ID)]);
    assert_eq!(skips(&play, "connector_not_seen"), [1; 4]);
    see(&mut play, 900, 1_500);
    forward(&mut play, "cmpl-b-1a2b3c4d", 2_000, 700);
    play.out(2_040, 1, vec![first("cmpl-b-1a2b3c4d")]);
    assert_eq!(hops(&play), 1);
    // A library was mapped for which there is no probe.
    let (key, seen) = (key_of(900), false);
    play.change(2_500, &Change::Payloads { key, seen });
    forward(&mut play, "cmpl-c-1a2b3c4d", 3_000, 700);
    play.out(3_040, 1, vec![first("cmpl-c-1a2b3c4d")]);
    assert_eq!(hops(&play), 1);
}

#[test]
fn a_stage_that_is_gone_when_its_output_arrives_is_not_known() {
    let mut play = attended(2);
    forward(&mut play, ID, 1_000, 700);
    play.stop(1_030, engine(0, 0));
    play.start_engine(0, 1);
    play.out(1_040, 1, vec![first(ID)]);
    assert_eq!(hops(&play), 0);
}

#[test]
fn a_request_that_is_given_up_leaves_nothing() {
    let mut play = attended(2);
    forward(&mut play, ID, 1_000, 700);
    play.abort(1_030, 1, ID);
    play.tick(10_000);
    play.tick(100_000);
    assert_eq!(hops(&play), 0);
    assert_eq!(play.tracker.tracked_requests(), 0);
}
