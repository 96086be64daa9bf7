//! The effective configuration: file, environment and flags.
//!
//! One table holds every setting. A setting has one name: `web.listen-address` is the key of the YAML file,
//! `--web.listen-address` the flag and `OMNITAP_WEB_LISTEN_ADDRESS` the variable. Flags win over the environment, which
//! wins over the file, which wins over the defaults; a setting that takes several values is replaced as a whole.

mod values;

use std::{
    fmt,
    fmt::Write as _,
    fs,
    io::{self, Read as _},
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use clap::{
    Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches,
    builder::{BoolishValueParser, TypedValueParser as _},
    error::ErrorKind,
    parser::ValueSource,
};
use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, SeqAccess, Visitor},
};
use serde_saphyr::{Location, Spanned};

use self::values::Value;
pub use self::values::{
    DiffusionStages, EngineMetrics, FilePath, GroupName, ListenAddress, LogFormat, LogLevel, Mode, ModelName,
    RequestLog, Size, SocketPath,
};
use crate::metrics::merge::{FamilyOrder, Order};

/// Why there is no effective configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file can't be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The file is not YAML, or not a map of settings.
    #[error("{path}: {reason}")]
    Yaml {
        /// The file.
        path: PathBuf,
        /// The parser's words, with line, column and an excerpt.
        reason: String,
    },
    /// The file has a key that is no setting.
    #[error("{place}: unknown setting `{key}`{hint}")]
    Unknown {
        /// File, line and column.
        place: Origin,
        /// The key.
        key: String,
        /// The setting that was meant, perhaps.
        hint: String,
    },
    /// A value that the setting does not take.
    #[error("{origin}: {key}: {reason}")]
    Value {
        /// Where the value is from.
        origin: Origin,
        /// The setting.
        key: &'static str,
        /// What is wrong with it.
        reason: String,
    },
}

/// Where a value is from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Built in.
    Default,
    /// The configuration file.
    File {
        /// Its path as given.
        path: PathBuf,
        /// Line, from 1.
        line: u64,
        /// Column, from 1.
        column: u64,
    },
    /// A variable of the environment.
    Environment(String),
    /// The command line.
    Flag(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line, column } => write!(f, "{}:{line}:{column}", path.display()),
            Self::Environment(name) => write!(f, "environment variable {name}"),
            Self::Flag(name) => write!(f, "flag {name}"),
        }
    }
}

/// A row of the table of settings.
struct Setting {
    key: &'static str,
    value_name: &'static str,
    many: bool,
    boolean: bool,
    default: &'static [&'static str],
    limits: Option<(&'static str, &'static str)>,
    doc: &'static [&'static str],
    set: fn(&mut Config, &[String]) -> Result<(), String>,
    show: fn(&Config) -> Vec<String>,
}

impl Setting {
    fn variable(&self) -> String {
        format!("OMNITAP_{}", self.key.replace(['.', '-'], "_").to_uppercase())
    }

    /// The documentation as lines of text.
    fn lines(&self) -> impl Iterator<Item = &'static str> {
        self.doc.iter().map(|l| l.trim())
    }
}

