//! The one path from changes and frames to series, taken by the running agent and by `omnitap replay` alike.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, hash_map::Entry},
    time::{Duration, Instant},
};

use crate::{
    coordinator::{families::Replicas, sample::CoordinatorSample},
    fill::{
        families::{Fill, Target},
        sample::EngineSample,
    },
    gpu::{
        families::{Gpus, World},
        sample::GpuSample,
    },
    host::identity::{Change, Flavor, Pipeline, PipelineId, Process, ProcessKey, Role},
    metrics::{
        catalogue::{Family, Needs, Source},
        merge::{Feed, Merge, Merged},
        number::as_f64,
        own::{Counter, Own},
        registry::{Limits, Registry},
        text::Exposition,
    },
    pipeline::{
        sink::Sink,
        stats::{Outcome as StatOutcome, Sender, Stats},
        tracker::{Limits as TrackerLimits, Tracker},
        transfers::ShmTaken,
    },
    record::{self, HttpWhat, Item, OwnedFrame, OwnedHttp},
    requests::Requests,
    wire::{
        assemble::{Content, Decoder, FrameResult, FrameType},
        frame::Frame,
        http::{
            HttpEvent,
            connections::{Connections, News, Outcome, Unsupported},
        },
        message::Message,
        shm::ShmEvent,
        stat::{Event, Head, StatError},
    },
};

/// Statistics of a scheduler count as present for this long after the last ones came. They come once a second.
const STATS_AGE_NS: u64 = 60_000_000_000;

/// Whether a frame could be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// The frame's sender is known, and the frame is this.
    Known(FrameType),
    /// The frame's sender is not a watched process: its change may still be on its way. Nothing was done.
    Unknown,
}

/// Whether an event of a connection could be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HttpTaken {
    /// The process is known.
    Known,
    /// The process is not watched: its change may still be on its way. Nothing was done.
    Unknown,
}

/// Decoder, state machines and registry, in the order in which a frame passes them.
#[derive(Debug)]
pub struct Observer {
    decoder: Decoder,
    http: Connections,
    /// News of one event, to be used again.
    news: Vec<News>,
    tracker: Tracker,
    registry: Registry,
    merge: Merge,
    own: Own,
    frames: Vec<Option<Counter>>,
    stats: Stats,
    stat_events: HashMap<(&'static str, &'static str), Counter>,
    /// The senders that are connected, and their processes.
    senders: HashMap<Sender, u32>,
    processes: HashMap<u32, Process>,
    pipelines: BTreeMap<PipelineId, Watched>,
    gpus: Gpus,
    fill: Fill,
    replicas: Replicas,
    /// Where records of requests go that are over; `None`: nobody wants them.
    requests: Option<Requests>,
    /// What the registry takes for time 0 of the clock that all times here are on.
    origin: Instant,
}

#[derive(Debug)]
struct Watched {
    pipeline: Pipeline,
    /// When a scheduler's statistics were last seen.
    stats_ns: Option<u64>,
    /// When a frame was last seen.
    frame_ns: Option<u64>,
    /// Frames whose layout is unknown have been seen.
    unknown_layout: bool,
    /// Label values of its `omnitap_pipeline_info`.
    info: Option<[String; 7]>,
    /// What `omnitap_source_state` says of each family.
    states: Vec<Option<(Source, bool)>>,
    /// API processes whose connections are seen.
    http: BTreeSet<u32>,
}

impl Observer {
    /// An observer that has seen nothing.
    #[must_use]
    pub fn new(limits: Limits, tracker_limits: TrackerLimits) -> Self {
        Self::with_sources(limits, tracker_limits, Merge::default())
    }

    /// As [`Self::new`], with another precedence of the sources.
    #[must_use]
    pub fn with_sources(limits: Limits, tracker_limits: TrackerLimits, merge: Merge) -> Self {
        let registry = Registry::new(limits);
        Self {
            decoder: Decoder::new(),
            http: Connections::new(),
            news: Vec::new(),
            tracker: Tracker::new(tracker_limits),
            stats: Stats::new(tracker_limits),
            stat_events: HashMap::new(),
            senders: HashMap::new(),
            own: registry.own(),
            registry,
            merge,
            frames: vec![None; FrameType::ALL.len() * FrameResult::ALL.len()],
            processes: HashMap::new(),
            pipelines: BTreeMap::new(),
            gpus: Gpus::default(),
            fill: Fill::default(),
            replicas: Replicas::default(),
            requests: None,
            origin: Instant::now(),
        }
    }

