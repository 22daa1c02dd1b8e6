//! The notifications that must reach watchers behind a foreign broker.
//!
//! Watches outlive the process there. The broker must receive the notification of each change at
//! least once before the acknowledgement of its request, even after crashes.

use std::collections::BTreeMap;

use statehouse_core::clock::Stamp;
use statehouse_core::store::Table;

use crate::operation::covers;

/// The notification of one change to one watcher.
#[derive(Clone, Debug)]
pub(crate) struct Notice {
    pub(crate) client: usize,
    pub(crate) key: String,
    /// The new value, or DELETE.
    pub(crate) value: String,
    /// The clock before the change and after it. Its version is between them.
    pub(crate) clock: (Stamp, Stamp),
    /// The record of the change.
    pub(crate) record: u64,
    pub(crate) at_ms: u64,
}

/// A notification on its way.
#[derive(Clone, Debug)]
pub(crate) struct Sent {
    pub(crate) client: usize,
    pub(crate) key: String,
    pub(crate) value: String,
    pub(crate) version: Stamp,
}

impl Notice {
    pub(crate) fn matches(&self, sent: &Sent) -> bool {
        let (before, after) = self.clock;
        (self.client, &self.key, &self.value) == (sent.client, &sent.key, &sent.value)
            && before < sent.version
            && sent.version <= after
    }
}

/// The notifications that are due, and those that reached the broker.
#[derive(Default)]
pub(crate) struct Watchers {
    /// All changes. A notification of anything else is wrong. A start notifies the watchers that
    /// it finds, so their clients do not matter here.
    changes: Vec<Notice>,
    /// By request: the number of the copy that was executed, and what it causes.
    requests: BTreeMap<u64, (u64, Vec<Notice>)>,
    expirations: Vec<Notice>,
    delivered: Vec<Sent>,
}

impl Watchers {
    /// A copy of a request, or its absence the expiry of a key, made a change.
    pub(crate) fn expect(
        &mut self,
        cause: Option<(u64, u64)>,
        change: &Notice,
        watchers: impl Iterator<Item = usize>,
    ) {
        self.changes.push(change.clone());
        let notices = watchers.map(|client| Notice {
            client,
            ..change.clone()
        });
        match cause {
            Some((number, copy)) => {
                self.requests.insert(number, (copy, notices.collect()));
            }
            None => self.expirations.extend(notices),
        }
    }

    /// Which change a notification is of. Returns its record.
    pub(crate) fn leaves(&self, sent: &Sent) -> u64 {
        let change = Sent {
            client: usize::MAX,
            ..sent.clone()
        };
        let mut changes = self.changes.iter().rev();
        let notice = changes.find(|it| it.matches(&change));
        let notice = notice.unwrap_or_else(|| {
            panic!("obligation 3: the notification {sent:?} of a change that did not happen")
        });
        notice.record
    }

    pub(crate) fn delivered(&mut self, sent: Sent) {
        self.delivered.push(sent);
    }

    fn was_delivered(&self, notice: &Notice) -> bool {
        self.delivered.iter().any(|it| notice.matches(it))
    }

    /// The broker receives the acknowledgement of a copy. Returns how many notifications were due.
    pub(crate) fn acknowledged(&mut self, number: u64, copy: u64) -> u64 {
        // The acknowledgement of an older copy does not acknowledge a later execution.
        let of_this = self.requests.get(&number).is_some_and(|it| it.0 <= copy);
        let executed = of_this.then(|| self.requests.remove(&number)).flatten();
        let (_, notices) = executed.unwrap_or_default();
        for notice in &notices {
            assert!(
                self.was_delivered(notice),
                "obligation 3: request {number} is acknowledged before {notice:?}"
            );
        }
        notices.len() as u64
    }

    /// A watch of a client ends.
    pub(crate) fn unwatched(&mut self, client: usize, watched: &str) {
        let ends = |it: &Notice| it.client == client && covers(watched, &it.key);
        for (_, notices) in self.requests.values_mut() {
            notices.retain(|it| !ends(it));
        }
        self.expirations.retain(|it| !ends(it));
    }

    /// The store can no longer determine the changes of a request.
    pub(crate) fn waive(&mut self, number: u64) {
        self.requests.remove(&number);
    }

    /// Nothing behind `position` survived. A start renotifies an expiration only if its record is
    /// behind the snapshot at `base`, it is recent, and the key does not exist again.
    pub(crate) fn crash(&mut self, position: u64, base: u64, since_ms: u64, table: &Table) {
        let survives = |it: &Notice| it.record <= position;
        self.changes.retain(survives);
        self.requests
            .retain(|_, (_, notices)| notices.iter().all(survives));
        let Self { delivered, .. } = self;
        self.expirations.retain(|it| {
            let renotified =
                it.record > base && it.at_ms >= since_ms && table.get(it.key.as_bytes()).is_none();
            survives(it) && (renotified || delivered.iter().any(|sent| it.matches(sent)))
        });
    }

    /// Every output reached the broker. Returns how many expirations had watchers.
    pub(crate) fn check_expirations(&self) -> u64 {
        for notice in &self.expirations {
            assert!(
                self.was_delivered(notice),
                "obligation 3: {notice:?} of an expiration did not arrive"
            );
        }
        self.expirations.len() as u64
    }
}
