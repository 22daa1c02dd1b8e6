//! Wires the parts together: clock, store, journal, outbox and one transport.
//!
//! What enters: batches of a transport, and time. What leaves: through the outbox, in the order of
//! the steps. One mutex guards everything that decides; it is held for a batch's steps and never
//! while a socket is touched.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use statehouse_mqtt::{Message, QoS, ReasonCode};
use tokio::sync::Notify;

use crate::clock::{Clock, Reading, Stamp};
use crate::journal::record::PolicyRecord;
use crate::journal::{Journal, Meta, Position, Progress, Recorder};
use crate::limits;
use crate::outbox::Outbox;
use crate::policy::{Absent, Assignment, Instance, Part, Policy, Swap, Swaps};
use crate::request::{self, Dialect, Early, Parsed, ReplyTo, Request};
use crate::shadow::Observer;
use crate::store::{Effects, Event, Key, Notice, Peer, Rerun, Store, ToldAgain, Transaction, Trip};
use crate::transport::foreign::Figures;
use crate::transport::{Inbound, Intake, Outbound, Ticket, Transport};

/// A wall clock this far behind the store's time was stepped back by somebody.
const WALL_BEHIND_MS: u64 = 1_000;

/// Exit code of a process that lost its state to a bug of its own (EX_SOFTWARE of sysexits.h).
pub(crate) const EXIT_STATE_LOST: i32 = 70;

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

/// What decides, under one lock.
struct Core {
    store: Store,
    clock: Clock,
    recorder: Recorder,
    run: u32,
    swaps: Swaps,
    stats: Stats,
    wall_behind: bool,
    journal_full: bool,
}

/// What one inbound thing came to.
enum Stepped {
    /// Queued, with an answer of so many bytes.
    Queued(usize),
    /// Its client is to be disconnected.
    Kicked,
}

