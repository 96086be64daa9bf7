//! The exposition against Python's `prometheus_client`, which the engines use: the same bytes for the same content.

use std::{
    io::Write as _,
    process::{Command, Stdio},
    time::Duration,
};

use omnitap::{
    host::identity::PipelineId,
    metrics::{
        catalogue::{Family, Kind},
        registry::{Limits, Registry},
        text::Format,
    },
    pipeline::sink::{Scope, Sink},
};
use serde_json::{Value, json};

const MAX_MODEL_LEN: Option<u32> = Some(32_768);

/// Values that print in each of the forms that there are.
const VALUES: [f64; 12] = [
    0.0,
    1.0,
    0.1,
    0.000_012_5,
    0.004_999_999,
    2.5,
    17.0,
    999_999.0,
    1e6,
    1_234_567.25,
    268_435_456.0,
    1e16,
];

#[test]
fn exposition_is_that_of_the_python_client() {
    let Some(python) = std::env::var_os("OMNITAP_TEST_PYTHON") else {
        eprintln!(
            "SKIPPED: OMNITAP_TEST_PYTHON names no Python with prometheus-client; `cargo xtask test` sets it"
        );
        return;
    };
    let mut registry = Registry::new(Limits {
        max_series: 100_000,
        retention: Duration::ZERO,
    });
    let ops = fill(&mut registry);
    let text = |format| {
        let mut out = Vec::new();
        registry.exposition().render_pipelines(&mut out, format);
        String::from_utf8_lossy(&out).into_owned()
    };
    let text_form = text(Format::Text);
    let case = json!({
        "families": families(&text_form),
        "ops": ops,
        "text": text_form,
        "openmetrics": text(Format::OpenMetrics),
    });

    let mut judge = Command::new(python)
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/metrics_oracle.py"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = judge.stdin.take().unwrap();
    input.write_all(case.to_string().as_bytes()).unwrap();
    drop(input);
    let output = judge.wait_with_output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );
}

/// Writes to most families in four scopes; returns what it did, for the client to do the same.
fn fill(registry: &mut Registry) -> Vec<Value> {
    let mut ops = Vec::new();
    for (number, (stage, replica)) in [(0, 0), (1, 0), (1, 1), (10, 2)].into_iter().enumerate() {
        let scope = Scope {
            pipeline: PipelineId(1),
            model: "org/model \"q\" \\ \n é".into(),
            served_model: "served".into(),
            stage: Some(stage),
            replica: Some(replica),
            max_model_len: MAX_MODEL_LEN,
        };
        let id = registry.scope(&scope);
        for (nth, family) in pipelines().enumerate() {
            // Some families stay without children.
            if nth % 7 == 6 {
                continue;
            }
            let row = family.row();
            let extra: Vec<String> = row.extra_labels().map(|l| format!("{l} {stage}")).collect();
            let extra: Vec<&str> = extra.iter().map(String::as_str).collect();
            let extra_id = registry.extra(&extra);
            let labels = labels(family, &scope, &extra);
            for round in 0..5 {
                let value = VALUES[(nth + 5 * number + round) % VALUES.len()];
                let op = match row.kind {
                    Kind::Counter => {
                        registry.add(family, id, extra_id, value);
                        "add"
                    }
                    // Parts of several scopes fold in their own way: that is tested elsewhere.
                    Kind::Gauge(_) if number > 0 => continue,
                    Kind::Gauge(_) => {
                        registry.set(family, id, extra_id, value);
                        "set"
                    }
                    Kind::Histogram(_) => {
                        registry.observe(family, id, extra_id, value, 1);
                        "observe"
                    }
                };
                ops.push(json!({"family": row.name, "labels": labels, "op": op, "value": value}));
            }
        }
    }
    ops
}

fn labels(family: Family, scope: &Scope, extra: &[&str]) -> Value {
    let mut extra = extra.iter();
    let row = family.row();
    let mut value = |label: &str| match label {
        "model_name" if row.uses_served_model() => scope.served_model.clone(),
        "model_name" => scope.model.clone(),
        "stage" => scope.stage.map(|s| s.to_string()).unwrap_or_default(),
        "replica" => scope.replica.map(|r| r.to_string()).unwrap_or_default(),
        _ => extra.next().copied().unwrap_or_default().to_owned(),
    };
    row.labels
        .iter()
        .map(|l| ((*l).to_owned(), Value::from(value(l))))
        .collect()
}

/// What the client has to know of the families; the HELP texts are those of the text that it judges.
fn families(text: &str) -> Vec<Value> {
    pipelines()
        .map(|family| {
            let row = family.row();
            let help = format!("# HELP {} ", row.name);
            json!({
                "name": row.name,
                "help": text.lines().find_map(|l| l.strip_prefix(&help)),
                "type": row.kind.as_str(),
                "labels": row.labels,
                "bounds": row.kind.buckets().map(|b| b.bounds(MAX_MODEL_LEN)),
            })
        })
        .collect()
}

fn pipelines() -> impl Iterator<Item = Family> {
    Family::ALL.iter().copied().filter(|f| !f.row().is_own())
}
