//! A record as text: a summary, and the tables of its stages and transfers.

use std::{
    fmt::{self, Display, Formatter},
    time::{Duration, UNIX_EPOCH},
};

use crate::pipeline::records::{RequestRecord, StageRecord, TransferRecord};

/// Prints a record as lines, without a line end at the end.
#[derive(Clone, Copy, Debug)]
pub struct Tables<'a>(pub &'a RequestRecord);

impl Display for Tables<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let record = self.0;
        write!(
            f,
            "request {}: {} ({})",
            record.request_id,
            record.outcome.as_str(),
            one_line(&record.reason)
        )?;
        if let Some(e2e_ms) = record.e2e_ms {
            write!(f, " after {e2e_ms:.3} ms")?;
        }
        let model = record.model.as_deref().unwrap_or("?");
        write!(f, ", model {model}, pipeline process {}", record.pipeline_pid)?;
        write!(
            f,
            "\n  arrived {}, ended {}, prompt tokens {}, generated tokens {}",
            time(record.arrived_unix_ms),
            time(record.ended_unix_ms),
            cell(record.prompt_tokens),
            record.generated_tokens
        )?;
        if !record.stages.is_empty() {
            let head = [
                "stage",
                "replica",
                "type",
                "finish_reason",
                "queue_ms",
                "first_token_ms",
                "gen_time_ms",
                "prompt_tokens",
                "generated_tokens",
            ];
            table(f, head, record.stages.iter().map(stage))?;
        }
        if !record.transfers.is_empty() {
            let head = [
                "from",
                "to",
                "connector",
                "payloads",
                "size_bytes",
                "tx_ms",
                "in_flight_ms",
                "rx_ms",
            ];
            table(f, head, record.transfers.iter().map(transfer))?;
        }
        Ok(())
    }
}

fn stage(row: &StageRecord) -> [String; 9] {
    [
        cell(row.stage),
        cell(row.replica),
        one_line(&row.kind),
        one_line(row.finish_reason.as_deref().unwrap_or(MISSING)),
        millis(row.queue_ms),
        millis(row.first_token_ms),
        millis(row.gen_time_ms),
        cell(row.prompt_tokens),
        row.generated_tokens.to_string(),
    ]
}

fn transfer(row: &TransferRecord) -> [String; 8] {
    [
        format!("{}.{}", row.from_stage, row.from_replica),
        format!("{}.{}", row.to_stage, row.to_replica),
        one_line(&row.connector),
        row.payloads.to_string(),
        cell(row.size_bytes),
        millis(row.tx_ms),
        millis(row.in_flight_ms),
        millis(row.rx_ms),
    ]
}

/// A table with columns as wide as their widest cell.
fn table<const N: usize>(
    f: &mut Formatter<'_>,
    head: [&str; N],
    rows: impl Iterator<Item = [String; N]>,
) -> fmt::Result {
    let rows: Vec<[String; N]> = std::iter::once(head.map(str::to_owned)).chain(rows).collect();
    let mut widths = [0; N];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    for row in &rows {
        write!(f, "\n ")?;
        for (cell, width) in row.iter().zip(widths) {
            write!(f, " {cell:>width$}")?;
        }
    }
    Ok(())
}

/// What was not seen.
const MISSING: &str = "-";

fn cell(value: Option<impl Display>) -> String {
    value.map_or_else(|| MISSING.to_owned(), |value| value.to_string())
}

fn millis(value: Option<f64>) -> String {
    value.map_or_else(|| MISSING.to_owned(), |value| format!("{value:.3}"))
}

fn time(unix_ms: Option<u64>) -> String {
    let time = unix_ms.and_then(|ms| UNIX_EPOCH.checked_add(Duration::from_millis(ms)));
    // Beyond the year 9999 humantime has no text.
    let time = time.filter(|_| unix_ms.is_some_and(|ms| ms < 253_402_300_800_000));
    time.map_or_else(
        || MISSING.to_owned(),
        |time| humantime::format_rfc3339_millis(time).to_string(),
    )
}

/// Words of a record that came over HTTP are not trusted to be words.
fn one_line(text: &str) -> String {
    text.replace(char::is_control, "\u{fffd}")
}
