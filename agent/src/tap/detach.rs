//! Takes probes off, away from the threads that have other work.
//!
//! Closing the descriptor of a single probe waits for RCU grace periods, most of it under one lock of the kernel
//! (`event_mutex`): 0.04 s on Linux 6.8, 0.1 to 0.25 s on 6.12 and 6.18. Closed side by side they share some
//! of it (measured on 6.18 with 2 CPUs: 12 probes in 1.0 s, 40 in 3.4 s against 3.9 s). Links with many probes
//! ([`super::multi`]) wait without that lock, so that all of them wait for the same grace periods. A process is out of
//! the map of watched ones before, so that its probe does nothing more meanwhile.

use std::{
    collections::VecDeque,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use aya::programs::uprobe::UProbeLink;
use parking_lot::{Condvar, Mutex};

/// What holds probes in a process. Dropping it takes them off.
#[derive(Debug)]
pub(super) enum Link {
    /// One probe.
    Single(#[expect(dead_code, reason = "held until it is dropped")] UProbeLink),
    /// So many.
    Multi(#[expect(dead_code, reason = "as above")] OwnedFd, usize),
}

impl Link {
    fn probes(&self) -> usize {
        match self {
            Self::Single(_) => 1,
            Self::Multi(_, probes) => *probes,
        }
    }
}

/// Most links that are closed at once.
const MAX_THREADS: usize = 64;

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Link>,
    /// Links being closed now, one a thread.
    busy: usize,
    /// Probes of all of them.
    probes: usize,
}

/// The probes that are on their way out.
#[derive(Debug, Default)]
pub(super) struct Detacher {
    state: Mutex<State>,
    idle: Condvar,
    pub(super) done: AtomicU64,
    pub(super) nanos: AtomicU64,
}

impl Detacher {
    /// Takes probes off soon; returns at once. Threads live only while there are probes.
    pub(super) fn detach(self: &Arc<Self>, links: impl IntoIterator<Item = Link>) {
        let mut state = self.state.lock();
        for link in links {
            state.probes += link.probes();
            state.waiting.push_back(link);
        }
        let wanted = state.waiting.len().min(MAX_THREADS.saturating_sub(state.busy));
        for _ in 0..wanted {
            let this = Arc::clone(self);
            let thread = std::thread::Builder::new()
                .name("detach".into())
                .stack_size(64 << 10)
                .spawn(move || this.work());
            match thread {
                Ok(_) => state.busy += 1,
                // No thread to be had: if none is at work either, this one does it.
                Err(_) if state.busy == 0 => {
                    state.busy += 1;
                    drop(state);
                    self.work();
                    return;
                }
                Err(_) => break,
            }
        }
    }

    fn work(&self) {
        loop {
            let link = {
                let mut state = self.state.lock();
                let Some(link) = state.waiting.pop_front() else {
                    state.busy -= 1;
                    self.idle.notify_all();
                    return;
                };
                link
            };
            let start = Instant::now();
            let probes = link.probes();
            drop(link);
            self.nanos.fetch_add(nanos(start.elapsed()), Ordering::Relaxed);
            self.done.fetch_add(probes as u64, Ordering::Relaxed);
            self.state.lock().probes -= probes;
        }
    }

    /// Probes that are not off yet.
    pub(super) fn pending(&self) -> usize {
        self.state.lock().probes
    }

    /// Waits until all are off; returns how many are not after `timeout`.
    pub(super) fn wait(&self, timeout: Duration) -> usize {
        let deadline = Instant::now() + timeout;
        let mut state = self.state.lock();
        while state.waiting.len() + state.busy > 0 {
            if self.idle.wait_until(&mut state, deadline).timed_out() {
                break;
            }
        }
        state.probes
    }
}

pub(super) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
