//! A pipeline to play against, and a sink that keeps everything it is given.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::expect_used,
    reason = "shared by several test binaries that each use a part of it; a failed expectation is a failed test"
)]

use std::collections::BTreeMap;

use omnitap::{
    host::identity::{Change, Flavor, Pipeline, PipelineId, Process, ProcessKey, Role, Versions},
    metrics::catalogue::Family,
    pipeline::{
        sink::{ExtraId, Scope, ScopeId, Sink},
        tracker::{Limits, Tracker},
        transfers::ShmTaken,
    },
    wire::{
        control::Control,
        http::{
            connections::News,
            note::{Ask, AudioChunk, End, Endpoint, ExchangeId, Note},
        },
        message::{
            Add, EngineOutputs, Events, FinishReason, Message, Output, OutputKind, PrefillStats,
            SchedulerStats,
        },
        shm::ShmEvent,
    },
};

/// Label values of a series: stage, replica, further values.
pub type Labels = (Option<u32>, Option<u32>, Vec<String>);

/// Keeps observations by family and label values, as the registry does.
#[derive(Debug, Default)]
pub struct Recorder {
    scopes: Vec<Scope>,
    extras: Vec<Vec<String>>,
    pub counters: BTreeMap<(Family, Labels), f64>,
    pub samples: BTreeMap<(Family, Labels), Vec<f64>>,
    gauges: BTreeMap<(Family, ScopeId, ExtraId), f64>,
    pub skipped: BTreeMap<(Family, &'static str), u64>,
    pub retired: Vec<ScopeId>,
}

impl Recorder {
    fn labels(&self, scope: ScopeId, extra: ExtraId) -> Labels {
        let scope = &self.scopes[scope.0 as usize];
        let extra = match extra.0 {
            0 => Vec::new(),
            extra => self.extras[extra as usize - 1].clone(),
        };
        (scope.stage, scope.replica, extra)
    }

    /// All scopes, in the order in which they were first asked for.
    pub fn scopes(&self) -> &[Scope] {
        &self.scopes
    }

    /// A counter of a stage's replica 0. Panics where it has no child.
    pub fn counter(&self, family: Family, stage: u32, extra: &[&str]) -> f64 {
        self.counter_at(family, (Some(stage), Some(0)), extra)
            .expect("the counter has this child")
    }

    pub fn counter_at(&self, family: Family, at: (Option<u32>, Option<u32>), extra: &[&str]) -> Option<f64> {
        self.counters.get(&(family, key(at, extra))).copied()
    }

    /// A counter of the pipeline; 0 without a child.
    pub fn total(&self, family: Family, extra: &[&str]) -> f64 {
        self.counter_at(family, (None, None), extra).unwrap_or(0.0)
    }

    /// The samples of a stage's replica 0.
    pub fn seen(&self, family: Family, stage: u32) -> Vec<f64> {
        self.seen_at(family, (Some(stage), Some(0)), &[])
    }

    pub fn seen_at(&self, family: Family, at: (Option<u32>, Option<u32>), extra: &[&str]) -> Vec<f64> {
        self.samples
            .get(&(family, key(at, extra)))
            .cloned()
            .unwrap_or_default()
    }

    /// The samples of the pipeline.
    pub fn seen_whole(&self, family: Family) -> Vec<f64> {
        self.seen_at(family, (None, None), &[])
    }

    /// The sum of a gauge's parts; `None` without any.
    pub fn gauge(&self, family: Family, at: (Option<u32>, Option<u32>), extra: &[&str]) -> Option<f64> {
        let parts: Vec<f64> = self
            .gauges
            .iter()
            .filter(|((of, scope, with), _)| *of == family && self.labels(*scope, *with) == key(at, extra))
            .map(|(_, value)| *value)
            .collect();
        (!parts.is_empty()).then(|| parts.iter().sum())
    }

    pub fn skips(&self, family: Family, reason: &'static str) -> u64 {
        self.skipped.get(&(family, reason)).copied().unwrap_or(0)
    }

    /// All of a counter's children, summed.
    pub fn sum(&self, family: Family) -> f64 {
        self.counters
            .iter()
            .filter(|((of, _), _)| *of == family)
            .map(|(_, value)| value)
            .sum()
    }

