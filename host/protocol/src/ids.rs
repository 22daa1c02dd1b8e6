//! Numbers of sessions, connections and log records.

use core::fmt;

/// The number of an MQTT session. It outlives connections and never repeats, even across restarts:
/// requests that differ in it are different requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

/// The number of a connection. It never repeats, even across restarts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub u64);

/// The number of a record: 1 for the first one ever, 0 for none. Numbers never repeat and increase
/// across restarts, so "durable up to" is one number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LogPosition(pub u64);

impl SessionId {
    /// A number that no session has.
    pub const NONE: Self = Self(0);

    /// The connection of a session whose connections are unknown, as behind a foreign broker: one
    /// permanent number for both.
    #[must_use]
    pub fn only_connection(self) -> ConnectionId {
        ConnectionId(self.0)
    }

    /// The next number.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl ConnectionId {
    /// A number that no connection has.
    pub const NONE: Self = Self(0);

    /// The next number.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl LogPosition {
    /// The position before the first record.
    pub const NONE: Self = Self(0);
    /// The position after every record, to read to the end.
    pub const END: Self = Self(u64::MAX);
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for LogPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
