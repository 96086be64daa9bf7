//! The connections of all processes: from calls to news of exchanges.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use super::{
    HttpEvent,
    answer::{Content, Found},
    body::{Body, Step},
    ends::Ends,
    head::{AnswerHead, Collected, Form, HeadBuffer, Opening, RequestHead, is_answer},
    note::{Ask, End, Endpoint, ExchangeId, Note},
    redact::{Trace, Zone},
    request,
    socket::{Frames, Heard, Said},
    stretch::Stretch,
};

/// Connections that are followed at a time, over all processes.
const MAX_CONNECTIONS: usize = 16_384;

/// Requests of one connection that wait for their answer.
const MAX_PENDING: usize = 16;

/// A connection without any event for this long is given up: its end was lost.
const IDLE_NS: u64 = 3_600_000_000_000;

/// News of an exchange.
#[derive(Clone, Debug, PartialEq)]
pub struct News {
    /// The process that serves it.
    pub pid: u32,
    /// Which exchange.
    pub exchange: ExchangeId,
    /// When it happened.
    pub time_ns: u64,
    /// What.
    pub note: Note,
}

/// What became of a request, of any kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Answered in full with a status below 400.
    Ok,
    /// Answered with a status of 400 to 499.
    ClientError,
    /// Answered with a status of 500 or above, or with a stream that tells of a failure.
    ServerError,
    /// The client hung up before the answer was complete.
    ClientLeft,
    /// The server closed the connection before the answer was complete.
    Cut,
    /// Events of the connection are missing.
    Lost,
}

impl Outcome {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Ok,
        Self::ClientError,
        Self::ServerError,
        Self::ClientLeft,
        Self::Cut,
        Self::Lost,
    ];

    /// The label value.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::ClientError => "client_error",
            Self::ServerError => "server_error",
            Self::ClientLeft => "client_left",
            Self::Cut => "cut",
            Self::Lost => "lost",
        }
    }
}

/// What can't be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unsupported {
    /// A connection that speaks HTTP/2.
    Http2,
    /// An encrypted connection whose plaintext was not seen.
    Tls,
    /// An answer with a content coding.
    ContentCoding,
}

impl Unsupported {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Http2, Self::Tls, Self::ContentCoding];

    /// The label value.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Http2 => "http2",
            Self::Tls => "tls",
            Self::ContentCoding => "content_coding",
        }
    }
}

/// Totals since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests that are over, by [`Outcome`].
    pub requests: [u64; Outcome::ALL.len()],
    /// Connections and answers that can't be read, by [`Unsupported`].
    pub unsupported: [u64; Unsupported::ALL.len()],
    /// Times that a connection's bytes did not go on as they must.
    pub breaks: u64,
    /// Connections that were not followed because too many were open.
    pub refused: u64,
}

impl Counts {
    fn request(&mut self, outcome: Outcome) {
        if let Some(count) = self.requests.get_mut(outcome as usize) {
            *count += 1;
        }
    }

    fn unsupported(&mut self, what: Unsupported) {
        if let Some(count) = self.unsupported.get_mut(what as usize) {
            *count += 1;
        }
    }
}

/// The connections of all processes.
#[derive(Debug, Default)]
pub struct Connections {
    open: FxHashMap<(u32, i32), Box<Connection>>,
    shared: Shared,
}

/// What a connection needs of all.
#[derive(Debug, Default)]
struct Shared {
    counts: Counts,
    next_exchange: u64,
}

impl Shared {
    fn exchange(&mut self) -> ExchangeId {
        self.next_exchange += 1;
        ExchangeId(self.next_exchange)
    }
}

/// Where news go while one event is taken.
struct Out<'a> {
    pid: u32,
    time_ns: u64,
    shared: &'a mut Shared,
    news: &'a mut Vec<News>,
    /// Of a call that is walked through to be blanked.
    trace: Option<&'a mut Trace>,
}

