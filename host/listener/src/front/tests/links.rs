//! Links between hosts.

use std::sync::atomic::AtomicBool;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;
use crate::front::Times;
use crate::front::preface::{Received, receive};
use statehouse_config::limits;

#[tokio::test]
async fn a_leader_is_suspected_when_it_stops_leading() {
    let [leader, follower] = ["gw1", "gw2"].map(Host::plain);
    let (broker, _) = broker();
    leader.lead(&broker);
    follower.follow(&leader);
    sleep(2 * limits::CLUSTER_LINK_SILENCE).await;
    assert_eq!(follower.suspicions(), 0);
    leader.role.send_replace(Role::Waiting);
    // Once for the broken link, and again for each attempt.
    let began = Instant::now();
    eventually("suspicions", || follower.suspicions() >= 4).await;
    assert!(began.elapsed() >= 3 * limits::CLUSTER_LINK_RETRY);
    leader.lead(&broker);
    sleep(2 * limits::CLUSTER_LINK_RETRY).await;
    let suspicions = follower.suspicions();
    sleep(2 * limits::CLUSTER_LINK_SILENCE).await;
    assert_eq!(follower.suspicions(), suspicions);
}

#[tokio::test]
async fn a_leader_that_does_not_reach_the_log_is_suspected() {
    let reaches_log = Arc::new(AtomicBool::new(true));
    let seen = reaches_log.clone();
    let leader = Host::new("gw1", &["mqtt"], None, |front| {
        front.options.reaches_log = Arc::new(move || seen.load(Ordering::SeqCst));
    });
    let follower = Host::plain("gw2");
    leader.lead_alone();
    follower.follow(&leader);
    sleep(2 * limits::CLUSTER_LINK_SILENCE).await;
    assert_eq!(follower.suspicions(), 0);
    reaches_log.store(false, Ordering::SeqCst);
    eventually("a suspicion", || follower.suspicions() > 0).await;
}

#[tokio::test]
async fn a_silent_leader_is_suspected() {
    let follower = Host::plain("gw2");
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    follower.follow_at("gw1", silent.local_addr().unwrap());
    // A leader whose process is stopped: the system accepts connections for it.
    let began = Instant::now();
    eventually("a suspicion", || follower.suspicions() == 1).await;
    assert!(began.elapsed() >= limits::CLUSTER_LINK_SILENCE);
    // One that is stopped after it accepted the link.
    let (mut socket, received) = request(&silent).await;
    let key = Key::new(&SECRET);
    let answered = received.answer(&mut socket, &key, Answer::Accepted);
    answered.await.unwrap();
    let linked = Instant::now();
    let before = follower.suspicions();
    eventually("a suspicion", || follower.suspicions() > before).await;
    assert!(linked.elapsed() >= limits::CLUSTER_LINK_SILENCE - Duration::from_millis(50));
}

/// The next request of a follower, and its socket.
async fn request(leader: &TcpListener) -> (TcpStream, Received) {
    loop {
        let (mut socket, _) = leader.accept().await.unwrap();
        // An earlier attempt may have timed out.
        if let Ok(received) = receive(&mut socket, &Key::new(&SECRET)).await {
            return (socket, received);
        }
    }
}

/// The network acknowledges what the follower sends, and loses it. No connection fails.
#[tokio::test]
async fn a_leader_that_receives_nothing_is_suspected() {
    let [leader, follower] = ["gw1", "gw2"].map(Host::plain);
    leader.lead_alone();
    let is_lost = Arc::new(AtomicBool::new(false));
    let loses = is_lost.clone();
    let forwarding = network(leader.port, move |mut from_host, mut to_leader| {
        let loses = loses.clone();
        async move {
            let mut bytes = [0; 1024];
            while let Ok(count @ 1..) = from_host.read(&mut bytes).await {
                if !loses.load(Ordering::SeqCst) {
                    _ = to_leader.write_all(&bytes[..count]).await;
                }
            }
        }
    });
    let (address, network) = forwarding.await;
    follower.follow_at("gw1", address);
    sleep(2 * limits::CLUSTER_LINK_SILENCE).await;
    assert_eq!(follower.suspicions(), 0);
    is_lost.store(true, Ordering::SeqCst);
    eventually("a suspicion", || follower.suspicions() > 0).await;
    network.abort();
}

