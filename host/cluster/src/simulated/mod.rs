//! An engine in memory with faults that a seed determines, for tests of the log and its users.
//!
//! It runs on tokio's paused clock, on one thread, so one seed always gives the same run. A request
//! and its answer travel on their own, so either can be lost or late while the caller has gone on.
//! The store itself is correct: it applies transactions atomically and in one order.

mod clock;
mod store;

use std::collections::BTreeMap;
use std::fmt;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fastrand::Rng;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::sleep;

use crate::engine::{
    Call, Change, Engine, EngineError, KeyRange, Outcome, Page, Revision, Status, Transaction,
    Value, Watch,
};
use crate::limits;
pub use clock::SimulatedClock;
use store::Store;

/// True once in `once_in` cases.
pub fn chance(rng: &mut Rng, once_in: u64) -> bool {
    rng.u64(..once_in) == 0
}

/// How often faults happen, once in so many cases. 0 means never.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// A request is lost before the engine.
    pub lost_request: u64,
    /// A request is applied, but its answer is lost.
    pub lost_answer: u64,
    /// A request or an answer takes up to [`Faults::late`].
    pub delayed: u64,
    /// A transaction is applied again later.
    pub duplicated: u64,
    /// A read shows an older state.
    pub stale_read: u64,
    /// A watch loses a change.
    pub lost_change: u64,
    /// A watch repeats a change.
    pub repeated_change: u64,
    /// The longest delay.
    pub late: Duration,
}

/// The transaction that was applied and whether its condition held.
type Observer = Box<dyn FnMut(&Transaction) + Send>;

/// The engine, with the network between it and the hosts.
#[derive(Clone)]
pub struct World(Arc<Mutex<Inner>>);

struct Inner {
    store: Store,
    rng: Rng,
    faults: Faults,
    /// Per host, whether requests and answers are cut off.
    cuts: BTreeMap<usize, (bool, bool)>,
    observer: Option<Observer>,
    changed: Arc<Notify>,
    /// The quota, the size of the file, and whether the alarm is armed, as in etcd.
    quota_bytes: Option<u64>,
    file_bytes: u64,
    is_full: bool,
    /// The reported bytes in use. As in etcd, only a write updates this, so a compaction shows
    /// after the write behind it.
    counted_bytes: u64,
    /// Another client uses the quota up right before the next transaction.
    is_filled_next: bool,
    /// The delay of each transaction before the engine, and the bytes of transactions per second.
    uplink: Option<(Duration, f64)>,
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World").finish_non_exhaustive()
    }
}

/// What the network does with a call.
struct Fate {
    request: Option<Duration>,
    answer: Option<Duration>,
    /// The network reports that the request was not sent.
    refused: bool,
    repeated_after: Option<Duration>,
}

impl World {
    /// An empty engine.
    #[must_use]
    pub fn new(seed: u64, faults: Faults) -> Self {
        Self(Arc::new(Mutex::new(Inner {
            store: Store::default(),
            rng: Rng::with_seed(seed),
            faults,
            cuts: BTreeMap::new(),
            observer: None,
            changed: Arc::default(),
            quota_bytes: None,
            file_bytes: 0,
            is_full: false,
            counted_bytes: 0,
            is_filled_next: false,
            uplink: None,
        })))
    }

    /// The engine as one host sees it.
    #[must_use]
    pub fn engine(&self, host: usize) -> Arc<dyn Engine> {
        Arc::new(SimulatedEngine {
            world: self.clone(),
            host,
        })
    }

    /// Calls `observer` for each applied transaction, at once and in order.
    pub fn observe(&self, observer: impl FnMut(&Transaction) + Send + 'static) {
        self.locked().observer = Some(Box::new(observer));
    }

    /// Cuts a host's requests, or the answers and changes that it receives, or both.
    pub fn cut(&self, host: usize, requests: bool, answers: bool) {
        self.locked().cuts.insert(host, (requests, answers));
    }

    /// Whether a host is cut off in some direction.
    #[must_use]
    pub fn is_cut(&self, host: usize) -> bool {
        let inner = self.locked();
        inner.cuts.get(&host).is_some_and(|it| it.0 || it.1)
    }

    /// Ends all faults.
    pub fn heal(&self) {
        let mut inner = self.locked();
        inner.cuts.clear();
        inner.faults = Faults::default();
        inner.uplink = None;
    }

    /// Compacts the engine to its newest revision, as another client may do.
    pub fn compact(&self) {
        let mut inner = self.locked();
        let newest = inner.store.revision();
        inner.store.compact(newest);
    }

    /// Sets the quota in bytes. As in etcd, the transaction that exceeds it is applied although it
    /// reports an error, and all later ones that write are refused until the alarm is disarmed.
    pub fn limit(&self, quota_bytes: u64) {
        self.locked().quota_bytes = Some(quota_bytes);
    }

