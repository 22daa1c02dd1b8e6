//! The leader's snapshots: when one is due, its pieces, and the truncation after it.
//!
//! The blocks of a snapshot are captured at different times and may contain records that are not
//! yet committed. So the head must not name a snapshot before the last record that it can contain
//! is committed.

use std::time::Duration;

use bytes::Bytes;
use statehouse_protocol::LogPosition;

use super::log::LeaderLog;
use crate::embedder::Embedder;
use crate::engine::KeyRange;
use crate::head::{Head, SnapshotInfo};
use crate::host::Host;
use crate::limits;
use crate::pieces::Cutter;

#[derive(Debug, Default)]
pub(super) struct Snapshots {
    /// Bytes of frames since the last snapshot began.
    log_bytes: u64,
    running: Option<Running>,
    /// The earliest time of the next piece, or of the next snapshot after a failure.
    next_at: Duration,
    /// When the state was measured, and the bytes of frames since.
    measured: Option<(Duration, u64)>,
    /// Whether the engine may hold pieces of a snapshot that will never be complete.
    has_leftovers: bool,
}

#[derive(Debug)]
struct Running {
    info: SnapshotInfo,
    cutter: Cutter,
    /// Bytes of the snapshot and the frames before it.
    replaced_bytes: u64,
    /// The last record that the blocks can contain. `None` until the last block is captured.
    complete: Option<LogPosition>,
    /// Bytes of frames since the snapshot began.
    log_bytes: u64,
}

pub(super) type Piece = (Vec<u8>, Bytes);

impl Snapshots {
    pub(super) fn new(log_bytes: u64) -> Self {
        Self {
            log_bytes,
            has_leftovers: true,
            ..Self::default()
        }
    }

    /// Bytes of frames since the last snapshot began.
    pub(super) fn log_bytes(&self) -> u64 {
        self.log_bytes
    }

    /// A frame was committed.
    pub(super) fn frame(&mut self, bytes: u64) {
        self.log_bytes += bytes;
        if let Some((_, since)) = &mut self.measured {
            *since += bytes;
        }
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
        let (last_bytes, space) = (head.snapshot.map_or(0, |it| it.bytes), log.space());
        let after_bytes = host.options.sizes.snapshot_after_bytes;
        let due = if space.is_tight() {
            // The log before a snapshot can be deleted, so an early snapshot makes room.
            let after_bytes = after_bytes.min(space.quota_bytes());
            (last_bytes / limits::SHORT_LOG_SNAPSHOT_DIVISOR)
                .max(after_bytes / limits::SHORT_LOG_DIVISOR)
        } else {
            after_bytes.max(2 * last_bytes)
        };
        if self.running.is_some() || self.log_bytes < due || host.now() < self.next_at {
            return;
        }
        self.measure(host, log, embedder);
        if !space.fits_snapshot() {
            tracing::warn!(
                "no snapshot begins, because it would not fit etcd's quota: remove keys, or raise etcd's --quota-backend-bytes"
            );
            self.next_at = host.now() + host.options.timing.status;
            return;
        }
        embedder.begin_snapshot();
        self.running = Some(Running {
            info: SnapshotInfo::begun(head, appended),
            cutter: Cutter::default(),
            replaced_bytes: last_bytes + self.log_bytes,
            complete: None,
            log_bytes: 0,
        });
    }

    /// Estimates what the engine must still take before the next snapshot is complete, if that may
    /// have changed much since the last time.
    pub(super) fn measure_if_due(&mut self, host: &Host, log: &LeaderLog, embedder: &dyn Embedder) {
        let is_due = self.measured.is_none_or(|(at, since)| {
            since >= log.space().quota_bytes() / limits::MEASURED_QUOTA_PART
                || host.now().saturating_sub(at) >= host.options.timing.poll
        });
        if is_due {
            self.measure(host, log, embedder);
        }
    }

