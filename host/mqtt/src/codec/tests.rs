//! Tests the codec against rumqttc's independent codec, and against malformed bytes.

mod version_3;

use bytes::{Bytes, BytesMut};
use proptest::prelude::*;
use rumqttc::v5::mqttbytes::{QoS as Q, v5 as wire};

use super::{
    Answer, Bounds, Delivery, Packet, Violation, connack_refused, decode, decode_connect, publish,
    publish_bytes,
};
use crate::{
    Message,
    ProtocolVersion::{V5, V311},
    QoS, ReasonCode,
};

const MALFORMED: ReasonCode = ReasonCode::MALFORMED_PACKET;
const PROTOCOL: ReasonCode = ReasonCode::PROTOCOL_ERROR;

const BOUNDS: Bounds = Bounds {
    version: V5,
    packet_bytes_max: 1 << 20,
    filters_max: 8,
};

fn read(bytes: &[u8]) -> Result<Option<Packet>, Violation> {
    decode(&mut BytesMut::from(bytes), BOUNDS)
}

fn text() -> impl Strategy<Value = String> {
    "[^\0]{0,12}"
}

fn name() -> impl Strategy<Value = String> {
    "[^\0#+]{1,12}"
}

fn qos() -> impl Strategy<Value = Q> {
    prop_oneof![
        Just(Q::AtMostOnce),
        Just(Q::AtLeastOnce),
        Just(Q::ExactlyOnce)
    ]
}

fn data() -> impl Strategy<Value = Bytes> {
    prop::collection::vec(any::<u8>(), 0..40).prop_map(Bytes::from)
}

prop_compose! {
    fn properties()(
        payload_format_indicator in prop::option::of(0..=1_u8),
        message_expiry_interval in any::<Option<u32>>(),
        topic_alias in any::<Option<u16>>(),
        response_topic in prop::option::of(name()),
        correlation_data in prop::option::of(data()),
        user_properties in prop::collection::vec((text(), text()), 0..4),
        content_type in prop::option::of(text()),
    ) -> wire::PublishProperties {
        wire::PublishProperties {
            payload_format_indicator,
            message_expiry_interval,
            topic_alias,
            response_topic,
            correlation_data,
            user_properties,
            subscription_identifiers: Vec::new(),
            content_type,
        }
    }
}

prop_compose! {
    fn publishes()(
        qos in qos(),
        dup in any::<bool>(),
        retain in any::<bool>(),
        topic in name(),
        id in 1..=u16::MAX,
        payload in data(),
        properties in properties(),
    ) -> wire::Publish {
        let mut publish = wire::Publish::new(topic, qos, payload, Some(properties));
        publish.dup = dup && qos != Q::AtMostOnce;
        publish.retain = retain;
        publish.pkid = if qos == Q::AtMostOnce { 0 } else { id };
        publish
    }
}

fn encoded(packet: &wire::Packet) -> BytesMut {
    let mut bytes = BytesMut::new();
    packet.write(&mut bytes, None).unwrap();
    bytes
}

