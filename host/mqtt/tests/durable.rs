//! Restarts of the whole broker over sockets, and logs that are slow or never release.
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
    Access, Attempt, Broker, Deciding, Identity, Limits, Message, NoService, Options, Origin,
    Persistence, QoS, Recovery, Service, Verdict,
};
use statehouse_protocol::LogPosition;
use tokio::{net::TcpListener, runtime::Runtime, time::timeout};
use wire::{DisconnectReasonCode as Reason, Packet};

/// A log in memory that releases at once, or when the test says so. Prints the changes on stdout.
#[derive(Default)]
struct TestLog {
    records: Mutex<Vec<Vec<u8>>>,
    held: AtomicBool,
}

impl Persistence for TestLog {
    fn append(&self, changes: &[u8]) -> LogPosition {
        println!("appended {}", changes.escape_ascii());
        let mut records = self.records.lock().unwrap();
        records.push(changes.to_vec());
        LogPosition(records.len() as u64)
    }

    fn released(&self) -> LogPosition {
        if self.held.load(Ordering::Acquire) {
            LogPosition::NONE
        } else {
            LogPosition(self.len())
        }
    }
}

impl TestLog {
    fn held() -> Arc<Self> {
        let log = Self::default();
        log.held.store(true, Ordering::Release);
        Arc::new(log)
    }

    fn len(&self) -> u64 {
        self.records.lock().unwrap().len() as u64
    }

    fn restore(self: &Arc<Self>, limits: Limits, service: Arc<dyn Service>) -> Broker {
        let mut recovery = Recovery::default();
        let records = self.records.lock().unwrap().clone();
        for record in &records {
            recovery.apply(record).unwrap();
        }
        let options = Options {
            limits,
            persistence: Some(self.clone()),
            run: records.len() as u32,
            ..Options::default()
        };
        Broker::restore(options, service, recovery)
    }
}

/// A whole broker process. Dropping it simulates a kill.
struct Process {
    broker: Broker,
    runtime: Runtime,
}

impl Process {
    fn start(log: &Arc<TestLog>, service: Arc<dyn Service>, address: SocketAddr) -> Self {
        let runtime = Runtime::new().unwrap();
        let broker = log.restore(Limits::default(), service);
        let listener = runtime.block_on(async { TcpListener::bind(address).await.unwrap() });
        let listening = broker.clone();
        runtime.spawn(async move { listening.listen(listener).await });
        let timing = broker.clone();
        runtime.spawn(async move { timing.run_timers().await });
        Self { broker, runtime }
    }

    fn kill(self) {
        self.runtime.shutdown_timeout(Duration::from_secs(10));
    }
}

fn free_address() -> SocketAddr {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap()
}

