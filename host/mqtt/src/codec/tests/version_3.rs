//! MQTT 3.1.1: the codec against rumqttc's independent codec for that version, and against what the
//! standard forbids.

use bytes::{Bytes, BytesMut};
use proptest::prelude::*;
use rumqttc::mqttbytes::{QoS as Q, v4 as wire};

use super::{BOUNDS, data, name};
use crate::{
    Message,
    ProtocolVersion::V311,
    QoS, ReasonCode,
    codec::{
        self, Answer, Bounds, Connack, Delivery, Disconnect, Packet, Violation, decode,
        decode_connect, packet_type as kind,
    },
};

const MAX: usize = 1 << 20;

fn read(bytes: &[u8]) -> Result<Option<Packet>, Violation> {
    let bounds = Bounds {
        version: V311,
        ..BOUNDS
    };
    decode(&mut BytesMut::from(bytes), bounds)
}

fn encoded(packet: &wire::Packet) -> BytesMut {
    let mut bytes = BytesMut::new();
    packet.write(&mut bytes, MAX).unwrap();
    bytes
}

prop_compose! {
    fn publishes()(
        qos in prop_oneof![Just(Q::AtMostOnce), Just(Q::AtLeastOnce), Just(Q::ExactlyOnce)],
        dup in any::<bool>(),
        retain in any::<bool>(),
        topic in name(),
        id in 1..=u16::MAX,
        payload in data(),
    ) -> wire::Publish {
        let mut publish = wire::Publish::from_bytes(topic, qos, payload);
        publish.dup = dup && qos != Q::AtMostOnce;
        publish.retain = retain;
        publish.pkid = if qos == Q::AtMostOnce { 0 } else { id };
        publish
    }
}

proptest! {
    /// The codec decodes the PUBLISH of rumqttc, and rumqttc decodes the forwarded PUBLISH as the
    /// same message, without the properties that a sender of MQTT 5 gave it.
    #[test]
    fn publish_round_trips_without_properties(sent in publishes(), expiry_s in any::<Option<u32>>()) {
        let bytes = encoded(&wire::Packet::Publish(sent.clone()));
        for cut in 0..bytes.len() {
            prop_assert_eq!(read(&bytes[..cut]).unwrap(), None);
        }
        let Some(Packet::Publish(got)) = read(&bytes).unwrap() else { panic!("not a PUBLISH") };
        prop_assert_eq!(got.properties.forwarded(), Bytes::new());
        let message = Message {
            topic: got.topic.clone(),
            payload: got.payload.clone(),
            properties: Bytes::from_static(b"\x26\0\x01w\0\x011"),
            qos: got.qos,
            retain: got.retain,
            expires: None,
        };
        let delivery = Delivery {
            qos: got.qos,
            dup: got.dup,
            retain: got.retain,
            packet_id: got.packet_id,
            subscription_ids: &[7],
            expiry_s,
        };
        let mut forwarded = BytesMut::new();
        codec::publish(&mut forwarded, V311, &message, &delivery);
        prop_assert_eq!(forwarded.len(), codec::publish_bytes(V311, &message, &delivery));
        prop_assert_eq!(forwarded, bytes);
    }
}

#[test]
fn connect_of_rumqttc_decodes() {
    let mut hello = wire::Connect::new("client");
    hello.set_login("user", "word");
    hello.last_will = Some(wire::LastWill::new("w/t", "gone", Q::ExactlyOnce, true));
    let mut bytes = encoded(&wire::Packet::Connect(hello.clone()));
    for cut in 0..bytes.len() {
        let mut part = BytesMut::from(&bytes[..cut]);
        assert_eq!(decode_connect(&mut part, 1000), Ok(None), "{cut}");
    }
    let connect = decode_connect(&mut bytes, 1000).unwrap().unwrap();
    assert_eq!((connect.version, &*connect.client_id), (V311, "client"));
    assert_eq!((connect.clean_start, connect.session_expiry_s), (true, 0));
    assert_eq!(connect.keep_alive_s, 10);
    assert_eq!(connect.user.as_deref(), Some("user"));
    assert_eq!(connect.password.as_deref(), Some(&b"word"[..]));
    let will = connect.will.unwrap();
    assert_eq!((will.delay_s, will.expiry_s), (0, None));
    let message = will.message;
    assert_eq!((message.qos, message.retain), (QoS::ExactlyOnce, true));
    assert_eq!(
        (&message.topic[..], &message.payload[..]),
        (&b"w/t"[..], &b"gone"[..])
    );
    assert_eq!(message.properties, Bytes::new());

    hello.clean_session = false;
    let mut bytes = encoded(&wire::Packet::Connect(hello));
    let connect = decode_connect(&mut bytes, 1000).unwrap().unwrap();
    let expiry = (connect.clean_start, connect.session_expiry_s);
    assert_eq!(expiry, (false, u32::MAX), "as long as the broker allows");
}

