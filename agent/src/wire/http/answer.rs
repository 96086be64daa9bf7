//! What an answer's body holds: raw audio, server-sent events, or JSON.

use super::{
    ends::{Ends, Known},
    head::{AnswerHead, Media, id},
    json::{Fields, Value},
    note::{AudioChunk, Endpoint, ImageAnswer, Note},
    redact::Zone,
    request::size,
    stretch::{Part, Stretch},
};

/// Bytes in front of the samples of a streamed WAV file.
pub(super) const WAV_HEADER: usize = 44;

/// Bytes that are kept of an event's ends.
const MAX_EVENT_FIRST: usize = 768;
const MAX_EVENT_LAST: usize = 1024;

/// Bytes that are kept of a JSON answer's ends: metrics stand behind the images.
const MAX_JSON_FIRST: usize = 1024;
const MAX_JSON_LAST: usize = 4096;

/// Stages whose times are taken from an answer.
const MAX_STAGES: usize = 32;

/// Reads an answer's body.
#[derive(Clone, Debug)]
pub(super) enum Content {
    /// Nothing in it matters.
    Ignored,
    Raw(Raw),
    Events(Box<Events>),
    Json(Box<Ends>),
    /// Files of images, which tell nothing of themselves.
    Files,
}

/// What a piece of an answer came to.
pub(super) type Found = (u64, Note);

impl Content {
    pub(super) fn of(endpoint: Endpoint, head: &AnswerHead) -> Self {
        let is_engines = endpoint.id_prefix().is_some();
        if !is_engines || head.is_coded {
            return Self::Ignored;
        }
        match head.media {
            Media::Pcm | Media::Wav if head.streams && endpoint == Endpoint::Speech => {
                Self::Raw(Raw::new(head.media == Media::Wav))
            }
            Media::Events => Self::Events(Box::new(Events::new())),
            Media::Json => Self::Json(Box::new(Ends::new(MAX_JSON_FIRST, MAX_JSON_LAST))),
            Media::Images if endpoint.gives_images() && head.status == 200 => Self::Files,
            _ => Self::Ignored,
        }
    }

    pub(super) fn data(&mut self, time_ns: u64, data: Stretch<'_>, found: &mut Vec<Found>) {
        match self {
            Self::Ignored | Self::Files => {}
            Self::Raw(raw) => raw.data(time_ns, data),
            Self::Events(events) => events.data(time_ns, data, found),
            Self::Json(ends) => ends.push(data),
        }
    }

    pub(super) fn chunk_end(&mut self, found: &mut Vec<Found>) {
        match self {
            Self::Raw(raw) => raw.chunk_end(found),
            Self::Events(events) => events.chunk_end(found),
            Self::Ignored | Self::Json(_) | Self::Files => {}
        }
    }

    /// The body is complete. `true`: the stream told of a failure.
    pub(super) fn end(&mut self, time_ns: u64, endpoint: Endpoint, found: &mut Vec<Found>) -> bool {
        match self {
            Self::Ignored => false,
            Self::Files => {
                found.push((time_ns, Note::Images(ImageAnswer::default())));
                false
            }
            Self::Raw(raw) => {
                raw.chunk_end(found);
                false
            }
            Self::Events(events) => events.failed,
            Self::Json(ends) => {
                found.extend(
                    of_json(endpoint, &ends.known())
                        .into_iter()
                        .map(|note| (time_ns, note)),
                );
                false
            }
        }
    }

    /// What the next bytes of the body are, for a recording.
    pub(super) fn zone(&self) -> Option<Zone> {
        Some(match self {
            Self::Ignored | Self::Files => return None,
            Self::Raw(raw) => Zone::Samples {
                header: raw.header_left,
            },
            Self::Events(events) => Zone::Events(events.event.before()),
            Self::Json(ends) => Zone::Json(ends.before()),
        })
    }

    /// The body will not be complete.
    pub(super) fn cut(&mut self, found: &mut Vec<Found>) {
        if let Self::Raw(raw) = self {
            raw.chunk_end(found);
        }
    }
}

/// Samples as they are, perhaps behind a WAV header.
#[derive(Clone, Debug)]
pub(super) struct Raw {
    /// The header as far as it came; `None`: there is none.
    header: Option<Vec<u8>>,
    /// Bytes of the header that are to come.
    header_left: u64,
    sample_rate: Option<u32>,
    channels: Option<u16>,
    bytes: u64,
    first_ns: u64,
}

