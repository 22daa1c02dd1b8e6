//! The state of one client that outlives its connections (section 4.1).
//!
//! Every change of what a session has to remember is a method of this file or of outbox.rs, and recorded there.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;

use crate::{
    Limits, Origin, ReasonCode,
    change::{Part, Testament},
    codec::{Violation, Will},
    exchanges::{Exchanges, Known},
    gate::BatchNumber,
    ledger::{Account, Holding, Kind},
    limits::{OWN_SUBSCRIPTION_BYTES, STATE_BYTES_FLOOR, SUBSCRIPTION_BYTES_FLOOR},
    link::Link,
    outbox::Outbox,
    persist::{Recorder, Tape},
    router::{Subscription, cost_bytes},
    topic,
};

/// One session.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) client: Arc<str>,
    /// Never that of another one, over restarts too.
    pub(crate) number: u64,
    /// Its place among all sessions.
    place: Holding,
    /// The user who may resume it; anybody may where there is none.
    owner: Option<Box<str>>,
    /// Session Expiry Interval: how long it lives without a connection.
    expiry_s: u32,
    /// Whether the log knows it.
    durable: bool,
    subscriptions: HashMap<Bytes, Subscription>,
    /// What they cost the router, in bytes.
    subscription_bytes: usize,
    /// What of this is for the client's own topics.
    own_subscription_bytes: usize,
    /// What of it counts as the owner's.
    charged_subscriptions: Holding,
    /// How many of these hold a wildcard.
    wildcards: usize,
    /// How many of these are shared.
    shared: usize,
    pub(crate) outbox: Outbox,
    /// Searches for retained messages that a SUBSCRIBE has begun, in their order. The connection handles no other packet
    /// before they have ended.
    pub(crate) replays: VecDeque<Replay>,
    exchanges: Exchanges,
    will: Option<Will>,
    /// Whether the log knows the will. It does not if it had no room for it.
    will_recorded: bool,
    /// What the packet ids and the will take.
    state: Holding,
    /// When the connection was lost, while there is none.
    detached: Option<Instant>,
    /// When the will is to be sent, once the connection is lost.
    will_due: Option<Instant>,
    /// When it ends, while there is no connection.
    ends: Option<Instant>,
    /// The entry of this session among the core's deadlines.
    pub(crate) deadline: Option<Instant>,
    /// The entry of this session among those that may be evicted.
    pub(crate) evictable: Option<Instant>,
    pub(crate) link: Option<Link>,
    /// When its full queue was last searched for expired messages.
    pub(crate) searched: Option<Instant>,
    /// Whether a dropped message was logged since the last connection.
    pub(crate) drop_logged: bool,
}

/// Retained messages that a new subscription is still to be sent.
#[derive(Debug)]
pub(crate) struct Replay {
    pub(crate) filter: Bytes,
    pub(crate) subscription: Subscription,
    /// The topic that was looked at last.
    pub(crate) after: Option<Bytes>,
}

/// What is to be done with a QoS 2 PUBLISH.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// Seen for the first time; the sequence of its PUBREC.
    New(u64),
    /// A repetition: answered, or to be answered with the original.
    Repeated,
    /// There is no room to remember it; the sequence of the PUBREC that refuses it.
    Refused(u64),
}

/// What sending needs of a session, side by side.
pub(crate) struct Sending<'a> {
    pub(crate) link: &'a mut Link,
    pub(crate) outbox: &'a mut Outbox,
    pub(crate) exchanges: &'a mut Exchanges,
    pub(crate) tape: Tape<'a>,
}

/// A session as recovery found it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Standing {
    pub(crate) owner: Option<Box<str>>,
    pub(crate) expiry_s: u32,
    pub(crate) will: Option<Will>,
    /// When its connection was lost.
    pub(crate) detached: Instant,
}

