//! Transfers through shared memory: what stages get done at 1,000 hops a second, and what a receiver's poll costs.

use std::{collections::BTreeSet, path::Path, time::Duration};

use anyhow::{Context, Result, ensure};
use omnitap_tests::{
    hops::{Hop, seconds},
    pipeline::{Options, Pipeline},
};
use serde::Deserialize;
use serde_json::json;

use super::{
    Bound, Figure,
    load::prepare,
    stats::{median, range},
};
use crate::{
    real::{
        agent::{self, Agent},
        at_rest,
        exposition::Exposition,
        process::run_time,
    },
    setup,
};

/// Hops a second.
const RATE: usize = 1000;
/// Hops in a row on one side before the other side has its turn.
const BLOCK: usize = 3000;
/// Blocks, those of both sides.
const BLOCKS: usize = 12;
const BYTES: usize = 64 << 10;

/// One side's samples, a block each.
#[derive(Default)]
struct Side {
    rate: Vec<f64>,
    /// CPU of sender and receiver, microseconds a hop.
    cpu: Vec<f64>,
    /// Of the agent.
    agent_cpu: Vec<f64>,
    /// Seconds that sender and receiver took for each hop.
    busy: Vec<f64>,
}

/// In blocks: without, with, with, without, and so on, so that a drift hits both alike.
pub(super) fn measure(program: &Path, folder: &Path) -> Result<Vec<Figure>> {
    prepare()?;
    let poll = poll()?;
    #[expect(clippy::cast_precision_loss, reason = "a thousand")]
    let payload = json!({"bytes": BYTES, "every": 1.0 / RATE as f64});
    let phase = json!({"requests": [{"stages": [
        {"tokens": 1, "payloads": vec![payload; BLOCK]},
        {"chunks": [{"frames": 240}]}
    ]}]});
    let scenario = json!({
        "forward": "prewarm",
        "stages": [{"kind": "ar"}, {"kind": "generation"}],
        "phases": vec![phase; BLOCKS]
    });
    let mut pipeline = Pipeline::start(Options::omni("transfers"), &scenario)?;
    let mut without = Side::default();
    let mut with = Side::default();
    for block in 0..BLOCKS {
        if block % 4 == 1 || block % 4 == 2 {
            let log = folder.join("agent.log");
            let mut watcher = Agent::start(program, pipeline.pid(), &log, &[])?;
            at_rest(&watcher.metrics())?;
            one_block(&mut pipeline, &mut with, Some(watcher.pid()))?;
            at_rest(&watcher.metrics())?;
            let page = Exposition::parse(&watcher.scrape()?)?;
            let labels = [("model_name", pipeline.options().model.as_str())];
            let seen = page.total("vllm_omni:transfer_size_bytes", &labels);
            #[expect(clippy::cast_precision_loss, reason = "some thousands")]
            let all = BLOCK as f64;
            ensure!(seen == Some(all), "the agent saw {seen:?} of {all} hops");
            agent::without_losses(&page)?;
            watcher.stop()?;
        } else {
            one_block(&mut pipeline, &mut without, None)?;
        }
    }
    pipeline.stop()?;
    let (a, b) = (range(&without.rate), range(&with.rate));
    let added = median(&with.cpu) - median(&without.cpu);
    Ok(vec![
        Figure::new(
            "transfers: hops a second with the agent to without, 1,000 asked",
            median(&with.rate) / median(&without.rate),
            "x",
            Some(Bound::AtLeast(0.98)),
            format!(
                "{:.1} ({:.1} to {:.1}) and {:.1} ({:.1} to {:.1}), {} blocks a side of {BLOCK} hops of 64 KiB",
                median(&with.rate),
                b.0,
                b.1,
                median(&without.rate),
                a.0,
                a.1,
                with.rate.len()
            ),
        ),
        Figure::new(
            "transfers: CPU of sender and receiver a hop, with to without",
            median(&with.cpu) / median(&without.cpu),
            "x",
            None,
            format!(
                "{:.1} and {:.1} us, {added:.1} us more with polls; the agent itself {:.1} us a hop",
                median(&with.cpu),
                median(&without.cpu),
                median(&with.agent_cpu)
            ),
        ),
        Figure::new(
            "transfers: time in put and get of a hop, with to without",
            median(&with.busy) / median(&without.busy),
            "x",
            None,
            format!(
                "{:.1} and {:.1} us, by the pipeline's own clock",
                median(&with.busy) * 1e6,
                median(&without.busy) * 1e6
            ),
        ),
        Figure::new(
            "transfers: a failed open of the receiver, to an empty probe",
            poll.ratio,
            "x",
            None,
            format!(
                "{:.0} ns and {:.0} ns a hit; the call alone {:.0} ns",
                poll.hit_ns, poll.empty_hit_ns, poll.call_ns
            ),
        ),
    ])
}

fn one_block(pipeline: &mut Pipeline, side: &mut Side, agent: Option<u32>) -> Result<()> {
    let stages: Vec<u32> = (0..2).filter_map(|stage| pipeline.engine(stage, 0)).collect();
    let cpu = |pids: &[u32]| -> Result<Duration> {
        pids.iter()
            .map(|&pid| run_time(pid).context("no schedstat"))
            .sum()
    };
    let known: BTreeSet<String> = pipeline.hops()?.puts.into_keys().collect();
    let agent: Vec<u32> = agent.into_iter().collect();
    let before = (cpu(&stages)?, cpu(&agent)?);
    pipeline.play()?;
    let spent = (
        cpu(&stages)?.saturating_sub(before.0),
        cpu(&agent)?.saturating_sub(before.1),
    );
    let all = pipeline.hops()?;
    let hops: Vec<Hop> = all
        .pairs()
        .filter(|(key, _)| !known.contains(*key))
        .map(|(_, hop)| hop)
        .collect();
    ensure!(hops.len() == BLOCK, "{} of {BLOCK} hops", hops.len());
    let start = hops.iter().map(|hop| hop.put.start).min().unwrap_or_default();
    let done = hops.iter().map(|hop| hop.get.done).max().unwrap_or_default();
    #[expect(clippy::cast_precision_loss, reason = "some thousands")]
    let count = hops.len() as f64;
    side.rate.push(count / seconds(start, done));
    side.cpu.push(spent.0.as_secs_f64() * 1e6 / count);
    side.agent_cpu.push(spent.1.as_secs_f64() * 1e6 / count);
    side.busy.extend(hops.iter().map(|hop| hop.tx() + hop.rx()));
    Ok(())
}

/// Part of what `agent-ebpf/examples/hit.rs` prints.
#[derive(Deserialize)]
struct Hits {
    shm_poll: Poll,
}

#[derive(Deserialize)]
struct Poll {
    call_ns: f64,
    empty_hit_ns: f64,
    hit_ns: f64,
    ratio: f64,
}

fn poll() -> Result<Poll> {
    setup::debian(&[("/usr/bin/gcc", "gcc"), ("/usr/include/stdio.h", "libc6-dev")])?;
    let out = setup::output(setup::cargo().args([
        "run",
        "--quiet",
        "--package",
        "omnitap-ebpf",
        "--example",
        "hit",
        "--",
        "shm",
    ]))?;
    let hits: Hits = serde_json::from_str(&out).context("the example printed something else")?;
    Ok(hits.shm_poll)
}
