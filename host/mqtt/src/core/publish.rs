//! Messages from clients and the embedder, through the router, to sessions (sections 3.3 and 4.3).

use std::{borrow::Cow, mem, time::Instant};

use super::{Core, answers::Answers, session_at, window::remaining_s};
use crate::{
    Message, QoS, ReasonCode, Refused, Token,
    codec::{self, Delivery, Publish, Violation},
    gate::BatchNumber,
    limits::work,
    outbox::{Queued, Scope},
    retained::Publisher,
    router::{Matches, SessionKey},
    session::Arrival,
};

/// A PUBLISH that the service takes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Begun {
    /// To be handed over; settled with the token, if there is one.
    HandOver(Option<Token>),
    /// A repetition of a QoS 2 message that was handed over, or one that was refused.
    Repeated,
}

/// Why a QoS 2 PUBLISH is refused whose packet id cannot be remembered.
const NO_ROOM_FOR_EXCHANGE: &str =
    "too many QoS 2 messages of this user or address, or of all clients, wait for their PUBREL";

/// Where a message comes from.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Source {
    /// The session of its publisher.
    pub(crate) from: Option<SessionKey>,
    /// The session whose request it answers, over the connection that is open.
    pub(crate) asker: Option<SessionKey>,
    /// Whose request it answers, connected or not.
    pub(crate) answers: Answers,
    /// It is in the log already, as a will: it may be kept also while the log has no room for more.
    pub(crate) recorded: bool,
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
                Some(link) => link.owe(packet_id, false)?,
                None => return Ok(Begun::Repeated),
            },
            QoS::ExactlyOnce => {
                match session.receive(packet_id, &self.limits, &mut self.recorder)? {
                    Arrival::New(sequence) => sequence,
                    Arrival::Refused(sequence) => {
                        let (reason, text) = (ReasonCode::QUOTA_EXCEEDED, NO_ROOM_FOR_EXCHANGE);
                        session.answer((connection, sequence), reason, Some(text), 0);
                        self.refused(key, Refused::Publish, reason, Some(text));
                        self.flush_acks(key);
                        return Ok(Begun::Repeated);
                    }
                    Arrival::Repeated => {
                        self.flush_acks(key);
                        return Ok(Begun::Repeated);
                    }
                }
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
                let recorded = self.recorder.count();
                let reason = act(self);
                let told = self.told_since(recorded);
                match token {
                    Some(token) => self.acknowledge(token, reason, text, told),
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
        if !self.recorder.has_room() && self.would_be_kept(message, key) {
            let reason = ReasonCode::QUOTA_EXCEEDED;
            let text = "there is no room on the disk to keep this message";
            self.refused(key, Refused::Publish, reason, Some(text));
            return self.refuse(key, connection, publish, reason, text);
        }
        self.handle(key, connection, publish, None, |core| {
            let source = Source {
                from: Some(key),
                ..Source::default()
            };
            match core.publish(Cow::Borrowed(message), source, now) {
                Ok(0) => ReasonCode::NO_MATCHING_SUBSCRIBERS,
                Ok(_) => ReasonCode::SUCCESS,
                Err(reason) => {
                    core.refused(key, Refused::Publish, reason, None);
                    reason
                }
            }
        })
    }

    /// Sends a message to every session that subscribed to its topic, once each, and to one of every group that did, and
    /// keeps it where it is retained. A borrowed one is a slice of a read buffer, and copied where it has to be kept. Returns
    /// the number of these sessions and groups, or the reason why it was not accepted.
    pub(crate) fn publish(
        &mut self,
        mut message: Cow<'_, Message>,
        source: Source,
        now: Instant,
    ) -> Result<usize, ReasonCode> {
        let Source {
            from,
            asker,
            answers,
            recorded,
        } = source;
        if message.topic.len() > usize::from(u16::MAX) {
            return Err(ReasonCode::TOPIC_NAME_INVALID);
        }
        if message.retain {
            let publisher = from.and_then(|key| self.session(key));
            let publisher = publisher.map(|session| Publisher {
                client: session.client.clone(),
                account: session.account().clone(),
            });
            let (limits, recorder) = (&self.limits, &mut self.recorder);
            let has_room = recorded || message.payload.is_empty() || recorder.has_room();
            if !has_room
                || !self
                    .retained
                    .set(&message, publisher, limits, now, recorder)
            {
                return Err(ReasonCode::QUOTA_EXCEEDED);
            }
        }
        let mut matches = mem::take(&mut self.matches);
        matches.clear();
        self.router.matches(&message.topic, &mut matches);
        self.work += work::PUBLISH + work::NODE * matches.visited as u64;
        let Matches {
            sessions, groups, ..
        } = &mut matches;
        sessions.retain(|(key, subscription)| {
            !(subscription.no_local && from == Some(*key))
                && answers.may_reach(*key, &message.topic, &self.sessions, &*self.access)
        });
        sessions.sort_by_key(|(key, _)| *key);
        let mut count = groups.len();
        let mut sessions = sessions.chunk_by(|a, b| a.0 == b.0).peekable();
        while let Some(own) = sessions.next() {
            let Some(((key, first), others)) = own.split_first() else {
                continue;
            };
            let subscribed = others
                .iter()
                .fold(first.qos, |qos, (_, other)| qos.max(other.qos));
            let as_published = own
                .iter()
                .any(|(_, subscription)| subscription.retain_as_published);
            let delivery = Delivery {
                qos: subscribed.min(message.qos),
                dup: false,
                retain: message.retain && as_published,
                packet_id: 0,
                subscription_ids: &own
                    .iter()
                    .filter_map(|(_, subscription)| subscription.id)
                    .collect::<Box<[u32]>>(),
                expiry_s: remaining_s(&message, now),
            };
            let scope = if asker == Some(*key) {
                Scope::Answer
            } else {
                Scope::Session
            };
            let last = sessions.peek().is_none() && groups.is_empty();
            self.forward(*key, &mut message, last, &delivery, scope, now);
            count += 1;
        }
        let mut groups = groups.iter().peekable();
        while let Some(group) = groups.next() {
            let last = groups.peek().is_none();
            self.share(group, &mut message, last, answers, now);
        }
        self.matches = matches;
        Ok(count)
    }

    /// Whether a message of a client would be kept in the log: retained, or in the queue of a session that is.
    fn would_be_kept(&mut self, message: &Message, from: SessionKey) -> bool {
        if message.retain && !message.payload.is_empty() {
            return true;
        }
        if message.qos == QoS::AtMostOnce {
            return false;
        }
        let mut matches = mem::take(&mut self.matches);
        matches.clear();
        self.router.matches(&message.topic, &mut matches);
        let kept = matches.sessions.iter().any(|(key, subscription)| {
            subscription.qos > QoS::AtMostOnce
                && !(subscription.no_local && *key == from)
                && session_at(&mut self.sessions, *key).is_some_and(|it| it.is_durable())
        });
        self.matches = matches;
        kept
    }

    /// A routed message to one session: straight into the output where nothing has to be kept, else into the queue. The last
    /// session gets the message itself.
    pub(super) fn forward(
        &mut self,
        key: SessionKey,
        message: &mut Cow<'_, Message>,
        last: bool,
        delivery: &Delivery<'_>,
        scope: Scope,
        now: Instant,
    ) {
        self.work += work::delivery(message.payload.len());
        if delivery.qos == QoS::AtMostOnce && self.send_at_once(key, message, delivery, now) {
            return;
        }
        self.enqueue(
            key,
            Queued {
                message: kept(message, last, delivery),
                subscription_ids: delivery.subscription_ids.into(),
                scope,
                shared: None,
            },
            now,
        );
    }

    /// QoS 0 without a copy. False where it has to be queued.
    pub(super) fn send_at_once(
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
        let packet_bytes = codec::publish_bytes(message, delivery);
        if message.is_expired(now) || packet_bytes > link.packet_bytes_max {
            self.counts.dropped += 1;
            return true;
        }
        let encode = |out: &mut _| codec::publish(out, message, delivery);
        let Some(added) = link.output.offer(0, packet_bytes, encode) else {
            return false;
        };
        let writer = added.wake.then(|| link.output.clone());
        self.wakes.extend(writer);
        self.counts.messages_out += 1;
        true
    }

    /// A message of the embedder to one connection only.
    pub(crate) fn deliver(
        &mut self,
        client: &str,
        connection: u64,
        mut message: Message,
        now: Instant,
    ) -> bool {
        let Some(key) = self.find(client, connection) else {
            return false;
        };
        let mut matches = mem::take(&mut self.matches);
        matches.clear();
        if let Some(session) = self.session(key) {
            if session.has_wildcards() {
                self.router.matches(&message.topic, &mut matches);
                self.work += work::NODE * matches.visited as u64;
                matches.sessions.retain(|(other, _)| *other == key);
            } else {
                matches.sessions.extend(
                    session
                        .subscription(&message.topic)
                        .map(|subscription| (key, subscription)),
                );
            }
        }
        if let Some(lent) = matches
            .sessions
            .iter()
            .map(|(_, subscription)| subscription.qos)
            .max()
        {
            message.qos = message.qos.min(lent);
        }
        let subscription_ids = matches
            .sessions
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
                scope: Scope::Connection,
                shared: None,
            },
            now,
        );
        self.is_open(key, connection)
    }

    /// A message of the embedder that answers the request of a token.
    pub(crate) fn answer(
        &mut self,
        token: Option<&Token>,
        message: Message,
        now: Instant,
    ) -> Result<usize, ReasonCode> {
        let asker = token
            // At QoS 2 the client that asks again gets its PUBREC and nothing else, since its identifier is known.
            .filter(|token| !token.exactly_once)
            .filter(|token| self.is_open(token.session, token.connection))
            .map(|token| token.session);
        let source = Source {
            from: None,
            asker,
            answers: Answers::of(token, &self.sessions),
            recorded: false,
        };
        let recorded = self.recorder.count();
        let sessions = self.publish(Cow::Owned(message), source, now);
        let told = self.told_since(recorded);
        if let Some(token) = token.filter(|_| told > 0)
            && let Some(session) = self.linked(token.session, token.connection)
            && let Some(link) = &mut session.link
        {
            link.hold_back(token.sequence, told);
        }
        sessions
    }

    /// The end of a request.
    pub(crate) fn settle(&mut self, token: Token, reason: ReasonCode, text: Option<&str>) {
        if reason.is_error() && self.is_open(token.session, token.connection) {
            match reason {
                // Who decides what a client may do tells of it, and knows more.
                ReasonCode::NOT_AUTHORIZED => self.count_refused(Refused::Publish, reason),
                _ => self.refused(token.session, Refused::Publish, reason, text),
            }
        }
        self.acknowledge(token, reason, text, 0);
    }

    /// The batch to wait for where something was recorded since then.
    fn told_since(&self, recorded: u64) -> BatchNumber {
        if self.recorder.count() == recorded {
            0
        } else {
            self.recorder.current()
        }
    }

    fn acknowledge(
        &mut self,
        token: Token,
        reason: ReasonCode,
        text: Option<&str>,
        told: BatchNumber,
    ) {
        let Some(session) = session_at(&mut self.sessions, token.session) else {
            return;
        };
        let asked = (token.connection, token.sequence);
        if token.exactly_once {
            let recorder = &mut self.recorder;
            session.settle_received(token.packet_id, asked, reason, text, told, recorder);
        } else {
            session.answer(asked, reason, text, told);
        }
        self.flush_acks(token.session);
    }
}

/// The message as it goes into one session's queue. The last session gets the message itself.
pub(super) fn kept(message: &mut Cow<'_, Message>, last: bool, delivery: &Delivery<'_>) -> Message {
    if let Cow::Borrowed(borrowed) = message {
        *message = Cow::Owned(borrowed.detached());
    }
    let own = message.to_mut();
    let mut kept = if last { mem::take(own) } else { own.clone() };
    (kept.qos, kept.retain) = (delivery.qos, delivery.retain);
    kept
}
