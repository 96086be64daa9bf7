//! Finds in a process's mapped files the places a probe belongs to.

use std::{
    collections::{HashMap, HashSet},
    os::unix::ffi::OsStrExt,
};

use omnitap_ebpf::{program, watch};
use parking_lot::Mutex;

use super::{
    maps::{self, Mapping},
    site::{self, Arch, Site, SiteKind},
    symbol::{self, FileId, Function, MappedFile, Name, SymbolError},
};
use crate::host::connectors::{is_store, is_yuanrong};

/// Most mapped files that are looked into in one process; serving processes map some 300 native modules.
const MAX_FILES: usize = 1024;
/// Files whose answer is remembered. Beyond it all is forgotten: it costs a few milliseconds to find it
/// again.
const MAX_CACHED: usize = 8192;

/// Probes that belong together: a process has all of them or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ProbeSet {
    /// `zmq_msg_send` of libzmq, whose calls carry every frame of a pipeline.
    Frames,
    /// The functions of libc by which segments of shared memory pass from one process to another.
    Shm,
    /// The functions of libc by which a server reads from its connections and writes to them.
    Http,
    /// The functions by which objects go into Mooncake's store and come out.
    Store,
    /// The same of Yuanrong's data system.
    Yuanrong,
    /// The functions of the libssl that Python's `_ssl` calls, for connections that it encrypts; beside
    /// [`ProbeSet::Http`], which watches the process.
    Tls,
}

/// Where in a function its probe goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// Where so many arguments are still in their registers.
    Entry(u8),
    /// Behind its system calls.
    Syscall,
    /// Where so many arguments are still in their registers, by this program, and at each return.
    Whole(u8, &'static str),
    /// Where result and three arguments of its system call can be had: behind the call, with both in their registers;
    /// else in front of it by this program, and behind it by [`program::HTTP_RETURN`].
    Io(&'static str),
}

/// A function to probe.
#[derive(Debug)]
struct Wanted {
    name: &'static str,
    /// Of a function of C++: parts of its parameters' types.
    parameters: Option<&'static [&'static str]>,
    program: &'static str,
    at: At,
}

impl Wanted {
    fn symbol(&self) -> Name<'static> {
        match self.parameters {
            None => Name::Symbol(self.name),
            Some(parameters) => Name::Cpp {
                path: self.name,
                parameters,
            },
        }
    }
}

/// A function whose program is named as it is.
const fn wanted(name: &'static str, at: At) -> Wanted {
    Wanted {
        name,
        parameters: None,
        program: name,
        at,
    }
}

const fn io(name: &'static str, program: &'static str, note: &'static str) -> Wanted {
    Wanted {
        name,
        parameters: None,
        program,
        at: At::Io(note),
    }
}

/// Each probe costs a tenth of a second when it is taken off, so there are no more than needed. `accept` is not among
/// them: servers call `accept4`, and a connection that was not seen to come is known by its first request.
const HTTP: [Wanted; 9] = [
    io("read", program::HTTP_READ, program::HTTP_NOTE_READ),
    io("recv", program::HTTP_READ, program::HTTP_NOTE_READ),
    io("write", program::HTTP_WRITE, program::HTTP_NOTE_WRITE),
    io("send", program::HTTP_WRITE, program::HTTP_NOTE_WRITE),
    io("writev", program::HTTP_WRITEV, program::HTTP_NOTE_WRITEV),
    io("sendmsg", program::HTTP_SENDMSG, program::HTTP_NOTE_SENDMSG),
    io("accept4", program::HTTP_ACCEPT, program::HTTP_NOTE_ACCEPT),
    Wanted {
        name: "close",
        parameters: None,
        program: program::HTTP_CLOSE,
        at: At::Entry(1),
    },
    // On aarch64 the result takes the place of the descriptor.
    if cfg!(target_arch = "x86_64") {
        Wanted {
            name: "syscall",
            parameters: None,
            program: program::HTTP_SYSCALL,
            at: At::Syscall,
        }
    } else {
        Wanted {
            name: "syscall",
            parameters: None,
            program: program::HTTP_SYSCALL_ENTRY,
            at: At::Entry(2),
        }
    },
];

