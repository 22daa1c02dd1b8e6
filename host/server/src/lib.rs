//! Runs the state machine of `statehouse_core` under one lock, between a transport and the log.
//!
//! A transport passes batches of inputs in. Outputs leave through the [`ResponseGate`], in the order
//! of the decisions, and never before the log position that they depend on is released. The
//! lock must never be held while a socket or the disk is touched.
//!
//! * [`shadow`]: re-executes requests with a candidate policy and compares. It never changes state.
//! * [`traces`]: which requests are traced, and the thread that sends their spans.
//! * [`logging`]: log lines through a bounded queue.
#![forbid(unsafe_code)]

use std::fmt::Display;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::Duration;

use statehouse_mqtt::{Lease, ReasonCode};
use statehouse_protocol::rights::ClientRights;
use statehouse_protocol::{ConnectionId, SessionId};
use tokio::sync::Notify;

use crate::shadow::Observer;
use crate::traces::{Counts, Trace, Traces};
use statehouse_access::NoRule;
use statehouse_access::audit::{Audit, Refused};
use statehouse_access::rules::Grants;
use statehouse_config::limits;
use statehouse_core::clock::{Clock, Stamp};
use statehouse_core::log::{Journal, JournalRoom, LogPosition, Progress};
use statehouse_core::request::Incoming;
use statehouse_core::store::{Key, Mode, Peer, Store};
use statehouse_core::{Core, Decision, Input, Now, Outcome, Output};
use statehouse_transport::{Inbound, Outbound, Ticket, Transport, foreign::Figures};

use self::client_errors::ClientErrors;
pub use self::gate::ResponseGate;
pub use self::hot_keys::HotKey;
pub use self::keys::{Changes, KeyView, Read};
use self::locked::Locked;
pub use self::own::{OwnError, OwnRequest, OwnResponse};
use self::own::{OwnRequests, WithoutOwn};
pub use self::policies::AssignError;
pub use self::slow::{SlowRequest, SlowRequests};
pub use self::stats::{Refused as RefusedMessages, Stats};
pub use self::timing::{RequestTimes, Times};
pub use self::usage::{Owned, Usage};
pub use self::watched::{Longest, Observed, Stages};

mod bounds;
mod client_errors;
mod gate;
mod hot_keys;
mod intake;
mod keys;
mod locked;
pub mod logging;
mod names;
mod own;
mod pending;
mod policies;
mod request_log;
pub mod shadow;
mod slow;
mod stats;
mod timing;
pub mod traces;
mod usage;
mod watched;

/// Exit code of a process that lost its state to a bug of its own (EX_SOFTWARE of sysexits.h).
pub const EXIT_STATE_LOST: i32 = 70;

/// A running store.
pub struct Server {
    locked: Mutex<Locked>,
    gate: ResponseGate,
    journal: Arc<dyn Journal>,
    transport: OnceLock<Arc<dyn Transport>>,
    /// Wakes the sweeper when a deadline is set that is earlier than the one it waits for.
    expiry: Notify,
    /// Set under the lock, after the last record.
    stopped: AtomicBool,
    mode: Mode,
    observer: Observer,
    audit: OnceLock<Arc<Audit>>,
    client_errors: ClientErrors,
    own: OwnRequests,
    this: Weak<Self>,
}

/// The result of one input.
enum Stepped {
    /// Responses and notifications were queued.
    Queued {
        bytes: usize,
        /// Whether the decision took little time.
        is_light: bool,
    },
    /// The publisher is being disconnected, so the rest of its batch must be skipped.
    Disconnected,
}

impl Server {
    /// A server that runs `core`. `mode` names the broker that its clients are connected to.
    pub fn new(core: Core, clock: Clock, mode: Mode) -> Arc<Self> {
        let journal = core.journal().clone();
        Arc::new_cyclic(|server: &Weak<Self>| Self {
            observer: Observer::new(core.settings().node.clone(), {
                let server = server.clone();
                Box::new(move |sampled, keys| {
                    let server = server.upgrade()?;
                    server.lock().core.store().reads_before(sampled, keys)
                })
            }),
            locked: Mutex::new(Locked::new(core, clock)),
            gate: ResponseGate::default(),
            journal,
            transport: OnceLock::new(),
            expiry: Notify::new(),
            stopped: AtomicBool::new(false),
            audit: OnceLock::new(),
            client_errors: ClientErrors::default(),
            own: OwnRequests::default(),
            this: server.clone(),
            mode,
        })
    }

