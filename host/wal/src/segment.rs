//! A segment: one file of the log, a header and frames behind each other.
//!
//! A segment's end is where the first bytes stand that are no frame of it: zeros, or what the file
//! held before it was recycled. Whether the log should have gone on there is for the reader of the
//! whole log to say.

use crate::frame::{self, Frame, Place};

pub(crate) const HEADER_BYTES: usize = 64;
pub(crate) const FORMAT: u16 = 1;
const MAGIC: &[u8; 4] = b"SHLG";
/// Header of the marker of a clean close.
const CLOSED_MAGIC: &[u8; 4] = b"SHCL";
/// Header of the record of the newest segment.
const NEWEST_MAGIC: &[u8; 4] = b"SHNW";
/// Header of a snapshot.
pub(crate) const SNAPSHOT_MAGIC: &[u8; 4] = b"SHSN";

/// Which store a file belongs to; made up when its journal is created, and known to nobody else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StoreId(pub(crate) u64, pub(crate) u64);

/// The first 64 bytes of every file of the journal, whose last four are their checksum in every
/// format: so a later format is told from damage.
///
/// ```text
/// magic 4 | format u16 | 0 u16 | store 16 | number u64 | position u64 | created_ms u64 | bytes u64 | 0 4 | crc32c u32
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) store: StoreId,
    /// Of the segment; 0 elsewhere.
    pub(crate) number: u64,
    /// Segment: of its first record. Snapshot: where it began. Marker: the last durable one.
    pub(crate) position: u64,
    pub(crate) created_ms: u64,
    /// Segment: the length of its file, which never changes. 0 elsewhere, and in segments of earlier versions.
    pub(crate) bytes: u64,
}

/// Which kind of file a header begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Magic {
    Segment,
    Snapshot,
    Closed,
    Newest,
}

impl Magic {
    fn bytes(self) -> &'static [u8; 4] {
        match self {
            Self::Segment => MAGIC,
            Self::Snapshot => SNAPSHOT_MAGIC,
            Self::Closed => CLOSED_MAGIC,
            Self::Newest => NEWEST_MAGIC,
        }
    }
}

/// Why a header cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeaderFault {
    /// Not what was written.
    Damaged,
    /// Written by a later version.
    Format(u16),
}

impl Header {
    pub(crate) fn encode(&self, magic: Magic) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..4].copy_from_slice(magic.bytes());
        bytes[4..6].copy_from_slice(&FORMAT.to_le_bytes());
        let fields = [
            self.store.0,
            self.store.1,
            self.number,
            self.position,
            self.created_ms,
            self.bytes,
        ];
        for (at, field) in (8..).step_by(8).zip(fields) {
            bytes[at..at + 8].copy_from_slice(&field.to_le_bytes());
        }
        let crc = crc32c::crc32c(&bytes[..HEADER_BYTES - 4]);
        bytes[HEADER_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8], magic: Magic) -> Result<Self, HeaderFault> {
        let (bytes, _) = bytes
            .split_first_chunk::<HEADER_BYTES>()
            .ok_or(HeaderFault::Damaged)?;
        let crc = crc32c::crc32c(&bytes[..HEADER_BYTES - 4]).to_le_bytes();
        if &bytes[0..4] != magic.bytes() || bytes[HEADER_BYTES - 4..] != crc {
            return Err(HeaderFault::Damaged);
        }
        let format = u16::from_le_bytes([bytes[4], bytes[5]]);
        if format != FORMAT {
            return Err(HeaderFault::Format(format));
        }
        let mut fields = [0; 6];
        for (at, field) in (8..).step_by(8).zip(&mut fields) {
            let mut eight = [0; 8];
            eight.copy_from_slice(&bytes[at..at + 8]);
            *field = u64::from_le_bytes(eight);
        }
        let [high, low, number, position, created_ms, bytes] = fields;
        Ok(Self {
            store: StoreId(high, low),
            number,
            position,
            created_ms,
            bytes,
        })
    }

    /// What is wrong with the length of the segment's file, if it is known and another.
    pub(crate) fn wrong_length(&self, bytes: u64) -> Option<String> {
        let is_wrong = self.bytes != 0 && self.bytes != bytes;
        is_wrong.then(|| format!("it has {bytes} bytes and was created with {}", self.bytes))
    }

    /// Where a frame of this segment stands.
    pub(crate) fn place(&self, offset: usize) -> Place {
        Place {
            segment: self.number,
            store: self.store.0,
            offset: offset as u64,
        }
    }
}

