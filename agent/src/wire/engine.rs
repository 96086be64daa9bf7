//! Messages on an engine core's sockets (docs/wire.md section "Engine sockets").
//!
//! Each decoder takes the captured bytes of one frame and says whether it saw all that matters. Map keys may
//! come in any order, unknown ones are passed over.

use super::{
    WireError,
    layout::{AddField, AddLayout, Layouts, OutputField, OutputLayout},
    message::{
        Add, Audio, CacheStats, EngineOutputs, Events, FinishReason, KvEviction, KvWait, Output, OutputKind,
        PerfStats, PrefillStats, Ready, SchedulerStats, SpecDecode, Utility,
    },
    msgpack::{MsgpackError, Reader, marker},
};

/// vLLM's `SamplingParams.max_tokens` where the key is absent: equal defaults are not written.
const DEFAULT_MAX_TOKENS: u32 = 16;
/// Least size of an output in bytes: bounds what an announced count may reserve.
const MIN_OUTPUT: usize = 14;
/// Ext code of a tensor's or array's inline data.
const EXT_RAW: i8 = 3;

/// The captured bytes of a payload frame.
#[derive(Clone, Copy, Debug)]
pub struct Payload<'a> {
    /// First bytes.
    pub head: &'a [u8],
    /// Last bytes, where the frame is longer than `head`.
    pub tail: &'a [u8],
    /// Size of the frame.
    pub size: u64,
}

impl<'a> Payload<'a> {
    /// A frame that is wholly there.
    #[must_use]
    pub fn whole(bytes: &'a [u8]) -> Self {
        Self {
            head: bytes,
            tail: &[],
            size: bytes.len() as u64,
        }
    }

    pub(super) fn is_cut(&self) -> bool {
        (self.head.len() as u64) < self.size
    }

    pub(super) fn reader(&self) -> Reader<'a> {
        Reader::of_head(self.head, self.size)
    }
}

/// A message, and whether all that matters of it was captured.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen<T> {
    /// The message.
    pub message: T,
    /// Part of it lies in bytes that were not captured.
    pub is_partial: bool,
}

impl<T> Seen<T> {
    pub(super) fn map<U>(self, convert: impl FnOnce(T) -> U) -> Seen<U> {
        Seen {
            message: convert(self.message),
            is_partial: self.is_partial,
        }
    }
}

/// `EngineCoreOutputs`.
pub fn outputs<'a>(payload: Payload<'a>, layouts: &Layouts) -> Result<Seen<EngineOutputs<'a>>, WireError> {
    let mut reader = payload.reader();
    let outer = reader.array()?;
    layouts.check_outer(outer)?;
    let mut message = EngineOutputs {
        engine_index: reader.u32()?,
        ..EngineOutputs::default()
    };
    let announced = reader.array()?;
    let likely = (announced as usize).min(reader.rest().len() / MIN_OUTPUT + 1);
    message.outputs.reserve_exact(likely);
    let mut is_partial = false;
    match read_outputs(&mut reader, layouts, announced, &mut message).and_then(|()| {
        after_outputs(&mut reader, outer, &mut message)?;
        end(&reader)
    }) {
        Ok(()) => {}
        Err(error) if payload.is_cut() && is_truncated(&error) => {
            is_partial = true;
            let seen = u32::try_from(message.outputs.len()).unwrap_or(u32::MAX);
            message.outputs_lost = announced.saturating_sub(seen);
            if message.timestamp.is_none() {
                from_tail(payload.tail, outer, &mut message);
            }
        }
        Err(error) => return Err(error),
    }
    Ok(Seen { message, is_partial })
}

#[inline]
fn read_outputs<'a>(
    reader: &mut Reader<'a>,
    layouts: &Layouts,
    announced: u32,
    message: &mut EngineOutputs<'a>,
) -> Result<(), WireError> {
    for _ in 0..announced {
        let length = reader.array()?;
        let layout = layouts.output(length, reader)?;
        let mut output = Output {
            request_id: reader.str()?,
            new_tokens: reader.array()?,
            ..Output::default()
        };
        reader.skip_many(output.new_tokens)?;
        if reader.take(layout.plain()) {
            if layout.counts_tokens() {
                output.num_generation_tokens = reader.optional(Reader::u32)?;
            }
        } else {
            rest_of_output(reader, layout, &mut output)?;
        }
        message.outputs.push(output);
    }
    Ok(())
}

