//! The committed object in this machine's kernel, against real libzmq processes. Needs root.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
mod common;
#[path = "live/http.rs"]
mod http;
#[path = "live/shm.rs"]
mod shm;

use common::{Frame, Planned, Sender, Tap, content};
use omnitap_ebpf::{Config, Counter, Kind, SIZE_CLASSES, flag, watch};
use rstest::rstest;

const DEFAULT: Config = Config {
    capture_limit: 64 * 1024,
    wakeup_bytes: 1 << 20,
};

fn one(kind: char, size: usize) -> Planned {
    part(0, kind, size, false)
}

fn part(socket: u32, kind: char, size: usize, more: bool) -> Planned {
    Planned {
        socket,
        kind,
        size,
        more,
    }
}

/// Sends a plan under the tap; returns the tap with all records read.
fn send(config: Config, plan: &[Planned]) -> Tap {
    let mut sender = Sender::start(&[]);
    let mut tap = Tap::load(64 << 20, config);
    tap.watch(sender.pid(), watch::FRAMES);
    tap.attach(sender.pid(), &sender.library());
    sender.send(plan);
    sender.finish();
    tap.drain();
    tap
}

/// The record must be frame `n` of the plan, with these lengths captured.
fn check(frame: &Frame, n: usize, planned: Planned, head: usize, tail: usize) {
    let size = planned.size;
    assert_eq!(frame.header.size, size as u64, "size of frame {n}");
    assert_eq!(
        frame.header.flags & flag::MORE != 0,
        planned.more,
        "MORE of frame {n}"
    );
    assert_eq!(
        frame.header.flags & flag::UNREADABLE,
        0,
        "frame {n} was not readable"
    );
    assert!(
        frame.head == content(n, 0..head),
        "head of frame {n}: {planned:?}"
    );
    assert!(
        frame.tail == content(n, size - tail..size),
        "tail of frame {n}: {planned:?}"
    );
}

#[rstest]
#[case::in_the_message('i', 33)]
#[case::behind_its_header('i', 34)]
#[case::by_pointer('d', 100)]
#[case::constant('c', 100)]
fn each_message_type(#[case] kind: char, #[case] size: usize) {
    if !common::can_run() {
        return;
    }
    let plan = [one(kind, size)];
    let tap = send(DEFAULT, &plan);
    assert_eq!(tap.frames.len(), 1);
    check(&tap.frames[0], 0, plan[0], size, 0);
    assert_eq!(tap.counters(), [(Counter::Captured, 1)]);
}

#[test]
fn a_message_received_and_passed_on() {
    if !common::can_run() {
        return;
    }
    let plan = [one('z', 700)];
    let tap = send(DEFAULT, &plan);
    assert_eq!(tap.frames.len(), 2);
    check(&tap.frames[0], 0, plan[0], 700, 0);
    check(&tap.frames[1], 0, plan[0], 700, 0);
    assert_ne!(tap.frames[0].header.socket, tap.frames[1].header.socket);
}

#[test]
fn every_byte_at_the_edges_of_the_size_classes() {
    if !common::can_run() {
        return;
    }
    let mut sizes = vec![2, 3, 32, 33, 34];
    for class in SIZE_CLASSES {
        let class = class as usize;
        sizes.extend([class - 1, class, class + 1]);
    }
    sizes.pop();
    let plan: Vec<Planned> = sizes
        .iter()
        .flat_map(|&size| ['i', 'd', 'c'].map(|kind| one(kind, size)))
        .collect();
    let tap = send(DEFAULT, &plan);
    assert_eq!(tap.frames.len(), plan.len());
    for (n, (frame, planned)) in tap.frames.iter().zip(&plan).enumerate() {
        check(frame, n, *planned, planned.size, 0);
    }
    assert_eq!(tap.counters(), [(Counter::Captured, plan.len() as u64)]);
}

#[rstest]
#[case::default_one_above(65_536, 65_537, 61_440, 4096)]
#[case::default_large(65_536, 10_000_000, 61_440, 4096)]
#[case::limit_above_the_largest_class(1_000_000, 100_000, 61_440, 4096)]
#[case::lowered_to_a_class(1024, 1025, 768, 256)]
#[case::lowered_between_classes(5000, 70_000, 3750, 1250)]
#[case::lowered_just_above_a_class(16_385, 20_000, 12_289, 4096)]
#[case::lowered_below_the_least(64, 1025, 768, 256)]
#[case::lowered_to_nothing(0, 1025, 768, 256)]
#[case::lowered_to_nothing_is_whole_up_to_the_least(0, 1024, 1024, 0)]
fn frames_over_the_limit_give_head_and_tail(
    #[case] capture_limit: u32,
    #[case] size: usize,
    #[case] head: usize,
    #[case] tail: usize,
) {
    if !common::can_run() {
        return;
    }
    let config = Config {
        capture_limit,
        ..DEFAULT
    };
    let plan = [one('i', size), one('c', size)];
    let tap = send(config, &plan);
    assert_eq!(tap.frames.len(), 2);
    for (n, frame) in tap.frames.iter().enumerate() {
        check(frame, n, plan[n], head, tail);
    }
    assert_eq!(tap.counters(), [(Counter::Captured, 2)]);
}

