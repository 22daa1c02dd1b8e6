//! State that survives a restart: sessions with all their state, retained messages, wills and
//! deadlines.

mod expiry;
mod limits;
mod messages;
mod wills;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use statehouse_protocol::ConnectionId;
use wire::Packet;

use crate::{Broker, Limits, Message, NoService, QoS, testing::*};

const SECOND: Duration = Duration::from_secs(1);

/// A broker whose log releases every record at once, and which can be killed and restarted.
struct Life {
    log: Arc<TestLog>,
    broker: Broker,
    began: Instant,
    service: Arc<RecordingService>,
}

impl Life {
    fn new() -> (Self, Instant) {
        let (log, began) = (TestLog::new(true), Instant::now());
        let service = Arc::new(RecordingService::default());
        let broker = restored(&log, Limits::default(), service.clone(), began, began);
        let life = Self {
            log,
            broker,
            began,
            service,
        };
        (life, began)
    }

    fn kill(&mut self, now: Instant) {
        self.kill_with(Limits::default(), now);
    }

    fn kill_with(&mut self, limits: Limits, now: Instant) {
        let service = self.service.clone();
        self.broker = restored(&self.log, limits, service, self.began, now);
    }

    fn publish(&self, message: Message, now: Instant) {
        publish_at(&self.broker, message, now);
    }
}

fn message(payload: &str, qos: QoS) -> Message {
    Message::new("t", payload.to_owned(), qos)
}

#[test]
fn session_numbers_last_and_connection_numbers_never_repeat() {
    let (mut life, now) = Life::new();
    let first = Peer::new(&life.broker, &Hello::new("a"), now);
    let other = Peer::new(&life.broker, &Hello::new("b"), now);
    let (first, other) = (first.origin.clone(), other.origin.clone());
    assert_ne!(first.session, other.session);
    assert_eq!(first.connection, ConnectionId(1), "run 0");
    let run = life.log.len() as u64;
    life.kill(now);
    let again = Peer::new(&life.broker, &Hello::new("a"), now).origin;
    assert_eq!(again.session, first.session);
    assert!(
        again.connection.0 > run << 32 && again.connection.0 < (run + 1) << 32,
        "{again:?}"
    );
    let fresh = Peer::new(&life.broker, &Hello::new("a").clean(), now).origin;
    assert!(fresh.session > other.session);
    assert_eq!(
        *life.service.ended.lock().unwrap(),
        [],
        "the service does not know yet that its connection has ended"
    );
    life.broker.lock().disconnect_reported(again.session);
    assert_eq!(*life.service.ended.lock().unwrap(), [again.session]);
    life.kill(now);
    let mut sessions = life.broker.sessions();
    sessions.sort_unstable();
    assert_eq!(sessions, [other.session, fresh.session]);
}

#[test]
fn session_numbers_do_not_repeat_without_run_numbers() {
    let (life, now) = Life::new();
    let old = Peer::new(&life.broker, &Hello::new("a"), now).origin;
    let broker = Broker::restore(
        crate::Options::default(),
        Arc::new(NoService),
        life.log.recovery(),
    );
    let new = Peer::new(&broker, &Hello::new("b"), now).origin;
    assert!(new.session > old.session);
}

#[test]
fn transient_sessions_are_not_recorded() {
    let (life, now) = Life::new();
    let begin = life.log.len();
    let hello = Hello::new("a").expiry(0).will("w", "w", 0);
    let mut peer = Peer::new(&life.broker, &hello, now);
    peer.subscribe("t", Q::ExactlyOnce, now);
    life.publish(message("x", QoS::ExactlyOnce), now);
    let id = peer.messages()[0].pkid;
    peer.send(
        &[
            pubrec(id),
            Packet::Publish(publish("unmatched", Q::ExactlyOnce, 1, "x")),
            pubrel(1),
        ],
        now,
    );
    peer.lose(now);
    assert_eq!(life.log.len(), begin);
    // A session that is resumed without an expiry stops being durable.
    Peer::new(&life.broker, &Hello::new("b"), now).lose(now);
    let mut peer = Peer::new(&life.broker, &Hello::new("b").expiry(0), now);
    let ended = life.log.len();
    peer.subscribe("t", Q::ExactlyOnce, now);
    assert_eq!(life.log.len(), ended);
    assert_eq!(life.log.recovery(), crate::Recovery::default());
    let broker = Broker::new(crate::Options::default(), Arc::new(NoService));
    let mut peer = Peer::new(&broker, &Hello::new("a"), now);
    peer.subscribe("t", Q::ExactlyOnce, now);
    assert_eq!(image(&broker, 1 << 20).len(), 1);
}
