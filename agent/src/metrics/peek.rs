//! Present values of single families, for the status page.

use std::collections::BTreeMap;

use super::{catalogue::Family, store::Value, text::Exposition};

/// One labelled child.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its value.
    pub value: Reading,
}

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub enum Reading {
    /// Of a counter or gauge.
    Number(f64),
    /// Of a histogram: counts by bucket, not cumulated, `+Inf` last, and the sum of all observations.
    Histogram {
        /// Counts.
        counts: Vec<u64>,
        /// Sum.
        sum: f64,
    },
}

impl Exposition {
    /// The children of a family as they are now.
    #[must_use]
    pub fn peek(&self, family: Family) -> Vec<Sample> {
        let mut samples = Vec::new();
        self.store().with_children(family, |children| {
            samples.extend(children.iter().map(|child| Sample {
                labels: pairs(&child.labels),
                value: match &child.value {
                    Value::Number(number) => Reading::Number(number.get()),
                    Value::Histogram(histogram) => Reading::Histogram {
                        counts: histogram.counts().collect(),
                        sum: histogram.sum(),
                    },
                },
            }));
        });
        samples
    }
}

/// The labels of a text such as `a="x",b="y"`, as `store` writes it.
fn pairs(text: &str) -> BTreeMap<String, String> {
    let mut pairs = BTreeMap::new();
    let mut rest = text;
    while let Some((name, after)) = rest.split_once("=\"") {
        let mut value = String::new();
        let mut chars = after.char_indices();
        let mut end = after.len();
        while let Some((at, c)) = chars.next() {
            match c {
                '"' => {
                    end = at + 1;
                    break;
                }
                '\\' => match chars.next() {
                    Some((_, 'n')) => value.push('\n'),
                    Some((_, other)) => value.push(other),
                    None => {}
                },
                c => value.push(c),
            }
        }
        pairs.insert(name.to_owned(), value);
        rest = after.get(end..).unwrap_or_default().trim_start_matches(',');
    }
    pairs
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use proptest::prelude::*;

    use super::*;
    use crate::metrics::store::Store;

    proptest! {
        /// What the store writes is read back, whatever a name from another container is.
        #[test]
        fn labels_survive(values in proptest::collection::vec("[^\\p{C}]{0,40}", 3)) {
            let store = Store::new(1000);
            let family = Family::OmnitapSourceState;
            let names = family.row().labels;
            let mut labels: Vec<_> = names.iter().copied().zip(values.iter().map(|v| Cow::Borrowed(v.as_str()))).collect();
            let child = store.child(family, &mut labels, None).expect("room");
            let read = pairs(&child.labels);
            let wanted: BTreeMap<String, String> =
                names.iter().map(|n| (*n).to_owned()).zip(values.iter().cloned()).collect();
            prop_assert_eq!(read, wanted);
        }
    }

    #[test]
    fn no_labels() {
        assert!(pairs("").is_empty());
    }
}