    fn measure(&mut self, host: &Host, log: &LeaderLog, embedder: &dyn Embedder) {
        let rest = match &self.running {
            Some(it) if it.complete.is_some() => it.cutter.rest() as u64,
            Some(it) => embedder.snapshot_bytes().saturating_sub(it.info.bytes),
            None => embedder.snapshot_bytes(),
        };
        log.space().needs(rest);
        self.measured = Some((host.now(), 0));
    }

    /// Cancels a snapshot whose rest does not fit the engine any more.
    pub(super) fn cancel_if_too_large(&mut self, host: &Host, log: &LeaderLog) {
        if self.running.is_some() && !log.space().fits_rest() {
            self.cancel(host, log, "it does not fit etcd's quota any more");
        }
    }

    fn cancel(&mut self, host: &Host, log: &LeaderLog, why: &str) {
        log.makes_no_room();
        tracing::warn!("the snapshot was cancelled: {why}");
        self.running = None;
        self.has_leftovers = true;
        self.next_at = host.now() + host.options.timing.status;
    }

    /// Whether there may be pieces that the next change of the head should delete.
    pub(super) fn has_leftovers(&self) -> bool {
        self.has_leftovers
    }

    /// The pieces that no head will ever name: those behind the newest named snapshot, except those
    /// of the running one. `head` must be the next one, because it may name a snapshot. No leader
    /// can need these pieces: each later change of the head by an earlier leader fails.
    pub(super) fn leftovers(&mut self, host: &Host, head: &Head) -> Option<KeyRange> {
        if !std::mem::take(&mut self.has_leftovers) {
            return None;
        }
        let from = head.snapshot.map_or(0, |it| it.id + 1);
        let running = self.running.as_ref().map(|it| it.info.id);
        Some(
            host.keys
                .snapshots(from, running.unwrap_or(head.seq + 1).max(from)),
        )
    }

    /// The next piece, if its time has come. With little room, that is at once: meanwhile the log
    /// grows.
    pub(super) fn piece(
        &mut self,
        host: &Host,
        log: &LeaderLog,
        embedder: &mut dyn Embedder,
    ) -> Option<Piece> {
        let running = self.running.as_mut()?;
        if host.now() < self.next_at {
            return None;
        }
        let piece_bytes = host.options.sizes.piece_bytes;
        if let Err(message) = running.fill(piece_bytes, embedder) {
            self.cancel(host, log, &message);
            return None;
        }
        if running.cutter.is_complete() {
            running.complete.get_or_insert_with(|| log.appended());
        }
        let piece = running.cutter.cut(piece_bytes)?;
        log.makes_room(running.replaced_bytes);
        let pause = match log.space().is_tight() {
            true => Duration::ZERO,
            false => host.options.timing.piece,
        };
        self.next_at = host.now() + pause;
        let info = &mut running.info;
        let key = host.keys.piece(info.id, info.pieces);
        info.pieces += 1;
        info.bytes += piece.len() as u64;
        // The rest is shorter.
        self.measured = None;
        Some((key, piece))
    }

    /// The snapshot that the head may name, if all of its pieces and records are committed.
    pub(super) fn complete(&mut self, committed: LogPosition) -> Option<SnapshotInfo> {
        let running = self.running.as_ref()?;
        if running.cutter.rest() > 0 || running.complete? > committed {
            return None;
        }
        let running = self.running.take()?;
        self.log_bytes = running.log_bytes;
        self.measured = None;
        Some(SnapshotInfo {
            hash: running.cutter.hash(),
            ..running.info
        })
    }

    pub(super) fn next_at(&self) -> Option<Duration> {
        let running = self.running.as_ref()?;
        let is_cut = running.cutter.rest() == 0 && running.complete.is_some();
        (!is_cut).then_some(self.next_at)
    }
}

impl Running {
    fn fill(&mut self, piece_bytes: usize, embedder: &mut dyn Embedder) -> Result<(), String> {
        if self.info.pieces >= limits::SNAPSHOT_PIECES_MAX {
            return Err("it has too many pieces: the state is larger than etcd".into());
        }
        self.cutter
            .fill(piece_bytes, |block| embedder.next_block(block))
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