    /// Lets another client use the quota up, and then delete its keys. The next transaction is
    /// applied although it reports an error.
    pub fn fill(&self) {
        self.locked().is_filled_next = true;
    }

    /// Delays each transaction before the engine, and in addition by its size over `bytes_per_s`,
    /// which must not be 0. A transaction whose caller gives up before does not arrive.
    pub fn slow(&self, delay: Duration, bytes_per_s: f64) {
        self.locked().uplink = Some((delay, bytes_per_s));
    }

    /// Whether the engine refuses to grow.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.locked().is_full
    }

    /// The size of all keys and values.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.locked().store.bytes()
    }

    fn locked(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn happens(&mut self, once_in: u64) -> bool {
        once_in > 0 && chance(&mut self.rng, once_in)
    }

    fn delay(&mut self) -> Duration {
        let usual = Duration::from_millis(1 + self.rng.u64(..3));
        if self.happens(self.faults.delayed) {
            let late = u64::try_from(self.faults.late.as_millis()).unwrap_or(u64::MAX);
            return usual + Duration::from_millis(self.rng.u64(..late.max(1)));
        }
        usual
    }

    /// How long a transaction is on its way before it can be delayed or lost.
    fn upload(&self, transaction: &Transaction) -> Duration {
        let Some((delay, bytes_per_s)) = self.uplink else {
            return Duration::ZERO;
        };
        let puts = transaction.puts.iter();
        let bytes: usize = puts.map(|(key, value)| key.len() + value.len()).sum();
        delay + Duration::from_secs_f64(bytes as f64 / bytes_per_s)
    }

    fn fate(&mut self, host: usize) -> Fate {
        let (request_cut, answer_cut) = self.cuts.get(&host).copied().unwrap_or_default();
        let request_lost = request_cut || self.happens(self.faults.lost_request);
        let answer_lost = answer_cut || self.happens(self.faults.lost_answer);
        let repeated = self.happens(self.faults.duplicated);
        Fate {
            refused: request_lost && chance(&mut self.rng, 2),
            request: (!request_lost).then(|| self.delay()),
            answer: (!answer_lost).then(|| self.delay()),
            repeated_after: repeated.then(|| self.delay()),
        }
    }

    fn apply(&mut self, transaction: &Transaction) -> Outcome {
        let outcome = self.store.transact(transaction);
        if matches!(outcome, Outcome::Applied(_)) {
            self.counted_bytes = self.store.bytes();
            if let Some(observer) = &mut self.observer {
                observer(transaction);
            }
            self.changed.notify_waiters();
        }
        outcome
    }

    fn apply_within_quota(&mut self, transaction: &Transaction) -> Result<Outcome, EngineError> {
        let Some(quota) = self.quota_bytes else {
            return Ok(self.apply(transaction));
        };
        if transaction.puts.is_empty() {
            return Ok(self.apply(transaction));
        }
        if self.is_full {
            return Err(EngineError::NoSpace);
        }
        let outcome = self.apply(transaction);
        self.file_bytes = self.file_bytes.max(self.store.bytes());
        if std::mem::take(&mut self.is_filled_next) {
            self.file_bytes = quota + 1;
        }
        self.is_full = self.file_bytes > quota;
        if self.is_full {
            return Err(EngineError::NoSpace);
        }
        Ok(outcome)
    }

    fn alarms(&self) -> Vec<String> {
        let alarm = || "memberID:0 alarm:NOSPACE".to_owned();
        self.is_full.then(alarm).into_iter().collect()
    }

    /// The revision that a read shows.
    fn shown(&mut self) -> Revision {
        let newest = self.store.revision();
        if !self.happens(self.faults.stale_read) {
            return newest;
        }
        let age = 1 + self.rng.u64(..20);
        // The first revision is the creation of the cluster.
        Revision(newest.0.saturating_sub(age).max(1)).max(self.store.compacted())
    }
}

/// The engine as one host sees it.
#[derive(Debug)]
struct SimulatedEngine {
    world: World,
    host: usize,
}

impl SimulatedEngine {
    /// Sends a request on its way, and waits for its answer.
    async fn call<T: Send + 'static>(
        &self,
        mut execute: impl FnMut(&mut Inner) -> Result<T, EngineError> + Send + 'static,
    ) -> Result<T, EngineError> {
        let fate = self.world.locked().fate(self.host);
        if fate.refused {
            sleep(Duration::from_millis(1)).await;
            return Err(EngineError::NotApplied("connection refused".into()));
        }
        let (sender, receiver) = oneshot::channel();
        let world = self.world.clone();
        tokio::spawn(async move {
            let Some(request) = fate.request else {
                sleep(Duration::from_secs(3600)).await;
                return drop(sender);
            };
            sleep(request).await;
            let result = execute(&mut world.locked());
            let Some(answer) = fate.answer else {
                sleep(Duration::from_secs(3600)).await;
                return drop(sender);
            };
            sleep(answer).await;
            // The caller may have given up.
            let _ = sender.send(result);
            if let Some(after) = fate.repeated_after {
                sleep(after).await;
                let _ = execute(&mut world.locked());
            }
        });
        let lost = |_| EngineError::Unknown("the connection was lost".into());
        receiver.await.map_err(lost)?
    }
}

