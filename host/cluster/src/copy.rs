//! A copy of the log on this host, for the tools that read a data directory.
//!
//! The copy follows the log on its own, in every role of this host. It never delays the
//! member: it takes what the member has just read or written ([`Feed`]), reads what it misses over
//! its own connection to the engine, and passes committed records only. The [`CopyStore`] is called
//! on threads that may block.
//!
//! If the log was truncated before the copy has read it, the copy starts over with the newest
//! snapshot.

use std::convert::Infallible;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use statehouse_protocol::LogPosition;

use crate::clock::Clock;
use crate::cursor::{Accepted, Cursor, LogPoint};
use crate::engine::{Engine, Paging};
use crate::error::Stop;
use crate::feed::Feed;
use crate::head::{Head, Id, SnapshotInfo};
use crate::host::{Host, RETRY};
use crate::limits;
use crate::member::Member;
use crate::options::Options;
use crate::pieces::{self, Differs, Pieces};

/// Where a copy is kept. Methods may block.
pub trait CopyStore: Send + 'static {
    /// Begins a copy without the records up to `after`. A copy that is in use stays so until the
    /// new one is complete: at once if `after` is no record, else after its first snapshot.
    ///
    /// # Errors
    /// [`CopyError::Store`] ends the copy, as for all methods.
    fn begin(&mut self, after: LogPosition) -> Result<(), CopyError>;
    /// Adds the records from this position on, all of them or none. Records that the store holds
    /// already may be passed again.
    ///
    /// # Errors
    /// [`CopyError::Differs`] if the store holds another record at a position.
    fn records(&mut self, first: LogPosition, records: &[&[u8]]) -> Result<(), CopyError>;
    /// Begins a snapshot. Its blocks follow.
    ///
    /// # Errors
    /// See [`Self::begin`].
    fn begin_snapshot(&mut self, snapshot: &SnapshotInfo) -> Result<(), CopyError>;
    /// Adds a block of the snapshot.
    ///
    /// # Errors
    /// See [`Self::begin`].
    fn block(&mut self, block: &[u8]) -> Result<(), CopyError>;
    /// Ends the snapshot. Its blocks contain effects of no record after `complete`, which the store
    /// has.
    ///
    /// # Errors
    /// See [`Self::begin`].
    fn end_snapshot(&mut self, complete: LogPosition, point: LogPoint) -> Result<(), CopyError>;
    /// Discards the snapshot that was begun.
    fn cancel_snapshot(&mut self);
    /// All new records were passed; `point` is behind them. Returns after which time the store
    /// wants to be called again, even if nothing happens.
    ///
    /// # Errors
    /// See [`Self::begin`].
    fn flush(&mut self, point: Option<LogPoint>) -> Result<Duration, CopyError>;
    /// The host stops.
    ///
    /// # Errors
    /// See [`Self::begin`].
    fn close(&mut self, point: Option<LogPoint>) -> Result<(), CopyError>;
}

/// Why a copy ended.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The copy is not a part of the log. It starts over.
    #[error("{0}")]
    Differs(&'static str),
    /// The copy cannot be kept.
    #[error("{0}")]
    Store(String),
    /// The log cannot be read.
    #[error(transparent)]
    Log(#[from] Stop),
}

impl From<Differs> for CopyError {
    fn from(Differs(what): Differs) -> Self {
        Self::Differs(what)
    }
}

/// Where an earlier copy ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resumed {
    /// The place to read on. The store may hold later records too.
    pub point: LogPoint,
    /// The position of the newest snapshot in the store.
    pub snapshot: LogPosition,
}

/// Keeps a copy of the log.
#[derive(Debug)]
pub struct LogCopy<S> {
    host: Arc<Host>,
    feed: Arc<Feed>,
    work: Arc<Mutex<Work<S>>>,
    resumes: bool,
    /// Attempts in a row that found no usable log or snapshot.
    failures: u32,
}

