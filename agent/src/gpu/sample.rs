//! What one look at all GPUs shows: pure values, which recordings carry.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How NVML is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// No watched process uses a GPU: NVML is closed.
    #[default]
    Unused,
    /// It is being opened.
    Opening,
    /// It answers.
    Ok,
    /// The library is nowhere.
    NoLibrary,
    /// The library is there, the kernel's driver is not.
    NoDriver,
    /// Library and driver are of different versions: an update waits for a restart.
    VersionMismatch,
    /// The driver refuses this process.
    NoPermission,
    /// There is no GPU.
    NoGpu,
    /// It fails otherwise.
    Failed,
}

impl State {
    /// Value of the label `state`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unused => "unused",
            Self::Opening => "opening",
            Self::Ok => "ok",
            Self::NoLibrary => "no_library",
            Self::NoDriver => "no_driver",
            Self::VersionMismatch => "version_mismatch",
            Self::NoPermission => "no_permission",
            Self::NoGpu => "no_gpu",
            Self::Failed => "failed",
        }
    }
}

/// What NVML was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Call {
    /// Opening the library.
    Init,
    /// The number of GPUs.
    Count,
    /// A GPU by its index.
    Device,
    /// Its UUID.
    Uuid,
    /// Its product name.
    Name,
    /// Its memory.
    Memory,
    /// How busy it is.
    Utilization,
    /// Its power.
    Power,
    /// Its temperature.
    Temperature,
    /// Its memory errors.
    Ecc,
    /// Whether it is divided into instances, and those.
    Mig,
    /// Its processes.
    Processes,
    /// The driver's account of a process.
    Accounting,
}

impl Call {
    /// Value of the label `call`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Init => "init",
            Self::Count => "count",
            Self::Device => "device",
            Self::Uuid => "uuid",
            Self::Name => "name",
            Self::Memory => "memory",
            Self::Utilization => "utilization",
            Self::Power => "power",
            Self::Temperature => "temperature",
            Self::Ecc => "ecc",
            Self::Mig => "mig",
            Self::Processes => "processes",
            Self::Accounting => "accounting",
        }
    }
}

/// Why a call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// This GPU, or this library, has no such thing.
    NotSupported,
    /// The driver refuses this process.
    NoPermission,
    /// The GPU is off the bus.
    GpuLost,
    /// The GPU waits for a reset.
    ResetRequired,
    /// The driver is not there (any more).
    NoDriver,
    /// Library and driver are of different versions.
    VersionMismatch,
    /// The library is not there.
    NoLibrary,
    /// Everything else.
    Other,
}

impl Fault {
    /// Value of the label `error`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotSupported => "not_supported",
            Self::NoPermission => "no_permission",
            Self::GpuLost => "gpu_lost",
            Self::ResetRequired => "reset_required",
            Self::NoDriver => "no_driver",
            Self::VersionMismatch => "version_mismatch",
            Self::NoLibrary => "no_library",
            Self::Other => "other",
        }
    }
}

/// One look at all GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuSample {
    /// How NVML is.
    pub state: State,
    /// The next look comes within this many milliseconds, if NVML answers.
    #[serde(default)]
    pub pause_ms: u64,
    /// Version of the driver.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// The GPUs, and the instances of those that are divided.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<Device>,
    /// Calls that failed in this look.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<(Call, Fault)>,
    /// Samples since the one before that could not be handed over.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub lost: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde wants it so")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

impl GpuSample {
    /// How long the next look may be away before this one counts as old.
    #[must_use]
    pub fn stale_after(&self) -> Duration {
        const SHORTEST: Duration = Duration::from_secs(5);
        SHORTEST.max(Duration::from_millis(self.pause_ms).saturating_mul(5))
    }
}

/// A GPU, or an instance of one. What could not be read is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// NVML's index of the GPU.
    pub index: u32,
    /// Index of the instance (MIG) in its GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<u32>,
    /// UUID with its prefix, `GPU-` or `MIG-`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Product name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Memory in use and in all, bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<(u64, u64)>,
    /// Share of time that it was busy, percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub utilization: Option<u32>,
    /// Power in milliwatts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_mw: Option<u32>,
    /// Temperature in degrees Celsius.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature_c: Option<u32>,
    /// Memory errors over its life: corrected, uncorrected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ecc: Option<(u64, u64)>,
    /// Processes that compute on it. Those of a divided GPU are at its instances.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processes: Option<Vec<GpuProcess>>,
}

/// A process that has a GPU open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuProcess {
    /// Process id in the initial PID namespace.
    pub pid: u32,
    /// Whose it is.
    pub owner: Owner,
    /// Bytes in use now. `None`: the driver does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used: Option<u64>,
    /// The most bytes that it has used, by the driver's accounting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak: Option<u64>,
}

/// Whose a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Owner {
    /// It is this watched process, or below it.
    Watched(u32),
    /// No watched process is above it.
    Foreign,
    /// There is no such process here: it has just ended, or its id is one of another PID namespace.
    Unseen,
}