impl Out<'_> {
    /// Marks what `input` has before `rest`.
    fn mark(&mut self, input: Stretch<'_>, rest: Stretch<'_>, zone: impl FnOnce() -> Option<Zone>) {
        if let Some(trace) = &mut self.trace
            && let Some(zone) = zone()
        {
            trace.mark(input, rest, zone);
        }
    }

    fn tell(&mut self, exchange: ExchangeId, time_ns: u64, note: Note) {
        self.news.push(News {
            pid: self.pid,
            exchange,
            time_ns,
            note,
        });
    }
}

impl Connections {
    /// None yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Connections that are open.
    #[must_use]
    pub fn len(&self) -> usize {
        self.open.len()
    }

    /// Whether none is open.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Requests and sentences that are not over.
    #[must_use]
    pub fn exchanges(&self) -> usize {
        self.open.values().map(|connection| connection.exchanges()).sum()
    }

    /// Totals since the start.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.shared.counts
    }

    /// Takes the next event, and appends what it tells to `news`.
    pub fn event(&mut self, event: &HttpEvent<'_>, news: &mut Vec<News>) {
        let key = (event.pid(), event.fd());
        let time_ns = event.time_ns();
        let Self { open, shared } = self;
        let mut out = Out {
            pid: key.0,
            time_ns,
            shared,
            news,
            trace: None,
        };
        match *event {
            HttpEvent::Accepted { .. } => {
                // The end of the one before was lost.
                if let Some(mut old) = open.remove(&key) {
                    old.give_up(&mut out);
                }
                insert(open, key, time_ns, &mut out);
            }
            HttpEvent::Received { size, head, tail, .. } => {
                let input = Stretch::new(size, head, tail);
                let connection = match open.get_mut(&key) {
                    Some(connection) => connection,
                    None if Opening::is_request(input.start())
                        || Opening::of(input.start()) == Opening::Http2 =>
                    {
                        let Some(connection) = insert(open, key, time_ns, &mut out) else {
                            return;
                        };
                        connection
                    }
                    None => return,
                };
                connection.last_ns = time_ns;
                connection.received(input, &mut out);
            }
            HttpEvent::Sent { size, head, tail, .. } => {
                if let Some(connection) = open.get_mut(&key) {
                    connection.last_ns = time_ns;
                    connection.sent(Stretch::new(size, head, tail), &mut out);
                }
            }
            HttpEvent::Failed { .. } => {
                if let Some(connection) = open.get_mut(&key) {
                    connection.last_ns = time_ns;
                    connection.client_left = true;
                }
            }
            HttpEvent::Closed { .. } => {
                if let Some(mut connection) = open.remove(&key) {
                    connection.closed(&mut out);
                }
            }
        }
    }

    /// Blanks what a call carries, for a recording, but for what is read of it. To be called before [`Self::event`] is.
    pub fn redact(&self, event: &HttpEvent<'_>, head: &mut [u8], tail: &mut [u8]) {
        let (HttpEvent::Received {
            size,
            head: first,
            tail: last,
            ..
        }
        | HttpEvent::Sent {
            size,
            head: first,
            tail: last,
            ..
        }) = *event
        else {
            return;
        };
        let known = self.open.get(&(event.pid(), event.fd()));
        let mut connection = known.map_or_else(|| Connection::new(0), |known| (**known).clone());
        let mut trace = Trace::new(size);
        let mut out = Out {
            pid: event.pid(),
            time_ns: event.time_ns(),
            shared: &mut Shared::default(),
            news: &mut Vec::new(),
            trace: Some(&mut trace),
        };
        let input = Stretch::new(size, first, last);
        if matches!(event, HttpEvent::Sent { .. }) {
            connection.sent(input, &mut out);
        } else if known.is_some() || Opening::is_request(input.start()) {
            connection.received(input, &mut out);
        }
        trace.blank(head, tail);
    }

    /// A process ended, and its connections with it.
    pub fn process_gone(&mut self, pid: u32, time_ns: u64, news: &mut Vec<News>) {
        let Self { open, shared } = self;
        let mut out = Out {
            pid,
            time_ns,
            shared,
            news,
            trace: None,
        };
        open.retain(|(of, _), connection| {
            if *of == pid {
                connection.closed(&mut out);
            }
            *of != pid
        });
    }

    /// Time has passed: connections whose end was lost are given up. Once a second is right.
    pub fn tick(&mut self, now_ns: u64, news: &mut Vec<News>) {
        let Self { open, shared } = self;
        open.retain(|(pid, _), connection| {
            let is_idle = now_ns.saturating_sub(connection.last_ns) > IDLE_NS;
            if is_idle {
                connection.give_up(&mut Out {
                    pid: *pid,
                    time_ns: now_ns,
                    shared,
                    news,
                    trace: None,
                });
            }
            !is_idle
        });
    }
}

