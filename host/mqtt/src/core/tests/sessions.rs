//! Expiry, resumption and takeover of sessions, and wills.

use std::time::{Duration, Instant};

use statehouse_protocol::SessionId;
use wire::DisconnectReasonCode;

use crate::{Broker, Limits, core::ConnectRefusal, dispatch::Turn, testing::*};

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn connack_announces_limits_and_features() {
    let (broker, now) = start(limited(|it| it.keep_alive_max_s = 30));
    let peer = Peer::new(&broker, &Hello::new("").expiry(u32::MAX), now);
    let properties = peer.connack.properties.unwrap();
    assert!(!peer.connack.session_present);
    assert_eq!(
        properties.session_expiry_interval,
        Some(7 * 24 * 3600),
        "an unlimited expiry is reduced to the limit"
    );
    assert_eq!(properties.receive_max, Some(1024));
    assert_eq!(properties.max_packet_size, Some(2 << 20));
    assert_eq!(properties.topic_alias_max, Some(32));
    let available = [
        properties.shared_subscription_available,
        properties.subscription_identifiers_available,
        properties.wildcard_subscription_available,
        properties.retain_available,
    ];
    assert_eq!(available, [None; 4], "all features are available");
    assert_eq!(properties.max_qos, None, "all QoS levels are available");
    assert_eq!(properties.server_keep_alive, Some(30));
    assert_eq!(
        properties.assigned_client_identifier.as_deref(),
        Some(&*peer.origin.client)
    );
    assert!(peer.origin.client.starts_with("auto-"));
    let other = Peer::new(&broker, &Hello::new(""), now);
    assert_ne!(other.origin.client, peer.origin.client);
    assert_eq!(
        other.connack.properties.unwrap().session_expiry_interval,
        None,
        "granted as requested"
    );
}

#[test]
fn resumed_session_receives_messages_queued_while_absent() {
    let (broker, now) = start(Limits::default());
    let mut a = Peer::new(&broker, &Hello::new("a"), now);
    a.subscribe("t", Q::AtLeastOnce, now);
    a.disconnect(DisconnectReasonCode::NormalDisconnection, now);
    let mut b = Peer::new(&broker, &Hello::new("b"), now);
    for (qos, id) in [(Q::AtLeastOnce, 1), (Q::AtMostOnce, 0), (Q::ExactlyOnce, 2)] {
        b.publish("t", qos, id, &format!("{id}"), now);
    }
    let mut a = Peer::new(&broker, &Hello::new("a"), now + 999 * SECOND);
    assert!(a.connack.session_present);
    assert_eq!(a.payloads(), ["1", "2"], "QoS 0 is not kept");
}

#[test]
fn session_ends_at_its_expiry() {
    let (broker, now) = start(Limits::default());
    let mut a = Peer::new(&broker, &Hello::new("a").expiry(5), now);
    a.subscribe("t", Q::AtLeastOnce, now);
    a.lose(now);
    for (seconds, next, left) in [(4, Some(now + 5 * SECOND), 1), (5, None, 0)] {
        let at = broker.lock().run_deadlines(now + seconds * SECOND);
        let stats = broker.stats();
        let expected = (next, left, left);
        let actual = (at, stats.sessions, stats.subscriptions);
        assert_eq!(actual, expected, "after {seconds} s");
    }
    let a = Peer::new(&broker, &Hello::new("a").expiry(0), now + 6 * SECOND);
    assert!(!a.connack.session_present);
    a.lose(now);
    assert_eq!(
        broker.stats().sessions,
        0,
        "an expiry of zero ends it with the connection"
    );
}

#[test]
fn disconnect_can_change_the_expiry_but_not_from_zero() {
    let reason = DisconnectReasonCode::NormalDisconnection;
    let disconnect = |expiry_s| [disconnect(reason, expiry_s)];
    let (broker, now) = start(Limits::default());
    let mut a = Peer::new(&broker, &Hello::new("a").expiry(1), now);
    a.send(&disconnect(9), now);
    a.lose(now);
    let next = broker.lock().run_deadlines(now + 8 * SECOND);
    assert_eq!(next, Some(now + 9 * SECOND));
    let mut a = Peer::new(&broker, &Hello::new("a").expiry(1), now);
    a.send(&disconnect(0), now);
    a.lose(now);
    assert_eq!(broker.stats().sessions, 0);
    let mut a = Peer::new(&broker, &Hello::new("a").expiry(0), now);
    assert_eq!(a.send(&disconnect(9), now), Turn::Over);
    a.assert_disconnected(DisconnectReasonCode::ProtocolError);
}

