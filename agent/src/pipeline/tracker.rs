//! The state of everything that is watched: takes changes, messages and ticks, gives observations.

use rustc_hash::FxHashMap;
use slab::Slab;

use super::{
    labels::Labels,
    places::Places,
    records::{OpenRequest, RequestRecord},
    sink::Sink,
    state::{Environment, Kind, PipelineState},
    transfers::{ShmTaken, TransferCounts, Transfers, key_of},
};
use crate::{
    host::identity::{Change, Pipeline, PipelineId, Process, ProcessKey},
    metrics::merge::{Known, Ledger, Mark},
    wire::{assemble::Aux, http::connections::News, message::Message, shm::ShmEvent},
};

/// Times and caps of the state machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Open requests of a pipeline; further ones are counted as skipped.
    pub max_requests: usize,
    /// How long a finished stage that is not the pipeline's last waits for the next stage's ADD.
    pub next_stage_grace_ns: u64,
    /// How long an abort waits for news of a dead engine before it counts as the client's.
    pub abort_settle_ns: u64,
    /// How long the id of a request that is over is remembered, so that its last outputs don't revive it.
    pub linger_ns: u64,
    /// A request without any message for this long is given up.
    pub idle_timeout_ns: u64,
    /// A scheduler snapshot older than this counts as nothing while nothing is open.
    pub stale_snapshot_ns: u64,
    /// An engine that was not seen starting gets its children after this time at the latest.
    pub settle_engine_ns: u64,
    /// An abort this soon after an output of a request with stop strings means that one was found.
    pub stop_string_ns: u64,
    /// Payloads between stages whose other end is awaited; beyond that the oldest are given up.
    pub max_transfers: usize,
    /// A payload that is not taken for this long is given up.
    pub transfer_timeout_ns: u64,
    /// How long a payload that was taken waits for word of its put.
    pub transfer_grace_ns: u64,
    /// How long a payload may still be taken after its sender ended.
    pub sender_gone_ns: u64,
}

const SECOND: u64 = 1_000_000_000;

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_requests: 65_536,
            next_stage_grace_ns: 5 * SECOND,
            abort_settle_ns: 2 * SECOND,
            linger_ns: 60 * SECOND,
            idle_timeout_ns: 1_800 * SECOND,
            stale_snapshot_ns: 5 * SECOND,
            settle_engine_ns: 5 * SECOND,
            stop_string_ns: SECOND / 50,
            max_transfers: 65_536,
            transfer_timeout_ns: 300 * SECOND,
            transfer_grace_ns: SECOND,
            sender_gone_ns: 10 * SECOND,
        }
    }
}

/// Everything that is watched on this host.
#[derive(Debug, Default)]
pub struct Tracker {
    limits: Limits,
    wall_offset_ns: Option<i64>,
    labels: Option<Labels>,
    processes: FxHashMap<u32, Watched>,
    by_id: FxHashMap<PipelineId, usize>,
    pipelines: Slab<PipelineState>,
    transfers: Transfers,
    /// Of pipelines that are gone.
    ended_ambiguous_joins: u64,
    /// Whether requests that end leave a record.
    records: bool,
    /// Of pipelines that are gone, and the number of those that there was no room for.
    ended_records: (Vec<RequestRecord>, u64),
}

#[derive(Debug)]
pub(super) struct Watched {
    pub(super) process: Process,
    /// Slot of its pipeline; `None`: not told yet.
    pub(super) pipeline: Option<usize>,
    kind: Kind,
    /// From when on each payload that it hands to a connector is seen; `None`: it need not be.
    pub(super) payloads_ns: Option<u64>,
}

impl Ledger for Tracker {
    fn mark(&self, pipeline: PipelineId) -> Mark {
        self.state(pipeline)
            .map_or_else(Mark::default, |state| state.book.mark())
    }

    fn find(&self, pipeline: PipelineId, request: &str) -> Option<Known> {
        self.state(pipeline)?.book.known(request)
    }
}

