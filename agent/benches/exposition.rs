//! What an observation and the rendering of 10,000 sample lines cost.
//!
//! With `OMNITAP_BENCH_TEXT=FILE` it only writes the text to a file, for `generate_latest.py` to print the same.

mod content;

use std::{hint::black_box, io::Write as _};

use criterion::Criterion;
use flate2::{Compression, write::GzEncoder};
use omnitap::{
    host::identity::PipelineId,
    metrics::{catalogue::Family, text::Format},
    pipeline::sink::{ExtraId, Scope, Sink},
};

fn rendering(criterion: &mut Criterion) {
    let registry = content::registry();
    let exposition = registry.exposition();
    let mut out = Vec::new();
    for (name, format) in [("text", Format::Text), ("openmetrics", Format::OpenMetrics)] {
        criterion.bench_function(&format!("exposition/{name}/10000"), |b| {
            b.iter(|| {
                out.clear();
                exposition.render(&mut out, format);
                black_box(out.len())
            });
        });
    }
    criterion.bench_function("exposition/gzip/10000", |b| {
        b.iter(|| {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
            let _ = encoder.write_all(&out);
            black_box(encoder.finish().map_or(0, |z| z.len()))
        });
    });
}

fn observation(criterion: &mut Criterion) {
    let mut registry = content::registry();
    let scope = registry.scope(&Scope {
        pipeline: PipelineId(2),
        model: "a".into(),
        served_model: "a".into(),
        stage: Some(0),
        replica: Some(0),
        max_model_len: None,
    });
    let none = ExtraId::NONE;
    criterion.bench_function("registry/add", |b| {
        b.iter(|| registry.add(Family::VllmGenerationTokensTotal, black_box(scope), none, 1.0));
    });
    criterion.bench_function("registry/observe", |b| {
        b.iter(|| {
            registry.observe(
                Family::VllmInterTokenLatencySeconds,
                black_box(scope),
                none,
                0.021,
                1,
            );
        });
    });
    criterion.bench_function("registry/set", |b| {
        b.iter(|| registry.set(Family::VllmNumRequestsRunning, black_box(scope), none, 3.0));
    });
}

fn main() -> std::io::Result<()> {
    if let Some(path) = std::env::var_os("OMNITAP_BENCH_TEXT") {
        let mut out = Vec::new();
        content::registry()
            .exposition()
            .render_pipelines(&mut out, Format::Text);
        return std::fs::write(path, out);
    }
    let mut criterion = Criterion::default().configure_from_args();
    rendering(&mut criterion);
    observation(&mut criterion);
    criterion.final_summary();
    Ok(())
}
