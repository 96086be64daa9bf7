//! `cargo xtask image`: the steps of deploy/container/Dockerfile in bare Debian roots, without a container engine.
//!
//! The first root has a C compiler and this machine's Rust toolchain, and builds the agent there. The second has what
//! the final image has, glibc and `libgcc_s`: no shell, nothing else, mounted read-only. The agent runs in it beside the
//! host's /proc and /sys, as in a pod with the host's PID namespace.

use std::{
    fs,
    net::TcpListener,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::setup;

/// Debian's release in the Dockerfile.
const RELEASE: &str = "bookworm";
/// What the final image is made of.
const PACKAGES: &[&str] = &["libc6", "libgcc-s1"];
/// How soon the agent must be ready, and how soon it must have ended.
const PATIENCE: Duration = Duration::from_secs(15);

/// Options of `cargo xtask image`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Take this binary instead of building one in the first root
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
}

/// Runs the task.
pub(crate) fn run(args: &Args) -> Result<()> {
    ensure!(
        setup::is_root(),
        "chroot needs root. Run: sudo -E env \"PATH=$PATH\" cargo xtask image"
    );
    setup::debian(&[
        ("/usr/sbin/debootstrap", "debootstrap"),
        ("/usr/bin/strip", "binutils"),
    ])?;
    let dir = setup::target_dir().join("image");
    fs::create_dir_all(&dir)?;
    let built = match &args.binary {
        Some(binary) => binary.clone(),
        None => build(&dir.join("build"))?,
    };
    let root = dir.join("root");
    assemble(&root, &built)?;
    let size = setup::output(Command::new("du").args(["--summarize", "--bytes"]).arg(&root))?;
    let size: u64 = size.split('\t').next().unwrap_or_default().parse()?;
    let binary = fs::metadata(root.join("usr/bin/omnitap"))?.len();
    println!(
        "size in MiB: image {:.1}, of it the binary {:.1}",
        mib(size),
        mib(binary)
    );
    try_it(&root)
}

#[expect(clippy::cast_precision_loss, reason = "a size for people")]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// The first stage: a Debian root with a C compiler, the sources, and the toolchain that runs this task.
fn build(root: &Path) -> Result<PathBuf> {
    if !root.join("usr/bin/gcc").exists() {
        println!("making a Debian root in {}", root.display());
        setup::run(
            Command::new("debootstrap")
                .args([
                    "--variant=minbase",
                    "--include=gcc,libc6-dev,ca-certificates",
                    RELEASE,
                ])
                .arg(root)
                .args(mirror())
                .stdout(Stdio::null()),
        )?;
    }
    let sysroot = setup::output(
        Command::new("rustc")
            .args(["--print", "sysroot"])
            .current_dir("/"),
    )?;
    let home = std::env::var_os("CARGO_HOME").map_or_else(|| home().join(".cargo"), PathBuf::from);
    for folder in ["src", "toolchain", "cargo"] {
        fs::create_dir_all(root.join(folder))?;
    }
    // The mounts are in a namespace of their own and go with it.
    let script = r#"set -e
mount --bind "$1" "$4/src"; mount -o remount,bind,ro "$4/src"
mount --bind "$2" "$4/toolchain"; mount -o remount,bind,ro "$4/toolchain"
mount --bind "$3" "$4/cargo"
mount -t proc proc "$4/proc"; mount --rbind /dev "$4/dev"
cp /etc/resolv.conf "$4/etc/resolv.conf"; cp /etc/ssl/certs/ca-certificates.crt "$4/etc/ssl/certs/"
exec chroot "$4" /usr/bin/env -i PATH=/toolchain/bin:/usr/bin:/bin CARGO_HOME=/cargo CARGO_TARGET_DIR=/out \
  sh -c 'cd /src && exec cargo build --release --locked --package omnitap'"#;
    setup::run(
        Command::new("unshare")
            .args(["--mount", "--", "sh", "-c", script, "image"])
            .arg(setup::root())
            .arg(sysroot.trim())
            .arg(home)
            .arg(root),
    )?;
    Ok(root.join("out/release/omnitap"))
}