    /// A handle that prints all families, for any thread.
    #[must_use]
    pub fn exposition(&self) -> Exposition {
        self.registry.exposition()
    }

    /// A handle for the agent's own families, for any thread.
    #[must_use]
    pub fn own(&self) -> Own {
        self.own.clone()
    }

    /// Records of requests that end go there from now on.
    pub fn tell_requests(&mut self, requests: Requests) {
        self.tracker.want_records(true);
        self.requests = Some(requests);
    }

    /// Wall clock less `CLOCK_MONOTONIC` in nanoseconds, to place what the wire gives as wall clock.
    pub fn wall_offset(&mut self, offset_ns: i64) {
        self.tracker.set_wall_offset(offset_ns);
        self.stats.set_wall_offset(offset_ns);
    }

    /// Takes a change of what runs on the host.
    pub fn change(&mut self, change: &Change, now_ns: u64) {
        match change {
            Change::Pipeline(pipeline) => {
                self.stats.pipeline(pipeline);
                let id = pipeline.id;
                if let Some(watched) = self.pipelines.get_mut(&id) {
                    watched.pipeline = pipeline.clone();
                } else {
                    self.pipelines.insert(id, Watched::new(pipeline.clone()));
                    self.merge.set_blind(id, true);
                }
                // News of versions concern the layouts of processes that are known already.
                let members: Vec<Process> = self
                    .processes
                    .values()
                    .filter(|process| process.pipeline == id)
                    .cloned()
                    .collect();
                for process in &members {
                    self.introduce(process);
                }
            }
            Change::Process(process) => {
                self.processes.insert(process.key.pid, process.clone());
                self.introduce(process);
            }
            Change::ProcessGone(key) => self.forget(*key, now_ns),
            Change::PipelineGone(_) | Change::Payloads { .. } => {}
        }
        let (tracker, mut sink) = self.tap();
        tracker.change(change, now_ns, &mut sink);
        if let Change::PipelineGone(id) = change {
            self.pipelines.remove(id);
            self.merge.forget(*id);
            self.fill.forget(*id, &self.registry);
            self.replicas.forget(*id, &self.own);
            self.with_gpus(|gpus, world, registry| gpus.tick(now_ns, world, registry));
            self.stats.pipeline_gone(*id);
            self.registry
                .pipeline_ended(*id, self.origin + Duration::from_nanos(now_ns));
        }
        self.show(now_ns);
    }

    fn introduce(&mut self, process: &Process) {
        if let Some(watched) = self.pipelines.get(&process.pipeline) {
            let Pipeline { flavor, versions, .. } = &watched.pipeline;
            self.decoder
                .process_known(process.key.pid, process.role, *flavor, versions);
        }
    }

    fn forget(&mut self, key: ProcessKey, now_ns: u64) {
        if self
            .processes
            .get(&key.pid)
            .is_some_and(|process| process.key == key)
        {
            self.http.process_gone(key.pid, now_ns, &mut self.news);
            self.tell_news();
            if let Some(process) = self.processes.remove(&key.pid)
                && let Some(watched) = self.pipelines.get_mut(&process.pipeline)
            {
                watched.http.remove(&key.pid);
            }
            self.decoder.process_gone(key.pid);
        }
    }

    fn tell_news(&mut self) {
        let mut news = std::mem::take(&mut self.news);
        let (tracker, mut sink) = self.tap();
        for news in news.drain(..) {
            tracker.http(&news, &mut sink);
        }
        self.news = news;
    }

    /// Takes the next frame. Frames of one process come in the order in which it sent them.
    pub fn frame(&mut self, frame: &Frame<'_>) -> Taken {
        let Some(process) = self.processes.get(&frame.pid) else {
            return Taken::Unknown;
        };
        let decoded = self.decoder.frame(frame);
        count(&mut self.frames, &self.own, decoded.kind, decoded.result);
        if let Some(watched) = self.pipelines.get_mut(&process.pipeline) {
            if watched.frame_ns.replace(frame.time_ns).is_none() {
                self.merge.set_blind(process.pipeline, false);
            }
            watched.unknown_layout |= decoded.result == FrameResult::UnknownLayout;
            if let Content::Message {
                message: Message::Outputs(outputs),
                ..
            } = &decoded.content
                && outputs.stats.is_some()
            {
                watched.stats_ns = Some(frame.time_ns);
            }
        }
        match &decoded.content {
            Content::Message { message, .. } => {
                let mut sink = Merged::new(&mut self.registry, &mut self.merge, Feed::Tap, &self.stats);
                self.tracker
                    .message(frame.pid, frame.socket, frame.time_ns, message, &mut sink);
            }
            Content::Aux(aux) => self.tracker.aux(frame.pid, *aux),
            Content::Nothing | Content::Failed(_) => {}
        }
        Taken::Known(decoded.kind)
    }

