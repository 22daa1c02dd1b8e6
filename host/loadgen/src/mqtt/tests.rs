//! What the client sends, and how it reads what a server sends.

use super::*;

fn client() -> Mqtt {
    Mqtt::new(Arc::new(Catalogue::new(5)), 7, Role::Asks, 3)
}

/// Decodes bytes: the consumed length, the debug form of each message, and the
/// acknowledgements.
fn decode(bytes: &[u8]) -> Result<(usize, Vec<String>, Vec<u8>), Broken> {
    let (mut messages, mut out) = (Vec::new(), Vec::new());
    let done = client().read(bytes, &mut out, |it| messages.push(format!("{it:?}")))?;
    Ok((done, messages, out))
}

fn answer(topic: &str, properties: &[u8], payload: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    push_text(&mut body, topic.as_bytes());
    body.extend_from_slice(&[0, 9]);
    push_length(&mut body, properties.len());
    body.extend_from_slice(properties);
    body.extend_from_slice(payload);
    let mut bytes = Vec::new();
    push_packet(&mut bytes, 0x32, &body);
    bytes
}

const TOPIC: &str = "clients/bench-0000000000000007-3/bench";
const OK: &[u8] = b"\x09\0\x08\0\x02\0\0\0\0\0\x05\x26\0\x06__stat\0\x03200";

#[test]
fn login_is_flagged_and_is_the_last_field() {
    let (mut plain, mut out) = (Vec::new(), Vec::new());
    client().connect(&mut plain);
    let login = Some(("me".to_owned(), "secret".to_owned()));
    client().with_login(login).connect(&mut out);
    // The flags follow the fixed header, the protocol name and its version.
    assert_eq!((plain[9], out[9]), (0x02, 0xc2));
    let tail = b"\0\x1bme:bench-0000000000000007-3\0\x02me\0\x06secret";
    assert!(out.ends_with(tail), "{out:02x?}");
}

#[test]
fn client_id_with_a_login_is_in_the_response_topic() {
    for (user, id) in [
        ("me", "me:bench-0000000000000007-3"),
        // The id would own no topic, or be refused.
        ("a/b", "bench-0000000000000007-3"),
        ("#", "bench-0000000000000007-3"),
    ] {
        let client = client().with_login(Some((user.to_owned(), String::new())));
        assert_eq!(client.id, id);
        assert_eq!(client.response_topic, format!("clients/{id}/bench"));
    }
}

#[test]
fn request_is_a_valid_publish() {
    let mut out = Vec::new();
    let mut client = client();
    client.ask(
        2,
        5,
        Request {
            verb: Verb::Set,
            key: 1,
        },
        &mut out,
    );
    let (first, at, end) = packet(&out).unwrap().unwrap();
    assert_eq!((first, end), (0x32, out.len()));
    let (topic, rest) = text(&out[at..]).unwrap();
    assert_eq!(topic, REQUEST_TOPIC.as_bytes());
    assert_eq!(rest[..2], [0, 3]);
    let (raw, payload) = properties(&rest[2..]).unwrap();
    let value = Catalogue::new(5);
    let value = String::from_utf8_lossy(value.value(1)).into_owned();
    let expected = format!("*3\r\n$3\r\nSET\r\n$18\r\nbench/5/0000000001\r\n$5\r\n{value}\r\n");
    assert_eq!(payload, expected.as_bytes());
    let parsed = statehouse_mqtt::Properties::parse(raw.to_vec()).unwrap();
    assert_eq!(parsed.response_topic(), Some(TOPIC));
    assert_eq!(
        parsed.correlation_data().unwrap()[..],
        [0, 2, 0, 0, 0, 0, 0, 5]
    );
    let user: Vec<_> = parsed.user().collect();
    assert_eq!(user[0], ("__protVer", "1.0"));
    assert!(
        user[1].1.ends_with(":00000:bench") && user[1].1.starts_with("0017"),
        "{user:?}"
    );
}

