//! The dedup table: answered requests that QoS 1 may redeliver.
//!
//! Only unacknowledged requests can be redelivered through the embedded broker. So the last
//! requests of every live session are retained regardless of their age (protocol, section 9). Older
//! ones are retained within a window that is bounded in time, count and bytes.
//!
//! Behind a foreign broker, live sessions and unacknowledged requests are unknown. Only the window
//! retains requests there ([`Retention::per_session`] is zero), and a client without requests in
//! the window takes no memory.

use std::collections::{BTreeMap, VecDeque};
use std::hash::BuildHasher;
use std::hint::black_box;
use std::num::NonZeroU64;

use hashbrown::{DefaultHashBuilder, HashMap};
use statehouse_mqtt::Properties;

use self::slot::{Policies, Slot};
use super::compact_table::CompactTable;
use super::remembered::{Identity, Remembered};
use crate::limits;
use crate::request::Delivery;
use statehouse_protocol::{ConnectionId, SessionId};

mod slot;

/// Retention limits, from the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// The longest time that a request is retained, in milliseconds.
    pub window_ms: u64,
    /// The number of requests, not counting the last ones of live sessions.
    pub count_max: u64,
    /// The bytes of all requests, not counting the last ones of live sessions.
    pub bytes_max: u64,
    /// The number of requests that a client can have in flight: the largest Receive Maximum that
    /// any client was sent. Twice as many are retained for each live session. Zero if live sessions
    /// are unknown; then only the window retains requests.
    pub per_session: u64,
}

impl Default for Retention {
    fn default() -> Self {
        Self {
            window_ms: limits::DUPLICATE_WINDOW_MS_DEFAULT,
            count_max: limits::DUPLICATES_MAX_DEFAULT,
            bytes_max: limits::DUPLICATE_BYTES_MAX_DEFAULT,
            per_session: limits::RECEIVE_MAX_REMEMBERED_MIN.into(),
        }
    }
}

impl Retention {
    /// How long a request is retained: its message expiry, within bounds.
    fn of(&self, properties: &Properties) -> u64 {
        let expiry_ms = u64::from(properties.message_expiry_s().unwrap_or(0)) * 1000;
        expiry_ms
            .max(limits::DUPLICATE_WINDOW_MS_MIN)
            .min(self.window_ms)
    }

    /// Whether a request may still be in flight when its session has reached `turns`. Twice the
    /// Receive Maximum: later requests may be answered first, and an earlier one may be answered
    /// only now if its policy failed the first time.
    fn keeps(&self, turn: u64, turns: u64) -> bool {
        turn.saturating_add(self.per_session.saturating_mul(2)) > turns
    }

    /// How many requests of a session a lookup examines at most: all that can be redelivered.
    /// Otherwise a client could make each lookup walk through the whole window.
    fn lookups_max(&self) -> usize {
        let last = self.per_session.saturating_mul(2);
        usize::try_from(last).map_or(usize::MAX, |last| last.max(LOOKUPS_MIN))
    }
}

/// A lookup examines so many requests of a session in any case, which takes microseconds.
const LOOKUPS_MIN: usize = 1024;

/// The window grows by at least this many slots.
const WINDOW_GROWTH_MIN: usize = 64;

/// Requests whose loads from memory overlap. More could displace each other from the cache.
const PREFETCHED_AT_ONCE: usize = 64;

/// All requests that may be redelivered.
pub struct Duplicates {
    retention: Retention,
    /// The newest requests, ordered by number.
    window: VecDeque<Slot>,
    /// Older requests, retained as the last ones of their session. All their numbers are lower than
    /// those of the window. Boxed, because each removal moves the rest of a node.
    kept: BTreeMap<u64, Box<Slot>>,
    /// The number of the newest request of each identity. Each slot links to the next older one.
    newest: CompactTable<Number>,
    hasher: DefaultHashBuilder,
    sessions: HashMap<SessionId, Session>,
    policies: Policies,
    count: usize,
    bytes: u64,
    next_number: u64,
    /// All recorded requests have lower numbers.
    recorded_below: u64,
    evicted: u64,
}

