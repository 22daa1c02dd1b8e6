//! Turns the recovered state into the state of a new broker.
//!
//! Expired state and state beyond the current limits is dropped. Every drop must be recorded, or
//! the log and the broker disagree after the next restart.

use std::{cmp::Reverse, collections::HashMap, hash::BuildHasher, sync::Arc};

use bytes::Bytes;
use rustc_hash::FxBuildHasher;
use statehouse_protocol::{ConnectionId, SessionId};

use super::{Core, session_at};
use crate::{
    Message,
    change::{Change, Part},
    ledger::{Account, Kind, Owner},
    limits::WILL_GRACE,
    recovery::{
        Recovery, SavedContent, SavedMessage, SavedRetained, SavedSession, SavedSubscription,
    },
    retained::Publisher,
    router::SessionKey,
    session::{RetainedSearch, Session},
    session_queue::{Queued, Restored, Scope, SessionQueue},
    topic,
};

/// Counts of what was dropped because of a limit.
#[derive(Debug, Default, PartialEq, Eq)]
struct Dropped {
    sessions: usize,
    wills: usize,
    subscriptions: usize,
    messages: usize,
    retained: usize,
}

impl Core {
    /// Takes over the recovered state. A session that was connected is treated as if its connection
    /// ended now.
    pub(crate) fn restore(&mut self, recovery: Recovery) {
        let mut dropped = Dropped {
            wills: recovery.without_will.len(),
            ..Dropped::default()
        };
        for number in recovery.without_will {
            // A later connection may have brought another will.
            let session = recovery.sessions.get(&number);
            if session.is_some_and(|session| session.will.is_none()) {
                self.record(number, Part::NoWill);
            }
        }
        for (session, saved) in self.fitting(recovery.sessions, &mut dropped) {
            dropped.messages += saved.lost.len();
            self.record_lost(session, &saved);
            self.restore_session(session, saved, &mut dropped);
            self.change_log.checkpoint();
        }
        for (topic, saved) in recovery.retained {
            self.restore_retained(&topic, saved, &mut dropped);
            self.change_log.checkpoint();
        }
        for session in self.sessions.iter_mut().flatten() {
            for search in session.retained_searches.values_mut() {
                search.newest = self.retained.newest();
            }
        }
        if dropped != Dropped::default() {
            tracing::warn!(
                sessions = dropped.sessions,
                wills = dropped.wills,
                subscriptions = dropped.subscriptions,
                messages = dropped.messages,
                retained = dropped.retained,
                "dropped recovered state that exceeds the configured limits"
            );
            self.counts.dropped += (dropped.messages + dropped.retained) as u64;
        }
        self.change_log.append();
    }

    fn record(&mut self, session: SessionId, part: Part<'_>) {
        self.change_log.session_log(session, true).write(part);
    }

    /// Records what became of the messages that recovery dropped.
    fn record_lost(&mut self, session: SessionId, saved: &SavedSession) {
        for &number in saved.lost.keys() {
            let sent = saved.messages.get(&number).and_then(|it| it.packet_id);
            let part = match sent {
                Some(packet_id) => Part::Released { number, packet_id },
                None => Part::Removed(number),
            };
            self.record(session, part);
            self.change_log.checkpoint();
        }
    }

    /// Selects one session for each client, up to the limit. Sessions that end first are last, so
    /// this limit and all others drop them first.
    fn fitting(
        &mut self,
        saved: impl IntoIterator<Item = (SessionId, SavedSession)>,
        dropped: &mut Dropped,
    ) -> Vec<(SessionId, SavedSession)> {
        let mut by_client: HashMap<Arc<str>, (SessionId, SavedSession)> = HashMap::new();
        let mut over = Vec::new();
        for (number, session) in saved {
            self.last_session = self.last_session.max(number);
            let older = by_client.insert(session.client.clone(), (number, session));
            over.extend(older.map(|(number, _)| number));
        }
        let mut sessions: Vec<_> = by_client.into_values().collect();
        sessions.sort_by_key(|(number, session)| {
            let detached_ms = session.detached_ms.unwrap_or(u64::MAX);
            let ends_ms = detached_ms.saturating_add(u64::from(session.expiry_s) * 1000);
            (Reverse(ends_ms), *number)
        });
        if sessions.len() > self.limits.sessions_max {
            let surplus = sessions.split_off(self.limits.sessions_max);
            dropped.sessions += surplus.len();
            over.extend(surplus.into_iter().map(|(number, _)| number));
        }
        for number in over {
            self.record(number, Part::End);
        }
        sessions
    }

