//! What a session has to send: its queue, its window, repetitions, and the acknowledgements that go with them (sections
//! 4.3, 4.4, 4.6, 4.9).

use std::{mem, time::Instant};

use bytes::BytesMut;

use super::{Core, Counts, session_at};
use crate::{
    Limits, Message, QoS, ReasonCode,
    codec::{self, Ack, Delivery, Violation, packet_type as kind},
    gate::BatchNumber,
    limits::{EXPIRED_SEARCH_PERIOD, QUEUE_PARTS_FOR_ANSWERS},
    link::Link,
    outbox::{Outbox, Queued, Scope},
    persist::{Recorder, Tape},
    router::SessionKey,
    session::{Sending, Session},
};

/// A PUBREL without properties (section 3.6).
const PUBREL_BYTES: usize = 4;

impl Core {
    /// Sends what acknowledgements may leave now; the others leave with the queue.
    pub(super) fn flush_acks(&mut self, key: SessionKey) {
        let Some(mut sending) = self.sending(key) else {
            return;
        };
        if sending.flush_acks() {
            let output = sending.link.output.clone();
            self.wakes.push(output);
        }
    }

    /// Whether another PUBLISH of the client may be decided: what waits for the client, and for its acknowledgement, leaves
    /// room for the answers. A client that sends faster than it reads is not read from until it does.
    pub(crate) fn has_room_for_answers(&self, key: SessionKey) -> bool {
        let Some(session) = self.sessions.get(key as usize).and_then(Option::as_deref) else {
            return true;
        };
        let own = session.outbox.bytes();
        let limits = &self.limits;
        own <= limits.queue_bytes_reserve
            || own <= limits.queue_bytes_max / QUEUE_PARTS_FOR_ANSWERS
                && session.outbox.total_bytes() <= limits.queue_bytes_total_max / 4 * 3
    }

    /// Puts a message into a session's queue and sends what can be sent. Over the bound the newest is lost: an absent
    /// client is missed by it, a present one does not read and is disconnected.
    pub(super) fn enqueue(&mut self, key: SessionKey, queued: Queued, now: Instant) {
        let Some(session) = session_at(&mut self.sessions, key) else {
            return;
        };
        let present = session.is_present();
        if !present && queued.scope == Scope::Connection {
            self.counts.dropped += 1;
            return;
        }
        // Answers to the client itself and what ends with its connection need not be in the log.
        let kept = session.is_durable() && queued.message.qos > QoS::AtMostOnce;
        if kept && queued.scope == Scope::Session && !self.recorder.has_room() {
            self.counts.dropped += 1;
            return;
        }
        let has_room = make_room(
            session,
            queued.scope,
            queued.cost_bytes(),
            &self.limits,
            &mut self.recorder,
            &mut self.counts,
            now,
        );
        if has_room {
            let is_answer = queued.scope == Scope::Answer;
            let mut tape = session.tape(&mut self.recorder);
            session.outbox.push(queued, &mut tape);
            if present {
                self.pump(key, now);
            }
            if is_answer
                && self.recorder.has_room()
                && let Some(mut sending) = self.sending(key)
            {
                sending.outbox.record_waiting_answer(&mut sending.tape);
            }
            return;
        }
        if !present && !mem::replace(&mut session.drop_logged, true) {
            tracing::warn!(client = %session.client.escape_debug(), "the queue of an absent client is full: messages are lost");
        }
        self.counts.dropped += 1;
        if present {
            self.close(
                key,
                ReasonCode::QUOTA_EXCEEDED,
                Some("too many messages wait for this client"),
            );
        }
    }

    /// Sends what a session has to send: repetitions first, then its queue, then acknowledgements that waited for these.
    /// Ends at the client's Receive Maximum or at the output's high-water mark.
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

