//! One connection: a task that reads the socket and a task that writes it.
//!
//! Passes packets to the dispatch and enforces all time limits: for the CONNECT, between packets,
//! for a write, and for closing. Never interprets a packet other than CONNECT.

use std::{
    future::pending,
    io, mem,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::BytesMut;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    task::JoinHandle,
    time::{sleep_until, timeout, timeout_at},
};

use crate::{
    Broker, Door, Limits, Origin, ReasonCode, Refusal, Refused,
    admission::{self, Credentials},
    codec::{self, Answer, Connect, ConnectFault, Violation},
    core::Accepted,
    dispatch::{Dispatch, Turn},
    incomplete::{ConnectionBytes, counted_bytes},
    limits::{
        BUFFER_PARTS_IN_USE, IDLE_BUFFER_BYTES_MAX, PAUSE_LOOK, READ_BYTES_MIN, WRITE_STALL_LOOK,
        WRITE_STALL_OVER_TOTAL,
    },
    output::{Direct, Output, Work},
    router::SessionKey,
};

/// Serves a connection from its first byte to its last.
pub(crate) async fn run<R, W>(
    broker: &Broker,
    mut reader: R,
    mut writer: W,
    direct: Option<Arc<dyn Direct>>,
    door: Door,
) where
    R: AsyncRead + Unpin + Send,
    W: AsyncWrite + Unpin + Send + 'static,
{
    let limits = broker.limits();
    let peer = door.peer;
    let deadline = tokio::time::Instant::now() + limits.connect_timeout;
    let mut buffer = BytesMut::new();
    let memory = broker.connects().add_connection();
    let first = read_connect(&mut reader, &mut buffer, &limits, memory);
    let first = timeout_at(deadline, first).await;
    let refuse = |reason, text| {
        broker.refusal_log().tell(&Refusal {
            what: Refused::Connect,
            reason,
            text: Some(text),
            peer: Some(peer),
            client: "",
            user: None,
        });
    };
    let connect = match first {
        Ok(Some(Ok(connect))) => connect,
        Ok(Some(Err(ConnectFault { violation, answer }))) => {
            refuse(violation.reason, violation.text);
            let mut refusal = BytesMut::new();
            match answer {
                Answer::None => return,
                Answer::Version3 => refusal.extend_from_slice(&codec::CONNACK_VERSION_3),
                Answer::Connack { bytes_max } => {
                    let Violation { reason, text } = violation;
                    codec::connack_refused(&mut refusal, reason, Some(text), bytes_max);
                }
            }
            return send_refusal(&mut reader, &mut writer, &mut buffer, &limits, &refusal).await;
        }
        Ok(None) => {
            tracing::debug!(%peer, "closed without a CONNECT");
            return;
        }
        Err(_) => {
            // The client gets no answer, since the standard has no code for this.
            let text = "its CONNECT took too long";
            return refuse(ReasonCode::UNSPECIFIED_ERROR, text);
        }
    };
    let output = Arc::new(Output::new(
        limits.output_bytes_high,
        broker.outputs(),
        direct,
    ));
    let bytes_max = connect.packet_bytes_max;
    let admitted = admission::accept(broker, connect, door, deadline, &output).await;
    let (accepted, credentials) = match admitted {
        Ok(admitted) => admitted,
        Err((reason, text)) => {
            tracing::debug!(%peer, %reason, text, "refused a client");
            let mut refusal = BytesMut::new();
            codec::connack_refused(&mut refusal, reason, Some(text), bytes_max);
            return send_refusal(&mut reader, &mut writer, &mut buffer, &limits, &refusal).await;
        }
    };
    tracing::debug!(%peer, client = %accepted.origin.client.escape_debug(), "connected");
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
    let Accepted {
        session,
        origin,
        account,
        limits,
        silence_max,
        previous,
    } = accepted;
    let attached = Attached {
        broker: broker.clone(),
        session,
        origin: origin.clone(),
        output: output.clone(),
        read_bytes_max: limits.read_bytes,
    };
    let mut writing = Writing(tokio::spawn(write(
        broker.clone(),
        session,
        origin.connection,
        output.clone(),
        writer,
        limits.write_stall,
    )));
    // The connection that this one takes over is ending. It must hand over its last requests first.
    if let Some(previous) = previous {
        previous.ended().await;
    }
    let mut dispatch = Dispatch::new(broker.clone(), session, origin, &account, &limits);
    let expired = credentials.map(Credentials::expired);
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
        () = async { match expired { Some(expired) => expired.await, None => pending().await } } => Ended::Expired,
    };
    let violation = match ended {
        Ended::KeepAliveTimeout => Some((
            ReasonCode::KEEP_ALIVE_TIMEOUT,
            "no packet came for one and a half times the keep alive",
        )),
        Ended::Expired => Some((
            ReasonCode::NOT_AUTHORIZED,
            "the credentials of this client have expired: authenticate again in time",
        )),
        Ended::ByPeer | Ended::ByBroker => None,
    };
    if let Some((reason, text)) = violation {
        attached.disconnect_for(Violation { reason, text });
    }
    drop(dispatch);
    drop(attached);
    // Send what is in the output, the DISCONNECT at its end above all. Output that waits too long
    // for its record is discarded.
    let mut written = timeout(limits.close_timeout, &mut writing.0).await.is_ok();
    if !written && output.cut() {
        written = timeout(limits.close_timeout, &mut writing.0).await.is_ok();
    }
    if written && ended != Ended::ByPeer {
        linger(&mut reader, &mut buffer, &limits).await;
    }
}

