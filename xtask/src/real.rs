//! `cargo xtask real`: the agent beside real vLLM and vLLM-Omni servers, compared with their own `/metrics`.

pub(crate) mod agent;
mod compare;
mod connectors;
pub(crate) mod exposition;
pub(crate) mod kit;
pub(crate) mod load;
mod off;
pub(crate) mod process;
mod segments;

use std::{
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;

use self::{
    agent::Agent,
    compare::{Parity, Report, engines_as_replicas},
    exposition::Exposition,
    kit::{Kind, Kit},
    load::Outcome,
    process::Process,
    segments::Segments,
};
use crate::setup;

/// What a server may take from its start to its first answer: two minutes on two free cores, many on busy ones.
const START: Duration = Duration::from_mins(20);
/// How long a page must stay the same before the server counts as at rest; statistics come once a second.
const QUIET: Duration = Duration::from_secs(3);

/// Options of `cargo xtask real`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run only these cases
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Case>,
    /// Requests sent to each server
    #[arg(long, default_value_t = 36, value_parser = clap::value_parser!(u16).range(12..=1000))]
    requests: u16,
    /// The agent's program instead of a release build of this tree
    #[arg(long)]
    agent: Option<PathBuf>,
    /// Also record what the tap sees into tests/recordings/<case>.jsonl.gz
    #[arg(long)]
    record: bool,
    /// Compare each server with itself, without an agent: checks this task
    #[arg(long, conflicts_with_all = ["record", "agent"])]
    without_agent: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Case {
    /// Plain vLLM
    Vllm,
    /// Plain vLLM with two data-parallel engines and two API workers
    VllmParallel,
    /// vLLM-Omni, two stages, its own statistics on
    Omni,
    /// vLLM-Omni, two stages, its own statistics off
    OmniOff,
    /// As omni, with the forwarder of stat events in it
    Forwarder,
    /// As forwarder, with the server's own page as a source too
    Together,
    /// vLLM-Omni, a language model and a diffusion stage in a process of its own
    Ardit,
    /// vLLM-Omni, a diffusion stage inside the API process
    Inline,
    /// vLLM-Omni's connectors between two stages without a model
    Connectors,
}

impl Case {
    fn name(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::VllmParallel => "vllm-parallel",
            Self::Omni => "omni",
            Self::OmniOff => "omni-off",
            Self::Forwarder => "forwarder",
            Self::Together => "together",
            Self::Ardit => "ardit",
            Self::Inline => "inline",
            Self::Connectors => "connectors",
        }
    }

    /// Whether the server tells the agent what happens in it.
    fn forwards(self) -> bool {
        matches!(self, Self::Forwarder | Self::Together)
    }

    /// `None`: there is none.
    fn server(self) -> Option<Kind> {
        match self {
            Self::Vllm => Some(Kind::Vllm { parallel: false }),
            Self::VllmParallel => Some(Kind::Vllm { parallel: true }),
            Self::Omni | Self::Forwarder | Self::Together => Some(Kind::Omni { log_stats: true }),
            Self::OmniOff => Some(Kind::Omni { log_stats: false }),
            Self::Ardit => Some(Kind::Picture { inline: false }),
            Self::Inline => Some(Kind::Picture { inline: true }),
            Self::Connectors => None,
        }
    }
}

/// A server of the kit, up and warm.
pub(crate) struct Server {
    pub(crate) port: u16,
    pub(crate) process: Process,
}

impl Server {
    /// Starts a server and waits until it has answered a first round of requests.
    pub(crate) fn start(kit: &Kit, kind: Kind, log: &Path) -> Result<Self> {
        Self::start_with(kit, kind, log, |_| ())
    }