fn insert<'c>(
    open: &'c mut FxHashMap<(u32, i32), Box<Connection>>,
    key: (u32, i32),
    time_ns: u64,
    out: &mut Out<'_>,
) -> Option<&'c mut Box<Connection>> {
    if open.len() >= MAX_CONNECTIONS {
        out.shared.counts.refused += 1;
        return None;
    }
    Some(
        open.entry(key)
            .or_insert_with(|| Box::new(Connection::new(time_ns))),
    )
}

#[derive(Clone, Debug)]
struct Connection {
    inward: Inward,
    outward: Outward,
    /// Requests that were begun and not answered in full, in order.
    pending: VecDeque<Pending>,
    sentence: Option<Sentence>,
    client_left: bool,
    last_ns: u64,
}

#[derive(Clone, Debug)]
enum Inward {
    Head(HeadBuffer),
    Body(Body),
    Socket(Frames),
    /// Not followed until a request begins.
    Lost,
    /// Never to be followed.
    Ignored,
}

#[derive(Clone, Debug)]
enum Outward {
    Head(HeadBuffer),
    Body {
        body: Body,
        content: Content,
    },
    Socket(Frames),
    /// A WebSocket whose frames are to be found again.
    SocketLost(Frames),
    /// Not followed until a request begins.
    Lost,
}

/// A request whose answer is not complete.
#[derive(Clone, Debug)]
struct Pending {
    exchange: ExchangeId,
    endpoint: Endpoint,
    is_head: bool,
    upgrades: bool,
    /// Its body, until it has been read.
    body: Option<(Form, Ends)>,
    status: u16,
}

/// A sentence that is being spoken on a WebSocket.
#[derive(Clone, Debug)]
struct Sentence {
    exchange: ExchangeId,
    streams: bool,
    failed: bool,
}

impl Pending {
    /// Whether anyone wants news of it: no upgrade, and a request to the engines.
    fn is_told(&self) -> bool {
        self.endpoint != Endpoint::Sentence && self.endpoint.id_prefix().is_some()
    }
}

impl Connection {
    fn new(time_ns: u64) -> Self {
        Self {
            inward: Inward::Head(HeadBuffer::default()),
            outward: Outward::Head(HeadBuffer::default()),
            pending: VecDeque::new(),
            sentence: None,
            client_left: false,
            last_ns: time_ns,
        }
    }

    fn exchanges(&self) -> usize {
        self.pending.len() + usize::from(self.sentence.is_some())
    }

    // ---- from the client ----