proptest! {
    /// The codec decodes the PUBLISH of rumqttc, and rumqttc decodes the forwarded PUBLISH as the
    /// same message.
    #[test]
    fn publish_round_trips_through_rumqttc(sent in publishes(), ids in prop::collection::vec(1..200_000_u32, 0..3)) {
        let bytes = encoded(&wire::Packet::Publish(sent.clone()));
        let Some(Packet::Publish(got)) = read(&bytes).unwrap() else { panic!("not a PUBLISH") };
        let mut expected = sent.properties.clone().unwrap();
        prop_assert_eq!(got.properties.response_topic(), expected.response_topic.as_deref());
        prop_assert_eq!(got.properties.correlation_data(), expected.correlation_data.as_deref());
        prop_assert_eq!(got.properties.content_type(), expected.content_type.as_deref());
        prop_assert_eq!(got.properties.message_expiry_s(), expected.message_expiry_interval);
        prop_assert_eq!(got.properties.payload_is_utf8(), expected.payload_format_indicator == Some(1));
        let user: Vec<_> = got.properties.user().map(|(k, v)| (k.to_owned(), v.to_owned())).collect();
        prop_assert_eq!(&user, &expected.user_properties);

        let message = Message {
            topic: got.topic.clone(),
            payload: got.payload.clone(),
            properties: got.properties.forwarded(),
            qos: got.qos,
            retain: got.retain,
            expires: None,
        };
        prop_assert_eq!(&message.detached(), &message);
        let delivery = Delivery {
            qos: got.qos,
            dup: got.dup,
            retain: got.retain,
            packet_id: got.packet_id,
            subscription_ids: &ids,
            expiry_s: got.properties.message_expiry_s(),
        };
        let mut forwarded = BytesMut::new();
        publish(&mut forwarded, V5, &message, &delivery);
        prop_assert_eq!(forwarded.len(), publish_bytes(V5, &message, &delivery));
        expected.topic_alias = None;
        expected.subscription_identifiers = ids.iter().map(|id| *id as usize).collect();
        let wire::Packet::Publish(mut again) = wire::Packet::read(&mut forwarded, None).unwrap() else {
            panic!("not a PUBLISH")
        };
        let properties = again.properties.take().unwrap_or_default();
        prop_assert_eq!(properties, expected);
        let mut sent = sent;
        sent.properties = None;
        prop_assert_eq!(again, sent);
        prop_assert!(forwarded.is_empty());
    }

    /// A packet decodes the same however it is split into reads, and not before its last byte.
    #[test]
    fn packet_split_at_any_byte_decodes_the_same(sent in publishes()) {
        let bytes = encoded(&wire::Packet::Publish(sent));
        let whole = read(&bytes).unwrap();
        for cut in 0..bytes.len() {
            let mut buffer = BytesMut::from(&bytes[..cut]);
            prop_assert_eq!(decode(&mut buffer, BOUNDS).unwrap(), None);
            prop_assert_eq!(buffer.len(), cut, "an incomplete packet stays in the buffer");
            buffer.extend_from_slice(&bytes[cut..]);
            prop_assert_eq!(&decode(&mut buffer, BOUNDS).unwrap(), &whole);
            prop_assert!(buffer.is_empty());
        }
    }

    #[test]
    fn arbitrary_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut buffer = BytesMut::from(&bytes[..]);
        while let Ok(Some(_)) = decode(&mut buffer, BOUNDS) {}
        _ = decode_connect(&mut BytesMut::from(&bytes[..]), 1000);
    }
}

#[test]
fn connect_of_rumqttc_decodes() {
    let hello = crate::testing::Hello::new("client")
        .will("w/t", "gone", 9)
        .clean()
        .window(3)
        .set(|properties| {
            properties.max_packet_size = Some(4000);
            properties.request_problem_info = Some(0);
            properties.request_response_info = Some(1);
            properties.topic_alias_max = Some(7);
            properties
                .user_properties
                .push(("a".to_owned(), "b".to_owned()));
        });
    let login = wire::Login::new("user", "word");
    let packet = wire::Packet::Connect(hello.connect, hello.will, Some(login));
    let mut bytes = encoded(&packet);
    for cut in 0..bytes.len() {
        assert_eq!(
            decode_connect(&mut BytesMut::from(&bytes[..cut]), 1000),
            Ok(None),
            "{cut}"
        );
    }
    let connect = decode_connect(&mut bytes, 1000).unwrap().unwrap();
    assert_eq!((&*connect.client_id, connect.clean_start), ("client", true));
    assert_eq!(connect.keep_alive_s, 60);
    assert_eq!((connect.receive_max, connect.packet_bytes_max), (3, 4000));
    assert!(!connect.problem_info);
    assert_eq!((connect.session_expiry_s, connect.enhanced), (1000, None));
    let will = connect.will.unwrap();
    assert_eq!(
        (will.delay_s, will.expiry_s, will.message.qos),
        (9, None, QoS::AtLeastOnce)
    );
    assert_eq!(
        will.message.properties,
        &b"\x26\0\x01w\0\x011"[..],
        "the delay is not forwarded"
    );
    assert!(bytes.is_empty());
}

/// A CONNECT of protocol version 5 from what follows the version.
fn connect(rest: &[u8]) -> BytesMut {
    let body = [&b"\0\x04MQTT\x05"[..], rest].concat();
    BytesMut::from(&[&[0x10, body.len() as u8][..], &body].concat()[..])
}