/// What vLLM-Omni's connector calls of the store's client.
const STORE: [Wanted; 2] = [
    Wanted {
        name: "mooncake::RealClient::put",
        parameters: Some(&["basic_string<char", "&, std::span<char const", ">, "]),
        program: program::STORE_RETURN,
        at: At::Whole(4, program::STORE_PUT),
    },
    Wanted {
        name: "mooncake::RealClient::get_buffer",
        parameters: Some(&["basic_string<char"]),
        program: program::STORE_RETURN,
        at: At::Whole(3, program::STORE_GET),
    },
];

/// What `set` and `get` of the data system's client for Python call. The parameters tell them from functions of the same
/// name.
const YUANRONG: [Wanted; 2] = [
    Wanted {
        name: "datasystem::object_cache::ObjectClientImpl::Set",
        parameters: Some(&["basic_string<char", "&, datasystem::StringView const&, "]),
        program: program::YUANRONG_RETURN,
        at: At::Whole(4, program::YUANRONG_SET),
    },
    Wanted {
        name: "datasystem::object_cache::ObjectClientImpl::Get",
        parameters: Some(&["basic_string<char", "&, long, ", "Optional<datasystem::Buffer>"]),
        program: program::YUANRONG_RETURN,
        at: At::Whole(3, program::YUANRONG_GET),
    },
];

/// Python calls these alone, from 3.10 on.
const TLS: [Wanted; 3] = [
    Wanted {
        name: "SSL_read_ex",
        parameters: None,
        program: program::HTTP_TLS_READ,
        at: At::Whole(4, program::HTTP_NOTE_TLS_READ),
    },
    Wanted {
        name: "SSL_write_ex",
        parameters: None,
        program: program::HTTP_TLS_WRITE,
        at: At::Entry(3),
    },
    Wanted {
        name: "SSL_free",
        parameters: None,
        program: program::HTTP_TLS_FREE,
        at: At::Entry(1),
    },
];

impl ProbeSet {
    /// All, in the order of [`ProbeSet::index`].
    pub const ALL: [Self; 6] = [
        Self::Frames,
        Self::Shm,
        Self::Http,
        Self::Store,
        Self::Yuanrong,
        Self::Tls,
    ];

    /// Label value.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Frames => "frames",
            Self::Shm => "shm",
            Self::Http => "http",
            Self::Store => "store",
            Self::Yuanrong => "yuanrong",
            Self::Tls => "tls",
        }
    }

    /// Place in [`ProbeSet::ALL`].
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }

    /// What stands for the set in the table of watched processes; 0: another set's flag does.
    pub(super) const fn flag(self) -> u64 {
        match self {
            Self::Frames => watch::FRAMES,
            Self::Shm => watch::SHM,
            Self::Http => watch::HTTP,
            // A process with these has those of shared memory or of HTTP too, whose flag counts.
            Self::Store | Self::Yuanrong | Self::Tls => 0,
        }
    }

    const fn wanted(self) -> &'static [Wanted] {
        match self {
            Self::Frames => &const { [wanted(program::ZMQ_MSG_SEND, At::Entry(3))] },
            Self::Shm => {
                &const {
                    [
                        wanted(program::SHM_OPEN, At::Entry(3)),
                        wanted(program::SHM_UNLINK, At::Entry(1)),
                        wanted(program::FTRUNCATE, At::Syscall),
                        wanted(program::FLOCK, At::Syscall),
                    ]
                }
            }
            Self::Http => &HTTP,
            Self::Store => &STORE,
            Self::Yuanrong => &YUANRONG,
            Self::Tls => &TLS,
        }
    }

    /// Its programs.
    pub(super) const fn programs(self) -> &'static [&'static str] {
        match self {
            Self::Frames => &[program::ZMQ_MSG_SEND],
            Self::Shm => &program::SHM,
            Self::Http => &program::HTTP,
            Self::Store => &program::STORE,
            Self::Yuanrong => &program::YUANRONG,
            Self::Tls => &program::HTTP_TLS,
        }
    }

    /// `None`: not to be looked into.
    fn rank(self, path: &[u8], executable: &[u8]) -> Option<Rank> {
        match self {
            // The data system's client talks to its server by a libzmq of its own.
            Self::Frames => (!is_yuanrong(path)).then(|| Rank::of(path, executable)),
            Self::Shm | Self::Http => is_libc(path).then_some(Rank::Named),
            Self::Store => is_store(path).then_some(Rank::Named),
            Self::Yuanrong => file_name(path)
                .starts_with(b"libdatasystem.so")
                .then_some(Rank::Named),
            // Builds of Python that stand alone have it linked in.
            Self::Tls if file_name(path).starts_with(b"libssl") => Some(Rank::Named),
            Self::Tls if file_name(path).starts_with(b"libpython") => Some(Rank::Beside),
            Self::Tls => (path == executable).then_some(Rank::Executable),
        }
    }
}

