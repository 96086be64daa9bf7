//! What a process did with a segment of shared memory, or with an object of a store: put together by the tap, paired by
//! `pipeline`.

/// What a process did with a named shared-memory segment or a store's object. All times are `CLOCK_MONOTONIC` in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShmEvent<'a> {
    /// It made the segment and filled it.
    Put {
        /// Process.
        pid: u32,
        /// Thread.
        tid: u32,
        /// Name of the segment, which is the connector's key.
        name: &'a str,
        /// Bytes, as the segment was sized.
        size: u64,
        /// When it began.
        start_ns: u64,
        /// When the segment was free to be taken.
        done_ns: u64,
    },
    /// It took the segment, and removed it.
    Get {
        /// Process.
        pid: u32,
        /// Thread.
        tid: u32,
        /// Name of the segment.
        name: &'a str,
        /// When the segment was opened; attempts that failed before are not part of it.
        start_ns: u64,
        /// When it was removed.
        done_ns: u64,
    },
    /// It removed the segment without having taken it.
    Unlinked {
        /// Process.
        pid: u32,
        /// Thread.
        tid: u32,
        /// Name of the segment.
        name: &'a str,
        /// When.
        time_ns: u64,
    },
}

impl<'a> ShmEvent<'a> {
    /// The process that did it.
    #[must_use]
    pub fn pid(&self) -> u32 {
        match *self {
            Self::Put { pid, .. } | Self::Get { pid, .. } | Self::Unlinked { pid, .. } => pid,
        }
    }

    /// The segment's name.
    #[must_use]
    pub fn name(&self) -> &'a str {
        match *self {
            Self::Put { name, .. } | Self::Get { name, .. } | Self::Unlinked { name, .. } => name,
        }
    }
}
