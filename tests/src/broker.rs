//! A scripted MQTT broker for tests of clients: the test reads each packet of the client, and sends
//! each answer.

use std::{net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::timeout,
};

use crate::{
    packet::{Packet, connack, kind, suback},
    property::Property,
};

/// Time limit of a step on a busy machine.
const STEP_TIMEOUT: Duration = Duration::from_secs(30);

/// A listening socket, which accepts only if the test says so.
pub struct Broker(TcpListener);

/// One connection of the client. Drop closes it.
pub struct Peer {
    /// The socket, to which a test may write any bytes.
    pub stream: TcpStream,
    unread: Vec<u8>,
    pub clean_start: bool,
}

/// A CONNACK that accepts the client.
#[derive(Clone, Default)]
pub struct Greeting {
    pub session_present: bool,
    /// In the order of the wire.
    pub properties: Vec<Property>,
}

impl Greeting {
    /// Resumes the session.
    pub fn resumed() -> Greeting {
        Greeting {
            session_present: true,
            properties: Vec::new(),
        }
    }

    #[must_use]
    pub fn with(mut self, property: Property) -> Greeting {
        self.properties.push(property);
        self
    }
}

impl Broker {
    /// Listens on a free port.
    pub async fn start() -> Broker {
        Broker(TcpListener::bind("127.0.0.1:0").await.unwrap())
    }

    pub fn address(&self) -> SocketAddr {
        self.0.local_addr().unwrap()
    }

    /// Accepts the next connection, and reads its CONNECT. By then the client has noticed that an
    /// earlier connection is lost.
    pub async fn accept(&self) -> Peer {
        let accepted = timeout(STEP_TIMEOUT, self.0.accept()).await;
        let (stream, _) = accepted.expect("the client connects").unwrap();
        let mut peer = Peer {
            stream,
            unread: Vec::new(),
            clean_start: false,
        };
        peer.clean_start = peer.read().await.clean_start();
        peer
    }
}

impl Peer {
    /// The next packet of the client.
    pub async fn read(&mut self) -> Packet {
        loop {
            if let Some(packet) = Packet::cut(&mut self.unread) {
                return packet;
            }
            let reading = self.stream.read_buf(&mut self.unread);
            let read = timeout(STEP_TIMEOUT, reading).await;
            let read = read.expect("the client sends a packet").unwrap();
            assert_ne!(read, 0, "the client closed the connection");
        }
    }

    /// The unread bytes up to the end of the connection, which the client must close.
    pub async fn rest(&mut self) -> &[u8] {
        let reading = self.stream.read_to_end(&mut self.unread);
        let read = timeout(STEP_TIMEOUT, reading).await;
        read.expect("the client closes the connection").unwrap();
        &self.unread
    }

    pub async fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
    }

    pub async fn greet(&mut self, greeting: &Greeting) {
        let packet = connack(greeting.session_present, &greeting.properties);
        self.send(&packet).await;
    }

    /// Reads the SUBSCRIBE, and answers it with a reason per filter. Returns the filters.
    pub async fn answer_subscribe(&mut self, reasons: &[u8]) -> Vec<String> {
        let packet = self.read().await;
        assert_eq!(packet.kind(), kind::SUBSCRIBE, "{packet:?}");
        let (packet_id, filters) = packet.subscribe();
        assert_eq!(filters.len(), reasons.len(), "{filters:?}");
        self.send(&suback(packet_id, reasons)).await;
        filters
    }
}
