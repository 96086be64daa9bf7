//! Draws the screen: lines of text, made for 80 columns.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    time::{Duration, UNIX_EPOCH},
};

use ratatui::{
    Frame,
    layout::{Constraint, Layout},
    style::{Color, Modifier, Style, Stylize as _},
    text::{Line, Span},
    widgets::Paragraph,
};

use super::{
    app::{App, View},
    document::{Document, Looks, Pipeline, Process},
};
use crate::pipeline::records::{OpenRequest, OpenState, Outcome, RequestRecord};

/// What was not seen.
const MISSING: &str = "-";

/// Columns of a line.
const WIDTH: usize = 80;

/// Columns of a model's name.
const MODEL: usize = 40;

/// Columns of a request's id.
const ID: usize = 30;

/// Draws the screen, and keeps the first line inside what there is.
pub fn draw(app: &mut App, frame: &mut Frame<'_>) {
    let [top, tabs, body, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Fill(1),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    frame.render_widget(head(app), top);
    frame.render_widget(Line::from(views(app.view)), tabs);
    frame.render_widget(Line::from("q ends   Tab next view   arrows scroll").dim(), foot);
    let lines = lines(app);
    let rows = usize::from(body.height);
    app.scroll = app.scroll.min(lines.len().saturating_sub(rows));
    let shown: Vec<Line<'_>> = lines.into_iter().skip(app.scroll).take(rows).collect();
    frame.render_widget(Paragraph::new(shown), body);
}

fn head(app: &App) -> Line<'static> {
    let mut spans = vec![
        Span::from("omnitap top").bold(),
        format!("  {}", app.address).into(),
    ];
    match (app.looks.last(), &app.failure) {
        (_, Some(_)) => spans.push(Span::from("  no answer").fg(Color::Red)),
        (None, None) => spans.push(Span::from("  asking ...")),
        (Some(look), None) => {
            let (ready, color) = match look.not_ready {
                None => ("ready", Color::Green),
                Some(_) => ("not ready", Color::Yellow),
            };
            spans.push(format!("  {}  ", look.version).into());
            spans.push(Span::from(ready).fg(color));
            spans.push(format!(", tap {}  {} UTC", look.tap, clock(look.time_ms)).into());
        }
    }
    Line::from(spans)
}

fn clock(time_ms: u64) -> String {
    UNIX_EPOCH
        .checked_add(Duration::from_millis(time_ms))
        .filter(|_| time_ms < 253_402_300_800_000)
        .map(|time| humantime::format_rfc3339_seconds(time).to_string())
        .and_then(|text| text.get(11..19).map(str::to_owned))
        .unwrap_or_default()
}

fn views(shown: View) -> Vec<Span<'static>> {
    let mut spans = Vec::new();
    for view in View::ALL {
        let title = format!(" {} ", view.title());
        spans.push(if view == shown {
            Span::from(title).reversed()
        } else {
            title.into()
        });
        spans.push(" ".into());
    }
    spans
}

fn lines(app: &App) -> Vec<Line<'static>> {
    let mut lines = Vec::new();
    if let Some(reason) = &app.failure {
        lines.push(Line::default());
        fold(reason, " ", "", Style::new().fg(Color::Red), &mut lines);
        lines.push(Line::default());
        lines.push("It is asked again every second.".into());
    } else if let Some(look) = app.looks.last() {
        match (app.view, &app.no_requests) {
            (View::Pipelines, _) => pipelines(look, &app.looks, &mut lines),
            (View::Requests, None) => requests(app, &mut lines),
            (View::Requests, Some(reason)) => {
                lines.push(Line::default());
                fold(reason, " ", "", Style::new(), &mut lines);
            }
            (View::Agent, _) => agent(look, &app.looks, &mut lines),
        }
    }
    lines
}

// ---- pipelines

