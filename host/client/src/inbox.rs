//! The queue of events of one watch, between the connection and the reader.
//!
//! The queue must never make the connection wait. If the reader is too slow, it receives a gap
//! instead of events.
//!
//! While a watch is resumed from a version, notifications of missed and of new changes arrive in
//! any order, some of them twice. They are held until the store says up to which version it has
//! sent everything, so that the reader gets each change once and in order.

use std::collections::{BTreeMap, VecDeque};
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
    /// The reader has all changes up to this version.
    last: Option<Version>,
    /// Whether `last` is from a store that counts all changes, so that no later change has a lower
    /// version.
    is_resumable: bool,
    /// The changes that arrived while the watch is resumed.
    held: Option<BTreeMap<Version, WatchEvent>>,
    end: Option<Error>,
}

impl Inbox {
    /// Adds a change. `dup` is the DUP flag of the packet (MQTT 5 section 3.3.1.1): the change may
    /// be in the queue already.
    pub(crate) fn change(&self, event: WatchEvent, dup: bool) {
        let mut queue = self.queue();
        queue.change(event, dup);
        drop(queue);
        self.ready.notify_one();
    }

    /// The watch is registered, and reports all changes after this version.
    pub(crate) fn begun(&self, version: Option<Version>) {
        let mut queue = self.queue();
        queue.release(None);
        queue.reached(version);
        drop(queue);
        self.ready.notify_one();
    }

    /// The store has sent all changes up to this version, and there are more.
    pub(crate) fn caught_up_to(&self, version: Version) {
        let mut queue = self.queue();
        queue.release(Some(&version));
        queue.reached(Some(version));
        drop(queue);
        self.ready.notify_one();
    }

    /// Begins to resume the watch, if the reader has all changes up to some version. Returns that
    /// version.
    pub(crate) fn resume(&self) -> Option<Version> {
        let mut queue = self.queue();
        let last = queue.last.clone()?;
        queue.held.get_or_insert_default();
        Some(last)
    }

    /// Whether the watch is being resumed from a version.
    pub(crate) fn is_resuming(&self) -> bool {
        let queue = self.queue();
        queue.held.is_some() && queue.last.is_some()
    }

    /// The store cannot resume the watch: it has forgotten changes, or it is another store, whose
    /// versions may be lower than those of earlier changes. Changes are held until the store has
    /// registered the watch, which must add a gap.
    pub(crate) fn resumption_refused(&self) {
        self.queue().forget();
    }

    /// The version up to which the reader has all changes, if the watch is registered at a store
    /// that can resume it.
    pub(crate) fn position(&self) -> Option<Version> {
        let queue = self.queue();
        let registered = queue.held.is_none() && queue.is_resumable;
        queue.last.clone().filter(|_| registered)
    }

    /// The store has sent all changes up to this version over this connection.
    pub(crate) fn refreshed(&self, version: &Version) {
        if self.position().is_some() {
            self.queue().reached(Some(version.clone()));
        }
    }

    /// Begins to resume a new watch from this version.
    pub(crate) fn resume_from(&self, version: Version) {
        self.queue().reached(Some(version));
        self.resume();
    }

