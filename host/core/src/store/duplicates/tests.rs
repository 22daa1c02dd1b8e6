//! Retention, and which request is a duplicate of which.

use std::cell::Cell;
use std::ops::RangeInclusive;

use super::*;
use crate::clock::Stamp;
use crate::request::Dialect;
use crate::store::{CapturedReads, Context, Outcome, StoredPayload};

const RETENTION: Retention = Retention {
    window_ms: 60_000,
    count_max: 10,
    bytes_max: 100_000,
    per_session: 3,
};

fn delivery(session: u64, connection: u64, packet_id: u16, dup: bool) -> Delivery {
    Delivery {
        session: SessionId(session),
        connection: ConnectionId(connection),
        packet_id,
        dup,
    }
}

/// A request whose numbers all differ.
pub(super) fn remembered(captured: Option<CapturedReads>, payload: StoredPayload) -> Remembered {
    Remembered {
        number: 5,
        delivery: delivery(6, 7, 8, false),
        turn: 9,
        identity: [10; 16],
        until_ms: 11,
        context: Context {
            now_ms: 12,
            clock: Stamp {
                wall: 13,
                counter: 14,
            },
            dialect: Dialect::Documents,
            policy: blake3::hash(b"policy"),
        },
        captured,
        outcome: Outcome {
            payload,
            version: None,
            command: None,
            put: false,
        },
    }
}

/// A request that arrives at `now_ms`, is answered and remembered.
fn answer(all: &mut Duplicates, from: Delivery, identity: u8, now_ms: u64) -> u64 {
    remember(all, from, identity, now_ms, true)
}

fn remember(
    all: &mut Duplicates,
    from: Delivery,
    identity: u8,
    now_ms: u64,
    recorded: bool,
) -> u64 {
    // As before each read of a socket.
    all.prefetch(from.session, 2);
    all.arrive(&from);
    let turn = all.next_turn(from.session);
    let number = all.next_number();
    let mut it = remembered(None, StoredPayload::Whole("+OK\r\n".into()));
    (it.number, it.delivery, it.turn) = (number, from, turn);
    it.identity = [identity; 16];
    (it.context.now_ms, it.until_ms) = (now_ms, now_ms + 60_000);
    it.context.policy = blake3::Hash::from_bytes([identity / 100; 32]);
    all.insert(&it, recorded);
    all.evict(from.session, now_ms);
    number
}

/// Answers requests of a session, each with its packet id as its identity.
fn answer_each(all: &mut Duplicates, session: u64, packet_ids: RangeInclusive<u8>, now_ms: u64) {
    for packet_id in packet_ids {
        let from = delivery(session, session, packet_id.into(), false);
        answer(all, from, packet_id, now_ms);
    }
}

fn found(all: &Duplicates, by: Delivery, identity: u8) -> Option<u64> {
    all.find(&by, &[identity; 16]).map(|it| it.number)
}

thread_local! {
    static LOOKUPS: Cell<usize> = const { Cell::new(0) };
}

/// Counts the slots that the test of this thread looks up.
pub(super) fn count_lookup() {
    LOOKUPS.set(LOOKUPS.get() + 1);
}

/// Another host of a cluster gives the number of a request in memory to a recorded one. If it began
/// with a snapshot, the number must be free there.
#[test]
fn request_without_a_record_is_in_no_snapshot() {
    let mut all = Duplicates::new(RETENTION);
    let recorded = answer(&mut all, delivery(1, 1, 7, false), 8, 0);
    let other = remember(&mut all, delivery(1, 1, 8, false), 9, 0, false);
    assert_eq!(found(&all, delivery(1, 1, 8, true), 9), Some(other));
    let numbers = |all: &Duplicates| all.recorded(0).map(|it| it.number).collect::<Vec<_>>();
    assert_eq!(numbers(&all), [recorded]);
    assert_eq!((all.len(), all.recorded_below()), (2, other));
    let later = answer(&mut all, delivery(1, 1, 9, false), 10, 0);
    assert!(later > other);
    assert_eq!(numbers(&all), [recorded, later]);
    assert_eq!(all.recorded_below(), later + 1);
}

