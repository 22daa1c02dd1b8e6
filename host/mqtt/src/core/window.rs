//! The send path of a session: its queue, its send window, redeliveries, and the acknowledgements
//! that are sent with them (sections 4.3, 4.4, 4.6, 4.9).

use std::{mem, time::Instant};

use bytes::BytesMut;
use statehouse_protocol::ConnectionId;

use super::{Core, session_at};
use crate::{
    Limits, Message, ProtocolVersion, QoS, ReasonCode, Stats,
    barrier::Barrier,
    codec::{self, Ack, Delivery, Violation, packet_type as kind},
    exchanges::Known,
    limits::QUEUE_PARTS_FOR_ANSWERS,
    link::Link,
    persist::{ChangeLog, SessionLog},
    router::SessionKey,
    session::{Sending, Session},
    session_queue::{Queued, Scope, SessionQueue},
};

/// A PUBREL without properties (section 3.6).
const PUBREL_BYTES: usize = 4;

/// See [`Core::relief`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Relief {
    /// Something else than an acknowledgement of the client can make room.
    Wait,
    Handle,
    Refuse,
}

impl Core {
    /// Sends the acknowledgements that may leave now. The others leave with the queue.
    pub(super) fn flush_acks(&mut self, key: SessionKey) {
        let Some(mut sending) = self.sending(key) else {
            return;
        };
        if sending.flush_acks() {
            let output = sending.link.output.clone();
            self.wakes.push(output);
        }
    }

    /// Whether the client's queue has room for the answers to another PUBLISH. The broker stops
    /// reading from a client that sends faster than it reads.
    pub(crate) fn has_room_for_answers(&self, key: SessionKey) -> bool {
        let Some(session) = self.peek(key) else {
            return true;
        };
        let own = session.queue.bytes();
        let limits = &self.limits;
        own <= limits.queue_bytes_reserve
            || own <= limits.queue_bytes_max / QUEUE_PARTS_FOR_ANSWERS
                && session.queue.total_bytes() <= limits.queue_bytes_total_max / 4 * 3
    }

    /// What to do with the first PUBLISH that waits for room for its answers, if the packets behind
    /// it cannot be read otherwise. A quarter of the queue stays for messages of other clients.
    pub(crate) fn relief(&self, key: SessionKey, bytes: usize) -> Relief {
        let session = self.peek(key);
        let Some((session, link)) = session.and_then(|it| Some((it, it.link.as_ref()?))) else {
            return Relief::Wait;
        };
        let queue = &session.queue;
        // Otherwise the queue shrinks when the client reads.
        let needs_acks =
            link.output.is_idle() && (queue.is_queue_empty() || waits_for_client(link, queue));
        if self.has_room_for_answers(key) || !needs_acks {
            return Relief::Wait;
        }
        let limits = &self.limits;
        let own = queue.bytes() + bytes;
        let own_max = limits.queue_bytes_max.min(limits.queue_bytes_total_max) / 4 * 3;
        let total = queue.total_bytes() + bytes;
        if own <= limits.queue_bytes_reserve {
            Relief::Handle
        } else if own > own_max {
            Relief::Refuse
        } else if total <= limits.queue_bytes_total_max / 4 * 3 {
            Relief::Handle
        } else {
            Relief::Wait
        }
    }

    /// Whether the client may begin another PUBLISH. A client of MQTT 3.1.1 does not know the
    /// Receive Maximum, so its PUBLISHes wait while so many of them have no acknowledgement.
    pub(crate) fn has_room_for_publish(&self, key: SessionKey) -> bool {
        let must_wait = self.peek(key).is_some_and(Session::must_wait_to_publish);
        self.has_room_for_answers(key) && !must_wait
    }

    /// Whether a QoS 2 PUBLISH of this connection's client was answered and has no PUBREL yet.
    pub(crate) fn has_answered(
        &mut self,
        key: SessionKey,
        connection: ConnectionId,
        packet_id: u16,
    ) -> bool {
        let known = self
            .linked(key, connection)
            .map(|it| it.exchange(packet_id));
        matches!(known, Some(Known::Answered(_)))
    }

    /// Sends the PUBREC of an answered QoS 2 PUBLISH again.
    pub(crate) fn answer_again(&mut self, key: SessionKey, packet_id: u16) {
        let known = self.session(key).map(|it| it.exchange(packet_id));
        if let Some(Known::Answered(reason)) = known {
            self.send_when_durable(key, |out, version| {
                codec::short_ack(out, version, kind::PUBREC, packet_id, reason);
            });
        }
    }

