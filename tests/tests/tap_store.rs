//! Libraries with the functions of Mooncake's store and of Yuanrong's data system: their calls are told from entry to
//! return.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod tap_support;

use std::{
    process::Command,
    time::{Duration, Instant},
};

use omnitap::{
    record::{OwnedShm, ShmWhat},
    tap::{AttachError, Event, ProbeSet, Reader, Settings, SiteKind, Tap},
};
use omnitap_ebpf::Counter;
use tap_support::{Sender, can_run, load, python, script};

/// A process with the library of Mooncake's store.
fn store() -> Option<Sender> {
    client("mooncake/store.so", "store.cc")
}

/// A process with a client's library, which is gone from its folder by now. `None`, said aloud: there is no compiler.
fn client(library: &str, source: &str) -> Option<Sender> {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join(library);
    std::fs::create_dir(library.parent().unwrap()).unwrap();
    let compiled = Command::new("g++")
        .args(["-std=c++20", "-O2", "-shared", "-fPIC", "-s", "-o"])
        .arg(&library)
        .arg(script(source))
        .status();
    match compiled {
        Ok(status) => assert!(status.success()),
        Err(e) => {
            eprintln!("SKIPPED: no g++ here ({e}), so nothing was compiled and nothing tested");
            return None;
        }
    }
    Some(Sender::start(
        Command::new(python()).arg(script("store.py")).arg(&library),
    ))
}

/// What comes until so much has come, or for ten seconds, with the ends.
fn events(reader: &mut Reader, count: usize) -> Vec<(u64, OwnedShm)> {
    let mut seen = Vec::new();
    let start = Instant::now();
    while seen.len() < count && start.elapsed() < Duration::from_secs(10) {
        reader
            .drain(Duration::from_millis(20), usize::MAX, |event| {
                if let Event::Shm(event) = event {
                    seen.push(OwnedShm::new(&event));
                }
            })
            .unwrap();
    }
    seen
}

fn counted(tap: &Tap, counter: Counter) -> u64 {
    tap.counters().unwrap().get(counter)
}

#[test]
fn puts_and_gets_from_entry_to_return() {
    if !can_run() {
        return;
    }
    let Some(mut sender) = store() else { return };
    let (tap, mut reader) = load(&Settings::default());
    let _shm = tap.attach_set(sender.key(), ProbeSet::Shm).unwrap();
    let store = tap.attach_set(sender.key(), ProbeSet::Store).unwrap();
    let returns = store
        .probes()
        .iter()
        .filter(|probe| probe.kind == SiteKind::Return)
        .count();
    assert!(
        returns >= 4,
        "a put with several returns, and a get: {:?}",
        store.probes()
    );
    assert!(store.probes().iter().all(|probe| probe.kind != SiteKind::Slow));

    let key = "r-1a2b3c4d_0_0@0_1";
    // By each of its ways out, those that fail among them.
    for size in [0, 1, 2, 1001, 0, 70_000, 1_000_000] {
        sender.command(&format!("{{\"put\": \"{key}\", \"size\": {size}}}"));
    }
    for key in ["missing-1a2b3c4d_0_0@0_1", key] {
        sender.command(&format!("{{\"get\": \"{key}\"}}"));
    }
    let seen = events(&mut reader, 4);
    let puts: Vec<(u64, u64)> = seen
        .iter()
        .filter_map(|(done, event)| match event.what {
            ShmWhat::Put { size, start_ns } => Some((size, done - start_ns)),
            _ => None,
        })
        .collect();
    let sizes: Vec<u64> = puts.iter().map(|(size, _)| *size).collect();
    assert_eq!(sizes, [1001, 70_000, 1_000_000]);
    assert!(puts.iter().all(|(_, took)| *took >= 2_000_000), "{puts:?}");
    let [.., (done, get)] = &seen[..] else {
        panic!("{seen:?}")
    };
    let ShmWhat::Get { start_ns } = get.what else {
        panic!("{get:?}")
    };
    assert!(done - start_ns >= 3_000_000);
    assert!(
        seen.iter()
            .all(|(_, event)| event.name == key && event.pid == sender.pid)
    );
    // Two jumps to another function and an exception were followed by another call.
    assert_eq!(counted(&tap, Counter::StoreUnreturned), 3);
    assert_eq!(counted(&tap, Counter::ShmCaptured), 4);
    assert!(tap.counters().unwrap().losses().all(|(_, count)| count == 0));

    drop(store);
    sender.command(&format!("{{\"put\": \"{key}\", \"size\": 9}}"));
}

