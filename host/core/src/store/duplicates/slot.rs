//! The compact form of a [`Remembered`] request in the dedup table.
//!
//! There are a hundred thousand of them, each write adds and removes one, and few are ever looked
//! up. So the common case takes no allocation: the policy is an index, the only key read is a range
//! of the payload, and a short answer is stored in the slot.

use std::hint::black_box;
use std::num::NonZeroU64;
use std::ops::Range;

use bytes::Bytes;

use super::super::entry::Entry;
use super::super::read_set::{CapturedReads, KeyRef, Read};
use super::super::remembered::{Context, Identity, Outcome, Remembered, StoredPayload};
use crate::clock::Stamp;
use crate::request::{Delivery, Dialect};
use statehouse_protocol::{ConnectionId, SessionId};

/// A request in the window, or among those that are retained beyond it.
pub(super) struct Slot {
    pub(super) number: u64,
    pub(super) session: SessionId,
    pub(super) connection: ConnectionId,
    pub(super) turn: u64,
    pub(super) until_ms: u64,
    pub(super) identity: Identity,
    /// The next older request of the same identity.
    pub(super) older: Option<NonZeroU64>,
    now_ms: u64,
    clock_wall: u64,
    version_wall: u64,
    captured: Captured,
    answer: Answer,
    pub(super) cost_bytes: u32,
    clock_counter: u32,
    version_counter: u32,
    /// The index of its policy.
    pub(super) policy: u32,
    command: Option<u16>,
    pub(super) packet_id: u16,
    dialect: Dialect,
    versioned: bool,
    put: bool,
    /// Whether the log has a record of it.
    pub(super) recorded: bool,
    /// Evicted early: only the place in the window is left.
    pub(super) forgotten: bool,
}

/// The captured reads of a request.
enum Captured {
    /// They were not stored.
    Unknown,
    /// One visible key, as a range of the payload, and nothing else.
    Key(Range<u32>, Option<Entry>),
    /// Any other reads.
    Many(Box<CapturedReads>),
}

/// Longest answer that is stored in the slot itself.
const SHORT_BYTES_MAX: usize = 22;

/// The payload of an answer, or its digest.
enum Answer {
    Short(u8, [u8; SHORT_BYTES_MAX]),
    Long(Box<[u8]>),
    Digest(Box<blake3::Hash>),
}

impl Slot {
    /// `older` is the previous request of the same identity, `policy` the index of the policy.
    pub(super) fn new(
        it: &Remembered,
        recorded: bool,
        policy: u32,
        older: Option<NonZeroU64>,
    ) -> Self {
        let (context, outcome) = (&it.context, &it.outcome);
        let version = outcome.version.unwrap_or_default();
        Self {
            number: it.number,
            session: it.delivery.session,
            connection: it.delivery.connection,
            turn: it.turn,
            until_ms: it.until_ms,
            identity: it.identity,
            older,
            now_ms: context.now_ms,
            clock_wall: context.clock.wall,
            version_wall: version.wall,
            captured: Captured::new(it.captured.as_ref()),
            answer: Answer::new(&outcome.payload),
            // Far below 4 GiB: captured reads are bounded, and an answer is one packet.
            cost_bytes: u32::try_from(it.cost_bytes()).unwrap_or(u32::MAX),
            clock_counter: context.clock.counter,
            version_counter: version.counter,
            policy,
            command: outcome.command,
            packet_id: it.delivery.packet_id,
            dialect: context.dialect,
            versioned: outcome.version.is_some(),
            put: outcome.put,
            recorded,
            forgotten: false,
        }
    }

    /// Expands the slot. `policy` is the digest of its policy.
    pub(super) fn remembered(&self, policy: blake3::Hash) -> Remembered {
        let version = Stamp {
            wall: self.version_wall,
            counter: self.version_counter,
        };
        Remembered {
            number: self.number,
            delivery: Delivery {
                session: self.session,
                connection: self.connection,
                packet_id: self.packet_id,
                // A redelivery is never remembered itself.
                dup: false,
            },
            turn: self.turn,
            identity: self.identity,
            until_ms: self.until_ms,
            context: Context {
                now_ms: self.now_ms,
                clock: Stamp {
                    wall: self.clock_wall,
                    counter: self.clock_counter,
                },
                dialect: self.dialect,
                policy,
            },
            captured: self.captured.captured(),
            outcome: Outcome {
                payload: self.answer.stored(),
                version: self.versioned.then_some(version),
                command: self.command,
                put: self.put,
            },
        }
    }

    /// Loads the entry that it has read, whose reference count its removal changes.
    pub(super) fn load_entry(&self) {
        if let Captured::Key(_, Some(entry)) = &self.captured {
            black_box(entry.version());
        }
    }

    /// Takes the contents out of the slot, which keeps its place in the window.
    pub(super) fn take(&mut self) -> Option<Self> {
        if self.forgotten {
            return None;
        }
        let taken = Self {
            captured: std::mem::replace(&mut self.captured, Captured::Unknown),
            answer: std::mem::replace(&mut self.answer, Answer::Short(0, [0; SHORT_BYTES_MAX])),
            ..*self
        };
        self.forgotten = true;
        Some(taken)
    }
}

impl Captured {
    fn new(captured: Option<&CapturedReads>) -> Self {
        let Some(captured) = captured else {
            return Self::Unknown;
        };
        if let [
            Read {
                key: KeyRef::Payload(range),
                hidden: false,
                entry,
            },
        ] = &captured.reads[..]
            && captured.imports.is_empty()
            && captured.properties.is_empty()
            && captured.seed.is_none()
        {
            return Self::Key(range.clone(), entry.clone());
        }
        Self::Many(Box::new(captured.clone()))
    }