    /// Sets the transport that sends outputs. The first call counts.
    pub fn attach(&self, transport: Arc<dyn Transport>) {
        // The composition root calls this once.
        let _ = self.transport.set(transport);
    }

    /// Sets the audit log for refused requests. The first call counts.
    pub fn set_audit(&self, audit: Arc<Audit>) {
        // The composition root calls this once.
        let _ = self.audit.set(audit);
    }

    /// Removes expired keys when their time comes, if this host may decide that. Runs until it is
    /// dropped.
    pub async fn sweep(&self, lease: Option<Arc<dyn Lease>>) {
        loop {
            if let Some(lease) = &lease
                && self.is_sweep_due()
                && !lease.is_valid()
                && !lease.renewed().await
            {
                return;
            }
            let (next_ms, now_ms) = self.sweep_once();
            let Some(next_ms) = next_ms else {
                self.expiry.notified().await;
                continue;
            };
            if next_ms <= now_ms {
                // Even an empty sleep would wait for the next tick of the timer.
                tokio::task::yield_now().await;
                continue;
            }
            // The sleep is bounded, because `now` follows the wall clock, which may be stepped.
            let wait = Duration::from_millis(next_ms - now_ms);
            tokio::select! {
                () = tokio::time::sleep(wait.min(limits::SWEEP_SLEEP_MAX)) => {}
                () = self.expiry.notified() => {}
            }
        }
    }

    fn is_sweep_due(&self) -> bool {
        let mut locked = self.lock();
        let now_ms = locked.now_ms();
        (locked.core.store().next_expiry_ms()).is_some_and(|next_ms| next_ms <= now_ms)
    }

    /// Removes expired keys, if there are any. Returns the next expiry and `now`.
    pub fn sweep_once(&self) -> (Option<u64>, u64) {
        let next_ms = |locked: &Locked| locked.core.store().next_expiry_ms();
        let (next, now) = {
            let mut locked = self.lock_with_room();
            let now = locked.now();
            if next_ms(&locked).is_none_or(|next_ms| next_ms > now.ms) {
                return (next_ms(&locked), now.ms);
            }
            if locked.journal == JournalRoom::Nothing {
                // The records would wait for the disk, and responses after them would wait too.
                let later_ms = now.ms + limits::SWEEP_SLEEP_MAX.as_millis() as u64;
                return (Some(later_ms), now.ms);
            }
            self.handle(&mut locked, Input::Sweep, None, now);
            (next_ms(&locked), now)
        };
        self.release();
        (next, now.ms)
    }

    /// Figures since the start.
    pub fn stats(&self) -> Stats {
        // Requests that a transport dropped before the core could refuse them.
        let kicked = self.link().map_or(0, |link| link.kicked);
        let mut locked = self.lock();
        // Updates the figures about the clock.
        locked.now_ms();
        let policy_bytes = locked.core.store_mut().registry().memory_bytes() as u64;
        let store = locked.core.store();
        let (state, duplicates) = (store.state(), store.duplicates());
        let (keys, bytes) = state.load();
        Stats {
            keys,
            bytes,
            watches: state.watches.len() as u64,
            remembered: duplicates.len() as u64,
            forgotten: duplicates.evicted(),
            disk_full: !self.journal.has_room(),
            remembered_bytes: duplicates.bytes(),
            watch_bytes: state.watches.bytes() as u64,
            policy_bytes,
            unreleased_bytes: self.gate.waiting_bytes(),
            sampled_bytes: self.observer.queued_bytes(),
            slow: self.gate.slow.count(),
            kicked: locked.stats.kicked + kicked,
            ..locked.stats
        }
    }

    /// How long requests took since the start.
    pub fn times(&self) -> Times {
        let (requests, notifications) = self.gate.times();
        Times {
            requests,
            notifications,
            calls: self.lock().calls.times().clone(),
        }
    }

    /// Measures more from now on, for an operator who watches, or no more.
    pub fn watch(&self, on: bool) {
        self.gate.watch(on);
    }

    /// What is measured while an operator watches; none while no operator does. The longest times
    /// are those since the call before. Hot keys are searched for at the given rate of requests.
    pub fn observed(&self, requests_per_second: f64) -> Option<Observed> {
        self.gate.observed(requests_per_second)
    }

