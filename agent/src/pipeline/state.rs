//! One pipeline: its engines, its requests over all their stages, and the pipeline's own families.

use std::collections::{BTreeMap, BTreeSet};

use slab::Slab;

use super::{
    audio::{CONTINUITY_THRESHOLD_S, seconds_between},
    book::{
        Aborting, Added, Book, Due, Finished, FinishedAudio, Part, PartState, Phase, Request, StageAudio,
        Task, UNKNOWN,
    },
    edges::RequestHop,
    engine::{Context, Engine, Snapshot, engine_number},
    forwards::Forward,
    http::{Client, Exchanges},
    labels::{Failure, Labels, Sleep},
    places::End,
    records::{
        self, Draft, Figures, Held, OpenRequest, OpenStage, OpenState, Outcome, RequestRecord, StageRecord,
    },
    sink::{ExtraId, Scope, ScopeId, Sink, Subject},
    tracker::Limits,
};
use crate::{
    host::identity::{Flavor, Pipeline, Process, Role},
    metrics::{catalogue::Family, number::as_f64},
    wire::{
        assemble::{Aux, FrameType},
        diffusion::Diffusion,
        message::{Add, FinishReason, Message, OutputKind, Utility},
    },
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Api,
    /// Index among its pipeline's engines.
    Engine(usize),
    Other,
}

#[derive(Debug)]
pub(super) struct PipelineState {
    pub(super) pipeline: Pipeline,
    /// Scope of the pipeline's own families (vLLM-Omni).
    pub(super) scope: Option<ScopeId>,
    pub(super) engines: Slab<Engine>,
    pub(super) book: Book,
    /// What passes on the API processes' connections.
    pub(super) exchanges: Exchanges,
    /// Records of the requests that ended just now.
    pub(super) held: Held,
    /// API processes that live.
    apis: usize,
    /// The highest stage of any kind.
    last_stage: Option<u32>,
    /// `max_model_len` of the lowest LLM stage that told it.
    ready: Option<(u32, u32)>,
    next_scan_ns: u64,
}

/// The slot of a stage that was dropped while its request is not over.
const NO_SLOT: u32 = u32::MAX;

/// How often open requests are looked through for time-outs.
const TIMEOUT_SCAN_NS: u64 = 10_000_000_000;

/// What all pipelines share.
#[derive(Clone, Copy, Debug)]
pub(super) struct Environment {
    pub(super) limits: Limits,
    pub(super) labels: Labels,
    pub(super) wall_offset_ns: Option<i64>,
    /// Whether requests that end leave a record.
    pub(super) records: bool,
}

impl PipelineState {
    pub(super) fn new(pipeline: Pipeline) -> Self {
        Self {
            pipeline,
            scope: None,
            engines: Slab::new(),
            book: Book::default(),
            exchanges: Exchanges::default(),
            held: Held::default(),
            apis: 0,
            last_stage: None,
            ready: None,
            next_scan_ns: 0,
        }
    }

    /// Requests that some stage still has work for; those that guide another are not requests.
    pub(super) fn open(&self) -> usize {
        self.book
            .requests
            .iter()
            .filter(|(_, request)| request.is_active() && !request.companion)
            .count()
    }

    fn is_omni(&self) -> bool {
        self.pipeline.flavor == Flavor::Omni
    }

