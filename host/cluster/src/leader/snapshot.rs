//! The leader's snapshots: when one is due, its pieces, and the truncation after it.
//!
//! A snapshot is a sequence of blocks (len u32 | block), cut into pieces of equal size. Its blocks
//! are captured at different times and may contain records that are not yet committed. So the head
//! must not name a snapshot before the last record that it can contain is committed.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use statehouse_protocol::LogPosition;

use super::log::LeaderLog;
use crate::embedder::Embedder;
use crate::engine::KeyRange;
use crate::head::{Head, SnapshotInfo};
use crate::host::Host;
use crate::limits;

/// The snapshots of one leadership.
#[derive(Debug)]
pub(super) struct Snapshots {
    /// Bytes of frames since the last snapshot began.
    log_bytes: u64,
    running: Option<Running>,
    /// The earliest time of the next piece, or of the next snapshot after a failure.
    next_at: Duration,
}

#[derive(Debug)]
struct Running {
    info: SnapshotInfo,
    hasher: blake3::Hasher,
    /// Blocks that are not yet in a piece.
    buffer: BytesMut,
    /// The last record that the blocks can contain. `None` until the last block is captured.
    complete: Option<LogPosition>,
    /// Bytes of frames since the snapshot began.
    log_bytes: u64,
}

/// A piece of a snapshot and its key.
pub(super) type Piece = (Vec<u8>, Bytes);

impl Snapshots {
    pub(super) fn new(log_bytes: u64) -> Self {
        Self {
            log_bytes,
            running: None,
            next_at: Duration::ZERO,
        }
    }

    /// Bytes of frames since the last snapshot began.
    pub(super) fn log_bytes(&self) -> u64 {
        self.log_bytes
    }

    /// A frame was committed.
    pub(super) fn frame(&mut self, bytes: u64) {
        self.log_bytes += bytes;
        if let Some(running) = &mut self.running {
            running.log_bytes += bytes;
        }
    }

    /// Begins a snapshot if one is due. `appended` must have been read before this call.
    pub(super) fn begin_if_due(
        &mut self,
        host: &Host,
        head: &Head,
        log: &LeaderLog,
        appended: LogPosition,
        embedder: &mut dyn Embedder,
    ) {
        let last_bytes = head.snapshot.map_or(0, |it| it.bytes);
        let after_bytes = host.options.sizes.snapshot_after_bytes;
        let due = if log.has_room() {
            after_bytes.max(2 * last_bytes)
        } else {
            // The log before a snapshot can be deleted, so an early snapshot makes room.
            last_bytes.max(after_bytes.min(log.room_bytes()) / limits::SHORT_LOG_DIVISOR)
        };
        if self.running.is_some() || self.log_bytes < due || host.now() < self.next_at {
            return;
        }
        embedder.begin_snapshot();
        self.running = Some(Running {
            info: SnapshotInfo {
                id: head.seq,
                first_seq: head.seq + 1,
                first_position: LogPosition(appended.0 + 1),
                previous: head.chain,
                pieces: 0,
                bytes: 0,
                hash: [0; 32],
            },
            hasher: blake3::Hasher::new(),
            buffer: BytesMut::new(),
            complete: None,
            log_bytes: 0,
        });
    }

    /// The next piece, if its time has come. `appended` is called after the last capture.
    pub(super) fn piece(
        &mut self,
        host: &Host,
        appended: impl Fn() -> LogPosition,
        embedder: &mut dyn Embedder,
    ) -> Option<Piece> {
        let running = self.running.as_mut()?;
        if host.now() < self.next_at {
            return None;
        }
        let filled = running.fill(host.options.sizes.piece_bytes, embedder);
        match filled {
            Ok(true) => {}
            Ok(false) if running.complete.is_some() => {}
            Ok(false) => running.complete = Some(appended()),
            Err(message) => {
                tracing::warn!("the snapshot was cancelled: {message}");
                self.running = None;
                self.next_at = host.now() + host.options.timing.status;
                return None;
            }
        }
        if running.buffer.is_empty() {
            return None;
        }
        self.next_at = host.now() + host.options.timing.piece;
        let bytes = running.buffer.len().min(host.options.sizes.piece_bytes);
        // A block can have many pieces, so the rest must not be copied for each.
        let piece = running.buffer.split_to(bytes).freeze();
        running.hasher.update(&piece);
        let info = &mut running.info;
        let key = host.keys.piece(info.id, info.pieces);
        info.pieces += 1;
        info.bytes += piece.len() as u64;
        Some((key, piece))
    }

    /// The snapshot that the head may name, if all of its pieces and records are committed.
    pub(super) fn complete(&mut self, committed: LogPosition) -> Option<SnapshotInfo> {
        let running = self.running.as_ref()?;
        if !running.buffer.is_empty() || running.complete? > committed {
            return None;
        }
        let running = self.running.take()?;
        self.log_bytes = running.log_bytes;
        Some(SnapshotInfo {
            hash: *running.hasher.finalize().as_bytes(),
            ..running.info
        })
    }

    /// When the next piece is due.
    pub(super) fn next_at(&self) -> Option<Duration> {
        let running = self.running.as_ref()?;
        let is_cut = running.buffer.is_empty() && running.complete.is_some();
        (!is_cut).then_some(self.next_at)
    }
}

impl Running {
    /// Captures blocks until a piece is full. Returns false after the last block.
    fn fill(&mut self, piece_bytes: usize, embedder: &mut dyn Embedder) -> Result<bool, String> {
        if self.info.pieces >= limits::SNAPSHOT_PIECES_MAX {
            return Err("it has too many pieces: the state is larger than the engine".into());
        }
        let mut block = Vec::new();
        while self.buffer.len() < piece_bytes && self.complete.is_none() {
            block.clear();
            if !embedder.next_block(&mut block)? {
                return Ok(false);
            }
            if block.len() > limits::BLOCK_BYTES_MAX {
                return Err(format!("a block has {} bytes", block.len()));
            }
            self.buffer
                .extend_from_slice(&(block.len() as u32).to_le_bytes());
            self.buffer.extend_from_slice(&block);
        }
        Ok(self.complete.is_none())
    }
}

/// What a truncation step deletes: frames that the snapshot replaced, and all older snapshots.
/// Changes `head` accordingly. Any leader can continue the truncation from the head alone.
pub(super) fn truncate(host: &Host, head: &mut Head) -> Vec<KeyRange> {
    let Some(snapshot) = head.snapshot else {
        return Vec::new();
    };
    if head.oldest >= snapshot.first_seq {
        return Vec::new();
    }
    let to = snapshot
        .first_seq
        .min(head.oldest + limits::TRUNCATED_FRAMES_MAX);
    let frames = host.keys.frames(head.oldest, to);
    head.oldest = to;
    vec![frames, host.keys.snapshots(0, snapshot.id)]
}
