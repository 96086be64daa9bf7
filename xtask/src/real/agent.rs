//! The agent under test: built, started beside a server, scraped, ended.

use std::{
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    time::Duration,
};

use anyhow::{Context, Result, ensure};

use super::{
    exposition::Exposition,
    free_port, load,
    process::{Process, descendants},
};
use crate::setup;

/// What the outcome statement allows from the agent's start to its probes in a pipeline that already runs.
const ATTACH: Duration = Duration::from_secs(5);
/// What SIGTERM may take.
const END: Duration = Duration::from_secs(5);

/// Builds the agent as users run it.
pub(crate) fn build() -> Result<PathBuf> {
    eprintln!("xtask: building the agent (release)");
    setup::run(setup::cargo().args(["build", "--quiet", "--release", "--package", "omnitap"]))?;
    Ok(setup::target_dir().join("release/omnitap"))
}

/// A running agent.
pub(crate) struct Agent {
    process: Process,
    port: u16,
}

impl Agent {
    /// Starts the agent and waits until it watches the server with this pid.
    pub(crate) fn start(program: &Path, server: u32, log: &Path) -> Result<Self> {
        ensure!(
            setup::is_root(),
            "the agent loads BPF programs: run this task as root"
        );
        let port = free_port()?;
        let mut command = Command::new(program);
        command.args(["run", "--web.listen-address", &format!("127.0.0.1:{port}")]);
        let process = Process::start("the agent", &command, log)?;
        let mut agent = Self { process, port };
        let url = format!("http://127.0.0.1:{port}");
        let every = Duration::from_millis(50);
        let ready = agent
            .process
            .wait_until("/readyz", ATTACH, every, || {
                load::get(&format!("{url}/readyz")).is_ok()
            })
            .with_context(|| format!("its output is in {}", log.display()))?;
        let metrics = agent.metrics();
        let attached = agent
            .process
            .wait_until("its probes in the server", ATTACH, every, || {
                load::get(&metrics)
                    .and_then(|page| Exposition::parse(&page))
                    .is_ok_and(|page| {
                        page.total("omnitap_probes_attached", &[])
                            .is_some_and(|n| n > 0.0)
                    })
            })
            .with_context(|| {
                format!(
                    "the server's processes are {:?}, the agent's output is in {}",
                    descendants(server).keys(),
                    log.display()
                )
            })?;
        println!(
            "  agent ready after {:.2} s, probes in the server after {:.2} s",
            ready.as_secs_f64(),
            (ready + attached).as_secs_f64()
        );
        Ok(agent)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }

    pub(crate) fn metrics(&self) -> String {
        format!("http://127.0.0.1:{}/metrics", self.port)
    }

    pub(crate) fn scrape(&self) -> Result<String> {
        load::get(&self.metrics())
    }

    /// Ends the agent; longer than it may take is an error.
    pub(crate) fn stop(&mut self) -> Result<(ExitStatus, Duration)> {
        let (status, took) = self.process.stop(END * 2)?;
        ensure!(took <= END, "the agent took {:.1} s to end", took.as_secs_f64());
        Ok((status, took))
    }
}

/// Starts a recording of what the tap sees.
pub(crate) fn record(program: &Path, file: &Path, log: &Path) -> Result<Process> {
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let mut command = Command::new(program);
    command.arg("record").arg(file);
    Process::start("the recorder", &command, log)
}

/// An error unless the agent says that it lost no event.
pub(crate) fn without_losses(page: &Exposition) -> Result<()> {
    let lost = page
        .total("omnitap_events_lost_total", &[])
        .context("the agent has no omnitap_events_lost_total")?;
    let received = page
        .total("omnitap_events_received_total", &[])
        .unwrap_or_default();
    println!("  events: {received} received, {lost} lost");
    ensure!(lost == 0.0, "the agent lost {lost} events");
    Ok(())
}
