//! Streams of audio as they are written to the client: first packet, continuity, and how speech streams end.

use super::{
    audio::{CONTINUITY_THRESHOLD_S, Continuity, DEFAULT_SAMPLE_RATE, SAMPLE_WIDTH, seconds_between},
    book::{PartState, Request},
    http::{AudioPlace, Exchange, Settling},
    labels::StreamAbort,
    sink::{ExtraId, ScopeId, Sink},
    state::{Environment, PipelineState},
};
use crate::{
    metrics::catalogue::Family,
    wire::http::note::{AudioChunk, End, Endpoint, ExchangeId},
};

/// The audio of one exchange.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stream {
    /// Where its samples go; `None`: it can't be told.
    scope: Option<ScopeId>,
    first_ns: u64,
    sample_rate: u32,
    player: Continuity,
    /// The rate changed, or the size of a chunk is not known.
    is_unclear: bool,
}

impl PipelineState {
    /// A chunk of audio of a stream was written.
    pub(super) fn stream_audio<S: Sink + ?Sized>(
        &mut self,
        id: ExchangeId,
        time_ns: u64,
        chunk: AudioChunk,
        sink: &mut S,
    ) {
        let Some(exchange) = self.exchanges.get_mut(id) else {
            return;
        };
        if let Some(stream) = &mut exchange.stream {
            stream.push(time_ns, chunk);
            return;
        }
        let (asked_ns, ask, endpoint) = (exchange.asked_ns, exchange.ask, exchange.endpoint);
        let joined = exchange.joined.clone();
        let place = self.audio_of(id);
        sink.about(joined.as_ref().map(|joined| self.subject(joined)));
        let scope = match place {
            Ok(place) => {
                let seconds = seconds_between(asked_ns, time_ns);
                sink.observe(Family::OmniAudioTtfpS, place.scope, ExtraId::NONE, seconds, 1);
                Some(place.scope)
            }
            Err(reason) => {
                sink.skip(Family::OmniAudioTtfpS, reason);
                None
            }
        };
        sink.about(None);
        // Samples without a header have the rate that the client asked for, else that of their stage.
        let asked_rate = ask.sample_rate.filter(|_| endpoint == Endpoint::Speech);
        let sample_rate = chunk
            .sample_rate
            .or(asked_rate)
            .or(place.ok().map(|place| place.sample_rate))
            .unwrap_or(DEFAULT_SAMPLE_RATE);
        let channels = u64::from(chunk.channels.unwrap_or(1));
        let mut stream = Stream {
            scope,
            first_ns: time_ns,
            sample_rate,
            player: Continuity::new(sample_rate, SAMPLE_WIDTH, channels),
            is_unclear: false,
        };
        stream.push(time_ns, chunk);
        if let Some(exchange) = self.exchanges.get_mut(id) {
            exchange.stream = Some(stream);
        }
    }