#[test]
fn invalid_connects_are_refused() {
    for (rest, reason) in [
        (&b"\x03\0\x3c\0\0\0"[..], MALFORMED),          // reserved flag
        (b"\x0a\0\x3c\0\0\0", MALFORMED),               // will QoS without a will
        (b"\x1e\0\x3c\0\0\0", MALFORMED),               // will QoS 3
        (b"\x02\0\x3c\x03\x21\0\0\0\0", PROTOCOL),      // receive maximum 0
        (b"\x02\0\x3c\x05\x27\0\0\0\0\0\0", PROTOCOL),  // maximum packet size 0
        (b"\x02\0\x3c\x02\x17\x02\0\0", PROTOCOL),      // problem information 2
        (b"\x02\0\x3c\x04\x17\0\x17\0\0\0", PROTOCOL),  // a property twice
        (b"\x02\0\x3c\x03\x23\0\x01\0\0", MALFORMED),   // a property of PUBLISH
        (b"\x02\0\x3c\x02\x7f\0\0\0", MALFORMED),       // an unknown one
        (b"\x02\0\x3c\x04\x16\0\x01a\0\0", PROTOCOL),   // authentication data alone
        (b"\x02\0\x3c\0\0\x01\0", MALFORMED),           // U+0000 in the client id
        (b"\x02\0\x3c\0\0\x01\xff", MALFORMED),         // not UTF-8
        (b"\x02\0\x3c\0\0\0\0", MALFORMED),             // a byte too many
        (b"\x82\0\x3c\0\0\0", MALFORMED),               // no user name
        (b"\x06\0\x3c\0\0\0\0\0\0\0\0", PROTOCOL),      // empty will topic
        (b"\x06\0\x3c\0\0\0\0\0\x01#\0\0", PROTOCOL),   // wildcard in it
        (b"\x06\0\x3c\0\0\0\0\0\x01\0\0\0", MALFORMED), // U+0000 in it
        (b"\x06\0\x3c\0\0\0\0\0\x01\xff\0\0", MALFORMED), // not UTF-8
        (b"\x06\0\x3c\0\0\0\x02\x0b\x01\0\x01w\0\0", MALFORMED), // bad will property
    ] {
        let fault = decode_connect(&mut connect(rest), 1000).unwrap_err();
        assert_eq!(fault.violation.reason, reason, "{rest:02x?}");
        assert!(
            matches!(fault.answer, Answer::Connack { .. }),
            "{rest:02x?}"
        );
    }
}

#[test]
fn connect_of_another_version_gets_its_own_answer() {
    for (connect, version) in [
        (&b"\x10\x10\0\x06MQIsdp\x03\x02\0\x3c\0\x02ab"[..], V311),
        (b"\x10\x0e\0\x04MQTT\x03\x02\0\x3c\0\x02ab", V311),
        (b"\x10\x0e\0\x04MQTT\x06\x02\0\x3c\0\x02ab", V5),
        (b"\x10\x0e\0\x04MQTT\x84\x02\0\x3c\0\x02ab", V311), // a bridge
        (b"\x10\x10\0\x06MQIsdp\x04\x02\0\x3c\0\x02ab", V311),
    ] {
        let fault = decode_connect(&mut BytesMut::from(connect), 1000).unwrap_err();
        let reason = ReasonCode::UNSUPPORTED_PROTOCOL_VERSION;
        let bytes_max = u32::MAX;
        let answer = Answer::Connack { version, bytes_max };
        assert_eq!((fault.violation.reason, fault.answer), (reason, answer));
    }
    let other = b"\x10\x0e\0\x04HTTP\x05\x02\0\x3c\0\x02ab";
    let fault = decode_connect(&mut BytesMut::from(&other[..]), 1000).unwrap_err();
    assert_eq!(fault.answer, Answer::None);
}

#[test]
fn large_connect_is_answered_once_its_version_has_arrived() {
    // A CONNECT of 256 MiB with a Maximum Packet Size of 20.
    let large = |rest: &[u8]| [&b"\x10\xff\xff\xff\x7f"[..], rest].concat();
    let answer = |version, bytes_max| Answer::Connack { version, bytes_max };
    for (rest, expected) in [
        (&b"\0\x04MQTT\x04"[..], answer(V311, u32::MAX)),
        (b"\0\x04MQTT\x05", answer(V5, u32::MAX)),
        (
            b"\0\x04MQTT\x05\x02\0\x3c\x05\x27\0\0\0\x14",
            answer(V5, 20),
        ),
        (b"\0\x07", Answer::None),
        (b"\0\x04HTTP\x05", Answer::None),
    ] {
        let bytes = large(rest);
        let fault = decode_connect(&mut BytesMut::from(&bytes[..]), 1000).unwrap_err();
        assert_eq!(fault.answer, expected, "{rest:02x?}");
    }
    for cut in 0..7 {
        let mut part = BytesMut::from(&large(&b"\0\x04MQTT\x05"[..cut])[..]);
        assert_eq!(decode_connect(&mut part, 1000), Ok(None), "{cut}");
    }
    let mut old = BytesMut::from(&large(b"\0\x06MQIsdp\x03")[..]);
    let fault = decode_connect(&mut old, 1000).unwrap_err();
    let reason = ReasonCode::UNSUPPORTED_PROTOCOL_VERSION;
    assert_eq!(fault.violation.reason, reason);
}

