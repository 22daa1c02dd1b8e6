//! The handle of the embedder: starts connections, gives the core's lock away, ends everything.

use std::{
    io,
    net::SocketAddr,
    ops::{Deref, DerefMut},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    sync::{Notify, Semaphore},
};

use crate::{Limits, Message, Origin, ReasonCode, Service, Stats, Token, connection, core::Core};

/// How a broker is to run.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The bounds.
    pub limits: Limits,
}

/// An MQTT 5 broker; clones are handles to the same one.
#[derive(Clone)]
pub struct Broker(Arc<Shared>);

struct Shared {
    limits: Limits,
    service: Arc<dyn Service>,
    core: Mutex<Core>,
    /// One permit per socket; all are back once every connection has ended.
    sockets: Arc<Semaphore>,
    turned_away: AtomicU64,
    /// An earlier deadline than the timers sleep for.
    earlier: Notify,
    stopping: AtomicBool,
    stop: Notify,
    /// Connections that the grace of a shutdown did not suffice for.
    abort: Notify,
}

impl Broker {
    /// A broker without connections.
    #[must_use]
    pub fn new(options: Options, service: Arc<dyn Service>) -> Self {
        let limits = options.limits;
        Self(Arc::new(Shared {
            service,
            core: Mutex::new(Core::new(limits.clone())),
            sockets: Arc::new(Semaphore::new(
                limits.connections_max.min(Semaphore::MAX_PERMITS),
            )),
            turned_away: AtomicU64::new(0),
            earlier: Notify::new(),
            stopping: AtomicBool::new(false),
            stop: Notify::new(),
            abort: Notify::new(),
            limits,
        }))
    }

