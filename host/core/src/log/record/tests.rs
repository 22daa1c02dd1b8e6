use proptest::prelude::*;
use statehouse_mqtt::Properties;
use statehouse_protocol::{ConnectionId, SessionId};

use super::*;
use crate::clock::Fence;
use crate::policy::{Fault, Page, Reached};
use crate::request::{Delivery, Dialect};
use crate::store::{
    CapturedReads, Change, Context, Entry, Imported, KeyRef, NewDeadline, Outcome, Read, Right,
    StoredPayload,
};

fn arb_stamp() -> impl Strategy<Value = Stamp> {
    (any::<u64>(), any::<u32>()).prop_map(|(wall, counter)| Stamp { wall, counter })
}

fn arb_bytes(max: usize) -> impl Strategy<Value = Bytes> {
    prop::collection::vec(any::<u8>(), 0..max).prop_map(Bytes::from)
}

fn arb_entry(key: Bytes) -> impl Strategy<Value = Entry> {
    let fence = prop::option::of((any::<u64>(), any::<u32>(), "[a-z]{0,9}"));
    (arb_bytes(40), arb_stamp(), fence, any::<Option<u64>>()).prop_map(
        move |(value, version, fence, expires_ms)| {
            let fence = fence.map(|(wall, counter, node)| Fence {
                wall,
                counter,
                node: node.into(),
            });
            Entry::new(&key, &value, version, fence.as_ref(), expires_ms)
        },
    )
}

fn arb_write() -> impl Strategy<Value = Write> {
    let change = arb_bytes(20).prop_flat_map(|key| {
        let (deleted, expired) = (key.clone(), key.clone());
        prop_oneof![
            arb_entry(key).prop_map(Change::Set),
            arb_stamp().prop_map(move |version| Change::Deleted(deleted.clone(), version)),
            arb_stamp().prop_map(move |version| Change::Expired(expired.clone(), version)),
        ]
    });
    (change, any::<bool>()).prop_map(|(change, hidden)| Write {
        hidden,
        ..Write::of(change)
    })
}

fn arb_imported() -> impl Strategy<Value = Imported> {
    let keys = prop::collection::vec(prop::collection::vec(any::<u8>(), 0..9), 0..4);
    prop_oneof![
        Just(Imported::Refused(Fault::Denied)),
        Just(Imported::Refused(Fault::Quota)),
        ".{0,9}".prop_map(|text| Imported::Refused(Fault::Other(text))),
        Just(Imported::Watched),
        any::<bool>().prop_map(Imported::Unwatched),
        arb_stamp().prop_map(Imported::Followed),
        (arb_stamp(), any::<bool>())
            .prop_map(|(version, complete)| Imported::Reached(Reached { version, complete })),
        (keys, any::<Option<Vec<u8>>>())
            .prop_map(|(keys, next)| Imported::Page(Page { keys, next })),
        (arb_key_ref(), any::<bool>()).prop_map(|(key, write)| {
            let right = if write { Right::Write } else { Right::Read };
            Imported::Denied(key, right)
        }),
    ]
}

fn arb_key_ref() -> impl Strategy<Value = KeyRef> {
    prop_oneof![
        (0u32..9, 0u32..9).prop_map(|(at, len)| KeyRef::Payload(at..at + len)),
        arb_bytes(9).prop_map(KeyRef::Own),
    ]
}

fn arb_captured(entries: bool) -> impl Strategy<Value = CapturedReads> {
    let key = arb_key_ref();
    // In a snapshot, the key is stored with the read and not with the entry.
    let entry = arb_entry(Bytes::new());
    let read =
        (key, any::<bool>(), prop::option::of(entry)).prop_map(move |(key, hidden, entry)| Read {
            key,
            hidden,
            entry: entry.filter(|_| entries),
        });
    let imports = prop::collection::vec((any::<u32>(), arb_imported()), 0..4);
    let properties = prop::collection::vec(("[a-z]{0,5}", any::<Option<String>>()), 0..3);
    let reads = prop::collection::vec(read, 0..4);
    (reads, imports, properties, any::<Option<[u8; 32]>>()).prop_map(
        |(reads, imports, properties, seed)| CapturedReads {
            reads,
            imports,
            properties: properties
                .into_iter()
                .map(|(name, value)| (name.into(), value.map(Into::into)))
                .collect(),
            seed,
        },
    )
}

