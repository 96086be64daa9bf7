//! Links that carry all probes of a program in a file at once (`BPF_TRACE_UPROBE_MULTI`, Linux 6.6), which aya does not
//! make.
//!
//! What such a link holds is taken off without a perf event, and so without the lock of the kernel under which those
//! end one after the other (see [`super::detach`]). The kernel wants programs that are loaded for this kind of link, which
//! aya does not do either: they are loaded here, with the maps that it made.

use std::{
    collections::{HashMap, HashSet},
    ffi::CString,
    io,
    num::NonZeroU32,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
    time::Duration,
};

use aya::{Ebpf, EbpfError, maps::Map};
use aya_obj::generated::{
    bpf_attach_type, bpf_attr, bpf_cmd, bpf_insn, bpf_prog_info, bpf_prog_type::BPF_PROG_TYPE_KPROBE,
};

/// As the programs' own.
const LICENSE: &[u8] = b"Dual MIT/GPL\0";
const ATTACH_TYPE: u32 = bpf_attach_type::BPF_TRACE_UPROBE_MULTI as u32;

/// Programs that are loaded for links of this kind.
#[derive(Debug)]
pub(super) struct Programs(HashMap<&'static str, OwnedFd>);

impl Programs {
    /// Loads those of `names` that the kernel takes. `None`: it has no such links, or has some that do not keep to one
    /// process. `ebpf` must still have all its maps.
    pub(super) fn load(
        ebpf: &Ebpf,
        object: &[u8],
        names: impl Iterator<Item = &'static str>,
    ) -> Result<Option<Self>, EbpfError> {
        if !is_supported() {
            return Ok(None);
        }
        let mut object = aya_obj::Object::parse(object)?;
        let maps = std::mem::take(&mut object.maps);
        let sections: HashSet<usize> = object.functions.keys().map(|(section, _)| *section).collect();
        let known: HashMap<&str, RawFd> = ebpf
            .maps()
            .filter_map(|(name, map)| Some((name, descriptor(map)?.as_raw_fd())))
            .collect();
        let maps = maps
            .iter()
            .filter_map(|(name, map)| Some((name.as_str(), *known.get(name.as_str())?, map)));
        object.relocate_maps(maps, &sections)?;
        object.relocate_calls(&sections)?;
        let loaded = names.filter_map(|name| {
            let function = object.functions.get(&object.programs.get(name)?.function_key())?;
            Some((name, load(name, &function.instructions).ok()?))
        });
        Ok(Some(Self(loaded.collect())))
    }

    /// Whether a program is among them.
    pub(super) fn has(&self, program: &str) -> bool {
        self.0.contains_key(program)
    }

    /// Sets all probes of a program in a file, in one process. `None`: the program is not among them.
    pub(super) fn attach(
        &self,
        program: &str,
        file: &Path,
        offsets: &[u64],
        pid: NonZeroU32,
    ) -> Option<io::Result<OwnedFd>> {
        let program = self.0.get(program)?;
        Some(link(program.as_fd(), file, offsets, pid.get()))
    }

    /// Run time and number of runs of a program, where the kernel measures them.
    pub(super) fn run_stats(&self, program: &str) -> Option<(Duration, u64)> {
        let program = self.0.get(program)?;
        // SAFETY: all zeros is a valid value.
        let mut info: bpf_prog_info = unsafe { std::mem::zeroed() };
        let mut attr = empty();
        // SAFETY: the union's field for this command.
        let about = unsafe { &mut attr.info };
        about.bpf_fd = program.as_raw_fd().cast_unsigned();
        about.info_len = u32::try_from(size_of::<bpf_prog_info>()).ok()?;
        about.info = address(&raw mut info);
        bpf(bpf_cmd::BPF_OBJ_GET_INFO_BY_FD, &mut attr).ok()?;
        Some((Duration::from_nanos(info.run_time_ns), info.run_cnt))
    }
}

/// The descriptor of a map, of the kinds that the programs use.
fn descriptor(map: &Map) -> Option<BorrowedFd<'_>> {
    match map {
        Map::Array(map) | Map::PerCpuArray(map) | Map::RingBuf(map) | Map::LruHashMap(map) => {
            Some(map.fd().as_fd())
        }
        _ => None,
    }
}

