//! The recent changes of visible keys, so that a client can ask for those that it missed.
//!
//! Versions rise strictly over all keys of a store, so a version is a position in this sequence.
//! Recovery refills the sequence from the records after the snapshot.
//!
//! Invariant: if [`Recent::since`] returns changes, no visible change after that version is
//! missing. Otherwise a client would miss a change without notice.

use std::collections::VecDeque;
use std::hint::black_box;

use super::entry::Entry;
use super::write::{Change, Write};
use crate::clock::Stamp;
use crate::limits;

/// The recent changes.
#[derive(Clone, Debug, Default)]
pub struct Recent {
    /// In the order of their versions.
    changes: VecDeque<Change>,
    bytes: u64,
    /// All changes after this version are known.
    known_after: Stamp,
    starts: VecDeque<Start>,
}

/// A start of a run. The versions between `last` and `next` were lost if an earlier run assigned
/// them.
#[derive(Clone, Debug)]
struct Start {
    /// The clock at the start: the last version that was found, or that up to which the start
    /// skipped.
    last: Stamp,
    /// The first version that the run assigned, also to a hidden key. If it assigned none, the
    /// clock at the next start.
    next: Option<Stamp>,
}

fn weight(change: &Change) -> u64 {
    let key_bytes = change.key().len() as u64;
    change.entry().map_or(key_bytes, Entry::weight) + size_of::<Change>() as u64
}

impl Recent {
    /// Notes committed writes, and evicts the oldest changes beyond the limits.
    pub(crate) fn note(&mut self, writes: &[Write], bytes_max: u64) {
        if let Some(start) = self.starts.back_mut().filter(|it| it.next.is_none()) {
            let last = start.last;
            // The removal of a hidden key has no version.
            start.next = writes.iter().map(Write::version).find(|it| *it > last);
        }
        for write in writes.iter().filter(|it| !it.hidden) {
            let version = write.version();
            match self.changes.back() {
                // A record that is applied a second time.
                Some(last) if version <= last.version() => continue,
                // The first record after a snapshot is from the time at which the snapshot began.
                None if version <= self.known_after => self.known_after = before(version),
                _ => {}
            }
            self.bytes += weight(&write.change);
            self.changes.push_back(write.change.clone());
        }
        while self.bytes > bytes_max || self.changes.len() > limits::RECENT_CHANGES_MAX {
            let Some(oldest) = self.changes.pop_front() else {
                break;
            };
            self.bytes -= weight(&oldest);
            self.known_after = self.known_after.max(oldest.version());
        }
    }

    /// Loads the changes that this many new ones will evict. Has no other effect.
    pub(super) fn prefetch(&self, count: usize) {
        for change in self.changes.iter().take(count) {
            black_box(change.version());
        }
    }

    /// Forgets everything up to this version.
    pub(crate) fn begin_after(&mut self, version: Stamp) {
        *self = Self {
            known_after: version,
            ..Self::default()
        };
    }

    /// Notes that a run started when this was the last version.
    pub(crate) fn note_start(&mut self, last: Stamp) {
        if let Some(start) = self.starts.back_mut() {
            start.next.get_or_insert(last);
        }
        self.starts.push_back(Start { last, next: None });
        if self.starts.len() > limits::RECENT_STARTS_MAX {
            self.starts.pop_front();
            let first = self.starts.front().map(|it| it.last);
            self.known_after = self.known_after.max(first.unwrap_or_default());
        }
    }

    /// The changes after a version, in order; `None` if some of them may be unknown.
    pub fn since(&self, version: Stamp) -> Option<impl Iterator<Item = &Change>> {
        let is_lost = |it: &Start| it.last < version && it.next.is_none_or(|next| version < next);
        if version < self.known_after || self.starts.iter().any(is_lost) {
            return None;
        }
        let next = self.changes.partition_point(|it| it.version() <= version);
        Some(self.changes.range(next..))
    }

    /// The version of the last change: later changes are [`since`](Self::since) it.
    pub fn last(&self) -> Stamp {
        (self.changes.back()).map_or(self.known_after, Change::version)
    }
}

