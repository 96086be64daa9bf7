//! Any sequence of frames from any process: the decoder must not panic, and must not keep what it can't bound.
#![no_main]

use libfuzzer_sys::fuzz_target;
use omnitap_fuzz::{decoder, parts};

fuzz_target!(|data: &[u8]| {
    let Some((mut decoder, rest)) = decoder(data) else {
        return;
    };
    for frame in parts(rest) {
        let _ = decoder.frame(&frame);
    }
    assert!(decoder.open_messages() <= 256);
});
