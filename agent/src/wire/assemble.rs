//! Frames to messages: puts the parts of a multipart message together and decodes its payload.
//!
//! What a frame is follows from who sent it and from the parts before it on the same socket (docs/wire.md
//! section "Engine sockets"): an engine core sends `[payload][aux..]`, its client
//! `[identity][type][payload][aux..]`. Aux parts are tensors and arrays of 256 bytes and more.

use rustc_hash::FxHashMap;

use super::{
    WireError, control, diffusion,
    engine::{self, Payload, Seen, StartUp},
    frame::Frame,
    layout::Layouts,
    message::Message,
    msgpack::Reader,
    redact,
};
use crate::host::identity::{Flavor, Role, Versions};

/// Longest routing identity. vLLM's are 2 bytes, libzmq's own 5.
const MAX_IDENTITY: u64 = 255;
/// A message whose next part has not come after this time is given up. Parts of a message are sent back to
/// back.
const IDLE_NS: u64 = 10_000_000_000;
/// Messages under way at which those given up are looked for: far more than sockets in use at once.
const SWEEP_AT: usize = 256;
/// The engine core's last words.
const ENGINE_DEAD: &[u8] = b"ENGINE_CORE_DEAD";

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FrameType {
    /// `EngineCoreOutputs`.
    Outputs,
    /// A new request, or a further segment of one.
    Add,
    /// Ids to abort.
    Abort,
    /// A call to the engine.
    Utility,
    /// Start of a data-parallel wave.
    StartDpWave,
    /// `EngineCoreReadyResponse`.
    Ready,
    /// HELLO, READY, addresses.
    Handshake,
    /// The engine core's death notice.
    EngineDead,
    /// The routing identity or the request type in front of a payload.
    Envelope,
    /// A tensor or array behind a payload.
    Aux,
    /// A request to or a result of a diffusion stage.
    Diffusion,
    /// Registration of a stage replica with the master.
    Registration,
    /// JSON of the `OmniCoordinator`, and the data-parallel coordinator's messages.
    Coordinator,
    /// Subscriptions and wake-ups of a few bytes.
    Signal,
    /// A pickle of a worker message queue.
    WorkerQueue,
    /// A control message of a connector between stages.
    Connector,
    /// Anything else.
    Other,
}

impl FrameType {
    /// All of them.
    pub const ALL: [Self; 17] = [
        Self::Outputs,
        Self::Add,
        Self::Abort,
        Self::Utility,
        Self::StartDpWave,
        Self::Ready,
        Self::Handshake,
        Self::EngineDead,
        Self::Envelope,
        Self::Aux,
        Self::Diffusion,
        Self::Registration,
        Self::Coordinator,
        Self::Signal,
        Self::WorkerQueue,
        Self::Connector,
        Self::Other,
    ];

    /// The label value.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Outputs => "outputs",
            Self::Add => "add",
            Self::Abort => "abort",
            Self::Utility => "utility",
            Self::StartDpWave => "start_dp_wave",
            Self::Ready => "ready",
            Self::Handshake => "handshake",
            Self::EngineDead => "engine_dead",
            Self::Envelope => "envelope",
            Self::Aux => "aux",
            Self::Diffusion => "diffusion",
            Self::Registration => "registration",
            Self::Coordinator => "coordinator",
            Self::Signal => "signal",
            Self::WorkerQueue => "worker_queue",
            Self::Connector => "connector",
            Self::Other => "other",
        }
    }
}

/// What became of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FrameResult {
    /// Decoded, and all that matters was there.
    Decoded,
    /// Decoded, but part of what matters lies in bytes that were not captured.
    Partial,
    /// A part of a message that has no content of its own.
    Part,
    /// Not a message that is looked into.
    Ignored,
    /// A part whose predecessors were lost.
    Orphan,
    /// Not what it should be.
    Malformed,
    /// A struct of an unknown length.
    UnknownLayout,
    /// Sent by a process that is not watched.
    UnknownProcess,
}

