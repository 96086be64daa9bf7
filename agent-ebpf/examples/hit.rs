//! What one hit of the probe costs the sender: `cargo run -p omnitap-ebpf --example hit`, as root.
//!
//! A process pinned to one CPU calls the real `zmq_msg_send` in a loop, on a socket without a peer, so that
//! the call itself does next to nothing. Each round measures, for each frame size, the loop without a probe,
//! with an empty program on the same function, and with the committed program. The median round counts. A
//! hit's cost is the loop's time with the probe less its time without.
//!
//! The same for `shm_open` of a segment that is not there, as a receiver polls for it; and the time of a put
//! and get of 64 KiB through shared memory, with and without the probes of both.
//!
//! And for calls of a server of HTTP: a read of an eventfd, which is no connection, a read of a connection that would
//! wait, and a write of 512 bytes. The server has two threads, so that its libc takes the way of a real server's.
//!
//! With the argument `shm` or `http`, that part alone.
//!
//! Prints one JSON object: nanoseconds a hit and the ratio to the empty program, by frame size, for a poll and for the
//! calls of HTTP; nanoseconds of a put and get.
#![expect(
    clippy::unwrap_used,
    reason = "a failed unwrap ends the measurement, and says where"
)]

#[path = "../tests/common/mod.rs"]
mod common;

use std::{io::Write as _, num::NonZeroU32};

use aya::{
    Ebpf,
    programs::{
        UProbe,
        uprobe::{UProbeAttachLocation, UProbeScope},
    },
};
use common::{Segments, Sender, Server, Tap, Way};
use object::{
    Architecture, BinaryFormat, Endianness, SectionKind, SymbolFlags, SymbolKind, SymbolScope,
    write::{Object, Symbol, SymbolSection},
};
use omnitap_ebpf::{Config, watch};

const ROUNDS: usize = 5;
/// Calls between two looks into the ring, which must hold what they leave there.
const BATCH: u64 = 200;
const RING: u32 = 256 << 10;
const BATCHES: u64 = 300;
/// Puts and gets in a batch.
const HOPS: u64 = 50;
const CONFIG: Config = Config {
    capture_limit: 64 * 1024,
    wakeup_bytes: 4 << 20,
};
/// Orders of server.c, without descriptor and number.
const HTTP: [(&str, [&str; 2]); 3] = [
    ("http_other_descriptor", ["event", "8"]),
    ("http_dropped", ["wait", "1000"]),
    ("http_captured_512_byte", ["null", "512"]),
];
const SIZES: [(&str, usize); 3] = [
    ("dropped_1_byte", 1),
    ("captured_64_byte", 64),
    ("captured_1_kib", 1024),
];

fn main() {
    if !common::can_run() {
        std::process::exit(1);
    }
    let only = std::env::args().nth(1);
    let wants = |part: &str| only.as_ref().is_none_or(|only| only == part);
    let mut lines = Vec::new();
    if wants("frames") {
        lines.extend(SIZES.iter().map(|(name, size)| line(name, measure(*size))));
    }
    if wants("shm") {
        let ([none, _, ours], poll) = measure_shm();
        lines.push(line("shm_poll", poll));
        lines.push(format!(
            "  \"shm_put_and_get_64_kib\": {{\"ns\": {none:.1}, \"probed_ns\": {ours:.1}, \"ratio\": {:.3}}}",
            ours / none
        ));
    }
    if wants("http") {
        let way = Way::here();
        lines.extend(HTTP.map(|(name, order)| line(name, measure_http(order, way))));
    }
    println!("{{\n{}\n}}", lines.join(",\n"));
}

fn line(name: &str, [none, empty, ours]: [f64; 3]) -> String {
    format!(
        "  \"{name}\": {{\"call_ns\": {none:.1}, \"empty_hit_ns\": {:.1}, \"hit_ns\": {:.1}, \"ratio\": {:.3}}}",
        empty - none,
        ours - none,
        (ours - none) / (empty - none)
    )
}

/// Nanoseconds a put and get, and a poll: with no probe, with an empty one on `shm_open`, and with ours.
fn measure_shm() -> ([f64; 3], [f64; 3]) {
    let mut segments = Segments::start();
    let pid = segments.pid();
    pin(pid);
    let (library, offsets) = common::places(pid, "shm_open");
    let scope = UProbeScope::OneProcess(NonZeroU32::new(pid).unwrap());
    let mut rounds: [Vec<(f64, f64)>; 3] = Default::default();
    for _ in 0..ROUNDS {
        rounds[0].push(time_shm(&mut segments, None));

        let mut empty = Ebpf::load(&empty_object()).unwrap();
        let program: &mut UProbe = empty.program_mut("empty").unwrap().try_into().unwrap();
        program.load().unwrap();
        program
            .attach(UProbeAttachLocation::AbsoluteOffset(offsets[0]), &library, scope)
            .unwrap();
        rounds[1].push(time_shm(&mut segments, None));
        drop(empty);

        let mut tap = Tap::load(RING, CONFIG);
        tap.watch(pid, watch::SHM);
        tap.attach_shm(pid);
        rounds[2].push(time_shm(&mut segments, Some(&mut tap)));
        check(&tap);
    }
    segments.finish();
    (
        rounds
            .each_ref()
            .map(|round| median(round.iter().map(|r| r.0).collect())),
        rounds
            .each_ref()
            .map(|round| median(round.iter().map(|r| r.1).collect())),
    )
}

