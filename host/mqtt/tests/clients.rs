//! The whole broker over sockets, with raw clients and with rumqttc clients.
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

mod common;

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use common::*;
use rumqttc::v5::{AsyncClient, Event, MqttOptions};
use statehouse_mqtt::{
    Broker, Claim, Door, Limits, Message, Options, Origin, QoS, Request, Service,
};
use tokio::time::timeout;
use wire::{DisconnectReasonCode as Reason, LastWill, Packet};

#[tokio::test]
async fn packets_in_one_write_are_answered_in_order() {
    let (broker, _) = Echo::broker(Limits::default());
    let address = listen(&broker).await;
    let mut client = Client::tcp(address).await;
    client
        .send(&[
            connect("a", true, 0, 60),
            subscribe("t", Q::AtLeastOnce),
            publish("t", Q::AtLeastOnce, 2, "x"),
            request("req/x", Q::AtLeastOnce, 3),
            Packet::PingReq(wire::PingReq),
            request("req/x", Q::ExactlyOnce, 4),
        ])
        .await;
    client.connack().await;
    assert!(matches!(client.next().await, Some(Packet::SubAck(_))));
    let mut rest = Vec::new();
    while rest.len() < 7 {
        rest.push(client.next().await.unwrap());
    }
    let position = |wanted: &dyn Fn(&Packet) -> bool| rest.iter().position(wanted).unwrap();
    let answer = |id: u8| {
        position(&|packet| match packet {
            Packet::Publish(publish) => publish
                .properties
                .as_ref()
                .is_some_and(|p| p.correlation_data.as_deref() == Some(&[0, id][..])),
            _ => false,
        })
    };
    let puback = |id| position(&|packet| matches!(packet, Packet::PubAck(ack) if ack.pkid == id));
    assert!(answer(3) < puback(3) && puback(2) < puback(3), "{rest:?}");
    assert!(answer(4) < position(&|packet| matches!(packet, Packet::PubRec(rec) if rec.pkid == 4)));
}

#[tokio::test]
async fn takeover_hands_requests_over_in_order() {
    let (broker, echo) = Echo::broker(Limits::default());
    let address = listen(&broker).await;
    let mut old = Client::tcp(address).await.hello("a", 1000).await;
    old.send(&[request("req/x", Q::AtLeastOnce, 3)]).await;
    assert!(matches!(old.next().await, Some(Packet::Publish(_))));
    let mut new = Client::tcp(address).await;
    new.send(&[
        connect("a", false, 1000, 60),
        request("req/x", Q::AtLeastOnce, 4),
    ])
    .await;
    assert!(new.connack().await.session_present);
    let repeated = new.message().await;
    assert!(repeated.dup);
    assert!(matches!(new.next().await, Some(Packet::Publish(_))));
    assert_eq!(old.disconnected().await, Some(Reason::SessionTakenOver));
    let log = echo.log.lock().unwrap();
    let calls = log.iter().map(|(what, who)| (*what, who.connection.0));
    let calls: Vec<_> = calls.collect();
    let expected = [("request", 1), ("disconnected", 1), ("request", 2)];
    assert_eq!(calls, expected);
}

/// Takes no request before it is open, and logs its calls.
#[derive(Default)]
struct Valve {
    was_asked: AtomicBool,
    is_open: AtomicBool,
    log: Mutex<Vec<&'static str>>,
}

impl Service for Valve {
    fn claim(&self, _: &[u8]) -> Claim {
        Claim::Take
    }

    fn requests(&self, _: &Broker, _: &Origin, requests: &mut Vec<Request>) {
        self.was_asked.store(true, Ordering::SeqCst);
        if self.is_open.load(Ordering::SeqCst) {
            let taken = requests.drain(..).map(|_| "request");
            self.log.lock().unwrap().extend(taken);
        }
    }

    fn disconnected(&self, _: &Broker, _: &Origin) {
        self.log.lock().unwrap().push("disconnected");
    }
}

