//! Tests of the history with journals in memory.

use bytes::Bytes;

use super::*;
use statehouse_core::clock::Hlc;
use statehouse_core::log::{Meta, Progress, Recorder, Records};
use statehouse_core::request::{Delivery, Dialect, Request};
use statehouse_core::store::{
    Context, Duplicates, Effects, Handled, Outcome, Peer, Remembered, Retention, State,
    StoredPayload, Swept,
};
use statehouse_mqtt::Properties;

fn stamp(wall: u64) -> Stamp {
    Stamp { wall, counter: 0 }
}

fn write(key: &'static str, value: Option<&'static str>, wall: u64, expires: Option<u64>) -> Write {
    let key = Bytes::from_static(key.as_bytes());
    Write::of(match value {
        Some(value) => {
            let entry = Entry::new(&key, value.as_bytes(), stamp(wall), None, expires);
            store::Change::Set(entry)
        }
        None => store::Change::Deleted(key, stamp(wall)),
    })
}

fn too_old(since_ms: u64) -> AsOf {
    let damage = None;
    AsOf::TooOld { since_ms, damage }
}

/// A request whose only write is this one, at the wall of its version.
fn handled(write: &Write) -> Handled {
    let version = write.version();
    Handled {
        remembered: Remembered {
            number: 1,
            delivery: Delivery::default(),
            turn: 1,
            identity: [0; 16],
            until_ms: version.wall,
            context: Context {
                now_ms: version.wall,
                clock: Stamp::default(),
                dialect: Dialect::Sdk,
                policy: blake3::hash(b""),
            },
            captured: None,
            outcome: Outcome {
                payload: StoredPayload::Whole(Bytes::from_static(b"+OK\r\n")),
                version: Some(version),
                command: None,
                put: true,
            },
        },
        repeatable: false,
        clock: version,
        writes: vec![write.clone()],
    }
}

/// The record of a request of the client `writer`.
fn request_record(write: &Write) -> Vec<Vec<u8>> {
    let (payload, peer) = (Bytes::new(), Peer::numbered("writer", 1));
    let request = Request {
        dialect: Dialect::Sdk,
        payload: &payload,
        timestamp: None,
        fencing_token: None,
        peer: &peer,
        properties: &Properties::default(),
        delivery: Delivery::default(),
        grants: None,
    };
    let effects = Effects {
        handled: Some(Box::new(handled(write))),
        ..Effects::default()
    };
    recorded(|recorder| _ = recorder.step(Some(&request), &effects, false))
}

fn recorded(record: impl FnOnce(&mut Recorder)) -> Vec<Vec<u8>> {
    let log = Arc::new(Records::default());
    record(&mut Recorder::new(log.clone(), Vec::new(), None));
    log.all()
}

/// A journal in memory: a snapshot of `base`, which ended at `meta_ms`, and requests of one write
/// each. The time of a request is the wall of the write's version.
struct TestJournal {
    blocks: Vec<Vec<u8>>,
    records: Vec<Vec<u8>>,
    /// The damage before the snapshot.
    damage: Option<Damage>,
}

impl TestJournal {
    fn new(base: &[Write], meta_ms: Option<u64>, writes: &[Write]) -> Self {
        let mut state = State::default();
        state.write_by(base, Some("of snapshot"));
        let (duplicates, mut progress) =
            (Duplicates::new(Retention::default()), Progress::default());
        let mut blocks = Vec::new();
        if let Some(now_ms) = meta_ms {
            let clock = Hlc::at(stamp(now_ms)).last();
            let meta = || Meta {
                clock,
                now_ms,
                ..Meta::default()
            };
            while let Some(block) = progress.next(&state, &duplicates, meta) {
                blocks.push(block);
            }
        }
        let records = writes.iter().flat_map(request_record).collect();
        Self {
            blocks,
            records,
            damage: None,
        }
    }

    /// Adds the record of a new deadline of a key.
    fn postpone(&mut self, now_ms: u64, key: &'static str, expires_ms: u64) {
        let deadline = NewDeadline {
            hidden: false,
            key: key.into(),
            expires_ms,
        };
        self.records.extend(recorded(|recorder| {
            recorder.deadlines(now_ms, &[deadline], &State::default());
        }));
    }

