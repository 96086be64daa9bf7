//! Reads the Prometheus text format (0.0.4), of the servers and of the agent alike.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};

/// Labels of a child, without `le`.
pub(crate) type Labels = BTreeMap<String, String>;

/// The families of one scrape, by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Exposition(pub(crate) BTreeMap<String, Family>);

/// A family: its type and its children.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Family {
    pub(crate) kind: Kind,
    pub(crate) children: BTreeMap<Labels, Value>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Counter,
    Gauge,
    Histogram,
    /// `untyped`, `summary`, `info`: kept, never compared.
    Other,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    Number(f64),
    Histogram(Histogram),
}

/// Cumulative buckets in rising order of `le`, as exposed.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Histogram {
    pub(crate) buckets: Vec<(f64, f64)>,
    pub(crate) sum: f64,
    pub(crate) count: f64,
}

impl Value {
    /// A number's value, a histogram's count.
    pub(crate) fn size(&self) -> f64 {
        match self {
            Self::Number(n) => *n,
            Self::Histogram(h) => h.count,
        }
    }

    fn minus(&self, before: &Self) -> Self {
        match (self, before) {
            (Self::Histogram(now), Self::Histogram(then)) => Self::Histogram(Histogram {
                buckets: now
                    .buckets
                    .iter()
                    .map(|&(le, n)| (le, n - then.at(le).unwrap_or(0.0)))
                    .collect(),
                sum: now.sum - then.sum,
                count: now.count - then.count,
            }),
            (Self::Number(now), Self::Number(then)) => Self::Number(now - then),
            _ => self.clone(),
        }
    }
}

impl Histogram {
    /// The cumulative count at a bound that this histogram has.
    pub(crate) fn at(&self, le: f64) -> Option<f64> {
        self.buckets
            .iter()
            .find(|b| b.0.total_cmp(&le).is_eq())
            .map(|b| b.1)
    }
}

impl Exposition {
    /// Parses a scrape. An error names the line.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let mut families = Self::default();
        for (at, line) in text.lines().enumerate() {
            families
                .line(line)
                .with_context(|| format!("line {}: {line}", at + 1))?;
        }
        Ok(families)
    }

    fn line(&mut self, line: &str) -> Result<()> {
        if let Some(comment) = line.strip_prefix('#') {
            let mut words = comment.split_whitespace();
            if words.next() == Some("TYPE") {
                let name = words.next().context("TYPE without a name")?;
                let kind = match words.next().context("TYPE without a type")? {
                    "counter" => Kind::Counter,
                    "gauge" => Kind::Gauge,
                    "histogram" => Kind::Histogram,
                    _ => Kind::Other,
                };
                let family = Family {
                    kind,
                    children: BTreeMap::new(),
                };
                ensure!(
                    self.0.insert(name.to_owned(), family).is_none(),
                    "the family {name} stands twice"
                );
            }
            return Ok(());
        }
        if line.trim().is_empty() {
            return Ok(());
        }
        let (name, mut labels, value) = sample(line)?;
        if let Some((family, part)) = self.histogram_of(name) {
            let le = labels.remove("le");
            let child = family
                .children
                .entry(labels)
                .or_insert_with(|| Value::Histogram(Histogram::default()));
            let Value::Histogram(histogram) = child else {
                bail!("{name} is no histogram");
            };
            match part {
                "_sum" => histogram.sum = value,
                "_count" => histogram.count = value,
                _ => histogram
                    .buckets
                    .push((number(&le.context("a bucket without le")?)?, value)),
            }
            return Ok(());
        }
        let family = self.0.entry(name.to_owned()).or_insert_with(|| Family {
            kind: Kind::Other,
            children: BTreeMap::new(),
        });
        ensure!(
            family.children.insert(labels, Value::Number(value)).is_none(),
            "the child stands twice"
        );
        Ok(())
    }

    fn histogram_of<'a>(&mut self, name: &'a str) -> Option<(&mut Family, &'a str)> {
        let at = ["_bucket", "_sum", "_count"]
            .iter()
            .find_map(|part| name.strip_suffix(part).map(str::len))?;
        let (family, part) = name.split_at_checked(at)?;
        self.0
            .get_mut(family)
            .filter(|f| f.kind == Kind::Histogram)
            .map(|f| (f, part))
    }

    /// What was added since `before`: counters and histograms as differences, gauges as they are now.
    pub(crate) fn since(&self, before: &Self) -> Self {
        let mut now = self.clone();
        for (name, family) in &mut now.0 {
            if !matches!(family.kind, Kind::Counter | Kind::Histogram) {
                continue;
            }
            let Some(old) = before.0.get(name) else { continue };
            for (labels, value) in &mut family.children {
                if let Some(then) = old.children.get(labels) {
                    *value = value.minus(then);
                }
            }
        }
        now
    }

    /// The sum of a family's children that have these labels; `None` if there is no such child.
    pub(crate) fn total(&self, family: &str, labels: &[(&str, &str)]) -> Option<f64> {
        self.matching(family, labels)
            .map(|v| v.size())
            .reduce(|a, b| a + b)
    }

    /// The sum of the samples of a histogram family's children that have these labels.
    pub(crate) fn sum(&self, family: &str, labels: &[(&str, &str)]) -> Option<f64> {
        self.matching(family, labels)
            .map(|v| match v {
                Value::Histogram(h) => h.sum,
                Value::Number(_) => 0.0,
            })
            .reduce(|a, b| a + b)
    }

    fn matching(&self, family: &str, labels: &[(&str, &str)]) -> impl Iterator<Item = &Value> {
        self.0
            .get(family)
            .into_iter()
            .flat_map(|f| &f.children)
            .filter(move |(have, _)| {
                labels
                    .iter()
                    .all(|(name, value)| have.get(*name).is_some_and(|v| v == value))
            })
            .map(|(_, value)| value)
    }
}

