//! The programs of shared memory, against a process that hands segments on through real libc.

use std::collections::HashMap;

use omnitap_ebpf::{Counter, ShmStep, watch};
use rstest::rstest;

use super::{
    DEFAULT,
    common::{self, Done, Segments, Step, Tap},
};

/// A process under the tap, and the tap.
fn start(ring_bytes: u32) -> (Segments, Tap) {
    let segments = Segments::start();
    let mut tap = Tap::load(ring_bytes, DEFAULT);
    tap.watch(segments.pid(), watch::SHM);
    tap.attach_shm(segments.pid());
    (segments, tap)
}

/// Names of segments are the host's: each test and run has its own.
fn key(name: &str) -> String {
    format!("omnitap-{}-{name}", std::process::id())
}

/// The step must be of this kind and segment, by this thread, within its times; `begun`: so must its start.
fn check(step: &Step, kind: ShmStep, name: &str, done: Done, begun: bool) {
    assert_eq!((step.kind, step.name.as_str()), (kind, name), "{step:?}");
    assert_eq!(step.header.tid, done.tid, "{step:?}");
    let times = done.before..=done.after;
    assert!(times.contains(&step.header.time_ns), "{step:?} {done:?}");
    if begun {
        assert!(times.contains(&step.header.start_ns), "{step:?} {done:?}");
        assert!(step.header.start_ns < step.header.time_ns, "{step:?}");
    } else {
        assert_eq!(step.header.start_ns, 0, "{step:?}");
    }
}

fn check_put(steps: &[Step], key: &str, size: u64, done: Done) {
    check(&steps[0], ShmStep::Create, &format!("/{key}"), done, true);
    check(&steps[1], ShmStep::Done, "", done, false);
    assert_eq!(steps[1].header.size, size);
}

fn check_get(steps: &[Step], key: &str, done: Done) {
    check(&steps[0], ShmStep::Take, &format!("/{key}"), done, true);
    check(&steps[1], ShmStep::Done, "", done, false);
}

#[rstest]
#[case::byte(1)]
#[case::odd(65_537)]
#[case::large(8 << 20)]
fn a_put_and_a_get(#[case] size: u64) {
    if !common::can_run() {
        return;
    }
    let (mut segments, mut tap) = start(1 << 20);
    let pid = segments.pid();
    let key = key(&format!("hop{size}"));
    let put = segments.order(&format!("put {key} {size}")).unwrap();
    let get = segments.order(&format!("get {key}")).unwrap();
    segments.finish();
    tap.drain();
    assert_eq!(tap.steps.len(), 4);
    check_put(&tap.steps[..2], &key, size, put);
    check_get(&tap.steps[2..], &key, get);
    assert!(tap.steps.iter().all(|step| step.header.tgid == pid));
    // The lock, the size; the open, the lock, the open under it.
    assert_eq!(
        tap.counters(),
        [(Counter::ShmCaptured, 4), (Counter::ShmNoted, 5)]
    );
}

#[test]
fn polls_give_no_record() {
    if !common::can_run() {
        return;
    }
    let (mut segments, mut tap) = start(1 << 20);
    let key = key("late");
    segments.order(&format!("poll {key} 1000")).unwrap();
    tap.drain();
    assert!(tap.steps.is_empty());
    assert_eq!(tap.counters(), [(Counter::ShmNoted, 1000)]);
    // The poll that finds it is the get's start, not one before.
    segments.order(&format!("put {key} 10")).unwrap();
    segments.order(&format!("poll {key}x 5")).unwrap();
    let get = segments.order(&format!("get {key}")).unwrap();
    segments.finish();
    tap.drain();
    check_get(&tap.steps[2..], &key, get);
    assert_eq!(tap.steps.len(), 4);
}

#[test]
fn a_put_over_an_old_segment() {
    if !common::can_run() {
        return;
    }
    let (mut segments, mut tap) = start(1 << 20);
    let key = key("twice");
    let name = format!("/{key}");
    let first = segments.order(&format!("put {key} 100")).unwrap();
    let second = segments.order(&format!("put {key} 200")).unwrap();
    let get = segments.order(&format!("get {key}")).unwrap();
    segments.finish();
    tap.drain();
    assert_eq!(tap.steps.len(), 8);
    check_put(&tap.steps[..2], &key, 100, first);
    check(&tap.steps[2], ShmStep::Create, &name, second, true);
    check(&tap.steps[3], ShmStep::Unlink, &name, second, false);
    check_put(&tap.steps[4..6], &key, 200, second);
    check_get(&tap.steps[6..], &key, get);
}

#[test]
fn a_segment_that_nobody_takes() {
    if !common::can_run() {
        return;
    }
    let (mut segments, mut tap) = start(1 << 20);
    let key = key("left");
    let put = segments.order(&format!("put {key} 100")).unwrap();
    let cleanup = segments.order(&format!("cleanup {key}")).unwrap();
    segments.finish();
    tap.drain();
    assert_eq!(tap.steps.len(), 3);
    check_put(&tap.steps[..2], &key, 100, put);
    check(&tap.steps[2], ShmStep::Unlink, &format!("/{key}"), cleanup, false);
}