/// All elements of an output behind its token ids.
fn rest_of_output<'a>(
    reader: &mut Reader<'a>,
    layout: &OutputLayout,
    output: &mut Output<'a>,
) -> Result<(), WireError> {
    for field in layout.fields().iter().skip(2) {
        match field {
            OutputField::FinishReason => output.finish_reason = finish_reason(reader)?,
            OutputField::Nans => output.nans_in_logits = reader.u32()?,
            _ if reader.take_nil() => {}
            OutputField::Events => output.events = events(reader)?,
            OutputField::KvTransfer => output.kv_wait = kv_wait(reader)?,
            OutputField::PrefillStats => output.prefill = Some(prefill_stats(reader)?),
            // A map of tensors in vLLM-Omni before 0.24, a tensor everywhere else.
            OutputField::PoolingOutput if matches!(reader.peek()?, 0x80..=0x8f | 0xde | 0xdf) => {
                output.audio = audio(reader)?;
            }
            OutputField::Multimodal => output.audio = audio(reader)?,
            OutputField::SegmentFinished => output.segment_finished = reader.bool()?,
            OutputField::GenerationTokens => output.num_generation_tokens = Some(reader.u32()?),
            _ => reader.skip()?,
        }
    }
    Ok(())
}

fn finish_reason(reader: &mut Reader<'_>) -> Result<Option<FinishReason>, WireError> {
    let Some(value) = reader.optional(Reader::u64)? else {
        return Ok(None);
    };
    usize::try_from(value)
        .ok()
        .and_then(|index| FinishReason::ALL.get(index).copied())
        .map(Some)
        .ok_or(WireError::UnknownValue {
            what: "finish_reason",
            value,
        })
}

/// Reads the pairs of a map: `read` gets each key and takes the value, or returns false to have it skipped.
/// Keys that are not strings are passed over.
#[inline]
pub(super) fn each_pair<'a, E: From<MsgpackError>>(
    reader: &mut Reader<'a>,
    mut read: impl FnMut(&'a [u8], &mut Reader<'a>) -> Result<bool, E>,
) -> Result<(), E> {
    for _ in 0..reader.map()? {
        if !matches!(reader.peek()?, 0xa0..=0xbf | 0xd9..=0xdb) {
            reader.skip_many(2)?;
            continue;
        }
        let key = reader.str_bytes()?;
        if !read(key, reader)? {
            reader.skip()?;
        }
    }
    Ok(())
}

fn events(reader: &mut Reader<'_>) -> Result<Events, MsgpackError> {
    let mut events = Events::default();
    for _ in 0..reader.array()? {
        let mut kind = 0;
        let mut time = None;
        each_pair(reader, |key, reader| {
            match key {
                b"type" => kind = reader.u64()?,
                b"timestamp" => time = Some(reader.f64()?),
                _ => return Ok::<_, MsgpackError>(false),
            }
            Ok(true)
        })?;
        match kind {
            1 => events.queued = time,
            2 => events.scheduled = events.scheduled.or(time),
            3 => events.preemptions = events.preemptions.saturating_add(1),
            _ => {}
        }
    }
    Ok(events)
}

fn kv_wait<'a>(reader: &mut Reader<'a>) -> Result<Option<KvWait<'a>>, MsgpackError> {
    let mut seconds = None;
    let mut connector_type = None;
    each_pair(reader, |key, reader| {
        match key {
            b"kv_wait_s" => seconds = reader.optional(Reader::f64)?,
            b"connector_type" => connector_type = reader.optional(Reader::str)?,
            _ => return Ok::<_, MsgpackError>(false),
        }
        Ok(true)
    })?;
    // vLLM-Omni's own label value where a connector has no name.
    let connector_type = connector_type
        .filter(|name| !name.is_empty())
        .unwrap_or("unknown");
    Ok(seconds.map(|seconds| KvWait {
        seconds,
        connector_type,
    }))
}

fn prefill_stats(reader: &mut Reader<'_>) -> Result<PrefillStats, MsgpackError> {
    let mut stats = PrefillStats::default();
    each_pair(reader, |key, reader| {
        let value = match key {
            b"num_prompt_tokens" => &mut stats.prompt_tokens,
            b"num_computed_tokens" => &mut stats.computed_tokens,
            b"num_cached_tokens" => &mut stats.cached_tokens,
            b"num_local_cached_tokens" => &mut stats.local_cached_tokens,
            b"num_external_cached_tokens" => &mut stats.external_cached_tokens,
            _ => return Ok::<_, MsgpackError>(false),
        };
        *value = reader.u32()?;
        Ok(true)
    })?;
    Ok(stats)
}

