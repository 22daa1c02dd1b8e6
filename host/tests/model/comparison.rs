//! Compares the notifications, the table, the owners and the watches of the store with the oracle.

use std::collections::{BTreeMap, HashMap};

use bytes::Bytes;
use data_encoding::HEXUPPER;
use statehouse_core::clock::Stamp;
use statehouse_core::request::Dialect;
use statehouse_core::store::{Effects, Mode, Notification, Watches};

use crate::model::Model;
use crate::oracle::{Watched, WatcherNotification};

impl Model {
    /// Compares the notifications of a step with the expected ones.
    pub(super) fn check_notifications(
        &mut self,
        effects: &Effects,
        mut expected: Vec<WatcherNotification>,
    ) {
        let mut received = Vec::new();
        let mut last = self.last_version;
        let mut versions: HashMap<Vec<u8>, Stamp> = HashMap::new();
        for notification in effects.expired.iter().chain(&effects.notifications) {
            for it in self.watcher_notifications(notification) {
                let before = versions.insert(it.key.clone(), notification.version);
                // The notifications of one change in several dialects have the same version.
                let is_new = notification.version > self.last_version;
                assert!(is_new || before == Some(notification.version));
                last = last.max(notification.version);
                received.push(it);
            }
        }
        self.last_version = last;
        expected.sort();
        received.sort();
        assert_eq!(received, expected);
    }

    /// Notifications of the store as one notification for each watcher.
    pub(super) fn all_watcher_notifications(
        &self,
        notifications: &[Notification],
    ) -> Vec<WatcherNotification> {
        let all = notifications.iter();
        all.flat_map(|it| self.watcher_notifications(it)).collect()
    }

    /// A notification of the store as one notification for each watcher.
    fn watcher_notifications(&self, notification: &Notification) -> Vec<WatcherNotification> {
        let of_watcher = notification.to.iter().map(|(peer, topic)| {
            let client = self.peers.iter().position(|it| it == peer);
            WatcherNotification {
                client: client.expect("a current connection"),
                key: key_of(topic, &peer.client),
                payload: notification.payload.to_vec(),
            }
        });
        of_watcher.collect()
    }

    /// Compares the table and the watches of the store with the oracle.
    pub(super) fn compare(&self) {
        let is_live = |ms: Option<u64>| ms.is_none_or(|ms| ms > self.now_ms);
        let state = self.core.store().state();
        let table = state.table.range(b"", None);
        let table: Vec<_> = table.filter(|it| is_live(it.expires_ms())).collect();
        let map = self.oracle.keys.iter();
        let map: Vec<_> = map.filter(|(_, it)| is_live(it.expires_ms)).collect();
        assert_eq!(table.len(), map.len());
        for (entry, (expected, expected_entry)) in table.into_iter().zip(map) {
            assert_eq!(entry.key(), expected);
            let owner = format!("client-{}", expected_entry.owner);
            assert_eq!(state.owner(expected, false), Some(&*owner));
            assert_eq!(entry.value(), expected_entry.value);
            assert_eq!(entry.version(), expected_entry.version);
            assert_eq!(entry.expires_ms(), expected_entry.expires_ms);
            let fence = entry.fence();
            let fence = fence.as_ref().map(|it| (it.wall, it.counter, &*it.node));
            assert_eq!(fence, expected_entry.fence);
        }
        self.compare_owners();
        let watches = &state.watches;
        assert_eq!(watches.are_durable(), self.mode == Mode::Foreign);
        assert_eq!(self.watched(watches), self.oracle.watched());
    }

    /// Checks the counters of the owners. They include expired keys that were not swept yet.
    fn compare_owners(&self) {
        let mut owned: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
        let state = self.core.store().state();
        for entry in state.table.range(b"", None) {
            let owner = state.owner(entry.key(), false).expect("a client wrote it");
            let (keys, bytes) = owned.entry(owner).or_default();
            (*keys, *bytes) = (*keys + 1, *bytes + entry.weight());
        }
        let counted = state.owners.all();
        let counted = counted.map(|(it, keys, bytes)| (it, (keys, bytes)));
        assert_eq!(counted.collect::<BTreeMap<_, _>>(), owned);
    }

    /// All watches with their clients and dialects, sorted.
    fn watched(&self, watches: &Watches) -> Vec<(Watched, usize, Dialect)> {
        let mut watched = Vec::new();
        for (peer, scope, key, dialect) in watches.range(None) {
            let client = self.peers.iter().position(|it| it == peer);
            let client = client.expect("a current connection");
            watched.push(((scope, key.to_vec()), client, dialect));
        }
        watched.sort();
        assert_eq!(watched.len(), watches.len());
        watched
    }
}

/// The key in a notification topic. Checks all other parts of the topic.
fn key_of(topic: &Bytes, client: &str) -> Vec<u8> {
    let before = format!(
        "clients/statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/{}/command/notify/",
        HEXUPPER.encode(client.as_bytes())
    );
    let topic = std::str::from_utf8(topic).expect("a topic");
    let named = topic.strip_prefix(&before).expect("the client's own topic");
    HEXUPPER.decode(named.as_bytes()).expect("Base 16")
}
