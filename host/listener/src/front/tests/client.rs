//! An MQTT client on any stream.

use std::net::SocketAddr;
use std::sync::Arc;

use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::within;
use crate::Stream;
use statehouse_config::Listen;

pub(super) struct Client {
    stream: Box<dyn Stream>,
    /// Whether packets are in WebSocket frames.
    frames: bool,
}

/// CONNECT of MQTT 5 with a clean start.
pub(super) fn connect(client: &str) -> Vec<u8> {
    connect_at(&[5, 2, 0, 60, 0], client)
}

/// CONNECT of MQTT 3.1.1 with a clean session.
pub(super) fn connect_3(client: &str) -> Vec<u8> {
    connect_at(&[4, 2, 0, 60], client)
}

/// A CONNECT with this protocol level, and what follows up to the client id.
fn connect_at(level: &[u8], client: &str) -> Vec<u8> {
    let mut rest = [b"\0\x04MQTT", level].concat();
    rest.extend([0, u8::try_from(client.len()).unwrap()]);
    rest.extend(client.bytes());
    packet(0x10, &rest)
}

/// PUBLISH with QoS 0 of one byte to the topic that [`Client::subscribe`] names.
pub(super) fn publish_0(byte: u8) -> Vec<u8> {
    packet(0x30, &[0, 1, b'b', 0, byte])
}

fn packet(first: u8, rest: &[u8]) -> Vec<u8> {
    let length = u8::try_from(rest.len()).unwrap();
    assert!(
        length < 128,
        "a longer packet encodes its length differently"
    );
    [&[first, length], rest].concat()
}

impl Client {
    /// A client on a plain TCP connection.
    pub(super) fn on(socket: TcpStream) -> Self {
        Self {
            stream: Box::new(socket),
            frames: false,
        }
    }

    /// Connects to a listener of any scheme, and returns the address of the client's socket.
    pub(super) async fn at(
        listen: &Listen,
        trusted: &CertificateDer<'static>,
    ) -> (Self, SocketAddr) {
        let socket = TcpStream::connect(listen.address).await.unwrap();
        let address = socket.local_addr().unwrap();
        (Self::over(socket, listen, trusted).await, address)
    }

    /// Does the handshakes of a listener on a connected socket.
    pub(super) async fn over(
        socket: TcpStream,
        listen: &Listen,
        trusted: &CertificateDer<'static>,
    ) -> Self {
        let mut stream: Box<dyn Stream> = Box::new(socket);
        if listen.scheme.tls {
            let mut roots = RootCertStore::empty();
            roots.add(trusted.clone()).unwrap();
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let config = ClientConfig::builder_with_provider(provider)
                .with_safe_default_protocol_versions()
                .unwrap()
                .with_root_certificates(roots)
                .with_no_client_auth();
            let name = ServerName::try_from("localhost").unwrap();
            let connector = TlsConnector::from(Arc::new(config));
            stream = Box::new(connector.connect(name, stream).await.unwrap());
        }
        let frames = listen.scheme.websocket;
        if frames {
            let request = "GET /mqtt HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Protocol: mqtt\r\n\r\n";
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.unwrap());
            }
            assert!(head.starts_with(b"HTTP/1.1 101 "));
        }
        Self { stream, frames }
    }

    /// Sends CONNECT and waits for a CONNACK that accepts it.
    pub(super) async fn connected(mut self, client: &str) -> Self {
        self.send(&connect(client)).await;
        self.accepted().await;
        self
    }

    /// Waits for a CONNACK that accepts the client.
    pub(super) async fn accepted(&mut self) {
        let connack = self.receive().await;
        assert_eq!((connack[0], connack[3]), (0x20, 0), "{connack:?}");
    }

    /// Publishes with QoS 1 and waits for the PUBACK.
    pub(super) async fn publish(&mut self, id: u16) {
        let mut rest = vec![0, 1, b't'];
        rest.extend(id.to_be_bytes());
        rest.extend([0, b'v']);
        self.send(&packet(0x32, &rest)).await;
        let puback = self.receive().await;
        assert_eq!((puback[0], &puback[2..4]), (0x40, &id.to_be_bytes()[..]));
    }

    /// Subscribes to the topic of [`publish_0`] with QoS 0.
    pub(super) async fn subscribe(&mut self) {
        let rest = [0, 1, 0, 0, 1, b'b', 0];
        self.send(&packet(0x82, &rest)).await;
        let suback = self.receive().await;
        assert_eq!((suback[0], suback[suback.len() - 1]), (0x90, 0));
    }

    /// Waits for a PUBLISH of one byte, and returns the byte.
    pub(super) async fn published(&mut self) -> u8 {
        let publish = self.receive().await;
        assert_eq!(publish[0], 0x30, "{publish:?}");
        publish[publish.len() - 1]
    }

    pub(super) async fn send(&mut self, packet: &[u8]) {
        let mut bytes = Vec::new();
        if self.frames {
            let length = u8::try_from(packet.len()).unwrap();
            bytes.extend([0x82, 0x80 | length, 0, 0, 0, 0]);
        }
        bytes.extend(packet);
        self.stream.write_all(&bytes).await.unwrap();
        self.stream.flush().await.unwrap();
    }

    async fn receive(&mut self) -> Vec<u8> {
        let receiving = async {
            if self.frames {
                let head = self.stream.read_u16().await.unwrap();
                assert!(head & 0xff00 == 0x8200 && head & 0xff < 126);
            }
            let [first, length] = self.stream.read_u16().await.unwrap().to_be_bytes();
            assert!(
                length < 128,
                "a longer packet encodes its length differently"
            );
            let mut packet = vec![0; 2 + usize::from(length)];
            packet[..2].copy_from_slice(&[first, length]);
            self.stream.read_exact(&mut packet[2..]).await.unwrap();
            packet
        };
        within("a packet", receiving).await
    }

    /// Waits until the broker or the front closes the connection.
    pub(super) async fn closed(mut self) {
        let mut rest = Vec::new();
        // A reset ends it too.
        _ = within("its end", self.stream.read_to_end(&mut rest)).await;
    }
}
