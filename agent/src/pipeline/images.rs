//! Images whose stage runs inside the API process: what their answers tell is all there is.

use super::{
    http::Exchange,
    labels::Failure,
    sink::{ExtraId, ScopeId, Sink},
    state::{Environment, PipelineState},
};
use crate::{
    metrics::{catalogue::Family, number::as_f64},
    wire::{
        http::note::{End, ImageAnswer},
        message::FinishReason,
    },
};

/// The only replica that a stage inside the API process can have.
const INLINE_REPLICA: u32 = 0;

impl PipelineState {
    /// An exchange that may have images is over.
    pub(super) fn images_ended<S: Sink + ?Sized>(
        &mut self,
        exchange: &Exchange,
        end: End,
        environment: &Environment,
        sink: &mut S,
    ) {
        let images = exchange.images.as_ref().filter(|_| end == End::Whole);
        // The wait shows nowhere else, wherever the stages run.
        if let (Some(scope), Some(wait_ms)) = (self.scope, images.and_then(|images| images.queue_wait_ms)) {
            sink.observe(
                Family::OmniRequestQueueWaitS,
                scope,
                ExtraId::NONE,
                wait_ms / 1e3,
                1,
            );
        }
        if self.has_diffusion_process() {
            return;
        }
        let is_all_inline = self.engines.is_empty();
        match (images, end) {
            (Some(images), _) => self.inline_images(exchange, images, is_all_inline, environment, sink),
            // What can't be a request to the engines is not counted.
            _ if !is_all_inline || !exchange.is_read => {}
            (_, End::ClientLeft { .. }) if exchange.status.is_none() => {
                self.fail_inline(Failure::ClientDisconnect, environment, sink);
            }
            (_, End::Whole | End::Failed) if exchange.status.is_some_and(|status| status >= 500) => {
                self.fail_inline(Failure::StageError, environment, sink);
            }
            (_, End::Lost) => sink.skip(Family::OmniE2eRequestLatencyS, "events_lost"),
            _ => {}
        }
    }

    fn inline_images<S: Sink + ?Sized>(
        &mut self,
        exchange: &Exchange,
        images: &ImageAnswer,
        is_all_inline: bool,
        environment: &Environment,
        sink: &mut S,
    ) {
        let Some(whole) = self.scope else { return };
        let none = ExtraId::NONE;
        let steps = exchange.ask.steps.filter(|steps| *steps > 0);
        match steps {
            Some(steps) => sink.observe(Family::OmniNumInferenceSteps, whole, none, f64::from(steps), 1),
            // The model's own default is not on the wire.
            None => sink.skip(Family::OmniNumInferenceSteps, "not_in_request"),
        }
        // A long answer shows its first image alone; the request says how many were wanted.
        let count = images.count.or(exchange.ask.images).unwrap_or(1);
        sink.add(Family::OmniImageCountTotal, whole, none, f64::from(count));
        match images.size.or(exchange.ask.size) {
            Some((width, height)) => {
                let pixels = u64::from(width) * u64::from(height) * u64::from(count);
                sink.observe(Family::OmniImagePixels, whole, none, as_f64(pixels), 1);
            }
            None => sink.skip(Family::OmniImagePixels, "size_not_seen"),
        }
        self.inline_stage(images, steps, environment, sink);
        if is_all_inline {
            let stop = environment.labels.finish(FinishReason::Stop);
            sink.add(Family::OmniRequestsSuccessTotal, whole, stop, 1.0);
            if images.stage_gen_ms.is_empty() {
                sink.skip(Family::OmniE2eRequestLatencyS, "no_stage_times");
                return;
            }
            let stages_ms: f64 = images.stage_gen_ms.iter().map(|(_, time)| time).sum();
            let before_ms = images.preprocess_ms.unwrap_or(0.0) + images.queue_wait_ms.unwrap_or(0.0);
            let e2e_s = seconds(before_ms + stages_ms);
            sink.observe(Family::OmniE2eRequestLatencyS, whole, none, e2e_s, 1);
        }
    }

    /// What an answer tells of the stage that made its images.
    fn inline_stage<S: Sink + ?Sized>(
        &mut self,
        images: &ImageAnswer,
        steps: Option<u32>,
        environment: &Environment,
        sink: &mut S,
    ) {
        // The stage that is no process is the one inside.
        let is_process = |stage: u32| self.engines.iter().any(|(_, engine)| engine.stage == Some(stage));
        let stage = images
            .stage_gen_ms
            .iter()
            .filter(|(stage, _)| !is_process(*stage))
            .max_by_key(|(stage, _)| *stage)
            .copied();
        let Some((stage, gen_ms)) = stage else {
            sink.skip(Family::OmniStageGenTimeS, "no_stage_times");
            return;
        };
        let scope = self.inline_scope(stage, sink);
        let none = ExtraId::NONE;
        let generation = seconds(gen_ms);
        let diffusion = environment.labels.stage_type_diffusion;
        sink.observe(Family::OmniStageGenTimeS, scope, diffusion, generation, 1);
        // One result is all that such a stage gives, so its first image comes with its end.
        let first_s = images.first_image_ms.map_or(generation, seconds);
        sink.observe(Family::OmniImageTtfpS, scope, none, first_s, 1);
        if let Some(peak_mb) = images.peak_memory_mb {
            sink.set(Family::OmniPeakMemoryMb, scope, none, peak_mb);
        }
        if let Some(decode_s) = images.vae_decode_s {
            sink.observe(Family::OmniVaeDecodeS, scope, none, decode_s, 1);
        }
        if let Some(denoise_s) = images.denoise_s {
            sink.observe(Family::OmniDiffusionForwardS, scope, none, denoise_s, 1);
            if let Some(steps) = steps {
                let each_s = denoise_s / f64::from(steps);
                sink.observe(Family::OmniDenoiseStepLatencyS, scope, none, each_s, 1);
            }
        }
    }

    fn inline_scope<S: Sink + ?Sized>(&mut self, stage: u32, sink: &mut S) -> ScopeId {
        if let Some(scope) = self.exchanges.inline_scopes.get(&stage) {
            return *scope;
        }
        let scope = self.scope_of(Some(stage), Some(INLINE_REPLICA), self.max_model_len());
        let scope = sink.scope(&scope);
        self.exchanges.inline_scopes.insert(stage, scope);
        scope
    }

    /// Requests that a stage inside the API process has, where no stage is a process.
    pub(super) fn open_inline(&self) -> usize {
        if self.engines.is_empty() {
            self.exchanges
                .waiting()
                .filter(|exchange| exchange.endpoint.gives_images())
                .count()
        } else {
            0
        }
    }
}

fn seconds(milliseconds: f64) -> f64 {
    milliseconds / 1e3
}
