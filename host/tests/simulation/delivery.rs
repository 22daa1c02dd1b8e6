//! A foreign broker delivers a request to the store, which recognizes a redelivery or handles a new
//! request.

use bytes::Bytes;
use statehouse_core::clock::Stamp;
use statehouse_core::request::{Delivery, Incoming};
use statehouse_mqtt::{Properties, PropertiesBuilder};
use statehouse_tests::Property;
use statehouse_transport::{Inbound, Ticket};

use crate::foreign::{Delivered, peer};
use crate::operation::{Command, Handled, Operation};
use crate::oracle::{Change, QUOTA_EXCEEDED};
use crate::packet::Publish;
use crate::world::World;

/// The shortest time for which a request is remembered.
const WINDOW_MS: u64 = 60_000;

/// The properties of a PUBLISH.
fn properties(publish: &Publish) -> Properties {
    let mut builder = PropertiesBuilder::new();
    for property in &publish.properties {
        builder = match property {
            Property::ResponseTopic(topic) => builder.response_topic(topic),
            Property::CorrelationData(data) => builder.correlation_data(data),
            Property::User(name, value) => builder.user(name, value),
            other => panic!("{other:?} in a request"),
        };
    }
    Properties::parse(builder.finish().expect("short properties")).expect("valid properties")
}

impl World {
    /// The broker delivers a request.
    pub(crate) fn hand_over(&mut self, at: usize) {
        let connection = self.foreign.connection.expect("connected");
        let pending = &mut self.foreign.pending[at];
        pending.copies += 1;
        pending.connection = connection;
        let (number, copy, client) = (pending.number, pending.copies, pending.client);
        let (operation, publish) = (pending.operation.clone(), pending.publish.clone());
        self.foreign.copies.push(Delivered {
            number,
            copy,
            connection,
            needed: 0,
        });
        let at = self.foreign.copies.len() - 1;
        let ticket = Ticket::Foreign(at as u64);
        let (payload, properties) = (Bytes::from(publish.payload.clone()), properties(&publish));
        let of = peer(client);
        let incoming = Incoming {
            // Only the identity of the request distinguishes redeliveries.
            delivery: Delivery::new(&of, 0, true),
            ..Incoming::new(&of, &payload, &properties)
        };
        let full = !self.node.has_room();
        let (before, figures) = (self.clock(), self.node.server.stats());
        let records = self.step(Inbound::Publish(incoming, Some(ticket)));
        assert!(!self.has_expired(), "an expired key is in the table");
        let after = self.node.server.stats();
        let repeated = after.duplicates > figures.duplicates;
        self.trace.add(|| {
            format!("delivers {number}, copy {copy} over {connection}: records {records:?}, repeated {repeated}")
        });
        if after.not_renotified > figures.not_renotified {
            self.foreign.watchers.waive(number);
        }
        let Operation::Request { key, command } = &operation else {
            return;
        };
        if repeated {
            let done = self.oracle.is_done(number) || self.ledger.reads.contains(&number);
            assert!(
                done || full || self.ledger.unremembered.contains(&number),
                "obligation 2: {number} was not handled before"
            );
            let ended = self
                .oracle
                .response(number)
                .is_some_and(|it| it == b"+OK\r\n");
            if *command == Command::Unwatch && ended {
                self.unwatch(client, |watched| watched == key, records);
            }
        } else {
            let handled = Handled {
                who: client,
                number,
                key,
                command,
                records,
                full,
            };
            self.handled_first(&handled, copy, before);
        }
        let needed = self.needed_for(number);
        self.foreign.copies[at].needed = needed;
    }

    /// The store has handled a request as a new one.
    fn handled_first(&mut self, handled: &Handled<'_>, copy: u64, before: Stamp) {
        let &Handled {
            number,
            key,
            command,
            records,
            full,
            ..
        } = handled;
        let now_ms = self.now_ms();
        if self.oracle.is_done(number) && !command.repeats() {
            let executed = self.foreign.executed.get(&number);
            let at_ms = executed.and_then(|it| it.times.last()).map_or(0, |it| it.1);
            assert!(
                self.plan.clock_steps || now_ms - at_ms >= WINDOW_MS,
                "obligation 1: request {number} had an effect twice"
            );
            self.tally.count("redeliveries after the retention");
            // Its earlier response may still be on its way.
            self.ledger.unremembered.insert(number);
        } else if !self.ledger.handled.insert(number) {
            self.tally.count("requests redelivered after a crash");
        }
        if full {
            self.ledger.unremembered.insert(number);
        }
        self.foreign.watchers.waive(number);
        let (mut response, change) = self.decide(handled);
        let executed = self.foreign.executed.entry(number).or_default();
        executed.version = None;
        if matches!(command, Command::Watch | Command::Unwatch) {
            response = self.handled_watch(handled, response);
        }
        let recorded = !full || change.is_some();
        if let Some(response) = &response {
            self.is_possible(handled, response, recorded);
        }
        if !recorded {
            return;
        }
        let executed = self.foreign.executed.entry(number).or_default();
        executed.times.push((records.1, now_ms));
        let done = Change::Done { number, response };
        self.oracle.note(records, done);
        let Some(change) = change else { return };
        let value = match &change {
            Change::Set { value, .. } => String::from_utf8_lossy(value).into_owned(),
            _ => "DELETE".to_owned(),
        };
        let clock = (before, self.clock());
        self.oracle.note_version(records, change, clock.1);
        self.expect_notifications(Some((number, copy)), key, &value, clock, records.1);
    }

    /// A client begins or ends a watch. Returns the response.
    fn handled_watch(
        &mut self,
        handled: &Handled<'_>,
        response: Option<Vec<u8>>,
    ) -> Option<Vec<u8>> {
        let &Handled {
            number,
            who: client,
            key,
            command,
            records,
            full,
        } = handled;
        let watch = (client, key.to_owned());
        let begins = *command == Command::Watch;
        let exists = self.oracle.watches.contains(&watch);
        if begins && (exists || !full) {
            if !exists {
                let change = Change::Watch(client, key.to_owned(), true);
                self.oracle.note(records, change);
                self.foreign.registered.insert(watch.clone(), records.1);
            }
            self.ledger
                .needed
                .insert(number, self.foreign.registered[&watch]);
            return response;
        }
        if begins {
            // The record of a new watch is refused on a full disk.
            return Some(QUOTA_EXCEEDED.to_vec());
        }
        if !exists {
            return Some(b":0\r\n".to_vec());
        }
        self.unwatch(client, |watched| watched == key, records);
        self.ledger.needed.insert(number, records.1);
        response
    }
}