#[tokio::test]
async fn aborted_connection_hands_its_requests_over_before_its_end() {
    let valve = Arc::new(Valve::default());
    let broker = Broker::new(Options::default(), valve.clone());
    let (ours, theirs) = tokio::io::duplex(4096);
    let door = Door::open(PEER);
    let serving = tokio::spawn(async move { broker.serve_connection(theirs, door).await });
    let mut client = Client::over(ours).hello("a", 0).await;
    client.send(&[request("req/x", Q::AtLeastOnce, 1)]).await;
    until(|| valve.was_asked.load(Ordering::SeqCst)).await;
    // No other task runs before the abort, since the runtime has one thread.
    valve.is_open.store(true, Ordering::SeqCst);
    serving.abort();
    assert!(serving.await.unwrap_err().is_cancelled());
    assert_eq!(*valve.log.lock().unwrap(), ["request", "disconnected"]);
}

#[tokio::test]
async fn session_end_is_reported_after_its_connection_end() {
    let (broker, echo) = Echo::broker(Limits::default());
    let address = listen(&broker).await;
    let _old = Client::tcp(address).await.hello("a", 1000).await;
    let mut new = Client::tcp(address).await;
    new.send(&[connect("a", true, 0, 60)]).await;
    new.connack().await;
    drop(new);
    until(|| echo.ended.lock().unwrap().len() >= 2).await;
    assert_eq!(*echo.ended.lock().unwrap(), [(1, 1), (2, 2)]);
    assert_eq!(broker.sessions(), []);
}

#[tokio::test]
async fn service_panic_ends_only_its_connection() {
    let (broker, echo) = Echo::broker(Limits::default());
    let address = listen(&broker).await;
    let mut other = Client::tcp(address).await.hello("other", 0).await;
    let mut client = Client::tcp(address).await.hello("a", 0).await;
    client
        .send(&[request("req/panic", Q::AtLeastOnce, 3)])
        .await;
    assert_eq!(client.rest().await, []);
    // The assertion fails outside of the log's lock, so the log is not poisoned.
    assert_eq!(echo.count("disconnected"), 1);
    other.ping().await;
    assert_eq!(broker.stats().connections, 1);
}

#[tokio::test]
async fn timers_send_a_delayed_will_and_end_sessions() {
    let broker = broker(Limits::default());
    let address = listen(&broker).await;
    let timers = tokio::spawn({
        let broker = broker.clone();
        async move { broker.run_timers().await }
    });
    let mut listener = Client::tcp(address).await.hello("listener", 0).await;
    listener.listen_to("will", Q::AtMostOnce).await;
    let mut owner = Client::tcp(address).await;
    let mut will = LastWill::new("will", "gone", Q::AtMostOnce, false, None);
    will.properties = Some(wire::LastWillProperties {
        delay_interval: Some(1),
        payload_format_indicator: None,
        message_expiry_interval: Some(30),
        content_type: None,
        response_topic: None,
        correlation_data: None,
        user_properties: Vec::new(),
    });
    let hello = greeting("owner", true, 2, 60);
    owner
        .send(&[Packet::Connect(hello, Some(will), None)])
        .await;
    owner.next().await;
    drop(owner);
    let will = listener.message().await;
    assert_eq!(
        will.properties.unwrap().message_expiry_interval,
        Some(30),
        "it counts from the publication"
    );
    until(|| broker.stats().sessions <= 1).await;
    broker.shutdown(Duration::from_secs(1)).await;
    timeout(PATIENCE, timers).await.unwrap().unwrap();
}

#[tokio::test]
async fn shutdown_notifies_clients_and_ends_within_its_grace() {
    let (broker, echo) = Echo::broker(Limits {
        close_timeout: PATIENCE,
        ..Limits::default()
    });
    let address = listen(&broker).await;
    let mut polite = Client::tcp(address).await.hello("polite", 0).await;
    // This client never closes and never reads its output.
    let mut stuck = Client::duplex(&broker, 100).hello("stuck", 0).await;
    stuck.listen_to("t", Q::AtMostOnce).await;
    broker.batch(|batch| batch.publish(Message::new("t", vec![0; 10_000], QoS::AtMostOnce)));
    let shutdown = timeout(PATIENCE, broker.shutdown(Duration::from_millis(300)));
    let during = async {
        let reason = polite.disconnected().await;
        assert_eq!(Client::duplex(&broker, 100).rest().await, []);
        reason
    };
    let (ended, reason) = tokio::join!(shutdown, during);
    ended.unwrap();
    // Regression: it counted as one connection too many.
    assert_eq!(broker.stats().turned_away, 0);
    assert_eq!(reason, Some(Reason::ServerShuttingDown));
    assert_eq!(
        (broker.stats().connections, echo.count("disconnected")),
        (0, 2)
    );
    let mut late = Client::duplex(&broker, 100);
    assert_eq!(late.rest().await, []);
}

