//! Typed messages of an engine's sockets, borrowed from the frame (docs/wire.md section "Engine sockets").
//!
//! Times are in seconds as on the wire: `timestamp` fields are `CLOCK_MONOTONIC` of the engine, `arrival` is
//! wall clock.

use super::{control::Control, diffusion::Diffusion};

/// A decoded payload frame.
#[derive(Clone, Debug, PartialEq)]
pub enum Message<'a> {
    /// Engine -> API: outputs of one step, and statistics.
    Outputs(EngineOutputs<'a>),
    /// API -> engine: a new request, or a further segment of a resumable one.
    Add(Add<'a>),
    /// API -> engine: these requests are to be aborted.
    Abort(Vec<&'a str>),
    /// API -> engine: a call such as `sleep` or `wake_up`.
    Utility(Utility<'a>),
    /// API -> engine: start of a data-parallel wave.
    StartDpWave,
    /// Engine -> API, first message on the input socket.
    Ready(Ready<'a>),
    /// Start-up handshake, either direction (HELLO, addresses, READY).
    Handshake,
    /// Engine -> API: the engine core or the diffusion stage has died (`ENGINE_CORE_DEAD`, `DIFFUSION_PROC_DEAD`).
    EngineDead,
    /// API -> diffusion stage and back.
    Diffusion(Diffusion<'a>),
    /// Stage -> stage: a connector arranges a transfer.
    Connector {
        /// What it says.
        control: Control<'a>,
        /// To whom, for answers: the number that libzmq gave the receiver's socket.
        peer: Option<u32>,
    },
}

/// `EngineCoreOutputs`: one message of an engine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineOutputs<'a> {
    /// Data-parallel rank inside the replica.
    pub engine_index: u32,
    /// One element for each request that produced something in this step.
    pub outputs: Vec<Output<'a>>,
    /// Scheduler snapshot; absent with log stats off, and between emissions.
    pub stats: Option<SchedulerStats<'a>>,
    /// `CLOCK_MONOTONIC` of the engine in seconds; `None` when the frame was cut before it and no tail gave
    /// it.
    pub timestamp: Option<f64>,
    /// Ids that the engine reports as finished for good.
    pub finished_requests: Vec<&'a str>,
    /// The reply to a utility call, where this is one.
    pub is_utility_reply: bool,
    /// Outputs that were announced but lie in the part that was not captured.
    pub outputs_lost: u32,
}

/// `EngineCoreOutput`: what one request got in one step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Output<'a> {
    /// Internal request id, the same at every stage.
    pub request_id: &'a str,
    /// Number of new token ids.
    pub new_tokens: u32,
    /// Set in the last output of a request.
    pub finish_reason: Option<FinishReason>,
    /// QUEUED, SCHEDULED and PREEMPTED events since the last output (log stats on).
    pub events: Events,
    /// Completed wait for a KV transfer.
    pub kv_wait: Option<KvWait<'a>>,
    /// Prompt accounting, in the first output of a request.
    pub prefill: Option<PrefillStats>,
    /// `num_nans_in_logits`.
    pub nans_in_logits: u32,
    /// Audio in this output, by shape alone.
    pub audio: Option<Audio>,
    /// `is_segment_finished`: a streamed input segment ended, the request may go on.
    pub segment_finished: bool,
    /// Cumulative token count where the native runner suppresses token ids.
    pub num_generation_tokens: Option<u32>,
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FinishReason {
    /// A stop string or end token.
    Stop,
    /// The token limit.
    Length,
    /// Aborted by the client or the server.
    Abort,
    /// A failure inside the engine.
    Error,
    /// Repetition was detected.
    Repetition,
}

impl FinishReason {
    /// All of them, in wire order (0..=4).
    pub const ALL: [Self; 5] = [
        Self::Stop,
        Self::Length,
        Self::Abort,
        Self::Error,
        Self::Repetition,
    ];

    /// The label value.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Error => "error",
            Self::Repetition => "repetition",
        }
    }
}

/// Request events of one output, folded: engine `CLOCK_MONOTONIC` seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Events {
    /// The (last) QUEUED event.
    pub queued: Option<f64>,
    /// The first SCHEDULED event.
    pub scheduled: Option<f64>,
    /// Number of PREEMPTED events.
    pub preemptions: u32,
}

/// `kv_transfer_params` with a finished wait.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvWait<'a> {
    /// Seconds; negative values are the sender's fault and are dropped downstream.
    pub seconds: f64,
    /// Connector backend, the label `connector_type`.
    pub connector_type: &'a str,
}

