//! `cargo xtask ebpf`: builds the committed BPF objects, or proves that they come from the source.
//!
//! One pinned chain builds them, so that the same source gives the same bytes everywhere: Debian's rustc and
//! library source for the code, bpf-linker from crates.io on Debian's LLVM for the object.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::setup;

/// Options of `cargo xtask ebpf`.
///
/// Without options, builds agent-ebpf/prebuilt/*.bpf.o and its manifest.json anew. The chain is Debian's
/// rustc-web, cargo-web and rust-web-src, and bpf-linker with llvm-22-dev; what is missing is installed.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Build into target/ and fail unless the committed objects and manifest are the same
    #[arg(long)]
    check: bool,
}

/// Machines for which there is an object: a probe reads its arguments from that machine's registers.
const MACHINES: [&str; 2] = ["x86_64", "aarch64"];

/// Files that a Debian package of the chain brings, and the package.
const CHAIN: [(&str, &str); 10] = [
    ("/usr/bin/rustc", "rustc-web"),
    ("/usr/bin/cargo", "cargo-web"),
    (LIBRARY_SOURCE, "rust-web-src"),
    ("/usr/bin/cc", "gcc"),
    ("/usr/bin/c++", "g++"),
    ("/usr/lib/llvm-22/bin/llvm-config", "llvm-22-dev"),
    ("/usr/lib/llvm-22/lib/libPolly.a", "libpolly-22-dev"),
    ("/usr/include/zstd.h", "libzstd-dev"),
    ("/usr/include/zlib.h", "zlib1g-dev"),
    ("/usr/include/libxml2/libxml/tree.h", "libxml2-dev"),
];
const LIBRARY_SOURCE: &str = "/usr/lib/rustlib/src/rust/library/core/Cargo.toml";
const RUSTC: &str = "/usr/bin/rustc";
const CARGO: &str = "/usr/bin/cargo";
const LLVM: &str = "/usr/lib/llvm-22";
const BPF_LINKER: &str = "0.13.0";
const TARGET: &str = "bpfel-unknown-none";

/// What the objects were made from and with: `agent-ebpf/prebuilt/manifest.json`.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Manifest {
    /// SHA-256 of each object.
    objects: BTreeMap<String, String>,
    /// SHA-256 of each source file, by its path in the repository.
    sources: BTreeMap<String, String>,
    /// Versions of the crates that end up in the objects.
    crates: BTreeMap<String, String>,
    /// Versions of compiler, linker and LLVM.
    tools: BTreeMap<String, String>,
}

/// Runs the task.
pub(crate) fn run(args: &Args) -> Result<()> {
    let linker = install()?;
    let prebuilt = setup::root().join("agent-ebpf/prebuilt");
    if !args.check {
        fs::create_dir_all(&prebuilt).with_context(|| format!("cannot make {}", prebuilt.display()))?;
        build(&linker, &prebuilt)?;
        println!("built {}", prebuilt.display());
        return Ok(());
    }
    let committed = read_manifest(&prebuilt)?;
    let rebuilt_dir = setup::target_dir().join("bpf/check");
    fs::create_dir_all(&rebuilt_dir).with_context(|| format!("cannot make {}", rebuilt_dir.display()))?;
    let rebuilt = build(&linker, &rebuilt_dir)?;
    let mut differences = compare(&committed, &rebuilt);
    differences.extend(damaged_objects(&prebuilt, &committed)?);
    if differences.is_empty() {
        println!("the committed BPF objects come from this source");
        return Ok(());
    }
    bail!(
        "the committed BPF objects do not come from this source:\n  {}\n\
         Rebuild them with `cargo xtask ebpf` and commit agent-ebpf/prebuilt.",
        differences.join("\n  ")
    )
}

/// Installs the chain; returns the linker.
fn install() -> Result<PathBuf> {
    setup::debian(&CHAIN).context("the BPF objects are built with Debian's Rust and LLVM packages")?;
    setup::cargo_tool(
        "bpf-linker",
        BPF_LINKER,
        &["--no-default-features", "--features", "llvm-22"],
        &[("LLVM_PREFIX", LLVM)],
    )
}

