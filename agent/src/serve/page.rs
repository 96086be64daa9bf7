//! The status page: its files, and the JSON that it draws, made from one look at everything when it is asked for.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{SystemTime, UNIX_EPOCH},
};

use serde::Serialize;

use super::status::{Member, State, TapState};
use crate::{
    host::identity::{Flavor, Pipeline, Role},
    metrics::{
        catalogue::{Buckets, Family},
        peek::{Reading, Sample},
        text::Exposition,
    },
};

/// A file of the page: path, type, content.
pub(super) const FILES: [(&str, &str, &str); 3] = [
    ("/", "text/html; charset=utf-8", include_str!("page/index.html")),
    (
        "/page.css",
        "text/css; charset=utf-8",
        include_str!("page/page.css"),
    ),
    (
        "/page.js",
        "text/javascript; charset=utf-8",
        include_str!("page/page.js"),
    ),
];

/// What the page draws.
const FAMILIES: &[Family] = &[
    Family::OmniNumRequestsRunning,
    Family::OmniNumRequestsWaiting,
    Family::OmniRequestsSuccessTotal,
    Family::OmniRequestsFailedTotal,
    Family::OmniGenerationTokensTotal,
    Family::OmniE2eRequestLatencyS,
    Family::OmniAudioRtf,
    Family::OmniAudioTtfpS,
    Family::OmniImageCountTotal,
    Family::OmniPeakMemoryMb,
    Family::OmniStageGenTimeS,
    Family::OmniTransferSizeBytes,
    Family::OmniTransferTxS,
    Family::OmniTransferInFlightS,
    Family::OmniTransferRxS,
    Family::VllmNumRequestsRunning,
    Family::VllmNumRequestsWaiting,
    Family::VllmGenerationTokensTotal,
    Family::VllmE2eRequestLatencySeconds,
    Family::VllmKvCacheUsagePerc,
    Family::VllmRequestSuccessTotal,
    Family::OmnitapCpuSecondsTotal,
    Family::OmnitapEventsReceivedTotal,
    Family::OmnitapGpuStageMemoryUsedBytes,
    Family::OmnitapProbedProcesses,
    Family::OmnitapResidentMemoryBytes,
    Family::OmnitapSeries,
    Family::OmnitapSourceState,
];

/// The whole document.
#[derive(Debug, Serialize)]
struct Document<'a> {
    version: &'static str,
    /// Milliseconds since the Unix epoch: rates are by this clock, not by the browser's.
    time_ms: u64,
    /// Why the agent is not ready; `null`: it is.
    not_ready: Option<String>,
    tap: &'static str,
    warnings: Vec<Warning>,
    pipelines: Vec<PipelineView<'a>>,
    /// Upper bounds of the buckets, by family.
    bounds: BTreeMap<&'static str, &'static [f64]>,
    families: BTreeMap<&'static str, Vec<SampleView>>,
}

#[derive(Debug, Serialize)]
struct PipelineView<'a> {
    id: u32,
    software: String,
    omni: bool,
    model: Option<&'a str>,
    served: Option<&'a str>,
    pid: u32,
    /// What the newest read of its own metrics gave.
    engine: Option<&'a str>,
    processes: Vec<ProcessView<'a>>,
}

#[derive(Debug, Serialize)]
struct ProcessView<'a> {
    pid: u32,
    role: &'static str,
    stage: Option<u32>,
    replica: Option<u32>,
    ended: bool,
    container: Option<&'a str>,
    /// By what the probes are for: `null` is on, a text says why not.
    probes: BTreeMap<&'static str, Option<&'a str>>,
}

#[derive(Debug, Serialize)]
struct SampleView {
    labels: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    counts: Option<Vec<u64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sum: Option<f64>,
}

impl From<Sample> for SampleView {
    fn from(sample: Sample) -> Self {
        let (value, counts, sum) = match sample.value {
            Reading::Number(value) => (Some(value), None, None),
            Reading::Histogram { counts, sum } => (None, Some(counts), Some(sum)),
        };
        Self {
            labels: sample.labels,
            value,
            counts,
            sum,
        }
    }
}

