use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

use super::*;

const MASK: [u8; 4] = [0x11, 0x22, 0x33, 0x44];

/// A frame as a client sends it.
fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![first];
    match payload.len() {
        length @ 0..126 => frame.push(0x80 | length as u8),
        length @ 126..=0xffff => {
            frame.push(0x80 | 126);
            frame.extend((length as u16).to_be_bytes());
        }
        length => {
            frame.push(0x80 | 127);
            frame.extend((length as u64).to_be_bytes());
        }
    }
    frame.extend(MASK);
    let masked = payload.iter().zip(MASK.iter().cycle());
    frame.extend(masked.map(|(byte, mask)| byte ^ mask));
    frame
}

/// Many pings with different payloads.
fn pings() -> Vec<u8> {
    let numbers = (0..20_000_u32).map(u32::to_be_bytes);
    numbers.flat_map(|number| frame(0x89, &number)).collect()
}

fn pair() -> (Frames<DuplexStream>, DuplexStream) {
    let (ours, theirs) = duplex(256 << 10);
    (Frames::new(ours, &[]), theirs)
}

/// What the stream reads if the peer sends these bytes and closes, and what the peer reads.
async fn read(sent: &[u8]) -> (io::Result<Vec<u8>>, Vec<u8>) {
    let (mut frames, mut peer) = pair();
    peer.write_all(sent).await.unwrap();
    peer.shutdown().await.unwrap();
    let mut bytes = Vec::new();
    let read = frames.read_to_end(&mut bytes).await.map(|_| bytes);
    drop(frames);
    let mut answered = Vec::new();
    peer.read_to_end(&mut answered).await.unwrap();
    (read, answered)
}

#[tokio::test]
async fn payloads_are_one_stream_for_any_split_into_frames_and_reads() {
    let long: Vec<u8> = (0..5000).map(|n| (n % 251) as u8).collect();
    let sent = [
        frame(0x82, b"ab"),
        frame(0x82, b""),
        frame(0x02, b"c"),
        // A control frame may be between the fragments of a message.
        frame(0x8a, b"late"),
        frame(0x00, b"de"),
        frame(0x80, &long),
        frame(0x82, b"f"),
    ]
    .concat();
    let expected = [b"abcde", &long[..], b"f"].concat();
    let (read, answered) = read(&sent).await;
    assert_eq!((read.unwrap(), answered), (expected.clone(), vec![]));
    for piece in [1, 2, 3, 7, 1024] {
        let (mut frames, mut peer) = pair();
        let sent = sent.clone();
        let sending = tokio::spawn(async move {
            for piece in sent.chunks(piece) {
                peer.write_all(piece).await.unwrap();
                tokio::task::yield_now().await;
            }
        });
        let mut bytes = vec![0; expected.len()];
        for part in bytes.chunks_mut(5) {
            frames.read_exact(part).await.unwrap();
        }
        assert_eq!(bytes, expected, "in pieces of {piece}");
        sending.await.unwrap();
    }
}

#[tokio::test]
async fn an_invalid_frame_ends_the_connection_with_a_code() {
    let mut unmasked = frame(0x82, b"a");
    unmasked[1] &= 0x7f;
    let endless = [&[0x82, 0xff], &[0xff; 8][..], &MASK].concat();
    let longer = |head: &[u8], length: usize| [head, &MASK, &vec![0_u8; length][..]].concat();
    let close = |code: u16, reason: &[u8]| frame(0x88, &[&code.to_be_bytes()[..], reason].concat());
    for (sent, code) in [
        (frame(0x81, b"text"), 1003),
        (frame(0x80, b"continues no message"), 1002),
        ([frame(0x02, b"a"), frame(0x82, b"b")].concat(), 1002),
        (frame(0xc2, b"compressed"), 1002),
        (frame(0x83, b"unknown"), 1002),
        (frame(0x09, b"a fragmented ping"), 1002),
        (frame(0x89, &[0; 126]), 1002),
        (unmasked, 1002),
        (endless, 1002),
        (longer(&[0x82, 0xfe, 0, 125], 125), 1002),
        (longer(&[0x89, 0xfe, 0, 1], 1), 1002),
        (
            longer(&[0x82, 0xff, 0, 0, 0, 0, 0, 0, 0xff, 0xff], 0xffff),
            1002,
        ),
        (frame(0x88, &[3]), 1002),
        (close(0, b""), 1002),
        (close(999, b""), 1002),
        (close(1005, b""), 1002),
        (close(1006, b"lost"), 1002),
        (close(1015, b""), 1002),
        (close(2999, b""), 1002),
        (close(5000, b""), 1002),
        (close(1000, b"\xff"), 1007),
    ] {
        let (read, answered) = read(&sent).await;
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert_eq!(answered[0], 0x88, "a Close frame");
        assert_eq!(
            u16::from_be_bytes([answered[2], answered[3]]),
            code,
            "{sent:?}"
        );
    }
}

