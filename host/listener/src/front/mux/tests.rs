use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::task::Context;
use std::time::Duration;

use tokio::io::{DuplexStream, ReadBuf, duplex, split};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::*;
use crate::front::tests::{eventually, within};

const SCHEME: Scheme = Scheme {
    tls: true,
    websocket: false,
};

fn client(port: u16) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 7], port))
}

/// A leader that accepts clients of ports above 9, and refuses others.
struct Leader {
    streams: UnboundedReceiver<(Stream, Scheme, SocketAddr)>,
    accepting: JoinHandle<Result<(), MuxError>>,
}

impl Leader {
    fn on(socket: DuplexStream) -> Self {
        let (sender, streams) = unbounded_channel();
        let (reader, writer) = split(socket);
        let accepting = tokio::spawn(accept(reader, writer, move |scheme, client| {
            let sender = sender.clone();
            match client.port() {
                ..10 => Err(Answer::NoListener),
                _ => Ok(move |stream| sender.send((stream, scheme, client)).unwrap()),
            }
        }));
        Self { streams, accepting }
    }

    async fn next(&mut self) -> Stream {
        self.streams.recv().await.unwrap().0
    }

    async fn ended(self) -> Result<(), MuxError> {
        within("its end", self.accepting).await.unwrap()
    }
}

/// A host, and the other end of its connection.
fn host() -> (Mux, DuplexStream) {
    let (host, leader) = duplex(4096);
    let (reader, writer) = split(host);
    (Mux::start(reader, writer), leader)
}

/// A host and the leader to which it passes clients on.
fn hosts() -> (Mux, Leader) {
    let (mux, leader) = host();
    (mux, Leader::on(leader))
}

/// A stream at both hosts.
async fn stream(mux: &Mux, leader: &mut Leader) -> (Stream, Stream) {
    let near = mux.open(SCHEME, client(40_000)).unwrap();
    assert_eq!(near.answered().await.unwrap(), Answer::Accepted);
    (near, leader.next().await)
}

/// A leader, and its connection as a peer that writes frames by hand.
fn peer() -> (DuplexStream, Leader) {
    let (peer, leader) = duplex(1 << 20);
    (peer, Leader::on(leader))
}

fn frame(id: u32, kind: u8, body: &[u8]) -> BytesMut {
    let mut out = BytesMut::new();
    push(&mut out, id, kind, body);
    out
}

fn open() -> BytesMut {
    frame(0, OPEN, &encode_client(SCHEME, client(40_000)))
}

fn bytes(seed: u8, length: usize) -> Vec<u8> {
    (0..length).map(|at| (at % 251) as u8 ^ seed).collect()
}

/// The bytes that a stream has received and nobody has read.
fn held_bytes(stream: &Stream) -> usize {
    let mut state = stream.0.shared.lock();
    state.entry(stream.0.id).unwrap().inbound.len()
}

#[tokio::test]
async fn a_leader_serves_or_refuses_each_client() {
    let (mux, mut leader) = hosts();
    for port in [1, 40_000, 2, 40_001] {
        let stream = mux.open(SCHEME, client(port)).unwrap();
        let answer = stream.answered().await.unwrap();
        if port < 10 {
            assert_eq!(answer, Answer::NoListener);
        } else {
            assert_eq!(answer, Answer::Accepted);
            let (_, scheme, seen) = leader.streams.recv().await.unwrap();
            assert_eq!((scheme, seen), (SCHEME, client(port)));
        }
    }
}

