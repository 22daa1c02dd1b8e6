//! Requests that were answered and may come again: QoS 1 delivers at least once.
//!
//! What enters: what a request saw and was answered. What leaves, when it comes again: the same. As the
//! broker only unacknowledged requests can come again, so the last of every live session are kept
//! however old (the protocol, section 9); beyond these a window of time, bounded in count and bytes.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;

use bytes::Bytes;
use statehouse_mqtt::Properties;

use super::capture::Evidence;
use crate::clock::Stamp;
use crate::limits;
use crate::request::{Delivery, Dialect};

/// What tells requests apart (the protocol, section 9); of one session.
pub type Identity = [u8; 16];

/// A request that was answered.
#[derive(Clone, Debug, PartialEq)]
pub struct Remembered {
    /// Its number among all that are remembered.
    pub number: u64,
    /// How it came.
    pub delivery: Delivery,
    /// Its number among the remembered requests of its session.
    pub turn: u64,
    /// What tells it apart.
    pub identity: Identity,
    /// Until when it is remembered at least, in the store's milliseconds.
    pub until_ms: u64,
    /// What it was handled with.
    pub context: Context,
    /// What it saw; none where only its answer is kept.
    pub evidence: Option<Evidence>,
    /// What it was answered.
    pub outcome: Outcome,
}

/// What a handler was given besides the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Context {
    /// The store's time.
    pub now_ms: u64,
    /// The store's clock before it.
    pub clock: Stamp,
    /// The form of the protocol.
    pub dialect: Dialect,
    /// The digest of the policy.
    pub policy: blake3::Hash,
}

/// What a request was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The payload.
    pub payload: Kept,
    /// The version that it is about.
    pub version: Option<Stamp>,
    /// Which of the policy's commands it was.
    pub command: Option<u16>,
    /// Whether it put anything.
    pub put: bool,
}

/// A payload, or what proves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kept {
    /// The bytes.
    Whole(Bytes),
    /// Their BLAKE3.
    Digest(blake3::Hash),
}

impl Kept {
    /// Keeps small ones, and any where nothing else could give it again.
    pub(super) fn new(payload: &Bytes, whole: bool) -> Self {
        if whole || payload.len() <= limits::OUTCOME_INLINE_BYTES_MAX {
            Self::Whole(payload.clone())
        } else {
            Self::Digest(blake3::hash(payload))
        }
    }

    /// Whether this is that payload.
    pub fn is(&self, payload: &[u8]) -> bool {
        match self {
            Self::Whole(bytes) => bytes == payload,
            Self::Digest(digest) => *digest == blake3::hash(payload),
        }
    }
}

impl Remembered {
    /// What keeping it costs, in bytes.
    pub fn cost_bytes(&self) -> u64 {
        let payload = match &self.outcome.payload {
            Kept::Whole(bytes) => bytes.len() as u64,
            Kept::Digest(_) => 0,
        };
        payload
            + self.evidence.as_ref().map_or(0, Evidence::cost_bytes)
            + limits::REMEMBERED_OVERHEAD_BYTES
    }
}

/// How much is remembered, from the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// The longest a request is remembered, in milliseconds.
    pub window_ms: u64,
    /// Requests beyond the last ones of live sessions.
    pub count_max: u64,
    /// All of them in bytes, beyond the last ones of live sessions.
    pub bytes_max: u64,
    /// The requests that a client can have on their way: its Receive Maximum. Of a live session twice as many
    /// are kept.
    pub per_session: u64,
}

impl Default for Retention {
    fn default() -> Self {
        Self {
            window_ms: limits::DUPLICATE_WINDOW_MS_DEFAULT,
            count_max: limits::DUPLICATES_MAX_DEFAULT,
            bytes_max: limits::DUPLICATE_BYTES_MAX_DEFAULT,
            per_session: statehouse_mqtt::Limits::default().receive_max.into(),
        }
    }
}

