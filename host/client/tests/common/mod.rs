//! A scripted broker and store.
// Each test file uses only a part of this module.
#![allow(dead_code)]

use bytes::{Bytes, BytesMut};
use rumqttc::v5::mqttbytes::v5::{
    ConnAck, ConnAckProperties, ConnectReturnCode, DisconnectReasonCode, Packet, PubAck,
    PubAckProperties, PubAckReason, Publish, PublishProperties, SubAck, SubscribeReasonCode,
};
use rumqttc::v5::mqttbytes::{Error as WireError, QoS};
use statehouse_client::Options;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

pub(crate) struct Broker {
    listener: TcpListener,
}

/// One connection of the client.
pub(crate) struct Peer {
    stream: TcpStream,
    unread: BytesMut,
    next_packet_id: u16,
    pub(crate) clean_start: bool,
}

/// The content of a CONNACK.
#[derive(Default)]
pub(crate) struct Greeting {
    pub(crate) session_present: bool,
    pub(crate) receive_max: Option<u16>,
    pub(crate) max_packet_size: Option<u32>,
}

pub(crate) const VERSION: &str = "000000000000007:00001:StateStore";

impl Broker {
    pub(crate) async fn start() -> (Self, Options) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let options = Options {
            port: listener.local_addr().unwrap().port(),
            client_id: Some("tester".into()),
            ..Options::default()
        };
        (Self { listener }, options)
    }

    /// Accepts the next connection up to CONNACK and SUBACK.
    pub(crate) async fn accept(&self, greeting: Greeting) -> Peer {
        let mut peer = self.accept_unsubscribed(greeting).await;
        peer.grant().await;
        peer
    }

    /// Accepts the next connection up to CONNACK.
    pub(crate) async fn accept_unsubscribed(&self, greeting: Greeting) -> Peer {
        let mut peer = self.accept_connect().await;
        peer.greet(greeting).await;
        peer
    }

    /// Accepts the next connection up to CONNECT. The client has noticed by then that an earlier
    /// one is lost.
    pub(crate) async fn accept_connect(&self) -> Peer {
        let (stream, _) = self.listener.accept().await.unwrap();
        let mut peer = Peer {
            stream,
            unread: BytesMut::new(),
            next_packet_id: 1,
            clean_start: false,
        };
        let Packet::Connect(connect, ..) = peer.read().await else {
            panic!("not a CONNECT");
        };
        peer.clean_start = connect.clean_start;
        peer
    }
}

