//! The streams of many clients over one connection between two hosts.
//!
//! A connection of its own for each client would cost both hosts the system calls of a second
//! client. Here the bytes of all clients that are ready travel together, in [frames](frame).
//!
//! Only the host that connected opens streams, and numbers them. A number is used once.
//!
//! No more than [`limits::CLUSTER_WINDOW_BYTES`] of a stream may be sent before the other side has
//! read them. So a client that reads nothing holds little more memory, and delays no other client.
//! Nothing here waits for a single stream.
//!
//! At the host of the client, received bytes go to the client's socket at once: to wake the task of
//! the client would cost more than the write.

mod frame;
mod stream;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::mem;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use bytes::{Buf, BytesMut};
use rustc_hash::FxBuildHasher;
use statehouse_mqtt::Direct;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::Notify;
use tokio::task::yield_now;

use self::frame::{
    ANSWER, CLOSE, CREDIT, DATA, END, FRAME_BYTES_MAX, Frame, HEADER_BYTES, OPEN, push,
};
pub(super) use self::stream::Stream;
use super::preface::{Answer, decode_client, encode_client};
use statehouse_config::{Scheme, limits};

/// What one read of the connection takes.
const READ_BYTES: usize = 64 << 10;

/// A buffer of a stream that is empty keeps no more memory than this.
const IDLE_BYTES_MAX: usize = 1 << 10;

/// Other tasks get their turn after so many direct writes, which take less than a millisecond.
const DIRECT_WRITES_AT_ONCE: usize = 64;

/// Why a connection ended. The text is for the log.
#[derive(Debug, thiserror::Error)]
pub(super) enum MuxError {
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
    #[error("the other host closed it")]
    Closed,
    #[error("it has no more streams")]
    Unused,
    #[error("the other host sent an invalid frame: {0}")]
    Invalid(&'static str),
}

/// A connection over which this host opens streams. When it is dropped, the connection ends with
/// its last stream.
pub(super) struct Mux(Arc<Shared>);

impl Mux {
    /// Begins to use a connection, in a task of its own.
    pub(super) fn start<R, W>(reader: R, writer: W) -> Self
    where
        R: AsyncRead + Send + Unpin + 'static,
        W: AsyncWrite + Send + Unpin + 'static,
    {
        let shared = Arc::<Shared>::default();
        let mux = Self(shared.clone());
        tokio::spawn(async move {
            let refuse = |_, _| Err::<fn(Stream), _>(None);
            if let Err(error) = shared.run(reader, writer, refuse).await {
                tracing::debug!("a connection to the leader ended: {error}");
            }
        });
        mux
    }

    /// Whether this connection carries a stream.
    pub(super) fn has(&self, stream: &Stream) -> bool {
        Arc::ptr_eq(&self.0, &stream.0.shared)
    }

    /// Offers a client to the leader. The stream carries no bytes before the leader's answer.
    /// `None` if this connection can open no more streams.
    pub(super) fn open(&self, scheme: Scheme, client: SocketAddr) -> Option<Stream> {
        let mut state = self.0.lock();
        if state.over {
            return None;
        }
        let id = state.next;
        state.next = id.checked_add(1)?;
        state.streams.insert(id, Entry::default());
        state.push(id, OPEN, &encode_client(scheme, client));
        self.0.wake(state);
        Some(Stream::new(&self.0, id))
    }
}

impl Drop for Mux {
    fn drop(&mut self) {
        self.0.lock().retired = true;
        self.0.work.notify_one();
    }
}

/// Accepts streams of another host until the connection ends. `decide` returns for each client how
/// its stream is served, or the answer that refuses it.
pub(super) async fn accept<R, W, F>(
    reader: R,
    writer: W,
    mut decide: impl FnMut(Scheme, SocketAddr) -> Result<F, Answer>,
) -> Result<(), MuxError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
    F: FnOnce(Stream),
{
    let shared = Arc::<Shared>::default();
    let decide = |scheme, client| decide(scheme, client).map_err(Some);
    shared.run(reader, writer, decide).await
}

/// What the streams of a connection share with its task.
#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Wakes the sender.
    work: Notify,
}

