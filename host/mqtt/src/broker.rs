//! The embedder's handle to the broker. It guards the core with one lock.
//!
//! * `serving`: connections, timers and the shutdown.
//! * `inspection`: what operators and snapshots see of the sessions.

mod batch;
mod guard;
mod inspection;
mod options;
mod serving;

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError, RwLock,
    atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
};
use std::time::Instant;

pub use batch::Batch;
pub(crate) use guard::Guard;
pub use options::Options;
use statehouse_protocol::LogPosition;
use tokio::sync::{Notify, Semaphore};

use crate::{
    Access, Lease, Limits, Persistence, Recovery, Service,
    clock::Clock,
    core::Core,
    durability_gate::DurabilityGate,
    handshakes::Handshakes,
    incomplete::IncompletePackets,
    output::OutputTotal,
    persist::{Brake, ChangeLog},
    rate_limit::{ClientRateLimits, RateLimit},
    refusal::Refusals,
    write_batch::WriteBatching,
};

/// A broker for MQTT 5 and MQTT 3.1.1; clones are handles to the same one.
#[derive(Clone)]
pub struct Broker(Arc<Shared>);

/// Permits for sockets, far more than there can be sockets, and fewer than a semaphore may have.
/// The number taken is compared with a limit that may change at run time.
const SOCKETS: u32 = 1 << 28;

struct Shared {
    /// The limits in force. The core has a copy of those that it enforces.
    limits: RwLock<Arc<Limits>>,
    /// A copy of the limit, since every connection reads it often.
    publishes_per_second_max: AtomicU32,
    publishes: RateLimit,
    publishes_by_client: ClientRateLimits,
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
    /// The connections without a complete CONNECT. Only the limit of connections evicts them.
    arriving: Arc<Handshakes>,
    /// One permit per CONNECT that the access control has not decided yet.
    admissions: Semaphore,
    /// One permit: of the connections whose last turn used up its work limit, one at a time has its
    /// next turn. So a connection with little to do waits for at most one such turn.
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
    /// logged, unless [`Options::keeps_all`] is set. Expired sessions end as soon as the timers
    /// run. Without [`Options::persistence`] the broker is a copy: sessions whose connection ended
    /// later than the wall clock shows keep that time.
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
        let restoring = match options.keeps_all {
            true => Arc::new(limits.without_limits_of_state()),
            false => limits.clone(),
        };
        let mut core = Core::new(
            restoring,
            access.clone(),
            refusals.clone(),
            options.run,
            change_log,
        );
        core.restore(recovery);
        core.set_limits(limits.clone());
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
            sockets: Arc::new(Semaphore::new(SOCKETS as usize)),
            arriving: Arc::new(Handshakes::new(SOCKETS as usize)),
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
            publishes: RateLimit::per_second(limits.publishes_per_second_total_max, Instant::now()),
            publishes_by_client: ClientRateLimits::default(),
            limits: RwLock::new(limits),
        }))
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
        let in_force = self.0.limits.write();
        *in_force.unwrap_or_else(PoisonError::into_inner) = limits;
    }

    /// The rate limit on PUBLISHes of all clients together.
    pub(crate) fn publishes(&self) -> &RateLimit {
        &self.0.publishes
    }

    /// The rate limit of a client, if there is one.
    pub(crate) fn publishes_of(&self, client: &Arc<str>, now: Instant) -> Option<Arc<RateLimit>> {
        let is_limited = self.publishes_per_second_max() > 0;
        is_limited.then(|| self.0.publishes_by_client.of(client, now))
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
