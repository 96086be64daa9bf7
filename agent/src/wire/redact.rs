//! Blanks the content of frames for recordings: token ids, text, tensors.
//!
//! It works from a list of what may stay: ids, the values that the decoders take, the map keys that they look
//! for. Everything else is overwritten in place: numbers with 0, text with `x`, binary data with zeros. Types
//! and lengths stay, so a redacted frame decodes to the same message. Frames that are not decoded are
//! overwritten wholly, but for the one or two first bytes that tell their type.

use super::{
    assemble::FrameType,
    control::offer_trailer,
    diffusion,
    engine::{AddTrailer, OutputsTrailer, add_trailer, outputs_trailer},
    layout::{AddField, AddLayout, Layouts, OutputField, OutputLayout},
    msgpack::{MsgpackError, Reader},
};

/// What becomes of a value.
#[derive(Clone, Copy)]
enum Rule {
    /// It stays.
    Keep,
    /// Its types and lengths stay.
    Blank,
    /// The rule for each element of an array.
    Each(&'static Rule),
    /// These keys of a map stay, and of their values what their rules say.
    Keys(&'static [(&'static [u8], Rule)]),
    /// A tensor or a list of tensors, of which the shapes stay.
    Shapes,
    /// Arguments of a call: a number in front stays.
    Arguments,
}

use Rule::{Arguments, Blank, Each, Keep, Keys, Shapes};

const CACHE: Rule = Keys(&[(b"queries", Keep), (b"hits", Keep)]);
const STATS: Rule = Keys(&[
    (b"num_running_reqs", Keep),
    (b"num_waiting_reqs", Keep),
    (b"num_skipped_waiting_reqs", Keep),
    (b"kv_cache_usage", Keep),
    (b"prefix_cache_stats", CACHE),
    (b"connector_prefix_cache_stats", CACHE),
    (
        b"kv_cache_eviction_events",
        Each(&Keys(&[
            (b"lifetime_seconds", Keep),
            (b"idle_seconds", Keep),
            (b"reuse_gaps_seconds", Keep),
        ])),
    ),
    (
        b"spec_decoding_stats",
        Keys(&[
            (b"num_drafts", Keep),
            (b"num_draft_tokens", Keep),
            (b"num_accepted_tokens", Keep),
            (b"num_accepted_tokens_per_pos", Keep),
        ]),
    ),
    // Names of adapters, with numbers of requests.
    (b"waiting_lora_adapters", Keep),
    (b"running_lora_adapters", Keep),
    (
        b"perf_stats",
        Keys(&[
            (b"num_flops_per_gpu", Keep),
            (b"num_read_bytes_per_gpu", Keep),
            (b"num_write_bytes_per_gpu", Keep),
        ]),
    ),
]);
const EVENTS: Rule = Each(&Keys(&[(b"type", Keep), (b"timestamp", Keep)]));
const KV_TRANSFER: Rule = Keys(&[(b"kv_wait_s", Keep), (b"connector_type", Keep)]);
const PREFILL: Rule = Keys(&[
    (b"num_prompt_tokens", Keep),
    (b"num_computed_tokens", Keep),
    (b"num_cached_tokens", Keep),
    (b"num_local_cached_tokens", Keep),
    (b"num_external_cached_tokens", Keep),
]);
const AUDIO: Rule = Keys(&[
    (b"audio", Shapes),
    (b"model_outputs", Shapes),
    (b"output_sample_rate", Keep),
    (b"audio_sample_rate", Keep),
    (b"sample_rate", Keep),
    (b"sampling_rate", Keep),
    (b"sr", Keep),
]);
const SAMPLING: Rule = Keys(&[
    (b"max_tokens", Keep),
    (b"n", Keep),
    (b"output_kind", Keep),
    (b"stop", Blank),
]);
const START_UP: Rule = Keys(&[
    (b"max_model_len", Keep),
    (b"vllm_version", Keep),
    (b"status", Keep),
    (b"addresses", Blank),
    (b"stage_id", Keep),
    (b"handshake_address", Blank),
]);

