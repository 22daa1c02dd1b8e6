//! Requests that are redelivered through another host after the loss of a leader: one effect, one
//! answer, and one notification.

use statehouse_tests::Cluster;

use crate::{
    SHORT_LEASE,
    resumed::{begin, resume},
};

/// The commands of the client. Another execution of each would have another answer or effect.
const COMMANDS: [&[&str]; 5] = [
    &["SET", "plain", "1"],
    &["SET", "new", "1", "NX"],
    &["DEL", "removed"],
    &["VDEL", "value", "1"],
    &["SET", "absent", "1", "NEX"],
];
const KEYS: [&str; 5] = ["plain", "new", "removed", "value", "absent"];

#[test]
fn redelivery_through_another_host_has_one_effect() {
    let mut cluster = Cluster::with(3, 1, &[SHORT_LEASE]);
    let follower = cluster.follower();
    let mut watcher = begin(&cluster[follower], "watcher");
    for key in ["removed", "value"] {
        watcher.set(key, "1");
    }
    KEYS.iter().for_each(|key| watcher.watch(key));
    let mut client = begin(&cluster[follower], "client");
    let mut sent = Vec::new();
    for command in COMMANDS {
        let request = client.command(command);
        let packet_id = client.client.start(request.publish());
        let answer = client.finish(&request, packet_id);
        assert!(!answer.payload().starts_with(b"-"), "{}", answer.text());
        sent.push((request, packet_id, answer));
    }
    // The client does not read the answer to this one, which is committed: a watcher was notified.
    let unread = client.command(&["SET", "plain", "2"]);
    let unread_id = client.client.start(unread.publish());
    for _ in 0..COMMANDS.len() + 1 {
        watcher.notification();
    }

    let (old, new) = cluster.fail_over();
    let other = cluster.other_than(&[old.host, new.host]);
    // Watches end with the connection, so this watcher registers again.
    let mut watcher = resume(&cluster[new.host], "watcher");
    watcher.client.drain();
    KEYS.iter().for_each(|key| watcher.watch(key));
    let states: Vec<_> = KEYS.iter().map(|key| watcher.ask(&["GET", key])).collect();
    let mut client = resume(&cluster[other], "client");
    for _ in 0..2 {
        for (request, packet_id, first) in &sent {
            let answer = client.redeliver(request, *packet_id, true);
            assert_eq!(answer.text(), first.text(), "{request:?}");
            assert_eq!(answer.version(), first.version(), "{request:?}");
        }
        let answer = client.redeliver(&unread, unread_id, true);
        assert_eq!(answer.text(), "+OK\\r\\n");
        assert_eq!(answer.version(), states[0].version());
    }
    for (key, state) in KEYS.iter().zip(&states) {
        let now = watcher.ask(&["GET", key]);
        assert_eq!((now.text(), now.version()), (state.text(), state.version()));
    }
    // The redeliveries notified no watcher.
    watcher.expect_nothing();
    client.client.expect_nothing();
}
