//! Restarts with other limits than before.

use std::time::Instant;

use wire::{DisconnectReasonCode, Packet};

use super::{Life, SECOND, message};
use crate::{Limits, Message, QoS, testing::*};

#[test]
fn exchange_room_survives_a_restart_with_a_lower_limit() {
    let (mut life, now) = Life::new();
    let mut peer = Peer::new(&life.broker, &Hello::new("a"), now);
    assert_eq!(peer.begin_exchanges(1..21, now), None);
    life.kill_with(limited(|it| it.receive_max = 2), now + SECOND);
    let mut peer = Peer::new(&life.broker, &Hello::new("a"), now + SECOND);
    assert!(peer.connack.session_present);
    assert_eq!(peer.begin_exchanges(21..23, now + SECOND), None);
    peer.lose(now + SECOND);
    let mut peer = Peer::new(&life.broker, &Hello::new("a"), now + SECOND);
    assert_eq!(peer.begin_exchanges(23..25, now + SECOND), None);
    peer.lose(now + SECOND);
    let mut peer = Peer::new(&life.broker, &Hello::new("a"), now + SECOND);
    let full = Some(DisconnectReasonCode::ReceiveMaximumExceeded);
    assert_eq!(
        peer.begin_exchanges(25..26, now + SECOND),
        full,
        "forgotten exchanges do not pile up"
    );
    life.broker.set_limits(limited(|it| it.receive_max = 15));
    let mut peer = Peer::new(&life.broker, &Hello::new("a"), now + SECOND);
    assert_eq!(peer.begin_exchanges(26..41, now + SECOND), None);
}

/// Stores more than [`small_limits`] allow: three sessions with messages, and retained messages.
/// The first session has a message in flight.
fn store_more(life: &Life, now: Instant) {
    for (number, client) in ["a", "b", "c"].into_iter().enumerate() {
        let expiry_s = 1000 - number as u32 * 100;
        let mut peer = Peer::new(&life.broker, &Hello::new(client).expiry(expiry_s), now);
        peer.subscribe("t", Q::ExactlyOnce, now);
        peer.subscribe("u/+", Q::ExactlyOnce, now);
        if client == "a" {
            life.publish(message("sent", QoS::ExactlyOnce), now);
            assert_eq!(peer.payloads().len(), 1);
        }
        peer.lose(now);
    }
    for number in 0..5 {
        life.publish(message(&number.to_string(), QoS::AtLeastOnce), now);
        let mut retained = Message::new(format!("r/{number}"), "x", QoS::AtLeastOnce);
        retained.retain = true;
        life.publish(retained, now);
    }
}

fn small_limits() -> Limits {
    Limits {
        sessions_max: 2,
        subscriptions_per_session_max: 1,
        queue_bytes_max: 600,
        retained_max: 3,
        session_expiry_max_s: 950,
        ..Limits::default()
    }
}

#[test]
fn lower_limits_after_a_restart_keep_what_fits() {
    let (mut life, now) = Life::new();
    store_more(&life, now);
    life.kill_with(small_limits(), now);
    let held = |life: &Life| {
        let it = life.broker.stats();
        [it.sessions, it.subscriptions, it.retained, it.queued_bytes]
    };
    let before = held(&life);
    assert_eq!(before[..3], [2, 2, 3]);
    assert!(before[3] <= 2 * 600 && before[3] > 600, "{before:?}");
    assert!(life.broker.stats().dropped > 0);
    // Dropped state stays dropped, even if the limits are raised again.
    life.kill(now);
    assert_eq!(held(&life), before);
}

#[test]
fn message_in_flight_beyond_a_lower_limit_is_completed() {
    let (mut life, now) = Life::new();
    store_more(&life, now);
    life.kill_with(small_limits(), now);
    let mut a = Peer::new(&life.broker, &Hello::new("a"), now);
    assert!(
        a.connack.session_present,
        "the session that would have lasted longest"
    );
    assert_packets!(a.receive(), [Packet::Publish(sent), ..] if sent.dup);
    // Even the message in flight does not fit. Its exchange is completed without it.
    life.kill_with(limited(|it| it.queue_bytes_max = 10), now);
    let mut a = Peer::new(&life.broker, &Hello::new("a"), now);
    assert_packets!(a.receive(), [Packet::PubRel(_)]);
}

#[test]
fn lowered_session_expiry_survives_a_restart() {
    let (mut life, now) = Life::new();
    store_more(&life, now);
    life.kill_with(small_limits(), now);
    life.kill(now);
    let sessions_at = |life: &Life, seconds| {
        life.broker.lock().run_deadlines(now + seconds * SECOND);
        life.broker.stats().sessions
    };
    assert_eq!(sessions_at(&life, 949), 1, "the session of `b` ended");
    assert_eq!(sessions_at(&life, 951), 0);
}
