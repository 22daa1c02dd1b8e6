//! The bytes that wait for one socket.
//!
//! Whoever holds the core's lock puts packets in, and writes them at once after giving it back, where the socket takes
//! them: waking a task for it would cost more than the write. The connection's writer task does the rest: it swaps the
//! whole buffer out and writes it as the socket has room. Above the high-water mark messages are refused (they stay in
//! the session's queue) and the connection's reader pauses. A packet that tells of a change whose record is not durable
//! yet stands behind a mark, and nothing from there on is given to the socket until that record is released. Never waits
//! for a socket.

use std::{
    collections::VecDeque,
    fmt, io, mem,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use bytes::{Buf, BytesMut};
use tokio::sync::Notify;

use crate::{gate::BatchNumber, limits::IDLE_BUFFER_BYTES_MAX};

/// A socket that takes bytes without anybody waiting for it.
pub(crate) trait Direct: fmt::Debug + Send + Sync {
    /// Writes what the socket has room for; `WouldBlock` where that is nothing.
    fn try_write(&self, bytes: &[u8]) -> io::Result<usize>;
}

/// The output of one connection.
#[derive(Debug)]
pub(crate) struct Output {
    high_bytes: usize,
    /// None for streams that only a task can write to.
    direct: Option<Arc<dyn Direct>>,
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
    /// What was ever taken out of the buffer: where it begins in the stream.
    taken: u64,
    /// Places in the stream that nothing may pass before a batch is released; rising in both numbers.
    marks: VecDeque<(u64, BatchNumber)>,
    /// Batches up to this are known to be released.
    released: BatchNumber,
    /// Where the last packet of a closed connection begins in the stream.
    last_words: u64,
    writing_bytes: usize,
    writer_sleeps: bool,
    reader_waits: bool,
    /// A message was refused: the writer has to ask the core for more.
    starved: bool,
    closing: bool,
    ended: bool,
}

/// How a packet was added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Added {
    /// The writer sleeps and has to be woken.
    pub(crate) wake: bool,
    /// It made a mark: somebody has to tell this output when the batch is released.
    pub(crate) marked: bool,
}

impl State {
    /// How much of the buffer may be written.
    fn open_bytes(&self) -> usize {
        match self.marks.front() {
            // A mark is never before what was taken, nor behind the end of the buffer.
            Some((at, _)) => (at - self.taken) as usize,
            None => self.buffer.len(),
        }
    }

    fn end(&self) -> u64 {
        self.taken + self.buffer.len() as u64
    }

    fn add(&mut self, after: BatchNumber, encode: impl FnOnce(&mut BytesMut)) -> Added {
        // What stands behind a later batch already waits long enough.
        let covers = self
            .released
            .max(self.marks.back().map_or(0, |(_, batch)| *batch));
        let marked = after > covers;
        if marked {
            self.marks.push_back((self.end(), after));
        }
        encode(&mut self.buffer);
        let wake = self.marks.is_empty() && mem::take(&mut self.writer_sleeps);
        Added { wake, marked }
    }
}

/// What the writer is to do next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Work {
    Write,
    /// Nothing is left, and nothing will come.
    Close,
}

