//! Records of requests that are over, for `omnitap requests`, `omnitap top` and the log: a bounded list that readers page
//! through, and a limit on the rate.
//!
//! A reader asks for what came behind the last record that it has. A slow one finds a gap, whose size it is told; it
//! holds up nobody.

pub mod client;
pub mod text;

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tracing::info;

use crate::{
    config::RequestLog,
    metrics::{catalogue::Family, number::as_f64, own::Own},
    pipeline::records::{OpenRequest, RequestRecord},
};

/// Records in one answer; a reader that gets as many asks again at once.
pub const MAX_PAGE: usize = 200;

/// Requests under way in one answer.
const MAX_OPEN: usize = 500;

/// How long requests that are under way are listed for a reader who has not come again.
const WATCHED_NS: u64 = 5_000_000_000;

/// What is kept of requests.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Whether records are kept for readers.
    pub served: bool,
    /// Records that are kept.
    pub keep: usize,
    /// Records a second.
    pub max_rate: u32,
    /// Whether they go to the log.
    pub log: RequestLog,
}

/// The records; clones share them.
#[derive(Clone, Debug)]
pub struct Requests {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    settings: Settings,
    own: Own,
    kept: Mutex<Kept>,
    /// Until when requests under way are listed, by the monotonic clock.
    watched_until_ns: AtomicU64,
}

#[derive(Debug)]
struct Kept {
    records: VecDeque<RequestRecord>,
    /// Number of the newest record; the first one is 1.
    newest: u64,
    open: Vec<OpenRequest>,
    /// Records that may still be taken now.
    allowance: f64,
    allowed_ns: u64,
}

/// An answer to a reader.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Page {
    /// Number of the newest record that this reader now has: what it asks for next comes behind it.
    pub last: u64,
    /// Records that it has missed, for they made room for newer ones before it came.
    pub missed: u64,
    /// Whether there are more.
    pub more: bool,
    /// The records, from the oldest.
    pub records: Vec<RequestRecord>,
    /// Requests under way; filled from a second after the first question on.
    pub open: Vec<OpenRequest>,
}

impl Requests {
    /// Keeps nothing yet. `None`: nobody wants records.
    #[must_use]
    pub fn new(settings: Settings, own: Own) -> Option<Self> {
        (settings.served || settings.log != RequestLog::Off).then(|| Self {
            shared: Arc::new(Shared {
                settings,
                own,
                kept: Mutex::new(Kept {
                    records: VecDeque::new(),
                    newest: 0,
                    open: Vec::new(),
                    allowance: f64::from(settings.max_rate),
                    allowed_ns: 0,
                }),
                watched_until_ns: AtomicU64::new(0),
            }),
        })
    }

    /// Whether readers are answered.
    #[must_use]
    pub fn is_served(&self) -> bool {
        self.shared.settings.served
    }

    /// Takes the records of requests that are over. `refused` were given up before.
    pub fn ended(&self, records: Vec<RequestRecord>, refused: u64, now_ns: u64) {
        let Shared { settings, own, .. } = &*self.shared;
        let mut kept = self.shared.kept.lock();
        kept.allow(settings.max_rate, now_ns);
        let mut over_rate = refused;
        for record in records {
            if kept.allowance < 1.0 {
                over_rate += 1;
                continue;
            }
            kept.allowance -= 1.0;
            own.add(Family::OmnitapRequestRecordsTotal, &["taken"], 1.0);
            log(&record, settings.log);
            if settings.served {
                kept.push(record, settings.keep);
            }
        }
        if over_rate > 0 {
            own.add(
                Family::OmnitapRequestRecordsTotal,
                &["over_rate"],
                as_f64(over_rate),
            );
        }
    }

    /// Lists the requests that are under way, if somebody looks.
    pub fn open(&self, now_ns: u64, list: impl FnOnce(usize) -> Vec<OpenRequest>) {
        let is_watched = now_ns < self.shared.watched_until_ns.load(Ordering::Relaxed);
        let open = if is_watched { list(MAX_OPEN) } else { Vec::new() };
        self.shared.kept.lock().open = open;
    }

    /// What came behind the record with this number; 0: all that is kept.
    #[must_use]
    pub fn page(&self, after: u64, now_ns: u64) -> Page {
        let until_ns = now_ns.saturating_add(WATCHED_NS);
        self.shared.watched_until_ns.store(until_ns, Ordering::Relaxed);
        let page = self.shared.kept.lock().page(after);
        if page.missed > 0 {
            let missed = as_f64(page.missed);
            self.shared
                .own
                .add(Family::OmnitapRequestRecordsMissedTotal, &[], missed);
        }
        page
    }
}

impl Kept {
    /// Time has passed: as many more may be taken, up to those of two seconds, for records come in groups.
    fn allow(&mut self, max_rate: u32, now_ns: u64) {
        let rate = f64::from(max_rate);
        let passed_s = as_f64(now_ns.saturating_sub(self.allowed_ns)) / 1e9;
        self.allowed_ns = now_ns.max(self.allowed_ns);
        self.allowance = (self.allowance + rate * passed_s).min(2.0 * rate);
    }

    fn push(&mut self, record: RequestRecord, keep: usize) {
        while self.records.len() >= keep.max(1) {
            self.records.pop_front();
        }
        self.records.push_back(record);
        self.newest += 1;
    }

