//! What is remembered, for how long, and what a request is a duplicate of.

use bytes::Bytes;

use super::*;
use crate::clock::Stamp;
use crate::request::Dialect;
use crate::store::{Context, Kept, Outcome};

const RETENTION: Retention = Retention {
    window_ms: 60_000,
    count_max: 10,
    bytes_max: 100_000,
    per_session: 3,
};

fn delivery(session: u64, connection: u64, packet_id: u16, dup: bool) -> Delivery {
    Delivery {
        session,
        connection,
        packet_id,
        dup,
    }
}

/// A request that arrives at `now_ms`, is answered and remembered.
fn answer(all: &mut Duplicates, from: Delivery, identity: u8, now_ms: u64) -> u64 {
    all.arrive(&from);
    let turn = all.next_turn(from.session);
    let number = all.next_number();
    all.insert(&Remembered {
        number,
        delivery: from,
        turn,
        identity: [identity; 16],
        until_ms: now_ms + 60_000,
        context: Context {
            now_ms,
            clock: Stamp::default(),
            dialect: Dialect::Sdk,
            policy: blake3::Hash::from_bytes([identity / 100; 32]),
        },
        evidence: None,
        outcome: Outcome {
            payload: Kept::Whole(Bytes::from_static(b"+OK\r\n")),
            version: None,
            command: None,
            put: true,
        },
    });
    all.evict(from.session, now_ms);
    number
}

fn found(all: &Duplicates, by: Delivery, identity: u8) -> Option<u64> {
    all.find(&by, &[identity; 16]).map(|it| it.number)
}

#[test]
fn a_redelivery_is_told_from_a_request_that_looks_the_same() {
    let mut all = Duplicates::new(RETENTION);
    let first = answer(&mut all, delivery(1, 1, 7, false), 9, 0);
    assert_eq!(found(&all, delivery(1, 1, 7, true), 9), Some(first));
    // Some clients send again with DUP=0, on the next connection, with the same packet id.
    assert_eq!(found(&all, delivery(1, 2, 7, false), 9), Some(first));
    // A script that uses its correlation data again is not answered from memory.
    assert_eq!(found(&all, delivery(1, 1, 8, false), 9), None);
    assert_eq!(found(&all, delivery(1, 1, 7, false), 9), None);
    assert_eq!(found(&all, delivery(1, 2, 8, false), 9), None);
    // Another session, another payload.
    assert_eq!(found(&all, delivery(2, 3, 7, true), 9), None);
    assert_eq!(found(&all, delivery(1, 1, 7, true), 8), None);
}

#[test]
fn of_requests_that_look_the_same_the_packet_id_names_the_right_one() {
    let mut all = Duplicates::new(RETENTION);
    let first = answer(&mut all, delivery(1, 1, 7, false), 9, 0);
    let second = answer(&mut all, delivery(1, 1, 8, false), 9, 0);
    assert_eq!(found(&all, delivery(1, 1, 7, true), 9), Some(first));
    assert_eq!(found(&all, delivery(1, 1, 8, true), 9), Some(second));
    assert_eq!(found(&all, delivery(1, 2, 7, false), 9), Some(first));
    // DUP with a packet id that none of them had: the newest.
    assert_eq!(found(&all, delivery(1, 1, 6, true), 9), Some(second));
}

#[test]
fn only_what_may_have_come_before_is_looked_for() {
    let mut all = Duplicates::new(RETENTION);
    let suspect = |all: &mut Duplicates, by| all.arrive(&by);
    assert!(!suspect(&mut all, delivery(1, 1, 1, false)));
    answer(&mut all, delivery(1, 1, 2, false), 9, 0);
    assert!(!suspect(&mut all, delivery(1, 1, 3, false)));
    assert!(suspect(&mut all, delivery(1, 1, 3, true)));
    // On a resumed connection any of the first requests may be one of the last of the old.
    for packet_id in 4..7 {
        assert!(suspect(&mut all, delivery(1, 2, packet_id, false)));
    }
    assert!(!suspect(&mut all, delivery(1, 2, 7, false)));
    assert!(suspect(&mut all, delivery(1, 2, 7, true)));
    assert!(suspect(&mut all, delivery(1, 3, 8, false)));
}