/// Asks the kernel, as libbpf does. A root folder is no file to probe, which it finds only where it has such links; a
/// negative process is refused first by kernels that tell processes right. Others (6.6 to 6.9 without the fix) take
/// the threads of a process for others.
fn is_supported() -> bool {
    // `r0 = 0` and `exit` have nothing but their code.
    let do_nothing = [0xb7, 0x95].map(|code| bpf_insn {
        code,
        _bitfield_align_1: [],
        _bitfield_1: bpf_insn::new_bitfield_1(0, 0),
        off: 0,
        imm: 0,
    });
    let Ok(program) = load("probe", &do_nothing) else {
        return false;
    };
    let errno = |pid| {
        let link = link(program.as_fd(), Path::new("/"), &[0], pid);
        link.err().and_then(|error| error.raw_os_error())
    };
    errno(0) == Some(libc::EBADF) && errno(u32::MAX) == Some(libc::EINVAL)
}

fn load(name: &str, instructions: &[bpf_insn]) -> io::Result<OwnedFd> {
    let mut attr = empty();
    // SAFETY: the union's field for this command.
    let program = unsafe { &mut attr.__bindgen_anon_3 };
    program.prog_type = BPF_PROG_TYPE_KPROBE as u32;
    program.expected_attach_type = ATTACH_TYPE;
    program.insns = address(instructions.as_ptr());
    program.insn_cnt = u32::try_from(instructions.len()).map_err(io::Error::other)?;
    program.license = address(LICENSE.as_ptr());
    // The last one stays 0.
    let room = program.prog_name.len() - 1;
    for (to, from) in program.prog_name.iter_mut().take(room).zip(name.bytes()) {
        *to = from.cast_signed();
    }
    descriptor_of(bpf(bpf_cmd::BPF_PROG_LOAD, &mut attr)?)
}

fn link(program: BorrowedFd<'_>, file: &Path, offsets: &[u64], pid: u32) -> io::Result<OwnedFd> {
    let path = CString::new(file.as_os_str().as_bytes())?;
    let mut attr = empty();
    // SAFETY: the union's field for this command.
    let create = unsafe { &mut attr.link_create };
    create.__bindgen_anon_1.prog_fd = program.as_raw_fd().cast_unsigned();
    create.attach_type = ATTACH_TYPE;
    // SAFETY: the union's field for this kind of link.
    let probes = unsafe { &mut create.__bindgen_anon_3.uprobe_multi };
    probes.path = address(path.as_ptr());
    probes.offsets = address(offsets.as_ptr());
    probes.cnt = u32::try_from(offsets.len()).map_err(io::Error::other)?;
    probes.pid = pid;
    descriptor_of(bpf(bpf_cmd::BPF_LINK_CREATE, &mut attr)?)
}

fn empty() -> bpf_attr {
    // SAFETY: all zeros is a valid value, and what the kernel wants of fields that are not used.
    unsafe { std::mem::zeroed() }
}

fn address<T>(of: *const T) -> u64 {
    of.expose_provenance() as u64
}

fn bpf(command: bpf_cmd, attr: &mut bpf_attr) -> io::Result<i64> {
    // SAFETY: the callers fill in what the command reads; whatever it points to lives until the call is over.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command as u32,
            &raw mut *attr,
            size_of::<bpf_attr>(),
        )
    };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

fn descriptor_of(result: i64) -> io::Result<OwnedFd> {
    let fd = RawFd::try_from(result).map_err(io::Error::other)?;
    // SAFETY: the kernel has just given it to us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
