//! `cargo xtask deploy`: proves what is under deploy/, each with the tool that will read it.

mod dashboards;
mod helm;
mod live;
mod manifests;
mod promql;
mod rules;
mod unit;

use anyhow::Result;

use crate::setup;

/// Options of `cargo xtask deploy`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Write the plain manifests anew from the chart
    #[arg(long)]
    write: bool,
    /// Let a real Prometheus scrape the agent beside the bundled pipeline, and ask for the data of every panel
    #[arg(long)]
    live: bool,
}

/// Runs the task.
pub(crate) fn run(args: &Args) -> Result<()> {
    setup::run(setup::cargo().args(["build", "--quiet", "--package", "omnitap"]))?;
    let mut names = promql::Names::of_catalogue()?;
    rules::run(&mut names)?;
    let panels = dashboards::run(&names)?;
    if args.live {
        return live::run(&names, &panels);
    }
    manifests::run(args.write)?;
    unit::run()
}
