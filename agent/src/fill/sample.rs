//! What one read of an engine's `/metrics` gives: pure values, which recordings carry.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::host::identity::PipelineId;

/// One read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EngineSample {
    /// Whose.
    pub pipeline: PipelineId,
    /// The API server started while the agent was watching: what its first read shows has come about since.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_fresh: bool,
    /// What came of it.
    pub outcome: Outcome,
}

/// What came of a read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The children of families that are in the catalogue.
    Read(Vec<EngineChild>),
    /// Nothing, and why.
    Failed(Failure),
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Read(children) => write!(f, "read, {} children", children.len()),
            Self::Failed(failure) => write!(f, "not read: {}", failure.as_str().replace('_', " ")),
        }
    }
}

/// Why nothing was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Failure {
    /// The API server listens nowhere, or it can't be told on which of its sockets.
    NoAddress,
    /// It listens where the agent can't or must not reach it: on loopback of another network namespace.
    OutOfReach,
    /// It serves HTTPS.
    Tls,
    /// It does not take the connection, or breaks it off.
    Connection,
    /// It does not answer in time.
    Timeout,
    /// It asks for a key (401, 403).
    Unauthorized,
    /// It has no `/metrics` (404).
    NotFound,
    /// It answers with another status.
    Status,
    /// The answer is too long.
    TooLong,
    /// The answer is not the text format.
    Malformed,
}

impl Failure {
    /// Value of the label `result`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoAddress => "no_address",
            Self::OutOfReach => "out_of_reach",
            Self::Tls => "tls",
            Self::Connection => "connection",
            Self::Timeout => "timeout",
            Self::Unauthorized => "unauthorized",
            Self::NotFound => "not_found",
            Self::Status => "status",
            Self::TooLong => "too_long",
            Self::Malformed => "malformed",
        }
    }
}

/// A child of one of the engine's families.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EngineChild {
    /// The family's name as in the catalogue.
    pub family: String,
    /// Labels by name, `le` left out.
    pub labels: Vec<(String, String)>,
    /// Its value.
    pub value: Value,
}

/// Value of a child. All numbers are finite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Value {
    /// Of a counter or gauge.
    Number(f64),
    /// Of a histogram.
    Histogram(Buckets),
}

/// A histogram as exposed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Buckets {
    /// Upper bounds, ascending, without `+Inf`, and the observations up to each.
    pub up_to: Vec<(f64, u64)>,
    /// All observations.
    pub count: u64,
    /// Their sum.
    pub sum: f64,
}
