//! Stat events to observations: the requests, streams and snapshots that orchestrators tell of (docs/stat-events.md).
//!
//! Each event is consumed once, a value that is absent gives no sample, a measured 0 gives one, and a sample whose
//! replica is not known is skipped. What belongs to a request is kept until its end, within bounds.

use std::{
    collections::{BTreeMap, VecDeque},
    hash::BuildHasher,
};

use rustc_hash::{FxBuildHasher, FxHashMap, FxHashSet};

use super::{
    audio::{
        CONTINUITY_THRESHOLD_MS, CONTINUITY_THRESHOLD_S, Continuity, DEFAULT_SAMPLE_RATE, SAMPLE_WIDTH,
        seconds_between,
    },
    book::arrival_ns,
    sink::{ExtraId, Scope, ScopeId, Sink, Subject},
    tracker::Limits,
};
use crate::{
    host::identity::{Pipeline, PipelineId},
    metrics::{
        catalogue::Family,
        merge::{Known, Ledger, Mark},
        number::as_f64,
    },
    wire::{
        message::FinishReason,
        stat::{
            Chunk, DiffusionSeconds, Event, Finished, FirstPacket, Head, KvWait, Place, Scheduler,
            StageStats, StageType, StreamEnd, Vad,
        },
    },
};

/// Requests whose end is remembered, for each pipeline.
const MAX_RECENT: usize = 16_384;

/// Stages of one request that are told apart.
const MAX_STAGES: usize = 64;

/// Replicas of one pipeline that are told apart; each has series of its own.
const MAX_REPLICAS: usize = 1024;

/// Edges between them.
const MAX_EDGES: usize = 4096;

/// Names that a sender makes up and that become label values, for each pipeline and label.
const MAX_NAMES: usize = 16;

/// Bytes of such a name.
const MAX_NAME: usize = 64;

/// How long requests wait for a sender whose connection ended.
const ORPHAN_NS: u64 = 60_000_000_000;

/// How often requests and streams are looked through for time-outs.
const SCAN_NS: u64 = 10_000_000_000;

const UNKNOWN: &str = "unknown";

/// A connection that events come from. Never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Sender(pub u64);

/// What became of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It counts.
    Accepted,
    /// It was told before, or its request is over.
    Repeated,
    /// There is no room for another request or replica.
    Full,
}

/// The stat events of all pipelines.
#[derive(Debug, Default)]
pub struct Stats {
    limits: Limits,
    wall_offset_ns: Option<i64>,
    pipelines: FxHashMap<PipelineId, Told>,
    next_scan_ns: u64,
}

/// What was told of one pipeline.
#[derive(Debug)]
struct Told {
    scope: Scope,
    requests: FxHashMap<Box<str>, Request>,
    recent: FxHashMap<u64, Known>,
    /// Of `recent`, the oldest first.
    recent_order: VecDeque<u64>,
    mark: Mark,
    streams: FxHashMap<Box<str>, Stream>,
    /// Waiting requests by stage and replica, and when that was told.
    waiting: BTreeMap<(u32, u32), (u64, u64)>,
    vad_sessions: BTreeMap<Sender, u64>,
    /// Stages and replicas that were named.
    places: FxHashSet<(u32, Option<u32>)>,
    edges: FxHashSet<[u32; 4]>,
    errors: Names,
    connectors: Names,
    /// Senders that are connected.
    senders: Vec<Sender>,
    /// Senders tell of requests as they come, so their number is known.
    has_requests: bool,
}

#[derive(Debug)]
struct Request {
    serial: u32,
    sender: Sender,
    /// `None`: its arrival was not told.
    arrival_ns: Option<u64>,
    dispatched: bool,
    last_ns: u64,
    stages: Vec<Stage>,
    generated: u64,
    prompt_tokens: Option<u64>,
    queue_wait_ms: Option<f64>,
    audio: Option<Audio>,
}

/// What is known of a request at one stage.
#[derive(Debug, Default)]
struct Stage {
    id: u32,
    replica: Option<u32>,
    /// Numbers of the results that were told.
    batches: Vec<Option<u64>>,
    /// Not yet observed.
    diffusion: Option<DiffusionSeconds>,
    steps: u64,
    is_image: bool,
}

/// Audio of the newest audio stage.
#[derive(Clone, Copy, Debug)]
struct Audio {
    stage: u32,
    replica: Option<u32>,
    frames: u64,
    sample_rate: u32,
    gen_time_s: Option<f64>,
}

/// A streamed response.
#[derive(Debug)]
struct Stream {
    sender: Sender,
    place: Option<(u32, u32)>,
    player: Option<Continuity>,
    first_packet_told: bool,
    last_s: f64,
    last_ns: u64,
}

impl Ledger for Stats {
    fn mark(&self, pipeline: PipelineId) -> Mark {
        self.pipelines
            .get(&pipeline)
            .map_or_else(Mark::default, |told| told.mark)
    }

    fn find(&self, pipeline: PipelineId, request: &str) -> Option<Known> {
        self.pipelines.get(&pipeline)?.known(request)
    }
}

