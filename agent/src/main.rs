//! The `omnitap` command: reads the command line and hands over to the library.

use std::{
    fs::File,
    io::{self, BufWriter, Write},
    path::Path,
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context, Result};
use omnitap::{
    agent::{Agent, Recorder, Settings},
    check,
    cli::{Cli, Command, EX_USAGE},
    config::{Config, Effective, EngineMetrics, Flags, ListenAddress},
    coordinator::subscribe::Settings as CoordinatorSettings,
    fill::scrape::Settings as FillSettings,
    gpu::sampler::Settings as GpuSettings,
    host::scan::Settings as HostSettings,
    logging,
    metrics::{catalogue, merge::Merge, registry::Limits, text::Format},
    observer::Observer,
    pipeline::tracker::Limits as TrackerLimits,
    record::{Entries, Entry, Writer},
    requests::{self, Page, Requests, client, text::Tables},
    serve::{Content, Server, Settings as WebSettings, Status},
    statsock::Settings as StatSettings,
    tap::Settings as TapSettings,
    top,
};
use tokio::signal::unix::{SignalKind, signal};
use tracing::{error, info, warn};

/// Time between copies of the tap's counters into the agent's own families.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(2);

fn main() -> ExitCode {
    let cli = match Cli::read(std::env::args_os()) {
        Ok(cli) => cli,
        Err(status) => return status,
    };
    let done = match cli.command {
        Command::Run(flags) => with_config(&flags, |config| run(config, None)),
        Command::Record {
            file,
            with_content,
            flags,
        } => with_config(&flags, |config| run(config, Some((&file, with_content)))),
        Command::Check { json, flags } => with_config(&flags, |config| check(config, json)),
        Command::Config(flags) => return config(&flags),
        Command::Families { markdown } => print(&if markdown {
            catalogue::markdown()
        } else {
            catalogue::list()
        }),
        Command::Replay { file, openmetrics } => replay(&file, openmetrics),
        Command::Requests { agent, json, once } => follow(&agent.address, json, once),
        Command::Top(agent) => top::run(&agent.address)
            .map(|()| ExitCode::SUCCESS)
            .map_err(Into::into),
        Command::Version => print(&format!("omnitap {}\n", env!("CARGO_PKG_VERSION"))),
    };
    match done {
        Ok(status) => status,
        Err(error) => {
            eprintln!("omnitap: {}", told(&error));
            ExitCode::FAILURE
        }
    }
}

/// An error with its causes, each once: many name their cause in their own text.
fn told(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |told, cause| {
        let cause = cause.to_string();
        match told.as_str() {
            "" => cause,
            so_far if so_far.contains(&cause) => told,
            so_far => format!("{so_far}: {cause}"),
        }
    })
}

fn with_config(flags: &Flags, then: impl FnOnce(&Config) -> Result<ExitCode>) -> Result<ExitCode> {
    match Effective::load(flags) {
        Ok(effective) => then(&effective.config),
        Err(error) => {
            eprintln!("omnitap: {error}");
            Ok(ExitCode::from(EX_USAGE))
        }
    }
}

fn config(flags: &Flags) -> ExitCode {
    match Effective::load(flags) {
        Ok(effective) => print(&effective.to_yaml()).unwrap_or(ExitCode::FAILURE),
        Err(error) => {
            eprintln!("omnitap: {error}");
            ExitCode::from(EX_USAGE)
        }
    }
}

/// Prints to standard output; a reader that has gone (`| head`) is no error.
fn print(text: &str) -> Result<ExitCode> {
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(error).context("cannot write to standard output")
        }
        _ => Ok(ExitCode::SUCCESS),
    }
}

fn tap_settings(config: &Config) -> Option<TapSettings> {
    config.ebpf.then(|| TapSettings {
        capture_limit: config.capture_limit.0,
        ring_bytes: config.ring_buffer.0,
        bpf_stats: config.bpf_stats,
        ..TapSettings::default()
    })
}

fn fill_settings(config: &Config) -> Option<FillSettings> {
    (config.engine_metrics == EngineMetrics::Fill).then(|| FillSettings {
        interval: config.engine_interval,
        proc_root: HostSettings::default().proc_root,
    })
}

