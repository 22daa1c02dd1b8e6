//! Reads the packets of a connection and passes them to the dispatch, turn by turn.

use std::{future::pending, mem, pin::Pin, time::Duration};

use bytes::BytesMut;
use tokio::{
    io::{AsyncRead, AsyncReadExt},
    time::{Instant, Sleep, sleep_until, timeout},
};

use super::{
    Attached, Ended,
    read_buffer::{make_room, next_read_bytes, release},
};
use crate::{
    ReasonCode,
    admission::{self, Credentials},
    codec::Violation,
    dispatch::{Dispatch, Turn},
    incomplete::{ConnectionBytes, counted_bytes},
    limits::{LATE_PACKET_WAIT, PAUSE_CHECK_INTERVAL, READ_BYTES_MIN, SIGN_OF_LIFE_BYTES},
    persist::Brake,
};

/// Reads packets until the connection ends. Pauses while the client does not read the broker's
/// output.
pub(super) async fn read<R: AsyncRead + Unpin>(
    attached: &Attached,
    stream: &mut R,
    buffer: &mut BytesMut,
    dispatch: &mut Dispatch,
    silence_max: Option<Duration>,
    credentials: Option<&Credentials>,
) -> Ended {
    let Attached { broker, output, .. } = attached;
    let begun = Instant::now();
    let timer = sleep_until(begun + silence_max.unwrap_or_default());
    tokio::pin!(timer);
    let mut silence = Silence {
        last_packet: begun,
        bytes: 0,
        max: silence_max,
        is_late: false,
        timer,
    };
    let mut ask = READ_BYTES_MIN;
    let connection = (attached.session, attached.origin.connection);
    let mut memory = broker.packets().add_connection(Some(connection));
    let mut brake = broker.brake();
    // The size of the read buffer's allocation; `capacity` is only what is left of it.
    let mut allocated = buffer.capacity();
    let mut pause = None;
    loop {
        let turns = turns(
            attached,
            buffer,
            dispatch,
            &mut brake,
            &mut silence,
            credentials,
        );
        let paused = match turns.await {
            Ok(paused) => paused,
            Err(ended) => return ended,
        };
        release(buffer, &mut allocated);
        let bytes_max = || broker.limits().packet_bytes_total_max;
        let bytes = counted_bytes(buffer, allocated) + dispatch.held_bytes();
        let fits = memory.fits(bytes, bytes_max);
        if !fits && !paused && !end_stalled(attached, &memory) {
            return attached.quota_exceeded(PACKETS_TOO_LARGE);
        }
        dispatch.set_may_hold_more(!memory.is_over(bytes_max));
        let reads = !paused || dispatch.accepts_input();
        if reads {
            make_room(buffer, ask);
            allocated = allocated.max(buffer.capacity());
        }
        if !paused {
            pause = None;
        } else if is_stuck(attached, &mut pause, reads) {
            return attached.quota_exceeded(READS_NOTHING);
        }
        tokio::select! {
            biased;
            read = stream.read_buf(buffer), if reads => match read {
                Ok(0) | Err(_) => return Ended::ByPeer,
                Ok(count) => {
                    silence.bytes += count;
                    memory.received(count);
                    ask = next_read_bytes(ask, count, attached.read_bytes_max);
                }
            },
            () = async { _ = timeout(PAUSE_CHECK_INTERVAL, output.progress()).await }, if paused => {}
            () = silence.too_long(), if reads => return Ended::KeepAliveTimeout,
        }
    }
}

/// The Reason String if incomplete and waiting packets exceed their limit.
const PACKETS_TOO_LARGE: &str = "large packets of all clients exceed the memory limit: retry later";

/// What a client without progress gets if others need its memory.
const PACKETS_STALLED: Violation = Violation {
    reason: ReasonCode::QUOTA_EXCEEDED,
    text: "large packets of this client wait without progress, and others need the memory",
};

/// The Reason String if a client's requests can never continue.
const READS_NOTHING: &str = "this client sends requests without reading their answers";

/// Measures how long the client has sent no packet, and no large part of one.
struct Silence<'a> {
    last_packet: Instant,
    /// Received since then.
    bytes: usize,
    /// The limit, if there is one.
    max: Option<Duration>,
    /// Whether the limit has passed, and the socket gets a last look.
    is_late: bool,
    /// Reset when it fires rather than at every packet.
    timer: Pin<&'a mut Sleep>,
}

impl Silence<'_> {
    /// Notes the end of a turn that began at `now`.
    fn turned(&mut self, has_packets: bool, now: Instant) {
        if has_packets || self.bytes >= SIGN_OF_LIFE_BYTES {
            self.bytes = 0;
            self.last_packet = now;
        }
    }

    /// Returns once the silence has lasted for its limit. May be cancelled and called again.
    async fn too_long(&mut self) {
        let Some(max) = self.max else {
            return pending().await;
        };
        loop {
            self.timer.as_mut().await;
            let (now, due) = (Instant::now(), self.last_packet + max);
            if due > now {
                self.is_late = false;
                self.timer.as_mut().reset(due);
            } else if mem::replace(&mut self.is_late, true) {
                return;
            } else {
                // After a pause of the process (SIGSTOP, `docker pause`) timers are due before the
                // runtime has looked at the sockets, where packets may wait.
                self.timer.as_mut().reset(now + LATE_PACKET_WAIT);
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
    brake: &mut Brake,
    silence: &mut Silence<'_>,
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
        if broker.is_draining() {
            // Until the shutdown closes the output, which ends this connection.
            return pending().await;
        }
        if !broker.may_decide().await {
            return Err(Ended::ByBroker);
        }
        let (before, now) = (buffer.len(), Instant::now());
        let batch = broker.write_batching().open(now.into_std());
        brake.begin();
        let turn = dispatch.turn(buffer, now.into_std());
        let has_packets = buffer.len() != before;
        brake.end(has_packets);
        drop(permit);
        silence.turned(has_packets, now);
        if let Some(batch) = batch
            && batch.waits()
        {
            // Until all ready connections have had their turns and the batch ends.
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

/// Ends connections whose large packets make no progress, so that those of this one have room.
/// Returns false if that does not suffice.
fn end_stalled(attached: &Attached, memory: &ConnectionBytes<'_>) -> bool {
    let broker = &attached.broker;
    let Some(stalled) = memory.evict_stalled(broker.limits().packet_bytes_total_max) else {
        return false;
    };
    let mut core = broker.lock();
    for (session, connection) in stalled {
        core.close_after_violation(session, connection, PACKETS_STALLED);
    }
    true
}

/// Whether a paused connection that is not read from can never continue, because its client reads
/// nothing.
fn is_stuck(attached: &Attached, pause: &mut Option<Pause>, reads: bool) -> bool {
    let now = Instant::now();
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
            .has_room_for_publish(attached.session)
}

/// How long a connection has been paused without progress.
struct Pause {
    taken: u64,
    since: Instant,
}
