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
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use bytes::{Buf, BytesMut};
use tokio::{sync::Notify, time::timeout};

use crate::{
    gate::BatchNumber,
    limits::{IDLE_BUFFER_BYTES_MAX, OUTPUT_BYTES_FREE, OUTPUT_TOTAL_LOOK},
};

/// A socket that takes bytes without anybody waiting for it.
pub(crate) trait Direct: fmt::Debug + Send + Sync {
    /// Writes what the socket has room for; `WouldBlock` where that is nothing.
    fn try_write(&self, bytes: &[u8]) -> io::Result<usize>;

    /// Acknowledges what has come by now, without waiting for something to send with it.
    fn acknowledge(&self) {}
}

/// The encoded output of all connections together. Outputs up to [`OUTPUT_BYTES_FREE`] are not counted, so that clients that
/// read never touch this.
#[derive(Debug)]
pub(crate) struct OutputTotal {
    bytes: AtomicUsize,
    bytes_max: usize,
}

impl OutputTotal {
    pub(crate) fn new(bytes_max: usize) -> Self {
        Self {
            bytes: AtomicUsize::new(0),
            bytes_max,
        }
    }

    /// Whether no output may grow beyond what is not counted.
    fn is_over(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) >= self.bytes_max
    }
}

/// The output of one connection.
#[derive(Debug)]
pub(crate) struct Output {
    high_bytes: usize,
    total: Arc<OutputTotal>,
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
    /// What of this is in the total of all outputs.
    counted_bytes: usize,
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

    /// What is not written yet.
    fn held_bytes(&self) -> usize {
        self.buffer.len() + self.writing_bytes
    }

    /// Brings the total up to date. Must follow each change of the buffer and of what is being written.
    fn count(&mut self, total: &OutputTotal) {
        let held = self.held_bytes();
        let now = if held > OUTPUT_BYTES_FREE { held } else { 0 };
        let before = mem::replace(&mut self.counted_bytes, now);
        if now > before {
            total.bytes.fetch_add(now - before, Ordering::Relaxed);
        } else if now < before {
            total.bytes.fetch_sub(before - now, Ordering::Relaxed);
        }
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
    /// Nothing to write; messages that the total kept out are to be offered again.
    Refill,
    /// Nothing is left, and nothing will come.
    Close,
}

impl Output {
    pub(crate) fn new(
        high_bytes: usize,
        total: Arc<OutputTotal>,
        direct: Option<Arc<dyn Direct>>,
    ) -> Self {
        Self {
            high_bytes,
            total,
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
        (!state.closing).then(|| self.add(&mut state, after, encode))
    }

    /// The same unless the buffer is above its mark, or this packet would make it one that counts while the total is used
    /// up; then the writer will ask the core for more. `None`: not added.
    pub(crate) fn offer(
        &self,
        after: BatchNumber,
        packet_bytes: usize,
        encode: impl FnOnce(&mut BytesMut),
    ) -> Option<Added> {
        let mut state = self.lock();
        if state.closing {
            return None;
        }
        if !self.takes(&state, packet_bytes) {
            state.starved = true;
            // It may have nothing to write, and looks again by itself then.
            if state.held_bytes() < self.high_bytes && mem::take(&mut state.writer_sleeps) {
                drop(state);
                self.work.notify_one();
            }
            return None;
        }
        Some(self.add(&mut state, after, encode))
    }

    /// Whether a message of so many bytes would be taken.
    pub(crate) fn has_room(&self, packet_bytes: usize) -> bool {
        let state = self.lock();
        !state.closing && self.takes(&state, packet_bytes)
    }

    fn takes(&self, state: &State, packet_bytes: usize) -> bool {
        let held = state.held_bytes();
        held < self.high_bytes
            && (held + packet_bytes <= OUTPUT_BYTES_FREE || !self.total.is_over())
    }

    fn add(
        &self,
        state: &mut State,
        after: BatchNumber,
        encode: impl FnOnce(&mut BytesMut),
    ) -> Added {
        let added = state.add(after, encode);
        state.count(&self.total);
        added
    }

    /// Whether this connection keeps others from sending: the total is used up, and it holds a part of it.
    pub(crate) fn is_in_the_way(&self) -> bool {
        self.total.is_over() && self.lock().counted_bytes > 0
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
            state.count(&self.total);
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
        state.count(&self.total);
        drop(state);
        self.work.notify_one();
        true
    }

    /// See [`Direct::acknowledge`].
    pub(crate) fn acknowledge(&self) {
        if let Some(direct) = &self.direct {
            direct.acknowledge();
        }
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
        state.count(&self.total);
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
                if state.held_bytes() < self.high_bytes {
                    return;
                }
                state.reader_waits = true;
            }
            self.room.notified().await;
        }
    }

