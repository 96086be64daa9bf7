//! Transfers between stages: pairs what a sender did with what a receiver did, one hop for each payload.
//!
//! Payloads that go through shared memory are paired by key inside their pipeline, in any order of arrival. A get
//! pairs with the put of its key that began before the get was over; both are then forgotten, so a key that is used
//! again starts anew. What stays alone is counted by reason. Transfers that are arranged over ZMQ are in
//! [`pulls`](super::pulls).

use std::sync::Arc;

use super::{
    audio::seconds_between,
    edges::{Edges, Hop, Reason, RequestHop},
    forwards::Forward,
    places::{Place, Places},
    pulls::Pulls,
    records::Connector,
    sink::Sink,
    tracker::Limits,
    waiting::{HopKey, Waiting},
};
use crate::{
    host::identity::{Pipeline, PipelineId},
    metrics::number::as_f64,
    wire::{connector::Key, control::Control, shm::ShmEvent},
};

/// Whether an event of shared memory could be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShmTaken {
    /// It is part of a transfer, or its pipeline has none.
    Known,
    /// No connector's segment.
    Foreign,
    /// Its process, or that one's pipeline, is not watched: the change may still be on its way. Nothing was done.
    Unknown,
}

/// What is known of the transfers of all pipelines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransferCounts {
    /// Payloads and transfers whose other end is awaited.
    pub open: usize,
    /// Hops whose key names other stages than the processes at its ends have.
    pub stage_mismatches: u64,
}

/// The sender's half of a hop.
#[derive(Debug)]
struct Put {
    pid: u32,
    place: Place,
    size: u64,
    start_ns: u64,
    done_ns: u64,
    /// When it is given up, and as what.
    until_ns: u64,
    reason: Reason,
}

/// The receiver's half.
#[derive(Debug)]
struct Get {
    pid: u32,
    place: Place,
    start_ns: u64,
    done_ns: u64,
}

/// The transfers of all pipelines.
#[derive(Debug, Default)]
pub(super) struct Transfers {
    edges: Edges,
    puts: Waiting<Put>,
    gets: Waiting<Get>,
    pulls: Pulls,
}

impl Transfers {
    pub(super) fn counts(&self) -> TransferCounts {
        TransferCounts {
            open: self.puts.len() + self.gets.len() + self.pulls.open(),
            stage_mismatches: self.edges.mismatches(),
        }
    }

    /// Whether hops of requests are kept until they are taken.
    pub(super) fn want_requests(&mut self, wanted: bool) {
        self.edges.requests = wanted.then(Vec::new);
    }

    /// Hops of requests since the last call.
    pub(super) fn take_requests(&mut self) -> Vec<RequestHop> {
        self.edges
            .requests
            .as_mut()
            .map(std::mem::take)
            .unwrap_or_default()
    }

    /// Whether a hop of this pipeline was seen.
    pub(super) fn has_hops(&self, pipeline: PipelineId) -> bool {
        self.edges.has_hops(pipeline)
    }

    pub(super) fn pipeline<S: Sink + ?Sized>(&mut self, pipeline: &Pipeline, sink: &mut S) {
        self.edges.pipeline(pipeline, sink);
    }

