//! One source at a time for each family of a pipeline: who serves it, and how one source hands over to another.
//!
//! The first sample that a source gives of a family takes the family over, unless a source of higher precedence holds
//! it. The holder keeps it until a higher one comes or until it is gone itself ([`Merge::depart`]). Samples of all
//! others are dropped, so counters and histograms of a child are fed by one source at any moment and never go back.
//!
//! A request that is under way at a hand-over is counted by exactly one of the two sources, told by its id. Each
//! source numbers its requests as it gets to know them and again as they end, and a hand-over notes how far the old
//! source had come:
//!
//! - The old source is still there: it keeps the requests that it knew by then, the new one has the others.
//! - The old source is gone: what it had seen to the end is counted, the new one has the others.
//!
//! Samples that are about no request (gauges, samples of the host) go by the holder at their time.

use std::{collections::VecDeque, fmt, str::FromStr};

use rustc_hash::{FxHashMap, FxHashSet};
use slab::Slab;

use super::{
    catalogue::{Family, Source},
    registry::{BucketCounts, Registry},
};
use crate::{
    host::identity::PipelineId,
    pipeline::sink::{ExtraId, Scope, ScopeId, Sink, Subject},
};

/// How long a hand-over is remembered: requests without any message are given up long before.
const HANDOVER_NS: u64 = 3_600_000_000_000;

/// Hand-overs of a family that are remembered; a source that comes and goes faster than that is a fault.
const MAX_HANDOVERS: usize = 16;

/// A source of samples, as far as sources compete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Feed {
    /// Events that the orchestrator pushes to the agent's socket.
    StatSocket,
    /// What the agent sees by itself: frames, transfers, HTTP.
    Tap,
    /// The engine's own `/metrics`.
    Engine,
}

impl Feed {
    /// All of them, in the default order of precedence.
    pub const ALL: [Self; 3] = [Self::StatSocket, Self::Tap, Self::Engine];

    /// Name in the configuration.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::StatSocket => "stat_socket",
            Self::Tap => "tap",
            Self::Engine => "engine",
        }
    }

    /// The source that is shown for a family which this feed serves.
    #[must_use]
    pub fn source(self, family: Family) -> Source {
        match (self, family.row().source) {
            (Self::StatSocket, _) => Source::StatSocket,
            (Self::Engine, _) => Source::Engine,
            (Self::Tap, Source::StatSocket | Source::Engine | Source::Own) => Source::Wire,
            (Self::Tap, seen) => seen,
        }
    }
}

/// Sources from the first to the last that is asked; one that is left out serves nothing. Written `a>b>c`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order([Option<Feed>; 3]);

impl Default for Order {
    fn default() -> Self {
        Self(Feed::ALL.map(Some))
    }
}

impl Order {
    /// Place of a feed; `None`: it may not serve.
    fn rank(self, feed: Feed) -> Option<usize> {
        self.0.iter().position(|other| *other == Some(feed))
    }
}

impl FromStr for Order {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut order = Self([None; 3]);
        for (place, name) in text.split('>').map(str::trim).enumerate() {
            let feed = Feed::ALL.into_iter().find(|feed| feed.as_str() == name);
            let feed =
                feed.ok_or("not an order of stat_socket, tap and engine (such as stat_socket>tap>engine)")?;
            if order.rank(feed).is_some() {
                return Err("a source is named twice");
            }
            // No feed twice, so there are at most as many as places.
            if let Some(slot) = order.0.get_mut(place) {
                *slot = Some(feed);
            }
        }
        Ok(order)
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.0.iter().flatten().map(|feed| feed.as_str()).collect();
        f.write_str(&names.join(">"))
    }
}

/// An order for some families. Written `PATTERN=a>b`; the pattern is a name, or the start of names and `*`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FamilyOrder {
    pattern: String,
    order: Order,
}

impl FamilyOrder {
    fn matches(&self, family: Family) -> bool {
        let name = family.name();
        match self.pattern.strip_suffix('*') {
            Some(start) => name.starts_with(start),
            None => name == self.pattern,
        }
    }
}

