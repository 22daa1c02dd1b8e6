//! Registers watches at the store: new ones, all of them after a reconnect, and again while they
//! are idle, so that they can be resumed.
//!
//! While a watch is resumed, it must get the changes of all its keys and prefixes in the order of
//! their versions. Otherwise a reader that stops could not resume the watch from the last change
//! that it got.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::Notify;

use super::{Connection, Session, State, now_ms, publish};
use crate::error::Error;
use crate::inbox::Inbox;
use crate::limits;
use crate::request::Registered;
use crate::version::Version;
use crate::watch::{GapCause, WatchEvent, Watched};

impl State {
    /// Whether this is still the connection with this number, and the client is not closed.
    fn is_at(&self, epoch: u64) -> bool {
        self.epoch == epoch && !matches!(self.connection, Connection::Closed(_))
    }
}

impl Session {
    /// Adds a watch to the session. Returns the number of the connection that must register it. A
    /// later connection registers it without a request of the caller.
    pub(crate) fn add_watch(&self, inbox: &Arc<Inbox>) -> u64 {
        let mut state = self.state();
        if let Connection::Closed(error) = &state.connection {
            inbox.end(error.clone());
        }
        for watched in inbox.watched() {
            let watches = state.watches.like_mut(watched);
            let readers = watches.entry(watched.bytes().clone()).or_default();
            readers.push(Arc::clone(inbox));
        }
        state.epoch
    }

    /// Removes a watch. If it was the last one of a key or prefix, that registration at the store
    /// is ended without waiting for the response. Later notifications are ignored.
    pub(crate) fn remove_watch(&self, inbox: &Arc<Inbox>) {
        let mut state = self.state();
        for watched in inbox.watched() {
            let watches = state.watches.like_mut(watched);
            let Some(readers) = watches.get_mut(watched.bytes()) else {
                continue;
            };
            readers.retain(|other| !Arc::ptr_eq(other, inbox));
            if readers.is_empty() {
                watches.remove(watched.bytes());
                self.unregister(&mut state, watched);
            }
        }
        // Its registration may wait for room.
        inbox.end(Error::Transport("the watch was dropped".into()));
    }

    /// Ends a registration at the store without waiting for the response. If there is no room for
    /// the STOP, the next events of the connection send it. Without a connection there is no
    /// registration.
    fn unregister(&self, state: &mut State, watched: &Watched) {
        if !self.send_stop(state, watched) && state.outlet.is_up() {
            state.unsent_stops.insert(watched.clone());
        }
    }

    /// Returns false if there is no room or no connection.
    fn send_stop(&self, state: &mut State, watched: &Watched) -> bool {
        let timestamp = state.clock.read(now_ms());
        let payload = watched.stop();
        state
            .outlet
            .send_unkept(|number| publish(payload, self.properties(number, timestamp)))
    }

    /// Sends STOPs that had no room before, except those of keys and prefixes that are watched
    /// again.
    pub(super) fn send_unsent_stops(&self) {
        let mut state = self.state();
        while let Some(watched) = state.unsent_stops.pop_first() {
            if !state.watches.contains(&watched) && !self.send_stop(&mut state, &watched) {
                state.unsent_stops.insert(watched);
                return;
            }
        }
    }

    /// Ends a registration if the key or prefix lost its last watch while a task registered it.
    /// That watch sent its STOP too early, or without a connection.
    fn unregister_unwatched(&self, watched: &Watched) {
        let mut state = self.state();
        if !state.watches.contains(watched) {
            self.unregister(&mut state, watched);
        }
    }

