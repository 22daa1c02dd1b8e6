//! Clients of hosts in every role, and changes of roles.

use std::io::Write;
use std::sync::atomic::AtomicBool;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Semaphore;
use tokio::sync::mpsc::unbounded_channel;

use super::client::{Client, connect, connect_3, publish_0};
use super::*;
use crate::front::preface::receive;
use crate::front::{Links, mux};
use statehouse_config::limits;

#[tokio::test]
async fn a_follower_passes_clients_of_every_scheme_on() {
    let (files, _directory, trusted) = certificate();
    let schemes = ["mqtt", "mqtts", "ws", "wss"];
    let hosts = ["gw1", "gw2"].map(|name| Host::new(name, &schemes, Some(files.clone()), |_| {}));
    let [leader, follower] = hosts;
    let clients = leader.lead_alone();
    follower.follow(&leader);
    for host in [&leader, &follower] {
        for listen in &host.listeners {
            let name = format!("{}-{}", host.name, listen.scheme.name());
            let (client, address) = Client::at(listen, &trusted).await;
            let mut client = client.connected(&name).await;
            for id in 1..=10 {
                client.publish(id).await;
            }
            // The broker knows the client's own address, not that of the follower.
            assert_eq!(clients.seen().last(), Some(&(name, address)));
            let (mut client, _) = Client::at(listen, &trusted).await;
            client.send(&connect_3("version 3")).await;
            client.accepted().await;
            client.publish(1).await;
        }
    }
    assert_eq!(follower.suspicions() + leader.suspicions(), 0);
}

#[tokio::test]
async fn a_waiting_client_is_served_once_there_is_a_leader() {
    let [leader, follower] = ["gw1", "gw2"].map(Host::plain);
    let (broker, clients) = broker();
    let mut waiting = Vec::new();
    for (host, name) in [(&leader, "one"), (&follower, "two")] {
        let mut client = Client::on(host.connect().await);
        client.send(&connect(name)).await;
        waiting.push(client);
    }
    sleep(Duration::from_millis(100)).await;
    assert_eq!(clients.seen(), []);
    // The named host does not lead yet, and says so.
    follower.follow(&leader);
    sleep(Duration::from_millis(100)).await;
    assert_eq!(clients.seen(), []);
    leader.lead(&broker);
    for client in &mut waiting {
        client.accepted().await;
        client.publish(1).await;
    }
}

#[tokio::test]
async fn handshakes_of_waiting_clients_begin_in_turn() {
    // Without turns, most of the clients would lose their places to others.
    let few = |front: &mut Front| {
        front.handshakes_max = 4;
        front.turns = Semaphore::new(2);
    };
    let (_files, _directory, trusted) = certificate();
    let [leader, follower] = ["gw1", "gw2"].map(|name| Host::new(name, &["ws"], None, few));
    let (broker, _) = broker();
    let mut waiting = Vec::new();
    for _ in 0..10 {
        for host in [&leader, &follower] {
            waiting.push((host.connect().await, host.listeners[0]));
        }
    }
    sleep(Duration::from_millis(200)).await;
    leader.lead(&broker);
    follower.follow(&leader);
    // All handshakes could begin before the first one ends.
    sleep(Duration::from_millis(200)).await;
    let handshakes = waiting.into_iter().map(|(socket, listen)| {
        let trusted = trusted.clone();
        tokio::spawn(async move { Client::over(socket, &listen, &trusted).await })
    });
    for client in handshakes.collect::<Vec<_>>() {
        let client = client.await.expect("it is served");
        client.connected("waiting").await.publish(1).await;
    }
}

#[tokio::test]
async fn a_silent_handshake_loses_its_turn() {
    let one = |front: &mut Front| front.turns = Semaphore::new(1);
    let (_files, _directory, trusted) = certificate();
    let leader = Host::new("gw1", &["ws"], None, one);
    let (broker, _) = broker();
    let silent = leader.connect().await;
    // It waits for its turn first.
    sleep(Duration::from_millis(50)).await;
    let client = Client::at(&leader.listeners[0], &trusted);
    let leading = async {
        sleep(Duration::from_millis(50)).await;
        leader.lead(&broker);
    };
    let ((client, _), ()) = tokio::join!(client, leading);
    client.connected("waiting").await.publish(1).await;
    drop(silent);
}

