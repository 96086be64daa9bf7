//! Messages between the API server and a diffusion stage in a process of its own (docs/wire.md section "Diffusion").
//!
//! Each is one frame with one map, `type` first. Results carry images by their pixels, so most of a frame is never
//! captured: what matters lies before and behind them, in the head and in the tail.

use super::{
    WireError,
    connector::MAX_KEY,
    engine::{Payload, Seen, each_pair},
    msgpack::{MsgpackError, Reader, marker},
};

/// The stage's last words.
pub(super) const STAGE_DEAD: &[u8] = b"DIFFUSION_PROC_DEAD";

/// A message of a diffusion stage's sockets.
#[derive(Clone, Debug, PartialEq)]
pub enum Diffusion<'a> {
    /// API -> stage: a request.
    Add(DiffusionAdd<'a>),
    /// API -> stage: these requests are to be aborted.
    Abort(Vec<&'a str>),
    /// API -> stage: a call.
    Call,
    /// API -> stage: the stage is to end.
    Shutdown,
    /// Stage -> API: a result, or a part of one.
    Result(DiffusionResult<'a>),
    /// Stage -> API: what the scheduler says when a request was aborted.
    Snapshot {
        /// Requests that wait in the scheduler.
        waiting: Option<u64>,
    },
    /// Stage -> API: a request failed.
    Error {
        /// Internal request id.
        request_id: &'a str,
        /// Requests that wait in the scheduler.
        waiting: Option<u64>,
    },
    /// Stage -> API: a call returned or failed.
    Reply,
}

/// A request to a diffusion stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiffusionAdd<'a> {
    /// Internal request id, the same at every stage.
    pub request_id: &'a str,
    /// Bytes of the message, which has one part.
    pub size: u64,
    /// Denoising steps that are asked for; `None`: the pipeline's default, or not captured.
    pub steps: Option<u32>,
}

/// `OmniRequestOutput` of a diffusion stage.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DiffusionResult<'a> {
    /// Internal request id.
    pub request_id: &'a str,
    /// Nothing more comes; `None`: not captured.
    pub finished: Option<bool>,
    /// The news that the request has begun, without any output.
    pub is_start: bool,
    /// The result is an error.
    pub failed: bool,
    /// What was made; `None`: not captured.
    pub kind: Option<ResultKind>,
    /// Images; `None`: not captured.
    pub images: Option<Images>,
    /// Timings; `None`: not captured.
    pub metrics: Option<DiffusionMetrics>,
    /// The engine's peak accelerator memory in MB; `None`: not captured.
    pub peak_memory_mb: Option<f64>,
}

/// `final_output_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResultKind {
    /// Images.
    Image,
    /// Anything else: video, audio, text.
    Other,
}

/// The images of a result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Images {
    /// How many.
    pub count: u32,
    /// Width times height, added up over the images; `None`: of none of them captured.
    pub pixels: Option<u64>,
}

/// Timings of a diffusion request, in milliseconds as on the wire. `None`: not reported.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DiffusionMetrics {
    /// Denoising steps.
    pub steps: Option<u32>,
    /// Preparation of the inputs.
    pub preprocess_ms: Option<f64>,
    /// From the scheduler being given the request to the raw output.
    pub exec_ms: Option<f64>,
    /// From the raw output to the result.
    pub postprocess_ms: Option<f64>,
    /// Wait in the scheduler's queue.
    pub queue_wait_ms: Option<f64>,
    /// VAE decoding (pipeline profiler).
    pub vae_decode_ms: Option<f64>,
    /// Denoising loop (pipeline profiler).
    pub forward_ms: Option<f64>,
    /// Receipt of an earlier stage's KV data.
    pub kv_recv_ms: Option<f64>,
    /// Requests that wait in the scheduler now.
    pub waiting: Option<u64>,
}

/// Whether a map is one of these messages: `type` is always the first key.
pub(super) fn is_message(mut reader: Reader<'_>) -> bool {
    reader.map().is_ok() && reader.str_bytes() == Ok(b"type")
}

