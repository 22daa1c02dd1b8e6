//! Every property in every packet of a client (MQTT 5, table 2-4). The server must accept a
//! property only in the packets that the standard allows, and must free refused wills and ended
//! subscriptions. In CVE-2023-3592, mosquitto leaked such wills.

use statehouse_tests::{
    Connect, Property, Publish,
    packet::{self, packet},
    property::{self, sized},
};

use crate::witness::Witness;

const MALFORMED: u8 = 0x81;
const PROTOCOL_ERROR: u8 = 0x82;
const BAD_AUTHENTICATION_METHOD: u8 = 0x8C;

/// A packet that carries properties.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Carrier {
    Connect,
    Will,
    Publish,
    /// PUBACK, PUBREC, PUBREL or PUBCOMP, with its first byte.
    Ack(u8),
    Subscribe,
    Unsubscribe,
    Disconnect,
}

use Carrier::{Ack, Disconnect, Publish as Message, Subscribe, Unsubscribe, Will};

const CARRIERS: [Carrier; 10] = [
    Carrier::Connect,
    Will,
    Message,
    Ack(0x40),
    Ack(0x50),
    Ack(0x62),
    Ack(0x70),
    Subscribe,
    Unsubscribe,
    Disconnect,
];

impl Carrier {
    /// All bytes of a client that sends this packet with the property.
    fn bytes(self, property: &Property) -> Vec<u8> {
        let own = property::write(std::slice::from_ref(property));
        let body = |before: &[u8], behind: &[u8]| [before, &own, behind].concat();
        let mut connect = Connect::new("attacker");
        let then = match self {
            Carrier::Connect => {
                connect.properties.push(property.clone());
                return connect.bytes();
            }
            Will => {
                let will = Publish::new("no/subscriber", "bye").with(property.clone());
                return connect.will(will, 0).bytes();
            }
            Message => packet(0x30, &body(&sized(b"no/subscriber"), b"x")),
            Ack(head) => packet(head, &body(&[0, 9, 0], b"")),
            Subscribe => packet(0x82, &body(&[0, 1], b"\0\x01a\0")),
            Unsubscribe => packet(0xA2, &body(&[0, 1], b"\0\x01a")),
            Disconnect => packet(0xE0, &body(&[0], b"")),
        };
        [connect.bytes(), then].concat()
    }
}

/// Each property with a valid value, and the packets in which a client may send it.
fn table() -> Vec<(Property, Vec<Carrier>)> {
    use Carrier::Connect;
    let message = || vec![Message, Will];
    let acks = [Ack(0x40), Ack(0x50), Ack(0x62), Ack(0x70)];
    let text = || "x".to_owned();
    vec![
        (Property::PayloadFormat(1), message()),
        (Property::MessageExpiry(9), message()),
        (Property::ContentType(text()), message()),
        (Property::ResponseTopic(text()), message()),
        (Property::CorrelationData(vec![1]), message()),
        (Property::SubscriptionId(1), vec![Subscribe]),
        (Property::SessionExpiry(0), vec![Connect, Disconnect]),
        (Property::AssignedClientId(text()), vec![]),
        (Property::ServerKeepAlive(1), vec![]),
        // The server supports no authentication method. Data needs a method.
        (Property::AuthMethod(text()), vec![]),
        (Property::AuthData(vec![1]), vec![]),
        (Property::RequestProblemInfo(1), vec![Connect]),
        (Property::WillDelay(1), vec![Will]),
        (Property::RequestResponseInfo(1), vec![Connect]),
        (Property::ResponseInfo(text()), vec![]),
        (
            Property::ReasonString(text()),
            [&acks[..], &[Disconnect]].concat(),
        ),
        (Property::ReceiveMaximum(1), vec![Connect]),
        (Property::TopicAliasMaximum(1), vec![Connect]),
        (Property::TopicAlias(1), vec![Message]),
        (Property::MaximumQos(1), vec![]),
        (Property::RetainAvailable(1), vec![]),
        (Property::user("a", "b"), CARRIERS.to_vec()),
        (Property::MaximumPacketSize(1000), vec![Connect]),
        (Property::WildcardAvailable(1), vec![]),
        (Property::SubscriptionIdAvailable(1), vec![]),
        (Property::SharedAvailable(1), vec![]),
    ]
}

