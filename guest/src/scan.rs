//! SCAN: the keys that a pattern names, page by page.
//!
//! The token that a client brings back is a version byte, a checksum and the host's cursor. It grants
//! nothing, so it holds no secret: the checksum only tells a token of another pattern, or a damaged one,
//! from a good one. A key that stays is listed exactly once, because a page is listed whole or not at all
//! and the cursor moves by pages.

use statehouse_policy::resp;
use statehouse_policy::{Bytes, Frame, Host, Request, Span};

use crate::glob::Glob;
use crate::limits::{SCAN_EXAMINED_BYTES, SCAN_PAGE_KEYS, SCAN_PAGES_MAX};
use crate::reply::{self, Refusal};

/// The first byte of a token. Another layout gets another number.
const TOKEN_VERSION: u8 = 1;

/// Version and checksum.
const TOKEN_HEAD_BYTES: usize = 9;

/// Lists one page of keys.
pub(crate) fn scan(
    host: &mut impl Host,
    request: &Request,
    pattern: Span,
    token: Option<Span>,
) -> Result<Frame, Refusal> {
    let bytes = |span| request.payload.get(resp::range(span)).unwrap_or_default();
    let text = bytes(pattern);
    let glob = Glob::new(text).map_err(|_| Refusal::Syntax)?;
    let mut cursor = match token {
        Some(token) => Some(
            read_token(bytes(token), text)
                .ok_or(Refusal::Syntax)?
                .to_vec(),
        ),
        None => None,
    };
    let prefix = Bytes::Span(Span {
        at: pattern.at,
        len: literal_bytes(text),
    });

    let mut listed = Vec::new();
    let mut count = 0;
    let mut examined_bytes = 0;
    for _ in 0..SCAN_PAGES_MAX {
        let page = host.keys(&prefix, cursor.as_deref(), SCAN_PAGE_KEYS)?;
        cursor = page.next;
        for key in &page.keys {
            examined_bytes += key.len();
            if glob.matches(key) {
                resp::push_bulk(&mut listed, key);
                count += 1;
            }
        }
        // Keys come in order, so where the pattern is one key it is the first with that prefix.
        if glob.is_one_key() && !page.keys.is_empty() {
            cursor = None;
        }
        // An empty page cost the host as much as it gives to one: the client may ask again.
        if cursor.is_none() || page.keys.is_empty() || examined_bytes >= SCAN_EXAMINED_BYTES {
            break;
        }
    }
    let token = cursor.map(|cursor| write_token(&cursor, text));
    Ok(reply::page(count, &listed, token.as_deref()))
}

/// How much of a pattern every named key starts with.
fn literal_bytes(pattern: &[u8]) -> u32 {
    let special = |byte: &u8| matches!(byte, b'*' | b'?' | b'[' | b'\\');
    let len = pattern.iter().position(special).unwrap_or(pattern.len());
    // A pattern is a span, so its length fits.
    u32::try_from(len).unwrap_or(u32::MAX)
}

fn write_token(cursor: &[u8], pattern: &[u8]) -> Vec<u8> {
    let mut token = Vec::with_capacity(TOKEN_HEAD_BYTES + cursor.len());
    token.push(TOKEN_VERSION);
    token.extend_from_slice(&checksum(cursor, pattern));
    token.extend_from_slice(cursor);
    token
}

/// The host's cursor in a token that was made for this pattern.
fn read_token<'a>(token: &'a [u8], pattern: &[u8]) -> Option<&'a [u8]> {
    let (&version, rest) = token.split_first()?;
    let (sum, cursor) = rest.split_first_chunk()?;
    (version == TOKEN_VERSION && *sum == checksum(cursor, pattern)).then_some(cursor)
}

/// FNV-1a over both, the length of the first between them.
fn checksum(cursor: &[u8], pattern: &[u8]) -> [u8; 8] {
    let len = (cursor.len() as u64).to_be_bytes();
    let mut sum = 0xcbf2_9ce4_8422_2325_u64;
    for byte in cursor.iter().chain(&len).chain(pattern) {
        sum = (sum ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    sum.to_be_bytes()
}
