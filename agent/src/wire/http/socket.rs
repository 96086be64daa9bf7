//! WebSocket frames (RFC 6455) and the sentences of the speech WebSocket.

use super::{
    answer::base64_len,
    ends::Ends,
    json::{Fields, Value},
    note::AudioChunk,
    redact::{Trace, Zone},
    stretch::Stretch,
};

/// Bytes that are kept of a text message's ends.
const MAX_TEXT_FIRST: usize = 512;
const MAX_TEXT_LAST: usize = 512;

/// Longest payload of a control frame.
const MAX_CONTROL: u64 = 125;

/// What a frame carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Opcode {
    Continuation,
    Text,
    Binary,
    Close,
    Ping,
    Pong,
}

impl Opcode {
    fn of(bits: u8) -> Option<Self> {
        Some(match bits {
            0 => Self::Continuation,
            1 => Self::Text,
            2 => Self::Binary,
            8 => Self::Close,
            9 => Self::Ping,
            10 => Self::Pong,
            _ => return None,
        })
    }

    fn is_control(self) -> bool {
        matches!(self, Self::Close | Self::Ping | Self::Pong)
    }
}

/// The frame at hand.
#[derive(Clone, Copy, Debug)]
struct Frame {
    opcode: Opcode,
    is_last: bool,
    mask: Option<[u8; 4]>,
    left: u64,
    /// Bytes of the payload so far, for the mask.
    passed: u64,
}

/// One direction of a WebSocket.
#[derive(Clone, Debug)]
pub(super) struct Frames {
    /// Frames must be masked, as a client's are.
    masked: bool,
    header: Vec<u8>,
    frame: Option<Frame>,
    /// Kind of the message at hand; text is kept.
    message: Option<Message>,
    text: Ends,
    bytes: u64,
    first_ns: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Message {
    Text,
    Binary,
}

/// What a piece of a WebSocket came to.
#[derive(Clone, Debug)]
pub(super) enum Heard {
    Text { time_ns: u64, text: Ends },
    Binary { time_ns: u64, bytes: u64 },
    Close,
}

/// A direction that can't be followed: bytes before this were lost, or it is no WebSocket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NoFrame;

impl Frames {
    pub(super) fn of_client() -> Self {
        Self::new(true)
    }

    pub(super) fn of_server() -> Self {
        Self::new(false)
    }

    fn new(masked: bool) -> Self {
        Self {
            masked,
            header: Vec::new(),
            frame: None,
            message: None,
            text: Ends::new(MAX_TEXT_FIRST, MAX_TEXT_LAST),
            bytes: 0,
            first_ns: 0,
        }
    }

    /// Takes the next bytes.
    pub(super) fn take(
        &mut self,
        time_ns: u64,
        mut input: Stretch<'_>,
        heard: &mut Vec<Heard>,
        mut trace: Option<&mut Trace>,
    ) -> Result<(), NoFrame> {
        loop {
            let Some(mut frame) = self.frame else {
                if input.is_empty() {
                    return Ok(());
                }
                let rest = self.header(time_ns, input)?;
                if let Some(trace) = &mut trace {
                    trace.mark(input, rest, Zone::Framing);
                }
                input = rest;
                continue;
            };
            if frame.left > 0 {
                if input.is_empty() {
                    return Ok(());
                }
                let (payload, rest) = input.split(frame.left);
                if let Some(trace) = &mut trace
                    && self.keeps_text(&frame)
                {
                    trace.mark(input, rest, Zone::Json(self.text.before()));
                }
                self.payload(&frame, payload);
                frame.left -= payload.len();
                frame.passed += payload.len();
                input = rest;
                self.frame = Some(frame);
            }
            if frame.left == 0 {
                self.frame = None;
                self.frame_end(&frame, heard);
            }
        }
    }

    /// Whether bytes at the start of a call begin a frame that fits into it, to find the way again after a loss.
    pub(super) fn begins_with_frame(&self, input: Stretch<'_>) -> bool {
        let mut trial = Self::new(self.masked);
        trial.header.extend(input.start().iter().take(14));
        match trial.parse_header() {
            Ok(Some((frame, header))) => {
                frame.opcode != Opcode::Continuation && header as u64 + frame.left <= input.len()
            }
            _ => false,
        }
    }

