//! One scrape of `/metrics`, parsed.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};

/// A sample's name and labels.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Series {
    /// As on the line, with `_total`, `_bucket`, `_sum` or `_count`.
    pub name: String,
    /// Labels by name.
    pub labels: BTreeMap<String, String>,
}

/// Samples of one scrape.
#[derive(Clone, Debug, Default)]
pub struct Scrape {
    /// Family names to types, as the `# TYPE` lines say.
    pub types: BTreeMap<String, String>,
    /// All samples.
    pub samples: BTreeMap<Series, f64>,
    /// The text itself.
    pub text: String,
}

impl Scrape {
    /// Parses Prometheus text format 0.0.4. A series twice or a malformed line is an error.
    pub fn parse(text: &str) -> Result<Self> {
        let mut scrape = Self {
            text: text.to_owned(),
            ..Self::default()
        };
        for line in text.lines().filter(|line| !line.is_empty()) {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').context("TYPE line without a type")?;
                scrape.types.insert(name.to_owned(), kind.to_owned());
            }
            if line.starts_with('#') {
                continue;
            }
            let (series, value) = sample(line).with_context(|| format!("not a sample: {line}"))?;
            let before = scrape.samples.insert(series, value);
            ensure!(before.is_none(), "a series twice: {line}");
        }
        Ok(scrape)
    }

    /// The sample with exactly these labels.
    #[must_use]
    pub fn get(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        self.samples.get(&series(name, labels)).copied()
    }

    /// Sum over all samples of a name that have these labels among theirs; 0 where there is none.
    #[must_use]
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        // The sum of nothing is -0.0, which prints as such.
        self.matching(name, labels).map(|(_, value)| value).sum::<f64>() + 0.0
    }

    /// Samples of a name that have these labels among theirs.
    pub fn matching<'a>(
        &'a self,
        name: &'a str,
        labels: &'a [(&'a str, &'a str)],
    ) -> impl Iterator<Item = (&'a Series, f64)> {
        self.samples
            .iter()
            .filter(move |(series, _)| {
                series.name == name
                    && labels
                        .iter()
                        .all(|&(label, value)| series.labels.get(label).is_some_and(|have| have == value))
            })
            .map(|(series, &value)| (series, value))
    }

    /// A quantile of a histogram over all children with these labels, by linear interpolation inside its bucket as
    /// Prometheus does it. `None` without observations.
    #[must_use]
    pub fn quantile(&self, family: &str, labels: &[(&str, &str)], quantile: f64) -> Option<f64> {
        let name = format!("{family}_bucket");
        let mut buckets: Vec<(f64, f64)> = Vec::new();
        for (series, count) in self.matching(&name, labels) {
            let bound = number(series.labels.get("le")?)?;
            match buckets.iter_mut().find(|(le, _)| le.total_cmp(&bound).is_eq()) {
                Some((_, sum)) => *sum += count,
                None => buckets.push((bound, count)),
            }
        }
        buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        let rank = quantile * buckets.last().map(|&(_, count)| count).filter(|&n| n > 0.0)?;
        let mut below = (0.0, 0.0);
        for (bound, count) in buckets {
            if count >= rank {
                if bound.is_infinite() {
                    return Some(below.0);
                }
                return Some(below.0 + (bound - below.0) * (rank - below.1) / (count - below.1).max(1e-9));
            }
            below = (bound, count);
        }
        None
    }
}

/// A series from its parts.
#[must_use]
pub fn series(name: &str, labels: &[(&str, &str)]) -> Series {
    Series {
        name: name.to_owned(),
        labels: labels
            .iter()
            .map(|&(label, value)| (label.to_owned(), value.to_owned()))
            .collect(),
    }
}

fn sample(line: &str) -> Option<(Series, f64)> {
    let Some((name, rest)) = line.split_once('{') else {
        let (name, value) = line.split_once(' ')?;
        return Some((series(name, &[]), number(value)?));
    };
    let mut labels = BTreeMap::new();
    let mut rest = rest;
    loop {
        if let Some(value) = rest.strip_prefix("} ") {
            let name = name.to_owned();
            return Some((Series { name, labels }, number(value)?));
        }
        let (label, after) = rest.split_once("=\"")?;
        let (value, after) = quoted(after)?;
        labels.insert(label.to_owned(), value);
        rest = after.strip_prefix(',').unwrap_or(after);
    }
}

/// A label value up to its closing quote, and what follows.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, char)) = chars.next() {
        match char {
            '"' => return Some((value, text.get(at + 1..)?)),
            '\\' => value.push(match chars.next()?.1 {
                'n' => '\n',
                other => other,
            }),
            other => value.push(other),
        }
    }
    None
}

fn number(text: &str) -> Option<f64> {
    match text {
        "+Inf" => Some(f64::INFINITY),
        "-Inf" => Some(f64::NEG_INFINITY),
        other => other.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_labels_escapes_and_bounds() -> Result<()> {
        let scrape = Scrape::parse(
            "# HELP h_s Time.\n# TYPE h_s histogram\n\
             h_s_bucket{le=\"0.5\",model_name=\"a \\\"b\\\"\\\\\"} 1\n\
             h_s_bucket{le=\"+Inf\",model_name=\"a \\\"b\\\"\\\\\"} 3\nup 1.5e3\n",
        )?;
        assert_eq!(scrape.types["h_s"], "histogram");
        let labels = [("le", "+Inf"), ("model_name", "a \"b\"\\")];
        assert_eq!(scrape.get("h_s_bucket", &labels), Some(3.0));
        assert_eq!(scrape.get("up", &[]), Some(1500.0));
        Ok(())
    }

    #[test]
    fn a_series_twice_is_an_error() {
        assert!(Scrape::parse("up 1\nup 1\n").is_err());
    }

    #[test]
    fn quantile_over_children() -> Result<()> {
        let scrape = Scrape::parse(
            "h_bucket{le=\"1.0\",r=\"0\"} 1\nh_bucket{le=\"2.0\",r=\"0\"} 1\nh_bucket{le=\"+Inf\",r=\"0\"} 1\n\
             h_bucket{le=\"1.0\",r=\"1\"} 0\nh_bucket{le=\"2.0\",r=\"1\"} 1\nh_bucket{le=\"+Inf\",r=\"1\"} 1\n",
        )?;
        assert_eq!(scrape.quantile("h", &[], 0.5), Some(1.0));
        assert_eq!(scrape.quantile("h", &[], 0.75), Some(1.5));
        assert_eq!(scrape.quantile("h", &[("r", "2")], 0.5), None);
        Ok(())
    }
}
