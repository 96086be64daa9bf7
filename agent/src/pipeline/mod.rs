//! Typed messages and times to observations: pure state machines for requests, stages and audio.

pub mod sink;