/// Something that an operator should know, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Warning {
    text: String,
    remedy: &'static str,
}

/// The JSON of `/api/status`.
pub(super) fn json(state: &State, exposition: &Exposition) -> Vec<u8> {
    let document = Document {
        version: env!("CARGO_PKG_VERSION"),
        time_ms: SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX)),
        not_ready: state.not_ready(),
        tap: match state.tap {
            TapState::Starting => "starting",
            TapState::Up => "up",
            TapState::Off => "off",
            TapState::Failed(_) => "failed",
        },
        warnings: warnings(state, &Counts::read(exposition)),
        pipelines: state.pipelines.values().map(|p| pipeline(p, state)).collect(),
        bounds: FAMILIES
            .iter()
            .filter_map(|family| Some((family.row().name, family.row().kind.buckets()?)))
            .map(|(name, buckets): (_, Buckets)| (name, buckets.bounds(None)))
            .collect(),
        families: FAMILIES
            .iter()
            .map(|family| {
                let samples = exposition
                    .peek(*family)
                    .into_iter()
                    .map(SampleView::from)
                    .collect();
                (family.row().name, samples)
            })
            .collect(),
    };
    // Maps have text as keys, and a float that is no number becomes `null`: it can't fail.
    serde_json::to_vec(&document).unwrap_or_default()
}

fn pipeline<'a>(pipeline: &'a Pipeline, state: &'a State) -> PipelineView<'a> {
    PipelineView {
        id: pipeline.id.0,
        software: software(pipeline),
        omni: pipeline.flavor == Flavor::Omni,
        model: pipeline.model.as_deref(),
        served: pipeline.served_model.as_deref(),
        pid: pipeline.root.pid,
        engine: state.engines.get(&pipeline.id).map(String::as_str),
        processes: state
            .processes
            .values()
            .filter(|member| member.process.pipeline == pipeline.id)
            .map(process)
            .collect(),
    }
}

fn process(member: &Member) -> ProcessView<'_> {
    let (role, stage, replica) = match member.process.role {
        Role::ApiServer => ("API server", None, None),
        Role::ApiWorker { index } => ("API worker", None, Some(index)),
        Role::Headless => ("headless launcher", None, None),
        Role::LlmStage { stage, replica } => ("stage", stage, replica),
        Role::DiffusionStage { stage, replica } => ("diffusion stage", stage, replica),
        Role::Worker => ("worker", None, None),
        Role::Coordinator => ("coordinator", None, None),
    };
    ProcessView {
        pid: member.process.key.pid,
        role,
        stage,
        replica,
        ended: member.ended,
        container: member
            .process
            .container
            .as_ref()
            .map(|container| container.id.as_str()),
        probes: member
            .probes
            .iter()
            .map(|(set, outcome)| (*set, outcome.as_ref().err().map(String::as_str)))
            .collect(),
    }
}

fn software(pipeline: &Pipeline) -> String {
    let versions = &pipeline.versions;
    let with =
        |name: &str, version: Option<&str>| format!("{name} {}", version.unwrap_or("(version unknown)"));
    match pipeline.flavor {
        Flavor::Vllm => with("vLLM", versions.vllm.as_deref()),
        Flavor::Omni => with("vLLM-Omni", versions.omni.as_deref()),
    }
}

/// What the agent counts and warns of.
#[derive(Debug, Default)]
struct Counts {
    /// By kind.
    lost: BTreeMap<String, f64>,
    refused: f64,
    /// Probes on instructions that the kernel single-steps.
    slow: f64,
    /// Pipelines whose frames have a layout that is not known.
    strange: BTreeSet<String>,
}

