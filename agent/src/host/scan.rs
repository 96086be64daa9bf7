//! Looks into /proc and keeps the table of pipelines up to date: full scans, and single looks when the kernel reports
//! a new program or an end.
//!
//! A scan lists /proc once and opens only what is new, young or due. A known process is told from its successor with
//! the same pid by the inode number of its directory, which procfs gives away afresh: so a process that was seen and
//! found uninteresting costs nothing but its part of the listing.

use std::{
    collections::{HashMap, HashSet},
    fs, io,
    io::Read,
    os::unix::fs::{DirEntryExt, MetadataExt},
    path::PathBuf,
    time::Duration,
};

use procfs::{FromRead, ProcError, process::Process as ProcProcess};

use super::{
    connectors::{Connectors, Watch},
    container,
    diffusion::Given,
    identity::{Change, Container, Flavor, Pipeline, Process, ProcessKey, Versions},
    pipelines::{Evidence, Sighting, TITLE_AGE, Table, age},
    versions,
};

/// Longest part of a command line that is read. Model and names come first.
const MAX_CMDLINE: u64 = 64 << 10;
/// Longest cgroup file that is read.
const MAX_CGROUP: u64 = 64 << 10;
/// Longest list of mappings that is read: a serving process has some thousand lines.
const MAX_MAPS: u64 = 16 << 20;

/// Threads looked at: a stage has some hundred.
const MAX_THREADS: usize = 4096;

/// Parent of all kernel threads.
const KTHREADD: u32 = 2;

/// Shortest pause between two looks at a process. The pause is about its age: what has not changed for long will
/// hardly change soon.
const SHORTEST_PAUSE: Duration = Duration::from_millis(100);
/// Longest pause while a title may still come.
const PENDING_PAUSE: Duration = Duration::from_secs(1);
/// Longest pause for a process with a role.
const MEMBER_PAUSE: Duration = Duration::from_secs(10);
/// Longest pause for all others: by then an old shell that became a server is found, also where no event of the
/// kernel told of it.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Why discovery cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The directory itself cannot be listed, or there is no `uptime` in it.
    #[error("cannot read procfs at {path}: {source}")]
    Proc {
        /// Where procfs was expected.
        path: PathBuf,
        /// What the kernel says.
        source: io::Error,
    },
}

/// How discovery works.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where procfs of the initial PID namespace is mounted.
    pub proc_root: PathBuf,
    /// Pause between scans while nothing is pending.
    pub scan_interval: Duration,
    /// Where diffusion stages stand, by their pipeline's command line.
    pub diffusion_stages: Vec<Given>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            proc_root: PathBuf::from("/proc"),
            scan_interval: Duration::from_secs(2),
            diffusion_stages: Vec::new(),
        }
    }
}

/// What runs on this host.
#[derive(Debug)]
pub struct Host {
    proc: Proc,
    table: Table,
    connectors: Watch,
    scan_interval: Duration,
    /// Time since boot of the last look round.
    now: Duration,
}

