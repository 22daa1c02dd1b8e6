//! The task that writes the output of a connection to its socket.

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::BytesMut;
use statehouse_protocol::ConnectionId;
use tokio::{
    io::{AsyncWrite, AsyncWriteExt},
    task::JoinHandle,
    time::timeout,
};

use super::Attached;
use crate::{
    Broker, ReasonCode,
    codec::Violation,
    limits::{WRITE_STALL_CHECK_INTERVAL, WRITE_STALL_OVER_TOTAL},
    output::{Output, Work},
    router::SessionKey,
};

/// Reported of a client that does not take its output in time. The client never gets it.
const TAKES_NO_BYTES: Violation = Violation {
    reason: ReasonCode::QUOTA_EXCEEDED,
    text: "this client takes no bytes",
};

/// Why output cannot be written.
enum WriteFault {
    /// The client does not take it in time.
    Stalled,
    Stream(io::Error),
}

/// The writer's task; it must not outlive the connection's task.
pub(super) struct Writer(JoinHandle<()>);

impl Writer {
    pub(super) fn spawn<W: AsyncWrite + Unpin + Send + 'static>(
        attached: &Attached,
        stream: W,
        stall_max: Duration,
    ) -> Self {
        Self(tokio::spawn(write(
            attached.broker.clone(),
            attached.session,
            attached.origin.connection,
            attached.output.clone(),
            stream,
            stall_max,
        )))
    }

    /// Waits until the output is written, the DISCONNECT at its end above all. Output that waits
    /// too long for its record is discarded. Returns false if the client took too long.
    pub(super) async fn finish(&mut self, output: &Output, time_max: Duration) -> bool {
        if timeout(time_max, &mut self.0).await.is_ok() {
            return true;
        }
        output.cut() && timeout(time_max, &mut self.0).await.is_ok()
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Writes the output until it is closed or the client does not take it. Takes all available bytes
/// at a time.
async fn write<W: AsyncWrite + Unpin>(
    broker: Broker,
    session: SessionKey,
    connection: ConnectionId,
    output: Arc<Output>,
    mut writer: W,
    stall_max: Duration,
) {
    let mut chunk = BytesMut::new();
    loop {
        if output.take(&mut chunk).await == Work::Close {
            break;
        }
        if let Err(fault) = write_chunk(&mut writer, &chunk, &output, stall_max).await {
            match fault {
                WriteFault::Stalled => {
                    // First, so that the connection's task reads what has arrived.
                    output.mark_failed();
                    let mut core = broker.lock();
                    core.close_after_violation(session, connection, TAKES_NO_BYTES);
                }
                WriteFault::Stream(error) => {
                    tracing::debug!(%connection, %error, "cannot write to a client");
                }
            }
            output.fail();
            return;
        }
        if output.written(&mut chunk) {
            let mut core = broker.lock();
            if core.is_open(session, connection) {
                core.pump(session, Instant::now());
            }
        }
    }
    // Fails if the client has closed its end already.
    _ = writer.shutdown().await;
}

async fn write_chunk<W: AsyncWrite + Unpin>(
    writer: &mut W,
    chunk: &[u8],
    output: &Output,
    stall_max: Duration,
) -> Result<(), WriteFault> {
    let mut rest = chunk;
    while !rest.is_empty() {
        match limit_stall(writer.write(rest), output, stall_max).await? {
            0 => return Err(WriteFault::Stream(io::ErrorKind::WriteZero.into())),
            count => rest = &rest[count..],
        }
    }
    // Does nothing for TCP. TLS and WebSocket accept bytes before the socket has room for them.
    limit_stall(writer.flush(), output, stall_max).await
}

/// Waits for a write or a flush. Fails if the client does not take its bytes in time.
async fn limit_stall<T>(
    step: impl Future<Output = io::Result<T>>,
    output: &Output,
    stall_max: Duration,
) -> Result<T, WriteFault> {
    tokio::pin!(step);
    let interval = stall_max.min(WRITE_STALL_CHECK_INTERVAL);
    let mut stalled = Duration::ZERO;
    loop {
        if let Ok(done) = timeout(interval, &mut step).await {
            return done.map_err(WriteFault::Stream);
        }
        stalled += interval;
        if stalled >= stall_max || stalled >= WRITE_STALL_OVER_TOTAL && output.blocks_others() {
            return Err(WriteFault::Stalled);
        }
    }
}