#[test]
fn refused_connack_respects_the_maximum_packet_size() {
    // A maximum packet size of 20, and authentication data without a method.
    let mut small = connect(b"\x02\0\x3c\x09\x27\0\0\0\x14\x16\0\x01a\0\0");
    let fault = decode_connect(&mut small, 1000).unwrap_err();
    let (version, bytes_max) = (V5, 20);
    assert_eq!(fault.answer, Answer::Connack { version, bytes_max });
    for bytes_max in 1..40 {
        let out = connack_refused(V5, ReasonCode::NOT_AUTHORIZED, "ten bytes.", bytes_max);
        let (plain, with_text) = (b"\x20\x03\0\x87\0", 18);
        match bytes_max {
            ..5 => assert!(out.is_empty(), "{bytes_max}"),
            5..20 => assert_eq!(out, plain[..], "{bytes_max}"),
            20.. => assert_eq!(out.len(), with_text, "{bytes_max}"),
        }
    }
}

#[test]
fn auth_decodes_to_reason_method_and_data() {
    let auth = |bytes: &[u8]| match read(bytes) {
        Ok(Some(Packet::Auth(auth))) => auth,
        other => panic!("{other:?}"),
    };
    let shown = auth(b"\xf0\x0e\x19\x0c\x15\0\x03abc\x16\0\x03\0\xff.");
    assert_eq!(shown.reason, ReasonCode::REAUTHENTICATE);
    let enhanced = shown.enhanced.unwrap();
    let (method, data) = (&*enhanced.method, &*enhanced.data);
    assert_eq!((method, data), ("abc", &b"\0\xff."[..]));
    let bare = auth(b"\xf0\x00");
    assert_eq!((bare.reason, bare.enhanced), (ReasonCode::SUCCESS, None));
}