/// Decodes a message. `None`: its type is not known.
pub fn message(payload: Payload<'_>) -> Result<Option<Seen<Diffusion<'_>>>, WireError> {
    let mut fields = Fields::default();
    let mut reader = payload.reader();
    let read = each_pair(&mut reader, |key, reader| fields.take(key, reader));
    let is_partial = match read {
        Ok(()) => match u32::try_from(reader.left()) {
            Ok(0) => false,
            left => {
                return Err(WireError::TrailingBytes {
                    left: left.unwrap_or(u32::MAX),
                });
            }
        },
        Err(error) if payload.is_cut() && error.is_truncated() => {
            fields.take_tail(payload.tail);
            true
        }
        Err(error) => return Err(error.into()),
    };
    fields.message(payload.size, is_partial)
}

/// What a message's map has.
#[derive(Default)]
struct Fields<'a> {
    kind: &'a [u8],
    request_id: Option<&'a str>,
    request_ids: Option<Vec<&'a str>>,
    output: Option<DiffusionResult<'a>>,
    steps: Option<u32>,
    waiting: Option<u64>,
    has_steps: bool,
}

impl<'a> Fields<'a> {
    fn take(&mut self, key: &[u8], reader: &mut Reader<'a>) -> Result<bool, MsgpackError> {
        match key {
            b"type" => self.kind = reader.str_bytes()?,
            b"request_id" => self.request_id = reader.optional(Reader::str)?,
            b"request_ids" => {
                // As many as are there, also where the rest is cut off.
                let ids = self.request_ids.insert(Vec::new());
                for _ in 0..reader.array()? {
                    ids.push(reader.str()?);
                }
            }
            b"output" if is_map(reader.peek()?) => {
                let output = self.output.insert(DiffusionResult::default());
                each_pair(reader, |key, reader| result_pair(output, key, reader))?;
            }
            b"sampling_params" if is_map(reader.peek()?) => each_pair(reader, |key, reader| {
                if key != b"num_inference_steps" {
                    return Ok(false);
                }
                self.steps = steps(reader)?;
                self.has_steps = true;
                Ok::<_, MsgpackError>(true)
            })?,
            b"metrics" if is_map(reader.peek()?) => {
                let mut seen = DiffusionMetrics::default();
                let read = metrics(&mut seen, reader);
                self.waiting = seen.waiting;
                read?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// What the tail of a cut frame tells beyond the head.
    fn take_tail(&mut self, tail: &'a [u8]) {
        match (self.kind, &mut self.output) {
            (b"result", Some(output)) => {
                if let Some(start) = result_trailer(tail) {
                    // Found by being read: it can be read again.
                    let _ = pairs(tail, start, |key, reader| result_pair(output, key, reader));
                }
            }
            (b"add_request", _) if !self.has_steps => {
                if let Some(start) = add_trailer(tail) {
                    let _ = pairs(tail, start, |key, reader| {
                        if key != b"num_inference_steps" {
                            return Ok(false);
                        }
                        self.steps = steps(reader)?;
                        Ok(true)
                    });
                }
            }
            _ => {}
        }
    }

    fn message(self, size: u64, is_cut: bool) -> Result<Option<Seen<Diffusion<'a>>>, WireError> {
        let mut is_partial = is_cut;
        let message = match self.kind {
            b"add_request" => {
                // Nothing behind the steps matters.
                is_partial &= !self.has_steps && self.steps.is_none();
                Diffusion::Add(DiffusionAdd {
                    request_id: id(self.request_id)?,
                    size,
                    steps: self.steps,
                })
            }
            b"abort" => {
                let ids = self
                    .request_ids
                    .ok_or(WireError::Missing { what: "request_ids" })?;
                Diffusion::Abort(ids)
            }
            b"collective_rpc" => Diffusion::Call,
            b"shutdown" => Diffusion::Shutdown,
            b"result" => {
                let output = self.output.ok_or(WireError::Missing { what: "output" })?;
                id(Some(output.request_id).filter(|id| !id.is_empty()))?;
                is_partial &= !output.is_whole();
                Diffusion::Result(output)
            }
            b"metrics" => Diffusion::Snapshot {
                waiting: self.waiting,
            },
            b"error" => match self.request_id {
                Some(_) => Diffusion::Error {
                    request_id: id(self.request_id)?,
                    waiting: self.waiting,
                },
                // Of a call.
                None => Diffusion::Reply,
            },
            b"rpc_result" => Diffusion::Reply,
            _ => return Ok(None),
        };
        Ok(Some(Seen { message, is_partial }))
    }
}

/// Ids are kept while their request is open: none is long.
fn id(text: Option<&str>) -> Result<&str, WireError> {
    match text {
        None => Err(WireError::Missing { what: "request_id" }),
        Some(text) if text.is_empty() || text.len() > MAX_KEY => Err(WireError::UnknownValue {
            what: "request_id",
            value: text.len() as u64,
        }),
        Some(text) => Ok(text),
    }
}

impl DiffusionResult<'_> {
    /// All that matters was captured: the pixels themselves never are.
    fn is_whole(&self) -> bool {
        self.finished.is_some()
            && self.metrics.is_some()
            && self.images.is_some_and(|images| images.pixels.is_some())
            && self.peak_memory_mb.is_some()
    }
}

/// One pair of a result.
fn result_pair<'a>(
    result: &mut DiffusionResult<'a>,
    key: &[u8],
    reader: &mut Reader<'a>,
) -> Result<bool, MsgpackError> {
    match key {
        b"request_id" => result.request_id = reader.str()?,
        b"finished" => result.finished = Some(reader.bool()?),
        b"metrics" if is_map(reader.peek()?) => {
            let mut seen = DiffusionMetrics::default();
            metrics(&mut seen, reader)?;
            result.metrics = Some(seen);
        }
        b"final_output_type" => {
            let kind = reader.optional(Reader::str_bytes)?.unwrap_or_default();
            result.kind = Some(match kind {
                b"image" | b"images" => ResultKind::Image,
                _ => ResultKind::Other,
            });
        }
        b"images" if is_array(reader.peek()?) => images(result, reader)?,
        b"_custom_output" if is_map(reader.peek()?) => each_pair(reader, |key, reader| {
            let is_lifecycle = key == b"_diffusion_request_lifecycle";
            if is_lifecycle {
                result.is_start = reader.take(b"\xa7started");
                if !result.is_start {
                    reader.skip()?;
                }
            }
            Ok::<_, MsgpackError>(is_lifecycle)
        })?,
        b"peak_memory_mb" => result.peak_memory_mb = Some(reader.optional(Reader::f64)?.unwrap_or(0.0)),
        b"error" => {
            result.failed = reader.peek()? != marker::NIL;
            reader.skip()?;
        }
        _ => return Ok(false),
    }
    Ok(true)
}

