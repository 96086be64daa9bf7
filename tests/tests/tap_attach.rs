//! Attaching and detaching: whatever becomes of paths, files, namespaces and processes.

mod tap_support;

use std::{
    process::Command,
    time::{Duration, Instant},
};

use omnitap::{
    host::identity::ProcessKey,
    tap::{AttachError, Attached, Event, FailureReason, Reader, Settings, Tap},
};
use tap_support::{
    Sender, any_frames, bytes_at_probe, can_run, content, copy_pyzmq, frames, load, python, script,
    site_packages, until,
};

/// Attaches, and sees one frame whole.
fn works(tap: &Tap, reader: &mut Reader, sender: &mut Sender) -> Attached {
    let attached = tap.attach(sender.key()).unwrap_or_else(|e| panic!("{e}"));
    sender.send(7, &[300], true);
    let seen = frames(reader, sender.pid, 1);
    assert_eq!(seen[0].head, content(7, 300));
    attached
}

#[test]
fn odd_paths() {
    if !can_run() {
        return;
    }
    let (tap, mut reader) = load(&Settings::default());
    for name in [
        "with spaces  in it",
        "gone (deleted)",
        "new\nline",
        "back\\012slash",
        "7f00-8f00 r-xp 0 0:0 1 ",
        "\u{e4}\u{1f980}",
    ] {
        let dir = tempfile::tempdir().unwrap();
        let packages = dir.path().join(name);
        let library = copy_pyzmq(&packages);
        // In the file's own name too.
        let odd = library.with_file_name(format!("libzmq {name}.so"));
        std::fs::rename(&library, &odd).unwrap();
        std::os::unix::fs::symlink(&odd, &library).unwrap();
        let mut sender = Sender::pyzmq(Some(&packages));
        let attached = works(&tap, &mut reader, &mut sender);
        assert!(
            attached.probes()[0].path.contains("libzmq"),
            "{:?}",
            attached.probes()
        );
    }
}

#[test]
fn path_that_is_no_utf8() {
    use std::os::unix::ffi::OsStrExt;
    if !can_run() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let packages = dir.path().join(std::ffi::OsStr::from_bytes(b"\xff\xfe"));
    copy_pyzmq(&packages);
    let (tap, mut reader) = load(&Settings::default());
    let mut sender = Sender::pyzmq(Some(&packages));
    let _attached = works(&tap, &mut reader, &mut sender);
}

#[test]
fn deleted_library() {
    if !can_run() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let library = copy_pyzmq(dir.path());
    let (tap, mut reader) = load(&Settings::default());
    let mut sender = Sender::pyzmq(Some(dir.path()));
    std::fs::remove_file(&library).unwrap();
    let attached = works(&tap, &mut reader, &mut sender);
    assert!(attached.probes()[0].path.ends_with(" (deleted)"));
}

/// An upgrade while the process runs: the path has another file now, in which the function lies elsewhere.
#[test]
fn replaced_library() {
    if !can_run() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let library = copy_pyzmq(dir.path());
    let (tap, mut reader) = load(&Settings::default());
    let mut sender = Sender::pyzmq(Some(dir.path()));
    let other = dir.path().join("other.so");
    let built = Command::new("gcc")
        .args(["-shared", "-fPIC", "-x", "c", "-", "-o"])
        .arg(&other)
        .stdin(std::process::Stdio::piped())
        .spawn()
        .and_then(|mut gcc| {
            use std::io::Write;
            gcc.stdin
                .take()
                .unwrap()
                .write_all(b"int zmq_msg_send(void *m, void *s, int f) { return 0; }")?;
            gcc.wait()
        })
        .unwrap();
    assert!(built.success());
    std::fs::rename(&other, &library).unwrap();
    let _attached = works(&tap, &mut reader, &mut sender);
}

/// A container in short: its own mount and PID namespaces, the library on a file system that is mounted there
/// alone.
#[test]
fn other_namespaces() {
    if !can_run() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let inside = dir.path().join("inside");
    std::fs::create_dir(&inside).unwrap();
    let script = format!(
        "set -e; mount -t tmpfs none {inside}; cp -a {packages}/zmq {packages}/pyzmq.libs {inside}; \
         PYTHONPATH={inside} exec {python} {sender}",
        inside = inside.display(),
        packages = site_packages().display(),
        python = python().display(),
        sender = script("sender.py").display(),
    );
    let mut sender = Sender::start(
        Command::new("unshare")
            .args([
                "--mount",
                "--pid",
                "--fork",
                "--mount-proc",
                "--kill-child",
                "sh",
                "-c",
            ])
            .arg(script),
    );
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", sender.pid)).unwrap();
    sender.pid = children.trim().parse().unwrap();
    assert!(
        std::fs::read_dir(&inside).unwrap().next().is_none(),
        "nothing is seen from outside"
    );
    let (tap, mut reader) = load(&Settings::default());
    let attached = works(&tap, &mut reader, &mut sender);
    assert!(attached.probes()[0].path.starts_with(inside.to_str().unwrap()));
}