/// Sends a refusal to a client that gets no connection.
async fn send_refusal<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    reader: &mut R,
    writer: &mut W,
    buffer: &mut BytesMut,
    limits: &Limits,
    refusal: &[u8],
) {
    let answer = async {
        writer.write_all(refusal).await?;
        writer.shutdown().await
    };
    if let Ok(Ok(())) = timeout(limits.close_timeout, answer).await {
        linger(reader, buffer, limits).await;
    }
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
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.output.close(|_| {});
        self.broker
            .lock()
            .detach(self.session, self.origin.connection, self.broker.now());
        self.broker.service().gone(&self.broker, &self.origin);
        self.broker.lock().disconnect_reported(self.origin.session);
        self.output.end();
    }
}

/// The writer's task; it must not outlive the connection's task.
struct Writing(JoinHandle<()>);

impl Drop for Writing {
    fn drop(&mut self) {
        self.0.abort();
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
            return Some(Err(ConnectFault {
                violation,
                answer: Answer::None,
            }));
        }
        if reader.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    }
}

/// Reads packets until the connection ends. Pauses while the client does not read the broker's
/// output.
async fn read<R: AsyncRead + Unpin>(
    attached: &Attached,
    reader: &mut R,
    buffer: &mut BytesMut,
    dispatch: &mut Dispatch,
    silence_max: Option<Duration>,
    credentials: Option<&Credentials>,
) -> Ended {
    let Attached { broker, output, .. } = attached;
    let mut last_packet = tokio::time::Instant::now();
    let mut ask = READ_BYTES_MIN;
    let mut memory = broker.packets().add_connection();
    let mut brake = broker.brake();
    // The size of the read buffer's allocation; `capacity` is only what is left of it.
    let mut allocated = buffer.capacity();
    let mut pause = None;
    // Reset when it fires rather than at every packet.
    let silence = sleep_until(last_packet + silence_max.unwrap_or_default());
    tokio::pin!(silence);
    loop {
        let paused = match turns(
            attached,
            buffer,
            dispatch,
            &mut brake,
            &mut last_packet,
            credentials,
        )
        .await
        {
            Ok(paused) => paused,
            Err(ended) => return ended,
        };
        release(buffer, &mut allocated);
        let bytes_max = || broker.limits().packet_bytes_total_max;
        let bytes = counted_bytes(buffer, allocated) + dispatch.held_bytes();
        let fits = memory.fits(bytes, bytes_max);
        if !fits && !paused {
            attached.disconnect_for(Violation {
                reason: ReasonCode::QUOTA_EXCEEDED,
                text: "large packets of all clients exceed the memory limit: retry later",
            });
            return Ended::ByBroker;
        }
        let reads = !paused || dispatch.accepts_input() && !memory.is_over(bytes_max);
        if reads {
            make_room(buffer, ask);
            allocated = allocated.max(buffer.capacity());
        }
        if !paused {
            pause = None;
        } else if is_stuck(attached, &mut pause, reads) {
            attached.disconnect_for(Violation {
                reason: ReasonCode::QUOTA_EXCEEDED,
                text: "this client sends requests without acknowledging their answers",
            });
            return Ended::ByBroker;
        }
        loop {
            tokio::select! {
                biased;
                read = reader.read_buf(buffer), if reads => match read {
                    Ok(0) | Err(_) => return Ended::ByPeer,
                    Ok(count) => {
                        ask = next_read_bytes(ask, count, attached.read_bytes_max);
                        break;
                    }
                },
                () = async { _ = timeout(PAUSE_LOOK, output.progress()).await }, if paused => break,
                () = silence.as_mut(), if silence_max.is_some() && reads => {
                    let due = last_packet + silence_max.unwrap_or_default();
                    if due <= tokio::time::Instant::now() {
                        return Ended::KeepAliveTimeout;
                    }
                    silence.as_mut().reset(due);
                }
            }
        }
    }
}

