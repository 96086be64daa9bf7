//! The HTTP tap: what a hit costs, and what an API server gets done with it.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{Ipv4Addr, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::{
    Bound, Figure,
    stats::{median, range, ratio_of_medians},
};
use crate::{
    real::{
        agent::{self, Agent},
        exposition::Exposition,
    },
    setup,
};

/// Clients, each with a connection of its own.
const CLIENTS: usize = 4;
/// Requests of a client in a block.
const REQUESTS: usize = 4000;
/// In turn, so that a drift hits all alike.
const BLOCKS: [Side; 6] = [
    Side::Without,
    Side::With,
    Side::NoHttp,
    Side::NoHttp,
    Side::With,
    Side::Without,
];
const ROUNDS: usize = 3;
/// What the agent's counters may lag behind.
const PATIENCE: Duration = Duration::from_secs(15);

/// What is beside the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    /// Nothing.
    Without,
    /// The agent.
    With,
    /// The agent, with its HTTP tap off.
    NoHttp,
}

/// Named as vLLM's command, so that the agent takes it for an API server: uvicorn on uvloop, as vLLM runs it.
const SERVER: &str = r#"
import sys
import zmq  # its library is what the agent waits for in an API server
sys.path.insert(0, "SUPPORT")
sys.argv[1:] = ["uvloop", "httptools"]
import uvicorn_server
zmq.Context.instance().socket(zmq.PUSH)
uvicorn_server.main()
"#;

pub(super) fn measure(program: &Path, folder: &Path) -> Result<Vec<Figure>> {
    let mut figures = hits()?;
    figures.extend(throughput(program, folder)?);
    Ok(figures)
}

/// Part of what `agent-ebpf/examples/hit.rs` prints.
#[derive(Deserialize)]
struct Hits {
    #[serde(rename = "http_other_descriptor")]
    other_descriptor: Cost,
    #[serde(rename = "http_dropped")]
    dropped: Cost,
    #[serde(rename = "http_captured_512_byte")]
    captured: Cost,
}

#[derive(Deserialize)]
struct Cost {
    call_ns: f64,
    empty_hit_ns: f64,
    hit_ns: f64,
    ratio: f64,
}

fn hits() -> Result<Vec<Figure>> {
    setup::debian(&[("/usr/bin/gcc", "gcc"), ("/usr/include/stdio.h", "libc6-dev")])?;
    let out = setup::output(setup::cargo().args([
        "run",
        "--quiet",
        "--package",
        "omnitap-ebpf",
        "--example",
        "hit",
        "--",
        "http",
    ]))?;
    let hits: Hits = serde_json::from_str(&out).context("the example printed something else")?;
    let figure = |what: &str, hit: &Cost| {
        Figure::new(
            &format!("http: {what}, to an empty probe"),
            hit.ratio,
            "x",
            None,
            format!(
                "{:.0} ns and {:.0} ns a hit; the call alone {:.0} ns",
                hit.hit_ns, hit.empty_hit_ns, hit.call_ns
            ),
        )
    };
    Ok(vec![
        figure("a read of an eventfd", &hits.other_descriptor),
        figure("a read of a connection that would wait", &hits.dropped),
        figure("a write of 512 bytes, captured", &hits.captured),
    ])
}

/// The server, which ends with this.
struct Server {
    child: Child,
    port: u16,
}

