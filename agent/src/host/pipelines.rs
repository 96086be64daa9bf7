//! Which process plays which role in which pipeline: a pure table over what was seen of each process.
//!
//! Sightings come in any order ([`Table::see`], [`Table::lose`]); [`Table::settle`] then works out every role anew
//! and tells what changed. Few processes of a host are candidates, so working all of them out again costs
//! microseconds and leaves no second, incremental way of reaching a state.
//!
//! A process keeps its pipeline for life, even when its parent dies and it is handed to another one.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::Duration,
};

use super::{
    diffusion::{self, Given, Known},
    identity::{Change, Container, Flavor, Pipeline, PipelineId, Process, ProcessKey, Role, Versions},
    role::{self, Hint, Serve},
};

/// Clock ticks a second in `/proc/<pid>/stat`: `USER_HZ`, fixed at 100 on every architecture that aya runs on.
pub const TICKS_PER_SECOND: u64 = 100;

/// After this age a fork that still shows its parent's argv has no title to come. An engine core that is forked
/// sets its title within milliseconds; only the `OmniCoordinator` never does.
const FORK_AGE: Duration = Duration::from_secs(5);

/// After this age no process is expected to get a title any more.
pub const TITLE_AGE: Duration = Duration::from_mins(2);

/// Longest chain of parents followed.
const MAX_DEPTH: usize = 64;

/// Up to this age of a process, versions are looked for at each look at it: an import takes minutes on a busy host.
/// Later its first look must do; some are never found (static builds, exotic layouts).
const VERSION_AGE: Duration = Duration::from_mins(10);

/// How old a process is at a time since boot.
#[must_use]
pub fn age(key: &ProcessKey, now: Duration) -> Duration {
    now.saturating_sub(Duration::from_millis(
        key.start_ticks.saturating_mul(1000 / TICKS_PER_SECOND),
    ))
}

/// What one look at a process shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sighting {
    /// Its identity.
    pub key: ProcessKey,
    /// Parent pid.
    pub parent: u32,
    /// Session id. Children of a launcher stay in its session when it dies.
    pub session: u32,
    /// `comm`, at most 15 bytes: the name of the main thread.
    pub comm: String,
    /// Command line, empty parts left out.
    pub args: Vec<String>,
}

/// What the table asks for beyond sightings, only where a role or a property hangs on it.
pub trait Evidence {
    /// Parent of a process that is no candidate.
    fn parent(&self, pid: u32) -> Option<u32>;
    /// A look at a process that is no candidate.
    fn sight(&self, pid: u32) -> Option<Sighting>;
    /// Whether libzmq, or the extension that contains it, is mapped.
    fn maps_zmq(&self, key: ProcessKey) -> bool;
    /// Whether libzmq runs in a process: a context is open and has its threads.
    fn runs_zmq(&self, key: ProcessKey) -> bool;
    /// The container that a process runs in.
    fn container(&self, key: ProcessKey) -> Option<Container>;
    /// The package versions beside what a process has mapped.
    fn versions(&self, key: ProcessKey) -> Versions;
}

#[derive(Debug)]
struct Candidate {
    sighting: Sighting,
    hint: Hint,
    /// Seen since the last [`Table::settle`].
    fresh: bool,
}

/// Where a process belongs.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// In a pipeline.
    In(Role, PipelineId),
    /// Not clear yet: a title may still come.
    Pending,
    /// Nowhere.
    Out,
}

/// Processes and pipelines of this host.
#[derive(Debug, Default)]
pub struct Table {
    candidates: BTreeMap<u32, Candidate>,
    processes: HashMap<ProcessKey, Process>,
    pipelines: BTreeMap<PipelineId, Pipeline>,
    pending: BTreeSet<u32>,
    next_id: u32,
    given: Vec<Given>,
}

impl Table {
    /// An empty table; `given` are places of diffusion stages from the configuration.
    #[must_use]
    pub fn new(given: Vec<Given>) -> Self {
        Self {
            given,
            ..Self::default()
        }
    }

    /// Takes a look at a process, new or known; returns whether it is a candidate for a role.
    pub fn see(&mut self, sighting: Sighting) -> bool {
        let pid = sighting.key.pid;
        let mut hint = role::classify(&sighting.args);
        let was = self.candidates.remove(&pid);
        // An embedder of an engine is known by its children, not by its own argv.
        if let (Hint::Other | Hint::Spawned, Some(was)) = (&hint, was)
            && matches!(was.hint, Hint::Server(_))
            && was.sighting.key == sighting.key
            && was.sighting.args == sighting.args
        {
            hint = was.hint;
        }
        if hint == Hint::Other {
            return false;
        }
        self.candidates.insert(
            pid,
            Candidate {
                sighting,
                hint,
                fresh: true,
            },
        );
        true
    }

    /// A process ended.
    pub fn lose(&mut self, pid: u32) {
        self.candidates.remove(&pid);
    }

    /// Whether a process is a candidate for a role.
    #[must_use]
    pub fn is_candidate(&self, pid: u32) -> bool {
        self.candidates.contains_key(&pid)
    }

    /// Whether the role of a process is still open, so that it should be looked at again soon.
    #[must_use]
    pub fn is_pending(&self, pid: u32) -> bool {
        self.pending.contains(&pid)
    }

    /// Whether a process has a role.
    #[must_use]
    pub fn is_member(&self, pid: u32) -> bool {
        self.candidates
            .get(&pid)
            .is_some_and(|seen| self.processes.contains_key(&seen.sighting.key))
    }

    /// The processes that have a role, in no order.
    pub fn processes(&self) -> impl Iterator<Item = &Process> {
        self.processes.values()
    }

    /// The pipelines, oldest first.
    pub fn pipelines(&self) -> impl Iterator<Item = &Pipeline> {
        self.pipelines.values()
    }

