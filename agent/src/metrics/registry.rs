//! The registry: takes observations from the reader thread and keeps their series alive as long as they should be.

use std::{
    borrow::Cow,
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use rustc_hash::FxHashMap;

use super::{
    catalogue::{Family, Fold, Kind, Row},
    own::{Counter, Own},
    store::{Child, Store, cut},
    text::Exposition,
};
use crate::{
    host::identity::PipelineId,
    pipeline::sink::{ExtraId, Scope, ScopeId, Sink},
};

/// The most sets of further label values (adapters, transfer edges, reasons) that are told apart.
const MAX_EXTRAS: usize = 65_536;

/// Given for a set of values beyond [`MAX_EXTRAS`]: its children are refused.
const EXTRA_OVERFLOW: ExtraId = ExtraId(0xFF_FFFF);

/// How much the registry keeps, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Sample lines of all pipelines together (the agent's own not counted); a child that would exceed it is refused.
    pub max_series: usize,
    /// How long counters and histograms stay after their pipeline ended.
    pub retention: Duration,
}

/// The writer's side of the families. Adding to a known child takes one look-up and no lock.
#[derive(Debug)]
pub struct Registry {
    store: Arc<Store>,
    own: Own,
    retention: Duration,

    scopes: FxHashMap<ScopeId, Scope>,
    scope_ids: HashMap<Scope, ScopeId>,
    next_scope: u32,
    extras: Vec<Arc<[Box<str>]>>,
    extra_ids: HashMap<Arc<[Box<str>]>, ExtraId>,

    slots: FxHashMap<Key, Slot>,
    /// By the child's id: who uses it.
    uses: FxHashMap<u64, Use>,
    /// The present child of a [`Fold::Newest`] family, by scope.
    newest: FxHashMap<(Family, ScopeId), Key>,
    ended: FxHashMap<PipelineId, Instant>,

    skipped: FxHashMap<(Family, &'static str), Counter>,
    refused: Option<Counter>,
}

/// Observations by bucket that came from elsewhere.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BucketCounts {
    /// Observations in the bucket of each upper bound, not cumulated.
    pub by_bound: Vec<(f64, u64)>,
    /// Observations above the last bound.
    pub above: u64,
    /// Sum of all.
    pub sum: f64,
}

/// The value of a child.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reading {
    /// Of a counter or gauge.
    Number(f64),
    /// How many observations a histogram has.
    Observations(u64),
}

/// Family, scope and extra in one word: one multiplication to hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key(u64);

impl Key {
    fn new(family: Family, scope: ScopeId, extra: ExtraId) -> Self {
        debug_assert!(extra.0 <= EXTRA_OVERFLOW.0, "extra ids have 24 bits");
        Self(u64::from(family as u8) << 56 | u64::from(extra.0 & 0xFF_FFFF) << 32 | u64::from(scope.0))
    }

    fn scope(self) -> ScopeId {
        ScopeId(u32::try_from(self.0 & 0xFFFF_FFFF).unwrap_or(0))
    }
}

/// What the writer knows of a key that it has seen.
#[derive(Debug)]
enum Slot {
    Live {
        child: Arc<Child>,
        /// This scope's part of a gauge.
        part: f64,
    },
    /// The cap on series was reached; tried again when children have expired.
    Refused,
    /// A label has no value.
    Unlabelled(&'static str),
}

/// The users of a child.
#[derive(Debug)]
struct Use {
    family: Family,
    child: Arc<Child>,
    /// Pipelines that have written it and whose retention has not ended.
    pipelines: Vec<PipelineId>,
    /// The slots that write it now: more than one when scopes have equal label values.
    keys: Vec<Key>,
}

impl Registry {
    /// An empty registry.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        let store = Arc::new(Store::new(limits.max_series));
        let own = Own::new(Arc::clone(&store));
        let none: Arc<[Box<str>]> = Arc::new([]);
        Self {
            refused: own.counter(Family::OmnitapSeriesRefusedTotal, &[]),
            store,
            own,
            retention: limits.retention,
            scopes: FxHashMap::default(),
            scope_ids: HashMap::new(),
            next_scope: 0,
            extras: vec![Arc::clone(&none)],
            extra_ids: HashMap::from([(none, ExtraId::NONE)]),
            slots: FxHashMap::default(),
            uses: FxHashMap::default(),
            newest: FxHashMap::default(),
            ended: FxHashMap::default(),
            skipped: FxHashMap::default(),
        }
    }

