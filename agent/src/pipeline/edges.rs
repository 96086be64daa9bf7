//! The edges between stages and their four families.

use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

use super::{
    places::{End, Place},
    records::Connector,
    sink::{ExtraId, Scope, ScopeId, Sink},
};
use crate::{
    host::identity::{Flavor, Pipeline, PipelineId},
    metrics::catalogue::Family,
};

/// Stages that are told apart: keys, which name them, may say anything.
const MAX_STAGES: usize = 1024;

/// Why a hop, or part of it, gave no sample: values of the label `reason`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    /// The payload was removed by its sender, or lay there for too long.
    NeverTaken,
    /// Another payload was put under the same key before it was taken.
    KeyReused,
    /// The sender ended, and the payload was not taken afterwards.
    SenderGone,
    /// The receiver ended before the transfer was known to be over.
    ReceiverGone,
    /// The put was before the agent's time.
    PutNotSeen,
    /// A transfer was asked for, and no word came of it.
    DoneNotSeen,
    /// The sender told of a transfer that nobody here asked for.
    ReceiverNotSeen,
    /// The receiver told of a transfer that nobody here offered.
    OfferNotSeen,
    /// The sender told of a failure.
    Failed,
    /// Stage or replica of an end is not known.
    UnknownReplica,
    /// Too many halves are waiting.
    TableFull,
    /// The pipeline ended.
    PipelineEnded,
    /// It happens without any message.
    NotOnTheWire,
    /// Whether a connector moved the payload could not be seen.
    ConnectorNotSeen,
    /// The value was in bytes that were not captured.
    FrameCut,
}

impl Reason {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::NeverTaken => "never_taken",
            Self::KeyReused => "key_reused",
            Self::SenderGone => "sender_gone",
            Self::ReceiverGone => "receiver_gone",
            Self::PutNotSeen => "put_not_seen",
            Self::DoneNotSeen => "done_not_seen",
            Self::ReceiverNotSeen => "receiver_not_seen",
            Self::OfferNotSeen => "offer_not_seen",
            Self::Failed => "failed",
            Self::UnknownReplica => "unknown_replica",
            Self::TableFull => "table_full",
            Self::PipelineEnded => "pipeline_ended",
            Self::NotOnTheWire => "not_on_the_wire",
            Self::ConnectorNotSeen => "connector_not_seen",
            Self::FrameCut => "frame_cut",
        }
    }
}

/// The values of one hop: bytes and seconds, or why there is none.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hop {
    pub(super) size: Result<f64, Reason>,
    pub(super) tx: Result<f64, Reason>,
    pub(super) rx: Result<f64, Reason>,
    pub(super) in_flight: Result<f64, Reason>,
}

impl Hop {
    pub(super) const SIZE: Family = Family::OmniTransferSizeBytes;
    pub(super) const TX: Family = Family::OmniTransferTxS;
    pub(super) const RX: Family = Family::OmniTransferRxS;
    pub(super) const IN_FLIGHT: Family = Family::OmniTransferInFlightS;

    /// A hop of which the receiver's time alone may be known.
    pub(super) fn alone(sender: Result<f64, Reason>, rx: Result<f64, Reason>) -> Self {
        Self {
            size: sender,
            tx: sender,
            rx,
            in_flight: sender,
        }
    }

    /// A hop without any value.
    pub(super) fn none(reason: Reason) -> Self {
        Self::alone(Err(reason), Err(reason))
    }

    fn values(&self) -> [(Family, Result<f64, Reason>); 4] {
        [
            (Self::SIZE, self.size),
            (Self::TX, self.tx),
            (Self::RX, self.rx),
            (Self::IN_FLIGHT, self.in_flight),
        ]
    }

    /// Counts what has no value.
    pub(super) fn skip<S: Sink + ?Sized>(&self, sink: &mut S) {
        for (family, value) in self.values() {
            if let Err(reason) = value {
                sink.skip(family, reason.as_str());
            }
        }
    }
}

/// A pipeline's label values.
#[derive(Debug)]
struct Series {
    scope: Scope,
    /// Made with the first hop.
    scope_id: Option<ScopeId>,
    edges: FxHashMap<(End, End), ExtraId>,
    /// Stages whose outputs a connector moves.
    connected: FxHashSet<u32>,
}

