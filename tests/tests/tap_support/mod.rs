//! Real senders for the tests of the tap, and a collector of what the tap saw of them.
#![allow(dead_code, reason = "each test binary uses a part of it")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a failed unwrap of a helper is a failed test"
)]

use std::{
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use omnitap::{
    check::{Facts, Status},
    host::identity::ProcessKey,
    tap::{self, Event, Reader, Settings, Tap},
};

/// How long an event may take to arrive before a test fails.
const PATIENCE: Duration = Duration::from_secs(10);

/// Whether the tap can work here by what the machine says of itself. If not, says why, aloud: the test is
/// skipped.
pub(crate) fn can_run() -> bool {
    let report = Facts::read().judge();
    if report.works() {
        return true;
    }
    for item in report.items.iter().filter(|item| item.status == Status::Fail) {
        eprintln!("SKIPPED: {}: {} -> {}", item.name, item.evidence, item.remedy);
    }
    false
}

/// A tap for a test.
pub(crate) fn load(settings: &Settings) -> (Tap, Reader) {
    Tap::load(settings).expect("the tap loads where its conditions are met")
}

/// The python with pyzmq.
pub(crate) fn python() -> PathBuf {
    let python = std::env::var_os("OMNITAP_TEST_PYTHON").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/venv/bin/python"),
        PathBuf::from,
    );
    assert!(
        python.exists(),
        "no {}: run `cargo xtask test`, or set OMNITAP_TEST_PYTHON to a python with pyzmq, msgspec and setproctitle",
        python.display()
    );
    python
}

/// A folder that holds packages of that python.
pub(crate) fn site_packages() -> PathBuf {
    let out = Command::new(python())
        .args([
            "-c",
            "import zmq, os; print(os.path.dirname(os.path.dirname(zmq.__file__)))",
        ])
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    PathBuf::from(String::from_utf8(out.stdout).unwrap().trim_end())
}

/// Copies pyzmq into a folder; returns the path of the copied libzmq.
pub(crate) fn copy_pyzmq(to: &Path) -> PathBuf {
    std::fs::create_dir_all(to).unwrap();
    for package in ["zmq", "pyzmq.libs"] {
        let done = Command::new("cp")
            .arg("-a")
            .arg(site_packages().join(package))
            .arg(to)
            .status()
            .unwrap();
        assert!(done.success());
    }
    library(to)
}

/// The libzmq of pyzmq in a folder of packages.
pub(crate) fn library(packages: &Path) -> PathBuf {
    std::fs::read_dir(packages.join("pyzmq.libs"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.file_name().unwrap().to_string_lossy().starts_with("libzmq"))
        .expect("pyzmq brings a libzmq")
}

pub(crate) fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/tap_support")
        .join(name)
}

/// The bytes that `sender.py` sends.
pub(crate) fn content(seed: u64, size: u64) -> Vec<u8> {
    (0..size)
        .map(|i| (seed * 31 + i * 7 + (i >> 8)).to_le_bytes()[0])
        .collect()
}

/// The bytes that `module.py` and `static.c` send.
pub(crate) fn ramp(size: u64) -> Vec<u8> {
    (0..size).map(|i| (i * 7).to_le_bytes()[0]).collect()
}

