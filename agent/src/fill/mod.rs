//! The engine's own `/metrics`: read in the background, for what no other source gives, and to compare.
//!
//! [`scrape`] finds where an API server listens ([`address`]), reads its exposition ([`parse`]) and hands it to the
//! reader as a pure value ([`sample`]). [`families::Fill`] then works out what has come since the last one and gives it
//! to the registry as the source of lowest precedence.

pub mod address;
pub mod families;
pub mod parse;
pub mod sample;
pub mod scrape;