#[tokio::test]
async fn valid_closes_and_lengths_are_accepted() {
    for body in [
        &b""[..],
        b"\x03\xe8",
        b"\x03\xe9leaves",
        b"\x0f\xa0\xc3\xa9",
    ] {
        let (read, answered) = read(&frame(0x88, body)).await;
        assert_eq!(read.unwrap(), b"");
        assert_eq!(answered, [0x88, 2, 0x03, 0xe8], "{body:?}");
    }
    for length in [0, 125, 126, 0xffff, 0x1_0000] {
        let payload = vec![7_u8; length];
        let (read, answered) = read(&frame(0x82, &payload)).await;
        assert_eq!((read.unwrap(), answered), (payload, vec![]));
    }
}

#[tokio::test]
async fn the_header_of_a_long_frame_reserves_no_memory() {
    let (mut frames, mut peer) = pair();
    let head = [&[0x82, 0xff], &(1_u64 << 40).to_be_bytes()[..], &MASK].concat();
    peer.write_all(&head).await.unwrap();
    let mut bytes = [0; 16];
    let reading = tokio::time::timeout(Duration::from_millis(20), frames.read(&mut bytes));
    assert!(reading.await.is_err(), "the payload never arrives");
    assert!(frames.received.capacity() <= 4 * limits::WS_READ_BYTES);
}

#[tokio::test]
async fn the_last_of_many_pings_is_answered_and_a_close_is_returned() {
    let mut pings = pings();
    pings.extend(frame(0x88, &1000_u16.to_be_bytes()));
    let (ours, mut theirs) = duplex(1 << 20);
    let mut frames = Frames::new(ours, &[]);
    theirs.write_all(&pings).await.unwrap();
    assert_eq!(frames.read(&mut [0; 16]).await.unwrap(), 0);
    frames.shutdown().await.unwrap();
    let mut answered = Vec::new();
    theirs.read_to_end(&mut answered).await.unwrap();
    let last = [
        &[0x8a, 4][..],
        &19_999_u32.to_be_bytes(),
        &[0x88, 2, 0x03, 0xe8],
    ]
    .concat();
    assert!(
        answered.ends_with(&last),
        "{:?}",
        &answered[answered.len() - 16..]
    );
}

#[tokio::test]
async fn pings_of_a_peer_that_does_not_read_use_no_memory() {
    let (ours, theirs) = duplex(64);
    let mut frames = Frames::new(ours, &[]);
    let (mut reading, mut sending) = tokio::io::split(theirs);
    let mut sent = pings();
    sent.extend(frame(0x82, b"a"));
    let mut byte = [0];
    let (sent, read) = tokio::join!(sending.write_all(&sent), frames.read(&mut byte));
    sent.unwrap();
    assert_eq!((read.unwrap(), &byte), (1, b"a"));
    let held = frames.out.capacity();
    assert!(held <= limits::WS_IDLE_BYTES_MAX, "{held} bytes");
    let shutdown = tokio::spawn(async move {
        frames.flush().await.unwrap();
        frames.shutdown().await.unwrap();
    });
    let mut answered = Vec::new();
    reading.read_to_end(&mut answered).await.unwrap();
    shutdown.await.unwrap();
    let last = [&[0x8a, 4][..], &19_999_u32.to_be_bytes()].concat();
    assert!(
        answered.windows(6).any(|pong| pong == last),
        "the last ping"
    );
    assert!(answered.len() < 100, "{answered:?}");
}

#[tokio::test]
async fn output_is_sent_in_frames_and_ends_with_a_close() {
    let (mut frames, mut peer) = pair();
    let long = vec![7; limits::WS_FRAME_BYTES_MAX + 1];
    frames.write_all(b"ab").await.unwrap();
    frames.write_all(&long).await.unwrap();
    frames.shutdown().await.unwrap();
    let mut out = Vec::new();
    peer.read_to_end(&mut out).await.unwrap();
    let mut expected = vec![0x82, 2, b'a', b'b', 0x82, 127];
    expected.extend((limits::WS_FRAME_BYTES_MAX as u64).to_be_bytes());
    expected.extend(&long[1..]);
    expected.extend([0x82, 1, 7, 0x88, 2, 0x03, 0xe8]);
    assert_eq!(out, expected);
}

#[tokio::test]
async fn a_reader_that_sends_a_pong_does_not_lose_the_writers_waker() {
    let (ours, mut peer) = duplex(64);
    let (mut reader, mut writer) = tokio::io::split(Frames::new(ours, &[]));
    let writing = tokio::spawn(async move {
        writer.write_all(&[1; 1000]).await.unwrap();
        writer.flush().await.unwrap();
    });
    // The writer now waits for room, and the reader finds none for its pong.
    tokio::time::sleep(Duration::from_millis(10)).await;
    peer.write_all(&frame(0x89, b"?")).await.unwrap();
    let reading = tokio::spawn(async move {
        _ = reader.read(&mut [0; 1]).await;
    });
    tokio::time::sleep(Duration::from_millis(10)).await;
    let mut got = vec![0; 1000 + 4 + 3];
    let all = tokio::time::timeout(Duration::from_secs(10), peer.read_exact(&mut got));
    all.await.expect("the writer is woken").unwrap();
    writing.await.unwrap();
    reading.abort();
}