/// A map of tensors. Audio is under `audio`, else under `model_outputs`; its rate under one of several keys.
fn audio(reader: &mut Reader<'_>) -> Result<Option<Audio>, MsgpackError> {
    let mut frames = None;
    let mut other_frames = None;
    // (place in the chain of keys, rate)
    let mut rate: Option<(usize, u32)> = None;
    each_pair(reader, |key, reader| {
        match key {
            b"audio" => frames = chunks(reader)?,
            b"model_outputs" => other_frames = chunks(reader)?,
            _ => {
                let Some(place) = SAMPLE_RATE_KEYS.iter().position(|name| *name == key) else {
                    return Ok::<_, MsgpackError>(false);
                };
                if let Some(value) = positive_scalar(reader)? {
                    let found = (place, value);
                    rate = Some(rate.map_or(found, |best| best.min(found)));
                }
            }
        }
        Ok(true)
    })?;
    let frames = frames.or(other_frames);
    if frames.is_none() && rate.is_none() {
        return Ok(None);
    }
    Ok(Some(Audio {
        frames: frames.unwrap_or(0),
        sample_rate: rate.map(|(_, value)| value),
    }))
}

/// Keys under which a sample rate may be found, first choice first.
const SAMPLE_RATE_KEYS: [&[u8]; 5] = [
    b"output_sample_rate",
    b"audio_sample_rate",
    b"sample_rate",
    b"sampling_rate",
    b"sr",
];

/// Audio frames of one tensor, or of a list of tensors; `None` for nil and for what is no tensor.
fn chunks(reader: &mut Reader<'_>) -> Result<Option<u64>, MsgpackError> {
    if reader.take_nil() {
        return Ok(None);
    }
    if !is_array(reader.peek()?) {
        reader.skip()?;
        return Ok(None);
    }
    let mut inside = *reader;
    let count = inside.array()?;
    if count == 3 && is_str(inside.peek()?) {
        return tensor_frames(reader).map(Some);
    }
    *reader = inside;
    let mut frames: u64 = 0;
    for _ in 0..count {
        if is_array(reader.peek()?) {
            frames = frames.saturating_add(tensor_frames(reader)?);
        } else {
            reader.skip()?;
        }
    }
    Ok(Some(frames))
}

/// The last dimension of a tensor's shape; a scalar counts as one frame.
fn tensor_frames(reader: &mut Reader<'_>) -> Result<u64, MsgpackError> {
    let elements = reader.array()?;
    let mut frames = 0;
    for index in 0..elements {
        if index == 1 && elements == 3 && is_array(reader.peek()?) {
            let mut empty = false;
            frames = 1;
            for _ in 0..reader.array()? {
                frames = reader.u64()?;
                empty |= frames == 0;
            }
            if empty {
                frames = 0;
            }
        } else {
            reader.skip()?;
        }
    }
    Ok(frames)
}

/// A positive integer that may come plain, as a tensor of one element with its data inline, or as a list of
/// those.
fn positive_scalar(reader: &mut Reader<'_>) -> Result<Option<u32>, MsgpackError> {
    match reader.peek()? {
        first if is_array(first) => {
            let mut inside = *reader;
            let count = inside.array()?;
            if count == 3 && is_str(inside.peek()?) {
                *reader = inside;
                return tensor_scalar(reader);
            }
            *reader = inside;
            let mut found = None;
            for _ in 0..count {
                // Lists of lists do not occur: one level is enough, and a bound on recursion.
                let mut element = *reader;
                reader.skip()?;
                if found.is_none() {
                    found = if is_array(element.peek()?) {
                        let elements = element.array()?;
                        if elements == 3 && is_str(element.peek()?) {
                            tensor_scalar(&mut element)?
                        } else {
                            None
                        }
                    } else {
                        number(&mut element)?
                    };
                }
            }
            Ok(found)
        }
        _ => number(reader),
    }
}

fn number(reader: &mut Reader<'_>) -> Result<Option<u32>, MsgpackError> {
    match reader.peek()? {
        0x00..=0x7f | 0xe0..=0xff | 0xca..=0xd3 => Ok(rate(reader.f64()?)),
        _ => reader.skip().map(|()| None),
    }
}

/// A tensor's three elements: type, shape, data. The reader stands behind the array header.
fn tensor_scalar(reader: &mut Reader<'_>) -> Result<Option<u32>, MsgpackError> {
    let dtype = reader.str_bytes()?;
    reader.skip()?;
    if !matches!(reader.peek()?, 0xc7..=0xc9 | 0xd4..=0xd8) {
        // An index of a follow-on frame or a map: the value is elsewhere.
        return reader.skip().map(|()| None);
    }
    let (code, data) = reader.ext()?;
    Ok(if code == EXT_RAW {
        scalar(dtype, data).and_then(rate)
    } else {
        None
    })
}

