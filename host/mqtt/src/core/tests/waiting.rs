//! Packets that wait in the dispatch, or that wait behind such packets.

use std::time::Instant;

use wire::{DisconnectReasonCode, Packet};

use super::turns::{subscribe_all, with_slow_peer};
use crate::{
    Limits,
    dispatch::Turn,
    limits::{WORK_PER_TURN_MAX, work},
    testing::*,
};

/// A PUBLISH with QoS 3, which does not exist.
const MALFORMED: [u8; 8] = [0x36, 6, 0, 1, b't', 0, 1, 0];

/// An AUTH without properties.
const AUTH: [u8; 2] = [0xF0, 0];

#[test]
fn violation_behind_a_cut_turn_ends_the_connection() {
    let (broker, now) = (broker(Limits::default()), Instant::now());
    let mut peer = Peer::new(&broker, &Hello::new("a"), now);
    // The last of these filters uses up the work of the turn.
    let filters: Vec<_> = (0..126).map(|number| format!("t/{number}")).collect();
    let mut buffer = bytes(&[subscribe_all(&filters)]);
    buffer.extend_from_slice(&MALFORMED);
    assert_eq!(peer.turn(&mut buffer, now), Turn::Cut);
    assert_eq!(peer.turn(&mut buffer, now), Turn::Over);
    peer.assert_disconnected(DisconnectReasonCode::MalformedPacket);
}

#[test]
fn violation_does_not_wait_for_retained_messages() {
    let now = Instant::now();
    let (_broker, mut peer) = with_slow_peer(1000, now);
    let mut buffer = bytes(&[subscribe("r/#", Q::AtLeastOnce)]);
    buffer.extend_from_slice(&MALFORMED);
    assert_eq!(peer.turns(&buffer, now).0, Turn::Over);
    peer.assert_disconnected(DisconnectReasonCode::MalformedPacket);
}

#[test]
fn auth_that_uses_up_the_work_of_a_turn_is_handled() {
    const FILTERS: usize = 124;
    let (broker, now) = (broker(Limits::default()), Instant::now());
    let mut peer = Peer::new(&broker, &Hello::new("a"), now);
    // It is handled in two steps.
    let unsubscribed = 2 * work::PACKET + work::SUBSCRIPTION * FILTERS as u64;
    let pings = WORK_PER_TURN_MAX - work::PACKET - unsubscribed;
    let mut packets = vec![ping(); pings as usize];
    packets.push(unsubscribe(&["none"; FILTERS]));
    let mut buffer = bytes(&packets);
    buffer.extend_from_slice(&AUTH);
    assert_eq!(peer.turns(&buffer, now).0, Turn::Authenticate);
}

/// Only the acknowledgement makes room for the PUBLISH before the AUTH.
#[test]
fn acknowledgement_behind_a_waiting_auth_is_handled() {
    let limits = Limits {
        queue_bytes_max: 2000,
        queue_bytes_reserve: 0,
        ..Limits::default()
    };
    let (broker, now) = start(limits);
    let mut peer = Peer::new(&broker, &Hello::new("a").window(1), now);
    peer.subscribe("own", Q::AtLeastOnce, now);
    let payload = "x".repeat(400);
    let message = |id| Packet::Publish(publish("own", Q::AtLeastOnce, id, &payload));
    let mut buffer = bytes(&[message(1), message(2), message(3)]);
    buffer.extend_from_slice(&AUTH);
    buffer.extend_from_slice(&bytes(&[subscribe_all(&["late"])]));
    assert_eq!(peer.turns(&buffer, now).0, Turn::Paused);
    let sent = peer.messages();
    assert_eq!(sent.len(), 1);
    let turn = peer.send(&[puback(sent[0].pkid)], now);
    assert_eq!(turn, Turn::Authenticate);
    // The SUBSCRIBE waits for the result.
    let is_suback = |it: &Packet| matches!(it, Packet::SubAck(_));
    assert!(!peer.receive().iter().any(is_suback));
    peer.send(&[], now);
    assert!(peer.receive().iter().any(is_suback));
}