impl Retention {
    /// How long a request is remembered: as long as it lives itself, within bounds.
    fn of(&self, properties: &Properties) -> u64 {
        let expiry_ms = u64::from(properties.message_expiry_s().unwrap_or(0)) * 1000;
        expiry_ms
            .max(limits::DUPLICATE_WINDOW_MS_MIN)
            .min(self.window_ms)
    }

    /// Whether a request may still be on its way where its session has come to `turns`. Younger ones that are on
    /// their way too may have been answered after it; and older ones may be answered only now, since a request
    /// whose policy failed runs again when it is sent again.
    fn keeps(&self, turn: u64, turns: u64) -> bool {
        turn.saturating_add(self.per_session.saturating_mul(2)) > turns
    }
}

/// All that are remembered.
pub struct Duplicates {
    retention: Retention,
    entries: BTreeMap<u64, Slot>,
    /// The newest of each identity; older ones are found from there.
    newest: HashMap<(u64, Identity), u64>,
    sessions: HashMap<u64, Session>,
    /// Numbers in their order, but for those that are kept only as the last ones of their session.
    window: VecDeque<u64>,
    bytes: u64,
    next_number: u64,
    evicted: u64,
}

struct Slot {
    remembered: Arc<Remembered>,
    /// An older one of the same identity.
    older: Option<u64>,
    in_window: bool,
}

#[derive(Default)]
struct Session {
    /// How many of its requests were ever remembered.
    turns: u64,
    /// What is remembered of it, in order.
    held: VecDeque<u64>,
    /// The newest connection seen.
    connection: u64,
    /// Requests that came over it, while there may be resends of earlier ones among them.
    resends: Option<u64>,
}

impl Duplicates {
    /// Nothing yet.
    pub fn new(retention: Retention) -> Self {
        Self {
            retention,
            entries: BTreeMap::new(),
            newest: HashMap::new(),
            sessions: HashMap::new(),
            window: VecDeque::new(),
            bytes: 0,
            next_number: 1,
            evicted: 0,
        }
    }

    /// How much is remembered.
    pub fn retention(&self) -> Retention {
        self.retention
    }

    /// Until when a request of now is remembered at least.
    pub(super) fn until_ms(&self, properties: &Properties, now_ms: u64) -> u64 {
        now_ms.saturating_add(self.retention.of(properties))
    }

    /// Takes note of a request. True where it may have come before; most cannot, and what they are need not
    /// be found out.
    pub(super) fn arrive(&mut self, delivery: &Delivery) -> bool {
        let session = self.sessions.entry(delivery.session).or_default();
        if delivery.connection > session.connection {
            session.connection = delivery.connection;
            session.resends = (!session.held.is_empty()).then_some(0);
        }
        if let Some(resends) = &mut session.resends {
            // A client sends again first, and can have had no more than its Receive Maximum on their way.
            *resends += 1;
            if *resends <= self.retention.per_session {
                return true;
            }
            session.resends = None;
        }
        delivery.dup
    }

    /// The turn that the next remembered request of a session has.
    pub(super) fn next_turn(&self, session: u64) -> u64 {
        self.sessions.get(&session).map_or(0, |held| held.turns) + 1
    }

    /// Numbers below this were given out by now.
    pub fn continue_from(&mut self, next_number: u64) {
        self.next_number = self.next_number.max(next_number);
    }

    /// The answered request that this one is a duplicate of.
    pub fn find(&self, delivery: &Delivery, identity: &Identity) -> Option<Arc<Remembered>> {
        let mut number = *self.newest.get(&(delivery.session, *identity))?;
        let mut newest = None;
        loop {
            let Some(slot) = self.entries.get(&number) else {
                return newest.map(Arc::clone);
            };
            let original = slot.remembered.delivery;
            let same_packet = original.packet_id == delivery.packet_id;
            // Some clients send again without DUP.
            let resent = original.connection < delivery.connection && same_packet;
            if (delivery.dup && same_packet) || resent {
                return Some(slot.remembered.clone());
            }
            if delivery.dup {
                newest = newest.or(Some(&slot.remembered));
            }
            match slot.older {
                Some(older) => number = older,
                None => return newest.map(Arc::clone),
            }
        }
    }

