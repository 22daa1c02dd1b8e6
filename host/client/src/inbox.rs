//! The queue of events of one watch, between the connection and the reader.
//!
//! The queue must never make the connection wait. If the reader is too slow, it receives a gap
//! instead of events.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::error::Error;
use crate::limits;
use crate::version::Version;
use crate::watch::{GapCause, WatchEvent};

#[derive(Debug, Default)]
pub(crate) struct Inbox {
    queue: Mutex<Queue>,
    ready: Notify,
}

#[derive(Debug, Default)]
struct Queue {
    events: VecDeque<Result<WatchEvent, Error>>,
    bytes: usize,
    last: Option<Version>,
    end: Option<Error>,
}

impl Inbox {
    /// Adds a change. `dup` is the DUP flag of the packet (MQTT 5 section 3.3.1.1): the change may
    /// be in the queue already.
    pub(crate) fn change(&self, event: WatchEvent, dup: bool) {
        let mut queue = self.queue();
        if let WatchEvent::Set { version, .. } | WatchEvent::Deleted { version, .. } = &event {
            if dup && queue.last.as_ref().is_some_and(|last| version <= last) {
                return;
            }
            queue.last = Some(version.clone());
        }
        queue.push(Ok(event));
        drop(queue);
        self.ready.notify_one();
    }

    /// Adds a gap, or the error for an unreadable notification.
    pub(crate) fn notice(&self, notice: Result<WatchEvent, Error>) {
        self.queue().push(notice);
        self.ready.notify_one();
    }

    /// Ends the watch. The reader receives the remaining events and then the reason.
    pub(crate) fn end(&self, why: Error) {
        self.queue().end.get_or_insert(why);
        self.ready.notify_one();
    }

    /// Waits for the next event. Dropping the future loses no event.
    pub(crate) async fn next(&self) -> Result<WatchEvent, Error> {
        loop {
            if let Some(event) = self.queue().pop() {
                return event;
            }
            self.ready.notified().await;
        }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        // A panic elsewhere leaves the queue valid, because no invariant spans two statements.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    fn push(&mut self, event: Result<WatchEvent, Error>) {
        let bytes = event_bytes(&event);
        if self.events.len() < limits::WATCH_EVENTS_MAX
            && self.bytes + bytes <= limits::WATCH_BYTES_MAX
        {
            self.bytes += bytes;
            self.events.push_back(event);
            return;
        }
        let gap = Ok(WatchEvent::Gap(GapCause::Overflow));
        if self.events.back() != Some(&gap) {
            self.events.push_back(gap);
        }
    }

    fn pop(&mut self) -> Option<Result<WatchEvent, Error>> {
        if let Some(event) = self.events.pop_front() {
            self.bytes -= event_bytes(&event);
            return Some(event);
        }
        self.end.clone().map(Err)
    }
}

fn event_bytes(event: &Result<WatchEvent, Error>) -> usize {
    match event {
        Ok(WatchEvent::Set { key, value, .. }) => key.len() + value.len(),
        Ok(WatchEvent::Deleted { key, .. }) => key.len(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    fn set(counter: u32, bytes: usize) -> WatchEvent {
        WatchEvent::Set {
            key: Bytes::new(),
            value: Bytes::from(vec![b'x'; bytes]),
            version: Version::new(1, counter, "n").unwrap(),
        }
    }

    #[tokio::test]
    async fn slow_reader_gets_one_gap() {
        let inbox = Inbox::default();
        let half = limits::WATCH_BYTES_MAX / 2;
        for counter in 1..=5 {
            inbox.change(set(counter, half), false);
        }
        assert_eq!(inbox.next().await, Ok(set(1, half)));
        assert_eq!(inbox.next().await, Ok(set(2, half)));
        inbox.change(set(6, 1), false);
        assert_eq!(inbox.next().await, Ok(WatchEvent::Gap(GapCause::Overflow)));
        assert_eq!(inbox.next().await, Ok(set(6, 1)));
    }

    #[tokio::test]
    async fn number_of_small_events_is_limited() {
        let inbox = Inbox::default();
        for counter in 0..5000 {
            inbox.change(set(counter, 0), false);
        }
        inbox.end(Error::Transport("over".into()));
        let mut events = 0;
        while inbox.next().await.is_ok() {
            events += 1;
        }
        assert_eq!(events, limits::WATCH_EVENTS_MAX + 1);
    }

    #[tokio::test]
    async fn duplicate_packet_counts_once() {
        let inbox = Inbox::default();
        inbox.change(set(1, 1), false);
        inbox.change(set(1, 1), true);
        inbox.change(set(2, 1), true);
        inbox.end(Error::Transport("over".into()));
        assert_eq!(inbox.next().await, Ok(set(1, 1)));
        assert_eq!(inbox.next().await, Ok(set(2, 1)));
        assert_eq!(inbox.next().await, Err(Error::Transport("over".into())));
        assert_eq!(inbox.next().await, Err(Error::Transport("over".into())));
    }
}