/// The number of a request in two halves. A `u64` would be aligned, and a bucket of the hash table
/// a third larger.
#[derive(Clone, Copy, Default, PartialEq)]
struct Number([u32; 2]);

impl From<u64> for Number {
    fn from(number: u64) -> Self {
        Self([(number >> u32::BITS) as u32, number as u32])
    }
}

impl From<Number> for u64 {
    fn from(Number([high, low]): Number) -> Self {
        Self::from(high) << u32::BITS | Self::from(low)
    }
}

#[derive(Default)]
struct Session {
    /// The number of its requests that were ever remembered.
    turns: u64,
    /// Its remembered requests, in order.
    held: VecDeque<u64>,
    /// The bytes of these.
    bytes: u64,
    /// The newest connection number seen.
    connection: ConnectionId,
    /// Requests that arrived on this connection, while redeliveries may be among them.
    resends: Option<u64>,
}

impl Duplicates {
    /// Creates an empty dedup table.
    pub fn new(retention: Retention) -> Self {
        Self {
            retention,
            window: VecDeque::new(),
            kept: BTreeMap::new(),
            newest: CompactTable::default(),
            hasher: DefaultHashBuilder::default(),
            sessions: HashMap::new(),
            policies: Policies::default(),
            count: 0,
            bytes: 0,
            next_number: 1,
            recorded_below: 1,
            evicted: 0,
        }
    }

    /// The retention limits.
    pub fn retention(&self) -> Retention {
        self.retention
    }

    /// The largest Receive Maximum that a client may have been sent.
    pub fn receive_max(&self) -> u16 {
        u16::try_from(self.retention.per_session).unwrap_or(u16::MAX)
    }

    /// Raises the number of requests that are retained for each session. It never decreases, since
    /// sessions with a higher Receive Maximum may redeliver that many. Returns whether it
    /// increased.
    pub fn raise_per_session(&mut self, receive_max: u16) -> bool {
        let per_session = &mut self.retention.per_session;
        // Zero means that only the window retains requests.
        let more = *per_session > 0 && u64::from(receive_max) > *per_session;
        if more {
            *per_session = receive_max.into();
        }
        more
    }

    /// The time until which a request of now is retained at least.
    pub(super) fn until_ms(&self, properties: &Properties, now_ms: u64) -> u64 {
        now_ms.saturating_add(self.retention.of(properties))
    }

    /// Postpones all deadlines by `by_ms`, because the clock was stepped ahead.
    pub(crate) fn postpone(&mut self, by_ms: u64) {
        for slot in &mut self.window {
            slot.until_ms = slot.until_ms.saturating_add(by_ms);
        }
    }

    /// Notes an arriving request. Returns whether it may be a redelivery; the caller needs an
    /// identity only then.
    pub(super) fn arrive(&mut self, delivery: &Delivery) -> bool {
        if self.retention.per_session == 0 {
            // Connections and session ends are unknown here, so a client that only reads must take
            // no memory.
            return delivery.dup;
        }
        let session = self.sessions.entry(delivery.session).or_default();
        if delivery.connection > session.connection {
            session.connection = delivery.connection;
            session.resends = (!session.held.is_empty()).then_some(0);
        }
        if let Some(resends) = &mut session.resends {
            // A client redelivers first, and at most its Receive Maximum.
            *resends += 1;
            if *resends <= self.retention.per_session {
                return true;
            }
            session.resends = None;
        }
        delivery.dup
    }

    /// The turn of the next remembered request of a session.
    pub(super) fn next_turn(&self, session: SessionId) -> u64 {
        self.sessions.get(&session).map_or(0, |held| held.turns) + 1
    }

    /// Continues numbering from `next_number`: lower numbers were already given out.
    pub fn continue_from(&mut self, next_number: u64) {
        self.next_number = self.next_number.max(next_number);
        self.recorded_below = self.recorded_below.max(next_number);
    }

