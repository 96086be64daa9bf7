//! HTTP as an API process's own connections carry it.

/// What a process did with one of its connections, in the order in which it did it (per process).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HttpEvent<'a> {
    /// The process accepted a connection. (accept4 returned `fd`)
    Accepted {
        /// Process.
        pid: u32,
        /// Thread.
        tid: u32,
        /// Descriptor.
        fd: i32,
        /// `CLOCK_MONOTONIC` in nanoseconds.
        time_ns: u64,
    },
    /// Bytes came in (`read`/`recv`/`SSL_read` returned `size`), or the peer ended its side (`size` 0).
    Received {
        /// Process.
        pid: u32,
        /// Thread.
        tid: u32,
        /// Descriptor.
        fd: i32,
        /// `CLOCK_MONOTONIC` in nanoseconds.
        time_ns: u64,
        /// Bytes.
        size: u64,
        /// First captured bytes.
        head: &'a [u8],
        /// Last captured bytes.
        tail: &'a [u8],
    },
    /// Bytes went out (`write`/`send`/`writev`/`sendmsg`/`SSL_write` returned `size`).
    Sent {
        /// Process.
        pid: u32,
        /// Thread.
        tid: u32,
        /// Descriptor.
        fd: i32,
        /// `CLOCK_MONOTONIC` in nanoseconds.
        time_ns: u64,
        /// Bytes.
        size: u64,
        /// First captured bytes.
        head: &'a [u8],
        /// Last captured bytes.
        tail: &'a [u8],
    },
    /// A call on the connection failed for good: `errno` (positive; EPIPE, ECONNRESET...). EAGAIN never comes.
    Failed {
        /// Process.
        pid: u32,
        /// Thread.
        tid: u32,
        /// Descriptor.
        fd: i32,
        /// `CLOCK_MONOTONIC` in nanoseconds.
        time_ns: u64,
        /// Error number.
        errno: i32,
    },
    /// The process closed it.
    Closed {
        /// Process.
        pid: u32,
        /// Thread.
        tid: u32,
        /// Descriptor.
        fd: i32,
        /// `CLOCK_MONOTONIC` in nanoseconds.
        time_ns: u64,
    },
}
