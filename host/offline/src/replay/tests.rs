//! Tests of the comparison between a recorded request and its replay.

use super::*;
use statehouse_core::clock::Fence;
use statehouse_core::policy::Repeat;
use statehouse_core::request::{Delivery, Dialect};
use statehouse_core::store::{Answer, CapturedReads, Context, Entry, Outcome, Remembered};

const VERSION: Stamp = Stamp {
    wall: 7,
    counter: 1,
};

fn write() -> Write {
    set("key", "value", VERSION, Some("a"), Some(9))
}

fn set(
    key: &str,
    value: &str,
    version: Stamp,
    fenced_by: Option<&str>,
    expires_ms: Option<u64>,
) -> Write {
    let fence = fenced_by.map(|node| Fence {
        wall: 1,
        counter: 2,
        node: node.into(),
    });
    let (key, value) = (key.as_bytes(), value.as_bytes());
    let entry = Entry::new(key, value, version, fence.as_ref(), expires_ms);
    Write::of(store::Change::Set(entry))
}

fn handled(captured: Option<CapturedReads>) -> Handled<'static> {
    Handled {
        client: "client",
        payload: b"",
        timestamp: None,
        fencing_token: None,
        policy: 0,
        repeatable: true,
        clock: VERSION,
        remembered: Remembered {
            number: 1,
            delivery: Delivery::default(),
            turn: 1,
            identity: [0; 16],
            until_ms: 0,
            context: Context {
                now_ms: 5,
                clock: Stamp::default(),
                dialect: Dialect::Sdk,
                policy: blake3::hash(b""),
            },
            captured,
            outcome: Outcome {
                payload: StoredPayload::Whole(Bytes::from_static(b"+OK\r\n")),
                version: Some(VERSION),
                command: None,
                put: true,
            },
        },
        writes: vec![write()],
    }
}

fn replayed(answer: &'static [u8], version: Option<Stamp>, writes: Vec<Write>) -> store::Replayed {
    store::Replayed {
        answer: Ok(Answer {
            payload: Bytes::from_static(answer),
            version,
            repeat: Repeat::Same,
            command: None,
            put: true,
        }),
        writes,
        guessed: false,
    }
}

fn verdict(replayed: store::Replayed) -> &'static str {
    name(classify(&handled(Some(CapturedReads::default())), replayed))
}

fn name(comparison: Comparison) -> &'static str {
    match comparison {
        Comparison::Same => "same",
        Comparison::Different(_) => "different",
        Comparison::NotComparable(_) => "not comparable",
    }
}

#[test]
fn comparison_covers_every_part_of_answer_and_writes() {
    let ok = |writes: Vec<Write>| replayed(b"+OK\r\n", Some(VERSION), writes);
    // The offset of a key in the request is recorded, but does not count.
    let placed = Write {
        key_at: Some(3),
        value_at: Some(9),
        ..write()
    };
    assert_eq!(verdict(ok(vec![placed])), "same");
    let later = Stamp {
        counter: 2,
        ..VERSION
    };
    let hidden = Write {
        hidden: true,
        ..write()
    };
    let deleted = Write::of(store::Change::Deleted("key".into(), VERSION));
    for writes in [
        vec![],
        vec![write(), write()],
        vec![hidden],
        vec![deleted],
        vec![set("keys", "value", VERSION, Some("a"), Some(9))],
        vec![set("key", "other", VERSION, Some("a"), Some(9))],
        vec![set("key", "value", later, Some("a"), Some(9))],
        vec![set("key", "value", VERSION, Some("b"), Some(9))],
        vec![set("key", "value", VERSION, None, Some(9))],
        vec![set("key", "value", VERSION, Some("a"), None)],
    ] {
        assert_eq!(verdict(ok(writes.clone())), "different", "{writes:?}");
    }
    for (answer, version) in [
        (&b"+OK\r\n"[..], Some(later)),
        (b"+OK\r\n", None),
        (b":1\r\n", Some(VERSION)),
    ] {
        let replayed = replayed(answer, version, vec![write()]);
        assert_eq!(verdict(replayed), "different", "{answer:?} {version:?}");
    }
}

#[test]
fn insufficient_recording_is_not_comparable() {
    let ok = || replayed(b"+OK\r\n", Some(VERSION), vec![write()]);
    let guessed = store::Replayed {
        guessed: true,
        ..ok()
    };
    assert_eq!(verdict(guessed), "not comparable");
    let failed = |failure| store::Replayed {
        answer: Err(failure),
        writes: Vec::new(),
        guessed: false,
    };
    for of_machine in [Failure::Watchdog, Failure::Machine("no memory".into())] {
        assert_eq!(verdict(failed(of_machine)), "not comparable");
    }
    assert_eq!(verdict(failed(Failure::Fuel)), "different");
    // Without the captured reads, only an equal result is reliable.
    assert_eq!(name(classify(&handled(None), ok())), "same");
    let other = replayed(b":1\r\n", Some(VERSION), vec![write()]);
    assert_eq!(name(classify(&handled(None), other)), "not comparable");
}

/// Clients choose the first words of requests, so their number must be limited.
#[test]
fn commands_are_counted_by_name_up_to_a_limit() {
    let mut tally = Tally::default();
    tally.counts(b"*1\r\n$3\r\nset\r\n").same += 1;
    tally.counts(b"*1\r\n$3\r\nSET\r\n").same += 1;
    for other in [&b"rubbish"[..], b"*0\r\n", b"*1\r\n$2\r\n\n\n\r\n"] {
        tally.counts(other).different += 1;
    }
    for n in 0..1000 {
        let word = format!("{n:04}");
        tally
            .counts(format!("*1\r\n$4\r\n{word}\r\n").as_bytes())
            .same += 1;
    }
    assert_eq!(tally.commands["SET"].same, 2);
    assert_eq!(tally.commands[statehouse_core::words::OTHERS].different, 3);
    assert!(tally.commands.len() <= statehouse_core::limits::REPLAY_COMMANDS_MAX);
    let all: u64 = tally.commands.values().map(|counts| counts.same).sum();
    assert_eq!(all, 1002);
}

/// The snapshot was taken while the records 4 to 6 were written, so the state is known from record
/// 7 on.
#[test]
fn range_from_within_the_oldest_snapshot_is_shortened() {
    let is_shortened = |from: Option<Bound>| {
        let mut finder = RangeFinder::new(from, None);
        for position in 4..=9 {
            let mut record = Vec::new();
            record::started(&mut record, 1, 10 * position, store::Mode::Embedded);
            finder.record(LogPosition(position), &record).unwrap();
        }
        finder.begins_before(LogPosition(7))
    };
    assert!(!is_shortened(None));
    for (position, expected) in [(0, false), (1, true), (6, true), (7, false), (10, false)] {
        let from = Bound::LogPosition(LogPosition(position));
        assert_eq!(is_shortened(Some(from)), expected, "from record {position}");
    }
    for (ms, expected) in [(39, true), (41, true), (60, true), (61, false), (99, false)] {
        let from = Bound::Time(ms);
        assert_eq!(is_shortened(Some(from)), expected, "from {ms} ms");
    }
}
