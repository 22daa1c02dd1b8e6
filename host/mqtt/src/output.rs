//! The bytes that wait for one socket.
//!
//! Whoever holds the core's lock puts packets in; the connection's writer task swaps the whole buffer out and writes it
//! at once. Above the high-water mark messages are refused (they stay in the session's queue) and the connection's
//! reader pauses. Never does I/O itself.

use std::{
    mem,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use bytes::BytesMut;
use tokio::sync::Notify;

use crate::limits::IDLE_BUFFER_BYTES_MAX;

/// The output of one connection.
#[derive(Debug)]
pub(crate) struct Output {
    high_bytes: usize,
    state: Mutex<State>,
    /// The same as in the state, to be asked without its lock.
    closing: AtomicBool,
    /// For the writer: there are bytes, or it is over.
    work: Notify,
    /// For the reader: below the high-water mark again.
    room: Notify,
    /// For the reader: the broker closes the connection.
    closed: Notify,
    /// For a connection that took the session over: the reader of this one has handed over its last request.
    ended: Notify,
}

#[derive(Debug, Default)]
struct State {
    buffer: BytesMut,
    writing_bytes: usize,
    writer_sleeps: bool,
    reader_waits: bool,
    /// A message was refused: the writer has to ask the core for more.
    starved: bool,
    closing: bool,
    ended: bool,
}

/// What the writer is to do next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Work {
    Write,
    /// Nothing is left, and nothing will come.
    Close,
}

impl Output {
    pub(crate) fn new(high_bytes: usize) -> Self {
        Self {
            high_bytes,
            state: Mutex::default(),
            closing: AtomicBool::new(false),
            work: Notify::new(),
            room: Notify::new(),
            closed: Notify::new(),
            ended: Notify::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing in here can panic half way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a packet that may not wait. True where the writer sleeps and has to be woken.
    pub(crate) fn put(&self, encode: impl FnOnce(&mut BytesMut)) -> bool {
        let mut state = self.lock();
        if state.closing {
            return false;
        }
        encode(&mut state.buffer);
        mem::take(&mut state.writer_sleeps)
    }

    /// Adds a packet unless the buffer is above its mark; then the writer will ask the core for more. `None`: not added.
    pub(crate) fn offer(&self, encode: impl FnOnce(&mut BytesMut)) -> Option<bool> {
        let mut state = self.lock();
        if state.closing {
            return None;
        }
        if state.buffer.len() + state.writing_bytes >= self.high_bytes {
            state.starved = true;
            return None;
        }
        encode(&mut state.buffer);
        Some(mem::take(&mut state.writer_sleeps))
    }

    /// The last packet, or none; nothing can be added after it. Wakes both tasks of the connection.
    pub(crate) fn close(&self, encode: impl FnOnce(&mut BytesMut)) {
        let mut state = self.lock();
        if !state.closing {
            encode(&mut state.buffer);
            state.closing = true;
            self.closing.store(true, Ordering::Release);
            drop(state);
            self.work.notify_one();
            self.closed.notify_one();
        }
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    pub(crate) fn wake_writer(&self) {
        self.work.notify_one();
    }

    /// Ends when [`close`](Self::close) was called. For one waiter.
    pub(crate) async fn closed(&self) {
        self.closed.notified().await;
    }

    /// Ends when the buffer is below its mark.
    pub(crate) async fn room(&self) {
        loop {
            {
                let mut state = self.lock();
                if state.buffer.len() + state.writing_bytes < self.high_bytes {
                    return;
                }
                state.reader_waits = true;
            }
            self.room.notified().await;
        }
    }

    /// Swaps waiting bytes into `chunk`, which is empty; waits for some.
    pub(crate) async fn take(&self, chunk: &mut BytesMut) -> Work {
        loop {
            {
                let mut state = self.lock();
                if !state.buffer.is_empty() {
                    mem::swap(&mut state.buffer, chunk);
                    state.writing_bytes = chunk.len();
                    return Work::Write;
                }
                if state.closing {
                    return Work::Close;
                }
                state.writer_sleeps = true;
            }
            self.work.notified().await;
        }
    }

    /// The chunk is written. True where the core has messages that waited for this.
    pub(crate) fn written(&self, chunk: &mut BytesMut) -> bool {
        chunk.clear();
        if chunk.capacity() > IDLE_BUFFER_BYTES_MAX {
            *chunk = BytesMut::new();
        }
        let mut state = self.lock();
        state.writing_bytes = 0;
        if mem::take(&mut state.reader_waits) {
            self.room.notify_one();
        }
        mem::take(&mut state.starved)
    }

    /// The connection has handed over its last request.
    pub(crate) fn end(&self) {
        self.lock().ended = true;
        self.ended.notify_waiters();
    }

    /// Ends when [`end`](Self::end) was called.
    pub(crate) async fn ended(&self) {
        loop {
            // Made before the look at the flag, so that a call in between is not missed.
            let notified = self.ended.notified();
            if self.lock().ended {
                return;
            }
            notified.await;
        }
    }

    /// What waits to be written, for tests of the core.
    #[cfg(test)]
    pub(crate) fn drain(&self) -> BytesMut {
        let mut state = self.lock();
        state.writer_sleeps = true;
        state.buffer.split()
    }
}