/// Handles the packets that were read, turn by turn, until no complete packet is left. Returns true
/// if packets wait.
async fn turns(
    attached: &Attached,
    buffer: &mut BytesMut,
    dispatch: &mut Dispatch,
    brake: &mut crate::persist::Brake,
    last_packet: &mut tokio::time::Instant,
    credentials: Option<&Credentials>,
) -> Result<bool, Ended> {
    let Attached { broker, output, .. } = attached;
    let mut cut = false;
    loop {
        output.room().await;
        brake.wait(buffer.len() > attached.read_bytes_max).await;
        // After a cut turn: one connection at a time, between the turns of other connections.
        let permit = match mem::take(&mut cut) {
            true => broker.cut_turns().acquire().await.ok(),
            false => None,
        };
        let (before, now) = (buffer.len(), tokio::time::Instant::now());
        let round = broker.rounds().open(now.into_std());
        brake.begin();
        let turn = dispatch.turn(buffer, now.into_std());
        brake.end();
        drop(permit);
        if buffer.len() != before {
            *last_packet = now;
        }
        if let Some(round) = round
            && round.waits()
        {
            // Until all ready connections have had their turns and the round ends.
            tokio::task::yield_now().await;
        }
        match turn {
            Turn::Drained => {
                if dispatch.needs_quick_ack(now.into_std()) {
                    output.acknowledge();
                }
                return Ok(false);
            }
            Turn::Paused => return Ok(true),
            Turn::More => tokio::task::yield_now().await,
            Turn::Cut => {
                cut = true;
                tokio::task::yield_now().await;
            }
            Turn::Authenticate => {
                let renewed = admission::renew(
                    broker,
                    attached.session,
                    &attached.origin,
                    dispatch.take_auth(),
                    credentials,
                )
                .await;
                if let Err(violation) = renewed {
                    attached.disconnect_for(violation);
                    return Err(Ended::ByBroker);
                }
            }
            // The reason has been sent already; a DISCONNECT of the client gets no answer.
            Turn::Over if output.is_closing() => return Err(Ended::ByBroker),
            Turn::Over => return Err(Ended::ByPeer),
        }
    }
}

/// Whether a paused connection that is not read from can never continue. Either its client reads
/// nothing, or its acknowledgements are stuck behind its requests.
fn is_stuck(attached: &Attached, pause: &mut Option<Pause>, reads: bool) -> bool {
    let now = tokio::time::Instant::now();
    let taken = attached.output.taken();
    let since = match pause {
        Some(pause) if pause.taken == taken && !reads => pause.since,
        _ => {
            *pause = Some(Pause { taken, since: now });
            return false;
        }
    };
    let limits = attached.broker.limits();
    now - since > limits.write_stall
        && !attached
            .broker
            .lock()
            .has_room_for_answers(attached.session)
}

/// How long a connection has been paused without progress.
struct Pause {
    taken: u64,
    since: tokio::time::Instant,
}

/// The size of the next read, from the size asked for last and the bytes that came. Most clients
/// send little at a time, and a silent connection keeps a buffer of this size.
fn next_read_bytes(asked: usize, came: usize, max: usize) -> usize {
    let next = match came {
        _ if came >= asked / 2 => asked * 2,
        _ if came < asked / 8 => asked / 2,
        _ => asked,
    };
    next.max(READ_BYTES_MIN).min(max)
}

/// Shrinks a large allocation of which little is in use. Otherwise one byte behind a large packet
/// would pin the whole buffer.
fn release(buffer: &mut BytesMut, allocated: &mut usize) {
    if *allocated > IDLE_BUFFER_BYTES_MAX && buffer.len() <= *allocated / BUFFER_PARTS_IN_USE {
        *buffer = BytesMut::from(&buffer[..]);
        *allocated = buffer.capacity();
    }
}

