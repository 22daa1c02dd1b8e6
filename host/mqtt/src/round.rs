//! What the turns of several connections lead to, written together.
//!
//! A thread that finds many sockets readable and answers each before it reads the next wakes every peer for one answer, and
//! each wake-up costs more than the answer. So the connection whose turn it is opens a round, lets the others that are
//! ready have their turns, and only then writes to all of them. In come outputs that have something to write; out go
//! writes to their sockets, later by [`ROUND_TIME_MAX`] and one turn at most. Holds no bytes.

use std::{
    fmt, mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use crate::{
    limits::{DIRECT_WRITES_MAX, ROUND_TIME_MAX},
    output::Output,
};

/// The rounds of a broker, one after the other.
#[derive(Debug, Default)]
pub(crate) struct Rounds(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// When the round began that is open.
    open_since: Option<Instant>,
    gathered: Vec<Arc<Output>>,
}

/// An open round. It ends when it is dropped, also where its connection's task is.
pub(crate) struct Round<'a>(&'a Rounds);

impl fmt::Debug for Round<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Round").finish_non_exhaustive()
    }
}

impl Rounds {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing in here can panic half way.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a round; `None` where another one is open. One that is overdue (its connection waits behind others) ends
    /// here.
    pub(crate) fn open(&self, now: Instant) -> Option<Round<'_>> {
        let mut state = self.lock();
        let overdue = match state.open_since {
            Some(since) if now.saturating_duration_since(since) < ROUND_TIME_MAX => return None,
            _ => mem::take(&mut state.gathered),
        };
        state.open_since = Some(now);
        drop(state);
        write(&overdue);
        Some(Round(self))
    }

    /// Takes outputs whose writers sleep, to write them at the end of the round. Leaves them where none is open.
    pub(crate) fn gather(&self, writers: &mut Vec<Arc<Output>>) {
        let mut state = self.lock();
        if state.open_since.is_some() {
            state.gathered.append(writers);
        }
    }

    /// Writes what has been gathered so far.
    pub(crate) fn write_gathered(&self) {
        let gathered = mem::take(&mut self.lock().gathered);
        write(&gathered);
    }
}

impl Round<'_> {
    /// Whether anything is to be written at its end.
    pub(crate) fn has_gathered(&self) -> bool {
        !self.0.lock().gathered.is_empty()
    }
}

impl Drop for Round<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        // Where it was overdue this may end another's round early, which only makes two of one.
        state.open_since = None;
        let gathered = mem::take(&mut state.gathered);
        drop(state);
        write(&gathered);
    }
}

/// Writes to sockets in place of their tasks, which sleep; of very many wakes the tasks.
pub(crate) fn write(writers: &[Arc<Output>]) {
    // The rest in parallel, so that one change with many watchers does not keep a thread for itself.
    let (now, later) = writers.split_at(writers.len().min(DIRECT_WRITES_MAX));
    later.iter().for_each(|writer| writer.wake_writer());
    now.iter().for_each(|writer| writer.write_now());
}