    /// Puts a message into a session's queue and sends as much as possible. If the queue is full,
    /// the new message is dropped: a disconnected client misses it, and a connected client is
    /// disconnected because it does not read.
    ///
    /// While the log has no room, a connected client of a durable session is sent a QoS 1 message
    /// unrecorded. QoS 2 needs records of its packet ids. The caller asks the log, once for all
    /// receivers of a message.
    pub(super) fn enqueue(
        &mut self,
        key: SessionKey,
        mut queued: Queued,
        log_has_room: bool,
        now: Instant,
    ) {
        let Some(session) = session_at(&mut self.sessions, key) else {
            return;
        };
        let present = session.is_present();
        // Answers to the client itself and messages for this connection only need not be in the
        // log.
        let kept = session.is_durable() && queued.message.qos > QoS::AtMostOnce;
        let is_unrecorded = kept && queued.scope == Scope::Session && !log_has_room;
        if is_unrecorded {
            queued.scope = Scope::Connection;
        }
        let is_exactly_once = queued.message.qos == QoS::ExactlyOnce;
        if !present && queued.scope == Scope::Connection || is_unrecorded && is_exactly_once {
            self.counts.dropped += 1;
            return;
        }
        let has_room = make_room(
            session,
            queued.scope,
            queued.cost_bytes(),
            &self.limits,
            &mut self.change_log,
            &mut self.counts,
            now,
        );
        if has_room {
            let is_answer = queued.scope == Scope::Answer;
            let mut log = session.log(&mut self.change_log);
            session.queue.push(queued, &mut log);
            match present {
                true => self.pump(key, now),
                // The message may expire before the client returns.
                false => self.schedule(key),
            }
            if is_answer && let Some(mut sending) = self.sending(key) {
                let log = &mut sending.log;
                sending.queue.record_waiting_answer(log_has_room, log);
            }
            return;
        }
        if !present && !mem::replace(&mut session.drop_logged, true) {
            tracing::warn!(
                client = &*session.client,
                "the queue of a disconnected client is full; dropping its new messages"
            );
        }
        self.counts.dropped += 1;
        if present {
            let text = "the message queue of this client is full";
            self.close(key, ReasonCode::QUOTA_EXCEEDED, Some(text));
        }
    }

    /// Sends redeliveries first, then the queue, then the acknowledgements that waited for these
    /// messages. Stops at the client's Receive Maximum or at the output's high-water mark.
    pub(crate) fn pump(&mut self, key: SessionKey, now: Instant) {
        let Some(mut sending) = self.sending(key) else {
            return;
        };
        let mut tally = Tally::default();
        sending.repeat(&mut tally, now);
        if sending.link.resend.is_empty() {
            sending.send(&mut tally, now);
        }
        tally.wake |= sending.flush_acks();
        let output = tally.wake.then(|| sending.link.output.clone());
        self.wakes.extend(output);
        self.counts.messages_out += tally.sent;
        self.counts.dropped += tally.dropped;
    }

    /// Handles a PUBACK, PUBREC or PUBCOMP of a client.
    pub(crate) fn acknowledged(
        &mut self,
        key: SessionKey,
        connection: ConnectionId,
        packet_type: u8,
        ack: Ack,
        now: Instant,
    ) -> Result<(), Violation> {
        if !self.is_open(key, connection) {
            return Ok(());
        }
        let Some(Sending {
            link,
            queue,
            mut log,
            ..
        }) = self.sending(key)
        else {
            return Ok(());
        };
        let mut rel = None;
        // The packet type that must follow: it depends on the QoS of our PUBLISH, or on our PUBREL.
        let expected = queue
            .in_flight(ack.packet_id)
            .map(|entry| match &entry.queued {
                Some(queued) if queued.message.qos == QoS::AtLeastOnce => kind::PUBACK,
                Some(_) => kind::PUBREC,
                None => kind::PUBCOMP,
            });
        match (packet_type, expected) {
            (kind::PUBREC, Some(kind::PUBREC)) if !ack.reason.is_error() => {
                queue.release(ack.packet_id, &mut log);
                rel = Some(ReasonCode::SUCCESS);
            }
            (kind::PUBREC, Some(kind::PUBCOMP)) => rel = Some(ReasonCode::SUCCESS),
            (kind::PUBREC, None) => rel = Some(ReasonCode::PACKET_IDENTIFIER_NOT_FOUND),
            // Late, or from before a takeover.
            (_, None) => {}
            (got, Some(expected)) if got == expected => {
                let entry = queue.complete(ack.packet_id, &mut log);
                if entry.is_some_and(|entry| entry.connection == link.connection) {
                    link.unacknowledged -= 1;
                }
            }
            _ => {
                return Err(Violation::protocol(
                    "the acknowledgement does not match the QoS of its message",
                ));
            }
        }
        if let Some(reason) = rel {
            self.send_when_durable(key, |out, version| {
                codec::short_ack(out, version, kind::PUBREL, ack.packet_id, reason);
            });
        } else if !queue.is_queue_empty() || !link.resend.is_empty() {
            self.pump(key, now);
        }
        Ok(())
    }