    /// The number that the next one gets.
    pub fn next_number(&self) -> u64 {
        self.next_number
    }

    /// Remembers a request under the next number, or a recorded one under its own.
    pub fn insert(&mut self, remembered: Arc<Remembered>) {
        let number = remembered.number;
        self.next_number = self.next_number.max(number + 1);
        self.bytes += remembered.cost_bytes();
        let session = self
            .sessions
            .entry(remembered.delivery.session)
            .or_default();
        session.connection = session.connection.max(remembered.delivery.connection);
        session.turns = session.turns.max(remembered.turn);
        session.held.push_back(number);
        let key = (remembered.delivery.session, remembered.identity);
        let older = self.newest.insert(key, number);
        self.entries.insert(
            number,
            Slot {
                remembered,
                older,
                in_window: true,
            },
        );
        self.window.push_back(number);
    }

    /// Forgets what is neither young enough nor among the last of its session.
    pub fn evict(&mut self, session: u64, now_ms: u64) {
        self.advance(session);
        while let Some(number) = self.window.front() {
            let Some(slot) = self.entries.get(number) else {
                self.window.pop_front();
                continue;
            };
            if slot.remembered.until_ms > now_ms
                && self.window.len() as u64 <= self.retention.count_max
                && self.bytes <= self.retention.bytes_max
            {
                break;
            }
            let number = *number;
            self.window.pop_front();
            let protected = self.is_last(&slot.remembered);
            match self.entries.get_mut(&number) {
                Some(slot) if protected => slot.in_window = false,
                _ => self.remove(number),
            }
            if self.window.is_empty() {
                break;
            }
        }
        // The last ones of very many sessions could be any amount: memory is bounded before memories are.
        while self.bytes > self.retention.bytes_max.saturating_mul(2) {
            let Some((&number, _)) = self.entries.first_key_value() else {
                break;
            };
            self.evicted += 1;
            self.remove(number);
        }
    }

    /// Drops what a session's newest requests have pushed out of its last ones.
    fn advance(&mut self, session: u64) {
        loop {
            let Some(Session { turns, held, .. }) = self.sessions.get_mut(&session) else {
                return;
            };
            let Some(&number) = held.front() else {
                return;
            };
            match self.entries.get(&number) {
                // The window forgets in order, so all behind this one are in it too.
                Some(slot) if slot.in_window => return,
                Some(slot) if self.retention.keeps(slot.remembered.turn, *turns) => return,
                Some(_) => {
                    held.pop_front();
                    self.remove(number);
                }
                None => _ = held.pop_front(),
            }
        }
    }

    fn is_last(&self, remembered: &Remembered) -> bool {
        self.sessions
            .get(&remembered.delivery.session)
            .is_some_and(|held| self.retention.keeps(remembered.turn, held.turns))
    }

    fn remove(&mut self, number: u64) {
        let Some(slot) = self.entries.remove(&number) else {
            return;
        };
        self.bytes -= slot.remembered.cost_bytes();
        let key = (slot.remembered.delivery.session, slot.remembered.identity);
        if self.newest.get(&key) == Some(&number) {
            self.newest.remove(&key);
        }
    }

    /// Sessions that are no more can send nothing again.
    pub fn ended(&mut self, sessions: &[u64]) {
        for session in sessions {
            for number in self.sessions.remove(session).unwrap_or_default().held {
                self.remove(number);
            }
        }
    }

    /// Keeps only the sessions that still live, after a restart.
    pub fn retain_sessions(&mut self, live: &[u64]) {
        let live: HashSet<u64> = live.iter().copied().collect();
        let held = self.sessions.keys().copied();
        let dead: Vec<u64> = held.filter(|session| !live.contains(session)).collect();
        self.ended(&dead);
    }

