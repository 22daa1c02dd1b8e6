//! Who is to hear of what behind a foreign broker, where watches outlive the process: of each change at least once, before
//! its request is acknowledged, whatever ended in between.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use statehouse_core::store::{
    Key, Notification, Swept, Table, WatchChange, WatchChanges, Watches, Write,
};

use crate::exit::Heard;

/// What is owed to watchers.
#[derive(Default)]
pub(crate) struct Promises {
    /// Who watches what, each with a number: one that ended and began again is another.
    watched: BTreeMap<(Arc<str>, Key), u64>,
    next: u64,
    due: HashMap<u64, Due>,
    /// Ends of keys: the record, the time, and who is to hear.
    ends: Vec<(u64, u64, Heard, Key, u64)>,
    /// What reached the broker.
    told: HashSet<Heard>,
}

/// What one request led to.
struct Due {
    /// The copy of the request that ran.
    copy: u32,
    record: u64,
    /// Who is to hear of it, over which watch of which key.
    hear: Vec<(Heard, Key, u64)>,
}

impl Promises {
    /// Watches changed.
    pub(crate) fn note(&mut self, changes: &WatchChanges) {
        let client = &changes.peer.client;
        for change in &changes.changes {
            match change {
                WatchChange::Began(key, _) => self.begin(client, key),
                WatchChange::Ended(key) => {
                    let ended = self.watched.remove(&(client.clone(), key.clone()));
                    assert!(ended.is_some(), "what is no watch ended");
                }
                WatchChange::AllEnded => self.watched.retain(|(it, _), _| it != client),
            }
        }
    }

    fn begin(&mut self, client: &Arc<str>, key: &Key) {
        self.next += 1;
        let place = self.watched.entry((client.clone(), key.clone()));
        place.or_insert(self.next);
    }

    /// A start found these. One whose end was lost is another one, since nobody was to be told meanwhile.
    pub(crate) fn resume(&mut self, found: &Watches) {
        let there =
            |client: &Arc<str>, key: &Key| found.of(key).any(|(it, _)| it.client == *client);
        self.watched.retain(|(client, key), _| there(client, key));
        for peer in found.peers() {
            for key in found.by(peer) {
                self.begin(&peer.client, key);
            }
        }
    }

    /// A copy of a request wrote this, and these are told.
    pub(crate) fn owe(
        &mut self,
        (request, copy): (u64, u32),
        record: u64,
        writes: &[Write],
        notices: &[Notification],
    ) {
        let hear = self.due_to(writes, notices);
        let due = Due { copy, record, hear };
        self.due.insert(request, due);
    }

    fn due_to(&self, writes: &[Write], notices: &[Notification]) -> Vec<(Heard, Key, u64)> {
        let mut hear = Vec::new();
        for notice in notices {
            let version = notice.version;
            let is_it = |it: &&Write| !it.hidden && it.version() == version;
            // Else it is told again.
            let Some(wrote) = writes.iter().find(is_it) else {
                continue;
            };
            let key = Key::copy_from_slice(wrote.key());
            for (peer, _) in &notice.to {
                let client = peer.client.clone();
                let watch = self.watched[&(client.clone(), key.clone())];
                hear.push((Heard { client, version }, key.clone(), watch));
            }
        }
        hear
    }

    /// Keys went because their time was over.
    pub(crate) fn owe_ends(&mut self, record: u64, swept: &Swept, notices: &[Notification]) {
        for (heard, key, watch) in self.due_to(&swept.writes, notices) {
            self.ends.push((record, swept.now_ms, heard, key, watch));
        }
    }

    /// A start tells again of what is behind its snapshot and not long ago, where the key did not come back. What else
    /// did not reach the broker is lost.
    pub(crate) fn forgive_ends(&mut self, base: u64, since_ms: u64, table: &Table) {
        let known = |record: u64, now_ms: u64, key: &Key| {
            record > base && now_ms >= since_ms && table.get(key).is_none()
        };
        self.ends.retain(|(record, now_ms, heard, key, _)| {
            self.told.contains(heard) || known(*record, *now_ms, key)
        });
    }

    /// Everything reached the broker. How many heard of ends.
    pub(crate) fn settle(&mut self) -> u64 {
        let ends = std::mem::take(&mut self.ends);
        let mut told = 0;
        for (record, _, heard, key, watch) in ends {
            if self.watched.get(&(heard.client.clone(), key)) == Some(&watch) {
                assert!(
                    self.told.contains(&heard),
                    "nobody told {heard:?}, the end of record {record}"
                );
                told += 1;
            }
        }
        told
    }

    /// Nobody can say any more what it was.
    pub(crate) fn forgive(&mut self, request: u64) {
        self.due.remove(&request);
    }

    /// What is behind this record did not happen.
    pub(crate) fn forget_behind(&mut self, record: u64) {
        self.due.retain(|_, due| due.record <= record);
        self.ends.retain(|(of, ..)| *of <= record);
    }

    /// A notification reached the broker.
    pub(crate) fn heard(&mut self, heard: Heard) {
        self.told.insert(heard);
    }

    /// The broker has the PUBACK of a request. How many watchers were told of what it did.
    pub(crate) fn acknowledged(&mut self, request: u64, copy: u32) -> u64 {
        // An older copy of one that was forgotten since says nothing of this.
        if self.due.get(&request).is_none_or(|due| due.copy > copy) {
            return 0;
        }
        let due = self.due.remove(&request).map(|due| due.hear);
        let due = due.unwrap_or_default();
        let due = due.iter().filter(|(heard, key, watch)| {
            let watched = (heard.client.clone(), key.clone());
            self.watched.get(&watched) == Some(watch)
        });
        let told = due.inspect(|(heard, ..)| {
            assert!(
                self.told.contains(heard),
                "request {request} is acknowledged, and nobody told {heard:?}"
            );
        });
        told.count() as u64
    }
}
