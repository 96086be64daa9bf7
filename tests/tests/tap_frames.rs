//! Real pyzmq processes: what they send is what the tap sees.

mod tap_support;

use std::{process::Command, time::Duration};

use omnitap::tap::{Settings, SiteKind};
use omnitap_ebpf::Counter;
use tap_support::{Sender, can_run, content, frames, load, python, script, until};

/// Around every boundary: content inside the message, the record's size classes, the capture limit.
const SIZES: [u64; 24] = [
    2, 8, 29, 32, 33, 34, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025, 4095, 4096, 4097, 16_383, 16_384,
    16_385, 65_535, 65_536, 100,
];

#[test]
fn every_size_whole_and_attached_while_running() {
    if !can_run() {
        return;
    }
    let (tap, mut reader) = load(&Settings::default());
    let mut sender = Sender::pyzmq(None);
    sender.send(9, &[500], true);
    let attached = tap.attach(sender.key()).unwrap();
    assert_eq!(attached.probes().len(), 1);
    assert_eq!(attached.probes()[0].kind, SiteKind::Push);
    assert!(attached.probes()[0].path.contains("libzmq"));
    for copy in [true, false] {
        for (seed, &size) in (0..).zip(&SIZES) {
            sender.send(seed, &[size], copy);
        }
        let seen = frames(&mut reader, sender.pid, SIZES.len());
        assert_eq!(seen.len(), SIZES.len());
        for ((seed, &size), frame) in (0..).zip(&SIZES).zip(&seen) {
            assert_eq!(frame.size, size);
            assert!(
                frame.head == content(seed, size),
                "content of {size} bytes, copy {copy}"
            );
            assert!(frame.tail.is_empty() && !frame.more && !frame.aux);
        }
    }
    let counters = tap.counters().unwrap();
    assert!(counters.get(Counter::Captured) >= 2 * SIZES.len() as u64);
    assert!(counters.losses().all(|(_, count)| count == 0), "{counters:?}");
    until(&mut reader, |_| {
        tap.stats().reader.frames == counters.get(Counter::Captured)
    });
    assert_eq!(tap.stats().reader.frames, counters.get(Counter::Captured));
    assert_eq!(tap.stats().reader.retries, 0);
    assert_eq!(tap.stats().reader.malformed, 0);
    assert_eq!(tap.ring_fill().0, 0);
}

#[test]
fn larger_frames_give_head_and_tail() {
    if !can_run() {
        return;
    }
    for (capture_limit, size, head, tail) in [
        (65_536, 200_000, 61_440, 4096),
        (65_536, 65_537, 61_440, 4096),
        (4096, 5000, 3072, 1024),
    ] {
        let (tap, mut reader) = load(&Settings {
            capture_limit,
            ..Settings::default()
        });
        let mut sender = Sender::pyzmq(None);
        let _attached = tap.attach(sender.key()).unwrap();
        sender.send(3, &[size], true);
        let seen = frames(&mut reader, sender.pid, 1);
        let whole = content(3, size);
        assert_eq!(
            (seen[0].size, seen[0].head.len(), seen[0].tail.len()),
            (size, head, tail)
        );
        assert!(seen[0].head == whole[..head]);
        assert!(seen[0].tail == whole[whole.len() - tail..]);
    }
}

#[test]
fn parts_behind_the_payload_are_headers() {
    if !can_run() {
        return;
    }
    let (tap, mut reader) = load(&Settings::default());
    let mut sender = Sender::pyzmq(None);
    let _attached = tap.attach(sender.key()).unwrap();
    // Type byte, payload, tensors; then a payload alone, and a wake-up of one byte, which is dropped.
    sender.send(1, &[1, 100, 5000, 40], false);
    sender.send(5, &[1], true);
    sender.send(6, &[70], true);
    let seen = frames(&mut reader, sender.pid, 5);
    let told: Vec<_> = seen
        .iter()
        .map(|f| (f.size, f.more, f.aux, f.head.len()))
        .collect();
    assert_eq!(
        told,
        [
            (1, true, false, 1),
            (100, true, false, 100),
            (5000, true, true, 0),
            (40, false, true, 0),
            (70, false, false, 70)
        ]
    );
    assert_eq!(seen[1].head, content(2, 100));
    assert_eq!(tap.counters().unwrap().get(Counter::Short), 1);
}

