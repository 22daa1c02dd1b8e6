//! Messages that wait for a disconnected client: which are kept, and for how long.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{Broker, Limits, Message, NoService, QoS, testing::*};

const SECOND: Duration = Duration::from_secs(1);

/// Publishes from the broker itself.
fn send(broker: &Broker, topic: &'static str, qos: QoS, payloads: &[&'static str]) {
    broker.batch(|batch| {
        for payload in payloads {
            batch.publish(Message::new(topic, *payload, qos));
        }
    });
}

/// Publishes a message at QoS 1 that expires.
fn send_expiring(broker: &Broker, topic: &'static str, expires: Option<Instant>, now: Instant) {
    let mut message = Message::new(topic, topic, QoS::AtLeastOnce);
    message.expires = expires;
    publish_at(broker, message, now);
}

/// Regression: messages at QoS 0 behind a closed window stayed in the queue, and took the room of
/// messages at QoS 1.
#[test]
fn waiting_qos_0_messages_end_with_the_connection() {
    let (broker, now) = start(Limits::default());
    let mut a = Peer::new(&broker, &Hello::new("a").window(1), now);
    a.subscribe("t", Q::AtLeastOnce, now);
    send(&broker, "t", QoS::AtLeastOnce, &["sent", "kept"]);
    send(&broker, "t", QoS::AtMostOnce, &["lost", "lost"]);
    send(&broker, "t", QoS::AtLeastOnce, &["last"]);
    assert_eq!(a.payloads(), ["sent"]);
    assert_eq!(broker.stats().dropped, 0);
    a.lose(now);
    let cost_bytes = Message::new("t", "sent", QoS::AtLeastOnce).cost_bytes();
    let stats = broker.stats();
    assert_eq!((stats.dropped, stats.queued_bytes), (2, 3 * cost_bytes));
    let mut a = Peer::new(&broker, &Hello::new("a").window(1), now);
    for expected in ["sent", "kept", "last"] {
        let messages = a.messages();
        assert_eq!(messages.len(), 1);
        assert_eq!(messages[0].payload, expected);
        a.send(&[puback(messages[0].pkid)], now);
    }
    assert_eq!(broker.stats().queued_bytes, 0);
}

#[test]
fn waiting_qos_0_message_of_a_group_goes_to_another_member() {
    for (expiry_s, expected) in [
        (1000, &["quick"][..]),
        // The session ends, and with it all its messages go to the other member.
        (0, &["sent", "waits", "quick"][..]),
    ] {
        let (broker, now) = start(Limits::default());
        let mut a = Peer::new(&broker, &Hello::new("a").window(1).expiry(expiry_s), now);
        a.subscribe("$share/g/t", Q::AtLeastOnce, now);
        send(&broker, "t", QoS::AtLeastOnce, &["sent", "waits"]);
        send(&broker, "t", QoS::AtMostOnce, &["quick"]);
        assert_eq!(a.payloads(), ["sent"]);
        let mut b = Peer::new(&broker, &Hello::new("b"), now);
        b.subscribe("$share/g/t", Q::AtLeastOnce, now);
        a.lose(now);
        assert_eq!(b.payloads(), expected);
        assert_eq!(broker.stats().dropped, 0);
    }
}

/// Regression: expired messages used up the room of absent clients, and messages for another absent
/// client were dropped.
#[test]
fn expired_messages_make_room_for_other_absent_clients() {
    let limits = Limits {
        queue_bytes_max: 2000,
        queue_bytes_total_max: 4000,
        ..Limits::default()
    };
    let (broker, now) = start(limits);
    Peer::leave_subscribed(&broker, "a", now);
    let mut other = Peer::new(&broker, &Hello::new("other"), now);
    other.subscribe("fresh", Q::AtLeastOnce, now);
    other.lose(now);
    for _ in 0..10 {
        send_expiring(&broker, "t", Some(now + SECOND), now);
    }
    let before = broker.stats().dropped;
    send_expiring(&broker, "fresh", None, now);
    assert_eq!(broker.stats().dropped, before + 1, "no room");
    let deadline = |at| broker.lock().run_deadlines(at);
    assert_eq!(deadline(now), Some(now + SECOND));
    let (later, end) = (now + SECOND, now + 1000 * SECOND);
    assert_eq!(deadline(later), Some(end), "the end of the sessions");
    assert_eq!(broker.stats().queued_bytes, 0);
    send_expiring(&broker, "fresh", None, later);
    let mut other = Peer::new(&broker, &Hello::new("other"), later);
    assert_eq!(other.payloads(), ["fresh"]);
}

#[test]
fn expired_messages_are_removed_once_a_second_and_recorded() {
    let (log, now) = (TestLog::new(true), Instant::now());
    let start = |at| restored(&log, Limits::default(), Arc::new(NoService), now, at);
    let after = |ms| now + Duration::from_millis(ms);
    let recorded = || {
        let recovery = log.recovery();
        let sessions = recovery.sessions.values();
        sessions.map(|it| it.messages.len()).sum::<usize>()
    };
    let broker = start(now);
    Peer::leave_subscribed(&broker, "a", now);
    for ms in [1000, 1500, 5000] {
        send_expiring(&broker, "t", Some(after(ms)), now);
    }
    for (ms, next_ms, left) in [(0, 1000, 3), (1000, 2000, 2), (2000, 5000, 1)] {
        let next = broker.lock().run_deadlines(after(ms));
        assert_eq!((next, recorded()), (Some(after(next_ms)), left), "{ms} ms");
    }
    // The next run continues.
    let broker = start(after(2000));
    assert_eq!(broker.lock().next_deadline(), Some(after(5000)));
    // A connected client is sent its messages, so that no search is due.
    let a = Peer::new(&broker, &Hello::new("a"), after(3000));
    assert_eq!(broker.lock().next_deadline(), None);
    a.lose(after(3000));
}
