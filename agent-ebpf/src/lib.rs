//! The event layout that the BPF programs write and the agent reads.
#![cfg_attr(target_arch = "bpf", no_std)]
