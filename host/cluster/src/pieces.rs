//! The pieces of a snapshot: a sequence of blocks (len u32 | block), cut into pieces of equal size.
//! A reader checks their order and their hash.

use bytes::{Bytes, BytesMut};

use crate::head::SnapshotInfo;
use crate::host::Host;
use crate::limits;

/// A snapshot that is being written.
#[derive(Debug, Default)]
pub(crate) struct Cutter {
    hasher: blake3::Hasher,
    /// Blocks that are not yet in a piece.
    buffer: BytesMut,
    /// Whether the last block was captured.
    is_complete: bool,
}

impl Cutter {
    /// Captures blocks until a piece is full. `next_block` fills an empty vector and returns true,
    /// or returns false after the last block.
    pub(crate) fn fill(
        &mut self,
        piece_bytes: usize,
        mut next_block: impl FnMut(&mut Vec<u8>) -> Result<bool, String>,
    ) -> Result<(), String> {
        let mut block = Vec::new();
        while self.buffer.len() < piece_bytes && !self.is_complete {
            block.clear();
            if !next_block(&mut block)? {
                self.is_complete = true;
                break;
            }
            if block.len() > limits::BLOCK_BYTES_MAX {
                return Err(format!(
                    "a block has {} bytes, but the limit is {}: the state cannot be copied",
                    block.len(),
                    limits::BLOCK_BYTES_MAX
                ));
            }
            let len = block.len() as u32;
            self.buffer.extend_from_slice(&len.to_le_bytes());
            self.buffer.extend_from_slice(&block);
        }
        Ok(())
    }

    /// The next piece, if there are bytes for it. A block can have many pieces, so the rest is not
    /// copied for each.
    pub(crate) fn cut(&mut self, piece_bytes: usize) -> Option<Bytes> {
        if self.buffer.is_empty() {
            return None;
        }
        let bytes = self.buffer.len().min(piece_bytes);
        let piece = self.buffer.split_to(bytes).freeze();
        self.hasher.update(&piece);
        Some(piece)
    }

    /// Bytes of blocks that are not yet in a piece.
    pub(crate) fn rest(&self) -> usize {
        self.buffer.len()
    }

    /// Whether the last block was captured.
    pub(crate) fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// The hash of all pieces so far.
    pub(crate) fn hash(&self) -> [u8; 32] {
        *self.hasher.finalize().as_bytes()
    }
}

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
