//! The agent beside the bundled pipeline: every value against what the pipeline knows of itself.
#![expect(clippy::float_cmp, reason = "counters of whole things are compared exactly")]

use std::{process::Command, time::Duration};

use anyhow::{Context, Result, ensure};
use omnitap_tests::{
    agent::{Agent, END, binary},
    pipeline::{Options, Pipeline},
    probed::{changed_bytes, changed_in, untouched},
    scrape::{Scrape, Series},
    truth::Truth,
};
use rstest::rstest;
use serde_json::{Value, json};

/// How soon a running pipeline must be found.
const FOUND: Duration = Duration::from_secs(5);
/// How soon values must be right after the last message: one decode, and the grace times of the state machines.
const SETTLED: Duration = Duration::from_secs(10);

/// Stage 0 generates tokens, stage 1 has two replicas that make audio.
fn speech(phases: &Value) -> Value {
    json!({
        "stages": [
            {"kind": "ar", "step_ms": 20, "max_num_seqs": 4},
            {"kind": "generation", "replicas": 2, "step_ms": 25}
        ],
        "phases": phases
    })
}

fn request(at: f64, repeat: u32, talk: &Value, speak: &Value) -> Value {
    json!({"at": at, "repeat": repeat, "every": 0.08, "max_tokens": 64, "stages": [talk, speak]})
}

fn plain_talk(tokens: u32) -> Value {
    json!({"prompt": 40, "cached": 16, "tokens": tokens, "prefill_steps": 2, "finish": "stop"})
}

fn plain_speak() -> Value {
    json!({
        "prompt": 12, "finish": "stop",
        "chunks": [{"frames": 4800}, {"frames": 4800}, {"frames": 2400}]
    })
}

/// Every ordinary course of a request, and the rare ones.
fn mixture() -> Value {
    let mut aborted = request(
        0.2,
        2,
        &json!({"prompt": 40, "tokens": 80, "stall_at": 5}),
        &plain_speak(),
    );
    aborted["abort_after"] = json!(2.0);
    let mut aborted_in_stage_1 = request(
        0.3,
        1,
        &plain_talk(4),
        &json!({"chunks": [{"frames": 2400, "steps": 200}]}),
    );
    aborted_in_stage_1["abort_after"] = json!(1.0);
    let mut whole = request(0.2, 1, &plain_talk(6), &plain_speak());
    whole["stream"] = json!(false);
    json!([{"requests": [
        request(0.0, 6, &plain_talk(12), &plain_speak()),
        whole,
        // More at once than the stage takes: some wait.
        {"at": 0.1, "repeat": 6, "stages": [plain_talk(8), plain_speak()]},
        aborted,
        aborted_in_stage_1,
        request(0.4, 1, &json!({"tokens": 10, "error_at": 5}), &plain_speak()),
        request(0.5, 1, &json!({"tokens": 10, "preempt_at": 4, "external_cached": 8}), &plain_speak()),
        request(0.6, 1, &json!({"tokens": 5, "kv_wait_ms": 40.0}), &plain_speak()),
        request(0.7, 1, &json!({"tokens": 5, "logprobs": 5}), &plain_speak()),
        // Longer than the capture limit: known by its head alone.
        request(0.8, 1, &json!({"prompt": 40000, "tokens": 3}), &plain_speak()),
        // An empty first chunk, then a late one: not continuous.
        request(0.9, 1, &plain_talk(3), &json!({
            "chunks": [{"frames": 0}, {"frames": 2400}, {"frames": 2400, "steps": 20}], "sample_rate": 16000
        })),
        // No audio at all.
        request(1.0, 1, &plain_talk(3), &json!({"chunks": [{"frames": 0}]})),
    ]}])
}

/// Waits until the agent knows the pipeline and has set its probes.
fn found(agent: &Agent, pipeline: &Pipeline, processes: &[u32]) -> Result<()> {
    let model = &pipeline.options().model;
    let scrape = agent.scrape_until(FOUND, |scrape| {
        scrape.sum("omnitap_pipeline_info", &[("model_name", model)]) > 0.0
            && processes
                .iter()
                .all(|&pid| changed_bytes(pid).is_ok_and(|n| n > 0))
    })?;
    for &pid in processes {
        ensure!(
            changed_bytes(pid)? > 0,
            "process {pid} is not probed:\n{}\n{}",
            agent.log(),
            own(&scrape)
        );
    }
    Ok(())
}

