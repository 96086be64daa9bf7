//! The requests of one pipeline and the stages that were given them.
//!
//! ADD frames do not name their stage. They go out on one socket per replica, so a socket is tied to the engine that
//! answers on it as soon as one request leaves no choice; until then stages are matched in the order of the ADDs.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
    hash::BuildHasher,
    sync::Arc,
};

use rustc_hash::{FxBuildHasher, FxHashMap};
use slab::Slab;

use super::{
    audio::AudioState,
    diffusion::DiffusionShare,
    forwards::{Forwarded, Payload},
    records::{Draft, Figures},
};
use crate::{
    metrics::merge::{Known, Mark},
    wire::{
        diffusion::DiffusionAdd,
        http::note::ExchangeId,
        message::{Add, FinishReason, OutputKind},
    },
};

/// "No lane", "no engine".
pub(super) const NONE: u16 = u16::MAX;

/// A token count that is not known.
pub(super) const UNKNOWN: u32 = u32::MAX;

/// Completed requests whose ids are remembered: a second or more of the heaviest load.
const MAX_RECENT: usize = 4096;

/// Marks a lane that is free; never a process that sends.
const NO_PID: u32 = 0;

/// Sockets of API processes that are told apart; a pipeline has one for each replica.
const MAX_LANES: usize = 512;

/// Suffix of the requests that guide another one (classifier-free guidance): no requests of their own.
const COMPANION_MARK: &str = "__";
const COMPANION_PREFIX: &str = "__cfg_";

/// How far an arrival time may lie before its ADD. Beyond that the wall clock was stepped, not the request late.
const MAX_ARRIVAL_LEAD_NS: u64 = 3_600_000_000_000;

/// Where a request stands at one stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PartState {
    /// Given to a stage that has not answered yet.
    Pending,
    /// The engine has answered.
    Open,
    /// Finished there, but its ADD has not been read yet.
    Early,
    /// Done.
    Finished,
}

/// A request that is fed in segments.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Session {
    /// More segments follow.
    pub(super) resumable: bool,
    /// The engine has finished the last segment and waits.
    pub(super) waiting: bool,
    /// Segments sent but not begun.
    queued: u32,
    queued_arrival_ns: u64,
    queued_resumable: bool,
}

/// One stage's share of a request.
#[derive(Debug)]
pub(super) struct Part {
    /// When ADD was sent; 0: not seen.
    pub(super) added_ns: u64,
    /// Arrival time of ADD, or the time of ADD; 0: not seen.
    pub(super) arrival_ns: u64,
    pub(super) prompt_tokens: u32,
    /// 0: none.
    pub(super) max_tokens: u32,
    /// Slot of the stage state in its engine, while `Open` or `Early`.
    pub(super) slot: u32,
    lane: u16,
    pub(super) engine: u16,
    pub(super) state: PartState,
    pub(super) output_kind: OutputKind,
    pub(super) has_stop_strings: bool,
    /// The first output of the request at this stage was seen.
    pub(super) from_first: bool,
    pub(super) session: Option<Box<Session>>,
    /// What its ADD carries of the stage before, until the stage answers.
    pub(super) payload: Option<Box<Payload>>,
    /// The share is a diffusion stage's: it stays pending until its last result.
    pub(super) diffusion: Option<Box<DiffusionShare>>,
}

impl Part {
    pub(super) fn is_added(&self) -> bool {
        self.added_ns != 0
    }

    /// An LLM stage was given it, and none has answered.
    fn is_unclaimed(&self) -> bool {
        self.state == PartState::Pending && self.diffusion.is_none()
    }

    /// A diffusion stage's share; `lane` and `time_ns` are those of its request, where that was seen.
    fn diffusion(lane: u16, time_ns: u64, steps: Option<u32>) -> Self {
        Self {
            added_ns: time_ns,
            arrival_ns: time_ns,
            // It has no prompt of tokens.
            prompt_tokens: 0,
            lane,
            state: PartState::Pending,
            diffusion: Some(Box::new(DiffusionShare {
                steps,
                first_image_ns: None,
            })),
            ..Self::unseen(NONE, false)
        }
    }

    fn added(lane: u16, add: &Add<'_>, time_ns: u64, wall_offset_ns: Option<i64>) -> Self {
        let mut part = Self::unseen(NONE, false);
        part.state = PartState::Pending;
        part.fill(lane, add, time_ns, wall_offset_ns);
        part
    }

