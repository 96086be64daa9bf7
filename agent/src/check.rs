//! What this machine lacks for the tap, each condition with its remedy.
//!
//! [`run`] reads the facts, judges them, and then really tries: it loads the programs, makes the ring buffer
//! and probes a function of its own process. The trial decides whether the tap works; the other conditions
//! say why it does not.

use std::{
    collections::HashSet,
    fmt, fs, io,
    path::{Path, PathBuf},
    sync::mpsc::channel,
    time::Duration,
};

use serde::Serialize;

use crate::{
    gpu::{self, Trial, sample::State},
    host::{
        identity::Change,
        scan::{Host, Settings as HostSettings},
    },
    statsock,
    tap::{
        self, ProbeSet, Settings, SiteKind, Tap, TapError,
        site::Arch,
        target::{Finder, Place},
    },
};

/// A call of NVML that takes longer hangs in the driver.
const NVML_TIMEOUT: Duration = Duration::from_secs(10);

/// Inodes of the initial namespaces (`include/linux/proc_ns.h`), the same in every kernel.
const INITIAL_PID_NAMESPACE: &str = "pid:[4026531836]";
const INITIAL_USER_NAMESPACE: &str = "user:[4026531837]";

/// How a condition stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// As it should be.
    Pass,
    /// The tap works, with less or untested.
    Warn,
    /// The tap can't work.
    Fail,
}

/// One condition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Item {
    /// What is looked at.
    pub name: &'static str,
    /// How it stands.
    pub status: Status,
    /// What was found.
    pub evidence: String,
    /// What to do about it; empty where nothing is to be done.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub remedy: &'static str,
}

/// All conditions, in the order of their reading.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The conditions.
    pub items: Vec<Item>,
}

impl Report {
    /// Whether the tap can work here.
    #[must_use]
    pub fn works(&self) -> bool {
        self.items.iter().all(|item| item.status != Status::Fail)
    }

    /// The report as JSON, with `works` beside the conditions.
    pub fn to_json(&self) -> serde_json::Result<String> {
        #[derive(Serialize)]
        struct Whole<'a> {
            works: bool,
            items: &'a [Item],
        }
        serde_json::to_string_pretty(&Whole {
            works: self.works(),
            items: &self.items,
        })
    }

    fn add(&mut self, name: &'static str, status: Status, evidence: impl Into<String>, remedy: &'static str) {
        let remedy = if status == Status::Pass { "" } else { remedy };
        self.items.push(Item {
            name,
            status,
            evidence: evidence.into(),
            remedy,
        });
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.items.iter().map(|item| item.name.len()).max().unwrap_or(0);
        for Item {
            name,
            status,
            evidence,
            remedy,
        } in &self.items
        {
            let status = match status {
                Status::Pass => "ok",
                Status::Warn => "warn",
                Status::Fail => "FAIL",
            };
            writeln!(f, "{status:<4}  {name:<width$}  {evidence}")?;
            if !remedy.is_empty() {
                writeln!(f, "{:6}{:width$}  -> {remedy}", "", "")?;
            }
        }
        if self.works() {
            writeln!(f, "\nThe tap works here.")
        } else {
            writeln!(
                f,
                "\nThe tap can't work here. `omnitap run --no-ebpf` serves what needs no tap."
            )
        }
    }
}

/// Looks at everything and tries the tap, and NVML where `gpu` is given: files that may be its library, none for where
/// hosts have it.
#[must_use]
pub fn run(gpu: Option<&[PathBuf]>, stat_socket: Option<&statsock::Settings>) -> Report {
    let facts = Facts::read();
    let mut report = facts.judge();
    try_map_files(&mut report);
    try_tap(&facts, &mut report);
    if let Some(libraries) = gpu {
        let libraries = libraries.to_vec();
        let (done, answer) = channel();
        // Left behind where a call hangs.
        std::thread::spawn(move || done.send(gpu::trial(&libraries)));
        judge_nvml(answer.recv_timeout(NVML_TIMEOUT).ok(), &mut report);
    }
    try_stat_socket(stat_socket, &mut report);
    report
}

