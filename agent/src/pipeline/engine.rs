//! One engine process: its open requests, and what each of its messages means for the `vllm:*` families.
//!
//! The rules are those of vLLM's output processor and iteration statistics (docs/wire.md section "Upstream families"):
//! what it computes in the API process from the very frames that are seen here.

use std::sync::Arc;

use rustc_hash::FxHashMap;
use slab::Slab;

use super::{
    audio::{AudioState, FirstPacket, seconds_between},
    book::{Book, Finished, NONE, Part, PartState, StageAudio, Task, UNKNOWN},
    labels::{Labels, STAGE_COUNTERS, STAGE_HISTOGRAMS, Sleep},
    records::Figures,
    sink::{ExtraId, ScopeId, Sink, Subject},
};
use crate::{
    host::identity::{Flavor, PipelineId},
    metrics::{catalogue::Family, number::as_f64},
    wire::message::{EngineOutputs, FinishReason, KvWait, Output, OutputKind, SchedulerStats},
};

/// How long a request whose first output was read before its ADD waits for that ADD once it has finished.
pub(super) const EARLY_GRACE_NS: u64 = 1_000_000_000;

/// Above thirty years, or a billion tokens, a sample is a fault of its sender.
const MAX_SAMPLE: f64 = 1e9;

/// Positions of speculative tokens that get a child of their own.
const MAX_SPEC_POSITIONS: usize = 64;

/// What a stage needs to know of its pipeline while it takes a frame.
pub(super) struct Context<'a> {
    pub(super) labels: &'a Labels,
    pub(super) flavor: Flavor,
    pub(super) pipeline: PipelineId,
    /// Scope of the pipeline's own families.
    pub(super) pipeline_scope: Option<ScopeId>,
    /// An API process of the pipeline is watched, so ADDs can be seen.
    pub(super) has_api: bool,
    pub(super) max_requests: usize,
    /// Wall clock less monotonic clock.
    pub(super) wall_offset_ns: Option<i64>,
}

impl Context<'_> {
    pub(super) fn shared_lanes(&self) -> bool {
        self.flavor == Flavor::Vllm
    }
}

/// The newest gauges of a scheduler.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Snapshot {
    pub(super) time_ns: u64,
    pub(super) running: u64,
    pub(super) waiting: u64,
    pub(super) deferred: u64,
    pub(super) kv_cache_usage: f64,
}

/// How much of a request's outputs is seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum View {
    /// All of them.
    Whole,
    /// Tokens that the engine did not report one by one came in a sum with the finish.
    Summed,
    /// Those since the agent looks.
    Rest,
}

/// A request at one engine, from its first output to its finish.
#[derive(Debug)]
struct Stage {
    id: Arc<str>,
    request: u32,
    part: u8,
    /// The next output is the first of the request or of its segment.
    prefilling: bool,
    corrupted: bool,
    view: View,
    /// Finished, waiting for its ADD.
    finish: Option<FinishReason>,
    /// The engine's count of cut frames when this request was last seen.
    cuts: u32,
    generated: u32,
    prompt_tokens: u32,
    cached_tokens: u32,
    preemptions: u32,
    /// Engine clock, seconds; NaN: not seen.
    queued: f64,
    scheduled: f64,
    first_token: f64,
    last_token: f64,
    /// Time of the frame with the first output (until its ADD is read), later of the finish.
    frame_ns: u64,
    /// Time of the last frame.
    last_ns: u64,
    audio: Option<Box<AudioState>>,
}

/// Equal inter-token latencies in a row: the requests of a batch get their tokens at the same time.
#[derive(Default)]
struct Run {
    value: f64,
    times: u64,
}

/// Sums over one frame.
#[derive(Default)]
struct Batch {
    generated: u64,
    prompt: u64,
    computed: u64,
    cached: u64,
    local_cached: u64,
    external_cached: u64,
    preemptions: u64,
    corrupted: u64,
    latency: Run,
    prefilled: bool,
}

/// What to do with the output of a request that has no state here.
enum Admission {
    Slot(u32),
    /// Counts its tokens and nothing else.
    Untracked,
    /// The API process drops it too.
    Ignored,
}

/// One engine process.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) stage: Option<u32>,
    pub(super) replica: Option<u32>,
    /// An LLM (or audio decoding) stage, as opposed to a diffusion stage.
    pub(super) is_llm: bool,
    /// Place of its stage among the pipeline's LLM stages.
    pub(super) rank: usize,
    /// Stages of any kind before its own.
    pub(super) stages_before: usize,
    pub(super) scope: Option<ScopeId>,
    /// When it was found.
    pub(super) found_ns: u64,
    /// Its start was watched, so its Ready message will be seen.
    pub(super) is_starting: bool,
    pub(super) sleep: Sleep,
    pub(super) snapshot: Option<Snapshot>,
    /// It has given audio before.
    audio_seen: bool,
    sample_rate: Option<u32>,
    open: FxHashMap<Arc<str>, u32>,
    slots: Slab<Stage>,
    /// Slots of the last frame in its order: a batch repeats from step to step.
    order: Vec<u32>,
    next_order: Vec<u32>,
    cuts: u32,
    spec_positions: Vec<ExtraId>,
}

