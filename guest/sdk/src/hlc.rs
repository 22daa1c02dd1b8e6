//! HLC timestamps as text: `wall:counter:node`.
//!
//! The grammar is that of the protocol, section 5: exactly three parts; `wall` (64 bits) and
//! `counter` (32 bits) in decimal digits, with or without leading zeros; a node that is not empty.
//! Timestamps are ordered by wall, counter and the bytes of the node. This module never reads a
//! clock.

use std::cmp::Ordering;

use crate::resp::leading_decimal;
use crate::{Hlc, Stamp};

/// A timestamp whose node borrows from the parsed text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reading<'a> {
    /// Milliseconds since the epoch.
    pub wall: u64,
    /// Orders timestamps of the same millisecond.
    pub counter: u32,
    /// The node that produced the timestamp.
    pub node: &'a str,
}

impl Reading<'_> {
    /// The timestamp without its node.
    #[must_use]
    pub fn stamp(&self) -> Stamp {
        Stamp {
            wall: self.wall,
            counter: self.counter,
        }
    }

    /// The timestamp with an owned node.
    #[must_use]
    pub fn to_hlc(&self) -> Hlc {
        Hlc {
            wall: self.wall,
            counter: self.counter,
            node: self.node.to_owned(),
        }
    }
}

impl<'a> From<&'a Hlc> for Reading<'a> {
    fn from(hlc: &'a Hlc) -> Self {
        Self {
            wall: hlc.wall,
            counter: hlc.counter,
            node: &hlc.node,
        }
    }
}

/// The text is not a timestamp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed;

/// Parses `wall:counter:node`.
///
/// # Errors
///
/// [`Malformed`] for anything else: another number of parts, a sign, a number that is too large, an
/// empty node.
pub fn parse(text: &str) -> Result<Reading<'_>, Malformed> {
    let (wall, rest) = part(text.as_bytes())?;
    let (counter, node) = part(rest)?;
    if node.is_empty() || node.contains(&b':') {
        return Err(Malformed);
    }
    // The text before the node is ASCII, so the node starts at a character boundary.
    let node = text.get(text.len() - node.len()..).ok_or(Malformed)?;
    let counter = u32::try_from(counter).map_err(|_| Malformed)?;
    Ok(Reading {
        wall,
        counter,
        node,
    })
}

/// Parses a number and its colon; returns the number and the rest.
fn part(bytes: &[u8]) -> Result<(u64, &[u8]), Malformed> {
    match leading_decimal(bytes) {
        Some((number, [b':', rest @ ..])) => Ok((number, rest)),
        _ => Err(Malformed),
    }
}

/// Formats a timestamp with the padding that clients compare: 15 digits of wall, 5 of counter.
#[must_use]
pub fn format(wall: u64, counter: u32, node: &str) -> String {
    format!("{wall:015}:{counter:05}:{node}")
}

/// Compares by wall, then counter, then the bytes of the node.
#[must_use]
pub fn compare(a: &Hlc, b: &Hlc) -> Ordering {
    Reading::from(a).cmp(&Reading::from(b))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn readings_are_padded_or_not() {
        let expected = Ok(Reading {
            wall: 1_696_374_425_000,
            counter: 1,
            node: "StateStore",
        });
        for text in [
            "1696374425000:1:StateStore",
            "001696374425000:00001:StateStore",
            "000000000000000000000000001696374425000:000000000000001:StateStore",
        ] {
            assert_eq!(parse(text), expected, "{text}");
        }
        let largest = Reading {
            wall: u64::MAX,
            counter: u32::MAX,
            node: "n",
        };
        assert_eq!(parse("18446744073709551615:4294967295:n"), Ok(largest));
    }

    #[test]
    fn anything_else_is_malformed() {
        for text in [
            "",
            ":",
            "::",
            ":::",
            "1",
            "1:2",
            "1:2:",
            "1:2:a:",
            "1:2:a:b",
            ":2:a",
            "1::a",
            "+1:2:a",
            "1:+2:a",
            "-1:2:a",
            "1:-2:a",
            " 1:2:a",
            "1 :2:a",
            "1:2 :a",
            "1.0:2:a",
            "0x1:2:a",
            "1_000:2:a",
            "١:2:a",
            "18446744073709551616:2:a",
            "1:4294967296:a",
            "99999999999999999999999:2:a",
        ] {
            assert_eq!(parse(text), Err(Malformed), "{text:?}");
        }
    }

    #[test]
    fn written_padded() {
        let padded = format(1_696_374_425_000, 1, "StateStore");
        assert_eq!(padded, "001696374425000:00001:StateStore");
        let largest = format(u64::MAX, u32::MAX, "n");
        assert_eq!(largest, "18446744073709551615:4294967295:n");
    }

    #[test]
    fn ordered_by_wall_then_counter_then_node() {
        let hlc = |wall, counter, node: &str| Hlc {
            wall,
            counter,
            node: node.to_owned(),
        };
        let ordered = [
            hlc(1, 9, "z"),
            hlc(2, 0, "z"),
            hlc(2, 1, "A"),
            hlc(2, 1, "a"),
            hlc(2, 1, "aa"),
            hlc(10, 0, "a"),
        ];
        for (i, a) in ordered.iter().enumerate() {
            for (j, b) in ordered.iter().enumerate() {
                assert_eq!(compare(a, b), i.cmp(&j), "{a:?} {b:?}");
            }
        }
    }

    proptest! {
        #[test]
        fn a_formatted_timestamp_parses_back(wall: u64, counter: u32, node in "[^:]{1,20}") {
            let text = format(wall, counter, &node);
            prop_assert_eq!(parse(&text), Ok(Reading { wall, counter, node: &node }));
        }

        #[test]
        fn no_text_panics(text in "[0-9:+a ]{0,40}") {
            if let Ok(reading) = parse(&text) {
                let again = format(reading.wall, reading.counter, reading.node);
                prop_assert_eq!(parse(&again), Ok(reading));
            }
        }
    }
}