    fn header<'a>(&mut self, time_ns: u64, mut input: Stretch<'a>) -> Result<Stretch<'a>, NoFrame> {
        loop {
            if let Some((frame, _)) = self.parse_header()? {
                self.header.clear();
                self.begin(time_ns, &frame)?;
                self.frame = Some(frame);
                return Ok(input);
            }
            if input.is_empty() {
                return Ok(input);
            }
            let byte = *input.start().first().ok_or(NoFrame)?;
            self.header.push(byte);
            input = input.split(1).1;
        }
    }

    /// The frame whose header has been collected, and the header's length; `None`: more is to come.
    fn parse_header(&self) -> Result<Option<(Frame, usize)>, NoFrame> {
        let [first, second, rest @ ..] = self.header.as_slice() else {
            return Ok(None);
        };
        // The first of three reserved bits is that of compressed messages, which are not followed.
        if first & 0x70 != 0 {
            return Err(NoFrame);
        }
        let opcode = Opcode::of(first & 0x0f).ok_or(NoFrame)?;
        if (second & 0x80 != 0) != self.masked {
            return Err(NoFrame);
        }
        let (len, rest, used) = match second & 0x7f {
            126 => match rest.split_first_chunk::<2>() {
                Some((len, rest)) => (u64::from(u16::from_be_bytes(*len)), rest, 4),
                None => return Ok(None),
            },
            127 => match rest.split_first_chunk::<8>() {
                Some((len, rest)) => (u64::from_be_bytes(*len), rest, 10),
                None => return Ok(None),
            },
            len => (u64::from(len), rest, 2),
        };
        let (mask, used) = if self.masked {
            match rest.first_chunk::<4>() {
                Some(mask) => (Some(*mask), used + 4),
                None => return Ok(None),
            }
        } else {
            (None, used)
        };
        let is_last = first & 0x80 != 0;
        if len > i64::MAX as u64 || (opcode.is_control() && (len > MAX_CONTROL || !is_last)) {
            return Err(NoFrame);
        }
        let frame = Frame {
            opcode,
            is_last,
            mask,
            left: len,
            passed: 0,
        };
        Ok(Some((frame, used)))
    }

    fn begin(&mut self, time_ns: u64, frame: &Frame) -> Result<(), NoFrame> {
        let fresh = match frame.opcode {
            Opcode::Text => Message::Text,
            Opcode::Binary => Message::Binary,
            Opcode::Continuation if self.message.is_none() => return Err(NoFrame),
            _ => return Ok(()),
        };
        if self.message.is_some() {
            return Err(NoFrame);
        }
        self.message = Some(fresh);
        self.text.clear();
        self.bytes = 0;
        self.first_ns = time_ns;
        Ok(())
    }

    fn payload(&mut self, frame: &Frame, payload: Stretch<'_>) {
        if frame.opcode.is_control() {
            return;
        }
        self.bytes = self.bytes.saturating_add(payload.len());
        if self.keeps_text(frame) {
            self.text.push(payload);
        }
    }

    /// Nothing of a client's texts is needed.
    fn keeps_text(&self, frame: &Frame) -> bool {
        self.message == Some(Message::Text) && frame.mask.is_none() && !frame.opcode.is_control()
    }

    fn frame_end(&mut self, frame: &Frame, heard: &mut Vec<Heard>) {
        match frame.opcode {
            Opcode::Close => heard.push(Heard::Close),
            Opcode::Ping | Opcode::Pong => {}
            Opcode::Continuation | Opcode::Text | Opcode::Binary => {
                if !frame.is_last {
                    return;
                }
                let time_ns = self.first_ns;
                match self.message.take() {
                    Some(Message::Text) => heard.push(Heard::Text {
                        time_ns,
                        text: std::mem::replace(&mut self.text, Ends::new(MAX_TEXT_FIRST, MAX_TEXT_LAST)),
                    }),
                    Some(Message::Binary) => heard.push(Heard::Binary {
                        time_ns,
                        bytes: self.bytes,
                    }),
                    None => {}
                }
            }
        }
    }

    /// Whether a frame or a message is half said.
    pub(super) fn is_mid_message(&self) -> bool {
        self.frame.is_some() || self.message.is_some() || !self.header.is_empty()
    }
}

/// What the server says on the speech WebSocket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// A sentence begins; whether its audio is streamed.
    Start { streams: bool },
    /// Samples of the sentence.
    Audio(AudioChunk),
    /// The sentence can't be spoken, or something else went wrong.
    Error,
    /// The sentence is over.
    Done { failed: bool },
    /// What matters to no family.
    Other,
}

impl Said {
    /// Reads a text message.
    pub(super) fn text(text: &Ends) -> Self {
        let known = text.known();
        let fields = Fields::of(&known);
        match fields.top(b"type") {
            // Only a streamed sentence has a sample rate of its own.
            Some(Value::Text(b"audio.start")) => Self::Start {
                streams: fields.top(b"sample_rate").is_some(),
            },
            Some(Value::Text(b"audio.chunk")) => match base64_len(&fields, b"audio_b64", b"timestamps") {
                Some((0, _)) => Self::Other,
                known => Self::Audio(AudioChunk {
                    bytes: known.map_or(0, |(bytes, _)| bytes),
                    sample_rate: fields.top(b"sample_rate").and_then(Value::count),
                    channels: None,
                }),
            },
            Some(Value::Text(b"audio.done")) => Self::Done {
                failed: fields.top(b"error") == Some(Value::Bool(true)),
            },
            Some(Value::Text(b"error")) => Self::Error,
            _ => Self::Other,
        }
    }

