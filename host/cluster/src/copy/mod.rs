//! A copy of the log on this host, for the tools that read a data directory.
//!
//! The copy follows the log on its own, in every role of this host. It never delays the
//! member: it takes what the member has just read or written ([`Feed`]), reads what it misses over
//! its own connection to the engine, and passes committed records only. The [`CopyStore`] is called
//! on threads that may block.
//!
//! If the log was truncated before the copy has read it, the copy starts over with the newest
//! snapshot, as often as necessary: an active cluster makes snapshots faster than a slow host reads
//! them. If the log does not continue the copy, the engine has lost committed records that only
//! the copy has, so the copy stays as it is and the host must stop.

pub(crate) mod store;
mod work;

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
use crate::frame::Frame;
use crate::head::{Head, Id, SnapshotInfo};
use crate::host::{Host, RETRY};
use crate::limits;
use crate::member::Member;
use crate::options::Options;
use store::{CopyError, CopyStore, Resumed};
use work::Work;

/// Keeps a copy of the log.
#[derive(Debug)]
pub struct LogCopy<S> {
    host: Arc<Host>,
    feed: Arc<Feed>,
    work: Arc<Mutex<Work<S>>>,
    /// The earlier copy that is continued.
    resumed: Option<Resumed>,
    /// The last snapshot that could not be read although the head named it, and how many attempts
    /// have failed.
    unreadable: Option<(u64, u32)>,
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
            resumed,
            unreadable: None,
        }
    }

    /// Copies until `stopped`, and closes the store then with all that the member has read and
    /// written before.
    pub async fn run(mut self, stopped: impl Future<Output = ()>) -> Result<(), CopyError> {
        tokio::select! {
            biased;
            () = stopped => {}
            ended = self.copy() => match ended? {},
        }
        // What the member has just written is in the copy too, unless it lacks what is before.
        let frames = self.feed.take().frames;
        let close = move |work: &mut Work<S>| {
            if work.has_begun {
                work.frames(frames)?;
                work.store.close(work.cursor.point())?;
            }
            Ok(())
        };
        match self.work(close).await {
            // The next start finds this out too.
            Err(CopyError::Differs(_)) => Ok(()),
            closed => closed,
        }
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
        let mut begins = match self.resumed {
            Some(Resumed { point, end, .. }) => {
                let cluster = self.locked().cluster;
                let confirmed = confirm(&self.host, cluster, point, end).await;
                // The member may not have read a head yet. Without this one, a copy that lacks
                // records would be taken for one that has caught up.
                let confirmed = confirmed.map(|head| self.feed.saw(&head));
                confirmed.map_err(CopyError::Log)
            }
            None => self.begin().await,
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
                    self.host.engine.next_endpoint();
                    self.host.clock.sleep(RETRY).await;
                    begins = self.begin().await;
                }
                Err(error) => return Err(error),
            }
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
        self.begin_snapshot(named).await?;
        self.copy_pieces(paging).await?;
        self.work(|work| {
            work.end_snapshot()?;
            work.store.flush(work.cursor.point())
        })
        .await
    }

    async fn head(&self) -> Result<Head, Stop> {
        let cluster = self.locked().cluster;
        head(&self.host, cluster).await
    }

    /// Begins with the newest snapshot, or with the first record.
    async fn begin(&self) -> Result<(), CopyError> {
        let head = self.head().await?;
        let begun_ms = match &head.snapshot {
            Some(info) => self.begun_ms(info).await,
            None => None,
        };
        let begun_ms = begun_ms.unwrap_or(head.now_ms);
        self.work(move |work| work.begin(&head, begun_ms)).await
    }

    /// Begins to copy the newest snapshot, if the store does not have it.
    async fn begin_snapshot(
        &self,
        named: Option<(SnapshotInfo, LogPosition)>,
    ) -> Result<(), CopyError> {
        let Some((info, complete)) = named.filter(|it| self.locked().wants(&it.0)) else {
            return Ok(());
        };
        let begun_ms = self.begun_ms(&info).await;
        self.work(move |work| {
            let begun_ms = begun_ms.unwrap_or(work.cursor.now_ms);
            work.begin_snapshot(info, complete, begun_ms)
        })
        .await
    }

    /// The store's time at which a snapshot begins: that of the first frame after its beginning, if
    /// there is one. The head and the last frame can be much later: reads change the head too, and
    /// the snapshot takes its time.
    async fn begun_ms(&self, info: &SnapshotInfo) -> Option<u64> {
        let frame = first_frame(&self.host, info.first_seq, &mut Paging::new()).await?;
        Frame::decode(&frame).ok().map(|it| it.now_ms)
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
            if self.head().await?.oldest_needed() > before + 1 {
                let why = "the log was truncated before this host has copied it";
                return Err(CopyError::Differs(why));
            }
            mismatches += 1;
            if mismatches > limits::MISMATCHES_MAX {
                let end = self.locked().cursor.position;
                return Err(Stop::CopyIsAhead(end).into());
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
        let range = self.host.keys.pieces_from(info.id, next);
        let values = match self.host.read_page(&range, None, paging).await {
            Ok(None) => return Ok(()),
            Ok(Some(page)) => page.values,
            Err(error) => {
                tracing::debug!("reading the snapshot again: {error}");
                self.host.clock.sleep(limits::COPY_RETRY).await;
                return Ok(());
            }
        };
        let host = Arc::clone(&self.host);
        match self.work(move |work| work.pieces(&host, &values)).await {
            Err(CopyError::Differs(why)) => self.snapshot_differs(info.id, why).await,
            done => done,
        }
    }

    /// The pieces that were read are not this snapshot: a newer one has replaced it, or the server
    /// is damaged. Fails with [`CopyError::Differs`] if the copy must start over, and with
    /// [`Stop::Damaged`] if the head still names the snapshot after some attempts.
    async fn snapshot_differs(&mut self, id: u64, why: &'static str) -> Result<(), CopyError> {
        let is_named = self.head().await?.snapshot.is_some_and(|it| it.id == id);
        if is_named {
            let before = self.unreadable.filter(|it| it.0 == id);
            let attempts = before.map_or(1, |it| it.1 + 1);
            if attempts > limits::MISMATCHES_MAX {
                return Err(Stop::Damaged(why.to_owned()).into());
            }
            self.unreadable = Some((id, attempts));
        }
        let why = match is_named {
            true => why,
            false => "a newer snapshot has replaced the one that it was copying",
        };
        if self.locked().lacks_base {
            return Err(CopyError::Differs(why));
        }
        // The log is whole without it.
        tracing::debug!("a snapshot was not copied: {why}");
        self.host.engine.next_endpoint();
        self.work(|work| {
            work.cancel_snapshot();
            Ok(())
        })
        .await
    }
}