    fn restore_session(&mut self, number: SessionId, saved: SavedSession, dropped: &mut Dropped) {
        let owner = saved.owner.clone().map_or(Owner::Unknown, Owner::User);
        let account = self.ledger.account(owner);
        let mut session = Session::new(saved.client, number, &account);
        session.restore_received(saved.received);
        let state_bytes_max = self.limits.state_bytes_total_max;
        if self.ledger.total(Kind::State) > state_bytes_max {
            // A session cannot be kept without its packet ids: the broker would treat the client's
            // duplicates as new messages, unnoticed by the client.
            dropped.sessions += 1;
            return self.record(number, Part::End);
        }
        let mut will = saved.will;
        let will_bytes = will.as_ref().map_or(0, |will| will.message.cost_bytes());
        if self.ledger.total(Kind::State) + will_bytes > state_bytes_max {
            (dropped.wills, will) = (dropped.wills + 1, None);
            self.record(number, Part::NoWill);
        }
        let now = self.change_log.clock().taken();
        // A wall clock that was set back must not extend the session. A copy keeps the time: the
        // clock may be right where the copy is restored.
        let is_copy = !self.change_log.is_on();
        let detached = saved
            .detached_ms
            .and_then(|at_ms| self.change_log.clock().instant(at_ms))
            .filter(|at| is_copy || *at <= now)
            .unwrap_or(now);
        if saved.detached_ms.is_none() {
            self.change_log.session_log(number, true).detached(now);
        }
        let expiry_s = saved.expiry_s.min(self.limits.session_expiry_max_s);
        if expiry_s != saved.expiry_s {
            self.record(number, Part::Expiry(expiry_s));
        }
        session.restore(saved.owner, expiry_s, will, detached, now + WILL_GRACE);
        // Another place in each run, but derived, so that a simulation can repeat it.
        let started_ms = self.change_log.clock().wall_ms(now);
        let hash = FxBuildHasher.hash_one((number.0, started_ms));
        session.queue.continue_after((hash >> 48) as u16);
        self.restore_messages(number, &mut session.queue, saved.messages, dropped);
        let key = self.insert(session);
        for (filter, subscription) in saved.subscriptions {
            self.restore_subscription(key, &filter, subscription, dropped);
        }
        self.schedule(key);
        self.update_evictable(key);
    }

    fn restore_messages(
        &mut self,
        session: SessionId,
        queue: &mut SessionQueue,
        messages: impl IntoIterator<Item = (u64, SavedMessage)>,
        dropped: &mut Dropped,
    ) {
        let now = self.change_log.clock().taken();
        let bytes_max = self.limits.queue_bytes_max;
        // The same bound as for any disconnected client.
        let total_max = self.limits.queue_bytes_total_max / 2;
        for (number, saved) in messages {
            let queued = saved.content.map(|content| self.queued(content));
            let message = queued.as_ref().map(|queued| &queued.message);
            let expired = saved.packet_id.is_none() && message.is_some_and(|it| it.is_expired(now));
            let has_room = queued.as_ref().is_none_or(|queued| {
                queue.has_room(queued.cost_bytes(), bytes_max, total_max, usize::MAX)
            });
            let mut restored = Restored {
                number,
                packet_id: saved.packet_id,
                queued,
            };
            if expired || !has_room {
                dropped.messages += usize::from(!expired);
                // At QoS 2 the client may remember the packet id, so the exchange is completed
                // without the message.
                let Some(packet_id) = restored.exactly_once() else {
                    self.record(session, Part::Removed(number));
                    continue;
                };
                self.record(session, Part::Released { number, packet_id });
                restored.queued = None;
            }
            queue.restore(restored);
        }
    }

    fn restore_subscription(
        &mut self,
        key: SessionKey,
        filter: &Bytes,
        saved: SavedSubscription,
        dropped: &mut Dropped,
    ) {
        let Some(session) = session_at(&mut self.sessions, key) else {
            return;
        };
        let limits = &self.limits;
        let fits = topic::check_filter(filter).is_ok()
            && topic::level_count(topic::of_topics(filter)) <= limits.topic_levels_max
            && session
                .subscription_limit(filter, limits, true, false)
                .is_none();
        if fits {
            session.restore_subscription(filter, saved.subscription);
            (self.router).subscribe(filter, key, saved.subscription, false);
            if saved.retained_pending {
                // All messages, since it is not recorded which ones were sent.
                let search = RetainedSearch {
                    after: None,
                    // Known when the retained messages are restored.
                    newest: 0,
                    connection: ConnectionId::NONE,
                    recorded: true,
                };
                session.retained_searches.insert(filter.clone(), search);
            }
        } else {
            dropped.subscriptions += 1;
            session
                .log(&mut self.change_log)
                .write(Part::Unsubscribe(filter));
        }
    }

    fn restore_retained(&mut self, topic: &[u8], saved: SavedRetained, dropped: &mut Dropped) {
        let now = self.change_log.clock().taken();
        let message = self.expiring(saved.message, saved.expires_ms);
        let expired = message.is_expired(now);
        let account = saved.from.as_ref().map(|client| self.account_of(client));
        let publisher = saved
            .from
            .zip(account)
            .map(|(client, account)| Publisher { client, account });
        if expired || !self.retained.restore(message, publisher, &self.limits) {
            dropped.retained += usize::from(!expired);
            self.change_log.write(&Change::RetainedRemoved(topic));
        }
    }

    /// The account of a client's session. Retained messages of clients without a session are
    /// charged to [`Owner::Unknown`].
    fn account_of(&mut self, client: &str) -> Arc<Account> {
        let key = self.by_client.get(client).copied();
        let account = key.and_then(|key| Some(self.session(key)?.account().clone()));
        account.unwrap_or_else(|| self.ledger.account(Owner::Unknown))
    }

    fn queued(&self, content: SavedContent) -> Queued {
        Queued {
            message: self.expiring(content.message, content.expires_ms),
            subscription_ids: content.subscription_ids,
            scope: Scope::Session,
            shared: content.shared,
        }
    }

    fn expiring(&self, mut message: Message, expires_ms: Option<u64>) -> Message {
        let clock = self.change_log.clock();
        message.expires = expires_ms.and_then(|at_ms| clock.instant(at_ms));
        message
    }
}
