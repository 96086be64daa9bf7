//! Where families have been seen: the table's claims, as far as the repository can prove them.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{fs, path::PathBuf};

use omnitap::metrics::{
    catalogue::{Family, Kind},
    seen::{self, MARKS, SEEN},
};

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..").join(name)
}

fn read(name: &str) -> String {
    fs::read_to_string(path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Whether the golden text of a recording has a sample of a family that is not 0.
fn has_value(recording: &str, family: Family) -> bool {
    let golden = read(&format!("agent/tests/snapshots/replay__{recording}.snap"));
    let row = family.row();
    let name = match row.kind {
        Kind::Histogram(_) => format!("{}_count", row.name),
        Kind::Counter | Kind::Gauge(_) => row.name.to_owned(),
    };
    golden.lines().any(|line| {
        let value = line
            .strip_prefix(&name)
            .filter(|rest| rest.starts_with(['{', ' ']))
            .and_then(|rest| rest.rsplit(' ').next());
        value.is_some_and(|value| value.parse::<f64>().unwrap() != 0.0)
    })
}

/// The recordings of vLLM-Omni.
fn recordings() -> Vec<String> {
    let names = fs::read_dir(path("tests/recordings")).unwrap().map(|entry| {
        let name = entry.unwrap().file_name().into_string().unwrap();
        name.trim_end_matches(".jsonl.gz").to_owned()
    });
    names.filter(|name| name != "vllm").collect()
}

#[test]
fn every_documented_family_has_a_row() {
    // What vLLM-Omni has beside its document.
    const EXTRA: [Family; 2] = [Family::OmniGenerationTokensTotal, Family::OmniPromptTokensTotal];
    let documented: Vec<Family> = Family::ALL
        .iter()
        .copied()
        .filter(|family| family.name().starts_with("vllm_omni:"))
        .filter(|family| !family.name().contains(":realtime_vad_") && !EXTRA.contains(family))
        .collect();
    let rows: Vec<Family> = SEEN.iter().map(|seen| seen.family).collect();
    assert_eq!(rows, documented);
    assert_eq!(rows.len(), 36);
}

#[test]
fn a_recording_has_exactly_the_families_that_it_is_said_to_have() {
    for recording in recordings() {
        for seen in SEEN {
            assert_eq!(
                has_value(&recording, seen.family),
                seen.recorded.contains(&recording.as_str()),
                "{recording}: {}",
                seen.family.name()
            );
        }
    }
    let known = recordings();
    let named = SEEN.iter().flat_map(|seen| seen.recorded);
    for name in named {
        assert!(known.iter().any(|known| known == name), "no recording {name}");
    }
}

#[test]
fn what_the_bundled_pipeline_shows_is_named_there() {
    let truth = read("tests/pipeline/truth.py") + &read("tests/src/hops.rs");
    for seen in SEEN {
        let Some(test) = seen.bundled else { continue };
        let code = read(&format!("tests/tests/{test}.rs"));
        let name = seen.family.name().trim_start_matches("vllm_omni:");
        let quoted = [format!("\"vllm_omni:{name}\""), format!("\"{name}\"")];
        assert!(
            quoted
                .iter()
                .any(|name| truth.contains(name) || code.contains(name)),
            "{name} is in neither {test} nor the truth"
        );
    }
}

#[test]
fn the_table_in_docs_is_up_to_date() {
    let page = read("docs/parity.md");
    let [begin, end] = MARKS;
    let (before, rest) = page.split_once(begin).unwrap();
    let (_, after) = rest.split_once(end).unwrap();
    let fresh = format!("{before}{begin}\n{}\n{end}{after}", seen::markdown());
    if std::env::var_os("OMNITAP_WRITE_DOCS").is_some() {
        fs::write(path("docs/parity.md"), &fresh).unwrap();
    }
    assert!(
        read("docs/parity.md") == fresh,
        "docs/parity.md differs from the code: run `OMNITAP_WRITE_DOCS=1 cargo test -p omnitap up_to_date`"
    );
}
