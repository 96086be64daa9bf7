//! What the probes cost the real Audex server: CPU time and latency of a speech request.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use super::{
    Bound, Figure, hit,
    stats::{median, range, ratio_of_medians},
};
use crate::real::{
    Server,
    agent::{self, Agent},
    at_rest,
    exposition::Exposition,
    kit::{self, Kind, Kit},
    load,
    process::{descendants, run_time},
};

/// Requests in a row on one side before the other side has its turn.
const BLOCK: usize = 15;
/// Requests for the cost of the server's own statistics.
const OWN_REQUESTS: usize = 30;

/// Programs that run in the pipeline's processes.
const PROGRAMS: [&str; 5] = ["zmq_msg_send", "shm_open", "shm_unlink", "ftruncate", "flock"];

/// One side's samples.
#[derive(Default)]
struct Side {
    /// Seconds of each request.
    latency: Vec<f64>,
    /// CPU milliseconds a request, of each block.
    cpu: Vec<f64>,
}

/// `requests` a side, in blocks: without, with, with, without, and so on, so that a drift hits both alike.
pub(super) fn measure(program: &Path, folder: &Path, requests: usize) -> Result<Vec<Figure>> {
    let empty_hit = hit::empty_hit()?;
    let kit = Kit::install()?;
    let own_statistics = own_statistics(&kit, folder)?;
    let server = Server::start(&kit, Kind::Omni { log_stats: true }, &folder.join("server.log"))?;
    at_rest(&server.metrics())?;
    let mut without = Side::default();
    let mut with = Side::default();
    // Of the agent's programs in the pipeline's processes, over all blocks that it watched.
    let mut runs = [0.0; PROGRAMS.len()];
    let mut run_seconds = [0.0; PROGRAMS.len()];
    for block in 0..requests.div_ceil(BLOCK) * 2 {
        if block % 4 == 1 || block % 4 == 2 {
            let mut watcher = Agent::start(
                program,
                server.process.pid(),
                &folder.join("agent.log"),
                &["--tap.bpf-stats"],
            )?;
            let before = alone(&watcher)?;
            one_block(&server, &mut with)?;
            let page = Exposition::parse(&watcher.scrape()?)?;
            let added = page.since(&before);
            for (at, program) in PROGRAMS.into_iter().enumerate() {
                let of = |family| added.total(family, &[("program", program)]);
                runs[at] +=
                    of("omnitap_bpf_runs_total").context("the agent has no omnitap_bpf_runs_total")?;
                run_seconds[at] += of("omnitap_bpf_run_seconds_total").unwrap_or_default();
            }
            agent::without_losses(&page)?;
            watcher.stop()?;
        } else {
            one_block(&server, &mut without)?;
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "some hundred requests")]
    let count = with.latency.len() as f64;
    let parts: Vec<(f64, f64)> = runs
        .iter()
        .zip(run_seconds)
        .map(|(runs, seconds)| (runs / count, seconds / count * 1e3))
        .collect();
    let cost = |(hits, in_bpf): &(f64, f64)| hits * empty_hit / 1e6 + in_bpf;
    let probes: f64 = parts.iter().map(cost).sum();
    let each: Vec<String> = PROGRAMS
        .iter()
        .zip(&parts)
        .map(|(program, part)| format!("{program} {:.0} hits {:.3} ms", part.0, cost(part)))
        .collect();
    let most = own_statistics / 5.0;
    let (low, high) = ratio_of_medians(&with.latency, &without.latency);
    let (least, greatest) = range(&without.cpu);
    Ok(vec![
        Figure::new(
            "real: CPU of the probes for a speech request, by hits",
            probes,
            "ms",
            Some(Bound::AtMost(most)),
            format!(
                "{}; a hit is {empty_hit:.0} ns and its time in BPF; the server's own statistics {own_statistics:.1} ms",
                each.join(", ")
            ),
        ),
        Figure::new(
            "real: CPU of a speech request, with the agent less without",
            median(&with.cpu) - median(&without.cpu),
            "ms",
            Some(Bound::AtMost(most)),
            format!(
                "medians of {} blocks a side of {BLOCK} requests: {:.2} and {:.2} ms; blocks without range from \
                 {least:.2} to {greatest:.2} ms",
                with.cpu.len(),
                median(&with.cpu),
                median(&without.cpu),
            ),
        ),
        Figure::new(
            "real: latency with the agent to without, medians",
            median(&with.latency) / median(&without.latency),
            "x",
            Some(Bound::AtMost(1.01)),
            format!(
                "{} and {} requests, 95 % interval {low:.4} to {high:.4}, medians {:.1} and {:.1} ms",
                with.latency.len(),
                without.latency.len(),
                median(&with.latency) * 1e3,
                median(&without.latency) * 1e3
            ),
        ),
    ])
}

