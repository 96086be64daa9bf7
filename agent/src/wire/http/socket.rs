//! WebSocket frames (RFC 6455) and the sentences of the speech WebSocket.

use super::{
    answer::base64_len,
    deflate::{HOLE, Inflater},
    ends::Ends,
    json::{Fields, Value},
    note::AudioChunk,
    redact::{Trace, Zone},
    stretch::Stretch,
};

/// Bytes that are kept of a text message's ends.
const MAX_TEXT_FIRST: usize = 512;
const MAX_TEXT_LAST: usize = 512;

/// Longest message that is as good as empty when it is compressed.
const MAX_EMPTY: u64 = 2;

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
    /// The first of three reserved bits: the message is compressed.
    is_deflated: bool,
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
    /// Messages may be compressed; what is needed to read them.
    inflater: Option<Inflater>,
    header: Vec<u8>,
    frame: Option<Frame>,
    /// Kind of the message at hand, and whether it is compressed; text is kept.
    message: Option<(Message, bool)>,
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
    Text {
        time_ns: u64,
        text: Ends,
    },
    /// A text that was compressed, with holes; `None`: it can't be read.
    Inflated {
        time_ns: u64,
        text: Option<Vec<u8>>,
    },
    /// `bytes` of `None`: it is compressed, and not empty.
    Binary {
        time_ns: u64,
        bytes: Option<u64>,
    },
    Close,
}

/// A direction that can't be followed: bytes before this were lost, or it is no WebSocket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NoFrame;

impl Frames {
    pub(super) fn of_client(is_deflated: bool) -> Self {
        Self::new(true, is_deflated)
    }

    pub(super) fn of_server(is_deflated: bool) -> Self {
        Self::new(false, is_deflated)
    }

    fn new(masked: bool, is_deflated: bool) -> Self {
        Self {
            masked,
            inflater: is_deflated.then(Inflater::default),
            header: Vec::new(),
            frame: None,
            message: None,
            text: Ends::new(MAX_TEXT_FIRST, MAX_TEXT_LAST),
            bytes: 0,
            first_ns: 0,
        }
    }

    /// The same direction after a loss.
    pub(super) fn anew(&self) -> Self {
        Self::new(self.masked, self.inflater.is_some())
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
                    // Of a compressed text nothing can be left out, and it has what is spoken.
                    && !self.is_deflated()
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
        let mut trial = self.anew();
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
        let is_deflated = first & 0x40 != 0;
        let opcode = Opcode::of(first & 0x0f).ok_or(NoFrame)?;
        // Only the first frame of a message may say so, and only where both sides agreed.
        let may_deflate = self.inflater.is_some() && matches!(opcode, Opcode::Text | Opcode::Binary);
        if first & 0x30 != 0 || (is_deflated && !may_deflate) {
            return Err(NoFrame);
        }
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
            is_deflated,
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
        self.message = Some((fresh, frame.is_deflated));
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
        matches!(self.message, Some((Message::Text, _))) && frame.mask.is_none() && !frame.opcode.is_control()
    }

    fn is_deflated(&self) -> bool {
        matches!(self.message, Some((_, true)))
    }

