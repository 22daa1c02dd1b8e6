//! The state that a follower rebuilds from the log, and the store that runs on it while this host
//! leads.
//!
//! All state of a leadership belongs to [`Leading`], which is dropped at its end: the store may be
//! ahead of the log by then.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use statehouse_cluster::{Clock as _, Description, Embedder, Ended, Head, MachineClock, Takeover};
use statehouse_mqtt::Broker;
use statehouse_protocol::LogPosition;

use super::clock_offset::LeaderClock;
use super::log::ClusterLog;
use crate::data_directory::SnapshotCursor;
use statehouse_config::limits;
use statehouse_core::clock::{Clock, SystemSource, wall_ms};
use statehouse_core::log::Image;
use statehouse_core::log::record;
use statehouse_core::store::Mode;
use statehouse_server::Server;

/// What the program does when the role of this host changes.
pub trait Roles: Send {
    /// An image without state.
    fn empty(&self) -> Image;

    /// Whether this host has every policy that the image names. Fails with a text for the operator
    /// that says what is missing.
    fn may_lead(&self, image: &Image) -> Result<(), String>;

    /// The log names the policies of the image. Called when they or their roles may have changed.
    fn name(&mut self, image: &Image);

    /// What operators should know of this host.
    fn describe(&self, image: &Image) -> Description;

    /// This host follows the leader that the head names.
    fn follow(&mut self, head: &Head);

    /// This host leads: runs a store on the image, and serves clients. Must not wait. Fails if the
    /// store cannot run; then the leadership is handed over.
    fn lead(&mut self, image: Image, log: ClusterLog, clock: Clock) -> anyhow::Result<Leading>;

    /// This host does not lead any more. `leading` is the store that must end.
    fn end(&mut self, leading: Leading, ended: Ended);
}

/// The running store of a leadership.
pub struct Leading {
    /// The store.
    pub server: Arc<Server>,
    /// The broker of its clients.
    pub broker: Broker,
}

/// A follower's state, or a leader's store.
pub struct Replica<R> {
    roles: R,
    image: Image,
    leading: Option<Leading>,
    /// The last time that the store of a leadership has read, in ms. Its clock is behind the
    /// store's lock, which a policy can hold for long.
    store_ms: Option<Arc<AtomicU64>>,
    /// The last time in the log before the opening of a leadership of this host, which has the time
    /// of its own clock.
    followed_ms: u64,
    snapshot: SnapshotCursor,
    offset: Arc<LeaderClock>,
    accepts_clock: bool,
    /// Why the last leadership of this host failed. Other hosts should lead before it.
    failed: Option<String>,
}

impl<R: Roles> Replica<R> {
    /// A replica without state. With `accepts_clock` the clock of this host is not compared with
    /// that of the leader, which `offset` knows from the links.
    pub fn new(roles: R, accepts_clock: bool, offset: Arc<LeaderClock>) -> Self {
        Self {
            image: roles.empty(),
            roles,
            leading: None,
            store_ms: None,
            followed_ms: 0,
            snapshot: SnapshotCursor::default(),
            offset,
            accepts_clock,
            failed: None,
        }
    }

    fn check_clock(&self, head: &Head) -> Result<(), String> {
        let max_ms = limits::CLUSTER_CLOCK_OFFSET_MS_MAX;
        let (wall_ms, now) = (wall_ms(), MachineClock.now());
        let offset = self.offset.locked();
        let behind_ms = head.now_ms.max(self.image.now_ms).saturating_sub(wall_ms);
        // If the leader's clock was ahead for a moment, the log still is. The store's time goes on
        // from there, so a host whose clock agrees with the leader's is as good as the leader.
        let agrees = (offset.off_leader_ms(wall_ms, now)).is_some_and(|it| it <= max_ms);
        if behind_ms > max_ms && !agrees {
            return Err(format!(
                "its clock is {behind_ms} ms behind the log of the cluster: synchronize the clocks of all hosts. If they are right, wait until they reach the time of the log, or start this host with --accept-clock"
            ));
        }
        match offset.ahead_ms(wall_ms, now) {
            Some(ahead_ms) if ahead_ms > max_ms => Err(format!(
                "its clock is {ahead_ms} ms ahead of that of the last leader, {}: synchronize the clocks of all hosts, or start this one with --accept-clock",
                head.leader
            )),
            _ => Ok(()),
        }
    }

