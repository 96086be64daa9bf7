//! The configuration: layers, limits, errors with their places, and the printed form.

#![expect(clippy::expect_used, reason = "a failure in a helper is a failed test")]

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::Parser as _;
use omnitap::{
    cli::{Cli, Command},
    config::{self, Config, ConfigError, Effective, LogFormat, Size},
};
use rstest::rstest;

/// What `omnitap config` with these flags would run with.
fn load(args: &[&str]) -> Result<Effective, ConfigError> {
    let args = ["omnitap", "config"].iter().chain(args);
    match Cli::try_parse_from(args) {
        Ok(Cli {
            command: Command::Config(flags),
        }) => Effective::load(&flags),
        other => panic!("{other:?}"),
    }
}

fn file(text: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("omnitap.yaml");
    std::fs::write(&path, text).expect("a file in it");
    let flag = format!("--config.file={}", path.display());
    (folder, flag)
}

fn error(args: &[&str]) -> String {
    match load(args) {
        Ok(effective) => panic!("accepted: {effective:?}"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn defaults_are_valid_and_shown() {
    let effective = load(&[]).unwrap();
    assert_eq!(effective.config, Config::default());
    let config = effective.config;
    assert_eq!(config.listen.len(), 1);
    assert_eq!(config.listen[0].to_string(), "127.0.0.1:9477");
    assert_eq!(config.capture_limit, Size(64 << 10));
    assert_eq!(config.ring_buffer, Size(4 << 20));
    assert_eq!(config.retention, Duration::from_mins(15));
    assert_eq!(config.max_series, 50_000);
    assert!(config.ebpf && !config.bpf_stats);
}

#[test]
fn a_file_overrides_defaults_and_flags_override_the_file() {
    let (_folder, flag) = file(
        "# a comment\nweb.listen-address: [\":1\", \"[::1]:2\"]\nlog.format: json\nmetrics.retention: 1h 30m\n\
         tap.capture-limit: 2048\nebpf: false\n",
    );
    let effective = load(&[&flag, "--log.format", "text", "--web.listen-address=:3"]).unwrap();
    let config = &effective.config;
    assert_eq!(config.log_format, LogFormat::Text);
    assert_eq!(config.retention, Duration::from_mins(90));
    assert_eq!(config.capture_limit, Size(2048));
    assert!(!config.ebpf);
    let listen: Vec<String> = config.listen.iter().map(ToString::to_string).collect();
    assert_eq!(listen, [":3"]);
    let yaml = effective.to_yaml();
    assert!(
        yaml.contains("# Value from: flag --log.format\nlog.format: \"text\"\n"),
        "{yaml}"
    );
    assert!(
        yaml.contains("omnitap.yaml:4:20\nmetrics.retention: \"1h 30m\"\n"),
        "{yaml}"
    );
    assert!(
        yaml.contains("# Value from: default\nshutdown-timeout: \"4s\"\n"),
        "{yaml}"
    );
}

#[test]
fn flags_repeat() {
    let config = load(&["--web.listen-address=:1", "--web.listen-address=localhost:2"])
        .unwrap()
        .config;
    let listen: Vec<String> = config.listen.iter().map(ToString::to_string).collect();
    assert_eq!(listen, [":1", "localhost:2"]);
}

#[test]
fn an_agent_that_listens_nowhere_is_an_error() {
    let (_folder, flag) = file("web.listen-address: []\n");
    let error = load(&[&flag]).unwrap_err().to_string();
    assert!(
        error.ends_with("omnitap.yaml:1:21: web.listen-address: at least one address is needed"),
        "{error}"
    );
}

#[test]
fn a_file_without_end_is_refused() {
    let error = load(&["--config.file=/dev/zero"]).unwrap_err().to_string();
    assert!(error.contains("no configuration file"), "{error}");
}

#[test]
fn the_printed_form_is_a_file_that_gives_the_same() {
    let effective = load(&[
        "--web.listen-address=:1,[::1]:2",
        "--no-ebpf",
        "--tap.bpf-stats",
        "--tap.ring-buffer=300000",
        "--host.model-name=--port=8001=org/model \"x\"",
        "--host.diffusion-stage=--port=8001=1/0:1/1",
        "--pipeline.grace-time=1500ms",
    ])
    .unwrap();
    let yaml = effective.to_yaml();
    let (_folder, flag) = file(&yaml);
    assert_eq!(load(&[&flag]).unwrap().config, effective.config, "{yaml}");
}

#[rstest]
#[case::nothing("", true)]
#[case::comments_alone("# nothing\n", true)]
#[case::a_list("- a\n", false)]
#[case::no_yaml("a: [\n", false)]
fn a_file_is_a_map_or_empty(#[case] text: &str, #[case] accepted: bool) {
    let (_folder, flag) = file(text);
    assert_eq!(load(&[&flag]).is_ok(), accepted, "{:?}", load(&[&flag]).err());
}

#[rstest]
#[case::unknown(
    "log.level: info\nretention: 5m\n",
    "omnitap.yaml:2:1: unknown setting `retention` (did you mean `metrics.retention`?)"
)]
#[case::unknown_without_a_hint(
    "a: 1\n",
    "omnitap.yaml:1:1: unknown setting `a`; `omnitap config` prints them all"
)]
#[case::other_separators("web.listen_address: \":1\"\n", "(did you mean `web.listen-address`?)")]
#[case::not_a_duration("metrics.retention: soon\n", "omnitap.yaml:1:20: metrics.retention: `soon`: ")]
#[case::below_the_limit(
    "tap.capture-limit: 10\n",
    "omnitap.yaml:1:20: tap.capture-limit: 10 is not from 1KiB to 64KiB"
)]
#[case::above_the_limit(
    "tap.capture-limit: 1MiB\n",
    "tap.capture-limit: 1MiB is not from 1KiB to 64KiB"
)]
#[case::a_list_for_one_value("log.level: [info, warn]\n", "log.level: takes one value, not 2")]
#[case::not_a_boolean("ebpf: maybe\n", "omnitap.yaml:1:7: ebpf: `maybe`: ")]
#[case::a_map_for_a_value("log.level:\n  a: b\n", "omnitap.yaml: ")]
#[case::twice("log.level: info\nlog.level: warn\n", "omnitap.yaml: ")]
#[case::no_level(
    "log.level: loud\n",
    "log.level: `loud`: not one of error, warn, info, debug, trace"
)]
fn errors_in_a_file_have_their_place(#[case] text: &str, #[case] wanted: &str) {
    let (_folder, flag) = file(text);
    let error = error(&[&flag]);
    assert!(error.contains(wanted), "{error}");
}