    /// The original of a request, if the request is a duplicate. Some clients redeliver without the
    /// DUP flag, over the next connection.
    pub fn find(&self, delivery: &Delivery, identity: &Identity) -> Option<Remembered> {
        let hash = self.hash(delivery.session, identity);
        let is_it = |it: Number| self.is_of(it, delivery.session, identity);
        let mut number = self.newest.find(hash, is_it)?.into();
        let mut left = self.retention.lookups_max();
        let mut newest = None;
        let original = loop {
            let Some(slot) = self.slot(number) else {
                break newest;
            };
            if slot.packet_id == delivery.packet_id {
                // All older ones with this packet id are followed by a later use of it.
                let earlier = slot.connection < delivery.connection;
                let is_resent = earlier && !self.is_packet_id_reused(slot);
                break (delivery.dup || is_resent).then_some(slot);
            }
            if delivery.dup {
                newest = newest.or(Some(slot));
            }
            left -= 1;
            match slot.older {
                Some(older) if left > 0 => number = older.get(),
                _ => break newest,
            }
        };
        original.map(|slot| self.remembered(slot))
    }

    /// Whether its session has used the packet id for a later request. Then the request was
    /// acknowledged (section 4.3.2), and one without the DUP flag cannot be its redelivery.
    fn is_packet_id_reused(&self, slot: &Slot) -> bool {
        let session = self.sessions.get(&slot.session);
        let held = session.map(|it| it.held.range(..)).unwrap_or_default();
        let later = held.rev().take_while(|number| **number > slot.number);
        let mut later = later.filter_map(|number| self.slot(*number));
        let mut last = later.by_ref().take(self.retention.lookups_max());
        // So many later requests can only follow one that was acknowledged.
        last.any(|it| it.packet_id == slot.packet_id) || later.next().is_some()
    }

    /// The number of the next request.
    pub fn next_number(&self) -> u64 {
        self.next_number
    }

    /// The number that follows those of all recorded requests. A snapshot continues from it: after
    /// a crash, a request has the number again that another one had in memory only.
    pub fn recorded_below(&self) -> u64 {
        self.recorded_below
    }

    /// Adds a request under the next number, or a recorded one under its own. The number must be
    /// higher than all earlier ones, since the window is ordered by it. A request that the log has
    /// no record of is in no snapshot either.
    pub fn insert(&mut self, it: &Remembered, recorded: bool) {
        let Remembered {
            number, delivery, ..
        } = *it;
        let older = self.note_newest(delivery.session, &it.identity, number);
        let slot = Slot::new(it, recorded, self.policies.add(it.context.policy), older);
        let cost_bytes = u64::from(slot.cost_bytes);
        self.next_number = self.next_number.max(number + 1);
        if recorded {
            self.recorded_below = self.next_number;
        }
        self.bytes += cost_bytes;
        self.count += 1;
        let session = self.sessions.entry(delivery.session).or_default();
        session.connection = session.connection.max(delivery.connection);
        session.turns = session.turns.max(it.turn);
        session.held.push_back(number);
        session.bytes += cost_bytes;
        if self.window.len() == self.window.capacity() {
            // Doubling the capacity could waste megabytes.
            let more = self.window.len() / 4;
            self.window.reserve_exact(more.max(WINDOW_GROWTH_MIN));
        }
        self.window.push_back(slot);
    }

    /// Notes the newest request of an identity. Returns the number of the one before.
    fn note_newest(
        &mut self,
        session: SessionId,
        identity: &Identity,
        number: u64,
    ) -> Option<NonZeroU64> {
        let hash = self.hash(session, identity);
        let is_it = |it: Number| self.is_of(it, session, identity);
        let older = self.newest.find(hash, is_it);
        let Some(older) = older else {
            self.newest.insert(hash, number.into());
            return None;
        };
        if let Some(newest) = self.newest.find_mut(hash, |it| it == older) {
            *newest = number.into();
        }
        NonZeroU64::new(older.into())
    }

