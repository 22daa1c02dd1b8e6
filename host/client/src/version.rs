//! Versions: readings of a hybrid logical clock (Kulkarni et al. 2014) as `wall:counter:node`.

use std::fmt;
use std::str::FromStr;

/// A version of a value, or a fencing token. Both are clock readings (the protocol, section 5).
///
/// Versions are ordered by wall clock, then counter, then node. They are printed with padding and
/// parsed with or without it:
///
/// ```
/// # use statehouse_client::Version;
/// let version: Version = "1696374425000:1:StateStore".parse().unwrap();
/// assert_eq!(version.to_string(), "001696374425000:00001:StateStore");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    // The derived order compares the fields in this order.
    wall_ms: u64,
    counter: u32,
    node: Box<str>,
}

/// The text is not a version.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a version: write wall:counter:node, such as 001696374425000:00001:StateStore")]
pub struct VersionError;

impl Version {
    /// Creates a version. Fails if the node is empty or contains a `:`. It may have any length: a
    /// response can contain a fencing token of another client, which the store pads.
    pub(crate) fn new(wall_ms: u64, counter: u32, node: &str) -> Result<Self, VersionError> {
        if node.is_empty() || node.contains(':') {
            return Err(VersionError);
        }
        Ok(Self {
            wall_ms,
            counter,
            node: node.into(),
        })
    }

    /// Milliseconds since 1970 by the clock that made this version.
    #[must_use]
    pub fn wall_ms(&self) -> u64 {
        self.wall_ms
    }

    /// Distinguishes readings of the same millisecond.
    #[must_use]
    pub fn counter(&self) -> u32 {
        self.counter
    }

    /// The name of the clock that made this version.
    #[must_use]
    pub fn node(&self) -> &str {
        &self.node
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:015}:{:05}:{}", self.wall_ms, self.counter, self.node)
    }
}

impl FromStr for Version {
    type Err = VersionError;

    fn from_str(text: &str) -> Result<Self, VersionError> {
        let mut parts = text.splitn(3, ':');
        let (Some(wall), Some(counter), Some(node)) = (parts.next(), parts.next(), parts.next())
        else {
            return Err(VersionError);
        };
        // Rust accepts a leading `+`, the protocol does not.
        let digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
        if !digits(wall) || !digits(counter) {
            return Err(VersionError);
        }
        let wall_ms = wall.parse().map_err(|_| VersionError)?;
        let counter = counter.parse().map_err(|_| VersionError)?;
        Self::new(wall_ms, counter, node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(text: &str) -> Version {
        text.parse().unwrap()
    }

    #[test]
    fn padded_and_unpadded_are_the_same() {
        let short = version("1696374425000:1:StateStore");
        assert_eq!(short, version("001696374425000:00001:StateStore"));
        assert_eq!(short.to_string(), "001696374425000:00001:StateStore");
        assert_eq!(short.wall_ms(), 1_696_374_425_000);
        assert_eq!(short.counter(), 1);
        assert_eq!(short.node(), "StateStore");
    }

    #[test]
    fn largest_numbers_are_not_truncated() {
        let text = format!("{}:{}:n", u64::MAX, u32::MAX);
        assert_eq!(version(&text).to_string(), text);
    }

    #[test]
    fn order_is_wall_then_counter_then_node() {
        assert!(version("9:0:b") < version("10:0:a"));
        assert!(version("10:9:b") < version("10:10:a"));
        assert!(version("10:1:a") < version("10:1:b"));
    }

    #[test]
    fn invalid_versions_are_rejected() {
        for text in [
            "",
            "1",
            "1:2",
            "1:2:",
            "1:2:a:b",
            ":2:n",
            "1::n",
            "x:2:n",
            "1:x:n",
            "+1:2:n",
            "1:+2:n",
            "-1:2:n",
            " 1:2:n",
            "18446744073709551616:2:n",
            "1:4294967296:n",
        ] {
            assert_eq!(text.parse::<Version>(), Err(VersionError), "{text}");
        }
    }
}
