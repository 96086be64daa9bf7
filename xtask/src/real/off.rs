//! A server without statistics of its own: the agent's values against what the clients sent and saw.

use std::{collections::BTreeSet, fs, path::Path};

use anyhow::Result;

use super::{
    exposition::Exposition,
    load::{Form, Outcome},
};

/// Clock differences that a client's view may have: HTTP on both ends, and a busy machine.
const SECONDS: f64 = 0.020;
const PART: f64 = 0.05;
/// The stage that makes the sound.
const LAST: (&str, &str) = ("stage", "1");

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
    let streamed = whole.iter().filter(|o| o.form.streams()).count() as f64;
    let first: f64 = whole.iter().filter_map(|o| o.first_packet).sum();
    let count = whole.len() as f64;
    let seconds: f64 = whole.iter().map(|o| o.seconds).sum();
    let frames: usize = whole.iter().map(|o| o.frames).sum();
    let near = |sum: f64, n: f64| (sum * PART).max(SECONDS * n);
    let mut checks = vec![
        Check {
            what: "requests that ended well (requests_success_total, no abort)",
            want: count,
            have: agent.total("vllm_omni:requests_success_total", &[]).map(|all| {
                all - agent
                    .total(
                        "vllm_omni:requests_success_total",
                        &[("finished_reason", "abort")],
                    )
                    .unwrap_or(0.0)
            }),
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
            have: agent.total("vllm:request_success_total", &[LAST]).map(|all| {
                all - agent
                    .total(
                        "vllm:request_success_total",
                        &[LAST, ("finished_reason", "abort")],
                    )
                    .unwrap_or(0.0)
            }),
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
            what: "audio_ttfp_s sum",
            want: first,
            have: agent.sum("vllm_omni:audio_ttfp_s", &[LAST]),
            within: near(first, streamed),
        },
    ];
    let tokens: Option<u64> = whole
        .iter()
        .filter(|o| o.form == Form::SpeechEvents)
        .map(|o| o.prompt_tokens)
        .sum();
    if let Some(tokens) = tokens {
        checks.push(Check {
            what: "prompt tokens of requests whose answer tells",
            want: tokens as f64,
            have: agent.total("vllm_omni:prompt_tokens_total", &[]),
            within: 0.0,
        });
    }
    checks
}

/// What the tiny Audex speaks in.
const SAMPLE_RATE: f64 = 16000.0;

/// Prints the families that the agent had in the last run with statistics on and has not now.
pub(crate) fn cannot_be_had(agent: &Exposition, folder: &Path) -> Result<()> {
    let with = folder.with_file_name("omni").join("agent-after.txt");
    let Ok(text) = fs::read_to_string(&with) else {
        println!("  run the case `omni` too for the list of families that need the server's statistics");
        return Ok(());
    };
    let filled = |page: &Exposition| -> BTreeSet<String> {
        page.0
            .iter()
            .filter(|(name, family)| name.starts_with("vllm") && !family.children.is_empty())
            .map(|(name, _)| name.clone())
            .collect()
    };
    let missing: Vec<String> = filled(&Exposition::parse(&text)?)
        .difference(&filled(agent))
        .cloned()
        .collect();
    println!(
        "  not to be had while the server's statistics are off: {}",
        missing.join(", ")
    );
    Ok(())
}
