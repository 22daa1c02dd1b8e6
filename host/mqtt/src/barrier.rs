//! The barrier between a packet and the log: **no packet may leave before the record that it
//! depends on is durable**, or a crash could undo what a client has seen.
//!
//! A packet is marked with a batch of changes, because the log position of the batch is only known
//! after the append.

/// The number of a batch of changes, counted from the start of the process. The default is before
/// the first batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct BatchNumber(pub(crate) u64);

impl BatchNumber {
    pub(crate) fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// What must be durable before a packet may leave: nothing, or every batch up to one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Barrier(BatchNumber);

impl Barrier {
    /// The packet depends on no record.
    pub(crate) const NONE: Self = Self(BatchNumber(0));

    /// The packet depends on this batch.
    pub(crate) fn after(batch: BatchNumber) -> Self {
        Self(batch)
    }

    /// The barrier of a packet that depends on both.
    #[must_use]
    pub(crate) fn join(self, other: Self) -> Self {
        Self(self.0.max(other.0))
    }

    /// Whether the packet must wait while every batch up to `released` is durable.
    pub(crate) fn holds(self, released: BatchNumber) -> bool {
        self.0 > released
    }

    /// The batch that must be durable; the default for [`Self::NONE`].
    pub(crate) fn batch(self) -> BatchNumber {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn barrier_holds_until_its_last_batch_is_released() {
        let [first, second] = [1, 2].map(BatchNumber);
        assert_eq!(first.next(), second);
        let barrier = Barrier::after(second);
        assert!(barrier.holds(BatchNumber::default()) && barrier.holds(first));
        assert!(!barrier.holds(second) && !barrier.holds(second.next()));
        assert!(!Barrier::NONE.holds(BatchNumber::default()));
        for (one, other) in [(first, second), (second, first), (second, second)] {
            let joined = Barrier::after(one).join(Barrier::after(other));
            assert_eq!(joined, barrier, "{one:?} and {other:?}");
        }
        assert_eq!(Barrier::NONE.join(barrier), barrier);
        assert_eq!(barrier.join(Barrier::NONE), barrier);
    }
}
