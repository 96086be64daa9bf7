//! Finds where a function lies in a mapped ELF file, by its exported name.
//!
//! The file may belong to another tenant and may be made to harm: it is read by `read`, never mapped (it may
//! be truncated meanwhile, which would raise SIGBUS), only the parts that are needed, and no more than a
//! budget of bytes.

use std::{
    cell::Cell,
    fs::File,
    io,
    ops::Range,
    os::{
        fd::AsRawFd,
        unix::{
            ffi::OsStrExt,
            fs::{FileExt, MetadataExt, OpenOptionsExt},
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
const MAX_CODE: u64 = 32 << 10;
/// Longest mangled name that is looked at, in bytes: those of templates have thousands.
const MAX_MANGLED: usize = 1024;
/// Bytes looked at of a function whose size the symbol does not tell.
const CODE_OF_UNKNOWN_SIZE: usize = 64;

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
    /// The function has no place where its probe could be.
    #[error(
        "`{0}` has no place to probe: no jump behind its system call or in a function that makes the call for it, or \
        no return that is sure to be one"
    )]
    NoSite(&'static str),
}

/// What a file is known by: device, inode, size and times of its last change. A build id is no key: a file of
/// another tenant may carry that of a genuine library, and a probe at an offset taken from it would hurt the
/// genuine one.
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
    /// `CAP_SYS_ADMIN`). Where it is denied, the path is taken within the process's root, if it still leads
    /// to the same device and inode.
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

    /// Opens for reading what `locate` found, once it is known to be a regular file: opening a device can
    /// have effects.
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

    /// Code at an offset of the file, of a function whose size is not known.
    pub fn code_at(&self, offset: u64) -> Result<Vec<u8>, SymbolError> {
        let mut code = vec![0; CODE_OF_UNKNOWN_SIZE];
        let read = self.file.read_at(&mut code, offset).map_err(SymbolError::Open)?;
        code.truncate(read);
        Ok(code)
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
    /// Its first bytes; all of them, up to 32 KiB, where the symbol tells its size.
    pub code: Vec<u8>,
    /// Whether that is all of it.
    pub is_whole: bool,
    /// Build id of the file, empty where it has none.
    pub build_id: Vec<u8>,
}

/// What a function is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Name<'a> {
    /// The symbol itself.
    Symbol(&'a str),
    /// A function of C++, which has more in its symbol.
    Cpp {
        /// With its namespaces and class: `space::Class::function`.
        path: &'a str,
        /// Parts of its parameters' types, in their order.
        parameters: &'a [&'a str],
    },
}

