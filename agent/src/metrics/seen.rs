//! Where each documented family of vLLM-Omni has been seen with a value, for docs/parity.md.
//!
//! A family has a row here from the start and its cells are filled in as it is seen: `cargo xtask real` against real
//! servers, recordings of those, and the bundled pipeline.

use std::fmt::Write as _;

use super::catalogue::Family;

/// Where a family was not 0.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// The family.
    pub family: Family,
    /// Cases of `cargo xtask real` in which the server's figure and the agent's were compared, or why there is none.
    pub real: Real,
    /// Recordings of real servers in `tests/recordings`, whose replay has it.
    pub recorded: &'static [&'static str],
    /// The end-to-end test with the bundled pipeline (`tests/tests`) in which it is compared.
    pub bundled: Option<&'static str>,
}

/// What real servers had of a family.
#[derive(Clone, Copy, Debug)]
pub enum Real {
    /// Seen in these cases.
    In(&'static [&'static str]),
    /// Not seen, for this reason.
    Not(&'static str),
}

const OMNI: &[&str] = &["omni", "omni-off"];
const ALL: &[&str] = &["omni", "omni-off", "ardit", "inline"];
const IMAGES: &[&str] = &["ardit", "inline"];
const PROFILER: Real = Real::Not("the pipeline that runs on a CPU profiles neither");
const NO_DATA: &[&str] = &[];

macro_rules! seen {
    ($($family:ident $real:expr, $recorded:expr, $bundled:expr;)*) => {
        &[$(Seen { family: Family::$family, real: $real, recorded: $recorded, bundled: $bundled }),*]
    };
}

/// The 36 documented families, in the order of the catalogue.
pub static SEEN: &[Seen] = seen! {
    OmniAudioContinuityOkTotal Real::Not("slower than playback on the CPU"), NO_DATA, Some("e2e_agent");
    OmniAudioDurationS Real::In(OMNI), OMNI, Some("e2e_agent");
    OmniAudioFramesTotal Real::In(OMNI), OMNI, Some("e2e_agent");
    OmniAudioRtf Real::In(OMNI), OMNI, Some("e2e_agent");
    OmniAudioSkippedRequestsTotal Real::Not("every answer has audio"), NO_DATA, Some("e2e_agent");
    OmniAudioTtfpS Real::In(OMNI), OMNI, Some("e2e_agent");
    OmniAudioUnderrunS Real::In(OMNI), OMNI, Some("e2e_agent");
    OmniDenoiseStepLatencyS PROFILER, NO_DATA, Some("e2e_diffusion");
    OmniDiffusionExecPerStepS Real::In(&["ardit"]), &["ardit"], Some("e2e_diffusion");
    OmniDiffusionExecS Real::In(&["ardit"]), &["ardit"], Some("e2e_diffusion");
    OmniDiffusionForwardS PROFILER, NO_DATA, Some("e2e_diffusion");
    OmniDiffusionKvLoadS Real::In(&["ardit"]), &["ardit"], Some("e2e_diffusion");
    OmniDiffusionPostprocessS Real::In(&["ardit"]), &["ardit"], Some("e2e_diffusion");
    OmniDiffusionPreprocessS Real::In(&["ardit"]), &["ardit"], Some("e2e_diffusion");
    OmniE2eRequestLatencyS Real::In(ALL), ALL, Some("e2e_agent");
    OmniImageCountTotal Real::In(IMAGES), IMAGES, Some("e2e_diffusion");
    OmniImagePixels Real::In(IMAGES), IMAGES, Some("e2e_diffusion");
    OmniImageTtfpS Real::In(IMAGES), IMAGES, Some("e2e_diffusion");
    OmniKvWaitS Real::Not("no KV data leaves a stage"), NO_DATA, Some("e2e_agent");
    OmniNumInferenceSteps Real::In(IMAGES), IMAGES, Some("e2e_diffusion");
    OmniNumRequestsRunning Real::Not("0 at rest, when pages are compared"), NO_DATA, Some("e2e_agent");
    OmniNumRequestsWaiting Real::Not("0 at rest, when pages are compared"), NO_DATA, Some("e2e_agent");
    OmniPeakMemoryMb Real::In(IMAGES), IMAGES, Some("e2e_diffusion");
    OmniRequestQueueWaitS Real::In(IMAGES), &["inline"], None;
    OmniRequestsFailedTotal Real::In(ALL), ALL, Some("e2e_agent");
    OmniRequestsSuccessTotal Real::In(ALL), ALL, Some("e2e_agent");
    OmniSpeechStreamAbortedTotal Real::In(&["omni"]), &["omni"], None;
    OmniSpeechStreamCompletedTotal Real::In(&["omni"]), &["omni"], None;
    OmniStageGenTimeS Real::In(ALL), ALL, Some("e2e_agent");
    OmniStageInQueueS Real::In(&["ardit"]), &["ardit"], Some("e2e_diffusion");
    OmniStageWaitingRequests Real::Not("0 at rest, when pages are compared"), NO_DATA, Some("e2e_agent");
    OmniTransferInFlightS Real::In(OMNI), &["omni"], Some("e2e_transfers");
    OmniTransferRxS Real::In(OMNI), &["omni"], Some("e2e_transfers");
    OmniTransferSizeBytes Real::In(&["omni", "omni-off", "ardit"]), &["omni", "ardit"], Some("e2e_transfers");
    OmniTransferTxS Real::In(&["omni", "omni-off", "ardit"]), &["omni", "ardit"], Some("e2e_transfers");
    OmniVaeDecodeS PROFILER, NO_DATA, Some("e2e_diffusion");
};

/// The lines around the table in docs/parity.md.
pub const MARKS: [&str; 2] = [
    "<!-- Begin: written from agent/src/metrics/seen.rs; a test compares it with the code. -->\n",
    "<!-- End -->\n",
];

/// The table as Markdown.
#[must_use]
pub fn markdown() -> String {
    let mut text = String::from(
        "| family | source | real servers | recordings | bundled pipeline |\n|---|---|---|---|---|\n",
    );
    for seen in SEEN {
        let row = seen.family.row();
        let real = match seen.real {
            Real::In(cases) => cases.join(", "),
            Real::Not(reason) => format!("no: {reason}"),
        };
        let _ = writeln!(
            text,
            "| `{}` | {} | {real} | {} | {} |",
            row.name.trim_start_matches("vllm_omni:"),
            row.source.as_str(),
            seen.recorded.join(", "),
            seen.bundled.unwrap_or_default(),
        );
    }
    text
}
