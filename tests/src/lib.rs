//! Helpers of the end-to-end tests: the bundled pipeline, the agent beside it, and what the agent should say.

use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus},
    sync::OnceLock,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

pub mod agent;
pub mod hops;
pub mod pipeline;
pub mod probed;
pub mod scrape;
pub mod truth;

/// Python with the packages of the bundled pipeline.
pub const PYTHON: &str = "OMNITAP_TEST_PYTHON";
/// The agent's binary; built on demand where unset.
pub const BINARY: &str = "OMNITAP_TEST_BINARY";
/// A file that gets a line for each skipped test.
pub const SKIPPED: &str = "OMNITAP_TEST_SKIPPED";

/// Held by a test that runs processes: one at a time on this machine, so that timings mean something.
#[derive(Debug)]
pub struct Turn(#[expect(dead_code, reason = "held for its lock")] File);

/// The turn of a test that needs the tap, or `None` where it can't work here; then the test is skipped, loudly.
pub fn privileged() -> Result<Option<Turn>> {
    static MISSING: OnceLock<Option<String>> = OnceLock::new();
    let Some(turn) = unprivileged()? else {
        return Ok(None);
    };
    let missing =
        MISSING.get_or_init(|| missing_for_tap().unwrap_or_else(|error| Some(format!("{error:#}"))));
    match missing {
        None => Ok(Some(turn)),
        Some(reason) => {
            skip(reason)?;
            Ok(None)
        }
    }
}

/// The turn of a test that needs the bundled pipeline alone, or `None` (skipped) where Python is missing.
pub fn unprivileged() -> Result<Option<Turn>> {
    if python().is_none() {
        skip(&format!(
            "no Python with the pipeline's packages: run `cargo xtask test`, or set {PYTHON}"
        ))?;
        return Ok(None);
    }
    // One for each user: nobody else could open root's.
    let user = rustix::process::geteuid().as_raw();
    let path = std::env::temp_dir().join(format!("omnitap-tests-{user}.lock"));
    let file = File::options()
        .create(true)
        .append(true)
        .open(&path)
        .with_context(|| format!("cannot open {}", path.display()))?;
    file.lock()
        .with_context(|| format!("cannot lock {}", path.display()))?;
    Ok(Some(Turn(file)))
}

fn missing_for_tap() -> Result<Option<String>> {
    if !rustix::process::geteuid().is_root() {
        return Ok(Some("not root".to_owned()));
    }
    let output = Command::new(agent::binary()?)
        .arg("check")
        .output()
        .context("cannot run `omnitap check`")?;
    if output.status.success() {
        return Ok(None);
    }
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(Some(format!(
        "`omnitap check` says: {}",
        text.trim().replace('\n', "; ")
    )))
}

/// Says that the running test is skipped. Written past libtest's capture, so that it is seen.
pub fn skip(reason: &str) -> Result<()> {
    let thread = std::thread::current();
    let line = format!("SKIPPED {}: {reason}\n", thread.name().unwrap_or("test"));
    std::io::stderr().write_all(line.as_bytes())?;
    if let Some(path) = std::env::var_os(SKIPPED) {
        let mut file = File::options().create(true).append(true).open(path)?;
        file.write_all(line.as_bytes())?;
    }
    Ok(())
}

/// The repository's root.
#[must_use]
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap_or(Path::new("."))
        .to_path_buf()
}

/// The folder that cargo builds into.
#[must_use]
pub fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// Python with the pipeline's packages: [`PYTHON`], or the one that `cargo xtask` has made.
#[must_use]
pub fn python() -> Option<PathBuf> {
    std::env::var_os(PYTHON)
        .map(PathBuf::from)
        .or_else(|| Some(target_dir().join("venv/bin/python")))
        .filter(|path| path.exists())
}

/// Sends a signal to a process that the test has started.
pub(crate) fn signal(pid: u32, signal: rustix::process::Signal) -> Result<()> {
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
    ensure!(pid.is_some(), "no pid");
    if let Some(pid) = pid {
        rustix::process::kill_process(pid, signal)?;
    }
    Ok(())
}

/// Waits for the end of a child, for at most this long.
pub(crate) fn wait_for_end(child: &mut Child, within: Duration) -> Result<ExitStatus> {
    let until = Instant::now() + within;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        ensure!(
            Instant::now() < until,
            "process {} has not ended within {within:?}",
            child.id()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}