/// Runs one test of this binary again, with these capabilities in reach and `inner` set in its environment.
pub(crate) fn again(test: &str, capabilities: &str, inner: &str) {
    let status = Command::new("setpriv")
        .arg(format!("--bounding-set={capabilities}"))
        .arg(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env(inner, "1")
        .status()
        .expect("setpriv is part of util-linux");
    assert!(status.success());
}

/// A process that answers a line to each line, after it has sent what the line asks for.
pub(crate) struct Sender {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
    /// The process that sends: the child, or one behind it.
    pub(crate) pid: u32,
}

impl Sender {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let pid = child.id();
        let mut sender = Self {
            child,
            stdin,
            stdout,
            pid,
        };
        sender.expect("ready");
        sender
    }

    /// `sender.py` with pyzmq from where python finds it, or from a folder.
    pub(crate) fn pyzmq(packages: Option<&Path>) -> Self {
        let mut command = Command::new(python());
        if let Some(packages) = packages {
            command.env("PYTHONPATH", packages);
        }
        Self::start(command.arg(script("sender.py")))
    }

    fn expect(&mut self, word: &str) {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        assert_eq!(line.trim_end(), word, "the sender has ended");
    }

    pub(crate) fn command(&mut self, line: &str) {
        writeln!(self.stdin.as_mut().unwrap(), "{line}").unwrap();
        self.expect("ok");
    }

    /// Sends one message of parts of these sizes; the content of part `i` is `content(seed + i, size)`.
    pub(crate) fn send(&mut self, seed: u64, parts: &[u64], copy: bool) {
        self.command(&format!(
            "{{\"seed\": {seed}, \"parts\": {parts:?}, \"copy\": {copy}}}"
        ));
    }

    pub(crate) fn key(&self) -> ProcessKey {
        ProcessKey {
            pid: self.pid,
            start_ticks: tap::start_ticks(self.pid).unwrap(),
        }
    }

    /// Ends the process and waits for it.
    pub(crate) fn end(&mut self) {
        self.stdin = None;
        self.child.wait().unwrap();
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        // Ended already, or to be ended: either way nothing is left of it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A frame, kept.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Kept {
    pub(crate) size: u64,
    pub(crate) more: bool,
    pub(crate) aux: bool,
    pub(crate) head: Vec<u8>,
    pub(crate) tail: Vec<u8>,
}

/// Reads until `count` frames of a process have come through the socket of the first, or the patience is
/// over. pyzmq tells its own garbage collector of each buffer that was sent without copying, through another
/// socket: 8 bytes.
pub(crate) fn frames(reader: &mut Reader, pid: u32, count: usize) -> Vec<Kept> {
    let mut kept = Vec::new();
    let mut socket = None;
    let start = Instant::now();
    while kept.len() < count && start.elapsed() < PATIENCE {
        reader
            .drain(Duration::from_millis(10), usize::MAX, |event| {
                if let Event::Frame(frame) = event
                    && frame.pid == pid
                    && *socket.get_or_insert(frame.socket) == frame.socket
                {
                    kept.push(Kept {
                        size: frame.size,
                        more: frame.more,
                        aux: frame.aux,
                        head: frame.head.to_vec(),
                        tail: frame.tail.to_vec(),
                    });
                }
            })
            .unwrap();
    }
    kept
}

/// Reads until an event satisfies the question; whether it came.
pub(crate) fn until(reader: &mut Reader, mut question: impl FnMut(&Event<'_>) -> bool) -> bool {
    let start = Instant::now();
    let mut seen = false;
    while !seen && start.elapsed() < PATIENCE {
        reader
            .drain(Duration::from_millis(10), usize::MAX, |event| {
                seen |= question(&event);
            })
            .unwrap();
    }
    seen
}

/// Whether frames wait in the ring.
pub(crate) fn any_frames(reader: &mut Reader) -> bool {
    let mut any = false;
    reader
        .drain(Duration::from_millis(20), usize::MAX, |event| {
            any |= matches!(event, Event::Frame(_));
        })
        .unwrap();
    any
}

/// The byte of a process's memory at a probe, and the byte of the file there: they differ while the probe is
/// on.
pub(crate) fn bytes_at_probe(pid: u32, probe: &tap::ProbeInfo) -> (u8, u8) {
    use std::os::unix::fs::FileExt;
    let text = tap::maps::read(pid).unwrap();
    let mapping = tap::maps::parse(&text)
        .find(|m| m.exec && m.covers(probe.offset) && m.path == probe.path.as_bytes())
        .expect("the probed file is mapped");
    let mut memory = [0];
    std::fs::File::open(format!("/proc/{pid}/mem"))
        .unwrap()
        .read_exact_at(&mut memory, mapping.start + probe.offset - mapping.offset)
        .unwrap();
    let mut file = [0];
    std::fs::File::open(format!("/proc/{pid}/map_files/{}", mapping.map_files_name()))
        .unwrap()
        .read_exact_at(&mut file, probe.offset)
        .unwrap();
    (memory[0], file[0])
}
