//! Recordings of real servers, replayed: their exposition is pinned as golden text.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{fs::File, path::Path};

use omnitap::{
    config::RequestLog,
    metrics::{registry::Limits, text::Format},
    observer::Observer,
    pipeline::tracker,
    record::Entries,
    requests::{Requests, Settings, text::Tables},
};
use rstest::rstest;

/// Plays a recording to an observer.
fn play(name: &str, observer: &mut Observer) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../tests/recordings/{name}.jsonl.gz"));
    let entries =
        Entries::new(File::open(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()))).unwrap();
    assert!(entries.header.redacted, "{name} must not carry content");
    for entry in entries {
        observer.replay(&entry.unwrap());
    }
}

fn observer() -> Observer {
    let limits = Limits {
        max_series: 50_000,
        retention: std::time::Duration::from_mins(15),
    };
    Observer::new(limits, tracker::Limits::default())
}

/// The families of a recording's pipelines, as text.
fn replayed(name: &str) -> String {
    let mut observer = observer();
    play(name, &mut observer);
    exposed(&observer)
}

fn exposed(observer: &Observer) -> String {
    let mut out = Vec::new();
    observer.exposition().render_pipelines(&mut out, Format::Text);
    String::from_utf8(out).unwrap()
}

/// Sample lines with a value, without those of empty buckets: what a reader can check by eye.
fn told(text: &str) -> String {
    let has_value = |line: &&str| !line.starts_with('#') && !line.ends_with(" 0.0");
    text.lines()
        .filter(has_value)
        .fold(String::new(), |told, line| told + line + "\n")
}

#[rstest]
#[case::plain_vllm("vllm")]
#[case::speech_with_log_stats("omni")]
#[case::speech_without_log_stats("omni-off")]
#[case::words_then_pictures("ardit")]
#[case::pictures_in_the_api_process("inline")]
fn a_recording_of_a_real_server_gives_the_same_text(#[case] name: &str) {
    let text = replayed(name);
    assert_eq!(text, replayed(name), "a replay must not depend on when it runs");
    insta::assert_snapshot!(name, told(&text));
}

/// The records of a recording's requests, as text and as the first line of JSON.
#[rstest]
#[case::plain_vllm("vllm")]
#[case::speech_with_log_stats("omni")]
#[case::speech_without_log_stats("omni-off")]
#[case::words_then_pictures("ardit")]
#[case::pictures_in_the_api_process("inline")]
fn a_recording_of_a_real_server_gives_the_same_records(#[case] name: &str) {
    let mut observer = observer();
    let settings = Settings {
        served: true,
        keep: 1000,
        max_rate: 1000,
        log: RequestLog::Off,
    };
    let requests = Requests::new(settings, observer.own()).unwrap();
    observer.tell_requests(requests.clone());
    play(name, &mut observer);
    assert_eq!(
        exposed(&observer),
        replayed(name),
        "records must not change the families"
    );
    let page = requests.page(0, 0);
    assert!(!page.more && page.missed == 0);
    let mut text = String::new();
    if let Some(first) = page.records.first() {
        text += &serde_json::to_string_pretty(first).unwrap();
        text.push('\n');
    }
    for record in &page.records {
        text += &Tables(record).to_string();
        text.push('\n');
    }
    insta::assert_snapshot!(format!("{name}-requests"), text);
}
