//! The embedder's handle to the broker. It starts connections, guards the core with one lock, and
//! shuts everything down.

mod batch;
mod guard;
mod options;

use std::{
    future::poll_fn,
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    task::Poll,
    time::{Duration, Instant},
};

pub use batch::Batch;
pub(crate) use guard::Guard;
pub use options::Options;
use statehouse_protocol::{LogPosition, SessionId};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::{Notify, Semaphore},
};

use crate::{
    Access, Attempt, ClientStatus, Door, ImageCursor, Lease, Limits, Origin, Persistence,
    ReasonCode, Recovery, Refusal, RefusalCount, Refused, Service, SessionSummary, Stats, Verdict,
    clock::Clock,
    connection,
    core::Core,
    durability_gate::DurabilityGate,
    incomplete::IncompletePackets,
    ledger,
    limits::{LEASE_WAIT_MAX, PAUSE_BETWEEN_HOLDS, SESSIONS_FLOOR, WALL_CLOCK_LOOK},
    output::{Direct, OutputTotal},
    persist::{Brake, ChangeLog},
    rate_limit::SharedRateLimit,
    refusal::Refusals,
    shared_writer::SharedWriter,
    write_batch::WriteBatching,
};

/// An MQTT 5 broker; clones are handles to the same one.
#[derive(Clone)]
pub struct Broker(Arc<Shared>);

/// Permits for sockets, far more than there can be sockets. The number taken is compared with a
/// limit that may change at run time.
const SOCKETS: usize = if Semaphore::MAX_PERMITS < u32::MAX as usize {
    Semaphore::MAX_PERMITS
} else {
    u32::MAX as usize
};

struct Shared {
    /// The limits in force. The core has a copy of those that it enforces.
    limits: RwLock<Arc<Limits>>,
    /// A copy of the limit, since every connection reads it often.
    publishes_per_second_max: AtomicU32,
    publishes: SharedRateLimit,
    service: Arc<dyn Service>,
    access: Arc<dyn Access>,
    refusals: Arc<Refusals>,
    state_lost: fn() -> !,
    core: Mutex<Core>,
    persistence: Option<Arc<dyn Persistence>>,
    lease: Option<Arc<dyn Lease>>,
    write_batching: WriteBatching,
    durability_gate: Arc<DurabilityGate>,
    /// One permit per socket, of [`SOCKETS`]. All permits are available once every connection has
    /// ended.
    sockets: Arc<Semaphore>,
    /// One permit per CONNECT that the access control has not decided yet.
    admissions: Semaphore,
    /// One permit: of the connections whose last turn used up its work limit, one at a time has its
    /// next turn. So a connection with little to do waits for at most one such turn, however many
    /// there are.
    cut_turns: Semaphore,
    /// The bytes of incomplete CONNECTs.
    connects: IncompletePackets,
    /// The bytes of other incomplete packets.
    packets: IncompletePackets,
    outputs: Arc<OutputTotal>,
    turned_away: AtomicU64,
    /// Wakes the timers for a deadline earlier than the one they sleep for.
    earlier: Notify,
    /// Set before a shutdown: nothing more is read from clients.
    draining: AtomicBool,
    stopping: AtomicBool,
    stop: Notify,
    /// Aborts connections that have not ended within the grace period of a shutdown.
    abort: Notify,
    /// The time of a simulation, which replaces the system's time.
    #[cfg(any(test, feature = "simulation"))]
    simulated: std::sync::OnceLock<Mutex<Instant>>,
}

impl Broker {
    /// A broker without connections and sessions.
    #[must_use]
    pub fn new(options: Options, service: Arc<dyn Service>) -> Self {
        Self::restore(options, service, Recovery::default())
    }

    /// A broker without connections, with the sessions and retained messages that recovery found.
    ///
    /// A session that was connected is treated as if its connection ended now; its will waits some
    /// seconds for the client to reconnect. Sessions and messages beyond the limits are dropped and
    /// logged. Expired sessions end as soon as the timers run.
    #[must_use]
    pub fn restore(options: Options, service: Arc<dyn Service>, recovery: Recovery) -> Self {
        Self::restore_at(options, service, recovery, Clock::now())
    }

