//! Where a process stands in its pipeline: the stage and replica that it works for.

use rustc_hash::FxHashMap;

use super::tracker::Watched;
use crate::host::identity::{PipelineId, Role};

/// How far up a worker's parents its stage is looked for.
const MAX_PARENTS: usize = 8;

/// Stage and replica of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Place {
    pub(super) pipeline: PipelineId,
    pub(super) stage: Option<u32>,
    pub(super) replica: Option<u32>,
}

/// A stage's replica, at one end of an edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct End {
    pub(super) stage: u32,
    pub(super) replica: u32,
}

/// The watched processes, to look places up in.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places<'a>(pub(super) &'a FxHashMap<u32, Watched>);

impl Places<'_> {
    /// Where `pid` stands. A worker stands where its stage does. An API server that moves payloads by itself runs a
    /// diffusion stage inside, of which it then has one replica. `None`: not watched, or its pipeline is not told yet.
    pub(super) fn of(self, pid: u32) -> Option<Place> {
        let mut watched = self.0.get(&pid).filter(|watched| watched.pipeline.is_some())?;
        let pipeline = watched.process.pipeline;
        let nowhere = Place {
            pipeline,
            stage: None,
            replica: None,
        };
        for _ in 0..MAX_PARENTS {
            match watched.process.role {
                Role::LlmStage { stage, replica } | Role::DiffusionStage { stage, replica } => {
                    return Some(Place {
                        stage,
                        replica,
                        ..nowhere
                    });
                }
                Role::ApiServer | Role::ApiWorker { .. } => {
                    return Some(Place {
                        replica: Some(0),
                        ..nowhere
                    });
                }
                Role::Headless | Role::Coordinator => return Some(nowhere),
                Role::Worker => {}
            }
            let parent = self.0.get(&watched.process.parent);
            match parent.filter(|parent| parent.process.pipeline == pipeline) {
                Some(parent) => watched = parent,
                None => break,
            }
        }
        Some(nowhere)
    }

    /// A place that was not fully known when it was looked up may be by now.
    pub(super) fn again(self, pid: u32, known: Place) -> Place {
        if known.stage.is_some() && known.replica.is_some() {
            return known;
        }
        self.of(pid)
            .filter(|place| place.pipeline == known.pipeline)
            .unwrap_or(known)
    }

    /// Whether payloads that the processes of a stage hand on by a connector are seen, and were at `since_ns`.
    pub(super) fn see_payloads(self, pipeline: PipelineId, stage: u32, since_ns: u64) -> bool {
        let mut members = self.0.iter().filter(|(pid, watched)| {
            watched.process.pipeline == pipeline
                && watched.process.role.has_connector()
                && self
                    .of(**pid)
                    .is_some_and(|place| place.stage.is_none_or(|of| of == stage))
        });
        members.all(|(_, watched)| watched.payloads_ns.is_some_and(|from_ns| from_ns <= since_ns))
    }

    /// The replica of a stage that has exactly one on this host.
    pub(super) fn only_replica(self, pipeline: PipelineId, stage: u32) -> Option<End> {
        let mut only = None;
        for watched in self.0.values().filter(|w| w.process.pipeline == pipeline) {
            let (Role::LlmStage { stage: of, replica } | Role::DiffusionStage { stage: of, replica }) =
                watched.process.role
            else {
                continue;
            };
            match (of, replica) {
                (Some(of), Some(replica)) if of == stage => {
                    if only.is_some_and(|only| only != replica) {
                        return None;
                    }
                    only = Some(replica);
                }
                // It may be one of this stage's.
                (None, _) | (_, None) => return None,
                _ => {}
            }
        }
        only.map(|replica| End { stage, replica })
    }
}
