//! Opens NVML when it is needed, looks at all GPUs in an interval, and closes it again.

use std::{
    collections::{BTreeSet, HashMap},
    fs, io,
    io::Read as _,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::SyncSender,
    },
    thread::Thread,
    time::{Duration, Instant},
};

use nvml_wrapper::Nvml;
use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};
use tracing::{info, warn};

use super::{
    library,
    read::{self, Look, Resting},
    sample::{Call, Fault, GpuSample, Owner, State},
};

/// Pause between two looks whether a watched process uses a GPU, while NVML is closed, and while it is open.
const NEED_PAUSE: Duration = Duration::from_secs(5);
const UNNEEDED_PAUSE: Duration = Duration::from_secs(10);

/// Pause before another look for a library that is nowhere.
const LIBRARY_PAUSE: Duration = Duration::from_mins(1);

/// Pauses before NVML is opened again after a failure, from the first to the longest.
const FIRST_PAUSE: Duration = Duration::from_secs(2);
const LONGEST_PAUSE: Duration = Duration::from_mins(1);

/// A lost GPU is looked for by opening NVML anew, this often: the other GPUs go without a sample meanwhile.
const LOST_PAUSE: Duration = Duration::from_mins(1);

/// A look is followed by a pause of this many times the CPU time that it took: 0.3 % of a core.
const PAUSE_FACTOR: u32 = 333;

/// Longest chain of parents followed.
const MAX_DEPTH: usize = 32;

/// How GPUs are looked at.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Pause between two looks.
    pub interval: Duration,
    /// Files that may be the library; none: where hosts have it.
    pub libraries: Vec<PathBuf>,
    /// Where procfs of the initial PID namespace is mounted.
    pub proc_root: PathBuf,
}

/// The watched processes, kept by the host thread and read by the sampler; clones share them.
#[derive(Clone, Debug, Default)]
pub struct Members {
    shared: Arc<Mutex<Set>>,
}

#[derive(Debug, Default)]
struct Set {
    pids: BTreeSet<u32>,
    /// Counts the changes.
    version: u64,
}

impl Members {
    /// A process is watched.
    pub fn insert(&self, pid: u32) {
        let mut set = self.shared.lock();
        if set.pids.insert(pid) {
            set.version += 1;
        }
    }

    /// A process has ended.
    pub fn remove(&self, pid: u32) {
        let mut set = self.shared.lock();
        if set.pids.remove(&pid) {
            set.version += 1;
        }
    }
}

/// Looks at the GPUs, step by step.
#[derive(Debug)]
pub struct Sampler {
    settings: Settings,
    members: Members,
    nvml: Option<Nvml>,
    driver: Option<String>,
    state: State,
    /// Nothing is tried before this time.
    due: Duration,
    /// The next look whether NVML is still needed, and the next opening for a GPU that is lost.
    need_due: Duration,
    lost_due: Duration,
    /// Pause after the next failure, and the state that the last one was told as.
    pause: Duration,
    told: State,
    resting: Resting,
    owners: Owners,
    /// The pause that samples tell of.
    cadence: Duration,
}

impl Sampler {
    /// NVML is closed at first.
    #[must_use]
    pub fn new(settings: Settings, members: Members) -> Self {
        Self {
            cadence: settings.interval,
            settings,
            members,
            nvml: None,
            driver: None,
            state: State::Unused,
            due: Duration::ZERO,
            need_due: Duration::ZERO,
            lost_due: Duration::ZERO,
            pause: FIRST_PAUSE,
            told: State::Ok,
            resting: HashMap::new(),
            owners: Owners::default(),
        }
    }

    /// Does what is due at `now`, on a clock that never goes back, and gives what there is to tell to `emit`.
    pub fn step(&mut self, now: Duration, emit: &mut dyn FnMut(GpuSample)) {
        if now < self.due {
            return;
        }
        // Most hosts have no such library: they are asked nothing else.
        if self.nvml.is_none() && library::candidates(&self.settings.libraries).is_empty() {
            self.due = now + LIBRARY_PAUSE;
            self.turn(State::NoLibrary, Vec::new(), emit);
            return;
        }
        if self.nvml.is_none() || now >= self.need_due {
            self.need_due = now + UNNEEDED_PAUSE;
            if !self.is_needed() {
                self.due = now + NEED_PAUSE;
                self.close();
                self.turn(State::Unused, Vec::new(), emit);
                return;
            }
        }
        if self.nvml.is_none() && !self.open(now, emit) {
            return;
        }
        self.look(now, emit);
    }

    fn is_needed(&self) -> bool {
        let pids: Vec<u32> = self.members.shared.lock().pids.iter().copied().collect();
        pids.into_iter()
            .any(|pid| has_gpu_open(&self.settings.proc_root, pid))
    }