/// Whether a file is named as glibc's: `libc.so.6` or `libc-2.31.so`, and before 2.34 `librt.so.1` or
/// `librt-2.31.so`, where `shm_open` and `shm_unlink` are then, and `libpthread.so.0` or `libpthread-2.31.so`, which
/// has `read`, `write` and their like once more.
fn is_libc(path: &[u8]) -> bool {
    let name = file_name(path);
    // It may have been replaced by an upgrade since.
    let name = name.strip_suffix(b" (deleted)").unwrap_or(name);
    let prefixes: [&[u8]; 3] = [b"libc-2.", b"librt-2.", b"libpthread-2."];
    matches!(name, b"libc.so.6" | b"librt.so.1" | b"libpthread.so.0")
        || name.ends_with(b".so") && prefixes.iter().any(|prefix| name.starts_with(prefix))
}

fn file_name(path: &[u8]) -> &[u8] {
    path.rsplit(|&b| b == b'/').next().unwrap_or(path)
}

/// Where to probe in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The function.
    pub function: &'static str,
    /// Its program.
    pub(super) program: &'static str,
    /// Offset of the probe site in the file.
    pub offset: u64,
    /// The site within the function.
    pub site: Site,
    /// Build id of the file, empty where it has none.
    pub build_id: Vec<u8>,
}

/// A file that a process runs code from, and where to probe in it.
#[derive(Debug)]
pub struct Target {
    /// The file.
    pub file: MappedFile,
    /// Its path as the kernel prints it: for people, never to be opened.
    pub path: Vec<u8>,
    /// Where: one place for each function that the file defines, or more, by program.
    pub places: Vec<Place>,
}

/// How near a file is to be the libzmq that pyzmq calls. All of the nearest kind that has the function are
/// probed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    /// `libzmq-<hash>.so`, or the extension module `_zmq*.so` with libzmq linked in.
    Named,
    /// Anything else in pyzmq's folders.
    Beside,
    /// The executable.
    Executable,
    /// Any other shared library.
    Other,
}

impl Rank {
    fn of(path: &[u8], executable: &[u8]) -> Self {
        let contains = |text: &[u8]| text.windows(3).any(|w| w == b"zmq");
        if contains(file_name(path)) {
            Self::Named
        } else if contains(path) {
            Self::Beside
        } else if path == executable {
            Self::Executable
        } else {
            Self::Other
        }
    }
}

/// Finds the probe sites of a set, and remembers them by file.
#[derive(Debug)]
pub struct Finder {
    arch: Arch,
    set: ProbeSet,
    /// Empty: the file defines none of the functions.
    known: Mutex<HashMap<FileId, Vec<Place>>>,
}

impl Finder {
    /// A finder of one set.
    #[must_use]
    pub fn new(arch: Arch, set: ProbeSet) -> Self {
        Self {
            arch,
            set,
            known: Mutex::default(),
        }
    }

