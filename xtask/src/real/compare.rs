//! Compares what a server says of itself with what the agent says of it. Pure.

use std::{collections::BTreeMap, fmt};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use super::exposition::{Exposition, Family, Histogram, Kind, Labels, Value};

/// Sums of times may differ by this part ...
const PART: f64 = 0.05;
/// ... or by this much a sample, in seconds.
const SECONDS: f64 = 0.020;
/// More tokens than any prompt of the load has.
const LONGEST_PROMPT: f64 = 300.0;
/// What the differences of two decimal texts leave behind.
const ROUNDING: f64 = 1e-6;

/// Histograms with a sample that the API process stamps itself, after a message's way through its queues. The
/// agent has the send time of that message, so that sums differ by milliseconds and a sample near a bound may
/// fall into the next bucket. All other histograms come from values that the wire carries: they are equal.
const STAMPED_BY_THE_API: &[&str] = &[
    "vllm:e2e_request_latency_seconds",
    "vllm:time_to_first_token_seconds",
    "vllm_omni:audio_rtf",
    "vllm_omni:audio_ttfp_s",
    "vllm_omni:audio_underrun_s",
    "vllm_omni:e2e_request_latency_s",
    "vllm_omni:image_ttfp_s",
    "vllm_omni:stage_gen_time_s",
];

/// What of a child differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Part {
    /// Only one side has the child, or has anything in it.
    Child,
    /// A counter's or gauge's value.
    Value,
    /// A histogram's number of samples.
    Count,
    Sum,
    /// A bucket; the deviation has its bound.
    Bucket,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Child => "child",
            Self::Value => "value",
            Self::Count => "count",
            Self::Sum => "sum",
            Self::Bucket => "bucket",
        })
    }
}

/// One deviation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Deviation {
    pub(crate) family: String,
    pub(crate) labels: Labels,
    pub(crate) part: Part,
    /// The bound, where the part is a bucket.
    pub(crate) le: Option<f64>,
    pub(crate) server: f64,
    pub(crate) agent: f64,
    /// The reason that the parity table has for it.
    pub(crate) reason: Option<String>,
}

/// A comparison: how many children were compared, what deviates, and how far sums of times are apart.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
    pub(crate) compared: usize,
    pub(crate) families: usize,
    pub(crate) deviations: Vec<Deviation>,
    /// Sums of times, also those within their bounds.
    pub(crate) sums: Vec<TimeSum>,
    /// Rows of the parity table that nothing in this run needed.
    pub(crate) unused: Vec<String>,
}

/// A sum of times on both sides.
#[derive(Debug, Serialize)]
pub(crate) struct TimeSum {
    pub(crate) family: String,
    pub(crate) labels: Labels,
    pub(crate) samples: f64,
    pub(crate) server: f64,
    pub(crate) agent: f64,
}

impl Report {
    /// The deviations without a reason.
    pub(crate) fn unexplained(&self) -> impl Iterator<Item = &Deviation> {
        self.deviations.iter().filter(|d| d.reason.is_none())
    }
}

/// Families that both sides speak of; the rest of a server's page is about the server itself.
fn is_ours(family: &str) -> bool {
    (family.starts_with("vllm:") || family.starts_with("vllm_omni:")) && !family.ends_with("_created")
}

/// Compares counters and histograms as given (so give differences), gauges as they are.
pub(crate) fn compare(server: &Exposition, agent: &Exposition, parity: &Parity, given_up: u32) -> Report {
    let mut report = Report::default();
    let none = BTreeMap::new();
    for (name, ours) in server
        .0
        .iter()
        .filter(|(name, f)| is_ours(name) && f.kind != Kind::Other)
    {
        let theirs = agent.0.get(name).map_or(&none, |f| &f.children);
        let before = report.compared;
        compare_family(name, ours, theirs, &mut report);
        report.families += usize::from(report.compared > before);
    }
    parity.explain(&mut report, given_up);
    report
}