/// Builds all objects into a folder, with their manifest.
fn build(linker: &Path, into: &Path) -> Result<Manifest> {
    let mut objects = BTreeMap::new();
    for machine in MACHINES {
        let built = build_object(linker, machine)?;
        let name = object_name(machine);
        let bytes = fs::read(&built).with_context(|| format!("cannot read {}", built.display()))?;
        objects.insert(name.clone(), sha256(&bytes));
        fs::write(into.join(&name), bytes).with_context(|| format!("cannot write {name}"))?;
    }
    let manifest = Manifest {
        objects,
        sources: sources()?,
        crates: crates()?,
        tools: tools(linker)?,
    };
    let mut text = serde_json::to_string_pretty(&manifest)?;
    text.push('\n');
    let path = into.join("manifest.json");
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(manifest)
}

fn object_name(machine: &str) -> String {
    format!("omnitap-{machine}.bpf.o")
}

/// Builds one object; returns where cargo put it.
fn build_object(linker: &Path, machine: &str) -> Result<PathBuf> {
    eprintln!("xtask: building the BPF object for {machine}");
    let root = setup::root();
    let target_dir = setup::target_dir().join("bpf");
    let mut cargo = Command::new(CARGO);
    // Nothing of the caller's cargo may reach this build: its flags would change the object.
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("CARGO") && name != "CARGO_HOME" || name.starts_with("RUST") {
            cargo.env_remove(&*name);
        }
    }
    let mut remap = OsString::from("--remap-path-prefix=");
    remap.push(&root);
    remap.push("=/omnitap");
    let flags = [
        OsString::from("-Ctarget-cpu=v3"),
        OsString::from("-Cdebuginfo=0"),
        remap,
    ];
    cargo
        .current_dir(&root)
        .args([
            "build",
            "--quiet",
            "--locked",
            "--release",
            "-Zbuild-std=core",
            "--target",
            TARGET,
        ])
        .args([
            "--package",
            "omnitap-ebpf",
            "--bin",
            "omnitap-ebpf",
            "--features",
            "programs",
        ])
        .arg("--target-dir")
        .arg(&target_dir)
        // The pinned compiler is a stable one; only this opens build-std and BPF assembly in it.
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTC", RUSTC)
        .env("AYA_BPF_TARGET_ARCH", machine)
        .env("CARGO_TARGET_BPFEL_UNKNOWN_NONE_LINKER", linker)
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join(&OsString::from("\u{1f}")))
        // The workspace's profile serves the agent: what shapes the object is said here.
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "3")
        .env("CARGO_PROFILE_RELEASE_LTO", "fat")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "0")
        .env("CARGO_PROFILE_RELEASE_PANIC", "abort")
        .env("CARGO_INCREMENTAL", "0");
    setup::run(&mut cargo).with_context(|| format!("the BPF object for {machine} does not build"))?;
    Ok(target_dir.join(TARGET).join("release/omnitap-ebpf"))
}

