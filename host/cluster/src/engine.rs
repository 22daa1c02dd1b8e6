//! The interface to the consensus engine that stores the log.
//!
//! Safety depends on one property of an engine: [`Engine::transact`] compares the value of one key
//! and writes, atomically and in one order for all clients. Reads may be stale, watches may lose or
//! repeat events, and revisions may differ between servers. These faults may cost time but never
//! safety.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;

use crate::check::Finding;
use crate::clock::Clock;
use crate::limits;

/// The answer to a call of the engine.
pub type Call<'a, T> = Pin<Box<dyn Future<Output = Result<T, EngineError>> + Send + 'a>>;

/// A point in the engine's history. It only says where to begin a watch or which version to read;
/// it is never compared for safety, because servers of etcd can count differently after a crash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Revision(pub u64);

/// The keys `from..to`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRange {
    /// The first key.
    pub from: Vec<u8>,
    /// The key after the last one.
    pub to: Vec<u8>,
}

impl KeyRange {
    /// The keys `from..to`.
    #[must_use]
    pub fn new(from: Vec<u8>, to: Vec<u8>) -> Self {
        Self { from, to }
    }

    /// One key.
    pub(crate) fn of(key: &[u8]) -> Self {
        Self::new(key.to_vec(), next_key(key))
    }
}

/// The key directly behind another one.
pub(crate) fn next_key(key: &[u8]) -> Vec<u8> {
    [key, &[0]].concat()
}

/// The condition of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    /// The key has this value.
    Value(Bytes),
    /// The key does not exist.
    Absent,
    /// No condition.
    Always,
}

/// If the condition holds, writes; otherwise reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transaction {
    /// The key that is compared, and read if the condition does not hold.
    pub key: Vec<u8>,
    /// The condition on the value of the key.
    pub condition: Condition,
    /// Keys to write. A deleted range must contain none of them.
    pub puts: Vec<(Vec<u8>, Bytes)>,
    /// Keys to delete.
    pub deletes: Vec<KeyRange>,
}

/// The result of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The condition held and everything was written, at this revision.
    Applied(Revision),
    /// The condition did not hold. Nothing was written.
    Failed(Value),
}

/// The value of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Value {
    /// `None` if the key does not exist.
    pub value: Option<Bytes>,
    /// The revision of the server when it answered.
    pub revision: Revision,
}

/// A page of a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// Keys and values, sorted by key.
    pub values: Vec<(Vec<u8>, Bytes)>,
    /// Whether more keys follow.
    pub more: bool,
}

/// A change of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The key.
    pub key: Vec<u8>,
    /// The new value, or `None` if the key was deleted.
    pub value: Option<Bytes>,
}

/// The changes of a range, until an error. Dropping the receiver ends the watch.
pub type Watch = mpsc::Receiver<Result<Change, EngineError>>;

/// The state of the engine, for the operator and for the quota.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// The version of the server that answered.
    pub version: String,
    /// Whether the server that answered leads the engine.
    pub leads: bool,
    /// The number of voting servers.
    pub voters: usize,
    /// Bytes in use by keys and values, and by old versions until they are compacted.
    pub bytes: u64,
    /// The size of the database in bytes, with free pages. etcd compares this size with its quota,
    /// and only a defragmentation reduces it.
    pub file_bytes: u64,
    /// The quota in bytes, if the server reports it (etcd 3.6 and later).
    pub quota_bytes: Option<u64>,
    /// Alarms and errors that the server reports.
    pub alarms: Vec<String>,
}

impl Status {
    /// Whether the engine refuses to grow because its quota was used up.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.alarms.iter().any(|it| it.contains("NOSPACE"))
    }
}

/// Why a call of the engine failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// The request certainly did not reach the engine, so it has no effect.
    #[error("etcd is unreachable: {0}")]
    NotApplied(String),
    /// The request may have an effect, now or later.
    #[error("etcd did not confirm a request: {0}")]
    Unknown(String),
    /// The engine refused the request; it has no effect. A repetition fails until the operator
    /// changes something.
    #[error("etcd refused a request: {0}")]
    Refused(String),
    /// The quota of the engine is used up. The request may have an effect: etcd looks at the quota
    /// a second time while it applies a transaction, and then reports this error although it has
    /// applied it.
    #[error("the quota of etcd is used up: raise its --quota-backend-bytes")]
    NoSpace,
    /// The requested revision was compacted.
    #[error("the requested revision was compacted")]
    Compacted,
}