impl Engine {
    pub(super) fn new(stage: Option<u32>, replica: Option<u32>, is_llm: bool, now_ns: u64) -> Self {
        Self {
            stage,
            replica,
            is_llm,
            rank: 0,
            stages_before: 0,
            scope: None,
            found_ns: now_ns,
            is_starting: false,
            sleep: Sleep::Awake,
            snapshot: None,
            audio_seen: false,
            sample_rate: None,
            open: FxHashMap::default(),
            slots: Slab::new(),
            order: Vec::new(),
            next_order: Vec::new(),
            cuts: 0,
            spec_positions: Vec::new(),
        }
    }

    /// Requests that have a state here.
    pub(super) fn open(&self) -> usize {
        self.slots.len()
    }

    /// Samples a second of the audio that a request has got here; `None`: no audio.
    pub(super) fn audio_rate(&self, slot: u32) -> Option<u32> {
        let audio = self.slots.get(slot as usize)?.audio.as_ref()?;
        (audio.frames > 0).then(|| audio.rate())
    }

    /// What is known of a request that it has a state of: times and generated tokens.
    pub(super) fn figures(&self, part: &Part) -> Option<(Figures, u64)> {
        let stage = self.slots.get(part.slot as usize)?;
        Some((stage.figures(part), u64::from(stage.generated)))
    }

    /// Creates the children that the real server has before the first request.
    pub(super) fn create_children<S: Sink + ?Sized>(scope: ScopeId, labels: &Labels, sink: &mut S) {
        for &family in STAGE_COUNTERS {
            for &extra in labels.initial(family) {
                sink.add(family, scope, extra, 0.0);
            }
        }
        for &family in STAGE_HISTOGRAMS {
            sink.observe(family, scope, ExtraId::NONE, 0.0, 0);
        }
    }

    /// Takes one message of outputs.
    pub(super) fn outputs<S: Sink + ?Sized>(
        &mut self,
        index: u16,
        message: &EngineOutputs<'_>,
        time_ns: u64,
        book: &mut Book,
        context: &Context<'_>,
        sink: &mut S,
    ) {
        let Some(scope) = self.scope else {
            return;
        };
        if let Some(stats) = &message.stats {
            self.scheduler_stats(stats, scope, time_ns, context, sink);
        }
        if !message.outputs.is_empty() || message.outputs_lost > 0 {
            self.batch(index, scope, message, time_ns, book, context, sink);
        }
        for id in &message.finished_requests {
            self.close_unseen_finish(id, time_ns, book, sink);
        }
    }

    #[expect(clippy::too_many_arguments, reason = "one frame and where it belongs")]
    fn batch<S: Sink + ?Sized>(
        &mut self,
        index: u16,
        scope: ScopeId,
        message: &EngineOutputs<'_>,
        time_ns: u64,
        book: &mut Book,
        context: &Context<'_>,
        sink: &mut S,
    ) {
        // The time of the frame is late by the hand-over to the output thread, far below a millisecond.
        let now = message
            .timestamp
            .filter(|timestamp| timestamp.is_finite())
            .unwrap_or_else(|| as_f64(time_ns) / 1e9);
        let cuts_before = self.cuts;
        if message.outputs_lost > 0 {
            self.cuts = self.cuts.wrapping_add(1);
            sink.skip(Family::VllmIterationTokensTotal, "frame_cut");
            sink.skip(Family::VllmGenerationTokensTotal, "frame_cut");
        }
        let mut batch = Batch::default();
        let mut cursor = 0;
        self.next_order.clear();
        for output in &message.outputs {
            // Before anything else: the transfer of a request's cache may end after the request.
            if let Some(wait) = output.kv_wait {
                let serial = book.known(output.request_id).map(|known| known.serial);
                sink.about(serial.map(|serial| Subject {
                    pipeline: context.pipeline,
                    request: output.request_id,
                    serial,
                }));
                kv_wait(wait, context, sink);
                sink.about(None);
            }
            let slot = match self.find(output.request_id, &mut cursor) {
                Some(slot) => slot,
                None => match self.admit(index, output, time_ns, book, context) {
                    Admission::Slot(slot) => slot,
                    Admission::Untracked => {
                        batch.generated += u64::from(output.new_tokens);
                        sink.skip(Family::VllmInterTokenLatencySeconds, "too_many_open");
                        continue;
                    }
                    Admission::Ignored => continue,
                },
            };
            let Some(stage) = self.slots.get_mut(slot as usize) else {
                continue;
            };
            if stage.finish.is_some() {
                continue;
            }
            self.next_order.push(slot);
            batch.generated += u64::from(output.new_tokens);
            stage.generated = stage.generated.saturating_add(output.new_tokens);
            let was_prefilling = stage.prefilling;
            if was_prefilling || !is_plain(output) {
                self.special(slot, scope, output, now, time_ns, &mut batch, book, context, sink);
            }
            let Some(stage) = self.slots.get_mut(slot as usize) else {
                continue;
            };
            if !was_prefilling && stage.cuts == cuts_before && !stage.last_token.is_nan() {
                batch.latency.add(now - stage.last_token, |value, times| {
                    observe(Family::VllmInterTokenLatencySeconds, scope, value, times, sink);
                });
            } else if !was_prefilling {
                let reason = if stage.last_token.is_nan() {
                    "start_not_seen"
                } else {
                    "frame_cut"
                };
                sink.skip(Family::VllmInterTokenLatencySeconds, reason);
            }
            stage.last_token = now;
            stage.last_ns = time_ns;
            stage.cuts = self.cuts;
            if let Some(reason) = output.finish_reason {
                self.ended(
                    slot, scope, output, reason, time_ns, &mut batch, book, context, sink,
                );
            } else if output.segment_finished {
                self.segment_ended(slot, book);
            }
        }
        std::mem::swap(&mut self.order, &mut self.next_order);
        batch.flush(scope, message.outputs_lost == 0, context, sink);
    }

