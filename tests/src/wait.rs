//! Waits for what another process does.

use std::{
    thread,
    time::{Duration, Instant},
};

/// How often to look.
const PAUSE: Duration = Duration::from_millis(5);

/// Waits until `look` finds something, and panics after half a minute.
#[track_caller]
pub fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + Duration::from_secs(30);
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "timed out waiting for: {what}");
        thread::sleep(PAUSE);
    }
}

/// Waits until a condition holds, and panics after half a minute.
#[track_caller]
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    eventually(what, || holds().then_some(()));
}