#[tokio::test]
async fn streams_carry_bytes_of_any_length_side_by_side() {
    let (mux, mut leader) = hosts();
    let mut tasks = Vec::new();
    for seed in 0..20 {
        let (near, far) = stream(&mux, &mut leader).await;
        for (mut from, mut to, seed) in [
            (near.clone(), far.clone(), seed),
            (far.clone(), near.clone(), seed | 0x40),
        ] {
            let sent = bytes(seed, 5 * limits::CLUSTER_WINDOW_BYTES + usize::from(seed));
            let expected = sent.clone();
            tasks.push(tokio::spawn(async move {
                from.write_all(&sent).await.unwrap();
                from.shutdown().await.unwrap();
            }));
            tasks.push(tokio::spawn(async move {
                let mut received = Vec::new();
                to.read_to_end(&mut received).await.unwrap();
                assert!(received == expected);
            }));
        }
    }
    for task in tasks {
        within("its end", task).await.unwrap();
    }
}

#[tokio::test]
async fn a_stream_that_is_not_read_holds_a_window_and_delays_no_other() {
    let (mux, mut leader) = hosts();
    let (mut slow, mut unread) = stream(&mux, &mut leader).await;
    let (mut other, mut read) = stream(&mux, &mut leader).await;
    let sent = bytes(1, 2 * limits::CLUSTER_WINDOW_BYTES);
    let writing = slow.write_all(&sent);
    assert!(timeout(Duration::from_millis(50), writing).await.is_err());
    assert_eq!(held_bytes(&unread), limits::CLUSTER_WINDOW_BYTES);
    assert_eq!(
        Direct::try_write(&slow, b"x").unwrap_err().kind(),
        io::ErrorKind::WouldBlock
    );
    for _ in 0..10 {
        other.write_all(&sent[..1000]).await.unwrap();
        let mut received = [0; 1000];
        let reading = read.read_exact(&mut received);
        within("all bytes", reading).await.unwrap();
    }
    // It continues when it is read.
    let (mut held, rest) = (vec![0; sent.len()], &sent[limits::CLUSTER_WINDOW_BYTES..]);
    let both = async { tokio::join!(slow.write_all(rest), unread.read_exact(&mut held)) };
    let (written, read) = within("all bytes", both).await;
    written.and(read.map(drop)).unwrap();
    assert!(held == sent);
    // An idle stream keeps no large buffer.
    let mut state = unread.0.shared.lock();
    let entry = state.entry(unread.0.id).unwrap();
    assert!(!entry.inbound.try_reclaim(IDLE_BYTES_MAX + 1));
}

#[tokio::test]
async fn streams_wait_while_the_connection_is_full() {
    let (mux, leader) = host();
    // Nothing is read until all streams wait.
    let streams: Vec<Stream> = (0..20)
        .map(|port| mux.open(SCHEME, client(100 + port)).unwrap())
        .collect();
    let sent = bytes(1, limits::CLUSTER_WINDOW_BYTES);
    let mut written = Vec::new();
    for mut stream in streams.clone() {
        let sent = sent.clone();
        written.push(tokio::spawn(async move { stream.write_all(&sent).await }));
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    let waiting = mux.0.lock().out.len();
    let max = limits::CLUSTER_OUT_BYTES_MAX + limits::CLUSTER_WINDOW_BYTES + 1000;
    assert!(
        (limits::CLUSTER_OUT_BYTES_MAX..max).contains(&waiting),
        "{waiting}"
    );
    assert!(written.iter().any(|it| !it.is_finished()));
    let mut leader = Leader::on(leader);
    for task in written {
        within("all bytes", task).await.unwrap().unwrap();
    }
    for _ in 0..streams.len() {
        let mut received = vec![0; sent.len()];
        let mut stream = leader.next().await;
        stream.read_exact(&mut received).await.unwrap();
        assert!(received == sent);
    }
}

#[tokio::test]
async fn streams_that_wait_for_room_take_turns() {
    const STREAMS: usize = 60;
    let (mux, mut leader) = hosts();
    let sent = Arc::new([const { AtomicUsize::new(0) }; STREAMS]);
    let (mut streams, mut tasks) = (Vec::new(), Vec::new());
    for _ in 0..STREAMS {
        streams.push(stream(&mux, &mut leader).await);
    }
    for (id, (mut near, mut far)) in streams.into_iter().enumerate() {
        let sent = sent.clone();
        tasks.push(tokio::spawn(async move {
            let bytes = [0; 16 << 10];
            while near.write_all(&bytes).await.is_ok() {
                sent[id].fetch_add(bytes.len(), Relaxed);
            }
        }));
        tasks.push(tokio::spawn(async move {
            let mut bytes = vec![0; 16 << 10];
            while matches!(far.read(&mut bytes).await, Ok(1..)) {}
        }));
    }
    let total = || sent.iter().map(|it| it.load(Relaxed)).sum::<usize>();
    let enough = STREAMS * 10 * limits::CLUSTER_WINDOW_BYTES;
    eventually("progress", || total() >= enough).await;
    let least = sent.iter().map(|it| it.load(Relaxed)).min().unwrap();
    assert!(least * STREAMS * 4 > total(), "{least} of {}", total());
    tasks.iter().for_each(JoinHandle::abort);
}

#[tokio::test]
async fn the_last_bytes_arrive_before_the_end_of_a_closed_stream() {
    let (mux, mut leader) = hosts();
    let (mut near, mut far) = stream(&mux, &mut leader).await;
    far.write_all(b"last").await.unwrap();
    drop(far);
    let mut received = Vec::new();
    near.read_to_end(&mut received).await.unwrap();
    assert_eq!(received, b"last");
    let refused = near.write_all(b"more").await.unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::BrokenPipe);
    // A stream waits for its answer no longer than it lives.
    let unanswered = mux.open(SCHEME, client(40_000)).unwrap();
    drop(leader);
    _ = within("its end", unanswered.answered()).await;
}

