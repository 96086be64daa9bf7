//! What runs on this host: processes and their roles, pipelines, package versions, containers.

pub mod connectors;
pub mod container;
pub mod diffusion;
pub mod identity;
pub mod pipelines;
pub mod role;
pub mod scan;
pub mod sockets;
pub mod versions;

pub use scan::{Host, HostError, Settings};