    fn unseen(engine: u16, from_first: bool) -> Self {
        Self {
            added_ns: 0,
            arrival_ns: 0,
            prompt_tokens: UNKNOWN,
            max_tokens: 0,
            slot: 0,
            lane: NONE,
            engine,
            state: PartState::Open,
            output_kind: OutputKind::Cumulative,
            has_stop_strings: false,
            from_first,
            session: None,
            payload: None,
            diffusion: None,
        }
    }

    fn fill(&mut self, lane: u16, add: &Add<'_>, time_ns: u64, wall_offset_ns: Option<i64>) {
        self.lane = lane;
        self.added_ns = time_ns.max(1);
        self.arrival_ns = arrival_ns(add.arrival, time_ns, wall_offset_ns);
        self.prompt_tokens = add.prompt_tokens.unwrap_or(self.prompt_tokens);
        self.max_tokens = add.max_tokens.unwrap_or(0);
        self.output_kind = add.output_kind;
        self.has_stop_strings = add.has_stop_strings;
        if add.resumable {
            self.session = Some(Box::new(Session {
                resumable: true,
                ..Session::default()
            }));
        }
    }

    /// Takes the next queued segment. `false`: there is none, the engine waits for one.
    pub(super) fn next_segment(&mut self) -> bool {
        let Some(session) = self.session.as_mut() else {
            return false;
        };
        if session.queued == 0 {
            session.waiting = true;
            return false;
        }
        session.queued = 0;
        session.resumable = session.queued_resumable;
        self.arrival_ns = session.queued_arrival_ns;
        true
    }
}

/// Monotonic time of arrival: `arrival` is wall clock, in seconds. The time of ADD where it is absent or absurd.
pub(super) fn arrival_ns(arrival: Option<f64>, added_ns: u64, wall_offset_ns: Option<i64>) -> u64 {
    let added_ns = added_ns.max(1);
    let (Some(arrival), Some(offset)) = (arrival, wall_offset_ns) else {
        return added_ns;
    };
    let wall_ns = arrival * 1e9;
    if !(wall_ns > 0.0 && wall_ns < 9e18) {
        return added_ns;
    }
    #[expect(
        clippy::cast_possible_truncation,
        reason = "checked to lie within i64 just above"
    )]
    let arrival_ns = (wall_ns as i64).saturating_sub(offset);
    u64::try_from(arrival_ns)
        .ok()
        .map(|ns| ns.max(1))
        .filter(|&ns| ns <= added_ns && added_ns - ns <= MAX_ARRIVAL_LEAD_NS)
        .unwrap_or(added_ns)
}

/// Audio of a finished stage, until its request is complete.
#[derive(Debug)]
pub(super) struct FinishedAudio {
    pub(super) part: u8,
    pub(super) engine: u16,
    /// `None`: an audio stage that gave none.
    pub(super) state: Option<Box<AudioState>>,
    /// ADD to finish, where ADD was seen.
    pub(super) gen_time_s: Option<f64>,
    pub(super) stage: u32,
}

/// A request of the pipeline, from its first sign of life to its completion.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) id: Arc<str>,
    /// Tells a reused slot from this request.
    pub(super) serial: u32,
    pub(super) parts: Vec<Part>,
    pub(super) finished: u8,
    pub(super) phase: Phase,
    /// Guides another request.
    pub(super) companion: bool,
    /// Generated tokens of the finished stages.
    pub(super) generated: u64,
    /// Prompt tokens of stage 0.
    pub(super) prompt_tokens: u32,
    /// Arrival by its first ADD; 0: not seen.
    start_ns: u64,
    /// That ADD was the one for the pipeline's first stage.
    pub(super) from_first_stage: bool,
    /// When the latest stage finished.
    pub(super) finish_ns: u64,
    /// The highest stage that finished, and why it did.
    pub(super) last_stage: u32,
    pub(super) reason: FinishReason,
    pub(super) audio: Option<Box<FinishedAudio>>,
    /// Its number among the requests that are over; 0: it is not.
    ended: u32,
    /// The exchange over HTTP that it came by, which then has its first packet and continuity.
    pub(super) exchange: Option<ExchangeId>,
    /// What its record will say, where one is wanted.
    pub(super) draft: Option<Box<Draft>>,
}

impl Request {
    /// A stage still has work to do for it.
    pub(super) fn is_active(&self) -> bool {
        self.phase == Phase::Live && usize::from(self.finished) < self.parts.len()
    }

