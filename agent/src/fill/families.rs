//! From reads of an engine's `/metrics` to families: what has come since the last read, and where the two disagree.
//!
//! Only what nobody else gives is passed on: families that the agent's other sources can't give, and those of the wire
//! for pipelines of which no frame is seen. Precedence among sources ([`crate::metrics::merge`]) does the rest. What a
//! read adds to counters and histograms is passed on with the next read: by then other sources have told what they saw
//! of that time, and hold their families.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::sample::{Buckets, EngineChild, EngineSample, Failure, Outcome, Value};
use crate::{
    host::identity::{Pipeline, PipelineId},
    metrics::{
        catalogue::{Family, Fold, Kind, Source},
        merge::{Feed, Ledger, Merge, Merged, NoRequests},
        number::as_f64,
        registry::{BucketCounts, Reading, Registry},
    },
    pipeline::sink::{Scope, Sink as _},
};

/// An engine whose reads fail this often in a row gives nothing any more: its gauges go.
const FAILURES: u32 = 3;

/// Children of a pipeline that are remembered; an engine has some hundred.
const MAX_CHILDREN: usize = 20_000;

/// Differences that don't count: less than a hundredth, or a single unit of a counter.
const TOLERANCE: f64 = 0.01;
const UNIT: f64 = 1.0;

/// Families whose values in the engine's `/metrics` mean nothing (docs/parity.md).
fn is_hollow(family: Family) -> bool {
    family.name().starts_with("vllm_omni:transfer_")
}

/// Which child of a family.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Key {
    family: Family,
    stage: Option<u32>,
    replica: Option<u32>,
    extra: Vec<String>,
}

/// A child as it was read last.
#[derive(Debug)]
struct Known {
    value: Value,
    /// It has been other than 0 once: before that, 0 may stand for "not measured".
    measured: bool,
    /// What the last read added and is not yet passed on.
    pending: Option<Value>,
    compared: Compared,
}

/// Both sides of a comparison, as one number each.
#[derive(Debug, Default)]
struct Compared {
    /// At the last read: the engine's and ours.
    last: Option<(f64, f64)>,
    /// At the first rest.
    base: Option<(f64, f64)>,
    differs: bool,
}

impl Compared {
    /// Takes the values of a read; whether they differ is told while both rest.
    fn take(&mut self, theirs: f64, ours: Option<f64>, is_gauge: bool) {
        let Some(ours) = ours else {
            *self = Self::default();
            return;
        };
        let now = (theirs, ours);
        if self.last.replace(now) != Some(now) {
            return;
        }
        // Counters may have begun at different times: what they have gained since a rest is compared.
        let base = if is_gauge {
            (0.0, 0.0)
        } else {
            *self.base.get_or_insert(now)
        };
        let (theirs, ours) = (theirs - base.0, ours - base.1);
        if theirs < 0.0 || ours < 0.0 {
            self.base = Some(now);
            self.differs = false;
            return;
        }
        let unit = if is_gauge { 0.0 } else { UNIT };
        self.differs = (theirs - ours).abs() > unit.max(TOLERANCE * theirs.abs().max(ours.abs()));
    }
}

#[derive(Debug, Default)]
struct Engine {
    children: HashMap<Key, Known>,
    failures: u32,
    read: bool,
    /// Families whose disagreement is shown.
    shown: BTreeSet<Family>,
}

/// What is known of the engines' own metrics.
#[derive(Debug, Default)]
pub struct Fill {
    engines: BTreeMap<PipelineId, Engine>,
}

/// Where the values go, and what else is known.
pub struct Target<'a> {
    /// The families.
    pub registry: &'a mut Registry,
    /// Who serves which.
    pub merge: &'a mut Merge,
    /// The pipeline.
    pub pipeline: &'a Pipeline,
    /// Frames of the pipeline have been seen: the tap gives the wire's families.
    pub has_frames: bool,
    /// The requests that the tap knows.
    pub ledger: &'a dyn Ledger,
}

impl Fill {
    /// Takes a read.
    pub fn sample(&mut self, sample: &EngineSample, target: Target<'_>) {
        let id = target.pipeline.id;
        let own = target.registry.own();
        let engine = self.engines.entry(id).or_default();
        match &sample.outcome {
            Outcome::Read(children) => {
                own.add(Family::OmnitapEngineReadsTotal, &["ok"], 1.0);
                engine.failures = 0;
                engine.take(children, sample.is_fresh, target);
            }
            Outcome::Failed(failure) => {
                own.add(Family::OmnitapEngineReadsTotal, &[failure.as_str()], 1.0);
                engine.failures = engine.failures.saturating_add(1);
                // A server that is not up yet has given nothing to take away.
                if engine.read && engine.failures == FAILURES {
                    let ledgers = (&NoRequests as &dyn Ledger, target.ledger);
                    target.merge.depart(id, Feed::Engine, ledgers, target.registry);
                    engine.hide(id, target.registry);
                }
                if *failure == Failure::NotFound {
                    // Its statistics may be switched off: nothing to compare with.
                    engine.hide(id, target.registry);
                }
            }
        }
    }

