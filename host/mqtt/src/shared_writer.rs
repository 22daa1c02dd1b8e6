//! The write half of a TCP connection, shared by the writer task and by threads that write
//! directly.
//!
//! The output ensures that only one of the two writes at a time.

use std::{
    io,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
};

use tokio::{io::AsyncWrite, net::tcp::OwnedWriteHalf};

use crate::output::Direct;

/// The writer task's handle.
#[derive(Debug)]
pub struct SharedWriter(Arc<Mutex<OwnedWriteHalf>>);

impl SharedWriter {
    /// Shares the write half of a socket.
    pub fn new(half: OwnedWriteHalf) -> Self {
        Self(Arc::new(Mutex::new(half)))
    }

    /// The handle for direct writes.
    pub fn direct(&self) -> Arc<dyn Direct> {
        self.0.clone()
    }
}

fn lock(half: &Mutex<OwnedWriteHalf>) -> MutexGuard<'_, OwnedWriteHalf> {
    // The kernel owns the state; no code under this lock can leave it half changed.
    half.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Direct for Mutex<OwnedWriteHalf> {
    fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        lock(self).try_write(bytes)
    }

    #[cfg(target_os = "linux")]
    fn acknowledge(&self) {
        let half = lock(self);
        let socket = socket2::SockRef::from(half.as_ref());
        // If this fails, the acknowledgement is late, as it would be without the call.
        _ = socket.set_tcp_quickack(true);
    }
}

impl AsyncWrite for SharedWriter {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut *lock(&self.0)).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *lock(&self.0)).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *lock(&self.0)).poll_shutdown(cx)
    }
}
