//! Blanks the content of calls for recordings: what the parser reads stays, and lengths do.
//!
//! A call is walked through a copy of its connection, which marks what its bytes are; bytes without a mark are zeroed.

use super::{answer::WAV_HEADER, head::Opening, json::string_end, note::Endpoint, stretch::Stretch};

/// Headers whose values stay.
const HEADERS: [&str; 8] = [
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "sec-websocket-extensions",
    "transfer-encoding",
    "upgrade",
    "x-request-id",
];

/// Keys whose strings and numbers stay.
const KEPT_VALUES: [&[u8]; 17] = [
    b"channels",
    b"error",
    b"frame_count",
    b"id",
    b"image_time_to_first_output_ms",
    b"modality",
    b"n",
    b"num_inference_steps",
    b"num_outputs_per_prompt",
    b"peak_memory_mb",
    b"preprocess_ms",
    b"queue_wait_ms",
    b"response_format",
    b"sample_rate",
    b"sample_rate_hz",
    b"size",
    b"type",
];

/// Keys that stay without their values.
const KEPT_KEYS: [&[u8]; 9] = [
    b"audio",
    b"audio_b64",
    b"audio_metadata",
    b"b64_json",
    b"extra_body",
    b"metrics",
    b"stage_durations",
    b"timestamps",
    b"url",
];

/// Keys whose strings are files in base64.
const FILES: [&[u8]; 4] = [b"audio", b"audio_b64", b"b64_json", b"url"];

/// First characters of the base64 of a PNG and a WAV file, and how many tell its header.
const FILE_HEADERS: [(&[u8], usize); 2] = [(b"iVBORw0KGgo", 32), (b"UklGR", 60)];

/// Paths that stay, for a start of one.
const PATHS: [&str; 6] = [
    "/v1/audio/speech",
    "/v1/audio/speech/stream",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/images/generations",
    "/v1/images/edits",
];

/// What a stretch of a call is. Texts come with what went before them, `None` where that is not known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Zone {
    /// Lengths and the like.
    Framing,
    Head(Vec<u8>),
    Json(Option<Vec<u8>>),
    Events(Option<Vec<u8>>),
    Form,
    /// Audio, with so many bytes of a header to come.
    Samples {
        header: u64,
    },
}

/// The zones of a call, by their place in it.
#[derive(Debug)]
pub(super) struct Trace {
    size: u64,
    zones: Vec<(u64, u64, Zone)>,
}

impl Trace {
    pub(super) fn new(size: u64) -> Self {
        Self {
            size,
            zones: Vec::new(),
        }
    }

    /// Marks what `input` has before `rest`.
    pub(super) fn mark(&mut self, input: Stretch<'_>, rest: Stretch<'_>, zone: Zone) {
        let (from, to) = (
            self.size.saturating_sub(input.len()),
            self.size.saturating_sub(rest.len()),
        );
        if from < to {
            self.zones.push((from, to, zone));
        }
    }

    /// Blanks the captured bytes.
    pub(super) fn blank(&self, head: &mut [u8], tail: &mut [u8]) {
        let tail_from = self.size.saturating_sub(tail.len() as u64);
        for (bytes, offset) in [(head, 0), (tail, tail_from)] {
            let original = bytes.to_vec();
            bytes.fill(0);
            for (from, to, zone) in &self.zones {
                let place = |at: u64| {
                    let at = at.saturating_sub(offset);
                    usize::try_from(at).unwrap_or(usize::MAX).min(original.len())
                };
                let (start, end) = (place(*from), place(*to));
                let text = original.get(start..end).unwrap_or_default();
                // Whether its start is the zone's, and not behind a gap.
                let is_start = *from >= offset;
                let blanked = zone.blanked(text, is_start);
                if let Some(bytes) = bytes.get_mut(start..end) {
                    bytes.copy_from_slice(&blanked);
                }
            }
        }
    }
}

impl Zone {
    /// Bytes of this zone without their content, as many as there were. `is_start`: they are its first.
    fn blanked(&self, text: &[u8], is_start: bool) -> Vec<u8> {
        let blanked = match self {
            Self::Framing => text.to_vec(),
            Self::Head(before) => behind(before, text, head),
            Self::Json(Some(before)) if is_start => behind(before, text, |text| json(text, Start::Value)),
            Self::Json(_) => resumed(text),
            Self::Events(Some(before)) if is_start => behind(before, text, events),
            Self::Events(_) => {
                // The rest of an event, then perhaps more of them.
                let line = text.iter().position(|byte| *byte == b'\n').unwrap_or(text.len());
                let (line, rest) = text.split_at(line);
                let mut blanked = resumed(line);
                blanked.resize(line.len(), b'x');
                blanked.extend(behind(&[], rest, events));
                blanked
            }
            Self::Form => form(text),
            Self::Samples { header } => {
                let header = if is_start { *header } else { 0 };
                let header = usize::try_from(header).unwrap_or(WAV_HEADER).min(text.len());
                let mut out = text.get(..header).unwrap_or_default().to_vec();
                out.resize(text.len(), 0);
                out
            }
        };
        if blanked.len() == text.len() {
            blanked
        } else {
            vec![b'x'; text.len()]
        }
    }
}

