//! A raw client of MQTT 3.1.1: the MQTT 5 client, with the packets that differ replaced.

use std::{
    net::SocketAddr,
    ops::{Deref, DerefMut},
};

use crate::{
    client::Client,
    connect::Connect,
    packet::{Packet, Publish, acknowledge, kind},
    packet3::{self, DISCONNECT},
};

/// One connection. The functions of [`Client`] that only handle packets of both versions, or bytes,
/// are usable, too.
pub struct Client3(Client);

impl Deref for Client3 {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.0
    }
}

impl DerefMut for Client3 {
    fn deref_mut(&mut self) -> &mut Client {
        &mut self.0
    }
}

impl Client3 {
    /// Opens a TCP connection without sending a CONNECT.
    pub fn open(address: SocketAddr) -> Client3 {
        Client3(Client::open(address))
    }

    /// Connects. The server must accept the CONNECT.
    pub fn connect(address: SocketAddr, connect: &Connect) -> Client3 {
        let (client, code) = Client3::try_connect(address, connect);
        assert_eq!(code, 0, "the return code of the CONNACK");
        client
    }

    /// Sends a CONNECT and returns the return code of the CONNACK.
    pub fn try_connect(address: SocketAddr, connect: &Connect) -> (Client3, u8) {
        let mut client = Client3::open(address);
        client.send(&connect.bytes3());
        let code = client.take_connack();
        (client, code)
    }

    /// Waits for the CONNACK, which must be the next packet. Returns its return code.
    pub fn take_connack(&mut self) -> u8 {
        let packet = self.next();
        let (_, code) = packet.connack3();
        self.0.connack = Some(packet.ack());
        code
    }

    pub fn disconnect(mut self) {
        self.send(&DISCONNECT);
        self.expect_closed();
    }

    /// Ends the connection without a DISCONNECT, and waits until the server closes it.
    pub fn abort(mut self) {
        self.finish();
        self.acknowledges = false;
        self.expect_closed();
    }

    /// Waits for the end of the connection. The server must not send a DISCONNECT, which MQTT 3.1.1
    /// has for clients only. Other packets are set aside.
    pub fn expect_closed(&mut self) {
        self.expect_closed_after("that");
    }

    /// Like [`Self::expect_closed`]. A failure names `what` as the expected cause.
    pub fn expect_closed_after(&mut self, what: &str) {
        let disconnect = self.0.expect_closed_after(what);
        assert_eq!(disconnect, None, "a server never sends a DISCONNECT");
    }

    /// The next packet, which must be a PUBLISH. A PUBREL that was acknowledged may precede it.
    pub fn next_publish(&mut self) -> Publish {
        loop {
            let packet = self.next();
            if !self.acknowledges || packet.kind() != kind::PUBREL {
                return packet.publish3();
            }
        }
    }

    /// Asserts that no packet has arrived but PUBRELs that were acknowledged, and that earlier
    /// packets caused no further ones.
    pub fn expect_nothing(&mut self) {
        self.ping();
        let mut packets = self.drain();
        packets.retain(|it| !self.acknowledges || it.kind() != kind::PUBREL);
        assert!(packets.is_empty(), "unexpected: {packets:?}");
    }

    /// Waits for the next PUBLISH to a topic with this prefix.
    pub fn take_publish(&mut self, topic_prefix: &str) -> Publish {
        let wanted = |packet: &Packet| {
            packet.kind() == kind::PUBLISH && packet.publish3().topic.starts_with(topic_prefix)
        };
        self.take(&format!("a PUBLISH to {topic_prefix}"), wanted)
            .publish3()
    }

    /// Waits for the acknowledgement of this kind for this packet id.
    pub fn take_ack(&mut self, ack_kind: u8, packet_id: u16) {
        self.take(
            &format!("acknowledgement {ack_kind} of {packet_id}"),
            |packet| packet.kind() == ack_kind && packet.ack3() == packet_id,
        );
    }

    /// The next packet, which must be an acknowledgement of this kind. Returns its packet id.
    pub fn next_ack(&mut self, ack_kind: u8) -> u16 {
        let packet = self.next();
        assert_eq!(packet.kind(), ack_kind, "{packet:?}");
        packet.ack3()
    }

    /// Publishes and completes the handshake.
    pub fn publish(&mut self, publish: Publish) {
        let qos = publish.qos;
        let id = self.start(publish);
        match qos {
            0 => {}
            1 => self.take_ack(kind::PUBACK, id),
            _ => {
                self.take_ack(kind::PUBREC, id);
                self.send(&acknowledge(kind::PUBREL, id));
                self.take_ack(kind::PUBCOMP, id);
            }
        }
    }

    /// Sends a PUBLISH without waiting. Returns its packet id.
    pub fn start(&mut self, mut publish: Publish) -> u16 {
        if publish.qos > 0 && publish.packet_id == 0 {
            publish.packet_id = self.packet_id();
        }
        self.send(&publish.bytes3());
        publish.packet_id
    }

    /// Subscribes to one filter. Returns the return code.
    pub fn subscribe(&mut self, filter: &str, qos: u8) -> u8 {
        self.subscribe_all(&[(filter, qos)])[0]
    }

    /// Subscribes to filters with one packet. Returns the return codes.
    pub fn subscribe_all(&mut self, filters: &[(&str, u8)]) -> Vec<u8> {
        let id = self.packet_id();
        self.send(&packet3::subscribe(id, filters));
        let packet = self.take("a SUBACK", |it| it.kind() == kind::SUBACK);
        let (acknowledged, codes) = packet.suback3();
        assert_eq!(acknowledged, id);
        assert_eq!(codes.len(), filters.len(), "a return code for each filter");
        codes
    }

    /// Unsubscribes from filters with one packet, and waits for the UNSUBACK.
    pub fn unsubscribe(&mut self, filters: &[&str]) {
        let id = self.packet_id();
        self.send(&packet3::unsubscribe(id, filters));
        self.take_ack(kind::UNSUBACK, id);
    }
}
