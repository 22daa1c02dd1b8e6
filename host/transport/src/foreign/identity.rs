//! The client and the session of a request behind a foreign broker (sections 8 and 9 of the
//! protocol).
//!
//! Builds a [`Peer`] from the properties of a request. The client id is a claim of the request.
//! Nothing here proves it: only the broker's access rules can enforce it.

use statehouse_mqtt::Properties;
use statehouse_protocol::OPERATOR_CLIENT;

use statehouse_core::store::{Mode, Peer};

/// The user property in which clients name themselves.
const SOURCE: &str = "__srcId";

/// The client that a request claims as its sender: `__srcId`, otherwise the second level of a
/// Response Topic `clients/{id}/...` as written. All official clients send `__srcId`. The Go client
/// needs it, because the second level of its topics is its id in hexadecimal. Without both the
/// client id is empty, and all requests with the same Response Topic share one session.
pub(super) fn peer(properties: &Properties) -> Peer {
    let response_topic = properties.response_topic().unwrap_or_default();
    match claimed(properties, response_topic) {
        Some(client) => named(client),
        None => numbered("", response_topic),
    }
}

/// The peer of a client with a known id.
pub fn named(client: &str) -> Peer {
    numbered(client, client)
}

fn claimed<'a>(properties: &'a Properties, response_topic: &'a str) -> Option<&'a str> {
    let source = || {
        let mut user = properties.user();
        let (_, value) = user.find(|(name, _)| *name == SOURCE)?;
        (!value.is_empty()).then_some(value)
    };
    let second_level = || {
        let (client, _) = response_topic.strip_prefix("clients/")?.split_once('/')?;
        (!client.is_empty()).then_some(client)
    };
    source()
        .or_else(second_level)
        .filter(|client| *client != OPERATOR_CLIENT)
}

/// A peer whose connection and session have one permanent number, because the store cannot see the
/// connections of clients.
fn numbered(client: &str, of: &str) -> Peer {
    let hash = blake3::hash(of.as_bytes());
    let (first, _) = hash
        .as_bytes()
        .split_first_chunk()
        .unwrap_or((&[0; 8], &[]));
    let session = Mode::foreign_session(u64::from_be_bytes(*first));
    Peer {
        client: client.into(),
        connection: session.only_connection(),
        session,
    }
}

#[cfg(test)]
mod tests {
    use statehouse_mqtt::PropertiesBuilder;

    use super::*;

    fn asked(response_topic: &str, user: &[(&str, &str)]) -> Peer {
        let mut builder = PropertiesBuilder::new().response_topic(response_topic);
        for (name, value) in user {
            builder = builder.user(name, value);
        }
        peer(&Properties::parse(builder.finish().unwrap()).unwrap())
    }

    #[test]
    fn the_source_property_counts_before_the_response_topic() {
        let both = asked("clients/topic/x", &[("__ts", "1"), ("__srcId", "source")]);
        assert_eq!(both.known(), Some("source"));
        assert_eq!(both, asked("answers", &[("__srcId", "source")]));
        assert_eq!(both, named("source"));
        // Only the first of repeated properties counts.
        let repeated = asked("answers", &[("__srcId", "source"), ("__srcId", "other")]);
        assert_eq!(repeated, both);
    }

    #[test]
    fn without_the_source_property_the_response_topic_counts() {
        for (topic, client) in [
            ("clients/topic/services/statestore", Some("topic")),
            ("clients/a b%2F/x", Some("a b%2F")),
            ("clients//x", None),
            ("clients/alone", None),
            ("Clients/topic/x", None),
            ("answers/clients/topic/x", None),
        ] {
            assert_eq!(asked(topic, &[]).known(), client, "{topic}");
            assert_eq!(asked(topic, &[("__srcId", "")]).known(), client, "{topic}");
        }
    }

    #[test]
    fn no_client_is_an_operator() {
        let topic = format!("clients/{OPERATOR_CLIENT}/x");
        assert_eq!(asked(&topic, &[]).known(), None);
        assert_eq!(
            asked("answers", &[("__srcId", OPERATOR_CLIENT)]).known(),
            None
        );
    }

    #[test]
    fn unknown_clients_are_distinguished_by_response_topic() {
        let (here, there) = (asked("answers/here", &[]), asked("answers/there", &[]));
        assert_eq!(here, asked("answers/here", &[]));
        assert_ne!(here.session, there.session);
        assert_eq!(here.known(), None);
    }

    #[test]
    fn a_session_is_foreign_and_the_same_after_every_restart() {
        let peer = named("client-id1");
        assert_eq!(Mode::of_session(peer.session), Mode::Foreign);
        assert_eq!(peer.connection, peer.session.only_connection());
        // The number is recorded on disk. With another number, recovered requests and watches would
        // not belong to their clients.
        let hash = "c8f3ce269c7fa788";
        assert_eq!(format!("{:x}", peer.session.0), hash);
    }
}
