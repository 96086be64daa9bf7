//! The only room with `unsafe` and aya: loads the BPF object, attaches and detaches probes, reads the ring
//! buffer, counts losses.
//!
//! [`Tap::load`] gives the [`Tap`], which any thread may use, and the [`Reader`], which one thread drains.
//! Everything stops when both are dropped; [`Tap::detach_all`] does it in a bounded time.

mod dedup;
mod detach;
pub mod maps;
mod multi;
mod reader;
mod ring;
pub mod selftest;
mod shm;
pub mod site;
pub mod symbol;
pub mod target;

use std::{
    collections::{HashMap, HashSet, hash_map::Entry},
    fmt, io,
    num::NonZeroU32,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use aya::{
    Ebpf, EbpfError, EbpfLoader,
    maps::{Array, HashMap as KernelMap, MapData, MapError, PerCpuArray, RingBuf},
    programs::{
        ProgramError, RawTracePoint, UProbe,
        uprobe::{UProbeAttachLocation, UProbeLink, UProbeScope},
    },
};
use omnitap_ebpf::{CAPTURE_LIMIT_MAX, Config, Counter, global, map, program, watch};
use parking_lot::Mutex;
use thiserror::Error;

use self::{
    detach::{Detacher, Link, nanos},
    reader::Counts,
    site::Arch,
    symbol::SymbolError,
    target::{Finder, Place, Target},
};
pub use self::{
    reader::{Event, Reader, ReaderStats},
    site::SiteKind,
    target::ProbeSet,
};
use crate::host::identity::ProcessKey;

#[cfg(target_arch = "x86_64")]
static OBJECT: &[u8] = aya::include_bytes_aligned!("../../../agent-ebpf/prebuilt/omnitap-x86_64.bpf.o");
#[cfg(target_arch = "aarch64")]
static OBJECT: &[u8] = aya::include_bytes_aligned!("../../../agent-ebpf/prebuilt/omnitap-aarch64.bpf.o");
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("the BPF programs read the arguments of a function on x86_64 and aarch64 only");

/// Smallest and largest ring buffer: a record of the largest size class must fit twice, and the kernel maps
/// it twice.
const RING_BYTES: std::ops::RangeInclusive<u32> = 256 << 10..=1 << 30;

/// How the tap is set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Most bytes of a frame that are captured, up to 64 KiB; of a longer frame head and tail.
    pub capture_limit: u32,
    /// Size of the ring buffer in bytes, taken up to the next power of two. It is locked memory, and holds
    /// what is sent while the reader is busy.
    pub ring_bytes: u32,
    /// Unread bytes at which the kernel wakes the reader before its timeout; 0: as soon as there is a record,
    /// which costs the sender about a microsecond each time.
    pub wakeup_bytes: u32,
    /// Whether the kernel measures the run time of BPF programs while the tap is loaded. It does so for all
    /// programs of the host and costs some 20 to 30 ns a run.
    pub bpf_stats: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            capture_limit: CAPTURE_LIMIT_MAX,
            ring_bytes: 4 << 20,
            wakeup_bytes: 1 << 20,
            bpf_stats: false,
        }
    }
}

