//! Registers watches at the store: new ones, all of them after a reconnect, and again while they
//! are idle, so that they can be resumed.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::{Connection, Session, State, now_ms, publish};
use crate::error::Error;
use crate::inbox::Inbox;
use crate::limits;
use crate::request::Registered;
use crate::watch::Watched;

/// What follows the response to the request that registers a watch again.
enum Next {
    /// The watch is registered.
    Done,
    /// Another request.
    Again,
    /// Another request, after a pause.
    AgainLater,
    /// A request without a version: the store cannot resume the watch.
    Anew,
}

/// Why a watch is not registered again.
enum Over {
    /// Another connection does that.
    Connection,
    /// The store refuses it.
    Watch(Error),
}

impl Session {
    /// Adds a watch to the session.
    pub(crate) fn add_watch(&self, watched: &Watched, inbox: Arc<Inbox>) {
        let mut state = self.state();
        if let Connection::Closed(error) = &state.connection {
            inbox.end(error.clone());
        }
        let watches = state.watches.like_mut(watched);
        watches
            .entry(watched.bytes().clone())
            .or_default()
            .push(inbox);
    }

    /// Removes a watch. If it was the last one of its key or prefix, its registration at the store
    /// is ended without waiting for the response. Later notifications are ignored.
    pub(crate) fn remove_watch(&self, watched: &Watched, inbox: &Arc<Inbox>) {
        let mut state = self.state();
        let watches = state.watches.like_mut(watched);
        let Some(inboxes) = watches.get_mut(watched.bytes()) else {
            return;
        };
        inboxes.retain(|other| !Arc::ptr_eq(other, inbox));
        if !inboxes.is_empty() {
            return;
        }
        watches.remove(watched.bytes());
        self.unregister(&mut state, watched);
    }

    /// Ends a registration at the store without waiting for the response.
    fn unregister(&self, state: &mut State, watched: &Watched) {
        let timestamp = state.clock.read(now_ms());
        let payload = watched.stop();
        state
            .outlet
            .send_unkept(|number| publish(payload, self.properties(number, timestamp)));
    }

    /// Whether a key or prefix lost its last watch while a task registered it again.
    /// That watch sent its STOP too early, or without a connection, so this function sends another
    /// one.
    fn unregister_unwatched(&self, watched: &Watched) -> bool {
        let mut state = self.state();
        let is_unwatched = !state.watches.contains(watched);
        if is_unwatched {
            self.unregister(&mut state, watched);
        }
        is_unwatched
    }

    /// Registers all watches again after a reconnect, since registrations end with their connection
    /// (section 8).
    pub(super) async fn register_watches(self: Arc<Self>, epoch: u64) {
        let watches = self.state().watches.all();
        for watched in watches {
            match self.register_again(&watched, epoch).await {
                Ok(()) => {}
                Err(Over::Connection) => return,
                Err(Over::Watch(error)) => {
                    let state = self.state();
                    for inbox in state.watches.readers(&watched) {
                        inbox.end(error.clone());
                    }
                }
            }
        }
    }

    /// Registers one watch again. Its readers get the changes since their last one, or a gap if the
    /// store does not know these.
    async fn register_again(&self, watched: &Watched, epoch: u64) -> Result<(), Over> {
        let mut may_resume = true;
        loop {
            let since = {
                let state = self.state();
                if state.epoch != epoch {
                    return Err(Over::Connection);
                }
                if !state.watches.contains(watched) {
                    return Ok(());
                }
                let versions = state.watches.readers(watched);
                versions.filter_map(|inbox| inbox.resume()).min()
            };
            let since = since.filter(|_| may_resume);
            let begin =
                (since.as_ref()).map_or_else(|| watched.begin(), |it| watched.begin_from(it));
            let answer = self.request(begin, None, None).await;
            if self.unregister_unwatched(watched) {
                return Ok(());
            }
            let registered = answer.and_then(|answer| answer.registered());
            match self.registered_again(watched, epoch, since.is_some(), registered)? {
                Next::Done => return Ok(()),
                Next::Again => {}
                Next::AgainLater => tokio::time::sleep(limits::WATCH_RETRY_PAUSE).await,
                Next::Anew => may_resume = false,
            }
        }
    }

