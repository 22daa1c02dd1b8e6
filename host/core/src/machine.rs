//! [`Core`]: the one place that decides.
//!
//! [`Core::handle`] takes an input and the time, and returns what must be done. It parses the
//! request, checks its response topic and its expiry, runs the store, and appends the records. The
//! server, the test kit, the model test and the benchmarks all call it, so none of them can decide
//! differently. It takes no lock, reads no clock and does no I/O but appending to the log. Only for
//! traces it reads the clock that the embedder names; no decision depends on it.
//!
//! Invariant: nothing that [`Core::outputs`] returns may be sent before the log has released
//! [`Decision::position`].

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use statehouse_mqtt::{Message, QoS, ReasonCode};

use crate::clock::Stamp;
use crate::log::record::PolicyRecord;
use crate::log::{Journal, LogPosition, Memory, Meta, Progress, Recorder};
use crate::policy::{Absent, Assignment, Digest, Instance, Part, Policy};
use crate::request::{self, Dialect, Early, Incoming, ReplyTo, Request};
use crate::store::{Answer, Effects, Key, Mode, Notification, Peer, Store, Transaction};
use crate::trace::{Sampling, TraceParent, Traced};
use statehouse_protocol::SessionId;
use statehouse_protocol::rights::ClientRights;

/// An input of the state machine.
#[derive(Clone, Copy)]
pub enum Input<'a> {
    /// A PUBLISH on a request topic.
    Publish(&'a Incoming<'a>),
    /// A connection ended, and its watches with it.
    Disconnected(&'a Peer),
    /// A notification for this key could not be delivered. The client's watches that cover the key
    /// end.
    Undeliverable(&'a Peer, &'a [u8]),
    /// A client has these rights now. Its watches cover only keys that it may read.
    Rights(&'a Peer, &'a Arc<dyn ClientRights>),
    /// An earlier run removed these expired keys and may not have notified their watchers.
    Expired(&'a [(Key, Stamp)]),
    /// Sessions ended. Their requests can never be redelivered.
    SessionsEnded(&'a [SessionId]),
    /// Only time has passed.
    Sweep,
}

/// The time of an input.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// The store's time in milliseconds since 1970. Must not be lower than in an earlier call, or
    /// versions and expiry would run backwards.
    pub ms: u64,
    /// Decides whether a request has expired.
    pub instant: Instant,
}

/// How the store names itself and understands its clients.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// The name of this store in versions.
    pub node: String,
    /// Overrides the dialect on the current request topic.
    pub dialect: Option<Dialect>,
    /// Whether each response names the policy that answered, in a user property.
    pub policy_property: bool,
    /// Which requests are traced, if traces are on. Then the response to a request with a trace
    /// context, and its notifications, carry one too.
    pub traces: Option<Sampling>,
}

/// What must be done about an input.
pub struct Decision<'a> {
    /// The log position that must be durable before any output is sent.
    pub position: LogPosition,
    /// What became of the input.
    pub outcome: Outcome<'a>,
    /// The effects of the store, for logs and figures.
    pub effects: Effects,
    /// The active policy before and after, if a policy was rolled back.
    pub swapped: Option<Swapped>,
    /// The stages of a handled request, if it is traced.
    pub traced: Option<Box<Traced>>,
    /// The span that the response and the notifications name.
    span: Option<TraceParent>,
    /// Whether the publisher waits for an acknowledgment: at QoS 1 and 2.
    acknowledge: bool,
}

/// The active policy before and after a swap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Swapped {
    /// Before.
    pub from: Digest,
    /// After.
    pub to: Digest,
}

