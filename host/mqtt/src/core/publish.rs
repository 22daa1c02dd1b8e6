//! Messages: from clients and the embedder, through the router, into queues and windows, and the acknowledgements of both
//! directions (sections 3.3 to 3.7, 4.3 to 4.6).

use std::{mem, time::Instant};

use super::Core;
use crate::{
    Message, Origin, QoS, ReasonCode, Token,
    codec::{self, Ack, Delivery, Publish, Violation, packet_type as kind},
    link::Link,
    outbox::Queued,
    router::SessionKey,
    session::{Arrival, Session},
};

/// A PUBLISH that the service takes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Begun {
    /// To be handed over; settled with the token, if there is one.
    HandOver(Option<Token>),
    /// A repetition of a QoS 2 message that was handed over.
    Repeated,
}

impl Core {
    /// A PUBLISH of a client to the service.
    pub(crate) fn begin(
        &mut self,
        key: SessionKey,
        connection: u64,
        packet_id: u16,
        qos: QoS,
    ) -> Result<Begun, Violation> {
        self.counts.messages_in += 1;
        let Some(session) = self.linked(key, connection) else {
            return Ok(Begun::Repeated);
        };
        let sequence = match qos {
            QoS::AtMostOnce => return Ok(Begun::HandOver(None)),
            QoS::AtLeastOnce => match &mut session.link {
                Some(link) => link.owe(packet_id, false)?,
                None => return Ok(Begun::Repeated),
            },
            QoS::ExactlyOnce => match session.receive(packet_id)? {
                Arrival::New(sequence) => sequence,
                Arrival::Repeated => {
                    self.flush_acks(key);
                    return Ok(Begun::Repeated);
                }
            },
        };
        let exactly_once = qos == QoS::ExactlyOnce;
        Ok(Begun::HandOver(Some(Token {
            session: key,
            connection,
            sequence,
            packet_id,
            exactly_once,
        })))
    }

    /// A PUBLISH of a client that is refused or routed at once: `publish` says with what reason it ended.
    fn handle(
        &mut self,
        key: SessionKey,
        connection: u64,
        publish: &Publish,
        text: Option<&str>,
        act: impl FnOnce(&mut Self) -> ReasonCode,
    ) -> Result<(), Violation> {
        match self.begin(key, connection, publish.packet_id, publish.qos)? {
            Begun::HandOver(token) => {
                let reason = act(self);
                match token {
                    Some(token) => self.answer(token, reason, text),
                    None => self.counts.dropped += u64::from(reason.is_error()),
                }
            }
            Begun::Repeated => {}
        }
        Ok(())
    }

    /// A PUBLISH of a client that may not go anywhere.
    pub(crate) fn refuse(
        &mut self,
        key: SessionKey,
        connection: u64,
        publish: &Publish,
        reason: ReasonCode,
        text: &str,
    ) -> Result<(), Violation> {
        self.handle(key, connection, publish, Some(text), |_| reason)
    }

    /// A PUBLISH of a client to its subscribers.
    pub(crate) fn route(
        &mut self,
        key: SessionKey,
        connection: u64,
        publish: &Publish,
        message: &Message,
        now: Instant,
    ) -> Result<(), Violation> {
        self.handle(key, connection, publish, None, |core| {
            match core.publish(message, Some(key), now) {
                Ok(0) => ReasonCode::NO_MATCHING_SUBSCRIBERS,
                Ok(_) => ReasonCode::SUCCESS,
                Err(reason) => reason,
            }
        })
    }

    /// Sends a message to every session that subscribed to its topic, once each, and keeps it where it is retained.
    /// Returns the number of these sessions, or the reason why it was not accepted.
    pub(crate) fn publish(
        &mut self,
        message: &Message,
        from: Option<SessionKey>,
        now: Instant,
    ) -> Result<usize, ReasonCode> {
        if message.topic.len() > usize::from(u16::MAX) {
            return Err(ReasonCode::TOPIC_NAME_INVALID);
        }
        if message.retain {
            let client = from
                .and_then(|key| self.session(key))
                .map(|session| session.client.clone());
            if !self.retained.set(message, client, &self.limits, now) {
                return Err(ReasonCode::QUOTA_EXCEEDED);
            }
        }
        let mut matches = mem::take(&mut self.matches);
        matches.clear();
        self.router.matches(&message.topic, &mut matches);
        matches.retain(|(key, subscription)| !(subscription.no_local && from == Some(*key)));
        matches.sort_by_key(|(key, _)| *key);
        let mut sessions = 0;
        let mut kept = None;
        for group in matches.chunk_by(|a, b| a.0 == b.0) {
            let Some(((key, first), others)) = group.split_first() else {
                continue;
            };
            let subscribed = others
                .iter()
                .fold(first.qos, |qos, (_, other)| qos.max(other.qos));
            let as_published = group
                .iter()
                .any(|(_, subscription)| subscription.retain_as_published);
            let delivery = Delivery {
                qos: subscribed.min(message.qos),
                dup: false,
                retain: message.retain && as_published,
                packet_id: 0,
                subscription_ids: &group
                    .iter()
                    .filter_map(|(_, subscription)| subscription.id)
                    .collect::<Box<[u32]>>(),
                expiry_s: remaining_s(message, now),
            };
            self.forward(*key, message, &mut kept, &delivery, now);
            sessions += 1;
        }
        self.matches = matches;
        Ok(sessions)
    }

