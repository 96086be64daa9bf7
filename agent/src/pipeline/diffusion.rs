//! Diffusion stages in processes of their own: what their results mean for a request and for the diffusion families.
//!
//! A request is a share of the book's like that of any other stage, but nothing is said of it before its result, which
//! brings all of the stage's figures at once.

use super::{
    audio::seconds_between,
    book::{Finished, PartState, Phase, StageAudio},
    engine::{Snapshot, engine_number, observe},
    labels::Failure,
    records::Figures as RecordFigures,
    sink::{ExtraId, ScopeId, Sink, Subject},
    state::{Environment, PipelineState},
};
use crate::{
    metrics::{catalogue::Family, number::as_f64},
    wire::{
        diffusion::{Diffusion, DiffusionAdd, DiffusionResult, ResultKind},
        message::{Add, FinishReason},
    },
};

/// What is known of a diffusion stage's share before its result.
#[derive(Clone, Copy, Debug)]
pub(super) struct DiffusionShare {
    /// Denoising steps that were asked for.
    pub(super) steps: Option<u32>,
    /// When its first image was sent.
    pub(super) first_image_ns: Option<u64>,
}

/// What every result of an image stage gives: skipped where the frame was cut before it.
const OF_EVERY_RESULT: [Family; 7] = [
    Family::OmniDiffusionExecS,
    Family::OmniDiffusionExecPerStepS,
    Family::OmniDiffusionPostprocessS,
    Family::OmniDiffusionPreprocessS,
    Family::OmniImageCountTotal,
    Family::OmniImagePixels,
    Family::OmniStageInQueueS,
];

impl PipelineState {
    /// A request was given to a diffusion stage.
    pub(super) fn diffusion_add<S: Sink + ?Sized>(
        &mut self,
        pid: u32,
        socket: u64,
        add: &DiffusionAdd<'_>,
        time_ns: u64,
        environment: &Environment,
        sink: &mut S,
    ) {
        let max_requests = environment.limits.max_requests;
        match self.book.add_diffusion(pid, socket, add, time_ns, max_requests) {
            Ok(()) => {
                self.book.bind_last_diffusion_lane(pid, &self.diffusion_engines());
                // Where this is the first stage.
                let request = Add {
                    request_id: add.request_id,
                    ..Add::default()
                };
                self.join_exchange(pid, &request, environment);
            }
            Err(reason) => sink.skip(Family::OmniStageGenTimeS, reason),
        }
    }

    /// A diffusion stage runs in a process of its own: its results are on the sockets.
    pub(super) fn has_diffusion_process(&self) -> bool {
        self.engines.iter().any(|(_, engine)| !engine.is_llm)
    }

    fn diffusion_engines(&self) -> Vec<u16> {
        self.engines
            .iter()
            .filter(|(_, engine)| !engine.is_llm)
            .map(|(index, _)| engine_number(index))
            .collect()
    }

    /// A diffusion stage says something.
    pub(super) fn diffusion_message<S: Sink + ?Sized>(
        &mut self,
        index: usize,
        time_ns: u64,
        message: &Diffusion<'_>,
        environment: &Environment,
        sink: &mut S,
    ) {
        match message {
            Diffusion::Result(result) => {
                let waiting = result.metrics.and_then(|metrics| metrics.waiting);
                self.diffusion_waiting(index, time_ns, waiting, environment, sink);
                if result.failed {
                    self.diffusion_failed(index, result.request_id, time_ns, environment, sink);
                } else if !result.is_start {
                    self.diffusion_result(index, time_ns, result, environment, sink);
                }
            }
            Diffusion::Snapshot { waiting } => {
                self.diffusion_waiting(index, time_ns, *waiting, environment, sink);
            }
            Diffusion::Error { request_id, waiting } => {
                self.diffusion_waiting(index, time_ns, *waiting, environment, sink);
                self.diffusion_failed(index, request_id, time_ns, environment, sink);
            }
            Diffusion::Add(_)
            | Diffusion::Abort(_)
            | Diffusion::Call
            | Diffusion::Shutdown
            | Diffusion::Reply => {}
        }
    }