macro_rules! settings {
    ($($(#[doc = $doc:literal])+ $field:ident: $type:ty = $key:literal, $default:expr $(, $lo:literal..=$hi:literal)?;)*) => {
        /// What the agent runs with.
        #[derive(Clone, Debug, PartialEq)]
        pub struct Config {
            $($(#[doc = $doc])+ pub $field: $type,)*
        }

        static SETTINGS: &[Setting] = &[$(Setting {
            key: $key,
            value_name: <$type as Value>::NAME,
            many: <$type as Value>::MANY,
            boolean: <$type as Value>::BOOLEAN,
            default: &$default,
            limits: limits!($($lo, $hi)?),
            doc: &[$($doc),+],
            set: |config, texts| {
                let value = <$type as Value>::parse(texts)?;
                $(values::within(&value, $lo, $hi)?;)?
                config.$field = value;
                Ok(())
            },
            show: |config| config.$field.show(),
        }),*];

        impl Default for Config {
            fn default() -> Self {
                Self {
                    $($field: <$type as Value>::of_default(&$default),)*
                }
            }
        }
    };
}

macro_rules! limits {
    () => {
        None
    };
    ($lo:literal, $hi:literal) => {
        Some(($lo, $hi))
    };
}

settings! {
    /// Address to serve HTTP on: `host:port`, `:port` for all addresses, `[::1]:port`, or `unix:/path/of/socket`, which
    /// only the agent's user and group may open. Repeat the flag for several; in the environment separate them by
    /// commas.
    listen: Vec<ListenAddress> = "web.listen-address", ["127.0.0.1:9477"];
    /// File with TLS certificates, users with their passwords' hashes and response headers, in the format that
    /// Prometheus and its exporters share (exporter-toolkit's web configuration). It is read anew when it changes, and
    /// does not concern Unix sockets.
    web_config: Option<PathBuf> = "web.config.file", [];
    /// Most HTTP connections at a time. For a further one that which has waited longest for its client is closed.
    max_connections: u32 = "web.max-connections", ["64"], "1"..="10000";
    /// Least severe level that is logged: error, warn, info, debug or trace.
    log_level: LogLevel = "log.level", ["info"];
    /// Form of the log on standard error: text or json.
    log_format: LogFormat = "log.format", ["text"];
    /// Whether frames are captured by eBPF probes. Off, the agent lists pipelines and serves what needs no probe.
    ebpf: bool = "ebpf", ["true"];
    /// Whether eBPF probes also capture what API servers read from and write to their HTTP connections, for what shows
    /// only there.
    http: bool = "http.enabled", ["true"];
    /// Most bytes of a frame that are captured; of a longer one its head and tail.
    capture_limit: Size = "tap.capture-limit", ["64KiB"], "1KiB"..="64KiB";
    /// Ring buffer between kernel and agent, taken up to the next power of two. It holds what pipelines send while the
    /// agent is busy, and is locked memory.
    ring_buffer: Size = "tap.ring-buffer", ["4MiB"], "256KiB"..="1GiB";
    /// Whether the kernel measures the run time of BPF programs while the agent runs, for `omnitap_bpf_*`. It does so
    /// for all programs of the host, at 20 to 30 ns a run.
    bpf_stats: bool = "tap.bpf-stats", ["false"];
    /// Pause between two looks at all processes. New processes are as a rule found at once, by the kernel's events.
    scan_interval: Duration = "host.scan-interval", ["5s"], "100ms"..="5m";
    /// Names for models that can't be told from a command line, as `PATTERN=NAME`: the first pattern that is part of the
    /// title or command line of a pipeline's root process, or of its parent's, gives `model_name`.
    model_names: Vec<ModelName> = "host.model-name", [];
    /// Where diffusion stages stand that run in processes of their own, as `PATTERN=STAGE/REPLICA`: the first pattern that
    /// is part of the command line of a pipeline's root process gives stage and replica of its diffusion processes, in
    /// the order of their start, separated by colons (`PATTERN=1/0:1/1`). Without it they are told by elimination and
    /// that order.
    diffusion_stages: Vec<DiffusionStages> = "host.diffusion-stage", [];
    /// Whether GPUs are looked at, by NVIDIA's management library (NVML). It is open only while a watched process uses a
    /// GPU.
    gpu: bool = "gpu.enabled", ["true"];
    /// Pause between two looks at the GPUs; longer where a look takes more than 0.3 % of it.
    gpu_interval: Duration = "gpu.interval", ["1s"], "100ms"..="1m";
    /// Files that may be libnvidia-ml.so.1, the first that works counts. Without them it is looked for where
    /// distributions, GPU operators and managed Kubernetes have it, and in the same places of the host's root.
    gpu_libraries: Vec<FilePath> = "gpu.library", [];
    /// What becomes of the engine's own `/metrics`: `fill` reads it, where it is found on loopback or the pod's own address,
    /// for families that no other source gives and for `omnitap_engine_disagreement`; `off` leaves it alone.
    engine_metrics: EngineMetrics = "engine-metrics", ["fill"];
    /// Pause between two reads of an engine's own `/metrics`.
    engine_interval: Duration = "engine-metrics.interval", ["15s"], "1s"..="10m";
    /// Whether the list of replicas that a coordinator publishes is listened to, where a distributed pipeline has one.
    coordinator: bool = "coordinator.enabled", ["true"];
    /// Coordinators of pipelines that have none on this host: the addresses at which they publish, as `IP:PORT`.
    coordinator_addresses: Vec<SocketAddr> = "coordinator.address", [];
    /// How long a request that left its stage waits for a next one before it counts as complete.
    grace: Duration = "pipeline.grace-time", ["2s"], "0s"..="10m";
    /// Where stat events are taken (docs/stat-events.md), as a Unix socket; `off`: nowhere. Where it can't be made the
    /// agent works without.
    stat_path: SocketPath = "stat-socket.path", ["/run/omnitap/stats.sock"];
    /// Permissions of its file, octal. They say who may connect; events are taken of processes of the watched pipelines,
    /// of root, of the agent's own user and of the groups below.
    stat_mode: Mode = "stat-socket.mode", ["0660"];
    /// Groups, by name or number, whose members may send events about any pipeline. The socket's file belongs to the
    /// first of them.
    stat_groups: Vec<GroupName> = "stat-socket.group", [];
    /// Most connections to it at a time; further ones are closed at once.
    stat_connections: u32 = "stat-socket.max-connections", ["64"], "1"..="4096";
    /// Most events a second that are read of one connection; a faster sender waits.
    stat_rate: u32 = "stat-socket.max-rate", ["100000"], "1"..="10000000";
    /// Which source serves a family when several have it, the first of those that give samples: `stat_socket` (events
    /// that the orchestrator pushes), `tap` (what the agent sees by itself), `engine` (the engine's own `/metrics`). One
    /// that is left out serves nothing.
    precedence: Order = "sources.precedence", ["stat_socket>tap>engine"];
    /// Other orders for some families, as `FAMILY=ORDER`, the first match counts. A name may end in `*`:
    /// `vllm_omni:transfer_*=tap>engine`.
    family_precedence: Vec<FamilyOrder> = "sources.family-precedence", [];
    /// Whether a record of each request that ends is kept for `omnitap requests` and `omnitap top`, on `/api/requests`: its
    /// id, times, tokens and transfers by stage. Request ids are in no other answer of the agent's, and many API servers
    /// take them from their clients.
    requests: bool = "requests.enabled", ["false"];
    /// Records that are kept; the oldest makes room for the newest.
    requests_keep: u32 = "requests.keep", ["1000"], "1"..="100000";
    /// Most records a second that are kept or logged; further ones are dropped and counted
    /// (`omnitap_request_records_total`).
    requests_rate: u32 = "requests.max-rate", ["100"], "1"..="100000";
    /// Whether these records also go to the log: `text` (a summary and tables of several lines), `json` (one object each)
    /// or `off`. It works without `requests.enabled`.
    requests_log: RequestLog = "requests.log", ["off"];
    /// How long counters and histograms stay on `/metrics` after their pipeline ended.
    retention: Duration = "metrics.retention", ["15m"], "0s"..="7d";
    /// Most sample lines of all pipelines together; new series beyond it are refused and counted.
    max_series: u32 = "metrics.max-series", ["50000"], "1000"..="5000000";
    /// How long a stop may take: probes are taken off and open scrapes end.
    shutdown_timeout: Duration = "shutdown-timeout", ["4s"], "100ms"..="5m";
}

/// Settings as they came from the command line and the environment, not yet checked.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    file: Option<PathBuf>,
    /// By place in the table.
    given: Vec<(usize, Vec<String>, Origin)>,
}

const FILE: &str = "config.file";
const FILE_VARIABLE: &str = "OMNITAP_CONFIG_FILE";

impl Args for Flags {
    fn augment_args(mut command: Command) -> Command {
        command = command.arg(
            Arg::new(FILE)
                .long(FILE)
                .env(FILE_VARIABLE)
                .value_name("FILE")
                .value_parser(clap::value_parser!(PathBuf))
                .help("YAML file with settings"),
        );
        for setting in SETTINGS {
            let doc: Vec<&str> = setting.lines().collect();
            let mut help = doc.join(" ");
            if !setting.default.is_empty() {
                let _ = write!(help, " [default: {}]", setting.default.join(","));
            }
            let mut arg = Arg::new(setting.key)
                .long(setting.key)
                .env(setting.variable())
                .value_name(setting.value_name)
                .help(help);
            if setting.many {
                arg = arg.action(ArgAction::Append).value_delimiter(',');
            }
            if setting.boolean {
                // As Prometheus programs have it: `--ebpf`, `--no-ebpf`.
                let no = format!("no-{}", setting.key);
                command = command.arg(
                    Arg::new(no.clone())
                        .long(no.clone())
                        .action(ArgAction::SetTrue)
                        .help(format!("The same as --{}=false", setting.key)),
                );
                arg = arg
                    .value_parser(BoolishValueParser::new().map(|b: bool| b.to_string()))
                    .num_args(0..=1)
                    .require_equals(true)
                    .default_missing_value("true");
            }
            command = command.arg(arg);
        }
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Flags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut given = Vec::new();
        for (at, setting) in SETTINGS.iter().enumerate() {
            let no = format!("no-{}", setting.key);
            if setting.boolean && matches.get_flag(&no) {
                if matches.value_source(setting.key) == Some(ValueSource::CommandLine) {
                    let message = format!("`--{}` and `--{no}` contradict each other\n", setting.key);
                    return Err(clap::Error::raw(ErrorKind::ArgumentConflict, message));
                }
                given.push((at, vec!["false".to_owned()], Origin::Flag(format!("--{no}"))));
                continue;
            }
            let Some(texts) = matches.get_many::<String>(setting.key) else {
                continue;
            };
            let origin = match matches.value_source(setting.key) {
                Some(ValueSource::EnvVariable) => Origin::Environment(setting.variable()),
                _ => Origin::Flag(format!("--{}", setting.key)),
            };
            let texts: Vec<String> = texts.cloned().collect();
            // Unset, as unit files and compose files mean it.
            if matches!(origin, Origin::Environment(_)) && texts.iter().all(String::is_empty) {
                continue;
            }
            given.push((at, texts, origin));
        }
        Ok(Self {
            file: matches.get_one::<PathBuf>(FILE).cloned(),
            given,
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Largest configuration file in bytes: a device or a wrong file must not fill memory.
const MAX_FILE: u64 = 1 << 20;

fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    let length = fs::File::open(path)?
        .take(MAX_FILE + 1)
        .read_to_string(&mut text)?;
    if length as u64 > MAX_FILE {
        return Err(io::Error::other(format!(
            "longer than {MAX_FILE} bytes: no configuration file"
        )));
    }
    Ok(text)
}

/// A configuration, and where each of its values is from.
#[derive(Clone, Debug)]
pub struct Effective {
    /// The values.
    pub config: Config,
    /// By place in the table.
    origins: Vec<Origin>,
}

impl Effective {
    /// Puts the layers together: defaults, the file that the flags name, environment, flags.
    pub fn load(flags: &Flags) -> Result<Self, ConfigError> {
        let mut effective = Self {
            config: Config::default(),
            origins: vec![Origin::Default; SETTINGS.len()],
        };
        if let Some(path) = &flags.file {
            let text = read(path).map_err(|source| ConfigError::Read {
                path: path.clone(),
                source,
            })?;
            effective.apply_file(path, &text)?;
        }
        for (at, texts, origin) in &flags.given {
            effective.apply(*at, texts, origin.clone())?;
        }
        if effective.config.listen.is_empty() {
            let at = SETTINGS
                .iter()
                .position(|setting| setting.key == "web.listen-address");
            return Err(ConfigError::Value {
                origin: at
                    .and_then(|at| effective.origins.get(at).cloned())
                    .unwrap_or(Origin::Default),
                key: "web.listen-address",
                reason: "at least one address is needed".to_owned(),
            });
        }
        Ok(effective)
    }

    fn apply_file(&mut self, path: &Path, text: &str) -> Result<(), ConfigError> {
        let entries: Option<Entries> = serde_saphyr::from_str(text).map_err(|e| ConfigError::Yaml {
            path: path.to_owned(),
            reason: e.to_string(),
        })?;
        let origin = |at: Location| Origin::File {
            path: path.to_owned(),
            line: at.line(),
            column: at.column(),
        };
        for (key, value) in entries.map(|e| e.0).unwrap_or_default() {
            let Some(at) = SETTINGS.iter().position(|s| s.key == key.value) else {
                return Err(ConfigError::Unknown {
                    place: origin(key.referenced),
                    hint: hint(&key.value),
                    key: key.value,
                });
            };
            self.apply(at, &value.value.0, origin(value.referenced))?;
        }
        Ok(())
    }

    fn apply(&mut self, at: usize, texts: &[String], origin: Origin) -> Result<(), ConfigError> {
        let Some(setting) = SETTINGS.get(at) else {
            return Ok(());
        };
        (setting.set)(&mut self.config, texts).map_err(|reason| ConfigError::Value {
            origin: origin.clone(),
            key: setting.key,
            reason,
        })?;
        if let Some(slot) = self.origins.get_mut(at) {
            *slot = origin;
        }
        Ok(())
    }

    /// The configuration as a YAML file with comments, which gives the same configuration again.
    #[must_use]
    pub fn to_yaml(&self) -> String {
        let mut text = String::from("# Effective configuration of omnitap.\n");
        for (setting, origin) in SETTINGS.iter().zip(&self.origins) {
            text.push('\n');
            for line in setting.lines() {
                let _ = writeln!(text, "# {line}");
            }
            if let Some((lo, hi)) = setting.limits {
                let _ = writeln!(text, "# From {lo} to {hi}.");
            }
            let _ = writeln!(text, "# Value from: {origin}");
            let values: Vec<String> = (setting.show)(&self.config)
                .iter()
                .map(|v| if setting.boolean { v.clone() } else { quote(v) })
                .collect();
            let value = if setting.many {
                format!("[{}]", values.join(", "))
            } else {
                values.concat()
            };
            let _ = writeln!(text, "{}: {value}", setting.key);
        }
        text
    }
}

/// A string as YAML takes it in any place: JSON's form, which is YAML as well.
fn quote(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// " (did you mean `x`?)", where a setting has the same last part, or differs by case and separators alone.
fn hint(key: &str) -> String {
    let plain = |k: &str| k.to_lowercase().replace(['-', '_', '.'], "");
    let last = |k: &str| plain(k.rsplit('.').next().unwrap_or(k));
    SETTINGS
        .iter()
        .find(|s| plain(s.key) == plain(key))
        .or_else(|| SETTINGS.iter().find(|s| last(s.key) == last(key)))
        .map_or_else(
            || "; `omnitap config` prints them all".to_owned(),
            |s| format!(" (did you mean `{}`?)", s.key),
        )
}

/// The page docs/configuration.md.
#[must_use]
pub fn markdown() -> String {
    let mut text = String::from(MARKDOWN_HEAD);
    for setting in SETTINGS {
        let _ = write!(text, "\n## `{}`\n\n", setting.key);
        for line in setting.lines() {
            let _ = writeln!(text, "{line}");
        }
        let default = match setting.default {
            [] => "empty".to_owned(),
            values => format!("`{}`", values.join(",")),
        };
        let no = if setting.boolean {
            format!(", `--no-{}`", setting.key)
        } else {
            String::new()
        };
        let _ = write!(
            text,
            "\n- Flag: `--{}`{no}; variable: `{}`\n- Default: {default}",
            setting.key,
            setting.variable()
        );
        if let Some((lo, hi)) = setting.limits {
            let _ = write!(text, "; from `{lo}` to `{hi}`");
        }
        text.push('\n');
    }
    text
}

const MARKDOWN_HEAD: &str = "\
# Configuration

<!-- Written from the table of settings in agent/src/config.rs; a test compares it with the code. -->

Every setting has a default that works. A setting can be given in a YAML file (`--config.file FILE`, or
`OMNITAP_CONFIG_FILE`), in the environment, and as a flag. Flags win over the environment, the environment wins over
the file, and the file over the defaults. A setting with several values is replaced as a whole.

The file is a flat map with the names below as keys:

```yaml
web.listen-address: [\"127.0.0.1:9477\", \"[::1]:9477\"]
log.format: json
metrics.retention: 30m
```

Durations are written as `250ms`, `2s`, `15m`, `1h 30m` or `7d`, sizes as `65536`, `64KiB` or `8MiB`. A key that is no
setting is an error, and so is a value out of range; the message has file, line and column, and the exit status is 64.

`omnitap config`, with the flags and environment that the agent gets, prints the effective configuration, and for each
value where it is from. The output is a configuration file again.
";

/// The file: its keys and values in their order, with their places.
struct Entries(Vec<(Spanned<String>, Spanned<Texts>)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EntriesVisitor;

        impl<'de> Visitor<'de> for EntriesVisitor {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of settings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }

        deserializer.deserialize_map(EntriesVisitor)
    }
}

/// A scalar or a list of scalars, as text.
struct Texts(Vec<String>);

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextsVisitor;

        impl<'de> Visitor<'de> for TextsVisitor {
            type Value = Texts;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value or a list of values")
            }

            fn visit_str<E>(self, text: &str) -> Result<Texts, E> {
                Ok(Texts(vec![text.to_owned()]))
            }

            fn visit_bool<E>(self, value: bool) -> Result<Texts, E> {
                Ok(Texts(vec![value.to_string()]))
            }

            fn visit_u64<E>(self, value: u64) -> Result<Texts, E> {
                Ok(Texts(vec![value.to_string()]))
            }

            fn visit_i64<E>(self, value: i64) -> Result<Texts, E> {
                Ok(Texts(vec![value.to_string()]))
            }

            fn visit_f64<E>(self, value: f64) -> Result<Texts, E> {
                Ok(Texts(vec![value.to_string()]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Texts, A::Error> {
                let mut texts = Vec::new();
                while let Some(Texts(text)) = seq.next_element()? {
                    texts.extend(text);
                }
                Ok(Texts(texts))
            }
        }

        deserializer.deserialize_any(TextsVisitor)
    }
}
