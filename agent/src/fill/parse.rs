//! The Prometheus text format as `prometheus_client` writes it, as far as the families of the catalogue go.

use std::{
    collections::{BTreeMap, HashMap},
    sync::LazyLock,
};

use super::sample::{Buckets, EngineChild, Value};
use crate::metrics::catalogue::{Family, Kind};

/// Most children that are kept of one exposition.
const MAX_CHILDREN: usize = 20_000;
/// Most labels of a sample, and bytes of a label value.
const MAX_LABELS: usize = 16;
const MAX_VALUE: usize = 256;

/// Why a text is no exposition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// A line is neither a comment nor a sample.
    #[error("line {line} is no sample")]
    Line {
        /// Line number, from 1.
        line: usize,
    },
    /// There are too many children.
    #[error("more than {MAX_CHILDREN} children")]
    TooMany,
}

/// Which number of a child a sample line has.
#[derive(Clone, Copy, Debug)]
enum Part {
    Number,
    Bucket,
    Count,
    Sum,
}

/// What sample names mean.
fn meaning(name: &str) -> Option<(Family, Part)> {
    static NAMES: LazyLock<HashMap<String, (Family, Part)>> = LazyLock::new(|| {
        let mut names = HashMap::new();
        for family in Family::ALL.iter().filter(|family| !family.row().is_own()) {
            let name = family.name();
            if let Kind::Histogram(_) = family.row().kind {
                names.insert(format!("{name}_bucket"), (*family, Part::Bucket));
                names.insert(format!("{name}_count"), (*family, Part::Count));
                names.insert(format!("{name}_sum"), (*family, Part::Sum));
            } else {
                names.insert(name.to_owned(), (*family, Part::Number));
            }
        }
        names
    });
    NAMES.get(name).copied()
}

type Labels = Vec<(String, String)>;

#[derive(Debug, Default)]
struct Gathered {
    number: Option<f64>,
    buckets: Buckets,
}

/// The children of the catalogue's families in a text, in the order of family and labels. Families of others are left
/// out, and so are values that are no finite numbers.
pub fn parse(text: &str) -> Result<Vec<EngineChild>, ParseError> {
    let mut children: BTreeMap<(Family, Labels), Gathered> = BTreeMap::new();
    for (at, line) in text.lines().enumerate() {
        let line = line.trim_ascii();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let malformed = ParseError::Line { line: at + 1 };
        let end = line.find(['{', ' ', '\t']).ok_or(malformed)?;
        let (name, rest) = line.split_at_checked(end).ok_or(malformed)?;
        let Some((family, part)) = meaning(name) else {
            continue;
        };
        let (mut labels, rest) = match rest.strip_prefix('{') {
            Some(rest) => labels(rest).ok_or(malformed)?,
            None => (Labels::new(), rest),
        };
        // A time stamp may follow.
        let value = rest.split_ascii_whitespace().next().ok_or(malformed)?;
        let value = number(value).ok_or(malformed)?;
        let mut bound = None;
        labels.retain(|(name, value)| {
            let is_bound = name == "le";
            if is_bound {
                bound = number(value);
            }
            !is_bound
        });
        labels.sort_unstable();
        if children.len() >= MAX_CHILDREN {
            return Err(ParseError::TooMany);
        }
        let child = children.entry((family, labels)).or_default();
        match part {
            Part::Number => child.number = Some(value),
            Part::Sum => child.buckets.sum = value,
            Part::Count => {
                child.buckets.count = count(value).ok_or(malformed)?;
                child.number = Some(0.0);
            }
            Part::Bucket => {
                let bound = bound.ok_or(malformed)?;
                let up_to = count(value).ok_or(malformed)?;
                if bound.is_finite() {
                    child.buckets.up_to.push((bound, up_to));
                }
            }
        }
    }
    let children = children.into_iter().filter_map(|((family, labels), child)| {
        let number = child.number.filter(|number| number.is_finite())?;
        let value = if let Kind::Histogram(_) = family.row().kind {
            let Buckets { up_to, count, sum } = &child.buckets;
            let rises = up_to.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1);
            let fits = up_to.last().is_none_or(|(_, below)| below <= count);
            if !rises || !fits || !sum.is_finite() {
                return None;
            }
            Value::Histogram(child.buckets)
        } else {
            Value::Number(number)
        };
        Some(EngineChild {
            family: family.name().to_owned(),
            labels,
            value,
        })
    });
    Ok(children.collect())
}

/// Labels after their `{`, and what follows the `}`.
fn labels(text: &str) -> Option<(Labels, &str)> {
    let mut labels = Labels::new();
    let mut rest = text.trim_ascii_start();
    loop {
        if let Some(after) = rest.strip_prefix('}') {
            return Some((labels, after));
        }
        let (name, after) = rest.split_once('=')?;
        let after = after.trim_ascii_start().strip_prefix('"')?;
        let (value, after) = quoted(after)?;
        if labels.len() >= MAX_LABELS {
            return None;
        }
        labels.push((name.trim_ascii().to_owned(), value));
        rest = after.trim_ascii_start();
        rest = rest.strip_prefix(',').unwrap_or(rest).trim_ascii_start();
    }
}

/// A label value after its first quote, and what follows the last.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut escaped = false;
    for (at, c) in text.char_indices() {
        match c {
            _ if escaped => {
                value.push(if c == 'n' { '\n' } else { c });
                escaped = false;
            }
            '\\' => escaped = true,
            '"' => return Some((value, text.get(at + 1..)?)),
            c if value.len() + c.len_utf8() <= MAX_VALUE => value.push(c),
            _ => {}
        }
    }
    None
}

