//! `cargo xtask vm`: runs the live tests of the BPF objects inside Debian kernels under QEMU.
//!
//! Each machine is a Debian kernel and an initramfs made here: Debian's libzmq and what it needs, the test
//! program, the programs that it drives, and `xtask/vm/init.c` as process 1. QEMU emulates the CPU, so that no
//! KVM is needed; a run takes a minute or two.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context as _, Result, bail, ensure};

use crate::setup;

/// Options of `cargo xtask vm`.
///
/// Runs agent-ebpf/tests/live.rs in each machine: the committed object must load, attach, and capture every
/// byte. Kernels, packages and builds are kept under target/vm.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only these machines, by name
    #[arg(value_name = "MACHINE")]
    only: Vec<String>,
    /// List the machines
    #[arg(long)]
    list: bool,
    /// Only tests whose name contains this
    #[arg(long, value_name = "NAME")]
    test: Option<String>,
    /// Seconds that one machine may take
    #[arg(long, default_value_t = 900)]
    timeout: u64,
}

/// A machine: an architecture, and the Debian suite whose kernel it boots.
struct Machine {
    name: &'static str,
    arch: Arch,
    suite: &'static str,
}

#[derive(Clone, Copy, PartialEq)]
enum Arch {
    Amd64,
    Arm64,
}

const MACHINES: [Machine; 6] = [
    machine("5.10", Arch::Amd64, "bullseye"),
    machine("6.1", Arch::Amd64, "bookworm"),
    machine("6.12", Arch::Amd64, "trixie"),
    machine("newest", Arch::Amd64, "sid"),
    machine("arm64-6.1", Arch::Arm64, "bookworm"),
    machine("arm64-6.12", Arch::Arm64, "trixie"),
];

const fn machine(name: &'static str, arch: Arch, suite: &'static str) -> Machine {
    Machine { name, arch, suite }
}

impl Arch {
    /// Debian's name.
    fn debian(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// The multiarch name.
    fn triplet(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64-linux-gnu",
            Self::Arm64 => "aarch64-linux-gnu",
        }
    }

    fn cc(self) -> String {
        format!("{}-gcc", self.triplet())
    }
}

/// Packages of the suite that the test program was built for, with all they depend on, make the root.
const ROOT_SUITE: &str = "bookworm";
const ROOT_PACKAGES: [&str; 3] = ["libzmq5", "dash", "coreutils"];

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Runs the task.
pub(crate) fn run(args: &Args) -> Result<()> {
    if args.list {
        for Machine { name, arch, suite } in &MACHINES {
            println!("{name}\t{}\tkernel of Debian {suite}", arch.debian());
        }
        return Ok(());
    }
    for name in &args.only {
        ensure!(
            MACHINES.iter().any(|m| m.name == name),
            "no machine {name}: see `cargo xtask vm --list`"
        );
    }
    let machines: Vec<&Machine> = MACHINES
        .iter()
        .filter(|m| args.only.is_empty() || args.only.iter().any(|name| name == m.name))
        .collect();
    install(&machines)?;

    let mut failed = Vec::new();
    for machine in machines {
        let start = Instant::now();
        let verdict = check(machine, args);
        let seconds = start.elapsed().as_secs();
        match verdict {
            Ok(Passed { release, tests }) => {
                println!("{:12} {release:28} ok: {tests} ({seconds} s)", machine.name);
            }
            Err(error) => {
                println!("{:12} FAILED ({seconds} s): {error:#}", machine.name);
                failed.push(machine.name);
            }
        }
    }
    ensure!(
        failed.is_empty(),
        "not every kernel passed: {}",
        failed.join(", ")
    );
    Ok(())
}

fn install(machines: &[&Machine]) -> Result<()> {
    let mut wanted = vec![
        ("/usr/bin/cpio", "cpio"),
        ("/usr/bin/dpkg-deb", "dpkg"),
        ("/usr/include/zmq.h", "libzmq3-dev"),
        (
            "/usr/share/keyrings/debian-archive-keyring.gpg",
            "debian-archive-keyring",
        ),
    ];
    if machines.iter().any(|m| m.arch == Arch::Amd64) {
        wanted.extend([
            ("/usr/bin/qemu-system-x86_64", "qemu-system-x86"),
            ("/usr/bin/x86_64-linux-gnu-gcc", "gcc"),
        ]);
    }
    if machines.iter().any(|m| m.arch == Arch::Arm64) {
        wanted.extend([
            ("/usr/bin/qemu-system-aarch64", "qemu-system-arm"),
            ("/usr/bin/aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu"),
            ("/usr/aarch64-linux-gnu/include/stdio.h", "libc6-dev-arm64-cross"),
            ("/usr/bin/rustc", "rustc-web"),
            ("/usr/bin/cargo", "cargo-web"),
        ]);
    }
    setup::debian(&wanted)
}

