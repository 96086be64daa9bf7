//! The bundled live pipeline (`tests/pipeline`), started and led by a test.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::{hops::Hops, truth::Truth};

/// Longest wait for an event: engines start in a second or two, phases last some seconds.
const EVENT: Duration = Duration::from_mins(1);
/// Longest wait for an end.
const END: Duration = Duration::from_secs(15);

/// What a pipeline's command line says.
#[derive(Clone, Debug)]
pub struct Options {
    /// The model argument: `model_name` of `vllm_omni:*`.
    pub model: String,
    /// `--served-model-name`: `model_name` of `vllm:*`.
    pub served: String,
    /// vLLM-Omni, or plain vLLM.
    pub omni: bool,
    /// Further flags.
    pub flags: Vec<String>,
    /// Write down what an observer should say: without end for an endless scenario.
    pub truth: bool,
}

impl Options {
    /// A vLLM-Omni pipeline with names of its own, so that others on this machine don't disturb.
    #[must_use]
    pub fn omni(name: &str) -> Self {
        Self {
            model: format!("bundled/{name}"),
            served: format!("{name}-served"),
            omni: true,
            flags: Vec::new(),
            truth: true,
        }
    }

    /// A plain vLLM.
    #[must_use]
    pub fn vllm(name: &str) -> Self {
        Self {
            omni: false,
            ..Self::omni(name)
        }
    }

    /// Adds flags.
    #[must_use]
    pub fn with(mut self, flags: &[&str]) -> Self {
        self.flags.extend(flags.iter().map(|&flag| flag.to_owned()));
        self
    }
}

/// A running pipeline. Dropped, it ends.
#[derive(Debug)]
pub struct Pipeline {
    options: Options,
    child: Child,
    stdin: Option<ChildStdin>,
    events: Receiver<Value>,
    dir: TempDir,
    engines: BTreeMap<(u64, u64), u32>,
    port: Option<u16>,
}

impl Pipeline {
    /// Starts a pipeline on a scenario (`tests/pipeline/scenario.py`) and waits until it serves.
    pub fn start(options: Options, scenario: &Value) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("scenario.json");
        std::fs::write(&path, scenario.to_string())?;
        let here = crate::root().join("tests/pipeline");
        let mut command = Command::new(crate::python().context("no Python")?);
        command
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .arg(here.join(if options.omni { "vllm-omni" } else { "vllm" }))
            .args(["serve", &options.model])
            .args(options.omni.then_some("--omni"))
            .args(["--served-model-name", &options.served])
            .args(&options.flags)
            .arg("--scenario")
            .arg(&path)
            .arg("--control")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if options.truth {
            command.arg("--truth").arg(dir.path().join("truth.jsonl"));
        }
        let mut child = command.spawn().context("cannot start the pipeline")?;
        let (sender, events) = mpsc::channel();
        let stdout = child.stdout.take().context("no output")?;
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if let Ok(event) = serde_json::from_str(&line)
                    && sender.send(event).is_err()
                {
                    return;
                }
            }
        });
        let mut pipeline = Self {
            options,
            stdin: child.stdin.take(),
            child,
            events,
            dir,
            engines: BTreeMap::new(),
            port: None,
        };
        let ready = pipeline.wait("ready")?;
        pipeline.port = ready["port"].as_u64().map(u16::try_from).transpose()?;
        Ok(pipeline)
    }

    /// Starts the next phase; returns when it began, in seconds of `CLOCK_MONOTONIC`.
    pub fn go(&mut self) -> Result<f64> {
        let stdin = self.stdin.as_mut().context("pipeline has ended")?;
        stdin.write_all(b"go\n")?;
        let event = self.wait("started")?;
        event["time"].as_f64().context("no time")
    }

    /// Waits until the phase under way has ended; returns its event.
    pub fn ended(&mut self) -> Result<Value> {
        self.wait("ended")
    }

    /// Starts the next phase and waits for its end.
    pub fn play(&mut self) -> Result<Value> {
        self.go()?;
        self.ended()
    }

    /// Waits for an event of this name.
    pub fn wait(&mut self, name: &str) -> Result<Value> {
        let until = Instant::now() + EVENT;
        let mut last = Value::Null;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let event = self
                .events
                .recv_timeout(left)
                .with_context(|| format!("the pipeline did not say `{name}`; its last word: {last}"))?;
            if event["event"] == "engine"
                && let (Some(stage), Some(replica), Some(pid)) = (
                    event["stage"].as_u64(),
                    event["replica"].as_u64(),
                    event["pid"].as_u64(),
                )
            {
                self.engines.insert((stage, replica), u32::try_from(pid)?);
            }
            if event["event"] == name {
                return Ok(event);
            }
            last = event;
        }
    }

    /// The root process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The newest process of a stage replica.
    #[must_use]
    pub fn engine(&self, stage: u64, replica: u64) -> Option<u32> {
        self.engines.get(&(stage, replica)).copied()
    }

    /// Asks its HTTP server, which there is for a scenario with users over HTTP, whether it is well.
    pub fn ask_health(&self) -> Result<()> {
        let port = self.port.context("nobody comes over HTTP")?;
        ureq::get(&format!("http://127.0.0.1:{port}/health")).call()?;
        Ok(())
    }

    /// Its command line.
    #[must_use]
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// What an observer should have said so far.
    pub fn truth(&self) -> Result<Truth> {
        let (_, rest) = self.truth_files()?;
        Ok(Truth::read(&self.options, &rest)?.and(self.hops()?.truth(&self.options)))
    }

    /// What its connectors moved so far, by their own clocks.
    pub fn hops(&self) -> Result<Hops> {
        let (hops, _) = self.truth_files()?;
        Hops::read(&hops)
    }

    /// Files of the connectors, and of the API processes.
    fn truth_files(&self) -> Result<(Vec<PathBuf>, Vec<PathBuf>)> {
        let mut paths: Vec<PathBuf> = std::fs::read_dir(self.dir.path())?
            .map(|entry| entry.map(|entry| entry.path()))
            .collect::<Result<_, _>>()?;
        paths.retain(|path| path.to_string_lossy().contains("truth.jsonl"));
        Ok(paths
            .into_iter()
            .partition(|path| path.to_string_lossy().contains(".hops-")))
    }

    /// Ends it as an operator does, with SIGTERM, and waits for the end.
    pub fn stop(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        self.stdin = None;
        if self.child.try_wait()?.is_none() {
            crate::signal(self.child.id(), Signal::TERM)?;
        }
        let status = crate::wait_for_end(&mut self.child, END)?;
        if !status.success() {
            bail!("the pipeline ended with {status}");
        }
        Ok(())
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        // After a failed test only the end matters; its processes die with it in any case.
        if self.end().is_err() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
