//! Figures of a server.

/// Figures of a server since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Requests that the state machine handled.
    pub requests: u64,
    /// Messages on a request topic that were not handled: malformed, expired, or refused.
    pub refused: u64,
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
    /// Keys at present.
    pub keys: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Watches at present.
    pub watches: u64,
    /// Milliseconds by which the system clock is behind the store's time.
    pub clock_behind_ms: u64,
    /// Whether writes are refused because the disk is full.
    pub disk_full: bool,
}
