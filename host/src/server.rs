//! Wires the parts together: clock, store, journal, outbox and one transport.
//!
//! What enters: batches of a transport, and time. What leaves: through the outbox, in the order of
//! the steps. One mutex guards everything that decides; it is held for a batch's steps and never
//! while a socket is touched.

use std::fmt::Display;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use statehouse_mqtt::{Message, QoS, ReasonCode};
use tokio::sync::Notify;

use crate::limits;
use crate::logging;
use crate::outbox::Outbox;
use crate::shadow::Observer;
use crate::transport::foreign::Figures;
use crate::transport::{Inbound, Intake, Outbound, Ticket, Transport};
use statehouse_access::NoRule;
use statehouse_access::audit::{Audit, Refused};
use statehouse_access::rules::Grants;
use statehouse_core::clock::{Clock, Stamp};
use statehouse_core::log::{Journal, LogPosition, Meta, Progress, Recorder};
use statehouse_core::policy::Swaps;
use statehouse_core::request::{self, Dialect, Early, Parsed, ReplyTo, Request};
use statehouse_core::store::{Effects, Event, Key, Notification, Peer, Renotified, Rerun, Store};
use statehouse_protocol::rights::ClientRights;

use self::core::Core;
pub use self::policies::AssignError;
pub use self::stats::Stats;
pub use self::usage::{Owned, Usage};

mod bounds;
mod core;
mod line;
mod policies;
mod stats;
mod usage;

/// Exit code of a process that lost its state to a bug of its own (EX_SOFTWARE of sysexits.h).
pub(crate) const EXIT_STATE_LOST: i32 = 70;

/// Steps of a batch between two looks at the clock.
const STEPS_PER_LOOK: u32 = 4;

/// A running store.
pub struct Server {
    core: Mutex<Core>,
    outbox: Outbox,
    journal: Arc<dyn Journal>,
    transport: OnceLock<Arc<dyn Transport>>,
    /// Wakes the sweeper where an earlier expiry than it waits for was set.
    expiry: Notify,
    /// Set under the lock, behind the last record.
    stopped: AtomicBool,
    settings: Settings,
    observer: Observer,
    audit: OnceLock<Arc<Audit>>,
    this: Weak<Self>,
}

/// What a server says of itself, and how it understands clients.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// The name of this store in versions.
    pub node: String,
    /// A dialect that is forced on the current topic.
    pub dialect: Option<Dialect>,
    /// Whether each answer says which policy gave it.
    pub policy_property: bool,
    /// Whether clients are those of a foreign broker: their connections are not the transport's to end.
    pub attached: bool,
}

/// What one inbound thing came to.
enum Stepped {
    /// Queued, with so many bytes of answers and notifications.
    Queued(usize),
    /// Its client is to be disconnected.
    Kicked,
}

impl Server {
    /// A server over `store`, whose steps `recorder` records as those of run number `run`.
    pub fn new(
        store: Store,
        clock: Clock,
        recorder: Recorder,
        run: u32,
        settings: Settings,
    ) -> Arc<Self> {
        let journal = recorder.journal().clone();
        let core = Core {
            store,
            clock,
            recorder,
            run,
            swaps: Swaps::default(),
            stats: Stats::default(),
            wall_behind: false,
            journal_full: false,
        };
        Arc::new_cyclic(|server: &Weak<Self>| Self {
            observer: Observer::new({
                let server = server.clone();
                Box::new(move |observed, keys| {
                    let server = server.upgrade()?;
                    server.lock().store.reads_before(observed, keys)
                })
            }),
            core: Mutex::new(core),
            outbox: Outbox::default(),
            journal,
            transport: OnceLock::new(),
            expiry: Notify::new(),
            stopped: AtomicBool::new(false),
            audit: OnceLock::new(),
            this: server.clone(),
            settings,
        })
    }

    /// Names the transport that carries out what is decided. The first call counts.
    pub fn attach(&self, transport: Arc<dyn Transport>) {
        // A second transport would be a mistake of the wiring, which has one call.
        let _ = self.transport.set(transport);
    }

    /// Names who is told of requests that rules forbid. The first call counts.
    pub fn tell_refusals(&self, audit: Arc<Audit>) {
        // A second one would be a mistake of the wiring, which has one call.
        let _ = self.audit.set(audit);
    }

    /// Tells of a request that rules forbid or a bound refuses, wholly or in part.
    fn refused(
        &self,
        what: &'static str,
        peer: &Peer,
        grants: Option<&Arc<dyn ClientRights>>,
        why: &dyn Display,
    ) {
        if let Some(audit) = self.audit.get() {
            audit.refused(&Refused {
                what,
                peer: None,
                client: &peer.client,
                user: grants.and_then(|it| it.user()),
                why,
            });
        }
    }

