//! What the bundled pipeline's connectors moved, by their own clocks (`tests/pipeline/connector.py`).

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::{pipeline::Options, truth::Truth};

/// A stage's replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub struct Place {
    /// Stage.
    pub stage: u32,
    /// Replica.
    pub replica: u32,
}

/// One end of a hop. Times are `CLOCK_MONOTONIC` in nanoseconds.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct End {
    /// Bytes that it wrote or read.
    pub size: u64,
    /// The lock was taken, or the segment is about to be opened.
    pub start: u64,
    /// The lock was released.
    pub done: u64,
    /// Where.
    #[serde(flatten)]
    pub place: Place,
}

#[derive(Deserialize)]
struct Row {
    side: String,
    key: String,
    #[serde(flatten)]
    end: End,
}

/// A payload that was put and taken.
#[derive(Clone, Copy, Debug)]
pub struct Hop {
    /// The sender's end.
    pub put: End,
    /// The receiver's.
    pub get: End,
}

impl Hop {
    /// Seconds that the sender took.
    #[must_use]
    pub fn tx(&self) -> f64 {
        seconds(self.put.start, self.put.done)
    }

    /// Seconds that the receiver took.
    #[must_use]
    pub fn rx(&self) -> f64 {
        seconds(self.get.start, self.get.done)
    }

    /// Seconds from the one to the other; 0 where the receiver opened before.
    #[must_use]
    pub fn in_flight(&self) -> f64 {
        seconds(self.put.done, self.get.start)
    }
}

/// Seconds between two times, 0 where they are the other way round.
#[must_use]
#[expect(
    clippy::cast_precision_loss,
    reason = "differences far below 2^53 nanoseconds"
)]
pub fn seconds(from_ns: u64, to_ns: u64) -> f64 {
    to_ns.saturating_sub(from_ns) as f64 / 1e9
}

/// All ends by key.
#[derive(Clone, Debug, Default)]
pub struct Hops {
    /// What was put.
    pub puts: BTreeMap<String, End>,
    /// What was taken.
    pub gets: BTreeMap<String, End>,
}

impl Hops {
    /// Reads the files of the connectors. A key twice is an error: ids are random.
    pub(crate) fn read(paths: &[PathBuf]) -> Result<Self> {
        let mut hops = Self::default();
        for path in paths {
            let text =
                std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            for line in text.lines() {
                let row: Row = serde_json::from_str(line).with_context(|| format!("not a row: {line}"))?;
                let side = if row.side == "put" {
                    &mut hops.puts
                } else {
                    &mut hops.gets
                };
                ensure!(side.insert(row.key, row.end).is_none(), "a key twice: {line}");
            }
        }
        Ok(hops)
    }

    /// What was put and taken, by key.
    pub fn pairs(&self) -> impl Iterator<Item = (&str, Hop)> {
        self.puts.iter().filter_map(|(key, &put)| {
            let get = *self.gets.get(key)?;
            Some((key.as_str(), Hop { put, get }))
        })
    }

    /// What an observer should say of them.
    pub(crate) fn truth(&self, options: &Options) -> Truth {
        let mut rows = Vec::new();
        for (_, hop) in self.pairs() {
            let (from, to) = (hop.put.place, hop.get.place);
            let labels: BTreeMap<String, String> = [
                ("from_stage", from.stage),
                ("from_replica", from.replica),
                ("to_stage", to.stage),
                ("to_replica", to.replica),
            ]
            .map(|(name, value)| (name.to_owned(), value.to_string()))
            .into();
            let t = seconds(0, hop.get.done);
            #[expect(clippy::cast_precision_loss, reason = "payloads of tests")]
            let size = hop.put.size as f64;
            for (family, value) in [
                ("vllm_omni:transfer_size_bytes", size),
                ("vllm_omni:transfer_tx_s", hop.tx()),
                ("vllm_omni:transfer_rx_s", hop.rx()),
                ("vllm_omni:transfer_in_flight_s", hop.in_flight()),
            ] {
                rows.push((t, family, labels.clone(), value));
            }
        }
        Truth::observed(options, rows)
    }
}
