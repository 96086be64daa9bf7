//! The open connections: how many there may be, how many bytes of answers may wait in memory, and which connection
//! makes room for a new one.
//!
//! A client that is slow on purpose holds up nobody: when all places are taken, the connection goes that has waited
//! longest for its client. An honest client's request is there within milliseconds, so that it never is the oldest.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;
use tokio::sync::Notify;

/// Bytes of answers that may wait for their clients: with more, the client that takes longest is cut off.
const ANSWERS: usize = 4 << 20;

/// Where an exchange stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Between an answer and the next request: a scrape interval and more.
    Idle,
    /// From the connection, or the first byte of a further request, until the request is there and allowed.
    Request,
    /// From there to the first byte of the answer.
    Working,
    /// From the first byte of an answer to its last. A client that takes byte after byte does not get more time.
    Answer,
}

/// The connections of a server.
#[derive(Debug)]
pub(super) struct Connections {
    max: usize,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    entries: HashMap<u64, Entry>,
    /// Counts admissions and changes of phase: a clock that never stands still.
    turn: u64,
    /// Bytes of answers in memory.
    held: usize,
}

#[derive(Debug)]
struct Entry {
    phase: Phase,
    since: u64,
    held: usize,
    cut: Arc<Notify>,
}

impl Open {
    /// Cuts off the connection that has been longest in this phase, other than `spare`. Its place is free at once.
    fn cut_oldest(&mut self, phase: Phase, spare: Option<u64>) -> bool {
        let oldest = self
            .entries
            .iter()
            .filter(|(id, entry)| entry.phase == phase && Some(**id) != spare)
            .min_by_key(|(_, entry)| entry.since)
            .map(|(id, _)| *id);
        oldest.is_some_and(|id| self.remove(id))
    }

    fn remove(&mut self, id: u64) -> bool {
        let Some(entry) = self.entries.remove(&id) else {
            return false;
        };
        self.held -= entry.held;
        entry.cut.notify_one();
        true
    }
}

impl Connections {
    pub(super) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self {
            max,
            open: Mutex::default(),
        })
    }

    /// A place for a new connection. `Admitted::cut` tells that another had to go for it; `None`: all are being
    /// answered.
    pub(super) fn admit(self: &Arc<Self>) -> Option<Admitted> {
        let mut open = self.open.lock();
        let full = open.entries.len() >= self.max;
        if full && !open.cut_oldest(Phase::Request, None) && !open.cut_oldest(Phase::Idle, None) {
            return None;
        }
        open.turn += 1;
        let id = open.turn;
        let cut = Arc::new(Notify::new());
        open.entries.insert(
            id,
            Entry {
                phase: Phase::Request,
                since: id,
                held: 0,
                cut: Arc::clone(&cut),
            },
        );
        let place = Place {
            id,
            cut,
            connections: Arc::clone(self),
        };
        Some(Admitted {
            place: Arc::new(place),
            cut: full,
        })
    }
}

/// A new connection's place.
#[derive(Debug)]
pub(super) struct Admitted {
    pub(super) place: Arc<Place>,
    /// Whether another connection was cut off for it.
    pub(super) cut: bool,
}

/// The place of a connection; dropped, it is free.
#[derive(Debug)]
pub(super) struct Place {
    id: u64,
    cut: Arc<Notify>,
    connections: Arc<Connections>,
}

impl Place {
    /// The exchange has come to a phase. After an answer nothing of it is held any more.
    pub(super) fn enter(&self, phase: Phase) {
        let mut open = self.connections.open.lock();
        open.turn += 1;
        let turn = open.turn;
        let Some(entry) = open.entries.get_mut(&self.id) else {
            return;
        };
        entry.phase = phase;
        entry.since = turn;
        if phase == Phase::Idle {
            let held = std::mem::take(&mut entry.held);
            open.held -= held;
        }
    }

    /// An answer of this many bytes is in memory until it is out.
    pub(super) fn hold(&self, bytes: usize) {
        let mut open = self.connections.open.lock();
        let Some(entry) = open.entries.get_mut(&self.id) else {
            return;
        };
        entry.held += bytes;
        open.held += bytes;
        while open.held > ANSWERS && open.cut_oldest(Phase::Answer, Some(self.id)) {}
    }

    /// Waits until the connection has to go.
    pub(super) async fn cut(&self) {
        self.cut.notified().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.connections.open.lock().remove(self.id);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    async fn is_cut(place: &Place) -> bool {
        tokio::time::timeout(Duration::from_millis(1), place.cut())
            .await
            .is_ok()
    }

    fn places(connections: &Arc<Connections>, count: usize) -> Vec<Arc<Place>> {
        (0..count)
            .map(|_| connections.admit().expect("a place").place)
            .collect()
    }

    #[tokio::test]
    async fn the_oldest_half_sent_request_makes_room() {
        let connections = Connections::new(3);
        let held = places(&connections, 3);
        held[0].enter(Phase::Working);
        let new = connections.admit().expect("a place");
        assert!(new.cut);
        assert!(!is_cut(&held[0]).await && is_cut(&held[1]).await && !is_cut(&held[2]).await);
    }

    #[tokio::test]
    async fn idle_connections_go_when_no_request_is_half_sent() {
        let connections = Connections::new(2);
        let held = places(&connections, 2);
        held[1].enter(Phase::Idle);
        held[0].enter(Phase::Idle);
        assert!(connections.admit().is_some());
        assert!(!is_cut(&held[0]).await && is_cut(&held[1]).await);
    }

    #[tokio::test]
    async fn who_is_being_answered_stays() {
        let connections = Connections::new(2);
        let held = places(&connections, 2);
        held[0].enter(Phase::Working);
        held[1].enter(Phase::Answer);
        assert!(connections.admit().is_none());
        assert!(!is_cut(&held[0]).await && !is_cut(&held[1]).await);
    }

    #[tokio::test]
    async fn answers_that_nobody_takes_are_bounded() {
        let connections = Connections::new(64);
        let held = places(&connections, 64);
        for place in &held {
            place.enter(Phase::Working);
            place.hold(1 << 20);
            place.enter(Phase::Answer);
        }
        let mut cut = Vec::new();
        for place in &held {
            cut.push(is_cut(place).await);
        }
        assert_eq!(cut, [vec![true; 60], vec![false; 4]].concat());
    }

    #[tokio::test]
    async fn a_large_answer_alone_is_given() {
        let connections = Connections::new(2);
        let held = places(&connections, 1);
        held[0].hold(64 << 20);
        assert!(!is_cut(&held[0]).await);
    }

    #[tokio::test]
    async fn places_and_bytes_come_back() {
        let connections = Connections::new(1);
        for _ in 0..10 {
            let held = places(&connections, 1);
            held[0].hold(3 << 20);
            held[0].enter(Phase::Answer);
            held[0].enter(Phase::Idle);
            assert_eq!(connections.open.lock().held, 0);
            held[0].hold(3 << 20);
        }
        assert_eq!(connections.open.lock().held, 0);
        assert!(connections.open.lock().entries.is_empty());
    }
}
