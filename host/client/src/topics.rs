//! The topics of the protocol, section 1.

/// The topic of requests.
pub(crate) const REQUEST: &str =
    "statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/command/invoke";

const NOTIFY_PREFIX: &str = "clients/statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/";

/// The topic of responses to `client_id`.
pub(crate) fn response(client_id: &str) -> String {
    format!("clients/{client_id}/services/statestore/_any_/command/invoke/response")
}

/// The prefix of the notification topics of `client_id`. The key in Base 16 follows.
pub(crate) fn notify_prefix(client_id: &str) -> String {
    format!(
        "{NOTIFY_PREFIX}{}/command/notify/",
        to_hex(client_id.as_bytes())
    )
}

/// Upper-case Base 16 (RFC 4648 section 8).
pub(crate) fn to_hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    let mut hex = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        hex.push(DIGITS[usize::from(byte >> 4)] as char);
        hex.push(DIGITS[usize::from(byte & 15)] as char);
    }
    hex
}

/// Decodes upper-case Base 16. Returns `None` for other text.
pub(crate) fn from_hex(hex: &[u8]) -> Option<Vec<u8>> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'A'..=b'F' => Some(byte - b'A' + 10),
        _ => None,
    };
    let (pairs, []) = hex.as_chunks::<2>() else {
        return None;
    };
    pairs
        .iter()
        .map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topic_of_the_protocol_example() {
        assert_eq!(
            notify_prefix("client-id1") + &to_hex(b"SOMEKEY"),
            "clients/statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/636C69656E742D696431/command/notify/534F4D454B4559"
        );
    }

    #[test]
    fn hex_round_trip() {
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(from_hex(to_hex(&all).as_bytes()), Some(all));
        assert_eq!(from_hex(b""), Some(vec![]));
        for bad in ["0", "0g", "ab", "GG", "0 "] {
            assert_eq!(from_hex(bad.as_bytes()), None, "{bad}");
        }
    }
}
