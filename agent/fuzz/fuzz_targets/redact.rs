//! A frame that decodes must decode to the same message after redaction.
#![no_main]

use libfuzzer_sys::fuzz_target;
use omnitap::wire::{assemble::FrameResult, frame::Frame};
use omnitap_fuzz::{decoder, parts};

fuzz_target!(|data: &[u8]| {
    let Some((mut first, rest)) = decoder(data) else {
        return;
    };
    let Some((mut second, _)) = decoder(data) else {
        return;
    };
    for frame in parts(rest) {
        let decoded = first.frame(&frame);
        let (mut head, mut tail) = (frame.head.to_vec(), frame.tail.to_vec());
        first.redact(frame.pid, decoded.kind, frame.size, &mut head, &mut tail);
        assert_eq!((head.len(), tail.len()), (frame.head.len(), frame.tail.len()));
        let redacted = Frame {
            head: &head,
            tail: &tail,
            ..frame
        };
        let again = second.frame(&redacted);
        if matches!(decoded.result, FrameResult::Decoded | FrameResult::Partial) {
            assert_eq!(again, decoded);
        }
    }
});
