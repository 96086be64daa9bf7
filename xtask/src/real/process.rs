//! Long-running children of a task: a server or the agent, started, waited for, ended with all it started.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

/// A child whose output goes to a file. It ends with its descendants when dropped, and at the task's own death.
pub(crate) struct Process {
    name: String,
    child: Child,
}

impl Process {
    /// Starts `command`, both outputs into `log`.
    pub(crate) fn start(name: &str, command: &Command, log: &Path) -> Result<Self> {
        let out = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
        // The kernel ends the child when this task dies, even by SIGKILL; setpriv is in Debian's util-linux.
        let mut guarded = Command::new("setpriv");
        guarded
            .args(["--pdeathsig", "TERM", "--"])
            .arg(command.get_program())
            .args(command.get_args());
        for (key, value) in command.get_envs() {
            match value {
                Some(value) => guarded.env(key, value),
                None => guarded.env_remove(key),
            };
        }
        let child = guarded
            .stdin(Stdio::null())
            .stderr(out.try_clone()?)
            .stdout(out)
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        Ok(Self {
            name: name.to_owned(),
            child,
        })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Calls `ready` every `every` until it is true. Fails when the child ends first or `limit` has passed.
    pub(crate) fn wait_until(
        &mut self,
        what: &str,
        limit: Duration,
        every: Duration,
        mut ready: impl FnMut() -> bool,
    ) -> Result<Duration> {
        let start = Instant::now();
        while !ready() {
            if let Some(status) = self.child.try_wait()? {
                bail!("{} ended with {status} before {what}", self.name);
            }
            if start.elapsed() > limit {
                bail!("{}: {what} took longer than {} s", self.name, limit.as_secs());
            }
            std::thread::sleep(every);
        }
        Ok(start.elapsed())
    }

    /// SIGTERM, then SIGKILL for what is left after `grace`; returns the status and the time that it took.
    pub(crate) fn stop(&mut self, grace: Duration) -> Result<(ExitStatus, Duration)> {
        let start = Instant::now();
        if let Some(status) = self.child.try_wait()? {
            return Ok((status, start.elapsed()));
        }
        let family = descendants(self.pid());
        signal(self.pid(), Signal::TERM);
        while self.child.try_wait()?.is_none() && start.elapsed() < grace {
            std::thread::sleep(Duration::from_millis(20));
        }
        let took = start.elapsed();
        let left = |family: &BTreeMap<u32, u64>| -> Vec<u32> {
            family
                .iter()
                .filter(|(pid, started)| runs(**pid, **started))
                .map(|(pid, _)| *pid)
                .collect()
        };
        for pid in left(&family) {
            signal(pid, Signal::KILL);
        }
        let status = self.child.wait()?;
        // A killed process frees its memory and ports a moment later.
        let killed = Instant::now();
        while !left(&family).is_empty() && killed.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok((status, took))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Err(error) = self.stop(Duration::from_secs(20)) {
            eprintln!("xtask: cannot end {}: {error:#}", self.name);
        }
    }
}

fn signal(pid: u32, signal: Signal) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    if let Some(pid) = pid {
        // A process that has just ended is what is wanted.
        let _ = kill_process(pid, signal);
    }
}

/// A process and all below it, with their start times (ticks since boot).
pub(crate) fn descendants(root: u32) -> BTreeMap<u32, u64> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        if let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse().ok())
            && let Some(parent) = stat(pid).and_then(|s| s.get(1)?.parse().ok())
        {
            children.entry(parent).or_default().push(pid);
        }
    }
    let mut found = BTreeMap::new();
    let mut open = vec![root];
    while let Some(pid) = open.pop() {
        if let Some(started) = start_time(pid) {
            found.insert(pid, started);
        }
        open.extend(children.remove(&pid).unwrap_or_default());
    }
    found
}

/// Whether this very process runs: another one may have got its number.
fn runs(pid: u32, started: u64) -> bool {
    start_time(pid) == Some(started) && stat(pid).is_some_and(|s| s.first().is_some_and(|state| state != "Z"))
}

fn start_time(pid: u32) -> Option<u64> {
    stat(pid)?.get(19)?.parse().ok()
}

/// CPU time of a process to the nanosecond: the sum of what the scheduler has for its threads.
pub(crate) fn run_time(pid: u32) -> Option<Duration> {
    let mut total = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten() {
        let text = fs::read_to_string(task.path().join("schedstat")).ok()?;
        total += text.split_whitespace().next()?.parse::<u64>().ok()?;
    }
    Some(Duration::from_nanos(total))
}

/// Resident memory of a process in bytes.
pub(crate) fn resident(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

/// The fields of `/proc/<pid>/stat` that follow the command's name: state, parent, ...
fn stat(pid: u32) -> Option<Vec<String>> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = text.rsplit_once(')')?;
    Some(rest.split_whitespace().map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stopped_process_takes_its_children_along() {
        let log = std::env::temp_dir().join(format!("xtask-process-{}", std::process::id()));
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 60 & sleep 60 & echo up; trap 'exit 7' TERM; wait"]);
        let mut process = Process::start("sh", &command, &log).unwrap();
        process
            .wait_until(
                "its line",
                Duration::from_secs(10),
                Duration::from_millis(10),
                || fs::read_to_string(&log).is_ok_and(|t| t.contains("up")),
            )
            .unwrap();
        let family = descendants(process.pid());
        assert_eq!(family.len(), 3, "{family:?}");
        let (status, _) = process.stop(Duration::from_secs(10)).unwrap();
        assert_eq!(status.code(), Some(7));
        for (pid, started) in family {
            assert!(!runs(pid, started), "{pid} still runs");
        }
        fs::remove_file(log).unwrap();
    }

    #[test]
    fn a_child_that_ends_early_is_an_error() {
        let mut process = Process::start("false", &Command::new("false"), Path::new("/dev/null")).unwrap();
        let error = process.wait_until(
            "it is up",
            Duration::from_secs(10),
            Duration::from_millis(5),
            || false,
        );
        assert!(
            error
                .unwrap_err()
                .to_string()
                .contains("ended with exit status: 1")
        );
    }
}
