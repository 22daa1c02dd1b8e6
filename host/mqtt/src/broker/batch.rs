//! Operations of the embedder that run under one lock.

use std::{borrow::Cow, time::Instant};

use statehouse_protocol::ConnectionId;

use crate::{
    Message, ReasonCode, Token,
    core::{Core, RefusalCause, Source},
};

/// Operations under one lock of the broker.
pub struct Batch<'a> {
    pub(super) core: &'a mut Core,
    pub(super) now: Instant,
}

impl Batch<'_> {
    /// Publishes a message of the broker itself (No Local does not apply).
    ///
    /// Returns the number of sessions with a matching subscription plus the number of matching
    /// shared subscriptions (section 4.8.2). Returns 0 if a retained message of QoS 1 or 2 had no
    /// room.
    pub fn publish(&mut self, message: Message) -> usize {
        let source = Source::default();
        let sessions = self.core.publish(Cow::Owned(message), source, self.now);
        self.published(sessions)
    }

    /// Publishes the answer to the request of this token. Works like [`publish`](Self::publish),
    /// but records less.
    ///
    /// The answer precedes the request's acknowledgement in the same output, so a client that did
    /// not receive it sends the request again. If the answer cannot be sent at once, or the request
    /// came at QoS 2, it is recorded, and the acknowledgement waits for that record. Must be called
    /// before [`acknowledge`](Self::acknowledge).
    pub fn answer(&mut self, token: Option<&Token>, message: Message) -> usize {
        let sessions = self.core.answer(token, message, self.now);
        self.published(sessions)
    }

    fn published(&mut self, sessions: Result<usize, RefusalCause>) -> usize {
        self.core.checkpoint();
        sessions.unwrap_or_else(|_| {
            self.core.count_dropped();
            0
        })
    }

    /// Sends a message exactly once, only to this connection of this client, whether it subscribed
    /// or not.
    ///
    /// A matching subscription determines the QoS (never above the message's) and the Subscription
    /// Identifiers. When the connection ends, unsent messages are dropped. Unacknowledged messages
    /// are recorded by then at the latest and sent again to a resumed session. Returns false if the
    /// connection has ended.
    pub fn deliver(&mut self, client: &str, connection: ConnectionId, message: Message) -> bool {
        let is_open = self.core.deliver(client, connection, message, self.now);
        self.core.checkpoint();
        is_open
    }

    /// Sends the PUBACK or PUBREC of a request.
    ///
    /// It leaves after everything published before, except messages that wait for the client's own
    /// acknowledgements: these must not delay it (section 3.3.4). Acknowledgements leave in the
    /// order of the requests. A used token has no effect.
    pub fn acknowledge(&mut self, token: Token, reason: ReasonCode, text: Option<&str>) {
        self.core.acknowledge(token, reason, text, false);
        self.core.checkpoint();
    }

    /// Like [`acknowledge`](Self::acknowledge), for a request whose refusal the service has
    /// reported itself: the broker counts it, but does not report it to the access control.
    pub fn acknowledge_reported(&mut self, token: Token, reason: ReasonCode, text: Option<&str>) {
        self.core.acknowledge(token, reason, text, true);
        self.core.checkpoint();
    }

    /// Sends a DISCONNECT to this connection of this client and closes it. Does nothing if it has
    /// ended.
    pub fn disconnect(
        &mut self,
        client: &str,
        connection: ConnectionId,
        reason: ReasonCode,
        text: Option<&str>,
    ) {
        self.core.disconnect(client, connection, reason, text);
    }
}