impl FrameResult {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Decoded,
        Self::Partial,
        Self::Part,
        Self::Ignored,
        Self::Orphan,
        Self::Malformed,
        Self::UnknownLayout,
        Self::UnknownProcess,
    ];

    /// The label value.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Decoded => "decoded",
            Self::Partial => "partial",
            Self::Part => "part",
            Self::Ignored => "ignored",
            Self::Orphan => "orphan",
            Self::Malformed => "malformed",
            Self::UnknownLayout => "unknown_layout",
            Self::UnknownProcess => "unknown_process",
        }
    }
}

/// A decoded frame.
#[derive(Clone, Debug, PartialEq)]
pub struct Decoded<'a> {
    /// What it is.
    pub kind: FrameType,
    /// What became of it.
    pub result: FrameResult,
    /// What it says.
    pub content: Content<'a>,
}

/// What a frame says.
#[expect(
    clippy::large_enum_variant,
    reason = "nearly all frames are of the largest variant"
)]
#[derive(Clone, Debug, PartialEq)]
pub enum Content<'a> {
    /// A message. `target` is the engine index that the client addressed, where it did.
    Message {
        /// The message.
        message: Message<'a>,
        /// Engine index from the routing identity: the data-parallel rank inside a replica.
        target: Option<u16>,
    },
    /// A tensor or array behind a payload.
    Aux(Aux),
    /// Nothing: see `kind` and `result`.
    Nothing,
    /// Why it could not be decoded.
    Failed(WireError),
}

/// A follow-on part of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aux {
    /// Socket of the message.
    pub socket: u64,
    /// When the message's payload was sent, `CLOCK_MONOTONIC` in nanoseconds; with `socket` it names the
    /// message.
    pub message_time_ns: u64,
    /// What the payload is.
    pub of: FrameType,
    /// Bytes of this part.
    pub size: u64,
}

impl<'a> Decoded<'a> {
    fn message(kind: FrameType, is_partial: bool, message: Message<'a>, target: Option<u16>) -> Self {
        let result = if is_partial {
            FrameResult::Partial
        } else {
            FrameResult::Decoded
        };
        Self {
            kind,
            result,
            content: Content::Message { message, target },
        }
    }

    fn nothing(kind: FrameType, result: FrameResult) -> Self {
        Self {
            kind,
            result,
            content: Content::Nothing,
        }
    }

    fn failed(kind: FrameType, error: WireError) -> Self {
        let result = match error {
            WireError::UnknownLayout { .. } => FrameResult::UnknownLayout,
            WireError::Msgpack(_)
            | WireError::UnknownValue { .. }
            | WireError::Missing { .. }
            | WireError::TrailingBytes { .. } => FrameResult::Malformed,
        };
        Self {
            kind,
            result,
            content: Content::Failed(error),
        }
    }
}

/// Who sends: decides how a message is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    /// Client of the engines: API server or worker.
    Api,
    /// Engine core, or a diffusion stage.
    Stage,
    /// Worker of a stage: of what it sends, only its connector's messages are looked into.
    Worker,
}

#[derive(Clone, Debug)]
struct Sender {
    side: Side,
    flavor: Flavor,
    versions: Versions,
    layouts: Layouts,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Socket {
    pid: u32,
    tid: u32,
    address: u64,
}

/// A message whose next part is awaited.
#[derive(Clone, Copy, Debug)]
struct Open {
    /// Time of its last part.
    time_ns: u64,
    expect: Expect,
}

#[derive(Clone, Copy, Debug)]
enum Expect {
    /// The request type, or a payload without one.
    Type { target: Option<u16> },
    /// The payload of this type.
    Payload { request: Request, target: Option<u16> },
    /// The empty part between a connector's identity and its answer.
    Delimiter { peer: u32 },
    /// A connector's answer.
    Answer { peer: u32 },
    /// Aux parts.
    Aux { of: FrameType, message_time_ns: u64 },
    /// Parts of a message that nobody looks into.
    Rest,
}

/// `EngineCoreRequestType` of what a client sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Request {
    Add,
    Abort,
    StartDpWave,
    Utility,
}

