//! RESP3 as far as requests and replies use it: mainly arrays of bulk strings.
//!
//! [`parse`] returns [`Arguments`] as spans of the payload, so no argument is copied. The writers
//! append to the bytes of a reply. The parser must be total: every payload gives arguments or
//! [`Malformed`], in one pass, in constant memory and a bounded number of steps.

use std::ops::Range;

use crate::limits::{ARGUMENTS_CHECKED_MAX, ARGUMENTS_KEPT, PAYLOAD_BYTES_MAX};
use crate::{Bytes, Span};

/// The payload is not one array of bulk strings and nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed;

/// The bulk strings of a request: the verb and its arguments.
#[derive(Debug, Clone, Copy)]
pub struct Arguments<'a> {
    payload: &'a [u8],
    kept: [Span; ARGUMENTS_KEPT],
    count: usize,
}

impl<'a> Arguments<'a> {
    /// Number of bulk strings, including the verb. There is at least one.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// The span of an argument; none beyond the count or beyond [`ARGUMENTS_KEPT`].
    #[must_use]
    pub fn span(&self, index: usize) -> Option<Span> {
        (index < self.count)
            .then(|| self.kept.get(index).copied())
            .flatten()
    }

    /// An argument in the form that [`Host`](crate::Host) takes.
    #[must_use]
    pub fn bytes(&self, index: usize) -> Option<Bytes> {
        self.span(index).map(Bytes::Span)
    }

    /// The bytes of an argument; empty if it does not exist.
    #[must_use]
    pub fn get(&self, index: usize) -> &'a [u8] {
        self.span(index)
            .and_then(|span| self.payload.get(range(span)))
            .unwrap_or_default()
    }
}

/// The range of positions in a span.
#[must_use]
pub fn range(span: Span) -> Range<usize> {
    let at = span.at as usize;
    at..at.saturating_add(span.len as usize)
}

/// Parses a payload: `*<n>\r\n` and n times `$<length>\r\n<bytes>\r\n`.
///
/// # Errors
///
/// [`Malformed`] for everything else: no element, an element that is no bulk string, a length that
/// is not plain decimal (a sign, a leading zero, a null) or wrong, bytes after the end. If there
/// are more than [`ARGUMENTS_CHECKED_MAX`] elements, the rest is assumed to be well formed: no
/// command takes so many, so the request is refused in any case.
pub fn parse(payload: &[u8]) -> Result<Arguments<'_>, Malformed> {
    if payload.len() > PAYLOAD_BYTES_MAX {
        return Err(Malformed);
    }
    let (count, mut rest) = length(payload, b'*')?;
    // A count that is too large even for empty elements is wrong.
    if count == 0 || count > rest.len() / BULK_BYTES_MIN {
        return Err(Malformed);
    }
    let mut kept = [Span { at: 0, len: 0 }; ARGUMENTS_KEPT];
    for index in 0..count.min(ARGUMENTS_CHECKED_MAX) {
        let (len, behind) = length(rest, b'$')?;
        if let Some(slot) = kept.get_mut(index) {
            *slot = span(payload.len() - behind.len(), len)?;
        }
        let behind = behind.get(len..).ok_or(Malformed)?;
        rest = behind.strip_prefix(b"\r\n").ok_or(Malformed)?;
    }
    if count <= ARGUMENTS_CHECKED_MAX && !rest.is_empty() {
        return Err(Malformed);
    }
    Ok(Arguments {
        payload,
        kept,
        count,
    })
}

/// The shortest bulk string: `$0\r\n\r\n`.
const BULK_BYTES_MIN: usize = 6;

fn span(at: usize, len: usize) -> Result<Span, Malformed> {
    let at = u32::try_from(at).map_err(|_| Malformed)?;
    let len = u32::try_from(len).map_err(|_| Malformed)?;
    Ok(Span { at, len })
}

