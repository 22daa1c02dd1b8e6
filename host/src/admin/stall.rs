//! Ends a connection whose client takes no byte of an answer for some seconds, since an answer
//! holds memory and an operator seat until it is sent.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

/// A stream whose writes fail when one has waited for `limit`.
pub(super) struct StallLimit<S> {
    stream: S,
    limit: Duration,
    end: Pin<Box<Sleep>>,
    is_waiting: bool,
}

impl<S: Unpin> StallLimit<S> {
    pub(super) fn new(stream: S, limit: Duration) -> Self {
        Self {
            stream,
            limit,
            end: Box::pin(sleep(limit)),
            is_waiting: false,
        }
    }

    /// Does a part of a write, and fails if writes have waited for too long.
    fn within_limit<T>(
        &mut self,
        cx: &mut Context<'_>,
        write: impl FnOnce(Pin<&mut S>, &mut Context<'_>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        let written = write(Pin::new(&mut self.stream), cx);
        if written.is_ready() {
            self.is_waiting = false;
            return written;
        }
        if !self.is_waiting {
            self.is_waiting = true;
            self.end.as_mut().reset(Instant::now() + self.limit);
        }
        ready!(self.end.as_mut().poll(cx));
        let why = "the client takes no byte of the answer";
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, why)))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for StallLimit<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for StallLimit<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.within_limit(cx, |stream, cx| stream.poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.within_limit(cx, |stream, cx| stream.poll_write_vectored(cx, parts))
    }

    /// Without it, the connection would copy each answer into a buffer of its own.
    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.within_limit(cx, |stream, cx| stream.poll_flush(cx))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.within_limit(cx, |stream, cx| stream.poll_shutdown(cx))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    #[tokio::test]
    async fn only_a_client_that_takes_nothing_is_too_slow() {
        let limit = Duration::from_secs(1);
        let (mut client, server) = duplex(1 << 10);
        let mut server = StallLimit::new(server, limit);
        let writing = tokio::spawn(async move { server.write_all(&[0; 8 << 10]).await });
        let began = Instant::now();
        while began.elapsed() < limit * 2 {
            sleep(limit / 2).await;
            client.read_exact(&mut [0; 1 << 9]).await.unwrap();
        }
        assert!(!writing.is_finished());
        let error = writing.await.unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
