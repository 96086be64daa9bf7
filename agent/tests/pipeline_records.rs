//! What the records of requests say, by what happened to them.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod pipeline_support;

use omnitap::{
    host::identity::{Change, Flavor, PipelineId, Role},
    pipeline::{
        records::{OpenState, Outcome, RequestRecord},
        tracker::Limits,
    },
    wire::message::{FinishReason, Message},
};
use pipeline_support::{
    API, MS, Play, WALL_OFFSET_NS, add, engine, first, first_with_events, key_of, last, token,
};
use rstest::rstest;

fn omni(stages: u32) -> Play {
    let mut play = Play::omni(stages);
    play.tracker.want_records(true);
    play
}

fn take(play: &mut Play, at_ms: u64) -> Vec<RequestRecord> {
    play.tick(at_ms);
    let mut records = Vec::new();
    assert_eq!(play.tracker.take_records(at_ms * MS, &mut records), 0);
    records
}

fn only(play: &mut Play, at_ms: u64) -> RequestRecord {
    let mut records = take(play, at_ms);
    assert_eq!(records.len(), 1, "{records:#?}");
    records.remove(0)
}

fn unix_ms(at_ms: u64) -> u64 {
    u64::try_from(WALL_OFFSET_NS).unwrap() / MS + at_ms
}

/// Two stages, with a payload through shared memory in between.
fn two_stages(play: &mut Play) {
    play.add(1_000, 0, add("r-1", 990));
    play.add(1_000, 1, add("r-1", 990));
    play.out(1_100, 0, vec![first_with_events("r-1", 1.001, 1.021)]);
    play.put(engine(0, 0), "r-1_0_0", 500, (1_110, 1_112));
    play.get(engine(1, 0), "r-1_0_0", (1_120, 1_124));
    play.out(1_200, 0, vec![last("r-1", FinishReason::Length)]);
    play.put(engine(0, 0), "r-1_0_1", 250, (1_210, 1_211));
    play.get(engine(1, 0), "r-1_0_1", (1_215, 1_216));
    play.out(1_300, 1, vec![first("r-1")]);
    play.out(1_400, 1, vec![last("r-1", FinishReason::Stop)]);
}

#[test]
fn a_request_of_two_stages() {
    let mut play = omni(2);
    two_stages(&mut play);
    let record = only(&mut play, 5_000);
    assert_eq!(record.request_id, "r-1");
    assert_eq!(record.model.as_deref(), Some("org/model"));
    assert_eq!(record.pipeline_pid, API);
    assert_eq!((record.outcome, &*record.reason), (Outcome::Finished, "stop"));
    assert_eq!(record.arrived_unix_ms, Some(unix_ms(990)));
    assert_eq!(record.ended_unix_ms, Some(unix_ms(1_400)));
    assert_eq!((record.prompt_tokens, record.generated_tokens), (Some(10), 4));
    let e2e_ms = record.e2e_ms.unwrap();
    assert!((e2e_ms - 410.0).abs() < 0.01, "{e2e_ms}");

    let [one, two] = record.stages.as_slice() else {
        panic!("{record:#?}");
    };
    assert_eq!((one.stage, one.replica, &*one.kind), (Some(0), Some(0), "llm"));
    assert_eq!(one.finish_reason.as_deref(), Some("length"));
    assert_eq!(one.queue_ms, Some(20.0));
    assert_eq!(one.gen_time_ms, Some(200.0));
    let first_token_ms = one.first_token_ms.unwrap();
    assert!((first_token_ms - 110.0).abs() < 0.01, "{first_token_ms}");
    assert_eq!(
        (two.stage, two.gen_time_ms, two.queue_ms),
        (Some(1), Some(400.0), None)
    );
    assert_eq!((two.prompt_tokens, two.generated_tokens), (Some(10), 2));

    let [edge] = record.transfers.as_slice() else {
        panic!("{record:#?}");
    };
    let ends = (edge.from_stage, edge.from_replica, edge.to_stage, edge.to_replica);
    assert_eq!((ends, &*edge.connector), ((0, 0, 1, 0), "shared_memory"));
    assert_eq!((edge.payloads, edge.size_bytes), (2, Some(750)));
    let times = (edge.tx_ms, edge.in_flight_ms, edge.rx_ms);
    assert_eq!(times, (Some(3.0), Some(12.0), Some(5.0)));
}