    /// A pipeline has ended.
    pub fn forget(&mut self, pipeline: PipelineId, registry: &Registry) {
        if let Some(mut engine) = self.engines.remove(&pipeline) {
            engine.hide(pipeline, registry);
        }
    }
}

impl Engine {
    fn hide(&mut self, pipeline: PipelineId, registry: &Registry) {
        let own = registry.own();
        for family in std::mem::take(&mut self.shown) {
            own.remove(
                Family::OmnitapEngineDisagreement,
                &[&pipeline.0.to_string(), family.name()],
            );
        }
    }

    fn take(&mut self, children: &[EngineChild], is_fresh: bool, target: Target<'_>) {
        let Target {
            registry,
            merge,
            pipeline,
            has_frames,
            ledger: _,
        } = target;
        let is_first = !std::mem::replace(&mut self.read, true);
        let mut now: HashMap<Key, Value> = HashMap::new();
        for child in children {
            match key(child) {
                // Several processes of one API server give a child each: they are one.
                Ok(key) if now.len() < MAX_CHILDREN => {
                    let family = key.family;
                    now.entry(key)
                        .and_modify(|value| join(value, &child.value, family))
                        .or_insert_with(|| child.value.clone());
                }
                Ok(_) => {}
                Err((family, reason)) => registry.skip(family, reason),
            }
        }
        let mut sink = Merged::new(registry, merge, Feed::Engine, &NoRequests);
        for (key, value) in &now {
            // A first read is where counting starts, unless all of it has come about since the agent is here.
            let known = self.children.entry(key.clone()).or_insert_with(|| Known {
                value: if is_first && !is_fresh {
                    value.clone()
                } else {
                    zero(value)
                },
                measured: false,
                pending: None,
                compared: Compared::default(),
            });
            let pending = known.pending.take();
            let gained = gain(&known.value, value);
            known.value = value.clone();
            known.measured |= !is_zero(value);
            if !passes(key.family, has_frames) || !known.measured {
                continue;
            }
            let scope = sink.scope(&scope(pipeline, key, value));
            let extra: Vec<&str> = key.extra.iter().map(String::as_str).collect();
            let extra = sink.extra(&extra);
            match (key.family.row().kind, value, pending) {
                (Kind::Gauge(_), Value::Number(number), _) => sink.set(key.family, scope, extra, *number),
                (Kind::Counter, _, Some(Value::Number(by))) => sink.add(key.family, scope, extra, by),
                (Kind::Histogram(_), _, Some(Value::Histogram(buckets))) => {
                    sink.add_buckets(key.family, scope, extra, &counts(&buckets));
                }
                _ => {}
            }
            known.pending = Some(gained);
        }
        // A child that is no longer exposed has no value.
        self.children.retain(|key, _| now.contains_key(key));
        self.compare(pipeline, merge, registry);
    }

    /// Compares what both have.
    fn compare(&mut self, pipeline: &Pipeline, merge: &Merge, registry: &Registry) {
        let mut differing: BTreeMap<Family, u32> = BTreeMap::new();
        for (key, known) in &mut self.children {
            if is_hollow(key.family)
                || merge
                    .holder(pipeline.id, key.family)
                    .is_none_or(|f| f == Feed::Engine)
            {
                known.compared = Compared::default();
                continue;
            }
            let extra: Vec<&str> = key.extra.iter().map(String::as_str).collect();
            let ours = registry.reading(key.family, &scope(pipeline, key, &known.value), &extra);
            let is_gauge = matches!(key.family.row().kind, Kind::Gauge(_));
            let (theirs, ours) = match (&known.value, ours) {
                (Value::Number(theirs), Some(Reading::Number(ours))) => (*theirs, Some(ours)),
                (Value::Histogram(theirs), Some(Reading::Observations(ours))) => {
                    (as_f64(theirs.count), Some(as_f64(ours)))
                }
                _ => (0.0, None),
            };
            known.compared.take(theirs, ours, is_gauge);
            if known.compared.last.is_some() {
                *differing.entry(key.family).or_default() += u32::from(known.compared.differs);
            }
        }
        let own = registry.own();
        let label = pipeline.id.0.to_string();
        for family in &self.shown {
            if !differing.contains_key(family) {
                own.remove(Family::OmnitapEngineDisagreement, &[&label, family.name()]);
            }
        }
        for (family, count) in &differing {
            own.set(
                Family::OmnitapEngineDisagreement,
                &[&label, family.name()],
                f64::from(*count),
            );
        }
        self.shown = differing.into_keys().collect();
    }
}

/// Whether a family may be passed on at all.
fn passes(family: Family, has_frames: bool) -> bool {
    match family.row().source {
        Source::Engine | Source::StatSocket | Source::Http | Source::Diffusion => true,
        Source::Wire => !has_frames,
        Source::Transfer | Source::Nvml | Source::Own => false,
    }
}

