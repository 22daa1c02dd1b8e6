//! Passes the bytes of a client's socket to the leader, and back.
//!
//! An idle stream must hold no buffer, because a host may pass on ten thousand of them. The bytes
//! go through a buffer of the thread. Only those that the receiver does not take at once are
//! copied.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::timeout;

use statehouse_config::limits;

thread_local! {
    static BUFFER: RefCell<Box<[u8]>> =
        RefCell::new(vec![0; limits::CLUSTER_SPLICE_BYTES].into_boxed_slice());
}

/// Passes bytes between a client and the leader until one direction has ended, or one side has
/// failed. The other direction then has a limited time.
pub(super) async fn splice<R1, W1, R2, W2>(
    (mut from_client, mut to_client): (R1, W1),
    (mut from_leader, mut to_leader): (R2, W2),
) where
    R1: AsyncRead + Unpin,
    W1: AsyncWrite + Unpin,
    R2: AsyncRead + Unpin,
    W2: AsyncWrite + Unpin,
{
    let mut up = pin!(copy(&mut from_client, &mut to_leader));
    let mut down = pin!(copy(&mut from_leader, &mut to_client));
    let linger = limits::CLUSTER_SPLICE_LINGER;
    tokio::select! {
        ended = &mut up => if ended.is_ok() {
            _ = timeout(linger, down).await;
        },
        ended = &mut down => if ended.is_ok() {
            _ = timeout(linger, up).await;
        },
    }
}

/// Copies until the reader ends, and then shuts the writer down.
async fn copy<R, W>(reader: &mut R, writer: &mut W) -> io::Result<()>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    loop {
        match poll_fn(|cx| poll_pass(reader, writer, cx)).await? {
            Passed::All => {}
            Passed::Part(rest) => write_all(writer, &rest).await?,
            Passed::End => return writer.shutdown().await,
        }
    }
}

/// Writes all bytes, unless the receiver takes none for [`limits::CLUSTER_WRITE_STALL`]. A client
/// that reads nothing must not keep its place after the leader has closed its stream.
async fn write_all<W: AsyncWrite + Unpin>(writer: &mut W, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match timeout(limits::CLUSTER_WRITE_STALL, writer.write(bytes)).await?? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            written => bytes = &bytes[written..],
        }
    }
    Ok(())
}

enum Passed {
    /// All bytes that were read.
    All,
    /// The receiver has no room for these bytes.
    Part(Vec<u8>),
    End,
}

/// Reads once and writes what was read.
fn poll_pass<R, W>(reader: &mut R, writer: &mut W, cx: &mut Context<'_>) -> Poll<io::Result<Passed>>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    BUFFER.with_borrow_mut(|buffer| {
        let mut read = ReadBuf::new(buffer);
        ready!(Pin::new(reader).poll_read(cx, &mut read))?;
        let bytes = read.filled();
        if bytes.is_empty() {
            return Poll::Ready(Ok(Passed::End));
        }
        let written = match Pin::new(writer).poll_write(cx, bytes) {
            Poll::Ready(written) => written?,
            Poll::Pending => 0,
        };
        Poll::Ready(Ok(match &bytes[written..] {
            [] => Passed::All,
            rest => Passed::Part(rest.to_vec()),
        }))
    })
}

/// Whether the other side of a socket has closed it, even if bytes are unread.
pub(super) async fn is_closed(socket: &TcpStream) -> bool {
    let mut readiness = pin!(socket.ready(Interest::READABLE));
    match poll_fn(|cx| Poll::Ready(readiness.as_mut().poll(cx))).await {
        Poll::Pending => false,
        Poll::Ready(Ok(ready)) => ready.is_read_closed(),
        Poll::Ready(Err(_)) => true,
    }
}

/// Lets the system detect that the machine at the other side lost its power.
pub(super) fn detect_dead_peer(socket: &TcpStream) {
    let (idle, interval, probes) = limits::CLUSTER_KEEPALIVE;
    let keepalive = TcpKeepalive::new()
        .with_time(idle)
        .with_interval(interval)
        .with_retries(probes);
    // Without it, a dead peer is only detected later.
    if let Err(error) = SockRef::from(socket).set_tcp_keepalive(&keepalive) {
        tracing::debug!(%error, "cannot probe an idle connection between hosts");
    }
}

