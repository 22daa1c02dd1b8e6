//! Tests connects, and sessions that outlive their connection (MQTT 5, sections 3.1 and 4.1).

use std::{thread, time::Duration};

use statehouse_tests::{
    Client, Connect, Property, Publish, Server,
    packet::{self, kind},
};

#[test]
fn resumed_session_delivers_queued_messages() {
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

    // A clean start discards the session.
    let client = server.connect("client");
    assert!(!client.session_present());
    client.disconnect();
    let mut client = Client::connect(server.address(), &resume);
    assert!(!client.session_present());
    publisher.publish(Publish::new("a/b", "undelivered").qos(1));
    client.expect_nothing();
}

/// The server redelivers unacknowledged messages in order, with DUP and the same packet ids, before
/// new messages.
#[test]
fn unacknowledged_messages_are_redelivered_first() {
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
        let redelivered = client.next().publish();
        assert!(redelivered.dup, "{redelivered:?}");
        assert_eq!(redelivered.packet_id, sent.packet_id);
        assert_eq!(redelivered.payload, sent.payload);
    }
    let new = client.next().publish();
    assert_eq!((&new.payload[..], new.dup), (&[3][..], false));
    client.expect_nothing();
}

/// The client breaks the connection after the PUBLISH, and again after the PUBREL.
#[test]
fn qos_2_handshake_continues_after_a_reconnect() {
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

    // Without a PUBREC the server sends the message again. Without a PUBCOMP it sends the PUBREL
    // again.
    let mut client = Client::connect(server.address(), &resume);
    client.acknowledges = false;
    let redelivered = client.next().publish();
    assert_eq!(redelivered.packet_id, sent.packet_id);
    assert!(redelivered.dup);
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
fn empty_client_id_is_replaced_by_a_unique_one() {
    let server = Server::start();
    let assigned = |client: &Client| {
        let properties = client.connack.clone().unwrap().properties;
        let assigned = properties.into_iter().find_map(|it| match it {
            Property::AssignedClientId(id) => Some(id),
            _ => None,
        });
        assigned.expect("an assigned client identifier")
    };
    let (one, two) = (server.connect(""), server.connect(""));
    assert!(!assigned(&one).is_empty());
    assert_ne!(assigned(&one), assigned(&two));
}

/// The server does not support enhanced authentication. It must refuse the client, not ignore the
/// properties.
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

/// A CONNECT with every optional property, and with the user properties that the SDKs send.
#[test]
fn connect_with_all_properties_is_accepted() {
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

/// MQTT 5, section 3.1.2.10: a client is late if it sends nothing, not if the store does not run.
#[test]
fn paused_store_keeps_clients_whose_packets_wait_in_their_sockets() {
    let server = Server::start();
    let clients = (0..20).map(|number| {
        let mut connect = Connect::new(&format!("client-{number}"));
        connect.keep_alive_s = 1;
        Client::connect(server.address(), &connect)
    });
    let mut clients: Vec<Client> = clients.collect();
    server.signal("STOP");
    for _ in 0..3 {
        for client in &mut clients {
            client.send(&packet::PINGREQ);
        }
        thread::sleep(Duration::from_secs(1));
    }
    server.signal("CONT");
    for client in &mut clients {
        client.ping();
    }
}
