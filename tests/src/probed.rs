//! Which bytes of a process's libraries differ from the file: a set breakpoint, seen without asking the agent.

use std::{
    fs::File,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

/// Number of changed bytes in the executable parts of the libzmq that a process has mapped. 0 where nothing is probed.
pub fn changed_bytes(pid: u32) -> Result<usize> {
    changed_in(pid, "libzmq")
}

/// As [`changed_bytes`], of all files whose names begin so.
pub fn changed_in(pid: u32, library: &str) -> Result<usize> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let memory = File::open(format!("/proc/{pid}/mem"))?;
    let mut changed = 0;
    for line in maps.lines() {
        let Some((range, offset, path)) = executable(line) else {
            continue;
        };
        if !path
            .file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with(library))
        {
            continue;
        }
        let size = usize::try_from(range.1 - range.0)?;
        let (mut live, mut file) = (vec![0; size], vec![0; size]);
        memory
            .read_exact_at(&mut live, range.0)
            .with_context(|| format!("cannot read memory of {pid}"))?;
        let read = File::open(&path)?.read_at(&mut file, offset)?;
        changed += live.iter().zip(&file).take(read).filter(|(a, b)| a != b).count();
    }
    Ok(changed)
}

/// Whether the processes carry no probe. Another agent on this machine probes them as well: then that can't be told,
/// and is taken as true with a line that says so.
pub fn untouched(pids: &[u32]) -> Result<bool> {
    for &pid in pids {
        if changed_bytes(pid)? > 0 || changed_in(pid, "libc.so.")? > 0 {
            let another = other_agent()?;
            if let Some(other) = another {
                crate::skip(&format!(
                    "part of it: process {other} is an agent that probes {pid}"
                ))?;
            }
            return Ok(another.is_some());
        }
    }
    Ok(true)
}

/// An `omnitap` that this test has not started.
fn other_agent() -> Result<Option<u32>> {
    for entry in std::fs::read_dir("/proc")? {
        let Ok(pid) = entry?.file_name().to_string_lossy().parse::<u32>() else {
            continue;
        };
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let field = |name: &str| {
            status
                .lines()
                .find_map(|line| line.strip_prefix(name))
                .map(str::trim)
        };
        let ours = field("PPid:").is_some_and(|parent| parent == std::process::id().to_string());
        if field("Name:").is_some_and(|name| name.starts_with("omnitap")) && !ours {
            return Ok(Some(pid));
        }
    }
    Ok(None)
}

/// Address range, file offset and path of a line of `maps`, where it is executable and of a file.
fn executable(line: &str) -> Option<((u64, u64), u64, PathBuf)> {
    let mut fields = line.splitn(6, ' ');
    let (start, end) = fields.next()?.split_once('-')?;
    let range = (
        u64::from_str_radix(start, 16).ok()?,
        u64::from_str_radix(end, 16).ok()?,
    );
    if !fields.next()?.contains('x') {
        return None;
    }
    let offset = u64::from_str_radix(fields.next()?, 16).ok()?;
    let path = fields.nth(2)?.trim_start();
    path.starts_with('/')
        .then(|| (range, offset, Path::new(path).to_path_buf()))
}
