//! Puts segments of shared memory together from the steps of the threads that make and take them. Objects of a store
//! come whole.

use std::collections::HashMap;

use omnitap_ebpf::{ShmHeader, ShmStep};
use rustc_hash::FxBuildHasher;

use crate::wire::{connector::MAX_KEY, shm::ShmEvent};

/// Threads with a put or get under way; beyond it all are forgotten, so that a transfer is lost and counted.
const MAX_THREADS: usize = 4096;
/// How names of segments begin that other software makes: Python's unnamed segments (on Windows, too), `PyTorch`,
/// semaphores, OpenMP.
const OTHERS: [&str; 5] = ["psm_", "wnsm_", "torch_", "sem.", "__KMP"];

/// Why a step gave nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dropped {
    /// The name is of other software's, no UTF-8, or longer than a file's.
    Foreign,
    /// An end without its begin: that step was lost.
    Unpaired,
}

/// What a thread is at.
#[derive(Debug)]
struct Pending {
    is_put: bool,
    /// `None`: the segment is of other software's, made or removed under a lock.
    name: Option<String>,
    start_ns: u64,
    time_ns: u64,
}

/// The threads with a put or get under way.
#[derive(Debug, Default)]
pub(super) struct Threads {
    pending: HashMap<(u32, u32), Pending, FxBuildHasher>,
}

impl Threads {
    /// Takes the next step; steps of one thread come in their order. Hands on what is complete with it.
    pub(super) fn step(
        &mut self,
        step: ShmStep,
        header: &ShmHeader,
        name: &[u8],
        mut each: impl FnMut(ShmEvent<'_>),
    ) -> Result<(), Dropped> {
        let (pid, tid, time_ns) = (header.tgid, header.tid, header.time_ns);
        let start_ns = header.start_ns;
        if step == ShmStep::StorePut || step == ShmStep::StoreGet {
            let name = own_name(name).ok_or(Dropped::Foreign)?;
            each(if step == ShmStep::StorePut {
                ShmEvent::Put {
                    pid,
                    tid,
                    name,
                    size: header.size,
                    start_ns,
                    done_ns: time_ns,
                }
            } else {
                ShmEvent::Get {
                    pid,
                    tid,
                    name,
                    start_ns,
                    done_ns: time_ns,
                }
            });
            return Ok(());
        }
        let thread = (pid, tid);
        if step == ShmStep::Done {
            let Pending {
                is_put,
                name,
                start_ns,
                ..
            } = self.pending.remove(&thread).ok_or(Dropped::Unpaired)?;
            let name = name.ok_or(Dropped::Foreign)?;
            each(if is_put {
                ShmEvent::Put {
                    pid,
                    tid,
                    name: &name,
                    size: header.size,
                    start_ns,
                    done_ns: time_ns,
                }
            } else {
                ShmEvent::Get {
                    pid,
                    tid,
                    name: &name,
                    start_ns,
                    done_ns: time_ns,
                }
            });
            return Ok(());
        }
        let name = own_name(name);
        if step == ShmStep::Unlink {
            // A put goes on: this removes what had its name before.
            let name = name.ok_or(Dropped::Foreign)?;
            each(ShmEvent::Unlinked {
                pid,
                tid,
                name,
                time_ns,
            });
            return Ok(());
        }
        if self.pending.len() >= MAX_THREADS && !self.pending.contains_key(&thread) {
            self.pending.clear();
        }
        let new = Pending {
            is_put: step == ShmStep::Create,
            name: name.map(str::to_owned),
            start_ns,
            time_ns,
        };
        let old = self.pending.insert(thread, new);
        // The lock of a get that came to nothing was dropped by closing its file. What it removed is gone.
        if let Some(old) = old.filter(|old| !old.is_put)
            && let Some(name) = &old.name
        {
            each(ShmEvent::Unlinked {
                pid,
                tid,
                name,
                time_ns: old.time_ns,
            });
        }
        name.map(|_| ()).ok_or(Dropped::Foreign)
    }

    /// A process ended: what its threads were at is lost.
    pub(super) fn forget(&mut self, pid: u32) {
        self.pending.retain(|(of, _), _| *of != pid);
    }
}

/// A name without its slash, if it may be a transfer's.
fn own_name(name: &[u8]) -> Option<&str> {
    let name = std::str::from_utf8(name.strip_prefix(b"/").unwrap_or(name)).ok()?;
    let is_own =
        !name.is_empty() && name.len() <= MAX_KEY && !OTHERS.iter().any(|other| name.starts_with(other));
    is_own.then_some(name)
}

#[cfg(test)]
mod tests {
    use omnitap_ebpf::Kind;
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    /// A [`ShmEvent`] with a name of its own.
    #[derive(Clone, Debug, PartialEq, Eq)]
    enum Seen {
        Put(u32, String, u64, u64, u64),
        Get(u32, String, u64, u64),
        Unlinked(u32, String, u64),
    }
    use Seen::{Get, Put, Unlinked};