    /// The slow requests that are kept, after the first `from`.
    pub fn slow_requests(&self, from: u64) -> SlowRequests {
        self.gate.slow.since(from)
    }

    /// Sets from which time on a request is slow.
    pub fn set_slow_threshold(&self, threshold: Duration) {
        self.gate.slow.set_threshold(threshold);
    }

    /// Sends traces. The first call counts; the settings of the core say which requests.
    pub fn set_traces(&self, traces: Arc<Traces>) {
        // The composition root calls this once.
        let _ = self.gate.traces.set(traces);
    }

    /// Spans since the start, if traces are on.
    pub fn trace_counts(&self) -> Option<Counts> {
        self.gate.traces.get().map(|it| it.counts())
    }

    /// Why the store is not ready, if it is not.
    pub fn impediment(&self) -> Option<&'static str> {
        if self.stopped.load(Relaxed) {
            Some("the store is stopping")
        } else if !self.journal.has_room() {
            Some(self.journal.shortage())
        } else if self.lock().is_clock_behind() {
            Some("the system clock is behind the store's time: it was stepped back")
        } else if self.link().is_some_and(|link| !link.connected) {
            Some("there is no connection to the broker")
        } else {
            None
        }
    }

    /// The state of the connection to a foreign broker, if there is one.
    pub fn link(&self) -> Option<Figures> {
        self.transport.get()?.figures()
    }

    /// Shows the store between two inputs. `look` must be short, because requests wait for it.
    pub fn inspect<T>(&self, look: impl FnOnce(&Store) -> T) -> T {
        look(self.lock().core.store())
    }

    /// All watchers. After a restart behind a foreign broker, some may be disconnected.
    pub fn watching(&self) -> Vec<Peer> {
        self.inspect(|store| store.state().watches.peers().cloned().collect())
    }

    /// Applies changed rights to the watches. Requests that are handled from now on must have the
    /// changed rights already: a watch that begins during this call is not checked again. Other
    /// clients are served during this call.
    ///
    /// `grants` returns the present rights of a client. It is called twice for each watcher, first
    /// without the lock. It must cache its result, or rules are evaluated under the lock.
    pub fn recheck(&self, grants: impl Fn(&Peer) -> Arc<Grants>) {
        for peer in self.watching() {
            _ = grants(&peer);
            {
                // This step removes expired keys too.
                let mut locked = self.lock_with_room();
                let now = locked.now();
                // The rules may have changed again, and the client may have begun watches by the
                // newer ones. So the first result must not be used here.
                let rights: Arc<dyn ClientRights> = grants(&peer);
                self.handle(&mut locked, Input::Rights(&peer, &rights), None, now);
            }
            self.release();
        }
    }

    /// After a restart: notifies the watchers of keys that the earlier run removed and may not have
    /// notified of.
    pub fn renotify_expired(&self, removed: &[(Key, Stamp)]) {
        let mut rest = removed;
        let mut at_once = limits::EXPIRIES_NOTIFIED_PER_STEP_MAX;
        while !rest.is_empty() {
            let (some, after) = rest.split_at(at_once.min(rest.len()));
            {
                let mut locked = self.lock_with_room();
                let now = locked.now();
                let failures = locked.stats.policy_failures;
                self.handle(&mut locked, Input::Expired(some), None, now);
                if locked.stats.policy_failures > failures {
                    // The policy would fail at each further step, and in one step it runs once.
                    at_once = usize::MAX;
                }
            }
            rest = after;
            self.release();
        }
    }

    /// After a restart: removes the remembered requests of sessions that did not survive it.
    pub fn retain_sessions(&self, live: &[SessionId]) {
        self.lock().core.store_mut().retain_sessions(live);
    }

    /// The time of the store in milliseconds since 1970.
    pub fn now_ms(&self) -> u64 {
        self.lock().now_ms()
    }

    /// The approximate size of a snapshot in bytes.
    pub fn snapshot_bytes(&self) -> u64 {
        self.inspect(|store| store.state().load().1 + store.duplicates().bytes())
    }

    /// The next block of a snapshot; `None` at its end.
    pub fn snapshot(&self, progress: &mut Progress) -> Option<Vec<u8>> {
        let mut locked = self.lock();
        let now_ms = locked.now_ms();
        locked.core.snapshot(progress, now_ms)
    }

    /// Waits until no output of the store waits for the log.
    pub async fn drained(&self) {
        while self.gate.is_waiting() {
            tokio::time::sleep(limits::DRAIN_POLL).await;
        }
    }

    /// Appends the last record of this run. Nothing may be decided or assigned after it, because it
    /// would be lost.
    pub fn stop(&self) {
        let mut locked = self.lock();
        let now_ms = locked.now_ms();
        locked.core.stop(now_ms);
        self.stopped.store(true, Relaxed);
    }

    /// Handles one input of a transport and queues the outputs. Nothing is sent yet.
    fn step(&self, locked: &mut Locked, inbound: Inbound<'_>, now: Now) -> Stepped {
        match inbound {
            Inbound::Publish(incoming, ticket) => {
                self.handle(locked, Input::Publish(&incoming), ticket, now)
            }
            Inbound::Disconnected(peer) => {
                self.handle(locked, Input::Disconnected(peer), None, now)
            }
            Inbound::Undeliverable(peer, key) => {
                self.handle(locked, Input::Undeliverable(peer, key), None, now)
            }
            Inbound::SessionsEnded(sessions) => {
                self.handle(locked, Input::SessionsEnded(sessions), None, now)
            }
        }
    }

    fn handle(
        &self,
        locked: &mut Locked,
        input: Input<'_>,
        ticket: Option<Ticket>,
        now: Now,
    ) -> Stepped {
        let publisher = match input {
            Input::Publish(incoming) => Some(incoming.peer),
            _ => None,
        };
        let mut decision = locked.handle(input, now);
        let call = matches!(decision.outcome, Outcome::Handled(..))
            .then(|| locked.calls.called(decision.effects.fuel));
        if let Some(sampled) = decision.effects.sampled.take() {
            self.observer.offer(sampled);
        }
        self.report(input, &decision);
        if decision.effects.tripped.is_some() {
            self.warm_previous();
        }
        let disconnects = matches!(decision.outcome, Outcome::Disconnected(..));
        let is_unordered = matches!(decision.outcome, Outcome::Answered(..)) && ticket.is_none();
        let is_light = intake::is_light(&decision);
        let position = decision.position;
        let connection = publisher.map_or(ConnectionId::NONE, |peer| peer.connection);
        let bytes = if is_unordered {
            // A client may send any number of requests at QoS 0. Their responses must not pile up
            // behind a slow disk.
            let mut bytes = 0;
            outbound(&locked.core, decision, publisher, ticket, |_, out| {
                bytes += self.gate.push_unordered(out);
            });
            bytes
        } else {
            let mut outputs = self.gate.begin(position, connection);
            outputs.measure_notifications(now.instant);
            if let (Input::Publish(incoming), Some(call)) = (input, call) {
                let trace = self.trace(&decision);
                outputs.measure_response(incoming, &decision.effects, now.instant, call, trace);
            }
            outbound(&locked.core, decision, publisher, ticket, |to, out| {
                outputs.push(to, out);
            });
            outputs.end()
        };
        // Behind a foreign broker, the other messages of the batch are from other clients, or from
        // a connection that continues.
        match disconnects && self.mode == Mode::Embedded {
            true => Stepped::Disconnected,
            false => Stepped::Queued { bytes, is_light },
        }
    }

    /// The trace of a request, if it has one.
    fn trace(&self, decision: &Decision<'_>) -> Option<Box<Trace>> {
        let (traced, effects) = (decision.traced.as_ref()?, &decision.effects);
        let notifications = effects.notifications.iter().map(|it| it.to.len());
        let is_duplicate = effects.repeated.is_some();
        self.gate.traces.get()?;
        Some(Trace::begin(traced, is_duplicate, notifications.sum()))
    }

    /// Logs a decision, and passes refusals to the audit log.
    fn report(&self, input: Input<'_>, decision: &Decision<'_>) {
        let Input::Publish(incoming) = input else {
            return;
        };
        let refused = |what, why: &dyn Display| self.refused(what, incoming, why);
        match &decision.outcome {
            Outcome::Handled(request, reply_to) => {
                let effects = &decision.effects;
                if let Some((key, right)) = &effects.denied {
                    refused(right.verb(), &NoRule(right.verb(), key));
                }
                if let Some(exceeded) = effects.exceeded {
                    refused(exceeded.name(), &exceeded);
                }
                request_log::log(request, reply_to, effects);
            }
            Outcome::ForbiddenResponseTopic(topic) => {
                let no_rule = NoRule("have answers at", topic);
                refused(no_rule.0, &no_rule);
            }
            _ => {}
        }
        self.client_errors.log(incoming.peer, decision, self.mode);
    }

    /// Passes a request to the audit log, because rules forbid it or a limit refuses it.
    fn refused(&self, what: &'static str, incoming: &Incoming<'_>, why: &dyn Display) {
        if let Some(audit) = self.audit.get() {
            audit.refused(&Refused {
                what,
                peer: None,
                client: &incoming.peer.client,
                user: incoming.grants.as_ref().and_then(|it| it.user()),
                why,
            });
        }
    }

    /// Acknowledges a message that arrived after its connection was ended, without handling it.
    fn skip(&self, locked: &mut Locked, inbound: Inbound<'_>) {
        if let Inbound::Publish(incoming, Some(ticket)) = inbound {
            locked.stats.refused.disconnected += 1;
            let reason = ReasonCode::IMPLEMENTATION_SPECIFIC_ERROR;
            let connection = incoming.peer.connection;
            let mut outputs = self.gate.begin(LogPosition::NONE, connection);
            outputs.push(connection, Outbound::Acknowledge(ticket, reason, None));
            outputs.end();
        }
    }

    /// Starts, in a thread of its own, the policy that the next rollback would activate.
    fn warm_previous(&self) {
        let server = self.this.clone();
        let warming = std::thread::Builder::new().name("warming".into());
        // Without the thread, the next rollback starts its policy while requests wait.
        _ = warming.spawn(move || server.upgrade().map(|server| server.warm_before()));
    }

    /// Sends everything whose log position is released. Called after each batch and by the log.
    pub fn release(&self) {
        if let Some(transport) = self.transport.get() {
            let transport = WithoutOwn {
                transport: &**transport,
                own: &self.own,
            };
            self.gate.release(self.journal.released(), &transport);
        }
    }

    /// The state with the present room of the log. A step decides by the room that was noted last,
    /// and without requests that may be long ago.
    fn lock_with_room(&self) -> MutexGuard<'_, Locked> {
        let mut locked = self.lock();
        locked.check_disk_space(&*self.journal);
        locked
    }

    fn lock(&self) -> MutexGuard<'_, Locked> {
        self.locked.lock().unwrap_or_else(|_| {
            // A panic inside a step left the state half changed. Going on could acknowledge writes
            // that are lost, so the process ends, and its supervisor starts a new one.
            tracing::error!("a step of the store panicked; stopping, since its state is lost");
            logging::exit(EXIT_STATE_LOST)
        })
    }
}

