//! Installs what tasks need: Debian packages, Python packages in a venv, cargo tools. Says so in a line each.

use std::{
    ffi::OsStr,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};

/// The repository's root.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap_or(Path::new("."))
        .to_path_buf()
}

/// Where tasks keep what they install or build: `target/` (or `CARGO_TARGET_DIR`).
pub(crate) fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// The cargo that runs us.
pub(crate) fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(root());
    cargo
}

/// Runs a command to its end; an error names the command and its exit status.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("cannot start {}", show(command)))?;
    ensure!(status.success(), "{} ended with {status}", show(command));
    Ok(())
}

/// Runs a command to its end and returns its standard output.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let out = command
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start {}", show(command)))?;
    ensure!(
        out.status.success(),
        "{} ended with {}",
        show(command),
        out.status
    );
    String::from_utf8(out.stdout).with_context(|| format!("{} printed no UTF-8", show(command)))
}

fn show(command: &Command) -> String {
    let mut line = command.get_program().to_string_lossy().into_owned();
    for arg in command.get_args() {
        line.push(' ');
        line.push_str(&arg.to_string_lossy());
    }
    line
}

/// Whether this process runs as root.
pub(crate) fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|m| std::os::unix::fs::MetadataExt::uid(&m) == 0)
}

/// Makes sure that Debian packages are installed. Each pair is (a file that the package brings, the package).
pub(crate) fn debian(wanted: &[(&str, &str)]) -> Result<()> {
    let missing: Vec<&str> = wanted
        .iter()
        .filter(|(file, _)| !Path::new(file).exists())
        .map(|(_, p)| *p)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    eprintln!("xtask: installing Debian packages: {}", missing.join(" "));
    ensure!(
        is_root(),
        "not root: run `sudo apt-get install {}` and try again",
        missing.join(" ")
    );
    ensure!(
        Path::new("/usr/bin/apt-get").exists(),
        "no apt-get here: install {} by hand",
        missing.join(", ")
    );
    let apt = |args: &[&str]| {
        run(Command::new("apt-get")
            .env("DEBIAN_FRONTEND", "noninteractive")
            .args(["-q", "-o", "DPkg::Lock::Timeout=300"])
            .args(args)
            .stdout(Stdio::null()))
    };
    apt(&["update"])?;
    let mut args = vec!["install", "-y", "--no-install-recommends"];
    args.extend(&missing);
    apt(&args)
}

/// Unpacks a Debian package under `target/` without installing it, so that no service of it starts; returns the folder.
pub(crate) fn debian_files(package: &str) -> Result<PathBuf> {
    let dir = target_dir().join("tools/debian").join(package);
    if dir.exists() {
        return Ok(dir);
    }
    eprintln!(
        "xtask: unpacking the Debian package {package} into {}",
        dir.display()
    );
    let download = dir.with_extension("download");
    std::fs::create_dir_all(&download)?;
    run(Command::new("apt-get")
        .args(["-q", "-q", "-o", "APT::Sandbox::User=root", "download", package])
        .current_dir(&download))
    .context("`apt-get update` may be needed first")?;
    let unpacked = dir.with_extension("unpacked");
    for entry in std::fs::read_dir(&download)? {
        run(Command::new("dpkg-deb")
            .arg("--extract")
            .arg(entry?.path())
            .arg(&unpacked))?;
    }
    std::fs::remove_dir_all(&download)?;
    // At once: a folder that is there is whole.
    std::fs::rename(&unpacked, &dir)?;
    Ok(dir)
}

/// A venv under `target/` with these packages from PyPI; returns its `python`.
pub(crate) fn venv(name: &str, packages: &[&str]) -> Result<PathBuf> {
    let dir = target_dir().join(name);
    let python = dir.join("bin/python");
    let stamp = dir.join("installed.txt");
    let wanted = packages.join("\n");
    if std::fs::read_to_string(&stamp).is_ok_and(|have| have == wanted) && python.exists() {
        return Ok(python);
    }
    eprintln!(
        "xtask: installing Python packages into {}: {}",
        dir.display(),
        packages.join(" ")
    );
    if Command::new("python3")
        .args(["-c", "import ensurepip, venv"])
        .stderr(Stdio::null())
        .status()
        .map_or(true, |s| !s.success())
    {
        debian(&[
            ("/usr/bin/python3", "python3"),
            ("/usr/share/python-wheels", "python3-venv"),
        ])?;
    }
    run(Command::new("python3").args([OsStr::new("-m"), OsStr::new("venv"), dir.as_os_str()]))?;
    run(Command::new(&python)
        .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"])
        .args(packages))?;
    std::fs::write(&stamp, wanted).with_context(|| format!("cannot write {}", stamp.display()))?;
    Ok(python)
}

/// A tool from crates.io, installed under `target/tools`; returns its path.
pub(crate) fn cargo_tool(name: &str, version: &str, args: &[&str], envs: &[(&str, &str)]) -> Result<PathBuf> {
    let dir = target_dir().join("tools");
    let bin = dir.join("bin").join(name);
    let have = Command::new(&bin)
        .arg("--version")
        .output()
        .map(|o| String::from_utf8_lossy(&o.stdout).into_owned());
    if have.is_ok_and(|text| text.contains(version)) {
        return Ok(bin);
    }
    eprintln!(
        "xtask: building {name} {version} from crates.io into {}",
        dir.display()
    );
    run(cargo()
        .args(["install", "--locked", "--quiet", "--root"])
        .arg(&dir)
        .arg("--target-dir")
        .arg(dir.join("build"))
        .args([name, "--version", version])
        .args(args)
        .envs(envs.iter().copied()))?;
    if !bin.exists() {
        bail!("cargo install {name} left no {}", bin.display());
    }
    Ok(bin)
}