fn compare_family(name: &str, server: &Family, agent: &BTreeMap<Labels, Value>, report: &mut Report) {
    let server = &server.children;
    let Report {
        compared,
        sums,
        deviations,
        ..
    } = report;
    let mut deviate = |labels: &Labels, part, le, server, agent| {
        deviations.push(Deviation {
            family: name.to_owned(),
            labels: labels.clone(),
            part,
            le,
            server,
            agent,
            reason: None,
        });
    };
    for (labels, theirs) in agent {
        let have = server.get(labels).map_or(0.0, Value::size);
        if is_zero(have) && !is_zero(theirs.size()) {
            deviate(labels, Part::Child, None, have, theirs.size());
        }
    }
    for (labels, ours) in server {
        if is_zero(ours.size()) {
            continue;
        }
        *compared += 1;
        match (ours, agent.get(labels)) {
            (Value::Number(ours), Some(Value::Number(theirs))) => {
                if !equal(*ours, *theirs) {
                    deviate(labels, Part::Value, None, *ours, *theirs);
                }
            }
            (Value::Histogram(ours), Some(Value::Histogram(theirs))) => {
                let stamped = STAMPED_BY_THE_API.contains(&name);
                if !equal(ours.count, theirs.count) {
                    deviate(labels, Part::Count, None, ours.count, theirs.count);
                }
                let bound = if stamped {
                    (ours.sum * PART).max(SECONDS * ours.count)
                } else {
                    0.0
                };
                if !equal(ours.sum, theirs.sum) && (ours.sum - theirs.sum).abs() > bound {
                    deviate(labels, Part::Sum, None, ours.sum, theirs.sum);
                }
                if stamped {
                    sums.push(TimeSum {
                        family: name.to_owned(),
                        labels: labels.clone(),
                        samples: ours.count,
                        server: ours.sum,
                        agent: theirs.sum,
                    });
                }
                if let Some((le, server, agent)) = bucket_apart(ours, theirs, stamped) {
                    deviate(labels, Part::Bucket, Some(le), server, agent);
                }
            }
            (ours, theirs) => {
                deviate(
                    labels,
                    Part::Child,
                    None,
                    ours.size(),
                    theirs.map_or(0.0, Value::size),
                );
            }
        }
    }
}

/// Plain vLLM numbers its engines; the agent calls them replicas of stage 0.
pub(crate) fn engines_as_replicas(mut page: Exposition) -> Exposition {
    for family in page.0.values_mut() {
        for (mut labels, value) in std::mem::take(&mut family.children) {
            if let Some(engine) = labels.remove("engine") {
                labels.insert("stage".to_owned(), "0".to_owned());
                labels.insert("replica".to_owned(), engine);
            }
            family.children.insert(labels, value);
        }
    }
    page
}

/// The first common bound at which the two differ by more than they may: not at all, or, for stamps of the API
/// process, by more samples than lie within the tolerance of the bound. Also a bound that the agent lacks.
fn bucket_apart(server: &Histogram, agent: &Histogram, stamped: bool) -> Option<(f64, f64, f64)> {
    server.buckets.iter().find_map(|&(le, ours)| {
        let Some(theirs) = agent.at(le) else {
            return Some((le, ours, f64::NAN));
        };
        if equal(ours, theirs) {
            return None;
        }
        let slack = (le * PART).max(SECONDS);
        let least = server
            .buckets
            .iter()
            .rev()
            .find(|b| b.0 <= le - slack)
            .map_or(0.0, |b| b.1);
        let most = server
            .buckets
            .iter()
            .find(|b| b.0 >= le + slack)
            .map_or(server.count, |b| b.1);
        (!stamped || theirs < least || theirs > most).then_some((le, ours, theirs))
    })
}

fn is_zero(value: f64) -> bool {
    value.abs() < 1e-12
}

fn equal(a: f64, b: f64) -> bool {
    (a - b).abs() <= ROUNDING * a.abs().max(b.abs()).max(1e-3)
}

