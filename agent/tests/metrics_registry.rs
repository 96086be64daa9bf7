//! Series' life: sharing, retirement, retention, the cap, and what may become a sample.

use std::time::{Duration, Instant};

use omnitap::{
    host::identity::PipelineId,
    metrics::{
        catalogue::Family,
        registry::{Limits, Registry},
        text::Format,
    },
    pipeline::sink::{ExtraId, Scope, ScopeId, Sink},
};
use rstest::rstest;

const RETENTION: Duration = Duration::from_mins(15);
const NONE: ExtraId = ExtraId::NONE;

fn registry() -> Registry {
    Registry::new(Limits {
        max_series: 10_000,
        retention: RETENTION,
    })
}

fn scope(pipeline: u32, stage: u32, replica: u32) -> Scope {
    Scope {
        pipeline: PipelineId(pipeline),
        model: "org/model".into(),
        served_model: "served".into(),
        stage: Some(stage),
        replica: Some(replica),
        max_model_len: None,
    }
}

fn text(registry: &Registry) -> String {
    let mut out = Vec::new();
    registry.exposition().render(&mut out, Format::Text);
    String::from_utf8_lossy(&out).into_owned()
}

/// Sample lines of `name`, without the name.
fn samples(registry: &Registry, name: &str) -> Vec<String> {
    text(registry)
        .lines()
        .filter(|l| l.starts_with(&format!("{name}{{")) || l.starts_with(&format!("{name} ")))
        .map(|l| l[name.len()..].to_owned())
        .collect()
}

#[test]
fn a_family_without_children_has_help_and_type() {
    let text = text(&registry());
    for family in Family::ALL {
        assert!(text.contains(&format!("# HELP {} ", family.name())));
        let kind = family.row().kind.as_str();
        assert!(text.contains(&format!("# TYPE {} {kind}\n", family.name())));
    }
    assert!(!text.contains("\nvllm"));
}

