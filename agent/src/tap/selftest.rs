//! Tries the whole way from a probe to the reader, on a function of our own.

use std::{
    hint::black_box,
    io,
    num::NonZeroU32,
    time::{Duration, Instant},
};

use aya::{maps::MapError, programs::ProgramError};
use omnitap_ebpf::{program, watch};
use thiserror::Error;

use super::{Event, ProbeSet, Reader, SiteKind, Tap, maps, site, symbol};

/// How long a frame may take from the call to the reader.
const PATIENCE: Duration = Duration::from_secs(2);
/// What the message holds: more than the single byte that is dropped as a wake-up.
const CONTENT: &[u8; CONTENT_LEN as usize] = b"omnitap selftest";
const CONTENT_LEN: u8 = 16;

/// Why the self-test failed.
#[derive(Debug, Error)]
pub enum SelfTestError {
    /// The own executable could not be looked into.
    #[error("cannot look into the own executable: {0}")]
    Own(#[from] io::Error),
    /// Its file could not be opened through its mapping.
    #[error("cannot open the own executable through /proc: {0}")]
    File(#[from] symbol::SymbolError),
    /// A map could not be written.
    #[error("cannot watch the own process: {0}")]
    Watch(#[from] MapError),
    /// The kernel refused the probe.
    #[error("the kernel refused a probe on the own process: {0}")]
    Refused(#[from] ProgramError),
    /// The probe is on, but the call did not arrive.
    #[error("the probe is on, but a call gave no frame: {counted}")]
    Silent {
        /// What the kernel side counted meanwhile.
        counted: String,
    },
}

/// What the self-test took.
#[derive(Clone, Copy, Debug)]
pub struct SelfTest {
    /// Setting the probe.
    pub attach: Duration,
    /// From the call to the reader.
    pub delivery: Duration,
    /// Taking it off.
    pub detach: Duration,
    /// The kind of site that was probed.
    pub kind: SiteKind,
}

/// Called as `zmq_msg_send` is, and does nothing.
#[inline(never)]
extern "C" fn probe_me(message: *const u8, socket: *const u8, flags: i32) -> usize {
    black_box(message as usize ^ socket as usize ^ flags.unsigned_abs() as usize)
}

/// A message of libzmq 4.3 with its content in itself: data at 8, size at 41, type at 42, flags at 43.
#[repr(C, align(8))]
struct Message([u8; 64]);

impl Message {
    fn new() -> Self {
        let mut bytes = [0; 64];
        for (to, from) in bytes.iter_mut().skip(8).zip(CONTENT) {
            *to = *from;
        }
        for (to, from) in bytes.iter_mut().skip(41).zip([CONTENT_LEN, 101, 0]) {
            *to = from;
        }
        Self(bytes)
    }
}

/// Probes a function of this process, calls it and waits for the frame. Other events that arrive meanwhile
/// are dropped, so this is for a tap that is not at work.
pub fn run(tap: &Tap, reader: &mut Reader) -> Result<SelfTest, SelfTestError> {
    let pid = std::process::id();
    let address = probe_me as *const () as u64;
    let text = maps::read(pid)?;
    let mapping = maps::parse(&text)
        .find(|m| m.exec && (m.start..m.end).contains(&address))
        .ok_or_else(|| io::Error::other("no mapping holds the function"))?;
    let file = symbol::MappedFile::open(pid, &mapping)?;
    let entry = address - mapping.start + mapping.offset;
    let mut code = [0; 64];
    std::os::unix::fs::FileExt::read_exact_at(&file.file, &mut code, entry)?;
    let site = site::choose(site::Arch::NATIVE, &code, 3);

    tap.inner.watched.lock().change(pid, watch::FRAMES, 0)?;
    let start = Instant::now();
    let own = NonZeroU32::new(pid).ok_or_else(|| io::Error::other("a process without a number"))?;
    let mut links = Vec::new();
    let offsets = [entry + site.offset];
    tap.inner
        .set(own, &file.path(), program::ZMQ_MSG_SEND, &offsets, &mut links)?;
    let attach = start.elapsed();

    let message = Message::new();
    let call = Instant::now();
    let function: extern "C" fn(*const u8, *const u8, i32) -> usize = black_box(probe_me);
    black_box(function(message.0.as_ptr(), std::ptr::null(), 0));
    let mut seen = false;
    while !seen && call.elapsed() < PATIENCE {
        reader.drain(Duration::from_millis(10), 1000, |event| {
            if let Event::Frame(frame) = event {
                seen |= frame.pid == pid && frame.head == CONTENT;
            }
        })?;
    }
    let delivery = call.elapsed();

    let start = Instant::now();
    drop(links);
    let detach = start.elapsed();
    tap.inner.forget(pid, ProbeSet::Frames);
    if seen {
        Ok(SelfTest {
            attach,
            delivery,
            detach,
            kind: site.kind,
        })
    } else {
        let counted = tap.counters()?;
        let counted: Vec<_> = omnitap_ebpf::Counter::ALL
            .iter()
            .map(|&c| format!("{} {}", c.as_str(), counted.get(c)))
            .collect();
        Err(SelfTestError::Silent {
            counted: counted.join(", "),
        })
    }
}