    /// What a further ADD carries to the next stage: the output of the stage before, once all stages that have been
    /// given the request are done with it. A stage that is given it before waits for its input elsewhere.
    fn payload(&self, size: u64) -> Option<Box<Payload>> {
        let before = self.parts.last()?;
        (usize::from(self.finished) == self.parts.len()).then(|| {
            Box::new(Payload {
                from: before.engine,
                from_added_ns: before.added_ns,
                output_ns: self.finish_ns,
                size,
            })
        })
    }

    /// When it arrived, by its first ADD.
    pub(super) fn arrival_ns(&self) -> Option<u64> {
        (self.start_ns != 0).then_some(self.start_ns)
    }

    /// When the pipeline was given it; `None`: before the agent looked.
    pub(super) fn start_ns(&self) -> Option<u64> {
        (self.from_first_stage && self.start_ns != 0).then_some(self.start_ns)
    }
}

/// How far a request has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Live,
    /// Ended by an abort whose cause is about to be settled.
    Aborting(Aborting),
    /// Counted already; stays a while so that its last outputs are known as such.
    Closed,
}

/// What is known of an abort.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Aborting {
    /// The API process asked for it.
    pub(super) by_client: bool,
    /// One of its engines died meanwhile.
    pub(super) engine_died: bool,
}

/// What is to be done about a request at a later time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Task {
    /// Complete it unless a further stage was given it.
    Complete,
    /// Finish its stages whose ADD never came.
    FinishEarly,
    /// Decide why it was aborted.
    SettleAbort,
    /// Forget it.
    Forget,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Due {
    pub(super) time_ns: u64,
    pub(super) task: Task,
    pub(super) request: u32,
    pub(super) serial: u32,
}

/// A socket of an API process: leads to one replica (vLLM-Omni) or to all engines (plain vLLM).
#[derive(Clone, Copy, Debug)]
struct Lane {
    pid: u32,
    socket: u64,
    engine: u16,
    /// The last ADD that carries a payload: when it was sent, and whose share it is.
    carried: Option<(u64, u32, u8)>,
    /// It leads to a diffusion stage.
    is_diffusion: bool,
}

/// Parallel samples of one prompt (`n` > 1): plain vLLM sends each as a request `{index}_{parent id}`.
#[derive(Clone, Copy, Debug, Default)]
struct Siblings {
    n: u32,
    open: u32,
    longest: u64,
}

/// A stage finished with a request: the pipeline has yet to hear of it.
#[derive(Debug)]
pub(super) struct Finished {
    pub(super) request: u32,
    pub(super) part: u8,
    pub(super) stage: u32,
    pub(super) reason: FinishReason,
    pub(super) time_ns: u64,
    pub(super) generated: u64,
    pub(super) audio: StageAudio,
    pub(super) figures: Figures,
}

/// What a stage gave of a request's audio.
#[derive(Debug)]
pub(super) enum StageAudio {
    /// It is not known to be an audio stage.
    NoAudioStage,
    /// It is one, and gave nothing.
    Silent,
    Some(Box<AudioState>),
}

/// What an ADD was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Added {
    /// A new share of a request, or of a new request.
    New,
    /// The ADD of a share whose first output was read before it.
    Late { request: u32, part: u8 },
    /// A further segment of a share; `begins`: the engine was waiting for it.
    Segment { request: u32, part: u8, begins: bool },
    /// Not taken: the request is over, or too many are open.
    Refused(&'static str),
}

/// A request that was completed.
#[derive(Clone, Copy, Debug)]
struct Recent {
    /// Hash of its id.
    id: u64,
    serial: u32,
    ended: u32,
}

/// The requests of one pipeline.
#[derive(Debug, Default)]
pub(super) struct Book {
    by_id: FxHashMap<Arc<str>, u32>,
    pub(super) requests: Slab<Request>,
    lanes: Vec<Lane>,
    siblings: FxHashMap<Box<str>, Siblings>,
    /// LLM stages of the pipeline.
    pub(super) llm_stages: usize,
    /// Shares that no engine has answered for.
    pub(super) unclaimed: usize,
    pub(super) due: BinaryHeap<Reverse<Due>>,
    /// Stage finishes of the frame at hand.
    pub(super) finished: Vec<Finished>,
    /// Payloads that arrived with the frame at hand.
    pub(super) forwarded: Vec<Forwarded>,
    /// The requests that were completed last.
    recent: VecDeque<Recent>,
    serial: u32,
    ended: u32,
}

impl Book {
    pub(super) fn find(&self, id: &str) -> Option<u32> {
        self.by_id.get(id).copied()
    }

    pub(super) fn request(&self, index: u32) -> Option<&Request> {
        self.requests.get(index as usize)
    }

