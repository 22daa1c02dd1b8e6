//! MQTT over the frames of a WebSocket (MQTT 5 section 6, RFC 6455).
//!
//! What enters: a stream behind the upgrade. What leaves: the bytes of MQTT packets, and back. A packet may span frames, and a
//! frame hold many packets, so payloads are handed on as they come: no peer can make us hold a message, however long it says
//! that one is. Other data than binary ends the connection.

use std::io::{self, Cursor};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker, ready};

use async_tungstenite::tungstenite::protocol::frame::FrameHeader;
use async_tungstenite::tungstenite::protocol::frame::coding::{CloseCode, Control, Data, OpCode};
use bytes::{Buf, BufMut, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::limits;

/// The longest payload of a control frame (RFC 6455 section 5.5).
const CONTROL_BYTES_MAX: u64 = 125;

/// A stream of MQTT in binary frames; the server's side of it.
pub(super) struct Frames<S> {
    stream: S,
    /// What has come and is not taken apart yet.
    came: BytesMut,
    /// What is left of the data frame that we are in.
    payload: Payload,
    /// Whether the last data frame was not the final one of its message.
    is_continued: bool,
    /// Frames on their way out.
    out: BytesMut,
    /// Whether the stream has nothing left of them either.
    is_flushed: bool,
    /// The payload of the last ping that is not answered yet: the others need no answer (RFC 6455 section 5.5.3).
    ping: Option<BytesMut>,
    /// Nothing more comes in.
    is_over: bool,
    /// Our Close frame is in `out`, or was.
    is_closed: bool,
    writers: Arc<Writers>,
}

#[derive(Default)]
struct Payload {
    left: u64,
    mask: [u8; 4],
    /// Where in the mask the next byte is.
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

/// Why a connection ends (RFC 6455 section 7.4.1).
type Violation = (CloseCode, &'static str);

impl<S: AsyncRead + AsyncWrite + Unpin> Frames<S> {
    /// Goes on behind the upgrade, with what has come beyond it.
    pub(super) fn new(stream: S, came: &[u8]) -> Self {
        Self {
            stream,
            came: BytesMut::from(came),
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

    /// Takes the next frame's head, or a control frame, out of what has come. False: it is not whole yet.
    fn next_frame(&mut self) -> Result<bool, Violation> {
        let protocol = |what| Err((CloseCode::Protocol, what));
        let mut cursor = Cursor::new(&self.came[..]);
        let Ok(head) = FrameHeader::parse(&mut cursor) else {
            return protocol("a frame of an unknown kind");
        };
        let Some((head, length)) = head else {
            return Ok(false);
        };
        // Less than fifteen.
        let head_bytes = cursor.position() as usize;
        if head.rsv1 || head.rsv2 || head.rsv3 {
            return protocol("a frame with a reserved bit, and no extension was agreed on");
        }
        let Some(mask) = head.mask else {
            return protocol("a frame of a client that is not masked");
        };
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
                        let what = "MQTT comes in binary frames, and this is text";
                        return Err((CloseCode::Unsupported, what));
                    }
                    _ => return protocol("a frame that does not go on with the message before it"),
                }
                if length > u64::MAX / 2 {
                    return protocol("a frame of a length that there is not");
                }
                self.came.advance(head_bytes);
                self.is_continued = !head.is_final;
                self.payload = payload;
            }
            OpCode::Control(kind) => {
                if length > CONTROL_BYTES_MAX || !head.is_final {
                    return protocol("a control frame that is too long, or in pieces");
                }
                // At most what was just looked at.
                let length = length as usize;
                if self.came.len() < head_bytes + length {
                    return Ok(false);
                }
                self.came.advance(head_bytes);
                let mut text = self.came.split_to(length);
                let mut payload = payload;
                payload.unmask(&mut text);
                match kind {
                    Control::Ping => self.ping = Some(text),
                    Control::Close => {
                        self.is_over = true;
                        self.close(CloseCode::Normal, "");
                    }
                    _ => {}
                }
            }
        }
        Ok(true)
    }

    /// Our last frame.
    fn close(&mut self, code: CloseCode, why: &str) {
        if std::mem::replace(&mut self.is_closed, true) {
            return;
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

    /// Writes what is on its way out. Reader and writer both do, so that a ping is answered where nothing else is to be
    /// written, and both are woken.
    fn poll_out(&mut self, who: Who, cx: &Context<'_>) -> Poll<io::Result<()>> {
        if let Some(ping) = self.ping.take().filter(|_| !self.is_closed) {
            self.put(OpCode::Control(Control::Pong), &ping);
        }
        if self.is_flushed {
            return Poll::Ready(Ok(()));
        }
        self.writers.set(who, cx.waker());
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
        // TLS keeps what it has encrypted where the socket has no room.
        ready!(Pin::new(&mut self.stream).poll_flush(&mut cx))?;
        self.is_flushed = true;
        Poll::Ready(Ok(()))
    }

    /// Ends because of what the peer sent. It is told where the socket has room, which is nearly always.
    fn fail(&mut self, (code, why): Violation, cx: &Context<'_>) -> io::Error {
        self.is_over = true;
        self.close(code, why);
        _ = self.poll_out(Who::Reader, cx);
        io::Error::new(io::ErrorKind::InvalidData, why)
    }

    /// Reads into what has come. Zero: nothing more does.
    fn poll_came(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        self.came.reserve(limits::WS_READ_BYTES);
        let mut bytes = [0; limits::WS_READ_BYTES];
        let mut read = ReadBuf::new(&mut bytes);
        ready!(Pin::new(&mut self.stream).poll_read(cx, &mut read))?;
        self.came.extend_from_slice(read.filled());
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
                // Where there is no room the reader goes on, and the writer writes it.
                _ = this.poll_out(Who::Reader, cx);
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
                        if ready!(this.poll_came(cx))? == 0 {
                            this.is_over = true;
                        }
                    }
                    Err(violation) => return Poll::Ready(Err(this.fail(violation, cx))),
                }
                continue;
            }
            let start = buf.filled().len();
            if this.came.is_empty() {
                // Past what has come already the payload goes where it is wanted at once.
                let mut part = ReadBuf::new(buf.initialize_unfilled_to(wanted));
                ready!(Pin::new(&mut this.stream).poll_read(cx, &mut part))?;
                let count = part.filled().len();
                buf.advance(count);
                if count == 0 {
                    this.is_over = true;
                    continue;
                }
            } else {
                let count = wanted.min(this.came.len());
                buf.put_slice(&this.came.split_to(count));
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
        ready!(self.poll_out(Who::Writer, cx))?;
        if self.is_closed {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let count = bytes.len().min(limits::WS_FRAME_BYTES_MAX);
        self.put(OpCode::Data(Data::Binary), &bytes[..count]);
        // It has taken them; what the socket has no room for is written before the next.
        match self.poll_out(Who::Writer, cx) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            _ => Poll::Ready(Ok(count)),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_out(Who::Writer, cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.close(CloseCode::Normal, "");
        ready!(self.poll_out(Who::Writer, cx))?;
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Who waits for room in the socket: its two tasks may both, and it knows one.
#[derive(Default)]
struct Writers(Mutex<[Option<Waker>; 2]>);

#[derive(Clone, Copy)]
enum Who {
    Reader,
    Writer,
}

impl Writers {
    fn set(&self, who: Who, waker: &Waker) {
        let mut wakers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut wakers[who as usize] {
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