impl FromStr for FamilyOrder {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (pattern, order) = text
            .split_once('=')
            .ok_or("not of the form FAMILY=ORDER (such as vllm_omni:transfer_*=tap>engine)")?;
        let order = Self {
            pattern: pattern.to_owned(),
            order: order.parse()?,
        };
        let is_served = |family: &&Family| !family.row().is_own() && order.matches(**family);
        if Family::ALL.iter().any(|family| is_served(&family)) {
            Ok(order)
        } else {
            Err("no family of a pipeline has such a name")
        }
    }
}

impl fmt::Display for FamilyOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.pattern, self.order)
    }
}

/// What a feed knows of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// Its number among the requests of its pipeline that the feed got to know.
    pub serial: u32,
    /// Its number among those whose end the feed has seen; `None`: it is under way.
    pub ended: Option<u32>,
}

/// How far a feed has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    /// [`Known::serial`] of the request that it got to know last.
    pub serial: u32,
    /// [`Known::ended`] of the one whose end it saw last.
    pub ended: u32,
}

/// The requests that a feed knows.
pub trait Ledger {
    /// How far it has come with a pipeline.
    fn mark(&self, pipeline: PipelineId) -> Mark;
    /// A request by its id, if it is under way or was until lately.
    fn find(&self, pipeline: PipelineId, request: &str) -> Option<Known>;
}

/// The ledger of a feed that knows of no requests.
#[derive(Clone, Copy, Debug)]
pub struct NoRequests;

impl Ledger for NoRequests {
    fn mark(&self, _: PipelineId) -> Mark {
        Mark::default()
    }

    fn find(&self, _: PipelineId, _: &str) -> Option<Known> {
        None
    }
}

/// The end of a feed's time as the holder of a family.
#[derive(Clone, Copy, Debug)]
struct Handover {
    from: Feed,
    /// How far it had come when it got the family; what had ended by then is another's.
    since: Mark,
    /// How far it had come when it lost it or went.
    mark: Mark,
    /// It is gone, and its open requests with it.
    is_gone: bool,
    until_ns: u64,
}

impl Handover {
    /// Whether the feed that had the family keeps this request.
    fn keeps(&self, known: Known) -> bool {
        if self.is_gone {
            known.ended.is_some_and(|ended| is_up_to(ended, self.mark.ended))
        } else {
            is_up_to(known.serial, self.mark.serial)
                && !known.ended.is_some_and(|ended| is_up_to(ended, self.since.ended))
        }
    }
}

/// Whether `number` was given out no later than `newest`; numbers wrap around.
fn is_up_to(number: u32, newest: u32) -> bool {
    newest.wrapping_sub(number) < 1 << 31
}

/// Who serves one family of one pipeline.
#[derive(Debug, Default)]
struct Held {
    by: Option<Feed>,
    /// How far the feed that now has it, or is free to take it, had come when the one before was gone.
    since: Mark,
    /// Who had it before, from the first to the last.
    before: VecDeque<Handover>,
}

impl Held {
    fn remember(&mut self, handover: Handover) {
        if self.before.len() >= MAX_HANDOVERS {
            self.before.pop_front();
        }
        self.before.push_back(handover);
    }
}

#[derive(Debug)]
struct Table {
    pipeline: PipelineId,
    /// By family.
    held: Vec<Held>,
}

/// Who serves which family of which pipeline.
#[derive(Debug)]
pub struct Merge {
    /// By family.
    orders: Vec<Order>,
    tables: Slab<Table>,
    by_pipeline: FxHashMap<PipelineId, usize>,
    by_scope: FxHashMap<ScopeId, usize>,
    /// The newest look-up in `by_scope`: a frame is mostly about one scope.
    last: Option<(ScopeId, usize)>,
    /// Pipelines of which the tap has seen no frame: what it says of the wire's families comes after all others.
    blind: FxHashSet<PipelineId>,
    now_ns: u64,
}

impl Default for Merge {
    fn default() -> Self {
        Self::new(Order::default(), &[])
    }
}

impl Merge {
    /// `families`: exceptions, of which the first that names a family counts.
    #[must_use]
    pub fn new(order: Order, families: &[FamilyOrder]) -> Self {
        let of_family = |family: &Family| {
            families
                .iter()
                .find(|other| other.matches(*family))
                .map_or(order, |other| other.order)
        };
        Self {
            orders: Family::ALL.iter().map(of_family).collect(),
            tables: Slab::new(),
            by_pipeline: FxHashMap::default(),
            by_scope: FxHashMap::default(),
            last: None,
            blind: FxHashSet::default(),
            now_ns: 0,
        }
    }