/// One little-endian number, its type named as torch or numpy do.
fn scalar(dtype: &[u8], data: &[u8]) -> Option<f64> {
    let float = match dtype {
        b"int64" | b"<i8" => whole(i64::from_le_bytes(data.try_into().ok()?)),
        b"int32" | b"<i4" => f64::from(i32::from_le_bytes(data.try_into().ok()?)),
        b"int16" | b"<i2" => f64::from(i16::from_le_bytes(data.try_into().ok()?)),
        b"uint64" | b"<u8" => whole(i64::try_from(u64::from_le_bytes(data.try_into().ok()?)).ok()?),
        b"uint32" | b"<u4" => f64::from(u32::from_le_bytes(data.try_into().ok()?)),
        b"uint16" | b"<u2" => f64::from(u16::from_le_bytes(data.try_into().ok()?)),
        b"float64" | b"<f8" => f64::from_le_bytes(data.try_into().ok()?),
        b"float32" | b"<f4" => f64::from(f32::from_le_bytes(data.try_into().ok()?)),
        // Half precision holds no sample rate: its largest value is 65504, its steps above 16384 are 16 and
        // 32.
        _ => return None,
    };
    Some(float)
}

#[expect(clippy::cast_precision_loss, reason = "sample rates are far below 2^53")]
fn whole(value: i64) -> f64 {
    value as f64
}

/// A rate in Hz: positive, cut to an integer as Python's `int` does.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the value is between 1 and u32::MAX"
)]
fn rate(value: f64) -> Option<u32> {
    (1.0..=f64::from(u32::MAX))
        .contains(&value)
        .then_some(value as u32)
}

fn is_array(first: u8) -> bool {
    matches!(first, 0x90..=0x9f | 0xdc | 0xdd)
}

fn is_str(first: u8) -> bool {
    matches!(first, 0xa0..=0xbf | 0xd9..=0xdb)
}

/// Elements of `EngineCoreOutputs` behind the outputs.
fn after_outputs<'a>(
    reader: &mut Reader<'a>,
    outer: u32,
    message: &mut EngineOutputs<'a>,
) -> Result<(), WireError> {
    message.stats = reader.optional(scheduler_stats)?;
    message.timestamp = Some(reader.f64()?);
    message.is_utility_reply = !reader.take_nil();
    if message.is_utility_reply {
        reader.skip()?;
    }
    if !reader.take_nil() {
        for _ in 0..reader.array()? {
            message.finished_requests.push(reader.str()?);
        }
    }
    reader.skip_many(outer.saturating_sub(6))?;
    Ok(())
}

/// `SchedulerStats`.
fn scheduler_stats<'a>(reader: &mut Reader<'a>) -> Result<SchedulerStats<'a>, MsgpackError> {
    let mut stats = SchedulerStats::default();
    each_pair(reader, |key, reader| {
        match key {
            b"num_running_reqs" => stats.running = reader.u64()?,
            b"num_waiting_reqs" => stats.waiting = reader.u64()?,
            b"num_skipped_waiting_reqs" => stats.skipped_waiting = Some(reader.u64()?),
            b"kv_cache_usage" => stats.kv_cache_usage = reader.f64()?,
            b"prefix_cache_stats" => stats.prefix_cache = reader.optional(cache_stats)?,
            b"connector_prefix_cache_stats" => stats.external_prefix_cache = reader.optional(cache_stats)?,
            b"kv_cache_eviction_events" => {
                stats.kv_evictions = reader.optional(kv_evictions)?.unwrap_or_default();
            }
            b"spec_decoding_stats" => stats.spec_decode = reader.optional(spec_decode)?,
            b"waiting_lora_adapters" => stats.waiting_lora = reader.optional(names)?.unwrap_or_default(),
            b"running_lora_adapters" => stats.running_lora = reader.optional(names)?.unwrap_or_default(),
            b"perf_stats" => stats.perf = reader.optional(perf_stats)?,
            _ => return Ok::<_, MsgpackError>(false),
        }
        Ok(true)
    })?;
    Ok(stats)
}

fn cache_stats(reader: &mut Reader<'_>) -> Result<CacheStats, MsgpackError> {
    let mut stats = CacheStats::default();
    each_pair(reader, |key, reader| {
        match key {
            b"queries" => stats.queries = reader.u64()?,
            b"hits" => stats.hits = reader.u64()?,
            _ => return Ok::<_, MsgpackError>(false),
        }
        Ok(true)
    })?;
    Ok(stats)
}

