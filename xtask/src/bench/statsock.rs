//! The stat socket under load: 100,000 events a second, all of them counted, in memory that does not grow.

use std::{
    io::Write as _,
    os::unix::net::UnixStream,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use omnitap_tests::pipeline::{Options, Pipeline};
use serde_json::json;

use super::{Bound, Figure, load::prepare, stats::range};
use crate::real::{
    agent::Agent,
    exposition::Exposition,
    process::{resident, run_time},
};

/// Events a second that are asked for.
const RATE: u32 = 100_000;
const TIME: Duration = Duration::from_secs(30);
/// Time between two bursts of the sender.
const TICK: Duration = Duration::from_millis(10);
/// Events of one request.
const KINDS: u32 = 6;

/// Sends for half a minute, then compares what was written with what the agent counted.
pub(super) fn measure(program: &Path, folder: &Path) -> Result<Vec<Figure>> {
    prepare()?;
    let scenario = json!({
        "forward": "finished",
        "stages": [{"kind": "ar"}],
        "phases": [{"requests": [{"stages": [{"tokens": 4}]}]}]
    });
    let mut pipeline = Pipeline::start(Options::omni("statsock"), &scenario)?;
    let socket = folder.join("stats.sock");
    let path = socket.to_str().context("odd path")?;
    // A rate above the one that is sent: the agent's limit would make the sender wait.
    let flags = ["--stat-socket.path", path, "--stat-socket.max-rate", "1000000"];
    let mut agent = Agent::start(program, pipeline.pid(), &folder.join("agent.log"), &flags)?;
    pipeline.play()?;
    let before = run_time(agent.pid()).context("no schedstat")?;
    let mut stream = UnixStream::connect(&socket).context("the agent has no stat socket")?;
    let mut sent = 0_u32;
    let mut memory = Vec::new();
    let start = Instant::now();
    while start.elapsed() < TIME {
        let due = start.elapsed().as_secs_f64() * f64::from(RATE);
        let mut text = String::new();
        while f64::from(sent) < due {
            text.push_str(&request(sent));
            sent += KINDS;
        }
        stream.write_all(text.as_bytes())?;
        if start.elapsed() > TIME / 6 * (u32::try_from(memory.len())? + 1) {
            memory.push(megabytes(agent.pid())?);
        }
        std::thread::sleep(TICK);
    }
    let took = start.elapsed();
    drop(stream);
    let mut counted = 0.0;
    let mut accepted = 0.0;
    let until = Instant::now() + Duration::from_secs(20);
    while counted < f64::from(sent) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(200));
        let page = Exposition::parse(&agent.scrape()?)?;
        let events = |labels: &[(&str, &str)]| {
            page.total("omnitap_stat_events_total", labels)
                .unwrap_or_default()
        };
        (counted, accepted) = (events(&[]), events(&[("result", "accepted")]));
    }
    memory.push(megabytes(agent.pid())?);
    let cpu = run_time(agent.pid())
        .context("no schedstat")?
        .saturating_sub(before);
    agent.stop()?;
    pipeline.stop()?;
    ensure!(
        memory.len() > 3,
        "memory was looked at {} times only",
        memory.len()
    );
    let rate = f64::from(sent) / took.as_secs_f64();
    let (least, most) = range(&memory);
    Ok(vec![
        Figure::new(
            "statsock: events a second for 30 s",
            rate,
            "/s",
            Some(Bound::AtLeast(f64::from(RATE) * 0.99)),
            format!("{sent} events of seven kinds in JSON, one connection"),
        ),
        Figure::new(
            "statsock: events that the agent counted, of those written",
            counted / f64::from(sent),
            "x",
            Some(Bound::AtLeast(1.0)),
            format!("{accepted} accepted"),
        ),
        Figure::new(
            "statsock: growth of memory after the first sixth",
            most - least,
            "MiB",
            Some(Bound::AtMost(2.0)),
            format!("{least:.1} to {most:.1} MiB resident"),
        ),
        Figure::new(
            "statsock: CPU of the agent for an event",
            cpu.as_secs_f64() * 1e6 / f64::from(sent),
            "us",
            None,
            "reading, decoding and counting it".to_owned(),
        ),
    ])
}

/// All that is told of one request.
fn request(number: u32) -> String {
    let id = format!("request-{number}-0123456789abcdef");
    let head = |event: &str| format!(r#"{{"v":1,"event":"{event}","request_id":"{id}""#);
    let mut text = head("added") + "}\n";
    text += &(head("dispatched") + ",\"stage_id\":0,\"replica_id\":0}\n");
    text += &(head("chunk") + ",\"stage_id\":0,\"bytes\":4800}\n");
    text += &(head("stage")
        + ",\"stage_id\":0,\"stage_gen_time_ms\":12.5,\"num_tokens_in\":40,\"num_tokens_out\":9,\
           \"pipeline_timings\":{\"queue_wait_ms\":0.1}}\n");
    text += &(head("stream_end") + ",\"outcome\":\"completed\"}\n");
    if number.is_multiple_of(2 * KINDS) {
        text += &(head("finished") + ",\"e2e_s\":0.5}\n");
    } else {
        text += &(head("failed") + ",\"reason\":\"stage_error\"}\n");
    }
    text
}

#[expect(clippy::cast_precision_loss, reason = "megabytes")]
fn megabytes(pid: u32) -> Result<f64> {
    Ok(resident(pid).context("no VmRSS")? as f64 / f64::from(1 << 20))
}