fn pipelines(look: &Document, looks: &Looks, lines: &mut Vec<Line<'static>>) {
    if let Some(first) = look.warnings.first() {
        let count = look.warnings.len();
        let text = format!("! {count} {}: {}", plural(count, "warning"), first.text);
        fold(&text, " ", "", Style::new().fg(Color::Yellow), lines);
        lines.push(Line::from("  The Agent view (Tab) says what to do.").dim());
    }
    if look.pipelines.is_empty() {
        lines.push(Line::default());
        let (what, how) = match &look.not_ready {
            Some(reason) => (
                "Looking for pipelines",
                format!("The agent is not ready: {reason}."),
            ),
            None => (
                "No pipeline found on this host",
                "Start one, such as `vllm serve MODEL --omni`.".to_owned(),
            ),
        };
        lines.push(Line::from(what).bold());
        lines.push(how.into());
        lines.push("One is running? Then it may be in another PID namespace:".into());
        lines.push("`omnitap check` on this host says what is missing.".into());
    }
    for pipeline in &look.pipelines {
        lines.push(Line::default());
        one_pipeline(pipeline, look, looks, lines);
    }
}

fn one_pipeline(pipeline: &Pipeline, look: &Document, looks: &Looks, lines: &mut Vec<Line<'static>>) {
    let model = pipeline.model.as_deref().or(pipeline.served.as_deref());
    let served = pipeline
        .served
        .as_deref()
        .or(pipeline.model.as_deref())
        .unwrap_or_default();
    lines.push(Line::from(vec![
        Span::from(tail(model.unwrap_or("model unknown"))).bold(),
        format!("  {}, process {}", pipeline.software, pipeline.pid).into(),
    ]));
    let model = model.unwrap_or_default();
    let (omni, plain) = ([("model_name", model)], [("model_name", served)]);
    let pick = |of_omni: &'static str, of_vllm: &'static str| {
        if pipeline.omni {
            (of_omni, omni)
        } else {
            (of_vllm, plain)
        }
    };
    let now = |(family, labels): (&str, [(&str, &str); 1])| whole(look.sum(family, &labels));
    let (done, done_labels) = pick("vllm_omni:requests_success_total", "vllm:request_success_total");
    let (e2e, e2e_labels) = pick(
        "vllm_omni:e2e_request_latency_s",
        "vllm:e2e_request_latency_seconds",
    );
    let mut figures = format!(
        "running {}  waiting {}  requests/s {}  tokens/s {}  end to end {}",
        now(pick(
            "vllm_omni:num_requests_running",
            "vllm:num_requests_running"
        )),
        now(pick(
            "vllm_omni:num_requests_waiting",
            "vllm:num_requests_waiting"
        )),
        short(looks.rate(done, &done_labels)),
        short(looks.rate("vllm:generation_tokens_total", &plain)),
        seconds(looks.recent(e2e, &e2e_labels).mean),
    );
    for (family, name) in [
        ("vllm_omni:audio_rtf", "RTF"),
        ("vllm_omni:audio_ttfp_s", "first audio"),
    ] {
        let mean = looks.recent(family, &omni).mean;
        if mean.is_some() {
            let value = if name == "RTF" { short(mean) } else { seconds(mean) };
            let _ = write!(figures, "  {name} {value}");
        }
    }
    if let Some(failed) = look
        .sum("vllm_omni:requests_failed_total", &omni)
        .filter(|failed| *failed > 0.0)
    {
        let _ = write!(figures, "  failed {}", whole(Some(failed)));
    }
    fold(&figures, "  ", "  ", Style::new(), lines);
    stages(pipeline, (model, served), look, looks, lines);
    edges(model, look, looks, lines);
}

/// A name that leaves room beside it: of a path the end tells more than the beginning.
fn tail(name: &str) -> String {
    match name.chars().count().checked_sub(MODEL) {
        None | Some(0) => name.to_owned(),
        Some(over) => format!("..{}", name.chars().skip(over + 2).collect::<String>()),
    }
}

/// A text in as many lines as it needs, broken between parts, which are set off by `between`; a part that is longer
/// than a line is broken as well.
fn fold(text: &str, between: &str, indent: &str, style: Style, lines: &mut Vec<Line<'static>>) {
    let room = WIDTH - indent.len();
    let mut line = String::new();
    let mut end = |line: &mut String| {
        lines.push(Line::styled(format!("{indent}{line}"), style));
        line.clear();
    };
    for part in text.split(between) {
        let used = line.chars().count();
        if used > 0 {
            if used + between.len() + part.chars().count() > room {
                end(&mut line);
            } else {
                line += between;
            }
        }
        for c in part.chars() {
            if line.chars().count() >= room {
                end(&mut line);
            }
            line.push(c);
        }
    }
    end(&mut line);
}