    /// The files of a process that define functions of the set and run code from there. Empty: not all functions
    /// are there. An error tells why a file that should have them could not be read, if no other file has them,
    /// or that one can't be probed.
    ///
    /// Blocks on reads of the files; a file system of the container's own (FUSE) can make that long.
    pub fn find(&self, pid: u32, maps: &[u8]) -> Result<Vec<Target>, SymbolError> {
        let executable = std::fs::read_link(format!("/proc/{pid}/exe"))
            .map(|path| path.as_os_str().as_bytes().to_vec())
            .unwrap_or_default();
        let mappings: Vec<_> = maps::parse(maps).filter(|m| m.exec && m.inode != 0).collect();
        let mut seen = HashSet::new();
        let mut files: Vec<_> = mappings
            .iter()
            .filter_map(|m| Some((self.set.rank(&m.path, &executable)?, m)))
            .filter(|(_, m)| seen.insert((m.device, m.inode)))
            .collect();
        // Stable: within a rank the order stays that of the addresses.
        files.sort_by_key(|(rank, _)| *rank);
        files.truncate(MAX_FILES);

        let mut failed = None;
        for rank in files.chunk_by(|(a, _), (b, _)| a == b) {
            let mut found = Vec::new();
            for (kind, mapping) in rank {
                match self.look(pid, mapping) {
                    Ok(Some(mut target)) => {
                        // The code must be mapped to run from there: a file may claim any offset.
                        target
                            .places
                            .retain(|place| runs(&mappings, mapping, place.offset));
                        found.push(target);
                    }
                    Ok(None) => {}
                    // Any process may map files that look like libraries and are none.
                    Err(e) if *kind == Rank::Other => {
                        tracing::debug!(pid, path = %String::from_utf8_lossy(&mapping.path), error = %e, "not looked into");
                    }
                    Err(e) => failed = failed.or(Some(e)),
                }
            }
            if self.is_complete(&found) {
                found.retain(|target| !target.places.is_empty());
                return Ok(found);
            }
        }
        failed.map_or(Ok(Vec::new()), Err)
    }

    fn is_complete(&self, found: &[Target]) -> bool {
        let has = |name| found.iter().flat_map(|t| &t.places).any(|p| p.function == name);
        self.set.wanted().iter().all(|wanted| has(wanted.name))
    }

    fn look(&self, pid: u32, mapping: &Mapping<'_>) -> Result<Option<Target>, SymbolError> {
        let file = match MappedFile::open(pid, mapping) {
            Ok(file) => file,
            Err(SymbolError::NotRegular) => return Ok(None),
            Err(e) => return Err(e),
        };
        let known = self.known.lock().get(&file.id).cloned();
        let places = if let Some(places) = known {
            places
        } else {
            let places = self.places(&file)?;
            let mut known = self.known.lock();
            if known.len() >= MAX_CACHED {
                known.clear();
            }
            known.insert(file.id, places.clone());
            places
        };
        Ok((!places.is_empty()).then(|| Target {
            file,
            path: mapping.path.to_vec(),
            places,
        }))
    }

    fn places(&self, file: &MappedFile) -> Result<Vec<Place>, SymbolError> {
        let mut places = Vec::new();
        for wanted in self.set.wanted() {
            let function = match symbol::find(&file.file, self.arch, wanted.symbol()) {
                Ok(function) => function,
                Err(SymbolError::Missing | SymbolError::Foreign) => continue,
                Err(e) => return Err(e),
            };
            let sites = self.sites(file, wanted, &function)?;
            if sites.is_empty() {
                return Err(SymbolError::NoSite(wanted.name));
            }
            for (program, offset, site) in sites {
                // A helper's place comes once for each function that calls it.
                if !places.iter().any(|place: &Place| place.offset == offset) {
                    places.push(Place {
                        function: wanted.name,
                        program,
                        offset,
                        site,
                        build_id: function.build_id.clone(),
                    });
                }
            }
        }
        // One link holds all probes of a program.
        places.sort_by_key(|place| place.program);
        Ok(places)
    }

