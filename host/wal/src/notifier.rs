//! Decides which thread notifies the listener of released positions.
//!
//! Input is positions from the threads that sync. Output is calls of the listener, one at a time,
//! with rising positions.
//!
//! The writer thread notifies the listener itself while that is fast. Waking another thread takes
//! longer than a few small writes. The notified clients also send their next requests before the
//! next sync, so that one sync covers all of them. If notifying is slow, a separate thread does it
//! in parallel with the next sync.

use std::sync::{Condvar, Mutex, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use crate::limits;
use crate::log::{Log, locked};
use statehouse_protocol::LogPosition;

/// The listener and the wake-up state of the notifier thread.
pub(crate) struct Notifier {
    listener: Mutex<Listener>,
    wakeup: Mutex<Wakeup>,
    woken: Condvar,
}

struct Listener {
    call: Box<dyn Fn(LogPosition) + Send>,
    notified: u64,
    /// Estimated time per record. It rises at once and falls by at most half per call.
    per_record: Duration,
}

impl Listener {
    fn notify(&mut self, position: u64) {
        let records = self.behind(position);
        if records > 0 {
            let began = Instant::now();
            (self.call)(LogPosition(position));
            self.per_record = (began.elapsed() / records).max(self.per_record / 2);
            self.notified = position;
        }
    }

    /// Whether notifying is expected to fit the time that the writer thread may spend. This is an
    /// estimate: a single record may cause thousands of notifications.
    fn is_quick(&self, position: u64) -> bool {
        let took = self.per_record.saturating_mul(self.behind(position));
        took <= Duration::from_micros(limits::NOTIFY_BY_WRITER_US_MAX)
    }

    fn behind(&self, position: u64) -> u32 {
        let records = position.saturating_sub(self.notified);
        u32::try_from(records).unwrap_or(u32::MAX)
    }
}

struct Wakeup {
    released: u64,
    closing: bool,
}

impl Notifier {
    pub(crate) fn new(call: Box<dyn Fn(LogPosition) + Send>, notified: LogPosition) -> Self {
        Self {
            listener: Mutex::new(Listener {
                call,
                notified: notified.0,
                per_record: Duration::ZERO,
            }),
            wakeup: Mutex::new(Wakeup {
                released: notified.0,
                closing: false,
            }),
            woken: Condvar::new(),
        }
    }

    pub(crate) fn wake(&self, released: LogPosition) {
        let mut wakeup = locked(&self.wakeup);
        wakeup.released = wakeup.released.max(released.0);
        drop(wakeup);
        self.woken.notify_one();
    }

    /// Notifies on the calling thread or wakes the notifier thread, depending on which is faster.
    /// Only the writer thread may call it.
    pub(crate) fn notify(&self, log: &Log) {
        let released = log.released();
        let mut listener = match self.listener.try_lock() {
            Ok(listener) => listener,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return self.wake(released),
        };
        if !listener.is_quick(released.0) {
            drop(listener);
            return self.wake(released);
        }
        listener.notify(released.0);
    }

    /// The loop of the notifier thread.
    pub(crate) fn run(&self) {
        let mut notified = 0;
        loop {
            {
                let mut wakeup = locked(&self.wakeup);
                while wakeup.released <= notified {
                    if wakeup.closing {
                        return;
                    }
                    wakeup = self
                        .woken
                        .wait(wakeup)
                        .unwrap_or_else(PoisonError::into_inner);
                }
                notified = wakeup.released;
            }
            locked(&self.listener).notify(notified);
        }
    }

    /// Ends the notifier thread after it has notified up to `released`.
    pub(crate) fn close(&self, released: LogPosition) {
        locked(&self.wakeup).closing = true;
        self.wake(released);
    }

    /// Replaces the estimated time per record and returns the previous one.
    #[cfg(test)]
    pub(crate) fn replace_per_record(&self, per_record: Duration) -> Duration {
        std::mem::replace(&mut locked(&self.listener).per_record, per_record)
    }
}
