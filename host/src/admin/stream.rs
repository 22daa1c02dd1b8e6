//! Answers without a known end: server-sent events (HTML standard, section 9.2).
//!
//! [`event_stream`] makes an answer and the [`EventSink`] that writes to it. Invariants:
//!
//! * Events wait in a short queue. A reader that takes none for some seconds is too slow, and its
//!   connection ends. So a slow reader holds a bounded number of events.
//! * A stream is the last answer of its connection, and ends after some minutes. Its reader then
//!   sends the request again, and is authenticated again.
//! * A stream ends within seconds after its operator lost the role that the request needs.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::Response;
use hyper::body::{Body, Frame, SizeHint};
use hyper::header::{CACHE_CONTROL, CONNECTION, CONTENT_TYPE, HeaderMap, HeaderValue};
use serde::Serialize;
use tokio::sync::{Notify, OwnedSemaphorePermit, mpsc};
use tokio::time::{Instant, Sleep, sleep, sleep_until, timeout};

use super::answer::Answer;
use statehouse_config::limits;

/// A line that readers ignore.
const COMMENT: &[u8] = b":\n\n";

/// The body of an answer.
#[derive(Debug)]
pub(super) enum Content {
    /// All of it is known.
    Whole(Full<Bytes>),
    /// Events, until the other end of the queue is dropped.
    Events(Events),
}

/// The events of an answer, as the connection takes them.
#[derive(Debug)]
pub(super) struct Events {
    queue: mpsc::Receiver<Bytes>,
    /// Ends when a comment is due, by which both sides learn that the connection is alive.
    silence: Pin<Box<Sleep>>,
    cut: Arc<Notify>,
}

/// Writes the events of one answer. The answer ends when this is dropped.
pub(super) struct EventSink {
    queue: mpsc::Sender<Bytes>,
    ends: Instant,
    stall: Duration,
    cut: Arc<Notify>,
}

/// An answer of events, and the end to which they are written.
pub(super) fn event_stream() -> (EventSink, Answer) {
    stream_within(limits::ADMIN_STREAM_LIFE, limits::ADMIN_STREAM_STALL)
}

fn stream_within(life: Duration, stall: Duration) -> (EventSink, Answer) {
    let (sender, receiver) = mpsc::channel(limits::ADMIN_STREAM_EVENTS_MAX);
    let cut = Arc::<Notify>::default();
    let events = Events {
        queue: receiver,
        silence: Box::pin(sleep(limits::ADMIN_STREAM_KEEP_ALIVE)),
        cut: cut.clone(),
    };
    let sink = EventSink {
        queue: sender,
        ends: Instant::now() + life,
        stall,
        cut,
    };
    let mut answer = Response::new(Content::Events(events));
    *answer.headers_mut() = HeaderMap::from_iter([
        (CONTENT_TYPE, HeaderValue::from_static("text/event-stream")),
        (CACHE_CONTROL, HeaderValue::from_static("no-store")),
        (CONNECTION, HeaderValue::from_static("close")),
    ]);
    (sink, answer)
}

/// An event as it is sent. `name` must be a word.
pub(super) fn event(name: &str, data: &impl Serialize) -> Bytes {
    // All keys in these documents are strings, so this cannot fail. JSON has no line breaks.
    let data = serde_json::to_string(data).unwrap_or_default();
    format!("event: {name}\ndata: {data}\n\n").into()
}

impl EventSink {
    /// Queues an event, and waits while the queue is full. Returns false if the stream has ended:
    /// its reader has closed the connection or is too slow, or its time is over.
    pub(super) async fn send(&self, event: Bytes) -> bool {
        if Instant::now() >= self.ends {
            return false;
        }
        match timeout(self.stall, self.queue.send(event)).await {
            Ok(sent) => sent.is_ok(),
            Err(_) => {
                tracing::debug!("the reader of a stream of events is too slow");
                self.cut.notify_one();
                false
            }
        }
    }

    /// Waits until the reader has closed the connection, or the time of the stream is over.
    pub(super) async fn ended(&self) {
        tokio::select! {
            () = self.queue.closed() => {}
            () = sleep_until(self.ends) => {}
        }
    }
}

impl Events {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let next = match self.queue.poll_recv(cx) {
            Poll::Ready(next) => next,
            Poll::Pending => {
                ready!(self.silence.as_mut().poll(cx));
                Some(Bytes::from_static(COMMENT))
            }
        };
        let due = Instant::now() + limits::ADMIN_STREAM_KEEP_ALIVE;
        self.silence.as_mut().reset(due);
        Poll::Ready(next)
    }
}

