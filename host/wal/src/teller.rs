//! Who tells what is released, and when.
//!
//! Enters: positions, from the threads that sync. Leaves: calls of the listener, one at a time, with rising positions.
//! The thread that has just synced tells by itself, as long as that is quick: waking another takes longer than a few
//! small writes, and whoever is told comes again meanwhile, so that the next sync is for all of them. Where telling is
//! slow a thread of its own does it, and the next sync runs beside it.

use std::sync::{Condvar, Mutex, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use crate::limits;
use crate::log::{Log, locked};
use statehouse_protocol::LogPosition;

/// The listener and what it knows.
pub(crate) struct Teller {
    listener: Mutex<Listener>,
    bell: Mutex<Bell>,
    rung: Condvar,
}

struct Listener {
    call: Box<dyn Fn(LogPosition) + Send>,
    told: u64,
    /// What telling of a record took: rises at once, and falls by a half each time.
    each: Duration,
}

impl Listener {
    fn tell(&mut self, position: u64) {
        let records = self.behind(position);
        if records > 0 {
            let began = Instant::now();
            (self.call)(LogPosition(position));
            self.each = (began.elapsed() / records).max(self.each / 2);
            self.told = position;
        }
    }

    /// Whether telling should take no longer than the writing thread may take. It is a guess: a single record may lead to
    /// thousands of notifications.
    fn is_quick(&self, position: u64) -> bool {
        let took = self.each.saturating_mul(self.behind(position));
        took <= Duration::from_micros(limits::TOLD_BY_WRITER_US_MAX)
    }

    fn behind(&self, position: u64) -> u32 {
        let records = position.saturating_sub(self.told);
        u32::try_from(records).unwrap_or(u32::MAX)
    }
}

struct Bell {
    released: u64,
    closing: bool,
}

impl std::fmt::Debug for Teller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Teller").finish_non_exhaustive()
    }
}

impl Teller {
    pub(crate) fn new(call: Box<dyn Fn(LogPosition) + Send>, told: LogPosition) -> Self {
        Self {
            listener: Mutex::new(Listener {
                call,
                told: told.0,
                each: Duration::ZERO,
            }),
            bell: Mutex::new(Bell {
                released: told.0,
                closing: false,
            }),
            rung: Condvar::new(),
        }
    }

    /// Wakes the telling thread.
    pub(crate) fn ring(&self, released: LogPosition) {
        let mut bell = locked(&self.bell);
        bell.released = bell.released.max(released.0);
        drop(bell);
        self.rung.notify_one();
    }

    /// Tells here or wakes the telling thread, whatever is quicker. Only the writing thread calls it.
    pub(crate) fn tell(&self, log: &Log) {
        let released = log.released();
        let mut listener = match self.listener.try_lock() {
            Ok(listener) => listener,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return self.ring(released),
        };
        if !listener.is_quick(released.0) {
            drop(listener);
            return self.ring(released);
        }
        listener.tell(released.0);
    }

    /// The telling thread.
    pub(crate) fn run(&self) {
        let mut told = 0;
        loop {
            {
                let mut bell = locked(&self.bell);
                while bell.released <= told {
                    if bell.closing {
                        return;
                    }
                    bell = self.rung.wait(bell).unwrap_or_else(PoisonError::into_inner);
                }
                told = bell.released;
            }
            locked(&self.listener).tell(told);
        }
    }

    /// Lets the telling thread end once it has told everything.
    pub(crate) fn close(&self, released: LogPosition) {
        locked(&self.bell).closing = true;
        self.ring(released);
    }

    /// Says what telling of a record took, and returns what was thought of it.
    #[cfg(test)]
    pub(crate) fn replace_each(&self, each: Duration) -> Duration {
        std::mem::replace(&mut locked(&self.listener).each, each)
    }
}
