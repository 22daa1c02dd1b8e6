//! The trace context of a request (W3C Trace Context level 2), in the user property `traceparent`.
//!
//! The context that a response carries must not depend on a clock or on chance, because a
//! redelivered request gets the same response.

use std::fmt;
use std::time::Instant;

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::clock::Stamp;

/// The user property with a trace context, in both directions.
pub const TRACEPARENT: &str = "traceparent";

/// The length of the text in version 00. Later versions may append to it.
const TEXT_BYTES: usize = 55;

/// The flags that this version of the specification defines: sampled, and random trace id.
const SAMPLED: u8 = 0x01;
const RANDOM: u8 = 0x02;

/// A span, as other processes name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceParent {
    /// The trace.
    pub trace_id: [u8; 16],
    /// The span.
    pub span_id: [u8; 8],
    flags: u8,
}

impl TraceParent {
    /// Parses the text. A malformed one is none at all, as the specification demands.
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Self> {
        let (fixed, rest) = text.split_at_checked(TEXT_BYTES)?;
        let separated = [2, 35, 52].iter().all(|at| fixed[*at] == b'-');
        let [version] = hex(&fixed[..2])?;
        let ends = match version {
            0 => rest.is_empty(),
            0xff => false,
            _ => rest.first().is_none_or(|it| *it == b'-'),
        };
        let [flags] = hex(&fixed[53..])?;
        let parsed = Self {
            trace_id: hex(&fixed[3..35])?,
            span_id: hex(&fixed[36..52])?,
            flags: flags & (SAMPLED | RANDOM),
        };
        let is_valid = parsed.trace_id != [0; 16] && parsed.span_id != [0; 8];
        (separated && ends && is_valid).then_some(parsed)
    }

    /// Whether the process that sent it records this trace.
    #[must_use]
    pub fn is_sampled(&self) -> bool {
        self.flags & SAMPLED != 0
    }

    /// The span of a request below this one. A redelivery has the same correlation data, and its
    /// response the same version, so it gets the span of the original.
    #[must_use]
    pub fn of_request(&self, correlation_data: &[u8], version: Option<Stamp>) -> Self {
        let mut seed = [0; 36];
        seed[..16].copy_from_slice(&self.trace_id);
        seed[16..24].copy_from_slice(&self.span_id);
        if let Some(version) = version {
            seed[24..32].copy_from_slice(&version.wall.to_le_bytes());
            seed[32..].copy_from_slice(&version.counter.to_le_bytes());
        }
        let id = xxh3_64_with_seed(correlation_data, xxh3_64(&seed));
        Self {
            // Zero is not the id of a span.
            span_id: id.max(1).to_be_bytes(),
            ..*self
        }
    }
}

impl fmt::Display for TraceParent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let trace_id = u128::from_be_bytes(self.trace_id);
        let span_id = u64::from_be_bytes(self.span_id);
        write!(f, "00-{trace_id:032x}-{span_id:016x}-{:02x}", self.flags)
    }
}

/// Digits of the specification: lower case only.
fn hex<const N: usize>(digits: &[u8]) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    let digit = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(bytes)
}

/// Which requests are traced. Chance and the clock come from the embedder; no decision depends on
/// them.
#[derive(Clone, Copy, Debug)]
pub struct Sampling {
    /// The highest random number with which a request without a trace context is traced; none is
    /// traced if it is absent.
    hits_max: Option<u64>,
    random: fn() -> u64,
    pub(crate) clock: fn() -> Instant,
}

impl Sampling {
    /// Traces this share of the requests without a trace context, from 0 to 1. `random` returns
    /// evenly distributed numbers.
    #[must_use]
    pub fn new(ratio: f64, random: fn() -> u64, clock: fn() -> Instant) -> Self {
        Self {
            // The conversion saturates, so 1 is every number.
            hits_max: (ratio > 0.0).then_some((ratio * u64::MAX as f64) as u64),
            random,
            clock,
        }
    }

