//! Calls by operators and by a host outside the log: each call is repeated at the next server for a
//! bounded time, and then reported.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::clock::Clock;
use crate::codec::Malformed;
use crate::engine::{
    Call, Condition, Engine, EngineError, KeyRange, Outcome, Page, Status, Transaction, attempt,
    next_key,
};
use crate::head::Head;
use crate::host::RETRY;
use crate::keys::Keys;
use crate::limits;
use crate::options::Timing;

/// Why a call outside the log failed.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// The engine did not answer, or refused the request.
    #[error("{what}: {error}")]
    Engine {
        /// What was attempted.
        what: &'static str,
        /// The last error.
        error: EngineError,
    },
    /// The cluster does not exist.
    #[error(
        "the cluster {0:?} does not exist in this etcd: create it with `statehouse cluster init`"
    )]
    NotCreated(String),
    /// The cluster has no secret.
    #[error(
        "the cluster {0:?} has no secret: a version before secrets created it, or the key was deleted. Create a cluster of another name with `statehouse cluster init --from DIR`"
    )]
    NoSecret(String),
    /// A value cannot be read.
    #[error("{what} cannot be read: {error}")]
    Malformed {
        /// Which value.
        what: &'static str,
        /// Why.
        error: Malformed,
    },
    /// A stored module is damaged.
    #[error("the module {digest} is damaged in etcd: {what}. Remove it and store it again")]
    DamagedModule {
        /// The digest in hexadecimal digits.
        digest: String,
        /// What is wrong.
        what: &'static str,
    },
    /// A limit would be exceeded.
    #[error("{what} would be {value}, but the limit is {limit}: {advice}")]
    Limit {
        /// What is limited.
        what: &'static str,
        /// The value.
        value: u64,
        /// The limit.
        limit: u64,
        /// What to do.
        advice: &'static str,
    },
    /// An argument is invalid, or the state could not be captured.
    #[error("{0}")]
    Input(String),
}

/// A cluster in its engine, for operators and for the tasks of a host outside the log.
#[derive(Clone, Debug)]
pub struct Access {
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) keys: Keys,
}

impl Access {
    /// The cluster with this name, which may not exist.
    #[must_use]
    pub fn new(engine: Arc<dyn Engine>, clock: Arc<dyn Clock>, cluster: &str) -> Self {
        Self {
            engine,
            clock,
            keys: Keys::new(cluster),
        }
    }

    /// Repeats a call until it has an answer, or as many refusals as there are servers: one that
    /// begins to take part refuses all calls. The call must be safe to repeat.
    pub(crate) async fn repeat<'c, T>(
        &self,
        what: &'static str,
        limit: Duration,
        call: impl Fn() -> Call<'c, T>,
    ) -> Result<T, ClusterError> {
        let began = self.clock.now();
        let (mut attempts, mut refusals) = (0, 0);
        loop {
            attempts += 1;
            let error = match attempt(&*self.engine, &*self.clock, limit, call()).await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            let is_final = match error {
                EngineError::NoSpace | EngineError::Compacted => true,
                EngineError::Refused(_) => {
                    refusals += 1;
                    refusals >= self.engine.servers()
                }
                EngineError::NotApplied(_) | EngineError::Unknown(_) => false,
            };
            if is_final
                || attempts == limits::CALL_ATTEMPTS_MAX
                || self.clock.now() - began >= limits::CALL_TIME_MAX
            {
                return Err(ClusterError::Engine { what, error });
            }
            self.clock.sleep(RETRY).await;
        }
    }

    /// Executes a transaction until it is decided. Its repetition must have no further effect.
    pub(crate) async fn transact(
        &self,
        what: &'static str,
        transaction: &Transaction,
    ) -> Result<Outcome, ClusterError> {
        // A piece of 1 MiB takes longer over a slow link than a change of the head.
        let limit = Timing::default().attempt * 4;
        let call = || self.engine.transact(transaction);
        self.repeat(what, limit, call).await
    }

    pub(crate) async fn get(
        &self,
        what: &'static str,
        key: &[u8],
    ) -> Result<Option<Bytes>, ClusterError> {
        let limit = Timing::default().attempt;
        let value = self.repeat(what, limit, || self.engine.get(key)).await?;
        Ok(value.value)
    }

    pub(crate) async fn range(
        &self,
        what: &'static str,
        range: &KeyRange,
    ) -> Result<Page, ClusterError> {
        let call = || self.engine.range(range, None, limits::PAGE_VALUES_MIN);
        self.repeat(what, Timing::default().read, call).await
    }

    /// All values of a range, at most `values_max`.
    pub(crate) async fn all(
        &self,
        what: &'static str,
        mut range: KeyRange,
        values_max: usize,
    ) -> Result<Vec<(Vec<u8>, Bytes)>, ClusterError> {
        let mut values = Vec::new();
        loop {
            let page = self.range(what, &range).await?;
            values.extend(page.values);
            let (true, Some((last, _))) = (page.more, values.last()) else {
                return Ok(values);
            };
            if values.len() >= values_max {
                return Ok(values);
            }
            range.from = next_key(last);
        }
    }

    pub(crate) async fn status(&self) -> Result<Status, ClusterError> {
        let call = || self.engine.status();
        let limit = Timing::default().attempt;
        self.repeat("reading the state of etcd", limit, call).await
    }

    pub(crate) async fn head(&self) -> Result<Head, ClusterError> {
        let key = self.keys.head();
        let head = self.get("reading the head", &key).await?;
        let bytes = head.ok_or_else(|| ClusterError::NotCreated(self.keys.cluster().into()))?;
        decode_head(&bytes)
    }
}

pub(crate) fn decode_head(bytes: &[u8]) -> Result<Head, ClusterError> {
    Head::decode(bytes).map_err(|error| ClusterError::Malformed {
        what: "the head of the log",
        error,
    })
}

/// A transaction without a condition. Its values must not depend on anything that can change.
pub(crate) fn always(
    key: Vec<u8>,
    puts: Vec<(Vec<u8>, Bytes)>,
    deletes: Vec<KeyRange>,
) -> Transaction {
    Transaction {
        key,
        condition: Condition::Always,
        puts,
        deletes,
    }
}

/// Writes one key without a condition, see [`always`].
pub(crate) fn put(key: Vec<u8>, value: Bytes) -> Transaction {
    always(key.clone(), vec![(key, value)], Vec::new())
}

/// Deletes one key without a condition.
pub(crate) fn delete(key: Vec<u8>) -> Transaction {
    let range = KeyRange::of(&key);
    always(key, Vec::new(), vec![range])
}