fn own(scrape: &Scrape) -> String {
    scrape
        .text
        .lines()
        .filter(|line| {
            line.starts_with("omnitap_") && !line.contains("_bucket") && !line.contains("_source_state")
        })
        .collect::<Vec<_>>()
        .join("\n")
}

/// All processes that have to be probed.
fn tapped(pipeline: &Pipeline) -> Vec<u32> {
    let mut pids = vec![pipeline.pid()];
    for stage in 0..2 {
        pids.extend((0..2).filter_map(|replica| pipeline.engine(stage, replica)));
    }
    pids
}

/// Compares until nothing differs, for as long as values may take to settle. The truth is read anew each time: the API
/// process may be late to take an engine's last messages.
fn agree(agent: &Agent, truth: impl Fn() -> Result<Truth>) -> Result<Scrape> {
    let differences = |scrape: &Scrape| truth().map(|truth| truth.differences(scrape));
    let scrape = agent.scrape_until(SETTLED, |scrape| {
        differences(scrape).is_ok_and(|found| found.is_empty())
    })?;
    let differences = differences(&scrape)?;
    ensure!(
        differences.is_empty(),
        "{} differences:\n{}\n{}",
        differences.len(),
        differences.join("\n"),
        own(&scrape)
    );
    Ok(scrape)
}

/// Gauges that must be 0 when no request is open.
fn rest(agent: &Agent, pipeline: &Pipeline) -> Result<()> {
    const GAUGES: [&str; 6] = [
        "vllm_omni:num_requests_running",
        "vllm_omni:num_requests_waiting",
        "vllm_omni:stage_waiting_requests",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
    ];
    let Options { model, served, .. } = pipeline.options();
    let busy = |scrape: &Scrape| -> Vec<String> {
        let ours = |series: &Series| {
            let name = series.labels.get("model_name");
            GAUGES.contains(&&*series.name) && (name == Some(model) || name == Some(served))
        };
        let open = scrape
            .samples
            .iter()
            .filter(|&(series, &value)| ours(series) && value != 0.0);
        open.map(|(series, value)| format!("{series:?} {value}"))
            .collect()
    };
    let scrape = agent.scrape_until(SETTLED, |scrape| busy(scrape).is_empty())?;
    let busy = busy(&scrape);
    ensure!(busy.is_empty(), "gauges are not back to 0:\n{}", busy.join("\n"));
    Ok(())
}

#[rstest]
#[case::log_stats_on("stats_on", &[])]
#[case::log_stats_off("stats_off", &["--disable-log-stats"])]
fn attached_after_start(#[case] name: &str, #[case] flags: &[&str]) -> Result<()> {
    let Some(_turn) = omnitap_tests::privileged()? else {
        return Ok(());
    };
    let mut pipeline = Pipeline::start(Options::omni(name).with(flags), &speech(&mixture()))?;
    let agent = Agent::start(&[])?;
    found(&agent, &pipeline, &tapped(&pipeline))?;
    pipeline.play()?;
    agree(&agent, || pipeline.truth())?;
    rest(&agent, &pipeline)?;
    pipeline.stop()
}

/// A request over HTTP.
fn over_http(at: f64, web: &str, talk: &Value, speak: &Value) -> Value {
    json!({"at": at, "web": web, "stream": web != "whole", "max_tokens": 64, "stages": [talk, speak]})
}

/// Waits until the agent sees what passes on the pipeline's HTTP connections.
fn seen_over_http(agent: &Agent, pipeline: &Pipeline) -> Result<()> {
    let scrape = agent.scrape_until(FOUND, |scrape| {
        let source = [("family", "vllm_omni:audio_ttfp_s"), ("source", "http")];
        pipeline.ask_health().is_ok() && scrape.sum("omnitap_source_state", &source) > 0.0
    })?;
    let source = [("family", "vllm_omni:audio_ttfp_s"), ("source", "http")];
    ensure!(
        scrape.sum("omnitap_source_state", &source) > 0.0,
        "no connection is seen:\n{}\n{}",
        agent.log(),
        own(&scrape)
    );
    Ok(())
}