    fn captured(&self) -> Option<CapturedReads> {
        match self {
            Self::Unknown => None,
            Self::Key(range, entry) => Some(CapturedReads {
                reads: vec![Read {
                    key: KeyRef::Payload(range.clone()),
                    hidden: false,
                    entry: entry.clone(),
                }],
                ..CapturedReads::default()
            }),
            Self::Many(captured) => Some(CapturedReads::clone(captured)),
        }
    }
}

impl Answer {
    fn new(payload: &StoredPayload) -> Self {
        let bytes = match payload {
            StoredPayload::Whole(bytes) => bytes,
            StoredPayload::Digest(digest) => return Self::Digest(Box::new(*digest)),
        };
        let mut short = [0; SHORT_BYTES_MAX];
        match (short.get_mut(..bytes.len()), u8::try_from(bytes.len())) {
            (Some(part), Ok(len)) => {
                part.copy_from_slice(bytes);
                Self::Short(len, short)
            }
            _ => Self::Long(bytes[..].into()),
        }
    }

    fn stored(&self) -> StoredPayload {
        match self {
            Self::Short(len, short) => {
                StoredPayload::Whole(Bytes::copy_from_slice(&short[..usize::from(*len)]))
            }
            Self::Long(bytes) => StoredPayload::Whole(Bytes::copy_from_slice(bytes)),
            Self::Digest(digest) => StoredPayload::Digest(**digest),
        }
    }
}

/// The policies of remembered requests, with a count each. There are few, so slots refer to them by
/// index.
#[derive(Default)]
pub(super) struct Policies(pub(super) Vec<(blake3::Hash, usize)>);

impl Policies {
    /// Counts a request of a policy and returns the index of the policy.
    pub(super) fn add(&mut self, policy: blake3::Hash) -> u32 {
        let all = &mut self.0;
        let at = all.iter().position(|(it, _)| *it == policy);
        // Reuses the index of a policy that has no requests left.
        let at = at.or_else(|| all.iter().position(|(_, count)| *count == 0));
        let at = at.unwrap_or_else(|| {
            all.push((policy, 0));
            all.len() - 1
        });
        all[at].0 = policy;
        all[at].1 += 1;
        u32::try_from(at)
            .expect("every policy here has a remembered request, and those fit into memory")
    }

    pub(super) fn remove(&mut self, number: u32) {
        self.0[number as usize].1 -= 1;
    }

    pub(super) fn digest(&self, number: u32) -> blake3::Hash {
        self.0[number as usize].0
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::remembered;
    use super::*;
    use crate::limits;

    fn check_round_trip(it: &Remembered) {
        let slot = Slot::new(it, true, 3, NonZeroU64::new(4));
        assert_eq!(slot.remembered(it.context.policy), *it);
        assert_eq!((slot.policy, slot.older), (3, NonZeroU64::new(4)));
        assert_eq!(u64::from(slot.cost_bytes), it.cost_bytes());
    }

    #[test]
    fn captured_reads_survive_a_round_trip() {
        let entry = Entry::new(b"key", b"value", Stamp::default(), None, None);
        let read = |key: KeyRef, hidden, entry| Read { key, hidden, entry };
        let of = |reads: Vec<Read>| CapturedReads {
            reads,
            ..CapturedReads::default()
        };
        let usual = read(KeyRef::Payload(3..9), false, Some(entry));
        let all = [
            of(vec![]),
            of(vec![usual.clone()]),
            of(vec![read(KeyRef::Payload(3..9), false, None)]),
            of(vec![read(KeyRef::Payload(3..9), true, None)]),
            of(vec![read(KeyRef::Own("key".into()), false, None)]),
            of(vec![usual.clone(), usual.clone()]),
            CapturedReads {
                properties: vec![("a".into(), None)],
                ..of(vec![usual.clone()])
            },
            CapturedReads {
                imports: vec![(1, super::super::super::Imported::Watched)],
                ..of(vec![usual.clone()])
            },
            CapturedReads {
                seed: Some([1; 32]),
                ..of(vec![usual])
            },
        ];
        let payload = StoredPayload::Whole("+OK\r\n".into());
        check_round_trip(&remembered(None, payload.clone()));
        for captured in all {
            check_round_trip(&remembered(Some(captured), payload.clone()));
        }
    }

    #[test]
    fn outcomes_survive_a_round_trip() {
        for len in [0, 5, SHORT_BYTES_MAX, SHORT_BYTES_MAX + 1, 300] {
            let payload = StoredPayload::Whole(vec![b'x'; len].into());
            check_round_trip(&remembered(None, payload));
        }
        let mut it = remembered(None, StoredPayload::Digest(blake3::hash(b"answer")));
        it.outcome.version = Some(Stamp {
            wall: 1,
            counter: 2,
        });
        it.outcome.command = Some(0);
        it.outcome.put = true;
        check_round_trip(&it);
    }

    #[test]
    fn slot_is_no_larger_than_its_accounted_overhead() {
        // Its entries in the indexes: a hash with its number, and a number in its session's
        // list. Beyond the window, a number with a box.
        let window = 2 * (3 * size_of::<u32>() + size_of::<u64>());
        let kept = window + 2 * (size_of::<u64>() + size_of::<Box<Slot>>());
        assert!((size_of::<Slot>() + kept) as u64 <= limits::REMEMBERED_OVERHEAD_BYTES);
    }
}
