//! A raw MQTT 5 client that can send any bytes and returns all received packets in order.
//!
//! By default the client acknowledges every received message. It must not keep session state,
//! resend packets or read in the background, so that a test controls every byte.

use std::{
    collections::VecDeque,
    io::{ErrorKind, Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use crate::{
    connect::Connect,
    packet::{self, Ack, PINGREQ, Packet, Publish, acknowledge, kind},
    property::Property,
};

/// How long a test waits for an expected packet. The time is long because the machine may be busy.
/// A passing test never waits this long.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A reason of a CONNACK after which every client tries again.
const SERVER_UNAVAILABLE: u8 = 0x88;

/// The result of waiting for a packet.
#[derive(Debug)]
pub enum Heard {
    Packet(Packet),
    Silence,
    Closed,
}

/// One connection.
pub struct Client {
    stream: TcpStream,
    buffer: Vec<u8>,
    /// Packets that arrived while the client waited for another one.
    aside: VecDeque<Packet>,
    next_id: u16,
    /// Whether the client acknowledges each received PUBLISH and PUBREL.
    pub acknowledges: bool,
    /// The received CONNACK, if any.
    pub connack: Option<Ack>,
}

impl Client {
    /// Opens a TCP connection without sending a CONNECT.
    pub fn open(address: SocketAddr) -> Client {
        let stream = TcpStream::connect(address)
            .unwrap_or_else(|error| panic!("cannot connect to {address}: {error}"));
        Client::on(stream)
    }

    /// A client on an existing TCP connection.
    pub fn on(stream: TcpStream) -> Client {
        stream.set_nodelay(true).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Client {
            stream,
            buffer: Vec::new(),
            aside: VecDeque::new(),
            next_id: 1,
            acknowledges: true,
            connack: None,
        }
    }

    /// Connects. The server must accept the CONNECT.
    pub fn connect(address: SocketAddr, connect: &Connect) -> Client {
        let (client, connack) = Client::try_connect(address, connect);
        assert_eq!(connack.reason, 0, "CONNACK {connack:?}");
        client
    }

    /// Sends a CONNECT and returns the CONNACK with any reason code.
    pub fn try_connect(address: SocketAddr, connect: &Connect) -> (Client, Ack) {
        let mut client = Client::open(address);
        client.send(&connect.bytes());
        let packet = client.next();
        assert_eq!(
            packet.kind(),
            kind::CONNACK,
            "instead of a CONNACK: {packet:?}"
        );
        let connack = packet.ack();
        client.connack = Some(connack.clone());
        (client, connack)
    }

    /// Connects to a server that may be down or unavailable. Returns `None` if it does not accept.
    pub fn attempt(address: SocketAddr, connect: &Connect) -> Option<Client> {
        Client::attempt_within(address, connect, PATIENCE)
    }

    /// Like [`Self::attempt`], and gives up after this time.
    pub fn attempt_within(
        address: SocketAddr,
        connect: &Connect,
        patience: Duration,
    ) -> Option<Client> {
        let mut client = Client::on(TcpStream::connect_timeout(&address, patience).ok()?);
        client.try_send(&connect.bytes()).ok()?;
        let Heard::Packet(packet) = client.read(patience) else {
            return None;
        };
        assert_eq!(packet.kind(), kind::CONNACK, "{packet:?}");
        let connack = packet.ack();
        // The host has just lost its leadership, and another one serves.
        if connack.reason == SERVER_UNAVAILABLE {
            return None;
        }
        assert_eq!(connack.reason, 0, "CONNACK {connack:?}");
        client.connack = Some(connack);
        Some(client)
    }

    pub fn session_present(&self) -> bool {
        self.connack.as_ref().is_some_and(|ack| ack.session_present)
    }

    /// Sends bytes. The connection must be open.
    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("the server reads");
    }

    /// Sends bytes. Returns an error if the connection is closed.
    pub fn try_send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Limits how long a write may block.
    pub fn set_write_timeout(&self, timeout: Duration) {
        self.stream.set_write_timeout(Some(timeout)).unwrap();
    }

    /// Closes the connection. An error means that it was already closed.
    pub fn close(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Closes the sending half, so the server reads the end of the stream. Returns an error if the
    /// connection is closed.
    pub fn try_finish(&self) -> std::io::Result<()> {
        self.stream.shutdown(Shutdown::Write)
    }

    /// Like [`Self::try_finish`]. The connection must be open.
    pub fn finish(&self) {
        self.try_finish().unwrap();
    }

    /// Ends the connection without a DISCONNECT, and waits until the server closes it.
    pub fn abort(mut self) {
        self.finish();
        self.acknowledges = false;
        self.expect_closed();
    }

    pub fn disconnect(mut self) {
        self.send(&packet::disconnect(0, &[]));
        self.expect_closed();
    }

    /// A packet id not used before on this connection.
    pub fn packet_id(&mut self) -> u16 {
        let id = self.next_id;
        self.next_id = self.next_id.checked_add(1).unwrap_or(1);
        id
    }

    /// Waits for the next packet, for at most `timeout`. Packets that were set aside come first.
    pub fn poll(&mut self, timeout: Duration) -> Heard {
        match self.aside.pop_front() {
            Some(packet) => Heard::Packet(packet),
            None => self.read(timeout),
        }
    }

    #[allow(
        clippy::should_implement_trait,
        reason = "it panics if there is no packet"
    )]
    pub fn next(&mut self) -> Packet {
        match self.poll(PATIENCE) {
            Heard::Packet(packet) => packet,
            other => panic!("instead of a packet: {other:?}"),
        }
    }

    /// Removes and returns the first packet that `wanted` accepts. Other packets stay in order.
    pub fn take(&mut self, what: &str, wanted: impl Fn(&Packet) -> bool) -> Packet {
        if let Some(at) = self.aside.iter().position(&wanted) {
            return self.aside.remove(at).unwrap();
        }
        let end = Instant::now() + PATIENCE;
        loop {
            match self.read(end.saturating_duration_since(Instant::now())) {
                Heard::Packet(packet) if wanted(&packet) => return packet,
                Heard::Packet(packet) => self.aside.push_back(packet),
                other => panic!("instead of {what}: {other:?}; before it: {:?}", self.aside),
            }
        }
    }

    /// Removes and returns the packets that were set aside, without waiting for more.
    pub fn drain(&mut self) -> Vec<Packet> {
        self.aside.drain(..).collect()
    }

    /// Puts drained packets back, before packets that arrived later.
    pub fn put_back(&mut self, packets: Vec<Packet>) {
        for packet in packets.into_iter().rev() {
            self.aside.push_front(packet);
        }
    }

    /// Waits for the next PUBLISH to a topic with this prefix.
    pub fn take_publish(&mut self, topic_prefix: &str) -> Publish {
        let wanted = |packet: &Packet| {
            packet.kind() == kind::PUBLISH && packet.publish().topic.starts_with(topic_prefix)
        };
        self.take(&format!("a PUBLISH to {topic_prefix}"), wanted)
            .publish()
    }

    /// Waits for the acknowledgement of this kind for this packet id.
    pub fn take_ack(&mut self, ack_kind: u8, packet_id: u16) -> Ack {
        let wanted =
            |packet: &Packet| packet.kind() == ack_kind && packet.ack().packet_id == packet_id;
        self.take(
            &format!("acknowledgement {ack_kind} of {packet_id}"),
            wanted,
        )
        .ack()
    }

    /// Publishes and completes the handshake. Returns the PUBACK or PUBREC, or reason 0 at QoS 0.
    pub fn publish(&mut self, publish: Publish) -> Ack {
        let id = self.start(publish.clone());
        match publish.qos {
            0 => Ack {
                packet_id: 0,
                session_present: false,
                reason: 0,
                properties: Vec::new(),
            },
            1 => self.take_ack(kind::PUBACK, id),
            _ => {
                let ack = self.take_ack(kind::PUBREC, id);
                if ack.reason < 0x80 {
                    self.send(&acknowledge(kind::PUBREL, id));
                    self.take_ack(kind::PUBCOMP, id);
                }
                ack
            }
        }
    }

    /// Sends a PUBLISH without waiting. Returns its packet id.
    pub fn start(&mut self, mut publish: Publish) -> u16 {
        if publish.qos > 0 && publish.packet_id == 0 {
            publish.packet_id = self.packet_id();
        }
        self.send(&publish.bytes());
        publish.packet_id
    }

    /// Subscribes to one filter. Returns the reason code.
    pub fn subscribe(&mut self, filter: &str, options: u8) -> u8 {
        self.subscribe_with(filter, options, &[])
    }

    /// Subscribes to one filter with properties. Returns the reason code.
    pub fn subscribe_with(&mut self, filter: &str, options: u8, properties: &[Property]) -> u8 {
        let id = self.packet_id();
        self.send(&packet::subscribe(id, properties, &[(filter, options)]));
        let packet = self.take("a SUBACK", |p| p.kind() == kind::SUBACK);
        let (acknowledged, reasons) = packet.suback();
        assert_eq!(acknowledged, id);
        assert_eq!(reasons.len(), 1, "one filter, one reason");
        reasons[0]
    }

    /// Sends a PINGREQ and waits for the PINGRESP. Then the server has read all earlier packets.
    pub fn ping(&mut self) {
        self.send(&PINGREQ);
        self.take("a PINGRESP", |p| p.kind() == kind::PINGRESP);
    }

    /// Asserts that no packet has arrived, and that earlier packets caused no further ones.
    pub fn expect_nothing(&mut self) {
        self.ping();
        assert!(self.aside.is_empty(), "unexpected: {:?}", self.aside);
    }

    /// Reads to the end of the connection. Returns the DISCONNECT, if any, and sets other packets
    /// aside.
    pub fn expect_closed(&mut self) -> Option<Ack> {
        self.expect_closed_after("that")
    }

    /// Like [`Self::expect_closed`]. A failure names `what` as the expected cause.
    pub fn expect_closed_after(&mut self, what: &str) -> Option<Ack> {
        let end = Instant::now() + PATIENCE;
        let mut disconnect = None;
        loop {
            match self.read(end.saturating_duration_since(Instant::now())) {
                Heard::Packet(packet) if packet.kind() == kind::DISCONNECT => {
                    assert!(disconnect.is_none(), "two DISCONNECTs");
                    disconnect = Some(packet.ack());
                }
                Heard::Packet(packet) => {
                    assert!(disconnect.is_none(), "after a DISCONNECT: {packet:?}");
                    self.aside.push_back(packet);
                }
                Heard::Closed => return disconnect,
                Heard::Silence => panic!("after {what} the connection was not closed"),
            }
        }
    }

    /// Reads to the end of the connection, which must be a DISCONNECT with this reason.
    pub fn expect_disconnect(&mut self, reason: u8) -> Ack {
        let ack = self.expect_closed();
        let ack = ack.unwrap_or_else(|| panic!("closed without DISCONNECT {reason:#04x}"));
        assert_eq!(
            ack.reason, reason,
            "DISCONNECT {:#04x} {:?} instead of {reason:#04x}",
            ack.reason, ack.properties
        );
        ack
    }

    /// Reads the next packet from the socket, ignoring packets that were set aside.
    fn read(&mut self, timeout: Duration) -> Heard {
        let end = Instant::now() + timeout;
        loop {
            if let Some(packet) = Packet::cut(&mut self.buffer) {
                self.acknowledge(&packet);
                return Heard::Packet(packet);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Heard::Silence;
            }
            self.stream.set_read_timeout(Some(left)).unwrap();
            let mut chunk = [0; 16 * 1024];
            match self.stream.read(&mut chunk) {
                Ok(0) => return Heard::Closed,
                Ok(n) => self.buffer.extend_from_slice(&chunk[..n]),
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock | ErrorKind::TimedOut => return Heard::Silence,
                    ErrorKind::Interrupted => {}
                    _ => return Heard::Closed,
                },
            }
        }
    }

    fn acknowledge(&mut self, packet: &Packet) {
        if !self.acknowledges {
            return;
        }
        let answer = match packet.kind() {
            kind::PUBLISH => match packet.publish_qos_and_id() {
                (1, id) => acknowledge(kind::PUBACK, id),
                (2, id) => acknowledge(kind::PUBREC, id),
                _ => return,
            },
            kind::PUBREL => acknowledge(kind::PUBCOMP, packet.ack().packet_id),
            _ => return,
        };
        // The server may have closed the connection. Earlier packets are still valid.
        let _ = self.stream.write_all(&answer);
    }
}
