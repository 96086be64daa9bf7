//! What the tests and the benchmark of the programs share: the object in the kernel, and a sender.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a failed unwrap is a failed test, and says where"
)]
#![allow(dead_code, reason = "each of its users needs a part of it")]

use std::{
    io::{BufRead as _, BufReader, Write},
    net::{Ipv4Addr, TcpStream},
    num::NonZeroU32,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use aya::{
    Ebpf, EbpfLoader,
    maps::{Array, MapData, PerCpuArray, RingBuf},
    programs::{
        RawTracePoint, UProbe,
        uprobe::{UProbeAttachLocation, UProbeScope},
    },
};
use object::{Object as _, ObjectSegment as _, ObjectSymbol as _};
use omnitap_ebpf::{
    Config, Counter, FrameHeader, HttpHeader, HttpOp, Kind, ProcessRecord, Record, ShmHeader, ShmStep,
    global, map, program, watch,
};

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

/// A C program that does what it is told, line by line.
struct Driven {
    child: Child,
    answers: BufReader<std::process::ChildStdout>,
}

impl Driven {
    fn start(program: &Path, args: &[&str]) -> Self {
        let mut child = Command::new(program)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|e| panic!("cannot start {}: {e}", program.display()));
        let answers = BufReader::new(child.stdout.take().unwrap());
        Self { child, answers }
    }

    fn tell(&mut self, text: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{text}").unwrap();
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// Tells it something that it answers with a number of nanoseconds.
    fn time(&mut self, order: &str) -> u64 {
        self.tell(order);
        self.line().parse().unwrap()
    }

    fn finish(mut self) {
        drop(self.child.stdin.take());
        let status = self.child.wait().unwrap();
        assert!(status.success(), "the process ended with {status}");
    }
}

/// A process that calls `zmq_msg_send` of a real libzmq when told.
pub(crate) struct Sender(Driven);

impl Sender {
    /// Starts it: `OMNITAP_SENDER` where that is set, else sender.c built with `cc` and Debian's libzmq3-dev.
    pub(crate) fn start(args: &[&str]) -> Self {
        let program = std::env::var_os("OMNITAP_SENDER").map_or_else(build_sender, PathBuf::from);
        let sender = Self(Driven::start(&program, args));
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
        self.0.child.id()
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
        self.0.tell(text.trim_end());
    }

    /// Ends it after all that it was told.
    pub(crate) fn finish(self) {
        self.0.finish();
    }

    /// Nanoseconds that a number of calls took (a `bench` sender).
    pub(crate) fn time(&mut self, calls: u64) -> u64 {
        self.0.time(&calls.to_string())
    }
}

fn build_sender() -> PathBuf {
    build("sender", &["-lzmq"], "gcc and libzmq3-dev")
}

/// Builds one of the C programs beside this file.
fn build(name: &str, libraries: &[&str], needs: &str) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/common/{name}.c"));
    let dir = std::env::temp_dir().join(format!("omnitap-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let program = dir.join(name);
    let partial = dir.join(format!("partial-{:?}", std::thread::current().id()));
    let status = Command::new("cc")
        .args(["-O2", "-o"])
        .arg(&partial)
        .arg(&source)
        .args(libraries)
        .status();
    assert!(
        status.as_ref().is_ok_and(std::process::ExitStatus::success),
        "{name}.c does not build ({status:?}): it needs {needs}"
    );
    std::fs::rename(&partial, &program).unwrap();
    program
}

/// What a process of segments.c did, by its own account.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Done {
    pub(crate) tid: u32,
    pub(crate) before: u64,
    pub(crate) after: u64,
}

/// A process that hands segments of shared memory on when told.
pub(crate) struct Segments(Driven);

impl Segments {
    /// Starts it: `OMNITAP_SEGMENTS` where that is set, else segments.c built with `cc`.
    pub(crate) fn start() -> Self {
        let program = std::env::var_os("OMNITAP_SEGMENTS")
            .map_or_else(|| build("segments", &["-lrt", "-pthread"], "gcc"), PathBuf::from);
        let mut segments = Self(Driven::start(&program, &[]));
        // Its libraries are there once it answers.
        segments.order("poll not_there 1");
        segments
    }

    pub(crate) fn pid(&self) -> u32 {
        self.0.child.id()
    }

    /// Gives an order without waiting for the answer.
    pub(crate) fn tell(&mut self, order: &str) {
        self.0.tell(order);
    }

    pub(crate) fn line(&mut self) -> String {
        self.0.line()
    }

    /// Gives an order; `None`: there was nothing to get.
    pub(crate) fn order(&mut self, order: &str) -> Option<Done> {
        self.tell(order);
        let line = self.line();
        let numbers: Vec<u64> = line.split(' ').map(|n| n.parse().unwrap()).collect();
        let [tid, before, after] = numbers[..] else {
            panic!("{order}: {line}")
        };
        (tid != 0).then(|| Done {
            tid: u32::try_from(tid).unwrap(),
            before,
            after,
        })
    }

    /// Nanoseconds that an order took.
    pub(crate) fn time(&mut self, order: &str) -> u64 {
        self.0.time(order)
    }

    /// Ends it after all that it was told.
    pub(crate) fn finish(self) {
        self.0.finish();
    }
}

/// A process that reads from and writes to connections when told, see server.c.
pub(crate) struct Server {
    driven: Driven,
    port: u16,
}

impl Server {
    /// Starts it: `OMNITAP_SERVER` where that is set, else server.c built with `cc`.
    pub(crate) fn start(args: &[&str]) -> Self {
        let program = std::env::var_os("OMNITAP_SERVER")
            .map_or_else(|| build("server", &["-pthread"], "gcc"), PathBuf::from);
        let mut driven = Driven::start(&program, args);
        let port = driven.line().parse().unwrap();
        Self { driven, port }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.driven.child.id()
    }

    /// A client, and the server's descriptor of its connection.
    pub(crate) fn connect(&mut self) -> (TcpStream, i32) {
        let client = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).unwrap();
        client.set_nodelay(true).unwrap();
        let fd = self.order("accept");
        (client, i32::try_from(fd).unwrap())
    }

    /// Gives an order; returns what the call did, negative an error number.
    pub(crate) fn order(&mut self, order: &str) -> i64 {
        self.driven.tell(order);
        self.driven.line().parse().unwrap()
    }

    /// Ends it after all that it was told.
    pub(crate) fn finish(self) {
        self.driven.finish();
    }
}

