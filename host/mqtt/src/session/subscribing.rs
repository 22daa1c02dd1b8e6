//! How the subscriptions of a session, and the searches for their retained messages, change.

use bytes::Bytes;

use super::{RetainedSearch, Session};
use crate::{
    Limits,
    change::Part,
    persist::ChangeLog,
    router::{Subscription, cost_bytes},
    topic,
};

impl Session {
    /// Adds or replaces a subscription. Returns true if it is new.
    pub(crate) fn subscribe(
        &mut self,
        filter: &Bytes,
        subscription: Subscription,
        change_log: &mut ChangeLog,
    ) -> bool {
        let old = (self.subscriptions).insert(filter, subscription, &self.client);
        if old != Some(subscription) {
            self.record_subscription(filter, change_log);
        }
        old.is_none()
    }

    fn record_subscription(&self, filter: &Bytes, change_log: &mut ChangeLog) {
        if let Some(subscription) = self.subscriptions.get(filter) {
            self.log(change_log).write(Part::Subscribe {
                filter,
                subscription,
                retained_pending: self.retained_pending(filter),
            });
        }
    }

    /// Restores a recovered subscription.
    pub(crate) fn restore_subscription(&mut self, filter: &Bytes, subscription: Subscription) {
        (self.subscriptions).insert(filter, subscription, &self.client);
    }

    /// Begins a search for the retained messages of a new subscription. A pending search for the
    /// same filter begins again: all messages must be sent after this SUBSCRIBE (section 3.8.4),
    /// and a client that repeats it holds no more memory.
    pub(crate) fn begin_retained_search(&mut self, filter: Bytes, mut search: RetainedSearch) {
        search.recorded = self.retained_pending(&filter);
        self.retained_searches.insert(filter, search);
    }

    /// Records the searches that are not over when the lock is released, so that they begin again
    /// after a restart. Most searches are over before that.
    pub(crate) fn record_retained_searches(&mut self, change_log: &mut ChangeLog) {
        if !self.durable || !change_log.can_record_searches() {
            return;
        }
        let searches = self.retained_searches.iter_mut();
        let unrecorded: Vec<_> = searches
            .filter(|(_, search)| !search.recorded)
            .map(|(filter, search)| {
                search.recorded = true;
                filter.clone()
            })
            .collect();
        for filter in unrecorded {
            self.record_subscription(&filter, change_log);
        }
    }

    /// Records the end of a search that was taken out of the table.
    pub(crate) fn end_retained_search(
        &self,
        filter: &Bytes,
        search: &RetainedSearch,
        change_log: &mut ChangeLog,
    ) {
        if search.recorded {
            self.record_subscription(filter, change_log);
        }
    }

    /// Whether the log holds that retained messages are still to be sent for this subscription.
    pub(crate) fn retained_pending(&self, filter: &Bytes) -> bool {
        let search = self.retained_searches.get(filter);
        search.is_some_and(|search| search.recorded)
    }

    /// The limit that refuses a subscription to this filter. None if there is room, or if the
    /// subscription exists. `log_has_room` is the answer of the log. If not `shares` (during
    /// recovery), the owner's share is not a limit, only the total.
    pub(crate) fn subscription_limit(
        &self,
        filter: &[u8],
        limits: &Limits,
        log_has_room: bool,
        shares: bool,
    ) -> Option<&'static str> {
        let own = &self.subscriptions;
        let total_max = limits.subscription_bytes_total_max;
        if own.get(filter).is_some() {
            None
        } else if own.len() >= limits.subscriptions_per_session_max {
            Some("the session has as many subscriptions as it may have")
        } else if topic::is_shared(filter)
            && own.shared_len() >= limits.shared_subscriptions_per_session_max
        {
            Some("the session has as many shared subscriptions as it may have")
        } else if own.bytes() + cost_bytes(filter) > limits.subscription_bytes_per_session_max {
            Some("the subscriptions of the session would exceed their limit of bytes")
        } else if self.is_durable() && !log_has_room {
            Some("the log has no room on the disk for this subscription")
        } else if !own.has_room(filter, &self.client, total_max, shares) {
            Some("subscriptions of this user or address, or of all clients, exceed their limit")
        } else {
            None
        }
    }

    /// Keeps a subscription, but without its messages: the access rules forbid it at present. Its
    /// pending search ends. It must be removed from the router.
    pub(crate) fn suspend(&mut self, filter: &Bytes, change_log: &mut ChangeLog) {
        self.subscriptions.suspend(filter);
        if let Some(search) = self.retained_searches.remove(filter) {
            self.end_retained_search(filter, &search, change_log);
        }
    }

    /// Ends the suspension of a subscription, and returns its options. It must be added to the
    /// router.
    pub(crate) fn resume(&mut self, filter: &Bytes) -> Option<Subscription> {
        self.subscriptions.resume(filter)
    }

    /// Removes a subscription with its pending search. Returns false if there was none.
    pub(crate) fn unsubscribe(&mut self, filter: &Bytes, change_log: &mut ChangeLog) -> bool {
        let existed = self.subscriptions.remove(filter, &self.client);
        if existed {
            self.retained_searches.remove(filter);
            self.log(change_log).write(Part::Unsubscribe(filter));
        }
        existed
    }
}
