//! The queue of events of one watch, between the connection and the reader.
//!
//! The queue must never make the connection wait. If the reader is too slow, it receives a gap
//! instead of events.
//!
//! While a new connection registers a watch again, its changes are held. So no change is reported
//! before a gap, and `last` has no value that would hide one. While a watch is resumed from a
//! version, notifications of missed and of new changes arrive in any order, some of them twice.
//! They are held until the store says up to which version it has sent everything, so that the
//! reader gets each change once and in order. A page of missed changes is only requested while the
//! queue has room, since the store remembers the rest. If held changes do not fit, the latest ones
//! are dropped and requested again.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use crate::error::Error;
use crate::limits;
use crate::version::Version;
use crate::watch::{GapCause, WatchEvent, Watched};

#[derive(Debug, Default)]
pub(crate) struct Inbox {
    /// The keys and prefixes of the watch. None covers another one, so a change is added once.
    watched: Vec<Watched>,
    queue: Mutex<Queue>,
    ready: Notify,
    /// Notified when the reader takes an event, and at the end.
    taken: Notify,
}

#[derive(Debug, Default)]
struct Queue {
    events: VecDeque<Result<WatchEvent, Error>>,
    /// Of the events, and of held changes.
    bytes: usize,
    /// The reader has all changes up to this version.
    last: Option<Version>,
    /// Whether `last` is from a store that counts all changes, so that no later change has a lower
    /// version.
    is_resumable: bool,
    /// The changes that arrived while the watch is registered again.
    held: Option<BTreeMap<Version, WatchEvent>>,
    /// The lowest version of a held change that was dropped. All held changes are below it.
    dropped_from: Option<Version>,
    end: Option<Error>,
}

impl Inbox {
    pub(crate) fn new(watched: Vec<Watched>) -> Self {
        Self {
            watched,
            ..Self::default()
        }
    }

    pub(crate) fn watched(&self) -> &[Watched] {
        &self.watched
    }

    /// Adds a change. `dup` is the DUP flag of the packet (MQTT 5 section 3.3.1.1): the change may
    /// be in the queue already.
    pub(crate) fn change(&self, event: WatchEvent, dup: bool) {
        // The versions of one key rise.
        let is_one_key = matches!(self.watched[..], [Watched::Key(_)]);
        self.queue().change(event, dup || is_one_key);
        self.ready.notify_one();
    }

    /// The watch is registered, and reports all changes after this version. Held changes that were
    /// dropped are a gap.
    pub(crate) fn begun(&self, version: Option<Version>) {
        let mut queue = self.queue();
        queue.release(None);
        if queue.dropped_from.take().is_some() {
            queue.push(Ok(WatchEvent::Gap(GapCause::Overflow)));
        }
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

    /// If held changes up to a version, or any held changes, were dropped, passes the changes
    /// before these to the reader, and returns the version from which the store must send again.
    /// All changes up to the given version must have arrived, or all changes.
    pub(crate) fn again_from(&self, up_to: Option<&Version>) -> Option<Version> {
        let mut queue = self.queue();
        let dropped = queue
            .dropped_from
            .take_if(|from| up_to.is_none_or(|up_to| *from <= *up_to))?;
        queue.release(Some(&dropped));
        let last = queue.last.clone();
        drop(queue);
        self.ready.notify_one();
        last
    }

    /// A new connection begins. Its registration replaces one that waits for room. Returns the
    /// version up to which the reader has all changes, if there is one: the watch is resumed from
    /// it.
    pub(crate) fn reconnected(&self) -> Option<Version> {
        let mut queue = self.queue();
        queue.hold_anew();
        self.taken.notify_waiters();
        queue.last.clone()
    }

    /// The store cannot resume the watch: it has forgotten changes, or it is another store, whose
    /// versions may be lower than those of earlier changes. Changes are held until the store has
    /// registered the watch, which must add a gap.
    pub(crate) fn resumption_refused(&self) {
        let mut queue = self.queue();
        queue.hold_anew();
        queue.last = None;
        queue.is_resumable = false;
    }

    /// The version up to which the reader has all changes, if the watch is registered at a store
    /// that can resume it.
    pub(crate) fn position(&self) -> Option<Version> {
        self.queue().position().cloned()
    }

    /// The store has sent all changes up to this version over this connection.
    pub(crate) fn refreshed(&self, version: &Version) {
        let mut queue = self.queue();
        if queue.position().is_some() {
            queue.reached(Some(version.clone()));
        }
    }

    /// Begins to resume a new watch from this version.
    pub(crate) fn resume_from(&self, version: Version) {
        let mut queue = self.queue();
        queue.reached(Some(version));
        queue.hold_anew();
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
        self.taken.notify_waiters();
    }

    /// Whether another page of missed changes fits. It always does if the reader waits, because
    /// held changes may need that page to be released.
    pub(crate) fn has_room(&self) -> bool {
        let queue = self.queue();
        let is_small = queue.bytes <= limits::WATCH_PAGE_ROOM_BYTES_MAX;
        queue.events.is_empty() || is_small || queue.end.is_some()
    }

    /// Waits until the reader takes an event, a new connection begins or the watch ends, also if
    /// that happens before the future is polled.
    pub(crate) fn taken(&self) -> Notified<'_> {
        self.taken.notified()
    }