const DIFFUSION: Rule = Keys(&[
    (b"type", Keep),
    (b"request_id", Keep),
    (b"request_ids", Keep),
    (b"sampling_params", Keys(DIFFUSION_ADD_KEYS)),
    (b"metrics", DIFFUSION_METRICS),
    (b"output", Keys(DIFFUSION_RESULT_KEYS)),
]);
const DIFFUSION_ADD_KEYS: &[(&[u8], Rule)] = &[
    (b"num_inference_steps", Keep),
    // Known by its name.
    (b"payload_sender_info", Blank),
];
const DIFFUSION_RESULT_KEYS: &[(&[u8], Rule)] = &[
    (b"request_id", Keep),
    (b"finished", Keep),
    (b"metrics", DIFFUSION_METRICS),
    (b"final_output_type", Keep),
    (
        b"images",
        Each(&Keys(&[(b"__pil_image__", Keep), (b"shape", Keep)])),
    ),
    (
        b"_custom_output",
        Keys(&[(b"_diffusion_request_lifecycle", Keep)]),
    ),
    (b"peak_memory_mb", Keep),
    // Whether there is one.
    (b"error", Blank),
    // Known by its name.
    (b"error_type", Blank),
];
const DIFFUSION_METRICS: Rule = Keys(&[
    (b"num_inference_steps", Keep),
    (b"preprocess_time_ms", Keep),
    (b"diffusion_engine_exec_time_ms", Keep),
    (b"postprocess_time_ms", Keep),
    (b"scheduler_queue_wait_ms", Keep),
    (b"vae_decode_time_ms", Keep),
    (b"forward_time_ms", Keep),
    (b"kv_recv_time_ms", Keep),
    (b"scheduler_num_waiting_reqs", Keep),
]);

const CONNECTOR: Rule = Keys(CONNECTOR_KEYS);
const CONNECTOR_KEYS: &[(&[u8], Rule)] = &[
    (b"request_id", Keep),
    (b"key", Keep),
    (b"claim_id", Keep),
    (b"data_size", Keep),
    (b"length", Keep),
    (b"lengths", Keep),
    (b"size", Keep),
    // Known by their names.
    (b"remote_hostname", Blank),
    (b"schema_version", Blank),
];

fn output_rule(field: OutputField) -> Rule {
    match field {
        OutputField::RequestId
        | OutputField::FinishReason
        | OutputField::Nans
        | OutputField::SegmentFinished
        | OutputField::GenerationTokens => Keep,
        OutputField::Events => EVENTS,
        OutputField::KvTransfer => KV_TRANSFER,
        OutputField::PrefillStats => PREFILL,
        // A tensor is no map, and blanked.
        OutputField::PoolingOutput | OutputField::Multimodal => AUDIO,
        OutputField::NewTokenIds
        | OutputField::Logprobs
        | OutputField::PromptLogprobs
        | OutputField::StopReason
        | OutputField::EcTransfer
        | OutputField::TraceHeaders
        | OutputField::CachedTokens
        | OutputField::RoutedExperts
        | OutputField::MmCacheMisses
        | OutputField::SamplingMask
        | OutputField::SpecDecodeMetrics
        | OutputField::PromptIdLogprobs
        | OutputField::Error
        | OutputField::PoolingPayload
        | OutputField::PromptLength => Blank,
    }
}

fn add_rule(field: AddField) -> Rule {
    match field {
        AddField::RequestId
        | AddField::ArrivalTime
        | AddField::ClientIndex
        | AddField::Resumable
        | AddField::ExternalReqId => Keep,
        AddField::SamplingParams => SAMPLING,
        AddField::PromptTokenIds
        | AddField::MmFeatures
        | AddField::PoolingParams
        | AddField::LoraRequest
        | AddField::CacheSalt
        | AddField::DataParallelRank
        | AddField::PromptEmbeds
        | AddField::PromptIsTokenIds
        | AddField::CurrentWave
        | AddField::Priority
        | AddField::TraceHeaders
        | AddField::ReasoningEnded
        | AddField::ReasoningParserKwargs
        | AddField::AbortImmediately
        | AddField::SessionId
        | AddField::KvHints
        | AddField::AdditionalInformation
        | AddField::IntermediateBuffer
        | AddField::PayloadSenderInfo => Blank,
    }
}

