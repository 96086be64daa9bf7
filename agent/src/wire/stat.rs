//! Stat events: what an orchestrator, or a script in its place, tells the agent on its Unix socket
//! (docs/stat-events.md). Bytes to typed events; the field names are those of vLLM-Omni's own statistics.
//!
//! A stream is either lines of JSON or frames of msgpack, told apart by its first byte: an opening brace, or the first
//! byte of a length, which is 0 as no event is that long.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Version of the events that this build reads.
pub const VERSION: u32 = 1;

/// Longest event in bytes, its line end or length not counted.
pub const MAX_EVENT: usize = 64 << 10;

/// Bytes of the length before an event of msgpack, most significant first.
pub const LENGTH: usize = 4;

/// Longest request id in bytes.
const MAX_ID: usize = 512;

/// Why an event can't be read.
#[derive(Debug, thiserror::Error)]
pub enum StatError {
    /// Not JSON, or a field of the wrong type.
    #[error("no stat event: {0}")]
    Json(#[from] serde_json::Error),
    /// Not msgpack, or a field of the wrong type.
    #[error("no stat event: {0}")]
    Msgpack(#[from] rmp_serde::decode::Error),
    /// Written for another version.
    #[error("stat event of version {0}, this build reads {VERSION}")]
    Version(u32),
    /// Longer than any event.
    #[error("stat event of {0} bytes, {MAX_EVENT} are the most")]
    TooLong(usize),
    /// An id that is no id.
    #[error("request id of {0} bytes")]
    Id(usize),
    /// No event of this version has such a name.
    #[error("stat event of an unknown kind")]
    Unknown,
}

/// How a stream is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// JSON, an event a line.
    Json,
    /// Msgpack maps, each behind its length.
    Msgpack,
}

impl Encoding {
    /// Told by the first byte of a stream; `None`: by none of them.
    #[must_use]
    pub fn of(first: u8) -> Option<Self> {
        match first {
            b'{' => Some(Self::Json),
            0 => Some(Self::Msgpack),
            _ => None,
        }
    }
}

/// The part that all events have.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Head {
    /// Version of the format: 1.
    #[schemars(range(min = 1, max = 1))]
    pub v: u32,
    /// When it happened, in seconds since the epoch; the time of its arrival where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub t: Option<f64>,
    /// A process of the pipeline that the event is about, by its id on the host. For senders that are not of a pipeline
    /// themselves; of those that are, it is not looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The model of the pipeline that the event is about, as in `model_name`. As `pid`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The pipeline was given a request.
    Added(Added),
    /// A stage was given a request.
    Dispatched(Dispatched),
    /// A stage is done with a request: the fields of `StageRequestStats`; those not listed here are not looked at.
    Stage(Box<StageStats>),
    /// Timings of a diffusion stage for a request. Those of one request and stage add up until its `stage` or `finished`
    /// event. Not needed where `stage` has `diffusion_metrics`.
    Diffusion(Box<Diffusion>),
    /// The last stage is done with a request: it succeeded.
    Finished(Finished),
    /// A request failed, or was given up.
    Failed(Failed),
    /// A stage handed a payload on.
    TransferSent(TransferSent),
    /// A stage took a payload.
    TransferReceived(TransferReceived),
    /// What a replica's scheduler has waiting.
    Scheduler(Scheduler),
    /// A replica is gone, and with it its snapshot.
    ReplicaGone(Place),
    /// A request waited for its KV data to be handed over.
    KvWait(KvWait),
    /// The first audio of a streamed response was sent. Once a request.
    FirstPacket(FirstPacket),
    /// Audio of a streamed response was sent. Not the header of a file format, nothing that is empty.
    Chunk(Chunk),
    /// A streamed response ended.
    StreamEnd(StreamEnd),
    /// Voice activity detection of realtime sessions: any of its fields.
    Vad(Vad),
    /// The sender had to drop events.
    Lost(Lost),
    /// A later version's.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// See [`Event::Added`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Added {
    /// The request.
    pub request_id: String,
    /// When it came in, in seconds since the epoch; `t` where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arrival: Option<f64>,
}

/// See [`Event::Dispatched`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Dispatched {
    /// The request.
    pub request_id: String,
    /// The stage.
    pub stage_id: u32,
    /// The replica that the request is bound to at this stage. Later events of the request need not name it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica_id: Option<u32>,
}