    /// Handles the response to a request that registers a watch again. `is_resumed` says whether
    /// the request had a version.
    fn registered_again(
        &self,
        watched: &Watched,
        epoch: u64,
        is_resumed: bool,
        registered: Result<Registered, Error>,
    ) -> Result<Next, Over> {
        let state = self.state();
        // The next connection registers the watches itself, and a closed client does not need them.
        // An answer to a request of the earlier connection says nothing: the broker drops the
        // notifications before it that were not sent.
        if state.epoch != epoch || matches!(state.connection, Connection::Closed(_)) {
            return Err(Over::Connection);
        }
        let readers = state.watches.readers(watched);
        match registered {
            Ok(Registered::Begun(version)) => {
                for inbox in readers {
                    if !is_resumed || !inbox.is_resuming() {
                        inbox.gap();
                    }
                    inbox.begun(version.clone());
                }
                Ok(Next::Done)
            }
            Ok(Registered::More(version)) => {
                for inbox in readers.filter(|inbox| inbox.is_resuming()) {
                    inbox.caught_up_to(version.clone());
                }
                Ok(Next::Again)
            }
            Err(Error::Timeout(_) | Error::Transport(_) | Error::Denied(_)) => Ok(Next::Again),
            Err(error) if error.is_without_store() => Ok(Next::AgainLater),
            // Another store does not know FROM, and this one not all changes.
            Err(Error::Refused(_)) if is_resumed => {
                readers.for_each(|inbox| inbox.resumption_refused());
                Ok(Next::Anew)
            }
            Err(error) => Err(Over::Watch(error)),
        }
    }

    /// Learns again and again how far the store is, as long as this connection lasts. Otherwise a
    /// watch without changes could not be resumed once the store has forgotten its version. Watches
    /// of keys that began without a version are left out: the response to their KEYNOTIFY has none.
    ///
    /// The response to a KEYNOTIFY from a version follows all notifications of earlier changes, so
    /// every registered watch has all changes up to the version of the response.
    pub(super) async fn refresh_watches(session: Weak<Self>, epoch: u64, pause: Duration) {
        let mut wait = pause;
        loop {
            tokio::time::sleep(wait).await;
            wait = pause;
            let Some(session) = session.upgrade() else {
                return;
            };
            let resumable = {
                let state = session.state();
                if state.epoch != epoch || matches!(state.connection, Connection::Closed(_)) {
                    return;
                }
                let mut watches = state.watches.all().into_iter();
                watches.find_map(|watched| {
                    let position = |inbox: &Arc<Inbox>| inbox.position();
                    let since = state.watches.readers(&watched).find_map(position)?;
                    Some((watched, since))
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
            for inbox in state.watches.all_readers() {
                inbox.refreshed(&version);
            }
        }
    }

    /// Sends the changes since a version to a new watch, and registers it.
    ///
    /// # Errors
    /// [`Error::Refused`] if the store does not know all changes since this version.
    pub(crate) async fn register_from(
        &self,
        watched: &Watched,
        inbox: &Inbox,
    ) -> Result<(), Error> {
        loop {
            let Some(since) = inbox.resume() else {
                return Ok(());
            };
            let epoch = self.state().epoch;
            let answer = self.request(watched.begin_from(&since), None, None).await?;
            let registered = answer.registered()?;
            // As in `register_again`.
            if self.state().epoch != epoch {
                continue;
            }
            match registered {
                Registered::Begun(version) => {
                    inbox.begun(version);
                    return Ok(());
                }
                Registered::More(version) => inbox.caught_up_to(version),
            }
        }
    }
}
