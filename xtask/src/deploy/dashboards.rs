//! The dashboards: each panel and each variable asks for what is served.

use std::{collections::BTreeSet, fs};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{promql::Names, rules::between};
use crate::setup;

/// The dashboards, below the repository's root.
const DASHBOARDS: &str = "deploy/grafana";

/// A panel that shows data.
pub(super) struct Panel {
    /// Dashboard and title.
    pub(super) name: String,
    /// Its queries, with variables that match everything.
    pub(super) queries: Vec<String>,
}

/// Checks all; returns the panels.
pub(super) fn run(names: &Names) -> Result<Vec<Panel>> {
    let mut panels = Vec::new();
    let mut uids = BTreeSet::new();
    let mut files: Vec<_> = fs::read_dir(setup::root().join(DASHBOARDS))?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_>>()?;
    files.sort();
    for file in &files {
        let text = fs::read_to_string(file)?;
        let board: Value = serde_json::from_str(&text).with_context(|| file.display().to_string())?;
        let uid = board["uid"].as_str().unwrap_or_default().to_owned();
        ensure!(
            file.file_stem().is_some_and(|stem| stem == uid.as_str()),
            "{}: its uid is {uid}",
            file.display()
        );
        uids.insert(uid.clone());
        for variable in list(&board["templating"]["list"]) {
            let query = variable["query"]["query"].as_str().unwrap_or_default();
            if let Some((selector, label)) = query
                .strip_prefix("label_values(")
                .and_then(|rest| rest.strip_suffix(')')?.rsplit_once(", "))
            {
                let labels = names.check(&plain(selector)).with_context(|| uid.clone())?;
                ensure!(labels.contains(label), "{uid}: no label `{label}` in {selector}");
            }
        }
        let mut ids = BTreeSet::new();
        for panel in list(&board["panels"]) {
            let name = format!("{uid}: {}", panel["title"].as_str().unwrap_or_default());
            ensure!(ids.insert(panel["id"].as_u64()), "{name}: an id twice");
            let mut queries = Vec::new();
            for target in list(&panel["targets"]) {
                let query = plain(target["expr"].as_str().unwrap_or_default());
                let labels = names.check(&query).with_context(|| name.clone())?;
                let legend = target["legendFormat"].as_str().unwrap_or_default();
                for label in between(legend, "{{", |c| c != '}') {
                    ensure!(
                        labels.contains(label),
                        "{name}: its result has no label `{label}`: {query}"
                    );
                }
                queries.push(query);
            }
            if panel["type"] != "row" {
                ensure!(!queries.is_empty(), "{name}: no query");
                panels.push(Panel { name, queries });
            }
        }
    }
    ensure!(uids.len() == files.len() && !files.is_empty(), "a uid twice");
    println!(
        "dashboards: {} panels in {} dashboards ask for what is served",
        panels.len(),
        files.len()
    );
    Ok(panels)
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// A query with values for Grafana's variables.
fn plain(query: &str) -> String {
    query
        .replace("$__rate_interval", "30s")
        .split('$')
        .enumerate()
        .map(|(at, part)| match at {
            0 => part.to_owned(),
            _ => format!(
                ".*{}",
                part.trim_start_matches(|c: char| c.is_ascii_alphanumeric() || c == '_')
            ),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_match_everything() {
        assert_eq!(
            plain(r#"rate(f{job=~"$job",m=~"$model"}[$__rate_interval])"#),
            r#"rate(f{job=~".*",m=~".*"}[30s])"#
        );
    }
}