    /// Looks `id` up, first where the last frame had it.
    fn find(&self, id: &str, cursor: &mut usize) -> Option<u32> {
        // One request that left the batch shifts the rest by one place.
        for skip in 0..2 {
            let Some(&slot) = self.order.get(*cursor + skip) else {
                break;
            };
            if self
                .slots
                .get(slot as usize)
                .is_some_and(|stage| *stage.id == *id)
            {
                *cursor += skip + 1;
                return Some(slot);
            }
        }
        self.open.get(id).copied()
    }

    fn admit(
        &mut self,
        index: u16,
        output: &Output<'_>,
        time_ns: u64,
        book: &mut Book,
        context: &Context<'_>,
    ) -> Admission {
        let is_first = output.prefill.is_some();
        let (request, part) = if let Some(request) = book.find(output.request_id) {
            let part = book.claim(
                request,
                index,
                self.rank,
                self.stages_before == 0,
                is_first,
                context.shared_lanes(),
            );
            match part {
                Some(part) => (request, part),
                None => return Admission::Ignored,
            }
        } else {
            // Nothing new of an unknown request: the answer to an abort that is over, or one from before the agent, or
            // news of a cache's transfer.
            if output.new_tokens == 0 && output.prefill.is_none() && output.audio.is_none() {
                return Admission::Ignored;
            }
            if book.is_recent(output.request_id) {
                return Admission::Ignored;
            }
            if book.requests.len() >= context.max_requests {
                return Admission::Untracked;
            }
            (book.discover(output.request_id, index, is_first), 0)
        };
        let Some(id) = book.request(request).map(|request| Arc::clone(&request.id)) else {
            return Admission::Ignored;
        };
        book.payload_arrived(request, part, output.events.queued);
        let from_first = book.part_mut(request, part).is_some_and(|part| part.from_first);
        let slot = self.slots.insert(Stage {
            id: Arc::clone(&id),
            request,
            part,
            prefilling: from_first,
            corrupted: false,
            view: if from_first { View::Whole } else { View::Rest },
            finish: None,
            cuts: self.cuts,
            generated: 0,
            prompt_tokens: UNKNOWN,
            cached_tokens: 0,
            preemptions: 0,
            queued: f64::NAN,
            scheduled: f64::NAN,
            first_token: f64::NAN,
            last_token: f64::NAN,
            frame_ns: time_ns,
            last_ns: time_ns,
            audio: None,
        });
        // Bounded by `max_requests`, far below 2^32.
        let slot = u32::try_from(slot).unwrap_or(u32::MAX);
        self.open.insert(id, slot);
        if let Some(part) = book.part_mut(request, part) {
            part.slot = slot;
        }
        Admission::Slot(slot)
    }