    /// Whether to trace a request: the sender of a trace context decides, otherwise chance.
    pub(crate) fn traces(&self, parent: Option<TraceParent>) -> bool {
        match parent {
            Some(parent) => parent.is_sampled(),
            None => self.hits_max.is_some_and(|max| (self.random)() <= max),
        }
    }
}

/// The times of a traced request within the state machine, and its place in the trace.
#[derive(Clone, Copy, Debug)]
pub struct Traced {
    /// The span of the client, if the request has a trace context.
    pub parent: Option<TraceParent>,
    /// The span that the response and the notifications of the request name, if it has a trace
    /// context.
    pub span: Option<TraceParent>,
    /// When the policy was called.
    pub called: Instant,
    /// When it had decided.
    pub decided: Instant,
    /// When the record of the request was appended to the log.
    pub appended: Instant,
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn parse(text: &str) -> Option<TraceParent> {
        TraceParent::parse(text.as_bytes())
    }

    #[test]
    fn a_trace_context_is_parsed_and_shown() {
        let parsed = parse(TEXT).unwrap();
        assert_eq!(parsed.trace_id[..2], [0x4b, 0xf9]);
        assert_eq!(parsed.span_id[6..], [0x02, 0xb7]);
        assert!(parsed.is_sampled());
        assert_eq!(parsed.to_string(), TEXT);
        let unsampled = parse(&TEXT.replace("-01", "-00")).unwrap();
        assert!(!unsampled.is_sampled());
        // Flags that are not defined yet are not forwarded.
        let flags = parse(&TEXT.replace("-01", "-ff")).unwrap();
        assert!(flags.to_string().ends_with("-03"), "{flags}");
        // A later version may have more fields.
        let later = TEXT.replace("00-4", "cc-4");
        assert_eq!(parse(&later), Some(parsed));
        assert_eq!(parse(&format!("{later}-more")), Some(parsed));
    }

    #[test]
    fn a_malformed_trace_context_is_none() {
        let zero_trace = format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32));
        let zero_span = format!("00-4bf92f3577b34da6a3ce929d0e0e4736-{}-01", "0".repeat(16));
        for wrong in [
            "",
            "00",
            &TEXT[..54],
            &format!("{TEXT}-more"),
            &format!("{TEXT}{}", "0".repeat(60_000)),
            &TEXT.replace("00-4", "cc-4").replace("-01", "-01more"),
            &TEXT.replace("00-4", "ff-4"),
            &TEXT.replace("4bf9", "4BF9"),
            &TEXT.replace("4bf9", "4bg9"),
            &TEXT.replace('-', "_"),
            &TEXT.replace("-01", "-0é"),
            &zero_trace,
            &zero_span,
        ] {
            assert_eq!(parse(wrong), None, "{wrong:.80}");
        }
    }

    #[test]
    fn sender_of_a_trace_context_decides_and_otherwise_chance() {
        let sampled = parse(TEXT);
        let unsampled = parse(&TEXT.replace("-01", "-00"));
        let traces =
            |ratio, random, parent| Sampling::new(ratio, random, Instant::now).traces(parent);
        for ratio in [0.0, 0.25, 1.0] {
            for random in [|| 0, || u64::MAX] {
                assert!(traces(ratio, random, sampled));
                assert!(!traces(ratio, random, unsampled));
            }
        }
        assert!(!traces(0.0, || 0, None));
        assert!(traces(0.25, || u64::MAX / 5, None));
        assert!(!traces(0.25, || u64::MAX / 3, None));
        assert!(traces(1.0, || u64::MAX, None));
    }

    #[test]
    fn a_request_and_its_duplicate_name_one_span() {
        let parent = parse(TEXT).unwrap();
        let version = |counter| Some(Stamp { wall: 7, counter });
        let span = parent.of_request(b"1", version(1));
        assert_eq!(span, parent.of_request(b"1", version(1)));
        assert_eq!((span.trace_id, span.flags), (parent.trace_id, parent.flags));
        for other in [
            parent,
            parent.of_request(b"2", version(1)),
            parent.of_request(b"1", version(2)),
            parent.of_request(b"1", None),
            span.of_request(b"1", version(1)),
        ] {
            assert_ne!(span.span_id, other.span_id);
        }
    }
}