#[tokio::test]
async fn the_end_of_a_connection_ends_its_streams() {
    let (mux, mut leader) = hosts();
    let (mut near, mut far) = stream(&mux, &mut leader).await;
    far.write_all(b"last").await.unwrap();
    let mut received = [0; 4];
    near.read_exact(&mut received).await.unwrap();
    leader.accepting.abort();
    for stream in [&mut near, &mut far] {
        let read = within("its end", stream.read(&mut received)).await;
        let error = read.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
        let error = stream.write(b"more").await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    }
    assert!(mux.open(SCHEME, client(40_000)).is_none());
}

#[tokio::test]
async fn an_unused_connection_ends_with_its_last_stream() {
    let (mux, mut leader) = hosts();
    let (mut near, mut far) = stream(&mux, &mut leader).await;
    assert!(mux.has(&near) && !mux.has(&far));
    drop(mux);
    near.write_all(b"still").await.unwrap();
    let mut received = [0; 5];
    far.read_exact(&mut received).await.unwrap();
    assert!(!leader.accepting.is_finished());
    drop(near);
    assert_eq!(far.read(&mut received).await.unwrap(), 0);
    assert!(matches!(leader.ended().await, Err(MuxError::Closed)));
}

#[tokio::test]
async fn an_unused_connection_ends_if_the_leader_closed_its_last_stream() {
    let (mux, mut leader) = hosts();
    let (mut near, far) = stream(&mux, &mut leader).await;
    drop(mux);
    drop(far);
    assert_eq!(near.read(&mut [0]).await.unwrap(), 0);
    drop(near);
    assert!(matches!(leader.ended().await, Err(MuxError::Closed)));
}

#[tokio::test]
async fn frames_before_an_invalid_one_wake_their_streams() {
    let (mux, mut leader) = host();
    let mut stream = mux.open(SCHEME, client(40_000)).unwrap();
    let reading = tokio::spawn(async move {
        let mut received = Vec::new();
        _ = stream.read_to_end(&mut received).await;
        received
    });
    tokio::task::yield_now().await;
    let frames = [frame(0, DATA, b"last"), frame(0, 9, b"")].concat();
    leader.write_all(&frames).await.unwrap();
    let received = within("its end", reading).await.unwrap();
    assert_eq!(received, b"last");
}