fn arb_remembered(entries: bool) -> impl Strategy<Value = Remembered> {
    let context = (0u64..1 << 50, arb_stamp(), 0..3usize);
    let outcome = (
        arb_bytes(30),
        any::<Option<[u8; 32]>>(),
        prop::option::of(arb_stamp()),
        any::<Option<u16>>(),
        any::<bool>(),
    );
    (
        any::<[u64; 4]>(),
        any::<u16>(),
        any::<[u8; 16]>(),
        0u64..1 << 40,
        context,
        prop::option::of(arb_captured(entries)),
        outcome,
    )
        .prop_map(
            |(numbers, packet_id, identity, window_ms, context, captured, outcome)| {
                let [number, session, connection, turn] = numbers;
                let (payload, digest, version, command, put) = outcome;
                let (now_ms, clock, dialect) = context;
                Remembered {
                    number,
                    delivery: Delivery {
                        session: SessionId(session),
                        connection: ConnectionId(connection),
                        packet_id,
                        dup: false,
                    },
                    turn,
                    identity,
                    until_ms: now_ms + window_ms,
                    context: Context {
                        now_ms,
                        clock,
                        dialect: [Dialect::Sdk, Dialect::Documents, Dialect::Preview][dialect],
                        policy: blake3::Hash::from_bytes([0; 32]),
                    },
                    captured,
                    outcome: Outcome {
                        payload: match digest {
                            Some(digest) => StoredPayload::Digest(blake3::Hash::from_bytes(digest)),
                            None => StoredPayload::Whole(payload),
                        },
                        version,
                        command,
                        put,
                    },
                }
            },
        )
}

fn arb_scope() -> impl Strategy<Value = Scope> {
    prop_oneof![Just(Scope::Key), Just(Scope::Prefix)]
}

fn arb_watch_change() -> impl Strategy<Value = WatchChange> {
    let dialects = &[Dialect::Sdk, Dialect::Documents, Dialect::Preview][..];
    prop_oneof![
        (arb_scope(), arb_bytes(9), prop::sample::select(dialects))
            .prop_map(|(scope, key, dialect)| WatchChange::Began(scope, key, dialect)),
        (arb_scope(), arb_bytes(9)).prop_map(|(scope, key)| WatchChange::Ended(scope, key)),
        Just(WatchChange::AllEnded),
    ]
}

proptest! {
    #[test]
    fn handled_request_survives_a_round_trip(
        client in ".{0,12}",
        payload in arb_bytes(60),
        timestamp in any::<Option<String>>(),
        fencing_token in any::<Option<String>>(),
        policy in any::<u32>(),
        repeatable in any::<bool>(),
        clock in arb_stamp(),
        remembered in arb_remembered(false),
        writes in prop::collection::vec(arb_write(), 0..4),
    ) {
        let (peer, properties) = (Peer::numbered(&client, 1), Properties::default());
        let request = Request {
            dialect: Dialect::Sdk,
            payload: &payload,
            timestamp: timestamp.as_deref(),
            fencing_token: fencing_token.as_deref(),
            peer: &peer,
            properties: &properties,
            delivery: Delivery::default(),
            grants: None,
        };
        let it = store::Handled { remembered, repeatable, clock, writes };
        let mut out = Vec::new();
        handled(&mut out, policy, &request, &it);
        let expected = Record::Handled(Box::new(Handled {
            client: &client,
            payload: &payload,
            timestamp: timestamp.as_deref(),
            fencing_token: fencing_token.as_deref(),
            policy,
            repeatable,
            clock,
            remembered: it.remembered,
            writes: it.writes,
        }));
        prop_assert_eq!(read(&out).unwrap(), expected);
        // Every proper prefix is an error.
        for end in 0..out.len() {
            prop_assert!(read(&out[..end]).is_err());
        }
    }

    #[test]
    fn snapshot_of_a_request_survives_a_round_trip(it in arb_remembered(true)) {
        let mut out = Vec::new();
        remembered(&mut out, &it, true);
        let mut reader = Reader(&out);
        prop_assert_eq!(read_remembered(&mut reader, true).unwrap(), it);
        prop_assert!(reader.is_empty());
    }

    #[test]
    fn sweep_survives_a_round_trip(
        now_ms in any::<u64>(), clock in arb_stamp(), writes in prop::collection::vec(arb_write(), 0..4)
    ) {
        let mut out = Vec::new();
        swept(&mut out, now_ms, clock, &writes);
        prop_assert_eq!(read(&out).unwrap(), Record::Swept { now_ms, clock, writes });
    }

    #[test]
    fn watch_changes_survive_a_round_trip(
        client in ".{0,12}",
        numbers in any::<[u64; 2]>(),
        changes in prop::collection::vec(arb_watch_change(), 0..5),
    ) {
        let peer = Peer { client: client.into(), connection: ConnectionId(numbers[0]), session: SessionId(numbers[1]) };
        let changes = WatchChanges { peer, changes };
        let mut out = Vec::new();
        watches(&mut out, &changes);
        prop_assert_eq!(read(&out).unwrap(), Record::Watches(changes));
        for end in 0..out.len() {
            prop_assert!(read(&out[..end]).is_err());
        }
    }

    #[test]
    fn arbitrary_bytes_are_read_without_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..300), kind in 0..=DEADLINES) {
        if let Some(first) = bytes.first_mut() {
            *first = kind;
        }
        let _ = read(&bytes);
    }
}

