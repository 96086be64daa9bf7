//! One connection: bytes to batches of whole events, within a rate.

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::net::UnixStream;

use super::{News, Shared};
use crate::{
    agent::monotonic_ns,
    pipeline::stats::Sender,
    wire::stat::{Encoding, LENGTH, MAX_EVENT, Whole},
};

/// Room for what was read and not yet handed on: the longest event, and a good read behind it.
const BUFFER: usize = 2 * MAX_EVENT;

/// Room at first; most senders are slow.
const FIRST_BUFFER: usize = 4 << 10;

/// The stream is not one of events: nothing more of it is read.
#[derive(Debug)]
pub(super) struct NoEvents;

pub(super) struct Connection<'a> {
    shared: &'a Shared,
    sender: Sender,
    buffer: Vec<u8>,
    filled: usize,
    encoding: Option<Encoding>,
    /// What is left to leave out of an event that is too long.
    skip: Skip,
    rate: Rate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Skip {
    Nothing,
    /// To the end of the line.
    Line,
    Bytes(usize),
}

/// A token bucket: a second's worth at once, and as many each second.
#[derive(Debug)]
struct Rate {
    per_second: f64,
    /// Below 0: taken in advance.
    left: f64,
    at: Instant,
}

impl Rate {
    fn new(per_second: u32) -> Self {
        let per_second = f64::from(per_second);
        Self {
            per_second,
            left: per_second,
            at: Instant::now(),
        }
    }

    /// Takes so many tokens, and says how long to wait before the next.
    fn take(&mut self, events: u32) -> Duration {
        let now = Instant::now();
        let gained = now.duration_since(self.at).as_secs_f64() * self.per_second;
        self.left = (self.left + gained).min(self.per_second) - f64::from(events);
        self.at = now;
        Duration::try_from_secs_f64(-self.left / self.per_second).unwrap_or_default()
    }
}

impl<'a> Connection<'a> {
    pub(super) fn new(shared: &'a Shared, sender: Sender) -> Self {
        Self {
            shared,
            sender,
            buffer: vec![0; FIRST_BUFFER],
            filled: 0,
            encoding: None,
            skip: Skip::Nothing,
            rate: Rate::new(shared.max_rate),
        }
    }

    /// Reads until the sender closes.
    pub(super) async fn run(mut self, stream: &UnixStream) -> Result<(), NoEvents> {
        loop {
            if stream.readable().await.is_err() {
                return Ok(());
            }
            if self.filled == self.buffer.len() {
                // Whole events are handed on at once, so this is one that has not ended.
                let longer = (2 * self.buffer.len()).min(BUFFER);
                self.buffer.resize(longer, 0);
            }
            let room = self.buffer.get_mut(self.filled..).unwrap_or_default();
            match stream.try_read(room) {
                Ok(0) => {
                    self.last().await;
                    return Ok(());
                }
                Ok(read) => self.filled += read,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(_) => return Ok(()),
            }
            self.hand_on().await?;
        }
    }

    /// Hands the whole events in the buffer on, and keeps the rest.
    async fn hand_on(&mut self) -> Result<(), NoEvents> {
        let time_ns = monotonic_ns();
        self.leave_out();
        let Some(first) = self.filled().first() else {
            return Ok(());
        };
        let encoding = match self.encoding {
            Some(encoding) => encoding,
            None => Encoding::of(*first).ok_or(NoEvents)?,
        };
        self.encoding = Some(encoding);
        let filled = self.filled();
        let mut whole = Whole::new(encoding, filled);
        let events = u32::try_from(whole.by_ref().count()).unwrap_or(u32::MAX);
        let used = filled.len() - whole.rest().len();
        if events > 0 {
            let bytes = filled.get(..used).unwrap_or_default().to_vec();
            self.send(time_ns, encoding, bytes).await;
        }
        self.forget(used);
        self.check_length(encoding)?;
        // Nothing is lost: the sender's own buffer fills, and it waits or drops. A sleep of no time is one of a
        // millisecond, which would be a limit of its own.
        let pause = self.rate.take(events);
        if !pause.is_zero() {
            tokio::time::sleep(pause).await;
        }
        Ok(())
    }

    /// An event that has not ended and is too long already is left out.
    fn check_length(&mut self, encoding: Encoding) -> Result<(), NoEvents> {
        match encoding {
            Encoding::Json if self.filled > MAX_EVENT => self.skip = Skip::Line,
            Encoding::Msgpack => {
                let Some((length, _)) = self.filled().split_first_chunk::<LENGTH>() else {
                    return Ok(());
                };
                if length.first() != Some(&0) {
                    // No length that anybody would send: the stream is out of step.
                    return Err(NoEvents);
                }
                let length = usize::try_from(u32::from_be_bytes(*length)).unwrap_or(usize::MAX);
                if length <= MAX_EVENT {
                    return Ok(());
                }
                self.skip = Skip::Bytes(length.saturating_add(LENGTH));
            }
            Encoding::Json => return Ok(()),
        }
        self.shared.drop_events("too_long");
        self.leave_out();
        Ok(())
    }

    /// Drops what is to be left out, as far as it has come.
    fn leave_out(&mut self) {
        match self.skip {
            Skip::Nothing => {}
            Skip::Line => match self.filled().iter().position(|byte| *byte == b'\n') {
                Some(end) => {
                    self.skip = Skip::Nothing;
                    self.forget(end + 1);
                }
                None => self.filled = 0,
            },
            Skip::Bytes(bytes) => {
                let left_out = bytes.min(self.filled);
                self.skip = match bytes - left_out {
                    0 => Skip::Nothing,
                    left => Skip::Bytes(left),
                };
                self.forget(left_out);
            }
        }
    }

    /// The sender closed: a last line may lack its end. One that was cut is no JSON, and counted as such.
    async fn last(&mut self) {
        if self.skip != Skip::Nothing || self.filled().trim_ascii().is_empty() {
            return;
        }
        if self.encoding != Some(Encoding::Json) {
            self.shared.drop_events("malformed");
            return;
        }
        let mut bytes = self.filled().to_vec();
        bytes.push(b'\n');
        self.send(monotonic_ns(), Encoding::Json, bytes).await;
    }

    async fn send(&self, time_ns: u64, encoding: Encoding, bytes: Vec<u8>) {
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        // The queue has more room than a buffer, and is never closed.
        let Ok(room) = Arc::clone(&self.shared.room).acquire_many_owned(length).await else {
            return;
        };
        drop(self.shared.queue.send(News::Events {
            sender: self.sender,
            time_ns,
            encoding,
            bytes,
            room,
        }));
    }

    fn filled(&self) -> &[u8] {
        self.buffer.get(..self.filled).unwrap_or_default()
    }

    /// Drops bytes at the front.
    fn forget(&mut self, bytes: usize) {
        self.buffer.copy_within(bytes..self.filled, 0);
        self.filled -= bytes;
    }
}
