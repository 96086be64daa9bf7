//! Bytes on the pipeline's sockets to typed messages: pure, borrowed, limited in depth and length, never
//! panicking.

pub mod assemble;
pub mod connector;
pub mod control;
pub mod coordinator;
pub mod diffusion;
pub mod engine;
pub mod frame;
pub mod http;
pub mod layout;
pub mod message;
pub mod msgpack;
mod redact;
pub mod shm;
pub mod stat;
pub mod zmtp;

use thiserror::Error;

/// Why a frame could not be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum WireError {
    /// The bytes are not the msgpack that the message is made of.
    #[error(transparent)]
    Msgpack(#[from] msgpack::MsgpackError),
    /// A positional struct of a length that no known layout has, or another one than the versions promise.
    #[error("{what} has {length} elements, which is no known layout{}", Promised(*expected))]
    UnknownLayout {
        /// The struct, by vLLM's name.
        what: &'static str,
        /// Its number of elements.
        length: u32,
        /// The number that the layout of the pipeline's version has; `None` where no version is known.
        expected: Option<u32>,
    },
    /// An enumeration has a value that is not known.
    #[error("{what} has the unknown value {value}")]
    UnknownValue {
        /// The element.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// A map lacks an element that the message is made of.
    #[error("{what} is missing")]
    Missing {
        /// The element.
        what: &'static str,
    },
    /// Bytes are left behind the message.
    #[error("{left} bytes are left behind the message")]
    TrailingBytes {
        /// How many.
        left: u32,
    },
}

struct Promised(Option<u32>);

impl std::fmt::Display for Promised {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(expected) => write!(f, " (its version has {expected})"),
            None => Ok(()),
        }
    }
}
