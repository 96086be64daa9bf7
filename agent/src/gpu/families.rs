//! From samples to families: which stage a GPU's memory belongs to, peaks, and what falls away.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::sample::{Call, Device, Fault, GpuProcess, GpuSample, Owner, State};
use crate::{
    host::identity::{Flavor, Pipeline, PipelineId, Process, ProcessKey, Role},
    metrics::{
        catalogue::{Family, Kind},
        number::as_f64,
        own::Own,
        registry::Registry,
    },
    pipeline::sink::{ExtraId, Scope, ScopeId, Sink},
};

/// Longest chain of parents followed.
const MAX_DEPTH: usize = 32;

/// What is watched, to tell whose a process is.
pub struct World<'a> {
    /// By pid.
    pub processes: &'a HashMap<u32, Process>,
    /// The pipeline of an id.
    pub pipeline: &'a dyn Fn(PipelineId) -> Option<&'a Pipeline>,
}

/// Where a stage's peak memory comes from, the one that wins first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum PeakSource {
    Engine,
    Accounting,
    Sampled,
}

impl PeakSource {
    fn as_str(self) -> &'static str {
        match self {
            Self::Engine => "engine",
            Self::Accounting => "nvml_accounting",
            Self::Sampled => "nvml_sampled",
        }
    }
}

/// A replica of a stage that uses GPUs; it lives as long as its process.
#[derive(Debug)]
struct Replica {
    place: Place,
    /// Most bytes on one GPU so far.
    peak: u64,
    source: PeakSource,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    pipeline: PipelineId,
    stage: u32,
    replica: Option<u32>,
}

/// A child of a family by its labels.
type Child = (Family, Vec<String>);

/// What is known of GPUs.
#[derive(Debug, Default)]
pub struct Gpus {
    state: State,
    /// When the newest sample came, and how long it counts.
    sampled_ns: Option<u64>,
    stale_ns: u64,
    stalled: bool,
    /// The newest sample with devices still counts.
    counts: bool,
    replicas: HashMap<ProcessKey, Replica>,
    /// Processes that can't be told whose they are, or how much they use: each is counted once.
    odd: BTreeSet<(u32, Option<u32>, u32)>,
    /// Gauges of the newest sample.
    shown: BTreeSet<Child>,
    shown_state: Option<&'static str>,
    scopes: BTreeMap<(PipelineId, u32), ScopeId>,
    sources: BTreeMap<(String, u32), PeakSource>,
}

impl Gpus {
    /// Takes a sample that came at `now_ns`.
    pub fn sample(&mut self, sample: &GpuSample, now_ns: u64, world: &World<'_>, registry: &mut Registry) {
        let own = registry.own();
        self.state = sample.state;
        self.sampled_ns = Some(now_ns);
        self.stale_ns = u64::try_from(sample.stale_after().as_nanos()).unwrap_or(u64::MAX);
        self.stalled = false;
        for (call, fault) in &sample.faults {
            count_fault(&own, *call, *fault);
        }
        if sample.lost > 0 {
            own.add(Family::OmnitapGpuSamplesLostTotal, &[], as_f64(sample.lost));
        }
        // What was seen before NVML was opened anew counts until the first look after it.
        if sample.state == State::Opening {
            self.tick(now_ns, world, registry);
            return;
        }
        self.counts = sample.state == State::Ok;
        let mut wanted = BTreeMap::new();
        let mut odd = BTreeSet::new();
        // Bytes by replica and device, with what the driver's accounting adds up to where it is whole.
        let mut used: BTreeMap<ProcessKey, (Place, BTreeMap<usize, Use>)> = BTreeMap::new();
        for (at, device) in sample.devices.iter().enumerate() {
            let mut users = BTreeSet::new();
            let mut all_known = device.processes.is_some();
            for process in device.processes.iter().flatten() {
                match attribute(process, world) {
                    Ok((key, place)) => {
                        users.insert((key, place.pipeline, place.stage, place.replica));
                        let (_, devices) = used.entry(key).or_insert_with(|| (place, BTreeMap::new()));
                        devices.entry(at).or_default().add(process);
                        if process.used.is_none() {
                            odd.insert(((device.index, device.mig, process.pid), "no_memory"));
                        }
                    }
                    Err(reason) => {
                        all_known = false;
                        odd.insert(((device.index, device.mig, process.pid), reason));
                    }
                }
            }
            let owner = match (users.iter().next(), users.len()) {
                (Some(&(_, pipeline, stage, replica)), 1) if all_known => Some(Place {
                    pipeline,
                    stage,
                    replica,
                }),
                _ => None,
            };
            want_device(&mut wanted, device, owner, sample.driver.as_deref(), world);
        }
        for (key, (place, devices)) in &used {
            self.raise(*key, *place, devices.values());
            for (at, bytes) in devices {
                if let (Some(device), Some(bytes)) = (sample.devices.get(*at), bytes.now) {
                    let labels = gpu_labels(device, Some(*place), world);
                    *wanted
                        .entry((Family::OmnitapGpuStageMemoryUsedBytes, labels))
                        .or_default() += as_f64(bytes);
                }
            }
        }
        for (key, reason) in &odd {
            if !self.odd.contains(key) {
                registry.skip(Family::OmnitapGpuStageMemoryUsedBytes, reason);
            }
        }
        self.odd = odd.into_iter().map(|(key, _)| key).collect();
        self.show(wanted, &own);
        self.show_peaks(world, registry);
        self.tick(now_ns, world, registry);
    }