impl Host {
    /// Knows nothing until the first [`Self::scan`].
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        let Settings {
            proc_root,
            scan_interval,
            diffusion_stages,
        } = settings;
        Self {
            proc: Proc {
                root: proc_root,
                known: HashMap::new(),
                round: 0,
            },
            table: Table::new(diffusion_stages),
            connectors: Watch::default(),
            scan_interval,
            now: Duration::ZERO,
        }
    }

    /// Looks at every process that is new or due. Call it at start, then after each [`Self::next_look`].
    pub fn scan(&mut self) -> Result<Vec<Change>, HostError> {
        self.now = self.proc.uptime()?;
        self.proc.round = self.proc.round.wrapping_add(1);
        let error = |source| HostError::Proc {
            path: self.proc.root.clone(),
            source,
        };
        let entries: Vec<(u32, u64)> = fs::read_dir(&self.proc.root)
            .map_err(error)?
            .filter_map(|entry| {
                let entry = entry.ok()?;
                Some((entry.file_name().to_str()?.parse().ok()?, entry.ino()))
            })
            .collect();
        for (pid, inode) in entries {
            if self.proc.is_due(pid, inode, self.now) {
                self.look(pid, inode);
            }
        }
        let round = self.proc.round;
        let table = &mut self.table;
        self.proc.known.retain(|&pid, known| {
            let stays = known.round == round;
            if !stays {
                table.lose(pid);
            }
            stays
        });
        Ok(self.table.settle(self.now, &self.proc))
    }

    /// Looks at one process: the kernel reported that it was forked or runs a new program.
    pub fn examine(&mut self, pid: u32) -> Result<Vec<Change>, HostError> {
        self.now = self.proc.uptime()?;
        self.look(pid, self.proc.inode(pid));
        // Events may arrive before the first scan has seen the parents.
        let mut at = pid;
        while self.table.is_candidate(at)
            && let Some(parent) = self.proc.known.get(&at).map(|known| known.parent)
            && parent > 1
            && !self.table.is_candidate(parent)
        {
            self.look(parent, self.proc.inode(parent));
            at = parent;
        }
        Ok(self.table.settle(self.now, &self.proc))
    }

    /// A process ended: the kernel reported it.
    pub fn gone(&mut self, pid: u32) -> Vec<Change> {
        // The report comes while the process still dies. A scan at this moment must not take it for a new one; a
        // successor with the same pid is told by its inode.
        if let Some(known) = self.proc.known.get_mut(&pid) {
            known.due = self.now + self.scan_interval + PENDING_PAUSE;
        }
        if !self.table.is_candidate(pid) {
            return Vec::new();
        }
        self.table.lose(pid);
        self.table.settle(self.now, &self.proc)
    }

    /// How long to wait before the next [`Self::scan`]: the scan interval, or less while a title may still come.
    #[must_use]
    pub fn next_look(&self) -> Duration {
        let due = self
            .proc
            .known
            .iter()
            .filter(|(pid, _)| self.table.is_candidate(**pid))
            .map(|(_, known)| known.due);
        due.min().map_or(self.scan_interval, |due| {
            due.saturating_sub(self.now)
                .clamp(SHORTEST_PAUSE, self.scan_interval)
        })
    }

    /// Looks for connectors in the processes that may run one and are due; returns those of which there is news. Call it
    /// after a scan.
    pub fn look_for_connectors(&mut self) -> Vec<(ProcessKey, Connectors)> {
        let mut news = Vec::new();
        let alive: HashSet<ProcessKey> = self.table.processes().map(|process| process.key).collect();
        self.connectors.keep(|key| alive.contains(key));
        let is_omni = |process: &Process| {
            self.table
                .pipelines()
                .any(|pipeline| pipeline.id == process.pipeline && pipeline.flavor == Flavor::Omni)
        };
        for process in self.table.processes().filter(|p| p.role.has_connector()) {
            let key = process.key;
            if is_omni(process)
                && self.connectors.is_due(key, age(&key, self.now), self.now)
                && let Some(maps) = self.proc.maps(key)
                && self.connectors.seen(key, Connectors::mapped(&maps))
            {
                news.push((key, self.connectors.of(key)));
            }
        }
        news
    }

    /// The connectors that a process is known to have.
    #[must_use]
    pub fn connectors(&self, key: ProcessKey) -> Connectors {
        self.connectors.of(key)
    }

    /// Whether a process has a role. Forks of other processes need no [`Self::examine`].
    #[must_use]
    pub fn is_watched(&self, pid: u32) -> bool {
        self.table.is_member(pid)
    }

    /// The processes that have a role, in no order.
    pub fn processes(&self) -> impl Iterator<Item = &Process> {
        self.table.processes()
    }

    /// The pipelines, oldest first.
    pub fn pipelines(&self) -> impl Iterator<Item = &Pipeline> {
        self.table.pipelines()
    }

    fn look(&mut self, pid: u32, inode: u64) {
        let Some(seen) = self.proc.sight(pid) else {
            // Ended, or a zombie that waits for its parent.
            self.table.lose(pid);
            self.proc.remember(pid, inode, 0, self.now + LONGEST_PAUSE);
            return;
        };
        let parent = seen.parent;
        if parent == KTHREADD && seen.args.is_empty() {
            // A kernel thread stays one.
            self.proc.remember(pid, inode, parent, Duration::MAX);
            return;
        }
        let age = age(&seen.key, self.now);
        let longest = match (self.table.see(seen), self.table.is_member(pid)) {
            (true, false) if age < TITLE_AGE => PENDING_PAUSE,
            (_, true) => MEMBER_PAUSE,
            _ => LONGEST_PAUSE,
        };
        // Between half and all of the pause, so that the old processes of a host do not all fall into one scan.
        let pause = age.clamp(SHORTEST_PAUSE, longest) * (8 + pid % 8) / 16;
        self.proc.remember(pid, inode, parent, self.now + pause);
    }
}

/// One process of /proc, candidate or not.
#[derive(Debug)]
struct KnownPid {
    /// Inode of its directory.
    inode: u64,
    parent: u32,
    /// Time since boot from which it is to be looked at again.
    due: Duration,
    /// The last scan that listed it.
    round: u64,
}

