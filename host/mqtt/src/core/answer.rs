//! What the embedder sends: messages to single connections, and answers and acknowledgements of
//! requests.

use std::{borrow::Cow, mem, time::Instant};

use statehouse_protocol::ConnectionId;

use super::{
    Core,
    publish::{RefusalCause, Source},
    requester::Requester,
    session_at,
};
use crate::{
    Message, ReasonCode, Refused, Token,
    barrier::Barrier,
    limits::work,
    router::SessionKey,
    session_queue::{Queued, Scope},
};

impl Core {
    /// Whether a message would wait for a client that may not receive it any more. It was decided
    /// before the rules changed, and may arrive after the queue was searched for such messages.
    fn is_forbidden_to_wait(&mut self, key: SessionKey, message: &Message) -> bool {
        let Some(session) = session_at(&mut self.sessions, key) else {
            return false;
        };
        let waits = !session.queue.is_queue_empty()
            || session.link.as_ref().is_some_and(|link| {
                link.unacknowledged >= link.window
                    || !link.resend.is_empty()
                    || !link.output.has_room(message.cost_bytes())
            });
        waits
            && (session.origin())
                .is_some_and(|origin| !self.access.may_receive(&origin, &message.topic))
    }

    /// Sends a message of the embedder to one connection only. Returns false if that connection is
    /// closed.
    pub(crate) fn deliver(
        &mut self,
        client: &str,
        connection: ConnectionId,
        mut message: Message,
        now: Instant,
    ) -> bool {
        let Some(key) = self.find(client, connection) else {
            return false;
        };
        let mut matches = mem::take(&mut self.matches);
        matches.clear();
        if let Some(session) = self.session(key) {
            if session.subscriptions().has_wildcards() {
                self.router.matches(&message.topic, &mut matches);
                self.work += work::NODE * matches.visited as u64;
                matches.sessions.retain(|(other, _)| *other == key);
            } else {
                let only = session.subscriptions().active(&message.topic);
                matches.sessions.extend(only.map(|it| (key, it)));
            }
        }
        let own = matches.sessions.iter().map(|(_, it)| it);
        if let Some(subscribed) = own.clone().map(|it| it.qos).max() {
            message.qos = message.qos.min(subscribed);
        }
        let subscription_ids = own.filter_map(|it| it.id).collect();
        self.matches = matches;
        if message.topic.len() > usize::from(u16::MAX) || self.is_forbidden_to_wait(key, &message) {
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
            // The log does not hold messages for one connection.
            true,
            now,
        );
        self.is_open(key, connection)
    }

    /// Routes a message of the embedder that answers the request of a token.
    pub(crate) fn answer(
        &mut self,
        token: Option<&Token>,
        message: Message,
        now: Instant,
    ) -> Result<usize, RefusalCause> {
        let has_room = self.change_log.has_room();
        let reply_session = token
            // At QoS 2 a client that repeats its request gets the PUBREC only, because the broker
            // knows the packet id. So the answer is recorded like any message, unless the log has
            // no room: then it is sent unrecorded rather than dropped.
            .filter(|token| !token.exactly_once || !has_room)
            .filter(|token| self.is_open(token.session, token.connection))
            .map(|token| token.session);
        let source = Source {
            reply_session,
            requester: Requester::of(token, &self.sessions),
            ..Source::default()
        };
        let recorded = self.change_log.count();
        let sessions = self.fan_out(Cow::Owned(message), source, has_room, now);
        let barrier = self.barrier_since(recorded);
        if let Some(token) = token.filter(|_| barrier != Barrier::NONE)
            && let Some(session) = self.linked(token.session, token.connection)
            && let Some(link) = &mut session.link
        {
            link.delay_ack(token.sequence, barrier);
        }
        sessions
    }

    /// Acknowledges a request. `is_reported`: the embedder has reported its refusal.
    pub(crate) fn acknowledge(
        &mut self,
        token: Token,
        reason: ReasonCode,
        text: Option<&str>,
        is_reported: bool,
    ) {
        if reason.is_error() && self.is_open(token.session, token.connection) {
            // The access control reports its own refusals, with more detail.
            match is_reported || reason == ReasonCode::NOT_AUTHORIZED {
                true => self.count_refused(Refused::Publish, reason),
                false => self.report_refusal(token.session, Refused::Publish, reason, text),
            }
        }
        self.acknowledge_after(token, reason, text, Barrier::NONE);
    }
}
