//! `cargo xtask demo`: the agent beside two bundled live pipelines, with a live table of the main families.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    io::{IsTerminal, Write as _},
    net::TcpListener,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use omnitap_tests::{
    agent::Agent,
    pipeline::{Options, Pipeline},
    scrape::Scrape,
};

use crate::{setup, test::PYTHON_PACKAGES};

/// The agent's own default port, where it is free.
const PORT: u16 = 9477;
const MODEL: &str = "demo/speech";
const SERVED: &str = "speech";
/// The second pipeline's model.
const PICTURES: &str = "demo/pictures";

/// Options of `cargo xtask demo`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// End after this time, such as 20s or 2m, instead of on Ctrl-C
    #[arg(long = "for", value_name = "TIME", value_parser = duration)]
    time: Option<Duration>,
}

fn duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let number: u64 = number.parse().map_err(|_| "not a number and s or m".to_owned())?;
    match unit {
        "s" | "" => Ok(Duration::from_secs(number)),
        "m" => Ok(Duration::from_mins(number)),
        _ => Err(format!("unknown unit {unit}: s or m")),
    }
}

/// Runs the task.
pub(crate) fn run(args: &Args) -> Result<()> {
    ensure!(
        setup::is_root(),
        "the tap needs root. Run: sudo -E env \"PATH=$PATH\" cargo xtask demo"
    );
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    setup::venv("venv", PYTHON_PACKAGES)?;
    // Not the release profile: this is about a quick start, and the agent is idle most of the time.
    setup::run(setup::cargo().args(["build", "--package", "omnitap"]))?;

    eprintln!("xtask: starting the bundled pipelines (tests/pipeline) and the agent");
    let mut speech = pipeline()?;
    let mut pictures = start("pictures", PICTURES, "pictures")?;
    // Dropped at once: it only tells whether the port is free.
    let port = TcpListener::bind(("127.0.0.1", PORT))
        .or_else(|_| TcpListener::bind("127.0.0.1:0"))?
        .local_addr()?
        .port();
    let agent = Agent::start_on(port, "run", &[])?;
    speech.go()?;
    pictures.go()?;

    let shown = watch(&agent, args.time, &stop);
    let ended = speech.stop().and(pictures.stop());
    let (status, took) = agent.stop()?;
    eprintln!(
        "xtask: pipelines and agent have ended (agent: {status}, {:.1} s)",
        took.as_secs_f64()
    );
    ended?;
    let done = shown?;
    ensure!(
        stop.load(Ordering::Relaxed) || done > 0.0,
        "the agent has not seen a single request"
    );
    Ok(())
}

/// The bundled speech pipeline on the demo's endless scenario; `go` begins it.
pub(crate) fn pipeline() -> Result<Pipeline> {
    start("demo", MODEL, SERVED)
}

/// Starts a pipeline on one of the scenarios.
fn start(scenario: &str, model: &str, served: &str) -> Result<Pipeline> {
    let path = setup::root().join(format!("tests/pipeline/scenarios/{scenario}.json"));
    let options = Options {
        model: model.to_owned(),
        served: served.to_owned(),
        omni: true,
        flags: Vec::new(),
        truth: false,
    };
    Pipeline::start(options, &serde_json::from_str(&std::fs::read_to_string(path)?)?)
}

