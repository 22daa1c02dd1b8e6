//! Steps of the system clock, as an operator or NTP may cause them.
//!
//! Invariant: a step must never end a key early. After a step back, a key may exist up to 1/15
//! longer.

use super::*;
use statehouse_core::log::record::PolicyRecord;
use statehouse_core::log::{Image, Records};
use statehouse_core::policy::Assignment;

/// A store under a clock that a test sets.
struct Stepped {
    source: Arc<ManualSource>,
    journal: Arc<Records>,
    server: Arc<Server>,
    transport: Arc<RecordingTransport>,
}

impl Stepped {
    fn new() -> Self {
        let policy = standard();
        let source = Arc::new(ManualSource::at(START_MS));
        let journal = Arc::new(Records::default());
        let mut recorder = Recorder::new(journal.clone(), Vec::new(), None);
        recorder.started(1, START_MS, Mode::Embedded);
        let assignment = Assignment::of(policy.digest.into());
        recorder.assign(vec![PolicyRecord::of(&policy, true)], &assignment);
        let server = server(Registry::new(policy, None), source.clone(), recorder);
        let transport = Arc::new(RecordingTransport::default());
        server.attach(transport.clone());
        Self {
            source,
            journal,
            server,
            transport,
        }
    }

    fn set(&self, key: &[u8], timestamp_ms: u64) -> Bytes {
        let set: &[&[u8]] = &[b"SET", key, b"holder", b"NX", b"PX", b"600000"];
        publish(&self.server, timestamp_ms, set, FIRST, None);
        self.transport.0.lock().unwrap().pop().unwrap()
    }
}

const STEP_MS: u64 = 2 * 3_600_000;
const OK: &[u8] = b"+OK\r\n";
const TAKEN: &[u8] = b":-1\r\n";

#[test]
fn clock_stepped_ahead_ends_no_lock_early() {
    let store = Stepped::new();
    assert_eq!(store.set(b"lock", START_MS), OK);
    store.source.advance(1_000);
    store.source.set_wall(START_MS + 1_000 + STEP_MS);
    // The store does not refuse clients whose clocks were stepped too.
    let now_ms = START_MS + STEP_MS + 1_000;
    assert_eq!(store.set(b"lock", now_ms), TAKEN);
    assert_eq!(store.set(b"other", now_ms), OK);
    store.source.advance(598_999);
    assert_eq!(store.set(b"lock", now_ms), TAKEN, "999 ms are left");
    store.source.advance(1);
    assert_eq!(store.set(b"lock", now_ms), OK, "ten minutes are over");
    assert_eq!(
        store.set(b"other", now_ms),
        TAKEN,
        "it was set a second later"
    );
}

#[test]
fn recovered_lock_keeps_its_expiry_after_a_step() {
    let store = Stepped::new();
    assert_eq!(store.set(b"lock", START_MS), OK);
    store.source.set_wall(START_MS + STEP_MS);
    // Without a request, only the sweeper reads the clock.
    store.server.sweep_once();
    let mut image = Image::new(Retention::default());
    for record in &store.journal.all() {
        // A snapshot may have seen the records already, so applying one again changes nothing.
        image.record(record).unwrap();
        image.record(record).unwrap();
    }
    image.finish();
    let entry = image.state.table.get(b"lock").unwrap();
    let locked = store.server.lock();
    assert_eq!(Some(entry), locked.core.store().state().table.get(b"lock"));
    assert_eq!(entry.expires_ms(), Some(START_MS + STEP_MS + 600_000));
    assert_eq!(image.state.owner(b"lock", false), Some("client"));
    assert_eq!(
        locked.core.store().state().owner(b"lock", false),
        Some("client")
    );
}

#[test]
fn clock_stepped_back_is_an_impediment_until_it_catches_up() {
    let store = Stepped::new();
    assert_eq!(store.server.impediment(), None);
    store.source.set_wall(START_MS - 10_000);
    let why = store.server.impediment().unwrap();
    assert!(why.contains("system clock"), "{why}");
    assert_eq!(store.server.stats().clock_behind_ms, 10_000);
    assert_eq!(store.set(b"lock", START_MS), OK);
    store.source.advance(16_000);
    assert_eq!(store.server.stats().clock_behind_ms, 9_000);
    assert!(store.server.impediment().is_some());
    store.source.advance(144_000);
    assert_eq!(store.server.impediment(), None, "16 times the step later");
    assert_eq!(store.server.stats().clock_behind_ms, 0);
    // The time of the store still advanced, so keys expire, 10 s later.
    store.source.advance(600_000 - 150_000 - 1);
    assert_eq!(store.set(b"lock", START_MS), TAKEN, "1 ms is left");
    store.source.advance(1);
    assert_eq!(store.set(b"lock", START_MS), OK);
}
