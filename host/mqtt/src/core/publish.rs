//! Routing of messages from clients and the embedder to sessions (sections 3.3 and 4.3).

use std::{borrow::Cow, mem, time::Instant};

use bytes::Bytes;
use statehouse_protocol::ConnectionId;

use super::{Core, requester::Requester, session_at, window::remaining_s};
use crate::{
    Message, ProtocolVersion, QoS, ReasonCode, Refused, Token,
    barrier::Barrier,
    codec::{self, Delivery, Publish, Violation},
    limits::work,
    link::AckPosition,
    retained::Publisher,
    router::{Matches, SessionKey},
    session::Arrival,
    session_queue::{Queued, Scope, Shared},
};

/// Why a message is refused: the code and the Reason String.
pub(crate) type RefusalCause = (ReasonCode, &'static str);

/// What to do with a PUBLISH for the service.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Begun {
    /// Pass it to the service. A token, if there is one, acknowledges it later.
    HandOver(Option<Token>),
    /// Ignore it: a duplicate of a QoS 2 message that the service already has, or a PUBLISH that
    /// was refused.
    Repeated,
}

/// Reason String if the broker has no memory for the packet id of a QoS 2 PUBLISH.
const NO_ROOM_FOR_EXCHANGE: &str =
    "unfinished QoS 2 messages of this user or address, or of all clients, exceed their limit";

/// Reason String if a topic is too long for a packet.
const TOPIC_TOO_LONG: &str = "the topic has more than 65535 bytes";

/// Reason String if there is no room for a retained message.
const NO_ROOM_TO_RETAIN: &str =
    "retained messages of this user or address, or of all clients, exceed their limit";

/// Reason String if the log must hold a message and has no room.
const NO_ROOM_IN_LOG: &str = "the log has no room on the disk for this message";

/// Reason String if no group can take a message.
const NO_ROOM_IN_GROUP: &str = "no member of a shared subscription has room for this message";

/// Log line if a message that is not refused cannot be retained.
const NOT_RETAINED: &str =
    "no room for retained messages of this client: subscribers get them, and they are not retained";

/// Log line if a message that is not refused is dropped for a group.
const NOT_SHARED: &str =
    "no member of a shared subscription has room for messages of this client: they are dropped";

/// The origin of a message.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Source {
    /// The session of its publisher.
    pub(crate) from: Option<SessionKey>,
    /// The session whose request the message answers, if the requesting connection is still open.
    pub(crate) reply_session: Option<SessionKey>,
    /// The session whose request the message answers, connected or not.
    pub(crate) requester: Requester,
    /// Whether the message is a will.
    pub(crate) is_will: bool,
    /// Whether the log already holds the message, as a will. Such a message may be retained even
    /// while the log has no room.
    pub(crate) recorded: bool,
}

impl Core {
    /// Handles a PUBLISH of a client for the service. The log names the user of the request before
    /// the service can record the request.
    pub(crate) fn begin_request(
        &mut self,
        key: SessionKey,
        connection: ConnectionId,
        packet_id: u16,
        qos: QoS,
    ) -> Result<Begun, Violation> {
        let begun = self.begin(key, connection, packet_id, qos)?;
        if let Begun::HandOver(Some(_)) = begun
            && let Some(session) = session_at(&mut self.sessions, key)
        {
            session.record_user(&mut self.change_log);
        }
        Ok(begun)
    }

    /// Handles the beginning of any PUBLISH of a client.
    fn begin(
        &mut self,
        key: SessionKey,
        connection: ConnectionId,
        packet_id: u16,
        qos: QoS,
    ) -> Result<Begun, Violation> {
        self.counts.messages_in += 1;
        if !self.is_open(key, connection) {
            return Ok(Begun::Repeated);
        }
        let Some(session) = session_at(&mut self.sessions, key) else {
            return Ok(Begun::Repeated);
        };
        let number = session.number;
        let sequence = match qos {
            QoS::AtMostOnce => return Ok(Begun::HandOver(None)),
            QoS::AtLeastOnce => match &mut session.link {
                Some(link) => link.expect_ack(packet_id, false)?,
                None => return Ok(Begun::Repeated),
            },
            QoS::ExactlyOnce => {
                let arrival = session.receive(packet_id, &self.limits, &mut self.change_log)?;
                let Arrival::New(sequence) = arrival else {
                    if let Arrival::Refused(sequence) = arrival {
                        let (reason, text) = (ReasonCode::QUOTA_EXCEEDED, NO_ROOM_FOR_EXCHANGE);
                        let position = AckPosition {
                            connection,
                            sequence,
                        };
                        session.answer(position, reason, Some(text), Barrier::NONE);
                        self.close_if_over_limit(key, connection, reason, Some(text));
                        self.report_refusal(key, Refused::Publish, reason, Some(text));
                    }
                    self.flush_acks(key);
                    return Ok(Begun::Repeated);
                };
                sequence
            }
        };
        let exactly_once = qos == QoS::ExactlyOnce;
        Ok(Begun::HandOver(Some(Token {
            session: key,
            number,
            connection,
            sequence,
            packet_id,
            exactly_once,
        })))
    }