/// `None`: no answer.
fn judge_nvml(answer: Option<Result<Trial, State>>, report: &mut Report) {
    let (status, found, remedy) = match answer {
        Some(Ok(Trial {
            library,
            driver,
            gpus,
        })) => (
            if gpus > 0 { Status::Pass } else { Status::Warn },
            format!(
                "{}, driver {}, GPUs: {gpus}",
                library.display(),
                driver.as_deref().unwrap_or("unknown")
            ),
            "give the container the GPUs (`NVIDIA_VISIBLE_DEVICES=all`, or /dev of the host) to see their memory",
        ),
        Some(Err(State::NoLibrary)) => (
            Status::Pass,
            format!("no {}: GPUs are not looked at", gpu::library::NAME),
            "",
        ),
        Some(Err(State::NoDriver)) => (
            Status::Warn,
            "the library is here, the driver is not loaded".to_owned(),
            "load the driver (`modprobe nvidia`); the agent tries again by itself",
        ),
        Some(Err(State::VersionMismatch)) => (
            Status::Warn,
            "library and driver are of different versions".to_owned(),
            "load the new driver, or restart the host; the agent tries again by itself",
        ),
        Some(Err(State::NoPermission)) => (
            Status::Warn,
            "the driver refuses this process".to_owned(),
            "run as root with the host's /dev/nvidia* devices",
        ),
        Some(Err(_)) => (
            Status::Warn,
            "the driver does not answer as it should".to_owned(),
            "see the kernel's log (`dmesg | grep NVRM`); without NVML the families of GPUs are missing",
        ),
        None => (
            Status::Warn,
            format!("no answer from the driver in {} s", NVML_TIMEOUT.as_secs()),
            "see the kernel's log (`dmesg | grep NVRM`); the agent goes on without GPUs until it answers",
        ),
    };
    report.add("NVML", status, found, remedy);
}

/// The stat socket is no condition of the tap: without it no stat events are taken.
fn try_stat_socket(settings: Option<&statsock::Settings>, report: &mut Report) {
    let (status, evidence) = match settings.map(statsock::probe) {
        None => (Status::Pass, "off".to_owned()),
        Some(Ok(found)) => (Status::Pass, found),
        Some(Err(error)) => (Status::Warn, error.to_string()),
    };
    report.add(
        "stat socket",
        status,
        evidence,
        "set stat-socket.path to a place that the agent may write, or to off",
    );
}

/// What the conditions are judged by.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub struct Facts {
    /// `/proc/sys/kernel/osrelease`.
    pub release: String,
    /// Effective capabilities, a bit each.
    pub capabilities: u64,
    /// `/proc/self/ns/pid` and `/proc/self/ns/user`.
    pub pid_namespace: String,
    /// As above.
    pub user_namespace: String,
    /// `/sys/kernel/security/lockdown`, where there is one.
    pub lockdown: Option<String>,
    /// `/proc/sys/kernel/perf_event_paranoid`.
    pub perf_event_paranoid: Option<i32>,
    /// `/proc/sys/kernel/yama/ptrace_scope`, where Yama is built in.
    pub ptrace_scope: Option<i32>,
    /// Whether the kernel offers probes in user space by `perf_event_open`.
    pub uprobes: bool,
    /// Whether the kernel carries its type information.
    pub btf: bool,
    /// Whether tracefs is mounted.
    pub tracefs: bool,
    /// Whether a seccomp filter is on this process.
    pub seccomp_filter: bool,
}

