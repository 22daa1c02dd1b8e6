//! The record format: one record for each request that changed something or must be answered
//! identically on redelivery, for each sweep, for each change of durable watches, and a few others.
//!
//! A record holds what a request did and everything it read, so that recovery runs no policy and a
//! replay can.

use bytes::Bytes;
use serde::de::DeserializeOwned;

use super::codec::{Malformed, Reader, bytes, number, unknown};
use crate::clock::Stamp;
use crate::policy::{Assignment, Host, Policy};
use crate::request::Request;
use crate::store::{
    self, Mode, NewDeadline, Peer, Remembered, Scope, WatchChange, WatchChanges, Write,
};
use statehouse_protocol::{ConnectionId, SessionId};

mod remembered;
mod written;

use remembered::{dialect, read_dialect};
pub(super) use remembered::{read_remembered, remembered};
pub(super) use written::{OTHER_OWNER, read_write, write};
use written::{read_writes, writes};

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
// Older versions of the program refuse to read the following kinds.
const RECEIVE_MAX: u8 = 10;
const POSTPONED: u8 = 11;
const DEADLINES: u8 = 12;

/// One record.
///
/// A new kind also concerns `Recorder` (writes it), `Image` (recovery), `snapshot` (state that
/// outlives the record), and in `statehouse-offline` `changes` (history) and `replay`.
#[derive(Debug, PartialEq)]
pub enum Record<'a> {
    /// A handled request.
    Handled(Box<Handled<'a>>),
    /// Keys expired.
    Swept {
        /// The time.
        now_ms: u64,
        /// The clock after the sweep.
        clock: Stamp,
        /// The removals.
        writes: Vec<Write>,
    },
    /// Names a policy that may answer from now on, and gives it the next number. In logs without
    /// assignments it is the active policy from now on.
    Policy(PolicyRecord),
    /// The assignment of policies from now on.
    Assignment(Box<Assignment>),
    /// The store was started. State that only the other mode can use is discarded.
    Started {
        /// The number of this run.
        run: u32,
        /// The time.
        now_ms: u64,
        /// The broker that clients are connected to.
        mode: Mode,
    },
    /// The store was stopped.
    Stopped {
        /// The time.
        now_ms: u64,
    },
    /// Changes of MQTT sessions, as encoded by the broker.
    Sessions(&'a [u8]),
    /// Changes of durable watches.
    Watches(WatchChanges),
    /// A higher Receive Maximum than ever before may be sent to clients. Must precede the first
    /// request of such a client, or recovery could evict requests too early.
    ReceiveMax {
        /// MQTT 5, section 3.2.2.3.3.
        receive_max: u16,
    },
    /// The clock was stepped ahead, so all requests are retained for longer. If a snapshot has seen
    /// this already, they are retained even longer, which is harmless. Keys that expired before
    /// count as recently expired.
    Postponed {
        /// The time after the step.
        now_ms: u64,
        /// The size of the step.
        by_ms: u64,
    },
    /// The clock was stepped ahead, so keys expire later. Older versions of the program recorded
    /// whole entries as [`Record::Swept`] instead.
    Deadlines {
        /// The time after the step.
        now_ms: u64,
        /// The keys. Those that a later record removes or replaces may have other deadlines.
        deadlines: Vec<NewDeadline>,
    },
}

/// Whether a record names a policy, or changes the roles of policies.
#[must_use]
pub fn names_policies(record: &[u8]) -> bool {
    matches!(record.first(), Some(&(POLICY | ASSIGNMENT)))
}

/// A policy, as named in records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyRecord {
    /// The BLAKE3 digest of its file.
    pub digest: blake3::Hash,
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Whether it is part of the program.
    pub built_in: bool,
}

impl PolicyRecord {
    /// Describes a policy.
    pub fn of<H: Host>(policy: &Policy<H>, built_in: bool) -> Self {
        Self {
            digest: policy.digest,
            name: policy.name.clone(),
            version: policy.version.clone(),
            built_in,
        }
    }
}

