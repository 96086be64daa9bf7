//! The catalogue: every family that omnitap serves, one table.
//!
//! Names, types, labels and buckets are those of vLLM-Omni 0.30.0 and vLLM 0.30.0 (docs/wire.md section "Metric
//! catalogue"); the two exceptions are marked at their rows. The `omnitap_*` families are the agent's own.

use std::{fmt::Write as _, sync::LazyLock};

use super::number;

/// How the values of several scopes with equal labels become one gauge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fold {
    /// Amounts: two pipelines that serve the same model name are one service.
    Sum,
    /// Ratios, states and peaks: a sum would mean nothing, and the larger value is the one to act on.
    Max,
    /// Information: each scope has one child at a time, the newest replaces the one before.
    Newest,
}

/// The type of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows. The name ends in `_total`.
    Counter,
    /// Goes up and down.
    Gauge(Fold),
    /// Counts by upper bound, their sum and their number.
    Histogram(Buckets),
}

impl Kind {
    /// As in a TYPE line.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge(_) => "gauge",
            Self::Histogram(_) => "histogram",
        }
    }

    /// The bucket set, for histograms.
    #[must_use]
    pub fn buckets(self) -> Option<Buckets> {
        match self {
            Self::Histogram(buckets) => Some(buckets),
            Self::Counter | Self::Gauge(_) => None,
        }
    }
}

/// Where a family's values come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// Frames between the API server and its stages, seen at `zmq_msg_send`.
    Wire,
    /// Connector payloads between stages: shared memory and transfer engines.
    Transfer,
    /// Result frames of diffusion stages.
    Diffusion,
    /// The API server's own HTTP traffic.
    Http,
    /// Events that the orchestrator pushes to omnitap's Unix socket.
    StatSocket,
    /// The engine's own `/metrics`.
    Engine,
    /// NVIDIA's management library on this host.
    Nvml,
    /// omnitap itself.
    Own,
}

impl Source {
    /// All of them, in the order of their docs.
    pub const ALL: [Self; 8] = [
        Self::Wire,
        Self::Transfer,
        Self::Diffusion,
        Self::Http,
        Self::StatSocket,
        Self::Engine,
        Self::Nvml,
        Self::Own,
    ];

    /// Short name, as in `omnitap families` and in the label `source`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Wire => "wire",
            Self::Transfer => "transfer",
            Self::Diffusion => "diffusion",
            Self::Http => "http",
            Self::StatSocket => "stat_socket",
            Self::Engine => "engine",
            Self::Nvml => "nvml",
            Self::Own => "self",
        }
    }

    /// One phrase for HELP lines and docs.
    #[must_use]
    pub fn describe(self) -> &'static str {
        match self {
            Self::Wire => "frames between the API server and its stages",
            Self::Transfer => "connector payloads between stages",
            Self::Diffusion => "result frames of diffusion stages",
            Self::Http => "HTTP traffic of the API server",
            Self::StatSocket => "events that the orchestrator pushes to the agent",
            Self::Engine => "the engine's own metrics endpoint",
            Self::Nvml => "NVIDIA's management library (NVML)",
            Self::Own => "the agent itself",
        }
    }
}

/// What a family needs of the pipeline before it can have samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// Nothing: log stats may be off.
    Nothing,
    /// The engine's log stats.
    LogStats,
    /// Log stats, and an engine feature that is off by default.
    Feature,
}

impl Needs {
    /// For docs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Nothing => "",
            Self::LogStats => "log stats",
            Self::Feature => "its engine feature",
        }
    }
}

/// A bucket set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Buckets {
    /// 50 ms to 5 min.
    Seconds,
    /// 1 ms to 1 min.
    SecondsFast,
    /// Real-time factor, dense around 1.
    Rtf,
    /// 1 KiB to 256 MiB.
    Bytes,
    /// 0.3 s to 2 h.
    RequestLatency,
    /// Time to first token.
    Ttft,
    /// Time between tokens.
    InterToken,
    /// Tokens of one engine step.
    IterationTokens,
    /// Preemptions of one request.
    Preemptions,
    /// `n` of a request.
    ParamsN,
    /// Life of a KV block.
    KvResidency,
    /// Tokens of one request: 1-2-5 up to the longest sequence that the model takes.
    Tokens,
    /// Denoising steps: the values that samplers are run with, from distilled models to full ones.
    Steps,
    /// Pixels of an image: 256 x 256 to 4096 x 4096.
    Pixels,
    /// One scrape of omnitap.
    Scrape,
}

/// Where the longest sequence is unknown, token buckets end here.
const TOKENS_WITHOUT_LIMIT: u32 = 1_000_000;

impl Buckets {
    /// All of them, in the order of their docs.
    pub const ALL: [Self; 15] = [
        Self::Seconds,
        Self::SecondsFast,
        Self::Rtf,
        Self::Bytes,
        Self::RequestLatency,
        Self::Ttft,
        Self::InterToken,
        Self::IterationTokens,
        Self::Preemptions,
        Self::ParamsN,
        Self::KvResidency,
        Self::Tokens,
        Self::Steps,
        Self::Pixels,
        Self::Scrape,
    ];

