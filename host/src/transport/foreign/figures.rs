//! What a connection to a foreign broker can be judged by.

/// Sums since the start, and what there is at the moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Whether there is a connection.
    pub connected: bool,
    /// Connections that were made.
    pub connections: u64,
    /// Answers and notifications that the broker has not taken.
    pub outstanding: u64,
    /// These in bytes.
    pub outstanding_bytes: u64,
    /// Messages of the broker that are not acknowledged.
    pub unacknowledged: u64,
    /// Messages on a request topic that were no MQTT messages.
    pub malformed: u64,
    /// Answers and notifications that the broker refused to take.
    pub refused: u64,
    /// Notifications that nobody had subscribed to.
    pub unheard: u64,
    /// Notifications that were lost because the broker was away for too long.
    pub lost: u64,
    /// Messages at QoS 0 that came while too much was on its way out, and were dropped.
    pub dropped: u64,
}
