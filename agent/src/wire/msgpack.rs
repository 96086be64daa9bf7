//! A zero-copy msgpack reader: limits on depth and length, typed errors, no allocation, no recursion.
//!
//! It covers the whole msgpack specification. A reader may be given the first bytes of a longer frame:
//! lengths are then checked against the size of the whole frame, and a value that goes on behind the captured
//! bytes is [`MsgpackError::Truncated`], not malformed.

use thiserror::Error;

/// Deepest nesting that [`Reader::skip`] follows. vLLM's own messages stay below ten levels.
pub const MAX_DEPTH: usize = 64;

/// Marker bytes that the decoders compare with.
pub mod marker {
    /// nil
    pub const NIL: u8 = 0xc0;
    /// false
    pub const FALSE: u8 = 0xc2;
    /// true
    pub const TRUE: u8 = 0xc3;
    /// 64-bit float
    pub const F64: u8 = 0xcb;
    /// Array of no elements
    pub const EMPTY_ARRAY: u8 = 0x90;
    /// String of no bytes
    pub const EMPTY_STR: u8 = 0xa0;
}

/// What a decoder wanted to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// Any value at all: the marker `c1` is never used.
    Value,
    /// An array.
    Array,
    /// A map.
    Map,
    /// A string.
    Str,
    /// Binary data.
    Bin,
    /// An extension value, timestamps among them.
    Ext,
    /// An integer of 0 or more.
    Unsigned,
    /// An integer.
    Integer,
    /// An integer or a float.
    Number,
    /// A boolean.
    Bool,
}

impl std::fmt::Display for Expected {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Value => "a value",
            Self::Array => "an array",
            Self::Map => "a map",
            Self::Str => "a string",
            Self::Bin => "binary data",
            Self::Ext => "an extension value",
            Self::Unsigned => "an unsigned integer",
            Self::Integer => "an integer",
            Self::Number => "a number",
            Self::Bool => "a boolean",
        })
    }
}

/// Why bytes could not be read. Offsets count from the start of the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum MsgpackError {
    /// The bytes at hand end inside a value.
    #[error("the bytes end inside the value at offset {offset}")]
    Truncated {
        /// Where the value starts.
        offset: u32,
    },
    /// A value of another type.
    #[error("expected {expected} at offset {offset}, found marker {marker:#04x}")]
    WrongType {
        /// Where the value starts.
        offset: u32,
        /// What was wanted.
        expected: Expected,
        /// The marker byte found.
        marker: u8,
    },
    /// Nested deeper than [`MAX_DEPTH`].
    #[error("nested deeper than {MAX_DEPTH} at offset {offset}")]
    TooDeep {
        /// Where the container starts.
        offset: u32,
    },
    /// A length that the rest of the frame can't hold.
    #[error("length {length} at offset {offset} is more than the rest of the frame holds")]
    TooLong {
        /// Where the value starts.
        offset: u32,
        /// The announced length: bytes, elements or pairs.
        length: u32,
    },
    /// A string that is not UTF-8.
    #[error("string at offset {offset} is not UTF-8")]
    NotUtf8 {
        /// Where the string starts.
        offset: u32,
    },
}

impl MsgpackError {
    /// Whether more bytes could have made the value whole.
    #[must_use]
    pub fn is_truncated(self) -> bool {
        matches!(self, Self::Truncated { .. })
    }
}

type Result<T> = std::result::Result<T, MsgpackError>;

/// Reads values one after the other.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Size of the whole frame: at least `bytes.len()`.
    total: usize,
}