fn number(text: &str) -> Result<f64> {
    match text {
        "+Inf" => Ok(f64::INFINITY),
        "-Inf" => Ok(f64::NEG_INFINITY),
        _ => text.parse().with_context(|| format!("{text} is no number")),
    }
}

/// `name{a="b",c="d"} value [timestamp]`.
fn sample(line: &str) -> Result<(&str, Labels, f64)> {
    let end = line
        .find(|c: char| c == '{' || c.is_whitespace())
        .context("a sample without a value")?;
    let (name, mut rest) = line.split_at(end);
    let mut labels = Labels::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        loop {
            rest = rest.trim_start_matches([',', ' ']);
            if let Some(after) = rest.strip_prefix('}') {
                rest = after;
                break;
            }
            let (label, after) = rest.split_once("=\"").context("a label without a value")?;
            let (value, after) = quoted(after)?;
            labels.insert(label.to_owned(), value);
            rest = after;
        }
    }
    let value = rest
        .split_whitespace()
        .next()
        .context("a sample without a value")?;
    Ok((name, labels, number(value)?))
}

/// A label's value up to its closing quote, and what follows.
fn quoted(text: &str) -> Result<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Ok((value, text.get(at + 1..).unwrap_or_default())),
            '\\' => match chars.next().context("a label that ends in a backslash")?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            other => value.push(other),
        }
    }
    bail!("a label without its closing quote")
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const TEXT: &str = r#"# HELP vllm:prompt_tokens_total Prompt tokens.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="a \"b\"\\c"} 7.0
# TYPE vllm:ttft histogram
vllm:ttft_bucket{le="0.5",model_name="m"} 1.0
vllm:ttft_bucket{le="+Inf",model_name="m"} 3.0
vllm:ttft_count{model_name="m"} 3.0
vllm:ttft_sum{model_name="m"} 4.5
# TYPE up gauge
up 1
"#;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect()
    }

    #[test]
    fn reads_counters_histograms_and_bare_gauges() {
        let have = Exposition::parse(TEXT).unwrap();
        let tokens = &have.0["vllm:prompt_tokens_total"];
        assert_eq!(tokens.kind, Kind::Counter);
        assert_eq!(
            tokens.children[&labels(&[("engine", "0"), ("model_name", "a \"b\"\\c")])],
            Value::Number(7.0)
        );
        assert_eq!(
            have.0["vllm:ttft"].children[&labels(&[("model_name", "m")])],
            Value::Histogram(Histogram {
                buckets: vec![(0.5, 1.0), (f64::INFINITY, 3.0)],
                sum: 4.5,
                count: 3.0
            })
        );
        assert_eq!(have.total("up", &[]), Some(1.0));
        assert_eq!(have.total("vllm:ttft", &[("model_name", "m")]), Some(3.0));
        assert_eq!(have.sum("vllm:ttft", &[]), Some(4.5));
        assert_eq!(have.total("vllm:ttft", &[("model_name", "other")]), None);
    }

    #[test]
    fn differences_leave_gauges_alone() {
        let before = Exposition::parse(TEXT).unwrap();
        let after = Exposition::parse(
            &TEXT
                .replace("} 3.0", "} 5.0")
                .replace("} 4.5", "} 6.0")
                .replace("} 7.0", "} 9.0"),
        )
        .unwrap();
        let added = after.since(&before);
        assert_eq!(added.total("vllm:prompt_tokens_total", &[]), Some(2.0));
        assert_eq!(added.total("up", &[]), Some(1.0));
        assert_eq!(
            added.0["vllm:ttft"].children[&labels(&[("model_name", "m")])],
            Value::Histogram(Histogram {
                buckets: vec![(0.5, 0.0), (f64::INFINITY, 2.0)],
                sum: 1.5,
                count: 2.0
            })
        );
    }

    #[rstest]
    #[case::no_value("a{b=\"c\"}")]
    #[case::open_quote("a{b=\"c} 1")]
    #[case::no_number("a one")]
    #[case::same_child_twice("a 1\na 2")]
    #[case::same_family_twice("# TYPE a counter\n# TYPE a counter")]
    #[case::bucket_without_le("# TYPE a histogram\na_bucket 1")]
    fn refuses(#[case] text: &str) {
        assert!(Exposition::parse(text).is_err());
    }
}
