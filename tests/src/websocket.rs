//! MQTT over WebSocket on a bare TCP socket: the upgrade, and frames that can be invalid.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
};

use crate::client::PATIENCE;

/// The first byte of a frame that holds a whole binary message.
pub const BINARY: u8 = 0x82;

/// Opens a connection and requests a WebSocket, with these additional header lines. Returns the
/// response up to its empty line.
pub fn ask(address: SocketAddr, path: &str, lines: &str) -> (TcpStream, String) {
    let mut socket = open(address);
    let answer = ask_on(&mut socket, address, path, lines);
    (socket, answer)
}

fn open(address: SocketAddr) -> TcpStream {
    let socket = TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

fn ask_on(
    socket: &mut (impl Read + Write),
    address: SocketAddr,
    path: &str,
    lines: &str,
) -> String {
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n{lines}\r\n"
    );
    socket.write_all(request.as_bytes()).unwrap();
    let mut answer = Vec::new();
    let mut byte = [0];
    while !answer.ends_with(b"\r\n\r\n") {
        assert_eq!(socket.read(&mut byte).unwrap(), 1, "{answer:?}");
        answer.push(byte[0]);
    }
    String::from_utf8(answer).unwrap()
}

/// Opens a connection and upgrades it to a WebSocket.
pub fn upgraded(address: SocketAddr) -> TcpStream {
    let mut socket = open(address);
    upgrade(&mut socket, address);
    socket
}

/// Upgrades a connection to this address to a WebSocket. The connection may be encrypted.
pub fn upgrade(socket: &mut (impl Read + Write), address: SocketAddr) {
    let lines = "Sec-WebSocket-Protocol: mqtt\r\n";
    let answer = ask_on(socket, address, "/mqtt", lines);
    assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
    let answer = answer.to_lowercase();
    assert_contains!(
        answer,
        "sec-websocket-protocol: mqtt\r\n",
        "sec-websocket-accept: s3pplmbitxaq9kygzzhzrbk+xoo=\r\n"
    );
}

/// A client's frame with less than 126 bytes, masked with zeros.
pub fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
    let length = u8::try_from(payload.len()).unwrap();
    assert!(
        length < 126,
        "a longer frame encodes its length differently"
    );
    let mut frame = vec![first, 0x80 | length];
    frame.extend([0; 4]);
    frame.extend(payload);
    frame
}
