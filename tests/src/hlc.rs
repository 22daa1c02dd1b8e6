//! A clock reading `wall:counter:node`, as the protocol, section 5, writes it.

use std::{
    fmt,
    time::{SystemTime, UNIX_EPOCH},
};

/// Ordered by wall, counter, node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Hlc {
    /// Milliseconds since 1970.
    pub wall_ms: u64,
    /// Events within one millisecond.
    pub counter: u32,
    /// The node that read the clock.
    pub node: String,
}

impl Hlc {
    /// This machine's clock, moved by `offset_ms`.
    pub fn now(offset_ms: i64) -> Hlc {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let now_ms = u64::try_from(now.as_millis()).unwrap();
        Hlc {
            wall_ms: now_ms.saturating_add_signed(offset_ms),
            counter: 0,
            node: "tests".into(),
        }
    }

    /// The same reading with its wall clock moved by `offset_ms`.
    #[must_use]
    pub fn moved(&self, offset_ms: i64) -> Hlc {
        Hlc {
            wall_ms: self.wall_ms.saturating_add_signed(offset_ms),
            ..self.clone()
        }
    }

    /// Parses exactly the format that the store must write: 15 digits, 5 digits, a node.
    pub fn parse_padded(text: &str) -> Result<Hlc, String> {
        let parts: Vec<&str> = text.split(':').collect();
        let digits =
            |part: &str, n| part.len() == n && part.bytes().all(|byte| byte.is_ascii_digit());
        match parts[..] {
            [wall, counter, node] if digits(wall, 15) && digits(counter, 5) && !node.is_empty() => {
                Ok(Hlc {
                    wall_ms: wall.parse().unwrap(),
                    counter: counter.parse().unwrap(),
                    node: node.into(),
                })
            }
            _ => Err(format!("{text:?} is not a padded clock reading")),
        }
    }
}

impl fmt::Display for Hlc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:015}:{:05}:{}", self.wall_ms, self.counter, self.node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_padded_roundtrips() {
        let text = "001696374425000:00001:StateStore";
        let hlc = Hlc::parse_padded(text).unwrap();
        assert_eq!(hlc.to_string(), text);
        for bad in [
            "1696374425000:1:StateStore",
            "001696374425000:00001:",
            "001696374425000:00001",
            "001696374425000:00001:a:b",
            "+01696374425000:00001:a",
        ] {
            assert!(Hlc::parse_padded(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn readings_order_by_wall_counter_node() {
        let hlc = |w, c, n: &str| Hlc {
            wall_ms: w,
            counter: c,
            node: n.into(),
        };
        assert!(hlc(2, 0, "a") > hlc(1, 9, "b"));
        assert!(hlc(1, 2, "a") > hlc(1, 1, "b"));
        assert!(hlc(1, 1, "b") > hlc(1, 1, "a"));
    }
}
