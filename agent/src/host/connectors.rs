//! Which connectors' client libraries a process has mapped (docs/wire.md section "Connectors").
//!
//! vLLM-Omni imports the clients of all connectors whose packages are installed, so a mapped library says that a
//! process may use the connector. Some are imported late, with the first transfer: processes are looked at again and
//! again, less often as they grow older.

use std::{collections::HashMap, time::Duration};

use super::{identity::ProcessKey, versions::mapped_paths};

/// Client libraries that are mapped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Connectors {
    /// Of a connector that arranges its transfers over ZMQ: Mooncake's transfer engine, Mori, NIXL, Yuanrong's transfer
    /// engine.
    pub control: bool,
    /// Mooncake's store.
    pub store: bool,
    /// Yuanrong's data system.
    pub yuanrong: bool,
}

impl Connectors {
    /// Reads the text of `/proc/<pid>/maps`.
    #[must_use]
    pub fn mapped(maps: &[u8]) -> Self {
        let mut found = Self::default();
        for path in mapped_paths(maps) {
            let mut parts = path.rsplit(|&b| b == b'/');
            let name = parts.next().unwrap_or_default();
            if !name.windows(3).any(|part| part == b".so") {
                continue;
            }
            let folder = parts.next().unwrap_or_default();
            let below = |package: &[u8]| path.split(|&b| b == b'/').any(|part| part == package);
            found.control |= folder == b"mooncake" && name.starts_with(b"engine.")
                || below(b"mori")
                || name.starts_with(b"libmori")
                || name.starts_with(b"libnixl")
                || folder == b"datasystem" && name.starts_with(b"_transfer_engine.");
            found.store |= is_store(path);
            // Also one that lacks the functions to probe: then its transfers are known not to be seen.
            found.yuanrong |= is_yuanrong(path);
        }
        found
    }
}

/// Whether a file is the client library of Mooncake's store: `mooncake/store.so`, with or without a Python's name.
pub(crate) fn is_store(path: &[u8]) -> bool {
    let mut parts = path.rsplit(|&b| b == b'/');
    let name = parts.next().unwrap_or_default();
    name.starts_with(b"store.")
        && name.windows(3).any(|part| part == b".so")
        && parts.next() == Some(b"mooncake")
}

/// Whether a file belongs to the client of Yuanrong's data system.
pub(crate) fn is_yuanrong(path: &[u8]) -> bool {
    let mut parts = path.rsplit(|&b| b == b'/');
    parts
        .next()
        .is_some_and(|name| name.starts_with(b"libdatasystem.so"))
        || parts.any(|folder| folder == b"datasystem")
}

/// Shortest pause between two looks at a process.
const SHORTEST_PAUSE: Duration = Duration::from_secs(1);
/// Longest pause for one that may still start: a stage makes its connector before it takes requests.
const STARTING_PAUSE: Duration = Duration::from_secs(5);
/// So long one may start.
const STARTING: Duration = Duration::from_mins(10);

#[derive(Debug, Default)]
struct Known {
    connectors: Connectors,
    /// Time since boot from which it is to be looked at again.
    due: Duration,
}

/// What is known of the processes that may run a connector.
#[derive(Debug, Default)]
pub struct Watch {
    known: HashMap<ProcessKey, Known>,
}

impl Watch {
    /// What a process is known to have mapped.
    #[must_use]
    pub fn of(&self, key: ProcessKey) -> Connectors {
        self.known
            .get(&key)
            .map(|known| known.connectors)
            .unwrap_or_default()
    }

    /// Whether a process that is `age` old is to be looked at, at `now` since boot. It is due again when it is a fifth
    /// older, or earlier while it may still start.
    pub fn is_due(&mut self, key: ProcessKey, age: Duration, now: Duration) -> bool {
        let known = self.known.entry(key).or_default();
        let is_due = known.due <= now;
        if is_due {
            let longest = if age < STARTING {
                STARTING_PAUSE
            } else {
                Duration::MAX
            };
            known.due = now + (age / 5).clamp(SHORTEST_PAUSE, longest);
        }
        is_due
    }

