//! Wills after a restart.

use std::time::Instant;

use wire::DisconnectReasonCode;

use super::{Life, SECOND};
use crate::{limits::WILL_GRACE, testing::*};

/// A client that subscribed to wills.
fn with_listener() -> (Life, Peer, Instant) {
    let (life, now) = Life::new();
    let mut listener = Peer::new(&life.broker, &Hello::new("l"), now);
    listener.subscribe("will", Q::AtLeastOnce, now);
    (life, listener, now)
}

#[test]
fn will_waits_for_its_client_after_a_restart() {
    let (mut life, listener, now) = with_listener();
    // Five wills: connected at the crash and without delay; lost long ago; disconnected normally;
    // with a delay above the grace period; and one whose client returns in time.
    let at_once = Peer::new(&life.broker, &Hello::new("a").will("will", "a", 0), now);
    Peer::new(&life.broker, &Hello::new("b").will("will", "b", 5), now).lose(now);
    Peer::new(&life.broker, &Hello::new("c").will("will", "c", 0), now)
        .disconnect(DisconnectReasonCode::NormalDisconnection, now);
    let late = Peer::new(&life.broker, &Hello::new("d").will("will", "d", 60), now);
    let back = Peer::new(&life.broker, &Hello::new("e").will("will", "e", 0), now);
    drop((listener, at_once, late, back));
    let restart = now + 6 * SECOND;
    life.kill(restart);
    let received = |life: &Life, at: Instant| {
        life.broker.lock().run_deadlines(at);
        let mut listener = Peer::new(&life.broker, &Hello::new("l"), at);
        let messages = listener.read_all(at).into_iter();
        let payloads = messages.map(|message| {
            assert_eq!(properties(&message).user_properties.len(), 1);
            String::from_utf8(message.payload.to_vec()).unwrap()
        });
        payloads.collect::<Vec<_>>()
    };
    let nothing: [String; 0] = [];
    assert_eq!(received(&life, restart), nothing);
    let before = restart + WILL_GRACE - SECOND;
    assert_eq!(received(&life, before), nothing);
    Peer::new(&life.broker, &Hello::new("e"), before);
    let mut both = received(&life, restart + WILL_GRACE);
    both.sort();
    assert_eq!(both, ["a", "b"]);
    life.kill(restart + WILL_GRACE);
    assert_eq!(
        received(&life, restart + 59 * SECOND),
        nothing,
        "each will once"
    );
    assert_eq!(received(&life, restart + 61 * SECOND), ["d"]);
}

#[test]
fn session_expired_during_downtime_publishes_its_will() {
    let (mut life, _listener, now) = with_listener();
    let hello = Hello::new("a").expiry(5).will("will", "a", 1000);
    Peer::new(&life.broker, &hello, now).lose(now);
    let restart = now + 6 * SECOND;
    life.kill(restart);
    life.broker.lock().run_deadlines(restart);
    let mut listener = Peer::new(&life.broker, &Hello::new("l"), restart);
    assert_eq!(listener.payloads(), ["a"]);
    life.kill(restart);
    assert_eq!(life.broker.sessions().len(), 1);
}

#[test]
fn will_survives_a_crash_after_a_disconnect_with_will() {
    let (mut life, _listener, now) = with_listener();
    let mut peer = Peer::new(&life.broker, &Hello::new("a").will("will", "a", 50), now);
    let reason = DisconnectReasonCode::DisconnectWithWillMessage;
    peer.send(&[disconnect(reason, 0)], now);
    // The crash comes before the connection's task has seen the end.
    life.kill(now);
    life.broker.lock().run_deadlines(now);
    let mut listener = Peer::new(&life.broker, &Hello::new("l"), now);
    assert_eq!(listener.payloads(), ["a"]);
}

#[test]
fn wills_of_a_shutdown_are_sent_after_the_next_start() {
    let (mut life, listener, now) = with_listener();
    let peer = Peer::new(&life.broker, &Hello::new("a").will("will", "a", 0), now);
    life.broker.lock().shut_down();
    listener.lose(now);
    peer.lose(now);
    life.kill(now);
    life.broker.lock().run_deadlines(now + WILL_GRACE);
    let mut listener = Peer::new(&life.broker, &Hello::new("l"), now + WILL_GRACE);
    assert_eq!(listener.payloads(), ["a"]);
}

#[test]
fn will_of_a_session_without_expiry_is_published_at_a_shutdown() {
    let (mut life, listener, now) = with_listener();
    let hello = |client, delay_s| Hello::new(client).expiry(0).will("will", client, delay_s);
    let before = Peer::new(&life.broker, &hello("a", 0), now);
    let after = Peer::new(&life.broker, &hello("b", 60), now);
    life.broker.lock().shut_down();
    before.lose(now);
    listener.lose(now);
    after.lose(now);
    life.kill(now);
    let mut listener = Peer::new(&life.broker, &Hello::new("l"), now);
    assert_eq!(listener.payloads(), ["a", "b"]);
}

/// Regression: a stop lost the will of a client that had connected while the disk was full.
#[test]
fn will_is_recorded_at_a_shutdown_if_the_log_has_room_again() {
    let (mut life, listener, now) = with_listener();
    Peer::new(&life.broker, &Hello::new("a"), now).lose(now);
    life.log.set_full(true);
    let peer = Peer::new(&life.broker, &Hello::new("a").will("will", "a", 0), now);
    life.log.set_full(false);
    life.broker.lock().shut_down();
    listener.lose(now);
    peer.lose(now);
    life.kill(now);
    life.broker.lock().run_deadlines(now + WILL_GRACE);
    let mut listener = Peer::new(&life.broker, &Hello::new("l"), now + WILL_GRACE);
    assert_eq!(listener.payloads(), ["a"]);
}