/// What threads that may block use.
#[derive(Debug)]
struct Work<S> {
    store: S,
    cluster: Id,
    cursor: Cursor,
    /// The position of the newest snapshot in the store.
    copied: LogPosition,
    snapshot: Option<Running>,
    /// Whether the store has a copy, complete or not.
    has_begun: bool,
    /// Whether the store has no snapshot to begin with yet.
    lacks_base: bool,
}

/// A snapshot that is being copied.
#[derive(Debug)]
struct Running {
    pieces: Pieces,
    /// A position after which no effect can be in the snapshot.
    complete: LogPosition,
}

impl<S> Drop for LogCopy<S> {
    fn drop(&mut self) {
        self.feed.set_wanted(false);
    }
}

impl<S: CopyStore> LogCopy<S> {
    /// A copy of the log of `member`, which must have the same settings. The engine should have
    /// connections of its own, so that large answers do not delay the member.
    #[must_use]
    pub fn new(
        engine: Arc<dyn Engine>,
        clock: Arc<dyn Clock>,
        options: Options,
        (member, cluster): (&Member, Id),
        store: S,
        resumed: Option<Resumed>,
    ) -> Self {
        let feed = member.feed();
        feed.set_wanted(true);
        let work = Work {
            store,
            cluster,
            cursor: match resumed {
                Some(it) => Cursor::at(it.point),
                None => Cursor::after(None, cluster),
            },
            copied: resumed.map_or(LogPosition::NONE, |it| it.snapshot),
            snapshot: None,
            has_begun: resumed.is_some(),
            lacks_base: false,
        };
        Self {
            host: Arc::new(Host::new(engine, clock, options)),
            feed,
            work: Arc::new(Mutex::new(work)),
            resumes: resumed.is_some(),
            failures: 0,
        }
    }

    /// Copies until `stopped`, and closes the store then with all that the member has read and
    /// written before.
    ///
    /// # Errors
    /// Why the copy ended before.
    pub async fn run(mut self, stopped: impl Future<Output = ()>) -> Result<(), CopyError> {
        tokio::select! {
            biased;
            () = stopped => {}
            ended = self.copy() => match ended? {},
        }
        // What the member has just written is in the copy too, unless it lacks what is before.
        let frames = self.feed.take().frames;
        self.work(move |work| match work.has_begun {
            true => {
                work.frames(frames)?;
                work.store.close(work.cursor.point())
            }
            false => Ok(()),
        })
        .await
    }

