//! The agent's own families (`omnitap_*`), written by any thread.

use std::{borrow::Cow, sync::Arc};

use super::{
    catalogue::Family,
    store::{Child, Store},
};
use crate::host::identity::PipelineId;

/// A handle to the agent's own families; clones share them. Label values are given in the order of the catalogue.
#[derive(Clone, Debug)]
pub struct Own {
    store: Arc<Store>,
}

/// A child of one of the agent's own counters, for hot paths: adding takes no lock and no look-up.
#[derive(Clone, Debug)]
pub struct Counter(Arc<Child>);

impl Counter {
    /// Adds to the counter; it must not go down, so what is not a positive number is left out.
    pub fn add(&self, by: f64) {
        if let Some(number) = self.0.number()
            && by > 0.0
            && by.is_finite()
        {
            number.add(by);
        }
    }
}

impl Own {
    pub(super) fn new(store: Arc<Store>) -> Self {
        let own = Self { store };
        own.set(
            Family::OmnitapBuildInfo,
            &[env!("CARGO_PKG_VERSION"), std::env::consts::ARCH],
            1.0,
        );
        own.add(Family::OmnitapSeriesRefusedTotal, &[], 0.0);
        own.sample_series();
        own
    }

    /// The child of a counter, made if there is none.
    #[must_use]
    pub fn counter(&self, family: Family, values: &[&str]) -> Option<Counter> {
        self.child(family, values).map(Counter)
    }

    /// Adds to a counter. `by` of 0 creates the child.
    pub fn add(&self, family: Family, values: &[&str], by: f64) {
        if let Some(counter) = self.counter(family, values) {
            counter.add(by);
        }
    }

    /// Sets a counter whose total is kept elsewhere (in the kernel, say); it never goes down.
    pub fn set_total(&self, family: Family, values: &[&str], total: f64) {
        if let Some(child) = self.child(family, values)
            && let Some(number) = child.number()
        {
            number.raise(total);
        }
    }

    /// Sets a gauge.
    pub fn set(&self, family: Family, values: &[&str], value: f64) {
        if let Some(child) = self.child(family, values)
            && let Some(number) = child.number()
        {
            number.set(value);
        }
    }

    /// Observes a value in a histogram, in seconds for all of ours.
    pub fn observe(&self, family: Family, values: &[&str], value: f64) {
        if let Some(child) = self.child(family, values)
            && let Some(histogram) = child.histogram()
        {
            histogram.observe(value, 1);
        }
    }

    /// Removes a child.
    pub fn remove(&self, family: Family, values: &[&str]) {
        if let Some(child) = self.child(family, values) {
            self.store.remove(family, &child);
        }
    }

    /// Removes all children of a family.
    pub fn clear(&self, family: Family) {
        self.store.remove_if(family, |_| true);
    }

    /// Removes the children of a pipeline that has ended from the families with a label `pipeline`.
    pub fn remove_pipeline(&self, pipeline: PipelineId) {
        let label = format!("pipeline=\"{}\"", pipeline.0);
        for family in [
            Family::OmnitapPipelineInfo,
            Family::OmnitapSourceState,
            Family::OmnitapEngineDisagreement,
        ] {
            // No other label name of these families ends in "pipeline", and values have their quotes escaped.
            self.store.remove_if(family, |c| c.labels.contains(&label));
        }
    }

    /// CPU time and memory of this process, from /proc; left as they are where /proc can't be read.
    pub fn sample_process(&self) {
        let Ok(stat) = procfs::process::Process::myself().and_then(|p| p.stat()) else {
            return;
        };
        #[expect(
            clippy::cast_precision_loss,
            reason = "ticks and bytes of one process are far below 2^53"
        )]
        {
            let ticks = (stat.utime + stat.stime) as f64 / procfs::ticks_per_second() as f64;
            self.set_total(Family::OmnitapCpuSecondsTotal, &[], ticks);
            let bytes = stat.rss.saturating_mul(procfs::page_size()) as f64;
            self.set(Family::OmnitapResidentMemoryBytes, &[], bytes);
        }
    }

    /// The number of sample lines, as it stands.
    pub fn sample_series(&self) {
        let lines = u32::try_from(self.store.lines()).unwrap_or(u32::MAX);
        self.set(Family::OmnitapSeries, &[], f64::from(lines));
    }

    fn child(&self, family: Family, values: &[&str]) -> Option<Arc<Child>> {
        let row = family.row();
        debug_assert!(row.is_own(), "{} is not the agent's own", row.name);
        debug_assert_eq!(row.labels.len(), values.len(), "labels of {}", row.name);
        let mut labels: Vec<_> = row
            .labels
            .iter()
            .copied()
            .zip(values.iter().map(|v| Cow::Borrowed(*v)))
            .collect();
        self.store.child(family, &mut labels, None)
    }
}
