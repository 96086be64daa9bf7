//! How the agent is, for /readyz and the status page.

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;

use crate::host::identity::{Change, Pipeline, PipelineId, Process, ProcessKey};

/// Ended processes of a pipeline that are remembered: one that restarts its stages for ever must not fill memory.
const MAX_ENDED: usize = 64;

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

/// What is known, all at one moment.
#[derive(Clone, Debug, Default)]
pub(super) struct State {
    pub(super) tap: TapState,
    pub(super) scanned: bool,
    pub(super) pipelines: BTreeMap<PipelineId, Pipeline>,
    pub(super) processes: BTreeMap<ProcessKey, Member>,
    /// What the newest read of a pipeline's own metrics gave.
    pub(super) engines: BTreeMap<PipelineId, String>,
}

/// A process of a pipeline that is alive.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub(super) process: Process,
    /// It has ended, and no other has taken its role.
    pub(super) ended: bool,
    /// Probes by what they are for: on, or why not.
    pub(super) probes: BTreeMap<&'static str, Result<(), String>>,
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

    /// Pipelines and processes come and go.
    pub fn change(&self, change: &Change) {
        let mut state = self.state.lock();
        match change {
            Change::Pipeline(pipeline) => {
                state.pipelines.insert(pipeline.id, pipeline.clone());
            }
            Change::PipelineGone(id) => {
                state.pipelines.remove(id);
                state.engines.remove(id);
                state.processes.retain(|_, member| member.process.pipeline != *id);
            }
            Change::Process(process) => {
                // Who takes the place of one that has ended.
                state.processes.retain(|_, member| {
                    !(member.ended
                        && (member.process.pipeline, member.process.role) == (process.pipeline, process.role))
                });
                let member = Member {
                    process: process.clone(),
                    ended: false,
                    probes: BTreeMap::new(),
                };
                let known = state.processes.entry(process.key).or_insert(member);
                known.process = process.clone();
            }
            Change::ProcessGone(key) => state.end(*key),
            Change::Payloads { .. } => {}
        }
    }

    /// Probes of a process are on, or why they can't be.
    pub fn probed(&self, key: ProcessKey, probes: &'static str, outcome: Result<(), String>) {
        if let Some(member) = self.state.lock().processes.get_mut(&key) {
            member.probes.insert(probes, outcome);
        }
    }

    /// What the newest read of a pipeline's own metrics gave.
    pub fn set_engine(&self, pipeline: PipelineId, found: String) {
        let mut state = self.state.lock();
        // A read may come after the end of its pipeline.
        if state.pipelines.contains_key(&pipeline) {
            state.engines.insert(pipeline, found);
        }
    }

    /// What is missing until the agent serves all that it can; `None`: it does.
    pub(super) fn not_ready(&self) -> Option<String> {
        self.state.lock().not_ready()
    }

    pub(super) fn state(&self) -> State {
        self.state.lock().clone()
    }
}

impl State {
    fn end(&mut self, key: ProcessKey) {
        let Some(member) = self.processes.get_mut(&key) else {
            return;
        };
        member.ended = true;
        let (pipeline, role) = (member.process.pipeline, member.process.role);
        let of_pipeline = |member: &Member| member.process.pipeline == pipeline;
        let replaced = self
            .processes
            .values()
            .any(|other| !other.ended && of_pipeline(other) && other.process.role == role);
        let ended = self
            .processes
            .values()
            .filter(|m| m.ended && of_pipeline(m))
            .count();
        if replaced || ended > MAX_ENDED {
            self.processes.remove(&key);
        }
    }

    pub(super) fn not_ready(&self) -> Option<String> {
        match &self.tap {
            TapState::Starting => Some("the tap is being loaded".to_owned()),
            TapState::Failed(reason) => Some(format!("the tap does not work: {reason}")),
            TapState::Up | TapState::Off if !self.scanned => {
                Some("the first scan of the host is not done".to_owned())
            }
            TapState::Up | TapState::Off => None,
        }
    }
}