    impl Seen {
        fn of(event: ShmEvent<'_>) -> Self {
            match event {
                ShmEvent::Put {
                    tid,
                    name,
                    size,
                    start_ns,
                    done_ns,
                    ..
                } => Put(tid, name.to_owned(), size, start_ns, done_ns),
                ShmEvent::Get {
                    tid,
                    name,
                    start_ns,
                    done_ns,
                    ..
                } => Get(tid, name.to_owned(), start_ns, done_ns),
                ShmEvent::Unlinked {
                    tid, name, time_ns, ..
                } => Unlinked(tid, name.to_owned(), time_ns),
            }
        }
    }

    fn header(step: ShmStep, tid: u32, time_ns: u64, start_ns: u64, size: u64) -> ShmHeader {
        ShmHeader {
            kind: Kind::Shm as u32,
            step: step as u32,
            time_ns,
            tgid: tid / 10,
            tid,
            start_ns,
            size,
            name_len: 0,
            reserved: 0,
        }
    }

    /// Takes steps (step, thread, time, start, size, name).
    fn run(steps: &[(ShmStep, u32, u64, u64, u64, &str)]) -> (Vec<Seen>, Vec<Dropped>, Threads) {
        let mut threads = Threads::default();
        let (mut seen, mut dropped) = (Vec::new(), Vec::new());
        for &(step, tid, time_ns, start_ns, size, name) in steps {
            let header = header(step, tid, time_ns, start_ns, size);
            let taken = threads.step(step, &header, name.as_bytes(), |event| seen.push(Seen::of(event)));
            dropped.extend(taken.err());
        }
        (seen, dropped, threads)
    }

    #[test]
    fn a_put_and_a_get_of_two_threads() {
        let (seen, dropped, threads) = run(&[
            (ShmStep::Create, 11, 5, 3, 0, "/r1_0_0"),
            (ShmStep::Take, 12, 7, 6, 0, "/r0_0_9"),
            (ShmStep::Done, 11, 9, 0, 4096, ""),
            (ShmStep::Done, 12, 10, 0, 0, ""),
        ]);
        assert_eq!(
            seen,
            [
                Put(11, "r1_0_0".to_owned(), 4096, 3, 9),
                Get(12, "r0_0_9".to_owned(), 6, 10)
            ]
        );
        assert!(dropped.is_empty() && threads.pending.is_empty());
    }

    #[test]
    fn a_put_over_an_old_segment_removes_that() {
        let (seen, dropped, _) = run(&[
            (ShmStep::Create, 11, 5, 3, 0, "/a"),
            (ShmStep::Unlink, 11, 6, 0, 0, "/a"),
            (ShmStep::Create, 11, 7, 3, 0, "/a"),
            (ShmStep::Done, 11, 9, 0, 8, ""),
        ]);
        assert_eq!(
            seen,
            [Unlinked(11, "a".to_owned(), 6), Put(11, "a".to_owned(), 8, 3, 9)]
        );
        assert!(dropped.is_empty());
    }

    #[test]
    fn a_put_that_failed_leaves_nothing() {
        let (seen, _, threads) = run(&[
            (ShmStep::Create, 11, 5, 3, 0, "/a"),
            (ShmStep::Create, 11, 15, 13, 0, "/b"),
            (ShmStep::Done, 11, 19, 0, 8, ""),
        ]);
        assert_eq!(seen, [Put(11, "b".to_owned(), 8, 13, 19)]);
        assert!(threads.pending.is_empty());
    }

