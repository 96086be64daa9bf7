//! Stat events: what each family needs, what counts once, and that hostile input harms nobody.

#![allow(
    clippy::float_cmp,
    clippy::unwrap_used,
    reason = "counts are whole numbers; a failed unwrap is a failed test"
)]

use std::{collections::BTreeSet, fmt::Write as _, time::Duration};

use omnitap::{
    host::identity::{Change, Flavor, Pipeline, PipelineId, Process, ProcessKey, Role, Versions},
    metrics::{
        catalogue::{Family, Source},
        registry::Limits as RegistryLimits,
        text::Format,
    },
    observer::Observer,
    pipeline::{stats::Sender, tracker::Limits},
    wire::stat::{self, Encoding, Event, Head, StatError, Whole},
};
use proptest::prelude::*;
use rstest::rstest;

const SECOND: u64 = 1_000_000_000;
/// The example's first second, on the monotonic clock.
const START_NS: u64 = 5_000 * SECOND;
const WALL_OFFSET_NS: i64 = 1_700_000_000_000_000_000 - 5_000_000_000_000;
const API: u32 = 100;
const DOCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/stat-events.md");
const SCHEMA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/stat-events.schema.json");

/// An agent that watches pipelines and is told of them.
struct Agent {
    observer: Observer,
    now_ns: u64,
}

impl Agent {
    fn new(limits: Limits) -> Self {
        let registry = RegistryLimits {
            max_series: 50_000,
            retention: Duration::from_mins(15),
        };
        let mut agent = Self {
            observer: Observer::new(registry, limits),
            now_ns: START_NS,
        };
        agent.observer.wall_offset(WALL_OFFSET_NS);
        agent.pipeline(1, "org/model");
        agent.observer.stat_opened(Sender(1), API);
        agent
    }

    /// A pipeline with the processes 100, 101 (pipeline 1), 200, 201 (pipeline 2) and so on.
    fn pipeline(&mut self, id: u32, model: &str) {
        let key = |pid| ProcessKey { pid, start_ticks: 1 };
        let pipeline = Pipeline {
            id: PipelineId(id),
            flavor: Flavor::Omni,
            model: Some(model.to_owned()),
            served_model: Some(model.to_owned()),
            versions: Versions::default(),
            max_model_len: None,
            root: key(id * 100),
        };
        self.observer.change(&Change::Pipeline(pipeline), self.now_ns);
        for pid in [id * 100, id * 100 + 1] {
            let process = Process {
                key: key(pid),
                parent: 1,
                role: Role::ApiWorker { index: pid % 100 },
                pipeline: PipelineId(id),
                container: None,
            };
            self.observer.change(&Change::Process(process), self.now_ns);
        }
    }

    fn tell_as(&mut self, sender: u64, line: &str) {
        match stat::decode(line.as_bytes(), Encoding::Json) {
            Ok((head, event)) => self.observer.stat(Sender(sender), self.now_ns, &head, &event),
            Err(error) => self.observer.stat_unread(&error),
        }
    }

