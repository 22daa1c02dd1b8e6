//! Traces of requests, sent to a collector over OTLP.
//!
//! The stages of a request are on several threads, and their times are known only when its response
//! has left. So spans are built afterwards, from readings of the clock, by a thread of their own.
//! The path of a request only queues its times.
//!
//! A slow or absent collector must never delay a request: the queue is limited, and what does not
//! fit is dropped and counted.

mod collector;
mod exporter;
mod spans;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::Notify;

use statehouse_config::{TracesConfig, limits};
use statehouse_core::trace::Traced;

/// Queues the spans of traced requests.
#[derive(Default)]
pub struct Traces {
    queue: Mutex<Queue>,
    /// Notified when the queue is not empty any more, and when it is stopped.
    filled: Condvar,
    sent: AtomicU64,
    dropped: AtomicU64,
    refused: AtomicU64,
    /// Notified when the last spans were sent.
    ended: Notify,
}

#[derive(Default)]
struct Queue {
    finished: VecDeque<Finished>,
    stopped: bool,
}

/// Spans since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Taken by the collector.
    pub sent: u64,
    /// Dropped because the queue was full.
    pub dropped: u64,
    /// Not taken by the collector, or lost on the way to it.
    pub refused: u64,
}

/// A traced request until its response has left.
#[derive(Debug)]
pub(crate) struct Trace {
    trace_id: [u8; 16],
    span_id: [u8; 8],
    /// The span of the client.
    parent: Option<[u8; 8]>,
    /// The span of the original request, if this is a duplicate.
    original: Option<[u8; 8]>,
    called: Instant,
    decided: Instant,
    appended: Instant,
    notifications: usize,
}

/// What the notifications of a traced request have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Notifier {
    trace_id: [u8; 16],
    /// The span of the request.
    parent: [u8; 8],
    appended: Instant,
}

/// A notification of a traced request, until it has left.
#[derive(Debug)]
pub(crate) struct TracedNotification {
    of: Notifier,
    client: Arc<str>,
}

/// What has left, or is about to.
#[derive(Debug)]
pub(crate) enum Finished {
    Request(Box<FinishedRequest>),
    Notification(Box<TracedNotification>, Instant),
}

/// A traced request, when its response leaves.
#[derive(Debug)]
pub(crate) struct FinishedRequest {
    pub(crate) trace: Box<Trace>,
    /// When the turn of its connection began.
    pub(crate) begun: Instant,
    /// When its response was released.
    pub(crate) left: Instant,
    /// When its response was handed to the connection.
    pub(crate) handed: Instant,
    pub(crate) client: Arc<str>,
    pub(crate) command: Option<String>,
    pub(crate) policy: Option<String>,
    pub(crate) outcome: &'static str,
    pub(crate) fuel: u32,
}

/// What leaves in one delivery.
#[derive(Default)]
pub(crate) struct Leaving {
    finished: Vec<Finished>,
    dropped: usize,
}

impl Traces {
    /// Starts the thread that sends spans. `instance` is the name of this store among others. Fails
    /// if a file cannot be used, or a thread cannot be started.
    pub fn start(config: &TracesConfig, instance: &str) -> anyhow::Result<Arc<Self>> {
        let traces = Arc::new(Self::default());
        exporter::start(config, instance, traces.clone())?;
        Ok(traces)
    }

    /// Fails if [`Traces::start`] cannot use a file.
    pub fn check(config: &TracesConfig) -> anyhow::Result<()> {
        exporter::prepare(config).map(drop)
    }

    /// Sends the spans that wait, within a limited time. No later ones are sent.
    pub async fn stop(&self) {
        let ended = self.ended.notified();
        self.lock().stopped = true;
        self.filled.notify_all();
        if tokio::time::timeout(limits::TRACE_STOP_WAIT, ended)
            .await
            .is_err()
        {
            tracing::warn!("the trace collector is slow: the last spans are lost");
        }
    }

    /// Spans since the start.
    pub fn counts(&self) -> Counts {
        Counts {
            sent: self.sent.load(Relaxed),
            dropped: self.dropped.load(Relaxed),
            refused: self.refused.load(Relaxed),
        }
    }

