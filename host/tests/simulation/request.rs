//! The response and the change that a new request must lead to.

use std::collections::HashSet;

use statehouse_core::store::INTERNAL_ERROR;

use crate::operation::{Command, Handled};
use crate::oracle::{Asked, Change, NO_RECORDS, QUOTA_EXCEEDED, Records};
use crate::policies;
use crate::world::World;

impl World {
    pub(crate) fn handle_request(&mut self, handled: &Handled<'_>, at: usize) {
        let &Handled {
            who,
            number,
            key,
            command,
            records,
            full,
        } = handled;
        // The faulty policy wants that even a watch is not executed again.
        let by_faulty = |by: &HashSet<usize>| by.contains(&policies::FAULTY);
        let before = self.ledger.by.get(&number).is_some_and(by_faulty);
        let (mut response, change) = self.decide(handled);
        let failed = response.as_deref() == Some(INTERNAL_ERROR);
        let records = match failed {
            true => (records.0, self.record_of_failure(records)),
            false => records,
        };
        let handled = &Handled {
            records,
            ..*handled
        };
        let watches = matches!(command, Command::Watch | Command::Unwatch);
        if watches {
            self.watch_over_link(handled, at, &mut response);
        }
        let refused = full && *command == Command::Watch;
        let open = refused || watches && before || self.ledger.open.contains(&number);
        if open && watches {
            let link = &mut self.clients[who].links[at];
            link.watches.insert(key.to_owned(), false);
            link.open_keys.insert(key.to_owned());
        }
        // A request that changes nothing is remembered in memory only on a full disk.
        let recorded = !full || change.is_some();
        if let Some(response) = &response {
            self.is_possible(handled, response, recorded);
        }
        if refused {
            self.is_possible(handled, QUOTA_EXCEEDED, false);
        }
        if open {
            response = None;
        }
        self.trace.add(|| {
            let text = response.as_deref().map(String::from_utf8_lossy);
            format!("  handled {number}: {text:.60?}")
        });
        if !recorded {
            if failed || !command.repeats() {
                self.ledger.in_memory.insert(number);
            }
            return;
        }
        // Records of a read are of keys that expired before it, unless it failed.
        let own = if command.repeats() && !failed {
            NO_RECORDS
        } else {
            records
        };
        self.oracle.note(own, Change::Done { number, response });
        let Some(change) = change else { return };
        let value = match &change {
            Change::Set { value, .. } => Some(value.clone()),
            _ => None,
        };
        let version = self.clock();
        self.oracle.note_version(records, change, version);
        for link in self.clients.iter_mut().flat_map(|it| &mut it.links) {
            if link.is_served() && link.watches.get(key) == Some(&true) {
                let owed = link.owed.entry(key.to_owned()).or_default();
                owed.push_back((number, value.clone()));
            }
        }
    }

    /// The record of a request whose policy failed: a removal of expired keys is before it, and a
    /// rollback by the guard after it.
    fn record_of_failure(&self, records: Records) -> u64 {
        (records.0 + u64::from(self.ledger.sweeps)).min(records.1)
    }

    /// A connection begins or ends a watch.
    fn watch_over_link(
        &mut self,
        handled: &Handled<'_>,
        at: usize,
        response: &mut Option<Vec<u8>>,
    ) {
        let Handled { who, key, .. } = *handled;
        let faulty = self.chosen(&self.clients[who].name, key).policy == policies::FAULTY;
        let watches = &mut self.clients[who].links[at].watches;
        // A watch that is open may have begun already. The faulty policy watches in any case.
        if faulty || *handled.command == Command::Watch {
            watches.insert(key.to_owned(), true);
            return;
        }
        match watches.remove(key) {
            Some(true) => {}
            Some(false) => *response = None,
            None => *response = Some(b":0\r\n".to_vec()),
        }
    }

    /// The last execution of a request may have had this response.
    pub(crate) fn is_possible(&mut self, handled: &Handled<'_>, response: &[u8], recorded: bool) {
        let number = handled.number;
        let needed = match self.ledger.reads.contains(&number) {
            true => self.ledger.needed.get(&number).copied().unwrap_or(0),
            false if recorded => handled.records.1,
            false => 0,
        };
        let possible = self.ledger.possible.entry(number).or_default();
        let known = possible.entry(response.to_vec()).or_insert(needed);
        *known = needed.min(*known);
    }

    /// The response to a request that is handled now, and its change. The response is none if it is
    /// open.
    pub(crate) fn decide(&mut self, handled: &Handled<'_>) -> (Option<Vec<u8>>, Option<Change>) {
        let &Handled {
            who,
            number,
            key,
            command,
            records,
            full,
        } = handled;
        let chosen = self.chosen(&format!("c{who}"), key);
        let policy = chosen.policy;
        let now_ms = self.now_ms();
        let (response, change) = self.oracle.handle(&Asked {
            client: who,
            key,
            command,
            number,
            now_ms,
            full,
            faulty: policy == policies::FAULTY,
            client_keys_max: self.plan.client_keys_max,
        });
        if *command == Command::Hide {
            if policy != policies::FAULTY {
                // It is refused as unknown, and executed again if it is redelivered.
                self.ledger.unremembered.insert(number);
            }
            return (None, None);
        }
        self.ledger.by.entry(number).or_default().insert(policy);
        if matches!(command, Command::Follow(_)) {
            // Its response depends on what the store remembers: see `followers.rs`.
            return (None, None);
        }
        if policy != policies::STANDARD {
            self.tally.count("requests handled by another policy");
        }
        if *response == *INTERNAL_ERROR {
            self.ledger.failed += 1;
            if !chosen.routed {
                self.ledger.failures += 1;
                *self.ledger.counted.entry((chosen.canary, who)).or_default() += 1;
            }
            if !full && self.ledger.reads.contains(&number) {
                let needed = self.record_of_failure(records);
                self.ledger.needed.insert(number, needed);
            }
            return (Some(response), None);
        }
        if *response == *QUOTA_EXCEEDED {
            self.tally.count(match full {
                true => "refused for a full disk",
                false => "refused by the quota of a client",
            });
        }
        if matches!(command, Command::Get | Command::Scan | Command::Meta) {
            let mut needed = self.oracle.changed(key, *command == Command::Scan);
            if self.ledger.sweeps {
                // The removal of expired keys is the first record.
                needed = needed.max(records.0.min(records.1));
            }
            if self.ledger.open.contains(&number) && records.0 > records.1 {
                // If its packet id was recorded before the crash, it is not handled again.
                needed = needed.min(self.needed_for(number));
            }
            self.ledger.needed.insert(number, needed);
        }
        (Some(response), change)
    }
}