fn read_manifest(folder: &Path) -> Result<Manifest> {
    let path = folder.join("manifest.json");
    let text = fs::read_to_string(&path)
        .with_context(|| format!("cannot read {}: run `cargo xtask ebpf`", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{} is no manifest", path.display()))
}

/// What differs between two manifests, in words.
fn compare(committed: &Manifest, rebuilt: &Manifest) -> Vec<String> {
    let Manifest {
        objects,
        sources,
        crates,
        tools,
    } = committed;
    let mut out = Vec::new();
    let parts = [
        ("source", sources, &rebuilt.sources),
        ("crate", crates, &rebuilt.crates),
        ("tool", tools, &rebuilt.tools),
        ("object", objects, &rebuilt.objects),
    ];
    for (what, old, new) in parts {
        for (name, value) in old {
            match new.get(name) {
                Some(now) if now == value => {}
                Some(now) => out.push(format!("{what} {name}: committed {value}, now {now}")),
                None => out.push(format!("{what} {name}: committed {value}, now gone")),
            }
        }
        for (name, now) in new {
            if !old.contains_key(name) {
                out.push(format!("{what} {name}: not in the manifest, now {now}"));
            }
        }
    }
    out
}

/// Objects that are not those of their own manifest.
fn damaged_objects(folder: &Path, manifest: &Manifest) -> Result<Vec<String>> {
    let mut out = Vec::new();
    for (name, expected) in &manifest.objects {
        let path = folder.join(name);
        let bytes = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let found = sha256(&bytes);
        if found != *expected {
            out.push(format!(
                "object {name}: its manifest says {expected}, the file is {found}"
            ));
        }
    }
    Ok(out)
}

/// SHA-256 of each file that the programs are written in.
fn sources() -> Result<BTreeMap<String, String>> {
    let root = setup::root();
    let folder = root.join("agent-ebpf/src");
    let mut out = BTreeMap::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry?.path();
        let bytes = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let name = path
            .strip_prefix(&root)
            .unwrap_or(&path)
            .to_string_lossy()
            .into_owned();
        out.insert(name, sha256(&bytes));
    }
    Ok(out)
}

/// Versions of the crates that are linked into the programs.
fn crates() -> Result<BTreeMap<String, String>> {
    let tree = setup::output(setup::cargo().args([
        "tree",
        "--locked",
        "--package=omnitap-ebpf",
        "--features=programs",
        "--target=all",
        "--edges=normal,no-proc-macro",
        "--prefix=none",
        "--format={p}",
    ]))?;
    let mut out = BTreeMap::new();
    for line in tree.lines() {
        let mut words = line.split_whitespace();
        if let (Some(name), Some(version)) = (words.next(), words.next())
            && name != "omnitap-ebpf"
        {
            out.insert(name.to_owned(), version.trim_start_matches('v').to_owned());
        }
    }
    Ok(out)
}

fn tools(linker: &Path) -> Result<BTreeMap<String, String>> {
    let version = |program: &Path, arg: &str| {
        setup::output(Command::new(program).arg(arg)).map(|text| text.trim().to_owned())
    };
    let tools = BTreeMap::from([
        ("rustc".to_owned(), version(Path::new(RUSTC), "--version")?),
        ("bpf-linker".to_owned(), version(linker, "--version")?),
        (
            "llvm".to_owned(),
            version(&Path::new(LLVM).join("bin/llvm-config"), "--version")?,
        ),
    ]);
    ensure!(
        tools.values().all(|v| !v.is_empty()),
        "a tool does not tell its version"
    );
    Ok(tools)
}

fn sha256(bytes: &[u8]) -> String {
    use std::fmt::Write as _;

    let mut out = String::new();
    for byte in Sha256::digest(bytes) {
        // Writing to a String does not fail.
        let _ = write!(out, "{byte:02x}");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let map = |name: &str, value: &str| BTreeMap::from([(name.to_owned(), value.to_owned())]);
        Manifest {
            objects: map("a.o", "1"),
            sources: map("a.rs", "2"),
            crates: map("aya-ebpf", "0.2.1"),
            tools: map("rustc", "1.96.0"),
        }
    }

    /// Catches a change of the source without `cargo xtask ebpf` where the BPF chain is not installed.
    #[test]
    fn the_committed_objects_are_of_this_source() {
        let prebuilt = setup::root().join("agent-ebpf/prebuilt");
        let committed = read_manifest(&prebuilt).unwrap();
        assert_eq!(committed.sources, sources().unwrap(), "run `cargo xtask ebpf`");
        assert_eq!(
            damaged_objects(&prebuilt, &committed).unwrap(),
            Vec::<String>::new()
        );
    }

    #[test]
    fn equal_manifests_have_no_difference() {
        assert_eq!(compare(&manifest(), &manifest()), Vec::<String>::new());
    }

    #[test]
    fn each_difference_is_named() {
        let mut other = manifest();
        other.objects.insert("a.o".to_owned(), "9".to_owned());
        other.sources.clear();
        other.crates.insert("new".to_owned(), "1.0.0".to_owned());
        assert_eq!(
            compare(&manifest(), &other),
            [
                "source a.rs: committed 2, now gone",
                "crate new: not in the manifest, now 1.0.0",
                "object a.o: committed 1, now 9",
            ]
        );
    }

    #[test]
    fn an_object_that_was_tampered_with_is_found() {
        let folder = std::env::temp_dir().join(format!("omnitap-ebpf-test-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("a.o"), b"other bytes").unwrap();
        let found = damaged_objects(&folder, &manifest()).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        assert!(
            matches!(&found[..], [one] if one.starts_with("object a.o: its manifest says 1")),
            "{found:?}"
        );
    }
}