    /// Name in `omnitap families` and docs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Seconds => "SECONDS",
            Self::SecondsFast => "SECONDS_FAST",
            Self::Rtf => "RTF",
            Self::Bytes => "BYTES",
            Self::RequestLatency => "REQUEST_LATENCY",
            Self::Ttft => "TTFT",
            Self::InterToken => "INTER_TOKEN",
            Self::IterationTokens => "ITERATION_TOKENS",
            Self::Preemptions => "PREEMPTIONS",
            Self::ParamsN => "PARAMS_N",
            Self::KvResidency => "KV_RESIDENCY",
            Self::Tokens => "TOKENS(max_model_len)",
            Self::Steps => "STEPS",
            Self::Pixels => "PIXELS",
            Self::Scrape => "SCRAPE",
        }
    }

    /// Upper bounds without `+Inf`, ascending; the unit is the family's. `max_model_len` (tokens) cuts
    /// [`Buckets::Tokens`] and nothing else: the bounds that do not exceed it.
    #[must_use]
    pub fn bounds(self, max_model_len: Option<u32>) -> &'static [f64] {
        let all = self.all_bounds();
        if self == Self::Tokens {
            let limit = f64::from(max_model_len.unwrap_or(TOKENS_WITHOUT_LIMIT));
            return all.get(..all.partition_point(|b| *b <= limit)).unwrap_or(all);
        }
        all
    }

    /// The bounds as `le` values, in the order of [`Buckets::bounds`] without a limit.
    pub(crate) fn le(self) -> &'static [String] {
        static LE: LazyLock<Vec<Vec<String>>> = LazyLock::new(|| {
            Buckets::ALL
                .iter()
                .map(|b| b.all_bounds().iter().map(|v| number::to_string(*v)).collect())
                .collect()
        });
        LE.get(self as usize).map_or(&[], Vec::as_slice)
    }

    fn all_bounds(self) -> &'static [f64] {
        match self {
            Self::Seconds => &[
                0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0,
            ],
            Self::SecondsFast => &[
                0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0,
            ],
            Self::Rtf => &[0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.25, 1.5, 2.0, 5.0, 10.0],
            Self::Bytes => &[
                1024.0,
                4096.0,
                16_384.0,
                65_536.0,
                262_144.0,
                1_048_576.0,
                4_194_304.0,
                16_777_216.0,
                67_108_864.0,
                268_435_456.0,
            ],
            Self::RequestLatency => &[
                0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
                240.0, 480.0, 960.0, 1920.0, 7680.0,
            ],
            Self::Ttft => &[
                0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
                20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
            ],
            Self::InterToken => &[
                0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
                20.0, 40.0, 80.0,
            ],
            Self::IterationTokens => &[
                1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16_384.0,
            ],
            Self::Preemptions => &[1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0],
            Self::ParamsN => &[1.0, 2.0, 5.0, 10.0, 20.0],
            Self::KvResidency => &[
                0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0,
                120.0, 300.0, 600.0, 1200.0, 1800.0,
            ],
            Self::Tokens => &[
                1.0, 2.0, 5.0, 1e1, 2e1, 5e1, 1e2, 2e2, 5e2, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5,
                1e6, 2e6, 5e6, 1e7, 2e7, 5e7, 1e8, 2e8, 5e8, 1e9, 2e9,
            ],
            Self::Steps => &[
                1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 15.0, 20.0, 25.0, 30.0, 40.0, 50.0, 75.0, 100.0, 200.0,
            ],
            Self::Pixels => &[
                65_536.0,
                147_456.0,
                262_144.0,
                409_600.0,
                589_824.0,
                921_600.0,
                1_048_576.0,
                1_572_864.0,
                2_097_152.0,
                4_194_304.0,
                8_388_608.0,
                16_777_216.0,
            ],
            Self::Scrape => &[
                0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0,
            ],
        }
    }
}

/// A row of the catalogue.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Whose row this is.
    pub family: Family,
    /// Name as exposed.
    pub name: &'static str,
    /// Type, with the bucket set of a histogram and the rule of a gauge.
    pub kind: Kind,
    /// Label names in the documented order (the exposition sorts them).
    pub labels: &'static [&'static str],
    /// Where the values come from.
    pub source: Source,
    /// What the pipeline must have on.
    pub needs: Needs,
    /// What is measured, in one or two plain sentences.
    pub help: &'static str,
}

impl Row {
    /// The labels whose values are not those of a scope, in the order that [`crate::pipeline::sink::Sink::extra`]
    /// takes their values. Own families have no scope: all their labels are here.
    pub fn extra_labels(&self) -> impl Iterator<Item = &'static str> {
        let own = self.is_own();
        self.labels
            .iter()
            .copied()
            .filter(move |l| own || !matches!(*l, "model_name" | "stage" | "replica"))
    }

    /// Whether the family is omnitap's own, and not one of the engines'.
    #[must_use]
    pub fn is_own(&self) -> bool {
        self.name.starts_with("omnitap_")
    }

    /// Whether `model_name` is the served model name (`vllm:*`) and not the model argument (`vllm_omni:*`).
    #[must_use]
    pub fn uses_served_model(&self) -> bool {
        self.name.starts_with("vllm:")
    }
}

const MODEL: &[&str] = &["model_name"];
const STAGE: &[&str] = &["model_name", "stage"];
const REPLICA: &[&str] = &["model_name", "stage", "replica"];
const GPU: &[&str] = &["index", "mig", "uuid", "model_name", "stage", "replica"];
const EDGE: &[&str] = &[
    "model_name",
    "from_stage",
    "from_replica",
    "to_stage",
    "to_replica",
];

/// Declares [`Family`] and its table together, so that neither can lack a row of the other.
macro_rules! families {
    ($($family:ident $name:literal $kind:expr, $labels:expr, $source:ident, $needs:ident, $help:literal;)*) => {
        /// A family of `/metrics`. The order is the order of exposition.
        #[expect(clippy::doc_markdown, reason = "the docs are the HELP texts, which are plain words")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum Family {
            $(#[doc = $help] $family,)*
        }

        impl Family {
            /// Every family, in the order of exposition.
            pub const ALL: &'static [Self] = &[$(Self::$family),*];
        }

        static TABLE: &[Row] = &[$(Row {
            family: Family::$family,
            name: $name,
            kind: $kind,
            labels: $labels,
            source: Source::$source,
            needs: Needs::$needs,
            help: $help,
        }),*];
    };
}

use self::{
    Buckets::{
        Bytes, InterToken, IterationTokens, KvResidency, ParamsN, Pixels, Preemptions, RequestLatency, Rtf,
        Scrape, Seconds, SecondsFast, Steps, Tokens, Ttft,
    },
    Fold::{Max, Newest, Sum},
    Kind::{Counter, Gauge, Histogram},
};

