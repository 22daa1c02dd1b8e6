//! The response gate: holds responses, notifications and PUBACKs until the log position that they
//! depend on is released.
//!
//! Invariants:
//!
//! * Nothing leaves before its position is released, or a crash could revoke what a client has
//!   seen.
//! * Outputs to one connection leave in the order in which they were decided.
//! * The outputs of one decision are passed to the transport in their order, even to several
//!   connections, so that no PUBACK is written before a notification of the same decision. Between
//!   two sockets the network may still change the order.
//!
//! An output that depends on nothing unreleased, such as the response to a GET of a key that was
//! not just written, does not wait for other connections.
//!
//! Waiting outputs, including notifications to watchers, are counted for the connection whose
//! request caused them. A connection that writes faster than the disk is not read from until its
//! outputs have left.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use rustc_hash::FxHashMap;
use statehouse_protocol::ConnectionId;

use super::names::Names;
use super::pending::{Pending, ShortKey, key_of};
use super::slow::{Departures, SlowLog};
use super::timing::{Call, LeaveTimes, RequestTimes, Timed};
use super::watched::Observed;
use crate::traces::{Notifier, Trace, TracedNotification, Traces};
use statehouse_config::limits;
use statehouse_core::log::LogPosition;
use statehouse_core::request::Incoming;
use statehouse_core::store::Effects;
use statehouse_transport::{Outbound, Transport};

/// The queue between the state machine and a transport.
#[derive(Default)]
pub struct ResponseGate {
    queue: Mutex<Queue>,
    /// The bytes of all waiting outputs, readable without the lock of the queue.
    bytes: AtomicUsize,
    /// Whether an operator watches, readable without the lock of the queue.
    is_watched: AtomicBool,
    pub(super) slow: SlowLog,
    /// Where spans go, if traces are on.
    pub(super) traces: OnceLock<Arc<Traces>>,
}

#[derive(Default)]
struct Queue {
    /// Outputs that may leave now.
    ready: Vec<Outbound>,
    /// What is measured of the outputs that may leave.
    ready_responses: Pending,
    ready_notifications: Vec<MeasuredNotification>,
    /// Outputs that wait for their position, in order.
    waiting: VecDeque<Waiting>,
    /// The requests of the waiting responses that are measured, in the same order.
    waiting_responses: Pending,
    times: LeaveTimes,
    names: Names,
    /// The key of the request whose response is queued next.
    key: ShortKey,
    /// The number of waiting outputs by the connection that they are for.
    destinations: FxHashMap<ConnectionId, usize>,
    /// The bytes of waiting outputs by the connection whose requests caused them.
    caused: FxHashMap<ConnectionId, usize>,
    released: LogPosition,
}

struct Waiting {
    position: LogPosition,
    destination: ConnectionId,
    owner: ConnectionId,
    bytes: usize,
    measured: Measured,
    out: Outbound,
}

/// How the time of an output is measured.
enum Measured {
    No,
    /// By the next of [`Queue::waiting_responses`].
    Response,
    Notification(MeasuredNotification),
}

/// When a notification was decided, and its span if it has one.
type MeasuredNotification = (Instant, Option<Box<TracedNotification>>);

/// What is measured of a response, its trace if it has one, and its client.
type MeasuredResponse<'a> = (Timed, Option<Box<Trace>>, &'a Arc<str>);