#[tokio::test]
async fn frames_arrive_in_any_portions() {
    let (mut peer, mut leader) = peer();
    let frames = [
        open(),
        frame(0, DATA, b"one"),
        frame(0, DATA, b""),
        frame(0, END, b""),
    ];
    for byte in frames.concat() {
        peer.write_all(&[byte]).await.unwrap();
        tokio::task::yield_now().await;
    }
    let mut received = Vec::new();
    leader
        .next()
        .await
        .read_to_end(&mut received)
        .await
        .unwrap();
    assert_eq!(received, b"one");
    // What arrives for a closed stream is ignored.
    peer.write_all(&frame(0, DATA, b"late")).await.unwrap();
    peer.write_all(&frame(0, CREDIT, &[0; 4])).await.unwrap();
    peer.write_all(&frame(7, CLOSE, b"")).await.unwrap();
    peer.write_all(&open()).await.unwrap();
    leader.next().await;
}

#[tokio::test]
async fn invalid_frames_end_the_connection() {
    let too_much = vec![0; FRAME_BYTES_MAX];
    let window = [open(), frame(0, DATA, &too_much)].concat();
    let window = [
        window,
        frame(0, DATA, &too_much).to_vec(),
        frame(0, DATA, &[1]).to_vec(),
    ];
    let mut too_long = frame(0, DATA, b"");
    too_long[5..].copy_from_slice(&[0xff, 0xff, 0xff]);
    let mut scheme = open();
    scheme[HEADER_BYTES] = 4;
    for (what, bytes) in [
        ("window", window.concat()),
        (
            "credit",
            [open(), frame(0, CREDIT, &1u32.to_le_bytes())].concat(),
        ),
        ("opened twice", [open(), open()].concat()),
        ("length of OPEN", frame(0, OPEN, &[0; 19]).to_vec()),
        ("scheme", scheme.to_vec()),
        ("too long", too_long.to_vec()),
        ("kind", [open(), frame(0, 7, b"")].concat()),
        ("length of END", [open(), frame(0, END, b"x")].concat()),
        (
            "length of CREDIT",
            [open(), frame(0, CREDIT, b"x")].concat(),
        ),
        ("answer", [open(), frame(0, ANSWER, b"\x09")].concat()),
    ] {
        let (mut peer, mut leader) = peer();
        peer.write_all(&bytes).await.unwrap();
        // A stream stays until the connection ends.
        let stream = match bytes.starts_with(&open()) {
            true => leader.streams.recv().await,
            false => None,
        };
        let ended = leader.ended().await;
        assert!(
            matches!(ended, Err(MuxError::Invalid(_))),
            "{what}: {ended:?}"
        );
        drop(stream);
    }
}

#[tokio::test]
async fn only_the_host_that_connected_opens_streams() {
    let (mux, mut leader) = host();
    let mut stream = mux.open(SCHEME, client(40_000)).unwrap();
    let opened = frame(9, OPEN, &encode_client(SCHEME, client(40_000)));
    leader.write_all(&opened).await.unwrap();
    let read = within("its end", stream.read(&mut [0])).await;
    assert!(read.is_err());
}

/// A client's socket. Writes that must not wait find only as much room as there is.
#[derive(Clone, Debug)]
struct Client(Arc<Mutex<(Vec<u8>, usize)>>);

impl Client {
    fn new(room: usize) -> Self {
        Self(Arc::new(Mutex::new((Vec::new(), room))))
    }

    /// Takes what was received, and sets the room for the next writes.
    fn take(&self, room: usize) -> Vec<u8> {
        mem::replace(&mut *self.0.lock().unwrap(), (Vec::new(), room)).0
    }
}

impl Direct for Client {
    fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        let mut client = self.0.lock().unwrap();
        let count = bytes.len().min(client.1);
        if count == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        client.1 -= count;
        client.0.extend_from_slice(&bytes[..count]);
        Ok(count)
    }
}