impl Output {
    pub(crate) fn new(high_bytes: usize, direct: Option<Arc<dyn Direct>>) -> Self {
        Self {
            high_bytes,
            direct,
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

    /// Adds a packet that may not wait for others, but for the release of a batch (0: for none). `None`: the connection
    /// is closing.
    pub(crate) fn put(
        &self,
        after: BatchNumber,
        encode: impl FnOnce(&mut BytesMut),
    ) -> Option<Added> {
        let mut state = self.lock();
        (!state.closing).then(|| state.add(after, encode))
    }

    /// The same unless the buffer is above its mark; then the writer will ask the core for more. `None`: not added.
    pub(crate) fn offer(
        &self,
        after: BatchNumber,
        encode: impl FnOnce(&mut BytesMut),
    ) -> Option<Added> {
        let mut state = self.lock();
        if state.closing {
            return None;
        }
        if state.buffer.len() + state.writing_bytes >= self.high_bytes {
            state.starved = true;
            return None;
        }
        Some(state.add(after, encode))
    }

    /// Whether a message would be taken.
    pub(crate) fn has_room(&self) -> bool {
        let state = self.lock();
        !state.closing && state.buffer.len() + state.writing_bytes < self.high_bytes
    }

    /// Everything up to this batch is durable.
    pub(crate) fn release(&self, batch: BatchNumber) {
        let mut state = self.lock();
        state.released = state.released.max(batch);
        let released = state.released;
        while state
            .marks
            .pop_front_if(|(_, batch)| *batch <= released)
            .is_some()
        {}
        // A closing connection may wait with nothing left to write.
        if (state.open_bytes() > 0 || state.closing) && mem::take(&mut state.writer_sleeps) {
            drop(state);
            self.work.notify_one();
        }
    }

    /// The last packet, or none; nothing can be added after it. Wakes both tasks of the connection.
    pub(crate) fn close(&self, encode: impl FnOnce(&mut BytesMut)) {
        let mut state = self.lock();
        if !state.closing {
            state.last_words = state.end();
            encode(&mut state.buffer);
            state.closing = true;
            self.closing.store(true, Ordering::Release);
            drop(state);
            self.work.notify_one();
            self.closed.notify_one();
        }
    }

    /// Gives up what waits for a record, on a closed connection: what is behind the first mark goes, but for the last
    /// packet, which tells of nothing. Where not even the CONNACK has left that goes too (section 3.14: no DISCONNECT
    /// before a CONNACK). False where nothing waited.
    pub(crate) fn cut(&self) -> bool {
        let mut state = self.lock();
        if !state.closing || state.marks.is_empty() {
            return false;
        }
        let open = state.open_bytes();
        // The last packet stands behind every mark, since nothing is added after it.
        let last = (state.last_words - state.taken) as usize;
        let last = state.buffer.split_off(last);
        state.buffer.truncate(open);
        if state.end() > 0 {
            state.buffer.unsplit(last);
        }
        state.marks.clear();
        drop(state);
        self.work.notify_one();
        true
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    pub(crate) fn wake_writer(&self) {
        self.work.notify_one();
    }

    /// Writes what there is in place of the writer, which sleeps and was about to be woken: only then nobody else
    /// writes. Wakes it where that is not all.
    pub(crate) fn write_now(&self) {
        if !self.write_all_now() {
            self.wake_writer();
        }
    }

    /// False where the writer is needed.
    fn write_all_now(&self) -> bool {
        let Some(direct) = &self.direct else {
            return false;
        };
        let mut state = self.lock();
        let open = state.open_bytes();
        if open == 0 || state.starved || state.closing {
            return false;
        }
        // What is wrong with the socket the writer will find out itself.
        let written = direct.try_write(&state.buffer[..open]).unwrap_or(0);
        state.taken += written as u64;
        if written == state.buffer.len() {
            state.buffer.clear();
            if state.buffer.capacity() > IDLE_BUFFER_BYTES_MAX {
                state.buffer = BytesMut::new();
            }
        } else {
            state.buffer.advance(written);
        }
        if mem::take(&mut state.reader_waits) {
            self.room.notify_one();
        }
        state.writer_sleeps = written == open;
        state.writer_sleeps
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

    /// Moves the bytes that may be written into `chunk`, which is empty; waits for some.
    pub(crate) async fn take(&self, chunk: &mut BytesMut) -> Work {
        loop {
            {
                let mut state = self.lock();
                let open = state.open_bytes();
                if open > 0 {
                    if open == state.buffer.len() {
                        mem::swap(&mut state.buffer, chunk);
                    } else {
                        chunk.extend_from_slice(&state.buffer[..open]);
                        state.buffer.advance(open);
                    }
                    state.taken += open as u64;
                    state.writing_bytes = open;
                    return Work::Write;
                }
                if state.closing && state.buffer.is_empty() {
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

    /// What may be written, in place of a writer that goes to sleep then.
    #[cfg(any(test, feature = "simulation"))]
    pub(crate) fn drain(&self) -> BytesMut {
        let mut state = self.lock();
        state.writer_sleeps = true;
        let open = state.open_bytes();
        state.taken += open as u64;
        state.buffer.split_to(open)
    }
}
