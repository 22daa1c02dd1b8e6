//! Requests that no honest client sends. They must not affect other clients. The transcripts test
//! the bytes of the answers.

use statehouse_tests::{
    Client, Connect, Hlc, Publish, Store, assert_contains,
    store::{NOTIFICATION_PREFIX, PREVIEW_TOPIC, REQUEST_TOPIC, notification_topic},
};
use statehouse_transcript::{self as transcript, Step};

use crate::witness::Witness;

const SYNTAX_ERROR: &[u8] = b"-ERR syntax error\r\n";

/// Sends every malformed payload of the transcripts, and checks the data after each.
#[test]
fn malformed_requests_change_nothing() {
    let mut witness = Witness::new();
    let mut attacker = witness.server.store("attacker");
    let text = include_str!("../../transcripts/malformed-sdk.txt");
    let mut tried = 0;
    for (_, step) in transcript::parse(text).unwrap().steps {
        let Step::Request {
            words, raw: true, ..
        } = step
        else {
            continue;
        };
        let request = attacker.request(words[0].bytes.clone());
        assert_eq!(attacker.call(&request).payload(), SYNTAX_ERROR);
        assert_eq!(witness.store.get("data"), Some(b"still there".to_vec()));
        tried += 1;
    }
    assert!(tried > 50, "only {tried} malformed requests");
    attacker.client.disconnect();
    witness.unharmed();
}

/// Sends every prefix of a valid request, and the request with one byte changed.
#[test]
fn truncated_or_altered_requests_are_refused() {
    let mut witness = Witness::new();
    let mut attacker = witness.server.store("attacker");
    let good = b"*5\r\n$3\r\nSET\r\n$6\r\nbroken\r\n$3\r\nval\r\n$2\r\nPX\r\n$1\r\n9\r\n";
    for at in 0..good.len() {
        let request = attacker.request(&good[..at]);
        let answer = attacker.call(&request);
        assert_eq!(answer.payload(), SYNTAX_ERROR, "cut at {at}");
        for byte in [0, b'\r', b'\n', b'0', b'9', b'*', b'$', 0xFF] {
            let mut altered = good.to_vec();
            altered[at] = byte;
            let request = attacker.request(altered);
            let answer = attacker.call(&request);
            let expected = match at {
                _ if request.payload == good => "+OK",
                8..11 => "-ERR unknown command",
                // The key and the value may be any bytes.
                17..23 | 29..32 => "+OK",
                _ => "-ERR syntax error",
            };
            let expected = format!("{expected}\\r\\n");
            assert_eq!(answer.text(), expected, "byte {at} changed to {byte}");
        }
    }
    attacker.client.disconnect();
    witness.unharmed();
}

#[test]
fn huge_payloads_and_hostile_patterns_are_refused() {
    let mut witness = Witness::new();
    let mut attacker = witness.server.store("attacker");
    for byte in [b'*', b'$', b'\r', 0, 0xFF] {
        let request = attacker.request(vec![byte; 1 << 20]);
        assert_eq!(attacker.call(&request).payload(), SYNTAX_ERROR);
    }
    // A great number of arguments.
    let mut many = b"*100000\r\n".to_vec();
    many.extend(b"$1\r\nx\r\n".repeat(100_000));
    let request = attacker.request(many);
    let answer = attacker.call(&request);
    assert_eq!(answer.payload(), b"-ERR unknown command\r\n");
    // A pattern that takes a backtracking matcher exponential time, and patterns over the limits.
    attacker.set("a".repeat(200), "v");
    for (pattern, expected) in [
        (format!("{}b", "a*".repeat(60)), &b"*1\r\n*0\r\n"[..]),
        (format!("{}b", "a*".repeat(100)), SYNTAX_ERROR),
        ("[".repeat(60_000), SYNTAX_ERROR),
        ("*?".repeat(30_000), SYNTAX_ERROR),
    ] {
        let answer = attacker.ask(&["SCAN", &pattern]);
        assert_eq!(answer.payload(), expected, "{}", answer.text());
    }
    attacker.client.disconnect();
    witness.unharmed();
}

