//! HTTP/1.1 of the API server, as its own calls on its connections show it (docs/wire.md section "HTTP").
//!
//! [`connections::Connections`] takes the calls of all processes and tells of exchanges: a request and its answer, or
//! one sentence on a speech WebSocket. Bodies are known at their ends alone, so nothing here needs more than heads,
//! short JSON and lengths. Pure, bounded, and at home with lost events.

mod answer;
mod body;
pub mod connections;
mod deflate;
mod ends;
mod head;
mod json;
pub mod note;
mod redact;

mod request;
mod socket;
mod stretch;

/// What a process did with one of its connections, in the order in which it did it. Times are `CLOCK_MONOTONIC` in
/// nanoseconds, taken after the call.
///
/// `head` holds the first captured bytes of a call and `tail` the last ones; where `head` has all of them, `tail` is
/// empty, else what lies between them is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HttpEvent<'a> {
    /// The process accepted a connection (`accept4` returned `fd`).
    Accepted {
        /// Process.
        pid: u32,
        /// Thread.
        tid: u32,
        /// The connection.
        fd: i32,
        /// When.
        time_ns: u64,
    },
    /// Bytes came in (`read`, `recv` or `SSL_read` returned `size`), or the peer ended its side (`size` 0).
    Received {
        /// Process.
        pid: u32,
        /// Thread.
        tid: u32,
        /// The connection; negative for one that libssl encrypts, whose bytes are plaintext here.
        fd: i32,
        /// When.
        time_ns: u64,
        /// Bytes.
        size: u64,
        /// The first of them.
        head: &'a [u8],
        /// The last of them.
        tail: &'a [u8],
    },
    /// Bytes went out (`write`, `send`, `writev`, `sendmsg` or `SSL_write` returned `size`).
    Sent {
        /// Process.
        pid: u32,
        /// Thread.
        tid: u32,
        /// The connection.
        fd: i32,
        /// When.
        time_ns: u64,
        /// Bytes.
        size: u64,
        /// The first of them.
        head: &'a [u8],
        /// The last of them.
        tail: &'a [u8],
    },
    /// A call on the connection failed for good.
    Failed {
        /// Process.
        pid: u32,
        /// Thread.
        tid: u32,
        /// The connection.
        fd: i32,
        /// When.
        time_ns: u64,
        /// Why: `EPIPE`, `ECONNRESET`, ... as a positive number.
        errno: i32,
    },
    /// The process closed the connection.
    Closed {
        /// Process.
        pid: u32,
        /// Thread.
        tid: u32,
        /// The connection.
        fd: i32,
        /// When.
        time_ns: u64,
    },
}

impl HttpEvent<'_> {
    /// The process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        match *self {
            Self::Accepted { pid, .. }
            | Self::Received { pid, .. }
            | Self::Sent { pid, .. }
            | Self::Failed { pid, .. }
            | Self::Closed { pid, .. } => pid,
        }
    }

    /// The connection in its process.
    #[must_use]
    pub fn fd(&self) -> i32 {
        match *self {
            Self::Accepted { fd, .. }
            | Self::Received { fd, .. }
            | Self::Sent { fd, .. }
            | Self::Failed { fd, .. }
            | Self::Closed { fd, .. } => fd,
        }
    }

    /// When it happened.
    #[must_use]
    pub fn time_ns(&self) -> u64 {
        match *self {
            Self::Accepted { time_ns, .. }
            | Self::Received { time_ns, .. }
            | Self::Sent { time_ns, .. }
            | Self::Failed { time_ns, .. }
            | Self::Closed { time_ns, .. } => time_ns,
        }
    }
}