families! {
    OmniAudioContinuityOkTotal "vllm_omni:audio_continuity_ok_total"
        Counter, &["model_name", "stage", "replica", "threshold_ms"], Http, Nothing,
        "Audio requests whose longest simulated playback gap stayed within threshold_ms.";
    OmniAudioDurationS "vllm_omni:audio_duration_s"
        Histogram(Seconds), REPLICA, Wire, Nothing,
        "Length of the generated audio of a request in seconds: frames divided by the sample rate.";
    OmniAudioFramesTotal "vllm_omni:audio_frames_total"
        Counter, REPLICA, Wire, Nothing,
        "Audio frames (samples of one channel) generated.";
    OmniAudioRtf "vllm_omni:audio_rtf"
        Histogram(Rtf), REPLICA, Wire, Nothing,
        "Real-time factor of a request: generation time of its audio stage divided by the audio's length; \
         below 1 is faster than playback.";
    OmniAudioSkippedRequestsTotal "vllm_omni:audio_skipped_requests_total"
        Counter, &["model_name", "stage", "replica", "reason"], Wire, Nothing,
        "Requests that an audio stage finished without any audio.";
    OmniAudioTtfpS "vllm_omni:audio_ttfp_s"
        Histogram(Seconds), REPLICA, Http, Nothing,
        "Seconds from a request's arrival to its first non-empty audio packet, of streamed answers.";
    OmniAudioUnderrunS "vllm_omni:audio_underrun_s"
        Histogram(SecondsFast), REPLICA, Http, Nothing,
        "Longest playback deficit of a request in seconds, for a player that starts with the first packet; \
         0 when it never ran dry.";
    OmniDenoiseStepLatencyS "vllm_omni:denoise_step_latency_s"
        Histogram(SecondsFast), REPLICA, Diffusion, Feature,
        "Mean seconds of one denoising step of an image request, forward passes only.";
    OmniDiffusionExecPerStepS "vllm_omni:diffusion_exec_per_step_s"
        Histogram(SecondsFast), REPLICA, Diffusion, Nothing,
        "Execution seconds of a diffusion request divided by its denoising steps.";
    OmniDiffusionExecS "vllm_omni:diffusion_exec_s"
        Histogram(Seconds), REPLICA, Diffusion, Nothing,
        "Execution seconds of a diffusion request as its engine reports them.";
    OmniDiffusionForwardS "vllm_omni:diffusion_forward_s"
        Histogram(Seconds), REPLICA, Diffusion, Feature,
        "Seconds that a diffusion request spent in the forward passes of its denoising loop.";
    OmniDiffusionKvLoadS "vllm_omni:diffusion_kv_load_s"
        Histogram(SecondsFast), REPLICA, Diffusion, Nothing,
        "Seconds that a diffusion stage took to receive and load KV data of an earlier stage.";
    OmniDiffusionPostprocessS "vllm_omni:diffusion_postprocess_s"
        Histogram(SecondsFast), REPLICA, Diffusion, Nothing,
        "Seconds from raw diffusion output to the finished result.";
    OmniDiffusionPreprocessS "vllm_omni:diffusion_preprocess_s"
        Histogram(SecondsFast), REPLICA, Diffusion, Nothing,
        "Seconds that a diffusion stage took to prepare its inputs.";
    OmniE2eRequestLatencyS "vllm_omni:e2e_request_latency_s"
        Histogram(Seconds), MODEL, Wire, Nothing,
        "Seconds from a request's arrival to the finish of its last stage.";
    OmniGenerationTokensTotal "vllm_omni:generation_tokens_total"
        Counter, MODEL, Wire, Nothing,
        "Tokens generated by all stages of the pipeline.";
    OmniImageCountTotal "vllm_omni:image_count_total"
        Counter, MODEL, Diffusion, Nothing,
        "Images generated.";
    // Upstream leaves the client library's default buckets, which end at 10: every image lands in +Inf.
    OmniImagePixels "vllm_omni:image_pixels"
        Histogram(Pixels), MODEL, Diffusion, Nothing,
        "Width times height of the images of a request, added up, in pixels.";
    OmniImageTtfpS "vllm_omni:image_ttfp_s"
        Histogram(Seconds), REPLICA, Diffusion, Nothing,
        "Seconds from an image stage being given a request to its first output with an image.";
    OmniKvWaitS "vllm_omni:kv_wait_s"
        Histogram(Seconds), &["model_name", "connector_type"], Wire, Nothing,
        "Seconds that a finished request waited until its KV data had been handed over.";
    // As with image_pixels, the default buckets would end at 10 steps.
    OmniNumInferenceSteps "vllm_omni:num_inference_steps"
        Histogram(Steps), MODEL, Diffusion, Nothing,
        "Denoising steps of a diffusion request.";
    OmniNumRequestsRunning "vllm_omni:num_requests_running"
        Gauge(Sum), MODEL, Wire, Nothing,
        "Requests in the pipeline that no scheduler reports as waiting.";
    OmniNumRequestsWaiting "vllm_omni:num_requests_waiting"
        Gauge(Sum), MODEL, Wire, Nothing,
        "Requests in the pipeline that a scheduler reports as waiting, and those that no stage was given yet.";
    OmniPeakMemoryMb "vllm_omni:peak_memory_mb"
        Gauge(Max), STAGE, Diffusion, Nothing,
        "Peak accelerator memory of a stage in MB (2^20 bytes) on one GPU, as its engine reports it, else as NVML shows \
         it for the stage's processes (omnitap_peak_memory_source says which); several replicas: the highest.";
    OmniPromptTokensTotal "vllm_omni:prompt_tokens_total"
        Counter, MODEL, Wire, Nothing,
        "Prompt tokens of the pipeline's first stage.";
    OmniRealtimeVadActiveSessions "vllm_omni:realtime_vad_active_sessions"
        Gauge(Sum), MODEL, StatSocket, Feature,
        "Realtime sessions with voice activity detection that are open.";
    OmniRealtimeVadEndpointDelayS "vllm_omni:realtime_vad_endpoint_delay_s"
        Histogram(SecondsFast), MODEL, StatSocket, Feature,
        "Seconds from the end of speech to its detection.";
    OmniRealtimeVadErrorsTotal "vllm_omni:realtime_vad_errors_total"
        Counter, &["model_name", "reason"], StatSocket, Feature,
        "Failures of voice activity detection.";
    OmniRealtimeVadInferenceLatencyS "vllm_omni:realtime_vad_inference_latency_s"
        Histogram(SecondsFast), MODEL, StatSocket, Feature,
        "Seconds of one inference of the voice activity detector.";
    OmniRequestQueueWaitS "vllm_omni:request_queue_wait_s"
        Histogram(Seconds), MODEL, Http, Nothing,
        "Seconds that a request waited for the orchestrator, as answers with images tell it; a measured 0 counts.";
    OmniRequestsFailedTotal "vllm_omni:requests_failed_total"
        Counter, &["model_name", "reason"], Wire, Nothing,
        "Requests that failed, by reason.";
    OmniRequestsSuccessTotal "vllm_omni:requests_success_total"
        Counter, &["model_name", "finished_reason"], Wire, Nothing,
        "Requests that ended, by the finish reason of their last stage; aborted ones count here as abort.";
    OmniSpeechStreamAbortedTotal "vllm_omni:speech_stream_aborted_total"
        Counter, &["model_name", "reason"], Http, Nothing,
        "Speech streams that were cut off, by reason.";
    OmniSpeechStreamCompletedTotal "vllm_omni:speech_stream_completed_total"
        Counter, MODEL, Http, Nothing,
        "Speech streams that were sent to their end.";
    OmniStageGenTimeS "vllm_omni:stage_gen_time_s"
        Histogram(Seconds), &["model_name", "stage", "stage_type"], Wire, Nothing,
        "Seconds from a stage being given a request to its finished output, time in the stage's queue included.";
    OmniStageInQueueS "vllm_omni:stage_in_queue_s"
        Histogram(SecondsFast), STAGE, Diffusion, Nothing,
        "Seconds that a request waited in a diffusion stage's scheduler; a measured 0 counts.";
    OmniStageWaitingRequests "vllm_omni:stage_waiting_requests"
        Gauge(Sum), STAGE, Wire, LogStats,
        "Requests waiting in the schedulers of a stage, all its live replicas together.";
    OmniTransferInFlightS "vllm_omni:transfer_in_flight_s"
        Histogram(SecondsFast), EDGE, Transfer, Nothing,
        "Seconds from the sender having handed over a payload to the receiver starting to take it, on one host.";
    OmniTransferRxS "vllm_omni:transfer_rx_s"
        Histogram(SecondsFast), EDGE, Transfer, Nothing,
        "Seconds that the receiving stage spent on taking a payload.";
    OmniTransferSizeBytes "vllm_omni:transfer_size_bytes"
        Histogram(Bytes), EDGE, Transfer, Nothing,
        "Size of a payload between two stages, in bytes.";
    OmniTransferTxS "vllm_omni:transfer_tx_s"
        Histogram(SecondsFast), EDGE, Transfer, Nothing,
        "Seconds that the sending stage spent on handing over a payload.";
    OmniVaeDecodeS "vllm_omni:vae_decode_s"
        Histogram(Seconds), REPLICA, Diffusion, Feature,
        "Seconds of VAE decoding of a diffusion request.";

    VllmCorruptedRequestsTotal "vllm:corrupted_requests_total"
        Counter, REPLICA, Wire, Feature,
        "Requests with NaN values in their logits.";
    VllmE2eRequestLatencySeconds "vllm:e2e_request_latency_seconds"
        Histogram(RequestLatency), REPLICA, Wire, Nothing,
        "Seconds from a request's arrival at the stage to its last output.";
    VllmEngineSleepState "vllm:engine_sleep_state"
        Gauge(Max), &["model_name", "stage", "replica", "sleep_state"], Wire, Nothing,
        "1 for the engine's present sleep state, 0 for the others; moved by sleep and wake-up calls.";
    VllmEstimatedFlopsPerGpuTotal "vllm:estimated_flops_per_gpu_total"
        Counter, REPLICA, Wire, LogStats,
        "Floating-point operations per GPU by the engine's estimate; stays 0 unless the engine estimates them.";
    VllmEstimatedReadBytesPerGpuTotal "vllm:estimated_read_bytes_per_gpu_total"
        Counter, REPLICA, Wire, LogStats,
        "Bytes read from memory per GPU by the engine's estimate; stays 0 unless the engine estimates them.";
    VllmEstimatedWriteBytesPerGpuTotal "vllm:estimated_write_bytes_per_gpu_total"
        Counter, REPLICA, Wire, LogStats,
        "Bytes written to memory per GPU by the engine's estimate; stays 0 unless the engine estimates them.";
    VllmExternalPrefixCacheHitsTotal "vllm:external_prefix_cache_hits_total"
        Counter, REPLICA, Wire, LogStats,
        "Tokens found in a KV connector's prefix cache.";
    VllmExternalPrefixCacheQueriesTotal "vllm:external_prefix_cache_queries_total"
        Counter, REPLICA, Wire, LogStats,
        "Tokens looked up in a KV connector's prefix cache.";
    VllmGenerationTokensTotal "vllm:generation_tokens_total"
        Counter, REPLICA, Wire, Nothing,
        "Tokens generated.";
    VllmInterTokenLatencySeconds "vllm:inter_token_latency_seconds"
        Histogram(InterToken), REPLICA, Wire, Nothing,
        "Seconds between two outputs of a request, by the engine's clock.";
    VllmIterationTokensTotal "vllm:iteration_tokens_total"
        Histogram(IterationTokens), REPLICA, Wire, Nothing,
        "Prompt and generated tokens of one engine step that had outputs.";
    VllmKvBlockIdleBeforeEvictSeconds "vllm:kv_block_idle_before_evict_seconds"
        Histogram(KvResidency), REPLICA, Wire, Feature,
        "Seconds from the last use of a KV block to its eviction.";
    VllmKvBlockLifetimeSeconds "vllm:kv_block_lifetime_seconds"
        Histogram(KvResidency), REPLICA, Wire, Feature,
        "Seconds from a KV block's allocation to its eviction.";
    VllmKvBlockReuseGapSeconds "vllm:kv_block_reuse_gap_seconds"
        Histogram(KvResidency), REPLICA, Wire, Feature,
        "Seconds between two uses of a KV block.";
    VllmKvCacheUsagePerc "vllm:kv_cache_usage_perc"
        Gauge(Max), REPLICA, Wire, LogStats,
        "Share of the KV cache in use, 0 to 1.";
    VllmLoraRequestsInfo "vllm:lora_requests_info"
        Gauge(Newest), &["max_lora", "waiting_lora_adapters", "running_lora_adapters"], Wire, Feature,
        "LoRA adapters of waiting and running requests; the value is the Unix time of the report.";
    VllmMmCacheHitsTotal "vllm:mm_cache_hits_total"
        Counter, REPLICA, Engine, LogStats,
        "Items found in the API server's multi-modal cache.";
    VllmMmCacheQueriesTotal "vllm:mm_cache_queries_total"
        Counter, REPLICA, Engine, LogStats,
        "Items looked up in the API server's multi-modal cache.";
    VllmNumPreemptionsTotal "vllm:num_preemptions_total"
        Counter, REPLICA, Wire, LogStats,
        "Preemptions by the scheduler.";
    VllmNumRequestsRunning "vllm:num_requests_running"
        Gauge(Sum), REPLICA, Wire, LogStats,
        "Requests in the running batch by the newest scheduler report.";
    VllmNumRequestsWaiting "vllm:num_requests_waiting"
        Gauge(Sum), REPLICA, Wire, LogStats,
        "Requests waiting by the newest scheduler report, deferred ones included.";
    VllmNumRequestsWaitingByReason "vllm:num_requests_waiting_by_reason"
        Gauge(Sum), &["model_name", "stage", "replica", "reason"], Wire, LogStats,
        "Requests waiting by the newest scheduler report: for capacity, or deferred.";
    VllmPrefixCacheHitsTotal "vllm:prefix_cache_hits_total"
        Counter, REPLICA, Wire, LogStats,
        "Tokens found in the engine's prefix cache.";
    VllmPrefixCacheQueriesTotal "vllm:prefix_cache_queries_total"
        Counter, REPLICA, Wire, LogStats,
        "Tokens looked up in the engine's prefix cache.";
    VllmPromptTokensBySourceTotal "vllm:prompt_tokens_by_source_total"
        Counter, &["model_name", "stage", "replica", "source"], Wire, Nothing,
        "Prompt tokens by where they came from: computed, local cache or external KV transfer.";
    VllmPromptTokensCachedTotal "vllm:prompt_tokens_cached_total"
        Counter, REPLICA, Wire, Nothing,
        "Prompt tokens taken from any cache.";
    VllmPromptTokensTotal "vllm:prompt_tokens_total"
        Counter, REPLICA, Wire, Nothing,
        "Prompt tokens of requests that got their first output.";
    VllmRequestDecodeTimeSeconds "vllm:request_decode_time_seconds"
        Histogram(RequestLatency), REPLICA, Wire, Nothing,
        "Seconds from a request's first token to its last, by the engine's clock.";
    VllmRequestGenerationTokens "vllm:request_generation_tokens"
        Histogram(Tokens), REPLICA, Wire, Nothing,
        "Tokens generated for a finished request.";
    VllmRequestInferenceTimeSeconds "vllm:request_inference_time_seconds"
        Histogram(RequestLatency), REPLICA, Wire, LogStats,
        "Seconds from a request being scheduled to its last token, by the engine's clock.";
    VllmRequestMaxNumGenerationTokens "vllm:request_max_num_generation_tokens"
        Histogram(Tokens), REPLICA, Wire, Nothing,
        "Tokens of the longest of a request's parallel samples.";
    VllmRequestNumPreemptions "vllm:request_num_preemptions"
        Histogram(Preemptions), REPLICA, Wire, LogStats,
        "Preemptions of a finished request.";
    VllmRequestParamsMaxTokens "vllm:request_params_max_tokens"
        Histogram(Tokens), REPLICA, Wire, Nothing,
        "max_tokens of a finished request.";
    VllmRequestParamsN "vllm:request_params_n"
        Histogram(ParamsN), REPLICA, Wire, Nothing,
        "n of a finished request: how many samples it asked for.";
    VllmRequestPrefillKvComputedTokens "vllm:request_prefill_kv_computed_tokens"
        Histogram(Tokens), REPLICA, Wire, Nothing,
        "Prompt tokens of a finished request whose KV data was computed, not taken from a cache.";
    VllmRequestPrefillTimeSeconds "vllm:request_prefill_time_seconds"
        Histogram(RequestLatency), REPLICA, Wire, LogStats,
        "Seconds from a request being scheduled to its first token, by the engine's clock.";
    VllmRequestPromptTokens "vllm:request_prompt_tokens"
        Histogram(Tokens), REPLICA, Wire, Nothing,
        "Prompt tokens of a finished request.";
    VllmRequestQueueTimeSeconds "vllm:request_queue_time_seconds"
        Histogram(RequestLatency), REPLICA, Wire, LogStats,
        "Seconds from a request being queued to it being scheduled, by the engine's clock.";
    VllmRequestSuccessTotal "vllm:request_success_total"
        Counter, &["model_name", "stage", "replica", "finished_reason"], Wire, Nothing,
        "Requests that a stage finished, by finish reason.";
    VllmRequestTimePerOutputTokenSeconds "vllm:request_time_per_output_token_seconds"
        Histogram(InterToken), REPLICA, Wire, Nothing,
        "Decode seconds of a finished request divided by its tokens after the first.";
    VllmSpecDecodeNumAcceptedTokensPerPosTotal "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        Counter, &["model_name", "stage", "replica", "position"], Wire, Feature,
        "Draft tokens that were accepted, by position in the draft.";
    VllmSpecDecodeNumAcceptedTokensTotal "vllm:spec_decode_num_accepted_tokens_total"
        Counter, REPLICA, Wire, Feature,
        "Draft tokens that were accepted.";
    VllmSpecDecodeNumDraftTokensTotal "vllm:spec_decode_num_draft_tokens_total"
        Counter, REPLICA, Wire, Feature,
        "Draft tokens that were proposed.";
    VllmSpecDecodeNumDraftsTotal "vllm:spec_decode_num_drafts_total"
        Counter, REPLICA, Wire, Feature,
        "Drafts of speculative decoding.";
    VllmTimeToFirstTokenSeconds "vllm:time_to_first_token_seconds"
        Histogram(Ttft), REPLICA, Wire, Nothing,
        "Seconds from a request's arrival at the stage to its first token.";

    OmnitapApiAmbiguousJoinsTotal "omnitap_api_ambiguous_joins_total"
        Counter, &[], Own, Nothing,
        "Requests to the engines that more than one HTTP request fitted alike.";
    OmnitapApiBreaksTotal "omnitap_api_breaks_total"
        Counter, &[], Own, Nothing,
        "Times that the bytes of a connection to an API server did not go on as they must, because some were lost.";
    OmnitapApiConnections "omnitap_api_connections"
        Gauge(Sum), &[], Own, Nothing,
        "Connections to API servers that are followed now.";
    OmnitapApiConnectionsRefusedTotal "omnitap_api_connections_refused_total"
        Counter, &[], Own, Nothing,
        "Connections to API servers that were not followed because too many were open.";
    OmnitapApiRequestsTotal "omnitap_api_requests_total"
        Counter, &["result"], Own, Nothing,
        "HTTP requests to API servers, of any kind, by how they ended: ok, client_error, server_error, client_left \
         (before the answer was complete), cut (by the server), lost (events are missing).";
    OmnitapApiUnsupportedTotal "omnitap_api_unsupported_total"
        Counter, &["what"], Own, Nothing,
        "Connections to API servers and answers that can't be read: http2, tls, content_coding.";
    OmnitapBpfRunSecondsTotal "omnitap_bpf_run_seconds_total"
        Counter, &["program"], Own, Nothing,
        "Seconds that the kernel spent inside a BPF program of the agent; needs BPF statistics on.";
    OmnitapBpfRunsTotal "omnitap_bpf_runs_total"
        Counter, &["program"], Own, Nothing,
        "Runs of a BPF program of the agent; needs BPF statistics on.";
    OmnitapBuildInfo "omnitap_build_info"
        Gauge(Max), &["version", "arch"], Own, Nothing,
        "Always 1; its labels name the build.";
    OmnitapCoordinatorListAgeSeconds "omnitap_coordinator_list_age_seconds"
        Gauge(Max), &["pipeline"], Own, Nothing,
        "Age of the newest list of replicas of a coordinator.";
    OmnitapCoordinatorMessagesTotal "omnitap_coordinator_messages_total"
        Counter, &["result"], Own, Nothing,
        "Messages of coordinators, by result: ok, duplicate, late, too_many (replicas were left out), malformed.";
    OmnitapCoordinatorReplicaQueueLength "omnitap_coordinator_replica_queue_length"
        Gauge(Max), &["pipeline", "stage", "replica", "address", "place"], Own, Nothing,
        "Unfinished requests of a replica, running and waiting, as it tells its coordinator.";
    OmnitapCoordinatorReplicaUp "omnitap_coordinator_replica_up"
        Gauge(Max), &["pipeline", "stage", "replica", "address", "place"], Own, Nothing,
        "1 for a replica that its coordinator lists as up, else 0; place is local or remote, replica is given for local ones.";
    OmnitapCoordinatorReplicas "omnitap_coordinator_replicas"
        Gauge(Max), &["pipeline", "stage", "status"], Own, Nothing,
        "Replicas of a stage on all nodes by the coordinator's list: up, down, error, gone (no longer listed, kept for 10 \
         minutes).";
    OmnitapCpuSecondsTotal "omnitap_cpu_seconds_total"
        Counter, &[], Own, Nothing,
        "CPU seconds of the agent's process, user and system.";
    OmnitapEngineDisagreement "omnitap_engine_disagreement"
        Gauge(Max), &["pipeline", "family"], Own, Nothing,
        "Children of a family whose value here and in the engine's own /metrics differ by more than 1 % while both rest; \
         counters: what they gained since they were first seen at rest.";
    OmnitapEngineReadsTotal "omnitap_engine_reads_total"
        Counter, &["result"], Own, Nothing,
        "Reads of the engines' own /metrics, by result: ok, or why not.";
    OmnitapEventsLostTotal "omnitap_events_lost_total"
        Counter, &["kind"], Own, Nothing,
        "Events that were seen in the kernel and did not reach the agent, by why.";
    OmnitapEventsReceivedTotal "omnitap_events_received_total"
        Counter, &["kind"], Own, Nothing,
        "Events read from the ring buffer, by kind.";
    OmnitapFramesTotal "omnitap_frames_total"
        Counter, &["type", "result"], Own, Nothing,
        "Payload frames given to the decoder, by message type and result (ok, truncated, unknown layout, malformed).";
    OmnitapGpuCallErrorsTotal "omnitap_gpu_call_errors_total"
        Counter, &["call", "error"], Nvml, Nothing,
        "Calls of NVML that failed, by what was asked for and why; a call that a GPU does not support is tried once a \
         minute.";
    OmnitapGpuEccErrorsTotal "omnitap_gpu_ecc_errors_total"
        Counter, &["index", "mig", "uuid", "model_name", "stage", "replica", "type"], Nvml, Nothing,
        "Memory errors of a GPU over its life, by type: corrected, uncorrected.";
    OmnitapGpuInfo "omnitap_gpu_info"
        Gauge(Max), &["index", "mig", "uuid", "name", "driver_version"], Nvml, Nothing,
        "Always 1 for a GPU, or an instance of one (MIG), that NVML shows.";
    OmnitapGpuMemoryTotalBytes "omnitap_gpu_memory_total_bytes"
        Gauge(Max), GPU, Nvml, Nothing,
        "Memory of a GPU. Instances (MIG) count again in their GPU; mig is empty for whole GPUs. model_name, stage and \
         replica are given where one stage alone uses the GPU.";
    OmnitapGpuMemoryUsedBytes "omnitap_gpu_memory_used_bytes"
        Gauge(Max), GPU, Nvml, Nothing,
        "Memory of a GPU in use by all processes.";
    OmnitapGpuPowerWatts "omnitap_gpu_power_watts"
        Gauge(Max), GPU, Nvml, Nothing,
        "Power that a GPU draws.";
    OmnitapGpuSampleAgeSeconds "omnitap_gpu_sample_age_seconds"
        Gauge(Max), &[], Nvml, Nothing,
        "Age of the newest sample of all GPUs, while there should be one.";
    OmnitapGpuSamplesLostTotal "omnitap_gpu_samples_lost_total"
        Counter, &[], Nvml, Nothing,
        "Samples that were dropped because the agent was busy.";
    OmnitapGpuStageMemoryUsedBytes "omnitap_gpu_stage_memory_used_bytes"
        Gauge(Sum), GPU, Nvml, Nothing,
        "Memory of a GPU in use by the processes of one replica of a stage, its workers included.";
    OmnitapGpuState "omnitap_gpu_state"
        Gauge(Max), &["state"], Nvml, Nothing,
        "1 for the state of NVML: ok, unused (no watched process uses a GPU, NVML is closed), opening, no_library, \
         no_driver, version_mismatch, no_permission, no_gpu, failed, stalled (a call does not return).";
    OmnitapGpuTemperatureCelsius "omnitap_gpu_temperature_celsius"
        Gauge(Max), GPU, Nvml, Nothing,
        "Temperature of a GPU's die.";
    OmnitapGpuUtilizationRatio "omnitap_gpu_utilization_ratio"
        Gauge(Max), GPU, Nvml, Nothing,
        "Share of the time in which a kernel ran on a GPU, 0 to 1, over the driver's last period.";
    OmnitapHttpConnectionsRefusedTotal "omnitap_http_connections_refused_total"
        Counter, &[], Own, Nothing,
        "HTTP connections that were closed because too many were open: the one that had waited longest for its client, or the new one where all were being answered.";
    OmnitapHttpRequestsTotal "omnitap_http_requests_total"
        Counter, &["path", "code"], Own, Nothing,
        "HTTP requests that the agent answered; path is one of its own or other.";
    OmnitapPeakMemorySource "omnitap_peak_memory_source"
        Gauge(Max), &["model_name", "stage", "source"], Own, Nothing,
        "1 for the source of a stage's vllm_omni:peak_memory_mb: engine (its own report, which wins), nvml_accounting \
         (the driver's account of the processes), nvml_sampled (highest of the samples, a lower bound).";
    OmnitapPipelineInfo "omnitap_pipeline_info"
        Gauge(Max),
        &["pipeline", "flavor", "model_name", "served_model_name", "vllm_version", "omni_version", "layout"],
        Own, Nothing,
        "Always 1 while a pipeline is watched; layout says how its frames are read (known, degraded, unknown).";
    OmnitapPipelines "omnitap_pipelines"
        Gauge(Sum), &["flavor"], Own, Nothing,
        "Pipelines found on this host and alive.";
    OmnitapProbeAttachSecondsTotal "omnitap_probe_attach_seconds_total"
        Counter, &[], Own, Nothing,
        "Seconds spent on attaching probes, the reading of the probed files included.";
    OmnitapProbeAttachesTotal "omnitap_probe_attaches_total"
        Counter, &[], Own, Nothing,
        "Processes that were probed.";
    OmnitapProbeDetachSecondsTotal "omnitap_probe_detach_seconds_total"
        Counter, &[], Own, Nothing,
        "Seconds spent on detaching probes, of threads at work side by side added up.";
    OmnitapProbeDetachesTotal "omnitap_probe_detaches_total"
        Counter, &[], Own, Nothing,
        "Probes that were taken off.";
    OmnitapProbeFailuresTotal "omnitap_probe_failures_total"
        Counter, &["probes", "reason"], Own, Nothing,
        "Attempts to probe a process that failed, by what the probes are for (frames, shm, http, store, yuanrong, tls) and \
         reason.";
    OmnitapProbeHitsTotal "omnitap_probe_hits_total"
        Counter, &["result"], Own, Nothing,
        "Hits of probes that lost nothing, by what became of the frame: captured, aux (header only), short (dropped \
         on purpose), unwatched; for shared memory and stores: shm_captured (a step of a transfer), shm_noted \
         (kept in the kernel: polls, nearly all), shm_ignored, store_unreturned (a call after one whose end was not \
         seen); for HTTP: http_captured, http_noted (in front of a call), \
         http_ignored (other descriptors than connections, calls to be tried again).";
    OmnitapProbesAttachedTotal "omnitap_probes_attached_total"
        Counter, &["site"], Own, Nothing,
        "Probes set, by the kind of the probed instruction: slow ones and returns (of a store's few calls) are \
         single-stepped by the kernel, the others emulated at a twentieth of the cost.";
    OmnitapProbedProcesses "omnitap_probed_processes"
        Gauge(Sum), &[], Own, Nothing,
        "Processes that are probed now.";
    OmnitapReplicas "omnitap_replicas"
        Gauge(Sum), &["flavor"], Own, Nothing,
        "Replicas of stages found on this host and alive.";
    OmnitapRequestRecordsMissedTotal "omnitap_request_records_missed_total"
        Counter, &[], Own, Nothing,
        "Records of requests that made room for newer ones before a reader of /api/requests came for them.";
    OmnitapRequestRecordsTotal "omnitap_request_records_total"
        Counter, &["result"], Own, Nothing,
        "Records of requests that ended, where they are wanted: taken, over_rate (dropped: more than requests.max-rate a \
         second).";
    OmnitapResidentMemoryBytes "omnitap_resident_memory_bytes"
        Gauge(Sum), &[], Own, Nothing,
        "Resident memory of the agent's process.";
    OmnitapRingBufferSizeBytes "omnitap_ring_buffer_size_bytes"
        Gauge(Sum), &[], Own, Nothing,
        "Size of the ring buffer between kernel and agent.";
    OmnitapRingBufferUnreadBytes "omnitap_ring_buffer_unread_bytes"
        Gauge(Sum), &[], Own, Nothing,
        "Bytes in the ring buffer that the agent has not read yet.";
    OmnitapSamplesSkippedTotal "omnitap_samples_skipped_total"
        Counter, &["family", "reason"], Own, Nothing,
        "Measurements that could not become a sample, by family and reason.";
    OmnitapScrapeDurationSeconds "omnitap_scrape_duration_seconds"
        Histogram(Scrape), &[], Own, Nothing,
        "Seconds to render one answer of /metrics, compression included.";
    OmnitapSeries "omnitap_series"
        Gauge(Sum), &[], Own, Nothing,
        "Sample lines that /metrics has now.";
    OmnitapSeriesRefusedTotal "omnitap_series_refused_total"
        Counter, &[], Own, Nothing,
        "Children that were not created because the cap on series was reached.";
    OmnitapSourceState "omnitap_source_state"
        Gauge(Max), &["pipeline", "family", "source"], Own, Nothing,
        "The source that serves a family of a pipeline: 1 whole, 0.5 with parts missing, 0 nothing to be had.";
    OmnitapStages "omnitap_stages"
        Gauge(Sum), &["flavor"], Own, Nothing,
        "Stages found on this host and alive.";
    OmnitapStatConnections "omnitap_stat_connections"
        Gauge(Sum), &[], Own, Nothing,
        "Connections to the stat socket that are open.";
    OmnitapStatConnectionsRefusedTotal "omnitap_stat_connections_refused_total"
        Counter, &["reason"], Own, Nothing,
        "Connections to the stat socket that were closed by the agent: too_many were open, credentials of a sender that \
         may not, protocol (neither JSON lines nor msgpack).";
    OmnitapStatEventsLostTotal "omnitap_stat_events_lost_total"
        Counter, &[], Own, Nothing,
        "Events that senders dropped by their own account, because the agent was slow or away.";
    OmnitapStatEventsTotal "omnitap_stat_events_total"
        Counter, &["event", "result"], Own, Nothing,
        "Stat events that were read, by kind and result: accepted, repeated (told before), full (too many \
         requests open, or replicas named), no_pipeline, malformed, too_long, unknown_event, version.";
    OmnitapTransferStageMismatchesTotal "omnitap_transfer_stage_mismatches_total"
        Counter, &[], Own, Nothing,
        "Transfers whose key names another stage than the process at that end has; the process's counts.";
    OmnitapTransfersOpen "omnitap_transfers_open"
        Gauge(Sum), &[], Own, Nothing,
        "Payloads between stages of which one end was seen and the other is awaited.";
}