#[test]
fn redelivery_is_distinguished_from_an_equal_request() {
    let mut all = Duplicates::new(RETENTION);
    let first = answer(&mut all, delivery(1, 1, 7, false), 9, 0);
    assert_eq!(found(&all, delivery(1, 1, 7, true), 9), Some(first));
    // Some clients redeliver with DUP=0, on the next connection, with the same packet id.
    assert_eq!(found(&all, delivery(1, 2, 7, false), 9), Some(first));
    // A script that reuses its correlation data must not get the old answer.
    assert_eq!(found(&all, delivery(1, 1, 8, false), 9), None);
    assert_eq!(found(&all, delivery(1, 1, 7, false), 9), None);
    assert_eq!(found(&all, delivery(1, 2, 8, false), 9), None);
    // Another session, another payload.
    assert_eq!(found(&all, delivery(2, 3, 7, true), 9), None);
    assert_eq!(found(&all, delivery(1, 1, 7, true), 8), None);
}

#[test]
fn packet_id_selects_among_equal_requests() {
    let mut all = Duplicates::new(RETENTION);
    let first = answer(&mut all, delivery(1, 1, 7, false), 9, 0);
    let second = answer(&mut all, delivery(1, 1, 8, false), 9, 0);
    assert_eq!(found(&all, delivery(1, 1, 7, true), 9), Some(first));
    assert_eq!(found(&all, delivery(1, 1, 8, true), 9), Some(second));
    assert_eq!(found(&all, delivery(1, 2, 7, false), 9), Some(first));
    // DUP with an unknown packet id: the newest.
    assert_eq!(found(&all, delivery(1, 1, 6, true), 9), Some(second));
}

/// Regression: a script that reuses its correlation data, and begins with the same packet id on
/// each connection, got an old answer and no effect.
#[test]
fn a_reused_packet_id_is_that_of_a_new_request() {
    let mut all = Duplicates::new(RETENTION);
    let first = answer(&mut all, delivery(1, 1, 7, false), 9, 0);
    let second = answer(&mut all, delivery(1, 1, 8, false), 9, 0);
    answer(&mut all, delivery(1, 1, 7, false), 10, 0);
    assert_eq!(found(&all, delivery(1, 2, 7, false), 9), None);
    assert_eq!(found(&all, delivery(1, 2, 8, false), 9), Some(second));
    assert_eq!(found(&all, delivery(1, 2, 7, true), 9), Some(first));
    // Another session uses the same packet ids.
    let other = answer(&mut all, delivery(2, 3, 7, false), 9, 0);
    answer(&mut all, delivery(1, 2, 7, false), 11, 0);
    assert_eq!(found(&all, delivery(2, 4, 7, false), 9), Some(other));
}

/// Regression: a request with DUP was compared with all equal ones of its session.
#[test]
fn lookup_ends_after_the_last_requests_of_the_session() {
    let mut all = Duplicates::new(Retention {
        count_max: 200_000,
        bytes_max: u64::MAX,
        ..RETENTION
    });
    let other = answer(&mut all, delivery(1, 1, 7_000, false), 8, 0);
    let first = other + 1;
    for n in 0..100_000u32 {
        let repeated = 1 + (n % 5_000) as u16;
        let packet_id = if n == 0 { 6_000 } else { repeated };
        answer(&mut all, delivery(1, 1, packet_id, false), 9, 0);
    }
    let newest = first + 99_999;
    assert_eq!(all.len(), 100_001, "all of them are in the window");
    for (by, identity, expected) in [
        // An unknown packet id, and one that was acknowledged long ago: the newest.
        (delivery(1, 2, 9_000, true), 9, Some(newest)),
        (delivery(1, 2, 6_000, true), 9, Some(newest)),
        (delivery(1, 2, 6_000, false), 9, None),
        (delivery(1, 2, 7_000, true), 8, Some(other)),
        (delivery(1, 2, 7_000, false), 8, None),
        // One of the last: 99 999 % 5 000 + 1, less 5.
        (delivery(1, 2, 4_995, true), 9, Some(newest - 5)),
        (delivery(1, 2, 4_995, false), 9, Some(newest - 5)),
    ] {
        let before = LOOKUPS.get();
        assert_eq!(found(&all, by, identity), expected, "{by:?}");
        let lookups = LOOKUPS.get() - before;
        // The newest one is found by its identity, then by the walk. It and each later one of the
        // session are looked up once.
        let most = 2 + LOOKUPS_MIN + 1;
        assert!(lookups <= most, "{lookups} lookups for {by:?}");
    }
}