impl Stats {
    /// Nothing told yet.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            ..Self::default()
        }
    }

    /// See [`super::tracker::Tracker::set_wall_offset`].
    pub fn set_wall_offset(&mut self, offset_ns: i64) {
        self.wall_offset_ns = Some(offset_ns);
    }

    /// A pipeline appeared, or became better known.
    pub fn pipeline(&mut self, pipeline: &Pipeline) {
        if let Some(told) = self.pipelines.get_mut(&pipeline.id) {
            told.scope = Scope::of(pipeline);
        }
    }

    /// A pipeline is gone.
    pub fn pipeline_gone(&mut self, pipeline: PipelineId) {
        self.pipelines.remove(&pipeline);
    }

    /// Requests and streams that are held in memory, over all pipelines.
    #[must_use]
    pub fn tracked(&self) -> usize {
        self.pipelines
            .values()
            .map(|told| told.requests.len() + told.streams.len())
            .sum()
    }

    /// Whether somebody who has told of a pipeline is still connected.
    #[must_use]
    pub fn is_connected(&self, pipeline: PipelineId) -> bool {
        self.pipelines
            .get(&pipeline)
            .is_some_and(|told| !told.senders.is_empty())
    }

    /// Takes an event about a pipeline.
    pub fn event<S: Sink + ?Sized>(
        &mut self,
        sender: Sender,
        pipeline: &Pipeline,
        now_ns: u64,
        (head, event): (&Head, &Event),
        sink: &mut S,
    ) -> Outcome {
        let told = self
            .pipelines
            .entry(pipeline.id)
            .or_insert_with(|| Told::new(Scope::of(pipeline)));
        if !told.senders.contains(&sender) {
            told.senders.push(sender);
        }
        let outcome = Taking {
            told,
            limits: &self.limits,
            sender,
            time_ns: arrival_ns(head.t, now_ns, self.wall_offset_ns),
            wall_s: head.t,
            wall_offset_ns: self.wall_offset_ns,
            sink,
        }
        .event(event);
        sink.about(None);
        outcome
    }

    /// A sender's connection has ended; `is_gone`: its process has, too. Returns the pipelines that it told of and of
    /// which nobody else does.
    pub fn closed<S: Sink + ?Sized>(
        &mut self,
        sender: Sender,
        is_gone: bool,
        sink: &mut S,
    ) -> Vec<PipelineId> {
        let mut left = Vec::new();
        for (id, told) in &mut self.pipelines {
            let before = told.senders.len();
            told.senders.retain(|other| *other != sender);
            if told.senders.len() == before {
                continue;
            }
            if told.vad_sessions.remove(&sender).is_some() {
                told.set_vad_sessions(sink);
            }
            if told.senders.is_empty() {
                // What is open is the next source's, or that of the sender when it is back.
                told.waiting.clear();
                told.has_requests = false;
                left.push(*id);
            } else if is_gone {
                told.lose(sender, sink);
            }
        }
        left
    }

    /// Time has passed. To be called once a second.
    pub fn tick<S: Sink + ?Sized>(&mut self, now_ns: u64, sink: &mut S) {
        let scans = now_ns >= self.next_scan_ns;
        if scans {
            self.next_scan_ns = now_ns.saturating_add(SCAN_NS);
        }
        let limits = self.limits;
        for told in self.pipelines.values_mut() {
            if scans {
                told.time_out(now_ns, &limits, sink);
            }
            if !told.senders.is_empty() {
                told.set_gauges(now_ns, &limits, sink);
            }
        }
    }
}

fn hash(id: &str) -> u64 {
    FxBuildHasher.hash_one(id)
}

impl Told {
    fn new(scope: Scope) -> Self {
        Self {
            scope,
            requests: FxHashMap::default(),
            recent: FxHashMap::default(),
            recent_order: VecDeque::new(),
            mark: Mark::default(),
            streams: FxHashMap::default(),
            waiting: BTreeMap::new(),
            vad_sessions: BTreeMap::new(),
            places: FxHashSet::default(),
            edges: FxHashSet::default(),
            errors: Names::default(),
            connectors: Names::default(),
            senders: Vec::new(),
            has_requests: false,
        }
    }

    fn known(&self, request: &str) -> Option<Known> {
        match self.requests.get(request) {
            Some(request) => Some(Known {
                serial: request.serial,
                ended: None,
            }),
            None => self.recent.get(&hash(request)).copied(),
        }
    }

    /// The samples to come are about this request.
    fn about<S: Sink + ?Sized>(&self, request: &str, sink: &mut S) {
        let known = self.known(request);
        sink.about(known.map(|known| Subject {
            pipeline: self.scope.pipeline,
            request,
            serial: known.serial,
        }));
    }

    fn scope<S: Sink + ?Sized>(&self, sink: &mut S) -> ScopeId {
        sink.scope(&self.scope)
    }

    fn scope_at<S: Sink + ?Sized>(&self, stage: u32, replica: Option<u32>, sink: &mut S) -> ScopeId {
        sink.scope(&Scope {
            stage: Some(stage),
            replica,
            ..self.scope.clone()
        })
    }

