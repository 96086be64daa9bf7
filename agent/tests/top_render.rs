//! The screens of `omnitap top` at 80 columns by 24 lines, as golden text.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::borrow::Cow;

use omnitap::{
    pipeline::records::{OpenRequest, OpenStage, OpenState, Outcome, RequestRecord, StageRecord},
    requests::Page,
    top::{App, Document, Look, draw},
};
use ratatui::{
    Terminal,
    backend::TestBackend,
    crossterm::event::{KeyCode, KeyEvent, KeyModifiers},
};
use rstest::rstest;
use serde_json::{Value, json};

const START_MS: u64 = 1_796_031_312_000;

/// The status of an agent beside a pipeline of two stages, `at_s` seconds after the start of the load.
fn loaded(at_s: u64) -> Value {
    let edge = json!({
        "model_name": "org/talker", "from_stage": "0", "from_replica": "0", "to_stage": "1", "to_replica": "0"
    });
    let stage = |stage: &str| json!({"model_name": "talker", "stage": stage, "replica": "0"});
    let model = json!({"model_name": "org/talker"});
    let histogram = |labels: &Value, count: u64, mean: f64| {
        let sum = mean * f64::from(u32::try_from(count).unwrap());
        json!([{"labels": labels, "counts": [count, 0], "sum": sum}])
    };
    let source = |family: &str, source: &str, value: f64| json!({"labels": {"pipeline": "1", "family": family, "source": source}, "value": value});
    json!({
        "version": "0.1.0",
        "time_ms": START_MS + 1_000 * at_s,
        "not_ready": null,
        "tap": "up",
        "warnings": [],
        "pipelines": [{
            "id": 1, "software": "vLLM-Omni 0.24.0", "omni": true, "model": "org/talker", "served": "talker",
            "pid": 4711, "engine": "read",
            "processes": [
                {"pid": 4711, "role": "API server", "stage": null, "replica": null, "ended": false,
                 "container": null, "probes": {"frames": null, "http": null}},
                {"pid": 4712, "role": "stage", "stage": 0, "replica": 0, "ended": false,
                 "container": null, "probes": {"frames": null, "shm": null}},
                {"pid": 4713, "role": "stage", "stage": 1, "replica": 0, "ended": false,
                 "container": null, "probes": {"frames": null, "shm": null}},
            ],
        }],
        "bounds": {},
        "families": {
            "vllm_omni:num_requests_running": [{"labels": model, "value": 3.0}],
            "vllm_omni:num_requests_waiting": [{"labels": model, "value": 1.0}],
            "vllm_omni:requests_success_total": [{"labels": model, "value": 2 * at_s}],
            "vllm_omni:requests_failed_total": [{"labels": model, "value": 2.0}],
            "vllm_omni:e2e_request_latency_s": histogram(&model, 2 * at_s, 1.625),
            "vllm_omni:audio_rtf": histogram(&model, 2 * at_s, 0.41),
            "vllm:num_requests_running": [
                {"labels": stage("0"), "value": 3.0}, {"labels": stage("1"), "value": 1.0}
            ],
            "vllm:num_requests_waiting": [
                {"labels": stage("0"), "value": 1.0}, {"labels": stage("1"), "value": 0.0}
            ],
            "vllm:generation_tokens_total": [
                {"labels": stage("0"), "value": 1234 * at_s}, {"labels": stage("1"), "value": 12 * at_s}
            ],
            "vllm:kv_cache_usage_perc": [
                {"labels": stage("0"), "value": 0.125}, {"labels": stage("1"), "value": 0.004}
            ],
            "omnitap_gpu_stage_memory_used_bytes": [
                {"labels": {"model_name": "org/talker", "stage": "0", "replica": "0"}, "value": 13_207_024_435_u64}
            ],
            "vllm_omni:transfer_size_bytes": histogram(&edge, 25 * at_s, 65_536.0),
            "vllm_omni:transfer_tx_s": histogram(&edge, 25 * at_s, 0.000_12),
            "vllm_omni:transfer_in_flight_s": histogram(&edge, 25 * at_s, 0.0042),
            "vllm_omni:transfer_rx_s": histogram(&edge, 25 * at_s, 0.0),
            "omnitap_cpu_seconds_total": [{"labels": {}, "value": 0.01 * f64::from(u32::try_from(at_s).unwrap())}],
            "omnitap_events_received_total": [{"labels": {"kind": "frame"}, "value": 15_000 * at_s}],
            "omnitap_resident_memory_bytes": [{"labels": {}, "value": 24_117_248.0}],
            "omnitap_series": [{"labels": {}, "value": 812.0}],
            "omnitap_probed_processes": [{"labels": {}, "value": 3.0}],
            "omnitap_source_state": [
                source("a", "wire", 1.0), source("b", "wire", 1.0), source("c", "http", 0.0),
            ],
        },
    })
}