#[tokio::test]
async fn every_host_can_lead_after_another() {
    let hosts = ["gw1", "gw2"].map(Host::plain);
    for leading in [0, 1, 0] {
        let [leader, follower] = [&hosts[leading], &hosts[1 - leading]];
        let (broker, clients) = broker();
        leader.lead(&broker);
        follower.follow(leader);
        let mut served = Vec::new();
        for (host, name) in [(leader, "one"), (follower, "two")] {
            let mut client = Client::on(host.connect().await).connected(name).await;
            client.publish(1).await;
            served.push(client);
        }
        assert_eq!(clients.seen().len(), 2);
        // A leader that was deposed: its broker ends all connections, also those of the follower.
        leader.role.send_replace(Role::Waiting);
        follower.role.send_replace(Role::Waiting);
        broker.shutdown(Duration::ZERO).await;
        for client in served {
            client.closed().await;
        }
    }
}

#[tokio::test]
async fn a_dead_leader_is_suspected_and_its_client_served_by_the_next() {
    let [leader, follower] = ["gw1", "gw2"].map(Host::plain);
    leader.lead_alone();
    let mut client = Client::on(follower.connect().await);
    client.send(&connect("one")).await;
    follower.follow_at("gw3", dead_address());
    eventually("a suspicion", || follower.suspicions() > 0).await;
    follower.follow(&leader);
    client.accepted().await;
}

#[tokio::test]
async fn a_client_is_closed_if_there_is_no_leader_in_time() {
    let host = Host::new("gw1", &["mqtt"], None, |front| {
        front.hold = Duration::from_millis(300);
    });
    for address in [None, Some(dead_address())] {
        if let Some(address) = address {
            host.follow_at("gw2", address);
        }
        let before = host.refusals();
        let began = Instant::now();
        let mut socket = host.connect().await;
        is_closed(&mut socket).await;
        assert!(began.elapsed() >= Duration::from_millis(300));
        eventually("a refusal", || host.refusals() == before + 1).await;
    }
}

#[tokio::test]
async fn a_client_that_disconnected_while_it_waited_is_not_passed_on() {
    let [leader, follower] = ["gw1", "gw2"].map(Host::plain);
    let (broker, clients) = broker();
    leader.lead(&broker);
    for host in [&follower, &leader] {
        host.role.send_replace(Role::Waiting);
        // The first connection of a client that gave up; its CONNECT is unread.
        let mut lost = host.connect().await;
        lost.write_all(&connect("one")).await.unwrap();
        drop(lost);
        let mut client = Client::on(host.connect().await);
        client.send(&connect("two")).await;
        sleep(Duration::from_millis(100)).await;
        match host.name {
            "gw2" => host.follow(&leader),
            _ => host.lead(&broker),
        }
        client.accepted().await;
        // A CONNECT that was passed on arrives within this time.
        sleep(Duration::from_millis(200)).await;
        client.publish(1).await;
        // The unread bytes are not dropped silently.
        eventually("a refusal", || host.refusals() == 1).await;
    }
    assert!(clients.seen().iter().all(|(name, _)| name == "two"));
}