impl ResponseGate {
    /// Begins to queue the outputs of one decision. They are counted for `owner`, the connection
    /// that sent the request. Decisions must be queued in order, so the server's lock must be held.
    pub fn begin(&self, position: LogPosition, owner: ConnectionId) -> Outputs<'_> {
        let queue = self.lock();
        Outputs {
            waits: position > queue.released,
            bytes: &self.bytes,
            queue,
            position,
            owner,
            response: None,
            notified: None,
            traced: None,
            shared: std::ptr::null(),
            sum: 0,
            waiting_bytes: 0,
        }
    }

    /// Whether more requests of a connection may be handled: the outputs that it caused, and all
    /// waiting outputs, are within their limits.
    pub fn has_room(&self, owner: ConnectionId, bytes_max: u64) -> bool {
        let all = self.bytes.load(Relaxed);
        let own_max = match all as u64 <= bytes_max {
            true => limits::UNRELEASED_BYTES_PER_CLIENT_MAX,
            false => limits::UNRELEASED_BYTES_FREE,
        };
        all <= own_max
            || self
                .lock()
                .caused
                .get(&owner)
                .is_none_or(|own| *own <= own_max)
    }

    /// The bytes of all waiting outputs.
    pub fn waiting_bytes(&self) -> u64 {
        self.bytes.load(Relaxed) as u64
    }

    /// How long responses and notifications took until they left.
    pub fn times(&self) -> (Vec<RequestTimes>, statehouse_protocol::Histogram) {
        let queue = self.lock();
        (
            queue.times.requests(&queue.names),
            queue.times.notifications(),
        )
    }

    /// An operator watches from now on, or no operator does.
    pub(super) fn watch(&self, on: bool) {
        let mut queue = self.lock();
        if on != queue.times.watched.is_some() {
            queue.times.watched = on.then(Box::default);
        }
        self.is_watched.store(on, Relaxed);
    }

    /// What was measured for the operator who watches.
    pub(super) fn observed(&self, requests_per_second: f64) -> Option<Observed> {
        let mut queue = self.lock();
        Some(queue.times.watched.as_mut()?.look(requests_per_second))
    }

    /// Whether an output waits for its position.
    pub fn is_waiting(&self) -> bool {
        !self.lock().waiting.is_empty()
    }

    /// Queues an output that depends on nothing and may overtake earlier ones. Returns its bytes.
    pub fn push_unordered(&self, out: Outbound) -> usize {
        let bytes = out.own_bytes() + out.shared_bytes(&mut std::ptr::null());
        self.lock().ready.push(out);
        bytes
    }

    /// Sends everything up to the position `released`. A call may send outputs that another thread
    /// queued. The transport runs one delivery at a time, so the order is that of the queue.
    pub fn release(&self, released: LogPosition, transport: &dyn Transport) {
        {
            let mut queue = self.lock();
            queue.released = queue.released.max(released);
            if !queue.has_ready() {
                return;
            }
        }
        let mut departures = Departures::new(self.slow.threshold());
        transport.deliver(&mut |out| {
            let left_bytes = self.lock().ready(out, &mut departures);
            if left_bytes > 0 {
                self.bytes.fetch_sub(left_bytes, Relaxed);
            }
        });
        if self.is_watched.load(Relaxed)
            && let Some((responses, left)) = departures.first()
            && let Some(watched) = &mut self.lock().times.watched
        {
            watched.sent(left.elapsed(), responses);
        }
        if let Some(traces) = self.traces.get() {
            traces.finish(std::mem::take(&mut departures.traced), Instant::now());
        }
        self.slow.note(departures);
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        // A panic cannot interrupt an update under this lock, so a poisoned queue is consistent.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The outputs of one decision, on their way into the queue.
pub struct Outputs<'a> {
    queue: MutexGuard<'a, Queue>,
    bytes: &'a AtomicUsize,
    position: LogPosition,
    owner: ConnectionId,
    /// What is measured of the response, and when the notifications were decided.
    response: Option<MeasuredResponse<'a>>,
    notified: Option<Instant>,
    /// What further notifications belong to, and how many of them may have spans.
    traced: Option<(Notifier, usize)>,
    waits: bool,
    /// The message body that was counted last: watchers share one, so it is counted once.
    shared: *const u8,
    sum: usize,
    waiting_bytes: usize,
}

impl<'a> Outputs<'a> {
    /// Measures the notifications, which were decided at this time.
    pub(super) fn measure_notifications(&mut self, decided: Instant) {
        self.notified = Some(decided);
    }

    /// Measures the response to a request from the time when its turn began.
    pub(super) fn measure_response(
        &mut self,
        incoming: &'a Incoming<'_>,
        effects: &Effects,
        begun: Instant,
        call: Call,
        trace: Option<Box<Trace>>,
    ) {
        let queue = &mut *self.queue;
        let timed = Timed::of(effects, begun, call, &mut queue.names);
        queue.key.set(effects, incoming.payload);
        if let Some(watched) = &mut queue.times.watched {
            watched.hot_keys.offer(|| key_of(effects, incoming.payload));
        }
        self.response = Some((timed, trace, &incoming.peer.client));
    }