    /// The scope of a stage's replica.
    pub fn scope_at(&self, at: (Option<u32>, Option<u32>)) -> &Scope {
        self.scopes
            .iter()
            .rev()
            .find(|scope| (scope.stage, scope.replica) == at)
            .expect("the scope exists")
    }
}

fn key((stage, replica): (Option<u32>, Option<u32>), extra: &[&str]) -> Labels {
    (stage, replica, extra.iter().map(ToString::to_string).collect())
}

impl Sink for Recorder {
    fn scope(&mut self, scope: &Scope) -> ScopeId {
        let place = self.scopes.iter().position(|known| known == scope);
        let place = place.unwrap_or_else(|| {
            self.scopes.push(scope.clone());
            self.scopes.len() - 1
        });
        ScopeId(u32::try_from(place).expect("few scopes"))
    }

    fn extra(&mut self, values: &[&str]) -> ExtraId {
        let values: Vec<String> = values.iter().map(ToString::to_string).collect();
        let place = self.extras.iter().position(|known| *known == values);
        let place = place.unwrap_or_else(|| {
            self.extras.push(values);
            self.extras.len() - 1
        });
        ExtraId(u32::try_from(place + 1).expect("few values"))
    }

    fn add(&mut self, family: Family, scope: ScopeId, extra: ExtraId, by: f64) {
        assert!(by >= 0.0, "{family:?} counts down");
        let labels = self.labels(scope, extra);
        *self.counters.entry((family, labels)).or_default() += by;
    }

    fn observe(&mut self, family: Family, scope: ScopeId, extra: ExtraId, value: f64, times: u64) {
        let labels = self.labels(scope, extra);
        let samples = self.samples.entry((family, labels)).or_default();
        samples.extend((0..times).map(|_| value));
    }

    fn set(&mut self, family: Family, scope: ScopeId, extra: ExtraId, value: f64) {
        self.gauges.insert((family, scope, extra), value);
    }

    fn skip(&mut self, family: Family, reason: &'static str) {
        *self.skipped.entry((family, reason)).or_default() += 1;
    }

    fn retire(&mut self, scope: ScopeId) {
        self.gauges.retain(|(_, of, _), _| *of != scope);
        self.retired.push(scope);
    }
}

/// Milliseconds as nanoseconds.
pub const MS: u64 = 1_000_000;

/// Wall clock less monotonic clock in the plays.
pub const WALL_OFFSET_NS: i64 = 1_800_000_000_000_000_000;

/// The API server's pid.
pub const API: u32 = 100;

/// The pid of a stage's replica.
pub const fn engine(stage: u32, replica: u32) -> u32 {
    200 + 10 * stage + replica
}

/// A tracker, its sink and a clock in milliseconds.
pub struct Play {
    pub tracker: Tracker,
    pub sink: Recorder,
}

impl Play {
    /// vLLM-Omni with one replica of each of `stages` LLM stages, found at time 0.
    pub fn omni(stages: u32) -> Self {
        let mut play = Self::of(Flavor::Omni, Limits::default());
        play.start(API, Role::ApiServer);
        for stage in 0..stages {
            play.start_engine(stage, 0);
        }
        play
    }

    /// Plain vLLM with `replicas` data-parallel engines.
    pub fn plain(replicas: u32) -> Self {
        let mut play = Self::of(Flavor::Vllm, Limits::default());
        play.start(API, Role::ApiServer);
        for replica in 0..replicas {
            play.start_engine(0, replica);
        }
        play
    }

    /// A pipeline without processes.
    pub fn of(flavor: Flavor, limits: Limits) -> Self {
        let mut play = Self {
            tracker: Tracker::new(limits),
            sink: Recorder::default(),
        };
        play.tracker.set_wall_offset(WALL_OFFSET_NS);
        play.change(0, &Change::Pipeline(pipeline(1, flavor)));
        play
    }

    pub fn change(&mut self, at_ms: u64, change: &Change) {
        self.tracker.change(change, at_ms * MS, &mut self.sink);
    }

    pub fn start(&mut self, pid: u32, role: Role) {
        self.change(0, &Change::Process(process(1, pid, role)));
    }

    pub fn start_engine(&mut self, stage: u32, replica: u32) {
        let role = Role::LlmStage {
            stage: Some(stage),
            replica: Some(replica),
        };
        self.start(engine(stage, replica), role);
    }