/// Regression: a follower dropped all that such a client had sent.
#[tokio::test]
async fn a_burst_of_a_client_that_closes_at_once_arrives() {
    let [leader, follower] = ["gw1", "gw2"].map(Host::plain);
    leader.lead_alone();
    follower.follow(&leader);
    let mut subscriber = Client::on(leader.connect().await).connected("sub").await;
    subscriber.subscribe().await;
    let disconnect = [0xe0, 0];
    for byte in 1..=20 {
        for host in [&leader, &follower] {
            let burst = [&connect("burst")[..], &publish_0(byte)[..], &disconnect[..]].concat();
            // Blocking, so that the client has closed before a host accepts it.
            let mut client = net::TcpStream::connect(host.listeners[0].address).unwrap();
            client.write_all(&burst).unwrap();
            drop(client);
            assert_eq!(subscriber.published().await, byte, "{}", host.name);
        }
    }
    // A client that closes its direction only still gets its CONNACK.
    let mut client = follower.connect().await;
    let burst = [&connect("half")[..], &publish_0(0)[..], &disconnect[..]].concat();
    client.write_all(&burst).await.unwrap();
    client.shutdown().await.unwrap();
    let mut connack = [0];
    client.read_exact(&mut connack).await.unwrap();
    assert_eq!(connack, [0x20]);
    assert_eq!(follower.refusals() + leader.refusals(), 0);
}

/// A client may have given up before a host that stalled accepts its socket.
#[tokio::test]
async fn a_client_that_gave_up_before_it_was_accepted_is_not_passed_on() {
    let [leader, follower] = ["gw1", "gw2"].map(Host::plain);
    let clients = leader.lead_alone();
    follower.follow(&leader);
    let mut next = Client::on(leader.connect().await).connected("one").await;
    let disconnect = [0xe0, 0];
    for sent in [
        connect("one"),
        [&connect("one")[..], &disconnect[..]].concat(),
        [&connect("one")[..], &publish_0(1)[..]].concat(),
    ] {
        let before = follower.refusals();
        // Blocking, so that the client has closed before the host accepts it.
        let mut lost = net::TcpStream::connect(follower.listeners[0].address).unwrap();
        lost.write_all(&sent).unwrap();
        drop(lost);
        eventually("a refusal", || follower.refusals() == before + 1).await;
    }
    next.publish(1).await;
    assert_eq!(clients.seen().len(), 1);
}

#[tokio::test]
async fn streams_end_when_another_host_leads() {
    let follower = Host::plain("gw2");
    // A leader that accepts streams and then is silent, as if its machine had lost its power.
    let (accepted, mut is_accepted) = unbounded_channel();
    let lost = FakeLeader::start(move |purpose, socket| {
        let accepted = accepted.clone();
        async move {
            if purpose == Purpose::Streams {
                let (reader, writer) = socket.into_split();
                let decide = |_, _| Ok(|stream| accepted.send(stream).unwrap());
                _ = mux::accept(reader, writer, decide).await;
            }
        }
    });
    follower.follow_at("gw1", lost.address);
    let mut socket = follower.connect().await;
    socket.write_all(&connect("one")).await.unwrap();
    let mut stream = within("a stream", is_accepted.recv()).await.unwrap();
    stream.read_u8().await.unwrap();
    // While no leader is known, the last one may still serve.
    follower.role.send_replace(Role::Waiting);
    let still = timeout(Duration::from_millis(100), is_closed(&mut socket)).await;
    assert!(still.is_err());
    follower.follow_at("gw3", dead_address());
    is_closed(&mut socket).await;
}

/// A network that acknowledges the bytes that it holds: no connection fails.
#[tokio::test]
async fn streams_end_when_the_leader_was_silent_for_the_hold() {
    let links = Arc::<Links>::default();
    let seen = links.clone();
    let follower = Host::new("gw2", &["mqtt"], None, |front| {
        front.hold = Duration::from_secs(3);
        front.options.links = seen;
    });
    let is_silent = Arc::new(AtomicBool::new(false));
    let (accepted, mut is_accepted) = unbounded_channel();
    let silent = is_silent.clone();
    let leader = FakeLeader::start(move |purpose, mut socket| {
        let (accepted, silent) = (accepted.clone(), silent.clone());
        async move {
            if purpose == Purpose::Streams {
                let (reader, writer) = socket.into_split();
                let decide = |_, _| Ok(|stream| accepted.send(stream).unwrap());
                _ = mux::accept(reader, writer, decide).await;
                return;
            }
            while !silent.load(Ordering::SeqCst) {
                _ = socket.write_all(&[0]).await;
                sleep(limits::CLUSTER_LINK_BEAT).await;
            }
            // The socket stays open.
            std::future::pending::<()>().await;
        }
    });
    follower.follow_at("gw1", leader.address);
    eventually("a beat", || !links.silence().is_zero()).await;
    let mut socket = follower.connect().await;
    socket.write_all(&connect("one")).await.unwrap();
    let stream = within("a stream", is_accepted.recv()).await.unwrap();
    let still = timeout(Duration::from_secs(4), is_closed(&mut socket)).await;
    assert!(still.is_err(), "the leader is not silent");
    is_silent.store(true, Ordering::SeqCst);
    is_closed(&mut socket).await;
    drop(stream);
}

