//! What the broker counts, and what it knows of one client.

use bytes::Bytes;

use crate::Origin;

/// A snapshot of the broker's gauges and counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Clients that are connected.
    pub connections: usize,
    /// Sessions, connected or not.
    pub sessions: usize,
    /// Subscriptions of all sessions.
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
    /// Messages dropped since the start: expired, over a queue's bound, too large for their client, refused at QoS 0.
    pub dropped: u64,
    /// PUBLISHes refused since the start because their client, or all together, had sent too many in a second.
    pub throttled: u64,
    /// Connections ended by the broker for a violation of the protocol or a bound.
    pub disconnected: u64,
    /// Sessions that were absent and empty, and ended to make room for others.
    pub evicted: u64,
    /// Sockets closed at accept because there were too many.
    pub turned_away: u64,
}

/// A client that has a session, as it is now.
#[derive(Debug, Clone)]
pub struct Standing {
    /// Its connection; none while it is away.
    pub origin: Option<Origin>,
    /// What it has subscribed to, with the names of groups (section 4.8.2).
    pub filters: Vec<Bytes>,
}
