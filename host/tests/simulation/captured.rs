//! The state of the store at a log position, to compare a recovered store with.
//!
//! The oracle knows keys and values. This comparison adds versions, fences, deadlines, owners,
//! hidden keys, watches, remembered requests and the assignment of policies.

use std::collections::BTreeMap;

use statehouse_config::limits::ENTRY_OVERHEAD_BYTES;
use statehouse_core::clock::Stamp;
use statehouse_core::policy::Assignment;
use statehouse_core::request::Dialect;
use statehouse_core::store::{Duplicates, Entry, Key, Peer, Remembered, Scope, State};
use statehouse_protocol::SessionId;

type OwnedEntries = Vec<(Entry, Option<Box<str>>)>;

/// The state of the store right behind a record.
#[derive(Debug, PartialEq)]
pub(crate) struct Captured {
    pub(crate) position: u64,
    pub(crate) clock: Stamp,
    run: u32,
    assignment: Option<Assignment>,
    table: OwnedEntries,
    pub(crate) hidden: OwnedEntries,
    watched: Vec<(Peer, Scope, Key, Dialect)>,
}

impl Captured {
    pub(crate) fn of(
        position: u64,
        run: u32,
        assignment: Option<&Assignment>,
        state: &State,
    ) -> Self {
        let watches = &state.watches;
        let mut watched = Vec::new();
        for (peer, scope, key, dialect) in watches.range(None).filter(|_| watches.are_durable()) {
            watched.push((peer.clone(), scope, key.clone(), dialect));
        }
        Self {
            position,
            clock: state.hlc.last(),
            run,
            assignment: assignment.cloned(),
            table: entries(state, false),
            hidden: entries(state, true),
            watched,
        }
    }
}

/// All entries of a table with their owners.
fn entries(state: &State, hidden: bool) -> OwnedEntries {
    let table = if hidden { &state.hidden } else { &state.table };
    let owner = |entry: &Entry| state.owner(entry.key(), hidden).map(Into::into);
    let entries = table.range(b"", None);
    entries.map(|it| (it.clone(), owner(it))).collect()
}

/// Checks the recovered dedup table against that of the store before the crash, which has evicted
/// no request of a live session that it may still receive again.
pub(crate) fn check_remembered(
    before: &[Remembered],
    after: &Duplicates,
    live: impl Fn(SessionId) -> bool,
) {
    let known: BTreeMap<u64, &Remembered> = before.iter().map(|it| (it.number, it)).collect();
    let found: BTreeMap<u64, Remembered> = after.range(0).map(|it| (it.number, it)).collect();
    for (number, found) in &found {
        if let Some(known) = known.get(number) {
            assert_eq!(
                as_recorded(found),
                as_recorded(known),
                "request number {number} is remembered otherwise after a crash"
            );
        }
    }
    // Later requests were lost in the crash.
    let next = after.next_number();
    for (number, known) in known.range(..next) {
        assert!(
            found.contains_key(number) || !live(known.delivery.session),
            "obligation 2: request number {number} is not remembered after a crash"
        );
    }
}

/// A remembered request without the parts that recovery may change. The DUP flag of the first copy
/// is not needed afterwards. A step of the clock during a snapshot may postpone a deadline twice. A
/// snapshot leaves out the keys of captured reads, because the request contains them.
fn as_recorded(remembered: &Remembered) -> Remembered {
    let mut remembered = remembered.clone();
    remembered.delivery.dup = false;
    remembered.until_ms = 0;
    for read in remembered.captured.iter_mut().flat_map(|it| &mut it.reads) {
        if let Some(entry) = &mut read.entry {
            let (version, fence) = (entry.version(), entry.fence());
            let expires_ms = entry.expires_ms();
            *entry = Entry::new(b"", entry.value(), version, fence.as_ref(), expires_ms);
        }
    }
    remembered
}

/// Checks that the counters of the store equal a full count.
pub(crate) fn check_counters(state: &State, duplicates: &Duplicates) {
    let mut owned: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for (table, hidden) in [(&state.table, false), (&state.hidden, true)] {
        let (mut keys, mut bytes, mut next_ms) = (0, 0, None::<u64>);
        for entry in table.range(b"", None) {
            let node = entry.fence().map_or(0, |fence| fence.node.len());
            let parts = entry.key().len() + entry.value().len() + node;
            keys += 1;
            bytes += parts as u64 + ENTRY_OVERHEAD_BYTES;
            next_ms = [next_ms, entry.expires_ms()].into_iter().flatten().min();
            let owner = state.owner(entry.key(), hidden);
            let own = owned.entry(owner.expect("a client wrote it")).or_default();
            *own = (own.0 + 1, own.1 + entry.weight());
        }
        let counted = (table.keys(), table.bytes(), table.next_expiry_ms());
        assert_eq!(counted, (keys, bytes, next_ms), "counters of a table");
    }
    let counted = state.owners.all();
    let counted: BTreeMap<_, _> = counted
        .map(|(client, keys, bytes)| (client, (keys, bytes)))
        .collect();
    assert_eq!(counted, owned, "counters of the owners");
    let costs = duplicates.range(0).map(|it| it.cost_bytes());
    let (count, cost) = costs.fold((0, 0), |(count, sum), it| (count + 1, sum + it));
    assert_eq!(
        (duplicates.len(), duplicates.bytes()),
        (count, cost),
        "counters of the dedup table"
    );
}
