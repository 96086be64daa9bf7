//! The command line.

use std::{ffi::OsString, path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};

use crate::config::{Flags, ListenAddress};

/// Exit status for a wrong command line or configuration (`EX_USAGE` of sysexits.h).
pub const EX_USAGE: u8 = 64;

/// The command line of `omnitap`.
#[derive(Debug, Parser)]
#[command(
    name = "omnitap",
    version,
    about = "Serves the Prometheus families of vLLM-Omni and vLLM pipelines on this host, from outside"
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Watch the pipelines of this host and serve their families on /metrics
    Run(Flags),
    /// Say what this machine lacks for the tap, and what to do about it
    Check {
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// Settings
        #[command(flatten)]
        flags: Flags,
    },
    /// Print the effective configuration as YAML, with where each value is from
    Config(Flags),
    /// List all families: name, type, labels, bucket set and source, separated by tabs
    Families {
        /// Print the page docs/metrics.md instead
        #[arg(long)]
        markdown: bool,
    },
    /// Write what the tap sees to a file, without token ids, text and media
    Record {
        /// File to write
        file: PathBuf,
        /// Keep token ids, text and media
        #[arg(long)]
        with_content: bool,
        /// Settings
        #[command(flatten)]
        flags: Flags,
    },
    /// Print the families that a recording gives
    Replay {
        /// File to read
        file: PathBuf,
        /// Print OpenMetrics
        #[arg(long)]
        openmetrics: bool,
    },
    /// Print what became of each request: a summary, its stages and its transfers. The agent keeps that with
    /// requests.enabled
    Requests {
        /// The agent
        #[command(flatten)]
        agent: AgentAddress,
        /// Print a JSON object a line
        #[arg(long)]
        json: bool,
        /// Print what the agent has kept, and end
        #[arg(long)]
        once: bool,
    },
    /// Show the pipelines, and each request as it passes its stages, in the terminal
    Top(AgentAddress),
    /// Print the version
    Version,
}

/// The running agent that a command asks.
#[derive(Clone, Debug, clap::Args)]
pub struct AgentAddress {
    /// Where the agent listens: one of its web.listen-address
    #[arg(
        long = "agent",
        value_name = "ADDRESS",
        env = "OMNITAP_AGENT",
        default_value = "127.0.0.1:9477"
    )]
    pub address: ListenAddress,
}

impl Cli {
    /// Reads a command line. An error has been printed (as have help and version) and is the exit status.
    pub fn read<I, T>(args: I) -> Result<Self, ExitCode>
    where
        I: IntoIterator<Item = T>,
        T: Into<OsString> + Clone,
    {
        Self::try_parse_from(args).map_err(|error| {
            // Nothing can be done where even this can't be printed.
            let _ = error.print();
            if error.use_stderr() {
                ExitCode::from(EX_USAGE)
            } else {
                ExitCode::SUCCESS
            }
        })
    }
}
