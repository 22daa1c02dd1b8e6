//! The follower: applies the log, and campaigns if the leader is silent or has released.
//!
//! A frame counts only if its sequence number and its chain continue the log. So faulty reads and
//! watches can delay a follower but never mislead it.

mod campaign;
mod join;
mod suspicion;

use std::time::Duration;

use bytes::Bytes;
use statehouse_protocol::LogPosition;

use crate::cursor::{Accepted, Cursor};
use crate::embedder::Embedder;
use crate::engine::{Change, EngineError, Paging, Revision, Value, Watch};
use crate::error::Stop;
use crate::head::Head;
use crate::host::{Host, RETRY, check_continues};
use crate::leader::Won;
use crate::limits;
use crate::member::Signals;
use crate::presence::Role;
pub(crate) use join::join;
use suspicion::Suspicion;

#[derive(Debug)]
pub(crate) struct Follower<'a> {
    host: &'a Host,
    signals: &'a Signals,
    /// What was applied.
    cursor: Cursor,
    seen: Seen,
    /// Bytes of frames since the newest snapshot, approximately.
    log_bytes: u64,
    /// When the last frame was applied.
    frame_at: Duration,
    /// Consecutive attempts to read the next frame that did not find it.
    mismatches: u32,
    /// Heads that a read found before the watch, since the last change that the watch reported.
    missed: u32,
}

#[derive(Clone, Debug)]
struct Seen {
    head: Head,
    bytes: Bytes,
    /// When this host first saw this value. The leader sent it before.
    at: Duration,
}

