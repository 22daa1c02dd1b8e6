//! One connection: a task that reads the socket and a task that writes it.
//!
//! Passes packets to the dispatch and enforces all time limits: for the CONNECT, between packets,
//! for a write, and for closing. Never interprets a packet other than CONNECT.

mod read_buffer;
mod reader;
mod writer;

use std::{
    future::{Future, pending, poll_fn},
    net::SocketAddr,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
};

use bytes::BytesMut;
use read_buffer::make_room;
use reader::read;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    task::yield_now,
    time::{timeout, timeout_at},
};
use writer::Writer;

use crate::{
    Broker, Door, Limits, Origin, ReasonCode, Refusal,
    admission::{self, Credentials},
    codec::{self, Answer, Connect, ConnectFault, Violation},
    core::Accepted,
    dispatch::Dispatch,
    handshakes::Place,
    incomplete::{ConnectionBytes, counted_bytes},
    limits::READ_AFTER_FAILURE_MAX,
    output::{Direct, Output},
    router::SessionKey,
};

/// Serves a connection from its first byte to its last.
pub(crate) async fn run<R, W>(
    broker: &Broker,
    mut reader: R,
    mut writer: W,
    direct: Option<Arc<dyn Direct>>,
    door: Door,
    place: Place,
) where
    R: AsyncRead + Unpin + Send,
    W: AsyncWrite + Unpin + Send + 'static,
{
    let limits = broker.limits();
    let peer = door.peer;
    let deadline = tokio::time::Instant::now() + limits.connect_timeout;
    let mut buffer = BytesMut::new();
    let is_refused = AtomicBool::new(false);
    let arriving = async {
        match receive_connect(broker, &mut reader, &mut buffer, &limits, peer, deadline).await {
            Ok(connect) => Some(connect),
            Err(refusal) => {
                is_refused.store(true, Ordering::Relaxed);
                send_refusal(&mut reader, &mut writer, &mut buffer, &limits, &refusal).await;
                None
            }
        }
    };
    let connect = tokio::select! {
        biased;
        () = place.evicted() => {
            // A refusal that is still being sent has been reported.
            if !is_refused.load(Ordering::Relaxed) {
                broker.turn_away(peer);
            }
            return close_at_once(&mut writer).await;
        }
        connect = arriving => connect,
    };
    drop(place);
    let Some(connect) = connect else { return };
    // During a long start a client may give up and connect again. Its earlier connection must not
    // take the session over, even if it is read last.
    if broker.is_connected(&connect.client_id) && is_closed(&mut reader, &mut buffer).await {
        tracing::debug!(%peer, "closed before its CONNECT was read");
        return close_at_once(&mut writer).await;
    }
    let output = Arc::new(Output::new(
        limits.output_bytes_high,
        broker.outputs(),
        direct,
    ));
    let (version, bytes_max) = (connect.version, connect.packet_bytes_max);
    let admitted = admission::accept(broker, connect, door, deadline, &output).await;
    let (accepted, credentials) = match admitted {
        Ok(admitted) => admitted,
        Err((reason, text)) => {
            tracing::debug!(%peer, %reason, text, "refused a client");
            let refusal = codec::connack_refused(version, reason, text, bytes_max);
            return send_refusal(&mut reader, &mut writer, &mut buffer, &limits, &refusal).await;
        }
    };
    tracing::debug!(%peer, client = &*accepted.origin.client, "connected");
    serve_accepted(
        broker,
        accepted,
        credentials.as_ref(),
        output,
        reader,
        buffer,
        writer,
    )
    .await;
}

