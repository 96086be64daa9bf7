//! `cargo xtask test`.

use anyhow::Result;

/// Options of `cargo xtask test`.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Runs the task.
pub(crate) fn run(_args: &Args) -> Result<()> {
    anyhow::bail!("not built yet")
}