impl Raw {
    fn new(is_wav: bool) -> Self {
        Self {
            header: is_wav.then(Vec::new),
            header_left: if is_wav { WAV_HEADER as u64 } else { 0 },
            sample_rate: None,
            channels: None,
            bytes: 0,
            first_ns: 0,
        }
    }

    fn data(&mut self, time_ns: u64, mut data: Stretch<'_>) {
        if self.header_left > 0 {
            let (header, rest) = data.split(self.header_left);
            self.header_left -= header.len();
            data = rest;
            if let Some(bytes) = &mut self.header {
                for part in header.parts() {
                    match part {
                        Part::Known(known) => bytes.extend_from_slice(known),
                        Part::Gap(gap) => {
                            let gap = usize::try_from(gap).unwrap_or(0).min(WAV_HEADER);
                            bytes.resize(bytes.len() + gap, 0);
                        }
                    }
                }
                (self.sample_rate, self.channels) = wav(bytes).unzip();
            }
        }
        if !data.is_empty() {
            if self.bytes == 0 {
                self.first_ns = time_ns;
            }
            self.bytes = self.bytes.saturating_add(data.len());
        }
    }

    fn chunk_end(&mut self, found: &mut Vec<Found>) {
        let bytes = std::mem::take(&mut self.bytes);
        if bytes > 0 {
            let chunk = AudioChunk {
                bytes,
                sample_rate: self.sample_rate,
                channels: self.channels,
            };
            found.push((self.first_ns, Note::Audio(chunk)));
        }
    }
}

/// Sample rate and channels of a WAV header.
fn wav(header: &[u8]) -> Option<(u32, u16)> {
    if !(header.starts_with(b"RIFF") && header.get(8..16) == Some(b"WAVEfmt ")) {
        return None;
    }
    let channels = u16::from_le_bytes(header.get(22..24)?.try_into().ok()?);
    let rate = u32::from_le_bytes(header.get(24..28)?.try_into().ok()?);
    (channels > 0 && rate > 0).then_some((rate, channels))
}

/// Server-sent events, each of which is `event:` and `data:` lines up to an empty one.
#[derive(Clone, Debug)]
pub(super) struct Events {
    event: Ends,
    first_ns: u64,
    /// The last byte ended a line.
    at_line_start: bool,
    named: bool,
    /// From the header in the first event of a WAV stream.
    sample_rate: Option<u32>,
    channels: Option<u16>,
    failed: bool,
}

impl Events {
    fn new() -> Self {
        Self {
            event: Ends::new(MAX_EVENT_FIRST, MAX_EVENT_LAST),
            first_ns: 0,
            at_line_start: true,
            named: false,
            sample_rate: None,
            channels: None,
            failed: false,
        }
    }

    fn data(&mut self, time_ns: u64, data: Stretch<'_>, found: &mut Vec<Found>) {
        for part in data.parts() {
            match part {
                Part::Known(bytes) => self.known(time_ns, bytes, found),
                Part::Gap(_) => {
                    self.begin(time_ns);
                    self.event.push(Stretch::new(gap_of(part), &[], &[]));
                    self.at_line_start = false;
                }
            }
        }
    }

    fn known(&mut self, time_ns: u64, mut bytes: &[u8], found: &mut Vec<Found>) {
        while !bytes.is_empty() {
            let line = bytes
                .iter()
                .position(|byte| *byte == b'\n')
                .map_or(bytes.len(), |end| end + 1);
            let (line, rest) = bytes.split_at(line);
            bytes = rest;
            let is_empty = self.at_line_start && matches!(line, b"\n" | b"\r\n");
            if is_empty {
                self.event_end(found);
                continue;
            }
            self.begin(time_ns);
            self.event.push(Stretch::known(line));
            // A carriage return that waits for its newline is an empty line in the making.
            self.at_line_start = line.ends_with(b"\n") || (self.at_line_start && line == b"\r");
        }
    }

    fn begin(&mut self, time_ns: u64) {
        if self.event.is_empty() {
            self.first_ns = time_ns;
        }
    }

    /// A server writes an event as one chunk: that ends one whose own end is not known.
    fn chunk_end(&mut self, found: &mut Vec<Found>) {
        if self.event.has_gap() {
            self.event_end(found);
        }
    }

