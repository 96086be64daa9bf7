//! The calls of NVML: each failure costs one field of one device, and is noted.

use std::{collections::HashMap, path::Path, time::Duration};

use nvml_wrapper::{
    Device as Handle, Nvml,
    enum_wrappers::device::{EccCounter, MemoryError, TemperatureSensor},
    enums::device::UsedGpuMemory,
    error::NvmlError,
    struct_wrappers::device::ProcessInfo,
};

use super::sample::{Call, Device, Fault, GpuProcess, Owner, State};

/// Most GPUs, instances of a GPU and processes of a GPU that are looked at.
const MAX_GPUS: u32 = 64;
const MAX_INSTANCES: u32 = 16;
const MAX_PROCESSES: usize = 1024;

/// No GPU has as much memory: what exceeds it is a mark for "not known".
const MAX_BYTES: u64 = 1 << 50;

/// What a device does not support is asked for again after this time: the driver may have changed.
const REST: Duration = Duration::from_mins(1);

/// Calls that rest, by index of GPU and instance.
pub(super) type Resting = HashMap<(u32, Option<u32>, Call), Duration>;

/// Opens a library.
pub(super) fn open(library: &Path) -> Result<Nvml, Fault> {
    Nvml::builder()
        .lib_path(library.as_os_str())
        .init()
        .map_err(|error| fault(&error))
}

pub(super) fn fault(error: &NvmlError) -> Fault {
    match error {
        // An older library lacks newer functions; an older driver does not know what newer libraries ask.
        NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound => {
            Fault::NotSupported
        }
        NvmlError::NoPermission => Fault::NoPermission,
        NvmlError::GpuLost => Fault::GpuLost,
        NvmlError::ResetRequired => Fault::ResetRequired,
        NvmlError::DriverNotLoaded | NvmlError::Uninitialized => Fault::NoDriver,
        NvmlError::LibRmVersionMismatch => Fault::VersionMismatch,
        NvmlError::LibraryNotFound | NvmlError::LibloadingError(_) => Fault::NoLibrary,
        _ => Fault::Other,
    }
}

/// The state that a failure of the whole library means.
pub(super) fn state(fault: Fault) -> State {
    match fault {
        Fault::NoDriver => State::NoDriver,
        Fault::VersionMismatch => State::VersionMismatch,
        Fault::NoPermission => State::NoPermission,
        Fault::NoLibrary => State::NoLibrary,
        Fault::NotSupported | Fault::GpuLost | Fault::ResetRequired | Fault::Other => State::Failed,
    }
}

/// One look at all GPUs.
pub(super) struct Look<'a> {
    pub(super) nvml: &'a Nvml,
    pub(super) now: Duration,
    pub(super) resting: &'a mut Resting,
    pub(super) faults: Vec<(Call, Fault)>,
}

