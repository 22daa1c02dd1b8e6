//! What the journal says: one record for each request that changed something or refused to, one for each
//! sweep, one for each change of watches that are kept, and few others.
//!
//! What enters: what a step did. What leaves: bytes, and from them the same again. A record holds what a
//! request did and everything it saw, so that recovery runs no policy, and a replay can.

use bytes::Bytes;

use super::codec::{Malformed, Reader, bytes, number};
use crate::clock::{Fence, Stamp};
use crate::policy::{Assignment, Fault, Host, Page, Policy};
use crate::request::{Delivery, Dialect};
use crate::store::{
    Change, Context, Entry, Evidence, Imported, Kept, KeyRef, Mode, Outcome, Peer, Read,
    Remembered, Right, WatchChange, WatchChanges, Write,
};

const HANDLED: u8 = 1;
const SWEPT: u8 = 2;
const POLICY: u8 = 3;
const STARTED: u8 = 4;
const STOPPED: u8 = 5;
const SESSIONS: u8 = 6;
const ASSIGNMENT: u8 = 7;
const WATCHES: u8 = 8;
/// A start behind a foreign broker.
const ATTACHED: u8 = 9;

/// One record.
#[derive(Debug, PartialEq)]
pub enum Record<'a> {
    /// A request was handled.
    Handled(Box<Handled<'a>>),
    /// Keys went because their time was over.
    Swept {
        /// The store's time.
        now_ms: u64,
        /// The store's clock after it.
        clock: Stamp,
        /// The removals.
        writes: Vec<Write>,
    },
    /// A policy that may answer from here on; it has the next number. Before there were assignments, the one
    /// that answers.
    Policy(PolicyRecord),
    /// From here on policies answer so.
    Assignment(Box<Assignment>),
    /// The store was started. What only another mode can use is forgotten there.
    Started {
        /// The number of this run.
        run: u32,
        /// The store's time.
        now_ms: u64,
        /// Whose broker its clients are connected to.
        mode: Mode,
    },
    /// The store was stopped.
    Stopped {
        /// The store's time.
        now_ms: u64,
    },
    /// What the broker has to remember of sessions: its own bytes.
    Sessions(&'a [u8]),
    /// Watches that are kept changed.
    Watches(WatchChanges),
}

/// A policy that answered requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyRecord {
    /// The BLAKE3 of its file.
    pub digest: blake3::Hash,
    /// Its name for itself.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Whether it is the one that came with the program.
    pub built_in: bool,
}

impl PolicyRecord {
    /// What records say of a policy.
    pub fn of<H: Host>(policy: &Policy<H>, built_in: bool) -> Self {
        Self {
            digest: policy.digest,
            name: policy.name.clone(),
            version: policy.version.clone(),
            built_in,
        }
    }
}

/// A request that was handled.
#[derive(Debug, PartialEq)]
pub struct Handled<'a> {
    /// Whose it was.
    pub client: &'a str,
    /// The command.
    pub payload: &'a [u8],
    /// The client's clock.
    pub timestamp: Option<&'a str>,
    /// The fencing token.
    pub fencing_token: Option<&'a str>,
    /// The policy, by its number.
    pub policy: u32,
    /// Whether a redelivery is owed the same answer.
    pub owed: bool,
    /// The store's clock after it.
    pub clock: Stamp,
    /// The request and its answer. The digest of the policy is not here, and the entries read are absent:
    /// both are what they were at that place of the journal.
    pub remembered: Remembered,
    /// What it wrote.
    pub writes: Vec<Write>,
}

/// Bits of the first byte of a handled request.
mod flag {
    pub(super) const OWED: u8 = 1;
    pub(super) const TIMESTAMP: u8 = 2;
    pub(super) const FENCING_TOKEN: u8 = 4;
}

/// What is written of a handled request.
pub(super) struct Source<'a> {
    pub(super) client: &'a str,
    pub(super) payload: &'a [u8],
    pub(super) timestamp: Option<&'a str>,
    pub(super) fencing_token: Option<&'a str>,
    pub(super) policy: u32,
    pub(super) owed: bool,
    pub(super) clock: Stamp,
    pub(super) remembered: &'a Remembered,
    pub(super) writes: &'a [Write],
}

