//! Drains the ring buffer.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use aya::maps::{MapData, RingBuf};
use omnitap_ebpf::{FrameHeader, HttpHeader, HttpOp, Kind, Record, flag};

use super::{
    dedup::Dedup,
    shm::{Dropped, Threads},
};
use crate::wire::{frame::Frame, http::HttpEvent, shm::ShmEvent};

/// How a client begins TLS: a record of a handshake, of any version from SSL 3.0 on (RFC 8446, 5.1).
const HANDSHAKE: [u8; 2] = [22, 3];

/// What the kernel told, in the order of its happening.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// A frame was handed to `zmq_msg_send`. Its bytes lie in the ring: they are gone when the callback
    /// returns.
    Frame(Frame<'a>),
    /// A segment of shared memory was handed on, taken or removed.
    Shm(ShmEvent<'a>),
    /// Something was done with an HTTP connection. Its bytes lie in the ring, too.
    Http(HttpEvent<'a>),
    /// A connection that a watched process accepted begins as TLS: [`super::ProbeSet::Tls`] sees into it.
    Tls {
        /// The process.
        pid: u32,
    },
    /// A process anywhere on the host called exec: it may have become one to watch.
    Exec {
        /// The process (initial PID namespace).
        pid: u32,
        /// `CLOCK_MONOTONIC` in nanoseconds.
        time_ns: u64,
    },
    /// A watched process made a child process, which is to be found in /proc.
    Fork {
        /// The watched process.
        parent: u32,
        /// `CLOCK_MONOTONIC` in nanoseconds.
        time_ns: u64,
    },
    /// The main thread of a watched process ended. Frames of its other threads may still follow.
    Exit {
        /// The process.
        pid: u32,
        /// `CLOCK_MONOTONIC` in nanoseconds.
        time_ns: u64,
    },
}

/// What the reader took from the ring since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReaderStats {
    /// Frames handed on.
    pub frames: u64,
    /// Frames dropped because they were the frame before, tried again.
    pub retries: u64,
    /// Events of shared memory handed on.
    pub shm: u64,
    /// Steps with shared memory that are not a pipeline's, by their names.
    pub shm_foreign: u64,
    /// Ends of a put or get whose begin did not come.
    pub shm_unpaired: u64,
    /// Events of HTTP connections handed on.
    pub http: u64,
    /// Connections that turned out to be none of HTTP, or to be encrypted.
    pub http_foreign: u64,
    /// Exec, fork and exit events handed on.
    pub process_events: u64,
    /// Records that could not be read: object and agent differ.
    pub malformed: u64,
}

#[derive(Debug, Default)]
pub(super) struct Counts {
    frames: AtomicU64,
    retries: AtomicU64,
    shm: AtomicU64,
    shm_foreign: AtomicU64,
    shm_unpaired: AtomicU64,
    http: AtomicU64,
    http_foreign: AtomicU64,
    process_events: AtomicU64,
    malformed: AtomicU64,
}

impl Counts {
    pub(super) fn get(&self) -> ReaderStats {
        ReaderStats {
            frames: self.frames.load(Ordering::Relaxed),
            retries: self.retries.load(Ordering::Relaxed),
            shm: self.shm.load(Ordering::Relaxed),
            shm_foreign: self.shm_foreign.load(Ordering::Relaxed),
            shm_unpaired: self.shm_unpaired.load(Ordering::Relaxed),
            http: self.http.load(Ordering::Relaxed),
            http_foreign: self.http_foreign.load(Ordering::Relaxed),
            process_events: self.process_events.load(Ordering::Relaxed),
            malformed: self.malformed.load(Ordering::Relaxed),
        }
    }
}

/// The reading end of the ring buffer; one thread owns it.
pub struct Reader {
    ring: RingBuf<MapData>,
    dedup: Dedup,
    threads: Threads,
    counts: Arc<Counts>,
}

impl Reader {
    pub(super) fn new(ring: RingBuf<MapData>, counts: Arc<Counts>) -> Self {
        Self {
            ring,
            dedup: Dedup::default(),
            threads: Threads::default(),
            counts,
        }
    }

    /// Hands at most `max` events to `each`, in order. If there are none, waits up to `timeout` for some
    /// first. Returns how many records it took from the ring, 0 after a timeout.
    ///
    /// The kernel wakes the reader only when a good part of the ring is full
    /// ([`super::Settings::wakeup_bytes`]), so `timeout` bounds the age of what is read: some 10 ms is right
    /// for a loop that does nothing else.
    pub fn drain(
        &mut self,
        timeout: Duration,
        max: usize,
        mut each: impl FnMut(Event<'_>),
    ) -> io::Result<usize> {
        let taken = self.take(max, &mut each);
        if taken > 0 || max == 0 {
            return Ok(taken);
        }
        self.wait(timeout)?;
        Ok(self.take(max, &mut each))
    }

    fn take(&mut self, max: usize, each: &mut impl FnMut(Event<'_>)) -> usize {
        let mut taken = 0;
        while taken < max {
            let Some(item) = self.ring.next() else { break };
            taken += 1;
            let Ok(record) = Record::parse(&item) else {
                add(&self.counts.malformed);
                continue;
            };
            match record {
                Record::Frame { header, head, tail } => {
                    let frame = frame(&header, head, tail);
                    if self.dedup.is_retry(&frame) {
                        add(&self.counts.retries);
                    } else {
                        add(&self.counts.frames);
                        each(Event::Frame(frame));
                    }
                }
                Record::Shm { step, header, name } => {
                    let counts = &self.counts;
                    let taken = self.threads.step(step, &header, name, |event| {
                        add(&counts.shm);
                        each(Event::Shm(event));
                    });
                    match taken {
                        Ok(()) => {}
                        Err(Dropped::Foreign) => add(&counts.shm_foreign),
                        Err(Dropped::Unpaired) => add(&counts.shm_unpaired),
                    }
                }
                Record::Http {
                    op,
                    header,
                    head,
                    tail,
                } => {
                    if op == HttpOp::Foreign {
                        add(&self.counts.http_foreign);
                    }
                    add(&self.counts.http);
                    each(Event::Http(http(op, &header, head, tail)));
                    if op == HttpOp::Foreign && header.size.to_le_bytes().starts_with(&HANDSHAKE) {
                        each(Event::Tls { pid: header.tgid });
                    }
                }
                Record::Process(kind, record) => {
                    let (pid, time_ns) = (record.tgid, record.time_ns);
                    let event = match kind {
                        Kind::Exec => Event::Exec { pid, time_ns },
                        Kind::Fork => Event::Fork { parent: pid, time_ns },
                        Kind::Exit => Event::Exit { pid, time_ns },
                        Kind::Frame | Kind::Shm | Kind::Http => {
                            add(&self.counts.malformed);
                            continue;
                        }
                    };
                    if kind != Kind::Fork {
                        self.threads.forget(pid);
                    }
                    add(&self.counts.process_events);
                    each(event);
                }
            }
        }
        taken
    }

    fn wait(&self, timeout: Duration) -> io::Result<()> {
        let mut fd = libc::pollfd {
            fd: self.ring.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        let millis = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
        // SAFETY: one valid pollfd, and its descriptor is open for the call.
        if unsafe { libc::poll(&raw mut fd, 1, millis) } < 0 {
            let error = io::Error::last_os_error();
            // A signal: the caller looks whether it is to stop, and comes back.
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
        Ok(())
    }
}

impl AsFd for Reader {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }
}

fn add(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

fn frame<'a>(header: &FrameHeader, head: &'a [u8], tail: &'a [u8]) -> Frame<'a> {
    Frame {
        time_ns: header.time_ns,
        pid: header.tgid,
        tid: header.tid,
        socket: header.socket,
        content: header.content,
        size: header.size,
        more: header.flags & flag::MORE != 0,
        aux: header.flags & flag::AUX != 0,
        head,
        tail,
    }
}

fn http<'a>(op: HttpOp, header: &HttpHeader, head: &'a [u8], tail: &'a [u8]) -> HttpEvent<'a> {
    let HttpHeader {
        kind: _,
        op: _,
        time_ns,
        tgid: pid,
        tid,
        size,
        fd,
        head_len: _,
        tail_len: _,
        reserved: _,
    } = *header;
    match op {
        HttpOp::Accepted => HttpEvent::Accepted {
            pid,
            tid,
            fd,
            time_ns,
        },
        HttpOp::Received => HttpEvent::Received {
            pid,
            tid,
            fd,
            time_ns,
            size,
            head,
            tail,
        },
        HttpOp::Sent => HttpEvent::Sent {
            pid,
            tid,
            fd,
            time_ns,
            size,
            head,
            tail,
        },
        HttpOp::Failed => HttpEvent::Failed {
            pid,
            tid,
            fd,
            time_ns,
            errno: i32::try_from(size).unwrap_or(i32::MAX),
        },
        // It was never one, so that nothing more comes of it.
        HttpOp::Closed | HttpOp::Foreign => HttpEvent::Closed {
            pid,
            tid,
            fd,
            time_ns,
        },
    }
}
