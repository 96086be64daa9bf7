//! `cargo xtask test`: all tests, those that need root where this is root.

use std::{ffi::OsStr, process::Command};

use anyhow::Result;

use crate::{real::kit, setup};

/// Packages of the bundled pipeline, the parser that the exposition is held against, and the HTTP server that vLLM runs.
pub(crate) const PYTHON_PACKAGES: &[&str] = &[
    "pyzmq==27.3.0",
    "msgspec==0.23.0",
    "setproctitle==1.3.8",
    "prometheus-client==0.26.0",
    "uvicorn==0.54.0",
    "uvloop==0.23.0",
    "httptools==0.9.0",
    "h11==0.16.0",
    "websockets==15.0.1",
];

/// Options of `cargo xtask test`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run only tests whose name contains this
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Run only the tests of one package (omnitap, omnitap-ebpf, omnitap-tests, xtask)
    #[arg(long, value_name = "NAME")]
    package: Option<String>,
    /// Options for the test binaries, such as --nocapture
    #[arg(last = true)]
    rest: Vec<String>,
}

/// Runs the task.
pub(crate) fn run(args: &Args) -> Result<()> {
    // A C compiler builds the functions that probe sites are chosen in.
    // tmux is the terminal that `omnitap top` is tested in.
    setup::debian(&[
        ("/usr/bin/gcc", "gcc"),
        ("/usr/include/stdio.h", "libc6-dev"),
        ("/usr/bin/tmux", "tmux"),
    ])?;
    let python = setup::venv("venv", PYTHON_PACKAGES)?;
    setup::run(setup::cargo().args(["build", "--package", "omnitap"]))?;
    if args.package.is_none() && args.filter.is_none() {
        // In the servers' venv where there is one: its hooks are tested in the real vLLM-Omni.
        let (python, environment) = kit::python_with_omni().unwrap_or_else(|| (python.clone(), Vec::new()));
        setup::run(
            Command::new(python)
                .envs(environment)
                .current_dir(setup::root())
                .args(["-m", "unittest", "discover", "--start-directory", "integrations"]),
        )?;
    }

    let skipped = setup::target_dir().join("skipped-tests.txt");
    std::fs::write(&skipped, "")?;
    let mut cargo: Command = setup::cargo();
    cargo
        .env(omnitap_tests::PYTHON, python)
        .env(omnitap_tests::BINARY, setup::target_dir().join("debug/omnitap"))
        .env(omnitap_tests::SKIPPED, &skipped)
        .args(["test", "--no-fail-fast"]);
    match &args.package {
        Some(package) => cargo.args(["--package", package]),
        None => cargo.arg("--workspace"),
    };
    cargo
        .args(&args.filter)
        .arg("--")
        .args(args.rest.iter().map(OsStr::new));
    let result = setup::run(&mut cargo);

    let skipped = std::fs::read_to_string(skipped)?;
    if skipped.is_empty() {
        println!("\nNo test was skipped.");
    } else {
        println!("\n{} tests were skipped:\n{skipped}", skipped.lines().count());
        if !setup::is_root() {
            println!("As root they run: sudo -E env \"PATH=$PATH\" cargo xtask test");
        }
    }
    result
}
