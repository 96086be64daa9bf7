//! omnitap: watches model-serving pipelines on a host from outside and serves their Prometheus families.
//!
//! Data goes one way: kernel -> [`tap`] -> [`wire`] -> [`pipeline`] -> [`metrics`] -> [`serve`]. [`host`] tells
//! which process plays which role. [`wire`] and [`pipeline`] are pure: bytes and timestamps in, values out.

pub mod agent;
pub mod check;
pub mod cli;
pub mod config;
pub mod coordinator;
pub mod fill;
pub mod gpu;
pub mod host;
pub mod logging;
pub mod metrics;
pub mod observer;
pub mod pipeline;
pub mod record;
pub mod requests;
pub mod serve;
pub mod statsock;
pub mod tap;
pub mod top;
pub mod wire;
