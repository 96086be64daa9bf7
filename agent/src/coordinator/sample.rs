//! What comes from a coordinator: pure values, which recordings carry.

use serde::{Deserialize, Serialize};

use crate::{host::identity::PipelineId, wire::coordinator::ReplicaList};

/// News of a coordinator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CoordinatorSample {
    /// Whose.
    pub pipeline: PipelineId,
    /// What came.
    pub news: News,
}

/// What came from a coordinator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum News {
    /// A list.
    List {
        /// The list.
        list: ReplicaList,
        /// Replicas on this host, by their address: stage and replica of the process that takes requests there.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        local: Vec<(String, u32, Option<u32>)>,
    },
    /// A message that is no list, or bytes that are no message.
    Malformed,
}
