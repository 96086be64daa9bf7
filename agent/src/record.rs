//! Recordings of what the tap saw: written by `omnitap record`, read by `omnitap replay`.
//!
//! A recording is gzipped JSON lines: one [`Header`], then one [`Entry`] a line in the order the agent took them.
//! Replaying feeds the same decoder and state machines with the same times, so it gives the same numbers on any
//! machine. Frames are redacted before they are written unless content is asked for.

use std::io::{self, BufRead, BufReader, Read, Write};

use flate2::{Compression, bufread::MultiGzDecoder, write::GzEncoder};
use serde::{Deserialize, Serialize};

use crate::{
    coordinator::sample::CoordinatorSample,
    fill::sample::EngineSample,
    gpu::sample::GpuSample,
    host::identity::Change,
    wire::{
        frame::Frame,
        http::HttpEvent,
        shm::ShmEvent,
        stat::{Event, Head},
    },
};

/// Version of the format that this build writes and reads.
pub const FORMAT: u32 = 1;

/// Longest line that is read, in bytes: a frame of the largest capture limit in hex, with room to spare.
const MAX_LINE: u64 = 16 << 20;

/// Why a recording can't be written or read.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The file can't be read or written.
    #[error("recording: {0}")]
    Io(#[from] io::Error),
    /// A line is no entry.
    #[error("recording line {line}: {source}")]
    Line {
        /// Line number, from 1.
        line: u64,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// A line is longer than any entry can be.
    #[error("recording line {line} is longer than {MAX_LINE} bytes")]
    LongLine {
        /// Line number, from 1.
        line: u64,
    },
    /// Not a recording, or one of another format.
    #[error("recording has format {found}, this build reads {FORMAT}")]
    Format {
        /// The format that the header names.
        found: u32,
    },
    /// The file ends before its header.
    #[error("recording is empty")]
    Empty,
}

/// First line of a recording.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// [`FORMAT`].
    pub omnitap_recording: u32,
    /// Version of the agent that wrote it.
    pub agent: String,
    /// Whether token ids, text and tensor bytes were blanked.
    pub redacted: bool,
}

/// One thing that the agent took in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// `CLOCK_MONOTONIC` in nanoseconds when it was taken, for frames and shared memory when it happened.
    pub t: u64,
    /// What it was.
    #[serde(flatten)]
    pub item: Item,
}

/// What the agent took in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Item {
    /// Wall clock less `CLOCK_MONOTONIC`, in nanoseconds.
    WallOffset(i64),
    /// A change of what runs on the host.
    Change(Change),
    /// A frame.
    Frame(OwnedFrame),
    /// A segment of shared memory was handed on, taken or removed. Names are ids, and kept.
    Shm(OwnedShm),
    /// An API process did something with one of its connections.
    Http(OwnedHttp),
    /// A look at the GPUs.
    Gpu(GpuSample),
    /// A read of an engine's own metrics.
    Engine(EngineSample),
    /// A sender of stat events connected.
    StatOpened {
        /// Its connection.
        sender: u64,
        /// Its process.
        pid: u32,
    },
    /// A stat event. Fields that the agent does not know are not in it.
    Stat {
        /// The connection.
        sender: u64,
        /// What all events have.
        head: Head,
        /// What it tells.
        event: Box<Event>,
    },
    /// A sender's connection ended.
    StatClosed {
        /// The connection.
        sender: u64,
    },
    /// News of a coordinator.
    Coordinator(CoordinatorSample),
    /// Time passed; the state machines were given `t`.
    Tick,
}

/// A [`Frame`] with bytes of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnedFrame {
    /// See [`Frame::pid`].
    pub pid: u32,
    /// See [`Frame::tid`].
    pub tid: u32,
    /// See [`Frame::socket`].
    pub socket: u64,
    /// See [`Frame::content`].
    pub content: u64,
    /// See [`Frame::size`].
    pub size: u64,
    /// See [`Frame::more`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub more: bool,
    /// See [`Frame::aux`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub aux: bool,
    /// See [`Frame::head`].
    #[serde(default, with = "hex", skip_serializing_if = "Vec::is_empty")]
    pub head: Vec<u8>,
    /// See [`Frame::tail`].
    #[serde(default, with = "hex", skip_serializing_if = "Vec::is_empty")]
    pub tail: Vec<u8>,
}