impl Body for Content {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.get_mut() {
            Self::Whole(body) => Pin::new(body).poll_frame(cx),
            Self::Events(events) => {
                let next = events.poll_next(cx);
                next.map(|next| next.map(|event| Ok(Frame::data(event))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(body) => body.is_end_stream(),
            Self::Events(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(body) => body.size_hint(),
            Self::Events(_) => SizeHint::default(),
        }
    }
}

impl Content {
    /// What cuts the connection of a stream of events off; none for another answer.
    pub(super) fn cut(&self) -> Option<Arc<Notify>> {
        match self {
            Self::Whole(_) => None,
            Self::Events(events) => Some(events.cut.clone()),
        }
    }
}

/// A stream on a connection.
pub(super) struct OpenStream {
    /// Notified when the reader is too slow.
    pub(super) cut: Arc<Notify>,
    /// Whether the operator still has the role that the request needed.
    pub(super) is_allowed: Box<dyn Fn() -> bool + Send + Sync>,
    /// Its place among the streams of the listener.
    pub(super) _place: OwnedSemaphorePermit,
}

impl OpenStream {
    /// Waits until the connection must end: the reader is too slow, its operator has lost the role,
    /// or the writer did not end the stream in time.
    pub(super) async fn lost(&self) {
        let until = Instant::now() + limits::ADMIN_STREAM_LIFE + 2 * limits::ADMIN_STREAM_STALL;
        while Instant::now() < until && (self.is_allowed)() {
            let next_check = timeout(limits::ADMIN_CHECK_INTERVAL, self.cut.notified());
            if next_check.await.is_ok() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use hyper::server::conn::http1;
    use hyper::service::service_fn;
    use hyper_util::rt::TokioIo;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::sync::Semaphore;

    use super::*;

    const STALL: Duration = Duration::from_millis(100);
    const LONG: Duration = Duration::from_secs(60);
    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n";

    /// A connection that answers with a stream, the other end of the stream, and what cuts the
    /// connection off.
    async fn connect(life: Duration) -> (DuplexStream, EventSink, Arc<Notify>) {
        let (mut client, server) = duplex(1 << 10);
        let (sink, answer) = stream_within(life, STALL);
        let cut = answer.body().cut().unwrap();
        let answer = std::sync::Mutex::new(Some(answer));
        let connection = cut.clone();
        tokio::spawn(async move {
            let service = service_fn(|_| {
                let answer = answer.lock().unwrap().take().expect("one request");
                async move { Ok::<_, Infallible>(answer) }
            });
            let serving = http1::Builder::new().serve_connection(TokioIo::new(server), service);
            tokio::select! {
                _ = serving => {}
                () = connection.notified() => {}
            }
        });
        client.write_all(REQUEST).await.unwrap();
        (client, sink, cut)
    }

    #[tokio::test]
    async fn events_arrive_one_by_one_and_end_with_their_writer() {
        let (mut client, sink, _) = connect(LONG).await;
        let mut seen = String::new();
        for number in 0..3 {
            assert!(sink.send(event("count", &number)).await);
            let expected = format!("event: count\ndata: {number}\n\n");
            while !seen.contains(&expected) {
                let mut bytes = [0; 512];
                let count = client.read(&mut bytes).await.unwrap();
                assert!(count > 0, "{seen}");
                seen.push_str(str::from_utf8(&bytes[..count]).unwrap());
            }
        }
        drop(sink);
        client.read_to_string(&mut seen).await.unwrap();
        assert!(seen.contains("content-type: text/event-stream"), "{seen}");
        assert!(seen.contains("connection: close"), "{seen}");
        assert!(seen.ends_with("0\r\n\r\n"), "{seen}");
    }

    #[tokio::test]
    async fn a_reader_that_reads_nothing_is_cut_off() {
        let (mut client, sink, _) = connect(LONG).await;
        let large = event("large", &"x".repeat(100_000));
        let mut sent = 0;
        while sink.send(large.clone()).await {
            sent += 1;
            assert!(sent < 1_000, "a slow reader is never dropped");
        }
        // The rest of what the server had written arrives, and not the end of the answer.
        let mut rest = Vec::new();
        client.read_to_end(&mut rest).await.unwrap();
        assert!(!rest.ends_with(b"0\r\n\r\n"));
        assert!(rest.len() < 200_000, "{}", rest.len());
    }

    #[tokio::test]
    async fn a_stream_ends_with_its_reader_and_with_its_time() {
        let (client, sink, _) = connect(LONG).await;
        assert!(sink.send(event("one", &1)).await);
        drop(client);
        tokio::time::timeout(LONG, sink.ended()).await.unwrap();
        while sink.send(event("two", &2)).await {}

        let (_client, sink, _) = connect(STALL).await;
        assert!(sink.send(event("one", &1)).await);
        sink.ended().await;
        assert!(!sink.send(event("two", &2)).await);
    }

    #[tokio::test]
    async fn a_connection_ends_when_its_operator_loses_the_role() {
        let open = |is_allowed| OpenStream {
            cut: Arc::default(),
            is_allowed: Box::new(move || is_allowed),
            _place: Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap(),
        };
        open(false).lost().await;
        let allowed = open(true);
        assert!(timeout(STALL, allowed.lost()).await.is_err());
        allowed.cut.notify_one();
        allowed.lost().await;
    }
}