    fn diffusion_waiting<S: Sink + ?Sized>(
        &mut self,
        index: usize,
        time_ns: u64,
        waiting: Option<u64>,
        environment: &Environment,
        sink: &mut S,
    ) {
        let (Some(waiting), Some(engine)) = (waiting, self.engines.get_mut(index)) else {
            return;
        };
        engine.snapshot = Some(Snapshot {
            time_ns,
            waiting,
            ..Snapshot::default()
        });
        if engine.scope.is_none() {
            self.create_engine_scope(index, environment, sink);
        }
    }

    /// Sets what the schedulers of diffusion stages said last; gives their waiting requests, all together. They speak
    /// with a result alone: before the first one there is no value.
    pub(super) fn set_diffusion_gauges<S: Sink + ?Sized>(
        &self,
        now_ns: u64,
        environment: &Environment,
        sink: &mut S,
    ) -> u64 {
        let is_idle = self.open() == 0;
        let mut sum = 0_u64;
        for (_, engine) in self.engines.iter().filter(|(_, engine)| !engine.is_llm) {
            let (Some(scope), Some(snapshot)) = (engine.scope, engine.snapshot) else {
                continue;
            };
            let age_ns = now_ns.saturating_sub(snapshot.time_ns);
            let is_stale = is_idle && age_ns > environment.limits.stale_snapshot_ns;
            let waiting = if is_stale { 0 } else { snapshot.waiting };
            if self.scope.is_some() {
                sink.set(
                    Family::OmniStageWaitingRequests,
                    scope,
                    ExtraId::NONE,
                    as_f64(waiting),
                );
            }
            sum = sum.saturating_add(waiting);
        }
        sum
    }

    fn diffusion_failed<S: Sink + ?Sized>(
        &mut self,
        index: usize,
        id: &str,
        time_ns: u64,
        environment: &Environment,
        sink: &mut S,
    ) {
        let Some(request) = self.book.find(id) else { return };
        if self
            .book
            .request(request)
            .is_some_and(|request| request.phase == Phase::Live)
        {
            // It had the request, whatever became of it.
            if let Some(place) = self.book.claim_diffusion(request, engine_number(index)) {
                self.book.payload_arrived(request, place, None);
            }
            self.fail(request, Failure::StageError, time_ns, environment, sink);
        }
    }

    fn diffusion_result<S: Sink + ?Sized>(
        &mut self,
        index: usize,
        time_ns: u64,
        result: &DiffusionResult<'_>,
        environment: &Environment,
        sink: &mut S,
    ) {
        let number = engine_number(index);
        let request = match self.book.find(result.request_id) {
            Some(request) => request,
            // Said again, or of a request that was given up.
            None if self.book.is_recent(result.request_id) => return,
            None if self.book.requests.len() >= environment.limits.max_requests => {
                sink.skip(Family::OmniStageGenTimeS, "too_many_open");
                return;
            }
            None => self.book.discover_diffusion(result.request_id),
        };
        let Some(place) = self.book.claim_diffusion(request, number) else {
            return;
        };
        self.book.payload_arrived(request, place, None);
        if let Some(pid) = self.book.pid_of(request, place) {
            self.book.bind_last_diffusion_lane(pid, &self.diffusion_engines());
        }
        let Some(part) = self.book.part_mut(request, place) else {
            return;
        };
        let (is_added, added_ns) = (part.is_added(), part.added_ns);
        let Some(share) = part.diffusion.as_mut() else {
            return;
        };
        if result.images.is_some_and(|images| images.count > 0) {
            share.first_image_ns.get_or_insert(time_ns);
        }
        // Of a frame that was cut too early to tell, this is the likely case: few stages stream.
        if result.finished == Some(false) {
            return;
        }
        let share = **share;
        part.state = PartState::Finished;
        let stage = self.engines.get(index).and_then(|engine| engine.stage);
        let scope = self
            .engines
            .get(index)
            .and_then(|engine| engine.scope)
            .or_else(|| self.create_engine_scope(index, environment, sink));
        match scope {
            Some(scope) => {
                let subject = self.book.request(request).map(|request| Subject {
                    pipeline: self.pipeline.id,
                    request: &request.id,
                    serial: request.serial,
                });
                sink.about(subject);
                Figures {
                    result,
                    share,
                    added_ns: is_added.then_some(added_ns),
                }
                .observe(scope, sink);
                sink.about(None);
            }
            None => sink.skip(Family::OmniDiffusionExecS, "unknown_identity"),
        }
        self.book.finished.push(Finished {
            request,
            part: place,
            // As the order of the stages has one whose number is not known.
            stage: stage.unwrap_or(u32::MAX),
            reason: FinishReason::Stop,
            time_ns,
            generated: 0,
            audio: StageAudio::NoAudioStage,
            figures: RecordFigures {
                queue_s: result
                    .metrics
                    .and_then(|metrics| Some(metrics.queue_wait_ms? / 1e3)),
                ..RecordFigures::default()
            },
        });
        self.settle(environment, sink);
    }
}

