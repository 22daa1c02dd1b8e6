//! The metrics of the connection to a foreign broker.

/// Sums since the start, and current values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Whether there is a connection.
    pub connected: bool,
    /// Connections made.
    pub connections: u64,
    /// Responses and notifications without a PUBACK of the broker.
    pub outstanding: u64,
    /// The same in bytes.
    pub outstanding_bytes: u64,
    /// Messages of the broker without a PUBACK of the store.
    pub unacknowledged: u64,
    /// Requests dropped because their properties break a rule of MQTT.
    pub malformed: u64,
    /// Requests dropped because their Response Topic has a wildcard or too many levels. The store
    /// counts those with a Response Topic of its own.
    pub kicked: u64,
    /// Responses and notifications that the broker refused.
    pub refused: u64,
    /// Notifications without a subscriber.
    pub unheard: u64,
    /// Notifications lost because too many waited for a PUBACK of the broker.
    pub lost: u64,
    /// Messages at QoS 0 dropped because there was too much output.
    pub dropped: u64,
}