    /// Handles a PUBREL of a client, which ends its QoS 2 exchange.
    pub(crate) fn released(&mut self, key: SessionKey, connection: ConnectionId, packet_id: u16) {
        if !self.is_open(key, connection) {
            return;
        }
        let known = session_at(&mut self.sessions, key)
            .is_some_and(|session| session.release_received(packet_id, &mut self.change_log));
        let reason = if known {
            ReasonCode::SUCCESS
        } else {
            ReasonCode::PACKET_IDENTIFIER_NOT_FOUND
        };
        self.send_when_durable(key, |out, version| {
            codec::short_ack(out, version, kind::PUBCOMP, packet_id, reason);
        });
    }

    /// Handles a PINGREQ of a client.
    pub(crate) fn ping(&mut self, key: SessionKey, connection: ConnectionId) {
        if self.is_open(key, connection) {
            self.put(key, Barrier::NONE, |out, _| codec::pingresp(out));
        }
    }

    /// Sends a packet after all changes recorded so far are durable, if the session is.
    pub(super) fn send_when_durable(
        &mut self,
        key: SessionKey,
        encode: impl FnOnce(&mut BytesMut, ProtocolVersion),
    ) {
        let barrier = self.sending(key).map_or(Barrier::NONE, |sending| {
            sending.log.barrier_for_all_changes()
        });
        self.put(key, barrier, encode);
    }

    fn put(
        &mut self,
        key: SessionKey,
        barrier: Barrier,
        encode: impl FnOnce(&mut BytesMut, ProtocolVersion),
    ) {
        let Some(Sending { link, log, .. }) = self.sending(key) else {
            return;
        };
        let (version, bytes_max) = (link.version, link.packet_bytes_max);
        let encode = |out: &mut BytesMut| {
            let before = out.len();
            encode(out, version);
            // The sizes of SUBACK and UNSUBACK were checked before their filters took effect. All
            // other packets are smaller than the CONNACK, which had room.
            debug_assert!(out.len() - before <= bytes_max, "[MQTT-3.1.2-24]");
        };
        if log.change_log.put(&link.output, barrier, encode) {
            let output = link.output.clone();
            self.wakes.push(output);
        }
    }
}

impl Sending<'_> {
    /// Redelivers the messages that the client did not acknowledge on an earlier connection
    /// (section 4.4). They need no barrier: they were recorded before the CONNACK and are behind it
    /// in the output. Only a PUBREL may follow a later change.
    fn repeat(&mut self, tally: &mut Tally, now: Instant) {
        let Self {
            link, queue, log, ..
        } = self;
        let version = link.version;
        while let Some(&packet_id) = link.resend.front() {
            let Some(entry) = queue.in_flight(packet_id) else {
                link.resend.pop_front();
                continue;
            };
            match &entry.queued {
                None => {
                    let rel = |out: &mut _| {
                        let reason = ReasonCode::SUCCESS;
                        codec::short_ack(out, version, kind::PUBREL, packet_id, reason);
                    };
                    let barrier = log.barrier_for_all_changes();
                    match log
                        .change_log
                        .offer(&link.output, barrier, PUBREL_BYTES, rel)
                    {
                        Some(wake) => tally.wake |= wake,
                        None => return,
                    }
                }
                Some(_) if link.unacknowledged >= link.window => return,
                Some(queued) => {
                    let is_exactly_once = queued.message.qos == QoS::ExactlyOnce;
                    match tally.send(link, queued, (packet_id, true, Barrier::NONE), now, log) {
                        Sent::Yes => {
                            entry.connection = link.connection;
                            link.unacknowledged += 1;
                        }
                        // The client may remember the packet id, so the exchange is completed
                        // without the message: the next pass of this loop sends its PUBREL.
                        Sent::TooLarge if is_exactly_once => {
                            queue.release(packet_id, log);
                            continue;
                        }
                        Sent::TooLarge => _ = queue.complete(packet_id, log),
                        Sent::NoRoom => return,
                    }
                }
            }
            link.resend.pop_front();
        }
    }

    /// Sends messages from the queue.
    fn send(&mut self, tally: &mut Tally, now: Instant) {
        let Self {
            link, queue, log, ..
        } = self;
        while let Some(queued) = queue.front() {
            if queued.message.is_expired(now) {
                tally.dropped += 1;
                queue.pop(log);
                continue;
            }
            let at_most_once = queued.message.qos == QoS::AtMostOnce;
            let packet_id = if at_most_once {
                0
            } else if link.unacknowledged >= link.window {
                return;
            } else if let Some(packet_id) = queue.next_packet_id() {
                packet_id
            } else {
                return;
            };
            let barrier = match queued.message.qos {
                // The packet id is recorded below, in the current batch.
                QoS::ExactlyOnce => log.barrier_for_this_batch(),
                _ => Barrier::NONE,
            };
            match tally.send(link, queued, (packet_id, false, barrier), now, log) {
                Sent::Yes if at_most_once => queue.pop(log),
                Sent::Yes => {
                    queue.sent(packet_id, link.connection, log);
                    link.unacknowledged += 1;
                }
                Sent::TooLarge => queue.pop(log),
                Sent::NoRoom => return,
            }
        }
    }

    /// Sends the acknowledgements that may leave now. They wait for messages queued before them. If
    /// these wait for acknowledgements of the client, only those that a crash would lose hold them
    /// back. Returns true if the writer must be woken.
    fn flush_acks(&mut self) -> bool {
        // A client of MQTT 3.1.1 has no answers, so it does not wait for its own acknowledgements.
        let first_waiting = match waits_for_client(self.link, self.queue) {
            true => self.queue.first_unrecorded_answer(),
            false => self.queue.front_number(),
        };
        self.link
            .send_acks(first_waiting, self.exchanges, &mut self.log)
    }
}