#[test]
fn speech_over_http() -> Result<()> {
    let Some(_turn) = omnitap_tests::privileged()? else {
        return Ok(());
    };
    let late =
        json!({"finish": "stop", "chunks": [{"frames": 0}, {"frames": 2400}, {"frames": 2400, "steps": 20}]});
    let long = json!({"chunks": [{"frames": 2400}, {"frames": 2400, "steps": 200}]});
    // The server learns that the client has left by the writes after it.
    let many = json!({"chunks": [
        {"frames": 2400}, {"frames": 2400, "steps": 20}, {"frames": 2400, "steps": 4}, {"frames": 2400, "steps": 4},
        {"frames": 2400, "steps": 4}, {"frames": 2400, "steps": 400}
    ]});
    let failing = json!({"tokens": 10, "error_at": 5});
    let mut left = over_http(1.6, "pcm", &plain_talk(4), &long);
    left["abort_after"] = json!(1.0);
    let mut left_socket = over_http(1.7, "socket", &plain_talk(4), &many);
    left_socket["abort_after"] = json!(0.6);
    let phases = json!([{"requests": [
        over_http(0.0, "pcm", &plain_talk(6), &plain_speak()),
        over_http(0.2, "wav", &plain_talk(6), &plain_speak()),
        over_http(0.4, "events", &plain_talk(6), &plain_speak()),
        over_http(0.6, "socket", &plain_talk(6), &plain_speak()),
        over_http(0.8, "whole", &plain_talk(6), &plain_speak()),
        over_http(1.0, "pcm", &plain_talk(6), &late),
        over_http(1.2, "refused", &plain_talk(6), &plain_speak()),
        over_http(1.4, "events", &failing, &plain_speak()),
        over_http(1.5, "pcm", &failing, &plain_speak()),
        left,
        left_socket,
        // One that comes by no connection is measured at its frames.
        request(1.8, 1, &plain_talk(6), &plain_speak()),
    ]}]);
    let mut pipeline = Pipeline::start(Options::omni("over_http"), &speech(&phases))?;
    // It would ask this server for its metrics, which has none.
    let agent = Agent::start(&["--engine-metrics=off"])?;
    found(&agent, &pipeline, &tapped(&pipeline))?;
    seen_over_http(&agent, &pipeline)?;
    pipeline.play()?;
    let scrape = agree(&agent, || pipeline.truth())?;
    assert_eq!(scrape.sum("omnitap_api_breaks_total", &[]), 0.0);
    assert_eq!(
        scrape.sum("omnitap_api_requests_total", &[("result", "client_error")]),
        1.0
    );
    rest(&agent, &pipeline)?;
    pipeline.stop()
}

#[test]
fn images_of_a_stage_inside_the_api_process() -> Result<()> {
    let Some(_turn) = omnitap_tests::privileged()? else {
        return Ok(());
    };
    let image = |at: f64, image: &Value| json!({"at": at, "web": "image", "image": image, "stages": []});
    let scenario = json!({"stages": [], "phases": [{"requests": [
        image(0.0, &json!({"width": 8, "height": 8, "peak_memory_mb": 100.5})),
        // Far more than is captured of a call, and than a socket takes at once.
        image(0.2, &json!({"width": 1024, "height": 1024, "n": 2, "steps": 4, "ms": 100, "peak_memory_mb": 200.5})),
        image(0.8, &json!({"fails": true})),
    ]}]});
    let mut pipeline = Pipeline::start(Options::omni("inline_images"), &scenario)?;
    let agent = Agent::start(&[])?;
    found(&agent, &pipeline, &[pipeline.pid()])?;
    seen_over_http(&agent, &pipeline)?;
    pipeline.play()?;
    let scrape = agree(&agent, || pipeline.truth())?;
    let peak = [("model_name", pipeline.options().model.as_str()), ("stage", "0")];
    assert_eq!(scrape.get("vllm_omni:peak_memory_mb", &peak), Some(200.5));
    rest(&agent, &pipeline)?;
    pipeline.stop()
}

