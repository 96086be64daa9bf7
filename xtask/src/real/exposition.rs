//! A scrape as families of children, so that two scrapes can be subtracted and compared.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use omnitap_tests::scrape::{Scrape, Series};

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

impl Kind {
    fn named(name: &str) -> Self {
        match name {
            "counter" => Self::Counter,
            "gauge" => Self::Gauge,
            "histogram" => Self::Histogram,
            _ => Self::Other,
        }
    }
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
    /// Parses a scrape and puts the lines of a histogram together.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let scrape = Scrape::parse(text)?;
        let mut families: BTreeMap<String, Family> = scrape
            .types
            .into_iter()
            .map(|(name, kind)| {
                (
                    name,
                    Family {
                        kind: Kind::named(&kind),
                        children: BTreeMap::new(),
                    },
                )
            })
            .collect();
        for (series, value) in scrape.samples {
            let Series { name, mut labels } = series;
            let part = ["_bucket", "_sum", "_count"].into_iter().find_map(|part| {
                let family = name.strip_suffix(part)?;
                (families.get(family)?.kind == Kind::Histogram).then_some((family, part))
            });
            let Some((family, part)) = part else {
                let family = families.entry(name).or_insert_with(|| Family {
                    kind: Kind::Other,
                    children: BTreeMap::new(),
                });
                family.children.insert(labels, Value::Number(value));
                continue;
            };
            let le = labels.remove("le");
            let children = families.get_mut(family).map(|f| &mut f.children);
            let child = children.context("no family")?.entry(labels);
            let Value::Histogram(histogram) = child.or_insert_with(|| Value::Histogram(Histogram::default()))
            else {
                bail!("{family} is a histogram and something else");
            };
            match part {
                "_sum" => histogram.sum = value,
                "_count" => histogram.count = value,
                _ => {
                    let le = le.with_context(|| format!("{name} without le"))?;
                    let le = if le == "+Inf" { f64::INFINITY } else { le.parse()? };
                    histogram.buckets.push((le, value));
                }
            }
        }
        for value in families.values_mut().flat_map(|f| f.children.values_mut()) {
            if let Value::Histogram(histogram) = value {
                histogram.buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
            }
        }
        Ok(Self(families))
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

    /// Without the children of other models: the agent watches all pipelines of the host.
    pub(crate) fn of_models(mut self, models: &[String]) -> Self {
        for family in self.0.values_mut() {
            family.children.retain(|labels, _| {
                labels
                    .get("model_name")
                    .is_none_or(|model| models.contains(model))
            });
        }
        self
    }

    /// The sum of a family's children that have these labels; `None` if there is no such child.
    pub(crate) fn total(&self, family: &str, labels: &[(&str, &str)]) -> Option<f64> {
        self.matching(family, labels)
            .map(Value::size)
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

#[cfg(test)]
mod tests {
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

    #[test]
    fn other_models_are_left_out() {
        let text = "# TYPE vllm:n counter\nvllm:n{model_name=\"a\"} 1\nvllm:n{model_name=\"b\"} 2\nup 1\n";
        let page = Exposition::parse(text).unwrap().of_models(&["b".to_owned()]);
        assert_eq!(
            (page.total("vllm:n", &[]), page.total("up", &[])),
            (Some(2.0), Some(1.0))
        );
    }

    #[test]
    fn a_bucket_without_its_bound_is_an_error() {
        assert!(Exposition::parse("# TYPE a histogram\na_bucket 1").is_err());
    }
}
