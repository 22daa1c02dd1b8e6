//! Encoding of remembered requests in records and snapshots.

use bytes::Bytes;

use super::written::{entry, key_ref, read_entry, read_key_ref};
use super::{read_stamp, stamp};
use crate::log::codec::{Malformed, Reader, bytes, number, unknown};
use crate::policy::{Fault, Page, Reached};
use crate::request::{Delivery, Dialect};
use crate::store::{
    CapturedReads, Context, Imported, Outcome, Read, Remembered, Right, StoredPayload,
};
use statehouse_protocol::{ConnectionId, SessionId};

/// Encodes a remembered request. Only snapshots include the entries that were read.
pub(in crate::log) fn remembered(out: &mut Vec<u8>, it: &Remembered, entries: bool) {
    number(out, it.number);
    number(out, it.delivery.session.0);
    number(out, it.delivery.connection.0);
    number(out, it.delivery.packet_id.into());
    number(out, it.turn);
    out.extend_from_slice(&it.identity);
    number(out, it.context.now_ms);
    number(out, it.until_ms.saturating_sub(it.context.now_ms));
    stamp(out, it.context.clock);
    dialect(out, it.context.dialect);
    out.push(it.captured.is_some().into());
    if let Some(it) = &it.captured {
        captured(out, it, entries);
    }
    outcome(out, &it.outcome);
}

pub(in crate::log) fn read_remembered(
    reader: &mut Reader<'_>,
    entries: bool,
) -> Result<Remembered, Malformed> {
    let number = reader.number()?;
    let delivery = Delivery {
        session: SessionId(reader.number()?),
        connection: ConnectionId(reader.number()?),
        packet_id: reader.small()?,
        dup: false,
    };
    let turn = reader.number()?;
    let identity = reader.array()?;
    let now_ms = reader.number()?;
    let until_ms = now_ms.saturating_add(reader.number()?);
    let clock = read_stamp(reader)?;
    let dialect = read_dialect(reader)?;
    Ok(Remembered {
        number,
        delivery,
        turn,
        identity,
        until_ms,
        context: Context {
            now_ms,
            clock,
            dialect,
            policy: blake3::Hash::from_bytes([0; 32]),
        },
        captured: (reader.u8()? != 0)
            .then(|| read_captured(reader, entries))
            .transpose()?,
        outcome: read_outcome(reader)?,
    })
}

pub(super) fn dialect(out: &mut Vec<u8>, it: Dialect) {
    out.push(match it {
        Dialect::Sdk => 0,
        Dialect::Documents => 1,
        Dialect::Preview => 2,
    });
}

pub(super) fn read_dialect(reader: &mut Reader<'_>) -> Result<Dialect, Malformed> {
    Ok(match reader.u8()? {
        0 => Dialect::Sdk,
        1 => Dialect::Documents,
        2 => Dialect::Preview,
        _ => return Err(unknown!("dialect")),
    })
}

fn captured(out: &mut Vec<u8>, it: &CapturedReads, entries: bool) {
    number(out, it.reads.len() as u64);
    for read in &it.reads {
        let held = read.entry.as_ref().filter(|_| entries);
        out.push(u8::from(read.hidden) | u8::from(held.is_some()) << 1);
        key_ref(out, &read.key);
        if let Some(entry) = held {
            self::entry(out, entry, None);
        }
    }
    number(out, it.imports.len() as u64);
    for (call, imported) in &it.imports {
        number(out, (*call).into());
        match imported {
            Imported::Refused(Fault::Denied) => out.push(0),
            Imported::Refused(Fault::Quota) => out.push(1),
            Imported::Refused(Fault::Other(text)) => {
                out.push(2);
                bytes(out, text.as_bytes());
            }
            Imported::Watched => out.push(3),
            Imported::Unwatched(watched) => out.push(4 + u8::from(*watched)),
            Imported::Followed(version) => {
                out.push(10);
                stamp(out, *version);
            }
            Imported::Reached(reached) => {
                out.push(11 + u8::from(reached.complete));
                stamp(out, reached.version);
            }
            Imported::Denied(key, right) => {
                out.push(8 + u8::from(*right == Right::Write));
                key_ref(out, key);
            }
            Imported::Page(page) => {
                out.push(6 + u8::from(page.next.is_some()));
                number(out, page.keys.len() as u64);
                for key in page.keys.iter().chain(&page.next) {
                    bytes(out, key);
                }
            }
        }
    }
    number(out, it.properties.len() as u64);
    for (name, value) in &it.properties {
        bytes(out, name.as_bytes());
        out.push(value.is_some().into());
        if let Some(value) = value {
            bytes(out, value.as_bytes());
        }
    }
    out.push(it.seed.is_some().into());
    out.extend_from_slice(it.seed.as_ref().map_or(&[][..], |seed| seed));
}