/// The greatest version below this one.
fn before(version: Stamp) -> Stamp {
    match version.counter.checked_sub(1) {
        Some(counter) => Stamp { counter, ..version },
        None => Stamp {
            wall: version.wall.saturating_sub(1),
            counter: u32::MAX,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Key;

    fn at(wall: u64) -> Stamp {
        Stamp { wall, counter: 0 }
    }

    fn removal(wall: u64) -> Write {
        Write::of(Change::Deleted(Key::from_static(b"k"), at(wall)))
    }

    fn hidden(wall: u64) -> Write {
        Write {
            hidden: true,
            ..removal(wall)
        }
    }

    fn walls(recent: &Recent, since: u64) -> Option<Vec<u64>> {
        let changes = recent.since(at(since))?;
        Some(changes.map(|it| it.version().wall).collect())
    }

    #[test]
    fn changes_since_a_version_are_all_or_unknown() {
        let mut recent = Recent::default();
        assert_eq!(walls(&recent, 0), Some(vec![]));
        for wall in 1..=4 {
            recent.note(&[removal(wall)], 3 * weight(&removal(1).change));
        }
        assert_eq!(walls(&recent, 0), None, "the first change was evicted");
        assert_eq!(walls(&recent, 1), Some(vec![2, 3, 4]));
        assert_eq!(walls(&recent, 3), Some(vec![4]));
        assert_eq!(walls(&recent, 4), Some(vec![]));
        recent.note(&[hidden(5), removal(4)], u64::MAX);
        let known = walls(&recent, 1);
        assert_eq!(known, Some(vec![2, 3, 4]), "neither is a new change");
    }

    #[test]
    fn count_is_limited() {
        let mut recent = Recent::default();
        let count = limits::RECENT_CHANGES_MAX as u64;
        for wall in 1..=count + 1 {
            recent.note(&[removal(wall)], u64::MAX);
        }
        assert_eq!(walls(&recent, 0), None);
        assert_eq!(walls(&recent, 1).map(|it| it.len() as u64), Some(count));
    }

    /// A snapshot is taken while records are written, so the first records are older than its end.
    #[test]
    fn records_since_the_beginning_of_a_snapshot_count() {
        let mut recent = Recent::default();
        recent.begin_after(at(9));
        assert_eq!((walls(&recent, 8), walls(&recent, 9)), (None, Some(vec![])));
        recent.note(&[removal(7), removal(8), removal(11)], u64::MAX);
        assert_eq!(walls(&recent, 5), None);
        assert_eq!(walls(&recent, 7), Some(vec![8, 11]));
        assert_eq!(walls(&recent, 9), Some(vec![11]));
    }

    /// Regression: after a start, the version of the last evicted change counted as lost. So no
    /// watch could be resumed after a change that is larger than the limit.
    #[test]
    fn changes_since_the_last_evicted_one_are_known() {
        let mut recent = Recent::default();
        recent.note_start(at(0));
        recent.note(&[removal(1)], 0);
        assert_eq!(recent.last(), at(1));
        assert_eq!((walls(&recent, 0), walls(&recent, 1)), (None, Some(vec![])));
        recent.note(&[removal(2)], u64::MAX);
        assert_eq!(walls(&recent, 1), Some(vec![2]));
    }

    /// Regression: without a later visible change, the versions of hidden keys counted as lost.
    #[test]
    fn changes_since_a_hidden_write_are_known() {
        let mut recent = Recent::default();
        recent.note_start(at(0));
        // The removal of a hidden key has no version.
        recent.note(&[hidden(0), hidden(2), hidden(4)], u64::MAX);
        assert_eq!((walls(&recent, 1), walls(&recent, 2)), (None, Some(vec![])));
        recent.note_start(at(4));
        recent.note(&[removal(6)], u64::MAX);
        assert_eq!(walls(&recent, 3), Some(vec![6]));
        assert_eq!(walls(&recent, 4), Some(vec![6]));
        assert_eq!(walls(&recent, 5), None);
    }

    #[test]
    fn version_that_was_lost_is_unknown() {
        let mut recent = Recent::default();
        recent.note(&[removal(1), removal(2)], u64::MAX);
        recent.note_start(at(2));
        assert_eq!(walls(&recent, 2), Some(vec![]));
        let assigned = walls(&recent, 3);
        assert_eq!(assigned, None, "assigned by the earlier run and lost");
        recent.note_start(at(4));
        assert_eq!(walls(&recent, 3), None, "skipped by the start");
        assert_eq!(walls(&recent, 4), Some(vec![]));
        recent.note(&[removal(5), removal(6)], u64::MAX);
        assert_eq!(walls(&recent, 3), None);
        assert_eq!(walls(&recent, 1), Some(vec![2, 5, 6]));
        assert_eq!(walls(&recent, 2), Some(vec![5, 6]));
        assert_eq!(walls(&recent, 5), Some(vec![6]));
        for start in 0..limits::RECENT_STARTS_MAX as u64 {
            recent.note_start(at(6 + start));
        }
        assert_eq!(walls(&recent, 2), None, "the oldest start is forgotten");
    }
}
