//! The families: catalogue, registry with expiry, text encoder.

pub mod catalogue;