impl Family {
    /// How many there are.
    pub const COUNT: usize = Self::ALL.len();

    /// Its row in the table.
    #[must_use]
    pub fn row(self) -> &'static Row {
        // The table and the enum come from the same macro: the discriminant is the index.
        &TABLE[self as usize]
    }

    /// Name as exposed.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// The source that serves it where its own can't.
    #[must_use]
    pub fn stand_in(self) -> Option<Source> {
        match self {
            Self::OmniAudioContinuityOkTotal | Self::OmniAudioTtfpS | Self::OmniAudioUnderrunS => {
                Some(Source::Wire)
            }
            _ => None,
        }
    }
}

/// The text of a HELP line: what is measured, and the source.
pub(crate) fn help(row: &Row) -> String {
    let stand_in = row
        .family
        .stand_in()
        .map_or_else(String::new, |source| format!("; else {}", source.describe()));
    format!("{} Source: {}{stand_in}.", row.help, row.source.describe())
}

/// The catalogue as tab-separated lines: name, type, labels, bucket set, source. Empty fields are `-`.
#[must_use]
pub fn list() -> String {
    let mut text = String::new();
    for row in TABLE {
        let dash = |s: &str| {
            if s.is_empty() {
                "-".to_owned()
            } else {
                s.to_owned()
            }
        };
        let _ = writeln!(
            text,
            "{}\t{}\t{}\t{}\t{}",
            row.name,
            row.kind.as_str(),
            dash(&row.labels.join(",")),
            row.kind.buckets().map_or("-", Buckets::name),
            row.source.as_str()
        );
    }
    text
}