/// A machine in which all tests passed.
struct Passed {
    /// The kernel's release.
    release: String,
    /// The test program's own summary.
    tests: String,
}

fn check(machine: &Machine, args: &Args) -> Result<Passed> {
    let (release, image) = kernel(machine)?;
    let initramfs = initramfs(machine.arch)?;
    eprintln!("xtask: booting {release} ({}) under QEMU", machine.arch.debian());
    let log = cache()?.join(format!("{}.log", machine.name));
    let output = boot(machine.arch, &image, &initramfs, &log, args)?;
    let exit = output
        .lines()
        .find_map(|line| line.trim().strip_prefix("omnitap-vm: exit "));
    let tests = output
        .lines()
        .find_map(|line| line.trim().strip_prefix("test result: "));
    match (exit, tests) {
        (Some("0"), Some(tests)) if tests.contains(" 0 passed") => {
            bail!("no test ran; see {}", log.display())
        }
        (Some("0"), Some(tests)) => Ok(Passed {
            release,
            tests: tests.split(';').take(2).collect::<Vec<_>>().join(","),
        }),
        (Some(code), _) => bail!("the tests ended with {code}; see {}", log.display()),
        (None, _) => bail!("the machine ended without a verdict; see {}", log.display()),
    }
}

fn cache() -> Result<PathBuf> {
    let dir = setup::target_dir().join("vm");
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    Ok(dir)
}

/// Runs QEMU to its end; returns what came over the serial port.
fn boot(arch: Arch, image: &Path, initramfs: &Path, log: &Path, args: &Args) -> Result<String> {
    let timeout = args.timeout;
    let filter = args.test.as_deref().unwrap_or_default();
    let (program, machine_args, console) = match arch {
        // On a busy host the emulated timer fails the kernel's check of it at start.
        Arch::Amd64 => ("qemu-system-x86_64", &["-cpu", "max"][..], "ttyS0 no_timer_check"),
        Arch::Arm64 => (
            "qemu-system-aarch64",
            &["-M", "virt", "-cpu", "max,pauth-impdef=on"][..],
            "ttyAMA0",
        ),
    };
    let mut qemu = Command::new("timeout");
    qemu.args(["-k", "5", &timeout.to_string(), program])
        .args(machine_args)
        // One thread for both CPUs: with one each, QEMU 10.0 now and then runs code that the kernel has just
        // patched on the other CPU, and the kernel dies of a breakpoint that is no longer there.
        .args(["-accel", "tcg,thread=single", "-smp", "2", "-m", "1536"])
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
        .arg("-kernel")
        .arg(image)
        .arg("-initrd")
        .arg(initramfs)
        .arg("-append")
        // A word that the kernel does not know goes on to init, and from there to the tests as a filter.
        .arg(format!(
            "console={console} panic=-1 quiet -- --test-threads=1 {filter}"
        ))
        .arg("-serial")
        .arg(format!("file:{}", log.display()))
        .stdin(Stdio::null());
    let status = qemu.status().context("cannot start QEMU")?;
    let output = fs::read(log).with_context(|| format!("cannot read {}", log.display()))?;
    ensure!(
        status.code() != Some(124),
        "not done after {timeout} s; see {}",
        log.display()
    );
    Ok(String::from_utf8_lossy(&output).into_owned())
}

