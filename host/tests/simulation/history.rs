//! What a store was after each of its records, and how a recovered one is compared with that.

use std::collections::BTreeMap;

use statehouse::limits::ENTRY_OVERHEAD_BYTES;
use statehouse_core::clock::Stamp;
use statehouse_core::log::Image;
use statehouse_core::policy::Assignment;
use statehouse_core::request::Dialect;
use statehouse_core::store::{Duplicates, Entry, Key, Peer, Remembered, State, Watches};

type Owned = Vec<(Entry, Option<Box<str>>)>;

/// All keys of a table, and whose they are.
fn entries(state: &State, hidden: bool) -> Owned {
    let table = if hidden { &state.hidden } else { &state.table };
    let owner = |entry: &Entry| state.owner(entry.key(), hidden).map(Into::into);
    let entries = table.range(b"", None);
    entries.map(|it| (it.clone(), owner(it))).collect()
}

type Watched = Vec<(Peer, Key, Dialect)>;

/// Who watches what, where that is kept.
fn watched(watches: &Watches) -> Watched {
    let mut watched = Vec::new();
    for peer in watches.peers().filter(|_| watches.are_durable()) {
        for key in watches.by(peer) {
            let dialect = watches.of(key).find(|(it, _)| *it == peer);
            let (_, dialect) = dialect.expect("both indexes say the same");
            watched.push((peer.clone(), key.clone(), dialect));
        }
    }
    watched
}

/// A store right behind a record.
pub(crate) struct Moment {
    pub(crate) position: u64,
    pub(crate) now_ms: u64,
    pub(crate) clock: Stamp,
    table: Owned,
    hidden: Owned,
    watched: Watched,
    remembered: Vec<Remembered>,
    pub(crate) run: u32,
    pub(crate) assignment: Option<Assignment>,
}

impl Moment {
    pub(crate) fn of(
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

    /// Checks that what was recovered is what there was: of sessions that live nothing is forgotten that the store
    /// remembered. `ever` is every request that was remembered up to here.
    pub(crate) fn check(
        &self,
        image: &Image,
        living: &[u64],
        ever: &BTreeMap<u64, (u64, Remembered)>,
    ) {
        let at = self.position;
        assert_eq!(
            entries(&image.state, false),
            self.table,
            "another table at {at}"
        );
        assert_eq!(
            entries(&image.state, true),
            self.hidden,
            "other hidden keys at {at}"
        );
        assert_eq!(
            watched(&image.state.watches),
            self.watched,
            "other watches at {at}"
        );
        assert_eq!(image.state.hlc.last(), self.clock, "another clock at {at}");
        assert!(image.now_ms >= self.now_ms, "an earlier time at {at}");
        assert_eq!(image.run, self.run, "another run at {at}");
        assert_eq!(
            image.assignment, self.assignment,
            "another assignment at {at}"
        );
        let active = image
            .active
            .map(|active| image.policies[active as usize].digest);
        let assigned = self.assignment.as_ref().map(|it| it.active.0);
        assert_eq!(active, assigned, "another policy at {at}");
        for remembered in &self.remembered {
            let number = remembered.number;
            let session = remembered.delivery.session;
            let found = image.duplicates.range(number).next();
            match found.filter(|found| found.number == number) {
                Some(found) => assert_eq!(as_recorded(&found), as_recorded(remembered), "at {at}"),
                None if !living.contains(&session) => {}
                None => panic!("number {number} was forgotten at {at}"),
            }
        }
        for remembered in image.duplicates.range(0) {
            let (_, known) = ever.get(&remembered.number).unwrap_or_else(|| {
                panic!("number {} comes from nowhere at {at}", remembered.number)
            });
            assert_eq!(as_recorded(&remembered), as_recorded(known), "at {at}");
        }
        recount(&image.state, &image.duplicates);
    }
}

/// The flag says how the first one came, and is of no use afterwards. The key of what was read stands in the request, and
/// a snapshot does not say it again.
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

/// Sums are what counting gives.
pub(crate) fn recount(state: &State, duplicates: &Duplicates) {
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
            "sums of a table"
        );
        assert_eq!(table.next_expiry_ms(), next_ms, "the next expiry");
    }
    let counted = state.owners.all();
    let counted: BTreeMap<_, _> = counted
        .map(|(client, keys, bytes)| (client, (keys, bytes)))
        .collect();
    assert_eq!(counted, owned, "sums of the owners");
    let cost: u64 = duplicates.range(0).map(|it| it.cost_bytes()).sum();
    let count = duplicates.range(0).count();
    assert_eq!(
        (duplicates.len(), duplicates.bytes()),
        (count, cost),
        "sums of what is remembered"
    );
}
