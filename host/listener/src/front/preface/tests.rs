use std::time::Duration;

use tokio::io::{DuplexStream, duplex};
use tokio::time::timeout;

use super::*;

const SECRET: [u8; 32] = [7; 32];

fn key() -> Key {
    Key::new(&SECRET)
}

fn request(purpose: Purpose) -> Request {
    Request {
        host: "gw1".parse().unwrap(),
        purpose,
    }
}

fn stream_of(client: SocketAddr) -> Request {
    let scheme = Scheme {
        websocket: false,
        tls: true,
    };
    request(Purpose::Stream { scheme, client })
}

fn any_stream() -> Request {
    stream_of(SocketAddr::from(([10, 0, 0, 7], 40_000)))
}

/// The request message for this hello, with a valid MAC over the body.
fn message(hello: &[u8], body: &[u8]) -> Vec<u8> {
    let mut message = vec![3; NONCE_BYTES];
    message.extend_from_slice(body);
    let mac = key().mac(b"request ", &[hello, &message]);
    message.extend_from_slice(mac.as_bytes());
    message
}

fn body(request: &Request) -> Vec<u8> {
    let mut body = Vec::new();
    request.encode(&mut body);
    assert_eq!(body.len(), BODY_BYTES);
    body
}

/// What a leader makes of a peer that answers its hello with these bytes and then sends no more,
/// and the code of the leader's answer.
async fn received(
    bytes: impl FnOnce(&[u8]) -> Vec<u8>,
) -> (Result<Received, PrefaceError>, Option<u8>) {
    let (mut leader, mut peer) = duplex(4096);
    let receiving = tokio::spawn(async move { receive(&mut leader, &key()).await });
    let mut hello = [0; HELLO_BYTES];
    peer.read_exact(&mut hello).await.unwrap();
    peer.write_all(&bytes(&hello)).await.unwrap();
    peer.shutdown().await.unwrap();
    let received = receiving.await.unwrap();
    let mut answer = Vec::new();
    peer.read_to_end(&mut answer).await.unwrap();
    (received, answer.first().copied())
}

fn is_secret<T>(result: &Result<T, PrefaceError>) -> bool {
    matches!(result, Err(PrefaceError::Secret))
}

#[tokio::test]
async fn both_sides_agree_on_every_request_and_answer() {
    let purposes = [Purpose::Link, Purpose::Streams, Purpose::TwoWayLink];
    let mut requests = Vec::from(purposes.map(request));
    let mapped = "[::ffff:10.0.0.7]:1".parse().unwrap();
    let clients = ["10.0.0.7:65535", "[2001:db8::1]:1883"].map(|it| it.parse().unwrap());
    for client in clients.into_iter().chain([mapped]) {
        for (tls, websocket) in [(false, false), (false, true), (true, false), (true, true)] {
            let scheme = Scheme { websocket, tls };
            requests.push(request(Purpose::Stream { scheme, client }));
        }
    }
    let longest = "x".repeat(limits::CLUSTER_HOST_NAME_BYTES_MAX);
    requests[0].host = longest.parse().unwrap();
    for request in requests {
        for answer in Answer::ALL {
            let (mut leader, mut host) = duplex(64);
            let leading = async {
                let received = receive(&mut leader, &key()).await.unwrap();
                received.answer(&mut leader, &key(), answer).await.unwrap();
                received.request
            };
            let key = key();
            let (received, answered) = tokio::join!(leading, send(&mut host, &key, &request));
            assert_eq!((received, answered.unwrap()), (request.clone(), answer));
        }
    }
}

#[tokio::test]
async fn two_hosts_with_different_secrets_refuse_each_other() {
    let (mut leader, mut host) = duplex(4096);
    let (own, other) = (key(), Key::new(&[8; 32]));
    let request = any_stream();
    // A leader that accepted the request would leave the host without an answer.
    let both = async {
        tokio::join!(
            receive(&mut leader, &own),
            send(&mut host, &other, &request)
        )
    };
    let both = timeout(Duration::from_secs(20), both).await;
    let (received, answered) = both.expect("both sides end");
    assert!(is_secret(&received) && is_secret(&answered));
}

#[tokio::test]
async fn a_changed_byte_anywhere_is_refused() {
    for at in 0..REQUEST_BYTES + MAC_BYTES {
        let (received, answer) = received(|hello| {
            let mut bytes = message(hello, &body(&any_stream()));
            bytes[at] ^= 1;
            bytes
        })
        .await;
        assert!(is_secret(&received), "byte {at}");
        assert_eq!(answer, Some(Answer::Refused as u8), "byte {at}");
    }
}

#[tokio::test]
async fn a_truncated_message_gets_no_answer() {
    for length in 0..REQUEST_BYTES + MAC_BYTES {
        let (received, answer) =
            received(|hello| message(hello, &body(&any_stream()))[..length].to_vec()).await;
        let is_expected = match length {
            0 => matches!(received, Err(PrefaceError::Left)),
            _ => matches!(received, Err(PrefaceError::Io(_))),
        };
        assert!(is_expected, "{length}");
        assert_eq!(answer, None, "{length}");
    }
}

