//! The place of a copy, as the copy uses it.

use std::time::Duration;

use statehouse_protocol::LogPosition;

use crate::cursor::LogPoint;
use crate::error::Stop;
use crate::head::SnapshotInfo;
use crate::pieces::Differs;

/// Where a copy is kept. Methods may block.
pub trait CopyStore: Send + 'static {
    /// Begins a copy without the records up to `after`. A copy that is in use stays so until the
    /// new one is complete: at once if `after` is no record, else after its first snapshot.
    /// [`CopyError::Store`] ends the copy, as for all methods.
    fn begin(&mut self, after: LogPosition) -> Result<(), CopyError>;
    /// Adds the records from this position on, all of them or none. Records that the store holds
    /// already may be passed again. Fails with [`Stop::CopyIsAhead`] if the store holds another
    /// record at a position.
    fn records(&mut self, first: LogPosition, records: &[&[u8]]) -> Result<(), CopyError>;
    /// Begins a snapshot. Its blocks follow. `now_ms` is approximately the store's time at which
    /// the snapshot begins, in milliseconds since 1970, or 0 if that is not known.
    fn begin_snapshot(&mut self, snapshot: &SnapshotInfo, now_ms: u64) -> Result<(), CopyError>;
    /// Adds a block of the snapshot.
    fn block(&mut self, block: &[u8]) -> Result<(), CopyError>;
    /// Ends the snapshot. Its blocks contain effects of no record after `complete`, which the store
    /// has.
    fn end_snapshot(&mut self, complete: LogPosition, point: LogPoint) -> Result<(), CopyError>;
    /// Discards the snapshot that was begun.
    fn cancel_snapshot(&mut self);
    /// All new records were passed; `point` is behind them. Returns after which time the store
    /// wants to be called again, even if nothing happens.
    fn flush(&mut self, point: Option<LogPoint>) -> Result<Duration, CopyError>;
    /// The host stops.
    fn close(&mut self, point: Option<LogPoint>) -> Result<(), CopyError>;
}

/// Why a copy ended.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The copy is not a part of the log. It starts over.
    #[error("{0}")]
    Differs(&'static str),
    /// The copy cannot be kept.
    #[error("{0}")]
    Store(String),
    /// A later version of this program wrote the copy. It was not changed.
    #[error("{0}")]
    LaterVersion(String),
    /// The log cannot be read.
    #[error(transparent)]
    Log(#[from] Stop),
}

impl From<Differs> for CopyError {
    fn from(Differs(what): Differs) -> Self {
        Self::Differs(what)
    }
}

/// Where an earlier copy ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resumed {
    /// The place to read on.
    pub point: LogPoint,
    /// The last record that the store holds, at or after that place.
    pub end: LogPosition,
    /// The position of the newest snapshot in the store.
    pub snapshot: LogPosition,
}