fn kv_evictions(reader: &mut Reader<'_>) -> Result<Vec<KvEviction>, MsgpackError> {
    list(reader, |reader| {
        let mut eviction = KvEviction::default();
        each_pair(reader, |key, reader| {
            match key {
                b"lifetime_seconds" => eviction.lifetime_s = reader.f64()?,
                b"idle_seconds" => eviction.idle_s = reader.f64()?,
                b"reuse_gaps_seconds" => eviction.reuse_gaps_s = list(reader, Reader::f64)?,
                _ => return Ok::<_, MsgpackError>(false),
            }
            Ok(true)
        })?;
        Ok(eviction)
    })
}

fn spec_decode(reader: &mut Reader<'_>) -> Result<SpecDecode, MsgpackError> {
    let mut stats = SpecDecode::default();
    each_pair(reader, |key, reader| {
        match key {
            b"num_drafts" => stats.drafts = reader.u64()?,
            b"num_draft_tokens" => stats.draft_tokens = reader.u64()?,
            b"num_accepted_tokens" => stats.accepted_tokens = reader.u64()?,
            b"num_accepted_tokens_per_pos" => stats.accepted_per_position = list(reader, Reader::u64)?,
            _ => return Ok::<_, MsgpackError>(false),
        }
        Ok(true)
    })?;
    Ok(stats)
}

fn perf_stats(reader: &mut Reader<'_>) -> Result<PerfStats, MsgpackError> {
    let mut stats = PerfStats::default();
    each_pair(reader, |key, reader| {
        match key {
            b"num_flops_per_gpu" => stats.flops = reader.f64()?,
            b"num_read_bytes_per_gpu" => stats.read_bytes = reader.f64()?,
            b"num_write_bytes_per_gpu" => stats.write_bytes = reader.f64()?,
            _ => return Ok::<_, MsgpackError>(false),
        }
        Ok(true)
    })?;
    Ok(stats)
}

/// The keys of a map of names.
fn names<'a>(reader: &mut Reader<'a>) -> Result<Vec<&'a str>, MsgpackError> {
    let count = reader.map()?;
    let mut names = Vec::with_capacity((count as usize).min(reader.rest().len()));
    for _ in 0..count {
        names.push(reader.str()?);
        reader.skip()?;
    }
    Ok(names)
}

fn list<'a, T>(
    reader: &mut Reader<'a>,
    mut read: impl FnMut(&mut Reader<'a>) -> Result<T, MsgpackError>,
) -> Result<Vec<T>, MsgpackError> {
    // Not reserved: an element of a list may be much larger in memory than its least size on the wire.
    (0..reader.array()?).map(|_| read(reader)).collect()
}

fn is_truncated(error: &WireError) -> bool {
    matches!(error, WireError::Msgpack(error) if error.is_truncated())
}

fn end(reader: &Reader<'_>) -> Result<(), WireError> {
    match reader.left() {
        0 => Ok(()),
        left => Err(WireError::TrailingBytes {
            left: u32::try_from(left).unwrap_or(u32::MAX),
        }),
    }
}

/// Where the last elements of `EngineCoreOutputs` start in a frame's tail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OutputsTrailer {
    /// The statistics' map; `None` where they are nil, or start before the tail.
    pub(super) stats: Option<usize>,
    /// The timestamp.
    pub(super) timestamp: usize,
}

/// Finds the trailer of `EngineCoreOutputs`: the one place from which a timestamp and all elements behind it
/// parse to the very end of the frame. None where no place does, or more than one: then it would be a guess.
pub(super) fn outputs_trailer(tail: &[u8], outer: u32) -> Option<OutputsTrailer> {
    let mut found = None;
    for (at, _) in tail.iter().enumerate().filter(|(_, byte)| **byte == marker::F64) {
        let Some(before) = at.checked_sub(1) else { continue };
        if !tail.get(at..).is_some_and(|bytes| is_trailer(bytes, outer)) {
            continue;
        }
        let stats = stats_before(tail.get(..at).unwrap_or_default());
        if stats.is_none() && tail.get(before) != Some(&marker::NIL) {
            continue;
        }
        if found.replace(OutputsTrailer { stats, timestamp: at }).is_some() {
            return None;
        }
    }
    found
}