fn metrics(seen: &mut DiffusionMetrics, reader: &mut Reader<'_>) -> Result<(), MsgpackError> {
    each_pair(reader, |key, reader| {
        let value = match key {
            b"num_inference_steps" => {
                seen.steps = steps(reader)?;
                return Ok(true);
            }
            b"scheduler_num_waiting_reqs" => {
                seen.waiting = reader.optional(Reader::u64)?;
                return Ok(true);
            }
            b"preprocess_time_ms" => &mut seen.preprocess_ms,
            b"diffusion_engine_exec_time_ms" => &mut seen.exec_ms,
            b"postprocess_time_ms" => &mut seen.postprocess_ms,
            b"scheduler_queue_wait_ms" => &mut seen.queue_wait_ms,
            b"vae_decode_time_ms" => &mut seen.vae_decode_ms,
            b"forward_time_ms" => &mut seen.forward_ms,
            b"kv_recv_time_ms" => &mut seen.kv_recv_ms,
            _ => return Ok::<_, MsgpackError>(false),
        };
        *value = reader.optional(Reader::f64)?;
        Ok(true)
    })
}

/// A number of steps: positive, where it is one.
fn steps(reader: &mut Reader<'_>) -> Result<Option<u32>, MsgpackError> {
    if matches!(reader.peek()?, marker::NIL) {
        reader.skip()?;
        return Ok(None);
    }
    let mut number = *reader;
    let steps = number.u32().ok().filter(|steps| *steps > 0);
    reader.skip()?;
    Ok(steps)
}

/// Counts images, and their pixels as far as their shapes are there. Those of one request are equally large, so that
/// the first one's shape, which stands before its pixels, tells of all.
fn images(result: &mut DiffusionResult<'_>, reader: &mut Reader<'_>) -> Result<(), MsgpackError> {
    let count = reader.array()?;
    let images = result.images.insert(Images { count, pixels: None });
    if count == 0 {
        images.pixels = Some(0);
        return Ok(());
    }
    let (mut sum, mut known) = (0_u64, 0_u64);
    for _ in 0..count {
        let mut pixels = None;
        let read = image(reader, &mut pixels);
        if let Some(pixels) = pixels {
            sum = sum.saturating_add(pixels);
            known += 1;
        }
        if read.is_err_and(MsgpackError::is_truncated) && known > 0 {
            images.pixels = Some(sum.saturating_mul(u64::from(count)) / known);
        }
        read?;
    }
    images.pixels = (known == u64::from(count)).then_some(sum);
    Ok(())
}

