//! The steps of a copy that may block.

use bytes::Bytes;
use statehouse_protocol::LogPosition;

use super::store::{CopyError, CopyStore};
use crate::cursor::{Accepted, Cursor};
use crate::head::{Head, Id, SnapshotInfo};
use crate::host::Host;
use crate::pieces::Pieces;

/// What threads that may block use.
#[derive(Debug)]
pub(super) struct Work<S> {
    pub(super) store: S,
    pub(super) cluster: Id,
    pub(super) cursor: Cursor,
    /// The position of the newest snapshot in the store.
    pub(super) copied: LogPosition,
    pub(super) snapshot: Option<Running>,
    /// Whether the store has a copy, complete or not.
    pub(super) has_begun: bool,
    /// Whether the store has no snapshot to begin with yet.
    pub(super) lacks_base: bool,
}

/// A snapshot that is being copied.
#[derive(Debug)]
pub(super) struct Running {
    pieces: Pieces,
    /// A position after which no effect can be in the snapshot.
    complete: LogPosition,
}

impl<S: CopyStore> Work<S> {
    /// Begins a copy with the newest snapshot of this head, which began at `now_ms`.
    pub(super) fn begin(&mut self, head: &Head, now_ms: u64) -> Result<(), CopyError> {
        self.cancel_snapshot();
        self.cursor = Cursor::after(head.snapshot.as_ref(), self.cluster);
        self.copied = LogPosition::NONE;
        self.store.begin(self.cursor.position)?;
        self.has_begun = true;
        if let Some(info) = head.snapshot {
            self.begin_snapshot(info, head.position, now_ms)?;
        }
        self.lacks_base = self.snapshot.is_some();
        Ok(())
    }

    /// Adds frames up to the first one that does not continue the copy. Returns the last frame.
    pub(super) fn frames(
        &mut self,
        frames: impl IntoIterator<Item = Bytes>,
    ) -> Result<u64, CopyError> {
        let store = &mut self.store;
        for frame in frames {
            let sink = |first, records: &[&[u8]]| store.records(first, records);
            if self.cursor.accept(&frame, sink)? == Accepted::Mismatch {
                break;
            }
        }
        Ok(self.cursor.seq)
    }

    /// Whether the store lacks this snapshot, and can begin to copy it.
    pub(super) fn wants(&self, info: &SnapshotInfo) -> bool {
        let position = info.begins_after();
        let is_new = position > self.copied && position <= self.cursor.position;
        is_new && self.snapshot.is_none()
    }

    /// Begins to copy the newest snapshot, if the store does not have it. The snapshot began at
    /// `now_ms`, and contains no effect of a record after `complete`.
    pub(super) fn begin_snapshot(
        &mut self,
        info: SnapshotInfo,
        complete: LogPosition,
        now_ms: u64,
    ) -> Result<(), CopyError> {
        if self.wants(&info) {
            self.store.begin_snapshot(&info, now_ms)?;
            self.snapshot = Some(Running {
                pieces: Pieces::new(info),
                complete,
            });
        }
        Ok(())
    }

    /// The snapshot that is being copied, and its next piece.
    pub(super) fn next_piece(&self) -> Option<(SnapshotInfo, u32)> {
        let running = self.snapshot.as_ref()?;
        let pieces = &running.pieces;
        (!pieces.is_complete()).then(|| (pieces.info, pieces.next()))
    }

    pub(super) fn pieces(
        &mut self,
        host: &Host,
        values: &[(Vec<u8>, Bytes)],
    ) -> Result<(), CopyError> {
        let store = &mut self.store;
        match &mut self.snapshot {
            Some(it) => it.pieces.accept(host, values, |block| store.block(block)),
            None => Ok(()),
        }
    }

    pub(super) fn cancel_snapshot(&mut self) {
        if self.snapshot.take().is_some() {
            self.store.cancel_snapshot();
        }
    }

    /// Ends the snapshot once it and the records that it can contain are copied.
    pub(super) fn end_snapshot(&mut self) -> Result<(), CopyError> {
        let (Some(running), Some(point)) = (&self.snapshot, self.cursor.point()) else {
            return Ok(());
        };
        if !running.pieces.is_complete() || self.cursor.position < running.complete {
            return Ok(());
        }
        self.store.end_snapshot(running.complete, point)?;
        self.copied = running.pieces.info.begins_after();
        self.snapshot = None;
        self.lacks_base = false;
        Ok(())
    }
}
