//! How the agent is, for /readyz and the landing page.

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;

use crate::host::identity::{Pipeline, PipelineId};

/// How the tap is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TapState {
    /// It is being loaded.
    #[default]
    Starting,
    /// It captures.
    Up,
    /// It is switched off.
    Off,
    /// It can't be had, and why.
    Failed(String),
}

/// Shared by the parts that know how they are and the server that says so; clones share it.
#[derive(Clone, Debug, Default)]
pub struct Status {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    tap: TapState,
    scanned: bool,
    pipelines: Vec<Pipeline>,
    /// What the newest read of their own metrics gave.
    engines: BTreeMap<PipelineId, String>,
}

impl Status {
    /// How the tap is now.
    pub fn set_tap(&self, tap: TapState) {
        self.state.lock().tap = tap;
    }

    /// The first look at all processes is done.
    pub fn set_scanned(&self) {
        self.state.lock().scanned = true;
    }

    /// The pipelines that are alive.
    pub fn set_pipelines(&self, pipelines: Vec<Pipeline>) {
        let mut state = self.state.lock();
        state
            .engines
            .retain(|id, _| pipelines.iter().any(|pipeline| pipeline.id == *id));
        state.pipelines = pipelines;
    }

    /// What the newest read of a pipeline's own metrics gave.
    pub fn set_engine(&self, pipeline: PipelineId, found: String) {
        let mut state = self.state.lock();
        // A read may come after the end of its pipeline.
        if state.pipelines.iter().any(|alive| alive.id == pipeline) {
            state.engines.insert(pipeline, found);
        }
    }

    /// See [`Self::set_engine`].
    pub(super) fn engine(&self, pipeline: PipelineId) -> Option<String> {
        self.state.lock().engines.get(&pipeline).cloned()
    }

    /// What is missing until the agent serves all that it can; `None`: it does.
    pub(super) fn not_ready(&self) -> Option<String> {
        let state = self.state.lock();
        match &state.tap {
            TapState::Starting => Some("the tap is being loaded".to_owned()),
            TapState::Failed(reason) => Some(format!("the tap does not work: {reason}")),
            TapState::Up | TapState::Off if !state.scanned => {
                Some("the first scan of the host is not done".to_owned())
            }
            TapState::Up | TapState::Off => None,
        }
    }

    pub(super) fn pipelines(&self) -> Vec<Pipeline> {
        self.state.lock().pipelines.clone()
    }

    pub(super) fn tap(&self) -> TapState {
        self.state.lock().tap.clone()
    }
}