#[test]
fn only_possible_redeliveries_are_looked_up() {
    let mut all = Duplicates::new(RETENTION);
    let suspect = |all: &mut Duplicates, by| all.arrive(&by);
    assert!(!suspect(&mut all, delivery(1, 1, 1, false)));
    answer(&mut all, delivery(1, 1, 2, false), 9, 0);
    assert!(!suspect(&mut all, delivery(1, 1, 3, false)));
    assert!(suspect(&mut all, delivery(1, 1, 3, true)));
    // On a resumed connection, any of the first requests may be a redelivery.
    for packet_id in 4..7 {
        assert!(suspect(&mut all, delivery(1, 2, packet_id, false)));
    }
    assert!(!suspect(&mut all, delivery(1, 2, 7, false)));
    assert!(suspect(&mut all, delivery(1, 2, 7, true)));
    assert!(suspect(&mut all, delivery(1, 3, 8, false)));
}

#[test]
fn higher_receive_max_keeps_more_requests() {
    let mut all = Duplicates::new(RETENTION);
    all.raise_per_session(20);
    answer_each(&mut all, 1, 1..=50, 0);
    // The Receive Maximum decreases, but this session may still redeliver the requests that it sent
    // before.
    all.raise_per_session(1);
    all.evict(SessionId(1), 3_600_000);
    for packet_id in 31..=50 {
        let again = delivery(1, 2, packet_id, false);
        assert!(all.arrive(&again));
        assert!(found(&all, again, packet_id as u8).is_some());
    }
    assert!(!all.arrive(&delivery(1, 2, 51, false)));
    assert_eq!(found(&all, delivery(1, 2, 10, false), 10), None);
}

/// Regression: redeliveries and reads counted as turns, so a client that reconnected twice evicted
/// its own requests.
#[test]
fn redeliveries_and_reads_evict_nothing() {
    let mut all = Duplicates::new(RETENTION);
    answer_each(&mut all, 1, 1..=3, 0);
    for connection in 2..9 {
        for packet_id in 1..=3 {
            assert!(all.arrive(&delivery(1, connection, packet_id, false)));
        }
    }
    all.evict(SessionId(1), 3_600_000);
    for packet_id in 1..=3u8 {
        assert!(found(&all, delivery(1, 9, packet_id.into(), false), packet_id).is_some());
    }
}

/// A snapshot may contain fewer requests than were numbered.
#[test]
fn request_numbers_are_never_reused() {
    let mut all = Duplicates::new(RETENTION);
    all.continue_from(17);
    assert_eq!(answer(&mut all, delivery(1, 1, 1, false), 1, 0), 17);
    all.continue_from(5);
    assert_eq!(all.next_number(), 18);
}

#[test]
fn last_requests_of_a_live_session_never_expire() {
    let mut all = Duplicates::new(RETENTION);
    answer_each(&mut all, 1, 1..=8, 0);
    // Another client continues for an hour.
    answer_each(&mut all, 2, 1..=50, 3_600_000);
    for packet_id in 1..=8u8 {
        let again = delivery(1, 1, packet_id.into(), true);
        let kept = found(&all, again, packet_id).is_some();
        assert_eq!(kept, packet_id >= 3, "packet {packet_id}");
    }
    assert!(all.len() <= 10 + 6);
    // New requests of that client evict its old ones.
    answer(&mut all, delivery(1, 1, 9, false), 9, 3_600_000);
    assert!(found(&all, delivery(1, 1, 3, true), 3).is_none());
    assert!(found(&all, delivery(1, 1, 4, true), 4).is_some());
    all.ended(&[SessionId(1)]);
    assert!(found(&all, delivery(1, 1, 9, true), 9).is_none());
    all.retain(|session| session == SessionId(3));
    assert_eq!((all.len(), all.bytes()), (0, 0));
    assert!(all.newest.len() == 0 && all.sessions.is_empty());
}