    #[test]
    fn a_get_that_failed_has_removed_its_segment() {
        let (seen, _, _) = run(&[
            (ShmStep::Take, 11, 5, 3, 0, "/a"),
            (ShmStep::Take, 11, 15, 13, 0, "/b"),
            (ShmStep::Done, 11, 19, 0, 0, ""),
        ]);
        assert_eq!(
            seen,
            [Unlinked(11, "a".to_owned(), 5), Get(11, "b".to_owned(), 13, 19)]
        );
    }

    #[test]
    fn a_lost_begin_spoils_its_end_alone() {
        let (seen, dropped, _) = run(&[
            (ShmStep::Done, 11, 9, 0, 8, ""),
            (ShmStep::Create, 11, 15, 13, 0, "/b"),
            (ShmStep::Done, 11, 19, 0, 7, ""),
        ]);
        assert_eq!(seen, [Put(11, "b".to_owned(), 7, 13, 19)]);
        assert_eq!(dropped, [Dropped::Unpaired]);
    }

    #[rstest]
    #[case::python(b"/psm_4f2a91c0")]
    #[case::python_on_windows(b"/wnsm_12345678")]
    #[case::torch(b"/torch_4242_1_0")]
    #[case::semaphore(b"/sem.mp-abc")]
    #[case::openmp(b"/__KMP_REGISTERED_LIB_1_0")]
    #[case::no_text(b"/a\xff")]
    #[case::too_long(&[b'a'; 513])]
    #[case::empty(b"/")]
    fn foreign_names(#[case] name: &[u8]) {
        let mut threads = Threads::default();
        for step in [ShmStep::Create, ShmStep::Take, ShmStep::Unlink] {
            let taken = threads.step(step, &header(step, 11, 1, 1, 0), name, |e| panic!("{e:?}"));
            assert_eq!(taken, Err(Dropped::Foreign));
        }
        // Its end is foreign too; what has no begin at all was lost.
        for dropped in [Dropped::Foreign, Dropped::Unpaired] {
            let done = threads.step(ShmStep::Done, &header(ShmStep::Done, 11, 1, 1, 9), b"", |e| {
                panic!("{e:?}");
            });
            assert_eq!(done, Err(dropped));
        }
    }

    #[test]
    fn the_longest_name_is_taken() {
        let name = "n".repeat(MAX_KEY);
        assert_eq!(own_name(format!("/{name}").as_bytes()), Some(&*name));
    }

    #[test]
    fn a_process_that_ends_is_forgotten() {
        let (_, _, mut threads) = run(&[
            (ShmStep::Create, 11, 5, 3, 0, "/a"),
            (ShmStep::Create, 21, 5, 3, 0, "/b"),
        ]);
        threads.forget(1);
        assert_eq!(threads.pending.keys().collect::<Vec<_>>(), [&(2, 21)]);
    }

    #[test]
    fn many_threads_stay_bounded() {
        let mut threads = Threads::default();
        for tid in 0..100_000 {
            let header = header(ShmStep::Create, tid, 1, 1, 0);
            assert_eq!(threads.step(ShmStep::Create, &header, b"/a", |_| {}), Ok(()));
            assert!(threads.pending.len() <= MAX_THREADS);
        }
    }

    /// What one thread does in a row, and what must come of it.
    #[derive(Clone, Debug)]
    enum Act {
        Put(u8, u64),
        PutOver(u8, u64),
        FailedPut(u8),
        Get(u8),
        Cleanup(u8),
        Foreign,
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            (any::<u8>(), any::<u64>()).prop_map(|(n, size)| Act::Put(n, size)),
            (any::<u8>(), any::<u64>()).prop_map(|(n, size)| Act::PutOver(n, size)),
            any::<u8>().prop_map(Act::FailedPut),
            any::<u8>().prop_map(Act::Get),
            any::<u8>().prop_map(Act::Cleanup),
            Just(Act::Foreign),
        ]
    }

    type Step = (ShmStep, u64, u64, u64, String);

