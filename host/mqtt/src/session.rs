//! The state of one client that outlives its connections (section 4.1).
//!
//! Every change of durable session state must be a method of this module or of
//! `session_queue.rs` that also records the change, or recovery loses it.

mod receiving;
mod subscribing;
mod subscriptions;

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use statehouse_protocol::{ConnectionId, SessionId};
use subscriptions::Subscriptions;

use crate::{
    ConnectionSummary, Origin, ProtocolVersion, ReasonCode, SessionSummary,
    barrier::Barrier,
    change::{Part, RecordedWill},
    codec::Will,
    exchanges::Exchanges,
    ledger::{Account, Holding, Kind},
    limits::EXPIRED_SEARCH_PERIOD,
    link::{AckPosition, Link},
    persist::{ChangeLog, SessionLog},
    session_queue::{Orphan, SessionQueue},
};

#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) client: Arc<str>,
    /// Never reused for another session, even after a restart.
    pub(crate) number: SessionId,
    /// Counts this session against its owner's limit.
    place: Holding,
    /// The user who may resume the session. If there is none, any client may.
    owner: Option<Box<str>>,
    /// Session Expiry Interval: how long the session outlives its connection.
    expiry_s: u32,
    /// Whether the log holds this session.
    durable: bool,
    /// Whether the log names the user although it does not hold the session.
    user_recorded: bool,
    subscriptions: Subscriptions,
    pub(crate) queue: SessionQueue,
    /// Pending searches for retained messages by filter: at most one for each subscription, which
    /// pays for it.
    pub(crate) retained_searches: BTreeMap<Bytes, RetainedSearch>,
    exchanges: Exchanges,
    will: Option<Will>,
    /// Whether the log holds the will. It does not if it had no room when the client connected.
    will_recorded: bool,
    /// Memory that the packet ids and the will take.
    state: Holding,
    /// When the connection was lost, if there is none.
    detached: Option<Instant>,
    /// When to publish the will, if there is no connection.
    will_due: Option<Instant>,
    /// When the session expires, if there is no connection.
    ends: Option<Instant>,
    /// The session's entry among the core's deadlines.
    pub(crate) deadline: Option<Instant>,
    /// The session's entry among the evictable sessions.
    pub(crate) evictable: Option<Instant>,
    pub(crate) link: Option<Link>,
    /// When the queue was last searched for expired messages.
    searched: Option<Instant>,
    /// Whether a dropped message was logged since the last connection.
    pub(crate) drop_logged: bool,
}

/// A search for the retained messages of a new subscription. It must not copy the options of the
/// subscription: a further SUBSCRIBE may replace them before the search is over.
#[derive(Debug)]
pub(crate) struct RetainedSearch {
    /// The last topic that the search examined.
    pub(crate) after: Option<Bytes>,
    /// The newest retained message at the time of the SUBSCRIBE. Later ones are sent when they are
    /// published.
    pub(crate) newest: u64,
    /// The connection of the SUBSCRIBE. None after a restart.
    pub(crate) connection: ConnectionId,
    /// Whether the log holds that the search is not over.
    pub(crate) recorded: bool,
}

/// How to handle a QoS 2 PUBLISH.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// A new message, with the sequence of its PUBREC.
    New(u64),
    /// A duplicate. It was answered, or the answer to the original will answer it.
    Repeated,
    /// There is no memory for its packet id. Holds the sequence of the PUBREC that refuses it.
    Refused(u64),
}

/// The parts of a session that sending needs, borrowed separately.
pub(crate) struct Sending<'a> {
    pub(crate) link: &'a mut Link,
    pub(crate) queue: &'a mut SessionQueue,
    pub(crate) exchanges: &'a mut Exchanges,
    pub(crate) log: SessionLog<'a>,
}

impl Session {
    pub(crate) fn new(client: Arc<str>, number: SessionId, account: &Arc<Account>) -> Self {
        let mut place = Holding::new(account, Kind::Sessions);
        place.set(1);
        Self {
            client,
            number,
            place,
            owner: None,
            expiry_s: 0,
            durable: false,
            user_recorded: false,
            subscriptions: Subscriptions::new(account),
            queue: SessionQueue::new(Holding::new(account, Kind::Queues)),
            retained_searches: BTreeMap::new(),
            exchanges: Exchanges::default(),
            will: None,
            will_recorded: false,
            state: Holding::new(account, Kind::State),
            detached: None,
            will_due: None,
            ends: None,
            deadline: None,
            evictable: None,
            link: None,
            searched: None,
            drop_logged: false,
        }
    }

