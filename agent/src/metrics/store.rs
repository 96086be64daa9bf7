//! The children of all families as writers and scrapes share them.
//!
//! Values are atomics: a write takes no lock. The list of a family's children has a lock that is taken for writing
//! only when a child comes or goes, and for reading while one family is printed.
//!
//! The cells are not those of a metrics library: those keep name, help and labels in every child (the catalogue
//! has them once), allocate to be read, and can't count `n` equal observations in one step, which the wire asks
//! for (a step may tell of many tokens at once, and that number comes from outside).

use std::{
    borrow::Cow,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
};

use parking_lot::RwLock;

use super::{
    catalogue::{Family, Kind},
    registry::BucketCounts,
};

/// The longest label value in bytes; what exceeds it is cut off. Names come from other containers.
pub(super) const MAX_LABEL_BYTES: usize = 256;

/// A float that many threads may add to.
#[derive(Debug, Default)]
pub(super) struct AtomicF64(AtomicU64);

impl AtomicF64 {
    pub(super) fn get(&self) -> f64 {
        f64::from_bits(self.0.load(Relaxed))
    }

    pub(super) fn set(&self, value: f64) {
        self.0.store(value.to_bits(), Relaxed);
    }

    pub(super) fn add(&self, by: f64) {
        self.update(|old| old + by);
    }

    /// Sets, unless it would go down.
    pub(super) fn raise(&self, to: f64) {
        self.update(|old| old.max(to));
    }

    fn update(&self, new: impl Fn(f64) -> f64) {
        let mut old = self.0.load(Relaxed);
        while let Err(now) =
            self.0
                .compare_exchange_weak(old, new(f64::from_bits(old)).to_bits(), Relaxed, Relaxed)
        {
            old = now;
        }
    }
}

/// Observations by bucket. The number of observations is the sum of the buckets, so that a scrape always prints a
/// `_count` equal to its `+Inf` bucket; `_sum` may lag by an observation that is being made, as in the engine.
#[derive(Debug)]
pub(super) struct Histogram {
    bounds: &'static [f64],
    /// One for each bound, and `+Inf`.
    counts: Box<[AtomicU64]>,
    sum: AtomicF64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        Self {
            bounds,
            counts: (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect(),
            sum: AtomicF64::default(),
        }
    }

    pub(super) fn observe(&self, value: f64, times: u64) {
        let bucket = self.bounds.partition_point(|b| *b < value);
        if let Some(count) = self.counts.get(bucket) {
            count.fetch_add(times, Relaxed);
        }
        #[expect(
            clippy::cast_precision_loss,
            reason = "a sum is a float: exact below 2^53 observations"
        )]
        self.sum.add(value * times as f64);
    }

    /// Adds observations by bucket; `false`, and nothing added, where the bounds are others.
    pub(super) fn add(&self, counts: &BucketCounts) -> bool {
        let is_same = |(a, b): (&f64, &(f64, u64))| a.to_bits() == b.0.to_bits();
        // Fewer bounds do where nothing lies above them.
        let fits = counts.by_bound.len() == self.bounds.len()
            || (counts.by_bound.len() < self.bounds.len() && counts.above == 0);
        if !fits || !self.bounds.iter().zip(&counts.by_bound).all(is_same) {
            return false;
        }
        for (count, (_, more)) in self.counts.iter().zip(&counts.by_bound) {
            count.fetch_add(*more, Relaxed);
        }
        if let Some(count) = self.counts.last() {
            count.fetch_add(counts.above, Relaxed);
        }
        self.sum.add(counts.sum);
        true
    }

    /// Counts of the buckets, not yet cumulated, `+Inf` last.
    pub(super) fn counts(&self) -> impl Iterator<Item = u64> {
        self.counts.iter().map(|c| c.load(Relaxed))
    }

    pub(super) fn sum(&self) -> f64 {
        self.sum.get()
    }
}

/// The value of a child.
#[derive(Debug)]
pub(super) enum Value {
    Number(AtomicF64),
    Histogram(Histogram),
}

/// One labelled child of a family.
#[derive(Debug)]
pub(super) struct Child {
    /// Unique while the agent runs.
    pub(super) id: u64,
    /// `a="x",b="y"`, names in alphabetical order, values escaped.
    pub(super) labels: Box<str>,
    /// Where in `labels` a label `le` belongs.
    pub(super) le_at: usize,
    pub(super) value: Value,
}

impl Child {
    /// The number of a counter or gauge.
    pub(super) fn number(&self) -> Option<&AtomicF64> {
        match &self.value {
            Value::Number(number) => Some(number),
            Value::Histogram(_) => None,
        }
    }

    pub(super) fn histogram(&self) -> Option<&Histogram> {
        match &self.value {
            Value::Histogram(histogram) => Some(histogram),
            Value::Number(_) => None,
        }
    }

    /// Sample lines that it prints.
    fn lines(&self) -> usize {
        match &self.value {
            Value::Number(_) => 1,
            Value::Histogram(histogram) => histogram.counts.len() + 2,
        }
    }
}