/// A ring that is full loses frames, and says how many: what was captured and what was lost is what was sent.
#[test]
fn a_full_ring_counts_its_losses() {
    const SENT: u64 = 20_000;
    if !can_run() {
        return;
    }
    let (tap, mut reader) = load(&Settings {
        ring_bytes: 256 << 10,
        ..Settings::default()
    });
    let mut sender = Sender::pyzmq(None);
    let _attached = tap.attach(sender.key()).unwrap();
    // Nobody reads meanwhile.
    sender.command(&format!("{{\"flood\": {SENT}, \"size\": 100}}"));
    let counters = tap.counters().unwrap();
    let (captured, lost) = (
        counters.get(Counter::Captured),
        counters.get(Counter::LostRingFull),
    );
    eprintln!("sent {SENT}, captured {captured}, lost {lost}");
    assert!(lost > 0 && captured > 0);
    assert_eq!(captured + lost, SENT);
    let (fill, size) = tap.ring_fill();
    assert!(fill > size as usize / 2, "{fill} of {size}");
    let seen = frames(&mut reader, sender.pid, usize::try_from(captured).unwrap());
    assert_eq!(seen.len() as u64, captured);
    // The first ones are there, the later ones are missing.
    for (number, frame) in (0_u64..).zip(&seen) {
        assert_eq!(frame.head[..8], number.to_le_bytes());
    }
    // Once read, it takes frames again.
    sender.send(1, &[100], true);
    assert_eq!(frames(&mut reader, sender.pid, 1).len(), 1);
}

/// libzmq linked into the executable, its symbols not exported; frames of constant memory.
#[test]
fn libzmq_in_the_executable() {
    const ARCHIVE: &str = "/usr/lib/x86_64-linux-gnu/libzmq.a";
    if !can_run() {
        return;
    }
    if !std::path::Path::new(ARCHIVE).exists() {
        eprintln!("SKIPPED: no {ARCHIVE}; `apt-get install libzmq3-dev` brings it");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("serve");
    let built = Command::new("gcc")
        .arg(script("static.c"))
        .arg("-o")
        .arg(&program)
        .arg(ARCHIVE)
        .args([
            "-lsodium",
            "-lpgm",
            "-lnorm",
            "-lgssapi_krb5",
            "-lbsd",
            "-lstdc++",
            "-lm",
            "-lpthread",
        ])
        .status()
        .unwrap();
    assert!(built.success());
    let (tap, mut reader) = load(&Settings::default());
    let mut sender = Sender::start(&mut Command::new(&program));
    let attached = tap.attach(sender.key()).unwrap();
    assert_eq!(attached.probes()[0].path, program.to_str().unwrap());
    for size in [20, 33, 34, 300] {
        sender.command(&size.to_string());
        let seen = frames(&mut reader, sender.pid, 1);
        assert_eq!(seen[0].size, size);
        assert!(seen[0].head == tap_support::ramp(size));
    }
}

/// libzmq in a shared module whose name does not tell.
#[test]
fn libzmq_in_a_module_of_another_name() {
    if !can_run() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let module = dir.path().join("transport.cpython-311-x86_64-linux-gnu.so");
    std::fs::copy(tap_support::library(&tap_support::site_packages()), &module).unwrap();
    let (tap, mut reader) = load(&Settings::default());
    // Its own libraries (libsodium) stay beside the original.
    let mut command = Command::new(python());
    command
        .env("LD_LIBRARY_PATH", tap_support::site_packages().join("pyzmq.libs"))
        .arg(script("module.py"))
        .arg(&module);
    let mut sender = Sender::start(&mut command);
    let attached = tap.attach(sender.key()).unwrap();
    assert_eq!(attached.probes()[0].path, module.to_str().unwrap());
    for size in [30, 200] {
        sender.command(&size.to_string());
        let seen = frames(&mut reader, sender.pid, 1);
        assert!(seen[0].head == tap_support::ramp(size));
    }
}

/// What the programs cost is told when asked for.
#[test]
fn run_time_of_the_programs() {
    if !can_run() {
        return;
    }
    let (tap, mut reader) = load(&Settings {
        bpf_stats: true,
        ..Settings::default()
    });
    let mut sender = Sender::pyzmq(None);
    let _attached = tap.attach(sender.key()).unwrap();
    sender.command("{\"flood\": 1000, \"size\": 100}");
    assert_eq!(frames(&mut reader, sender.pid, 1000).len(), 1000);
    let programs = tap.programs();
    let send = programs.iter().find(|p| p.name == "zmq_msg_send").unwrap();
    assert_eq!(send.run_count, 1000);
    assert!(send.run_time > Duration::ZERO);
    eprintln!("{:?} a run of the program", send.run_time / 1000);
}
