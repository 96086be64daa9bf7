//! `cargo xtask real`.

use anyhow::Result;

/// Options of `cargo xtask real`.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Runs the task.
pub(crate) fn run(_args: &Args) -> Result<()> {
    anyhow::bail!("not built yet")
}