#[test]
fn gauges_while_requests_are_open() -> Result<()> {
    let Some(_turn) = omnitap_tests::privileged()? else {
        return Ok(());
    };
    // Six requests at a stage that takes four at a time, for two seconds each.
    let phases = json!([{"requests": [{"repeat": 6, "stages": [plain_talk(100), plain_speak()]}]}]);
    let mut pipeline = Pipeline::start(Options::omni("gauges"), &speech(&phases))?;
    let agent = Agent::start(&[])?;
    found(&agent, &pipeline, &tapped(&pipeline))?;
    pipeline.go()?;
    let (model, served) = (
        &pipeline.options().model.clone(),
        &pipeline.options().served.clone(),
    );
    let values = |scrape: &Scrape| {
        [
            scrape.get("vllm_omni:num_requests_running", &[("model_name", model)]),
            scrape.get("vllm_omni:num_requests_waiting", &[("model_name", model)]),
            scrape.get(
                "vllm_omni:stage_waiting_requests",
                &[("model_name", model), ("stage", "0")],
            ),
            scrape.get(
                "vllm:num_requests_running",
                &[("model_name", served), ("stage", "0"), ("replica", "0")],
            ),
        ]
    };
    let want = [Some(4.0), Some(2.0), Some(2.0), Some(4.0)];
    let scrape = agent.scrape_until(FOUND, |scrape| values(scrape) == want)?;
    assert_eq!(values(&scrape), want);
    pipeline.ended()?;
    agree(&agent, || pipeline.truth())?;
    rest(&agent, &pipeline)
}

#[test]
fn plain_vllm_with_two_ranks_and_two_api_workers() -> Result<()> {
    let Some(_turn) = omnitap_tests::privileged()? else {
        return Ok(());
    };
    let scenario = json!({
        "stages": [{"step_ms": 20, "max_num_seqs": 4}],
        "phases": [{"requests": [
            {"prefix": "cmpl", "repeat": 16, "every": 0.05, "max_tokens": 20,
             "stages": [{"prompt": 100, "cached": 32, "tokens": 20}]},
            {"prefix": "cmpl", "at": 0.3, "repeat": 2, "abort_after": 2.0, "stages": [{"tokens": 100, "stall_at": 5}]}
        ]}]
    });
    let flags = ["--data-parallel-size", "2", "--api-server-count", "2"];
    let mut pipeline = Pipeline::start(Options::vllm("plain").with(&flags), &scenario)?;
    let agent = Agent::start(&[])?;
    let ranks: Vec<u32> = (0..2).filter_map(|rank| pipeline.engine(0, rank)).collect();
    found(&agent, &pipeline, &ranks)?;
    pipeline.play()?;
    agree(&agent, || pipeline.truth())?;
    rest(&agent, &pipeline)
}

#[test]
fn pipeline_started_after_the_agent_and_started_again() -> Result<()> {
    let Some(_turn) = omnitap_tests::privileged()? else {
        return Ok(());
    };
    let phases = json!([{"requests": [request(0.0, 4, &plain_talk(10), &plain_speak())]}]);
    let agent = Agent::start(&[])?;
    let mut truth = Truth::default();
    for _ in 0..2 {
        let mut pipeline = Pipeline::start(Options::omni("again"), &speech(&phases))?;
        found(&agent, &pipeline, &tapped(&pipeline))?;
        pipeline.play()?;
        agree(&agent, || Ok(truth.clone().and(pipeline.truth()?)))?;
        rest(&agent, &pipeline)?;
        truth = truth.and(pipeline.truth()?);
        pipeline.stop()?;
        // Counters outlive their pipeline, so that a restart between two scrapes loses nothing.
        agree(&agent, || Ok(truth.clone()))?;
    }
    Ok(())
}

#[test]
fn two_pipelines_with_one_model_name_add_up() -> Result<()> {
    let Some(_turn) = omnitap_tests::privileged()? else {
        return Ok(());
    };
    let phases = json!([{"requests": [request(0.0, 4, &plain_talk(10), &plain_speak())]}]);
    let mut one = Pipeline::start(Options::omni("twins"), &speech(&phases))?;
    let mut two = Pipeline::start(Options::omni("twins"), &speech(&phases))?;
    let agent = Agent::start(&[])?;
    found(&agent, &one, &tapped(&one))?;
    found(&agent, &two, &tapped(&two))?;
    one.go()?;
    two.go()?;
    one.ended()?;
    two.ended()?;
    agree(&agent, || Ok(one.truth()?.and(two.truth()?)))?;
    rest(&agent, &one)
}

