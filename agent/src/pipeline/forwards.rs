//! Payloads that travel inside a request: what the orchestrator hands on from one stage to the next by itself.
//!
//! A stage that gets its input from a connector is given the request as well, so an ADD alone is no transfer. It is one
//! if it was sent after the stage before had finished, if no connector is known to move that stage's outputs, and if
//! one that did would have been seen. That is decided when the next stage answers: by then its input has arrived.

use std::sync::Arc;

use super::{
    audio::seconds_between,
    edges::{Hop, Reason},
    places::End,
};
use crate::metrics::number::as_f64;

/// What a request carries to a stage that has not answered yet.
#[derive(Debug)]
pub(super) struct Payload {
    /// Number of the engine whose output it is.
    pub(super) from: u16,
    /// When that one was given the request; 0: not seen.
    pub(super) from_added_ns: u64,
    /// When its last output was sent.
    pub(super) output_ns: u64,
    /// Bytes of the request, with its tensors and arrays.
    pub(super) size: u64,
}

/// A payload that has arrived.
#[derive(Debug)]
pub(super) struct Forwarded {
    /// Id of the request.
    pub(super) request: Arc<str>,
    pub(super) payload: Payload,
    /// Number of the engine that has it.
    pub(super) to: u16,
    /// When the request was sent.
    pub(super) added_ns: u64,
    /// When the engine took it up, in seconds of `CLOCK_MONOTONIC`.
    pub(super) queued: Option<f64>,
}

/// The same, with the ends of its edge.
#[derive(Debug)]
pub(super) struct Forward {
    pub(super) forwarded: Forwarded,
    pub(super) from: Option<End>,
    pub(super) to: Option<End>,
}

impl Forwarded {
    pub(super) fn hop(&self) -> Hop {
        let queued = self.queued.filter(|queued| queued.is_finite());
        Hop {
            size: Ok(as_f64(self.payload.size)),
            tx: Ok(seconds_between(self.payload.output_ns, self.added_ns)),
            rx: Err(Reason::NotOnTheWire),
            in_flight: queued
                .map(|queued| (queued - as_f64(self.added_ns) / 1e9).max(0.0))
                .ok_or(Reason::NotOnTheWire),
        }
    }
}
