//! `cargo xtask`: every task of the project's life. Each installs what it needs and says so.

mod bench;
mod demo;
mod deploy;
mod docs;
mod ebpf;
mod image;
mod real;
mod setup;
mod test;
mod vm;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Tasks of the omnitap project")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Build the BPF objects from source into agent-ebpf/prebuilt
    Ebpf(ebpf::Args),
    /// Run the agent beside the bundled live pipeline and show its families
    Demo(demo::Args),
    /// Run all tests
    Test(test::Args),
    /// Run the agent against real vLLM and vLLM-Omni servers and compare with their own /metrics
    Real(real::Args),
    /// Measure what the probe, the decoder, the scrape and the agent cost
    Bench(bench::Args),
    /// Prove what is under deploy/, each with the tool that will read it
    Deploy(deploy::Args),
    /// Check that what the documentation names is there
    Docs(docs::Args),
    /// Prove the steps of the container image in bare Debian roots, and run the agent in one
    Image(image::Args),
    /// Run the tap inside Debian kernels under QEMU
    Vm(vm::Args),
}

fn main() -> Result<()> {
    match Cli::parse().task {
        Task::Ebpf(args) => ebpf::run(&args),
        Task::Demo(args) => demo::run(&args),
        Task::Test(args) => test::run(&args),
        Task::Real(args) => real::run(&args),
        Task::Bench(args) => bench::run(&args),
        Task::Deploy(args) => deploy::run(&args),
        Task::Docs(args) => docs::run(&args),
        Task::Image(args) => image::run(&args),
        Task::Vm(args) => vm::run(&args),
    }
}