    /// Queues the next output, for the connection `destination`.
    pub fn push(&mut self, destination: ConnectionId, out: Outbound) {
        let mut bytes = out.own_bytes() + out.shared_bytes(&mut self.shared);
        let (response, notified) = match &out {
            Outbound::Response(..) | Outbound::AcknowledgedResponse(..) => {
                (self.response.take(), None)
            }
            Outbound::Notification(peer, ..) => {
                let span = self.span_to(&peer.client);
                (None, self.notified.map(|decided| (decided, span)))
            }
            Outbound::Acknowledge(..) | Outbound::Disconnect(..) => (None, None),
        };
        if let Some((_, Some(trace), _)) = &response {
            // Earlier notifications are about earlier changes.
            self.traced = Some((trace.notifier(), limits::TRACED_NOTIFICATIONS_MAX));
            bytes += size_of::<Trace>();
        }
        if let Some((_, Some(_))) = &notified {
            bytes += size_of::<TracedNotification>();
        }
        self.sum += bytes;
        let queue = &mut *self.queue;
        self.waits |= queue.destinations.contains_key(&destination);
        if !self.waits {
            if let Some((timed, trace, client)) = response {
                let responses = &mut queue.ready_responses;
                responses.add(timed, &queue.key, trace, client);
            }
            queue.ready_notifications.extend(notified);
            queue.ready.push(out);
            return;
        }
        let measured = match (response, notified) {
            (Some((timed, trace, client)), _) => {
                let responses = &mut queue.waiting_responses;
                responses.add(timed, &queue.key, trace, client);
                Measured::Response
            }
            (None, Some(notified)) => Measured::Notification(notified),
            (None, None) => Measured::No,
        };
        // It must not overtake an output to the same connection, or of the same decision.
        let last = queue.waiting.back();
        queue.waiting.push_back(Waiting {
            position: last.map_or(self.position, |last| self.position.max(last.position)),
            destination,
            owner: self.owner,
            bytes,
            measured,
            out,
        });
        self.waiting_bytes += bytes;
        *queue.destinations.entry(destination).or_default() += 1;
    }

    /// The span of a notification to a client, if it has one.
    fn span_to(&mut self, client: &Arc<str>) -> Option<Box<TracedNotification>> {
        let (notifier, left) = self.traced.as_mut()?;
        *left = left.checked_sub(1)?;
        Some(notifier.notification(client))
    }

    /// Ends the decision. Returns the bytes of its outputs.
    pub fn end(mut self) -> usize {
        if self.waiting_bytes > 0 {
            *self.queue.caused.entry(self.owner).or_default() += self.waiting_bytes;
            self.bytes.fetch_add(self.waiting_bytes, Relaxed);
        }
        self.sum
    }
}

impl Queue {
    fn has_ready(&self) -> bool {
        let first = self.waiting.front();
        !self.ready.is_empty() || first.is_some_and(|first| first.position <= self.released)
    }

    /// Moves outputs that may leave to an empty list. Returns the bytes that waited. If there are
    /// none, takes the allocation of the list for the next outputs.
    fn ready(&mut self, out: &mut Vec<Outbound>, departures: &mut Departures) -> usize {
        if !self.has_ready() {
            if self.ready.capacity() == 0 && out.capacity() <= limits::SPARE_OUTPUTS_MAX {
                std::mem::swap(&mut self.ready, out);
            }
            return 0;
        }
        std::mem::swap(&mut self.ready, out);
        let mut bytes = 0;
        // One reading of the clock for all.
        let now = Instant::now();
        for (decided, span) in self.ready_notifications.drain(..) {
            self.times.notification(decided, now);
            departures.notified(span, now);
        }
        let (times, names) = (&mut self.times, &self.names);
        while self.ready_responses.next(|next| {
            let took = times.response(next.timed, now);
            departures.left(next, took, names, now);
        }) {}
        while let Some(next) = self
            .waiting
            .pop_front_if(|next| next.position <= self.released)
        {
            subtract(&mut self.destinations, next.destination, 1);
            subtract(&mut self.caused, next.owner, next.bytes);
            bytes += next.bytes;
            match next.measured {
                Measured::Notification((decided, span)) => {
                    times.notification(decided, now);
                    departures.notified(span, now);
                }
                Measured::Response => {
                    self.waiting_responses.next(|next| {
                        let took = times.response(next.timed, now);
                        departures.left(next, took, names, now);
                    });
                }
                Measured::No => {}
            }
            out.push(next.out);
        }
        bytes
    }
}