/// Debian's newest cloud kernel of the machine's suite: its release and image. One that is there is kept.
fn kernel(machine: &Machine) -> Result<(String, PathBuf)> {
    let apt = Apt::open(machine.suite, machine.arch)?;
    let shown = apt.cache(&["show", &format!("linux-image-cloud-{}", machine.arch.debian())])?;
    // The archives of a suite name one release each, the newest first.
    let release = shown
        .lines()
        .filter_map(|line| line.strip_prefix("Depends:"))
        .find_map(|line| {
            line.split([' ', ','])
                .find_map(|word| word.strip_prefix("linux-image-"))
        })
        .with_context(|| format!("Debian {} names no cloud kernel", machine.suite))?
        .to_owned();
    let dir = cache()?.join(format!("kernel-{}-{release}", machine.arch.debian()));
    let image = dir.join("vmlinuz");
    if image.exists() {
        return Ok((release, image));
    }
    eprintln!("xtask: fetching the kernel {release}");
    // Since 7.x the image lies in a package of its own, on which linux-image depends.
    let mut packages = vec![format!("linux-image-{release}")];
    let depends = apt.cache(&["depends", &packages[0]])?;
    packages.extend(
        depends
            .lines()
            .filter_map(|line| line.trim().strip_prefix("Depends: "))
            .filter(|name| *name == format!("linux-binary-{release}"))
            .map(str::to_owned),
    );
    let part = cache()?.join(format!("part-{}-{release}", machine.arch.debian()));
    recreate(&part)?;
    for package in &packages {
        apt.download(package, &part)?;
    }
    let root = part.join("root");
    unpack(&part, &root)?;
    let found = find(&root, &[&format!("vmlinuz-{release}"), "vmlinuz"])
        .with_context(|| format!("no image in {}", packages.join(", ")))?;
    fs::create_dir_all(&dir)?;
    fs::rename(found, &image)?;
    fs::remove_dir_all(&part)?;
    Ok((release, image))
}

/// The initramfs of an architecture, with the test as it is now.
fn initramfs(arch: Arch) -> Result<PathBuf> {
    let root = cache()?.join(format!("root-{}", arch.debian()));
    if !root.join("complete").exists() {
        eprintln!("xtask: fetching Debian's libzmq for {}", arch.debian());
        recreate(&root)?;
        debian_root(arch, &root, &ROOT_PACKAGES)?;
        for folder in ["dev", "proc", "sys", "tmp"] {
            fs::create_dir_all(root.join(folder))?;
        }
        // Documentation and locales would double the size.
        for folder in ["usr/share", "usr/lib/locale"] {
            if root.join(folder).exists() {
                fs::remove_dir_all(root.join(folder))?;
            }
        }
        fs::write(root.join("complete"), "")?;
    }
    let vm = setup::root().join("xtask/vm");
    setup::run(
        Command::new(arch.cc())
            .args(["-O2", "-Wall", "-Werror", "-static", "-o"])
            .arg(root.join("init"))
            .arg(vm.join("init.c")),
    )?;
    // The header is the same for each architecture; the host's other headers are not.
    let include = cache()?.join("include");
    fs::create_dir_all(&include)?;
    fs::copy("/usr/include/zmq.h", include.join("zmq.h"))?;
    setup::run(
        Command::new(arch.cc())
            .args(["-O2", "-Wall", "-Werror", "-o"])
            .arg(root.join("sender"))
            .arg(setup::root().join("agent-ebpf/tests/common/sender.c"))
            .arg("-I")
            .arg(&include)
            .arg("-L")
            .arg(root.join("usr/lib").join(arch.triplet()))
            .args(["-l:libzmq.so.5", "-Wl,--allow-shlib-undefined"]),
    )?;
    setup::run(
        Command::new(arch.cc())
            .args(["-O2", "-Wall", "-Werror", "-o"])
            .arg(root.join("segments"))
            .arg(setup::root().join("agent-ebpf/tests/common/segments.c"))
            .args(["-lrt", "-pthread"]),
    )?;
    setup::run(
        Command::new(arch.cc())
            .args(["-O2", "-Wall", "-Werror", "-o"])
            .arg(root.join("server"))
            .arg(setup::root().join("agent-ebpf/tests/common/server.c"))
            .arg("-pthread"),
    )?;
    fs::copy(build_test(arch)?, root.join("run-test"))?;

    let archive = cache()?.join(format!("initramfs-{}", arch.debian()));
    let file = fs::File::create(&archive)?;
    let mut cpio = Command::new("cpio")
        .args(["--quiet", "--null", "--create", "--format=newc", "--owner=0:0"])
        .current_dir(&root)
        .stdin(Stdio::piped())
        .stdout(file)
        .spawn()
        .context("cannot start cpio")?;
    let names = setup::output(Command::new("find").args([".", "-print0"]).current_dir(&root))?;
    cpio.stdin
        .take()
        .context("cpio has no standard input")?
        .write_all(names.as_bytes())?;
    ensure!(cpio.wait()?.success(), "cpio failed");
    Ok(archive)
}

