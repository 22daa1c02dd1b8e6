//! Deadlines of messages and sessions after a restart, by the wall clock.

use std::sync::Arc;

use super::{Life, SECOND, message};
use crate::{Broker, NoService, Options, QoS, clock::Clock, testing::*};

#[test]
fn messages_expire_while_the_broker_is_down() {
    let (mut life, now) = Life::new();
    Peer::leave_subscribed(&life.broker, "a", now);
    for (payload, seconds) in [("short", 2), ("long", 60)] {
        let mut message = message(payload, QoS::AtLeastOnce);
        message.expires = Some(now + seconds * SECOND);
        life.publish(message, now);
    }
    let later = now + 10 * SECOND;
    life.kill(later);
    let mut peer = Peer::new(&life.broker, &Hello::new("a"), later);
    let messages = peer.messages();
    let [only] = &messages[..] else {
        panic!("{messages:?}")
    };
    assert_eq!(only.payload, "long");
    assert_eq!(properties(only).message_expiry_interval, Some(50));
}

#[test]
fn sessions_expire_by_the_wall_clock() {
    let (mut life, now) = Life::new();
    let present = |life: &Life, client: &str, at| {
        let peer = Peer::new(&life.broker, &Hello::new(client).expiry(0), at);
        peer.connack.session_present
    };
    Peer::new(&life.broker, &Hello::new("away").expiry(20), now).lose(now);
    Peer::new(&life.broker, &Hello::new("short").expiry(5), now).lose(now);
    let connected = Peer::new(&life.broker, &Hello::new("connected").expiry(20), now);
    let brief = Peer::new(&life.broker, &Hello::new("brief").expiry(0), now);
    assert_eq!(life.broker.sessions().len(), 4);
    drop((connected, brief));
    // The connection of this session ends at the restart, and its expiry interval begins then.
    // Another restart must not begin it again.
    life.kill(now + 10 * SECOND);
    assert_eq!(life.broker.sessions().len(), 3);
    life.kill(now + 15 * SECOND);
    life.broker.lock().run_deadlines(now + 15 * SECOND);
    assert_eq!(life.broker.sessions().len(), 2);
    let before_the_end = now + 29 * SECOND;
    life.broker.lock().run_deadlines(before_the_end);
    assert!(!present(&life, "away", before_the_end));
    assert!(!present(&life, "short", before_the_end));
    assert!(!present(&life, "brief", before_the_end));
    assert_eq!(life.broker.sessions().len(), 4);
    life.kill(before_the_end);
    life.broker.lock().run_deadlines(now + 31 * SECOND);
    assert_eq!(
        life.broker.sessions(),
        Vec::new(),
        "its session ends at second 30"
    );
    let mut ended = life.service.ended.lock().unwrap().clone();
    ended.sort_unstable();
    assert_eq!(ended.len(), 3, "each session once: {ended:?}");
}

#[test]
fn wall_clock_set_back_does_not_extend_sessions() {
    let (mut life, now) = Life::new();
    let lost = now + 100 * SECOND;
    Peer::new(&life.broker, &Hello::new("a").expiry(5), now).lose(lost);
    // The wall clock shows the time of the beginning again.
    life.kill(now);
    life.broker.lock().run_deadlines(now + 4 * SECOND);
    assert_eq!(life.broker.sessions().len(), 1);
    life.broker.lock().run_deadlines(now + 5 * SECOND);
    assert_eq!(life.broker.sessions().len(), 0);
}

/// Regression: in a backup by a machine whose clock was behind, all connections had ended at the
/// time of that clock, so a restore ended the sessions.
#[test]
fn copy_by_a_late_clock_keeps_the_ends_of_connections() {
    // In the year 2100, later than the clock of the machine that makes the copy.
    let ahead_ms = 4_102_444_800_000;
    let (life, now) = Life::new();
    life.broker.lock().set_clock(Clock::at(now, ahead_ms));
    Peer::new(&life.broker, &Hello::new("away").expiry(20), now).lose(now);
    let connected = Peer::new(&life.broker, &Hello::new("connected").expiry(20), now);
    let mut recovery = life.log.recovery();
    recovery.end_connections(ahead_ms + 5);
    let copy = Broker::restore(Options::default(), Arc::new(NoService), recovery);
    let saved = recovered(&image(&copy, 1 << 20));
    let ends: Vec<_> = saved.sessions.values().map(|it| it.detached_ms).collect();
    assert_eq!(ends, [Some(ahead_ms), Some(ahead_ms + 5)]);
    drop(connected);
}

#[test]
fn wall_clock_step_forward_expires_nothing_early() {
    let (mut life, began) = Life::new();
    let mut peer = Peer::new(&life.broker, &Hello::new("a").expiry(20), began);
    peer.subscribe("t", Q::AtLeastOnce, began);
    // A gateway without a clock learns the time: from here on the wall clock is a hundred seconds
    // ahead.
    let step = 100 * SECOND;
    let wall_ms = WALL_MS + (10 * SECOND + step).as_millis() as u64;
    let now = began + 10 * SECOND;
    life.broker.lock().set_clock(Clock::at(now, wall_ms));
    peer.lose(now);
    let mut message = message("waits", QoS::AtLeastOnce);
    message.expires = Some(now + 50 * SECOND);
    life.publish(message, now);
    life.began = began - step;
    let later = now + 15 * SECOND;
    life.kill(later);
    life.broker.lock().run_deadlines(later);
    let mut peer = Peer::new(&life.broker, &Hello::new("a"), later);
    assert!(peer.connack.session_present);
    let messages = peer.messages();
    let [only] = &messages[..] else {
        panic!("{messages:?}")
    };
    assert_eq!(properties(only).message_expiry_interval, Some(35));
}
