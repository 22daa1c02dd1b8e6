//! Connects conversations to sockets: each connection has a task, and a few threads run all tasks.
//!
//! A task writes all bytes of its conversation at once, and then waits.

use std::cell::RefCell;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::Notify;
use tokio::time::{MissedTickBehavior, timeout};

use super::conversation::Conversation;
use super::protocol::{Broken, Protocol, Received};
use super::run::Run;
use super::stream::Stream;
use super::tally::Tally;
use super::work::{Reply, Request, Verb};
use super::{LoadError, Plan};
use crate::limits;

/// A connection whose server is ready for requests.
pub(super) struct Connection<P> {
    stream: Stream,
    protocol: P,
    /// The bytes that were read and are no complete packet yet.
    input: Vec<u8>,
}

impl<P: Protocol> Connection<P> {
    /// Connects, and waits until the server is ready.
    pub(super) async fn open(plan: &Plan, protocol: P) -> Result<Self, LoadError> {
        let (address, patience) = (plan.address, plan.timeout);
        let opening = Stream::open(address, plan.encryption.as_ref());
        let connecting = timeout(patience, opening).await;
        let stream = connecting
            .map_err(|_| LoadError::Silent(address, patience))?
            .map_err(|error| LoadError::Connect(address, error))?;
        let mut connection = Self {
            stream,
            protocol,
            input: Vec::new(),
        };
        let mut hello = Vec::new();
        connection.protocol.hello(&mut hello);
        let ready = connection.exchange(&hello, |message| matches!(message, Received::Ready));
        timeout(patience, ready)
            .await
            .map_err(|_| LoadError::Silent(address, patience))?
            .map_err(|broken| LoadError::Broken(address, broken))?;
        Ok(connection)
    }

    /// Watches a key, and waits for the answer.
    pub(super) async fn watch(&mut self, plan: &Plan, key: u64) -> Result<(), LoadError> {
        let (address, patience) = (plan.address, plan.timeout);
        let (mut request, mut answer) = (Vec::new(), None);
        let watch = Request {
            verb: Verb::Watch,
            key,
        };
        self.protocol.ask(0, 0, watch, &mut request);
        let (mut acknowledged, mut refused) = (!P::ACKNOWLEDGES, None);
        let watching = self.exchange(&request, |message| {
            match message {
                Received::Answer { reply, .. } => {
                    answer = Some(match reply {
                        Reply::Done => Ok(()),
                        Reply::Refused(text) => Err(String::from_utf8_lossy(text).into_owned()),
                        _ => Err("an invalid answer".to_owned()),
                    });
                }
                Received::Acknowledged { refused: why, .. } => {
                    acknowledged = true;
                    refused = why;
                }
                _ => {}
            }
            acknowledged && (answer.is_some() || refused.is_some())
        });
        timeout(patience, watching)
            .await
            .map_err(|_| LoadError::Silent(address, patience))?
            .map_err(|broken| LoadError::Broken(address, broken))?;
        let answer = answer.unwrap_or(Err(refused.unwrap_or_default()));
        answer.map_err(|why| LoadError::Watch(address, why))
    }

