//! The text of `/metrics`: Prometheus text 0.0.4 as Python's client prints it, and OpenMetrics 1.0.

use std::{
    fmt::Write as _,
    sync::{Arc, LazyLock},
};

use super::{
    catalogue::{Buckets, Family, Kind, help},
    number::{write_count, write_float},
    own::Own,
    store::{Child, Histogram, Store, Value},
};

/// A form of the exposition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Prometheus text format 0.0.4.
    Text,
    /// OpenMetrics text format 1.0.0.
    OpenMetrics,
}

impl Format {
    /// The Content-Type of an answer in this form.
    #[must_use]
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// Prints all families; clones share them.
#[derive(Clone, Debug)]
pub struct Exposition {
    store: Arc<Store>,
    own: Own,
}

impl Exposition {
    pub(super) fn new(store: Arc<Store>, own: Own) -> Self {
        Self { store, own }
    }

    pub(super) fn store(&self) -> &Store {
        &self.store
    }

    /// Appends the whole exposition. It waits for no source; the reader can write meanwhile.
    pub fn render(&self, out: &mut Vec<u8>, format: Format) {
        self.own.sample_series();
        self.write(out, format, Family::ALL.iter().copied());
    }

    /// Appends the families of the pipelines without the agent's own: what a replay prints, the same everywhere.
    pub fn render_pipelines(&self, out: &mut Vec<u8>, format: Format) {
        let families = Family::ALL.iter().copied();
        self.write(out, format, families.filter(|f| !f.row().is_own()));
    }

    fn write(&self, out: &mut Vec<u8>, format: Format, families: impl Iterator<Item = Family>) {
        for family in families {
            out.extend_from_slice(header(family, format).as_bytes());
            self.store
                .with_children(family, |children| write_children(out, family, children));
        }
        if format == Format::OpenMetrics {
            out.extend_from_slice(b"# EOF\n");
        }
    }
}

/// HELP and TYPE of a family.
fn header(family: Family, format: Format) -> &'static str {
    static HEADERS: LazyLock<[Vec<String>; 2]> = LazyLock::new(|| {
        [Format::Text, Format::OpenMetrics]
            .map(|format| Family::ALL.iter().map(|f| make_header(*f, format)).collect())
    });
    HEADERS
        .get(format as usize)
        .and_then(|h| h.get(family as usize))
        .map_or("", String::as_str)
}

fn make_header(family: Family, format: Format) -> String {
    let row = family.row();
    let mut name = row.name;
    let mut help = help(row).replace('\\', "\\\\").replace('\n', "\\n");
    if format == Format::OpenMetrics {
        help = help.replace('"', "\\\"");
        if row.kind == Kind::Counter {
            name = name.strip_suffix("_total").unwrap_or(name);
        }
    }
    let mut text = String::new();
    let _ = write!(
        text,
        "# HELP {name} {help}\n# TYPE {name} {}\n",
        row.kind.as_str()
    );
    text
}

fn write_children(out: &mut Vec<u8>, family: Family, children: &[Arc<Child>]) {
    let name = family.row().name;
    let mut before = Vec::new();
    let mut after = Vec::new();
    for child in children {
        match &child.value {
            Value::Number(number) => {
                write_name(out, name, "", &child.labels);
                write_float(out, number.get());
                out.push(b'\n');
            }
            Value::Histogram(histogram) => {
                write_histogram(out, family, child, histogram, &mut before, &mut after);
            }
        }
    }
}

/// `before` and `after` are room for what the bucket lines of a child have in common.
fn write_histogram(
    out: &mut Vec<u8>,
    family: Family,
    child: &Child,
    histogram: &Histogram,
    before: &mut Vec<u8>,
    after: &mut Vec<u8>,
) {
    let row = family.row();
    let (left, right) = child
        .labels
        .split_at_checked(child.le_at)
        .unwrap_or(("", &child.labels));
    before.clear();
    before.extend_from_slice(row.name.as_bytes());
    before.extend_from_slice(b"_bucket{");
    before.extend_from_slice(left.as_bytes());
    before.extend_from_slice(if left.is_empty() { b"le=\"" } else { b",le=\"" });
    after.clear();
    after.push(b'"');
    if left.is_empty() && !right.is_empty() {
        after.push(b',');
    }
    after.extend_from_slice(right.as_bytes());
    after.extend_from_slice(b"} ");

    let le = row.kind.buckets().map_or(&[][..], Buckets::le);
    let mut total = 0;
    let mut counts = histogram.counts().peekable();
    let mut le = le.iter();
    while let Some(count) = counts.next() {
        total += count;
        let bound = if counts.peek().is_some() { le.next() } else { None };
        out.extend_from_slice(before);
        out.extend_from_slice(bound.map_or(&b"+Inf"[..], |b| b.as_bytes()));
        out.extend_from_slice(after);
        write_count(out, total);
        out.push(b'\n');
    }
    write_name(out, row.name, "_count", &child.labels);
    write_count(out, total);
    out.push(b'\n');
    write_name(out, row.name, "_sum", &child.labels);
    write_float(out, histogram.sum());
    out.push(b'\n');
}

/// Name, labels and the space before the value.
fn write_name(out: &mut Vec<u8>, name: &str, suffix: &str, labels: &str) {
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(suffix.as_bytes());
    if !labels.is_empty() {
        out.push(b'{');
        out.extend_from_slice(labels.as_bytes());
        out.push(b'}');
    }
    out.push(b' ');
}