impl Request {
    fn from_byte(byte: u8) -> Option<Self> {
        match byte {
            0 => Some(Self::Add),
            1 => Some(Self::Abort),
            2 => Some(Self::StartDpWave),
            3 => Some(Self::Utility),
            _ => None,
        }
    }
}

/// Decodes the frames of all watched processes.
#[derive(Debug, Default)]
pub struct Decoder {
    senders: FxHashMap<u32, Sender>,
    open: FxHashMap<Socket, Open>,
}

impl Decoder {
    /// A decoder that knows no process yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A process to be listened to, or news about one. Roles that are not tapped are left out.
    pub fn process_known(&mut self, pid: u32, role: Role, flavor: Flavor, versions: &Versions) {
        let side = match role {
            Role::ApiServer | Role::ApiWorker { .. } => Side::Api,
            Role::LlmStage { .. } | Role::DiffusionStage { .. } => Side::Stage,
            Role::Worker => Side::Worker,
            Role::Headless | Role::Coordinator => return,
        };
        let same =
            |known: &Sender| known.side == side && known.flavor == flavor && known.versions == *versions;
        // News that change nothing must not undo what a ready frame has told.
        if !self.senders.get(&pid).is_some_and(same) {
            let layouts = Layouts::new(flavor, versions);
            self.senders.insert(
                pid,
                Sender {
                    side,
                    flavor,
                    versions: versions.clone(),
                    layouts,
                },
            );
        }
    }

    /// A process has ended.
    pub fn process_gone(&mut self, pid: u32) {
        self.senders.remove(&pid);
        self.open.retain(|socket, _| socket.pid != pid);
    }

    /// Blanks the content of a frame for a recording, in place: token ids, text and tensors. `kind` is what
    /// [`Decoder::frame`] said of it. Types, lengths, ids and the values that decoders take stay, so that the
    /// frame decodes to the same message; a frame that is not decoded is overwritten wholly.
    pub fn redact(&self, pid: u32, kind: FrameType, size: u64, head: &mut [u8], tail: &mut [u8]) {
        if let Some(sender) = self.senders.get(&pid) {
            redact::frame(kind, &sender.layouts, size, head, tail);
        } else {
            head.fill(0);
            tail.fill(0);
        }
    }

    /// Messages under way.
    #[must_use]
    pub fn open_messages(&self) -> usize {
        self.open.len()
    }

    /// Decodes the next frame. Frames come in the order in which their sockets sent them.
    pub fn frame<'a>(&mut self, frame: &Frame<'a>) -> Decoded<'a> {
        let Some(sender) = self.senders.get_mut(&frame.pid) else {
            return Decoded::nothing(FrameType::Other, FrameResult::UnknownProcess);
        };
        let key = Socket {
            pid: frame.pid,
            tid: frame.tid,
            address: frame.socket,
        };
        // Most messages have one part: nothing is open, and nothing is looked up.
        let open = if self.open.is_empty() {
            None
        } else {
            self.open.remove(&key)
        };
        let expect = open
            .filter(|open| frame.time_ns.saturating_sub(open.time_ns) <= IDLE_NS)
            .map(|open| open.expect);
        let (decoded, next) = match sender.side {
            Side::Stage | Side::Worker => sender.stage(frame, expect),
            Side::Api => sender.api(frame, expect),
        };
        if frame.more {
            if self.open.len() >= SWEEP_AT {
                sweep(&mut self.open, frame.time_ns);
            }
            self.open.insert(
                key,
                Open {
                    time_ns: frame.time_ns,
                    expect: next,
                },
            );
        }
        decoded
    }
}

