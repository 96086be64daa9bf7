//! The agent's status as it serves it, and what can be told from several looks at it.

use std::collections::{BTreeMap, VecDeque};

use serde::Deserialize;

use crate::metrics::number::as_f64;

/// Looks that a rate is taken over; they come once a second.
const WINDOW: usize = 15;

/// What `/api/status` gives, as far as it is drawn.
#[derive(Clone, Debug, Deserialize)]
pub struct Document {
    /// The agent's version.
    pub version: String,
    /// Its wall clock.
    pub time_ms: u64,
    /// Why it is not ready; `None`: it is.
    pub not_ready: Option<String>,
    /// How the tap is.
    pub tap: String,
    /// What is wrong, and what to do.
    pub warnings: Vec<Warning>,
    /// What it watches.
    pub pipelines: Vec<Pipeline>,
    /// Samples by family.
    pub families: BTreeMap<String, Vec<Sample>>,
}

/// Something that an operator should know.
#[derive(Clone, Debug, Deserialize)]
pub struct Warning {
    /// What it is.
    pub text: String,
    /// What to do.
    pub remedy: String,
}

/// A pipeline.
#[derive(Clone, Debug, Deserialize)]
pub struct Pipeline {
    /// Its number.
    pub id: u32,
    /// vLLM-Omni or vLLM, with version.
    pub software: String,
    /// Whether it has families of vLLM-Omni's.
    pub omni: bool,
    /// Its model.
    pub model: Option<String>,
    /// The name that the model is served as.
    pub served: Option<String>,
    /// Its root process.
    pub pid: u32,
    /// What the newest read of its own metrics gave.
    pub engine: Option<String>,
    /// Its processes.
    pub processes: Vec<Process>,
}

/// A process of a pipeline.
#[derive(Clone, Debug, Deserialize)]
pub struct Process {
    /// Its id.
    pub pid: u32,
    /// What it does.
    pub role: String,
    /// The stage that it runs.
    pub stage: Option<u32>,
    /// The replica.
    pub replica: Option<u32>,
    /// It has ended, and no other has taken its place.
    pub ended: bool,
    /// By what the probes are for: `None` is on, a text says why not.
    pub probes: BTreeMap<String, Option<String>>,
}

/// A sample of a family.
#[derive(Clone, Debug, Deserialize)]
pub struct Sample {
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Of a counter or gauge.
    #[serde(default)]
    pub value: Option<f64>,
    /// Of a histogram: counts by bucket.
    #[serde(default)]
    pub counts: Vec<u64>,
    /// Of a histogram.
    #[serde(default)]
    pub sum: Option<f64>,
}

/// Labels that a sample has to have.
pub(super) type Labels<'a> = [(&'a str, &'a str)];

impl Document {
    pub(super) fn samples<'a>(
        &'a self,
        family: &str,
        labels: &'a Labels<'a>,
    ) -> impl Iterator<Item = &'a Sample> {
        let fits = |sample: &Sample| {
            labels
                .iter()
                .all(|(name, value)| sample.labels.get(*name).is_some_and(|have| have == value))
        };
        let samples = self.families.get(family).map_or(&[][..], Vec::as_slice);
        samples.iter().filter(move |sample| fits(sample))
    }

    /// The values together; `None` without any.
    pub(super) fn sum(&self, family: &str, labels: &Labels<'_>) -> Option<f64> {
        let values = self.samples(family, labels).filter_map(|sample| sample.value);
        values.reduce(|sum, value| sum + value)
    }

    /// Count and sum of a histogram's observations; `None` without children.
    fn observed(&self, family: &str, labels: &Labels<'_>) -> Option<(u64, f64)> {
        self.samples(family, labels)
            .map(|sample| (sample.counts.iter().sum(), sample.sum.unwrap_or(0.0)))
            .reduce(|(count, sum): (u64, f64), (n, by)| (count.saturating_add(n), sum + by))
    }
}

/// The newest look, and those before it.
#[derive(Clone, Debug, Default)]
pub(super) struct Looks(VecDeque<Document>);

/// What a histogram has been given lately.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Recent {
    /// Observations a second.
    pub(super) rate: Option<f64>,
    /// Mean of the recent ones, else of all.
    pub(super) mean: Option<f64>,
}

impl Looks {
    pub(super) fn push(&mut self, document: Document) {
        // An agent that has started anew counts from 0.
        if self.0.back().is_some_and(|last| document.time_ms < last.time_ms) {
            self.0.clear();
        }
        if self.0.len() > WINDOW {
            self.0.pop_front();
        }
        self.0.push_back(document);
    }

    pub(super) fn last(&self) -> Option<&Document> {
        self.0.back()
    }

    /// The newest look, the oldest one, and the seconds between them.
    fn span(&self) -> Option<(&Document, &Document, f64)> {
        let (last, first) = (self.0.back()?, self.0.front()?);
        let passed_ms = u32::try_from(last.time_ms.saturating_sub(first.time_ms)).ok()?;
        (passed_ms > 0).then(|| (last, first, f64::from(passed_ms) / 1e3))
    }

    /// Growth of a counter in a second.
    pub(super) fn rate(&self, family: &str, labels: &Labels<'_>) -> Option<f64> {
        let (last, first, seconds) = self.span()?;
        let now = last.sum(family, labels)?;
        let then = first.sum(family, labels).unwrap_or(0.0);
        // Where it counts anew.
        Some((now - then).max(0.0) / seconds)
    }

    pub(super) fn recent(&self, family: &str, labels: &Labels<'_>) -> Recent {
        let mean = |count: u64, sum: f64| (count > 0).then(|| sum / as_f64(count));
        let now = self.last().and_then(|last| last.observed(family, labels));
        let all = now.and_then(|(count, sum)| mean(count, sum));
        let (Some((_, first, seconds)), Some((count, sum))) = (self.span(), now) else {
            return Recent {
                rate: None,
                mean: all,
            };
        };
        let (before, sum_before) = first.observed(family, labels).unwrap_or((0, 0.0));
        let new = count.saturating_sub(before);
        Recent {
            rate: Some(as_f64(new) / seconds),
            mean: mean(new, sum - sum_before).or(all),
        }
    }
}
