//! Bytes on the pipeline's sockets to typed messages: pure, borrowed, limited in depth and length, never panicking.

pub mod frame;
pub mod message;