/// Whether these bytes are a timestamp, a utility reply, the finished requests and the elements behind them.
fn is_trailer(bytes: &[u8], outer: u32) -> bool {
    let mut reader = Reader::new(bytes);
    let parsed = (|| {
        let timestamp = reader.f64()?;
        if !reader.take_nil() {
            if !is_array(reader.peek()?) {
                return Ok(false);
            }
            reader.skip()?;
        }
        if !reader.take_nil() {
            for _ in 0..reader.array()? {
                reader.str()?;
            }
        }
        for index in 6..outer {
            if !reader.take_nil() {
                if index < 8 {
                    reader.i64()?;
                } else {
                    reader.str()?;
                }
            }
        }
        Ok::<_, MsgpackError>(timestamp.is_finite() && timestamp > 0.0)
    })();
    parsed == Ok(true) && reader.left() == 0
}

/// The start of the statistics' map that ends where these bytes end.
fn stats_before(bytes: &[u8]) -> Option<usize> {
    const KEY: &[u8] = b"num_running_reqs";
    if !bytes.windows(KEY.len()).any(|window| window == KEY) {
        return None;
    }
    let starts = bytes
        .iter()
        .enumerate()
        .filter(|(_, byte)| matches!(byte, 0x81..=0x8f | 0xde | 0xdf));
    starts.map(|(at, _)| at).find(|at| {
        let mut reader = Reader::new(bytes.get(*at..).unwrap_or_default());
        let mut has_key = false;
        let parsed = each_pair(&mut reader, |key, _| {
            has_key |= key == KEY;
            Ok::<_, MsgpackError>(false)
        });
        parsed.is_ok() && has_key && reader.left() == 0
    })
}

/// What the tail of a cut frame tells.
fn from_tail<'a>(tail: &'a [u8], outer: u32, message: &mut EngineOutputs<'a>) {
    let Some(trailer) = outputs_trailer(tail, outer) else {
        return;
    };
    let from = trailer.stats.unwrap_or(trailer.timestamp);
    let mut reader = Reader::new(tail.get(from..).unwrap_or_default());
    let mut seen = EngineOutputs::default();
    let parsed = (|| {
        if trailer.stats.is_some() {
            seen.stats = Some(scheduler_stats(&mut reader)?);
        }
        seen.timestamp = Some(reader.f64()?);
        seen.is_utility_reply = !reader.take_nil();
        if seen.is_utility_reply {
            reader.skip()?;
        }
        if !reader.take_nil() {
            seen.finished_requests = list(&mut reader, Reader::str)?;
        }
        Ok::<_, MsgpackError>(())
    })();
    if parsed.is_ok() {
        message.stats = message.stats.take().or(seen.stats);
        message.timestamp = seen.timestamp;
        message.is_utility_reply = seen.is_utility_reply;
        message.finished_requests = seen.finished_requests;
    }
}

/// `EngineCoreRequest`.
pub fn add<'a>(payload: Payload<'a>, layouts: &Layouts) -> Result<Seen<Add<'a>>, WireError> {
    let mut reader = payload.reader();
    let layout = layouts.add(reader.array()?)?;
    let mut message = Add {
        size: payload.size,
        n: 1,
        ..Add::default()
    };
    let mut done = 0;
    let read = (|| {
        for field in layout.fields() {
            add_field(&mut reader, *field, &mut message)?;
            done += 1;
        }
        end(&reader)
    })();
    match read {
        Ok(()) => Ok(Seen {
            message,
            is_partial: false,
        }),
        Err(error) if payload.is_cut() && is_truncated(&error) && done > 0 => {
            let is_partial = layout.fields().iter().skip(done).any(|field| is_used(*field));
            if is_partial {
                add_from_tail(payload.tail, layout, &mut message);
            }
            Ok(Seen { message, is_partial })
        }
        Err(error) => Err(error),
    }
}

/// Whether the decoder takes anything from this element.
fn is_used(field: AddField) -> bool {
    matches!(
        field,
        AddField::RequestId
            | AddField::PromptTokenIds
            | AddField::SamplingParams
            | AddField::PoolingParams
            | AddField::ArrivalTime
            | AddField::ClientIndex
            | AddField::Resumable
            | AddField::ExternalReqId
    )
}