    /// The time at which a store on `image` begins, at the least.
    fn begins_ms(&self, previous: &Head, since: Duration, image: &Image) -> u64 {
        let last_ms = previous.now_ms.max(self.followed_ms);
        // Time goes on while no host leads, so keys expire when their owners expect it.
        let since_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        last_ms.saturating_add(since_ms).max(image.now_ms)
    }
}

impl<R: Roles> Embedder for Replica<R> {
    fn now_ms(&self) -> u64 {
        match &self.store_ms {
            // It may be ahead of the wall clock. A later time could end keys early at a takeover.
            Some(store_ms) => store_ms.load(Relaxed),
            None => wall_ms().max(self.image.now_ms),
        }
    }

    fn reset(&mut self) {
        self.image = self.roles.empty();
        self.offset.locked().forget();
    }

    fn block(&mut self, block: &[u8]) -> Result<(), String> {
        let policies = self.image.policies.len();
        self.image.block(block).map_err(|error| error.to_string())?;
        if self.image.policies.len() > policies {
            self.roles.name(&self.image);
        }
        Ok(())
    }

    fn record(&mut self, position: LogPosition, record: &[u8]) -> Result<(), String> {
        let before_ms = self.image.now_ms;
        let applied = self.image.record(record);
        applied.map_err(|error| format!("record {position}: {error}"))?;
        if self.image.now_ms > before_ms {
            let now = MachineClock.now();
            let offset = &mut self.offset.locked();
            offset.received(self.image.now_ms, wall_ms(), now);
        }
        if record::names_policies(record) {
            self.roles.name(&self.image);
        }
        Ok(())
    }

    fn following(&mut self, head: &Head) {
        self.offset.locked().follows();
        self.roles.follow(head);
    }

    fn describe(&mut self) -> Description {
        self.roles.describe(&self.image)
    }

    fn may_lead(&mut self, head: &Head) -> Result<(), String> {
        // A takeover that failed is tried again after other hosts had the chance.
        if let Some(failed) = self.failed.take() {
            return Err(failed);
        }
        if !self.accepts_clock {
            self.check_clock(head)?;
        }
        self.roles.may_lead(&self.image)
    }

    fn opening(&mut self, _epoch: u64) -> Vec<u8> {
        let mut opening = Vec::new();
        // Not the epoch: the state that the cluster began with may have had many runs.
        let run = self.image.run.saturating_add(1);
        self.followed_ms = self.image.now_ms;
        record::started(&mut opening, run, self.now_ms(), Mode::Embedded);
        opening
    }

    fn leading(&mut self, takeover: Takeover) {
        let mut image = std::mem::replace(&mut self.image, self.roles.empty());
        image.finish();
        let now_ms = self.begins_ms(&takeover.previous, takeover.since, &image);
        let clock = Clock::resume(Arc::new(SystemSource::default()), now_ms);
        self.store_ms = Some(clock.shown());
        let log = ClusterLog::new(takeover.log.clone());
        match self.roles.lead(image, log, clock) {
            Ok(leading) => self.leading = Some(leading),
            Err(error) => {
                tracing::error!("this host cannot lead, so it hands over: {error:#}");
                self.failed = Some(format!("{error:#}"));
                takeover.log.hand_over(None);
            }
        }
    }

    fn released(&mut self, position: LogPosition) {
        if let Some(Leading { server, broker, .. }) = &self.leading {
            server.release();
            broker.released(position);
        }
    }

    fn ended(&mut self, ended: Ended) {
        self.store_ms = None;
        if let Some(leading) = self.leading.take() {
            self.roles.end(leading, ended);
        }
    }

    fn snapshot_bytes(&self) -> u64 {
        let leading = self.leading.as_ref();
        leading.map_or(0, |it| it.server.snapshot_bytes() + it.broker.image_bytes())
    }

    fn begin_snapshot(&mut self) {
        self.snapshot = SnapshotCursor::default();
    }

    fn next_block(&mut self, block: &mut Vec<u8>) -> Result<bool, String> {
        let Some(Leading { server, broker, .. }) = &self.leading else {
            return Err("the store does not run".into());
        };
        match self.snapshot.next(server, Some(broker)) {
            Some(next) => {
                *block = next;
                Ok(true)
            }
            None => Ok(false),
        }
    }
}

#[cfg(test)]
mod tests;
