//! ZMTP 3.0 (RFC 23 of `ZeroMQ`) as far as a subscriber without security needs it: its own few bytes, and the peer's
//! stream cut into frames.
//!
//! Known clients take any length that a frame claims and allocate that much. The peer is a process in somebody's container,
//! so here a frame has a limit.

/// Longest frame that is taken, in bytes. A list of a thousand replicas has some 300 KB.
pub const MAX_FRAME: usize = 1 << 20;

const GREETING: usize = 64;
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Why a peer's bytes are of no use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ZmtpError {
    /// Not ZMTP 3, or with a security mechanism.
    #[error("the peer does not speak ZMTP 3 without security")]
    Greeting,
    /// Flags that no frame has.
    #[error("a frame with flags {0:#x}")]
    Flags(u8),
    /// A frame exceeds [`MAX_FRAME`].
    #[error("a frame of {0} bytes")]
    TooLong(u64),
}

/// What a subscriber sends first: its greeting.
#[must_use]
pub fn greeting() -> [u8; GREETING] {
    let mut bytes = [0; GREETING];
    // Signature, version 3.0, mechanism. The rest, the role of a server among it, is 0.
    let parts: [(usize, &[u8]); 3] = [
        (0, &[0xFF, 0, 0, 0, 0, 0, 0, 0, 0, 0x7F]),
        (10, &[3, 0]),
        (12, b"NULL"),
    ];
    for (at, part) in parts {
        if let Some(place) = bytes.get_mut(at..at + part.len()) {
            place.copy_from_slice(part);
        }
    }
    bytes
}

/// What it sends then: READY as a SUB socket.
pub const READY: &[u8] = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB";

/// What it sends after the peer's READY: the subscription to everything, a message of one byte.
pub const SUBSCRIBE: &[u8] = &[0, 1, 1];

/// A frame of the peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// A command: its name, its properties.
    Command(Vec<u8>),
    /// A part of a message.
    Message {
        /// The part.
        body: Vec<u8>,
        /// Further parts follow.
        more: bool,
    },
}

/// The type of socket that a READY command tells of; `None`: another command, or it has none.
#[must_use]
pub fn socket_type(command: &[u8]) -> Option<&[u8]> {
    let mut rest = command.strip_prefix(b"\x05READY")?;
    while let Some((&length, after)) = rest.split_first() {
        let (name, after) = after.split_at_checked(usize::from(length))?;
        let (length, after) = after.split_first_chunk::<4>()?;
        let (value, after) = after.split_at_checked(usize::try_from(u32::from_be_bytes(*length)).ok()?)?;
        // Names have no case.
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return Some(value);
        }
        rest = after;
    }
    None
}

/// Cuts a peer's bytes into frames.
#[derive(Debug, Default)]
pub struct Frames {
    buffer: Vec<u8>,
    greeted: bool,
}

impl Frames {
    /// Takes bytes as they come.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole frame. At most a frame and what was pushed after it is held, if this is called until there is none.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, ZmtpError> {
        if !self.greeted {
            let Some((greeting, _)) = self.buffer.split_first_chunk::<GREETING>() else {
                return Ok(None);
            };
            let is_null = greeting
                .get(12..32)
                .is_some_and(|name| name.starts_with(b"NULL\0"));
            let is_three = greeting.get(10).is_some_and(|major| *major >= 3);
            if !greeting.starts_with(&[0xFF]) || greeting.get(9) != Some(&0x7F) || !is_null || !is_three {
                return Err(ZmtpError::Greeting);
            }
            self.buffer.drain(..GREETING);
            self.greeted = true;
        }
        let Some((&flags, rest)) = self.buffer.split_first() else {
            return Ok(None);
        };
        if flags & !(MORE | LONG | COMMAND) != 0 || flags & (MORE | COMMAND) == MORE | COMMAND {
            return Err(ZmtpError::Flags(flags));
        }
        let (length, header) = if flags & LONG == 0 {
            match rest.first() {
                Some(length) => (u64::from(*length), 2),
                None => return Ok(None),
            }
        } else {
            match rest.split_first_chunk::<8>() {
                Some((length, _)) => (u64::from_be_bytes(*length), 9),
                None => return Ok(None),
            }
        };
        let size = usize::try_from(length)
            .ok()
            .filter(|size| *size <= MAX_FRAME)
            .ok_or(ZmtpError::TooLong(length))?;
        let Some(body) = self.buffer.get(header..header + size) else {
            return Ok(None);
        };
        let body = body.to_vec();
        self.buffer.drain(..header + size);
        Ok(Some(if flags & COMMAND == 0 {
            Frame::Message {
                body,
                more: flags & MORE != 0,
            }
        } else {
            Frame::Command(body)
        }))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    /// A publisher's greeting (libzmq 4.3.5: version 3.1) and READY.
    fn peer() -> Vec<u8> {
        let mut bytes = greeting().to_vec();
        bytes[11] = 1;
        let ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB\x08Identity\x00\x00\x00\x00";
        bytes.extend_from_slice(&[COMMAND, u8::try_from(ready.len()).unwrap()]);
        bytes.extend_from_slice(ready);
        bytes
    }

