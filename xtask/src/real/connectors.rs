//! Payloads through vLLM-Omni's own connectors, without a model: the agent must see each, and its size.

use std::{fs, path::Path, time::Duration};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::{
    START,
    agent::{self, Agent},
    at_rest,
    exposition::Exposition,
    kit::{Connector, Kit},
    process::Process,
};

/// What the script prints when all is done.
#[derive(Debug, Deserialize)]
struct Moved {
    hops: u32,
    sent: u64,
    received: u64,
}

/// What the transfers may take.
const RUN: Duration = Duration::from_mins(2);
const EVERY: Duration = Duration::from_millis(200);

/// Runs all connectors one after the other; whether the agent was right in each.
pub(super) fn check(kit: &Kit, agent: Option<&Path>, folder: &Path) -> Result<bool> {
    let mut right = true;
    for connector in Connector::ALL {
        right &= one(kit, connector, agent, folder)
            .with_context(|| format!("{:?}, whose output is in {}", connector, folder.display()))?;
    }
    Ok(right)
}

fn one(kit: &Kit, connector: Connector, program: Option<&Path>, folder: &Path) -> Result<bool> {
    let name = connector.arguments().concat();
    let log = folder.join(format!("{name}.log"));
    let start = folder.join("start");
    let _ = fs::remove_file(&start);
    let mut stages = Process::start("the stages", &kit.transfers(connector, &start)?, &log)?;
    let said = |event: &str| {
        let text = fs::read_to_string(&log).unwrap_or_default();
        let wanted = format!("{{\"event\": \"{event}\"");
        text.lines()
            .find(|line| line.starts_with(&wanted))
            .map(str::to_owned)
    };
    stages.wait_until("being ready", START, EVERY, || said("ready").is_some())?;
    let mut watcher = match program {
        Some(program) => Some(Agent::start(
            program,
            stages.pid(),
            &folder.join(format!("{name}-agent.log")),
            &[],
        )?),
        None => None,
    };
    if let Some(watcher) = &watcher {
        // What the stages have of connectors is known a moment later.
        at_rest(&watcher.metrics())?;
    }
    fs::write(&start, "").with_context(|| format!("cannot write {}", start.display()))?;
    stages.wait_until("the end of its transfers", RUN, EVERY, || said("ended").is_some())?;
    let moved: Moved = serde_json::from_str(&said("ended").unwrap_or_default())?;
    ensure!(
        moved.sent == moved.received && moved.sent > 0,
        "the connector itself lost something: {moved:?}"
    );
    let Some(watcher) = &mut watcher else {
        stages.stop(Duration::from_secs(30))?;
        println!("  {name}: {} hops of {} bytes", moved.hops, moved.sent);
        return Ok(true);
    };
    let page = at_rest(&watcher.metrics())?;
    fs::write(folder.join(format!("{name}-agent.txt")), &page)?;
    let page = Exposition::parse(&page)?;
    agent::without_losses(&page)?;
    watcher.stop()?;
    stages.stop(Duration::from_secs(30))?;
    Ok(compare(&name, connector, &moved, &page))
}

/// Sizes and counts must be equal, and the times there that this connector tells.
#[expect(clippy::cast_precision_loss, reason = "megabytes")]
fn compare(name: &str, connector: Connector, moved: &Moved, page: &Exposition) -> bool {
    let edge = [("from_stage", "0"), ("to_stage", "1"), ("model_name", "unknown")];
    let hops = f64::from(moved.hops);
    let size = "vllm_omni:transfer_size_bytes";
    let count = |family: &str| page.total(family, &edge).unwrap_or_default();
    let times = ["tx", "rx", "in_flight"].map(|part| format!("vllm_omni:transfer_{part}_s"));
    let told = match connector {
        Connector::Shm | Connector::MooncakeStore | Connector::Yuanrong => [hops; 3],
        Connector::Mooncake { .. } | Connector::Nixl => [0.0, hops, 0.0],
    };
    let bytes = page.sum(size, &edge).unwrap_or_default();
    let equal = (bytes - moved.sent as f64).abs() < 0.5
        && (count(size) - hops).abs() < 0.5
        && times
            .iter()
            .zip(told)
            .all(|(family, told)| (count(family) - told).abs() < 0.5);
    let [tx, rx, in_flight] = times.each_ref().map(|family| {
        page.sum(family, &edge)
            .filter(|_| count(family) > 0.0)
            .map_or_else(
                || "-".to_owned(),
                |sum| format!("{:.3} ms", sum / count(family) * 1e3),
            )
    });
    println!(
        "  {name}: {} hops of {} bytes, agent {} {} of {bytes}; means tx {tx}, rx {rx}, in flight {in_flight}",
        moved.hops,
        moved.sent,
        if equal { "equal" } else { "WRONG" },
        count(size),
    );
    equal
}
