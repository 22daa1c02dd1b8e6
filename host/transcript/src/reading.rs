//! A clock reading `wall:counter:node` (the protocol, section 5).

use std::fmt;

/// Ordered by wall, counter, node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reading {
    /// Milliseconds since 1970.
    pub wall_ms: u64,
    /// Events within one millisecond.
    pub counter: u32,
    /// The name of the clock.
    pub node: String,
}

impl Reading {
    /// The first reading of a millisecond.
    pub fn at(wall_ms: u64, node: &str) -> Self {
        Self {
            wall_ms,
            counter: 0,
            node: node.into(),
        }
    }

    /// The same reading with an offset on its wall.
    #[must_use]
    pub fn moved(&self, offset_ms: i64) -> Self {
        Self {
            wall_ms: self.wall_ms.saturating_add_signed(offset_ms),
            ..self.clone()
        }
    }

    /// Parses exactly the form that a store writes: 15 digits, 5 digits, a node.
    pub fn parse(text: &str) -> Option<Self> {
        let digits =
            |part: &str, n| part.len() == n && part.bytes().all(|byte| byte.is_ascii_digit());
        let (wall, rest) = text.split_once(':')?;
        let (counter, node) = rest.split_once(':')?;
        if !digits(wall, 15) || !digits(counter, 5) || node.is_empty() || node.contains(':') {
            return None;
        }
        Some(Self {
            wall_ms: wall.parse().ok()?,
            counter: counter.parse().ok()?,
            node: node.into(),
        })
    }
}

impl fmt::Display for Reading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:015}:{:05}:{}", self.wall_ms, self.counter, self.node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_accepts_only_padded_readings() {
        let reading = Reading::parse("001696374425000:00001:StateStore").unwrap();
        assert_eq!(reading.to_string(), "001696374425000:00001:StateStore");
        assert!(reading.moved(-1) < reading && reading.moved(1) > reading);
        for other in [
            "1696374425000:1:a",
            "001696374425000:00001:",
            "001696374425000:00001",
            "001696374425000:00001:a:b",
            "+01696374425000:00001:a",
        ] {
            assert_eq!(Reading::parse(other), None, "{other}");
        }
    }
}
