//! A segment: one file of the log, a header followed by frames.
//!
//! The frames end at the first bytes that are not a valid frame of this segment: zeros, or the
//! content of the file before it was recycled. Only recovery, which reads all segments, can decide
//! whether frames are missing there.

use statehouse_protocol::ProgramVersion;

use crate::error::LaterFormat;
use crate::frame::{self, Frame, Place};
use crate::limits;

pub(crate) const HEADER_BYTES: usize = 64;
pub(crate) const FORMAT: u16 = 1;
/// The offset of the version of the program in a header.
const PROGRAM_AT: usize = 56;

/// Identifies the store that a file belongs to. It is random and secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StoreId(pub(crate) u64, pub(crate) u64);

/// The first 64 bytes of every file of the log. Every format must keep the checksum in the last
/// four bytes, and the version of the program in the four before, so that a later format can be
/// distinguished from damage and names the program that reads it.
///
/// ```text
/// magic 4 | format u16 | 0 u16 | store 16 | number u64 | position u64 | created_ms u64 | bytes u64
/// | program 4 | crc32c u32
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) store: StoreId,
    /// Segment and file `newest`: the number of the segment. Otherwise 0.
    pub(crate) number: u64,
    /// Segment: the position of its first record. Snapshot: the position at which it began.
    /// Markers: the last durable position.
    pub(crate) position: u64,
    pub(crate) created_ms: u64,
    /// Segment: the length of its file, which never changes. Segments of earlier versions have 0
    /// here. The file `newest` repeats the value; it is 0 elsewhere.
    pub(crate) bytes: u64,
    /// The program that created the file. Files of earlier versions have none.
    pub(crate) program: Option<ProgramVersion>,
}

/// The kind of file that a header begins.
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
            Self::Segment => b"SHLG",
            Self::Snapshot => b"SHSN",
            Self::Closed => b"SHCL",
            Self::Newest => b"SHNW",
        }
    }
}

/// Why a header cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeaderFault {
    /// The magic or the checksum is wrong, or the position is not possible.
    Damaged,
    /// A later version wrote the header.
    Format(LaterFormat),
}

impl Header {
    /// The header of a file that this program creates.
    pub(crate) fn new(store: StoreId, number: u64, position: u64, created_ms: u64) -> Self {
        Self {
            store,
            number,
            position,
            created_ms,
            bytes: 0,
            program: Some(ProgramVersion::THIS),
        }
    }

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
        bytes[PROGRAM_AT..HEADER_BYTES - 4].copy_from_slice(&ProgramVersion::encode(self.program));
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
        let mut program = [0; 4];
        program.copy_from_slice(&bytes[PROGRAM_AT..HEADER_BYTES - 4]);
        let program = ProgramVersion::decode(program);
        let format = u16::from_le_bytes([bytes[4], bytes[5]]);
        if format != FORMAT {
            let written_by = program;
            return Err(HeaderFault::Format(LaterFormat { format, written_by }));
        }
        let mut fields = [0; 6];
        for (at, field) in (8..).step_by(8).zip(&mut fields) {
            let mut eight = [0; 8];
            eight.copy_from_slice(&bytes[at..at + 8]);
            *field = u64::from_le_bytes(eight);
        }
        let [high, low, number, position, created_ms, bytes] = fields;
        // The first record has the position 1.
        if position > limits::POSITION_MAX || (magic == Magic::Segment && position == 0) {
            return Err(HeaderFault::Damaged);
        }
        Ok(Self {
            store: StoreId(high, low),
            number,
            position,
            created_ms,
            bytes,
            program,
        })
    }

    /// Describes the length of the file if the header records another one.
    pub(crate) fn wrong_length(&self, bytes: u64) -> Option<String> {
        let is_wrong = self.bytes != 0 && self.bytes != bytes;
        is_wrong.then(|| {
            format!(
                "its length is {bytes} bytes, but it was created with {} bytes",
                self.bytes
            )
        })
    }

    /// The place of a frame at this offset of the segment.
    pub(crate) fn place(&self, offset: usize) -> Place {
        Place {
            segment: self.number,
            store: self.store.0,
            offset: offset as u64,
        }
    }
}

/// The frames of a segment in order, up to the first bytes that are not a frame.
pub(crate) struct Frames<'a> {
    header: Header,
    content: &'a [u8],
    /// The offset of the next frame, or of the end of the frames.
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

    /// Whether a frame after the last one may reach the byte at `offset`, as far as the bytes
    /// before it show.
    pub(crate) fn may_reach(&self, offset: u64) -> bool {
        let bytes = self.content.get(self.offset..).unwrap_or_default();
        offset < (self.offset + frame::HEADER_BYTES) as u64
            || frame::begins(bytes, self.header.place(self.offset))
    }

    /// Examines the bytes after the last frame.
    pub(crate) fn rest(&self) -> Rest {
        let mut rest = Rest::default();
        let Some(bytes) = self.content.get(self.offset..) else {
            return rest;
        };
        rest.torn = frame::begins(bytes, self.header.place(self.offset));
        // Comparing one byte of the store id first rejects nearly every offset.
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

    /// Whether these bytes are a frame of this segment that belongs to another offset. A crash
    /// never moves a frame, so another program inserted or removed bytes.
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

/// What follows the last frame of a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rest {
    /// True if there are parts of frames of this segment, as an interrupted write leaves them.
    pub(crate) torn: bool,
    /// The last position that a valid frame there declares durable.
    pub(crate) synced: u64,
    /// The offset of a valid frame of this segment that was written to another offset.
    moved: Option<usize>,
}

impl Rest {
    /// Describes a frame that was written to another offset, if there is one.
    pub(crate) fn misplaced(&self) -> Option<String> {
        let describe = |at| format!("the frame at byte {at} was written to another offset");
        self.moved.map(describe)
    }
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
        program: Some(ProgramVersion::THIS),
    };

    #[test]
    fn header_is_read_only_as_its_own_kind() {
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
    fn segment_without_a_first_position_is_damaged() {
        let header = Header {
            position: 0,
            ..HEADER
        };
        for (magic, decoded) in [
            (Magic::Segment, Err(HeaderFault::Damaged)),
            (Magic::Newest, Ok(header)),
        ] {
            let bytes = header.encode(magic);
            assert_eq!(Header::decode(&bytes, magic), decoded, "{magic:?}");
        }
    }

    #[test]
    fn later_format_is_not_damage_and_names_its_program() {
        let later = ProgramVersion::parse("9.8.7");
        for written_by in [later, None] {
            let header = Header {
                program: written_by,
                ..HEADER
            };
            let mut bytes = header.encode(Magic::Segment);
            bytes[4] = 2;
            let crc = crc32c::crc32c(&bytes[..60]).to_le_bytes();
            bytes[60..].copy_from_slice(&crc);
            let format = LaterFormat {
                format: 2,
                written_by,
            };
            assert_eq!(
                Header::decode(&bytes, Magic::Segment),
                Err(HeaderFault::Format(format))
            );
        }
    }
}