/// The catalogue as the page docs/metrics.md.
#[must_use]
pub fn markdown() -> String {
    let mut text = String::from(MARKDOWN_HEAD);
    let sections = [
        ("vllm_omni:", "Families of vLLM-Omni"),
        ("vllm:", "Families of vLLM"),
        ("omnitap_", "Families of the agent itself"),
    ];
    for (prefix, title) in sections {
        let _ = write!(
            text,
            "\n## {title}\n\n| family | type | labels | buckets | source | needs | what it is |\n\
             |---|---|---|---|---|---|---|\n"
        );
        for row in TABLE.iter().filter(|r| r.name.starts_with(prefix)) {
            let labels: Vec<String> = row.labels.iter().map(|l| format!("`{l}`")).collect();
            let _ = writeln!(
                text,
                "| `{}` | {} | {} | {} | {} | {} | {} |",
                row.name,
                row.kind.as_str(),
                labels.join(", "),
                row.kind.buckets().map_or("", Buckets::name),
                row.source.as_str(),
                row.needs.as_str(),
                row.help
            );
        }
    }
    text.push_str(MARKDOWN_TRANSFERS);
    text.push_str("\n## Sources\n\n| source | what it is |\n|---|---|\n");
    for source in Source::ALL {
        let _ = writeln!(text, "| {} | {} |", source.as_str(), source.describe());
    }
    text.push_str("\n## Buckets\n\nUpper bounds; `+Inf` is always there.\n\n| set | bounds |\n|---|---|\n");
    for buckets in Buckets::ALL {
        let le: Vec<&str> = buckets
            .le()
            .iter()
            .take(buckets.bounds(None).len())
            .map(String::as_str)
            .collect();
        let _ = writeln!(text, "| {} | {} |", buckets.name(), le.join(" "));
    }
    text.push_str(MARKDOWN_TAIL);
    text
}

