//! What the forwarder costs: an event in the process that it runs in, and the latency of a speech request of the real
//! Audex server, beside a server without it.

use std::{path::Path, process::Command};

use anyhow::{Context, Result};
use serde::Deserialize;

use super::{
    Bound, Figure,
    stats::{median, ratio_of_medians},
};
use crate::{
    real::{
        Server,
        agent::Agent,
        at_rest,
        kit::{self, Kind, Kit},
        load,
    },
    setup,
};

/// Requests in a row on one side before the other side has its turn.
const BLOCK: usize = 10;

/// Times `emit` with an agent that reads, one that does not, and none.
const EMIT: &str = r#"
import json, os, socket, sys, tempfile, threading, time
sys.path.insert(0, sys.argv[1])
from omnitap_forwarder import Forwarder
folder = tempfile.mkdtemp()

def agent(path, reads):
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    def serve():
        peer, _ = server.accept()
        while reads and peer.recv(1 << 16):
            pass
        threading.Event().wait()
    threading.Thread(target=serve, daemon=True).start()

def emits(forwarder, pause):
    """Median microseconds of an event, as a server has them: now and then."""
    times = []
    for number in range(3000):
        start = time.perf_counter()
        forwarder.emit("stage", request_id="speech-0123456789abcdef", stage_id=1, replica_id=0, stage_gen_time_ms=12.5,
                       num_tokens_in=30, num_tokens_out=25, final_output_type="audio", audio_generated_frames=24000)
        times.append(time.perf_counter() - start)
        if pause:
            time.sleep(pause)
    times.sort()
    return times[len(times) // 2] * 1e6

figures = {}
for name, there, reads in [("reads", True, True), ("slow", True, False), ("absent", False, False)]:
    path = os.path.join(folder, name)
    if there:
        agent(path, reads)
    forwarder = Forwarder(path)
    forwarder.emit("added", request_id="first")
    time.sleep(0.5)
    if name == "slow":
        for _ in range(40_000):
            forwarder.emit("added", request_id="x" * 200)
    figures[name] = emits(forwarder, 0.0005 if name == "reads" else 0)
print(json.dumps(figures))
os._exit(0)
"#;

/// Microseconds of an event.
#[derive(Deserialize)]
struct Emit {
    reads: f64,
    slow: f64,
    absent: f64,
}

/// `requests` a side, in blocks that alternate between the two servers.
pub(super) fn measure(program: &Path, folder: &Path, requests: usize) -> Result<Vec<Figure>> {
    let text = setup::output(
        Command::new(super::python()?)
            .args(["-c", EMIT])
            .arg(setup::root().join("integrations")),
    )?;
    let emit: Emit =
        serde_json::from_str(text.trim()).context("the timing of events printed something else")?;
    let kit = Kit::install()?;
    let kind = Kind::Omni { log_stats: true };
    let plain = Server::start(&kit, kind, &folder.join("server.log"))?;
    let telling = Server::start_with(&kit, kind, &folder.join("server-forwarder.log"), kit::forward)?;
    let socket = kit::stat_socket();
    let path = socket.to_str().context("odd path")?;
    let flags = ["--no-ebpf", "--stat-socket.path", path];
    let mut agent = Agent::start_unprobed(program, &folder.join("agent.log"), &flags)?;
    agent.wait_for_forwarder()?;
    for server in [&plain, &telling] {
        at_rest(&server.metrics())?;
    }
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for block in 0..requests.div_ceil(BLOCK) * 2 {
        let (server, side) = if block % 4 == 1 || block % 4 == 2 {
            (&telling, &mut with)
        } else {
            (&plain, &mut without)
        };
        // One that does not count: the first after a pause finds caches cold.
        load::at_once(server.port, &load::same_speech(1), 1)?;
        let outcomes = load::at_once(server.port, &load::same_speech(BLOCK), 1)?;
        side.extend(outcomes.iter().map(|outcome| outcome.seconds));
    }
    agent.stop()?;
    let (low, high) = ratio_of_medians(&with, &without);
    let figure = |what: &str, value| {
        let bound = Some(Bound::AtMost(10.0));
        Figure::new(
            what,
            value,
            "us",
            bound,
            "median, in the server's process".to_owned(),
        )
    };
    Ok(vec![
        figure("forwarder: an event, the agent reads", emit.reads),
        figure(
            "forwarder: an event, the agent is slow and the queue full",
            emit.slow,
        ),
        figure("forwarder: an event, no agent", emit.absent),
        Figure::new(
            "forwarder: latency of a speech request with it to without, medians",
            median(&with) / median(&without),
            "x",
            Some(Bound::AtMost(1.01)),
            format!(
                "{} and {} requests to two servers in turn, 95 % interval {low:.4} to {high:.4}, medians {:.1} and {:.1} ms",
                with.len(),
                without.len(),
                median(&with) * 1e3,
                median(&without) * 1e3
            ),
        ),
    ])
}