/// Blanks a text that goes on; empty where `blank` can't.
fn behind(before: &[u8], text: &[u8], blank: impl Fn(&mut [u8]) -> bool) -> Vec<u8> {
    let mut whole = [before, text].concat();
    if !blank(&mut whole) {
        return Vec::new();
    }
    whole.split_off(before.len())
}

fn fill(bytes: Option<&mut [u8]>, with: u8) {
    bytes.unwrap_or_default().fill(with);
}

/// A head, or the start of one.
fn head(text: &mut [u8]) -> bool {
    let lines: Vec<(usize, usize)> = lines_of(text);
    for (number, (from, to)) in lines.into_iter().enumerate() {
        let line = text.get_mut(from..to).unwrap_or_default();
        if number == 0 {
            first_line(line);
            continue;
        }
        let Some(colon) = line.iter().position(|byte| *byte == b':') else {
            // The start of a name, or an empty line.
            continue;
        };
        let (name, value) = line.split_at_mut(colon);
        let name = str::from_utf8(name).unwrap_or_default();
        if !HEADERS.iter().any(|kept| kept.eq_ignore_ascii_case(name)) {
            for byte in value.iter_mut().skip(1) {
                if !matches!(byte, b'\r' | b'\n' | b' ') {
                    *byte = b'x';
                }
            }
        }
    }
    true
}

/// Where lines are, with their ends.
fn lines_of(text: &[u8]) -> Vec<(usize, usize)> {
    let mut from = 0;
    text.split_inclusive(|byte| *byte == b'\n')
        .map(|line| {
            let start = from;
            from += line.len();
            (start, from)
        })
        .collect()
}

/// A start line: of a target that is not known only the shape stays.
fn first_line(line: &mut [u8]) {
    if Opening::of(line) != Opening::Request {
        return;
    }
    let mut words = line.split(|byte| *byte == b' ').map(<[u8]>::len);
    let method = words.next().unwrap_or(0);
    let Some(target) = words.next() else { return };
    let (from, to) = (method + 1, method + 1 + target);
    let text = line.get(from..to).unwrap_or_default();
    let is_whole = line.len() > to;
    let is_known = str::from_utf8(text).is_ok_and(|text| {
        ["GET", "POST"]
            .iter()
            .any(|method| Endpoint::of(method, text) != Endpoint::Other)
            || (!is_whole && PATHS.iter().any(|path| path.starts_with(text)))
    });
    let query = text.iter().position(|byte| *byte == b'?');
    let hide_from = if is_known {
        query.map_or(to, |at| from + at + 1)
    } else {
        from
    };
    for byte in line.get_mut(hide_from..to).unwrap_or_default() {
        if byte.is_ascii_alphanumeric() || !byte.is_ascii() {
            *byte = b'x';
        }
    }
}

/// Where a text begins.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Start {
    Value,
    /// Inside a string.
    String,
}

/// The tail of a JSON text of which the rest is not known; empty where it can't be read.
fn resumed(text: &[u8]) -> Vec<u8> {
    let ends = text.trim_ascii_end().ends_with(b"}");
    let read = |start| {
        let mut text = text.to_vec();
        (ends && json(&mut text, start)).then_some(text)
    };
    match (read(Start::String), read(Start::Value)) {
        (Some(text), None) | (None, Some(text)) => text,
        _ => Vec::new(),
    }
}

