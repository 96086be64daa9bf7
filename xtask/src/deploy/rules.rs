//! The rules are what promtool takes, do what their unit tests say, and ask for nothing that is not served.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::promql::Names;
use crate::setup;

/// The rules, below the repository's root.
pub(super) const RULES: &str = "deploy/prometheus/omnitap.rules.yml";
const TESTS: &str = "deploy/prometheus/omnitap.rules.test.yml";
const SECTIONS: &str = "docs/troubleshooting.md";

#[derive(Deserialize)]
struct Rules {
    groups: Vec<Group>,
}

#[derive(Deserialize)]
struct Group {
    rules: Vec<Rule>,
}

#[derive(Deserialize)]
struct Rule {
    record: Option<String>,
    alert: Option<String>,
    expr: String,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Tests {
    tests: Vec<Test>,
}

#[derive(Deserialize)]
struct Test {
    alert_rule_test: Vec<AlertTest>,
}

#[derive(Deserialize)]
struct AlertTest {
    alertname: String,
    exp_alerts: Vec<serde_json::Value>,
}

/// Checks all, and adds the recorded names.
pub(super) fn run(names: &mut Names) -> Result<()> {
    let promtool = setup::debian_files("prometheus")?.join("usr/bin/promtool");
    for (what, file) in [("check", RULES), ("test", TESTS)] {
        setup::run(
            Command::new(&promtool)
                .args([what, "rules", file])
                .current_dir(setup::root())
                .stdout(Stdio::null()),
        )?;
    }
    let rules: Rules = read(RULES)?;
    let tests: Tests = read(TESTS)?;
    let fired: BTreeSet<&str> = tests
        .tests
        .iter()
        .flat_map(|test| &test.alert_rule_test)
        .filter(|test| !test.exp_alerts.is_empty())
        .map(|test| test.alertname.as_str())
        .collect();
    let help = fs::read_to_string(setup::root().join(SECTIONS)).context(SECTIONS)?;
    let mut alerts = 0;
    for rule in rules.groups.iter().flat_map(|group| &group.rules) {
        let labels = names.check(&rule.expr)?;
        if let Some(alert) = &rule.alert {
            alerts += 1;
            ensure!(
                fired.contains(alert.as_str()),
                "no unit test in which {alert} fires"
            );
            ensure!(
                help.contains(&format!("### {alert}\n")),
                "{SECTIONS} has no section on {alert}"
            );
            ensure!(rule.labels.contains_key("severity"), "{alert} has no severity");
            for text in rule.annotations.values() {
                for label in between(text, "$labels.", |c| c.is_alphanumeric() || c == '_') {
                    ensure!(
                        labels.contains(label),
                        "{alert}: its result has no label `{label}`"
                    );
                }
            }
        }
        if let Some(record) = &rule.record {
            names.record(record, labels);
        }
    }
    println!("rules: {alerts} alerts, each with a unit test in which it fires");
    Ok(())
}

fn read<T: serde::de::DeserializeOwned>(file: &str) -> Result<T> {
    let text = fs::read_to_string(setup::root().join(file)).context(file.to_owned())?;
    serde_saphyr::from_str(&text).with_context(|| file.to_owned())
}

/// The words that follow a mark in a text.
pub(super) fn between<'a>(
    text: &'a str,
    mark: &'a str,
    is_word: impl Fn(char) -> bool + Copy + 'a,
) -> impl Iterator<Item = &'a str> {
    text.split(mark).skip(1).map(move |rest| {
        let end = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
        rest.get(..end).unwrap_or(rest)
    })
}