    /// The store does not know all changes since the reader's last one.
    pub(crate) fn gap(&self) {
        let mut queue = self.queue();
        queue.push(Ok(WatchEvent::Gap(GapCause::Reconnected)));
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
    fn change(&mut self, event: WatchEvent, dup: bool) {
        if let WatchEvent::Set { version, .. } | WatchEvent::Deleted { version, .. } = &event {
            let is_old = self.last.as_ref().is_some_and(|last| version <= last);
            if let Some(held) = &mut self.held {
                if is_old || held.contains_key(version) {
                    return;
                }
                let bytes = change_bytes(&event);
                let has_room = held.len() < limits::WATCH_EVENTS_MAX
                    && self.bytes + bytes <= limits::WATCH_BYTES_MAX;
                if has_room {
                    self.bytes += bytes;
                    held.insert(version.clone(), event);
                } else {
                    self.bytes -= held.values().map(change_bytes).sum::<usize>();
                    held.clear();
                    self.push(Ok(WatchEvent::Gap(GapCause::Overflow)));
                }
                return;
            }
            if is_old && (dup || self.is_resumable) {
                return;
            }
            self.last = Some(version.clone());
        }
        self.push(Ok(event));
    }

    /// Passes held changes to the reader: those up to a version, or all of them at the end of the
    /// resumption.
    fn release(&mut self, up_to: Option<&Version>) {
        let Some(mut held) = self.held.take() else {
            return;
        };
        while let Some(first) = held.first_entry() {
            if up_to.is_some_and(|up_to| first.key() > up_to) {
                break;
            }
            let (version, event) = first.remove_entry();
            self.bytes -= change_bytes(&event);
            if self.last.as_ref().is_none_or(|last| version > *last) {
                self.last = Some(version);
                self.push(Ok(event));
            }
        }
        if up_to.is_some() {
            self.held = Some(held);
        }
    }

    /// Removes what is only valid for changes since the last one: its version, and held changes.
    fn forget(&mut self) {
        let held = self.held.get_or_insert_default();
        self.bytes -= held.values().map(change_bytes).sum::<usize>();
        held.clear();
        self.last = None;
        self.is_resumable = false;
    }

    /// Notes that the reader has all changes up to this version.
    fn reached(&mut self, version: Option<Version>) {
        if let Some(version) = version {
            self.is_resumable = true;
            if self.last.as_ref().is_none_or(|last| version > *last) {
                self.last = Some(version);
            }
        }
    }

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
    event.as_ref().map_or(0, change_bytes)
}

fn change_bytes(event: &WatchEvent) -> usize {
    match event {
        WatchEvent::Set { key, value, .. } => key.len() + value.len(),
        WatchEvent::Deleted { key, .. } => key.len(),
        WatchEvent::Gap(_) => 0,
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

    #[tokio::test]
    async fn resumed_watch_passes_each_change_on_once_and_in_order() {
        let inbox = Inbox::default();
        inbox.change(set(1, 0), false);
        assert_eq!(inbox.resume(), Some(Version::new(1, 1, "n").unwrap()));
        // A redelivery, a new change, and then missed ones.
        inbox.change(set(1, 0), true);
        inbox.change(set(2, 0), true);
        inbox.change(set(5, 0), false);
        inbox.change(set(2, 0), false);
        inbox.change(set(3, 0), false);
        inbox.caught_up_to(Version::new(1, 3, "n").unwrap());
        inbox.change(set(4, 0), false);
        inbox.begun(Some(Version::new(1, 4, "n").unwrap()));
        // Another request of the same watch sends it again.
        inbox.change(set(4, 0), false);
        inbox.change(set(6, 0), false);
        inbox.end(Error::Transport("over".into()));
        for counter in 1..=6 {
            assert_eq!(inbox.next().await, Ok(set(counter, 0)));
        }
        assert!(inbox.next().await.is_err());
    }

    #[tokio::test]
    async fn lower_versions_after_a_refused_resumption_are_passed_on() {
        let version = |counter| Version::new(1, counter, "n").unwrap();
        let inbox = Inbox::default();
        inbox.begun(Some(version(8)));
        inbox.change(set(9, 0), false);
        assert_eq!(inbox.resume(), Some(version(9)));
        inbox.change(set(10, 1), false);
        inbox.resumption_refused();
        assert!(!inbox.is_resuming());
        assert_eq!(inbox.resume(), None);
        // A change between the registration and its response.
        inbox.change(set(2, 0), false);
        inbox.gap();
        inbox.begun(Some(version(1)));
        inbox.change(set(3, 0), false);
        assert_eq!(inbox.position(), Some(version(3)));
        assert_eq!(inbox.next().await, Ok(set(9, 0)));
        let gap = Ok(WatchEvent::Gap(GapCause::Reconnected));
        assert_eq!(inbox.next().await, gap);
        assert_eq!(inbox.next().await, Ok(set(2, 0)));
        assert_eq!(inbox.next().await, Ok(set(3, 0)));
        assert_eq!(inbox.queue().bytes, 0);
    }

    #[tokio::test]
    async fn watch_without_a_change_cannot_be_resumed() {
        let inbox = Inbox::default();
        assert_eq!(inbox.resume(), None);
        inbox.begun(Some(Version::new(1, 2, "n").unwrap()));
        assert_eq!(inbox.resume(), Some(Version::new(1, 2, "n").unwrap()));
    }
}