#[tokio::test]
async fn clients_reach_a_leader_of_a_program_that_knows_single_streams_only() {
    let [leader, follower] = ["gw1", "gw2"].map(Host::plain);
    let clients = leader.lead_alone();
    // It refuses purposes that it does not know.
    let port = leader.port;
    let attempts = Arc::<AtomicUsize>::default();
    let attempted = attempts.clone();
    let older = FakeLeader::start_with(
        move |purpose| {
            if purpose == Purpose::Streams {
                attempted.fetch_add(1, Ordering::SeqCst);
                return Answer::Refused;
            }
            Answer::Accepted
        },
        move |purpose, mut socket| async move {
            if matches!(purpose, Purpose::Stream { .. }) {
                let (mut next, answer) = knock(port, purpose).await;
                assert_eq!(answer, Answer::Accepted);
                _ = tokio::io::copy_bidirectional(&mut socket, &mut next).await;
            }
        },
    );
    follower.follow_at("gw1", older.address);
    for name in ["one", "two"] {
        let socket = follower.connect().await;
        let address = socket.local_addr().unwrap();
        let mut client = Client::on(socket).connected(name).await;
        client.publish(1).await;
        assert_eq!(clients.seen().last(), Some(&(name.to_owned(), address)));
    }
    assert_eq!(attempts.load(Ordering::SeqCst), 1);
}