    /// Lines without their head.
    fn tell(&mut self, lines: &[&str]) -> &mut Self {
        for line in lines {
            self.tell_as(1, &line.replacen('{', r#"{"v": 1, "#, 1));
        }
        self
    }

    fn pass(&mut self, seconds: u64) -> &mut Self {
        self.now_ns += seconds * SECOND;
        self.observer.tick(self.now_ns);
        self
    }

    fn page(&self) -> String {
        let mut page = Vec::new();
        self.observer.exposition().render(&mut page, Format::Text);
        String::from_utf8(page).unwrap()
    }

    /// The samples whose line starts like this, without `_bucket`s.
    fn samples(&self, start: &str) -> Vec<String> {
        let page = self.page();
        page.lines()
            .filter(|line| line.starts_with(start) && !line.contains("_bucket"))
            .map(str::to_owned)
            .collect()
    }

    fn value(&self, series: &str) -> Option<f64> {
        let page = self.page();
        let line = page.lines().find(|line| {
            line.strip_prefix(series)
                .is_some_and(|rest| rest.starts_with(' '))
        })?;
        line.rsplit_once(' ')?.1.parse().ok()
    }

    fn results(&self, event: &str, result: &str) -> f64 {
        self.value(&format!(
            r#"omnitap_stat_events_total{{event="{event}",result="{result}"}}"#
        ))
        .unwrap_or(0.0)
    }
}

/// The lines of the example in the docs.
fn example() -> Vec<String> {
    let docs = std::fs::read_to_string(DOCS).unwrap();
    let (_, block) = docs.split_once("```json\n").unwrap();
    let (block, _) = block.split_once("```").unwrap();
    block.lines().map(str::to_owned).collect()
}

fn kind(line: &str) -> &'static str {
    stat::decode(line.as_bytes(), Encoding::Json).unwrap().1.name()
}

/// The families that have a sample after those events of the example whose kind is wanted.
fn families(wanted: impl Fn(&str) -> bool) -> BTreeSet<Family> {
    let mut agent = Agent::new(Limits::default());
    agent.pass(10);
    for line in example() {
        if wanted(kind(&line)) {
            agent.tell_as(1, &line);
        }
    }
    agent.pass(1);
    let has_samples = |family: &Family| {
        let page = agent.page();
        let name = family.name();
        page.lines().any(|line| {
            // A child without an observation is none; a gauge or a counter may well be 0.
            let series = line.strip_prefix(name).and_then(|rest| rest.split_once(' '));
            series.is_some_and(|(labels, value)| {
                labels.starts_with('{') && agent.observer_holds(*family)
                    || labels.starts_with("_count") && value != "0.0"
            })
        })
    };
    Family::ALL
        .iter()
        .copied()
        .filter(|family| family.name().starts_with("vllm_omni:"))
        .filter(has_samples)
        .collect()
}

impl Agent {
    /// Counters and gauges have children before their first sample.
    fn observer_holds(&self, family: Family) -> bool {
        self.page().lines().any(|line| {
            line.starts_with("omnitap_source_state{")
                && line.contains(&format!("family=\"{}\"", family.name()))
                && line.contains("source=\"stat_socket\"")
        })
    }
}

/// Family -> the kinds of events without which it has no sample, else those of which any will do: by trying.
fn table() -> String {
    let kinds: BTreeSet<&str> = example().iter().map(|line| kind(line)).collect();
    let with = |kind: &str| families(|other| other == kind);
    let without = |kind: &str| families(|other| other != kind);
    let alone: Vec<(&str, BTreeSet<Family>)> = kinds.iter().map(|kind| (*kind, with(kind))).collect();
    let left: Vec<(&str, BTreeSet<Family>)> = kinds.iter().map(|kind| (*kind, without(kind))).collect();
    let mut table = String::from("\n| family | events |\n|---|---|\n");
    for family in families(|_| true) {
        let named = |kinds: &[(&str, BTreeSet<Family>)], has: bool| -> Vec<String> {
            let named = kinds
                .iter()
                .filter(|(_, families)| families.contains(&family) == has);
            named.map(|(kind, _)| format!("`{kind}`")).collect()
        };
        let needed = match named(&left, false) {
            needed if needed.is_empty() => named(&alone, true).join(" or "),
            needed => needed.join(", "),
        };
        let _ = writeln!(table, "| `{}` | {needed} |", family.name());
    }
    table
}

#[test]
fn every_family_can_be_had_from_events_alone() {
    let had = families(|_| true);
    let missing: Vec<&str> = Family::ALL
        .iter()
        .filter(|family| family.name().starts_with("vllm_omni:") && !had.contains(family))
        .map(|family| family.name())
        .collect();
    assert_eq!(missing, Vec::<&str>::new());
    assert_eq!(
        had.len(),
        42,
        "36 of the design, 2 of tokens, 4 of voice activity detection"
    );
}

#[test]
fn the_pages_in_docs_are_up_to_date() {
    const MARK: &str = "cargo test -p omnitap up_to_date`. -->\n";
    let docs = std::fs::read_to_string(DOCS).unwrap();
    let (head, _) = docs.split_once(MARK).unwrap();
    let docs = [
        (DOCS, format!("{head}{MARK}{}", table())),
        (SCHEMA, stat::schema()),
    ];
    for (path, page) in docs {
        if std::env::var_os("OMNITAP_WRITE_DOCS").is_some() {
            std::fs::write(path, &page).unwrap();
        }
        assert!(
            std::fs::read_to_string(path).unwrap_or_default() == page,
            "{path} differs from the code: run `OMNITAP_WRITE_DOCS=1 cargo test -p omnitap up_to_date`"
        );
    }
}

#[test]
fn the_example_gives_these_samples() {
    let mut agent = Agent::new(Limits::default());
    agent.pass(10);
    for line in example() {
        agent.tell_as(1, &line);
    }
    agent.pass(1);
    let lines: Vec<String> = agent
        .samples("vllm_omni:")
        .into_iter()
        .chain(agent.samples("omnitap_stat_"))
        .collect();
    insta::assert_snapshot!(lines.join("\n"));
}

#[test]
fn the_example_counts_once_when_it_is_told_twice() {
    let mut agent = Agent::new(Limits::default());
    let is_of_request = |line: &&String| {
        // Transfers, chunks and values of their own have nothing that tells them from the next.
        !matches!(
            kind(line),
            "transfer_sent"
                | "transfer_received"
                | "kv_wait"
                | "chunk"
                | "vad"
                | "lost"
                | "scheduler"
                | "replica_gone"
                | "stream_end"
                | "first_packet"
        )
    };
    for line in example() {
        agent.tell_as(1, &line);
    }
    agent.pass(1);
    let once = agent.samples("vllm_omni:");
    for line in example().iter().filter(is_of_request) {
        agent.tell_as(1, line);
    }
    agent.pass(1);
    assert_eq!(agent.samples("vllm_omni:"), once);
}

#[test]
fn msgpack_says_the_same_as_json() {
    for line in example() {
        let value: serde_json::Value = serde_json::from_str(&line).unwrap();
        let bytes = rmp_serde::to_vec_named(&value).unwrap();
        assert_eq!(
            stat::decode(&bytes, Encoding::Msgpack).unwrap(),
            stat::decode(line.as_bytes(), Encoding::Json).unwrap()
        );
    }
}

#[rstest]
#[case::no_json("nothing", "malformed")]
#[case::no_version(r#"{"event": "added", "request_id": "a"}"#, "malformed")]
#[case::other_version(r#"{"v": 2, "event": "added", "request_id": 7}"#, "version")]
#[case::other_event(r#"{"v": 1, "event": "later", "request_id": "a"}"#, "unknown_event")]
#[case::no_event(r#"{"v": 1, "request_id": "a"}"#, "malformed")]
#[case::no_request(r#"{"v": 1, "event": "added"}"#, "malformed")]
#[case::empty_request(r#"{"v": 1, "event": "added", "request_id": ""}"#, "malformed")]
#[case::wrong_type(
    r#"{"v": 1, "event": "added", "request_id": "a", "arrival": "now"}"#,
    "malformed"
)]
#[case::negative(
    r#"{"v": 1, "event": "scheduler", "stage_id": 0, "replica_id": 0, "num_waiting_reqs": -1}"#,
    "malformed"
)]
#[case::cut(r#"{"v": 1, "event": "added", "request"#, "malformed")]
fn what_is_no_event_is_counted(#[case] line: &str, #[case] result: &str) {
    let mut agent = Agent::new(Limits::default());
    agent.tell_as(1, line);
    assert_eq!(agent.results("unknown", result), 1.0);
}