/// Builds agent-ebpf/tests/live.rs; returns the program.
fn build_test(arch: Arch) -> Result<PathBuf> {
    eprintln!("xtask: building the live tests for {}", arch.debian());
    let mut cargo = match arch {
        Arch::Amd64 => setup::cargo(),
        Arch::Arm64 => cross_cargo()?,
    };
    let messages = setup::output(cargo.args([
        "test",
        "--quiet",
        "--no-run",
        "--locked",
        "--package=omnitap-ebpf",
        "--test=live",
        "--message-format=json",
    ]))?;
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|message| message["target"]["name"] == "live")
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
        .context("cargo built no test program")
}

/// Debian's cargo and rustc with the standard library of its arm64 package.
fn cross_cargo() -> Result<Command> {
    let sysroot = cache()?.join("std-arm64");
    if !sysroot.join("complete").exists() {
        eprintln!("xtask: fetching Rust's standard library for arm64");
        recreate(&sysroot)?;
        debian_root(Arch::Arm64, &sysroot, &["libstd-rust-web-dev"])?;
        fs::write(sysroot.join("complete"), "")?;
    }
    let mut cargo = Command::new("/usr/bin/cargo");
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("CARGO") && name != "CARGO_HOME" || name.starts_with("RUST") {
            cargo.env_remove(&*name);
        }
    }
    cargo
        .current_dir(setup::root())
        .env("RUSTC", "/usr/bin/rustc")
        .env("CARGO_BUILD_TARGET", "aarch64-unknown-linux-gnu")
        .env("CARGO_TARGET_DIR", cache()?.join("build-arm64"))
        .env(
            "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER",
            "aarch64-linux-gnu-gcc",
        )
        .env(
            "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUSTFLAGS",
            format!("--sysroot={}", sysroot.join("usr").display()),
        );
    Ok(cargo)
}

/// Unpacks packages with all they depend on into a folder; runs none of their scripts.
fn debian_root(arch: Arch, root: &Path, packages: &[&str]) -> Result<()> {
    for name in ["bin", "sbin", "lib", "lib64"] {
        fs::create_dir_all(root.join("usr").join(name))?;
        let link = root.join(name);
        if !link.exists() {
            std::os::unix::fs::symlink(format!("usr/{name}"), link)?;
        }
    }
    let apt = Apt::open(ROOT_SUITE, arch)?;
    apt.download_with_depends(packages)?;
    unpack(&apt.dir.join("archives"), root)
}

/// Unpacks all packages of a folder into a root.
fn unpack(debs: &Path, root: &Path) -> Result<()> {
    fs::create_dir_all(root)?;
    for entry in fs::read_dir(debs)? {
        let path = entry?.path();
        if path.extension().is_none_or(|e| e != "deb") {
            continue;
        }
        let mut tar = Command::new("dpkg-deb")
            .arg("--fsys-tarfile")
            .arg(&path)
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start dpkg-deb")?;
        let stream = tar.stdout.take().context("dpkg-deb has no output")?;
        setup::run(
            Command::new("tar")
                .args(["-x", "--keep-directory-symlink", "-C"])
                .arg(root)
                .stdin(stream),
        )?;
        ensure!(tar.wait()?.success(), "cannot unpack {}", path.display());
    }
    Ok(())
}

/// The first file below a folder that has one of these names.
fn find(folder: &Path, names: &[&str]) -> Option<PathBuf> {
    let mut entries: Vec<_> = fs::read_dir(folder).ok()?.filter_map(Result::ok).collect();
    entries.sort_by_key(fs::DirEntry::file_name);
    entries.into_iter().find_map(|entry| {
        let kind = entry.file_type().ok()?;
        if kind.is_dir() {
            find(&entry.path(), names)
        } else {
            let name = entry.file_name();
            (kind.is_file() && names.iter().any(|n| *n == name)).then(|| entry.path())
        }
    })
}

