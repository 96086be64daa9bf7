//! Sources that serve the same families: precedence, and hand-overs that neither lose nor double a request.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use omnitap::{
    host::identity::PipelineId,
    metrics::{
        catalogue::Family,
        merge::{FamilyOrder, Feed, Known, Ledger, Mark, Merge, Merged, NoRequests, Order},
        registry::{Limits, Registry},
        text::Format,
    },
    pipeline::sink::{ExtraId, Scope, Sink, Subject},
};
use proptest::prelude::*;
use rstest::rstest;

const PIPELINE: PipelineId = PipelineId(1);
const COUNTER: Family = Family::OmniImageCountTotal;
const GAUGE: Family = Family::OmniNumRequestsRunning;

/// A feed's requests, as its state machines would keep them.
#[derive(Default)]
struct Requests {
    mark: Mark,
    known: HashMap<String, Known>,
}

impl Requests {
    fn start(&mut self, request: &str) -> u32 {
        let mark = &mut self.mark;
        let known = self.known.entry(request.to_owned()).or_insert_with(|| {
            mark.serial += 1;
            Known {
                serial: mark.serial,
                ended: None,
            }
        });
        known.serial
    }

    fn end(&mut self, request: &str) -> u32 {
        let serial = self.start(request);
        self.mark.ended += 1;
        let ended = Some(self.mark.ended);
        self.known.insert(request.to_owned(), Known { serial, ended });
        serial
    }
}

impl Ledger for Requests {
    fn mark(&self, pipeline: PipelineId) -> Mark {
        assert_eq!(pipeline, PIPELINE);
        self.mark
    }

    fn find(&self, pipeline: PipelineId, request: &str) -> Option<Known> {
        assert_eq!(pipeline, PIPELINE);
        self.known.get(request).copied()
    }
}

/// A tap and a stat socket that see the same requests, and an engine.
struct World {
    registry: Registry,
    merge: Merge,
    tap: Requests,
    stat: Requests,
}

impl World {
    fn new(merge: Merge) -> Self {
        Self {
            registry: Registry::new(Limits {
                max_series: 10_000,
                retention: Duration::from_mins(1),
            }),
            merge,
            tap: Requests::default(),
            stat: Requests::default(),
        }
    }

    fn sink(&mut self, feed: Feed) -> Merged<'_> {
        let others: &dyn Ledger = match feed {
            Feed::StatSocket => &self.tap,
            Feed::Tap => &self.stat,
            Feed::Engine => &NoRequests,
        };
        Merged::new(&mut self.registry, &mut self.merge, feed, others)
    }

    fn requests(&mut self, feed: Feed) -> &mut Requests {
        match feed {
            Feed::StatSocket => &mut self.stat,
            _ => &mut self.tap,
        }
    }

    /// A feed sees the end of a request, and counts it.
    fn end(&mut self, feed: Feed, request: &str) {
        // The state machines give their samples before or after they note the end: both must do.
        let serial = if request.len().is_multiple_of(2) {
            self.requests(feed).end(request)
        } else {
            self.requests(feed).start(request)
        };
        let mut sink = self.sink(feed);
        let scope = sink.scope(&scope());
        sink.about(Some(Subject {
            pipeline: PIPELINE,
            request,
            serial,
        }));
        sink.add(COUNTER, scope, ExtraId::NONE, 1.0);
        sink.about(None);
        if self
            .requests(feed)
            .known
            .get(request)
            .is_some_and(|known| known.ended.is_none())
        {
            self.requests(feed).end(request);
        }
    }

    fn set(&mut self, feed: Feed, value: f64) {
        let mut sink = self.sink(feed);
        let scope = sink.scope(&scope());
        sink.set(GAUGE, scope, ExtraId::NONE, value);
    }

    fn add(&mut self, feed: Feed, by: f64) {
        let mut sink = self.sink(feed);
        let scope = sink.scope(&scope());
        sink.add(COUNTER, scope, ExtraId::NONE, by);
    }

    fn stat_gone(&mut self) {
        self.merge.depart(
            PIPELINE,
            Feed::StatSocket,
            (&self.stat, &self.tap),
            &mut self.registry,
        );
    }

    /// The value of a family's only child; `None`: it has none.
    fn value(&self, family: Family) -> Option<f64> {
        let mut page = Vec::new();
        self.registry.exposition().render(&mut page, Format::Text);
        let page = String::from_utf8(page).unwrap();
        let mut lines = page
            .lines()
            .filter(|line| line.starts_with(&format!("{}{{", family.name())));
        let value = lines.next()?.rsplit_once(' ')?.1.parse().unwrap();
        assert_eq!(lines.next(), None, "one child");
        Some(value)
    }
}

