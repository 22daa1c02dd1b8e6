//! A cursor over the bytes of one packet, and the iteration over its properties.

use std::ops::Range;

use super::{Violation, property as id};

/// A part of a packet. Packets are shorter than 4 GiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Span {
    pub(crate) start: u32,
    pub(crate) end: u32,
}

impl Span {
    pub(crate) fn range(self) -> Range<usize> {
        self.start as usize..self.end as usize
    }

    pub(crate) fn of(self, bytes: &[u8]) -> &[u8] {
        bytes.get(self.range()).unwrap_or_default()
    }

    fn new(start: usize, end: usize) -> Self {
        // A packet has at most 268 435 455 bytes (section 1.5.5).
        Self {
            start: start as u32,
            end: end as u32,
        }
    }
}

/// Reads the data types of section 1.5. Every read past the end is a malformed packet.
#[derive(Debug, Clone)]
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Whether strings were checked already.
    checked: bool,
}

const SHORT: &str = "the packet ends within a field";

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self {
            bytes,
            at: 0,
            checked: false,
        }
    }

    /// A reader of bytes that were checked already.
    pub(crate) fn again(bytes: &'a [u8]) -> Self {
        Self {
            checked: true,
            ..Self::new(bytes)
        }
    }

    pub(crate) fn position(&self) -> usize {
        self.at
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.at == self.bytes.len()
    }

    pub(crate) fn skip(&mut self, count: usize) -> Result<Span, Violation> {
        let end = self
            .at
            .checked_add(count)
            .filter(|end| *end <= self.bytes.len());
        let end = end.ok_or(Violation::malformed(SHORT))?;
        let span = Span::new(self.at, end);
        self.at = end;
        Ok(span)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Violation> {
        let bytes = self.skip(N)?.of(self.bytes);
        bytes.try_into().map_err(|_| Violation::malformed(SHORT))
    }

    pub(crate) fn u8(&mut self) -> Result<u8, Violation> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Violation> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Violation> {
        self.array().map(u32::from_be_bytes)
    }

    /// A packet identifier must not be zero (section 2.2.1).
    pub(crate) fn packet_id(&mut self) -> Result<u16, Violation> {
        match self.u16()? {
            0 => Err(Violation::protocol("the packet identifier is zero")),
            packet_id => Ok(packet_id),
        }
    }

    pub(crate) fn variable(&mut self) -> Result<u32, Violation> {
        match variable(self.bytes.get(self.at..).unwrap_or_default())? {
            Some((value, length)) => {
                self.at += length;
                Ok(value)
            }
            None => Err(Violation::malformed(SHORT)),
        }
    }

    /// A slice after a length field of two bytes.
    pub(crate) fn binary(&mut self) -> Result<Span, Violation> {
        let length = self.u16()?;
        self.skip(length.into())
    }

    /// A string: UTF-8 without U+0000 (section 1.5.4).
    pub(crate) fn text(&mut self) -> Result<Span, Violation> {
        let span = self.binary()?;
        let text = span.of(self.bytes);
        if self.checked || is_plain(text) {
            return Ok(span);
        }
        let text =
            std::str::from_utf8(text).map_err(|_| Violation::malformed("a string is not UTF-8"))?;
        if text.as_bytes().contains(&0) {
            return Err(Violation::malformed("a string contains U+0000"));
        }
        Ok(span)
    }

    /// The properties from here to the end.
    pub(crate) fn properties(self) -> Properties<'a> {
        Properties(self)
    }

    /// Reads a property section: checks every property and passes it to `visit`. Returns the span
    /// of the properties without their length.
    pub(crate) fn property_section(
        &mut self,
        allowed: u64,
        visit: impl FnMut(Item) -> Result<(), Violation>,
    ) -> Result<Span, Violation> {
        let length = self.variable()? as usize;
        let section = self.skip(length)?;
        scan(section.of(self.bytes), allowed, visit)?;
        Ok(section)
    }
}

/// Whether this is ASCII without U+0000, as nearly all strings are. Without a branch per byte the
/// compiler vectorizes the loop.
fn is_plain(text: &[u8]) -> bool {
    text.iter()
        .fold(true, |plain, byte| plain & (1..0x80).contains(byte))
}

/// Checks properties without their length and passes each to `visit`. Each must be known, allowed
/// in this packet, and unique unless it is a user property.
pub(crate) fn scan(
    properties: &[u8],
    allowed: u64,
    mut visit: impl FnMut(Item) -> Result<(), Violation>,
) -> Result<(), Violation> {
    let mut seen = 0_u64;
    for item in Reader::new(properties).properties() {
        let item = item?;
        let bit = bit(item.id);
        if allowed & bit == 0 {
            // Section 2.2.2.2.
            return Err(Violation::malformed(
                "a property is not allowed in this packet",
            ));
        }
        if seen & bit != 0 && item.id != id::USER_PROPERTY {
            return Err(Violation::protocol("a property occurs twice"));
        }
        seen |= bit;
        visit(item)?;
    }
    Ok(())
}

