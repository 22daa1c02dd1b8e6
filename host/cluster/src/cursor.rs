//! The end of what was read of the log. Every reader of the log accepts frames by it.

use statehouse_protocol::LogPosition;

use crate::codec::Malformed;
use crate::error::Stop;
use crate::frame::{self, Assembler, Frame, Kind};
use crate::head::{Chain, Head, Id, SnapshotInfo};

/// A place between two groups of records, from which the log can be read on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogPoint {
    /// The last frame before this place.
    pub seq: u64,
    /// The chain after that frame.
    pub chain: Chain,
    /// The last record before this place.
    pub position: LogPosition,
}

/// The last frame and the last record that were read.
#[derive(Debug, Default)]
pub(crate) struct Cursor {
    pub(crate) seq: u64,
    pub(crate) chain: Chain,
    pub(crate) position: LogPosition,
    assembler: Assembler,
    /// Whether the last frame was a part of a group that other parts must complete.
    within_group: bool,
    /// The leader's time when it wrote the last frame, in milliseconds since 1970.
    pub(crate) now_ms: u64,
    /// Accepts every frame. Only a test does so, to prove that the simulation finds the fault.
    pub(crate) trusts_reads: bool,
}

/// What became of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Accepted {
    Applied,
    /// It was applied before.
    Known,
    /// Frames before it are missing, or it does not continue the log.
    Mismatch,
}

impl Cursor {
    /// Continues at a place that was read before.
    pub(crate) fn at(point: LogPoint) -> Self {
        Self {
            seq: point.seq,
            chain: point.chain,
            position: point.position,
            ..Self::default()
        }
    }

    /// Begins with the first frame that a reader of this snapshot needs, or with the first frame of
    /// the cluster.
    pub(crate) fn after(snapshot: Option<&SnapshotInfo>, cluster: Id) -> Self {
        Self::at(match snapshot {
            Some(it) => LogPoint {
                seq: it.first_seq - 1,
                chain: it.previous,
                position: it.begins_after(),
            },
            None => LogPoint {
                seq: 0,
                chain: Head::first(cluster, 0).chain,
                position: LogPosition::NONE,
            },
        })
    }

    /// The end of what was read. `None` within a group in parts.
    pub(crate) fn point(&self) -> Option<LogPoint> {
        (!self.within_group).then_some(LogPoint {
            seq: self.seq,
            chain: self.chain,
            position: self.position,
        })
    }

    /// Accepts a frame if it continues the log. Passes its records, and the position of the first
    /// one, to `sink`: whole groups, without the records that were read before.
    pub(crate) fn accept<E: From<Stop>>(
        &mut self,
        bytes: &[u8],
        sink: impl FnOnce(LogPosition, &[&[u8]]) -> Result<(), E>,
    ) -> Result<Accepted, E> {
        let frame = match Frame::decode(bytes) {
            Ok(frame) => frame,
            Err(Malformed::Damaged(_)) => return Ok(Accepted::Mismatch),
            Err(format) => return Err(Stop::Head(format).into()),
        };
        if !self.trusts_reads {
            if frame.seq <= self.seq {
                return Ok(Accepted::Known);
            }
            if frame.seq != self.seq + 1 || frame.previous != self.chain {
                return Ok(Accepted::Mismatch);
            }
        }
        self.seq = frame.seq;
        self.chain = frame::chain(bytes);
        self.within_group = frame.kind == Kind::Part;
        self.now_ms = frame.now_ms;
        self.records(&frame, sink)?;
        Ok(Accepted::Applied)
    }

    /// Passes on the records of a frame that follow the last one.
    fn records<E: From<Stop>>(
        &mut self,
        frame: &Frame<'_>,
        sink: impl FnOnce(LogPosition, &[&[u8]]) -> Result<(), E>,
    ) -> Result<(), E> {
        let damaged = |it: Malformed| Stop::Damaged(format!("frame {}: {it}", frame.seq));
        let Some(body) = self.assembler.accept(frame).map_err(damaged)? else {
            return Ok(());
        };
        let records = frame::records(body, frame.count).map_err(damaged)?;
        // A snapshot can contain the first records of the frame that follows it.
        let known = (self.position.0 + 1).saturating_sub(frame.first.0);
        let new = usize::try_from(known)
            .map_or(&[][..], |known| records.get(known..).unwrap_or_default());
        if new.is_empty() {
            return Ok(());
        }
        let first = frame.first.0 + known;
        if first != self.position.0 + 1 && !self.trusts_reads {
            let missing = Malformed::Damaged("records before it are missing");
            return Err(damaged(missing).into());
        }
        self.position = LogPosition(first + new.len() as u64 - 1);
        sink(LogPosition(first), new)
    }
}