    /// Takes what a process did with a shared-memory segment.
    pub fn shm(&mut self, event: &ShmEvent<'_>) -> ShmTaken {
        let (tracker, mut sink) = self.tap();
        tracker.shm(event, &mut sink)
    }

    /// The tap's state machines, and the registry as they have it.
    fn tap(&mut self) -> (&mut Tracker, Merged<'_>) {
        let sink = Merged::new(&mut self.registry, &mut self.merge, Feed::Tap, &self.stats);
        (&mut self.tracker, sink)
    }

    /// Takes what an API process did with one of its connections.
    pub fn http(&mut self, event: &HttpEvent<'_>) -> HttpTaken {
        let pid = event.pid();
        let Some(process) = self.processes.get(&pid) else {
            return HttpTaken::Unknown;
        };
        if let Some(watched) = self.pipelines.get_mut(&process.pipeline) {
            watched.http.insert(pid);
        }
        self.http.event(event, &mut self.news);
        self.tell_news();
        HttpTaken::Known
    }

    /// Blanks the content of a connection's event for a recording. To be called before [`Self::http`] takes it.
    pub fn redact_http(&self, event: &HttpEvent<'_>, http: &mut OwnedHttp) {
        if let HttpWhat::Received(bytes) | HttpWhat::Sent(bytes) = &mut http.what {
            self.http.redact(event, &mut bytes.head, &mut bytes.tail);
        }
    }

    /// An event of a connection whose process stayed unknown: counted, nothing else.
    pub fn http_stranger(&mut self) {
        self.registry
            .skip(Family::OmniSpeechStreamCompletedTotal, "unknown_process");
    }

    /// Takes a look at the GPUs that was had at `now_ns`.
    pub fn gpu(&mut self, sample: &GpuSample, now_ns: u64) {
        self.with_gpus(|gpus, world, registry| gpus.sample(sample, now_ns, world, registry));
    }