    fn all(bytes: &[u8]) -> Result<Vec<Frame>, ZmtpError> {
        let mut frames = Frames::default();
        frames.push(bytes);
        let mut found = Vec::new();
        while let Some(frame) = frames.next_frame()? {
            found.push(frame);
        }
        Ok(found)
    }

    fn message(body: &[u8]) -> Frame {
        Frame::Message {
            body: body.to_vec(),
            more: false,
        }
    }

    #[test]
    fn a_publisher_is_understood() {
        let mut bytes = peer();
        bytes.extend_from_slice(b"\x00\x02hi\x01\x01a\x00\x01b\x02\x00\x00\x00\x00\x00\x00\x00\x04long");
        let frames = all(&bytes).unwrap();
        let Frame::Command(ready) = &frames[0] else {
            panic!()
        };
        assert_eq!(socket_type(ready), Some(&b"PUB"[..]));
        let part = Frame::Message {
            body: b"a".to_vec(),
            more: true,
        };
        assert_eq!(
            frames[1..],
            [message(b"hi"), part, message(b"b"), message(b"long")]
        );
    }

    #[test]
    fn own_bytes_are_frames_too() {
        let mut bytes = greeting().to_vec();
        bytes.extend_from_slice(READY);
        bytes.extend_from_slice(SUBSCRIBE);
        let frames = all(&bytes).unwrap();
        let Frame::Command(ready) = &frames[0] else {
            panic!()
        };
        assert_eq!(socket_type(ready), Some(&b"SUB"[..]));
        assert_eq!(frames[1..], [message(&[1])]);
    }

    fn changed(at: usize, to: u8) -> Vec<u8> {
        let mut bytes = peer();
        bytes[at] = to;
        bytes
    }

    #[rstest]
    #[case::no_signature(changed(0, 0), ZmtpError::Greeting)]
    #[case::old_version(changed(10, 1), ZmtpError::Greeting)]
    #[case::security(changed(12, b'C'), ZmtpError::Greeting)]
    #[case::longer_mechanism(changed(16, b'X'), ZmtpError::Greeting)]
    #[case::http(vec![b'H'; 100], ZmtpError::Greeting)]
    #[case::flags(changed(64, 0x80), ZmtpError::Flags(0x80))]
    #[case::command_in_parts(changed(64, 5), ZmtpError::Flags(5))]
    #[case::huge([peer(), vec![2, 0xFF, 0, 0, 0, 0, 0, 0, 1]].concat(), ZmtpError::TooLong(0xFF00_0000_0000_0001))]
    #[case::over_the_limit([peer(), vec![2, 0, 0, 0, 0, 0, 0x10, 0, 1]].concat(), ZmtpError::TooLong(0x10_0001))]
    fn others_are_refused(#[case] bytes: Vec<u8>, #[case] error: ZmtpError) {
        assert_eq!(all(&bytes), Err(error));
    }

    #[rstest]
    #[case::no_ready(b"\x05ERROR")]
    #[case::cut_name(b"\x05READY\x20Socket")]
    #[case::cut_value(b"\x05READY\x0bSocket-Type\x00\x00\x00\x09PUB")]
    #[case::none(b"\x05READY")]
    fn no_socket_type(#[case] command: &[u8]) {
        assert_eq!(socket_type(command), None);
    }

    proptest! {
        #[test]
        fn any_pieces_give_the_same(cuts in prop::collection::vec(1_usize..40, 0..20)) {
            let mut bytes = peer();
            bytes.extend_from_slice(b"\x00\x02hi\x02\x00\x00\x00\x00\x00\x00\x00\x04long");
            let whole = all(&bytes).unwrap();
            let mut frames = Frames::default();
            let mut found = Vec::new();
            let mut rest = bytes.as_slice();
            for cut in cuts.into_iter().chain([bytes.len()]) {
                let (piece, after) = rest.split_at(cut.min(rest.len()));
                frames.push(piece);
                rest = after;
                while let Some(frame) = frames.next_frame().unwrap() {
                    found.push(frame);
                }
            }
            prop_assert_eq!(found, whole);
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200), greet: bool) {
            let bytes = if greet { [peer(), bytes].concat() } else { bytes };
            let _ = all(&bytes);
            let _ = socket_type(&bytes);
        }
    }
}
