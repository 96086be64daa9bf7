//! vLLM-Omni's coordinator: the replicas of a distributed deployment, those on other nodes among them.
//!
//! [`subscribe`] finds the coordinator's sockets and listens to the list that it publishes; [`families::Replicas`] shows it.
//! With no coordinator on the host and none configured nothing is opened.

pub mod families;
pub mod sample;
pub mod subscribe;