/// CPU milliseconds that vLLM-Omni's own statistics take for one speech request, on this machine: what the probes
/// are to be compared with. Needs a server of its own, since the clock reads cost, too.
fn own_statistics(kit: &Kit, folder: &Path) -> Result<f64> {
    let spent = folder.join("own_stats");
    std::fs::create_dir_all(&spent)?;
    let kind = Kind::Omni { log_stats: true };
    let server = Server::start_with(kit, kind, &folder.join("own_stats.log"), |command| {
        let mut path = kit::files().join("own_stats").into_os_string();
        path.push(":");
        path.push(kit::files().join("plugin"));
        command.env("PYTHONPATH", path).env("OWN_STATS", &spent);
    })?;
    at_rest(&server.metrics())?;
    // Each process writes its figure twice a second.
    let total = || -> Result<f64> {
        std::thread::sleep(Duration::from_secs(2));
        let mut total = 0.0;
        for entry in std::fs::read_dir(&spent)? {
            let path = entry?.path();
            if path.extension().is_none() {
                let nanos: f64 = std::fs::read_to_string(&path)?.parse()?;
                total += nanos / 1e6;
            }
        }
        Ok(total)
    };
    let before = total()?;
    load::at_once(server.port, &load::same_speech(OWN_REQUESTS), 1)?;
    #[expect(clippy::cast_precision_loss, reason = "some ten requests")]
    let each = (total()? - before) / OWN_REQUESTS as f64;
    ensure!(
        each > 0.0,
        "the server's own statistics took no time: are they on?"
    );
    Ok(each)
}

/// The agent's page once it shows the pipeline, which must be the only one: hits of another would count too.
fn alone(watcher: &Agent) -> Result<Exposition> {
    let start = Instant::now();
    loop {
        let page = Exposition::parse(&watcher.scrape()?)?;
        let pipelines = page.total("omnitap_pipelines", &[]).unwrap_or_default();
        ensure!(
            pipelines <= 1.0,
            "{pipelines} pipelines run on this host instead of one"
        );
        if pipelines > 0.0 {
            return Ok(page);
        }
        ensure!(
            start.elapsed() < Duration::from_secs(10),
            "the agent shows no pipeline"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[expect(clippy::cast_precision_loss, reason = "a block has some ten requests")]
fn one_block(server: &Server, side: &mut Side) -> Result<()> {
    // One that does not count: the first after a change finds caches cold.
    load::at_once(server.port, &load::same_speech(1), 1)?;
    let before = cpu(server);
    let outcomes = load::at_once(server.port, &load::same_speech(BLOCK), 1)?;
    let spent = cpu(server).saturating_sub(before);
    side.cpu.push(spent.as_secs_f64() * 1e3 / BLOCK as f64);
    side.latency.extend(outcomes.iter().map(|o| o.seconds));
    Ok(())
}

fn cpu(server: &Server) -> Duration {
    descendants(server.process.pid())
        .keys()
        .filter_map(|&pid| run_time(pid))
        .sum()
}
