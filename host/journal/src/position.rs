//! The number of a record.

use std::fmt;

/// The number of a record: 1 for the first one ever, 0 for none. It never repeats and rises over
/// restarts, so "durable up to" is one number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position(pub u64);

impl Position {
    /// Before the first record.
    pub const NONE: Self = Self(0);
    /// Behind every record: for reading to the end.
    pub const END: Self = Self(u64::MAX);
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
