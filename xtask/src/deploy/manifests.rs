//! The chart renders for values that people will give it, what it renders fits Kubernetes' schemas, and the plain
//! manifests are what it renders.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::helm::Helm;
use crate::setup;

/// Schemas of many Kubernetes versions.
const PACKAGES: &[&str] = &["kubernetes-validate==1.37.0"];
/// The oldest version that the chart takes, and the newest with a schema.
const VERSIONS: [&str; 2] = ["1.30.0", "1.37.0"];
const CHART: &str = "deploy/kubernetes/chart";

/// First lines of a plain manifest.
const HEAD: &str =
    "# Written from the chart by `cargo xtask deploy --write`; `kubectl create namespace omnitap` first.\n";

/// A plain manifest: its file and the values that give it.
fn plain() -> [(&'static str, Value); 3] {
    [
        ("omnitap.yaml", json!({})),
        ("omnitap-privileged.yaml", json!({"privileged": true})),
        (
            "omnitap-operator.yaml",
            json!({"podMonitor": {"enabled": true}, "rules": {"enabled": true}}),
        ),
    ]
}

/// Values that switch on what the plain manifests don't show.
fn variants() -> Vec<(&'static str, Value)> {
    vec![
        (
            "TLS and a password",
            json!({
                "webConfig": {"existingSecret": "web", "tls": true},
                "serviceMonitor": {"enabled": true, "labels": {"release": "prometheus"}},
                "monitorAuth": {"basicAuth": {
                    "username": {"name": "scrape", "key": "user"},
                    "password": {"name": "scrape", "key": "password"}
                }},
            }),
        ),
        (
            "client certificates",
            json!({"webConfig": {"existingSecret": "web", "tls": true, "clientCertificates": true}}),
        ),
        (
            "everything else",
            json!({
                "image": {"digest": format!("sha256:{}", "0".repeat(64))},
                "imagePullSecrets": [{"name": "registry"}],
                "capabilities": ["BPF", "PERFMON", "SYS_PTRACE", "CHECKPOINT_RESTORE", "DAC_READ_SEARCH"],
                "seLinuxOptions": {"type": "spc_t"},
                "runtimeClassName": "nvidia",
                "priorityClass": {"create": false, "name": "system-node-critical"},
                "podAnnotations": {"prometheus.io/scrape": "true"},
                "podLabels": {"team": "inference"},
                "statSocket": {"enabled": true},
                "extraVolumes": [{"name": "tmp", "emptyDir": {}}],
                "extraVolumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
                "dashboards": {"enabled": true},
                "networkPolicy": {"from": [], "egress": [{"ports": [{"port": 8000}]}]},
                "config": {"metrics.retention": "30m", "host.model-name": ["a=b"]},
            }),
        ),
    ]
}

/// Checks all, and writes the plain manifests where told to.
pub(super) fn run(write: bool) -> Result<()> {
    let python = setup::venv("venv-kubernetes", PACKAGES)?;
    let mut helm = Helm::start()?;
    let chart = setup::root().join(CHART);
    let chart = chart.to_str().context("the repository's path is not UTF-8")?;
    let out = setup::target_dir().join("manifests");
    fs::create_dir_all(&out)?;
    let mut rendered = 0;
    for (name, values) in plain().into_iter().chain(variants()) {
        helm.lint(chart, &values)
            .with_context(|| format!("values of {name}"))?;
        for version in VERSIONS {
            let text = helm
                .template(chart, &values, version)
                .with_context(|| format!("values of {name}"))?;
            fits(&python, &out.join("rendered.yaml"), &text, version)
                .with_context(|| format!("values of {name}"))?;
            configured(&out.join("omnitap.yaml"), &text).with_context(|| format!("values of {name}"))?;
            rendered += 1;
        }
    }
    for (name, values) in plain() {
        let text = format!("{HEAD}{}", helm.template(chart, &values, VERSIONS[0])?);
        let path = setup::root().join("deploy/kubernetes").join(name);
        if write {
            fs::write(&path, text)?;
        } else {
            ensure!(
                fs::read_to_string(&path).is_ok_and(|have| have == text),
                "{} is not what the chart gives: run `cargo xtask deploy --write`",
                path.display()
            );
        }
    }
    println!(
        "manifests: {rendered} renderings fit the schemas of Kubernetes {}",
        VERSIONS.join(" and ")
    );
    Ok(())
}

/// Each document fits the schema of its kind, without a field that the kind does not have. Kinds of the Prometheus
/// operator have no schema there.
fn fits(python: &Path, file: &Path, text: &str, version: &str) -> Result<()> {
    fs::write(file, text)?;
    let output = Command::new(python)
        .args(["-m", "kubernetes_validate", "--strict", "-k", version])
        .arg(file)
        .output()?;
    let told =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{told}");
    for line in told.lines().filter(|line| line.starts_with("WARN")) {
        ensure!(line.contains("monitoring.coreos.com"), "{line}");
    }
    let fitting = told.lines().filter(|line| line.contains(" passed for ")).count();
    ensure!(fitting >= 4, "only {fitting} documents were looked at: {told}");
    Ok(())
}

/// The agent takes the file in the config map.
fn configured(file: &Path, manifest: &str) -> Result<()> {
    let (_, rest) = manifest
        .split_once("\n  omnitap.yaml: |\n")
        .context("no omnitap.yaml in a config map")?;
    let config: String = rest
        .lines()
        .map_while(|line| line.strip_prefix("    "))
        .flat_map(|line| [line, "\n"])
        .collect();
    fs::write(file, config)?;
    setup::run(
        setup::cargo()
            .args([
                "run",
                "--quiet",
                "--package",
                "omnitap",
                "--",
                "config",
                "--config.file",
            ])
            .arg(file)
            .stdout(std::process::Stdio::null()),
    )
}