/// A set of property identifiers.
pub(crate) const fn bits(ids: &[u8]) -> u64 {
    let mut set = 0;
    let mut at = 0;
    while at < ids.len() {
        set |= bit(ids[at]);
        at += 1;
    }
    set
}

const fn bit(id: u8) -> u64 {
    if id < 64 { 1 << id } else { 0 }
}

/// One property: its position in its section, and its value.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Item {
    pub(crate) id: u8,
    pub(crate) number: u32,
    /// The value of a string or of binary data.
    pub(crate) value: Option<Span>,
    /// Name and value of a user property.
    pub(crate) pair: Option<(Span, Span)>,
    /// The whole property with its identifier.
    pub(crate) whole: Span,
}

impl Item {
    /// A number that must be 0 or 1.
    pub(crate) fn flag(&self) -> Result<bool, Violation> {
        match self.number {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Violation::protocol(
                "a property that must be 0 or 1 has another value",
            )),
        }
    }

    /// A number that must not be 0.
    pub(crate) fn positive(&self) -> Result<u32, Violation> {
        if self.number == 0 {
            return Err(Violation::protocol(
                "a property that must not be zero is zero",
            ));
        }
        Ok(self.number)
    }
}

/// Iterates over properties; ends after the first error.
#[derive(Debug)]
pub(crate) struct Properties<'a>(Reader<'a>);

impl Iterator for Properties<'_> {
    type Item = Result<Item, Violation>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let item = self.read();
        if item.is_err() {
            self.0.at = self.0.bytes.len();
        }
        Some(item)
    }
}

impl Properties<'_> {
    fn read(&mut self) -> Result<Item, Violation> {
        let reader = &mut self.0;
        let start = reader.at;
        let (mut number, mut value, mut pair) = (0, None, None);
        // An identifier is a variable byte integer. All defined ones fit one byte, and longer
        // encodings of these are not allowed.
        let id = reader.u8()?;
        match id {
            id::PAYLOAD_FORMAT
            | id::REQUEST_PROBLEM_INFO
            | id::REQUEST_RESPONSE_INFO
            | id::MAXIMUM_QOS
            | id::RETAIN_AVAILABLE
            | id::WILDCARD_AVAILABLE
            | id::SUBSCRIPTION_ID_AVAILABLE
            | id::SHARED_AVAILABLE => number = reader.u8()?.into(),
            id::SERVER_KEEP_ALIVE | id::RECEIVE_MAX | id::TOPIC_ALIAS_MAX | id::TOPIC_ALIAS => {
                number = reader.u16()?.into();
            }
            id::MESSAGE_EXPIRY | id::SESSION_EXPIRY | id::WILL_DELAY | id::MAXIMUM_PACKET_SIZE => {
                number = reader.u32()?
            }
            id::SUBSCRIPTION_ID => number = reader.variable()?,
            id::CORRELATION_DATA | id::AUTH_DATA => value = Some(reader.binary()?),
            id::CONTENT_TYPE
            | id::RESPONSE_TOPIC
            | id::ASSIGNED_CLIENT_ID
            | id::AUTH_METHOD
            | id::RESPONSE_INFO
            | id::SERVER_REFERENCE
            | id::REASON_STRING => value = Some(reader.text()?),
            id::USER_PROPERTY => pair = Some((reader.text()?, reader.text()?)),
            _ => return Err(Violation::malformed("a property has an unknown identifier")),
        }
        Ok(Item {
            id,
            number,
            value,
            pair,
            whole: Span::new(start, reader.at),
        })
    }
}

/// A variable byte integer (section 1.5.5) and its length; `None` if bytes are missing.
pub(crate) fn variable(bytes: &[u8]) -> Result<Option<(u32, usize)>, Violation> {
    match padded(bytes)? {
        Some((_, length)) if length > 1 && bytes[length - 1] == 0 => Err(Violation::malformed(
            "a variable byte integer is longer than it needs to be",
        )),
        found => Ok(found),
    }
}

/// Like [`variable`], but the integer may have more bytes than it needs, as in MQTT 3.1.1.
pub(crate) fn padded(bytes: &[u8]) -> Result<Option<(u32, usize)>, Violation> {
    let mut value = 0;
    for (at, byte) in bytes.iter().take(4).enumerate() {
        value |= u32::from(byte & 0x7F) << (7 * at);
        if byte & 0x80 == 0 {
            return Ok(Some((value, at + 1)));
        }
    }
    if bytes.len() < 4 {
        Ok(None)
    } else {
        Err(Violation::malformed(
            "a variable byte integer has more than four bytes",
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_is_ascii_without_nul() {
        for byte in 0..=u8::MAX {
            for at in 0..40 {
                let mut text = [b'a'; 40];
                text[at] = byte;
                assert_eq!(is_plain(&text), byte.is_ascii() && byte != 0, "{byte} {at}");
            }
        }
    }
}