/// Finds a defined function by name in an ELF file: in the dynamic symbols, then in the full table.
pub fn find(file: &File, arch: Arch, name: Name<'_>) -> Result<Function, SymbolError> {
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

fn find_in<'a, R: ReadRef<'a>>(data: R, arch: Arch, name: Name<'_>) -> Result<Function, SymbolError> {
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
            let names = names.data(Le, data)?;
            let places = match name {
                Name::Symbol(name) => places(names, name.as_bytes()),
                Name::Cpp { path, parameters } => cpp_places(names, path, parameters),
            };
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

/// Where names of functions of C++ stand in a string table that are called so.
fn cpp_places(names: &[u8], path: &str, parameters: &[&str]) -> Vec<u32> {
    // As it stands in the symbol: each part behind its length.
    let mut parts = String::new();
    for part in path.split("::") {
        parts.push_str(&part.len().to_string());
        parts.push_str(part);
    }
    let mut found = Vec::new();
    for prefix in ["_ZN", "_ZNK"] {
        let start = format!("{prefix}{parts}E");
        let mut at = 0;
        while let Some(step) = find_bytes(names.get(at..).unwrap_or_default(), start.as_bytes()) {
            at += step;
            let rest = names.get(at..).unwrap_or_default();
            let symbol = rest.iter().take(MAX_MANGLED).position(|&b| b == 0);
            let symbol = symbol.and_then(|len| rest.get(..len));
            if let (Some(true), Ok(place)) = (
                symbol.map(|symbol| is_called(symbol, path, parameters)),
                u32::try_from(at),
            ) {
                found.push(place);
            }
            at += 1;
        }
    }
    found
}

fn find_bytes(text: &[u8], wanted: &[u8]) -> Option<usize> {
    text.windows(wanted.len()).position(|window| window == wanted)
}

fn is_called(symbol: &[u8], path: &str, parameters: &[&str]) -> bool {
    let Ok(symbol) = cpp_demangle::Symbol::new(symbol) else {
        return false;
    };
    let Ok(text) = symbol.demangle() else {
        return false;
    };
    let Some(mut rest) = text.strip_prefix(path).and_then(|rest| rest.strip_prefix('(')) else {
        return false;
    };
    parameters
        .iter()
        .all(|parameter| match rest.split_once(parameter) {
            Some((_, behind)) => {
                rest = behind;
                true
            }
            None => false,
        })
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
        0 => CODE_OF_UNKNOWN_SIZE as u64,
        size => size.min(MAX_CODE),
    };
    let code = data
        .read_bytes_at(offset, size.min(left))
        .map_err(|()| SymbolError::Missing)?
        .to_vec();
    Ok(Function {
        offset,
        is_whole: symbol.st_size(Le) == code.len() as u64,
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

#[cfg(test)]
mod tests {
    use std::{process::Command, sync::LazyLock};

    use proptest::prelude::*;
    use rstest::rstest;

    use super::{
        super::site::{self, SiteKind},
        *,
    };

    const NAME: Name<'_> = Name::Symbol("zmq_msg_send");

    const SOURCE: &str = r#"
        int other(void *, void *, int);
        __attribute__((visibility("default"))) int zmq_msg_send(void *message, void *socket, int flags) {
            int kept[4] = {flags, flags, flags, flags};
            other(message, kept, flags);
            return other(socket, kept, kept[1]);
        }
        int longer_zmq_msg_send(void) { return 1; }
    "#;
    const EXECUTABLE: &str =
        "int other(void *a, void *b, int c) { return a == b ? c : 0; } int main(void) { return 0; }";
    const CALLER: &str =
        "int zmq_msg_send(void *, void *, int); int call(void) { return zmq_msg_send(0, 0, 0); }";

    /// Compiles C; `None`, said aloud, where there is no compiler.
    fn compile(sources: &[&str], options: &[&str]) -> Option<(tempfile::TempDir, PathBuf)> {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        let mut gcc = Command::new("gcc");
        gcc.args(options).arg("-o").arg(&out);
        for (number, source) in sources.iter().enumerate() {
            let file = dir.path().join(format!("{number}.c"));
            std::fs::write(&file, source).unwrap();
            gcc.arg(file);
        }
        match gcc.status() {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                eprintln!("SKIPPED: no gcc here, so nothing was compiled and nothing tested");
                None
            }
            status => {
                assert!(status.unwrap().success(), "gcc {options:?}");
                Some((dir, out))
            }
        }
    }

    fn find_at(path: &Path) -> Result<Function, SymbolError> {
        find(&File::open(path).unwrap(), Arch::NATIVE, NAME)
    }

    #[rstest]
    #[case::cet("full", true)]
    #[case::plain("none", false)]
    #[cfg(target_arch = "x86_64")]
    fn compiled_prologue(
        #[case] protection: &str,
        #[case] endbr64: bool,
        #[values("-O0", "-O1", "-O2", "-Os")] level: &str,
    ) {
        let protection = format!("-fcf-protection={protection}");
        let Some((_dir, path)) = compile(&[SOURCE], &["-shared", "-fPIC", level, &protection]) else {
            return;
        };
        let function = find_at(&path).unwrap();
        assert_eq!(function.code.starts_with(&[0xf3, 0x0f, 0x1e, 0xfa]), endbr64);
        let site = site::choose(Arch::X86_64, &function.code, 3);
        assert_eq!(site.kind, SiteKind::Push);
        // What the kernel will replace is the push itself.
        let bytes = std::fs::read(&path).unwrap();
        let at = usize::try_from(function.offset + site.offset).unwrap();
        assert!(matches!(bytes[at..], [0x50..=0x57, ..] | [0x41, 0x50..=0x57, ..]));
    }

    #[rstest]
    #[case::library(&[SOURCE], &["-shared", "-fPIC", "-O2"])]
    #[case::stripped_library(&[SOURCE], &["-shared", "-fPIC", "-O2", "-s"])]
    #[case::executable(&[SOURCE, EXECUTABLE], &["-O2"])]
    #[case::static_executable(&[SOURCE, EXECUTABLE], &["-O2", "-static"])]
    #[case::exporting_executable(&[SOURCE, EXECUTABLE], &["-O2", "-rdynamic", "-s"])]
    fn found(#[case] sources: &[&str], #[case] options: &[&str]) {
        let Some((_dir, path)) = compile(sources, options) else {
            return;
        };
        let function = find_at(&path).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let at = usize::try_from(function.offset).unwrap();
        assert_eq!(&bytes[at..at + function.code.len()], &function.code[..]);
        assert!(function.code.len() > 16);
    }

    /// The file offset of a function is not its address: they differ by the segment's.
    #[test]
    fn the_offset_is_that_of_the_code() {
        let options = [
            "-shared",
            "-fPIC",
            "-O2",
            "-Wl,-Ttext-segment=0x400000",
            "-Wl,--build-id=sha1",
        ];
        let Some((_dir, path)) = compile(&[SOURCE], &options) else {
            return;
        };
        let function = find_at(&path).unwrap();
        assert!(function.offset < 0x40_0000);
        assert_eq!(function.build_id.len(), 20);
    }

    #[rstest]
    #[case::only_called(&[CALLER], &["-shared", "-fPIC"])]
    #[case::only_a_longer_name(&["int longer_zmq_msg_send(void) { return 1; }"], &["-shared", "-fPIC"])]
    #[case::only_data(&["int zmq_msg_send = 1;"], &["-shared", "-fPIC"])]
    #[case::not_exported(&[SOURCE, EXECUTABLE], &["-s"])]
    fn not_found(#[case] sources: &[&str], #[case] options: &[&str]) {
        let Some((_dir, path)) = compile(sources, options) else {
            return;
        };
        assert!(matches!(find_at(&path), Err(SymbolError::Missing)));
    }

    const CPP: &str = r"
        #include <string>
        namespace other { struct Client { int put(const std::string &); }; }
        namespace mooncake {
        struct Config { int n; };
        struct Client {
            virtual int put(const std::string &key, int size, const Config &config);
            int put(int size);
            int put_all(const std::string &key);
            long get(const std::string &key) const;
        };
        int Client::put(const std::string &key, int size, const Config &config) { return size + config.n; }
        int Client::put(int size) { return size; }
        int Client::put_all(const std::string &key) { return 0; }
        long Client::get(const std::string &key) const { return key.size(); }
        }
        int other::Client::put(const std::string &key) { return 1; }
    ";

    #[rstest]
    #[case::by_parameters("mooncake::Client::put", &["basic_string<char", "int, ", "Config const&"], "_ZN8mooncake6Client3putERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEEiRKNS_6ConfigE")]
    #[case::the_other_one("mooncake::Client::put", &["int)"], "_ZN8mooncake6Client3putEi")]
    #[case::that_changes_nothing("mooncake::Client::get", &["basic_string<char"], "_ZNK8mooncake6Client3getERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE")]
    fn found_by_its_name_in_cpp(#[case] path: &str, #[case] parameters: &[&str], #[case] symbol: &str) {
        let Some((_dir, library)) = compile(&[CPP], &["-x", "c++", "-shared", "-fPIC", "-O2", "-s"]) else {
            return;
        };
        let file = File::open(library).unwrap();
        let found = find(&file, Arch::NATIVE, Name::Cpp { path, parameters }).unwrap();
        assert_eq!(found, find(&file, Arch::NATIVE, Name::Symbol(symbol)).unwrap());
        assert!(found.is_whole);
    }

    #[rstest]
    #[case::other_parameters("mooncake::Client::put", &["float"])]
    #[case::parameters_in_another_order("mooncake::Client::put", &["Config const&", "basic_string<char"])]
    #[case::no_such_function("mooncake::Client::remove", &[])]
    #[case::part_of_a_path("Client::put", &[])]
    fn not_found_by_its_name_in_cpp(#[case] path: &str, #[case] parameters: &[&str]) {
        let Some((_dir, library)) = compile(&[CPP], &["-x", "c++", "-shared", "-fPIC", "-O2"]) else {
            return;
        };
        let found = find(
            &File::open(library).unwrap(),
            Arch::NATIVE,
            Name::Cpp { path, parameters },
        );
        assert!(matches!(found, Err(SymbolError::Missing)), "{found:?}");
    }

    #[rstest]
    #[case::text(b"#!/bin/sh\n")]
    #[case::empty(b"")]
    #[case::magic_alone(b"\x7fELF")]
    fn foreign(#[case] content: &[u8]) {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), content).unwrap();
        assert!(matches!(find_at(file.path()), Err(SymbolError::Foreign)));
    }

    #[test]
    fn of_another_machine() {
        let Some((_dir, path)) = compile(&[SOURCE], &["-shared", "-fPIC"]) else {
            return;
        };
        let other = if Arch::NATIVE == Arch::X86_64 {
            Arch::Aarch64
        } else {
            Arch::X86_64
        };
        let found = find(&File::open(path).unwrap(), other, NAME);
        assert!(matches!(found, Err(SymbolError::Foreign)));
    }

    /// A header may claim sections of any size in a sparse file: no more than the budget is read.
    #[test]
    fn a_huge_sparse_file_is_given_up() {
        let Some((dir, path)) = compile(&[SOURCE], &["-shared", "-fPIC", "-s"]) else {
            return;
        };
        let mut bytes = std::fs::read(path).unwrap();
        let section_headers = u64::from_le_bytes(bytes[40..48].try_into().unwrap());
        let count = u16::from_le_bytes(bytes[60..62].try_into().unwrap());
        for number in 0..u64::from(count) {
            let size = usize::try_from(section_headers + number * 64 + 32).unwrap();
            bytes[size..size + 8].copy_from_slice(&(1_u64 << 39).to_le_bytes());
        }
        let sparse = dir.path().join("sparse");
        std::fs::write(&sparse, bytes).unwrap();
        File::options()
            .write(true)
            .open(&sparse)
            .unwrap()
            .set_len(1 << 40)
            .unwrap();
        assert!(matches!(find_at(&sparse), Err(SymbolError::Damaged(_))));
    }

    #[test]
    fn own_mapping_opens_the_own_file() {
        let text = super::super::maps::read(std::process::id()).unwrap();
        let inode = std::fs::metadata("/proc/self/exe").unwrap().ino();
        let mapping = super::super::maps::parse(&text)
            .find(|m| m.inode == inode)
            .unwrap();
        let by_path = MappedFile::open_by_path(std::process::id(), &mapping);
        // On file systems with several devices (overlayfs, btrfs) maps and stat may name different ones: then
        // the path is rightly refused.
        assert!(
            matches!(by_path, Ok(_) | Err(SymbolError::Replaced { .. })),
            "{by_path:?}"
        );
        if let Ok(exact) = MappedFile::open(std::process::id(), &mapping) {
            assert_eq!(exact.id.inode.1, inode);
        }
    }

    #[test]
    fn a_path_that_leads_elsewhere_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lib.so");
        std::fs::write(&path, b"another file").unwrap();
        let line = format!("1000-2000 r-xp 00000000 00:00 1 {}", path.display());
        let mapping = super::super::maps::parse(line.as_bytes()).next().unwrap();
        let opened = MappedFile::open_by_path(std::process::id(), &mapping);
        assert!(matches!(opened, Err(SymbolError::Replaced { .. })));
    }

    #[test]
    fn a_device_is_not_opened() {
        let opened = MappedFile::reopen(&locate(Path::new("/dev/null")).unwrap());
        assert!(matches!(opened, Err(SymbolError::NotRegular)));
    }

    static LIBRARY: LazyLock<Option<Vec<u8>>> = LazyLock::new(|| {
        compile(&[SOURCE], &["-shared", "-fPIC", "-s"]).map(|(_dir, path)| std::fs::read(path).unwrap())
    });

    proptest! {
        #[test]
        fn any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(find_in(&bytes[..], Arch::NATIVE, NAME).is_err());
        }

        /// A library with some bytes changed and its end cut off gives an answer or an error, and no panic.
        #[test]
        fn damaged_library(changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..30), cut in any::<prop::sample::Index>()) {
            let Some(library) = LIBRARY.as_ref() else { return Ok(()) };
            let mut bytes = library.clone();
            for (index, value) in changes {
                // Most of the file is code and padding: the headers are the part that matters.
                let len = bytes.len();
                let at = if value % 2 == 0 { index.index(1024) } else { len - 1 - index.index(2048) };
                bytes[at] = value;
            }
            bytes.truncate(bytes.len() - cut.index(bytes.len() / 8));
            let cpp = Name::Cpp { path: "mooncake::Client::put", parameters: &[] };
            for name in [NAME, cpp] {
                if let Ok(function) = find_in(&bytes[..], Arch::NATIVE, name) {
                    prop_assert!(function.code.len() as u64 <= MAX_CODE);
                }
            }
        }
    }
}