    /// Who serves a family of a pipeline; `None`: nobody has given a sample, or who did is gone.
    #[must_use]
    pub fn holder(&self, pipeline: PipelineId, family: Family) -> Option<Feed> {
        let table = self.tables.get(*self.by_pipeline.get(&pipeline)?)?;
        table.held.get(family as usize)?.by
    }

    /// A feed gives nothing more of a pipeline: what it held is free, and its gauges go. `others` is the ledger of the
    /// other feed that knows requests.
    pub fn depart(
        &mut self,
        pipeline: PipelineId,
        feed: Feed,
        (ledger, others): (&dyn Ledger, &dyn Ledger),
        registry: &mut Registry,
    ) {
        let Some(table) = self
            .by_pipeline
            .get(&pipeline)
            .and_then(|at| self.tables.get_mut(*at))
        else {
            return;
        };
        let gone = Handover {
            from: feed,
            since: Mark::default(),
            mark: ledger.mark(pipeline),
            is_gone: true,
            until_ns: self.now_ns.saturating_add(HANDOVER_NS),
        };
        for (held, family) in table.held.iter_mut().zip(Family::ALL) {
            // Open requests that it had kept at earlier hand-overs are lost to it: the next holder has them.
            for before in held
                .before
                .iter_mut()
                .filter(|before| before.from == feed && !before.is_gone)
            {
                *before = gone;
            }
            if held.by == Some(feed) {
                held.by = None;
                held.since = others.mark(pipeline);
                held.remember(gone);
                registry.drop_gauge(pipeline, *family);
            }
        }
    }

    /// Whether the tap has seen no frame of a pipeline. Until it has, its gauges of 0 may mean that it sees nothing (it is
    /// off, or there is no probe): for the wire's families any other source takes precedence.
    pub fn set_blind(&mut self, pipeline: PipelineId, is_blind: bool) {
        if is_blind {
            self.blind.insert(pipeline);
        } else {
            self.blind.remove(&pipeline);
        }
    }

    /// A pipeline has ended.
    pub fn forget(&mut self, pipeline: PipelineId) {
        self.blind.remove(&pipeline);
        if let Some(at) = self.by_pipeline.remove(&pipeline) {
            self.tables.remove(at);
            self.by_scope.retain(|_, of| *of != at);
            self.last = None;
        }
    }

    /// Time passes: old hand-overs are forgotten.
    pub fn tick(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
        for (_, table) in &mut self.tables {
            for held in &mut table.held {
                held.before.retain(|before| before.until_ns > now_ns);
            }
        }
    }

    /// Place of the table of a scope's pipeline, made with its first sample.
    fn place(&mut self, scope: ScopeId, registry: &Registry) -> Option<usize> {
        if let Some((last, at)) = self.last
            && last == scope
        {
            return Some(at);
        }
        let at = if let Some(at) = self.by_scope.get(&scope) {
            *at
        } else {
            let pipeline = registry.pipeline_of(scope)?;
            let tables = &mut self.tables;
            let at = *self.by_pipeline.entry(pipeline).or_insert_with(|| {
                let held = Family::ALL.iter().map(|_| Held::default()).collect();
                tables.insert(Table { pipeline, held })
            });
            self.by_scope.insert(scope, at);
            at
        };
        self.last = Some((scope, at));
        Some(at)
    }

    fn retire(&mut self, scope: ScopeId) {
        self.by_scope.remove(&scope);
        self.last = self.last.filter(|(last, _)| *last != scope);
    }
}

/// The request that samples are about.
#[derive(Clone, Copy, Debug)]
struct About {
    /// As the feed that gives the samples knows it.
    own: Known,
    /// As the other one does.
    other: Option<Known>,
}

/// The registry as one feed has it: takes the samples of families that the feed holds, or may take over.
pub struct Merged<'a> {
    registry: &'a mut Registry,
    merge: &'a mut Merge,
    feed: Feed,
    others: &'a dyn Ledger,
    about: Option<About>,
}

impl<'a> Merged<'a> {
    /// `others` is the ledger of the other feed that knows requests: the tap's for the stat socket, and the stat
    /// socket's for the tap.
    pub fn new(registry: &'a mut Registry, merge: &'a mut Merge, feed: Feed, others: &'a dyn Ledger) -> Self {
        Self {
            registry,
            merge,
            feed,
            others,
            about: None,
        }
    }