pub(super) fn handled(out: &mut Vec<u8>, it: &Source<'_>) {
    out.push(HANDLED);
    let bit = |on: bool, bit: u8| if on { bit } else { 0 };
    out.push(
        bit(it.owed, flag::OWED)
            | bit(it.timestamp.is_some(), flag::TIMESTAMP)
            | bit(it.fencing_token.is_some(), flag::FENCING_TOKEN),
    );
    bytes(out, it.client.as_bytes());
    bytes(out, it.payload);
    for text in [it.timestamp, it.fencing_token].into_iter().flatten() {
        bytes(out, text.as_bytes());
    }
    number(out, it.policy.into());
    stamp(out, it.clock);
    remembered(out, it.remembered, false);
    number(out, it.writes.len() as u64);
    for written in it.writes {
        write(out, written);
    }
}

pub(super) fn swept(out: &mut Vec<u8>, now_ms: u64, clock: Stamp, writes: &[Write]) {
    out.push(SWEPT);
    number(out, now_ms);
    stamp(out, clock);
    number(out, writes.len() as u64);
    for it in writes {
        write(out, it);
    }
}

pub(super) fn policy(out: &mut Vec<u8>, policy: &PolicyRecord) {
    out.push(POLICY);
    policy_fields(out, policy);
}

pub(super) fn assignment(out: &mut Vec<u8>, assignment: &Assignment) {
    out.push(ASSIGNMENT);
    assignment_fields(out, assignment);
}

/// As JSON: it is small, seldom written, and later versions add to it.
pub(super) fn assignment_fields(out: &mut Vec<u8>, assignment: &Assignment) {
    // Writing plain fields to memory cannot fail; if it did, the record would say so when it is read.
    let json = serde_json::to_vec(assignment).unwrap_or_default();
    bytes(out, &json);
}

pub(super) fn read_assignment(reader: &mut Reader<'_>) -> Result<Assignment, Malformed> {
    serde_json::from_slice(reader.bytes()?)
        .map_err(|_| Malformed("an assignment of policies that this version cannot read"))
}

pub(super) fn policy_fields(out: &mut Vec<u8>, policy: &PolicyRecord) {
    out.extend_from_slice(policy.digest.as_bytes());
    bytes(out, policy.name.as_bytes());
    bytes(out, policy.version.as_bytes());
    out.push(policy.built_in.into());
}

pub(super) fn read_policy(reader: &mut Reader<'_>) -> Result<PolicyRecord, Malformed> {
    Ok(PolicyRecord {
        digest: blake3::Hash::from_bytes(reader.array()?),
        name: reader.text()?.to_owned(),
        version: reader.text()?.to_owned(),
        built_in: reader.u8()? != 0,
    })
}

pub(super) fn started(out: &mut Vec<u8>, run: u32, now_ms: u64, mode: Mode) {
    out.push(match mode {
        Mode::Embedded => STARTED,
        Mode::Foreign => ATTACHED,
    });
    number(out, run.into());
    number(out, now_ms);
}

pub(super) fn stopped(out: &mut Vec<u8>, now_ms: u64) {
    out.push(STOPPED);
    number(out, now_ms);
}

/// Writes what changed of sessions, as the broker says it.
pub fn sessions(out: &mut Vec<u8>, changes: &[u8]) {
    out.push(SESSIONS);
    out.extend_from_slice(changes);
}

pub(super) fn watches(out: &mut Vec<u8>, it: &WatchChanges) {
    out.push(WATCHES);
    watch_fields(out, it);
}

/// What became of a watch.
mod watch {
    pub(super) const BEGAN: u8 = 0;
    pub(super) const ENDED: u8 = 1;
    pub(super) const ALL_ENDED: u8 = 2;
}

pub(super) fn watch_fields(out: &mut Vec<u8>, it: &WatchChanges) {
    bytes(out, it.peer.client.as_bytes());
    number(out, it.peer.connection);
    number(out, it.peer.session);
    number(out, it.changes.len() as u64);
    for change in &it.changes {
        match change {
            WatchChange::Began(key, spoken) => {
                out.push(watch::BEGAN);
                dialect(out, *spoken);
                bytes(out, key);
            }
            WatchChange::Ended(key) => {
                out.push(watch::ENDED);
                bytes(out, key);
            }
            WatchChange::AllEnded => out.push(watch::ALL_ENDED),
        }
    }
}