    pub(super) fn request_mut(&mut self, index: u32) -> Option<&mut Request> {
        self.requests.get_mut(index as usize)
    }

    pub(super) fn part_mut(&mut self, request: u32, part: u8) -> Option<&mut Part> {
        self.request_mut(request)?.parts.get_mut(usize::from(part))
    }

    /// Enters an ADD. `shared_lanes`: all engines are reached through one socket, so there is one stage.
    #[expect(clippy::too_many_arguments, reason = "the parts of one frame")]
    pub(super) fn add(
        &mut self,
        pid: u32,
        socket: u64,
        add: &Add<'_>,
        time_ns: u64,
        wall_offset_ns: Option<i64>,
        shared_lanes: bool,
        max_requests: usize,
    ) -> Added {
        let lane = self.lane(pid, socket);
        let Some(index) = self.find(add.request_id) else {
            if self.requests.len() >= max_requests {
                return Added::Refused("too_many_open");
            }
            self.insert(add.request_id, Part::added(lane, add, time_ns, wall_offset_ns));
            self.unclaimed += 1;
            if shared_lanes && let Some(parent) = parent_of(add.request_id) {
                self.join_siblings(parent, max_requests);
            }
            return Added::New;
        };
        let lane_engine = self.lanes.get(usize::from(lane)).map_or(NONE, |lane| lane.engine);
        let Some(request) = self.requests.get_mut(index as usize) else {
            return Added::Refused("unknown_request");
        };
        if request.phase != Phase::Live {
            return Added::Refused("request_over");
        }
        let known = request
            .parts
            .iter()
            .position(|part| part.is_added() && (shared_lanes || (part.lane == lane && lane != NONE)));
        if let Some(known) = known {
            let part = small(known);
            let begins = self.segment(index, part, add, time_ns, wall_offset_ns);
            return Added::Segment {
                request: index,
                part,
                begins,
            };
        }
        let early = request.parts.iter().position(|part| {
            !part.is_added()
                && part.from_first
                && (lane_engine == NONE || lane_engine == part.engine || shared_lanes)
        });
        if let Some(early) = early
            && let Some(part) = request.parts.get_mut(early)
        {
            part.fill(lane, add, time_ns, wall_offset_ns);
            let (engine, arrival_ns) = (part.engine, part.arrival_ns);
            if request.start_ns == 0 {
                request.start_ns = arrival_ns;
            }
            if !shared_lanes {
                self.bind(lane, engine);
            }
            return Added::Late {
                request: index,
                part: small(early),
            };
        }
        if request.parts.len() >= usize::from(u8::MAX) {
            return Added::Refused("too_many_stages");
        }
        request.parts.reserve_exact(1);
        let mut part = Part::added(lane, add, time_ns, wall_offset_ns);
        if !shared_lanes {
            part.payload = request.payload(add.size);
        }
        let carries = part.payload.is_some();
        request.parts.push(part);
        self.unclaimed += 1;
        if carries && let Some(lane) = self.lanes.get_mut(usize::from(lane)) {
            lane.carried = Some((time_ns, index, small(request.parts.len() - 1)));
        }
        Added::New
    }

    /// A tensor or array followed the message that was sent at `message_ns` on this socket.
    pub(super) fn aux(&mut self, pid: u32, socket: u64, message_ns: u64, size: u64) {
        let lane = self
            .lanes
            .iter()
            .find(|lane| lane.pid == pid && lane.socket == socket);
        if let Some((time_ns, request, part)) = lane.and_then(|lane| lane.carried)
            && time_ns == message_ns
            && let Some(part) = self.part_mut(request, part)
            && let Some(payload) = &mut part.payload
        {
            payload.size = payload.size.saturating_add(size);
        }
    }

    /// The engine that has answered for a share has its payload. `queued`: when it took it up, in seconds of its
    /// clock, where it says so.
    pub(super) fn payload_arrived(&mut self, request: u32, part: u8, queued: Option<f64>) {
        let Some(part) = self.part_mut(request, part) else {
            return;
        };
        if let Some(payload) = part.payload.take()
            && let (to, added_ns) = (part.engine, part.added_ns)
            && let Some(id) = self.request(request).map(|request| Arc::clone(&request.id))
        {
            self.forwarded.push(Forwarded {
                request: id,
                payload: *payload,
                to,
                added_ns,
                queued,
            });
        }
    }

