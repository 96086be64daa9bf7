//! The agent beside a pipeline with a diffusion stage in a process of its own: every value against what the pipeline
//! knows of itself.
#![expect(clippy::float_cmp, reason = "counters of whole things are compared exactly")]

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use omnitap_tests::{
    agent::Agent,
    pipeline::{Options, Pipeline},
    probed::changed_bytes,
    scrape::Scrape,
};
use serde_json::{Value, json};

/// How soon a running pipeline must be found.
const FOUND: Duration = Duration::from_secs(5);
/// How soon values must be right after the last message.
const SETTLED: Duration = Duration::from_secs(10);

/// Waits until the agent has probed the API process and these engines.
fn found(agent: &Agent, pipeline: &Pipeline, engines: &[(u64, u64)]) -> Result<()> {
    let mut pids = vec![pipeline.pid()];
    for &(stage, replica) in engines {
        pids.push(pipeline.engine(stage, replica).context("no engine")?);
    }
    let probed = |&pid: &u32| changed_bytes(pid).is_ok_and(|changed| changed > 0);
    let model = [("model_name", pipeline.options().model.as_str())];
    agent.scrape_until(FOUND, |scrape| {
        scrape.sum("omnitap_pipeline_info", &model) > 0.0 && pids.iter().all(probed)
    })?;
    ensure!(
        pids.iter().all(probed),
        "not all of {pids:?} are probed:\n{}",
        agent.log()
    );
    Ok(())
}

/// Compares until nothing differs, for as long as values may take to settle.
fn agree(agent: &Agent, pipeline: &Pipeline) -> Result<Scrape> {
    let differences = |scrape: &Scrape| pipeline.truth().map(|truth| truth.differences(scrape));
    let scrape = agent.scrape_until(SETTLED, |scrape| {
        differences(scrape).is_ok_and(|found| found.is_empty())
    })?;
    let differences = differences(&scrape)?;
    ensure!(
        differences.is_empty(),
        "{} differences:\n{}\n{}",
        differences.len(),
        differences.join("\n"),
        agent.log()
    );
    Ok(scrape)
}

fn request(at: f64, repeat: u32, words: &Value, picture: &Value) -> Value {
    json!({"at": at, "repeat": repeat, "every": 0.05, "max_tokens": 64, "stages": [words, picture]})
}

fn words() -> Value {
    json!({"prompt": 40, "tokens": 4, "finish": "length"})
}

#[test]
fn words_then_pictures() -> Result<()> {
    let Some(_turn) = omnitap_tests::privileged()? else {
        return Ok(());
    };
    let mut left = request(0.7, 2, &words(), &json!({"stall_at": 1}));
    left["abort_after"] = json!(2.0);
    let phases = json!([{"requests": [
        request(0.0, 6, &words(), &json!({"picture": {"preprocess_ms": 3.0}})),
        request(0.3, 2, &words(), &json!({"picture": {"count": 3, "profile": true, "kv_recv_ms": 4.5}})),
        // Far more than is captured of a frame.
        request(0.4, 2, &words(), &json!({"picture": {"width": 1024, "height": 1024, "count": 2}})),
        request(0.5, 1, &words(), &json!({"picture": {"kind": "video", "profile": true}})),
        request(0.6, 2, &words(), &json!({"error_at": 2})),
        request(0.8, 1, &json!({"tokens": 4, "error_at": 2}), &json!({})),
        left,
    ]}]);
    let scenario = json!({
        "stages": [{"kind": "ar", "step_ms": 15}, {"kind": "diffusion", "max_num_seqs": 2}],
        "phases": phases
    });
    let mut pipeline = Pipeline::start(Options::omni("pictures"), &scenario)?;
    let agent = Agent::start(&[])?;
    found(&agent, &pipeline, &[(0, 0), (1, 0)])?;
    pipeline.play()?;
    let scrape = agree(&agent, &pipeline)?;
    let model = ("model_name", pipeline.options().model.as_str());
    assert_eq!(
        scrape.get("vllm_omni:peak_memory_mb", &[model, ("stage", "1")]),
        Some(1024.5)
    );
    assert_eq!(
        scrape.sum("vllm_omni:image_count_total", &[model]),
        6.0 + 2.0 * 3.0 + 2.0 * 2.0
    );
    let served = |family| {
        scrape.sum(
            "omnitap_source_state",
            &[("family", family), ("source", "diffusion")],
        )
    };
    assert!(served("vllm_omni:diffusion_exec_s") >= 1.0);
    assert!(served("vllm_omni:diffusion_forward_s") >= 1.0);
    // Nothing is open any more, and nothing waits.
    let open = |scrape: &Scrape| {
        scrape.sum("vllm_omni:num_requests_running", &[model])
            + scrape.sum("vllm_omni:num_requests_waiting", &[model])
            + scrape.sum("vllm_omni:stage_waiting_requests", &[model])
    };
    let scrape = agent.scrape_until(SETTLED, |scrape| open(scrape) == 0.0)?;
    assert_eq!(open(&scrape), 0.0);
    pipeline.stop()
}