    /// Works out every role; `now` is the time since boot. Ends come before beginnings, a pipeline before its
    /// processes, a parent before its children.
    pub fn settle(&mut self, now: Duration, evidence: &impl Evidence) -> Vec<Change> {
        self.adopt_embedders(evidence);
        let mut round = Round {
            candidates: &self.candidates,
            processes: &self.processes,
            pipelines: &self.pipelines,
            next_id: &mut self.next_id,
            places: HashMap::new(),
            orphans: HashMap::new(),
            now,
            evidence,
        };
        for &pid in self.candidates.keys() {
            round.place(pid, 0);
        }
        let places = round.places;
        self.pending = places
            .iter()
            .filter(|(_, place)| matches!(place, Place::Pending))
            .map(|(&pid, _)| pid)
            .collect();

        let mut members: BTreeMap<PipelineId, Vec<(&Candidate, Role)>> = BTreeMap::new();
        for (pid, candidate) in &self.candidates {
            if let Some(&Place::In(role, id)) = places.get(pid) {
                members.entry(id).or_default().push((candidate, role));
            }
        }
        let mut changes = ends(&self.processes, &self.pipelines, &members);
        for (id, mut members) in members {
            members.sort_by_key(|(seen, _)| (seen.sighting.key.start_ticks, seen.sighting.key.pid));
            self.place_diffusion(id, &mut members, now);
            let was = self.pipelines.get(&id);
            let Some(mut pipeline) = describe(id, &members, was) else {
                continue;
            };
            if !is_complete(&pipeline) {
                // A stage has more of vLLM mapped than an API server, and it is the younger one.
                let asked = members
                    .iter()
                    .rev()
                    .map(|(seen, role)| (seen, role, seen.sighting.key))
                    .find(|(seen, role, key)| {
                        let is_new = !self.processes.contains_key(key);
                        role.is_tapped() && seen.fresh && (is_new || age(key, now) < VERSION_AGE)
                    });
                if let Some((_, _, key)) = asked {
                    let found = evidence.versions(key);
                    let Versions { vllm, omni } = &mut pipeline.versions;
                    *vllm = found.vllm.or(vllm.take());
                    *omni = found.omni.or(omni.take());
                }
            }
            if was != Some(&pipeline) {
                changes.push(Change::Pipeline(pipeline.clone()));
                self.pipelines.insert(id, pipeline);
            }
            for (seen, role) in members {
                let key = seen.sighting.key;
                let was = self.processes.get(&key);
                // A first look may come too early, or fail: one without a container is asked again.
                let container = was.and_then(|was| was.container.clone());
                let container = container.or_else(|| if seen.fresh { evidence.container(key) } else { None });
                let process = Process {
                    key,
                    parent: seen.sighting.parent,
                    role,
                    pipeline: id,
                    container,
                };
                if was != Some(&process) {
                    changes.push(Change::Process(process.clone()));
                    self.processes.insert(key, process);
                }
            }
        }
        for change in &changes {
            match change {
                Change::ProcessGone(key) => drop(self.processes.remove(key)),
                Change::PipelineGone(id) => drop(self.pipelines.remove(id)),
                Change::Pipeline(_) | Change::Process(_) | Change::Payloads { .. } => {}
            }
        }
        for seen in self.candidates.values_mut() {
            seen.fresh = false;
        }
        changes
    }

    /// Tells the stages of a pipeline's diffusion processes, once no child of a server is left that may yet turn out to
    /// be an LLM stage. `members` are in the order of their start.
    fn place_diffusion(&self, id: PipelineId, members: &mut [(&Candidate, Role)], now: Duration) {
        let is_diffusion = |role: &Role| matches!(role, Role::DiffusionStage { .. });
        if !members.iter().any(|(_, role)| is_diffusion(role)) {
            return;
        }
        let is_server = |pid: u32| {
            members.iter().any(|(seen, role)| {
                seen.sighting.key.pid == pid
                    && matches!(role, Role::ApiServer | Role::ApiWorker { .. } | Role::Headless)
            })
        };
        let is_open = self.pending.iter().any(|pid| {
            self.candidates.get(pid).is_some_and(|child| {
                is_server(child.sighting.parent) && age(&child.sighting.key, now) < TITLE_AGE
            })
        });
        if is_open {
            return;
        }
        let root = self
            .pipelines
            .get(&id)
            .map(|pipeline| pipeline.root)
            .or_else(|| members.first().map(|(seen, _)| seen.sighting.key));
        let root = members.iter().find(|(seen, _)| Some(seen.sighting.key) == root);
        let mut known = Known::default();
        if let Some((seen, role)) = root {
            known.is_headless = *role == Role::Headless;
            known.has_server = is_server(seen.sighting.key.pid);
            if let Hint::Server(serve) = &seen.hint {
                known.stage = serve.stage;
            }
            let command_line = seen.sighting.args.join(" ");
            if let Some(given) = self.given.iter().find(|g| command_line.contains(&g.pattern)) {
                known.given = &given.places;
            }
        }
        known.llm = members
            .iter()
            .filter_map(|(_, role)| match role {
                Role::LlmStage { stage, .. } => *stage,
                _ => None,
            })
            .collect();
        diffusion::settle(members.iter_mut().map(|(_, role)| role).collect(), &known);
    }

    /// Whether a process, or one above it, has a role by its own title or argv.
    fn is_below_server(&self, pid: u32, evidence: &impl Evidence) -> bool {
        let mut pid = Some(pid);
        for _ in 0..MAX_DEPTH {
            let Some(at) = pid else { return false };
            pid = match self.candidates.get(&at) {
                Some(Candidate {
                    hint: Hint::Spawned,
                    sighting,
                    ..
                }) => Some(sighting.parent),
                Some(_) => return true,
                None => evidence.parent(at),
            };
        }
        false
    }

    /// The parent of an engine core that is no server by its argv is a program that embeds the engine (offline
    /// inference, another framework's worker), if it has libzmq to talk to it. A launcher that is gone has left
    /// its engines to an init or a supervisor, which has not.
    fn adopt_embedders(&mut self, evidence: &impl Evidence) {
        let parents: BTreeSet<u32> = self
            .candidates
            .values()
            .filter(|seen| {
                seen.fresh && matches!(seen.hint, Hint::EngineCore { .. } | Hint::StageCore { .. })
            })
            .filter(|seen| !self.processes.contains_key(&seen.sighting.key))
            .map(|seen| seen.sighting.parent)
            .filter(|&parent| !self.is_below_server(parent, evidence))
            .collect();
        for parent in parents {
            if let Some(sighting) = evidence.sight(parent)
                && evidence.maps_zmq(sighting.key)
            {
                let hint = Hint::Server(role::embedder(&sighting.args));
                self.candidates.insert(
                    parent,
                    Candidate {
                        sighting,
                        hint,
                        fresh: true,
                    },
                );
            }
        }
    }
}

