//! Sockets under conversations: a task for each connection, some threads for all tasks.
//!
//! What enters: connected sockets, one run. What leaves: a tally. A task writes all that its conversation has to say in one
//! piece, and waits; while it waits it costs nothing.

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

use super::LoadError;
use super::conversation::Conversation;
use super::protocol::{Broken, Heard, Protocol};
use super::run::Run;
use super::stream::{Encryption, Stream};
use super::tally::Tally;
use super::work::{Reply, Request, Verb};
use crate::limits;

/// A socket on which the server is ready.
pub(super) struct Line<P> {
    stream: Stream,
    protocol: P,
    /// What was read and is no whole packet yet.
    input: Vec<u8>,
}

impl<P: Protocol> Line<P> {
    /// Connects, and waits until the server is ready.
    pub(super) async fn open(
        address: std::net::SocketAddr,
        encryption: Option<&Encryption>,
        protocol: P,
        patience: Duration,
    ) -> Result<Self, LoadError> {
        let connecting = timeout(patience, Stream::open(address, encryption)).await;
        let stream = connecting
            .map_err(|_| LoadError::Silent(address, patience))?
            .map_err(|error| LoadError::Connect(address, error))?;
        let mut line = Self {
            stream,
            protocol,
            input: Vec::new(),
        };
        let mut hello = Vec::new();
        line.protocol.hello(&mut hello);
        let ready = line.exchange(&hello, |heard| matches!(heard, Heard::Ready));
        timeout(patience, ready)
            .await
            .map_err(|_| LoadError::Silent(address, patience))?
            .map_err(|broken| LoadError::Broken(address, broken))?;
        Ok(line)
    }

    /// Asks to be told of the changes of a key.
    pub(super) async fn watch(
        &mut self,
        address: std::net::SocketAddr,
        key: u64,
        patience: Duration,
    ) -> Result<(), LoadError> {
        let (mut request, mut answer) = (Vec::new(), None);
        let watch = Request {
            verb: Verb::Watch,
            key,
        };
        self.protocol.ask(0, 0, watch, &mut request);
        let (mut acknowledged, mut refused) = (!P::ACKNOWLEDGES, None);
        let asking = self.exchange(&request, |heard| {
            match heard {
                Heard::Answer { reply, .. } => {
                    answer = Some(match reply {
                        Reply::Done => Ok(()),
                        Reply::Refused(text) => Err(String::from_utf8_lossy(text).into_owned()),
                        _ => Err("an answer that means nothing".to_owned()),
                    });
                }
                Heard::Acknowledged { refused: why, .. } => {
                    acknowledged = true;
                    refused = why;
                }
                _ => {}
            }
            acknowledged && (answer.is_some() || refused.is_some())
        });
        timeout(patience, asking)
            .await
            .map_err(|_| LoadError::Silent(address, patience))?
            .map_err(|broken| LoadError::Broken(address, broken))?;
        match answer.unwrap_or(Err(refused.unwrap_or_default())) {
            Ok(()) => Ok(()),
            Err(why) => Err(LoadError::Watch(address, why)),
        }
    }

