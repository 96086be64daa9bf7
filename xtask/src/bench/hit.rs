//! The cost of a hit: our program against an empty one on the same instruction of the same process.

use std::{path::PathBuf, process::Command};

use anyhow::{Context, Result};
use serde::Deserialize;

use super::{
    Bound, Figure,
    stats::{median, range},
};
use crate::{real::kit, setup};

/// What `agent/benches/hit.rs` prints: nanoseconds of a call, one entry a round.
#[derive(Deserialize)]
struct Size {
    bytes: u64,
    none: Vec<f64>,
    empty: Vec<f64>,
    ours: Vec<f64>,
}

impl Size {
    /// Nanoseconds that a probe adds to a call, each round's against the same round's call without a probe.
    fn added(&self, with: &[f64]) -> Vec<f64> {
        with.iter()
            .zip(&self.none)
            .map(|(with, without)| with - without)
            .collect()
    }
}

pub(super) fn measure() -> Result<Vec<Figure>> {
    let bounds = [
        (1, 1.15, "dropped"),
        (64, 1.5, "captured"),
        (1024, 1.6, "captured"),
    ];
    let sizes = run()?;
    let mut figures = Vec::new();
    for (bytes, bound, what) in bounds {
        let size = sizes
            .iter()
            .find(|s| s.bytes == bytes)
            .context("a size is missing")?;
        let (empty, ours) = (size.added(&size.empty), size.added(&size.ours));
        let ((a, b), (c, d)) = (range(&empty), range(&ours));
        figures.push(Figure::new(
            &format!(
                "hit: {bytes} byte{}, {what}, to an empty probe",
                if bytes == 1 { "" } else { "s" }
            ),
            median(&ours) / median(&empty),
            "x",
            Some(Bound::AtMost(bound)),
            format!(
                "{:.0} ns ({c:.0} to {d:.0}) and {:.0} ns ({a:.0} to {b:.0}); the call alone {:.0} ns",
                median(&ours),
                median(&empty),
                median(&size.none)
            ),
        ));
    }
    Ok(figures)
}

/// Nanoseconds of a hit of an empty probe.
pub(super) fn empty_hit() -> Result<f64> {
    let sizes = run()?;
    let size = sizes.first().context("no sizes")?;
    Ok(median(&size.added(&size.empty)))
}

fn run() -> Result<Vec<Size>> {
    let program = send_loop()?;
    let out = setup::output(
        setup::cargo()
            .args(["bench", "--quiet", "--package", "omnitap", "--bench", "hit", "--"])
            .arg(program)
            .arg(libzmq()?),
    )?;
    out.lines()
        .filter(|line| line.starts_with('{'))
        .map(|line| serde_json::from_str(line).context("the bench printed something else"))
        .collect()
}

/// The program that calls libzmq, built where it is missing or old.
fn send_loop() -> Result<PathBuf> {
    setup::debian(&[("/usr/bin/gcc", "gcc"), ("/usr/include/stdio.h", "libc6-dev")])?;
    let program = setup::target_dir().join("bench/send_loop");
    setup::run(
        Command::new("gcc")
            .args(["-O2", "-o"])
            .arg(&program)
            .arg(kit::files().join("send_loop.c"))
            .arg("-ldl"),
    )?;
    Ok(program)
}

/// The libzmq that pyzmq brings.
fn libzmq() -> Result<PathBuf> {
    let python = super::python()?;
    let code = "import pathlib, zmq; print(next((pathlib.Path(zmq.__file__).parents[1] / 'pyzmq.libs').glob('libzmq*')))";
    let path = setup::output(Command::new(python).args(["-c", code]))?;
    Ok(PathBuf::from(path.trim()))
}