    fn page(&self, after: u64) -> Page {
        // A number from before the agent's start.
        let after = if after > self.newest { 0 } else { after };
        let first = self.newest - self.records.len() as u64 + 1;
        // Who asks for all has not missed what was there before.
        let missed = if after == 0 {
            0
        } else {
            first.saturating_sub(after + 1)
        };
        let from = (after + 1).max(first);
        let skip = usize::try_from(from - first).unwrap_or(usize::MAX);
        let records: Vec<_> = self.records.iter().skip(skip).take(MAX_PAGE).cloned().collect();
        let last = from - 1 + records.len() as u64;
        Page {
            last,
            missed,
            more: last < self.newest,
            records,
            open: self.open.clone(),
        }
    }
}

fn log(record: &RequestRecord, form: RequestLog) {
    match form {
        RequestLog::Off => {}
        RequestLog::Text => info!(target: "omnitap::requests", "{}", text::Tables(record)),
        // A struct with text as keys: it can't fail.
        RequestLog::Json => info!(
            target: "omnitap::requests",
            record = %serde_json::to_string(record).unwrap_or_default(),
            "request ended"
        ),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        metrics::registry::{Limits, Registry},
        pipeline::records::Outcome,
    };

    const SECOND: u64 = 1_000_000_000;

    fn requests(keep: usize, max_rate: u32) -> Requests {
        let registry = Registry::new(Limits {
            max_series: 1000,
            retention: std::time::Duration::from_mins(1),
        });
        let settings = Settings {
            served: true,
            keep,
            max_rate,
            log: RequestLog::Off,
        };
        Requests::new(settings, registry.own()).expect("wanted")
    }

    fn record(number: usize) -> RequestRecord {
        RequestRecord {
            request_id: number.to_string(),
            model: None,
            pipeline_pid: 1,
            arrived_unix_ms: None,
            ended_unix_ms: None,
            e2e_ms: None,
            outcome: Outcome::Finished,
            reason: "stop".into(),
            prompt_tokens: None,
            generated_tokens: 0,
            stages: Vec::new(),
            transfers: Vec::new(),
        }
    }

    fn ids(page: &Page) -> Vec<usize> {
        page.records
            .iter()
            .map(|record| record.request_id.parse().expect("a number"))
            .collect()
    }

    #[test]
    fn nobody_wants_records() {
        let settings = Settings {
            served: false,
            keep: 1,
            max_rate: 1,
            log: RequestLog::Off,
        };
        let registry = Registry::new(Limits {
            max_series: 1000,
            retention: std::time::Duration::from_mins(1),
        });
        assert!(Requests::new(settings, registry.own()).is_none());
    }

    #[test]
    fn what_is_over_the_rate_is_dropped() {
        let requests = requests(1000, 10);
        requests.ended((0..30).map(record).collect(), 0, 10 * SECOND);
        // Two seconds' worth at once, and no more.
        assert_eq!(ids(&requests.page(0, 0)), (0..20).collect::<Vec<_>>());
        requests.ended((30..60).map(record).collect(), 0, 11 * SECOND);
        assert_eq!(ids(&requests.page(20, 0)), (30..40).collect::<Vec<_>>());
    }

    #[test]
    fn a_number_from_before_the_agents_start_gives_all() {
        let requests = requests(10, 10);
        requests.ended(vec![record(0)], 0, SECOND);
        let page = requests.page(77, 0);
        assert_eq!((ids(&page), page.last, page.missed), (vec![0], 1, 0));
    }

    #[test]
    fn open_requests_are_listed_only_while_somebody_looks() {
        let requests = requests(10, 10);
        requests.open(SECOND, |_| panic!("nobody looks"));
        let _ = requests.page(0, SECOND);
        let mut listed = 0;
        requests.open(2 * SECOND, |_| {
            listed += 1;
            Vec::new()
        });
        requests.open(60 * SECOND, |_| panic!("nobody looks any more"));
        assert_eq!(listed, 1);
    }

    proptest! {
        /// A reader gets each record once, in order, or is told of it as missed.
        #[test]
        fn each_record_is_had_or_missed(
            keep in 1_usize..400,
            steps in proptest::collection::vec((0_usize..600, 0_usize..4), 1..20),
        ) {
            let requests = requests(keep, 1_000_000);
            let (mut made, mut last, mut had, mut missed) = (0, 0, Vec::new(), 0);
            for (new, reads) in steps {
                requests.ended((made..made + new).map(record).collect(), 0, SECOND);
                made += new;
                for _ in 0..reads {
                    let page = requests.page(last, 0);
                    prop_assert!(page.records.len() <= MAX_PAGE.min(keep));
                    // The first read alone does not know what was before it.
                    if last == 0 {
                        missed += made.saturating_sub(keep);
                    }
                    missed += usize::try_from(page.missed).expect("small");
                    had.extend(ids(&page));
                    last = page.last;
                    prop_assert_eq!(page.more, usize::try_from(last).expect("small") < made);
                }
            }
            prop_assert!(had.is_sorted_by(|a, b| a < b));
            prop_assert_eq!(had.len() + missed, usize::try_from(last).expect("small").max(missed));
        }
    }
}