#[tokio::test]
async fn no_byte_after_the_message_is_read() {
    let (mut leader, mut peer) = duplex(1 << 20);
    let receiving = async {
        let received = receive(&mut leader, &key()).await;
        received.map(|it| it.request)
    };
    let sending = async {
        let mut hello = [0; HELLO_BYTES];
        peer.read_exact(&mut hello).await.unwrap();
        let mut bytes = message(&hello, &body(&any_stream()));
        bytes.resize(1 << 19, 9);
        peer.write_all(&bytes).await.unwrap();
    };
    let (request, ()) = tokio::join!(receiving, sending);
    assert_eq!(request.unwrap(), any_stream());
    drop(peer);
    let mut rest = Vec::new();
    leader.read_to_end(&mut rest).await.unwrap();
    assert_eq!(rest.len(), (1 << 19) - REQUEST_BYTES - MAC_BYTES);
}

#[tokio::test]
async fn invalid_fields_with_a_valid_mac_are_refused() {
    let name_at = BODY_BYTES - limits::CLUSTER_HOST_NAME_BYTES_MAX;
    for (at, value) in [
        (0, 0),             // A link with the address of a client.
        (0, 2),             // Streams with the address of a client.
        (0, 3),             // A link of both directions with the address of a client.
        (0, 4),             // An unknown purpose.
        (1, 4),             // An unknown scheme.
        (2, 0),             // A stream without an address.
        (2, 5),             // An unknown family.
        (3, 1),             // An IPv4 address that is none.
        (name_at - 1, 0),   // An empty name.
        (name_at - 1, 64),  // A name longer than the message.
        (name_at - 1, 255), // The same.
        (name_at, 0xff),    // A name that is not UTF-8.
        (name_at, b'\n'),   // A name that would begin a log line.
    ] {
        let (received, answer) = received(|hello| {
            let mut body = body(&any_stream());
            body[at] = value;
            message(hello, &body)
        })
        .await;
        let is_invalid = matches!(received, Err(PrefaceError::Invalid(_)));
        assert!(is_invalid, "byte {at} is {value}");
        assert_eq!(answer, Some(Answer::Refused as u8), "byte {at} is {value}");
    }
}

#[tokio::test]
async fn a_recorded_message_is_refused_under_another_nonce() {
    let mut recorded = Vec::new();
    let (first, _) = received(|hello| {
        recorded = message(hello, &body(&any_stream()));
        recorded.clone()
    })
    .await;
    assert!(first.is_ok());
    let (second, answer) = received(|_| recorded).await;
    assert!(is_secret(&second));
    assert_eq!(answer, Some(Answer::Refused as u8));
}

/// A false leader: sends this hello, and then an answer that it computes from the hello and the
/// request. Returns what the host makes of it.
async fn answered(
    hello: &[u8],
    answer: impl FnOnce(&[u8]) -> Vec<u8>,
) -> Result<Answer, PrefaceError> {
    async fn lead(peer: &mut DuplexStream, answer: impl FnOnce(&[u8]) -> Vec<u8>) {
        let mut request = vec![0; REQUEST_BYTES + MAC_BYTES];
        if peer.read_exact(&mut request).await.is_ok() {
            peer.write_all(&answer(&request)).await.unwrap();
        }
    }
    let (mut host, mut peer) = duplex(4096);
    peer.write_all(hello).await.unwrap();
    let (key, request) = (key(), any_stream());
    let sending = async move { send(&mut host, &key, &request).await };
    tokio::join!(sending, lead(&mut peer, answer)).0
}

fn hello(version: u8) -> Vec<u8> {
    [&MAGIC[..], &[version], &[5; NONCE_BYTES]].concat()
}

#[tokio::test]
async fn a_false_leader_gets_no_stream() {
    let accepted = [Answer::Accepted as u8];
    // It knows no secret, or it has an answer of the true leader to an earlier request.
    let recorded = key().mac(
        b"answer  ",
        &[&[5; NONCE_BYTES], &[6; NONCE_BYTES], &accepted],
    );
    for mac in [[0; MAC_BYTES], *recorded.as_bytes()] {
        let answer = answered(&hello(VERSION), |_| [&accepted[..], &mac].concat()).await;
        assert!(is_secret(&answer));
    }
    // The request's own MAC is no answer.
    let answer = answered(&hello(VERSION), |request| {
        [&accepted[..], &request[REQUEST_BYTES..]].concat()
    })
    .await;
    assert!(is_secret(&answer));
}

#[tokio::test]
async fn another_program_or_version_is_named() {
    let http = answered(b"HTTP/1.1 400 Bad Request\r\n\r\n", |_| Vec::new()).await;
    assert!(matches!(http, Err(PrefaceError::NotAHost)));
    let newer = answered(&hello(VERSION + 1), |_| Vec::new()).await;
    let text = newer.unwrap_err().to_string();
    assert!(
        text.contains("version 2") && text.contains("version 1"),
        "{text}"
    );
}

#[test]
fn a_host_name_is_short_and_printable() {
    for name in ["gw1", "gateway-2.plant", "Süd"] {
        assert_eq!(name.parse::<HostName>().unwrap().to_string(), name);
    }
    for name in [
        "",
        "a\nb",
        &"x".repeat(limits::CLUSTER_HOST_NAME_BYTES_MAX + 1),
    ] {
        assert!(name.parse::<HostName>().is_err(), "{name:?}");
    }
}