    /// What an output carries beyond a token.
    #[expect(clippy::too_many_arguments, reason = "one output and where it belongs")]
    fn special<S: Sink + ?Sized>(
        &mut self,
        slot: u32,
        scope: ScopeId,
        output: &Output<'_>,
        now: f64,
        time_ns: u64,
        batch: &mut Batch,
        book: &mut Book,
        context: &Context<'_>,
        sink: &mut S,
    ) {
        let Some(stage) = self.slots.get_mut(slot as usize) else {
            return;
        };
        stage.corrupted |= output.nans_in_logits > 0;
        let events = &output.events;
        if let Some(queued) = events.queued {
            stage.queued = queued;
        }
        if let Some(scheduled) = events.scheduled
            && stage.scheduled.is_nan()
        {
            stage.scheduled = scheduled;
        }
        stage.preemptions = stage.preemptions.saturating_add(events.preemptions);
        batch.preemptions += u64::from(events.preemptions);
        if let Some(audio) = output.audio {
            self.audio_seen = true;
            let likely_rate = self.sample_rate;
            let heard = stage
                .audio
                .get_or_insert_with(|| Box::new(AudioState::new(audio.sample_rate, likely_rate)));
            heard.push(time_ns, audio.frames, audio.sample_rate);
            self.sample_rate = audio.sample_rate.or(likely_rate);
            if heard.first_packet.is_pending()
                && let Some(first_ns) = heard.first_ns
                && context.pipeline_scope.is_some()
            {
                // At once: a stream that its client gives up has had its first packet too.
                heard.first_packet = first_packet(
                    stage.request,
                    stage.part,
                    first_ns,
                    scope,
                    book,
                    context.pipeline,
                    sink,
                );
            }
        }
        if !stage.prefilling {
            return;
        }
        stage.prefilling = false;
        stage.first_token = now;
        if let Some(reported) = output.num_generation_tokens
            && reported > stage.generated
            && output.finish_reason.is_some()
        {
            // With the native runner, stages before the last report their tokens only in sum, with the finish.
            stage.view = View::Summed;
        }
        if let Some(prefill) = output.prefill {
            batch.prefilled = true;
            batch.prompt += u64::from(prefill.prompt_tokens);
            batch.computed += u64::from(prefill.computed_tokens);
            batch.cached += u64::from(prefill.cached_tokens);
            batch.local_cached += u64::from(prefill.local_cached_tokens);
            batch.external_cached += u64::from(prefill.external_cached_tokens);
            stage.prompt_tokens = prefill.prompt_tokens;
            stage.cached_tokens = prefill.cached_tokens;
        } else {
            sink.skip(Family::VllmPromptTokensTotal, "no_prefill_stats");
        }
        let Some(part) = book.part_mut(stage.request, stage.part) else {
            return;
        };
        if part.prompt_tokens == UNKNOWN {
            part.prompt_tokens = stage.prompt_tokens;
        }
        if stage.view == View::Summed {
            sink.skip(Family::VllmTimeToFirstTokenSeconds, "tokens_summed");
        } else if part.is_added() {
            first_token(scope, part, time_ns, sink);
        } else {
            stage.frame_ns = time_ns;
        }
    }

    /// The ADD of a request came after its first output.
    pub(super) fn add_seen<S: Sink + ?Sized>(
        &mut self,
        slot: u32,
        book: &mut Book,
        context: &Context<'_>,
        sink: &mut S,
    ) {
        let (Some(scope), Some(stage)) = (self.scope, self.slots.get_mut(slot as usize)) else {
            return;
        };
        let Some(part) = book.part_mut(stage.request, stage.part) else {
            return;
        };
        if part.prompt_tokens == UNKNOWN {
            part.prompt_tokens = stage.prompt_tokens;
        }
        let first_ns = stage.frame_ns;
        if stage.view == View::Whole && !stage.prefilling {
            first_token(scope, part, first_ns, sink);
        }
        if stage.finish.is_some() {
            self.finish_early(slot, book, context, sink);
        }
    }

    #[expect(clippy::too_many_arguments, reason = "one output and where it belongs")]
    fn ended<S: Sink + ?Sized>(
        &mut self,
        slot: u32,
        scope: ScopeId,
        output: &Output<'_>,
        reason: FinishReason,
        time_ns: u64,
        batch: &mut Batch,
        book: &mut Book,
        context: &Context<'_>,
        sink: &mut S,
    ) {
        let Some(stage) = self.slots.get_mut(slot as usize) else {
            return;
        };
        if let Some(reported) = output.num_generation_tokens
            && reported > stage.generated
            && stage.view != View::Rest
        {
            batch.generated += u64::from(reported - stage.generated);
            stage.generated = reported;
        }
        let part = book.part_mut(stage.request, stage.part);
        let is_segment = output.segment_finished
            || (context.flavor == Flavor::Vllm
                && part
                    .as_ref()
                    .and_then(|part| part.session.as_ref())
                    .is_some_and(|session| session.resumable));
        if is_segment {
            self.segment_ended(slot, book);
            return;
        }
        let Some(part) = part else {
            return;
        };
        if !part.is_added() && stage.view != View::Rest && context.has_api {
            // Its ADD is on its way: frames of two processes may be read out of order.
            stage.finish = Some(reason);
            part.state = PartState::Early;
            let (request, first_ns) = (stage.request, stage.frame_ns);
            if let Some(serial) = book.request(request).map(|request| request.serial) {
                book.schedule(
                    request,
                    serial,
                    Task::FinishEarly,
                    first_ns.max(time_ns) + EARLY_GRACE_NS,
                );
            }
            if let Some(finished) = book.request_mut(request) {
                finished.finish_ns = time_ns;
            }
            return;
        }
        self.finish(slot, scope, reason, time_ns, book, context, batch, sink);
    }

