//! MQTT 3.1.1 over WebSocket (section 6), over TLS, and over both.

use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    process::Command,
};

use rustls::{ClientConnection, StreamOwned, pki_types::ServerName};

use statehouse_tests::{
    Packet, Server,
    client::PATIENCE,
    command::finish,
    packet::{PINGREQ, kind},
    packet3,
    tls::trusting,
    wait,
    websocket::{BINARY, frame, upgrade, upgraded},
};

use crate::scene::{CERTIFICATE, Scene, checks};

checks! {
    client_connects_over_tls,
    client_connects_over_websocket_in_tls,
    packets_share_and_span_websocket_frames,
    text_frame_closes_the_websocket,
}

/// Reads packets from binary frames until there is one of this kind. Control frames are ignored.
fn until(socket: &mut impl Read, bytes: &mut Vec<u8>, wanted: u8) -> Packet {
    loop {
        while let Some(packet) = Packet::cut(bytes) {
            if packet.kind() == wanted {
                return packet;
            }
        }
        let mut head = [0; 2];
        socket.read_exact(&mut head).unwrap();
        assert!(head[1] < 126, "a short frame without a mask: {head:?}");
        let mut payload = vec![0; head[1].into()];
        socket.read_exact(&mut payload).unwrap();
        assert_eq!(head[0], BINARY, "a whole binary message");
        bytes.extend(payload);
    }
}

fn packets_share_and_span_websocket_frames(scene: &Scene<'_>) {
    let topic = scene.topic("a");
    let mut socket = upgraded(scene.at.websocket);
    let mut bytes = Vec::new();
    let connect = scene.clean("client").bytes3();
    let (first, second) = connect.split_at(5);
    socket.write_all(&frame(BINARY, first)).unwrap();
    // Two packets and a half.
    let subscribe = packet3::subscribe(1, &[(&topic, 1)]);
    let half = PINGREQ[..1].to_vec();
    socket
        .write_all(&frame(BINARY, &[second, &subscribe, &half].concat()))
        .unwrap();
    assert_eq!(
        until(&mut socket, &mut bytes, kind::CONNACK).connack3(),
        (false, 0)
    );
    assert_eq!(
        until(&mut socket, &mut bytes, kind::SUBACK).suback3(),
        (1, vec![1])
    );
    socket.write_all(&frame(BINARY, &PINGREQ[1..])).unwrap();
    until(&mut socket, &mut bytes, kind::PINGRESP);
    scene.publish(&topic, "x");
    assert_eq!(
        until(&mut socket, &mut bytes, kind::PUBLISH)
            .publish3()
            .payload,
        b"x"
    );
}

fn text_frame_closes_the_websocket(scene: &Scene<'_>) {
    let mut socket = upgraded(scene.at.websocket);
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket.write_all(&frame(0x81, b"hello")).unwrap();
    let mut rest = Vec::new();
    // A close frame may precede the end.
    socket.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty() || rest[0] == 0x88, "{rest:?}");
}

fn client_connects_over_tls(scene: &Scene<'_>) {
    let mut subscriber = scene.subscriber("subscriber", 2);
    let tls = scene.at.tls;
    let mut command = Command::new("mosquitto_pub");
    command
        .args(["-h", &tls.ip().to_string(), "-p", &tls.port().to_string()])
        .args([
            "-q",
            "2",
            "-t",
            &scene.topic("a"),
            "-m",
            "x",
            "--insecure",
            "--cafile",
        ])
        .arg(scene.directory.join(CERTIFICATE));
    finish(command, b"").code(0);
    assert_eq!(subscriber.next_publish().payload, b"x");
}

fn client_connects_over_websocket_in_tls(scene: &Scene<'_>) {
    let config = trusting(&scene.directory.join(CERTIFICATE));
    let name = ServerName::try_from("localhost").unwrap();
    let connection = ClientConnection::new(config, name).unwrap();
    let address = scene.at.secure_websocket;
    let socket = TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut socket = StreamOwned::new(connection, socket);
    upgrade(&mut socket, address);
    let topic = scene.topic("a");
    let subscribe = packet3::subscribe(1, &[(&topic, 1)]);
    let packets = [scene.clean("client").bytes3(), subscribe].concat();
    socket.write_all(&frame(BINARY, &packets)).unwrap();
    let mut bytes = Vec::new();
    let connack = until(&mut socket, &mut bytes, kind::CONNACK);
    assert_eq!(connack.connack3(), (false, 0));
    let suback = until(&mut socket, &mut bytes, kind::SUBACK);
    assert_eq!(suback.suback3(), (1, vec![1]));
    scene.publish(&topic, "x");
    let publish = until(&mut socket, &mut bytes, kind::PUBLISH);
    assert_eq!(publish.publish3().payload, b"x");
}

/// A client without a keep alive that vanishes must not keep its connection. Regression: the system
/// did not probe clients of MQTT over TCP.
#[test]
fn vanished_client_without_a_keep_alive_is_probed() {
    let server = Server::start();
    let client = TcpStream::connect(server.address()).unwrap();
    let ends = [client.peer_addr(), client.local_addr()];
    let ends = ends.map(|it| format!(":{:04X}", it.unwrap().port()));
    // The columns are described in proc_net_tcp(5). The timer 02 is that of the probes.
    let is_probed = |line: &str| {
        let columns: Vec<_> = line.split_whitespace().collect();
        let is_it = columns[1].ends_with(&ends[0]) && columns[2].ends_with(&ends[1]);
        is_it && columns[5].starts_with("02:")
    };
    wait::until("the socket is probed", || {
        let sockets = fs::read_to_string("/proc/net/tcp").unwrap();
        sockets.lines().skip(1).any(is_probed)
    });
}