fn scope() -> Scope {
    Scope {
        pipeline: PIPELINE,
        model: "m".to_owned(),
        served_model: "m".to_owned(),
        stage: None,
        replica: None,
        max_model_len: None,
    }
}

#[rstest]
#[case::higher_takes_over(&[Feed::Engine, Feed::Tap, Feed::StatSocket], &[1.0, 2.0, 3.0], Feed::StatSocket)]
#[case::lower_is_dropped(&[Feed::StatSocket, Feed::Tap, Feed::Engine], &[1.0, 1.0, 1.0], Feed::StatSocket)]
#[case::engine_fills_what_nobody_has(&[Feed::Engine, Feed::Engine], &[1.0, 2.0], Feed::Engine)]
#[case::engine_gives_way(&[Feed::Engine, Feed::Tap, Feed::Engine, Feed::Tap], &[1.0, 2.0, 2.0, 3.0], Feed::Tap)]
fn one_source_at_a_time(#[case] samples: &[Feed], #[case] totals: &[f64], #[case] holder: Feed) {
    let mut world = World::new(Merge::default());
    for (feed, total) in samples.iter().zip(totals) {
        world.add(*feed, 1.0);
        assert_eq!(world.value(COUNTER), Some(*total), "after {feed:?}");
    }
    assert_eq!(world.merge.holder(PIPELINE, COUNTER), Some(holder));
    assert_eq!(world.merge.holder(PipelineId(2), COUNTER), None);
}

#[rstest]
#[case::all("engine>tap>stat_socket", &[], Some(Feed::Engine))]
#[case::left_out("tap>engine", &[], Some(Feed::Tap))]
#[case::nobody("engine", &["vllm_omni:image_count_total=tap"], Some(Feed::Tap))]
#[case::by_family("engine>tap", &["vllm_omni:image_*=stat_socket>tap", "vllm_omni:*=tap"], Some(Feed::StatSocket))]
#[case::other_family("tap>engine", &["vllm_omni:audio_*=stat_socket"], Some(Feed::Tap))]
fn the_order_is_a_setting(#[case] order: &str, #[case] families: &[&str], #[case] holder: Option<Feed>) {
    let order: Order = order.parse().unwrap();
    let families: Vec<FamilyOrder> = families.iter().map(|text| text.parse().unwrap()).collect();
    for feeds in [Feed::ALL, [Feed::Engine, Feed::Tap, Feed::StatSocket]] {
        let mut world = World::new(Merge::new(order, &families));
        for feed in feeds {
            world.add(feed, 1.0);
        }
        assert_eq!(world.merge.holder(PIPELINE, COUNTER), holder);
    }
}

#[rstest]
#[case::unknown("tap>wire")]
#[case::twice("tap>tap")]
#[case::empty("")]
fn no_order(#[case] text: &str) {
    assert!(text.parse::<Order>().is_err());
}

#[rstest]
#[case::no_family("vllm_omni:nothing=tap")]
#[case::own_family("omnitap_series=tap")]
#[case::no_order("vllm_omni:*=")]
#[case::no_sign("vllm_omni:*")]
fn no_family_order(#[case] text: &str) {
    assert!(text.parse::<FamilyOrder>().is_err());
}

#[rstest]
#[case("stat_socket>tap>engine")]
#[case("engine")]
fn an_order_is_written_as_it_is_read(#[case] text: &str) {
    assert_eq!(text.parse::<Order>().unwrap().to_string(), text);
    let family = format!("vllm_omni:transfer_*={text}");
    assert_eq!(family.parse::<FamilyOrder>().unwrap().to_string(), family);
}

#[test]
fn a_gauge_has_the_value_of_its_holder_alone() {
    let mut world = World::new(Merge::default());
    world.set(Feed::Tap, 5.0);
    world.set(Feed::StatSocket, 3.0);
    assert_eq!(world.value(GAUGE), Some(3.0), "not the sum");
    world.set(Feed::Tap, 6.0);
    assert_eq!(world.value(GAUGE), Some(3.0));
    world.stat_gone();
    assert_eq!(world.value(GAUGE), None, "its last value is nobody's");
    world.set(Feed::Tap, 7.0);
    assert_eq!(world.value(GAUGE), Some(7.0));
}

