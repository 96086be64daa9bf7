//! Finds in a process's mapped files the places a probe belongs to.

use std::{
    collections::{HashMap, HashSet},
    os::unix::ffi::OsStrExt,
};

use parking_lot::Mutex;

use super::{
    maps::{self, Mapping},
    site::{self, Arch, Site},
    symbol::{self, FileId, MappedFile, SymbolError},
};

/// Most mapped files that are looked into in one process; serving processes map some 300 native modules.
const MAX_FILES: usize = 1024;
/// Files whose answer is remembered. Beyond it all is forgotten: it costs a few milliseconds to find it
/// again.
const MAX_CACHED: usize = 8192;

/// Where to probe in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
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
    /// Where.
    pub place: Place,
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
        let name = path.rsplit(|&b| b == b'/').next().unwrap_or(path);
        if contains(name) {
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

/// Finds a function's probe sites, and remembers them by file.
#[derive(Debug)]
pub struct Finder {
    arch: Arch,
    name: &'static [u8],
    /// `None`: the file does not define the function.
    known: Mutex<HashMap<FileId, Option<Place>>>,
}

impl Finder {
    /// A finder of one function.
    #[must_use]
    pub fn new(arch: Arch, name: &'static [u8]) -> Self {
        Self {
            arch,
            name,
            known: Mutex::default(),
        }
    }

    /// The files of a process that define the function and run code from there. Empty: none. An error tells
    /// why libzmq, pyzmq's module or the executable could not be read, if no other file has it.
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
            .filter(|m| seen.insert((m.device, m.inode)))
            .map(|m| (Rank::of(&m.path, &executable), m))
            .collect();
        // Stable: within a rank the order stays that of the addresses.
        files.sort_by_key(|(rank, _)| *rank);
        files.truncate(MAX_FILES);

        let mut failed = None;
        for rank in files.chunk_by(|(a, _), (b, _)| a == b) {
            let mut found = Vec::new();
            for (kind, mapping) in rank {
                match self.look(pid, mapping) {
                    // The code must be mapped to run from there: a file may claim any offset.
                    Ok(Some(target)) if runs(&mappings, mapping, target.place.offset) => found.push(target),
                    Ok(_) => {}
                    // Any process may map files that look like libraries and are none.
                    Err(e) if *kind == Rank::Other => {
                        tracing::debug!(pid, path = %String::from_utf8_lossy(&mapping.path), error = %e, "not looked into");
                    }
                    Err(e) => failed = failed.or(Some(e)),
                }
            }
            if !found.is_empty() {
                return Ok(found);
            }
        }
        failed.map_or(Ok(Vec::new()), Err)
    }

    fn look(&self, pid: u32, mapping: &Mapping<'_>) -> Result<Option<Target>, SymbolError> {
        let file = match MappedFile::open(pid, mapping) {
            Ok(file) => file,
            Err(SymbolError::NotRegular) => return Ok(None),
            Err(e) => return Err(e),
        };
        let known = self.known.lock().get(&file.id).cloned();
        let place = if let Some(place) = known {
            place
        } else {
            let place = match symbol::find(&file.file, self.arch, self.name) {
                Ok(function) => {
                    let site = site::choose(self.arch, &function.code);
                    Some(Place {
                        offset: function.offset + site.offset,
                        site,
                        build_id: function.build_id,
                    })
                }
                Err(SymbolError::Missing | SymbolError::Foreign) => None,
                Err(e) => return Err(e),
            };
            let mut known = self.known.lock();
            if known.len() >= MAX_CACHED {
                known.clear();
            }
            known.insert(file.id, place.clone());
            place
        };
        Ok(place.map(|place| Target {
            file,
            path: mapping.path.to_vec(),
            place,
        }))
    }
}

/// Whether a file's byte lies in one of its executable mappings.
fn runs(mappings: &[Mapping<'_>], file: &Mapping<'_>, offset: u64) -> bool {
    mappings
        .iter()
        .any(|m| (m.device, m.inode) == (file.device, file.inode) && m.covers(offset))
}