#[test]
fn wake_ups_of_one_byte_are_dropped_and_counted() {
    if !common::can_run() {
        return;
    }
    let plan = [one('i', 1), one('c', 1), one('d', 1), one('i', 0), one('i', 2)];
    let tap = send(DEFAULT, &plan);
    assert_eq!(tap.frames.len(), 1);
    check(&tap.frames[0], 4, plan[4], 2, 0);
    assert_eq!(tap.counters(), [(Counter::Captured, 1), (Counter::Short, 4)]);
}

/// What each part must come out as.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Out {
    Whole,
    Aux,
    Dropped,
}
use Out::{Aux, Dropped, Whole};

#[rstest]
#[case::request(&[(0, 2, true, Whole), (0, 1, true, Whole), (0, 900, false, Whole)])]
#[case::request_with_tensors(
    &[
        (0, 2, true, Whole), (0, 1, true, Whole), (0, 900, true, Whole), (0, 4000, true, Aux),
        (0, 20, false, Aux)
    ]
)]
#[case::delimiter(&[(0, 5, true, Whole), (0, 0, true, Whole), (0, 1, true, Whole), (0, 40, false, Whole)])]
#[case::output(&[(0, 64, false, Whole), (0, 64, false, Whole)])]
#[case::output_with_tensors(
    &[
        (0, 200, true, Whole), (0, 256, true, Aux), (0, 1, true, Aux), (0, 300, false, Aux),
        (0, 64, false, Whole)
    ]
)]
#[case::one_byte_at_the_end_is_dropped_and_ends_the_message(
    &[(0, 200, true, Whole), (0, 1, false, Dropped), (0, 64, false, Whole)]
)]
#[case::one_byte_after_prefixes(&[(0, 2, true, Whole), (0, 1, false, Dropped), (0, 64, false, Whole)])]
#[case::small_payload_at_the_end(&[(0, 2, true, Whole), (0, 3, false, Whole), (0, 64, false, Whole)])]
#[case::two_sockets_of_one_thread(
    &[
        (0, 200, true, Whole), (1, 1, true, Whole), (0, 300, true, Aux), (1, 500, true, Whole),
        (0, 64, false, Aux), (1, 600, false, Aux), (1, 70, false, Whole), (0, 70, false, Whole)
    ]
)]
fn parts_of_messages(#[case] parts: &[(u32, usize, bool, Out)]) {
    if !common::can_run() {
        return;
    }
    let plan: Vec<Planned> = parts.iter().map(|p| part(p.0, 'i', p.1, p.2)).collect();
    let tap = send(DEFAULT, &plan);
    let mut frames = tap.frames.iter();
    for (n, (planned, p)) in plan.iter().zip(parts).enumerate() {
        match p.3 {
            Dropped => {}
            Whole => {
                let frame = frames.next().unwrap();
                check(frame, n, *planned, planned.size, 0);
                assert_eq!(frame.header.flags & flag::AUX, 0, "part {n}");
            }
            Aux => {
                let frame = frames.next().unwrap();
                check(
                    &Frame {
                        tail: Vec::new(),
                        ..frame.clone()
                    },
                    n,
                    *planned,
                    0,
                    0,
                );
                assert_eq!(frame.header.flags & flag::AUX, flag::AUX, "part {n}");
            }
        }
    }
    assert!(frames.next().is_none());
}

#[test]
fn a_message_that_was_given_up_does_not_hide_the_next_one_for_long() {
    if !common::can_run() {
        return;
    }
    let mut sender = Sender::start(&[]);
    let mut tap = Tap::load(1 << 20, DEFAULT);
    tap.watch(sender.pid(), watch::FRAMES);
    tap.attach(sender.pid(), &sender.library());
    sender.send(&[part(0, 'i', 200, true)]);
    std::thread::sleep(std::time::Duration::from_millis(1500));
    sender.send(&[part(0, 'i', 300, false)]);
    sender.finish();
    tap.drain();
    let lens: Vec<_> = tap.frames.iter().map(|f| f.head.len()).collect();
    assert_eq!(lens, [200, 300]);
}

#[test]
fn what_cannot_be_read_is_counted() {
    if !common::can_run() {
        return;
    }
    let tap = send(DEFAULT, &[one('x', 20), one('u', 100), one('i', 64)]);
    assert_eq!(tap.frames.len(), 1);
    assert_eq!(
        tap.counters(),
        [
            (Counter::Captured, 1),
            (Counter::LostUnreadable, 1),
            (Counter::LostUnknownType, 1)
        ]
    );
}