    /// The steps of an act that begins at `t`, and the events.
    fn of_act(act: &Act, tid: u32, t: u64) -> (Vec<Step>, Vec<Seen>) {
        let key = |n: u8| format!("key_{n}");
        let named = |step, at, start, n| (step, at, start, 0, format!("/{}", key(n)));
        let done = |at, size| (ShmStep::Done, at, 0, size, String::new());
        match *act {
            Act::Put(n, size) => (
                vec![named(ShmStep::Create, t + 1, t, n), done(t + 2, size)],
                vec![Put(tid, key(n), size, t, t + 2)],
            ),
            Act::PutOver(n, size) => (
                vec![
                    named(ShmStep::Create, t + 1, t, n),
                    named(ShmStep::Unlink, t + 2, 0, n),
                    named(ShmStep::Create, t + 3, t, n),
                    done(t + 4, size),
                ],
                vec![Unlinked(tid, key(n), t + 2), Put(tid, key(n), size, t, t + 4)],
            ),
            Act::FailedPut(n) => (vec![named(ShmStep::Create, t + 1, t, n)], vec![]),
            Act::Get(n) => (
                vec![named(ShmStep::Take, t + 1, t, n), done(t + 2, 0)],
                vec![Get(tid, key(n), t, t + 2)],
            ),
            Act::Cleanup(n) => (
                vec![named(ShmStep::Unlink, t + 1, 0, n)],
                vec![Unlinked(tid, key(n), t + 1)],
            ),
            Act::Foreign => (
                vec![
                    (ShmStep::Create, t, t, 0, "/psm_1".to_owned()),
                    done(t + 1, 5),
                    (ShmStep::Unlink, t + 2, 0, 0, "/psm_1".to_owned()),
                ],
                vec![],
            ),
        }
    }

    proptest! {
        /// Threads at work side by side: each gives its own events, whatever the others do in between.
        #[test]
        fn any_interleaving(
            acts in prop::collection::vec(prop::collection::vec(act(), 0..12), 1..6), order in any::<prop::sample::Index>(),
        ) {
            let mut queues = Vec::new();
            let mut expected = Vec::new();
            for (tid, acts) in (11_u32..).zip(&acts) {
                let of_thread: Vec<_> = (0_u64..).zip(acts).map(|(n, act)| of_act(act, tid, n * 10)).collect();
                expected.push((tid, of_thread.iter().flat_map(|(_, seen)| seen.clone()).collect::<Vec<_>>()));
                queues.push((tid, of_thread.into_iter().flat_map(|(steps, _)| steps).collect::<Vec<_>>().into_iter()));
            }
            let mut threads = Threads::default();
            let mut seen = Vec::new();
            let mut turn = order.index(1000);
            while !queues.is_empty() {
                turn = turn * 31 + 7;
                let at = turn % 1_000_003 % queues.len();
                let (tid, steps) = &mut queues[at];
                let Some((step, time_ns, start_ns, size, name)) = steps.next() else {
                    queues.remove(at);
                    continue;
                };
                let header = header(step, *tid, time_ns, start_ns, size);
                let _ = threads.step(step, &header, name.as_bytes(), |event| seen.push(Seen::of(event)));
                turn %= 1_000_003;
            }
            for (tid, events) in expected {
                let of_thread: Vec<_> =
                    seen.iter().filter(|s| matches!(s, Put(t, ..) | Get(t, ..) | Unlinked(t, ..) if *t == tid)).cloned().collect();
                prop_assert_eq!(of_thread, events);
            }
        }

        #[test]
        fn any_steps(steps in prop::collection::vec((0..4_usize, any::<[u32; 2]>(), any::<[u64; 3]>(), prop::collection::vec(any::<u8>(), 0..300)), 0..50)) {
            let mut threads = Threads::default();
            for (step, [tgid, tid], [time_ns, start_ns, size], name) in steps {
                let step = [ShmStep::Create, ShmStep::Take, ShmStep::Unlink, ShmStep::Done][step];
                let header = ShmHeader { tgid, ..header(step, tid, time_ns, start_ns, size) };
                let _ = threads.step(step, &header, &name, |_| {});
            }
        }
    }
}
