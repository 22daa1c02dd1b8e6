//! A client's own topics: those below `clients/{level}/`, at which its responses arrive.
//!
//! The level is the client id as written (the official Rust and .NET clients) or in upper-case hexadecimal (the Go client). Two
//! clients can therefore own the same topics: `A` and `41` both own `clients/41/…`. Both may subscribe, and the response to a
//! request of one never reaches the other.

use statehouse_protocol::topics::NOTIFICATION_TOPICS;

/// What the topics of clients begin with.
const CLIENTS: &[u8] = b"clients";

/// What the notifications of the store have in place of an id. They go to nobody but who watches, subscribed or not.
const STORE: &[u8] = b"statestore";

/// Bytes in upper-case hexadecimal.
fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;

    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02X}");
    }
    text
}

/// The levels that stand for a client. An id with a slash or a wildcard is not used as written: `victim/x` would own topics of
/// `victim`, and `+` those of every client.
fn levels(client: &str) -> impl Iterator<Item = String> {
    let is_a_level = !client.contains(['/', '+', '#']);
    let as_written = is_a_level.then(|| client.to_owned());
    let both = as_written.into_iter().chain([hex(client.as_bytes())]);
    both.filter(|level| !level.is_empty())
}

/// What a client's own topics begin with. Topics below `clients/statestore/` are for notifications,
/// even if a client has the id `statestore`.
pub(super) fn response_prefixes(client: &str) -> impl Iterator<Item = String> {
    let levels = levels(client).filter(|level| level.as_bytes() != STORE);
    levels.map(|level| format!("clients/{level}/"))
}

/// What the filters begin with by which a client subscribes to its notifications. The .NET client subscribes to one with its id
/// as written, where the store publishes nothing.
pub(super) fn notification_prefixes(client: &str) -> impl Iterator<Item = String> {
    levels(client).map(|level| format!("{NOTIFICATION_TOPICS}/{level}/"))
}

/// Whether a level stands for a client in its own topics.
fn is_level_of(client: &str, level: &[u8]) -> bool {
    level == client.as_bytes() || is_hex_of(client, level)
}

fn is_hex_of(client: &str, level: &[u8]) -> bool {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    let digit = |nibble: u8| DIGITS[usize::from(nibble)];
    level.len() == 2 * client.len()
        && (level.chunks_exact(2).zip(client.bytes()))
            .all(|(pair, byte)| pair == [digit(byte >> 4), digit(byte & 15)])
}

/// Whether a client may receive the response at a topic to a request of another client, which is not known if its session has
/// ended. It may, unless both own the topic. A client that may subscribe to topics of others receives their responses.
pub(super) fn may_have_answer(client: &str, asker: Option<&str>, topic: &[u8]) -> bool {
    let level = topic
        .strip_prefix(b"clients/")
        .and_then(|it| it.split(|byte| *byte == b'/').next());
    let Some(level) = level.filter(|level| is_level_of(client, level)) else {
        return true;
    };
    match asker {
        Some(asker) => !is_level_of(asker, level),
        // Some other client owns the topic too if the level is the hexadecimal form of any id.
        None => {
            !(level.len() % 2 == 0
                && level
                    .iter()
                    .all(|it| matches!(it, b'0'..=b'9' | b'A'..=b'F')))
        }
    }
}

/// Whether the filter matches a topic below `clients/{level}/` that is not the client's own.
pub(super) fn is_of_another(client: &str, filter: &[u8]) -> bool {
    let mut levels = filter.split(|byte| *byte == b'/');
    let (first, second, third) = (levels.next(), levels.next(), levels.next());
    match (first, second) {
        (Some(b"#"), None) => true,
        (Some(b"+" | CLIENTS), Some(b"#")) => true,
        (Some(b"+" | CLIENTS), Some(b"+")) => third.is_some(),
        (Some(b"+" | CLIENTS), Some(id)) => {
            third.is_some() && id != STORE && !is_level_of(client, id)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_hears_the_answers_to_another() {
        for (filter, expected) in [
            ("clients/me/response", false),
            ("clients/me/#", false),
            ("clients/me/+/answer", false),
            ("clients/you/response", true),
            ("clients/you/#", true),
            ("clients/ME/#", true),
            ("clients/+/response", true),
            ("clients/+/#", true),
            ("clients/#", true),
            ("#", true),
            ("+/#", true),
            ("+/+/#", true),
            ("+/you/response", true),
            ("+/me/response", false),
            ("clients/6D65/response", false),
            ("clients/6D65/#", false),
            ("clients/6d65/#", true),
            ("clients/796F75/#", true),
            ("clients/6D/#", true),
            ("clients/6D6565/#", true),
            // These match no topic below an id.
            ("clients/+", false),
            ("clients", false),
            ("+/temperature", false),
            ("+", false),
            ("news/+/#", false),
            ("clients/statestore/v1/store/+/command/notify/+", false),
        ] {
            assert_eq!(is_of_another("me", filter.as_bytes()), expected, "{filter}");
        }
        // An id is no pattern.
        assert!(is_of_another("+", b"clients/you/response"));
        assert!(is_of_another("#", b"clients/#"));
    }

    #[test]
    fn both_clients_own_a_topic_but_only_the_asker_has_the_answer() {
        let topic = b"clients/6D65/response";
        for client in ["me", "6D65"] {
            assert!(!is_of_another(client, topic));
            let own = response_prefixes(client).collect::<Vec<_>>();
            assert!(own.contains(&"clients/6D65/".to_owned()), "{own:?}");
        }
        assert!(!may_have_answer("6D65", Some("me"), topic));
        assert!(!may_have_answer("me", Some("6D65"), topic));
        assert!(!may_have_answer("6D65", None, topic));
        assert!(!may_have_answer("me", None, topic));
        // A subscriber that does not own the topic has a right to it, and an owner may be answered for another client.
        assert!(may_have_answer("monitor", Some("me"), topic));
        assert!(may_have_answer("monitor", None, topic));
        assert!(may_have_answer("me", Some("helper"), topic));
        assert!(may_have_answer("me", None, b"clients/me/response"));
        assert!(may_have_answer("me", Some("6D65"), b"clients/me/response"));
        assert!(may_have_answer("me", Some("6D65"), b"answers/6D65"));
    }

    #[test]
    fn own_topics_are_below_whole_levels_only() {
        let own = |client| response_prefixes(client).collect::<Vec<_>>();
        assert_eq!(
            own("press-4"),
            ["clients/press-4/", "clients/70726573732D34/"]
        );
        assert_eq!(own("a/b"), ["clients/612F62/"]);
        assert_eq!(own("+"), ["clients/2B/"]);
        assert_eq!(own("statestore"), ["clients/737461746573746F7265/"]);
        assert!(own("").is_empty());
    }
}
