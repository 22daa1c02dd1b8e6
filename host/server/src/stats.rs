//! Figures of a server.

/// Figures of a server since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Requests that the state machine handled.
    pub requests: u64,
    /// Messages on a request topic that were not handled.
    pub refused: Refused,
    /// Requests with a reserved response topic or a wildcard in it. Their clients are disconnected,
    /// if the transport can do so.
    pub kicked: u64,
    /// Notifications to watchers.
    pub notifications: u64,
    /// Policy calls that trapped, exceeded a budget or returned an invalid result.
    pub policy_failures: u64,
    /// Swaps of the active policy.
    pub swaps: u64,
    /// Redelivered requests, which were answered as before.
    pub duplicates: u64,
    /// Redelivered requests whose re-execution gave another answer.
    pub duplicates_different: u64,
    /// Redelivered requests of an earlier run whose notifications were sent again.
    pub renotified: u64,
    /// Redelivered requests of an earlier run whose notifications could not be sent again.
    pub not_renotified: u64,
    /// Requests evicted from the dedup table although they could still be redelivered: see
    /// `max_duplicate_bytes` and `max_duplicates`.
    pub forgotten: u64,
    /// Requests in the dedup table at present.
    pub remembered: u64,
    /// Keys at present, as `max_keys` counts them, including the policies' own.
    pub keys: u64,
    /// The bytes of keys, values and owners, as `max_bytes` counts them.
    pub bytes: u64,
    /// Watches at present.
    pub watches: u64,
    /// Milliseconds by which the system clock is behind the store's time.
    pub clock_behind_ms: u64,
    /// Whether writes are refused because the disk is full.
    pub disk_full: bool,
    /// Accounted bytes of remembered requests.
    pub remembered_bytes: u64,
    /// Accounted bytes of watches.
    pub watch_bytes: u64,
    /// Linear memory of the instances of policies that handle requests.
    pub policy_bytes: u64,
    /// Bytes of outputs that wait for the log.
    pub unreleased_bytes: u64,
    /// Bytes of requests that wait for their re-execution.
    pub sampled_bytes: u64,
    /// Requests that took longer than the threshold.
    pub slow: u64,
}

/// Messages on a request topic that no policy handled, by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refused {
    /// The request had expired.
    pub expired: u64,
    /// The protocol version is not supported.
    pub unsupported_version: u64,
    /// A request at QoS 0.
    pub qos_0: u64,
    /// The client may not publish to the response topic.
    pub response_topic: u64,
    /// A property that a request needs is missing or malformed, so there is no response either.
    pub malformed: u64,
    /// The connection was being ended.
    pub disconnected: u64,
}

impl Refused {
    /// All counts, by the names of their causes.
    pub fn causes(&self) -> [(&'static str, u64); 6] {
        [
            ("expired", self.expired),
            ("unsupported_version", self.unsupported_version),
            ("qos_0", self.qos_0),
            ("response_topic", self.response_topic),
            ("malformed", self.malformed),
            ("disconnected", self.disconnected),
        ]
    }

    /// The sum.
    pub fn all(&self) -> u64 {
        self.causes().iter().map(|(_, count)| count).sum()
    }
}
