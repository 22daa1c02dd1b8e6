//! A client's own topics: those below `clients/{level}/`, which receive its responses.
//!
//! The level is the client id as written (the official Rust and .NET clients) or in upper-case
//! hexadecimal (the Go client). So two clients can own the same topics: `A` and `41` both own
//! `clients/41/…`. Both may subscribe, but a response must never reach the other client.

use data_encoding::HEXUPPER;
use statehouse_protocol::topics::NOTIFICATION_TOPICS;

/// The first level of all own topics.
const CLIENTS: &[u8] = b"clients";

/// The second level of notification topics. The store sends a notification to the watching client
/// only, whether or not other clients subscribe.
const STORE: &[u8] = b"statestore";

/// The levels that stand for a client. An id with a slash or a wildcard is not used as written:
/// `victim/x` would own topics of `victim`, and `+` those of every client.
fn levels(client: &str) -> impl Iterator<Item = String> {
    let is_a_level = !client.contains(['/', '+', '#']);
    let as_written = is_a_level.then(|| client.to_owned());
    let both = as_written
        .into_iter()
        .chain([HEXUPPER.encode(client.as_bytes())]);
    both.filter(|level| !level.is_empty())
}

/// The prefixes of a client's own topics. Topics below `clients/statestore/` are for notifications,
/// even if a client has the id `statestore`.
pub(super) fn response_prefixes(client: &str) -> impl Iterator<Item = String> {
    let levels = levels(client).filter(|level| level.as_bytes() != STORE);
    levels.map(|level| format!("clients/{level}/"))
}

/// The prefixes of the filters by which a client subscribes to its notifications. The .NET client
/// uses a filter with its id as written, to which the store publishes nothing.
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

/// Whether a client may receive a response at this topic to a request of another client.
/// `requester` is `None` if the session of that client has ended. Denied only if both clients own
/// the topic: a client that may subscribe to topics of other clients receives their responses.
pub(super) fn may_have_answer(client: &str, requester: Option<&str>, topic: &[u8]) -> bool {
    let level = topic
        .strip_prefix(b"clients/")
        .and_then(|it| it.split(|byte| *byte == b'/').next());
    let Some(level) = level.filter(|level| is_level_of(client, level)) else {
        return true;
    };
    match requester {
        Some(requester) => !is_level_of(requester, level),
        // The unknown requester may own the topic too if the level is the hexadecimal form of an
        // id.
        None => {
            !(level.len() % 2 == 0
                && level
                    .iter()
                    .all(|it| matches!(it, b'0'..=b'9' | b'A'..=b'F')))
        }
    }
}

/// Whether the filter matches notification topics only. Responses to a client with the id
/// `statestore` are beside these.
fn is_for_notifications(filter: &[u8]) -> bool {
    let below = filter.strip_prefix(NOTIFICATION_TOPICS.as_bytes());
    below.is_some_and(|below| below.starts_with(b"/"))
}

/// Whether the filter matches a topic below `clients/{level}/` that is not the client's own.
pub(super) fn reaches_other_clients(client: &str, filter: &[u8]) -> bool {
    let mut levels = filter.split(|byte| *byte == b'/');
    let (first, second, third) = (levels.next(), levels.next(), levels.next());
    match (first, second) {
        (Some(b"#"), None) => true,
        (Some(b"+" | CLIENTS), Some(b"#")) => true,
        (Some(b"+" | CLIENTS), Some(b"+")) => third.is_some(),
        (Some(b"+" | CLIENTS), Some(id)) => {
            third.is_some() && !is_level_of(client, id) && !is_for_notifications(filter)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filter_that_reaches_other_clients_is_detected() {
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
            (
                "clients/statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/+/command/notify/+",
                false,
            ),
            ("clients/statestore/v1/store/response", true),
            ("clients/statestore/response", true),
            ("clients/statestore/#", true),
        ] {
            assert_eq!(
                reaches_other_clients("me", filter.as_bytes()),
                expected,
                "{filter}"
            );
        }
        // A client id is not a pattern.
        assert!(reaches_other_clients("+", b"clients/you/response"));
        assert!(reaches_other_clients("#", b"clients/#"));
    }

    #[test]
    fn response_at_a_shared_topic_reaches_only_its_requester() {
        let topic = b"clients/6D65/response";
        for client in ["me", "6D65"] {
            assert!(!reaches_other_clients(client, topic));
            let own = response_prefixes(client).collect::<Vec<_>>();
            assert!(own.contains(&"clients/6D65/".to_owned()), "{own:?}");
        }
        assert!(!may_have_answer("6D65", Some("me"), topic));
        assert!(!may_have_answer("me", Some("6D65"), topic));
        assert!(!may_have_answer("6D65", None, topic));
        assert!(!may_have_answer("me", None, topic));
        // A subscriber that does not own the topic has a right to it. An owner may receive
        // responses to requests of another client.
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