    /// Learns again and again how far the store is, as long as this connection lasts. Otherwise a
    /// watch without changes could not be resumed once the store has forgotten its version. Watches
    /// of keys that began without a version are left out: the response to their KEYNOTIFY has none.
    ///
    /// The response to a KEYNOTIFY from a version follows all notifications of earlier changes, so
    /// every registered watch has all changes up to the version of the response.
    pub(super) async fn refresh_watches(
        session: Weak<Self>,
        epoch: u64,
        over: Arc<Notify>,
        pause: Duration,
    ) {
        let mut wait = pause;
        loop {
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = over.notified() => return,
            }
            wait = pause;
            let Some(session) = session.upgrade() else {
                return;
            };
            let resumable = {
                let state = session.state();
                if !state.is_at(epoch) {
                    return;
                }
                let mut readers = state.watches.all_readers();
                readers.find_map(|inbox| {
                    let watched = inbox.watched().first()?;
                    Some((watched.clone(), inbox.position()?))
                })
            };
            let Some((watched, since)) = resumable else {
                continue;
            };
            let begin = watched.begin_from(&since);
            let answer = session.request(begin, None, None).await;
            // Also after a reconnect: the request may have been resent over the new connection.
            session.unregister_unwatched(&watched);
            let state = session.state();
            // An error is the matter of the next attempt, or of the next connection.
            let registered = answer.and_then(|answer| answer.registered());
            let version = match registered {
                _ if state.epoch != epoch => return,
                Ok(Registered::Begun(Some(version))) => version,
                Ok(Registered::More(version)) => {
                    wait = limits::WATCH_REFRESH_MIN;
                    version
                }
                _ => continue,
            };
            for inbox in state.watches.inboxes() {
                inbox.refreshed(&version);
            }
        }
    }
}

/// The registration of one watch at the store.
///
/// The key or prefix that is furthest behind is asked for next, and the reader gets the changes up
/// to the version that all of them have reached. So changes arrive in order, and few are held.
pub(crate) struct Registration {
    session: Arc<Session>,
    inbox: Arc<Inbox>,
    parts: Vec<Part>,
    /// Whether the reader gets all changes since its last one. Otherwise it gets a gap.
    is_resumed: bool,
    /// How often all keys and prefixes were asked for again because held changes did not fit.
    restarts: usize,
    /// The cause of this gap. A new watch has no earlier changes and needs none.
    cause: Option<GapCause>,
    /// The number of the connection. The next connection registers the watch itself.
    epoch: u64,
}

/// A key or prefix of a watch.
struct Part {
    watched: Watched,
    /// The store has sent all changes up to this version.
    reached: Option<Version>,
    is_registered: bool,
}

impl Registration {
    /// Sends no request yet. `since` is the version from which the watch is resumed, taken when the
    /// connection or the watch began: another watch of a key may get changes before this one is
    /// registered.
    pub(crate) fn new(
        session: &Arc<Session>,
        inbox: &Arc<Inbox>,
        epoch: u64,
        since: Option<Version>,
        cause: Option<GapCause>,
    ) -> Self {
        let part = |watched: &Watched| Part {
            watched: watched.clone(),
            reached: since.clone(),
            is_registered: false,
        };
        let mut parts: Vec<Part> = inbox.watched().iter().map(part).collect();
        // The last response must have a version, so that the watch can be resumed. That of a key
        // without FROM has none.
        parts.sort_by_key(|part| matches!(part.watched, Watched::Prefix(_)));
        Self {
            session: Arc::clone(session),
            inbox: Arc::clone(inbox),
            parts,
            is_resumed: since.is_some(),
            restarts: 0,
            cause,
            epoch,
        }
    }

    /// Registers the watch, as fast as its reader takes the missed changes. A few watches do so at
    /// the same time. One whose reader is slow does not delay the others.
    pub(crate) async fn run(mut self) {
        let session = Arc::clone(&self.session);
        loop {
            self.room().await;
            // The semaphore is never closed.
            let _permit = session.registrations.acquire().await;
            if self.step().await {
                return;
            }
        }
    }

    /// Waits while missed changes must wait for the reader, unless another connection registers the
    /// watch. The store remembers these changes.
    async fn room(&self) {
        loop {
            // Created before the checks, so that an event taken in between wakes this task.
            let taken = self.inbox.taken();
            let has_room = !self.is_resumed || self.inbox.has_room();
            if has_room || !self.session.state().is_at(self.epoch) {
                return;
            }
            taken.await;
        }
    }