    /// Remembers that a request is over.
    fn end(&mut self, id: &str, serial: u32) {
        if self.recent_order.len() >= MAX_RECENT
            && let Some(oldest) = self.recent_order.pop_front()
        {
            self.recent.remove(&oldest);
        }
        self.mark.ended = self.mark.ended.wrapping_add(1);
        let known = Known {
            serial,
            ended: Some(self.mark.ended),
        };
        let id = hash(id);
        if self.recent.insert(id, known).is_none() {
            self.recent_order.push_back(id);
        }
    }

    /// The process of one of several senders is gone, and its requests with it.
    fn lose<S: Sink + ?Sized>(&mut self, sender: Sender, sink: &mut S) {
        let lost: Vec<Box<str>> = self
            .requests
            .iter()
            .filter(|(_, request)| request.sender == sender)
            .map(|(id, _)| id.clone())
            .collect();
        for id in lost {
            self.fail(&id, UNKNOWN, sink);
        }
        self.streams.retain(|_, stream| stream.sender != sender);
    }

    fn fail<S: Sink + ?Sized>(&mut self, id: &str, reason: &str, sink: &mut S) {
        self.about(id, sink);
        let scope = self.scope(sink);
        let abort = sink.extra(&[FinishReason::Abort.as_str()]);
        sink.add(Family::OmniRequestsSuccessTotal, scope, abort, 1.0);
        let reason = sink.extra(&[reason]);
        sink.add(Family::OmniRequestsFailedTotal, scope, reason, 1.0);
        sink.about(None);
        self.streams.remove(id);
        let serial = match self.requests.remove(id) {
            Some(request) => request.serial,
            None => self.next_serial(),
        };
        self.end(id, serial);
    }

    fn next_serial(&mut self) -> u32 {
        self.mark.serial = self.mark.serial.wrapping_add(1);
        self.mark.serial
    }

    fn time_out<S: Sink + ?Sized>(&mut self, now_ns: u64, limits: &Limits, sink: &mut S) {
        let senders = &self.senders;
        let is_idle = |sender: Sender, last_ns: u64| {
            let limit_ns = if senders.contains(&sender) {
                limits.idle_timeout_ns
            } else {
                ORPHAN_NS
            };
            now_ns.saturating_sub(last_ns) > limit_ns
        };
        self.streams
            .retain(|_, stream| !is_idle(stream.sender, stream.last_ns));
        self.requests.retain(|_, request| {
            let stays = !is_idle(request.sender, request.last_ns);
            if !stays {
                sink.skip(Family::OmniE2eRequestLatencyS, "timed_out");
            }
            stays
        });
    }

    fn set_gauges<S: Sink + ?Sized>(&mut self, now_ns: u64, limits: &Limits, sink: &mut S) {
        let (mut open, mut dispatched) = (0_u64, 0_u64);
        for request in self
            .requests
            .values()
            .filter(|request| self.senders.contains(&request.sender))
        {
            open += 1;
            dispatched += u64::from(request.dispatched);
        }
        if open == 0 {
            for (waiting, told_ns) in self.waiting.values_mut() {
                if now_ns.saturating_sub(*told_ns) > limits.stale_snapshot_ns {
                    *waiting = 0;
                }
            }
        }
        let mut stages: BTreeMap<u32, u64> = BTreeMap::new();
        for ((stage, _), (waiting, _)) in &self.waiting {
            let total = stages.entry(*stage).or_default();
            *total = total.saturating_add(*waiting);
        }
        for (stage, waiting) in &stages {
            let scope = self.scope_at(*stage, None, sink);
            sink.set(
                Family::OmniStageWaitingRequests,
                scope,
                ExtraId::NONE,
                as_f64(*waiting),
            );
        }
        if !self.has_requests {
            return;
        }
        let queued = stages
            .values()
            .fold(0, |sum: u64, waiting| sum.saturating_add(*waiting));
        let running = dispatched.saturating_sub(queued);
        let scope = self.scope(sink);
        sink.set(
            Family::OmniNumRequestsRunning,
            scope,
            ExtraId::NONE,
            as_f64(running),
        );
        sink.set(
            Family::OmniNumRequestsWaiting,
            scope,
            ExtraId::NONE,
            as_f64(open - running),
        );
    }

    fn set_vad_sessions<S: Sink + ?Sized>(&self, sink: &mut S) {
        let open: u64 = self
            .vad_sessions
            .values()
            .fold(0, |sum: u64, open| sum.saturating_add(*open));
        let scope = self.scope(sink);
        sink.set(
            Family::OmniRealtimeVadActiveSessions,
            scope,
            ExtraId::NONE,
            as_f64(open),
        );
    }
}

/// One event on its way into the state.
struct Taking<'a, S: ?Sized> {
    told: &'a mut Told,
    limits: &'a Limits,
    sender: Sender,
    time_ns: u64,
    /// The sender's own time, in seconds since the epoch.
    wall_s: Option<f64>,
    wall_offset_ns: Option<i64>,
    sink: &'a mut S,
}