impl OwnedFrame {
    /// Copies a frame. Its time goes into [`Entry::t`].
    #[must_use]
    pub fn new(frame: &Frame<'_>) -> Self {
        let Frame {
            time_ns: _,
            pid,
            tid,
            socket,
            content,
            size,
            more,
            aux,
            head,
            tail,
        } = *frame;
        Self {
            pid,
            tid,
            socket,
            content,
            size,
            more,
            aux,
            head: head.to_vec(),
            tail: tail.to_vec(),
        }
    }

    /// The frame, sent at `time_ns`.
    #[must_use]
    pub fn frame(&self, time_ns: u64) -> Frame<'_> {
        let Self {
            pid,
            tid,
            socket,
            content,
            size,
            more,
            aux,
            head,
            tail,
        } = self;
        Frame {
            time_ns,
            pid: *pid,
            tid: *tid,
            socket: *socket,
            content: *content,
            size: *size,
            more: *more,
            aux: *aux,
            head,
            tail,
        }
    }
}

/// A [`ShmEvent`] with a name of its own. Its end is [`Entry::t`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnedShm {
    /// The process.
    pub pid: u32,
    /// The thread.
    pub tid: u32,
    /// The segment.
    pub name: String,
    /// What happened to it.
    #[serde(flatten)]
    pub what: ShmWhat,
}

/// What happened to a segment of shared memory: the variants of [`ShmEvent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum ShmWhat {
    /// See [`ShmEvent::Put`].
    Put {
        /// Its bytes.
        size: u64,
        /// When it began.
        start_ns: u64,
    },
    /// See [`ShmEvent::Get`].
    Get {
        /// When it began.
        start_ns: u64,
    },
    /// See [`ShmEvent::Unlinked`].
    Unlinked,
}

impl OwnedShm {
    /// Copies an event; returns its end, for [`Entry::t`], too.
    #[must_use]
    pub fn new(event: &ShmEvent<'_>) -> (u64, Self) {
        let (pid, tid, name, what, t) = match *event {
            ShmEvent::Put {
                pid,
                tid,
                name,
                size,
                start_ns,
                done_ns,
            } => (pid, tid, name, ShmWhat::Put { size, start_ns }, done_ns),
            ShmEvent::Get {
                pid,
                tid,
                name,
                start_ns,
                done_ns,
            } => (pid, tid, name, ShmWhat::Get { start_ns }, done_ns),
            ShmEvent::Unlinked {
                pid,
                tid,
                name,
                time_ns,
            } => (pid, tid, name, ShmWhat::Unlinked, time_ns),
        };
        let name = name.to_owned();
        (t, Self { pid, tid, name, what })
    }

    /// The event, which ended at `t`.
    #[must_use]
    pub fn event(&self, t: u64) -> ShmEvent<'_> {
        let (pid, tid, name) = (self.pid, self.tid, self.name.as_str());
        match self.what {
            ShmWhat::Put { size, start_ns } => ShmEvent::Put {
                pid,
                tid,
                name,
                size,
                start_ns,
                done_ns: t,
            },
            ShmWhat::Get { start_ns } => ShmEvent::Get {
                pid,
                tid,
                name,
                start_ns,
                done_ns: t,
            },
            ShmWhat::Unlinked => ShmEvent::Unlinked {
                pid,
                tid,
                name,
                time_ns: t,
            },
        }
    }
}

/// An [`HttpEvent`] with bytes of its own. Its time is [`Entry::t`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnedHttp {
    /// The process.
    pub pid: u32,
    /// The thread.
    pub tid: u32,
    /// The connection.
    pub fd: i32,
    /// What happened.
    #[serde(flatten)]
    pub what: HttpWhat,
}