    fn context<'a>(&self, environment: &'a Environment) -> Context<'a> {
        Context {
            labels: &environment.labels,
            flavor: self.pipeline.flavor,
            pipeline: self.pipeline.id,
            pipeline_scope: self.scope,
            has_api: self.apis > 0,
            max_requests: environment.limits.max_requests,
            wall_offset_ns: environment.wall_offset_ns,
        }
    }

    // ---- processes ----

    pub(super) fn admit(&mut self, process: &Process, now_ns: u64) -> Kind {
        let (stage, replica, is_llm) = match process.role {
            Role::ApiServer | Role::ApiWorker { .. } => {
                self.apis += 1;
                return Kind::Api;
            }
            Role::Headless | Role::Worker | Role::Coordinator => return Kind::Other,
            Role::LlmStage { stage, replica } => (stage, replica, true),
            Role::DiffusionStage { stage, replica } => (stage, replica, false),
        };
        let (stage, replica) = self.identity(stage, replica);
        let index = self.engines.insert(Engine::new(stage, replica, is_llm, now_ns));
        self.place_stages();
        Kind::Engine(index)
    }

    /// Plain vLLM has one stage, and one replica unless it runs data-parallel.
    fn identity(&self, stage: Option<u32>, replica: Option<u32>) -> (Option<u32>, Option<u32>) {
        match self.pipeline.flavor {
            Flavor::Vllm => (stage.or(Some(0)), replica.or(Some(0))),
            Flavor::Omni => (stage, replica),
        }
    }

    /// The stage and replica of an engine became known. `false`: it was watched under others already.
    pub(super) fn rename_engine(&mut self, index: usize, role: Role) -> bool {
        let (stage, replica, is_llm) = match role {
            Role::LlmStage { stage, replica } => (stage, replica, true),
            Role::DiffusionStage { stage, replica } => (stage, replica, false),
            _ => return false,
        };
        let (stage, replica) = self.identity(stage, replica);
        match self.engines.get_mut(index) {
            Some(engine) if engine.scope.is_none() && engine.is_llm == is_llm => {
                engine.stage = stage;
                engine.replica = replica;
            }
            _ => return false,
        }
        self.place_stages();
        true
    }

    /// Derives the order of the stages from the engines that live.
    fn place_stages(&mut self) {
        let stages = |is_llm: bool| {
            let mut stages: Vec<u32> = self
                .engines
                .iter()
                .filter(|(_, engine)| engine.is_llm == is_llm)
                .map(|(_, engine)| engine.stage.unwrap_or(u32::MAX))
                .collect();
            stages.sort_unstable();
            stages.dedup();
            stages
        };
        let (llm, diffusion) = (stages(true), stages(false));
        self.last_stage = llm.last().max(diffusion.last()).copied();
        self.book.llm_stages = llm.len();
        let mut all = [llm.as_slice(), diffusion.as_slice()].concat();
        all.sort_unstable();
        all.dedup();
        for (_, engine) in &mut self.engines {
            let stage = engine.stage.unwrap_or(u32::MAX);
            engine.rank = llm.binary_search(&stage).unwrap_or(0);
            engine.stages_before = all.binary_search(&stage).unwrap_or(0);
        }
    }

    /// Creates scopes and their first children for whatever is known well enough by now.
    pub(super) fn create_scopes<S: Sink + ?Sized>(
        &mut self,
        now_ns: u64,
        environment: &Environment,
        sink: &mut S,
    ) {
        if self.scope.is_none() && self.is_omni() && self.apis > 0 {
            let scope = sink.scope(&self.scope_of(None, None, None));
            self.scope = Some(scope);
            let none = ExtraId::NONE;
            sink.add(Family::OmniPromptTokensTotal, scope, none, 0.0);
            sink.add(Family::OmniGenerationTokensTotal, scope, none, 0.0);
            sink.observe(Family::OmniE2eRequestLatencyS, scope, none, 0.0, 0);
            sink.set(Family::OmniNumRequestsRunning, scope, none, 0.0);
            sink.set(Family::OmniNumRequestsWaiting, scope, none, 0.0);
        }
        // Token buckets depend on the longest sequence of the first stage, which a starting engine is about to tell.
        let first_stage = self
            .engines
            .iter()
            .filter(|(_, engine)| engine.is_llm)
            .filter_map(|(_, engine)| engine.stage)
            .min();
        let is_known = self.pipeline.max_model_len.is_some()
            || self.ready.is_some_and(|(stage, _)| Some(stage) <= first_stage);
        let is_starting = self.engines.iter().any(|(_, engine)| engine.is_starting);
        let settle_ns = environment.limits.settle_engine_ns;
        let settled: Vec<usize> = self
            .engines
            .iter()
            .filter(|(_, engine)| {
                // A diffusion stage's place may be told anew while its pipeline starts: it waits for a first result.
                engine.scope.is_none()
                    && engine.is_llm
                    && (is_known || (!is_starting && now_ns.saturating_sub(engine.found_ns) >= settle_ns))
            })
            .map(|(index, _)| index)
            .collect();
        for index in settled {
            self.create_engine_scope(index, environment, sink);
        }
    }

    pub(super) fn create_engine_scope<S: Sink + ?Sized>(
        &mut self,
        index: usize,
        environment: &Environment,
        sink: &mut S,
    ) -> Option<ScopeId> {
        let engine = self.engines.get(index)?;
        let scope = self.scope_of(Some(engine.stage?), Some(engine.replica?), self.max_model_len());
        let scope = sink.scope(&scope);
        let engine = self.engines.get_mut(index)?;
        engine.scope = Some(scope);
        Engine::create_children(scope, &environment.labels, sink);
        Self::set_engine_gauges(scope, &Totals::default(), environment, sink);
        Self::set_sleep(scope, engine.sleep, environment, sink);
        Some(scope)
    }

    pub(super) fn max_model_len(&self) -> Option<u32> {
        self.pipeline
            .max_model_len
            .or(self.ready.map(|(_, length)| length))
    }

    pub(super) fn scope_of(
        &self,
        stage: Option<u32>,
        replica: Option<u32>,
        max_model_len: Option<u32>,
    ) -> Scope {
        Scope {
            stage,
            replica,
            max_model_len,
            ..Scope::of(&self.pipeline)
        }
    }

    /// The pipeline became known better. Under another model's name series begin anew.
    pub(super) fn describe<S: Sink + ?Sized>(&mut self, pipeline: &Pipeline, sink: &mut S) {
        let is_renamed = Scope::of(pipeline) != Scope::of(&self.pipeline);
        self.pipeline = pipeline.clone();
        if !is_renamed {
            return;
        }
        let of_engines = self
            .engines
            .iter_mut()
            .filter_map(|(_, engine)| engine.scope.take());
        // Engines that run data-parallel share theirs.
        let retired: BTreeSet<ScopeId> = self
            .scope
            .take()
            .into_iter()
            .chain(of_engines)
            .chain(self.exchanges.forget_scopes())
            .collect();
        for scope in retired {
            sink.retire(scope);
        }
    }

    pub(super) fn engine_gone<S: Sink + ?Sized>(
        &mut self,
        index: usize,
        now_ns: u64,
        environment: &Environment,
        sink: &mut S,
    ) {
        self.engine_died(index, now_ns, environment, sink);
        let Some(engine) = self.engines.try_remove(index) else {
            return;
        };
        self.book.forget_engine(engine_number(index));
        self.place_stages();
        if let Some(scope) = engine.scope
            && !self.engines.iter().any(|(_, other)| other.scope == Some(scope))
        {
            sink.retire(scope);
        }
    }

    /// Fails the requests that are at an engine.
    fn engine_died<S: Sink + ?Sized>(
        &mut self,
        index: usize,
        now_ns: u64,
        environment: &Environment,
        sink: &mut S,
    ) {
        let number = engine_number(index);
        self.exchanges.engine_died_ns = Some(now_ns);
        if let Some(engine) = self.engines.get_mut(index) {
            // Of a diffusion stage, no figure at all would leave the last one standing.
            engine.snapshot = engine
                .snapshot
                .filter(|_| !engine.is_llm)
                .map(|_| Snapshot::default());
        }
        let hit: Vec<u32> = self
            .book
            .requests
            .iter()
            .filter(|(_, request)| {
                request.phase != Phase::Closed
                    && request.parts.iter().any(|part| self.book.is_at(part, number))
            })
            .filter_map(|(request, _)| u32::try_from(request).ok())
            .collect();
        for request in hit {
            match self.book.request_mut(request).map(|request| &mut request.phase) {
                Some(Phase::Aborting(aborting)) => aborting.engine_died = true,
                _ => self.fail(request, Failure::StageError, now_ns, environment, sink),
            }
        }
    }

    pub(super) fn api_gone<S: Sink + ?Sized>(
        &mut self,
        pid: u32,
        now_ns: u64,
        environment: &Environment,
        sink: &mut S,
    ) {
        let hit: Vec<u32> = self
            .book
            .requests
            .iter()
            .filter(|(_, request)| {
                request.phase != Phase::Closed
                    && request.parts.iter().any(|part| self.book.is_from(part, pid))
            })
            .filter_map(|(request, _)| u32::try_from(request).ok())
            .collect();
        for request in hit {
            self.fail(request, Failure::Unknown, now_ns, environment, sink);
        }
        self.book.forget_api(pid);
        self.forget_exchanges(pid);
        self.apis = self.apis.saturating_sub(1);
    }

    pub(super) fn end<S: Sink + ?Sized>(&mut self, now_ns: u64, environment: &Environment, sink: &mut S) {
        let open: Vec<u32> = self
            .book
            .requests
            .iter()
            .filter(|(_, request)| request.phase != Phase::Closed)
            .filter_map(|(request, _)| u32::try_from(request).ok())
            .collect();
        for request in open {
            self.fail(request, Failure::Unknown, now_ns, environment, sink);
        }
        let mut scopes: Vec<ScopeId> = self
            .engines
            .iter()
            .filter_map(|(_, engine)| engine.scope)
            .chain(self.scope)
            .chain(self.exchanges.inline_scopes.values().copied())
            .collect();
        scopes.sort_unstable();
        scopes.dedup();
        for scope in scopes {
            sink.retire(scope);
        }
    }

    // ---- messages ----

    pub(super) fn api_message<S: Sink + ?Sized>(
        &mut self,
        pid: u32,
        socket: u64,
        time_ns: u64,
        message: &Message<'_>,
        environment: &Environment,
        sink: &mut S,
    ) {
        match message {
            Message::Add(add) => self.add(pid, socket, add, time_ns, environment, sink),
            Message::Abort(ids) => {
                for id in ids {
                    self.abort(id, pid, socket, time_ns, environment, sink);
                }
                self.settle(environment, sink);
            }
            Message::Utility(utility) => self.utility(pid, socket, *utility, environment, sink),
            Message::Diffusion(Diffusion::Add(add)) => {
                self.diffusion_add(pid, socket, add, time_ns, environment, sink);
            }
            Message::Diffusion(Diffusion::Abort(ids)) => {
                for id in ids {
                    self.abort(id, pid, socket, time_ns, environment, sink);
                }
            }
            _ => {}
        }
    }

    fn add<S: Sink + ?Sized>(
        &mut self,
        pid: u32,
        socket: u64,
        add: &Add<'_>,
        time_ns: u64,
        environment: &Environment,
        sink: &mut S,
    ) {
        let added = self.book.add(
            pid,
            socket,
            add,
            time_ns,
            environment.wall_offset_ns,
            self.pipeline.flavor == Flavor::Vllm,
            environment.limits.max_requests,
        );
        if matches!(added, Added::New | Added::Late { .. }) {
            self.join_exchange(pid, add, environment);
        }
        let (request, part) = match added {
            Added::New => return,
            Added::Refused(reason) => {
                sink.skip(Family::VllmE2eRequestLatencySeconds, reason);
                return;
            }
            Added::Late { request, part } | Added::Segment { request, part, .. } => (request, part),
        };
        let context = self.context(environment);
        let Some(share) = self.book.part_mut(request, part) else {
            return;
        };
        let (state, slot, engine) = (share.state, share.slot, usize::from(share.engine));
        let is_waiting = share.session.as_ref().is_some_and(|session| session.waiting);
        if !matches!(state, PartState::Open | PartState::Early) {
            return;
        }
        let Some(engine) = self.engines.get_mut(engine) else {
            return;
        };
        match added {
            Added::Late { .. } => {
                engine.add_seen(slot, &mut self.book, &context, sink);
                self.settle(environment, sink);
            }
            Added::Segment { begins: true, .. } => engine.segment_began(slot),
            // The input ended while the engine had nothing to do: there is no further output.
            _ if !add.resumable && is_waiting && !self.is_omni() => {
                let how = (Outcome::Finished, FinishReason::Stop.as_str());
                self.record_cut_short(request, how, time_ns, environment);
                self.forget(request);
            }
            _ => {}
        }
    }

    fn abort<S: Sink + ?Sized>(
        &mut self,
        id: &str,
        pid: u32,
        socket: u64,
        time_ns: u64,
        environment: &Environment,
        sink: &mut S,
    ) {
        let Some(index) = self.book.find(id) else {
            return;
        };
        let context = self.context(environment);
        let lane_engine = self.book.lane_engine(pid, socket).map(usize::from);
        let Some(request) = self.book.request_mut(index) else {
            return;
        };
        match &mut request.phase {
            Phase::Live => {}
            Phase::Aborting(aborting) => {
                aborting.by_client = true;
                return;
            }
            Phase::Closed => return,
        }
        let stopped = request
            .parts
            .iter()
            .find(|part| {
                part.state == PartState::Open
                    && part.has_stop_strings
                    && lane_engine.is_none_or(|engine| engine == usize::from(part.engine))
            })
            .map(|part| (usize::from(part.engine), part.slot));
        if let Some((engine, slot)) = stopped
            && let Some(engine) = self.engines.get_mut(engine)
            && let Some(last_ns) = engine.last_output_ns(slot)
            && time_ns.saturating_sub(last_ns) <= environment.limits.stop_string_ns
        {
            engine.stop_string(slot, last_ns.min(time_ns), &mut self.book, &context, sink);
            return;
        }
        self.begin_abort(
            index,
            Aborting {
                by_client: true,
                engine_died: false,
            },
            time_ns,
            environment,
        );
    }

    /// A request will give no more: its cause is settled a little later.
    fn begin_abort(&mut self, index: u32, aborting: Aborting, time_ns: u64, environment: &Environment) {
        // As it is now: where its stages are is not known any more when the cause is settled.
        self.record_open_stages(index, time_ns, environment);
        let Some(request) = self.book.request_mut(index) else {
            return;
        };
        request.phase = Phase::Aborting(aborting);
        let serial = request.serial;
        // What its engines still send counts no more. Where it was stays known, to tell whether one of them died.
        for part in &mut request.parts {
            if matches!(part.state, PartState::Open | PartState::Early)
                && let Some(engine) = self.engines.get_mut(usize::from(part.engine))
            {
                engine.drop_request(part.slot);
                part.slot = NO_SLOT;
            }
        }
        self.book.schedule(
            index,
            serial,
            Task::SettleAbort,
            time_ns.saturating_add(environment.limits.abort_settle_ns),
        );
    }

    fn utility<S: Sink + ?Sized>(
        &mut self,
        pid: u32,
        socket: u64,
        utility: Utility<'_>,
        environment: &Environment,
        sink: &mut S,
    ) {
        let sleep = match utility.method {
            "sleep" => match utility.level.unwrap_or(1) {
                1 => Sleep::WeightsOffloaded,
                2 => Sleep::DiscardAll,
                _ => Sleep::Paused,
            },
            "wake_up" => Sleep::Awake,
            _ => return,
        };
        let only = self.book.lane_engine(pid, socket).map(usize::from);
        for (index, engine) in &mut self.engines {
            if engine.is_llm && only.is_none_or(|only| only == index) {
                engine.sleep = sleep;
                if let Some(scope) = engine.scope {
                    Self::set_sleep(scope, sleep, environment, sink);
                }
            }
        }
    }

    pub(super) fn engine_message<S: Sink + ?Sized>(
        &mut self,
        index: usize,
        time_ns: u64,
        message: &Message<'_>,
        environment: &Environment,
        sink: &mut S,
    ) {
        match message {
            Message::Outputs(outputs) => {
                let Some(engine) = self.engines.get(index) else {
                    return;
                };
                if engine.scope.is_none() && self.create_engine_scope(index, environment, sink).is_none() {
                    sink.skip(Family::VllmGenerationTokensTotal, "unknown_identity");
                    return;
                }
                let context = self.context(environment);
                let Some(engine) = self.engines.get_mut(index) else {
                    return;
                };
                engine.outputs(
                    engine_number(index),
                    outputs,
                    time_ns,
                    &mut self.book,
                    &context,
                    sink,
                );
                self.settle(environment, sink);
            }
            Message::Ready(ready) => {
                let Some(engine) = self.engines.get_mut(index) else {
                    return;
                };
                engine.is_starting = false;
                let stage = engine.stage.unwrap_or(u32::MAX);
                if let Some(length) = ready.max_model_len
                    && self.ready.is_none_or(|(known, _)| stage < known)
                {
                    self.ready = Some((stage, length));
                }
                self.create_scopes(time_ns, environment, sink);
            }
            Message::Handshake => {
                if let Some(engine) = self.engines.get_mut(index) {
                    engine.is_starting = engine.is_llm && engine.scope.is_none();
                }
            }
            Message::EngineDead => self.engine_died(index, time_ns, environment, sink),
            Message::Diffusion(message) if self.engines.get(index).is_some_and(|engine| !engine.is_llm) => {
                self.diffusion_message(index, time_ns, message, environment, sink);
            }
            _ => {}
        }
    }

    /// A tensor or array followed a message of the API process.
    pub(super) fn api_aux(&mut self, pid: u32, aux: Aux) {
        if aux.of == FrameType::Add {
            self.book.aux(pid, aux.socket, aux.message_time_ns, aux.size);
        }
    }

    /// Payloads inside requests that arrived since the last call.
    pub(super) fn take_forwards(&mut self) -> impl Iterator<Item = Forward> {
        let forwarded = std::mem::take(&mut self.book.forwarded);
        forwarded.into_iter().map(|forwarded| Forward {
            from: self.end_of(forwarded.payload.from),
            to: self.end_of(forwarded.to),
            forwarded,
        })
    }

    fn end_of(&self, engine: u16) -> Option<End> {
        let engine = self.engines.get(usize::from(engine))?;
        Some(End {
            stage: engine.stage?,
            replica: engine.replica?,
        })
    }

    // ---- requests ----

    /// Tells the requests about the stages that finished.
    pub(super) fn settle<S: Sink + ?Sized>(&mut self, environment: &Environment, sink: &mut S) {
        while let Some(finished) = self.book.finished.pop() {
            self.stage_finished(finished, environment, sink);
        }
    }

    fn stage_finished<S: Sink + ?Sized>(
        &mut self,
        finished: Finished,
        environment: &Environment,
        sink: &mut S,
    ) {
        let index = finished.request;
        let is_omni = self.is_omni();
        if environment.records {
            self.record_stage(&finished);
        }
        let Some(request) = self.book.request_mut(index) else {
            return;
        };
        let Some(part) = request.parts.get(usize::from(finished.part)) else {
            return;
        };
        let (is_added, added_ns, engine) = (part.is_added(), part.added_ns, part.engine);
        let (id, serial) = (std::sync::Arc::clone(&request.id), request.serial);
        let prompt_tokens = part.prompt_tokens;
        let output_ended = !matches!(finished.reason, FinishReason::Abort | FinishReason::Error);
        let gen_time_s = is_added.then(|| seconds_between(added_ns, finished.time_ns));
        request.finished = request.finished.saturating_add(1);
        request.generated = request.generated.saturating_add(finished.generated);
        request.finish_ns = request.finish_ns.max(finished.time_ns);
        let (is_first_stage, is_llm, scope) = self
            .engines
            .get(usize::from(engine))
            .map_or((true, true, None), |engine| {
                (engine.stages_before == 0, engine.is_llm, engine.scope)
            });
        if is_first_stage {
            request.from_first_stage |= is_added;
            request.prompt_tokens = prompt_tokens;
        }
        if finished.stage >= request.last_stage {
            request.last_stage = finished.stage;
            request.reason = finished.reason;
        }
        if !matches!(finished.audio, StageAudio::NoAudioStage)
            && request
                .audio
                .as_ref()
                .is_none_or(|audio| finished.stage >= audio.stage)
        {
            request.audio = Some(Box::new(FinishedAudio {
                part: finished.part,
                engine,
                state: match finished.audio {
                    StageAudio::Some(state) => Some(state),
                    StageAudio::Silent | StageAudio::NoAudioStage => None,
                },
                gen_time_s,
                stage: finished.stage,
            }));
        }
        let (is_active, companion) = (request.is_active(), request.companion);
        let (last_stage, finish_ns) = (request.last_stage, request.finish_ns);
        if !is_omni || companion {
            if !is_active {
                self.complete_plain(index, environment);
            }
            return;
        }
        if output_ended && let Some(scope) = scope {
            sink.about(Some(Subject {
                pipeline: self.pipeline.id,
                request: &id,
                serial,
            }));
            let stage_type = if is_llm {
                environment.labels.stage_type_llm
            } else {
                environment.labels.stage_type_diffusion
            };
            match gen_time_s {
                Some(gen_time_s) => {
                    sink.observe(Family::OmniStageGenTimeS, scope, stage_type, gen_time_s, 1);
                }
                None => sink.skip(Family::OmniStageGenTimeS, "start_not_seen"),
            }
            sink.about(None);
        }
        match finished.reason {
            FinishReason::Error => {
                self.fail(index, Failure::StageError, finished.time_ns, environment, sink);
            }
            FinishReason::Abort => {
                self.begin_abort(index, Aborting::default(), finished.time_ns, environment);
            }
            _ if is_active => {}
            _ if self.last_stage == Some(last_stage) => self.complete(index, environment, sink),
            _ => self.book.schedule(
                index,
                serial,
                Task::Complete,
                finish_ns.saturating_add(environment.limits.next_stage_grace_ns),
            ),
        }
    }

    fn complete<S: Sink + ?Sized>(&mut self, index: u32, environment: &Environment, sink: &mut S) {
        let Some(request) = self.book.complete(index) else {
            return;
        };
        if let Some(exchange) = request.exchange {
            self.request_over(exchange, self.audio_place(&request));
        }
        sink.about(Some(Subject {
            pipeline: self.pipeline.id,
            request: &request.id,
            serial: request.serial,
        }));
        self.completed(&request, environment, sink);
        sink.about(None);
        self.record_completed(request, environment);
    }

    /// A request without families of a pipeline is complete.
    fn complete_plain(&mut self, index: u32, environment: &Environment) {
        if let Some(request) = self.book.complete(index) {
            self.record_completed(request, environment);
        }
    }

    fn completed<S: Sink + ?Sized>(&mut self, request: &Request, environment: &Environment, sink: &mut S) {
        let Some(scope) = self.scope else {
            return;
        };
        sink.add(
            Family::OmniRequestsSuccessTotal,
            scope,
            environment.labels.finish(request.reason),
            1.0,
        );
        let start_ns = request.start_ns();
        let none = ExtraId::NONE;
        match start_ns {
            Some(start_ns) => sink.observe(
                Family::OmniE2eRequestLatencyS,
                scope,
                none,
                seconds_between(start_ns, request.finish_ns),
                1,
            ),
            None => sink.skip(Family::OmniE2eRequestLatencyS, "start_not_seen"),
        }
        if request.prompt_tokens == UNKNOWN {
            sink.skip(Family::OmniPromptTokensTotal, "no_prompt_length");
        } else {
            sink.add(
                Family::OmniPromptTokensTotal,
                scope,
                none,
                f64::from(request.prompt_tokens),
            );
        }
        sink.add(
            Family::OmniGenerationTokensTotal,
            scope,
            none,
            as_f64(request.generated),
        );
        if let Some(audio) = &request.audio {
            let part = request.parts.get(usize::from(audio.part));
            let is_written = request.exchange.is_some();
            self.audio(audio, part, start_ns, is_written, environment, sink);
        }
    }

    /// The audio families of a completed request.
    ///
    /// First packet and continuity belong to streamed responses. Where a request came by an exchange that is watched
    /// (`is_written`), they are told as its answer is written. Elsewhere frames stand in: the API server asks its stages for deltas exactly
    /// where it streams (docs/parity.md), so the output kind of the audio stage's ADD tells; where it is cumulative
    /// it does not, and there is no sample.
    fn audio<S: Sink + ?Sized>(
        &self,
        audio: &FinishedAudio,
        part: Option<&Part>,
        start_ns: Option<u64>,
        is_written: bool,
        environment: &Environment,
        sink: &mut S,
    ) {
        let Some(scope) = self
            .engines
            .get(usize::from(audio.engine))
            .and_then(|engine| engine.scope)
        else {
            sink.skip(Family::OmniAudioDurationS, "engine_gone");
            return;
        };
        let none = ExtraId::NONE;
        let Some(state) = audio.state.as_ref().filter(|state| state.frames > 0) else {
            sink.add(
                Family::OmniAudioSkippedRequestsTotal,
                scope,
                environment.labels.no_audio_data,
                1.0,
            );
            return;
        };
        sink.add(Family::OmniAudioFramesTotal, scope, none, as_f64(state.frames));
        let part = part.filter(|part| part.is_added());
        let duration_s = state.duration_s();
        let Some(part) = part else {
            for family in [
                Family::OmniAudioDurationS,
                Family::OmniAudioRtf,
                Family::OmniAudioTtfpS,
                Family::OmniAudioUnderrunS,
            ] {
                sink.skip(family, "start_not_seen");
            }
            return;
        };
        sink.observe(Family::OmniAudioDurationS, scope, none, duration_s, 1);
        if let Some(gen_time_s) = audio.gen_time_s {
            sink.observe(Family::OmniAudioRtf, scope, none, gen_time_s / duration_s, 1);
        }
        match part.output_kind {
            _ if is_written => return,
            OutputKind::Delta => {}
            OutputKind::FinalOnly => return,
            OutputKind::Cumulative => {
                sink.skip(Family::OmniAudioTtfpS, "streaming_unknown");
                sink.skip(Family::OmniAudioUnderrunS, "streaming_unknown");
                return;
            }
        }
        match (start_ns, state.first_ns) {
            _ if !state.first_packet.is_pending() => {}
            (Some(start_ns), Some(first_ns)) => sink.observe(
                Family::OmniAudioTtfpS,
                scope,
                none,
                seconds_between(start_ns, first_ns),
                1,
            ),
            _ => sink.skip(Family::OmniAudioTtfpS, "start_not_seen"),
        }
        let Some(player) = state.continuity() else {
            sink.skip(Family::OmniAudioUnderrunS, "sample_rate_changed");
            return;
        };
        sink.observe(
            Family::OmniAudioUnderrunS,
            scope,
            none,
            player.max_underrun_s(),
            1,
        );
        if player.is_continuous(CONTINUITY_THRESHOLD_S) {
            sink.add(
                Family::OmniAudioContinuityOkTotal,
                scope,
                environment.labels.threshold,
                1.0,
            );
        }
    }

    /// A request failed: it counts as an abort and, by its reason, as a failure.
    pub(super) fn fail<S: Sink + ?Sized>(
        &mut self,
        index: u32,
        reason: Failure,
        now_ns: u64,
        environment: &Environment,
        sink: &mut S,
    ) {
        if let Some(scope) = self.scope
            && let Some(request) = self.book.request(index)
            && !request.companion
        {
            sink.about(Some(Subject {
                pipeline: self.pipeline.id,
                request: &request.id,
                serial: request.serial,
            }));
            let aborted = environment.labels.finish(FinishReason::Abort);
            sink.add(Family::OmniRequestsSuccessTotal, scope, aborted, 1.0);
            let reason = environment.labels.failure(reason);
            sink.add(Family::OmniRequestsFailedTotal, scope, reason, 1.0);
            sink.about(None);
        }
        if let Some(request) = self.book.request(index)
            && let Some(exchange) = request.exchange
        {
            self.request_over(exchange, self.audio_place(request));
        }
        let outcome = match reason {
            Failure::ClientAbort | Failure::ClientDisconnect => Outcome::Aborted,
            Failure::StageError | Failure::Unknown => Outcome::Failed,
        };
        self.record_cut_short(index, (outcome, reason.as_str()), now_ns, environment);
        self.close(index, now_ns.saturating_add(environment.limits.linger_ns));
    }

    /// Drops a request's stages and remembers its id until `until_ns`.
    fn close(&mut self, index: u32, until_ns: u64) {
        if self.pipeline.flavor == Flavor::Vllm
            && let Some(request) = self.book.request(index)
        {
            let id = std::sync::Arc::clone(&request.id);
            self.book.leave_siblings(&id, None);
        }
        let parts = self.book.close(index, until_ns);
        self.drop_stages(&parts);
    }

    /// Drops a request and all that is known of it.
    fn forget(&mut self, index: u32) {
        if let Some(request) = self.book.remove(index) {
            self.drop_stages(&request.parts);
        }
    }

    fn drop_stages(&mut self, parts: &[Part]) {
        for part in parts {
            if matches!(part.state, PartState::Open | PartState::Early)
                && let Some(engine) = self.engines.get_mut(usize::from(part.engine))
            {
                engine.drop_request(part.slot);
            }
        }
    }

    // ---- records ----

    /// A payload of a request has arrived.
    pub(super) fn hop(&mut self, hop: &RequestHop) {
        let RequestHop {
            request,
            from,
            to,
            connector,
            hop,
            ..
        } = hop;
        let open = self.book.find(request);
        match open.and_then(|index| self.book.request_mut(index)) {
            Some(request) if request.phase != Phase::Closed => {
                let draft = request.draft.get_or_insert_default();
                draft.transfer(*from, *to, *connector, hop);
            }
            _ => self.held.transfer(request, *from, *to, *connector, hop),
        }
    }

    /// A stage finished with a request.
    fn record_stage(&mut self, finished: &Finished) {
        let parts = self.book.request(finished.request).map(|request| &request.parts);
        let Some(part) = parts.and_then(|parts| parts.get(usize::from(finished.part))) else {
            return;
        };
        let gen_time_s = part
            .is_added()
            .then(|| seconds_between(part.added_ns, finished.time_ns));
        let row = StageRecord {
            finish_reason: Some(finished.reason.as_str().into()),
            gen_time_ms: gen_time_s.map(records::ms),
            ..self.row_of(Some(part.engine), &finished.figures, finished.generated)
        };
        if let Some(request) = self.book.request_mut(finished.request) {
            request.draft.get_or_insert_default().stage(row);
        }
    }

    fn row_of(&self, engine: Option<u16>, figures: &Figures, generated: u64) -> StageRecord {
        let engine = engine.and_then(|engine| self.engines.get(usize::from(engine)));
        let is_llm = engine.is_none_or(|engine| engine.is_llm);
        StageRecord {
            stage: engine.and_then(|engine| engine.stage),
            replica: engine.and_then(|engine| engine.replica),
            kind: if is_llm { "llm" } else { "diffusion" }.into(),
            finish_reason: None,
            queue_ms: figures.queue_s.map(records::ms),
            first_token_ms: figures.first_token_s.map(records::ms),
            gen_time_ms: None,
            prompt_tokens: figures.prompt_tokens,
            generated_tokens: generated,
        }
    }

    /// Notes how far the stages are that have not finished. To be called before they are dropped.
    fn record_open_stages(&mut self, index: u32, now_ns: u64, environment: &Environment) {
        let Some(request) = self.book.request(index).filter(|_| environment.records) else {
            return;
        };
        let rows: Vec<StageRecord> = request
            .parts
            .iter()
            .filter(|part| part.state != PartState::Finished)
            .map(|part| self.open_row(part))
            .collect();
        if let Some(request) = self.book.request_mut(index) {
            let draft = request.draft.get_or_insert_default();
            draft.end_ns = Some(now_ns);
            for row in rows {
                draft.stage(row);
            }
        }
    }

    fn open_row(&self, part: &Part) -> StageRecord {
        let engine = self.book.engine_of(part);
        let has_answered = matches!(part.state, PartState::Open | PartState::Early);
        let (figures, generated) = engine
            .filter(|_| has_answered)
            .and_then(|engine| self.engines.get(usize::from(engine))?.figures(part))
            .unwrap_or_else(|| (Figures::given(part), 0));
        let row = self.row_of(engine, &figures, generated);
        match part.diffusion {
            Some(_) => StageRecord {
                kind: "diffusion".into(),
                ..row
            },
            None => row,
        }
    }

    /// The record of a request that is over at `end_ns`.
    fn record(
        &self,
        request: &Request,
        draft: Draft,
        (outcome, reason): (Outcome, &'static str),
        end_ns: u64,
        environment: &Environment,
    ) -> RequestRecord {
        // Of one that no stage has answered for, the first that was given it is the pipeline's first.
        let is_untouched = request.parts.iter().all(|part| part.state == PartState::Pending);
        let start_ns = request
            .start_ns()
            .or_else(|| request.arrival_ns().filter(|_| is_untouched));
        let unix_ms = |time_ns| records::unix_ms(time_ns, environment.wall_offset_ns);
        let (stages, transfers) = draft.rows();
        let first = || stages.first().filter(|_| start_ns.is_some())?.prompt_tokens;
        RequestRecord {
            request_id: records::name(&request.id),
            model: self.model_name(),
            pipeline_pid: self.pipeline.root.pid,
            arrived_unix_ms: start_ns.and_then(unix_ms),
            ended_unix_ms: unix_ms(end_ns),
            e2e_ms: start_ns.map(|start_ns| records::age_ms(end_ns, start_ns)),
            outcome,
            reason: reason.into(),
            prompt_tokens: Some(request.prompt_tokens)
                .filter(|tokens| *tokens != UNKNOWN)
                .or_else(first),
            generated_tokens: stages.iter().map(|row| row.generated_tokens).sum(),
            stages,
            transfers,
        }
    }

    fn record_completed(&mut self, mut request: Request, environment: &Environment) {
        if !environment.records || request.companion {
            return;
        }
        let draft = request.draft.take().map(|draft| *draft).unwrap_or_default();
        let outcome = match request.reason {
            FinishReason::Abort => Outcome::Aborted,
            FinishReason::Error => Outcome::Failed,
            FinishReason::Stop | FinishReason::Length | FinishReason::Repetition => Outcome::Finished,
        };
        let how = (outcome, request.reason.as_str());
        let record = self.record(&request, draft, how, request.finish_ns, environment);
        let until_ns = request
            .finish_ns
            .saturating_add(environment.limits.transfer_grace_ns);
        self.held.insert(request.id, record, until_ns);
    }

    /// The record of a request that is over before its stages are.
    fn record_cut_short(
        &mut self,
        index: u32,
        how: (Outcome, &'static str),
        now_ns: u64,
        environment: &Environment,
    ) {
        if !environment.records {
            return;
        }
        if self
            .book
            .request(index)
            .is_some_and(|request| request.phase == Phase::Live)
        {
            self.record_open_stages(index, now_ns, environment);
        }
        let Some(request) = self.book.request_mut(index) else {
            return;
        };
        let draft = request.draft.take().map(|draft| *draft).unwrap_or_default();
        let Some(request) = self.book.request(index).filter(|request| !request.companion) else {
            return;
        };
        let id = std::sync::Arc::clone(&request.id);
        let end_ns = draft.end_ns.unwrap_or(now_ns);
        let record = self.record(request, draft, how, end_ns, environment);
        let until_ns = now_ns.saturating_add(environment.limits.transfer_grace_ns);
        self.held.insert(id, record, until_ns);
    }

    fn model_name(&self) -> Option<String> {
        let pipeline = &self.pipeline;
        let name = pipeline.model.as_ref().or(pipeline.served_model.as_ref())?;
        Some(records::name(name))
    }

    /// At most `max` requests that are under way, those that came first.
    pub(super) fn open_records(&self, now_ns: u64, max: usize, out: &mut Vec<OpenRequest>) {
        let mut open: Vec<&Request> = self
            .book
            .requests
            .iter()
            .map(|(_, request)| request)
            .filter(|request| request.is_active() && !request.companion)
            .collect();
        open.sort_by_key(|request| request.serial);
        out.extend(open.into_iter().take(max).map(|request| {
            OpenRequest {
                request_id: records::name(&request.id),
                model: self.model_name(),
                pipeline_pid: self.pipeline.root.pid,
                age_ms: request
                    .arrival_ns()
                    .map(|start_ns| records::age_ms(now_ns, start_ns)),
                stages: request
                    .parts
                    .iter()
                    .map(|part| self.open_stage(request, part))
                    .collect(),
            }
        }));
    }

    fn open_stage(&self, request: &Request, part: &Part) -> OpenStage {
        let row = self.open_row(part);
        let finished = || request.draft.as_ref()?.generated(row.stage, row.replica);
        OpenStage {
            stage: row.stage,
            replica: row.replica,
            state: match part.state {
                PartState::Pending => OpenState::Given,
                PartState::Open => OpenState::Running,
                PartState::Early | PartState::Finished => OpenState::Finished,
            },
            generated_tokens: match part.state {
                PartState::Finished => finished().unwrap_or(0),
                _ => row.generated_tokens,
            },
        }
    }

    // ---- time ----

    pub(super) fn tick<S: Sink + ?Sized>(&mut self, now_ns: u64, environment: &Environment, sink: &mut S) {
        self.create_scopes(now_ns, environment, sink);
        while let Some(due) = self.book.next_due(now_ns) {
            self.due(due, environment, sink);
        }
        if now_ns >= self.next_scan_ns {
            self.next_scan_ns = now_ns.saturating_add(TIMEOUT_SCAN_NS);
            self.time_out(now_ns, environment, sink);
        }
        self.tick_exchanges(now_ns, environment, sink);
        self.set_gauges(now_ns, environment, sink);
    }

    fn due<S: Sink + ?Sized>(&mut self, due: Due, environment: &Environment, sink: &mut S) {
        let index = due.request;
        let Some(request) = self.book.request(index) else {
            return;
        };
        match due.task {
            Task::Complete => {
                // A stage that was given meanwhile puts the decision off until it finishes.
                let decided_at = request
                    .finish_ns
                    .saturating_add(environment.limits.next_stage_grace_ns);
                let is_over = usize::from(request.finished) >= request.parts.len();
                if is_over && request.phase == Phase::Live && decided_at <= due.time_ns {
                    self.complete(index, environment, sink);
                }
            }
            Task::FinishEarly => {
                let early: Vec<(usize, u32)> = request
                    .parts
                    .iter()
                    .filter(|part| part.state == PartState::Early)
                    .map(|part| (usize::from(part.engine), part.slot))
                    .collect();
                let context = self.context(environment);
                for (engine, slot) in early {
                    if let Some(engine) = self.engines.get_mut(engine) {
                        engine.finish_early(slot, &mut self.book, &context, sink);
                    }
                }
                self.settle(environment, sink);
            }
            Task::SettleAbort => {
                let Phase::Aborting(aborting) = request.phase else {
                    return;
                };
                let reason = if aborting.engine_died {
                    Failure::StageError
                } else if aborting.by_client {
                    match self.client_of(request.exchange) {
                        Client::Here => Failure::ClientAbort,
                        // Nearly all aborts are of clients that left.
                        Client::Left | Client::Unknown => Failure::ClientDisconnect,
                    }
                } else {
                    Failure::Unknown
                };
                self.fail(index, reason, due.time_ns, environment, sink);
            }
            Task::Forget => self.forget(index),
        }
    }

    fn time_out<S: Sink + ?Sized>(&mut self, now_ns: u64, environment: &Environment, sink: &mut S) {
        let last_ns = |part: &Part| {
            let output_ns = match part.state {
                PartState::Open | PartState::Early => self
                    .engines
                    .get(usize::from(part.engine))
                    .and_then(|engine| engine.last_output_ns(part.slot)),
                PartState::Pending | PartState::Finished => None,
            };
            output_ns.unwrap_or(0).max(part.added_ns)
        };
        let idle: Vec<u32> = self
            .book
            .requests
            .iter()
            .filter(|(_, request)| request.phase != Phase::Closed)
            .filter(|(_, request)| {
                let last_ns = request.parts.iter().map(last_ns).max().unwrap_or(0);
                let last_ns = last_ns.max(request.finish_ns);
                now_ns.saturating_sub(last_ns) > environment.limits.idle_timeout_ns
            })
            .filter_map(|(request, _)| u32::try_from(request).ok())
            .collect();
        for request in idle {
            let family = if self.is_omni() {
                Family::OmniE2eRequestLatencyS
            } else {
                Family::VllmE2eRequestLatencySeconds
            };
            sink.skip(family, "timed_out");
            if let Some(exchange) = self.book.request(request).and_then(|request| request.exchange) {
                self.request_over(exchange, None);
            }
            let how = (Outcome::TimedOut, Outcome::TimedOut.as_str());
            self.record_cut_short(request, how, now_ns, environment);
            self.close(request, now_ns.saturating_add(environment.limits.linger_ns));
        }
    }

    fn set_gauges<S: Sink + ?Sized>(&mut self, now_ns: u64, environment: &Environment, sink: &mut S) {
        // The processes of a replica that runs data-parallel share its labels.
        let mut totals: BTreeMap<ScopeId, Totals> = BTreeMap::new();
        for (_, engine) in &self.engines {
            let Some(scope) = engine.scope.filter(|_| engine.is_llm) else {
                continue;
            };
            let snapshot = match engine.snapshot {
                // With statistics off, all that is known is what the engine has answered for.
                None => Snapshot {
                    running: u64::try_from(engine.open()).unwrap_or(u64::MAX),
                    ..Snapshot::default()
                },
                Some(snapshot)
                    if engine.open() == 0
                        && self.book.unclaimed == 0
                        && now_ns.saturating_sub(snapshot.time_ns) > environment.limits.stale_snapshot_ns =>
                {
                    Snapshot::default()
                }
                Some(snapshot) => snapshot,
            };
            totals.entry(scope).or_default().add(&snapshot);
        }
        let mut waiting = 0_u64;
        for (&scope, total) in &totals {
            Self::set_engine_gauges(scope, total, environment, sink);
            if self.scope.is_some() {
                sink.set(
                    Family::OmniStageWaitingRequests,
                    scope,
                    ExtraId::NONE,
                    as_f64(total.waiting),
                );
            }
            waiting = total.waiting.saturating_add(waiting);
        }
        let waiting = self
            .set_diffusion_gauges(now_ns, environment, sink)
            .saturating_add(waiting);
        if let Some(scope) = self.scope {
            let inline = self.open_inline();
            let open = u64::try_from(self.open()).unwrap_or(u64::MAX);
            let waiting = waiting.min(open);
            let none = ExtraId::NONE;
            let running = (open - waiting).saturating_add(inline as u64);
            sink.set(Family::OmniNumRequestsRunning, scope, none, as_f64(running));
            // Read by the API process, and not given to any stage yet.
            let undispatched = self.exchanges.waiting().count().saturating_sub(inline);
            let waiting = waiting.saturating_add(undispatched as u64);
            sink.set(Family::OmniNumRequestsWaiting, scope, none, as_f64(waiting));
        }
    }

    fn set_engine_gauges<S: Sink + ?Sized>(
        scope: ScopeId,
        totals: &Totals,
        environment: &Environment,
        sink: &mut S,
    ) {
        let mut set = |family, extra, value| sink.set(family, scope, extra, value);
        let none = ExtraId::NONE;
        set(Family::VllmNumRequestsRunning, none, as_f64(totals.running));
        let waiting = totals.waiting + totals.deferred;
        set(Family::VllmNumRequestsWaiting, none, as_f64(waiting));
        for (&extra, value) in environment
            .labels
            .waiting
            .iter()
            .zip([totals.waiting, totals.deferred])
        {
            set(Family::VllmNumRequestsWaitingByReason, extra, as_f64(value));
        }
        set(Family::VllmKvCacheUsagePerc, none, totals.kv_cache_usage());
    }

    fn set_sleep<S: Sink + ?Sized>(scope: ScopeId, sleep: Sleep, environment: &Environment, sink: &mut S) {
        for (&extra, state) in environment.labels.sleep.iter().zip(Sleep::LABELLED) {
            let value = f64::from(u8::from(state == sleep));
            sink.set(Family::VllmEngineSleepState, scope, extra, value);
        }
    }
}

/// Gauges of the engines that share a scope.
#[derive(Debug, Default)]
struct Totals {
    engines: u32,
    running: u64,
    waiting: u64,
    deferred: u64,
    kv_cache_usage: f64,
}

impl Totals {
    fn add(&mut self, snapshot: &Snapshot) {
        self.engines += 1;
        self.running = self.running.saturating_add(snapshot.running);
        self.waiting = self.waiting.saturating_add(snapshot.waiting);
        self.deferred = self.deferred.saturating_add(snapshot.deferred);
        self.kv_cache_usage += snapshot.kv_cache_usage;
    }

    /// The mean: the caches of a replica's ranks are equally large.
    fn kv_cache_usage(&self) -> f64 {
        if self.engines == 0 {
            0.0
        } else {
            self.kv_cache_usage / f64::from(self.engines)
        }
    }
}