fn home() -> PathBuf {
    std::env::var_os("HOME").map_or_else(|| "/root".into(), PathBuf::from)
}

/// The mirror that this machine's apt uses; debootstrap's own default where none is told.
fn mirror() -> Option<String> {
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    if let Ok(entries) = fs::read_dir("/etc/apt/sources.list.d") {
        files.extend(entries.filter_map(|entry| Some(entry.ok()?.path())));
    }
    files
        .iter()
        .filter_map(|file| fs::read_to_string(file).ok())
        .find_map(|text| {
            text.split_whitespace()
                .find(|word| word.starts_with("http") && word.trim_end_matches('/').ends_with("/debian"))
                .map(str::to_owned)
        })
}

/// The second stage: the packages' files, the binary, and places to mount to.
fn assemble(root: &Path, built: &Path) -> Result<()> {
    if root.exists() {
        fs::remove_dir_all(root)?;
    }
    let packages = root.with_extension("packages");
    fs::create_dir_all(&packages)?;
    setup::run(
        Command::new("apt-get")
            .args(["-q", "-q", "-o", "APT::Sandbox::User=root", "download"])
            .args(PACKAGES)
            .current_dir(&packages),
    )?;
    for folder in ["usr/bin", "proc", "sys"] {
        fs::create_dir_all(root.join(folder))?;
    }
    for entry in fs::read_dir(&packages)? {
        setup::run(
            Command::new("dpkg-deb")
                .arg("--extract")
                .arg(entry?.path())
                .arg(root),
        )?;
    }
    fs::remove_dir_all(&packages)?;
    let binary = root.join("usr/bin/omnitap");
    setup::run(Command::new("strip").arg("-o").arg(&binary).arg(built))?;
    fs::set_permissions(&binary, fs::Permissions::from_mode(0o755))?;
    // A root that a container engine would leave to nobody else.
    fs::set_permissions(root, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

/// A command inside the root, which is read-only, with the host's /proc and /sys.
fn inside(root: &Path, args: &[&str]) -> Command {
    let script = r#"set -e
root=$1; shift
mount --bind "$root" "$root"
mount --rbind /proc "$root/proc"; mount --rbind /sys "$root/sys"
mount -o remount,bind,ro "$root"
exec chroot "$root" /usr/bin/omnitap "$@""#;
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--", "sh", "-c", script, "image"])
        .arg(root)
        .args(args);
    command
}

/// Runs the agent as the image would, until it is ready, scrapes it, and ends it.
fn try_it(root: &Path) -> Result<()> {
    print!(
        "in the image: {}",
        setup::output(&mut inside(root, &["version"]))?
    );
    setup::run(&mut inside(root, &["check"]))?;
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let start = Instant::now();
    let address = format!("--web.listen-address=127.0.0.1:{port}");
    // exec all the way: the child is the agent.
    let mut agent = Ended(inside(root, &["run", &address]).stderr(Stdio::null()).spawn()?);
    let get = |path: &str| -> Result<String> {
        Ok(ureq::get(format!("http://127.0.0.1:{port}{path}"))
            .call()?
            .body_mut()
            .read_to_string()?)
    };
    while get("/readyz").is_err() {
        ensure!(
            start.elapsed() < PATIENCE && agent.0.try_wait()?.is_none(),
            "the agent is not ready"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    ensure!(
        get("/metrics")?.contains("\nomnitap_build_info{"),
        "no family on /metrics"
    );
    println!(
        "from start to the first scrape with the first scan done: {} ms",
        start.elapsed().as_millis()
    );
    let pid = i32::try_from(agent.0.id())
        .ok()
        .and_then(Pid::from_raw)
        .context("no pid")?;
    kill_process(pid, Signal::TERM)?;
    let until = Instant::now() + PATIENCE;
    let status = loop {
        if let Some(status) = agent.0.try_wait()? {
            break status;
        }
        ensure!(Instant::now() < until, "the agent has not ended");
        std::thread::sleep(Duration::from_millis(20));
    };
    ensure!(status.success(), "the agent ended with {status}");
    Ok(())
}

/// A process that does not outlive the task.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}
