//! Decoding against msgspec's typed decoding of the same bytes, and the whole work for a frame.

use std::{collections::BTreeMap, fs, path::Path, process::Command};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{
    Bound, Figure,
    stats::{median, range},
};
use crate::setup;

const ROUNDS: usize = 5;
const BENCHES: [&str; 2] = ["wire", "observer"];

pub(super) fn measure() -> Result<Vec<Figure>> {
    let python = super::python()?;
    setup::run(cargo_bench().arg("--no-run"))?;
    let mut theirs: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    let mut ours: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for _ in 0..ROUNDS {
        let script = setup::root().join("agent/benches/msgspec_decode.py");
        let out = setup::output(pinned(&python).arg(script).args(["--seconds", "0.2"]))?;
        for line in out.lines() {
            let row: Value = serde_json::from_str(line)?;
            let (Some(name), Some(ns)) = (row["name"].as_str(), row["ns"].as_f64()) else {
                continue;
            };
            theirs.entry(name.to_owned()).or_default().push(ns);
        }
        let mut cargo = cargo_bench();
        cargo.args([
            "--",
            "--warm-up-time",
            "0.3",
            "--measurement-time",
            "1",
            "--noplot",
            "--quiet",
        ]);
        let mut bench = pinned(Path::new(cargo.get_program()));
        setup::output(bench.args(cargo.get_args()).current_dir(setup::root()))?;
        estimates(&setup::target_dir().join("criterion"), &mut ours)?;
    }
    figures(&theirs, &ours)
}

fn figures(theirs: &BTreeMap<String, Vec<f64>>, ours: &BTreeMap<String, Vec<f64>>) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for (name, theirs) in theirs {
        let decode = ours
            .get(&format!("wire/decode/{name}"))
            .with_context(|| format!("no decode bench of {name}"))?;
        let (least, most) = range(decode);
        figures.push(Figure::new(
            &format!("decode: msgspec to ours, {name}"),
            median(theirs) / median(decode),
            "x",
            Some(Bound::AtLeast(2.0)),
            format!(
                "{:.0} and {:.0} ns ({least:.0} to {most:.0})",
                median(theirs),
                median(decode)
            ),
        ));
    }
    let whole = |name: &str| name.strip_prefix("observer/").map(str::to_owned);
    for (name, samples) in ours
        .iter()
        .filter_map(|(name, samples)| Some((whole(name)?, samples)))
    {
        let (outputs, bound) = if name.contains("64") {
            (64.0, 0.2)
        } else {
            (1.0, 0.5)
        };
        let (least, most) = range(samples);
        figures.push(Figure::new(
            &format!("decode, state, observation: an output, {name}"),
            median(samples) / outputs / 1e3,
            "us",
            Some(Bound::AtMost(bound)),
            format!("{:.0} ns a frame ({least:.0} to {most:.0})", median(samples)),
        ));
    }
    ensure!(!figures.is_empty(), "the benches measured nothing");
    Ok(figures)
}

fn cargo_bench() -> Command {
    let mut cargo = setup::cargo();
    cargo.args(["bench", "--quiet", "--package", "omnitap"]);
    for bench in BENCHES {
        cargo.args(["--bench", bench]);
    }
    cargo
}

/// On the last CPU alone.
fn pinned(program: &Path) -> Command {
    let last = std::thread::available_parallelism().map_or(0, |n| n.get() - 1);
    let mut command = Command::new("taskset");
    command.args(["-c", &last.to_string()]).arg(program);
    command
}

/// Takes criterion's newest medians in nanoseconds, by the full name of each bench.
fn estimates(folder: &Path, into: &mut BTreeMap<String, Vec<f64>>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("no {}", folder.display()))? {
        let path = entry?.path();
        if path.ends_with("new") {
            let read = |name: &str| -> Result<Value> {
                let file = path.join(name);
                let text = fs::read(&file).with_context(|| format!("no {}", file.display()))?;
                Ok(serde_json::from_slice(&text)?)
            };
            let name = read("benchmark.json")?;
            let median = read("estimates.json")?["median"]["point_estimate"].as_f64();
            if let (Some(name), Some(median)) = (name["full_id"].as_str(), median) {
                into.entry(name.to_owned()).or_default().push(median);
            }
        } else if path.is_dir() {
            estimates(&path, into)?;
        }
    }
    Ok(())
}
