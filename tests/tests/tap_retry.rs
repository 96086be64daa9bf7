//! A send that pyzmq.asyncio tries again counts once.

mod tap_support;

use std::process::Command;

use omnitap::tap::Settings;
use omnitap_ebpf::Counter;
use tap_support::{Sender, any_frames, can_run, frames, load, python, script, until};

#[test]
fn a_retried_send_counts_once() {
    if !can_run() {
        return;
    }
    let (tap, mut reader) = load(&Settings::default());
    let mut sender = Sender::start(Command::new(python()).arg(script("retry.py")));
    let _attached = tap.attach(sender.key()).unwrap();
    for copy in [1, 0] {
        let before = (tap.counters().unwrap().get(Counter::Captured), tap.stats().reader);
        sender.command(&format!("{copy} 0"));
        assert_eq!(frames(&mut reader, sender.pid, 1)[0].size, 200);
        let captured = tap.counters().unwrap().get(Counter::Captured) - before.0;
        assert_eq!(captured, 2, "pyzmq called twice");
        until(&mut reader, |_| tap.stats().reader.retries > before.1.retries);
        let after = tap.stats().reader;
        assert_eq!(
            (after.frames - before.1.frames, after.retries - before.1.retries),
            (1, 1)
        );
    }
    assert!(!any_frames(&mut reader));
}
