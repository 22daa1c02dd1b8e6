//! A disk that is slow for one process. A library that is loaded before the C library delays each
//! flush, which is what a disk with errors or other work does.

use std::time::Duration;

use crate::injected::Injected;

/// The disk of a process and its restarts.
pub struct SlowDisk(Injected);

impl SlowDisk {
    pub fn fast() -> SlowDisk {
        SlowDisk(Injected::build(include_str!("slow_disk.c")))
    }

    pub fn environment(&self) -> [(&'static str, String); 2] {
        self.0.environment()
    }

    /// Delays each flush from now on.
    pub fn delay(&self, by: Duration) {
        self.0.set(by.as_micros().try_into().unwrap());
    }
}