    /// Removes expired keys when their time comes. Runs until it is dropped.
    pub async fn sweep(&self) {
        loop {
            let (next_ms, now_ms) = self.sweep_once();
            let Some(next_ms) = next_ms else {
                self.expiry.notified().await;
                continue;
            };
            if next_ms <= now_ms {
                // A sleep of nothing would still wait for the timer's next tick.
                tokio::task::yield_now().await;
                continue;
            }
            // Not asleep for longer than a bound: `now` follows the wall, which may be stepped.
            let wait = Duration::from_millis(next_ms - now_ms);
            tokio::select! {
                () = tokio::time::sleep(wait.min(limits::SWEEP_SLEEP_MAX)) => {}
                () = self.expiry.notified() => {}
            }
        }
    }

    /// One sweep if one is due; the next expiry and `now`.
    fn sweep_once(&self) -> (Option<u64>, u64) {
        let (next, now_ms) = {
            let mut core = self.lock();
            let now_ms = core.now();
            if core
                .store
                .next_expiry_ms()
                .is_none_or(|next_ms| next_ms > now_ms)
            {
                return (core.store.next_expiry_ms(), now_ms);
            }
            let effects = core.store.step(Event::Sweep, now_ms);
            self.record(&mut core, effects, None);
            (core.store.next_expiry_ms(), now_ms)
        };
        self.release();
        (next, now_ms)
    }

    /// What has been done so far.
    pub fn stats(&self) -> Stats {
        let mut core = self.lock();
        // It looks at the system clock.
        core.now();
        let state = core.store.state();
        Stats {
            keys: state.table.keys(),
            bytes: state.table.bytes(),
            watches: state.watches.len() as u64,
            remembered: core.store.duplicates().len() as u64,
            forgotten: core.store.duplicates().evicted(),
            disk_full: !self.journal.has_room(),
            ..core.stats
        }
    }

