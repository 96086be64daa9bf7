//! What a hit of the probe costs: calls of the real `zmq_msg_send` without a probe, with an empty one, and with ours,
//! all on the same instruction of one process, one after another.
//!
//! Usage: `hit SEND_LOOP LIBZMQ`, as root. `cargo xtask bench --only hit` builds the first (`tests/real/send_loop.c`)
//! and finds the second. Prints a JSON object a message size.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    num::NonZeroU32,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use aya::{
    EbpfLoader,
    programs::{
        UProbe,
        uprobe::{UProbeAttachLocation, UProbeScope},
    },
};
use object::{
    Architecture, BinaryFormat, Endianness, SectionKind, SymbolFlags, SymbolKind, SymbolScope,
    write::{Object, Symbol, SymbolSection},
};
use omnitap::{
    host::identity::ProcessKey,
    tap::{ProbeInfo, Settings, Tap, start_ticks},
};
use omnitap_ebpf::Counter;

const ROUNDS: usize = 5;
const CALLS: u64 = 50_000;
const SIZES: [usize; 3] = [1, 64, 1024];

/// The process that calls `zmq_msg_send`.
struct SendLoop {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl SendLoop {
    fn start(program: &str, libzmq: &str) -> Result<Self> {
        // The last CPU, away from the reader of what is captured where there are two.
        let last = std::thread::available_parallelism()?.get() - 1;
        let mut child = Command::new("taskset")
            .args(["-c", &last.to_string(), program, libzmq])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the send loop")?;
        let input = child.stdin.take().context("no input")?;
        let output = BufReader::new(child.stdout.take().context("no output")?);
        let mut this = Self { child, input, output };
        ensure!(this.line()? == "ready", "the send loop is not ready");
        Ok(this)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }

    /// Nanoseconds of a call.
    fn measure(&mut self, bytes: usize) -> Result<f64> {
        writeln!(self.input, "{bytes} {CALLS}")?;
        Ok(self.line()?.parse()?)
    }

    fn key(&self) -> Result<ProcessKey> {
        let pid = self.child.id();
        Ok(ProcessKey {
            pid,
            start_ticks: start_ticks(pid)?,
        })
    }
}

impl Drop for SendLoop {
    fn drop(&mut self) {
        // It is of no more use: whether it had ended by itself does not matter.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An object file with one uprobe program that returns 0 at once.
fn empty_program() -> Result<Vec<u8>> {
    const MOV_R0_0_EXIT: [u8; 16] = [0xb7, 0, 0, 0, 0, 0, 0, 0, 0x95, 0, 0, 0, 0, 0, 0, 0];
    let mut object = Object::new(BinaryFormat::Elf, Architecture::Bpf, Endianness::Little);
    let text = object.add_section(Vec::new(), b"uprobe".to_vec(), SectionKind::Text);
    object.append_section_data(text, &MOV_R0_0_EXIT, 8);
    object.add_symbol(Symbol {
        name: b"empty".to_vec(),
        value: 0,
        size: MOV_R0_0_EXIT.len() as u64,
        kind: SymbolKind::Text,
        scope: SymbolScope::Dynamic,
        weak: false,
        section: SymbolSection::Section(text),
        flags: SymbolFlags::None,
    });
    let license = object.add_section(Vec::new(), b"license".to_vec(), SectionKind::Data);
    object.append_section_data(license, b"GPL\0", 1);
    Ok(object.write()?)
}

/// One round with the empty probe.
fn with_empty(sender: &mut SendLoop, at: &ProbeInfo, bytes: usize) -> Result<f64> {
    let mut ebpf = EbpfLoader::new().btf(None).load(&empty_program()?)?;
    let probe: &mut UProbe = ebpf.program_mut("empty").context("no program")?.try_into()?;
    probe.load()?;
    let pid = NonZeroU32::new(sender.child.id()).context("no pid")?;
    probe.attach(
        UProbeAttachLocation::AbsoluteOffset(at.offset),
        &at.path,
        UProbeScope::OneProcess(pid),
    )?;
    sender.measure(bytes)
}

/// One round with our probe, and the site that it chose.
fn with_ours(sender: &mut SendLoop, tap: &Tap, bytes: usize) -> Result<(f64, ProbeInfo)> {
    let before = tap.counters()?;
    let attached = tap.attach(sender.key()?)?;
    let site = attached.probes().first().context("no probe")?.clone();
    let took = sender.measure(bytes)?;
    let after = tap.counters()?;
    let seen = if bytes > 1 {
        Counter::Captured
    } else {
        Counter::Short
    };
    let hits = after.get(seen) - before.get(seen);
    ensure!(hits == CALLS, "{hits} of {CALLS} calls were {}", seen.as_str());
    drop(attached);
    // Detaching goes on in the background.
    ensure!(
        tap.detach_all(Duration::from_secs(10)) == 0,
        "a probe is still on"
    );
    Ok((took, site))
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with("--"))
        .collect();
    let [program, libzmq] = arguments.as_slice() else {
        // `cargo bench` and `cargo test --benches` run every bench.
        eprintln!("hit: needs SEND_LOOP LIBZMQ; run by cargo xtask bench");
        return Ok(());
    };
    let mut sender = SendLoop::start(program, &fs::canonicalize(libzmq)?.to_string_lossy())?;
    let (tap, mut reader) = Tap::load(&Settings::default())?;
    let done = Arc::new(AtomicBool::new(false));
    let stop = Arc::clone(&done);
    let drain = std::thread::spawn(move || -> Result<()> {
        while !stop.load(Ordering::Relaxed) {
            reader.drain(Duration::from_millis(2), 4096, |event| {
                std::hint::black_box(&event);
            })?;
        }
        Ok(())
    });
    let (_, site) = with_ours(&mut sender, &tap, 1)?;
    eprintln!("hit: probe at {} +{:#x}, {:?}", site.path, site.offset, site.kind);
    for bytes in SIZES {
        let (mut none, mut empty, mut ours) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            none.push(sender.measure(bytes)?);
            empty.push(with_empty(&mut sender, &site, bytes)?);
            ours.push(with_ours(&mut sender, &tap, bytes)?.0);
        }
        let row = serde_json::json!({"bytes": bytes, "none": none, "empty": empty, "ours": ours});
        println!("{row}");
    }
    done.store(true, Ordering::Relaxed);
    drain.join().map_err(|_| anyhow::anyhow!("the reader panicked"))?
}