#[test]
fn value_in_the_payload_is_written_once() {
    let payload = Bytes::from_static(b"*3 SET key value");
    let entry = Entry::new(b"key", b"value", Stamp::default(), None, None);
    let write = Write {
        key_at: Some(7),
        value_at: Some(11),
        ..Write::of(Change::Set(entry))
    };
    let mut out = Vec::new();
    super::write(&mut out, &write);
    assert!(out.len() < 12, "{out:?}");
    let back = read_write(&mut Reader(&out), &payload).unwrap();
    assert_eq!(back.change, write.change);
    assert!(read_write(&mut Reader(&out), &payload[..12]).is_err());
}

/// Versions without modes can still read the logs of an embedded store.
#[test]
fn start_record_contains_the_mode() {
    for (mode, kind) in [(Mode::Embedded, 4), (Mode::Foreign, 9)] {
        let mut out = Vec::new();
        started(&mut out, 7, 300, mode);
        assert_eq!(out, [kind, 7, 172, 2]);
        let (run, now_ms) = (7, 300);
        let expected = Record::Started { run, now_ms, mode };
        assert_eq!(read(&out).unwrap(), expected);
    }
}

#[test]
fn postponement_survives_a_round_trip() {
    let mut out = Vec::new();
    postponed(&mut out, 300, 7);
    assert_eq!(out, [11, 172, 2, 7]);
    let (now_ms, by_ms) = (300, 7);
    assert_eq!(read(&out).unwrap(), Record::Postponed { now_ms, by_ms });
}

#[test]
fn new_deadlines_survive_a_round_trip() {
    let mut out = Vec::new();
    let new = |hidden, key: &'static str, expires_ms| NewDeadline {
        hidden,
        key: key.into(),
        expires_ms,
    };
    let now_ms = 300;
    let new = vec![new(false, "k", 301), new(true, "", u64::MAX)];
    deadlines(&mut out, now_ms, &new);
    assert_eq!(out[..9], [12, 172, 2, 2, 0, 1, b'k', 173, 2]);
    let deadlines = new;
    assert_eq!(read(&out).unwrap(), Record::Deadlines { now_ms, deadlines });
}

#[test]
fn receive_max_survives_a_round_trip() {
    for max in [0, 1025, u16::MAX] {
        let mut out = Vec::new();
        receive_max(&mut out, max);
        assert_eq!(read(&out).unwrap(), Record::ReceiveMax { receive_max: max });
    }
    let beyond = read(&[10, 0x80, 0x80, 4]);
    assert!(beyond.is_err(), "MQTT allows at most 65535");
}

#[test]
fn error_about_a_later_version_says_what_to_do() {
    // A kind, a flag of a request, and a flag of the write of a sweep.
    for record in [&[200][..], &[HANDLED, 8], &[SWEPT, 1, 1, 1, 1, 16]] {
        let error = read(record).unwrap_err().to_string();
        assert!(error.contains("newer"), "{record:?}: {error}");
    }
}