fn nothing_found() -> Value {
    let mut status = loaded(1);
    status["pipelines"] = json!([]);
    status["families"] = json!({});
    status
}

fn dead_stage() -> Value {
    let mut status = loaded(1);
    status["pipelines"][0]["processes"][2]["ended"] = json!(true);
    status["pipelines"][0]["processes"][1]["probes"] = json!({"frames": "operation not permitted"});
    status["warnings"] = json!([
        {"text": "Stage 1, replica 0 of org/talker (process 4713) has ended, and no other has taken its place.",
         "remedy": "Look at the pipeline's own log."},
        {"text": "3 events were lost since the start (ring_full): counts are too low by what they told.",
         "remedy": "Raise tap.ring-buffer."},
    ]);
    status
}

fn hostile() -> Value {
    let mut status = loaded(1);
    let name = json!(format!("\u{1b}[2J\u{7}evil\r\n{}", "x".repeat(300)));
    status["pipelines"][0]["model"] = name.clone();
    status["pipelines"][0]["served"] = name;
    status["pipelines"][0]["software"] = json!("vLLM \u{9b}31m");
    status
}

fn page() -> Page {
    let stage = |number: u32, state, generated_tokens| OpenStage {
        stage: Some(number),
        replica: Some(0),
        state,
        generated_tokens,
    };
    let open = |id: &str, age_ms: f64, stages| OpenRequest {
        request_id: id.to_owned(),
        model: Some("org/talker".to_owned()),
        pipeline_pid: 4711,
        age_ms: Some(age_ms),
        stages,
    };
    let row = |number: u32, generated_tokens| StageRecord {
        stage: Some(number),
        replica: Some(0),
        kind: "llm".into(),
        finish_reason: Some("stop".into()),
        queue_ms: None,
        first_token_ms: None,
        gen_time_ms: None,
        prompt_tokens: None,
        generated_tokens,
    };
    let over = |id: &str, outcome, reason: &'static str, e2e_ms: Option<f64>| RequestRecord {
        request_id: id.to_owned(),
        model: Some("org/talker".to_owned()),
        pipeline_pid: 4711,
        arrived_unix_ms: None,
        ended_unix_ms: Some(START_MS),
        e2e_ms,
        outcome,
        reason: Cow::Borrowed(reason),
        prompt_tokens: None,
        generated_tokens: 61,
        stages: vec![row(0, 60), row(1, 1)],
        transfers: Vec::new(),
    };
    Page {
        last: 3,
        records: vec![
            over("speech-1-0a1b2c3d", Outcome::Failed, "stage_error", None),
            over(
                "speech-2-0a1b2c3d",
                Outcome::Aborted,
                "client_disconnect",
                Some(512.0),
            ),
            over(
                "speech-a4d9897eecc1e525a4d9897eecc1e525-85777859",
                Outcome::Finished,
                "stop",
                Some(2_425.402),
            ),
        ],
        open: vec![
            open(
                "speech-4-0a1b2c3d",
                1_720.0,
                vec![stage(0, OpenState::Finished, 60), stage(1, OpenState::Running, 4)],
            ),
            open(
                "speech-5-0a1b2c3d",
                20.0,
                vec![stage(0, OpenState::Running, 12), stage(1, OpenState::Given, 0)],
            ),
        ],
        ..Page::default()
    }
}

fn look(status: Value) -> Look {
    Look {
        status: Ok(serde_json::from_value::<Document>(status).unwrap()),
        requests: Ok(page()),
    }
}

fn press(app: &mut App, code: KeyCode) -> bool {
    app.key(KeyEvent::new(code, KeyModifiers::NONE))
}

fn screen(app: &mut App, columns: u16, rows: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(columns, rows)).unwrap();
    terminal.draw(|frame| draw(app, frame)).unwrap();
    terminal.backend().to_string()
}