impl<S: Sink + ?Sized> Taking<'_, S> {
    fn event(&mut self, event: &Event) -> Outcome {
        if let Some(place) = place(event)
            && !self.told.places.contains(&place)
        {
            if self.told.places.len() >= MAX_REPLICAS {
                return Outcome::Full;
            }
            self.told.places.insert(place);
        }
        match event {
            Event::Added(event) => {
                let arrival_ns = arrival_ns(event.arrival, self.time_ns, self.wall_offset_ns);
                if self.told.requests.contains_key(event.request_id.as_str()) {
                    return Outcome::Repeated;
                }
                self.told.has_requests = true;
                self.with_request(&event.request_id, Family::OmniE2eRequestLatencyS, |request| {
                    request.arrival_ns = Some(arrival_ns);
                })
            }
            Event::Dispatched(event) => {
                self.told.has_requests = true;
                self.with_request(&event.request_id, Family::OmniE2eRequestLatencyS, |request| {
                    request.dispatched = true;
                    request.bind(event.stage_id, event.replica_id);
                })
            }
            Event::Stage(event) => self.stage(event),
            Event::Diffusion(event) => {
                self.with_request(&event.request_id, Family::OmniDiffusionExecS, |request| {
                    if let Some(stage) = request.bind(event.stage_id, event.replica_id) {
                        let timings = stage.diffusion.get_or_insert_default();
                        *timings = sum(timings, &event.seconds());
                    }
                })
            }
            Event::Finished(event) => self.finished(event),
            Event::Failed(event) => {
                if self.told.recent.contains_key(&hash(&event.request_id)) {
                    return Outcome::Repeated;
                }
                let reason = event.reason.as_deref().unwrap_or(UNKNOWN);
                let reason = one_of(
                    reason,
                    &["client_abort", "client_disconnect", "stage_error"],
                    UNKNOWN,
                );
                self.told.fail(&event.request_id, reason, self.sink);
                Outcome::Accepted
            }
            Event::TransferSent(event) => {
                let places = (
                    (event.from_stage, event.from_replica),
                    (event.to_stage, event.to_replica),
                );
                let values = [
                    (Family::OmniTransferSizeBytes, event.size_bytes.map(as_f64)),
                    (Family::OmniTransferTxS, event.tx_time_ms.map(|ms| ms / 1e3)),
                ];
                self.transfer(event.request_id.as_deref(), places, values)
            }
            Event::TransferReceived(event) => {
                let places = (
                    (event.from_stage, event.from_replica),
                    (event.to_stage, event.to_replica),
                );
                let values = [
                    (
                        Family::OmniTransferRxS,
                        event.rx_decode_time_ms.map(|ms| ms / 1e3),
                    ),
                    (
                        Family::OmniTransferInFlightS,
                        event.in_flight_time_ms.map(|ms| ms / 1e3),
                    ),
                ];
                self.transfer(event.request_id.as_deref(), places, values)
            }
            Event::Scheduler(event) => self.scheduler(*event),
            Event::ReplicaGone(place) => self.replica_gone(*place),
            Event::KvWait(event) => self.kv_wait(event),
            Event::FirstPacket(event) => self.first_packet(event),
            Event::Chunk(event) => self.chunk(event),
            Event::StreamEnd(event) => self.stream_end(event),
            Event::Vad(event) => self.vad(event),
            Event::Lost(_) => Outcome::Accepted,
            Event::Unknown => Outcome::Repeated,
        }
    }

    fn scheduler(&mut self, event: Scheduler) -> Outcome {
        let place = (event.stage_id, event.replica_id);
        self.told
            .waiting
            .insert(place, (event.num_waiting_reqs, self.time_ns));
        Outcome::Accepted
    }

    fn replica_gone(&mut self, place: Place) -> Outcome {
        match self.told.waiting.get_mut(&(place.stage_id, place.replica_id)) {
            // The stage's sum falls to 0 with its last replica: it was measured.
            Some(snapshot) => *snapshot = (0, self.time_ns),
            None => return Outcome::Repeated,
        }
        Outcome::Accepted
    }

    fn kv_wait(&mut self, event: &KvWait) -> Outcome {
        self.about(event.request_id.as_deref());
        let connector = event.connector_type.as_deref().unwrap_or(UNKNOWN);
        let connector = self.sink.extra(&[self.told.connectors.bounded(connector)]);
        let scope = self.told.scope(self.sink);
        self.sink
            .observe(Family::OmniKvWaitS, scope, connector, event.kv_wait_s, 1);
        Outcome::Accepted
    }

    /// Finds a request, or enters it: the agent may have come after it.
    fn with_request(&mut self, id: &str, family: Family, change: impl FnOnce(&mut Request)) -> Outcome {
        let told = &mut *self.told;
        if !told.requests.contains_key(id) {
            if told.recent.contains_key(&hash(id)) {
                return Outcome::Repeated;
            }
            if told.requests.len() >= self.limits.max_requests {
                self.sink.skip(family, "too_many_open");
                return Outcome::Full;
            }
            let serial = told.next_serial();
            told.requests.insert(id.into(), Request::new(serial, self.sender));
        }
        if let Some(request) = told.requests.get_mut(id) {
            request.last_ns = self.time_ns;
            // A sender that is back goes on with its requests.
            request.sender = self.sender;
            change(request);
        }
        Outcome::Accepted
    }

    fn stage(&mut self, event: &StageStats) -> Outcome {
        let mut seen = false;
        let (stage_id, replica_id) = (event.stage_id, event.replica_id);
        let is_diffusion = match event.stage_type {
            Some(kind) => kind == StageType::Diffusion,
            None => event.diffusion_metrics.is_some(),
        };
        let is_image = event.output_unit_type.as_deref() == Some("image");
        let gen_time_s = event.stage_gen_time_ms.map(|ms| ms / 1e3);
        let mut told = (None, None);
        let outcome = self.with_request(&event.request_id, Family::OmniStageGenTimeS, |request| {
            let Some(stage) = request.bind(stage_id, replica_id) else {
                seen = true;
                return;
            };
            if stage.batches.contains(&event.batch_id) || stage.batches.len() >= MAX_STAGES {
                seen = true;
                return;
            }
            stage.batches.push(event.batch_id);
            stage.steps = event.num_inference_steps.unwrap_or(stage.steps);
            stage.is_image = is_image;
            let timings = event.diffusion_metrics.or(stage.diffusion.take());
            let replica = stage.replica;
            stage.diffusion = None;
            told = (replica, timings);
            request.dispatched = true;
            request.generated = request
                .generated
                .saturating_add(event.num_tokens_out.unwrap_or(0));
            if stage_id == 0 && event.num_tokens_in.is_some() {
                let tokens = request.prompt_tokens.unwrap_or(0);
                request.prompt_tokens = Some(tokens.saturating_add(event.num_tokens_in.unwrap_or(0)));
            }
            if let Some(wait) = event.pipeline_timings.and_then(|timings| timings.queue_wait_ms) {
                request.queue_wait_ms = Some(wait);
            }
            if event.final_output_type.as_deref() == Some("audio") {
                let rate = event.audio_sample_rate.filter(|rate| *rate > 0);
                request.audio = Some(Audio {
                    stage: stage_id,
                    replica,
                    frames: event.audio_generated_frames.unwrap_or(0),
                    sample_rate: rate.unwrap_or(DEFAULT_SAMPLE_RATE),
                    gen_time_s,
                });
            }
        });
        if outcome != Outcome::Accepted {
            return outcome;
        }
        if seen {
            return Outcome::Repeated;
        }
        let (replica, timings) = told;
        self.told.about(&event.request_id, self.sink);
        let (told, sink) = (&*self.told, &mut *self.sink);
        let none = ExtraId::NONE;
        if let Some(gen_time_s) = gen_time_s {
            let kind = sink.extra(&[if is_diffusion { "diffusion" } else { "llm" }]);
            let scope = told.scope_at(stage_id, None, sink);
            sink.observe(Family::OmniStageGenTimeS, scope, kind, gen_time_s, 1);
        }
        let scope = told.scope(sink);
        if is_diffusion && let Some(steps) = event.num_inference_steps.filter(|steps| *steps > 0) {
            sink.observe(Family::OmniNumInferenceSteps, scope, none, as_f64(steps), 1);
        }
        if is_image {
            if let Some(pixels) = event.image_pixels.filter(|pixels| *pixels > 0) {
                sink.observe(Family::OmniImagePixels, scope, none, as_f64(pixels), 1);
            }
            if let Some(images) = event.output_unit_count.filter(|images| *images > 0) {
                sink.add(Family::OmniImageCountTotal, scope, none, as_f64(images));
            }
            if let Some(ms) = event.image_time_to_first_output_ms {
                let scope = told.scope_at(stage_id, replica, sink);
                sink.observe(Family::OmniImageTtfpS, scope, none, ms / 1e3, 1);
            }
        }
        if let Some(peak) = event.peak_memory_mb.filter(|peak| *peak > 0.0) {
            // With the replica, though it is no label: of several the highest counts.
            let scope = told.scope_at(stage_id, replica, sink);
            sink.set(Family::OmniPeakMemoryMb, scope, none, peak);
        }
        if let Some(timings) = timings {
            let steps = event.num_inference_steps.unwrap_or(0);
            told.diffusion((stage_id, replica), &timings, steps, is_image, sink);
        }
        Outcome::Accepted
    }

    fn finished(&mut self, event: &Finished) -> Outcome {
        let id = event.request_id.as_str();
        let Some(request) = self.told.requests.remove(id) else {
            if self.told.recent.contains_key(&hash(id)) {
                return Outcome::Repeated;
            }
            // All that is known of it is in the event.
            let serial = self.told.next_serial();
            return self.finish(event, &Request::new(serial, self.sender));
        };
        self.finish(event, &request)
    }

    fn finish(&mut self, event: &Finished, request: &Request) -> Outcome {
        let (told, sink) = (&mut *self.told, &mut *self.sink);
        sink.about(Some(Subject {
            pipeline: told.scope.pipeline,
            request: &event.request_id,
            serial: request.serial,
        }));
        let none = ExtraId::NONE;
        let scope = told.scope(sink);
        let reason = event.finish_reason.as_deref().unwrap_or("stop");
        let reason = one_of(reason, &FinishReason::ALL.map(FinishReason::as_str), UNKNOWN);
        let reason = sink.extra(&[reason]);
        sink.add(Family::OmniRequestsSuccessTotal, scope, reason, 1.0);
        let arrival_ns = request.arrival_ns;
        match event
            .e2e_s
            .or_else(|| arrival_ns.map(|arrival_ns| seconds_between(arrival_ns, self.time_ns)))
        {
            Some(seconds) => sink.observe(Family::OmniE2eRequestLatencyS, scope, none, seconds, 1),
            None => sink.skip(Family::OmniE2eRequestLatencyS, "start_not_seen"),
        }
        let has_stages = request.stages.iter().any(|stage| !stage.batches.is_empty());
        let generated = event
            .generation_tokens
            .or(has_stages.then_some(request.generated));
        for (family, tokens) in [
            (
                Family::OmniPromptTokensTotal,
                event.prompt_tokens.or(request.prompt_tokens),
            ),
            (Family::OmniGenerationTokensTotal, generated),
        ] {
            match tokens {
                Some(tokens) => sink.add(family, scope, none, as_f64(tokens)),
                None => sink.skip(family, "not_told"),
            }
        }
        if let Some(ms) = request.queue_wait_ms {
            sink.observe(Family::OmniRequestQueueWaitS, scope, none, ms / 1e3, 1);
        }
        for stage in &request.stages {
            if let Some(timings) = &stage.diffusion {
                let place = (stage.id, stage.replica);
                told.diffusion(place, timings, stage.steps, stage.is_image, sink);
            }
        }
        if let Some(audio) = request.audio {
            told.audio(&audio, sink);
        }
        sink.about(None);
        told.end(&event.request_id, request.serial);
        Outcome::Accepted
    }

    fn transfer(
        &mut self,
        request: Option<&str>,
        (from, to): ((u32, Option<u32>), (u32, Option<u32>)),
        values: [(Family, Option<f64>); 2],
    ) -> Outcome {
        self.about(request);
        let from = self.replica(request, from.0, from.1);
        let to = self.replica(request, to.0, to.1);
        let values = values
            .into_iter()
            .filter_map(|(family, value)| Some((family, value?)));
        if let (Some(from), Some(to)) = (from, to) {
            let edge = [from.0, from.1, to.0, to.1];
            let edges = &mut self.told.edges;
            if edges.len() >= MAX_EDGES && !edges.contains(&edge) {
                return Outcome::Full;
            }
            edges.insert(edge);
            let edge = edge.map(|value| value.to_string());
            let edge = self.sink.extra(&edge.each_ref().map(String::as_str));
            let scope = self.told.scope(self.sink);
            for (family, value) in values {
                self.sink.observe(family, scope, edge, value, 1);
            }
        } else {
            for (family, _) in values {
                self.sink.skip(family, "unknown_replica");
            }
        }
        Outcome::Accepted
    }

    /// The samples to come are about this request, where there is one.
    fn about(&mut self, request: Option<&str>) {
        if let Some(request) = request {
            self.told.about(request, self.sink);
        }
    }

    /// Where a request is at a stage: as told, else as it is bound.
    fn replica(&self, request: Option<&str>, stage: u32, told: Option<u32>) -> Option<(u32, u32)> {
        let bound = || {
            let stages = &self.told.requests.get(request?)?.stages;
            stages.iter().find(|other| other.id == stage)?.replica
        };
        told.or_else(bound).map(|replica| (stage, replica))
    }

    /// The stream of a request, entered where it is new.
    fn stream(&mut self, id: &str, stage: u32, replica: Option<u32>) -> Option<&mut Stream> {
        let place = self.replica(Some(id), stage, replica);
        let streams = &mut self.told.streams;
        if !streams.contains_key(id) {
            if streams.len() >= self.limits.max_requests {
                return None;
            }
            let stream = Stream {
                sender: self.sender,
                place: None,
                player: None,
                first_packet_told: false,
                last_s: 0.0,
                last_ns: 0,
            };
            streams.insert(id.into(), stream);
        }
        let stream = streams.get_mut(id)?;
        stream.last_ns = self.time_ns;
        stream.sender = self.sender;
        stream.place = place.or(stream.place);
        Some(stream)
    }

    fn first_packet(&mut self, event: &FirstPacket) -> Outcome {
        let id = event.request_id.as_deref();
        let mut place = self.replica(id, event.stage_id, event.replica_id);
        if let Some(id) = id {
            let Some(stream) = self.stream(id, event.stage_id, event.replica_id) else {
                self.sink.skip(Family::OmniAudioTtfpS, "too_many_open");
                return Outcome::Full;
            };
            if std::mem::replace(&mut stream.first_packet_told, true) {
                return Outcome::Repeated;
            }
            place = place.or(stream.place);
        }
        let arrival_ns = || self.told.requests.get(id?)?.arrival_ns;
        let seconds = event
            .ttfp_s
            .or_else(|| arrival_ns().map(|arrival_ns| seconds_between(arrival_ns, self.time_ns)));
        match (place, seconds) {
            (Some((stage, replica)), Some(seconds)) => {
                self.about(id);
                let scope = self.told.scope_at(stage, Some(replica), self.sink);
                self.sink
                    .observe(Family::OmniAudioTtfpS, scope, ExtraId::NONE, seconds, 1);
            }
            (None, _) => self.sink.skip(Family::OmniAudioTtfpS, "unknown_replica"),
            (_, None) => self.sink.skip(Family::OmniAudioTtfpS, "start_not_seen"),
        }
        Outcome::Accepted
    }

    fn chunk(&mut self, event: &Chunk) -> Outcome {
        let time_s = self.wall_s.unwrap_or_else(|| as_f64(self.time_ns) / 1e9);
        let rate = event.sample_rate.filter(|rate| *rate > 0);
        let Some(stream) = self.stream(&event.request_id, event.stage_id, event.replica_id) else {
            self.sink.skip(Family::OmniAudioUnderrunS, "too_many_open");
            return Outcome::Full;
        };
        if event.bytes == 0 || !time_s.is_finite() {
            return Outcome::Accepted;
        }
        let player = stream.player.get_or_insert_with(|| {
            let channels = u64::from(event.channels.unwrap_or(1).max(1));
            Continuity::new(rate.unwrap_or(DEFAULT_SAMPLE_RATE), SAMPLE_WIDTH, channels)
        });
        // A clock that was set back must not let the player run backwards.
        stream.last_s = if stream.last_s > time_s {
            stream.last_s
        } else {
            time_s
        };
        player.push(stream.last_s, event.bytes);
        Outcome::Accepted
    }

    fn stream_end(&mut self, event: &StreamEnd) -> Outcome {
        let id = event.request_id.as_deref();
        let stream = id.and_then(|id| self.told.streams.remove(id));
        if stream.is_none() && event.underrun_s.is_none() && !event.speech {
            return Outcome::Repeated;
        }
        let told = event
            .stage_id
            .and_then(|stage| self.replica(id, stage, event.replica_id));
        let place = told.or_else(|| stream.as_ref()?.place);
        self.about(id);
        let (told, sink) = (&*self.told, &mut *self.sink);
        let outcome = event.outcome.as_str();
        let is_complete = outcome == "completed";
        if event.speech {
            let scope = told.scope(sink);
            if is_complete {
                sink.add(Family::OmniSpeechStreamCompletedTotal, scope, ExtraId::NONE, 1.0);
            } else {
                let reason = one_of(outcome, &["cancelled", "closed", "engine_dead"], "error");
                let reason = sink.extra(&[reason]);
                sink.add(Family::OmniSpeechStreamAbortedTotal, scope, reason, 1.0);
            }
        }
        let played = || Some(stream.as_ref()?.player.as_ref()?.max_underrun_s());
        let Some(underrun_s) = event.underrun_s.or_else(played).filter(|_| is_complete) else {
            return Outcome::Accepted;
        };
        let Some((stage, replica)) = place else {
            sink.skip(Family::OmniAudioUnderrunS, "unknown_replica");
            return Outcome::Accepted;
        };
        let scope = told.scope_at(stage, Some(replica), sink);
        sink.observe(Family::OmniAudioUnderrunS, scope, ExtraId::NONE, underrun_s, 1);
        if underrun_s <= CONTINUITY_THRESHOLD_S {
            let threshold = sink.extra(&[CONTINUITY_THRESHOLD_MS]);
            sink.add(Family::OmniAudioContinuityOkTotal, scope, threshold, 1.0);
        }
        Outcome::Accepted
    }

    fn vad(&mut self, event: &Vad) -> Outcome {
        if let Some(open) = event.active_sessions {
            self.told.vad_sessions.insert(self.sender, open);
            self.told.set_vad_sessions(self.sink);
        }
        let scope = self.told.scope(self.sink);
        for (family, ms) in [
            (Family::OmniRealtimeVadInferenceLatencyS, event.inference_ms),
            (Family::OmniRealtimeVadEndpointDelayS, event.endpoint_delay_ms),
        ] {
            if let Some(ms) = ms {
                self.sink.observe(family, scope, ExtraId::NONE, ms / 1e3, 1);
            }
        }
        if let Some(error) = event.error.as_deref() {
            let reason = self.sink.extra(&[self.told.errors.bounded(error)]);
            self.sink
                .add(Family::OmniRealtimeVadErrorsTotal, scope, reason, 1.0);
        }
        Outcome::Accepted
    }
}

