//! Sessions, subscriptions, retained messages, wills and deadlines behind one lock.
//!
//! In come packets of connected clients and calls of the embedder, with the time as an argument; out go packets into the
//! outputs of connections, and changes of durable state to the recorder. Does no I/O, reads no clock and waits for
//! nothing, so tests need no sockets and no sleeping.

mod answers;
mod connect;
mod publish;
mod restore;
mod share;
mod subscribe;
mod tenancy;
#[cfg(test)]
mod tests;
mod window;

use std::{
    collections::{BTreeSet, HashMap},
    hash::{BuildHasher, RandomState},
    sync::Arc,
    time::Instant,
};

pub(crate) use connect::{Accepted, TurnedAway};
pub(crate) use publish::{Begun, Source};

use tenancy::Tenancies;

use crate::{
    Access, Limits, Origin, ReasonCode, Refusal, Refused, Standing, Stats,
    clock::Clock,
    codec::{self, Violation},
    image::{self, ImageCursor},
    ledger::{Account, Kind, Ledger},
    limits::{
        EVICTION_LOOKS, SESSION_OVERHEAD_BYTES, SESSIONS_PER_HOLD_MAX, WORK_PER_TURN_MAX, work,
    },
    output::Output,
    persist::Recorder,
    refusal::Refusals,
    retained::Retained,
    round::Rounds,
    router::{Matches, Router, SessionKey},
    session::{Sending, Session},
};

/// All state of a broker.
pub(crate) struct Core {
    limits: Arc<Limits>,
    access: Arc<dyn Access>,
    refusals: Arc<Refusals>,
    sessions: Vec<Option<Box<Session>>>,
    free: Vec<SessionKey>,
    by_client: HashMap<Arc<str>, SessionKey>,
    router: Router,
    retained: Retained,
    /// Sessions that are absent and empty, the oldest first: they make room for new ones.
    evictable: BTreeSet<(Instant, SessionKey)>,
    /// When something is to happen to a session without its client: at most one entry for each.
    deadlines: BTreeSet<(Instant, SessionKey)>,
    last_connection: u64,
    last_session: u64,
    last_assigned_id: u64,
    /// Makes assigned client ids different from those of another run.
    run_id: u64,
    ledger: Ledger,
    recorder: Recorder,
    tenancies: Tenancies,
    counts: Counts,
    /// Writers to wake once the lock is given back.
    wakes: Vec<Arc<Output>>,
    /// The earliest deadline has changed: the timers have to look again.
    earlier: bool,
    shutting_down: bool,
    matches: Matches,
    /// Work done since the start, in the units of [`WORK_PER_TURN_MAX`].
    work: u64,
}

#[derive(Debug, Default)]
struct Counts {
    connections: usize,
    messages_in: u64,
    messages_out: u64,
    dropped: u64,
    throttled: u64,
    disconnected: u64,
    evicted: u64,
}

/// What has to be done after the lock is given back.
pub(crate) struct Wakes {
    pub(crate) writers: Vec<Arc<Output>>,
    pub(crate) timers: bool,
    /// Sessions that are no more.
    pub(crate) ended: Vec<u64>,
}

/// A session, for whoever needs other parts of the core beside it.
fn session_at(sessions: &mut [Option<Box<Session>>], key: SessionKey) -> Option<&mut Session> {
    sessions.get_mut(key as usize)?.as_deref_mut()
}