    /// Programs with their sites and the sites' offsets in the file; none: there is no way.
    fn sites(
        &self,
        file: &MappedFile,
        wanted: &Wanted,
        function: &Function,
    ) -> Result<Vec<(&'static str, u64, Site)>, SymbolError> {
        let own = |program, site: Site| (program, function.offset + site.offset, site);
        let behind = || site::behind_syscalls(self.arch, &function.code);
        let note = match wanted.at {
            At::Entry(arguments) => {
                let site = site::choose(self.arch, &function.code, arguments);
                return Ok(vec![own(wanted.program, site)]);
            }
            At::Syscall => {
                return Ok(behind()
                    .into_iter()
                    .map(|site| own(wanted.program, site))
                    .collect());
            }
            At::Whole(arguments, entry) => {
                let returns = if function.is_whole {
                    site::returns(self.arch, &function.code)
                } else {
                    Vec::new()
                };
                if returns.is_empty() {
                    return Ok(Vec::new());
                }
                let site = site::choose(self.arch, &function.code, arguments);
                let returns = returns.into_iter().map(|site| own(wanted.program, site));
                return Ok(std::iter::once(own(entry, site)).chain(returns).collect());
            }
            At::Io(note) => note,
        };
        // A server always has threads.
        let behind = site::of_threads(self.arch, &function.code, behind());
        // On aarch64 the result takes the place of the descriptor.
        if !behind.is_empty() && self.arch == Arch::X86_64 {
            return Ok(behind.into_iter().map(|site| own(wanted.program, site)).collect());
        }
        let front = site::choose(self.arch, &function.code, 3);
        if front.kind == SiteKind::Slow {
            return Ok(Vec::new());
        }
        let mut sites = vec![own(note, front)];
        if behind.is_empty() {
            let Some(entry) = site::helper(self.arch, &function.code)
                .and_then(|distance| function.offset.checked_add_signed(distance))
            else {
                return Ok(Vec::new());
            };
            let code = file.code_at(entry)?;
            let Some(site) = site::behind_helper(self.arch, &code) else {
                return Ok(Vec::new());
            };
            sites.push((program::HTTP_RETURN, entry + site.offset, site));
        } else {
            sites.extend(behind.into_iter().map(|site| own(program::HTTP_RETURN, site)));
        }
        Ok(sites)
    }
}

/// Whether a file's byte lies in one of its executable mappings.
fn runs(mappings: &[Mapping<'_>], file: &Mapping<'_>, offset: u64) -> bool {
    mappings
        .iter()
        .any(|m| (m.device, m.inode) == (file.device, file.inode) && m.covers(offset))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(b"/usr/lib/x86_64-linux-gnu/libc.so.6", true)]
    #[case(b"/usr/lib/x86_64-linux-gnu/libc.so.6 (deleted)", true)]
    #[case(b"/lib/x86_64-linux-gnu/libc-2.31.so", true)]
    #[case(b"/lib/x86_64-linux-gnu/librt-2.31.so", true)]
    #[case(b"/lib/librt.so.1", true)]
    #[case(b"/lib/x86_64-linux-gnu/libpthread-2.31.so", true)]
    #[case(b"/lib/x86_64-linux-gnu/libpthread.so.0", true)]
    #[case(b"/usr/lib/librtmp.so.1", false)]
    #[case(b"/usr/lib/libcudart.so.12", false)]
    #[case(b"/lib/ld-musl-x86_64.so.1", false)]
    #[case(b"/usr/lib/libc++.so.1", false)]
    fn libc_by_name(#[case] path: &[u8], #[case] expected: bool) {
        assert_eq!(is_libc(path), expected);
    }

    /// This process has a libc with all of the functions, and cheap places in each.
    #[rstest]
    fn own_libc(#[values(ProbeSet::Shm, ProbeSet::Http)] set: ProbeSet) {
        let text = maps::read(std::process::id()).unwrap();
        let finder = Finder::new(Arch::NATIVE, set);
        let found = finder.find(std::process::id(), &text).unwrap();
        if found.is_empty() {
            eprintln!("SKIPPED: this process runs without glibc, or with an old one and without librt");
            return;
        }
        let places: Vec<_> = found.iter().flat_map(|target| &target.places).collect();
        for wanted in set.wanted() {
            let place = places.iter().find(|p| p.function == wanted.name).unwrap();
            let is_odd = wanted.name == "syscall" && Arch::NATIVE == Arch::Aarch64;
            assert_eq!(place.site.kind == SiteKind::Slow, is_odd, "{place:?}");
            if wanted.at == At::Syscall {
                assert_eq!(place.site.kind, SiteKind::Syscall, "{place:?}");
            }
        }
    }
}
