//! Log output: text or JSON, repeated warnings rate-limited.

use std::{
    hash::{BuildHasher as _, Hash},
    time::{Duration, Instant},
};

use parking_lot::{Mutex, const_mutex};
use rustc_hash::{FxBuildHasher, FxHashMap};
use tracing::{Subscriber, level_filters::LevelFilter};
use tracing_subscriber::fmt::MakeWriter;

use crate::config::{LogFormat, LogLevel};

/// Sends the log to standard error. Only the first call has an effect.
pub fn init(level: LogLevel, format: LogFormat) {
    let subscriber = subscriber(level, format, std::io::stderr);
    // A second subscriber is refused: the first one stays, which is what is wanted.
    let _ = tracing::subscriber::set_global_default(subscriber);
}

/// A subscriber that writes what is at least as severe as `level`. Text has no colours: it ends in files as a rule.
pub fn subscriber<W>(level: LogLevel, format: LogFormat, writer: W) -> Box<dyn Subscriber + Send + Sync>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let builder = tracing_subscriber::fmt()
        .with_max_level(filter(level))
        .with_ansi(false)
        .with_writer(writer);
    match format {
        LogFormat::Text => Box::new(builder.finish()),
        LogFormat::Json => Box::new(
            builder
                .json()
                .flatten_event(true)
                .with_current_span(false)
                .finish(),
        ),
    }
}

fn filter(level: LogLevel) -> LevelFilter {
    match level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    }
}

/// How often a warning with the same key is repeated.
pub const REPEAT_AFTER: Duration = Duration::from_mins(1);

/// Keys that one call site tells apart; those beyond it share one, so that hostile input can't fill memory.
const MAX_KEYS: usize = 256;

/// The hash under which further keys are counted together.
const SHARED_KEY: u64 = u64::MAX;

/// Lets an event through once an interval for each key. One for each call site: see [`warn_limited!`](crate::warn_limited).
#[derive(Debug)]
pub struct RateLimit {
    seen: Mutex<FxHashMap<u64, Seen>>,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    at: Instant,
    suppressed: u64,
}

impl Default for RateLimit {
    fn default() -> Self {
        Self::new()
    }
}

impl RateLimit {
    /// Has seen nothing.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            seen: const_mutex(FxHashMap::with_hasher(FxBuildHasher)),
        }
    }

    /// Whether the event may pass: `Some` with the number of events of this key that were held back since the last one.
    pub fn pass(&self, key: &impl Hash, now: Instant) -> Option<u64> {
        let mut key = FxBuildHasher.hash_one(key);
        let mut seen = self.seen.lock();
        if seen.len() >= MAX_KEYS && !seen.contains_key(&key) {
            seen.retain(|_, s| now.saturating_duration_since(s.at) < REPEAT_AFTER);
            if seen.len() >= MAX_KEYS {
                key = SHARED_KEY;
            }
        }
        match seen.get_mut(&key) {
            Some(s) if now.saturating_duration_since(s.at) < REPEAT_AFTER => {
                s.suppressed += 1;
                None
            }
            Some(s) => {
                let suppressed = s.suppressed;
                *s = Seen {
                    at: now,
                    suppressed: 0,
                };
                Some(suppressed)
            }
            None => {
                let first = Seen {
                    at: now,
                    suppressed: 0,
                };
                seen.insert(key, first);
                Some(0)
            }
        }
    }
}

/// `tracing::warn!` at most once a minute for each key (anything that can be hashed) at this place in the code. The
/// field `suppressed` says how many were held back since the last one.
///
/// ```
/// let pid = 7_u32;
/// omnitap::warn_limited!(pid, pid, "cannot read the maps of a process");
/// ```
#[macro_export]
macro_rules! warn_limited {
    ($key:expr, $($event:tt)+) => {{
        static LIMIT: $crate::logging::RateLimit = $crate::logging::RateLimit::new();
        match LIMIT.pass(&$key, ::std::time::Instant::now()) {
            ::std::option::Option::None => {}
            ::std::option::Option::Some(0) => ::tracing::warn!($($event)+),
            ::std::option::Option::Some(suppressed) => ::tracing::warn!(suppressed, $($event)+),
        }
    }};
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn logged(level: LogLevel, format: LogFormat, events: impl FnOnce()) -> String {
        let lines = Lines::default();
        let writer = lines.clone();
        tracing::subscriber::with_default(subscriber(level, format, move || writer.clone()), events);
        let bytes = lines.0.lock();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    #[test]
    fn a_key_passes_once_an_interval_with_the_count_of_what_was_held_back() {
        let limit = RateLimit::new();
        let start = Instant::now();
        let second = |n| start + Duration::from_secs(n);
        assert_eq!(limit.pass(&"a", second(0)), Some(0));
        assert_eq!(limit.pass(&"a", second(1)), None);
        assert_eq!(limit.pass(&"b", second(1)), Some(0));
        assert_eq!(limit.pass(&"a", second(59)), None);
        assert_eq!(limit.pass(&"a", second(60)), Some(2));
        assert_eq!(limit.pass(&"a", second(61)), None);
        assert_eq!(limit.pass(&"a", second(600)), Some(1));
    }

    #[test]
    fn too_many_keys_share_one() {
        let limit = RateLimit::new();
        let start = Instant::now();
        let passed = (0..1000).filter(|key| limit.pass(key, start).is_some()).count();
        assert_eq!(passed, MAX_KEYS + 1);
        assert!(limit.seen.lock().len() <= MAX_KEYS + 1);
        // After the interval the old ones make room.
        assert_eq!(limit.pass(&5000, start + REPEAT_AFTER), Some(0));
        assert_eq!(limit.seen.lock().len(), 1);
    }

    #[test]
    fn a_repeated_warning_is_logged_once() {
        let text = logged(LogLevel::Warn, LogFormat::Text, || {
            for pid in [1, 1, 1, 2] {
                warn_limited!(pid, pid, "cannot attach");
            }
        });
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(text.contains("cannot attach pid=1"), "{text}");
    }

    #[test]
    fn json_is_one_object_a_line() {
        let text = logged(LogLevel::Info, LogFormat::Json, || {
            tracing::info!(pid = 7, "attached");
            tracing::debug!("not logged");
        });
        let object: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(object["message"], "attached");
        assert_eq!(object["pid"], 7);
        assert_eq!(object["level"], "INFO");
    }

    #[test]
    fn text_has_no_colours() {
        let text = logged(LogLevel::Error, LogFormat::Text, || tracing::error!("lost"));
        assert!(text.contains("ERROR") && !text.contains('\u{1b}'), "{text}");
    }
}
