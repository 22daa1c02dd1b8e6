//! A wall clock of one process that a test can set. A library that is loaded before the C library
//! shifts CLOCK_REALTIME; the monotonic clocks must stay right, as they do on a machine whose clock
//! is set.
//!
//! libfaketime does not fit: with right monotonic clocks its `clock_nanosleep` refuses absolute
//! times, and each process that is killed leaves files in `/dev/shm`.

use crate::injected::Injected;

/// The wall clock of a process and its restarts.
pub struct WallClock(Injected);

impl WallClock {
    pub fn right() -> WallClock {
        WallClock(Injected::build(include_str!("wall_clock.c")))
    }

    pub fn environment(&self) -> [(&'static str, String); 2] {
        self.0.environment()
    }

    /// Sets the clock this many seconds ahead, or behind if negative.
    pub fn set(&self, offset_s: i64) {
        self.0.set(offset_s);
    }
}