    /// How much was ever given to the writer or the socket.
    pub(crate) fn taken(&self) -> u64 {
        self.lock().taken
    }

    /// Ends when something was written. May end early, and late where something was written just before.
    pub(crate) async fn progress(&self) {
        self.lock().reader_waits = true;
        self.room.notified().await;
    }

    /// Moves the bytes that may be written into `chunk`, which is empty; waits for some.
    pub(crate) async fn take(&self, chunk: &mut BytesMut) -> Work {
        loop {
            let kept_out;
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
                kept_out = state.starved && state.held_bytes() < self.high_bytes;
            }
            if !kept_out {
                self.work.notified().await;
            } else if timeout(OUTPUT_TOTAL_LOOK, self.work.notified())
                .await
                .is_err()
            {
                return Work::Refill;
            }
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
        state.count(&self.total);
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
        let bytes = state.buffer.split_to(open);
        state.count(&self.total);
        bytes
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        let counted = self.lock().counted_bytes;
        self.total.bytes.fetch_sub(counted, Ordering::Relaxed);
    }
}

#[cfg(test)]
impl Output {
    /// One that shares its total with no other.
    pub(crate) fn alone(high_bytes: usize, direct: Option<Arc<dyn Direct>>) -> Self {
        Self::new(high_bytes, Arc::new(OutputTotal::new(usize::MAX)), direct)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGE: usize = OUTPUT_BYTES_FREE + 1;

    fn offer(output: &Output, bytes: usize) -> bool {
        let packet = |out: &mut BytesMut| out.resize(out.len() + bytes, 0);
        output.offer(0, bytes, packet).is_some()
    }

    #[test]
    fn a_used_up_total_refuses_what_is_large_to_every_connection() {
        let total = Arc::new(OutputTotal::new(2 * LARGE));
        let output = || Output::new(1 << 20, total.clone(), None);
        let (silent, reader) = (output(), output());
        assert!(offer(&silent, LARGE) && offer(&silent, LARGE));
        assert!(silent.is_in_the_way() && !reader.is_in_the_way());
        assert!(!offer(&silent, 1));
        assert!(!reader.has_room(LARGE) && !offer(&reader, LARGE));
        assert!(
            offer(&reader, OUTPUT_BYTES_FREE),
            "small ones are not counted"
        );
        assert!(!offer(&reader, 1));
        reader.drain();
        assert!(offer(&reader, OUTPUT_BYTES_FREE));
        reader.drain();
        drop(silent);
        assert!(offer(&reader, LARGE));
        reader.drain();
        assert_eq!(total.bytes.load(Ordering::Relaxed), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_writer_asks_again_for_what_the_total_kept_out() {
        let total = Arc::new(OutputTotal::new(LARGE));
        let output = || Output::new(1 << 20, total.clone(), None);
        let (silent, reader) = (output(), output());
        assert!(offer(&silent, LARGE) && !offer(&reader, LARGE));
        let mut chunk = BytesMut::new();
        assert_eq!(reader.take(&mut chunk).await, Work::Refill);
        assert!(reader.written(&mut chunk), "the core is to offer it again");
        silent.drain();
        assert!(offer(&reader, LARGE));
        assert_eq!(reader.take(&mut chunk).await, Work::Write);
        assert_eq!(chunk.len(), LARGE);
        assert_eq!(
            total.bytes.load(Ordering::Relaxed),
            LARGE,
            "until it is written"
        );
        assert!(!reader.written(&mut chunk));
        assert_eq!(total.bytes.load(Ordering::Relaxed), 0);
    }
}
