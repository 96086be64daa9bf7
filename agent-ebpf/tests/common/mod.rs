//! What the tests and the benchmark of the programs share: the object in the kernel, and a sender.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a failed unwrap is a failed test, and says where"
)]
#![allow(dead_code, reason = "each of its users needs a part of it")]

use std::{
    io::{BufRead as _, BufReader, Write},
    num::NonZeroU32,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use aya::{
    Ebpf, EbpfLoader,
    maps::{Array, MapData, PerCpuArray, RingBuf},
    programs::{RawTracePoint, UProbe, uprobe::UProbeScope},
};
use omnitap_ebpf::{Config, Counter, FrameHeader, Kind, ProcessRecord, Record, global, map, program, watch};

/// The committed object for this machine.
pub(crate) const OBJECT: &[u8] = {
    #[cfg(target_arch = "x86_64")]
    {
        aya::include_bytes_aligned!("../../prebuilt/omnitap-x86_64.bpf.o")
    }
    #[cfg(target_arch = "aarch64")]
    {
        aya::include_bytes_aligned!("../../prebuilt/omnitap-aarch64.bpf.o")
    }
};

/// Whether the kernel side can be tested here; says so loudly where not.
pub(crate) fn can_run() -> bool {
    let is_root = std::fs::read_to_string("/proc/self/status")
        .unwrap()
        .lines()
        .any(|line| line.starts_with("Uid:\t0\t"));
    if !is_root {
        eprintln!("SKIPPED: not root, so no BPF program can be loaded");
    }
    is_root
}

/// One frame of a plan for the sender, see sender.c.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Planned {
    pub(crate) socket: u32,
    pub(crate) kind: char,
    pub(crate) size: usize,
    pub(crate) more: bool,
}

/// Byte `at` of frame `frame` of a plan.
pub(crate) fn content(frame: usize, range: std::ops::Range<usize>) -> Vec<u8> {
    range
        .map(|at| u8::try_from((131 * frame + 7 * at + 13 * (at / 256)) % 256).unwrap())
        .collect()
}

/// A process that calls `zmq_msg_send` of a real libzmq when told.
pub(crate) struct Sender {
    child: Child,
    answers: BufReader<std::process::ChildStdout>,
}

