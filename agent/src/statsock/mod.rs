//! The Unix socket that stat events come in on: who may send, and how much.
//!
//! Each connection has a task that cuts the stream into events and hands them on in batches. What is on its way to the
//! reader is bounded in bytes, and shared out in the order of asking: a sender that floods waits for itself. Decoding
//! is the reader's part.

mod connection;
mod socket;

use std::{
    collections::HashSet,
    os::unix::fs::MetadataExt as _,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::Sender as Queue,
    },
    time::Duration,
};

use parking_lot::RwLock;
use tokio::{
    net::{UnixListener, UnixStream, unix::UCred},
    sync::{OwnedSemaphorePermit, Semaphore},
};
use tracing::debug;

pub use self::socket::{SocketError, probe};
use self::{connection::Connection, socket::Bound};
use crate::{
    metrics::{catalogue::Family, own::Own},
    pipeline::stats::Sender,
    warn_limited,
    wire::stat::Encoding,
};

/// Bytes of events that are on their way to the reader.
const QUEUE_BYTES: usize = 4 << 20;

/// How long a sender waits at most for its process to be known.
const UNKNOWN_PEER: Duration = Duration::from_secs(10);

/// Connections of unknown processes that wait for that at a time.
const MAX_UNKNOWN: usize = 16;

/// How the socket is set up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Where it is.
    pub path: PathBuf,
    /// Permissions of its file.
    pub mode: u32,
    /// Groups, by name or number, whose members may send. The file belongs to the first.
    pub groups: Vec<String>,
    /// Most connections at a time.
    pub max_connections: usize,
    /// Most events a second of one connection; a sender that is faster waits.
    pub max_rate: u32,
}

/// What the reader is told.
#[derive(Debug)]
pub enum News {
    /// A sender is connected.
    Opened {
        /// The connection.
        sender: Sender,
        /// Its process; 0: of another PID namespace.
        pid: u32,
    },
    /// It sent events.
    Events {
        /// The connection.
        sender: Sender,
        /// `CLOCK_MONOTONIC` in nanoseconds when they were read.
        time_ns: u64,
        /// How they are written.
        encoding: Encoding,
        /// Whole events.
        bytes: Vec<u8>,
        /// The room that they take in the queue; given back when it is dropped.
        room: OwnedSemaphorePermit,
    },
    /// Its connection has ended.
    Closed {
        /// The connection.
        sender: Sender,
    },
}

/// The processes that are watched, for the check of peers. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Watched(Arc<Pids>);

#[derive(Debug, Default)]
struct Pids {
    pids: RwLock<HashSet<u32>>,
    scanned: AtomicBool,
}

impl Watched {
    /// A process of a pipeline was found. The reader must have been told before.
    pub fn found(&self, pid: u32) {
        self.0.pids.write().insert(pid);
    }

    /// It is gone.
    pub fn gone(&self, pid: u32) {
        self.0.pids.write().remove(&pid);
    }

    /// The first look at all processes is done.
    pub fn scanned(&self) {
        self.0.scanned.store(true, Ordering::Release);
    }

    fn has(&self, pid: u32) -> bool {
        self.0.pids.read().contains(&pid)
    }

    fn is_scanned(&self) -> bool {
        self.0.scanned.load(Ordering::Acquire)
    }
}

/// The socket, bound and not yet served.
#[derive(Debug)]
pub struct StatSocket {
    bound: Bound,
    max_connections: usize,
    max_rate: u32,
    groups: Vec<u32>,
}

/// What all connections share.
#[derive(Debug)]
struct Shared {
    queue: Queue<News>,
    room: Arc<Semaphore>,
    slots: Arc<Semaphore>,
    unknown: Semaphore,
    watched: Watched,
    groups: Vec<u32>,
    max_rate: u32,
    next: AtomicU64,
    own: Own,
}

impl StatSocket {
    /// Makes the socket. A file of a socket that nobody serves is replaced; needs a tokio runtime.
    pub fn bind(settings: &Settings) -> Result<Self, SocketError> {
        Ok(Self {
            bound: Bound::new(settings)?,
            max_connections: settings.max_connections,
            max_rate: settings.max_rate,
            groups: socket::group_ids(&settings.groups)?,
        })
    }

