//! Transfers that a receiver asks for over ZMQ: Mooncake's transfer engine, Mori, NIXL, Yuanrong's transfer engine.
//!
//! A receiver's REQ socket has one question open at a time. The sender's answers go to a number that libzmq gave that
//! socket, and the answer "done" names nothing else. Whose number it is follows from an answer that names the key, or
//! from there being one open transfer of that sender's stage; once known it stays.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::{
    audio::seconds_between,
    edges::{Edges, Hop, Reason},
    places::{Place, Places},
    records::Connector,
    sink::Sink,
    tracker::Limits,
    waiting::{HopKey, Waiting},
};
use crate::{
    host::identity::PipelineId,
    metrics::number::as_f64,
    wire::{connector::Key, control::Control},
};

/// Receiving sockets, and numbers of theirs, that are told apart: far more than workers on one host.
const MAX_SOCKETS: usize = 4096;

/// A process and one of its sockets.
type Socket = (u32, u64);

/// What a receiver asked last.
#[derive(Debug)]
struct Asked {
    place: Place,
    key: Arc<str>,
    time_ns: u64,
    what: What,
}

#[derive(Debug, PartialEq, Eq)]
enum What {
    Query,
    Pull {
        size: u64,
    },
    Claim {
        claim: Box<str>,
    },
    /// It was answered.
    Nothing,
}

impl Asked {
    fn has_queried(&self, key: &str) -> bool {
        self.what == What::Query && *self.key == *key
    }

    fn has_claimed(&self, claim: &str) -> bool {
        matches!(&self.what, What::Claim { claim: known } if **known == *claim)
    }
}

/// Data that a receiver was shown, and has not said to have read: with NIXL and Yuanrong.
#[derive(Debug)]
struct Offered {
    from: (u32, Place),
    /// `None`: its question was not seen, or it is on another host.
    to: Option<u32>,
    size: Option<u64>,
    time_ns: u64,
}

impl Offered {
    /// Nobody said that it was read.
    fn never_read(&self) -> Hop {
        Hop::none(if self.to.is_some() {
            Reason::DoneNotSeen
        } else {
            Reason::ReceiverNotSeen
        })
    }
}

/// The transfers under way.
#[derive(Debug, Default)]
pub(super) struct Pulls {
    asked: FxHashMap<Socket, Asked>,
    /// The receiver's socket behind a number at a sender's socket.
    peers: FxHashMap<(Socket, u32), Socket>,
    /// By the attempt's name, with Yuanrong by the key.
    offered: Waiting<Offered>,
}

/// The same with what is needed to take messages.
pub(super) struct With<'a> {
    pulls: &'a mut Pulls,
    edges: &'a mut Edges,
    places: Places<'a>,
    limits: &'a Limits,
}

impl Pulls {
    /// Transfers that were asked for or offered, and are not over.
    pub(super) fn open(&self) -> usize {
        let pulls = self
            .asked
            .values()
            .filter(|asked| matches!(asked.what, What::Pull { .. }));
        pulls.count() + self.offered.len()
    }

    pub(super) fn with<'a>(
        &'a mut self,
        edges: &'a mut Edges,
        places: Places<'a>,
        limits: &'a Limits,
    ) -> With<'a> {
        With {
            pulls: self,
            edges,
            places,
            limits,
        }
    }

    pub(super) fn tick<S: Sink + ?Sized>(&mut self, now_ns: u64, limits: &Limits, sink: &mut S) {
        let is_over = |time_ns: u64| now_ns.saturating_sub(time_ns) >= limits.transfer_timeout_ns;
        self.forget(Reason::DoneNotSeen, |_, asked| is_over(asked.time_ns), sink);
        for (_, offered) in self.offered.take(|_, offered| is_over(offered.time_ns)) {
            offered.never_read().skip(sink);
        }
    }

    pub(super) fn process_gone<S: Sink + ?Sized>(&mut self, pid: u32, sink: &mut S) {
        self.forget(Reason::ReceiverGone, |socket, _| socket.0 == pid, sink);
        self.peers.retain(|((sender, _), _), _| *sender != pid);
        for _ in self.offered.take(|_, offered| offered.to == Some(pid)) {
            Hop::none(Reason::ReceiverGone).skip(sink);
        }
    }

    pub(super) fn pipeline_gone<S: Sink + ?Sized>(&mut self, pipeline: PipelineId, sink: &mut S) {
        let reason = Reason::PipelineEnded;
        self.forget(reason, |_, asked| asked.place.pipeline == pipeline, sink);
        for _ in self.offered.take(|hop, _| hop.pipeline() == pipeline) {
            Hop::none(reason).skip(sink);
        }
    }

    fn forget<S: Sink + ?Sized>(
        &mut self,
        reason: Reason,
        is_over: impl Fn(&Socket, &Asked) -> bool,
        sink: &mut S,
    ) {
        let before = self.asked.len();
        self.asked.retain(|socket, asked| {
            let over = is_over(socket, asked);
            if over && matches!(asked.what, What::Pull { .. }) {
                Hop::none(reason).skip(sink);
            }
            !over
        });
        if self.asked.len() < before {
            self.peers.retain(|_, socket| self.asked.contains_key(socket));
        }
    }

    /// The one socket for which `is_it` says so.
    fn only(&self, is_it: impl Fn(&Socket, &Asked) -> bool) -> Option<Socket> {
        let mut found = self.asked.iter().filter(|(socket, asked)| is_it(socket, asked));
        let (first, _) = found.next()?;
        found.next().is_none().then_some(*first)
    }

    /// Whether the socket has a number at this sender's socket.
    fn is_bound(&self, sender: Socket, socket: Socket) -> bool {
        self.peers
            .iter()
            .any(|((known, _), other)| *known == sender && *other == socket)
    }

    /// A socket that was closed may have left its address to this one: the newest number counts.
    fn bind(&mut self, sender: Socket, peer: u32, socket: Socket) {
        self.peers
            .retain(|(known, _), other| *known != sender || *other != socket);
        if self.peers.len() < MAX_SOCKETS {
            self.peers.insert((sender, peer), socket);
        }
    }
}

