//! Halves of transfers that wait for their other half: by key, bounded, the oldest goes first.

use std::{collections::BTreeMap, sync::Arc};

use rustc_hash::FxHashMap;

use crate::host::identity::PipelineId;

/// A key inside its pipeline. Pipelines in different containers may use equal keys.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct HopKey(PipelineId, Arc<str>);

impl HopKey {
    pub(super) fn new(pipeline: PipelineId, name: Arc<str>) -> Self {
        Self(pipeline, name)
    }

    pub(super) fn pipeline(&self) -> PipelineId {
        self.0
    }

    pub(super) fn name(&self) -> &str {
        &self.1
    }
}

/// At most one item for each key, in the order of arrival.
#[derive(Debug)]
pub(super) struct Waiting<T> {
    by_key: FxHashMap<HopKey, u64>,
    in_order: BTreeMap<u64, (HopKey, T)>,
    next: u64,
}

impl<T> Default for Waiting<T> {
    fn default() -> Self {
        Self {
            by_key: FxHashMap::default(),
            in_order: BTreeMap::new(),
            next: 0,
        }
    }
}

impl<T> Waiting<T> {
    pub(super) fn len(&self) -> usize {
        self.in_order.len()
    }

    pub(super) fn get(&self, key: &HopKey) -> Option<&T> {
        let number = self.by_key.get(key)?;
        self.in_order.get(number).map(|(_, item)| item)
    }

    pub(super) fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.in_order.values_mut().map(|(_, item)| item)
    }

    /// Enters an item in place of the one under its key. Gives back the oldest one where there would be more than
    /// `max`.
    pub(super) fn insert(&mut self, key: HopKey, item: T, max: usize) -> Option<(HopKey, T)> {
        self.remove(&key);
        self.by_key.insert(key.clone(), self.next);
        self.in_order.insert(self.next, (key, item));
        self.next += 1;
        if self.in_order.len() <= max {
            return None;
        }
        let (_, (key, oldest)) = self.in_order.pop_first()?;
        self.by_key.remove(&key);
        Some((key, oldest))
    }

    pub(super) fn remove(&mut self, key: &HopKey) -> Option<T> {
        let number = self.by_key.remove(key)?;
        self.in_order.remove(&number).map(|(_, item)| item)
    }

    /// Takes out all for which `is_over` says so, the oldest first.
    pub(super) fn take(&mut self, is_over: impl Fn(&HopKey, &T) -> bool) -> Vec<(HopKey, T)> {
        let taken: Vec<(HopKey, T)> = self
            .in_order
            .extract_if(.., |_, (key, item)| is_over(key, item))
            .map(|(_, entry)| entry)
            .collect();
        for (key, _) in &taken {
            self.by_key.remove(key);
        }
        taken
    }
}