/// The table of differences that are meant: tab-separated case, family, parts, reason. `stale` as the parts is a
/// gauge of which the server keeps an old value at rest, while the agent has 0; `given-up` are figures of which the
/// agent has at most one output more for each request that its client gave up, `given-up-prompt` at most one first
/// output, with the prompt.
#[derive(Debug)]
pub(crate) struct Parity {
    rows: Vec<Row>,
}

#[derive(Debug)]
struct Row {
    family: String,
    parts: Vec<Part>,
    /// The server may keep an old value at rest; the agent has 0 then.
    stale: bool,
    /// How much more the agent may have for each request that was given up.
    given_up: Option<f64>,
    reason: String,
}

impl Parity {
    /// The rows of a case; several are separated by commas. `*` as the case is every case, as the family's end any
    /// end, as the parts all parts.
    pub(crate) fn parse(text: &str, case: &str) -> Result<Self> {
        let mut rows = Vec::new();
        for (at, line) in text.lines().enumerate() {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let row = || -> Result<(String, Row)> {
                let fields: Vec<&str> = line.split('\t').collect();
                let [cases, family, parts, reason] = fields[..] else {
                    anyhow::bail!("{} fields instead of 4", fields.len());
                };
                ensure!(is_ours(family), "{family} is no family of ours");
                ensure!(!reason.trim().is_empty(), "no reason");
                let stale = parts == "stale";
                let given_up = match parts {
                    "given-up" => Some(1.0),
                    "given-up-prompt" => Some(LONGEST_PROMPT),
                    _ => None,
                };
                let parts = match parts {
                    "stale" => vec![Part::Child, Part::Value],
                    "given-up" | "given-up-prompt" => vec![Part::Value, Part::Count, Part::Sum, Part::Bucket],
                    "*" => vec![Part::Child, Part::Value, Part::Count, Part::Sum, Part::Bucket],
                    parts => parts
                        .split(',')
                        .map(|p| serde_json::from_value(p.into()).with_context(|| format!("{p} is no part")))
                        .collect::<Result<_>>()?,
                };
                let row = Row {
                    family: family.to_owned(),
                    parts,
                    stale,
                    given_up,
                    reason: reason.to_owned(),
                };
                Ok((cases.to_owned(), row))
            };
            let (cases, row) = row().with_context(|| format!("line {}: {line}", at + 1))?;
            if cases.split(',').any(|known| known == "*" || known == case) {
                rows.push(row);
            }
        }
        Ok(Self { rows })
    }

    fn explain(&self, report: &mut Report, given_up: u32) {
        let mut used = vec![false; self.rows.len()];
        for deviation in &mut report.deviations {
            for (row, used) in self.rows.iter().zip(&mut used) {
                if row.covers(deviation, given_up) {
                    *used = true;
                    deviation.reason = Some(row.reason.clone());
                    break;
                }
            }
        }
        let unused = self.rows.iter().zip(used).filter(|(_, used)| !used);
        report.unused = unused.map(|(row, _)| row.family.clone()).collect();
    }
}