/// A hop of a request, for its record.
#[derive(Debug)]
pub(super) struct RequestHop {
    pub(super) pipeline: PipelineId,
    pub(super) request: Arc<str>,
    pub(super) from: End,
    pub(super) to: End,
    pub(super) connector: Connector,
    pub(super) hop: Hop,
}

/// The edges of all pipelines.
#[derive(Debug, Default)]
pub(super) struct Edges {
    series: FxHashMap<PipelineId, Series>,
    mismatches: u64,
    /// Hops of requests since they were last taken; `None`: nobody wants them.
    pub(super) requests: Option<Vec<RequestHop>>,
}

impl Edges {
    pub(super) fn mismatches(&self) -> u64 {
        self.mismatches
    }

    /// Whether this is a pipeline with stages.
    pub(super) fn knows(&self, pipeline: PipelineId) -> bool {
        self.series.contains_key(&pipeline)
    }

    pub(super) fn has_hops(&self, pipeline: PipelineId) -> bool {
        self.series
            .get(&pipeline)
            .is_some_and(|series| series.scope_id.is_some())
    }

    pub(super) fn pipeline<S: Sink + ?Sized>(&mut self, pipeline: &Pipeline, sink: &mut S) {
        if pipeline.flavor != Flavor::Omni {
            return;
        }
        let scope = Scope::of(pipeline);
        match self.series.get_mut(&pipeline.id) {
            Some(series) if series.scope == scope => {}
            Some(series) => {
                // The model became known: further hops are counted under its name.
                series.scope = scope;
                if let Some(old) = series.scope_id.take() {
                    sink.retire(old);
                }
            }
            None => {
                let series = Series {
                    scope,
                    scope_id: None,
                    edges: FxHashMap::default(),
                    connected: FxHashSet::default(),
                };
                self.series.insert(pipeline.id, series);
            }
        }
    }

    pub(super) fn pipeline_gone<S: Sink + ?Sized>(&mut self, pipeline: PipelineId, sink: &mut S) {
        if let Some(scope) = self.series.remove(&pipeline).and_then(|series| series.scope_id) {
            sink.retire(scope);
        }
    }

    /// A connector moves outputs of this stage.
    pub(super) fn connect(&mut self, pipeline: PipelineId, from_stage: Option<u32>) {
        if let Some(stage) = from_stage
            && let Some(series) = self.series.get_mut(&pipeline)
            && series.connected.len() < MAX_STAGES
        {
            series.connected.insert(stage);
        }
    }

    pub(super) fn is_connected(&self, pipeline: PipelineId, from_stage: u32) -> bool {
        self.series
            .get(&pipeline)
            .is_some_and(|series| series.connected.contains(&from_stage))
    }

    /// The end of an edge at a process's place. The key's own stage stands in where the process's is not known, and
    /// is a cross-check where it is.
    pub(super) fn end(&mut self, place: Place, in_key: Option<u32>) -> Option<End> {
        if let (Some(stage), Some(in_key)) = (place.stage, in_key)
            && stage != in_key
        {
            self.mismatches += 1;
        }
        Some(End {
            stage: place.stage.or(in_key)?,
            replica: place.replica?,
        })
    }

    /// One observation for each value of a hop, which is this request's, where that is known.
    #[expect(clippy::too_many_arguments, reason = "one hop and where it belongs")]
    pub(super) fn observe<S: Sink + ?Sized>(
        &mut self,
        pipeline: PipelineId,
        from: Option<End>,
        to: Option<End>,
        hop: &Hop,
        request: Option<&str>,
        connector: Connector,
        sink: &mut S,
    ) {
        let (Some(from), Some(to)) = (from, to) else {
            Hop::none(Reason::UnknownReplica).skip(sink);
            return;
        };
        let Some(series) = self.series.get_mut(&pipeline) else {
            return;
        };
        if let (Some(requests), Some(request)) = (&mut self.requests, request) {
            requests.push(RequestHop {
                pipeline,
                request: request.into(),
                from,
                to,
                connector,
                hop: *hop,
            });
        }
        let scope = *series.scope_id.get_or_insert_with(|| sink.scope(&series.scope));
        let edge = *series.edges.entry((from, to)).or_insert_with(|| {
            let values = [from.stage, from.replica, to.stage, to.replica].map(|value| value.to_string());
            sink.extra(&values.each_ref().map(String::as_str))
        });
        for (family, value) in hop.values() {
            match value {
                Ok(value) => sink.observe(family, scope, edge, value, 1),
                Err(reason) => sink.skip(family, reason.as_str()),
            }
        }
    }
}