/// A last result, and what was known before it.
struct Figures<'a> {
    result: &'a DiffusionResult<'a>,
    share: DiffusionShare,
    added_ns: Option<u64>,
}

impl Figures<'_> {
    fn observe<S: Sink + ?Sized>(&self, scope: ScopeId, sink: &mut S) {
        match self.result.peak_memory_mb {
            Some(peak) if peak > 0.0 && peak.is_finite() => {
                sink.set(Family::OmniPeakMemoryMb, scope, ExtraId::NONE, peak);
            }
            Some(_) => {}
            None => sink.skip(Family::OmniPeakMemoryMb, "frame_cut"),
        }
        let steps = self.share.steps.or(self.result.metrics.and_then(|m| m.steps));
        if let Some(steps) = steps {
            let steps = f64::from(steps);
            sink.observe(Family::OmniNumInferenceSteps, scope, ExtraId::NONE, steps, 1);
        }
        if self.result.metrics.is_none() {
            for family in OF_EVERY_RESULT {
                sink.skip(family, "frame_cut");
            }
            return;
        }
        self.times(steps, scope, sink);
        if self.result.kind == Some(ResultKind::Image) {
            self.images(scope, sink);
        }
    }

    /// What the engine reports of its own times; what it does not report gives no sample.
    fn times<S: Sink + ?Sized>(&self, steps: Option<u32>, scope: ScopeId, sink: &mut S) {
        let Some(metrics) = self.result.metrics else {
            return;
        };
        let seconds = |ms: Option<f64>| ms.map(|ms| ms / 1e3);
        let each_step = |value: Option<f64>| Some(value? / f64::from(steps?));
        let is_image = self.result.kind == Some(ResultKind::Image);
        let exec = seconds(metrics.exec_ms);
        let forward = seconds(metrics.forward_ms);
        let samples = [
            (Family::OmniDiffusionExecS, exec),
            (Family::OmniDiffusionExecPerStepS, each_step(exec)),
            (Family::OmniDiffusionPreprocessS, seconds(metrics.preprocess_ms)),
            (Family::OmniDiffusionPostprocessS, seconds(metrics.postprocess_ms)),
            (Family::OmniStageInQueueS, seconds(metrics.queue_wait_ms)),
            (Family::OmniVaeDecodeS, seconds(metrics.vae_decode_ms)),
            (Family::OmniDiffusionForwardS, forward),
            (
                Family::OmniDenoiseStepLatencyS,
                each_step(forward.filter(|_| is_image)),
            ),
            // There is none to load where it is 0.
            (
                Family::OmniDiffusionKvLoadS,
                seconds(metrics.kv_recv_ms).filter(|load| *load > 0.0),
            ),
        ];
        for (family, value) in samples {
            if let Some(value) = value {
                observe(family, scope, value, 1, sink);
            }
        }
    }

    fn images<S: Sink + ?Sized>(&self, scope: ScopeId, sink: &mut S) {
        let none = ExtraId::NONE;
        if let Some(images) = self.result.images {
            if images.count > 0 {
                let count = f64::from(images.count);
                sink.add(Family::OmniImageCountTotal, scope, none, count);
            }
            match images.pixels {
                Some(0) => {}
                Some(pixels) => observe(Family::OmniImagePixels, scope, as_f64(pixels), 1, sink),
                None => sink.skip(Family::OmniImagePixels, "frame_cut"),
            }
        } else {
            sink.skip(Family::OmniImageCountTotal, "frame_cut");
            sink.skip(Family::OmniImagePixels, "frame_cut");
        }
        match (self.added_ns, self.share.first_image_ns) {
            (Some(added_ns), Some(first_ns)) => {
                let ttfp_s = seconds_between(added_ns, first_ns);
                sink.observe(Family::OmniImageTtfpS, scope, none, ttfp_s, 1);
            }
            (None, Some(_)) => sink.skip(Family::OmniImageTtfpS, "start_not_seen"),
            (_, None) => {}
        }
    }
}
