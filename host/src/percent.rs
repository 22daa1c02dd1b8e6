//! Percent-encoding in URLs (RFC 3986 section 2.1).

/// Encodes bytes as one path segment, or as one value of a query.
pub(crate) fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for byte in bytes {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'@' => {
                text.push(char::from(*byte));
            }
            _ => text.push_str(&format!("%{byte:02X}")),
        }
    }
    text
}

/// Decodes a part of a URL; none if a percent sign is not followed by two hexadecimal digits.
pub(crate) fn decode(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || char::from(rest.next()?).to_digit(16);
        let (high, low) = (digit()?, digit()?);
        // Two hexadecimal digits always fit into a byte.
        bytes.push(u8::try_from(high * 16 + low).ok()?);
    }
    Some(bytes)
}

/// A decoded value of a query.
pub(crate) fn value(query: Option<&str>, name: &str) -> Option<Vec<u8>> {
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
