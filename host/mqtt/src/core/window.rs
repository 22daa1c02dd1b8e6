//! What a session has to send: its queue, its window, repetitions, and the acknowledgements that go with them (sections
//! 4.3, 4.4, 4.6, 4.9).

use std::{mem, time::Instant};

use super::Core;
use crate::{
    Message, QoS, ReasonCode,
    codec::{self, Ack, Delivery, Violation, packet_type as kind},
    limits::EXPIRED_SEARCH_PERIOD,
    link::Link,
    outbox::{Outbox, Queued},
    router::SessionKey,
    session::Session,
};

impl Core {
    /// Sends what acknowledgements may leave now; the others leave with the queue.
    pub(super) fn flush_acks(&mut self, key: SessionKey) {
        let session = self
            .sessions
            .get_mut(key as usize)
            .and_then(Option::as_deref_mut);
        let Some((link, outbox, received)) = session.and_then(Session::sending) else {
            return;
        };
        if link.send_acks(
            outbox.progress().1,
            waits_for_client(link, outbox),
            received,
        ) {
            self.wakes.push(link.output.clone());
        }
    }

    /// Puts a message into a session's queue and sends what can be sent. Over the bound the newest is lost: an absent
    /// client is missed by it, a present one does not read and is disconnected.
    pub(super) fn enqueue(&mut self, key: SessionKey, queued: Queued, now: Instant) {
        let (bytes_max, total_max, reserve) = (
            self.limits.queue_bytes_max,
            self.limits.queue_bytes_total_max,
            self.limits.queue_bytes_reserve,
        );
        let Some(session) = self.session(key) else {
            return;
        };
        let present = session
            .link
            .as_ref()
            .is_some_and(|link| !link.output.is_closing());
        if !present && queued.transient {
            self.counts.dropped += 1;
            return;
        }
        let cost_bytes = queued.cost_bytes();
        // Absent clients may not take all there is, and a present one that keeps up is never the one to suffer
        // for what others have left lying.
        let total_max = match present {
            false => total_max / 2,
            true if session.outbox.bytes() + cost_bytes <= reserve => usize::MAX,
            true => total_max,
        };
        let mut has_room = session.outbox.has_room(cost_bytes, bytes_max, total_max);
        let mut expired = 0;
        let searched = session.searched;
        if !has_room && searched.is_none_or(|at| now >= at + EXPIRED_SEARCH_PERIOD) {
            // What has expired in the queue must not keep out what is fresh.
            session.searched = Some(now);
            expired = session.outbox.drop_expired(now) as u64;
            has_room = session.outbox.has_room(cost_bytes, bytes_max, total_max);
        }
        if has_room {
            session.outbox.push(queued);
            self.counts.dropped += expired;
            if present {
                self.pump(key, now);
            }
            return;
        }
        if !present && !mem::replace(&mut session.drop_logged, true) {
            tracing::warn!(client = %session.client.escape_debug(), "the queue of an absent client is full: messages are lost");
        }
        self.counts.dropped += expired + 1;
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
        let session = self
            .sessions
            .get_mut(key as usize)
            .and_then(Option::as_deref_mut);
        let Some((link, outbox, received)) = session.and_then(Session::sending) else {
            return;
        };
        let mut tally = Tally::default();
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
                    let Some(wake) = link.output.offer(rel) else {
                        break;
                    };
                    tally.wake |= wake;
                }
                Some(_) if link.unacknowledged >= link.window => break,
                Some(queued) => match tally.send(link, queued, packet_id, true, now) {
                    Sent::Yes => {
                        entry.connection = link.connection;
                        link.unacknowledged += 1;
                    }
                    Sent::TooLarge => _ = outbox.complete(packet_id),
                    Sent::NoRoom => break,
                },
            }
            link.resend.pop_front();
        }
        while let Some(queued) = outbox.front().filter(|_| link.resend.is_empty()) {
            if queued.message.is_expired(now) {
                tally.dropped += 1;
                outbox.pop();
                continue;
            }
            let at_most_once = queued.message.qos == QoS::AtMostOnce;
            let packet_id = if at_most_once {
                0
            } else if link.unacknowledged >= link.window {
                break;
            } else if let Some(packet_id) = outbox.next_packet_id() {
                packet_id
            } else {
                break;
            };
            match tally.send(link, queued, packet_id, false, now) {
                Sent::Yes if at_most_once => outbox.pop(),
                Sent::Yes => {
                    outbox.sent(packet_id, link.connection);
                    link.unacknowledged += 1;
                }
                Sent::TooLarge => outbox.pop(),
                Sent::NoRoom => break,
            }
        }
        if tally.wake {
            self.wakes.push(link.output.clone());
        }
        self.counts.messages_out += tally.sent;
        self.counts.dropped += tally.dropped;
        if link.send_acks(
            outbox.progress().1,
            waits_for_client(link, outbox),
            received,
        ) {
            self.wakes.push(link.output.clone());
        }
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
        let Some(Session {
            link: Some(link),
            outbox,
            ..
        }) = self.linked(key, connection)
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
                outbox.release(ack.packet_id);
                rel = Some(ReasonCode::SUCCESS);
            }
            (kind::PUBREC, Some(kind::PUBCOMP)) => rel = Some(ReasonCode::SUCCESS),
            (kind::PUBREC, None) => rel = Some(ReasonCode::PACKET_IDENTIFIER_NOT_FOUND),
            // Late, or from before a takeover.
            (_, None) => {}
            (got, Some(expected)) if got == expected => {
                let entry = outbox.complete(ack.packet_id);
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
            let wake = link.output.put(|out| {
                codec::ack(out, kind::PUBREL, ack.packet_id, reason, None, usize::MAX);
            });
            let output = wake.then(|| link.output.clone());
            self.wakes.extend(output);
        } else if !outbox.is_queue_empty() || !link.resend.is_empty() {
            self.pump(key, now);
        }
        Ok(())
    }

    /// PUBREL of a client: its QoS 2 exchange is over.
    pub(crate) fn released(&mut self, key: SessionKey, connection: u64, packet_id: u16) {
        let Some(session) = self.linked(key, connection) else {
            return;
        };
        let known = session.release_received(packet_id);
        let reason = if known {
            ReasonCode::SUCCESS
        } else {
            ReasonCode::PACKET_IDENTIFIER_NOT_FOUND
        };
        self.put(key, |out| {
            codec::ack(out, kind::PUBCOMP, packet_id, reason, None, usize::MAX)
        });
    }

    /// PINGREQ of a client.
    pub(crate) fn ping(&mut self, key: SessionKey, connection: u64) {
        if self.is_open(key, connection) {
            self.put(key, codec::pingresp);
        }
    }

    pub(super) fn put(&mut self, key: SessionKey, encode: impl FnOnce(&mut bytes::BytesMut)) {
        let Some(link) = self
            .sessions
            .get(key as usize)
            .and_then(Option::as_ref)
            .and_then(|s| s.link.as_ref())
        else {
            return;
        };
        if link.output.put(encode) {
            self.wakes.push(link.output.clone());
        }
    }
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
        packet_id: u16,
        dup: bool,
        now: Instant,
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
        if codec::publish_bytes(message, &delivery) > link.packet_bytes_max {
            self.dropped += 1;
            return Sent::TooLarge;
        }
        match link
            .output
            .offer(|out| codec::publish(out, message, &delivery))
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

/// What remains of a Message Expiry Interval, rounded up, so that a message that did not wait goes out as it came.
pub(super) fn remaining_s(message: &Message, now: Instant) -> Option<u32> {
    let remaining = message.expires?.saturating_duration_since(now);
    Some(u32::try_from(remaining.as_millis().div_ceil(1000)).unwrap_or(u32::MAX))
}
