//! A server without statistics of its own: the agent's values against what the clients sent and saw.

use std::{collections::BTreeSet, fs, path::Path};

use anyhow::{Context, Result};

use super::{exposition::Exposition, load::Outcome};

/// Clock differences that a client's view may have: HTTP on both ends, and a busy machine.
const SECONDS: f64 = 0.020;
const PART: f64 = 0.05;
/// The stage that makes the sound.
const LAST: (&str, &str) = ("stage", "1");

/// What the tiny Audex speaks in, in samples a second.
const SAMPLE_RATE: f64 = 16000.0;

/// One thing that the client knows and the agent must say.
struct Check {
    what: &'static str,
    want: f64,
    have: Option<f64>,
    /// Allowed difference.
    within: f64,
}

/// Prints the checks; false if one fails.
pub(crate) fn check(outcomes: &[Outcome], agent: &Exposition) -> bool {
    let mut right = true;
    for check in checks(outcomes, agent) {
        let fine = check
            .have
            .is_some_and(|have| (have - check.want).abs() <= check.within);
        right &= fine;
        println!(
            "  {} {:<58} client {:>12.4} agent {:>12}{}",
            if fine { "equal" } else { "WRONG" },
            check.what,
            check.want,
            check
                .have
                .map_or_else(|| "none".to_owned(), |v| format!("{v:.4}")),
            if check.within > 0.0 {
                format!(" within {:.4}", check.within)
            } else {
                String::new()
            }
        );
    }
    right
}

#[expect(clippy::cast_precision_loss, reason = "counts of a test run")]
fn checks(outcomes: &[Outcome], agent: &Exposition) -> Vec<Check> {
    let whole: Vec<&Outcome> = outcomes.iter().filter(|o| !o.left).collect();
    // Also of streams that the client left later.
    let firsts: Vec<f64> = outcomes.iter().filter_map(|o| o.first_packet).collect();
    let (streamed, first) = (firsts.len() as f64, firsts.iter().sum());
    let count = whole.len() as f64;
    let seconds: f64 = whole.iter().map(|o| o.seconds).sum();
    let frames: usize = whole.iter().map(|o| o.frames).sum();
    let near = |sum: f64, n: f64| (sum * PART).max(SECONDS * n);
    // All children of a family but those of aborts.
    let well = |family: &str, labels: &[(&str, &str)]| {
        let aborts: Vec<_> = labels
            .iter()
            .copied()
            .chain([("finished_reason", "abort")])
            .collect();
        let aborted = agent.total(family, &aborts).unwrap_or_default();
        agent.total(family, labels).map(|all| all - aborted)
    };
    let mut checks = vec![
        Check {
            what: "requests that ended well (requests_success_total, no abort)",
            want: count,
            have: well("vllm_omni:requests_success_total", &[]),
            within: 0.0,
        },
        Check {
            what: "requests given up (requests_failed_total)",
            want: outcomes.len() as f64 - count,
            have: agent.total("vllm_omni:requests_failed_total", &[]),
            within: 0.0,
        },
        Check {
            what: "e2e_request_latency_s count",
            want: count,
            have: agent.total("vllm_omni:e2e_request_latency_s", &[]),
            within: 0.0,
        },
        Check {
            what: "e2e_request_latency_s sum",
            want: seconds,
            have: agent.sum("vllm_omni:e2e_request_latency_s", &[]),
            within: near(seconds, count),
        },
        Check {
            what: "finished requests of the last stage (vllm:request_success_total)",
            want: count,
            have: well("vllm:request_success_total", &[LAST]),
            within: 0.0,
        },
        Check {
            what: "audio frames of whole answers (audio_duration_s sum x 16000)",
            want: frames as f64,
            have: agent
                .sum("vllm_omni:audio_duration_s", &[LAST])
                .map(|s| s * SAMPLE_RATE),
            within: 0.5,
        },
        Check {
            what: "audio_ttfp_s count",
            want: streamed,
            have: agent.total("vllm_omni:audio_ttfp_s", &[LAST]),
            within: 0.0,
        },
        Check {
            what: "audio_ttfp_s sum",
            want: first,
            have: agent.sum("vllm_omni:audio_ttfp_s", &[LAST]),
            within: near(first, streamed),
        },
    ];
    // Only server-sent events tell token counts; the tiny model always speaks to the limit.
    let told: BTreeSet<u64> = whole.iter().filter_map(|o| o.output_tokens).collect();
    if let (1, Some(tokens)) = (told.len(), told.first()) {
        checks.push(Check {
            what: "generation_tokens_total",
            want: *tokens as f64 * count,
            have: agent.total("vllm_omni:generation_tokens_total", &[]),
            within: 0.0,
        });
    }
    // Each prompt is a text, a token a byte, in a frame that is the same for all.
    let texts: usize = whole.iter().map(|o| o.text).sum();
    let frame = agent
        .total("vllm_omni:prompt_tokens_total", &[])
        .map(|tokens| (tokens - texts as f64) / count);
    checks.push(Check {
        what: "prompt tokens a request beyond its text: a whole number",
        want: frame.map_or(0.0, f64::round),
        have: frame.filter(|f| *f > 0.0),
        within: 1e-9,
    });
    checks
}

/// Prints the families that the agent had in the last run with statistics on and has not now.
pub(crate) fn cannot_be_had(folder: &Path) -> Result<()> {
    let without_source = |case: &Path| -> Result<BTreeSet<String>> {
        let page = case.join("agent-after.txt");
        let text = fs::read_to_string(&page).with_context(|| format!("cannot read {}", page.display()))?;
        let state = |line: &str| {
            let labels = line
                .strip_prefix("omnitap_source_state{family=\"")?
                .strip_suffix(" 0.0")?;
            Some(labels.split('"').next()?.to_owned())
        };
        Ok(text.lines().filter_map(state).collect())
    };
    let on = folder.with_file_name("omni");
    if !on.exists() {
        println!("  run the case `omni` too for the list of families that need the server's statistics");
        return Ok(());
    }
    let (off, on) = (without_source(folder)?, without_source(&on)?);
    let missing: Vec<&str> = off.difference(&on).map(String::as_str).collect();
    println!(
        "  not to be had while the server's statistics are off: {}",
        missing.join(", ")
    );
    Ok(())
}