    /// `change` has the last word on the server's command.
    pub(crate) fn start_with(
        kit: &Kit,
        kind: Kind,
        log: &Path,
        change: impl FnOnce(&mut Command),
    ) -> Result<Self> {
        let port = free_port()?;
        let mut command = kit.serve(kind, port);
        change(&mut command);
        let mut process = Process::start("the server", &command, log)?;
        let url = format!("http://127.0.0.1:{port}/health");
        let took = process
            .wait_until("its first answer", START, Duration::from_millis(500), || {
                load::get(&url).is_ok()
            })
            .with_context(|| format!("its output is in {}", log.display()))?;
        println!("  server up after {:.0} s on port {port}", took.as_secs_f64());
        // The first requests compile kernels for seconds; they also are traffic from before the agent's start.
        load::at_once(port, &load::requests(kind, 4), 1)?;
        Ok(Self { port, process })
    }

    pub(crate) fn metrics(&self) -> String {
        format!("http://127.0.0.1:{}/metrics", self.port)
    }
}

/// Everything that a case leaves: texts in its folder, and what the client saw.
struct Run {
    server: Option<Exposition>,
    agent: Option<Exposition>,
    outcomes: Vec<Outcome>,
    /// Sizes of the segments that the stages' connector made meanwhile.
    segments: Vec<Option<u64>>,
}

/// Runs the task.
pub(crate) fn run(args: &Args) -> Result<()> {
    let cases = if args.only.is_empty() {
        Case::value_variants().to_vec()
    } else {
        args.only.clone()
    };
    let agent = match (&args.agent, args.without_agent) {
        (_, true) => None,
        (Some(path), _) => Some(path.clone()),
        (None, _) => Some(agent::build()?),
    };
    let kit = Kit::install()?;
    let mut failed = Vec::new();
    for case in cases {
        println!("\n== {} ==", case.name());
        let folder = setup::target_dir().join("real").join(case.name());
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let done = match case.server() {
            Some(kind) => one_case((case, kind), args, &kit, agent.as_deref(), &folder),
            None => connectors::check(&kit, agent.as_deref(), &folder),
        };
        match done {
            Ok(true) => {}
            Ok(false) => failed.push(format!("{} deviates", case.name())),
            // The other cases are worth their time all the same.
            Err(error) => {
                println!("  {error:#}");
                failed.push(format!("{} did not run", case.name()));
            }
        }
        println!("  files in {}", folder.display());
    }
    ensure!(failed.is_empty(), "{}", failed.join(", "));
    Ok(())
}

fn one_case(
    (case, kind): (Case, Kind),
    args: &Args,
    kit: &Kit,
    agent: Option<&Path>,
    folder: &Path,
) -> Result<bool> {
    let log = folder.join("server.log");
    let mut server = if case.forwards() {
        Server::start_with(kit, kind, &log, kit::forward)?
    } else {
        Server::start(kit, kind, &log)?
    };
    at_rest(&server.metrics())?;
    let models = kit.models(kind);
    let mut run = attended((case, kind, &models[1]), args, agent, &server, folder)?;
    run.agent = run.agent.map(|page| page.of_models(&models));
    server.process.stop(Duration::from_secs(30))?;
    fs::write(
        folder.join("requests.json"),
        serde_json::to_string_pretty(&run.outcomes)?,
    )?;
    let left = run.outcomes.iter().filter(|o| o.left).count();
    println!(
        "  {} requests: {} streamed, {} given up by the client, {} of them four at once",
        run.outcomes.len(),
        run.outcomes.iter().filter(|o| o.form.streams()).count(),
        left,
        run.outcomes.len() - run.outcomes.len() / 3,
    );
    // The forwarder's transfers are the server's own, of which the sizes are 0.
    let hops = run
        .agent
        .as_ref()
        .filter(|_| !case.forwards())
        .is_none_or(|agent| hops_equal(&run.segments, agent));
    match (case, run.server, run.agent) {
        (Case::OmniOff, _, Some(agent)) => {
            let right = off::check(&run.outcomes, &agent);
            off::cannot_be_had(folder)?;
            Ok(right && hops)
        }
        (Case::OmniOff, ..) => Ok(true),
        (_, Some(server), agent) => {
            let text = fs::read_to_string(kit::files().join("parity.tsv"))?;
            let parity = Parity::parse(&text, case.name())?;
            let report = compare::compare(
                &server,
                agent.as_ref().unwrap_or(&server),
                &parity,
                u32::try_from(left).unwrap_or(u32::MAX),
            );
            fs::write(folder.join("report.json"), serde_json::to_string_pretty(&report)?)?;
            show(&report);
            Ok(report.compared > 0 && report.unexplained().next().is_none() && hops)
        }
        (_, None, _) => bail!("the server has no statistics"),
    }
}

