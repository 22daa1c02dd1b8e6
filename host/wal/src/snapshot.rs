//! A snapshot: one file of opaque blocks that replaces all records up to a position.
//!
//! ```text
//! header 64
//! blocks: len u32 | crc32c u32 | bytes
//! footer: 0xFFFF_FFFF u32 | crc32c u32 | blocks u64 | bytes u64 | complete u64
//! ```
//!
//! A snapshot is fuzzy: it begins at the position in its header and ends at `complete` in its
//! footer, and each block was captured at some time in between. Recovery applies the records after
//! the beginning on top of the blocks. The result is consistent only from `complete` on.
//!
//! The number of a block and the position of the snapshot are part of its checksum, so that a block
//! cannot be mistaken for another one.

use std::io;
use std::sync::Arc;

use crate::disk::File;
use crate::error::{Error, LaterFormat, unreadable_reason};
use crate::limits;
use crate::segment::{HEADER_BYTES, Header, HeaderFault, Magic, StoreId};
use crate::survey::damage;
use statehouse_protocol::ProgramVersion;

const FOOTER_BYTES: usize = 32;
const FOOTER_MARK: u32 = u32::MAX;

/// Provides the blocks of a snapshot.
pub trait Source: Send {
    /// Whether there is a state to capture. Snapshots are postponed until this returns true.
    fn ready(&self) -> bool {
        true
    }
    /// The approximate size of the blocks of a snapshot taken now. Only changes of the value
    /// matter, so it may be off by a constant. `None` means the size of the last snapshot.
    fn bytes(&self) -> Option<u64> {
        None
    }
    /// Begins a snapshot. The following blocks belong to it and must be captured from now on.
    fn begin(&mut self);
    /// Fills `block`, which is empty, and returns true, or returns false at the end. Every call
    /// should take its own lock, only for as long as it copies one block. An error cancels the
    /// snapshot; the log continues without it.
    fn next(&mut self, block: &mut Vec<u8>) -> Result<bool, String>;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Footer {
    pub(crate) blocks: u64,
    pub(crate) bytes: u64,
    pub(crate) complete: u64,
}

fn block_checksum(position: u64, index: u64, len: u32, bytes: &[u8]) -> u32 {
    let mut place = [0; 20];
    place[0..8].copy_from_slice(&position.to_le_bytes());
    place[8..16].copy_from_slice(&index.to_le_bytes());
    place[16..20].copy_from_slice(&len.to_le_bytes());
    crc32c::crc32c_append(crc32c::crc32c(&place), bytes)
}

/// Writes a snapshot file, which is incomplete until [`Writer::finish`].
pub(crate) struct Writer {
    file: Arc<dyn File>,
    position: u64,
    buffer: Vec<u8>,
    offset: u64,
    synced: u64,
    blocks: u64,
    bytes: u64,
}

impl Writer {
    pub(crate) fn new(file: Arc<dyn File>, store: StoreId, position: u64, created_ms: u64) -> Self {
        let header = Header::new(store, 0, position, created_ms);
        let buffer = header.encode(Magic::Snapshot).to_vec();
        Self {
            file,
            position,
            buffer,
            offset: 0,
            synced: 0,
            blocks: 0,
            bytes: 0,
        }
    }

    /// Bytes so far.
    pub(crate) fn bytes(&self) -> u64 {
        self.offset + self.buffer.len() as u64
    }