    pub(crate) fn restore_at(
        options: Options,
        service: Arc<dyn Service>,
        recovery: Recovery,
        clock: Clock,
    ) -> Self {
        let limits = Arc::new(options.limits);
        let durability_gate = Arc::new(DurabilityGate::default());
        let persistence = options.persistence;
        let change_log = ChangeLog::new(persistence.clone(), durability_gate.clone(), clock);
        let access = options.access;
        let refusals = Arc::new(Refusals::new(access.clone()));
        let mut core = Core::new(
            limits.clone(),
            access.clone(),
            refusals.clone(),
            options.run,
            change_log,
        );
        core.restore(recovery);
        Self(Arc::new(Shared {
            service,
            access,
            refusals,
            state_lost: options.state_lost,
            core: Mutex::new(core),
            persistence,
            lease: options.lease,
            write_batching: WriteBatching::default(),
            durability_gate,
            sockets: Arc::new(Semaphore::new(SOCKETS)),
            admissions: Semaphore::new(limits.admissions_max.min(Semaphore::MAX_PERMITS)),
            cut_turns: Semaphore::new(1),
            connects: IncompletePackets::default(),
            packets: IncompletePackets::default(),
            outputs: Arc::new(OutputTotal::new(limits.output_bytes_total_max)),
            turned_away: AtomicU64::new(0),
            earlier: Notify::new(),
            draining: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            stop: Notify::new(),
            abort: Notify::new(),
            #[cfg(any(test, feature = "simulation"))]
            simulated: std::sync::OnceLock::new(),
            publishes_per_second_max: AtomicU32::new(limits.publishes_per_second_max),
            publishes: SharedRateLimit::per_second(limits.publishes_per_second_total_max),
            limits: RwLock::new(limits),
        }))
    }