    /// Those from `number` on, in their order.
    pub fn range(&self, number: u64) -> impl Iterator<Item = &Arc<Remembered>> {
        self.entries
            .range(number..)
            .map(|(_, slot)| &slot.remembered)
    }

    /// How many are remembered.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// What they cost, in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How many were forgotten although their session lives and might send them again.
    pub fn evicted(&self) -> u64 {
        self.evicted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RETENTION: Retention = Retention {
        window_ms: 60_000,
        count_max: 10,
        bytes_max: 100_000,
        per_session: 3,
    };

    fn delivery(session: u64, connection: u64, packet_id: u16, dup: bool) -> Delivery {
        Delivery {
            session,
            connection,
            packet_id,
            dup,
        }
    }

    /// A request that arrives at `now_ms`, is answered and remembered.
    fn answer(all: &mut Duplicates, from: Delivery, identity: u8, now_ms: u64) -> u64 {
        all.arrive(&from);
        let turn = all.next_turn(from.session);
        let number = all.next_number();
        all.insert(Arc::new(Remembered {
            number,
            delivery: from,
            turn,
            identity: [identity; 16],
            until_ms: now_ms + 60_000,
            context: Context {
                now_ms,
                clock: Stamp::default(),
                dialect: Dialect::Sdk,
                policy: blake3::Hash::from_bytes([0; 32]),
            },
            evidence: None,
            outcome: Outcome {
                payload: Kept::Whole(Bytes::from_static(b"+OK\r\n")),
                version: None,
                command: None,
                put: true,
            },
        }));
        all.evict(from.session, now_ms);
        number
    }

    fn found(all: &Duplicates, by: Delivery, identity: u8) -> Option<u64> {
        all.find(&by, &[identity; 16]).map(|it| it.number)
    }

    #[test]
    fn a_redelivery_is_told_from_a_request_that_looks_the_same() {
        let mut all = Duplicates::new(RETENTION);
        let first = answer(&mut all, delivery(1, 1, 7, false), 9, 0);
        assert_eq!(found(&all, delivery(1, 1, 7, true), 9), Some(first));
        // Some clients send again with DUP=0, on the next connection, with the same packet id.
        assert_eq!(found(&all, delivery(1, 2, 7, false), 9), Some(first));
        // A script that uses its correlation data again is not answered from memory.
        assert_eq!(found(&all, delivery(1, 1, 8, false), 9), None);
        assert_eq!(found(&all, delivery(1, 1, 7, false), 9), None);
        assert_eq!(found(&all, delivery(1, 2, 8, false), 9), None);
        // Another session, another payload.
        assert_eq!(found(&all, delivery(2, 3, 7, true), 9), None);
        assert_eq!(found(&all, delivery(1, 1, 7, true), 8), None);
    }

    #[test]
    fn of_requests_that_look_the_same_the_packet_id_names_the_right_one() {
        let mut all = Duplicates::new(RETENTION);
        let first = answer(&mut all, delivery(1, 1, 7, false), 9, 0);
        let second = answer(&mut all, delivery(1, 1, 8, false), 9, 0);
        assert_eq!(found(&all, delivery(1, 1, 7, true), 9), Some(first));
        assert_eq!(found(&all, delivery(1, 1, 8, true), 9), Some(second));
        assert_eq!(found(&all, delivery(1, 2, 7, false), 9), Some(first));
        // DUP with a packet id that none of them had: the newest.
        assert_eq!(found(&all, delivery(1, 1, 6, true), 9), Some(second));
    }

    #[test]
    fn only_what_may_have_come_before_is_looked_for() {
        let mut all = Duplicates::new(RETENTION);
        let suspect = |all: &mut Duplicates, by| all.arrive(&by);
        assert!(!suspect(&mut all, delivery(1, 1, 1, false)));
        answer(&mut all, delivery(1, 1, 2, false), 9, 0);
        assert!(!suspect(&mut all, delivery(1, 1, 3, false)));
        assert!(suspect(&mut all, delivery(1, 1, 3, true)));
        // On a resumed connection any of the first requests may be one of the last of the old.
        for packet_id in 4..7 {
            assert!(suspect(&mut all, delivery(1, 2, packet_id, false)));
        }
        assert!(!suspect(&mut all, delivery(1, 2, 7, false)));
        assert!(suspect(&mut all, delivery(1, 2, 7, true)));
        assert!(suspect(&mut all, delivery(1, 3, 8, false)));
    }

    /// Resends and reads once counted as turns, so a client that came back twice pushed out its own requests.
    #[test]
    fn what_changes_nothing_pushes_nothing_out() {
        let mut all = Duplicates::new(RETENTION);
        for packet_id in 1..=3 {
            answer(
                &mut all,
                delivery(1, 1, packet_id, false),
                packet_id as u8,
                0,
            );
        }
        for connection in 2..9 {
            for packet_id in 1..=3 {
                assert!(all.arrive(&delivery(1, connection, packet_id, false)));
            }
        }
        all.evict(1, 3_600_000);
        for packet_id in 1..=3u8 {
            assert!(found(&all, delivery(1, 9, packet_id.into(), false), packet_id).is_some());
        }
    }

    /// A snapshot may say that more were numbered than it still holds.
    #[test]
    fn no_number_is_given_twice() {
        let mut all = Duplicates::new(RETENTION);
        all.continue_from(17);
        assert_eq!(answer(&mut all, delivery(1, 1, 1, false), 1, 0), 17);
        all.continue_from(5);
        assert_eq!(all.next_number(), 18);
    }

    #[test]
    fn the_last_of_a_live_session_are_kept_however_old() {
        let mut all = Duplicates::new(RETENTION);
        for packet_id in 1..=8 {
            answer(
                &mut all,
                delivery(1, 1, packet_id, false),
                packet_id as u8,
                0,
            );
        }
        // Another client goes on for an hour.
        for packet_id in 1..=50 {
            answer(
                &mut all,
                delivery(2, 2, packet_id, false),
                packet_id as u8,
                3_600_000,
            );
        }
        for packet_id in 1..=8u8 {
            let again = delivery(1, 1, packet_id.into(), true);
            let kept = found(&all, again, packet_id).is_some();
            assert_eq!(kept, packet_id >= 3, "packet {packet_id}");
        }
        assert!(all.len() <= 10 + 6);
        // New requests of that client push its old ones out.
        answer(&mut all, delivery(1, 1, 9, false), 9, 3_600_000);
        assert!(found(&all, delivery(1, 1, 3, true), 3).is_none());
        assert!(found(&all, delivery(1, 1, 4, true), 4).is_some());
        all.ended(&[1]);
        assert!(found(&all, delivery(1, 1, 9, true), 9).is_none());
        all.retain_sessions(&[3]);
        assert_eq!((all.len(), all.bytes()), (0, 0));
        assert!(all.newest.is_empty() && all.sessions.is_empty());
    }

    #[test]
    fn count_and_bytes_are_bounded_and_sums_are_true() {
        let mut all = Duplicates::new(RETENTION);
        for n in 0..2_000u32 {
            let session = u64::from(n % 500) + 1;
            answer(&mut all, delivery(session, 1, n as u16, false), n as u8, 0);
            assert!(all.bytes() <= 2 * RETENTION.bytes_max + 1_000);
            assert!(all.window.len() as u64 <= RETENTION.count_max);
        }
        assert!(all.evicted() > 0, "500 sessions may not keep 3 each here");
        let recount: u64 = all.range(0).map(|it| it.cost_bytes()).sum();
        assert_eq!(all.bytes(), recount);
    }
}
