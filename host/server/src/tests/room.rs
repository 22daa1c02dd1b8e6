//! Batches of a transport while their outputs wait for the log.

use super::*;
use statehouse_core::store::Supervision;

const UNRELEASED_BYTES_MAX: u64 = 256 << 10;
const WATCHERS: u64 = 100;

/// A server with a key that many connections watch, and with a log that releases nothing more.
fn watched_server(journal: &Arc<Held>) -> Arc<Server> {
    let server = server_on(journal.clone());
    server.attach(Arc::new(RecordingTransport::default()));
    let quota = Quota {
        unreleased_bytes_max: UNRELEASED_BYTES_MAX,
        ..Quota::default()
    };
    server.set_bounds(quota, Supervision::default());
    for number in 2..2 + WATCHERS {
        let watcher = Delivery {
            session: SessionId(number),
            connection: ConnectionId(number),
            ..FIRST
        };
        publish(&server, START_MS, &[b"KEYNOTIFY", b"k"], watcher, None);
    }
    release_all(journal, &server);
    assert_eq!(server.stats().watches, WATCHERS);
    server
}

fn release_all(journal: &Held, server: &Server) {
    journal
        .released
        .store(journal.appended.load(Relaxed), Relaxed);
    server.release();
    assert_eq!(server.stats().unreleased_bytes, 0);
}

/// Regression: behind a foreign broker, these outputs had no limit.
#[test]
fn a_batch_waits_while_too_many_outputs_wait_for_the_log() {
    let journal = Arc::new(Held::default());
    let server = watched_server(&journal);
    publish(&server, START_MS, &[b"SET", b"k", b"v"], FIRST, None);
    let one_change = server.stats().unreleased_bytes;
    assert!(one_change > WATCHERS * 100, "{one_change}");
    release_all(&journal, &server);

    let properties = properties(START_MS);
    let payload = Bytes::from(statehouse_policy::resp::request(&[b"SET", b"k", b"v"]));
    let peer = Peer::numbered("client", 1);
    let request = |_| Inbound::Publish(Incoming::new(&peer, &payload, &properties), None);
    let mut batch = (0..64).map(request);
    server.take_with_room(&mut batch);
    let left = batch.len();
    assert!((1..63).contains(&left), "{left}");
    let waiting = server.stats().unreleased_bytes;
    assert!(waiting > UNRELEASED_BYTES_MAX, "{waiting}");
    assert!(waiting <= UNRELEASED_BYTES_MAX + one_change, "{waiting}");

    server.take_with_room(&mut batch);
    assert_eq!(batch.len(), left, "nothing was released");
    while batch.len() > 0 {
        let before = batch.len();
        release_all(&journal, &server);
        server.take_with_room(&mut batch);
        assert!(batch.len() < before);
    }
}
