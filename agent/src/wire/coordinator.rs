//! The list of replicas that vLLM-Omni's coordinator publishes as JSON (docs/wire.md, "Coordinator").

use serde::{Deserialize, Serialize};

/// Most replicas of a list.
const MAX_REPLICAS: usize = 4096;
/// Longest address in bytes.
const MAX_ADDRESS: usize = 256;

/// Why a message is no list.
#[derive(Debug, thiserror::Error)]
pub enum CoordinatorError {
    /// It is other JSON, or none.
    #[error("no list of replicas: {0}")]
    Json(#[from] serde_json::Error),
    /// It has too many replicas, too long an address, or a time that is no number.
    #[error("a list of replicas out of bounds")]
    Bounds,
}

/// How a replica is, by the coordinator's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReplicaStatus {
    /// It serves.
    Up,
    /// It was shut down.
    Down,
    /// It failed, or its heartbeat stays away.
    Error,
}

impl ReplicaStatus {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Up, Self::Down, Self::Error];

    /// Value of the label `status`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Down => "down",
            Self::Error => "error",
        }
    }
}

/// A replica of a stage, on any node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replica {
    /// Where it takes requests: `tcp://host:port`. Its identity.
    pub input_addr: String,
    /// Stage.
    pub stage_id: u32,
    /// How it is.
    pub status: ReplicaStatus,
    /// Its unfinished requests, running and waiting; `None`: it has not told yet.
    pub queue_length: Option<u64>,
}

/// A list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReplicaList {
    /// The replicas. vLLM-Omni 0.30 lists those that are up.
    pub replicas: Vec<Replica>,
    /// Wall clock of the coordinator in seconds.
    pub timestamp: f64,
}

/// Reads a list. Fields that are not needed are not looked at.
pub fn parse(message: &[u8]) -> Result<ReplicaList, CoordinatorError> {
    let list: ReplicaList = serde_json::from_slice(message)?;
    let fits = list.replicas.len() <= MAX_REPLICAS
        && list
            .replicas
            .iter()
            .all(|replica| replica.input_addr.len() <= MAX_ADDRESS);
    if fits && list.timestamp.is_finite() {
        Ok(list)
    } else {
        Err(CoordinatorError::Bounds)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    /// As `json.dumps(asdict(...))` of vLLM-Omni 0.30.0 writes it.
    const LIST: &str = r#"{"replicas": [{"input_addr": "tcp://10.0.0.2:5555", "output_addr": "tcp://10.0.0.2:5556",
        "stage_id": 1, "status": "up", "queue_length": 3, "last_heartbeat": 1790000000.5,
        "registered_at": 1790000000.25}], "timestamp": 1790000001.125}"#;

    #[test]
    fn a_list_is_read() {
        let list = parse(LIST.as_bytes()).unwrap();
        assert_eq!(
            list.replicas,
            [Replica {
                input_addr: "tcp://10.0.0.2:5555".to_owned(),
                stage_id: 1,
                status: ReplicaStatus::Up,
                queue_length: Some(3),
            }]
        );
        assert!((list.timestamp - 1_790_000_001.125).abs() < 1e-9);
        assert!(
            parse(br#"{"replicas": [], "timestamp": 0.0}"#)
                .unwrap()
                .replicas
                .is_empty()
        );
    }

    #[rstest]
    #[case::nothing(String::new())]
    #[case::another_object("{}".to_owned())]
    #[case::no_object("[1, 2]".to_owned())]
    #[case::unknown_status(LIST.replace("\"up\"", "\"gone\""))]
    #[case::negative_stage(LIST.replace("\"stage_id\": 1", "\"stage_id\": -1"))]
    #[case::negative_queue(LIST.replace("\"queue_length\": 3", "\"queue_length\": -3"))]
    #[case::no_number(LIST.replace("1790000001.125", "NaN"))]
    #[case::cut(LIST[..100].to_owned())]
    #[case::long_address(LIST.replace("10.0.0.2:5555", &"x".repeat(300)))]
    #[case::deep("[".repeat(100_000))]
    fn other_messages_are_refused(#[case] text: String) {
        assert!(parse(text.as_bytes()).is_err());
    }

    #[test]
    fn too_many_replicas_are_refused() {
        let one = r#"{"input_addr":"a","stage_id":0,"status":"up","queue_length":0}"#;
        let all = vec![one; MAX_REPLICAS + 1].join(",");
        let text = format!(r#"{{"replicas":[{all}],"timestamp":1.0}}"#);
        assert!(matches!(parse(text.as_bytes()), Err(CoordinatorError::Bounds)));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(at in 0_usize..300, to: u8) {
            let mut bytes = LIST.as_bytes().to_vec();
            let at = at % bytes.len();
            bytes[at] = to;
            let _ = parse(&bytes);
        }
    }
}
