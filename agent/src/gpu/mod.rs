//! GPUs: what NVIDIA's management library (NVML) shows of them, and which stage it belongs to.
//!
//! A thread of its own asks NVML ([`sampler`], [`read`]) and hands pure values ([`sample`]) to the reader, whose
//! [`families::Gpus`] tells stages and peaks. A call that hangs in the driver holds up that thread alone.
//!
//! NVML is open only while a watched process has a GPU open: an open NVML keeps a driver from being unloaded and a GPU
//! from being reset.

pub mod families;
pub mod library;
mod read;
pub mod sample;
pub mod sampler;

use std::path::PathBuf;

use self::sample::{Fault, State};

/// What a trial of NVML found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trial {
    /// The library that works.
    pub library: PathBuf,
    /// Version of the driver.
    pub driver: Option<String>,
    /// Number of GPUs.
    pub gpus: u32,
}

/// Opens NVML for a moment, as the sampler does. A call may hang in the driver.
pub fn trial(libraries: &[PathBuf]) -> Result<Trial, State> {
    let mut fault = Fault::NoLibrary;
    for library in library::candidates(libraries) {
        match read::open(&library) {
            Ok(nvml) => {
                let gpus = nvml
                    .device_count()
                    .map_err(|error| read::state(read::fault(&error)))?;
                let driver = nvml.sys_driver_version().ok();
                return Ok(Trial {
                    library,
                    driver,
                    gpus,
                });
            }
            Err(Fault::NoLibrary) => {}
            Err(other) => fault = other,
        }
    }
    Err(read::state(fault))
}