#[test]
fn a_child_that_is_only_made_takes_nothing_over() {
    let mut world = World::new(Merge::default());
    world.add(Feed::StatSocket, 0.0);
    assert_eq!(world.value(COUNTER), Some(0.0));
    assert_eq!(world.merge.holder(PIPELINE, COUNTER), None);
}

#[test]
fn requests_that_are_under_way_stay_with_the_source_that_has_them() {
    let mut world = World::new(Merge::default());
    world.tap.start("old");
    world.tap.start("older");
    world.end(Feed::Tap, "older");
    world.stat.start("old");
    // The stat socket takes over with a request that the tap has counted.
    world.end(Feed::StatSocket, "older");
    world.end(Feed::StatSocket, "old");
    assert_eq!(world.value(COUNTER), Some(1.0));
    world.end(Feed::Tap, "old");
    assert_eq!(world.value(COUNTER), Some(2.0));
    for feed in [Feed::Tap, Feed::StatSocket] {
        world.end(feed, "new");
    }
    assert_eq!(world.value(COUNTER), Some(3.0));
}

#[test]
fn what_a_source_leaves_behind_goes_to_the_next() {
    let mut world = World::new(Merge::default());
    for request in ["told", "left"] {
        world.tap.start(request);
        world.stat.start(request);
    }
    world.tap = Requests::default();
    world.end(Feed::StatSocket, "told");
    world.tap.start("told");
    world.tap.start("left");
    world.stat_gone();
    world.end(Feed::Tap, "told");
    world.end(Feed::Tap, "left");
    assert_eq!(world.value(COUNTER), Some(2.0));
}

#[test]
fn a_pipeline_that_ends_leaves_nothing() {
    let mut world = World::new(Merge::default());
    world.add(Feed::StatSocket, 1.0);
    world.merge.forget(PIPELINE);
    assert_eq!(world.merge.holder(PIPELINE, COUNTER), None);
    world.stat_gone();
    world.add(Feed::Tap, 1.0);
    assert_eq!(world.merge.holder(PIPELINE, COUNTER), Some(Feed::Tap));
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Start(Feed, u8),
    End(Feed, u8),
    Gone,
    Tick,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let feed = prop_oneof![Just(Feed::Tap), Just(Feed::StatSocket)];
    let step = prop_oneof![
        4 => (feed.clone(), 0_u8..12).prop_map(|(feed, request)| Step::Start(feed, request)),
        6 => (feed, 0_u8..12).prop_map(|(feed, request)| Step::End(feed, request)),
        1 => Just(Step::Gone),
        1 => Just(Step::Tick),
    ];
    prop::collection::vec(step, 0..120)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn each_request_counts_once(steps in steps()) {
        let mut world = World::new(Merge::default());
        // Request -> which feeds saw its end.
        let mut ended: BTreeMap<u8, Vec<Feed>> = BTreeMap::new();
        let mut counted: BTreeMap<u8, u32> = BTreeMap::new();
        let mut total = 0.0;
        let mut stat_spoke = false;
        // Each costs two hand-overs, of which sixteen are remembered.
        let mut departures = 0;
        for step in steps {
            match step {
                Step::Start(feed, request) => {
                    world.requests(feed).start(&"r".repeat(usize::from(request) + 1));
                }
                Step::End(feed, request) => {
                    // A terminal message that is seen twice is the state machines' matter.
                    let feeds = ended.entry(request).or_default();
                    if feeds.contains(&feed) {
                        continue;
                    }
                    feeds.push(feed);
                    stat_spoke |= feed == Feed::StatSocket;
                    world.end(feed, &"r".repeat(usize::from(request) + 1));
                    let now = world.value(COUNTER).unwrap_or(0.0);
                    prop_assert!(now >= total, "never back");
                    if now > total {
                        *counted.entry(request).or_default() += 1;
                    }
                    total = now;
                }
                Step::Gone if departures < 7 => {
                    departures += 1;
                    world.stat_gone();
                }
                Step::Gone => {}
                Step::Tick => world.merge.tick(1),
            }
        }
        for (request, feeds) in &ended {
            let times = counted.get(request).copied().unwrap_or(0);
            prop_assert!(times <= 1, "request {request} twice");
            if feeds.len() == 2 || !stat_spoke {
                prop_assert_eq!(times, 1, "request {} lost", request);
            }
        }
    }
}