    /// The stage that gives an exchange's audio.
    fn audio_of(&mut self, id: ExchangeId) -> Result<AudioPlace, &'static str> {
        let exchange = self.exchanges.get_mut(id).ok_or("not_joined")?;
        let is_ambiguous = exchange.is_ambiguous;
        let (joined, mut place) = (exchange.joined.clone(), exchange.place);
        if let Some(joined) = &joined
            && place.is_none()
            && let Some(request) = self.book.request(joined.request)
            && request.serial == joined.serial
        {
            place = self.audio_place(request);
        }
        match place {
            Some(place) if is_ambiguous && !self.is_only_replica(place) => Err("ambiguous_join"),
            Some(place) => {
                self.exchanges.last_audio = Some(place);
                Ok(place)
            }
            // Audio that is written comes from somewhere. Where no request of this exchange tells, since it was not
            // joined or to the wrong one, only one place may be left.
            None => self
                .exchanges
                .last_audio
                .filter(|place| self.is_only_replica(*place))
                .ok_or(if joined.is_some() {
                    "no_audio_stage"
                } else {
                    "not_joined"
                }),
        }
    }

    /// Whether the stage has one replica alone, so that it does not matter whose audio it is.
    fn is_only_replica(&self, place: AudioPlace) -> bool {
        let mut replicas = self
            .engines
            .iter()
            .filter(|(_, engine)| engine.is_llm && engine.stage == place.stage)
            .filter_map(|(_, engine)| engine.scope)
            .peekable();
        replicas.peek().is_some() && replicas.all(|scope| scope == place.scope)
    }

    /// The stage that gives a request's audio, as far as it has come.
    pub(super) fn audio_place(&self, request: &Request) -> Option<AudioPlace> {
        if let Some(audio) = &request.audio
            && let Some(state) = &audio.state
            && let Some(engine) = self.engines.get(usize::from(audio.engine))
        {
            return Some(AudioPlace {
                stage: engine.stage,
                scope: engine.scope?,
                sample_rate: state.rate(),
            });
        }
        request
            .parts
            .iter()
            .filter(|part| matches!(part.state, PartState::Open | PartState::Early))
            .find_map(|part| {
                let engine = self.engines.get(usize::from(part.engine))?;
                Some(AudioPlace {
                    stage: engine.stage,
                    scope: engine.scope?,
                    sample_rate: engine.audio_rate(part.slot)?,
                })
            })
    }

    /// An exchange is over: its stream is complete, or was given up.
    pub(super) fn stream_ended<S: Sink + ?Sized>(
        &mut self,
        exchange: &Exchange,
        end: End,
        time_ns: u64,
        environment: &Environment,
        sink: &mut S,
    ) {
        sink.about(exchange.joined.as_ref().map(|joined| self.subject(joined)));
        self.stream_samples(exchange, end, time_ns, environment, sink);
        sink.about(None);
    }

    fn stream_samples<S: Sink + ?Sized>(
        &mut self,
        exchange: &Exchange,
        end: End,
        time_ns: u64,
        environment: &Environment,
        sink: &mut S,
    ) {
        if let Some(stream) = &exchange.stream {
            match end {
                End::Whole => stream.finish(environment, sink),
                End::Lost => sink.skip(Family::OmniAudioUnderrunS, "events_lost"),
                End::Failed | End::ClientLeft { .. } | End::Cut => {}
            }
        }
        if !exchange.streams_speech {
            return;
        }
        let Some(scope) = self.scope else { return };
        let reason = match end {
            End::Whole => {
                sink.add(Family::OmniSpeechStreamCompletedTotal, scope, ExtraId::NONE, 1.0);
                return;
            }
            End::Lost => {
                sink.skip(Family::OmniSpeechStreamCompletedTotal, "events_lost");
                return;
            }
            // Whether an engine died may be known a little later only.
            End::Failed | End::Cut => {
                let settle_ns = environment.limits.abort_settle_ns;
                self.exchanges.settling.push_back(Settling {
                    ended_ns: time_ns,
                    due_ns: time_ns.saturating_add(settle_ns),
                });
                return;
            }
            // The server closes a generator that waits for the client, and cancels one that waits for the engine. On
            // a WebSocket it learns of a client that left when it writes.
            End::ClientLeft { mid_chunk: true } => StreamAbort::Closed,
            End::ClientLeft { .. } if exchange.endpoint == Endpoint::Sentence => StreamAbort::Closed,
            End::ClientLeft { .. } => StreamAbort::Cancelled,
        };
        let reason = environment.labels.stream_abort(reason);
        sink.add(Family::OmniSpeechStreamAbortedTotal, scope, reason, 1.0);
    }

    /// Tells why streams failed whose time has come.
    pub(super) fn settle_streams<S: Sink + ?Sized>(
        &mut self,
        now_ns: u64,
        environment: &Environment,
        sink: &mut S,
    ) {
        let settle_ns = environment.limits.abort_settle_ns;
        while let Some(settling) = self
            .exchanges
            .settling
            .pop_front_if(|settling| settling.due_ns <= now_ns)
        {
            let died = self.exchanges.engine_died_ns.is_some_and(|died_ns| {
                (settling.ended_ns.saturating_sub(settle_ns)..=settling.due_ns).contains(&died_ns)
            });
            let reason = if died {
                StreamAbort::EngineDead
            } else {
                StreamAbort::Error
            };
            if let Some(scope) = self.scope {
                let reason = environment.labels.stream_abort(reason);
                sink.add(Family::OmniSpeechStreamAbortedTotal, scope, reason, 1.0);
            }
        }
    }
}

impl Stream {
    fn push(&mut self, time_ns: u64, chunk: AudioChunk) {
        self.is_unclear |= chunk.bytes == 0 || chunk.sample_rate.is_some_and(|rate| rate != self.sample_rate);
        self.player
            .push(seconds_between(self.first_ns, time_ns), chunk.bytes);
    }

    /// The samples of a stream that came to its end.
    fn finish<S: Sink + ?Sized>(&self, environment: &Environment, sink: &mut S) {
        let Some(scope) = self.scope else { return };
        if self.is_unclear {
            sink.skip(Family::OmniAudioUnderrunS, "chunks_not_clear");
            return;
        }
        let underrun_s = self.player.max_underrun_s();
        sink.observe(Family::OmniAudioUnderrunS, scope, ExtraId::NONE, underrun_s, 1);
        if self.player.is_continuous(CONTINUITY_THRESHOLD_S) {
            let threshold = environment.labels.threshold;
            sink.add(Family::OmniAudioContinuityOkTotal, scope, threshold, 1.0);
        }
    }
}
