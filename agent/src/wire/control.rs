//! Control messages of connectors whose payloads go through a transfer engine (docs/wire.md section "Connectors").
//!
//! The receiver asks over a REQ socket, the sender answers from a ROUTER socket; both run in stages or their workers.
//! Mooncake's transfer engine and Mori ask for the size (`query_info`), then for the transfer, and are told when it is
//! done. NIXL's receiver asks for descriptors, reads by itself and says when it has; so does that of Yuanrong's transfer
//! engine, which asks as the first two do.

use super::{
    WireError,
    connector::MAX_KEY,
    engine::{Payload, Seen, each_pair},
    msgpack::{MsgpackError, Reader},
};

/// A control message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control<'a> {
    /// Receiver: is there data under this key, and how much?
    Query {
        /// Key with stages.
        key: &'a str,
    },
    /// Sender: so much.
    Info {
        /// Key with stages.
        key: &'a str,
        /// Bytes.
        size: u64,
    },
    /// Receiver: write the data of this key into my memory.
    Pull {
        /// Key with stages.
        key: &'a str,
        /// Bytes, over all regions.
        size: u64,
    },
    /// Sender: the data is written, or could not be.
    Done {
        /// It is written.
        written: bool,
    },
    /// Receiver (NIXL): where is the data of this key?
    Claim {
        /// Key without stages.
        key: &'a str,
        /// Names the attempt.
        claim: &'a str,
    },
    /// Sender (NIXL): here. Tells no key.
    Offer {
        /// The attempt that it answers.
        claim: &'a str,
        /// Bytes; `None`: it lies in bytes that were not captured.
        size: Option<u64>,
    },
    /// Receiver (NIXL): the data is no longer needed, for it was read or could not be.
    Released {
        /// Key without stages.
        key: &'a str,
        /// The attempt that ends.
        claim: &'a str,
    },
    /// Sender (Yuanrong): so much, and here; answers a [`Control::Query`].
    Ready {
        /// Key with stages.
        key: &'a str,
        /// Bytes.
        size: u64,
    },
    /// Receiver (Yuanrong): the data was read.
    Read {
        /// Key with stages.
        key: &'a str,
    },
    /// Sender: there is no such data (yet), or it takes note.
    Nothing,
}

const QUERY: &[u8] = b"query_info";
const CLAIM: &[u8] = b"nixl_get_meta";
const RELEASE: &[u8] = b"nixl_xfer_done";
const CLEAN_UP: &[u8] = b"cleanup_key";

/// Longest name of an attempt, in bytes. NIXL's connector uses 32 hex digits.
const MAX_CLAIM: usize = 64;

