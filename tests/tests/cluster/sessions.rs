//! MQTT sessions over the loss of a leader: subscriptions, queued and retained messages, and wills.

use statehouse_tests::{Client, Cluster, Connect, Publish};

use crate::{SHORT_LEASE, resumed::connect};

/// Connects through a host. The session must exist, or must not.
fn client(cluster: &Cluster, host: usize, id: &str, present: bool) -> Client {
    let client = cluster.connect(host, &connect(id));
    assert_eq!(client.session_present(), present, "of {id}");
    client
}

fn payloads(client: &mut Client, topic: &str, count: usize) -> Vec<Vec<u8>> {
    (0..count)
        .map(|_| client.take_publish(topic).payload)
        .collect()
}

#[test]
fn session_over_a_failover_has_its_messages() {
    let mut cluster = Cluster::with(3, 1, &[SHORT_LEASE]);
    let follower = cluster.follower();
    let mut reader = client(&cluster, follower, "reader", false);
    assert_eq!(reader.subscribe("news/#", 1), 1);
    reader.disconnect();
    let mut writer = client(&cluster, follower, "writer", false);
    for n in 0..5 {
        let message = Publish::new("news/queued", n.to_string()).qos(1);
        assert_eq!(writer.publish(message).reason, 0);
    }
    let kept = Publish::new("news/kept", "kept").qos(1).retained();
    assert_eq!(writer.publish(kept).reason, 0);

    let (old, new) = cluster.fail_over();
    let other = cluster.other_than(&[old.host, new.host]);
    let mut reader = client(&cluster, other, "reader", true);
    let queued = payloads(&mut reader, "news/queued", 5);
    assert_eq!(queued, [b"0", b"1", b"2", b"3", b"4"].map(|it| it.to_vec()));
    assert_eq!(payloads(&mut reader, "news/kept", 1), [b"kept".to_vec()]);
    reader.expect_nothing();
    // The subscription exists, and the retained message reaches new subscribers.
    let mut writer = client(&cluster, new.host, "writer", true);
    let live = Publish::new("news/live", "live").qos(1);
    assert_eq!(writer.publish(live).reason, 0);
    assert_eq!(payloads(&mut reader, "news/live", 1), [b"live".to_vec()]);
    let mut later = client(&cluster, new.host, "later", false);
    later.subscribe("news/kept", 1);
    assert_eq!(payloads(&mut later, "news/kept", 1), [b"kept".to_vec()]);
}

/// Regression: the next leader removed what exceeded its own limits, or those of its start.
#[test]
fn sessions_survive_a_failover_to_a_host_with_lower_limits() {
    const SESSIONS: usize = 20;
    let mut cluster = Cluster::without_hosts(1, &[SHORT_LEASE]);
    cluster.add_hosts(1);
    let limits = [("max_sessions", "10"), ("max_total_queue_bytes", "2097152")];
    cluster.add_with(&limits);
    cluster[1].wait_until_ready();
    let id = |n: usize| format!("reader{n}");
    for n in 0..SESSIONS {
        let mut reader = client(&cluster, 0, &id(n), false);
        assert_eq!(reader.subscribe(&format!("news/{n}"), 1), 1);
        reader.disconnect();
    }
    let mut writer = client(&cluster, 0, "writer", false);
    let text = "x".repeat(200_000);
    for n in 0..SESSIONS {
        let message = Publish::new(&format!("news/{n}"), text.as_str()).qos(1);
        assert_eq!(writer.publish(message).reason, 0);
    }
    let (_, new) = cluster.fail_over();
    assert_eq!(new.host, 1);
    for n in 0..SESSIONS {
        let mut reader = client(&cluster, 1, &id(n), true);
        let queued = payloads(&mut reader, &format!("news/{n}"), 1);
        assert_eq!(queued, [text.as_bytes()]);
        reader.disconnect();
    }
    // The limit refuses a new session.
    let (_, refused) = Client::try_connect(cluster[1].address(), &connect("another"));
    assert_eq!(refused.reason, 0x97);
}

/// A message that was delivered but not acknowledged is delivered again, with its packet id.
#[test]
fn unacknowledged_message_is_delivered_again_over_a_failover() {
    let mut cluster = Cluster::with(2, 1, &[SHORT_LEASE]);
    let mut reader = client(&cluster, cluster.follower(), "reader", false);
    reader.acknowledges = false;
    reader.subscribe("news", 1);
    let mut writer = client(&cluster, cluster.follower(), "writer", false);
    let once = Publish::new("news", "once").qos(1);
    assert_eq!(writer.publish(once).reason, 0);
    let first = reader.take_publish("news");
    let (_, new) = cluster.fail_over();
    let mut reader = client(&cluster, new.host, "reader", true);
    let again = reader.take_publish("news");
    assert_eq!((again.packet_id, again.dup), (first.packet_id, true));
    assert_eq!(again.payload, b"once");
    reader.expect_nothing();
}

/// A will is published by the next leader, unless its client returns in time.
#[test]
fn will_is_published_by_the_next_leader() {
    let mut cluster = Cluster::with(2, 1, &[SHORT_LEASE]);
    let mut listener = client(&cluster, cluster.follower(), "listener", false);
    listener.subscribe("will", 1);
    let with_will =
        |id, delay_s| Connect::resume(id, 3600).will(Publish::new("will", id).qos(1), delay_s);
    let _lost = cluster.connect(0, &with_will("lost", 2));
    let _back = cluster.connect(1, &with_will("back", 10));
    let (_, new) = cluster.fail_over();
    let mut listener = client(&cluster, new.host, "listener", true);
    let back = cluster.connect(new.host, &with_will("back", 10));
    assert!(back.session_present());
    assert_eq!(payloads(&mut listener, "will", 1), [b"lost".to_vec()]);
    listener.expect_nothing();
    let lost = cluster.connect(new.host, &with_will("lost", 2));
    assert!(lost.session_present(), "the session outlives its will");
}