impl Session {
    pub(crate) fn new(client: Arc<str>, number: u64, account: &Arc<Account>) -> Self {
        let mut place = Holding::new(account, Kind::Sessions);
        place.set(1);
        Self {
            client,
            number,
            place,
            owner: None,
            expiry_s: 0,
            durable: false,
            subscriptions: HashMap::new(),
            subscription_bytes: 0,
            own_subscription_bytes: 0,
            charged_subscriptions: Holding::new(account, Kind::Subscriptions),
            wildcards: 0,
            shared: 0,
            outbox: Outbox::new(Holding::new(account, Kind::Queues)),
            replays: VecDeque::new(),
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

    /// Whether its changes are recorded: it was to outlive its connection when that began.
    pub(crate) fn is_durable(&self) -> bool {
        self.durable
    }

    /// Where its changes are recorded.
    pub(crate) fn tape<'a>(&self, recorder: &'a mut Recorder) -> Tape<'a> {
        recorder.tape(self.number, self.durable)
    }

    /// A CONNECT: it begins, or is resumed. One that will not outlive this connection is not durable any more.
    pub(crate) fn attach(
        &mut self,
        begins: bool,
        expiry_s: u32,
        will: Option<Will>,
        recorder: &mut Recorder,
    ) {
        if expiry_s == 0 {
            self.tape(recorder).write(Part::End);
        }
        self.durable = expiry_s > 0;
        self.expiry_s = expiry_s;
        self.will = will;
        self.count_state();
        (self.detached, self.will_due, self.ends) = (None, None, None);
        self.drop_logged = false;
        let clock = *recorder.clock();
        self.will_recorded = self.durable && recorder.has_room();
        let will = self.recorded_will();
        let will = will.map(|will| Testament::new(will, &clock));
        self.tape(recorder).write(if begins {
            Part::Begin {
                client: &self.client,
                expiry_s,
                will,
            }
        } else {
            Part::Attach { expiry_s, will }
        });
    }

    /// Everything that it holds counts as this owner's from now on.
    pub(crate) fn transfer(&mut self, account: &Arc<Account>) {
        self.place.transfer(account);
        self.state.transfer(account);
        self.charged_subscriptions.transfer(account);
        self.outbox.transfer(account);
    }

    /// Its owner's.
    pub(crate) fn account(&self) -> &Arc<Account> {
        self.place.account()
    }

    /// Whether it counts as this owner's.
    pub(crate) fn is_of(&self, account: &Arc<Account>) -> bool {
        Arc::ptr_eq(self.account(), account)
    }

    /// Whether a client that begins afresh loses nothing: nothing waits in it, and it remembers nothing.
    pub(crate) fn is_empty(&self) -> bool {
        self.subscriptions.is_empty()
            && self.outbox.is_empty()
            && self.exchanges.is_empty()
            && self.will.is_none()
    }

    fn count_state(&mut self) {
        self.state
            .set(self.will_bytes() + self.exchanges.cost_bytes());
    }

    /// What its will takes.
    pub(crate) fn will_bytes(&self) -> usize {
        let will = self.will.as_ref();
        will.map_or(0, |will| will.message.cost_bytes())
    }

    /// Whether it is another user's.
    pub(crate) fn is_of_another(&self, user: Option<&str>) -> bool {
        self.owner.is_some() && self.owner.as_deref() != user
    }

    /// It is this user's from now on, where it was nobody's and there is one. After [`attach`](Self::attach).
    pub(crate) fn claim(&mut self, user: Option<&str>, recorder: &mut Recorder) {
        if let (None, Some(user)) = (&self.owner, user) {
            self.owner = Some(user.into());
            self.tape(recorder).write(Part::Owner { user });
        }
    }

    /// The client has changed its Session Expiry Interval with its DISCONNECT. False: from zero it cannot be raised
    /// (section 3.14.2.2.2).
    pub(crate) fn set_expiry(&mut self, expiry_s: u32, recorder: &mut Recorder) -> bool {
        if self.expiry_s == 0 && expiry_s > 0 {
            return false;
        }
        if self.expiry_s != expiry_s {
            self.expiry_s = expiry_s;
            self.tape(recorder).write(Part::Expiry(expiry_s));
        }
        true
    }