#[test]
fn nobody_wants_records() {
    let mut play = Play::omni(2);
    two_stages(&mut play);
    assert_eq!(take(&mut play, 5_000), []);
}

#[test]
fn a_record_waits_for_word_of_its_last_payload() {
    let mut play = omni(2);
    play.add(1_000, 0, add("r-1", 990));
    play.add(1_000, 1, add("r-1", 990));
    play.out(1_100, 0, vec![last("r-1", FinishReason::Stop)]);
    play.out(1_400, 1, vec![last("r-1", FinishReason::Stop)]);
    assert_eq!(take(&mut play, 1_500), []);
    // The get is told behind the end, and its put was not seen.
    play.get(engine(1, 0), "r-1_0_0", (1_120, 1_124));
    let record = only(&mut play, 2_500);
    let [edge] = record.transfers.as_slice() else {
        panic!("{record:#?}");
    };
    assert_eq!(
        (edge.payloads, edge.size_bytes, edge.tx_ms, edge.rx_ms),
        (1, None, None, Some(4.0))
    );
}

#[test]
fn a_sum_that_lacks_a_value_is_no_sum() {
    let mut play = omni(2);
    play.add(1_000, 0, add("r-1", 990));
    play.add(1_000, 1, add("r-1", 990));
    play.get(engine(1, 0), "r-1_0_0", (1_020, 1_024));
    play.tick(3_000);
    play.put(engine(0, 0), "r-1_0_1", 250, (3_010, 3_011));
    play.get(engine(1, 0), "r-1_0_1", (3_015, 3_016));
    play.out(3_100, 0, vec![last("r-1", FinishReason::Stop)]);
    play.out(3_400, 1, vec![last("r-1", FinishReason::Stop)]);
    let edge = only(&mut play, 9_000).transfers.remove(0);
    assert_eq!((edge.payloads, edge.size_bytes, edge.rx_ms), (2, None, Some(5.0)));
}

#[test]
fn a_payload_inside_a_request() {
    let mut play = omni(2);
    for stage in 0..2 {
        let key = key_of(engine(stage, 0));
        play.change(100, &Change::Payloads { key, seen: true });
    }
    play.add(1_000, 0, add("r-1", 990));
    play.out(1_100, 0, vec![last("r-1", FinishReason::Stop)]);
    let mut forward = add("r-1", 990);
    forward.size = 700;
    play.add(1_110, 1, forward);
    play.out(1_200, 1, vec![last("r-1", FinishReason::Stop)]);
    let edge = only(&mut play, 5_000).transfers.remove(0);
    assert_eq!((&*edge.connector, edge.size_bytes), ("request", Some(700)));
    assert_eq!((edge.tx_ms, edge.rx_ms), (Some(10.0), None));
}

#[rstest]
#[case::client_left(|play: &mut Play| play.abort(1_500, 0, "r-1"), Outcome::Aborted, "client_disconnect")]
#[case::engine_failed(
    |play: &mut Play| play.out(1_500, 0, vec![last("r-1", FinishReason::Error)]),
    Outcome::Failed,
    "stage_error"
)]
#[case::engine_died(
    |play: &mut Play| play.send(1_500, engine(0, 0), &Message::EngineDead),
    Outcome::Failed,
    "stage_error"
)]
#[case::api_server_ended(|play: &mut Play| play.stop(1_500, API), Outcome::Failed, "unknown")]
fn cut_short(#[case] end: fn(&mut Play), #[case] outcome: Outcome, #[case] reason: &str) {
    let mut play = omni(2);
    play.add(1_000, 0, add("r-1", 990));
    play.add(1_000, 1, add("r-1", 990));
    play.out(1_100, 0, vec![first("r-1")]);
    play.out(1_200, 0, vec![token("r-1")]);
    end(&mut play);
    let record = only(&mut play, 9_000);
    assert_eq!((record.outcome, &*record.reason), (outcome, reason));
    // The end is when it was cut short, not when the cause was settled.
    assert_eq!(record.ended_unix_ms, Some(unix_ms(1_500)));
    let [one, two] = record.stages.as_slice() else {
        panic!("{record:#?}");
    };
    assert!(one.generated_tokens >= 2, "{one:#?}");
    assert_eq!((two.gen_time_ms, two.generated_tokens), (None, 0));
    assert_eq!(two.finish_reason, None);
}