#[test]
fn where_clients_are_told_more_as_many_are_looked_for_and_kept() {
    let mut all = Duplicates::new(RETENTION);
    all.raise_per_session(20);
    for packet_id in 1..=50 {
        let identity = packet_id as u8;
        answer(&mut all, delivery(1, 1, packet_id, false), identity, 0);
    }
    // Told less from now on, but this session may send again what it sent by then.
    all.raise_per_session(1);
    all.evict(1, 3_600_000);
    for packet_id in 31..=50 {
        let again = delivery(1, 2, packet_id, false);
        assert!(all.arrive(&again));
        assert!(found(&all, again, packet_id as u8).is_some());
    }
    assert!(!all.arrive(&delivery(1, 2, 51, false)));
    assert_eq!(found(&all, delivery(1, 2, 10, false), 10), None);
}

/// Resends and reads once counted as turns, so a client that came back twice pushed out its own requests.
#[test]
fn what_changes_nothing_pushes_nothing_out() {
    let mut all = Duplicates::new(RETENTION);
    for packet_id in 1..=3 {
        answer(
            &mut all,
            delivery(1, 1, packet_id, false),
            packet_id as u8,
            0,
        );
    }
    for connection in 2..9 {
        for packet_id in 1..=3 {
            assert!(all.arrive(&delivery(1, connection, packet_id, false)));
        }
    }
    all.evict(1, 3_600_000);
    for packet_id in 1..=3u8 {
        assert!(found(&all, delivery(1, 9, packet_id.into(), false), packet_id).is_some());
    }
}

/// A snapshot may say that more were numbered than it still holds.
#[test]
fn no_number_is_given_twice() {
    let mut all = Duplicates::new(RETENTION);
    all.continue_from(17);
    assert_eq!(answer(&mut all, delivery(1, 1, 1, false), 1, 0), 17);
    all.continue_from(5);
    assert_eq!(all.next_number(), 18);
}

#[test]
fn the_last_of_a_live_session_are_kept_however_old() {
    let mut all = Duplicates::new(RETENTION);
    for packet_id in 1..=8 {
        answer(
            &mut all,
            delivery(1, 1, packet_id, false),
            packet_id as u8,
            0,
        );
    }
    // Another client goes on for an hour.
    for packet_id in 1..=50 {
        answer(
            &mut all,
            delivery(2, 2, packet_id, false),
            packet_id as u8,
            3_600_000,
        );
    }
    for packet_id in 1..=8u8 {
        let again = delivery(1, 1, packet_id.into(), true);
        let kept = found(&all, again, packet_id).is_some();
        assert_eq!(kept, packet_id >= 3, "packet {packet_id}");
    }
    assert!(all.len() <= 10 + 6);
    // New requests of that client push its old ones out.
    answer(&mut all, delivery(1, 1, 9, false), 9, 3_600_000);
    assert!(found(&all, delivery(1, 1, 3, true), 3).is_none());
    assert!(found(&all, delivery(1, 1, 4, true), 4).is_some());
    all.ended(&[1]);
    assert!(found(&all, delivery(1, 1, 9, true), 9).is_none());
    all.retain(|session| session == 3);
    assert_eq!((all.len(), all.bytes()), (0, 0));
    assert!(all.newest.is_empty() && all.sessions.is_empty());
}

/// The oldest of all once went first, so that many busy clients made the store forget an idle one's.
#[test]
fn who_holds_most_gives_way_first() {
    let retention = Retention {
        bytes_max: 20_000,
        per_session: 100,
        ..RETENTION
    };
    let mut all = Duplicates::new(retention);
    for packet_id in 1..=3 {
        answer(
            &mut all,
            delivery(1, 1, packet_id, false),
            packet_id as u8,
            0,
        );
    }
    for n in 0..400u16 {
        answer(&mut all, delivery(2, 1, n, false), n as u8, 0);
    }
    assert!(all.evicted() > 0 && all.bytes() <= 2 * retention.bytes_max);
    for packet_id in 1..=3u8 {
        let again = delivery(1, 1, packet_id.into(), true);
        assert!(
            found(&all, again, packet_id).is_some(),
            "packet {packet_id}"
        );
    }
}