impl Facts {
    /// Reads them; what can't be read counts as absent.
    #[must_use]
    pub fn read() -> Self {
        let text = |path: &str| fs::read_to_string(path).ok().map(|s| s.trim().to_owned());
        let link = |path: &str| {
            fs::read_link(path)
                .map(|p| p.to_string_lossy().into_owned())
                .unwrap_or_default()
        };
        let status = text("/proc/self/status").unwrap_or_default();
        let field = |name: &str| {
            status
                .lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
                .map(str::trim)
        };
        Self {
            release: text("/proc/sys/kernel/osrelease").unwrap_or_default(),
            capabilities: field("CapEff")
                .and_then(|hex| u64::from_str_radix(hex, 16).ok())
                .unwrap_or(0),
            pid_namespace: link("/proc/self/ns/pid"),
            user_namespace: link("/proc/self/ns/user"),
            lockdown: text("/sys/kernel/security/lockdown"),
            perf_event_paranoid: text("/proc/sys/kernel/perf_event_paranoid").and_then(|s| s.parse().ok()),
            ptrace_scope: text("/proc/sys/kernel/yama/ptrace_scope").and_then(|s| s.parse().ok()),
            uprobes: Path::new("/sys/bus/event_source/devices/uprobe/type").exists(),
            btf: Path::new("/sys/kernel/btf/vmlinux").exists(),
            tracefs: ["/sys/kernel/tracing/events", "/sys/kernel/debug/tracing/events"]
                .iter()
                .any(|path| Path::new(path).exists()),
            seccomp_filter: field("Seccomp") == Some("2"),
        }
    }

    /// Judges them. Pure.
    #[must_use]
    pub fn judge(&self) -> Report {
        let mut report = Report::default();
        self.judge_kernel(&mut report);
        self.judge_namespaces(&mut report);
        self.judge_capabilities(&mut report);
        self.judge_restrictions(&mut report);
        report
    }

    fn version(&self) -> Option<(u32, u32)> {
        let mut numbers = self.release.split(|c: char| !c.is_ascii_digit());
        Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    }

    fn has(&self, capability: Capability) -> bool {
        self.capabilities & 1 << capability.bit() != 0
    }

    fn judge_kernel(&self, report: &mut Report) {
        let (status, note) = match self.version() {
            None => (Status::Warn, ", which names no version"),
            Some(version) if version < (5, 8) => (Status::Fail, ", too old: BPF ring buffers came with 5.8"),
            Some(version) if version < (5, 10) => (Status::Warn, ", not tested: 5.10 is the oldest that is"),
            Some(_) => (Status::Pass, ""),
        };
        report.add(
            "kernel",
            status,
            format!("Linux {}{note}", self.release),
            "use Linux 5.10 or newer",
        );
        let found = if self.uprobes { "has" } else { "lacks" };
        report.add(
            "uprobes",
            if self.uprobes { Status::Pass } else { Status::Fail },
            format!("the kernel {found} /sys/bus/event_source/devices/uprobe"),
            "use a kernel built with CONFIG_UPROBE_EVENTS, and mount /sys in the container",
        );
        let found = if self.btf {
            "there, not needed"
        } else {
            "absent, not needed"
        };
        report.add("type information (BTF)", Status::Pass, found, "");
        let found = if self.tracefs {
            "mounted, not needed"
        } else {
            "not mounted, not needed"
        };
        report.add("tracefs", Status::Pass, found, "");
    }

    fn judge_namespaces(&self, report: &mut Report) {
        report.add(
            "PID namespace",
            if self.pid_namespace == INITIAL_PID_NAMESPACE {
                Status::Pass
            } else {
                Status::Fail
            },
            if self.pid_namespace == INITIAL_PID_NAMESPACE {
                "the host's".to_owned()
            } else {
                format!(
                    "{}, not the host's: process ids would not match",
                    self.pid_namespace
                )
            },
            "run in the host's PID namespace (Kubernetes `hostPID: true`, docker `--pid=host`)",
        );
        report.add(
            "user namespace",
            if self.user_namespace == INITIAL_USER_NAMESPACE {
                Status::Pass
            } else {
                Status::Fail
            },
            if self.user_namespace == INITIAL_USER_NAMESPACE {
                "the host's".to_owned()
            } else {
                format!(
                    "{}, not the host's: the kernel gives no BPF there",
                    self.user_namespace
                )
            },
            "run without user namespace (Kubernetes `hostUsers: true`, docker `--userns=host`, not rootless)",
        );
    }