#[rstest]
#[case::reported_death("crash")]
#[case::killed("kill")]
fn engine_dies_and_is_started_again(#[case] how: &str) -> Result<()> {
    let Some(_turn) = omnitap_tests::privileged()? else {
        return Ok(());
    };
    // At the time of death stage 0 has five requests, two of them waiting at nobody's fault.
    let phases = json!([
        {
            "requests": [{"repeat": 5, "stages": [plain_talk(500), plain_speak()]}],
            "acts": [{"do": how, "stage": 0, "at": 0.7}, {"do": "start", "stage": 0, "at": 1.0}]
        },
        {"requests": [request(0.0, 3, &plain_talk(10), &plain_speak())]}
    ]);
    let mut pipeline = Pipeline::start(Options::omni(&format!("death_{how}")), &speech(&phases))?;
    let agent = Agent::start(&[])?;
    found(&agent, &pipeline, &tapped(&pipeline))?;
    pipeline.play()?;
    agree(&agent, || pipeline.truth())?;
    rest(&agent, &pipeline)?;
    found(&agent, &pipeline, &tapped(&pipeline))?;
    pipeline.play()?;
    agree(&agent, || pipeline.truth())?;
    rest(&agent, &pipeline)
}

#[test]
fn replica_added_while_running() -> Result<()> {
    let Some(_turn) = omnitap_tests::privileged()? else {
        return Ok(());
    };
    let mut scenario = speech(&json!([
        {
            "requests": [request(0.0, 3, &plain_talk(10), &plain_speak())],
            "acts": [{"do": "start", "stage": 1, "replica": 1, "at": 0.5}]
        },
        {"requests": [request(0.0, 6, &plain_talk(10), &plain_speak())]}
    ]));
    scenario["stages"][1]["replicas"] = json!(1);
    let mut pipeline = Pipeline::start(Options::omni("grown"), &scenario)?;
    let agent = Agent::start(&[])?;
    found(&agent, &pipeline, &tapped(&pipeline))?;
    pipeline.play()?;
    found(&agent, &pipeline, &tapped(&pipeline))?;
    pipeline.play()?;
    let scrape = agree(&agent, || pipeline.truth())?;
    let added = [
        ("model_name", pipeline.options().model.as_str()),
        ("replica", "1"),
    ];
    assert!(scrape.sum("vllm_omni:audio_frames_total", &added) > 0.0);
    Ok(())
}