    /// A handle for the agent's own families, for any thread.
    #[must_use]
    pub fn own(&self) -> Own {
        self.own.clone()
    }

    /// A handle that prints all families, for any thread.
    #[must_use]
    pub fn exposition(&self) -> Exposition {
        Exposition::new(Arc::clone(&self.store), self.own.clone())
    }

    /// Adds observations to a histogram. Buckets with other bounds than the child's can't be: they are skipped.
    pub fn add_buckets(&mut self, family: Family, scope: ScopeId, extra: ExtraId, counts: &BucketCounts) {
        if !self.counts(family, counts.sum) {
            return;
        }
        let fits = self.with_child(family, scope, extra, |child| {
            child.histogram().is_some_and(|histogram| histogram.add(counts))
        });
        if fits == Some(false) {
            self.skip(family, "other_buckets");
        }
    }

    /// The value of the child with these labels, if there is one and one pipeline alone has written it.
    #[must_use]
    pub fn reading(&self, family: Family, scope: &Scope, extra: &[&str]) -> Option<Reading> {
        let extra: Vec<Box<str>> = extra.iter().map(|value| Box::from(cut(value))).collect();
        let mut labels = labels(family.row(), scope, &extra).ok()?;
        let child = self.store.existing(family, &mut labels)?;
        let used = self.uses.get(&child.id)?;
        if used.pipelines != [scope.pipeline] {
            return None;
        }
        match (child.number(), child.histogram()) {
            (Some(number), _) => Some(Reading::Number(number.get())),
            (None, Some(histogram)) => Some(Reading::Observations(histogram.counts().sum())),
            (None, None) => None,
        }
    }

    /// The scopes that have a child of a family without further labels, in no order.
    #[must_use]
    pub fn scopes_with(&self, family: Family) -> Vec<Scope> {
        let has_child = |scope: &ScopeId| {
            let slot = self.slots.get(&Key::new(family, *scope, ExtraId::NONE));
            matches!(slot, Some(Slot::Live { .. }))
        };
        self.scopes
            .iter()
            .filter(|(id, _)| has_child(id))
            .map(|(_, scope)| scope.clone())
            .collect()
    }

    /// Every process of a pipeline has ended: its gauges go, and retention begins for the rest.
    pub fn pipeline_ended(&mut self, pipeline: PipelineId, now: Instant) {
        self.ended.insert(pipeline, now);
        let of_pipeline = |scope: ScopeId| self.scopes.get(&scope).is_some_and(|s| s.pipeline == pipeline);
        let gauges: Vec<Key> = self
            .uses
            .values()
            .filter(|u| matches!(u.family.row().kind, Kind::Gauge(_)))
            .flat_map(|u| u.keys.iter().copied())
            .filter(|k| of_pipeline(k.scope()))
            .collect();
        for key in gauges {
            self.unbind(key);
        }
        self.own.remove_pipeline(pipeline);
    }

    /// The pipeline of a scope.
    pub(super) fn pipeline_of(&self, scope: ScopeId) -> Option<PipelineId> {
        self.scopes.get(&scope).map(|scope| scope.pipeline)
    }

    /// Removes a pipeline's part of a gauge; of other families nothing.
    pub(super) fn drop_gauge(&mut self, pipeline: PipelineId, family: Family) {
        if !matches!(family.row().kind, Kind::Gauge(_)) {
            return;
        }
        let keys: Vec<Key> = self
            .uses
            .values()
            .filter(|used| used.family == family)
            .flat_map(|used| used.keys.iter().copied())
            .filter(|key| self.pipeline_of(key.scope()) == Some(pipeline))
            .collect();
        for key in keys {
            self.unbind(key);
        }
    }

