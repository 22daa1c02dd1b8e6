//! A remembered request as it waits: in one piece beside the others.
//!
//! What enters: a [`Remembered`]. What leaves, seldom: the same. There are a hundred thousand, one comes and one goes with
//! each write, and hardly any is ever asked for. So what nearly all have in common takes no place of its own: the policy
//! is a number, the one key that was read is a range of the payload, a short answer stands in the slot itself.

use std::num::NonZeroU64;
use std::ops::Range;

use bytes::Bytes;

use super::super::capture::{Evidence, KeyRef, Read};
use super::super::entry::Entry;
use super::super::remembered::{Context, Identity, Kept, Outcome, Remembered};
use crate::clock::Stamp;
use crate::request::{Delivery, Dialect};

/// A place in the window, or among those that are kept beyond it.
pub(super) struct Slot {
    pub(super) number: u64,
    pub(super) session: u64,
    pub(super) connection: u64,
    pub(super) turn: u64,
    pub(super) until_ms: u64,
    pub(super) identity: Identity,
    /// An older one of the same identity.
    pub(super) older: Option<NonZeroU64>,
    now_ms: u64,
    clock_wall: u64,
    version_wall: u64,
    saw: Saw,
    answer: Answer,
    pub(super) cost_bytes: u32,
    clock_counter: u32,
    version_counter: u32,
    /// Its policy's number among those that handled any.
    pub(super) policy: u32,
    command: Option<u16>,
    pub(super) packet_id: u16,
    dialect: Dialect,
    versioned: bool,
    put: bool,
    /// It was forgotten before its time in the window was over: nothing but its place is left.
    pub(super) forgotten: bool,
}

/// What a request saw.
enum Saw {
    /// Nobody kept that.
    Unknown,
    /// One visible key, which stands in its payload, and nothing else.
    Key(Range<u32>, Option<Entry>),
    /// Anything.
    Anything(Box<Evidence>),
}

/// Bytes of an answer that need no place of their own.
const SHORT_BYTES_MAX: usize = 22;

/// The payload of an answer, or what proves it.
enum Answer {
    Short(u8, [u8; SHORT_BYTES_MAX]),
    Long(Box<[u8]>),
    Digest(Box<blake3::Hash>),
}

impl Slot {
    /// `older` is what had its identity before it, `policy` the number of the one that handled it.
    pub(super) fn new(it: &Remembered, policy: u32, older: Option<NonZeroU64>) -> Self {
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
            saw: Saw::new(it.evidence.as_ref()),
            answer: Answer::new(&outcome.payload),
            // Far less than 4 GiB: evidence is bounded, and an answer is one packet.
            cost_bytes: u32::try_from(it.cost_bytes()).unwrap_or(u32::MAX),
            clock_counter: context.clock.counter,
            version_counter: version.counter,
            policy,
            command: outcome.command,
            packet_id: it.delivery.packet_id,
            dialect: context.dialect,
            versioned: outcome.version.is_some(),
            put: outcome.put,
            forgotten: false,
        }
    }

    /// What is remembered; `policy` is the digest of its policy.
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
                // Whatever is remembered was the first.
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
            evidence: self.saw.evidence(),
            outcome: Outcome {
                payload: self.answer.kept(),
                version: self.versioned.then_some(version),
                command: self.command,
                put: self.put,
            },
        }
    }

    /// Takes what is remembered out of its place, which stays.
    pub(super) fn take(&mut self) -> Option<Self> {
        if self.forgotten {
            return None;
        }
        let taken = Self {
            saw: std::mem::replace(&mut self.saw, Saw::Unknown),
            answer: std::mem::replace(&mut self.answer, Answer::Short(0, [0; SHORT_BYTES_MAX])),
            ..*self
        };
        self.forgotten = true;
        Some(taken)
    }
}

impl Saw {
    fn new(evidence: Option<&Evidence>) -> Self {
        let Some(evidence) = evidence else {
            return Self::Unknown;
        };
        if let [
            Read {
                key: KeyRef::Payload(range),
                hidden: false,
                entry,
            },
        ] = &evidence.reads[..]
            && evidence.imports.is_empty()
            && evidence.properties.is_empty()
            && evidence.seed.is_none()
        {
            return Self::Key(range.clone(), entry.clone());
        }
        Self::Anything(Box::new(evidence.clone()))
    }

