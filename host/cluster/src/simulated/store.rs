//! The keys of the simulated engine, with their history.

use std::collections::BTreeMap;

use bytes::Bytes;

use crate::engine::{
    Change, Condition, EngineError, KeyRange, Outcome, Page, Revision, Transaction, Value,
};

/// All versions of all keys since the last compaction.
#[derive(Debug, Default)]
pub(super) struct Store {
    revision: u64,
    compacted: u64,
    /// Per key its values by revision. `None` is a deletion.
    keys: BTreeMap<Vec<u8>, BTreeMap<u64, Option<Bytes>>>,
    /// The changed keys by revision, in the order of the transaction.
    changes: BTreeMap<u64, Vec<Vec<u8>>>,
}

impl Store {
    pub(super) fn revision(&self) -> Revision {
        Revision(self.revision)
    }

    pub(super) fn compacted(&self) -> Revision {
        Revision(self.compacted)
    }

    pub(super) fn get(&self, key: &[u8], at: Revision) -> Option<Bytes> {
        let versions = self.keys.get(key)?;
        versions.range(..=at.0).next_back()?.1.clone()
    }

    pub(super) fn transact(&mut self, transaction: &Transaction) -> Outcome {
        let value = self.get(&transaction.key, self.revision());
        let holds = match &transaction.condition {
            Condition::Value(expected) => value.as_ref() == Some(expected),
            Condition::Absent => value.is_none(),
            Condition::Always => true,
        };
        if !holds {
            return Outcome::Failed(Value {
                value,
                revision: self.revision(),
            });
        }
        self.revision += 1;
        for range in &transaction.deletes {
            let keys = self.keys.range(range.from.clone()..range.to.clone());
            let live = keys.filter(|(_, it)| it.values().next_back().is_some_and(Option::is_some));
            for key in live.map(|(key, _)| key.clone()).collect::<Vec<_>>() {
                self.write(key, None);
            }
        }
        for (key, value) in &transaction.puts {
            self.write(key.clone(), Some(value.clone()));
        }
        Outcome::Applied(self.revision())
    }

    fn write(&mut self, key: Vec<u8>, value: Option<Bytes>) {
        let versions = self.keys.entry(key.clone()).or_default();
        versions.insert(self.revision, value);
        self.changes.entry(self.revision).or_default().push(key);
    }

    pub(super) fn range(
        &self,
        range: &KeyRange,
        at: Revision,
        values_max: usize,
    ) -> Result<Page, EngineError> {
        if at.0 < self.compacted {
            return Err(EngineError::Compacted);
        }
        let keys = self.keys.range(range.from.clone()..range.to.clone());
        let mut values: Vec<_> = keys
            .filter_map(|(key, versions)| {
                let value = versions.range(..=at.0).next_back()?.1.clone()?;
                Some((key.clone(), value))
            })
            .take(values_max + 1)
            .collect();
        let more = values.len() > values_max;
        values.truncate(values_max);
        Ok(Page { values, more })
    }

    /// The changes of a range since a revision.
    pub(super) fn changes(
        &self,
        range: &KeyRange,
        from: Revision,
    ) -> Result<Vec<Change>, EngineError> {
        if from.0 <= self.compacted {
            return Err(EngineError::Compacted);
        }
        let changes = self.changes.range(from.0..).flat_map(|(revision, keys)| {
            let revision = *revision;
            keys.iter().map(move |key| (revision, key))
        });
        let inside = changes.filter(|(_, key)| (&range.from..&range.to).contains(key));
        let change = |(revision, key): (u64, &Vec<u8>)| Change {
            key: key.clone(),
            value: self.get(key, Revision(revision)),
        };
        Ok(inside.map(change).collect())
    }

    pub(super) fn compact(&mut self, to: Revision) {
        if to.0 <= self.compacted || to.0 > self.revision {
            return;
        }
        self.compacted = to.0;
        self.changes = self.changes.split_off(&(to.0 + 1));
        self.keys.retain(|_, versions| {
            let later = versions.split_off(&(to.0 + 1));
            let last = versions.pop_last().filter(|(_, value)| value.is_some());
            *versions = later;
            versions.extend(last);
            !versions.is_empty()
        });
    }

    pub(super) fn bytes(&self) -> u64 {
        let versions = self.keys.values().flat_map(BTreeMap::values).flatten();
        versions.map(|it| it.len() as u64).sum()
    }
}