    /// Whether the request of this number has this identity.
    fn is_of(&self, number: Number, session: SessionId, identity: &Identity) -> bool {
        let slot = self.slot(number.into());
        slot.is_some_and(|it| it.session == session && it.identity == *identity)
    }

    fn hash(&self, session: SessionId, identity: &Identity) -> u32 {
        (self.hasher.hash_one((session, identity)) >> u32::BITS) as u32
    }

    /// Loads what the insertion of this many requests of a session will remove. Has no other
    /// effect.
    pub(super) fn prefetch(&self, session: SessionId, count: usize) {
        let held = self.sessions.get(&session).map(|it| it.held.range(..));
        let held = held.into_iter().flatten().take(count);
        let displaced = held.map_while(|number| self.kept.get(number).map(Box::as_ref));
        let mut removed = [None; PREFETCHED_AT_ONCE];
        let mut loaded = 0;
        // The last requests of a session only move from the window to the others.
        let leaving = self.window.iter().take(count);
        let leaving = leaving.filter(|slot| !self.is_last(slot));
        for (place, slot) in removed.iter_mut().zip(displaced.chain(leaving)) {
            black_box(slot.turn);
            *place = Some(slot);
            loaded += 1;
        }
        for slot in removed[..loaded].iter().flatten() {
            let hash = self.hash(slot.session, &slot.identity);
            black_box(self.newest.is_home_used(hash));
            slot.load_entry();
        }
    }

    /// Removes requests that are neither in the window nor among the last of their session. Must be
    /// called after each insertion, with its session.
    pub fn evict(&mut self, session: SessionId, now_ms: u64) {
        self.advance(session);
        while let Some(slot) = self.window.front() {
            if !slot.forgotten
                && slot.until_ms > now_ms
                && self.window.len() as u64 <= self.retention.count_max
                && self.bytes <= self.retention.bytes_max
            {
                break;
            }
            let Some(slot) = self.window.pop_front() else {
                break;
            };
            if slot.forgotten {
                continue;
            }
            if self.is_last(&slot) {
                self.kept.insert(slot.number, Box::new(slot));
            } else {
                if self.retention.per_session == 0 && slot.until_ms > now_ms {
                    self.forget_early();
                }
                self.release(&slot);
            }
        }
        // The last requests of many sessions could take any amount of memory. The memory limit
        // takes precedence over the per-session guarantee.
        while self.bytes > self.retention.bytes_max.saturating_mul(2) && self.evict_early(session) {
        }
    }

    /// Evicts one request that its session may still redeliver: the oldest of `session` if that
    /// uses more than its share, otherwise the oldest of all.
    fn evict_early(&mut self, session: SessionId) -> bool {
        let share = self.retention.bytes_max.saturating_mul(2) / self.sessions.len().max(1) as u64;
        let own = self.sessions.get(&session);
        let own = own.filter(|it| it.bytes > share && it.held.len() > 1);
        let oldest = || {
            let kept = self.kept.first_key_value().map(|(number, _)| *number);
            let there = |slot: &&Slot| !slot.forgotten;
            kept.or_else(|| self.window.iter().find(there).map(|slot| slot.number))
        };
        let Some(number) = own.and_then(|it| it.held.front().copied()).or_else(oldest) else {
            return false;
        };
        if self.evicted == 0 {
            tracing::warn!(
                bytes = self.bytes,
                sessions = self.sessions.len(),
                "requests that clients may redeliver were evicted, because the last requests of all sessions exceed twice max_duplicate_bytes: raise it, or let unused sessions expire sooner"
            );
        }
        self.evicted += 1;
        self.remove(number);
        true
    }

    /// Counts a request that leaves the window before its time, if only the window retains
    /// requests.
    fn forget_early(&mut self) {
        if self.evicted == 0 {
            tracing::warn!(
                count = self.count,
                bytes = self.bytes,
                "requests were evicted early and would run twice if redelivered: raise max_duplicates and max_duplicate_bytes, or shorten duplicate_window"
            );
        }
        self.evicted += 1;
    }