    fn event_end(&mut self, found: &mut Vec<Found>) {
        self.at_line_start = true;
        if self.event.is_empty() {
            return;
        }
        let event = std::mem::replace(&mut self.event, Ends::new(MAX_EVENT_FIRST, MAX_EVENT_LAST));
        let known = event.known();
        if let Some(data) = data_of(&known) {
            self.told(&data, found);
        }
    }

    fn told(&mut self, data: &Known<'_>, found: &mut Vec<Found>) {
        let time_ns = self.first_ns;
        let fields = Fields::of(data);
        match fields.top(b"type") {
            Some(Value::Text(b"speech.audio.delta")) => {
                if let Some(chunk) = self.speech_delta(&fields) {
                    found.push((time_ns, Note::Audio(chunk)));
                }
                return;
            }
            Some(Value::Text(b"speech.audio.error")) => {
                self.failed = true;
                return;
            }
            _ => {}
        }
        if matches!(fields.top(b"error"), Some(Value::Nested | Value::Text(_))) {
            self.failed = true;
        }
        if !self.named
            && let Some(Value::Text(text)) = fields.top(b"id")
            && let Some(id) = id(text)
        {
            self.named = true;
            found.push((time_ns, Note::Named(id)));
        }
        if fields.top(b"modality") == Some(Value::Text(b"audio"))
            && let Some(chunk) = chat_audio(&fields)
        {
            found.push((time_ns, Note::Audio(chunk)));
        }
        let images = images_of(&fields, data);
        if images.has_metrics() {
            found.push((time_ns, Note::Images(images)));
        }
    }

    /// `None`: an event without samples.
    fn speech_delta(&mut self, fields: &Fields<'_>) -> Option<AudioChunk> {
        let Some((mut bytes, start)) = base64_len(fields, b"audio", b"response_format") else {
            let is_there = matches!(fields.top(b"audio"), Some(Value::LongText { .. }));
            return is_there.then_some(AudioChunk {
                bytes: 0,
                sample_rate: self.sample_rate,
                channels: self.channels,
            });
        };
        let is_wav = fields.top(b"response_format") == Some(Value::Text(b"wav"));
        if is_wav && self.sample_rate.is_none() && bytes >= WAV_HEADER as u64 {
            let header = wav(&base64_start(start));
            // A header that can't be read is one all the same.
            if header.is_some() || bytes == WAV_HEADER as u64 {
                (self.sample_rate, self.channels) = header.unzip();
                bytes -= WAV_HEADER as u64;
            }
        }
        (bytes > 0).then_some(AudioChunk {
            bytes,
            sample_rate: self.sample_rate,
            channels: self.channels,
        })
    }
}

fn gap_of(part: Part<'_>) -> u64 {
    match part {
        Part::Gap(gap) => gap,
        Part::Known(bytes) => bytes.len() as u64,
    }
}

/// The content of an event's `data:` line.
fn data_of<'a>(event: &'a Known<'_>) -> Option<Known<'a>> {
    let head = event.head.as_ref();
    let mut from = 0;
    for line in head.split_inclusive(|byte| *byte == b'\n') {
        if let Some(data) = line.strip_prefix(b"data:") {
            let at = from + 5 + usize::from(data.first() == Some(&b' '));
            let data = head.get(at..)?;
            let len = event.len - at as u64;
            return Some(Known {
                head: data.into(),
                tail: event.tail,
                len,
            });
        }
        from += line.len();
    }
    None
}

/// Bytes that a base64 text stands for, and its first characters. The end of a long one is known if the key that
/// follows it was seen.
pub(super) fn base64_len<'a>(fields: &Fields<'a>, key: &[u8], next: &[u8]) -> Option<(u64, &'a [u8])> {
    let (len, start, end) = match fields.top(key)? {
        Value::Text(text) => (text.len() as u64, text, text),
        Value::LongText { start, end, len } if len % 4 == 0 && fields.top(next).is_some() => {
            (len, start, end)
        }
        _ => return None,
    };
    let padding = end.iter().rev().take(2).take_while(|byte| **byte == b'=').count() as u64;
    Some((((len / 4) * 3).saturating_sub(padding), start))
}

/// The first bytes of a base64 text, enough for a header.
fn base64_start(text: &[u8]) -> Vec<u8> {
    use base64::{
        Engine,
        alphabet::STANDARD,
        engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
    };
    const LENIENT: GeneralPurpose = GeneralPurpose::new(
        &STANDARD,
        GeneralPurposeConfig::new()
            .with_decode_allow_trailing_bits(true)
            .with_decode_padding_mode(DecodePaddingMode::Indifferent),
    );
    let whole = text.len().min(60) / 4 * 4;
    LENIENT
        .decode(text.get(..whole).unwrap_or_default())
        .unwrap_or_default()
}

