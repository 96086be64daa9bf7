//! A real Prometheus with the rules scrapes the agent beside the bundled pipeline: no scrape fails, all rules work, and
//! every panel whose families the pipeline has gets data.

use std::{
    collections::BTreeSet,
    fs,
    net::TcpListener,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use omnitap_tests::{agent::Agent, scrape::Scrape};
use serde_json::Value;

use super::{dashboards::Panel, promql::Names, rules::RULES};
use crate::{demo, setup, test::PYTHON_PACKAGES};

/// How long Prometheus scrapes before it is asked: rates need some samples.
const TIME: Duration = Duration::from_secs(45);

/// Runs all and asks.
pub(super) fn run(names: &Names, panels: &[Panel]) -> Result<()> {
    ensure!(
        setup::is_root(),
        "the tap needs root. Run: sudo -E env \"PATH=$PATH\" cargo xtask deploy --live"
    );
    setup::venv("venv", PYTHON_PACKAGES)?;
    let mut pipeline = demo::pipeline()?;
    let agent = Agent::start(&[])?;
    let prometheus = Prometheus::start(&agent.url())?;
    pipeline.go()?;
    let until = Instant::now() + TIME;
    while Instant::now() < until {
        std::thread::sleep(Duration::from_secs(1));
        prometheus.ask("up")?;
    }
    let failed = prometheus.ask("sum(count_over_time(up[10m]) - sum_over_time(up[10m]))")?;
    ensure!(number(&failed) == Some(0.0), "scrapes failed: {failed:?}");
    for rule in prometheus.rules()? {
        ensure!(rule["health"] == "ok", "a rule does not work: {rule}");
    }
    let scrape = agent.scrape()?;
    let mut without = Vec::new();
    let mut with = 0;
    for panel in panels {
        let mut any = false;
        let mut families = BTreeSet::new();
        for query in &panel.queries {
            any |= !prometheus
                .ask(query)
                .with_context(|| panel.name.clone())?
                .is_empty();
            families.append(&mut names.families(query)?);
        }
        if any {
            with += 1;
        } else if families.iter().all(|family| has_samples(&scrape, family)) {
            bail!("{}: no data, though all its families have samples", panel.name);
        } else {
            let lacking: Vec<&str> = families
                .iter()
                .filter(|family| !has_samples(&scrape, family))
                .map(String::as_str)
                .collect();
            without.push(format!("{} ({})", panel.name, lacking.join(", ")));
        }
    }
    println!("live: {with} panels have data; the bundled pipeline lacks the families of:");
    for panel in &without {
        println!("  {panel}");
    }
    // The bundled pipeline has LLM stages, audio and transfers: most panels.
    ensure!(
        with >= panels.len() / 2,
        "only {with} of {} panels have data",
        panels.len()
    );
    pipeline.stop()
}

fn has_samples(scrape: &Scrape, family: &str) -> bool {
    [family.to_owned(), format!("{family}_count")]
        .iter()
        .any(|name| scrape.matching(name, &[]).next().is_some())
}

/// The value of a single sample.
fn number(result: &[Value]) -> Option<f64> {
    result.first()?["value"][1].as_str()?.parse().ok()
}

/// A running Prometheus. Dropped, it ends.
struct Prometheus {
    child: Child,
    url: String,
    _dir: tempfile::TempDir,
}

impl Prometheus {
    fn start(agent: &str) -> Result<Self> {
        let binary = setup::debian_files("prometheus")?.join("usr/bin/prometheus");
        let dir = tempfile::tempdir()?;
        let config = dir.path().join("prometheus.yml");
        let target = agent.trim_start_matches("http://");
        let rules = setup::root().join(RULES);
        fs::write(
            &config,
            format!(
                "global: {{scrape_interval: 1s, evaluation_interval: 5s}}\n\
                 rule_files: ['{}']\n\
                 scrape_configs: [{{job_name: omnitap, static_configs: [{{targets: ['{target}']}}]}}]\n",
                rules.display()
            ),
        )?;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let url = format!("http://127.0.0.1:{port}");
        let child = Command::new(binary)
            .arg(format!("--config.file={}", config.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                dir.path().join("data").display()
            ))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot start Prometheus")?;
        let started = Self {
            child,
            url,
            _dir: dir,
        };
        let until = Instant::now() + Duration::from_secs(30);
        while started.ask("up").is_err() {
            ensure!(Instant::now() < until, "Prometheus does not answer");
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(started)
    }

    fn get(&self, path: &str, query: &[(&str, &str)]) -> Result<Value> {
        let mut answer = ureq::get(format!("{}{path}", self.url))
            .query_pairs(query.iter().copied())
            .call()?;
        let mut answer: Value = serde_json::from_str(&answer.body_mut().read_to_string()?)?;
        ensure!(answer["status"] == "success", "{answer}");
        Ok(answer["data"].take())
    }

    /// The samples of an instant query.
    fn ask(&self, query: &str) -> Result<Vec<Value>> {
        let data = self.get("/api/v1/query", &[("query", query)])?;
        Ok(data["result"].as_array().cloned().unwrap_or_default())
    }

    fn rules(&self) -> Result<Vec<Value>> {
        let data = self.get("/api/v1/rules", &[])?;
        let groups = data["groups"].as_array().cloned().unwrap_or_default();
        let rules: Vec<Value> = groups
            .iter()
            .flat_map(|group| group["rules"].as_array().cloned().unwrap_or_default())
            .collect();
        ensure!(!rules.is_empty(), "no rule is loaded");
        Ok(rules)
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        // Its data goes with it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