    /// Adds a block; `name` is the file's, for errors.
    pub(crate) fn block(&mut self, block: &[u8], name: &str) -> Result<(), Error> {
        Error::check_size(block.len(), limits::BLOCK_BYTES_MAX)?;
        // Cannot truncate: bounded by the line above.
        let len = block.len() as u32;
        self.buffer.extend_from_slice(&len.to_le_bytes());
        self.buffer.extend_from_slice(
            &block_checksum(self.position, self.blocks, len, block).to_le_bytes(),
        );
        self.buffer.extend_from_slice(block);
        self.blocks += 1;
        self.bytes += u64::from(len);
        if self.buffer.len() >= limits::SNAPSHOT_WRITE_BYTES {
            self.flush().map_err(Error::io("write", name))?;
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.write_at(&self.buffer, self.offset)?;
        self.offset += self.buffer.len() as u64;
        self.buffer.clear();
        self.buffer.shrink_to(limits::BUFFER_KEPT_BYTES_MAX);
        if self.offset - self.synced >= limits::SNAPSHOT_SYNC_BYTES {
            self.file.sync()?;
            self.synced = self.offset;
        }
        Ok(())
    }

    /// Writes the footer and syncs. Returns the length of the file, which the caller then renames.
    pub(crate) fn finish(mut self, complete: u64) -> io::Result<u64> {
        let mut fields = [0; 24];
        fields[0..8].copy_from_slice(&self.blocks.to_le_bytes());
        fields[8..16].copy_from_slice(&self.bytes.to_le_bytes());
        fields[16..24].copy_from_slice(&complete.to_le_bytes());
        self.buffer.extend_from_slice(&FOOTER_MARK.to_le_bytes());
        self.buffer.extend_from_slice(
            &block_checksum(self.position, self.blocks, FOOTER_MARK, &fields).to_le_bytes(),
        );
        self.buffer.extend_from_slice(&fields);
        self.flush()?;
        self.file.trim()?;
        self.file.sync()?;
        Ok(self.offset)
    }
}

/// Why a snapshot could not be read.
#[derive(Debug)]
pub(crate) enum Fault {
    Damaged {
        offset: u64,
        reason: String,
    },
    Format(LaterFormat),
    Refused {
        block: u64,
        message: String,
        written_by: Option<ProgramVersion>,
    },
}

fn damaged(offset: u64, reason: impl Into<String>) -> Fault {
    Fault::Damaged {
        offset,
        reason: reason.into(),
    }
}

fn header_fault(fault: HeaderFault) -> Fault {
    match fault {
        HeaderFault::Damaged => damaged(0, "its header is damaged"),
        HeaderFault::Format(format) => Fault::Format(format),
    }
}

fn decode_footer(bytes: &[u8], position: u64) -> Option<Footer> {
    let (mark, rest) = bytes.split_first_chunk::<4>()?;
    let (crc, rest) = rest.split_first_chunk::<4>()?;
    let (fields, rest) = rest.split_first_chunk::<24>()?;
    let mut numbers = fields
        .chunks_exact(8)
        .map(|eight| eight.iter().rev().fold(0, |n, &b| n << 8 | u64::from(b)));
    let (blocks, bytes, complete) = (numbers.next()?, numbers.next()?, numbers.next()?);
    let whole = rest.is_empty()
        && u32::from_le_bytes(*mark) == FOOTER_MARK
        && u32::from_le_bytes(*crc) == block_checksum(position, blocks, FOOTER_MARK, fields);
    whole.then_some(Footer {
        blocks,
        bytes,
        complete,
    })
}

/// Reads only the header and the footer of a snapshot.
pub(crate) fn read_ends(file: &dyn File) -> Result<(Header, Footer, u64), Fault> {
    let io = |error: io::Error| damaged(0, unreadable_reason(&error));
    let len = file.bytes().map_err(io)?;
    let mut head = [0; HEADER_BYTES];
    let read = file.read_at(&mut head, 0).map_err(io)?;
    let header = Header::decode(&head[..read], Magic::Snapshot).map_err(header_fault)?;
    let mut tail = [0; FOOTER_BYTES];
    let offset = len.saturating_sub(FOOTER_BYTES as u64);
    let read = file.read_at(&mut tail, offset).map_err(io)?;
    let footer = decode_footer(&tail[..read], header.position)
        .ok_or_else(|| damaged(offset, "its footer is missing or damaged"))?;
    Ok((header, footer, len))
}

/// Reads a snapshot, checks every byte and passes its blocks to `sink`.
pub(crate) fn read(
    file: &dyn File,
    sink: &mut dyn FnMut(&[u8]) -> Result<(), String>,
) -> Result<(Header, Footer), Fault> {
    let (header, footer, len) = read_ends(file)?;
    let mut window = Window {
        file,
        buffer: Vec::new(),
        start: 0,
        offset: HEADER_BYTES as u64,
        len,
    };
    let end = len - FOOTER_BYTES as u64;
    let (mut blocks, mut bytes) = (0, 0);
    while window.offset < end {
        let offset = window.offset;
        let too_long = || damaged(offset, "a block is longer than the rest of the file");
        if end - offset < 8 {
            return Err(too_long());
        }
        let head = window.take(8)?;
        let block_len = u32::from_le_bytes([head[0], head[1], head[2], head[3]]);
        let crc = u32::from_le_bytes([head[4], head[5], head[6], head[7]]);
        if u64::from(block_len) > end - offset - 8 || block_len as usize > limits::BLOCK_BYTES_MAX {
            return Err(too_long());
        }
        let block = window.take(block_len as usize)?;
        if crc != block_checksum(header.position, blocks, block_len, block) {
            return Err(damaged(offset, "a block is damaged"));
        }
        sink(block).map_err(|message| Fault::Refused {
            block: blocks,
            message,
            written_by: header.program,
        })?;
        blocks += 1;
        bytes += u64::from(block_len);
    }
    if blocks != footer.blocks || bytes != footer.bytes {
        return Err(damaged(end, "blocks are missing"));
    }
    Ok((header, footer))
}

/// A buffered part of a file that is read forward.
struct Window<'a> {
    file: &'a dyn File,
    buffer: Vec<u8>,
    start: usize,
    /// The file offset of the next byte to take.
    offset: u64,
    len: u64,
}

impl Window<'_> {
    fn take(&mut self, bytes: usize) -> Result<&[u8], Fault> {
        let held = self.buffer.len() - self.start;
        if held < bytes {
            self.buffer.drain(..self.start);
            self.start = 0;
            let from = self.offset + held as u64;
            let want = (bytes - held).max(limits::SNAPSHOT_READ_BYTES) as u64;
            // Cannot truncate: the larger of a block and a constant.
            let want = want.min(self.len.saturating_sub(from)) as usize;
            self.buffer.resize(held + want, 0);
            let read = self
                .file
                .read_at(&mut self.buffer[held..], from)
                .map_err(|error| damaged(from, unreadable_reason(&error)))?;
            self.buffer.truncate(held + read);
            if held + read < bytes {
                return Err(damaged(from, "the file ends too early"));
            }
        }
        let at = self.start;
        self.start += bytes;
        self.offset += bytes as u64;
        Ok(&self.buffer[at..at + bytes])
    }
}

/// Called between two blocks of a snapshot with the bytes written so far. It may wait or cancel the
/// snapshot.
pub(crate) type Paced<'a> = dyn FnMut(u64, &dyn Source) -> Result<(), Error> + 'a;

/// Writes all blocks of a source.
pub(crate) fn write_blocks(
    source: &mut dyn Source,
    writer: &mut Writer,
    name: &str,
    paced: &mut Paced<'_>,
) -> Result<(), Error> {
    source.begin();
    let mut block = Vec::new();
    while source.next(&mut block).map_err(Error::GivenUp)? {
        writer.block(&block, name)?;
        block.clear();
        block.shrink_to(limits::BUFFER_KEPT_BYTES_MAX);
        paced(writer.bytes(), source)?;
    }
    Ok(())
}

impl Fault {
    pub(crate) fn into_error(self, name: &str) -> Error {
        match self {
            Self::Damaged { offset, reason } => {
                Error::Damaged(damage(name.to_owned(), offset, &reason))
            }
            Self::Format(format) => Error::UnknownFormat {
                file: name.to_owned(),
                format,
            },
            Self::Refused {
                block,
                message,
                written_by,
            } => Error::Refused {
                place: format!("block {block} of {name}"),
                message,
                written_by,
            },
        }
    }
}
