//! Positions of log records.

use core::fmt;

/// The number of a record: 1 for the first one ever, 0 for none. Numbers never repeat and increase
/// across restarts, so "durable up to" is one number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LogPosition(pub u64);

impl LogPosition {
    /// The position before the first record.
    pub const NONE: Self = Self(0);
    /// The position after every record, to read to the end.
    pub const END: Self = Self(u64::MAX);
}

impl fmt::Display for LogPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
