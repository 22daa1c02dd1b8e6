//! Tasks of a leader in addition to the log: it answers challenges, watches the room in the engine,
//! and compacts the engine. No safety depends on them.

use std::convert::Infallible;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

use super::log::LeaderLog;
use crate::engine::{EngineError, KeyRange, Revision};
use crate::host::{Host, RETRY};
use crate::limits;

#[derive(Debug)]
pub(super) struct Chores<'a> {
    host: &'a Host,
    log: &'a LeaderLog,
    /// The revision at which the leadership began.
    since: Revision,
    compaction: Mutex<Compaction>,
    wakeup: Notify,
}

#[derive(Debug, Default)]
struct Compaction {
    /// The revision of the last truncation.
    truncated: Option<Revision>,
    /// The revision to which the engine should be compacted.
    due: Option<Revision>,
    /// The revision to which it was compacted.
    compacted: Option<Revision>,
    /// When there was little room for the first time, and the revision at that time.
    noted: Option<(Duration, Revision)>,
    /// Whether growth is refused, and the engine was compacted for it.
    has_refused: bool,
    /// Changes of the head that may still follow the last compaction so that the engine counts.
    counting_writes: u32,
}

impl<'a> Chores<'a> {
    pub(super) fn new(host: &'a Host, log: &'a LeaderLog, since: Revision) -> Self {
        Self {
            host,
            log,
            since,
            compaction: Mutex::default(),
            wakeup: Notify::new(),
        }
    }

    pub(super) async fn run(&self) {
        tokio::join!(self.answer_challenges(), self.watch_room(), self.compact());
    }

    /// A truncation was applied. The engine is compacted to the truncation before it, so that a
    /// host that joins at that moment can still read what it began to read.
    pub(super) fn truncated(&self, revision: Revision) {
        if !self.host.options.compacts {
            return;
        }
        let mut compaction = self.locked();
        let before = compaction.truncated.replace(revision);
        compaction.due = before.map(|it| Revision(it.0.saturating_sub(1)));
        if self.log.space().is_tight() {
            compaction.due = Some(revision);
        }
        drop(compaction);
        self.wakeup.notify_one();
    }

    fn locked(&self) -> std::sync::MutexGuard<'_, Compaction> {
        self.compaction
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Renews the lease when a follower challenges this leader.
    async fn answer_challenges(&self) -> Infallible {
        let mut from = Revision(self.since.0 + 1);
        loop {
            if let Err(error) = self.watch_challenges(&mut from).await {
                tracing::debug!("watching for challenges again: {error}");
                // The engine may have lost its majority, which operators should see now.
                _ = self.host.get_head().await;
            }
            self.host.clock.sleep(RETRY).await;
        }
    }

    async fn watch_challenges(&self, from: &mut Revision) -> Result<(), EngineError> {
        let range = KeyRange::of(&self.host.keys.challenge());
        let watch = self.host.engine.watch(&range, *from);
        let watch = match self.host.ask_server(watch).await {
            // The challenges in between are unknown, so they count as one.
            Err(EngineError::Compacted) => {
                self.log.renew();
                let value = self.host.attempt(self.host.engine.get(&range.from)).await?;
                *from = Revision(value.revision.0 + 1);
                return Ok(());
            }
            watch => watch,
        };
        let mut watch = watch?;
        while let Some(change) = watch.recv().await {
            change?;
            self.log.renew();
        }
        Ok(())
    }

    /// Asks the engine for its size and its quota, and reads the head. Until the first answer, the
    /// quota is the configured one, which may be too high.
    async fn watch_room(&self) -> Infallible {
        loop {
            let status = self.host.ask_server(self.host.engine.status()).await;
            if let Ok(status) = &status {
                self.host.fullness.observe(status);
                self.log.space().reported(status);
                self.count_after_compaction();
            }
            // Unlike the status, this needs the majority: it is the only call of an idle leader
            // that finds out whether the log can be reached.
            let newest = self.host.get_head().await.map(|it| it.revision);
            let is_answered = status.is_ok() && newest.is_ok();
            match status {
                Ok(status) => {
                    self.compact_early(newest.ok());
                    if !status.leads && is_answered {
                        // Without an answer, the present server is as good.
                        _ = self.host.engine.prefer_leader().await;
                    }
                }
                Err(error) => tracing::debug!("the size of etcd is unknown: {error}"),
            }
            let mut pause = self.host.options.timing.status;
            if !is_answered || self.log.space().is_tight() {
                pause /= limits::TIGHT_STATUS_DIVISOR;
            }
            self.host.clock.sleep(limits::REPORT_PACE).await;
            tokio::select! {
                biased;
                () = self.log.space().report_due() => {}
                () = self.host.clock.sleep(pause.saturating_sub(limits::REPORT_PACE)) => {}
            }
        }
    }

    /// Changes the head after a compaction while growth is refused. etcd counts the space that a
    /// compaction has freed at a later write, and without room no client may write.
    fn count_after_compaction(&self) {
        let mut compaction = self.locked();
        if compaction.counting_writes > 0 && !self.log.has_room() {
            compaction.counting_writes -= 1;
            self.log.renew();
        }
    }

    /// With little room the engine is compacted to the last truncation at once: a host that joins
    /// at that moment begins again. Keys that were deleted without a truncation, such as modules,
    /// are compacted when growth begins to be refused, and after [`limits::JOIN`]. `newest` is the
    /// newest revision, if it is known.
    fn compact_early(&self, newest: Option<Revision>) {
        if !self.log.space().is_tight() || !self.host.options.compacts {
            let mut compaction = self.locked();
            (compaction.noted, compaction.has_refused) = (None, false);
            return;
        }
        let Some(newest) = newest else {
            return;
        };
        let now = self.host.now();
        let mut compaction = self.locked();
        let (since, noted) = *compaction.noted.get_or_insert((now, newest));
        let refuses = !self.log.has_room();
        let has_refused = std::mem::replace(&mut compaction.has_refused, refuses);
        if refuses && !has_refused {
            // An earlier leader may have deleted much, and each change leaves an old head.
            compaction.due = Some(newest);
        } else if now.saturating_sub(since) >= limits::JOIN {
            compaction.due = Some(noted);
            compaction.noted = None;
        } else if compaction.truncated > compaction.compacted {
            compaction.due = compaction.truncated;
        }
        drop(compaction);
        self.wakeup.notify_one();
    }

    async fn compact(&self) -> Infallible {
        loop {
            self.wakeup.notified().await;
            let Some(due) = self.locked().due.take() else {
                continue;
            };
            match self.host.attempt(self.host.engine.compact(due)).await {
                Ok(()) => {
                    let mut compaction = self.locked();
                    compaction.compacted = Some(due);
                    compaction.counting_writes = limits::COUNTING_WRITES_MAX;
                }
                // The next truncation compacts to a later revision.
                Err(error) => tracing::debug!("etcd was not compacted: {error}"),
            }
            self.host.clock.sleep(Duration::from_millis(1)).await;
        }
    }
}
