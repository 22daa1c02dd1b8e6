//! The handle of the embedder.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
};

use crate::{Limits, Message, Origin, ReasonCode, Service, Stats, Token};

/// How a broker is to run.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The bounds.
    pub limits: Limits,
}

/// An MQTT 5 broker; clones are handles to the same one.
#[derive(Clone)]
pub struct Broker(Arc<dyn Service>);

impl Broker {
    /// A broker without connections.
    #[must_use]
    pub fn new(options: Options, service: Arc<dyn Service>) -> Self {
        _ = options;
        Self(service)
    }

    /// Accepts connections until [`shutdown`](Self::shutdown), each in tasks of its own.
    pub async fn listen(&self, listener: TcpListener) -> io::Result<()> {
        _ = listener;
        Ok(())
    }

    /// Serves one connection over any byte stream, to its end.
    pub async fn serve_connection<S>(&self, stream: S, peer: SocketAddr)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        _ = (stream, peer, &self.0);
    }

    /// Ends sessions and sends wills when it is time; sleeps until the next one. Runs until
    /// [`shutdown`](Self::shutdown).
    pub async fn run_timers(&self) {}

    /// One lock, many operations: clients see everything of the closure in this order. The closure may not call the
    /// broker itself.
    pub fn batch<R>(&self, f: impl FnOnce(&mut Batch<'_>) -> R) -> R {
        f(&mut Batch { broker: self })
    }

    /// Gauges and counters.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats::default()
    }

    /// DISCONNECT 0x8B to everyone, at most `grace` for it to arrive, then closes.
    pub async fn shutdown(&self, grace: Duration) {
        _ = grace;
    }
}

/// Operations under one lock of the broker.
pub struct Batch<'a> {
    broker: &'a Broker,
}

impl Batch<'_> {
    /// Publishes as the broker itself (No Local does not apply). Returns the number of sessions it went to.
    pub fn publish(&mut self, message: Message) -> usize {
        _ = (message, self.broker);
        0
    }

    /// Sends to this connection of this client only, subscribed or not, exactly once. A matching subscription lends its
    /// QoS (never above the message's) and Subscription Identifiers. What is unsent when the connection ends is dropped,
    /// what is unacknowledged is re-sent to a resumed session. False where the connection has ended.
    pub fn deliver(&mut self, to: &Origin, message: Message) -> bool {
        _ = (to, message);
        false
    }

    /// Sends the PUBACK or PUBREC of a request, after everything published before. A used token does nothing.
    pub fn settle(&mut self, token: Token, reason: ReasonCode, text: Option<&str>) {
        _ = (token, reason, text);
    }

    /// Disconnects this connection of this client with a DISCONNECT; nothing where it has ended.
    pub fn disconnect(&mut self, who: &Origin, reason: ReasonCode, text: Option<&str>) {
        _ = (who, reason, text);
    }
}