/// Shows the table once a second until it is time to end; returns the number of finished requests.
fn watch(agent: &Agent, time: Option<Duration>, stop: &AtomicBool) -> Result<f64> {
    let terminal = std::io::stdout().is_terminal();
    let start = Instant::now();
    let mut before: Option<(Instant, Scrape)> = None;
    let mut lines = 0;
    loop {
        // Ctrl-C reaches the agent as well: it may be gone by now.
        let scrape = match agent.scrape() {
            Ok(scrape) => scrape,
            Err(_) if stop.load(Ordering::Relaxed) => break,
            Err(error) => return Err(error).context("the agent does not answer"),
        };
        let now = Instant::now();
        let view = View {
            scrape: &scrape,
            before: before.as_ref().map(|(at, scrape)| (now - *at, scrape)),
        };
        let elapsed = start.elapsed();
        let over = time.is_some_and(|time| elapsed >= time);
        let mut out = std::io::stdout().lock();
        if terminal {
            let table = view.table(&agent.url(), elapsed);
            if lines > 0 {
                // Back to the first line of the last table, and clear from there.
                write!(out, "\x1b[{lines}F\x1b[J")?;
            }
            write!(out, "{table}")?;
            lines = table.lines().count();
        } else if over {
            write!(out, "\n{}", view.table(&agent.url(), elapsed))?;
        } else {
            writeln!(out, "{}", view.line(elapsed))?;
        }
        out.flush()?;
        before = Some((now, scrape));
        if over || stop.load(Ordering::Relaxed) {
            break;
        }
        let next = start + Duration::from_secs(elapsed.as_secs() + 1);
        while Instant::now() < next && !stop.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    Ok(before.map_or(0.0, |(_, scrape)| done(&scrape)))
}

fn done(scrape: &Scrape) -> f64 {
    scrape.sum("vllm_omni:requests_success_total", &[("model_name", MODEL)])
}

/// Labels of an edge between stages, and their values.
const EDGE: [&str; 4] = ["from_stage", "from_replica", "to_stage", "to_replica"];
type Edge = [String; 4];

/// A scrape and the one before it.
struct View<'a> {
    scrape: &'a Scrape,
    before: Option<(Duration, &'a Scrape)>,
}

impl View<'_> {
    fn omni(&self, name: &str) -> f64 {
        self.scrape.sum(name, &[("model_name", MODEL)])
    }

    fn seconds(&self, family: &str, quantile: f64) -> String {
        self.scrape
            .quantile(family, &[("model_name", MODEL)], quantile)
            .map_or_else(|| "-".to_owned(), time)
    }

    /// Growth a second since the scrape before.
    fn rate(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let (elapsed, before) = self.before?;
        Some((self.scrape.sum(name, labels) - before.sum(name, labels)) / elapsed.as_secs_f64().max(0.001))
    }

    /// Non-zero values of a counter by one of its labels: `stop 12, length 3`.
    fn by(&self, name: &str, label: &str) -> String {
        let parts: Vec<String> = self
            .scrape
            .matching(name, &[("model_name", MODEL)])
            .filter(|&(_, value)| value > 0.0)
            .filter_map(|(series, value)| Some(format!("{} {value}", series.labels.get(label)?)))
            .collect();
        if parts.is_empty() {
            "0".to_owned()
        } else {
            parts.join(", ")
        }
    }

    fn cpu(&self) -> String {
        self.rate("omnitap_cpu_seconds_total", &[])
            .map_or_else(|| "-".to_owned(), |rate| format!("{:.1} %", 100.0 * rate))
    }

    fn line(&self, elapsed: Duration) -> String {
        let tokens = self.rate("vllm:generation_tokens_total", &[("model_name", SERVED)]);
        format!(
            "{:>3} s  running {}  waiting {}  done {}  failed {}  e2e p50 {}  tokens/s {:.0}  lost {}  agent CPU {}",
            elapsed.as_secs(),
            self.omni("vllm_omni:num_requests_running"),
            self.omni("vllm_omni:num_requests_waiting"),
            done(self.scrape),
            self.omni("vllm_omni:requests_failed_total"),
            self.seconds("vllm_omni:e2e_request_latency_s", 0.5),
            tokens.unwrap_or(0.0),
            self.scrape.sum("omnitap_events_lost_total", &[]),
            self.cpu(),
        )
    }

    fn table(&self, url: &str, elapsed: Duration) -> String {
        let mut text = String::new();
        let mut row = |line: String| {
            let _ = writeln!(text, "{line}");
        };
        row(format!(
            "omnitap demo: {MODEL}, {} s, {url}/metrics",
            elapsed.as_secs()
        ));
        row(String::new());
        row(format!(
            "requests    running {}  waiting {}  done: {}  failed: {}",
            self.omni("vllm_omni:num_requests_running"),
            self.omni("vllm_omni:num_requests_waiting"),
            self.by("vllm_omni:requests_success_total", "finished_reason"),
            self.by("vllm_omni:requests_failed_total", "reason"),
        ));
        row(format!(
            "end to end  p50 {}  p95 {}",
            self.seconds("vllm_omni:e2e_request_latency_s", 0.5),
            self.seconds("vllm_omni:e2e_request_latency_s", 0.95),
        ));
        row(format!(
            "audio       first packet p50 {}  made {:.1} s  real-time factor p50 {}  continuous {} of {}",
            self.seconds("vllm_omni:audio_ttfp_s", 0.5),
            self.omni("vllm_omni:audio_duration_s_sum"),
            self.scrape
                .quantile("vllm_omni:audio_rtf", &[("model_name", MODEL)], 0.5)
                .map_or_else(|| "-".to_owned(), |rtf| format!("{rtf:.2}")),
            self.omni("vllm_omni:audio_continuity_ok_total"),
            self.omni("vllm_omni:audio_underrun_s_count"),
        ));
        row(String::new());
        row(format!(
            "{:>5} {:>7} {:>8} {:>8} {:>9} {:>9} {:>9} {:>9} {:>9}",
            "stage",
            "replica",
            "running",
            "waiting",
            "finished",
            "tokens/s",
            "TTFT p50",
            "ITL p50",
            "KV cache"
        ));
        for (stage, replica) in self.replicas() {
            let labels = [
                ("model_name", SERVED),
                ("stage", stage.as_str()),
                ("replica", replica.as_str()),
            ];
            let gauge = |name: &str| self.scrape.sum(name, &labels);
            let quantile = |family: &str| {
                self.scrape
                    .quantile(family, &labels, 0.5)
                    .map_or_else(|| "-".to_owned(), time)
            };
            row(format!(
                "{stage:>5} {replica:>7} {:>8} {:>8} {:>9} {:>9} {:>9} {:>9} {:>9}",
                gauge("vllm:num_requests_running"),
                gauge("vllm:num_requests_waiting"),
                gauge("vllm:request_success_total"),
                self.rate("vllm:generation_tokens_total", &labels)
                    .map_or_else(|| "-".to_owned(), |rate| format!("{rate:.0}")),
                quantile("vllm:time_to_first_token_seconds"),
                quantile("vllm:inter_token_latency_seconds"),
                format!("{:.0} %", 100.0 * gauge("vllm:kv_cache_usage_perc")),
            ));
        }
        row(String::new());
        row(format!(
            "{:>13} {:>7} {:>9} {:>9} {:>9} {:>13} {:>9}",
            "transfers", "number", "MiB", "size p50", "tx p50", "in flight p50", "rx p50"
        ));
        for edge in self.edges() {
            row(self.transfers(&edge));
        }
        row(String::new());
        row(self.pictures());
        row(String::new());
        row(format!(
            "agent       frames {}  lost {}  CPU {}  memory {:.0} MiB  sample lines {}",
            self.scrape.sum("omnitap_events_received_total", &[]),
            self.scrape.sum("omnitap_events_lost_total", &[]),
            self.cpu(),
            self.scrape.sum("omnitap_resident_memory_bytes", &[]) / f64::from(1 << 20),
            self.scrape.sum("omnitap_series", &[]),
        ));
        text
    }

    /// Lines of the second pipeline, whose last stage is a diffusion stage.
    fn pictures(&self) -> String {
        let labels = [("model_name", PICTURES)];
        let sum = |name: &str| self.scrape.sum(name, &labels);
        let p50 = |family: &str| {
            self.scrape
                .quantile(family, &labels, 0.5)
                .map_or_else(|| "-".to_owned(), time)
        };
        let mean = |family: &str| {
            let count = sum(&format!("{family}_count"));
            sum(&format!("{family}_sum")) / count.max(1.0)
        };
        format!(
            "pictures    made {}  waiting {}  mean steps {:.0}  mean megapixels {:.2}  peak memory {:.0} MB\n\
             \x20           in queue p50 {}  execution p50 {}  a step p50 {}  VAE p50 {}  end to end p50 {}",
            sum("vllm_omni:image_count_total"),
            sum("vllm_omni:stage_waiting_requests"),
            mean("vllm_omni:num_inference_steps"),
            mean("vllm_omni:image_pixels") / 1e6,
            sum("vllm_omni:peak_memory_mb"),
            p50("vllm_omni:stage_in_queue_s"),
            p50("vllm_omni:diffusion_exec_s"),
            p50("vllm_omni:denoise_step_latency_s"),
            p50("vllm_omni:vae_decode_s"),
            p50("vllm_omni:e2e_request_latency_s"),
        )
    }

    /// A line of the payloads between two stages.
    fn transfers(&self, edge: &Edge) -> String {
        let labels: Vec<(&str, &str)> = std::iter::once(("model_name", MODEL))
            .chain(EDGE.iter().copied().zip(edge.iter().map(String::as_str)))
            .collect();
        let [from, from_replica, to, to_replica] = edge;
        let p50 = |family: &str| self.scrape.quantile(family, &labels, 0.5);
        let time = |family: &str| {
            p50(family).map_or_else(|| "-".to_owned(), |seconds| format!("{:.2} ms", 1000.0 * seconds))
        };
        format!(
            "{:>13} {:>7} {:>9.1} {:>9} {:>9} {:>13} {:>9}",
            format!("{from}.{from_replica} > {to}.{to_replica}"),
            self.scrape.sum("vllm_omni:transfer_size_bytes_count", &labels),
            self.scrape.sum("vllm_omni:transfer_size_bytes_sum", &labels) / f64::from(1 << 20),
            p50("vllm_omni:transfer_size_bytes")
                .map_or_else(|| "-".to_owned(), |bytes| format!("{:.0} KiB", bytes / 1024.0)),
            time("vllm_omni:transfer_tx_s"),
            time("vllm_omni:transfer_in_flight_s"),
            time("vllm_omni:transfer_rx_s"),
        )
    }

    fn edges(&self) -> BTreeSet<Edge> {
        self.scrape
            .matching("vllm_omni:transfer_size_bytes_count", &[("model_name", MODEL)])
            .map(|(series, _)| EDGE.map(|label| series.labels.get(label).cloned().unwrap_or_default()))
            .collect()
    }

    fn replicas(&self) -> BTreeSet<(String, String)> {
        self.scrape
            .samples
            .keys()
            .filter(|series| series.labels.get("model_name").is_some_and(|name| name == SERVED))
            .filter_map(|series| {
                Some((
                    series.labels.get("stage")?.clone(),
                    series.labels.get("replica")?.clone(),
                ))
            })
            .collect()
    }
}

fn time(seconds: f64) -> String {
    if seconds < 1.0 {
        format!("{:.0} ms", 1000.0 * seconds)
    } else {
        format!("{seconds:.2} s")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        assert_eq!(duration("20s"), Ok(Duration::from_secs(20)));
        assert_eq!(duration("2m"), Ok(Duration::from_mins(2)));
        assert!(duration("soon").is_err());
        assert!(duration("2h").is_err());
    }
}
