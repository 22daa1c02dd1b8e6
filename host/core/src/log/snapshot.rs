//! Snapshots, taken in pieces. Each piece is captured while the store's lock is held.
//!
//! `image.rs` explains why the pieces must have this order.

use super::codec::{Malformed, Reader, number, unknown};
use super::entries::{self, Entries};
use super::record::{self, PolicyRecord};
use crate::clock::Stamp;
use crate::limits;
use crate::policy::Assignment;
use crate::store::{Duplicates, Key, Peer, Scope, State, WatchChange, WatchChanges, Watches};

/// Entries without owners.
pub(super) const ENTRIES: u8 = 1;
pub(super) const REMEMBERED: u8 = 2;
pub(super) const SESSIONS: u8 = 3;
pub(super) const META: u8 = 4;
/// Only in backups.
pub(super) const MODULE: u8 = 5;
/// Only if watches are durable.
pub(super) const WATCHES: u8 = 6;
/// Entries with owners. Older versions refuse to read this.
pub(super) const OWNED_ENTRIES: u8 = 7;

/// The last piece of a snapshot, captured together with the last remembered requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    /// The clock.
    pub clock: Stamp,
    /// The time.
    pub now_ms: u64,
    /// The number of this run.
    pub run: u32,
    /// Policies by their number in records.
    pub policies: Vec<PolicyRecord>,
    /// The number of the active policy.
    pub active: Option<u32>,
    /// The assignment of policies; `None` if it was never changed.
    pub assignment: Option<Assignment>,
    /// The largest Receive Maximum that a client may have been sent; zero if it is not recorded.
    pub receive_max: u16,
    /// The clock at the beginning of the snapshot; older versions do not record it. All later
    /// changes are in the records after the beginning.
    pub begun: Option<Stamp>,
}

/// The position of a snapshot in progress.
#[derive(Debug, Default)]
pub struct Progress {
    next: Next,
    /// The clock at the beginning.
    begun: Option<Stamp>,
}

#[derive(Debug)]
enum Next {
    Entries { hidden: bool, after: Option<Key> },
    Watches { after: Option<(Peer, Scope, Key)> },
    Remembered { from: u64 },
    Meta(Vec<u8>),
    Done,
}

impl Default for Next {
    fn default() -> Self {
        Self::Entries {
            hidden: false,
            after: None,
        }
    }
}

impl Progress {
    /// Returns the next block, or `None` at the end.
    pub fn next(
        &mut self,
        state: &State,
        duplicates: &Duplicates,
        meta: impl FnOnce() -> Meta,
    ) -> Option<Vec<u8>> {
        let begun = *self.begun.get_or_insert_with(|| state.hlc.last());
        loop {
            match std::mem::replace(&mut self.next, Next::Done) {
                Next::Entries { hidden, after } => {
                    let (block, last) = entries::block(state, hidden, after.as_deref());
                    self.next = match (last, hidden) {
                        (None, true) => Next::Watches { after: None },
                        // The hidden entries follow the visible ones.
                        (None, false) => Next::Entries {
                            hidden: true,
                            after: None,
                        },
                        (after, hidden) => Next::Entries { hidden, after },
                    };
                    if block.len() > 1 {
                        return Some(block);
                    }
                }
                Next::Watches { after } => {
                    let (block, last) = match state.watches.are_durable() {
                        true => watches(&state.watches, after.as_ref()),
                        false => (Vec::new(), None),
                    };
                    self.next = match last {
                        Some(_) => Next::Watches { after: last },
                        None => Next::Remembered { from: 0 },
                    };
                    if block.len() > 1 {
                        return Some(block);
                    }
                }
                Next::Remembered { from } => {
                    let meta = Meta {
                        begun: Some(begun),
                        ..meta()
                    };
                    let (block, last) = remembered(duplicates, &meta.policies, from);
                    self.next = match last {
                        Some(last) => Next::Remembered { from: last + 1 },
                        // Captured at the same time as the last requests, so that no request falls
                        // between the two.
                        None => Next::Meta(meta_block(&meta, duplicates.recorded_below())),
                    };
                    return Some(block);
                }
                Next::Meta(block) => return Some(block),
                Next::Done => return None,
            }
        }
    }
}

/// Encodes a block of MQTT sessions.
pub fn sessions(changes: &[u8]) -> Vec<u8> {
    [&[SESSIONS][..], changes].concat()
}

/// Encodes a block with the file of a policy. A backup has no module directory next to it.
pub fn module_block(digest: &blake3::Hash, file: &[u8]) -> Vec<u8> {
    [&[MODULE][..], digest.as_bytes(), file].concat()
}