    /// Removes what has outlived its retention. To be called every few seconds; cheap when there is nothing to do.
    pub fn expire(&mut self, now: Instant) {
        let over: Vec<PipelineId> = self
            .ended
            .iter()
            .filter(|(_, at)| now.saturating_duration_since(**at) >= self.retention)
            .map(|(pipeline, _)| *pipeline)
            .collect();
        if over.is_empty() {
            return;
        }
        let scopes: Vec<ScopeId> = self
            .scopes
            .iter()
            .filter(|(_, s)| over.contains(&s.pipeline))
            .map(|(id, _)| *id)
            .collect();
        for scope in scopes {
            self.retire(scope);
        }
        let store = &self.store;
        self.uses.retain(|_, used| {
            used.pipelines.retain(|p| !over.contains(p));
            let stays = !used.pipelines.is_empty();
            if !stays {
                store.remove(used.family, &used.child);
            }
            stays
        });
        for pipeline in &over {
            self.ended.remove(pipeline);
        }
        // There is room again.
        self.slots.retain(|_, slot| !matches!(slot, Slot::Refused));
    }

    /// Gives the child of a key to `f`, made and bound to its users at the first call. Where there can be none,
    /// there is no sample, and that is counted.
    fn with_child<T>(
        &mut self,
        family: Family,
        scope: ScopeId,
        extra: ExtraId,
        f: impl FnOnce(&Child) -> T,
    ) -> Option<T> {
        let key = Key::new(family, scope, extra);
        if let Some(Slot::Live { child, .. }) = self.slots.get(&key) {
            return Some(f(child));
        }
        if !self.slots.contains_key(&key) {
            self.bind(family, key, extra);
        }
        let reason = match self.slots.get(&key) {
            Some(Slot::Live { child, .. }) => return Some(f(child)),
            Some(Slot::Refused) => return None,
            Some(Slot::Unlabelled(reason)) => reason,
            None => "unknown_scope",
        };
        self.skip(family, reason);
        None
    }

    fn bind(&mut self, family: Family, key: Key, extra: ExtraId) {
        let Some(scope) = self.scopes.get(&key.scope()) else {
            return;
        };
        let Some(values) = self.extras.get(extra.0 as usize) else {
            self.refuse(key);
            return;
        };
        let row = family.row();
        let child = match labels(row, scope, values) {
            Ok(mut labels) => self.store.child(family, &mut labels, scope.max_model_len),
            Err(reason) => {
                self.slots.insert(key, Slot::Unlabelled(reason));
                return;
            }
        };
        let Some(child) = child else {
            self.refuse(key);
            return;
        };
        let used = self.uses.entry(child.id).or_insert_with(|| Use {
            family,
            child: Arc::clone(&child),
            pipelines: Vec::new(),
            keys: Vec::new(),
        });
        if !used.pipelines.contains(&scope.pipeline) {
            used.pipelines.push(scope.pipeline);
        }
        used.keys.push(key);
        let part = 0.0;
        self.slots.insert(key, Slot::Live { child, part });
    }

    fn refuse(&mut self, key: Key) {
        self.slots.insert(key, Slot::Refused);
        if let Some(refused) = &self.refused {
            refused.add(1.0);
        }
    }

    /// Forgets a slot; a gauge loses its part, and its child goes with the last part.
    fn unbind(&mut self, key: Key) {
        let Some(Slot::Live { child, .. }) = self.slots.remove(&key) else {
            return;
        };
        let Some(used) = self.uses.get_mut(&child.id) else {
            return;
        };
        used.keys.retain(|k| *k != key);
        let family = used.family;
        if let Kind::Gauge(fold) = family.row().kind {
            if used.keys.is_empty() {
                self.store.remove(family, &child);
                self.uses.remove(&child.id);
            } else {
                self.fold(child.id, fold);
            }
        }
        if self.newest.get(&(family, key.scope())) == Some(&key) {
            self.newest.remove(&(family, key.scope()));
        }
    }

    /// Makes a gauge of its parts.
    fn fold(&self, child: u64, fold: Fold) {
        let Some(used) = self.uses.get(&child) else { return };
        let parts = used.keys.iter().filter_map(|k| match self.slots.get(k) {
            Some(Slot::Live { part, .. }) => Some(*part),
            _ => None,
        });
        let value = match fold {
            Fold::Sum => parts.sum(),
            Fold::Max | Fold::Newest => parts.reduce(f64::max).unwrap_or(0.0),
        };
        if let Some(number) = used.child.number() {
            number.set(value);
        }
    }

    /// Whether a value may enter a counter or histogram, which would keep a wrong one for good.
    fn counts(&mut self, family: Family, value: f64) -> bool {
        let reason = if !value.is_finite() {
            "not_finite"
        } else if value < 0.0 {
            "negative"
        } else {
            return true;
        };
        self.skip(family, reason);
        false
    }
}