    /// Writes, then reads until something was heard.
    async fn exchange(
        &mut self,
        bytes: &[u8],
        mut enough: impl FnMut(Heard<'_>) -> bool,
    ) -> Result<(), Broken> {
        self.say(bytes).await?;
        let (mut done, mut out) = (false, Vec::new());
        while !done {
            if self.stream.read_buf(&mut self.input).await.map_err(lost)? == 0 {
                return Err(Broken::Ended(HUNG_UP.to_owned()));
            }
            let read = self
                .protocol
                .read(&self.input, &mut out, |heard| done |= enough(heard))?;
            self.input.drain(..read);
        }
        self.say(&out).await
    }

    async fn say(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        self.stream.write_all(bytes).await.map_err(lost)?;
        self.stream.flush().await.map_err(lost)
    }

    /// How many requests the server takes at once.
    pub(super) fn in_flight_max(&self) -> u16 {
        self.protocol.in_flight_max()
    }

    /// The parts, for a conversation.
    pub(super) fn split(self) -> (Stream, P, Vec<u8>) {
        (self.stream, self.protocol, self.input)
    }
}

/// A silent connection says that it lives, thrice as often as it has to.
const PING_EVERY: Duration = Duration::from_secs(limits::LOAD_KEEP_ALIVE_S as u64 / 3);

const HUNG_UP: &str = "the server hung up";

fn lost(error: std::io::Error) -> Broken {
    // Without the number that the system gives it: one kind of error is one line.
    Broken::Ended(match error.kind() {
        std::io::ErrorKind::ConnectionReset | std::io::ErrorKind::BrokenPipe => HUNG_UP.to_owned(),
        kind => kind.to_string(),
    })
}

/// Lets a conversation go on until it is over or the connection is lost.
pub(super) async fn converse<P: Protocol>(
    stream: Stream,
    mut conversation: Conversation<P>,
    mut input: Vec<u8>,
    run: Arc<Run>,
    wake: Option<Arc<Notify>>,
) {
    let ended = match stream {
        // Its halves need no lock.
        Stream::Plain(mut stream) => {
            let halves = stream.split();
            go_on(halves, &mut conversation, &mut input, wake).await
        }
        Stream::Encrypted(stream) => {
            let halves = tokio::io::split(stream);
            go_on(halves, &mut conversation, &mut input, wake).await
        }
    };
    let lost = ended.err().map(|broken| broken.to_string());
    conversation.end(lost.as_deref(), Instant::now());
    run.has_asked();
}

async fn go_on<P: Protocol>(
    (mut reader, mut writer): (impl AsyncRead + Unpin, impl AsyncWrite + Unpin),
    conversation: &mut Conversation<P>,
    input: &mut Vec<u8>,
    wake: Option<Arc<Notify>>,
) -> Result<(), Broken> {
    let mut tick = tokio::time::interval(limits::LOAD_TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut written, mut spoke) = (0, Instant::now());
    loop {
        let now = Instant::now();
        conversation.ask(now);
        if !conversation.out.is_empty() {
            spoke = now;
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
                    return Err(Broken::Ended(HUNG_UP.to_owned()));
                }
                let done = conversation.read(input, Instant::now())?;
                input.drain(..done);
            }
            all = poll_fn(|cx| poll_write(&mut writer, &mut conversation.out, &mut written, cx)), if !conversation.out.is_empty() => all?,
            () = woken(wake.as_deref()) => {}
            _ = tick.tick() => {
                conversation.look(now);
                if now.duration_since(spoke) >= PING_EVERY {
                    conversation.ping();
                }
            }
        }
    }
}

/// Waits until a request is due. Without anybody who says so: for ever.
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

/// Writes until all is written.
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
                // What is written makes room at once, so that a slow socket cannot make this grow.
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

/// Counts the notifications of one key until all have come that are owed.
pub(super) async fn hear<P: Protocol>(
    mut line: Line<P>,
    key: u64,
    run: Arc<Run>,
    tally: Rc<RefCell<Tally>>,
) {
    let mut heard = 0;
    if let Err(broken) = listen(&mut line, key, &run, &tally, &mut heard).await {
        run.fail(&mut tally.borrow_mut(), &format!("watcher: {broken}"), None);
    }
    let missing = run.told(key).saturating_sub(heard);
    let mut tally = tally.borrow_mut();
    tally.notifications += heard;
    tally
        .errors
        .note("a notification that did not come", missing);
}

async fn listen<P: Protocol>(
    line: &mut Line<P>,
    key: u64,
    run: &Run,
    tally: &RefCell<Tally>,
    heard: &mut u64,
) -> Result<(), Broken> {
    let mut tick = tokio::time::interval(limits::LOAD_TICK);
    let (mut out, mut spoke, mut over) = (Vec::new(), Instant::now(), None);
    loop {
        line.input.reserve(limits::LOAD_READ_BYTES);
        tokio::select! {
            biased;
            read = line.stream.read_buf(&mut line.input) => {
                if read.map_err(lost)? == 0 {
                    return Err(Broken::Ended(HUNG_UP.to_owned()));
                }
                let done = line.protocol.read(&line.input, &mut out, |said| match said {
                    Heard::Told(Some(value)) if value == run.catalogue.value(key) => *heard += 1,
                    _ => run.fail(&mut tally.borrow_mut(), "a wrong notification", None),
                })?;
                line.input.drain(..done);
            }
            _ = tick.tick() => {
                let now = Instant::now();
                if now.duration_since(spoke) >= PING_EVERY {
                    line.protocol.ping(&mut out);
                }
                if run.is_over() {
                    let since = *over.get_or_insert(now);
                    if *heard >= run.told(key) || now.duration_since(since) >= run.timeout {
                        line.protocol.bye(&mut out);
                        return line.say(&out).await;
                    }
                }
            }
        }
        if !out.is_empty() {
            // The server takes acknowledgements whatever else it does.
            line.say(&out).await?;
            out.clear();
            spoke = Instant::now();
        }
    }
}
