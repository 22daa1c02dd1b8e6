//! The notifications that must reach watchers behind a foreign broker.
//!
//! Watches outlive the process there. The broker must receive the notification of each change at
//! least once before it receives the acknowledgement of the request, even after crashes.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use statehouse_core::store::{
    Key, Notification, Swept, Table, WatchChange, WatchChanges, Watches, Write,
};

use crate::egress::NotificationId;

/// The outstanding notifications, and those that reached the broker.
#[derive(Default)]
pub(crate) struct Obligations {
    /// The number of each watch. A watch that ended and began again has a new number.
    watched: BTreeMap<(Arc<str>, Key), u64>,
    last_watch: u64,
    /// The notifications of requests that are not acknowledged yet.
    requests: HashMap<u64, Executed>,
    expirations: Vec<Expiration>,
    /// The notifications that reached the broker.
    delivered: HashSet<NotificationId>,
}

/// One notification that a watcher must receive.
struct Obligation {
    notification: NotificationId,
    key: Key,
    /// The number of the watch. The obligation ends with its watch.
    watch: u64,
}

/// The notifications of an executed request.
struct Executed {
    /// The number of the request's copy that was executed.
    copy: u32,
    record: u64,
    obligations: Vec<Obligation>,
}

/// The notification of an expired key.
struct Expiration {
    record: u64,
    swept_ms: u64,
    obligation: Obligation,
}

impl Obligations {
    pub(crate) fn watches_changed(&mut self, changes: &WatchChanges) {
        let client = &changes.peer.client;
        for change in &changes.changes {
            match change {
                WatchChange::Began(key, _) => self.begin_watch(client, key),
                WatchChange::Ended(key) => {
                    let ended = self.watched.remove(&(client.clone(), key.clone()));
                    assert!(ended.is_some(), "a watch ended that did not exist");
                }
                WatchChange::AllEnded => self.watched.retain(|(it, _), _| it != client),
            }
        }
    }

    fn begin_watch(&mut self, client: &Arc<str>, key: &Key) {
        self.last_watch += 1;
        let place = self.watched.entry((client.clone(), key.clone()));
        place.or_insert(self.last_watch);
    }

    /// Continues with the watches that a start recovered. If a crash lost the end of a watch, the
    /// recovered watch gets a new number, because no notifications were due in between.
    pub(crate) fn resume_watches(&mut self, found: &Watches) {
        let exists =
            |client: &Arc<str>, key: &Key| found.of(key).any(|(it, _)| it.client == *client);
        self.watched.retain(|(client, key), _| exists(client, key));
        for peer in found.peers() {
            for key in found.by(peer) {
                self.begin_watch(&peer.client, key);
            }
        }
    }

    /// A copy of a request made these writes, so its notifications must reach the watchers.
    pub(crate) fn expect_notifications(
        &mut self,
        (request, copy): (u64, u32),
        record: u64,
        writes: &[Write],
        notifications: &[Notification],
    ) {
        let obligations = self.obligations_of(writes, notifications);
        let executed = Executed {
            copy,
            record,
            obligations,
        };
        self.requests.insert(request, executed);
    }

    fn obligations_of(&self, writes: &[Write], notifications: &[Notification]) -> Vec<Obligation> {
        let mut obligations = Vec::new();
        for notification in notifications {
            let version = notification.version;
            let matches = |it: &&Write| !it.hidden && it.version() == version;
            // A notification without a write repeats an earlier one.
            let Some(write) = writes.iter().find(matches) else {
                continue;
            };
            let key = Key::copy_from_slice(write.key());
            for (peer, _) in &notification.to {
                let client = peer.client.clone();
                obligations.push(Obligation {
                    watch: self.watched[&(client.clone(), key.clone())],
                    key: key.clone(),
                    notification: NotificationId { client, version },
                });
            }
        }
        obligations
    }

    /// A sweep removed expired keys, so its notifications must reach the watchers.
    pub(crate) fn expect_expirations(
        &mut self,
        record: u64,
        swept: &Swept,
        notifications: &[Notification],
    ) {
        for obligation in self.obligations_of(&swept.writes, notifications) {
            self.expirations.push(Expiration {
                record,
                swept_ms: swept.now_ms,
                obligation,
            });
        }
    }

    /// A start renotifies an expiration only if its record is behind the snapshot, it is recent,
    /// and the key does not exist again. Waives all others that did not reach the broker.
    pub(crate) fn waive_expirations(&mut self, base: u64, since_ms: u64, table: &Table) {
        let renotified = |it: &Expiration| {
            it.record > base && it.swept_ms >= since_ms && table.get(&it.obligation.key).is_none()
        };
        let delivered = &self.delivered;
        self.expirations
            .retain(|it| delivered.contains(&it.obligation.notification) || renotified(it));
    }

    /// Checks, after every output reached the broker, that all expirations were notified. Returns
    /// how many notifications there were for watches that still exist.
    pub(crate) fn check_expirations(&mut self) -> u64 {
        let mut count = 0;
        for expiration in std::mem::take(&mut self.expirations) {
            let obligation = &expiration.obligation;
            if self.is_due(obligation) {
                assert!(
                    self.delivered.contains(&obligation.notification),
                    "the notification {:?} of the expiration in record {} is missing",
                    obligation.notification,
                    expiration.record
                );
                count += 1;
            }
        }
        count
    }

    /// Whether the watch of an obligation still exists.
    fn is_due(&self, obligation: &Obligation) -> bool {
        let Obligation {
            notification,
            key,
            watch,
        } = obligation;
        let watched = (notification.client.clone(), key.clone());
        self.watched.get(&watched) == Some(watch)
    }

    /// Waives the notifications of a request whose changes the store can no longer determine.
    pub(crate) fn waive(&mut self, request: u64) {
        self.requests.remove(&request);
    }

    /// Removes the obligations of records that a crash lost.
    pub(crate) fn discard_after(&mut self, record: u64) {
        self.requests
            .retain(|_, executed| executed.record <= record);
        self.expirations.retain(|it| it.record <= record);
    }

    /// A notification reached the broker.
    pub(crate) fn record_delivery(&mut self, notification: NotificationId) {
        self.delivered.insert(notification);
    }

    /// Checks that the broker received all notifications of a request before its PUBACK. Returns
    /// how many there were.
    pub(crate) fn check_acknowledged(&mut self, request: u64, copy: u32) -> u64 {
        // The PUBACK of an older copy does not acknowledge a later execution of the request.
        let of_this_copy = |executed: &Executed| executed.copy <= copy;
        if !self.requests.get(&request).is_some_and(of_this_copy) {
            return 0;
        }
        let executed = self.requests.remove(&request);
        let obligations = executed.map(|it| it.obligations).unwrap_or_default();
        let due = obligations.iter().filter(|it| self.is_due(it));
        let checked = due.inspect(|it| {
            assert!(
                self.delivered.contains(&it.notification),
                "request {request} was acknowledged before the notification {:?}",
                it.notification
            );
        });
        checked.count() as u64
    }
}