/// A CONNECT of protocol level 4 from what follows the level.
fn connect(rest: &[u8]) -> BytesMut {
    let body = [&b"\0\x04MQTT\x04"[..], rest].concat();
    BytesMut::from(&[&[0x10, body.len() as u8][..], &body].concat()[..])
}

#[test]
fn invalid_connects_end_without_a_connack() {
    for rest in [
        &b"\x03\0\x3c\0\x01a"[..],          // reserved flag [MQTT-3.1.2-3]
        b"\x0a\0\x3c\0\x01a",               // will QoS without a will [MQTT-3.1.2-13]
        b"\x22\0\x3c\0\x01a",               // will retain without a will [MQTT-3.1.2-15]
        b"\x1e\0\x3c\0\x01a\0\x01w\0\0",    // will QoS 3 [MQTT-3.1.2-14]
        b"\x42\0\x3c\0\x01a\0\x01p",        // a password without a user [MQTT-3.1.2-22]
        b"\x82\0\x3c\0\x01a",               // no user name [MQTT-3.1.2-19]
        b"\xc2\0\x3c\0\x01a\0\x01u",        // no password [MQTT-3.1.2-21]
        b"\x02\0\x3c\0\x01a\0\x01u",        // a user without its flag [MQTT-3.1.2-18]
        b"\x06\0\x3c\0\x01a\0\x01w",        // no will message [MQTT-3.1.2-9]
        b"\x06\0\x3c\0\x01a\0\0\0\0",       // empty will topic [MQTT-4.7.3-1]
        b"\x06\0\x3c\0\x01a\0\x01+\0\0",    // a wildcard in it
        b"\x06\0\x3c\0\x01a\0\x01\xff\0\0", // not UTF-8 [MQTT-3.1.3-10]
        b"\x02\0\x3c\0\x01\0",              // U+0000 in the client id [MQTT-1.5.3-2]
        b"\x02\0\x3c\0\x03\xed\xa0\x80",    // a surrogate [MQTT-1.5.3-1]
        b"\x02\0\x3c",                      // no client id [MQTT-3.1.3-3]
        b"\x02\0\x3c\0\0\0",                // a byte too many
    ] {
        let fault = decode_connect(&mut connect(rest), 1000).unwrap_err();
        let Answer::Connack { version, bytes_max } = fault.answer else {
            panic!("{rest:02x?}: {fault:?}")
        };
        let Violation { reason, text } = fault.violation;
        let out = codec::connack_refused(version, reason, text, bytes_max);
        assert_eq!(out, b""[..], "{rest:02x?}");
    }
}

#[test]
fn empty_client_id_needs_a_clean_session() {
    assert!(decode_connect(&mut connect(b"\x02\0\x3c\0\0"), 1000).is_ok());
    let fault = decode_connect(&mut connect(b"\x00\0\x3c\0\0"), 1000).unwrap_err();
    let reason = ReasonCode::CLIENT_IDENTIFIER_NOT_VALID;
    assert_eq!(fault.violation.reason, reason, "[MQTT-3.1.3-8]");
}

#[test]
fn refused_connects_get_the_codes_of_table_3_1() {
    use ReasonCode as R;
    for (reason, packet) in [
        (R::UNSUPPORTED_PROTOCOL_VERSION, &b"\x20\x02\0\x01"[..]),
        (R::CLIENT_IDENTIFIER_NOT_VALID, b"\x20\x02\0\x02"),
        (R::SERVER_UNAVAILABLE, b"\x20\x02\0\x03"),
        (R::SERVER_BUSY, b"\x20\x02\0\x03"),
        (R::PACKET_TOO_LARGE, b"\x20\x02\0\x03"),
        (R::QUOTA_EXCEEDED, b"\x20\x02\0\x03"),
        (R::BAD_USER_NAME_OR_PASSWORD, b"\x20\x02\0\x04"),
        (R::NOT_AUTHORIZED, b"\x20\x02\0\x05"),
        (R::PROTOCOL_ERROR, b""),
    ] {
        let out = codec::connack_refused(V311, reason, "text", u32::MAX);
        assert_eq!(out, packet, "{reason}");
    }
}