/// A handled request.
#[derive(Debug, PartialEq)]
pub struct Handled<'a> {
    /// The client id.
    pub client: &'a str,
    /// The payload.
    pub payload: &'a [u8],
    /// The client's timestamp.
    pub timestamp: Option<&'a str>,
    /// The fencing token.
    pub fencing_token: Option<&'a str>,
    /// The number of the policy.
    pub policy: u32,
    /// Whether a redelivery must get the same answer.
    pub repeatable: bool,
    /// The clock after the request.
    pub clock: Stamp,
    /// The request and its answer, without the digest of the policy and the entries that were read.
    /// Recovery takes both from the state at this position of the log.
    pub remembered: Remembered,
    /// Its writes.
    pub writes: Vec<Write>,
}

/// Flags in the first byte of a handled request.
mod flag {
    pub(super) const REPEATABLE: u8 = 1;
    pub(super) const TIMESTAMP: u8 = 2;
    pub(super) const FENCING_TOKEN: u8 = 4;
    pub(super) const ALL: u8 = 7;
}

/// Encodes a request that the policy with this number handled.
pub(super) fn handled(out: &mut Vec<u8>, policy: u32, request: &Request<'_>, it: &store::Handled) {
    out.push(HANDLED);
    let bit = |on: bool, bit: u8| if on { bit } else { 0 };
    out.push(
        bit(it.repeatable, flag::REPEATABLE)
            | bit(request.timestamp.is_some(), flag::TIMESTAMP)
            | bit(request.fencing_token.is_some(), flag::FENCING_TOKEN),
    );
    bytes(out, request.peer.client.as_bytes());
    bytes(out, request.payload);
    let texts = [request.timestamp, request.fencing_token];
    for text in texts.into_iter().flatten() {
        bytes(out, text.as_bytes());
    }
    number(out, policy.into());
    stamp(out, it.clock);
    remembered(out, &it.remembered, false);
    writes(out, &it.writes);
}

pub(super) fn swept(out: &mut Vec<u8>, now_ms: u64, clock: Stamp, all: &[Write]) {
    out.push(SWEPT);
    number(out, now_ms);
    stamp(out, clock);
    writes(out, all);
}

pub(super) fn policy(out: &mut Vec<u8>, policy: &PolicyRecord) {
    out.push(POLICY);
    policy_fields(out, policy);
}

pub(super) fn assignment(out: &mut Vec<u8>, assignment: &Assignment) {
    out.push(ASSIGNMENT);
    assignment_fields(out, Some(assignment));
}

/// Written as JSON: it is small, seldom written, and later versions add fields.
pub(super) fn assignment_fields(out: &mut Vec<u8>, assignment: Option<&Assignment>) {
    // Serializing plain fields to memory cannot fail. If it did, reading the record would report an
    // error.
    let json = serde_json::to_vec(&assignment).unwrap_or_default();
    bytes(out, &json);
}

