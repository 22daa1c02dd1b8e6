//! The bytes of packets: reads the frames and properties, and writes fields.

use crate::protocol::Broken;

pub(super) const MALFORMED: Broken = Broken::Malformed("a packet that no MQTT 5 broker sends");

/// The first byte of a packet, and the offsets of its body and its end. `None` until the packet is
/// complete. Fails if the length is malformed.
pub fn packet(bytes: &[u8]) -> Result<Option<(u8, usize, usize)>, Broken> {
    let [first, rest @ ..] = bytes else {
        return Ok(None);
    };
    let Some((length, at)) = number(rest)? else {
        return Ok(None);
    };
    let (at, end) = (1 + at, 1 + at + length);
    Ok((bytes.len() >= end).then_some((*first, at, end)))
}

/// A Variable Byte Integer and its encoded length (section 1.5.5).
pub(super) fn number(bytes: &[u8]) -> Result<Option<(usize, usize)>, Broken> {
    let mut number = 0;
    for (at, byte) in bytes.iter().take(4).enumerate() {
        number |= usize::from(byte & 127) << (7 * at);
        if byte & 128 == 0 {
            return Ok(Some((number, at + 1)));
        }
    }
    match bytes.len() {
        0..4 => Ok(None),
        _ => Err(MALFORMED),
    }
}

/// The properties, and the bytes after them.
pub(super) fn properties(bytes: &[u8]) -> Result<(&[u8], &[u8]), Broken> {
    let (length, at) = number(bytes)?.ok_or(MALFORMED)?;
    bytes[at..].split_at_checked(length).ok_or(MALFORMED)
}

/// A string with a length prefix, and the bytes after it.
pub(super) fn text(bytes: &[u8]) -> Result<(&[u8], &[u8]), Broken> {
    let (length, rest) = bytes.split_first_chunk::<2>().ok_or(MALFORMED)?;
    let length = usize::from(u16::from_be_bytes(*length));
    rest.split_at_checked(length).ok_or(MALFORMED)
}

/// Iterates over properties: identifier and value. A string or binary value comes without its
/// length prefix, a pair with both prefixes.
pub(super) struct Scan<'a>(pub(super) &'a [u8]);

impl<'a> Scan<'a> {
    fn one(&mut self, id: u8, rest: &'a [u8]) -> Result<(u8, &'a [u8]), Broken> {
        let fixed = match id {
            // Section 2.2.2.2.
            0x01 | 0x17 | 0x19 | 0x24 | 0x25 | 0x28..=0x2A => 1,
            0x13 | 0x21..=0x23 => 2,
            0x02 | 0x11 | 0x18 | 0x27 => 4,
            0x0B => number(rest)?.ok_or(MALFORMED)?.1,
            0x03 | 0x08 | 0x09 | 0x12 | 0x15 | 0x16 | 0x1A | 0x1C | 0x1F => {
                let (value, rest) = text(rest)?;
                self.0 = rest;
                return Ok((id, value));
            }
            0x26 => {
                let behind = text(text(rest)?.1)?.1;
                rest.len() - behind.len()
            }
            _ => return Err(MALFORMED),
        };
        let (value, rest) = rest.split_at_checked(fixed).ok_or(MALFORMED)?;
        self.0 = rest;
        Ok((id, value))
    }
}

impl<'a> Iterator for Scan<'a> {
    type Item = Result<(u8, &'a [u8]), Broken>;

    fn next(&mut self) -> Option<Self::Item> {
        let (id, rest) = self.0.split_first()?;
        let one = self.one(*id, rest);
        if one.is_err() {
            self.0 = &[];
        }
        Some(one)
    }
}

/// Appends a packet.
pub fn push_packet(out: &mut Vec<u8>, first: u8, body: &[u8]) {
    out.push(first);
    push_length(out, body.len());
    out.extend_from_slice(body);
}

/// Appends a string with its length.
pub fn push_text(out: &mut Vec<u8>, text: &[u8]) {
    // All texts are short: topics, client ids of this program, a user name and a password.
    let length = u16::try_from(text.len()).unwrap_or(u16::MAX);
    out.extend_from_slice(&length.to_be_bytes());
    out.extend_from_slice(text);
}

/// Appends a Variable Byte Integer.
pub fn push_length(out: &mut Vec<u8>, mut length: usize) {
    loop {
        let more = length > 127;
        out.push((length & 127) as u8 | if more { 128 } else { 0 });
        length >>= 7;
        if !more {
            break;
        }
    }
}