/// What ended: published processes and pipelines that have no member any more.
fn ends(
    processes: &HashMap<ProcessKey, Process>,
    pipelines: &BTreeMap<PipelineId, Pipeline>,
    members: &BTreeMap<PipelineId, Vec<(&Candidate, Role)>>,
) -> Vec<Change> {
    let alive: BTreeSet<ProcessKey> = members
        .values()
        .flatten()
        .map(|(seen, _)| seen.sighting.key)
        .collect();
    let mut gone: Vec<ProcessKey> = processes
        .keys()
        .filter(|key| !alive.contains(key))
        .copied()
        .collect();
    gone.sort_unstable();
    let ended = pipelines.keys().filter(|id| !members.contains_key(id)).copied();
    gone.into_iter()
        .map(Change::ProcessGone)
        .chain(ended.map(Change::PipelineGone))
        .collect()
}

/// Whether all versions that the pipeline should have are known.
fn is_complete(pipeline: &Pipeline) -> bool {
    pipeline.versions.vllm.is_some() && (pipeline.flavor == Flavor::Vllm || pipeline.versions.omni.is_some())
}

/// A pipeline's properties, from its members (oldest first) and from what was known before.
fn describe(id: PipelineId, members: &[(&Candidate, Role)], was: Option<&Pipeline>) -> Option<Pipeline> {
    let root = match was {
        Some(was) => was.root,
        None => members.first()?.0.sighting.key,
    };
    let serve = members
        .iter()
        .filter(|(seen, _)| seen.sighting.key == root)
        .find_map(|(seen, _)| match &seen.hint {
            Hint::Server(serve) => Some(serve),
            _ => None,
        });
    // A root that is gone, or that inline diffusion has renamed, was read while it had its argv, if ever.
    let (model, served_model, max_model_len) = match (serve, was) {
        (Some(serve), _) => {
            let served = serve.served_model.clone().or_else(|| serve.model.clone());
            (serve.model.clone(), served, serve.max_model_len)
        }
        (None, Some(was)) => (was.model.clone(), was.served_model.clone(), was.max_model_len),
        (None, None) => (None, None, None),
    };
    // Packages beside the engine are no evidence: plain `vllm serve` runs with vLLM-Omni installed, too.
    let omni = was.is_some_and(|was| was.flavor == Flavor::Omni)
        || serve.is_some_and(|serve| serve.omni)
        || members
            .iter()
            .any(|(seen, _)| matches!(seen.hint, Hint::StageCore { .. } | Hint::DiffusionWorker { .. }));
    Some(Pipeline {
        id,
        flavor: if omni { Flavor::Omni } else { Flavor::Vllm },
        model,
        served_model,
        versions: was.map(|was| was.versions.clone()).unwrap_or_default(),
        max_model_len,
        root,
    })
}

/// One pass over all candidates.
struct Round<'a, E> {
    candidates: &'a BTreeMap<u32, Candidate>,
    processes: &'a HashMap<ProcessKey, Process>,
    pipelines: &'a BTreeMap<PipelineId, Pipeline>,
    next_id: &'a mut u32,
    places: HashMap<u32, Place>,
    /// New pipelines of engines without a launcher, by session.
    orphans: HashMap<u32, PipelineId>,
    now: Duration,
    evidence: &'a E,
}