impl Row {
    fn covers(&self, deviation: &Deviation, given_up: u32) -> bool {
        let named = match self.family.strip_suffix('*') {
            Some(start) => deviation.family.starts_with(start),
            None => deviation.family == self.family,
        };
        let more = deviation.agent - deviation.server;
        named
            && self.parts.contains(&deviation.part)
            && (!self.stale || is_zero(deviation.agent))
            && self.given_up.is_none_or(|most| {
                let requests = f64::from(given_up);
                // A sample that is larger by a prompt is missing in a bucket.
                let least = if deviation.part == Part::Bucket {
                    -requests
                } else {
                    0.0
                };
                (least..=requests * most).contains(&more)
            })
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::real::kit;

    const NOTHING: Parity = Parity { rows: Vec::new() };

    fn page(kind: &str, family: &str, samples: &str) -> Exposition {
        Exposition::parse(&format!("# TYPE {family} {kind}\n{samples}")).unwrap()
    }

    fn found(server: &Exposition, agent: &Exposition) -> Vec<(Part, f64, f64)> {
        compare(server, agent, &NOTHING, 0)
            .deviations
            .iter()
            .map(|d| (d.part, d.server, d.agent))
            .collect()
    }

    fn histogram(family: &str, buckets: [u32; 4], sum: f64) -> Exposition {
        let [a, b, c, n] = buckets;
        page(
            "histogram",
            family,
            &format!(
                "{family}_bucket{{le=\"0.05\"}} {a}\n{family}_bucket{{le=\"0.1\"}} {b}\n\
                 {family}_bucket{{le=\"1.0\"}} {c}\n{family}_bucket{{le=\"+Inf\"}} {n}\n\
                 {family}_count {n}\n{family}_sum {sum}\n"
            ),
        )
    }

    #[test]
    fn an_engine_is_a_replica_of_stage_0() {
        let server = page(
            "counter",
            "vllm:n_total",
            "vllm:n_total{engine=\"1\",model_name=\"m\"} 2",
        );
        let agent = page(
            "counter",
            "vllm:n_total",
            "vllm:n_total{model_name=\"m\",replica=\"1\",stage=\"0\"} 2",
        );
        let report = compare(&engines_as_replicas(server), &agent, &NOTHING, 0);
        assert_eq!(
            (report.compared, report.families, report.deviations),
            (1, 1, vec![])
        );
    }

    #[rstest]
    #[case::equal("a 2", "a 2", &[])]
    #[case::other_value("a 2", "a 3", &[(Part::Value, 2.0, 3.0)])]
    #[case::missing("a 2", "", &[(Part::Child, 2.0, 0.0)])]
    #[case::zero_and_missing("a 0", "", &[])]
    #[case::too_much("a 0", "a 1", &[(Part::Child, 0.0, 1.0)])]
    #[case::other_labels("a{r=\"0\"} 1", "a{r=\"1\"} 1", &[(Part::Child, 0.0, 1.0), (Part::Child, 1.0, 0.0)])]
    fn counters(#[case] server: &str, #[case] agent: &str, #[case] want: &[(Part, f64, f64)]) {
        let name = |text: &str| page("counter", "vllm:a", &text.replacen('a', "vllm:a", 1));
        assert_eq!(found(&name(server), &name(agent)), want);
    }

    #[rstest]
    #[case::equal([1, 2, 3, 4], 5.0, &[])]
    #[case::count([1, 2, 3, 5], 5.0, &[(Part::Count, 4.0, 5.0), (Part::Bucket, 4.0, 5.0)])]
    #[case::sum_within([1, 2, 3, 4], 5.2, &[])]
    #[case::sum_beyond([1, 2, 3, 4], 5.3, &[(Part::Sum, 5.0, 5.3)])]
    #[case::next_bucket([0, 2, 3, 4], 5.0, &[])]
    #[case::far_bucket([1, 2, 4, 4], 5.0, &[])]
    #[case::two_buckets_off([1, 0, 3, 4], 5.0, &[(Part::Bucket, 2.0, 0.0)])]
    fn times_stamped_by_the_api(
        #[case] buckets: [u32; 4],
        #[case] sum: f64,
        #[case] want: &[(Part, f64, f64)],
    ) {
        let family = "vllm_omni:e2e_request_latency_s";
        assert_eq!(
            found(
                &histogram(family, [1, 2, 3, 4], 5.0),
                &histogram(family, buckets, sum)
            ),
            want
        );
    }

    #[rstest]
    #[case::equal([1, 2, 3, 4], 5.0, &[])]
    #[case::sum([1, 2, 3, 4], 5.001, &[(Part::Sum, 5.0, 5.001)])]
    #[case::next_bucket([0, 2, 3, 4], 5.0, &[(Part::Bucket, 1.0, 0.0)])]
    fn times_from_the_wire_are_equal(
        #[case] buckets: [u32; 4],
        #[case] sum: f64,
        #[case] want: &[(Part, f64, f64)],
    ) {
        let family = "vllm:inter_token_latency_seconds";
        assert_eq!(
            found(
                &histogram(family, [1, 2, 3, 4], 5.0),
                &histogram(family, buckets, sum)
            ),
            want
        );
    }

    #[test]
    fn other_pages_are_not_compared() {
        let server = Exposition::parse(
            "# TYPE http_requests_total counter\nhttp_requests_total 3\n# TYPE vllm:n_created gauge\nvllm:n_created 1\n",
        )
        .unwrap();
        assert_eq!(compare(&server, &Exposition::default(), &NOTHING, 0).compared, 0);
    }

    #[test]
    fn a_reason_covers_its_case_family_and_parts_alone() {
        let table = "# comment\nomni\tvllm_omni:x_*\tvalue,sum\tother source\n*\tvllm:gone\t*\tnever\n";
        let server = Exposition::parse(
            "# TYPE vllm_omni:x_1 gauge\nvllm_omni:x_1 1\n# TYPE vllm_omni:y gauge\nvllm_omni:y 1\n",
        )
        .unwrap();
        let agent = Exposition::parse("# TYPE vllm_omni:x_1 gauge\nvllm_omni:x_1 2\n").unwrap();
        let report = compare(&server, &agent, &Parity::parse(table, "omni").unwrap(), 0);
        let left: Vec<&str> = report.unexplained().map(|d| d.family.as_str()).collect();
        assert_eq!(left, ["vllm_omni:y"]);
        assert_eq!(report.unused, ["vllm:gone"]);
        let elsewhere = compare(&server, &agent, &Parity::parse(table, "vllm").unwrap(), 0);
        assert_eq!(elsewhere.unexplained().count(), 2);
    }

    #[rstest]
    #[case::one_prompt("given-up-prompt", 870, 1, 0)]
    #[case::longer_than_any_prompt("given-up-prompt", 901, 1, 1)]
    #[case::two_prompts_of_two_requests("given-up-prompt", 1140, 2, 0)]
    #[case::nobody_gave_up("given-up-prompt", 870, 0, 1)]
    #[case::a_prompt_is_no_single_output("given-up", 870, 1, 1)]
    #[case::one_output("given-up", 601, 1, 0)]
    #[case::never_less("given-up-prompt", 599, 1, 1)]
    fn what_a_request_that_was_given_up_may_add(
        #[case] kind: &str,
        #[case] agent: u32,
        #[case] given_up: u32,
        #[case] unexplained: usize,
    ) {
        let table = Parity::parse(&format!("*\tvllm:tokens_total\t{kind}\tforgotten"), "vllm").unwrap();
        let page = |value: u32| {
            page(
                "counter",
                "vllm:tokens_total",
                &format!("vllm:tokens_total {value}"),
            )
        };
        let report = compare(&page(600), &page(agent), &table, given_up);
        assert_eq!(report.unexplained().count(), unexplained);
    }

    #[rstest]
    #[case::the_agent_at_rest("0", 0)]
    #[case::the_agent_stale_too("1", 1)]
    fn a_stale_gauge_is_the_servers_alone(#[case] agent: &str, #[case] unexplained: usize) {
        let table = Parity::parse("omni\tvllm:running\tstale\tkeeps the last snapshot", "omni").unwrap();
        let page = |value: &str| page("gauge", "vllm:running", &format!("vllm:running {value}"));
        assert_eq!(
            compare(&page("4"), &page(agent), &table, 0).unexplained().count(),
            unexplained
        );
    }

    #[rstest]
    #[case::fields("omni\tvllm:a\t*")]
    #[case::part("omni\tvllm:a\tvalues\twhy")]
    #[case::family("omni\thttp_requests_total\t*\twhy")]
    #[case::reason("omni\tvllm:a\t*\t ")]
    fn a_bad_row_is_an_error(#[case] row: &str) {
        assert!(Parity::parse(row, "vllm").is_err());
    }

    #[test]
    fn the_table_of_the_repository_is_readable() {
        let text = std::fs::read_to_string(kit::files().join("parity.tsv")).unwrap();
        for case in ["vllm", "omni"] {
            Parity::parse(&text, case).unwrap();
        }
    }
}