#[test]
fn two_replicas_of_one_stage_and_one_that_dies() -> Result<()> {
    let Some(_turn) = omnitap_tests::privileged()? else {
        return Ok(());
    };
    let pictures = |repeat: u32, steps: u32| {
        json!({
            "prefix": "img_gen", "repeat": repeat, "every": 0.03, "stages": [{"picture": {"steps": steps}}]
        })
    };
    let scenario = json!({
        "stages": [{"kind": "diffusion", "replicas": 2, "max_num_seqs": 8}],
        "phases": [
            {"requests": [pictures(8, 3)]},
            // Four requests are at each replica when the first one dies.
            {
                "requests": [pictures(8, 60)],
                "acts": [{"do": "crash", "stage": 0, "replica": 0, "at": 0.7}]
            }
        ]
    });
    let mut pipeline = Pipeline::start(Options::omni("replicas"), &scenario)?;
    let agent = Agent::start(&[])?;
    found(&agent, &pipeline, &[(0, 0), (0, 1)])?;
    pipeline.play()?;
    let scrape = agree(&agent, &pipeline)?;
    let name = pipeline.options().model.clone();
    let model = ("model_name", name.as_str());
    for replica in ["0", "1"] {
        let labels = [model, ("stage", "0"), ("replica", replica)];
        assert_eq!(
            scrape.sum("vllm_omni:diffusion_exec_s_count", &labels),
            4.0,
            "{replica}"
        );
    }
    pipeline.play()?;
    let scrape = agree(&agent, &pipeline)?;
    let failed = [model, ("reason", "stage_error")];
    assert_eq!(scrape.sum("vllm_omni:requests_failed_total", &failed), 4.0);
    pipeline.stop()
}

#[test]
fn what_waits_in_a_diffusion_stages_scheduler() -> Result<()> {
    let Some(_turn) = omnitap_tests::privileged()? else {
        return Ok(());
    };
    // One at a time, two seconds each: with its result the first one says that two of the others wait.
    let picture = json!({"picture": {"steps": 40, "step_ms": 50}});
    let scenario = json!({
        "stages": [{"kind": "ar", "step_ms": 15}, {"kind": "diffusion", "max_num_seqs": 1}],
        "phases": [{"requests": [{"repeat": 4, "stages": [words(), picture]}]}]
    });
    let mut pipeline = Pipeline::start(Options::omni("waiting"), &scenario)?;
    let agent = Agent::start(&[])?;
    found(&agent, &pipeline, &[(0, 0), (1, 0)])?;
    pipeline.go()?;
    let name = pipeline.options().model.clone();
    let values = |scrape: &Scrape| {
        let gauge = |family: &str, labels: &[(&str, &str)]| {
            let model = [("model_name", name.as_str())];
            scrape.get(family, &[&model, labels].concat())
        };
        [
            gauge("vllm_omni:stage_waiting_requests", &[("stage", "1")]),
            gauge("vllm_omni:num_requests_waiting", &[]),
            gauge("vllm_omni:num_requests_running", &[]),
        ]
    };
    let want = [Some(2.0), Some(2.0), Some(1.0)];
    let scrape = agent.scrape_until(Duration::from_secs(8), |scrape| values(scrape) == want)?;
    assert_eq!(values(&scrape), want);
    pipeline.ended()?;
    agree(&agent, &pipeline)?;
    pipeline.stop()
}
