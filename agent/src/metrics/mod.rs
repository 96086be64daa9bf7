//! The families: catalogue, registry with expiry, text encoder.
//!
//! One thread writes (the reader, through [`registry::Registry`]), other threads write the agent's own families
//! (through [`own::Own`]), and any number of scrapes read (through [`text::Exposition`]).

pub mod catalogue;
pub mod merge;
pub(crate) mod number;
pub mod own;
pub mod peek;
pub mod registry;
pub mod seen;
mod store;
pub mod text;
