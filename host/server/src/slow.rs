//! The last slow requests, with where their time went.
//!
//! When a response leaves, its time is compared with the threshold. Only a slow request costs more.
//! Many are slow at once when the disk stalls, so the number that is kept is limited.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::names::Names;
use super::pending::NextRequest;
use super::timing::Timed;
use super::usage::start_of;
use crate::traces::{Finished, FinishedRequest, Leaving, TracedNotification, short};
use statehouse_config::limits;
use statehouse_core::clock::wall_ms;

/// A slow request. Times are in microseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlowRequest {
    /// When its response left, in milliseconds since 1970.
    pub at_ms: u64,
    /// The client id; a long one is cut and ends with `…`.
    pub client: String,
    /// The command, if the policy named one.
    pub command: Option<String>,
    /// The first key that it wrote or read as text, cut if it is long. Bytes that are no UTF-8 are
    /// `\xNN`.
    pub key: Option<String>,
    /// The name and digest of the policy, if one answered.
    pub policy: Option<String>,
    /// How it was answered: as in the metric `statehouse_request_seconds`.
    pub outcome: String,
    /// The fuel that it used.
    pub fuel: u64,
    /// The sum of all parts.
    pub total_us: u64,
    /// From the beginning of its connection's turn to the call of the policy.
    pub queue_us: u64,
    /// The call of the policy.
    pub policy_us: u64,
    /// Until its log position was durable and its response left.
    pub flush_us: u64,
    /// Until its response was written, or left to the task that writes.
    pub socket_us: u64,
}

/// The slow requests after a position.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct SlowRequests {
    /// From which time on a request is slow, in microseconds.
    pub threshold_us: u64,
    /// How many requests were slow since the start. It is the position to continue from.
    pub next: u64,
    /// How many of the requests after the position are not kept any more. Earlier versions of the
    /// program do not count them.
    #[serde(default)]
    pub lost: u64,
    /// The requests, the oldest first.
    pub requests: Vec<SlowRequest>,
}

pub(super) struct SlowLog {
    threshold_us: AtomicU64,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    seen: u64,
    last: VecDeque<SlowRequest>,
}

/// A request whose response is leaving.
pub(super) struct Departure {
    timed: Timed,
    key: Option<String>,
    client: Arc<str>,
    command: Option<String>,
    policy: Option<String>,
    left: Instant,
}

impl Default for SlowLog {
    fn default() -> Self {
        Self {
            threshold_us: AtomicU64::new(micros(limits::SLOW_THRESHOLD_DEFAULT)),
            kept: Mutex::default(),
        }
    }
}

impl SlowLog {
    pub(super) fn set_threshold(&self, threshold: Duration) {
        self.threshold_us.store(micros(threshold), Relaxed);
    }

    pub(super) fn threshold(&self) -> Duration {
        Duration::from_micros(self.threshold_us.load(Relaxed))
    }

    pub(super) fn note(&self, departures: Departures) {
        if departures.slow == 0 {
            return;
        }
        let (now, at_ms) = (Instant::now(), wall_ms());
        let mut kept = self.lock();
        kept.seen += departures.slow;
        for it in departures.last {
            if kept.last.len() >= limits::SLOW_REQUESTS_MAX {
                kept.last.pop_front();
            }
            kept.last.push_back(it.into_request(now, at_ms));
        }
    }

    /// How many requests were slow since the start.
    pub(super) fn count(&self) -> u64 {
        self.lock().seen
    }