fn gpu_settings(config: &Config) -> Option<GpuSettings> {
    config.gpu.then(|| GpuSettings {
        interval: config.gpu_interval,
        libraries: config.gpu_libraries.iter().map(|file| file.0.clone()).collect(),
        proc_root: HostSettings::default().proc_root,
    })
}

fn web_settings(config: &Config) -> WebSettings {
    WebSettings {
        listen: config.listen.clone(),
        max_connections: config.max_connections,
        web_config: config.web_config.clone(),
    }
}

fn observer(config: &Config) -> Observer {
    let limits = Limits {
        max_series: usize::try_from(config.max_series).unwrap_or(usize::MAX),
        retention: config.retention,
    };
    let next_stage_grace_ns = u64::try_from(config.grace.as_nanos()).unwrap_or(u64::MAX);
    Observer::with_sources(
        limits,
        TrackerLimits {
            next_stage_grace_ns,
            ..TrackerLimits::default()
        },
        Merge::new(config.precedence, &config.family_precedence),
    )
}

fn stat_settings(config: &Config) -> Option<StatSettings> {
    Some(StatSettings {
        path: config.stat_path.0.clone()?,
        mode: config.stat_mode.0,
        groups: config.stat_groups.iter().map(|group| group.0.clone()).collect(),
        max_connections: usize::try_from(config.stat_connections).unwrap_or(usize::MAX),
        max_rate: config.stat_rate,
    })
}

fn requests_settings(config: &Config) -> requests::Settings {
    requests::Settings {
        served: config.requests,
        keep: usize::try_from(config.requests_keep).unwrap_or(usize::MAX),
        max_rate: config.requests_rate,
        log: config.requests_log,
    }
}

fn check(config: &Config, json: bool) -> Result<ExitCode> {
    let gpu = gpu_settings(config);
    let report = check::run(
        gpu.as_ref().map(|gpu| gpu.libraries.as_slice()),
        stat_settings(config).as_ref(),
    );
    print(&if json {
        report.to_json()?
    } else {
        report.to_string()
    })?;
    Ok(if report.works() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// `omnitap run`, and `omnitap record` where a file is named.
fn run(config: &Config, recording: Option<(&Path, bool)>) -> Result<ExitCode> {
    logging::init(config.log_level, config.log_format);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("omnitap-http")
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
        let mut hang_up = signal(SignalKind::hangup()).context("cannot listen for SIGHUP")?;
        let mut observer = observer(config);
        let requests = Requests::new(requests_settings(config), observer.own());
        if let Some(requests) = &requests {
            observer.tell_requests(requests.clone());
        }
        let status = Status::default();
        let content = Content {
            exposition: observer.exposition(),
            own: observer.own(),
            status: status.clone(),
            requests,
        };
        let server = Server::bind(&web_settings(config), content).await?;
        let (recorder, finish) = match recording {
            Some((file, with_content)) => recorder(file, with_content)?,
            None => (None, None),
        };
        let settings = Settings {
            tap: tap_settings(config),
            http: config.http,
            host: HostSettings {
                scan_interval: config.scan_interval,
                diffusion_stages: config
                    .diffusion_stages
                    .iter()
                    .map(|stages| stages.0.clone())
                    .collect(),
                ..HostSettings::default()
            },
            gpu: gpu_settings(config),
            fill: fill_settings(config),
            coordinator: config.coordinator.then(|| CoordinatorSettings {
                addresses: config.coordinator_addresses.clone(),
                proc_root: HostSettings::default().proc_root,
            }),
            model_names: config.model_names.clone(),
            shutdown_timeout: config.shutdown_timeout,
            stat_socket: stat_settings(config),
        };
        let mut agent = Agent::start(&settings, observer, &status, recorder)?;
        if let Some(reads) = agent.engine_reads() {
            tokio::spawn(reads);
        }
        if let Some(lists) = agent.coordinator_lists() {
            tokio::spawn(lists);
        }
        for place in server.places() {
            info!("serving {place}");
        }
        let mut failed = false;
        let watch = async {
            let mut sample = tokio::time::interval(SAMPLE_INTERVAL);
            loop {
                tokio::select! {
                    _ = terminate.recv() => break,
                    _ = interrupt.recv() => break,
                    _ = hang_up.recv() => break,
                    _ = sample.tick() => agent.sample(),
                }
                if !agent.is_alive() {
                    error!(
                        "a thread of the agent has ended: stopping, so that whoever watches it starts it anew"
                    );
                    failed = true;
                    break;
                }
            }
        };
        server.run(watch, Duration::from_millis(200)).await;
        info!("stopping");
        let left = tokio::task::spawn_blocking(move || agent.stop())
            .await
            .context("cannot stop the agent")?;
        if left > 0 {
            warn!(
                left,
                "probes are still on their way out; they go with this process"
            );
        }
        if let Some(finish) = finish {
            finish()?;
        }
        Ok(if failed {
            ExitCode::FAILURE
        } else {
            ExitCode::SUCCESS
        })
    })
}