#[derive(Default)]
struct State {
    /// Frames to send.
    out: BytesMut,
    streams: HashMap<u32, Entry, FxBuildHasher>,
    /// Streams that wait for room in `out`: those that wait longest are first. They are woken in
    /// this order, no more than there is room for. Otherwise the same few would use all room.
    waiting: VecDeque<u32>,
    /// The number of the next stream.
    next: u32,
    sender_sleeps: bool,
    /// No more streams are opened: the connection ends with the last one.
    retired: bool,
    over: bool,
}

struct Entry {
    answer: Option<Answer>,
    /// Takes received bytes while the reader sleeps.
    sink: Option<Arc<dyn Direct>>,
    /// Received bytes that were not read yet.
    inbound: BytesMut,
    /// Bytes that the other side may send.
    window: usize,
    /// Bytes that were read since the last CREDIT.
    read: usize,
    /// Bytes that this side may send.
    credit: usize,
    /// The other side sends no more.
    ended: bool,
    /// The other side discards what it receives.
    closed: bool,
    end_sent: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
    /// Its number is in [`State::waiting`].
    is_waiting: bool,
}

impl Default for Entry {
    fn default() -> Self {
        Self {
            answer: None,
            sink: None,
            inbound: BytesMut::new(),
            window: limits::CLUSTER_WINDOW_BYTES,
            read: 0,
            credit: limits::CLUSTER_WINDOW_BYTES,
            ended: false,
            closed: false,
            end_sent: false,
            reader: None,
            writer: None,
            is_waiting: false,
        }
    }
}

impl Entry {
    /// Counts bytes that were taken from those received. Returns how many more the other side may
    /// send, if it is time to say so.
    fn count_read(&mut self, count: usize) -> Option<u32> {
        if self.inbound.is_empty() && self.inbound.try_reclaim(IDLE_BYTES_MAX + 1) {
            self.inbound = BytesMut::new();
        }
        self.read += count;
        // Small reads share a CREDIT.
        if self.read < limits::CLUSTER_WINDOW_BYTES / 2 || self.ended {
            return None;
        }
        let read = mem::take(&mut self.read);
        self.window += read;
        // No more than the window, which is far less than 4 GiB.
        Some(read as u32)
    }
}

/// What is left to do after frames were received, without the lock.
#[derive(Default)]
struct Work {
    wakers: Vec<Waker>,
    /// Streams whose bytes go to their sinks.
    direct: Vec<u32>,
}

impl State {
    fn push(&mut self, id: u32, kind: u8, body: &[u8]) {
        push(&mut self.out, id, kind, body);
    }