    /// The requests that are kept, after the first `from` slow ones. A position behind the end is
    /// that of an earlier run or of another host, and stands for the beginning. Other positions of
    /// an earlier run cannot be distinguished from those of this one.
    pub(super) fn since(&self, from: u64) -> SlowRequests {
        let kept = self.lock();
        let from = if from > kept.seen { 0 } else { from };
        let new = kept.seen - from;
        let known = (kept.last.len() as u64).saturating_sub(new);
        let known = usize::try_from(known).unwrap_or(usize::MAX);
        SlowRequests {
            threshold_us: self.threshold_us.load(Relaxed),
            next: kept.seen,
            lost: new.saturating_sub(kept.last.len() as u64),
            requests: kept.last.iter().skip(known).cloned().collect(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        // A poisoned lock only means that a thread panicked between two complete updates.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The slow and the traced requests of one delivery.
#[derive(Default)]
pub(super) struct Departures {
    threshold: Duration,
    /// All responses, and when the first ones left.
    responses: u32,
    first_left: Option<Instant>,
    slow: u64,
    last: VecDeque<Departure>,
    pub(super) traced: Leaving,
}

impl Departures {
    pub(super) fn new(threshold: Duration) -> Self {
        Self {
            threshold,
            ..Self::default()
        }
    }

    /// The number of responses, and when the first ones left; none if there are none.
    pub(super) fn first(&self) -> Option<(u32, Instant)> {
        self.first_left.map(|left| (self.responses, left))
    }

    /// Keeps a request that took this long, if it is slow or traced.
    pub(super) fn left(
        &mut self,
        mut next: NextRequest<'_>,
        took: Duration,
        names: &Names,
        left: Instant,
    ) {
        let timed = next.timed;
        self.responses = self.responses.saturating_add(1);
        self.first_left.get_or_insert(left);
        if let Some(trace) = next.trace.take() {
            self.traced
                .push(Finished::Request(Box::new(FinishedRequest {
                    trace,
                    begun: timed.begun,
                    left,
                    handed: left,
                    client: short(next.client),
                    command: names.command(timed.command).map(str::to_owned),
                    policy: names.policy(timed.policy).map(str::to_owned),
                    outcome: timed.answered.name(),
                    fuel: timed.fuel,
                })));
        }
        if took < self.threshold {
            return;
        }
        self.slow += 1;
        if self.last.len() >= limits::SLOW_REQUESTS_MAX {
            self.last.pop_front();
        }
        self.last.push_back(Departure {
            key: next.key(),
            client: next.client.clone(),
            command: names.command(timed.command).map(str::to_owned),
            policy: names.policy(timed.policy).map(str::to_owned),
            timed: *timed,
            left,
        });
    }

    /// Keeps the span of a notification that left at this time, if it has one.
    pub(super) fn notified(&mut self, span: Option<Box<TracedNotification>>, left: Instant) {
        if let Some(span) = span {
            self.traced.push(Finished::Notification(span, left));
        }
    }
}

impl Departure {
    fn into_request(self, now: Instant, at_ms: u64) -> SlowRequest {
        let Self { timed, left, .. } = self;
        let total = now.saturating_duration_since(timed.begun);
        let queue = Duration::from_micros(timed.queue_us.into());
        let socket = now.saturating_duration_since(left);
        let rest = total.saturating_sub(queue + socket);
        // The time of a light call is an estimate.
        let policy = Duration::from_micros(timed.policy_us.into()).min(rest);
        let flush = rest - policy;
        SlowRequest {
            at_ms,
            client: start_of(&self.client).into_string(),
            command: self.command,
            key: self.key,
            policy: self.policy,
            outcome: timed.answered.name().to_owned(),
            fuel: timed.fuel.into(),
            total_us: micros(total),
            queue_us: micros(queue),
            policy_us: micros(policy),
            flush_us: micros(flush),
            socket_us: micros(socket),
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(log: &SlowLog, count: usize) {
        note_of(log, count, "press-4");
    }

    fn note_of(log: &SlowLog, count: usize, client: &str) {
        for _ in 0..count {
            let (mut departures, left) = (Departures::new(Duration::ZERO), Instant::now());
            departures.slow = 1;
            departures.last.push_back(Departure {
                timed: Timed::example(left),
                key: None,
                client: client.into(),
                command: None,
                policy: None,
                left,
            });
            log.note(departures);
        }
    }

    /// Regression: clients of a foreign broker, whose ids may have 64 KiB, filled 16 MiB.
    #[test]
    fn long_client_ids_are_cut() {
        let log = SlowLog::default();
        note_of(&log, 1, "press-4");
        note_of(&log, 1, &"x".repeat(65_535));
        let shown = log.since(0).requests.into_iter().map(|it| it.client);
        let cut = "x".repeat(limits::ADMIN_CLIENT_ID_BYTES_MAX) + "…";
        assert_eq!(shown.collect::<Vec<_>>(), ["press-4".to_owned(), cut]);
    }

    #[test]
    fn reader_learns_how_many_requests_it_missed() {
        const MAX: usize = limits::SLOW_REQUESTS_MAX;
        let read = |log: &SlowLog, from| {
            let slow = log.since(from);
            (slow.requests.len(), slow.lost, slow.next)
        };
        let log = SlowLog::default();
        note(&log, 3);
        assert_eq!(read(&log, 0), (3, 0, 3));
        assert_eq!(read(&log, 3), (0, 0, 3));
        note(&log, 1);
        assert_eq!(read(&log, 3), (1, 0, 4));
        note(&log, MAX + 2);
        assert_eq!(read(&log, 4), (MAX, 2, MAX as u64 + 6));
        // After a restart, a reader may have a position that the store has not reached.
        let log = SlowLog::default();
        note(&log, 2);
        assert_eq!(read(&log, 900), (2, 0, 2));
    }
}