/// Whether a session may queue `cost_bytes` more. A full queue is searched for expired messages
/// from time to time, so that they do not keep out new ones.
pub(super) fn make_room(
    session: &mut Session,
    scope: Scope,
    cost_bytes: usize,
    limits: &Limits,
    change_log: &mut ChangeLog,
    counts: &mut Stats,
    now: Instant,
) -> bool {
    // Every owner may hold at least as much as one client may.
    let floor = match scope {
        // The client had room when the broker accepted its request. Since then only answers to
        // requests accepted together with it were added.
        Scope::Answer => limits.queue_bytes_max.saturating_mul(2),
        Scope::Session | Scope::Connection => limits.queue_bytes_max,
    };
    let bytes_max = match scope {
        // The value in the answer may be older than a lowered limit. The total limits it.
        Scope::Answer if session.queue.bytes() <= limits.queue_bytes_max => usize::MAX,
        _ => floor,
    };
    // Disconnected clients may use half of the total, so that their backlog cannot block a
    // connected client that keeps up.
    let total_max = match session.is_present() {
        false => limits.queue_bytes_total_max / 2,
        true if session.queue.bytes() + cost_bytes <= limits.queue_bytes_reserve => usize::MAX,
        true => limits.queue_bytes_total_max,
    };
    let has_room = (session.queue).has_room(cost_bytes, bytes_max, total_max, floor);
    if has_room || !session.may_search(now) {
        return has_room;
    }
    counts.dropped += session.drop_expired(now, change_log) as u64;
    (session.queue).has_room(cost_bytes, bytes_max, total_max, floor)
}

/// Whether the next message waits for acknowledgements of the client.
fn waits_for_client(link: &Link, queue: &SessionQueue) -> bool {
    !link.resend.is_empty() || queue.front_needs_window() && link.unacknowledged >= link.window
}

/// Counts of one send pass.
#[derive(Debug, Default)]
struct Tally {
    wake: bool,
    sent: u64,
    dropped: u64,
}

#[derive(Debug, PartialEq, Eq)]
enum Sent {
    Yes,
    /// The packet exceeds the client's Maximum Packet Size and is discarded as if it had been sent
    /// (section 3.1.2.11.4).
    TooLarge,
    NoRoom,
}

impl Tally {
    fn send(
        &mut self,
        link: &Link,
        queued: &Queued,
        (packet_id, dup, barrier): (u16, bool, Barrier),
        now: Instant,
        log: &mut SessionLog<'_>,
    ) -> Sent {
        let message = &queued.message;
        let delivery = Delivery {
            qos: message.qos,
            dup,
            retain: message.retain,
            packet_id,
            subscription_ids: &queued.subscription_ids,
            expiry_s: remaining_s(message, now),
        };
        let packet_bytes = codec::publish_bytes(link.version, message, &delivery);
        if packet_bytes > link.packet_bytes_max {
            self.dropped += 1;
            return Sent::TooLarge;
        }
        let encode = |out: &mut _| codec::publish(out, link.version, message, &delivery);
        match log
            .change_log
            .offer(&link.output, barrier, packet_bytes, encode)
        {
            None => Sent::NoRoom,
            Some(wake) => {
                self.wake |= wake;
                self.sent += 1;
                Sent::Yes
            }
        }
    }
}

/// The rest of a Message Expiry Interval. Rounded up, so that a message that did not wait keeps its
/// original interval.
pub(super) fn remaining_s(message: &Message, now: Instant) -> Option<u32> {
    let remaining = message.expires?.saturating_duration_since(now);
    Some(u32::try_from(remaining.as_millis().div_ceil(1000)).unwrap_or(u32::MAX))
}