/// The breakpoint is in the probed process alone, and nothing is left of it afterwards.
#[test]
fn scope_and_traces() {
    if !can_run() {
        return;
    }
    let (tap, mut reader) = load(&Settings::default());
    let (mut probed, mut other) = (Sender::pyzmq(None), Sender::pyzmq(None));
    let attached = works(&tap, &mut reader, &mut probed);
    let probe = attached.probes()[0].clone();
    let (memory, file) = bytes_at_probe(probed.pid, &probe);
    assert_ne!(memory, file, "the breakpoint is there");
    let (memory, file) = bytes_at_probe(other.pid, &probe);
    assert_eq!(memory, file, "another process with the same file is untouched");
    other.send(1, &[100], true);
    drop(attached);
    assert_eq!(tap.detach_all(Duration::from_secs(5)), 0);
    let (memory, file) = bytes_at_probe(probed.pid, &probe);
    assert_eq!(memory, file, "the breakpoint is gone");
    probed.send(1, &[100], true);
    let stats = tap.stats();
    assert_eq!((stats.processes, stats.detaches, stats.detaching), (0, 1, 0));
    // Nothing was seen of the other one, nor of the first one after the end.
    assert!(!any_frames(&mut reader));
}

/// Probed, released, probed again: each time it works.
#[test]
fn again() {
    if !can_run() {
        return;
    }
    let (tap, mut reader) = load(&Settings::default());
    let mut sender = Sender::pyzmq(None);
    for _ in 0..3 {
        let attached = works(&tap, &mut reader, &mut sender);
        assert!(matches!(tap.attach(sender.key()), Err(AttachError::Already)));
        drop(attached);
    }
    assert_eq!(tap.stats().failures[0][FailureReason::Already as usize], 3);
}

#[test]
fn process_that_ends() {
    if !can_run() {
        return;
    }
    let (tap, mut reader) = load(&Settings::default());
    let mut sender = Sender::pyzmq(None);
    let (pid, key) = (sender.pid, sender.key());
    tap.watch(pid).unwrap();
    let attached = works(&tap, &mut reader, &mut sender);
    sender.command("{\"spawn\": true}");
    assert!(until(
        &mut reader,
        |event| matches!(event, Event::Fork { parent, .. } if *parent == pid)
    ));
    sender.end();
    assert!(until(
        &mut reader,
        |event| matches!(event, Event::Exit { pid: p, .. } if *p == pid)
    ));
    assert!(matches!(tap.attach(key), Err(AttachError::Already)));
    drop(attached);
    tap.unwatch(pid).unwrap();
    assert_eq!(tap.detach_all(Duration::from_secs(5)), 0);
    assert!(matches!(tap.attach(key), Err(AttachError::Gone)));
    assert_eq!(tap.stats().processes, 0);
}

#[test]
fn new_processes_are_told() {
    if !can_run() {
        return;
    }
    let (tap, mut reader) = load(&Settings::default());
    assert!(
        tap.missing_tracepoints().is_empty(),
        "{:?}",
        tap.missing_tracepoints()
    );
    let mut child = Command::new("true").spawn().unwrap();
    let pid = child.id();
    assert!(until(
        &mut reader,
        |event| matches!(event, Event::Exec { pid: p, .. } if *p == pid)
    ));
    child.wait().unwrap();
}

#[test]
fn what_cannot_be_probed() {
    if !can_run() {
        return;
    }
    let (tap, _reader) = load(&Settings::default());
    let mut child = Command::new("sleep").arg("60").spawn().unwrap();
    let pid = child.id();
    let start_ticks = omnitap::tap::start_ticks(pid).unwrap();
    let wait_for_exec = Instant::now();
    while !std::fs::read_to_string(format!("/proc/{pid}/comm"))
        .unwrap()
        .starts_with("sleep")
        && wait_for_exec.elapsed() < Duration::from_secs(5)
    {
        std::thread::yield_now();
    }
    let error = tap.attach(ProcessKey { pid, start_ticks }).unwrap_err();
    assert!(matches!(error, AttachError::NoFunction(_)), "{error}");
    assert!(error.is_transient());
    // The pid passed to another process.
    let error = tap
        .attach(ProcessKey {
            pid,
            start_ticks: start_ticks - 1,
        })
        .unwrap_err();
    assert!(matches!(error, AttachError::Gone), "{error}");
    child.kill().unwrap();
    child.wait().unwrap();
    let [failures, ..] = tap.stats().failures;
    assert_eq!(
        (
            failures[FailureReason::NoFunction as usize],
            failures[FailureReason::Gone as usize]
        ),
        (1, 1)
    );
}

/// As many processes as a node has stages: all probes are off well before SIGKILL would come.
#[test]
fn many_processes_are_released_together() {
    const PROCESSES: usize = 12;
    if !can_run() {
        return;
    }
    let (tap, mut reader) = load(&Settings::default());
    let mut senders: Vec<_> = (0..PROCESSES).map(|_| Sender::pyzmq(None)).collect();
    let attached: Vec<_> = senders
        .iter_mut()
        .map(|sender| works(&tap, &mut reader, sender))
        .collect();
    let start = Instant::now();
    let left = tap.detach_all(Duration::from_secs(5));
    let stats = tap.stats();
    eprintln!(
        "{PROCESSES} processes: attached in {:?} each, all released in {:?} ({:?} a probe)",
        stats.attach_time / 12,
        start.elapsed(),
        stats.detach_time / 12
    );
    assert_eq!(left, 0);
    for (sender, attached) in senders.iter().zip(&attached) {
        let (memory, file) = bytes_at_probe(sender.pid, &attached.probes()[0]);
        assert_eq!(memory, file);
    }
}