    fn judge_capabilities(&self, report: &mut Report) {
        use Capability::{Bpf, CheckpointRestore, DacReadSearch, Perfmon, SysAdmin, SysPtrace, SysResource};
        let admin = self.has(SysAdmin);
        let new_enough = self.version().is_some_and(|version| version >= (5, 11));
        // Uprobes asked for CAP_PERFMON alone from 5.8 on, until its use was taken back in 2025, in 6.16 and
        // in the stable releases of older kernels: the version does not tell, the trial does.
        let conditions: [(&[Capability], bool, Status, &str, &'static str); 6] = [
            (
                &[Bpf, Perfmon],
                admin || self.has(Bpf) && self.has(Perfmon),
                Status::Fail,
                "to load programs",
                "run as root, or add CAP_SYS_ADMIN (or CAP_BPF and CAP_PERFMON, see below)",
            ),
            (
                &[SysAdmin],
                admin,
                Status::Warn,
                "to set probes, on kernels of mid-2025 and later (CAP_PERFMON before)",
                "add CAP_SYS_ADMIN if the trial below can't set a probe",
            ),
            (
                &[SysPtrace],
                self.has(SysPtrace),
                Status::Warn,
                "to read the maps of processes of other users or with more capabilities",
                "add CAP_SYS_PTRACE",
            ),
            (
                &[CheckpointRestore],
                admin || self.has(CheckpointRestore),
                Status::Warn,
                "to open deleted and replaced library files",
                "add CAP_CHECKPOINT_RESTORE (Linux 5.9) or CAP_SYS_ADMIN",
            ),
            (
                &[DacReadSearch],
                self.has(DacReadSearch) || self.has(Capability::DacOverride),
                Status::Warn,
                "to read library files that are not readable for all",
                "add CAP_DAC_READ_SEARCH",
            ),
            (
                &[SysResource],
                self.has(SysResource),
                Status::Warn,
                "to lock the ring buffer's memory, on kernels before 5.11",
                "add CAP_SYS_RESOURCE, or raise the limit of locked memory (`ulimit -l unlimited`)",
            ),
        ];
        for (capabilities, met, otherwise, purpose, remedy) in conditions {
            if new_enough && matches!(capabilities, [SysResource]) {
                continue;
            }
            let names: Vec<_> = capabilities.iter().map(|c| c.name()).collect();
            let found = if met { "held" } else { "missing" };
            report.add(
                "capability",
                if met { Status::Pass } else { otherwise },
                format!("{} {found}, {purpose}", names.join(" and ")),
                remedy,
            );
        }
    }

    fn judge_restrictions(&self, report: &mut Report) {
        let lockdown = self.lockdown.as_deref().map(|text| {
            text.split_once('[')
                .and_then(|(_, rest)| rest.split_once(']'))
                .map_or(text, |(mode, _)| mode)
        });
        report.add(
            "lockdown",
            if lockdown == Some("confidentiality") {
                Status::Warn
            } else {
                Status::Pass
            },
            match lockdown {
                None => "not built in".to_owned(),
                Some("confidentiality") => {
                    "confidentiality: kernel memory can't be read, which the tap does not do; not tested"
                        .to_owned()
                }
                Some(mode) => mode.to_owned(),
            },
            "if the trial below fails, boot with `lockdown=integrity`",
        );
        let perfmon = self.has(Capability::Perfmon) || self.has(Capability::SysAdmin);
        let paranoid = self.perf_event_paranoid.unwrap_or(0);
        report.add(
            "perf_event_paranoid",
            if perfmon || paranoid < 0 {
                Status::Pass
            } else {
                Status::Fail
            },
            if perfmon {
                format!("{paranoid}, does not bind a process with CAP_PERFMON")
            } else {
                format!("{paranoid}, and CAP_PERFMON is missing")
            },
            "add CAP_PERFMON",
        );
        report.add(
            "Yama ptrace_scope",
            if self.ptrace_scope == Some(3) {
                Status::Warn
            } else {
                Status::Pass
            },
            self.ptrace_scope
                .map_or_else(|| "not built in".to_owned(), |scope| scope.to_string()),
            "if probes stay silent, set kernel.yama.ptrace_scope to 2 or less (needs a reboot)",
        );
        report.add(
            "seccomp",
            if self.seccomp_filter { Status::Warn } else { Status::Pass },
            if self.seccomp_filter { "a filter is on this process" } else { "no filter" },
            "if the trial below fails with EPERM, allow bpf and perf_event_open (`seccompProfile: Unconfined`)",
        );
    }
}

#[derive(Clone, Copy)]
enum Capability {
    DacOverride,
    DacReadSearch,
    SysPtrace,
    SysAdmin,
    SysResource,
    Perfmon,
    Bpf,
    CheckpointRestore,
}

impl Capability {
    /// Number in `include/uapi/linux/capability.h`.
    const fn bit(self) -> u32 {
        match self {
            Self::DacOverride => 1,
            Self::DacReadSearch => 2,
            Self::SysPtrace => 19,
            Self::SysAdmin => 21,
            Self::SysResource => 24,
            Self::Perfmon => 38,
            Self::Bpf => 39,
            Self::CheckpointRestore => 40,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::DacOverride => "CAP_DAC_OVERRIDE",
            Self::DacReadSearch => "CAP_DAC_READ_SEARCH",
            Self::SysPtrace => "CAP_SYS_PTRACE",
            Self::SysAdmin => "CAP_SYS_ADMIN",
            Self::SysResource => "CAP_SYS_RESOURCE",
            Self::Perfmon => "CAP_PERFMON",
            Self::Bpf => "CAP_BPF",
            Self::CheckpointRestore => "CAP_CHECKPOINT_RESTORE",
        }
    }
}

/// Opens the own executable as the files of other processes are opened.
fn try_map_files(report: &mut Report) {
    let opened = own_map_file();
    report.add(
        "map_files",
        if opened.is_ok() {
            Status::Pass
        } else {
            Status::Warn
        },
        match opened {
            Ok(()) => "/proc/<pid>/map_files opens".to_owned(),
            Err(e) => format!(
                "/proc/<pid>/map_files does not open ({e}): files are opened by path, if not replaced"
            ),
        },
        "add CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN",
    );
}

fn own_map_file() -> io::Result<()> {
    let pid = std::process::id();
    let text = tap::maps::read(pid)?;
    let mapping = tap::maps::parse(&text)
        .find(|m| m.exec && m.inode != 0)
        .ok_or_else(|| io::Error::other("no mapped file"))?;
    fs::metadata(format!("/proc/{pid}/map_files/{}", mapping.map_files_name())).map(|_| ())
}

fn try_tap(facts: &Facts, report: &mut Report) {
    let settings = Settings {
        wakeup_bytes: 0,
        ..Settings::default()
    };
    let (tap, mut reader) = match Tap::load(&settings) {
        Ok(loaded) => loaded,
        Err(e) => {
            report.add(
                "trial: load",
                Status::Fail,
                with_causes(&e),
                load_remedy(facts, &e),
            );
            return;
        }
    };
    report.add(
        "trial: load",
        Status::Pass,
        format!("programs and a ring buffer of {} MiB", settings.ring_bytes >> 20),
        "",
    );
    let missing = tap.missing_tracepoints();
    let names: Vec<_> = missing.iter().map(|(name, e)| format!("{name} ({e})")).collect();
    report.add(
        "trial: tracepoints",
        if missing.is_empty() {
            Status::Pass
        } else {
            Status::Warn
        },
        if missing.is_empty() {
            "new and ended processes are told at once".to_owned()
        } else {
            format!(
                "not attached: {}; processes are found by scans alone",
                names.join(", ")
            )
        },
        "use a kernel built with CONFIG_BPF_EVENTS",
    );
    for (set, name_of, lost) in [
        (
            ProbeSet::Shm,
            "trial: shared memory",
            "transfers through shared memory",
        ),
        (ProbeSet::Http, "trial: HTTP", "HTTP connections"),
        (
            ProbeSet::Store,
            "trial: store",
            "transfers through Mooncake's store",
        ),
        (
            ProbeSet::Yuanrong,
            "trial: data system",
            "transfers through Yuanrong's data system",
        ),
    ] {
        if let [(name, e), ..] = tap.refused(set) {
            report.add(
                name_of,
                Status::Warn,
                format!("the kernel refuses `{name}` ({e}): {lost} are not seen"),
                "report it, with the kernel's version",
            );
        }
    }
    try_http_sites(report);
    match tap::selftest::run(&tap, &mut reader) {
        Ok(test) => {
            report.add(
                "trial: probe",
                Status::Pass,
                format!(
                    "set in {}, a call read after {}, taken off in {}{}",
                    millis(test.attach),
                    millis(test.delivery),
                    millis(test.detach),
                    if test.kind == SiteKind::Slow {
                        " (single-stepped site)"
                    } else {
                        ""
                    },
                ),
                "",
            );
        }
        Err(e) => report.add(
            "trial: probe",
            Status::Fail,
            with_causes(&e),
            "see capabilities above; if all are held, report it with this output",
        ),
    }
}

/// Most files of libc that are told of.
const MAX_LIBCS: usize = 8;

/// Where the calls of HTTP would be probed: in the libc of each API server here, and in that of this process.
fn try_http_sites(report: &mut Report) {
    let finder = Finder::new(Arch::NATIVE, ProbeSet::Http);
    let servers = Host::new(HostSettings::default())
        .scan()
        .unwrap_or_default()
        .into_iter()
        .filter_map(|change| match change {
            Change::Process(process) if process.role.serves_http() => Some(process.key.pid),
            _ => None,
        });
    let mut seen = HashSet::new();
    for (pid, whose) in servers
        .map(|pid| (pid, format!("API server {pid}")))
        .chain([(std::process::id(), "this process".to_owned())])
    {
        let found = tap::maps::read(pid)
            .map_err(|e| e.to_string())
            .and_then(|text| finder.find(pid, &text).map_err(|e| e.to_string()));
        let (status, evidence) = match found {
            Ok(targets) if targets.is_empty() => (Status::Pass, "no libc that is known".to_owned()),
            Ok(targets) => {
                let places: Vec<_> = targets.iter().flat_map(|target| &target.places).collect();
                http_sites(&places)
            }
            Err(e) => (Status::Warn, e),
        };
        if seen.insert(evidence.clone()) && seen.len() <= MAX_LIBCS {
            report.add(
                "HTTP sites",
                status,
                format!("{evidence} (in {whose})"),
                "HTTP costs its server more, or is not seen: use an image with another release of glibc where that matters",
            );
        }
    }
}

/// Functions by the way that they are probed.
fn http_sites(places: &[&Place]) -> (Status, String) {
    let of_kind = |kind: SiteKind| -> Vec<&str> {
        let mut names: Vec<_> = places
            .iter()
            .filter(|place| place.site.kind == kind)
            .map(|place| place.function)
            .collect();
        names.dedup();
        names
    };
    let mut text = Vec::new();
    for (kind, how) in [
        (SiteKind::Syscall, "behind the system call"),
        (SiteKind::Push, "in front of it"),
        (SiteKind::Nop, "in front of it"),
        (SiteKind::Branch, "in front of it"),
        (SiteKind::Slow, "in front of it, single-stepped"),
    ] {
        let names = of_kind(kind);
        if !names.is_empty() {
            text.push(format!("{}: {how}", names.join(", ")));
        }
    }
    let has_helper = !of_kind(SiteKind::Helper).is_empty();
    if has_helper {
        text.push("results behind libc's common function for system calls: two hits a call".to_owned());
    }
    let costs_more = has_helper || !of_kind(SiteKind::Slow).is_empty();
    let status = if costs_more { Status::Warn } else { Status::Pass };
    (status, text.join("; "))
}

fn load_remedy(facts: &Facts, error: &TapError) -> &'static str {
    match error {
        TapError::Program { .. } => "the kernel's verifier refused the program: report it with this output",
        TapError::Object(_) | TapError::Map { .. } | TapError::Ring(_)
            if facts.version().is_some_and(|version| version < (5, 11)) =>
        {
            "see capabilities above; before Linux 5.11, also raise the limit of locked memory"
        }
        _ => "see capabilities, seccomp and lockdown above",
    }
}

