//! The broker's side of a connection, which the test scripts.

use std::time::Duration;

use statehouse_tests::{
    Publish, broker,
    packet::{Packet, acknowledge, kind},
};
use tokio::time::timeout;

pub(crate) struct Peer {
    pub(crate) mqtt: broker::Peer,
    /// Packets that preceded the SUBSCRIBE.
    pub(crate) early: Vec<Packet>,
}

impl Peer {
    pub(crate) async fn next(&mut self) -> Seen {
        let packet = match self.early.is_empty() {
            true => self.mqtt.read().await,
            false => self.early.remove(0),
        };
        if packet.kind() == kind::PUBACK {
            return Seen::PubAck(packet.ack().packet_id);
        }
        let publish = packet.publish();
        Seen::Publish {
            text: String::from_utf8_lossy(&publish.payload).into_owned(),
            packet_id: publish.packet_id,
            dup: publish.dup,
        }
    }

    pub(crate) async fn text(&mut self) -> String {
        self.text_and_packet_id().await.0
    }

    pub(crate) async fn text_and_packet_id(&mut self) -> (String, u16) {
        match self.next().await {
            Seen::Publish {
                text, packet_id, ..
            } => (text, packet_id),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) async fn publish(&mut self, packet_id: u16) {
        let mut publish = Publish::new("requests", "request").qos(1);
        publish.packet_id = packet_id;
        self.mqtt.send(&publish.bytes()).await;
    }

    pub(crate) async fn acknowledge(&mut self, packet_id: u16) {
        self.mqtt.send(&acknowledge(kind::PUBACK, packet_id)).await;
    }

    /// Whether nothing arrives for a moment.
    pub(crate) async fn is_silent(&mut self) -> bool {
        assert!(self.early.is_empty());
        let wait = Duration::from_millis(50);
        timeout(wait, self.mqtt.read()).await.is_err()
    }
}

#[derive(Debug, PartialEq)]
pub(crate) enum Seen {
    Publish {
        text: String,
        packet_id: u16,
        dup: bool,
    },
    PubAck(u16),
}