    pub fn stop(&mut self, at_ms: u64, pid: u32) {
        self.change(at_ms, &Change::ProcessGone(key_of(pid)));
    }

    pub fn send(&mut self, at_ms: u64, pid: u32, message: &Message<'_>) {
        self.send_on(at_ms, pid, 0, message);
    }

    pub fn send_on(&mut self, at_ms: u64, pid: u32, socket: u64, message: &Message<'_>) {
        self.tracker
            .message(pid, socket, at_ms * MS, message, &mut self.sink);
    }

    /// ADD for the stage behind the API server's socket `socket` (by habit its stage).
    pub fn add(&mut self, at_ms: u64, socket: u64, add: Add<'_>) {
        self.send_on(at_ms, API, socket, &Message::Add(add));
    }

    pub fn abort(&mut self, at_ms: u64, socket: u64, id: &str) {
        self.send_on(at_ms, API, socket, &Message::Abort(vec![id]));
    }

    /// Outputs of a stage's replica 0, stamped 1 ms before they are sent.
    pub fn out(&mut self, at_ms: u64, stage: u32, outputs: Vec<Output<'_>>) {
        self.out_at(at_ms, engine(stage, 0), outputs);
    }

    pub fn out_at(&mut self, at_ms: u64, pid: u32, outputs: Vec<Output<'_>>) {
        self.send(at_ms, pid, &Message::Outputs(frame(at_ms, outputs)));
    }

    pub fn stats(&mut self, at_ms: u64, stage: u32, stats: SchedulerStats<'_>) {
        self.stats_at(at_ms, engine(stage, 0), stats);
    }

    pub fn stats_at(&mut self, at_ms: u64, pid: u32, stats: SchedulerStats<'_>) {
        let outputs = EngineOutputs {
            stats: Some(stats),
            ..frame(at_ms, Vec::new())
        };
        self.send(at_ms, pid, &Message::Outputs(outputs));
    }

    /// `pid` filled a segment. `false`: it is not known.
    pub fn put(&mut self, pid: u32, name: &str, size: u64, (start_ms, done_ms): (u64, u64)) -> bool {
        let put = ShmEvent::Put {
            pid,
            tid: pid,
            name,
            size,
            start_ns: start_ms * MS,
            done_ns: done_ms * MS,
        };
        self.tracker.shm(&put, &mut self.sink) != ShmTaken::Unknown
    }

    /// `pid` took a segment.
    pub fn get(&mut self, pid: u32, name: &str, (start_ms, done_ms): (u64, u64)) -> bool {
        let get = ShmEvent::Get {
            pid,
            tid: pid,
            name,
            start_ns: start_ms * MS,
            done_ns: done_ms * MS,
        };
        self.tracker.shm(&get, &mut self.sink) != ShmTaken::Unknown
    }

    pub fn unlink(&mut self, pid: u32, name: &str, at_ms: u64) {
        let unlinked = ShmEvent::Unlinked {
            pid,
            tid: pid,
            name,
            time_ns: at_ms * MS,
        };
        self.tracker.shm(&unlinked, &mut self.sink);
    }

    /// A connector's message: by whom, on which socket, to whose number.
    pub fn control(
        &mut self,
        at_ms: u64,
        (pid, socket): (u32, u64),
        peer: Option<u32>,
        control: Control<'_>,
    ) {
        self.send_on(at_ms, pid, socket, &Message::Connector { control, peer });
    }

    /// News of an exchange with the API server.
    pub fn http(&mut self, at_ms: u64, exchange: u64, note: Note) {
        let news = News {
            pid: API,
            exchange: ExchangeId(exchange),
            time_ns: at_ms * MS,
            note,
        };
        self.tracker.http(&news, &mut self.sink);
    }

    /// A request was read by the API server.
    pub fn asks(&mut self, at_ms: u64, exchange: u64, endpoint: Endpoint, ask: Ask) {
        let asked = Note::Asked {
            endpoint,
            request_id: None,
        };
        self.http(at_ms, exchange, asked);
        self.http(at_ms, exchange, Note::Read(ask));
    }

    /// The API server wrote the head of an answer.
    pub fn answers(&mut self, at_ms: u64, exchange: u64, status: u16, streams_speech: bool) {
        let answered = Note::Answered {
            status,
            streams_speech,
        };
        self.http(at_ms, exchange, answered);
    }