fn read_captured(reader: &mut Reader<'_>, entries: bool) -> Result<CapturedReads, Malformed> {
    let mut it = CapturedReads::default();
    for _ in 0..reader.count()? {
        let flags = reader.flags(3)?;
        let key = read_key_ref(reader)?;
        let held = entries && flags & 2 != 0;
        it.reads.push(Read {
            key,
            hidden: flags & 1 != 0,
            // The key may be a range of the request payload, which is not stored here.
            entry: held.then(|| read_entry(reader, b"", b"")).transpose()?,
        });
    }
    for _ in 0..reader.count()? {
        let call = reader.small()?;
        let imported = match reader.u8()? {
            0 => Imported::Refused(Fault::Denied),
            1 => Imported::Refused(Fault::Quota),
            2 => Imported::Refused(Fault::Other(reader.text()?.to_owned())),
            3 => Imported::Watched,
            4 => Imported::Unwatched(false),
            5 => Imported::Unwatched(true),
            kind @ (6 | 7) => {
                let count = reader.count()?;
                let mut keys = Vec::new();
                for _ in 0..count {
                    keys.push(reader.bytes()?.to_vec());
                }
                let next = (kind == 7).then(|| reader.bytes()).transpose()?;
                Imported::Page(Page {
                    keys,
                    next: next.map(<[u8]>::to_vec),
                })
            }
            8 => Imported::Denied(read_key_ref(reader)?, Right::Read),
            9 => Imported::Denied(read_key_ref(reader)?, Right::Write),
            // Older versions of the program refuse to read the following kinds.
            10 => Imported::Followed(read_stamp(reader)?),
            kind @ (11 | 12) => Imported::Reached(Reached {
                version: read_stamp(reader)?,
                complete: kind == 12,
            }),
            _ => return Err(unknown!("kind of import result")),
        };
        it.imports.push((call, imported));
    }
    for _ in 0..reader.count()? {
        let name = reader.text()?.into();
        let value = (reader.u8()? != 0).then(|| reader.text()).transpose()?;
        it.properties.push((name, value.map(Into::into)));
    }
    it.seed = (reader.u8()? != 0).then(|| reader.array()).transpose()?;
    Ok(it)
}

fn outcome(out: &mut Vec<u8>, it: &Outcome) {
    let whole = matches!(it.payload, StoredPayload::Whole(_));
    out.push(
        u8::from(whole)
            | u8::from(it.version.is_some()) << 1
            | u8::from(it.command.is_some()) << 2
            | u8::from(it.put) << 3,
    );
    match &it.payload {
        StoredPayload::Whole(payload) => bytes(out, payload),
        StoredPayload::Digest(digest) => out.extend_from_slice(digest.as_bytes()),
    }
    if let Some(version) = it.version {
        stamp(out, version);
    }
    if let Some(command) = it.command {
        number(out, command.into());
    }
}

fn read_outcome(reader: &mut Reader<'_>) -> Result<Outcome, Malformed> {
    let flags = reader.flags(15)?;
    let payload = if flags & 1 != 0 {
        StoredPayload::Whole(Bytes::copy_from_slice(reader.bytes()?))
    } else {
        StoredPayload::Digest(blake3::Hash::from_bytes(reader.array()?))
    };
    Ok(Outcome {
        payload,
        version: (flags & 2 != 0).then(|| read_stamp(reader)).transpose()?,
        command: (flags & 4 != 0).then(|| reader.small()).transpose()?,
        put: flags & 8 != 0,
    })
}