/// What happened to a connection: the variants of [`HttpEvent`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum HttpWhat {
    /// See [`HttpEvent::Accepted`].
    Accepted,
    /// See [`HttpEvent::Received`].
    Received(OwnedBytes),
    /// See [`HttpEvent::Sent`].
    Sent(OwnedBytes),
    /// See [`HttpEvent::Failed`].
    Failed {
        /// Why.
        errno: i32,
    },
    /// See [`HttpEvent::Closed`].
    Closed,
}

/// Bytes that passed in one call.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnedBytes {
    /// How many.
    pub size: u64,
    /// The first of them.
    #[serde(default, with = "hex", skip_serializing_if = "Vec::is_empty")]
    pub head: Vec<u8>,
    /// The last of them.
    #[serde(default, with = "hex", skip_serializing_if = "Vec::is_empty")]
    pub tail: Vec<u8>,
}

impl OwnedHttp {
    /// Copies an event.
    #[must_use]
    pub fn new(event: &HttpEvent<'_>) -> Self {
        let bytes = |size, head: &[u8], tail: &[u8]| OwnedBytes {
            size,
            head: head.to_vec(),
            tail: tail.to_vec(),
        };
        let (tid, what) = match *event {
            HttpEvent::Accepted { tid, .. } => (tid, HttpWhat::Accepted),
            HttpEvent::Received {
                tid,
                size,
                head,
                tail,
                ..
            } => (tid, HttpWhat::Received(bytes(size, head, tail))),
            HttpEvent::Sent {
                tid,
                size,
                head,
                tail,
                ..
            } => (tid, HttpWhat::Sent(bytes(size, head, tail))),
            HttpEvent::Failed { tid, errno, .. } => (tid, HttpWhat::Failed { errno }),
            HttpEvent::Closed { tid, .. } => (tid, HttpWhat::Closed),
        };
        let (pid, fd) = (event.pid(), event.fd());
        Self { pid, tid, fd, what }
    }

    /// The event, which happened at `time_ns`.
    #[must_use]
    pub fn event(&self, time_ns: u64) -> HttpEvent<'_> {
        let (pid, tid, fd) = (self.pid, self.tid, self.fd);
        match &self.what {
            HttpWhat::Accepted => HttpEvent::Accepted {
                pid,
                tid,
                fd,
                time_ns,
            },
            HttpWhat::Received(OwnedBytes { size, head, tail }) => HttpEvent::Received {
                pid,
                tid,
                fd,
                time_ns,
                size: *size,
                head,
                tail,
            },
            HttpWhat::Sent(OwnedBytes { size, head, tail }) => HttpEvent::Sent {
                pid,
                tid,
                fd,
                time_ns,
                size: *size,
                head,
                tail,
            },
            HttpWhat::Failed { errno } => HttpEvent::Failed {
                pid,
                tid,
                fd,
                time_ns,
                errno: *errno,
            },
            HttpWhat::Closed => HttpEvent::Closed {
                pid,
                tid,
                fd,
                time_ns,
            },
        }
    }
}

/// Byte strings as hex digits.
mod hex {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let digit = |nibble: u8| char::from(DIGITS[usize::from(nibble & 15)]);
        let text: String = bytes.iter().flat_map(|b| [digit(b >> 4), digit(*b)]).collect();
        serializer.serialize_str(&text)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        let nibble = |c: u8| char::from(c).to_digit(16).and_then(|d| u8::try_from(d).ok());
        let (pairs, rest) = text.as_bytes().as_chunks::<2>();
        if !rest.is_empty() {
            return Err(D::Error::custom("odd number of hex digits"));
        }
        pairs
            .iter()
            .map(|[high, low]| Some(nibble(*high)? << 4 | nibble(*low)?))
            .collect::<Option<_>>()
            .ok_or_else(|| D::Error::custom("not a hex digit"))
    }
}

/// Writes a recording.
#[derive(Debug)]
pub struct Writer<W: Write> {
    out: GzEncoder<W>,
}

