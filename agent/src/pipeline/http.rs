//! Exchanges of the API processes over HTTP, and the requests of the pipeline that they led to.
//!
//! A request to the engines carries the id that its answer will name, a chat's at least. Speech names none, so an
//! exchange and a request are joined when the request is given to its first stage: by the id that the client asked
//! for, else by the arrival time in the request, which the API process takes right after it has read the exchange's
//! head. Where two exchanges fit alike they are joined in their order, and are known to be ambiguous.

use std::{collections::VecDeque, sync::Arc};

use rustc_hash::FxHashMap;

use super::{
    labels::Failure,
    sink::{ScopeId, Sink, Subject},
    state::{Environment, PipelineState},
    streams::Stream,
};
use crate::{
    host::identity::Flavor,
    metrics::catalogue::Family,
    wire::{
        http::{
            connections::News,
            note::{Ask, End, Endpoint, ExchangeId, ImageAnswer, Note},
        },
        message::{Add, FinishReason},
    },
};

/// How much later than its exchange's head a request may have arrived: the API process's event loop may be busy.
const MAX_ARRIVAL_LAG_NS: u64 = 5_000_000_000;

/// How much earlier it may have arrived: a sentence's start is written after its arrival was taken, and the wall
/// clock is adjusted all the time.
const MAX_ARRIVAL_LEAD_NS: u64 = 20_000_000;

/// Exchanges closer to each other than this can't be told apart by arrival.
const ALIKE_NS: u64 = 5_000_000;

/// What is known of a request and its answer.
#[derive(Debug)]
pub(super) struct Exchange {
    pub(super) pid: u32,
    pub(super) endpoint: Endpoint,
    /// When its head was read, or its sentence begun.
    pub(super) asked_ns: u64,
    /// The id that the client asked for.
    hint: Option<Box<str>>,
    pub(super) ask: Ask,
    pub(super) is_read: bool,
    pub(super) status: Option<u16>,
    /// Its answer is a stream of speech.
    pub(super) streams_speech: bool,
    pub(super) joined: Option<Joined>,
    /// Another exchange might be the one that led to `joined`.
    pub(super) is_ambiguous: bool,
    /// Where its audio comes from, once its request is over.
    pub(super) place: Option<AudioPlace>,
    pub(super) stream: Option<Stream>,
    pub(super) images: Option<ImageAnswer>,
    /// Kept until its request is over, too.
    ended: Option<End>,
    last_ns: u64,
}

/// The request of the pipeline that an exchange led to.
#[derive(Clone, Debug)]
pub(super) struct Joined {
    pub(super) request: u32,
    pub(super) serial: u32,
    id: Arc<str>,
}

/// The stage that gives a request's audio.
#[derive(Clone, Copy, Debug)]
pub(super) struct AudioPlace {
    pub(super) stage: Option<u32>,
    pub(super) scope: ScopeId,
    /// Samples a second.
    pub(super) sample_rate: u32,
}

/// A stream that failed: why is settled a little later.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settling {
    pub(super) ended_ns: u64,
    pub(super) due_ns: u64,
}

/// The exchanges of one pipeline.
#[derive(Debug, Default)]
pub(super) struct Exchanges {
    by_id: FxHashMap<ExchangeId, Exchange>,
    /// Those that wait for their request, in their order.
    unjoined: Vec<ExchangeId>,
    pub(super) settling: VecDeque<Settling>,
    /// When an engine died last.
    pub(super) engine_died_ns: Option<u64>,
    pub(super) ambiguous_joins: u64,
    /// Where written audio came from last.
    pub(super) last_audio: Option<AudioPlace>,
    /// Scopes of stages that run inside the API process.
    pub(super) inline_scopes: FxHashMap<u32, ScopeId>,
}

/// Whether a request's client is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Client {
    Here,
    Left,
    Unknown,
}

impl Exchanges {
    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(super) fn get_mut(&mut self, id: ExchangeId) -> Option<&mut Exchange> {
        self.by_id.get_mut(&id)
    }

    /// Exchanges that were read, have no answer, and have not led to a request.
    pub(super) fn waiting(&self) -> impl Iterator<Item = &Exchange> {
        self.unjoined
            .iter()
            .filter_map(|id| self.by_id.get(id))
            .filter(|exchange| exchange.is_read && exchange.status.is_none())
    }

    /// Whether the client of a request is there.
    fn client(&self, id: ExchangeId) -> Client {
        match self.by_id.get(&id) {
            Some(exchange) if exchange.is_ambiguous => Client::Unknown,
            Some(Exchange {
                ended: Some(End::ClientLeft { .. }),
                ..
            }) => Client::Left,
            Some(Exchange {
                ended: None | Some(End::Whole | End::Failed),
                ..
            }) => Client::Here,
            Some(_) | None => Client::Unknown,
        }
    }