#[test]
fn adding_nothing_creates_the_child() {
    let mut registry = registry();
    let scope = registry.scope(&scope(1, 0, 0));
    registry.add(Family::VllmGenerationTokensTotal, scope, NONE, 0.0);
    assert_eq!(
        samples(&registry, "vllm:generation_tokens_total"),
        [r#"{model_name="served",replica="0",stage="0"} 0.0"#]
    );
}

#[test]
fn model_name_is_the_one_of_the_prefix() {
    let mut registry = registry();
    let scope = registry.scope(&scope(1, 0, 0));
    registry.add(Family::OmniPromptTokensTotal, scope, NONE, 7.0);
    assert_eq!(
        samples(&registry, "vllm_omni:prompt_tokens_total"),
        [r#"{model_name="org/model"} 7.0"#]
    );
}

#[test]
fn histograms_cumulate_and_count_repeated_values() {
    let mut registry = registry();
    let scope = registry.scope(&scope(1, 0, 0));
    for (value, times) in [(0.01, 1), (0.02, 1_000_000_000_000), (1000.0, 1)] {
        registry.observe(Family::VllmInterTokenLatencySeconds, scope, NONE, value, times);
    }
    let buckets = samples(&registry, "vllm:inter_token_latency_seconds_bucket");
    assert_eq!(buckets.len(), 20);
    let ends: Vec<&str> = buckets.iter().filter_map(|b| b.rsplit(' ').next()).collect();
    assert_eq!(ends[0], "1.0");
    assert_eq!(ends[1], "1.000000000001e+12");
    assert_eq!(ends[18], "1.000000000001e+12");
    assert_eq!(ends[19], "1.000000000002e+12");
    assert!(buckets[19].starts_with(r#"{le="+Inf",model_name="served""#));
    assert_eq!(
        samples(&registry, "vllm:inter_token_latency_seconds_count"),
        [r#"{model_name="served",replica="0",stage="0"} 1.000000000002e+12"#]
    );
}

#[test]
fn le_stands_where_the_alphabet_puts_it() {
    let mut registry = registry();
    let scope = registry.scope(&scope(1, 0, 0));
    let edge = registry.extra(&["0", "1", "2", "3"]);
    registry.observe(Family::OmniTransferTxS, scope, edge, 0.5, 1);
    assert_eq!(
        samples(&registry, "vllm_omni:transfer_tx_s_bucket")[0],
        r#"{from_replica="1",from_stage="0",le="0.001",model_name="org/model",to_replica="3",to_stage="2"} 0.0"#
    );
}

#[test]
fn scopes_with_equal_labels_share_counters_and_add_up_gauges() {
    let mut registry = registry();
    let (one, two) = (registry.scope(&scope(1, 0, 0)), registry.scope(&scope(2, 0, 0)));
    for s in [one, two] {
        registry.add(Family::VllmGenerationTokensTotal, s, NONE, 5.0);
        registry.set(Family::VllmNumRequestsRunning, s, NONE, 4.0);
    }
    registry.set(Family::VllmNumRequestsRunning, two, NONE, 3.0);
    registry.set(Family::VllmKvCacheUsagePerc, one, NONE, 0.75);
    registry.set(Family::VllmKvCacheUsagePerc, two, NONE, 0.25);
    let labels = r#"{model_name="served",replica="0",stage="0"}"#;
    let value = |r: &Registry, name| samples(r, name).join(" ").replace(labels, "");
    assert_eq!(value(&registry, "vllm:generation_tokens_total"), " 10.0");
    assert_eq!(value(&registry, "vllm:num_requests_running"), " 7.0");
    assert_eq!(value(&registry, "vllm:kv_cache_usage_perc"), " 0.75");

    registry.retire(one);
    assert_eq!(value(&registry, "vllm:generation_tokens_total"), " 10.0");
    assert_eq!(value(&registry, "vllm:num_requests_running"), " 3.0");
    assert_eq!(value(&registry, "vllm:kv_cache_usage_perc"), " 0.25");
}

#[test]
fn a_stage_gauge_adds_up_its_replicas() {
    let mut registry = registry();
    for replica in 0..3 {
        let scope = registry.scope(&scope(1, 1, replica));
        registry.set(Family::OmniStageWaitingRequests, scope, NONE, 2.0);
    }
    assert_eq!(
        samples(&registry, "vllm_omni:stage_waiting_requests"),
        [r#"{model_name="org/model",stage="1"} 6.0"#]
    );
}

#[test]
fn an_info_family_keeps_the_newest_child_of_each_scope() {
    let mut registry = registry();
    let (one, two) = (registry.scope(&scope(1, 0, 0)), registry.scope(&scope(1, 0, 1)));
    let a = registry.extra(&["4", "", "a"]);
    let b = registry.extra(&["4", "a", "b"]);
    registry.set(Family::VllmLoraRequestsInfo, one, a, 1.0);
    registry.set(Family::VllmLoraRequestsInfo, two, a, 2.0);
    registry.set(Family::VllmLoraRequestsInfo, one, b, 3.0);
    let name = "vllm:lora_requests_info";
    let of_a = r#"{max_lora="4",running_lora_adapters="a",waiting_lora_adapters=""} 2.0"#;
    let of_b = r#"{max_lora="4",running_lora_adapters="b",waiting_lora_adapters="a"} 3.0"#;
    assert_eq!(samples(&registry, name), [of_a, of_b]);
    registry.set(Family::VllmLoraRequestsInfo, two, b, 3.0);
    assert_eq!(samples(&registry, name), [of_b]);
}

#[test]
fn gauges_go_at_once_and_counters_after_retention() {
    let mut registry = registry();
    let start = Instant::now();
    let id = registry.scope(&scope(1, 0, 0));
    registry.set(Family::VllmNumRequestsRunning, id, NONE, 4.0);
    registry.add(Family::VllmGenerationTokensTotal, id, NONE, 5.0);
    registry.retire(id);
    assert_eq!(samples(&registry, "vllm:num_requests_running").len(), 0);

    // The process is gone, its pipeline lives: nothing expires.
    registry.expire(start + 10 * RETENTION);
    assert_eq!(samples(&registry, "vllm:generation_tokens_total").len(), 1);

    registry.pipeline_ended(PipelineId(1), start);
    registry.expire(start + RETENTION.checked_sub(Duration::from_secs(1)).unwrap());
    assert_eq!(samples(&registry, "vllm:generation_tokens_total").len(), 1);
    registry.expire(start + RETENTION);
    assert_eq!(samples(&registry, "vllm:generation_tokens_total").len(), 0);
}

#[test]
fn the_end_of_a_pipeline_takes_gauges_that_were_not_retired() {
    let mut registry = registry();
    let id = registry.scope(&scope(1, 0, 0));
    registry.set(Family::OmniNumRequestsRunning, id, NONE, 4.0);
    registry.pipeline_ended(PipelineId(1), Instant::now());
    assert_eq!(samples(&registry, "vllm_omni:num_requests_running").len(), 0);
}

#[test]
fn a_new_pipeline_with_the_same_labels_takes_over() {
    let mut registry = registry();
    let start = Instant::now();
    let before = samples(&registry, "omnitap_series");
    let old = registry.scope(&scope(1, 0, 0));
    registry.add(Family::VllmGenerationTokensTotal, old, NONE, 5.0);
    registry.observe(Family::VllmTimeToFirstTokenSeconds, old, NONE, 0.5, 1);
    registry.retire(old);
    registry.pipeline_ended(PipelineId(1), start);

    let new = registry.scope(&scope(2, 0, 0));
    registry.add(Family::VllmGenerationTokensTotal, new, NONE, 1.0);
    registry.expire(start + RETENTION);
    // The counter went on without a reset; the histogram that nobody took over is gone.
    assert_eq!(
        samples(&registry, "vllm:generation_tokens_total"),
        [r#"{model_name="served",replica="0",stage="0"} 6.0"#]
    );
    assert_eq!(
        samples(&registry, "vllm:time_to_first_token_seconds_count").len(),
        0
    );

    registry.pipeline_ended(PipelineId(2), start + RETENTION);
    registry.expire(start + 2 * RETENTION);
    assert_eq!(samples(&registry, "vllm:generation_tokens_total").len(), 0);
    assert_eq!(samples(&registry, "omnitap_series"), before);
}

#[test]
fn a_retired_scope_gives_no_sample_and_a_new_id() {
    let mut registry = registry();
    let old = registry.scope(&scope(1, 0, 0));
    assert_eq!(registry.scope(&scope(1, 0, 0)), old);
    registry.retire(old);
    registry.add(Family::VllmGenerationTokensTotal, old, NONE, 5.0);
    assert_eq!(samples(&registry, "vllm:generation_tokens_total").len(), 0);
    assert_eq!(
        samples(&registry, "omnitap_samples_skipped_total"),
        [r#"{family="vllm:generation_tokens_total",reason="unknown_scope"} 1.0"#]
    );
    assert_ne!(registry.scope(&scope(1, 0, 0)), old);
}

#[rstest]
#[case::no_stage(Scope { stage: None, ..scope(1, 0, 0) }, "no_stage")]
#[case::no_replica(Scope { replica: None, ..scope(1, 0, 0) }, "no_replica")]
#[case::no_model(Scope { served_model: String::new(), ..scope(1, 0, 0) }, "no_model")]
fn what_cannot_be_attributed_is_skipped_each_time(#[case] scope: Scope, #[case] reason: &str) {
    let mut registry = registry();
    let id = registry.scope(&scope);
    for _ in 0..3 {
        registry.add(Family::VllmGenerationTokensTotal, id, NONE, 5.0);
    }
    assert_eq!(samples(&registry, "vllm:generation_tokens_total").len(), 0);
    assert_eq!(
        samples(&registry, "omnitap_samples_skipped_total"),
        [format!(
            r#"{{family="vllm:generation_tokens_total",reason="{reason}"}} 3.0"#
        )]
    );
}

#[rstest]
#[case::negative(-1.0, "negative")]
#[case::nan(f64::NAN, "not_finite")]
#[case::infinite(f64::INFINITY, "not_finite")]
fn counters_and_histograms_take_no_poison(#[case] value: f64, #[case] reason: &str) {
    let mut registry = registry();
    let id = registry.scope(&scope(1, 0, 0));
    registry.add(Family::VllmGenerationTokensTotal, id, NONE, value);
    registry.observe(Family::VllmTimeToFirstTokenSeconds, id, NONE, value, 1);
    assert_eq!(samples(&registry, "vllm:generation_tokens_total").len(), 0);
    assert_eq!(
        samples(&registry, "omnitap_samples_skipped_total"),
        ["vllm:generation_tokens_total", "vllm:time_to_first_token_seconds"]
            .map(|f| format!(r#"{{family="{f}",reason="{reason}"}} 1.0"#))
    );
}

#[test]
fn the_cap_refuses_new_children_and_room_is_used_again() {
    let mut registry = Registry::new(Limits {
        max_series: 4,
        retention: RETENTION,
    });
    let start = Instant::now();
    let ids: Vec<ScopeId> = (0..6)
        .map(|i| registry.scope(&scope(u32::from(i > 0), 0, i)))
        .collect();
    let write = |registry: &mut Registry| {
        for id in &ids {
            registry.add(Family::VllmGenerationTokensTotal, *id, NONE, 1.0);
        }
    };
    write(&mut registry);
    write(&mut registry);
    // A histogram needs more than one line.
    registry.observe(Family::VllmTimeToFirstTokenSeconds, ids[0], NONE, 1.0, 1);
    assert_eq!(samples(&registry, "vllm:generation_tokens_total").len(), 4);
    assert_eq!(samples(&registry, "omnitap_series_refused_total"), [" 3.0"]);
    assert_eq!(samples(&registry, "omnitap_series"), [" 7.0"]);

    registry.pipeline_ended(PipelineId(0), start);
    registry.expire(start + RETENTION);
    write(&mut registry);
    let lines = samples(&registry, "vllm:generation_tokens_total");
    assert_eq!(lines.len(), 4);
    assert!(lines[3].contains(r#"replica="4""#), "{lines:?}");
}

#[test]
fn label_values_are_cut_and_escaped() {
    let mut registry = registry();
    let model = format!("a\"b\\c\nd\u{1b}[1m{}", "é".repeat(200));
    let id = registry.scope(&Scope {
        model,
        ..scope(1, 0, 0)
    });
    registry.add(Family::OmniPromptTokensTotal, id, NONE, 1.0);
    let line = samples(&registry, "vllm_omni:prompt_tokens_total").concat();
    assert!(
        line.starts_with("{model_name=\"a\\\"b\\\\c\\nd\u{fffd}[1mé"),
        "{line}"
    );
    // 11 bytes stand before the first of the two-byte letters: the 256th byte would split one.
    assert_eq!(line.matches('é').count(), (256 - 11) / 2, "{line}");
}

#[test]
fn a_scrape_counts_the_lines_that_it_prints() {
    let mut registry = registry();
    let id = registry.scope(&scope(1, 0, 0));
    registry.observe(Family::VllmRequestPromptTokens, id, NONE, 12.0, 1);
    registry.add(Family::VllmGenerationTokensTotal, id, NONE, 1.0);
    let text = text(&registry);
    let lines = text.lines().filter(|l| !l.starts_with('#')).count();
    assert!(text.contains(&format!("\nomnitap_series {lines}.0\n")), "{text}");
}

#[test]
fn own_families_are_written_from_any_thread() {
    let registry = registry();
    let own = registry.own();
    std::thread::scope(|threads| {
        for _ in 0..4 {
            threads.spawn(|| {
                let frames = own
                    .counter(Family::OmnitapFramesTotal, &["outputs", "ok"])
                    .unwrap();
                for _ in 0..1000 {
                    frames.add(1.0);
                    own.add(Family::OmnitapEventsLostTotal, &["ring_full"], 2.0);
                    own.observe(Family::OmnitapScrapeDurationSeconds, &[], 0.5);
                }
            });
        }
    });
    assert_eq!(
        samples(&registry, "omnitap_frames_total"),
        [r#"{result="ok",type="outputs"} 4000.0"#]
    );
    assert_eq!(
        samples(&registry, "omnitap_events_lost_total"),
        [r#"{kind="ring_full"} 8000.0"#]
    );
    assert_eq!(
        samples(&registry, "omnitap_scrape_duration_seconds_sum"),
        [" 2000.0"]
    );
}

#[test]
fn totals_kept_elsewhere_never_go_down() {
    let registry = registry();
    let own = registry.own();
    for total in [5.0, 9.0, 2.0] {
        own.set_total(Family::OmnitapBpfRunsTotal, &["zmq_msg_send"], total);
    }
    assert_eq!(
        samples(&registry, "omnitap_bpf_runs_total"),
        [r#"{program="zmq_msg_send"} 9.0"#]
    );
}

#[test]
fn what_the_agent_says_of_a_pipeline_goes_with_it() {
    let mut registry = registry();
    let own = registry.own();
    for pipeline in ["1", "11"] {
        own.set(Family::OmnitapSourceState, &[pipeline, "vllm:x", "wire"], 1.0);
    }
    registry.pipeline_ended(PipelineId(1), Instant::now());
    assert_eq!(
        samples(&registry, "omnitap_source_state"),
        [r#"{family="vllm:x",pipeline="11",source="wire"} 1.0"#]
    );
}

#[test]
fn the_agent_knows_its_own_cost() {
    let registry = registry();
    registry.own().sample_process();
    let memory = samples(&registry, "omnitap_resident_memory_bytes").concat();
    assert!(
        memory.trim().parse::<f64>().is_ok_and(|bytes| bytes > 1e6),
        "{memory}"
    );
    assert_eq!(samples(&registry, "omnitap_cpu_seconds_total").len(), 1);
}