#[tokio::test]
async fn received_bytes_go_to_the_sink_while_the_reader_sleeps() {
    let (mux, mut leader) = hosts();
    let (mut near, mut far) = stream(&mux, &mut leader).await;
    let client = Client::new(usize::MAX);
    near.write_to(Arc::new(client.clone()));
    // They arrive while the reader is awake.
    far.write_all(b"first").await.unwrap();
    eventually("the bytes", || held_bytes(&near) >= 5).await;
    let mut received = [0; 5];
    near.read_exact(&mut received).await.unwrap();
    assert_eq!(&received, b"first");
    let reading = tokio::spawn(async move { near.read(&mut [0]).await.unwrap() });
    // The sink lets the other side send more, as a reader does.
    let sent = bytes(1, 5 * limits::CLUSTER_WINDOW_BYTES);
    tokio::task::yield_now().await;
    within("room", far.write_all(&sent)).await.unwrap();
    let has_all = || client.0.lock().unwrap().0.len() >= sent.len();
    eventually("all bytes", has_all).await;
    assert!(client.take(0) == sent);
    assert!(!reading.is_finished());
    far.shutdown().await.unwrap();
    assert_eq!(within("its end", reading).await.unwrap(), 0);
}

#[tokio::test]
async fn a_sink_without_room_and_the_reader_keep_the_order_of_bytes() {
    let (mux, mut leader) = hosts();
    let (mut near, mut far) = stream(&mux, &mut leader).await;
    let client = Client::new(0);
    near.write_to(Arc::new(client.clone()));
    let sent = bytes(2, 20 * limits::CLUSTER_WINDOW_BYTES);
    let expected = sent.clone();
    let writing = tokio::spawn(async move {
        for (at, part) in sent.chunks(777).enumerate() {
            far.write_all(part).await.unwrap();
            // The reader sleeps meanwhile.
            if at % 5 == 0 {
                tokio::time::sleep(Duration::from_micros(100)).await;
            }
        }
        far.shutdown().await.unwrap();
    });
    let (mut received, mut by_reader) = (Vec::new(), 0);
    let mut buffer = [0; 1000];
    let reading = async {
        loop {
            let count = near.read(&mut buffer).await.unwrap();
            // What the sink took precedes what the reader got.
            received.extend(client.take(1500));
            received.extend_from_slice(&buffer[..count]);
            by_reader += count;
            if count == 0 {
                break;
            }
            // The reader writes slowly. No bytes may overtake it.
            tokio::task::yield_now().await;
            assert!(client.take(by_reader % 1500).is_empty());
        }
    };
    // The rest goes to the reader.
    within("its end", reading).await;
    assert!(received == expected);
    assert!((1..expected.len()).contains(&by_reader), "{by_reader}");
    writing.await.unwrap();
}

#[tokio::test]
async fn no_bytes_overtake_a_reader_that_is_polled_for_another_reason() {
    let (mux, mut leader) = hosts();
    let (mut near, _far) = stream(&mux, &mut leader).await;
    let client = Client::new(usize::MAX);
    near.write_to(Arc::new(client.clone()));
    let (shared, id) = (near.0.shared.clone(), near.0.id);
    let mut read_byte = || {
        let mut byte = [0];
        let mut into = ReadBuf::new(&mut byte);
        let cx = &mut Context::from_waker(Waker::noop());
        Pin::new(&mut near).poll_read(cx, &mut into).is_ready()
    };
    assert!(!read_byte(), "it sleeps");
    let mut work = Work::default();
    let data = Frame {
        stream: id,
        kind: DATA,
        body: b"abc",
    };
    shared.lock().receive(&data, &mut work).unwrap();
    assert_eq!(work.direct, [id]);
    // Its task is polled on another thread, and now has a byte to write.
    assert!(read_byte());
    shared.write_directly(id);
    assert!(client.take(0).is_empty());
    assert_eq!(held_bytes(&near), 2);
}