impl Server {
    fn start(folder: &Path) -> Result<Self> {
        let folder = folder.join("http");
        fs::create_dir_all(&folder)?;
        let support = setup::root().join("tests/tests/tap_support");
        let script = folder.join("vllm");
        fs::write(&script, SERVER.replace("SUPPORT", &support.to_string_lossy()))?;
        let mut child = Command::new(super::python()?)
            .arg(script)
            .args(["serve", "bench/http"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the server")?;
        let mut line = String::new();
        let out = child.stdout.take().context("the server has no output")?;
        BufReader::new(out).read_line(&mut line)?;
        let port = line
            .strip_prefix("ready ")
            .and_then(|port| port.trim().parse().ok());
        Ok(Self {
            port: port.with_context(|| format!("the server said {line:?}"))?,
            child,
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Ended already, or to be ended: either way nothing is left of it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn throughput(program: &Path, folder: &Path) -> Result<Vec<Figure>> {
    let server = Server::start(folder)?;
    load(server.port)?;
    let mut rates: [Vec<f64>; 3] = Default::default();
    for side in BLOCKS.repeat(ROUNDS) {
        let log = folder.join("agent.log");
        let flags: &[&str] = if side == Side::NoHttp {
            &["--no-http.enabled"]
        } else {
            &[]
        };
        let mut watcher = (side != Side::Without)
            .then(|| Agent::start(program, server.child.id(), &log, flags))
            .transpose()?;
        if side == Side::With {
            let start = Instant::now();
            while !fs::read_to_string(&log)?.contains("function=\"accept4\"") {
                ensure!(start.elapsed() < PATIENCE, "no probes of HTTP in the server");
                thread::sleep(Duration::from_millis(20));
            }
        }
        let rate = load(server.port)?;
        if let Some(rates) = rates.get_mut(side as usize) {
            rates.push(rate);
        }
        if let Some(watcher) = &mut watcher {
            if side == Side::With {
                all_seen(watcher)?;
            }
            watcher.stop()?;
        }
    }
    let [without, with, no_http] = &rates;
    let figure = |what: &str, side: &[f64], bound| {
        let (a, b) = range(side);
        let (low, high) = ratio_of_medians(side, without);
        Figure::new(
            &format!("http: requests a second {what} to without the agent"),
            median(side) / median(without),
            "x",
            bound,
            format!(
                "{:.0} ({a:.0} to {b:.0}) and {:.0}; 95 % of the ratio {low:.3} to {high:.3}; {} blocks a side of {} requests",
                median(side),
                median(without),
                side.len(),
                CLIENTS * REQUESTS
            ),
        )
    };
    Ok(vec![
        figure("with the agent", with, Some(Bound::AtLeast(0.97))),
        figure("with the agent, HTTP tap off,", no_http, None),
    ])
}

/// Waits until the agent has read an event of each request and one of each answer at the least.
fn all_seen(watcher: &Agent) -> Result<()> {
    #[expect(clippy::cast_precision_loss, reason = "some thousands")]
    let wanted = 2.0 * (CLIENTS * REQUESTS) as f64;
    let start = Instant::now();
    loop {
        let page = Exposition::parse(&watcher.scrape()?)?;
        let seen = page
            .total("omnitap_events_received_total", &[("kind", "http")])
            .unwrap_or_default();
        if seen >= wanted {
            return agent::without_losses(&page);
        }
        ensure!(
            start.elapsed() < PATIENCE,
            "the agent saw {seen} events of at least {wanted}"
        );
        thread::sleep(Duration::from_millis(100));
    }
}

/// Requests a second of all clients together, for answers that take the server no work.
fn load(port: u16) -> Result<f64> {
    let start = Instant::now();
    let clients: Vec<_> = (0..CLIENTS).map(|_| thread::spawn(move || one(port))).collect();
    for client in clients {
        let ended = client.join();
        ended.map_err(|_| anyhow::anyhow!("a client has panicked"))??;
    }
    #[expect(clippy::cast_precision_loss, reason = "some thousands")]
    let requests = (CLIENTS * REQUESTS) as f64;
    Ok(requests / start.elapsed().as_secs_f64())
}

fn one(port: u16) -> Result<()> {
    let mut server = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    server.set_nodelay(true)?;
    server.set_read_timeout(Some(Duration::from_secs(10)))?;
    let mut answer = [0; 4096];
    for _ in 0..REQUESTS {
        server.write_all(b"GET /health HTTP/1.1\r\nhost: bench\r\n\r\n")?;
        let mut len = 0;
        while !answer
            .get(..len)
            .is_some_and(|so_far| so_far.ends_with(b"\r\n\r\n"))
        {
            let rest = answer.get_mut(len..).context("an answer without an end")?;
            let read = server.read(rest)?;
            ensure!(read > 0, "the server closed the connection");
            len += read;
        }
    }
    Ok(())
}