#[test]
fn invalid_packets_are_refused() {
    for (bytes, reason) in [
        (&b"\x00\x00"[..], MALFORMED),                           // type 0
        (b"\x10\x00", PROTOCOL),                                 // a second CONNECT
        (b"\x20\x03\0\0\0", PROTOCOL),                           // CONNACK from a client
        (b"\x90\x04\0\x01\0\0", PROTOCOL),                       // SUBACK
        (b"\xb0\x04\0\x01\0\0", PROTOCOL),                       // UNSUBACK
        (b"\xd0\x00", PROTOCOL),                                 // PINGRESP
        (b"\xf1\x00", MALFORMED),                                // AUTH with flags
        (b"\xf0\x03\x19\x02\x15", MALFORMED),                    // AUTH cut short
        (b"\xf0\x07\x19\x05\x11\0\0\0\0", MALFORMED),            // a session expiry in AUTH
        (b"\xf0\x0a\x19\x08\x15\0\x01a\x15\0\x01a", PROTOCOL),   // two methods
        (b"\xc1\x00", MALFORMED),                                // PINGREQ with flags
        (b"\xc0\x01\0", MALFORMED),                              // PINGREQ with a body
        (b"\x80\x00", MALFORMED),                                // SUBSCRIBE without its flag
        (b"\x36\x05\0\x01t\0\x01\0", MALFORMED),                 // QoS 3
        (b"\x38\x04\0\x01t\0", MALFORMED),                       // DUP at QoS 0
        (b"\x32\x06\0\x01t\0\0\0", PROTOCOL),                    // packet identifier 0
        (b"\x30\x03\0\0\0", PROTOCOL),                           // no topic
        (b"\x30\x04\0\x01#\0", PROTOCOL),                        // a wildcard
        (b"\x30\x04\0\x01\0\0", MALFORMED),                      // U+0000
        (b"\x30\x05\0\x02\xc3\x28\0", MALFORMED),                // not UTF-8
        (b"\x30\x03\0\x09t", MALFORMED),                         // topic longer than the packet
        (b"\x30\x05\0\x01t\x09\0", MALFORMED),                   // properties longer than it
        (b"\x30\x09\0\x01t\x80\x80\x80\x80\x01\0", MALFORMED),   // five-byte property length
        (b"\x30\x06\0\x01t\x80\0\0", MALFORMED),                 // property length too long
        (b"\x30\x06\0\x01t\x02\x0b\x01", PROTOCOL), // subscription identifier from a client
        (b"\x30\x06\0\x01t\x02\x01\x02", PROTOCOL), // payload format 2
        (b"\x30\x08\0\x01t\x04\x08\0\x01+", PROTOCOL), // wildcard in the response topic
        (b"\x30\x07\0\x01t\x03\x08\0\0", PROTOCOL), // empty response topic
        (b"\x30\x0a\0\x01t\x06\x03\0\0\x03\0\0", PROTOCOL), // content type twice
        (b"\x30\x08\0\x01t\x04\x26\0\x01a", MALFORMED), // user property without a value
        (b"\x40\x01\0", MALFORMED),                 // short PUBACK
        (b"\x40\x02\0\0", PROTOCOL),                // PUBACK of identifier 0
        (b"\x40\x06\0\x01\0\0\0\0", MALFORMED),     // PUBACK with a rest
        (b"\x40\x03\0\x01\x92", PROTOCOL),          // a reason code of PUBREL in PUBACK
        (b"\x50\x03\0\x01\x01", PROTOCOL),          // an unknown one in PUBREC
        (b"\x62\x03\0\x01\x80", PROTOCOL),          // one of PUBREC in PUBREL
        (b"\x70\x03\0\x01\x10", PROTOCOL),          // one of PUBREC in PUBCOMP
        (b"\xe0\x01\x8b", PROTOCOL),                // one of a server in DISCONNECT
        (b"\x82\x03\0\x01\0", PROTOCOL),            // SUBSCRIBE without a filter
        (b"\x82\x07\0\x01\0\0\x01t\x03", PROTOCOL), // QoS 3
        (b"\x82\x07\0\x01\0\0\x01t\x30", PROTOCOL), // retain handling 3
        (b"\x82\x07\0\x01\0\0\x01t\x40", MALFORMED), // reserved option
        (b"\x82\x09\0\x01\x02\x0b\0\0\x01t\0", PROTOCOL), // subscription identifier 0
        (b"\xa2\x03\0\x01\0", PROTOCOL),            // UNSUBSCRIBE without a filter
        (b"\x30\x06\0\x01t\x02\x17\0", MALFORMED),  // a property of CONNECT in PUBLISH
        (b"\x40\x06\0\x01\0\x02\x01\0", MALFORMED), // one of PUBLISH in PUBACK
        (b"\x82\x09\0\x01\x02\x01\0\0\x01t\0", MALFORMED), // in SUBSCRIBE
        (b"\xa2\x08\0\x01\x02\x0b\x01\0\x01t", MALFORMED), // in UNSUBSCRIBE
        (b"\xe0\x04\0\x02\x01\0", MALFORMED),       // in DISCONNECT
        (b"\xe0\x05\0\x03\x1c\0\0", PROTOCOL),      // one that only a server may send
        (b"\xe0\x04\0\x02\x1c\0", MALFORMED),       // DISCONNECT cut short
        (b"\x30\xff\xff\xff\x7f", ReasonCode::PACKET_TOO_LARGE), // 256 MiB
        (b"\x30\xff\xff\xff\xff\x7f", MALFORMED),   // five-byte remaining length
        (b"\x30\x80\x00", MALFORMED),               // a length longer than needed
    ] {
        let violation = read(bytes).expect_err(&format!("{bytes:02x?}"));
        assert_eq!(violation.reason, reason, "{bytes:02x?}: {}", violation.text);
    }
}

#[test]
fn forbidden_type_is_refused_by_its_first_byte() {
    for first in [0x10, 0x20, 0x90, 0xb0, 0xd0, 0xf1, 0x00, 0xc1] {
        assert!(read(&[first]).is_err(), "{first:02x}");
    }
    assert!(decode_connect(&mut BytesMut::from(&[0x30][..]), 1000).is_err());
}

#[test]
fn shortest_packet_forms_decode() {
    let disconnect = super::Disconnect {
        reason: ReasonCode::SUCCESS,
        session_expiry_s: None,
    };
    for bytes in [&b"\xe0\x00"[..], b"\xe0\x01\x00", b"\xe0\x02\x00\x00"] {
        assert_eq!(read(bytes), Ok(Some(Packet::Disconnect(disconnect))));
    }
    let ack = super::Ack {
        packet_id: 1,
        reason: ReasonCode(0x10),
    };
    assert_eq!(read(b"\x40\x03\0\x01\x10"), Ok(Some(Packet::Puback(ack))));
    assert_eq!(read(b"\x40\x04\0\x01\x10\0"), Ok(Some(Packet::Puback(ack))));
    assert_eq!(read(b"\xc0\x00"), Ok(Some(Packet::Pingreq)));
    let nine = [&b"\x82\x27\0\x01\0"[..], &b"\0\x01t\0".repeat(9)].concat();
    assert_eq!(
        read(&nine).unwrap_err().reason,
        ReasonCode::QUOTA_EXCEEDED,
        "more filters than allowed"
    );
}
