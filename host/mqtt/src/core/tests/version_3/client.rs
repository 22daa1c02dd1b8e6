//! A client of MQTT 3.1.1 that encodes and decodes packets with rumqttc's codec for that version.

use std::time::Instant;

use bytes::BytesMut;
use rumqttc::mqttbytes::{QoS, v4};
use v4::Packet;

use crate::{Broker, dispatch::Turn, testing::Peer};

const MAX: usize = 1 << 20;

/// A connected client.
pub(super) struct Client {
    pub(super) peer: Peer,
    pub(super) session_present: bool,
}

pub(super) fn connect(client: &str, clean_session: bool) -> v4::Connect {
    let mut connect = v4::Connect::new(client);
    connect.clean_session = clean_session;
    connect
}

/// The bytes of a packet.
pub(super) fn packet(packet: &Packet) -> BytesMut {
    let mut bytes = BytesMut::new();
    packet.write(&mut bytes, MAX).unwrap();
    bytes
}

impl Client {
    pub(super) fn new(broker: &Broker, client: &str, clean_session: bool, now: Instant) -> Self {
        Self::of(broker, connect(client, clean_session), now)
    }

    pub(super) fn of(broker: &Broker, connect: v4::Connect, now: Instant) -> Self {
        let mut hello = packet(&Packet::Connect(connect));
        let mut peer = Peer::of(broker, &mut hello, now);
        let mut received = peer.receive_bytes();
        let Packet::ConnAck(connack) = Packet::read(&mut received, MAX).unwrap() else {
            panic!("no CONNACK")
        };
        assert_eq!(connack.code, v4::ConnectReturnCode::Success);
        peer.unread(received);
        Self {
            peer,
            session_present: connack.session_present,
        }
    }

    /// Sends packets in one read.
    pub(super) fn send(&mut self, packets: &[Packet], now: Instant) -> Turn {
        let bytes: Vec<_> = packets.iter().map(packet).collect();
        self.peer.send_raw(&bytes.concat(), now)
    }

    /// Everything that the broker has sent so far.
    pub(super) fn receive(&mut self) -> Vec<Packet> {
        let mut bytes = self.peer.receive_bytes();
        let mut packets = Vec::new();
        while !bytes.is_empty() {
            packets.push(Packet::read(&mut bytes, MAX).unwrap());
        }
        packets
    }

    /// The messages among the received packets.
    pub(super) fn messages(&mut self) -> Vec<v4::Publish> {
        let packets = self.receive().into_iter();
        let publishes = packets.filter_map(|packet| match packet {
            Packet::Publish(publish) => Some(publish),
            _ => None,
        });
        publishes.collect()
    }

    pub(super) fn payloads(&mut self) -> Vec<String> {
        let text = |it: &v4::Publish| String::from_utf8_lossy(&it.payload).into_owned();
        self.messages().iter().map(text).collect()
    }

    pub(super) fn subscribe(&mut self, filter: &str, qos: QoS, now: Instant) {
        let mut subscribe = v4::Subscribe::new(filter, qos);
        subscribe.pkid = 1;
        assert_eq!(
            self.send(&[Packet::Subscribe(subscribe)], now),
            Turn::Drained
        );
        let mut received = self.peer.receive_bytes();
        let Packet::SubAck(ack) = Packet::read(&mut received, MAX).unwrap() else {
            panic!("no SUBACK")
        };
        assert_eq!(ack.return_codes, [v4::SubscribeReasonCode::Success(qos)]);
        // Retained messages may follow; they stay for the test.
        self.peer.unread(received);
    }

    /// Sends DISCONNECT and ends the connection.
    pub(super) fn disconnect(mut self, now: Instant) {
        assert_eq!(self.send(&[Packet::Disconnect], now), Turn::Over);
        self.peer.lose(now);
    }
}

pub(super) fn publish(topic: &str, qos: QoS, packet_id: u16, payload: &str) -> v4::Publish {
    let mut publish = v4::Publish::new(topic, qos, payload);
    publish.pkid = packet_id;
    publish
}
