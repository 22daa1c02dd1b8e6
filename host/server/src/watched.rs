//! What is measured only while an operator watches: the stages of requests, the longest times, and
//! the keys with the most requests.
//!
//! A request then costs some ten nanoseconds more, and nothing while no operator watches.

use std::time::{Duration, Instant};

use statehouse_protocol::Histogram;

use super::hot_keys::{HotKey, HotKeys};
use super::timing::{LEAVE_BOUNDS, Timed};

pub(super) struct Watched {
    stages: Stages,
    longest: Longest,
    pub(super) hot_keys: HotKeys,
}

/// How long the stages of requests took, since an operator watches.
#[derive(Clone, Debug)]
pub struct Stages {
    /// From the turn of the connection to the policy.
    pub queue: Histogram,
    /// From the policy until the log position was durable and the response left.
    pub flush: Histogram,
    /// Until the responses that left together were written, or left to the task that writes.
    pub send: Histogram,
}

/// The longest times since the last look.
#[derive(Clone, Copy, Debug, Default)]
pub struct Longest {
    /// A request, until its response left.
    pub request: Duration,
    /// Its stages.
    pub queue: Duration,
    /// The policy.
    pub policy: Duration,
    /// The wait for the log.
    pub flush: Duration,
    /// The handover to the connections.
    pub send: Duration,
    /// A notification, until it left.
    pub notification: Duration,
}

/// What an operator sees.
#[derive(Clone, Debug)]
pub struct Observed {
    /// The stages.
    pub stages: Stages,
    /// The longest times since the look before.
    pub longest: Longest,
    /// The keys with the most requests.
    pub hot_keys: Vec<HotKey>,
}

impl Default for Watched {
    fn default() -> Self {
        let times = Histogram::new(&LEAVE_BOUNDS);
        Self {
            stages: Stages {
                queue: times.clone(),
                flush: times.clone(),
                send: times,
            },
            longest: Longest::default(),
            hot_keys: HotKeys::default(),
        }
    }
}

impl Watched {
    pub(super) fn response(&mut self, timed: &Timed, now: Instant) {
        let total = now.saturating_duration_since(timed.begun);
        let queue = Duration::from_micros(timed.queue_us.into()).min(total);
        // The time of a light call is an estimate.
        let policy = Duration::from_micros(timed.policy_us.into()).min(total - queue);
        let flush = total - queue - policy;
        self.stages.queue.record(queue);
        self.stages.flush.record(flush);
        let longest = &mut self.longest;
        longest.request = longest.request.max(total);
        longest.queue = longest.queue.max(queue);
        longest.policy = longest.policy.max(policy);
        longest.flush = longest.flush.max(flush);
    }

    pub(super) fn notification(&mut self, delay: Duration) {
        self.longest.notification = self.longest.notification.max(delay);
    }

    /// As many responses were passed to their connections within this time.
    pub(super) fn sent(&mut self, took: Duration, responses: u32) {
        self.stages.send.record_many(took, responses);
        self.longest.send = self.longest.send.max(took);
    }

    /// What was measured, and begins the next interval at this rate of requests.
    pub(super) fn look(&mut self, requests_per_second: f64) -> Observed {
        let observed = Observed {
            stages: self.stages.clone(),
            longest: std::mem::take(&mut self.longest),
            hot_keys: self.hot_keys.hottest(),
        };
        self.hot_keys.age(requests_per_second);
        observed
    }
}
