//! The cost of a scrape: the text of 10,000 sample lines against Python's client library, and over HTTP.

use std::{
    fs,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use super::{
    Bound, Figure,
    load::{Large, MANY, lines},
    stats::{median, quantile, range},
};
use crate::{
    real::{exposition::Exposition, kit},
    setup,
};

const ROUNDS: usize = 5;
/// Scrapes a round.
const SCRAPES: usize = 200;

pub(super) fn measure(program: &Path, folder: &Path) -> Result<Vec<Figure>> {
    let python = super::python()?;
    let large = Large::start(program, folder)?;
    let page = large.agent.scrape()?;
    let count = lines(&page);
    ensure!(count >= MANY, "only {count} sample lines");
    let file = folder.join("page.txt");
    fs::write(&file, &page)?;

    let client: ureq::Agent = ureq::Agent::config_builder()
        .timeout_global(Some(Duration::from_secs(20)))
        .build()
        .into();
    let url = large.agent.metrics();
    let healthz = url.replace("/metrics", "/healthz");
    let mut theirs = Vec::new();
    let mut ours = Vec::new();
    let mut http = Vec::new();
    let mut health = Vec::new();
    for _ in 0..ROUNDS {
        let out = setup::output(
            Command::new(&python)
                .arg(kit::files().join("render.py"))
                .arg(&file)
                .arg("5"),
        )?;
        let mut numbers = out.lines().map(str::parse::<f64>);
        let have = numbers.next().context("no output")??;
        #[expect(clippy::cast_precision_loss, reason = "ten thousand lines")]
        let whole = have >= count as f64 * 0.98;
        ensure!(whole, "Python's page has {have} sample lines, ours {count}");
        theirs.push(median(&numbers.collect::<Result<Vec<_>, _>>()?));

        let before = Exposition::parse(&large.agent.scrape()?)?;
        for _ in 0..SCRAPES {
            let start = Instant::now();
            let bytes = client
                .get(&url)
                .call()?
                .body_mut()
                .with_config()
                .limit(64 << 20)
                .read_to_vec()?;
            http.push(start.elapsed().as_secs_f64() * 1e3);
            ensure!(
                bytes.len() * 10 > page.len() * 9,
                "a scrape of {} bytes",
                bytes.len()
            );
        }
        // What HTTP and this machine take of it: an answer of three bytes.
        for _ in 0..SCRAPES {
            let start = Instant::now();
            client.get(&healthz).call()?.body_mut().read_to_vec()?;
            health.push(start.elapsed().as_secs_f64() * 1e3);
        }
        let added = Exposition::parse(&large.agent.scrape()?)?.since(&before);
        let of = |what: Option<f64>| what.context("the agent has no omnitap_scrape_duration_seconds");
        let family = "omnitap_scrape_duration_seconds";
        ours.push(of(added.sum(family, &[]))? / of(added.total(family, &[]))? * 1e3);
    }
    let (least, most) = range(&ours);
    Ok(vec![
        Figure::new(
            "render: generate_latest to the agent's text",
            median(&theirs) / median(&ours),
            "x",
            Some(Bound::AtLeast(50.0)),
            format!(
                "{count} sample lines: {:.1} ms and {:.3} ms ({least:.3} to {most:.3})",
                median(&theirs),
                median(&ours)
            ),
        ),
        Figure::new(
            "render: a scrape over HTTP, 99th percentile",
            quantile(&http, 0.99),
            "ms",
            Some(Bound::AtMost(5.0)),
            format!(
                "{} scrapes, median {:.3} ms, {} bytes; of /healthz median {:.3} ms, 99th percentile {:.3} ms",
                http.len(),
                median(&http),
                page.len(),
                median(&health),
                quantile(&health, 0.99)
            ),
        ),
    ])
}
