//! Versions after a crash that lost the last records.

use super::*;

impl RecordedStore {
    /// The image of a start after a crash that left the first `durable` records.
    fn image_after_crash(&self, durable: usize, wall_ms: u64) -> Image {
        let mut image = Image::new(retention(self.mode));
        for record in &self.records.all()[..durable] {
            image.record(record).expect("the store wrote this record");
        }
        image.finish();
        image.skip_unrecorded_versions(wall_ms);
        image
    }

    /// Sets a key by a client whose clock is ahead. Returns the version, and whether the answer
    /// waits for the disk.
    fn set(&mut self, ahead_ms: u64) -> (Stamp, bool) {
        self.client_ms = self.now_ms + ahead_ms;
        let before = self.records.urgent();
        let (effects, _) = self.request(1, &["SET", "k", "v"]);
        (version(&effects), self.records.urgent() > before)
    }
}

fn version(effects: &Effects) -> Stamp {
    let answer = effects.answer.as_ref();
    answer.and_then(|it| it.version).expect("a version")
}

/// A crash loses what follows the last urgent write. Versions rise nevertheless, and clients whose
/// clock is ahead do not make each write wait for its own flush.
#[test]
fn start_skips_the_versions_of_lost_writes() {
    let mut store = RecordedStore::new(Mode::Embedded);
    let mut durable = store.records.all().len();
    for (ahead_ms, waits) in [
        (0, false),
        (1000, false),
        (1001, true),
        (1001, false),
        (2001, false),
        (2002, true),
        (60_000, true),
        // In the same millisecond: clients would refuse a later version.
        (60_000, true),
    ] {
        let (answered, waited) = store.set(ahead_ms);
        assert_eq!(waited, waits, "{ahead_ms} ms ahead");
        if waited {
            durable = store.records.all().len();
        }
        // The process starts again a millisecond later.
        let image = store.image_after_crash(durable, START_MS + 1);
        let skipped = image.state.hlc.last();
        assert!(skipped >= answered, "{ahead_ms} ms ahead");
        assert!(
            skipped.wall <= START_MS + 60_001,
            "clients refuse later ones"
        );
    }
}

/// The start continues at the time of the last record, which may be far behind the time of the lost
/// ones.
#[test]
fn versions_rise_after_a_crash_while_the_wall_clock_is_behind() {
    for behind_ms in [500, 20_000, 120_000] {
        let mut store = RecordedStore::new(Mode::Embedded);
        store.core.set_wall_behind(behind_ms);
        // Even the start of the run may be lost.
        let mut durable = 0;
        for (passed_ms, ahead_ms) in [
            (0, 0),
            (800, 0),
            (26_000, 0),
            (800, 0),
            (1, 60_000),
            (0, 60_000),
            (500, 60_000),
            (200, 0),
            (90_000, 0),
            (900, 0),
        ] {
            store.now_ms += passed_ms;
            let (answered, waited) = store.set(ahead_ms);
            if waited {
                durable = store.records.all().len();
            }
            let image = store.image_after_crash(durable, store.now_ms - behind_ms);
            let skipped = image.state.hlc.last();
            assert!(skipped >= answered, "{behind_ms} ms behind, {passed_ms} ms");
        }
    }
}

#[test]
fn one_write_a_second_waits_while_the_wall_clock_is_behind() {
    let mut store = RecordedStore::new(Mode::Embedded);
    store.core.set_wall_behind(20_000);
    let waited = (0..100).filter(|_| {
        store.now_ms += 100;
        store.set(0).1
    });
    assert_eq!(waited.count(), 10, "in ten seconds");
}

/// The notification of an expiry has a version too.
#[test]
fn expiry_waits_for_the_disk_while_the_wall_clock_is_behind() {
    let mut store = RecordedStore::new(Mode::Embedded);
    store.core.set_wall_behind(20_000);
    store.request(1, &["SET", "k", "v", "PX", "5000"]);
    let before = store.records.urgent();
    store.now_ms += 5_000;
    store.step(Input::Sweep);
    assert_eq!(store.records.urgent(), before + 1);
}

#[test]
fn version_that_a_crash_revoked_is_unknown_after_the_start() {
    let mut store = RecordedStore::new(Mode::Embedded);
    let (kept, _) = store.set(0);
    let durable = store.records.all().len();
    store.now_ms += 1;
    let (lost, _) = store.set(0);
    let image = store.image_after_crash(durable, store.now_ms + 1);
    let mut store = RecordedStore::begin(Mode::Embedded, 2, Arc::default(), image);
    let mut since = |version: Stamp| {
        let version = format!("{}:{}:n", version.wall, version.counter);
        store.request(1, &["KEYNOTIFY", "k", "FROM", &version]).0
    };
    let unknown = "-ERR the changes since this version are no longer known\\r\\n";
    assert_eq!(answer(&since(lost)), unknown);
    let found = since(kept);
    assert_eq!(answer(&found), "+OK\\r\\n");
    // This response names the time up to which the start skipped.
    assert!(version(&found) > lost);
    assert_eq!(answer(&since(version(&found))), "+OK\\r\\n");
}