/// What a server has done since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Requests that a policy answered.
    pub requests: u64,
    /// Messages on a request topic that were none, refused or dropped.
    pub refused: u64,
    /// Requests with a forbidden response topic: their clients are disconnected, where the transport can.
    pub kicked: u64,
    /// Notifications handed to watchers.
    pub notifications: u64,
    /// Policy calls that trapped, ran out of budget or returned nonsense.
    pub policy_failures: u64,
    /// Times that another policy became the active one.
    pub swaps: u64,
    /// Requests that came again and were answered as before.
    pub duplicates: u64,
    /// Those of them where running the policy again gave another answer.
    pub duplicates_different: u64,
    /// Those of them that an earlier run handled and whose notifications were sent again.
    pub told_again: u64,
    /// Those of them whose notifications an earlier run may not have sent, and that could not be said again.
    pub not_told_again: u64,
    /// Requests that were forgotten although their session lives and might send them again, or behind a foreign broker
    /// before their time: see `max_duplicate_bytes` and `max_duplicates`.
    pub forgotten: u64,
    /// Requests that are remembered at the moment.
    pub remembered: u64,
    /// Keys at the moment.
    pub keys: u64,
    /// What they weigh, in bytes.
    pub bytes: u64,
    /// Watches at the moment.
    pub watches: u64,
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
                    server.lock().store.recall(observed, keys)
                })
            }),
            core: Mutex::new(core),
            outbox: Outbox::default(),
            journal,
            transport: OnceLock::new(),
            expiry: Notify::new(),
            stopped: AtomicBool::new(false),
            this: server.clone(),
            settings,
        })
    }

    /// Names the transport that carries out what is decided. The first call counts.
    pub fn attach(&self, transport: Arc<dyn Transport>) {
        // A second transport would be a mistake of the wiring, which has one call.
        let _ = self.transport.set(transport);
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
        let core = self.lock();
        let state = core.store.state();
        Stats {
            keys: state.table.keys(),
            bytes: state.table.bytes(),
            watches: state.watches.len() as u64,
            remembered: core.store.duplicates().len() as u64,
            forgotten: core.store.duplicates().evicted(),
            ..core.stats
        }
    }

    /// What the connection to a foreign broker can be judged by, where there is one.
    pub fn link(&self) -> Option<Figures> {
        self.transport.get()?.figures()
    }

    /// Whoever watches anything. After a restart these are clients of which nobody knows whether they are still there.
    pub fn watching(&self) -> Vec<Peer> {
        self.lock().store.state().watches.peers().cloned().collect()
    }

    /// After a restart: tells whoever watches of keys that the run before removed and may not have told of.
    pub fn tell_of_ends(&self, removed: &[(Key, Stamp)]) {
        {
            let mut core = self.lock();
            let now_ms = core.now();
            let effects = core.store.step(Event::Expired(removed), now_ms);
            self.record(&mut core, effects, None);
        }
        self.release();
    }

    /// After a restart: forgets the requests of sessions that did not survive it.
    pub fn retain_sessions(&self, live: &[u64]) {
        self.lock().store.retain_sessions(live);
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
        };
        progress.next(core.store.state(), core.store.duplicates(), meta)
    }

    /// Who answers what, and all policies that are held ready.
    pub fn policies(&self) -> (Assignment, Vec<Arc<Policy<Transaction>>>) {
        let mut core = self.lock();
        let registry = core.store.registry();
        let policies = registry.policies().cloned().collect();
        (registry.assignment().clone(), policies)
    }

    /// The policies whose modules are needed: those that are named, and those that handled requests which may come
    /// again.
    pub fn needed_policies(&self) -> Vec<blake3::Hash> {
        let mut core = self.lock();
        let named = core.store.registry().assignment().all();
        let remembered = core.store.duplicates().policies();
        let named = named.into_iter().map(|digest| digest.0);
        named.chain(remembered).collect()
    }

    /// The last times that another policy became the active one.
    pub fn swaps(&self) -> Vec<Swap> {
        self.lock().swaps.list()
    }

    /// Takes another assignment into force between two requests, if it is still `seen` that it was made from. `ready`
    /// are instances for it; modules of new policies are durable already. Its record's position; it is to be waited
    /// for by [`Self::durable`].
    pub fn assign(
        &self,
        seen: &Assignment,
        next: Assignment,
        ready: Vec<Instance<Transaction>>,
    ) -> Result<Position, AssignError> {
        let mut core = self.lock();
        if self.stopped.load(Relaxed) {
            return Err(AssignError::Stopped);
        }
        if core.store.registry().assignment() != seen {
            return Err(AssignError::Overtaken);
        }
        let (position, left) = core.assign(next, ready)?;
        drop(core);
        // An instance is megabytes to give back: while nobody waits.
        drop(left);
        Ok(position)
    }

    /// Starts an instance of the policy that the next rollback goes back to, so that no request waits for that. Blocks
    /// for as long as an interpreter takes to start.
    pub fn warm_before(&self) {
        let Some(policy) = self.lock().store.registry().cold_before() else {
            return;
        };
        match Instance::warm(policy.clone()) {
            Ok(instance) => {
                let left = self.lock().store.registry().warmed(instance);
                drop(left);
            }
            Err(error) => {
                tracing::warn!(%policy, %error, "the policy that a rollback goes back to does not start");
            }
        }
    }

    /// Runs live requests again, for a candidate in shadow and in search of hidden state.
    pub fn observer(&self) -> &Observer {
        &self.observer
    }

    /// Waits until a record is where records are kept. Blocks: not for a thread that serves connections. A server that
    /// stops ends the wait too, for nobody writes records any more once the journal is closed.
    ///
    /// # Errors
    /// [`AssignError::Unknown`]: the record may be kept all the same.
    pub fn durable(&self, position: Position) -> Result<(), AssignError> {
        while self.journal.released() < position {
            if self.stopped.load(Relaxed) {
                return Err(AssignError::Unknown);
            }
            std::thread::sleep(limits::ASSIGNED_POLL);
        }
        Ok(())
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
                let effects = core.store.step(Event::Unheard(peer, key), now_ms);
                return self.record(core, effects, None);
            }
            Inbound::Ended(sessions) => {
                let effects = core.store.step(Event::Ended(sessions), now_ms);
                return self.record(core, effects, None);
            }
        };
        match request::parse(&incoming, self.settings.dialect) {
            // Nobody waits for its answer any more, and whoever asked may have asked anew since.
            // But one that an earlier run may have left untold is told of: its effect is there, and nothing runs again.
            Parsed::Run(request, reply_to)
                if reply_to.expires.is_some_and(|at| at <= Instant::now())
                    && !core.store.may_be_untold(&request) =>
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
                if !self.settings.attached {
                    let client = incoming.peer.client.escape_debug();
                    tracing::warn!(%client, text, "disconnecting a client");
                }
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
        if let Some(observed) = effects.observed.take() {
            self.observer.offer(observed);
        }
        core.stats.policy_failures += effects.failures;
        if let Some(rerun) = effects.repeated {
            core.stats.duplicates += 1;
            core.stats.duplicates_different += u64::from(rerun == Rerun::Different);
        }
        match effects.told_again {
            Some(ToldAgain::Told) => core.stats.told_again += 1,
            Some(ToldAgain::Impossible) => core.stats.not_told_again += 1,
            None => {}
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
        let mut reply_bytes = 0;
        let answer = reply_to.zip(effects.answer).map(|(to, answer)| {
            reply_bytes = answer.payload.len();
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
        self.outbox
            .push(position, before.chain(answer).chain(after).chain(settle));
        if let Some(trip) = effects.tripped {
            core.trip(&trip);
            let server = self.this.clone();
            let warming = std::thread::Builder::new().name("warming".into());
            // Without a thread the next rollback, if there ever is one, starts its policy in the path of a request.
            _ = warming.spawn(move || server.upgrade().map(|server| server.warm_before()));
        }
        Stepped::Queued(reply_bytes)
    }

    /// One message for each watcher of a notice, which a request led to or nobody's.
    fn tell(
        &self,
        notice: Notice,
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
        self.outbox.push(Position(0), out);
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
            std::process::exit(EXIT_STATE_LOST)
        })
    }
}