    /// Finishes a request whose ADD was waited for.
    pub(super) fn finish_early<S: Sink + ?Sized>(
        &mut self,
        slot: u32,
        book: &mut Book,
        context: &Context<'_>,
        sink: &mut S,
    ) {
        let (Some(scope), Some(stage)) = (self.scope, self.slots.get(slot as usize)) else {
            return;
        };
        let (Some(reason), request) = (stage.finish, stage.request) else {
            return;
        };
        let Some(time_ns) = book.request(request).map(|request| request.finish_ns) else {
            return;
        };
        self.finish_now(slot, scope, reason, time_ns, book, context, sink);
    }

    /// The API process ended a request by itself: it found a stop string in the newest output.
    pub(super) fn stop_string<S: Sink + ?Sized>(
        &mut self,
        slot: u32,
        time_ns: u64,
        book: &mut Book,
        context: &Context<'_>,
        sink: &mut S,
    ) {
        if let Some(scope) = self.scope {
            self.finish_now(slot, scope, FinishReason::Stop, time_ns, book, context, sink);
        }
    }

    #[expect(clippy::too_many_arguments, reason = "one finish and where it belongs")]
    fn finish_now<S: Sink + ?Sized>(
        &mut self,
        slot: u32,
        scope: ScopeId,
        reason: FinishReason,
        time_ns: u64,
        book: &mut Book,
        context: &Context<'_>,
        sink: &mut S,
    ) {
        let mut batch = Batch::default();
        self.finish(slot, scope, reason, time_ns, book, context, &mut batch, sink);
        if batch.corrupted > 0 {
            sink.add(
                Family::VllmCorruptedRequestsTotal,
                scope,
                ExtraId::NONE,
                as_f64(batch.corrupted),
            );
        }
    }

    /// When the engine last answered for `slot`.
    pub(super) fn last_output_ns(&self, slot: u32) -> Option<u64> {
        self.slots.get(slot as usize).map(|stage| stage.last_ns)
    }

    #[expect(clippy::too_many_arguments, reason = "one finish and where it belongs")]
    fn finish<S: Sink + ?Sized>(
        &mut self,
        slot: u32,
        scope: ScopeId,
        reason: FinishReason,
        time_ns: u64,
        book: &mut Book,
        context: &Context<'_>,
        batch: &mut Batch,
        sink: &mut S,
    ) {
        let Some(stage) = self.remove(slot) else {
            return;
        };
        batch.corrupted += u64::from(stage.corrupted);
        let mut figures = Figures::default();
        if let Some(part) = book.part_mut(stage.request, stage.part) {
            part.state = PartState::Finished;
            stage.observe(scope, part, reason, time_ns, context, sink);
            figures = stage.figures(part);
        }
        if context.flavor == Flavor::Vllm
            && stage.view == View::Whole
            && let Some((n, longest)) = book.leave_siblings(&stage.id, Some(u64::from(stage.generated)))
        {
            for (family, value) in [
                (Family::VllmRequestParamsN, u64::from(n)),
                (Family::VllmRequestMaxNumGenerationTokens, longest),
            ] {
                sink.observe(family, scope, ExtraId::NONE, as_f64(value), 1);
            }
        }
        book.finished.push(Finished {
            request: stage.request,
            part: stage.part,
            stage: self.stage.unwrap_or(0),
            reason,
            time_ns,
            generated: u64::from(stage.generated),
            audio: match stage.audio {
                Some(audio) => StageAudio::Some(audio),
                None if self.audio_seen => StageAudio::Silent,
                None => StageAudio::NoAudioStage,
            },
            figures,
        });
    }

    /// A streamed input segment is done; the request goes on with the next one.
    fn segment_ended(&mut self, slot: u32, book: &mut Book) {
        if let Some(stage) = self.slots.get_mut(slot as usize)
            && let Some(part) = book.part_mut(stage.request, stage.part)
            && part.next_segment()
        {
            stage.prefilling = true;
        }
    }

