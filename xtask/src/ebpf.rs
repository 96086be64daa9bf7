//! `cargo xtask ebpf`.

use anyhow::Result;

/// Options of `cargo xtask ebpf`.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Runs the task.
pub(crate) fn run(_args: &Args) -> Result<()> {
    anyhow::bail!("not built yet")
}