    /// Handles a PUBLISH of a client that is refused or routed at once. `act` returns its reason
    /// code and Reason String.
    fn handle<'a>(
        &mut self,
        key: SessionKey,
        connection: ConnectionId,
        publish: &Publish,
        act: impl FnOnce(&mut Self) -> (ReasonCode, Option<&'a str>),
    ) -> Result<(), Violation> {
        let begun = self.begin(key, connection, publish.packet_id, publish.qos)?;
        if let Begun::HandOver(token) = begun {
            let recorded = self.change_log.count();
            let (reason, text) = act(self);
            let barrier = self.barrier_since(recorded);
            match token {
                Some(token) => self.acknowledge_after(token, reason, text, barrier),
                None => self.counts.dropped += u64::from(reason.is_error()),
            }
        }
        Ok(())
    }

    /// Refuses a PUBLISH of a client. `report` counts and reports that. It is not called for a
    /// repeated QoS 2 PUBLISH, which gets the answer to the first one.
    pub(crate) fn refuse(
        &mut self,
        key: SessionKey,
        connection: ConnectionId,
        publish: &Publish,
        (reason, text): (ReasonCode, &str),
        report: impl FnOnce(&mut Self),
    ) -> Result<(), Violation> {
        self.handle(key, connection, publish, |core| {
            report(core);
            (reason, Some(text))
        })
    }

    /// Refuses a request that has begun.
    pub(crate) fn refuse_begun(
        &mut self,
        key: SessionKey,
        token: Option<Token>,
        reason: ReasonCode,
        text: &'static str,
    ) {
        self.report_refusal(key, Refused::Publish, reason, Some(text));
        match token {
            Some(token) => self.acknowledge_after(token, reason, Some(text), Barrier::NONE),
            None => self.counts.dropped += 1,
        }
    }

    /// Routes a PUBLISH of a client to its subscribers.
    pub(crate) fn route(
        &mut self,
        key: SessionKey,
        connection: ConnectionId,
        publish: &Publish,
        message: &Message,
        now: Instant,
    ) -> Result<(), Violation> {
        let has_room = self.change_log.has_room();
        self.handle(key, connection, publish, |core| {
            if !has_room && core.must_be_recorded(message, key, now) {
                let (reason, text) = (ReasonCode::QUOTA_EXCEEDED, NO_ROOM_IN_LOG);
                core.report_refusal(key, Refused::Publish, reason, Some(text));
                return (reason, Some(text));
            }
            let source = Source {
                from: Some(key),
                ..Source::default()
            };
            match core.fan_out(Cow::Borrowed(message), source, has_room, now) {
                Ok(0) => (ReasonCode::NO_MATCHING_SUBSCRIBERS, None),
                Ok(_) => (ReasonCode::SUCCESS, None),
                Err((reason, text)) => {
                    core.report_refusal(key, Refused::Publish, reason, Some(text));
                    (reason, Some(text))
                }
            }
        })
    }

    /// Stores the message if it is retained, and sends it once to every subscribed session and to
    /// one session of every subscribed group. A borrowed message is a slice of a read buffer and is
    /// copied if it must be stored. Returns the number of these sessions and groups, or the cause
    /// of the refusal.
    ///
    /// If there is no room for a retained message whose publisher cannot be refused, subscribers
    /// get it nevertheless. New subscribers then get no message, instead of an older one.
    pub(crate) fn publish(
        &mut self,
        message: Cow<'_, Message>,
        source: Source,
        now: Instant,
    ) -> Result<usize, RefusalCause> {
        let has_room = self.change_log.has_room();
        self.fan_out(message, source, has_room, now)
    }