/// Why the tap can't be loaded.
#[derive(Debug, Error)]
pub enum TapError {
    /// A setting is out of range.
    #[error(
        "ring buffer of {0} bytes: must be from {min} to {max}",
        min = RING_BYTES.start(),
        max = RING_BYTES.end()
    )]
    RingBytes(u32),
    /// The object could not be read, or a map not be made.
    #[error("cannot load the BPF object: {0}")]
    Object(#[from] EbpfError),
    /// The object lacks a map or program of the agent's layout.
    #[error("the BPF object has no `{0}`")]
    Incomplete(&'static str),
    /// A map could not be used.
    #[error("BPF map `{name}`: {source}")]
    Map {
        /// The map.
        name: &'static str,
        /// What the kernel said.
        source: MapError,
    },
    /// The kernel refused a program.
    #[error("cannot load BPF program `{name}`: {source}")]
    Program {
        /// The program.
        name: &'static str,
        /// What the kernel said, with the verifier's words.
        source: ProgramError,
    },
    /// The ring buffer's positions could not be mapped.
    #[error("cannot map the ring buffer: {0}")]
    Ring(#[source] io::Error),
}

/// Why a process could not be probed.
#[derive(Debug, Error)]
pub enum AttachError {
    /// The process ended, or its pid belongs to another one now.
    #[error("the process has ended")]
    Gone,
    /// It is probed already.
    #[error("the process is probed already")]
    Already,
    /// Its maps can't be read.
    #[error("cannot read /proc/<pid>/maps: {0}")]
    Maps(#[source] io::Error),
    /// None of its mapped files defines a function that is to be probed. A process that just started may load
    /// it later: try again.
    #[error("no mapped file defines what is to be probed for {}", .0.name())]
    NoFunction(ProbeSet),
    /// A mapped file could not be read.
    #[error("mapped file: {0}")]
    File(#[from] SymbolError),
    /// The process could not be entered in the table of watched ones.
    #[error("cannot enter the process in the table of watched ones: {0}")]
    Watch(#[source] MapError),
    /// The kernel refused the probe.
    #[error("the kernel refused the probe in `{path}` at {offset:#x}: {source}")]
    Refused {
        /// Path as the kernel prints it.
        path: String,
        /// Offset in the file.
        offset: u64,
        /// What it said.
        source: ProgramError,
    },
}

/// [`AttachError`] as a closed set of label values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FailureReason {
    /// The process ended.
    Gone,
    /// It is probed already.
    Already,
    /// Its maps can't be read.
    Maps,
    /// No file with the function.
    NoFunction,
    /// The function has no place for its probe.
    NoSite,
    /// A file could not be read.
    File,
    /// The table of watched processes could not be written.
    Watch,
    /// A capability is missing.
    Denied,
    /// Another refusal by the kernel.
    Refused,
}

impl FailureReason {
    /// All, in the order of their index.
    pub const ALL: [Self; 9] = [
        Self::Gone,
        Self::Already,
        Self::Maps,
        Self::NoFunction,
        Self::NoSite,
        Self::File,
        Self::Watch,
        Self::Denied,
        Self::Refused,
    ];

    /// Label value.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gone => "gone",
            Self::Already => "already",
            Self::Maps => "maps",
            Self::NoFunction => "no_function",
            Self::NoSite => "no_site",
            Self::File => "file",
            Self::Watch => "watch",
            Self::Denied => "denied",
            Self::Refused => "refused",
        }
    }
}

impl AttachError {
    /// Label value of this error.
    #[must_use]
    pub fn reason(&self) -> FailureReason {
        match self {
            Self::Gone => FailureReason::Gone,
            Self::Already => FailureReason::Already,
            Self::Maps(_) => FailureReason::Maps,
            Self::NoFunction(_) => FailureReason::NoFunction,
            Self::File(SymbolError::NoSite(_)) => FailureReason::NoSite,
            Self::File(SymbolError::Open(e)) if e.kind() == io::ErrorKind::PermissionDenied => {
                FailureReason::Denied
            }
            Self::File(_) => FailureReason::File,
            Self::Watch(_) => FailureReason::Watch,
            Self::Refused { source, .. } => match os_error(source) {
                Some(libc::EPERM | libc::EACCES) => FailureReason::Denied,
                _ => FailureReason::Refused,
            },
        }
    }

    /// Whether the same may work a moment later: the library may not be loaded yet.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            // The file stays what it is.
            Self::File(e) => !matches!(e, SymbolError::NoSite(_)),
            Self::NoFunction(_) | Self::Maps(_) => true,
            Self::Gone | Self::Already | Self::Watch(_) | Self::Refused { .. } => false,
        }
    }
}

