//! What the benchmarks print: about 10,000 sample lines of all families of LLM stages.

use std::time::Duration;

use omnitap::{
    host::identity::PipelineId,
    metrics::{
        catalogue::{Family, Kind},
        registry::{Limits, Registry},
    },
    pipeline::sink::{ExtraId, Scope, Sink},
};

/// Sample lines to reach.
pub(crate) const LINES: usize = 10_000;

/// A registry with [`LINES`] sample lines of pipelines, or a few more.
pub(crate) fn registry() -> Registry {
    let mut registry = Registry::new(Limits {
        max_series: 1_000_000,
        retention: Duration::from_mins(15),
    });
    let families: Vec<Family> = Family::ALL
        .iter()
        .copied()
        .filter(|f| !f.row().is_own() && f.row().extra_labels().next().is_none())
        .collect();
    let mut lines = 0;
    for number in 0.. {
        let scope = registry.scope(&Scope {
            pipeline: PipelineId(1),
            model: "Qwen/Qwen3-Omni-30B-A3B-Instruct".into(),
            served_model: "Qwen/Qwen3-Omni-30B-A3B-Instruct".into(),
            stage: Some(number / 8),
            replica: Some(number % 8),
            max_model_len: Some(65_536),
        });
        for family in &families {
            if lines >= LINES {
                return registry;
            }
            // Families of whole pipelines have one child however many replicas there are.
            let row = family.row();
            if number > 0 && !row.labels.contains(&"replica") {
                continue;
            }
            match row.kind {
                Kind::Counter => registry.add(*family, scope, ExtraId::NONE, f64::from(number) * 1237.0),
                Kind::Gauge(_) => registry.set(*family, scope, ExtraId::NONE, 0.375),
                Kind::Histogram(buckets) => {
                    for (value, times) in [(0.0213, 1_234), (0.517, 87_654), (12.7, 5)] {
                        registry.observe(*family, scope, ExtraId::NONE, value, times);
                    }
                    lines += buckets.bounds(Some(65_536)).len() + 2;
                }
            }
            lines += 1;
        }
    }
    registry
}