    /// Time passes, or what is watched has changed: what is too old falls away.
    pub fn tick(&mut self, now_ns: u64, world: &World<'_>, registry: &mut Registry) {
        let own = registry.own();
        let Some(sampled_ns) = self.sampled_ns else {
            self.show_sources(registry, &own);
            return;
        };
        let age = now_ns.saturating_sub(sampled_ns);
        let expects = matches!(self.state, State::Ok | State::Opening);
        self.stalled = expects && age > self.stale_ns;
        if expects {
            #[expect(clippy::cast_precision_loss, reason = "nanoseconds as seconds")]
            own.set(Family::OmnitapGpuSampleAgeSeconds, &[], age as f64 / 1e9);
        } else {
            own.remove(Family::OmnitapGpuSampleAgeSeconds, &[]);
        }
        let state = if self.stalled {
            "stalled"
        } else {
            self.state.as_str()
        };
        if self.shown_state.replace(state) != Some(state) {
            own.clear(Family::OmnitapGpuState);
            own.set(Family::OmnitapGpuState, &[state], 1.0);
        }
        if self.stalled {
            self.counts = false;
            self.show(BTreeMap::new(), &own);
        }
        let alive = |key: &ProcessKey| {
            world
                .processes
                .get(&key.pid)
                .is_some_and(|process| process.key == *key)
        };
        self.replicas.retain(|key, _| alive(key));
        self.show_peaks(world, registry);
        self.show_sources(registry, &own);
    }

    /// Whether a stage of the pipeline has its peak memory from here.
    #[must_use]
    pub fn has_peak(&self, pipeline: PipelineId) -> bool {
        self.scopes.keys().any(|(of, _)| *of == pipeline)
    }

    /// How many things are remembered, for tests of growth.
    #[must_use]
    pub fn remembered(&self) -> usize {
        self.replicas.len() + self.odd.len() + self.shown.len() + self.scopes.len() + self.sources.len()
    }

