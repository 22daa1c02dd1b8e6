//! The log names the user of every session that sends requests, for readers of the log.

use std::{sync::Arc, time::Instant};

use statehouse_protocol::SessionId;

use crate::{Broker, Limits, Recovery, SessionUsers, testing::*};

struct World {
    log: Arc<TestLog>,
    broker: Broker,
    now: Instant,
}

impl World {
    fn new() -> Self {
        let (log, now) = (TestLog::new(true), Instant::now());
        let service = Arc::new(RecordingService::default());
        let broker = restored(&log, Limits::default(), service, now, now);
        Self { log, broker, now }
    }

    /// A client whose session has this expiry. Its user has the same name.
    fn client(&self, name: &str, expiry_s: u32) -> Peer {
        Peer::new(&self.broker, &Hello::new(name).expiry(expiry_s), self.now)
    }

    fn request(&self, peer: &mut Peer, packet_id: u16, qos: Q) {
        peer.publish("req/x", qos, packet_id, "x", self.now);
    }

    /// The user of a session, by all records.
    fn user(&self, session: SessionId) -> Option<String> {
        user_in(&self.log.records(), session)
    }

    /// The user of a session, by a snapshot alone.
    fn user_in_image(&self, session: SessionId) -> Option<String> {
        user_in(&image(&self.broker, 1), session)
    }
}

fn user_in(records: &[Vec<u8>], session: SessionId) -> Option<String> {
    let mut users = SessionUsers::default();
    for record in records {
        users.apply(record).unwrap();
    }
    users.user(session).map(|user| user.to_string())
}

#[test]
fn user_of_a_transient_session_is_recorded_before_a_request() {
    let world = World::new();
    let mut peer = world.client("anna", 0);
    let session = peer.origin.session;
    world.request(&mut peer, 0, Q::AtMostOnce);
    assert_eq!(world.log.len(), 0, "a request at QoS 0 is not executed");
    world.request(&mut peer, 1, Q::AtLeastOnce);
    assert_eq!(world.user(session).as_deref(), Some("anna"));
    let (records, bytes) = (world.log.len(), world.log.bytes());
    assert_eq!((records, bytes), (1, "FTRN".len() + "\u{4}anna".len()));
    world.request(&mut peer, 2, Q::AtLeastOnce);
    assert_eq!(world.log.len(), records);
    assert_eq!(world.user_in_image(session).as_deref(), Some("anna"));
    assert_eq!(world.log.recovery(), Recovery::default());
    peer.lose(world.now);
    assert_eq!(world.user_in_image(session), None);
}

#[tokio::test]
async fn user_of_a_request_of_this_process_is_recorded() {
    let world = World::new();
    let begin = |user| world.broker.begin_own_session(user);
    let (first, connection) = begin(Some("anna")).await.unwrap();
    assert_eq!(world.user(first).as_deref(), Some("anna"));
    let records = world.log.len();
    let (second, later) = begin(None).await.unwrap();
    assert_eq!((world.user(second), world.log.len()), (None, records));
    assert!(first < second && connection < later);
    let peer = world.client("berta", 0);
    assert!(second < peer.origin.session && later < peer.origin.connection);
    assert_eq!(world.broker.sessions(), [peer.origin.session]);
    assert_eq!(world.log.recovery(), Recovery::default());
    world.broker.stop_deciding();
    assert_eq!(begin(Some("anna")).await, None);
}

#[test]
fn user_is_known_after_a_session_stops_being_durable() {
    let world = World::new();
    let peer = world.client("anna", 1000);
    let session = peer.origin.session;
    assert_eq!(world.user(session).as_deref(), Some("anna"));
    peer.lose(world.now);
    let mut peer = world.client("anna", 0);
    assert_eq!(peer.origin.session, session);
    assert_eq!(world.user(session), None, "the durable session has ended");
    world.request(&mut peer, 1, Q::ExactlyOnce);
    assert_eq!(world.user(session).as_deref(), Some("anna"));
    assert_eq!(world.user_in_image(session).as_deref(), Some("anna"));
}

#[test]
fn user_is_recorded_when_the_log_has_room_again() {
    let world = World::new();
    let mut peer = world.client("anna", 0);
    world.log.set_full(true);
    world.request(&mut peer, 1, Q::AtLeastOnce);
    assert_eq!(world.log.len(), 0);
    assert_eq!(world.user_in_image(peer.origin.session), None);
    world.log.set_full(false);
    world.request(&mut peer, 2, Q::AtLeastOnce);
    assert_eq!(world.user(peer.origin.session).as_deref(), Some("anna"));
}