/// Parses `<kind><digits>\r\n`; returns the number and the rest.
fn length(bytes: &[u8], kind: u8) -> Result<(usize, &[u8]), Malformed> {
    let (value, behind) = match bytes {
        [first, b'0', behind @ ..] if *first == kind => (0, behind),
        [first, digit @ b'1'..=b'9', behind @ ..] if *first == kind => {
            let mut value = usize::from(digit - b'0');
            let mut rest = behind;
            while let [digit @ b'0'..=b'9', behind @ ..] = rest {
                // Longer than any payload, so the length is wrong; another digit could overflow 32
                // bits.
                if value > PAYLOAD_BYTES_MAX {
                    return Err(Malformed);
                }
                value = value * 10 + usize::from(digit - b'0');
                rest = behind;
            }
            (value, rest)
        }
        _ => return Err(Malformed),
    };
    let behind = behind.strip_prefix(b"\r\n").ok_or(Malformed)?;
    Ok((value, behind))
}

/// Parses digits only; leading zeros are allowed, a sign is not (`str::parse` would accept `+5`).
#[must_use]
pub fn decimal(digits: &[u8]) -> Option<u64> {
    match leading_decimal(digits)? {
        (value, []) => Some(value),
        _ => None,
    }
}

/// The leading number and the rest; none without a digit, or if the number overflows.
pub(crate) fn leading_decimal(bytes: &[u8]) -> Option<(u64, &[u8])> {
    /// Below this, one more digit always fits into 64 bits.
    const TENTH: u64 = u64::MAX / 10;
    let mut value = 0u64;
    let mut rest = bytes;
    while let [digit @ b'0'..=b'9', behind @ ..] = rest {
        let digit = u64::from(digit - b'0');
        // Compares instead of using a checked product, which needs 128 bits on a 32-bit target.
        if value >= TENTH && (value > TENTH || digit > u64::MAX % 10) {
            return None;
        }
        value = value * 10 + digit;
        rest = behind;
    }
    (rest.len() < bytes.len()).then_some((value, rest))
}

/// `<kind><number>\r\n`: the head of an array (`*`), of a bulk string (`$`), or an integer (`:`).
#[must_use]
pub fn head(kind: u8, number: u64) -> Vec<u8> {
    line(kind, number, &mut [0; LINE_BYTES_MAX]).to_vec()
}

/// Appends `<kind><number>\r\n`.
pub fn push_head(out: &mut Vec<u8>, kind: u8, number: u64) {
    out.extend_from_slice(line(kind, number, &mut [0; LINE_BYTES_MAX]));
}

/// A kind, the twenty digits of a 64-bit number, a line break.
const LINE_BYTES_MAX: usize = 23;

/// Writes a line backwards, since division yields the last digit of a number before the others.
fn line(kind: u8, mut number: u64, room: &mut [u8; LINE_BYTES_MAX]) -> &[u8] {
    let mut at = LINE_BYTES_MAX - 2;
    room[at..].copy_from_slice(b"\r\n");
    loop {
        at -= 1;
        // A remainder of division by ten is one digit.
        room[at] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            break;
        }
    }
    at -= 1;
    room[at] = kind;
    &room[at..]
}

/// Appends a whole bulk string.
pub fn push_bulk(out: &mut Vec<u8>, bytes: &[u8]) {
    push_head(out, b'$', bytes.len() as u64);
    out.extend_from_slice(bytes);
    out.extend_from_slice(b"\r\n");
}

/// Appends `-ERR <text>\r\n`. A line break in the text would end the reply early, so it becomes a
/// space.
pub fn push_error(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(b"-ERR ");
    out.extend(text.bytes().map(|byte| match byte {
        b'\r' | b'\n' => b' ',
        _ => byte,
    }));
    out.extend_from_slice(b"\r\n");
}