/// The part of a case during which the agent runs: it starts beside the running server and ends before it.
fn attended(
    (case, kind, model): (Case, Kind, &str),
    args: &Args,
    agent: Option<&Path>,
    server: &Server,
    folder: &Path,
) -> Result<Run> {
    let keep = |name: &str, text: &str| {
        let path = folder.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    };
    let socket = kit::stat_socket();
    // What the agent reads from the server's own page would agree with it: only what is counted twice would show.
    let mut flags = match case {
        Case::Together => vec!["--engine-metrics=fill", "--engine-metrics.interval=1s"],
        _ => vec!["--engine-metrics=off"],
    };
    // This server writes a title over its command line.
    let names = format!("--host.model-name=DiffusionWorker={model}");
    if case == Case::Inline {
        flags.push(&names);
    }
    if case.forwards() {
        flags.extend(["--stat-socket.path", socket.to_str().context("odd path")?]);
    }
    let mut watcher = agent
        .map(|program| Agent::start(program, server.process.pid(), &folder.join("agent.log"), &flags))
        .transpose()?;
    if let (true, Some(watcher)) = (case.forwards(), &watcher) {
        watcher.wait_for_forwarder()?;
        // The first events hand the families over from the tap, whose values of transfers mean something else.
        load::at_once(server.port, &load::requests(kind, 12), 1)?;
        at_rest(&watcher.metrics())?;
        at_rest(&server.metrics())?;
    }
    let server_before = load::get(&server.metrics())?;
    keep("server-before.txt", &server_before)?;
    let recorder = match (agent, args.record) {
        (Some(program), true) => Some(agent::record(
            program,
            &recording(case),
            &folder.join("record.log"),
            &folder.join("agent.log"),
        )?),
        _ => None,
    };
    let agent_before = watcher.as_ref().map(Agent::scrape).transpose()?;

    let segments = Segments::watch()?;
    let start = Instant::now();
    let outcomes = load::send(server.port, &load::requests(kind, args.requests.into()))?;
    println!("  requests took {:.1} s", start.elapsed().as_secs_f64());

    let server_after = at_rest(&server.metrics())?;
    let segments = segments.finish()?;
    keep("server-after.txt", &server_after)?;
    let mut agent_added = None;
    if let Some(watcher) = &mut watcher {
        let after = at_rest(&watcher.metrics())?;
        keep("agent-after.txt", &after)?;
        let after = Exposition::parse(&after)?;
        agent::without_losses(&after)?;
        if case.forwards() {
            agent::all_told(&after)?;
        }
        let (status, took) = watcher.stop()?;
        ensure!(status.success(), "the agent ended with {status}");
        println!("  agent ended {:.2} s after SIGTERM", took.as_secs_f64());
        agent_added = match agent_before {
            Some(before) => {
                keep("agent-before.txt", &before)?;
                Some(after.since(&Exposition::parse(&before)?))
            }
            None => Some(after),
        };
    }
    if let Some(mut recorder) = recorder {
        recorder.stop(Duration::from_secs(10))?;
    }
    let server_added = Exposition::parse(&server_after)?.since(&Exposition::parse(&server_before)?);
    Ok(Run {
        server: (case != Case::OmniOff).then(|| engines_as_replicas(server_added)),
        agent: agent_added,
        outcomes,
        segments,
    })
}