impl Tracker {
    /// A tracker that watches nothing yet.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            ..Self::default()
        }
    }

    /// Tells the wall clock less the monotonic clock in nanoseconds, to place arrival times. Without it a request's
    /// start is the time of its ADD.
    pub fn set_wall_offset(&mut self, offset_ns: i64) {
        self.wall_offset_ns = Some(offset_ns);
    }

    /// Whether each request that ends leaves a record, for [`Self::take_records`].
    pub fn want_records(&mut self, wanted: bool) {
        self.records = wanted;
        self.transfers.want_requests(wanted);
    }

    /// Records of the requests that are over, with their last payloads. Gives the number of those that there was no room
    /// for. To be called behind [`Self::tick`].
    pub fn take_records(&mut self, now_ns: u64, out: &mut Vec<RequestRecord>) -> u64 {
        let (ended, mut refused) = std::mem::take(&mut self.ended_records);
        out.extend(ended);
        for (_, state) in &mut self.pipelines {
            refused += state.held.take(now_ns, out);
        }
        refused
    }

    /// At most `max` of the requests that are under way, those that came first.
    #[must_use]
    pub fn open_records(&self, now_ns: u64, max: usize) -> Vec<OpenRequest> {
        let mut open = Vec::new();
        for (_, state) in &self.pipelines {
            state.open_records(now_ns, max.saturating_sub(open.len()), &mut open);
        }
        open
    }

    /// Tells the requests about their payloads.
    fn hops_of_requests(&mut self) {
        for hop in self.transfers.take_requests() {
            let slot = self.by_id.get(&hop.pipeline);
            if let Some(state) = slot.and_then(|slot| self.pipelines.get_mut(*slot)) {
                state.hop(&hop);
            }
        }
    }

    /// Requests of a pipeline that some stage still has work for.
    #[must_use]
    pub fn open_requests(&self, pipeline: PipelineId) -> usize {
        self.state(pipeline).map_or(0, PipelineState::open)
    }

    fn state(&self, pipeline: PipelineId) -> Option<&PipelineState> {
        self.pipelines.get(*self.by_id.get(&pipeline)?)
    }

    /// Requests that are held in memory, open or lately over, over all pipelines.
    #[must_use]
    pub fn tracked_requests(&self) -> usize {
        self.pipelines
            .iter()
            .map(|(_, state)| state.book.requests.len())
            .sum()
    }

    /// What is known of the transfers between stages.
    #[must_use]
    pub fn transfers(&self) -> TransferCounts {
        self.transfers.counts()
    }

    /// Whether a transfer between two of a pipeline's stages was observed.
    #[must_use]
    pub fn has_transfers(&self, pipeline: PipelineId) -> bool {
        self.transfers.has_hops(pipeline)
    }

    /// A process did something with a shared-memory segment.
    pub fn shm<S: Sink + ?Sized>(&mut self, event: &ShmEvent<'_>, sink: &mut S) -> ShmTaken {
        let Some(key) = key_of(event.name()) else {
            return ShmTaken::Foreign;
        };
        let places = Places(&self.processes);
        let Some(place) = places.of(event.pid()) else {
            return ShmTaken::Unknown;
        };
        self.transfers.shm(event, key, place, places, &self.limits, sink);
        self.hops_of_requests();
        ShmTaken::Known
    }

    /// News of an exchange over HTTP. Those of processes that are no API process count as nothing.
    pub fn http<S: Sink + ?Sized>(&mut self, news: &News, sink: &mut S) {
        let environment = self.environment(sink);
        let slot = self
            .processes
            .get(&news.pid)
            .filter(|watched| watched.kind == Kind::Api)
            .and_then(|watched| watched.pipeline);
        if let Some(state) = slot.and_then(|slot| self.pipelines.get_mut(slot)) {
            state.http(news, &environment, sink);
        }
    }

    /// Exchanges over HTTP that are held in memory, over all pipelines.
    #[must_use]
    pub fn tracked_exchanges(&self) -> usize {
        self.pipelines
            .iter()
            .map(|(_, state)| state.exchanges.len())
            .sum()
    }

    /// Times that several exchanges fitted a request alike.
    #[must_use]
    pub fn ambiguous_joins(&self) -> u64 {
        let ended = self.ended_ambiguous_joins;
        self.pipelines
            .iter()
            .map(|(_, state)| state.exchanges.ambiguous_joins)
            .fold(ended, u64::saturating_add)
    }

    /// What runs here has changed.
    pub fn change<S: Sink + ?Sized>(&mut self, change: &Change, now_ns: u64, sink: &mut S) {
        match change {
            Change::Pipeline(pipeline) => self.pipeline(pipeline, now_ns, sink),
            Change::Process(process) => self.process(process, now_ns, sink),
            Change::ProcessGone(key) => self.process_gone(*key, now_ns, sink),
            Change::PipelineGone(id) => self.pipeline_gone(*id, now_ns, sink),
            Change::Payloads { key, seen } => {
                if let Some(watched) = self.processes.get_mut(&key.pid)
                    && watched.process.key == *key
                {
                    watched.payloads_ns = seen.then_some(now_ns);
                }
            }
        }
    }

    /// Process `pid` sent `message` on `socket` at `time_ns`. Messages of processes that are not watched count as
    /// nothing.
    pub fn message<S: Sink + ?Sized>(
        &mut self,
        pid: u32,
        socket: u64,
        time_ns: u64,
        message: &Message<'_>,
        sink: &mut S,
    ) {
        if let Message::Connector { control, peer } = message {
            let places = Places(&self.processes);
            if let Some(place) = places.of(pid) {
                let sender = (pid, socket);
                let limits = &self.limits;
                self.transfers
                    .control(sender, *peer, control, time_ns, place, places, limits, sink);
                self.hops_of_requests();
            }
            return;
        }
        let environment = self.environment(sink);
        let Some(watched) = self.processes.get(&pid) else {
            return;
        };
        let kind = watched.kind;
        let Some(state) = watched.pipeline.and_then(|slot| self.pipelines.get_mut(slot)) else {
            return;
        };
        match kind {
            Kind::Api => state.api_message(pid, socket, time_ns, message, &environment, sink),
            Kind::Engine(index) => state.engine_message(index, time_ns, message, &environment, sink),
            Kind::Other => {}
        }
        let (pipeline, places) = (state.pipeline.id, Places(&self.processes));
        for forward in state.take_forwards() {
            self.transfers.forward(pipeline, &forward, places, sink);
        }
        self.hops_of_requests();
    }

    /// Process `pid` sent a tensor or array behind a message.
    pub fn aux(&mut self, pid: u32, aux: Aux) {
        if let Some(watched) = self.processes.get(&pid)
            && watched.kind == Kind::Api
            && let Some(state) = watched.pipeline.and_then(|slot| self.pipelines.get_mut(slot))
        {
            state.api_aux(pid, aux);
        }
    }

    /// Time has passed: settles what waited for it and sets the gauges. To be called about once a second and before
    /// a scrape is answered.
    pub fn tick<S: Sink + ?Sized>(&mut self, now_ns: u64, sink: &mut S) {
        let environment = self.environment(sink);
        for (_, state) in &mut self.pipelines {
            state.tick(now_ns, &environment, sink);
        }
        let places = Places(&self.processes);
        self.transfers.tick(now_ns, places, &self.limits, sink);
        self.hops_of_requests();
    }

    fn environment<S: Sink + ?Sized>(&mut self, sink: &mut S) -> Environment {
        Environment {
            limits: self.limits,
            labels: *self.labels.get_or_insert_with(|| Labels::new(sink)),
            wall_offset_ns: self.wall_offset_ns,
            records: self.records,
        }
    }

    fn pipeline<S: Sink + ?Sized>(&mut self, pipeline: &Pipeline, now_ns: u64, sink: &mut S) {
        self.transfers.pipeline(pipeline, sink);
        let environment = self.environment(sink);
        let slot = if let Some(&slot) = self.by_id.get(&pipeline.id) {
            slot
        } else {
            let slot = self.pipelines.insert(PipelineState::new(pipeline.clone()));
            self.by_id.insert(pipeline.id, slot);
            slot
        };
        let Some(state) = self.pipelines.get_mut(slot) else {
            return;
        };
        state.describe(pipeline, sink);
        for watched in self.processes.values_mut() {
            if watched.pipeline.is_none() && watched.process.pipeline == pipeline.id {
                watched.pipeline = Some(slot);
                watched.kind = state.admit(&watched.process, now_ns);
            }
        }
        state.create_scopes(now_ns, &environment, sink);
    }

    fn process<S: Sink + ?Sized>(&mut self, process: &Process, now_ns: u64, sink: &mut S) {
        let environment = self.environment(sink);
        let mut payloads_ns = None;
        if let Some(known) = self.processes.get_mut(&process.key.pid) {
            if known.process.key == process.key && known.process.pipeline == process.pipeline {
                let state = known.pipeline.and_then(|slot| self.pipelines.get_mut(slot));
                if known.process.role == process.role {
                    return;
                }
                if let (Kind::Engine(index), Some(state)) = (known.kind, state)
                    && state.rename_engine(index, process.role)
                {
                    known.process.role = process.role;
                    state.create_scopes(now_ns, &environment, sink);
                    return;
                }
            }
            let key = known.process.key;
            payloads_ns = known.payloads_ns.filter(|_| key == process.key);
            self.process_gone(key, now_ns, sink);
        }
        let pipeline = self.by_id.get(&process.pipeline).copied();
        let mut kind = Kind::Other;
        if let Some(state) = pipeline.and_then(|slot| self.pipelines.get_mut(slot)) {
            kind = state.admit(process, now_ns);
            state.create_scopes(now_ns, &environment, sink);
        }
        self.processes.insert(
            process.key.pid,
            Watched {
                process: process.clone(),
                pipeline,
                kind,
                payloads_ns,
            },
        );
    }

    fn process_gone<S: Sink + ?Sized>(&mut self, key: ProcessKey, now_ns: u64, sink: &mut S) {
        let is_it = |watched: &Watched| watched.process.key == key;
        if !self.processes.get(&key.pid).is_some_and(is_it) {
            return;
        }
        let Some(watched) = self.processes.remove(&key.pid) else {
            return;
        };
        self.transfers.process_gone(key.pid, now_ns, &self.limits, sink);
        let environment = self.environment(sink);
        let Some(state) = watched.pipeline.and_then(|slot| self.pipelines.get_mut(slot)) else {
            return;
        };
        match watched.kind {
            Kind::Api => state.api_gone(key.pid, now_ns, &environment, sink),
            Kind::Engine(index) => state.engine_gone(index, now_ns, &environment, sink),
            Kind::Other => {}
        }
    }

    fn pipeline_gone<S: Sink + ?Sized>(&mut self, id: PipelineId, now_ns: u64, sink: &mut S) {
        let Some(slot) = self.by_id.remove(&id) else {
            return;
        };
        let Some(mut state) = self.pipelines.try_remove(slot) else {
            return;
        };
        self.processes.retain(|_, watched| watched.pipeline != Some(slot));
        let environment = self.environment(sink);
        state.end(now_ns, &environment, sink);
        self.ended_ambiguous_joins += state.exchanges.ambiguous_joins;
        let (ended, refused) = &mut self.ended_records;
        *refused += state.held.take(u64::MAX, ended);
        self.transfers.pipeline_gone(id, sink);
    }
}