/// Checks that the log continues a copy that ends at `point`. It does not if the engine was
/// restored from a backup. Fails with [`Stop::CopyIsAhead`], or if the log cannot be read.
pub async fn confirm_copy(
    engine: Arc<dyn Engine>,
    clock: Arc<dyn Clock>,
    options: Options,
    cluster: Id,
    point: LogPoint,
) -> Result<(), Stop> {
    let host = Host::new(engine, clock, options);
    confirm(&host, cluster, point, point.position)
        .await
        .map(drop)
}

/// Checks that the log continues a copy at `point`, and has its last record, `end`. Returns the
/// head.
async fn confirm(
    host: &Host,
    cluster: Id,
    point: LogPoint,
    end: LogPosition,
) -> Result<Head, Stop> {
    let mut paging = Paging::new();
    for _ in 0..limits::MISMATCHES_MAX {
        let head = head(host, cluster).await?;
        let has_end = head.position >= end;
        if has_end && head.seq == point.seq && head.chain == point.chain {
            return Ok(head);
        }
        if has_end && head.seq > point.seq {
            // The frame is missing if it was truncated, or read from a server that lags behind.
            let next = first_frame(host, point.seq + 1, &mut paging).await;
            let mut copy = Cursor::at(point);
            let is_continued = match &next {
                Some(frame) => copy.accept(frame, |_, _| Ok::<_, Stop>(()))? != Accepted::Mismatch,
                None => head.oldest_needed() > point.seq + 1,
            };
            if is_continued {
                return Ok(head);
            }
        }
        host.engine.next_endpoint();
        host.clock.sleep(RETRY).await;
    }
    Err(Stop::CopyIsAhead(end))
}

/// The head, as soon as the engine answers.
async fn head(host: &Host, cluster: Id) -> Result<Head, Stop> {
    let value = loop {
        match host.get_head().await {
            Ok(value) => break value.value,
            Err(error) => tracing::debug!("reading the head again: {error}"),
        }
        host.clock.sleep(limits::COPY_RETRY).await;
    };
    let missing = || Stop::NotCreated(host.options.cluster.clone());
    let head = Head::decode(&value.ok_or_else(missing)?).map_err(Stop::Head)?;
    match head.cluster == cluster {
        true => Ok(head),
        false => Err(Stop::Damaged(
            "another cluster has replaced this one".into(),
        )),
    }
}

/// The frame with this number, if the engine has it.
async fn first_frame(host: &Host, seq: u64, paging: &mut Paging) -> Option<Bytes> {
    loop {
        match host
            .read_page(&host.keys.frames_from(seq), None, paging)
            .await
        {
            Ok(None) => {}
            Ok(Some(page)) => {
                let (key, frame) = page.values.into_iter().next()?;
                return (key == host.keys.frame(seq)).then_some(frame);
            }
            Err(error) => {
                tracing::debug!("reading the log again: {error}");
                host.clock.sleep(limits::COPY_RETRY).await;
            }
        }
    }
}
