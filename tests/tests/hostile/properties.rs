//! Every property in every packet of a client (MQTT 5 table 2-4): taken where the standard has it, and the end of the
//! connection anywhere else. What mosquitto kept for ever (CVE-2023-3592), and where others read nothing.

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
    /// PUBACK, PUBREC, PUBREL and PUBCOMP, by their first byte.
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
    /// All that a client sends with this property.
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
                let will = Publish::new("nobody/listens", "bye").with(property.clone());
                return connect.will(will, 0).bytes();
            }
            Message => packet(0x30, &body(&sized(b"nobody/listens"), b"x")),
            Ack(head) => packet(head, &body(&[0, 9, 0], b"")),
            Subscribe => packet(0x82, &body(&[0, 1], b"\0\x01a\0")),
            Unsubscribe => packet(0xA2, &body(&[0, 1], b"\0\x01a")),
            Disconnect => packet(0xE0, &body(&[0], b"")),
        };
        [connect.bytes(), then].concat()
    }
}

/// Each property with a value that is good, and the packets that a client may send it in.
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
        // A method that is not served, which its code says; data without a method.
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
fn a_property_is_taken_where_the_standard_has_it_and_nowhere_else() {
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
            let expected = [MALFORMED, PROTOCOL_ERROR, BAD_AUTHENTICATION_METHOD];
            assert!(expected.contains(&refusal.reason), "{what}: {refusal:?}");
        }
    }
    witness.unharmed();
}

/// Two thousand wills of 60 kB, each with a property that a will cannot have: 120 MB, were they kept.
#[test]
fn a_will_that_is_refused_leaves_nothing_behind() {
    let mut witness = Witness::new();
    let refuse = |count: u32| {
        for _ in 0..count {
            let will = Publish::new("nobody/listens", vec![b'x'; 60_000]);
            let connect = Connect::new("attacker").will(will.with(Property::TopicAlias(1)), 0);
            let mut attacker = witness.server.open();
            attacker.send(&connect.bytes());
            attacker.expect_closed();
            let reason = attacker.drain()[0].ack().reason;
            assert!([MALFORMED, PROTOCOL_ERROR].contains(&reason), "{reason:#x}");
        }
    };
    refuse(100);
    let before_kib = witness.server.memory_kib();
    refuse(2000);
    witness.assert_grown_less_than(before_kib, 16 * 1024);
    witness.unharmed();
}

/// Subscriptions that come and go, and are replaced, by the thousand: what they leave behind is nothing.
#[test]
fn subscriptions_that_come_and_go_leave_nothing_behind() {
    let mut witness = Witness::new();
    let mut attacker = witness.attacker();
    let mut come_and_go = |rounds: u32| {
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
    come_and_go(200);
    let before_kib = witness.server.memory_kib();
    come_and_go(3000);
    witness.assert_grown_less_than(before_kib, 8 * 1024);
    attacker.disconnect();
    witness.unharmed();
}