    fn raise<'a>(&mut self, key: ProcessKey, place: Place, devices: impl Iterator<Item = &'a Use> + Clone) {
        let accounted = devices.clone().all(|device| device.accounted.is_some());
        let source = if accounted {
            PeakSource::Accounting
        } else {
            PeakSource::Sampled
        };
        let highest = devices
            .filter_map(|device| device.accounted.max(device.now))
            .max();
        let Some(highest) = highest else { return };
        let replica = self.replicas.entry(key).or_insert(Replica {
            place,
            peak: 0,
            source,
        });
        replica.place = place;
        replica.peak = replica.peak.max(highest);
        replica.source = source;
    }

    /// Sets the gauges of `wanted`, and takes away those of before.
    fn show(&mut self, wanted: BTreeMap<Child, f64>, own: &Own) {
        for (family, labels) in &self.shown {
            if !wanted.contains_key(&(*family, labels.clone())) {
                own.remove(*family, &strs(labels));
            }
        }
        for ((family, labels), value) in &wanted {
            if family.row().kind == Kind::Counter {
                own.set_total(*family, &strs(labels), *value);
            } else {
                own.set(*family, &strs(labels), *value);
            }
        }
        self.shown = wanted.into_keys().collect();
    }

    /// `vllm_omni:peak_memory_mb`, where the engine does not report it.
    fn show_peaks(&mut self, world: &World<'_>, registry: &mut Registry) {
        let mut peaks: BTreeMap<(PipelineId, u32), u64> = BTreeMap::new();
        if self.counts {
            for replica in self.replicas.values() {
                let Place { pipeline, stage, .. } = replica.place;
                let peak = peaks.entry((pipeline, stage)).or_default();
                *peak = (*peak).max(replica.peak);
            }
        }
        for scope in registry.scopes_with(Family::OmniPeakMemoryMb) {
            if let Some(stage) = scope.stage
                && self.scopes.get(&(scope.pipeline, stage)) != Some(&registry.scope(&scope))
            {
                peaks.remove(&(scope.pipeline, stage));
            }
        }
        self.scopes.retain(|at, scope| {
            let stays = peaks.contains_key(at);
            if !stays {
                registry.retire(*scope);
            }
            stays
        });
        for (at, bytes) in peaks {
            let scope = if let Some(scope) = self.scopes.get(&at) {
                *scope
            } else {
                let Some(pipeline) = (world.pipeline)(at.0).filter(|p| p.flavor == Flavor::Omni) else {
                    continue;
                };
                let scope = registry.scope(&own_scope(pipeline, at.1));
                self.scopes.insert(at, scope);
                scope
            };
            registry.set(
                Family::OmniPeakMemoryMb,
                scope,
                ExtraId::NONE,
                as_f64(bytes) / 1_048_576.0,
            );
        }
    }

    /// Which source each stage's peak has.
    fn show_sources(&mut self, registry: &mut Registry, own: &Own) {
        let mut sources: BTreeMap<(String, u32), PeakSource> = BTreeMap::new();
        for scope in registry.scopes_with(Family::OmniPeakMemoryMb) {
            let Some(stage) = scope.stage else { continue };
            let is_ours = self.scopes.get(&(scope.pipeline, stage)) == Some(&registry.scope(&scope));
            let source = if is_ours {
                // That of the replica whose peak is shown.
                self.replicas
                    .values()
                    .filter(|r| (r.place.pipeline, r.place.stage) == (scope.pipeline, stage))
                    .max_by_key(|r| r.peak)
                    .map_or(PeakSource::Sampled, |r| r.source)
            } else {
                PeakSource::Engine
            };
            let known = sources.entry((scope.model, stage)).or_insert(source);
            *known = source.min(*known);
        }
        if self.sources == sources {
            return;
        }
        own.clear(Family::OmnitapPeakMemorySource);
        for ((model, stage), source) in &sources {
            own.set(
                Family::OmnitapPeakMemorySource,
                &[model, &stage.to_string(), source.as_str()],
                1.0,
            );
        }
        self.sources = sources;
    }
}

/// Bytes of a replica on one device.
#[derive(Debug, Default)]
struct Use {
    /// Now, of the processes that tell.
    now: Option<u64>,
    /// Sum of the processes' peaks; `None`: one has no account.
    accounted: Option<u64>,
    unaccounted: bool,
}

impl Use {
    fn add(&mut self, process: &GpuProcess) {
        let sum = |a: Option<u64>, b: u64| Some(a.unwrap_or(0).saturating_add(b));
        if let Some(bytes) = process.used {
            self.now = sum(self.now, bytes);
        }
        match process.peak {
            Some(bytes) if !self.unaccounted => self.accounted = sum(self.accounted, bytes),
            _ => {
                self.unaccounted = true;
                self.accounted = None;
            }
        }
    }
}