/// With these response topics, the store would publish on reserved topics.
#[test]
fn forbidden_response_topic_ends_the_connection() {
    let mut witness = Witness::new();
    let cases = [
        (REQUEST_TOPIC.to_string(), 0x90),
        (PREVIEW_TOPIC.to_string(), 0x90),
        (NOTIFICATION_PREFIX.to_string(), 0x90),
        (
            format!("{NOTIFICATION_PREFIX}/7769746E657373/command/notify/6B"),
            0x90,
        ),
        (format!("{NOTIFICATION_PREFIX}X"), 0x90),
        ("$SYS/broker/uptime".to_string(), 0x90),
        ("clients/+/response".to_string(), 0x82),
        ("clients/#".to_string(), 0x82),
        ("#".to_string(), 0x82),
    ];
    for (topic, reason) in cases {
        for qos in [0, 1, 2] {
            let mut attacker = witness.server.store("attacker");
            let mut request = attacker.command(&["SET", "data", "stolen"]);
            request.response_topic = Some(topic.clone());
            request.qos = qos;
            attacker.client.start(request.publish());
            attacker.client.expect_disconnect(reason);
            assert!(attacker.client.drain().is_empty(), "{topic} was answered");
        }
    }
    witness.store.client.expect_nothing();
    witness.unharmed();
}

/// Guards against two former bugs. The server left the QoS 2 exchange of the disconnected client
/// open. After a resume, it never answered the repeated PUBLISH, nor anything later, since
/// acknowledgements keep their order. It also executed a request that arrived in the same read
/// after the forbidden one.
#[test]
fn disconnected_requester_leaves_no_open_exchange() {
    let mut witness = Witness::new();
    let session = Connect::resume("attacker", 60);
    let connect = || Client::connect(witness.server.address(), &session);
    let mut attacker = Store::new(connect(), "attacker");
    let mut forbidden = attacker.command(&["SET", "data", "stolen"]);
    forbidden.qos = 2;
    forbidden.response_topic = Some(REQUEST_TOPIC.to_string());
    let mut behind = attacker.command(&["SET", "data", "stolen too"]);
    behind.qos = 2;
    let mut bytes = Vec::new();
    let ids = [30_001, 30_002];
    for (request, packet_id) in [&forbidden, &behind].into_iter().zip(ids) {
        let mut publish = request.publish();
        publish.packet_id = packet_id;
        bytes.extend(publish.bytes());
    }
    attacker.client.send(&bytes);
    attacker.client.expect_disconnect(0x90);
    assert_eq!(witness.store.get("data"), Some(b"still there".to_vec()));

    let mut again = connect();
    assert!(again.session_present());
    for packet_id in ids {
        let mut publish = Publish::new("no/subscriber", "").qos(2);
        publish.packet_id = packet_id;
        again.send(&publish.bytes());
        // 0x10, no matching subscribers: both identifiers are free, so these are new messages.
        assert_eq!(again.take_ack(5, packet_id).reason, 0x10);
    }
    again.disconnect();
    witness.unharmed();
}

/// A request that cannot be answered is not executed. If its QoS allows, it is refused with a
/// reason.
#[test]
fn unanswerable_requests_are_refused_and_not_executed() {
    let mut witness = Witness::new();
    let mut attacker = witness.server.store("attacker");
    for what in ["response topic", "correlation data"] {
        for qos in [0, 1, 2] {
            let mut request = attacker.command(&["SET", "data", "lost"]);
            if what == "response topic" {
                request.response_topic = None;
            } else {
                request.correlation = None;
            }
            request.qos = qos;
            let ack = attacker.client.publish(request.publish());
            if qos > 0 {
                assert_eq!(ack.reason, 0x83, "without {what} at QoS {qos}");
                assert_contains!(ack.text().to_lowercase(), what);
            }
        }
    }
    // At QoS 0, a request with both properties is refused in its answer.
    let mut request = attacker.command(&["SET", "data", "lost"]);
    request.qos = 0;
    assert_eq!(attacker.call(&request).payload(), SYNTAX_ERROR);
    attacker.expect_nothing();
    attacker.client.disconnect();
    witness.unharmed();
}