#[test]
fn a_session_that_is_idle_holds_nothing_of_what_was_forgotten() {
    let mut all = Duplicates::new(Retention {
        per_session: 1,
        ..RETENTION
    });
    for n in 0..5_000u32 {
        let session = u64::from(n / 100) + 1;
        answer(&mut all, delivery(session, 1, n as u16, false), n as u8, 0);
    }
    let held: usize = all.sessions.values().map(|it| it.held.len()).sum();
    assert_eq!(held, all.len());
    assert!(held <= 50 * 2 + 10);
    let bytes: u64 = all.sessions.values().map(|it| it.bytes).sum();
    assert_eq!(bytes, all.bytes());
}

/// Behind a foreign broker, where DUP is set on all and packet ids say nothing.
mod foreign {
    use super::*;
    use crate::store::Mode;

    const RETENTION: Retention = Retention {
        per_session: 0,
        ..super::RETENTION
    };

    fn from(client: u64) -> Delivery {
        let session = Mode::foreign_session(client);
        delivery(session, session, 0, true)
    }

    #[test]
    fn the_identity_alone_decides() {
        let mut all = Duplicates::new(RETENTION);
        let first = answer(&mut all, from(1), 9, 0);
        assert!(all.arrive(&from(1)));
        assert_eq!(found(&all, from(1), 9), Some(first));
        assert_eq!(found(&all, from(1), 8), None);
        assert_eq!(found(&all, from(2), 9), None);
    }

    #[test]
    fn who_only_reads_leaves_no_trace() {
        let mut all = Duplicates::new(RETENTION);
        for client in 0..1_000 {
            assert!(all.arrive(&from(client)));
        }
        assert!(all.sessions.is_empty());
    }

    #[test]
    fn only_the_window_keeps_and_who_left_it_holds_nothing() {
        let mut all = Duplicates::new(RETENTION);
        answer(&mut all, from(1), 1, 0);
        answer(&mut all, from(2), 2, 59_999);
        assert!(found(&all, from(1), 1).is_some());
        answer(&mut all, from(3), 3, 60_000);
        assert!(found(&all, from(1), 1).is_none(), "its time is over");
        assert!(found(&all, from(2), 2).is_some());
        assert_eq!((all.len(), all.sessions.len()), (2, 2));
        assert_eq!(all.evicted(), 0);
    }

    #[test]
    fn what_is_forgotten_before_its_time_is_counted() {
        let mut all = Duplicates::new(RETENTION);
        for n in 0..15u8 {
            answer(&mut all, from(n.into()), n, 0);
        }
        assert_eq!((all.len(), all.sessions.len()), (10, 10));
        assert_eq!(all.evicted(), 5);
        // What went because its time was over is not.
        answer(&mut all, from(99), 99, 60_000);
        assert_eq!((all.len(), all.evicted()), (1, 5));
        let recount: u64 = all.range(0).map(|it| it.cost_bytes()).sum();
        assert_eq!(all.bytes(), recount);
    }
}

#[test]
fn count_and_bytes_are_bounded_and_sums_are_true() {
    let mut all = Duplicates::new(RETENTION);
    for n in 0..2_000u32 {
        let session = u64::from(n % 500) + 1;
        answer(&mut all, delivery(session, 1, n as u16, false), n as u8, 0);
        assert!(all.bytes() <= 2 * RETENTION.bytes_max + 1_000);
        assert!(all.window.len() as u64 <= RETENTION.count_max);
    }
    assert!(all.evicted() > 0, "500 sessions may not keep 3 each here");
    let recount: u64 = all.range(0).map(|it| it.cost_bytes()).sum();
    assert_eq!(all.bytes(), recount);
    let by = |policy| all.range(0).filter(move |it| it.context.policy == policy);
    assert_eq!(all.policies().len(), 3);
    for (policy, count) in &all.policies.0 {
        assert_eq!(*count, by(*policy).count());
    }
    let sessions: Vec<u64> = all.sessions.keys().copied().collect();
    all.ended(&sessions);
    assert!(all.is_empty() && all.policies().is_empty());
}