    /// Why requests cannot be answered as they should at present, if so.
    pub fn impediment(&self) -> Option<&'static str> {
        if self.stopped.load(Relaxed) {
            Some("the store is stopping")
        } else if !self.journal.has_room() {
            Some("the disk is full: writes are refused, reads and removals are not")
        } else if self.is_clock_behind() {
            Some("the system clock is behind the store's time: it was stepped back")
        } else if self.link().is_some_and(|link| !link.connected) {
            Some("there is no connection to the broker")
        } else {
            None
        }
    }

    /// Whether the system clock was stepped back so far that this is worth a look.
    fn is_clock_behind(&self) -> bool {
        let mut core = self.lock();
        core.now();
        core.wall_behind
    }

    /// What the connection to a foreign broker can be judged by, where there is one.
    pub fn link(&self) -> Option<Figures> {
        self.transport.get()?.figures()
    }

    /// Whoever watches anything. After a restart these are clients of which nobody knows whether they are still there.
    pub fn watching(&self) -> Vec<Peer> {
        self.lock().store.state().watches.peers().cloned().collect()
    }

    /// Ends the watches of keys that their clients may not read any more. `grants` says what each may do by now.
    pub fn recheck(&self, grants: impl Fn(&Peer) -> Arc<Grants>) {
        {
            let mut core = self.lock();
            let now_ms = core.now();
            let watches = &core.store.state().watches;
            let forbidden = watches.peers().flat_map(|peer| {
                let grants = grants(peer);
                let keys = watches.by(peer).filter(move |key| !grants.may_read(key));
                keys.map(move |key| (peer.clone(), key.clone()))
            });
            for (peer, key) in forbidden.collect::<Vec<_>>() {
                let effects = core.store.step(Event::Undeliverable(&peer, &key), now_ms);
                self.record(&mut core, effects, None);
            }
        }
        self.release();
    }

    /// After a restart: tells whoever watches of keys that the run before removed and may not have told of.
    pub fn tell_of_ends(&self, removed: &[(Key, Stamp)]) {
        let mut rest = removed;
        let mut at_once = limits::EXPIRIES_NOTIFIED_PER_STEP_MAX;
        while !rest.is_empty() {
            let some;
            (some, rest) = rest.split_at(at_once.min(rest.len()));
            {
                let mut core = self.lock();
                let now_ms = core.now();
                let effects = core.store.step(Event::Expired(some), now_ms);
                if effects.failures > 0 {
                    // It would fail at each further step, and in one it is asked once.
                    at_once = usize::MAX;
                }
                self.record(&mut core, effects, None);
            }
            self.release();
        }
    }

    /// After a restart: forgets the requests of sessions that did not survive it.
    pub fn retain_sessions(&self, live: &[u64]) {
        self.lock().store.retain_sessions(live);
    }

    /// About how many bytes a snapshot of the store has by now; by how much that changes is what counts.
    pub fn kept_bytes(&self) -> u64 {
        let core = self.lock();
        core.store.state().load().1 + core.store.duplicates().bytes()
    }

    /// The next block of a snapshot; none at its end.
    pub fn snapshot(&self, progress: &mut Progress) -> Option<Vec<u8>> {
        let mut core = self.lock();
        let now_ms = core.now();
        let (policies, active, assignment) = core.recorder.policies();
        let meta = || Meta {
            clock: core.store.state().hlc.last(),
            now_ms,
            run: core.run,
            policies: policies.to_vec(),
            active,
            assignment: assignment.cloned(),
            receive_max: core.store.duplicates().receive_max(),
        };
        progress.next(core.store.state(), core.store.duplicates(), meta)
    }

    /// The last record of this run. What is decided after it would be lost, so nothing may be, and nothing is assigned.
    pub fn stop(&self) {
        let mut core = self.lock();
        let now_ms = core.now();
        core.recorder.stopped(now_ms);
        self.stopped.store(true, Relaxed);
    }

    /// One inbound thing: what it leads to is queued, nothing is sent yet. The bytes of its answer,
    /// or that its client is to be disconnected.
    fn step(&self, core: &mut Core, inbound: Inbound<'_>, now_ms: u64) -> Stepped {
        let (incoming, ticket) = match inbound {
            Inbound::Publish(incoming, ticket) => (incoming, ticket),
            Inbound::Gone(peer) => {
                let effects = core.store.step(Event::Gone(peer), now_ms);
                return self.record(core, effects, None);
            }
            Inbound::Unheard(peer, key) => {
                let effects = core.store.step(Event::Undeliverable(peer, key), now_ms);
                return self.record(core, effects, None);
            }
            Inbound::Ended(sessions) => {
                let effects = core.store.step(Event::Ended(sessions), now_ms);
                return self.record(core, effects, None);
            }
        };
        let parsed = request::parse(&incoming, self.settings.dialect);
        if let (Some(grants), Some(topic)) = (&incoming.grants, parsed.response_topic())
            && !grants.may_be_answered_at(topic)
        {
            let no_rule = NoRule("have answers at", topic);
            self.refused(no_rule.0, incoming.peer, incoming.grants.as_ref(), &no_rule);
            let text = "no rule lets this client publish to the response topic of its request, and it does not begin with clients/, its client id, and a slash";
            let settle =
                ticket.map(|ticket| settle(ticket, ReasonCode::NOT_AUTHORIZED, Some(text)));
            self.queue(incoming.peer, [settle]);
            return Stepped::Queued(0);
        }
        match parsed {
            // Nobody waits for its answer any more, and whoever asked may have asked anew since.
            // But one that an earlier run may have left untold is told of: its effect is there, and nothing runs again.
            Parsed::Run(request, reply_to)
                if reply_to.expires.is_some_and(|at| at <= Instant::now())
                    && !core.store.may_be_unnotified(&request) =>
            {
                core.stats.refused += 1;
                let settle = ticket.map(|ticket| settle(ticket, ReasonCode::SUCCESS, None));
                self.queue(incoming.peer, [settle]);
                Stepped::Queued(0)
            }
            Parsed::Run(request, reply_to) => {
                core.stats.requests += 1;
                let effects = core.store.step(Event::Request(&request), now_ms);
                self.record(core, effects, Some((&request, reply_to, ticket)))
            }
            Parsed::Answer(reply_to, early) => {
                core.stats.refused += 1;
                let (properties, payload) = match early {
                    Early::UnsupportedVersion(asked) => (reply_to.unsupported_version(asked), ""),
                    Early::QosZero => (
                        reply_to.properties(None, &self.settings.node, None, None),
                        request::QOS_ZERO_ANSWER,
                    ),
                };
                let answer = reply(&reply_to, payload.into(), properties);
                match ticket {
                    Some(ticket) => {
                        self.queue(incoming.peer, [Some(Outbound::Reply(answer, ticket))])
                    }
                    None => self
                        .outbox
                        .push_out_of_order(Outbound::Answer(answer, None)),
                }
                Stepped::Queued(payload.len())
            }
            Parsed::Refuse(reason, text) => {
                core.stats.refused += 1;
                let client = incoming.peer.client.escape_debug();
                tracing::debug!(%client, text, "a message that is no request");
                self.queue(
                    incoming.peer,
                    [ticket.map(|ticket| settle(ticket, reason, Some(text)))],
                );
                Stepped::Queued(0)
            }
            Parsed::Disconnect(reason, text) => {
                core.stats.kicked += 1;
                let kick = Outbound::Kick(incoming.peer.clone(), reason, text);
                // Settled too: a QoS 2 exchange outlives the connection, and must not wait for ever.
                let settle = ticket.map(|ticket| settle(ticket, reason, Some(text)));
                self.queue(incoming.peer, [Some(kick), settle]);
                match self.settings.attached {
                    // What came behind it is of others, or of a connection that goes on.
                    true => Stepped::Queued(0),
                    false => Stepped::Kicked,
                }
            }
        }
    }

    /// What came behind a message that ended its connection does not happen.
    fn skip(&self, core: &mut Core, inbound: Inbound<'_>) {
        if let Inbound::Publish(incoming, Some(ticket)) = inbound {
            core.stats.refused += 1;
            let reason = ReasonCode::IMPLEMENTATION_SPECIFIC_ERROR;
            self.queue(incoming.peer, [Some(settle(ticket, reason, None))]);
        }
    }

    /// Journals effects and queues what they lead to: what had expired before, the answer, the
    /// notifications, the PUBACK.
    fn record(
        &self,
        core: &mut Core,
        mut effects: Effects,
        asked: Option<(&Request<'_>, ReplyTo<'_>, Option<Ticket>)>,
    ) -> Stepped {
        if let Some(observed) = effects.sampled.take() {
            self.observer.offer(observed);
        }
        core.stats.policy_failures += effects.failures;
        if let (Some((key, right)), Some((request, ..))) = (&effects.denied, &asked) {
            let no_rule = NoRule(right.verb(), key);
            self.refused(no_rule.0, request.peer, request.grants, &no_rule);
        }
        if let (Some(bound), Some((request, ..))) = (effects.exceeded, &asked) {
            self.refused(bound.name(), request.peer, request.grants, &bound);
        }
        if let Some(rerun) = effects.repeated {
            core.stats.duplicates += 1;
            core.stats.duplicates_different += u64::from(rerun == Rerun::Different);
        }
        match effects.renotified {
            Some(Renotified::Sent) => core.stats.told_again += 1,
            Some(Renotified::Incomplete) => core.stats.not_told_again += 1,
            None => {}
        }
        if let Some((request, reply_to, _)) = &asked {
            line::log(request, reply_to, &effects);
        }
        let urgent = asked
            .as_ref()
            .is_some_and(|(_, to, _)| to.persistence == Some(true));
        let request = asked.as_ref().map(|(request, ..)| *request);
        let lane = request.map_or(0, |request| request.peer.connection);
        let position = core.recorder.step(request, &effects, urgent);
        let (reply_to, ticket) = asked.map(|(_, to, ticket)| (to, ticket)).unzip();
        let mut ticket = ticket.flatten();
        let led_to = ticket;
        let answer = reply_to.zip(effects.answer).map(|(to, answer)| {
            let persisted = answer.put.then(|| self.journal.persisted(urgent));
            let by = effects
                .by
                .as_ref()
                .filter(|_| self.settings.policy_property);
            let by = by.map(|policy| &*policy.tag);
            let node = &self.settings.node;
            let properties = to.properties(answer.version, node, persisted, by);
            let message = reply(&to, answer.payload, properties);
            match ticket.take_if(|_| effects.notices.is_empty()) {
                Some(ticket) => (lane, Outbound::Reply(message, ticket)),
                None => (lane, Outbound::Answer(message, led_to)),
            }
        });
        let settle = ticket.map(|ticket| (lane, settle(ticket, ReasonCode::SUCCESS, None)));
        for notice in effects.expired.iter().chain(&effects.notices) {
            core.stats.notifications += notice.to.len() as u64;
        }
        let before = effects
            .expired
            .into_iter()
            .flat_map(|notice| self.tell(notice, None));
        let after = effects
            .notices
            .into_iter()
            .flat_map(|notice| self.tell(notice, led_to));
        let out = before.chain(answer).chain(after).chain(settle);
        let bytes = self.outbox.push(position, lane, out);
        if let Some(trip) = effects.tripped {
            core.trip(&trip);
            let server = self.this.clone();
            let warming = std::thread::Builder::new().name("warming".into());
            // Without a thread the next rollback, if there ever is one, starts its policy in the path of a request.
            _ = warming.spawn(move || server.upgrade().map(|server| server.warm_before()));
        }
        Stepped::Queued(bytes)
    }

    /// One message for each watcher of a notice, which a request led to or nobody's.
    fn tell(
        &self,
        notice: Notification,
        led_to: Option<Ticket>,
    ) -> impl Iterator<Item = (u64, Outbound)> + use<> {
        let properties =
            request::notification_properties(notice.dialect, notice.version, &self.settings.node);
        let payload = notice.payload;
        notice.to.into_iter().map(move |(peer, topic)| {
            let message = message(topic, payload.clone(), properties.clone(), None);
            (peer.connection, Outbound::Notify(peer, message, led_to))
        })
    }

    /// Queues what no state was asked for.
    fn queue<const N: usize>(&self, peer: &Peer, out: [Option<Outbound>; N]) {
        let lane = peer.connection;
        let out = out.into_iter().flatten().map(|out| (lane, out));
        self.outbox.push(LogPosition(0), lane, out);
    }

    /// Lets everything go that the journal releases by now. Called after each batch, and by the journal.
    pub fn release(&self) {
        if let Some(transport) = self.transport.get() {
            self.outbox.release(self.journal.released(), &**transport);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(|_| {
            // A panic inside a step lost the state on its way. Answering from nothing would be worse
            // than not answering: let whoever supervises this process start a new one.
            tracing::error!("a step of the store panicked; stopping, since its state is lost");
            logging::exit(EXIT_STATE_LOST)
        })
    }
}