#[test]
fn agent_restarted_in_mid_traffic() -> Result<()> {
    let Some(_turn) = omnitap_tests::privileged()? else {
        return Ok(());
    };
    // Each request takes ten seconds at stage 0; the second agent comes while all are in the middle of it.
    let phases = json!([
        {"requests": [request(0.0, 4, &plain_talk(500), &plain_speak())]},
        {"requests": [request(0.0, 3, &plain_talk(5), &plain_speak())]}
    ]);
    let mut pipeline = Pipeline::start(Options::omni("mid_traffic"), &speech(&phases))?;
    let (model, served) = (
        pipeline.options().model.clone(),
        pipeline.options().served.clone(),
    );
    let first = Agent::start(&[])?;
    found(&first, &pipeline, &tapped(&pipeline))?;
    pipeline.go()?;
    std::thread::sleep(Duration::from_millis(700));
    first.stop()?;
    assert!(untouched(&tapped(&pipeline))?, "a probe was left");
    let second = Agent::start(&[])?;
    found(&second, &pipeline, &tapped(&pipeline))?;
    let attached = monotonic()?;
    pipeline.ended()?;

    let stage0 = [("model_name", served.as_str()), ("stage", "0")];
    let scrape = second.scrape_until(SETTLED, |scrape| {
        scrape.sum(
            "vllm:request_success_total",
            &[("model_name", &served), ("stage", "1")],
        ) >= 4.0
    })?;
    // Finishes are counted, and at least the tokens since the probes were known to be set.
    assert_eq!(scrape.sum("vllm:request_success_total", &stage0), 4.0);
    let seen = scrape.sum("vllm:generation_tokens_total", &stage0);
    let since: f64 = pipeline
        .truth()?
        .only(|family, t| family == "vllm:generation_tokens_total" && t > attached)
        .expected()
        .values()
        .map(omnitap_tests::truth::Expected::count)
        .sum();
    assert!(
        since > 100.0 && seen >= since && seen < 2000.0,
        "{seen} tokens, {since} since attached"
    );
    // Nothing is known of their start at stage 0, so nothing is said of times from there.
    for family in [
        "vllm:time_to_first_token_seconds_count",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:request_queue_time_seconds_count",
        "vllm:request_prefill_time_seconds_count",
        "vllm:request_inference_time_seconds_count",
        "vllm:request_decode_time_seconds_count",
        "vllm:request_generation_tokens_count",
    ] {
        assert_eq!(scrape.sum(family, &stage0), 0.0, "{family}");
    }
    assert_eq!(
        scrape.sum("vllm_omni:e2e_request_latency_s_count", &[("model_name", &model)]),
        0.0
    );

    pipeline.play()?;
    let e2e =
        |scrape: &Scrape| scrape.sum("vllm_omni:e2e_request_latency_s_count", &[("model_name", &model)]);
    let scrape = second.scrape_until(SETTLED, |scrape| e2e(scrape) >= 3.0)?;
    assert_eq!(e2e(&scrape), 3.0);
    rest(&second, &pipeline)
}

/// `CLOCK_MONOTONIC` in seconds, as the pipeline's truth has it.
fn monotonic() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/uptime")?;
    // Boot time and monotonic time differ only where the machine has slept.
    text.split_whitespace()
        .next()
        .context("empty")?
        .parse()
        .context("not a number")
}

#[test]
fn full_ring_shows_what_was_lost() -> Result<()> {
    let Some(_turn) = omnitap_tests::privileged()? else {
        return Ok(());
    };
    let mut scenario = speech(&json!([{
        "requests": [request(0.0, 1, &plain_talk(3), &plain_speak())],
        "acts": [{"do": "flood", "stage": 0, "at": 0.2}]
    }]));
    scenario["stages"][0]["flood_frames"] = json!(20_000);
    scenario["stages"][0]["flood_bytes"] = json!(2000);
    let mut pipeline = Pipeline::start(Options::omni("flood"), &scenario)?;
    let agent = Agent::start(&["--tap.ring-buffer", "256KiB"])?;
    found(&agent, &pipeline, &tapped(&pipeline))?;
    let totals = |scrape: &Scrape| {
        let received = scrape.sum("omnitap_events_received_total", &[("kind", "frame")]);
        (received, scrape.sum("omnitap_events_lost_total", &[]))
    };
    // The kernel's counters are copied every few seconds.
    let settle = Duration::from_secs(5);
    std::thread::sleep(settle);
    let before = totals(&agent.scrape()?);
    let sent = pipeline.play()?["frames"].as_f64().context("no frames")?;
    std::thread::sleep(settle);
    let scrape = agent.scrape()?;
    let after = totals(&scrape);
    let (received, lost) = (after.0 - before.0, after.1 - before.1);
    ensure!(lost > 0.0, "nothing was lost of {sent}: {received} received");
    if scrape.sum("omnitap_pipelines", &[]) == 1.0 {
        assert_eq!(received + lost, sent, "{received} received and {lost} lost");
    } else {
        // Frames of somebody else's pipeline on this machine are among them.
        assert!(
            received + lost >= sent,
            "{received} received and {lost} lost of {sent}"
        );
    }
    Ok(())
}