    /// Like [`publish`](Self::publish), after the log was asked for room. The answer must hold for
    /// all receivers of the message. If the log became full between two of them, the others would
    /// not get a message that is acknowledged.
    pub(super) fn fan_out(
        &mut self,
        mut message: Cow<'_, Message>,
        source: Source,
        has_room: bool,
        now: Instant,
    ) -> Result<usize, RefusalCause> {
        if message.topic.len() > usize::from(u16::MAX) {
            return Err((ReasonCode::TOPIC_NAME_INVALID, TOPIC_TOO_LONG));
        }
        if message.retain && !self.retain(&message, source, has_room, now) {
            if message.qos > QoS::AtMostOnce && !source.is_will {
                return Err((ReasonCode::QUOTA_EXCEEDED, NO_ROOM_TO_RETAIN));
            }
            self.retained.discard(&message.topic, &mut self.change_log);
            self.warn_of(source, NOT_RETAINED);
        }
        let mut matches = mem::take(&mut self.matches);
        self.find_receivers(&message.topic, source, &mut matches);
        let Matches {
            sessions, groups, ..
        } = &matches;
        let (mut count, retain) = (0, message.retain);
        let mut sessions = sessions.chunk_by(|a, b| a.0 == b.0).peekable();
        while let Some(own) = sessions.next() {
            let Some(((key, first), others)) = own.split_first() else {
                continue;
            };
            let qos = others
                .iter()
                .fold(first.qos, |qos, (_, it)| qos.max(it.qos));
            let as_published = own.iter().any(|(_, it)| it.retain_as_published);
            let ids: Box<[u32]> = own.iter().filter_map(|(_, it)| it.id).collect();
            let delivery = Delivery {
                qos: qos.min(message.qos),
                dup: false,
                retain: message.retain && as_published,
                packet_id: 0,
                subscription_ids: &ids,
                expiry_s: remaining_s(&message, now),
            };
            let scope = match source.reply_session == Some(*key) {
                true => Scope::Answer,
                false => Scope::Session,
            };
            let last = sessions.peek().is_none() && groups.is_empty();
            let queueing = (scope, None, has_room);
            self.forward(*key, &mut message, last, &delivery, queueing, now);
            count += 1;
        }
        let (served, full) = self.share_among(groups, &mut message, source, has_room, now);
        self.matches = matches;
        if full > 0 {
            if count + served == 0 && !retain && self.may_refuse(source) {
                return Err((ReasonCode::QUOTA_EXCEEDED, NO_ROOM_IN_GROUP));
            }
            self.counts.dropped += full as u64;
            self.warn_of(source, NOT_SHARED);
        }
        Ok(count + served + full)
    }

    /// Whether a refusal reaches the publisher. MQTT 3.1.1 has no code for it, and the end of its
    /// connection would help neither the publisher nor the group.
    fn may_refuse(&mut self, source: Source) -> bool {
        let link = source.from.and_then(|key| self.session(key)?.link.as_ref());
        !source.is_will && link.is_some_and(|it| it.version == ProtocolVersion::V5)
    }

    /// Logs what no reason code says to a publisher, once for each of its connections.
    fn warn_of(&mut self, source: Source, text: &'static str) {
        let session = source
            .from
            .and_then(|key| session_at(&mut self.sessions, key));
        if let Some(session) = session
            && !mem::replace(&mut session.drop_logged, true)
        {
            tracing::warn!(client = &*session.client, "{text}");
        }
    }

    /// Finds the subscriptions, in the order of their sessions, and the groups that get a message.
    #[inline]
    fn find_receivers(&mut self, topic: &[u8], source: Source, matches: &mut Matches) {
        matches.clear();
        self.router.matches(topic, matches);
        self.work += work::PUBLISH + work::NODE * matches.visited as u64;
        matches.sessions.retain(|(key, subscription)| {
            !(subscription.no_local && source.from == Some(*key))
                && (source.requester).may_reach(*key, topic, &self.sessions, &*self.access)
        });
        matches.sessions.sort_by_key(|(key, _)| *key);
    }

    /// Stores a retained message, or removes the one of its topic if the payload is empty. Returns
    /// false if there is no room.
    fn retain(&mut self, message: &Message, source: Source, has_room: bool, now: Instant) -> bool {
        let publisher = source.from.and_then(|key| self.session(key));
        let publisher = publisher.map(|session| Publisher {
            client: session.client.clone(),
            account: session.account().clone(),
        });
        let (limits, change_log) = (&self.limits, &mut self.change_log);
        let has_room = source.recorded || message.payload.is_empty() || has_room;
        has_room && (self.retained).set(message, publisher, limits, now, change_log, &mut self.work)
    }

    /// Whether routing this message must add it to the log, which has no room: as a retained
    /// message or in the queue of a durable session.
    fn must_be_recorded(&mut self, message: &Message, from: SessionKey, now: Instant) -> bool {
        if message.qos == QoS::AtMostOnce {
            return false;
        }
        if message.retain && !message.payload.is_empty() {
            return true;
        }
        let mut matches = mem::take(&mut self.matches);
        matches.clear();
        self.router.matches(&message.topic, &mut matches);
        let kept = matches.sessions.iter().any(|(key, subscription)| {
            subscription.qos > QoS::AtMostOnce
                && !(subscription.no_local && *key == from)
                && session_at(&mut self.sessions, *key).is_some_and(|it| it.is_durable())
        });
        let requester = Requester::default();
        let groups = &mut matches.groups.iter();
        let kept = kept || groups.any(|group| self.needs_log(group, message, requester, now));
        self.matches = matches;
        kept
    }

