//! Topics and filters that no honest client has: invalid, without a bound in number or depth.

use std::time::{Duration, Instant};

use statehouse_tests::{
    Client, Connect, Publish,
    packet::{self, kind},
    property::sized,
};

use crate::witness::Witness;

/// MQTT 5 reason codes.
const MALFORMED: u8 = 0x81;
const PROTOCOL_ERROR: u8 = 0x82;
const TOPIC_FILTER_INVALID: u8 = 0x8F;
const TOPIC_NAME_INVALID: u8 = 0x90;
const QUOTA_EXCEEDED: u8 = 0x97;

/// Filters that are refused one by one leave the connection alone or end it; neither makes them hear anything.
#[test]
fn invalid_filters_are_refused() {
    let mut witness = Witness::new();
    for filter in [
        "",
        "a/#/b",
        "a#",
        "#/a",
        "a+",
        "+a/b",
        "a/b+/c",
        "$share/",
        "$share/g",
        "$share/g/",
        "$share//a",
        "$share/+/a",
        "$share/g/a#",
        "$share/g/$share/h/a",
    ] {
        let mut attacker = witness.attacker();
        attacker.send(&packet::subscribe(1, &[], &[(filter, 0), ("good", 0)]));
        match attacker.poll(statehouse_tests::client::PATIENCE) {
            statehouse_tests::Heard::Packet(answer) if answer.kind() == packet::kind::SUBACK => {
                assert_eq!(answer.suback().1, [TOPIC_FILTER_INVALID, 0], "{filter}");
                attacker.disconnect();
            }
            statehouse_tests::Heard::Packet(answer) => {
                let reason = answer.ack().reason;
                assert!(
                    [TOPIC_FILTER_INVALID, MALFORMED, PROTOCOL_ERROR].contains(&reason),
                    "{filter}: {answer:?}"
                );
            }
            other => panic!("{filter}: {other:?}"),
        }
    }
    witness.unharmed();
}

/// By the hundred thousand in one packet, and by the thousand in many: each group that a client is in may bring it a copy of
/// one message, so these are bounded by themselves.
#[test]
fn more_filters_than_anybody_needs() {
    let mut witness = Witness::new();
    for start in ["", "$share/g/"] {
        let mut attacker = witness.attacker();
        let filters: Vec<_> = (0..100_000).map(|n| format!("{start}{n}")).collect();
        let filters: Vec<_> = filters.iter().map(|it| (it.as_str(), 0)).collect();
        attacker.send(&packet::subscribe(1, &[], &filters));
        attacker.expect_disconnect(QUOTA_EXCEEDED);
    }
    let mut attacker = witness.attacker();
    let mut granted = 0;
    for n in 0..2000 {
        let reason = attacker.subscribe(&format!("$share/{n}/copies"), 0);
        assert!([0, QUOTA_EXCEEDED].contains(&reason), "{reason:#x}");
        granted += usize::from(reason == 0);
    }
    assert!((1..=100).contains(&granted), "{granted} groups");
    attacker.start(Publish::new("copies", "x"));
    attacker.ping();
    assert_eq!(attacker.drain().len(), granted);
    attacker.disconnect();
    witness.unharmed();
}

/// The same to unsubscribe from.
#[test]
fn a_hundred_thousand_filters_to_unsubscribe_from() {
    let mut witness = Witness::new();
    let mut attacker = witness.attacker();
    let mut body = vec![0, 1, 0];
    for n in 0..100_000 {
        body.extend(sized(n.to_string().as_bytes()));
    }
    attacker.send(&packet::packet(0xA2, &body));
    attacker.expect_disconnect(QUOTA_EXCEEDED);
    witness.unharmed();
}

/// CVE-2019-11779 of mosquitto: a topic of nothing but levels, wherever a client may write one. Each is refused by itself,
/// and none takes the time or the stack of a level for each of its bytes.
#[test]
fn a_topic_of_65536_levels() {
    let mut witness = Witness::new();
    let before_kib = witness.server.memory_kib();
    let levels = "/".repeat(65_535);
    let wildcards = "+/".repeat(32_767);
    let mut attacker = witness.attacker();
    let began = Instant::now();
    for topic in [&levels, &format!("a{}", &levels[1..])] {
        let ack = attacker.publish(Publish::new(topic, "x").qos(1));
        assert_eq!(ack.reason, TOPIC_NAME_INVALID);
        attacker.publish(Publish::new(topic, "x"));
        // An answer would go there.
        let mut request = witness.store.command(&["GET", "data"]);
        request.response_topic = Some(topic.clone());
        let ack = attacker.publish(request.publish());
        assert!(ack.reason < 0x80, "{ack:?}");
    }
    for filter in [&levels, &wildcards, &format!("{wildcards}#")] {
        for _ in 0..50 {
            assert_eq!(attacker.subscribe(filter, 1), TOPIC_FILTER_INVALID);
            attacker.send(&packet::unsubscribe(9, filter));
            attacker.take("UNSUBACK", |it| it.kind() == kind::UNSUBACK);
        }
    }
    // As long as a CONNECT may be.
    let will = Connect::new("attacker2").will(Publish::new(&levels[..60_000], "x"), 0);
    let (_, connack) = Client::try_connect(witness.server.address(), &will);
    assert_eq!(connack.reason, TOPIC_NAME_INVALID);
    let took = began.elapsed();
    assert!(took < Duration::from_secs(10), "{took:?}");
    witness.assert_grown_less_than(before_kib, 16 * 1024);
    attacker.disconnect();
    witness.unharmed();
}
