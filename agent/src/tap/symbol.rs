//! Finds where a function lies in a mapped ELF file, by its exported name.
//!
//! The file may belong to another tenant and may be made to harm: it is read by `read`, never mapped (it may be
//! truncated meanwhile, which would raise SIGBUS), only the parts that are needed, and no more than a budget of bytes.

use std::{
    cell::Cell,
    fs::File,
    io,
    ops::Range,
    os::{
        fd::AsRawFd,
        unix::{
            ffi::OsStrExt,
            fs::{MetadataExt, OpenOptionsExt},
        },
    },
    path::{Path, PathBuf},
};

use object::{
    LittleEndian as Le, ReadCache, ReadRef, elf,
    read::elf::{FileHeader, ProgramHeader, SectionHeader, Sym},
};
use thiserror::Error;

use super::{maps::Mapping, site::Arch};

/// Most bytes read of one file. The string table of the largest native modules (libtorch) has some 20 MB.
const MAX_READ: u64 = 64 << 20;
/// Most bytes of a function that are looked at: enough to see whether a branch comes back to the probe site.
const MAX_CODE: u64 = 4096;
/// Bytes looked at of a function whose size the symbol does not tell.
const CODE_OF_UNKNOWN_SIZE: u64 = 64;

/// Why a file gave no function.
#[derive(Debug, Error)]
pub enum SymbolError {
    /// The mapped file could not be opened.
    #[error("cannot open the mapped file: {0}")]
    Open(#[source] io::Error),
    /// The path leads to another file than the mapped one, and `map_files` is denied.
    #[error(
        "`{}` is not the mapped file (deleted or replaced), and /proc/<pid>/map_files is denied: \
        CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN is needed",
        path.display()
    )]
    Replaced {
        /// Path in the process's root.
        path: PathBuf,
    },
    /// Not a regular file.
    #[error("not a regular file")]
    NotRegular,
    /// Not an ELF file that this machine can run.
    #[error("not a 64-bit ELF file of this machine")]
    Foreign,
    /// The file is damaged, or needs more than the budget of bytes.
    #[error("damaged or oversized ELF file: {0}")]
    Damaged(#[from] object::read::Error),
    /// No such symbol is defined.
    #[error("does not define the symbol")]
    Missing,
}

/// What a file is known by: device, inode, size and times of its last change. A build id is no key: a file of another
/// tenant may carry that of a genuine library, and a probe at an offset taken from it would hurt the genuine one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    /// Device and inode.
    pub inode: (u64, u64),
    /// Size in bytes.
    pub size: u64,
    /// Seconds and nanoseconds of content and status change.
    pub changed: (i64, i64, i64, i64),
}

impl FileId {
    fn of(meta: &std::fs::Metadata) -> Self {
        Self {
            inode: (meta.dev(), meta.ino()),
            size: meta.len(),
            changed: (meta.mtime(), meta.mtime_nsec(), meta.ctime(), meta.ctime_nsec()),
        }
    }
}

/// A mapped file, open for reading.
#[derive(Debug)]
pub struct MappedFile {
    /// The file.
    pub file: File,
    /// What it is known by.
    pub id: FileId,
}

impl MappedFile {
    /// Opens the file behind a mapping, and no other, whatever happened to its path.
    ///
    /// `/proc/<pid>/map_files` leads to the mapped file itself (needs `CAP_CHECKPOINT_RESTORE`, Linux 5.9, or
    /// `CAP_SYS_ADMIN`). Where it is denied, the path is taken within the process's root, if it still leads to the same
    /// device and inode.
    pub fn open(pid: u32, mapping: &Mapping<'_>) -> Result<Self, SymbolError> {
        let exact = format!("/proc/{pid}/map_files/{}", mapping.map_files_name());
        match locate(Path::new(&exact)) {
            Ok(place) => Self::reopen(&place),
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => Self::open_by_path(pid, mapping),
            Err(e) => Err(SymbolError::Open(e)),
        }
    }

    fn open_by_path(pid: u32, mapping: &Mapping<'_>) -> Result<Self, SymbolError> {
        let mut path = PathBuf::from(format!("/proc/{pid}/root"));
        path.push(std::ffi::OsStr::from_bytes(
            mapping.path.strip_prefix(b"/").unwrap_or(&mapping.path),
        ));
        let place = locate(&path).map_err(SymbolError::Open)?;
        let meta = place.metadata().map_err(SymbolError::Open)?;
        let device = (libc::major(meta.dev()), libc::minor(meta.dev()));
        if (device, meta.ino()) != (mapping.device, mapping.inode) {
            return Err(SymbolError::Replaced { path });
        }
        Self::reopen(&place)
    }

    /// Opens for reading what `locate` found, once it is known to be a regular file: opening a device can have effects.
    fn reopen(place: &File) -> Result<Self, SymbolError> {
        let meta = place.metadata().map_err(SymbolError::Open)?;
        if !meta.is_file() {
            return Err(SymbolError::NotRegular);
        }
        let file = File::options()
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(own_path(place))
            .map_err(SymbolError::Open)?;
        let id = FileId::of(&file.metadata().map_err(SymbolError::Open)?);
        Ok(Self { file, id })
    }

    /// A path that leads to this very file for as long as it is open, in this process.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        own_path(&self.file)
    }
}

/// A handle for the place alone: nothing is opened yet.
fn locate(path: &Path) -> io::Result<File> {
    File::options().read(true).custom_flags(libc::O_PATH).open(path)
}