/// Samples of a chat chunk; `None`: none.
fn chat_audio(fields: &Fields<'_>) -> Option<AudioChunk> {
    let count = |key: &[u8]| fields.any(key).and_then(Value::count);
    let frames = count(b"frame_count").filter(|frames| *frames > 0)?;
    let channels = count(b"channels").and_then(|channels| u16::try_from(channels).ok());
    Some(AudioChunk {
        bytes: u64::from(frames) * u64::from(channels.unwrap_or(1)) * 2,
        sample_rate: count(b"sample_rate_hz").filter(|rate| *rate > 0),
        channels,
    })
}

fn of_json(endpoint: Endpoint, known: &Known<'_>) -> Vec<Note> {
    let fields = Fields::of(known);
    let mut notes = Vec::new();
    if let Some(Value::Text(text)) = fields.top(b"id")
        && let Some(id) = id(text)
    {
        notes.push(Note::Named(id));
    }
    if endpoint.gives_images() {
        let images = images_of(&fields, known);
        if images.has_metrics() || fields.any(b"b64_json").is_some() {
            notes.push(Note::Images(images));
        }
    }
    notes
}

/// What is told of images: `metrics` behind them in the images' endpoints, figures beside each in chat.
fn images_of(fields: &Fields<'_>, known: &Known<'_>) -> ImageAnswer {
    let number = |key: &[u8]| {
        fields
            .any(key)
            .and_then(Value::number)
            .filter(|number| number.is_finite() && *number >= 0.0)
    };
    let mut stage_gen_ms: Vec<(u32, f64)> = Vec::new();
    let profiled = |end: &[u8]| {
        let times = fields
            .iter()
            .filter(|field| field.key.ends_with(end))
            .filter_map(|field| field.value.number());
        times.fold(None, |sum: Option<f64>, time| Some(sum.unwrap_or(0.0) + time))
    };
    let (vae_decode_s, denoise_s) = (profiled(b".vae.decode"), profiled(b".diffuse"));
    for field in fields.iter() {
        let stage = field
            .key
            .strip_prefix(b"stage_")
            .and_then(|rest| rest.strip_suffix(b"_gen_ms"));
        if let Some(stage) = stage.and_then(|stage| str::from_utf8(stage).ok()?.parse().ok())
            && let Some(time) = field.value.number().filter(|time| *time >= 0.0)
            && stage_gen_ms.len() < MAX_STAGES
            && !stage_gen_ms.iter().any(|(known, _)| *known == stage)
        {
            stage_gen_ms.push((stage, time));
        }
    }
    let mut pictures = fields
        .iter()
        .filter(|field| matches!(field.key, b"b64_json" | b"url"))
        .filter(|field| matches!(field.value, Value::Text(_) | Value::LongText { .. }));
    let first = pictures.next();
    let count = (known.tail.is_none() && first.is_some())
        .then(|| u32::try_from(pictures.count() + 1).unwrap_or(u32::MAX));
    let told_size = fields.top(b"size").and_then(|value| match value {
        Value::Text(text) => size(text),
        _ => None,
    });
    let png_size = || {
        let (Value::Text(text) | Value::LongText { start: text, .. }) = first?.value else {
            return None;
        };
        png(&base64_start(
            text.strip_prefix(b"data:image/png;base64,").unwrap_or(text),
        ))
    };
    ImageAnswer {
        count,
        size: told_size.or_else(png_size),
        queue_wait_ms: number(b"queue_wait_ms"),
        preprocess_ms: number(b"preprocess_ms"),
        stage_gen_ms,
        first_image_ms: number(b"image_time_to_first_output_ms").filter(|time| *time > 0.0),
        vae_decode_s,
        denoise_s,
        peak_memory_mb: number(b"peak_memory_mb").filter(|peak| *peak > 0.0),
    }
}

/// Width and height of a PNG file.
fn png(bytes: &[u8]) -> Option<(u32, u32)> {
    if !(bytes.starts_with(b"\x89PNG\r\n\x1a\n") && bytes.get(12..16) == Some(b"IHDR")) {
        return None;
    }
    let side = |at: usize| Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    Some((side(16)?, side(20)?)).filter(|(width, height)| *width > 0 && *height > 0)
}