/// Makes room for one read. The buffer grows only with received bytes, and shrinks again after a
/// large packet.
fn make_room(buffer: &mut BytesMut, read_bytes: usize) {
    if buffer.is_empty() && buffer.capacity() > (4 * read_bytes).min(IDLE_BUFFER_BYTES_MAX) {
        *buffer = BytesMut::new();
    }
    if buffer.capacity() - buffer.len() < read_bytes / 2 {
        buffer.reserve(read_bytes);
    }
}

/// Writes the output until it is closed or the client does not take it. Takes all available bytes
/// at a time.
async fn write<W: AsyncWrite + Unpin>(
    broker: Broker,
    session: SessionKey,
    connection: u64,
    output: Arc<Output>,
    mut writer: W,
    stall_max: Duration,
) {
    let mut chunk = BytesMut::new();
    loop {
        if output.take(&mut chunk).await == Work::Close {
            break;
        }
        if let Err(error) = write_chunk(&mut writer, &chunk, &output, stall_max).await {
            tracing::debug!(connection, %error, "cannot write to a client");
            output.close(|_| {});
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
) -> io::Result<()> {
    let mut rest = chunk;
    while !rest.is_empty() {
        match write_some(writer, rest, output, stall_max).await? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            count => rest = &rest[count..],
        }
    }
    // Does nothing for TCP; other streams may buffer.
    writer.flush().await
}

/// Writes as many bytes as the client takes; an error if it takes none for too long.
async fn write_some<W: AsyncWrite + Unpin>(
    writer: &mut W,
    bytes: &[u8],
    output: &Output,
    stall_max: Duration,
) -> io::Result<usize> {
    let look = stall_max.min(WRITE_STALL_LOOK);
    let mut stalled = Duration::ZERO;
    loop {
        if let Ok(written) = timeout(look, writer.write(bytes)).await {
            return written;
        }
        stalled += look;
        if stalled >= stall_max || stalled >= WRITE_STALL_OVER_TOTAL && output.blocks_others() {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_size_adapts_to_the_bytes_received() {
        let max = 16 << 10;
        let mut ask = READ_BYTES_MIN;
        for _ in 0..10 {
            ask = next_read_bytes(ask, ask, max);
        }
        assert_eq!(ask, max);
        // A read may return more than was asked for, if the buffer had room.
        assert_eq!(
            next_read_bytes(READ_BYTES_MIN, max, max),
            2 * READ_BYTES_MIN
        );
        assert_eq!(next_read_bytes(max, max / 4, max), max);
        for _ in 0..10 {
            ask = next_read_bytes(ask, 2, max);
        }
        assert_eq!(ask, READ_BYTES_MIN);
        assert_eq!(next_read_bytes(READ_BYTES_MIN, READ_BYTES_MIN, 100), 100);
    }

    #[test]
    fn idle_connection_keeps_a_small_buffer() {
        let mut buffer = BytesMut::new();
        make_room(&mut buffer, 16 << 10);
        assert!(buffer.capacity() >= 16 << 10);
        make_room(&mut buffer, READ_BYTES_MIN);
        let small = buffer.capacity();
        assert!((READ_BYTES_MIN..=4 * READ_BYTES_MIN).contains(&small));
        // The content stays.
        buffer.extend_from_slice(&[7; 3000]);
        make_room(&mut buffer, READ_BYTES_MIN);
        assert_eq!(buffer, [7; 3000][..]);
    }

    #[test]
    fn byte_after_a_large_packet_does_not_pin_its_buffer() {
        let mut buffer = BytesMut::with_capacity(4 << 20);
        let mut allocated = buffer.capacity();
        buffer.extend_from_slice(&vec![7; 2 << 20]);
        release(&mut buffer, &mut allocated);
        assert_eq!(allocated, 4 << 20, "half of it is in use");
        let packet = buffer.split_to((2 << 20) - 1);
        let place = buffer.as_ptr();
        release(&mut buffer, &mut allocated);
        assert_eq!((&buffer[..], buffer.capacity()), (&[7][..], allocated));
        assert!(allocated < 64, "{allocated}");
        assert_ne!(buffer.as_ptr(), place);
        drop(packet);
        // A buffer in use counts with its whole allocation.
        assert_eq!(counted_bytes(&buffer, 4 << 20), 4 << 20);
        assert_eq!(counted_bytes(&buffer, allocated), 0);
    }
}