    /// The entry of a stream that is not dropped yet.
    fn entry(&mut self, id: u32) -> io::Result<&mut Entry> {
        let entry = self.streams.get_mut(&id);
        entry.ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Whether streams must wait before they send more.
    fn is_full(&self) -> bool {
        self.out.len() >= limits::CLUSTER_OUT_BYTES_MAX
    }

    /// The wakers of the streams that may fill `out` now, in their order.
    fn next_writers(&mut self) -> Vec<Waker> {
        let mut wakers = Vec::new();
        let mut room = limits::CLUSTER_OUT_BYTES_MAX;
        while room > 0
            && let Some(id) = self.waiting.pop_front()
        {
            let Some(entry) = self.streams.get_mut(&id) else {
                continue;
            };
            entry.is_waiting = false;
            // A stream that was woken for another reason has no waker here.
            if let Some(waker) = entry.writer.take() {
                room = room.saturating_sub(entry.credit);
                wakers.push(waker);
            }
        }
        wakers
    }

    /// Handles one frame of the other side. Returns the client of a stream that it opens.
    fn receive(
        &mut self,
        frame: &Frame<'_>,
        work: &mut Work,
    ) -> Result<Option<(Scheme, SocketAddr)>, MuxError> {
        let &Frame { stream, kind, body } = frame;
        if kind == OPEN {
            let body = body.try_into();
            let body = body.map_err(|_| MuxError::Invalid("OPEN has another length"))?;
            let client = decode_client(body).map_err(MuxError::Invalid)?;
            if self.streams.contains_key(&stream) {
                return Err(MuxError::Invalid("a stream was opened twice"));
            }
            self.streams.insert(stream, Entry::default());
            return Ok(Some(client));
        }
        // This side may have closed the stream already.
        let Some(entry) = self.streams.get_mut(&stream) else {
            return Ok(None);
        };
        let wakers = &mut work.wakers;
        match (kind, body) {
            (ANSWER, &[code]) => {
                let answer = Answer::from_byte(code);
                entry.answer = Some(answer.ok_or(MuxError::Invalid("its answer is unknown"))?);
                wakers.extend(entry.reader.take());
            }
            (DATA, body) => {
                let window = entry.window.checked_sub(body.len());
                entry.window = window.ok_or(MuxError::Invalid("DATA exceeds the window"))?;
                if entry.sink.is_none() {
                    wakers.extend(entry.reader.take());
                } else if entry.reader.is_some() && entry.inbound.is_empty() {
                    work.direct.push(stream);
                }
                entry.inbound.extend_from_slice(body);
            }
            (CREDIT, &[a, b, c, d]) => {
                let credit = u64::from(u32::from_le_bytes([a, b, c, d])) + entry.credit as u64;
                if credit > limits::CLUSTER_WINDOW_BYTES as u64 {
                    return Err(MuxError::Invalid("CREDIT exceeds the window"));
                }
                entry.credit = credit as usize;
                wakers.extend(entry.writer.take());
            }
            (END, []) => {
                entry.ended = true;
                wakers.extend(entry.reader.take());
            }
            (CLOSE, []) => {
                (entry.ended, entry.closed) = (true, true);
                wakers.extend(entry.reader.take());
                wakers.extend(entry.writer.take());
            }
            _ => return Err(MuxError::Invalid("its kind or length is unknown")),
        }
        Ok(None)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // The code under this lock does not panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Releases the lock, and wakes the sender for frames that were added, or for the end of a
    /// retired connection.
    fn wake(&self, mut state: MutexGuard<'_, State>) {
        let has_work = !state.out.is_empty() || state.retired;
        let sleeps = has_work && mem::take(&mut state.sender_sleeps);
        drop(state);
        if sleeps {
            self.work.notify_one();
        }
    }

    /// Sends and receives until the connection has ended, or has no more streams and is retired.
    /// `decide` returns no answer if the other side must not open streams.
    async fn run<R, W, F>(
        self: &Arc<Self>,
        reader: R,
        writer: W,
        decide: impl FnMut(Scheme, SocketAddr) -> Result<F, Option<Answer>>,
    ) -> Result<(), MuxError>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
        F: FnOnce(Stream),
    {
        let _over = Over(self);
        tokio::select! {
            ended = self.receive(reader, decide) => ended,
            ended = self.send(writer) => ended,
        }
    }

    async fn receive<R, F>(
        self: &Arc<Self>,
        mut reader: R,
        mut decide: impl FnMut(Scheme, SocketAddr) -> Result<F, Option<Answer>>,
    ) -> Result<(), MuxError>
    where
        R: AsyncRead + Unpin,
        F: FnOnce(Stream),
    {
        let mut buffer = BytesMut::with_capacity(READ_BYTES);
        let (mut work, mut opened) = (Work::default(), Vec::new());
        loop {
            buffer.reserve(HEADER_BYTES + FRAME_BYTES_MAX);
            if reader.read_buf(&mut buffer).await? == 0 {
                return Err(MuxError::Closed);
            }
            let received = self.receive_frames(&mut buffer, &mut work, &mut opened);
            // Also those of the frames before an invalid one.
            work.wakers.drain(..).for_each(Waker::wake);
            received?;
            let writes = work.direct.len();
            work.direct.drain(..).for_each(|id| self.write_directly(id));
            for (id, (scheme, client)) in opened.drain(..) {
                self.answer(id, decide(scheme, client))?;
            }
            if writes > DIRECT_WRITES_AT_ONCE {
                yield_now().await;
            }
        }
    }

    /// Handles all complete frames of the buffer.
    fn receive_frames(
        &self,
        buffer: &mut BytesMut,
        work: &mut Work,
        opened: &mut Vec<(u32, (Scheme, SocketAddr))>,
    ) -> Result<(), MuxError> {
        let mut state = self.lock();
        while let Some((frame, length)) = Frame::first(buffer)? {
            if let Some(client) = state.receive(&frame, work)? {
                opened.push((frame.stream, client));
            }
            buffer.advance(length);
        }
        Ok(())
    }

    /// Writes the received bytes of a stream to its sink. The reader of the stream gets those for
    /// which the sink has no room.
    ///
    /// Only the task that calls this adds received bytes, and the reader of the stream sleeps or
    /// finds none. So no bytes overtake others.
    fn write_directly(&self, id: u32) {
        let mut state = self.lock();
        let Some(entry) = state.streams.get_mut(&id) else {
            return;
        };
        // The reader may have been polled in the meantime, and then writes them itself.
        if entry.reader.is_none() || entry.inbound.is_empty() {
            return;
        }
        let Some(sink) = entry.sink.clone() else {
            return;
        };
        let mut bytes = mem::take(&mut entry.inbound);
        drop(state);
        // The reader's own write meets the same error.
        let written = sink.try_write(&bytes).unwrap_or(0);
        bytes.advance(written);
        let mut state = self.lock();
        let Some(entry) = state.streams.get_mut(&id) else {
            return;
        };
        entry.inbound = bytes;
        let waker = match entry.inbound.is_empty() {
            true => None,
            false => entry.reader.take(),
        };
        if let Some(credit) = entry.count_read(written) {
            state.push(id, CREDIT, &credit.to_le_bytes());
        }
        self.wake(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Answers a host that has opened a stream. The answer precedes everything else of the stream.
    fn answer<F: FnOnce(Stream)>(
        self: &Arc<Self>,
        id: u32,
        decided: Result<F, Option<Answer>>,
    ) -> Result<(), MuxError> {
        let (answer, serve) = match decided {
            Ok(serve) => (Answer::Accepted, Some(serve)),
            Err(Some(answer)) => (answer, None),
            Err(None) => return Err(MuxError::Invalid("only the other side opens streams")),
        };
        let mut state = self.lock();
        state.push(id, ANSWER, &[answer as u8]);
        if serve.is_none() {
            state.streams.remove(&id);
        }
        self.wake(state);
        if let Some(serve) = serve {
            serve(Stream::new(self, id));
        }
        Ok(())
    }

    async fn send<W: AsyncWrite + Unpin>(&self, mut writer: W) -> Result<(), MuxError> {
        let mut chunk = BytesMut::new();
        loop {
            while !self.has_frames()? {
                self.work.notified().await;
                // Streams that are ready too add their bytes.
                yield_now().await;
            }
            self.take(&mut chunk);
            if chunk.is_empty() {
                // The streams that were woken add their bytes before others are woken.
                yield_now().await;
            }
            writer.write_all(&chunk).await?;
            chunk.clear();
            if chunk.capacity() > READ_BYTES {
                chunk = BytesMut::new();
            }
        }
    }

    /// Whether there are frames to send, or streams that wait for room. If not, the sender will be
    /// woken.
    fn has_frames(&self) -> Result<bool, MuxError> {
        let mut state = self.lock();
        if state.out.is_empty() && state.retired && state.streams.is_empty() {
            return Err(MuxError::Unused);
        }
        state.sender_sleeps = state.out.is_empty() && state.waiting.is_empty();
        Ok(!state.sender_sleeps)
    }

    /// Moves all frames into the empty `chunk`, and wakes the next streams that wait for room.
    fn take(&self, chunk: &mut BytesMut) {
        let mut state = self.lock();
        mem::swap(&mut state.out, chunk);
        let wakers = state.next_writers();
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// Ends all streams of a connection when it is dropped.
struct Over<'a>(&'a Shared);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.over = true;
        let mut wakers = Vec::new();
        for entry in state.streams.values_mut() {
            wakers.extend(entry.reader.take());
            wakers.extend(entry.writer.take());
        }
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests;