    fn received(&mut self, mut input: Stretch<'_>, out: &mut Out<'_>) {
        if input.is_empty() {
            self.client_left = true;
            return;
        }
        self.find_request(input.start(), out);
        // A body that ends with what was read is over now: the answer comes before anything else is read.
        while !input.is_empty() || matches!(self.inward, Inward::Body(Body::Length(0))) {
            match &mut self.inward {
                Inward::Lost | Inward::Ignored => return,
                Inward::Socket(frames) => {
                    let mut heard = Vec::new();
                    let trace = out.trace.as_deref_mut();
                    let is_whole = frames.take(out.time_ns, input, &mut heard, trace).is_ok();
                    self.client_left |= heard.iter().any(|heard| matches!(heard, Heard::Close));
                    // All that matters of a client is whether it says goodbye.
                    if !is_whole {
                        out.shared.counts.breaks += 1;
                        self.inward = Inward::Ignored;
                    }
                    return;
                }
                Inward::Body(body) => {
                    let before = input;
                    let step = body.step(&mut input);
                    let at_data = step.data_of(before, input);
                    out.mark(before, at_data, || Some(Zone::Framing));
                    match step {
                        Step::Data(data) => {
                            if let Some(Pending {
                                body: Some((form, ends)),
                                ..
                            }) = self.pending.back_mut()
                            {
                                out.mark(at_data, input, || {
                                    Some(match form {
                                        Form::Json => Zone::Json(ends.before()),
                                        Form::Multipart => Zone::Form,
                                    })
                                });
                                ends.push(data);
                            }
                        }
                        Step::ChunkEnd => {}
                        Step::End => self.request_read(out),
                        Step::More => return,
                        Step::Broken => return self.broken(out),
                    }
                }
                Inward::Head(head) => {
                    if head.is_empty() {
                        let start = input.start();
                        let lines = start.iter().take_while(|byte| matches!(byte, b'\r' | b'\n'));
                        let lines = lines.count();
                        if lines > 0 {
                            input = input.split(lines as u64).1;
                            continue;
                        }
                        match Opening::of(start) {
                            Opening::Request => {}
                            Opening::Http2 => return self.unsupported(Unsupported::Http2, out),
                            Opening::Tls => return self.unsupported(Unsupported::Tls, out),
                            Opening::Other => return self.broken(out),
                        }
                    }
                    let before = out.trace.is_some().then(|| head.bytes().to_vec());
                    let collected = head.take(input);
                    out.mark(input, collected.rest(), || before.map(Zone::Head));
                    let (read, rest) = match collected {
                        Collected::More => return,
                        Collected::TooLong => return self.broken(out),
                        Collected::Whole(rest) => (RequestHead::read(head), rest),
                        Collected::Cut(rest) => (RequestHead::read_cut(head), rest),
                    };
                    input = rest;
                    match read {
                        Ok(head) => {
                            if !self.request_begun(head, out) {
                                return;
                            }
                        }
                        Err(_) => return self.broken(out),
                    }
                }
            }
        }
    }

    /// Whether a call's bytes begin a request where none is expected: then bytes before it were lost.
    fn find_request(&mut self, start: &[u8], out: &mut Out<'_>) {
        let is_expected = match &self.inward {
            Inward::Lost => false,
            // Its answer is complete, so it is.
            Inward::Body(_) => !self.pending.is_empty(),
            Inward::Head(head) => head.is_empty(),
            Inward::Socket(_) | Inward::Ignored => true,
        };
        if is_expected || !Opening::is_request(start) {
            return;
        }
        if !matches!(self.inward, Inward::Lost) {
            self.broken(out);
        }
        self.inward = Inward::Head(HeadBuffer::default());
        self.outward = Outward::Head(HeadBuffer::default());
    }

    /// A request's head is complete. `false`: the connection can't be followed.
    fn request_begun(&mut self, head: RequestHead, out: &mut Out<'_>) -> bool {
        if self.pending.len() >= MAX_PENDING {
            self.broken(out);
            return false;
        }
        let pending = Pending {
            exchange: out.shared.exchange(),
            endpoint: head.endpoint,
            is_head: head.is_head,
            upgrades: head.upgrades,
            body: None,
            status: 0,
        };
        if pending.is_told() {
            let asked = Note::Asked {
                endpoint: head.endpoint,
                request_id: head.id,
            };
            out.tell(pending.exchange, out.time_ns, asked);
        }
        let body = pending.is_told().then(|| (head.form, request::buffer()));
        self.pending.push_back(Pending { body, ..pending });
        // Where its end is not known it counts as read, for the server does not wait.
        let is_cut = head.body == Body::UntilClose;
        self.inward = Inward::Body(head.body);
        if is_cut || matches!(self.inward, Inward::Body(Body::Length(0))) {
            self.request_told(out);
        }
        if matches!(self.inward, Inward::Body(Body::Length(0))) {
            self.inward = Inward::Head(HeadBuffer::default());
        }
        true
    }

