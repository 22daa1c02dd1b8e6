//! The frames of a connection between two hosts.
//!
//! ```text
//! frame: stream u32 | kind u8 | length u24 | body      (little-endian)
//! ```
//!
//! | kind | body | meaning |
//! |---|---|---|
//! | 1 OPEN | scheme and address of the client, as in the preface | a client wants to be served |
//! | 2 ANSWER | an [`Answer`](super::Answer) | whether the leader serves the client |
//! | 3 DATA | bytes of the client, or for it | |
//! | 4 CREDIT | u32 | the sender has read so many bytes more of the stream |
//! | 5 END | | the sender sends no more DATA |
//! | 6 CLOSE | | the sender sends nothing more, and discards what it receives |

use bytes::{BufMut, BytesMut};

use super::MuxError;

pub(super) const HEADER_BYTES: usize = 8;

/// The body of a longer DATA is divided.
pub(super) const FRAME_BYTES_MAX: usize = 16 << 10;

pub(super) const OPEN: u8 = 1;
pub(super) const ANSWER: u8 = 2;
pub(super) const DATA: u8 = 3;
pub(super) const CREDIT: u8 = 4;
pub(super) const END: u8 = 5;
pub(super) const CLOSE: u8 = 6;

pub(super) struct Frame<'a> {
    pub(super) stream: u32,
    pub(super) kind: u8,
    pub(super) body: &'a [u8],
}

impl<'a> Frame<'a> {
    /// The first frame and its length. `None` if it is not complete.
    pub(super) fn first(bytes: &'a [u8]) -> Result<Option<(Self, usize)>, MuxError> {
        let Some((&[a, b, c, d, kind, x, y, z], rest)) = bytes.split_first_chunk() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes([x, y, z, 0]) as usize;
        if length > FRAME_BYTES_MAX {
            return Err(MuxError::Invalid("it is too long"));
        }
        let stream = u32::from_le_bytes([a, b, c, d]);
        let frame = rest.get(..length);
        let frame = frame.map(|body| Self { stream, kind, body });
        Ok(frame.map(|it| (it, HEADER_BYTES + length)))
    }
}

/// Appends a frame. The body has at most [`FRAME_BYTES_MAX`].
pub(super) fn push(out: &mut BytesMut, id: u32, kind: u8, body: &[u8]) {
    out.reserve(HEADER_BYTES + body.len());
    out.put_u32_le(id);
    out.put_u32_le(u32::from(kind) | (body.len() as u32) << 8);
    out.extend_from_slice(body);
}