    /// The exchange that a request came by. `arrival_ns`: its arrival, where the request tells it.
    fn join(&mut self, pid: u32, id: &str, arrival_ns: Option<u64>) -> Option<ExchangeId> {
        let mut fitting: Vec<(u64, ExchangeId)> = Vec::new();
        for &place in &self.unjoined {
            let Some(exchange) = self.by_id.get(&place).filter(|exchange| exchange.pid == pid) else {
                continue;
            };
            let Some(name) = exchange
                .endpoint
                .id_prefix()
                .and_then(|prefix| id.strip_prefix(prefix))
            else {
                continue;
            };
            // Speech does not heed the client's wish.
            let is_heeded = matches!(exchange.endpoint, Endpoint::Chat | Endpoint::Completions);
            if let Some(hint) = exchange.hint.as_deref().filter(|_| is_heeded) {
                if name.strip_prefix(hint).is_some_and(|rest| rest.starts_with('-')) {
                    fitting = vec![(exchange.asked_ns, place)];
                    break;
                }
                continue;
            }
            let is_in_time = arrival_ns.is_none_or(|arrival_ns| {
                arrival_ns.saturating_sub(exchange.asked_ns) <= MAX_ARRIVAL_LAG_NS
                    && exchange.asked_ns.saturating_sub(arrival_ns) <= MAX_ARRIVAL_LEAD_NS
            });
            if is_in_time {
                fitting.push((exchange.asked_ns, place));
            }
        }
        if arrival_ns.is_some() {
            let last_ns = fitting.iter().map(|(asked_ns, _)| *asked_ns).max()?;
            fitting.retain(|(asked_ns, _)| last_ns - asked_ns < ALIKE_NS);
        }
        if fitting.len() > 1 {
            self.ambiguous_joins += 1;
            for (_, place) in &fitting {
                if let Some(exchange) = self.by_id.get_mut(place) {
                    exchange.is_ambiguous = true;
                }
            }
        }
        let &(_, first) = fitting.iter().min()?;
        self.unjoined.retain(|place| *place != first);
        Some(first)
    }

    /// The answer names the request: that settles a join that was a guess.
    fn named(&mut self, id: ExchangeId, name: &str) {
        let is_of = |exchange: &Exchange| {
            exchange.joined.as_ref().is_some_and(|joined| {
                joined
                    .id
                    .strip_prefix(name)
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
            })
        };
        let Some(exchange) = self.by_id.get(&id).filter(|exchange| exchange.is_ambiguous) else {
            return;
        };
        if !is_of(exchange) {
            let right = self.by_id.iter().find(|(_, other)| is_of(other));
            let Some(right) = right.map(|(right, _)| *right) else {
                return;
            };
            let [Some(ours), Some(theirs)] = self.by_id.get_disjoint_mut([&id, &right]) else {
                return;
            };
            std::mem::swap(&mut ours.joined, &mut theirs.joined);
            std::mem::swap(&mut ours.place, &mut theirs.place);
        }
        if let Some(exchange) = self.by_id.get_mut(&id) {
            exchange.is_ambiguous = false;
        }
    }

    /// Series get other names: places to put samples are looked up anew. Gives the scopes that are of no more use.
    pub(super) fn forget_scopes(&mut self) -> impl Iterator<Item = ScopeId> {
        self.last_audio = None;
        for exchange in self.by_id.values_mut() {
            exchange.place = None;
        }
        self.inline_scopes.drain().map(|(_, scope)| scope)
    }

    fn remove(&mut self, id: ExchangeId) -> Option<Exchange> {
        self.unjoined.retain(|place| *place != id);
        self.by_id.remove(&id)
    }
}

impl PipelineState {
    /// News of an exchange on one of the API processes' connections.
    pub(super) fn http<S: Sink + ?Sized>(&mut self, news: &News, environment: &Environment, sink: &mut S) {
        if self.pipeline.flavor != Flavor::Omni {
            return;
        }
        let id = news.exchange;
        if let Note::Asked { endpoint, request_id } = &news.note {
            self.asked(news, *endpoint, request_id.clone(), environment, sink);
            return;
        }
        let Some(exchange) = self.exchanges.by_id.get_mut(&id) else {
            return;
        };
        exchange.last_ns = news.time_ns;
        match &news.note {
            Note::Asked { .. } => {}
            Note::Read(ask) => {
                exchange.ask = *ask;
                exchange.is_read = true;
            }
            Note::Answered {
                status,
                streams_speech,
            } => {
                exchange.status = Some(*status);
                exchange.streams_speech = *streams_speech;
            }
            Note::Named(name) => self.exchanges.named(id, name),
            Note::Audio(chunk) => self.stream_audio(id, news.time_ns, *chunk, sink),
            Note::Images(images) => exchange.images = Some(images.clone()),
            Note::Ended(end) => self.exchange_ended(id, *end, news.time_ns, environment, sink),
        }
    }