fn add_field<'a>(
    reader: &mut Reader<'a>,
    field: AddField,
    message: &mut Add<'a>,
) -> Result<(), MsgpackError> {
    match field {
        AddField::RequestId => message.request_id = reader.str()?,
        _ if reader.take_nil() => {}
        AddField::PromptTokenIds => {
            let count = reader.array()?;
            // The count is known even where a long prompt is cut.
            message.prompt_tokens = Some(count);
            reader.skip_many(count)?;
        }
        AddField::SamplingParams => sampling_params(reader, message)?,
        AddField::PoolingParams => {
            reader.skip()?;
            message.is_pooling = true;
        }
        AddField::ArrivalTime => message.arrival = Some(reader.f64()?),
        AddField::ClientIndex => message.client_index = Some(reader.u32()?),
        AddField::Resumable => message.resumable = reader.bool()?,
        AddField::ExternalReqId => message.external_req_id = Some(reader.str()?),
        _ => reader.skip()?,
    }
    Ok(())
}

fn sampling_params<'a>(reader: &mut Reader<'a>, message: &mut Add<'a>) -> Result<(), MsgpackError> {
    // What equals its default is absent.
    let mut max_tokens = Some(DEFAULT_MAX_TOKENS);
    let mut n = 1;
    let mut output_kind = OutputKind::Cumulative;
    let mut has_stop_strings = false;
    each_pair(reader, |key, reader| {
        match key {
            b"max_tokens" => max_tokens = reader.optional(Reader::u32)?,
            b"n" => n = reader.u32()?,
            b"output_kind" => {
                output_kind = match reader.u32()? {
                    1 => OutputKind::Delta,
                    2 => OutputKind::FinalOnly,
                    _ => OutputKind::Cumulative,
                }
            }
            b"stop" => has_stop_strings = stop_strings(reader)?,
            _ => return Ok::<_, MsgpackError>(false),
        }
        Ok(true)
    })?;
    message.max_tokens = max_tokens;
    message.n = n;
    message.output_kind = output_kind;
    message.has_stop_strings = has_stop_strings;
    Ok(())
}

/// Whether `stop` (nil, a string or a list of strings) names any.
fn stop_strings(reader: &mut Reader<'_>) -> Result<bool, MsgpackError> {
    let first = reader.peek()?;
    reader.skip()?;
    Ok(!matches!(
        first,
        marker::NIL | marker::EMPTY_STR | marker::EMPTY_ARRAY
    ))
}

/// Where the elements of a request that follow its prompt lie in a frame's tail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AddTrailer {
    /// The sampling parameters' map, where it is wholly in the tail and the request is not a pooling one.
    pub(super) sampling_params: Option<usize>,
    /// The arrival time.
    pub(super) arrival: usize,
}

/// Finds the trailer of a request: the one place from which an arrival time and all elements behind it parse,
/// each with a type that its element may have, to the very end of the frame.
pub(super) fn add_trailer(tail: &[u8], layout: &AddLayout) -> Option<AddTrailer> {
    let fields = layout.fields();
    let first = fields.iter().position(|field| *field == AddField::ArrivalTime)?;
    let fields = fields.get(first..)?;
    let mut found = None;
    for (at, _) in tail.iter().enumerate().filter(|(_, byte)| **byte == marker::F64) {
        let mut reader = Reader::new(tail.get(at..).unwrap_or_default());
        let fits = fields
            .iter()
            .all(|field| reader.peek().is_ok_and(|first| field.admits(first)) && reader.skip().is_ok());
        if fits && reader.left() == 0 && found.replace(at).is_some() {
            return None;
        }
    }
    let arrival = found?;
    // Before it come the sampling parameters and, for a request that has those, nil as pooling parameters.
    let before = tail.get(..arrival).unwrap_or_default();
    let sampling_params = before
        .strip_suffix(&[marker::NIL])
        .and_then(sampling_params_before);
    Some(AddTrailer {
        sampling_params,
        arrival,
    })
}

/// The start of the sampling parameters that end where these bytes end: a map with names as keys. Before it
/// stands the nil of a request without images or audio in its prompt; without that nil it could be a map
/// inside the parameters.
fn sampling_params_before(bytes: &[u8]) -> Option<usize> {
    let pairs = bytes.iter().zip(bytes.iter().skip(1)).enumerate();
    let starts = pairs
        .filter(|(_, (before, first))| **before == marker::NIL && matches!(first, 0x80..=0x8f | 0xde | 0xdf));
    starts.map(|(before, _)| before + 1).find(|at| {
        let mut reader = Reader::new(bytes.get(*at..).unwrap_or_default());
        let parsed = (|| {
            for _ in 0..reader.map()? {
                let key = reader.str_bytes()?;
                if key.is_empty() || !key.iter().all(|byte| byte.is_ascii_lowercase() || *byte == b'_') {
                    return Ok(false);
                }
                reader.skip()?;
            }
            Ok::<_, MsgpackError>(true)
        })();
        parsed == Ok(true) && reader.left() == 0
    })
}

