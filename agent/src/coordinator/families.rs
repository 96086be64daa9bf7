//! From lists to families: which replicas there are, where, how they are, and which have gone.

use std::collections::{BTreeMap, BTreeSet};

use super::sample::{CoordinatorSample, News};
use crate::{
    host::identity::PipelineId,
    metrics::{catalogue::Family, own::Own},
    wire::coordinator::{Replica, ReplicaList, ReplicaStatus},
};

const SECOND: u64 = 1_000_000_000;

/// A coordinator publishes at least every 5 s. Three missed, and its list is old.
const STALE_NS: u64 = 15 * SECOND;

/// A replica that is no longer listed is shown as gone for as long as the coordinator itself remembers it.
const GONE_NS: u64 = 600 * SECOND;

/// Replicas of a pipeline that are shown; their addresses come from outside.
const MAX_REPLICAS: usize = 512;

/// A replica that was listed.
#[derive(Clone, Debug)]
struct Known {
    stage: u32,
    status: ReplicaStatus,
    queue: Option<u64>,
    /// Stage and replica of its process, where that runs on this host.
    local: Option<(u32, Option<u32>)>,
    /// It was in the newest list, or when it was last.
    listed_ns: u64,
    is_listed: bool,
}

type Child = (Family, Vec<String>);

#[derive(Debug, Default)]
struct Coordinator {
    /// By address.
    replicas: BTreeMap<String, Known>,
    /// The newest list: its own time, and when it came.
    stamp: Option<f64>,
    came_ns: u64,
    is_stale: bool,
    shown: BTreeSet<Child>,
}

/// What is known of the coordinators.
#[derive(Debug, Default)]
pub struct Replicas {
    coordinators: BTreeMap<PipelineId, Coordinator>,
}

impl Replicas {
    /// Takes news that came at `now_ns`.
    pub fn sample(&mut self, sample: &CoordinatorSample, now_ns: u64, own: &Own) {
        let coordinator = self.coordinators.entry(sample.pipeline).or_default();
        let result = match &sample.news {
            News::Malformed => "malformed",
            News::List { list, local } => coordinator.take(list, local, now_ns),
        };
        own.add(Family::OmnitapCoordinatorMessagesTotal, &[result], 1.0);
        coordinator.show(sample.pipeline, now_ns, own);
    }

    /// Time passes: lists get old.
    pub fn tick(&mut self, now_ns: u64, own: &Own) {
        for (pipeline, coordinator) in &mut self.coordinators {
            coordinator.show(*pipeline, now_ns, own);
        }
    }

    /// A pipeline has ended.
    pub fn forget(&mut self, pipeline: PipelineId, own: &Own) {
        if let Some(mut coordinator) = self.coordinators.remove(&pipeline) {
            coordinator.put(BTreeMap::new(), own);
        }
    }
}

impl Coordinator {
    /// Takes a list and says what it was.
    fn take(
        &mut self,
        list: &ReplicaList,
        local: &[(String, u32, Option<u32>)],
        now_ns: u64,
    ) -> &'static str {
        // After a silence the list is of whoever publishes now: a coordinator that was restarted, on another clock perhaps.
        let fresh = self.is_stale || now_ns.saturating_sub(self.came_ns) > STALE_NS;
        match self.stamp {
            #[expect(clippy::float_cmp, reason = "the same list has the same time")]
            Some(stamp) if stamp == list.timestamp => return "duplicate",
            Some(stamp) if list.timestamp < stamp && !fresh => return "late",
            _ => {}
        }
        self.stamp = Some(list.timestamp);
        self.came_ns = now_ns;
        for known in self.replicas.values_mut() {
            known.is_listed = false;
        }
        let mut result = "ok";
        for replica in &list.replicas {
            let Replica {
                input_addr,
                stage_id,
                status,
                queue_length,
            } = replica;
            if self.replicas.len() >= MAX_REPLICAS && !self.replicas.contains_key(input_addr) {
                result = "too_many";
                continue;
            }
            let place = local
                .iter()
                .find(|(address, ..)| address == input_addr)
                .map(|(_, stage, replica)| (*stage, *replica));
            let was = self.replicas.get(input_addr).and_then(|known| known.local);
            self.replicas.insert(
                input_addr.clone(),
                Known {
                    stage: *stage_id,
                    status: *status,
                    queue: *queue_length,
                    local: place.or(was),
                    listed_ns: now_ns,
                    is_listed: true,
                },
            );
        }
        self.replicas
            .retain(|_, known| known.is_listed || now_ns.saturating_sub(known.listed_ns) <= GONE_NS);
        result
    }

    fn show(&mut self, pipeline: PipelineId, now_ns: u64, own: &Own) {
        if self.stamp.is_none() {
            return;
        }
        let age = now_ns.saturating_sub(self.came_ns);
        self.is_stale = age > STALE_NS;
        let label = pipeline.0.to_string();
        let mut wanted: BTreeMap<Child, f64> = BTreeMap::new();
        #[expect(clippy::cast_precision_loss, reason = "nanoseconds as seconds")]
        wanted.insert(
            (Family::OmnitapCoordinatorListAgeSeconds, vec![label.clone()]),
            age as f64 / 1e9,
        );
        if !self.is_stale {
            for (address, known) in &self.replicas {
                let status = if known.is_listed {
                    known.status.as_str()
                } else {
                    "gone"
                };
                let stage = known.stage.to_string();
                let count = vec![label.clone(), stage.clone(), status.to_owned()];
                *wanted
                    .entry((Family::OmnitapCoordinatorReplicas, count))
                    .or_default() += 1.0;
                // The process's own stage counts for the join; the coordinator may use other numbers.
                let replica = known
                    .local
                    .filter(|(stage, _)| *stage == known.stage)
                    .and_then(|(_, replica)| replica);
                let place = if known.local.is_some() { "local" } else { "remote" };
                let labels = vec![
                    label.clone(),
                    stage,
                    replica.map(|replica| replica.to_string()).unwrap_or_default(),
                    address.clone(),
                    place.to_owned(),
                ];
                let is_up = known.is_listed && known.status == ReplicaStatus::Up;
                wanted.insert(
                    (Family::OmnitapCoordinatorReplicaUp, labels.clone()),
                    f64::from(u8::from(is_up)),
                );
                if let Some(queue) = known.queue.filter(|_| known.is_listed) {
                    #[expect(clippy::cast_precision_loss, reason = "requests below 2^53")]
                    wanted.insert(
                        (Family::OmnitapCoordinatorReplicaQueueLength, labels),
                        queue as f64,
                    );
                }
            }
        }
        self.put(wanted, own);
    }

    fn put(&mut self, wanted: BTreeMap<Child, f64>, own: &Own) {
        for child in &self.shown {
            if !wanted.contains_key(child) {
                let labels: Vec<&str> = child.1.iter().map(String::as_str).collect();
                own.remove(child.0, &labels);
            }
        }
        for ((family, labels), value) in &wanted {
            let labels: Vec<&str> = labels.iter().map(String::as_str).collect();
            own.set(*family, &labels, *value);
        }
        self.shown = wanted.into_keys().collect();
    }
}
