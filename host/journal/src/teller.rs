//! Who tells what is released, and when.
//!
//! Enters: positions, from the threads that sync. Leaves: calls of the listener, one at a time, with
//! rising positions. Where there are many answers to send, or more is waiting to be written, a thread of
//! its own sends them, so that the next sync runs meanwhile. A few with nothing behind them
//! are sent by the thread that has just synced: waking another takes longer than a small write.
//!
//! Whoever gets an answer often comes again with the next request. The first of many does while the others' answers are
//! still being sent, and a sync for it alone would cost what one for all of them does. So as long as many are being told,
//! the next write awaits as many records, and no longer.

use std::sync::{Condvar, Mutex, PoisonError, TryLockError};

use crate::limits;
use crate::log::{Log, locked};
use crate::position::Position;

/// The listener and what it knows.
pub(crate) struct Teller {
    listener: Mutex<Listener>,
    bell: Mutex<Bell>,
    rung: Condvar,
}

struct Listener {
    call: Box<dyn Fn(Position) + Send>,
    told: u64,
}

impl Listener {
    fn tell(&mut self, position: u64) {
        if position > self.told {
            (self.call)(Position(position));
            self.told = position;
        }
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
    pub(crate) fn new(call: Box<dyn Fn(Position) + Send>, told: Position) -> Self {
        Self {
            listener: Mutex::new(Listener { call, told: told.0 }),
            bell: Mutex::new(Bell {
                released: told.0,
                closing: false,
            }),
            rung: Condvar::new(),
        }
    }

    /// Wakes the telling thread.
    pub(crate) fn ring(&self, released: Position) {
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
        let few = released.0.saturating_sub(listener.told) <= limits::TOLD_BY_WRITER_MAX;
        if !few || !log.begin_telling() {
            let records = released.0.saturating_sub(listener.told);
            drop(listener);
            let mut pending = log.pending();
            // Together with those that wait already: without them the two would take turns for ever, each with a sync of
            // its own.
            pending.awaited = pending.records() + records;
            drop(pending);
            return self.ring(released);
        }
        listener.tell(released.0);
        log.end_telling();
    }

    /// The telling thread.
    pub(crate) fn run(&self, log: &Log) {
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
            log.await_nobody();
        }
    }

    /// Lets the telling thread end once it has told everything.
    pub(crate) fn close(&self, released: Position) {
        locked(&self.bell).closing = true;
        self.ring(released);
    }
}
