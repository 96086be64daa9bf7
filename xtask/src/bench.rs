//! `cargo xtask bench`: what the probe, the decoder, the scrape and the agent cost, as ratios measured side by side.

mod decode;
mod forwarder;
mod hit;
mod http;
mod load;
mod real;
mod render;
mod stats;
mod statsock;
mod transfers;

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use serde::Serialize;

use crate::{real::agent, setup, test::PYTHON_PACKAGES};

/// Options of `cargo xtask bench`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run only these parts
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Bench>,
    /// Requests a side in the parts `real` and `forwarder`
    #[arg(long, default_value_t = 120, value_parser = clap::value_parser!(u16).range(10..=2000))]
    requests: u16,
    /// The agent's program instead of a release build of this tree
    #[arg(long)]
    agent: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Bench {
    /// A hit of the probe against a hit of an empty one
    Hit,
    /// Decoding against msgspec's typed decoding; decode, state and observation a frame
    Decode,
    /// The text of 10,000 sample lines against Python's client library, and over HTTP
    Render,
    /// Resident memory with 10,000 sample lines and 10,000 open requests
    Memory,
    /// The agent's CPU beside an idle pipeline
    Idle,
    /// Payloads between two stages through shared memory, with the agent and without; a poll of the receiver
    Transfers,
    /// 100,000 stat events a second for half a minute
    Statsock,
    /// What the forwarder costs: an event, and latency of a speech request of the real Audex server
    Forwarder,
    /// A hit of the HTTP tap against one of an empty probe, and the requests a second of an API server with it
    Http,
    /// CPU and latency of a speech request of the real Audex server, with the agent and without
    Real,
}

impl Bench {
    fn name(self) -> &'static str {
        match self {
            Self::Hit => "hit",
            Self::Decode => "decode",
            Self::Render => "render",
            Self::Memory => "memory",
            Self::Idle => "idle",
            Self::Transfers => "transfers",
            Self::Statsock => "statsock",
            Self::Forwarder => "forwarder",
            Self::Http => "http",
            Self::Real => "real",
        }
    }
}

/// A measured figure and its bound.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figure {
    what: String,
    value: f64,
    unit: &'static str,
    bound: Option<Bound>,
    /// What else belongs to the figure: its parts, its spread.
    detail: String,
}

/// What a figure should be.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Bound {
    AtMost(f64),
    AtLeast(f64),
}

impl Figure {
    fn new(what: &str, value: f64, unit: &'static str, bound: Option<Bound>, detail: String) -> Self {
        Self {
            what: what.to_owned(),
            value,
            unit,
            bound,
            detail,
        }
    }

    fn verdict(&self) -> &'static str {
        match self.bound {
            None => "",
            Some(Bound::AtMost(most)) if self.value <= most => "met",
            Some(Bound::AtLeast(least)) if self.value >= least => "met",
            Some(_) => "MISSED",
        }
    }
}

/// Measures with the agent that was named, or a new release build.
fn with_agent(args: &Args, measure: impl Fn(&Path) -> Result<Vec<Figure>>) -> Result<Vec<Figure>> {
    match &args.agent {
        Some(program) => measure(program),
        None => measure(&agent::build()?),
    }
}

/// A Python with msgspec, pyzmq and the Prometheus client: the one of the bundled pipeline.
fn python() -> Result<PathBuf> {
    setup::venv("venv", PYTHON_PACKAGES)
}

/// Runs the task. Missed bounds are printed, not errors: a busy machine must not fail a build.
pub(crate) fn run(args: &Args) -> Result<()> {
    let all = [
        Bench::Hit,
        Bench::Decode,
        Bench::Render,
        Bench::Memory,
        Bench::Idle,
        Bench::Transfers,
        Bench::Statsock,
        Bench::Forwarder,
        Bench::Http,
        Bench::Real,
    ];
    let benches = if args.only.is_empty() {
        all.to_vec()
    } else {
        args.only.clone()
    };
    let folder = setup::target_dir().join("bench");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let mut table = Vec::new();
    let mut failed = Vec::new();
    for bench in benches {
        eprintln!("xtask: measuring {}", bench.name());
        let figures = match bench {
            Bench::Hit => hit::measure(),
            Bench::Decode => decode::measure(),
            Bench::Render => with_agent(args, |agent| render::measure(agent, &folder)),
            Bench::Memory => with_agent(args, |agent| load::memory(agent, &folder)),
            Bench::Idle => with_agent(args, |agent| load::idle(agent, &folder)),
            Bench::Transfers => with_agent(args, |agent| transfers::measure(agent, &folder)),
            Bench::Statsock => with_agent(args, |agent| statsock::measure(agent, &folder)),
            Bench::Forwarder => with_agent(args, |agent| {
                forwarder::measure(agent, &folder, args.requests.into())
            }),
            Bench::Http => with_agent(args, |agent| http::measure(agent, &folder)),
            Bench::Real => with_agent(args, |agent| real::measure(agent, &folder, args.requests.into())),
        };
        match figures {
            Ok(figures) => {
                let path = folder.join(format!("{}.json", bench.name()));
                fs::write(&path, serde_json::to_string_pretty(&figures)?)?;
                table.extend(figures);
            }
            Err(error) => {
                eprintln!("xtask: {} could not be measured: {error:#}", bench.name());
                failed.push(bench.name());
            }
        }
    }
    print(&table);
    println!("figures as JSON in {}", folder.display());
    ensure!(failed.is_empty(), "not measured: {}", failed.join(", "));
    Ok(())
}

fn print(table: &[Figure]) {
    println!(
        "{:<62} {:>10} {:<8} {:>10} {:<7} detail",
        "what", "figure", "", "bound", "verdict"
    );
    for figure in table {
        let bound = match figure.bound {
            None => String::new(),
            Some(Bound::AtMost(most)) => format!("<= {most}"),
            Some(Bound::AtLeast(least)) => format!(">= {least}"),
        };
        println!(
            "{:<62} {:>10.3} {:<8} {:>10} {:<7} {}",
            figure.what,
            figure.value,
            figure.unit,
            bound,
            figure.verdict(),
            figure.detail
        );
    }
}