    /// The next segment of a request that waited for it was sent.
    pub(super) fn segment_began(&mut self, slot: u32) {
        if let Some(stage) = self.slots.get_mut(slot as usize) {
            stage.prefilling = true;
        }
    }

    /// The engine names a request as finished whose finish lay in a part that was not captured.
    fn close_unseen_finish<S: Sink + ?Sized>(
        &mut self,
        id: &str,
        time_ns: u64,
        book: &mut Book,
        sink: &mut S,
    ) {
        let Some(&slot) = self.open.get(id) else {
            return;
        };
        if self
            .slots
            .get(slot as usize)
            .is_some_and(|stage| stage.finish.is_some())
        {
            return;
        }
        let Some(stage) = self.remove(slot) else {
            return;
        };
        sink.skip(Family::VllmRequestSuccessTotal, "finish_not_seen");
        let mut figures = Figures::default();
        if let Some(part) = book.part_mut(stage.request, stage.part) {
            part.state = PartState::Finished;
            figures = stage.figures(part);
        }
        book.leave_siblings(&stage.id, None);
        book.finished.push(Finished {
            request: stage.request,
            part: stage.part,
            stage: self.stage.unwrap_or(0),
            reason: FinishReason::Stop,
            time_ns,
            generated: u64::from(stage.generated),
            audio: stage.audio.map_or(StageAudio::NoAudioStage, StageAudio::Some),
            figures,
        });
    }

    /// Drops a request without a sample.
    pub(super) fn drop_request(&mut self, slot: u32) {
        self.remove(slot);
    }

    fn remove(&mut self, slot: u32) -> Option<Stage> {
        let stage = self.slots.try_remove(slot as usize)?;
        self.open.remove(&stage.id);
        Some(stage)
    }

    fn scheduler_stats<S: Sink + ?Sized>(
        &mut self,
        stats: &SchedulerStats<'_>,
        scope: ScopeId,
        time_ns: u64,
        context: &Context<'_>,
        sink: &mut S,
    ) {
        self.snapshot = Some(Snapshot {
            time_ns,
            running: stats.running,
            waiting: stats.waiting,
            deferred: stats.skipped_waiting.unwrap_or(0),
            kv_cache_usage: if stats.kv_cache_usage.is_finite() {
                stats.kv_cache_usage
            } else {
                0.0
            },
        });
        let mut count = |family, by: u64| {
            if by > 0 {
                sink.add(family, scope, ExtraId::NONE, as_f64(by));
            }
        };
        if let Some(cache) = stats.prefix_cache {
            count(Family::VllmPrefixCacheQueriesTotal, cache.queries);
            count(Family::VllmPrefixCacheHitsTotal, cache.hits);
        }
        if let Some(cache) = stats.external_prefix_cache {
            count(Family::VllmExternalPrefixCacheQueriesTotal, cache.queries);
            count(Family::VllmExternalPrefixCacheHitsTotal, cache.hits);
        }
        for eviction in &stats.kv_evictions {
            let mut observe = |family, value| observe(family, scope, value, 1, sink);
            observe(Family::VllmKvBlockLifetimeSeconds, eviction.lifetime_s);
            observe(Family::VllmKvBlockIdleBeforeEvictSeconds, eviction.idle_s);
            for &gap in &eviction.reuse_gaps_s {
                observe(Family::VllmKvBlockReuseGapSeconds, gap);
            }
        }
        if let Some(spec) = &stats.spec_decode {
            let mut count = |family, by| sink.add(family, scope, ExtraId::NONE, as_f64(by));
            count(Family::VllmSpecDecodeNumDraftsTotal, spec.drafts);
            count(Family::VllmSpecDecodeNumDraftTokensTotal, spec.draft_tokens);
            count(Family::VllmSpecDecodeNumAcceptedTokensTotal, spec.accepted_tokens);
            for (position, &accepted) in spec
                .accepted_per_position
                .iter()
                .enumerate()
                .take(MAX_SPEC_POSITIONS)
            {
                let extra = if let Some(&extra) = self.spec_positions.get(position) {
                    extra
                } else {
                    let extra = sink.extra(&[&position.to_string()]);
                    self.spec_positions.push(extra);
                    extra
                };
                sink.add(
                    Family::VllmSpecDecodeNumAcceptedTokensPerPosTotal,
                    scope,
                    extra,
                    as_f64(accepted),
                );
            }
        }
        if let Some(perf) = stats.perf {
            for (family, by) in [
                (Family::VllmEstimatedFlopsPerGpuTotal, perf.flops),
                (Family::VllmEstimatedReadBytesPerGpuTotal, perf.read_bytes),
                (Family::VllmEstimatedWriteBytesPerGpuTotal, perf.write_bytes),
            ] {
                if by > 0.0 && by.is_finite() {
                    sink.add(family, scope, ExtraId::NONE, by);
                }
            }
        }
        if !stats.waiting_lora.is_empty() || !stats.running_lora.is_empty() {
            lora_info(stats, scope, time_ns, context, sink);
        }
    }
}