#[test]
fn sigterm_ends_it_in_time_and_leaves_no_probe() -> Result<()> {
    let Some(_turn) = omnitap_tests::privileged()? else {
        return Ok(());
    };
    let phases = json!([{"requests": [request(0.0, 4, &plain_talk(40), &plain_speak())]}]);
    let mut pipeline = Pipeline::start(Options::omni("sigterm"), &speech(&phases))?;
    let agent = Agent::start(&[])?;
    let pids = tapped(&pipeline);
    found(&agent, &pipeline, &pids)?;
    // Each stage process has its probes of shared memory, too, two of them behind system calls. The API server has
    // those of HTTP instead, one in each of nine functions, of which `close` is probed in front of its system call.
    let engines = &pids[1..];
    let sites = f64::from(u32::try_from(2 * engines.len() + 8)?);
    agent.scrape_until(FOUND, |scrape| {
        scrape.sum("omnitap_probes_attached_total", &[("site", "syscall")]) >= sites
    })?;
    for &pid in engines {
        assert!(changed_in(pid, "libc.so.")? >= 4, "{pid}:\n{}", agent.log());
    }
    assert_eq!(changed_in(pids[0], "libc.so.")?, 9);
    pipeline.go()?;
    let (status, took) = agent.stop()?;
    assert!(status.success(), "{status}");
    assert!(took < END, "{took:?}");
    assert!(untouched(&pids)?, "a probe was left");
    // The pipeline has not noticed.
    pipeline.ended()?;
    pipeline.stop()
}

#[test]
fn without_ebpf_it_serves_and_touches_nothing() -> Result<()> {
    let Some(_turn) = omnitap_tests::unprivileged()? else {
        return Ok(());
    };
    let phases = json!([{"requests": [request(0.0, 2, &plain_talk(5), &plain_speak())]}]);
    let mut pipeline = Pipeline::start(Options::omni("no_ebpf"), &speech(&phases))?;
    let agent = Agent::start(&["--no-ebpf"])?;
    pipeline.play()?;
    assert_eq!(agent.get("/healthz")?.0, 200);
    let scrape = agent.scrape()?;
    for family in ["vllm_omni:e2e_request_latency_s", "vllm:generation_tokens_total"] {
        assert!(scrape.types.contains_key(family), "{family} is not listed");
    }
    let served = pipeline.options().served.clone();
    assert_eq!(
        scrape.sum("vllm:generation_tokens_total", &[("model_name", &served)]),
        0.0
    );
    assert!(untouched(&tapped(&pipeline))?);
    Ok(())
}

#[test]
fn a_recording_replays_to_the_same_text() -> Result<()> {
    let Some(_turn) = omnitap_tests::privileged()? else {
        return Ok(());
    };
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("recording");
    let mut pipeline = Pipeline::start(Options::omni("recorded"), &speech(&mixture()))?;
    let agent = Agent::start_as("record", &[&file.to_string_lossy()])?;
    found(&agent, &pipeline, &tapped(&pipeline))?;
    pipeline.play()?;
    let scrape = agree(&agent, || pipeline.truth())?;
    agent.stop()?;
    let replay = || -> Result<String> {
        let output = Command::new(binary()?).arg("replay").arg(&file).output()?;
        ensure!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8(output.stdout)?)
    };
    let text = replay()?;
    assert_eq!(text, replay()?);
    let ours = |text: &str| -> Vec<String> {
        let mine = text
            .lines()
            .filter(|line| line.contains("recorded") && line.starts_with("vllm"));
        mine.map(ToOwned::to_owned).collect()
    };
    assert_eq!(ours(&text), ours(&scrape.text));
    Ok(())
}

#[test]
fn pythons_parser_reads_the_text() -> Result<()> {
    let Some(_turn) = omnitap_tests::unprivileged()? else {
        return Ok(());
    };
    let agent = Agent::start(&["--no-ebpf"])?;
    let (_, text) = agent.get("/metrics")?;
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("metrics");
    std::fs::write(&path, &text)?;
    let script = "import sys\nfrom prometheus_client.parser import text_fd_to_metric_families\n\
                  print(sum(1 for _ in text_fd_to_metric_families(open(sys.argv[1], encoding='utf-8'))))";
    let output = Command::new(omnitap_tests::python().context("no Python")?)
        .args(["-c", script])
        .arg(&path)
        .output()?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let families: usize = String::from_utf8(output.stdout)?.trim().parse()?;
    assert_eq!(families, Scrape::parse(&text)?.types.len());
    Ok(())
}
