//! The past of the store, for operators on other machines: the history of a key, its value at a
//! moment, and a replay.
//!
//! It must never delay the store: it takes no lock of the store, reads the data directory as the
//! offline commands do, on threads that may block, and does one of its kind at a time. Few answers
//! are in memory at once, also while their clients read them.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use bytes::Bytes;
use hyper::{StatusCode, Uri};
use serde_json::{Value as Json, json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::answer::{Answer, Refusal, Unsent, with};
use super::query::{bad, key, number, text};
use crate::past::{self, Given};
use statehouse_config::{Fuel, limits, part_of_memory};
use statehouse_files::blocking;
use statehouse_offline::{Bound, Candidate, Difference, Observer, Past, PastError, Tally};

/// The data directory of a store.
#[derive(Clone)]
pub struct DataDirectory {
    /// Its path.
    pub path: PathBuf,
    /// The node name of the store in versions.
    pub node: String,
    /// At a host of a cluster: the last record of its copy of the log, or 0 if the copy has ended
    /// or has not caught up with the log yet.
    pub copied: Option<Arc<AtomicU64>>,
}

impl DataDirectory {
    /// Whether it has caught up with the log since the start, and follows it. While the host cannot
    /// read etcd, it lacks the newest records nevertheless.
    fn is_current(&self) -> bool {
        let copied = self.copied.as_ref();
        copied.is_none_or(|it| it.load(Ordering::Relaxed) > 0)
    }
}

/// Reads one data directory.
pub struct Reader {
    /// None if the store is in memory.
    directory: Option<DataDirectory>,
    reading: Arc<Semaphore>,
    replaying: Arc<Semaphore>,
    answers: Arc<Semaphore>,
}

pub(super) struct Wanted {
    from: Option<Given<Bound>>,
    to: Option<Given<Bound>>,
    limit: usize,
    fuel: Fuel,
    directory: DataDirectory,
    turn: Turn,
}

/// The most bytes of changes or differences in one answer, which needs a multiple of them in memory.
fn answer_bytes_max() -> usize {
    part_of_memory(128, limits::ADMIN_PAST_BYTES_MAX) as usize
}

/// The permission to do work, and to keep its answer until it is sent.
struct Turn {
    work: OwnedSemaphorePermit,
    answer: OwnedSemaphorePermit,
}

impl Reader {
    /// A reader of this directory; none if the store is in memory.
    pub fn new(directory: Option<DataDirectory>) -> Self {
        Self {
            directory,
            reading: Arc::new(Semaphore::new(1)),
            replaying: Arc::new(Semaphore::new(1)),
            answers: Arc::new(Semaphore::new(limits::ADMIN_PAST_ANSWERS_MAX)),
        }
    }

    /// Whether there is a directory that follows the log.
    pub(super) fn is_current(&self) -> bool {
        let directory = self.directory.as_ref();
        directory.is_some_and(DataDirectory::is_current)
    }

    pub(super) async fn history(&self, uri: &Uri) -> Result<Answer, Refusal> {
        let max = limits::ADMIN_HISTORY_CHANGES_MAX;
        let key = key(uri)?;
        let limit = number(uri, "limit", 100, 0..=max)?;
        self.read(move |DataDirectory { path, node, .. }| {
            let max = answer_bytes_max();
            let found = Past::open(path)?.history(&key, limit, max)?;
            Ok(past::history(&key, &found, node, max))
        })
        .await
    }

    /// The value of a key at a moment.
    pub(super) async fn value(&self, uri: &Uri) -> Result<Answer, Refusal> {
        let key = key(uri)?;
        let moment = text(uri, "as_of")?.ok_or_else(|| {
            bad("name the version or the time: /v1/value?key=KEY&as_of=2026-11-21T03:00:00Z")
        })?;
        let given = past::moment(&moment).map_err(bad)?;
        self.read(move |DataDirectory { path, node, .. }| {
            let past = Past::open(path)?;
            let moment = given.within(&past)?;
            let moment = moment.ok_or_else(|| bad("`as_of` is still to come"))?;
            let found = past.as_of(&key, moment)?;
            past::as_of(&key, found, node).map_err(bad)
        })
        .await
    }

    /// Reads on a thread that may block.
    async fn read<F>(&self, read: F) -> Result<Answer, Refusal>
    where
        F: FnOnce(&DataDirectory) -> Result<Json, Refusal> + Send + 'static,
    {
        // Another host of the cluster may have a copy: after 421 commands ask the next one.
        let directory = self.directory(StatusCode::MISDIRECTED_REQUEST)?;
        let waiting = async {
            let answer = self.answers.clone().acquire_owned().await.ok()?;
            let work = self.reading.clone().acquire_owned().await.ok()?;
            Some(Turn { work, answer })
        };
        let Ok(Some(turn)) = tokio::time::timeout(limits::ADMIN_PAST_WAIT, waiting).await else {
            return Err(busy("other operators read the history: try again later"));
        };
        blocking(turn, move || read(&directory)).await
    }

    /// Checks what a replay is to do, and takes the turn of the one replay.
    pub(super) fn wanted(&self, uri: &Uri, store_bytes: u64) -> Result<Wanted, Refusal> {
        let bound = |name| match text(uri, name)? {
            None => Ok(None),
            Some(text) => past::bound(&text).map(Some).map_err(bad),
        };
        let fuel = text(uri, "max_fuel")?.map(|it| Fuel::from_str(&it).map_err(bad));
        let (from, to) = (bound("from")?, bound("to")?);
        let limit = number(uri, "limit", 20, 0..=limits::ADMIN_REPLAY_DIFFERENCES_MAX)?;
        let max = part_of_memory(4, limits::ADMIN_REPLAY_STORE_BYTES_MAX);
        if store_bytes > max {
            let error = format!(
                "a replay holds a copy of all keys, and the store has {store_bytes} bytes, more than the {max} that it may add: run `statehouse replay` on a copy of the data directory"
            );
            return Err(Refusal::new(StatusCode::CONFLICT, error));
        }
        // No other host replays.
        let directory = self.directory(StatusCode::SERVICE_UNAVAILABLE)?;
        let work = (self.replaying.clone().try_acquire_owned())
            .map_err(|_| busy("another replay is running: try again when it has ended"))?;
        let answer = (self.answers.clone().try_acquire_owned())
            .map_err(|_| busy("other operators read the history: try again later"))?;
        Ok(Wanted {
            from,
            to,
            limit,
            fuel: fuel.transpose()?.unwrap_or_default(),
            directory,
            turn: Turn { work, answer },
        })
    }

    /// The directory. `if_not_current` is the status of the refusal if it does not follow the log.
    fn directory(&self, if_not_current: StatusCode) -> Result<DataDirectory, Refusal> {
        let directory = self.directory.clone().ok_or_else(|| {
            let error = "this store is in memory, so it has no history";
            Refusal::new(StatusCode::CONFLICT, error)
        })?;
        if !directory.is_current() {
            let error = "this host has no copy of the log of its cluster that is up to date, so it cannot answer for the past: it has just started, --history-bytes or --history-retention is 0, or its log says why";
            return Err(Refusal::new(if_not_current, error));
        }
        Ok(directory)
    }
}

impl Wanted {
    /// Replays the records, with the policies that handled them or with the one in `file`. Ends
    /// early if the answer is not awaited any more.
    pub(super) async fn run(self, file: Option<Vec<u8>>) -> Result<Answer, Refusal> {
        let awaited = Awaited(Arc::default());
        let mut found = Differences {
            is_given_up: awaited.0.clone(),
            began: Instant::now(),
            left: self.limit,
            bytes_left: answer_bytes_max(),
            node: self.directory.node,
            documents: Vec::new(),
        };
        blocking(self.turn, move || {
            let fuel_max = self.fuel.get();
            let candidate = file.as_deref().map(|file| Candidate { file, fuel_max });
            let past = Past::open(&self.directory.path)?;
            let within = |it: Option<Given<Bound>>| it.map(|it| it.within(&past)).transpose();
            let (from, to) = (within(self.from)?, within(self.to)?);
            let replayed = past.replay(from, to, candidate, &mut found);
            if found.is_cancelled() {
                let seconds = limits::ADMIN_REPLAY_TIMEOUT.as_secs();
                return Err(busy(&format!(
                    "the replay took longer than {seconds} s: name fewer records with `from` and `to`"
                )));
            }
            let totals = past::summary(&replayed?);
            Ok(json!({ "differences": found.documents, "totals": totals }))
        })
        .await
    }
}

/// The wait for a replay. Its end, also that of the connection, ends the replay.
struct Awaited(Arc<AtomicBool>);

impl Drop for Awaited {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Keeps the first differences, within the limits of an answer.
struct Differences {
    is_given_up: Arc<AtomicBool>,
    began: Instant,
    left: usize,
    bytes_left: usize,
    node: String,
    documents: Vec<Json>,
}

impl Observer for Differences {
    fn progress(&mut self, _: u64, _: u64, _: &Tally) {}

    fn different(&mut self, difference: &Difference<'_>) {
        if self.left == 0 {
            return;
        }
        let document = past::difference(difference, &self.node);
        let bytes = document.to_string().len();
        let Some(bytes_left) = self.bytes_left.checked_sub(bytes) else {
            self.left = 0;
            return;
        };
        self.bytes_left = bytes_left;
        self.left -= 1;
        self.documents.push(document);
    }

    fn is_cancelled(&self) -> bool {
        self.is_given_up.load(Ordering::Relaxed)
            || self.began.elapsed() > limits::ADMIN_REPLAY_TIMEOUT
    }
}

/// Works on a thread that may block, and keeps the turn until the work is done, even if the client
/// has disconnected.
async fn blocking<F>(turn: Turn, work: F) -> Result<Answer, Refusal>
where
    F: FnOnce() -> Result<Json, Refusal> + Send + 'static,
{
    let done = blocking::run("past", move || {
        let done = work();
        drop(turn.work);
        done.map(|document| Unsent {
            bytes: document.to_string().into_bytes(),
            _permit: turn.answer,
        })
    });
    let unsent = done.await??;
    let (bytes, max) = (unsent.bytes.len(), limits::ADMIN_ANSWER_BYTES_MAX);
    if bytes > max {
        let error = format!(
            "the answer has {bytes} bytes, more than the limit of {max}: read the data directory on the store's machine"
        );
        return Err(Refusal::new(StatusCode::CONFLICT, error));
    }
    let body = Bytes::from_owner(unsent);
    Ok(with(StatusCode::OK, "application/json", body))
}

impl From<PastError> for Refusal {
    fn from(error: PastError) -> Self {
        let status = match error {
            PastError::NoLog(_)
            | PastError::NoCopy(..)
            | PastError::Unfinished(_)
            | PastError::Refused(_) => StatusCode::CONFLICT,
            PastError::Policy(_) => StatusCode::UNPROCESSABLE_ENTITY,
            PastError::Missing(_)
            | PastError::Log(..)
            | PastError::Backup(..)
            | PastError::Unreadable(..)
            | PastError::Io(..) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, error.to_string())
    }
}

fn busy(error: &str) -> Refusal {
    Refusal::new(StatusCode::SERVICE_UNAVAILABLE, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(reader: &Reader, query: &str, store_bytes: u64) -> Result<Wanted, u16> {
        let uri = format!("/v1/replay?{query}").parse().unwrap();
        let wanted = reader.wanted(&uri, store_bytes);
        wanted.map_err(|refusal| refusal.status.as_u16())
    }

    fn reader(copied: Option<Arc<AtomicU64>>) -> Reader {
        Reader::new(Some(DataDirectory {
            path: "/none".into(),
            node: "StateStore".into(),
            copied,
        }))
    }

    /// It would answer with an old state as if that were the present one.
    #[tokio::test]
    async fn copy_that_has_ended_answers_nothing() {
        let copied = Arc::new(AtomicU64::new(7));
        let reader = reader(Some(copied.clone()));
        let uri: Uri = "/v1/value?key=k&as_of=0s".parse().unwrap();
        let refused = async || reader.value(&uri).await.unwrap_err();
        assert!(reader.is_current());
        let error = refused().await.error;
        assert!(error.contains("there is no directory /none"), "{error}");
        assert!(wanted(&reader, "", 0).is_ok());

        copied.store(0, Ordering::Relaxed);
        assert!(!reader.is_current());
        let refused = refused().await;
        assert_eq!(refused.status, StatusCode::MISDIRECTED_REQUEST);
        assert!(refused.error.contains("up to date"), "{}", refused.error);
        // A follower would refuse a replay too, and name this host as the leader.
        assert_eq!(wanted(&reader, "", 0).err(), Some(503));
    }

    #[test]
    fn one_replay_runs_at_a_time_and_large_stores_have_none() {
        let reader = reader(None);
        let first = wanted(&reader, "from=3&to=2026-11-21T03:00:00Z&limit=1", 0);
        let first = first.ok().unwrap();
        let third = Bound::LogPosition(statehouse_wal::LogPosition(3));
        assert_eq!(first.from, Some(Given::Exactly(third)));
        assert_eq!(wanted(&reader, "", 0).err(), Some(503));
        drop(first);
        assert!(wanted(&reader, "", 0).is_ok());
        let large = limits::ADMIN_REPLAY_STORE_BYTES_MAX + 1;
        assert_eq!(wanted(&reader, "", large).err(), Some(409));
        assert_eq!(wanted(&Reader::new(None), "", 0).err(), Some(409));
        for wrong in [
            "from=soon",
            "limit=-1",
            "limit=1001",
            "max_fuel=1",
            "to=%FF",
        ] {
            assert_eq!(wanted(&reader, wrong, 0).err(), Some(400), "{wrong}");
        }
    }

    /// Otherwise clients that read nothing would hold any number of large answers.
    #[tokio::test]
    async fn few_answers_are_in_memory_until_they_are_sent() {
        let reader = reader(None);
        let turn = |reader: &Reader| Turn {
            work: reader.reading.clone().try_acquire_owned().unwrap(),
            answer: reader.answers.clone().try_acquire_owned().unwrap(),
        };
        let mut unsent = Vec::new();
        for _ in 0..limits::ADMIN_PAST_ANSWERS_MAX {
            unsent.push(blocking(turn(&reader), || Ok(json!({}))).await.unwrap());
        }
        assert_eq!(reader.reading.available_permits(), 1);
        assert_eq!(reader.answers.available_permits(), 0);
        assert_eq!(wanted(&reader, "", 0).err(), Some(503));
        unsent.pop();
        assert_eq!(reader.answers.available_permits(), 1);
    }

    #[tokio::test]
    async fn reads_of_history_wait_for_each_other() {
        let reader = reader(None);
        let turn = reader.reading.clone().acquire_owned().await.unwrap();
        let uri: Uri = "/v1/history?key=k".parse().unwrap();
        let wait = std::time::Duration::from_millis(20);
        let waiting = tokio::time::timeout(wait, reader.history(&uri)).await;
        assert!(waiting.is_err());
        drop(turn);
        let error = reader.history(&uri).await.unwrap_err().error;
        assert!(error.contains("there is no directory /none"), "{error}");
    }
}