/// The next event of this kind. rumqttc's event loop reconnects automatically.
async fn next_event<T>(
    events: &mut rumqttc::v5::EventLoop,
    wanted: impl Fn(Packet) -> Option<T>,
) -> T {
    let search = async {
        loop {
            match events.poll().await {
                Ok(Event::Incoming(packet)) => {
                    if let Some(found) = wanted(packet) {
                        return found;
                    }
                }
                Ok(Event::Outgoing(_)) => {}
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    };
    timeout(PATIENCE, search)
        .await
        .expect("the event arrives in time")
}

#[test]
fn rumqttc_continues_after_a_crash() {
    let (log, address) = (Arc::new(TestLog::default()), free_address());
    let clients = Runtime::new().unwrap();
    let mut process = Process::start(&log, Arc::new(NoService), address);
    let mut options = MqttOptions::new("durable", address.ip().to_string(), address.port());
    options.set_keep_alive(Duration::from_secs(30));
    options.set_clean_start(false);
    options.set_session_expiry_interval(Some(1000));
    let (client, mut events) = AsyncClient::new(options, 10);
    let connack = |packet| match packet {
        Packet::ConnAck(ack) => Some(ack.session_present),
        _ => None,
    };
    let suback = |packet| matches!(packet, Packet::SubAck(_)).then_some(());
    let payload = |packet| match packet {
        Packet::Publish(publish) => Some(publish.payload),
        _ => None,
    };
    clients.block_on(async {
        assert!(!next_event(&mut events, connack).await);
        client.subscribe("t/+", Q::ExactlyOnce).await.unwrap();
        next_event(&mut events, suback).await;
    });
    for round in 0..5 {
        process.kill();
        process = Process::start(&log, Arc::new(NoService), address);
        clients.block_on(async {
            // Published before the client reconnects. At QoS 1, because rumqttc forgets received
            // QoS 2 messages on a reconnect and then fails at their PUBREL.
            for half in ["first", "second"] {
                let message = Message::new("t/1", format!("{half} {round}"), QoS::AtLeastOnce);
                assert_eq!(process.broker.batch(|batch| batch.publish(message)), 1);
            }
            assert!(
                next_event(&mut events, connack).await,
                "no session was resumed"
            );
            for half in ["first", "second"] {
                let expected = format!("{half} {round}");
                // A message of the round before is repeated if the process died before its PUBACK.
                while next_event(&mut events, payload).await != expected {}
            }
        });
    }
    process.kill();
}

#[test]
fn session_and_requests_continue_after_a_crash() {
    let (log, address) = (Arc::new(TestLog::default()), free_address());
    let clients = Runtime::new().unwrap();
    let echo = Arc::new(Echo::default());
    let process = Process::start(&log, echo.clone(), address);
    let before = log.len();
    clients.block_on(async {
        let mut client = Client::tcp(address).await.hello("a", 1000).await;
        client.send(&[request("req/x", Q::AtLeastOnce, 3)]).await;
        assert!(matches!(client.next().await, Some(Packet::Publish(_))));
        assert!(matches!(client.next().await, Some(Packet::PubAck(_))));
        // Checked while the client is connected, since its disconnection records the unacknowledged
        // answer.
        assert_eq!(log.len(), before + 1, "the session's beginning");
    });
    process.kill();
    let process = Process::start(&log, echo.clone(), address);
    clients.block_on(async {
        let mut client = Client::tcp(address).await;
        client.send(&[connect("a", false, 1000, 60)]).await;
        assert!(client.connack().await.session_present);
        client.send(&[request("req/x", Q::AtLeastOnce, 4)]).await;
        // The earlier answer may precede it, if the broker noticed the end of its connection.
        loop {
            match client.next().await {
                Some(Packet::PubAck(ack)) => break assert_eq!(ack.pkid, 4),
                Some(Packet::Publish(_)) => {}
                other => panic!("{other:?}"),
            }
        }
    });
    let log = echo.log.lock().unwrap().clone();
    let requests: Vec<_> = log.iter().filter(|(what, _)| *what == "request").collect();
    let [(_, first), (_, second)] = &requests[..] else {
        panic!("{requests:?}")
    };
    assert_eq!(first.session, second.session);
    assert_ne!(first.connection, second.connection);
    process.kill();
}

#[tokio::test]
async fn output_is_written_when_any_thread_releases_it() {
    let log = TestLog::held();
    let broker = log.restore(Limits::default(), Arc::new(NoService));
    let address = listen(&broker).await;
    let mut client = Client::tcp(address).await;
    client
        .send(&[
            connect("a", false, 1000, 60),
            subscribe("t", Q::ExactlyOnce),
            Packet::PingReq(wire::PingReq),
        ])
        .await;
    let silence = timeout(Duration::from_millis(200), client.next()).await;
    assert!(silence.is_err(), "{silence:?}");
    let (releasing, log) = (broker.clone(), log.clone());
    std::thread::spawn(move || releasing.released(LogPosition(log.len())))
        .join()
        .unwrap();
    client.connack().await;
    assert!(matches!(client.next().await, Some(Packet::SubAck(_))));
    assert!(matches!(client.next().await, Some(Packet::PingResp(_))));
}

/// The client takes the end of its connection as the answer (section 3.14.4).
#[tokio::test]
async fn connection_ends_after_the_record_of_its_disconnect() {
    let log = TestLog::held();
    let broker = log.restore(Limits::default(), Arc::new(NoService));
    let address = listen(&broker).await;
    let mut client = Client::tcp(address).await;
    client.send(&[connect("a", false, 1000, 60)]).await;
    until(|| log.len() > 0).await;
    broker.released(LogPosition(log.len()));
    client.connack().await;
    let before = log.len();
    let mut disconnect = wire::Disconnect::new(Reason::NormalDisconnection);
    disconnect.properties = Some(wire::DisconnectProperties {
        session_expiry_interval: Some(0),
        reason_string: None,
        user_properties: Vec::new(),
        server_reference: None,
    });
    client.send(&[Packet::Disconnect(disconnect)]).await;
    let early = timeout(Duration::from_millis(200), client.rest()).await;
    assert!(early.is_err(), "{early:?}");
    assert!(log.len() > before);
    broker.released(LogPosition(log.len()));
    let end = timeout(Limits::default().close_timeout / 2, client.rest()).await;
    assert_eq!(end.unwrap(), []);
}

#[tokio::test]
async fn connections_end_in_time_if_the_log_never_releases() {
    let log = TestLog::held();
    let limits = Limits {
        close_timeout: Duration::from_millis(100),
        connections_max: 3,
        ..Limits::default()
    };
    let broker = log.restore(limits, Arc::new(NoService));
    let address = listen(&broker).await;
    // A client closes its connection before its CONNACK.
    let mut client = Client::tcp(address).await;
    client.send(&[connect("a", false, 1000, 60)]).await;
    drop(client);
    until(|| broker.stats().connections == 0).await;
    // A takeover before the CONNACK: the old client gets no packet, and all sockets are freed
    // again.
    for _ in 0..6 {
        let mut old = Client::tcp(address).await;
        old.send(&[connect("b", false, 1000, 60)]).await;
        until(|| broker.stats().connections > 0).await;
        let mut new = Client::tcp(address).await;
        new.send(&[connect("b", false, 1000, 60)]).await;
        assert_eq!(old.rest().await, []);
        drop(new);
        until(|| broker.stats().connections == 0).await;
    }
    // A connected client loses output that waits for its record, and gets a DISCONNECT.
    let mut client = Client::tcp(address).await;
    client.send(&[connect("c", false, 1000, 60)]).await;
    until(|| broker.stats().connections > 0).await;
    broker.released(LogPosition(log.len()));
    client.connack().await;
    client
        .send(&[
            subscribe("t", Q::AtLeastOnce),
            publish("+", Q::AtMostOnce, 0, ""),
        ])
        .await;
    let rest = client.rest().await;
    let [Packet::Disconnect(disconnect)] = &rest[..] else {
        panic!("{rest:?}")
    };
    assert_eq!(disconnect.reason_code, Reason::ProtocolError);
    drop(client);
    until(|| broker.stats().connections == 0).await;
    // A shutdown ends as well.
    let mut client = Client::tcp(address).await;
    client.send(&[connect("d", false, 1000, 60)]).await;
    until(|| broker.stats().connections > 0).await;
    timeout(PATIENCE, broker.shutdown(PATIENCE)).await.unwrap();
    assert_eq!(client.rest().await, []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn log_on_its_own_thread_loses_no_wake_up() {
    let log = TestLog::held();
    let broker = log.restore(Limits::default(), Arc::new(NoService));
    let address = listen(&broker).await;
    let over = Arc::new(AtomicBool::new(false));
    let thread = std::thread::spawn({
        let (broker, log, over) = (broker.clone(), log.clone(), over.clone());
        move || {
            while !over.load(Ordering::Acquire) {
                broker.released(LogPosition(log.len()));
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    });
    let mut clients = Vec::new();
    for number in 0..4 {
        clients.push(tokio::spawn(async move {
            let (name, topic) = (format!("c{number}"), format!("t/{number}"));
            let mut client = Client::tcp(address).await.hello(&name, 1000).await;
            client.listen_to(&topic, Q::ExactlyOnce).await;
            for id in 1..=100 {
                client
                    .send(&[publish(&topic, Q::ExactlyOnce, id, vec![1; 10])])
                    .await;
                let (mut sent, mut received) = (false, false);
                while !(sent && received) {
                    let answer = match client.next().await.unwrap() {
                        Packet::PubRec(rec) => Packet::PubRel(wire::PubRel::new(rec.pkid, None)),
                        Packet::PubComp(_) => {
                            sent = true;
                            continue;
                        }
                        Packet::Publish(message) => {
                            Packet::PubRec(wire::PubRec::new(message.pkid, None))
                        }
                        Packet::PubRel(rel) => {
                            received = true;
                            Packet::PubComp(wire::PubComp::new(rel.pkid, None))
                        }
                        other => panic!("{other:?}"),
                    };
                    client.send(&[answer]).await;
                }
            }
        }));
    }
    for client in clients {
        client.await.unwrap();
    }
    over.store(true, Ordering::Release);
    thread.join().unwrap();
}

/// Panics in the middle of a SUBSCRIBE, with the broker's lock held.
struct Trap;

impl Access for Trap {
    fn admit(&self, _: Attempt) -> Deciding {
        Box::pin(std::future::ready(Verdict::admit(Identity::anonymous())))
    }

    fn may_publish(&self, _: &Origin, _: &[u8]) -> bool {
        true
    }

    fn may_subscribe(&self, _: &Origin, filter: &[u8]) -> bool {
        assert_ne!(filter, b"trap", "panics on purpose");
        true
    }
}

const IN_CHILD: &str = "STATEHOUSE_TEST_TRAPPED";

#[test]
fn panic_under_the_lock_ends_the_process_without_an_append() {
    if std::env::var_os(IN_CHILD).is_some() {
        Runtime::new().unwrap().block_on(panic_in_a_subscribe());
        return;
    }
    let name = "panic_under_the_lock_ends_the_process_without_an_append";
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(IN_CHILD, "1")
        .output()
        .unwrap();
    let output = String::from_utf8_lossy(&child.stdout);
    assert!(output.contains("subscribed"), "{output}");
    assert!(!output.contains("half"), "{output}");
    assert_eq!(child.status.code(), Some(70), "{output}");
}

async fn panic_in_a_subscribe() {
    let options = Options {
        persistence: Some(Arc::<TestLog>::default()),
        access: Arc::new(Trap),
        ..Options::default()
    };
    let broker = Broker::new(options, Arc::new(NoService));
    let mut client = Client::duplex(&broker, 4096).hello("a", 1000).await;
    client.listen_to("whole", Q::AtLeastOnce).await;
    println!("subscribed");
    let both = subscribe_to(&["half", "trap"], Q::AtLeastOnce);
    client.send(&[both]).await;
    // Either the connection ends here, or the whole process.
    _ = client.rest().await;
}
