//! Tests rumqttc, a common MQTT client for Rust. The client and the store must understand each
//! other's packets.

use std::time::Duration;

use rumqttc::v5::{
    AsyncClient, Event, MqttOptions,
    mqttbytes::{
        QoS,
        v5::{Packet, Publish, PublishProperties},
    },
};
use statehouse_tests::{
    Hlc, Server, resp,
    store::{NOTIFICATION_PREFIX, REQUEST_TOPIC},
};
use tokio::sync::mpsc;

const ANSWERS: &str = "clients/rumqttc/answers";

/// Connects a client. Its messages arrive in the returned channel.
async fn connect(server: &Server, id: &str) -> (AsyncClient, mpsc::Receiver<Publish>) {
    let options = MqttOptions::new(id, "127.0.0.1", server.port());
    let (client, mut events) = AsyncClient::new(options, 100);
    let (send, messages) = mpsc::channel(100);
    let (ready, subscribed) = tokio::sync::oneshot::channel();
    tokio::spawn(async move {
        let mut ready = Some(ready);
        loop {
            match events.poll().await {
                Ok(Event::Incoming(Packet::Publish(publish))) => {
                    if send.send(publish).await.is_err() {
                        return;
                    }
                }
                Ok(Event::Incoming(Packet::SubAck(_))) => {
                    ready.take().map(|ready| ready.send(()));
                }
                Ok(_) => {}
                Err(error) => panic!("{error}"),
            }
        }
    });
    client.subscribe(ANSWERS, QoS::AtLeastOnce).await.unwrap();
    subscribed.await.unwrap();
    (client, messages)
}

async fn next(messages: &mut mpsc::Receiver<Publish>) -> Publish {
    tokio::time::timeout(Duration::from_secs(20), messages.recv())
        .await
        .expect("no message in time")
        .expect("the client has ended")
}

fn version(publish: &Publish) -> Option<String> {
    let users = &publish.properties.as_ref().unwrap().user_properties;
    users
        .iter()
        .find(|(name, _)| name == "__ts")
        .map(|(_, value)| value.clone())
}

#[tokio::test]
async fn rumqttc_gets_answers_and_notifications() {
    let server = Server::start();
    let (client, mut messages) = connect(&server, "rumqttc").await;
    let ask = async |arguments: &[&str], qos: QoS, correlation: &str| {
        let properties = PublishProperties {
            response_topic: Some(ANSWERS.into()),
            correlation_data: Some(correlation.to_owned().into()),
            user_properties: vec![("__ts".into(), Hlc::now(0).to_string())],
            ..PublishProperties::default()
        };
        client
            .publish_with_properties(
                REQUEST_TOPIC,
                qos,
                false,
                resp::array(arguments),
                properties,
            )
            .await
            .unwrap();
    };
    for (qos, key) in [(QoS::AtLeastOnce, "one"), (QoS::ExactlyOnce, "two")] {
        ask(&["SET", key, "hello"], qos, "a").await;
        let set = next(&mut messages).await;
        assert_eq!(&set.payload[..], b"+OK\r\n");
        let properties = set.properties.as_ref().unwrap();
        assert_eq!(properties.correlation_data.as_deref(), Some(&b"a"[..]));
        ask(&["GET", key], qos, "b").await;
        let got = next(&mut messages).await;
        assert_eq!(&got.payload[..], b"$5\r\nhello\r\n");
        assert_eq!(version(&got), version(&set));
    }
    ask(&["KEYNOTIFY", "key"], QoS::AtLeastOnce, "c").await;
    assert_eq!(&next(&mut messages).await.payload[..], b"+OK\r\n");
    let set = server.store("other").set("key", "v");
    let notification = next(&mut messages).await;
    assert!(
        notification
            .topic
            .starts_with(NOTIFICATION_PREFIX.as_bytes())
    );
    assert_eq!(version(&notification), Some(set.to_string()));
}