/// vLLM sets this gauge to the wall-clock time: the newest combination of adapters is the one in use.
fn lora_info<S: Sink + ?Sized>(
    stats: &SchedulerStats<'_>,
    scope: ScopeId,
    time_ns: u64,
    context: &Context<'_>,
    sink: &mut S,
) {
    let Some(offset) = context.wall_offset_ns else {
        sink.skip(Family::VllmLoraRequestsInfo, "no_wall_clock");
        return;
    };
    let wall = i64::try_from(time_ns).unwrap_or(i64::MAX).saturating_add(offset);
    let wall_s = as_f64(u64::try_from(wall).unwrap_or(0)) / 1e9;
    // `max_lora` is a setting of the engine that its messages do not carry.
    let extra = sink.extra(&["", &stats.waiting_lora.join(","), &stats.running_lora.join(",")]);
    sink.set(Family::VllmLoraRequestsInfo, scope, extra, wall_s);
}

/// Observes a duration or a count. Clocks and messages of other processes are not trusted to make it a sane one.
pub(super) fn observe<S: Sink + ?Sized>(
    family: Family,
    scope: ScopeId,
    value: f64,
    times: u64,
    sink: &mut S,
) {
    if is_duration(value) {
        sink.observe(family, scope, ExtraId::NONE, value, times);
    } else {
        sink.skip(family, "not_plausible");
    }
}

/// Durations in seconds and counts that a request can have.
fn is_duration(value: f64) -> bool {
    (0.0..MAX_SAMPLE).contains(&value)
}

/// The time to a request's first audio, where its ADD has been seen and tells that the response is streamed.
fn first_packet<S: Sink + ?Sized>(
    request: u32,
    part: u8,
    first_ns: u64,
    scope: ScopeId,
    book: &Book,
    pipeline: PipelineId,
    sink: &mut S,
) -> FirstPacket {
    let Some(request) = book.request(request) else {
        return FirstPacket::Pending;
    };
    if request.exchange.is_some() {
        // Told when it is written to the client.
        return FirstPacket::Told;
    }
    let part = request
        .parts
        .get(usize::from(part))
        .filter(|part| part.is_added());
    match (part.map(|part| part.output_kind), request.start_ns()) {
        (Some(OutputKind::Delta), Some(start_ns)) => {
            let seconds = seconds_between(start_ns, first_ns);
            sink.about(Some(Subject {
                pipeline,
                request: &request.id,
                serial: request.serial,
            }));
            sink.observe(Family::OmniAudioTtfpS, scope, ExtraId::NONE, seconds, 1);
            sink.about(None);
            FirstPacket::Told
        }
        _ => FirstPacket::Pending,
    }
}

/// A completed wait for the transfer of a request's cache.
fn kv_wait<S: Sink + ?Sized>(wait: KvWait<'_>, context: &Context<'_>, sink: &mut S) {
    if let Some(scope) = context.pipeline_scope
        && is_duration(wait.seconds)
    {
        let connector = sink.extra(&[wait.connector_type]);
        sink.observe(Family::OmniKvWaitS, scope, connector, wait.seconds, 1);
    }
}

/// A token and nothing else.
fn is_plain(output: &Output<'_>) -> bool {
    output.prefill.is_none()
        && output.audio.is_none()
        && output.nans_in_logits == 0
        && output.events.preemptions == 0
        && output.events.queued.is_none()
        && output.events.scheduled.is_none()
}

fn first_token<S: Sink + ?Sized>(scope: ScopeId, part: &Part, first_ns: u64, sink: &mut S) {
    sink.observe(
        Family::VllmTimeToFirstTokenSeconds,
        scope,
        ExtraId::NONE,
        seconds_between(part.arrival_ns, first_ns),
        1,
    );
}

impl Stage {
    /// Times and tokens for the request's record, by the rules of the samples.
    fn figures(&self, part: &Part) -> Figures {
        let has_first = self.view == View::Whole
            && !self.prefilling
            && part.is_added()
            // Its time of arrival is that of its newest segment.
            && part.session.is_none();
        Figures {
            queue_s: Some(self.scheduled - self.queued).filter(|queue| is_duration(*queue)),
            first_token_s: has_first.then(|| seconds_between(part.arrival_ns, self.frame_ns)),
            prompt_tokens: (part.prompt_tokens != UNKNOWN).then_some(part.prompt_tokens),
        }
    }