/// Subtracts from a count, and removes the count at zero.
fn subtract(counts: &mut FxHashMap<ConnectionId, usize>, connection: ConnectionId, by: usize) {
    if let Some(count) = counts.get_mut(&connection) {
        *count -= by;
        if *count == 0 {
            counts.remove(&connection);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use bytes::Bytes;
    use statehouse_core::store::Peer;
    use statehouse_mqtt::{Message, QoS, ReasonCode};

    /// Records what it is asked to send.
    #[derive(Default)]
    struct Recording(Mutex<Vec<u64>>);

    impl Transport for Recording {
        fn deliver(&self, ready: &mut dyn FnMut(&mut Vec<Outbound>)) {
            let mut out = Vec::new();
            loop {
                ready(&mut out);
                if out.is_empty() {
                    break;
                }
                let mut notes = self.0.lock().unwrap();
                notes.extend(out.drain(..).map(|out| match out {
                    Outbound::Disconnect(peer, ..) => peer.connection.0,
                    _ => panic!("this test queues nothing else"),
                }));
            }
        }
    }

    impl ResponseGate {
        fn push(
            &self,
            position: LogPosition,
            owner: ConnectionId,
            out: impl IntoIterator<Item = (ConnectionId, Outbound)>,
        ) -> usize {
            let mut outputs = self.begin(position, owner);
            for (destination, out) in out {
                outputs.push(destination, out);
            }
            outputs.end()
        }

        /// Disconnects these connections by one decision.
        fn kick(&self, position: u64, connections: &[u64]) {
            let kicks = connections.iter().map(|it| (ConnectionId(*it), kick(*it)));
            self.push(LogPosition(position), ConnectionId(9), kicks);
        }
    }

    fn kick(connection: u64) -> Outbound {
        let peer = Peer::numbered("c", connection);
        Outbound::Disconnect(peer, ReasonCode::ADMINISTRATIVE_ACTION, "")
    }

    #[test]
    fn nothing_leaves_before_its_position_is_durable() {
        let (gate, recording) = (ResponseGate::default(), Recording::default());
        gate.kick(1, &[10, 11]);
        gate.kick(2, &[20]);
        gate.kick(3, &[30]);
        gate.release(LogPosition(0), &recording);
        assert!(recording.0.lock().unwrap().is_empty());
        gate.release(LogPosition(2), &recording);
        assert_eq!(*recording.0.lock().unwrap(), [10, 11, 20]);
        // A lower position that arrives late changes nothing.
        gate.release(LogPosition(1), &recording);
        assert_eq!(*recording.0.lock().unwrap(), [10, 11, 20]);
        gate.release(LogPosition(3), &recording);
        assert_eq!(*recording.0.lock().unwrap(), [10, 11, 20, 30]);
    }

    #[test]
    fn accounted_overhead_covers_the_places_in_the_queue() {
        let places = size_of::<Waiting>() + size_of::<Timed>();
        assert!(places <= limits::UNRELEASED_OVERHEAD_BYTES, "{places}");
    }

    #[test]
    fn more_is_measured_only_while_an_operator_watches() {
        let gate = ResponseGate::default();
        assert!(gate.observed(0.0).is_none());
        gate.watch(true);
        let notify = |gate: &ResponseGate| {
            let now = Instant::now();
            let decided = now.checked_sub(Duration::from_secs(1)).unwrap();
            gate.lock().times.notification(decided, now);
        };
        notify(&gate);
        let longest = |gate: &ResponseGate| gate.observed(0.0).map(|it| it.longest.notification);
        assert_eq!(longest(&gate), Some(Duration::from_secs(1)));
        assert_eq!(longest(&gate), Some(Duration::ZERO), "since the last look");
        notify(&gate);
        // A second operator changes nothing.
        gate.watch(true);
        assert_eq!(longest(&gate), Some(Duration::from_secs(1)));
        gate.watch(false);
        notify(&gate);
        assert!(gate.observed(0.0).is_none());
        assert_eq!(gate.lock().times.notifications().count(), 3);
    }

    #[test]
    fn unordered_output_does_not_wait() {
        let (gate, recording) = (ResponseGate::default(), Recording::default());
        gate.kick(5, &[1]);
        gate.push_unordered(kick(1));
        gate.release(LogPosition(4), &recording);
        assert_eq!(*recording.0.lock().unwrap(), [1]);
        assert_eq!(gate.lock().waiting.len(), 1);
    }

    #[test]
    fn outputs_of_one_decision_keep_their_order() {
        let (gate, recording) = (ResponseGate::default(), Recording::default());
        gate.kick(5, &[1]);
        // The second waits behind an output to the same connection, and the third behind the
        // second.
        gate.kick(0, &[2, 1, 3]);
        gate.release(LogPosition(4), &recording);
        assert_eq!(*recording.0.lock().unwrap(), [2]);
        gate.release(LogPosition(5), &recording);
        assert_eq!(*recording.0.lock().unwrap(), [2, 1, 1, 3]);
    }

    #[test]
    fn independent_output_waits_only_behind_its_connection() {
        let (gate, recording) = (ResponseGate::default(), Recording::default());
        let seen = || std::mem::take(&mut *recording.0.lock().unwrap());
        gate.kick(5, &[1]);
        // Another client's read of something durable overtakes the write.
        gate.kick(0, &[2]);
        // The writer's own read does not.
        gate.kick(0, &[1]);
        gate.kick(6, &[2]);
        gate.kick(3, &[2]);
        gate.release(LogPosition(4), &recording);
        assert_eq!(seen(), [2]);
        gate.kick(4, &[1]);
        gate.release(LogPosition(5), &recording);
        assert_eq!(seen(), [1, 1]);
        gate.kick(5, &[3]);
        gate.release(LogPosition(6), &recording);
        assert_eq!(seen(), [3, 2, 2, 1]);
        // Nothing is left.
        gate.kick(6, &[1]);
        gate.release(LogPosition(6), &recording);
        assert_eq!(seen(), [1]);
        let queue = gate.lock();
        assert!(queue.destinations.is_empty() && queue.caused.is_empty());
        assert_eq!(gate.bytes.load(Relaxed), 0);
    }

    #[test]
    fn waiting_outputs_count_for_the_connection_that_caused_them() {
        let gate = ResponseGate::default();
        let topic = vec![b't'; 1000];
        let notify = |connection, payload: &Bytes| {
            let message = Message::new(topic.clone(), payload.clone(), QoS::AtLeastOnce);
            let peer = Peer::numbered("c", connection);
            let destination = peer.connection;
            (destination, Outbound::Notification(peer, message, None))
        };
        let payload = Bytes::from(vec![b'p'; 1 << 20]);
        let all = u64::MAX;
        // A thousand watchers share the payload, and each has its own topic.
        let notify_watchers = || {
            let notifications = (0..1000).map(|it| notify(it, &payload));
            gate.push(LogPosition(1), ConnectionId(7), notifications)
        };
        let bytes = notify_watchers();
        assert!((2 << 20..3 << 20).contains(&bytes), "{bytes}");
        assert!(gate.has_room(ConnectionId(7), all));
        for _ in 0..3 {
            notify_watchers();
        }
        assert!(!gate.has_room(ConnectionId(7), all), "beyond its own limit");
        assert!(gate.has_room(ConnectionId(8), all));
        gate.push(LogPosition(2), ConnectionId(8), [notify(1, &payload)]);
        assert!(gate.has_room(ConnectionId(8), all));
        assert!(
            !gate.has_room(ConnectionId(8), 1 << 20),
            "beyond the limit of all"
        );
        assert!(
            gate.has_room(ConnectionId(9), 1 << 20),
            "a connection that caused nothing continues"
        );
        // The recording accepts only kicks.
        gate.lock().released = LogPosition(2);
        let mut out = Vec::new();
        let mut departures = Departures::new(gate.slow.threshold());
        let left = gate.lock().ready(&mut out, &mut departures);
        assert_eq!((out.len(), left), (4001, gate.bytes.load(Relaxed)));
    }
}
