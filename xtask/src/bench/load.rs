//! The agent under load: memory with many series and open requests, CPU beside a pipeline that does nothing.

use std::{path::Path, time::Duration};

use anyhow::{Context, Result, ensure};
use omnitap_tests::pipeline::{Options, Pipeline};
use serde_json::json;

use super::{Bound, Figure};
use crate::{
    real::{
        agent::{self, Agent},
        at_rest,
        exposition::Exposition,
        process::{resident, run_time},
    },
    setup,
};

/// Lines and open requests that the bounds speak of.
pub(super) const MANY: usize = 10_000;
/// Replicas of the large pipeline: some 440 lines each.
const REPLICAS: usize = 32;
const IDLE: Duration = Duration::from_secs(30);

/// The bundled pipeline with so many replicas that a page has 10,000 lines, and the agent beside it.
pub(super) struct Large {
    // Ends before the pipeline, as it was started later.
    pub(super) agent: Agent,
    pipeline: Pipeline,
}

impl Large {
    pub(super) fn start(program: &Path, folder: &Path) -> Result<Self> {
        prepare()?;
        let scenario = json!({
            "forward": "finished",
            "stages": [
                {"kind": "ar", "replicas": REPLICAS, "step_ms": 20, "wakeups_hz": 1},
            ],
            "phases": [
                {"requests": [{
                    "max_tokens": 4, "repeat": REPLICAS * 4, "every": 0.01,
                    "stages": [{"prompt": 40, "cached": 8, "tokens": 4}]
                }]},
                {"requests": [{
                    "max_tokens": 100_000, "repeat": MANY, "every": 0.001,
                    "stages": [{"prompt": 40, "tokens": 100_000, "prefill_steps": 100_000}]
                }]},
            ]
        });
        let mut pipeline = Pipeline::start(Options::omni("large"), &scenario)?;
        let agent = Agent::start(program, pipeline.pid(), &folder.join("agent.log"), &[])?;
        pipeline.play()?;
        at_rest(&agent.metrics())?;
        Ok(Self { agent, pipeline })
    }

    /// Opens 10,000 requests that stay open.
    fn open(&mut self) -> Result<f64> {
        self.pipeline.go()?;
        let mut open = 0.0;
        for _ in 0..120 {
            std::thread::sleep(Duration::from_millis(500));
            let page = Exposition::parse(&self.agent.scrape()?)?;
            open = ["vllm_omni:num_requests_running", "vllm_omni:num_requests_waiting"]
                .iter()
                .filter_map(|family| page.total(family, &[]))
                .sum();
            #[expect(clippy::cast_precision_loss, reason = "ten thousand")]
            if open >= MANY as f64 {
                break;
            }
        }
        Ok(open)
    }
}

/// Sample lines of a page.
pub(super) fn lines(page: &str) -> usize {
    page.lines()
        .filter(|l| !l.starts_with('#') && !l.is_empty())
        .count()
}

/// The bundled pipeline finds its Python in `target/venv`.
pub(super) fn prepare() -> Result<()> {
    ensure!(
        setup::is_root(),
        "the agent loads BPF programs: run this task as root"
    );
    super::python().map(drop)
}

/// Resident memory.
#[expect(clippy::cast_precision_loss, reason = "megabytes and thousands")]
pub(super) fn memory(program: &Path, folder: &Path) -> Result<Vec<Figure>> {
    let mut large = Large::start(program, folder)?;
    let open = large.open()?;
    let page = large.agent.scrape()?;
    let bytes = resident(large.agent.pid()).context("no VmRSS")?;
    let lines = lines(&page);
    ensure!(open >= MANY as f64, "only {open} requests are open");
    ensure!(lines >= MANY, "only {lines} sample lines");
    agent::without_losses(&Exposition::parse(&page)?)?;
    Ok(vec![Figure::new(
        "memory: resident",
        bytes as f64 / f64::from(1 << 20),
        "MiB",
        Some(Bound::AtMost(30.0)),
        format!("{lines} sample lines, {open} open requests, {REPLICAS} replicas"),
    )])
}

/// CPU beside an idle pipeline, without scrapes.
pub(super) fn idle(program: &Path, folder: &Path) -> Result<Vec<Figure>> {
    prepare()?;
    let scenario = json!({
        "forward": "finished",
        "stages": [{"kind": "ar"}, {"kind": "generation", "replicas": 2}],
        "phases": [{"requests": [{"stages": [{"tokens": 4}, {"chunks": [{"frames": 2400}]}]}]}]
    });
    let mut pipeline = Pipeline::start(Options::omni("idle"), &scenario)?;
    let mut agent = Agent::start(program, pipeline.pid(), &folder.join("agent.log"), &[])?;
    pipeline.play()?;
    at_rest(&agent.metrics())?;
    let before = run_time(agent.pid()).context("no schedstat")?;
    std::thread::sleep(IDLE);
    let spent = run_time(agent.pid())
        .context("no schedstat")?
        .saturating_sub(before);
    agent.stop()?;
    Ok(vec![Figure::new(
        "idle: CPU of the agent beside an idle pipeline",
        spent.as_secs_f64() / IDLE.as_secs_f64() * 100.0,
        "% core",
        Some(Bound::AtMost(0.3)),
        format!("{} s, three engine processes, no scrape", IDLE.as_secs()),
    )])
}