impl With<'_> {
    /// A process at `place` sent `control` on its socket, where it is an answer to `peer`.
    pub(super) fn control<S: Sink + ?Sized>(
        &mut self,
        socket: Socket,
        peer: Option<u32>,
        control: &Control<'_>,
        time_ns: u64,
        place: Place,
        sink: &mut S,
    ) {
        let from_stage = match *control {
            Control::Query { key }
            | Control::Pull { key, .. }
            | Control::Claim { key, .. }
            | Control::Released { key, .. }
            | Control::Read { key } => Key::of_message(key).and_then(|key| key.from_stage),
            Control::Info { .. } | Control::Ready { .. } | Control::Done { .. } | Control::Offer { .. } => {
                place.stage
            }
            Control::Nothing => None,
        };
        self.edges.connect(place.pipeline, from_stage);
        match *control {
            Control::Query { key } => self.ask(socket, key, What::Query, time_ns, place, sink),
            Control::Pull { key, size } => self.ask(socket, key, What::Pull { size }, time_ns, place, sink),
            Control::Claim { key, claim } => {
                let claim = What::Claim { claim: claim.into() };
                self.ask(socket, key, claim, time_ns, place, sink);
            }
            Control::Info { key, .. } => {
                self.answered(socket, peer, place, |asked| asked.has_queried(key));
            }
            Control::Done { written } => self.done(socket, peer, written, time_ns, place, sink),
            Control::Offer { claim, size } => {
                let to = self.answered(socket, peer, place, |asked| asked.has_claimed(claim));
                let offered = Offered {
                    from: (socket.0, place),
                    to,
                    size,
                    time_ns,
                };
                self.offer(claim, offered, sink);
            }
            Control::Ready { key, size } => {
                let to = self.answered(socket, peer, place, |asked| asked.has_queried(key));
                let offered = Offered {
                    from: (socket.0, place),
                    to,
                    size: Some(size),
                    time_ns,
                };
                self.offer(key, offered, sink);
            }
            Control::Released { key, claim } => {
                self.read(key, claim, (socket.0, place), Connector::Nixl, time_ns, sink);
            }
            Control::Read { key } => {
                self.read(
                    key,
                    key,
                    (socket.0, place),
                    Connector::TransferEngine,
                    time_ns,
                    sink,
                );
            }
            Control::Nothing => {}
        }
    }

    fn ask<S: Sink + ?Sized>(
        &mut self,
        socket: Socket,
        key: &str,
        what: What,
        time_ns: u64,
        place: Place,
        sink: &mut S,
    ) {
        let is_known = self.pulls.asked.contains_key(&socket);
        if !is_known && self.pulls.asked.len() >= MAX_SOCKETS {
            if matches!(what, What::Pull { .. }) {
                Hop::none(Reason::TableFull).skip(sink);
            }
            return;
        }
        let asked = Asked {
            place,
            key: key.into(),
            time_ns,
            what,
        };
        // A socket that asks again has had its answer.
        if let Some(before) = self.pulls.asked.insert(socket, asked)
            && matches!(before.what, What::Pull { .. })
        {
            Hop::none(Reason::DoneNotSeen).skip(sink);
        }
    }

    /// The receiver that has its answer now: the one whom it fits (`is_it`).
    fn answered(
        &mut self,
        sender: Socket,
        peer: Option<u32>,
        place: Place,
        is_it: impl Fn(&Asked) -> bool,
    ) -> Option<u32> {
        let is_it = |asked: &Asked| asked.place.pipeline == place.pipeline && is_it(asked);
        let receiver = self.receiver(sender, peer, is_it, true)?;
        self.pulls.asked.get_mut(&receiver)?.what = What::Nothing;
        Some(receiver.0)
    }

    /// A receiver knows where its data is, and can read it.
    fn offer<S: Sink + ?Sized>(&mut self, name: &str, offered: Offered, sink: &mut S) {
        let name = HopKey::new(offered.from.1.pipeline, name.into());
        // With Yuanrong a read that failed begins anew with the question.
        if let Some(known) = self.pulls.offered.remove(&name) {
            known.never_read().skip(sink);
        }
        let max = self.limits.max_transfers;
        if self.pulls.offered.insert(name, offered, max).is_some() {
            Hop::none(Reason::TableFull).skip(sink);
        }
    }

    /// The receiver at `to` has read what was offered under this name.
    fn read<S: Sink + ?Sized>(
        &mut self,
        key: &str,
        name: &str,
        to: (u32, Place),
        connector: Connector,
        time_ns: u64,
        sink: &mut S,
    ) {
        let name = HopKey::new(to.1.pipeline, name.into());
        let Some(offered) = self.pulls.offered.remove(&name) else {
            Hop::none(Reason::OfferNotSeen).skip(sink);
            return;
        };
        let size = offered.size.map(as_f64).ok_or(Reason::FrameCut);
        let rx = seconds_between(offered.time_ns, time_ns);
        self.hop(key, offered.from, to, connector, size, rx, sink);
    }

    /// Who is meant by an answer: whose number it has, else the one whom it fits (`is_it`).
    fn receiver(
        &mut self,
        sender: Socket,
        peer: Option<u32>,
        is_it: impl Fn(&Asked) -> bool,
        by_content: bool,
    ) -> Option<Socket> {
        let known = peer.and_then(|peer| self.pulls.peers.get(&(sender, peer)).copied());
        if let Some(known) = known {
            let fits = self.pulls.asked.get(&known).is_some_and(&is_it);
            return fits.then_some(known);
        }
        let receiver = self
            .pulls
            .only(|socket, asked| is_it(asked) && (by_content || !self.pulls.is_bound(sender, *socket)))?;
        if let Some(peer) = peer {
            self.pulls.bind(sender, peer, receiver);
        }
        Some(receiver)
    }

    fn done<S: Sink + ?Sized>(
        &mut self,
        sender: Socket,
        peer: Option<u32>,
        written: bool,
        time_ns: u64,
        place: Place,
        sink: &mut S,
    ) {
        let is_it = |asked: &Asked| {
            let from = Key::of_message(&asked.key).and_then(|key| key.from_stage);
            matches!(asked.what, What::Pull { .. })
                && asked.place.pipeline == place.pipeline
                && (from.is_none() || place.stage.is_none() || from == place.stage)
        };
        let Some(receiver) = self.receiver(sender, peer, is_it, false) else {
            // With several open transfers each is counted when its socket asks for the next one.
            if !self.pulls.asked.values().any(is_it) {
                Hop::none(Reason::ReceiverNotSeen).skip(sink);
            }
            return;
        };
        let Some(asked) = self.pulls.asked.get_mut(&receiver) else {
            return;
        };
        let What::Pull { size } = std::mem::replace(&mut asked.what, What::Nothing) else {
            return;
        };
        if !written {
            Hop::none(Reason::Failed).skip(sink);
            return;
        }
        let rx = seconds_between(asked.time_ns, time_ns);
        let (key, to) = (Arc::clone(&asked.key), (receiver.0, asked.place));
        let (from, size) = ((sender.0, place), Ok(as_f64(size)));
        self.hop(&key, from, to, Connector::TransferEngine, size, rx, sink);
    }

    /// Such a sender's own part is a copy into its memory, of which no message tells.
    #[expect(clippy::too_many_arguments, reason = "one hop and where it belongs")]
    fn hop<S: Sink + ?Sized>(
        &mut self,
        key: &str,
        (from_pid, from): (u32, Place),
        (to_pid, to): (u32, Place),
        connector: Connector,
        size: Result<f64, Reason>,
        rx: f64,
        sink: &mut S,
    ) {
        let hop = Hop {
            size,
            tx: Err(Reason::NotOnTheWire),
            rx: Ok(rx),
            in_flight: Err(Reason::NotOnTheWire),
        };
        let pipeline = to.pipeline;
        let key = Key::of_message(key);
        let from = self.edges.end(
            self.places.again(from_pid, from),
            key.and_then(|key| key.from_stage),
        );
        let to = self
            .edges
            .end(self.places.again(to_pid, to), key.and_then(|key| key.to_stage));
        let request = key.map(|key| key.request_id);
        self.edges
            .observe(pipeline, from, to, &hop, request, connector, sink);
    }
}
