//! The committed object against a real pyzmq process, sending as vLLM's engines do. Needs root and a venv.
mod common;

use std::{
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use common::{Tap, library};
use omnitap_ebpf::{Config, Counter, flag, watch};

/// Reads nothing but the start signal, then sends each of its messages and prints each part in hex, or its
/// length where the tap keeps a header only. Sockets and calls are those of vLLM's engine and client.
const SCRIPT: &str = r#"
import sys, msgspec, zmq

context = zmq.Context()
pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
for s in (pull, push):
    s.set_hwm(0)
pull.bind("inproc://out")
push.connect("inproc://out")
router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
port = router.bind_to_random_port("tcp://127.0.0.1")
dealer.setsockopt(zmq.IDENTITY, (0).to_bytes(2, "little"))
dealer.connect(f"tcp://127.0.0.1:{port}")
dealer.send(b"hello")
identity = router.recv_multipart()[0]
print("ready", flush=True)
sys.stdin.readline()

encode = msgspec.msgpack.Encoder().encode
tensor = bytes(range(256)) * 40

def send(socket, parts, **options):
    socket.send_multipart(parts, **options)
    for part in parts:
        print(bytes(part).hex(), flush=True)

# One token, one output with a tensor behind it, without copies as the output thread does.
send(push, [encode([0, [["req-0", [11]]], None, 1.5])], copy=False)
send(push, [encode([0, [["req-%d" % i, list(range(i))] for i in range(40)], None, 2.5]), tensor, tensor[:300]],
     copy=False)
# A large frame that pyzmq hands over by pointer.
send(push, [encode(tensor * 60)], copy=False)
# A frame passed on in a buffer that was used before.
send(push, [bytearray(encode({"status": "HELLO"}))], copy=False)
# Wake-ups.
for _ in range(50):
    push.send(b"x")
# Requests, as the client sends them.
send(router, [identity, b"\x00", encode(["req-1", list(range(3000)), None])])
send(router, [identity, b"\x01", encode(["req-1"])])
send(router, [identity, b"\x00", encode(["req-2", [1] * 40]), tensor])
print("end", flush=True)
sys.stdin.readline()
"#;

/// A Python with pyzmq and msgspec: `OMNITAP_PYTHON`, else a venv that is made once.
fn python() -> Option<PathBuf> {
    if let Some(python) = std::env::var_os("OMNITAP_PYTHON") {
        return Some(python.into());
    }
    let venv = Path::new(env!("CARGO_TARGET_TMPDIR")).join("pyzmq");
    let python = venv.join("bin/python");
    let works = |python: &Path| {
        Command::new(python)
            .args(["-c", "import zmq, msgspec"])
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    };
    if !works(&python) {
        let made = Command::new("python3").args(["-m", "venv"]).arg(&venv).status();
        let installed = Command::new(&python)
            .args([
                "-m",
                "pip",
                "install",
                "--quiet",
                "pyzmq==27.3.0",
                "msgspec==0.23.0",
            ])
            .status();
        if !works(&python) {
            eprintln!("SKIPPED: no venv with pyzmq and msgspec ({made:?}, {installed:?})");
            return None;
        }
    }
    Some(python)
}

#[test]
fn every_byte_that_pyzmq_sends() {
    if !common::can_run() {
        return;
    }
    let Some(python) = python() else { return };
    let mut process = Command::new(python)
        .args(["-c", SCRIPT])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(process.stdout.take().unwrap())
        .lines()
        .map(Result::unwrap);
    assert_eq!(lines.next().as_deref(), Some("ready"));

    let config = Config {
        capture_limit: 64 * 1024,
        wakeup_bytes: 0,
    };
    let mut tap = Tap::load(16 << 20, config);
    tap.watch(process.id(), watch::FRAMES);
    tap.attach(process.id(), &library(process.id()).unwrap());
    process.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    let sent: Vec<Vec<u8>> = lines
        .by_ref()
        .take_while(|line| line != "end")
        .map(|line| {
            (0..line.len())
                .step_by(2)
                .map(|at| u8::from_str_radix(&line[at..at + 2], 16).unwrap())
                .collect()
        })
        .collect();
    process.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    assert!(process.wait().unwrap().success());
    tap.drain();

    // pyzmq itself sends on sockets of its own, to its collector thread: a pointer for each buffer that it had
    // handed over (from 64 KiB on), once libzmq is done with it, and at exit a farewell.
    let router = tap
        .frames
        .iter()
        .find(|f| f.head == [0, 0])
        .unwrap()
        .header
        .socket;
    let ours = [tap.frames[0].header.socket, router];
    let (frames, own): (Vec<_>, Vec<_>) = tap.frames.iter().partition(|f| ours.contains(&f.header.socket));
    assert!(
        own.iter().all(|f| f.head.len() == 8 || f.head == b"DIE"),
        "{own:?}"
    );
    assert_eq!(frames.len(), sent.len());
    let mut aux = 0;
    for (n, (frame, sent)) in frames.iter().zip(&sent).enumerate() {
        let size = sent.len();
        assert_eq!(frame.header.size, size as u64, "frame {n}");
        if frame.header.flags & flag::AUX != 0 {
            aux += 1;
            assert!(frame.head.is_empty() && frame.tail.is_empty(), "frame {n}");
        } else if size > 64 * 1024 {
            assert!(
                frame.head == sent[..61_440] && frame.tail == sent[size - 4096..],
                "frame {n}"
            );
        } else {
            assert!(frame.head == *sent, "frame {n}");
        }
    }
    // Two tensors behind an output, one behind a request.
    assert_eq!(aux, 3);
    let captured = tap.frames.len() as u64 - 3;
    assert_eq!(
        tap.counters(),
        [
            (Counter::Captured, captured),
            (Counter::Aux, 3),
            (Counter::Short, 50)
        ]
    );
}