    /// Accepts connections until [`shutdown`](Self::shutdown) and serves each in its own tasks. May
    /// be called for several listeners. Errors of single connections and a lack of file descriptors
    /// do not end it.
    pub async fn listen(&self, listener: TcpListener) -> io::Result<()> {
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = self.stopped() => return Ok(()),
            };
            match accepted {
                Ok((socket, peer)) => {
                    let broker = self.clone();
                    tokio::spawn(async move { broker.serve_socket(socket, peer).await });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    // Without file descriptors accept fails immediately, so wait before the next
                    // attempt.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }

    /// Serves one accepted socket until it ends, as [`listen`](Self::listen) does. `peer` is the
    /// address of the client. It differs from that of the socket if another host passes the stream
    /// on.
    pub async fn serve_socket(&self, socket: TcpStream, peer: SocketAddr) {
        // Answers are small and clients wait for them. If this fails, the socket is dead and its
        // reader will see the error.
        _ = socket.set_nodelay(true);
        let (reader, writer) = socket.into_split();
        let writer = SharedWriter::new(writer);
        let direct = writer.direct();
        let door = Door::open(peer);
        self.serve(reader, writer, Some(direct), door).await;
    }

    /// Serves one connection over any byte stream until it ends.
    pub async fn serve_connection<S>(&self, stream: S, door: Door)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (reader, writer) = tokio::io::split(stream);
        self.serve(reader, writer, None, door).await;
    }

    async fn serve<R, W>(&self, reader: R, writer: W, direct: Option<Arc<dyn Direct>>, door: Door)
    where
        R: AsyncRead + Unpin + Send,
        W: AsyncWrite + Unpin + Send + 'static,
    {
        let permit = self.0.sockets.clone().try_acquire_owned();
        let taken = SOCKETS - self.0.sockets.available_permits();
        let Some(_permit) = permit
            .ok()
            .filter(|_| taken <= self.limits().connections_max)
        else {
            self.0.turned_away.fetch_add(1, Ordering::Relaxed);
            self.0.refusals.report(&Refusal {
                what: Refused::Connect,
                reason: ReasonCode::SERVER_BUSY,
                text: Some("the broker has reached its limit of connections"),
                peer: Some(door.peer),
                client: "",
                user: None,
            });
            return;
        };
        // Created before the flag is read, so that a shutdown in between is not missed.
        let abort = self.0.abort.notified();
        if self.is_stopping() {
            return;
        }
        tokio::select! {
            () = connection::run(self, reader, writer, direct, door) => {}
            () = abort => {}
        }
    }

    /// Ends sessions and sends wills when they are due, and reads the wall clock periodically. Runs
    /// until [`shutdown`](Self::shutdown).
    pub async fn run_timers(&self) {
        while !self.is_stopping() {
            let earlier = self.0.earlier.notified();
            let now = Instant::now();
            let is_due = self.lock().next_deadline().is_some_and(|at| at <= now);
            // Looking at the time alone must not renew a lease, because a renewal is a write.
            if is_due && !self.may_decide().await {
                tokio::time::sleep(WALL_CLOCK_LOOK).await;
                continue;
            }
            let next = {
                let mut core = self.lock();
                core.set_clock(Clock::now());
                match is_due {
                    true => core.run_deadlines(now),
                    false => core.next_deadline(),
                }
            };
            let look = now + WALL_CLOCK_LOOK;
            let next = next.map_or(look, |at| at.min(look));
            if next <= now {
                // The work limit of one turn is used up: let connections run.
                tokio::task::yield_now().await;
                continue;
            }
            tokio::select! {
                () = tokio::time::sleep_until(next.into()) => {}
                () = earlier => {}
                () = self.stopped() => return,
            }
        }
    }

    /// Runs several operations under one lock.
    ///
    /// Clients see the effects in the order of the operations. The output is written once at the
    /// end, or together with that of other connections. The changes are appended in one batch, or
    /// in several that are divided between operations.
    ///
    /// The closure must not call the broker itself.
    pub fn batch<R>(&self, f: impl FnOnce(&mut Batch<'_>) -> R) -> R {
        let mut core = self.lock();
        f(&mut Batch {
            core: &mut core,
            now: self.now(),
        })
    }

    /// The present time: the system's, unless a simulation has set another.
    pub(crate) fn now(&self) -> Instant {
        #[cfg(any(test, feature = "simulation"))]
        if let Some(simulated) = self.0.simulated.get() {
            return *simulated.lock().unwrap_or_else(PoisonError::into_inner);
        }
        Instant::now()
    }

    /// Replaces the system's time.
    #[cfg(any(test, feature = "simulation"))]
    pub(crate) fn set_simulated(&self, now: Instant) {
        let simulated = self.0.simulated.get_or_init(|| Mutex::new(now));
        // An assignment cannot panic half way.
        *simulated.lock().unwrap_or_else(PoisonError::into_inner) = now;
    }

    /// Reports that everything up to this log position is durable. Output that waited for it is
    /// written. May be called from any thread; takes no lock that is held for long.
    pub fn released(&self, position: LogPosition) {
        self.0.durability_gate.release_to(position);
        self.0.write_batching.write_gathered();
    }

    /// Applies changed rules of the [access control](Access), or revoked credentials, to connected
    /// clients.
    ///
    /// Connections that are no longer allowed end with DISCONNECT 0x87. Other connections lose the
    /// subscriptions that are no longer allowed. Packets after the change follow the new rules
    /// anyway. Sessions without a connection are checked when they are resumed.
    ///
    /// Other clients are served during this call. Call it from a thread that may block.
    pub fn recheck(&self) {
        // Without the lock: this may verify many certificates and evaluate many rules.
        let mut refused = self.connected();
        refused.retain(|who| !self.0.access.may_connect(who));
        self.end_refused(refused);
    }

    /// All current connections.
    pub(crate) fn connected(&self) -> Vec<Origin> {
        let mut connected = Vec::new();
        let mut next = Some(0);
        while let Some(from) = next {
            next = self.lock().connected(from, &mut connected);
        }
        connected
    }

    /// Ends these connections, and subscriptions of other connections that are no longer allowed.
    pub(crate) fn end_refused(&self, refused: Vec<Origin>) {
        let refused = refused
            .into_iter()
            .map(|who| (who.connection, who))
            .collect();
        let mut next = self.lock().recheck(0, &refused, Instant::now());
        while let Some(from) = next {
            std::thread::sleep(PAUSE_BETWEEN_HOLDS);
            next = self.lock().recheck(from, &refused, Instant::now());
        }
    }

    /// The next piece, of about `bytes_max` bytes, of an image of all durable sessions and retained
    /// messages; `None` at its end.
    ///
    /// The embedder must note a position of its log before the first piece. The pieces, followed by
    /// every change behind that position, reproduce the state ([`Recovery::apply`]). Changes may
    /// happen between two pieces.
    #[must_use]
    pub fn image(&self, cursor: &mut ImageCursor, bytes_max: usize) -> Option<Vec<u8>> {
        self.lock().image(cursor, bytes_max)
    }

    /// The approximate size of an image in bytes. Only differences between two calls are
    /// meaningful. Takes the lock for a moment.
    #[must_use]
    pub fn image_bytes(&self) -> u64 {
        self.lock().image_bytes() as u64
    }

    /// The numbers of all sessions, connected or not.
    #[must_use]
    pub fn sessions(&self) -> Vec<SessionId> {
        self.lock().session_numbers()
    }

    /// The connection and subscriptions of the client with this id; `None` if it has no session.
    #[must_use]
    pub fn client_status(&self, client: &str) -> Option<ClientStatus> {
        self.lock().client_status(client)
    }

    /// What all sessions hold. Other clients are served during this call.
    #[must_use]
    pub fn session_summaries(&self) -> Vec<SessionSummary> {
        let mut summaries = Vec::new();
        let mut next = Some(0);
        while let Some(from) = next {
            next = self.lock().summaries(from, &mut summaries);
        }
        summaries
    }

    /// Ends the connection of a client, for an operator. Its session stays, and it may connect
    /// again. Returns false if the client is not connected.
    pub fn kick(&self, client: &str) -> bool {
        let mut core = self.lock();
        let status = core.client_status(client);
        let Some(origin) = status.and_then(|status| status.origin) else {
            return false;
        };
        let reason = ReasonCode::ADMINISTRATIVE_ACTION;
        let text = "an operator ended the connection";
        core.disconnect(client, origin.connection, reason, Some(text));
        true
    }

    /// The session quota of one owner (a user, or the network address of anonymous clients) if one
    /// more session begins now.
    #[must_use]
    pub fn session_quota(&self) -> usize {
        let max = self.limits().sessions_max;
        ledger::quota(self.stats().sessions + 1, max, SESSIONS_FLOOR)
    }

    /// Gauges and counters.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats {
            turned_away: self.0.turned_away.load(Ordering::Relaxed),
            ..self.lock().stats()
        }
    }

