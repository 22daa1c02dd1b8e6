//! Tests the limits that a client announces, and those of the server (MQTT 5, sections 3.1.2.11 and
//! 4.9).

use statehouse_tests::{
    Client, Connect, Property, Publish, Server,
    packet::{acknowledge, kind},
};

/// The server must not have more unacknowledged messages in flight than the client's Receive
/// Maximum.
#[test]
fn client_receive_maximum_limits_messages_in_flight() {
    let server = Server::start();
    let connect = Connect::new("client").with(Property::ReceiveMaximum(2));
    let mut client = Client::connect(server.address(), &connect);
    client.acknowledges = false;
    client.subscribe("a", 2);
    let mut publisher = server.connect("publisher");
    for n in 0..6_u8 {
        publisher.publish(Publish::new("a", [n]).qos(1));
    }
    // QoS 0 does not count.
    publisher.publish(Publish::new("a", "free").qos(0));
    for n in (0..6_u8).step_by(2) {
        let two: Vec<Publish> = (0..2)
            .map(|_| {
                client
                    .take("a message at QoS 1", |p| {
                        p.head & 6 == 2 && p.kind() == kind::PUBLISH
                    })
                    .publish()
            })
            .collect();
        assert_eq!(two[0].payload, [n]);
        assert_eq!(two[1].payload, [n + 1]);
        client.ping();
        let early = client.drain();
        assert!(
            early.iter().all(|packet| packet.publish().qos == 0),
            "more than two messages in flight: {early:?}"
        );
        for publish in two {
            client.send(&acknowledge(kind::PUBACK, publish.packet_id));
        }
    }
}

/// The server drops a message that is too large for a client, and delivers the next ones.
#[test]
fn message_above_the_client_maximum_size_is_dropped() {
    let server = Server::start();
    let connect = Connect::new("small").with(Property::MaximumPacketSize(100));
    let mut small = Client::connect(server.address(), &connect);
    let mut large = server.connect("large");
    for client in [&mut small, &mut large] {
        client.subscribe("a", 1);
    }
    let mut publisher = server.connect("publisher");
    for size in [10, 1000, 20] {
        publisher.publish(Publish::new("a", vec![b'x'; size]).qos(1));
    }
    for (client, sizes) in [(&mut small, vec![10, 20]), (&mut large, vec![10, 1000, 20])] {
        for size in sizes {
            assert_eq!(client.next().publish().payload.len(), size);
        }
        client.expect_nothing();
    }
}

/// The server supports QoS 2, retained messages, wildcards, identifiers and shared subscriptions,
/// so the CONNACK must not deny any of them.
#[test]
fn connack_denies_no_feature() {
    let server = Server::start();
    let connect = Connect::resume("client", u32::MAX);
    let client = Client::connect(server.address(), &connect);
    let properties = client.connack.clone().unwrap().properties;
    for property in &properties {
        match property {
            Property::MaximumQos(_) => panic!("QoS 2 is supported, so no maximum is announced"),
            Property::RetainAvailable(n)
            | Property::WildcardAvailable(n)
            | Property::SubscriptionIdAvailable(n)
            | Property::SharedAvailable(n) => assert_eq!(*n, 1, "{properties:?}"),
            _ => {}
        }
    }
}