/// A file with a function that the process has mapped, and the offsets where its program belongs: the entry, or
/// behind each of its system calls.
pub(crate) fn places(pid: u32, function: &str) -> (PathBuf, Vec<u64>) {
    let (path, entry, behind) = places_of(pid, function);
    if [program::FTRUNCATE, program::FLOCK].contains(&function) {
        (path, behind)
    } else {
        (path, vec![entry])
    }
}

/// A file with a function that the process has mapped, the offset of its entry, and those behind its system calls.
pub(crate) fn places_of(pid: u32, function: &str) -> (PathBuf, u64, Vec<u64>) {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let paths = maps
        .lines()
        .filter_map(|line| line.find('/').map(|at| &line[at..]));
    for path in
        paths.filter(|path| path.contains("/libc.so") || path.contains("/libc-") || path.contains("/librt"))
    {
        let Ok(bytes) = std::fs::read(path) else { continue };
        let file = object::File::parse(&*bytes).unwrap();
        let Some(symbol) = file
            .dynamic_symbols()
            .find(|s| s.is_definition() && s.name() == Ok(function))
        else {
            continue;
        };
        let segment = file
            .segments()
            .find(|s| (s.address()..s.address() + s.size()).contains(&symbol.address()))
            .unwrap();
        let entry = symbol.address() - segment.address() + segment.file_range().0;
        let start = usize::try_from(entry).unwrap();
        let code = &bytes[start..start + usize::try_from(symbol.size()).unwrap()];
        let behind: Vec<u64> = behind_syscalls(code).into_iter().map(|at| entry + at).collect();
        return (PathBuf::from(path), entry, behind);
    }
    panic!("no file of process {pid} has {function}");
}

/// How the HTTP programs are attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// One probe sees arguments and result (x86-64).
    AtOnce,
    /// One in front of the system call notes the arguments, one behind it takes them up.
    InTurn,
}

impl Way {
    /// The one of this machine.
    pub(crate) fn here() -> Self {
        if cfg!(target_arch = "x86_64") {
            Self::AtOnce
        } else {
            Self::InTurn
        }
    }
}

/// `syscall; cmp rax, imm32` or `svc #0; cmn x0, imm`, where the result may be kept first: the offset of what follows.
fn behind_syscalls(code: &[u8]) -> Vec<u64> {
    let found = |at: usize| match () {
        #[cfg(target_arch = "x86_64")]
        () => matches!(code[at..], [0x0f, 0x05, 0x48, 0x3d, _, 0xf0, 0xff, 0xff, ..]).then_some(at + 8),
        #[cfg(target_arch = "aarch64")]
        () => match code[at..] {
            [1, 0, 0, 0xd4, 0x1f, _, _, 0xb1, ..] => Some(at + 8),
            [1, 0, 0, 0xd4, _, 3, 0, 0xaa, 0x1f, _, _, 0xb1, ..] => Some(at + 12),
            _ => None,
        },
    };
    let offsets = (0..code.len()).filter_map(found);
    offsets.map(|at| at as u64).collect()
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

/// A step with shared memory, copied out of the ring.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) kind: ShmStep,
    pub(crate) header: ShmHeader,
    pub(crate) name: String,
}