    /// Waits for the next event. Dropping the future loses no event.
    pub(crate) async fn next(&self) -> Result<WatchEvent, Error> {
        loop {
            if let Some(event) = self.take() {
                return event;
            }
            self.ready.notified().await;
        }
    }

    fn take(&self) -> Option<Result<WatchEvent, Error>> {
        let event = self.queue().pop();
        if event.is_some() {
            self.taken.notify_waiters();
        }
        event
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        // A panic elsewhere leaves the queue valid, because no invariant spans two statements.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    /// Adds or holds a change. One up to `last` is dropped if `drops_old`, or if the versions of
    /// all changes rise.
    fn change(&mut self, event: WatchEvent, drops_old: bool) {
        let (WatchEvent::Set { version, .. } | WatchEvent::Deleted { version, .. }) = &event else {
            return;
        };
        let version = version.clone();
        let is_old = self.last.as_ref().is_some_and(|last| version <= *last);
        let is_held = self.held.is_some();
        if is_old && (is_held || drops_old || self.is_resumable) {
            return;
        }
        if is_held {
            self.hold(version, event);
            return;
        }
        self.last = self.last.take().max(Some(version));
        self.push(Ok(event));
    }

    /// Holds changes from now on. Drops those held so far: the store sends them again, or a gap
    /// follows.
    fn hold_anew(&mut self) {
        let dropped = self.held.replace(BTreeMap::new()).unwrap_or_default();
        self.bytes -= dropped.values().map(change_bytes).sum::<usize>();
        self.dropped_from = None;
    }

    /// Holds a change. The latest changes that do not fit are dropped. At least one change is held,
    /// so that each repeated request makes progress.
    fn hold(&mut self, version: Version, event: WatchEvent) {
        let is_dropped = (self.dropped_from.as_ref()).is_some_and(|from| version >= *from);
        let Some(held) = self.held.as_mut().filter(|_| !is_dropped) else {
            return;
        };
        if held.contains_key(&version) {
            return;
        }
        self.bytes += change_bytes(&event);
        held.insert(version, event);
        while held.len() > 1 && self.bytes > limits::WATCH_HELD_BYTES_MAX {
            let Some((version, event)) = held.pop_last() else {
                return;
            };
            self.bytes -= change_bytes(&event);
            self.dropped_from = Some(version);
        }
    }

    /// Passes held changes to the reader: those up to a version, or all of them at the end of the
    /// resumption. They always fit, because they had room when they arrived.
    fn release(&mut self, up_to: Option<&Version>) {
        let Some(mut held) = self.held.take() else {
            return;
        };
        while let Some(first) = held.first_entry() {
            if up_to.is_some_and(|up_to| first.key() > up_to) {
                break;
            }
            let (version, event) = first.remove_entry();
            if self.last.as_ref().is_none_or(|last| version > *last) {
                self.last = Some(version);
                self.events.push_back(Ok(event));
            } else {
                self.bytes -= change_bytes(&event);
            }
        }
        if up_to.is_some() {
            self.held = Some(held);
        }
    }

    /// As [`Inbox::position`].
    fn position(&self) -> Option<&Version> {
        let is_registered = self.held.is_none() && self.is_resumable;
        self.last.as_ref().filter(|_| is_registered)
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

    /// Adds an event, or one gap instead of all that do not fit.
    fn push(&mut self, mut event: Result<WatchEvent, Error>) {
        if self.bytes + event_bytes(&event) > limits::WATCH_BYTES_MAX {
            event = Ok(WatchEvent::Gap(GapCause::Overflow));
            if self.events.back() == Some(&event) {
                return;
            }
        }
        self.bytes += event_bytes(&event);
        self.events.push_back(event);
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
    let overhead = limits::WATCH_EVENT_OVERHEAD_BYTES;
    event.as_ref().map_or(overhead, change_bytes)
}

fn change_bytes(event: &WatchEvent) -> usize {
    let overhead = limits::WATCH_EVENT_OVERHEAD_BYTES;
    match event {
        WatchEvent::Set { key, value, .. } => overhead + key.len() + value.len(),
        WatchEvent::Deleted { key, .. } => overhead + key.len(),
        WatchEvent::Gap(_) => overhead,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    fn version(counter: u32) -> Version {
        Version::new(1, counter, "n").unwrap()
    }

    fn set(counter: u32, bytes: usize) -> WatchEvent {
        WatchEvent::Set {
            key: Bytes::new(),
            value: Bytes::from(vec![b'x'; bytes]),
            version: version(counter),
        }
    }

    #[tokio::test]
    async fn slow_reader_gets_one_gap() {
        let inbox = Inbox::default();
        let half = limits::WATCH_BYTES_MAX / 2 - limits::WATCH_EVENT_OVERHEAD_BYTES;
        for counter in 1..=5 {
            inbox.change(set(counter, half), false);
        }
        assert_eq!(inbox.next().await, Ok(set(1, half)));
        assert_eq!(inbox.next().await, Ok(set(2, half)));
        inbox.change(set(6, 1), false);
        assert_eq!(inbox.next().await, Ok(WatchEvent::Gap(GapCause::Overflow)));
        assert_eq!(inbox.next().await, Ok(set(6, 1)));
    }

    #[test]
    fn number_of_events_without_a_value_is_limited() {
        let inbox = Inbox::default();
        let max = limits::WATCH_BYTES_MAX / limits::WATCH_EVENT_OVERHEAD_BYTES;
        for _ in 0..max {
            inbox.notice(Err(Error::Protocol("unreadable".into())));
            inbox.change(set(1, 0), false);
        }
        let events = std::iter::from_fn(|| inbox.take());
        assert_eq!(events.count(), max + 1);
        assert_eq!(inbox.queue().bytes, 0);
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
        assert_eq!(inbox.reconnected(), Some(version(1)));
        // A redelivery, a new change, and then missed ones.
        inbox.change(set(1, 0), true);
        inbox.change(set(2, 0), true);
        inbox.change(set(5, 0), false);
        inbox.change(set(2, 0), false);
        inbox.change(set(3, 0), false);
        inbox.caught_up_to(version(3));
        inbox.change(set(4, 0), false);
        inbox.begun(Some(version(4)));
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
        let inbox = Inbox::default();
        inbox.begun(Some(version(8)));
        inbox.change(set(9, 0), false);
        assert_eq!(inbox.reconnected(), Some(version(9)));
        inbox.change(set(10, 1), false);
        inbox.resumption_refused();
        assert_eq!(inbox.reconnected(), None);
        // A change between the registration and its response.
        inbox.change(set(2, 0), false);
        inbox.notice(Ok(WatchEvent::Gap(GapCause::Reconnected)));
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

    /// An inbox whose reader has all changes up to the counter 0, and which is resumed.
    fn resumed() -> Inbox {
        let inbox = Inbox::default();
        inbox.resume_from(version(0));
        inbox
    }

    /// Takes all events, which must be the changes with these counters, with a value of 1 byte.
    fn expect(inbox: &Inbox, counters: impl IntoIterator<Item = u32>) {
        for counter in counters {
            assert_eq!(inbox.take(), Some(Ok(set(counter, 1))));
        }
        let queue = inbox.queue();
        assert_eq!((queue.events.front(), queue.bytes), (None, 0));
    }

    #[tokio::test]
    async fn page_has_room_if_the_reader_has_taken_enough() {
        let inbox = Inbox::default();
        inbox.change(set(1, limits::WATCH_PAGE_ROOM_BYTES_MAX), false);
        inbox.change(set(2, 0), false);
        let taken = inbox.taken();
        assert!(!inbox.has_room());
        assert!(inbox.take().is_some());
        taken.await;
        assert!(inbox.has_room());
        inbox.resume_from(version(1000));
        while inbox.take().is_some() {}
        inbox.change(set(1001, limits::WATCH_BYTES_MAX), false);
        assert!(inbox.has_room());
    }

    #[tokio::test]
    async fn new_connection_and_end_wake_a_task_that_waits_for_room() {
        let inbox = Inbox::default();
        let taken = inbox.taken();
        inbox.reconnected();
        taken.await;
        let taken = inbox.taken();
        inbox.end(Error::Transport("over".into()));
        taken.await;
        assert!(inbox.has_room());
    }

    /// How many changes with a value of 1 byte can be held.
    fn held_max() -> u32 {
        let change = limits::WATCH_EVENT_OVERHEAD_BYTES + 1;
        u32::try_from(limits::WATCH_HELD_BYTES_MAX / change).unwrap()
    }

    #[test]
    fn held_changes_that_do_not_fit_are_requested_again() {
        let inbox = resumed();
        let max = held_max();
        for counter in (1..=max + 10).rev() {
            inbox.change(set(counter, 1), false);
        }
        assert_eq!(inbox.again_from(Some(&version(max))), None);
        let up_to = version(max + 1);
        assert_eq!(inbox.again_from(Some(&up_to)), Some(version(max)));
        assert_eq!(inbox.again_from(None), None);
        expect(&inbox, 1..=max);
        for counter in max + 1..=max + 10 {
            inbox.change(set(counter, 1), false);
        }
        inbox.begun(Some(version(max + 10)));
        inbox.change(set(max + 11, 1), false);
        expect(&inbox, max + 1..=max + 11);
    }

    #[test]
    fn lowest_change_is_held_even_if_it_is_large() {
        let inbox = resumed();
        let bytes = limits::WATCH_BYTES_MAX;
        for counter in [3, 1, 2] {
            inbox.change(set(counter, bytes), false);
        }
        assert_eq!(inbox.again_from(None), Some(version(1)));
        assert_eq!(inbox.take(), Some(Ok(set(1, bytes))));
        expect(&inbox, []);
    }

    /// There is no version from which the store could send them again.
    #[test]
    fn changes_dropped_after_a_refused_resumption_are_a_gap() {
        let inbox = resumed();
        inbox.resumption_refused();
        let max = held_max();
        for counter in 1..=max + 1 {
            inbox.change(set(counter, 1), false);
        }
        inbox.begun(Some(version(max + 1)));
        let last = std::iter::from_fn(|| inbox.take()).last();
        assert_eq!(last, Some(Ok(WatchEvent::Gap(GapCause::Overflow))));
        expect(&inbox, []);
    }

    /// The connection is lost before the watch is registered, so that its gap is not yet reported.
    #[test]
    fn change_before_the_registration_does_not_replace_its_gap() {
        let inbox = Inbox::default();
        assert_eq!(inbox.reconnected(), None);
        inbox.change(set(20, 1), false);
        assert_eq!(inbox.reconnected(), None);
        inbox.change(set(21, 1), false);
        inbox.begun(None);
        expect(&inbox, [21]);
    }

    #[test]
    fn lower_versions_are_of_other_keys_and_never_the_last() {
        let key = || Watched::Key(Bytes::new());
        for (watched, passed) in [(vec![key()], &[2][..]), (vec![key(), key()], &[2, 1][..])] {
            let inbox = Inbox::new(watched);
            inbox.change(set(2, 1), false);
            inbox.change(set(1, 1), false);
            assert_eq!(inbox.reconnected(), Some(version(2)));
            expect(&inbox, passed.iter().copied());
        }
    }

    #[tokio::test]
    async fn watch_without_a_change_cannot_be_resumed() {
        let inbox = Inbox::default();
        assert_eq!(inbox.reconnected(), None);
        inbox.begun(Some(version(2)));
        assert_eq!(inbox.reconnected(), Some(version(2)));
    }
}
