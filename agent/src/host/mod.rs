//! What runs on this host: processes and their roles, pipelines, package versions, containers.

pub mod identity;
