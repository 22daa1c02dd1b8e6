//! MQTT over WebSocket. The server must accept MQTT in binary frames, and must refuse everything
//! else.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use statehouse_tests::{
    Client, Connect, Server,
    client::PATIENCE,
    run,
    websocket::{ask, frame, upgraded},
};

use crate::tls::{Encrypted, text};

/// A store with a second listener, for WebSocket, and the address of that.
pub(crate) fn start(further: &[&str]) -> (Server, SocketAddr) {
    let server = Server::with("", &[&["--listen", "ws://127.0.0.1:0"], further].concat());
    let address = server.addresses()[1];
    (server, address)
}

fn read(socket: &mut TcpStream, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    socket.read_exact(&mut bytes).unwrap();
    bytes
}

#[test]
fn own_client_connects_over_websocket_with_and_without_tls() {
    let (server, address) = start(&[]);
    assert!(
        server
            .stdout()
            .contains(&format!("listening on ws://{address}"))
    );
    let url = format!("ws://{address}/mqtt");
    // Too long for a single frame, in both directions.
    let long = "v".repeat(200_000);
    run(&["set", "key", "--url", &url], long.as_bytes()).code(0);
    let got = run(&["get", "key", "--url", &url], b"").code(0);
    assert_eq!(got.stdout, long.as_bytes());

    let store = Encrypted::start("wss", |_| Vec::new());
    let url = format!("wss://{}/", store.address);
    let ca = text(&store.authority.certificate);
    run(&["set", "key", "value", "--url", &url, "--ca", &ca], b"").code(0);
    let got = run(&["get", "key", "--url", &url, "--ca", &ca], b"").code(0);
    assert_eq!(got.stdout, b"value");
    // Regression: it advised to start a store, although a server answers.
    let url = format!("ws://{}/", store.address);
    let failed = run(&["get", "key", "--url", &url], b"").fails(3, "does not speak WebSocket");
    assert!(!failed.stderr.contains("statehouse serve"), "{failed:?}");
}

#[test]
fn packets_may_span_and_share_websocket_frames() {
    let (_server, address) = start(&[]);
    let mut socket = upgraded(address);
    let connect = Connect::new("pieces").bytes();
    let (first, second) = connect.split_at(5);
    socket.write_all(&frame(0x02, first)).unwrap();
    // A ping may be sent between the parts.
    socket.write_all(&frame(0x89, b"there?")).unwrap();
    assert_eq!(read(&mut socket, 8), b"\x8a\x06there?");
    let pings = [second, &[0xc0, 0, 0xc0, 0]].concat();
    socket.write_all(&frame(0x80, &pings)).unwrap();
    // The server decides how many answers it puts into a frame.
    let mut answers = Vec::new();
    while !answers.ends_with(&[0xd0, 0, 0xd0, 0]) {
        let head = read(&mut socket, 2);
        assert_eq!(head[0], 0x82, "a whole binary message");
        answers.extend(read(&mut socket, head[1].into()));
    }
    assert_eq!(
        (answers[0], answers[3]),
        (0x20, 0),
        "a CONNACK: {answers:?}"
    );
    // The end of MQTT ends the WebSocket.
    socket.write_all(&frame(0x82, &[0xe0, 0])).unwrap();
    assert_eq!(read(&mut socket, 4), [0x88, 2, 0x03, 0xe8]);
}

#[test]
fn websocket_text_frame_ends_with_code_1003() {
    let (_server, address) = start(&[]);
    let mut socket = upgraded(address);
    socket.write_all(&frame(0x81, b"hello")).unwrap();
    let close = read(&mut socket, 4);
    assert_eq!((close[0], &close[2..]), (0x88, &1003_u16.to_be_bytes()[..]));
}

#[test]
fn bad_upgrade_request_gets_an_http_error_with_reason() {
    let (server, address) = start(&["--ws-origin", "https://panel.example"]);
    let mqtt = "Sec-WebSocket-Protocol: mqtt\r\n";
    for (path, lines, status) in [
        ("/other", mqtt.to_owned(), 404),
        ("/", String::new(), 400),
        ("/", format!("{mqtt}Origin: https://evil.example\r\n"), 403),
        ("/", format!("{mqtt}Origin: http://127.0.0.1\r\n"), 403),
    ] {
        let (mut socket, answer) = ask(address, path, &lines);
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")),
            "{answer}"
        );
        let mut why = String::new();
        socket.read_to_string(&mut why).unwrap();
        assert!(why.len() > 20, "{why:?}");
    }
    server.wait_for_log("evil.example");
    let (_, answer) = ask(
        address,
        "/",
        &format!("{mqtt}Origin: https://panel.example\r\n"),
    );
    assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
}

#[test]
fn raw_mqtt_or_endless_headers_on_websocket_are_closed() {
    let (server, address) = start(&[]);
    let before_kib = server.memory_kib();
    let mut raw = Client::open(address);
    raw.send(&Connect::new("raw").bytes());
    assert!(matches!(
        raw.poll(PATIENCE),
        statehouse_tests::Heard::Closed | statehouse_tests::Heard::Packet(_)
    ));
    let mut endless = TcpStream::connect(address).unwrap();
    endless
        .set_read_timeout(Some(Duration::from_millis(10)))
        .unwrap();
    endless.write_all(b"GET / HTTP/1.1\r\n").unwrap();
    let line = [b"X-Fill: ", &[b'x'; 4000][..], b"\r\n"].concat();
    let sent = (0..10_000)
        .take_while(|_| endless.write_all(&line).is_ok())
        .count();
    assert!(sent < 10_000, "the server read forty megabytes of headers");
    assert!(server.memory_kib() < before_kib + 16 * 1024);
    let url = format!("ws://{address}");
    run(&["get", "nothing", "--url", &url], b"").code(1);
}