/// Drops messages that are not going on, and where that is not enough all of them: what an unbounded number
/// of sockets leaves open is not worth more memory.
#[cold]
fn sweep(open: &mut FxHashMap<Socket, Open>, now_ns: u64) {
    open.retain(|_, open| now_ns.saturating_sub(open.time_ns) <= IDLE_NS);
    if open.len() >= SWEEP_AT {
        open.clear();
    }
}

impl Sender {
    /// A frame of an engine core: `[payload][aux..]`, or of its connector: `[payload]` of one who asks,
    /// `[identity][][payload]` of one who answers.
    fn stage<'a>(&mut self, frame: &Frame<'a>, expect: Option<Expect>) -> (Decoded<'a>, Expect) {
        let part = Decoded::nothing(FrameType::Envelope, FrameResult::Part);
        match expect {
            Some(Expect::Delimiter { peer }) if frame.more && frame.size == 0 => {
                (part, Expect::Answer { peer })
            }
            Some(Expect::Answer { peer }) if !frame.aux && !frame.more => {
                let decoded = connector(frame, Some(peer))
                    .unwrap_or_else(|| Decoded::nothing(FrameType::Other, FrameResult::Ignored));
                (decoded, Expect::Rest)
            }
            expect => match (follow_on(frame, expect), peer(frame)) {
                (Some(done), _) => done,
                (None, Some(peer)) => (part, Expect::Delimiter { peer }),
                (None, None) if self.side == Side::Worker => {
                    let decoded = connector(frame, None)
                        .unwrap_or_else(|| Decoded::nothing(noise(frame.head), FrameResult::Ignored));
                    (decoded, Expect::Rest)
                }
                (None, None) => self.stage_payload(frame),
            },
        }
    }

    fn stage_payload<'a>(&mut self, frame: &Frame<'a>) -> (Decoded<'a>, Expect) {
        let payload = payload(frame);
        let decoded = match frame.head.first() {
            Some(0x90..=0x9f | 0xdc | 0xdd) if is_outputs(payload.reader()) => {
                match engine::outputs(payload, &self.layouts) {
                    Ok(Seen { message, is_partial }) => {
                        Decoded::message(FrameType::Outputs, is_partial, Message::Outputs(message), None)
                    }
                    Err(error) => Decoded::failed(FrameType::Outputs, error),
                }
            }
            Some(0x81..=0x8f | 0xde | 0xdf) => connector(frame, None).unwrap_or_else(|| self.map(payload)),
            _ if frame.head == ENGINE_DEAD || frame.head == diffusion::STAGE_DEAD => {
                Decoded::message(FrameType::EngineDead, false, Message::EngineDead, None)
            }
            _ => connector(frame, None)
                .unwrap_or_else(|| Decoded::nothing(noise(frame.head), FrameResult::Ignored)),
        };
        let next = after_payload(decoded.kind, frame);
        (decoded, next)
    }

    /// A map: start-up messages, or a diffusion stage's.
    fn map<'a>(&mut self, payload: Payload<'a>) -> Decoded<'a> {
        if diffusion::is_message(payload.reader()) {
            return match diffusion::message(payload) {
                Ok(Some(seen)) => Decoded::message(
                    FrameType::Diffusion,
                    seen.is_partial,
                    Message::Diffusion(seen.message),
                    None,
                ),
                Ok(None) => Decoded::nothing(FrameType::Diffusion, FrameResult::Ignored),
                Err(error) => Decoded::failed(FrameType::Diffusion, error),
            };
        }
        let seen = match engine::start_up(payload) {
            Ok(seen) => seen,
            Err(error) => return Decoded::failed(FrameType::Other, error),
        };
        match seen.message {
            StartUp::Ready(ready) => {
                if let Some(version) = ready.vllm_version.filter(|_| !self.layouts.is_known()) {
                    let versions = Versions {
                        vllm: Some(version.to_owned()),
                        omni: self.versions.omni.clone(),
                    };
                    self.layouts = Layouts::new(self.flavor, &versions);
                }
                Decoded::message(FrameType::Ready, seen.is_partial, Message::Ready(ready), None)
            }
            StartUp::Handshake => {
                Decoded::message(FrameType::Handshake, seen.is_partial, Message::Handshake, None)
            }
            StartUp::Registration => Decoded::nothing(FrameType::Registration, FrameResult::Ignored),
            StartUp::Other => Decoded::nothing(FrameType::Other, FrameResult::Ignored),
        }
    }

    /// A frame of an API server: `[identity][type][payload][aux..]`, or one part to a stage without a type.
    fn api<'a>(&mut self, frame: &Frame<'a>, expect: Option<Expect>) -> (Decoded<'a>, Expect) {
        match expect {
            // An envelope is never aux: a frame that is has lost what stood before it.
            Some(Expect::Type { target }) if !frame.aux => self.api_type(frame, target),
            // An identity of vLLM's always starts a message: the end of the one before was lost.
            Some(Expect::Rest) if !frame.aux && frame.more && frame.size == 2 => self.api_start(frame),
            Some(Expect::Payload { request, target }) if !frame.aux => {
                // Two bytes are less than any payload with more parts: the payload was lost, a new message
                // starts.
                if frame.more && frame.size <= 2 {
                    return self.api_start(frame);
                }
                self.api_payload(frame, request, target)
            }
            expect => match follow_on(frame, expect) {
                Some(done) => done,
                None => self.api_start(frame),
            },
        }
    }

    fn api_start<'a>(&mut self, frame: &Frame<'a>) -> (Decoded<'a>, Expect) {
        if frame.more {
            // A request type in front: its identity was lost, or the socket needs none.
            if is_type(frame) {
                return self.api_type(frame, None);
            }
            if frame.size <= MAX_IDENTITY {
                let target = frame
                    .head
                    .try_into()
                    .ok()
                    .filter(|_| frame.is_whole())
                    .map(u16::from_le_bytes);
                let part = Decoded::nothing(FrameType::Envelope, FrameResult::Part);
                return (part, Expect::Type { target });
            }
            return (
                Decoded::nothing(FrameType::Other, FrameResult::Orphan),
                Expect::Rest,
            );
        }
        let decoded = match frame.head.first() {
            Some(0x81..=0x8f | 0xde | 0xdf) => self.map(payload(frame)),
            _ => Decoded::nothing(noise(frame.head), FrameResult::Ignored),
        };
        (decoded, Expect::Rest)
    }

    /// The part behind an identity.
    fn api_type<'a>(&mut self, frame: &Frame<'a>, target: Option<u16>) -> (Decoded<'a>, Expect) {
        if is_type(frame) {
            let part = Decoded::nothing(FrameType::Envelope, FrameResult::Part);
            let next = match frame.head.first().copied().and_then(Request::from_byte) {
                Some(request) => Expect::Payload { request, target },
                None => Expect::Rest,
            };
            return (part, next);
        }
        if frame.more && frame.size == 2 {
            // The message behind the former identity was lost: this is the next one's.
            return self.api_start(frame);
        }
        let decoded = match frame.head.first() {
            Some(0x81..=0x8f | 0xde | 0xdf) => self.map(payload(frame)),
            _ => Decoded::nothing(noise(frame.head), FrameResult::Ignored),
        };
        (decoded, Expect::Rest)
    }

    fn api_payload<'a>(
        &self,
        frame: &Frame<'a>,
        request: Request,
        target: Option<u16>,
    ) -> (Decoded<'a>, Expect) {
        let payload = payload(frame);
        let (kind, seen) = match request {
            Request::Add => (
                FrameType::Add,
                engine::add(payload, &self.layouts).map(|seen| seen.map(Message::Add)),
            ),
            Request::Abort => (
                FrameType::Abort,
                engine::abort(payload).map(|seen| seen.map(Message::Abort)),
            ),
            Request::Utility => (
                FrameType::Utility,
                engine::utility(payload).map(|seen| seen.map(Message::Utility)),
            ),
            Request::StartDpWave => (
                FrameType::StartDpWave,
                engine::start_dp_wave(payload).map(|seen| seen.map(|()| Message::StartDpWave)),
            ),
        };
        let decoded = match seen {
            Ok(seen) => Decoded::message(kind, seen.is_partial, seen.message, target),
            Err(error) => Decoded::failed(kind, error),
        };
        (decoded, after_payload(kind, frame))
    }
}

