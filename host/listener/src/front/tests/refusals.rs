//! Hostile peers at the cluster port, and hosts that do not fit together.

use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

use super::client::{Client, connect};
use super::*;
use crate::front::probe;
use statehouse_config::limits;

#[tokio::test]
async fn a_peer_without_the_secret_never_reaches_the_broker() {
    let leader = Host::plain("gw1");
    let clients = leader.lead_alone();
    // The bytes of a client itself, and what a host without the secret sends.
    let mut recorded = Vec::new();
    let (mut host, mut tap) = duplex(4096);
    tap.write_all(b"SHCL\x01 a recorded nonce").await.unwrap();
    let request = Request {
        host: "gw9".parse().unwrap(),
        purpose: Purpose::Link,
    };
    let key = Key::new(&[8; 32]);
    let sending = timeout(Duration::from_millis(50), send(&mut host, &key, &request)).await;
    assert!(sending.is_err());
    drop(host);
    tap.read_to_end(&mut recorded).await.unwrap();
    let connects = connect("one").repeat(20);
    for (index, bytes) in [connects, recorded, vec![0; 4096]].iter().enumerate() {
        let mut socket = TcpStream::connect(leader.port).await.unwrap();
        socket.write_all(bytes).await.unwrap();
        socket.write_all(&connect("one")).await.ok();
        let mut answer = Vec::new();
        // The port closes with unread bytes, so the connection may be reset.
        _ = within("its end", socket.read_to_end(&mut answer)).await;
        eventually("a refusal", || leader.refusals() == 1 + index as u64).await;
    }
    assert_eq!(clients.seen(), []);
}

#[tokio::test]
async fn hosts_with_different_secrets_serve_no_clients_of_each_other() {
    let leader = Host::plain("gw1");
    let follower = Host::new("gw2", &["mqtt"], None, |front| {
        front.key = Key::new(&[8; 32]);
    });
    let clients = leader.lead_alone();
    follower.follow(&leader);
    let mut socket = follower.connect().await;
    socket.write_all(&connect("one")).await.unwrap();
    is_closed(&mut socket).await;
    eventually("refusals", || {
        follower.refusals() > 0 && leader.refusals() > 0
    })
    .await;
    assert_eq!(clients.seen(), []);
}

#[tokio::test]
async fn a_client_of_a_scheme_that_the_leader_lacks_is_refused() {
    let leader = Host::plain("gw1");
    let follower = Host::new("gw2", &["ws"], None, |_| {});
    leader.lead_alone();
    follower.follow(&leader);
    is_closed(&mut follower.connect().await).await;
    eventually("refusals", || {
        follower.refusals() == 1 && leader.refusals() == 1
    })
    .await;
}

#[tokio::test]
async fn a_slow_peer_is_closed_and_delays_no_host() {
    let [leader, follower] = ["gw1", "gw2"].map(Host::plain);
    leader.lead_alone();
    follower.follow(&leader);
    let began = Instant::now();
    let mut slow = TcpStream::connect(leader.port).await.unwrap();
    let mut client = Client::on(follower.connect().await).connected("one").await;
    client.publish(1).await;
    let mut hello = [0; 21];
    slow.read_exact(&mut hello).await.unwrap();
    // One byte at a time does not extend the limit.
    while slow.write_all(&[0]).await.is_ok() {
        assert!(began.elapsed() < limits::CLUSTER_PREFACE_TIMEOUT + PATIENCE);
        sleep(Duration::from_millis(200)).await;
    }
    assert!(began.elapsed() >= limits::CLUSTER_PREFACE_TIMEOUT);
    client.publish(2).await;
}

#[tokio::test]
async fn links_are_limited_and_released() {
    let leader = Host::plain("gw1");
    leader.lead_alone();
    let link = || knock(leader.port, Purpose::Link);
    let mut links = Vec::new();
    for _ in 0..limits::CLUSTER_LINKS_MAX {
        let (socket, answer) = link().await;
        assert_eq!(answer, Answer::Accepted);
        links.push(socket);
    }
    assert_eq!(link().await.1, Answer::Refused);
    links.pop();
    let deadline = Instant::now() + PATIENCE;
    while link().await.1 != Answer::Accepted {
        assert!(Instant::now() < deadline, "the permit is released");
    }
    // A follower that sends bytes loses its link.
    let mut last = links.pop().unwrap();
    last.write_all(&[1]).await.unwrap();
    let mut beats = Vec::new();
    _ = within("its end", last.read_to_end(&mut beats)).await;
    // All links end with the leadership.
    leader.role.send_replace(Role::Waiting);
    for mut socket in links {
        _ = within("its end", socket.read_to_end(&mut beats)).await;
    }
    assert_eq!(link().await.1, Answer::NotLeading);
}

#[tokio::test]
async fn a_probe_finds_a_host_and_is_no_refusal() {
    let host = Host::plain("gw1");
    probe(&host.port.to_string()).await.unwrap();
    // One that sends a byte is no probe.
    let mut socket = TcpStream::connect(host.port).await.unwrap();
    socket.write_all(&[0]).await.unwrap();
    drop(socket);
    eventually("a refusal", || host.refusals() == 1).await;
    let error = probe(&dead_address().to_string()).await.unwrap_err();
    assert!(error.contains("it cannot be reached"), "{error}");
    // A broker sends nothing first.
    let error = probe(&host.listeners[0].address.to_string()).await;
    let error = error.unwrap_err();
    assert!(error.contains("it did not answer within 2 s"), "{error}");
    let other = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = other.local_addr().unwrap().to_string();
    let answering = async {
        let (mut socket, _) = other.accept().await.unwrap();
        socket
            .write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            .await
            .unwrap();
        socket
    };
    let (probed, _socket) = tokio::join!(probe(&address), answering);
    let error = probed.unwrap_err();
    assert!(error.contains("no Statehouse host"), "{error}");
    assert_eq!(host.refusals(), 1);
}
