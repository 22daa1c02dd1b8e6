//! A frame of the log: some groups of records, or a part of a long group.
//!
//! ```text
//! format u16 | kind u8 | epoch u64 | seq u64 | first u64 | count u32 | now_ms u64 | previous 32
//! body: count * (len u32 | record), or a slice of such a sequence
//! ```
//!
//! A group is what one call appended; a reader must get all of its records or none. So a group that
//! does not fit one frame travels in parts, and counts only with its last part. A committed frame
//! never changes.

use statehouse_protocol::LogPosition;

use crate::codec::{Malformed, Reader};
use crate::head::{COUNTER_MAX, Chain, check_format};
use crate::limits;

/// The format of frames that this version writes, and the latest that it reads.
const FRAME_FORMAT: u16 = 1;

/// Bytes before the body.
pub const FRAME_HEADER_BYTES: usize = 2 + 1 + 8 + 8 + 8 + 4 + 8 + 32;

/// What the body of a frame holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Complete groups.
    Whole = 0,
    /// A part of a group that continues in the next frame.
    Part = 1,
    /// The end of a group in parts.
    LastPart = 2,
}

/// A frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// What the body holds.
    pub kind: Kind,
    /// The leadership that wrote the frame.
    pub epoch: u64,
    /// The sequence number: 1 for the first frame of the log.
    pub seq: u64,
    /// The position of the first record of the body, or of the group of which it is a part.
    pub first: LogPosition,
    /// The number of records of the body, or of the whole group.
    pub count: u32,
    /// The leader's time in milliseconds since 1970, as in the head.
    pub now_ms: u64,
    /// The chain before this frame.
    pub previous: Chain,
    /// Records, or a part of a group.
    pub body: &'a [u8],
}

impl<'a> Frame<'a> {
    /// Encodes the frame. The body must respect its limit.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        debug_assert!(self.body.len() <= limits::FRAME_BODY_BYTES_MAX);
        let mut out = Vec::with_capacity(FRAME_HEADER_BYTES + self.body.len());
        out.extend_from_slice(&FRAME_FORMAT.to_le_bytes());
        out.push(self.kind as u8);
        out.extend_from_slice(&self.epoch.to_le_bytes());
        out.extend_from_slice(&self.seq.to_le_bytes());
        out.extend_from_slice(&self.first.0.to_le_bytes());
        out.extend_from_slice(&self.count.to_le_bytes());
        out.extend_from_slice(&self.now_ms.to_le_bytes());
        out.extend_from_slice(&self.previous.0);
        out.extend_from_slice(self.body);
        out
    }

    /// Decodes a frame. Fails for every input that [`Self::encode`] does not write.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let mut reader = Reader(bytes);
        check_format(reader.u16()?, FRAME_FORMAT)?;
        let kind = match reader.u8()? {
            0 => Kind::Whole,
            1 => Kind::Part,
            2 => Kind::LastPart,
            _ => return Err(Malformed::Damaged("the kind of the frame is unknown")),
        };
        let frame = Self {
            kind,
            epoch: reader.u64()?,
            seq: reader.u64()?,
            first: LogPosition(reader.u64()?),
            count: reader.u32()?,
            now_ms: reader.u64()?,
            previous: Chain(reader.array()?),
            body: reader.0,
        };
        if frame.body.len() > limits::FRAME_BODY_BYTES_MAX {
            return Err(Malformed::Damaged("the frame is too long"));
        }
        if frame.count > limits::FRAME_RECORDS_MAX {
            return Err(Malformed::Damaged("the frame has too many records"));
        }
        if frame.first.0.max(frame.seq).max(frame.epoch) > COUNTER_MAX {
            return Err(Malformed::Damaged("a counter is out of range"));
        }
        Ok(frame)
    }
}

/// The chain after an encoded frame. The frame contains the chain before it.
#[must_use]
pub fn chain(encoded: &[u8]) -> Chain {
    Chain(*blake3::hash(encoded).as_bytes())
}

/// Appends a record to the body of a group. The caller has checked the length.
pub(crate) fn put_record(body: &mut Vec<u8>, record: &[u8]) {
    debug_assert!(record.len() <= limits::GROUP_BYTES_MAX);
    body.extend_from_slice(&(record.len() as u32).to_le_bytes());
    body.extend_from_slice(record);
}

/// Splits a body into its records. Fails if the body does not have exactly `count` records.
pub fn records(body: &[u8], count: u32) -> Result<Vec<&[u8]>, Malformed> {
    let mut reader = Reader(body);
    let mut records = Vec::new();
    for _ in 0..count {
        let len = reader.u32()?;
        records.push(reader.take(len as usize)?);
    }
    reader.end()?;
    Ok(records)
}

/// Joins the parts of long groups.
#[derive(Debug, Default)]
pub struct Assembler {
    epoch: u64,
    buffer: Vec<u8>,
}

impl Assembler {
    /// Accepts the next frame of the log. Returns the body of complete groups, or `None` if the
    /// frame is a part and others must follow. An unfinished group is dropped when another
    /// leadership begins, because its leader can no longer finish it. Fails if a group is too long.
    pub fn accept<'a>(&'a mut self, frame: &Frame<'a>) -> Result<Option<&'a [u8]>, Malformed> {
        if frame.kind == Kind::Whole || frame.epoch != self.epoch {
            self.buffer = Vec::new();
            self.epoch = frame.epoch;
        }
        if frame.kind == Kind::Whole {
            return Ok(Some(frame.body));
        }
        if self.buffer.len() + frame.body.len() > limits::GROUP_BYTES_MAX {
            return Err(Malformed::Damaged("a group of records is too long"));
        }
        self.buffer.extend_from_slice(frame.body);
        if frame.kind == Kind::Part {
            return Ok(None);
        }
        // The next frame begins with an empty buffer: it is whole, or the first part of a group.
        self.epoch = 0;
        Ok(Some(&self.buffer))
    }
}