    /// Takes what a look showed; returns whether that is new. What was mapped once counts for good.
    pub fn seen(&mut self, key: ProcessKey, mapped: Connectors) -> bool {
        let known = &mut self.known.entry(key).or_default().connectors;
        let before = *known;
        known.control |= mapped.control;
        known.store |= mapped.store;
        known.yuanrong |= mapped.yuanrong;
        *known != before
    }

    /// Forgets the processes that have ended.
    pub fn keep(&mut self, lives: impl Fn(&ProcessKey) -> bool) {
        self.known.retain(|key, _| lives(key));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    const NONE: Connectors = Connectors {
        control: false,
        store: false,
        yuanrong: false,
    };
    const CONTROL: Connectors = Connectors {
        control: true,
        ..NONE
    };

    #[rstest]
    #[case::engine("/v/site-packages/mooncake/engine.so", CONTROL)]
    #[case::engine_of_one_python("/v/mooncake/engine.cpython-311-x86_64-linux-gnu.so", CONTROL)]
    #[case::store("/v/site-packages/mooncake/store.so", Connectors { store: true, ..NONE })]
    #[case::helper_of_mooncake("/v/site-packages/mooncake/libasio.so", NONE)]
    #[case::mori("/v/site-packages/mori/libmori_pybinds.so", CONTROL)]
    #[case::nixl("/v/site-packages/.nixl_cu13.mesonpy.libs/libnixl.so", CONTROL)]
    #[case::nixl_deleted("/v/libnixl.so (deleted)", CONTROL)]
    #[case::yuanrong("/v/yr/datasystem/lib/libdatasystem.so", Connectors { yuanrong: true, ..NONE })]
    #[case::yuanrong_of_another_build("/v/datasystem/lib/libclient.so", Connectors { yuanrong: true, ..NONE })]
    #[case::yuanrong_of_the_system("/usr/lib/libdatasystem.so.1", Connectors { yuanrong: true, ..NONE })]
    #[case::yuanrong_engine(
        "/v/yr/datasystem/_transfer_engine.cpython-311-x86_64-linux-gnu.so",
        Connectors { yuanrong: true, ..CONTROL }
    )]
    #[case::another_engine("/v/site-packages/other/engine.so", NONE)]
    #[case::no_library("/v/site-packages/mooncake/engine.py", NONE)]
    #[case::a_model("/models/mori/weights.bin", NONE)]
    fn libraries(#[case] path: &str, #[case] expected: Connectors) {
        let maps = format!("7f00-7f01 r-xp 00000000 fe:01 7    {path}\n7f02-7f03 rw-p 00000000 00:00 0 \n");
        assert_eq!(Connectors::mapped(maps.as_bytes()), expected);
    }

    #[test]
    fn looks_become_rare() {
        let key = ProcessKey {
            pid: 1,
            start_ticks: 0,
        };
        let mut watch = Watch::default();
        let looks = (0..86_400)
            .map(Duration::from_secs)
            .filter(|&now| watch.is_due(key, now, now))
            .count();
        assert!((100..200).contains(&looks), "{looks} looks in a day");
        // One that starts and maps a library after a minute.
        let mut watch = Watch::default();
        let last = (0..=80).filter(|&s| {
            let now = Duration::from_secs(s);
            watch.is_due(key, now, now)
        });
        assert!(last.last() > Some(70));
    }

    #[test]
    fn what_was_mapped_once_counts() {
        let key = ProcessKey {
            pid: 1,
            start_ticks: 0,
        };
        let mut watch = Watch::default();
        assert_eq!(watch.of(key), NONE);
        assert!(!watch.seen(key, NONE));
        assert!(watch.seen(key, CONTROL));
        assert!(!watch.seen(key, NONE) && watch.of(key) == CONTROL);
        watch.keep(|_| false);
        assert_eq!(watch.of(key), NONE);
    }

    proptest! {
        #[test]
        fn any_maps(maps in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = Connectors::mapped(&maps);
        }
    }
}