    fn asked<S: Sink + ?Sized>(
        &mut self,
        news: &News,
        endpoint: Endpoint,
        hint: Option<Box<str>>,
        environment: &Environment,
        sink: &mut S,
    ) {
        if self.exchanges.len() >= environment.limits.max_requests {
            sink.skip(Family::OmniSpeechStreamCompletedTotal, "too_many_open");
            return;
        }
        let exchange = Exchange {
            pid: news.pid,
            endpoint,
            asked_ns: news.time_ns,
            hint,
            ask: Ask::default(),
            is_read: false,
            status: None,
            streams_speech: false,
            joined: None,
            is_ambiguous: false,
            place: None,
            stream: None,
            images: None,
            ended: None,
            last_ns: news.time_ns,
        };
        self.exchanges.by_id.insert(news.exchange, exchange);
        self.exchanges.unjoined.push(news.exchange);
    }

    /// A request was given to its first stage by the API process `pid`: joins it to its exchange.
    pub(super) fn join_exchange(&mut self, pid: u32, add: &Add<'_>, environment: &Environment) {
        let Some(index) = self.book.find(add.request_id) else {
            return;
        };
        let Some(request) = self.book.request(index) else {
            return;
        };
        if request.companion || request.exchange.is_some() {
            return;
        }
        let arrival_ns = request
            .arrival_ns()
            .filter(|_| add.arrival.is_some() && environment.wall_offset_ns.is_some());
        let Some(id) = self.exchanges.join(pid, add.request_id, arrival_ns) else {
            return;
        };
        let joined = Joined {
            request: index,
            serial: request.serial,
            id: Arc::clone(&request.id),
        };
        if let Some(exchange) = self.exchanges.get_mut(id) {
            exchange.joined = Some(joined);
        }
        if let Some(request) = self.book.request_mut(index) {
            request.exchange = Some(id);
        }
    }

    /// Whether a request that was aborted had lost its client, by its exchange.
    pub(super) fn client_of(&self, exchange: Option<ExchangeId>) -> Client {
        exchange.map_or(Client::Unknown, |id| self.exchanges.client(id))
    }

    /// What samples of an exchange's request are about.
    pub(super) fn subject<'a>(&self, joined: &'a Joined) -> Subject<'a> {
        Subject {
            pipeline: self.pipeline.id,
            request: &joined.id,
            serial: joined.serial,
        }
    }

    /// A request is over: what its exchange needs of it is kept there.
    pub(super) fn request_over(&mut self, exchange: ExchangeId, place: Option<AudioPlace>) {
        let Some(known) = self.exchanges.get_mut(exchange) else {
            return;
        };
        if known.ended.is_some() {
            self.exchanges.remove(exchange);
        } else {
            known.place = place;
        }
    }

    fn exchange_ended<S: Sink + ?Sized>(
        &mut self,
        id: ExchangeId,
        end: End,
        time_ns: u64,
        environment: &Environment,
        sink: &mut S,
    ) {
        self.exchanges.unjoined.retain(|place| *place != id);
        let Some(mut exchange) = self.exchanges.by_id.remove(&id) else {
            return;
        };
        self.stream_ended(&exchange, end, time_ns, environment, sink);
        if exchange.endpoint.gives_images() {
            self.images_ended(&exchange, end, environment, sink);
        }
        let is_open = exchange.joined.as_ref().is_some_and(|joined| {
            self.book
                .request(joined.request)
                .is_some_and(|request| request.serial == joined.serial && request.exchange == Some(id))
        });
        if is_open {
            exchange.ended = Some(end);
            exchange.stream = None;
            self.exchanges.by_id.insert(id, exchange);
        }
    }

    /// An API process ended: nothing more is heard of its exchanges.
    pub(super) fn forget_exchanges(&mut self, pid: u32) {
        let Exchanges { by_id, unjoined, .. } = &mut self.exchanges;
        by_id.retain(|_, exchange| exchange.pid != pid);
        unjoined.retain(|id| by_id.contains_key(id));
    }

    /// Time has passed: reasons of failed streams are settled, exchanges that nothing is heard of given up.
    pub(super) fn tick_exchanges<S: Sink + ?Sized>(
        &mut self,
        now_ns: u64,
        environment: &Environment,
        sink: &mut S,
    ) {
        self.settle_streams(now_ns, environment, sink);
        let timeout_ns = environment.limits.idle_timeout_ns;
        let Exchanges { by_id, unjoined, .. } = &mut self.exchanges;
        by_id.retain(|_, exchange| {
            let is_idle = now_ns.saturating_sub(exchange.last_ns) > timeout_ns;
            if is_idle && exchange.ended.is_none() {
                sink.skip(Family::OmniSpeechStreamCompletedTotal, "timed_out");
            }
            !is_idle
        });
        unjoined.retain(|id| by_id.contains_key(id));
    }

    /// A request that no stage process was given failed.
    pub(super) fn fail_inline<S: Sink + ?Sized>(
        &mut self,
        reason: Failure,
        environment: &Environment,
        sink: &mut S,
    ) {
        let Some(scope) = self.scope else { return };
        let labels = &environment.labels;
        sink.add(
            Family::OmniRequestsSuccessTotal,
            scope,
            labels.finish(FinishReason::Abort),
            1.0,
        );
        sink.add(
            Family::OmniRequestsFailedTotal,
            scope,
            labels.failure(reason),
            1.0,
        );
    }
}