    fn segment(
        &mut self,
        request: u32,
        part: u8,
        add: &Add<'_>,
        time_ns: u64,
        wall_offset_ns: Option<i64>,
    ) -> bool {
        let Some(part) = self.part_mut(request, part) else {
            return false;
        };
        let arrival_ns = arrival_ns(add.arrival, time_ns, wall_offset_ns);
        let Some(session) = part.session.as_mut() else {
            return false;
        };
        if !add.resumable {
            // The end of the input: it carries no tokens of its own.
            if session.queued > 0 {
                session.queued_resumable = false;
            } else {
                session.resumable = false;
            }
            return false;
        }
        let tokens = add.prompt_tokens.unwrap_or(0);
        if part.prompt_tokens != UNKNOWN {
            part.prompt_tokens = part.prompt_tokens.saturating_add(tokens);
        }
        if session.waiting {
            session.waiting = false;
            part.arrival_ns = arrival_ns;
            return true;
        }
        session.queued = session.queued.saturating_add(1);
        session.queued_arrival_ns = arrival_ns;
        session.queued_resumable = true;
        false
    }

    /// Which share `engine` answers for with its first output of a request. `rank` is the place of its stage among
    /// the LLM stages. `None`: the output belongs to a stage that has finished already.
    pub(super) fn claim(
        &mut self,
        index: u32,
        engine: u16,
        rank: usize,
        is_first_stage: bool,
        is_first: bool,
        shared_lanes: bool,
    ) -> Option<u8> {
        let request = self.requests.get(index as usize)?;
        let done = |part: &Part| {
            part.engine == engine && matches!(part.state, PartState::Finished | PartState::Early)
        };
        if request.phase != Phase::Live || request.parts.iter().any(done) {
            return None;
        }
        let (choice, bind) = self.choose(request, engine, rank, is_first, shared_lanes);
        let request = self.requests.get_mut(index as usize)?;
        if let Some(choice) = choice
            && let Some(part) = request.parts.get_mut(choice)
        {
            part.state = PartState::Open;
            part.engine = engine;
            part.from_first = true;
            let (lane, is_added) = (part.lane, part.is_added());
            // The first audio of a streamed response may come before this stage finishes.
            request.from_first_stage |= is_first_stage && is_added;
            self.unclaimed = self.unclaimed.saturating_sub(1);
            if bind {
                self.bind(lane, engine);
            }
            return Some(small(choice));
        }
        if request.parts.len() >= usize::from(u8::MAX) {
            return None;
        }
        request.parts.reserve_exact(1);
        request.parts.push(Part::unseen(engine, is_first));
        Some(small(request.parts.len() - 1))
    }

    fn choose(
        &self,
        request: &Request,
        engine: u16,
        rank: usize,
        is_first: bool,
        shared_lanes: bool,
    ) -> (Option<usize>, bool) {
        let lane_of = |part: &Part| self.lanes.get(usize::from(part.lane));
        let pending = |part: &Part| part.state == PartState::Pending;
        if shared_lanes {
            return (request.parts.iter().position(pending), false);
        }
        let bound =
            |part: &Part| part.is_unclaimed() && lane_of(part).is_some_and(|lane| lane.engine == engine);
        if let Some(bound) = request.parts.iter().position(bound) {
            return (Some(bound), false);
        }
        let free = |part: &Part| {
            part.is_unclaimed()
                && lane_of(part).is_none_or(|lane| {
                    lane.engine == NONE
                        && !self
                            .lanes
                            .iter()
                            .any(|other| other.pid == lane.pid && other.engine == engine)
                })
        };
        let mut candidates = request
            .parts
            .iter()
            .enumerate()
            .filter(|(_, part)| free(part))
            .map(|(place, _)| place);
        let Some(first) = candidates.next() else {
            return (None, false);
        };
        let last = candidates.next_back();
        // ADDs go out in the order of the stages, so with all of them seen the order tells which is which.
        let llm = || {
            let parts = request.parts.iter().enumerate();
            parts.filter(|(_, part)| part.diffusion.is_none())
        };
        let all_given = llm().count() == self.llm_stages && llm().all(|(_, part)| part.is_added());
        if let Some((place, part)) = llm().nth(rank)
            && free(part)
        {
            return (Some(place), all_given || (last.is_none() && is_first));
        }
        match last {
            None => (Some(first), is_first),
            Some(last) => (Some(last), false),
        }
    }

