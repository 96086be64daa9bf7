//! What a `PromQL` query asks for, held against the catalogue: every name and every label in it must be served.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use promql_parser::{
    label::Matchers,
    parser::{self, Expr, LabelModifier, VectorSelector},
};

use crate::setup;

type Labels = BTreeSet<String>;

/// Labels that Prometheus gives every series of a target.
const TARGET: &[&str] = &["job", "instance"];

/// Sample names with their labels.
pub(super) struct Names {
    labels: BTreeMap<String, Labels>,
    /// Sample names to families, for those of the catalogue.
    families: BTreeMap<String, String>,
}

impl Names {
    /// Those of the agent's own catalogue, and `up`.
    pub(super) fn of_catalogue() -> Result<Self> {
        let binary = setup::target_dir().join("debug/omnitap");
        let list = setup::output(Command::new(binary).arg("families"))?;
        let mut names = Self {
            labels: BTreeMap::new(),
            families: BTreeMap::new(),
        };
        names.insert("up", &[]);
        for line in list.lines() {
            let mut columns = line.split('\t');
            let (Some(family), Some(kind), Some(labels)) = (columns.next(), columns.next(), columns.next())
            else {
                bail!("not a family: {line}");
            };
            let labels: Vec<&str> = labels.split(',').filter(|label| *label != "-").collect();
            let samples: &[(&str, &[&str])] = match kind {
                "histogram" => &[("_bucket", &["le"]), ("_sum", &[]), ("_count", &[])],
                _ => &[("", &[])],
            };
            for (suffix, more) in samples {
                let sample = format!("{family}{suffix}");
                names.insert(&sample, &[labels.as_slice(), more].concat());
                names.families.insert(sample, family.to_owned());
            }
        }
        ensure!(names.labels.len() > 100, "the catalogue is short");
        Ok(names)
    }

    fn insert(&mut self, name: &str, labels: &[&str]) {
        let labels = labels
            .iter()
            .chain(TARGET)
            .map(|&label| label.to_owned())
            .collect();
        self.labels.insert(name.to_owned(), labels);
    }

    /// A recorded series, with the labels of its expression.
    pub(super) fn record(&mut self, name: &str, labels: Labels) {
        self.labels.insert(name.to_owned(), labels);
    }

    /// Checks a query; returns the labels of its result.
    pub(super) fn check(&self, query: &str) -> Result<Labels> {
        let parsed = parser::parse(query).map_err(|error| anyhow!("{error}: {query}"))?;
        self.labels_of(&parsed).with_context(|| query.to_owned())
    }

    /// The families that a query reads, as far as they are of the catalogue.
    pub(super) fn families(&self, query: &str) -> Result<BTreeSet<String>> {
        let parsed = parser::parse(query).map_err(|error| anyhow!("{error}: {query}"))?;
        let mut names = BTreeSet::new();
        selected(&parsed, &mut names);
        Ok(names
            .iter()
            .filter_map(|name| self.families.get(name))
            .cloned()
            .collect())
    }

    fn labels_of(&self, expr: &Expr) -> Result<Labels> {
        Ok(match expr {
            Expr::VectorSelector(selector) => self.selector(selector)?,
            Expr::MatrixSelector(matrix) => self.selector(&matrix.vs)?,
            Expr::Paren(paren) => self.labels_of(&paren.expr)?,
            Expr::Unary(unary) => self.labels_of(&unary.expr)?,
            Expr::Subquery(subquery) => self.labels_of(&subquery.expr)?,
            Expr::NumberLiteral(_) | Expr::StringLiteral(_) => Labels::new(),
            Expr::Call(call) => {
                let mut labels = Labels::new();
                for argument in &call.args.args {
                    labels.append(&mut self.labels_of(argument)?);
                }
                if call.func.name == "histogram_quantile" {
                    ensure!(labels.remove("le"), "a quantile without `le`");
                }
                labels
            }
            Expr::Binary(binary) => {
                let (mut left, mut right) = (self.labels_of(&binary.lhs)?, self.labels_of(&binary.rhs)?);
                if let Some(matching) = binary.modifier.as_ref().and_then(|m| m.matching.as_ref()) {
                    for label in &matching.labels().labels {
                        ensure!(
                            left.contains(label) && right.contains(label),
                            "`{label}` is not on both sides"
                        );
                    }
                }
                left.append(&mut right);
                left
            }
            Expr::Aggregate(aggregate) => {
                let inner = self.labels_of(&aggregate.expr)?;
                match &aggregate.modifier {
                    None => Labels::new(),
                    Some(LabelModifier::Include(by)) => {
                        for label in &by.labels {
                            ensure!(inner.contains(label), "nothing has the label `{label}`");
                        }
                        by.labels.iter().cloned().collect()
                    }
                    Some(LabelModifier::Exclude(without)) => {
                        let mut rest = inner;
                        for label in &without.labels {
                            ensure!(rest.remove(label), "nothing has the label `{label}`");
                        }
                        rest
                    }
                }
            }
            Expr::Extension(_) => bail!("an extension of PromQL"),
        })
    }