    /// Adds a record without a client: of an expiry, or of a new deadline as version 0.1.0 records
    /// it.
    fn sweep(&mut self, now_ms: u64, write: Write) {
        let swept = Swept {
            now_ms,
            clock: write.version(),
            writes: vec![write],
        };
        let effects = Effects {
            swept: Some(swept),
            ..Effects::default()
        };
        self.records.extend(recorded(|recorder| {
            recorder.step(None, &effects, false);
        }));
    }

    fn read(&self, sink: &mut dyn Sink) -> Result<(), String> {
        // If a file is recycled while it is read, reading restarts. Earlier findings must not
        // count.
        for _ in 0..2 {
            sink.reset();
            self.blocks.iter().try_for_each(|block| sink.block(block))?;
            for (record, position) in self.records.iter().zip(1..) {
                sink.record(LogPosition(position), record)?;
            }
            if let Some(damage) = &self.damage {
                sink.gap(damage);
            }
        }
        Ok(())
    }

    fn history(&self, key: &str) -> History {
        History::read(key.as_bytes(), 10, usize::MAX, |sink| self.read(sink)).unwrap()
    }

    fn as_of(&self, key: &str, moment: Moment) -> Result<Option<String>, AsOf> {
        match AsOf::read(key.as_bytes(), moment, |sink| self.read(sink)).unwrap() {
            AsOf::Value(entry) => Ok(Some(String::from_utf8(entry.value().to_vec()).unwrap())),
            AsOf::Absent => Ok(None),
            other => Err(other),
        }
    }
}

/// The snapshot began at 100 and ended at 200. The key was written at 150, before its entry was
/// captured.
#[test]
fn write_in_the_snapshot_hides_the_entry_before_it() {
    let during = write("k", Some("during"), 150, None);
    let writes = [during.clone(), write("k", Some("after"), 300, None)];
    let journal = TestJournal::new(&[during], Some(200), &writes);
    let history = journal.history("k");
    assert_eq!((history.count, history.since_ms), (2, Some(150)));
    assert!(history.before.is_none() && !history.absent_before);
    for moment in [Moment::Version(stamp(149)), Moment::Time(149)] {
        assert_eq!(journal.as_of("k", moment), Err(too_old(200)));
    }
    for at in [150, 250] {
        for moment in [Moment::Version(stamp(at)), Moment::Time(at)] {
            assert_eq!(journal.as_of("k", moment), Ok(Some("during".into())));
        }
    }
    assert_eq!(
        journal.as_of("k", Moment::Time(300)),
        Ok(Some("after".into()))
    );
}

/// The entry was captured before that write.
#[test]
fn snapshot_entry_is_certain_from_its_version_on() {
    let before = [write("k", Some("before"), 50, None)];
    let set = write("k", Some("during"), 150, None);
    let writes = [set, write("k", None, 300, None)];
    let journal = TestJournal::new(&before, Some(200), &writes);
    let history = journal.history("k");
    assert_eq!(history.count, 2);
    assert_eq!(history.before.map(|entry| entry.version()), Some(stamp(50)));
    for (at, value) in [
        (50, Some("before")),
        (149, Some("before")),
        (150, Some("during")),
        (300, None),
    ] {
        for moment in [Moment::Version(stamp(at)), Moment::Time(at)] {
            assert_eq!(
                journal.as_of("k", moment),
                Ok(value.map(str::to_owned)),
                "{at}"
            );
        }
    }
    let old = journal.as_of("k", Moment::Time(49));
    assert_eq!(old, Err(too_old(200)));
}

#[test]
fn key_missing_in_the_snapshot_is_absent_from_its_end_on() {
    let journal = TestJournal::new(&[], Some(200), &[write("k", Some("v"), 300, None)]);
    let history = journal.history("k");
    assert!(history.before.is_none() && history.absent_before);
    let not_yet = AsOf::NotYet(stamp(300));
    for (key, moment, expected) in [
        ("k", Moment::Time(199), Err(too_old(200))),
        ("k", Moment::Time(200), Ok(None)),
        ("k", Moment::Version(stamp(299)), Ok(None)),
        ("other", Moment::Version(stamp(300)), Ok(None)),
        ("other", Moment::Version(stamp(301)), Err(not_yet)),
    ] {
        assert_eq!(journal.as_of(key, moment), expected, "{key} {moment:?}");
    }
    // Without a snapshot, the log begins with an empty store.
    let journal = TestJournal::new(&[], None, &[write("k", Some("v"), 300, None)]);
    let history = journal.history("k");
    assert!(history.since_ms.is_none() && history.absent_before);
    assert_eq!(journal.as_of("k", Moment::Time(1)), Ok(None));
    assert_eq!(journal.as_of("k", Moment::Version(stamp(1))), Ok(None));
}

