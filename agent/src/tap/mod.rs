//! The only room with `unsafe` and aya: loads the BPF object, attaches and detaches probes, reads the ring buffer, counts losses.

pub mod maps;
pub mod site;
pub mod symbol;