    /// The samples of a finished request.
    fn observe<S: Sink + ?Sized>(
        &self,
        scope: ScopeId,
        part: &Part,
        reason: FinishReason,
        time_ns: u64,
        context: &Context<'_>,
        sink: &mut S,
    ) {
        sink.add(
            Family::VllmRequestSuccessTotal,
            scope,
            context.labels.finish(reason),
            1.0,
        );
        let mut sample = |family, value: Result<f64, &'static str>| match value {
            Ok(value) => observe(family, scope, value, 1, sink),
            Err(reason) => sink.skip(family, reason),
        };
        let start = if part.is_added() {
            Ok(seconds_between(part.arrival_ns, time_ns))
        } else {
            Err("start_not_seen")
        };
        sample(Family::VllmE2eRequestLatencySeconds, start);

        let seen = |value: f64, missing| if value.is_nan() { Err(missing) } else { Ok(value) };
        let scheduled = seen(self.scheduled, "no_events");
        sample(
            Family::VllmRequestQueueTimeSeconds,
            scheduled.and_then(|at| Ok(at - seen(self.queued, "no_events")?)),
        );
        let first = match self.view {
            View::Whole => seen(self.first_token, "start_not_seen"),
            View::Summed => Err("tokens_summed"),
            View::Rest => Err("start_not_seen"),
        };
        sample(
            Family::VllmRequestPrefillTimeSeconds,
            scheduled.and_then(|at| Ok(first? - at)),
        );
        sample(
            Family::VllmRequestInferenceTimeSeconds,
            scheduled.map(|at| self.last_token - at),
        );
        let decode = first.map(|first| self.last_token - first);
        sample(Family::VllmRequestDecodeTimeSeconds, decode);
        sample(
            Family::VllmRequestTimePerOutputTokenSeconds,
            decode.map(|decode| match self.generated {
                0 | 1 => 0.0,
                generated => decode / f64::from(generated - 1),
            }),
        );

        let whole = |value: u32| match self.view {
            View::Whole | View::Summed => Ok(f64::from(value)),
            View::Rest => Err("start_not_seen"),
        };
        // A request that was never scheduled was never preempted: its events are missing with statistics off alone.
        let has_events = !(self.queued.is_nan() && self.scheduled.is_nan());
        let preemptions = if has_events {
            whole(self.preemptions)
        } else {
            Err("no_events")
        };
        sample(Family::VllmRequestNumPreemptions, preemptions);
        sample(Family::VllmRequestGenerationTokens, whole(self.generated));
        let prompt_tokens = if part.prompt_tokens == UNKNOWN {
            Err("no_prompt_length")
        } else {
            Ok(part.prompt_tokens)
        };
        sample(Family::VllmRequestPromptTokens, prompt_tokens.map(f64::from));
        sample(
            Family::VllmRequestPrefillKvComputedTokens,
            prompt_tokens.and_then(|prompt| Ok(f64::from(prompt) - whole(self.cached_tokens)?)),
        );
        if part.max_tokens > 0 {
            sample(Family::VllmRequestParamsMaxTokens, Ok(f64::from(part.max_tokens)));
        }
    }
}

impl Run {
    fn add(&mut self, value: f64, mut flush: impl FnMut(f64, u64)) {
        if self.times > 0 && value.to_bits() != self.value.to_bits() {
            flush(self.value, self.times);
            self.times = 0;
        }
        self.value = value;
        self.times += 1;
    }
}

impl Batch {
    fn flush<S: Sink + ?Sized>(self, scope: ScopeId, is_whole: bool, context: &Context<'_>, sink: &mut S) {
        if self.latency.times > 0 {
            let Run { value, times } = self.latency;
            observe(Family::VllmInterTokenLatencySeconds, scope, value, times, sink);
        }
        let mut count = |family, extra, by: u64| {
            if by > 0 {
                sink.add(family, scope, extra, as_f64(by));
            }
        };
        let none = ExtraId::NONE;
        count(Family::VllmGenerationTokensTotal, none, self.generated);
        if self.prefilled {
            count(Family::VllmPromptTokensTotal, none, self.prompt);
            let sources = [self.computed, self.local_cached, self.external_cached];
            for (&extra, tokens) in context.labels.source.iter().zip(sources) {
                count(Family::VllmPromptTokensBySourceTotal, extra, tokens);
            }
            count(Family::VllmPromptTokensCachedTotal, none, self.cached);
        }
        count(Family::VllmNumPreemptionsTotal, none, self.preemptions);
        count(Family::VllmCorruptedRequestsTotal, none, self.corrupted);
        if is_whole {
            sink.observe(
                Family::VllmIterationTokensTotal,
                scope,
                none,
                as_f64(self.computed + self.generated),
                1,
            );
        }
    }
}

/// Engine numbers as [`Part`] holds them.
pub(super) fn engine_number(index: usize) -> u16 {
    u16::try_from(index).unwrap_or(NONE)
}