/// An error with what caused it, so that the kernel's own word is not lost.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.contains(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = error.source();
    }
    text
}

fn millis(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1000.0)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// A privileged process on a good host.
    fn good() -> Facts {
        Facts {
            release: "6.12.3-1-amd64".into(),
            capabilities: (1 << 41) - 1,
            pid_namespace: INITIAL_PID_NAMESPACE.into(),
            user_namespace: INITIAL_USER_NAMESPACE.into(),
            lockdown: Some("none [integrity] confidentiality".into()),
            perf_event_paranoid: Some(2),
            ptrace_scope: Some(1),
            uprobes: true,
            btf: true,
            tracefs: true,
            seccomp_filter: false,
        }
    }

    fn without(capabilities: &[Capability]) -> u64 {
        capabilities
            .iter()
            .fold(good().capabilities, |all, c| all & !(1 << c.bit()))
    }

    #[test]
    fn all_is_well() {
        let report = good().judge();
        assert!(report.works());
        assert!(
            report
                .items
                .iter()
                .all(|item| item.status == Status::Pass && item.remedy.is_empty()),
            "{report}"
        );
    }

    use Capability::{
        Bpf, CheckpointRestore, DacOverride, DacReadSearch, Perfmon, SysAdmin, SysPtrace, SysResource,
    };

    #[rstest]
    #[case::old_kernel(Facts { release: "5.4.0-generic".into(), ..good() }, "kernel", Status::Fail)]
    #[case::untested_kernel(Facts { release: "5.8.18".into(), ..good() }, "kernel", Status::Warn)]
    #[case::odd_release(Facts { release: "custom".into(), ..good() }, "kernel", Status::Warn)]
    #[case::no_uprobes(Facts { uprobes: false, ..good() }, "uprobes", Status::Fail)]
    #[case::container_pids(Facts { pid_namespace: "pid:[4026532222]".into(), ..good() }, "PID namespace", Status::Fail)]
    #[case::rootless(Facts { user_namespace: "user:[4026532222]".into(), ..good() }, "user namespace", Status::Fail)]
    #[case::no_bpf(Facts { capabilities: without(&[Bpf, SysAdmin]), ..good() }, "capability", Status::Fail)]
    #[case::no_perfmon(Facts { capabilities: without(&[Perfmon, SysAdmin]), ..good() }, "capability", Status::Fail)]
    #[case::perf_forbidden(Facts { capabilities: without(&[Perfmon, SysAdmin]), ..good() }, "perf_event_paranoid", Status::Fail)]
    #[case::no_admin(Facts { capabilities: without(&[SysAdmin]), ..good() }, "capability", Status::Warn)]
    #[case::no_ptrace(Facts { capabilities: without(&[SysPtrace]), ..good() }, "capability", Status::Warn)]
    #[case::no_map_files(Facts { capabilities: without(&[CheckpointRestore, SysAdmin]), ..good() }, "capability", Status::Warn)]
    #[case::no_read(Facts { capabilities: without(&[DacOverride, DacReadSearch]), ..good() }, "capability", Status::Warn)]
    #[case::memlock(Facts { release: "5.10.0".into(), capabilities: without(&[SysResource]), ..good() }, "capability", Status::Warn)]
    #[case::confidentiality(Facts { lockdown: Some("none integrity [confidentiality]".into()), ..good() }, "lockdown", Status::Warn)]
    #[case::yama(Facts { ptrace_scope: Some(3), ..good() }, "Yama ptrace_scope", Status::Warn)]
    #[case::seccomp(Facts { seccomp_filter: true, ..good() }, "seccomp", Status::Warn)]
    fn conditions(#[case] facts: Facts, #[case] name: &str, #[case] status: Status) {
        let report = facts.judge();
        let item = report
            .items
            .iter()
            .find(|item| item.name == name && item.status == status);
        assert!(item.is_some_and(|item| !item.remedy.is_empty()), "{report}");
        assert_eq!(report.works(), status != Status::Fail);
    }

    #[rstest]
    #[case::admin_instead_of_capabilities(Facts { capabilities: without(&[Bpf, Perfmon, CheckpointRestore]), ..good() })]
    #[case::memlock_is_of_the_past(Facts { release: "5.11.0".into(), capabilities: without(&[SysResource]), ..good() })]
    #[case::no_type_information(Facts { btf: false, tracefs: false, lockdown: None, ptrace_scope: None, ..good() })]
    fn enough(#[case] facts: Facts) {
        let report = facts.judge();
        assert!(
            report.items.iter().all(|item| item.status == Status::Pass),
            "{report}"
        );
    }

    fn trial(gpus: u32) -> Trial {
        Trial {
            library: "/usr/lib64/libnvidia-ml.so.1".into(),
            driver: Some("550.54.15".into()),
            gpus,
        }
    }

    #[rstest]
    #[case::gpus(
        Some(Ok(trial(8))),
        Status::Pass,
        "/usr/lib64/libnvidia-ml.so.1, driver 550.54.15, GPUs: 8"
    )]
    #[case::no_gpu(Some(Ok(trial(0))), Status::Warn, "GPUs: 0")]
    #[case::no_library(Some(Err(State::NoLibrary)), Status::Pass, "no libnvidia-ml.so.1")]
    #[case::no_driver(Some(Err(State::NoDriver)), Status::Warn, "driver is not loaded")]
    #[case::versions(Some(Err(State::VersionMismatch)), Status::Warn, "different versions")]
    #[case::refused(Some(Err(State::NoPermission)), Status::Warn, "refuses")]
    #[case::broken(Some(Err(State::Failed)), Status::Warn, "does not answer as it should")]
    #[case::hangs(None, Status::Warn, "no answer")]
    fn nvml_never_fails_the_tap(
        #[case] answer: Option<Result<Trial, State>>,
        #[case] status: Status,
        #[case] found: &str,
    ) {
        let mut report = Report::default();
        judge_nvml(answer, &mut report);
        let item = &report.items[0];
        assert!(item.status == status && item.evidence.contains(found), "{report}");
        assert_eq!(item.remedy.is_empty(), status == Status::Pass);
        assert!(report.works());
    }

    #[test]
    fn text_names_the_remedy_and_the_verdict() {
        let text = Facts {
            uprobes: false,
            ..good()
        }
        .judge()
        .to_string();
        assert!(text.contains("FAIL  uprobes"));
        assert!(text.contains("-> use a kernel built with CONFIG_UPROBE_EVENTS"));
        assert!(text.contains("The tap can't work here"));
    }

    #[test]
    fn json_has_the_verdict() {
        let json = Facts {
            uprobes: false,
            ..good()
        }
        .judge()
        .to_json()
        .unwrap();
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(value["works"], false);
        assert_eq!(value["items"][1]["status"], "fail");
        assert!(value["items"][0].get("remedy").is_none());
    }

    #[test]
    fn facts_of_this_machine_are_read() {
        let facts = Facts::read();
        assert!(facts.version().is_some());
        assert!(facts.pid_namespace.starts_with("pid:["));
    }
}
