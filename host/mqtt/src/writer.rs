//! The write half of a TCP connection, for its task and for whoever has something to send right now.
//!
//! In come bytes; out they go where the socket has room. One of the two writes at a time: the output says who.

use std::{
    io,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
};

use tokio::{io::AsyncWrite, net::tcp::OwnedWriteHalf};

use crate::output::Direct;

/// The task's handle.
#[derive(Debug)]
pub(crate) struct SharedWriter(Arc<Half>);

#[derive(Debug)]
struct Half(Mutex<OwnedWriteHalf>);

impl Half {
    fn lock(&self) -> MutexGuard<'_, OwnedWriteHalf> {
        // The half is the kernel's business; nothing of ours can be half done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SharedWriter {
    pub(crate) fn new(half: OwnedWriteHalf) -> Self {
        Self(Arc::new(Half(Mutex::new(half))))
    }

    /// The handle of everybody else.
    pub(crate) fn direct(&self) -> Arc<dyn Direct> {
        self.0.clone()
    }
}

impl Direct for Half {
    fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        self.lock().try_write(bytes)
    }

    #[cfg(target_os = "linux")]
    fn acknowledge(&self) {
        let half = self.lock();
        let socket = socket2::SockRef::from(half.as_ref());
        // Where it fails the acknowledgement is late, as it would be without.
        _ = socket.set_tcp_quickack(true);
    }
}

impl AsyncWrite for SharedWriter {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.0.lock()).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.lock()).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.lock()).poll_shutdown(cx)
    }
}
