//! The store behind a foreign broker, which is simulated here without packets.
//!
//! The broker redelivers requests after the connection to the store was lost or an acknowledgement
//! did not arrive. It keeps its clients connected while the store is away, and receives outputs
//! some time after they left the store.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;

use statehouse_core::clock::Stamp;
use statehouse_core::store::{Mode, Peer};
use statehouse_transport::{Inbound, Intake, Outbound, Ticket, Transport};
use statehouse_wal::Log;
use statehouse_wal::simulation::Dice;

use crate::departure::{Departures, Outlet};
use crate::node::Found;
use crate::operation::{Operation, covers};
use crate::oracle::{Change, Records};
use crate::packet::Publish;
use crate::watchers::{Notice, Watchers};
use crate::world::World;

/// The most requests that the broker delivers without an acknowledgement.
const IN_FLIGHT_MAX: usize = 12;

/// A request that the broker has.
pub(crate) struct Pending {
    pub(crate) number: u64,
    pub(crate) client: usize,
    pub(crate) operation: Operation,
    pub(crate) publish: Publish,
    /// How often it was delivered, and over which connection the last time.
    pub(crate) copies: u64,
    pub(crate) connection: u64,
    pub(crate) answered: bool,
}

/// One delivery of a request.
pub(crate) struct Delivered {
    pub(crate) number: u64,
    pub(crate) copy: u64,
    pub(crate) connection: u64,
    /// The position that its response depends on.
    pub(crate) needed: u64,
}

/// What is known of an executed request.
#[derive(Default)]
pub(crate) struct Executed {
    /// The last record and the time of each execution.
    pub(crate) times: Vec<(u64, u64)>,
    pub(crate) version: Option<Option<String>>,
}

/// The foreign broker and its clients.
#[derive(Default)]
pub(crate) struct Foreign {
    pub(crate) clients: u64,
    pub(crate) departures: Departures,
    /// What left the store and did not arrive.
    pub(crate) in_transit: VecDeque<Outbound>,
    /// The number of the connection between store and broker, if there is one.
    pub(crate) connection: Option<u64>,
    pub(crate) connections: u64,
    pub(crate) pending: VecDeque<Pending>,
    pub(crate) acknowledged: VecDeque<Pending>,
    pub(crate) copies: Vec<Delivered>,
    pub(crate) executed: HashMap<u64, Executed>,
    /// The record in which each watch began.
    pub(crate) registered: HashMap<(usize, String), u64>,
    /// Notifications that left in this life.
    pub(crate) left: HashSet<(usize, Stamp)>,
    pub(crate) watchers: Watchers,
}

pub(crate) fn peer(client: usize) -> Peer {
    let session = Mode::foreign_session(client as u64 + 1);
    Peer {
        client: format!("c{client}").into(),
        connection: session.only_connection(),
        session,
    }
}

impl Foreign {
    pub(crate) fn new(dice: &mut Dice) -> Self {
        Self {
            clients: 1 + dice.below(4),
            ..Self::default()
        }
    }

    /// Where the outputs of a store with this log go.
    pub(crate) fn outlet(&self, log: &Arc<Log>) -> Arc<dyn Transport> {
        Arc::new(Outlet(log.clone(), self.departures.clone()))
    }

    pub(crate) fn copy(&self, ticket: Ticket) -> &Delivered {
        let Ticket::Foreign(at) = ticket else {
            panic!("a ticket of another transport");
        };
        &self.copies[at as usize]
    }

    /// The next request that was not delivered over this connection.
    fn next_to_deliver(&self) -> Option<usize> {
        let connection = self.connection?;
        let mut pending = self.pending.iter();
        pending.position(|it| it.connection != connection)
    }
}

impl World {
    pub(crate) fn foreign_event(&mut self) {
        match self.dice.below(40) {
            0..=17 => self.foreign_request(),
            18..=25 => {
                let some = self.dice.below(self.foreign.in_transit.len() as u64 + 1);
                self.arrive(some as usize);
            }
            26 | 27 => {
                self.trace.add(|| "the link is lost".to_owned());
                self.tally.count("losses of the link");
                self.foreign.connection = None;
            }
            28 => self.report_absence(),
            29 | 30 => self.redeliver(),
            31 | 32 => self.pass_time(),
            33 => self.fault(),
            _ => self.common_event(),
        }
        self.after();
    }

    /// Delivers a request again that is not acknowledged over this connection, or a new one.
    fn foreign_request(&mut self) {
        if self.foreign.connection.is_none() {
            self.foreign.connections += 1;
            self.foreign.connection = Some(self.foreign.connections);
        }
        if let Some(at) = self.foreign.next_to_deliver() {
            self.hand_over(at);
            return;
        }
        if self.foreign.pending.len() == IN_FLIGHT_MAX {
            return;
        }
        let number = self.next_number;
        self.next_number += 1;
        let client = self.dice.below(self.foreign.clients) as usize;
        let known = (&self.plan, &self.oracle);
        let operation = Operation::request(&mut self.dice, true, known, number);
        let publish = self.create(client, number, &operation, 1);
        self.foreign.pending.push_back(Pending {
            number,
            client,
            operation,
            publish,
            copies: 0,
            connection: 0,
            answered: false,
        });
        self.hand_over(self.foreign.pending.len() - 1);
    }

