//! Blanked calls keep their lengths, and blanking them must not panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use omnitap::{
    record::{HttpWhat, OwnedHttp},
    wire::http::connections::Connections,
};
use omnitap_fuzz::calls;

fuzz_target!(|data: &[u8]| {
    let mut connections = Connections::new();
    let mut news = Vec::new();
    for event in calls(data) {
        let mut blanked = OwnedHttp::new(&event);
        if let HttpWhat::Received(bytes) | HttpWhat::Sent(bytes) = &mut blanked.what {
            let lengths = (bytes.head.len(), bytes.tail.len());
            connections.redact(&event, &mut bytes.head, &mut bytes.tail);
            assert_eq!(lengths, (bytes.head.len(), bytes.tail.len()));
        }
        connections.event(&event, &mut news);
        news.clear();
    }
});
