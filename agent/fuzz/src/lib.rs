//! Bytes of the fuzzer to frames.

use omnitap::{
    host::identity::{Flavor, Role, Versions},
    wire::{assemble::Decoder, frame::Frame, http::HttpEvent},
};

/// The process that sends.
const PID: u32 = 1;

/// A decoder that knows one process; its role, flavor and versions are the first two bytes.
#[must_use]
pub fn decoder(data: &[u8]) -> Option<(Decoder, &[u8])> {
    let ([who, minor], rest) = data.split_first_chunk()?;
    let role = match who & 5 {
        0 => Role::LlmStage {
            stage: Some(0),
            replica: Some(0),
        },
        4 => Role::Worker,
        _ => Role::ApiServer,
    };
    let flavor = if who & 2 == 0 { Flavor::Vllm } else { Flavor::Omni };
    let version = (*minor != 0).then(|| format!("0.{minor}.0"));
    let versions = Versions {
        vllm: version.clone(),
        omni: version,
    };
    let mut decoder = Decoder::new();
    decoder.process_known(PID, role, flavor, &versions);
    Some((decoder, rest))
}

/// Frames: each has flags, the lengths of head and tail, and the number of bytes between them that were lost.
pub fn parts(mut data: &[u8]) -> impl Iterator<Item = Frame<'_>> {
    std::iter::from_fn(move || {
        let ([flags, head, tail, lost], rest) = data.split_first_chunk()?;
        // Lengths of 0 to 1020 in steps of 4 would miss the odd ones: the low bits are among the flags.
        let head = usize::from(*head) * 4 + usize::from(flags >> 6);
        let (head, rest) = rest.split_at(head.min(rest.len()));
        let (tail, rest) = rest.split_at(usize::from(*tail).min(rest.len()));
        data = rest;
        let is_cut = flags & 4 != 0;
        let tail = if is_cut { tail } else { &[] };
        let lost = if is_cut { u64::from(*lost) } else { 0 };
        Some(Frame {
            time_ns: 1_000_000_000,
            pid: PID,
            tid: 2,
            socket: u64::from(flags >> 4 & 1),
            content: 0,
            size: (head.len() + tail.len()) as u64 + lost,
            more: flags & 1 != 0,
            aux: flags & 2 != 0,
            head,
            tail,
        })
    })
}

/// Calls on four connections: each has what it is and on which one, the lengths of head and tail, and the number of
/// bytes between them that were not captured, in steps of 64.
pub fn calls(mut data: &[u8]) -> impl Iterator<Item = HttpEvent<'_>> {
    let mut time_ns = 0;
    std::iter::from_fn(move || {
        let ([what, head, tail, lost], rest) = data.split_first_chunk()?;
        time_ns += 1_000_000;
        let (pid, tid, fd) = (PID, PID, i32::from(what >> 3 & 3));
        let what = what & 7;
        if what < 3 {
            data = rest;
            return Some(match what {
                0 => HttpEvent::Accepted { pid, tid, fd, time_ns },
                1 => HttpEvent::Failed { pid, tid, fd, time_ns, errno: i32::from(*head) },
                _ => HttpEvent::Closed { pid, tid, fd, time_ns },
            });
        }
        let (head, rest) = rest.split_at((usize::from(*head) * 2).min(rest.len()));
        let (tail, rest) = rest.split_at(usize::from(*tail).min(rest.len()));
        data = rest;
        let size = (head.len() + tail.len()) as u64 + u64::from(*lost) * 64;
        Some(if what % 2 == 0 {
            HttpEvent::Received { pid, tid, fd, time_ns, size, head, tail }
        } else {
            HttpEvent::Sent { pid, tid, fd, time_ns, size, head, tail }
        })
    })
}