impl Request {
    fn new(serial: u32, sender: Sender) -> Self {
        Self {
            serial,
            sender,
            arrival_ns: None,
            dispatched: false,
            last_ns: 0,
            stages: Vec::new(),
            generated: 0,
            prompt_tokens: None,
            queue_wait_ms: None,
            audio: None,
        }
    }

    /// The request's share at a stage, bound to a replica where one is named. `None`: it has too many.
    fn bind(&mut self, stage: u32, replica: Option<u32>) -> Option<&mut Stage> {
        let place = self.stages.iter().position(|other| other.id == stage);
        let place = match place {
            Some(place) => place,
            None if self.stages.len() >= MAX_STAGES => return None,
            None => {
                self.stages.push(Stage {
                    id: stage,
                    ..Stage::default()
                });
                self.stages.len() - 1
            }
        };
        let share = self.stages.get_mut(place)?;
        share.replica = replica.or(share.replica);
        Some(share)
    }
}

impl Told {
    /// The timings of a diffusion stage for one request.
    fn diffusion<S: Sink + ?Sized>(
        &self,
        (stage, replica): (u32, Option<u32>),
        timings: &DiffusionSeconds,
        steps: u64,
        is_image: bool,
        sink: &mut S,
    ) {
        let per_step = |seconds: Option<f64>| {
            seconds
                .filter(|_| steps > 0)
                .map(|seconds| seconds / as_f64(steps))
        };
        if let Some(seconds) = timings.scheduler_queue_wait_s {
            let scope = self.scope_at(stage, None, sink);
            sink.observe(Family::OmniStageInQueueS, scope, ExtraId::NONE, seconds, 1);
        }
        let scope = self.scope_at(stage, replica, sink);
        let exec = timings.diffusion_engine_exec_time_s;
        let denoise = per_step(timings.forward_time_s).filter(|seconds| is_image && *seconds > 0.0);
        for (family, seconds) in [
            (Family::OmniDiffusionExecS, exec),
            (Family::OmniDiffusionExecPerStepS, per_step(exec)),
            (Family::OmniDiffusionPreprocessS, timings.preprocess_time_s),
            (Family::OmniDiffusionPostprocessS, timings.postprocess_time_s),
            (Family::OmniVaeDecodeS, timings.vae_decode_time_s),
            (Family::OmniDiffusionForwardS, timings.forward_time_s),
            (Family::OmniDiffusionKvLoadS, timings.kv_recv_time_s),
            (Family::OmniDenoiseStepLatencyS, denoise),
        ] {
            if let Some(seconds) = seconds {
                sink.observe(family, scope, ExtraId::NONE, seconds, 1);
            }
        }
    }