impl<W: Write> Writer<W> {
    /// Starts a recording with its header.
    pub fn new(out: W, redacted: bool) -> Result<Self, RecordError> {
        let mut writer = Self {
            out: GzEncoder::new(out, Compression::default()),
        };
        let agent = env!("CARGO_PKG_VERSION").to_owned();
        writer.line(&Header {
            omnitap_recording: FORMAT,
            agent,
            redacted,
        })?;
        Ok(writer)
    }

    /// Appends an entry. At each tick all of it so far goes to the file: a recorder that is killed loses a second.
    pub fn entry(&mut self, entry: &Entry) -> Result<(), RecordError> {
        self.line(entry)?;
        if entry.item == Item::Tick {
            self.out.flush()?;
        }
        Ok(())
    }

    fn line(&mut self, value: &impl Serialize) -> Result<(), RecordError> {
        serde_json::to_writer(&mut self.out, value).map_err(io::Error::from)?;
        Ok(self.out.write_all(b"\n")?)
    }

    /// Ends the file; without it the last entries may be missing.
    pub fn finish(self) -> Result<W, RecordError> {
        Ok(self.out.finish()?)
    }
}

/// Reads a recording, entry by entry.
pub struct Entries {
    input: BufReader<Box<dyn Read>>,
    /// What the file says of itself.
    pub header: Header,
    line: u64,
    buffer: Vec<u8>,
}

impl Entries {
    /// Opens a recording and checks its header.
    pub fn new(input: impl Read + 'static) -> Result<Self, RecordError> {
        let input: Box<dyn Read> = Box::new(MultiGzDecoder::new(BufReader::new(input)));
        let header = Header {
            omnitap_recording: 0,
            agent: String::new(),
            redacted: true,
        };
        let mut entries = Self {
            input: BufReader::new(input),
            header,
            line: 0,
            buffer: Vec::new(),
        };
        if !entries.read_line()? {
            return Err(RecordError::Empty);
        }
        entries.header = entries.parse()?;
        match entries.header.omnitap_recording {
            FORMAT => Ok(entries),
            found => Err(RecordError::Format { found }),
        }
    }

    fn read_line(&mut self) -> Result<bool, RecordError> {
        self.buffer.clear();
        self.line += 1;
        let read = (&mut self.input)
            .take(MAX_LINE)
            .read_until(b'\n', &mut self.buffer)?;
        if read as u64 == MAX_LINE {
            return Err(RecordError::LongLine { line: self.line });
        }
        Ok(read > 0)
    }

    fn parse<'a, T: Deserialize<'a>>(&'a self) -> Result<T, RecordError> {
        serde_json::from_slice(&self.buffer).map_err(|source| RecordError::Line {
            line: self.line,
            source,
        })
    }
}