    /// The broker redelivers an acknowledged request, because its client sent it again.
    fn redeliver(&mut self) {
        let count = self.foreign.acknowledged.len();
        if count > 0 && self.foreign.connection.is_some() {
            self.tally.count("redeliveries of acknowledged requests");
            let at = self.dice.below(count as u64) as usize;
            let pending = self.foreign.acknowledged.remove(at);
            self.foreign.pending.extend(pending);
            self.hand_over(self.foreign.pending.len() - 1);
        }
    }

    /// The broker reports that a client disconnected, or that a notification was undeliverable.
    fn report_absence(&mut self) {
        self.tally.count("reports of absent clients");
        let client = self.dice.below(self.foreign.clients) as usize;
        let key = self
            .dice
            .once_in(2)
            .then(|| format!("k{}", self.dice.below(3)));
        let of = peer(client);
        let records = match &key {
            Some(key) => self.step(Inbound::Undeliverable(&of, key.as_bytes())),
            None => self.step(Inbound::Disconnected(&of)),
        };
        let ends = |watched: &str| key.as_ref().is_none_or(|key| covers(watched, key));
        self.unwatch(client, ends, records);
    }

    /// These watches of a client end.
    pub(crate) fn unwatch(&mut self, client: usize, ends: impl Fn(&str) -> bool, records: Records) {
        let watches = self.oracle.watches.iter();
        let ended = watches.filter(|(it, watched)| *it == client && ends(watched));
        for (client, key) in ended.cloned().collect::<Vec<_>>() {
            self.foreign.watchers.unwatched(client, &key);
            let change = Change::Watch(client, key, false);
            self.oracle.note(records, change);
        }
    }

    pub(crate) fn foreign_sweep(&mut self) {
        let before = self.clock();
        let first = self.node.appended() + 1;
        self.trace.add(|| "sweeps".to_owned());
        self.node.server.sweep_once();
        self.swept(before, first);
    }

    pub(crate) fn clock(&self) -> Stamp {
        (self.node.server).inspect(|store| store.state().hlc.last())
    }

    /// The store handles an input. Returns its records.
    pub(crate) fn step(&mut self, inbound: Inbound<'_>) -> Records {
        let before = self.clock();
        let first = self.node.appended() + 1;
        self.ledger.sweeps = self.has_expired();
        self.node.server.take(&mut std::iter::once(inbound));
        self.swept(before, first);
        (first, self.node.appended())
    }

    /// The last step began with the removal of expired keys.
    pub(crate) fn swept(&mut self, before: Stamp, first: u64) {
        let now_ms = self.now_ms();
        let clock = (before, self.clock());
        for key in self.oracle.expired(now_ms) {
            assert!(
                self.node.appended() >= first,
                "{key} is removed by a record"
            );
            self.tally.count("expired keys removed");
            self.trace
                .add(|| format!("{key} expires by record {first}: {clock:?}"));
            self.expect_notifications(None, &key, "DELETE", clock, first);
            self.oracle.note((first, first), Change::Remove { key });
        }
    }

    /// The watchers of a key must receive its new value.
    pub(crate) fn expect_notifications(
        &mut self,
        cause: Option<(u64, u64)>,
        key: &str,
        value: &str,
        clock: (Stamp, Stamp),
        record: u64,
    ) {
        let change = Notice {
            client: usize::MAX,
            key: key.to_owned(),
            value: value.to_owned(),
            clock,
            record,
            at_ms: self.now_ms(),
        };
        let watches = self.oracle.watches.iter();
        let watches = watches.filter(|(_, watched)| covers(watched, key));
        // A client with several watches of the key is notified once.
        let watchers: BTreeSet<usize> = watches.map(|(client, _)| *client).collect();
        let watchers = watchers.into_iter();
        self.foreign.watchers.expect(cause, &change, watchers);
    }

    /// The store stops, and a start finds this.
    pub(crate) fn foreign_crash(&mut self, found: &Found) {
        let (position, base) = (found.opened.position.0, found.opened.base.0);
        let foreign = &mut self.foreign;
        foreign.departures.lock().expect("one thread").clear();
        foreign.in_transit.clear();
        foreign.left.clear();
        foreign.connection = None;
        let oracle = &self.oracle;
        for executed in foreign.executed.values_mut() {
            executed.times.retain(|(record, _)| *record <= position);
        }
        for registered in foreign.registered.values_mut() {
            *registered = (*registered).min(position);
        }
        let since_ms = Self::renotified_since(found);
        let table = &found.image.state.table;
        foreign.watchers.crash(position, base, since_ms, table);
        let recovered = oracle.watches.len() as u64;
        self.tally.add_to("watches recovered by a start", recovered);
    }

    /// Every request is acknowledged in the end, and every watcher notified.
    pub(crate) fn settle_foreign(&mut self) {
        for _ in 0..30 {
            self.foreign.connections += 1;
            self.foreign.connection = Some(self.foreign.connections);
            while let Some(at) = self.foreign.next_to_deliver() {
                self.hand_over(at);
                self.after();
            }
            self.commit();
            self.arrive(self.foreign.in_transit.len());
            if self.foreign.pending.is_empty() {
                break;
            }
        }
        let left: Vec<u64> = self.foreign.pending.iter().map(|it| it.number).collect();
        assert!(
            left.is_empty(),
            "obligation 2: {left:?} are not acknowledged"
        );
        let notified = self.foreign.watchers.check_expirations();
        self.tally
            .add_to("watchers notified of expirations", notified);
    }
}
