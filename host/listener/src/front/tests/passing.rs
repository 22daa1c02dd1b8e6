//! Clients of hosts in every role, and changes of roles.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::client::{Client, connect, connect_3};
use super::*;
use crate::front::preface::{Answer, Key, Purpose, receive};

#[tokio::test]
async fn a_follower_passes_clients_of_every_scheme_on() {
    let (files, _directory, trusted) = certificate();
    let schemes = ["mqtt", "mqtts", "ws", "wss"];
    let hosts = ["gw1", "gw2"].map(|name| Host::new(name, &schemes, Some(files.clone()), |_| {}));
    let [leader, follower] = hosts;
    let (broker, clients) = broker();
    leader.lead(&broker);
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
    let (broker, _) = broker();
    leader.lead(&broker);
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
    }
    assert!(clients.seen().iter().all(|(name, _)| name == "two"));
}

#[tokio::test]
async fn streams_end_when_another_host_leads() {
    let follower = Host::plain("gw2");
    // A leader that accepts streams and then is silent, as if its machine had lost its power.
    let lost = TcpListener::bind("127.0.0.1:0").await.unwrap();
    follower.follow_at("gw1", lost.local_addr().unwrap());
    let (accepted, mut is_accepted) = tokio::sync::mpsc::unbounded_channel();
    let leading = tokio::spawn(async move {
        let mut sockets = Vec::new();
        loop {
            let (mut socket, _) = lost.accept().await.unwrap();
            let key = Key::new(&SECRET);
            let received = receive(&mut socket, &key).await.unwrap();
            let answered = received.answer(&mut socket, &key, Answer::Accepted);
            answered.await.unwrap();
            let purpose = received.request.purpose;
            if purpose != Purpose::Link {
                // The stream is spliced once its first byte arrives.
                socket.read_u8().await.unwrap();
            }
            accepted.send(purpose).unwrap();
            sockets.push(socket);
        }
    });
    let mut socket = follower.connect().await;
    socket.write_all(&connect("one")).await.unwrap();
    let streaming = async { while is_accepted.recv().await == Some(Purpose::Link) {} };
    timeout(PATIENCE, streaming)
        .await
        .expect("the stream is passed on");
    // While no leader is known, the last one may still serve.
    follower.role.send_replace(Role::Waiting);
    let still = timeout(Duration::from_millis(100), is_closed(&mut socket)).await;
    assert!(still.is_err());
    follower.follow_at("gw3", dead_address());
    is_closed(&mut socket).await;
    leading.abort();
}

#[tokio::test]
async fn the_streams_that_wait_or_are_passed_on_are_limited() {
    let [leader, _] = ["gw1", "gw3"].map(Host::plain);
    let follower = Host::new("gw2", &["mqtt"], None, |front| {
        front.connections_max = Arc::new(|| 2);
    });
    let (broker, _) = broker();
    leader.lead(&broker);
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
