//! What the member has just read or written of the log, for a copy of the log on this host.
//!
//! So a copy needs no reads of its own while it keeps up. The feed drops frames rather than to
//! grow, and may begin anywhere: the copy reads what it misses from the engine.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use statehouse_protocol::LogPosition;
use tokio::sync::Notify;

use crate::clock::Clock;
use crate::head::{Head, SnapshotInfo};
use crate::limits;

/// Frames and heads for a copy of the log.
#[derive(Debug, Default)]
pub(crate) struct Feed {
    is_wanted: AtomicBool,
    news: Mutex<News>,
    changed: Notify,
    /// There is so much that the copy should not wait for more.
    full: Notify,
}

/// What happened since the last look.
#[derive(Debug, Default)]
pub(crate) struct News {
    /// Committed frames in the order of the log, possibly with gaps.
    pub(crate) frames: VecDeque<Bytes>,
    bytes: usize,
    /// The last frame of the newest head.
    pub(crate) seq: u64,
    /// The newest snapshot, and the last record that is known to be committed. The snapshot
    /// contains no effect of a later record.
    pub(crate) named: Option<(SnapshotInfo, LogPosition)>,
}

impl Feed {
    fn news(&self) -> MutexGuard<'_, News> {
        self.news.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A copy begins or ends. Without one the feed holds nothing.
    pub(crate) fn set_wanted(&self, is_wanted: bool) {
        self.is_wanted.store(is_wanted, Ordering::Release);
        let mut news = self.news();
        news.frames = VecDeque::new();
        news.bytes = 0;
    }

    /// A frame is committed.
    pub(crate) fn frame(&self, frame: &Bytes) {
        if !self.is_wanted.load(Ordering::Acquire) {
            return;
        }
        let mut news = self.news();
        if news.bytes + frame.len() > limits::FEED_BYTES_MAX {
            news.frames.clear();
            news.bytes = 0;
        }
        news.bytes += frame.len();
        news.frames.push_back(frame.clone());
        let is_full = news.bytes > limits::FEED_BYTES_MAX / 2;
        drop(news);
        self.changed.notify_one();
        if is_full {
            self.full.notify_one();
        }
    }

    /// A head is committed.
    pub(crate) fn saw(&self, head: &Head) {
        let mut news = self.news();
        let is_new = head.seq > news.seq;
        news.seq = news.seq.max(head.seq);
        let named = news.named.map(|(info, _)| info.id);
        let renamed = head.snapshot.filter(|info| Some(info.id) > named);
        if let Some(info) = renamed {
            news.named = Some((info, head.position));
        }
        drop(news);
        if is_new || renamed.is_some() {
            self.changed.notify_one();
        }
    }

    /// Takes what is new.
    pub(crate) fn take(&self) -> News {
        let mut news = self.news();
        let (seq, named) = (news.seq, news.named);
        let taken = std::mem::take(&mut *news);
        (news.seq, news.named) = (seq, named);
        taken
    }

    /// Waits for a change, at most so long. After a change it waits a moment more, so that an
    /// active leader does not cause a write to the disk for each frame.
    pub(crate) async fn wait(&self, clock: &dyn Clock, limit: Duration) {
        tokio::select! {
            biased;
            () = self.changed.notified() => {}
            () = clock.sleep(limit) => return,
        }
        tokio::select! {
            biased;
            () = self.full.notified() => {}
            () = clock.sleep(limits::COPY_PACE) => {}
        }
    }
}
