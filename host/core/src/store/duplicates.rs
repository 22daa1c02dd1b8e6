//! Requests that were answered and may come again: QoS 1 delivers at least once.
//!
//! What enters: what a request saw and was answered. What leaves, when it comes again: the same. As the
//! broker only unacknowledged requests can come again, so the last of every live session are kept
//! however old (the protocol, section 9); beyond these a window of time, bounded in count and bytes.
//!
//! Behind a foreign broker nobody knows which sessions live or what is unacknowledged there: only the window keeps
//! ([`Retention::per_session`] is zero), and of a client that has nothing in it nothing is held at all.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU64;

use hashbrown::HashMap;
use statehouse_mqtt::Properties;

use self::slot::Slot;
use super::remembered::{Identity, Remembered};
use crate::limits;
use crate::request::Delivery;

mod slot;

/// How much is remembered, from the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// The longest a request is remembered, in milliseconds.
    pub window_ms: u64,
    /// Requests beyond the last ones of live sessions.
    pub count_max: u64,
    /// All of them in bytes, beyond the last ones of live sessions.
    pub bytes_max: u64,
    /// The requests that a client can have on their way: the largest Receive Maximum that one was told. Of a live session
    /// twice as many are kept. Zero where no session is known to live: then only the window keeps.
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

/// Places that the window grows by at least.
const WINDOW_GROWTH_MIN: usize = 64;

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
    policies: Policies,
    count: usize,
    bytes: u64,
    next_number: u64,
    evicted: u64,
}

/// How many each policy handled of what is remembered. Mostly there is one, and slots name it by its place here.
#[derive(Default)]
struct Policies(Vec<(blake3::Hash, usize)>);

impl Policies {
    /// Counts one more request of a policy; its number.
    fn add(&mut self, policy: blake3::Hash) -> u32 {
        let all = &mut self.0;
        let at = all.iter().position(|(it, _)| *it == policy);
        // The place of one that has none left is free.
        let at = at.or_else(|| all.iter().position(|(_, count)| *count == 0));
        let at = at.unwrap_or_else(|| {
            all.push((policy, 0));
            all.len() - 1
        });
        all[at].0 = policy;
        all[at].1 += 1;
        u32::try_from(at).expect("each has a request that is remembered, and these fit into memory")
    }

    fn remove(&mut self, number: u32) {
        self.0[number as usize].1 -= 1;
    }

    fn digest(&self, number: u32) -> blake3::Hash {
        self.0[number as usize].0
    }
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
            policies: Policies::default(),
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

    /// The largest Receive Maximum that a client may have been told.
    pub fn receive_max(&self) -> u16 {
        u16::try_from(self.retention.per_session).unwrap_or(u16::MAX)
    }

    /// Clients may be told this Receive Maximum from now on: no fewer are remembered of each session. Never less, since
    /// sessions that were told more may send as many again. True where that is more than before.
    pub fn raise_per_session(&mut self, receive_max: u16) -> bool {
        let per_session = &mut self.retention.per_session;
        // Zero says that only the window keeps.
        let more = *per_session > 0 && u64::from(receive_max) > *per_session;
        if more {
            *per_session = receive_max.into();
        }
        more
    }

    /// Until when a request of now is remembered at least.
    pub(super) fn until_ms(&self, properties: &Properties, now_ms: u64) -> u64 {
        now_ms.saturating_add(self.retention.of(properties))
    }