/// Access to /proc.
#[derive(Debug)]
struct Proc {
    root: PathBuf,
    known: HashMap<u32, KnownPid>,
    round: u64,
}

impl Proc {
    fn uptime(&self) -> Result<Duration, HostError> {
        let path = self.root.join("uptime");
        let uptime = fs::File::open(&path)
            .map_err(ProcError::from)
            .and_then(procfs::Uptime::from_read);
        match uptime {
            Ok(uptime) => Ok(uptime.uptime_duration()),
            Err(error) => Err(HostError::Proc {
                path,
                source: io::Error::other(error.to_string()),
            }),
        }
    }

    /// The inode of a process's directory; 0, which no inode has: it is gone.
    fn inode(&self, pid: u32) -> u64 {
        fs::metadata(self.root.join(pid.to_string())).map_or(0, |directory| directory.ino())
    }

    /// Whether a listed process has to be looked at; takes note that it is there.
    fn is_due(&mut self, pid: u32, inode: u64, now: Duration) -> bool {
        match self.known.get_mut(&pid) {
            Some(known) if known.inode == inode => {
                known.round = self.round;
                known.due <= now
            }
            _ => true,
        }
    }

    /// Takes note of a look.
    fn remember(&mut self, pid: u32, inode: u64, parent: u32, due: Duration) {
        self.known.insert(
            pid,
            KnownPid {
                inode,
                parent,
                due,
                round: self.round,
            },
        );
    }

    fn process(&self, pid: u32) -> Option<ProcProcess> {
        ProcProcess::new_with_root(self.root.join(pid.to_string())).ok()
    }

    /// The start of a file of a process; `None`: it is gone, or the file is closed to us.
    fn read(process: &ProcProcess, name: &str, limit: u64) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        process
            .open_relative(name)
            .ok()?
            .take(limit)
            .read_to_end(&mut bytes)
            .ok()?;
        Some(bytes)
    }

    fn maps(&self, key: ProcessKey) -> Option<Vec<u8>> {
        let process = self.process(key.pid)?;
        // The open directory belongs to one process for good; this one must still be the one meant.
        (process.stat().ok()?.starttime == key.start_ticks).then_some(())?;
        Self::read(&process, "maps", MAX_MAPS)
    }
}

impl Evidence for Proc {
    fn parent(&self, pid: u32) -> Option<u32> {
        self.known
            .get(&pid)
            .map(|known| known.parent)
            .filter(|&parent| parent > 0)
    }

    fn sight(&self, pid: u32) -> Option<Sighting> {
        let process = self.process(pid)?;
        let stat = process.stat().ok()?;
        if matches!(stat.state, 'Z' | 'X') {
            return None;
        }
        let cmdline = Self::read(&process, "cmdline", MAX_CMDLINE)?;
        let args: Vec<String> = cmdline
            .split(|&b| b == 0)
            .filter(|arg| !arg.is_empty())
            .map(|arg| String::from_utf8_lossy(arg).into_owned())
            .collect();
        Some(Sighting {
            key: ProcessKey {
                pid,
                start_ticks: stat.starttime,
            },
            parent: u32::try_from(stat.ppid).ok()?,
            session: u32::try_from(stat.session).unwrap_or(0),
            comm: stat.comm,
            args,
        })
    }

    fn maps_zmq(&self, key: ProcessKey) -> bool {
        self.maps(key).is_some_and(|maps| versions::maps_zmq(&maps))
    }

    fn runs_zmq(&self, key: ProcessKey) -> bool {
        // libzmq names its threads `ZMQbg/Reaper` and `ZMQbg/IO/0`.
        let names = || -> Option<bool> {
            let process = self.process(key.pid)?;
            (process.stat().ok()?.starttime == key.start_ticks).then_some(())?;
            let threads = process.tasks().ok()?.take(MAX_THREADS).flatten();
            Some(
                threads
                    .filter_map(|thread| thread.stat().ok())
                    .any(|stat| stat.comm.starts_with("ZMQbg/")),
            )
        };
        names().unwrap_or(false)
    }

    fn container(&self, key: ProcessKey) -> Option<Container> {
        let text = Self::read(&self.process(key.pid)?, "cgroup", MAX_CGROUP)?;
        container::from_cgroup(&String::from_utf8_lossy(&text))
    }

    fn versions(&self, key: ProcessKey) -> Versions {
        let Some(maps) = self.maps(key) else {
            return Versions::default();
        };
        versions::find(&self.root, key.pid, &maps).unwrap_or_else(|error| {
            tracing::debug!(pid = key.pid, %error, "no package versions");
            Versions::default()
        })
    }
}