fn stages(
    pipeline: &Pipeline,
    (model, served): (&str, &str),
    look: &Document,
    looks: &Looks,
    lines: &mut Vec<Line<'static>>,
) {
    let mut members: Vec<&Process> = pipeline
        .processes
        .iter()
        .filter(|process| process.role.ends_with("stage"))
        .collect();
    members.sort_by_key(|member| (member.stage.unwrap_or(u32::MAX), member.replica, member.pid));
    if members.is_empty() {
        return;
    }
    let head = format!(
        "  {:<6}{:<10}{:>8}{:>8}{:>8}{:>9}{:>6}{:>10}  state",
        "stage", "type", "process", "running", "waiting", "tokens/s", "KV", "GPU mem"
    );
    lines.push(Line::from(head).dim());
    for member in members {
        let (stage, replica) = (number(member.stage), number(member.replica));
        let labels = |model| [("model_name", model), ("stage", &*stage), ("replica", &*replica)];
        let (of_vllm, of_model) = (labels(served), labels(model));
        let kind = if member.role == "stage" {
            "llm"
        } else {
            "diffusion"
        };
        let row = format!(
            "  {:<6}{kind:<10}{:>8}{:>8}{:>8}{:>9}{:>6}{:>10}  ",
            place(member.stage, member.replica),
            member.pid,
            whole(look.sum("vllm:num_requests_running", &of_vllm)),
            whole(look.sum("vllm:num_requests_waiting", &of_vllm)),
            short(looks.rate("vllm:generation_tokens_total", &of_vllm)),
            percent(look.sum("vllm:kv_cache_usage_perc", &of_vllm)),
            bytes(look.sum("omnitap_gpu_stage_memory_used_bytes", &of_model)),
        );
        let (how, color) = state(member);
        lines.push(Line::from(vec![row.into(), Span::from(how).fg(color)]));
    }
}

fn state(process: &Process) -> (&'static str, Color) {
    let is_probed = !process.probes.is_empty() && process.probes.values().all(Option::is_none);
    match (process.ended, is_probed) {
        (true, _) => ("ended", Color::Red),
        (false, true) => ("ok", Color::Green),
        (false, false) => ("no probes", Color::Yellow),
    }
}

fn edges(model: &str, look: &Document, looks: &Looks, lines: &mut Vec<Line<'static>>) {
    const SIZE: &str = "vllm_omni:transfer_size_bytes";
    const ENDS: [&str; 4] = ["from_stage", "from_replica", "to_stage", "to_replica"];
    let of_model = [("model_name", model)];
    // By the numbers of the ends, not by their texts.
    let found: BTreeMap<[u32; 4], [&str; 4]> = look
        .samples(SIZE, &of_model)
        .map(|sample| ENDS.map(|end| sample.labels.get(end).map_or("", String::as_str)))
        .map(|ends| (ends.map(|end| end.parse().unwrap_or(u32::MAX)), ends))
        .collect();
    if found.is_empty() {
        return;
    }
    let head = format!(
        "  {:<18}{:>10}{:>12}{:>12}{:>12}{:>12}",
        "edge", "a second", "mean size", "sending", "in flight", "receiving"
    );
    lines.push(Line::from(head).dim());
    for ends in found.values() {
        let [from_stage, from_replica, to_stage, to_replica] = ends;
        let mut labels = vec![("model_name", model)];
        labels.extend(ENDS.iter().copied().zip(ends.iter().copied()));
        let size = looks.recent(SIZE, &labels);
        let mean = |family| seconds(looks.recent(family, &labels).mean);
        lines.push(
            format!(
                "  {:<18}{:>10}{:>12}{:>12}{:>12}{:>12}",
                format!("{from_stage}.{from_replica} -> {to_stage}.{to_replica}"),
                short(size.rate),
                bytes(size.mean),
                mean("vllm_omni:transfer_tx_s"),
                mean("vllm_omni:transfer_in_flight_s"),
                mean("vllm_omni:transfer_rx_s"),
            )
            .into(),
        );
    }
}

