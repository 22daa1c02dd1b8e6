//! Encoding of writes and entries in records and snapshots.

use bytes::Bytes;

use super::{read_stamp, stamp};
use crate::clock::Fence;
use crate::log::codec::{Malformed, Reader, bytes, number};
use crate::store::{Change, Entry, KeyRef, Write};

/// A flag of an entry in a snapshot: it is followed by an owner that differs from that of the entry
/// before.
pub(in crate::log) const OTHER_OWNER: u8 = 8;

/// The other flags of a write.
mod kind {
    pub(super) const HIDDEN: u8 = 1;
    pub(super) const EXPIRED: u8 = 2;
    pub(super) const ENTRY: u8 = 4;
    pub(super) const ALL: u8 = HIDDEN | EXPIRED | ENTRY | super::OTHER_OWNER;
}

/// Encodes a write. Its key and value are encoded as ranges of the payload if they lie there.
pub(in crate::log) fn write(out: &mut Vec<u8>, it: &Write) {
    let bit = |on: bool, bit: u8| if on { bit } else { 0 };
    out.push(
        bit(it.hidden, kind::HIDDEN)
            | bit(it.expired(), kind::EXPIRED)
            | bit(it.entry().is_some(), kind::ENTRY),
    );
    let key = it.key();
    match it.key_at {
        Some(at) => {
            number(out, (key.len() as u64) << 1);
            number(out, at.into());
        }
        None => {
            number(out, (key.len() as u64) << 1 | 1);
            out.extend_from_slice(key);
        }
    }
    match it.entry() {
        Some(entry) => self::entry(out, entry, it.value_at),
        None => stamp(out, it.version()),
    }
}

pub(super) fn writes(out: &mut Vec<u8>, all: &[Write]) {
    number(out, all.len() as u64);
    for it in all {
        write(out, it);
    }
}

pub(super) fn read_writes(
    reader: &mut Reader<'_>,
    payload: &[u8],
) -> Result<Vec<Write>, Malformed> {
    let count = reader.count()?;
    let mut writes = Vec::new();
    for _ in 0..count {
        writes.push(read_write(reader, payload)?);
    }
    Ok(writes)
}

pub(in crate::log) fn read_write(
    reader: &mut Reader<'_>,
    payload: &[u8],
) -> Result<Write, Malformed> {
    let flags = reader.flags(kind::ALL)?;
    let key = read_key_ref(reader)?;
    let key = key.resolve(payload).ok_or(OUTSIDE)?;
    let change = if flags & kind::ENTRY != 0 {
        Change::Set(read_entry(reader, key, payload)?)
    } else {
        let (key, version) = (Bytes::copy_from_slice(key), read_stamp(reader)?);
        match flags & kind::EXPIRED != 0 {
            true => Change::Expired(key, version),
            false => Change::Deleted(key, version),
        }
    };
    Ok(Write {
        hidden: flags & kind::HIDDEN != 0,
        ..Write::of(change)
    })
}

const OUTSIDE: Malformed = Malformed("a range outside of the payload");

pub(super) fn entry(out: &mut Vec<u8>, it: &Entry, value_at: Option<u32>) {
    let (fence, expires_ms) = (it.fence(), it.expires_ms());
    out.push(
        u8::from(value_at.is_some())
            | u8::from(fence.is_some()) << 1
            | u8::from(expires_ms.is_some()) << 2,
    );
    match value_at {
        Some(at) => {
            number(out, at.into());
            number(out, it.value().len() as u64);
        }
        None => bytes(out, it.value()),
    }
    stamp(out, it.version());
    if let Some(fence) = &fence {
        number(out, fence.wall);
        number(out, fence.counter.into());
        bytes(out, fence.node.as_bytes());
    }
    if let Some(expires_ms) = expires_ms {
        number(out, expires_ms);
    }
}

pub(super) fn read_entry(
    reader: &mut Reader<'_>,
    key: &[u8],
    payload: &[u8],
) -> Result<Entry, Malformed> {
    let flags = reader.flags(7)?;
    let value = if flags & 1 != 0 {
        let at: usize = reader.small()?;
        let len: usize = reader.small()?;
        let end = at.checked_add(len).ok_or(OUTSIDE)?;
        payload.get(at..end).ok_or(OUTSIDE)?
    } else {
        reader.bytes()?
    };
    let version = read_stamp(reader)?;
    let fence = (flags & 2 != 0).then(|| read_fence(reader)).transpose()?;
    let expires_ms = (flags & 4 != 0).then(|| reader.number()).transpose()?;
    Ok(Entry::new(key, value, version, fence.as_ref(), expires_ms))
}

fn read_fence(reader: &mut Reader<'_>) -> Result<Fence, Malformed> {
    Ok(Fence {
        wall: reader.number()?,
        counter: reader.small()?,
        node: reader.text()?.into(),
    })
}

pub(super) fn key_ref(out: &mut Vec<u8>, it: &KeyRef) {
    match it {
        KeyRef::Payload(range) => {
            number(out, u64::from(range.end - range.start) << 1);
            number(out, range.start.into());
        }
        KeyRef::Own(key) => {
            number(out, (key.len() as u64) << 1 | 1);
            out.extend_from_slice(key);
        }
    }
}

pub(super) fn read_key_ref(reader: &mut Reader<'_>) -> Result<KeyRef, Malformed> {
    let head = reader.number()?;
    let len = head >> 1;
    if head & 1 == 0 {
        let start: u32 = reader.small()?;
        let len = u32::try_from(len).map_err(|_| OUTSIDE)?;
        let end = start.checked_add(len).ok_or(OUTSIDE)?;
        return Ok(KeyRef::Payload(start..end));
    }
    let len = usize::try_from(len).map_err(|_| OUTSIDE)?;
    Ok(KeyRef::Own(Bytes::copy_from_slice(reader.take(len)?)))
}
