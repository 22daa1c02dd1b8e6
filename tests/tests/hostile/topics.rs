//! Hostile topics and filters: invalid ones, too many, and too deep. The server must refuse them,
//! with limited time and memory.

use std::time::{Duration, Instant};

use statehouse_tests::{
    Client, Connect, Heard, Publish,
    client::PATIENCE,
    packet::{self, kind},
    property::sized,
};

use crate::witness::Witness;

/// MQTT 5 reason codes.
const MALFORMED: u8 = 0x81;
const PROTOCOL_ERROR: u8 = 0x82;
const NOT_AUTHORIZED: u8 = 0x87;
const TOPIC_FILTER_INVALID: u8 = 0x8F;
const TOPIC_NAME_INVALID: u8 = 0x90;
const QUOTA_EXCEEDED: u8 = 0x97;

/// The server refuses an invalid filter in the SUBACK, or ends the connection.
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
        match attacker.poll(PATIENCE) {
            Heard::Packet(answer) if answer.kind() == kind::SUBACK => {
                assert_eq!(answer.suback().1, [TOPIC_FILTER_INVALID, 0], "{filter}");
                attacker.disconnect();
            }
            Heard::Packet(answer) => {
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

/// 100 000 filters in one packet, and thousands over many packets. Each group of shared
/// subscriptions may deliver a copy of one message to the client, so groups have their own limit.
#[test]
fn filters_and_groups_over_their_limit_are_refused() {
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

/// The same limit holds for UNSUBSCRIBE.
#[test]
fn unsubscribe_from_100_000_filters_disconnects() {
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

/// Monitors take messages below `$SYS/` for those of the broker (section 4.7.2).
#[test]
fn no_client_publishes_below_sys() {
    let mut witness = Witness::new();
    let mut monitor = witness.server.connect("monitor");
    assert_eq!(monitor.subscribe("$SYS/#", 1), 1);
    let mut attacker = witness.attacker();
    let forged = Publish::new("$SYS/broker/uptime", "forged").retained();
    for (qos, reason) in [(0, 0), (1, NOT_AUTHORIZED), (2, NOT_AUTHORIZED)] {
        assert_eq!(attacker.publish(forged.clone().qos(qos)).reason, reason);
    }
    attacker.ping();
    let will = Connect::new("attacker2").will(forged, 0);
    let (_, connack) = Client::try_connect(witness.server.address(), &will);
    assert_eq!(connack.reason, TOPIC_NAME_INVALID);
    // Neither sent nor retained.
    assert_eq!(monitor.subscribe("$SYS/#", 1), 1);
    monitor.expect_nothing();
    monitor.disconnect();
    attacker.disconnect();
    witness.unharmed();
}

/// A topic that consists only of levels, in each field that takes a topic (mosquitto's
/// CVE-2019-11779). Each is refused on its own, and none takes time or stack for each of its
/// levels.
#[test]
fn topic_of_65536_levels_is_refused_quickly() {
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
        // The topic as a response topic.
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
    // The topic as a will topic, within the size of a CONNECT.
    let will = Connect::new("attacker2").will(Publish::new(&levels[..60_000], "x"), 0);
    let (_, connack) = Client::try_connect(witness.server.address(), &will);
    assert_eq!(connack.reason, TOPIC_NAME_INVALID);
    let took = began.elapsed();
    assert!(took < Duration::from_secs(10), "{took:?}");
    witness.assert_grown_less_than(before_kib, 16 * 1024);
    attacker.disconnect();
    witness.unharmed();
}