impl Counts {
    fn read(exposition: &Exposition) -> Self {
        let number = |sample: &Sample| match sample.value {
            Reading::Number(number) => number,
            Reading::Histogram { .. } => 0.0,
        };
        let sum = |family: Family, label: &str, value: &str| {
            let samples = exposition.peek(family);
            let matching = samples.iter().filter(|sample| {
                label.is_empty() || sample.labels.get(label).is_some_and(|have| have == value)
            });
            matching.map(number).sum()
        };
        Self {
            lost: exposition
                .peek(Family::OmnitapEventsLostTotal)
                .iter()
                .filter(|sample| number(sample) > 0.0)
                .filter_map(|sample| Some((sample.labels.get("kind")?.clone(), number(sample))))
                .collect(),
            refused: sum(Family::OmnitapSeriesRefusedTotal, "", ""),
            slow: sum(Family::OmnitapProbesAttachedTotal, "site", "slow"),
            strange: exposition
                .peek(Family::OmnitapPipelineInfo)
                .iter()
                .filter(|sample| {
                    sample
                        .labels
                        .get("layout")
                        .is_some_and(|layout| layout == "unknown")
                })
                .filter_map(|sample| sample.labels.get("pipeline").cloned())
                .collect(),
        }
    }
}

fn name(pipeline: &Pipeline) -> String {
    match (&pipeline.model, &pipeline.served_model) {
        (Some(name), _) | (None, Some(name)) => name.clone(),
        (None, None) => format!("pipeline {} (process {})", pipeline.id.0, pipeline.root.pid),
    }
}

