//! `cargo xtask vm`.

use anyhow::Result;

/// Options of `cargo xtask vm`.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Runs the task.
pub(crate) fn run(_args: &Args) -> Result<()> {
    anyhow::bail!("not built yet")
}