    fn with_gpus(&mut self, then: impl FnOnce(&mut Gpus, &World<'_>, &mut Registry)) {
        let Self {
            gpus,
            processes,
            pipelines,
            registry,
            ..
        } = self;
        let pipeline = |id: PipelineId| pipelines.get(&id).map(|watched| &watched.pipeline);
        let world = World {
            processes,
            pipeline: &pipeline,
        };
        then(gpus, &world, registry);
    }

    /// Takes a read of an engine's own metrics.
    pub fn engine(&mut self, sample: &EngineSample) {
        // A read may come after the end of its pipeline.
        if let Some(watched) = self.pipelines.get(&sample.pipeline) {
            let target = Target {
                registry: &mut self.registry,
                merge: &mut self.merge,
                pipeline: &watched.pipeline,
                has_frames: watched.frame_ns.is_some(),
                ledger: &self.tracker,
            };
            self.fill.sample(sample, target);
        }
    }

    /// Takes news of a coordinator that came at `now_ns`.
    pub fn coordinator(&mut self, sample: &CoordinatorSample, now_ns: u64) {
        // News may come after the end of their pipeline.
        if self.pipelines.contains_key(&sample.pipeline) {
            self.replicas.sample(sample, now_ns, &self.own);
        }
    }

    /// What is remembered of GPUs, for tests of growth.
    #[must_use]
    pub fn gpus(&self) -> &Gpus {
        &self.gpus
    }

    /// The state of stat events, and the registry as it has it.
    fn told(&mut self) -> (&mut Stats, Merged<'_>) {
        let sink = Merged::new(
            &mut self.registry,
            &mut self.merge,
            Feed::StatSocket,
            &self.tracker,
        );
        (&mut self.stats, sink)
    }

    /// A sender of stat events is connected; `pid` is 0 where it is not known.
    pub fn stat_opened(&mut self, sender: Sender, pid: u32) {
        self.senders.insert(sender, pid);
    }

    /// Takes a stat event.
    pub fn stat(&mut self, sender: Sender, now_ns: u64, head: &Head, event: &Event) {
        if let Event::Lost(lost) = event {
            self.own
                .add(Family::OmnitapStatEventsLostTotal, &[], as_f64(lost.events));
            self.stat_result(event.name(), "accepted");
            return;
        }
        let Some(pipeline) = self.pipeline_told_of(sender, head) else {
            self.stat_result(event.name(), "no_pipeline");
            return;
        };
        let mut sink = Merged::new(
            &mut self.registry,
            &mut self.merge,
            Feed::StatSocket,
            &self.tracker,
        );
        let Some(Watched { pipeline, .. }) = self.pipelines.get(&pipeline) else {
            return;
        };
        let outcome = self
            .stats
            .event(sender, pipeline, now_ns, (head, event), &mut sink);
        let result = match outcome {
            StatOutcome::Accepted => "accepted",
            StatOutcome::Repeated => "repeated",
            StatOutcome::Full => "full",
        };
        self.stat_result(event.name(), result);
    }

    /// A stat event that could not be read: counted, nothing else.
    pub fn stat_unread(&mut self, error: &StatError) {
        let result = match error {
            StatError::Json(_) | StatError::Msgpack(_) | StatError::Id(_) => "malformed",
            StatError::TooLong(_) => "too_long",
            StatError::Version(_) => "version",
            StatError::Unknown => "unknown_event",
        };
        self.stat_result("unknown", result);
    }

    fn stat_result(&mut self, event: &'static str, result: &'static str) {
        let own = &self.own;
        let counter = self.stat_events.entry((event, result));
        match counter {
            Entry::Occupied(counter) => counter.get().add(1.0),
            Entry::Vacant(place) => {
                if let Some(counter) = own.counter(Family::OmnitapStatEventsTotal, &[event, result]) {
                    place.insert(counter).add(1.0);
                }
            }
        }
    }

    /// The pipeline that an event is about: the sender's own; else the one that the event names; else the only one that
    /// has such families.
    fn pipeline_told_of(&self, sender: Sender, head: &Head) -> Option<PipelineId> {
        let of = |pid: u32| self.processes.get(&pid).map(|process| process.pipeline);
        if let Some(own) = self.senders.get(&sender).and_then(|pid| of(*pid)) {
            return Some(own);
        }
        if let Some(pid) = head.pid {
            return of(pid);
        }
        let mut candidates = self.pipelines.iter().filter(|(_, watched)| {
            let Pipeline {
                flavor,
                model,
                served_model,
                ..
            } = &watched.pipeline;
            match &head.model {
                Some(name) => model.as_ref() == Some(name) || served_model.as_ref() == Some(name),
                None => *flavor == Flavor::Omni,
            }
        });
        let (id, _) = candidates.next()?;
        candidates.next().is_none().then_some(*id)
    }

    /// A sender's connection has ended. Pipelines of which nobody else tells go to their other sources.
    pub fn stat_closed(&mut self, sender: Sender) {
        let Some(pid) = self.senders.remove(&sender) else {
            return;
        };
        let is_gone = !self.processes.contains_key(&pid);
        let (stats, mut sink) = self.told();
        for pipeline in stats.closed(sender, is_gone, &mut sink) {
            self.merge.depart(
                pipeline,
                Feed::StatSocket,
                (&self.stats, &self.tracker),
                &mut self.registry,
            );
        }
    }

    /// A connector's event whose process stayed unknown: counted, nothing else.
    pub fn shm_stranger(&mut self) {
        self.registry
            .skip(Family::OmniTransferSizeBytes, "unknown_process");
    }

    /// Blanks the content of a frame for a recording; `kind` is what [`Self::frame`] said of it.
    pub fn redact(&self, kind: FrameType, frame: &mut OwnedFrame) {
        self.decoder
            .redact(frame.pid, kind, frame.size, &mut frame.head, &mut frame.tail);
    }

    /// A frame whose sender stayed unknown: counted, nothing else.
    pub fn stranger(&mut self) {
        count(
            &mut self.frames,
            &self.own,
            FrameType::Other,
            FrameResult::UnknownProcess,
        );
    }

    /// Time passes: grace times end, stale snapshots stop counting, ended series expire. Once a second is right.
    pub fn tick(&mut self, now_ns: u64) {
        self.http.tick(now_ns, &mut self.news);
        self.tell_news();
        self.merge.tick(now_ns);
        let (tracker, mut sink) = self.tap();
        tracker.tick(now_ns, &mut sink);
        self.tell_of_requests(now_ns);
        self.with_gpus(|gpus, world, registry| gpus.tick(now_ns, world, registry));
        let (stats, mut sink) = self.told();
        stats.tick(now_ns, &mut sink);
        self.replicas.tick(now_ns, &self.own);
        self.registry.expire(self.origin + Duration::from_nanos(now_ns));
        self.show(now_ns);
    }

    fn tell_of_requests(&mut self, now_ns: u64) {
        let Some(requests) = &self.requests else { return };
        let mut records = Vec::new();
        let refused = self.tracker.take_records(now_ns, &mut records);
        requests.ended(records, refused, now_ns);
        requests.open(now_ns, |max| self.tracker.open_records(now_ns, max));
    }

    /// Takes an entry of a recording.
    pub fn replay(&mut self, entry: &record::Entry) {
        match &entry.item {
            Item::WallOffset(offset_ns) => self.wall_offset(*offset_ns),
            Item::Change(change) => self.change(change, entry.t),
            Item::Frame(frame) => {
                if self.frame(&frame.frame(entry.t)) == Taken::Unknown {
                    self.stranger();
                }
            }
            Item::Shm(shm) => {
                if self.shm(&shm.event(entry.t)) == ShmTaken::Unknown {
                    self.shm_stranger();
                }
            }
            Item::Http(http) => {
                if self.http(&http.event(entry.t)) == HttpTaken::Unknown {
                    self.http_stranger();
                }
            }
            Item::Gpu(sample) => self.gpu(sample, entry.t),
            Item::Engine(sample) => self.engine(sample),
            Item::StatOpened { sender, pid } => self.stat_opened(Sender(*sender), *pid),
            Item::Stat { sender, head, event } => self.stat(Sender(*sender), entry.t, head, event),
            Item::StatClosed { sender } => self.stat_closed(Sender(*sender)),
            Item::Coordinator(sample) => self.coordinator(sample, entry.t),
            Item::Tick => self.tick(entry.t),
        }
    }

    /// The agent's own families about what it watches.
    fn show(&mut self, now_ns: u64) {
        for flavor in [Flavor::Vllm, Flavor::Omni] {
            let label = [flavor_name(flavor)];
            let mut stages = BTreeSet::new();
            let mut replicas = BTreeSet::new();
            let of_flavor = |id: &PipelineId| {
                self.pipelines
                    .get(id)
                    .is_some_and(|w| w.pipeline.flavor == flavor)
            };
            for process in self
                .processes
                .values()
                .filter(|process| of_flavor(&process.pipeline))
            {
                if let Role::LlmStage { stage, replica } | Role::DiffusionStage { stage, replica } =
                    process.role
                {
                    stages.insert((process.pipeline, stage));
                    replicas.insert((process.pipeline, stage, replica));
                }
            }
            let pipelines = self
                .pipelines
                .values()
                .filter(|watched| watched.pipeline.flavor == flavor)
                .count();
            self.own.set(Family::OmnitapPipelines, &label, to_f64(pipelines));
            self.own.set(Family::OmnitapStages, &label, to_f64(stages.len()));
            self.own
                .set(Family::OmnitapReplicas, &label, to_f64(replicas.len()));
        }
        for (id, watched) in &mut self.pipelines {
            watched.show(
                *id,
                &self.own,
                &self.merge,
                Seen {
                    transfers: self.tracker.has_transfers(*id),
                    peak_memory: self.gpus.has_peak(*id),
                },
                now_ns,
            );
        }
        let transfers = self.tracker.transfers();
        self.own
            .set(Family::OmnitapTransfersOpen, &[], to_f64(transfers.open));
        self.own.set_total(
            Family::OmnitapTransferStageMismatchesTotal,
            &[],
            as_f64(transfers.stage_mismatches),
        );
        self.show_http();
    }

    fn show_http(&self) {
        let counts = self.http.counts();
        for (outcome, count) in Outcome::ALL.iter().zip(counts.requests) {
            self.own.set_total(
                Family::OmnitapApiRequestsTotal,
                &[outcome.as_str()],
                as_f64(count),
            );
        }
        for (what, count) in Unsupported::ALL.iter().zip(counts.unsupported) {
            self.own.set_total(
                Family::OmnitapApiUnsupportedTotal,
                &[what.as_str()],
                as_f64(count),
            );
        }
        for (family, count) in [
            (Family::OmnitapApiBreaksTotal, counts.breaks),
            (Family::OmnitapApiConnectionsRefusedTotal, counts.refused),
            (
                Family::OmnitapApiAmbiguousJoinsTotal,
                self.tracker.ambiguous_joins(),
            ),
        ] {
            self.own.set_total(family, &[], as_f64(count));
        }
        self.own
            .set(Family::OmnitapApiConnections, &[], to_f64(self.http.len()));
    }
}

/// What was seen of a pipeline beside frames.
#[derive(Clone, Copy, Debug)]
struct Seen {
    /// A transfer between its stages was observed.
    transfers: bool,
    /// NVML gives a stage's peak memory.
    peak_memory: bool,
}

impl Watched {
    fn new(pipeline: Pipeline) -> Self {
        Self {
            pipeline,
            stats_ns: None,
            frame_ns: None,
            unknown_layout: false,
            info: None,
            states: vec![None; Family::COUNT],
            http: BTreeSet::new(),
        }
    }