/// What became of an input.
pub enum Outcome<'a> {
    /// The request was handled by a policy, or answered as its original.
    Handled(Request<'a>, ReplyTo<'a>),
    /// The input was not a PUBLISH.
    Event,
    /// The request had expired. It is acknowledged and not executed.
    Expired,
    /// The client may not publish to this response topic, so the store must not do it for the
    /// client.
    ForbiddenResponseTopic(&'a [u8]),
    /// Answered without a policy, because it is not a request for one.
    Answered(ReplyTo<'a>, Early<'a>),
    /// Refused without an answer: a PUBACK with a reason, or dropped at QoS 0.
    Refused(ReasonCode, &'static str),
    /// The client violated the rules for response topics and must be disconnected.
    Disconnected(ReasonCode, &'static str),
}

/// Something to send, in order.
#[derive(Debug)]
pub enum Output {
    /// The response, to all subscribers of its topic.
    Response(Message),
    /// A notification, to this connection only.
    Notification(Peer, Message),
    /// The connection that the request came from must be closed.
    Disconnect(ReasonCode, &'static str),
    /// The acknowledgment of the request.
    Acknowledge(ReasonCode, Option<&'static str>),
}

/// The result of an assignment of policies.
pub struct Assigned {
    /// The position of its record.
    pub position: LogPosition,
    /// Instances that are not needed any more. Dropping one takes microseconds, so it should happen
    /// outside any lock.
    pub left: Vec<Instance<Transaction>>,
    /// The active policy before and after, if it changed.
    pub swapped: Option<Swapped>,
}

/// Refuses a request whose response topic its client may not publish to.
const FORBIDDEN_RESPONSE_TOPIC: &str = "no rule lets this client publish to the response topic of its request, and it does not begin with clients/, its client id, and a slash";

/// The state machine with its log.
pub struct Core {
    store: Store,
    recorder: Recorder,
    settings: Settings,
    run: u32,
    /// The response topic of the last request, in memory of its own. The requests of one read have
    /// the same, so their responses share it.
    response_topic: Bytes,
}

impl Core {
    /// Continues with `store`. Steps are recorded by `recorder` as those of run number `run`.
    pub fn new(store: Store, recorder: Recorder, run: u32, settings: Settings) -> Self {
        Self {
            store,
            recorder,
            settings,
            run,
            response_topic: Bytes::new(),
        }
    }

    /// Continues with `store`, without a log.
    pub fn in_memory(store: Store, settings: Settings) -> Self {
        let recorder = Recorder::new(Arc::new(Memory), Vec::new(), None);
        Self::new(store, recorder, 1, settings)
    }

    /// The store.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The store, to change its settings.
    pub fn store_mut(&mut self) -> &mut Store {
        &mut self.store
    }

    /// The log.
    pub fn journal(&self) -> &Arc<dyn Journal> {
        self.recorder.journal()
    }

    /// The log position that must be durable before anything of the present state is shown.
    pub fn position(&self) -> LogPosition {
        self.recorder.last()
    }

    /// How the store names itself and understands its clients.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Changes how the store names itself and understands its clients.
    pub fn settings_mut(&mut self) -> &mut Settings {
        &mut self.settings
    }

    /// Records the start of this run and the policies that may answer in it. Must be called before
    /// the first input.
    pub fn begin(&mut self, mode: Mode, named: Vec<PolicyRecord>, now_ms: u64) {
        self.recorder.started(self.run, now_ms, mode);
        self.begin_recorded(named);
    }

    /// Like [`begin`](Self::begin), if the start of this run is recorded already.
    pub fn begin_recorded(&mut self, named: Vec<PolicyRecord>) {
        let assignment = self.store.registry().assignment();
        self.recorder.assign(named, assignment);
        let receive_max = self.store.duplicates().receive_max();
        self.recorder.record_receive_max(receive_max);
    }

    /// Handles one input.
    pub fn handle<'a>(&mut self, input: Input<'a>, now: Now) -> Decision<'a> {
        if let Input::Publish(incoming) = input {
            return self.publish(incoming, now);
        }
        let mut effects = Effects::default();
        self.store.step(input, now.ms, &mut effects);
        Decision {
            position: self.recorder.step(None, &effects, false),
            swapped: self.roll_back(&effects, now.ms),
            outcome: Outcome::Event,
            effects,
            traced: None,
            span: None,
            acknowledge: false,
        }
    }

    fn publish<'a>(&mut self, incoming: &'a Incoming<'a>, now: Now) -> Decision<'a> {
        let may_be_answered_at =
            |topic| (incoming.grants.as_ref()).is_none_or(|it| it.may_be_answered_at(topic));
        let outcome = match request::parse(incoming, self.settings.dialect) {
            Outcome::Handled(_, ReplyTo { topic, .. })
            | Outcome::Answered(ReplyTo { topic, .. }, _)
                if !may_be_answered_at(topic) =>
            {
                Outcome::ForbiddenResponseTopic(topic)
            }
            // The client does not wait for the response any more and may have sent another request
            // since. A request that an earlier run handled is not executed again, so its
            // notifications are still sent.
            Outcome::Handled(request, reply_to)
                if reply_to.expires.is_some_and(|at| at <= now.instant)
                    && !self.store.may_be_unnotified(&request) =>
            {
                Outcome::Expired
            }
            outcome => outcome,
        };
        // Filled in place, because it is large.
        let mut decision = Decision {
            position: LogPosition::default(),
            swapped: None,
            outcome,
            effects: Effects::default(),
            traced: None,
            span: None,
            acknowledge: incoming.qos != QoS::AtMostOnce,
        };
        if let Outcome::Handled(request, reply_to) = &decision.outcome {
            if self.response_topic != reply_to.topic {
                self.response_topic = Bytes::copy_from_slice(reply_to.topic);
            }
            (decision.position, decision.span, decision.traced) =
                self.run(request, reply_to, now.ms, &mut decision.effects);
            decision.swapped = self.roll_back(&decision.effects, now.ms);
        }
        decision
    }

    /// Runs a request, and appends its record. Returns the position of the record, the span that
    /// the outputs name, and the stages.
    fn run(
        &mut self,
        request: &Request<'_>,
        reply_to: &ReplyTo<'_>,
        now_ms: u64,
        effects: &mut Effects,
    ) -> (LogPosition, Option<TraceParent>, Option<Box<Traced>>) {
        let sampling = self.settings.traces;
        let parent = (sampling.and(reply_to.traceparent)).and_then(TraceParent::parse);
        let clock = sampling.and_then(|it| it.traces(parent).then_some(it.clock));
        let called = clock.map(|clock| clock());
        self.store.answer(request, now_ms, effects);
        let decided = clock.map(|clock| clock());
        let is_urgent = reply_to.is_urgent();
        let position = self.recorder.step(Some(request), effects, is_urgent);
        let version = effects.answer.as_ref().and_then(|it| it.version);
        let span = parent.map(|it| it.of_request(reply_to.correlation_data(), version));
        let times = called.zip(decided).zip(clock.map(|clock| clock()));
        let traced = times.map(|((called, decided), appended)| {
            Box::new(Traced {
                parent,
                span,
                called,
                decided,
                appended,
            })
        });
        (position, span, traced)
    }

    /// Passes the outputs of a decision to `emit` in the order in which they must be sent:
    /// notifications of keys that expired before, the response, the notifications of the request,
    /// the acknowledgment.
    pub fn outputs(&self, decision: Decision<'_>, mut emit: impl FnMut(Output)) {
        // Only the parts that leave are moved out of the effects, because these are large.
        let span = decision.span;
        for notification in decision.effects.expired {
            self.notifications(notification, None, &mut emit);
        }
        let mut reason = (ReasonCode::SUCCESS, None);
        match decision.outcome {
            Outcome::Event | Outcome::Expired => {}
            Outcome::Handled(_, to) => {
                if let Some(answer) = decision.effects.answer {
                    let by = decision.effects.by.as_deref().map(|policy| &*policy.tag);
                    emit(Output::Response(self.response(&to, answer, by, span)));
                }
            }
            Outcome::ForbiddenResponseTopic(_) => {
                reason = (ReasonCode::NOT_AUTHORIZED, Some(FORBIDDEN_RESPONSE_TOPIC));
            }
            Outcome::Answered(to, early) => {
                emit(Output::Response(self.early_response(&to, &early)));
            }
            Outcome::Refused(code, text) => reason = (code, Some(text)),
            Outcome::Disconnected(code, text) => {
                emit(Output::Disconnect(code, text));
                // Acknowledged as well: a QoS 2 exchange outlives the connection and must end.
                reason = (code, Some(text));
            }
        }
        for notification in decision.effects.notifications {
            self.notifications(notification, span, &mut emit);
        }
        if decision.acknowledge {
            emit(Output::Acknowledge(reason.0, reason.1));
        }
    }

    fn response(
        &self,
        to: &ReplyTo<'_>,
        answer: Answer,
        by: Option<&str>,
        span: Option<TraceParent>,
    ) -> Message {
        let journal = self.journal();
        let persisted = answer.put.then(|| journal.persisted(to.is_urgent()));
        let by = by.filter(|_| self.settings.policy_property);
        let properties = to.properties(answer.version, &self.settings.node, persisted, by, span);
        self.message_to(to, answer.payload, properties)
    }

    fn early_response(&self, to: &ReplyTo<'_>, early: &Early<'_>) -> Message {
        match early {
            Early::UnsupportedVersion(asked) => {
                self.message_to(to, Bytes::new(), to.unsupported_version(asked))
            }
            Early::QosZero => {
                let properties = to.properties(None, &self.settings.node, None, None, None);
                let payload = Bytes::from_static(request::QOS_ZERO_ANSWER);
                self.message_to(to, payload, properties)
            }
        }
    }

    fn message_to(&self, to: &ReplyTo<'_>, payload: Bytes, properties: Bytes) -> Message {
        let topic = match self.response_topic == to.topic {
            true => self.response_topic.clone(),
            // Copied: a waiting response must not keep a whole read buffer alive.
            false => Bytes::copy_from_slice(to.topic),
        };
        message(topic, payload, properties, to.expires)
    }

    /// One message for each watcher.
    fn notifications(
        &self,
        it: Notification,
        span: Option<TraceParent>,
        emit: &mut impl FnMut(Output),
    ) {
        let node = &self.settings.node;
        let properties = request::notification_properties(it.dialect, it.version, node, span);
        for (peer, topic) in it.to {
            let message = message(topic, it.payload.clone(), properties.clone(), None);
            emit(Output::Notification(peer, message));
        }
    }

    /// Applies an assignment of policies before the next request, and records it. Fails if the
    /// assignment names a policy that is not loaded.
    pub fn assign(
        &mut self,
        next: Assignment,
        ready: Vec<Instance<Transaction>>,
    ) -> Result<Assigned, Absent> {
        let from = self.store.registry().assignment().active;
        let left = self.store.assign(next, ready)?;
        let registry = self.store.registry();
        let assignment = registry.assignment();
        let to = assignment.active;
        let record = |it: &Arc<Policy<Transaction>>| {
            PolicyRecord::of(it, it.digest == assignment.built_in.0)
        };
        let named = registry.policies().map(record).collect();
        Ok(Assigned {
            position: self.recorder.assign(named, assignment),
            left,
            swapped: (from != to).then_some(Swapped { from, to }),
        })
    }

    /// Rolls the active policy back, or ends a canary, before the next input if the policy failed
    /// once too often.
    fn roll_back(&mut self, effects: &Effects, now_ms: u64) -> Option<Swapped> {
        let trip = effects.tripped.as_ref()?;
        let registry = self.store.registry();
        let assignment = registry.assignment();
        let why = trip.why.clone();
        let (next, bad) = match (trip.part, &assignment.canary) {
            (Part::Active, _) => (assignment.roll_back_for(why, now_ms), assignment.active),
            (Part::Canary, Some(canary)) => (assignment.end_canary_for(why, now_ms), canary.policy),
            (Part::Canary | Part::Routed, _) => return None,
        };
        let policy = registry.by_digest(&bad.0)?;
        let why = &trip.why;
        let done = next.map_err(|error| error.to_string()).and_then(|next| {
            // The policy before the active one is kept warm. The failing instance is dropped at
            // once, which takes some ten microseconds.
            self.assign(next, Vec::new())
                .map_err(|absent| format!("the policy {} is not loaded any more", absent.0))
        });
        match (done, trip.part) {
            (Ok(assigned), Part::Canary) => {
                tracing::error!(%policy, digest = %policy.digest, why, "a canary is ended: the active policy answers its requests");
                assigned.swapped
            }
            (Ok(assigned), _) => {
                tracing::error!(%policy, digest = %policy.digest, why, "a policy is rolled back: the one before it answers, or the built-in one");
                assigned.swapped
            }
            (Err(error), _) => {
                if policy.counters.may_warn(now_ms) {
                    tracing::error!(%policy, digest = %policy.digest, why, error, "a policy cannot be rolled back");
                }
                None
            }
        }
    }

    /// Postpones every deadline by `by_ms`, because the clock was stepped ahead. Returns false, and
    /// leaves the deadlines of keys, if the log has no room for the new ones.
    #[must_use = "the operator must know that keys expire early"]
    pub fn postpone(&mut self, now_ms: u64, by_ms: u64) -> bool {
        let Self {
            store, recorder, ..
        } = self;
        let journal = recorder.journal();
        let whole = !journal.knows_deadlines();
        let fits = journal.fits(store.state().postponement_bytes(whole));
        if fits {
            store.state_mut().postpone_keys(by_ms, |deadlines, state| {
                recorder.deadlines(now_ms, deadlines, state);
            });
        }
        store.duplicates.postpone(by_ms);
        recorder.postponed(now_ms, by_ms);
        fits
    }

    /// Sizes the dedup table for this Receive Maximum. Must be called before a client is sent that
    /// maximum, or a redelivery might not be recognized.
    pub fn raise_receive_max(&mut self, receive_max: u16) {
        if self.store.duplicates.raise_per_session(receive_max) {
            self.recorder.record_receive_max(receive_max);
        }
    }

    /// Sets how far the wall clock is behind the time of the next inputs, in milliseconds: see
    /// [`Recorder::set_wall_behind`].
    pub fn set_wall_behind(&mut self, wall_behind_ms: u64) {
        self.recorder.set_wall_behind(wall_behind_ms);
    }

    /// The next block of a snapshot; `None` at its end.
    pub fn snapshot(&self, progress: &mut Progress, now_ms: u64) -> Option<Vec<u8>> {
        let (policies, active, assignment) = self.recorder.policies();
        let (state, duplicates) = (self.store.state(), self.store.duplicates());
        let meta = || Meta {
            clock: state.hlc.last(),
            now_ms,
            run: self.run,
            policies: policies.to_vec(),
            active,
            assignment: assignment.cloned(),
            receive_max: duplicates.receive_max(),
            begun: None,
        };
        progress.next(state, duplicates, meta)
    }

    /// Appends the last record of this run. Nothing may be handled after it.
    pub fn stop(&mut self, now_ms: u64) {
        self.recorder.stopped(now_ms);
    }
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