/// It may have existed before: then the snapshot has no entry because the key was deleted before it
/// was captured.
#[test]
fn key_changed_during_the_snapshot_was_perhaps_present() {
    let set = write("k", Some("during"), 150, None);
    let journal = TestJournal::new(&[], Some(200), &[set, write("k", None, 160, None)]);
    let history = journal.history("k");
    assert!(history.before.is_none() && !history.absent_before);
    assert!(journal.history("other").absent_before);
}

/// If a client's clock is ahead, so are the versions of its writes. At the end of the snapshot the
/// key had the entry.
#[test]
fn version_ahead_of_the_snapshot_counts_from_its_end_on() {
    let journal = TestJournal::new(&[write("k", Some("v"), 260, None)], Some(210), &[]);
    assert_eq!(journal.as_of("k", Moment::Time(210)), Ok(Some("v".into())));
    assert_eq!(journal.as_of("k", Moment::Time(259)), Ok(Some("v".into())));
    let before = journal.as_of("k", Moment::Time(209));
    assert_eq!(before, Err(too_old(210)));
}

/// Regression: it was reported like history that was removed.
#[test]
fn damage_before_the_history_is_reported() {
    let snapshot = [write("k", Some("before"), 150, None)];
    let after = [write("k", Some("after"), 300, None)];
    let mut journal = TestJournal::new(&snapshot, Some(200), &after);
    journal.damage = Some(Damage {
        file: "000000000003.log".to_owned(),
        offset: Some(64),
        reason: "a frame is damaged".to_owned(),
        lost_from: None,
        lost_to: None,
    });
    let place = "000000000003.log is damaged at byte 64: a frame is damaged";
    assert_eq!(journal.history("k").damage.as_deref(), Some(place));
    let too_old = AsOf::TooOld {
        since_ms: 200,
        damage: Some(place.to_owned()),
    };
    assert_eq!(journal.as_of("k", Moment::Time(100)), Err(too_old));
    let after = journal.as_of("k", Moment::Time(300));
    assert_eq!(after, Ok(Some("after".to_owned())));
}

/// The clock was stepped from 199 to 1150. Regression: the key did not exist meanwhile.
#[test]
fn key_with_a_moved_deadline_exists_while_the_clock_skips() {
    let set = write("k", Some("v"), 100, Some(200));
    let mut present = TestJournal::new(&[], None, std::slice::from_ref(&set));
    present.postpone(1100, "other", 9000);
    present.postpone(1150, "k", 1200);
    let mut earlier = TestJournal::new(&[], None, &[set]);
    earlier.sweep(1100, write("other", Some("v"), 90, Some(9000)));
    earlier.sweep(1150, write("k", Some("v"), 100, Some(1200)));
    for journal in [present, earlier] {
        let history = journal.history("k");
        assert_eq!(history.count, 1);
        let change = &history.changes[0];
        assert_eq!(change.client.as_deref(), Some("writer"));
        let expires_ms = match &change.what {
            What::Set { expires_ms, .. } => *expires_ms,
            what => panic!("{what:?}"),
        };
        assert_eq!(expires_ms, Some(1200));
        for (at, value) in [
            (99, None),
            (199, Some("v")),
            (1149, Some("v")),
            (1199, Some("v")),
            (1200, None),
        ] {
            let found = journal.as_of("k", Moment::Time(at));
            assert_eq!(found, Ok(value.map(str::to_owned)), "at {at}");
        }
    }
}

