//! Who a process is: keys, roles, pipelines. Pure types, shared with `pipeline` and `record`.

use serde::{Deserialize, Serialize};

/// A process of this host for as long as it lives: a pid alone is reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ProcessKey {
    /// Process id in the initial PID namespace (what BPF programs and an agent with `hostPID` see).
    pub pid: u32,
    /// Start time in clock ticks since boot (`/proc/<pid>/stat` field 22).
    pub start_ticks: u64,
}

/// One pipeline's life on this host. Never reused while the agent runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PipelineId(pub u32);

/// What a process does in its pipeline (docs/wire.md section "Processes").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The API server, with the orchestrator thread of vLLM-Omni in it, or a program that embeds the engine.
    ///
    /// With several API workers it is their launcher: it has the command line, sends the start-up handshakes and
    /// nothing of any request. Only the children tell, so it is tapped like any other.
    ApiServer,
    /// One of several API workers (`VLLM::APIServer_{i}`).
    ApiWorker {
        /// Client index `i`.
        index: u32,
    },
    /// The parent of headless replicas: no HTTP, no orchestrator of its own.
    Headless,
    /// The core process of an LLM (or audio decoding) stage. Plain vLLM's engine core is stage 0.
    LlmStage {
        /// Stage id; `None` where the title does not tell it.
        stage: Option<u32>,
        /// Replica id; plain vLLM: its data-parallel rank.
        replica: Option<u32>,
    },
    /// A diffusion stage in a process of its own.
    DiffusionStage {
        /// Stage id, where evidence tells it.
        stage: Option<u32>,
        /// Replica id, where evidence tells it.
        replica: Option<u32>,
    },
    /// A tensor- or pipeline-parallel worker of a stage: never probed for frames.
    Worker,
    /// Data-parallel coordinator or `OmniCoordinator`.
    Coordinator,
}

impl Role {
    /// Whether the `zmq_msg_send` probe belongs into a process of this role.
    #[must_use]
    pub fn is_tapped(self) -> bool {
        match self {
            Self::ApiServer
            | Self::ApiWorker { .. }
            | Self::LlmStage { .. }
            | Self::DiffusionStage { .. } => true,
            Self::Headless | Self::Worker | Self::Coordinator => false,
        }
    }

    /// Whether a process of this role answers HTTP.
    #[must_use]
    pub fn serves_http(self) -> bool {
        match self {
            Self::ApiServer | Self::ApiWorker { .. } => true,
            Self::Headless
            | Self::LlmStage { .. }
            | Self::DiffusionStage { .. }
            | Self::Worker
            | Self::Coordinator => false,
        }
    }

    /// Whether a process of this role may hand outputs on through shared memory, in a pipeline of vLLM-Omni:
    /// a connector runs in the stage's core or in a worker.
    #[must_use]
    pub fn has_connector(self) -> bool {
        match self {
            Self::LlmStage { .. } | Self::DiffusionStage { .. } | Self::Worker => true,
            Self::ApiServer | Self::ApiWorker { .. } | Self::Headless | Self::Coordinator => false,
        }
    }
}

/// Which software serves a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Flavor {
    /// Plain vLLM: one stage, no `vllm_omni:*` families.
    Vllm,
    /// vLLM-Omni: stages, replicas, orchestrator.
    Omni,
}

/// Package versions of a pipeline, from the metadata beside its mapped libraries (docs/wire.md section "Versions").
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Versions {
    /// vLLM, without a local part: `0.30.0`.
    pub vllm: Option<String>,
    /// vLLM-Omni.
    pub omni: Option<String>,
}

/// A watched process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its identity.
    pub key: ProcessKey,
    /// Parent pid.
    pub parent: u32,
    /// What it does.
    pub role: Role,
    /// The pipeline it belongs to.
    pub pipeline: PipelineId,
    /// Container, where the cgroup path names one. Information only, never a label.
    pub container: Option<Container>,
}

/// A container as its cgroup path tells it (v1, v2 or hybrid).
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Container {
    /// Container id, 64 hex digits as a rule.
    pub id: String,
    /// Kubernetes pod uid with dashes.
    pub pod_uid: Option<String>,
}

/// A pipeline: an API server and its descendants, or the headless replicas of this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pipeline {
    /// Its identity.
    pub id: PipelineId,
    /// Software.
    pub flavor: Flavor,
    /// `model_name` of `vllm_omni:*`: the model argument as given. `None`: unknown.
    pub model: Option<String>,
    /// `model_name` of `vllm:*`: the first served model name, else the model argument.
    pub served_model: Option<String>,
    /// Package versions.
    pub versions: Versions,
    /// `--max-model-len` where the command line gives it; decides the token buckets.
    pub max_model_len: Option<u32>,
    /// The process at the root: API server or headless launcher.
    pub root: ProcessKey,
}

/// A change of what runs here, in the order it was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// A pipeline appeared, or one of its properties became known.
    Pipeline(Pipeline),
    /// A process appeared, or its role became known.
    Process(Process),
    /// A process ended.
    ProcessGone(ProcessKey),
    /// Every process of a pipeline ended.
    PipelineGone(PipelineId),
    /// From now on each payload that a process hands on by a connector is seen, or it need not be: the probes for all
    /// connectors that it has are on, or are not.
    Payloads {
        /// The process.
        key: ProcessKey,
        /// Whether they are seen.
        seen: bool,
    },
}