    /// The audio of a finished request.
    fn audio<S: Sink + ?Sized>(&self, audio: &Audio, sink: &mut S) {
        let scope = self.scope_at(audio.stage, audio.replica, sink);
        let none = ExtraId::NONE;
        if audio.frames == 0 {
            let reason = sink.extra(&["no_audio_data"]);
            sink.add(Family::OmniAudioSkippedRequestsTotal, scope, reason, 1.0);
            return;
        }
        let duration_s = as_f64(audio.frames) / f64::from(audio.sample_rate);
        sink.add(Family::OmniAudioFramesTotal, scope, none, as_f64(audio.frames));
        sink.observe(Family::OmniAudioDurationS, scope, none, duration_s, 1);
        if let Some(gen_time_s) = audio.gen_time_s {
            sink.observe(Family::OmniAudioRtf, scope, none, gen_time_s / duration_s, 1);
        }
    }
}

/// The stage and replica that an event names.
fn place(event: &Event) -> Option<(u32, Option<u32>)> {
    match event {
        Event::Dispatched(event) => Some((event.stage_id, event.replica_id)),
        Event::Stage(event) => Some((event.stage_id, event.replica_id)),
        Event::Diffusion(event) => Some((event.stage_id, event.replica_id)),
        Event::Scheduler(event) => Some((event.stage_id, Some(event.replica_id))),
        Event::FirstPacket(event) => Some((event.stage_id, event.replica_id)),
        Event::Chunk(event) => Some((event.stage_id, event.replica_id)),
        Event::StreamEnd(event) => Some((event.stage_id?, event.replica_id)),
        Event::Added(_)
        | Event::Finished(_)
        | Event::Failed(_)
        | Event::TransferSent(_)
        | Event::TransferReceived(_)
        | Event::ReplicaGone(_)
        | Event::KvWait(_)
        | Event::Vad(_)
        | Event::Lost(_)
        | Event::Unknown => None,
    }
}