    /// A process at `place` did something with the segment of this key.
    pub(super) fn shm<S: Sink + ?Sized>(
        &mut self,
        event: &ShmEvent<'_>,
        key: Key<'_>,
        place: Place,
        places: Places<'_>,
        limits: &Limits,
        sink: &mut S,
    ) {
        if !self.edges.knows(place.pipeline) {
            return;
        }
        self.edges.connect(place.pipeline, key.from_stage);
        let name: Arc<str> = event.name().trim_start_matches('/').into();
        let hop = HopKey::new(place.pipeline, name);
        match *event {
            ShmEvent::Put {
                pid,
                size,
                start_ns,
                done_ns,
                ..
            } => {
                self.edges.connect(place.pipeline, place.stage);
                let put = Put {
                    pid,
                    place,
                    size,
                    start_ns,
                    done_ns,
                    until_ns: done_ns.saturating_add(limits.transfer_timeout_ns),
                    reason: Reason::NeverTaken,
                };
                if self.gets.get(&hop).is_some_and(|get| start_ns <= get.done_ns)
                    && let Some(get) = self.gets.remove(&hop)
                {
                    self.hop(hop.name(), key, &put, &get, places, sink);
                    return;
                }
                // A key has one segment at a time: the older of the two is gone.
                let known = self.puts.remove(&hop);
                let (older, newer) = match known {
                    Some(known) if known.start_ns > start_ns => (Some(put), known),
                    known => (known, put),
                };
                if older.is_some() {
                    skip_put(Reason::KeyReused, sink);
                }
                if self.puts.insert(hop, newer, limits.max_transfers).is_some() {
                    skip_put(Reason::TableFull, sink);
                }
            }
            ShmEvent::Get {
                pid,
                start_ns,
                done_ns,
                ..
            } => {
                let get = Get {
                    pid,
                    place,
                    start_ns,
                    done_ns,
                };
                if self.puts.get(&hop).is_some_and(|put| put.start_ns <= done_ns)
                    && let Some(put) = self.puts.remove(&hop)
                {
                    self.hop(hop.name(), key, &put, &get, places, sink);
                    return;
                }
                if let Some(known) = self.gets.remove(&hop) {
                    self.get_alone(hop.name(), &known, places, sink);
                }
                if let Some((full, get)) = self.gets.insert(hop, get, limits.max_transfers) {
                    self.get_alone(full.name(), &get, places, sink);
                }
            }
            ShmEvent::Unlinked { time_ns, .. } => {
                if self.puts.get(&hop).is_some_and(|put| put.done_ns <= time_ns) {
                    self.puts.remove(&hop);
                    skip_put(Reason::NeverTaken, sink);
                }
            }
        }
    }

    /// A request arrived at a stage, with the output of the one before. Whatever a connector moved of it was seen by
    /// now.
    pub(super) fn forward<S: Sink + ?Sized>(
        &mut self,
        pipeline: PipelineId,
        forward: &Forward,
        places: Places<'_>,
        sink: &mut S,
    ) {
        if let Some(from) = forward.from {
            if self.edges.is_connected(pipeline, from.stage) {
                return;
            }
            let since_ns = forward.forwarded.payload.from_added_ns;
            if !places.see_payloads(pipeline, from.stage, since_ns) {
                Hop::none(Reason::ConnectorNotSeen).skip(sink);
                return;
            }
        }
        let hop = forward.forwarded.hop();
        let (request, connector) = (Some(&*forward.forwarded.request), Connector::Request);
        let (from, to) = (forward.from, forward.to);
        self.edges
            .observe(pipeline, from, to, &hop, request, connector, sink);
    }

    /// The process `pid` sent a control message on `socket`.
    #[expect(clippy::too_many_arguments, reason = "the parts of one frame")]
    pub(super) fn control<S: Sink + ?Sized>(
        &mut self,
        (pid, socket): (u32, u64),
        peer: Option<u32>,
        control: &Control<'_>,
        time_ns: u64,
        place: Place,
        places: Places<'_>,
        limits: &Limits,
        sink: &mut S,
    ) {
        if self.edges.knows(place.pipeline) {
            let mut pulls = self.pulls.with(&mut self.edges, places, limits);
            pulls.control((pid, socket), peer, control, time_ns, place, sink);
        }
    }

    pub(super) fn tick<S: Sink + ?Sized>(
        &mut self,
        now_ns: u64,
        places: Places<'_>,
        limits: &Limits,
        sink: &mut S,
    ) {
        for (_, put) in self.puts.take(|_, put| now_ns >= put.until_ns) {
            skip_put(put.reason, sink);
        }
        let grace_ns = limits.transfer_grace_ns;
        for (hop, get) in self
            .gets
            .take(|_, get| now_ns.saturating_sub(get.done_ns) >= grace_ns)
        {
            self.get_alone(hop.name(), &get, places, sink);
        }
        self.pulls.tick(now_ns, limits, sink);
    }

