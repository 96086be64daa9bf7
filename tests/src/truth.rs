//! What the agent should say, from the pipeline's own messages and clocks (`tests/pipeline/truth.py`).

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::{
    pipeline::Options,
    scrape::{Scrape, Series},
};

/// One observation.
#[derive(Clone, Debug, Deserialize)]
struct Row {
    /// `CLOCK_MONOTONIC`, seconds.
    t: f64,
    family: String,
    labels: BTreeMap<String, String>,
    value: f64,
    /// Present for histograms.
    times: Option<f64>,
}

/// Observations in the order they were made.
#[derive(Clone, Debug, Default)]
pub struct Truth {
    rows: Vec<Row>,
}

/// What a child should have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Expected {
    /// A counter's value.
    Counter(f64),
    /// A histogram's count and sum.
    Histogram {
        /// Number of observations.
        count: f64,
        /// Their sum.
        sum: f64,
    },
}

impl Expected {
    /// Number of observations, or the counter's value.
    #[must_use]
    pub fn count(&self) -> f64 {
        match *self {
            Self::Counter(value) => value,
            Self::Histogram { count, .. } => count,
        }
    }
}

impl Truth {
    /// Reads the pipeline's files; adds `model_name`.
    pub(crate) fn read(options: &Options, paths: &[PathBuf]) -> Result<Self> {
        let mut rows = Vec::new();
        for path in paths {
            let text =
                std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            for line in text.lines() {
                let mut row: Row =
                    serde_json::from_str(line).with_context(|| format!("not a row: {line}"))?;
                let model = if row.family.starts_with("vllm_omni:") {
                    &options.model
                } else {
                    &options.served
                };
                row.labels.insert("model_name".to_owned(), model.clone());
                rows.push(row);
            }
        }
        rows.sort_by(|a, b| a.t.total_cmp(&b.t));
        Ok(Self { rows })
    }

    /// The observations that pass a test of family and time.
    #[must_use]
    pub fn only(&self, mut keep: impl FnMut(&str, f64) -> bool) -> Self {
        let mut rows = self.rows.clone();
        rows.retain(|row| keep(&row.family, row.t));
        Self { rows }
    }

    /// Observations of one value each of histograms of vLLM-Omni: time, family, labels without the model, value.
    pub(crate) fn observed<'a>(
        options: &Options,
        rows: impl IntoIterator<Item = (f64, &'a str, BTreeMap<String, String>, f64)>,
    ) -> Self {
        let rows = rows.into_iter().map(|(t, family, mut labels, value)| {
            labels.insert("model_name".to_owned(), options.model.clone());
            let family = family.to_owned();
            Row {
                t,
                family,
                labels,
                value,
                times: Some(1.0),
            }
        });
        Self { rows: rows.collect() }
    }

    /// With the observations of another pipeline.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.rows.extend(other.rows);
        self
    }

    /// Values by family and labels. Children that nothing but 0 was added to are left out: a counter may exist or not.
    #[must_use]
    pub fn expected(&self) -> BTreeMap<Series, Expected> {
        let mut expected = BTreeMap::new();
        for row in &self.rows {
            let series = Series {
                name: row.family.clone(),
                labels: row.labels.clone(),
            };
            let fresh = match row.times {
                None => Expected::Counter(0.0),
                Some(_) => Expected::Histogram { count: 0.0, sum: 0.0 },
            };
            match expected.entry(series).or_insert(fresh) {
                Expected::Counter(value) => *value += row.value,
                Expected::Histogram { count, sum } => {
                    let times = row.times.unwrap_or(1.0);
                    *count += times;
                    *sum += times * row.value;
                }
            }
        }
        expected.retain(|_, expected| *expected != Expected::Counter(0.0));
        expected
    }

    /// Differences between the truth and a scrape, both ways, a line each: counters and counts exactly, sums within
    /// [`tolerance`]. Looks at children of these model names alone.
    #[must_use]
    pub fn differences(&self, scrape: &Scrape) -> Vec<String> {
        let expected = self.expected();
        let models: Vec<&String> = expected
            .keys()
            .filter_map(|s| s.labels.get("model_name"))
            .collect();
        let mut differences = Vec::new();
        for (series, &expected) in &expected {
            match (expected, measured(scrape, series)) {
                (_, None) => differences.push(format!("{} is missing, should be {expected:?}", show(series))),
                (Expected::Counter(a), Some(Expected::Counter(b))) if same(a, b) => {}
                (
                    Expected::Histogram { count, sum },
                    Some(Expected::Histogram {
                        count: count2,
                        sum: sum2,
                    }),
                ) if same(count, count2) && (sum - sum2).abs() <= tolerance(&series.name, count, sum) => {}
                (_, Some(found)) => {
                    differences.push(format!("{} is {found:?}, should be {expected:?}", show(series)));
                }
            }
        }
        for (series, &value) in &scrape.samples {
            let ours = series
                .labels
                .get("model_name")
                .is_some_and(|model| models.contains(&model));
            if !ours || same(value, 0.0) {
                continue;
            }
            let histogram = series.name.strip_suffix("_count");
            let counter = series.name.ends_with("_total") && !scrape.types.contains_key(&series.name[..]);
            let family = match histogram {
                Some(family) if scrape.types.get(family).is_some_and(|t| t == "histogram") => family,
                None if counter || is_counter(scrape, &series.name) => &series.name,
                _ => continue,
            };
            let key = Series {
                name: family.to_owned(),
                labels: series.labels.clone(),
            };
            if !expected.contains_key(&key) {
                differences.push(format!("{} is {value}, should not be", show(series)));
            }
        }
        differences
    }
}

fn is_counter(scrape: &Scrape, name: &str) -> bool {
    scrape.types.get(name).is_some_and(|kind| kind == "counter")
}

fn measured(scrape: &Scrape, series: &Series) -> Option<Expected> {
    let part = |suffix: &str| {
        let name = format!("{}{suffix}", series.name);
        scrape
            .samples
            .get(&Series {
                name,
                labels: series.labels.clone(),
            })
            .copied()
    };
    if let (Some(count), Some(sum)) = (part("_count"), part("_sum")) {
        return Some(Expected::Histogram { count, sum });
    }
    part("").map(Expected::Counter)
}

fn same(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-6
}

/// Beginnings of the families whose values stand in messages: both sides read the same numbers.
const TOLD: &[&str] = &[
    "vllm_omni:denoise_step_",
    "vllm_omni:diffusion_",
    "vllm_omni:image_pixels",
    "vllm_omni:num_inference_steps",
    "vllm_omni:stage_in_queue_s",
    "vllm_omni:vae_decode_s",
];

/// How far a sum may be off: sums of tokens, bytes and what messages tell not at all; ratios by a fifth a sample; times
/// by 5 % or 50 ms a sample, since a busy machine may stop a process between taking the time and sending.
#[must_use]
pub fn tolerance(family: &str, count: f64, sum: f64) -> f64 {
    let is_told = || TOLD.iter().any(|start| family.starts_with(start));
    if family.contains("tokens") || family.contains("preemptions") || family.ends_with("_bytes") || is_told()
    {
        1e-6
    } else if family.ends_with("_rtf") {
        0.2 * count
    } else {
        (0.05 * sum.abs()).max(0.05 * count)
    }
}

fn show(series: &Series) -> String {
    let labels: Vec<String> = series.labels.iter().map(|(k, v)| format!("{k}={v:?}")).collect();
    format!("{}{{{}}}", series.name, labels.join(","))
}
