//! The rights that deploy/ gives the agent: they suffice, and the lack of any one is named by `omnitap check`.

use std::{
    fs,
    net::TcpListener,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use omnitap_tests::{
    agent::{self, Agent},
    pipeline::{Options, Pipeline},
};
use serde_json::{Value, json};

/// A user without rights.
const NOBODY: &str = "65534";

/// Its folder is made for the agent's user by systemd, or mounted.
const NO_SOCKET: &str = "--stat-socket.path=off";

/// The capabilities of the chart, without `CAP_`.
fn of_chart() -> Result<Vec<String>> {
    let text = fs::read_to_string(omnitap_tests::root().join("deploy/kubernetes/chart/values.yaml"))?;
    let (_, rest) = text.split_once("\ncapabilities:\n").context("no capabilities")?;
    Ok(rest
        .lines()
        .take_while(|line| line.starts_with("  "))
        .filter_map(|line| line.trim().strip_prefix("- "))
        .map(str::to_owned)
        .collect())
}

/// What the unit says of a key.
fn of_unit(key: &str) -> Result<String> {
    let text = fs::read_to_string(omnitap_tests::root().join("deploy/systemd/omnitap.service"))?;
    text.lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
        .map(str::to_owned)
        .with_context(|| format!("the unit has no {key}"))
}

/// Becomes a user without rights but these, for good.
fn with(capabilities: &[String]) -> Vec<String> {
    let set = capabilities.iter().fold("-all".to_owned(), |set, name| {
        format!("{set},+{}", name.to_lowercase())
    });
    let mut command: Vec<String> = ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"]
        .map(str::to_owned)
        .to_vec();
    command.push("--no-new-privs".to_owned());
    command.extend(["--bounding-set", "--inh-caps", "--ambient-caps"].map(|kind| format!("{kind}={set}")));
    command.push("--".to_owned());
    command
}

/// The same, under the unit's filter of system calls.
fn as_the_unit() -> Result<Vec<String>> {
    let capabilities: Vec<String> = of_unit("AmbientCapabilities")?
        .split(' ')
        .map(|name| name.trim_start_matches("CAP_").to_owned())
        .collect();
    let mut command = with(&capabilities);
    let script = omnitap_tests::root().join("tests/seccomp.py");
    command.extend(["python3".to_owned(), "-c".to_owned(), fs::read_to_string(script)?]);
    command.push(of_unit("SystemCallFilter")?);
    Ok(command)
}

/// A copy of the binary that everybody may run, wherever the repository lies.
fn binary(dir: &Path) -> Result<PathBuf> {
    fs::set_permissions(dir, fs::Permissions::from_mode(0o755))?;
    let path = dir.join("omnitap");
    fs::copy(agent::binary()?, &path)?;
    Ok(path)
}

fn check(binary: &Path, wrapper: &[String]) -> Result<Value> {
    let [program, arguments @ ..] = wrapper else {
        anyhow::bail!("no wrapper")
    };
    let output = Command::new(program)
        .args(arguments)
        .arg(binary)
        .args(["check", "--json", NO_SOCKET])
        .output()?;
    serde_json::from_slice(&output.stdout)
        .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn chart_and_unit_give_the_same() -> Result<()> {
    let unit = of_unit("AmbientCapabilities")?;
    assert_eq!(of_unit("CapabilityBoundingSet")?, unit);
    let chart: Vec<String> = of_chart()?.iter().map(|name| format!("CAP_{name}")).collect();
    assert_eq!(chart.join(" "), unit);
    Ok(())
}

#[test]
fn a_user_with_the_listed_rights_alone_observes_another_users_pipeline() -> Result<()> {
    let Some(_turn) = omnitap_tests::privileged()? else {
        return Ok(());
    };
    let dir = tempfile::tempdir()?;
    let binary = binary(dir.path())?;
    for (name, wrapper) in [("chart", with(&of_chart()?)), ("unit", as_the_unit()?)] {
        let scenario = json!({
            "stages": [{"step_ms": 10}],
            "phases": [{"requests": [{"repeat": 4, "every": 0.05, "stages": [{"tokens": 6}]}]}]
        });
        let options = Options::omni(&format!("least-{name}"));
        let model = options.model.clone();
        let mut pipeline = Pipeline::start(options, &scenario)?;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let agent = Agent::start_under(&wrapper, &binary, port, "run", &[NO_SOCKET])?;
        let status = fs::read_to_string(format!("/proc/{}/status", agent.pid()))?;
        ensure!(
            status.contains(&format!("Uid:\t{NOBODY}")),
            "the agent has another user: {status}"
        );
        let filtered = status.contains("Seccomp:\t2");
        ensure!(
            filtered == (name == "unit"),
            "{name}: filter of system calls: {filtered}"
        );
        pipeline.play()?;
        let labels: &[(&str, &str)] = &[("model_name", &model)];
        let scrape = agent.scrape_until(Duration::from_secs(10), |scrape| {
            scrape.sum("vllm_omni:requests_success_total", labels) >= 4.0
        })?;
        assert_eq!(
            scrape
                .sum("vllm_omni:generation_tokens_total", labels)
                .to_string(),
            "24",
            "{name}: {}",
            agent.log()
        );
        pipeline.stop()?;
        let (ended, _) = agent.stop()?;
        assert!(ended.success(), "{name}: {ended}");
    }
    Ok(())
}

#[test]
fn each_right_that_is_missing_is_named() -> Result<()> {
    let Some(_turn) = omnitap_tests::privileged()? else {
        return Ok(());
    };
    let dir = tempfile::tempdir()?;
    let binary = binary(dir.path())?;
    let all = of_chart()?;
    let report = check(&binary, &with(&all))?;
    assert_eq!(report["works"], true, "{report:#}");
    let complaints = |report: &Value| -> Vec<String> {
        let items = report["items"].as_array().cloned().unwrap_or_default();
        items
            .iter()
            .filter(|item| item["status"] != "pass")
            .map(|item| format!("{} -> {}", item["evidence"], item["remedy"]))
            .collect()
    };
    assert_eq!(complaints(&report), Vec::<String>::new());
    for missing in &all {
        let rest: Vec<String> = all.iter().filter(|name| *name != missing).cloned().collect();
        let told = complaints(&check(&binary, &with(&rest))?);
        let name = format!("CAP_{missing}");
        assert!(
            told.iter().any(
                |line| line.contains(&format!("{name} missing")) && line.contains(&format!("add {name}"))
            ),
            "without {name}: {told:#?}"
        );
    }
    Ok(())
}