    fn request_read(&mut self, out: &mut Out<'_>) {
        self.inward = Inward::Head(HeadBuffer::default());
        self.request_told(out);
    }

    fn request_told(&mut self, out: &mut Out<'_>) {
        let Some(pending) = self.pending.back_mut() else {
            return;
        };
        if let Some((form, ends)) = pending.body.take() {
            let ask = request::ask(pending.endpoint, form, &ends);
            out.tell(pending.exchange, out.time_ns, Note::Read(ask));
        }
    }

    // ---- to the client ----

    fn sent(&mut self, mut input: Stretch<'_>, out: &mut Out<'_>) {
        self.find_answer(input, out);
        while !input.is_empty() {
            match &mut self.outward {
                Outward::Lost => return,
                Outward::SocketLost(frames) => {
                    if !frames.begins_with_frame(input) {
                        return;
                    }
                    self.outward = Outward::Socket(frames.anew());
                }
                Outward::Socket(frames) => {
                    let mut heard = Vec::new();
                    let trace = out.trace.as_deref_mut();
                    let is_whole = frames.take(out.time_ns, input, &mut heard, trace).is_ok();
                    self.heard(&heard, out);
                    if !is_whole {
                        self.socket_broken(out);
                    }
                    return;
                }
                Outward::Head(head) => {
                    // An answer that nobody is seen to have asked for.
                    let Some(front) = self.pending.front() else {
                        return;
                    };
                    let start = input.start();
                    if head.is_empty() && start.len() >= 12 && !is_answer(start) {
                        return self.broken(out);
                    }
                    let before = out.trace.is_some().then(|| head.bytes().to_vec());
                    let collected = head.take(input);
                    out.mark(input, collected.rest(), || before.map(Zone::Head));
                    let rest = match collected {
                        Collected::More => return,
                        Collected::TooLong | Collected::Cut(_) => return self.broken(out),
                        Collected::Whole(rest) => rest,
                    };
                    input = rest;
                    match AnswerHead::read(head, front.is_head) {
                        Ok(head) => self.answer_begun(head, out),
                        Err(_) => return self.broken(out),
                    }
                }
                Outward::Body { body, content } => {
                    let mut found = Vec::new();
                    let before = input;
                    let step = body.step(&mut input);
                    let at_data = step.data_of(before, input);
                    out.mark(before, at_data, || Some(Zone::Framing));
                    out.mark(at_data, input, || content.zone());
                    match step {
                        Step::Data(data) => content.data(out.time_ns, data, &mut found),
                        Step::ChunkEnd => content.chunk_end(&mut found),
                        Step::End => {}
                        Step::More => return,
                        Step::Broken => return self.broken(out),
                    }
                    self.found(found, out);
                    if step == Step::End {
                        self.answer_complete(out);
                    }
                }
            }
        }
        // An answer may end without any further byte.
        if let Outward::Body { body, .. } = &self.outward
            && matches!(body, Body::Done | Body::Length(0))
        {
            self.answer_complete(out);
        }
    }

    /// Whether a call's bytes begin an answer within another one's body: then the rest of that one was lost.
    fn find_answer(&mut self, input: Stretch<'_>, out: &mut Out<'_>) {
        let is_in_body = match &self.outward {
            Outward::Body { body, .. } => !matches!(body, Body::Done | Body::Length(0)),
            _ => false,
        };
        if is_in_body && self.pending.len() > 1 && is_answer(input.start()) {
            out.shared.counts.breaks += 1;
            self.finish(End::Lost, out);
            self.outward = Outward::Head(HeadBuffer::default());
        }
    }