    /// Counts of refusals since the start, including those decided by the access control and the
    /// service.
    #[must_use]
    pub fn refusals(&self) -> Vec<RefusalCount> {
        self.0.refusals.counts()
    }

    /// Decides no more input of clients, so that all output can leave before a
    /// [`shutdown`](Self::shutdown). Timers continue.
    pub fn stop_deciding(&self) {
        self.0.draining.store(true, Ordering::Release);
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.0.draining.load(Ordering::Acquire)
    }

    /// Whether output waits for the log.
    #[must_use]
    pub fn awaits_log(&self) -> bool {
        self.0.durability_gate.is_waiting()
    }

    /// Sends DISCONNECT 0x8B to every client, waits at most `grace` for delivery, then closes.
    /// Listeners and timers end, and no client can connect any more.
    ///
    /// Wills are not published: section 3.1.2.5 lets a server that shuts down defer them until it
    /// restarts, and no subscriber is left. Wills of durable sessions are stored for the restart.
    pub async fn shutdown(&self, grace: Duration) {
        self.0.stopping.store(true, Ordering::Release);
        self.lock().shut_down();
        self.0.stop.notify_waiters();
        // Never saturates: `SOCKETS` is at most `u32::MAX`.
        let sockets = u32::try_from(SOCKETS).unwrap_or(u32::MAX);
        if tokio::time::timeout(grace, self.0.sockets.acquire_many(sockets))
            .await
            .is_err()
        {
            self.0.abort.notify_waiters();
            // These connections end at once, without waiting for their clients.
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

    /// The limits in force.
    #[must_use]
    pub fn limits(&self) -> Arc<Limits> {
        // Writers of this lock cannot panic.
        let limits = self.0.limits.read();
        limits.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces the limits for everything that follows.
    ///
    /// Existing state stays even above a lower limit: no client is disconnected, and no session,
    /// subscription or message is removed. A connection keeps the limits sent in its CONNACK and
    /// those of its socket; the client's next connection has the new ones. `admissions_max` keeps
    /// its value from the start.
    pub fn set_limits(&self, limits: Limits) {
        let limits = Arc::new(limits);
        self.lock().set_limits(limits.clone());
        let rate = &self.0.publishes_per_second_max;
        rate.store(limits.publishes_per_second_max, Ordering::Relaxed);
        let together = limits.publishes_per_second_total_max;
        self.0.publishes.set_per_second(together);
        *self
            .0
            .limits
            .write()
            .unwrap_or_else(PoisonError::into_inner) = limits;
    }

    /// The rate limit on PUBLISHes of all clients together.
    pub(crate) fn publishes(&self) -> &SharedRateLimit {
        &self.0.publishes
    }

    pub(crate) fn publishes_per_second_max(&self) -> u32 {
        self.0.publishes_per_second_max.load(Ordering::Relaxed)
    }

    pub(crate) fn service(&self) -> &Arc<dyn Service> {
        &self.0.service
    }

    pub(crate) fn access(&self) -> &Arc<dyn Access> {
        &self.0.access
    }

    pub(crate) fn refusal_log(&self) -> &Refusals {
        &self.0.refusals
    }

    /// Authenticates a client; none if too many attempts are pending.
    ///
    /// An attempt that is decided at once needs no permit, so a flood of pending attempts cannot
    /// refuse a client whose password is cached.
    pub(crate) async fn admit(&self, attempt: Attempt) -> Option<Verdict> {
        let mut deciding = self.0.access.admit(attempt);
        let immediate = poll_fn(|context| match deciding.as_mut().poll(context) {
            Poll::Ready(verdict) => Poll::Ready(Some(verdict)),
            Poll::Pending => Poll::Ready(None),
        });
        if let Some(verdict) = immediate.await {
            return Some(verdict);
        }
        let _permit = self.0.admissions.try_acquire().ok()?;
        Some(deciding.await)
    }

    /// The bytes of incomplete CONNECTs.
    pub(crate) fn connects(&self) -> &IncompletePackets {
        &self.0.connects
    }

    /// The bytes of other incomplete packets.
    pub(crate) fn packets(&self) -> &IncompletePackets {
        &self.0.packets
    }

    /// The output of all connections together.
    pub(crate) fn outputs(&self) -> Arc<OutputTotal> {
        self.0.outputs.clone()
    }

    pub(crate) fn cut_turns(&self) -> &Semaphore {
        &self.0.cut_turns
    }

    /// Pauses a connection while the log is behind.
    pub(crate) fn brake(&self) -> Brake {
        Brake::new(self.0.persistence.clone())
    }

    /// Waits a limited time until input that was read before this call may be decided. False if it
    /// must not be: the connection must end.
    pub(crate) async fn may_decide(&self) -> bool {
        match &self.0.lease {
            Some(lease) if !lease.is_valid() => {
                let renewed = tokio::time::timeout(LEASE_WAIT_MAX, lease.renewed());
                renewed.await.unwrap_or(false)
            }
            _ => true,
        }
    }

    pub(crate) fn write_batching(&self) -> &WriteBatching {
        &self.0.write_batching
    }

    pub(crate) fn lock(&self) -> Guard<'_> {
        Guard::new(self)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(|_| self.state_is_lost())
    }

    /// A panic under the lock left the state half changed. Continuing would record and announce
    /// changes that never happened.
    fn state_is_lost(&self) -> ! {
        tracing::error!("the broker panicked; stopping, since its state is lost");
        (self.state_lost)()
    }
}