#[test]
fn server_packets_have_neither_reasons_nor_properties() {
    let written = |write: &dyn Fn(&mut BytesMut)| {
        let mut out = BytesMut::new();
        write(&mut out);
        out
    };
    let connack = Connack {
        session_present: true,
        session_expiry_s: Some(3),
        topic_alias_max: 7,
        ..Connack::default()
    };
    assert_eq!(
        written(&|out| codec::connack(out, V311, &connack)),
        b"\x20\x02\x01\0"[..]
    );
    let error = ReasonCode::QUOTA_EXCEEDED;
    for (packet_type, packet) in [
        (kind::PUBACK, b"\x40\x02\x01\x02"),
        (kind::PUBREC, b"\x50\x02\x01\x02"),
        (kind::PUBREL, b"\x62\x02\x01\x02"),
        (kind::PUBCOMP, b"\x70\x02\x01\x02"),
    ] {
        let ack = |out: &mut _| codec::ack(out, V311, packet_type, 0x102, error, Some("no"), MAX);
        assert_eq!(written(&ack), packet[..]);
    }
    let reasons = [
        ReasonCode(0),
        ReasonCode(2),
        error,
        ReasonCode::NOT_AUTHORIZED,
    ];
    assert_eq!(
        written(&|out| codec::suback(out, V311, 9, &reasons)),
        b"\x90\x06\0\x09\0\x02\x80\x80"[..]
    );
    assert_eq!(
        written(&|out| codec::unsuback(out, V311, 9, &reasons)),
        b"\xb0\x02\0\x09"[..]
    );
    assert_eq!(
        written(&|out| codec::disconnect(out, V311, error, Some("no"), MAX)),
        b""[..]
    );
}

#[test]
fn invalid_packets_are_refused() {
    for bytes in [
        &b"\x00\x00"[..],                           // type 0
        b"\xf0\x00",                                // type 15 [MQTT-2.2.2-2]
        b"\x10\x0d\0\x04MQTT\x04\x02\0\x3c\0\x01a", // a second CONNECT [MQTT-3.1.0-2]
        b"\x20\x02\0\0",                            // CONNACK from a client
        b"\x90\x03\0\x01\0",                        // SUBACK
        b"\xb0\x02\0\x01",                          // UNSUBACK
        b"\xd0\x00",                                // PINGRESP
        b"\x36\x05\0\x01t\0\x01",                   // QoS 3 [MQTT-3.3.1-4]
        b"\x38\x03\0\x01t",                         // DUP at QoS 0 [MQTT-3.3.1-2]
        b"\x32\x05\0\x01t\0\0",                     // packet identifier 0 [MQTT-2.3.1-1]
        b"\x32\x03\0\x01t",                         // no packet identifier
        b"\x30\x02\0\0",                            // empty topic [MQTT-4.7.3-1]
        b"\x30\x03\0\x01#",                         // a wildcard [MQTT-3.3.2-2]
        b"\x30\x05\0\x03a/+",                       // another one
        b"\x30\x03\0\x01\0",                        // U+0000 [MQTT-1.5.3-2]
        b"\x30\x04\0\x02\xc3\x28",                  // not UTF-8 [MQTT-3.3.2-1]
        b"\x30\x03\0\x09t",                         // topic longer than the packet
        b"\x40\x01\0",                              // short PUBACK
        b"\x40\x02\0\0",                            // packet identifier 0
        b"\x40\x03\0\x01\0",                        // PUBACK with a reason
        b"\x60\x02\0\x01",                          // PUBREL without its flag [MQTT-3.6.1-1]
        b"\x62\x04\0\x01\0\0",                      // PUBREL with properties
        b"\x80\x06\0\x01\0\x01t\0",                 // SUBSCRIBE without its flag [MQTT-3.8.1-1]
        b"\x82\x06\0\0\0\x01t\0",                   // packet identifier 0
        b"\x82\x02\0\x01",                          // SUBSCRIBE without a filter [MQTT-3.8.3-3]
        b"\x82\x05\0\x01\0\x01t",                   // no requested QoS
        b"\x82\x06\0\x01\0\x01t\x03",               // QoS 3 [MQTT-3-8.3-4]
        b"\x82\x06\0\x01\0\x01t\x04",               // No Local of MQTT 5
        b"\x82\x06\0\x01\0\x01t\x80",               // a reserved bit
        b"\x82\x05\0\x01\0\0\0",                    // empty filter [MQTT-4.7.3-1]
        b"\x82\x07\0\x01\0\x02a#\0",                // '#' within a level [MQTT-4.7.1-2]
        b"\x82\x08\0\x01\0\x03#/a\0",               // '#' before the end
        b"\x82\x07\0\x01\0\x02a+\0",                // '+' within a level [MQTT-4.7.1-3]
        b"\xa0\x05\0\x01\0\x01t",                   // UNSUBSCRIBE without its flag [MQTT-3.10.1-1]
        b"\xa2\x02\0\x01",                          // UNSUBSCRIBE without a filter [MQTT-3.10.3-2]
        b"\xc0\x01\0",                              // PINGREQ with a body
        b"\xe1\x00",                                // DISCONNECT with a flag [MQTT-3.14.1-1]
        b"\xe0\x01\0",                              // DISCONNECT with a reason
        b"\x30\xff\xff\xff\x7f",                    // 256 MiB
        b"\x30\xff\xff\xff\xff\x7f",                // five-byte remaining length
    ] {
        assert!(read(bytes).is_err(), "{bytes:02x?}");
    }
    let filters = [&b"\x82\x26\0\x01"[..], &b"\0\x01t\0".repeat(9)].concat();
    let refused = read(&filters).unwrap_err();
    assert_eq!(refused.reason, ReasonCode::QUOTA_EXCEEDED);
}