impl Intake for Server {
    fn take(&self, batch: &mut dyn Iterator<Item = Inbound<'_>>) {
        let mut kicked = false;
        let mut more = true;
        while more {
            {
                let mut core = self.lock();
                let now_ms = core.now();
                core.look_for_room(&*self.journal);
                let before = core.store.next_expiry_ms();
                let mut reply_bytes = 0;
                core.swaps.begin();
                // Answers are let go now and then, so that a client's own bound sees them in time.
                while reply_bytes <= limits::BATCH_REPLY_BYTES_MAX {
                    let Some(inbound) = batch.next() else {
                        more = false;
                        break;
                    };
                    if kicked {
                        self.skip(&mut core, inbound);
                        continue;
                    }
                    match self.step(&mut core, inbound, now_ms) {
                        Stepped::Queued(bytes) => reply_bytes += bytes,
                        Stepped::Kicked => kicked = true,
                    }
                }
                core.swaps.end();
                let after = core.store.next_expiry_ms();
                if after.is_some() && (before.is_none() || after < before) {
                    self.expiry.notify_one();
                }
            }
            self.release();
        }
    }
}

/// Why an assignment does not come into force.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum AssignError {
    /// Somebody else was faster.
    #[error("the policies were assigned otherwise meanwhile: look at the list, and try again")]
    Overtaken,
    /// It names what is not here.
    #[error("the policy {} is not loaded any more", .0.0)]
    Absent(Absent),
    /// The store ends.
    #[error("the store is stopping, so that nothing was changed: try again when it runs")]
    Stopped,
    /// The store ended before the change was certainly kept.
    #[error(
        "the store is stopping: look at the list when it runs again, for the change may have been kept"
    )]
    Unknown,
}

impl Core {
    /// Changes who answers what, and says so in the journal, before the next request.
    fn assign(
        &mut self,
        next: Assignment,
        ready: Vec<Instance<Transaction>>,
    ) -> Result<(Position, Vec<Instance<Transaction>>), AssignError> {
        let now_ms = self.now();
        let before = self.store.registry().assignment().active;
        let left = self.store.assign(next, ready);
        let left = left.map_err(AssignError::Absent)?;
        let registry = self.store.registry();
        let assignment = registry.assignment();
        if assignment.active != before {
            self.stats.swaps += 1;
            self.swaps.swapped(now_ms, before, assignment.active);
        }
        let record = |it: &Arc<Policy<Transaction>>| {
            PolicyRecord::of(it, it.digest == assignment.built_in.0)
        };
        let named = registry.policies().map(record).collect();
        Ok((self.recorder.assign(named, assignment), left))
    }

    /// Goes back to the policy before, or ends a canary, before the next request.
    fn trip(&mut self, trip: &Trip) {
        let now_ms = self.now();
        let registry = self.store.registry();
        let assignment = registry.assignment();
        let why = trip.why.clone();
        let (next, bad) = match (trip.part, &assignment.canary) {
            (Part::Active, _) => (assignment.roll_back_for(why, now_ms), assignment.active),
            (Part::Canary, Some(canary)) => (assignment.end_canary_for(why, now_ms), canary.policy),
            (Part::Canary | Part::Routed, _) => return,
        };
        let Some(policy) = registry.by_digest(&bad.0) else {
            return;
        };
        let why = &trip.why;
        let done = next.map_err(|error| error.to_string()).and_then(|next| {
            // The policy before the active one is kept warm. The failing instance is given back at once: a pause
            // of some ten microseconds, once.
            self.assign(next, Vec::new())
                .map_err(|error| error.to_string())
        });
        match (done, trip.part) {
            (Ok(_), Part::Canary) => {
                tracing::error!(%policy, digest = %policy.digest, why, "a canary is ended: the active policy answers its requests");
            }
            (Ok(_), _) => {
                tracing::error!(%policy, digest = %policy.digest, why, "a policy is rolled back: the one before it answers");
            }
            (Err(error), _) if policy.counters.may_warn(now_ms) => {
                tracing::error!(%policy, digest = %policy.digest, why, error, "a policy cannot be rolled back");
            }
            (Err(_), _) => {}
        }
    }