#[test]
fn answer_names_its_slot_and_is_acknowledged() {
    let bytes = answer(TOPIC, OK, b"$5\r\nhello\r\n");
    let (done, messages, out) = decode(&bytes).unwrap();
    assert_eq!(done, bytes.len());
    assert_eq!(messages.len(), 1);
    assert!(
        messages[0].starts_with("Answer { slot: 2, number: 5, reply: Value("),
        "{messages:?}"
    );
    assert_eq!(out, [0x40, 2, 0, 9]);
    // An incomplete packet is no message.
    for end in 0..bytes.len() {
        assert_eq!(decode(&bytes[..end]).unwrap().0, 0);
    }
}

#[test]
fn answers_decode_as_the_protocol_defines() {
    for (payload, expected) in [
        (&b"+OK\r\n"[..], Reply::Done),
        (b"$-1\r\n", Reply::Nothing),
        (b":0\r\n", Reply::Nothing),
        (b":1\r\n", Reply::Done),
        (b"$0\r\n\r\n", Reply::Value(b"")),
        (b"$2\r\n\r\n\r\n", Reply::Value(b"\r\n")),
        (b"-ERR syntax error\r\n", Reply::Refused(b"syntax error")),
        (b"$3\r\nab\r\n", Reply::Strange),
        (b"$\r\nab\r\n", Reply::Strange),
        (b":-1\r\n", Reply::Strange),
        (b"", Reply::Strange),
    ] {
        assert_eq!(reply(payload), expected, "{}", payload.escape_ascii());
    }
    // Every official client fails a call without `__stat`=`200`.
    let messages = decode(&answer(TOPIC, &OK[..11], b"+OK\r\n")).unwrap().1;
    assert!(messages[0].contains("Strange"), "{messages:?}");
}

#[test]
fn notifications_and_acknowledgements_are_distinguished() {
    let mut bytes = answer(
        "clients/other",
        &[],
        b"*4\r\n$6\r\nNOTIFY\r\n$3\r\nSET\r\n$5\r\nVALUE\r\n$1\r\nx\r\n",
    );
    bytes.extend_from_slice(&[0x40, 2, 0, 1, 0x40, 4, 0, 2, 0x97, 0, 0x40, 3, 0, 3, 0x10]);
    let messages = decode(&bytes).unwrap().1;
    assert_eq!(messages[0], "Notification(Some([120]))");
    assert_eq!(messages[1], "Acknowledged { slot: 0, refused: None }");
    assert!(
        messages[2].contains("0x97") && messages[3].contains("no store"),
        "{messages:?}"
    );
}

#[test]
fn malformed_packets_are_errors_and_never_panic() {
    for bytes in [
        &[0x30, 0xff, 0xff, 0xff, 0xff][..],
        &[0x00, 0],
        &[0x20, 1, 0],
        &[0x32, 0],
        &[0x32, 4, 0, 9, b'a', b'b'],
        &[0x40, 2, 0, 0],
        &[0x90, 1, 0],
        &[0x20, 3, 0, 0x87, 0],
        &[0xE0, 1, 0x8E],
        &answer(TOPIC, &[0x7f, 0], b""),
        &answer(TOPIC, &[0x26, 0, 9], b""),
    ] {
        assert!(decode(bytes).is_err(), "{bytes:02x?}");
    }
    assert!(matches!(decode(&[0xE0, 1, 0x8E]), Err(Broken::Ended(why)) if why.contains("0x8e")));
    assert!(matches!(
        decode(&[0x20, 3, 0, 0x87, 0]),
        Err(Broken::Refused(_))
    ));
}

#[test]
fn values_above_the_packet_limit_are_refused_at_once() {
    let connack = |bytes: u32| {
        let mut packet = vec![0x20, 11, 0, 0, 8, 0x21, 0, 20, 0x27];
        packet.extend_from_slice(&bytes.to_be_bytes());
        packet
    };
    let mut client = client();
    let read = client.read(&connack(1000), &mut Vec::new(), |_| {});
    assert!(read.is_ok());
    assert_eq!(client.in_flight_max(), 20);
    let read = client.read(&connack(100), &mut Vec::new(), |_| {});
    assert!(matches!(read, Err(Broken::Refused(why)) if why.contains("takes 100")));
}
