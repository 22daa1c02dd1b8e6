//! What a server counts.

/// What a server has done since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Requests that a policy answered.
    pub requests: u64,
    /// Messages on a request topic that were none, refused or dropped.
    pub refused: u64,
    /// Requests with a forbidden response topic: their clients are disconnected, where the transport can.
    pub kicked: u64,
    /// Notifications handed to watchers.
    pub notifications: u64,
    /// Policy calls that trapped, ran out of budget or returned nonsense.
    pub policy_failures: u64,
    /// Times that another policy became the active one.
    pub swaps: u64,
    /// Requests that came again and were answered as before.
    pub duplicates: u64,
    /// Those of them where running the policy again gave another answer.
    pub duplicates_different: u64,
    /// Those of them that an earlier run handled and whose notifications were sent again.
    pub told_again: u64,
    /// Those of them whose notifications an earlier run may not have sent, and that could not be said again.
    pub not_told_again: u64,
    /// Requests that were forgotten although their session lives and might send them again, or behind a foreign broker
    /// before their time: see `max_duplicate_bytes` and `max_duplicates`.
    pub forgotten: u64,
    /// Requests that are remembered at the moment.
    pub remembered: u64,
    /// Keys at the moment.
    pub keys: u64,
    /// What they weigh, in bytes.
    pub bytes: u64,
    /// Watches at the moment.
    pub watches: u64,
    /// How far the system clock is behind the store's time.
    pub clock_behind_ms: u64,
    /// Whether writes are refused at the moment, since the disk has no room for them.
    pub disk_full: bool,
}
