//! The catalogue against the facts of the engines, and its printed forms.

use omnitap::metrics::catalogue::{self, Buckets, Family, Kind};
use rstest::rstest;

const FAMILIES: &str = include_str!("metrics_families.tsv");
const BUCKETS: &str = include_str!("metrics_buckets.tsv");

/// Families whose buckets are ours on purpose: the engine's can't resolve real values.
const OWN_BUCKETS: [&str; 2] = ["vllm_omni:image_pixels", "vllm_omni:num_inference_steps"];

fn rows(tsv: &'static str) -> impl Iterator<Item = Vec<&'static str>> {
    tsv.lines()
        .filter(|l| !l.starts_with('#'))
        .map(|l| l.split('\t').collect())
}

#[test]
fn families_are_those_of_the_engines() {
    let engines: Vec<String> = rows(FAMILIES)
        .map(|r| {
            let buckets = if OWN_BUCKETS.contains(&r[0]) { "own" } else { r[3] };
            format!("{} {} {} {buckets}", r[0], r[1], r[2])
        })
        .collect();
    let ours: Vec<String> = Family::ALL
        .iter()
        .map(|f| f.row())
        .filter(|r| !r.is_own())
        .map(|r| {
            let buckets = r.kind.buckets().map_or("-", Buckets::name);
            let buckets = if OWN_BUCKETS.contains(&r.name) {
                "own"
            } else {
                buckets
            };
            format!("{} {} {} {buckets}", r.name, r.kind.as_str(), r.labels.join(","))
        })
        .collect();
    assert_eq!(ours, engines);
}

#[test]
fn buckets_are_those_of_the_engines() {
    for row in rows(BUCKETS).filter(|r| r[0] != "LIBRARY_DEFAULT") {
        let set = Buckets::ALL
            .into_iter()
            .find(|b| b.name() == row[0])
            .unwrap_or_else(|| panic!("no bucket set {}", row[0]));
        let bounds: Vec<f64> = row[1].split(' ').map(|b| b.parse().unwrap()).collect();
        assert_eq!(set.bounds(None), bounds, "{}", row[0]);
    }
}

#[rstest]
#[case::small(Some(100), &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0])]
#[case::between(Some(99), &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0])]
#[case::one(Some(1), &[1.0])]
#[case::zero(Some(0), &[])]
fn token_buckets_end_at_the_longest_sequence(#[case] max_model_len: Option<u32>, #[case] bounds: &[f64]) {
    assert_eq!(Buckets::Tokens.bounds(max_model_len), bounds);
}

#[rstest]
#[case::unknown(None, 1e6)]
#[case::typical(Some(32_768), 2e4)]
#[case::million(Some(1_048_576), 1e6)]
#[case::largest(Some(u32::MAX), 2e9)]
fn token_buckets_reach_the_longest_sequence(#[case] max_model_len: Option<u32>, #[case] last: f64) {
    assert_eq!(Buckets::Tokens.bounds(max_model_len).last(), Some(&last));
}

#[test]
fn bounds_ascend() {
    for set in Buckets::ALL {
        assert!(set.bounds(None).is_sorted_by(|a, b| a < b), "{}", set.name());
    }
}

#[test]
fn names_follow_the_conventions() {
    for family in Family::ALL {
        let row = family.row();
        assert_eq!(row.family, *family);
        if row.kind == Kind::Counter {
            assert!(row.name.ends_with("_total"), "{}", row.name);
        }
        assert!(
            row.help.ends_with('.') && !row.help.contains('\n'),
            "{}: {}",
            row.name,
            row.help
        );
        assert!(!row.labels.contains(&"le"), "{}", row.name);
    }
}

#[test]
fn list_has_five_fields_a_family() {
    let list = catalogue::list();
    assert_eq!(list.lines().count(), Family::COUNT);
    assert!(list.lines().all(|l| l.split('\t').count() == 5));
    assert!(
        list.contains("vllm:time_to_first_token_seconds\thistogram\tmodel_name,stage,replica\tTTFT\twire\n")
    );
}

#[test]
fn the_page_in_docs_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/metrics.md");
    let page = catalogue::markdown();
    if std::env::var_os("OMNITAP_WRITE_DOCS").is_some() {
        std::fs::write(path, &page).unwrap();
    }
    assert!(
        std::fs::read_to_string(path).unwrap_or_default() == page,
        "docs/metrics.md differs from the code: run `OMNITAP_WRITE_DOCS=1 cargo test -p omnitap up_to_date`"
    );
}