    /// Whether changes are recorded: the session was to outlive its connection when that connection
    /// began.
    pub(crate) fn is_durable(&self) -> bool {
        self.durable
    }

    /// The log of this session's changes.
    pub(crate) fn log<'a>(&self, change_log: &'a mut ChangeLog) -> SessionLog<'a> {
        change_log.session_log(self.number, self.durable)
    }

    /// Begins or resumes the session for a CONNECT. Without an expiry the session stops being
    /// durable.
    pub(crate) fn attach(
        &mut self,
        begins: bool,
        expiry_s: u32,
        will: Option<Will>,
        change_log: &mut ChangeLog,
    ) {
        if expiry_s == 0 {
            self.log(change_log).write(Part::End);
        }
        self.durable = expiry_s > 0;
        self.expiry_s = expiry_s;
        self.will = will;
        self.count_state();
        (self.detached, self.will_due, self.ends) = (None, None, None);
        self.drop_logged = false;
        let clock = *change_log.clock();
        self.will_recorded = self.durable && change_log.has_room();
        let will = self.recorded_will();
        let will = will.map(|will| RecordedWill::new(will, &clock));
        self.log(change_log).write(if begins {
            Part::Begin {
                client: &self.client,
                expiry_s,
                will,
            }
        } else {
            Part::Attach { expiry_s, will }
        });
    }

    /// Charges everything that the session holds to this account from now on.
    pub(crate) fn transfer(&mut self, account: &Arc<Account>) {
        self.place.transfer(account);
        self.state.transfer(account);
        self.subscriptions.transfer(account);
        self.queue.transfer(account);
    }

    /// The account of the session's owner.
    pub(crate) fn account(&self) -> &Arc<Account> {
        self.place.account()
    }

    pub(crate) fn is_owned_by(&self, account: &Arc<Account>) -> bool {
        Arc::ptr_eq(self.account(), account)
    }

    /// Whether a client that starts a new session instead would lose nothing.
    pub(crate) fn is_empty(&self) -> bool {
        self.subscriptions.is_empty()
            && self.queue.is_empty()
            && self.exchanges.is_empty()
            && self.will.is_none()
    }

    fn count_state(&mut self) {
        self.state
            .set(self.will_bytes() + self.exchanges.cost_bytes());
    }

    /// Memory that the will takes.
    pub(crate) fn will_bytes(&self) -> usize {
        let will = self.will.as_ref();
        will.map_or(0, |will| will.message.cost_bytes())
    }

    /// Whether a client of this user may resume the session. A session may only be resumed by the
    /// user who created it, since its queued messages belong to that user.
    pub(crate) fn is_resumable(&self, user: Option<&str>, now: Instant) -> bool {
        let is_of_other_user = self.owner.is_some() && self.owner.as_deref() != user;
        // Without an expiry it ends with its connection.
        self.expiry_s > 0 && !self.is_over(now) && !is_of_other_user
    }

    /// Makes this user the owner if the session has none. Must be called after
    /// [`attach`](Self::attach).
    pub(crate) fn claim(&mut self, user: Option<&str>, change_log: &mut ChangeLog) {
        if let (None, Some(user)) = (&self.owner, user) {
            self.owner = Some(user.into());
            self.log(change_log).write(Part::Owner(user));
        }
    }

    /// Records the user of a session that the log does not hold. Must be called before the first
    /// request of the session is handed over, so that a reader of the log can name the user of the
    /// request. Recovery ignores the change, since it knows no such session.
    pub(crate) fn record_user(&mut self, change_log: &mut ChangeLog) {
        if self.durable || self.user_recorded || !change_log.has_room() {
            return;
        }
        if let Some(user) = &self.owner {
            self.user_recorded = true;
            let mut log = change_log.session_log(self.number, true);
            log.write(Part::Owner(user));
        }
    }

    /// The user of a session that the log does not hold, if the log names the user.
    pub(crate) fn recorded_user(&self) -> Option<&str> {
        let is_recorded = self.user_recorded && !self.durable;
        self.owner().filter(|_| is_recorded)
    }

    /// Changes the Session Expiry Interval for a DISCONNECT. Returns false if the client tries to
    /// raise the zero of its CONNECT (section 3.14.2.2.2). A zero of the broker stays.
    pub(crate) fn set_expiry(&mut self, expiry_s: u32, change_log: &mut ChangeLog) -> bool {
        if expiry_s > 0 && self.link.as_ref().is_none_or(|it| !it.asked_for_expiry) {
            return false;
        }
        if self.expiry_s != expiry_s && self.expiry_s > 0 {
            self.expiry_s = expiry_s;
            self.log(change_log).write(Part::Expiry(expiry_s));
        }
        true
    }

    /// Removes the will, to publish or to drop it.
    pub(crate) fn take_will(&mut self, change_log: &mut ChangeLog) -> Option<Will> {
        self.will_due = None;
        let will = self.will.take();
        if will.is_some() {
            self.count_state();
            self.log(change_log).write(Part::NoWill);
        }
        will
    }

    /// Removes the connection and schedules the will and the expiry. During a shutdown wills wait
    /// for the next start. Returns how many messages were lost with the connection, and those that
    /// another session may receive.
    pub(crate) fn detach(
        &mut self,
        now: Instant,
        shutting_down: bool,
        change_log: &mut ChangeLog,
    ) -> (usize, Vec<Orphan>) {
        self.link = None;
        self.record_will(change_log);
        let mut log = self.log(change_log);
        log.detached(now);
        let dropped = self.queue.drop_transient(&mut log);
        // While the log has no room, these messages are kept in memory only.
        if log.change_log.has_room() {
            self.queue.record_unrecorded(&mut log);
        }
        self.set_detached(now);
        if shutting_down {
            self.will_due = None;
        }
        dropped
    }

    /// Records a will that the log had no room for when the client connected, if it has now.
    fn record_will(&mut self, change_log: &mut ChangeLog) {
        let clock = *change_log.clock();
        if let Some(will) = &self.will
            && self.durable
            && !self.will_recorded
            && change_log.has_room()
        {
            let (expiry_s, will) = (self.expiry_s, Some(RecordedWill::new(will, &clock)));
            self.log(change_log).write(Part::Attach { expiry_s, will });
            self.will_recorded = true;
        }
    }

    /// Restores a recovered session, which is disconnected since `detached`. Its will is not due
    /// before `will_from`.
    pub(crate) fn restore(
        &mut self,
        owner: Option<Box<str>>,
        expiry_s: u32,
        will: Option<Will>,
        detached: Instant,
        will_from: Instant,
    ) {
        self.durable = true;
        self.owner = owner;
        self.expiry_s = expiry_s;
        self.will = will;
        self.will_recorded = true;
        self.count_state();
        self.set_detached(detached);
        self.will_due = self.will_due.map(|due| due.max(will_from));
    }

    fn set_detached(&mut self, since: Instant) {
        let seconds = |seconds: u32| since.checked_add(Duration::from_secs(seconds.into()));
        self.detached = Some(since);
        // An interval of u32::MAX never expires, if the limit allows it (section 3.1.2.11.2).
        self.ends = (self.expiry_s != u32::MAX)
            .then(|| seconds(self.expiry_s))
            .flatten();
        self.will_due = self.will.as_ref().and_then(|will| seconds(will.delay_s));
    }

    /// Records the end of the session.
    pub(crate) fn end(&mut self, change_log: &mut ChangeLog) {
        self.log(change_log).write(Part::End);
    }

    pub(crate) fn is_over(&self, now: Instant) -> bool {
        self.ends.is_some_and(|ends| ends <= now)
    }

    pub(crate) fn is_will_due(&self, now: Instant) -> bool {
        self.will_due.is_some_and(|due| due <= now)
    }

    /// Whether a search for expired messages is due. A flood of messages must not search the queue
    /// for each of them.
    pub(crate) fn may_search(&self, now: Instant) -> bool {
        self.searched
            .is_none_or(|at| now >= at + EXPIRED_SEARCH_PERIOD)
    }

    /// Drops the expired messages of the queue. Returns how many.
    pub(crate) fn drop_expired(&mut self, now: Instant, change_log: &mut ChangeLog) -> usize {
        self.searched = Some(now);
        let mut log = self.log(change_log);
        self.queue.drop_expired(now, &mut log)
    }

    /// When to search the queue of a disconnected client for expired messages. A connection finds
    /// them when it sends the queue.
    pub(crate) fn search_due(&self) -> Option<Instant> {
        let expires = self.queue.expires().filter(|_| self.detached.is_some())?;
        let earliest = self.searched.map(|at| at + EXPIRED_SEARCH_PERIOD);
        Some(earliest.map_or(expires, |at| at.max(expires)))
    }

    /// When the next will, expiry or search for expired messages is due.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let all = [self.will_due, self.ends, self.search_due()];
        all.into_iter().flatten().min()
    }

    /// The current connection.
    pub(crate) fn origin(&self) -> Option<Origin> {
        let link = self.link.as_ref()?;
        Some(Origin {
            client: self.client.clone(),
            connection: link.connection,
            session: self.number,
            identity: link.identity.clone(),
        })
    }

    /// Whether the session has a connection whose output is not closing.
    pub(crate) fn is_present(&self) -> bool {
        let link = self.link.as_ref();
        link.is_some_and(|link| !link.output.is_closing())
    }

    pub(crate) fn expiry_s(&self) -> u32 {
        self.expiry_s
    }

    pub(crate) fn owner(&self) -> Option<&str> {
        self.owner.as_deref()
    }

    pub(crate) fn will(&self) -> Option<&Will> {
        self.will.as_ref()
    }

    /// The will, if the log holds it.
    pub(crate) fn recorded_will(&self) -> Option<&Will> {
        self.will.as_ref().filter(|_| self.will_recorded)
    }

    pub(crate) fn detached(&self) -> Option<Instant> {
        self.detached
    }

    pub(crate) fn subscriptions(&self) -> &Subscriptions {
        &self.subscriptions
    }

    /// What the session holds, for operators.
    pub(crate) fn summary(&self) -> SessionSummary {
        let connection = self.origin().zip(self.link.as_ref());
        let (queued, in_flight) = self.queue.counts();
        SessionSummary {
            client: self.client.clone(),
            connection: connection.map(|(origin, link)| ConnectionSummary {
                origin,
                version: link.version,
                address: link.address,
                since: link.since,
            }),
            subscriptions: self.subscriptions.active_len(),
            queued,
            queued_bytes: self.queue.bytes(),
            in_flight,
        }
    }

    pub(crate) fn connect(&mut self, link: Link) {
        self.exchanges.connect(match link.version {
            ProtocolVersion::V311 => u16::MAX.into(),
            ProtocolVersion::V5 => link.receive_max,
        });
        self.link = Some(link);
    }

    /// The parts that sending needs, if there is a connection.
    pub(crate) fn sending<'a>(&'a mut self, change_log: &'a mut ChangeLog) -> Option<Sending<'a>> {
        let log = self.log(change_log);
        Some(Sending {
            link: self.link.as_mut()?,
            queue: &mut self.queue,
            exchanges: &mut self.exchanges,
            log,
        })
    }

    /// Whether the connection uses MQTT 3.1.1.
    pub(crate) fn is_v311(&self) -> bool {
        let link = self.link.as_ref();
        link.is_some_and(|link| link.version == ProtocolVersion::V311)
    }

    /// Whether a client of MQTT 3.1.1 must wait until the broker has acknowledged its messages.
    pub(crate) fn must_wait_to_publish(&self) -> bool {
        let link = self.link.as_ref();
        link.is_some_and(|it| it.version == ProtocolVersion::V311 && it.is_receive_max_reached())
    }

    /// Answers a pending acknowledgement of the current connection. Does nothing if `position` is
    /// of an earlier connection.
    pub(crate) fn answer(
        &mut self,
        position: AckPosition,
        reason: ReasonCode,
        text: Option<&str>,
        barrier: Barrier,
    ) {
        let last_queued = self.queue.last_number();
        let link = self.link.as_mut();
        if let Some(link) = link.filter(|link| link.connection == position.connection) {
            link.answer(position.sequence, reason, text, last_queued, barrier);
        }
    }
}