/// The rule of an element of `EngineCoreOutputs`, by its index; the outputs themselves have one each.
fn outer_rule(index: u32) -> Rule {
    match index {
        // Engine index, timestamp, finished requests.
        0 | 3 | 5 => Keep,
        2 => STATS,
        _ => Blank,
    }
}

/// Blanks a frame of this type in place. `size` is that of the whole frame, of which `head` and `tail` were
/// captured.
pub(super) fn frame(kind: FrameType, layouts: &Layouts, size: u64, head: &mut [u8], tail: &mut [u8]) {
    let mut walk = Walk {
        bytes: head,
        at: 0,
        total: size,
    };
    let kept_tail = match kind {
        FrameType::Outputs => {
            let outer = walk.reader().array().unwrap_or_default();
            walk.run(|walk| walk.outputs(layouts));
            outputs_trailer(tail, outer).map(|trailer| blank_outputs_tail(tail, outer, trailer))
        }
        FrameType::Add => {
            let layout = walk
                .reader()
                .array()
                .ok()
                .and_then(|length| layouts.add(length).ok());
            walk.run(|walk| match layout {
                Some(layout) => walk.fields(layout.fields().iter().map(|field| add_rule(*field))),
                None => walk.value(Blank),
            });
            layout.and_then(|layout| {
                add_trailer(tail, layout).map(|trailer| blank_add_tail(tail, layout, trailer))
            })
        }
        // Ids, or a wave's number. Where the tail of ids starts can't be told.
        FrameType::Abort | FrameType::StartDpWave => {
            walk.run(|walk| walk.value(Keep));
            None
        }
        FrameType::Utility => {
            walk.run(|walk| walk.fields([Keep, Keep, Keep, Arguments].into_iter()));
            None
        }
        FrameType::Ready | FrameType::Handshake | FrameType::Registration => {
            walk.run(|walk| walk.value(START_UP));
            None
        }
        FrameType::Diffusion => {
            walk.run(|walk| walk.value(DIFFUSION));
            let result = diffusion::result_trailer(tail).map(|start| (start, DIFFUSION_RESULT_KEYS));
            let add = || diffusion::add_trailer(tail).map(|start| (start, DIFFUSION_ADD_KEYS));
            let found = result.or_else(add);
            found.map(|(start, keys)| blank_pairs_tail(tail, start, keys))
        }
        FrameType::EngineDead => None,
        FrameType::Connector => {
            // The word in front, or the message that is one word.
            let is_word = |byte: &u8| byte.is_ascii_lowercase() || *byte == b'_';
            walk.at = walk.bytes.iter().take_while(|byte| is_word(byte)).count();
            walk.run(|walk| walk.value(CONNECTOR));
            offer_trailer(tail).map(|start| blank_pairs_tail(tail, start, CONNECTOR_KEYS))
        }
        // An engine index, a request type, the number of a connector's peer.
        FrameType::Envelope if size <= 5 => None,
        FrameType::Coordinator | FrameType::WorkerQueue => {
            walk.at = 2.min(walk.bytes.len());
            walk.zero_rest();
            None
        }
        FrameType::Envelope | FrameType::Aux | FrameType::Signal | FrameType::Other => {
            walk.zero_rest();
            None
        }
    };
    if kept_tail.is_none() {
        tail.fill(0);
    }
}

/// Blanks what lies before the trailer, and in it what is no number or id.
fn blank_outputs_tail(tail: &mut [u8], outer: u32, trailer: OutputsTrailer) {
    let start = trailer.stats.unwrap_or(trailer.timestamp);
    // Where there are no statistics the byte before the timestamp is their nil, by which the trailer is
    // known.
    let before = if trailer.stats.is_none() {
        start.saturating_sub(1)
    } else {
        start
    };
    tail.get_mut(..before).unwrap_or_default().fill(0);
    let mut walk = Walk {
        total: tail.len() as u64,
        bytes: tail,
        at: start,
    };
    let first = if trailer.stats.is_some() { 2 } else { 3 };
    walk.run(|walk| (first..outer).try_for_each(|index| walk.value(outer_rule(index))));
}