    /// Takes a binary message.
    pub(super) fn binary(bytes: u64) -> Self {
        if bytes == 0 {
            return Self::Other;
        }
        Self::Audio(AudioChunk {
            bytes,
            sample_rate: None,
            channels: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// Messages as `t12`, `b30`, `close`.
    fn heard(frames: &mut Frames, input: Stretch<'_>) -> Result<Vec<String>, NoFrame> {
        let mut heard = Vec::new();
        frames.take(7, input, &mut heard, None)?;
        Ok(heard
            .iter()
            .map(|message| match message {
                Heard::Text { text, .. } => format!("t{}", text.known().len),
                Heard::Binary { bytes, .. } => format!("b{bytes}"),
                Heard::Close => "close".to_owned(),
            })
            .collect())
    }

    #[rstest]
    #[case::text(b"\x81\x02hi", &["t2"])]
    #[case::fragments_around_a_ping(b"\x01\x01h\x89\x00\x80\x01i", &["t2"])]
    #[case::binary_of_two_bytes_of_length(b"\x82\x7e\x00\x03abc", &["b3"])]
    #[case::two_in_one_write(b"\x81\x01a\x88\x02\x03\xe8", &["t1", "close"])]
    #[case::empty(b"\x82\x00", &["b0"])]
    fn of_a_server(#[case] input: &[u8], #[case] expected: &[&str]) {
        assert_eq!(
            heard(&mut Frames::of_server(), Stretch::known(input)).unwrap(),
            expected
        );
        // Byte by byte.
        let mut frames = Frames::of_server();
        let pieces: Vec<String> = input
            .chunks(1)
            .flat_map(|piece| heard(&mut frames, Stretch::known(piece)).unwrap())
            .collect();
        assert_eq!(pieces, expected);
    }

    #[rstest]
    #[case::compressed(b"\xc1\x00")]
    #[case::masked(b"\x81\x80\x00\x00\x00\x00")]
    #[case::unknown_opcode(b"\x83\x00")]
    #[case::long_ping(b"\x89\x7e\x00\x80")]
    #[case::continuation_of_nothing(b"\x80\x00")]
    #[case::text_within_a_text(b"\x01\x00\x01\x00")]
    fn no_frames_of_a_server(#[case] input: &[u8]) {
        assert_eq!(
            heard(&mut Frames::of_server(), Stretch::known(input)),
            Err(NoFrame)
        );
    }

    #[test]
    fn of_a_client() {
        let mut frames = Frames::of_client();
        let input = b"\x81\x82abcd\x09\x0b\x88\x80abcd";
        assert_eq!(
            heard(&mut frames, Stretch::known(input)).unwrap(),
            ["t0", "close"]
        );
        assert!(heard(&mut frames, Stretch::known(b"\x81\x02hi")).is_err());
    }

    #[test]
    fn the_middle_of_a_frame_may_be_unknown() {
        let mut frames = Frames::of_server();
        let mut input = b"\x82\x7e\x10\x00".to_vec();
        input.extend([1; 20]);
        let stretch = Stretch::new(4 + 4096, &input, &[2; 10]);
        assert_eq!(heard(&mut frames, stretch).unwrap(), ["b4096"]);
        assert!(!frames.is_mid_message());
    }

    #[rstest]
    #[case::start(r#"{"type":"audio.start","sample_rate":24000}"#, Said::Start { streams: true })]
    #[case::whole_file(r#"{"type":"audio.start","format":"wav"}"#, Said::Start { streams: false })]
    #[case::done(r#"{"type":"audio.done","total_bytes":3,"error":false}"#, Said::Done { failed: false })]
    #[case::failed(r#"{"type":"audio.done","total_bytes":3,"error":true}"#, Said::Done { failed: true })]
    #[case::error(r#"{"type":"error","message":"\"type\":\"audio.done\""}"#, Said::Error)]
    #[case::alignment(r#"{"type":"audio.chunk","audio_b64":"","timestamps":[]}"#, Said::Other)]
    #[case::session(r#"{"type":"session.done","total_sentences":1}"#, Said::Other)]
    #[case::no_json("hello", Said::Other)]
    fn texts_of_the_server(#[case] text: &str, #[case] said: Said) {
        let mut ends = Ends::new(MAX_TEXT_FIRST, MAX_TEXT_LAST);
        ends.push(Stretch::known(text.as_bytes()));
        assert_eq!(Said::text(&ends), said);
    }
}