/// A control message of a connector. They can't be mistaken for an engine's: those are arrays, or maps with other
/// keys, and none is text but the engine's last words.
fn connector<'a>(frame: &Frame<'a>, peer: Option<u32>) -> Option<Decoded<'a>> {
    if frame.more {
        return None;
    }
    Some(match control::control(payload(frame))? {
        Ok(Seen { message, is_partial }) => {
            let message = Message::Connector {
                control: message,
                peer,
            };
            Decoded::message(FrameType::Connector, is_partial, message, None)
        }
        Err(error) => Decoded::failed(FrameType::Connector, error),
    })
}

/// The identity that libzmq makes up for a peer: a zero, and a number. No payload of a stage starts with a zero.
fn peer(frame: &Frame<'_>) -> Option<u32> {
    match *frame.head {
        [0, a, b, c, d] if frame.more && frame.is_whole() => Some(u32::from_be_bytes([a, b, c, d])),
        _ => None,
    }
}

fn payload<'a>(frame: &Frame<'a>) -> Payload<'a> {
    Payload {
        head: frame.head,
        tail: frame.tail,
        size: frame.size,
    }
}

/// A frame that the parts before it, or the tap, say is no start of a message.
fn follow_on<'a>(frame: &Frame<'a>, expect: Option<Expect>) -> Option<(Decoded<'a>, Expect)> {
    let rest = |kind, result| Some((Decoded::nothing(kind, result), Expect::Rest));
    match expect {
        Some(expect @ Expect::Aux { of, message_time_ns }) if frame.aux => {
            let aux = Aux {
                socket: frame.socket,
                message_time_ns,
                of,
                size: frame.size,
            };
            let content = Content::Aux(aux);
            Some((
                Decoded {
                    kind: FrameType::Aux,
                    result: FrameResult::Part,
                    content,
                },
                expect,
            ))
        }
        Some(Expect::Rest) => rest(FrameType::Other, FrameResult::Ignored),
        _ if frame.aux => rest(FrameType::Aux, FrameResult::Orphan),
        // Not aux, so the start of the next message: the end of the one before was lost.
        _ => None,
    }
}

fn after_payload(kind: FrameType, frame: &Frame<'_>) -> Expect {
    match kind {
        FrameType::Outputs
        | FrameType::Add
        | FrameType::Abort
        | FrameType::Utility
        | FrameType::StartDpWave => Expect::Aux {
            of: kind,
            message_time_ns: frame.time_ns,
        },
        _ => Expect::Rest,
    }
}

/// A request type has one byte, and its payload follows.
fn is_type(frame: &Frame<'_>) -> bool {
    frame.more && frame.size == 1 && frame.head.len() == 1
}

/// `EngineCoreOutputs` of any length start with an integer and an array.
fn is_outputs(mut reader: Reader<'_>) -> bool {
    reader.array().is_ok() && reader.u64().is_ok() && reader.array().is_ok()
}

/// What else is sent on sockets of these processes, by its first bytes.
fn noise(head: &[u8]) -> FrameType {
    match head {
        // JSON, or a pair such as (engine, wave) or ("FIRST_REQ", engine).
        [b'{', b'"', ..] | [0x92, ..] => FrameType::Coordinator,
        [0x80, 2..=5, ..] => FrameType::WorkerQueue,
        _ if head.len() <= 5 => FrameType::Signal,
        _ => FrameType::Other,
    }
}