/// A consensus engine. Each call asks one server. A call may be dropped at any time; its request
/// may then still have an effect.
pub trait Engine: Send + Sync + fmt::Debug {
    /// Executes a transaction.
    fn transact<'a>(&'a self, transaction: &'a Transaction) -> Call<'a, Outcome>;
    /// Reads a key.
    fn get<'a>(&'a self, key: &'a [u8]) -> Call<'a, Value>;
    /// Reads at most `values_max` first keys of a range, at a revision or at the newest one.
    fn range<'a>(
        &'a self,
        range: &'a KeyRange,
        at: Option<Revision>,
        values_max: usize,
    ) -> Call<'a, Page>;
    /// Watches a range, including the changes of revision `from`.
    fn watch<'a>(&'a self, range: &'a KeyRange, from: Revision) -> Call<'a, Watch>;
    /// Discards versions that were replaced before a revision.
    fn compact(&self, revision: Revision) -> Call<'_, ()>;
    /// Reads the state of the engine.
    fn status(&self) -> Call<'_, Status>;
    /// Discards versions that were replaced before a revision, and then returns free pages to the
    /// file system, one server after another. etcd compares the size of its file with its quota, so
    /// an engine that is full stays full without this. A server answers nothing else at that time.
    fn shrink(&self, _revision: Revision) -> Call<'_, ()> {
        Box::pin(async { Ok(()) })
    }
    /// Lets the engine accept writes again after its quota was used up. It refuses them again at
    /// once if it is still too large.
    fn disarm(&self) -> Call<'_, ()> {
        Box::pin(async { Ok(()) })
    }
    /// Examines each server: whether it answers, and whether its version can be used.
    fn examine(&self) -> Call<'_, Vec<Finding>> {
        Box::pin(async { Ok(Vec::new()) })
    }
    /// Sends the following calls to the next server, because the last one did not answer.
    fn next_endpoint(&self);
    /// The number of servers that [`Self::next_endpoint`] goes through.
    fn servers(&self) -> usize {
        1
    }
    /// Sends the following calls to the server that leads the engine, if it answers: the others
    /// pass transactions on to it, which takes longer.
    fn prefer_leader(&self) -> Call<'_, ()> {
        Box::pin(async { Ok(()) })
    }
}

/// Chooses the length of the next page, so that many small values take few calls, and large ones
/// fit an answer.
#[derive(Debug)]
pub(crate) struct Paging {
    values_max: usize,
}

impl Paging {
    pub(crate) fn new() -> Self {
        Self {
            values_max: limits::PAGE_VALUES_MIN,
        }
    }

    pub(crate) fn values_max(&self) -> usize {
        self.values_max
    }

    /// A page was received. The next values are probably as large.
    pub(crate) fn received(&mut self, page: &Page) {
        if let Some(largest) = page.values.iter().map(|(_, value)| value.len()).max() {
            let fitting = limits::PAGE_BYTES / largest.max(1);
            let values_max = fitting.min(4 * self.values_max);
            self.values_max = values_max.clamp(limits::PAGE_VALUES_MIN, limits::PAGE_VALUES_MAX);
        }
    }

    /// A page failed, perhaps because it was too large. Returns whether a shorter one can be tried.
    pub(crate) fn shorten(&mut self) -> bool {
        std::mem::replace(&mut self.values_max, limits::PAGE_VALUES_MIN) > limits::PAGE_VALUES_MIN
    }
}

/// Waits at most `limit` for a call, and changes the server if it did not answer or refused the
/// call. Others may execute it: a server that begins to take part refuses all calls. The caller
/// must not change the server too: of two servers, it would ask the same one again.
pub(crate) async fn attempt<T>(
    engine: &dyn Engine,
    clock: &dyn Clock,
    limit: Duration,
    call: Call<'_, T>,
) -> Result<T, EngineError> {
    let result = tokio::select! {
        biased;
        result = call => result,
        () = clock.sleep(limit) => Err(EngineError::Unknown(format!("no answer within {limit:?}"))),
    };
    if matches!(
        result,
        Err(EngineError::Unknown(_) | EngineError::NotApplied(_) | EngineError::Refused(_))
    ) {
        engine.next_endpoint();
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(values: usize, bytes: usize) -> Page {
        let value = Bytes::from(vec![0; bytes]);
        Page {
            values: (0..values).map(|_| (Vec::new(), value.clone())).collect(),
            more: true,
        }
    }

    #[test]
    fn pages_grow_with_small_values_and_shrink_with_large_ones() {
        let mut paging = Paging::new();
        let mut lengths = Vec::new();
        for _ in 0..5 {
            lengths.push(paging.values_max());
            paging.received(&page(paging.values_max(), 250));
        }
        assert_eq!(lengths, [16, 64, 256, 1_024, 1_024]);
        // Full frames: 64 of 128 KiB are 8 MiB.
        paging.received(&page(1, 128 << 10));
        assert_eq!(paging.values_max(), 64);
        paging.received(&page(1, 1 << 20));
        assert_eq!(paging.values_max(), limits::PAGE_VALUES_MIN);
    }

    #[test]
    fn a_page_that_fails_is_tried_again_only_if_it_can_be_shorter() {
        let mut paging = Paging::new();
        assert!(!paging.shorten());
        paging.received(&page(16, 10));
        assert!(paging.shorten());
        assert_eq!(paging.values_max(), limits::PAGE_VALUES_MIN);
        assert!(!paging.shorten());
    }
}