    /// Whether a message of this client would be sent to the client itself. Not for shared
    /// subscriptions, which have other members or refuse it.
    pub(crate) fn returns(&mut self, from: SessionKey, topic: &[u8]) -> bool {
        let mut matches = mem::take(&mut self.matches);
        matches.clear();
        self.router.matches(topic, &mut matches);
        let mut sessions = matches.sessions.iter();
        let returns = sessions.any(|(key, it)| *key == from && !it.no_local);
        self.matches = matches;
        returns
    }

    /// Sends a routed message to one session, as a member of `group` if there is one. It goes
    /// straight into the output if possible, otherwise into the queue. The last session takes the
    /// message itself instead of a copy. `has_room` is the answer of the log.
    pub(super) fn forward(
        &mut self,
        key: SessionKey,
        message: &mut Cow<'_, Message>,
        last: bool,
        delivery: &Delivery<'_>,
        (scope, group, has_room): (Scope, Option<&Bytes>, bool),
        now: Instant,
    ) {
        self.work += work::delivery(message.payload.len());
        if delivery.qos == QoS::AtMostOnce && self.send_at_once(key, message, delivery, now) {
            return;
        }
        let shared = group.map(|filter| {
            Box::new(Shared {
                filter: filter.clone(),
                qos: message.qos,
                retain: message.retain,
            })
        });
        self.enqueue(
            key,
            Queued {
                message: message_for_queue(message, last, delivery),
                subscription_ids: delivery.subscription_ids.into(),
                scope,
                shared,
            },
            has_room,
            now,
        );
    }

    /// Sends a QoS 0 message without a copy. Returns false if it must be queued.
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
        // QoS 0 messages are not kept for a disconnected client (section 4.3.1).
        let link = session.link.as_ref();
        let Some(link) = link.filter(|link| !link.output.is_closing()) else {
            return true;
        };
        if !session.queue.is_queue_empty() || !link.resend.is_empty() {
            return false;
        }
        let packet_bytes = codec::publish_bytes(link.version, message, delivery);
        if message.is_expired(now) || packet_bytes > link.packet_bytes_max {
            self.counts.dropped += 1;
            return true;
        }
        let encode = |out: &mut _| codec::publish(out, link.version, message, delivery);
        let Some(added) = link.output.offer(Barrier::NONE, packet_bytes, encode) else {
            return false;
        };
        let writer = added.wake.then(|| link.output.clone());
        self.wakes.extend(writer);
        self.counts.messages_out += 1;
        true
    }

    /// Closes the connection of a client of MQTT 3.1.1 whose message exceeds a limit. Without a
    /// reason code an acknowledgement would take responsibility for the message, and the client
    /// would not send it again (MQTT 3.1.1 [MQTT-4.8.0-2]).
    fn close_if_over_limit(
        &mut self,
        key: SessionKey,
        connection: ConnectionId,
        reason: ReasonCode,
        text: Option<&str>,
    ) {
        if reason != ReasonCode::QUOTA_EXCEEDED {
            return;
        }
        let session = self.linked(key, connection);
        if session.is_some_and(|session| session.is_v311()) {
            self.close(key, reason, text);
        }
    }

    /// The barrier of a packet that depends on changes after the count `recorded`.
    pub(super) fn barrier_since(&self, recorded: u64) -> Barrier {
        if self.change_log.count() == recorded {
            Barrier::NONE
        } else {
            self.change_log.barrier_for_this_batch()
        }
    }

    pub(super) fn acknowledge_after(
        &mut self,
        token: Token,
        reason: ReasonCode,
        text: Option<&str>,
        barrier: Barrier,
    ) {
        self.close_if_over_limit(token.session, token.connection, reason, text);
        let Some(session) = session_at(&mut self.sessions, token.session) else {
            return;
        };
        let position = AckPosition {
            connection: token.connection,
            sequence: token.sequence,
        };
        if token.exactly_once {
            let (packet_id, log) = (token.packet_id, &mut self.change_log);
            session.acknowledge_received(packet_id, position, reason, text, barrier, log);
        } else {
            session.answer(position, reason, text, barrier);
        }
        self.flush_acks(token.session);
    }
}

/// The message as it is put into one session's queue. The last session takes the message itself
/// instead of a copy.
fn message_for_queue(
    message: &mut Cow<'_, Message>,
    last: bool,
    delivery: &Delivery<'_>,
) -> Message {
    if let Cow::Borrowed(borrowed) = message {
        *message = Cow::Owned(borrowed.detached());
    }
    let own = message.to_mut();
    let mut kept = if last { mem::take(own) } else { own.clone() };
    (kept.qos, kept.retain) = (delivery.qos, delivery.retain);
    kept
}
