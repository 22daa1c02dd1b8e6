//! Clock readings as text: `wall:counter:node`.
//!
//! A text enters, a [`Reading`] leaves, and the other way round. The grammar is the protocol's, section 5:
//! exactly three parts; `wall` (64 bits) and `counter` (32 bits) in decimal digits, padded with zeros or
//! not; a node that is not empty. The order is wall, counter, node (bytes). Nothing here knows the time.

use std::cmp::Ordering;

use crate::{Hlc, Stamp};

/// A clock reading whose node is still part of the text it was read from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reading<'a> {
    /// Milliseconds since the epoch.
    pub wall: u64,
    /// Distinguishes readings of one millisecond.
    pub counter: u32,
    /// Who read the clock.
    pub node: &'a str,
}

impl Reading<'_> {
    /// The reading without its node.
    #[must_use]
    pub fn stamp(&self) -> Stamp {
        Stamp {
            wall: self.wall,
            counter: self.counter,
        }
    }

    /// The reading with a node of its own.
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

/// The text is not a clock reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed;

/// Reads `wall:counter:node`.
///
/// # Errors
///
/// [`Malformed`] for anything else: another number of parts, a sign, a number that does not fit, no node.
pub fn parse(text: &str) -> Result<Reading<'_>, Malformed> {
    let mut parts = text.split(':');
    let (Some(wall), Some(counter), Some(node), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err(Malformed);
    };
    if node.is_empty() {
        return Err(Malformed);
    }
    let wall = decimal(wall).ok_or(Malformed)?;
    let counter = decimal(counter)
        .and_then(|n| u32::try_from(n).ok())
        .ok_or(Malformed)?;
    Ok(Reading {
        wall,
        counter,
        node,
    })
}

/// Digits and nothing else; zeros in front are fine, a sign is not (`str::parse` would take `+5`).
fn decimal(digits: &str) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    digits.bytes().try_fold(0u64, |n, byte| {
        let digit = byte.is_ascii_digit().then(|| u64::from(byte - b'0'))?;
        n.checked_mul(10)?.checked_add(digit)
    })
}

/// Writes a reading padded, as clients compare it: 15 digits of wall, 5 of counter.
#[must_use]
pub fn format(wall: u64, counter: u32, node: &str) -> String {
    format!("{wall:015}:{counter:05}:{node}")
}

/// Wall, then counter, then the bytes of the node.
#[must_use]
pub fn compare(a: &Hlc, b: &Hlc) -> Ordering {
    Reading::from(a).cmp(&Reading::from(b))
}