#[test]
fn yuanrong_from_entry_to_return() {
    if !can_run() {
        return;
    }
    let Some(mut sender) = client("datasystem/libdatasystem.so", "yuanrong.cc") else {
        return;
    };
    let (tap, mut reader) = load(&Settings::default());
    let _shm = tap.attach_set(sender.key(), ProbeSet::Shm).unwrap();
    let yuanrong = tap.attach_set(sender.key(), ProbeSet::Yuanrong).unwrap();
    assert!(
        yuanrong.probes().iter().all(|probe| probe.kind != SiteKind::Slow),
        "{:?}",
        yuanrong.probes()
    );
    let key = "r-1a2b3c4d_0_0:0_1";
    // Nothing is what it does not take.
    for size in [0, 1, 70_000] {
        sender.command(&format!("{{\"put\": \"{key}\", \"size\": {size}}}"));
    }
    for key in ["missing-1a2b3c4d_0_0:0_1", key] {
        sender.command(&format!("{{\"get\": \"{key}\"}}"));
    }
    let seen = events(&mut reader, 3);
    let [
        (first, OwnedShm { what: one, .. }),
        (second, OwnedShm { what: many, .. }),
        (third, OwnedShm { what: got, .. }),
    ] = &seen[..]
    else {
        panic!("{seen:?}")
    };
    let (
        &ShmWhat::Put { size: 1, start_ns: a },
        &ShmWhat::Put {
            size: 70_000,
            start_ns: b,
        },
    ) = (one, many)
    else {
        panic!("{seen:?}")
    };
    let &ShmWhat::Get { start_ns: c } = got else {
        panic!("{seen:?}")
    };
    assert!(first - a >= 2_000_000 && second - b >= 2_000_000 && third - c >= 3_000_000);
    assert!(
        seen.iter()
            .all(|(_, event)| event.name == key && event.pid == sender.pid)
    );
    assert_eq!(counted(&tap, Counter::StoreUnreturned), 0);
    assert_eq!(counted(&tap, Counter::ShmCaptured), 3);
    assert!(tap.counters().unwrap().losses().all(|(_, count)| count == 0));
}

#[test]
fn longest_keys() {
    if !can_run() {
        return;
    }
    let Some(mut sender) = store() else { return };
    let (tap, mut reader) = load(&Settings::default());
    let _shm = tap.attach_set(sender.key(), ProbeSet::Shm).unwrap();
    let _store = tap.attach_set(sender.key(), ProbeSet::Store).unwrap();
    for length in [512, 513, 1] {
        let key = "k".repeat(length);
        sender.command(&format!("{{\"put\": \"{key}\", \"size\": 9}}"));
    }
    let lengths: Vec<usize> = events(&mut reader, 2)
        .iter()
        .map(|(_, event)| event.name.len())
        .collect();
    assert_eq!(lengths, [512, 1]);
}

#[test]
fn a_process_without_the_library_gets_no_probe() {
    if !can_run() {
        return;
    }
    let sender = Sender::start(Command::new(python()).arg(script("segments.py")));
    let (tap, _reader) = load(&Settings::default());
    let error = tap.attach_set(sender.key(), ProbeSet::Store).unwrap_err();
    assert!(
        matches!(error, AttachError::NoFunction(ProbeSet::Store)),
        "{error}"
    );
}
