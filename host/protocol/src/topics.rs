//! Topics of the protocol.

use alloc::{format, string::String, vec::Vec};

/// The request topic of current clients (protocol, section 1).
pub const REQUEST_TOPIC: &str = "statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/command/invoke";
/// The request topic of clients of the 2023 preview.
pub const PREVIEW_TOPIC: &str = "$services/statestore/_any_/command/invoke/request";
/// The prefix of all notification topics. Only the store publishes there.
pub const NOTIFICATION_TOPICS: &str = "clients/statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8";
/// The prefix of the topics for orders and their status (protocol, section 12). Of all topics below,
/// clients publish only orders and pieces of policies.
pub const ADMIN_TOPICS: &str = "statehouse/v1/admin/";
/// The topic of orders.
pub const ORDER_TOPIC: &str = "statehouse/v1/admin/policy/order";
/// The prefix of the topics of chunks. The file's digest and the number of the chunk follow.
pub const CHUNK_TOPICS: &str = "statehouse/v1/admin/policy/chunk/";
/// The prefix of the topics that the MQTT standard keeps for brokers (section 4.7.2).
pub const BROKER_TOPICS: &str = "$SYS/";

/// Longest name of a user at the beginning of a client id, which has at most 1024 bytes.
const USER_BYTES_MAX: usize = 512;

/// A client id that begins with the user, so that rules can bind ids to users. The id alone if the
/// user cannot be part of a level: then the client would own no topic for its responses.
#[must_use]
pub fn client_id_of(user: Option<&str>, id: &str) -> String {
    let is_part = |it: &&str| {
        !it.is_empty()
            && it.len() <= USER_BYTES_MAX
            && !it.contains(['/', '+', '#'])
            && !it.contains(char::is_control)
    };
    match user.filter(is_part) {
        Some(user) => format!("{user}:{id}"),
        None => id.into(),
    }
}

/// Whether no client may publish on this topic because it is kept for brokers. A Mosquitto bridge
/// publishes its state below them, also as its will, and Mosquitto allows it exactly this:
/// `$SYS/broker/connection/+/state`.
#[must_use]
pub fn is_kept_for_brokers(topic: &[u8]) -> bool {
    let Some(rest) = topic.strip_prefix(BROKER_TOPICS.as_bytes()) else {
        return false;
    };
    let bridge = rest.strip_prefix(b"broker/connection/");
    let bridge = bridge.and_then(|it| it.strip_suffix(b"/state"));
    bridge.is_none_or(|name| name.contains(&b'/'))
}

/// Whether a topic is that of orders, or of a chunk.
#[must_use]
pub fn is_order(topic: &[u8]) -> bool {
    topic == ORDER_TOPIC.as_bytes() || topic.starts_with(CHUNK_TOPICS.as_bytes())
}

/// The topic of a client's notifications about a key: both in Base 16 (protocol, section 8).
#[must_use]
pub fn notification_topic(client: &str, key: &[u8]) -> String {
    let hex = |bytes: &[u8]| -> String { bytes.iter().map(|byte| format!("{byte:02X}")).collect() };
    let (client, key) = (hex(client.as_bytes()), hex(key));
    format!("{NOTIFICATION_TOPICS}/{client}/command/notify/{key}")
}

/// The key of a notification topic.
#[must_use]
pub fn notified_key(topic: &[u8]) -> Option<Vec<u8>> {
    let rest = topic.strip_prefix(NOTIFICATION_TOPICS.as_bytes())?;
    let mut levels = rest.strip_prefix(b"/")?.splitn(4, |byte| *byte == b'/');
    let (_client, command, notify) = (levels.next(), levels.next()?, levels.next()?);
    let key = levels.next()?;
    if (command, notify) != (b"command", b"notify") || key.len() % 2 != 0 {
        return None;
    }
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let pairs = key.chunks_exact(2);
    // Two hexadecimal digits fit into a byte.
    let bytes = pairs.map(|pair| Some((digit(pair[0])? << 4 | digit(pair[1])?) as u8));
    bytes.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_bridges_publish_below_sys() {
        for topic in [
            "$SYS/",
            "$SYS/broker/uptime",
            "$SYS/broker/connection/state",
            "$SYS/broker/connection/a/b/state",
            "$SYS/broker/connection/a/states",
        ] {
            assert!(is_kept_for_brokers(topic.as_bytes()), "{topic}");
        }
        for topic in [
            "$SYS/broker/connection/vm.bridge/state",
            "$SYS",
            "$SYSTEM/a",
        ] {
            assert!(!is_kept_for_brokers(topic.as_bytes()), "{topic}");
        }
    }

    #[test]
    fn client_id_begins_with_the_user() {
        assert_eq!(client_id_of(Some("anna"), "a@b"), "anna:a@b");
        let long = "u".repeat(USER_BYTES_MAX + 1);
        assert_eq!(client_id_of(None, "a@b"), "a@b");
        for user in ["", "a/b", "a+", "#", "a\0", &*long] {
            assert_eq!(client_id_of(Some(user), "a@b"), "a@b", "{user:?}");
        }
    }

    #[test]
    fn key_of_a_notification_is_read_back() {
        for key in [&b"key"[..], b"", b"\x00\xff/+#"] {
            let topic = notification_topic("client", key);
            assert_eq!(notified_key(topic.as_bytes()).as_deref(), Some(key));
        }
        let topic = notification_topic("client", b"key");
        for other in [
            "clients/client/response",
            &topic[..topic.len() - 1],
            &format!("{topic}/x"),
        ] {
            assert_eq!(notified_key(other.as_bytes()), None, "{other}");
        }
    }
}
