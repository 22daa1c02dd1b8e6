//! Gauges and counters of the broker, and the state of one client.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;

use crate::{Origin, ProtocolVersion};

/// A snapshot of the broker's gauges and counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Clients that are connected.
    pub connections: usize,
    /// Those that use MQTT 3.1.1.
    pub connections_v311: usize,
    /// Sessions, connected or not.
    pub sessions: usize,
    /// Subscriptions of all sessions, without suspended ones.
    pub subscriptions: usize,
    /// Retained messages.
    pub retained: usize,
    /// Bytes of retained messages.
    pub retained_bytes: usize,
    /// Bytes of messages that wait for a client or its acknowledgement.
    pub queued_bytes: usize,
    /// Bytes of wills, packet ids of unfinished QoS 2 exchanges and topic aliases.
    pub state_bytes: usize,
    /// PUBLISHes that came from clients since the start.
    pub messages_in: u64,
    /// PUBLISHes sent to clients since the start, repetitions included.
    pub messages_out: u64,
    /// Messages dropped since the start: expired, beyond a queue's limit, too large for their
    /// client, or refused at QoS 0.
    pub dropped: u64,
    /// PUBLISHes refused since the start by the rate limit of their client or of all clients.
    pub throttled: u64,
    /// Connections that the broker ended since the start because of a protocol violation or a
    /// limit.
    pub disconnected: u64,
    /// Disconnected, empty sessions that were ended to make room for others.
    pub evicted: u64,
    /// Sockets closed at accept because of the limit on connections.
    pub turned_away: u64,
}

/// The current state of a client that has a session.
#[derive(Debug, Clone)]
pub struct ClientStatus {
    /// Its connection; none while it is disconnected.
    pub origin: Option<Origin>,
    /// The filters of its subscriptions, including suspended ones and the names of shared ones
    /// (section 4.8.2).
    pub filters: Vec<Bytes>,
}

/// What a session holds, for operators.
#[derive(Debug, Clone)]
pub struct SessionSummary {
    /// The client id.
    pub client: Arc<str>,
    /// The connection; none while the client is disconnected.
    pub connection: Option<ConnectionSummary>,
    /// The number of its subscriptions, without suspended ones.
    pub subscriptions: usize,
    /// Messages that wait for the client or its acknowledgement.
    pub queued: usize,
    /// The memory of these messages in bytes.
    pub queued_bytes: usize,
    /// Messages that were sent and are not acknowledged yet, of those that wait.
    pub in_flight: usize,
}

/// A connection, for operators.
#[derive(Debug, Clone)]
pub struct ConnectionSummary {
    /// Its numbers and identity.
    pub origin: Origin,
    /// The version of MQTT that the client uses.
    pub version: ProtocolVersion,
    /// The address of the client.
    pub address: IpAddr,
    /// When it began.
    pub since: Instant,
}
