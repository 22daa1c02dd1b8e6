//! Sessions that outlive their connection, and take-over (MQTT 5, sections 3.1 and 4.1).

use std::{thread, time::Duration};

use statehouse_tests::{
    Client, Connect, Property, Publish, Server,
    packet::{self, kind},
};

#[test]
fn a_session_is_resumed_with_what_came_meanwhile() {
    let server = Server::start();
    let resume = Connect::resume("client", 60);
    let mut client = Client::connect(server.address(), &resume);
    assert!(!client.session_present());
    client.subscribe("a/#", 1);
    client.disconnect();
    let mut publisher = server.connect("publisher");
    for n in 0..20_u8 {
        publisher.publish(Publish::new("a/b", [n]).qos(1));
    }
    let mut client = Client::connect(server.address(), &resume);
    assert!(client.session_present());
    for n in 0..20_u8 {
        assert_eq!(client.next().publish().payload, [n]);
    }
    client.expect_nothing();
    client.disconnect();

    // A clean start forgets it.
    let client = server.connect("client");
    assert!(!client.session_present());
    client.disconnect();
    let mut client = Client::connect(server.address(), &resume);
    assert!(!client.session_present());
    publisher.publish(Publish::new("a/b", "unheard").qos(1));
    client.expect_nothing();
}

/// Sent and not acknowledged: sent again with DUP and the same packet ids, in order, before anything new.
#[test]
fn the_unacknowledged_is_sent_again() {
    let server = Server::start();
    let resume = Connect::resume("client", 60);
    let mut client = Client::connect(server.address(), &resume);
    client.acknowledges = false;
    client.subscribe("a", 1);
    let mut publisher = server.connect("publisher");
    for n in 0..3_u8 {
        publisher.publish(Publish::new("a", [n]).qos(1));
    }
    let first: Vec<Publish> = (0..3).map(|_| client.next().publish()).collect();
    client.send(&packet::acknowledge(kind::PUBACK, first[0].packet_id));
    client.ping();
    client.abort();
    publisher.publish(Publish::new("a", [3]).qos(1));

    let mut client = Client::connect(server.address(), &resume);
    for sent in &first[1..] {
        let again = client.next().publish();
        assert!(again.dup, "{again:?}");
        assert_eq!(again.packet_id, sent.packet_id);
        assert_eq!(again.payload, sent.payload);
    }
    let new = client.next().publish();
    assert_eq!((&new.payload[..], new.dup), (&[3][..], false));
    client.expect_nothing();
}

/// A QoS 2 handshake to the client goes on where it stood.
#[test]
fn a_qos_2_handshake_goes_on_over_a_reconnect() {
    let server = Server::start();
    let resume = Connect::resume("client", 60);
    let mut client = Client::connect(server.address(), &resume);
    client.acknowledges = false;
    client.subscribe("a", 2);
    server
        .connect("publisher")
        .publish(Publish::new("a", "x").qos(2));
    let sent = client.next().publish();
    assert_eq!(sent.qos, 2);
    client.abort();

    // Not received as far as the server knows: again. Then released, and released again after another break.
    let mut client = Client::connect(server.address(), &resume);
    client.acknowledges = false;
    let again = client.next().publish();
    assert_eq!((again.packet_id, again.dup), (sent.packet_id, true));
    client.send(&packet::acknowledge(kind::PUBREC, sent.packet_id));
    assert_eq!(client.take_ack(kind::PUBREL, sent.packet_id).reason, 0);
    client.abort();
    let mut client = Client::connect(server.address(), &resume);
    client.acknowledges = false;
    assert_eq!(client.take_ack(kind::PUBREL, sent.packet_id).reason, 0);
    client.send(&packet::acknowledge(kind::PUBCOMP, sent.packet_id));
    client.expect_nothing();
}

#[test]
fn a_session_expires() {
    let server = Server::start();
    let resume = Connect::resume("client", 1);
    Client::connect(server.address(), &resume).abort();
    thread::sleep(Duration::from_millis(1500));
    assert!(!Client::connect(server.address(), &resume).session_present());
}

#[test]
fn a_disconnect_may_change_the_expiry() {
    let server = Server::start();
    let resume = Connect::resume("client", 60);
    let mut client = Client::connect(server.address(), &resume);
    client.send(&packet::disconnect(0, &[Property::SessionExpiry(0)]));
    client.expect_closed();
    assert!(!Client::connect(server.address(), &resume).session_present());
}

#[test]
fn take_over() {
    let server = Server::start();
    let resume = Connect::resume("client", 60);
    let mut old = Client::connect(server.address(), &resume);
    old.subscribe("a", 1);
    let mut new = Client::connect(server.address(), &resume);
    assert!(new.session_present());
    old.expect_disconnect(0x8E);
    // The end of the old connection took nothing from the new one.
    let mut publisher = server.connect("publisher");
    publisher.publish(Publish::new("a", "x").qos(1));
    assert_eq!(new.next().publish().payload, b"x");
    new.expect_nothing();
}

#[test]
fn an_empty_client_id_is_assigned_one() {
    let server = Server::start();
    let assigned = |client: &Client| {
        let connack = client.connack.clone().unwrap();
        connack
            .properties
            .iter()
            .find_map(|property| match property {
                Property::AssignedClientId(id) => Some(id.clone()),
                _ => None,
            })
            .expect("an assigned client identifier")
    };
    let (one, two) = (server.connect(""), server.connect(""));
    assert!(!assigned(&one).is_empty());
    assert_ne!(assigned(&one), assigned(&two));
}

/// What is not there is refused, not ignored.
#[test]
fn enhanced_authentication_is_refused() {
    let server = Server::start();
    let connect = Connect::new("client")
        .with(Property::AuthMethod("K8S-SAT".into()))
        .with(Property::AuthData(b"token".to_vec()));
    let (mut client, connack) = Client::try_connect(server.address(), &connect);
    assert_eq!(connack.reason, 0x8C, "{connack:?}");
    assert!(client.expect_closed().is_none());
}

/// User properties in a CONNECT, as the SDKs send them, and everything else that a CONNECT may have.
#[test]
fn a_connect_with_everything() {
    let server = Server::start();
    let mut connect = Connect::resume("client", u32::MAX)
        .with(Property::ReceiveMaximum(u16::MAX))
        .with(Property::MaximumPacketSize(u32::MAX))
        .with(Property::TopicAliasMaximum(10))
        .with(Property::RequestResponseInfo(1))
        .with(Property::RequestProblemInfo(1))
        .with(Property::user("metriccategory", "aiosdk-rust"))
        .with(Property::user("metriccategory", "again"));
    connect.keep_alive_s = 60;
    connect.user_name = Some("name".into());
    connect.password = Some(b"\0secret".to_vec());
    let mut client = Client::connect(server.address(), &connect);
    client.ping();
    client.disconnect();
    assert!(Client::connect(server.address(), &connect).session_present());
}