#[test]
fn property_is_accepted_in_its_standard_packets_only() {
    let mut witness = Witness::new();
    for (property, allowed) in table() {
        for carrier in CARRIERS {
            let what = format!("{property:?} in {carrier:?}");
            let mut attacker = witness.server.open();
            attacker.send(&carrier.bytes(&property));
            if allowed.contains(&carrier) {
                if carrier == Disconnect {
                    let end = attacker.expect_closed_after(&what);
                    assert!(end.is_none(), "{what}: {end:?}");
                } else {
                    attacker.ping();
                    let answers = attacker.drain();
                    assert_eq!(answers[0].ack().reason, 0, "{what}: {answers:?}");
                    attacker.disconnect();
                }
                continue;
            }
            let end = attacker.expect_closed_after(&what);
            let connack = attacker.drain().remove(0).ack();
            let refusal = match carrier {
                Carrier::Connect | Will => connack,
                _ => end.unwrap_or_else(|| panic!("{what}: closed without a reason")),
            };
            let expected = match (&property, carrier) {
                (Property::AuthMethod(_), Carrier::Connect) => BAD_AUTHENTICATION_METHOD,
                // Valid in the packet, but not from this client.
                (Property::AuthData(_), Carrier::Connect)
                | (Property::SubscriptionId(_), Message)
                | (Property::ServerReference(_), Disconnect) => PROTOCOL_ERROR,
                // Section 2.2.2.2.
                _ => MALFORMED,
            };
            assert_eq!(refusal.reason, expected, "{what}: {refusal:?}");
        }
    }
    witness.unharmed();
}

/// Two thousand wills of 60 kB, each with a property that a will cannot have. Leaked, they would
/// take 120 MB.
#[test]
fn refused_will_is_freed() {
    let mut witness = Witness::new();
    let refuse = |count: u32| {
        for _ in 0..count {
            let will = Publish::new("no/subscriber", vec![b'x'; 60_000]);
            let connect = Connect::new("attacker").will(will.with(Property::TopicAlias(1)), 0);
            let mut attacker = witness.server.open();
            attacker.send(&connect.bytes());
            attacker.expect_closed();
            let reason = attacker.drain()[0].ack().reason;
            assert_eq!(reason, MALFORMED);
        }
    };
    refuse(100);
    let before_kib = witness.server.memory_kib();
    refuse(2000);
    witness.assert_grown_less_than(before_kib, 16 * 1024);
    witness.unharmed();
}

/// Thousands of subscriptions that are added, replaced and removed. The server must keep nothing of
/// them.
#[test]
fn removed_subscriptions_are_freed() {
    let mut witness = Witness::new();
    let mut attacker = witness.attacker();
    let mut subscribe_and_unsubscribe = |rounds: u32| {
        for n in 0..rounds {
            let filter = format!("a/{n}/{}", "x".repeat(1000));
            let id = [Property::SubscriptionId(n + 1)];
            assert_eq!(attacker.subscribe_with(&filter, 1, &id), 1);
            assert_eq!(attacker.subscribe(&filter, 2), 2);
            attacker.send(&packet::unsubscribe(7, &filter));
            let is_answer = |it: &packet::Packet| it.kind() == packet::kind::UNSUBACK;
            attacker.take("UNSUBACK", is_answer);
        }
    };
    subscribe_and_unsubscribe(200);
    let before_kib = witness.server.memory_kib();
    subscribe_and_unsubscribe(3000);
    witness.assert_grown_less_than(before_kib, 8 * 1024);
    attacker.disconnect();
    witness.unharmed();
}