impl Look<'_> {
    /// The GPUs and their instances; `owner` tells whose a process is. An error is one of the library as a whole.
    pub(super) fn devices(&mut self, owner: &mut dyn FnMut(u32) -> Owner) -> Result<Vec<Device>, Fault> {
        let count = self.nvml.device_count().map_err(|error| {
            let fault = fault(&error);
            self.faults.push((Call::Count, fault));
            fault
        })?;
        let mut devices = Vec::new();
        for index in 0..count.min(MAX_GPUS) {
            let place = (index, None);
            let Some(handle) = self.get(place, Call::Device, || self.nvml.device_by_index(index)) else {
                continue;
            };
            let instances = self.instances(index, &handle);
            let mut gpu = self.device(place, &handle);
            // The processes of a divided GPU belong to its instances.
            match instances {
                None => gpu.processes = self.processes(place, &handle, owner),
                Some(instances) => {
                    devices.push(gpu);
                    for (at, handle) in instances {
                        let place = (index, Some(at));
                        let mut instance = self.device(place, &handle);
                        instance.processes = self.processes(place, &handle, owner);
                        devices.push(instance);
                    }
                    continue;
                }
            }
            devices.push(gpu);
        }
        Ok(devices)
    }

    /// Whether a fault says that the library must be opened anew.
    pub(super) fn broken(&self) -> Option<Fault> {
        let faults = self.faults.iter().map(|(_, fault)| *fault);
        faults
            .into_iter()
            .find(|fault| matches!(fault, Fault::NoDriver | Fault::VersionMismatch))
    }

    /// Whether a GPU is lost to this process, perhaps until the library is opened anew.
    pub(super) fn lost(&self) -> bool {
        self.faults
            .iter()
            .any(|(_, fault)| matches!(fault, Fault::GpuLost | Fault::ResetRequired))
    }

    /// Makes a call, unless it rests. What the device lacks then rests.
    fn get<T>(
        &mut self,
        (index, mig): (u32, Option<u32>),
        call: Call,
        ask: impl FnOnce() -> Result<T, NvmlError>,
    ) -> Option<T> {
        let key = (index, mig, call);
        if self.resting.get(&key).is_some_and(|until| self.now < *until) {
            return None;
        }
        match ask() {
            Ok(value) => {
                self.resting.remove(&key);
                Some(value)
            }
            Err(error) => {
                let fault = fault(&error);
                if fault == Fault::NotSupported {
                    self.resting.insert(key, self.now + REST);
                }
                self.faults.push((call, fault));
                None
            }
        }
    }

    /// The instances of a GPU that is divided.
    fn instances<'n>(&mut self, index: u32, gpu: &Handle<'n>) -> Option<Vec<(u32, Handle<'n>)>> {
        let place = (index, None);
        let mode = self.get(place, Call::Mig, || gpu.mig_mode())?;
        if mode.current == 0 {
            return None;
        }
        let count = self.get(place, Call::Mig, || gpu.mig_device_count()).unwrap_or(0);
        let handles = (0..count.min(MAX_INSTANCES)).filter_map(|at| match gpu.mig_device_by_index(at) {
            Ok(handle) => Some((at, handle)),
            // Places without an instance.
            Err(NvmlError::NotFound | NvmlError::InvalidArg) => None,
            Err(error) => {
                self.faults.push((Call::Mig, fault(&error)));
                None
            }
        });
        Some(handles.collect())
    }

    fn device(&mut self, place: (u32, Option<u32>), handle: &Handle<'_>) -> Device {
        let (index, mig) = place;
        let ecc = |kind| handle.total_ecc_errors(kind, EccCounter::Aggregate);
        Device {
            index,
            mig,
            uuid: self.get(place, Call::Uuid, || handle.uuid()),
            name: self.get(place, Call::Name, || handle.name()),
            memory: self
                .get(place, Call::Memory, || handle.memory_info())
                .map(|memory| (memory.used, memory.total)),
            utilization: self
                .get(place, Call::Utilization, || handle.utilization_rates())
                .map(|rates| rates.gpu),
            power_mw: self.get(place, Call::Power, || handle.power_usage()),
            temperature_c: self.get(place, Call::Temperature, || {
                handle.temperature(TemperatureSensor::Gpu)
            }),
            ecc: self.get(place, Call::Ecc, || {
                Ok((ecc(MemoryError::Corrected)?, ecc(MemoryError::Uncorrected)?))
            }),
            processes: None,
        }
    }

    fn processes(
        &mut self,
        place: (u32, Option<u32>),
        handle: &Handle<'_>,
        owner: &mut dyn FnMut(u32) -> Owner,
    ) -> Option<Vec<GpuProcess>> {
        let all: Vec<ProcessInfo> = self.get(place, Call::Processes, || {
            match handle.running_compute_processes() {
                // Drivers before 510 have the function under its older name alone.
                Err(NvmlError::FailedToLoadSymbol(_)) => handle.running_compute_processes_v2(),
                answer => answer,
            }
        })?;
        let accounts = self
            .get(place, Call::Accounting, || handle.is_accounting_enabled())
            .unwrap_or(false);
        let mut processes: Vec<GpuProcess> = Vec::new();
        for info in all.into_iter().take(MAX_PROCESSES) {
            let owner = owner(info.pid);
            let is_ours = matches!(owner, Owner::Watched(_));
            let peak = if accounts && is_ours {
                self.peak(handle, info.pid)
            } else {
                None
            };
            let used = match info.used_gpu_memory {
                UsedGpuMemory::Used(bytes) if bytes <= MAX_BYTES => Some(bytes),
                UsedGpuMemory::Used(_) | UsedGpuMemory::Unavailable => None,
            };
            processes.push(GpuProcess {
                pid: info.pid,
                owner,
                used,
                peak,
            });
        }
        Some(processes)
    }

    fn peak(&mut self, handle: &Handle<'_>, pid: u32) -> Option<u64> {
        match handle.accounting_stats_for(pid) {
            Ok(stats) => stats.max_memory_usage.filter(|bytes| *bytes <= MAX_BYTES),
            // Not written down yet, or ended since.
            Err(NvmlError::NotFound) => None,
            Err(error) => {
                self.faults.push((Call::Accounting, fault(&error)));
                None
            }
        }
    }
}
