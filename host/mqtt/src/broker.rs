//! The handle of the embedder: starts connections, gives the core's lock away, ends everything.

use std::{
    borrow::Cow,
    fmt,
    future::poll_fn,
    io,
    ops::{Deref, DerefMut},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    task::Poll,
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    sync::{Notify, Semaphore},
};

use crate::{
    Access, Anyone, Attempt, Door, ImageCursor, Limits, Message, Origin, Persistence, ReasonCode,
    Recovery, Refusal, RefusalCount, Refused, Service, Standing, Stats, Token, Verdict,
    allowance::SharedAllowance,
    arriving::Arriving,
    clock::Clock,
    connection,
    core::{Core, Source},
    gate::Gate,
    ledger,
    limits::{PAUSE_BETWEEN_HOLDS, SESSIONS_FLOOR, WALL_CLOCK_LOOK},
    output::{Direct, OutputTotal},
    persist::{Brake, Recorder},
    refusal::Refusals,
    round::{self, Rounds},
    writer::SharedWriter,
};

/// How a broker is to run.
#[derive(Clone)]
pub struct Options {
    /// The bounds.
    pub limits: Limits,
    /// Where changes of durable state go. None: a restart forgets everything.
    pub persistence: Option<Arc<dyn Persistence>>,
    /// The number of this run of the process, counted by whoever keeps the log. Numbers of connections and sessions
    /// begin at `(run << 32) + 1`, so that they never repeat over restarts.
    pub run: u32,
    /// Who may connect, publish and subscribe. [`Anyone`], unless it is set.
    pub access: Arc<dyn Access>,
    /// Ends the process: a panic has left the broker's state half changed. Nothing that was changed since the lock was taken is
    /// appended or announced. Ends with code 70 (EX_SOFTWARE of sysexits.h), unless it is set.
    pub state_lost: fn() -> !,
}

fn exit_state_lost() -> ! {
    std::process::exit(70)
}

impl Default for Options {
    fn default() -> Self {
        Self {
            limits: Limits::default(),
            persistence: None,
            run: 0,
            access: Arc::new(Anyone),
            state_lost: exit_state_lost,
        }
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("limits", &self.limits)
            .field("persistence", &self.persistence.is_some())
            .field("run", &self.run)
            .finish_non_exhaustive()
    }
}

/// An MQTT 5 broker; clones are handles to the same one.
#[derive(Clone)]
pub struct Broker(Arc<Shared>);

/// Places for sockets, far more than there can be: how many are taken is compared with a bound that may change.
const SOCKETS: usize = if Semaphore::MAX_PERMITS < u32::MAX as usize {
    Semaphore::MAX_PERMITS
} else {
    u32::MAX as usize
};

struct Shared {
    /// In force now; those that count under the core's lock are there too.
    limits: RwLock<Arc<Limits>>,
    /// Of these, what every connection looks at again and again.
    publishes_per_second_max: AtomicU32,
    publishes: SharedAllowance,
    service: Arc<dyn Service>,
    access: Arc<dyn Access>,
    refusals: Arc<Refusals>,
    state_lost: fn() -> !,
    core: Mutex<Core>,
    persistence: Option<Arc<dyn Persistence>>,
    rounds: Rounds,
    gate: Arc<Gate>,
    /// One permit per socket, of [`SOCKETS`]; all are back once every connection has ended.
    sockets: Arc<Semaphore>,
    /// One permit per CONNECT that is not decided yet.
    admissions: Semaphore,
    /// One permit: of the connections whose last turn did all the work that it may, one at a time has the next turn. So
    /// however many of them there are, a connection with little to do waits for one of their turns.
    cut_turns: Semaphore,
    /// CONNECTs that are not whole yet.
    connects: Arriving,
    /// Other packets that are not.
    packets: Arriving,
    outputs: Arc<OutputTotal>,
    turned_away: AtomicU64,
    /// An earlier deadline than the timers sleep for.
    earlier: Notify,
    stopping: AtomicBool,
    stop: Notify,
    /// Connections that the grace of a shutdown did not suffice for.
    abort: Notify,
}

impl Broker {
    /// A broker without connections and sessions.
    #[must_use]
    pub fn new(options: Options, service: Arc<dyn Service>) -> Self {
        Self::restore(options, service, Recovery::default())
    }