/// A get that knows of the segment opens it under the lock alone: that begins with the lock, whatever the
/// thread opened long before.
#[test]
fn a_get_without_a_poll() {
    if !common::can_run() {
        return;
    }
    let (mut segments, mut tap) = start(1 << 20);
    let key = key("known");
    for size in 1..=3 {
        segments.order(&format!("put {key} {size}")).unwrap();
        let get = segments.order(&format!("getheld {key}")).unwrap();
        tap.drain();
        check_get(&tap.steps[2..], &key, get);
        tap.steps.clear();
    }
    segments.order(&format!("put {key} 9")).unwrap();
    segments.order(&format!("poll {key}x 1")).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(1100));
    let get = segments.order(&format!("getheld {key}")).unwrap();
    segments.finish();
    tap.drain();
    check_get(&tap.steps[2..], &key, get);
}

#[test]
fn other_segments_and_locks_give_at_most_their_removal() {
    if !common::can_run() {
        return;
    }
    let (mut segments, mut tap) = start(1 << 20);
    let key = key("other");
    segments.order("lock 100").unwrap();
    let made = segments.order(&format!("segment {key} 100")).unwrap();
    segments.order("lock 100").unwrap();
    segments.finish();
    tap.drain();
    assert_eq!(tap.steps.len(), 1);
    check(&tap.steps[0], ShmStep::Unlink, &format!("/{key}"), made, false);
}

#[test]
fn threads_side_by_side() {
    const PAIRS: usize = 6;
    const HOPS: usize = 50;
    if !common::can_run() {
        return;
    }
    let (mut segments, mut tap) = start(16 << 20);
    segments.tell(&format!("threads {PAIRS} {HOPS} 1000"));
    let mut told = HashMap::new();
    loop {
        let line = segments.line();
        let words: Vec<_> = line.split(' ').collect();
        let [what, name, tid, before, after] = words[..] else {
            assert_eq!(line, "done");
            break;
        };
        let done = Done {
            tid: tid.parse().unwrap(),
            before: before.parse().unwrap(),
            after: after.parse().unwrap(),
        };
        told.insert((what.to_owned(), name.to_owned()), done);
    }
    segments.finish();
    tap.drain();
    assert_eq!(told.len(), 2 * PAIRS * HOPS);
    assert_eq!(tap.counter(Counter::ShmCaptured), 4 * (PAIRS * HOPS) as u64);
    let mut of_thread: HashMap<u32, Vec<Step>> = HashMap::new();
    for step in tap.steps {
        of_thread.entry(step.header.tid).or_default().push(step);
    }
    assert_eq!(of_thread.len(), 2 * PAIRS);
    for ((what, name), done) in told {
        let steps = &of_thread[&done.tid];
        let at = steps
            .iter()
            .position(|step| step.name == format!("/{name}"))
            .unwrap();
        let steps = &steps[at..at + 2];
        if what == "put" {
            let hop: u64 = name.rsplit('_').next().unwrap().parse().unwrap();
            check_put(steps, &name, 1000 + hop, done);
        } else {
            check_get(steps, &name, done);
        }
    }
}

#[test]
fn the_longest_name_is_whole() {
    if !common::can_run() {
        return;
    }
    let (mut segments, mut tap) = start(1 << 20);
    // Its lock file's name is longer by 18 bytes, and must be one, too.
    let key = format!("{:n<237}", key("long"));
    let put = segments.order(&format!("put {key} 7")).unwrap();
    segments.order(&format!("cleanup {key}")).unwrap();
    segments.finish();
    tap.drain();
    check_put(&tap.steps[..2], &key, 7, put);
}

#[test]
fn a_name_that_cannot_be_read_is_counted() {
    if !common::can_run() {
        return;
    }
    let (mut segments, mut tap) = start(1 << 20);
    segments.order("badname").unwrap();
    segments.finish();
    tap.drain();
    assert!(tap.steps.is_empty());
    assert_eq!(tap.counters(), [(Counter::LostShmUnreadable, 1)]);
}

#[test]
fn a_full_ring_is_counted_step_by_step() {
    if !common::can_run() {
        return;
    }
    let (mut segments, mut tap) = start(64 << 10);
    segments.time("hops 500 10");
    segments.finish();
    tap.drain();
    let (captured, lost) = (
        tap.counter(Counter::ShmCaptured),
        tap.counter(Counter::LostShmRingFull),
    );
    assert_eq!(captured, tap.steps.len() as u64);
    assert!(lost > 0);
    assert_eq!(captured + lost, 2000);
}

#[test]
fn a_process_that_is_not_watched_gives_no_step() {
    if !common::can_run() {
        return;
    }
    let (mut segments, mut tap) = start(1 << 20);
    tap.watch(segments.pid(), watch::FRAMES | watch::LIFE);
    segments.time("hops 10 10");
    segments.finish();
    tap.drain();
    assert!(tap.steps.is_empty());
    let counters = tap.counters();
    assert!(
        matches!(counters[..], [(Counter::ShmIgnored, 70..)]),
        "{counters:?}"
    );
}