    /// Writes that grow the table are refused before the journal is hurt.
    fn look_for_room(&mut self, journal: &dyn Journal) {
        let full = !journal.has_room();
        if full != self.journal_full {
            self.journal_full = full;
            self.store.quota().journal_full = full;
            if full {
                tracing::error!(
                    "the disk is full: writes are refused until there is room, removals are not"
                );
            } else {
                tracing::info!("there is room on the disk again");
            }
        }
    }

    fn now(&mut self) -> u64 {
        let Reading {
            now_ms,
            wall_behind_ms,
        } = self.clock.read();
        let behind = wall_behind_ms > WALL_BEHIND_MS;
        if behind != self.wall_behind {
            self.wall_behind = behind;
            if behind {
                tracing::warn!(
                    wall_behind_ms,
                    "the system clock was stepped back; the store's time goes on, and clients whose clocks follow the system's look late"
                );
            } else {
                tracing::info!("the system clock has caught up with the store's time");
            }
        }
        now_ms
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
mod tests {
    use statehouse_mqtt::{Properties, PropertiesBuilder};

    use super::*;
    use crate::STANDARD_POLICY;
    use crate::clock::ManualSource;
    use crate::journal::Memory;
    use crate::policy::{Engine, Registry};
    use crate::request::{Delivery, Incoming, REQUEST_TOPIC};
    use crate::store::{Duplicates, Mode, Quota, Retention, State};

    /// Keeps the payloads it was asked to carry out, in order.
    #[derive(Default)]
    struct Notebook(Mutex<Vec<Bytes>>);

    impl Transport for Notebook {
        fn deliver(&self, ready: &mut dyn FnMut(&mut Vec<Outbound>)) {
            let mut out = Vec::new();
            ready(&mut out);
            let mut notes = self.0.lock().unwrap();
            notes.extend(out.into_iter().map(|out| match out {
                Outbound::Answer(message, _) | Outbound::Notify(_, message, _) => message.payload,
                _ => panic!("nothing here is settled or kicked"),
            }));
        }
    }

    /// Over sockets the sweeper is nearly always faster than a request, so this order shows only here.
    #[test]
    fn what_has_expired_is_told_of_or_does_not_run() {
        let quota = Quota {
            keys_max: 10,
            bytes_max: 10_000,
            key_bytes_max: 100,
            value_bytes_max: 100,
            journal_full: false,
        };
        let policy = Arc::new(Engine::new().unwrap().load(STANDARD_POLICY).unwrap());
        let source = Arc::new(ManualSource::at(1_700_000_000_000));
        let server = Server::new(
            Store::new(Registry::new(policy, None), quota),
            Clock::new(source.clone()),
            Recorder::new(Arc::new(Memory), Vec::new(), None),
            1,
            Settings {
                node: "StateStore".into(),
                dialect: Some(Dialect::Sdk),
                policy_property: false,
                attached: false,
            },
        );
        let notebook = Arc::new(Notebook::default());
        server.attach(notebook.clone());
        let properties = PropertiesBuilder::new()
            .response_topic("answers")
            .correlation_data(b"1")
            .user("__ts", "1700000000000:0:client")
            .finish()
            .unwrap();
        let properties = Properties::parse(properties).unwrap();
        let peer = Peer {
            client: "client".into(),
            connection: 1,
            session: 1,
        };
        let ask_until = |expires: Option<Instant>, arguments: &[&[u8]]| {
            let payload = Bytes::from(statehouse_policy::resp::request(arguments));
            let incoming = Incoming {
                topic: REQUEST_TOPIC,
                payload: &payload,
                properties: &properties,
                qos: QoS::AtLeastOnce,
                delivery: Delivery::default(),
                expires,
                peer: &peer,
            };
            server.take(&mut std::iter::once(Inbound::Publish(incoming, None)));
            std::mem::take(&mut *notebook.0.lock().unwrap())
        };
        let ask = |arguments: &[&[u8]]| ask_until(None, arguments);
        assert_eq!(ask(&[b"SET", b"k", b"v", b"PX", b"1000"]), ["+OK\r\n"]);
        assert_eq!(ask(&[b"KEYNOTIFY", b"k"]), ["+OK\r\n"]);
        source.advance(1000);
        let told = "*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n";
        assert_eq!(ask(&[b"KEYNOTIFY", b"k", b"STOP"]), [told, "+OK\r\n"]);
        assert_eq!(ask(&[b"GET", b"k"]), ["$-1\r\n"]);

        // One that waited for longer than its client wanted to does not run any more.
        let over = Instant::now().checked_sub(Duration::from_secs(1));
        let later = Instant::now().checked_add(Duration::from_secs(1_000));
        let set: &[&[u8]] = &[b"SET", b"k", b"v"];
        assert!(ask_until(over, set).is_empty());
        assert_eq!(ask(&[b"GET", b"k"]), ["$-1\r\n"]);
        assert_eq!(server.stats().refused, 1);
        assert_eq!(ask_until(later, set), ["+OK\r\n"]);
    }

    /// Its client has given up, but its effect is there, and the run that brought it about may have told nobody.
    #[test]
    fn what_an_earlier_run_handled_is_told_of_although_it_has_expired() {
        let retention = Retention {
            per_session: 0,
            ..Retention::default()
        };
        let quota = Quota {
            keys_max: 10,
            bytes_max: 10_000,
            key_bytes_max: 100,
            value_bytes_max: 100,
            journal_full: false,
        };
        let policy = Arc::new(Engine::new().unwrap().load(STANDARD_POLICY).unwrap());
        let serve = |state: Box<State>, duplicates: Duplicates| {
            let registry = Registry::new(policy.clone(), None);
            let server = Server::new(
                Store::restore(registry, quota, state, duplicates),
                Clock::new(Arc::new(ManualSource::at(1_700_000_000_000))),
                Recorder::new(Arc::new(Memory), Vec::new(), None),
                1,
                Settings {
                    node: "StateStore".into(),
                    dialect: Some(Dialect::Sdk),
                    attached: true,
                    ..Settings::default()
                },
            );
            let notebook = Arc::new(Notebook::default());
            server.attach(notebook.clone());
            (server, notebook)
        };
        let properties = PropertiesBuilder::new()
            .response_topic("answers")
            .correlation_data(b"1")
            .user("__ts", "1700000000000:0:client")
            .finish()
            .unwrap();
        let properties = Properties::parse(properties).unwrap();
        let session = Mode::foreign_session(1);
        let peer = Peer {
            client: "client".into(),
            connection: session,
            session,
        };
        let ask = |server: &Server, arguments: &[&[u8]], expires| {
            let payload = Bytes::from(statehouse_policy::resp::request(arguments));
            let incoming = Incoming {
                topic: REQUEST_TOPIC,
                payload: &payload,
                properties: &properties,
                qos: QoS::AtLeastOnce,
                delivery: Delivery {
                    session,
                    connection: session,
                    packet_id: 0,
                    dup: true,
                },
                expires,
                peer: &peer,
            };
            server.take(&mut std::iter::once(Inbound::Publish(incoming, None)));
        };
        let over = Instant::now().checked_sub(Duration::from_secs(1));
        let set: &[&[u8]] = &[b"SET", b"k", b"v"];
        let mut state = Box::<State>::default();
        state.watches.keep(true);
        let (first, _) = serve(state, Duplicates::new(retention));
        ask(&first, &[b"KEYNOTIFY", b"k"], None);
        ask(&first, set, None);
        // In the run that handled it, it was told of.
        ask(&first, set, over);
        assert_eq!(first.stats().refused, 1);

        let mut core = first.lock();
        let mut duplicates = Duplicates::new(retention);
        for remembered in core.store.duplicates().range(0) {
            duplicates.insert(&remembered);
        }
        let state = Box::new(std::mem::take(core.store.state_mut()));
        let (second, notebook) = serve(state, duplicates);
        ask(&second, set, over);
        let notes = notebook.0.lock().unwrap();
        let told = notes
            .iter()
            .filter(|note| note.starts_with(b"*4\r\n$6\r\nNOTIFY"));
        assert_eq!(told.count(), 1, "{notes:?}");
        assert_eq!(second.stats().told_again, 1);
    }
}