impl Server {
    /// Handles the first part of a batch, which may be of one connection; false at its end, or at that of its time. `kicked`:
    /// its client is disconnected, and the rest does not happen.
    fn take_part(
        &self,
        owner: Option<u64>,
        end: Option<Instant>,
        batch: &mut dyn Iterator<Item = Inbound<'_>>,
        kicked: &mut bool,
    ) -> bool {
        let mut more = true;
        {
            let mut core = self.lock();
            let now_ms = core.now();
            core.look_for_room(&*self.journal);
            let before = core.store.next_expiry_ms();
            let mut reply_bytes = 0;
            let unreleased_max = core.store.quota().unreleased_bytes_max;
            let has_room = || owner.is_none_or(|it| self.outbox.has_room(it, unreleased_max));
            core.swaps.begin();
            // Answers are let go now and then, so that a client's own bound sees them in time.
            let mut steps = 0_u32;
            while *kicked || reply_bytes <= limits::BATCH_REPLY_BYTES_MAX && has_room() {
                // Not at each step: most take some microseconds.
                steps += 1;
                let looks = steps.is_multiple_of(STEPS_PER_LOOK) && !*kicked;
                if looks && end.is_some_and(|end| Instant::now() >= end) {
                    more = false;
                    break;
                }
                let Some(inbound) = batch.next() else {
                    more = false;
                    break;
                };
                if *kicked {
                    self.skip(&mut core, inbound);
                    continue;
                }
                match self.step(&mut core, inbound, now_ms) {
                    Stepped::Queued(bytes) => reply_bytes += bytes,
                    Stepped::Kicked => *kicked = true,
                }
            }
            core.swaps.end();
            let after = core.store.next_expiry_ms();
            if after.is_some() && (before.is_none() || after < before) {
                self.expiry.notify_one();
            }
        }
        self.release();
        more
    }
}