fn own_path(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// A function in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// Offset of its first byte in the file.
    pub offset: u64,
    /// Its first bytes; all of them, up to 4 KiB, where the symbol tells its size.
    pub code: Vec<u8>,
    /// Build id of the file, empty where it has none.
    pub build_id: Vec<u8>,
}

/// Finds a defined function by name in an ELF file: in the dynamic symbols, then in the full table.
pub fn find(file: &File, arch: Arch, name: &[u8]) -> Result<Function, SymbolError> {
    let cache = ReadCache::new(file);
    let budget = Cell::new(MAX_READ);
    find_in(
        Bounded {
            cache: &cache,
            budget: &budget,
        },
        arch,
        name,
    )
}

fn find_in<'a, R: ReadRef<'a>>(data: R, arch: Arch, name: &[u8]) -> Result<Function, SymbolError> {
    let machine = match arch {
        Arch::X86_64 => elf::EM_X86_64,
        Arch::Aarch64 => elf::EM_AARCH64,
    };
    // Whatever has no ELF header is none, be it short or of another kind.
    let header = elf::FileHeader64::<Le>::parse(data).map_err(|_| SymbolError::Foreign)?;
    if !header.is_little_endian() || header.e_machine(Le) != machine {
        return Err(SymbolError::Foreign);
    }
    let sections = header.section_headers(Le, data)?;
    for kind in [elf::SHT_DYNSYM, elf::SHT_SYMTAB] {
        for table in sections.iter().filter(|s| s.sh_type(Le) == kind) {
            let Some(names) = sections.get(table.sh_link(Le) as usize) else {
                continue;
            };
            // The names first: in most files the symbol is not there, and the table itself is never read.
            let places = places(names.data(Le, data)?, name);
            if places.is_empty() {
                continue;
            }
            let symbols = table.data_as_array::<elf::Sym64<Le>, R>(Le, data)?;
            let defined = symbols.iter().find(|symbol| {
                places.contains(&symbol.st_name(Le))
                    && symbol.st_shndx(Le) != elf::SHN_UNDEF
                    && symbol.st_type() == elf::STT_FUNC
            });
            if let Some(symbol) = defined {
                return function(data, header, sections, symbol);
            }
        }
    }
    Err(SymbolError::Missing)
}

/// Where a name stands in a string table, whole to its end; a table may share the ends of longer names.
fn places(names: &[u8], name: &[u8]) -> Vec<u32> {
    let Some(&first) = name.first() else {
        return Vec::new();
    };
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(rest) = names.get(at..) {
        let Some(step) = rest.iter().position(|&b| b == first) else {
            break;
        };
        at += step;
        let ends = names
            .get(at..)
            .and_then(|r| r.strip_prefix(name))
            .is_some_and(|r| r.first() == Some(&0));
        if let (true, Ok(place)) = (ends, u32::try_from(at)) {
            found.push(place);
        }
        at += 1;
    }
    found
}

fn function<'a, R: ReadRef<'a>>(
    data: R,
    header: &elf::FileHeader64<Le>,
    sections: &[elf::SectionHeader64<Le>],
    symbol: &elf::Sym64<Le>,
) -> Result<Function, SymbolError> {
    let address = symbol.st_value(Le);
    let segments = header.program_headers(Le, data)?;
    let (offset, left) = segments
        .iter()
        .filter(|s| s.p_type(Le) == elf::PT_LOAD && s.p_flags(Le).contains(elf::PF_X))
        .find_map(|s| {
            let into = address.checked_sub(s.p_vaddr(Le))?;
            let left = s.p_filesz(Le).checked_sub(into).filter(|&left| left > 0)?;
            Some((s.p_offset(Le).checked_add(into)?, left))
        })
        .ok_or(SymbolError::Missing)?;
    let size = match symbol.st_size(Le) {
        0 => CODE_OF_UNKNOWN_SIZE,
        size => size.min(MAX_CODE),
    };
    let code = data
        .read_bytes_at(offset, size.min(left))
        .map_err(|()| SymbolError::Missing)?
        .to_vec();
    Ok(Function {
        offset,
        code,
        build_id: build_id(data, sections),
    })
}

/// Information only, so that whatever is wrong with the notes gives none.
fn build_id<'a, R: ReadRef<'a>>(data: R, sections: &[elf::SectionHeader64<Le>]) -> Vec<u8> {
    for section in sections {
        let Ok(Some(mut notes)) = section.notes(Le, data) else {
            continue;
        };
        while let Ok(Some(note)) = notes.next() {
            if note.name() == elf::ELF_NOTE_GNU && note.n_type(Le) == elf::NT_GNU_BUILD_ID {
                return note.desc().to_vec();
            }
        }
    }
    Vec::new()
}

/// Reads of a file, as long as the budget lasts.
#[derive(Clone, Copy)]
struct Bounded<'a> {
    cache: &'a ReadCache<&'a File>,
    budget: &'a Cell<u64>,
}

impl<'a> ReadRef<'a> for Bounded<'a> {
    fn len(self) -> Result<u64, ()> {
        self.cache.len()
    }

    fn read_bytes_at(self, offset: u64, size: u64) -> Result<&'a [u8], ()> {
        self.budget.set(self.budget.get().checked_sub(size).ok_or(())?);
        self.cache.read_bytes_at(offset, size)
    }

    fn read_bytes_at_until(self, range: Range<u64>, delimiter: u8) -> Result<&'a [u8], ()> {
        // The cache reads up to 4 KiB of a string.
        self.budget.set(self.budget.get().checked_sub(4096).ok_or(())?);
        self.cache.read_bytes_at_until(range, delimiter)
    }
}
