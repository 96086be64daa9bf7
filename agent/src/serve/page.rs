//! The landing page.

use std::fmt::Write as _;

use super::status::{Status, TapState};
use crate::host::identity::{Flavor, Pipeline};

/// HTML for people who open the address in a browser.
pub(super) fn landing(status: &Status) -> String {
    let pipelines = status.pipelines();
    let tap = match status.tap() {
        TapState::Starting => "is being loaded".to_owned(),
        TapState::Up => "captures frames".to_owned(),
        TapState::Off => "is switched off".to_owned(),
        TapState::Failed(reason) => format!("does not work: {}", escape(&reason)),
    };
    let ready = if status.not_ready().is_none() {
        "ready"
    } else {
        "not ready"
    };
    let mut html = format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>omnitap</title>\
         <style>body{{font-family:sans-serif;margin:2em}}td,th{{text-align:left;padding:.2em 1em .2em 0}}</style>\
         </head><body><h1>omnitap {version}</h1>\
         <p>Watches the vLLM-Omni and vLLM pipelines of this host from outside and serves their Prometheus \
         families.</p>\
         <ul><li><a href=\"/metrics\">/metrics</a>: the families</li>\
         <li><a href=\"/healthz\">/healthz</a>: the process answers</li>\
         <li><a href=\"/readyz\">/readyz</a>: {ready}</li></ul>\
         <p>The tap {tap}.</p><h2>Pipelines found: {count}</h2>",
        version = env!("CARGO_PKG_VERSION"),
        count = pipelines.len(),
    );
    if !pipelines.is_empty() {
        html.push_str(
            "<table><tr><th>pipeline</th><th>software</th><th>model</th><th>served as</th><th>root process</th>\
             <th>own metrics</th></tr>",
        );
        for pipeline in &pipelines {
            let _ = write!(
                html,
                "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
                pipeline.id.0,
                escape(&software(pipeline)),
                known(pipeline.model.as_deref()),
                known(pipeline.served_model.as_deref()),
                pipeline.root.pid,
                escape(status.engine(pipeline.id).as_deref().unwrap_or("not read")),
            );
        }
        html.push_str("</table>");
    }
    html.push_str("</body></html>\n");
    html
}

fn software(pipeline: &Pipeline) -> String {
    let versions = &pipeline.versions;
    let with =
        |name: &str, version: Option<&str>| format!("{name} {}", version.unwrap_or("(version unknown)"));
    match pipeline.flavor {
        Flavor::Vllm => with("vLLM", versions.vllm.as_deref()),
        Flavor::Omni => with("vLLM-Omni", versions.omni.as_deref()),
    }
}

fn known(value: Option<&str>) -> String {
    value.map_or_else(|| "<i>unknown</i>".to_owned(), escape)
}

/// Names come from other containers.
fn escape(text: &str) -> String {
    let mut html = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => html.push_str("&amp;"),
            '<' => html.push_str("&lt;"),
            '>' => html.push_str("&gt;"),
            '"' => html.push_str("&quot;"),
            '\'' => html.push_str("&#39;"),
            c => html.push(c),
        }
    }
    html
}