    /// Enters a request to a diffusion stage.
    pub(super) fn add_diffusion(
        &mut self,
        pid: u32,
        socket: u64,
        add: &DiffusionAdd<'_>,
        time_ns: u64,
        max_requests: usize,
    ) -> Result<(), &'static str> {
        let place = self.lane(pid, socket);
        if let Some(lane) = self.lanes.get_mut(usize::from(place)) {
            lane.is_diffusion = true;
        }
        let mut part = Part::diffusion(place, time_ns.max(1), add.steps);
        let Some(index) = self.find(add.request_id) else {
            // What was counted as complete without this stage must not count again.
            if self.is_recent(add.request_id) {
                return Err("request_over");
            }
            if self.requests.len() >= max_requests {
                return Err("too_many_open");
            }
            self.insert(add.request_id, part);
            return Ok(());
        };
        let request = self.request_mut(index).ok_or("unknown_request")?;
        if request.phase != Phase::Live {
            return Err("request_over");
        }
        let is_update =
            |part: &Part| part.diffusion.is_some() && part.is_added() && part.lane == place && place != NONE;
        if request.parts.iter().any(is_update) {
            return Ok(());
        }
        if request.parts.len() >= usize::from(u8::MAX) {
            return Err("too_many_stages");
        }
        request.parts.reserve_exact(1);
        part.payload = request.payload(add.size);
        request.parts.push(part);
        Ok(())
    }

    /// Which share a diffusion stage answers for. `None`: it has finished that already.
    pub(super) fn claim_diffusion(&mut self, index: u32, engine: u16) -> Option<u8> {
        let request = self.requests.get_mut(index as usize)?;
        if request.phase != Phase::Live {
            return None;
        }
        let lanes = &self.lanes;
        let fit = |part: &Part| {
            let behind = lanes.get(usize::from(part.lane)).map_or(NONE, |lane| lane.engine);
            match part.engine {
                _ if part.diffusion.is_none() => None,
                // Also one that has finished: this is said again.
                at if at == engine => Some(0),
                NONE if behind == engine => Some(1),
                NONE if behind == NONE => Some(2),
                NONE => Some(3),
                _ => None,
            }
        };
        let best = request
            .parts
            .iter()
            .enumerate()
            .filter_map(|(place, part)| fit(part).map(|fit| (fit, place)))
            .min();
        let place = match best {
            Some((_, place)) => place,
            None if request.parts.len() < usize::from(u8::MAX) => {
                request.parts.reserve_exact(1);
                request.parts.push(Part::diffusion(NONE, 0, None));
                request.parts.len() - 1
            }
            None => return None,
        };
        let part = request.parts.get_mut(place)?;
        if part.state == PartState::Finished {
            return None;
        }
        part.engine = engine;
        let lane = part.lane;
        self.bind(lane, engine);
        Some(small(place))
    }

    /// Ties the one socket to a diffusion stage that is left to the one engine that is left.
    pub(super) fn bind_last_diffusion_lane(&mut self, pid: u32, engines: &[u16]) {
        let ours = || self.lanes.iter().enumerate().filter(|(_, lane)| lane.pid == pid);
        let mut lanes = ours().filter(|(_, lane)| lane.is_diffusion && lane.engine == NONE);
        let is_free = |engine: &&u16| !ours().any(|(_, lane)| lane.engine == **engine);
        let mut free = engines.iter().filter(is_free);
        if let (Some((lane, _)), None, Some(&engine), None) =
            (lanes.next(), lanes.next(), free.next(), free.next())
        {
            self.bind(u16::try_from(lane).unwrap_or(NONE), engine);
        }
    }

    /// The API process that gave out a share.
    pub(super) fn pid_of(&self, request: u32, part: u8) -> Option<u32> {
        let part = self.request(request)?.parts.get(usize::from(part))?;
        self.lanes.get(usize::from(part.lane)).map(|lane| lane.pid)
    }

    /// Enters a request of a diffusion stage that was open before the agent looked.
    pub(super) fn discover_diffusion(&mut self, id: &str) -> u32 {
        self.insert(id, Part::diffusion(NONE, 0, None))
    }

    /// Enters a request that was open before the agent looked, or whose ADD is still to come.
    pub(super) fn discover(&mut self, id: &str, engine: u16, is_first: bool) -> u32 {
        self.insert(id, Part::unseen(engine, is_first))
    }

    fn insert(&mut self, id: &str, part: Part) -> u32 {
        let companion = id.contains(COMPANION_PREFIX)
            || id.rmatch_indices(COMPANION_MARK).any(|(place, _)| {
                id.get(..place)
                    .is_some_and(|parent| self.by_id.contains_key(parent))
            });
        self.serial = self.serial.wrapping_add(1);
        let id: Arc<str> = id.into();
        let start_ns = part.arrival_ns;
        let index = self.requests.insert(Request {
            id: Arc::clone(&id),
            serial: self.serial,
            parts: vec![part],
            finished: 0,
            phase: Phase::Live,
            companion,
            generated: 0,
            prompt_tokens: UNKNOWN,
            start_ns,
            from_first_stage: false,
            finish_ns: 0,
            last_stage: 0,
            reason: FinishReason::Stop,
            audio: None,
            ended: 0,
            exchange: None,
            draft: None,
        });
        // Bounded by the caller far below 2^32.
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        self.by_id.insert(id, index);
        index
    }

    /// Forgets a request. Its stage states must be gone.
    pub(super) fn remove(&mut self, index: u32) -> Option<Request> {
        let request = self.requests.try_remove(index as usize)?;
        self.by_id.remove(&request.id);
        self.unclaimed = self
            .unclaimed
            .saturating_sub(request.parts.iter().filter(|part| part.is_unclaimed()).count());
        Some(request)
    }

    /// Takes out a request that is complete, and remembers its id for a while: what comes again counts no more.
    pub(super) fn complete(&mut self, index: u32) -> Option<Request> {
        let request = self.remove(index)?;
        if self.recent.len() >= MAX_RECENT {
            self.recent.pop_front();
        }
        self.ended = self.ended.wrapping_add(1);
        self.recent.push_back(Recent {
            id: hash(&request.id),
            serial: request.serial,
            ended: self.ended,
        });
        Some(request)
    }

    /// Whether `id` was completed lately.
    pub(super) fn is_recent(&self, id: &str) -> bool {
        self.recently(id).is_some()
    }

    fn recently(&self, id: &str) -> Option<&Recent> {
        let hash = hash(id);
        self.recent.iter().rev().find(|recent| recent.id == hash)
    }

    /// How far the book has come.
    pub(super) fn mark(&self) -> Mark {
        Mark {
            serial: self.serial,
            ended: self.ended,
        }
    }

    /// A request that is under way, or was until lately.
    pub(super) fn known(&self, id: &str) -> Option<Known> {
        let open = self.find(id).and_then(|index| self.request(index));
        let (serial, ended) = match open {
            Some(request) => (request.serial, request.ended),
            None => self.recently(id).map(|recent| (recent.serial, recent.ended))?,
        };
        let ended = (ended != 0).then_some(ended);
        Some(Known { serial, ended })
    }

    /// Keeps a request that is over until `time_ns`, so that its last outputs are known as such. Gives back its shares.
    pub(super) fn close(&mut self, index: u32, time_ns: u64) -> Vec<Part> {
        let Some(request) = self.requests.get_mut(index as usize) else {
            return Vec::new();
        };
        request.phase = Phase::Closed;
        request.audio = None;
        self.ended = self.ended.wrapping_add(1);
        request.ended = self.ended;
        let parts = std::mem::take(&mut request.parts);
        let serial = request.serial;
        let unclaimed = parts.iter().filter(|part| part.is_unclaimed()).count();
        self.unclaimed = self.unclaimed.saturating_sub(unclaimed);
        self.schedule(index, serial, Task::Forget, time_ns);
        parts
    }

    pub(super) fn schedule(&mut self, request: u32, serial: u32, task: Task, time_ns: u64) {
        self.due.push(Reverse(Due {
            time_ns,
            task,
            request,
            serial,
        }));
    }

    /// The next task that is due at `now_ns` and whose request still lives.
    pub(super) fn next_due(&mut self, now_ns: u64) -> Option<Due> {
        while let Some(Reverse(due)) = self.due.peek().copied() {
            if due.time_ns > now_ns {
                return None;
            }
            self.due.pop();
            if self
                .request(due.request)
                .is_some_and(|request| request.serial == due.serial)
            {
                return Some(due);
            }
        }
        None
    }

    fn lane(&mut self, pid: u32, socket: u64) -> u16 {
        let known = self
            .lanes
            .iter()
            .position(|lane| lane.pid == pid && lane.socket == socket);
        let fresh = Lane {
            pid,
            socket,
            engine: NONE,
            carried: None,
            is_diffusion: false,
        };
        let place = if let Some(known) = known {
            known
        } else if let Some(free) = self.lanes.iter().position(|lane| lane.pid == NO_PID) {
            if let Some(lane) = self.lanes.get_mut(free) {
                *lane = fresh;
            }
            free
        } else if self.lanes.len() < MAX_LANES {
            self.lanes.push(fresh);
            self.lanes.len() - 1
        } else {
            return NONE;
        };
        u16::try_from(place).unwrap_or(NONE)
    }

    /// An API process ended: its sockets are gone.
    pub(super) fn forget_api(&mut self, pid: u32) {
        for lane in &mut self.lanes {
            if lane.pid == pid {
                lane.pid = NO_PID;
                lane.engine = NONE;
                lane.is_diffusion = false;
            }
        }
    }

    fn bind(&mut self, lane: u16, engine: u16) {
        let Some(pid) = self.lanes.get(usize::from(lane)).map(|lane| lane.pid) else {
            return;
        };
        for (place, other) in self.lanes.iter_mut().enumerate() {
            if place == usize::from(lane) {
                other.engine = engine;
            } else if other.pid == pid && other.engine == engine {
                other.engine = NONE;
            }
        }
    }

    /// The engine that a share is at or was given to, where it is known.
    pub(super) fn engine_of(&self, part: &Part) -> Option<u16> {
        let behind = || Some(self.lanes.get(usize::from(part.lane))?.engine);
        Some(part.engine)
            .filter(|&engine| engine != NONE)
            .or_else(behind)
            .filter(|&engine| engine != NONE)
    }

    /// The engine behind a socket, where it is known.
    pub(super) fn lane_engine(&self, pid: u32, socket: u64) -> Option<u16> {
        self.lanes
            .iter()
            .find(|lane| lane.pid == pid && lane.socket == socket)
            .map(|lane| lane.engine)
            .filter(|&engine| engine != NONE)
    }

    /// Whether `part` is or may only be at `engine`.
    pub(super) fn is_at(&self, part: &Part, engine: u16) -> bool {
        match part.state {
            PartState::Open | PartState::Early => part.engine == engine,
            PartState::Pending => {
                part.engine == engine
                    || self
                        .lanes
                        .get(usize::from(part.lane))
                        .is_some_and(|lane| lane.engine == engine)
            }
            PartState::Finished => false,
        }
    }

    /// Whether the API process `pid` gave out `part`.
    pub(super) fn is_from(&self, part: &Part, pid: u32) -> bool {
        self.lanes
            .get(usize::from(part.lane))
            .is_some_and(|lane| lane.pid == pid)
    }

    /// An engine ended: its number may be given to another.
    pub(super) fn forget_engine(&mut self, engine: u16) {
        for lane in &mut self.lanes {
            if lane.engine == engine {
                lane.engine = NONE;
            }
        }
        for (_, request) in &mut self.requests {
            for part in &mut request.parts {
                if part.engine == engine {
                    part.engine = NONE;
                }
                if let Some(payload) = &mut part.payload
                    && payload.from == engine
                {
                    payload.from = NONE;
                }
            }
            if let Some(audio) = &mut request.audio
                && audio.engine == engine
            {
                audio.engine = NONE;
            }
        }
    }

    fn join_siblings(&mut self, parent: &str, max: usize) {
        if let Some(siblings) = self.siblings.get_mut(parent) {
            siblings.n += 1;
            siblings.open += 1;
        } else if self.siblings.len() < max {
            self.siblings.insert(
                parent.into(),
                Siblings {
                    n: 1,
                    open: 1,
                    longest: 0,
                },
            );
        }
    }

    /// A sample of plain vLLM is over, with `generated` tokens or (aborted) without a count. Gives `n` and the length
    /// of the longest sample once the last of its siblings is.
    pub(super) fn leave_siblings(&mut self, id: &str, generated: Option<u64>) -> Option<(u32, u64)> {
        let Some(parent) = parent_of(id) else {
            return generated.map(|generated| (1, generated));
        };
        let siblings = self.siblings.get_mut(parent)?;
        siblings.open = siblings.open.saturating_sub(1);
        siblings.longest = siblings.longest.max(generated.unwrap_or(0));
        if siblings.open > 0 {
            return None;
        }
        let done = self.siblings.remove(parent)?;
        generated.map(|_| (done.n, done.longest))
    }
}

fn hash(id: &str) -> u64 {
    FxBuildHasher.hash_one(id)
}

/// The parent in `{index}_{parent}`.
fn parent_of(id: &str) -> Option<&str> {
    let (index, parent) = id.split_once('_')?;
    (!index.is_empty() && !parent.is_empty() && index.bytes().all(|byte| byte.is_ascii_digit()))
        .then_some(parent)
}

/// Places in a request's shares, of which there are at most 255.
fn small(place: usize) -> u8 {
    u8::try_from(place).unwrap_or(u8::MAX)
}