const MARKDOWN_HEAD: &str = "\
# Families

<!-- Written by `omnitap families --markdown`; a test compares it with the code. -->

Every family that omnitap serves on `/metrics`. A family is listed from the start; a labelled child appears with
its first observation. `needs` says what the pipeline must have on before the family can have samples: nothing
(empty), the engine's log stats, or a feature of the engine that is off by default.

`model_name` is the model argument for `vllm_omni:*` and the first served model name for `vllm:*`, as in the
engine. A sample whose stage, replica or model can't be told is not served; `omnitap_samples_skipped_total` counts it.

Two pipelines with the same label values share their children: counters and histograms add up. Gauges add up as
well, except ratios, states and peaks (`vllm:kv_cache_usage_perc`, `vllm:engine_sleep_state`,
`vllm_omni:peak_memory_mb`), where the highest counts, and `vllm:lora_requests_info`, which has one child for each
engine: the newest.

Gauges go with their process. Other children stay for the retention time (15 minutes by default) after their
pipeline has ended, so that the last scrape interval is not lost, and live on when a new pipeline takes the same
label values.
";

const MARKDOWN_TRANSFERS: &str = "
## Transfers

One observation for each payload that passes between two stages of this host: chunks of a request, and the shares of
several ranks, are payloads of their own. What each family is depends on the connector that moves it:

