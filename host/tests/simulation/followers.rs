//! Clients that watch a prefix over all their connections.
//!
//! Over a new connection such a client sends KEYNOTIFY with the last version that it has. Until the
//! response it only collects changes, because the broker may redeliver some of them before the
//! store sends earlier ones. It ignores changes up to its version, because it may get them again,
//! and responses to requests that it sent over an earlier connection. Over the same connection it
//! sometimes asks again, to learn how far the store is.

use std::collections::BTreeSet;

use statehouse_core::clock::Stamp;

use crate::egress::{notification, stamp};
use crate::operation::{Command, Operation};
use crate::packet::Publish;
use crate::world::World;

/// The prefix that these clients watch. No key with it expires.
const PREFIX: &str = "k";

/// What the client has of the changes.
#[derive(Default)]
pub(crate) struct Follower {
    /// It has all changes up to this version; none before the first watch and after a gap.
    reached: Option<Stamp>,
    /// The last KEYNOTIFY and its connection.
    asked: Option<(u64, u64)>,
    /// The connection over which a KEYNOTIFY was answered.
    resumed: Option<u64>,
    /// The changes that arrived while the watch was not resumed.
    held: BTreeSet<Stamp>,
}

/// The follower asks again over its connection at one of so many operations.
const REFRESH_ONCE_IN: u64 = 12;

impl World {
    /// Sends a KEYNOTIFY if the client follows a prefix and has sent none over this connection.
    pub(crate) fn follow(&mut self, who: usize) -> bool {
        let client = &mut self.clients[who];
        let Some(link) = client.open().map(|link| link.number) else {
            return false;
        };
        let Some(follower) = &mut client.follower else {
            return false;
        };
        let has_asked = follower.asked.is_some_and(|(_, over)| over == link);
        let refreshes = follower.resumed == Some(link) && self.dice.once_in(REFRESH_ONCE_IN);
        if has_asked && !refreshes {
            return false;
        }
        let number = self.next_number;
        self.next_number += 1;
        follower.asked = Some((number, link));
        let operation = Operation::Request {
            key: format!("*{PREFIX}"),
            command: Command::Follow(follower.reached),
        };
        let publish = self.create(who, number, &operation, 1);
        self.clients[who].publish(number, operation, publish);
        true
    }

    /// A notification leaves for a follower. Returns the position that it depends on.
    pub(crate) fn check_followed(&self, it: &Publish, key: &str, value: &str) -> u64 {
        let version = it.user("__ts").and_then(stamp).expect("a version");
        let mut changes = self.oracle.since(PREFIX, Stamp::default());
        let Some(change) = changes.rfind(|change| change.version == version) else {
            assert!(
                self.ledger.lossy || it.dup,
                "obligation 10: a notification of {key} at {version:?}, which did not change"
            );
            return 0;
        };
        let expected = change
            .value
            .map_or("DELETE".into(), String::from_utf8_lossy);
        assert_eq!(
            (key, value),
            (change.key, &*expected),
            "obligation 10: the change at {version:?} (right: expected)"
        );
        change.needed
    }

    /// A notification arrives.
    pub(crate) fn followed(&mut self, who: usize, it: &Publish) {
        let (_, key, _) = notification(&it.topic, &it.payload);
        let version = it.user("__ts").and_then(stamp).expect("a version");
        let client = &mut self.clients[who];
        let over = client.link().map(|link| link.number);
        let Some(follower) = &mut client.follower else {
            return;
        };
        let Some(reached) = follower.reached else {
            return;
        };
        if version <= reached {
            self.tally.count("changes sent again to a follower");
            return;
        }
        if follower.resumed != over {
            follower.held.insert(version);
            return;
        }
        self.check_missed(
            reached,
            |it| it < version,
            || format!("c{who} gets {key} at {version:?}"),
        );
        self.tally.count("changes followed");
        self.reach(who, version);
    }

    /// No change after `reached` has a version that the client must have.
    fn check_missed(
        &self,
        reached: Stamp,
        due: impl Fn(Stamp) -> bool,
        when: impl FnOnce() -> String,
    ) {
        let mut changes = self.oracle.since(PREFIX, reached);
        let missed = changes.find(|it| due(it.version));
        let missed = missed.filter(|_| !self.ledger.lossy);
        if let Some(it) = missed {
            let (key, version) = (it.key, it.version);
            panic!("obligation 10: {}, and missed {key} at {version:?}", when());
        }
    }

    fn reach(&mut self, who: usize, version: Stamp) {
        if let Some(follower) = &mut self.clients[who].follower {
            follower.reached = follower.reached.max(Some(version));
        }
    }

    /// A response arrives.
    pub(crate) fn follow_answered(
        &mut self,
        who: usize,
        number: u64,
        payload: &[u8],
        version: Option<&str>,
    ) {
        let client = &mut self.clients[who];
        let over = client.link().map(|link| link.number);
        let Some(follower) = &mut client.follower else {
            return;
        };
        if follower.asked.map(|(number, link)| (number, Some(link))) != Some((number, over)) {
            return;
        }
        let complete = match payload {
            b"+OK\r\n" => true,
            b"+MORE\r\n" => false,
            refusal => {
                assert!(
                    refusal.starts_with(b"-ERR the ") && self.ledger.may_forget,
                    "obligation 10: c{who} may not resume: {}",
                    refusal.escape_ascii()
                );
                *follower = Follower::default();
                self.tally.count("watches refused after a gap");
                return;
            }
        };
        let version = version.and_then(stamp).expect("a version");
        let held = std::mem::take(&mut follower.held);
        match complete {
            true => follower.resumed = over,
            false => follower.asked = None,
        }
        if let Some(reached) = follower.reached {
            self.tally.count("watches resumed from a version");
            let count = held.range(reached..).count();
            self.tally.add_to("changes followed", count as u64);
            self.check_missed(
                reached,
                |it| it <= version && !held.contains(&it),
                || format!("c{who} resumes at {version:?}"),
            );
        }
        self.reach(who, version);
        for later in held.into_iter().filter(|it| *it > version) {
            self.check_missed(
                version,
                |it| it < later,
                || format!("c{who} has {later:?} at {version:?}"),
            );
            self.reach(who, later);
        }
    }

    /// In the end every follower has all changes.
    pub(crate) fn settle_followers(&mut self) {
        // After a gap, or with more changes than one response has, a client asks again.
        for _ in 0..4 {
            for who in 0..self.clients.len() {
                self.follow(who);
            }
            self.flow_until_quiet();
        }
        for client in &self.clients {
            let Some(follower) = &client.follower else {
                continue;
            };
            let reached = follower
                .reached
                .expect("obligation 10: no watch is refused twice");
            self.check_missed(
                reached,
                |_| true,
                || format!("{} has {reached:?} in the end", client.name),
            );
        }
    }
}