impl Sender {
    /// Starts it: `OMNITAP_SENDER` where that is set, else sender.c built with `cc` and Debian's libzmq3-dev.
    pub(crate) fn start(args: &[&str]) -> Self {
        let program = std::env::var_os("OMNITAP_SENDER").map_or_else(build_sender, PathBuf::from);
        let mut child = Command::new(&program)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|e| panic!("cannot start {}: {e}", program.display()));
        let answers = BufReader::new(child.stdout.take().unwrap());
        let sender = Self { child, answers };
        let start = Instant::now();
        while library(sender.pid()).is_none() {
            assert!(
                start.elapsed() < Duration::from_secs(20),
                "the sender maps no libzmq"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        sender
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The libzmq that it has mapped.
    pub(crate) fn library(&self) -> PathBuf {
        library(self.pid()).unwrap()
    }

    /// Sends frames, without waiting for anything.
    pub(crate) fn send(&mut self, plan: &[Planned]) {
        use std::fmt::Write as _;

        let mut text = String::new();
        for p in plan {
            writeln!(text, "{} {} {} {}", p.socket, p.kind, p.size, u32::from(p.more)).unwrap();
        }
        self.child
            .stdin
            .as_mut()
            .unwrap()
            .write_all(text.as_bytes())
            .unwrap();
    }

    /// Ends it after all that it was told.
    pub(crate) fn finish(mut self) {
        drop(self.child.stdin.take());
        let status = self.child.wait().unwrap();
        assert!(status.success(), "the sender ended with {status}");
    }

    /// Nanoseconds that a number of calls took (a `bench` sender).
    pub(crate) fn time(&mut self, calls: u64) -> u64 {
        writeln!(self.child.stdin.as_mut().unwrap(), "{calls}").unwrap();
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        line.trim().parse().unwrap()
    }
}

fn build_sender() -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/common/sender.c");
    let dir = std::env::temp_dir().join(format!("omnitap-sender-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let program = dir.join("sender");
    let partial = dir.join(format!("partial-{:?}", std::thread::current().id()));
    let status = Command::new("cc")
        .args(["-O2", "-o"])
        .arg(&partial)
        .arg(&source)
        .arg("-lzmq")
        .status();
    assert!(
        status.as_ref().is_ok_and(std::process::ExitStatus::success),
        "sender.c does not build ({status:?}): it needs gcc and libzmq3-dev"
    );
    std::fs::rename(&partial, &program).unwrap();
    program
}

/// The libzmq that a process has mapped.
pub(crate) fn library(pid: u32) -> Option<PathBuf> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
    maps.lines()
        .filter_map(|line| line.find('/').map(|at| &line[at..]))
        .find(|path| {
            path.rsplit('/')
                .next()
                .is_some_and(|name| name.starts_with("libzmq"))
        })
        .map(PathBuf::from)
}

/// A frame record, copied out of the ring.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    pub(crate) header: FrameHeader,
    pub(crate) head: Vec<u8>,
    pub(crate) tail: Vec<u8>,
}

/// The object, loaded.
pub(crate) struct Tap {
    ebpf: Ebpf,
    ring: RingBuf<MapData>,
    pub(crate) frames: Vec<Frame>,
    pub(crate) processes: Vec<(Kind, ProcessRecord)>,
}

impl Tap {
    /// Loads the object with a ring of this size in bytes.
    pub(crate) fn load(ring_bytes: u32, config: Config) -> Self {
        // Before 5.11 map memory counts against this limit.
        let unlimited = libc::rlimit {
            rlim_cur: libc::RLIM_INFINITY,
            rlim_max: libc::RLIM_INFINITY,
        };
        // SAFETY: a valid struct.
        unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const unlimited) };
        let mut ebpf = EbpfLoader::new()
            .map_max_entries(map::EVENTS, ring_bytes)
            .override_global(global::CAPTURE_LIMIT, &config.capture_limit, true)
            .override_global(global::WAKEUP_BYTES, &config.wakeup_bytes, true)
            .load(OBJECT)
            .unwrap_or_else(|e| panic!("the object does not load: {e:?}"));
        let ring = RingBuf::try_from(ebpf.take_map(map::EVENTS).unwrap()).unwrap();
        Self {
            ebpf,
            ring,
            frames: Vec::new(),
            processes: Vec::new(),
        }
    }

    /// Watches a process with these flags; 0 ends it.
    pub(crate) fn watch(&mut self, pid: u32, flags: u64) {
        let map = self.ebpf.map_mut(map::WATCHED).unwrap();
        let mut map: Array<_, u64> = Array::try_from(map).unwrap();
        let (word, shift) = watch::place(pid);
        let others = map.get(&word, 0).unwrap() & !((watch::FRAMES | watch::LIFE) << shift);
        map.set(word, others | flags << shift, 0).unwrap();
    }

    /// Loads all programs and attaches the probe in one process.
    pub(crate) fn attach(&mut self, pid: u32, library: &Path) {
        let probe: &mut UProbe = self
            .ebpf
            .program_mut(program::ZMQ_MSG_SEND)
            .unwrap()
            .try_into()
            .unwrap();
        if probe.fd().is_err() {
            probe
                .load()
                .unwrap_or_else(|e| panic!("zmq_msg_send does not load: {e:?}"));
        }
        probe
            .attach(
                "zmq_msg_send",
                library,
                UProbeScope::OneProcess(NonZeroU32::new(pid).unwrap()),
            )
            .unwrap();
    }

    /// Loads and attaches the programs on processes.
    pub(crate) fn attach_tracepoints(&mut self) {
        for (name, tracepoint) in program::TRACEPOINTS {
            let program: &mut RawTracePoint = self.ebpf.program_mut(name).unwrap().try_into().unwrap();
            program
                .load()
                .unwrap_or_else(|e| panic!("{name} does not load: {e:?}"));
            program.attach(tracepoint).unwrap();
        }
    }

    /// Takes all that is in the ring.
    pub(crate) fn drain(&mut self) {
        while let Some(item) = self.ring.next() {
            match Record::parse(&item).unwrap() {
                Record::Frame { header, head, tail } => self.frames.push(Frame {
                    header,
                    head: head.to_vec(),
                    tail: tail.to_vec(),
                }),
                Record::Process(kind, record) => self.processes.push((kind, record)),
            }
        }
    }

    /// A kernel-side counter, over all CPUs.
    pub(crate) fn counter(&self, counter: Counter) -> u64 {
        let map = self.ebpf.map(map::COUNTERS).unwrap();
        let map: PerCpuArray<_, u64> = PerCpuArray::try_from(map).unwrap();
        map.get(&(counter as u32), 0).unwrap().iter().sum()
    }

    /// All counters that are not 0.
    pub(crate) fn counters(&self) -> Vec<(Counter, u64)> {
        let all = Counter::ALL.into_iter().map(|c| (c, self.counter(c)));
        all.filter(|(_, n)| *n != 0).collect()
    }
}
