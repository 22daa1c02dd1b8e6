//! One client's stream on a connection between two hosts.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::mem;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::Buf;
use statehouse_mqtt::{Broker, Direct};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::Shared;
use super::frame::{CLOSE, CREDIT, DATA, END, FRAME_BYTES_MAX, push};
use crate::Socket;
use crate::front::preface::Answer;

/// A client's stream. It is closed when the last clone is dropped.
#[derive(Clone, Debug)]
pub(in super::super) struct Stream(pub(super) Arc<Handle>);

pub(super) struct Handle {
    pub(super) shared: Arc<Shared>,
    pub(super) id: u32,
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Handle").field(&self.id).finish()
    }
}

impl Stream {
    pub(super) fn new(shared: &Arc<Shared>, id: u32) -> Self {
        let shared = shared.clone();
        Self(Arc::new(Handle { shared, id }))
    }

    /// Lets received bytes go to `sink` while the reader of this stream sleeps. The reader must
    /// write all that it reads to the same sink, before it reads again.
    pub(in super::super) fn write_to(&self, sink: Arc<dyn Direct>) {
        if let Ok(entry) = self.0.shared.lock().entry(self.0.id) {
            entry.sink = Some(sink);
        }
    }

    pub(in super::super) async fn answered(&self) -> io::Result<Answer> {
        poll_fn(|cx| {
            let mut state = self.0.shared.lock();
            if state.over {
                return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
            }
            let entry = state.entry(self.0.id)?;
            match entry.answer {
                Some(answer) => Poll::Ready(Ok(answer)),
                None if entry.closed => Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())),
                None => {
                    entry.reader = Some(cx.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

impl Handle {
    /// Adds bytes to those that are sent, as many as may be. If none, arranges that `waker` is
    /// woken.
    fn write(&self, bytes: &[u8], waker: Option<&Waker>) -> io::Result<usize> {
        let mut locked = self.shared.lock();
        let state = &mut *locked;
        if state.over {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        let is_full = state.is_full();
        let entry = state.streams.get_mut(&self.id);
        let entry = entry.ok_or(io::ErrorKind::NotConnected)?;
        if entry.closed || entry.end_sent {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        if is_full || entry.credit == 0 {
            if waker.is_some() {
                entry.writer = waker.cloned();
                if is_full && !mem::replace(&mut entry.is_waiting, true) {
                    state.waiting.push_back(self.id);
                }
            }
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let bytes = &bytes[..bytes.len().min(entry.credit)];
        entry.credit -= bytes.len();
        for body in bytes.chunks(FRAME_BYTES_MAX) {
            push(&mut state.out, self.id, DATA, body);
        }
        self.shared.wake(locked);
        Ok(bytes.len())
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        let entry = state.streams.remove(&self.id);
        if !state.over && entry.is_some_and(|it| !it.closed) {
            state.push(self.id, CLOSE, &[]);
        }
        self.shared.wake(state);
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Handle { shared, id } = &*self.0;
        let mut state = shared.lock();
        let over = state.over;
        let entry = state.entry(*id)?;
        if entry.inbound.is_empty() {
            if entry.ended {
                return Poll::Ready(Ok(()));
            }
            if over {
                return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
            }
            entry.reader = Some(cx.waker().clone());
            return Poll::Pending;
        }
        // It does not sleep now.
        entry.reader = None;
        let count = entry.inbound.len().min(into.remaining());
        into.put_slice(&entry.inbound[..count]);
        entry.inbound.advance(count);
        if let Some(credit) = entry.count_read(count) {
            state.push(*id, CREDIT, &credit.to_le_bytes());
            shared.wake(state);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.0.write(bytes, Some(cx.waker())) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Poll::Pending,
            written => Poll::Ready(written),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Handle { shared, id } = &*self.0;
        let mut state = shared.lock();
        if state.over {
            return Poll::Ready(Err(io::ErrorKind::NotConnected.into()));
        }
        let entry = state.entry(*id)?;
        if !mem::replace(&mut entry.end_sent, true) && !entry.closed {
            state.push(*id, END, &[]);
            shared.wake(state);
        }
        Poll::Ready(Ok(()))
    }
}

impl Direct for Stream {
    fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes, None)
    }
}

impl Socket for Stream {
    async fn serve(self, broker: &Broker, peer: SocketAddr) {
        broker.serve_direct(self, peer).await;
    }
}