fn warnings(state: &State, counts: &Counts) -> Vec<Warning> {
    let mut warnings = Vec::new();
    let mut warn = |text: String, remedy: &'static str| warnings.push(Warning { text, remedy });
    match &state.tap {
        TapState::Failed(reason) => warn(
            format!("The tap does not work: {reason}"),
            "`omnitap check` on this host says what is missing.",
        ),
        TapState::Off if !state.pipelines.is_empty() => warn(
            "The tap is switched off: what it would see is missing.".to_owned(),
            "Start the agent without --no-ebpf.",
        ),
        TapState::Off | TapState::Starting | TapState::Up => {}
    }
    for pipeline in state.pipelines.values() {
        let name = name(pipeline);
        if pipeline.model.is_none() {
            warn(
                format!("The model of {name} is not known: its families are missing."),
                "Give it a name by host.model-name.",
            );
        }
        if counts.strange.contains(&pipeline.id.0.to_string()) {
            warn(
                format!("Frames of {name} have a layout that this version does not know."),
                "Use a newer omnitap; until then what those frames tell is missing.",
            );
        }
    }
    for Member {
        process,
        ended,
        probes,
    } in state.processes.values()
    {
        let Some(pipeline) = state.pipelines.get(&process.pipeline) else {
            continue;
        };
        let who = match process.role {
            Role::LlmStage { stage, replica } | Role::DiffusionStage { stage, replica } => {
                let number = |n: Option<u32>| n.map_or_else(|| "?".to_owned(), |n| n.to_string());
                format!("Stage {}, replica {}", number(stage), number(replica))
            }
            _ => "A process".to_owned(),
        };
        let name = name(pipeline);
        if *ended {
            if process.role.is_tapped() {
                warn(
                    format!(
                        "{who} of {name} (process {}) has ended, and no other has taken its place.",
                        process.key.pid
                    ),
                    "Look at the pipeline's own log.",
                );
            }
            continue;
        }
        for (set, outcome) in probes {
            if let Err(reason) = outcome {
                warn(
                    format!(
                        "{who} of {name} (process {}) has no probes for {set}: {reason}",
                        process.key.pid
                    ),
                    "`omnitap check` on this host says what is missing.",
                );
            }
        }
    }
    for (kind, count) in &counts.lost {
        warn(
            format!(
                "{count} events were lost since the start ({kind}): counts are too low by what they told."
            ),
            if kind.ends_with("ring_full") {
                "Raise tap.ring-buffer."
            } else {
                "docs/troubleshooting.md says what each kind means."
            },
        );
    }
    if counts.refused > 0.0 {
        warn(
            format!("{} series were refused: the cap is reached.", counts.refused),
            "Raise metrics.max-series, or find what makes so many label values.",
        );
    }
    if counts.slow > 0.0 {
        warn(
            format!(
                "{} probes are on instructions that the kernel single-steps: a hit costs some 9 us, not 0.5 us.",
                counts.slow
            ),
            "Nothing is wrong with the numbers; the library has no cheaper place.",
        );
    }
    warnings
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::{
        host::identity::{Change, PipelineId, Process, ProcessKey, Versions},
        serve::Status,
    };

    fn key(pid: u32) -> ProcessKey {
        ProcessKey { pid, start_ticks: 1 }
    }

    fn stage(pid: u32, stage: u32) -> Change {
        Change::Process(Process {
            key: key(pid),
            parent: 1,
            role: Role::LlmStage {
                stage: Some(stage),
                replica: Some(0),
            },
            pipeline: PipelineId(1),
            container: None,
        })
    }

    fn with_pipeline() -> Status {
        let status = Status::default();
        status.set_tap(TapState::Up);
        status.set_scanned();
        status.change(&Change::Pipeline(Pipeline {
            id: PipelineId(1),
            flavor: Flavor::Omni,
            model: Some("m".to_owned()),
            served_model: None,
            versions: Versions::default(),
            max_model_len: None,
            root: key(10),
        }));
        status.change(&stage(11, 0));
        status
    }

    fn told(status: &Status, counts: &Counts) -> Vec<String> {
        let warnings = warnings(&status.state(), counts);
        assert!(warnings.iter().all(|warning| !warning.remedy.is_empty()));
        warnings.into_iter().map(|warning| warning.text).collect()
    }

    #[test]
    fn nothing_is_wrong() {
        let status = with_pipeline();
        status.probed(key(11), "frames", Ok(()));
        assert_eq!(told(&status, &Counts::default()), Vec::<String>::new());
    }

    #[rstest]
    #[case::lost(Counts { lost: [("ring_full".to_owned(), 3.0)].into(), ..Counts::default() }, "3 events were lost")]
    #[case::refused(Counts { refused: 2.0, ..Counts::default() }, "2 series were refused")]
    #[case::slow(Counts { slow: 1.0, ..Counts::default() }, "1 probes are on instructions")]
    #[case::strange(Counts { strange: ["1".to_owned()].into(), ..Counts::default() }, "Frames of m have a layout")]
    fn what_is_counted(#[case] counts: Counts, #[case] wanted: &str) {
        let told = told(&with_pipeline(), &counts);
        assert!(
            matches!(told.as_slice(), [only] if only.starts_with(wanted)),
            "{told:?}"
        );
    }

    #[test]
    fn a_stage_that_ended_is_told_until_another_takes_its_place() {
        let status = with_pipeline();
        status.change(&stage(12, 1));
        status.change(&Change::ProcessGone(key(12)));
        let ended = told(&status, &Counts::default());
        assert!(
            matches!(ended.as_slice(), [only] if only.starts_with("Stage 1, replica 0 of m (process 12) has ended"))
        );
        status.change(&stage(13, 1));
        assert_eq!(told(&status, &Counts::default()), Vec::<String>::new());
        assert_eq!(status.state().processes.len(), 2);
        status.change(&Change::PipelineGone(PipelineId(1)));
        assert!(status.state().processes.is_empty());
    }

    #[test]
    fn ended_processes_are_bounded() {
        let status = with_pipeline();
        for pid in 100..1100 {
            status.change(&stage(pid, pid));
            status.change(&Change::ProcessGone(key(pid)));
        }
        assert!(status.state().processes.len() <= 70);
    }

    #[test]
    fn a_process_without_probes_is_told_with_the_reason() {
        let status = with_pipeline();
        status.probed(key(11), "frames", Err("denied".to_owned()));
        let told = told(&status, &Counts::default());
        assert!(matches!(told.as_slice(), [only] if only.ends_with("has no probes for frames: denied")));
    }

    #[rstest]
    #[case::failed(TapState::Failed("no rights".to_owned()), 1)]
    #[case::off(TapState::Off, 1)]
    #[case::starting(TapState::Starting, 0)]
    fn states_of_the_tap(#[case] tap: TapState, #[case] wanted: usize) {
        let status = with_pipeline();
        status.set_tap(tap);
        assert_eq!(told(&status, &Counts::default()).len(), wanted);
    }
}