/// Which child an exposed one is.
fn key(child: &EngineChild) -> Result<Key, (Family, &'static str)> {
    let family = Family::ALL
        .iter()
        .copied()
        .find(|family| family.name() == child.family)
        .ok_or((Family::OmnitapEngineReadsTotal, "unknown_family"))?;
    let label = |name: &str| {
        let labels = child.labels.iter();
        labels
            .clone()
            .find(|(label, _)| label == name)
            .map(|(_, value)| value.as_str())
    };
    let number = |name: &str| label(name).and_then(|value| value.parse().ok());
    let row = family.row();
    let has = |name: &str| row.labels.contains(&name);
    // Plain vLLM has the data-parallel rank instead.
    let (stage, replica) = match number("engine") {
        Some(rank) => (Some(0), Some(rank)),
        None => (number("stage"), number("replica")),
    };
    if has("stage") && stage.is_none() {
        return Err((family, "no_stage"));
    }
    if has("replica") && replica.is_none() {
        return Err((family, "no_replica"));
    }
    let extra: Option<Vec<String>> = row
        .extra_labels()
        .map(|name| label(name).map(str::to_owned))
        .collect();
    Ok(Key {
        family,
        stage: stage.filter(|_| has("stage")),
        replica: replica.filter(|_| has("replica")),
        extra: extra.ok_or((family, "no_label_value"))?,
    })
}

fn scope(pipeline: &Pipeline, key: &Key, value: &Value) -> Scope {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a bound of token buckets, cut off at the type's limits"
    )]
    let longest = match value {
        Value::Histogram(buckets) => buckets.up_to.last().map(|(bound, _)| *bound as u32),
        Value::Number(_) => None,
    };
    Scope {
        pipeline: pipeline.id,
        model: pipeline.model.clone().unwrap_or_default(),
        served_model: pipeline.served_model.clone().unwrap_or_default(),
        stage: key.stage,
        replica: key.replica,
        // Token buckets end where the engine's end.
        max_model_len: longest,
    }
}

fn zero(value: &Value) -> Value {
    match value {
        Value::Number(_) => Value::Number(0.0),
        Value::Histogram(buckets) => Value::Histogram(Buckets {
            up_to: buckets.up_to.iter().map(|(bound, _)| (*bound, 0)).collect(),
            count: 0,
            sum: 0.0,
        }),
    }
}

fn is_zero(value: &Value) -> bool {
    match value {
        Value::Number(number) => *number == 0.0,
        Value::Histogram(buckets) => buckets.count == 0,
    }
}

/// What has come between two reads. A value that went down began anew.
fn gain(old: &Value, new: &Value) -> Value {
    match (old, new) {
        (Value::Number(old), Value::Number(new)) => Value::Number(if new >= old { new - old } else { *new }),
        (Value::Histogram(old), Value::Histogram(new)) => {
            let bounds = |b: &Buckets| {
                b.up_to
                    .iter()
                    .map(|(bound, _)| bound.to_bits())
                    .collect::<Vec<_>>()
            };
            let below = old.up_to.iter().zip(&new.up_to).any(|(old, new)| new.1 < old.1);
            if new.count < old.count || below || bounds(old) != bounds(new) {
                return Value::Histogram(new.clone());
            }
            let up_to = old.up_to.iter().zip(&new.up_to);
            Value::Histogram(Buckets {
                up_to: up_to.map(|(old, new)| (new.0, new.1 - old.1)).collect(),
                count: new.count - old.count,
                sum: (new.sum - old.sum).max(0.0),
            })
        }
        (_, new) => new.clone(),
    }
}

/// Adds a child of another process of the same server.
fn join(value: &mut Value, other: &Value, family: Family) {
    match (value, other) {
        (Value::Number(number), Value::Number(other)) => {
            *number = match family.row().kind {
                Kind::Gauge(Fold::Max) => number.max(*other),
                _ => *number + other,
            };
        }
        (Value::Histogram(buckets), Value::Histogram(other)) if buckets.up_to.len() == other.up_to.len() => {
            for (bucket, other) in buckets.up_to.iter_mut().zip(&other.up_to) {
                bucket.1 = bucket.1.saturating_add(other.1);
            }
            buckets.count = buckets.count.saturating_add(other.count);
            buckets.sum += other.sum;
        }
        _ => {}
    }
}

/// Observations by bucket, no longer cumulated.
fn counts(buckets: &Buckets) -> BucketCounts {
    let mut below = 0;
    let by_bound = buckets
        .up_to
        .iter()
        .map(|(bound, up_to)| {
            let count = up_to.saturating_sub(below);
            below = *up_to;
            (*bound, count)
        })
        .collect();
    BucketCounts {
        by_bound,
        above: buckets.count.saturating_sub(below),
        sum: buckets.sum,
    }
}