/// Kind of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum StageType {
    /// Autoregressive, and others of the LLM engine.
    Llm,
    /// Diffusion.
    Diffusion,
}

/// See [`Event::Stage`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StageStats {
    /// The request.
    pub request_id: String,
    /// The stage.
    pub stage_id: u32,
    /// Its replica.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica_id: Option<u32>,
    /// Tells apart the several results that a stage may give of one request; one that was told already is dropped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch_id: Option<u64>,
    /// What kind of stage it is; where absent, diffusion if there are `diffusion_metrics`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stage_type: Option<StageType>,
    /// Milliseconds from the stage being given the request to its finished output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stage_gen_time_ms: Option<f64>,
    /// Tokens of its prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_tokens_in: Option<u64>,
    /// Tokens that it generated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_tokens_out: Option<u64>,
    /// `audio`, `image`, `text` and so on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub final_output_type: Option<String>,
    /// Samples of one channel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub audio_generated_frames: Option<u64>,
    /// Hz; 24000 where absent or 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub audio_sample_rate: Option<u32>,
    /// `image` where the outputs are images.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_unit_type: Option<String>,
    /// Outputs, such as images.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_unit_count: Option<u64>,
    /// Pixels of an image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pixels: Option<u64>,
    /// Milliseconds from the stage being given the request to its first image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_time_to_first_output_ms: Option<f64>,
    /// Denoising steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_inference_steps: Option<u64>,
    /// Peak accelerator memory in MB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_memory_mb: Option<f64>,
    /// Timings of a diffusion stage, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diffusion_metrics: Option<DiffusionSeconds>,
    /// Timings of the orchestrator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pipeline_timings: Option<PipelineTimings>,
}

/// Timings of a diffusion stage in seconds. What was not measured is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DiffusionSeconds {
    /// From being queued to being scheduled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheduler_queue_wait_s: Option<f64>,
    /// Preparing inputs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preprocess_time_s: Option<f64>,
    /// Executing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diffusion_engine_exec_time_s: Option<f64>,
    /// Finishing the output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub postprocess_time_s: Option<f64>,
    /// Decoding by the VAE.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vae_decode_time_s: Option<f64>,
    /// Forward passes of the denoising loop.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forward_time_s: Option<f64>,
    /// Receiving and loading KV data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_recv_time_s: Option<f64>,
}

/// Timings of the orchestrator in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PipelineTimings {
    /// From the request coming in to the first stage being given it; 0 is a value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue_wait_ms: Option<f64>,
}

/// See [`Event::Diffusion`]. Times in milliseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Diffusion {
    /// The request.
    pub request_id: String,
    /// The stage.
    pub stage_id: u32,
    /// Its replica.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica_id: Option<u32>,
    /// From being queued to being scheduled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheduler_queue_wait_ms: Option<f64>,
    /// Preparing inputs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preprocess_time_ms: Option<f64>,
    /// Executing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diffusion_engine_exec_time_ms: Option<f64>,
    /// Finishing the output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub postprocess_time_ms: Option<f64>,
    /// Decoding by the VAE.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vae_decode_time_ms: Option<f64>,
    /// Forward passes of the denoising loop.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forward_time_ms: Option<f64>,
    /// Receiving and loading KV data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_recv_time_ms: Option<f64>,
}

impl Diffusion {
    /// The timings in seconds.
    #[must_use]
    pub fn seconds(&self) -> DiffusionSeconds {
        let seconds = |ms: Option<f64>| ms.map(|ms| ms / 1e3);
        DiffusionSeconds {
            scheduler_queue_wait_s: seconds(self.scheduler_queue_wait_ms),
            preprocess_time_s: seconds(self.preprocess_time_ms),
            diffusion_engine_exec_time_s: seconds(self.diffusion_engine_exec_time_ms),
            postprocess_time_s: seconds(self.postprocess_time_ms),
            vae_decode_time_s: seconds(self.vae_decode_time_ms),
            forward_time_s: seconds(self.forward_time_ms),
            kv_recv_time_s: seconds(self.kv_recv_time_ms),
        }
    }
}

/// See [`Event::Finished`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Finished {
    /// The request.
    pub request_id: String,
    /// `stop`, `length`, `abort`, `error` or `repetition`; `stop` where absent, `unknown` for others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finish_reason: Option<String>,
    /// Seconds from arrival to finish; from the arrival of `added` to `t` where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub e2e_s: Option<f64>,
    /// Prompt tokens of the first stage; those of its `stage` event where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_tokens: Option<u64>,
    /// Tokens of all stages; those of the `stage` events where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation_tokens: Option<u64>,
}

