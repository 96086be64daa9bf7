//! Stat events beside the tap: a source that comes, goes and comes back, with a live pipeline and the agent's own socket.
#![expect(clippy::float_cmp, reason = "counters of whole things are compared exactly")]

use std::{io::Write as _, os::unix::net::UnixStream, time::Duration};

use anyhow::{Result, ensure};
use omnitap_tests::{
    agent::Agent,
    pipeline::{Options, Pipeline},
    probed::changed_bytes,
    scrape::Scrape,
};
use serde_json::json;

const FOUND: Duration = Duration::from_secs(5);
const SETTLED: Duration = Duration::from_secs(10);
const SUCCESS: &str = "vllm_omni:requests_success_total";

/// The sources that are named for a family of a pipeline, with their states. Others may run on this machine.
fn sources_of(model: &str, scrape: &Scrape, family: &str) -> Vec<(String, f64)> {
    let id = scrape
        .matching("omnitap_pipeline_info", &[("model_name", model)])
        .find_map(|(series, _)| series.labels.get("pipeline").cloned())
        .unwrap_or_default();
    scrape
        .matching("omnitap_source_state", &[("family", family), ("pipeline", &id)])
        .filter_map(|(series, value)| Some((series.labels.get("source")?.clone(), value)))
        .collect()
}

fn finish(stream: &mut UnixStream, model: &str, requests: std::ops::Range<u32>) -> Result<()> {
    for request in requests {
        let event = json!({
            "v": 1, "model": model, "event": "finished", "request_id": format!("told-{request}"), "e2e_s": 0.5
        });
        writeln!(stream, "{event}")?;
    }
    Ok(())
}

#[test]
fn a_source_that_comes_and_goes_neither_doubles_nor_loses() -> Result<()> {
    let Some(_turn) = omnitap_tests::privileged()? else {
        return Ok(());
    };
    let phase = json!({"requests": [{"repeat": 5, "every": 0.02, "stages": [{"tokens": 4}]}]});
    let scenario = json!({"stages": [{"kind": "ar", "step_ms": 10}], "phases": vec![phase; 4]});
    let mut pipeline = Pipeline::start(Options::omni("sources"), &scenario)?;
    let agent = Agent::start(&[])?;
    let model = pipeline.options().model.clone();
    let labels = [("model_name", model.as_str())];
    let sources = |scrape: &Scrape, family: &str| sources_of(&model, scrape, family);
    let served = pipeline.options().served.clone();
    let probed = |pid| changed_bytes(pid).is_ok_and(|changed| changed > 0);
    let pids = [Some(pipeline.pid()), pipeline.engine(0, 0)];
    let until = std::time::Instant::now() + FOUND;
    while !pids.into_iter().flatten().all(probed) {
        ensure!(std::time::Instant::now() < until, "no probes:\n{}", agent.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    let total = |wanted: f64| -> Result<Scrape> {
        let scrape = agent.scrape_until(SETTLED, |scrape| scrape.sum(SUCCESS, &labels) >= wanted)?;
        // What would be counted twice comes a little later.
        std::thread::sleep(Duration::from_secs(3));
        let later = agent.scrape()?;
        ensure!(
            later.sum(SUCCESS, &labels) == wanted,
            "{} instead of {wanted}, before {}:\n{}",
            later.sum(SUCCESS, &labels),
            scrape.sum(SUCCESS, &labels),
            agent.log()
        );
        Ok(later)
    };

    pipeline.play()?;
    let scrape = total(5.0)?;
    assert_eq!(sources(&scrape, SUCCESS), [("wire".to_owned(), 1.0)]);

    // A sender comes: from its first event on it alone counts what it tells of.
    let mut sender = UnixStream::connect(agent.stat_socket())?;
    finish(&mut sender, &model, 0..3)?;
    let scrape = total(8.0)?;
    assert_eq!(sources(&scrape, SUCCESS), [("stat_socket".to_owned(), 1.0)]);
    assert_eq!(
        sources(&scrape, "vllm:request_success_total"),
        [("wire".to_owned(), 1.0)],
        "nothing was told of it"
    );
    pipeline.play()?;
    let scrape = total(8.0)?;
    let done = scrape.sum("vllm:request_success_total", &[("model_name", &served)]);
    assert_eq!(done, 10.0, "seen all the same");

    // It goes: the tap counts on.
    drop(sender);
    agent.scrape_until(SETTLED, |scrape| {
        sources(scrape, SUCCESS) == [("wire".to_owned(), 1.0)]
    })?;
    pipeline.play()?;
    total(13.0)?;

    // And comes back.
    let mut sender = UnixStream::connect(agent.stat_socket())?;
    finish(&mut sender, &model, 3..4)?;
    let scrape = total(14.0)?;
    assert_eq!(sources(&scrape, SUCCESS), [("stat_socket".to_owned(), 1.0)]);
    drop(sender);
    agent.scrape_until(SETTLED, |scrape| {
        sources(scrape, SUCCESS) == [("wire".to_owned(), 1.0)]
    })?;
    pipeline.play()?;
    total(19.0)?;
    pipeline.stop()?;
    ensure!(agent.stat_socket().exists());
    let socket = agent.stat_socket();
    let (status, _) = agent.stop()?;
    ensure!(status.success());
    ensure!(!socket.exists(), "its socket stays");
    Ok(())
}