    /// PUBACK, PUBREC or PUBCOMP of a client.
    pub(crate) fn acknowledged(
        &mut self,
        key: SessionKey,
        connection: u64,
        packet_type: u8,
        ack: Ack,
        now: Instant,
    ) -> Result<(), Violation> {
        if !self.is_open(key, connection) {
            return Ok(());
        }
        let Some(Sending {
            link,
            outbox,
            mut tape,
            ..
        }) = self.sending(key)
        else {
            return Ok(());
        };
        let mut rel = None;
        // What the client may answer: its PUBLISH by QoS, or our PUBREL.
        let expected = outbox
            .in_flight(ack.packet_id)
            .map(|entry| match &entry.queued {
                Some(queued) if queued.message.qos == QoS::AtLeastOnce => kind::PUBACK,
                Some(_) => kind::PUBREC,
                None => kind::PUBCOMP,
            });
        match (packet_type, expected) {
            (kind::PUBREC, Some(kind::PUBREC)) if !ack.reason.is_error() => {
                outbox.release(ack.packet_id, &mut tape);
                rel = Some(ReasonCode::SUCCESS);
            }
            (kind::PUBREC, Some(kind::PUBCOMP)) => rel = Some(ReasonCode::SUCCESS),
            (kind::PUBREC, None) => rel = Some(ReasonCode::PACKET_IDENTIFIER_NOT_FOUND),
            // Late, or from before a takeover.
            (_, None) => {}
            (got, Some(expected)) if got == expected => {
                let entry = outbox.complete(ack.packet_id, &mut tape);
                if entry.is_some_and(|entry| entry.connection == link.connection) {
                    link.unacknowledged -= 1;
                }
            }
            _ => {
                return Err(Violation::protocol(
                    "an acknowledgement does not fit the QoS of its message",
                ));
            }
        }
        if let Some(reason) = rel {
            self.tell(key, |out| {
                codec::ack(out, kind::PUBREL, ack.packet_id, reason, None, usize::MAX);
            });
        } else if !outbox.is_queue_empty() || !link.resend.is_empty() {
            self.pump(key, now);
        }
        Ok(())
    }

    /// PUBREL of a client: its QoS 2 exchange is over.
    pub(crate) fn released(&mut self, key: SessionKey, connection: u64, packet_id: u16) {
        if !self.is_open(key, connection) {
            return;
        }
        let known = session_at(&mut self.sessions, key)
            .is_some_and(|session| session.release_received(packet_id, &mut self.recorder));
        let reason = if known {
            ReasonCode::SUCCESS
        } else {
            ReasonCode::PACKET_IDENTIFIER_NOT_FOUND
        };
        self.tell(key, |out| {
            codec::ack(out, kind::PUBCOMP, packet_id, reason, None, usize::MAX)
        });
    }

    /// PINGREQ of a client.
    pub(crate) fn ping(&mut self, key: SessionKey, connection: u64) {
        if self.is_open(key, connection) {
            self.put(key, 0, codec::pingresp);
        }
    }

    /// A packet that tells of what was recorded for this session.
    pub(super) fn tell(&mut self, key: SessionKey, encode: impl FnOnce(&mut BytesMut)) {
        let told = self.sending(key).map_or(0, |sending| sending.tape.latest());
        self.put(key, told, encode);
    }

    fn put(&mut self, key: SessionKey, told: BatchNumber, encode: impl FnOnce(&mut BytesMut)) {
        let Some(Sending { link, mut tape, .. }) = self.sending(key) else {
            return;
        };
        let bytes_max = link.packet_bytes_max;
        let encode = |out: &mut BytesMut| {
            let before = out.len();
            encode(out);
            // As if it had been sent [MQTT-3.1.2-24]; such as a SUBACK for many filters.
            if out.len() - before > bytes_max {
                out.truncate(before);
            }
        };
        if tape.put(&link.output, told, encode) {
            let output = link.output.clone();
            self.wakes.push(output);
        }
    }
}

impl Sending<'_> {
    /// Sends again what the client did not acknowledge over an earlier connection (section 4.4). It was recorded before the
    /// CONNACK, and stands behind it.
    fn repeat(&mut self, tally: &mut Tally, now: Instant) {
        let Self {
            link, outbox, tape, ..
        } = self;
        while let Some(&packet_id) = link.resend.front() {
            let Some(entry) = outbox.in_flight(packet_id) else {
                link.resend.pop_front();
                continue;
            };
            match &entry.queued {
                None => {
                    let rel = |out: &mut _| {
                        codec::ack(
                            out,
                            kind::PUBREL,
                            packet_id,
                            ReasonCode::SUCCESS,
                            None,
                            usize::MAX,
                        );
                    };
                    let Some(wake) = tape.offer(&link.output, 0, PUBREL_BYTES, rel) else {
                        return;
                    };
                    tally.wake |= wake;
                }
                Some(_) if link.unacknowledged >= link.window => return,
                Some(queued) => match tally.send(link, queued, (packet_id, true, 0), now, tape) {
                    Sent::Yes => {
                        entry.connection = link.connection;
                        link.unacknowledged += 1;
                    }
                    Sent::TooLarge => _ = outbox.complete(packet_id, tape),
                    Sent::NoRoom => return,
                },
            }
            link.resend.pop_front();
        }
    }

    /// Sends from the queue.
    fn send(&mut self, tally: &mut Tally, now: Instant) {
        let Self {
            link, outbox, tape, ..
        } = self;
        while let Some(queued) = outbox.front() {
            if queued.message.is_expired(now) {
                tally.dropped += 1;
                outbox.pop(tape);
                continue;
            }
            let at_most_once = queued.message.qos == QoS::AtMostOnce;
            let packet_id = if at_most_once {
                0
            } else if link.unacknowledged >= link.window {
                return;
            } else if let Some(packet_id) = outbox.next_packet_id() {
                packet_id
            } else {
                return;
            };
            let told = match queued.message.qos {
                // The identifier that it goes out with is recorded below.
                QoS::ExactlyOnce => tape.current(),
                _ => 0,
            };
            match tally.send(link, queued, (packet_id, false, told), now, tape) {
                Sent::Yes if at_most_once => outbox.pop(tape),
                Sent::Yes => {
                    outbox.sent(packet_id, link.connection, tape);
                    link.unacknowledged += 1;
                }
                Sent::TooLarge => outbox.pop(tape),
                Sent::NoRoom => return,
            }
        }
    }

    /// Sends what acknowledgements may leave now. True where the writer has to be woken.
    fn flush_acks(&mut self) -> bool {
        let blocked = waits_for_client(self.link, self.outbox);
        let popped = self.outbox.progress().1;
        self.link
            .send_acks(popped, blocked, self.exchanges, &mut self.tape)
    }
}