/// See [`Event::Failed`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Failed {
    /// The request.
    pub request_id: String,
    /// `client_abort`, `client_disconnect` or `stage_error`; `unknown` for others and where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// See [`Event::TransferSent`]. A replica that is not named is the one that the request is bound to.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TransferSent {
    /// The request; without it both replicas must be named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// The sender's stage.
    pub from_stage: u32,
    /// The receiver's stage.
    pub to_stage: u32,
    /// The sender's replica.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_replica: Option<u32>,
    /// The receiver's replica.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to_replica: Option<u32>,
    /// Size of the payload in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// Milliseconds that the sender took.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tx_time_ms: Option<f64>,
    /// Whether it went through shared memory. Taken and not served: no family has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_shm: Option<bool>,
}

/// See [`Event::TransferReceived`]. A replica that is not named is the one that the request is bound to.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TransferReceived {
    /// The request; without it both replicas must be named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// The sender's stage.
    pub from_stage: u32,
    /// The receiver's stage.
    pub to_stage: u32,
    /// The sender's replica.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_replica: Option<u32>,
    /// The receiver's replica.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to_replica: Option<u32>,
    /// Milliseconds that the receiver took.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rx_decode_time_ms: Option<f64>,
    /// Milliseconds from the sender being done to the receiver beginning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_flight_time_ms: Option<f64>,
}

/// A stage's replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Place {
    /// The stage.
    pub stage_id: u32,
    /// The replica.
    pub replica_id: u32,
}

/// See [`Event::Scheduler`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Scheduler {
    /// The stage.
    pub stage_id: u32,
    /// The replica.
    pub replica_id: u32,
    /// Requests that wait in its scheduler.
    pub num_waiting_reqs: u64,
}

/// See [`Event::KvWait`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct KvWait {
    /// The request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// The connector; `unknown` where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connector_type: Option<String>,
    /// Seconds.
    pub kv_wait_s: f64,
}

/// See [`Event::FirstPacket`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FirstPacket {
    /// The request; without it the sender itself takes care that its first packet is told once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// The audio stage.
    pub stage_id: u32,
    /// Its replica; the one that the request is bound to where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica_id: Option<u32>,
    /// Seconds from the request's arrival; from the arrival of `added` to `t` where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttfp_s: Option<f64>,
}

/// See [`Event::Chunk`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Chunk {
    /// The request.
    pub request_id: String,
    /// The audio stage.
    pub stage_id: u32,
    /// Its replica; the one that the request is bound to where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica_id: Option<u32>,
    /// Bytes of 16-bit PCM, all channels.
    pub bytes: u64,
    /// Hz; 24000 where absent or 0. That of the first chunk counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample_rate: Option<u32>,
    /// Channels; 1 where absent. That of the first chunk counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channels: Option<u32>,
}

/// See [`Event::StreamEnd`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StreamEnd {
    /// The request; without it `underrun_s` is all that is known of its chunks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// `completed`, or why not: `cancelled`, `closed`, `engine_dead`, `error`. Others count as `error`.
    pub outcome: String,
    /// A response of the speech endpoints: those alone have the `speech_stream_*` families.
    #[serde(default)]
    pub speech: bool,
    /// The audio stage, where no chunks were told of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stage_id: Option<u32>,
    /// Its replica.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica_id: Option<u32>,
    /// Longest playback gap in seconds, where the sender has worked it out; else it comes from the chunks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub underrun_s: Option<f64>,
}

/// See [`Event::Vad`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Vad {
    /// Sessions of this sender that are open now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active_sessions: Option<u64>,
    /// Milliseconds of one inference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inference_ms: Option<f64>,
    /// Milliseconds from the end of speech to its detection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint_delay_ms: Option<f64>,
    /// A failure, by a short name. The first 16 names of a pipeline are label values; others are `unknown`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// See [`Event::Lost`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Lost {
    /// Events that were dropped since the last such event.
    pub events: u64,
}