    /// The API server wrote samples.
    pub fn writes(&mut self, at_ms: u64, exchange: u64, bytes: u64) {
        let chunk = AudioChunk {
            bytes,
            ..AudioChunk::default()
        };
        self.http(at_ms, exchange, Note::Audio(chunk));
    }

    pub fn ends(&mut self, at_ms: u64, exchange: u64, end: End) {
        self.http(at_ms, exchange, Note::Ended(end));
    }

    pub fn tick(&mut self, at_ms: u64) {
        self.tracker.tick(at_ms * MS, &mut self.sink);
    }

    pub fn running(&self) -> Option<f64> {
        self.sink.gauge(Family::OmniNumRequestsRunning, (None, None), &[])
    }

    pub fn waiting(&self) -> Option<f64> {
        self.sink.gauge(Family::OmniNumRequestsWaiting, (None, None), &[])
    }
}

pub fn key_of(pid: u32) -> ProcessKey {
    ProcessKey {
        pid,
        start_ticks: u64::from(pid),
    }
}

pub fn process(pipeline: u32, pid: u32, role: Role) -> Process {
    Process {
        key: key_of(pid),
        parent: 1,
        role,
        pipeline: PipelineId(pipeline),
        container: None,
    }
}

pub fn pipeline(id: u32, flavor: Flavor) -> Pipeline {
    Pipeline {
        id: PipelineId(id),
        flavor,
        model: Some("org/model".to_owned()),
        served_model: Some("model".to_owned()),
        versions: Versions::default(),
        max_model_len: Some(4096),
        root: key_of(API),
    }
}

/// One step's message, stamped 1 ms before it is sent.
#[allow(clippy::cast_precision_loss, reason = "milliseconds of a play")]
pub fn frame(at_ms: u64, outputs: Vec<Output<'_>>) -> EngineOutputs<'_> {
    EngineOutputs {
        outputs,
        timestamp: Some((at_ms as f64 - 1.0) / 1000.0),
        ..EngineOutputs::default()
    }
}

/// An ADD whose request arrived `at_ms` after the monotonic epoch.
#[allow(
    clippy::cast_precision_loss,
    reason = "nanoseconds since the epoch lose a few hundred, as on the wire"
)]
pub fn add(id: &str, arrival_ms: u64) -> Add<'_> {
    Add {
        request_id: id,
        prompt_tokens: Some(10),
        arrival: Some((WALL_OFFSET_NS as f64 + (arrival_ms * MS) as f64) / 1e9),
        max_tokens: Some(16),
        n: 1,
        ..Add::default()
    }
}

/// The same for a streamed response.
pub fn add_streamed(id: &str, arrival_ms: u64) -> Add<'_> {
    Add {
        output_kind: OutputKind::Delta,
        ..add(id, arrival_ms)
    }
}

pub fn token(id: &str) -> Output<'_> {
    Output {
        request_id: id,
        new_tokens: 1,
        ..Output::default()
    }
}

/// The first token: 10 prompt tokens, 4 from the local cache, 1 from an external one.
pub fn first(id: &str) -> Output<'_> {
    Output {
        prefill: Some(PrefillStats {
            prompt_tokens: 10,
            computed_tokens: 5,
            cached_tokens: 5,
            local_cached_tokens: 4,
            external_cached_tokens: 1,
        }),
        ..token(id)
    }
}

/// The first token with the events of a queue wait.
pub fn first_with_events(id: &str, queued_s: f64, scheduled_s: f64) -> Output<'_> {
    Output {
        events: Events {
            queued: Some(queued_s),
            scheduled: Some(scheduled_s),
            preemptions: 0,
        },
        ..first(id)
    }
}

pub fn last(id: &str, reason: FinishReason) -> Output<'_> {
    Output {
        finish_reason: Some(reason),
        ..token(id)
    }
}

/// `left` is what `right` should be, up to the rounding of times.
#[track_caller]
pub fn assert_close(left: &[f64], right: &[f64]) {
    assert!(
        left.len() == right.len() && left.iter().zip(right).all(|(a, b)| (a - b).abs() < 2e-6),
        "{left:?} is not {right:?}"
    );
}
