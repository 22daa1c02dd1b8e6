//! What all roles of a host share: its engine, clock, settings and keys; and the repetition of a
//! transaction until it is decided.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;

use crate::clock::Clock;
use crate::engine::{
    Call, Condition, Engine, EngineError, KeyRange, Outcome, Page, Paging, Revision, Transaction,
    Value, attempt,
};
use crate::error::Stop;
use crate::feed::Feed;
use crate::figures::Figures;
use crate::head::Head;
use crate::keys::Keys;
use crate::options::{Options, broken};
use crate::space::Fullness;

/// The wait after a call that failed at once, so that a loop does not spin.
pub(crate) const RETRY: Duration = Duration::from_millis(50);

/// Attempts of one transaction between two warnings: some 10 s.
const ATTEMPTS_PER_WARNING: u64 = 20;

#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) options: Options,
    pub(crate) keys: Keys,
    pub(crate) fullness: Arc<Fullness>,
    pub(crate) feed: Arc<Feed>,
    pub(crate) figures: Arc<Figures>,
    random: Mutex<fastrand::Rng>,
}

/// The result of a transaction that changes the head.
#[derive(Debug)]
pub(crate) enum Decision {
    /// The head has the new value.
    Applied(Revision),
    /// Another process changed the head before.
    Replaced(Value),
    /// No attempt reached the engine.
    NotSent(EngineError),
}

/// Checks that the log of a newer head continues that of a head that was committed before it. It
/// does not if the engine was restored from a backup, and another host has led since.
pub(crate) fn check_continues(newer: &Head, known: &Head) -> Result<(), Stop> {
    let is_same = newer.seq == known.seq && newer.chain == known.chain;
    match newer.seq > known.seq || is_same {
        true => Ok(()),
        false => Err(Stop::Branched {
            found: newer.seq,
            known: known.seq,
        }),
    }
}

impl Host {
    pub(crate) fn new(engine: Arc<dyn Engine>, clock: Arc<dyn Clock>, options: Options) -> Self {
        let mut seed = [0; 8];
        seed.copy_from_slice(&options.process.0[..8]);
        Self {
            engine,
            clock,
            keys: Keys::new(&options.cluster),
            fullness: Arc::default(),
            feed: Arc::default(),
            figures: Arc::default(),
            random: Mutex::new(fastrand::Rng::with_seed(u64::from_le_bytes(seed))),
            options,
        }
    }

    pub(crate) fn now(&self) -> Duration {
        self.clock.now()
    }

    /// A random duration up to `max`, so that candidates do not collide.
    pub(crate) fn random(&self, max: Duration) -> Duration {
        let mut random = self.random.lock().unwrap_or_else(PoisonError::into_inner);
        max.mul_f64(random.f64())
    }

    /// Decodes a head. A log that this host cannot read ends its membership.
    pub(crate) fn head(&self, bytes: &[u8]) -> Result<Head, Stop> {
        Head::decode_up_to(bytes, self.options.log_format).map_err(Stop::Head)
    }

    /// Checks the value of the head that a transaction found. It must be newer than a head that is
    /// known to have been committed, and continue its log.
    pub(crate) fn check_newer(&self, value: &Value, known: &Head) -> Result<(), Stop> {
        let found = match &value.value {
            Some(bytes) => Some(self.head(bytes)?),
            None => None,
        };
        match found {
            Some(found) if found.order() > known.order() => check_continues(&found, known),
            found => Err(Stop::Lost {
                found: found.map(|it| it.order()),
                known: known.order(),
            }),
        }
    }

    /// One attempt of a call. Every refused write begins the search for room: without a leader the
    /// challenge of a follower is the only one.
    pub(crate) async fn attempt<T>(&self, call: Call<'_, T>) -> Result<T, EngineError> {
        let result = self.ask_server(call).await;
        self.figures.answered(&result);
        if matches!(result, Err(EngineError::NoSpace)) {
            self.fullness.found();
        }
        result
    }

    /// One attempt of a call that one server answers alone, also without a majority of the engine.
    /// So its result does not say whether this host reaches the log.
    pub(crate) async fn ask_server<T>(&self, call: Call<'_, T>) -> Result<T, EngineError> {
        let limit = self.options.timing.attempt;
        attempt(&*self.engine, &*self.clock, limit, call).await
    }

    /// One attempt of a call with a long answer, or one that takes long.
    pub(crate) async fn read<T>(&self, call: Call<'_, T>) -> Result<T, EngineError> {
        let limit = self.options.timing.read;
        let result = attempt(&*self.engine, &*self.clock, limit, call).await;
        self.figures.answered(&result);
        result
    }

    /// One attempt to read a page. None if a shorter page should be tried.
    pub(crate) async fn read_page(
        &self,
        range: &KeyRange,
        at: Option<Revision>,
        paging: &mut Paging,
    ) -> Result<Option<Page>, EngineError> {
        let call = self.engine.range(range, at, paging.values_max());
        match self.read(call).await {
            Ok(page) => {
                paging.received(&page);
                Ok(Some(page))
            }
            Err(_) if paging.shorten() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether an earlier process of this host wrote this head. A copy of a data directory has the
    /// process of another host, which may be running.
    pub(crate) fn was_own(&self, head: &Head) -> bool {
        self.options.predecessor == Some(head.writer) && self.options.host == head.leader
    }

    pub(crate) async fn get_head(&self) -> Result<Value, EngineError> {
        self.attempt(self.engine.get(&self.keys.head())).await
    }

    /// Repeats a transaction that changes the head from `from` to `to` until it is decided.
    ///
    /// An attempt whose answer was lost may still be applied later. So the bytes must never change
    /// before the transaction is decided, and a caller must not give up after an attempt whose
    /// outcome is unknown. If the head is `to`, an earlier attempt was applied.
    pub(crate) async fn decide(&self, change: HeadChange, gives_up: bool) -> Decision {
        let HeadChange {
            from,
            to,
            mut puts,
            deletes,
        } = change;
        let key = self.keys.head();
        puts.push((key.clone(), to.clone()));
        let mut transaction = Transaction {
            key,
            condition: Condition::Value(from),
            puts,
            deletes,
        };
        let mut may_be_applied = false;
        let mut attempts = 0_u64;
        loop {
            match self.attempt(self.engine.transact(&transaction)).await {
                Ok(Outcome::Applied(revision)) => {
                    self.fullness.clear();
                    return Decision::Applied(revision);
                }
                Ok(Outcome::Failed(value)) if value.value.as_ref() == Some(&to) => {
                    return Decision::Applied(value.revision);
                }
                Ok(Outcome::Failed(value)) => return Decision::Replaced(value),
                Err(error) => {
                    may_be_applied |=
                        matches!(error, EngineError::Unknown(_) | EngineError::NoSpace);
                    if gives_up && !may_be_applied {
                        return Decision::NotSent(error);
                    }
                    if attempts.is_multiple_of(ATTEMPTS_PER_WARNING) {
                        tracing::warn!("repeating a transaction: {error}");
                    }
                    if broken!(self.options, RetryWithoutCondition) {
                        transaction.condition = Condition::Always;
                    }
                    attempts += 1;
                    self.clock.sleep(RETRY).await;
                }
            }
        }
    }
}

/// A change of the head and what changes with it.
#[derive(Debug)]
pub(crate) struct HeadChange {
    pub(crate) from: Bytes,
    pub(crate) to: Bytes,
    pub(crate) puts: Vec<(Vec<u8>, Bytes)>,
    pub(crate) deletes: Vec<crate::engine::KeyRange>,
}