/// As [`time`], of a put and get, and of a poll.
#[expect(clippy::cast_precision_loss, reason = "far below 2^53 nanoseconds")]
fn time_shm(segments: &mut Segments, mut tap: Option<&mut Tap>) -> (f64, f64) {
    let mut fastest = (f64::INFINITY, f64::INFINITY);
    for _ in 0..BATCHES {
        if let Some(tap) = &mut tap {
            tap.drain();
            tap.steps.clear();
        }
        let hop = segments.time(&format!("hops {HOPS} 65536")) as f64 / HOPS as f64;
        let poll = segments.time(&format!("bench {BATCH}")) as f64 / BATCH as f64;
        fastest = (fastest.0.min(hop), fastest.1.min(poll));
    }
    fastest
}

/// Nanoseconds a call with no probe, with an empty one, and with ours.
fn measure_http([what, size]: [&str; 2], way: Way) -> [f64; 3] {
    let mut rounds: [Vec<f64>; 3] = Default::default();
    for _ in 0..ROUNDS {
        for (side, round) in rounds.iter_mut().enumerate() {
            let mut server = Server::start(&["threaded"]);
            let pid = server.pid();
            pin(pid);
            let mut empty = Ebpf::load(&empty_object()).unwrap();
            let mut tap = Tap::load(RING, CONFIG);
            if side == 1 {
                let program: &mut UProbe = empty.program_mut("empty").unwrap().try_into().unwrap();
                program.load().unwrap();
                for function in ["read", "write"] {
                    let (library, _, behind) = common::places_of(pid, function);
                    for offset in behind {
                        let scope = UProbeScope::OneProcess(NonZeroU32::new(pid).unwrap());
                        let at = UProbeAttachLocation::AbsoluteOffset(offset);
                        program.attach(at, &library, scope).unwrap();
                    }
                }
            }
            if side == 2 {
                tap.watch(pid, watch::HTTP);
                tap.attach_http(pid, way);
            }
            let (mut client, fd) = server.connect();
            client
                .write_all(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
                .unwrap();
            server.order(&format!("read {fd} 1000"));
            let mut fastest = f64::INFINITY;
            for _ in 0..BATCHES {
                tap.drain();
                tap.https.clear();
                let ns = server.order(&format!("bench {what} {fd} {size} {BATCH}"));
                #[expect(clippy::cast_precision_loss, reason = "far below 2^53 nanoseconds")]
                let ns = ns as f64 / BATCH as f64;
                fastest = fastest.min(ns);
            }
            round.push(fastest);
            check(&tap);
            server.finish();
        }
    }
    rounds.map(median)
}

fn check(tap: &Tap) {
    let counters = tap.counters();
    assert!(
        counters.iter().all(|(counter, _)| !counter.is_loss()),
        "events were lost: {counters:?}"
    );
}

/// Nanoseconds a call with no probe, with an empty one, and with ours.
fn measure(size: usize) -> [f64; 3] {
    let mut sender = Sender::start(&["bench", &size.to_string()]);
    pin(sender.pid());
    let library = sender.library();
    let scope = UProbeScope::OneProcess(NonZeroU32::new(sender.pid()).unwrap());
    let mut rounds: [Vec<f64>; 3] = Default::default();
    for _ in 0..ROUNDS {
        rounds[0].push(time(&mut sender, None));

        let mut empty = Ebpf::load(&empty_object()).unwrap();
        let program: &mut UProbe = empty.program_mut("empty").unwrap().try_into().unwrap();
        program.load().unwrap();
        program.attach("zmq_msg_send", &library, scope).unwrap();
        rounds[1].push(time(&mut sender, None));
        drop(empty);

        let mut tap = Tap::load(RING, CONFIG);
        tap.watch(sender.pid(), watch::FRAMES);
        tap.attach(sender.pid(), &library);
        rounds[2].push(time(&mut sender, Some(&mut tap)));
        check(&tap);
    }
    sender.finish();
    rounds.map(median)
}

/// The fastest batch: other work on the machine slows down the rest, by different amounts.
fn time(sender: &mut Sender, mut tap: Option<&mut Tap>) -> f64 {
    sender.time(BATCH);
    let batches = (0..BATCHES).map(|_| {
        if let Some(tap) = &mut tap {
            tap.drain();
            tap.frames.clear();
        }
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53 nanoseconds")]
        let ns = sender.time(BATCH) as f64 / BATCH as f64;
        ns
    });
    batches.fold(f64::INFINITY, f64::min)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Keeps the sender on the last CPU, away from this process's own work.
fn pin(pid: u32) {
    // SAFETY: a zeroed set is a valid, empty one; the calls get valid pointers.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        let last = usize::try_from(libc::sysconf(libc::_SC_NPROCESSORS_ONLN))
            .unwrap()
            .saturating_sub(1);
        libc::CPU_SET(last, &mut set);
        let pid = libc::pid_t::try_from(pid).unwrap();
        assert_eq!(
            libc::sched_setaffinity(pid, size_of::<libc::cpu_set_t>(), &raw const set),
            0
        );
    }
}

/// An object with one program that returns at once: `r0 = 0; exit`.
fn empty_object() -> Vec<u8> {
    let mut object = Object::new(BinaryFormat::Elf, Architecture::Bpf, Endianness::Little);
    let license = object.add_section(Vec::new(), b"license".to_vec(), SectionKind::Data);
    object.append_section_data(license, b"Dual MIT/GPL\0", 1);
    let code = [0xb7, 0, 0, 0, 0, 0, 0, 0, 0x95, 0, 0, 0, 0, 0, 0, 0];
    let text = object.add_section(Vec::new(), b"uprobe".to_vec(), SectionKind::Text);
    object.append_section_data(text, &code, 8);
    object.add_symbol(Symbol {
        name: b"empty".to_vec(),
        value: 0,
        size: code.len() as u64,
        kind: SymbolKind::Text,
        scope: SymbolScope::Linkage,
        weak: false,
        section: SymbolSection::Section(text),
        flags: SymbolFlags::None,
    });
    object.write().unwrap()
}
