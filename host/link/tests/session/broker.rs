//! The broker's side of a connection, which the test scripts.

use std::time::Duration;

use bytes::BytesMut;
use rumqttc::v5::mqttbytes::v5::{
    ConnAck, ConnAckProperties, ConnectReturnCode, Packet, PubAck, PubAckReason, Publish,
};
use rumqttc::v5::mqttbytes::{Error as WireError, QoS};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::STEP_TIMEOUT;

#[derive(Default)]
pub(crate) struct Greeting {
    pub(crate) session_present: bool,
    pub(crate) receive_max: Option<u16>,
    pub(crate) max_packet_size: Option<u32>,
}

pub(crate) struct Peer {
    pub(crate) stream: TcpStream,
    pub(crate) unread: BytesMut,
    pub(crate) early: Vec<Packet>,
}

impl Peer {
    pub(crate) async fn greet(&mut self, greeting: Greeting) {
        let properties = ConnAckProperties {
            session_expiry_interval: None,
            receive_max: greeting.receive_max,
            max_qos: None,
            retain_available: None,
            max_packet_size: greeting.max_packet_size,
            assigned_client_identifier: None,
            topic_alias_max: None,
            reason_string: None,
            user_properties: vec![],
            wildcard_subscription_available: None,
            subscription_identifiers_available: None,
            shared_subscription_available: None,
            server_keep_alive: None,
            response_information: None,
            server_reference: None,
            authentication_method: None,
            authentication_data: None,
        };
        self.write(Packet::ConnAck(ConnAck {
            session_present: greeting.session_present,
            code: ConnectReturnCode::Success,
            properties: Some(properties),
        }))
        .await;
    }

    pub(crate) async fn read(&mut self) -> Packet {
        loop {
            match Packet::read(&mut self.unread, None) {
                Ok(packet) => return packet,
                Err(WireError::InsufficientBytes(_)) => {
                    let reading = self.stream.read_buf(&mut self.unread);
                    let read = timeout(STEP_TIMEOUT, reading).await;
                    let read = read.expect("the link sends a packet").unwrap();
                    assert_ne!(read, 0, "the link closed the connection");
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// All further bytes: rumqttc cannot read an UNSUBSCRIBE.
    pub(crate) async fn rest(&mut self) -> Vec<u8> {
        let mut rest = std::mem::take(&mut self.unread).to_vec();
        let reading = self.stream.read_to_end(&mut rest);
        timeout(STEP_TIMEOUT, reading)
            .await
            .expect("the link ends")
            .unwrap();
        rest
    }

    pub(crate) async fn write(&mut self, packet: Packet) {
        let mut bytes = BytesMut::new();
        packet.write(&mut bytes, None).unwrap();
        self.stream.write_all(&bytes).await.unwrap();
    }

    /// A summary of the next packet.
    pub(crate) async fn next(&mut self) -> Seen {
        let packet = match self.early.is_empty() {
            true => self.read().await,
            false => self.early.remove(0),
        };
        match packet {
            Packet::Publish(publish) => Seen::Publish {
                text: String::from_utf8_lossy(&publish.payload).into_owned(),
                packet_id: publish.pkid,
                dup: publish.dup,
            },
            Packet::PubAck(ack) => Seen::PubAck(ack.pkid),
            other => panic!("{other:?}"),
        }
    }

    /// The text of the next PUBLISH.
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
        let mut publish = Publish::new("requests", QoS::AtLeastOnce, "request", None);
        publish.pkid = packet_id;
        self.write(Packet::Publish(publish)).await;
    }

    pub(crate) async fn acknowledge(&mut self, packet_id: u16) {
        self.write(Packet::PubAck(PubAck {
            pkid: packet_id,
            reason: PubAckReason::Success,
            properties: None,
        }))
        .await;
    }

    /// Whether nothing arrives for a moment.
    pub(crate) async fn is_silent(&mut self) -> bool {
        assert!(self.early.is_empty());
        let wait = Duration::from_millis(50);
        timeout(wait, self.read()).await.is_err()
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