/// A complete request as a client sends it, for tests, tools and examples.
#[must_use]
pub fn request(arguments: &[&[u8]]) -> Vec<u8> {
    let mut out = Vec::new();
    push_head(&mut out, b'*', arguments.len() as u64);
    for argument in arguments {
        push_bulk(&mut out, argument);
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn arguments_are_spans_of_the_payload() {
        let payload = b"*3\r\n$3\r\nSET\r\n$0\r\n\r\n$4\r\n\r\n$1\r\n";
        let arguments = parse(payload).expect("well formed");
        assert_eq!(arguments.count(), 3);
        assert_eq!(arguments.get(0), b"SET");
        assert_eq!(arguments.span(0), Some(Span { at: 8, len: 3 }));
        assert_eq!(arguments.get(1), b"");
        assert_eq!(arguments.span(1), Some(Span { at: 17, len: 0 }));
        assert_eq!(arguments.get(2), b"\r\n$1");
        let last = Bytes::Span(Span { at: 23, len: 4 });
        assert_eq!(arguments.bytes(2), Some(last));
        assert_eq!(arguments.get(3), b"");
        assert_eq!(arguments.span(3), None);
    }

    #[test]
    fn more_arguments_are_counted_and_checked() {
        let many = vec![b"word" as &[u8]; 1000];
        let mut payload = request(&many);
        let arguments = parse(&payload).expect("well formed");
        assert_eq!(arguments.count(), 1000);
        assert_eq!(arguments.get(ARGUMENTS_KEPT - 1), b"word");
        assert_eq!(arguments.span(ARGUMENTS_KEPT), None);
        let last = payload.len() - 1;
        payload[last] = b'x';
        assert!(parse(&payload).is_err());
    }

    #[test]
    fn elements_behind_the_checked_ones_are_counted_only() {
        for count in [ARGUMENTS_CHECKED_MAX, ARGUMENTS_CHECKED_MAX + 1, 300_000] {
            let mut payload = request(&vec![b"" as &[u8]; count]);
            assert_eq!(parse(&payload).expect("well formed").count(), count);
            let last = payload.len() - 1;
            payload[last] = b'x';
            assert_eq!(parse(&payload).is_ok(), count > ARGUMENTS_CHECKED_MAX);
            payload.truncate(last);
            assert!(parse(&payload).is_err(), "the count is wrong");
        }
    }

    #[test]
    fn an_error_is_one_line() {
        let mut out = Vec::new();
        push_error(&mut out, "a\r\nb");
        assert_eq!(out, b"-ERR a  b\r\n");
    }

    #[test]
    fn numbers_of_every_length() {
        for number in [0, 9, 10, 99, 100, 12_345, u64::from(u32::MAX), u64::MAX] {
            assert_eq!(head(b':', number), format!(":{number}\r\n").into_bytes());
        }
    }

    /// Bytes that resemble RESP, so that the parser gets far.
    fn likely() -> impl Strategy<Value = Vec<u8>> {
        let part = prop_oneof![
            Just(b"\r\n".to_vec()),
            Just(b"*".to_vec()),
            Just(b"$".to_vec()),
            Just(b"*1\r\n".to_vec()),
            Just(b"*2\r\n".to_vec()),
            Just(b"$3\r\nGET\r\n".to_vec()),
            Just(b"$1\r\nk\r\n".to_vec()),
            Just(b"$0\r\n\r\n".to_vec()),
            "[0-9]{1,24}".prop_map(String::into_bytes),
            proptest::collection::vec(any::<u8>(), 0..4),
        ];
        proptest::collection::vec(part, 0..12).prop_map(|parts| parts.concat())
    }

    /// A slow reference parser of the same grammar: split, re-encode, compare.
    fn is_well_formed(payload: &[u8]) -> bool {
        parse(payload).is_ok_and(|arguments| {
            arguments.count() > ARGUMENTS_KEPT || {
                let words: Vec<&[u8]> = (0..arguments.count()).map(|i| arguments.get(i)).collect();
                request(&words) == payload
            }
        })
    }

    proptest! {
        #[test]
        fn a_parsed_payload_is_consumed_completely(
            payload in proptest::collection::vec(any::<u8>(), 0..200),
            similar in likely(),
        ) {
            for bytes in [payload, similar] {
                prop_assert_eq!(parse(&bytes).is_ok(), is_well_formed(&bytes));
            }
        }

        #[test]
        fn a_written_request_parses_back(
            words in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..30), 1..=ARGUMENTS_KEPT),
        ) {
            let words: Vec<&[u8]> = words.iter().map(Vec::as_slice).collect();
            let payload = request(&words);
            let arguments = parse(&payload).expect("well formed");
            prop_assert_eq!(arguments.count(), words.len());
            for (index, word) in words.iter().enumerate() {
                prop_assert_eq!(arguments.get(index), *word);
            }
            // Neither a missing nor an extra byte is accepted.
            for len in 0..payload.len() {
                prop_assert!(parse(&payload[..len]).is_err());
            }
            let longer = [payload.as_slice(), b"\r\n"].concat();
            prop_assert!(parse(&longer).is_err());
        }
    }
}
