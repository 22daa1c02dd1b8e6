//! The deterministic core of the broker: sessions, subscriptions, retained messages, wills and
//! deadlines behind one lock.
//!
//! Its input is packets of connected clients and calls of the embedder. Its output is packets in
//! the connections' output buffers and changes in the change log. The core must do no I/O, must
//! never wait and must take the time as an argument: tests rely on this to run without sockets and
//! sleeps.

mod answer;
mod connect;
mod publish;
mod requester;
mod restore;
mod room;
mod session_ends;
mod share;
mod subscribe;
#[cfg(test)]
mod tests;
mod window;

use std::{
    collections::{BTreeSet, HashMap},
    hash::RandomState,
    sync::Arc,
    time::Instant,
};

pub(crate) use connect::{Accepted, ConnectRefusal};
pub(crate) use publish::{Begun, RefusalCause, Source};
use statehouse_protocol::{ConnectionId, SessionId};
pub(crate) use subscribe::FilterResults;
pub(crate) use window::Relief;

use session_ends::SessionEnds;

use crate::{
    Access, ClientStatus, Limits, Origin, ReasonCode, Refusal, Refused, Stats,
    clock::Clock,
    codec::{self, Violation},
    image::{self, ImageCursor},
    ledger::{Kind, Ledger},
    limits::{SESSION_OVERHEAD_BYTES, SESSIONS_PER_HOLD_MAX, WORK_PER_TURN_MAX, work},
    output::Output,
    persist::ChangeLog,
    refusal::Refusals,
    retained::Retained,
    router::{Matches, Router, SessionKey},
    session::{Sending, Session},
    write_batch::WriteBatching,
};

pub(crate) struct Core {
    limits: Arc<Limits>,
    access: Arc<dyn Access>,
    refusals: Arc<Refusals>,
    sessions: Vec<Option<Box<Session>>>,
    free: Vec<SessionKey>,
    by_client: HashMap<Arc<str>, SessionKey>,
    router: Router,
    retained: Retained,
    /// Disconnected, empty sessions, oldest first. The core evicts them to make room for new
    /// sessions.
    evictable: BTreeSet<(Instant, SessionKey)>,
    /// When a will, the expiry of a disconnected session or a search for its expired messages is
    /// due. Each session has at most one entry.
    deadlines: BTreeSet<(Instant, SessionKey)>,
    last_connection: ConnectionId,
    last_session: SessionId,
    last_assigned_id: u64,
    /// Derives the client ids that this run assigns. A client that could guess them could take over
    /// sessions of others.
    assigned_ids: RandomState,
    ledger: Ledger,
    change_log: ChangeLog,
    session_ends: SessionEnds,
    /// The counters and the numbers of connections. [`Core::stats`] adds the other gauges.
    counts: Stats,
    /// Outputs whose writers must be woken after the lock is released.
    wakes: Vec<Arc<Output>>,
    /// Whether the earliest deadline has changed, so that the timer task must look again.
    timers_changed: bool,
    shutting_down: bool,
    matches: Matches,
    /// Work done since the start, in the units of [`WORK_PER_TURN_MAX`].
    work: u64,
}

/// Actions for the caller after it has released the lock.
pub(crate) struct Wakes {
    pub(crate) writers: Vec<Arc<Output>>,
    pub(crate) timers: bool,
    /// Numbers of ended sessions whose last disconnect the service already knows.
    pub(crate) ended: Vec<SessionId>,
}

/// Borrows one session and leaves the other fields of the core free to borrow.
fn session_at(sessions: &mut [Option<Box<Session>>], key: SessionKey) -> Option<&mut Session> {
    sessions.get_mut(key as usize)?.as_deref_mut()
}

/// Replaces the entry of a session in a set; `entry` is the time in the set. Returns false if it
/// does not change.
fn replace_entry(
    set: &mut BTreeSet<(Instant, SessionKey)>,
    key: SessionKey,
    entry: &mut Option<Instant>,
    new: Option<Instant>,
) -> bool {
    if *entry == new {
        return false;
    }
    if let Some(old) = std::mem::replace(entry, new) {
        set.remove(&(old, key));
    }
    set.extend(new.map(|at| (at, key)));
    true
}