/// The frames of a segment in order, up to the first bytes that are none.
pub(crate) struct Frames<'a> {
    header: Header,
    content: &'a [u8],
    /// Where the next frame begins; where the frames end, once there is none.
    pub(crate) offset: usize,
}

impl<'a> Frames<'a> {
    /// `content` is the whole file.
    pub(crate) fn new(header: Header, content: &'a [u8]) -> Self {
        Self {
            header,
            content,
            offset: HEADER_BYTES,
        }
    }

    /// What follows the last frame.
    pub(crate) fn rest(&self) -> Rest {
        let mut rest = Rest {
            torn: false,
            synced: 0,
            moved: None,
        };
        let Some(bytes) = self.content.get(self.offset..) else {
            return rest;
        };
        rest.torn = frame::begins(bytes, self.header.place(self.offset));
        // One byte of the store's number is looked at first: nearly every offset fails there already.
        let mark = self.header.store.0.to_le_bytes()[0];
        let last = self.content.len().saturating_sub(frame::HEADER_BYTES - 1);
        for offset in self.offset + 1..last {
            if self.content[offset + frame::STORE_AT] != mark {
                continue;
            }
            let bytes = &self.content[offset..];
            if let Some(frame) = frame::parse(bytes, self.header.place(offset)) {
                rest.torn = true;
                rest.synced = rest.synced.max(frame.synced);
            } else if rest.moved.is_none() && self.is_moved(bytes, offset) {
                rest.moved = Some(offset);
            }
        }
        rest
    }

    /// Whether these bytes are a frame of this segment that belongs to another offset. No crash moves a frame: some
    /// program inserted or removed bytes.
    fn is_moved(&self, bytes: &[u8], offset: usize) -> bool {
        let Some(place) = frame::claimed_place(bytes) else {
            return false;
        };
        let own = self.header.place(offset);
        let is_elsewhere = place.offset != own.offset;
        is_elsewhere
            && (place.store, place.segment) == (own.store, own.segment)
            && frame::parse(bytes, place).is_some()
    }
}

impl<'a> Iterator for Frames<'a> {
    type Item = Frame<'a>;

    fn next(&mut self) -> Option<Frame<'a>> {
        let frame = frame::parse(
            self.content.get(self.offset..)?,
            self.header.place(self.offset),
        )?;
        self.offset += frame.bytes;
        Some(frame)
    }
}

/// What stands behind the last frame of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rest {
    /// Parts of frames of this segment: a write that a crash ended.
    pub(crate) torn: bool,
    /// Up to where a whole frame there says that everything was durable.
    pub(crate) synced: u64,
    /// Where a whole frame of this segment stands that was written elsewhere.
    pub(crate) moved: Option<usize>,
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: Header = Header {
        store: StoreId(1, 2),
        number: 3,
        position: 4,
        created_ms: 5,
        bytes: 6,
    };

    #[test]
    fn a_header_is_read_as_it_is_written_and_as_no_other_kind() {
        let bytes = HEADER.encode(Magic::Segment);
        assert_eq!(Header::decode(&bytes, Magic::Segment), Ok(HEADER));
        assert_eq!(
            Header::decode(&bytes, Magic::Snapshot),
            Err(HeaderFault::Damaged)
        );
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(
                Header::decode(&flipped, Magic::Segment),
                Err(HeaderFault::Damaged),
                "bit {bit}"
            );
        }
    }

    #[test]
    fn a_later_format_is_no_damage() {
        let mut bytes = HEADER.encode(Magic::Segment);
        bytes[4] = 2;
        let crc = crc32c::crc32c(&bytes[..60]).to_le_bytes();
        bytes[60..].copy_from_slice(&crc);
        assert_eq!(
            Header::decode(&bytes, Magic::Segment),
            Err(HeaderFault::Format(2))
        );
    }
}