    /// The will, to be sent or dropped: there is none any more.
    pub(crate) fn take_will(&mut self, recorder: &mut Recorder) -> Option<Will> {
        self.will_due = None;
        let will = self.will.take();
        if will.is_some() {
            self.count_state();
            self.tape(recorder).write(Part::NoWill);
        }
        will
    }

    /// It is without a connection: its will and its end are due, now or later. In a shutdown wills wait for the next
    /// start. Returns how many messages were lost with the connection.
    pub(crate) fn detach(
        &mut self,
        now: Instant,
        shutting_down: bool,
        recorder: &mut Recorder,
    ) -> usize {
        self.link = None;
        let mut tape = self.tape(recorder);
        tape.detached(now);
        let dropped = self.outbox.drop_transient(&mut tape);
        // While the log has no room these are kept in memory alone.
        if tape.has_room() {
            self.outbox.record_in_flight(&mut tape);
        }
        self.alone_since(now);
        if shutting_down {
            self.will_due = None;
        }
        dropped
    }

    /// Back from a record, without a connection since then. Its will is not due before `will_from`.
    pub(crate) fn restore(&mut self, standing: Standing, will_from: Instant) {
        self.durable = true;
        self.owner = standing.owner;
        self.expiry_s = standing.expiry_s;
        self.will = standing.will;
        self.will_recorded = true;
        self.count_state();
        self.alone_since(standing.detached);
        self.will_due = self.will_due.map(|due| due.max(will_from));
    }

    fn alone_since(&mut self, since: Instant) {
        let seconds = |seconds: u32| since.checked_add(Duration::from_secs(seconds.into()));
        self.detached = Some(since);
        // u32::MAX means for ever (section 3.1.2.11.2), where the limit lets it pass.
        self.ends = (self.expiry_s != u32::MAX)
            .then(|| seconds(self.expiry_s))
            .flatten();
        self.will_due = self.will.as_ref().and_then(|will| seconds(will.delay_s));
    }

    /// It is no more.
    pub(crate) fn end(&mut self, recorder: &mut Recorder) {
        self.tape(recorder).write(Part::End);
    }

    pub(crate) fn is_over(&self, now: Instant) -> bool {
        self.ends.is_some_and(|ends| ends <= now)
    }

    pub(crate) fn is_will_due(&self, now: Instant) -> bool {
        self.will_due.is_some_and(|due| due <= now)
    }

