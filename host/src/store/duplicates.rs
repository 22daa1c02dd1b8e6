//! Requests that were answered and may come again: QoS 1 delivers at least once.
//!
//! What enters: what a request saw and was answered. What leaves, when it comes again: the same. As the
//! broker only unacknowledged requests can come again, so the last of every live session are kept
//! however old (the protocol, section 9); beyond these a window of time, bounded in count and bytes.
//!
//! Behind a foreign broker nobody knows which sessions live or what is unacknowledged there: only the window keeps
//! ([`Retention::per_session`] is zero), and of a client that has nothing in it nothing is held at all.

use std::collections::{BTreeMap, HashMap, VecDeque};
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

    /// What proves it.
    pub fn digest(&self) -> blake3::Hash {
        match self {
            Self::Whole(bytes) => blake3::hash(bytes),
            Self::Digest(digest) => *digest,
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
    /// are kept. Zero where no session is known to live: then only the window keeps.
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
    /// The youngest, in the order of their numbers.
    window: VecDeque<Slot>,
    /// Older ones, which are kept only as the last ones of their session. All their numbers are lower.
    kept: BTreeMap<u64, Slot>,
    /// The newest of each identity; older ones are found from there.
    newest: HashMap<(u64, Identity), u64>,
    sessions: HashMap<u64, Session>,
    /// How many of them each policy handled. Mostly there is one.
    policies: Vec<(blake3::Hash, usize)>,
    count: usize,
    bytes: u64,
    next_number: u64,
    evicted: u64,
}

/// A place in the window. What is asked of each that leaves it stands here: the rest is long out of any cache.
struct Slot {
    number: u64,
    /// None once it was forgotten before its time in the window was over.
    remembered: Option<Arc<Remembered>>,
    session: u64,
    turn: u64,
    until_ms: u64,
    cost_bytes: u64,
    /// An older one of the same identity.
    older: Option<u64>,
}

#[derive(Default)]
struct Session {
    /// How many of its requests were ever remembered.
    turns: u64,
    /// What is remembered of it, in order.
    held: VecDeque<u64>,
    /// What that costs.
    bytes: u64,
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
            window: VecDeque::new(),
            kept: BTreeMap::new(),
            newest: HashMap::new(),
            sessions: HashMap::new(),
            policies: Vec::new(),
            count: 0,
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
        if self.retention.per_session == 0 {
            // Connections are not seen, and nobody says when a session ends: one that only reads leaves no trace.
            return delivery.dup;
        }
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
            let found = self.slot(number);
            let Some((slot, remembered)) = found.and_then(|it| Some((it, it.remembered.as_ref()?)))
            else {
                return newest.map(Arc::clone);
            };
            let original = remembered.delivery;
            let same_packet = original.packet_id == delivery.packet_id;
            // Some clients send again without DUP.
            let resent = original.connection < delivery.connection && same_packet;
            if (delivery.dup && same_packet) || resent {
                return Some(remembered.clone());
            }
            if delivery.dup {
                newest = newest.or(Some(remembered));
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

    /// Remembers a request under the next number, or a recorded one under its own, which must be above all before.
    pub fn insert(&mut self, remembered: Arc<Remembered>) {
        let number = remembered.number;
        let delivery = remembered.delivery;
        let cost_bytes = remembered.cost_bytes();
        self.next_number = self.next_number.max(number + 1);
        self.bytes += cost_bytes;
        self.count += 1;
        let policy = remembered.context.policy;
        match self.policies.iter_mut().find(|(it, _)| *it == policy) {
            Some((_, count)) => *count += 1,
            None => self.policies.push((policy, 1)),
        }
        let session = self.sessions.entry(delivery.session).or_default();
        session.connection = session.connection.max(delivery.connection);
        session.turns = session.turns.max(remembered.turn);
        session.held.push_back(number);
        session.bytes += cost_bytes;
        let key = (delivery.session, remembered.identity);
        let older = self.newest.insert(key, number);
        self.window.push_back(Slot {
            number,
            session: delivery.session,
            turn: remembered.turn,
            until_ms: remembered.until_ms,
            cost_bytes,
            remembered: Some(remembered),
            older,
        });
    }

    /// Forgets what is neither young enough nor among the last of its session. Called after each insertion, with
    /// its session.
    pub fn evict(&mut self, session: u64, now_ms: u64) {
        self.advance(session);
        while let Some(slot) = self.window.front() {
            if slot.remembered.is_some()
                && slot.until_ms > now_ms
                && self.window.len() as u64 <= self.retention.count_max
                && self.bytes <= self.retention.bytes_max
            {
                break;
            }
            let Some(slot) = self.window.pop_front() else {
                break;
            };
            if slot.remembered.is_none() {
                continue;
            }
            if self.is_last(&slot) {
                self.kept.insert(slot.number, slot);
            } else {
                if self.retention.per_session == 0 && slot.until_ms > now_ms {
                    self.forget_early();
                }
                self.release(slot);
            }
        }
        // The last ones of very many sessions could be any amount, and memory is bounded before memories are.
        while self.bytes > self.retention.bytes_max.saturating_mul(2) && self.evict_early(session) {
        }
    }

    /// Forgets one request although its session may send it again: where this session holds more than its share, its
    /// own oldest, else the oldest of all.
    fn evict_early(&mut self, session: u64) -> bool {
        let share = self.retention.bytes_max.saturating_mul(2) / self.sessions.len().max(1) as u64;
        let own = self.sessions.get(&session);
        let own = own.filter(|it| it.bytes > share && it.held.len() > 1);
        let oldest = || {
            let kept = self.kept.first_key_value().map(|(number, _)| *number);
            let there = |slot: &&Slot| slot.remembered.is_some();
            kept.or_else(|| self.window.iter().find(there).map(|slot| slot.number))
        };
        let Some(number) = own.and_then(|it| it.held.front().copied()).or_else(oldest) else {
            return false;
        };
        if self.evicted == 0 {
            tracing::warn!(
                bytes = self.bytes,
                sessions = self.sessions.len(),
                "requests that their clients may send again are forgotten, since the last ones of all sessions take twice max_duplicate_bytes: raise it, or let sessions that are not used expire sooner"
            );
        }
        self.evicted += 1;
        self.remove(number);
        true
    }

    /// Counts a request that leaves the window before its time, where only the window keeps.
    fn forget_early(&mut self) {
        if self.evicted == 0 {
            tracing::warn!(
                count = self.count,
                bytes = self.bytes,
                "requests are forgotten before their time, and would run twice if they came again: raise max_duplicates and max_duplicate_bytes, or shorten duplicate_window"
            );
        }
        self.evicted += 1;
    }

    /// Drops what a session's newest requests have pushed out of its last ones.
    fn advance(&mut self, session: u64) {
        // The window forgets in order, so all behind its first are in it too.
        let window_from = self.window.front().map_or(u64::MAX, |slot| slot.number);
        while let Some(Session { turns, held, .. }) = self.sessions.get(&session)
            && let Some(&number) = held.front()
            && number < window_from
            && let Some(slot) = self.kept.get(&number)
            && !self.retention.keeps(slot.turn, *turns)
        {
            self.remove(number);
        }
    }

    fn is_last(&self, slot: &Slot) -> bool {
        self.sessions
            .get(&slot.session)
            .is_some_and(|session| self.retention.keeps(slot.turn, session.turns))
    }

    fn slot(&self, number: u64) -> Option<&Slot> {
        match self.place(number) {
            Some(place) => self.window.get(place),
            None => self.kept.get(&number),
        }
    }

    /// Where a number stands in the window. There are hardly any gaps, so the first guess is mostly right.
    fn place(&self, number: u64) -> Option<usize> {
        let first = self.window.front()?.number;
        let guess = usize::try_from(number.checked_sub(first)?).ok()?;
        if self
            .window
            .get(guess)
            .is_some_and(|slot| slot.number == number)
        {
            return Some(guess);
        }
        self.window
            .binary_search_by_key(&number, |slot| slot.number)
            .ok()
    }

    fn remove(&mut self, number: u64) {
        let taken = match self.place(number) {
            Some(place) => self.window.get_mut(place).and_then(|slot| {
                let remembered = slot.remembered.take()?;
                Some(Slot {
                    remembered: Some(remembered),
                    ..*slot
                })
            }),
            None => self.kept.remove(&number),
        };
        if let Some(slot) = taken {
            self.release(slot);
        }
    }

    /// Settles the accounts of one that was taken out of its place.
    fn release(&mut self, slot: Slot) {
        let Some(remembered) = slot.remembered else {
            return;
        };
        self.bytes -= slot.cost_bytes;
        self.count -= 1;
        let by_it = |(it, _): &(blake3::Hash, usize)| *it == remembered.context.policy;
        if let Some(at) = self.policies.iter().position(by_it) {
            self.policies[at].1 -= 1;
            if self.policies[at].1 == 0 {
                self.policies.remove(at);
            }
        }
        let key = (slot.session, remembered.identity);
        if self.newest.get(&key) == Some(&slot.number) {
            self.newest.remove(&key);
        }
        if let Some(session) = self.sessions.get_mut(&slot.session) {
            session.bytes -= slot.cost_bytes;
            // Nearly always its first.
            if session.held.front() == Some(&slot.number) {
                session.held.pop_front();
            } else if let Ok(place) = session.held.binary_search(&slot.number) {
                session.held.remove(place);
            }
            if session.held.is_empty() && self.retention.per_session == 0 {
                self.sessions.remove(&slot.session);
            }
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
    pub fn retain(&mut self, lives: impl Fn(u64) -> bool) {
        let held = self.sessions.keys().copied();
        let dead: Vec<u64> = held.filter(|session| !lives(*session)).collect();
        self.ended(&dead);
    }

    /// Those from `number` on, in their order.
    pub fn range(&self, number: u64) -> impl Iterator<Item = &Arc<Remembered>> {
        let from = self.window.partition_point(|slot| slot.number < number);
        let kept = self.kept.range(number..).map(|(_, slot)| slot);
        kept.chain(self.window.range(from..))
            .filter_map(|slot| slot.remembered.as_ref())
    }

    /// The policies that handled them, each once.
    pub fn policies(&self) -> Vec<blake3::Hash> {
        self.policies.iter().map(|(policy, _)| *policy).collect()
    }

    /// How many are remembered.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// What they cost, in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How many were forgotten although their session lives and might send them again, or before their time.
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
                policy: blake3::Hash::from_bytes([identity / 100; 32]),
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
        all.retain(|session| session == 3);
        assert_eq!((all.len(), all.bytes()), (0, 0));
        assert!(all.newest.is_empty() && all.sessions.is_empty());
    }

    /// The oldest of all once went first, so that many busy clients made the store forget an idle one's.
    #[test]
    fn who_holds_most_gives_way_first() {
        let retention = Retention {
            bytes_max: 20_000,
            per_session: 100,
            ..RETENTION
        };
        let mut all = Duplicates::new(retention);
        for packet_id in 1..=3 {
            answer(
                &mut all,
                delivery(1, 1, packet_id, false),
                packet_id as u8,
                0,
            );
        }
        for n in 0..400u16 {
            answer(&mut all, delivery(2, 1, n, false), n as u8, 0);
        }
        assert!(all.evicted() > 0 && all.bytes() <= 2 * retention.bytes_max);
        for packet_id in 1..=3u8 {
            let again = delivery(1, 1, packet_id.into(), true);
            assert!(
                found(&all, again, packet_id).is_some(),
                "packet {packet_id}"
            );
        }
    }

    #[test]
    fn a_session_that_is_idle_holds_nothing_of_what_was_forgotten() {
        let mut all = Duplicates::new(Retention {
            per_session: 1,
            ..RETENTION
        });
        for n in 0..5_000u32 {
            let session = u64::from(n / 100) + 1;
            answer(&mut all, delivery(session, 1, n as u16, false), n as u8, 0);
        }
        let held: usize = all.sessions.values().map(|it| it.held.len()).sum();
        assert_eq!(held, all.len());
        assert!(held <= 50 * 2 + 10);
        let bytes: u64 = all.sessions.values().map(|it| it.bytes).sum();
        assert_eq!(bytes, all.bytes());
    }

    /// Behind a foreign broker, where DUP is set on all and packet ids say nothing.
    mod foreign {
        use super::*;
        use crate::store::Mode;

        const RETENTION: Retention = Retention {
            per_session: 0,
            ..super::RETENTION
        };

        fn from(client: u64) -> Delivery {
            let session = Mode::foreign_session(client);
            delivery(session, session, 0, true)
        }

        #[test]
        fn the_identity_alone_decides() {
            let mut all = Duplicates::new(RETENTION);
            let first = answer(&mut all, from(1), 9, 0);
            assert!(all.arrive(&from(1)));
            assert_eq!(found(&all, from(1), 9), Some(first));
            assert_eq!(found(&all, from(1), 8), None);
            assert_eq!(found(&all, from(2), 9), None);
        }

        #[test]
        fn who_only_reads_leaves_no_trace() {
            let mut all = Duplicates::new(RETENTION);
            for client in 0..1_000 {
                assert!(all.arrive(&from(client)));
            }
            assert!(all.sessions.is_empty());
        }

        #[test]
        fn only_the_window_keeps_and_who_left_it_holds_nothing() {
            let mut all = Duplicates::new(RETENTION);
            answer(&mut all, from(1), 1, 0);
            answer(&mut all, from(2), 2, 59_999);
            assert!(found(&all, from(1), 1).is_some());
            answer(&mut all, from(3), 3, 60_000);
            assert!(found(&all, from(1), 1).is_none(), "its time is over");
            assert!(found(&all, from(2), 2).is_some());
            assert_eq!((all.len(), all.sessions.len()), (2, 2));
            assert_eq!(all.evicted(), 0);
        }

        #[test]
        fn what_is_forgotten_before_its_time_is_counted() {
            let mut all = Duplicates::new(RETENTION);
            for n in 0..15u8 {
                answer(&mut all, from(n.into()), n, 0);
            }
            assert_eq!((all.len(), all.sessions.len()), (10, 10));
            assert_eq!(all.evicted(), 5);
            // What went because its time was over is not.
            answer(&mut all, from(99), 99, 60_000);
            assert_eq!((all.len(), all.evicted()), (1, 5));
            let recount: u64 = all.range(0).map(|it| it.cost_bytes()).sum();
            assert_eq!(all.bytes(), recount);
        }
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
        let by = |policy| all.range(0).filter(move |it| it.context.policy == policy);
        assert_eq!(all.policies().len(), 3);
        for (policy, count) in &all.policies {
            assert_eq!(*count, by(*policy).count());
        }
        let sessions: Vec<u64> = all.sessions.keys().copied().collect();
        all.ended(&sessions);
        assert!(all.is_empty() && all.policies().is_empty());
    }
}