#[test]
fn an_event_that_is_too_long_is_counted() {
    let line = format!(
        r#"{{"v": 1, "event": "added", "request_id": "a", "x": "{}"}}"#,
        "x".repeat(70_000)
    );
    assert!(matches!(
        stat::decode(line.as_bytes(), Encoding::Json),
        Err(StatError::TooLong(_))
    ));
}

#[rstest]
#[case::zero_counts(
    &[r#"{"event": "stage", "request_id": "a", "stage_id": 0, "pipeline_timings": {"queue_wait_ms": 0}}"#,
      r#"{"event": "finished", "request_id": "a", "e2e_s": 1}"#],
    "vllm_omni:request_queue_wait_s", &["_count 1.0", "_sum 0.0"])]
#[case::missing_does_not(
    &[r#"{"event": "stage", "request_id": "a", "stage_id": 0, "pipeline_timings": {}}"#,
      r#"{"event": "finished", "request_id": "a", "e2e_s": 1}"#],
    "vllm_omni:request_queue_wait_s", &[])]
#[case::queue_wait_waits_for_the_end(
    &[r#"{"event": "stage", "request_id": "a", "stage_id": 0, "pipeline_timings": {"queue_wait_ms": 5}}"#],
    "vllm_omni:request_queue_wait_s", &[])]
