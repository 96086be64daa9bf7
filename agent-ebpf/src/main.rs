//! BPF programs of omnitap, one file a probe family.
//!
//! Rules that hold for each of them:
//!
//! - Less than 64 bytes of stack, calls included, and no per-CPU scratch. Kernels from 6.13 on give a probe
//!   program that uses more a private stack for each CPU, and two probes that preempt each other there
//!   corrupt it. `tests/stack.rs` reads the built objects for it.
//! - User memory is read with `bpf_probe_read_user` and its kin for strings alone, kernel memory never: lockdown forbids that.
//! - Nothing newer than Linux 5.8, which brought the ring buffer.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

mod frames;
mod http;
mod maps;
mod processes;
mod shm;
mod store;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // No path of the programs panics; the verifier would refuse an endless loop.
    loop {}
}

/// The kernel gives some helpers to programs under a licence compatible with the GPL only.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
