//! What must hold after each event, and at the end when faults have ceased.

use std::collections::BTreeMap;

use statehouse_mqtt::Broker;
use statehouse_protocol::ConnectionId;

use crate::captured::check_counters;
use crate::client::Client;
use crate::world::World;

impl World {
    pub(crate) fn check(&mut self) {
        let durable = self.node.log.durable().0;
        assert!(durable <= self.node.appended());
        let links = || self.clients.iter().flat_map(|it| &it.links);
        // A session that ended with a takeover is reported with the end of its connection.
        let closing = links().any(|it| it.wire.is_some() && !it.is_served());
        if self.dice.once_in(8) && !closing {
            self.check_store();
        }
        if self.plan.foreign {
            return;
        }
        let wires = links().filter_map(|it| it.wire.as_ref());
        let open: Vec<ConnectionId> = wires.map(|it| it.connection()).collect();
        for peer in self.node.server.watching() {
            assert!(
                open.contains(&peer.connection),
                "obligation 3: the watches of {} outlive connection {}",
                peer.client,
                peer.connection
            );
        }
    }

    /// The counters of the store agree with a full count, and no request of an ended session is
    /// remembered.
    fn check_store(&self) {
        let sessions = self.node.broker.as_ref().map(Broker::sessions);
        self.node.server.inspect(|store| {
            check_counters(store.state(), store.duplicates());
            let Some(sessions) = &sessions else { return };
            for remembered in store.duplicates().range(0) {
                let session = remembered.delivery.session;
                assert!(
                    sessions.contains(&session),
                    "obligation 5: requests of the ended session {session} are remembered"
                );
            }
        });
    }

    /// Faults cease, every client connects, and everything on its way arrives.
    pub(crate) fn settle(&mut self) {
        self.trace.add(|| "faults cease".to_owned());
        self.heal();
        self.plan.crash_once_in = u64::MAX;
        if self.node.log.maintain(self.time.wall_ms).is_err() || !self.node.has_room() {
            self.crash();
        }
        if self.plan.foreign {
            self.settle_foreign();
            self.check_table();
            return;
        }
        self.flow_until_quiet();
        self.advance(11_000);
        self.flow_until_quiet();
        self.settle_followers();
        for client in &self.clients {
            let left: Vec<u64> = client.outgoing.iter().map(|it| it.number).collect();
            assert!(
                left.is_empty() && client.subscribed,
                "obligation 2: {} waits for acknowledgements of {left:?}",
                client.name
            );
        }
        if !self.ledger.lossy {
            self.check_responses();
            self.check_messages();
            let arrived = self.clients[0].wills.clone();
            self.wills.check(&arrived);
        }
        self.check_retained();
        self.check_table();
    }

    /// Every client connects, and no packet is on its way in the end.
    pub(crate) fn flow_until_quiet(&mut self) {
        for _ in 0..40 {
            for who in 0..self.clients.len() {
                if self.clients[who].link().is_none() {
                    self.connect(who);
                }
            }
            self.flow();
            let mut links = self.clients.iter().flat_map(|it| &it.links);
            if links.all(|it| it.up.is_empty() && it.down.is_empty()) {
                break;
            }
        }
    }

    /// Obligation 2: every acknowledged request has a response.
    fn check_responses(&self) {
        for client in self.clients.iter().filter(|it| it.expiry_s == 3600) {
            for number in &client.acknowledged {
                let answered = self.ledger.requests.contains(number)
                    && !self.ledger.unremembered.contains(number);
                assert!(
                    !answered || client.responses.contains_key(number),
                    "obligation 2: request {number} of {} has no response",
                    client.name
                );
            }
        }
    }

    /// Obligation 4: every expected message has arrived.
    fn check_messages(&self) {
        for ((who, number), qos) in &self.oracle.owed {
            let arrived = self.clients[*who].arrived.get(number);
            assert!(
                arrived.is_some(),
                "obligation 4: message {number} at QoS {qos} did not arrive at c{who}"
            );
        }
    }

    /// Obligation 5: a new subscriber receives exactly the retained messages of the oracle.
    fn check_retained(&mut self) {
        let mut probe = Client::new(self.clients.len());
        probe.filters = vec![("ret/#".into(), 1)];
        probe.expiry_s = 0;
        self.clients.push(probe);
        self.connect(self.clients.len() - 1);
        for _ in 0..6 {
            self.flow();
        }
        let checked = self.oracle.retained.len() as u64;
        self.tally.add_to("retained messages checked", checked);
        let found: BTreeMap<String, u64> = self.ledger.retained.clone();
        assert_eq!(
            found, self.oracle.retained,
            "obligation 5: retained messages (right: expected)"
        );
    }

    /// Obligation 1: one more recovery finds exactly the table of the oracle.
    fn check_table(&mut self) {
        self.commit();
        self.crash();
    }
}
