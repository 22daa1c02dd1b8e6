//! A frame: the unit of one write. After a crash either all of its records survive or none.
//!
//! ```text
//! len u32 | crc32c u32 | segment u64 | store u64 | offset u64 | first u64 | synced u64 | count u32
//! | 0 u32 | then `count` times: len u32 | bytes
//! ```
//!
//! All integers are little endian. `len` counts the whole frame; the checksum covers everything
//! except itself.
//!
//! Invariants:
//!
//! * Every frame must contain its segment number and offset, or recovery could take the earlier
//!   content of a recycled segment for new frames.
//! * The store id must stay secret. A client that knew it could put a whole frame into a record,
//!   and a later recovery could read it as a frame.
//! * `synced` is the last position that was durable when the frame was written. A reader that finds
//!   such a frame after a broken one knows that the break is damage and not a torn tail.
//!
//! Frames follow each other without padding, so a frame may begin in a sector whose first part is
//! already durable. The log relies on the device to keep those bytes when it loses power while it
//! rewrites the sector with the same leading bytes. SQLite makes the same assumption by default
//! ("powersafe overwrite").

use crate::limits;

pub(crate) const HEADER_BYTES: usize = 56;
/// Offset of the store id in a frame.
pub(crate) const STORE_AT: usize = 16;

/// The place that a frame was written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) segment: u64,
    pub(crate) store: u64,
    pub(crate) offset: u64,
}

/// A frame whose checksum and place are correct.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frame<'a> {
    pub(crate) first: u64,
    pub(crate) synced: u64,
    pub(crate) count: u32,
    pub(crate) bytes: usize,
    records: &'a [u8],
}

impl<'a> Frame<'a> {
    pub(crate) fn last(&self) -> u64 {
        self.first + u64::from(self.count) - 1
    }

    /// The records in order. [`parse`] has checked that there are `count` of them.
    pub(crate) fn records(&self) -> Records<'a> {
        Records { rest: self.records }
    }
}

pub(crate) struct Records<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Records<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let (len, rest) = self.rest.split_first_chunk::<4>()?;
        let (record, rest) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
        self.rest = rest;
        Some(record)
    }
}

/// Appends a record in the encoding of a frame.
pub(crate) fn push(buffer: &mut Vec<u8>, record: &[u8]) {
    // Cannot truncate: a record is at most limits::RECORD_BYTES_MAX.
    buffer.extend_from_slice(&(record.len() as u32).to_le_bytes());
    buffer.extend_from_slice(record);
}

/// Fills in the header of a frame. The first [`HEADER_BYTES`] of `frame` are overwritten.
pub(crate) fn seal(frame: &mut [u8], place: Place, first: u64, synced: u64, count: u32) {
    // Cannot truncate: a frame is no larger than a segment, at most limits::SEGMENT_FILE_BYTES_MAX.
    let len = (frame.len() as u32).to_le_bytes();
    frame[0..4].copy_from_slice(&len);
    for (at, value) in [
        (8, place.segment),
        (STORE_AT, place.store),
        (24, place.offset),
        (32, first),
        (40, synced),
    ] {
        frame[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }
    frame[48..52].copy_from_slice(&count.to_le_bytes());
    frame[52..56].fill(0);
    let crc = checksum(frame);
    frame[4..8].copy_from_slice(&crc.to_le_bytes());
}

fn checksum(frame: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&frame[0..4]), &frame[8..])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes
        .get(at..at + 4)
        .and_then(|bytes| bytes.try_into().ok())
        .map_or(0, u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes
        .get(at..at + 8)
        .and_then(|bytes| bytes.try_into().ok())
        .map_or(0, u64::from_le_bytes)
}

/// Whether these bytes begin with the header of a frame of this place, intact or not.
pub(crate) fn begins(bytes: &[u8], place: Place) -> bool {
    claimed_place(bytes) == Some(place)
}

/// The place that the frame header at the start of `bytes` claims.
pub(crate) fn claimed_place(bytes: &[u8]) -> Option<Place> {
    (bytes.len() >= HEADER_BYTES).then(|| Place {
        segment: u64_at(bytes, 8),
        store: u64_at(bytes, STORE_AT),
        offset: u64_at(bytes, 24),
    })
}

/// Decodes the frame at the start of `bytes` if it is intact and belongs to `place`.
pub(crate) fn parse(bytes: &[u8], place: Place) -> Option<Frame<'_>> {
    if !begins(bytes, place) {
        return None;
    }
    let len = u32_at(bytes, 0) as usize;
    if len < HEADER_BYTES || len > bytes.len() {
        return None;
    }
    let bytes = &bytes[..len];
    if checksum(bytes) != u32_at(bytes, 4) {
        return None;
    }
    let (first, synced, count) = (u64_at(bytes, 32), u64_at(bytes, 40), u32_at(bytes, 48));
    let frame = Frame {
        first,
        synced,
        count,
        bytes: len,
        records: &bytes[HEADER_BYTES..],
    };
    // With a correct checksum only a bug of the writer can make these fields invalid. They are
    // checked all the same.
    if first == 0
        || count == 0
        || count > limits::FRAME_RECORDS_MAX
        || first.checked_add(u64::from(count)).is_none()
    {
        return None;
    }
    let mut records = frame.records();
    let counted = records.by_ref().take(count as usize).count();
    (counted == count as usize && records.rest.is_empty()).then_some(frame)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: Place = Place {
        segment: 3,
        store: 9,
        offset: 64,
    };

    fn frame(records: &[&[u8]]) -> Vec<u8> {
        let mut bytes = vec![0xAA; HEADER_BYTES];
        for record in records {
            push(&mut bytes, record);
        }
        seal(&mut bytes, PLACE, 5, 4, records.len() as u32);
        bytes
    }

    #[test]
    fn frame_returns_its_records() {
        let bytes = frame(&[b"one", b"", b"three"]);
        let parsed = parse(&bytes, PLACE).expect("a whole frame");
        assert_eq!(
            (parsed.first, parsed.last(), parsed.synced, parsed.bytes),
            (5, 7, 4, bytes.len())
        );
        assert_eq!(
            parsed.records().collect::<Vec<_>>(),
            [b"one".as_slice(), b"", b"three"]
        );
    }

    #[test]
    fn frame_is_rejected_at_another_place() {
        let bytes = frame(&[b"one"]);
        for other in [
            Place {
                segment: 4,
                ..PLACE
            },
            Place { store: 8, ..PLACE },
            Place {
                offset: 65,
                ..PLACE
            },
        ] {
            assert!(parse(&bytes, other).is_none(), "{other:?}");
        }
    }

    #[test]
    fn flipped_bit_or_missing_byte_is_detected() {
        let bytes = frame(&[b"one", b"two"]);
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(parse(&flipped, PLACE).is_none(), "bit {bit}");
        }
        for len in 0..bytes.len() {
            assert!(parse(&bytes[..len], PLACE).is_none(), "{len} bytes");
        }
    }

    #[test]
    fn wrong_count_with_valid_checksum_is_rejected() {
        for count in [0, 1, 3, u32::MAX] {
            let mut bytes = frame(&[b"one", b"two"]);
            seal(&mut bytes, PLACE, 5, 4, count);
            assert!(parse(&bytes, PLACE).is_none(), "{count}");
        }
        let mut bytes = frame(&[b"one"]);
        seal(&mut bytes, PLACE, u64::MAX, 4, 1);
        assert!(parse(&bytes, PLACE).is_none());
    }
}