impl Iterator for Entries {
    type Item = Result<Entry, RecordError>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.read_line() {
            Ok(true) => Some(self.parse()),
            Ok(false) => None,
            Err(error) => Some(Err(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use proptest::prelude::*;

    use super::*;
    use crate::host::identity::{PipelineId, ProcessKey};

    fn written(entries: &[Entry]) -> Vec<u8> {
        let mut writer = Writer::new(Vec::new(), true).unwrap();
        for entry in entries {
            writer.entry(entry).unwrap();
        }
        writer.finish().unwrap()
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            t in any::<u64>(), pid in any::<u32>(), size in any::<u64>(), more in any::<bool>(), aux in any::<bool>(),
            head in prop::collection::vec(any::<u8>(), 0..300), tail in prop::collection::vec(any::<u8>(), 0..50),
        ) {
            let frame =
                Frame { time_ns: t, pid, tid: pid, socket: size, content: t, size, more, aux, head: &head, tail: &tail };
            let name = "req_0_1";
            let put = ShmEvent::Put { pid, tid: pid, name, size, start_ns: size, done_ns: t };
            let get = ShmEvent::Get { pid, tid: pid, name, start_ns: size, done_ns: t };
            let event = Box::new(Event::Lost(crate::wire::stat::Lost { events: size }));
            let unlinked = ShmEvent::Unlinked { pid, tid: pid, name, time_ns: t };
            let entries = vec![
                Entry { t: 0, item: Item::WallOffset(-5) },
                Entry { t: 1, item: Item::Change(Change::ProcessGone(ProcessKey { pid, start_ticks: t })) },
                Entry { t: 2, item: Item::Change(Change::PipelineGone(PipelineId(pid))) },
                Entry { t, item: Item::Frame(OwnedFrame::new(&frame)) },
                Entry { t, item: Item::Shm(OwnedShm::new(&put).1) },
                Entry { t, item: Item::Shm(OwnedShm::new(&get).1) },
                Entry { t, item: Item::Shm(OwnedShm::new(&unlinked).1) },
                Entry { t: 2, item: Item::StatOpened { sender: t, pid } },
                Entry { t, item: Item::Stat { sender: t, head: Head { v: 1, t: Some(0.1), ..Head::default() }, event } },
                Entry { t: 3, item: Item::StatClosed { sender: t } },
                Entry { t: 3, item: Item::Tick },
            ];
            let file = written(&entries);
            let read: Vec<Entry> = Entries::new(Cursor::new(file)).unwrap().collect::<Result<_, _>>().unwrap();
            prop_assert_eq!(&read, &entries);
            let Item::Frame(owned) = &read[3].item else { panic!("no frame") };
            prop_assert_eq!(owned.frame(t), frame);
            for (entry, event) in read[4..7].iter().zip([put, get, unlinked]) {
                let Item::Shm(owned) = &entry.item else { panic!("no event of shared memory") };
                prop_assert_eq!(owned.event(t), event);
                prop_assert_eq!(OwnedShm::new(&event).0, t);
            }
        }

        #[test]
        fn damage_is_an_error_and_no_panic(cut in 0_usize..120, flip in 0_usize..120) {
            let mut file = written(&[Entry { t: 7, item: Item::Tick }]);
            let at = flip % file.len();
            file[at] ^= 0x55;
            file.truncate(cut.max(1));
            if let Ok(entries) = Entries::new(Cursor::new(file)) {
                for entry in entries.take(10) {
                    if entry.is_err() {
                        break;
                    }
                }
            }
        }
    }

    #[test]
    fn a_recorder_that_is_killed_leaves_what_came_before_its_last_tick() {
        struct Shared(std::rc::Rc<std::cell::RefCell<Vec<u8>>>);
        impl Write for Shared {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0.borrow_mut().write(bytes)
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let file = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
        let mut writer = Writer::new(Shared(std::rc::Rc::clone(&file)), true).unwrap();
        writer
            .entry(&Entry {
                t: 1,
                item: Item::WallOffset(1),
            })
            .unwrap();
        writer
            .entry(&Entry {
                t: 2,
                item: Item::Tick,
            })
            .unwrap();
        let killed = file.borrow().clone();
        drop(writer);
        let read: Vec<_> = Entries::new(Cursor::new(killed))
            .unwrap()
            .take_while(Result::is_ok)
            .collect();
        assert_eq!(read.len(), 2);
    }

    #[test]
    fn another_format_is_named() {
        let mut out = GzEncoder::new(Vec::new(), Compression::fast());
        out.write_all(b"{\"omnitap_recording\":9,\"agent\":\"x\",\"redacted\":true}\n")
            .unwrap();
        let error = Entries::new(Cursor::new(out.finish().unwrap())).err().unwrap();
        assert_eq!(error.to_string(), "recording has format 9, this build reads 1");
    }

    #[test]
    fn a_bad_line_is_named_by_its_number() {
        let mut writer = Writer::new(Vec::new(), true).unwrap();
        writer
            .entry(&Entry {
                t: 1,
                item: Item::Tick,
            })
            .unwrap();
        writer.line(&"what").unwrap();
        let mut entries = Entries::new(Cursor::new(writer.finish().unwrap())).unwrap();
        assert!(entries.next().unwrap().is_ok());
        let error = entries.next().unwrap().unwrap_err();
        assert!(error.to_string().starts_with("recording line 3: "), "{error}");
    }
}
