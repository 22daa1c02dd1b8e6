//! The expected state of the store after each record, for comparison with a recovered store.

use std::collections::BTreeMap;

use statehouse::limits::ENTRY_OVERHEAD_BYTES;
use statehouse_core::clock::Stamp;
use statehouse_core::log::Image;
use statehouse_core::policy::Assignment;
use statehouse_core::request::Dialect;
use statehouse_core::store::{Duplicates, Entry, Key, Peer, Remembered, State, Watches};
use statehouse_protocol::SessionId;

type OwnedEntries = Vec<(Entry, Option<Box<str>>)>;

/// All entries of a table with their owners.
fn entries(state: &State, hidden: bool) -> OwnedEntries {
    let table = if hidden { &state.hidden } else { &state.table };
    let owner = |entry: &Entry| state.owner(entry.key(), hidden).map(Into::into);
    let entries = table.range(b"", None);
    entries.map(|it| (it.clone(), owner(it))).collect()
}

type Watched = Vec<(Peer, Key, Dialect)>;

/// All watches, if they are durable.
fn watched(watches: &Watches) -> Watched {
    let mut watched = Vec::new();
    for peer in watches.peers().filter(|_| watches.are_durable()) {
        for key in watches.by(peer) {
            let dialect = watches.of(key).find(|(it, _)| *it == peer);
            let (_, dialect) = dialect.expect("both indexes agree");
            watched.push((peer.clone(), key.clone(), dialect));
        }
    }
    watched
}

/// The state of the store right after a record.
pub(crate) struct ExpectedState {
    pub(crate) position: u64,
    pub(crate) now_ms: u64,
    pub(crate) clock: Stamp,
    table: OwnedEntries,
    hidden: OwnedEntries,
    watched: Watched,
    remembered: Vec<Remembered>,
    pub(crate) run: u32,
    pub(crate) assignment: Option<Assignment>,
}

impl ExpectedState {
    pub(crate) fn capture(
        position: u64,
        now_ms: u64,
        state: &State,
        duplicates: &Duplicates,
        run: u32,
        assignment: Option<Assignment>,
    ) -> Self {
        Self {
            position,
            now_ms,
            clock: state.hlc.last(),
            table: entries(state, false),
            hidden: entries(state, true),
            watched: watched(&state.watches),
            remembered: duplicates.range(0).collect(),
            run,
            assignment,
        }
    }

    /// Checks that the recovered state is the expected one. The recovered store must remember every
    /// request of the live sessions that the store remembered. `all_remembered` holds every request
    /// that was remembered up to this record.
    pub(crate) fn check(
        &self,
        image: &Image,
        live_sessions: &[SessionId],
        all_remembered: &BTreeMap<u64, (u64, Remembered)>,
    ) {
        let at = self.position;
        assert_eq!(
            entries(&image.state, false),
            self.table,
            "the table differs at {at}"
        );
        assert_eq!(
            entries(&image.state, true),
            self.hidden,
            "the hidden keys differ at {at}"
        );
        assert_eq!(
            watched(&image.state.watches),
            self.watched,
            "the watches differ at {at}"
        );
        assert_eq!(
            image.state.hlc.last(),
            self.clock,
            "the clock differs at {at}"
        );
        assert!(image.now_ms >= self.now_ms, "the time is earlier at {at}");
        assert_eq!(image.run, self.run, "the run differs at {at}");
        assert_eq!(
            image.assignment, self.assignment,
            "the assignment differs at {at}"
        );
        let active = image
            .active
            .map(|active| image.policies[active as usize].digest);
        let assigned = self.assignment.as_ref().map(|it| it.active.0);
        assert_eq!(active, assigned, "the active policy differs at {at}");
        for remembered in &self.remembered {
            let number = remembered.number;
            let session = remembered.delivery.session;
            let found = image.duplicates.range(number).next();
            match found.filter(|found| found.number == number) {
                Some(found) => assert_eq!(as_recorded(&found), as_recorded(remembered), "at {at}"),
                None if !live_sessions.contains(&session) => {}
                None => panic!("request number {number} is not remembered at {at}"),
            }
        }
        for remembered in image.duplicates.range(0) {
            let (_, known) = all_remembered.get(&remembered.number).unwrap_or_else(|| {
                panic!(
                    "request number {} was never remembered before {at}",
                    remembered.number
                )
            });
            assert_eq!(as_recorded(&remembered), as_recorded(known), "at {at}");
        }
        check_counters(&image.state, &image.duplicates);
    }
}

/// A remembered request without the parts that recovery may change. The DUP flag of the first copy
/// is not needed afterwards. A snapshot leaves out the keys of captured reads, because the request
/// contains them.
fn as_recorded(remembered: &Remembered) -> Remembered {
    let mut remembered = remembered.clone();
    remembered.delivery.dup = false;
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
        assert_eq!(
            (table.keys(), table.bytes()),
            (keys, bytes),
            "counters of a table"
        );
        assert_eq!(table.next_expiry_ms(), next_ms, "the next expiry");
    }
    let counted = state.owners.all();
    let counted: BTreeMap<_, _> = counted
        .map(|(client, keys, bytes)| (client, (keys, bytes)))
        .collect();
    assert_eq!(counted, owned, "counters of the owners");
    let cost: u64 = duplicates.range(0).map(|it| it.cost_bytes()).sum();
    let count = duplicates.range(0).count();
    assert_eq!(
        (duplicates.len(), duplicates.bytes()),
        (count, cost),
        "counters of the dedup table"
    );
}