impl Engine for SimulatedEngine {
    fn transact<'a>(&'a self, transaction: &'a Transaction) -> Call<'a, Outcome> {
        let transaction = transaction.clone();
        Box::pin(async move {
            let upload = self.world.locked().upload(&transaction);
            if !upload.is_zero() {
                sleep(upload).await;
            }
            self.call(move |inner| inner.apply_within_quota(&transaction))
                .await
        })
    }

    fn get<'a>(&'a self, key: &'a [u8]) -> Call<'a, Value> {
        let key = key.to_vec();
        Box::pin(self.call(move |inner| {
            let revision = inner.shown();
            Ok(Value {
                value: inner.store.get(&key, revision),
                revision,
            })
        }))
    }

    fn range<'a>(
        &'a self,
        range: &'a KeyRange,
        at: Option<Revision>,
        values_max: usize,
    ) -> Call<'a, Page> {
        let range = range.clone();
        Box::pin(self.call(move |inner| {
            let at = at.unwrap_or_else(|| inner.shown());
            inner.store.range(&range, at, values_max)
        }))
    }

    fn watch<'a>(&'a self, range: &'a KeyRange, from: Revision) -> Call<'a, Watch> {
        let (range, world, host) = (range.clone(), self.world.clone(), self.host);
        Box::pin(async move {
            self.call(|_| Ok(())).await?;
            let (sender, receiver) = mpsc::channel(limits::WATCH_EVENTS_MAX);
            tokio::spawn(async move {
                let closed = sender.clone();
                tokio::select! {
                    biased;
                    () = closed.closed() => {}
                    () = watch_range(world, host, range, from, sender) => {}
                }
            });
            Ok(receiver)
        })
    }

    fn compact(&self, revision: Revision) -> Call<'_, ()> {
        Box::pin(self.call(move |inner| {
            inner.store.compact(revision);
            Ok(())
        }))
    }

    fn status(&self) -> Call<'_, Status> {
        Box::pin(self.call(|inner| {
            Ok(Status {
                version: "simulated".into(),
                leads: true,
                voters: 3,
                bytes: inner.counted_bytes,
                file_bytes: inner.file_bytes,
                quota_bytes: inner.quota_bytes,
                alarms: inner.alarms(),
            })
        }))
    }

    fn shrink(&self, revision: Revision) -> Call<'_, ()> {
        Box::pin(self.call(move |inner| {
            inner.store.compact(revision);
            inner.file_bytes = inner.store.bytes();
            Ok(())
        }))
    }

    fn disarm(&self) -> Call<'_, ()> {
        Box::pin(self.call(|inner| {
            inner.is_full = false;
            Ok(())
        }))
    }

    fn next_endpoint(&self) {}
}

type Changes = mpsc::Sender<Result<Change, EngineError>>;

/// Sends the changes of a range until the receiver is dropped.
async fn watch_range(world: World, host: usize, range: KeyRange, from: Revision, sender: Changes) {
    let changed = Arc::clone(&world.locked().changed);
    let mut next = from;
    loop {
        let mut change = pin!(changed.notified());
        change.as_mut().enable();
        let (changes, delay) = {
            let mut inner = world.locked();
            let is_cut = inner.cuts.get(&host).is_some_and(|it| it.1);
            if is_cut {
                (Ok(Vec::new()), Duration::from_millis(100))
            } else {
                let changes = inner.store.changes(&range, next);
                next = next.max(Revision(inner.store.revision().0 + 1));
                (changes, inner.delay())
            }
        };
        sleep(delay).await;
        let changes = match changes {
            Ok(changes) => changes,
            Err(error) => {
                let _ = sender.send(Err(error)).await;
                return;
            }
        };
        for change in changes {
            let copies = world.locked().copies();
            for _ in 0..copies {
                if sender.send(Ok(change.clone())).await.is_err() {
                    return;
                }
            }
        }
        let is_cut = world.locked().cuts.get(&host).is_some_and(|it| it.1);
        if !is_cut {
            change.await;
        }
    }
}

impl Inner {
    /// How often a watch reports a change.
    fn copies(&mut self) -> u32 {
        if self.happens(self.faults.lost_change) {
            0
        } else if self.happens(self.faults.repeated_change) {
            2
        } else {
            1
        }
    }
}