#[rstest]
#[case::no_port("127.0.0.1", "not an address")]
#[case::port_out_of_range(":65536", "the port is not a number from 0 to 65535")]
#[case::bare_ipv6("::1:9477", "an IPv6 address needs brackets")]
#[case::open_bracket("[::1:9477", "a `]` is missing")]
#[case::no_ipv6("[a]:1", "no IPv6 address in the brackets")]
#[case::a_url("http://a:1", "an IPv6 address needs brackets")]
#[case::a_path("/tmp/a:1", "not a host name")]
fn addresses_that_are_none(#[case] address: &str, #[case] wanted: &str) {
    let error = error(&["--web.listen-address", address]);
    assert!(
        error.starts_with("flag --web.listen-address: web.listen-address: ") && error.contains(wanted),
        "{error}"
    );
}

#[rstest]
#[case::no_places("serve m")]
#[case::no_pattern("=1/0")]
#[case::no_replica("serve m=1")]
#[case::no_number("serve m=1/a")]
#[case::nothing_behind_a_colon("serve m=1/0:")]
fn places_of_diffusion_stages_that_are_none(#[case] text: &str) {
    let error = error(&["--host.diffusion-stage", text]);
    assert!(error.contains("not of the form PATTERN=STAGE/REPLICA"), "{error}");
}

#[rstest]
#[case::bytes("65536", 65_536, "64KiB")]
#[case::with_b("2049B", 2049, "2049")]
#[case::kib("64KiB", 65_536, "64KiB")]
#[case::with_space("1 MiB", 1 << 20, "1MiB")]
#[case::gib("1GiB", 1 << 30, "1GiB")]
#[case::zero("0", 0, "0")]
fn sizes_have_units(#[case] text: &str, #[case] bytes: u32, #[case] shown: &str) {
    let size: Size = text.parse().unwrap();
    assert_eq!(size, Size(bytes));
    assert_eq!(size.to_string(), shown);
}

#[rstest]
#[case("64KB")]
#[case("-1")]
#[case("4GiB")]
#[case("1.5MiB")]
fn sizes_that_are_none(#[case] text: &str) {
    assert!(text.parse::<Size>().is_err());
}

#[test]
fn the_environment_stands_between_file_and_flags() {
    let (_folder, flag) = file("log.level: error\nlog.format: json\nebpf: true\n");
    // A process of its own: the environment of this one belongs to all tests.
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_omnitap"))
        .args(["config", &flag, "--log.level=debug"])
        .env("OMNITAP_LOG_LEVEL", "trace")
        .env("OMNITAP_EBPF", "0")
        .env("OMNITAP_WEB_LISTEN_ADDRESS", ":1,:2")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("flag --log.level\nlog.level: \"debug\""), "{text}");
    assert!(
        text.contains("environment variable OMNITAP_EBPF\nebpf: false"),
        "{text}"
    );
    assert!(text.contains("web.listen-address: [\":1\", \":2\"]"), "{text}");
    assert!(text.contains("log.format: \"json\""), "{text}");
}

#[test]
fn a_flag_wins_over_the_variable_that_contradicts_it() {
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_omnitap"))
        .args(["config", "--no-ebpf"])
        .env("OMNITAP_EBPF", "true")
        .env("OMNITAP_METRICS_RETENTION", "")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("flag --no-ebpf\nebpf: false"), "{text}");
    assert!(text.contains("metrics.retention: \"15m\""), "{text}");
}

#[test]
fn a_missing_file_is_named() {
    let error = error(&["--config.file=/nowhere/omnitap.yaml"]);
    assert!(
        error.starts_with("cannot read /nowhere/omnitap.yaml: "),
        "{error}"
    );
}

#[test]
fn a_wrong_command_line_is_a_usage_error() {
    let status = Cli::read(["omnitap", "run", "--no-such-flag"]).unwrap_err();
    assert_eq!(format!("{status:?}"), format!("{:?}", ExitCode::from(64)));
    let status = Cli::read(["omnitap", "--help"]).unwrap_err();
    assert_eq!(format!("{status:?}"), format!("{:?}", ExitCode::SUCCESS));
}

#[test]
fn a_switch_and_its_opposite_exclude_each_other() {
    assert!(Cli::try_parse_from(["omnitap", "run", "--ebpf", "--no-ebpf"]).is_err());
}

#[test]
fn the_page_in_docs_is_up_to_date() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/configuration.md");
    let page = config::markdown();
    if std::env::var_os("OMNITAP_WRITE_DOCS").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    assert!(
        std::fs::read_to_string(&path).unwrap_or_default() == page,
        "docs/configuration.md differs from the code: run `OMNITAP_WRITE_DOCS=1 cargo test -p omnitap up_to_date`"
    );
}