impl Sink for Registry {
    fn scope(&mut self, scope: &Scope) -> ScopeId {
        if let Some(id) = self.scope_ids.get(scope) {
            return *id;
        }
        let id = ScopeId(self.next_scope);
        self.next_scope = self.next_scope.wrapping_add(1);
        self.scopes.insert(id, scope.clone());
        self.scope_ids.insert(scope.clone(), id);
        id
    }

    fn extra(&mut self, values: &[&str]) -> ExtraId {
        let values: Arc<[Box<str>]> = values.iter().map(|v| Box::from(cut(v))).collect();
        if let Some(id) = self.extra_ids.get(&values) {
            return *id;
        }
        if self.extras.len() >= MAX_EXTRAS {
            return EXTRA_OVERFLOW;
        }
        let id = ExtraId(u32::try_from(self.extras.len()).unwrap_or(EXTRA_OVERFLOW.0));
        self.extras.push(Arc::clone(&values));
        self.extra_ids.insert(values, id);
        id
    }

    fn add(&mut self, family: Family, scope: ScopeId, extra: ExtraId, by: f64) {
        if self.counts(family, by) {
            self.with_child(family, scope, extra, |child| {
                if let Some(number) = child.number() {
                    number.add(by);
                }
            });
        }
    }

    fn observe(&mut self, family: Family, scope: ScopeId, extra: ExtraId, value: f64, times: u64) {
        if self.counts(family, value) {
            self.with_child(family, scope, extra, |child| {
                if let Some(histogram) = child.histogram() {
                    histogram.observe(value, times);
                }
            });
        }
    }

    fn set(&mut self, family: Family, scope: ScopeId, extra: ExtraId, value: f64) {
        if value.is_nan() {
            self.skip(family, "not_finite");
            return;
        }
        let Kind::Gauge(fold) = family.row().kind else {
            debug_assert!(false, "{} is no gauge", family.name());
            return;
        };
        let key = Key::new(family, scope, extra);
        let Some(id) = self.with_child(family, scope, extra, |child| child.id) else {
            return;
        };
        if let Some(Slot::Live { part, .. }) = self.slots.get_mut(&key) {
            *part = value;
        }
        if fold == Fold::Newest
            && let Some(old) = self.newest.insert((family, scope), key)
            && old != key
        {
            self.unbind(old);
        }
        self.fold(id, fold);
    }

    fn skip(&mut self, family: Family, reason: &'static str) {
        if let Some(counter) = self.skipped.get(&(family, reason)) {
            counter.add(1.0);
        } else if let Some(counter) = self
            .own
            .counter(Family::OmnitapSamplesSkippedTotal, &[family.name(), reason])
        {
            counter.add(1.0);
            self.skipped.insert((family, reason), counter);
        }
    }

    fn retire(&mut self, scope: ScopeId) {
        let keys: Vec<Key> = self
            .slots
            .keys()
            .copied()
            .filter(|k| k.scope() == scope)
            .collect();
        for key in keys {
            self.unbind(key);
        }
        if let Some(scope) = self.scopes.remove(&scope) {
            self.scope_ids.remove(&scope);
        }
    }
}

/// A family's labels with their values, or why one is missing.
fn labels<'a>(
    row: &Row,
    scope: &'a Scope,
    extra: &'a [Box<str>],
) -> Result<Vec<(&'static str, Cow<'a, str>)>, &'static str> {
    let mut extra = extra.iter();
    let number = |n: Option<u32>, reason| n.map(|n| Cow::Owned(n.to_string())).ok_or(reason);
    let labels = row.labels.iter().map(|name| {
        let value = match *name {
            "model_name" => {
                let model = if row.uses_served_model() {
                    &scope.served_model
                } else {
                    &scope.model
                };
                if model.is_empty() {
                    return Err("no_model");
                }
                Cow::Borrowed(model.as_str())
            }
            "stage" => number(scope.stage, "no_stage")?,
            "replica" => number(scope.replica, "no_replica")?,
            _ => Cow::Borrowed(&**extra.next().ok_or("no_label_value")?),
        };
        Ok((*name, value))
    });
    labels.collect()
}