    /// As [`ask`](Self::ask), but handles errors.
    async fn step(&mut self) -> bool {
        let error = match self.ask().await {
            Ok(is_over) => return is_over,
            Err(error) => error,
        };
        if error.is_without_store() || matches!(error, Error::QuotaExceeded(_)) {
            tokio::time::sleep(limits::WATCH_RETRY_PAUSE).await;
            return false;
        }
        let session = Arc::clone(&self.session);
        let state = session.state();
        if !state.is_at(self.epoch) {
            return true;
        }
        match error {
            Error::Timeout(_) | Error::Transport(_) | Error::Denied(_) => false,
            // Another store does not know FROM, and this one not all changes.
            Error::Refused(_) | Error::Protocol(_) if self.is_resumed => {
                self.begin_plainly();
                false
            }
            // `Protocol` would mean that the watch continues.
            Error::Protocol(why) => {
                let why = format!("unexpected response to KEYNOTIFY: {why}");
                self.inbox.end(Error::Refused(why));
                true
            }
            error => {
                self.inbox.end(error);
                true
            }
        }
    }

    /// Sends one request and handles its response. Returns whether the registration is over: the
    /// watch is registered or dropped, or another connection registers it.
    ///
    /// # Errors
    /// [`Error::Refused`] if the store does not know all changes since the version of a watch that
    /// is resumed; see also [`Error`].
    pub(crate) async fn ask(&mut self) -> Result<bool, Error> {
        let left = self.parts.iter_mut().filter(|part| !part.is_registered);
        let Some(part) = left.min_by(|one, other| one.reached.cmp(&other.reached)) else {
            return Ok(true);
        };
        {
            let state = self.session.state();
            if state.epoch != self.epoch || !state.watches.has(&self.inbox) {
                return Ok(true);
            }
        }
        let begin = match &part.reached {
            Some(since) => part.watched.begin_from(since),
            None => part.watched.begin(),
        };
        let answer = self.session.request(begin, None, None).await;
        self.session.unregister_unwatched(&part.watched);
        let registered = answer.and_then(|answer| answer.registered())?;
        // The lock is held until the changes are released, so that no new connection begins in
        // between.
        let session = Arc::clone(&self.session);
        let state = session.state();
        // An answer to a request of the earlier connection says nothing: the broker drops the
        // notifications before it that were not sent.
        if state.epoch != self.epoch {
            return Ok(true);
        }
        let version = match registered {
            // A store that knows FROM answers with a version.
            Registered::Begun(None) if part.reached.is_some() => {
                return Err(Error::Refused("it does not know FROM".into()));
            }
            Registered::Begun(version) => {
                part.is_registered = true;
                version
            }
            Registered::More(version) => Some(version),
        };
        part.reached.clone_from(&version);
        Ok(self.advance(version))
    }

    /// Passes the changes to the reader up to the version that all keys and prefixes have reached.
    /// Returns whether all are registered. `version` is that of the last response.
    fn advance(&mut self, version: Option<Version>) -> bool {
        // A response follows all notifications of earlier changes, so the registered keys and
        // prefixes have reached its version too.
        let left = self.parts.iter().filter(|part| !part.is_registered);
        let reached = left.map(|part| &part.reached).min().cloned();
        let up_to = reached.as_ref().and_then(Option::as_ref);
        if self.is_resumed
            && let Some(since) = self.inbox.again_from(up_to)
        {
            self.restarts += 1;
            match self.restarts <= limits::WATCH_RESTARTS_MAX {
                true => self.restart(Some(&since)),
                false => self.begin_plainly(),
            }
            return false;
        }
        match reached {
            Some(Some(reached)) if self.is_resumed => self.inbox.caught_up_to(reached),
            Some(_) => {}
            None => {
                let gap = self.cause.filter(|_| !self.is_resumed);
                if let Some(cause) = gap {
                    self.inbox.notice(Ok(WatchEvent::Gap(cause)));
                }
                self.inbox.begun(version);
                return true;
            }
        }
        false
    }

    /// Begins to register the watch without the missed changes, which are a gap.
    fn begin_plainly(&mut self) {
        self.inbox.resumption_refused();
        self.is_resumed = false;
        self.restart(None);
    }

    /// Begins to ask for all keys and prefixes again, for the changes after this version.
    fn restart(&mut self, since: Option<&Version>) {
        for part in &mut self.parts {
            part.reached = since.cloned();
            part.is_registered = false;
        }
    }
}