/// Only the store receives requests. A subscription to their topics gets none of them.
#[test]
fn subscription_to_request_topics_gets_no_requests() {
    let mut witness = Witness::new();
    let mut attacker = witness.attacker();
    for filter in [
        "#",
        "statestore/#",
        REQUEST_TOPIC,
        "$services/#",
        PREVIEW_TOPIC,
        "clients/+/services/#",
    ] {
        assert_eq!(attacker.subscribe(filter, 1), 1, "{filter}");
        let shared = format!("$share/group/{filter}");
        assert_eq!(attacker.subscribe(&shared, 1), 1, "{shared}");
    }
    witness.store.watch("data");
    witness.store.set("data", "secret");
    witness.store.notification();
    // Any client may receive answers, since their topic is open. It must not receive requests or
    // notifications.
    attacker.ping();
    let received = attacker.drain();
    assert!(!received.is_empty(), "no answer arrived");
    for packet in received {
        let topic = packet.publish().topic;
        assert_eq!(topic, witness.store.response_topic());
    }
    witness.store.set("data", "still there");
    attacker.disconnect();
    witness.store.notification();
    witness.unharmed();
}

/// The watcher does not receive the message even if it subscribes to its notification topic.
#[test]
fn forged_notification_does_not_reach_the_watcher() {
    let mut witness = Witness::new();
    witness.store.watch("data");
    let mut attacker = witness.attacker();
    let topic = notification_topic("witness", b"data");
    assert_eq!(witness.store.client.subscribe(&topic, 1), 1);
    let payload = "*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n";
    let forged = Publish::new(&topic, payload);
    assert_eq!(attacker.publish(forged.clone()).reason, 0);
    assert_eq!(attacker.publish(forged.qos(1)).reason, 0x87);
    witness.store.expect_nothing();
    attacker.disconnect();
    witness.unharmed();
}

/// Malformed timestamps, and ones far in the future. The store refuses them, and they must neither
/// advance its clock nor make its versions fall.
#[test]
fn absurd_timestamps_are_refused_and_move_no_clock() {
    /// The longest string of MQTT.
    const TEXT_BYTES_MAX: usize = 65_535;
    let mut witness = Witness::new();
    let before_kib = witness.server.memory_kib();
    let mut attacker = witness.server.store("attacker");
    let long = "9".repeat(TEXT_BYTES_MAX);
    let far = Hlc::now(61_000).to_string();
    let zeros = format!("{}:0:a", "0".repeat(60_000));
    let malformed = [
        "18446744073709551616:0:a",
        "1:4294967296:a",
        "1:0:",
        "::",
        ":",
        "-1:0:a",
        "1:0:a:b",
        "\u{FFFF}:0:a",
        &long,
    ];
    // These are well formed, but too far in the future for a request.
    let ahead = ["18446744073709551615:0:a", "281474976710656:0:a", &far];
    let tries = malformed.iter().map(|it| ("__ft", *it));
    let tries = tries.chain(malformed.iter().chain(&ahead).map(|it| ("__ts", *it)));
    for (name, timestamp) in tries {
        let request = attacker.command(&["SET", "attacked", "v"]);
        let request = request.without(name).with(name, timestamp);
        let answer = attacker.call(&request);
        let shown = &timestamp[..timestamp.floor_char_boundary(30)];
        assert!(
            answer.payload().starts_with(b"-ERR "),
            "{name}={shown}: {}",
            answer.text()
        );
    }
    assert_eq!(attacker.get("attacked"), None);
    // A node may be any text, since it is only compared. The second request fences its key.
    let node = format!("1:0:{}", &long[..60_000]);
    for name in ["__ts", "__ft"] {
        let request = attacker.command(&["SET", name, "v"]);
        let answer = attacker.call(&request.without(name).with(name, &node));
        assert_eq!(answer.text(), "+OK\\r\\n");
    }
    // A mebibyte of timestamps in one request. The first one counts.
    let mut request = attacker.command(&["SET", "attacked", "v"]);
    for _ in 0..16 {
        request = request.with("__ts", &zeros);
    }
    assert_eq!(attacker.call(&request).text(), "+OK\\r\\n");
    // A timestamp with the highest counter, and as far ahead as allowed.
    let last_of_its_time = Hlc {
        counter: u32::MAX,
        ..Hlc::now(30_000)
    };
    let mut last = witness.store.set("data", "still there");
    let request = attacker.command(&["SET", "attacked", "v"]).without("__ts");
    let answer = attacker.call(&request.with("__ts", &last_of_its_time));
    assert_eq!(answer.text(), "+OK\\r\\n");
    for _ in 0..100 {
        let version = witness.store.set("data", "still there");
        assert!(version > last, "{version} after {last}");
        last = version;
    }
    witness.assert_grown_less_than(before_kib, 16 * 1024);
    attacker.client.disconnect();
    witness.unharmed();
}