#[test]
fn deadline_of_a_later_write_does_not_extend_an_expired_key() {
    let writes = [
        write("k", Some("v"), 100, Some(200)),
        write("other", Some("v"), 250, None),
        write("k", Some("w"), 300, Some(400)),
    ];
    let mut journal = TestJournal::new(&[], None, &writes);
    journal.postpone(1150, "k", 1200);
    for moment in [Moment::Time(250), Moment::Version(stamp(250))] {
        assert_eq!(journal.as_of("k", moment), Ok(None), "{moment:?}");
    }
    // The key had expired before the step, and was not removed yet.
    let expired = write("k", Some("v"), 100, Some(200));
    let mut journal = TestJournal::new(&[], None, &[expired]);
    journal.postpone(1180, "k", 1150);
    assert_eq!(journal.as_of("k", Moment::Time(210)), Ok(None));
}

#[test]
fn expired_key_is_absent_before_a_sweep_removes_it() {
    let writes = [
        write("k", Some("v"), 100, Some(200)),
        write("other", Some("v"), 250, None),
        write("k", None, 260, None),
    ];
    let journal = TestJournal::new(&[], None, &writes);
    for (moment, value) in [
        (Moment::Time(199), Some("v")),
        (Moment::Time(200), None),
        (Moment::Version(stamp(249)), Some("v")),
        (Moment::Version(stamp(250)), None),
    ] {
        let found = journal.as_of("k", moment);
        assert_eq!(found, Ok(value.map(str::to_owned)), "{moment:?}");
    }
}

#[test]
fn writer_is_found_by_the_version_alone() {
    let lock = write("k", Some("of snapshot"), 50, Some(60));
    let journal = TestJournal::new(&[lock, write("l", Some("v"), 40, None)], Some(100), &[]);
    let writer = |key: &str, wall| {
        let read = |sink: &mut dyn Sink| journal.read(sink);
        let found = Writer::read(key.as_bytes(), stamp(wall), read);
        found.unwrap().map(|(writer, _)| writer)
    };
    let found = Writer {
        client: "of snapshot".into(),
        user: None,
        is_holder: true,
    };
    assert_eq!(writer("k", 50).as_ref(), Some(&found));
    let plain = Writer {
        is_holder: false,
        ..found
    };
    assert_eq!(writer("l", 40), Some(plain));
    // As in the directory of another store, or in one that lags behind.
    assert_eq!((writer("k", 51), writer("m", 50)), (None, None));
    let set = write("k", Some("v"), 50, Some(60));
    let mut moved = TestJournal::new(&[set], Some(100), &[]);
    moved.sweep(110, write("k", Some("v"), 50, Some(160)));
    let read = |sink: &mut dyn Sink| moved.read(sink);
    let (writer, _) = Writer::read(b"k", stamp(50), read).unwrap().unwrap();
    assert_eq!(writer.client, "of snapshot", "a sweep moved the deadline");
}

/// A request for an expired key removes the key first.
#[test]
fn expiry_in_a_request_has_neither_client_nor_policy() {
    let policy = Arc::new(PolicyRecord {
        digest: blake3::hash(b""),
        name: "standard".into(),
        version: "1".into(),
        built_in: true,
    });
    let origin = Origin {
        position: LogPosition(1),
        now_ms: 5,
        client: Some("client"),
        user: None,
        policy: Some(&policy),
    };
    let deleted = Change::new(&write("k", None, 5, None), &origin);
    assert!(matches!(deleted.what, What::Deleted));
    assert!(deleted.client.is_some() && deleted.policy.is_some());
    let expired = Write::of(store::Change::Expired("k".into(), stamp(5)));
    let expired = Change::new(&expired, &origin);
    assert!(matches!(expired.what, What::Expired));
    assert!(expired.client.is_none() && expired.policy.is_none());
}

#[test]
fn history_keeps_the_newest_changes_within_a_number_and_bytes() {
    let writes: Vec<_> = (0..20)
        .map(|at| write("k", Some("value"), 100 + at, None))
        .collect();
    let journal = TestJournal::new(&[], None, &writes);
    let newest = |limit, bytes_max| {
        let history = History::read(b"k", limit, bytes_max, |sink| journal.read(sink)).unwrap();
        assert_eq!(history.count, 20);
        let times = history.changes.iter().map(|it| it.now_ms);
        times.collect::<Vec<_>>()
    };
    let one = journal.history("k").changes[0].bytes();
    assert_eq!(newest(3, usize::MAX), [117, 118, 119]);
    assert_eq!(newest(10, 2 * one), [118, 119]);
    assert_eq!(newest(10, 2 * one - 1), [119]);
    assert!(newest(0, usize::MAX).is_empty());
}