    /// A broker without connections, with the sessions and retained messages that recovery found. A session that was
    /// connected is as if its connection ended now; its will waits some seconds for the client to come back. What does not
    /// fit the limits is dropped and logged. Sessions that have expired end as soon as the timers run.
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
        let gate = Arc::new(Gate::default());
        let persistence = options.persistence;
        let recorder = Recorder::new(persistence.clone(), gate.clone(), clock);
        let access = options.access;
        let refusals = Arc::new(Refusals::new(access.clone()));
        let mut core = Core::new(
            limits.clone(),
            access.clone(),
            refusals.clone(),
            options.run,
            recorder,
        );
        core.restore(recovery);
        Self(Arc::new(Shared {
            service,
            access,
            refusals,
            state_lost: options.state_lost,
            core: Mutex::new(core),
            persistence,
            rounds: Rounds::default(),
            gate,
            sockets: Arc::new(Semaphore::new(SOCKETS)),
            admissions: Semaphore::new(limits.admissions_max.min(Semaphore::MAX_PERMITS)),
            cut_turns: Semaphore::new(1),
            connects: Arriving::default(),
            packets: Arriving::default(),
            outputs: Arc::new(OutputTotal::new(limits.output_bytes_total_max)),
            turned_away: AtomicU64::new(0),
            earlier: Notify::new(),
            stopping: AtomicBool::new(false),
            stop: Notify::new(),
            abort: Notify::new(),
            publishes_per_second_max: AtomicU32::new(limits.publishes_per_second_max),
            publishes: SharedAllowance::per_second(limits.publishes_per_second_total_max),
            limits: RwLock::new(limits),
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
                        let writer = SharedWriter::new(writer);
                        let direct = writer.direct();
                        let door = Door::open(peer);
                        broker.serve(reader, writer, Some(direct), door).await;
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
            self.0.refusals.tell(&Refusal {
                what: Refused::Connect,
                reason: ReasonCode::SERVER_BUSY,
                text: Some("there are as many connections as there may be"),
                peer: Some(door.peer),
                client: "",
                user: None,
            });
            return;
        };
        // Made before the look at the flag, so that a shutdown in between is not missed.
        let abort = self.0.abort.notified();
        if self.is_stopping() {
            return;
        }
        tokio::select! {
            () = connection::run(self, reader, writer, direct, door) => {}
            () = abort => {}
        }
    }

    /// Ends sessions and sends wills when it is time, and looks at the wall clock again and again. Runs until
    /// [`shutdown`](Self::shutdown).
    pub async fn run_timers(&self) {
        while !self.is_stopping() {
            let earlier = self.0.earlier.notified();
            let now = Instant::now();
            let next = {
                let mut core = self.lock();
                core.set_clock(Clock::now());
                core.run_deadlines(now)
            };
            let look = now + WALL_CLOCK_LOOK;
            let next = next.map_or(look, |at| at.min(look));
            if next <= now {
                // As after any turn that did all the work that it may.
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

    /// One lock, many operations: clients see everything of the closure in this order, and what it leads to is written once
    /// at its end, or with what other connections have led to. The closure may not call the broker itself.
    ///
    /// Their changes are appended in one batch or in some, divided between the operations.
    pub fn batch<R>(&self, f: impl FnOnce(&mut Batch<'_>) -> R) -> R {
        let mut core = self.lock();
        f(&mut Batch {
            core: &mut core,
            now: Instant::now(),
        })
    }

    /// Everything up to this position of the log is durable: what waited for it is written, and whatever else can be. For any
    /// thread; takes no lock that is held for long.
    pub fn released(&self, position: u64) {
        self.0.gate.release_to(position);
        self.0.rounds.write_gathered();
    }

    /// The rules of the [access control](Access) have changed, or credentials of clients have
    /// become invalid: ends connections that are no longer allowed with DISCONNECT 0x87, and such
    /// subscriptions of the others. Packets after the change follow the new rules anyway. Sessions
    /// without a connection are looked at when they are resumed. Other clients are served during
    /// this call. For a thread that may block.
    pub fn recheck(&self) {
        // Many certificates are verified here, or many rules looked through.
        let mut refused = self.connected();
        refused.retain(|who| !self.0.access.may_connect(who));
        self.end_refused(refused);
    }

    /// The connections that there are.
    pub(crate) fn connected(&self) -> Vec<Origin> {
        let mut connected = Vec::new();
        let mut next = Some(0);
        while let Some(from) = next {
            next = self.lock().connected(from, &mut connected);
        }
        connected
    }

    /// Ends these connections, and subscriptions of the others that are no longer allowed.
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

    /// The next piece of an image of all durable sessions and retained messages, of about so many bytes, as of now; `None`
    /// at its end. Begun after the embedder has noted a position of its log, the pieces and then every change behind that
    /// position give the state again ([`Recovery::apply`]); changes may go on between two pieces.
    #[must_use]
    pub fn image(&self, cursor: &mut ImageCursor, bytes_max: usize) -> Option<Vec<u8>> {
        self.lock().image(cursor, bytes_max)
    }

    /// About how many bytes an image has by now; by how much that changes is what counts. It takes the lock for a moment.
    #[must_use]
    pub fn kept_bytes(&self) -> u64 {
        self.lock().kept_bytes() as u64
    }

    /// The numbers of all sessions there are, connected or not.
    #[must_use]
    pub fn sessions(&self) -> Vec<u64> {
        self.lock().session_numbers()
    }

    /// What is known of the client with this id; `None` where it has no session.
    #[must_use]
    pub fn standing(&self, client: &str) -> Option<Standing> {
        self.lock().standing(client)
    }

    /// The share of an owner (a user, or the network address of anonymous clients): how many sessions it may have in all
    /// if one more begins now.
    #[must_use]
    pub fn session_share(&self) -> usize {
        let max = self.limits().sessions_max;
        ledger::share(self.stats().sessions + 1, max, SESSIONS_FLOOR)
    }

    /// Gauges and counters.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats {
            turned_away: self.0.turned_away.load(Ordering::Relaxed),
            ..self.lock().stats()
        }
    }

    /// What was refused since the start, those refusals included that the access control and the service have decided.
    #[must_use]
    pub fn refusals(&self) -> Vec<RefusalCount> {
        self.0.refusals.counts()
    }

    /// Sends DISCONNECT 0x8B to everyone, gives it at most `grace` to arrive, then closes. Listeners and timers end, and
    /// nobody can connect any more.
    ///
    /// Wills are not published: section 3.1.2.5 lets a server that shuts down put them off until it starts again, and
    /// nobody is left to hear them. Those of durable sessions are kept for then.
    pub async fn shutdown(&self, grace: Duration) {
        self.0.stopping.store(true, Ordering::Release);
        self.lock().shut_down();
        self.0.stop.notify_waiters();
        // It is not larger; see there.
        let sockets = u32::try_from(SOCKETS).unwrap_or(u32::MAX);
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

    /// The bounds in force.
    #[must_use]
    pub fn limits(&self) -> Arc<Limits> {
        // Nothing panics while it is written.
        let limits = self.0.limits.read();
        limits.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes other bounds into force, for what comes from now on. What is there stays, also beyond a lower bound: nobody is
    /// disconnected, and no session, subscription or message goes. A connection keeps the bounds that it was told in its CONNACK
    /// or that are of its socket; the next one of its client has the new ones. `admissions_max` stays as it was at the start.
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

    /// How much all clients together may publish.
    pub(crate) fn publishes(&self) -> &SharedAllowance {
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

    pub(crate) fn told(&self) -> &Refusals {
        &self.0.refusals
    }

    /// Asks who this is; none where too many are asked about already. An attempt that is decided at once needs no place, so a
    /// flood of attempts that wait refuses no client whose password is known.
    pub(crate) async fn admit(&self, attempt: Attempt) -> Option<Verdict> {
        let mut deciding = self.0.access.admit(attempt);
        let at_once = poll_fn(|context| match deciding.as_mut().poll(context) {
            Poll::Ready(verdict) => Poll::Ready(Some(verdict)),
            Poll::Pending => Poll::Ready(None),
        });
        if let Some(verdict) = at_once.await {
            return Some(verdict);
        }
        let _permit = self.0.admissions.try_acquire().ok()?;
        Some(deciding.await)
    }

    /// CONNECTs that are not whole yet.
    pub(crate) fn connects(&self) -> &Arriving {
        &self.0.connects
    }

    /// Other packets that are not.
    pub(crate) fn packets(&self) -> &Arriving {
        &self.0.packets
    }

    /// What the outputs of all connections share.
    pub(crate) fn outputs(&self) -> Arc<OutputTotal> {
        self.0.outputs.clone()
    }

    pub(crate) fn cut_turns(&self) -> &Semaphore {
        &self.0.cut_turns
    }

    /// What pauses a connection while the log is behind.
    pub(crate) fn brake(&self) -> Brake {
        Brake::new(self.0.persistence.clone())
    }

    pub(crate) fn rounds(&self) -> &Rounds {
        &self.0.rounds
    }

    pub(crate) fn lock(&self) -> Guard<'_> {
        Guard {
            broker: self,
            core: Some(self.0.lock()),
            panicking: std::thread::panicking(),
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(|_| self.state_is_lost())
    }

    /// A panic under the lock left the state half changed. To go on would record and announce what never happened.
    fn state_is_lost(&self) -> ! {
        tracing::error!("the broker panicked; stopping, since its state is lost");
        (self.state_lost)()
    }
}

/// The core's lock. Before it is given back the changes made under it are appended; then what there is to write is written
/// or gathered, and the service is told of sessions that are no more.
pub(crate) struct Guard<'a> {
    broker: &'a Broker,
    core: Option<MutexGuard<'a, Core>>,
    /// Whether the thread was panicking when the lock was taken: the state was whole then.
    panicking: bool,
}

impl Guard<'_> {
    /// Gives the lock back, calls the function, and takes the lock again.
    pub(crate) fn unlocked<R>(&mut self, f: impl FnOnce() -> R) -> R {
        self.give_back();
        let result = f();
        self.core = Some(self.broker.0.lock());
        result
    }

    fn give_back(&mut self) {
        let Some(mut core) = self.core.take() else {
            return;
        };
        let wakes = core.finish(&self.broker.0.rounds);
        drop(core);
        round::write(&wakes.writers);
        if wakes.timers {
            self.broker.0.earlier.notify_waiters();
        }
        // Only who ends sessions finds some here, which no call of the service does.
        if !wakes.ended.is_empty() {
            self.broker.service().ended(self.broker, &wakes.ended);
        }
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if self.core.is_some() && !self.panicking && std::thread::panicking() {
            self.broker.0.state_is_lost();
        }
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
    /// subscription, and of groups that share one (section 4.8.2); 0 where a retained message had no room.
    pub fn publish(&mut self, message: Message) -> usize {
        let source = Source::default();
        let sessions = self.core.publish(Cow::Owned(message), source, self.now);
        self.published(sessions)
    }

    /// Publishes the answer to the request of this token: the same as [`publish`](Self::publish), but less is recorded.
    /// The answer stands in front of the request's acknowledgement in the same output, so who did not get it asks again.
    /// Where it cannot be sent at once, or the request came at QoS 2, it is recorded, and the acknowledgement waits for
    /// that. Before [`settle`](Self::settle).
    pub fn answer(&mut self, token: Option<&Token>, message: Message) -> usize {
        let sessions = self.core.answer(token, message, self.now);
        self.published(sessions)
    }

    fn published(&mut self, sessions: Result<usize, ReasonCode>) -> usize {
        self.core.checkpoint();
        sessions.unwrap_or_else(|_| {
            self.core.count_dropped();
            0
        })
    }

    /// Sends to this connection of this client only, subscribed or not, exactly once. A matching subscription lends its
    /// QoS (never above the message's) and Subscription Identifiers. What is unsent when the connection ends is dropped,
    /// what is unacknowledged is re-sent to a resumed session, and recorded by then at the latest. False where the
    /// connection has ended.
    pub fn deliver(&mut self, client: &str, connection: u64, message: Message) -> bool {
        let is_open = self.core.deliver(client, connection, message, self.now);
        self.core.checkpoint();
        is_open
    }

    /// Sends the PUBACK or PUBREC of a request. It leaves after everything published before, but for messages that wait
    /// for the client's own acknowledgements: these may not delay it (section 3.3.4). Acknowledgements leave in the order
    /// of the requests. A used token does nothing.
    pub fn settle(&mut self, token: Token, reason: ReasonCode, text: Option<&str>) {
        self.core.acknowledge(token, reason, text);
        self.core.checkpoint();
    }

    /// Disconnects this connection of this client with a DISCONNECT; nothing where it has ended.
    pub fn disconnect(
        &mut self,
        client: &str,
        connection: u64,
        reason: ReasonCode,
        text: Option<&str>,
    ) {
        self.core.disconnect(client, connection, reason, text);
    }
}