    /// A process ended. What it had put may still be taken for a while.
    pub(super) fn process_gone<S: Sink + ?Sized>(
        &mut self,
        pid: u32,
        now_ns: u64,
        limits: &Limits,
        sink: &mut S,
    ) {
        let until_ns = now_ns.saturating_add(limits.sender_gone_ns);
        for put in self.puts.values_mut().filter(|put| put.pid == pid) {
            if until_ns < put.until_ns {
                put.until_ns = until_ns;
                put.reason = Reason::SenderGone;
            }
        }
        self.pulls.process_gone(pid, sink);
    }

    pub(super) fn pipeline_gone<S: Sink + ?Sized>(&mut self, pipeline: PipelineId, sink: &mut S) {
        for _ in self.puts.take(|hop, _| hop.pipeline() == pipeline) {
            skip_put(Reason::PipelineEnded, sink);
        }
        for _ in self.gets.take(|hop, _| hop.pipeline() == pipeline) {
            Hop::alone(Err(Reason::PutNotSeen), Err(Reason::PipelineEnded)).skip(sink);
        }
        self.pulls.pipeline_gone(pipeline, sink);
        self.edges.pipeline_gone(pipeline, sink);
    }

    fn hop<S: Sink + ?Sized>(
        &mut self,
        name: &str,
        key: Key<'_>,
        put: &Put,
        get: &Get,
        places: Places<'_>,
        sink: &mut S,
    ) {
        // A get from a store may wait for its object, which nobody receives before it was put.
        let received_ns = if Key::of_object(name).is_some() {
            get.start_ns.max(put.done_ns)
        } else {
            get.start_ns
        };
        let hop = Hop {
            size: Ok(as_f64(put.size)),
            tx: Ok(seconds_between(put.start_ns, put.done_ns)),
            rx: Ok(seconds_between(received_ns, get.done_ns)),
            in_flight: Ok(seconds_between(put.done_ns, get.start_ns)),
        };
        let from = places.again(put.pid, put.place);
        let to = places.again(get.pid, get.place);
        let from = self.edges.end(from, key.from_stage);
        let to = self.edges.end(to, key.to_stage);
        let (pipeline, request, connector) = (put.place.pipeline, Some(key.request_id), connector_of(name));
        self.edges
            .observe(pipeline, from, to, &hop, request, connector, sink);
    }

    /// A get whose put was not seen: the agent came in between, or it is an object of a store that another host has put.
    /// A segment never leaves its host, so a sending stage that has one replica here is the sender.
    fn get_alone<S: Sink + ?Sized>(&mut self, name: &str, get: &Get, places: Places<'_>, sink: &mut S) {
        let Some(key) = key_of(name) else {
            return;
        };
        let pipeline = get.place.pipeline;
        let hop = Hop::alone(
            Err(Reason::PutNotSeen),
            Ok(seconds_between(get.start_ns, get.done_ns)),
        );
        let from = key
            .from_stage
            .filter(|_| Key::of_object(name).is_none())
            .and_then(|stage| places.only_replica(pipeline, stage));
        let to = self.edges.end(places.again(get.pid, get.place), key.to_stage);
        let (request, connector) = (Some(key.request_id), connector_of(name));
        self.edges
            .observe(pipeline, from, to, &hop, request, connector, sink);
    }
}

/// A store's objects have the stages in their names, and shared memory's segments have not.
fn connector_of(name: &str) -> Connector {
    match Key::of_object(name) {
        Some(_) => Connector::Store,
        None => Connector::SharedMemory,
    }
}

/// The key that a segment or object is named by.
pub(super) fn key_of(name: &str) -> Option<Key<'_>> {
    Key::of_object(name).or_else(|| Key::of_segment(name))
}

/// A put that nobody is known to have taken: its size and time are no hop's.
fn skip_put<S: Sink + ?Sized>(reason: Reason, sink: &mut S) {
    for family in [Hop::SIZE, Hop::TX] {
        sink.skip(family, reason.as_str());
    }
}