fn app() -> App {
    App::new("127.0.0.1:9477".to_owned())
}

#[rstest]
#[case::pipelines("load", vec![loaded(0), loaded(10)], 0)]
#[case::first_look("first-look", vec![loaded(10)], 0)]
#[case::requests("requests", vec![loaded(10)], 1)]
#[case::agent("agent", vec![loaded(0), loaded(10)], 2)]
#[case::nothing_found("nothing-found", vec![nothing_found()], 0)]
#[case::dead_stage("dead-stage", vec![dead_stage()], 0)]
#[case::dead_stage_remedies("dead-stage-agent", vec![dead_stage()], 2)]
#[case::hostile_names("hostile", vec![hostile()], 0)]
fn screens(#[case] name: &str, #[case] looks: Vec<Value>, #[case] tabs: usize) {
    let mut app = app();
    for status in looks {
        app.take(look(status));
    }
    for _ in 0..tabs {
        assert!(press(&mut app, KeyCode::Tab));
    }
    let drawn = screen(&mut app, 80, 24);
    assert!(!drawn.contains(|c: char| c.is_control() && c != '\n'));
    insta::assert_snapshot!(name, drawn);
}

#[test]
fn no_answer() {
    let mut app = app();
    let asking = screen(&mut app, 80, 24);
    assert!(asking.contains("asking"), "{asking}");
    app.take(look(loaded(1)));
    app.take(Look {
        status: Err(
            "no agent can be reached at 127.0.0.1:9477: Connection refused (os error 111); start `omnitap run`, or \
             name its web.listen-address with --agent"
                .to_owned(),
        ),
        requests: Ok(Page::default()),
    });
    insta::assert_snapshot!("no-answer", screen(&mut app, 80, 24));
    app.take(look(loaded(2)));
    assert!(screen(&mut app, 80, 24).contains("org/talker"));
}

#[test]
fn requests_that_are_not_kept() {
    let mut app = app();
    let reason = "no records of requests are kept: set requests.enabled".to_owned();
    app.take(Look {
        requests: Err(reason.clone()),
        ..look(loaded(1))
    });
    press(&mut app, KeyCode::Tab);
    let drawn = screen(&mut app, 80, 24);
    assert!(drawn.contains(&reason), "{drawn}");
}

#[test]
fn keys() {
    let mut app = app();
    app.take(look(dead_stage()));
    let first = screen(&mut app, 80, 6);
    // Three lines of the body: the rest is below.
    press(&mut app, KeyCode::Down);
    let second = screen(&mut app, 80, 6);
    assert_ne!(first, second);
    press(&mut app, KeyCode::Up);
    assert_eq!(screen(&mut app, 80, 6), first);
    for _ in 0..100 {
        press(&mut app, KeyCode::PageDown);
    }
    let end = screen(&mut app, 80, 6);
    assert!(end.contains("0.0 -> 1.0"), "{end}");
    // The end is the end: one step up shows something else at once.
    press(&mut app, KeyCode::Up);
    assert_ne!(screen(&mut app, 80, 6), end);
    for _ in 0..3 {
        press(&mut app, KeyCode::Tab);
    }
    assert_eq!(screen(&mut app, 80, 6), first, "three views, and the first again");
    press(&mut app, KeyCode::BackTab);
    assert!(screen(&mut app, 80, 24).contains("Families by source"));
    assert!(!press(&mut app, KeyCode::Char('q')));
    assert!(!app.key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)));
}

/// Also where nothing fits, drawing is no error.
#[rstest]
#[case(1, 1)]
#[case(80, 3)]
#[case(10, 24)]
#[case(300, 100)]
fn any_size(#[case] columns: u16, #[case] rows: u16) {
    let mut app = app();
    app.take(look(dead_stage()));
    for _ in 0..3 {
        screen(&mut app, columns, rows);
        press(&mut app, KeyCode::Tab);
    }
}

#[test]
fn an_agent_that_has_started_anew_counts_from_zero() {
    let mut app = app();
    app.take(look(loaded(50)));
    app.take(look(loaded(60)));
    let mut anew = loaded(1);
    anew["time_ms"] = json!(START_MS + 61_000);
    app.take(look(anew));
    let drawn = screen(&mut app, 80, 24);
    assert!(drawn.contains("requests/s 0 "), "{drawn}");
}