#[test]
fn a_full_ring_is_counted_frame_by_frame() {
    if !common::can_run() {
        return;
    }
    let mut sender = Sender::start(&[]);
    let mut tap = Tap::load(64 << 10, DEFAULT);
    tap.watch(sender.pid(), watch::FRAMES);
    tap.attach(sender.pid(), &sender.library());
    let plan = vec![one('i', 1000); 500];
    sender.send(&plan);
    sender.finish();
    tap.drain();
    let (captured, lost) = (tap.counter(Counter::Captured), tap.counter(Counter::LostRingFull));
    assert_eq!(captured, tap.frames.len() as u64);
    assert!(lost > 0);
    assert_eq!(captured + lost, 500);
    for (n, frame) in tap.frames.iter().enumerate() {
        check(frame, n, plan[n], 1000, 0);
    }
}

#[test]
fn a_process_that_is_not_watched_gives_no_record() {
    if !common::can_run() {
        return;
    }
    let mut sender = Sender::start(&[]);
    let mut tap = Tap::load(1 << 20, DEFAULT);
    tap.watch(sender.pid(), watch::LIFE);
    tap.attach(sender.pid(), &sender.library());
    sender.send(&[one('i', 64)]);
    sender.finish();
    tap.drain();
    assert!(tap.frames.is_empty());
    assert_eq!(tap.counters(), [(Counter::Unwatched, 1)]);
}

#[test]
fn headers_name_process_thread_and_time() {
    if !common::can_run() {
        return;
    }
    let mut sender = Sender::start(&[]);
    let pid = sender.pid();
    let mut tap = Tap::load(1 << 20, DEFAULT);
    tap.watch(pid, watch::FRAMES);
    tap.attach(pid, &sender.library());
    let before = monotonic();
    sender.send(&[one('i', 64), one('i', 64)]);
    sender.finish();
    let after = monotonic();
    tap.drain();
    assert_eq!(tap.frames.len(), 2);
    for frame in &tap.frames {
        assert_eq!((frame.header.tgid, frame.header.tid), (pid, pid));
        assert!((before..after).contains(&frame.header.time_ns));
    }
    assert!(tap.frames[0].header.time_ns < tap.frames[1].header.time_ns);
    assert_eq!(tap.frames[0].header.socket, tap.frames[1].header.socket);
}

#[test]
fn processes_are_reported() {
    if !common::can_run() {
        return;
    }
    let mut tap = Tap::load(1 << 20, DEFAULT);
    tap.attach_tracepoints();
    // The shell forks `true` because a further command follows; `read` holds it until it is watched.
    let mut shell = std::process::Command::new("sh")
        .args(["-c", "read _; /bin/true; exit 0"])
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let pid = shell.id();
    tap.watch(pid, watch::LIFE);
    drop(shell.stdin.take());
    shell.wait().unwrap();
    tap.drain();
    let of_shell: Vec<Kind> = tap
        .processes
        .iter()
        .filter(|(_, r)| r.tgid == pid)
        .map(|(k, _)| *k)
        .collect();
    assert_eq!(of_shell, [Kind::Exec, Kind::Fork, Kind::Exit]);
    let fork_at = tap
        .processes
        .iter()
        .position(|(k, r)| *k == Kind::Fork && r.tgid == pid)
        .unwrap();
    assert!(
        tap.processes[fork_at..]
            .iter()
            .any(|(k, r)| *k == Kind::Exec && r.tgid != pid),
        "no exec of the child"
    );
    assert_eq!(tap.counter(Counter::LostProcess), 0);
}

/// Every frame of a long mixed run, in order, byte by byte.
#[test]
fn no_frame_of_a_long_run_is_lost() {
    if !common::can_run() {
        return;
    }
    let sizes = [2, 33, 64, 200, 256, 700, 1024, 3000, 10_000, 40_000];
    let plan: Vec<Planned> = (0..5000)
        .map(|n| one(['i', 'd', 'c'][n % 3], sizes[n * 7 % sizes.len()]))
        .collect();
    let mut sender = Sender::start(&[]);
    let mut tap = Tap::load(16 << 20, DEFAULT);
    tap.watch(sender.pid(), watch::FRAMES);
    tap.attach(sender.pid(), &sender.library());
    // A part of the ring's size at a time: how fast this reader gets its share of the CPU is no matter here.
    for (n, chunk) in plan.chunks(500).enumerate() {
        sender.send(chunk);
        let start = std::time::Instant::now();
        while tap.frames.len() < n * 500 + chunk.len() && start.elapsed().as_secs() < 120 {
            tap.drain();
        }
    }
    sender.finish();
    tap.drain();
    assert_eq!(tap.counters(), [(Counter::Captured, 5000)]);
    assert_eq!(tap.frames.len(), plan.len());
    for (n, (frame, planned)) in tap.frames.iter().zip(&plan).enumerate() {
        check(frame, n, *planned, planned.size, 0);
    }
}

fn monotonic() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: a valid struct.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    u64::try_from(time.tv_sec).unwrap() * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap()
}