pub(super) fn read_watches(reader: &mut Reader<'_>) -> Result<WatchChanges, Malformed> {
    let peer = Peer {
        client: reader.text()?.into(),
        connection: reader.number()?,
        session: reader.number()?,
    };
    let mut changes = Vec::new();
    for _ in 0..reader.count()? {
        changes.push(match reader.u8()? {
            watch::BEGAN => {
                let spoken = read_dialect(reader)?;
                WatchChange::Began(Bytes::copy_from_slice(reader.bytes()?), spoken)
            }
            watch::ENDED => WatchChange::Ended(Bytes::copy_from_slice(reader.bytes()?)),
            watch::ALL_ENDED => WatchChange::AllEnded,
            _ => return Err(Malformed("an unknown change of a watch")),
        });
    }
    Ok(WatchChanges { peer, changes })
}

/// Reads one record.
pub fn read(record: &[u8]) -> Result<Record<'_>, Malformed> {
    let mut reader = Reader(record);
    let record = match reader.u8()? {
        HANDLED => Record::Handled(Box::new(read_handled(&mut reader)?)),
        SWEPT => Record::Swept {
            now_ms: reader.number()?,
            clock: read_stamp(&mut reader)?,
            writes: read_writes(&mut reader, b"")?,
        },
        POLICY => Record::Policy(read_policy(&mut reader)?),
        kind @ (STARTED | ATTACHED) => Record::Started {
            run: reader.small()?,
            now_ms: reader.number()?,
            mode: match kind {
                ATTACHED => Mode::Foreign,
                _ => Mode::Embedded,
            },
        },
        STOPPED => Record::Stopped {
            now_ms: reader.number()?,
        },
        ASSIGNMENT => Record::Assignment(Box::new(read_assignment(&mut reader)?)),
        SESSIONS => Record::Sessions(std::mem::take(&mut reader.0)),
        WATCHES => Record::Watches(read_watches(&mut reader)?),
        _ => {
            return Err(Malformed(
                "a kind that this version does not know: use the version that wrote it, or a newer one",
            ));
        }
    };
    if !reader.is_empty() {
        return Err(Malformed("more bytes than its fields take"));
    }
    Ok(record)
}

fn read_handled<'a>(reader: &mut Reader<'a>) -> Result<Handled<'a>, Malformed> {
    let flags = reader.u8()?;
    let has = |bit: u8| flags & bit != 0;
    let client = reader.text()?;
    let payload = reader.bytes()?;
    let timestamp = has(flag::TIMESTAMP).then(|| reader.text()).transpose()?;
    let fencing_token = has(flag::FENCING_TOKEN)
        .then(|| reader.text())
        .transpose()?;
    let policy = reader.small()?;
    let clock = read_stamp(reader)?;
    let remembered = read_remembered(reader, false)?;
    Ok(Handled {
        client,
        payload,
        timestamp,
        fencing_token,
        policy,
        owed: has(flag::OWED),
        clock,
        remembered,
        writes: read_writes(reader, payload)?,
    })
}

/// A remembered request: in a record without what its keys held, in a snapshot with it.
pub(super) fn remembered(out: &mut Vec<u8>, it: &Remembered, entries: bool) {
    number(out, it.number);
    number(out, it.delivery.session);
    number(out, it.delivery.connection);
    number(out, it.delivery.packet_id.into());
    number(out, it.turn);
    out.extend_from_slice(&it.identity);
    number(out, it.context.now_ms);
    number(out, it.until_ms.saturating_sub(it.context.now_ms));
    stamp(out, it.context.clock);
    dialect(out, it.context.dialect);
    out.push(it.evidence.is_some().into());
    if let Some(it) = &it.evidence {
        evidence(out, it, entries);
    }
    outcome(out, &it.outcome);
}

pub(super) fn read_remembered(
    reader: &mut Reader<'_>,
    entries: bool,
) -> Result<Remembered, Malformed> {
    let number = reader.number()?;
    let delivery = Delivery {
        session: reader.number()?,
        connection: reader.number()?,
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
        evidence: (reader.u8()? != 0)
            .then(|| read_evidence(reader, entries))
            .transpose()?,
        outcome: read_outcome(reader)?,
    })
}