    fn answer_begun(&mut self, head: AnswerHead, out: &mut Out<'_>) {
        let Some(front) = self.pending.front_mut() else {
            return;
        };
        if head.status == 101 && front.upgrades {
            let endpoint = front.endpoint;
            front.status = head.status;
            self.finish(End::Whole, out);
            return self.upgraded(endpoint, head.is_deflated);
        }
        if (100..200).contains(&head.status) {
            self.outward = Outward::Head(HeadBuffer::default());
            return;
        }
        front.status = head.status;
        let (exchange, is_told) = (front.exchange, front.is_told());
        let content = Content::of(front.endpoint, &head);
        if is_told {
            if head.is_coded {
                out.shared.counts.unsupported(Unsupported::ContentCoding);
            }
            let streams_speech = front.endpoint == Endpoint::Speech
                && head.status == 200
                && head.streams
                && matches!(content, Content::Raw(_) | Content::Events(_));
            let answered = Note::Answered {
                status: head.status,
                streams_speech,
            };
            out.tell(exchange, out.time_ns, answered);
        }
        self.outward = Outward::Body {
            body: head.body,
            content,
        };
    }

    fn answer_complete(&mut self, out: &mut Out<'_>) {
        let outward = std::mem::replace(&mut self.outward, Outward::Head(HeadBuffer::default()));
        let mut failed = false;
        if let Outward::Body { mut content, .. } = outward
            && let Some(front) = self.pending.front()
        {
            let mut found = Vec::new();
            failed = content.end(out.time_ns, front.endpoint, &mut found);
            self.found(found, out);
        }
        self.finish(if failed { End::Failed } else { End::Whole }, out);
        // The body of a request whose head was cut ends with its answer.
        if self.pending.is_empty() && matches!(self.inward, Inward::Body(Body::UntilClose)) {
            self.inward = Inward::Head(HeadBuffer::default());
        }
    }

    fn found(&mut self, found: Vec<Found>, out: &mut Out<'_>) {
        if let Some(front) = self.pending.front()
            && front.is_told()
        {
            for (time_ns, note) in found {
                out.tell(front.exchange, time_ns, note);
            }
        }
    }

    /// The first of the pending requests is over.
    fn finish(&mut self, end: End, out: &mut Out<'_>) {
        let Some(front) = self.pending.pop_front() else {
            return;
        };
        out.shared.counts.request(match end {
            End::Lost => Outcome::Lost,
            End::ClientLeft { .. } => Outcome::ClientLeft,
            End::Cut => Outcome::Cut,
            End::Failed => Outcome::ServerError,
            End::Whole => match front.status {
                400..=499 => Outcome::ClientError,
                500.. => Outcome::ServerError,
                _ => Outcome::Ok,
            },
        });
        if front.is_told() {
            out.tell(front.exchange, out.time_ns, Note::Ended(end));
        }
    }

    // ---- WebSocket ----

    fn upgraded(&mut self, endpoint: Endpoint, is_deflated: bool) {
        if endpoint == Endpoint::Sentence {
            self.inward = Inward::Socket(Frames::of_client(is_deflated));
            self.outward = Outward::Socket(Frames::of_server(is_deflated));
        } else {
            self.inward = Inward::Ignored;
            self.outward = Outward::Lost;
        }
    }