#[test]
fn valid_packets_decode() {
    let Ok(Some(Packet::Subscribe(it))) = read(b"\x82\x0a\0\x01\0\x01t\x01\0\x01+\x02") else {
        panic!("not a SUBSCRIBE")
    };
    let filters: Vec<_> = it
        .filters
        .iter()
        .map(|it| (&it.filter[..], it.qos))
        .collect();
    let expected = [(&b"t"[..], QoS::AtLeastOnce), (b"+", QoS::ExactlyOnce)];
    assert_eq!((it.packet_id, &filters[..]), (1, &expected[..]));
    assert!(
        it.filters
            .iter()
            .all(|it| !it.no_local && !it.retain_as_published)
    );
    let Ok(Some(Packet::Unsubscribe(it))) = read(b"\xa2\x05\0\x01\0\x01t") else {
        panic!("not an UNSUBSCRIBE")
    };
    assert_eq!(it.filters, [&b"t"[..]]);
    let disconnect = Disconnect {
        reason: ReasonCode::SUCCESS,
        session_expiry_s: None,
    };
    assert_eq!(read(b"\xe0\x00"), Ok(Some(Packet::Disconnect(disconnect))));
    assert_eq!(read(b"\xc0\x00"), Ok(Some(Packet::Pingreq)));
}

/// MQTT 5 forbids it (section 1.5.5), MQTT 3.1.1 does not (section 2.2.3).
#[test]
fn remaining_length_may_have_more_bytes_than_it_needs() {
    assert_eq!(read(b"\xc0\x80\x00"), Ok(Some(Packet::Pingreq)));
    assert_eq!(read(b"\xc0\x80\x80\x80"), Ok(None));
    let Ok(Some(Packet::Publish(it))) = read(b"\x30\x85\x80\x00\0\x01tab") else {
        panic!("not a PUBLISH")
    };
    assert_eq!((&it.topic[..], &it.payload[..]), (&b"t"[..], &b"ab"[..]));
    assert!(read(b"\xc0\x80\x80\x80\x80\x00").is_err());
    let connect = |level, body: &[u8]| {
        let remaining = [0x80 | (10 + body.len()) as u8, 0];
        let head = [0, 4, b'M', b'Q', b'T', b'T', level, 2, 0, 9];
        let bytes = [&[0x10][..], &remaining, &head, body].concat();
        decode_connect(&mut BytesMut::from(&bytes[..]), 1000)
    };
    assert!(connect(4, b"\0\x01a").unwrap().is_some());
    assert!(connect(5, b"\0\0\x01a").is_err());
}