fn os_error(error: &ProgramError) -> Option<i32> {
    match error {
        ProgramError::SyscallError(e) => e.io_error.raw_os_error(),
        ProgramError::IOError(e) => e.raw_os_error(),
        _ => None,
    }
}

/// A probe that is on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeInfo {
    /// The probed function.
    pub function: &'static str,
    /// Path of the probed file as the kernel prints it, made valid text: for people.
    pub path: String,
    /// Build id in hex, empty where the file has none.
    pub build_id: String,
    /// Offset of the probe in the file.
    pub offset: u64,
    /// What a hit costs.
    pub kind: SiteKind,
}

/// What the tap did since it was loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TapStats {
    /// Processes that are probed now.
    pub processes: usize,
    /// Probes set, by [`SiteKind::index`].
    pub attached: [u64; SiteKind::ALL.len()],
    /// Times that a process got a set of probes.
    pub attaches: u64,
    /// Time that took, file reads included.
    pub attach_time: Duration,
    /// Attempts that failed, by [`ProbeSet::index`] and in the order of [`FailureReason::ALL`].
    pub failures: [[u64; FailureReason::ALL.len()]; ProbeSet::ALL.len()],
    /// Probes taken off.
    pub detaches: u64,
    /// Time that took, added up over threads at work side by side.
    pub detach_time: Duration,
    /// Probes on their way out.
    pub detaching: usize,
    /// What was read from the ring.
    pub reader: ReaderStats,
}

/// The kernel side's counters (see [`Counter`]), added up over the CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters([u64; Counter::ALL.len()]);

impl Counters {
    /// One of them.
    #[must_use]
    pub fn get(&self, counter: Counter) -> u64 {
        self.0.get(counter as usize).copied().unwrap_or(0)
    }

    /// Those that count a loss, with their label values ([`Counter::as_str`]).
    pub fn losses(&self) -> impl Iterator<Item = (Counter, u64)> + '_ {
        Counter::ALL
            .into_iter()
            .filter(|c| c.is_loss())
            .map(|c| (c, self.get(c)))
    }
}

/// What a BPF program costs. Zero unless [`Settings::bpf_stats`] (or the sysctl `kernel.bpf_stats_enabled`)
/// is on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramStats {
    /// Its name in the object.
    pub name: &'static str,
    /// Time it ran.
    pub run_time: Duration,
    /// Times it ran.
    pub run_count: u64,
}

/// The loaded BPF side. Cloning gives another handle to the same.
#[derive(Clone, Debug)]
pub struct Tap {
    inner: Arc<Inner>,
}

/// Links of the probed processes; `None` while one is being probed.
type Links = HashMap<(ProcessKey, ProbeSet), Option<Vec<Link>>>;