/// Regression: a stopped process keeps its connection, and counted as one that can lead next.
#[tokio::test]
async fn a_link_counts_while_its_follower_sends_bytes() {
    let mut links = None;
    let leader = Host::new("gw1", &["mqtt"], None, |front| {
        links = Some(front.options.links.clone());
    });
    let links = links.unwrap();
    leader.lead_alone();
    let (follower, answer) = knock(leader.port, Purpose::TwoWayLink).await;
    assert_eq!(answer, Answer::Accepted);
    let is_linked = || follower.try_write(&[0]).is_ok() && links.contains("gw9");
    eventually("a link", is_linked).await;
    eventually("silence", || !links.contains("gw9")).await;
    eventually("a link again", is_linked).await;
    assert_eq!(links.names(), ["gw9"]);
}

/// Such a leader refuses links of both directions, and ends one on which it receives a byte.
#[tokio::test]
async fn a_follower_sends_nothing_to_a_leader_of_an_earlier_version() {
    let follower = Host::plain("gw2");
    let leader = TcpListener::bind("127.0.0.1:0").await.unwrap();
    follower.follow_at("gw1", leader.local_addr().unwrap());
    let (key, mut purposes) = (Key::new(&SECRET), Vec::new());
    let mut link = loop {
        let (mut socket, received) = request(&leader).await;
        let purpose = received.request.purpose;
        purposes.push(purpose);
        let answer = match purpose {
            Purpose::Link => Answer::Accepted,
            _ => Answer::Refused,
        };
        received.answer(&mut socket, &key, answer).await.unwrap();
        if answer == Answer::Accepted {
            break socket;
        }
    };
    assert_eq!(purposes[0], Purpose::TwoWayLink);
    let before = follower.suspicions();
    for _ in 0..10 {
        link.write_all(&[0]).await.unwrap();
        let sent = timeout(limits::CLUSTER_LINK_BEAT, link.read(&mut [0])).await;
        assert!(sent.is_err(), "{sent:?}");
    }
    assert_eq!(follower.suspicions(), before);
    // After the link broke, the leader may have a later version.
    drop(link);
    let (_, received) = request(&leader).await;
    assert_eq!(received.request.purpose, Purpose::TwoWayLink);
}

#[tokio::test]
async fn a_follower_links_with_the_next_leader() {
    let [first, second, follower] = ["gw1", "gw2", "gw3"].map(Host::plain);
    let (broker, _) = broker();
    first.lead(&broker);
    second.lead(&broker);
    follower.follow(&first);
    sleep(limits::CLUSTER_LINK_BEAT).await;
    follower.follow(&second);
    sleep(limits::CLUSTER_LINK_BEAT).await;
    // The former leader ends, and that is no suspicion of the present one.
    first.role.send_replace(Role::Waiting);
    sleep(limits::CLUSTER_LINK_SILENCE).await;
    assert_eq!(follower.suspicions(), 0);
    second.role.send_replace(Role::Waiting);
    eventually("a suspicion", || follower.suspicions() > 0).await;
}

#[tokio::test]
async fn a_follower_receives_the_clocks_of_its_leader() {
    let times = Times {
        store_ms: 0x0102_0304_0506_0708,
        wall_ms: u64::MAX - 1,
    };
    let leader = Host::new("gw1", &["mqtt"], None, |front| {
        front.options.times = Arc::new(move || Some(times));
    });
    let received = Arc::<Mutex<Vec<Times>>>::default();
    let seen = received.clone();
    let follower = Host::new("gw2", &["mqtt"], None, |front| {
        front.options.compare = Arc::new(move |times| seen.lock().unwrap().push(times));
    });
    leader.lead_alone();
    follower.follow(&leader);
    eventually("two beats", || received.lock().unwrap().len() >= 2).await;
    assert!(received.lock().unwrap().iter().all(|it| *it == times));
    assert_eq!(follower.suspicions(), 0);
}