    fn selector(&self, selector: &VectorSelector) -> Result<Labels> {
        let name = selector.name.as_deref().context("a selector without a name")?;
        let labels = self
            .labels
            .get(name)
            .with_context(|| format!("`{name}` is neither served nor recorded"))?;
        let Matchers {
            matchers,
            or_matchers,
        } = &selector.matchers;
        for matcher in matchers.iter().chain(or_matchers.iter().flatten()) {
            ensure!(
                labels.contains(&matcher.name),
                "`{name}` has no label `{}`",
                matcher.name
            );
        }
        Ok(labels.clone())
    }
}

fn selected(expr: &Expr, names: &mut BTreeSet<String>) {
    match expr {
        Expr::VectorSelector(selector) => names.extend(selector.name.clone()),
        Expr::MatrixSelector(matrix) => names.extend(matrix.vs.name.clone()),
        Expr::Paren(paren) => selected(&paren.expr, names),
        Expr::Unary(unary) => selected(&unary.expr, names),
        Expr::Subquery(subquery) => selected(&subquery.expr, names),
        Expr::Aggregate(aggregate) => selected(&aggregate.expr, names),
        Expr::Call(call) => call
            .args
            .args
            .iter()
            .for_each(|argument| selected(argument, names)),
        Expr::Binary(binary) => {
            selected(&binary.lhs, names);
            selected(&binary.rhs, names);
        }
        Expr::NumberLiteral(_) | Expr::StringLiteral(_) | Expr::Extension(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn names() -> Names {
        let mut names = Names {
            labels: BTreeMap::new(),
            families: BTreeMap::new(),
        };
        names.insert("f_total", &["model_name", "stage"]);
        names.insert("g_bucket", &["model_name", "le"]);
        names
    }

    #[rstest]
    #[case::selector(r#"f_total{stage="0"}"#, &["instance", "job", "model_name", "stage"])]
    #[case::by("sum by (stage) (rate(f_total[5m]))", &["stage"])]
    #[case::without("sum without (stage, job) (f_total)", &["instance", "model_name"])]
    #[case::all("sum(f_total)", &[])]
    #[case::quantile("histogram_quantile(0.9, sum by (job, le) (rate(g_bucket[5m])))", &["job"])]
    #[case::binary("sum by (job) (f_total) / sum by (job) (f_total) > 2", &["job"])]
    fn labels_of_results(#[case] query: &str, #[case] wanted: &[&str]) {
        let labels = names().check(query).unwrap();
        assert_eq!(labels.iter().map(String::as_str).collect::<Vec<_>>(), wanted);
    }

    #[rstest]
    #[case::name("h_total", "neither served nor recorded")]
    #[case::matcher(r#"f_total{replica="0"}"#, "no label `replica`")]
    #[case::by("sum by (replica) (f_total)", "the label `replica`")]
    #[case::lost_by_an_inner_sum("sum by (stage) (sum by (job) (f_total))", "the label `stage`")]
    #[case::on("sum by (job) (f_total) > on (stage) f_total", "not on both sides")]
    #[case::quantile("histogram_quantile(0.9, sum by (job) (rate(g_bucket[5m])))", "without `le`")]
    #[case::syntax("sum by (", "")]
    fn what_is_not_served_is_an_error(#[case] query: &str, #[case] wanted: &str) {
        let error = format!("{:#}", names().check(query).unwrap_err());
        assert!(error.contains(wanted), "{error}");
    }
}