/// Label values from outside, as many as there may be.
#[derive(Debug, Default)]
struct Names(Vec<Box<str>>);

impl Names {
    /// The name where there is room for it, else `unknown`.
    fn bounded<'a>(&mut self, name: &'a str) -> &'a str {
        let is_known = self.0.iter().any(|known| **known == *name);
        if !is_known && (self.0.len() >= MAX_NAMES || name.len() > MAX_NAME) {
            return UNKNOWN;
        }
        if !is_known {
            self.0.push(name.into());
        }
        name
    }
}

/// `value` where it is one of the names, else `other`: a label must not grow with what a sender makes up.
fn one_of<'a>(value: &str, names: &[&'a str], other: &'a str) -> &'a str {
    names
        .iter()
        .find(|name| **name == value)
        .copied()
        .unwrap_or(other)
}

/// Adds timings; one that neither has stays absent.
fn sum(a: &DiffusionSeconds, b: &DiffusionSeconds) -> DiffusionSeconds {
    let sum = |a: Option<f64>, b: Option<f64>| match (a, b) {
        (Some(a), Some(b)) => Some(a + b),
        (a, b) => a.or(b),
    };
    DiffusionSeconds {
        scheduler_queue_wait_s: sum(a.scheduler_queue_wait_s, b.scheduler_queue_wait_s),
        preprocess_time_s: sum(a.preprocess_time_s, b.preprocess_time_s),
        diffusion_engine_exec_time_s: sum(a.diffusion_engine_exec_time_s, b.diffusion_engine_exec_time_s),
        postprocess_time_s: sum(a.postprocess_time_s, b.postprocess_time_s),
        vae_decode_time_s: sum(a.vae_decode_time_s, b.vae_decode_time_s),
        forward_time_s: sum(a.forward_time_s, b.forward_time_s),
        kv_recv_time_s: sum(a.kv_recv_time_s, b.kv_recv_time_s),
    }
}