/// Something done with an HTTP connection, copied out of the ring.
#[derive(Clone, Debug)]
pub(crate) struct Http {
    pub(crate) op: HttpOp,
    pub(crate) header: HttpHeader,
    pub(crate) head: Vec<u8>,
    pub(crate) tail: Vec<u8>,
}

/// The object, loaded.
pub(crate) struct Tap {
    ebpf: Ebpf,
    ring: RingBuf<MapData>,
    pub(crate) frames: Vec<Frame>,
    pub(crate) processes: Vec<(Kind, ProcessRecord)>,
    pub(crate) steps: Vec<Step>,
    pub(crate) https: Vec<Http>,
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
            steps: Vec::new(),
            https: Vec::new(),
        }
    }

    /// Watches a process with these flags; 0 ends it.
    pub(crate) fn watch(&mut self, pid: u32, flags: u64) {
        let map = self.ebpf.map_mut(map::WATCHED).unwrap();
        let mut map: Array<_, u64> = Array::try_from(map).unwrap();
        let (word, shift) = watch::place(pid);
        let others =
            map.get(&word, 0).unwrap() & !((watch::FRAMES | watch::LIFE | watch::SHM | watch::HTTP) << shift);
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

    /// Loads the programs of shared memory, and attaches them in one process.
    pub(crate) fn attach_shm(&mut self, pid: u32) {
        for name in program::SHM {
            let (path, offsets) = places(pid, name);
            self.attach_at(pid, name, &path, &offsets);
        }
    }

    fn attach_at(&mut self, pid: u32, name: &str, path: &Path, offsets: &[u64]) {
        assert!(!offsets.is_empty(), "no place for {name} in {}", path.display());
        let probe: &mut UProbe = self.ebpf.program_mut(name).unwrap().try_into().unwrap();
        if probe.fd().is_err() {
            probe
                .load()
                .unwrap_or_else(|e| panic!("{name} does not load: {e:?}"));
        }
        for offset in offsets {
            let scope = UProbeScope::OneProcess(NonZeroU32::new(pid).unwrap());
            probe
                .attach(UProbeAttachLocation::AbsoluteOffset(*offset), path, scope)
                .unwrap();
        }
    }

    /// Loads the HTTP programs, and attaches them in one process.
    pub(crate) fn attach_http(&mut self, pid: u32, way: Way) {
        for (function, at_once, note) in [
            ("read", program::HTTP_READ, program::HTTP_NOTE_READ),
            ("recv", program::HTTP_READ, program::HTTP_NOTE_READ),
            ("write", program::HTTP_WRITE, program::HTTP_NOTE_WRITE),
            ("send", program::HTTP_WRITE, program::HTTP_NOTE_WRITE),
            ("writev", program::HTTP_WRITEV, program::HTTP_NOTE_WRITEV),
            ("sendmsg", program::HTTP_SENDMSG, program::HTTP_NOTE_SENDMSG),
            ("accept4", program::HTTP_ACCEPT, program::HTTP_NOTE_ACCEPT),
        ] {
            let (path, entry, behind) = places_of(pid, function);
            match way {
                Way::AtOnce => self.attach_at(pid, at_once, &path, &behind),
                Way::InTurn => {
                    self.attach_at(pid, note, &path, &[entry]);
                    self.attach_at(pid, program::HTTP_RETURN, &path, &behind);
                }
            }
        }
        let (path, entry, _) = places_of(pid, "close");
        self.attach_at(pid, program::HTTP_CLOSE, &path, &[entry]);
        let (path, entry, behind) = places_of(pid, "syscall");
        if cfg!(target_arch = "x86_64") {
            self.attach_at(pid, program::HTTP_SYSCALL, &path, &behind);
        } else {
            self.attach_at(pid, program::HTTP_SYSCALL_ENTRY, &path, &[entry]);
        }
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
                Record::Shm { step, header, name } => self.steps.push(Step {
                    kind: step,
                    header,
                    name: String::from_utf8(name.to_vec()).unwrap(),
                }),
                Record::Http {
                    op,
                    header,
                    head,
                    tail,
                } => self.https.push(Http {
                    op,
                    header,
                    head: head.to_vec(),
                    tail: tail.to_vec(),
                }),
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
