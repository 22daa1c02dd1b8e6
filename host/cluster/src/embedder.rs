//! The interface to the store that uses the log.

use std::sync::Arc;
use std::time::Duration;

use statehouse_protocol::LogPosition;

use crate::head::Head;
use crate::leader::LeaderLog;
use crate::presence::Description;

/// The store behind the log. All calls come from [`crate::Member::run`], one at a time.
///
/// A follower receives the blocks of a snapshot and all records after it, in order. Every error
/// text of a method ends [`crate::Member::run`].
pub trait Embedder: Send {
    /// The time in milliseconds since 1970: that of the store while this host leads, otherwise the
    /// wall clock or the time of the state, if that is later. Called for each change of the head.
    fn now_ms(&self) -> u64;

    /// Discards the whole state: the log is read from a snapshot or from its beginning again.
    fn reset(&mut self);
    /// Applies a block of a snapshot. Fails if the block cannot be decoded.
    fn block(&mut self, block: &[u8]) -> Result<(), String>;
    /// Applies a record. Fails if the record cannot be decoded.
    fn record(&mut self, position: LogPosition, record: &[u8]) -> Result<(), String>;
    /// This host follows the leader that the head names. Called after a join and after each change
    /// of the leader.
    fn following(&mut self, _head: &Head) {}

    /// What operators should know of this host. Called when its role changes and after
    /// [`crate::Member::describe_again`].
    fn describe(&mut self) -> Description {
        Description::default()
    }

    /// Whether this host may become leader: its wall clock is close to `head.now_ms`, and it has
    /// every policy. Fails with the reason, for the operator; the host continues to follow.
    fn may_lead(&mut self, head: &Head) -> Result<(), String>;
    /// The first record of a leadership. If this host becomes leader, [`Self::record`] receives it
    /// before [`Self::leading`].
    fn opening(&mut self, epoch: u64) -> Vec<u8>;
    /// This host is the leader. It may append at once and accept connections, and must ask
    /// [`LeaderLog::has_lease`] or [`LeaderLog::may_decide`] after it read the bytes of a client
    /// and before it decides them.
    fn leading(&mut self, takeover: Takeover);
    /// All records up to `position` are committed. Called while this host leads; may take locks
    /// that callers hold while they append.
    fn released(&mut self, position: LogPosition);
    /// This host is no longer the leader. The state of the store may be ahead of the log, so it
    /// must be discarded with everything that waits for a position; [`Self::reset`] follows. What
    /// was released may still be sent.
    fn ended(&mut self, ended: Ended);

    /// The size of a snapshot of the present state, in bytes. Growth is refused before such a
    /// snapshot does not fit the engine. Called often, so it must be cheap.
    fn snapshot_bytes(&self) -> u64;
    /// Begins a snapshot. The blocks that follow must be captured from now on.
    fn begin_snapshot(&mut self);
    /// Fills `block`, which is empty, and returns true; or returns false after the last block. An
    /// error cancels the snapshot; the log continues without it.
    fn next_block(&mut self, block: &mut Vec<u8>) -> Result<bool, String>;
}

/// The beginning of a leadership.
#[derive(Clone, Debug)]
pub struct Takeover {
    /// The log of this leadership.
    pub log: Arc<LeaderLog>,
    /// The last head of the previous leader. The clock of the store must continue at the wall clock
    /// or at `previous.now_ms + since`, if that is later. Otherwise clients would read an earlier
    /// time than before.
    pub previous: Head,
    /// The time since this host saw the last change by the previous leader.
    pub since: Duration,
}

/// Why a leadership ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Another host took over.
    Deposed,
    /// This host handed over, by [`LeaderLog::hand_over`].
    HandedOver,
}
