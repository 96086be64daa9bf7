//! Real Python processes that hand segments of shared memory on as vLLM-Omni's connector does.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod tap_support;

use std::{
    process::Command,
    time::{Duration, Instant},
};

use omnitap::{
    record::{OwnedShm, ShmWhat},
    tap::{AttachError, Attached, Event, ProbeSet, Reader, Settings, SiteKind, Tap},
};
use omnitap_ebpf::Counter;
use tap_support::{Sender, can_run, load, python, script};

fn segments() -> Sender {
    Sender::start(Command::new(python()).arg(script("segments.py")))
}

/// Names of segments are the host's: each run has its own.
fn key(name: &str) -> String {
    format!("omnitap-{}_{name}", std::process::id())
}

fn put(sender: &mut Sender, key: &str, size: u64) {
    sender.command(&format!("{{\"put\": \"{key}\", \"size\": {size}}}"));
}

/// What comes until so much has come, or for ten seconds; then what still comes within a moment. With the ends.
fn events(reader: &mut Reader, count: usize) -> Vec<(u64, OwnedShm)> {
    let mut seen = Vec::new();
    let start = Instant::now();
    let mut take = |seen: &mut Vec<_>| {
        reader
            .drain(Duration::from_millis(20), usize::MAX, |event| {
                if let Event::Shm(event) = event {
                    seen.push(OwnedShm::new(&event));
                }
            })
            .unwrap()
    };
    while seen.len() < count && start.elapsed() < Duration::from_secs(10) {
        take(&mut seen);
    }
    while take(&mut seen) > 0 {}
    seen
}

fn nothing_lost(tap: &Tap) {
    let counters = tap.counters().unwrap();
    assert!(counters.losses().all(|(_, count)| count == 0), "{counters:?}");
    assert_eq!(tap.stats().reader.malformed, 0);
    assert_eq!(tap.stats().reader.shm_unpaired, 0);
}

#[test]
fn every_hop_with_its_size() {
    const SIZES: [u64; 8] = [1, 100, 4095, 4096, 4097, 65_536, 1_048_576, 9_999_999];
    if !can_run() {
        return;
    }
    let (tap, mut reader) = load(&Settings::default());
    let (mut from, mut to) = (segments(), segments());
    let attached = [
        tap.attach_set(from.key(), ProbeSet::Shm).unwrap(),
        tap.attach_set(to.key(), ProbeSet::Shm).unwrap(),
    ];
    for probes in attached.each_ref().map(Attached::probes) {
        assert!(probes.len() >= 4, "{probes:?}");
        assert!(
            probes.iter().all(|probe| probe.kind != SiteKind::Slow),
            "{probes:?}"
        );
    }
    for (n, size) in SIZES.into_iter().enumerate() {
        let key = key(&format!("{n}_0_{n}"));
        to.command(&format!("{{\"poll\": \"{key}\"}}"));
        std::thread::sleep(Duration::from_millis(30));
        let before = monotonic();
        put(&mut from, &key, size);
        let between = monotonic();
        to.command("{\"join\": true}");
        let after = monotonic();

        let seen = events(&mut reader, 2);
        let [(put_done, put), (get_done, get)] = &seen[..] else {
            panic!("{seen:?}")
        };
        assert_eq!((put.name.as_str(), get.name.as_str()), (&*key, &*key));
        assert_eq!((put.pid, put.tid), (from.pid, from.pid));
        assert_eq!(get.pid, to.pid);
        // Each get has a thread of its own.
        assert_ne!(get.tid, to.pid);
        let ShmWhat::Put { size: seen, start_ns } = put.what else {
            panic!("{put:?}")
        };
        assert_eq!(seen, size);
        assert!(before < start_ns && start_ns < *put_done && *put_done < between);
        let ShmWhat::Get { start_ns } = get.what else {
            panic!("{get:?}")
        };
        // The open that found it, not one of the polls before.
        assert!(before < start_ns && start_ns < *get_done && *get_done < after);
    }
    let counters = tap.counters().unwrap();
    assert_eq!(counters.get(Counter::ShmCaptured), 4 * SIZES.len() as u64);
    assert!(counters.get(Counter::ShmNoted) > 20 * SIZES.len() as u64);
    nothing_lost(&tap);
}

#[test]
fn what_is_not_taken_and_what_is_not_ours() {
    if !can_run() {
        return;
    }
    let (tap, mut reader) = load(&Settings::default());
    let mut process = segments();
    let _attached = tap.attach_set(process.key(), ProbeSet::Shm).unwrap();
    let key = key("kept");
    put(&mut process, &key, 10);
    put(&mut process, &key, 20);
    process.command(&format!("{{\"cleanup\": \"{key}\"}}"));
    process.command("{\"unnamed\": 5000}");

    let seen = events(&mut reader, 4);
    let whats: Vec<_> = seen.iter().map(|(_, event)| event.what).collect();
    assert!(
        matches!(
            whats[..],
            [
                ShmWhat::Put { size: 10, .. },
                ShmWhat::Unlinked,
                ShmWhat::Put { size: 20, .. },
                ShmWhat::Unlinked
            ]
        ),
        "{seen:?}"
    );
    assert!(seen.iter().all(|(_, event)| event.name == key));
    let stats = tap.stats().reader;
    assert_eq!((stats.shm, stats.shm_foreign), (4, 1));
    nothing_lost(&tap);
}

#[test]
fn probes_of_both_sets_come_and_go_by_themselves() {
    if !can_run() {
        return;
    }
    let (tap, mut reader) = load(&Settings::default());
    let mut process = segments();
    let no_zmq = tap.attach(process.key());
    assert!(
        matches!(no_zmq, Err(AttachError::NoFunction(ProbeSet::Frames))),
        "{no_zmq:?}"
    );
    let attached = tap.attach_set(process.key(), ProbeSet::Shm).unwrap();
    let again = tap.attach_set(process.key(), ProbeSet::Shm);
    assert!(matches!(again, Err(AttachError::Already)), "{again:?}");
    let stats = tap.stats();
    assert_eq!(stats.processes, 1);
    assert_eq!(
        stats.failures.map(|of_set| of_set.iter().sum::<u64>()),
        [1, 1, 0, 0, 0, 0]
    );
    put(&mut process, &key("on"), 10);
    drop(attached);
    put(&mut process, &key("off"), 10);
    assert_eq!(events(&mut reader, 1).len(), 1);
    assert_eq!(tap.detach_all(Duration::from_secs(20)), 0);
    assert_eq!(tap.stats().processes, 0);
    for name in ["on", "off"] {
        process.command(&format!("{{\"cleanup\": \"{}\"}}", key(name)));
    }
    assert!(events(&mut reader, 0).is_empty());
    nothing_lost(&tap);
}

fn monotonic() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(now.tv_sec).unwrap() * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap()
}