/// Passes each output of a decision to `send`, with the connection that it is for. A response and
/// the acknowledgment directly after it become one.
fn outbound(
    core: &Core,
    decision: Decision<'_>,
    publisher: Option<&Peer>,
    ticket: Option<Ticket>,
    mut send: impl FnMut(ConnectionId, Outbound),
) {
    let connection = publisher.map_or(ConnectionId::NONE, |peer| peer.connection);
    let mut response = None;
    core.outputs(decision, |output| {
        if let Some(message) = response.take() {
            if let (Output::Acknowledge(..), Some(ticket)) = (&output, ticket) {
                return send(connection, Outbound::AcknowledgedResponse(message, ticket));
            }
            send(connection, Outbound::Response(message, ticket));
        }
        match (output, ticket) {
            (Output::Response(message), _) => response = Some(message),
            (Output::Notification(peer, message), _) => {
                let destination = peer.connection;
                send(destination, Outbound::Notification(peer, message, ticket));
            }
            (Output::Acknowledge(reason, text), Some(ticket)) => {
                send(connection, Outbound::Acknowledge(ticket, reason, text));
            }
            (Output::Acknowledge(..), None) => {}
            (Output::Disconnect(reason, text), _) => {
                if let Some(peer) = publisher {
                    send(connection, Outbound::Disconnect(peer.clone(), reason, text));
                }
            }
        }
    });
    if let Some(message) = response {
        send(connection, Outbound::Response(message, ticket));
    }
}

#[cfg(test)]
mod tests;
