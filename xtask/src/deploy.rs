//! `cargo xtask deploy`: proves what is under deploy/, each with the tool that will read it.

mod helm;
mod manifests;

use anyhow::Result;

/// Options of `cargo xtask deploy`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Write the plain manifests anew from the chart
    #[arg(long)]
    write: bool,
}

/// Runs the task.
pub(crate) fn run(args: &Args) -> Result<()> {
    manifests::run(args.write)
}