fn dialect(out: &mut Vec<u8>, it: Dialect) {
    out.push(match it {
        Dialect::Sdk => 0,
        Dialect::Documents => 1,
        Dialect::Preview => 2,
    });
}

fn read_dialect(reader: &mut Reader<'_>) -> Result<Dialect, Malformed> {
    Ok(match reader.u8()? {
        0 => Dialect::Sdk,
        1 => Dialect::Documents,
        2 => Dialect::Preview,
        _ => return Err(Malformed("an unknown dialect")),
    })
}

fn evidence(out: &mut Vec<u8>, it: &Evidence, entries: bool) {
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

fn read_evidence(reader: &mut Reader<'_>, entries: bool) -> Result<Evidence, Malformed> {
    let mut it = Evidence::default();
    for _ in 0..reader.count()? {
        let flags = reader.u8()?;
        let key = read_key_ref(reader)?;
        let held = entries && flags & 2 != 0;
        it.reads.push(Read {
            key,
            hidden: flags & 1 != 0,
            // Its key may stand in the request, which is not here.
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
            _ => return Err(Malformed("an unknown answer of an import")),
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
    let whole = matches!(it.payload, Kept::Whole(_));
    out.push(
        u8::from(whole)
            | u8::from(it.version.is_some()) << 1
            | u8::from(it.command.is_some()) << 2
            | u8::from(it.put) << 3,
    );
    match &it.payload {
        Kept::Whole(payload) => bytes(out, payload),
        Kept::Digest(digest) => out.extend_from_slice(digest.as_bytes()),
    }
    if let Some(version) = it.version {
        stamp(out, version);
    }
    if let Some(command) = it.command {
        number(out, command.into());
    }
}

fn read_outcome(reader: &mut Reader<'_>) -> Result<Outcome, Malformed> {
    let flags = reader.u8()?;
    let payload = if flags & 1 != 0 {
        Kept::Whole(Bytes::copy_from_slice(reader.bytes()?))
    } else {
        Kept::Digest(blake3::Hash::from_bytes(reader.array()?))
    };
    Ok(Outcome {
        payload,
        version: (flags & 2 != 0).then(|| read_stamp(reader)).transpose()?,
        command: (flags & 4 != 0).then(|| reader.small()).transpose()?,
        put: flags & 8 != 0,
    })
}

/// Bits of the first byte of a write.
mod kind {
    pub(super) const HIDDEN: u8 = 1;
    pub(super) const EXPIRED: u8 = 2;
    pub(super) const ENTRY: u8 = 4;
}

/// A write. Its key and value are parts of the payload where they stand there.
pub(super) fn write(out: &mut Vec<u8>, it: &Write) {
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

fn read_writes(reader: &mut Reader<'_>, payload: &[u8]) -> Result<Vec<Write>, Malformed> {
    let count = reader.count()?;
    let mut writes = Vec::new();
    for _ in 0..count {
        writes.push(read_write(reader, payload)?);
    }
    Ok(writes)
}

pub(super) fn read_write(reader: &mut Reader<'_>, payload: &[u8]) -> Result<Write, Malformed> {
    let flags = reader.u8()?;
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

const OUTSIDE: Malformed = Malformed("a part of the payload that it does not have");

fn entry(out: &mut Vec<u8>, it: &Entry, value_at: Option<u32>) {
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

fn read_entry(reader: &mut Reader<'_>, key: &[u8], payload: &[u8]) -> Result<Entry, Malformed> {
    let flags = reader.u8()?;
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

pub(super) fn stamp(out: &mut Vec<u8>, it: Stamp) {
    number(out, it.wall);
    number(out, it.counter.into());
}

pub(super) fn read_stamp(reader: &mut Reader<'_>) -> Result<Stamp, Malformed> {
    Ok(Stamp {
        wall: reader.number()?,
        counter: reader.small()?,
    })
}

fn key_ref(out: &mut Vec<u8>, it: &KeyRef) {
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

fn read_key_ref(reader: &mut Reader<'_>) -> Result<KeyRef, Malformed> {
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

#[cfg(test)]
mod tests;
