//! The agent's binary, run beside a pipeline.

use std::{
    fs::File,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::OnceLock,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::scrape::Scrape;

/// Longest wait until the agent is ready.
const READY: Duration = Duration::from_secs(30);
/// How soon the agent must have ended after SIGTERM.
pub const END: Duration = Duration::from_secs(5);

/// The agent's binary: `OMNITAP_TEST_BINARY`, else built as the tests are.
pub fn binary() -> Result<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    if let Some(path) = std::env::var_os(crate::BINARY) {
        return Ok(path.into());
    }
    BUILT
        .get_or_init(|| build().map_err(|error| format!("{error:#}")))
        .clone()
        .map_err(|error| anyhow!(error))
}

fn build() -> Result<PathBuf> {
    let release = !cfg!(debug_assertions);
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo
        .current_dir(crate::root())
        .args(["build", "--quiet", "--package", "omnitap"]);
    cargo.args(release.then_some("--release"));
    let status = cargo.status().context("cannot start cargo")?;
    ensure!(status.success(), "cargo build ended with {status}");
    let profile = if release { "release" } else { "debug" };
    Ok(crate::target_dir().join(profile).join("omnitap"))
}

/// A running agent. Dropped, it ends.
#[derive(Debug)]
pub struct Agent {
    child: Child,
    port: u16,
    dir: TempDir,
}

impl Agent {
    /// Starts `omnitap run` with these flags and waits until it is ready: tap up and first scan done.
    pub fn start(flags: &[&str]) -> Result<Self> {
        Self::start_as("run", flags)
    }

    /// Starts a subcommand that serves, `run` or `record FILE`, on a free port.
    pub fn start_as(subcommand: &str, flags: &[&str]) -> Result<Self> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        Self::start_on(port, subcommand, flags)
    }

    /// Starts a subcommand that serves, on this port.
    pub fn start_on(port: u16, subcommand: &str, flags: &[&str]) -> Result<Self> {
        Self::start_under(&[], &binary()?, port, subcommand, flags)
    }

    /// Starts a subcommand of this binary on this port, by way of a command that takes rights away and becomes what its
    /// further arguments say.
    pub fn start_under(
        wrapper: &[String],
        binary: &Path,
        port: u16,
        subcommand: &str,
        flags: &[&str],
    ) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        // A killed test run must leave no agent, and so no probe, behind.
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "TERM", "--"])
            .args(wrapper)
            .arg(binary)
            .arg(subcommand)
            .args(["--web.listen-address", &format!("127.0.0.1:{port}")])
            .env("OMNITAP_STAT_SOCKET_PATH", dir.path().join("stats.sock"))
            .args(flags)
            .stdout(Stdio::null())
            .stderr(File::create(dir.path().join("log"))?)
            .spawn()
            .context("cannot start the agent")?;
        let mut agent = Self { child, port, dir };
        let until = Instant::now() + READY;
        while !matches!(agent.get("/readyz"), Ok((200, _))) {
            if let Some(status) = agent.child.try_wait()? {
                bail!("the agent ended with {status}:\n{}", agent.log());
            }
            ensure!(Instant::now() < until, "the agent is not ready:\n{}", agent.log());
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(agent)
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Where it serves.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Where it takes stat events.
    #[must_use]
    pub fn stat_socket(&self) -> PathBuf {
        self.dir.path().join("stats.sock")
    }

    /// What it has logged.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// GET of a path: status and body.
    pub fn get(&self, path: &str) -> Result<(u16, String)> {
        let agent = ureq::Agent::new_with_config(
            ureq::Agent::config_builder()
                .http_status_as_error(false)
                .timeout_global(Some(Duration::from_secs(10)))
                .build(),
        );
        let mut response = agent
            .get(format!("http://127.0.0.1:{}{path}", self.port))
            .call()?;
        let body = response
            .body_mut()
            .with_config()
            .limit(64 << 20)
            .read_to_string()?;
        Ok((response.status().as_u16(), body))
    }

    /// `/metrics`.
    pub fn scrape(&self) -> Result<Scrape> {
        let (status, body) = self.get("/metrics")?;
        ensure!(status == 200, "/metrics answered {status}");
        Scrape::parse(&body)
    }

    /// Scrapes until `what` holds, for at most this long; returns the last scrape in any case.
    pub fn scrape_until(&self, within: Duration, mut what: impl FnMut(&Scrape) -> bool) -> Result<Scrape> {
        let until = Instant::now() + within;
        loop {
            let scrape = self.scrape()?;
            if what(&scrape) || Instant::now() > until {
                return Ok(scrape);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Ends it with SIGTERM; returns how it ended and how long that took.
    pub fn stop(mut self) -> Result<(ExitStatus, Duration)> {
        let start = Instant::now();
        crate::signal(self.child.id(), Signal::TERM)?;
        let status = crate::wait_for_end(&mut self.child, 2 * END)?;
        Ok((status, start.elapsed()))
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = crate::signal(self.child.id(), Signal::TERM);
            if crate::wait_for_end(&mut self.child, END).is_err() {
                let _ = self.child.kill();
                let _ = self.child.wait();
            }
        }
        if std::thread::panicking() {
            eprintln!("log of the agent:\n{}", self.log());
        }
    }
}