    /// When the next thing happens to it without its client.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        [self.will_due, self.ends].into_iter().flatten().min()
    }

    /// The connection that it has.
    pub(crate) fn origin(&self) -> Option<Origin> {
        let link = self.link.as_ref()?;
        Some(Origin {
            client: self.client.clone(),
            connection: link.connection,
            session: self.number,
            identity: link.identity.clone(),
        })
    }

    /// Whether it has a connection that is not being closed.
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

    /// The will, where the log knows it.
    pub(crate) fn recorded_will(&self) -> Option<&Will> {
        self.will.as_ref().filter(|_| self.will_recorded)
    }

    pub(crate) fn detached(&self) -> Option<Instant> {
        self.detached
    }

    /// Adds or replaces a subscription. True where it is new.
    pub(crate) fn subscribe(
        &mut self,
        filter: &Bytes,
        subscription: Subscription,
        recorder: &mut Recorder,
    ) -> bool {
        let old = self.subscriptions.insert(filter.clone(), subscription);
        if old != Some(subscription) {
            self.tape(recorder).write(Part::Subscribe {
                filter,
                subscription,
            });
        }
        let new = old.is_none();
        if new {
            self.count_subscription(filter);
        }
        new
    }

    /// Puts back a subscription that recovery found.
    pub(crate) fn restore_subscription(&mut self, filter: &Bytes, subscription: Subscription) {
        if self
            .subscriptions
            .insert(filter.clone(), subscription)
            .is_none()
        {
            self.count_subscription(filter);
        }
    }

    fn count_subscription(&mut self, filter: &[u8]) {
        self.wildcards += usize::from(topic::has_wildcard(filter));
        self.shared += usize::from(topic::is_shared(filter));
        self.subscription_bytes += cost_bytes(filter);
        self.own_subscription_bytes += self.own_bytes(filter);
        self.charged_subscriptions.set(self.to_charge());
    }

    /// What a subscription costs, if it is to the client's own topics.
    fn own_bytes(&self, filter: &[u8]) -> usize {
        match topic::is_own(filter, &self.client) {
            true => cost_bytes(filter),
            false => 0,
        }
    }

    fn to_charge(&self) -> usize {
        self.subscription_bytes - self.own_subscription_bytes.min(OWN_SUBSCRIPTION_BYTES)
    }

    /// Whether the owner's share, or for recovery what all owners may hold, has room for one more subscription.
    pub(crate) fn has_room_to_subscribe(&self, filter: &[u8], max: usize, shares: bool) -> bool {
        let own = self.own_subscription_bytes + self.own_bytes(filter);
        let bytes = self.subscription_bytes + cost_bytes(filter);
        let charge = bytes - own.min(OWN_SUBSCRIPTION_BYTES);
        let more = charge.saturating_sub(self.charged_subscriptions.amount());
        let floor = if shares {
            SUBSCRIPTION_BYTES_FLOOR
        } else {
            usize::MAX
        };
        more == 0 || self.charged_subscriptions.fits(more, max, floor)
    }

    /// Removes a subscription. False where there was none.
    pub(crate) fn unsubscribe(&mut self, filter: &Bytes, recorder: &mut Recorder) -> bool {
        let existed = self.subscriptions.remove(filter).is_some();
        if existed {
            self.tape(recorder).write(Part::Unsubscribe { filter });
        }
        self.wildcards -= usize::from(existed && topic::has_wildcard(filter));
        self.shared -= usize::from(existed && topic::is_shared(filter));
        if existed {
            self.subscription_bytes -= cost_bytes(filter);
            self.own_subscription_bytes -= self.own_bytes(filter);
            self.charged_subscriptions.set(self.to_charge());
        }
        existed
    }

    pub(crate) fn subscription(&self, filter: &[u8]) -> Option<Subscription> {
        self.subscriptions.get(filter).copied()
    }

    pub(crate) fn filters(&self) -> impl Iterator<Item = &Bytes> {
        self.subscriptions.keys()
    }

    /// The filters of its shared subscriptions.
    pub(crate) fn shared_filters(&self) -> impl Iterator<Item = &Bytes> {
        let shared = (self.shared > 0).then(|| self.filters());
        shared
            .into_iter()
            .flatten()
            .filter(|filter| topic::is_shared(filter))
    }

    /// What all its subscriptions cost.
    pub(crate) fn subscription_bytes(&self) -> usize {
        self.subscription_bytes
    }

    pub(crate) fn subscription_count(&self) -> usize {
        self.subscriptions.len()
    }

    pub(crate) fn shared_count(&self) -> usize {
        self.shared
    }

    pub(crate) fn has_wildcards(&self) -> bool {
        self.wildcards > 0
    }

    pub(crate) fn subscriptions(&self) -> impl Iterator<Item = (&Bytes, Subscription)> {
        self.subscriptions
            .iter()
            .map(|(filter, own)| (filter, *own))
    }

    /// It is connected by this link.
    pub(crate) fn connect(&mut self, link: Link) {
        self.exchanges.connect(link.receive_max);
        self.link = Some(link);
    }

    /// What sending needs, while there is a connection.
    pub(crate) fn sending<'a>(&'a mut self, recorder: &'a mut Recorder) -> Option<Sending<'a>> {
        let tape = self.tape(recorder);
        Some(Sending {
            link: self.link.as_mut()?,
            outbox: &mut self.outbox,
            exchanges: &mut self.exchanges,
            tape,
        })
    }

    /// QoS 2 messages of the client that have their answer.
    pub(crate) fn answered(&self) -> impl Iterator<Item = (u16, ReasonCode)> {
        self.exchanges.answered()
    }

    /// Puts back the QoS 2 messages of the client that recovery found.
    pub(crate) fn restore_received(&mut self, found: impl IntoIterator<Item = (u16, ReasonCode)>) {
        self.exchanges.restore(found);
        self.count_state();
    }

    /// A QoS 2 PUBLISH over the current connection.
    pub(crate) fn receive(
        &mut self,
        packet_id: u16,
        limits: &Limits,
        recorder: &mut Recorder,
    ) -> Result<Arrival, Violation> {
        // An answer to an earlier connection may not be durable yet.
        let told = self.tape(recorder).latest();
        let Some(link) = &mut self.link else {
            return Ok(Arrival::Repeated);
        };
        let after = self.outbox.progress().0;
        let full = self.exchanges.is_full();
        match self.exchanges.get(packet_id) {
            Known::Nothing if full => {
                let text = "too many QoS 2 messages wait for their PUBREL";
                Err(Violation {
                    reason: ReasonCode::RECEIVE_MAXIMUM_EXCEEDED,
                    text,
                })
            }
            Known::Nothing => {
                let sequence = link.owe(packet_id, true)?;
                let more = self.exchanges.growth_bytes();
                let max = limits.state_bytes_total_max;
                if more > 0 && !self.state.fits(more, max, STATE_BYTES_FLOOR) {
                    return Ok(Arrival::Refused(sequence));
                }
                self.exchanges.begin(packet_id, (link.connection, sequence));
                self.count_state();
                Ok(Arrival::New(sequence))
            }
            Known::Answered(reason) => {
                let sequence = link.owe(packet_id, true)?;
                link.answer(sequence, reason, None, after, told);
                Ok(Arrival::Repeated)
            }
            Known::Pending(entry) => {
                // The pending PUBREC of this connection answers both.
                if entry.owed.0 != link.connection {
                    entry.owed = (link.connection, link.owe(packet_id, true)?);
                }
                Ok(Arrival::Repeated)
            }
        }
    }

    /// The answer to a QoS 2 PUBLISH is known, and leaves after `told` was released. A failure frees its identifier
    /// (section 4.3.3).
    pub(crate) fn settle_received(
        &mut self,
        packet_id: u16,
        asked: (u64, u64),
        reason: ReasonCode,
        text: Option<&str>,
        told: BatchNumber,
        recorder: &mut Recorder,
    ) {
        let mut tape = self.tape(recorder);
        let Some(owed) = self.exchanges.answer(packet_id, asked, reason) else {
            return;
        };
        let mut told = told;
        if !reason.is_error() {
            tape.write(Part::Received { packet_id, reason });
            told = told.max(tape.current());
        }
        self.count_state();
        self.answer(owed, reason, text, told);
    }

    /// Fills in an acknowledgement that the current connection owes; nothing where it is another's.
    pub(crate) fn answer(
        &mut self,
        owed: (u64, u64),
        reason: ReasonCode,
        text: Option<&str>,
        told: BatchNumber,
    ) {
        let after = self.outbox.progress().0;
        if let Some(link) = self.link.as_mut().filter(|link| link.connection == owed.0) {
            link.answer(owed.1, reason, text, after, told);
        }
    }

    /// A PUBREL came. False where no answered message has that identifier.
    pub(crate) fn release_received(&mut self, packet_id: u16, recorder: &mut Recorder) -> bool {
        let Some(counted) = self.exchanges.release(packet_id) else {
            return false;
        };
        self.tape(recorder).write(Part::Completed { packet_id });
        if let Some(link) = self.link.as_mut().filter(|_| counted) {
            link.unreleased -= 1;
        }
        self.count_state();
        true
    }
}
