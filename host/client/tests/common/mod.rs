//! A scripted broker with a scripted store.
// Each test file uses only a part of this module.
#![allow(dead_code)]

use statehouse_client::{Client, GapCause, Options, Watch, WatchEvent};
pub(crate) use statehouse_tests::broker::Greeting;
use statehouse_tests::{
    Property, Publish, broker,
    packet::{self, kind},
    store::{REQUEST_TOPIC, notification_topic},
};

pub(crate) const VERSION: &str = "000000000000007:00001:StateStore";
/// The request of `client.get("k")`.
pub(crate) const GET: &[u8] = b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n";
const RESPONSE_TOPIC: &str = "clients/tester/services/statestore/_any_/command/invoke/response";

pub(crate) struct Broker(broker::Broker);

/// One connection of the client.
pub(crate) struct Peer {
    pub(crate) mqtt: broker::Peer,
    next_packet_id: u16,
}

/// A client with these options, and its connection.
pub(crate) async fn connect(broker: &Broker, options: Options) -> (Peer, Client) {
    let (peer, client) = tokio::join!(broker.accept(Greeting::default()), Client::connect(options));
    (peer, client.unwrap())
}

/// A new broker with one client.
pub(crate) async fn connected() -> (Broker, Peer, Client) {
    let (broker, options) = Broker::start().await;
    let (peer, client) = connect(&broker, options).await;
    (broker, peer, client)
}

/// Asserts that the client gets an answer to its next request.
pub(crate) async fn assert_served(peer: &mut Peer, client: &Client) {
    let (get, ()) = tokio::join!(client.get("k"), peer.serve(GET, b"$-1\r\n", None));
    assert_eq!(get, Ok(None));
}

/// Asserts that the next event is the gap of a reconnect.
pub(crate) async fn expect_gap(watch: &mut Watch) {
    let gap = watch.next().await;
    assert_eq!(gap, Ok(WatchEvent::Gap(GapCause::Reconnected)));
}

impl Broker {
    pub(crate) async fn start() -> (Self, Options) {
        let broker = broker::Broker::start().await;
        let options = Options {
            port: broker.address().port(),
            client_id: Some("tester".into()),
            ..Options::default()
        };
        (Self(broker), options)
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
        peer.mqtt.greet(&greeting).await;
        peer
    }

    /// Accepts the next connection up to CONNECT. The client has noticed by then that an earlier
    /// one is lost.
    pub(crate) async fn accept_connect(&self) -> Peer {
        Peer {
            mqtt: self.0.accept().await,
            next_packet_id: 1,
        }
    }
}

impl Peer {
    /// Reads the SUBSCRIBE and grants it.
    pub(crate) async fn grant(&mut self) {
        self.answer_subscribe([1, 1]).await;
    }

    /// Reads the SUBSCRIBE to responses and notifications.
    pub(crate) async fn answer_subscribe(&mut self, reasons: [u8; 2]) {
        let filters = self.mqtt.answer_subscribe(&reasons).await;
        let notifications = notification_topic("tester", b"") + "+";
        assert_eq!(filters, [RESPONSE_TOPIC, &notifications]);
    }

    /// Reads the next request. Ignores acknowledgements.
    pub(crate) async fn request(&mut self) -> Publish {
        let packet = loop {
            let packet = self.mqtt.read().await;
            if packet.kind() != kind::PUBACK {
                break packet;
            }
        };
        let request = packet.publish();
        assert_eq!((request.topic.as_str(), request.qos), (REQUEST_TOPIC, 1));
        request
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

    pub(crate) async fn answer(&mut self, of: &Publish, payload: &[u8], version: Option<&str>) {
        let mut properties = vec![("__stat", "200"), ("__protVer", "1.0")];
        properties.extend(version.map(|version| ("__ts", version)));
        self.answer_with(of, payload, &properties).await;
        self.acknowledge(of, 0, None).await;
    }

    pub(crate) async fn answer_with(
        &mut self,
        of: &Publish,
        payload: &[u8],
        properties: &[(&str, &str)],
    ) {
        let topic = Property::ResponseTopic(RESPONSE_TOPIC.into());
        assert!(of.properties.contains(&topic), "{of:?}");
        let correlation = of.correlation().unwrap().to_vec();
        let mut answer =
            Publish::new(RESPONSE_TOPIC, payload).with(Property::CorrelationData(correlation));
        for (name, value) in properties {
            answer = answer.with(Property::user(name, value));
        }
        self.publish(answer).await;
    }

    pub(crate) async fn notify(&mut self, key: &[u8], payload: &[u8], version: &str) {
        let topic = notification_topic("tester", key);
        let version = Property::user("__ts", version);
        self.publish(Publish::new(&topic, payload).with(version))
            .await;
    }

    async fn publish(&mut self, publish: Publish) {
        let mut publish = publish.qos(1);
        publish.packet_id = self.next_packet_id;
        self.next_packet_id += 1;
        self.mqtt.send(&publish.bytes()).await;
    }

    pub(crate) async fn acknowledge(&mut self, of: &Publish, reason: u8, text: Option<&str>) {
        let text = text.map(|text| Property::ReasonString(text.into()));
        let puback = packet::puback(of.packet_id, reason, text.as_slice());
        self.mqtt.send(&puback).await;
    }

    pub(crate) async fn disconnect(&mut self, reason: u8) {
        self.mqtt.send(&packet::disconnect(reason, &[])).await;
    }

    /// Reads an UNSUBSCRIBE for each subscription, a DISCONNECT without a reason, and the end of
    /// the stream.
    pub(crate) async fn expect_disconnect(&mut self) {
        let mut rest = self.mqtt.rest().await;
        for _ in 0..2 {
            assert_eq!(rest[0], 0xa2, "an UNSUBSCRIBE");
            rest = &rest[2 + usize::from(rest[1])..];
        }
        assert_eq!(rest, [0xe0, 0]);
    }
}
