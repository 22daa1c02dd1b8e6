//! Who asks, behind a foreign broker (the protocol, sections 8 and 9).
//!
//! What enters: the properties of a request. What leaves: a [`Peer`] and a [`Delivery`]. The client id is what the
//! request claims: nothing here proves it, so only the broker's access control can bind it.

use statehouse_mqtt::Properties;

use statehouse_core::request::Delivery;
use statehouse_core::store::{Mode, Peer};

/// The user property in which clients name themselves.
const SOURCE: &str = "__srcId";

/// The client that a request claims to be of: `__srcId`, else the second level of a Response Topic `clients/{id}/...`
/// as written. All official clients send `__srcId`, the Go client too, whose second level is its id in hexadecimal. Where neither is there the client id is empty, and the requests of one Response Topic belong together.
pub(super) fn peer(properties: &Properties) -> Peer {
    let response_topic = properties.response_topic().unwrap_or_default();
    match claimed(properties, response_topic) {
        Some(client) => named(client),
        None => numbered("", response_topic),
    }
}

/// The peer of a client whose id is known.
pub(super) fn named(client: &str) -> Peer {
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
    source().or_else(second_level)
}

/// Connections are not seen here, so a client has one for ever, and its session is the same.
fn numbered(client: &str, of: &str) -> Peer {
    let hash = blake3::hash(of.as_bytes());
    let (first, _) = hash
        .as_bytes()
        .split_first_chunk()
        .unwrap_or((&[0; 8], &[]));
    let number = Mode::foreign_session(u64::from_be_bytes(*first));
    Peer {
        client: client.into(),
        connection: number,
        session: number,
    }
}

/// How a request came, as far as that says anything here. DUP and packet ids are the broker's own, so each request may
/// have come before, and its identity alone decides.
pub(super) fn delivery(peer: &Peer) -> Delivery {
    Delivery {
        session: peer.session,
        connection: peer.connection,
        packet_id: 0,
        dup: true,
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
        // Of repeated ones the first counts, as with every property.
        let repeated = asked("answers", &[("__srcId", "source"), ("__srcId", "other")]);
        assert_eq!(repeated, both);
    }

    #[test]
    fn else_the_second_level_of_the_response_topic_counts_as_written() {
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
    fn unknown_clients_are_told_apart_by_their_response_topics() {
        let (here, there) = (asked("answers/here", &[]), asked("answers/there", &[]));
        assert_eq!(here, asked("answers/here", &[]));
        assert_ne!(here.session, there.session);
        assert_eq!(here.known(), None);
    }

    #[test]
    fn a_session_is_foreign_and_the_same_after_every_restart() {
        let peer = named("client-id1");
        assert_eq!(Mode::of_session(peer.session), Mode::Foreign);
        assert_eq!(peer.connection, peer.session);
        // Recorded on disk: another number would forget what is owed to clients.
        let hash = "c8f3ce269c7fa788";
        assert_eq!(format!("{:x}", peer.session), hash);
    }

    #[test]
    fn every_request_may_have_come_before() {
        let peer = named("client-id1");
        let delivery = delivery(&peer);
        assert!(delivery.dup && delivery.packet_id == 0);
        assert_eq!(delivery.session, peer.session);
        assert_eq!(delivery.connection, peer.connection);
    }
}