/// Regression: after one refusal, as of a leader at its limit, each client got a connection of its
/// own until another host led.
#[tokio::test]
async fn a_leader_that_refused_the_shared_connection_is_asked_again() {
    let leader = Host::plain("gw1");
    let follower = Host::new("gw2", &["mqtt"], None, |front| {
        front.streams_retry = Duration::ZERO;
    });
    leader.lead_alone();
    let port = leader.port;
    let attempts = Arc::<AtomicUsize>::default();
    let attempted = attempts.clone();
    let full = FakeLeader::start_with(
        move |purpose| {
            let is_shared = purpose == Purpose::Streams;
            match is_shared && attempted.fetch_add(1, Ordering::SeqCst) == 0 {
                true => Answer::Refused,
                false => Answer::Accepted,
            }
        },
        move |purpose, mut socket| async move {
            if matches!(purpose, Purpose::Stream { .. } | Purpose::Streams) {
                let (mut next, answer) = knock(port, purpose).await;
                assert_eq!(answer, Answer::Accepted);
                _ = tokio::io::copy_bidirectional(&mut socket, &mut next).await;
            }
        },
    );
    follower.follow_at("gw1", full.address);
    let mut clients = Vec::new();
    for name in ["one", "two", "three"] {
        let mut client = Client::on(follower.connect().await).connected(name).await;
        client.publish(1).await;
        clients.push(client);
    }
    // The third client shares the connection of the second one.
    assert_eq!(attempts.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn a_leader_that_answers_no_streams_is_suspected_and_its_clients_go_on() {
    let [leader, follower] = ["gw1", "gw2"].map(Host::plain);
    leader.lead_alone();
    // A connection that is lost behind its handshake, and then a working one to the same leader.
    let lost = Arc::<AtomicUsize>::default();
    let silent = lost.clone();
    let forwarding = network(leader.port, move |mut from_host, mut to_leader| {
        let silent = silent.clone();
        async move {
            // The request of the preface, which names its purpose.
            let mut request = [0; 16 + 85 + 32];
            from_host.read_exact(&mut request).await.unwrap();
            to_leader.write_all(&request).await.unwrap();
            _ = if request[16] == 2 && silent.fetch_add(1, Ordering::SeqCst) == 0 {
                tokio::io::copy(&mut from_host, &mut tokio::io::sink()).await
            } else {
                tokio::io::copy(&mut from_host, &mut to_leader).await
            };
        }
    });
    let (address, network) = forwarding.await;
    follower.follow_at("gw1", address);
    let mut client = Client::on(follower.connect().await).connected("one").await;
    client.publish(1).await;
    assert_eq!(lost.load(Ordering::SeqCst), 2);
    assert!(follower.suspicions() > 0);
    network.abort();
}

#[tokio::test]
async fn clients_of_a_host_that_passes_them_on_one_by_one_are_served() {
    let leader = Host::plain("gw1");
    let clients = leader.lead_alone();
    let client = "10.0.0.7:40000".parse().unwrap();
    let scheme = leader.listeners[0].scheme;
    let (socket, answer) = knock(leader.port, Purpose::Stream { scheme, client }).await;
    assert_eq!(answer, Answer::Accepted);
    Client::on(socket).connected("one").await.publish(1).await;
    assert_eq!(clients.seen(), [("one".to_owned(), client)]);
}

/// A leader that answers requests by hand.
struct FakeLeader {
    address: SocketAddr,
    accepting: JoinHandle<()>,
}

impl FakeLeader {
    /// Accepts every request.
    fn start<F>(serve: impl Fn(Purpose, TcpStream) -> F + Clone + Send + 'static) -> Self
    where
        F: Future<Output = ()> + Send,
    {
        Self::start_with(|_| Answer::Accepted, serve)
    }

    fn start_with<F>(
        decide: impl Fn(Purpose) -> Answer + Send + Sync + Clone + 'static,
        serve: impl Fn(Purpose, TcpStream) -> F + Clone + Send + 'static,
    ) -> Self
    where
        F: Future<Output = ()> + Send,
    {
        let listener = net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let accepting = tokio::spawn(async move {
            let listener = TcpListener::from_std(listener).unwrap();
            loop {
                let (mut socket, _) = listener.accept().await.unwrap();
                let (decide, serve) = (decide.clone(), serve.clone());
                tokio::spawn(async move {
                    let key = Key::new(&SECRET);
                    let received = receive(&mut socket, &key).await.unwrap();
                    let purpose = received.request.purpose;
                    let answer = decide(purpose);
                    received.answer(&mut socket, &key, answer).await.unwrap();
                    if answer == Answer::Accepted {
                        serve(purpose, socket).await;
                        std::future::pending().await
                    }
                });
            }
        });
        Self { address, accepting }
    }
}

impl Drop for FakeLeader {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

#[tokio::test]
async fn the_streams_that_wait_or_are_passed_on_are_limited() {
    let [leader, _] = ["gw1", "gw3"].map(Host::plain);
    let follower = Host::new("gw2", &["mqtt"], None, |front| {
        front.options.connections_max = Arc::new(|| 2);
    });
    leader.lead_alone();
    let mut first = Client::on(follower.connect().await);
    first.send(&connect("one")).await;
    follower.follow(&leader);
    first.accepted().await;
    follower.role.send_replace(Role::Waiting);
    let mut second = Client::on(follower.connect().await);
    second.send(&connect("two")).await;
    // One stream is passed on, and one waits.
    is_closed(&mut follower.connect().await).await;
    assert_eq!(follower.refusals(), 1);
    drop(first);
    follower.follow(&leader);
    second.accepted().await;
    let deadline = Instant::now() + PATIENCE;
    loop {
        // The permit of the first stream is released soon after its end.
        let socket = follower.connect().await;
        let before = follower.refusals();
        let mut third = Client::on(socket);
        third.send(&connect("three")).await;
        sleep(Duration::from_millis(50)).await;
        if follower.refusals() == before {
            third.accepted().await;
            break;
        }
        assert!(Instant::now() < deadline, "the permit is released");
    }
}