    fn open(&mut self, now: Duration, emit: &mut dyn FnMut(GpuSample)) -> bool {
        let mut fault = Fault::NoLibrary;
        for library in library::candidates(&self.settings.libraries) {
            // Told before: the call may hang.
            self.turn(State::Opening, Vec::new(), emit);
            match read::open(&library) {
                Ok(nvml) => {
                    self.driver = nvml.sys_driver_version().ok();
                    info!(library = %library.display(), driver = self.driver, "NVML is open");
                    self.nvml = Some(nvml);
                    self.resting.clear();
                    self.lost_due = now + LOST_PAUSE;
                    return true;
                }
                // One of another architecture, say: the next may do.
                Err(Fault::NoLibrary) => {}
                Err(other) => fault = other,
            }
        }
        self.fail(now, vec![(Call::Init, fault)], read::state(fault), emit);
        false
    }

    fn look(&mut self, now: Duration, emit: &mut dyn FnMut(GpuSample)) {
        let Some(nvml) = &self.nvml else { return };
        self.owners.begin(&self.members);
        let mut look = Look {
            nvml,
            now,
            resting: &mut self.resting,
            faults: Vec::new(),
        };
        let (owners, proc_root) = (&mut self.owners, self.settings.proc_root.as_path());
        let found = look.devices(&mut |pid| owners.of(pid, proc_root));
        let (broken, lost) = (look.broken(), look.lost());
        let faults = look.faults;
        self.owners.end();
        match (found, broken) {
            (Err(fault), _) | (_, Some(fault)) => self.fail(now, faults, read::state(fault), emit),
            (Ok(devices), None) => {
                self.pause = FIRST_PAUSE;
                self.told = State::Ok;
                self.due = now;
                self.state = if devices.is_empty() && faults.is_empty() {
                    State::NoGpu
                } else {
                    State::Ok
                };
                emit(GpuSample {
                    state: self.state,
                    pause_ms: self.pause_ms(),
                    driver: self.driver.clone(),
                    devices,
                    faults,
                    lost: 0,
                });
                if self.state == State::NoGpu {
                    self.close();
                    self.due = now + LONGEST_PAUSE;
                } else if lost && now >= self.lost_due {
                    self.close();
                    self.due = now;
                }
            }
        }
    }

    fn fail(
        &mut self,
        now: Duration,
        faults: Vec<(Call, Fault)>,
        state: State,
        emit: &mut dyn FnMut(GpuSample),
    ) {
        self.close();
        self.due = now + self.pause;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        if std::mem::replace(&mut self.told, state) != state {
            warn!(
                state = state.as_str(),
                "GPUs can't be looked at; tried again later"
            );
        }
        self.turn(state, faults, emit);
    }

    fn close(&mut self) {
        // Dropping shuts NVML down and unloads the library.
        if self.nvml.take().is_some() {
            info!("NVML is closed");
        }
        self.driver = None;
    }

    /// Tells a state that has no devices, if it is news.
    fn turn(&mut self, state: State, faults: Vec<(Call, Fault)>, emit: &mut dyn FnMut(GpuSample)) {
        if self.state == state && faults.is_empty() {
            return;
        }
        self.state = state;
        emit(GpuSample {
            state,
            pause_ms: self.pause_ms(),
            faults,
            ..GpuSample::default()
        });
    }

    fn pause_ms(&self) -> u64 {
        u64::try_from(self.cadence.as_millis()).unwrap_or(u64::MAX)
    }
}

/// Whether a process has a device file of a GPU open: NVIDIA's, or the one that stands for it under Windows.
fn has_gpu_open(proc_root: &Path, pid: u32) -> bool {
    let Ok(files) = fs::read_dir(proc_root.join(pid.to_string()).join("fd")) else {
        return false;
    };
    files
        .filter_map(|file| fs::read_link(file.ok()?.path()).ok())
        .any(|target| {
            let target = target.as_os_str().as_encoded_bytes();
            target.starts_with(b"/dev/nvidia") || target == b"/dev/dxg"
        })
}

/// Whose the processes on GPUs are. An answer is kept while the process stays on a GPU and no process comes or goes.
#[derive(Debug, Default)]
struct Owners {
    members: BTreeSet<u32>,
    version: u64,
    known: HashMap<u32, Owner>,
    asked: HashMap<u32, Owner>,
}

impl Owners {
    fn begin(&mut self, members: &Members) {
        let set = members.shared.lock();
        if set.version != self.version {
            self.version = set.version;
            self.members.clone_from(&set.pids);
            self.known.clear();
        }
    }