// ---- requests

fn requests(app: &App, lines: &mut Vec<Line<'static>>) {
    let head =
        |title: String, times: &str| Line::from(format!("{title:<ID$}{times:>9}  stages: tokens")).dim();
    lines.push(head(format!("under way ({})", app.open.len()), "age"));
    lines.extend(app.open.iter().map(open_request));
    lines.push(Line::default());
    lines.push(head(format!("over ({})", app.over.len()), "took"));
    lines.extend(app.over.iter().map(ended_request));
}

fn open_request(request: &OpenRequest) -> Line<'static> {
    let mut spans = vec![row_head(&request.request_id, request.age_ms)];
    for stage in &request.stages {
        let (state, color) = match stage.state {
            OpenState::Given => ("given", Color::DarkGray),
            OpenState::Running => ("running", Color::Yellow),
            OpenState::Finished => ("done", Color::Green),
        };
        let place = place(stage.stage, stage.replica);
        let text = match stage.state {
            OpenState::Given => format!("{place} {state}  "),
            _ => format!("{place} {state} {}  ", stage.generated_tokens),
        };
        spans.push(Span::from(text).fg(color));
    }
    Line::from(spans)
}

fn ended_request(record: &RequestRecord) -> Line<'static> {
    let color = match record.outcome {
        Outcome::Finished => Color::Green,
        Outcome::Aborted | Outcome::TimedOut => Color::Yellow,
        Outcome::Failed => Color::Red,
    };
    let how = match record.outcome {
        // The reason says as much.
        Outcome::Aborted | Outcome::TimedOut => format!("{}  ", record.reason),
        Outcome::Finished | Outcome::Failed => {
            format!("{} ({})  ", record.outcome.as_str(), record.reason)
        }
    };
    let mut spans = vec![
        row_head(&record.request_id, record.e2e_ms),
        Span::from(how).fg(color),
    ];
    for stage in &record.stages {
        let place = place(stage.stage, stage.replica);
        spans.push(format!("{place} {}  ", stage.generated_tokens).into());
    }
    Line::from(spans)
}

fn row_head(id: &str, time_ms: Option<f64>) -> Span<'static> {
    let mut shown: String = id.chars().take(ID - 1).collect();
    if id.chars().count() > ID - 1 {
        // The end of an id is made up by the server, and tells requests of one client apart.
        let tail: Vec<char> = id.chars().rev().take(9).collect();
        shown = id
            .chars()
            .take(ID - 12)
            .chain("..".chars())
            .chain(tail.into_iter().rev())
            .collect();
    }
    format!("{shown:<ID$}{:>9}  ", seconds(time_ms.map(|ms| ms / 1e3))).into()
}

// ---- the agent

fn agent(look: &Document, looks: &Looks, lines: &mut Vec<Line<'static>>) {
    let figures = format!(
        "CPU {} of a core  memory {}  series {}  events/s {}  probed processes {}",
        percent(looks.rate("omnitap_cpu_seconds_total", &[])),
        bytes(look.sum("omnitap_resident_memory_bytes", &[])),
        whole(look.sum("omnitap_series", &[])),
        short(looks.rate("omnitap_events_received_total", &[])),
        whole(look.sum("omnitap_probed_processes", &[])),
    );
    fold(&figures, "  ", "", Style::new(), lines);
    lines.push(Line::default());
    lines.push(Line::from(format!("Warnings ({})", look.warnings.len())).bold());
    for warning in &look.warnings {
        fold(&warning.text, " ", "", Style::new().fg(Color::Yellow), lines);
        fold(&warning.remedy, " ", "  ", Style::new(), lines);
    }
    for pipeline in &look.pipelines {
        lines.push(Line::default());
        let name = pipeline.model.as_deref().or(pipeline.served.as_deref());
        let title = format!("{}: processes and probes", name.unwrap_or("model unknown"));
        lines.push(Line::from(title).bold());
        for process in &pipeline.processes {
            probes(process, lines);
        }
        lines.push(Line::from("Families by source").bold());
        for (source, (served, all)) in sources(pipeline, look) {
            lines.push(format!("  {source}: {served} of {all} served").into());
        }
        let engine = pipeline.engine.as_deref().unwrap_or("not read");
        let engine = format!("its own /metrics: {engine}");
        fold(&engine, " ", "  ", Style::new(), lines);
    }
}