impl Core {
    /// Creates an empty core. The number of the run is the upper half of connection and session
    /// numbers, so later runs never reuse them.
    pub(crate) fn new(
        limits: Arc<Limits>,
        access: Arc<dyn Access>,
        refusals: Arc<Refusals>,
        run: u32,
        change_log: ChangeLog,
    ) -> Self {
        let before = u64::from(run) << 32;
        Self {
            limits,
            access,
            refusals,
            sessions: Vec::new(),
            free: Vec::new(),
            by_client: HashMap::new(),
            router: Router::default(),
            retained: Retained::default(),
            evictable: BTreeSet::new(),
            deadlines: BTreeSet::new(),
            last_connection: ConnectionId(before),
            last_session: SessionId(before),
            last_assigned_id: 0,
            assigned_ids: RandomState::new(),
            ledger: Ledger::default(),
            change_log,
            session_ends: SessionEnds::default(),
            counts: Stats::default(),
            wakes: Vec::new(),
            timers_changed: false,
            shutting_down: false,
            matches: Matches::default(),
            work: 0,
        }
    }

    /// Counts work that was done outside of the core.
    pub(crate) fn work_done(&mut self, units: u64) {
        self.work += units;
    }

    /// Work done since the start. The difference of two values measures how long the lock was held,
    /// independent of the machine.
    pub(crate) fn work(&self) -> u64 {
        self.work
    }

    /// Appends the changes made under the lock and returns the remaining actions; must be called
    /// before the lock is released. An open write batch takes over the outputs to write.
    pub(crate) fn finish(&mut self, write_batching: &WriteBatching) -> Wakes {
        self.change_log.append();
        if !self.wakes.is_empty() {
            write_batching.gather(&mut self.wakes);
        }
        Wakes {
            writers: self.wakes.drain(..).collect(),
            timers: std::mem::take(&mut self.timers_changed),
            ended: self.session_ends.take_ended(),
        }
    }

    /// Replaces the limits. State that exceeds the new limits is kept.
    pub(crate) fn set_limits(&mut self, limits: Arc<Limits>) {
        self.limits = limits;
    }

    /// Must be called between two packets or operations; see [`ChangeLog::checkpoint`].
    pub(crate) fn checkpoint(&mut self) {
        self.change_log.checkpoint();
    }

    /// The service was notified that this connection of the session has ended.
    pub(crate) fn disconnect_reported(&mut self, session: SessionId) {
        self.session_ends.disconnect_reported(session);
    }

    pub(crate) fn session_numbers(&self) -> Vec<SessionId> {
        let sessions = self.sessions.iter().flatten();
        sessions.map(|session| session.number).collect()
    }

    /// Encodes the next piece of a snapshot.
    pub(crate) fn image(&self, cursor: &mut ImageCursor, bytes_max: usize) -> Option<Vec<u8>> {
        let clock = self.change_log.clock();
        image::next(&self.sessions, &self.retained, clock, cursor, bytes_max)
    }

    /// Approximate upper bound of the size of a snapshot.
    pub(crate) fn image_bytes(&self) -> usize {
        self.by_client.len() * SESSION_OVERHEAD_BYTES
            + self.ledger.total(Kind::Subscriptions)
            + self.retained.bytes()
            + self.ledger.total(Kind::Queues)
            + self.ledger.total(Kind::State)
    }

    fn session_of(&self, client: &str) -> Option<&Session> {
        self.peek(*self.by_client.get(client)?)
    }

    /// Like [`session`](Self::session), without write access.
    fn peek(&self, key: SessionKey) -> Option<&Session> {
        self.sessions.get(key as usize)?.as_deref()
    }

    /// Whether the client with this id is connected.
    pub(crate) fn is_connected(&self, client: &str) -> bool {
        self.session_of(client).is_some_and(Session::is_present)
    }

    pub(crate) fn client_status(&self, client: &str) -> Option<ClientStatus> {
        let session = self.session_of(client)?;
        Some(ClientStatus {
            origin: session.origin().filter(|_| session.is_present()),
            filters: session.subscriptions().filters().cloned().collect(),
        })
    }

