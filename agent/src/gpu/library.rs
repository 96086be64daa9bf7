//! Where hosts have `libnvidia-ml.so.1`.

use std::path::{Path, PathBuf};

/// Name of the library. Only development packages have one without the version.
pub const NAME: &str = "libnvidia-ml.so.1";

/// Roots below which a driver is installed: this one, a GPU operator's driver container, the container image of managed
/// Kubernetes nodes, NixOS.
const ROOTS: [&str; 4] = [
    "/",
    "/run/nvidia/driver",
    "/home/kubernetes/bin/nvidia",
    "/run/opengl-driver",
];

/// Library directories of the distributions.
const DIRECTORIES: [&str; 6] = [
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "lib64",
    "usr/lib",
    "lib",
];

/// The host's root, for an agent in a container of its own with the host's PID namespace.
const HOST_ROOT: &str = "/proc/1/root";

/// The files that may be the library, best first. `configured`, where not empty, replaces the built-in list.
#[must_use]
pub fn candidates(configured: &[PathBuf]) -> Vec<PathBuf> {
    let mut paths = configured.to_vec();
    if paths.is_empty() {
        for prefix in ["", HOST_ROOT] {
            for root in ROOTS {
                let root = format!("{prefix}{root}");
                paths.extend(DIRECTORIES.map(|directory| Path::new(&root).join(directory).join(NAME)));
            }
        }
    }
    paths.retain(|path| path.is_file());
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configured_files_come_alone_and_in_their_order() {
        let folder = tempfile::tempdir().unwrap();
        let [first, second, absent] = ["b.so", "a.so", "c.so"].map(|name| folder.path().join(name));
        std::fs::write(&first, "").unwrap();
        std::fs::write(&second, "").unwrap();
        let found = candidates(&[absent, first.clone(), second.clone()]);
        assert_eq!(found, [first, second]);
    }
}