struct Inner {
    /// Programs; held while a probe is set.
    ebpf: Mutex<Ebpf>,
    /// Those that are loaded for links with many probes instead, where the kernel has such links: all, then.
    multi: Option<multi::Programs>,
    watched: Mutex<Watched>,
    counters: PerCpuArray<MapData, u64>,
    positions: ring::Positions,
    ring_bytes: u32,
    /// By [`ProbeSet::index`].
    finders: [Finder; ProbeSet::ALL.len()],
    links: Mutex<Links>,
    detacher: Arc<Detacher>,
    reader: Arc<Counts>,
    attached: [AtomicU64; SiteKind::ALL.len()],
    attaches: AtomicU64,
    attach_nanos: AtomicU64,
    failures: [[AtomicU64; FailureReason::ALL.len()]; ProbeSet::ALL.len()],
    programs: Mutex<Vec<ProgramStats>>,
    /// HTTP connections of probed processes, which the programs add.
    connections: Mutex<KernelMap<MapData, u64, u64>>,
    missing: Vec<(&'static str, ProgramError)>,
    /// By [`ProbeSet::index`].
    refused: [Vec<(&'static str, ProgramError)>; ProbeSet::ALL.len()],
    /// Keeps the kernel's run time statistics on.
    _stats: Option<OwnedFd>,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inner")
            .field("ring_bytes", &self.ring_bytes)
            .finish_non_exhaustive()
    }
}

/// The kernel's table of watched processes, which only this writes.
struct Watched(Array<MapData, u64>);

impl Watched {
    fn change(&mut self, pid: u32, set: u64, clear: u64) -> Result<(), MapError> {
        let (word, shift) = watch::place(pid);
        let old = self.0.get(&word, 0)?;
        let new = (old | set << shift) & !(clear << shift);
        if new == old {
            return Ok(());
        }
        self.0.set(word, new, 0)
    }
}

impl Tap {
    /// Loads the programs and maps, and attaches those that tell of new and ended processes. Where the kernel
    /// refuses the latter, the tap works without them ([`Tap::missing_tracepoints`]): processes are then
    /// found by scans of /proc alone. Likewise it works without the programs of other sets than
    /// [`ProbeSet::Frames`] ([`Tap::refused`]).
    ///
    /// Needs `CAP_BPF` and `CAP_PERFMON`, or `CAP_SYS_ADMIN`, and Linux 5.8. Setting probes needs
    /// `CAP_SYS_ADMIN` on kernels of mid-2025 and later.
    pub fn load(settings: &Settings) -> Result<(Self, Reader), TapError> {
        let ring_bytes = settings
            .ring_bytes
            .checked_next_power_of_two()
            .filter(|bytes| RING_BYTES.contains(bytes))
            .ok_or(TapError::RingBytes(settings.ring_bytes))?;
        raise_memlock();
        let config = Config {
            capture_limit: settings.capture_limit,
            wakeup_bytes: settings.wakeup_bytes.min(ring_bytes / 2),
        };
        // The programs need no type information of the kernel, whose parsing would cost tens of megabytes.
        let mut ebpf = EbpfLoader::new()
            .btf(None)
            .map_max_entries(map::EVENTS, ring_bytes)
            .override_global(global::CAPTURE_LIMIT, &config.capture_limit, true)
            .override_global(global::WAKEUP_BYTES, &config.wakeup_bytes, true)
            .load(OBJECT)?;

        let multi = multi::Programs::load(
            &ebpf,
            OBJECT,
            ProbeSet::ALL.iter().flat_map(|set| set.programs()).copied(),
        )?;
        let watched = Watched(take(&mut ebpf, map::WATCHED)?);
        let counters = take(&mut ebpf, map::COUNTERS)?;
        let connections = take(&mut ebpf, map::CONNECTIONS)?;
        let ring: RingBuf<MapData> = take(&mut ebpf, map::EVENTS)?;
        let positions = ring::Positions::new(ring.as_fd()).map_err(TapError::Ring)?;

        // What could not be loaded for the one kind of link is tried for the other, which tells why.
        let mut load = |name| match &multi {
            Some(multi) if multi.has(name) => Ok(()),
            _ => load_probe(&mut ebpf, name),
        };
        load(program::ZMQ_MSG_SEND).map_err(|source| TapError::Program {
            name: program::ZMQ_MSG_SEND,
            source,
        })?;
        let refused = ProbeSet::ALL.map(|set| {
            let others = set
                .programs()
                .iter()
                .filter(|name| **name != program::ZMQ_MSG_SEND);
            others
                .filter_map(|name| Some((*name, load(name).err()?)))
                .collect()
        });
        let mut missing = Vec::new();
        for (name, tracepoint) in program::TRACEPOINTS {
            if let Err(source) = attach_tracepoint(&mut ebpf, name, tracepoint) {
                missing.push((tracepoint, source));
            }
        }

        let reader = Arc::new(Counts::default());
        let tap = Self {
            inner: Arc::new(Inner {
                ebpf: Mutex::new(ebpf),
                multi,
                watched: Mutex::new(watched),
                counters,
                positions,
                ring_bytes,
                finders: ProbeSet::ALL.map(|set| Finder::new(Arch::NATIVE, set)),
                links: Mutex::default(),
                detacher: Arc::default(),
                reader: Arc::clone(&reader),
                attached: Default::default(),
                attaches: AtomicU64::new(0),
                attach_nanos: AtomicU64::new(0),
                failures: Default::default(),
                programs: Mutex::default(),
                missing,
                refused,
                connections: Mutex::new(connections),
                _stats: settings
                    .bpf_stats
                    .then(|| aya::sys::enable_stats(aya::sys::Stats::RunTime).ok())
                    .flatten(),
            }),
        };
        Ok((tap, Reader::new(ring, reader)))
    }

    /// Tracepoints of process starts and ends that could not be attached, and why.
    #[must_use]
    pub fn missing_tracepoints(&self) -> &[(&'static str, ProgramError)] {
        &self.inner.missing
    }

    /// Programs of a set that the kernel refused, and why: the set then goes nowhere.
    #[must_use]
    pub fn refused(&self, set: ProbeSet) -> &[(&'static str, ProgramError)] {
        self.inner.refused.get(set.index()).map_or(&[], Vec::as_slice)
    }

    /// Has forks and the end of a process reported ([`Event::Fork`], [`Event::Exit`]), probed or not.
    pub fn watch(&self, pid: u32) -> Result<(), MapError> {
        self.inner.watched.lock().change(pid, watch::LIFE, 0)
    }

    /// Undoes [`Tap::watch`]; for a process that has ended, too.
    pub fn unwatch(&self, pid: u32) -> Result<(), MapError> {
        self.inner.watched.lock().change(pid, 0, watch::LIFE)
    }

    /// Probes one process: from its return on, every frame that the process sends is in the ring.
    ///
    /// Blocks on reads of the process's files and on the kernel, some milliseconds as a rule: call it where
    /// blocking is allowed. Safe to call from several threads.
    pub fn attach(&self, key: ProcessKey) -> Result<Attached, AttachError> {
        self.attach_set(key, ProbeSet::Frames)
    }

    /// As [`Tap::attach`], with any set of probes. With [`ProbeSet::Shm`] each put, get and removal that begins
    /// after its return is in the ring; with [`ProbeSet::Http`] all that is done with connections that are accepted,
    /// or begin a request, after its return.
    pub fn attach_set(&self, key: ProcessKey, set: ProbeSet) -> Result<Attached, AttachError> {
        let start = Instant::now();
        let result = self.inner.attach(key, set);
        match result {
            Ok(probes) => {
                self.inner.attaches.fetch_add(1, Ordering::Relaxed);
                self.inner
                    .attach_nanos
                    .fetch_add(nanos(start.elapsed()), Ordering::Relaxed);
                for probe in &probes {
                    if let Some(counter) = self.inner.attached.get(probe.kind.index()) {
                        counter.fetch_add(1, Ordering::Relaxed);
                    }
                }
                Ok(Attached {
                    key,
                    set,
                    probes,
                    inner: Arc::clone(&self.inner),
                })
            }
            Err(e) => {
                let of_set = self.inner.failures.get(set.index());
                if let Some(counter) = of_set.and_then(|counters| counters.get(e.reason() as usize)) {
                    counter.fetch_add(1, Ordering::Relaxed);
                }
                Err(e)
            }
        }
    }

    /// Takes all probes off, side by side, and waits for it. Returns how many are still on after `timeout`;
    /// those go when this process ends.
    #[must_use = "probes that are still on"]
    pub fn detach_all(&self, timeout: Duration) -> usize {
        let keys: Vec<_> = self.inner.links.lock().keys().copied().collect();
        for (key, set) in keys {
            self.inner.release(key, set);
        }
        self.inner.detacher.wait(timeout)
    }

    /// What the tap did.
    #[must_use]
    pub fn stats(&self) -> TapStats {
        let inner = &self.inner;
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let links = inner.links.lock();
        let probed = links.iter().filter(|(_, links)| links.is_some());
        let processes: HashSet<_> = probed.map(|((key, _), _)| *key).collect();
        drop(links);
        TapStats {
            processes: processes.len(),
            attached: inner.attached.each_ref().map(load),
            attaches: load(&inner.attaches),
            attach_time: Duration::from_nanos(load(&inner.attach_nanos)),
            failures: inner
                .failures
                .each_ref()
                .map(|of_set| of_set.each_ref().map(load)),
            detaches: load(&inner.detacher.done),
            detach_time: Duration::from_nanos(load(&inner.detacher.nanos)),
            detaching: inner.detacher.pending(),
            reader: inner.reader.get(),
        }
    }

    /// The kernel side's counters: what was captured, what was lost and why.
    pub fn counters(&self) -> Result<Counters, MapError> {
        let mut all = Counters::default();
        for counter in Counter::ALL {
            let per_cpu = self.inner.counters.get(&(counter as u32), 0)?;
            if let Some(sum) = all.0.get_mut(counter as usize) {
                *sum = per_cpu.iter().sum();
            }
        }
        Ok(all)
    }

    /// What the BPF programs cost so far. While a probe is being set, the values of the call before.
    #[must_use]
    pub fn programs(&self) -> Vec<ProgramStats> {
        let mut last = self.inner.programs.lock();
        if let Some(ebpf) = self.inner.ebpf.try_lock() {
            *last = program_names()
                .filter_map(|name| {
                    let of_multi = self.inner.multi.as_ref().and_then(|multi| multi.run_stats(name));
                    let (run_time, run_count) = of_multi.or_else(|| {
                        let info = ebpf.program(name)?.info().ok()?;
                        Some((info.run_time(), info.run_count()))
                    })?;
                    Some(ProgramStats {
                        name,
                        run_time,
                        run_count,
                    })
                })
                .collect();
        }
        last.clone()
    }

    /// Bytes of the ring that are not read yet, and its size.
    #[must_use]
    pub fn ring_fill(&self) -> (usize, u32) {
        (self.inner.positions.fill(), self.inner.ring_bytes)
    }
}

impl Inner {
    fn attach(&self, key: ProcessKey, set: ProbeSet) -> Result<Vec<ProbeInfo>, AttachError> {
        match self.links.lock().entry((key, set)) {
            Entry::Occupied(_) => return Err(AttachError::Already),
            // Holds the place while this is at work.
            Entry::Vacant(place) => place.insert(None),
        };
        let result = self.attach_probes(key, set);
        let mut links = self.links.lock();
        match result {
            Ok((new, probes)) if links.contains_key(&(key, set)) => {
                links.insert((key, set), Some(new));
                Ok(probes)
            }
            // `detach_all` came in between.
            Ok((new, _)) => {
                drop(links);
                self.forget(key.pid, set);
                self.detacher.detach(new);
                Err(AttachError::Gone)
            }
            Err(e) => {
                links.remove(&(key, set));
                Err(e)
            }
        }
    }

    fn attach_probes(
        &self,
        key: ProcessKey,
        set: ProbeSet,
    ) -> Result<(Vec<Link>, Vec<ProbeInfo>), AttachError> {
        let pid = NonZeroU32::new(key.pid).ok_or(AttachError::Gone)?;
        let is_same = || start_ticks(key.pid).is_ok_and(|ticks| ticks == key.start_ticks);
        if !is_same() {
            return Err(AttachError::Gone);
        }
        let text = maps::read(key.pid).map_err(|e| {
            if is_same() {
                AttachError::Maps(e)
            } else {
                AttachError::Gone
            }
        })?;
        let targets = match self.finders.get(set.index()).map(|f| f.find(key.pid, &text)) {
            Some(Ok(targets)) if !targets.is_empty() => Ok(targets),
            Some(Err(e)) => Err(AttachError::File(e)),
            Some(Ok(_)) | None => Err(AttachError::NoFunction(set)),
        };
        // The reason for a failure to read anything of a process that ended is its end.
        let targets = targets.map_err(|e| if is_same() { e } else { AttachError::Gone })?;

        // First, so that no frame between the two is missed.
        self.watched
            .lock()
            .change(key.pid, set.flag(), 0)
            .map_err(AttachError::Watch)?;
        let mut links = Vec::new();
        let mut probes = Vec::new();
        let mut outcome = Ok(());
        let places = targets.iter().flat_map(|target| {
            let by_program = target.places.chunk_by(|a, b| a.program == b.program);
            by_program.filter_map(move |places| Some((target, places.first()?.program, places)))
        });
        for (target, program, places) in places {
            let offsets: Vec<u64> = places.iter().map(|place| place.offset).collect();
            match self.set(pid, &target.file.path(), program, &offsets, &mut links) {
                Ok(()) => probes.extend(places.iter().map(|place| info(target, place))),
                Err(source) => {
                    outcome = Err(AttachError::Refused {
                        path: String::from_utf8_lossy(&target.path).into_owned(),
                        offset: places.first().map_or(0, |place| place.offset),
                        source,
                    });
                    break;
                }
            }
        }
        // The pid may have passed to another process meanwhile.
        if !is_same() {
            outcome = Err(AttachError::Gone);
        }
        match outcome {
            Ok(()) => Ok((links, probes)),
            Err(e) => {
                self.forget(key.pid, set);
                self.detacher.detach(links);
                Err(e)
            }
        }
    }

    /// Sets the probes of one program in a file, by way of the open file: whatever happens to paths meanwhile, they go where
    /// the sites were found.
    fn set(
        &self,
        pid: NonZeroU32,
        file: &Path,
        program: &str,
        offsets: &[u64],
        links: &mut Vec<Link>,
    ) -> Result<(), ProgramError> {
        let multi = self.multi.as_ref();
        if let Some(link) = multi.and_then(|multi| multi.attach(program, file, offsets, pid)) {
            links.push(Link::Multi(link?, offsets.len()));
            return Ok(());
        }
        for offset in offsets {
            let scope = UProbeScope::OneProcess(pid);
            let link = set_probe(&mut self.ebpf.lock(), program, *offset, file, scope)?;
            links.push(Link::Single(link));
        }
        Ok(())
    }

    fn release(&self, key: ProcessKey, set: ProbeSet) {
        let links = self.links.lock().remove(&(key, set));
        // `None` inside: the process is just being probed, and finds that it was released.
        if let Some(Some(links)) = links {
            self.forget(key.pid, set);
            self.detacher.detach(links);
        }
    }

    /// Stops the capture of a process at once, before its probes are off.
    fn forget(&self, pid: u32, set: ProbeSet) {
        // Fails for a pid beyond the table alone, which never came in: nothing to undo.
        let _ = self.watched.lock().change(pid, 0, set.flag());
        if set == ProbeSet::Http {
            self.forget_connections(pid);
        }
    }

    /// Another process may get the pid.
    fn forget_connections(&self, pid: u32) {
        let mut connections = self.connections.lock();
        let of_process: Vec<u64> = connections
            .keys()
            .map_while(Result::ok)
            .filter(|key| key >> 32 == u64::from(pid))
            .collect();
        for key in of_process {
            // Gone meanwhile, by the table's own eviction.
            let _ = connections.remove(&key);
        }
    }
}

fn set_probe(
    ebpf: &mut Ebpf,
    program: &str,
    offset: u64,
    file: &Path,
    scope: UProbeScope,
) -> Result<UProbeLink, ProgramError> {
    let Some(probe) = ebpf.program_mut(program) else {
        return Err(ProgramError::NotLoaded);
    };
    let probe: &mut UProbe = probe.try_into()?;
    let id = probe.attach(UProbeAttachLocation::AbsoluteOffset(offset), file, scope)?;
    probe.take_link(id)
}

fn info(target: &Target, place: &Place) -> ProbeInfo {
    ProbeInfo {
        function: place.function,
        path: String::from_utf8_lossy(&target.path).into_owned(),
        build_id: hex(&place.build_id),
        offset: place.offset,
        kind: place.site.kind,
    }
}

fn hex(bytes: &[u8]) -> String {
    use fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string can't fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Any thread may attach and ask; the reader may be handed to the thread that reads.
const _: () = {
    const fn shared<T: Send + Sync>() {}
    const fn sent<T: Send>() {}
    shared::<Tap>();
    shared::<Attached>();
    sent::<Reader>();
};

/// A probed process. Dropping it takes the probes off, in the background.
#[derive(Debug)]
#[must_use = "dropping it takes the probes off"]
pub struct Attached {
    key: ProcessKey,
    set: ProbeSet,
    probes: Vec<ProbeInfo>,
    inner: Arc<Inner>,
}

impl Attached {
    /// The process.
    #[must_use]
    pub fn key(&self) -> ProcessKey {
        self.key
    }

    /// Its probes: one or more for each function of the set in each mapped file that defines it.
    #[must_use]
    pub fn probes(&self) -> &[ProbeInfo] {
        &self.probes
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.inner.release(self.key, self.set);
    }
}

fn take<T>(ebpf: &mut Ebpf, name: &'static str) -> Result<T, TapError>
where
    T: TryFrom<aya::maps::Map, Error = MapError>,
{
    ebpf.take_map(name)
        .ok_or(TapError::Incomplete(name))?
        .try_into()
        .map_err(|source| TapError::Map { name, source })
}

fn load_probe(ebpf: &mut Ebpf, name: &'static str) -> Result<(), ProgramError> {
    let program: &mut UProbe = ebpf
        .program_mut(name)
        .ok_or(ProgramError::NotLoaded)?
        .try_into()?;
    program.load()
}

fn program_names() -> impl Iterator<Item = &'static str> {
    ProbeSet::ALL
        .into_iter()
        .flat_map(|set| set.programs().iter().copied())
        .chain(program::TRACEPOINTS.map(|(name, _)| name))
}

fn attach_tracepoint(ebpf: &mut Ebpf, name: &str, tracepoint: &str) -> Result<(), ProgramError> {
    let program: &mut RawTracePoint = ebpf
        .program_mut(name)
        .ok_or(ProgramError::NotLoaded)?
        .try_into()?;
    program.load()?;
    program.attach(tracepoint)?;
    Ok(())
}

/// Start time of a process in clock ticks since boot (`/proc/<pid>/stat` field 22).
pub fn start_ticks(pid: u32) -> io::Result<u64> {
    let stat = std::fs::read(format!("/proc/{pid}/stat"))?;
    // The second field is the process's name in brackets, and may hold anything, brackets too.
    let behind_name = stat
        .iter()
        .rposition(|&b| b == b')')
        .and_then(|at| stat.get(at + 1..));
    behind_name
        .and_then(|rest| std::str::from_utf8(rest).ok())
        .and_then(|rest| rest.split_ascii_whitespace().nth(19))
        .and_then(|ticks| ticks.parse().ok())
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no start time in /proc/<pid>/stat"))
}

/// Before Linux 5.11, maps count as locked memory of the user. Without the right to raise the limit, the load
/// fails, and `omnitap check` says why.
fn raise_memlock() {
    let limit = libc::rlimit {
        rlim_cur: libc::RLIM_INFINITY,
        rlim_max: libc::RLIM_INFINITY,
    };
    // SAFETY: a valid struct that the call only reads.
    let _ = unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) };
}