impl<E: Evidence> Round<'_, E> {
    fn place(&mut self, pid: u32, depth: usize) -> Place {
        if let Some(&place) = self.places.get(&pid) {
            return place;
        }
        let Some(seen) = self.candidates.get(&pid) else {
            return Place::Out;
        };
        if depth > MAX_DEPTH {
            return Place::Out;
        }
        // A loop of parents cannot happen at one moment, but looks are taken one after the other.
        self.places.insert(pid, Place::Out);
        let place = self.work_out(seen, depth);
        self.places.insert(pid, place);
        place
    }

    fn work_out(&mut self, seen: &Candidate, depth: usize) -> Place {
        let key = seen.sighting.key;
        let was = self.processes.get(&key).map(|was| (was.role, was.pipeline));
        let above = self
            .above(seen, depth)
            .map(|(pid, role, id)| (pid, role, was.map_or(id, |(_, home)| home)));
        let home = was.map(|(_, id)| id).or(above.map(|(_, _, id)| id));
        match &seen.hint {
            Hint::Server(serve) => self.server(seen, serve, was, above),
            &Hint::ApiWorker { index } => self.root_or(home, seen, Role::ApiWorker { index }),
            &Hint::EngineCore { rank } => self.root_or(
                home,
                seen,
                Role::LlmStage {
                    stage: Some(0),
                    replica: Some(rank),
                },
            ),
            &Hint::StageCore { stage, replica } => {
                self.root_or(home, seen, Role::LlmStage { stage, replica })
            }
            Hint::Worker => home.map_or(Place::Out, |id| Place::In(Role::Worker, id)),
            Hint::DpCoordinator => home.map_or(Place::Out, |id| Place::In(Role::Coordinator, id)),
            &Hint::DiffusionWorker { ranked } => self.diffusion_worker(seen, ranked, was, above),
            Hint::Spawned => self.spawned(seen, was, above),
            Hint::Other => Place::Out,
        }
    }

    /// The nearest ancestor that has a place.
    fn above(&mut self, seen: &Candidate, depth: usize) -> Option<(u32, Role, PipelineId)> {
        let mut pid = seen.sighting.parent;
        let mut start = seen.sighting.key.start_ticks;
        for step in 0..MAX_DEPTH {
            if let Some(parent) = self.candidates.get(&pid) {
                // A parent that is younger than its child is another process with the same pid.
                if parent.sighting.key.start_ticks > start {
                    return None;
                }
                start = parent.sighting.key.start_ticks;
                if let Place::In(role, id) = self.place(pid, depth + step + 1) {
                    return Some((pid, role, id));
                }
                pid = parent.sighting.parent;
            } else {
                pid = self.evidence.parent(pid)?;
            }
        }
        None
    }

    fn fresh_id(&mut self) -> PipelineId {
        let id = PipelineId(*self.next_id);
        *self.next_id = self.next_id.wrapping_add(1);
        id
    }

    /// In a pipeline that is known, or the root of one. Engines that lost their launcher before they were first
    /// seen stay together by their session.
    fn root_or(&mut self, home: Option<PipelineId>, seen: &Candidate, role: Role) -> Place {
        let session = seen.sighting.session;
        let known = home.or_else(|| self.orphans.get(&session).copied());
        let id = known.unwrap_or_else(|| {
            let id = self.fresh_id();
            self.orphans.insert(session, id);
            id
        });
        Place::In(role, id)
    }

    fn server(
        &mut self,
        seen: &Candidate,
        serve: &Serve,
        was: Option<(Role, PipelineId)>,
        above: Option<(u32, Role, PipelineId)>,
    ) -> Place {
        if let Some((Role::Coordinator, id)) = was {
            return Place::In(Role::Coordinator, id);
        }
        let fork_of = above.filter(|(pid, ..)| {
            self.candidates
                .get(pid)
                .is_some_and(|parent| parent.sighting.args == seen.sighting.args)
        });
        if let Some((_, _, id)) = fork_of {
            return if age(&seen.sighting.key, self.now) < FORK_AGE {
                Place::Pending
            } else if serve.omni {
                // Only its sockets would tell the coordinator from another fork; neither is probed.
                Place::In(Role::Coordinator, id)
            } else {
                Place::Out
            };
        }
        let role = if serve.headless {
            Role::Headless
        } else {
            Role::ApiServer
        };
        let id = was.map_or_else(|| self.fresh_id(), |(_, id)| id);
        Place::In(role, id)
    }

    /// A diffusion engine with one device runs its worker in its own process and takes the worker's title, so that
    /// title says which role the process had before: API server (inline diffusion) or diffusion stage.
    fn diffusion_worker(
        &mut self,
        seen: &Candidate,
        ranked: bool,
        was: Option<(Role, PipelineId)>,
        above: Option<(u32, Role, PipelineId)>,
    ) -> Place {
        const STAGE: Role = Role::DiffusionStage {
            stage: None,
            replica: None,
        };
        // What was known before the title came is the best evidence.
        if let Some((role @ (Role::ApiServer | Role::DiffusionStage { .. }), id)) = was {
            return Place::In(role, id);
        }
        match above {
            // Workers in processes of their own are children of the stage, or have ranks.
            Some((pid, Role::ApiServer | Role::ApiWorker { .. } | Role::Headless, id))
                if !ranked && pid == seen.sighting.parent =>
            {
                Place::In(STAGE, id)
            }
            Some((_, _, id)) => Place::In(Role::Worker, id),
            None if ranked || !seen.fresh || !self.evidence.maps_zmq(seen.sighting.key) => {
                was.map_or(Place::Out, |(role, id)| Place::In(role, id))
            }
            None => {
                // An API server loads its engine in a thread of its own, so `comm`, the name of the main thread,
                // stays what it was. A stage that lost its parent may look alike, but it ends with its parent.
                let renamed = seen.sighting.comm.contains("::");
                let role = if renamed { STAGE } else { Role::ApiServer };
                self.root_or(was.map(|(_, id)| id), seen, role)
            }
        }
    }

    /// A child of Python's `multiprocessing` without a title: a diffusion stage, or anything else on its way to a
    /// title.
    fn spawned(
        &self,
        seen: &Candidate,
        was: Option<(Role, PipelineId)>,
        above: Option<(u32, Role, PipelineId)>,
    ) -> Place {
        if let Some((role, id)) = was {
            return Place::In(role, id);
        }
        let Some((pid, Role::ApiServer | Role::ApiWorker { .. } | Role::Headless, id)) = above else {
            return above.map_or(Place::Out, |_| Place::Pending);
        };
        let omni = self
            .pipelines
            .get(&id)
            .is_some_and(|known| known.flavor == Flavor::Omni)
            || self
                .candidates
                .get(&pid)
                .is_some_and(|root| matches!(&root.hint, Hint::Server(serve) if serve.omni));
        let has_workers = || {
            self.candidates.values().any(|child| {
                child.sighting.parent == seen.sighting.key.pid
                    && matches!(child.hint, Hint::DiffusionWorker { .. })
            })
        };
        // Cores, API workers and coordinators set their title before they open a socket. They may import for minutes
        // before that, so age alone tells nothing.
        if omni && (has_workers() || (seen.fresh && self.evidence.runs_zmq(seen.sighting.key))) {
            return Place::In(
                Role::DiffusionStage {
                    stage: None,
                    replica: None,
                },
                id,
            );
        }
        Place::Pending
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, collections::HashSet};

    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    /// What /proc would say beyond sightings.
    #[derive(Default)]
    struct Facts {
        others: HashMap<u32, Sighting>,
        zmq: HashSet<u32>,
        sockets: HashSet<u32>,
        versions: HashMap<u32, Versions>,
        containers: HashMap<u32, Container>,
        asked: RefCell<Vec<u32>>,
    }

    impl Evidence for Facts {
        fn parent(&self, pid: u32) -> Option<u32> {
            self.others.get(&pid).map(|seen| seen.parent)
        }
        fn sight(&self, pid: u32) -> Option<Sighting> {
            self.others.get(&pid).cloned()
        }
        fn maps_zmq(&self, key: ProcessKey) -> bool {
            self.zmq.contains(&key.pid)
        }
        fn runs_zmq(&self, key: ProcessKey) -> bool {
            self.sockets.contains(&key.pid)
        }
        fn container(&self, key: ProcessKey) -> Option<Container> {
            self.containers.get(&key.pid).cloned()
        }
        fn versions(&self, key: ProcessKey) -> Versions {
            self.asked.borrow_mut().push(key.pid);
            self.versions.get(&key.pid).cloned().unwrap_or_default()
        }
    }

    const SPAWN: &str = "python3|-c|from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)|--multiprocessing-fork";
    const OMNI: &str = "python3|/venv/bin/vllm-omni|serve|org/m|--omni|--served-model-name|m|alias";

    /// A process with this pid, parent and command line (`|` for NUL), that started at `pid` seconds after boot.
    fn sighting(pid: u32, parent: u32, cmdline: &str) -> Sighting {
        let args: Vec<String> = cmdline.split('|').map(str::to_owned).collect();
        let comm = args[0].chars().take(15).collect();
        let key = ProcessKey {
            pid,
            start_ticks: u64::from(pid) * TICKS_PER_SECOND,
        };
        Sighting {
            key,
            parent,
            session: 1,
            comm,
            args,
        }
    }

    /// A table that has seen these (pid, parent, command line), and what it told.
    struct World {
        table: Table,
        facts: Facts,
        now: Duration,
    }

    impl World {
        fn new(processes: &[(u32, u32, &str)]) -> (Self, Vec<Change>) {
            let facts = Facts {
                zmq: (1..10_000).collect(),
                ..Facts::default()
            };
            let mut world = Self {
                table: Table::default(),
                facts,
                now: Duration::from_secs(100_000),
            };
            let changes = world.see(processes);
            (world, changes)
        }

        fn see(&mut self, processes: &[(u32, u32, &str)]) -> Vec<Change> {
            for &(pid, parent, cmdline) in processes {
                let seen = sighting(pid, parent, cmdline);
                if !self.table.see(seen.clone()) {
                    self.facts.others.insert(pid, seen);
                }
            }
            self.settle()
        }

        fn lose(&mut self, pid: u32) -> Vec<Change> {
            self.table.lose(pid);
            self.facts.others.remove(&pid);
            self.settle()
        }

        fn settle(&mut self) -> Vec<Change> {
            self.table.settle(self.now, &self.facts)
        }

        fn role(&self, pid: u32) -> Option<Role> {
            self.table
                .processes()
                .find(|process| process.key.pid == pid)
                .map(|process| process.role)
        }

        fn home(&self, pid: u32) -> Option<u32> {
            self.table
                .processes()
                .find(|process| process.key.pid == pid)
                .map(|process| process.pipeline.0)
        }

        fn pipeline(&self, id: u32) -> &Pipeline {
            self.table
                .pipelines()
                .find(|pipeline| pipeline.id.0 == id)
                .expect("a pipeline with this id")
        }
    }

    const fn stage(stage: u32, replica: u32) -> Role {
        Role::LlmStage {
            stage: Some(stage),
            replica: Some(replica),
        }
    }

    /// A diffusion stage where there is no other stage.
    const DIFFUSION: Option<Role> = Some(diffusion(0, 0));

    const fn diffusion(stage: u32, replica: u32) -> Role {
        Role::DiffusionStage {
            stage: Some(stage),
            replica: Some(replica),
        }
    }

    #[test]
    fn omni_pipeline_with_two_stages() {
        let (world, changes) = World::new(&[
            // In any order: children may be listed before their parents.
            (300, 100, "VLLM::StageEngineCoreProc_stage1_replica0_DP0"),
            (100, 50, OMNI),
            (200, 100, "VLLM::StageEngineCoreProc_stage0_replica0_DP0"),
            (
                150,
                100,
                "python3|-c|from multiprocessing.resource_tracker import main;main(41)",
            ),
            (250, 200, "VLLM::Worker_TP0"),
        ]);
        let told: Vec<String> = changes
            .iter()
            .map(|change| match change {
                Change::Pipeline(pipeline) => format!("pipeline {} of {}", pipeline.id.0, pipeline.root.pid),
                Change::Process(process) => format!("process {}", process.key.pid),
                other => format!("{other:?}"),
            })
            .collect();
        assert_eq!(
            told,
            [
                "pipeline 0 of 100",
                "process 100",
                "process 200",
                "process 250",
                "process 300"
            ]
        );
        assert_eq!(world.role(100), Some(Role::ApiServer));
        assert_eq!(world.role(200), Some(stage(0, 0)));
        assert_eq!(world.role(250), Some(Role::Worker));
        assert_eq!(world.role(300), Some(stage(1, 0)));
        let pipeline = world.pipeline(0);
        assert_eq!(pipeline.flavor, Flavor::Omni);
        assert_eq!(pipeline.model.as_deref(), Some("org/m"));
        assert_eq!(pipeline.served_model.as_deref(), Some("m"));
    }

    #[test]
    fn plain_vllm_with_data_parallel_engines_and_api_workers() {
        let (world, _) = World::new(&[
            (
                100,
                50,
                "python3|/usr/bin/vllm|serve|org/m|--data-parallel-size|2|--max-model-len|8K",
            ),
            (101, 100, "VLLM::DPCoordinator"),
            (102, 100, "VLLM::EngineCore_DP0"),
            (103, 100, "VLLM::EngineCore_DP1"),
            (104, 100, "VLLM::APIServer_0"),
            (105, 100, "VLLM::APIServer_1"),
        ]);
        assert_eq!(world.role(101), Some(Role::Coordinator));
        assert_eq!(
            (world.role(102), world.role(103)),
            (Some(stage(0, 0)), Some(stage(0, 1)))
        );
        assert_eq!(world.role(105), Some(Role::ApiWorker { index: 1 }));
        let pipeline = world.pipeline(0);
        assert_eq!(
            (pipeline.flavor, pipeline.max_model_len),
            (Flavor::Vllm, Some(8192))
        );
        assert_eq!(pipeline.served_model, pipeline.model);
        assert_eq!(world.table.pipelines().count(), 1);
    }

    #[test]
    fn a_title_that_comes_late() {
        let (mut world, _) = World::new(&[(100, 50, "vllm|serve|m"), (200, 100, SPAWN)]);
        assert_eq!(world.role(200), None);
        assert!(world.table.is_pending(200));
        assert_eq!(world.settle(), []);
        let changes = world.see(&[(200, 100, "VLLM::EngineCore")]);
        assert!(
            matches!(&changes[..], [Change::Process(process)] if process.key.pid == 200),
            "{changes:?}"
        );
        assert!(!world.table.is_pending(200));
    }

    #[test]
    fn a_stage_that_restarts_stays_in_its_pipeline() {
        let (mut world, _) = World::new(&[
            (100, 50, OMNI),
            (200, 100, "VLLM::StageEngineCoreProc_stage0_replica0_DP0"),
        ]);
        let key = sighting(200, 0, "x").key;
        assert_eq!(world.lose(200), [Change::ProcessGone(key)]);
        let changes = world.see(&[(300, 100, "VLLM::StageEngineCoreProc_stage0_replica0_DP0")]);
        assert!(matches!(&changes[..], [Change::Process(process)] if process.pipeline == PipelineId(0)));
    }

    #[test]
    fn a_pipeline_ends_with_its_last_process() {
        let (mut world, _) = World::new(&[
            (100, 50, OMNI),
            (200, 100, "VLLM::StageEngineCoreProc_stage0_replica0_DP0"),
        ]);
        let (root, core) = (sighting(100, 0, "x").key, sighting(200, 0, "x").key);
        assert_eq!(world.lose(100), [Change::ProcessGone(root)]);
        // The stage was handed to init: it stays where it was, with all that is known of the pipeline.
        let changes = world.see(&[(200, 1, "VLLM::StageEngineCoreProc_stage0_replica0_DP0")]);
        assert!(
            matches!(&changes[..], [Change::Process(process)] if process.parent == 1 && process.pipeline.0 == 0)
        );
        assert_eq!(world.pipeline(0).model.as_deref(), Some("org/m"));
        assert_eq!(
            world.lose(200),
            [Change::ProcessGone(core), Change::PipelineGone(PipelineId(0))]
        );
        // The next one gets an id of its own.
        world.see(&[(400, 50, OMNI)]);
        assert_eq!(world.home(400), Some(1));
    }

    #[test]
    fn a_pid_that_is_used_again() {
        let (mut world, _) = World::new(&[(100, 50, OMNI), (200, 100, "VLLM::StageEngineCoreProc_DP0")]);
        let mut again = sighting(200, 1, "VLLM::EngineCore");
        again.key.start_ticks += 1;
        again.session = 9;
        world.table.see(again.clone());
        let changes = world.settle();
        assert!(
            matches!(&changes[..], [Change::ProcessGone(old), Change::Pipeline(new), Change::Process(process)]
                if *old == sighting(200, 0, "x").key && new.id.0 == 1 && process.key == again.key),
            "{changes:?}"
        );
    }

    #[test]
    fn a_pid_that_turns_into_something_else() {
        let (mut world, _) = World::new(&[(100, 50, "vllm|serve|m")]);
        let key = sighting(100, 0, "x").key;
        let changes = world.see(&[(100, 50, "sleep|1000")]);
        assert_eq!(
            changes,
            [Change::ProcessGone(key), Change::PipelineGone(PipelineId(0))]
        );
    }

    #[test]
    fn several_pipelines_stay_apart() {
        let (world, _) = World::new(&[
            (100, 1, OMNI),
            (110, 100, "VLLM::StageEngineCoreProc_stage0_replica0_DP0"),
            (200, 1, "vllm|serve|org/b"),
            (210, 200, "VLLM::EngineCore"),
        ]);
        assert_eq!((world.home(110), world.home(210)), (Some(0), Some(1)));
        assert_eq!(world.role(210), Some(stage(0, 0)));
        assert_eq!(world.pipeline(1).flavor, Flavor::Vllm);
    }

    #[test]
    fn a_server_below_another_one_is_a_pipeline_of_its_own() {
        let (world, _) = World::new(&[(100, 1, OMNI), (200, 100, "vllm|serve|org/b")]);
        assert_eq!((world.home(100), world.home(200)), (Some(0), Some(1)));
    }

    #[test]
    fn headless_replicas_have_their_launcher() {
        let (world, _) = World::new(&[
            (
                100,
                1,
                "vllm|serve|org/m|--omni|--headless|--stage-id|1|--omni-dp-size-local|2",
            ),
            (200, 100, "VLLM::StageEngineCoreProc_stage1_replica3_DP0"),
            (201, 100, "VLLM::StageEngineCoreProc_stage1_replica4_DP0"),
        ]);
        assert_eq!(world.role(100), Some(Role::Headless));
        assert_eq!(
            (world.role(200), world.role(201)),
            (Some(stage(1, 3)), Some(stage(1, 4)))
        );
        assert_eq!(world.table.pipelines().count(), 1);
    }

    #[test]
    fn engines_without_a_launcher_stay_together_by_session() {
        let mut lone = sighting(300, 1, "VLLM::EngineCore");
        lone.session = 2;
        let (mut world, _) =
            World::new(&[(200, 1, "VLLM::EngineCore_DP0"), (201, 1, "VLLM::EngineCore_DP1")]);
        world.table.see(lone);
        world.settle();
        assert_eq!(
            (world.home(200), world.home(201), world.home(300)),
            (Some(0), Some(0), Some(1))
        );
        let pipeline = world.pipeline(0);
        assert_eq!(
            (pipeline.root.pid, &pipeline.model, pipeline.flavor),
            (200, &None, Flavor::Vllm)
        );
    }

    #[test]
    fn a_program_that_embeds_an_engine_is_its_api_server() {
        let (mut world, _) = World::new(&[
            (100, 50, "python3|offline.py|--model|org/m"),
            (200, 100, "VLLM::EngineCore"),
            // Another program without libzmq has only inherited its engine.
            (20_000, 1, "tini|--|run.sh"),
            (20_001, 20_000, "VLLM::EngineCore"),
        ]);
        assert_eq!(world.role(100), Some(Role::ApiServer));
        assert_eq!(
            world.pipeline(world.home(200).unwrap()).model.as_deref(),
            Some("org/m")
        );
        assert_eq!(world.role(20_000), None);
        assert_ne!(world.home(20_001), world.home(200));
        // It stays so at further looks, and when the engine has ended.
        assert_eq!(world.see(&[(100, 50, "python3|offline.py|--model|org/m")]), []);
        world.lose(200);
        assert_eq!(world.role(100), Some(Role::ApiServer));
    }

    #[test]
    fn a_process_between_server_and_engine_is_no_server() {
        let (world, _) = World::new(&[
            (100, 50, "vllm|serve|m"),
            (150, 100, "python3|helper.py"),
            (200, 150, "VLLM::EngineCore"),
        ]);
        assert_eq!((world.role(150), world.home(200)), (None, Some(0)));
    }

    #[test]
    fn a_diffusion_stage_has_no_title_but_sockets() {
        let (mut world, _) = World::new(&[(100, 1, OMNI), (200, 100, SPAWN)]);
        assert_eq!(world.role(200), None);
        assert!(world.table.is_pending(200));
        world.facts.sockets.insert(200);
        world.see(&[(200, 100, SPAWN)]);
        assert_eq!(world.role(200), DIFFUSION);
        assert!(!world.table.is_pending(200));
    }

    #[test]
    fn diffusion_stages_are_told_once_every_child_has_its_title() {
        let untold = Some(Role::DiffusionStage {
            stage: None,
            replica: None,
        });
        let (mut world, _) = World::new(&[(100, 1, OMNI)]);
        world.now = Duration::from_secs(303);
        world.facts.sockets.extend([201, 202]);
        world.see(&[(200, 100, SPAWN), (201, 100, SPAWN), (202, 100, SPAWN)]);
        assert_eq!((world.role(200), world.role(201)), (None, untold));
        let changes = world.see(&[(200, 100, "VLLM::StageEngineCoreProc_stage0_replica0")]);
        assert_eq!(
            (world.role(201), world.role(202)),
            (Some(diffusion(1, 0)), Some(diffusion(1, 1)))
        );
        assert_eq!(changes.len(), 3);
        // Places are kept when one ends, and a new process takes the free one.
        world.lose(201);
        world.facts.sockets.insert(203);
        world.see(&[(203, 100, SPAWN)]);
        assert_eq!(
            (world.role(202), world.role(203)),
            (Some(diffusion(1, 1)), Some(diffusion(1, 0)))
        );
    }

    #[test]
    fn a_child_that_never_gets_a_title_holds_nothing_up_for_long() {
        let (mut world, _) = World::new(&[(100, 1, OMNI)]);
        world.now = Duration::from_secs(200) + TITLE_AGE;
        world.facts.sockets.insert(201);
        world.see(&[(200, 100, SPAWN), (201, 100, SPAWN)]);
        assert_eq!((world.role(200), world.role(201)), (None, DIFFUSION));
    }

    #[test]
    fn diffusion_stages_stand_where_the_configuration_says() {
        let given = Given {
            pattern: "serve org/m".to_owned(),
            places: vec![(3, 1)],
        };
        let (mut world, _) = World::new(&[]);
        world.table = Table::new(vec![given]);
        world.facts.sockets.insert(200);
        world.see(&[(100, 1, OMNI), (200, 100, SPAWN)]);
        assert_eq!(world.role(200), Some(diffusion(3, 1)));
    }

    #[test]
    fn an_untitled_child_without_omni_is_no_diffusion_stage() {
        let (mut world, _) = World::new(&[(300, 1, "vllm|serve|m")]);
        world.facts.sockets.extend([400, 500]);
        world.see(&[(400, 300, SPAWN), (500, 1, SPAWN)]);
        assert_eq!((world.role(400), world.role(500)), (None, None));
    }

    #[test]
    fn a_diffusion_stage_with_several_devices_has_workers() {
        let (mut world, _) = World::new(&[(100, 1, OMNI)]);
        world.now = Duration::from_secs(210);
        world.see(&[
            (200, 100, SPAWN),
            (201, 200, "vLLM-Omni::DiffusionWorker_TP0"),
            (202, 200, "vLLM-Omni::DiffusionWorker_TP1"),
        ]);
        assert_eq!(world.role(200), DIFFUSION);
        assert_eq!(
            (world.role(201), world.role(202)),
            (Some(Role::Worker), Some(Role::Worker))
        );
    }

    #[test]
    fn a_diffusion_stage_with_one_device_takes_the_title_of_its_worker() {
        let (mut world, _) = World::new(&[(100, 1, OMNI)]);
        world.now = Duration::from_secs(201);
        world.see(&[(200, 100, SPAWN)]);
        assert_eq!(world.role(200), None);
        world.see(&[(200, 100, "vLLM-Omni::DiffusionWorker")]);
        assert_eq!(world.role(200), DIFFUSION);
    }

    #[test]
    fn a_single_worker_in_a_process_of_its_own_is_no_stage() {
        let (mut world, _) = World::new(&[(100, 1, OMNI)]);
        world.now = Duration::from_secs(202);
        world.see(&[(200, 100, SPAWN)]);
        // The stage itself is not due for a look when its worker shows up.
        world.see(&[(201, 200, "vLLM-Omni::DiffusionWorker")]);
        assert_eq!(
            (world.role(200), world.role(201)),
            (DIFFUSION, Some(Role::Worker))
        );
    }

    #[test]
    fn a_stage_taken_for_diffusion_is_corrected_by_its_title() {
        let (mut world, _) = World::new(&[(100, 1, OMNI)]);
        world.facts.sockets.insert(200);
        world.see(&[(200, 100, SPAWN)]);
        assert_eq!(world.role(200), DIFFUSION);
        world.see(&[(200, 100, "VLLM::StageEngineCoreProc_stage1_replica0_DP0")]);
        assert_eq!(world.role(200), Some(stage(1, 0)));
    }

    #[test]
    fn inline_diffusion_renames_an_api_server() {
        let (mut world, _) = World::new(&[(100, 1, OMNI)]);
        let changes = world.see(&[(100, 1, "vLLM-Omni::DiffusionWorker")]);
        assert_eq!(changes, []);
        assert_eq!(world.role(100), Some(Role::ApiServer));
        assert_eq!(world.pipeline(0).served_model.as_deref(), Some("m"));
    }

    #[rstest]
    #[case::main_thread_keeps_its_name("vllm-omni", Some(Role::ApiServer))]
    #[case::main_thread_is_the_worker(
        "vLLM-Omni::Diff",
        Some(Role::DiffusionStage { stage: None, replica: None })
    )]
    fn inline_diffusion_that_was_there_before(#[case] comm: &str, #[case] role: Option<Role>) {
        let (mut world, _) = World::new(&[]);
        let mut seen = sighting(100, 1, "vLLM-Omni::DiffusionWorker");
        comm.clone_into(&mut seen.comm);
        world.table.see(seen);
        world.settle();
        assert_eq!(world.role(100), role);
        assert_eq!(world.pipeline(0).flavor, Flavor::Omni);
        assert_eq!(world.pipeline(0).model, None);
    }

    #[test]
    fn workers_of_an_inline_engine_with_several_devices() {
        let (world, _) = World::new(&[(100, 1, OMNI), (200, 100, "vLLM-Omni::DiffusionWorker_SP0")]);
        assert_eq!(world.role(200), Some(Role::Worker));
    }

    #[test]
    fn workers_without_a_stage_are_left_alone() {
        let (world, changes) = World::new(&[
            (200, 1, "VLLM::Worker_TP0"),
            (201, 1, "app::Worker"),
            (202, 1, "VLLM::DPCoordinator"),
            (203, 1, "vLLM-Omni::DiffusionWorker_TP0"),
        ]);
        assert_eq!(changes, []);
        assert_eq!(world.table.pipelines().count(), 0);
    }

    #[test]
    fn the_omni_coordinator_looks_like_its_parent() {
        let (mut world, _) = World::new(&[(100, 1, OMNI)]);
        world.now = Duration::from_secs(201);
        world.see(&[(200, 100, OMNI)]);
        assert!(world.table.is_pending(200));
        world.now = Duration::from_secs(200) + FORK_AGE;
        world.see(&[(200, 100, OMNI)]);
        assert_eq!(world.role(200), Some(Role::Coordinator));
        assert_eq!(world.home(200), Some(0));
        // Its parent may end first.
        world.lose(100);
        world.see(&[(200, 1, OMNI)]);
        assert_eq!(world.role(200), Some(Role::Coordinator));
    }

    #[test]
    fn versions_are_asked_for_until_known() {
        let (mut world, _) = World::new(&[]);
        world.now = Duration::from_mins(5);
        world.see(&[(100, 1, OMNI)]);
        assert_eq!(world.facts.asked.take(), [100]);
        // Nothing new was seen: nothing is asked.
        world.settle();
        assert_eq!(world.facts.asked.take(), [0; 0]);
        let partly = Versions {
            vllm: Some("0.30.0".to_owned()),
            omni: None,
        };
        world.facts.versions.insert(200, partly.clone());
        let changes = world.see(&[(200, 100, "VLLM::StageEngineCoreProc_stage0_replica0_DP0")]);
        assert!(
            matches!(&changes[..], [Change::Pipeline(pipeline), Change::Process(_)] if pipeline.versions == partly)
        );
        // Omni's is still missing; what is known stays known.
        world.facts.versions.insert(
            100,
            Versions {
                vllm: None,
                omni: Some("0.30.0".to_owned()),
            },
        );
        let changes = world.see(&[(100, 1, OMNI)]);
        assert!(matches!(&changes[..], [Change::Pipeline(pipeline)]
            if pipeline.versions == Versions { omni: Some("0.30.0".to_owned()), ..partly.clone() }));
        world.facts.asked.take();
        world.see(&[(100, 1, OMNI)]);
        assert_eq!(world.facts.asked.take(), [0; 0]);
    }

    #[test]
    fn versions_that_are_nowhere_are_given_up() {
        let (mut world, _) = World::new(&[]);
        world.now = Duration::from_secs(100) + VERSION_AGE;
        world.see(&[(100, 1, OMNI)]);
        world.see(&[(100, 1, OMNI)]);
        assert_eq!(world.facts.asked.take(), [100]);
    }

    #[test]
    fn a_container_that_was_not_read_at_once_is_read_later() {
        let (mut world, _) = World::new(&[(100, 1, OMNI)]);
        let container = Container {
            id: "c".to_owned(),
            pod_uid: None,
        };
        world.facts.containers.insert(100, container.clone());
        assert_eq!(world.settle(), []);
        let changes = world.see(&[(100, 1, OMNI)]);
        assert!(matches!(&changes[..], [Change::Process(process)] if process.container == Some(container)));
    }

    #[test]
    fn parents_in_a_loop_end() {
        // Looks at two moments can show each as the other's parent.
        let (world, _) = World::new(&[
            (2, 3, SPAWN),
            (3, 2, "VLLM::EngineCore_DP0"),
            (4, 4, "VLLM::Worker"),
        ]);
        assert_eq!(
            (world.role(2), world.role(3), world.role(4)),
            (None, Some(stage(0, 0)), None)
        );
    }

    /// A process of a made-up host: few pids, so that reuse happens.
    fn any_sighting() -> impl Strategy<Value = Sighting> {
        let cmdline = prop::sample::select(vec![
            OMNI,
            SPAWN,
            "vllm|serve|m",
            "vllm|serve|m|--headless",
            "VLLM::EngineCore_DP1",
            "VLLM::StageEngineCoreProc_stage1_replica0_DP0",
            "VLLM::APIServer_0",
            "VLLM::Worker_TP1",
            "VLLM::DPCoordinator",
            "vLLM-Omni::DiffusionWorker",
            "vLLM-Omni::DiffusionWorker_TP1",
            "bash",
        ]);
        (1_u32..8, any::<u32>(), 0_u64..4, 0_u32..3, cmdline).prop_map(
            |(pid, parent, start, session, cmdline)| {
                let mut seen = sighting(pid, parent, cmdline);
                seen.key.start_ticks = start;
                seen.session = session;
                seen
            },
        )
    }

    proptest! {
        /// Whatever is seen in whatever order, the changes tell one consistent story.
        #[test]
        fn changes_add_up(looks in prop::collection::vec((any_sighting(), any::<bool>()), 0..60), zmq: u8) {
            let facts = Facts { zmq: (0..8).filter(|bit| zmq & (1 << bit) != 0).collect(), ..Facts::default() };
            let mut table = Table::default();
            let mut alive: HashMap<ProcessKey, PipelineId> = HashMap::new();
            let mut pipelines: BTreeSet<PipelineId> = BTreeSet::new();
            let mut ended: BTreeSet<PipelineId> = BTreeSet::new();
            for (seen, lose) in looks {
                if lose {
                    table.lose(seen.key.pid);
                } else {
                    table.see(seen);
                }
                for change in table.settle(Duration::from_hours(1), &facts) {
                    match change {
                        Change::Pipeline(pipeline) => {
                            prop_assert!(!ended.contains(&pipeline.id));
                            pipelines.insert(pipeline.id);
                        }
                        Change::Process(process) => {
                            prop_assert!(pipelines.contains(&process.pipeline));
                            let before = alive.insert(process.key, process.pipeline);
                            prop_assert!(before.is_none_or(|before| before == process.pipeline));
                        }
                        Change::ProcessGone(key) => prop_assert!(alive.remove(&key).is_some()),
                        Change::Payloads { .. } => prop_assert!(false, "not by looking at processes"),
                        Change::PipelineGone(id) => {
                            prop_assert!(pipelines.remove(&id));
                            prop_assert!(alive.values().all(|&home| home != id));
                            ended.insert(id);
                        }
                    }
                }
                let homes: BTreeSet<PipelineId> = alive.values().copied().collect();
                prop_assert_eq!(&homes, &pipelines);
                prop_assert_eq!(table.processes().count(), alive.len());
                prop_assert_eq!(table.settle(Duration::from_hours(1), &facts), []);
            }
        }
    }
}