    /// Time went ahead by so much without passing: requests are remembered for as long as before.
    pub(super) fn postpone(&mut self, by_ms: u64) {
        for slot in &mut self.window {
            slot.until_ms = slot.until_ms.saturating_add(by_ms);
        }
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
    pub fn find(&self, delivery: &Delivery, identity: &Identity) -> Option<Remembered> {
        let mut number = *self.newest.get(&(delivery.session, *identity))?;
        let mut newest = None;
        let original = loop {
            let Some(slot) = self.slot(number) else {
                break newest;
            };
            let same_packet = slot.packet_id == delivery.packet_id;
            // Some clients send again without DUP.
            let resent = slot.connection < delivery.connection && same_packet;
            if (delivery.dup && same_packet) || resent {
                break Some(slot);
            }
            if delivery.dup {
                newest = newest.or(Some(slot));
            }
            match slot.older {
                Some(older) => number = older.get(),
                None => break newest,
            }
        };
        original.map(|slot| self.remembered(slot))
    }

    /// The number that the next one gets.
    pub fn next_number(&self) -> u64 {
        self.next_number
    }

    /// Remembers a request under the next number, or a recorded one under its own, which must be above all before.
    pub fn insert(&mut self, it: &Remembered) {
        let Remembered {
            number, delivery, ..
        } = *it;
        let key = (delivery.session, it.identity);
        let older = self.newest.insert(key, number).and_then(NonZeroU64::new);
        let slot = Slot::new(it, self.policies.add(it.context.policy), older);
        let cost_bytes = u64::from(slot.cost_bytes);
        self.next_number = self.next_number.max(number + 1);
        self.bytes += cost_bytes;
        self.count += 1;
        let session = self.sessions.entry(delivery.session).or_default();
        session.connection = session.connection.max(delivery.connection);
        session.turns = session.turns.max(it.turn);
        session.held.push_back(number);
        session.bytes += cost_bytes;
        if self.window.len() == self.window.capacity() {
            // Twice as many places as before could be megabytes that are never used.
            let more = self.window.len() / 4;
            self.window.reserve_exact(more.max(WINDOW_GROWTH_MIN));
        }
        self.window.push_back(slot);
    }

    /// Forgets what is neither young enough nor among the last of its session. Called after each insertion, with
    /// its session.
    pub fn evict(&mut self, session: u64, now_ms: u64) {
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
                self.kept.insert(slot.number, slot);
            } else {
                if self.retention.per_session == 0 && slot.until_ms > now_ms {
                    self.forget_early();
                }
                self.release(&slot);
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

    /// Where a request is that is not forgotten.
    fn slot(&self, number: u64) -> Option<&Slot> {
        let slot = match self.place(number) {
            Some(place) => self.window.get(place),
            None => self.kept.get(&number),
        };
        slot.filter(|slot| !slot.forgotten)
    }

    fn remembered(&self, slot: &Slot) -> Remembered {
        slot.remembered(self.policies.digest(slot.policy))
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
            Some(place) => self.window.get_mut(place).and_then(Slot::take),
            None => self.kept.remove(&number),
        };
        if let Some(slot) = taken {
            self.release(&slot);
        }
    }

    /// Settles the accounts of one that was taken out of its place.
    fn release(&mut self, slot: &Slot) {
        let cost_bytes = u64::from(slot.cost_bytes);
        self.bytes -= cost_bytes;
        self.count -= 1;
        self.policies.remove(slot.policy);
        let key = (slot.session, slot.identity);
        if self.newest.get(&key) == Some(&slot.number) {
            self.newest.remove(&key);
        }
        if let Some(session) = self.sessions.get_mut(&slot.session) {
            session.bytes -= cost_bytes;
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
    pub fn range(&self, number: u64) -> impl Iterator<Item = Remembered> {
        let from = self.window.partition_point(|slot| slot.number < number);
        let kept = self.kept.range(number..).map(|(_, slot)| slot);
        kept.chain(self.window.range(from..))
            .filter(|slot| !slot.forgotten)
            .map(|slot| self.remembered(slot))
    }

    /// The policies that handled them, each once.
    pub fn policies(&self) -> Vec<blake3::Hash> {
        let all = self.policies.0.iter();
        let some = all.filter(|(_, count)| *count > 0);
        some.map(|(policy, _)| *policy).collect()
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
mod tests;