impl Follower<'_> {
    /// Follows the log by a watch that begins after the last read frame, until this host wins a
    /// campaign. `None` if the log was truncated before this host could read it.
    pub(crate) async fn follow(
        mut self,
        mut watch: Watch,
        embedder: &mut dyn Embedder,
    ) -> Result<Option<Won>, Stop> {
        let mut suspicion = Suspicion::new(self.host.now());
        let mut announced = None;
        loop {
            while self.cursor.seq < self.seen.head.seq {
                if !self.catch_up(embedder).await? {
                    return Ok(None);
                }
            }
            if suspicion.may_campaign(&self)
                && let Some(won) = self.campaign(&mut suspicion, embedder).await?
            {
                return Ok(Some(won));
            }
            let epoch = Some(self.seen.head.epoch);
            if announced != epoch {
                announced = epoch;
                embedder.following(&self.seen.head);
                self.describe(embedder);
            }
            let wait = suspicion.next_at.saturating_sub(self.host.now());
            tokio::select! {
                biased;
                change = watch.recv() => match change {
                    Some(Ok(change)) => {
                        self.missed = 0;
                        self.change(change, embedder)?;
                    }
                    ended => {
                        tracing::debug!("the watch ended: {ended:?}");
                        watch = self.watch_again().await?;
                        suspicion.engine_failed();
                    }
                },
                () = self.signals.describe.notified() => self.describe(embedder),
                () = self.signals.suspect.notified() => suspicion.suspect(self.host.now()),
                () = self.host.clock.sleep(wait) => suspicion.tick(&mut self).await?,
            }
            if self.missed >= limits::MISSED_HEADS_MAX {
                watch = self.watch_again().await?;
            }
            suspicion.saw(&self.seen.head, &self.host.options.host);
        }
    }

    fn describe(&self, embedder: &mut dyn Embedder) {
        let (presence, epoch) = (&self.signals.presence, self.seen.head.epoch);
        presence.describe(self.host, Role::Following, epoch, embedder);
    }

    /// Watches from the newest head on. The frames before it are read.
    async fn watch_again(&mut self) -> Result<Watch, Stop> {
        let range = self.host.keys.followed();
        self.missed = 0;
        self.host.engine.next_endpoint();
        loop {
            if let Ok(value) = self.host.get_head().await {
                let from = Revision(value.revision.0 + 1);
                self.read_head(value)?;
                let call = self.host.engine.watch(&range, from);
                match self.host.ask_server(call).await {
                    Ok(watch) => return Ok(watch),
                    Err(EngineError::Compacted) => self.host.engine.next_endpoint(),
                    // The failed attempt has changed the server.
                    Err(_) => {}
                }
            }
            self.host.clock.sleep(RETRY).await;
        }
    }

    /// Applies a change that the watch reported.
    fn change(&mut self, change: Change, embedder: &mut dyn Embedder) -> Result<(), Stop> {
        // A deleted key is a truncated frame; the head says so too.
        let Some(value) = change.value else {
            return Ok(());
        };
        if change.key == self.host.keys.head() {
            self.saw_head(value)?;
        } else if self.host.keys.is_frame(&change.key) {
            // A frame that does not continue the log is read again when the head says that it is
            // committed.
            self.frame(&value, embedder)?;
        }
        Ok(())
    }

    /// Takes note of a value of the head. Older values are ignored. Returns whether it is newer.
    fn saw_head(&mut self, bytes: Bytes) -> Result<bool, Stop> {
        let head = self.host.head(&bytes)?;
        let known = &self.seen.head;
        if head.cluster != known.cluster {
            return Err(Stop::Damaged(
                "another cluster has replaced this one".into(),
            ));
        }
        if head.order() <= known.order() {
            if head.order() == known.order() && bytes != self.seen.bytes {
                return Err(Stop::Damaged("two heads have the same number".into()));
            }
            return Ok(false);
        }
        check_continues(&head, known)?;
        if head.snapshot != known.snapshot {
            self.log_bytes = 0;
        }
        self.host.figures.saw(&head, self.log_bytes);
        self.host.feed.saw(&head);
        self.seen = Seen {
            head,
            bytes,
            at: self.host.now(),
        };
        Ok(true)
    }

    /// Takes note of the head that a read returned. A server without the head is behind.
    fn read_head(&mut self, value: Value) -> Result<bool, Stop> {
        value.value.map_or(Ok(false), |bytes| self.saw_head(bytes))
    }

    fn frame(&mut self, bytes: &Bytes, embedder: &mut dyn Embedder) -> Result<Accepted, Stop> {
        let accepted = self.cursor.accept(bytes, |first, records| {
            for (record, number) in records.iter().zip(first.0..) {
                let applied = embedder.record(LogPosition(number), record);
                applied.map_err(Stop::Embedder)?;
            }
            Ok::<_, Stop>(())
        })?;
        if accepted == Accepted::Applied {
            self.mismatches = 0;
            self.log_bytes += bytes.len() as u64;
            self.frame_at = self.host.now();
            self.host.feed.frame(bytes);
            let figures = &self.host.figures;
            figures.applied(self.cursor.position, self.log_bytes);
            let snapshot = self.seen.head.snapshot;
            if snapshot.is_some_and(|it| it.first_seq == self.cursor.seq) {
                figures.snapshot_began(self.cursor.now_ms);
            }
        }
        Ok(accepted)
    }

    /// Reads the frames up to the head. Returns false if the host must join again.
    async fn catch_up(&mut self, embedder: &mut dyn Embedder) -> Result<bool, Stop> {
        match self.read_frames(embedder).await? {
            Ok(Accepted::Mismatch) => {}
            Ok(_) if self.cursor.seq >= self.seen.head.seq => return Ok(true),
            Ok(_) => {}
            Err(error) => {
                tracing::debug!("reading the log again: {error}");
                self.host.clock.sleep(RETRY).await;
                return Ok(true);
            }
        }
        // Either the server is behind, or the frame was truncated, or the server is damaged.
        // A failed attempt changes the server.
        if let Ok(value) = self.host.get_head().await {
            self.read_head(value)?;
            self.host.engine.next_endpoint();
        }
        self.mismatches += 1;
        if self.mismatches > limits::MISMATCHES_MAX || self.seen.head.oldest > self.cursor.seq + 1 {
            return Ok(false);
        }
        self.host.clock.sleep(RETRY).await;
        Ok(true)
    }

    /// Reads and applies the newest frames until a page brings nothing new.
    async fn read_frames(
        &mut self,
        embedder: &mut dyn Embedder,
    ) -> Result<Result<Accepted, EngineError>, Stop> {
        let mut paging = Paging::new();
        loop {
            let range = self.host.keys.frames_from(self.cursor.seq + 1);
            let page = match self.host.read_page(&range, None, &mut paging).await {
                Ok(Some(page)) => page,
                Ok(None) => continue,
                Err(error) => return Ok(Err(error)),
            };
            for (_, value) in &page.values {
                if self.frame(value, embedder)? == Accepted::Mismatch {
                    return Ok(Ok(Accepted::Mismatch));
                }
            }
            if !page.more {
                return Ok(Ok(Accepted::Applied));
            }
        }
    }
}
