//! Deadlines after a step of the clock.

use super::*;

impl RecordedStore {
    /// Steps the clock ahead by a day.
    fn step_clock(&mut self) {
        let step_ms = 24 * 3_600_000;
        self.now_ms += step_ms;
        assert!(self.core.postpone(self.now_ms, step_ms));
    }
}

/// Deadlines in the log are of the time before the step.
#[test]
fn redelivery_after_a_clock_step_and_a_restart_has_no_effect() {
    let mut store = RecordedStore::new(Mode::Foreign);
    let set = ["SET", "k", "v", "NX"];
    store.repeat(7, &set);
    store.step_clock();
    store.request(1, &["DEL", "k"]);
    let mut store = store.restart(Mode::Foreign);
    assert_eq!(store.repeat(7, &set).repeated, Some(Rerun::Same));
}

#[test]
fn deadlines_move_with_the_clock_and_survive_a_restart() {
    let moved = check_moved_deadlines(RecordedStore::new(Mode::Embedded));
    let bytes: usize = moved.iter().map(Vec::len).sum();
    assert!(bytes < 80, "{bytes} bytes: a record has keys, not values");

    // A host of version 0.1.0 would stop at records that it does not know.
    let store = RecordedStore::new(Mode::Embedded);
    store.records.add_old_readers();
    for moved in check_moved_deadlines(store) {
        use record::Record::{Postponed, Swept};
        let read = record::read(&moved).unwrap();
        assert!(matches!(read, Swept { .. } | Postponed { .. }), "{read:?}");
    }
}

/// Returns the records of a step of the clock.
fn check_moved_deadlines(mut store: RecordedStore) -> Vec<Vec<u8>> {
    let value = "v".repeat(90);
    store.request(1, &["SET", "lock", &value, "PX", "500"]);
    store.request(1, &["SET", "replaced", "v", "PX", "500"]);
    let before = store.records.all().len();
    store.step_clock();
    let moved = store.records.all()[before..].to_vec();
    let check_owner = |store: &RecordedStore| {
        let owner = store.core.store().state().owner(b"lock", false);
        assert_eq!(owner, Some("client-1"));
    };
    check_owner(&store);
    store.request(1, &["SET", "replaced", "w"]);
    for _ in 0..2 {
        let held = store.ask(2, &["GET", "lock"]);
        assert!(held.starts_with("$90\\r\\n"), "{held}");
        store = store.restart(Mode::Embedded);
        check_owner(&store);
    }
    store.now_ms += 500;
    store.step(Input::Sweep);
    assert_eq!(store.ask(2, &["GET", "lock"]), "$-1\\r\\n");
    assert_eq!(store.ask(2, &["GET", "replaced"]), "$1\\r\\nw\\r\\n");
    moved
}

#[test]
fn latest_deadline_does_not_move() {
    let mut store = RecordedStore::new(Mode::Embedded);
    store.request(1, &["SET", "k", "v", "PX", "9223372036854775807"]);
    for _ in 0..2 {
        let entry = store.core.store().state().table.get(b"k").unwrap();
        assert_eq!(entry.expires_ms(), Some(i64::MAX as u64));
        store.step_clock();
    }
}

#[test]
fn start_renotifies_expirations_from_before_a_clock_step() {
    let mut store = RecordedStore::new(Mode::Foreign);
    store.request(1, &["SET", "k", "v", "PX", "500"]);
    store.request(2, &["KEYNOTIFY", "k"]);
    store.now_ms += 500;
    store.step(Input::Sweep);
    store.step_clock();
    let store = store.restart(Mode::Foreign);
    assert_eq!(store.expirations.len(), 1);
}