#[case::latency_from_arrival(
    &[r#"{"t": 1700000010, "event": "added", "request_id": "a", "arrival": 1700000008}"#,
      r#"{"t": 1700000013.5, "event": "finished", "request_id": "a"}"#],
    "vllm_omni:e2e_request_latency_s", &["_count 1.0", "_sum 5.5"])]
#[case::latency_of_an_unknown_start(
    &[r#"{"event": "finished", "request_id": "a"}"#],
    "vllm_omni:e2e_request_latency_s", &["_count 0.0", "_sum 0.0"])]
#[case::odd_finish_reason(
    &[r#"{"event": "finished", "request_id": "a", "finish_reason": "whim"}"#],
    "vllm_omni:requests_success_total", &[r#"finished_reason="unknown",model_name="org/model"} 1.0"#])]
#[case::odd_failure(
    &[r#"{"event": "failed", "request_id": "a", "reason": "whim"}"#],
    "vllm_omni:requests_failed_total", &[r#"model_name="org/model",reason="unknown"} 1.0"#])]
#[case::odd_outcome(
    &[r#"{"event": "stream_end", "request_id": "a", "outcome": "whim", "speech": true}"#],
    "vllm_omni:speech_stream_aborted_total", &[r#"model_name="org/model",reason="error"} 1.0"#])]
#[case::chat_streams_are_no_speech(
    &[r#"{"event": "chunk", "request_id": "a", "stage_id": 0, "replica_id": 0, "bytes": 10}"#,
      r#"{"event": "stream_end", "request_id": "a", "outcome": "completed"}"#],
    "vllm_omni:speech_stream_completed_total", &[])]
#[case::aborted_streams_have_no_continuity(
    &[r#"{"event": "chunk", "request_id": "a", "stage_id": 0, "replica_id": 0, "bytes": 10}"#,
      r#"{"event": "stream_end", "request_id": "a", "outcome": "closed", "speech": true}"#],
    "vllm_omni:audio_underrun_s", &[])]
#[case::transfer_of_a_bound_request(
    &[r#"{"event": "dispatched", "request_id": "a", "stage_id": 0, "replica_id": 3}"#,
      r#"{"event": "transfer_sent", "request_id": "a", "from_stage": 0, "to_stage": 1, "to_replica": 2, "tx_time_ms": 0}"#],
    "vllm_omni:transfer_tx_s",
    &[r#"from_replica="3",from_stage="0",model_name="org/model",to_replica="2",to_stage="1"} 1.0"#, "} 0.0"])]
#[case::transfer_of_an_unbound_request(
    &[r#"{"event": "transfer_sent", "request_id": "a", "from_stage": 0, "to_stage": 1, "to_replica": 2, "tx_time_ms": 1}"#],
    "vllm_omni:transfer_tx_s", &[])]
#[case::transfer_of_no_request(
    &[r#"{"event": "transfer_received", "from_stage": 0, "from_replica": 1, "to_stage": 1, "to_replica": 2, "rx_decode_time_ms": 5}"#],
    "vllm_omni:transfer_rx_s",
    &[r#"from_replica="1",from_stage="0",model_name="org/model",to_replica="2",to_stage="1"} 1.0"#, "} 0.005"])]
#[case::underrun_as_told(
    &[r#"{"event": "first_packet", "request_id": "a", "stage_id": 1, "replica_id": 0, "ttfp_s": 1}"#,
      r#"{"event": "stream_end", "request_id": "a", "outcome": "completed", "stage_id": 1, "replica_id": 0, "underrun_s": 0.1}"#,
      r#"{"event": "stream_end", "request_id": "a", "outcome": "completed", "speech": true}"#],
    "vllm_omni:audio_continuity_ok_total", &[r#"replica="0",stage="1",threshold_ms="100"} 1.0"#])]
#[case::speech_counts_beside_its_underrun(
    &[r#"{"event": "stream_end", "outcome": "completed", "stage_id": 1, "replica_id": 0, "underrun_s": 0.5}"#,
      r#"{"event": "stream_end", "outcome": "completed", "speech": true}"#],
    "vllm_omni:speech_stream_completed_total", &[r#"{model_name="org/model"} 1.0"#])]
#[case::first_packet_once(
    &[r#"{"t": 1700000010, "event": "added", "request_id": "a"}"#,
      r#"{"t": 1700000012, "event": "first_packet", "request_id": "a", "stage_id": 1, "replica_id": 0}"#,
      r#"{"t": 1700000013, "event": "first_packet", "request_id": "a", "stage_id": 1, "replica_id": 0}"#],
    "vllm_omni:audio_ttfp_s", &["_count", "_sum"])]
#[case::batches_add_up(
    &[r#"{"event": "stage", "request_id": "a", "stage_id": 0, "batch_id": 1, "num_tokens_in": 5, "num_tokens_out": 2}"#,
      r#"{"event": "stage", "request_id": "a", "stage_id": 0, "batch_id": 2, "num_tokens_in": 0, "num_tokens_out": 3}"#,
      r#"{"event": "stage", "request_id": "a", "stage_id": 0, "batch_id": 2, "num_tokens_in": 0, "num_tokens_out": 3}"#,
      r#"{"event": "finished", "request_id": "a", "e2e_s": 1}"#],
    "vllm_omni:generation_tokens_total", &[r#"{model_name="org/model"} 5.0"#])]
#[case::steps_of_llm_stages_are_none(
    &[r#"{"event": "stage", "request_id": "a", "stage_id": 0, "stage_type": "llm", "num_inference_steps": 4}"#],
    "vllm_omni:num_inference_steps", &[])]
#[case::memory_is_the_highest_replica(
    &[r#"{"event": "stage", "request_id": "a", "stage_id": 0, "replica_id": 0, "peak_memory_mb": 10}"#,
      r#"{"event": "stage", "request_id": "b", "stage_id": 0, "replica_id": 1, "peak_memory_mb": 7}"#],
    "vllm_omni:peak_memory_mb", &[r#"stage="0"} 10.0"#])]
#[case::negative_times_are_none(
    &[r#"{"event": "kv_wait", "kv_wait_s": -1}"#],
    "vllm_omni:kv_wait_s", &[])]
fn semantics(#[case] lines: &[&str], #[case] family: &str, #[case] wanted: &[&str]) {
    let mut agent = Agent::new(Limits::default());
    agent.pass(20).tell(lines).pass(1);
    let samples = agent.samples(&format!("{family}{{"));
    let samples = if samples.is_empty() {
        agent.samples(&format!("{family}_"))
    } else {
        samples
    };
    assert_eq!(samples.len(), wanted.len(), "{samples:?}");
    for (sample, wanted) in samples.iter().zip(wanted) {
        let (start, end) = wanted.split_once(' ').map_or((*wanted, ""), |(s, e)| (s, e));
        assert!(
            sample.contains(start) && sample.ends_with(end),
            "{sample} is not {wanted}"
        );
    }
}

#[test]
fn gauges_follow_requests_and_snapshots() {
    let mut agent = Agent::new(Limits::default());
    let gauges = |agent: &Agent| {
        ["running", "waiting"].map(|what| {
            agent.value(&format!(
                r#"vllm_omni:num_requests_{what}{{model_name="org/model"}}"#
            ))
        })
    };
    agent
        .tell(&[
            r#"{"event": "added", "request_id": "a"}"#,
            r#"{"event": "added", "request_id": "b"}"#,
            r#"{"event": "added", "request_id": "c"}"#,
            r#"{"event": "dispatched", "request_id": "a", "stage_id": 0, "replica_id": 0}"#,
            r#"{"event": "dispatched", "request_id": "b", "stage_id": 0, "replica_id": 1}"#,
            r#"{"event": "scheduler", "stage_id": 0, "replica_id": 1, "num_waiting_reqs": 1}"#,
        ])
        .pass(1);
    assert_eq!(gauges(&agent), [Some(1.0), Some(2.0)]);
    let stage = r#"vllm_omni:stage_waiting_requests{model_name="org/model",stage="0"}"#;
    assert_eq!(agent.value(stage), Some(1.0));
    agent
        .tell(&[r#"{"event": "replica_gone", "stage_id": 0, "replica_id": 1}"#])
        .pass(1);
    assert_eq!(gauges(&agent), [Some(2.0), Some(1.0)]);
    assert_eq!(agent.value(stage), Some(0.0));
    agent
        .tell(&[
            r#"{"event": "scheduler", "stage_id": 0, "replica_id": 0, "num_waiting_reqs": 7}"#,
            r#"{"event": "finished", "request_id": "a"}"#,
            r#"{"event": "finished", "request_id": "b"}"#,
            r#"{"event": "failed", "request_id": "c"}"#,
        ])
        .pass(1);
    assert_eq!(gauges(&agent), [Some(0.0), Some(0.0)]);
    assert_eq!(agent.value(stage), Some(7.0));
    agent.pass(6);
    assert_eq!(agent.value(stage), Some(0.0), "nothing is open");
}

#[test]
fn several_senders_of_one_pipeline_add_up() {
    let mut agent = Agent::new(Limits::default());
    agent.observer.stat_opened(Sender(2), API + 1);
    let sessions = r#"vllm_omni:realtime_vad_active_sessions{model_name="org/model"}"#;
    for (sender, open) in [(1, 2), (2, 3), (1, 1)] {
        agent.tell_as(
            sender,
            &format!(r#"{{"v": 1, "event": "vad", "active_sessions": {open}}}"#),
        );
    }
    assert_eq!(agent.value(sessions), Some(4.0));
    for (sender, request) in [(1, "a"), (2, "b")] {
        agent.tell_as(
            sender,
            &format!(r#"{{"v": 1, "event": "added", "request_id": "{request}"}}"#),
        );
    }
    // One of the two API workers is killed.
    let key = ProcessKey {
        pid: API + 1,
        start_ticks: 1,
    };
    agent.observer.change(&Change::ProcessGone(key), agent.now_ns);
    agent.observer.stat_closed(Sender(2));
    agent.pass(1);
    assert_eq!(agent.value(sessions), Some(1.0));
    let failed = r#"vllm_omni:requests_failed_total{model_name="org/model",reason="unknown"}"#;
    assert_eq!(agent.value(failed), Some(1.0));
    let waiting = r#"vllm_omni:num_requests_waiting{model_name="org/model"}"#;
    assert_eq!(agent.value(waiting), Some(1.0));
    agent.observer.stat_closed(Sender(1));
    assert_eq!(agent.value(sessions), None);
    assert_eq!(agent.value(failed), Some(1.0), "the rest may be another source's");
}

#[test]
fn a_sender_that_comes_back_goes_on_with_its_requests() {
    let mut agent = Agent::new(Limits::default());
    agent.pass(5);
    agent.tell(&[r#"{"t": 1700000001, "event": "added", "request_id": "a"}"#]);
    agent.observer.stat_closed(Sender(1));
    agent.pass(1);
    agent.observer.stat_opened(Sender(2), API);
    agent.tell_as(
        2,
        r#"{"v": 1, "t": 1700000003, "event": "finished", "request_id": "a"}"#,
    );
    let sum = r#"vllm_omni:e2e_request_latency_s_sum{model_name="org/model"}"#;
    assert_eq!(agent.value(sum), Some(2.0));
}

#[rstest]
#[case::own_pipeline(100, "", Some(1))]
#[case::own_pipeline_whatever_it_says(100, r#", "pid": 200"#, Some(1))]
#[case::by_process(999, r#", "pid": 201"#, Some(2))]
#[case::by_model(999, r#", "model": "org/other""#, Some(2))]
#[case::by_an_unknown_process(999, r#", "pid": 7"#, None)]
#[case::by_an_unknown_model(999, r#", "model": "org/none""#, None)]
#[case::by_nothing_of_two(999, "", None)]
#[case::from_another_namespace(0, r#", "pid": 200"#, Some(2))]
fn an_event_is_about_one_pipeline(#[case] pid: u32, #[case] head: &str, #[case] about: Option<u32>) {
    let mut agent = Agent::new(Limits::default());
    agent.pipeline(2, "org/other");
    agent.observer.stat_opened(Sender(9), pid);
    agent.tell_as(
        9,
        &format!(r#"{{"v": 1{head}, "event": "failed", "request_id": "a"}}"#),
    );
    for (id, model) in [(1, "org/model"), (2, "org/other")] {
        let failed = format!(r#"vllm_omni:requests_failed_total{{model_name="{model}",reason="unknown"}}"#);
        assert_eq!(
            agent.value(&failed),
            (about == Some(id)).then_some(1.0),
            "{model}"
        );
    }
    let missed = if about.is_none() { 1.0 } else { 0.0 };
    assert_eq!(agent.results("failed", "no_pipeline"), missed);
}

#[test]
fn an_event_without_a_name_is_about_the_only_pipeline() {
    let mut agent = Agent::new(Limits::default());
    agent.observer.stat_opened(Sender(9), 999);
    agent.tell_as(9, r#"{"v": 1, "event": "failed", "request_id": "a"}"#);
    assert_eq!(agent.results("failed", "accepted"), 1.0);
}

#[test]
fn requests_and_names_are_bounded() {
    let limits = Limits {
        max_requests: 10,
        ..Limits::default()
    };
    let mut agent = Agent::new(limits);
    for request in 0..50 {
        agent.tell(&[
            &format!(r#"{{"event": "added", "request_id": "{request}"}}"#),
            &format!(r#"{{"event": "chunk", "request_id": "{request}", "stage_id": 0, "bytes": 2}}"#),
            &format!(r#"{{"event": "vad", "error": "error {request}"}}"#),
            &format!(r#"{{"event": "kv_wait", "connector_type": "connector {request}", "kv_wait_s": 1}}"#),
        ]);
    }
    for replica in 0..2000 {
        let place = format!(r#""stage_id": 7, "replica_id": {replica}"#);
        agent.tell(&[
            &format!(r#"{{"event": "scheduler", {place}, "num_waiting_reqs": 1}}"#),
            &format!(r#"{{"event": "first_packet", {place}, "ttfp_s": 1}}"#),
        ]);
    }
    assert!(agent.results("scheduler", "full") > 900.0);
    assert!(agent.samples("vllm_omni:audio_ttfp_s_count").len() <= 1024);
    assert_eq!(agent.results("added", "full"), 40.0);
    assert_eq!(agent.results("chunk", "full"), 40.0);
    assert_eq!(agent.samples("vllm_omni:realtime_vad_errors_total").len(), 17);
    assert_eq!(agent.samples("vllm_omni:kv_wait_s_count").len(), 17);
    // Given up in the end.
    agent.pass(2000).pass(2000);
    agent.tell(&[r#"{"event": "added", "request_id": "new"}"#]);
    assert_eq!(agent.results("added", "accepted"), 11.0);
}

#[test]
fn continuity_is_that_of_the_player() {
    let mut agent = Agent::new(Limits::default());
    // 1 s of audio at 1 kHz stereo is 4000 bytes; the second chunk is 0.25 s late.
    agent.tell(&[
        r#"{"t": 1700000001, "event": "chunk", "request_id": "a", "stage_id": 1, "replica_id": 0, "bytes": 4000, "sample_rate": 1000, "channels": 2}"#,
        r#"{"t": 1700000002.25, "event": "chunk", "request_id": "a", "stage_id": 1, "replica_id": 0, "bytes": 4000}"#,
        r#"{"event": "stream_end", "request_id": "a", "outcome": "completed"}"#,
    ]);
    let labels = r#"{model_name="org/model",replica="0",stage="1"}"#;
    assert_eq!(
        agent.value(&format!("vllm_omni:audio_underrun_s_sum{labels}")),
        Some(0.25)
    );
    assert!(agent.samples("vllm_omni:audio_continuity_ok_total{").is_empty());
}

// ---- hostile input ----

/// Something like an event: a line of the example with pieces of others in it.
fn mutated() -> impl Strategy<Value = Vec<u8>> {
    let lines = example();
    (
        prop::sample::select(lines.clone()),
        prop::sample::select(lines),
        any::<prop::sample::Index>(),
        any::<prop::sample::Index>(),
        prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
    )
        .prop_map(|(one, other, cut, from, flips)| {
            let mut bytes = one.into_bytes();
            bytes.truncate(cut.index(bytes.len()) + 1);
            bytes.extend_from_slice(&other.as_bytes()[from.index(other.len())..]);
            for (at, byte) in flips {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            bytes
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn any_bytes_are_an_event_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        for encoding in [Encoding::Json, Encoding::Msgpack] {
            drop(stat::decode(&bytes, encoding));
            prop_assert!(Whole::new(encoding, &bytes).map(<[u8]>::len).sum::<usize>() <= bytes.len());
        }
    }

    #[test]
    fn damaged_events_harm_nobody(lines in prop::collection::vec(mutated(), 1..20)) {
        let mut agent = Agent::new(Limits::default());
        for line in &lines {
            match stat::decode(line, Encoding::Json) {
                Ok((head, event)) => agent.observer.stat(Sender(1), agent.now_ns, &head, &event),
                Err(error) => agent.observer.stat_unread(&error),
            }
        }
        agent.pass(1);
        // Each is counted.
        let counted: f64 = agent
            .samples("omnitap_stat_events_total{")
            .iter()
            .map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap())
            .sum();
        prop_assert_eq!(counted, f64::from(u32::try_from(lines.len()).unwrap()));
        // And the next sender's event is taken as ever.
        agent.observer.stat_opened(Sender(2), API);
        agent.tell_as(2, r#"{"v": 1, "event": "failed", "request_id": "the next"}"#);
        prop_assert!(agent.results("failed", "accepted") >= 1.0);
    }

    #[test]
    fn events_are_the_same_however_they_are_cut(cuts in prop::collection::vec(1_usize..400, 1..40)) {
        let lines = example();
        let mut text = String::new();
        let mut frames = Vec::new();
        for line in &lines {
            text.push_str(line);
            text.push('\n');
            let value: serde_json::Value = serde_json::from_str(line).unwrap();
            let bytes = rmp_serde::to_vec_named(&value).unwrap();
            frames.extend_from_slice(&u32::try_from(bytes.len()).unwrap().to_be_bytes());
            frames.extend_from_slice(&bytes);
        }
        let decoded: Vec<(Head, Event)> = lines
            .iter()
            .map(|line| stat::decode(line.as_bytes(), Encoding::Json).unwrap())
            .collect();
        for (encoding, bytes) in [(Encoding::Json, text.into_bytes()), (Encoding::Msgpack, frames)] {
            let mut got = Vec::new();
            let mut buffer = Vec::new();
            let mut rest = &bytes[..];
            let mut cuts = cuts.iter().copied().cycle();
            while !rest.is_empty() {
                let (now, later) = rest.split_at(cuts.next().unwrap().min(rest.len()));
                buffer.extend_from_slice(now);
                rest = later;
                let mut whole = Whole::new(encoding, &buffer);
                for event in whole.by_ref() {
                    got.push(stat::decode(event, encoding).unwrap());
                }
                buffer = whole.rest().to_vec();
            }
            prop_assert!(buffer.is_empty());
            prop_assert_eq!(&got, &decoded);
        }
    }
}

#[test]
fn the_catalogue_names_the_families_that_only_events_have() {
    for family in Family::ALL
        .iter()
        .filter(|family| family.row().source == Source::StatSocket)
    {
        assert!(families(|_| true).contains(family), "{}", family.name());
    }
}