fn add_from_tail<'a>(tail: &'a [u8], layout: &AddLayout, message: &mut Add<'a>) {
    let Some(trailer) = add_trailer(tail, layout) else {
        return;
    };
    let mut seen = *message;
    let parsed = (|| {
        if let Some(at) = trailer.sampling_params {
            sampling_params(&mut Reader::new(tail.get(at..).unwrap_or_default()), &mut seen)?;
        }
        let mut reader = Reader::new(tail.get(trailer.arrival..).unwrap_or_default());
        for field in layout
            .fields()
            .iter()
            .skip_while(|field| **field != AddField::ArrivalTime)
        {
            add_field(&mut reader, *field, &mut seen)?;
        }
        Ok::<_, MsgpackError>(())
    })();
    if parsed.is_ok() {
        *message = seen;
    }
}

/// Ids of an ABORT.
pub fn abort(payload: Payload<'_>) -> Result<Seen<Vec<&str>>, WireError> {
    let mut reader = payload.reader();
    let announced = reader.array()?;
    let mut ids = Vec::with_capacity((announced as usize).min(reader.rest().len()));
    for _ in 0..announced {
        match reader.str() {
            Ok(id) => ids.push(id),
            Err(error) if payload.is_cut() && error.is_truncated() => {
                return Ok(Seen {
                    message: ids,
                    is_partial: true,
                });
            }
            Err(error) => return Err(error.into()),
        }
    }
    end(&reader)?;
    Ok(Seen {
        message: ids,
        is_partial: false,
    })
}

/// A UTILITY call: client index, call id, method, arguments.
pub fn utility(payload: Payload<'_>) -> Result<Seen<Utility<'_>>, WireError> {
    let mut reader = payload.reader();
    let length = reader.array()?;
    if length != 4 {
        return Err(WireError::UnknownLayout {
            what: "UTILITY",
            length,
            expected: Some(4),
        });
    }
    reader.skip_many(2)?;
    let method = reader.str()?;
    // Arguments may be of any type; only `sleep` has a number first that matters.
    let level = match reader.array() {
        Ok(1..) => reader.i64().ok(),
        Ok(0) | Err(_) => None,
    };
    Ok(Seen {
        message: Utility { method, level },
        is_partial: payload.is_cut() && level.is_none(),
    })
}

/// A `START_DP_WAVE`: wave, and the engine that needs no telling.
pub fn start_dp_wave(payload: Payload<'_>) -> Result<Seen<()>, WireError> {
    let mut reader = payload.reader();
    let count = reader.array()?;
    reader.skip_many(count)?;
    end(&reader)?;
    Ok(Seen {
        message: (),
        is_partial: false,
    })
}

/// A map that an engine or its client sends at start-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartUp<'a> {
    /// `EngineCoreReadyResponse`.
    Ready(Ready<'a>),
    /// HELLO, READY, or the addresses that answer HELLO.
    Handshake,
    /// Registration of a stage replica with vLLM-Omni's master, or its answer.
    Registration,
    /// None of these.
    Other,
}

/// Tells the maps apart by their keys. One that is cut is told by the keys that are there.
pub fn start_up(payload: Payload<'_>) -> Result<Seen<StartUp<'_>>, WireError> {
    let mut reader = payload.reader();
    let mut ready = Ready::default();
    let mut kind = StartUp::Other;
    let read = each_pair(&mut reader, |key, reader| {
        match key {
            b"max_model_len" => {
                ready.max_model_len = reader.optional(Reader::u32)?;
                kind = StartUp::Ready(ready);
            }
            b"vllm_version" => {
                ready.vllm_version = reader.optional(Reader::str)?;
                kind = StartUp::Ready(ready);
            }
            b"status" | b"addresses" if kind == StartUp::Other => {
                kind = StartUp::Handshake;
                return Ok(false);
            }
            b"stage_id" | b"handshake_address" if kind == StartUp::Other => {
                kind = StartUp::Registration;
                return Ok(false);
            }
            _ => return Ok::<_, MsgpackError>(false),
        }
        Ok(true)
    });
    match read {
        Ok(()) => {
            end(&reader)?;
            Ok(Seen {
                message: kind,
                is_partial: false,
            })
        }
        Err(error) if payload.is_cut() && error.is_truncated() && kind != StartUp::Other => Ok(Seen {
            message: kind,
            is_partial: true,
        }),
        Err(error) => Err(error.into()),
    }
}