    /// See [`Broker::subscription_limit`](crate::Broker::subscription_limit).
    pub(crate) fn subscription_limit(&self, client: &str, filter: &[u8]) -> Option<&'static str> {
        let session = self.session_of(client)?;
        session.subscription_limit(filter, &self.limits, self.change_log.has_room(), true)
    }

    pub(crate) fn stats(&self) -> Stats {
        Stats {
            sessions: self.by_client.len(),
            subscriptions: self.router.count(),
            retained: self.retained.count(),
            retained_bytes: self.retained.bytes(),
            queued_bytes: self.ledger.total(Kind::Queues),
            state_bytes: self.ledger.total(Kind::State),
            ..self.counts
        }
    }

    /// Counts a message that was refused at QoS 0 outside of the core.
    pub(crate) fn count_dropped(&mut self) {
        self.counts.dropped += 1;
    }

    pub(crate) fn count_throttled(&mut self) {
        self.counts.throttled += 1;
    }

    /// Reports a refusal to a connected client that the access control did not decide itself.
    pub(crate) fn report_refusal(
        &mut self,
        key: SessionKey,
        what: Refused,
        reason: ReasonCode,
        text: Option<&str>,
    ) {
        if let Some(session) = session_at(&mut self.sessions, key) {
            let identity = session.link.as_ref().map(|link| &link.identity);
            self.refusals.report(&Refusal {
                what,
                reason,
                text,
                peer: None,
                is_admitted: true,
                client: &session.client,
                user: identity.and_then(|it| it.user.as_deref()),
            });
        }
    }

    /// Counts a refusal that the access control decided. The access control reports it itself.
    pub(crate) fn count_refused(&self, what: Refused, reason: ReasonCode) {
        self.refusals.count(what, reason);
    }

    fn session(&mut self, key: SessionKey) -> Option<&mut Session> {
        session_at(&mut self.sessions, key)
    }

    /// Borrows the parts of a connected session that sending needs.
    fn sending(&mut self, key: SessionKey) -> Option<Sending<'_>> {
        let session = session_at(&mut self.sessions, key)?;
        session.sending(&mut self.change_log)
    }

    /// The session of this connection, unless it was taken over or its output is closing.
    fn linked(&mut self, key: SessionKey, connection: ConnectionId) -> Option<&mut Session> {
        self.session(key).filter(|session| {
            session
                .link
                .as_ref()
                .is_some_and(|link| link.connection == connection && !link.output.is_closing())
        })
    }

    /// Whether the core still accepts packets of this connection: it was not taken over and its
    /// output is not closing.
    pub(crate) fn is_open(&mut self, key: SessionKey, connection: ConnectionId) -> bool {
        self.linked(key, connection).is_some()
    }

    fn find(&mut self, client: &str, connection: ConnectionId) -> Option<SessionKey> {
        let key = *self.by_client.get(client)?;
        self.is_open(key, connection).then_some(key)
    }

    /// Ends a connection at the request of the embedder.
    pub(crate) fn disconnect(
        &mut self,
        client: &str,
        connection: ConnectionId,
        reason: ReasonCode,
        text: Option<&str>,
    ) {
        if let Some(key) = self.find(client, connection) {
            self.close(key, reason, text);
        }
    }

    /// Appends the results of `of` for a bounded number of sessions from `from` on. Returns the
    /// next key, if any are left.
    pub(crate) fn collect<T>(
        &self,
        from: SessionKey,
        results: &mut Vec<T>,
        of: impl Fn(&Session) -> Option<T>,
    ) -> Option<SessionKey> {
        let rest = self.sessions.get(from as usize..)?;
        let some = &rest[..rest.len().min(SESSIONS_PER_HOLD_MAX)];
        let sessions = some.iter().filter_map(Option::as_deref);
        results.extend(sessions.filter_map(of));
        (some.len() < rest.len()).then(|| from + some.len() as SessionKey)
    }

    /// Applies changed access rules to connected clients. `refused` holds, by connection number,
    /// the connections that the access control no longer allows. Examines sessions from `from` on
    /// up to the work limit and returns the next key, if any are left.
    pub(crate) fn recheck(
        &mut self,
        from: SessionKey,
        refused: &HashMap<ConnectionId, Origin>,
        now: Instant,
    ) -> Option<SessionKey> {
        let work_end = self.work + WORK_PER_TURN_MAX;
        for key in from..self.sessions.len() as SessionKey {
            if self.work >= work_end {
                return Some(key);
            }
            self.work += work::PACKET;
            let Some(origin) = self.session(key).and_then(|session| session.origin()) else {
                continue;
            };
            // A client that has reauthenticated since then has a new identity, which this decision
            // does not cover.
            let is_refused = (refused.get(&origin.connection))
                .is_some_and(|asked| Arc::ptr_eq(&asked.identity, &origin.identity));
            if is_refused {
                self.disconnect_unauthorized(key, &origin);
            } else {
                self.drop_forbidden_will(key, &origin);
            }
            self.apply_rules_to_subscriptions(key, &origin, now);
            self.checkpoint();
        }
        None
    }

    /// Ends a connection that the access control no longer allows.
    fn disconnect_unauthorized(&mut self, key: SessionKey, origin: &Origin) {
        self.drop_forbidden_will(key, origin);
        let text = "this client is no longer authorized to be connected";
        let reason = ReasonCode::NOT_AUTHORIZED;
        if self.send_disconnect(key, reason, Some(text)) {
            self.count_refused(Refused::Connection, reason);
        }
    }

    /// Ends a connection after a protocol violation of its client.
    pub(crate) fn close_after_violation(
        &mut self,
        key: SessionKey,
        connection: ConnectionId,
        violation: Violation,
    ) {
        if self.is_open(key, connection) {
            self.close(key, violation.reason, Some(violation.text));
        }
    }

    /// Ends a connection and reports the refusal. Only for reasons that did not come from the
    /// access control.
    fn close(&mut self, key: SessionKey, reason: ReasonCode, text: Option<&str>) {
        if self.send_disconnect(key, reason, text) {
            self.report_refusal(key, Refused::Connection, reason, text);
        }
    }

    /// Sends DISCONNECT, if the client uses MQTT 5, and closes the output. The session keeps its
    /// link until the connection's task reports its end. Returns false if the output was closing
    /// already.
    fn send_disconnect(&mut self, key: SessionKey, reason: ReasonCode, text: Option<&str>) -> bool {
        let Some(session) = self.session(key) else {
            return false;
        };
        let Some(link) = &session.link else {
            return false;
        };
        if link.output.is_closing() {
            return false;
        }
        link.output
            .close(|out| codec::disconnect(out, link.version, reason, text, link.packet_bytes_max));
        if reason != ReasonCode::SESSION_TAKEN_OVER && reason != ReasonCode::SERVER_SHUTTING_DOWN {
            tracing::debug!(client = &*session.client, %reason, text, "disconnected a client");
            self.counts.disconnected += 1;
        }
        true
    }

    /// Disconnects all clients and refuses new ones.
    pub(crate) fn shut_down(&mut self) {
        self.shutting_down = true;
        for key in 0..self.sessions.len() as SessionKey {
            self.send_disconnect(key, ReasonCode::SERVER_SHUTTING_DOWN, None);
        }
    }

    /// Updates the session's entry among the deadlines.
    fn schedule(&mut self, key: SessionKey) {
        let Some(session) = session_at(&mut self.sessions, key) else {
            return;
        };
        let next = session.next_deadline();
        if replace_entry(&mut self.deadlines, key, &mut session.deadline, next)
            && let Some(at) = next
        {
            self.timers_changed |= self.deadlines.first() == Some(&(at, key));
        }
    }

    /// Adds the session to the evictable sessions or removes it from them.
    fn update_evictable(&mut self, key: SessionKey) {
        let Some(session) = session_at(&mut self.sessions, key) else {
            return;
        };
        let since = session.detached().filter(|_| session.is_empty());
        replace_entry(&mut self.evictable, key, &mut session.evictable, since);
    }

    /// Replaces the clock reading that converts times for the records.
    pub(crate) fn set_clock(&mut self, clock: Clock) {
        self.change_log.set_clock(clock);
    }

    /// Handles due wills and session expiries, and drops expired messages of disconnected clients,
    /// up to the work limit of a turn. Returns the next deadline.
    pub(crate) fn run_deadlines(&mut self, now: Instant) -> Option<Instant> {
        let work_end = self.work + WORK_PER_TURN_MAX;
        while self.work < work_end {
            self.work += work::PACKET;
            let (at, key) = *self.deadlines.first()?;
            if at > now {
                return Some(at);
            }
            let session = self.session(key)?;
            if session.is_over(now) {
                self.end_session(key, now);
            } else {
                if session.is_will_due(now) {
                    self.send_will(key, now);
                }
                self.drop_expired(key, now);
                self.schedule(key);
                self.update_evictable(key);
            }
            self.checkpoint();
        }
        self.next_deadline()
    }

    /// Drops the expired messages of a disconnected client, if a search is due. Otherwise they
    /// would take the room of messages for other clients until the client returns.
    fn drop_expired(&mut self, key: SessionKey, now: Instant) {
        let session = session_at(&mut self.sessions, key);
        let is_due = |session: &&mut Session| session.search_due().is_some_and(|at| at <= now);
        if let Some(session) = session.filter(is_due) {
            self.work += work::QUEUED_EXAMINED * session.queue.counts().0 as u64;
            let dropped = session.drop_expired(now, &mut self.change_log);
            self.counts.dropped += dropped as u64;
        }
    }

    /// When the next session ends, will is due, or search for expired messages is due.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|(at, _)| *at)
    }
}