impl Peer {
    /// Answers the CONNECT.
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
                Ok(Packet::PubAck(_)) => {}
                Ok(packet) => return packet,
                Err(WireError::InsufficientBytes(_)) => {
                    let read = self.stream.read_buf(&mut self.unread).await.unwrap();
                    assert_ne!(read, 0, "the client closed the connection");
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    pub(crate) async fn write(&mut self, packet: Packet) {
        let mut bytes = BytesMut::new();
        packet.write(&mut bytes, None).unwrap();
        self.stream.write_all(&bytes).await.unwrap();
    }

    /// Reads the SUBSCRIBE and grants it.
    pub(crate) async fn grant(&mut self) {
        self.answer_subscribe([SubscribeReasonCode::Success(QoS::AtLeastOnce); 2])
            .await;
    }

    pub(crate) async fn answer_subscribe(&mut self, codes: [SubscribeReasonCode; 2]) {
        let packet = self.read().await;
        let Packet::Subscribe(subscribe) = packet else {
            panic!("not a SUBSCRIBE: {packet:?}");
        };
        let filters: Vec<&str> = subscribe.filters.iter().map(|f| f.path.as_str()).collect();
        assert_eq!(
            filters,
            [
                "clients/tester/services/statestore/_any_/command/invoke/response",
                "clients/statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/746573746572/command/notify/+"
            ]
        );
        self.write(Packet::SubAck(SubAck {
            pkid: subscribe.pkid,
            return_codes: codes.to_vec(),
            properties: None,
        }))
        .await;
    }

    /// Reads the next request.
    pub(crate) async fn request(&mut self) -> Publish {
        let packet = self.read().await;
        let Packet::Publish(publish) = packet else {
            panic!("not a PUBLISH: {packet:?}");
        };
        assert_eq!(
            publish.topic.as_ref(),
            b"statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/command/invoke"
        );
        assert_eq!(publish.qos, QoS::AtLeastOnce);
        publish
    }

    /// Reads a request, which must have this payload, and sends a response and an acknowledgement.
    pub(crate) async fn serve(&mut self, payload: &[u8], answer: &[u8], version: Option<&str>) {
        let request = self.request().await;
        assert_eq!(
            request.payload.escape_ascii().to_string(),
            payload.escape_ascii().to_string()
        );
        self.answer(&request, answer, version).await;
    }

    pub(crate) async fn answer(
        &mut self,
        request: &Publish,
        payload: &[u8],
        version: Option<&str>,
    ) {
        let mut properties = vec![("__stat", "200"), ("__protVer", "1.0")];
        properties.extend(version.map(|version| ("__ts", version)));
        self.answer_with(request, payload, &properties).await;
        self.acknowledge(request, PubAckReason::Success, None).await;
    }

    pub(crate) async fn answer_with(
        &mut self,
        request: &Publish,
        payload: &[u8],
        properties: &[(&str, &str)],
    ) {
        let asked = request.properties.as_ref().unwrap();
        let topic = asked.response_topic.clone().unwrap();
        self.publish(&topic, payload, properties, asked.correlation_data.clone())
            .await;
    }

    pub(crate) async fn notify(&mut self, key_hex: &str, payload: &[u8], version: &str) {
        let topic = format!(
            "clients/statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/746573746572/command/notify/{key_hex}"
        );
        self.publish(&topic, payload, &[("__ts", version)], None)
            .await;
    }

    async fn publish(
        &mut self,
        topic: &str,
        payload: &[u8],
        properties: &[(&str, &str)],
        correlation_data: Option<Bytes>,
    ) {
        let properties = PublishProperties {
            correlation_data,
            user_properties: properties
                .iter()
                .map(|(key, value)| ((*key).into(), (*value).into()))
                .collect(),
            ..PublishProperties::default()
        };
        let payload = Bytes::copy_from_slice(payload);
        let mut publish = Publish::new(topic, QoS::AtLeastOnce, payload, Some(properties));
        publish.pkid = self.next_packet_id;
        self.next_packet_id += 1;
        self.write(Packet::Publish(publish)).await;
    }

    pub(crate) async fn acknowledge(
        &mut self,
        of: &Publish,
        reason: PubAckReason,
        text: Option<&str>,
    ) {
        let properties = text.map(|text| PubAckProperties {
            reason_string: Some(text.into()),
            user_properties: vec![],
        });
        self.write(Packet::PubAck(PubAck {
            pkid: of.pkid,
            reason,
            properties,
        }))
        .await;
    }

    /// Sends DISCONNECT without the codec, which omits the length of the properties. The codec's
    /// own reader waits for that length.
    pub(crate) async fn disconnect(&mut self, reason: DisconnectReasonCode) {
        let bytes = [0xe0, 2, reason as u8, 0];
        self.stream.write_all(&bytes).await.unwrap();
    }

    /// Reads a DISCONNECT without a reason, which the codec cannot read either, and the end of the
    /// stream.
    pub(crate) async fn expect_disconnect(&mut self) {
        while self.stream.read_buf(&mut self.unread).await.unwrap() > 0 {}
        assert_eq!(self.unread.as_ref(), [0xe0, 0]);
    }
}

/// The correlation data of a request, and its first user property of this name.
pub(crate) fn correlation(request: &Publish) -> Bytes {
    let properties = request.properties.as_ref().unwrap();
    properties.correlation_data.clone().unwrap()
}

pub(crate) fn property<'a>(request: &'a Publish, name: &str) -> Option<&'a str> {
    let properties = request.properties.as_ref().unwrap();
    let mut named = properties
        .user_properties
        .iter()
        .filter(|(key, _)| key == name);
    named.next().map(|(_, value)| value.as_str())
}