/// Waits for the CONNECT until the deadline. If there is none, or an invalid one, reports that and
/// returns the bytes of the answer: none if the client gets no answer.
async fn receive_connect<R: AsyncRead + Unpin>(
    broker: &Broker,
    reader: &mut R,
    buffer: &mut BytesMut,
    limits: &Limits,
    peer: SocketAddr,
    deadline: tokio::time::Instant,
) -> Result<Connect, BytesMut> {
    let memory = broker.connects().add_connection(None);
    let first = read_connect(reader, buffer, limits, memory);
    let first = timeout_at(deadline, first).await;
    let report = |reason, text| {
        let refusal = Refusal::of_connect(reason, text, peer);
        broker.refusal_log().report(&refusal);
    };
    match first {
        Ok(Some(Ok(connect))) => Ok(connect),
        Ok(Some(Err(ConnectFault { violation, answer }))) => {
            let Violation { reason, text } = violation;
            report(reason, text);
            Err(match answer {
                Answer::None => BytesMut::new(),
                Answer::Connack { version, bytes_max } => {
                    codec::connack_refused(version, reason, text, bytes_max)
                }
            })
        }
        Ok(None) => {
            tracing::debug!(%peer, "closed without a CONNECT");
            Err(BytesMut::new())
        }
        Err(_) => {
            // The client gets no answer, since the standard has no code for this.
            let text = "its CONNECT took too long";
            report(ReasonCode::UNSPECIFIED_ERROR, text);
            Err(BytesMut::new())
        }
    }
}

/// Whether the client has closed its stream and sent nothing else. Reads what has arrived.
async fn is_closed<R: AsyncRead + Unpin>(reader: &mut R, buffer: &mut BytesMut) -> bool {
    // tokio takes a new socket for readable. It learns the end of the stream from the next events.
    yield_now().await;
    buffer.reserve(512);
    let mut reading = pin!(reader.read_buf(buffer));
    let read = poll_fn(|context| Poll::Ready(reading.as_mut().poll(context))).await;
    matches!(read, Poll::Ready(Ok(0) | Err(_))) && buffer.is_empty()
}

/// Reads the CONNECT, or finds what is wrong with it; `None` if the client closed the stream.
async fn read_connect<R: AsyncRead + Unpin>(
    reader: &mut R,
    buffer: &mut BytesMut,
    limits: &Limits,
    mut memory: ConnectionBytes<'_>,
) -> Option<Result<Connect, ConnectFault>> {
    loop {
        match codec::decode_connect(buffer, limits.connect_bytes_max) {
            Ok(Some(connect)) => return Some(Ok(connect)),
            Ok(None) => {}
            Err(fault) => return Some(Err(fault)),
        }
        // Most CONNECTs are small. A client that has sent nothing yet gets no more memory than
        // this.
        buffer.reserve(512);
        if !memory.fits(counted_bytes(buffer, 0), || limits.connect_bytes_total_max) {
            let violation = Violation {
                reason: ReasonCode::SERVER_BUSY,
                text: "large CONNECTs of all clients exceed the memory limit: retry later",
            };
            return Some(Err(ConnectFault::silent(violation)));
        }
        if reader.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    }
}

/// Serves a connection after its CONNECT. `buffer` holds the bytes that were read behind it.
async fn serve_accepted<R, W>(
    broker: &Broker,
    accepted: Accepted,
    credentials: Option<&Credentials>,
    output: Arc<Output>,
    mut reader: R,
    mut buffer: BytesMut,
    writer: W,
) where
    R: AsyncRead + Unpin + Send,
    W: AsyncWrite + Unpin + Send + 'static,
{
    let attached = Attached {
        broker: broker.clone(),
        session: accepted.session,
        origin: accepted.origin.clone(),
        output: output.clone(),
        read_bytes_max: accepted.limits.read_bytes,
    };
    // Must be dropped before `attached`, also if this task is aborted: dropping the dispatch hands
    // over the last requests, and the service must get them before the end of the connection.
    let mut dispatch = Dispatch::new(broker.clone(), &accepted);
    let Accepted {
        limits,
        silence_max,
        previous,
        ..
    } = accepted;
    let mut writer = Writer::spawn(&attached, writer, limits.write_stall);
    // The connection that this one takes over is ending. It must hand over its last requests first.
    if let Some(previous) = previous {
        previous.ended().await;
    }
    let expired = async {
        match credentials {
            Some(credentials) => credentials.expired().await,
            None => pending().await,
        }
    };
    let read = read(
        &attached,
        &mut reader,
        &mut buffer,
        &mut dispatch,
        silence_max,
        credentials,
    );
    let ended = tokio::select! {
        ended = read => ended,
        () = output.closed() => Ended::ByBroker,
        () = expired => Ended::Expired,
    };
    if let Some(violation) = ended.violation() {
        attached.disconnect_for(violation);
    }
    if output.has_failed() {
        read_arrived(&mut reader, &mut buffer, &limits).await;
    }
    dispatch.end(&mut buffer);
    // A large packet in it no longer counts in the limit of all connections.
    buffer = BytesMut::new();
    drop(attached);
    let written = writer.finish(&output, limits.close_timeout).await;
    if written && ended != Ended::ByPeer {
        linger(&mut reader, &mut buffer, &limits).await;
    }
}