    fn of(&mut self, pid: u32, proc_root: &Path) -> Owner {
        let owner = self
            .known
            .get(&pid)
            .copied()
            .unwrap_or_else(|| self.look_up(pid, proc_root));
        self.asked.insert(pid, owner);
        owner
    }

    fn end(&mut self) {
        self.known = std::mem::take(&mut self.asked);
    }

    fn look_up(&self, pid: u32, proc_root: &Path) -> Owner {
        let mut at = pid;
        for depth in 0..MAX_DEPTH {
            if self.members.contains(&at) {
                return Owner::Watched(at);
            }
            match parent(proc_root, at) {
                Some(above) if above > 1 => at = above,
                None if depth == 0 => return Owner::Unseen,
                Some(_) | None => return Owner::Foreign,
            }
        }
        Owner::Foreign
    }
}

/// Field 4 of `/proc/<pid>/stat`. The name before it may hold anything.
fn parent(proc_root: &Path, pid: u32) -> Option<u32> {
    let mut text = Vec::new();
    let file = fs::File::open(proc_root.join(pid.to_string()).join("stat")).ok()?;
    file.take(4096).read_to_end(&mut text).ok()?;
    let after = text.iter().rposition(|byte| *byte == b')')?;
    let rest = str::from_utf8(text.get(after + 1..)?).ok()?;
    rest.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// The sampler's thread. It is never waited for: a call that hangs in the driver would hold up whoever waits.
#[derive(Debug)]
pub struct SamplerThread {
    thread: Thread,
    stop: Arc<AtomicBool>,
}

impl SamplerThread {
    /// Starts it. Samples that `out` has no room for are dropped and counted.
    pub fn start(settings: Settings, members: Members, out: SyncSender<GpuSample>) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let interval = settings.interval;
        let mut sampler = Sampler::new(settings, members);
        let body = move || {
            let start = Instant::now();
            let mut lost = 0;
            while !stopped.load(Ordering::Acquire) {
                let (began, was_open) = (cpu_time(), sampler.nvml.is_some());
                sampler.step(start.elapsed(), &mut |mut sample| {
                    sample.lost = lost;
                    lost = if out.try_send(sample).is_ok() { 0 } else { lost + 1 };
                });
                let spent = cpu_time().saturating_sub(began);
                // To open it takes much longer than a look, once.
                if was_open {
                    sampler.cadence = interval.max(spent * PAUSE_FACTOR).min(LONGEST_PAUSE);
                }
                let closed_pause = sampler.due.saturating_sub(start.elapsed());
                std::thread::park_timeout(closed_pause.max(sampler.cadence));
            }
        };
        let handle = std::thread::Builder::new()
            .name("omnitap-gpu".to_owned())
            .spawn(body)?;
        Ok(Self {
            thread: handle.thread().clone(),
            stop,
        })
    }
}

impl Drop for SamplerThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.thread.unpark();
    }
}

/// CPU time of this thread.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use rstest::rstest;

    use super::*;

    /// A /proc with one process, 7, that has these files open.
    fn proc_with(files: &[&str]) -> tempfile::TempDir {
        let proc = tempfile::tempdir().unwrap();
        let fds = proc.path().join("7/fd");
        fs::create_dir_all(&fds).unwrap();
        for (at, file) in files.iter().enumerate() {
            symlink(file, fds.join(at.to_string())).unwrap();
        }
        proc
    }

    #[rstest]
    #[case::nothing(&[], false)]
    #[case::no_gpu(&["/dev/null", "socket:[77]", "/tmp/dev/nvidia0"], false)]
    #[case::gpu(&["/dev/null", "/dev/nvidia3"], true)]
    #[case::control_alone(&["/dev/nvidiactl"], true)]
    #[case::under_windows(&["/dev/dxg"], true)]
    fn a_gpu_is_known_by_its_open_file(#[case] files: &[&str], #[case] open: bool) {
        assert_eq!(has_gpu_open(proc_with(files).path(), 7), open);
    }

    #[rstest]
    #[case::plain(b"7 (python3) S 42 7 7 0 -1", Some(42))]
    #[case::odd_name(b"7 (a) b) (c) R 43 7", Some(43))]
    #[case::no_utf8_name(b"7 (\xff\xfe) S 44 7", Some(44))]
    #[case::cut(b"7 (python3) S", None)]
    #[case::empty(b"", None)]
    #[case::no_number(b"7 (x) S y 7", None)]
    fn parents_are_read(#[case] stat: &[u8], #[case] expected: Option<u32>) {
        let proc = proc_with(&[]);
        fs::write(proc.path().join("7/stat"), stat).unwrap();
        assert_eq!(parent(proc.path(), 7), expected);
    }
}