/// Blanks what lies before the pairs that a tail ends with, and of those what is not among `keys`.
fn blank_pairs_tail(tail: &mut [u8], start: usize, keys: &[(&[u8], Rule)]) {
    tail.get_mut(..start).unwrap_or_default().fill(0);
    let mut walk = Walk {
        total: tail.len() as u64,
        bytes: tail,
        at: start,
    };
    walk.run(|walk| {
        while walk.at < walk.bytes.len() {
            walk.pair(keys)?;
        }
        Ok(())
    });
}

fn blank_add_tail(tail: &mut [u8], layout: &AddLayout, trailer: AddTrailer) {
    let start = trailer.sampling_params.unwrap_or(trailer.arrival);
    // The sampling parameters are known by the nil before them.
    let before = if trailer.sampling_params.is_some() {
        start.saturating_sub(1)
    } else {
        start
    };
    tail.get_mut(..before).unwrap_or_default().fill(0);
    let mut walk = Walk {
        total: tail.len() as u64,
        bytes: tail,
        at: start,
    };
    let first = if trailer.sampling_params.is_some() {
        AddField::SamplingParams
    } else {
        AddField::ArrivalTime
    };
    let mut fields = layout.fields().iter().skip_while(|field| **field != first);
    walk.run(|walk| fields.try_for_each(|field| walk.value(add_rule(*field))));
}

/// Goes through a frame and overwrites what its rules tell it to.
struct Walk<'a> {
    bytes: &'a mut [u8],
    at: usize,
    total: u64,
}

type Done = Result<(), MsgpackError>;