/// Blanks a JSON text. `false`: it is none.
fn json(text: &mut [u8], start: Start) -> bool {
    let mut at = 0;
    let total = text.len();
    let mut key: Vec<u8> = Vec::new();
    if start == Start::String {
        let Some(end) = string_end(text, 0) else {
            return false;
        };
        // What it is a value of is not known: a file, most likely.
        let pads = text.get(..end).unwrap_or_default().iter().rev();
        let pads = pads.take(2).take_while(|byte| **byte == b'=').count();
        fill(text.get_mut(..end - pads), b'A');
        at = end + 1;
    } else {
        // The rest of a number or word.
        let word = text.iter().take_while(|byte| is_word(**byte)).count();
        fill(text.get_mut(..word), b'0');
        at += word;
    }
    while let Some(&byte) = text.get(at) {
        match byte {
            b'"' => {
                let from = at + 1;
                let end = string_end(text, from).unwrap_or(text.len());
                at = (end + 1).min(text.len());
                let rest = text.get(at..).unwrap_or_default();
                let next = rest.iter().find(|byte| !byte.is_ascii_whitespace()).copied();
                let content = text.get_mut(from..end).unwrap_or_default();
                let is_cut = at <= end;
                if next == Some(b':') {
                    key = content.to_vec();
                    if !is_kept_key(&key) {
                        content.fill(b'x');
                    }
                } else if next.is_none() && key.is_empty() && begins_kept_key(content, is_cut) {
                    // A key whose end or value is still to come.
                } else {
                    string(&key, content);
                    key.clear();
                }
            }
            b'{' | b'}' | b'[' | b']' | b',' | b':' | b' ' | b'\t' | b'\r' | b'\n' => {
                if matches!(byte, b'{' | b'}' | b']' | b',') {
                    key.clear();
                }
                at += 1;
            }
            byte if is_word(byte) => {
                let rest = text.get(at..).unwrap_or_default();
                let len = rest.iter().take_while(|byte| is_word(**byte)).count();
                let word = text.get_mut(at..at + len).unwrap_or_default();
                let is_literal = [&b"true"[..], b"false", b"null"]
                    .iter()
                    .any(|literal| *literal == word || (at + len == total && literal.starts_with(word)));
                if !is_literal && !is_kept_value(&key) {
                    for byte in word {
                        if byte.is_ascii_digit() {
                            *byte = b'0';
                        } else if byte.is_ascii_alphabetic() && !matches!(byte, b'e' | b'E') {
                            return false;
                        }
                    }
                }
                at += len;
            }
            _ => return false,
        }
    }
    true
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.')
}

fn is_kept_value(key: &[u8]) -> bool {
    KEPT_VALUES.contains(&key)
        || (key.starts_with(b"stage_") && key.ends_with(b"_gen_ms"))
        || key.ends_with(b".vae.decode")
        || key.ends_with(b".diffuse")
}

fn is_kept_key(key: &[u8]) -> bool {
    is_kept_value(key) || KEPT_KEYS.contains(&key)
}

/// Whether a string at the end of a piece may become a key that stays; `is_cut`: its end is to come.
fn begins_kept_key(text: &[u8], is_cut: bool) -> bool {
    if !is_cut {
        return is_kept_key(text);
    }
    KEPT_VALUES
        .iter()
        .chain(&KEPT_KEYS)
        .any(|key| key.starts_with(text))
        || b"stage_".starts_with(text)
}

/// The string that is a key's value.
fn string(key: &[u8], content: &mut [u8]) {
    if FILES.contains(&key) {
        let prefix = b"data:image/png;base64,";
        let from = if content.starts_with(prefix) {
            prefix.len()
        } else {
            0
        };
        let file = content.get_mut(from..).unwrap_or_default();
        let kept = FILE_HEADERS
            .iter()
            .find(|(start, _)| file.starts_with(start) || start.starts_with(file))
            .map_or(0, |(_, kept)| (*kept).min(file.len()));
        for byte in file.get_mut(kept..).unwrap_or_default() {
            if *byte != b'=' {
                *byte = b'A';
            }
        }
    } else if key == b"error" || !is_kept_value(key) {
        content.fill(b'x');
    }
}

/// Server-sent events.
fn events(text: &mut [u8]) -> bool {
    for (from, to) in lines_of(text) {
        let line = text.get_mut(from..to).unwrap_or_default();
        let is_kept = |word: &[u8]| line.starts_with(word) || word.starts_with(line);
        if is_kept(b"event:") || (line.len() < 5 && is_kept(b"data:")) {
            continue;
        }
        let Some(data) = line.strip_prefix(b"data:") else {
            let end = line.trim_ascii_end().len();
            fill(line.get_mut(..end), b'x');
            continue;
        };
        let skip = 5 + usize::from(data.first() == Some(&b' '));
        let data = line.get_mut(skip..).unwrap_or_default();
        if !data.starts_with(b"[DONE]") && !json(data, Start::Value) {
            let end = data.trim_ascii_end().len();
            fill(data.get_mut(..end), b'x');
        }
    }
    true
}

/// A form: the numbers of the fields that are read stay.
fn form(text: &[u8]) -> Vec<u8> {
    let mut out = vec![b'x'; text.len()];
    for name in ["n", "num_inference_steps", "size"] {
        let before = format!("name=\"{name}\"\r\n\r\n");
        for at in 0..text.len() {
            let rest = text.get(at..).unwrap_or_default();
            let Some(value) = rest.strip_prefix(before.as_bytes()) else {
                continue;
            };
            let value = value
                .iter()
                .take_while(|byte| byte.is_ascii_digit() || matches!(byte, b'x' | b'\r' | b'\n'))
                .count();
            let end = at + before.len() + value;
            if let (Some(out), Some(text)) = (out.get_mut(at..end), text.get(at..end)) {
                out.copy_from_slice(text);
            }
        }
    }
    out
}
