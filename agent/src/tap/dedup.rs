//! Tells a send that was tried again from a new one.
//!
//! `pyzmq.asyncio` first sends without blocking; on EAGAIN it calls `zmq_msg_send` again later with the same
//! content (docs/wire.md section "Probing libzmq"). The probe sits at the entry and sees both calls.
//!
//! Addresses prove nothing: memory is reused, the engine encodes every output into the same few buffers, and
//! contents of up to 33 bytes lie in the message itself. So a frame counts as tried again only if it can't be
//! a new one: it is larger than that, comes from the same thread, through the same socket, with nothing in
//! between on that socket, from the same address, within a few milliseconds, and every captured byte is
//! equal. Engine outputs carry a time stamp and requests an id, so a new one differs. What can't be told
//! apart is kept.

use std::{collections::HashMap, hash::Hasher};

use rustc_hash::{FxBuildHasher, FxHasher};

use crate::wire::frame::Frame;

/// Longest content that libzmq keeps in the message itself (4.3: 33 bytes; older: 29 to 32).
const INLINE: u64 = 33;
/// A retry comes within this time.
const WINDOW_NS: u64 = 10_000_000;
/// Sockets that are remembered; beyond it all are forgotten, so that at worst a retry is kept.
const MAX_SOCKETS: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Last {
    time_ns: u64,
    tid: u32,
    content: u64,
    size: u64,
    more: bool,
    bytes: u64,
}

/// The last frame of each socket.
#[derive(Debug, Default)]
pub(super) struct Dedup {
    last: HashMap<(u32, u64), Last, FxBuildHasher>,
}

impl Dedup {
    /// Takes the next frame; whether it is the one before on its socket, tried again.
    pub(super) fn is_retry(&mut self, frame: &Frame<'_>) -> bool {
        let mut hasher = FxHasher::default();
        hasher.write(frame.head);
        hasher.write(frame.tail);
        let new = Last {
            time_ns: frame.time_ns,
            tid: frame.tid,
            content: frame.content,
            size: frame.size,
            more: frame.more,
            bytes: hasher.finish(),
        };
        if self.last.len() >= MAX_SOCKETS {
            self.last.clear();
        }
        // The time stays that of the newest try: tries may follow each other for long.
        let Some(old) = self.last.insert((frame.pid, frame.socket), new) else {
            return false;
        };
        // A header alone (a follow-on part) has no bytes to compare.
        frame.size > INLINE
            && !frame.head.is_empty()
            && new.time_ns.saturating_sub(old.time_ns) <= WINDOW_NS
            && old
                == Last {
                    time_ns: old.time_ns,
                    ..new
                }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const OUTPUT: &[u8; 40] = b"an output with its time stamp: 123456789";

    fn frame(head: &[u8]) -> Frame<'_> {
        Frame {
            time_ns: 1_000_000,
            pid: 1,
            tid: 2,
            socket: 3,
            content: 4,
            size: head.len() as u64,
            more: false,
            aux: false,
            head,
            tail: &[],
        }
    }

    #[test]
    fn a_retry_is_told() {
        let mut dedup = Dedup::default();
        assert!(!dedup.is_retry(&frame(OUTPUT)));
        for tries in 1..5 {
            let again = Frame {
                time_ns: 1_000_000 + tries * 9_000_000,
                ..frame(OUTPUT)
            };
            assert!(dedup.is_retry(&again));
        }
    }

    #[rstest]
    #[case::other_bytes(Frame { head: b"an output with its time stamp: 123456790", ..frame(OUTPUT) })]
    #[case::other_tail(Frame { tail: b"x", ..frame(OUTPUT) })]
    #[case::other_size(Frame { size: 41, ..frame(OUTPUT) })]
    #[case::other_place(Frame { content: 5, ..frame(OUTPUT) })]
    #[case::other_socket(Frame { socket: 5, ..frame(OUTPUT) })]
    #[case::other_thread(Frame { tid: 5, ..frame(OUTPUT) })]
    #[case::other_process(Frame { pid: 5, ..frame(OUTPUT) })]
    #[case::later(Frame { time_ns: 11_000_001, ..frame(OUTPUT) })]
    #[case::more(Frame { more: true, ..frame(OUTPUT) })]
    fn a_new_frame_is_kept(#[case] second: Frame<'_>) {
        let mut dedup = Dedup::default();
        assert!(!dedup.is_retry(&frame(OUTPUT)));
        assert!(!dedup.is_retry(&second));
    }

    /// The type byte of a request is sent again and again from the same place on the stack.
    #[rstest]
    #[case::type_byte(b"\x00")]
    #[case::longest_inline(b"thirty-three bytes of an identity")]
    fn inline_contents_are_kept(#[case] head: &[u8]) {
        let mut dedup = Dedup::default();
        assert!(!dedup.is_retry(&frame(head)));
        assert!(!dedup.is_retry(&frame(head)));
    }

    #[test]
    fn headers_alone_are_kept() {
        let aux = Frame {
            aux: true,
            size: 5000,
            ..frame(b"")
        };
        let mut dedup = Dedup::default();
        assert!(!dedup.is_retry(&aux));
        assert!(!dedup.is_retry(&aux));
    }

    #[test]
    fn a_frame_between_shows_that_the_first_was_sent() {
        let mut dedup = Dedup::default();
        let other = Frame {
            content: 9,
            ..frame(b"another output, as long as the first one")
        };
        assert!(!dedup.is_retry(&frame(OUTPUT)));
        assert!(!dedup.is_retry(&other));
        assert!(!dedup.is_retry(&frame(OUTPUT)));
    }

    #[test]
    fn many_sockets_stay_bounded() {
        let mut dedup = Dedup::default();
        for socket in 0..100_000 {
            dedup.is_retry(&Frame {
                socket,
                ..frame(OUTPUT)
            });
        }
        assert!(dedup.last.len() <= MAX_SOCKETS);
    }
}