    /// A routed message to one session: straight into the output where nothing has to be kept, else into the queue.
    pub(super) fn forward(
        &mut self,
        key: SessionKey,
        message: &Message,
        kept: &mut Option<Message>,
        delivery: &Delivery<'_>,
        now: Instant,
    ) {
        if delivery.qos == QoS::AtMostOnce && self.send_at_once(key, message, delivery, now) {
            return;
        }
        let mut message = kept.get_or_insert_with(|| message.detached()).clone();
        (message.qos, message.retain) = (delivery.qos, delivery.retain);
        self.enqueue(
            key,
            Queued {
                message,
                subscription_ids: delivery.subscription_ids.into(),
                transient: false,
            },
            now,
        );
    }

    /// QoS 0 without a copy. False where it has to be queued.
    fn send_at_once(
        &mut self,
        key: SessionKey,
        message: &Message,
        delivery: &Delivery<'_>,
        now: Instant,
    ) -> bool {
        let Some(session) = self.session(key) else {
            return true;
        };
        // Nobody waits for a QoS 0 message to an absent client (section 4.3.1).
        let Some(link) = session
            .link
            .as_ref()
            .filter(|link| !link.output.is_closing())
        else {
            return true;
        };
        if !session.outbox.is_queue_empty() || !link.resend.is_empty() {
            return false;
        }
        if message.is_expired(now)
            || codec::publish_bytes(message, delivery) > link.packet_bytes_max
        {
            self.counts.dropped += 1;
            return true;
        }
        let Some(wake) = link
            .output
            .offer(|out| codec::publish(out, message, delivery))
        else {
            return false;
        };
        let writer = wake.then(|| link.output.clone());
        self.wakes.extend(writer);
        self.counts.messages_out += 1;
        true
    }

    /// A message of the embedder to one connection only.
    pub(crate) fn deliver(&mut self, to: &Origin, mut message: Message, now: Instant) -> bool {
        let Some(key) = self.find(to) else {
            return false;
        };
        let mut matches = mem::take(&mut self.matches);
        matches.clear();
        if let Some(session) = self.session(key) {
            if session.has_wildcards() {
                self.router.matches(&message.topic, &mut matches);
                matches.retain(|(other, _)| *other == key);
            } else {
                matches.extend(
                    session
                        .subscription(&message.topic)
                        .map(|subscription| (key, subscription)),
                );
            }
        }
        if let Some(lent) = matches
            .iter()
            .map(|(_, subscription)| subscription.qos)
            .max()
        {
            message.qos = message.qos.min(lent);
        }
        let subscription_ids = matches
            .iter()
            .filter_map(|(_, subscription)| subscription.id)
            .collect();
        self.matches = matches;
        if message.topic.len() > usize::from(u16::MAX) {
            self.counts.dropped += 1;
            return true;
        }
        self.enqueue(
            key,
            Queued {
                message,
                subscription_ids,
                transient: true,
            },
            now,
        );
        self.is_open(key, to.connection)
    }

    /// The answer to a request.
    pub(crate) fn settle(&mut self, token: Token, reason: ReasonCode, text: Option<&str>) {
        self.answer(token, reason, text);
    }

    fn answer(&mut self, token: Token, reason: ReasonCode, text: Option<&str>) {
        let Some(session) = self.session(token.session) else {
            return;
        };
        let asked = (token.connection, token.sequence);
        if token.exactly_once {
            session.settle_received(token.packet_id, asked, reason, text);
        } else {
            session.answer(asked, reason, text);
        }
        self.flush_acks(token.session);
    }

    /// Sends what acknowledgements may leave now; the others leave with the queue.
    fn flush_acks(&mut self, key: SessionKey) {
        let Some(session) = self
            .sessions
            .get_mut(key as usize)
            .and_then(Option::as_deref_mut)
        else {
            return;
        };
        let Session {
            link: Some(link),
            outbox,
            received,
            ..
        } = session
        else {
            return;
        };
        let blocked = !link.resend.is_empty()
            || outbox.front_needs_window() && link.unacknowledged >= link.window;
        if link.send_acks(outbox.progress().1, blocked, received) {
            self.wakes.push(link.output.clone());
        }
    }

    /// Puts a message into a session's queue and sends what can be sent. Over the bound the newest is lost: an absent
    /// client is missed by it, a present one does not read and is disconnected.
    fn enqueue(&mut self, key: SessionKey, queued: Queued, now: Instant) {
        let (bytes_max, total_max) = (
            self.limits.queue_bytes_max,
            self.limits.queue_bytes_total_max,
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
        if session
            .outbox
            .has_room(queued.message.cost_bytes(), bytes_max, total_max)
        {
            session.outbox.push(queued);
            if present {
                self.pump(key, now);
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
        let Some(session) = self
            .sessions
            .get_mut(key as usize)
            .and_then(Option::as_deref_mut)
        else {
            return;
        };
        let Session {
            link: Some(link),
            outbox,
            received,
            ..
        } = session
        else {
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
        let blocked = !link.resend.is_empty()
            || outbox.front_needs_window() && link.unacknowledged >= link.window;
        if link.send_acks(outbox.progress().1, blocked, received) {
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
