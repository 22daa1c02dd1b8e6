//! Journals in memory, told to the listener as a reader would.

use bytes::Bytes;

use super::*;
use statehouse_core::clock::Hlc;
use statehouse_core::log::{Meta, Progress, Recorder, Records};
use statehouse_core::store::{Duplicates, Effects, Retention, State, Swept};

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

/// A journal in memory: a snapshot of `base`, ended at `meta_ms`, and records of one write each, at the
/// time that is the wall of their version.
struct Told {
    blocks: Vec<Vec<u8>>,
    records: Vec<Vec<u8>>,
}

impl Told {
    fn new(base: &[Write], meta_ms: Option<u64>, writes: &[Write]) -> Self {
        let mut state = State::default();
        base.iter().for_each(|write| state.write(write));
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
        let kept = Arc::new(Records::default());
        let mut recorder = Recorder::new(kept.clone(), Vec::new(), None);
        for write in writes {
            let swept = Swept {
                now_ms: write.version().wall,
                clock: write.version(),
                writes: vec![write.clone()],
            };
            let effects = Effects {
                swept: Some(swept),
                ..Effects::default()
            };
            recorder.step(None, &effects, false);
        }
        let records = kept.all();
        Self { blocks, records }
    }

    fn read(&self, sink: &mut dyn Sink) -> Result<(), String> {
        // As where a file is recycled under the reader: what came before is to be forgotten.
        for _ in 0..2 {
            sink.reset();
            self.blocks.iter().try_for_each(|block| sink.block(block))?;
            for (record, position) in self.records.iter().zip(1..) {
                sink.record(LogPosition(position), record)?;
            }
        }
        Ok(())
    }

    fn history(&self, key: &str) -> History {
        History::read(key.as_bytes(), 10, |sink| self.read(sink)).unwrap()
    }

    fn as_of(&self, key: &str, moment: Moment) -> Result<Option<String>, AsOf> {
        match AsOf::read(key.as_bytes(), moment, |sink| self.read(sink)).unwrap() {
            AsOf::Value(entry) => Ok(Some(String::from_utf8(entry.value().to_vec()).unwrap())),
            AsOf::Absent => Ok(None),
            other => Err(other),
        }
    }
}

/// The snapshot was begun at 100 and ended at 200; meanwhile the key was written at 150, before its entry
/// was captured.
#[test]
fn a_snapshot_that_saw_a_write_says_nothing_of_before() {
    let during = write("k", Some("during"), 150, None);
    let told = Told::new(
        std::slice::from_ref(&during),
        Some(200),
        &[during.clone(), write("k", Some("after"), 300, None)],
    );
    let history = told.history("k");
    assert_eq!((history.count, history.since_ms), (2, Some(150)));
    assert!(history.before.is_none());
    for moment in [Moment::Version(stamp(149)), Moment::Time(149)] {
        assert_eq!(told.as_of("k", moment), Err(AsOf::TooOld { since_ms: 200 }));
    }
    for at in [150, 250] {
        for moment in [Moment::Version(stamp(at)), Moment::Time(at)] {
            assert_eq!(told.as_of("k", moment), Ok(Some("during".into())));
        }
    }
    assert_eq!(told.as_of("k", Moment::Time(300)), Ok(Some("after".into())));
}

/// The entry was captured before that write: then the key had it all the time.
#[test]
fn an_entry_of_a_snapshot_is_certain_from_its_version_on() {
    let told = Told::new(
        &[write("k", Some("before"), 50, None)],
        Some(200),
        &[
            write("k", Some("during"), 150, None),
            write("k", None, 300, None),
        ],
    );
    let history = told.history("k");
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
                told.as_of("k", moment),
                Ok(value.map(str::to_owned)),
                "{at}"
            );
        }
    }
    let old = told.as_of("k", Moment::Time(49));
    assert_eq!(old, Err(AsOf::TooOld { since_ms: 200 }));
}

/// That there was none is certain only from the end of the snapshot on.
#[test]
fn an_absent_key_of_a_snapshot() {
    let told = Told::new(&[], Some(200), &[write("k", Some("v"), 300, None)]);
    assert!(told.history("k").before.is_none());
    assert_eq!(
        told.as_of("k", Moment::Time(199)),
        Err(AsOf::TooOld { since_ms: 200 })
    );
    assert_eq!(told.as_of("k", Moment::Time(200)), Ok(None));
    assert_eq!(told.as_of("k", Moment::Version(stamp(299))), Ok(None));
    assert_eq!(told.as_of("other", Moment::Version(stamp(300))), Ok(None));
    assert_eq!(
        told.as_of("other", Moment::Version(stamp(301))),
        Err(AsOf::NotYet(stamp(300)))
    );
    // Without a snapshot the store began empty.
    let told = Told::new(&[], None, &[write("k", Some("v"), 300, None)]);
    assert_eq!(told.history("k").since_ms, None);
    assert_eq!(told.as_of("k", Moment::Time(1)), Ok(None));
    assert_eq!(told.as_of("k", Moment::Version(stamp(1))), Ok(None));
}

/// A client's clock may be ahead, and so is the version of what it wrote: at the end of the snapshot the key had it.
#[test]
fn a_version_that_is_ahead_of_its_time() {
    let told = Told::new(&[write("k", Some("v"), 260, None)], Some(210), &[]);
    assert_eq!(told.as_of("k", Moment::Time(210)), Ok(Some("v".into())));
    assert_eq!(told.as_of("k", Moment::Time(259)), Ok(Some("v".into())));
    let too_old = told.as_of("k", Moment::Time(209));
    assert_eq!(too_old, Err(AsOf::TooOld { since_ms: 210 }));
}

/// A key whose time is over is gone, also before a sweep has come.
#[test]
fn an_expired_key() {
    let told = Told::new(
        &[],
        None,
        &[
            write("k", Some("v"), 100, Some(200)),
            write("other", Some("v"), 250, None),
            write("k", None, 260, None),
        ],
    );
    assert_eq!(told.as_of("k", Moment::Time(199)), Ok(Some("v".into())));
    assert_eq!(told.as_of("k", Moment::Time(200)), Ok(None));
    assert_eq!(
        told.as_of("k", Moment::Version(stamp(249))),
        Ok(Some("v".into()))
    );
    assert_eq!(told.as_of("k", Moment::Version(stamp(250))), Ok(None));
}

/// A write onto a key whose time was over ends it first: that is nobody's doing.
#[test]
fn an_end_in_anothers_request_is_not_his() {
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
