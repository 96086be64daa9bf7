//! The bundled pipeline by itself: what it plays is what its scenario says, and it leaves nothing behind.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use omnitap_tests::{
    pipeline::{Options, Pipeline},
    scrape::series,
    truth::Expected,
};
use serde_json::json;

#[test]
fn frames_and_a_run_check_out() -> Result<()> {
    let Some(_turn) = omnitap_tests::unprivileged()? else {
        return Ok(());
    };
    let output = Command::new(omnitap_tests::python().context("no Python")?)
        .arg("-B")
        .arg(omnitap_tests::root().join("tests/pipeline/selfcheck.py"))
        .output()?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

#[test]
fn crash_fails_open_requests_and_a_new_process_serves_again() -> Result<()> {
    let Some(_turn) = omnitap_tests::unprivileged()? else {
        return Ok(());
    };
    let scenario = json!({
        "stages": [{"step_ms": 20}],
        "phases": [
            {
                "requests": [{"repeat": 3, "stages": [{"tokens": 200}]}],
                "acts": [
                    {"do": "crash", "at": 0.5},
                    {"do": "start", "at": 0.6}
                ]
            },
            {"requests": [{"repeat": 2, "stages": [{"tokens": 5}]}]}
        ]
    });
    let options = Options::omni("crash_alone");
    let model = options.model.clone();
    let mut pipeline = Pipeline::start(options, &scenario)?;
    let first = pipeline.engine(0, 0).context("no engine")?;
    pipeline.play()?;
    pipeline.play()?;
    let second = pipeline.engine(0, 0).context("no engine")?;
    assert_ne!(first, second);
    let expected = pipeline.truth()?.expected();
    let failed = series(
        "vllm_omni:requests_failed_total",
        &[("model_name", &model), ("reason", "stage_error")],
    );
    let done = series("vllm_omni:e2e_request_latency_s", &[("model_name", &model)]);
    assert_eq!(expected.get(&failed), Some(&Expected::Counter(3.0)));
    assert_eq!(expected.get(&done).map(Expected::count), Some(2.0));
    pipeline.stop()?;
    assert!(!std::path::Path::new(&format!("/proc/{second}")).exists());
    Ok(())
}

#[test]
fn plain_vllm_with_two_ranks_and_two_api_workers() -> Result<()> {
    let Some(_turn) = omnitap_tests::unprivileged()? else {
        return Ok(());
    };
    let scenario = json!({
        "stages": [{"step_ms": 10}],
        "phases": [{"requests": [{"prefix": "cmpl", "repeat": 8, "every": 0.02, "stages": [{"tokens": 6}]}]}]
    });
    let options =
        Options::vllm("plain_alone").with(&["--data-parallel-size", "2", "--api-server-count", "2"]);
    let served = options.served.clone();
    let mut pipeline = Pipeline::start(options, &scenario)?;
    pipeline.play()?;
    let expected = pipeline.truth()?.expected();
    for replica in ["0", "1"] {
        let tokens = series(
            "vllm:generation_tokens_total",
            &[("model_name", &served), ("stage", "0"), ("replica", replica)],
        );
        assert_eq!(expected.get(&tokens), Some(&Expected::Counter(24.0)));
    }
    pipeline.stop()
}