/// Ends a connection if the other side takes no bytes for some time.
pub(super) fn limit_unacknowledged(socket: &TcpStream) {
    #[cfg(target_os = "linux")]
    if let Err(error) =
        SockRef::from(socket).set_tcp_user_timeout(Some(limits::CLUSTER_UNACKNOWLEDGED_MAX))
    {
        tracing::debug!(%error, "cannot limit the time of unacknowledged bytes");
    }
    #[cfg(not(target_os = "linux"))]
    let _ = socket;
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, duplex, split};
    use tokio::net::TcpListener;
    use tokio::time::{Instant, sleep};

    use super::*;

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap());
        let (near, far) = tokio::join!(near, listener.accept());
        (near.unwrap(), far.unwrap().0)
    }

    /// A spliced client and leader.
    async fn spliced() -> (TcpStream, TcpStream) {
        let (client, near) = pair().await;
        let (leader, far) = pair().await;
        tokio::spawn(splice(near.into_split(), far.into_split()));
        (client, leader)
    }

    fn bytes(seed: u8, length: usize) -> Vec<u8> {
        (0..length).map(|at| (at % 251) as u8 ^ seed).collect()
    }

    #[tokio::test]
    async fn all_bytes_arrive_in_both_directions_at_a_slow_reader() {
        let (mut client, mut leader) = spliced().await;
        // More than the buffers of the sockets hold.
        let length = 16 << 20;
        let (up, down) = (bytes(1, length), bytes(2, length));
        let (expected_up, expected_down) = (up.clone(), down.clone());
        let (mut from_client, mut to_client) = client.split();
        let (mut from_leader, mut to_leader) = leader.split();
        let receive_up = async {
            sleep(Duration::from_millis(200)).await;
            let mut received = vec![0; length];
            from_leader.read_exact(&mut received).await.unwrap();
            assert!(received == expected_up);
        };
        let receive_down = async {
            sleep(Duration::from_millis(100)).await;
            let mut received = vec![0; length];
            from_client.read_exact(&mut received).await.unwrap();
            assert!(received == expected_down);
        };
        let (sent_up, sent_down, (), ()) = tokio::join!(
            to_client.write_all(&up),
            to_leader.write_all(&down),
            receive_up,
            receive_down
        );
        sent_up.and(sent_down).unwrap();
    }

    #[tokio::test]
    async fn the_last_bytes_arrive_before_the_end() {
        let (mut client, mut leader) = spliced().await;
        leader.write_all(&bytes(3, 100_000)).await.unwrap();
        drop(leader);
        let mut received = Vec::new();
        client.read_to_end(&mut received).await.unwrap();
        assert!(received == bytes(3, 100_000));
    }

    #[tokio::test]
    async fn a_stream_ends_soon_after_one_direction() {
        for reverse in [false, true] {
            let (mut one, mut other) = spliced().await;
            if reverse {
                std::mem::swap(&mut one, &mut other);
            }
            let began = Instant::now();
            one.shutdown().await.unwrap();
            assert_eq!(other.read(&mut [0]).await.unwrap(), 0);
            // The other side sends nothing and does not close.
            assert!(!matches!(one.read(&mut [0]).await, Ok(1..)));
            let elapsed = began.elapsed();
            let linger = limits::CLUSTER_SPLICE_LINGER;
            assert!(elapsed >= linger && elapsed < linger + Duration::from_secs(10));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_reads_nothing_keeps_its_place_for_a_limited_time() {
        let (client, near) = duplex(100);
        let (mut leader, far) = duplex(100);
        let spliced = tokio::spawn(splice(split(near), split(far)));
        leader.write_all(&bytes(4, 150)).await.unwrap();
        drop(leader);
        let began = Instant::now();
        let ended = timeout(limits::CLUSTER_WRITE_STALL * 2, spliced).await;
        ended.expect("it ends").unwrap();
        assert!(began.elapsed() >= limits::CLUSTER_WRITE_STALL);
        drop(client);
    }

    #[tokio::test]
    async fn a_reset_ends_both_sides_at_once() {
        let (client, mut leader) = spliced().await;
        SockRef::from(&client)
            .set_linger(Some(Duration::ZERO))
            .unwrap();
        drop(client);
        let began = Instant::now();
        assert!(!matches!(leader.read(&mut [0]).await, Ok(1..)));
        assert!(began.elapsed() < limits::CLUSTER_SPLICE_LINGER);
    }

    #[tokio::test]
    async fn a_closed_socket_is_detected_behind_unread_bytes() {
        let (mut near, far) = pair().await;
        assert!(!is_closed(&far).await);
        near.write_all(b"unread").await.unwrap();
        far.readable().await.unwrap();
        assert!(!is_closed(&far).await);
        drop(near);
        let began = Instant::now();
        while !is_closed(&far).await {
            assert!(began.elapsed() < Duration::from_secs(10), "it is closed");
            sleep(Duration::from_millis(1)).await;
        }
    }
}