/// The process that stands for the stage's replica a process belongs to, and its place.
fn attribute(process: &GpuProcess, world: &World<'_>) -> Result<(ProcessKey, Place), &'static str> {
    let mut pid = match process.owner {
        Owner::Watched(pid) => pid,
        Owner::Foreign => return Err("foreign_process"),
        Owner::Unseen => return Err("unseen_process"),
    };
    for _ in 0..MAX_DEPTH {
        let at = world.processes.get(&pid).ok_or("unknown_process")?;
        let pipeline = at.pipeline;
        match at.role {
            Role::LlmStage { stage, replica } | Role::DiffusionStage { stage, replica } => {
                let stage = stage.ok_or("no_stage")?;
                let place = Place {
                    pipeline,
                    stage,
                    replica,
                };
                return Ok((at.key, place));
            }
            Role::Worker | Role::Coordinator => pid = at.parent,
            Role::ApiServer | Role::ApiWorker { .. } => return inline(at, world).ok_or("no_stage"),
            Role::Headless => return Err("no_stage"),
        }
    }
    Err("no_stage")
}

/// A diffusion pipeline of one stage runs in its API server (docs/wire.md, "Processes").
fn inline(api: &Process, world: &World<'_>) -> Option<(ProcessKey, Place)> {
    let pipeline = (world.pipeline)(api.pipeline)?;
    let has_stages = world.processes.values().any(|process| {
        process.pipeline == api.pipeline
            && matches!(process.role, Role::LlmStage { .. } | Role::DiffusionStage { .. })
    });
    (pipeline.flavor == Flavor::Omni && !has_stages).then_some((
        api.key,
        Place {
            pipeline: api.pipeline,
            stage: 0,
            replica: Some(0),
        },
    ))
}

fn own_scope(pipeline: &Pipeline, stage: u32) -> Scope {
    Scope {
        pipeline: pipeline.id,
        model: pipeline.model.clone().unwrap_or_default(),
        served_model: pipeline.served_model.clone().unwrap_or_default(),
        stage: Some(stage),
        // All replicas together. The family has no such label, and no other source a scope of this number.
        replica: Some(u32::MAX),
        max_model_len: None,
    }
}

fn want_device(
    wanted: &mut BTreeMap<Child, f64>,
    device: &Device,
    owner: Option<Place>,
    driver: Option<&str>,
    world: &World<'_>,
) {
    let Device {
        index: _,
        mig: _,
        uuid: _,
        name,
        memory,
        utilization,
        power_mw,
        temperature_c,
        ecc,
        processes: _,
    } = device;
    let labels = gpu_labels(device, owner, world);
    let mut want = |family, value: Option<f64>| {
        if let Some(value) = value {
            wanted.insert((family, labels.clone()), value);
        }
    };
    want(
        Family::OmnitapGpuMemoryUsedBytes,
        memory.map(|(used, _)| as_f64(used)),
    );
    want(
        Family::OmnitapGpuMemoryTotalBytes,
        memory.map(|(_, total)| as_f64(total)),
    );
    want(
        Family::OmnitapGpuUtilizationRatio,
        utilization.map(|percent| f64::from(percent.min(100)) / 100.0),
    );
    want(
        Family::OmnitapGpuPowerWatts,
        power_mw.map(|mw| f64::from(mw) / 1000.0),
    );
    want(Family::OmnitapGpuTemperatureCelsius, temperature_c.map(f64::from));
    if let Some((corrected, uncorrected)) = *ecc {
        for (kind, count) in [("corrected", corrected), ("uncorrected", uncorrected)] {
            let mut labels = labels.clone();
            labels.push(kind.to_owned());
            wanted.insert((Family::OmnitapGpuEccErrorsTotal, labels), as_f64(count));
        }
    }
    let [index, mig, uuid] = device_labels(device);
    let info = vec![
        index,
        mig,
        uuid,
        name.clone().unwrap_or_default(),
        driver.unwrap_or_default().to_owned(),
    ];
    wanted.insert((Family::OmnitapGpuInfo, info), 1.0);
}

fn device_labels(device: &Device) -> [String; 3] {
    [
        device.index.to_string(),
        device.mig.map(|at| at.to_string()).unwrap_or_default(),
        device.uuid.clone().unwrap_or_default(),
    ]
}

fn gpu_labels(device: &Device, owner: Option<Place>, world: &World<'_>) -> Vec<String> {
    let mut labels = device_labels(device).to_vec();
    let model = owner
        .and_then(|place| (world.pipeline)(place.pipeline))
        .and_then(|pipeline| pipeline.model.clone());
    labels.push(model.unwrap_or_default());
    labels.push(owner.map(|place| place.stage.to_string()).unwrap_or_default());
    let replica = owner.and_then(|place| place.replica);
    labels.push(replica.map(|replica| replica.to_string()).unwrap_or_default());
    labels
}

fn count_fault(own: &Own, call: Call, fault: Fault) {
    own.add(
        Family::OmnitapGpuCallErrorsTotal,
        &[call.as_str(), fault.as_str()],
        1.0,
    );
}

fn strs(labels: &[String]) -> Vec<&str> {
    labels.iter().map(String::as_str).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        host::identity::Versions,
        metrics::{registry::Limits, text::Format},
    };

    const KEY: ProcessKey = ProcessKey {
        pid: 7,
        start_ticks: 1,
    };

    /// The lines of stage 0's peak and its source.
    fn peak(registry: &Registry) -> Vec<String> {
        let mut out = Vec::new();
        registry.exposition().render(&mut out, Format::Text);
        String::from_utf8(out)
            .unwrap()
            .lines()
            .filter(|line| {
                line.starts_with("vllm_omni:peak_memory_mb{")
                    || line.starts_with("omnitap_peak_memory_source{")
            })
            .map(str::to_owned)
            .collect()
    }

    fn lines(mb: &str, source: &str) -> [String; 2] {
        [
            format!("vllm_omni:peak_memory_mb{{model_name=\"m\",stage=\"0\"}} {mb}"),
            format!("omnitap_peak_memory_source{{model_name=\"m\",source=\"{source}\",stage=\"0\"}} 1.0"),
        ]
    }

    #[test]
    fn the_engines_own_figure_wins_while_it_is_there() {
        let mut registry = Registry::new(Limits {
            max_series: 1000,
            retention: Duration::ZERO,
        });
        let (stage, replica) = (Some(0), Some(0));
        let id = PipelineId(1);
        let process = Process {
            key: KEY,
            parent: 1,
            role: Role::DiffusionStage { stage, replica },
            pipeline: id,
            container: None,
        };
        let pipeline = Pipeline {
            id,
            flavor: Flavor::Omni,
            model: Some("m".to_owned()),
            served_model: Some("m".to_owned()),
            versions: Versions::default(),
            max_model_len: None,
            root: KEY,
        };
        let processes = HashMap::from([(KEY.pid, process)]);
        let lookup = |_| Some(&pipeline);
        let world = World {
            processes: &processes,
            pipeline: &lookup,
        };
        let sample = GpuSample {
            state: State::Ok,
            pause_ms: 1000,
            devices: vec![Device {
                processes: Some(vec![GpuProcess {
                    pid: KEY.pid,
                    owner: Owner::Watched(KEY.pid),
                    used: Some(9 << 20),
                    peak: None,
                }]),
                ..Device::default()
            }],
            ..GpuSample::default()
        };
        let mut gpus = Gpus::default();
        gpus.sample(&sample, 1, &world, &mut registry);
        assert_eq!(peak(&registry), lines("9.0", "nvml_sampled"));

        // The engine's report of a replica.
        let scope = registry.scope(&Scope {
            replica,
            ..own_scope(&pipeline, 0)
        });
        registry.set(Family::OmniPeakMemoryMb, scope, ExtraId::NONE, 5.0);
        gpus.sample(&sample, 2, &world, &mut registry);
        assert_eq!(peak(&registry), lines("5.0", "engine"));

        registry.retire(scope);
        gpus.tick(3, &world, &mut registry);
        assert_eq!(peak(&registry), lines("9.0", "nvml_sampled"));

        // Without any GPU, the engine's report has its source, too.
        let scope = registry.scope(&Scope {
            replica,
            ..own_scope(&pipeline, 0)
        });
        registry.set(Family::OmniPeakMemoryMb, scope, ExtraId::NONE, 5.0);
        let mut none = Gpus::default();
        gpus.sample(&GpuSample::default(), 4, &world, &mut registry);
        none.tick(4, &world, &mut registry);
        assert_eq!(peak(&registry), lines("5.0", "engine"));
    }
}
