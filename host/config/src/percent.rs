//! Percent-encoding in URLs (RFC 3986 section 2.1).

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, percent_encode};

const ENCODED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~')
    .remove(b'@');

/// Encodes bytes as one path segment, or as one value of a query.
pub fn encode(bytes: &[u8]) -> String {
    percent_encode(bytes, ENCODED).to_string()
}

/// Decodes a part of a URL; none if a percent sign is not followed by two hexadecimal digits.
pub fn decode(text: &str) -> Option<Vec<u8>> {
    let is_escape =
        |rest: &str| rest.len() >= 2 && rest.bytes().take(2).all(|it| it.is_ascii_hexdigit());
    let valid = text.split('%').skip(1).all(is_escape);
    valid.then(|| percent_decode_str(text).collect())
}

/// A decoded value of a query.
pub fn value(query: Option<&str>, name: &str) -> Option<Vec<u8>> {
    query?
        .split('&')
        .filter_map(|pair| pair.split_once('='))
        .find(|(known, _)| *known == name)
        .and_then(|(_, value)| decode(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_round_trips() {
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(decode(&encode(&all)), Some(all));
        assert_eq!(encode(b"standard@1.0.0"), "standard@1.0.0");
        assert_eq!(encode(b"a/b c"), "a%2Fb%20c");
        for wrong in ["%", "%a", "%zz", "x%1"] {
            assert_eq!(decode(wrong), None);
        }
        let query = Some("x=1&prefix=a%2F&prefix=b&y");
        assert_eq!(value(query, "prefix").unwrap(), b"a/");
        assert_eq!(value(query, "y"), None);
        assert_eq!(value(None, "x"), None);
    }
}