impl Event {
    /// Its name, which is the value of `event`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Added(_) => "added",
            Self::Dispatched(_) => "dispatched",
            Self::Stage(_) => "stage",
            Self::Diffusion(_) => "diffusion",
            Self::Finished(_) => "finished",
            Self::Failed(_) => "failed",
            Self::TransferSent(_) => "transfer_sent",
            Self::TransferReceived(_) => "transfer_received",
            Self::Scheduler(_) => "scheduler",
            Self::ReplicaGone(_) => "replica_gone",
            Self::KvWait(_) => "kv_wait",
            Self::FirstPacket(_) => "first_packet",
            Self::Chunk(_) => "chunk",
            Self::StreamEnd(_) => "stream_end",
            Self::Vad(_) => "vad",
            Self::Lost(_) => "lost",
            Self::Unknown => "unknown",
        }
    }

    fn request_id(&self) -> Option<&str> {
        let id = match self {
            Self::Added(event) => &event.request_id,
            Self::Dispatched(event) => &event.request_id,
            Self::Stage(event) => &event.request_id,
            Self::Diffusion(event) => &event.request_id,
            Self::Finished(event) => &event.request_id,
            Self::Failed(event) => &event.request_id,
            Self::Chunk(event) => &event.request_id,
            Self::TransferSent(event) => return event.request_id.as_deref(),
            Self::TransferReceived(event) => return event.request_id.as_deref(),
            Self::KvWait(event) => return event.request_id.as_deref(),
            Self::FirstPacket(event) => return event.request_id.as_deref(),
            Self::StreamEnd(event) => return event.request_id.as_deref(),
            Self::Scheduler(_) | Self::ReplicaGone(_) | Self::Vad(_) | Self::Lost(_) | Self::Unknown => {
                return None;
            }
        };
        Some(id)
    }
}

/// The whole events at the start of bytes, and what follows them.
#[derive(Clone, Debug)]
pub struct Whole<'a> {
    encoding: Encoding,
    rest: &'a [u8],
}

impl<'a> Whole<'a> {
    /// `bytes` begins with an event.
    #[must_use]
    pub fn new(encoding: Encoding, bytes: &'a [u8]) -> Self {
        Self {
            encoding,
            rest: bytes,
        }
    }

    /// What follows the last event that was taken.
    #[must_use]
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }
}

impl<'a> Iterator for Whole<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        loop {
            let (event, rest) = match self.encoding {
                Encoding::Json => {
                    let end = self.rest.iter().position(|byte| *byte == b'\n')?;
                    let (event, rest) = self.rest.split_at_checked(end)?;
                    (event, rest.get(1..)?)
                }
                Encoding::Msgpack => {
                    let (length, rest) = self.rest.split_first_chunk::<LENGTH>()?;
                    rest.split_at_checked(usize::try_from(u32::from_be_bytes(*length)).ok()?)?
                }
            };
            self.rest = rest;
            // An empty line is no event.
            if self.encoding == Encoding::Msgpack || !event.trim_ascii().is_empty() {
                return Some(event);
            }
        }
    }
}

/// Reads one event.
pub fn decode(bytes: &[u8], encoding: Encoding) -> Result<(Head, Event), StatError> {
    if bytes.len() > MAX_EVENT {
        return Err(StatError::TooLong(bytes.len()));
    }
    // The head first and alone: an event of another version may have any form behind it.
    let head: Head = match encoding {
        Encoding::Json => serde_json::from_slice(bytes)?,
        Encoding::Msgpack => rmp_serde::from_slice(bytes)?,
    };
    if head.v != VERSION {
        return Err(StatError::Version(head.v));
    }
    let event: Event = match encoding {
        Encoding::Json => serde_json::from_slice(bytes)?,
        Encoding::Msgpack => rmp_serde::from_slice(bytes)?,
    };
    if event == Event::Unknown {
        return Err(StatError::Unknown);
    }
    if let Some(id) = event.request_id()
        && (id.is_empty() || id.len() > MAX_ID)
    {
        return Err(StatError::Id(id.len()));
    }
    Ok((head, event))
}

/// The JSON schema of an event, as docs/stat-events.schema.json.
#[must_use]
pub fn schema() -> String {
    #[derive(JsonSchema)]
    #[expect(dead_code, reason = "its form alone is of use")]
    #[schemars(title = "omnitap stat event")]
    struct StatEvent {
        #[serde(flatten)]
        head: Head,
        #[serde(flatten)]
        event: Event,
    }
    let schema = schemars::schema_for!(StatEvent);
    serde_json::to_string_pretty(&schema).unwrap_or_default() + "\n"
}