/// Reads once what the client sent before a write to it failed. A client that sends DISCONNECT and
/// closes with unread bytes resets its socket: the write can fail before the DISCONNECT is read.
async fn read_arrived<R: AsyncRead + Unpin>(
    reader: &mut R,
    buffer: &mut BytesMut,
    limits: &Limits,
) {
    make_room(buffer, limits.read_bytes);
    _ = timeout(READ_AFTER_FAILURE_MAX, reader.read_buf(buffer)).await;
}

/// Ends the stream of a client that gets no connection, after its refusal if there is one.
async fn send_refusal<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    reader: &mut R,
    writer: &mut W,
    buffer: &mut BytesMut,
    limits: &Limits,
    refusal: &[u8],
) {
    *buffer = BytesMut::new();
    let answer = async {
        writer.write_all(refusal).await?;
        writer.shutdown().await
    };
    if let Ok(Ok(())) = timeout(limits.close_timeout, answer).await {
        linger(reader, buffer, limits).await;
    }
}

/// Ends a stream whose place another connection needs: TLS and WebSocket send their last bytes if
/// the socket takes them now.
pub(crate) async fn close_at_once<W: AsyncWrite + Unpin>(writer: &mut W) {
    let mut closing = pin!(writer.shutdown());
    poll_fn(|context| {
        // Whether it is done or failed, the caller drops the stream.
        _ = closing.as_mut().poll(context);
        Poll::Ready(())
    })
    .await;
}

/// Reads and discards until the client closes. Closing a socket with unread bytes resets it, and
/// the reset can overtake the last packet on its way to the client.
async fn linger<R: AsyncRead + Unpin>(reader: &mut R, buffer: &mut BytesMut, limits: &Limits) {
    let drain = async {
        loop {
            buffer.clear();
            make_room(buffer, limits.read_bytes);
            if !matches!(reader.read_buf(buffer).await, Ok(1..)) {
                return;
            }
        }
    };
    _ = timeout(limits.close_timeout, drain).await;
}

/// A connection that the core knows. However its task ends, dropping this notifies the session,
/// then the service, then a connection that took the session over.
pub(crate) struct Attached {
    pub(crate) broker: Broker,
    pub(crate) session: SessionKey,
    pub(crate) origin: Origin,
    pub(crate) output: Arc<Output>,
    pub(crate) read_bytes_max: usize,
}

impl Attached {
    fn disconnect_for(&self, violation: Violation) {
        let mut core = self.broker.lock();
        core.close_after_violation(self.session, self.origin.connection, violation);
    }

    fn quota_exceeded(&self, text: &'static str) -> Ended {
        let reason = ReasonCode::QUOTA_EXCEEDED;
        self.disconnect_for(Violation { reason, text });
        Ended::ByBroker
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.output.close(|_| {});
        self.broker
            .lock()
            .detach(self.session, self.origin.connection, self.broker.now());
        self.broker
            .service()
            .disconnected(&self.broker, &self.origin);
        self.broker.lock().disconnect_reported(self.origin.session);
        self.output.end();
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ended {
    ByPeer,
    ByBroker,
    KeepAliveTimeout,
    /// The client's credentials have expired.
    Expired,
}

impl Ended {
    /// The violation that a DISCONNECT reports to the client, if any.
    fn violation(self) -> Option<Violation> {
        let (reason, text) = match self {
            Self::KeepAliveTimeout => (
                ReasonCode::KEEP_ALIVE_TIMEOUT,
                "no packet came for one and a half times the keep alive",
            ),
            Self::Expired => (ReasonCode::NOT_AUTHORIZED, admission::EXPIRED),
            Self::ByPeer | Self::ByBroker => return None,
        };
        Some(Violation { reason, text })
    }
}