/// Prompt accounting of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefillStats {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens computed here.
    pub computed_tokens: u32,
    /// Tokens taken from any cache.
    pub cached_tokens: u32,
    /// Thereof from the local prefix cache.
    pub local_cached_tokens: u32,
    /// Thereof from an external KV store.
    pub external_cached_tokens: u32,
}

/// Audio tensors of one output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Audio {
    /// Samples in a channel: last dimension of the tensor's shape.
    pub frames: u64,
    /// Sample rate in Hz, where the output carries it.
    pub sample_rate: Option<u32>,
}

/// `SchedulerStats`: gauges at this moment, counters since the last emission.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SchedulerStats<'a> {
    /// Requests in the running batch.
    pub running: u64,
    /// Requests waiting for capacity.
    pub waiting: u64,
    /// Requests deferred (skipped) in the queue; `None` before vLLM 0.20, where `waiting` is all of them.
    pub skipped_waiting: Option<u64>,
    /// KV-cache usage, 0 to 1.
    pub kv_cache_usage: f64,
    /// Prefix cache since the last emission.
    pub prefix_cache: Option<CacheStats>,
    /// KV-connector (external) prefix cache since the last emission.
    pub external_prefix_cache: Option<CacheStats>,
    /// Evicted KV blocks with residency times in seconds.
    pub kv_evictions: Vec<KvEviction>,
    /// Speculative decoding since the last emission.
    pub spec_decode: Option<SpecDecode>,
    /// Adapters of waiting requests, with the number of requests of each.
    pub waiting_lora: Vec<&'a str>,
    /// Adapters of running requests.
    pub running_lora: Vec<&'a str>,
    /// MFU estimates since the last emission.
    pub perf: Option<PerfStats>,
}

/// Prefix-cache counters, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Tokens looked up.
    pub queries: u64,
    /// Tokens found.
    pub hits: u64,
}

/// One evicted KV block.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KvEviction {
    /// Allocation to eviction.
    pub lifetime_s: f64,
    /// Last access to eviction.
    pub idle_s: f64,
    /// Gaps between accesses.
    pub reuse_gaps_s: Vec<f64>,
}

/// Speculative decoding counters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecDecode {
    /// Drafts.
    pub drafts: u64,
    /// Proposed tokens.
    pub draft_tokens: u64,
    /// Accepted tokens.
    pub accepted_tokens: u64,
    /// Accepted tokens by position.
    pub accepted_per_position: Vec<u64>,
}

/// MFU estimates, per GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PerfStats {
    /// Floating-point operations.
    pub flops: f64,
    /// Bytes read.
    pub read_bytes: f64,
    /// Bytes written.
    pub write_bytes: f64,
}

/// `EngineCoreRequest`: what one stage is given.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Add<'a> {
    /// Internal request id.
    pub request_id: &'a str,
    /// Bytes of the payload part; tensors and arrays may follow in parts of their own.
    pub size: u64,
    /// Number of prompt token ids; `None` when the prompt comes as embeddings.
    pub prompt_tokens: Option<u32>,
    /// Wall clock, seconds since the epoch.
    pub arrival: Option<f64>,
    /// `sampling_params.max_tokens`; absent on the wire means the default of 16.
    pub max_tokens: Option<u32>,
    /// `sampling_params.n`; 1 where absent.
    pub n: u32,
    /// Which of several API workers gets the answer.
    pub client_index: Option<u32>,
    /// More segments of the same request will follow.
    pub resumable: bool,
    /// The id that the client of the API knows, where the request carries it.
    pub external_req_id: Option<&'a str>,
    /// A pooling request (no sampling parameters).
    pub is_pooling: bool,
    /// `sampling_params.output_kind`; absent on the wire means cumulative.
    pub output_kind: OutputKind,
    /// `sampling_params.stop` is not empty: the API process may end the request with an abort of its own.
    pub has_stop_strings: bool,
}

/// How the API process wants its outputs (`RequestOutputKind` of vLLM: 0, 1, 2). The API server asks for
/// deltas exactly where it streams the response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OutputKind {
    /// Everything so far in each output.
    #[default]
    Cumulative,
    /// Only what is new.
    Delta,
    /// One output at the end.
    FinalOnly,
}

/// A call to the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Utility<'a> {
    /// Method name.
    pub method: &'a str,
    /// The first argument where it is an integer (`sleep` level).
    pub level: Option<i64>,
}

/// `EngineCoreReadyResponse`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ready<'a> {
    /// Longest sequence in tokens: decides token buckets.
    pub max_model_len: Option<u32>,
    /// Exact version of the engine (vLLM 0.23 and newer).
    pub vllm_version: Option<&'a str>,
}