#[test]
fn clean_start_discards_the_session() {
    let (broker, now) = start(Limits::default());
    Peer::leave_subscribed(&broker, "a", now);
    let a = Peer::new(&broker, &Hello::new("a").clean(), now);
    assert!(!a.connack.session_present);
    assert_eq!(broker.stats().subscriptions, 0);
}

#[test]
fn takeover_disconnects_and_ignores_the_old_connection() {
    let (broker, now) = start(Limits::default());
    let mut old = Peer::new(&broker, &Hello::new("a"), now);
    old.subscribe("t", Q::AtLeastOnce, now);
    let mut new = Peer::new(&broker, &Hello::new("a"), now);
    assert!(new.connack.session_present);
    old.assert_disconnected(DisconnectReasonCode::SessionTakenOver);
    assert_eq!(old.publish("t", Q::AtMostOnce, 0, "late", now), Turn::Over);
    old.lose(now);
    assert_eq!(new.payloads(), [""; 0]);
    new.publish("t", Q::AtMostOnce, 0, "here", now);
    assert_eq!(
        new.payloads(),
        ["here"],
        "the end of the old connection did not affect the new one"
    );
    assert_eq!(broker.stats().connections, 1);
}

/// A client with a will, and a subscriber to it.
fn with_will(delay_s: u32, expiry_s: u32) -> (Peer, Peer, Instant) {
    let (broker, now) = start(Limits::default());
    let mut listener = Peer::new(&broker, &Hello::new("listener"), now);
    listener.subscribe("will", Q::AtLeastOnce, now);
    let hello = Hello::new("owner").expiry(expiry_s);
    let owner = Peer::new(&broker, &hello.will("will", "gone", delay_s), now);
    (owner, listener, now)
}

#[test]
fn a_will_is_sent_when_the_connection_is_lost() {
    let (owner, mut listener, now) = with_will(0, 1000);
    owner.lose(now);
    let messages = listener.messages();
    assert_eq!(messages[0].payload, "gone");
    assert_eq!(
        properties(&messages[0]).user_properties,
        [("w".to_owned(), "1".to_owned())]
    );
}

#[test]
fn normal_disconnect_drops_the_will_and_another_sends_it() {
    let (owner, mut listener, now) = with_will(0, 1000);
    owner.disconnect(DisconnectReasonCode::NormalDisconnection, now);
    assert_eq!(listener.payloads(), [""; 0]);
    let (owner, mut listener, now) = with_will(0, 1000);
    owner.disconnect(DisconnectReasonCode::DisconnectWithWillMessage, now);
    assert_eq!(listener.payloads(), ["gone"]);
}

#[test]
fn delayed_will_is_sent_once_after_its_delay() {
    let (owner, mut listener, now) = with_will(10, 1000);
    let broker = owner.broker.clone();
    owner.lose(now);
    let next = broker.lock().run_deadlines(now + 9 * SECOND);
    assert_eq!(next, Some(now + 10 * SECOND));
    assert_eq!(listener.payloads(), [""; 0]);
    let next = broker.lock().run_deadlines(now + 10 * SECOND);
    assert_eq!(next, Some(now + 1000 * SECOND));
    assert_eq!(listener.payloads(), ["gone"]);
    broker.lock().run_deadlines(now + 1001 * SECOND);
    assert_eq!(listener.payloads(), [""; 0]);
}

/// No limit but the end of the session shortens the delay [MQTT-3.1.3-9].
#[test]
fn will_is_sent_after_a_delay_of_days() {
    const HOUR: Duration = Duration::from_secs(3600);
    let (owner, mut listener, now) = with_will(48 * 3600, 7 * 24 * 3600);
    let broker = owner.broker.clone();
    owner.lose(now);
    broker.lock().run_deadlines(now + 30 * HOUR);
    assert_eq!(listener.payloads(), [""; 0]);
    broker.lock().run_deadlines(now + 48 * HOUR);
    assert_eq!(listener.payloads(), ["gone"]);
}

#[test]
fn a_resume_in_time_cancels_a_delayed_will() {
    let (owner, mut listener, now) = with_will(10, 1000);
    let broker = owner.broker.clone();
    owner.lose(now);
    let back = Peer::new(&broker, &Hello::new("owner"), now + 9 * SECOND);
    let later = now + 100 * SECOND;
    broker.lock().run_deadlines(later);
    back.disconnect(DisconnectReasonCode::DisconnectWithWillMessage, later);
    assert_eq!(listener.payloads(), [""; 0]);
}

