//! Any calls on any connections: the parser must not panic, must not keep what it can't bound, and must end each
//! exchange that it tells of, once.
#![no_main]

use std::collections::HashSet;

use libfuzzer_sys::fuzz_target;
use omnitap::wire::http::{connections::Connections, note::Note};
use omnitap_fuzz::calls;

fuzz_target!(|data: &[u8]| {
    let mut connections = Connections::new();
    let mut news = Vec::new();
    for event in calls(data) {
        connections.event(&event, &mut news);
    }
    assert!(connections.len() <= 4 && connections.exchanges() <= 4 * 17);
    connections.process_gone(1, u64::MAX, &mut news);
    assert!(connections.is_empty());
    let mut open = HashSet::new();
    for news in &news {
        match news.note {
            Note::Asked { .. } => assert!(open.insert(news.exchange)),
            Note::Ended(_) => assert!(open.remove(&news.exchange)),
            _ => assert!(open.contains(&news.exchange)),
        }
    }
    assert!(open.is_empty());
});
