//! Where observations go: the registry in the agent, a list in tests.

use crate::{
    host::identity::{Pipeline, PipelineId},
    metrics::catalogue::Family,
};

/// Model name where neither the command line nor the configuration tells it.
const UNKNOWN_MODEL: &str = "unknown";

/// The label values that a group of series shares. The registry picks those that a family has.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Scope {
    /// Pipeline, for retention; not a label.
    pub pipeline: PipelineId,
    /// `model_name` of `vllm_omni:*`.
    pub model: String,
    /// `model_name` of `vllm:*`.
    pub served_model: String,
    /// `stage`; `None` for series of the whole pipeline.
    pub stage: Option<u32>,
    /// `replica`.
    pub replica: Option<u32>,
    /// Largest sequence in tokens, where known: decides the `TOKENS` buckets.
    pub max_model_len: Option<u32>,
}

impl Scope {
    /// Of the series of a whole pipeline.
    pub(super) fn of(pipeline: &Pipeline) -> Self {
        let either = |a: &Option<String>, b: &Option<String>| {
            let known = a.as_deref().or(b.as_deref());
            known.unwrap_or(UNKNOWN_MODEL).to_owned()
        };
        Self {
            pipeline: pipeline.id,
            model: either(&pipeline.model, &pipeline.served_model),
            served_model: either(&pipeline.served_model, &pipeline.model),
            stage: None,
            replica: None,
            max_model_len: None,
        }
    }
}

/// An interned [`Scope`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ScopeId(pub u32);

/// Interned values of a family's labels beyond those of its scope, in the order of the catalogue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExtraId(pub u32);

impl ExtraId {
    /// A family without further labels.
    pub const NONE: Self = Self(0);
}

/// A request, as the source of its samples knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subject<'a> {
    /// Its pipeline.
    pub pipeline: PipelineId,
    /// Its id, the same for all sources (docs/wire.md section "Ids").
    pub request: &'a str,
    /// Its number among the pipeline's requests that this source got to know.
    pub serial: u32,
}

/// Takes observations. Two scopes with equal label values share their counters and histograms; their gauges add up.
pub trait Sink {
    /// Interns a scope; the same value gives the same id until it is retired.
    fn scope(&mut self, scope: &Scope) -> ScopeId;
    /// Interns the values of further labels; cheap enough for start-up and rare events, not for each token.
    fn extra(&mut self, values: &[&str]) -> ExtraId;
    /// The samples to come are about this request, until the next call; at first they are about none. Where several
    /// sources have the same families, this tells a request that is under way while they take turns.
    fn about(&mut self, _: Option<Subject<'_>>) {}
    /// Adds to a counter. `by` of 0 creates the child.
    fn add(&mut self, family: Family, scope: ScopeId, extra: ExtraId, by: f64);
    /// Observes a value `times` times in a histogram. `times` of 0 creates the child.
    fn observe(&mut self, family: Family, scope: ScopeId, extra: ExtraId, value: f64, times: u64);
    /// Sets this scope's part of a gauge.
    fn set(&mut self, family: Family, scope: ScopeId, extra: ExtraId, value: f64);
    /// A measurement that could not become a sample, by reason (`omnitap_samples_skipped_total`).
    fn skip(&mut self, family: Family, reason: &'static str);
    /// The process behind a scope is gone: its gauges go with it, its other children stay for retention.
    fn retire(&mut self, scope: ScopeId);
}
