//! MQTT over the frames of a WebSocket (MQTT 5 section 6, RFC 6455).
//!
//! Converts the stream after the upgrade to the bytes of MQTT packets, and back. A packet may span
//! frames, and a frame may contain many packets. So payloads are passed on as they arrive, and a
//! whole message must never be buffered: its length is a claim of the peer. Data frames that are
//! not binary end the connection.

use std::io::{self, Cursor};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker, ready};

use async_tungstenite::tungstenite::protocol::frame::FrameHeader;
use async_tungstenite::tungstenite::protocol::frame::coding::{CloseCode, Control, Data, OpCode};
use bytes::{Buf, BufMut, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use statehouse_config::limits;

/// The longest payload of a control frame (RFC 6455 section 5.5).
const CONTROL_BYTES_MAX: u64 = 125;

/// The server's side of a stream of MQTT in binary frames.
pub(super) struct Frames<S> {
    stream: S,
    /// Received bytes that are not parsed yet.
    received: BytesMut,
    /// The rest of the current data frame.
    payload: Payload,
    /// Whether the last data frame was not the final one of its message.
    is_continued: bool,
    out: BytesMut,
    /// Whether `out` is empty and the stream is flushed.
    is_flushed: bool,
    /// The payload of the last ping without a pong: earlier pings need none (RFC 6455 section
    /// 5.5.3). Its pong must wait until `out` is written, or `out` would grow with every ping.
    ping: Option<BytesMut>,
    /// Whether no more input follows.
    is_over: bool,
    /// Whether the Close frame was put into `out`.
    is_closed: bool,
    writers: Arc<Writers>,
}

#[derive(Default)]
struct Payload {
    left: u64,
    mask: [u8; 4],
    /// The position of the next byte in the mask.
    at: usize,
}

impl Payload {
    fn unmask(&mut self, bytes: &mut [u8]) {
        self.mask.rotate_left(self.at);
        self.at = bytes.len() % 4;
        for chunk in bytes.chunks_mut(4) {
            for (byte, mask) in chunk.iter_mut().zip(self.mask) {
                *byte ^= mask;
            }
        }
        self.left -= bytes.len() as u64;
    }
}

/// Why the connection ends: the status code (RFC 6455 section 7.4.1) and the reason.
type Violation = (CloseCode, &'static str);

impl<S: AsyncRead + AsyncWrite + Unpin> Frames<S> {
    /// Continues after the upgrade. `received` are the bytes that were already read after it.
    pub(super) fn new(stream: S, received: &[u8]) -> Self {
        Self {
            stream,
            received: BytesMut::from(received),
            payload: Payload::default(),
            is_continued: false,
            out: BytesMut::new(),
            is_flushed: true,
            ping: None,
            is_over: false,
            is_closed: false,
            writers: Arc::default(),
        }
    }

    /// Parses the header of the next data frame, or a whole control frame, from the received bytes.
    /// False if it is incomplete.
    fn next_frame(&mut self) -> Result<bool, Violation> {
        let protocol = |what| Err((CloseCode::Protocol, what));
        let mut cursor = Cursor::new(&self.received[..]);
        let Ok(head) = FrameHeader::parse(&mut cursor) else {
            return protocol("a frame has an unknown opcode");
        };
        let Some((head, length)) = head else {
            return Ok(false);
        };
        // A header has less than fifteen bytes.
        let head_bytes = cursor.position() as usize;
        if head.rsv1 || head.rsv2 || head.rsv3 {
            return protocol("a frame has a reserved bit set, and no extension was negotiated");
        }
        let Some(mask) = head.mask else {
            return protocol("a frame of the client is not masked");
        };
        let shortest = match length {
            0..126 => 6,
            126..=0xffff => 8,
            _ => 14,
        };
        if head_bytes > shortest {
            return protocol("the length of a frame takes more bytes than it needs");
        }
        let payload = Payload {
            left: length,
            mask,
            at: 0,
        };
        match head.opcode {
            OpCode::Data(kind) => {
                match (kind, self.is_continued) {
                    (Data::Binary, false) | (Data::Continue, true) => {}
                    (Data::Text, _) => {
                        let what = "MQTT needs binary frames, and this is a text frame";
                        return Err((CloseCode::Unsupported, what));
                    }
                    _ => return protocol("a frame does not continue the message before it"),
                }
                if length > u64::MAX / 2 {
                    return protocol("the length of a frame has its highest bit set");
                }
                self.received.advance(head_bytes);
                self.is_continued = !head.is_final;
                self.payload = payload;
            }
            OpCode::Control(kind) => {
                if length > CONTROL_BYTES_MAX || !head.is_final {
                    return protocol("a control frame is too long or fragmented");
                }
                // At most `CONTROL_BYTES_MAX`.
                let length = length as usize;
                if self.received.len() < head_bytes + length {
                    return Ok(false);
                }
                self.received.advance(head_bytes);
                let mut text = self.received.split_to(length);
                let mut payload = payload;
                payload.unmask(&mut text);
                match kind {
                    Control::Ping => self.ping = Some(text),
                    Control::Close => {
                        check_close(&text)?;
                        self.is_over = true;
                        self.close(CloseCode::Normal, "");
                    }
                    _ => {}
                }
            }
        }
        Ok(true)
    }

    /// Queues the Close frame, once, behind the pong of the last ping.
    fn close(&mut self, code: CloseCode, why: &str) {
        if std::mem::replace(&mut self.is_closed, true) {
            return;
        }
        if let Some(ping) = self.ping.take() {
            self.put(OpCode::Control(Control::Pong), &ping);
        }
        let mut payload = BytesMut::with_capacity(2 + why.len());
        payload.put_u16(code.into());
        payload.put_slice(why.as_bytes());
        self.put(OpCode::Control(Control::Close), &payload);
    }

    fn put(&mut self, opcode: OpCode, payload: &[u8]) {
        let head = FrameHeader {
            opcode,
            ..FrameHeader::default()
        };
        // Writing to memory cannot fail.
        _ = head.format(payload.len() as u64, &mut (&mut self.out).writer());
        self.out.extend_from_slice(payload);
        self.is_flushed = false;
    }

    /// Writes the queued frames. Both the reader and the writer call this, so that a ping gets its
    /// pong even if there is no other output. Both are woken when the socket has room.
    fn poll_out(&mut self, side: Side, cx: &Context<'_>) -> Poll<io::Result<()>> {
        loop {
            if self.is_flushed {
                match self.ping.take() {
                    Some(ping) if !self.is_closed => {
                        self.put(OpCode::Control(Control::Pong), &ping)
                    }
                    _ => return Poll::Ready(Ok(())),
                }
            }
            self.writers.set(side, cx.waker());
            let waker = Waker::from(self.writers.clone());
            let mut cx = Context::from_waker(&waker);
            while !self.out.is_empty() {
                let written = ready!(Pin::new(&mut self.stream).poll_write(&mut cx, &self.out))?;
                if written == 0 {
                    return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
                }
                self.out.advance(written);
            }
            if self.out.capacity() > limits::WS_IDLE_BYTES_MAX {
                self.out = BytesMut::new();
            }
            // TLS buffers encrypted bytes if the socket has no room.
            ready!(Pin::new(&mut self.stream).poll_flush(&mut cx))?;
            self.is_flushed = true;
        }
    }

    /// Ends the connection because of a violation by the peer. The peer receives the reason if the
    /// socket has room, which is nearly always the case.
    fn fail(&mut self, (code, why): Violation, cx: &Context<'_>) -> io::Error {
        self.is_over = true;
        self.close(code, why);
        _ = self.poll_out(Side::Reader, cx);
        io::Error::new(io::ErrorKind::InvalidData, why)
    }

    /// Reads from the stream into `received`. Zero if the stream ended.
    fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        self.received.reserve(limits::WS_READ_BYTES);
        let mut bytes = [0; limits::WS_READ_BYTES];
        let mut read = ReadBuf::new(&mut bytes);
        ready!(Pin::new(&mut self.stream).poll_read(cx, &mut read))?;
        self.received.extend_from_slice(read.filled());
        Poll::Ready(Ok(read.filled().len()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Frames<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            if this.ping.is_some() || !this.is_flushed {
                // If the socket has no room the reader continues, and the writer writes it later.
                _ = this.poll_out(Side::Reader, cx);
            }
            if this.is_over || buf.remaining() == 0 {
                return Poll::Ready(Ok(()));
            }
            let wanted = usize::try_from(this.payload.left)
                .unwrap_or(usize::MAX)
                .min(buf.remaining());
            if wanted == 0 {
                match this.next_frame() {
                    Ok(true) => {}
                    Ok(false) => {
                        if ready!(this.poll_receive(cx))? == 0 {
                            this.is_over = true;
                        }
                    }
                    Err(violation) => return Poll::Ready(Err(this.fail(violation, cx))),
                }
                continue;
            }
            let start = buf.filled().len();
            if this.received.is_empty() {
                // No payload is buffered, so read into the caller's buffer without a copy.
                let mut part = ReadBuf::new(buf.initialize_unfilled_to(wanted));
                ready!(Pin::new(&mut this.stream).poll_read(cx, &mut part))?;
                let count = part.filled().len();
                buf.advance(count);
                if count == 0 {
                    this.is_over = true;
                    continue;
                }
            } else {
                let count = wanted.min(this.received.len());
                buf.put_slice(&this.received.split_to(count));
            }
            this.payload.unmask(&mut buf.filled_mut()[start..]);
            return Poll::Ready(Ok(()));
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Frames<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_out(Side::Writer, cx))?;
        if self.is_closed {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let count = bytes.len().min(limits::WS_FRAME_BYTES_MAX);
        self.put(OpCode::Data(Data::Binary), &bytes[..count]);
        // The bytes are accepted now. If the socket has no room for all of them, the rest is
        // written before the next frame.
        match self.poll_out(Side::Writer, cx) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            _ => Poll::Ready(Ok(count)),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_out(Side::Writer, cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.close(CloseCode::Normal, "");
        ready!(self.poll_out(Side::Writer, cx))?;
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Checks the body of a Close frame of the peer: empty, or a status code and a reason (RFC 6455
/// section 5.5.1).
fn check_close(body: &[u8]) -> Result<(), Violation> {
    match body.split_first_chunk::<2>() {
        None if body.is_empty() => Ok(()),
        None => Err((CloseCode::Protocol, "a Close frame has half a status code")),
        Some((code, _)) if !CloseCode::from(u16::from_be_bytes(*code)).is_allowed() => {
            let what = "a Close frame has a status code that must not be sent";
            Err((CloseCode::Protocol, what))
        }
        Some((_, reason)) if std::str::from_utf8(reason).is_err() => Err((
            CloseCode::Invalid,
            "the reason of a Close frame is not UTF-8",
        )),
        Some(_) => Ok(()),
    }
}

/// The tasks that wait for room in the socket. Both the reader and the writer may wait, and the
/// socket stores only one waker.
#[derive(Default)]
struct Writers(Mutex<[Option<Waker>; 2]>);

#[derive(Clone, Copy)]
enum Side {
    Reader,
    Writer,
}

impl Writers {
    fn set(&self, side: Side, waker: &Waker) {
        let mut wakers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut wakers[side as usize] {
            Some(known) => known.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
    }
}

impl Wake for Writers {
    fn wake(self: Arc<Self>) {
        let wakers = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        wakers.into_iter().flatten().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests;
