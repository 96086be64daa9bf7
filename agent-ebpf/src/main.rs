//! BPF programs of omnitap.
#![no_std]
#![no_main]