    /// Removes requests of a session that its newer requests have displaced.
    fn advance(&mut self, session: SessionId) {
        // The window is ordered, so all later requests of the session are in it, too.
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
        let session = self.sessions.get(&slot.session);
        session.is_some_and(|it| self.retention.keeps(slot.turn, it.turns))
    }

    /// The slot of a request, unless it was evicted.
    fn slot(&self, number: u64) -> Option<&Slot> {
        #[cfg(test)]
        tests::count_lookup();
        let slot = match self.place(number) {
            Some(place) => self.window.get(place),
            None => self.kept.get(&number).map(Box::as_ref),
        };
        slot.filter(|slot| !slot.forgotten)
    }

    fn remembered(&self, slot: &Slot) -> Remembered {
        slot.remembered(self.policies.digest(slot.policy))
    }

    /// The index of a number in the window. Gaps are rare, so the first guess is mostly right.
    fn place(&self, number: u64) -> Option<usize> {
        let first = self.window.front()?.number;
        let guess = usize::try_from(number.checked_sub(first)?).ok()?;
        let guessed = self.window.get(guess);
        if guessed.is_some_and(|slot| slot.number == number) {
            return Some(guess);
        }
        let found = self
            .window
            .binary_search_by_key(&number, |slot| slot.number);
        found.ok()
    }

    fn remove(&mut self, number: u64) {
        match self.place(number) {
            Some(place) => {
                if let Some(slot) = self.window.get_mut(place).and_then(Slot::take) {
                    self.release(&slot);
                }
            }
            None => {
                if let Some(slot) = self.kept.remove(&number) {
                    self.release(&slot);
                }
            }
        }
    }

    /// Updates the sums for a request that was removed.
    fn release(&mut self, slot: &Slot) {
        let cost_bytes = u64::from(slot.cost_bytes);
        self.bytes -= cost_bytes;
        self.count -= 1;
        self.policies.remove(slot.policy);
        // A newer request of the same identity has another number.
        let hash = self.hash(slot.session, &slot.identity);
        let number = slot.number.into();
        self.newest.remove(hash, |it| it == number);
        if let Some(session) = self.sessions.get_mut(&slot.session) {
            session.bytes -= cost_bytes;
            // It is nearly always the first.
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

    /// Removes the requests of sessions that ended: they can never be redelivered.
    pub fn ended(&mut self, sessions: &[SessionId]) {
        for session in sessions {
            for number in self.sessions.remove(session).unwrap_or_default().held {
                self.remove(number);
            }
        }
    }

    /// Removes the requests of sessions that did not survive a restart.
    pub fn retain(&mut self, lives: impl Fn(SessionId) -> bool) {
        let held = self.sessions.keys().copied();
        let dead: Vec<SessionId> = held.filter(|session| !lives(*session)).collect();
        self.ended(&dead);
    }

    /// The requests from `number` on that the log has records of, in order.
    pub fn recorded(&self, number: u64) -> impl Iterator<Item = Remembered> {
        let slots = self.slots(number).filter(|slot| slot.recorded);
        slots.map(|slot| self.remembered(slot))
    }

    /// The requests from `number` on, in order.
    pub fn range(&self, number: u64) -> impl Iterator<Item = Remembered> {
        self.slots(number).map(|slot| self.remembered(slot))
    }

    fn slots(&self, number: u64) -> impl Iterator<Item = &Slot> {
        let from = self.window.partition_point(|slot| slot.number < number);
        let kept = self.kept.range(number..).map(|(_, slot)| &**slot);
        kept.chain(self.window.range(from..))
            .filter(|slot| !slot.forgotten)
    }

    /// The policies that handled the remembered requests, each once.
    pub fn policies(&self) -> Vec<blake3::Hash> {
        let all = self.policies.0.iter();
        let some = all.filter(|(_, count)| *count > 0);
        some.map(|(policy, _)| *policy).collect()
    }

    /// The number of requests.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are no requests.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The memory cost in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The number of requests that were evicted although they might still be redelivered.
    pub fn evicted(&self) -> u64 {
        self.evicted
    }
}

#[cfg(test)]
mod tests;