/// All children.
#[derive(Debug)]
pub(super) struct Store {
    /// By family, in the order of the catalogue; each sorted by label text.
    families: Vec<RwLock<Vec<Arc<Child>>>>,
    next_id: AtomicU64,
    /// Sample lines of the pipelines' families.
    lines: AtomicUsize,
    /// Sample lines of the agent's own families: bounded by their labels, and free of the cap, which they tell of.
    own_lines: AtomicUsize,
    max_lines: usize,
}

impl Store {
    pub(super) fn new(max_lines: usize) -> Self {
        Self {
            families: Family::ALL.iter().map(|_| RwLock::default()).collect(),
            next_id: AtomicU64::new(0),
            lines: AtomicUsize::new(0),
            own_lines: AtomicUsize::new(0),
            max_lines,
        }
    }

    /// Sample lines now.
    pub(super) fn lines(&self) -> usize {
        self.lines.load(Relaxed) + self.own_lines.load(Relaxed)
    }

    /// The child with these labels, made if there is none. `None`: it would exceed the cap on series.
    pub(super) fn child(
        &self,
        family: Family,
        labels: &mut [(&str, Cow<'_, str>)],
        max_model_len: Option<u32>,
    ) -> Option<Arc<Child>> {
        let (text, le_at) = label_text(labels);
        if let Some(child) = self.find(family, &text) {
            return Some(child);
        }
        let value = match family.row().kind {
            Kind::Counter | Kind::Gauge(_) => Value::Number(AtomicF64::default()),
            Kind::Histogram(buckets) => Value::Histogram(Histogram::new(buckets.bounds(max_model_len))),
        };
        let child = Arc::new(Child {
            id: self.next_id.fetch_add(1, Relaxed),
            labels: text.into_boxed_str(),
            le_at,
            value,
        });
        let lines = child.lines();
        if !family.row().is_own() && self.lines.load(Relaxed) + lines > self.max_lines {
            return None;
        }
        let mut children = self.list(family)?.write();
        match position(&children, &child.labels) {
            // Another thread was first.
            Ok(at) => children.get(at).map(Arc::clone),
            Err(at) => {
                children.insert(at, Arc::clone(&child));
                self.total(family).fetch_add(lines, Relaxed);
                Some(child)
            }
        }
    }

    /// The child with these labels, if there is one.
    pub(super) fn existing(&self, family: Family, labels: &mut [(&str, Cow<'_, str>)]) -> Option<Arc<Child>> {
        let (text, _) = label_text(labels);
        self.find(family, &text)
    }

    /// Removes a child; writers that still hold it write into the void.
    pub(super) fn remove(&self, family: Family, child: &Child) {
        self.remove_if(family, |c| c.id == child.id);
    }

    pub(super) fn remove_if(&self, family: Family, gone: impl Fn(&Child) -> bool) {
        let Some(list) = self.list(family) else { return };
        let mut children = list.write();
        children.retain(|c| {
            let gone = gone(c);
            if gone {
                self.total(family).fetch_sub(c.lines(), Relaxed);
            }
            !gone
        });
        // A family may have had thousands of children for a short time.
        if children.capacity() > 2 * children.len() + 16 {
            children.shrink_to_fit();
        }
    }

    /// Calls `f` with the children of a family, while none can come or go.
    pub(super) fn with_children(&self, family: Family, f: impl FnOnce(&[Arc<Child>])) {
        if let Some(list) = self.list(family) {
            f(&list.read());
        }
    }

    fn total(&self, family: Family) -> &AtomicUsize {
        if family.row().is_own() {
            &self.own_lines
        } else {
            &self.lines
        }
    }

    fn find(&self, family: Family, labels: &str) -> Option<Arc<Child>> {
        let children = self.list(family)?.read();
        let at = position(&children, labels).ok()?;
        children.get(at).map(Arc::clone)
    }

    fn list(&self, family: Family) -> Option<&RwLock<Vec<Arc<Child>>>> {
        self.families.get(family as usize)
    }
}

fn position(children: &[Arc<Child>], labels: &str) -> Result<usize, usize> {
    children.binary_search_by(|c| (*c.labels).cmp(labels))
}

/// Sorts the labels by name and returns their text, and the place of `le` among them.
fn label_text(labels: &mut [(&str, Cow<'_, str>)]) -> (String, usize) {
    labels.sort_unstable_by_key(|(name, _)| *name);
    let mut text = String::new();
    let mut le_at = 0;
    for (name, value) in labels {
        if !text.is_empty() {
            text.push(',');
        }
        text.push_str(name);
        text.push_str("=\"");
        escape(&mut text, value);
        text.push('"');
        if *name < "le" {
            le_at = text.len();
        }
    }
    (text, le_at)
}

/// Appends a label value as the text format wants it, and safe to show on a terminal.
pub(super) fn escape(text: &mut String, value: &str) {
    for c in cut(value).chars() {
        match c {
            '\\' => text.push_str("\\\\"),
            '"' => text.push_str("\\\""),
            '\n' => text.push_str("\\n"),
            c if c.is_control() => text.push(char::REPLACEMENT_CHARACTER),
            c => text.push(c),
        }
    }
}

/// At most [`MAX_LABEL_BYTES`] of a label value, whole characters.
pub(super) fn cut(value: &str) -> &str {
    let end = value.floor_char_boundary(MAX_LABEL_BYTES);
    value.get(..end).unwrap_or(value)
}