/// When so much time is over; none where that is never.
fn end(time_max: Duration) -> Option<Instant> {
    Instant::now().checked_add(time_max)
}

impl Intake for Server {
    fn take_within(&self, time_max: Duration, batch: &mut dyn Iterator<Item = Inbound<'_>>) {
        let end = end(time_max);
        let mut kicked = false;
        while self.take_part(None, end, batch, &mut kicked) {}
    }

    fn take_some(&self, connection: u64, batch: &mut dyn Iterator<Item = Inbound<'_>>) {
        let end = end(limits::REQUESTS_PER_TURN_TIME);
        let mut kicked = false;
        // What follows a request that ended its connection is never left.
        while self.take_part(Some(connection), end, batch, &mut kicked) && kicked {}
    }
}

fn reply(to: &ReplyTo<'_>, payload: Bytes, properties: Bytes) -> Message {
    // A copy: what waits may not hold on to a whole read buffer.
    let topic = Bytes::copy_from_slice(to.topic);
    message(topic, payload, properties, to.expires)
}

fn message(topic: Bytes, payload: Bytes, properties: Bytes, expires: Option<Instant>) -> Message {
    Message {
        topic,
        payload,
        properties,
        qos: QoS::AtLeastOnce,
        retain: false,
        expires,
    }
}

fn settle(ticket: Ticket, reason: ReasonCode, text: Option<&'static str>) -> Outbound {
    Outbound::Settle(ticket, reason, text)
}

#[cfg(test)]
mod tests;