fn number(text: &str) -> Option<f64> {
    match text {
        "+Inf" | "Inf" => Some(f64::INFINITY),
        "-Inf" => Some(f64::NEG_INFINITY),
        "NaN" => Some(f64::NAN),
        text => text.parse().ok(),
    }
}

/// A number of observations.
fn count(value: f64) -> Option<u64> {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "from 0 up to 2^53"
    )]
    (0.0..9e15).contains(&value).then_some(value as u64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;
    use crate::{
        host::identity::PipelineId,
        metrics::{
            registry::{Limits, Registry},
            text::Format,
        },
        pipeline::sink::{ExtraId, Scope, Sink as _},
    };

    fn child(family: &str, labels: &[(&str, &str)], value: Value) -> EngineChild {
        EngineChild {
            family: family.to_owned(),
            labels: labels
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect(),
            value,
        }
    }

    #[test]
    fn families_of_the_catalogue_are_read_and_no_others() {
        let text = r#"# HELP vllm:num_preemptions_total Préemptions – total.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="a \"b\\c\"\n"} 3.0
vllm:num_preemptions_created{engine="0",model_name="a"} 1.7e+09
process_resident_memory_bytes 1.2e+09
http_requests_total{handler="/v1/x",status="2xx"} 7.0
vllm_omni:num_requests_running{model_name="m"} 2.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="m"} 0.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.005",model_name="m"} 2.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 3.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 3.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 0.5
"#;
        let histogram = Value::Histogram(Buckets {
            up_to: vec![(0.001, 0), (0.005, 2)],
            count: 3,
            sum: 0.5,
        });
        let of_m = [("engine", "0"), ("model_name", "m")];
        assert_eq!(
            parse(text).unwrap(),
            [
                child(
                    "vllm_omni:num_requests_running",
                    &[("model_name", "m")],
                    Value::Number(2.0)
                ),
                child(
                    "vllm:num_preemptions_total",
                    &[("engine", "0"), ("model_name", "a \"b\\c\"\n")],
                    Value::Number(3.0)
                ),
                child("vllm:time_to_first_token_seconds", &of_m, histogram),
            ]
        );
    }

    #[rstest]
    #[case::no_value("vllm:num_preemptions_total")]
    #[case::no_number("vllm:num_preemptions_total x")]
    #[case::open_labels("vllm:num_preemptions_total{a=\"b\" 1.0")]
    #[case::open_value("vllm:num_preemptions_total{a=\"b} 1.0")]
    #[case::no_quotes("vllm:num_preemptions_total{a=b} 1.0")]
    #[case::negative_bucket("vllm:time_to_first_token_seconds_bucket{le=\"1.0\"} -1.0")]
    #[case::no_bound("vllm:time_to_first_token_seconds_bucket 1.0")]
    #[case::half_an_observation_too_many("vllm:time_to_first_token_seconds_count 1e300")]
    #[case::html("<html>")]
    fn other_text_is_an_error(#[case] text: &str) {
        assert_eq!(parse(text), Err(ParseError::Line { line: 1 }));
    }

    #[rstest]
    #[case::nan("vllm:num_preemptions_total NaN")]
    #[case::infinite("vllm:num_preemptions_total +Inf")]
    #[case::falling_buckets(
        "vllm:time_to_first_token_seconds_bucket{le=\"1.0\"} 5\n\
         vllm:time_to_first_token_seconds_bucket{le=\"2.0\"} 4\n\
         vllm:time_to_first_token_seconds_count 5\nvllm:time_to_first_token_seconds_sum 5"
    )]
    #[case::more_in_a_bucket_than_in_all(
        "vllm:time_to_first_token_seconds_bucket{le=\"1.0\"} 5\n\
         vllm:time_to_first_token_seconds_count 4\nvllm:time_to_first_token_seconds_sum 5"
    )]
    #[case::no_count("vllm:time_to_first_token_seconds_bucket{le=\"1.0\"} 5")]
    fn children_that_make_no_sense_are_left_out(#[case] text: &str) {
        assert_eq!(parse(text), Ok(Vec::new()));
    }

    #[test]
    fn a_flood_of_children_is_refused() {
        let text = (0..=MAX_CHILDREN).fold(String::new(), |text, at| {
            text + &format!("vllm:num_preemptions_total{{a=\"{at}\"}} 1\n")
        });
        assert_eq!(parse(&text), Err(ParseError::TooMany));
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "(vllm:(num_preemptions_total|time_to_first_token_seconds_bucket)?[{}=\",a-z0-9 .\\\\\n]{0,40}){0,5}") {
            let _ = parse(&text);
        }

        #[test]
        fn what_our_own_encoder_writes_is_read(value in 0_u32.., model in "\\PC{0,30}") {
            let mut registry = Registry::new(Limits { max_series: 100, retention: std::time::Duration::ZERO });
            let scope = registry.scope(&Scope {
                pipeline: PipelineId(1), model: format!("m{model}"), served_model: format!("m{model}"),
                stage: Some(0), replica: Some(0), max_model_len: None,
            });
            registry.add(Family::VllmNumPreemptionsTotal, scope, ExtraId::NONE, f64::from(value));
            let mut out = Vec::new();
            registry.exposition().render(&mut out, Format::Text);
            let children = parse(&String::from_utf8(out).unwrap()).unwrap();
            prop_assert_eq!(children.len(), 1);
            prop_assert_eq!(&children[0].value, &Value::Number(f64::from(value)));
        }
    }
}