#[test]
fn nothing_comes_of_it() {
    let mut play = omni(1);
    play.add(1_000, 0, add("r-1", 990));
    play.tick(1_900_000);
    let record = only(&mut play, 1_912_000);
    assert_eq!(
        (record.outcome, &*record.reason),
        (Outcome::TimedOut, "timed_out")
    );
    assert_eq!(record.arrived_unix_ms, Some(unix_ms(990)));
}

#[test]
fn a_pipeline_that_ends_leaves_the_records_of_its_requests() {
    let mut play = omni(1);
    play.add(1_000, 0, add("r-1", 990));
    play.change(1_500, &Change::PipelineGone(PipelineId(1)));
    let record = only(&mut play, 1_501);
    assert_eq!((record.outcome, &*record.reason), (Outcome::Failed, "unknown"));
}

#[test]
fn a_request_that_guides_another_has_no_record() {
    let mut play = omni(1);
    play.add(1_000, 0, add("r-1", 990));
    play.add(1_001, 0, add("r-1__cfg_text", 990));
    for id in ["r-1", "r-1__cfg_text"] {
        play.out(1_100, 0, vec![last(id, FinishReason::Stop)]);
    }
    assert_eq!(only(&mut play, 5_000).request_id, "r-1");
}

#[rstest]
#[case::finished(FinishReason::Length, Outcome::Finished, "length")]
#[case::aborted(FinishReason::Abort, Outcome::Aborted, "abort")]
#[case::failed(FinishReason::Error, Outcome::Failed, "error")]
fn plain_vllm(#[case] finish: FinishReason, #[case] outcome: Outcome, #[case] reason: &str) {
    let mut play = Play::plain(1);
    play.tracker.want_records(true);
    play.add(1_000, 0, add("r-1", 990));
    play.out(1_100, 0, vec![last("r-1", finish)]);
    let record = only(&mut play, 5_000);
    assert_eq!((record.outcome, &*record.reason), (outcome, reason));
}

#[test]
fn ids_are_bounded_and_one_line() {
    let mut play = omni(1);
    let id = format!("r-\n\u{1b}[31m{}", "ü".repeat(1_000));
    play.add(1_000, 0, add(&id, 990));
    play.out(1_100, 0, vec![last(&id, FinishReason::Stop)]);
    let record = only(&mut play, 5_000);
    assert!(record.request_id.starts_with("r-\u{fffd}\u{fffd}[31m"));
    assert!(record.request_id.len() <= 256, "{}", record.request_id.len());
}

#[test]
fn held_records_are_bounded() {
    let mut play = Play::of(
        Flavor::Omni,
        Limits {
            max_requests: 100_000,
            ..Limits::default()
        },
    );
    play.tracker.want_records(true);
    play.start(API, Role::ApiServer);
    play.start_engine(0, 0);
    for number in 0..5_000 {
        let id = format!("r-{number}");
        play.add(1_000, 0, add(&id, 990));
        play.out(1_100, 0, vec![last(&id, FinishReason::Stop)]);
    }
    play.tick(9_000);
    let mut records = Vec::new();
    let refused = play.tracker.take_records(9_000 * MS, &mut records);
    assert_eq!((records.len(), refused), (4_096, 904));
}

#[test]
fn requests_under_way() {
    let mut play = omni(2);
    play.add(1_000, 0, add("r-1", 990));
    play.add(1_000, 1, add("r-1", 990));
    play.add(1_050, 0, add("r-2", 1_040));
    play.out(1_100, 0, vec![first("r-1")]);
    play.out(1_200, 0, vec![last("r-1", FinishReason::Stop)]);
    play.out(1_300, 1, vec![first("r-1")]);
    let open = play.tracker.open_records(2_000 * MS, 10);
    let [one, two] = open.as_slice() else {
        panic!("{open:#?}");
    };
    assert_eq!((&*one.request_id, &*two.request_id), ("r-1", "r-2"));
    let states: Vec<_> = one
        .stages
        .iter()
        .map(|stage| (stage.stage, stage.state, stage.generated_tokens))
        .collect();
    assert_eq!(
        states,
        [
            (Some(0), OpenState::Finished, 2),
            (Some(1), OpenState::Running, 1)
        ]
    );
    assert_eq!(two.stages[0].state, OpenState::Given);
    assert_eq!(play.tracker.open_records(2_000 * MS, 1).len(), 1);
}