    /// Writes `bytes`, then reads until `is_last` accepts a message.
    async fn exchange(
        &mut self,
        bytes: &[u8],
        mut is_last: impl FnMut(Received<'_>) -> bool,
    ) -> Result<(), Broken> {
        self.write_bytes(bytes).await?;
        let (mut done, mut out) = (false, Vec::new());
        while !done {
            if self.stream.read_buf(&mut self.input).await.map_err(lost)? == 0 {
                return Err(Broken::Ended(CLOSED.to_owned()));
            }
            let read = self
                .protocol
                .read(&self.input, &mut out, |message| done |= is_last(message))?;
            self.input.drain(..read);
        }
        self.write_bytes(&out).await
    }

    async fn write_bytes(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        self.stream.write_all(bytes).await.map_err(lost)?;
        self.stream.flush().await.map_err(lost)
    }

    pub(super) fn in_flight_max(&self) -> u16 {
        self.protocol.in_flight_max()
    }

    /// The parts of the connection, for a conversation.
    pub(super) fn split(self) -> (Stream, P, Vec<u8>) {
        (self.stream, self.protocol, self.input)
    }
}

/// A silent connection sends a ping three times as often as its Keep Alive requires.
const PING_EVERY: Duration = Duration::from_secs(limits::LOAD_KEEP_ALIVE_S as u64 / 3);

const CLOSED: &str = "the server closed the connection";

fn lost(error: std::io::Error) -> Broken {
    // Without the error number of the system, so that equal errors are counted as one kind.
    Broken::Ended(match error.kind() {
        std::io::ErrorKind::ConnectionReset | std::io::ErrorKind::BrokenPipe => CLOSED.to_owned(),
        kind => kind.to_string(),
    })
}

/// Runs a conversation until it is over or the connection is lost.
pub(super) async fn converse<P: Protocol>(
    stream: Stream,
    mut conversation: Conversation<P>,
    mut input: Vec<u8>,
    run: Arc<Run>,
    wake: Option<Arc<Notify>>,
) {
    let ended = match stream {
        // The halves of a TCP stream need no lock, unlike those of a TLS stream.
        Stream::Plain(mut stream) => {
            let halves = stream.split();
            exchange_messages(halves, &mut conversation, &mut input, wake).await
        }
        Stream::Encrypted(stream) => {
            let halves = tokio::io::split(stream);
            exchange_messages(halves, &mut conversation, &mut input, wake).await
        }
    };
    let lost = ended.err().map(|broken| broken.to_string());
    conversation.end(lost.as_deref(), Instant::now());
    run.connection_ended();
}

async fn exchange_messages<P: Protocol>(
    (mut reader, mut writer): (impl AsyncRead + Unpin, impl AsyncWrite + Unpin),
    conversation: &mut Conversation<P>,
    input: &mut Vec<u8>,
    wake: Option<Arc<Notify>>,
) -> Result<(), Broken> {
    let mut tick = tokio::time::interval(limits::LOAD_TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut written, mut last_write) = (0, Instant::now());
    loop {
        let now = Instant::now();
        conversation.send(now);
        if !conversation.out.is_empty() {
            last_write = now;
        }
        write(&mut writer, &mut conversation.out, &mut written).await?;
        if conversation.is_over(now) {
            conversation.bye();
            return write(&mut writer, &mut conversation.out, &mut written).await;
        }
        input.reserve(limits::LOAD_READ_BYTES);
        tokio::select! {
            biased;
            read = reader.read_buf(input) => {
                if read.map_err(lost)? == 0 {
                    return Err(Broken::Ended(CLOSED.to_owned()));
                }
                let done = conversation.read(input, Instant::now())?;
                input.drain(..done);
            }
            all = poll_fn(|cx| poll_write(&mut writer, &mut conversation.out, &mut written, cx)), if !conversation.out.is_empty() => all?,
            () = woken(wake.as_deref()) => {}
            _ = tick.tick() => {
                conversation.check_timeouts(now);
                if now.duration_since(last_write) >= PING_EVERY {
                    conversation.ping();
                }
            }
        }
    }
}

/// Waits until a request is due; forever in a closed loop.
async fn woken(wake: Option<&Notify>) {
    match wake {
        Some(wake) => wake.notified().await,
        None => std::future::pending().await,
    }
}

/// Writes as much as the socket takes now.
async fn write(
    writer: &mut (impl AsyncWrite + Unpin),
    out: &mut Vec<u8>,
    written: &mut usize,
) -> Result<(), Broken> {
    poll_fn(|cx| match poll_write(writer, out, written, cx) {
        Poll::Pending => Poll::Ready(Ok(())),
        done => done,
    })
    .await
}

/// Completes when all bytes are written and flushed.
fn poll_write(
    writer: &mut (impl AsyncWrite + Unpin),
    out: &mut Vec<u8>,
    written: &mut usize,
    cx: &mut Context<'_>,
) -> Poll<Result<(), Broken>> {
    while *written < out.len() {
        match Pin::new(&mut *writer).poll_write(cx, &out[*written..]) {
            Poll::Ready(Ok(count)) => *written += count,
            Poll::Ready(Err(error)) => return Poll::Ready(Err(lost(error))),
            Poll::Pending => {
                // Written bytes are removed at once. Otherwise the buffer of a slow socket would
                // grow.
                out.drain(..*written);
                *written = 0;
                return Poll::Pending;
            }
        }
    }
    ready!(Pin::new(writer).poll_flush(cx)).map_err(lost)?;
    out.clear();
    *written = 0;
    Poll::Ready(Ok(()))
}

/// Counts the notifications of one key until all expected ones have arrived.
pub(super) async fn count_notifications<P: Protocol>(
    mut connection: Connection<P>,
    key: u64,
    run: Arc<Run>,
    tally: Rc<RefCell<Tally>>,
) {
    let mut received = 0;
    if let Err(broken) = read_notifications(&mut connection, key, &run, &tally, &mut received).await
    {
        run.fail(&mut tally.borrow_mut(), &format!("watcher: {broken}"), None);
    }
    let missing = run.expected_notifications(key).saturating_sub(received);
    let mut tally = tally.borrow_mut();
    tally.notifications += received;
    tally.errors.note("a missing notification", missing);
}

async fn read_notifications<P: Protocol>(
    connection: &mut Connection<P>,
    key: u64,
    run: &Run,
    tally: &RefCell<Tally>,
    received: &mut u64,
) -> Result<(), Broken> {
    let mut tick = tokio::time::interval(limits::LOAD_TICK);
    let (mut out, mut last_write, mut over) = (Vec::new(), Instant::now(), None);
    loop {
        connection.input.reserve(limits::LOAD_READ_BYTES);
        tokio::select! {
            biased;
            read = connection.stream.read_buf(&mut connection.input) => {
                if read.map_err(lost)? == 0 {
                    return Err(Broken::Ended(CLOSED.to_owned()));
                }
                let value = run.catalogue.value(key);
                let done = connection.protocol.read(&connection.input, &mut out, |it| match it {
                    Received::Notification(Some(it)) if it == value => *received += 1,
                    _ => run.fail(&mut tally.borrow_mut(), "a wrong notification", None),
                })?;
                connection.input.drain(..done);
            }
            _ = tick.tick() => {
                let now = Instant::now();
                if now.duration_since(last_write) >= PING_EVERY {
                    connection.protocol.ping(&mut out);
                }
                if run.is_over() {
                    let since = *over.get_or_insert(now);
                    let expected = run.expected_notifications(key);
                    if *received >= expected || now.duration_since(since) >= run.timeout {
                        connection.protocol.bye(&mut out);
                        return connection.write_bytes(&out).await;
                    }
                }
            }
        }
        if !out.is_empty() {
            // A plain write cannot block for long, because the server always reads
            // acknowledgements.
            connection.write_bytes(&out).await?;
            out.clear();
            last_write = Instant::now();
        }
    }
}
