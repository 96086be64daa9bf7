//! How full the ring buffer is.
//!
//! aya's `RingBuf` reads records but does not tell its fill. Both positions are in pages that the kernel lets
//! user space map: the consumer's first, then the producer's (kernel/bpf/ringbuf.c `struct bpf_ringbuf`).

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
    ptr::NonNull,
    sync::atomic::{AtomicUsize, Ordering},
};

/// A read-only view of the positions of a ring buffer map.
#[derive(Debug)]
pub(super) struct Positions {
    pages: NonNull<u8>,
    page: usize,
}

// SAFETY: the two words are read as atomics, and the mapping lives as long as this value, on whichever
// thread.
unsafe impl Send for Positions {}
// SAFETY: as above; nothing is written through it.
unsafe impl Sync for Positions {}

impl Positions {
    /// Maps the two pages of a ring buffer map.
    pub(super) fn new(ring: BorrowedFd<'_>) -> io::Result<Self> {
        // SAFETY: sysconf has no preconditions.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).map_err(io::Error::other)?;
        // SAFETY: a new mapping at an address of the kernel's choice; the descriptor is valid for the call,
        // and the map holds at least two metadata pages.
        let pages = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                2 * page,
                libc::PROT_READ,
                libc::MAP_SHARED,
                ring.as_raw_fd(),
                0,
            )
        };
        if pages == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let pages = NonNull::new(pages.cast()).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        Ok(Self { pages, page })
    }

    /// Bytes that are reserved and not yet read, record headers included.
    pub(super) fn fill(&self) -> usize {
        let consumer = self.word(0);
        let producer = self.word(self.page);
        producer.wrapping_sub(consumer)
    }

    fn word(&self, offset: usize) -> usize {
        // SAFETY: `offset` is the start of one of the two mapped pages, aligned for a word; the kernel writes
        // it as a whole word at any time, hence the atomic.
        unsafe { self.pages.add(offset).cast::<AtomicUsize>().as_ref() }.load(Ordering::Acquire)
    }
}

impl Drop for Positions {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping that `new` made; no reference into it outlives `word`.
        unsafe { libc::munmap(self.pages.as_ptr().cast(), 2 * self.page) };
    }
}