/// Decodes a control message. `None`: the frame is none, by its first bytes.
#[must_use]
pub fn control(payload: Payload<'_>) -> Option<Result<Seen<Control<'_>>, WireError>> {
    let word = match payload.head {
        b"trans_done" => Some(Control::Done { written: true }),
        b"trans_error" => Some(Control::Done { written: false }),
        b"info_not_found" | b"nixl_ack" | b"nixl_meta_not_found" | b"ack_ok" | b"ack_error" => {
            Some(Control::Nothing)
        }
        _ => None,
    };
    if let Some(message) = word {
        return Some(Ok(whole(message)));
    }
    let behind = |prefix: &[u8]| {
        let head = payload.head.strip_prefix(prefix)?;
        Some(Reader::of_head(
            head,
            payload.size.saturating_sub(prefix.len() as u64),
        ))
    };
    let fields = if let Some(reader) = behind(QUERY) {
        Fields::read(reader).and_then(|fields| Ok(Control::Query { key: fields.key()? }))
    } else if let Some(reader) = behind(CLAIM) {
        Fields::read(reader).and_then(|fields| {
            Ok(Control::Claim {
                key: fields.key()?,
                claim: fields.claim()?,
            })
        })
    } else if let Some(reader) = behind(RELEASE) {
        Fields::read(reader).and_then(|fields| {
            // Metadata that came another way has no attempt's name.
            let Some(_) = fields.claim else {
                return Ok(Control::Nothing);
            };
            Ok(Control::Released {
                key: fields.key()?,
                claim: fields.claim()?,
            })
        })
    } else if let Some(reader) = behind(CLEAN_UP) {
        Fields::read(reader).and_then(|fields| Ok(Control::Read { key: fields.key()? }))
    } else {
        return map(payload);
    };
    Some(fields.map(whole))
}

fn whole(message: Control<'_>) -> Seen<Control<'_>> {
    Seen {
        message,
        is_partial: false,
    }
}

/// A message that is a map alone: known by its number of pairs and its first key.
fn map(payload: Payload<'_>) -> Option<Result<Seen<Control<'_>>, WireError>> {
    let mut start = payload.reader();
    let (count, first) = (start.map().ok()?, start.str_bytes().ok()?);
    match (count, first) {
        (3, b"request_id") => Some(Fields::read(payload.reader()).and_then(|fields| {
            let (key, size) = (fields.key()?, fields.size("data_size")?);
            Ok(whole(Control::Info { key, size }))
        })),
        (6, b"request_id") => Some(Fields::read(payload.reader()).and_then(|fields| {
            let (key, size) = (fields.key()?, fields.size("data_size")?);
            Ok(whole(Control::Ready { key, size }))
        })),
        (5, b"remote_hostname" | b"request_id") => Some(Fields::read(payload.reader()).and_then(|fields| {
            let (key, size) = (fields.key()?, fields.size("length")?);
            Ok(whole(Control::Pull { key, size }))
        })),
        (_, b"schema_version") => Some(offer(payload)),
        _ => None,
    }
}

/// NIXL's descriptors are of any length: the size and the attempt stand behind them.
fn offer(payload: Payload<'_>) -> Result<Seen<Control<'_>>, WireError> {
    let error = match Fields::read(payload.reader()) {
        Ok(fields) => return fields.offer(),
        Err(error) => error,
    };
    if !matches!(error, WireError::Msgpack(error) if error.is_truncated()) {
        return Err(error);
    }
    let last_pairs = offer_trailer(payload.tail).and_then(|start| payload.tail.get(start..));
    let mut fields = Fields::default();
    let mut reader = Reader::new(last_pairs.unwrap_or_default());
    while reader.left() > 0 {
        fields.pair(&mut reader)?;
    }
    // Not in the tail: it is the head that is cut.
    fields.offer().map_err(|_| error)
}

/// Where the last pairs of an offer start in a frame's tail: at the last `size` from which on everything parses as
/// pairs to the frame's very end.
pub(super) fn offer_trailer(tail: &[u8]) -> Option<usize> {
    const SIZE: &[u8] = b"\xa4size";
    let start = tail.windows(SIZE.len()).rposition(|window| window == SIZE)?;
    let mut reader = Reader::new(tail.get(start..)?);
    let mut fields = Fields::default();
    while reader.left() > 0 {
        fields.pair(&mut reader).ok()?;
    }
    fields.claim.map(|_| start)
}

/// The values of a control message's map that are looked at.
#[derive(Clone, Copy, Debug, Default)]
struct Fields<'a> {
    key: Option<&'a str>,
    claim: Option<&'a str>,
    size: Option<u64>,
}

impl<'a> Fields<'a> {
    fn read(mut reader: Reader<'a>) -> Result<Self, WireError> {
        let mut fields = Self::default();
        each_pair(&mut reader, |key, reader| fields.take(key, reader))?;
        match reader.left() {
            0 => Ok(fields),
            left => Err(WireError::TrailingBytes {
                left: u32::try_from(left).unwrap_or(u32::MAX),
            }),
        }
    }

    /// One pair of the map.
    fn pair(&mut self, reader: &mut Reader<'a>) -> Result<(), MsgpackError> {
        let key = reader.str_bytes()?;
        if !self.take(key, reader)? {
            reader.skip()?;
        }
        Ok(())
    }

    fn take(&mut self, key: &[u8], reader: &mut Reader<'a>) -> Result<bool, MsgpackError> {
        match key {
            b"request_id" | b"key" => self.key = Some(reader.str()?),
            b"claim_id" => self.claim = reader.optional(Reader::str)?,
            b"data_size" | b"length" | b"size" => self.size = Some(reader.u64()?),
            b"lengths" => {
                let mut sum = 0_u64;
                for _ in 0..reader.array()? {
                    sum = sum.saturating_add(reader.u64()?);
                }
                self.size = Some(sum);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn key(&self) -> Result<&'a str, WireError> {
        sized(self.key, MAX_KEY, "key")
    }

    fn claim(&self) -> Result<&'a str, WireError> {
        sized(self.claim, MAX_CLAIM, "claim_id")
    }

    fn offer(&self) -> Result<Seen<Control<'a>>, WireError> {
        let (claim, size) = (self.claim()?, self.size);
        Ok(whole(Control::Offer { claim, size }))
    }

    fn size(&self, what: &'static str) -> Result<u64, WireError> {
        self.size.ok_or(WireError::Missing { what })
    }
}

fn sized<'a>(text: Option<&'a str>, max: usize, what: &'static str) -> Result<&'a str, WireError> {
    match text {
        None => Err(WireError::Missing { what }),
        Some(text) if text.is_empty() || text.len() > max => Err(WireError::UnknownValue {
            what,
            value: text.len() as u64,
        }),
        Some(text) => Ok(text),
    }
}