    /// Queues the spans of what was handed to connections at this time.
    pub(crate) fn finish(&self, leaving: Leaving, handed: Instant) {
        let Leaving { finished, dropped } = leaving;
        if finished.is_empty() {
            return;
        }
        let mut lost = dropped;
        let mut queue = self.lock();
        let was_empty = queue.finished.is_empty();
        for mut it in finished {
            if queue.finished.len() >= limits::TRACE_QUEUE_MAX || queue.stopped {
                lost += it.spans();
                continue;
            }
            it.hand_over(handed);
            queue.finished.push_back(it);
        }
        drop(queue);
        self.dropped.fetch_add(lost as u64, Relaxed);
        if was_empty {
            self.filled.notify_one();
        }
    }

    /// The requests and notifications that wait.
    #[cfg(test)]
    pub(crate) fn queued(&self) -> usize {
        self.lock().finished.len()
    }

    /// Waits for spans, and takes those of one message; none after the end.
    fn next(&self) -> Option<Vec<Finished>> {
        let queue = self.lock();
        let idle = |queue: &mut Queue| queue.finished.is_empty() && !queue.stopped;
        let queue = self.filled.wait_while(queue, idle);
        let queue = queue.unwrap_or_else(PoisonError::into_inner);
        // More come in the meantime.
        let runs = |queue: &mut Queue| !queue.stopped;
        let paused = self
            .filled
            .wait_timeout_while(queue, limits::TRACE_BATCH_PAUSE, runs);
        let (mut queue, _) = paused.unwrap_or_else(PoisonError::into_inner);
        let count = queue.finished.len().min(limits::TRACE_BATCH_MAX);
        (count > 0).then(|| queue.finished.drain(..count).collect())
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        // A poisoned lock only means that a thread panicked between two complete updates.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Trace {
    pub(crate) fn begin(traced: &Traced, is_duplicate: bool, notifications: usize) -> Box<Self> {
        let (trace_id, span_id, original) = match (traced.parent, traced.span) {
            // The response of a duplicate names the span of the original.
            (Some(parent), Some(span)) if is_duplicate => {
                (parent.trace_id, span_id(), Some(span.span_id))
            }
            (Some(parent), Some(span)) => (parent.trace_id, span.span_id, None),
            _ => (trace_id(), span_id(), None),
        };
        Box::new(Self {
            trace_id,
            span_id,
            parent: traced.parent.map(|it| it.span_id),
            original,
            called: traced.called,
            decided: traced.decided,
            appended: traced.appended,
            notifications,
        })
    }

    /// What the notifications of this request have in common.
    pub(crate) fn notifier(&self) -> Notifier {
        Notifier {
            trace_id: self.trace_id,
            parent: self.span_id,
            appended: self.appended,
        }
    }
}

impl Notifier {
    /// A notification to a client.
    pub(crate) fn notification(&self, client: &Arc<str>) -> Box<TracedNotification> {
        Box::new(TracedNotification {
            of: *self,
            client: short(client),
        })
    }
}

impl Leaving {
    /// Keeps what leaves, up to as much as the queue takes.
    pub(crate) fn push(&mut self, finished: Finished) {
        match self.finished.len() < limits::TRACE_QUEUE_MAX {
            true => self.finished.push(finished),
            false => self.dropped += finished.spans(),
        }
    }
}

impl Finished {
    fn spans(&self) -> usize {
        match self {
            Self::Request(_) => spans::OF_REQUEST,
            Self::Notification(..) => 1,
        }
    }

    fn hand_over(&mut self, at: Instant) {
        match self {
            Self::Request(request) => request.handed = at,
            Self::Notification(_, handed) => *handed = at,
        }
    }
}

/// A client id for the queue, which would keep a long one after its client left, so that is cut.
pub(crate) fn short(client: &Arc<str>) -> Arc<str> {
    let text = spans::cut(client);
    match text.len() == client.len() {
        true => client.clone(),
        false => text.into(),
    }
}

fn trace_id() -> [u8; 16] {
    // Zero is not the id of a trace.
    fastrand::u128(1..).to_be_bytes()
}

fn span_id() -> [u8; 8] {
    fastrand::u64(1..).to_be_bytes()
}

#[cfg(test)]
mod tests;
