//! Label values that the pipeline state uses, interned once.

use super::{
    audio::CONTINUITY_THRESHOLD_MS,
    sink::{ExtraId, Sink},
};
use crate::{metrics::catalogue::Family, wire::message::FinishReason};

/// Reasons of `requests_failed_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The API process aborted the request although its client was there and no stage had failed.
    ClientAbort,
    /// The API process aborted the request although no stage had failed.
    ClientDisconnect,
    /// A stage reported an error or died.
    StageError,
    /// The request ended for a reason that the wire does not show.
    Unknown,
}

impl Failure {
    const ALL: [Self; 4] = [
        Self::ClientAbort,
        Self::ClientDisconnect,
        Self::StageError,
        Self::Unknown,
    ];

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::ClientAbort => "client_abort",
            Self::ClientDisconnect => "client_disconnect",
            Self::StageError => "stage_error",
            Self::Unknown => "unknown",
        }
    }
}

/// Reasons of `speech_stream_aborted_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamAbort {
    /// The client left while the engine was awaited.
    Cancelled,
    /// The client left while it was being written to.
    Closed,
    /// An engine died.
    EngineDead,
    /// Anything else.
    Error,
}

impl StreamAbort {
    const ALL: [Self; 4] = [Self::Cancelled, Self::Closed, Self::EngineDead, Self::Error];

    fn as_str(self) -> &'static str {
        match self {
            Self::Cancelled => "cancelled",
            Self::Closed => "closed",
            Self::EngineDead => "engine_dead",
            Self::Error => "error",
        }
    }
}

/// Values of `sleep_state`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Sleep {
    #[default]
    Awake,
    /// Level 1.
    WeightsOffloaded,
    /// Level 2.
    DiscardAll,
    /// Level 0: paused, nothing freed. All three states read 0, as in vLLM.
    Paused,
}

impl Sleep {
    /// The states that are label values, in the order of [`Labels::sleep`].
    pub(super) const LABELLED: [Self; 3] = [Self::Awake, Self::WeightsOffloaded, Self::DiscardAll];
}

/// Interned values; indices follow the `ALL` arrays.
#[derive(Clone, Copy, Debug)]
pub(super) struct Labels {
    finish: [ExtraId; 5],
    failure: [ExtraId; 4],
    stream_abort: [ExtraId; 4],
    /// Sources of prompt tokens: computed, local cache, external store.
    pub(super) source: [ExtraId; 3],
    /// Reasons of waiting: capacity, deferred.
    pub(super) waiting: [ExtraId; 2],
    pub(super) sleep: [ExtraId; 3],
    pub(super) stage_type_llm: ExtraId,
    pub(super) stage_type_diffusion: ExtraId,
    pub(super) threshold: ExtraId,
    pub(super) no_audio_data: ExtraId,
}

impl Labels {
    pub(super) fn new<S: Sink + ?Sized>(sink: &mut S) -> Self {
        let mut one = |value: &str| sink.extra(&[value]);
        Self {
            finish: FinishReason::ALL.map(|reason| one(reason.as_str())),
            failure: Failure::ALL.map(|reason| one(reason.as_str())),
            stream_abort: StreamAbort::ALL.map(|reason| one(reason.as_str())),
            source: ["local_compute", "local_cache_hit", "external_kv_transfer"].map(&mut one),
            waiting: ["capacity", "deferred"].map(&mut one),
            sleep: ["awake", "weights_offloaded", "discard_all"].map(&mut one),
            stage_type_llm: one("llm"),
            stage_type_diffusion: one("diffusion"),
            threshold: one(CONTINUITY_THRESHOLD_MS),
            no_audio_data: one("no_audio_data"),
        }
    }

    pub(super) fn finish(&self, reason: FinishReason) -> ExtraId {
        let [stop, length, abort, error, repetition] = self.finish;
        match reason {
            FinishReason::Stop => stop,
            FinishReason::Length => length,
            FinishReason::Abort => abort,
            FinishReason::Error => error,
            FinishReason::Repetition => repetition,
        }
    }

    pub(super) fn failure(&self, reason: Failure) -> ExtraId {
        let [client_abort, client_disconnect, stage_error, unknown] = self.failure;
        match reason {
            Failure::ClientAbort => client_abort,
            Failure::ClientDisconnect => client_disconnect,
            Failure::StageError => stage_error,
            Failure::Unknown => unknown,
        }
    }

    pub(super) fn stream_abort(&self, reason: StreamAbort) -> ExtraId {
        let [cancelled, closed, engine_dead, error] = self.stream_abort;
        match reason {
            StreamAbort::Cancelled => cancelled,
            StreamAbort::Closed => closed,
            StreamAbort::EngineDead => engine_dead,
            StreamAbort::Error => error,
        }
    }

    /// The extra values with which `family` has children from the start, as the real server creates them.
    pub(super) fn initial(&self, family: Family) -> &[ExtraId] {
        match family {
            Family::VllmRequestSuccessTotal => &self.finish,
            Family::VllmPromptTokensBySourceTotal => &self.source,
            Family::VllmNumRequestsWaitingByReason => &self.waiting,
            Family::VllmEngineSleepState => &self.sleep,
            _ => &[ExtraId::NONE],
        }
    }
}

/// Counters that every (stage, replica) has from the start.
pub(super) const STAGE_COUNTERS: &[Family] = &[
    Family::VllmEstimatedFlopsPerGpuTotal,
    Family::VllmEstimatedReadBytesPerGpuTotal,
    Family::VllmEstimatedWriteBytesPerGpuTotal,
    Family::VllmExternalPrefixCacheHitsTotal,
    Family::VllmExternalPrefixCacheQueriesTotal,
    Family::VllmGenerationTokensTotal,
    Family::VllmMmCacheHitsTotal,
    Family::VllmMmCacheQueriesTotal,
    Family::VllmNumPreemptionsTotal,
    Family::VllmPrefixCacheHitsTotal,
    Family::VllmPrefixCacheQueriesTotal,
    Family::VllmPromptTokensBySourceTotal,
    Family::VllmPromptTokensCachedTotal,
    Family::VllmPromptTokensTotal,
    Family::VllmRequestSuccessTotal,
];

/// Histograms that every (stage, replica) has from the start.
pub(super) const STAGE_HISTOGRAMS: &[Family] = &[
    Family::VllmE2eRequestLatencySeconds,
    Family::VllmInterTokenLatencySeconds,
    Family::VllmIterationTokensTotal,
    Family::VllmRequestDecodeTimeSeconds,
    Family::VllmRequestGenerationTokens,
    Family::VllmRequestInferenceTimeSeconds,
    Family::VllmRequestMaxNumGenerationTokens,
    Family::VllmRequestNumPreemptions,
    Family::VllmRequestParamsMaxTokens,
    Family::VllmRequestParamsN,
    Family::VllmRequestPrefillKvComputedTokens,
    Family::VllmRequestPrefillTimeSeconds,
    Family::VllmRequestPromptTokens,
    Family::VllmRequestQueueTimeSeconds,
    Family::VllmRequestTimePerOutputTokenSeconds,
    Family::VllmTimeToFirstTokenSeconds,
];
