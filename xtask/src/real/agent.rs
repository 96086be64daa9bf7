//! The agent under test: built, started beside a server, scraped, ended.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    time::{Duration, Instant},
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
    /// Starts the agent and waits until it has probed the server with this pid and all its engines.
    pub(crate) fn start(program: &Path, server: u32, log: &Path, flags: &[&str]) -> Result<Self> {
        ensure!(
            setup::is_root(),
            "the agent loads BPF programs: run this task as root"
        );
        let (mut agent, ready) = Self::ready(program, log, flags)?;
        let every = Duration::from_millis(50);
        let wanted: Vec<u32> = descendants(server)
            .into_keys()
            .filter(|&pid| pid == server || is_engine(pid))
            .collect();
        let has_all = || {
            let text = fs::read_to_string(log).unwrap_or_default();
            let has = |pid: &u32| {
                text.lines()
                    .filter(|line| line.contains("zmq_msg_send"))
                    .any(|line| line.contains(&format!("probe on pid={pid} ")))
            };
            wanted.iter().all(has)
        };
        let attached = agent
            .process
            .wait_until("its probes in the server", ATTACH, every, has_all)
            .with_context(|| format!("wanted in {wanted:?}; the agent's output is in {}", log.display()))?;
        println!(
            "  agent ready after {:.2} s, probes in {} processes after {:.2} s",
            ready.as_secs_f64(),
            wanted.len(),
            (ready + attached).as_secs_f64()
        );
        Ok(agent)
    }

    /// Starts the agent with flags that keep it from probing, and waits until it is ready.
    pub(crate) fn start_unprobed(program: &Path, log: &Path, flags: &[&str]) -> Result<Self> {
        Ok(Self::ready(program, log, flags)?.0)
    }

    fn ready(program: &Path, log: &Path, flags: &[&str]) -> Result<(Self, Duration)> {
        let port = free_port()?;
        let mut command = Command::new(program);
        command
            .args(["run", "--web.listen-address", &format!("127.0.0.1:{port}")])
            .env("OMNITAP_STAT_SOCKET_PATH", "off")
            .args(flags);
        let mut process = Process::start("the agent", &command, log)?;
        let every = Duration::from_millis(50);
        let url = format!("http://127.0.0.1:{port}/readyz");
        let ready = process
            .wait_until("/readyz", ATTACH, every, || load::get(&url).is_ok())
            .with_context(|| format!("its output is in {}", log.display()))?;
        Ok((Self { process, port }, ready))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Waits until the forwarder in a server has found the agent, which it looks for once a second.
    pub(crate) fn wait_for_forwarder(&self) -> Result<()> {
        let start = Instant::now();
        loop {
            let page = Exposition::parse(&self.scrape()?)?;
            if page.total("omnitap_stat_connections", &[]).unwrap_or_default() > 0.0 {
                return Ok(());
            }
            ensure!(
                start.elapsed() < Duration::from_secs(20),
                "no forwarder has connected"
            );
            std::thread::sleep(Duration::from_millis(100));
        }
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

/// An error unless every stat event that came was taken, and none was dropped by its sender.
pub(crate) fn all_told(page: &Exposition) -> Result<()> {
    let events = |labels: &[(&str, &str)]| {
        page.total("omnitap_stat_events_total", labels)
            .unwrap_or_default()
    };
    let (all, taken) = (events(&[]), events(&[("result", "accepted")]));
    let lost = page
        .total("omnitap_stat_events_lost_total", &[])
        .unwrap_or_default();
    println!("  stat events: {all} read, {taken} taken, {lost} dropped by the sender");
    ensure!(
        all > 0.0 && (all - taken).abs() < 0.5 && lost == 0.0,
        "stat events are missing"
    );
    Ok(())
}

/// The core of a stage or of plain vLLM, or a diffusion stage with one device, by its title.
fn is_engine(pid: u32) -> bool {
    fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|title| {
        let title = String::from_utf8_lossy(&title);
        title.contains("EngineCore") || title.trim_end_matches('\0').ends_with("::DiffusionWorker")
    })
}

/// Starts a recording of what the tap sees, and waits until it has as many probes as the agent beside it.
pub(crate) fn record(program: &Path, file: &Path, log: &Path, beside: &Path) -> Result<Process> {
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder)?;
    }
    let mut command = Command::new(program);
    // The fixture is of what the tap sees.
    command
        .arg("record")
        .arg(file)
        .env("OMNITAP_ENGINE_METRICS", "off");
    let mut recorder = Process::start("the recorder", &command, log)?;
    let probes = |log: &Path| {
        let text = fs::read_to_string(log).unwrap_or_default();
        text.matches(" probe on ").count()
    };
    recorder.wait_until("its probes", ATTACH * 4, Duration::from_millis(50), || {
        probes(log) >= probes(beside)
    })?;
    Ok(recorder)
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