    fn heard(&mut self, heard: &[Heard], out: &mut Out<'_>) {
        for message in heard {
            let (time_ns, said) = match message {
                Heard::Text { time_ns, text } => (*time_ns, Said::text(text)),
                Heard::Inflated { time_ns, text } => (*time_ns, Said::inflated(text.as_deref())),
                Heard::Binary { time_ns, bytes } => (*time_ns, Said::binary(*bytes)),
                Heard::Close => continue,
            };
            match said {
                Said::Start { streams } => {
                    self.end_sentence(End::Lost, out);
                    let exchange = out.shared.exchange();
                    self.sentence = Some(Sentence {
                        exchange,
                        streams,
                        failed: false,
                    });
                    let asked = Note::Asked {
                        endpoint: Endpoint::Sentence,
                        request_id: None,
                    };
                    let answered = Note::Answered {
                        status: 101,
                        streams_speech: streams,
                    };
                    out.tell(exchange, time_ns, asked);
                    out.tell(exchange, time_ns, Note::Read(Ask::default()));
                    out.tell(exchange, time_ns, answered);
                }
                Said::Audio(chunk) => {
                    if let Some(sentence) = self.sentence.as_ref().filter(|sentence| sentence.streams) {
                        out.tell(sentence.exchange, time_ns, Note::Audio(chunk));
                    }
                }
                Said::Error => {
                    if let Some(sentence) = &mut self.sentence {
                        sentence.failed = true;
                    }
                }
                Said::Done { failed } => {
                    let failed = failed || self.sentence.as_ref().is_some_and(|sentence| sentence.failed);
                    self.end_sentence(if failed { End::Failed } else { End::Whole }, out);
                }
                Said::Unclear => {
                    out.shared.counts.breaks += 1;
                    self.end_sentence(End::Lost, out);
                }
                Said::Other => {}
            }
        }
    }

    fn end_sentence(&mut self, end: End, out: &mut Out<'_>) {
        if let Some(sentence) = self.sentence.take() {
            out.tell(sentence.exchange, out.time_ns, Note::Ended(end));
        }
    }

    fn socket_broken(&mut self, out: &mut Out<'_>) {
        out.shared.counts.breaks += 1;
        self.end_sentence(End::Lost, out);
        if let Outward::Socket(frames) = &self.outward {
            self.outward = Outward::SocketLost(frames.anew());
        }
    }

    // ---- ends ----

    /// Bytes were lost: nothing is known until a request begins.
    fn broken(&mut self, out: &mut Out<'_>) {
        out.shared.counts.breaks += 1;
        self.lose(out);
        self.inward = Inward::Lost;
        self.outward = Outward::Lost;
    }

    fn unsupported(&mut self, what: Unsupported, out: &mut Out<'_>) {
        out.shared.counts.unsupported(what);
        self.lose(out);
        self.inward = Inward::Ignored;
        self.outward = Outward::Lost;
    }

    fn lose(&mut self, out: &mut Out<'_>) {
        while !self.pending.is_empty() {
            self.finish(End::Lost, out);
        }
        self.end_sentence(End::Lost, out);
    }

    /// Its end was not seen.
    fn give_up(&mut self, out: &mut Out<'_>) {
        if self.exchanges() > 0 {
            out.shared.counts.breaks += 1;
        }
        self.lose(out);
    }

    fn closed(&mut self, out: &mut Out<'_>) {
        let (end, mid_chunk) = match &mut self.outward {
            Outward::Body { body, content } => {
                let mut found = Vec::new();
                let is_until_close = *body == Body::UntilClose;
                let mid_chunk = !body.is_between_chunks();
                let mut failed = false;
                if is_until_close {
                    if let Some(front) = self.pending.front() {
                        failed = content.end(out.time_ns, front.endpoint, &mut found);
                    }
                } else {
                    content.cut(&mut found);
                }
                self.found(found, out);
                let end = match (is_until_close, failed) {
                    (true, true) => End::Failed,
                    (true, false) => End::Whole,
                    (false, _) => End::Cut,
                };
                (end, mid_chunk)
            }
            Outward::Socket(frames) => (End::Cut, frames.is_mid_message()),
            _ => (End::Cut, false),
        };
        let left = End::ClientLeft { mid_chunk };
        self.finish(if self.client_left { left } else { end }, out);
        let rest = if self.client_left {
            End::ClientLeft { mid_chunk: false }
        } else {
            End::Cut
        };
        while !self.pending.is_empty() {
            self.finish(rest, out);
        }
        self.end_sentence(if self.client_left { left } else { End::Cut }, out);
    }
}