    /// Accepts connections until [`shutdown`](Self::shutdown), each in tasks of its own. May be called for several
    /// listeners. Errors of single connections and a shortage of file descriptors do not end it.
    pub async fn listen(&self, listener: TcpListener) -> io::Result<()> {
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = self.stopped() => return Ok(()),
            };
            match accepted {
                Ok((socket, peer)) => {
                    // Answers are small and waited for. Where it fails the socket is dead, and its reader will see that.
                    _ = socket.set_nodelay(true);
                    let broker = self.clone();
                    tokio::spawn(async move {
                        let (reader, writer) = socket.into_split();
                        broker.serve(reader, writer, peer).await;
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    // Without file descriptors accept fails at once, again and again.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }

    /// Serves one connection over any byte stream, to its end.
    pub async fn serve_connection<S>(&self, stream: S, peer: SocketAddr)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (reader, writer) = tokio::io::split(stream);
        self.serve(reader, writer, peer).await;
    }

    async fn serve<R, W>(&self, reader: R, writer: W, peer: SocketAddr)
    where
        R: AsyncRead + Unpin + Send,
        W: AsyncWrite + Unpin + Send + 'static,
    {
        let Ok(_permit) = self.0.sockets.clone().try_acquire_owned() else {
            self.0.turned_away.fetch_add(1, Ordering::Relaxed);
            return;
        };
        // Made before the look at the flag, so that a shutdown in between is not missed.
        let abort = self.0.abort.notified();
        if self.is_stopping() {
            return;
        }
        tokio::select! {
            () = connection::run(self, reader, writer, peer) => {}
            () = abort => {}
        }
    }

    /// Ends sessions and sends wills when it is time; sleeps until the next one. Runs until
    /// [`shutdown`](Self::shutdown).
    pub async fn run_timers(&self) {
        while !self.is_stopping() {
            let earlier = self.0.earlier.notified();
            let next = self.lock().run_deadlines(Instant::now());
            let next_time = async {
                match next {
                    Some(at) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = next_time => {}
                () = earlier => {}
                () = self.stopped() => return,
            }
        }
    }

    /// One lock, many operations: clients see everything of the closure in this order, and writers are woken once at
    /// its end. The closure may not call the broker itself.
    pub fn batch<R>(&self, f: impl FnOnce(&mut Batch<'_>) -> R) -> R {
        let mut core = self.lock();
        f(&mut Batch {
            core: &mut core,
            now: Instant::now(),
        })
    }

    /// Gauges and counters.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats {
            turned_away: self.0.turned_away.load(Ordering::Relaxed),
            ..self.lock().stats()
        }
    }

    /// Sends DISCONNECT 0x8B to everyone, gives it at most `grace` to arrive, then closes. Listeners and timers end, and
    /// nobody can connect any more.
    ///
    /// Wills are not published: section 3.1.2.5 lets a server that shuts down put them off until it starts again, and
    /// nobody is left to hear them.
    pub async fn shutdown(&self, grace: Duration) {
        self.0.stopping.store(true, Ordering::Release);
        self.lock().shut_down();
        self.0.stop.notify_waiters();
        let sockets = u32::try_from(self.0.limits.connections_max).unwrap_or(u32::MAX);
        if tokio::time::timeout(grace, self.0.sockets.acquire_many(sockets))
            .await
            .is_err()
        {
            self.0.abort.notify_waiters();
            // These end at once, without waiting for their peers.
            _ = self.0.sockets.acquire_many(sockets).await;
        }
    }

    fn is_stopping(&self) -> bool {
        self.0.stopping.load(Ordering::Acquire)
    }

    async fn stopped(&self) {
        let stop = self.0.stop.notified();
        if !self.is_stopping() {
            stop.await;
        }
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.0.limits
    }

    pub(crate) fn service(&self) -> &Arc<dyn Service> {
        &self.0.service
    }

    pub(crate) fn lock(&self) -> Guard<'_> {
        Guard {
            shared: &self.0,
            core: Some(self.0.lock()),
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Core> {
        // A panic under the lock is a bug; going on with the other clients is better than failing them all.
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The core's lock. Given back it wakes the tasks that have something to do.
pub(crate) struct Guard<'a> {
    shared: &'a Shared,
    core: Option<MutexGuard<'a, Core>>,
}

impl Guard<'_> {
    /// Gives the lock back, calls the function, and takes the lock again.
    pub(crate) fn unlocked(&mut self, f: impl FnOnce()) {
        self.give_back();
        f();
        self.core = Some(self.shared.lock());
    }

    fn give_back(&mut self) {
        let Some(mut core) = self.core.take() else {
            return;
        };
        let wakes = core.take_wakes();
        drop(core);
        for writer in wakes.writers {
            writer.wake_writer();
        }
        if wakes.timers {
            self.shared.earlier.notify_waiters();
        }
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.give_back();
    }
}

impl Deref for Guard<'_> {
    type Target = Core;

    fn deref(&self) -> &Core {
        // Only `unlocked` takes it out, and puts it back before anybody can look.
        self.core.as_deref().expect("the lock is held")
    }
}

impl DerefMut for Guard<'_> {
    fn deref_mut(&mut self) -> &mut Core {
        self.core.as_deref_mut().expect("the lock is held")
    }
}

/// Operations under one lock of the broker.
pub struct Batch<'a> {
    core: &'a mut Core,
    now: Instant,
}

impl Batch<'_> {
    /// Publishes as the broker itself (No Local does not apply). Returns the number of sessions with a matching
    /// subscription; 0 where a retained message had no room.
    pub fn publish(&mut self, message: Message) -> usize {
        self.core
            .publish(&message, true, None, self.now)
            .unwrap_or_else(|_| {
                self.core.count_dropped();
                0
            })
    }

    /// Sends to this connection of this client only, subscribed or not, exactly once. A matching subscription lends its
    /// QoS (never above the message's) and Subscription Identifiers. What is unsent when the connection ends is dropped,
    /// what is unacknowledged is re-sent to a resumed session. False where the connection has ended.
    pub fn deliver(&mut self, to: &Origin, message: Message) -> bool {
        self.core.deliver(to, message, self.now)
    }

    /// Sends the PUBACK or PUBREC of a request. It leaves after everything published before, but for messages that wait
    /// for the client's own acknowledgements: these may not delay it (section 3.3.4). Acknowledgements leave in the order
    /// of the requests. A used token does nothing.
    pub fn settle(&mut self, token: Token, reason: ReasonCode, text: Option<&str>) {
        self.core.settle(token, reason, text);
    }

    /// Disconnects this connection of this client with a DISCONNECT; nothing where it has ended.
    pub fn disconnect(&mut self, who: &Origin, reason: ReasonCode, text: Option<&str>) {
        self.core.disconnect(who, reason, text);
    }
}
