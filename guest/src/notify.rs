//! The topics and payloads of notifications (the protocol, sections 1 and 8).

use statehouse_policy::resp;
use statehouse_policy::{Body, Bytes, Change, Dialect, Event, Frame, Notification, Span};

use crate::limits::TOPIC_BYTES_MAX;

/// Precedes the client id, which the host inserts in upper-case Base 16.
const TOPIC_PREFIX: &str = "clients/statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/";

/// Precedes the key in upper-case Base 16 (RFC 4648); a client in Rust panics on lower case.
const TOPIC_SUFFIX: &str = "/command/notify/";

/// Whether a topic has space for this client and key.
pub(crate) fn topic_fits(client: &str, key: Span) -> bool {
    let fixed = TOPIC_PREFIX.len() + TOPIC_SUFFIX.len();
    let named = client.len().saturating_add(key.len as usize);
    named <= (TOPIC_BYTES_MAX - fixed) / 2
}

/// The notification of one change in one dialect.
pub(crate) fn notify(change: &Change, dialect: Dialect) -> Notification {
    let mut topic_suffix = String::with_capacity(TOPIC_SUFFIX.len() + 2 * change.key.len());
    topic_suffix.push_str(TOPIC_SUFFIX);
    push_base16(&mut topic_suffix, &change.key);
    Notification {
        topic_prefix: TOPIC_PREFIX.to_owned(),
        topic_suffix,
        payload: payload(change, dialect),
    }
}

fn payload(change: &Change, dialect: Dialect) -> Frame {
    match change.event {
        Event::Set => {
            let mut head = b"*4\r\n$6\r\nNOTIFY\r\n$3\r\nSET\r\n$5\r\nVALUE\r\n".to_vec();
            resp::push_head(&mut head, b'$', u64::from(change.len));
            // In this call spans refer to the key; the host stores no key of 4 GiB.
            let key = Span {
                at: 0,
                len: u32::try_from(change.key.len()).unwrap_or(u32::MAX),
            };
            Frame {
                head,
                body: Body::Stored(Bytes::Span(key)),
            }
        }
        Event::Deleted | Event::Expired => {
            let word: &[u8] = match dialect {
                Dialect::Sdk => b"*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n",
                Dialect::Documents | Dialect::Preview => b"*2\r\n$6\r\nNOTIFY\r\n$3\r\nDEL\r\n",
            };
            Frame {
                head: word.to_vec(),
                body: Body::None,
            }
        }
    }
}

fn push_base16(out: &mut String, bytes: &[u8]) {
    const DIGITS: [char; 16] = [
        '0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'A', 'B', 'C', 'D', 'E', 'F',
    ];
    for byte in bytes {
        out.push(DIGITS[usize::from(byte >> 4)]);
        out.push(DIGITS[usize::from(byte & 15)]);
    }
}