#[test]
fn session_end_sends_the_will_before_its_delay() {
    let (owner, mut listener, now) = with_will(10, 5);
    let broker = owner.broker.clone();
    owner.lose(now);
    broker.lock().run_deadlines(now + 5 * SECOND);
    assert_eq!(listener.payloads(), ["gone"]);
    let (owner, mut listener, now) = with_will(10, 0);
    owner.lose(now);
    assert_eq!(listener.payloads(), ["gone"]);
    // A clean start ends the session as well (section 3.1.4); a takeover that resumes it does not.
    let (owner, mut listener, now) = with_will(10, 1000);
    let again = Hello::new("owner").will("will", "two", 10);
    let _resumed = Peer::new(&owner.broker, &again, now);
    assert_eq!(listener.payloads(), [""; 0]);
    let _clean = Peer::new(&owner.broker, &Hello::new("owner").clean(), now);
    assert_eq!(listener.payloads(), ["two"]);
}

#[test]
fn shutdown_sends_no_wills() {
    let (mut owner, mut listener, now) = with_will(0, 0);
    owner.broker.lock().shut_down();
    owner.assert_disconnected(DisconnectReasonCode::ServerShuttingDown);
    owner.lose(now);
    assert_eq!(listener.payloads(), [""; 0]);
}

#[test]
fn sessions_are_bounded() {
    let (broker, now) = start(limited(|it| it.sessions_max = 1));
    let a = Peer::new(&broker, &Hello::new("a"), now);
    let refused = connect_as(None, &broker, "b", now).unwrap_err();
    assert_eq!(refused.0, crate::ReasonCode::QUOTA_EXCEEDED);
    a.lose(now);
    let a = Peer::new(&broker, &Hello::new("a"), now);
    assert!(a.connack.session_present);
}

/// Connects as this user, or anonymously. Returns the number of the session.
fn connect_as(
    user: Option<&str>,
    broker: &Broker,
    client: &str,
    now: Instant,
) -> Result<SessionId, ConnectRefusal> {
    let accepted = accept(broker, &Hello::new(client), user, now)?;
    Ok(accepted.origin.session)
}

#[test]
fn anonymous_session_is_claimed_by_the_first_user() {
    let (broker, now) = start(Limits::default());
    let mut sessions = Vec::new();
    for user in [None, None, Some("anna"), Some("anna"), None, Some("bert")] {
        sessions.push(connect_as(user, &broker, "a", now).unwrap());
    }
    let first = sessions[0];
    assert_eq!(sessions[1..4], [first; 3]);
    // An anonymous client must not resume the session of anna, so it begins a new one. The next
    // user claims that one.
    assert_ne!(sessions[4], first);
    assert_eq!(sessions[5], sessions[4]);
}

/// Regression: the broker ended the old session first and then had no place for the new one.
#[test]
fn returning_client_keeps_its_place_under_a_lowered_limit() {
    let (broker, now) = start(Limits::default());
    let _a = Peer::new(&broker, &Hello::new("a"), now);
    let b = Peer::new(&broker, &Hello::new("b"), now);
    broker.set_limits(limited(|it| it.sessions_max = 1));
    // Takes over the open connection.
    let _a = Peer::new(&broker, &Hello::new("a").clean(), now);
    b.lose(now);
    let connect = |client, user| connect_as(user, &broker, client, now);
    assert!(
        connect("c", Some("c")).is_err(),
        "a new client has no place"
    );
    // A client also keeps its place if another user begins the session again.
    assert!(connect("b", Some("another")).is_ok());
    assert_eq!(broker.stats().sessions, 2);
}

/// Regression: the timers had not run yet, and an expired session was resumed.
#[test]
fn expired_session_is_not_resumed_when_timers_are_late() {
    let (broker, now) = start(Limits::default());
    for (seconds, present) in [(1, true), (2, false), (3, false)] {
        Peer::new(&broker, &Hello::new("a").clean().expiry(2), now).lose(now);
        let again = Peer::new(&broker, &Hello::new("a"), now + seconds * SECOND);
        assert_eq!(again.connack.session_present, present, "after {seconds} s");
    }
}

/// Regression: the timers had not run yet, and a resume cancelled a will that was already due.
#[test]
fn late_resume_does_not_cancel_a_due_will() {
    let (owner, mut listener, now) = with_will(10, 1000);
    let broker = owner.broker.clone();
    owner.lose(now);
    Peer::new(&broker, &Hello::new("owner"), now + 11 * SECOND);
    assert_eq!(listener.payloads(), ["gone"]);
}
