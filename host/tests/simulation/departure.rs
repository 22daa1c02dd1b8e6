//! Outputs leave a store behind a foreign broker, and reach the broker.

use std::sync::{Arc, Mutex};

use statehouse_core::store::Peer;
use statehouse_mqtt::{Message, Properties};
use statehouse_tests::Property;
use statehouse_transport::{Outbound, Ticket, Transport};
use statehouse_wal::Log;

use crate::egress::{Reached, is_urgent_answer, notification, number_in, stamp};
use crate::foreign::Delivered;
use crate::packet::Publish;
use crate::watchers::Sent;
use crate::world::World;

/// The most acknowledged requests that the broker may redeliver.
const ACKNOWLEDGED_MAX: usize = 4;

pub(crate) type Departures = Arc<Mutex<Vec<(Outbound, Reached)>>>;

/// Takes what leaves the store.
pub(crate) struct Outlet(pub(crate) Arc<Log>, pub(crate) Departures);

impl Transport for Outlet {
    fn deliver(&self, ready: &mut dyn FnMut(&mut Vec<Outbound>)) {
        let mut out = Vec::new();
        loop {
            ready(&mut out);
            if out.is_empty() {
                return;
            }
            let reached = Reached::of(&self.0);
            let mut departures = self.1.lock().expect("one thread");
            departures.extend(out.drain(..).map(|it| (it, reached)));
        }
    }
}

/// A message of the store as a client receives it.
fn received(message: &Message) -> Publish {
    let properties = Properties::parse(message.properties.clone()).expect("valid properties");
    let topic = String::from_utf8_lossy(&message.topic);
    let mut publish = Publish::new(&topic, &message.payload);
    let correlation = properties.correlation_data();
    let correlation = correlation.map(|data| Property::CorrelationData(data.to_vec()));
    publish.properties.extend(correlation);
    let user = properties.user();
    publish
        .properties
        .extend(user.map(|(name, value)| Property::user(name, value)));
    publish
}

fn sent_to(peer: &Peer, message: &Message) -> Sent {
    let it = received(message);
    let (client, key, value) = notification(&it.topic, &it.payload);
    assert_eq!(*client, *peer.client, "obligation 3: another client");
    let version = it.user("__ts").and_then(stamp);
    Sent {
        client: client_of(peer),
        key,
        value,
        version: version.expect("a version"),
    }
}

fn client_of(peer: &Peer) -> usize {
    let number = number_in(peer.client.as_bytes(), "c");
    number.expect("a client of the broker") as usize
}

impl World {
    /// Outputs leave the store for the broker.
    pub(crate) fn take_departures(&mut self) {
        let departures = std::mem::take(&mut *self.foreign.departures.lock().expect("one thread"));
        for (out, reached) in departures {
            let mut urgent = false;
            let needed = match &out {
                Outbound::Response(message, Some(ticket))
                | Outbound::AcknowledgedResponse(message, ticket) => {
                    let response = received(message);
                    urgent = is_urgent_answer(&response);
                    self.check_version(&response);
                    self.observe(response.user("__ts"));
                    self.check_response(&response);
                    self.foreign.copy(*ticket).needed
                }
                Outbound::Notification(peer, message, _) => {
                    let sent = sent_to(peer, message);
                    let first = self.foreign.left.insert((sent.client, sent.version));
                    assert!(first, "obligation 3: {sent:?} is sent twice in one life");
                    self.tally.count("notifications");
                    self.ledger.observed = self.ledger.observed.max(sent.version);
                    self.foreign.watchers.leaves(&sent)
                }
                Outbound::Acknowledge(ticket, ..) => self.foreign.copy(*ticket).needed,
                Outbound::Response(_, None) | Outbound::Disconnect(..) => {
                    panic!("no request has QoS 0, and no client breaks a rule")
                }
            };
            self.check_left(needed, reached, urgent, || format!("{out:?}"));
            self.foreign.in_transit.push_back(out);
        }
    }

    /// Obligation 2: a redelivery gets the first version again.
    fn check_version(&mut self, response: &Publish) {
        let correlation = response.correlation().unwrap_or_default();
        let number = number_in(correlation, "").expect("a request of a client");
        let version = response.user("__ts").map(str::to_owned);
        if self.ledger.reads.contains(&number) || self.ledger.unremembered.contains(&number) {
            return;
        }
        let executed = self.foreign.executed.get_mut(&number).expect("handled");
        let first = executed.version.get_or_insert_with(|| version.clone());
        assert_eq!(
            version, *first,
            "obligation 2: request {number} has two versions"
        );
    }

    /// Outputs reach the broker.
    pub(crate) fn arrive(&mut self, count: usize) {
        for out in self.foreign.in_transit.drain(..count).collect::<Vec<_>>() {
            match out {
                Outbound::Notification(peer, message, _) => {
                    self.foreign.watchers.delivered(sent_to(&peer, &message));
                }
                Outbound::Response(message, _) => self.answered(&message),
                Outbound::AcknowledgedResponse(message, ticket) => {
                    self.answered(&message);
                    self.acknowledge(ticket);
                }
                Outbound::Acknowledge(ticket, ..) => self.acknowledge(ticket),
                Outbound::Disconnect(..) => {}
            }
        }
    }

    fn answered(&mut self, message: &Message) {
        let response = received(message);
        let number = number_in(response.correlation().unwrap_or_default(), "");
        let mut pending = self.foreign.pending.iter_mut();
        if let Some(pending) = pending.find(|it| Some(it.number) == number) {
            pending.answered = true;
        }
    }

    /// An acknowledgement is for a copy, over the connection that the copy was delivered over.
    fn acknowledge(&mut self, ticket: Ticket) {
        let foreign = &mut self.foreign;
        let &Delivered {
            number,
            copy,
            connection,
            ..
        } = foreign.copy(ticket);
        let mut pending = foreign.pending.iter();
        let Some(at) = pending.position(|it| it.number == number && it.copies == copy) else {
            return;
        };
        if foreign.connection != Some(connection) {
            return;
        }
        let pending = foreign.pending.remove(at).expect("found");
        assert!(
            pending.answered,
            "obligation 2: request {number} is acknowledged before its response"
        );
        let notified = foreign.watchers.acknowledged(number, copy);
        self.tally
            .add_to("watchers notified before an acknowledgement", notified);
        foreign.acknowledged.truncate(ACKNOWLEDGED_MAX - 1);
        foreign.acknowledged.push_front(pending);
    }
}