| connector | `transfer_size_bytes` | `transfer_tx_s` | `transfer_rx_s` | `transfer_in_flight_s` |
|---|---|---|---|---|
| SharedMemoryConnector | length of the segment | the sender's lock to its unlock | successful open to removal by the receiver | unlock to successful open; 0 where the receiver opened before |
| Mooncake transfer engine, Mori | sum of the regions asked for | no sample: a copy into the sender's memory, without any message | request sent to `trans_done` sent: the wait for the sender, and its write | no sample: when the data was ready is not on the wire |
| NIXL | `size` of the offer | no sample, as above | offer sent to release sent: connecting, registering memory, the read, and unpacking | no sample, as above |
| Yuanrong transfer engine | `data_size` of the answer | no sample, as above | answer sent to clean-up sent: the read, and finding memory for it | no sample, as above |
| Mooncake store | bytes given to `put` | the call of `put`, where it worked | the call of `get_buffer` that found the object | end of `put` to begin of `get_buffer`: also the time that nobody asked; 0 where it was asked for before |
| Yuanrong data system | bytes given to `Set` | the call of `Set`, where it worked | the call of `Get` that found the object, from when it was there | end of `Set` to begin of `Get`, as above; 0 where `Get` waited for it |
| none: the request carries the output | the request with its tensors | last output of the stage before sent to the request sent: the orchestrator's work | no sample: what the next stage does with a request has no end on the wire | request sent to its QUEUED event, which an LLM stage gives with log stats on; no sample without, and of diffusion stages |

Not in any of them: the sender's Python making bytes of objects before the transfer, and the receiver's making objects of
bytes after it (with NIXL the latter is in rx). NIXL's release follows a failed read too, which can't be told from one
that worked. An edge with a connector counts the connector's payloads alone, and no requests.

Where an end is on another host, nothing is observed: its replica, which is a label, is not known here. So are payloads
that nobody took, and ends that were not seen. `omnitap_samples_skipped_total` counts them by reason, and
[wire.md](wire.md#connectors) says what each reason means, and what was tested with which client.
";

const MARKDOWN_TAIL: &str = "
TOKENS(max_model_len) has those bounds that do not exceed the longest sequence of the model. Where omnitap
doesn't know it, the bounds end at 1,000,000. The first child decides: its bounds stay while it lives.

`vllm_omni:num_inference_steps` and `vllm_omni:image_pixels` have bounds of their own. vLLM-Omni leaves them the
client library's default buckets, which end at 10 and can't tell real values apart.
";