impl<'a> Reader<'a> {
    /// A reader of a whole frame.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self {
            bytes,
            at: 0,
            total: bytes.len(),
        }
    }

    /// A reader of the first bytes of a frame of `total` bytes.
    #[must_use]
    pub fn of_head(bytes: &'a [u8], total: u64) -> Self {
        let total = usize::try_from(total).unwrap_or(usize::MAX).max(bytes.len());
        Self { bytes, at: 0, total }
    }

    /// Bytes read so far.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.at
    }

    /// Captured bytes not yet read.
    #[must_use]
    pub fn rest(&self) -> &'a [u8] {
        self.bytes.get(self.at..).unwrap_or_default()
    }

    /// Bytes of the frame not yet read, captured or not.
    #[must_use]
    pub fn left(&self) -> usize {
        self.total.saturating_sub(self.at)
    }

    /// The marker of the next value.
    #[inline]
    pub fn peek(&self) -> Result<u8> {
        match self.bytes.get(self.at) {
            Some(&marker) => Ok(marker),
            None => Err(truncated(self.at)),
        }
    }

    /// Takes these exact bytes if they come next.
    #[inline]
    pub fn take(&mut self, wanted: &[u8]) -> bool {
        let found = self.rest().starts_with(wanted);
        if found {
            self.at += wanted.len();
        }
        found
    }

    /// Takes a nil if one comes next.
    #[inline]
    pub fn take_nil(&mut self) -> bool {
        let found = self.bytes.get(self.at) == Some(&marker::NIL);
        self.at += usize::from(found);
        found
    }

    /// Nil or a value.
    #[inline]
    pub fn optional<T>(&mut self, read: impl FnOnce(&mut Self) -> Result<T>) -> Result<Option<T>> {
        if self.take_nil() {
            Ok(None)
        } else {
            read(self).map(Some)
        }
    }

    /// Header of an array: the number of its elements.
    #[inline]
    pub fn array(&mut self) -> Result<u32> {
        let start = self.at;
        let marker = self.next_byte(start)?;
        let count = match marker {
            0x90..=0x9f => u32::from(marker & 0x0f),
            0xdc => u32::from(self.be_u16(start)?),
            0xdd => self.be_u32(start)?,
            _ => return self.wrong(start, Expected::Array),
        };
        self.check_count(start, count, u64::from(count))?;
        Ok(count)
    }

    /// Header of a map: the number of its pairs.
    #[inline]
    pub fn map(&mut self) -> Result<u32> {
        let start = self.at;
        let marker = self.next_byte(start)?;
        let count = match marker {
            0x80..=0x8f => u32::from(marker & 0x0f),
            0xde => u32::from(self.be_u16(start)?),
            0xdf => self.be_u32(start)?,
            _ => return self.wrong(start, Expected::Map),
        };
        self.check_count(start, count, 2 * u64::from(count))?;
        Ok(count)
    }

    /// A string.
    #[inline]
    pub fn str(&mut self) -> Result<&'a str> {
        let start = self.at;
        let bytes = self.str_bytes()?;
        std::str::from_utf8(bytes).map_err(|_| MsgpackError::NotUtf8 {
            offset: offset(start),
        })
    }

    /// The bytes of a string, not checked to be UTF-8: enough to compare a key.
    #[inline]
    pub fn str_bytes(&mut self) -> Result<&'a [u8]> {
        let start = self.at;
        let marker = self.next_byte(start)?;
        let length = match marker {
            0xa0..=0xbf => u32::from(marker & 0x1f),
            0xd9 => u32::from(self.next_byte(start)?),
            0xda => u32::from(self.be_u16(start)?),
            0xdb => self.be_u32(start)?,
            _ => return self.wrong(start, Expected::Str),
        };
        self.bytes_of(start, length)
    }

    /// Binary data.
    pub fn bin(&mut self) -> Result<&'a [u8]> {
        let start = self.at;
        let length = match self.next_byte(start)? {
            0xc4 => u32::from(self.next_byte(start)?),
            0xc5 => u32::from(self.be_u16(start)?),
            0xc6 => self.be_u32(start)?,
            _ => return self.wrong(start, Expected::Bin),
        };
        self.bytes_of(start, length)
    }

    /// An extension value: its type code and data. Timestamps are code -1.
    pub fn ext(&mut self) -> Result<(i8, &'a [u8])> {
        let start = self.at;
        let marker = self.next_byte(start)?;
        let length = match marker {
            0xd4..=0xd8 => 1 << (marker - 0xd4),
            0xc7 => u32::from(self.next_byte(start)?),
            0xc8 => u32::from(self.be_u16(start)?),
            0xc9 => self.be_u32(start)?,
            _ => return self.wrong(start, Expected::Ext),
        };
        let code = self.next_byte(start)?.cast_signed();
        Ok((code, self.bytes_of(start, length)?))
    }

    /// An integer of 0 or more.
    #[inline]
    pub fn u64(&mut self) -> Result<u64> {
        let start = self.at;
        let marker = self.next_byte(start)?;
        let signed = match marker {
            0x00..=0x7f => return Ok(u64::from(marker)),
            0xcc => return self.next_byte(start).map(u64::from),
            0xcd => return self.be_u16(start).map(u64::from),
            0xce => return self.be_u32(start).map(u64::from),
            0xcf => return self.be_u64(start),
            0xd0..=0xd3 => self.signed(start, marker)?,
            _ => return self.wrong(start, Expected::Unsigned),
        };
        match u64::try_from(signed) {
            Ok(value) => Ok(value),
            Err(_) => self.wrong(start, Expected::Unsigned),
        }
    }

    /// An integer of 0 or more that counts something; larger ones than `u32` holds are not sensible and are
    /// cut.
    #[inline]
    pub fn u32(&mut self) -> Result<u32> {
        Ok(u32::try_from(self.u64()?).unwrap_or(u32::MAX))
    }

    /// An integer. Values above `i64::MAX` are a wrong type.
    pub fn i64(&mut self) -> Result<i64> {
        let start = self.at;
        match self.peek()? {
            marker @ 0xe0..=0xff => {
                self.at += 1;
                Ok(i64::from(marker.cast_signed()))
            }
            marker @ 0xd0..=0xd3 => {
                self.at += 1;
                self.signed(start, marker)
            }
            0x00..=0x7f | 0xcc..=0xcf => match i64::try_from(self.u64()?) {
                Ok(value) => Ok(value),
                Err(_) => self.wrong(start, Expected::Integer),
            },
            _ => self.wrong(start, Expected::Integer),
        }
    }

    /// A float, or an integer as a float (Python writes either where a number is whole).
    #[inline]
    pub fn f64(&mut self) -> Result<f64> {
        let start = self.at;
        match self.peek()? {
            marker::F64 => {
                self.at += 1;
                Ok(f64::from_bits(self.be_u64(start)?))
            }
            0xca => {
                self.at += 1;
                Ok(f64::from(f32::from_bits(self.be_u32(start)?)))
            }
            #[expect(
                clippy::cast_precision_loss,
                reason = "a count above 2^53 may lose its last bits"
            )]
            0x00..=0x7f | 0xcc..=0xcf => Ok(self.u64()? as f64),
            #[expect(
                clippy::cast_precision_loss,
                reason = "a count above 2^53 may lose its last bits"
            )]
            0xd0..=0xd3 | 0xe0..=0xff => Ok(self.i64()? as f64),
            _ => self.wrong(start, Expected::Number),
        }
    }

    /// A boolean.
    #[inline]
    pub fn bool(&mut self) -> Result<bool> {
        let start = self.at;
        match self.next_byte(start)? {
            marker::FALSE => Ok(false),
            marker::TRUE => Ok(true),
            _ => self.wrong(start, Expected::Bool),
        }
    }

    /// Skips one value of any type.
    #[inline]
    pub fn skip(&mut self) -> Result<()> {
        match self.skip_one()? {
            0 => Ok(()),
            inside => self.skip_inside(inside),
        }
    }

    /// Skips `count` values.
    #[inline]
    pub fn skip_many(&mut self, count: u32) -> Result<()> {
        for _ in 0..count {
            self.skip()?;
        }
        Ok(())
    }

    /// Skips a scalar, or the header of a container; returns how many values the container holds.
    #[inline]
    fn skip_one(&mut self) -> Result<u32> {
        let start = self.at;
        let marker = self.next_byte(start)?;
        let length = match marker {
            0x00..=0x7f | 0xe0..=0xff | 0xc0 | 0xc2 | 0xc3 => return Ok(0),
            0xcc | 0xd0 => 1,
            0xcd | 0xd1 => 2,
            0xca | 0xce | 0xd2 => 4,
            0xcb | 0xcf | 0xd3 => 8,
            0xa0..=0xbf => u32::from(marker & 0x1f),
            0xc4 | 0xd9 => u32::from(self.next_byte(start)?),
            0xc5 | 0xda => u32::from(self.be_u16(start)?),
            0xc6 | 0xdb => self.be_u32(start)?,
            0xd4..=0xd8 => 1 + (1 << (marker - 0xd4)),
            0xc7 => 1 + u32::from(self.next_byte(start)?),
            0xc8 => 1 + u32::from(self.be_u16(start)?),
            0xc9 => self.be_u32(start)?.saturating_add(1),
            0x90..=0x9f | 0xdc | 0xdd => {
                self.at = start;
                return self.array();
            }
            0x80..=0x8f | 0xde | 0xdf => {
                self.at = start;
                let pairs = self.map()?;
                // Checked by `map` to fit the frame, so this can only be cut where the frame is 4 GiB or
                // more.
                return Ok(pairs.saturating_mul(2));
            }
            0xc1 => return self.wrong(start, Expected::Value),
        };
        self.bytes_of(start, length).map(|_| ())?;
        Ok(0)
    }

    /// Skips the `pending` values of a container whose header has been read.
    #[inline(never)]
    fn skip_inside(&mut self, mut pending: u32) -> Result<()> {
        // Values left at each level: a stack of fixed size, which no input can make overflow.
        let mut left = [0_u32; MAX_DEPTH];
        let mut depth = 0;
        loop {
            if pending > 0 {
                let Some(level) = left.get_mut(depth) else {
                    return Err(MsgpackError::TooDeep {
                        offset: offset(self.at),
                    });
                };
                *level = pending;
                depth += 1;
            }
            loop {
                let Some(level) = depth.checked_sub(1).and_then(|top| left.get_mut(top)) else {
                    return Ok(());
                };
                if *level > 0 {
                    *level -= 1;
                    break;
                }
                depth -= 1;
            }
            pending = self.skip_one()?;
        }
    }

    #[inline]
    fn next_byte(&mut self, start: usize) -> Result<u8> {
        match self.bytes.get(self.at) {
            Some(&byte) => {
                self.at += 1;
                Ok(byte)
            }
            None => Err(truncated(start)),
        }
    }

    #[inline]
    fn fixed<const N: usize>(&mut self, start: usize) -> Result<[u8; N]> {
        match self.bytes.get(self.at..).and_then(<[u8]>::first_chunk) {
            Some(bytes) => {
                self.at += N;
                Ok(*bytes)
            }
            None => Err(truncated(start)),
        }
    }

    #[inline]
    fn be_u16(&mut self, start: usize) -> Result<u16> {
        self.fixed(start).map(u16::from_be_bytes)
    }

    #[inline]
    fn be_u32(&mut self, start: usize) -> Result<u32> {
        self.fixed(start).map(u32::from_be_bytes)
    }

    #[inline]
    fn be_u64(&mut self, start: usize) -> Result<u64> {
        self.fixed(start).map(u64::from_be_bytes)
    }

    fn signed(&mut self, start: usize, marker: u8) -> Result<i64> {
        Ok(match marker {
            0xd0 => i64::from(self.next_byte(start)?.cast_signed()),
            0xd1 => i64::from(self.be_u16(start)?.cast_signed()),
            0xd2 => i64::from(self.be_u32(start)?.cast_signed()),
            _ => self.be_u64(start)?.cast_signed(),
        })
    }

    #[inline]
    fn bytes_of(&mut self, start: usize, length: u32) -> Result<&'a [u8]> {
        let end = self.at.saturating_add(length as usize);
        match self.bytes.get(self.at..end) {
            Some(bytes) => {
                self.at = end;
                Ok(bytes)
            }
            None if end > self.total => Err(too_long(start, length)),
            None => Err(truncated(start)),
        }
    }

    /// Every element takes a byte at least: a container that announces more than the frame holds is
    /// malformed.
    #[inline]
    fn check_count(&self, start: usize, count: u32, values: u64) -> Result<()> {
        if values > self.left() as u64 {
            return Err(too_long(start, count));
        }
        Ok(())
    }

    #[cold]
    fn wrong<T>(&mut self, start: usize, expected: Expected) -> Result<T> {
        self.at = start;
        let marker = self.bytes.get(start).copied().unwrap_or_default();
        Err(MsgpackError::WrongType {
            offset: offset(start),
            expected,
            marker,
        })
    }
}

#[cold]
fn truncated(start: usize) -> MsgpackError {
    MsgpackError::Truncated {
        offset: offset(start),
    }
}

#[cold]
fn too_long(start: usize, length: u32) -> MsgpackError {
    MsgpackError::TooLong {
        offset: offset(start),
        length,
    }
}

/// Frames of 4 GiB and more are never captured so far: the cut is for the error's text alone.
fn offset(at: usize) -> u32 {
    u32::try_from(at).unwrap_or(u32::MAX)
}