/// An image, or an array of pixels: a map whose `shape` stands before its `data`.
fn image(reader: &mut Reader<'_>, pixels: &mut Option<u64>) -> Result<(), MsgpackError> {
    if !is_map(reader.peek()?) {
        return reader.skip();
    }
    let mut is_picture = false;
    each_pair(reader, |key, reader| {
        match key {
            b"__pil_image__" => {
                is_picture = true;
                return Ok(false);
            }
            b"shape" if is_array(reader.peek()?) => *pixels = Some(area(reader, is_picture)?),
            _ => return Ok::<_, MsgpackError>(false),
        }
        Ok(true)
    })
}

/// Pixels of a shape: height, width and channels of a picture; of a bare array as vLLM-Omni reads it
/// (`metrics/utils.py`): channels first or last where they are 1, 3 or 4, a batch in front of four dimensions.
fn area(reader: &mut Reader<'_>, is_picture: bool) -> Result<u64, MsgpackError> {
    const MOST_DIMENSIONS: usize = 8;
    let mut dimensions = [0_u64; MOST_DIMENSIONS];
    let count = reader.array()?;
    for place in 0..count {
        let size = reader.u64()?;
        if let Some(slot) = dimensions.get_mut(place as usize) {
            *slot = size;
        }
    }
    let is_channels = |size: u64| matches!(size, 1 | 3 | 4);
    let dimensions = dimensions.get(..count as usize).unwrap_or_default();
    let factors: &[u64] = match *dimensions {
        [height, width, ..] if is_picture => &[height, width],
        [height, width, last] if is_channels(last) && !is_channels(height) => &[height, width],
        [height, width] | [_, height, width] => &[height, width],
        [batch, .., height, width] => &[batch, height, width],
        _ => &[0],
    };
    Ok(factors
        .iter()
        .fold(1, |product, factor| product.saturating_mul(*factor)))
}

/// Where the last pairs of a result lie in a frame's tail, behind its images.
pub(super) fn result_trailer(tail: &[u8]) -> Option<usize> {
    trailer(tail, b"\xae_custom_output", b"error_type")
        .or_else(|| trailer(tail, b"\xaepeak_memory_mb", b"error_type"))
}

/// Where the last pairs of a request lie in a frame's tail, behind a long prompt: those of its sampling parameters
/// from the steps on, then its own.
pub(super) fn add_trailer(tail: &[u8]) -> Option<usize> {
    trailer(tail, b"\xb3num_inference_steps", b"payload_sender_info")
}

/// The last place of the key `first` (with its marker) from which on everything parses as pairs to the frame's very
/// end, with the key `last` among them.
fn trailer(tail: &[u8], first: &[u8], last: &[u8]) -> Option<usize> {
    let start = tail.windows(first.len()).rposition(|window| window == first)?;
    let mut has_last = false;
    let read = pairs(tail, start, |key, _| {
        has_last |= key == last;
        Ok(false)
    });
    (read.is_ok() && has_last).then_some(start)
}

/// Reads pairs from `start` to the end: the rest of a map, or of maps inside each other that end together.
fn pairs<'a>(
    tail: &'a [u8],
    start: usize,
    mut take: impl FnMut(&'a [u8], &mut Reader<'a>) -> Result<bool, MsgpackError>,
) -> Result<(), MsgpackError> {
    let mut reader = Reader::new(tail.get(start..).unwrap_or_default());
    while reader.left() > 0 {
        let key = reader.str_bytes()?;
        if !take(key, &mut reader)? {
            reader.skip()?;
        }
    }
    Ok(())
}

fn is_map(marker: u8) -> bool {
    matches!(marker, 0x80..=0x8f | 0xde | 0xdf)
}

fn is_array(marker: u8) -> bool {
    matches!(marker, 0x90..=0x9f | 0xdc | 0xdd)
}