    fn show(&mut self, id: PipelineId, own: &Own, merge: &Merge, seen: Seen, now_ns: u64) {
        let Pipeline {
            flavor,
            model,
            served_model,
            versions,
            ..
        } = &self.pipeline;
        let text = |value: &Option<String>| value.clone().unwrap_or_else(|| "unknown".to_owned());
        let layout = match (self.unknown_layout, self.frame_ns) {
            (true, _) => "unknown",
            (false, Some(_)) => "known",
            (false, None) => "unseen",
        };
        let info = [
            id.0.to_string(),
            flavor_name(*flavor).to_owned(),
            text(model),
            text(served_model),
            text(&versions.vllm),
            text(&versions.omni),
            layout.to_owned(),
        ];
        if self.info.as_ref() != Some(&info) {
            if let Some(old) = &self.info {
                own.remove(Family::OmnitapPipelineInfo, &old.each_ref().map(String::as_str));
            }
            own.set(
                Family::OmnitapPipelineInfo,
                &info.each_ref().map(String::as_str),
                1.0,
            );
            self.info = Some(info);
        }
        let has_frames = self.frame_ns.is_some();
        let has_stats = self
            .stats_ns
            .is_some_and(|at| now_ns.saturating_sub(at) <= STATS_AGE_NS);
        let has_http = !self.http.is_empty();
        let pipeline = id.0.to_string();
        for (family, shown) in Family::ALL.iter().zip(&mut self.states) {
            let row = family.row();
            let applies = *flavor == Flavor::Omni || !row.name.starts_with("vllm_omni:");
            if !applies {
                continue;
            }
            let holder = merge.holder(id, *family);
            let state = match (holder, row.source, row.needs) {
                (Some(feed @ (Feed::StatSocket | Feed::Engine)), ..) => Some((feed.source(*family), true)),
                // Frames stand in where the connections are not seen.
                (_, Source::Http, _) => match family.stand_in() {
                    Some(stand_in) if !has_http => Some((stand_in, has_frames)),
                    _ => Some((Source::Http, has_http)),
                },
                (_, Source::Wire, Needs::Nothing) => Some((row.source, has_frames)),
                (_, Source::Wire, Needs::LogStats | Needs::Feature) => Some((row.source, has_stats)),
                (_, Source::Transfer, _) => Some((row.source, seen.transfers)),
                (Some(Feed::Tap), ..) => Some((Feed::Tap.source(*family), true)),
                (None, ..) if *family == Family::OmniPeakMemoryMb && seen.peak_memory => {
                    Some((Source::Nvml, true))
                }
                (None, ..) => None,
            };
            if state == *shown {
                continue;
            }
            let labels = |source: Source| [pipeline.as_str(), row.name, source.as_str()];
            if let Some((old, _)) = shown.filter(|(old, _)| state.is_none_or(|(source, _)| source != *old)) {
                own.remove(Family::OmnitapSourceState, &labels(old));
            }
            if let Some((source, is_served)) = state {
                let value = f64::from(u8::from(is_served));
                own.set(Family::OmnitapSourceState, &labels(source), value);
            }
            *shown = state;
        }
    }
}

fn count(frames: &mut [Option<Counter>], own: &Own, kind: FrameType, result: FrameResult) {
    let index = kind as usize * FrameResult::ALL.len() + result as usize;
    let Some(slot) = frames.get_mut(index) else { return };
    if slot.is_none() {
        *slot = own.counter(Family::OmnitapFramesTotal, &[kind.as_str(), result.as_str()]);
    }
    if let Some(counter) = slot {
        counter.add(1.0);
    }
}

fn flavor_name(flavor: Flavor) -> &'static str {
    match flavor {
        Flavor::Vllm => "vllm",
        Flavor::Omni => "omni",
    }
}

fn to_f64(count: usize) -> f64 {
    u32::try_from(count).map_or(f64::INFINITY, f64::from)
}
