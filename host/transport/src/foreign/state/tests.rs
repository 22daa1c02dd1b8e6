//! The output without a connection.

use bytes::Bytes;

use super::*;

fn message(topic: &'static str, payload: &'static str) -> Message {
    Message {
        topic: topic.into(),
        payload: payload.into(),
        ..Message::default()
    }
}

fn ack(reason: PubAckReason) -> PubAck {
    PubAck {
        pkid: 1,
        reason,
        properties: None,
    }
}

fn accepted(session_present: bool) -> Accepted {
    Accepted {
        session_present,
        retain_available: true,
    }
}

fn watcher() -> Peer {
    super::super::identity::named("watcher")
}

fn oldest(state: &State) -> u64 {
    let (number, _) = state.outlet.iter().next().unwrap();
    number
}

#[test]
fn a_puback_reports_whether_a_watcher_is_subscribed() {
    let mut state = State::default();
    let topic = "clients/x/command/notify/6B";
    for _ in 0..2 {
        state.take(Outbound::Notification(watcher(), message(topic, "n"), None));
    }
    state.take(Outbound::Response(message("answers", "a"), None));
    let first = oldest(&state);
    assert_eq!(
        state.acknowledged(first, &ack(PubAckReason::Success)),
        Some(Watcher::Subscribed(watcher()))
    );
    let no_subscriber = ack(PubAckReason::NoMatchingSubscribers);
    assert_eq!(
        state.acknowledged(first + 1, &no_subscriber),
        Some(Watcher::Unsubscribed(watcher(), b"k".to_vec()))
    );
    assert_eq!(state.acknowledged(first + 2, &no_subscriber), None);
    let figures = state.figures();
    assert_eq!((figures.unheard, figures.outstanding_bytes), (1, 0));
}

#[test]
fn a_message_that_the_broker_refuses_is_counted_and_removed() {
    let mut state = State::default();
    state.take(Outbound::Response(message("answers", "a"), None));
    let number = oldest(&state);
    let refused = ack(PubAckReason::NotAuthorized);
    assert_eq!(state.acknowledged(number, &refused), None);
    assert_eq!(state.figures().refused, 1);
    assert_eq!(state.figures().outstanding, 0);
}

#[test]
fn the_response_to_a_redelivery_is_queued_once() {
    let mut state = State::default();
    let answer = || Outbound::Response(message("answers", "+OK\r\n"), None);
    state.take(answer());
    state.take(answer());
    assert_eq!(state.outlet.len(), 2, "two requests, two responses");
    state.lost();
    for _ in 0..3 {
        state.take(answer());
    }
    assert_eq!(
        state.outlet.len(),
        3,
        "two redeliveries and a third request"
    );
    // If the broker has lost the session it redelivers nothing, so this is a new request.
    state.lost();
    state.connected(accepted(false), false);
    state.take(answer());
    assert_eq!(state.outlet.len(), 4);
}

#[test]
fn a_response_that_makes_the_broker_disconnect_is_not_repeated() {
    let mut state = State::default();
    let answer = |topic| Outbound::Response(message(topic, "+OK\r\n"), None);
    state.take(answer("answers/evil"));
    let evil = state.outlet.remove(1).unwrap();
    state.hopeless(&evil, "the broker closed it");
    assert_eq!(state.figures().refused, 1);
    state.lost();
    state.connected(accepted(true), false);
    // The broker redelivers the request, because it was not acknowledged.
    state.take(answer("answers/evil"));
    assert_eq!(state.outlet.len(), 0);
    state.take(answer("answers/good"));
    assert_eq!(state.outlet.len(), 1);
}

#[test]
fn a_refused_response_is_repeated_only_if_it_was_too_large() {
    for (code, repeated) in [(0x95, 1), (0x96, 0)] {
        let mut state = State::default();
        let answer = || Outbound::Response(message("answers", "+OK\r\n"), None);
        state.take(answer());
        let refused = state.outlet.remove(1).unwrap();
        state.unacceptable(&refused, code);
        assert_eq!(state.figures().refused, 1);
        // The outlet replaces one that is too large.
        state.take(answer());
        assert_eq!(state.outlet.len(), repeated, "{code:#x}");
    }
}

#[test]
fn connections_lost_at_once_are_logged_once_per_reason() {
    let mut state = State::default();
    let mut logged = Vec::new();
    for why in ["closed", "reset", "closed", "reset"] {
        logged.push((state.note_attached(), state.note_loss(why)));
    }
    assert_eq!(
        logged,
        [(true, true), (false, true), (false, false), (false, false)]
    );
    assert!(state.note_loss("refused") && !state.note_loss("refused"));
    assert!(!state.note_attached() && !state.note_stable());
}

/// Otherwise two reasons could be logged in turn without end.
#[test]
fn oldest_reason_for_a_loss_is_forgotten_first() {
    let mut state = State::default();
    let reasons: Vec<String> = (0..=LOGGED_LOSSES_MAX).map(|it| it.to_string()).collect();
    for why in &reasons {
        assert!(state.note_loss(why), "{why}");
    }
    for why in &reasons[1..] {
        assert!(!state.note_loss(why), "{why}");
    }
    assert!(state.note_loss(&reasons[0]));
}

#[test]
fn the_store_must_wait_while_too_much_output_is_unacknowledged() {
    let mut state = State::default();
    for _ in 0..limits::BROKER_OUTBOX_HOLD {
        assert!(!state.is_full());
        state.take(Outbound::Notification(watcher(), message("t", "n"), None));
    }
    assert!(state.is_full());
    let number = oldest(&state);
    state.acknowledged(number, &ack(PubAckReason::Success));
    assert!(!state.is_full());
}

#[test]
fn a_long_value_with_many_watchers_loses_no_notification() {
    let mut state = State::default();
    let value = Bytes::from(vec![0_u8; 1 << 20]);
    for _ in 0..600 {
        let message = Message {
            topic: "clients/x/command/notify/6B".into(),
            payload: value.clone(),
            ..Message::default()
        };
        state.take(Outbound::Notification(watcher(), message, None));
    }
    let figures = state.figures();
    assert_eq!((figures.lost, figures.outstanding), (0, 600));
    assert!(figures.outstanding_bytes < 2 << 20, "{figures:?}");
    assert!(!state.is_full());
    while !state.outlet.is_empty() {
        let number = oldest(&state);
        state.acknowledged(number, &ack(PubAckReason::Success));
    }
    assert_eq!(state.figures().outstanding_bytes, 0);
}

#[test]
fn notifications_beyond_the_memory_of_a_small_machine_are_lost() {
    let mut state = State::new(OutboxBounds {
        hold_bytes: 1000,
        bytes_max: 2000,
    });
    for _ in 0..2 {
        assert!(!state.is_full());
        state.take(Outbound::Notification(watcher(), message("t", "n"), None));
    }
    assert!(state.is_full());
    for _ in 0..3 {
        state.take(Outbound::Notification(watcher(), message("t", "n"), None));
    }
    let figures = state.figures();
    assert_eq!((figures.lost, figures.outstanding), (1, 4));
}

#[test]
fn a_shutdown_waits_for_no_output_without_a_connection() {
    let mut state = State {
        unsettled: 1,
        ..State::default()
    };
    assert!(
        state.is_drained(),
        "without a connection the shutdown does not wait"
    );
    let settle = Outbound::Acknowledge(Ticket::Foreign(0), ReasonCode::SUCCESS, None);
    state.take(settle);
    assert_eq!(state.unsettled, 0);
}
