//! Typed messages and times to observations: pure state machines for requests, stages, audio and transfers.
//!
//! [`Tracker`](tracker::Tracker) takes what the host module found, what the wire module decoded and the passing of
//! time, and writes observations into a [`Sink`](sink::Sink). All times are nanoseconds of `CLOCK_MONOTONIC`.

pub mod audio;
mod book;
mod diffusion;
mod edges;
mod engine;
mod forwards;
mod http;
mod images;
mod labels;
mod places;
mod pulls;
pub mod records;
pub mod sink;
mod state;
pub mod stats;
mod streams;
pub mod tracker;
pub mod transfers;
mod waiting;