#[tokio::test]
async fn packet_at_the_size_limit_passes_and_a_larger_one_fails() {
    let broker = broker(Limits {
        packet_bytes_max: 300_000,
        ..Limits::default()
    });
    let address = listen(&broker).await;
    let mut client = Client::tcp(address).await.hello("a", 0).await;
    client.listen_to("t", Q::AtMostOnce).await;
    // Fixed header 4, topic 3, properties 1.
    client
        .send(&[publish("t", Q::AtMostOnce, 0, vec![7; 300_000 - 8])])
        .await;
    let message = client.message().await;
    assert_eq!(message.payload.len(), 300_000 - 8);
    client
        .send(&[publish("t", Q::AtMostOnce, 0, vec![7; 300_000 - 7])])
        .await;
    assert_eq!(client.disconnected().await, Some(Reason::PacketTooLarge));
}

#[tokio::test]
async fn changed_limits_apply_only_to_new_connections() {
    let broker = broker(Limits::default());
    let address = listen(&broker).await;
    let mut old = Client::tcp(address).await.hello("old", 0).await;
    old.listen_to("t", Q::AtMostOnce).await;
    broker.set_limits(Limits {
        connections_max: 1,
        packet_bytes_max: 1000,
        ..Limits::default()
    });
    assert_eq!(broker.limits().connections_max, 1);
    // The old client may send packets up to the maximum of its CONNACK.
    old.send(&[publish("other", Q::AtMostOnce, 0, vec![7; 100_000])])
        .await;
    old.ping().await;
    let mut new = Client::tcp(address).await;
    assert_eq!(new.rest().await, []);
    assert_eq!(broker.stats().turned_away, 1);
    broker.set_limits(Limits {
        packet_bytes_max: 1000,
        ..Limits::default()
    });
    let mut new = Client::tcp(address).await.hello("new", 0).await;
    new.send(&[publish("t", Q::AtMostOnce, 0, vec![7; 1000])])
        .await;
    let reason = new.disconnected().await;
    assert_eq!(reason, Some(Reason::PacketTooLarge));
    broker.shutdown(Duration::from_secs(1)).await;
    assert_eq!(broker.stats().connections, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_in_flight_are_all_answered_in_order() {
    let (broker, _) = Echo::broker(Limits {
        receive_max: 64,
        ..Limits::default()
    });
    let address = listen(&broker).await;
    let mut clients = Vec::new();
    for number in 0..8 {
        clients.push(tokio::spawn(async move {
            let name = format!("c{number}");
            let mut client = Client::tcp(address).await.hello(&name, 0).await;
            let (mut sent, mut acked, mut answered) = (0_u16, 0_u16, 0_u16);
            while acked < 2000 {
                let mut batch = Vec::new();
                while sent < 2000 && sent - acked < 64 {
                    sent += 1;
                    batch.push(request("req/x", Q::AtLeastOnce, sent));
                }
                client.send(&batch).await;
                match client.next().await.unwrap() {
                    Packet::Publish(answer) => {
                        answered += 1;
                        assert_eq!(
                            answer.properties.unwrap().correlation_data.unwrap(),
                            answered.to_be_bytes()[..]
                        );
                        client.send(&[puback(answer.pkid)]).await;
                    }
                    Packet::PubAck(ack) => {
                        acked += 1;
                        assert_eq!(ack.pkid, acked);
                        assert!(
                            answered >= acked,
                            "the answer comes before the acknowledgement"
                        );
                    }
                    other => panic!("{other:?}"),
                }
            }
        }));
    }
    for client in clients {
        client.await.unwrap();
    }
    assert_eq!(broker.stats().messages_in, 16_000);
}

/// The options of a rumqttc client with this id.
fn options(id: &str, address: SocketAddr) -> MqttOptions {
    let mut options = MqttOptions::new(id, address.ip().to_string(), address.port());
    options.set_keep_alive(Duration::from_secs(30));
    options
}

/// rumqttc workers share a subscription. One of them disconnects, and each job is done once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rumqttc_clients_share_a_subscription() {
    const JOBS: usize = 300;
    let broker = broker(Limits::default());
    let address = listen(&broker).await;
    let (done, mut jobs) = tokio::sync::mpsc::unbounded_channel();
    for worker in 0..3 {
        let mut options = options(&worker.to_string(), address);
        // Without this rumqttc acknowledges messages before the worker has received them.
        options.set_manual_acks(true);
        let (client, mut events) = AsyncClient::new(options, JOBS);
        client
            .subscribe("$share/workers/jobs/+", Q::AtLeastOnce)
            .await
            .unwrap();
        let done = done.clone();
        tokio::spawn(async move {
            let mut count = 0;
            while let Ok(event) = events.poll().await {
                if let Event::Incoming(Packet::Publish(job)) = event {
                    done.send((worker, job.payload.clone())).unwrap();
                    count += 1;
                    if worker == 0 && count == 20 {
                        // Disconnects without DISCONNECT. Its session ends, and the other workers
                        // get its unacknowledged messages.
                        return;
                    }
                    client.try_ack(&job).unwrap();
                }
            }
        });
    }
    until(|| broker.stats().subscriptions >= 3).await;
    for n in 0..JOBS {
        let job = Message::new(format!("jobs/{}", n % 7), n.to_string(), QoS::AtLeastOnce);
        broker.batch(|batch| assert_eq!(batch.publish(job), 1));
    }
    let mut by_job = vec![Vec::new(); JOBS];
    timeout(PATIENCE, async {
        while by_job.iter().any(Vec::is_empty) {
            let (worker, payload) = jobs.recv().await.unwrap();
            let job: usize = std::str::from_utf8(&payload).unwrap().parse().unwrap();
            by_job[job].push(worker);
        }
    })
    .await
    .unwrap();
    for workers in &by_job {
        // A job is done twice only if the first worker disconnected before its acknowledgement was
        // sent.
        assert!(
            workers.len() == 1 || workers.len() == 2 && workers[0] == 0,
            "{workers:?}"
        );
    }
    for worker in 0..3 {
        assert!(by_job.iter().flatten().filter(|it| **it == worker).count() >= 20);
    }
    assert_eq!(broker.stats().dropped, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rumqttc_clients_exchange_messages_at_every_qos() {
    let broker = broker(Limits::default());
    let address = listen(&broker).await;
    let (subscriber, mut events) = AsyncClient::new(options("subscriber", address), 10);
    subscriber.subscribe("a/+/c", Q::ExactlyOnce).await.unwrap();
    let subscribed = Arc::new(tokio::sync::Notify::new());
    let received = tokio::spawn({
        let subscribed = subscribed.clone();
        async move {
            let mut received = Vec::new();
            while received.len() < 3 {
                match events.poll().await.unwrap() {
                    Event::Incoming(Packet::SubAck(_)) => subscribed.notify_one(),
                    Event::Incoming(Packet::Publish(message)) => {
                        received.push((message.qos, message.payload))
                    }
                    _ => {}
                }
            }
            received
        }
    });
    timeout(PATIENCE, subscribed.notified()).await.unwrap();
    let (publisher, mut events) = AsyncClient::new(options("publisher", address), 10);
    let published = tokio::spawn(async move { while events.poll().await.is_ok() {} });
    let messages = [
        (Q::AtMostOnce, "0"),
        (Q::AtLeastOnce, "1"),
        (Q::ExactlyOnce, "2"),
    ];
    for (qos, payload) in messages {
        publisher
            .publish("a/b/c", qos, false, payload)
            .await
            .unwrap();
    }
    let received = timeout(PATIENCE, received).await.unwrap().unwrap();
    let expected = messages.map(|(qos, payload)| (qos, bytes::Bytes::from(payload)));
    assert_eq!(received, expected);
    published.abort();
}
