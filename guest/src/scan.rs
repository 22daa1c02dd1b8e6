//! SCAN: lists the keys that match a pattern, page by page.
//!
//! A token consists of a version byte, a checksum and the host's cursor. It grants no rights, so it
//! holds no secret: the checksum only detects damaged tokens and tokens of other patterns. A key
//! that exists throughout a scan is listed exactly once, because a page is listed completely or not
//! at all, and the cursor advances by pages.

use statehouse_policy::resp;
use statehouse_policy::{Bytes, Frame, Host, Request, Span};

use crate::glob::Glob;
use crate::limits::{SCAN_EXAMINED_BYTES, SCAN_PAGE_KEYS, SCAN_PAGES_MAX};
use crate::reply::{self, Refusal};

/// The first byte of a token. Every layout must have its own number.
const TOKEN_VERSION: u8 = 1;

/// Version and checksum.
const TOKEN_HEAD_BYTES: usize = 9;

pub(crate) fn scan(
    host: &mut impl Host,
    request: &Request,
    pattern: Span,
    token: Option<Span>,
) -> Result<Frame, Refusal> {
    let bytes = |span| request.payload.get(resp::range(span)).unwrap_or_default();
    let text = bytes(pattern);
    // The host compares the literal prefix of all matching keys; the rest of the pattern follows
    // it.
    let literal = literal_bytes(text);
    let (_, special) = text.split_at_checked(literal).unwrap_or_default();
    let glob = Glob::new(special).map_err(|_| Refusal::Syntax)?;
    let read = |token| read_token(bytes(token), text).ok_or(Refusal::Syntax);
    let mut cursor = token.map(read).transpose()?.map(<[u8]>::to_vec);
    let prefix = Bytes::Span(Span {
        len: u32::try_from(literal).unwrap_or(pattern.len),
        ..pattern
    });

    let mut listed = Vec::new();
    let mut count = 0;
    let mut examined_bytes = 0;
    for _ in 0..SCAN_PAGES_MAX {
        let page = host.keys(&prefix, cursor.as_deref(), SCAN_PAGE_KEYS)?;
        cursor = page.next;
        for key in &page.keys {
            examined_bytes += key.len();
            if key.get(literal..).is_some_and(|rest| glob.matches(rest)) {
                resp::push_bulk(&mut listed, key);
                count += 1;
            }
        }
        // Keys are in order, so a pattern without special bytes matches only the first key of a
        // page. A pattern with an escape also matches one key, but its literal prefix ends before
        // the escape.
        if special.is_empty() && !page.keys.is_empty() {
            cursor = None;
        }
        // An empty page costs the host as much as a full one, so the reply ends here and the client
        // may continue.
        if cursor.is_none() || page.keys.is_empty() || examined_bytes >= SCAN_EXAMINED_BYTES {
            break;
        }
    }
    let token = cursor.map(|cursor| write_token(&cursor, text));
    Ok(reply::page(count, &listed, token.as_deref()))
}

/// The length of the literal prefix of a pattern.
fn literal_bytes(pattern: &[u8]) -> usize {
    let special = |byte: &u8| matches!(byte, b'*' | b'?' | b'[' | b'\\');
    pattern.iter().position(special).unwrap_or(pattern.len())
}

fn write_token(cursor: &[u8], pattern: &[u8]) -> Vec<u8> {
    let mut token = Vec::with_capacity(TOKEN_HEAD_BYTES + cursor.len());
    token.push(TOKEN_VERSION);
    token.extend_from_slice(&checksum(cursor, pattern));
    token.extend_from_slice(cursor);
    token
}

/// The host's cursor in a token, if the token belongs to this pattern.
fn read_token<'a>(token: &'a [u8], pattern: &[u8]) -> Option<&'a [u8]> {
    let (&version, rest) = token.split_first()?;
    let (sum, cursor) = rest.split_first_chunk()?;
    (version == TOKEN_VERSION && *sum == checksum(cursor, pattern)).then_some(cursor)
}

/// Multiplies and folds both, eight bytes at a time, since a cursor may be as long as a key.
fn checksum(cursor: &[u8], pattern: &[u8]) -> [u8; 8] {
    // The length separates the two.
    let mut sum = cursor.len() as u64;
    for bytes in [cursor, pattern] {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            sum = (sum ^ u64::from_le_bytes(word)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            sum ^= sum >> 32;
        }
    }
    sum.to_be_bytes()
}