    fn evidence(&self) -> Option<Evidence> {
        match self {
            Self::Unknown => None,
            Self::Key(range, entry) => Some(Evidence {
                reads: vec![Read {
                    key: KeyRef::Payload(range.clone()),
                    hidden: false,
                    entry: entry.clone(),
                }],
                ..Evidence::default()
            }),
            Self::Anything(evidence) => Some(Evidence::clone(evidence)),
        }
    }
}

impl Answer {
    fn new(payload: &Kept) -> Self {
        let bytes = match payload {
            Kept::Whole(bytes) => bytes,
            Kept::Digest(digest) => return Self::Digest(Box::new(*digest)),
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

    fn kept(&self) -> Kept {
        match self {
            Self::Short(len, short) => {
                Kept::Whole(Bytes::copy_from_slice(&short[..usize::from(*len)]))
            }
            Self::Long(bytes) => Kept::Whole(Bytes::copy_from_slice(bytes)),
            Self::Digest(digest) => Kept::Digest(**digest),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits;

    fn remembered(evidence: Option<Evidence>, payload: Kept) -> Remembered {
        Remembered {
            number: 5,
            delivery: Delivery {
                session: 6,
                connection: 7,
                packet_id: 8,
                dup: false,
            },
            turn: 9,
            identity: [10; 16],
            until_ms: 11,
            context: Context {
                now_ms: 12,
                clock: Stamp {
                    wall: 13,
                    counter: 14,
                },
                dialect: Dialect::Documents,
                policy: blake3::hash(b"policy"),
            },
            evidence,
            outcome: Outcome {
                payload,
                version: None,
                command: None,
                put: false,
            },
        }
    }

    fn comes_back(it: &Remembered) {
        let slot = Slot::new(it, 3, NonZeroU64::new(4));
        assert_eq!(slot.remembered(it.context.policy), *it);
        assert_eq!((slot.policy, slot.older), (3, NonZeroU64::new(4)));
        assert_eq!(u64::from(slot.cost_bytes), it.cost_bytes());
    }

    #[test]
    fn whatever_a_request_saw_comes_back() {
        let entry = Entry::new(b"key", b"value", Stamp::default(), None, None);
        let read = |key: KeyRef, hidden, entry| Read { key, hidden, entry };
        let of = |reads: Vec<Read>| Evidence {
            reads,
            ..Evidence::default()
        };
        let usual = read(KeyRef::Payload(3..9), false, Some(entry));
        let all = [
            of(vec![]),
            of(vec![usual.clone()]),
            of(vec![read(KeyRef::Payload(3..9), false, None)]),
            of(vec![read(KeyRef::Payload(3..9), true, None)]),
            of(vec![read(KeyRef::Own("key".into()), false, None)]),
            of(vec![usual.clone(), usual.clone()]),
            Evidence {
                properties: vec![("a".into(), None)],
                ..of(vec![usual.clone()])
            },
            Evidence {
                imports: vec![(1, super::super::super::Imported::Watched)],
                ..of(vec![usual.clone()])
            },
            Evidence {
                seed: Some([1; 32]),
                ..of(vec![usual])
            },
        ];
        let payload = Kept::Whole("+OK\r\n".into());
        comes_back(&remembered(None, payload.clone()));
        for evidence in all {
            comes_back(&remembered(Some(evidence), payload.clone()));
        }
    }

    #[test]
    fn whatever_it_was_answered_comes_back() {
        for len in [0, 5, SHORT_BYTES_MAX, SHORT_BYTES_MAX + 1, 300] {
            comes_back(&remembered(None, Kept::Whole(vec![b'x'; len].into())));
        }
        let mut it = remembered(None, Kept::Digest(blake3::hash(b"answer")));
        it.outcome.version = Some(Stamp {
            wall: 1,
            counter: 2,
        });
        it.outcome.command = Some(0);
        it.outcome.put = true;
        comes_back(&it);
    }

    #[test]
    fn a_slot_takes_less_than_what_it_is_counted_with() {
        // Its places in the indexes: an identity with its number, a number in its session's list.
        let indexes = 2 * (size_of::<(u64, Identity, u64)>() + 1 + size_of::<u64>());
        assert!((size_of::<Slot>() + indexes) as u64 <= limits::REMEMBERED_OVERHEAD_BYTES);
    }
}