    /// Serves it until the future is dropped; then its file goes.
    pub async fn run(self, queue: Queue<News>, watched: Watched, own: Own) {
        for reason in ["too_many", "credentials", "protocol"] {
            own.add(Family::OmnitapStatConnectionsRefusedTotal, &[reason], 0.0);
        }
        let shared = Arc::new(Shared {
            queue,
            room: Arc::new(Semaphore::new(QUEUE_BYTES)),
            slots: Arc::new(Semaphore::new(self.max_connections)),
            unknown: Semaphore::new(MAX_UNKNOWN),
            watched,
            groups: self.groups,
            max_rate: self.max_rate,
            next: AtomicU64::new(1),
            own,
        });
        shared.show_connections(self.max_connections);
        loop {
            match self.bound.listener().accept().await {
                Ok((stream, _)) => {
                    let shared = Arc::clone(&shared);
                    let max = self.max_connections;
                    match Arc::clone(&shared.slots).try_acquire_owned() {
                        Ok(slot) => drop(tokio::spawn(async move {
                            shared.show_connections(max);
                            shared.serve(stream).await;
                            drop(slot);
                            shared.show_connections(max);
                        })),
                        Err(_) => shared.refuse("too_many"),
                    }
                }
                Err(source) => {
                    // Out of files, as a rule: it passes when connections end.
                    warn_limited!((), error = %source, "no connection to the stat socket can be taken");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }
}

impl Shared {
    fn refuse(&self, reason: &'static str) {
        self.own
            .add(Family::OmnitapStatConnectionsRefusedTotal, &[reason], 1.0);
    }

    /// Events that come no further, by why.
    fn drop_events(&self, result: &'static str) {
        self.own
            .add(Family::OmnitapStatEventsTotal, &["unknown", result], 1.0);
    }

    fn show_connections(&self, max: usize) {
        let open = max.saturating_sub(self.slots.available_permits());
        let open = u32::try_from(open).unwrap_or(u32::MAX);
        self.own.set(Family::OmnitapStatConnections, &[], f64::from(open));
    }

    async fn serve(&self, stream: UnixStream) {
        let Ok(peer) = stream.peer_cred() else {
            self.refuse("credentials");
            return;
        };
        let pid = peer.pid().and_then(|pid| u32::try_from(pid).ok()).unwrap_or(0);
        if !self.may_send(pid, &peer).await {
            warn_limited!(
                peer.uid(),
                pid,
                uid = peer.uid(),
                gid = peer.gid(),
                "a sender of stat events is neither of a watched pipeline nor of an allowed group"
            );
            self.refuse("credentials");
            return;
        }
        let sender = Sender(self.next.fetch_add(1, Ordering::Relaxed));
        debug!(pid, sender = sender.0, "a sender of stat events is connected");
        let opened = self.queue.send(News::Opened { sender, pid });
        if opened.is_err() {
            return;
        }
        if Connection::new(self, sender).run(&stream).await.is_err() {
            self.refuse("protocol");
        }
        drop(self.queue.send(News::Closed { sender }));
    }

    /// Checks a peer: a process of a watched pipeline, root, the agent's own user, or a member of an allowed group.
    async fn may_send(&self, pid: u32, peer: &UCred) -> bool {
        let is_allowed = || {
            let user = rustix::process::geteuid().as_raw();
            peer.uid() == 0 || peer.uid() == user || self.in_group(pid, peer.gid())
        };
        let waits = async {
            while !(self.watched.has(pid) || self.watched.is_scanned() && is_allowed()) {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        if self.watched.has(pid) {
            return true;
        }
        let Ok(_waiting) = self.unknown.try_acquire() else {
            return is_allowed();
        };
        tokio::time::timeout(UNKNOWN_PEER, waits).await.is_ok() || is_allowed()
    }

    fn in_group(&self, pid: u32, gid: u32) -> bool {
        if self.groups.is_empty() {
            return false;
        }
        let further = || {
            let pid = i32::try_from(pid).ok()?;
            let status = procfs::process::Process::new(pid).ok()?.status().ok()?;
            Some(status.groups.iter().any(|group| self.groups.contains(group)))
        };
        self.groups.contains(&gid) || (pid != 0 && further().unwrap_or(false))
    }
}

impl Bound {
    fn listener(&self) -> &UnixListener {
        &self.listener
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        // Another agent may have taken the place.
        let is_ours =
            std::fs::symlink_metadata(&self.path).is_ok_and(|file| (file.dev(), file.ino()) == self.file);
        if is_ours {
            drop(std::fs::remove_file(&self.path));
        }
    }
}
