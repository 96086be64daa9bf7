//! Typed messages and times to observations: pure state machines for requests, stages and audio.
//!
//! [`Tracker`](tracker::Tracker) takes what the host module found, what the wire module decoded and the passing of
//! time, and writes observations into a [`Sink`](sink::Sink). All times are nanoseconds of `CLOCK_MONOTONIC`.

pub mod audio;
mod book;
mod engine;
mod labels;
pub mod sink;
mod state;
pub mod tracker;
