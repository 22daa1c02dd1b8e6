//! Lists the clients of the embedded broker and disconnects them, for `statehouse clients`.

use std::cmp::Reverse;
use std::net::IpAddr;

use hyper::StatusCode;
use serde::{Deserialize, Serialize};
use statehouse_core::clock::wall_ms;
use statehouse_mqtt::{Broker, SessionSummary};
use statehouse_protocol::Shown;

use super::Sources;
use super::answer::Refusal;
use crate::time::millis;
use statehouse_transport::embedded::peer;

/// The clients of a store.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Clients {
    /// Clients that are connected.
    pub(crate) connected: u64,
    /// Sessions of clients that are not connected.
    pub(crate) disconnected: u64,
    /// The system time of this document, in milliseconds since 1970; none from earlier programs.
    pub(crate) time_ms: Option<u64>,
    /// Connected clients first, those with the most queued bytes first.
    pub(crate) clients: Vec<Client>,
}

/// A client with a session.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Client {
    pub(crate) client: String,
    /// The user; none if the client is anonymous or not connected.
    pub(crate) user: Option<Box<str>>,
    /// The address; none if it is not connected.
    pub(crate) address: Option<IpAddr>,
    /// The version of MQTT, `3.1.1` or `5`; none if it is not connected.
    pub(crate) mqtt: Option<String>,
    /// When the connection began by the system clock, in milliseconds since 1970.
    pub(crate) since_ms: Option<u64>,
    pub(crate) subscriptions: u64,
    /// The number of watched keys.
    pub(crate) watches: u64,
    /// The number of locks that it holds, as [`lock_counts`](statehouse_server::Server::lock_counts)
    /// finds them.
    #[serde(default)]
    pub(crate) locks: u64,
    /// Messages that wait for the client or its acknowledgement.
    pub(crate) queued: u64,
    /// The memory of these messages in bytes.
    pub(crate) queued_bytes: u64,
    /// Messages that were sent and are not acknowledged yet, of those that wait.
    pub(crate) in_flight: u64,
}

/// At most `count` clients.
pub(super) fn list(sources: &Sources, count: usize) -> Result<Clients, Refusal> {
    let mut sessions = broker(sources)?.session_summaries();
    let connected = sessions.iter().filter(|it| it.connection.is_some()).count();
    let disconnected = sessions.len() - connected;
    sessions.sort_by(|a, b| order(a).cmp(&order(b)));
    sessions.truncate(count);
    let peers = sessions.iter().map(|it| it.connection.as_ref());
    let peers: Vec<_> = peers.map(|it| it.map(|it| peer(&it.origin))).collect();
    let known: Vec<_> = peers.iter().flatten().cloned().collect();
    let mut watches = sources.server.watch_counts(&known).into_iter();
    let mut of = |is_connected| match is_connected {
        true => watches.next().unwrap_or(0) as u64,
        false => 0,
    };
    let locks = (sources.server).lock_counts(sessions.iter().map(|it| &*it.client));
    let clients = sessions.iter().zip(&peers).map(|(session, peer)| {
        let locks = locks.get(&*session.client).copied().unwrap_or(0);
        client(session, of(peer.is_some()), locks)
    });
    Ok(Clients {
        connected: connected as u64,
        disconnected: disconnected as u64,
        time_ms: Some(wall_ms()),
        clients: clients.collect(),
    })
}

fn order(session: &SessionSummary) -> (bool, Reverse<usize>, &str) {
    let is_absent = session.connection.is_none();
    (is_absent, Reverse(session.queued_bytes), &session.client)
}

fn client(session: &SessionSummary, watches: u64, locks: u64) -> Client {
    let connection = session.connection.as_ref();
    Client {
        client: session.client.to_string(),
        user: connection.and_then(|it| it.origin.identity.user.clone()),
        address: connection.map(|it| it.address),
        mqtt: connection.map(|it| it.version.name().to_owned()),
        since_ms: connection.map(|it| wall_ms().saturating_sub(millis(it.since.elapsed()))),
        subscriptions: session.subscriptions as u64,
        watches,
        locks,
        queued: session.queued as u64,
        queued_bytes: session.queued_bytes as u64,
        in_flight: session.in_flight as u64,
    }
}

/// Ends the connection of a client.
pub(super) fn kick(sources: &Sources, client: &str) -> Result<(), Refusal> {
    match broker(sources)?.kick(client) {
        true => Ok(()),
        false => {
            let client = Shown::whole(client.as_bytes()).on_one_line();
            let error = format!("no client with the id {client} is connected");
            Err(Refusal::new(StatusCode::NOT_FOUND, error))
        }
    }
}

fn broker(sources: &Sources) -> Result<&Broker, Refusal> {
    sources.broker.as_ref().ok_or_else(|| {
        let error = "the clients are connected to a foreign broker: ask that one";
        Refusal::new(StatusCode::CONFLICT, error)
    })
}