/// Regression: the oldest request was always evicted first, so busy clients evicted the requests of
/// an idle one.
#[test]
fn largest_session_is_evicted_first() {
    let retention = Retention {
        bytes_max: 20_000,
        per_session: 100,
        ..RETENTION
    };
    let mut all = Duplicates::new(retention);
    answer_each(&mut all, 1, 1..=3, 0);
    for n in 0..400u16 {
        answer(&mut all, delivery(2, 1, n, false), n as u8, 0);
    }
    assert!(all.evicted() > 0 && all.bytes() <= 2 * retention.bytes_max);
    for packet_id in 1..=3u8 {
        let kept = found(&all, delivery(1, 1, packet_id.into(), true), packet_id);
        assert!(kept.is_some(), "packet {packet_id}");
    }
}

#[test]
fn idle_session_releases_evicted_requests() {
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

/// Behind a foreign broker, every request has DUP set, and packet ids carry no information.
mod foreign {
    use super::*;
    use crate::store::Mode;

    const RETENTION: Retention = Retention {
        per_session: 0,
        ..super::RETENTION
    };

    fn from(client: u64) -> Delivery {
        let session = Mode::foreign_session(client);
        delivery(session.0, session.0, 0, true)
    }

    #[test]
    fn identity_alone_finds_duplicates() {
        let mut all = Duplicates::new(RETENTION);
        let first = answer(&mut all, from(1), 9, 0);
        assert!(all.arrive(&from(1)));
        assert_eq!(found(&all, from(1), 9), Some(first));
        assert_eq!(found(&all, from(1), 8), None);
        assert_eq!(found(&all, from(2), 9), None);
    }

    #[test]
    fn read_only_client_allocates_no_session() {
        let mut all = Duplicates::new(RETENTION);
        for client in 0..1_000 {
            assert!(all.arrive(&from(client)));
        }
        assert!(all.sessions.is_empty());
    }

    #[test]
    fn expired_request_releases_its_session() {
        let mut all = Duplicates::new(RETENTION);
        answer(&mut all, from(1), 1, 0);
        answer(&mut all, from(2), 2, 59_999);
        assert!(found(&all, from(1), 1).is_some());
        answer(&mut all, from(3), 3, 60_000);
        assert!(found(&all, from(1), 1).is_none(), "it has expired");
        assert!(found(&all, from(2), 2).is_some());
        assert_eq!((all.len(), all.sessions.len()), (2, 2));
        assert_eq!(all.evicted(), 0);
    }

    #[test]
    fn early_evictions_are_counted() {
        let mut all = Duplicates::new(RETENTION);
        for n in 0..15u8 {
            answer(&mut all, from(n.into()), n, 0);
        }
        assert_eq!((all.len(), all.sessions.len()), (10, 10));
        assert_eq!(all.evicted(), 5);
        // Requests that expired are not counted.
        answer(&mut all, from(99), 99, 60_000);
        assert_eq!((all.len(), all.evicted()), (1, 5));
        let recount: u64 = all.range(0).map(|it| it.cost_bytes()).sum();
        assert_eq!(all.bytes(), recount);
    }
}

#[test]
fn count_and_bytes_stay_bounded_and_consistent() {
    let mut all = Duplicates::new(RETENTION);
    for n in 0..2_000u32 {
        let session = u64::from(n % 500) + 1;
        answer(&mut all, delivery(session, 1, n as u16, false), n as u8, 0);
        assert!(all.bytes() <= 2 * RETENTION.bytes_max + 1_000);
        assert!(all.window.len() as u64 <= RETENTION.count_max);
    }
    let evicted = all.evicted();
    assert!(evicted > 0, "500 sessions cannot retain 3 requests each");
    let recount: u64 = all.range(0).map(|it| it.cost_bytes()).sum();
    assert_eq!(all.bytes(), recount);
    let by = |policy| all.range(0).filter(move |it| it.context.policy == policy);
    assert_eq!(all.policies().len(), 3);
    for (policy, count) in &all.policies.0 {
        assert_eq!(*count, by(*policy).count());
    }
    let sessions: Vec<SessionId> = all.sessions.keys().copied().collect();
    all.ended(&sessions);
    assert!(all.is_empty() && all.policies().is_empty());
}