impl Core {
    /// An empty one. Numbers of connections and sessions begin behind those of earlier runs of the process.
    pub(crate) fn new(
        limits: Arc<Limits>,
        access: Arc<dyn Access>,
        refusals: Arc<Refusals>,
        run: u32,
        recorder: Recorder,
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
            last_connection: before,
            last_session: before,
            last_assigned_id: 0,
            run_id: RandomState::new().hash_one(0),
            ledger: Ledger::default(),
            recorder,
            tenancies: Tenancies::default(),
            counts: Counts::default(),
            wakes: Vec::new(),
            earlier: false,
            shutting_down: false,
            matches: Matches::default(),
            work: 0,
        }
    }

    /// Counts work that the core does not see.
    pub(crate) fn work_done(&mut self, units: u64) {
        self.work += units;
    }

    /// Work done since the start: a difference of two says how long the lock was held, but not on which machine.
    pub(crate) fn work(&self) -> u64 {
        self.work
    }

    /// Before the lock is given back: appends the changes made under it, and says what is to be done after it. What is to be
    /// written is left to the open round, where there is one.
    pub(crate) fn finish(&mut self, rounds: &Rounds) -> Wakes {
        self.recorder.append();
        if !self.wakes.is_empty() {
            rounds.gather(&mut self.wakes);
        }
        Wakes {
            writers: self.wakes.drain(..).collect(),
            timers: std::mem::take(&mut self.earlier),
            ended: self.tenancies.take_ended(),
        }
    }

    /// Other bounds, for what comes from now on.
    pub(crate) fn set_limits(&mut self, limits: Arc<Limits>) {
        self.limits = limits;
    }

    /// Between two packets or operations: see [`Recorder::checkpoint`].
    pub(crate) fn checkpoint(&mut self) {
        self.recorder.checkpoint();
    }

    /// The service was told that this connection of the session has ended.
    pub(crate) fn left(&mut self, session: u64) {
        self.tenancies.leave(session);
    }

    /// The numbers of all sessions.
    pub(crate) fn session_numbers(&self) -> Vec<u64> {
        let sessions = self.sessions.iter().flatten();
        sessions.map(|session| session.number).collect()
    }

    /// The next piece of an image.
    pub(crate) fn image(&self, cursor: &mut ImageCursor, bytes_max: usize) -> Option<Vec<u8>> {
        let clock = self.recorder.clock();
        image::next(&self.sessions, &self.retained, clock, cursor, bytes_max)
    }

    /// What an image takes at most, about.
    pub(crate) fn kept_bytes(&self) -> usize {
        self.by_client.len() * SESSION_OVERHEAD_BYTES
            + self.ledger.total(Kind::Subscriptions)
            + self.retained.bytes()
            + self.ledger.total(Kind::Queues)
            + self.ledger.total(Kind::State)
    }

    pub(crate) fn standing(&self, client: &str) -> Option<Standing> {
        let key = *self.by_client.get(client)?;
        let session = self.sessions.get(key as usize)?.as_deref()?;
        Some(Standing {
            origin: session.origin().filter(|_| session.is_present()),
            filters: session.filters().cloned().collect(),
        })
    }

    pub(crate) fn stats(&self) -> Stats {
        Stats {
            connections: self.counts.connections,
            sessions: self.by_client.len(),
            subscriptions: self.router.count(),
            retained: self.retained.count(),
            retained_bytes: self.retained.bytes(),
            queued_bytes: self.ledger.total(Kind::Queues),
            state_bytes: self.ledger.total(Kind::State),
            messages_in: self.counts.messages_in,
            messages_out: self.counts.messages_out,
            dropped: self.counts.dropped,
            throttled: self.counts.throttled,
            disconnected: self.counts.disconnected,
            evicted: self.counts.evicted,
            turned_away: 0,
        }
    }

    /// A message was lost outside of the core (refused at QoS 0).
    pub(crate) fn count_dropped(&mut self) {
        self.counts.dropped += 1;
    }

    pub(crate) fn count_throttled(&mut self) {
        self.counts.throttled += 1;
    }

    /// Tells of a refusal to a connected client that the access control has not decided.
    pub(crate) fn refused(
        &mut self,
        key: SessionKey,
        what: Refused,
        reason: ReasonCode,
        text: Option<&str>,
    ) {
        let refusals = self.refusals.clone();
        if let Some(session) = self.session(key) {
            let identity = session.link.as_ref().map(|link| &link.identity);
            refusals.tell(&Refusal {
                what,
                reason,
                text,
                peer: None,
                client: &session.client,
                user: identity.and_then(|it| it.user.as_deref()),
            });
        }
    }

    /// Counts one that it has.
    pub(crate) fn count_refused(&self, what: Refused, reason: ReasonCode) {
        self.refusals.count(what, reason);
    }

    fn session(&mut self, key: SessionKey) -> Option<&mut Session> {
        session_at(&mut self.sessions, key)
    }

    /// What sending to a connected session needs.
    fn sending(&mut self, key: SessionKey) -> Option<Sending<'_>> {
        let session = session_at(&mut self.sessions, key)?;
        session.sending(&mut self.recorder)
    }

    /// The session of a connection that may still be served.
    fn linked(&mut self, key: SessionKey, connection: u64) -> Option<&mut Session> {
        self.session(key).filter(|session| {
            session
                .link
                .as_ref()
                .is_some_and(|link| link.connection == connection && !link.output.is_closing())
        })
    }

    /// Whether packets of this connection still count: it was not taken over and is not being closed.
    pub(crate) fn is_open(&mut self, key: SessionKey, connection: u64) -> bool {
        self.linked(key, connection).is_some()
    }

    fn find(&mut self, client: &str, connection: u64) -> Option<SessionKey> {
        let key = *self.by_client.get(client)?;
        self.is_open(key, connection).then_some(key)
    }

    /// Ends a connection for the embedder.
    pub(crate) fn disconnect(
        &mut self,
        client: &str,
        connection: u64,
        reason: ReasonCode,
        text: Option<&str>,
    ) {
        if let Some(key) = self.find(client, connection) {
            self.close(key, reason, text);
        }
    }

    /// Adds connections that there are, to ask about them when some may be gone: without the number of their session. Looks at
    /// some sessions from this one on; returns the next one.
    pub(crate) fn connected(
        &self,
        from: SessionKey,
        connected: &mut Vec<Origin>,
    ) -> Option<SessionKey> {
        let rest = self.sessions.get(from as usize..)?;
        let some = &rest[..rest.len().min(SESSIONS_PER_HOLD_MAX)];
        let origins = some.iter().flatten().filter_map(|session| session.origin());
        connected.extend(origins.map(|who| Origin { session: 0, ..who }));
        (some.len() < rest.len()).then(|| from + some.len() as SessionKey)
    }

    /// Ends what the access control no longer allows to those who are connected; these, by connection, it has refused. Looks
    /// at some sessions from this one on; returns the next one.
    pub(crate) fn recheck(
        &mut self,
        from: SessionKey,
        refused: &HashMap<u64, Origin>,
        now: Instant,
    ) -> Option<SessionKey> {
        let work_end = self.work + WORK_PER_TURN_MAX;
        for key in from..self.sessions.len() as SessionKey {
            if self.work >= work_end {
                return Some(key);
            }
            self.work += work::PACKET;
            let Some(who) = self.session(key).and_then(|session| session.origin()) else {
                continue;
            };
            // Who has shown something else meanwhile was not asked about that.
            let is_refused = (refused.get(&who.connection))
                .is_some_and(|asked| Arc::ptr_eq(&asked.identity, &who.identity));
            if is_refused {
                self.turn_out(key, &who);
            }
            self.forbid_subscriptions(key, &who, now);
            self.checkpoint();
        }
        None
    }

    /// Ends a connection that the access control no longer allows.
    fn turn_out(&mut self, key: SessionKey, who: &Origin) {
        self.forbid_will(key, who);
        let text = "this client may no longer be connected";
        let reason = ReasonCode::NOT_AUTHORIZED;
        if self.say_last(key, reason, Some(text)) {
            self.count_refused(Refused::Connection, reason);
        }
    }

    /// Ends a connection whose client did something wrong.
    pub(crate) fn punish(&mut self, key: SessionKey, connection: u64, violation: Violation) {
        if self.is_open(key, connection) {
            self.close(key, violation.reason, Some(violation.text));
        }
    }

    /// Ends a connection for a reason that the access control did not give.
    fn close(&mut self, key: SessionKey, reason: ReasonCode, text: Option<&str>) {
        if self.say_last(key, reason, text) {
            self.refused(key, Refused::Connection, reason, text);
        }
    }

    /// DISCONNECT and close. The session keeps its link until the connection's task has ended and says so. False where that
    /// was done before.
    fn say_last(&mut self, key: SessionKey, reason: ReasonCode, text: Option<&str>) -> bool {
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
            .close(|out| codec::disconnect(out, reason, text, link.packet_bytes_max));
        if reason != ReasonCode::SESSION_TAKEN_OVER && reason != ReasonCode::SERVER_SHUTTING_DOWN {
            tracing::debug!(client = %session.client.escape_debug(), %reason, text, "disconnected a client");
            self.counts.disconnected += 1;
        }
        true
    }

    /// Disconnects everybody and takes nobody any more.
    pub(crate) fn shut_down(&mut self) {
        self.shutting_down = true;
        for key in 0..self.sessions.len() as SessionKey {
            self.say_last(key, ReasonCode::SERVER_SHUTTING_DOWN, None);
        }
    }

    /// Puts the next thing that happens to a session among the deadlines.
    fn schedule(&mut self, key: SessionKey) {
        let Some(session) = session_at(&mut self.sessions, key) else {
            return;
        };
        let next = session.next_deadline();
        if next == session.deadline {
            return;
        }
        if let Some(old) = session.deadline {
            self.deadlines.remove(&(old, key));
        }
        session.deadline = next;
        if let Some(at) = next {
            self.deadlines.insert((at, key));
            self.earlier |= self.deadlines.first() == Some(&(at, key));
        }
    }

    /// Puts a session among those that may be evicted, or takes it from there.
    fn note_evictable(&mut self, key: SessionKey) {
        let Some(session) = session_at(&mut self.sessions, key) else {
            return;
        };
        let since = session.detached().filter(|_| session.is_empty());
        if since == session.evictable {
            return;
        }
        if let Some(old) = session.evictable {
            self.evictable.remove(&(old, key));
        }
        session.evictable = since;
        self.evictable.extend(since.map(|since| (since, key)));
    }

    /// Ends the oldest session that is absent and empty, of this owner if one is among the oldest. False: there is none.
    fn evict(&mut self, account: &Arc<Account>, now: Instant) -> bool {
        let mut oldest = self.evictable.iter().take(EVICTION_LOOKS);
        let own = oldest.find(|(_, key)| {
            let session = self.sessions.get(*key as usize);
            session.is_some_and(|it| it.as_ref().is_some_and(|it| it.is_of(account)))
        });
        let Some((_, key)) = own.or(self.evictable.first()).copied() else {
            return false;
        };
        self.counts.evicted += 1;
        self.end_session(key, now);
        true
    }

    /// Times that are recorded from now on are by this reading.
    pub(crate) fn set_clock(&mut self, clock: Clock) {
        self.recorder.set_clock(clock);
    }

    /// Does what is due, as much as a turn may; returns when to come again.
    pub(crate) fn run_deadlines(&mut self, now: Instant) -> Option<Instant> {
        let work_end = self.work + WORK_PER_TURN_MAX;
        while self.work < work_end {
            self.work += work::PACKET;
            let (at, key) = *self.deadlines.first()?;
            if at > now {
                return Some(at);
            }
            if self.session(key)?.is_over(now) {
                self.end_session(key, now);
            } else {
                self.send_will(key, now);
                self.schedule(key);
                self.note_evictable(key);
            }
            self.checkpoint();
        }
        self.deadlines.first().map(|(at, _)| *at)
    }
}