    /// The text that has been kept, decompressed.
    fn inflated(&mut self) -> Option<Vec<u8>> {
        let inflater = self.inflater.as_mut()?;
        let text = self.text.before().and_then(|message| inflater.text(&message));
        if text.is_none() {
            inflater.forget();
        }
        text
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
                    // Nothing of a client's texts is needed.
                    Some((Message::Text, true)) if frame.mask.is_none() => {
                        let text = self.inflated();
                        heard.push(Heard::Inflated { time_ns, text });
                    }
                    Some((Message::Text, _)) => heard.push(Heard::Text {
                        time_ns,
                        text: std::mem::replace(&mut self.text, Ends::new(MAX_TEXT_FIRST, MAX_TEXT_LAST)),
                    }),
                    Some((Message::Binary, is_deflated)) => {
                        if is_deflated && let Some(inflater) = &mut self.inflater {
                            inflater.forget();
                        }
                        let is_known = !is_deflated || self.bytes <= MAX_EMPTY;
                        let bytes = if is_deflated { 0 } else { self.bytes };
                        heard.push(Heard::Binary {
                            time_ns,
                            bytes: is_known.then_some(bytes),
                        });
                    }
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
    /// It can't be read whole, and may be any of these.
    Unclear,
    /// What matters to no family.
    Other,
}

/// Types of texts, as they begin.
const TYPES: [(&[u8], Kind); 5] = [
    (br#"{"type":"audio.start""#, Kind::Start),
    (br#"{"type":"audio.chunk""#, Kind::Chunk),
    (br#"{"type":"audio.done""#, Kind::Done),
    (br#"{"type":"session.done""#, Kind::Session),
    (br#"{"type":"error""#, Kind::Error),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Start,
    Chunk,
    Done,
    Session,
    Error,
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

    /// Reads a text message that was compressed.
    pub(super) fn inflated(text: Option<&[u8]>) -> Self {
        let Some(text) = text else {
            return Self::Unclear;
        };
        if !text.contains(&HOLE) {
            let mut ends = Ends::new(text.len(), 0);
            ends.push(Stretch::known(text));
            return Self::text(&ends);
        }
        let fitting = TYPES.iter().filter(|(start, _)| fits(text, start));
        let mut kinds = fitting.map(|(_, kind)| *kind);
        let (Some(kind), None) = (kinds.next(), kinds.next()) else {
            return Self::Unclear;
        };
        match kind {
            Kind::Start => {
                let name = br#""sample_rate":"#;
                let streams = text.windows(name.len()).any(|part| fits(part, name));
                // A hole that has room for the name may hide it.
                let hidden = text
                    .chunk_by(|a, b| a == b)
                    .any(|run| run.first() == Some(&HOLE) && run.len() >= name.len() / 2);
                if streams || !hidden {
                    Self::Start { streams }
                } else {
                    Self::Unclear
                }
            }
            // Whether there is audio in it is not known.
            Kind::Chunk => Self::Unclear,
            Kind::Done => {
                let ends = |end: &[u8]| {
                    let from = text.len().saturating_sub(end.len());
                    text.get(from..).is_some_and(|last| fits(last, end))
                };
                match (ends(br#""error":false}"#), ends(br#""error":true}"#)) {
                    (true, false) => Self::Done { failed: false },
                    (false, true) => Self::Done { failed: true },
                    _ => Self::Unclear,
                }
            }
            Kind::Session => Self::Other,
            Kind::Error => Self::Error,
        }
    }

    /// Takes a binary message of so many bytes, where that is known.
    pub(super) fn binary(bytes: Option<u64>) -> Self {
        if bytes == Some(0) {
            return Self::Other;
        }
        Self::Audio(AudioChunk {
            bytes: bytes.unwrap_or(0),
            sample_rate: None,
            channels: None,
        })
    }
}

/// Whether a text with holes begins like this one; half of it must be known.
fn fits(text: &[u8], like: &[u8]) -> bool {
    let Some(text) = text.get(..like.len()) else {
        return false;
    };
    let known = text.iter().filter(|&&byte| byte != HOLE).count();
    known * 2 >= like.len() && text.iter().zip(like).all(|(a, b)| a == b || *a == HOLE)
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
                Heard::Inflated { text, .. } => format!("i{}", text.as_ref().map_or(0, Vec::len)),
                Heard::Binary { bytes, .. } => {
                    bytes.map_or_else(|| "b?".to_owned(), |bytes| format!("b{bytes}"))
                }
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
            heard(&mut Frames::of_server(false), Stretch::known(input)).unwrap(),
            expected
        );
        // Byte by byte.
        let mut frames = Frames::of_server(false);
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
            heard(&mut Frames::of_server(false), Stretch::known(input)),
            Err(NoFrame)
        );
    }

    #[test]
    fn compressed_where_both_sides_agreed() {
        let input = b"\xc1\x03\x4a\x04\x00\xc2\x01\x00\xc2\x03\x4a\x04\x00\x82\x01a";
        let expected = ["i1", "b0", "b?", "b1"];
        assert_eq!(
            heard(&mut Frames::of_server(true), Stretch::known(input)).unwrap(),
            expected
        );
        assert_eq!(
            heard(&mut Frames::of_server(true), Stretch::known(b"\xc9\x00")),
            Err(NoFrame)
        );
    }

    #[rstest]
    #[case::done("{'type___audio.done___utterance_index':0,'error':false}", Said::Done { failed: false })]
    #[case::failed("{'type___audio.done___utterance_index':0,'err__':true}", Said::Done { failed: true })]
    #[case::done_or_failed("{'type':'audio.done','______________", Said::Unclear)]
    #[case::start("{'type___audio.start','sentence_text':'hi','sampl_____e':24000}", Said::Start { streams: true })]
    #[case::whole_file("{'type___audio.start','format':'wav'}", Said::Start { streams: false })]
    #[case::start_of_either("{'type___audio.start','________________}", Said::Unclear)]
    #[case::start_or_done("{'type':'audio._______________________", Said::Unclear)]
    #[case::session("{'type':'session_______total_sentences':1}", Said::Other)]
    #[case::error("{'type':'error___message':'no'}", Said::Error)]
    #[case::all_holes("_______________________________________", Said::Unclear)]
    fn compressed_texts_with_holes(#[case] text: &str, #[case] said: Said) {
        let text = text.replace('\'', "\"").replace('_', "\0");
        assert_eq!(Said::inflated(Some(text.as_bytes())), said);
    }

    #[test]
    fn of_a_client() {
        let mut frames = Frames::of_client(false);
        let input = b"\x81\x82abcd\x09\x0b\x88\x80abcd";
        assert_eq!(
            heard(&mut frames, Stretch::known(input)).unwrap(),
            ["t0", "close"]
        );
        assert!(heard(&mut frames, Stretch::known(b"\x81\x02hi")).is_err());
    }

    #[test]
    fn the_middle_of_a_frame_may_be_unknown() {
        let mut frames = Frames::of_server(false);
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
