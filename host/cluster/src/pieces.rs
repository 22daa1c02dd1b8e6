//! Reads the pieces of a snapshot: checks their order and their hash, and splits them into blocks.

use bytes::Bytes;

use crate::engine::{EngineError, Paging, Revision};
use crate::head::SnapshotInfo;
use crate::host::Host;
use crate::limits;

/// A snapshot that is being read.
#[derive(Debug)]
pub(crate) struct Pieces {
    pub(crate) info: SnapshotInfo,
    /// The number of the next piece.
    next: u32,
    hasher: blake3::Hasher,
    /// Bytes that are not yet a whole block.
    buffer: Vec<u8>,
}

/// Why the pieces are not the snapshot that the head names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Differs(pub(crate) &'static str);

impl Pieces {
    pub(crate) fn new(info: SnapshotInfo) -> Self {
        Self {
            info,
            next: 0,
            hasher: blake3::Hasher::new(),
            buffer: Vec::new(),
        }
    }

    /// The number of the next piece.
    pub(crate) fn next(&self) -> u32 {
        self.next
    }

    /// Whether all pieces were accepted.
    pub(crate) fn is_complete(&self) -> bool {
        self.next >= self.info.pieces
    }

    /// Accepts the next pieces, with their keys, and passes their blocks to `sink`.
    pub(crate) fn accept<E: From<Differs>>(
        &mut self,
        host: &Host,
        values: &[(Vec<u8>, Bytes)],
        mut sink: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        if values.is_empty() {
            return Err(Differs("a piece of the snapshot is missing").into());
        }
        for (key, piece) in values {
            if self.is_complete() {
                break;
            }
            if *key != host.keys.piece(self.info.id, self.next) {
                return Err(Differs("a piece of the snapshot is missing").into());
            }
            self.hasher.update(piece);
            self.blocks(piece, &mut sink)?;
            self.next += 1;
        }
        let is_wrong =
            || !self.buffer.is_empty() || *self.hasher.finalize().as_bytes() != self.info.hash;
        if self.is_complete() && is_wrong() {
            return Err(Differs("the snapshot differs from its hash").into());
        }
        Ok(())
    }

    fn blocks<E: From<Differs>>(
        &mut self,
        piece: &[u8],
        sink: &mut impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.buffer.extend_from_slice(piece);
        let mut rest = &self.buffer[..];
        while let Some((len, after)) = rest.split_first_chunk::<4>() {
            let len = u32::from_le_bytes(*len) as usize;
            if len > limits::BLOCK_BYTES_MAX {
                return Err(Differs("a block of the snapshot is too long").into());
            }
            let Some((block, after)) = after.split_at_checked(len) else {
                break;
            };
            sink(block)?;
            rest = after;
        }
        let consumed = self.buffer.len() - rest.len();
        self.buffer.drain(..consumed);
        Ok(())
    }
}

/// Reads the pieces of a snapshot from `next` on, as of a revision or now. `None` if a shorter page
/// should be tried.
pub(crate) async fn read(
    host: &Host,
    info: &SnapshotInfo,
    next: u32,
    at: Option<Revision>,
    paging: &mut Paging,
) -> Result<Option<Vec<(Vec<u8>, Bytes)>>, EngineError> {
    let range = host.keys.pieces_from(info.id, next);
    let page = host.read_page(&range, at, paging).await?;
    Ok(page.map(|it| it.values))
}