fn probes(process: &Process, lines: &mut Vec<Line<'static>>) {
    let at = match (process.stage, process.replica) {
        (None, None) => String::new(),
        (stage, replica) => format!(" {}", place(stage, replica)),
    };
    let told: Vec<String> = process
        .probes
        .iter()
        .map(|(set, refused)| match refused {
            None => set.clone(),
            Some(reason) => format!("{set}: {reason}"),
        })
        .collect();
    let (told, style) = match (process.ended, told.is_empty()) {
        (true, _) => ("has ended".to_owned(), Style::new().fg(Color::Red)),
        (false, true) => ("none".to_owned(), Style::new().add_modifier(Modifier::DIM)),
        (false, false) => (told.join(", "), Style::new()),
    };
    let text = format!("{:<8} {}{at}: {told}", process.pid, process.role);
    fold(&text, " ", "  ", style, lines);
}

/// Families that a source serves now, of those that it is to serve.
fn sources(pipeline: &Pipeline, look: &Document) -> BTreeMap<String, (u32, u32)> {
    let id = pipeline.id.to_string();
    let labels = [("pipeline", &*id)];
    let mut sources: BTreeMap<String, (u32, u32)> = BTreeMap::new();
    for sample in look.samples("omnitap_source_state", &labels) {
        if let Some(source) = sample.labels.get("source") {
            let (served, all) = sources.entry(source.clone()).or_default();
            *served += u32::from(sample.value.is_some_and(|value| value > 0.0));
            *all += 1;
        }
    }
    sources
}

// ---- values

fn plural(count: usize, word: &str) -> String {
    if count == 1 {
        word.to_owned()
    } else {
        format!("{word}s")
    }
}

fn number(value: Option<u32>) -> String {
    value.map_or_else(|| "?".to_owned(), |value| value.to_string())
}

/// A stage's replica, as on the status page.
fn place(stage: Option<u32>, replica: Option<u32>) -> String {
    format!("{}.{}", number(stage), number(replica))
}

fn shown(value: Option<f64>, how: impl Fn(f64) -> String) -> String {
    value
        .filter(|value| value.is_finite())
        .map_or_else(|| MISSING.to_owned(), how)
}

fn whole(value: Option<f64>) -> String {
    shown(value, |value| format!("{value:.0}"))
}

/// Three digits or so.
fn digits(value: f64) -> String {
    match value {
        0.0 => "0".to_owned(),
        value if value < 10.0 => format!("{value:.2}"),
        value if value < 100.0 => format!("{value:.1}"),
        value => format!("{value:.0}"),
    }
}

fn short(value: Option<f64>) -> String {
    shown(value, |value| match value {
        value if value >= 1e6 => format!("{}M", digits(value / 1e6)),
        value if value >= 1e4 => format!("{}k", digits(value / 1e3)),
        value => digits(value),
    })
}

fn seconds(value: Option<f64>) -> String {
    shown(value, |value| match value {
        0.0 => "0 s".to_owned(),
        value if value < 1e-3 => format!("{} us", digits(value * 1e6)),
        value if value < 1.0 => format!("{} ms", digits(value * 1e3)),
        value => format!("{} s", digits(value)),
    })
}

fn bytes(value: Option<f64>) -> String {
    const UNITS: [(f64, &str); 3] = [(1_073_741_824.0, "GiB"), (1_048_576.0, "MiB"), (1_024.0, "KiB")];
    shown(value, |value| {
        let unit = UNITS.iter().find(|(size, _)| value >= *size);
        unit.map_or_else(
            || format!("{value:.0} B"),
            |(size, unit)| format!("{} {unit}", digits(value / size)),
        )
    })
}

fn percent(share: Option<f64>) -> String {
    shown(share, |share| match 100.0 * share {
        percent if percent > 0.0 && percent < 10.0 => format!("{percent:.1}%"),
        percent => format!("{percent:.0}%"),
    })
}