/// Pause between two questions of `omnitap requests`.
const FOLLOW_INTERVAL: Duration = Duration::from_secs(1);

/// `omnitap requests`: prints the records that the agent has, and further ones as they come.
fn follow(agent: &ListenAddress, json: bool, once: bool) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(async {
        let mut last = 0;
        loop {
            let page: Page = client::get(agent, &format!("/api/requests?after={last}")).await?;
            last = page.last;
            if page.missed > 0 {
                let missed = page.missed;
                eprintln!(
                    "omnitap: {missed} records were missed: requests.keep says how many the agent keeps"
                );
            }
            let mut lines = String::new();
            for record in &page.records {
                if json {
                    lines += &serde_json::to_string(record)?;
                } else {
                    lines += &Tables(record).to_string();
                }
                lines.push('\n');
            }
            match io::stdout().write_all(lines.as_bytes()) {
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(ExitCode::SUCCESS),
                written => written.context("cannot write to standard output")?,
            }
            if page.more {
                continue;
            }
            if once {
                return Ok(ExitCode::SUCCESS);
            }
            tokio::time::sleep(FOLLOW_INTERVAL).await;
        }
    })
}

type Finish = Box<dyn FnOnce() -> Result<()> + Send>;

/// Opens a recording: what takes the entries, and what ends the file.
fn recorder(file: &Path, with_content: bool) -> Result<(Option<Recorder>, Option<Finish>)> {
    let out = File::create(file).with_context(|| format!("cannot create {}", file.display()))?;
    let writer = Writer::new(BufWriter::new(out), !with_content)?;
    let shared = std::sync::Arc::new(parking_lot::Mutex::new(Some(writer)));
    let name = file.to_path_buf();
    let entries = std::sync::Arc::clone(&shared);
    let recorder = Recorder {
        redact: !with_content,
        entry: Box::new(move |entry: &Entry| match entries.lock().as_mut() {
            Some(writer) => writer.entry(entry),
            None => Ok(()),
        }),
    };
    let finish: Finish = Box::new(move || {
        if let Some(writer) = shared.lock().take() {
            writer
                .finish()?
                .flush()
                .with_context(|| format!("cannot write {}", name.display()))?;
        }
        Ok(())
    });
    Ok((Some(recorder), Some(finish)))
}

fn replay(file: &Path, openmetrics: bool) -> Result<ExitCode> {
    let input = File::open(file).with_context(|| format!("cannot read {}", file.display()))?;
    let mut observer = observer(&Config::default());
    let mut damage = None;
    for entry in Entries::new(input).with_context(|| file.display().to_string())? {
        match entry {
            Ok(entry) => observer.replay(&entry),
            Err(error) => {
                damage = Some(error);
                break;
            }
        }
    }
    let mut out = Vec::new();
    observer.exposition().render_pipelines(
        &mut out,
        if openmetrics {
            Format::OpenMetrics
        } else {
            Format::Text
        },
    );
    let printed = print(&String::from_utf8(out).context("the exposition is not UTF-8")?)?;
    match damage {
        None => Ok(printed),
        Some(error) => {
            Err(error).with_context(|| format!("{}: only the part before the damage counts", file.display()))
        }
    }
}