impl Walk<'_> {
    fn reader(&self) -> Reader<'_> {
        let left = self.total.saturating_sub(self.at as u64);
        Reader::of_head(self.bytes.get(self.at..).unwrap_or_default(), left)
    }

    fn array(&mut self) -> Result<u32, MsgpackError> {
        let mut reader = self.reader();
        let count = reader.array();
        let end = reader.offset();
        self.behind_header(count, end)
    }

    fn map(&mut self) -> Result<u32, MsgpackError> {
        let mut reader = self.reader();
        let count = reader.map();
        let end = reader.offset();
        self.behind_header(count, end)
    }

    /// Moves behind a container's header. One that is cut stays, for it is no content.
    fn behind_header(&mut self, count: Result<u32, MsgpackError>, end: usize) -> Result<u32, MsgpackError> {
        match count {
            Ok(_) => self.at += end,
            Err(error) if error.is_truncated() => self.at = self.bytes.len(),
            Err(_) => {}
        }
        count
    }

    fn skip(&mut self) -> Done {
        let mut reader = self.reader();
        reader.skip()?;
        self.at += reader.offset();
        Ok(())
    }

    fn zero_rest(&mut self) {
        self.bytes.get_mut(self.at..).unwrap_or_default().fill(0);
    }

    /// Walks through a frame as far as it goes; what the walk did not get to is overwritten.
    fn run(&mut self, walk: impl FnOnce(&mut Self) -> Done) {
        // The error would say where the walk ended; the decoder has told of it already.
        let _ = walk(self);
        self.zero_rest();
    }

    fn outputs(&mut self, layouts: &Layouts) -> Done {
        let outer = self.array()?;
        for index in 0..outer {
            if index != 1 {
                self.value(outer_rule(index))?;
                continue;
            }
            for _ in 0..self.array()? {
                let mut reader = self.reader();
                let Ok(length) = reader.array() else {
                    return self.array().map(|_| ());
                };
                match layouts.output(length, &reader).map(OutputLayout::fields) {
                    Ok(fields) => {
                        let rules: Vec<Rule> = fields.iter().map(|field| output_rule(*field)).collect();
                        self.fields(rules.into_iter())?;
                    }
                    Err(_) => self.value(Blank)?,
                }
            }
        }
        Ok(())
    }

    /// An array with a rule for each of its elements; more elements are blanked.
    fn fields(&mut self, mut rules: impl Iterator<Item = Rule>) -> Done {
        for _ in 0..self.array()? {
            self.value(rules.next().unwrap_or(Blank))?;
        }
        Ok(())
    }

    /// Recursion is as deep as the rules are.
    fn value(&mut self, rule: Rule) -> Done {
        let first = self.reader().peek()?;
        let is_array = matches!(first, 0x90..=0x9f | 0xdc | 0xdd);
        let is_map = matches!(first, 0x80..=0x8f | 0xde | 0xdf);
        match rule {
            Keep => self.keep(),
            Each(rule) if is_array => {
                for _ in 0..self.array()? {
                    self.value(*rule)?;
                }
                Ok(())
            }
            Keys(keys) if is_map => {
                for _ in 0..self.map()? {
                    self.pair(keys)?;
                }
                Ok(())
            }
            Shapes if is_array => self.shapes(),
            Arguments if is_array => {
                for index in 0..self.array()? {
                    let is_number = self.reader().i64().is_ok();
                    self.value(if index == 0 && is_number { Keep } else { Blank })?;
                }
                Ok(())
            }
            Blank | Each(_) | Keys(_) | Shapes | Arguments => self.blank(),
        }
    }

    /// One pair of a map.
    fn pair(&mut self, keys: &[(&[u8], Rule)]) -> Done {
        let key = self.reader().str_bytes().unwrap_or_default();
        let known = keys.iter().find(|(name, _)| *name == key);
        self.value(if known.is_some() { Keep } else { Blank })?;
        self.value(known.map_or(Blank, |(_, rule)| *rule))
    }

    /// Leaves a value as it is. One that is cut stays too, as far as it goes: these are ids and numbers.
    fn keep(&mut self) -> Done {
        let done = self.skip();
        if done.is_err_and(MsgpackError::is_truncated) {
            self.at = self.bytes.len();
        }
        done
    }

    fn shapes(&mut self) -> Done {
        let mut reader = self.reader();
        let count = reader.array()?;
        if count == 3 && reader.str_bytes().is_ok() {
            return self.tensor();
        }
        for _ in 0..self.array()? {
            if self.reader().array().is_ok() {
                self.tensor()?;
            } else {
                self.blank()?;
            }
        }
        Ok(())
    }

    fn tensor(&mut self) -> Done {
        let count = self.array()?;
        for index in 0..count {
            let is_shape = index == 1 && count == 3 && self.reader().array().is_ok();
            self.value(if is_shape { Keep } else { Blank })?;
        }
        Ok(())
    }

    /// Overwrites one value and all that it holds.
    fn blank(&mut self) -> Done {
        let mut left: u64 = 1;
        while left > 0 {
            left -= 1;
            let start = self.at;
            let first = self.reader().peek()?;
            match first {
                0x90..=0x9f | 0xdc | 0xdd => left += u64::from(self.array()?),
                0x80..=0x8f | 0xde | 0xdf => left += 2 * u64::from(self.map()?),
                _ => {
                    let done = self.skip();
                    if done.is_err() {
                        // A value that is cut, or no value: its header stays where that is whole.
                        let header = header_len(first).min(self.bytes.len().saturating_sub(start));
                        self.at = start + header;
                        return done;
                    }
                    self.overwrite(start, first);
                }
            }
        }
        Ok(())
    }

    /// Overwrites the scalar that lies between `start` and here.
    fn overwrite(&mut self, start: usize, first: u8) {
        let Some(value) = self.bytes.get_mut(start..self.at) else {
            return;
        };
        let (header, with) = match first {
            // Numbers that are their own marker: one of the same sign.
            0x00..=0x7f => return value.fill(0),
            0xe0..=0xff => return value.fill(0xff),
            0xa0..=0xbf | 0xd9..=0xdb => (header_len(first), b'x'),
            _ => (header_len(first), 0),
        };
        value.get_mut(header..).unwrap_or_default().fill(with);
    }
}

/// Bytes of a scalar that are no content: marker, length, type code.
fn header_len(first: u8) -> usize {
    match first {
        0xc4 | 0xd4..=0xd9 => 2,
        0xc5 | 0xc7 | 0xda => 3,
        0xc8 => 4,
        0xc6 | 0xdb => 5,
        0xc9 => 6,
        _ => 1,
    }
}