/// Whether a session may keep so many bytes more. What has expired in a full queue must not keep out what is fresh, so it
/// is dropped now and then.
pub(super) fn make_room(
    session: &mut Session,
    scope: Scope,
    cost_bytes: usize,
    limits: &Limits,
    recorder: &mut Recorder,
    counts: &mut Counts,
    now: Instant,
) -> bool {
    let bytes_max = match scope {
        // The client was found to have room when its request was taken, and only answers to the requests beside it came since.
        Scope::Answer => limits.queue_bytes_max.saturating_mul(2),
        Scope::Session | Scope::Connection => limits.queue_bytes_max,
    };
    // Absent clients may not take all there is, and a present one that keeps up is never the one to suffer for what others
    // have left lying.
    let total_max = match session.is_present() {
        false => limits.queue_bytes_total_max / 2,
        true if session.outbox.bytes() + cost_bytes <= limits.queue_bytes_reserve => usize::MAX,
        true => limits.queue_bytes_total_max,
    };
    // An owner may always have what one client may have.
    let floor = bytes_max;
    let has_room = (session.outbox).has_room(cost_bytes, bytes_max, total_max, floor);
    let searched = session.searched;
    if has_room || searched.is_some_and(|at| now < at + EXPIRED_SEARCH_PERIOD) {
        return has_room;
    }
    session.searched = Some(now);
    let mut tape = session.tape(recorder);
    counts.dropped += session.outbox.drop_expired(now, &mut tape) as u64;
    (session.outbox).has_room(cost_bytes, bytes_max, total_max, floor)
}

/// Whether the next message waits for acknowledgements of the client.
fn waits_for_client(link: &Link, outbox: &Outbox) -> bool {
    !link.resend.is_empty() || outbox.front_needs_window() && link.unacknowledged >= link.window
}

/// What one round of sending came to.
#[derive(Debug, Default)]
struct Tally {
    wake: bool,
    sent: u64,
    dropped: u64,
}

#[derive(Debug, PartialEq, Eq)]
enum Sent {
    Yes,
    /// Never to this client: as if it had been sent (section 3.1.2.11.4).
    TooLarge,
    NoRoom,
}

impl Tally {
    fn send(
        &mut self,
        link: &Link,
        queued: &Queued,
        (packet_id, dup, told): (u16, bool, BatchNumber),
        now: Instant,
        tape: &mut Tape<'_>,
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
        let packet_bytes = codec::publish_bytes(message, &delivery);
        if packet_bytes > link.packet_bytes_max {
            self.dropped += 1;
            return Sent::TooLarge;
        }
        let encode = |out: &mut _| codec::publish(out, message, &delivery);
        match tape.offer(&link.output, told, packet_bytes, encode) {
            None => Sent::NoRoom,
            Some(wake) => {
                self.wake |= wake;
                self.sent += 1;
                Sent::Yes
            }
        }
    }
}

/// What remains of a Message Expiry Interval, rounded up, so that a message that did not wait goes out as it came.
pub(super) fn remaining_s(message: &Message, now: Instant) -> Option<u32> {
    let remaining = message.expires?.saturating_duration_since(now);
    Some(u32::try_from(remaining.as_millis().div_ceil(1000)).unwrap_or(u32::MAX))
}