    /// Whether a sample counts. The feed takes the family over where it may.
    fn admits(&mut self, family: Family, scope: ScopeId) -> bool {
        let Self {
            registry,
            merge,
            feed,
            others,
            about,
        } = self;
        let feed = *feed;
        // Without a scope the registry says what is wrong.
        let Some(at) = merge.place(scope, registry) else {
            return true;
        };
        let Some((pipeline, held)) = merge
            .tables
            .get_mut(at)
            .and_then(|table| Some((table.pipeline, table.held.get_mut(family as usize)?)))
        else {
            return true;
        };
        if held.by != Some(feed) {
            let Some(order) = merge.orders.get(family as usize) else {
                return true;
            };
            let rank = |feed: Feed| {
                let is_blind = feed == Feed::Tap
                    && family.row().source == Source::Wire
                    && merge.blind.contains(&pipeline);
                Some(order.rank(feed)? + usize::from(is_blind) * Feed::ALL.len())
            };
            let holder = held.by.and_then(|by| Some((by, rank(by)?)));
            let Some(rank) = rank(feed) else {
                return false;
            };
            if holder.is_none_or(|(_, other)| other > rank) {
                if let Some((from, _)) = holder {
                    if from != Feed::Engine && feed != Feed::Engine {
                        let since = std::mem::take(&mut held.since);
                        held.remember(Handover {
                            from,
                            since,
                            mark: others.mark(pipeline),
                            is_gone: false,
                            until_ns: merge.now_ns.saturating_add(HANDOVER_NS),
                        });
                    }
                    registry.drop_gauge(pipeline, family);
                }
                held.by = Some(feed);
            }
        }
        if held.before.is_empty() {
            return held.by == Some(feed);
        }
        let Some(about) = about else {
            return held.by == Some(feed);
        };
        let known = |of: Feed| if of == feed { Some(about.own) } else { about.other };
        let keeper = held
            .before
            .iter()
            .find(|before| known(before.from).is_some_and(|known| before.keeps(known)));
        keeper.map_or(held.by, |before| Some(before.from)) == Some(feed)
    }
}

impl Merged<'_> {
    /// As [`Sink::observe`], for observations by bucket.
    pub fn add_buckets(&mut self, family: Family, scope: ScopeId, extra: ExtraId, counts: &BucketCounts) {
        let is_some = counts.above > 0 || counts.by_bound.iter().any(|(_, count)| *count > 0);
        if !is_some || self.admits(family, scope) {
            self.registry.add_buckets(family, scope, extra, counts);
        }
    }
}

impl Sink for Merged<'_> {
    fn scope(&mut self, scope: &Scope) -> ScopeId {
        self.registry.scope(scope)
    }

    fn extra(&mut self, values: &[&str]) -> ExtraId {
        self.registry.extra(values)
    }

    fn about(&mut self, subject: Option<Subject<'_>>) {
        self.about = subject.map(|subject| About {
            // What it gives samples of has not ended before.
            own: Known {
                serial: subject.serial,
                ended: None,
            },
            other: self.others.find(subject.pipeline, subject.request),
        });
    }

    fn add(&mut self, family: Family, scope: ScopeId, extra: ExtraId, by: f64) {
        // A child that is only made is no sample.
        if by == 0.0 || self.admits(family, scope) {
            self.registry.add(family, scope, extra, by);
        }
    }

    fn observe(&mut self, family: Family, scope: ScopeId, extra: ExtraId, value: f64, times: u64) {
        if times == 0 || self.admits(family, scope) {
            self.registry.observe(family, scope, extra, value, times);
        }
    }

    fn set(&mut self, family: Family, scope: ScopeId, extra: ExtraId, value: f64) {
        // A gauge is about no request.
        let about = self.about.take();
        if self.admits(family, scope) {
            self.registry.set(family, scope, extra, value);
        }
        self.about = about;
    }

    fn skip(&mut self, family: Family, reason: &'static str) {
        self.registry.skip(family, reason);
    }

    fn retire(&mut self, scope: ScopeId) {
        self.merge.retire(scope);
        self.registry.retire(scope);
    }
}