    fn locked(&self) -> MutexGuard<'_, Work<S>> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `f` on a thread that may block.
    async fn work<T: Send + 'static>(
        &self,
        f: impl FnOnce(&mut Work<S>) -> Result<T, CopyError> + Send + 'static,
    ) -> Result<T, CopyError> {
        let work = Arc::clone(&self.work);
        let ran = tokio::task::spawn_blocking(move || {
            f(&mut work.lock().unwrap_or_else(PoisonError::into_inner))
        });
        let failed = |error| CopyError::Store(format!("a thread of the copy failed: {error}"));
        ran.await.map_err(failed)?
    }

    async fn copy(&mut self) -> Result<Infallible, CopyError> {
        let mut begins = match self.resumes {
            true => self.confirm().await,
            false => self.begin().await,
        };
        let mut wait = Duration::ZERO;
        let mut paging = Paging::new();
        loop {
            let round = match begins {
                Ok(()) => self.round(wait, &mut paging).await,
                Err(error) => Err(error),
            };
            begins = Ok(());
            match round {
                Ok(next) => wait = next,
                Err(CopyError::Differs(why)) => {
                    tracing::warn!("the history of this host starts over: {why}");
                    self.failed(why)?;
                    self.host.clock.sleep(RETRY).await;
                    begins = self.begin().await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Counts a failure. Each is tried again at another server.
    fn failed(&mut self, why: &'static str) -> Result<(), CopyError> {
        self.failures += 1;
        self.host.engine.next_endpoint();
        match self.failures > limits::MISMATCHES_MAX {
            true => Err(Stop::Damaged(why.to_owned()).into()),
            false => Ok(()),
        }
    }

    /// Copies what is new. Returns how long to wait at most before the next call.
    async fn round(&mut self, wait: Duration, paging: &mut Paging) -> Result<Duration, CopyError> {
        let next = self.locked().next_piece();
        match next {
            Some(_) => self.host.clock.sleep(limits::COPY_PAGE_PACE).await,
            None => self.feed.wait(&*self.host.clock, wait).await,
        }
        let news = self.feed.take();
        let (seq, named) = (news.seq, news.named);
        self.work(move |work| work.frames(news.frames)).await?;
        self.catch_up(seq).await?;
        self.work(move |work| work.begin_snapshot(named)).await?;
        self.copy_pieces(paging).await?;
        let (is_copied, wait) = self
            .work(|work| Ok((work.end_snapshot()?, work.store.flush(work.cursor.point())?)))
            .await?;
        if is_copied {
            self.failures = 0;
        }
        Ok(wait)
    }

    /// The head, as soon as the engine answers.
    async fn head(&self) -> Result<Head, CopyError> {
        loop {
            if let Ok(value) = self.host.get_head().await
                && let Some(bytes) = value.value
            {
                let head = Head::decode(&bytes).map_err(Stop::Head)?;
                return match head.cluster == self.locked().cluster {
                    true => Ok(head),
                    false => {
                        Err(Stop::Damaged("another cluster has replaced this one".into()).into())
                    }
                };
            }
            self.host.clock.sleep(limits::COPY_RETRY).await;
        }
    }

    /// Begins with the newest snapshot, or with the first record.
    async fn begin(&self) -> Result<(), CopyError> {
        let head = self.head().await?;
        self.work(move |work| work.begin(&head)).await
    }

    /// Checks that an earlier copy is a part of the log. It is not if the engine was restored from
    /// a backup.
    async fn confirm(&self) -> Result<(), CopyError> {
        for _ in 0..limits::MISMATCHES_MAX {
            let head = self.head().await?;
            let (seq, chain) = {
                let cursor = &self.locked().cursor;
                (cursor.seq, cursor.chain)
            };
            if head.seq > seq || head.seq == seq && head.chain == chain {
                return Ok(());
            }
            self.host.engine.next_endpoint();
            self.host.clock.sleep(RETRY).await;
        }
        Err(CopyError::Differs(
            "the log of the cluster has lost records that this host copied",
        ))
    }

    /// Reads the frames up to `seq` that are missing.
    async fn catch_up(&self, seq: u64) -> Result<(), CopyError> {
        let (mut paging, mut mismatches) = (Paging::new(), 0);
        loop {
            let before = self.locked().cursor.seq;
            if before >= seq {
                return Ok(());
            }
            let range = self.host.keys.frames_from(before + 1);
            match self.host.read_page(&range, None, &mut paging).await {
                Ok(None) => continue,
                Ok(Some(page)) => {
                    let frames = page.values.into_iter().map(|(_, frame)| frame);
                    let frames: Vec<Bytes> = frames.collect();
                    let after = self.work(move |work| work.frames(frames)).await?;
                    if after > before {
                        mismatches = 0;
                        self.host.clock.sleep(limits::COPY_PAGE_PACE).await;
                        continue;
                    }
                }
                Err(error) => {
                    tracing::debug!("reading the log again: {error}");
                    self.host.clock.sleep(limits::COPY_RETRY).await;
                    continue;
                }
            }
            if self.head().await?.oldest > before + 1 {
                let why = "the log was truncated before this host has copied it";
                return Err(CopyError::Differs(why));
            }
            mismatches += 1;
            if mismatches > limits::MISMATCHES_MAX {
                let why = "the log of the cluster does not continue the copy";
                return Err(CopyError::Differs(why));
            }
            self.host.engine.next_endpoint();
            self.host.clock.sleep(RETRY).await;
        }
    }

    /// Copies a page of the snapshot, if one is being copied.
    async fn copy_pieces(&mut self, paging: &mut Paging) -> Result<(), CopyError> {
        let next = self.locked().next_piece();
        let Some((info, next)) = next else {
            return Ok(());
        };
        let values = match pieces::read(&self.host, &info, next, None, paging).await {
            Ok(None) => return Ok(()),
            Ok(Some(values)) => values,
            Err(error) => {
                tracing::debug!("reading the snapshot again: {error}");
                self.host.clock.sleep(limits::COPY_RETRY).await;
                return Ok(());
            }
        };
        let host = Arc::clone(&self.host);
        match self.work(move |work| work.pieces(&host, &values)).await {
            // A newer snapshot may have replaced it. The log is whole without it.
            Err(CopyError::Differs(why)) if !self.locked().lacks_base => {
                tracing::debug!("a snapshot was not copied: {why}");
                self.work(|work| {
                    work.cancel_snapshot();
                    Ok(())
                })
                .await?;
                if self.head().await?.snapshot.map(|it| it.id) == Some(info.id) {
                    self.failed(why)?;
                }
                Ok(())
            }
            done => done,
        }
    }
}

impl<S: CopyStore> Work<S> {
    fn begin(&mut self, head: &Head) -> Result<(), CopyError> {
        self.cancel_snapshot();
        self.cursor = Cursor::after(head.snapshot.as_ref(), self.cluster);
        self.copied = LogPosition::NONE;
        self.store.begin(self.cursor.position)?;
        self.has_begun = true;
        self.lacks_base = head.snapshot.is_some();
        self.begin_snapshot(head.snapshot.map(|info| (info, head.position)))
    }

    /// Adds frames up to the first one that does not continue the copy. Returns the last frame.
    fn frames(&mut self, frames: impl IntoIterator<Item = Bytes>) -> Result<u64, CopyError> {
        let store = &mut self.store;
        for frame in frames {
            let sink = |first, records: &[&[u8]]| store.records(first, records);
            if self.cursor.accept(&frame, sink)? == Accepted::Mismatch {
                break;
            }
        }
        Ok(self.cursor.seq)
    }

    /// Begins to copy the newest snapshot, if the store does not have it.
    fn begin_snapshot(
        &mut self,
        named: Option<(SnapshotInfo, LogPosition)>,
    ) -> Result<(), CopyError> {
        let Some((info, complete)) = named else {
            return Ok(());
        };
        let position = info.begins_after();
        let is_new = position > self.copied && position <= self.cursor.position;
        if is_new && self.snapshot.is_none() {
            self.store.begin_snapshot(&info)?;
            self.snapshot = Some(Running {
                pieces: Pieces::new(info),
                complete,
            });
        }
        Ok(())
    }

    /// The snapshot that is being copied, and its next piece.
    fn next_piece(&self) -> Option<(SnapshotInfo, u32)> {
        let running = self.snapshot.as_ref()?;
        let pieces = &running.pieces;
        (!pieces.is_complete()).then(|| (pieces.info, pieces.next()))
    }

    fn pieces(&mut self, host: &Host, values: &[(Vec<u8>, Bytes)]) -> Result<(), CopyError> {
        let store = &mut self.store;
        match &mut self.snapshot {
            Some(it) => it.pieces.accept(host, values, |block| store.block(block)),
            None => Ok(()),
        }
    }

    fn cancel_snapshot(&mut self) {
        if self.snapshot.take().is_some() {
            self.store.cancel_snapshot();
        }
    }

    /// Ends the snapshot once it and the records that it can contain are copied. Returns whether it
    /// did.
    fn end_snapshot(&mut self) -> Result<bool, CopyError> {
        let (Some(running), Some(point)) = (&self.snapshot, self.cursor.point()) else {
            return Ok(false);
        };
        if !running.pieces.is_complete() || self.cursor.position < running.complete {
            return Ok(false);
        }
        self.store.end_snapshot(running.complete, point)?;
        self.copied = running.pieces.info.begins_after();
        self.snapshot = None;
        self.lacks_base = false;
        Ok(true)
    }
}