/// Whether the agent saw each segment go from stage to stage, and each one's size. A segment of unknown size has one
/// between the least and the greatest.
#[expect(clippy::cast_precision_loss, reason = "megabytes")]
fn hops_equal(segments: &[Option<u64>], agent: &Exposition) -> bool {
    let known: Vec<u64> = segments.iter().copied().flatten().collect();
    let unknown = (segments.len() - known.len()) as f64;
    let bytes = known.iter().sum::<u64>() as f64;
    let least = known.iter().min().map_or(0.0, |&size| size as f64);
    let most = known.iter().max().map_or(0.0, |&size| size as f64);
    let made = segments.len() as f64;
    let size = "vllm_omni:transfer_size_bytes";
    let times = ["tx", "rx", "in_flight"].map(|part| format!("vllm_omni:transfer_{part}_s"));
    let have = agent.sum(size, &[]).unwrap_or_default();
    let mut equal = (bytes + unknown * least - 0.5..bytes + unknown * most + 0.5).contains(&have);
    for family in [size].into_iter().chain(times.iter().map(String::as_str)) {
        equal &= (agent.total(family, &[]).unwrap_or_default() - made).abs() < 0.5;
    }
    let mean = |family: &String| {
        let (sum, count) = (agent.sum(family, &[]), agent.total(family, &[]));
        sum.zip(count)
            .map_or(0.0, |(sum, count)| sum / count.max(1.0) * 1e3)
    };
    let [tx, rx, in_flight] = times.each_ref().map(mean);
    println!(
        "  {} segments of the connector: {made} of {bytes} bytes ({unknown} of unknown size), agent {} of {have} \
         bytes; means tx {tx:.3} ms, rx {rx:.3} ms, in flight {in_flight:.3} ms",
        if equal { "equal" } else { "WRONG" },
        agent.total(size, &[]).unwrap_or_default(),
    );
    equal
}

fn recording(case: Case) -> PathBuf {
    setup::root().join(format!("tests/recordings/{}.jsonl.gz", case.name()))
}

/// A port that was free a moment ago.
pub(crate) fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// Scrapes until no family of ours has changed for a while; returns the last page.
pub(crate) fn at_rest(url: &str) -> Result<String> {
    let ours = |page: &str| -> Vec<String> {
        page.lines()
            .filter(|l| l.starts_with("vllm"))
            .map(str::to_owned)
            .collect()
    };
    let start = Instant::now();
    let mut page = load::get(url)?;
    let mut since = Instant::now();
    while since.elapsed() < QUIET {
        ensure!(
            start.elapsed() < Duration::from_mins(2),
            "{url} still changes after two minutes"
        );
        std::thread::sleep(Duration::from_millis(500));
        let next = load::get(url)?;
        if ours(&next) != ours(&page) {
            since = Instant::now();
        }
        page = next;
    }
    Ok(page)
}

/// Prints what was compared and what deviates.
fn show(report: &Report) {
    println!(
        "  {} non-zero children of {} families compared, {} deviations, {} without a reason",
        report.compared,
        report.families,
        report.deviations.len(),
        report.unexplained().count()
    );
    for sum in &report.sums {
        println!(
            "  sum   {:<42} {:<24} {:>5} samples, server {:>10.4} s, agent {:>10.4} s, {:+.2} ms a sample",
            sum.family,
            labels(&sum.labels),
            sum.samples,
            sum.server,
            sum.agent,
            (sum.agent - sum.server) / sum.samples * 1e3
        );
    }
    for deviation in &report.deviations {
        println!(
            "  {} {:<42} {:<24} {:<6}{} server {} agent {}  {}",
            if deviation.reason.is_some() {
                "known"
            } else {
                "WRONG"
            },
            deviation.family,
            labels(&deviation.labels),
            deviation.part,
            deviation.le.map_or_else(String::new, |le| format!(" le={le}")),
            deviation.server,
            deviation.agent,
            deviation.reason.as_deref().unwrap_or_default()
        );
    }
    for family in &report.unused {
        println!("  note: the parity table's row for {family} was not needed in this run");
    }
}

/// Labels for a person: short, and without the model's name, which is the same in a whole run.
fn labels(labels: &exposition::Labels) -> String {
    let shown: Vec<String> = labels
        .iter()
        .filter(|(name, _)| *name != "model_name")
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    let mut text = shown.join(",");
    if let Some((at, _)) = text.char_indices().nth(60) {
        text.truncate(at);
        text.push_str("...");
    }
    text
}