/// The content of a block, for readers that do not rebuild a whole store.
pub enum Block<'a> {
    /// Entries of a table.
    Entries(Entries<'a>),
    /// Requests that may be redelivered.
    Remembered,
    /// MQTT sessions, as encoded by the broker.
    Sessions(&'a [u8]),
    /// Watches.
    Watches,
    /// The last block of the store's part.
    Meta(Box<Meta>),
    /// The file of a policy.
    Module {
        /// The digest in the block. The reader must check it against the bytes.
        digest: blake3::Hash,
        /// Its bytes.
        file: &'a [u8],
    },
}

/// Reads the kind and the content of a block.
pub fn read_block(block: &[u8]) -> Result<Block<'_>, Malformed> {
    let mut reader = Reader(block);
    Ok(match reader.u8()? {
        ENTRIES | OWNED_ENTRIES => Block::Entries(Entries::new(reader)),
        REMEMBERED => Block::Remembered,
        SESSIONS => Block::Sessions(reader.0),
        WATCHES => Block::Watches,
        META => Block::Meta(Box::new(read_meta(&mut reader)?.0)),
        MODULE => Block::Module {
            digest: blake3::Hash::from_bytes(reader.array()?),
            file: reader.0,
        },
        _ => return Err(UNKNOWN),
    })
}

/// A block of a newer version.
pub(super) const UNKNOWN: Malformed = unknown!("kind of block");

/// Encodes watches after a position. Returns the last of them if there may be more.
fn watches(
    watches: &Watches,
    after: Option<&(Peer, Scope, Key)>,
) -> (Vec<u8>, Option<(Peer, Scope, Key)>) {
    let mut out = vec![WATCHES];
    let mut of_one: Option<WatchChanges> = None;
    let (mut bytes, mut last) = (0, None);
    for (count, (peer, scope, key, dialect)) in watches.range(after).enumerate() {
        let began = WatchChange::Began(scope, key.clone(), dialect);
        match &mut of_one {
            Some(it) if it.peer == *peer => it.changes.push(began),
            _ => {
                let next = WatchChanges {
                    peer: peer.clone(),
                    changes: vec![began],
                };
                if let Some(whole) = of_one.replace(next) {
                    record::watch_fields(&mut out, &whole);
                }
            }
        }
        bytes += key.len() + peer.client.len();
        if bytes >= limits::SNAPSHOT_PIECE_BYTES || count + 1 == limits::SNAPSHOT_PIECE_ENTRIES {
            last = Some((peer.clone(), scope, key.clone()));
            break;
        }
    }
    if let Some(whole) = of_one {
        record::watch_fields(&mut out, &whole);
    }
    (out, last)
}

fn remembered(
    duplicates: &Duplicates,
    policies: &[PolicyRecord],
    from: u64,
) -> (Vec<u8>, Option<u64>) {
    let mut out = vec![REMEMBERED];
    number(&mut out, policies.len() as u64);
    for policy in policies {
        out.extend_from_slice(policy.digest.as_bytes());
    }
    for (count, it) in duplicates.recorded(from).enumerate() {
        let digest = it.context.policy;
        // Every policy that answered has a number, because its record precedes its first answer.
        let Some(policy) = policies.iter().position(|policy| policy.digest == digest) else {
            continue;
        };
        number(&mut out, policy as u64);
        record::remembered(&mut out, &it, true);
        if out.len() >= limits::SNAPSHOT_PIECE_BYTES || count + 1 == limits::SNAPSHOT_PIECE_ENTRIES
        {
            return (out, Some(it.number));
        }
    }
    (out, None)
}

fn meta_block(it: &Meta, next_number: u64) -> Vec<u8> {
    let mut out = vec![META];
    record::stamp(&mut out, it.clock);
    number(&mut out, it.now_ms);
    number(&mut out, it.run.into());
    number(&mut out, next_number);
    number(&mut out, it.policies.len() as u64);
    for policy in &it.policies {
        record::policy_fields(&mut out, policy);
    }
    number(
        &mut out,
        it.active.map_or(0, |active| u64::from(active) + 1),
    );
    let more = it.receive_max > limits::RECEIVE_MAX_REMEMBERED_MIN || it.begun.is_some();
    if it.assignment.is_some() || more {
        record::assignment_fields(&mut out, it.assignment.as_ref());
    }
    if more {
        number(&mut out, it.receive_max.into());
    }
    if let Some(begun) = it.begun {
        record::stamp(&mut out, begun);
    }
    out
}

/// Reads the last block of a snapshot, and the number of the next request.
pub(super) fn read_meta(reader: &mut Reader<'_>) -> Result<(Meta, u64), Malformed> {
    let mut meta = Meta {
        clock: record::read_stamp(reader)?,
        now_ms: reader.number()?,
        run: reader.small()?,
        ..Meta::default()
    };
    let next_number = reader.number()?;
    for _ in 0..reader.count()? {
        meta.policies.push(record::read_policy(reader)?);
    }
    let active: u32 = reader.small()?;
    meta.active = active.checked_sub(1);
    if !reader.is_empty() {
        meta.assignment = record::read_assignment(reader)?;
    }
    if !reader.is_empty() {
        meta.receive_max = reader.small()?;
    }
    if !reader.is_empty() {
        meta.begun = Some(record::read_stamp(reader)?);
    }
    if !reader.is_empty() {
        return Err(unknown!("field"));
    }
    Ok((meta, next_number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn field_of_a_later_version_is_refused() {
        // With all optional fields.
        let meta = Meta {
            begun: Some(Stamp::default()),
            ..Meta::default()
        };
        let mut block = meta_block(&meta, 1);
        assert!(read_block(&block).is_ok());
        block.push(0);
        let error = read_block(&block).err().map(|it| it.to_string());
        assert!(error.is_some_and(|it| it.contains("an unknown field")));
    }
}
