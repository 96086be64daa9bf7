//! `omnitap requests` and `omnitap top` beside a live pipeline, the latter in tmux.

use std::{
    process::{Command, Output},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use omnitap_tests::{
    agent::{self, Agent},
    pipeline::{Options, Pipeline},
};
use serde_json::{Value, json};

/// Longest wait for a screen or a record.
const SOON: Duration = Duration::from_secs(20);

fn address(agent: &Agent) -> String {
    agent.url().trim_start_matches("http://").to_owned()
}

fn requests(agent: &Agent, arguments: &[&str]) -> Result<Output> {
    Ok(Command::new(agent::binary()?)
        .args(["requests", "--agent", &address(agent), "--once"])
        .args(arguments)
        .output()?)
}

/// The records of a model's requests; others may run on this machine.
fn records(agent: &Agent, model: &str) -> Result<Vec<Value>> {
    let output = requests(agent, &["--json"])?;
    let told = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{told}");
    let records: Vec<Value> = str::from_utf8(&output.stdout)?
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()?;
    Ok(records
        .into_iter()
        .filter(|record| record["model"] == model)
        .collect())
}

/// A terminal of 80 columns by 24 lines with a command inside.
struct Tmux {
    socket: String,
}

impl Tmux {
    fn start(name: &str, command: &str) -> Result<Self> {
        let tmux = Self {
            socket: format!("omnitap-{name}-{}", std::process::id()),
        };
        // What it says at its end stays on the screen.
        tmux.tell(&[
            "-f",
            "/dev/null",
            "new-session",
            "-d",
            "-x",
            "80",
            "-y",
            "24",
            command,
        ])?;
        Ok(tmux)
    }

    fn tell(&self, arguments: &[&str]) -> Result<String> {
        let output = Command::new("tmux")
            .args(["-L", &self.socket])
            .args(arguments)
            .output()?;
        let told = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "tmux {arguments:?}: {told}");
        Ok(String::from_utf8(output.stdout)?)
    }

    fn press(&self, key: &str) -> Result<()> {
        self.tell(&["send-keys", key]).map(drop)
    }

    /// The screen, once all of this is on it.
    fn until(&self, wanted: &[&str]) -> Result<String> {
        let start = Instant::now();
        loop {
            let screen = self.tell(&["capture-pane", "-p"])?;
            if wanted.iter().all(|text| screen.contains(text)) {
                return Ok(screen);
            }
            ensure!(
                start.elapsed() < SOON,
                "{wanted:?} is not on the screen:\n{screen}"
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for Tmux {
    fn drop(&mut self) {
        // Its own server alone.
        let _ = self.tell(&["kill-server"]);
    }
}

/// Whether there is tmux; where there is none the test is skipped, but not in CI.
fn has_tmux() -> Result<bool> {
    if Command::new("tmux").arg("-V").output().is_ok() {
        return Ok(true);
    }
    let is_ci = std::env::var("CI").is_ok_and(|ci| ci == "true");
    ensure!(!is_ci, "no tmux: `cargo xtask test` installs it");
    omnitap_tests::skip("no tmux: `apt-get install tmux`")?;
    Ok(false)
}

#[test]
fn what_became_of_each_request() -> Result<()> {
    let Some(_turn) = omnitap_tests::privileged()? else {
        return Ok(());
    };
    let agent = Agent::start(&["--requests.enabled", "--requests.log", "json"])?;
    let scenario = json!({
        "stages": [{"kind": "ar", "step_ms": 20}, {"kind": "generation", "step_ms": 20}],
        "phases": [{
            "requests": [{"repeat": 10, "every": 0.1, "stages": [
                {"tokens": 10, "payloads": [{"bytes": 65536}, {"bytes": 65536}]},
                {"prompt": 5, "chunks": [{"frames": 4800}]}
            ]}]
        }]
    });
    let mut pipeline = Pipeline::start(Options::omni("requests"), &scenario)?;
    let model = pipeline.options().model.clone();
    pipeline.go()?;
    pipeline.ended()?;
    let start = Instant::now();
    let found = loop {
        let found = records(&agent, &model)?;
        if found.len() == 10 || start.elapsed() > SOON {
            break found;
        }
        std::thread::sleep(Duration::from_millis(200));
    };
    ensure!(found.len() == 10, "{} records: {found:#?}", found.len());
    for record in &found {
        assert_eq!(record["outcome"], "finished", "{record:#}");
        assert_eq!(record["stages"].as_array().map(Vec::len), Some(2), "{record:#}");
        assert_eq!(record["stages"][0]["generated_tokens"], 10, "{record:#}");
        assert_eq!(record["transfers"][0]["connector"], "shared_memory", "{record:#}");
        assert_eq!(record["transfers"][0]["payloads"], 2, "{record:#}");
        let e2e_ms = record["e2e_ms"].as_f64().context("no e2e_ms")?;
        let gen_ms = record["stages"][0]["gen_time_ms"]
            .as_f64()
            .context("no gen_time_ms")?;
        assert!(0.0 < gen_ms && gen_ms <= e2e_ms, "{record:#}");
        let id = record["request_id"].as_str().context("no id")?;
        assert!(agent.log().contains(id), "{id} is not in the log");
    }
    let text = String::from_utf8(requests(&agent, &[])?.stdout)?;
    assert!(
        text.contains("first_token_ms") && text.contains("shared_memory"),
        "{text}"
    );
    let (status, metrics) = agent.get("/metrics")?;
    assert_eq!(status, 200);
    let id = found[0]["request_id"].as_str().context("no id")?;
    assert!(!metrics.contains(id), "/metrics has no request ids");
    Ok(())
}

#[test]
fn no_records_unless_they_are_wanted() -> Result<()> {
    let Some(_turn) = omnitap_tests::unprivileged()? else {
        return Ok(());
    };
    let agent = Agent::start(&["--no-ebpf"])?;
    let output = requests(&agent, &[])?;
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && told.contains("set requests.enabled"),
        "{told}"
    );
    Ok(())
}

#[test]
fn top_in_a_terminal() -> Result<()> {
    let Some(_turn) = omnitap_tests::privileged()? else {
        return Ok(());
    };
    if !has_tmux()? {
        return Ok(());
    }
    let agent = Agent::start(&["--requests.enabled"])?;
    let scenario = json!({
        "stages": [{"kind": "ar", "step_ms": 50}, {"kind": "generation", "step_ms": 20}],
        "phases": [{
            "requests": [{"repeat": 150, "every": 0.2, "stages": [
                {"tokens": 30, "payloads": [{"bytes": 65536}]},
                {"prompt": 5, "chunks": [{"frames": 4800}]}
            ]}]
        }]
    });
    let mut options = Options::omni("top");
    options.truth = false;
    let model = options.model.clone();
    let mut pipeline = Pipeline::start(options, &scenario)?;
    pipeline.go()?;
    let binary = agent::binary()?;
    let command = format!(
        "{} top --agent {}; echo ended; sleep 60",
        binary.display(),
        address(&agent)
    );
    let tmux = Tmux::start("top", &command)?;
    tmux.until(&["ready, tap up", &model, "0.0", "1.0", "0.0 -> 1.0", "KiB"])?;
    tmux.press("Tab")?;
    let screen = tmux.until(&["under way (", "0.0 running", "finished ("])?;
    assert!(screen.lines().all(|line| line.chars().count() <= 80), "{screen}");
    tmux.press("Tab")?;
    tmux.until(&["Families by source", "wire: "])?;
    drop(pipeline);
    tmux.press("Tab")?;
    agent.stop()?;
    tmux.until(&["no agent can be reached", "start `omnitap run`"])?;
    tmux.press("q")?;
    tmux.until(&["ended"])?;
    Ok(())
}