fn recreate(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))
}

/// apt with lists and state of its own, for a suite and an architecture that this host does not use.
struct Apt {
    dir: PathBuf,
    arch: Arch,
}

impl Apt {
    fn open(suite: &str, arch: Arch) -> Result<Self> {
        let dir = cache()?.join(format!("apt-{suite}-{}", arch.debian()));
        fs::create_dir_all(dir.join("lists/partial"))?;
        fs::create_dir_all(dir.join("archives/partial"))?;
        fs::write(dir.join("status"), "")?;
        let apt = Self { dir, arch };
        let (mirror, security) = mirrors()?;
        let source = |uri: &str, suite: &str| {
            format!("deb [target=Packages signed-by={KEYRING}] {uri} {suite} main\n")
        };
        let mut sources = source(&mirror, suite);
        if suite != "sid"
            && let Some(security) = security
        {
            sources += &source(&security, &format!("{suite}-security"));
        }
        fs::write(apt.dir.join("sources.list"), sources)?;
        let updated = apt.dir.join("updated");
        let age = fs::metadata(&updated).and_then(|m| m.modified()).ok();
        if age
            .and_then(|at| at.elapsed().ok())
            .is_none_or(|age| age.as_secs() > 24 * 3600)
        {
            eprintln!(
                "xtask: reading the package lists of Debian {suite} {}",
                arch.debian()
            );
            setup::run(
                apt.command("apt-get")
                    .args(["-o", "APT::Update::Error-Mode=any", "update"])
                    .stdout(Stdio::null()),
            )?;
            fs::write(updated, "")?;
        }
        Ok(apt)
    }

    fn command(&self, tool: &str) -> Command {
        let Self { dir, arch } = self;
        let arch = arch.debian();
        let dir = dir.display();
        let mut command = Command::new(tool);
        command.arg("-q");
        for option in [
            format!("APT::Architecture={arch}"),
            format!("APT::Architectures::={arch}"),
            // The lists lie in a folder that apt's own user may not enter.
            "APT::Sandbox::User=root".to_owned(),
            "APT::Keep-Downloaded-Packages=true".to_owned(),
            "Acquire::Languages=none".to_owned(),
            format!("Dir::Etc::sourcelist={dir}/sources.list"),
            "Dir::Etc::sourceparts=/dev/null".to_owned(),
            format!("Dir::State={dir}"),
            format!("Dir::State::lists={dir}/lists"),
            format!("Dir::State::status={dir}/status"),
            format!("Dir::Cache={dir}"),
            format!("Dir::Cache::archives={dir}/archives"),
            "Dir::Cache::pkgcache=".to_owned(),
            "Dir::Cache::srcpkgcache=".to_owned(),
        ] {
            command.args(["-o", &option]);
        }
        command
    }

    fn cache(&self, args: &[&str]) -> Result<String> {
        setup::output(self.command("apt-cache").args(args))
    }

    fn download(&self, package: &str, into: &Path) -> Result<()> {
        setup::run(
            self.command("apt-get")
                .args(["download", package])
                .current_dir(into)
                .stdout(Stdio::null()),
        )
    }

    /// Into `archives`, which then holds nothing else.
    fn download_with_depends(&self, packages: &[&str]) -> Result<()> {
        recreate(&self.dir.join("archives"))?;
        fs::create_dir_all(self.dir.join("archives/partial"))?;
        setup::run(
            self.command("apt-get")
                .args(["-y", "--no-install-recommends", "--download-only", "install"])
                .args(packages)
                .stdout(Stdio::null()),
        )
    }
}

/// The mirrors that this host's apt uses, for Debian and its security updates; else Debian's own.
fn mirrors() -> Result<(String, Option<String>)> {
    let uris = setup::output(Command::new("apt-get").args(["indextargets", "--format", "$(REPO_URI)"]))?;
    let used = |name: &str| {
        uris.lines()
            .map(|uri| uri.trim().trim_end_matches('/'))
            .find(|uri| uri.ends_with(name))
            .map(str::to_owned)
    };
    let mirror = used("/debian").unwrap_or_else(|| "http://deb.debian.org/debian".to_owned());
    Ok((mirror, used("/debian-security")))
}