pub(super) fn read_assignment<T: DeserializeOwned>(
    reader: &mut Reader<'_>,
) -> Result<T, Malformed> {
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

/// Encodes the start of a run.
pub fn started(out: &mut Vec<u8>, run: u32, now_ms: u64, mode: Mode) {
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

pub(super) fn receive_max(out: &mut Vec<u8>, receive_max: u16) {
    out.push(RECEIVE_MAX);
    number(out, receive_max.into());
}

pub(super) fn postponed(out: &mut Vec<u8>, now_ms: u64, by_ms: u64) {
    out.push(POSTPONED);
    number(out, now_ms);
    number(out, by_ms);
}

pub(super) fn deadlines(out: &mut Vec<u8>, now_ms: u64, deadlines: &[NewDeadline]) {
    out.push(DEADLINES);
    number(out, now_ms);
    number(out, deadlines.len() as u64);
    for it in deadlines {
        out.push(it.hidden.into());
        bytes(out, &it.key);
        number(out, it.expires_ms);
    }
}

fn read_deadlines(reader: &mut Reader<'_>) -> Result<Vec<NewDeadline>, Malformed> {
    let mut deadlines = Vec::new();
    for _ in 0..reader.count()? {
        deadlines.push(NewDeadline {
            hidden: reader.flags(1)? != 0,
            key: Bytes::copy_from_slice(reader.bytes()?),
            expires_ms: reader.number()?,
        });
    }
    Ok(deadlines)
}

/// Writes changes of MQTT sessions, as encoded by the broker.
pub fn sessions(out: &mut Vec<u8>, changes: &[u8]) {
    out.push(SESSIONS);
    out.extend_from_slice(changes);
}

pub(super) fn watches(out: &mut Vec<u8>, it: &WatchChanges) {
    out.push(WATCHES);
    watch_fields(out, it);
}

/// The kinds of watch changes.
mod watch {
    pub(super) const BEGAN: u8 = 0;
    pub(super) const ENDED: u8 = 1;
    pub(super) const ALL_ENDED: u8 = 2;
    // Older versions of the program refuse to read the following kinds.
    pub(super) const PREFIX_BEGAN: u8 = 3;
    pub(super) const PREFIX_ENDED: u8 = 4;
}

pub(super) fn watch_fields(out: &mut Vec<u8>, it: &WatchChanges) {
    bytes(out, it.peer.client.as_bytes());
    number(out, it.peer.connection.0);
    number(out, it.peer.session.0);
    number(out, it.changes.len() as u64);
    for change in &it.changes {
        match change {
            WatchChange::Began(scope, key, spoken) => {
                out.push(match scope {
                    Scope::Key => watch::BEGAN,
                    Scope::Prefix => watch::PREFIX_BEGAN,
                });
                dialect(out, *spoken);
                bytes(out, key);
            }
            WatchChange::Ended(scope, key) => {
                out.push(match scope {
                    Scope::Key => watch::ENDED,
                    Scope::Prefix => watch::PREFIX_ENDED,
                });
                bytes(out, key);
            }
            WatchChange::AllEnded => out.push(watch::ALL_ENDED),
        }
    }
}

pub(super) fn read_watches(reader: &mut Reader<'_>) -> Result<WatchChanges, Malformed> {
    let peer = Peer {
        client: reader.text()?.into(),
        connection: ConnectionId(reader.number()?),
        session: SessionId(reader.number()?),
    };
    let mut changes = Vec::new();
    for _ in 0..reader.count()? {
        let kind = reader.u8()?;
        let scope = match kind {
            watch::PREFIX_BEGAN | watch::PREFIX_ENDED => Scope::Prefix,
            _ => Scope::Key,
        };
        changes.push(match kind {
            watch::BEGAN | watch::PREFIX_BEGAN => {
                let spoken = read_dialect(reader)?;
                WatchChange::Began(scope, Bytes::copy_from_slice(reader.bytes()?), spoken)
            }
            watch::ENDED | watch::PREFIX_ENDED => {
                WatchChange::Ended(scope, Bytes::copy_from_slice(reader.bytes()?))
            }
            watch::ALL_ENDED => WatchChange::AllEnded,
            _ => return Err(unknown!("change of a watch")),
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
        RECEIVE_MAX => Record::ReceiveMax {
            receive_max: reader.small()?,
        },
        POSTPONED => Record::Postponed {
            now_ms: reader.number()?,
            by_ms: reader.number()?,
        },
        DEADLINES => Record::Deadlines {
            now_ms: reader.number()?,
            deadlines: read_deadlines(&mut reader)?,
        },
        _ => return Err(unknown!("kind")),
    };
    if !reader.is_empty() {
        return Err(Malformed("bytes after its last field"));
    }
    Ok(record)
}

fn read_handled<'a>(reader: &mut Reader<'a>) -> Result<Handled<'a>, Malformed> {
    let flags = reader.flags(flag::ALL)?;
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
        repeatable: has(flag::REPEATABLE),
        clock,
        remembered,
        writes: read_writes(reader, payload)?,
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

#[cfg(test)]
mod tests;
