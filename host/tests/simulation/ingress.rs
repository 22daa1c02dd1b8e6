//! Bytes from clients reach the broker, and the oracle learns what they must lead to.

use std::sync::Arc;

use bytes::BytesMut;
use statehouse_core::store::INTERNAL_ERROR;
use statehouse_mqtt::simulation::Wire;

use crate::client::{Link, Sent};
use crate::egress::Tap;
use crate::operation::{Command, Handled, Operation};
use crate::oracle::{Change, NO_RECORDS, Records};
use crate::policies;
use crate::world::World;

impl World {
    /// Some bytes of a client arrive, up to a few packets.
    pub(crate) fn deliver_up(&mut self, who: usize) {
        if self.dice.once_in(3) && self.deliver_part(who) {
            return;
        }
        for _ in 0..1 + self.dice.below(4) {
            if !self.deliver_up_some(who) {
                break;
            }
        }
    }

    /// A part of a packet arrives.
    fn deliver_part(&mut self, who: usize) -> bool {
        let dice = &mut self.dice;
        for link in &mut self.clients[who].links {
            let (Some(wire), Some((bytes, _))) = (&mut link.wire, link.up.front()) else {
                continue;
            };
            let rest = &bytes[link.up_done..];
            if rest.len() < 2 || wire.is_closing() {
                continue;
            }
            let some = 1 + dice.below(rest.len() as u64 - 1) as usize;
            wire.send(BytesMut::from(&rest[..some]));
            link.up_done += some;
            return true;
        }
        false
    }

    /// The rest of one packet of the client arrives. Returns false if there is none.
    pub(crate) fn deliver_up_some(&mut self, who: usize) -> bool {
        let closing = |it: &Link| it.wire.as_ref().is_some_and(Wire::is_closing);
        if let Some(at) = self.clients[who].links.iter().position(closing) {
            // A connection that took over waits for the end of the other one.
            self.tally.count("connections that a takeover ended");
            self.end(who, at, "taken over");
            return true;
        }
        let ready = |it: &Link| !it.up.is_empty();
        let Some(at) = self.clients[who].links.iter().position(ready) else {
            return false;
        };
        let grows = |sent: &Sent| match sent {
            // At QoS 2 it is open whether a crash preserves the packet id of a refused request.
            Sent::Publish { operation, qos, .. } => {
                let hides = matches!(
                    operation,
                    Operation::Request {
                        command: Command::Hide,
                        ..
                    }
                );
                *qos == 2 || hides || matches!(operation, Operation::Message { .. })
            }
            Sent::Connect { .. } | Sent::Subscribe { .. } => true,
            Sent::Ack | Sent::Disconnect { .. } => false,
        };
        let link = &mut self.clients[who].links[at];
        if grows(&link.up[0].1) && !self.node.has_room() {
            // What the broker refuses while its disk is full is not in the oracle.
            return false;
        }
        let Some((bytes, sent)) = link.up.pop_front() else {
            return false;
        };
        let done = std::mem::take(&mut link.up_done);
        let bytes = BytesMut::from(&bytes[done..]);
        self.trace.add(|| {
            let shown = format!("{sent:?}");
            format!("c{who} link {}: {shown:.120}", link.number)
        });
        self.handle(who, at, bytes, sent);
        self.after();
        true
    }

    fn handle(&mut self, who: usize, at: usize, bytes: BytesMut, sent: Sent) {
        if let Sent::Connect { will_delay_s } = sent {
            self.handle_connect(who, at, &bytes, will_delay_s);
            return;
        }
        let first = self.node.appended() + 1;
        let full = !self.node.has_room();
        self.ledger.sweeps = self.has_expired();
        let link = &mut self.clients[who].links[at];
        let Some(wire) = &mut link.wire else { return };
        wire.send(bytes);
        let last = self.node.appended();
        self.trace.add(|| format!("  records {first} to {last}"));
        match sent {
            Sent::Connect { .. } | Sent::Ack => {}
            Sent::Subscribe { id, filters } => {
                let records = self.recorded_for(who, (first, last));
                let needed = if records.0 <= records.1 { last } else { 0 };
                self.clients[who].links[at].positions.insert(id, needed);
                for (filter, qos) in filters {
                    let change = Change::Subscribed {
                        client: who,
                        filter,
                        qos,
                    };
                    self.oracle.note(records, change);
                }
            }
            Sent::Publish {
                number,
                operation,
                qos,
                dup,
                ..
            } => {
                if dup {
                    self.tally.count("duplicate PUBLISH packets");
                }
                let records = (first, last);
                match &operation {
                    Operation::Request { key, command } => {
                        let records = self.without_user(who, at, records, full);
                        assert!(
                            qos == 2 || !self.has_expired(),
                            "an expired key is in the table"
                        );
                        let handled = Handled {
                            who,
                            number,
                            key,
                            command,
                            records,
                            full,
                        };
                        self.take_request(&handled, at, qos);
                    }
                    _ => self.handle_message(number, &operation, qos, records),
                }
            }
            Sent::Disconnect { reason } => self.handle_disconnect(who, at, reason),
        }
    }

    /// Whether the next step removes expired keys.
    pub(crate) fn has_expired(&self) -> bool {
        let now_ms = self.now_ms();
        let next_ms = (self.node.server).inspect(|store| store.next_expiry_ms());
        self.plan.expiry && next_ms.is_some_and(|next_ms| next_ms <= now_ms)
    }

    fn handle_connect(&mut self, who: usize, at: usize, bytes: &[u8], will_delay_s: Option<u32>) {
        let first = self.node.appended() + 1;
        let number = self.clients[who].links[at].number;
        let served: Vec<u64> = self.clients[who]
            .links
            .iter()
            .filter(|it| it.is_served())
            .map(|it| it.number)
            .collect();
        let expected = self.expects_session(who, !served.is_empty());
        let tap = Tap::new(number, &self.node, &self.egress);
        let broker = self.node.broker.as_ref().expect("the broker is embedded");
        let wire = Wire::connect_to(broker, bytes, Arc::new(tap));
        let wire = wire.unwrap_or_else(|reason| panic!("CONNECT was refused: {reason:?}"));
        let last = self.node.appended();
        let session = wire.session();
        let detached_ms = self.clients[who].detached_ms;
        self.clients[who].attachments.push((last, detached_ms));
        for link in served {
            self.detached(who, link);
        }
        let resumed = self.oracle.sessions.get(&who) == Some(&session);
        assert!(
            expected.is_none_or(|it| it == resumed),
            "obligation 5: a session of c{who} exists: expected {expected:?}, found {resumed}"
        );
        let records = self.recorded_for(who, (first, last));
        if resumed {
            self.tally.count("sessions resumed");
            if self.clients[who].detached_ms <= self.started_ms && self.life > 1 {
                self.tally.count("sessions resumed after a crash");
            }
        } else {
            if self.oracle.sessions.contains_key(&who) {
                self.tally.count("expired sessions");
                let change = Change::SessionEnded { client: who };
                self.oracle.note(records, change);
            }
            let change = Change::Session {
                client: who,
                number: session,
            };
            self.oracle.note(records, change);
        }
        self.wills.connected(who, resumed, &mut self.tally);
        if let Some(delay_s) = will_delay_s {
            self.wills.arm(number, who, delay_s);
        }
        let link = &mut self.clients[who].links[at];
        link.resumed = resumed;
        link.session = session;
        link.connected_at = if records.0 <= records.1 { first } else { 0 };
        link.wire = Some(wire);
    }

    /// Whether the broker must have a session of this client; none if either is right.
    fn expects_session(&self, who: usize, connected: bool) -> Option<bool> {
        let client = &self.clients[who];
        if !self.oracle.sessions.contains_key(&who) {
            return Some(false);
        }
        let expiry_ms = u64::from(client.expiry_s) * 1000;
        if connected {
            return Some(expiry_ms > 0);
        }
        let now_ms = self.elapsed_ms;
        // After a crash the time may begin again with the start.
        if now_ms - client.detached_ms < expiry_ms {
            Some(true)
        } else if now_ms - client.detached_ms.max(self.started_ms) >= expiry_ms {
            Some(false)
        } else {
            None
        }
    }

    fn handle_disconnect(&mut self, who: usize, at: usize, reason: u8) {
        let link = self.clients[who].links.remove(at);
        self.tally.count("DISCONNECT packets");
        if reason == 0 {
            self.wills.disconnected(link.number, &mut self.tally);
        }
        self.detached(who, link.number);
        drop(link);
    }

    /// The records of a packet, if those of this client survive a crash.
    fn recorded_for(&self, client: usize, records: Records) -> Records {
        match self.clients[client].expiry_s {
            0 => NO_RECORDS,
            _ => records,
        }
    }

    /// The records of a request without that of the user, which precedes the first request of a
    /// session that is not durable. No response depends on it.
    fn without_user(&mut self, who: usize, at: usize, records: Records, full: bool) -> Records {
        let link = &mut self.clients[who].links[at];
        let (first, last) = records;
        let is_due = link.connected_at == 0 && !link.user_recorded && !full;
        if !is_due || first > last {
            return records;
        }
        link.user_recorded = true;
        self.tally.count("users of transient sessions recorded");
        (first + 1, last)
    }

    /// A redelivered STOP ends the watch that a KEYNOTIFY before it, redelivered too, has begun
    /// again.
    fn unwatched_again(&mut self, handled: &Handled<'_>, at: usize) {
        let &Handled {
            who, number, key, ..
        } = handled;
        let by = self.ledger.by.get(&number);
        let by_faulty = by.is_some_and(|by| by.contains(&policies::FAULTY));
        let ended = self.oracle.response(number).map(|it| *it == b"+OK\r\n");
        let link = &mut self.clients[who].links[at];
        match ended {
            Some(true) if !by_faulty => _ = link.watches.remove(key),
            Some(false) => {}
            _ if link.watches.contains_key(key) => {
                link.watches.insert(key.to_owned(), false);
                link.open_keys.insert(key.to_owned());
            }
            _ => {}
        }
    }

    fn take_request(&mut self, handled: &Handled<'_>, at: usize, qos: u8) {
        let number = handled.number;
        // Reads are not remembered, and execute again, unless they failed. A request at QoS 2 runs once
        // in any case.
        let failed = self.oracle.response(number).map(Vec::as_slice) == Some(INTERNAL_ERROR);
        let repeats = qos == 1 && handled.command.repeats() && !failed;
        let in_memory = qos == 1 && self.ledger.in_memory.contains(&number);
        if in_memory {
            self.tally.count("redeliveries that only memory answers");
        }
        if in_memory || self.oracle.is_done(number) && !repeats {
            self.tally
                .count("requests redelivered without a second effect");
            if qos == 1 && *handled.command == Command::Unwatch {
                self.unwatched_again(handled, at);
            }
            return;
        }
        if !self.ledger.handled.insert(number) {
            self.tally.count("requests redelivered after a crash");
        }
        if handled.full {
            self.ledger.unremembered.insert(number);
        }
        if qos == 2 {
            self.tally.count("a QoS 2 request");
            if self.ledger.reads.contains(&number) {
                self.ledger.unrecorded.insert(number);
            }
        }
        self.handle_request(handled, at);
    }

    fn handle_message(&mut self, number: u64, operation: &Operation, qos: u8, records: Records) {
        let Operation::Message {
            topic,
            retain,
            empty,
        } = operation
        else {
            return;
        };
        if self.oracle.is_done(number) && qos == 2 {
            return;
        }
        let count = [
            "messages at QoS 0",
            "messages at QoS 1",
            "messages at QoS 2",
        ];
        self.tally.count(count[usize::from(qos)]);
        if !self.ledger.handled.insert(number) {
            self.ledger.repeated.insert(number);
        }
        if qos > 0 {
            let response = None;
            let change = Change::Done { number, response };
            self.oracle.note(records, change);
        }
        if *retain {
            if *empty {
                self.tally.count("retained messages removed");
            }
            let change = Change::Retained {
                topic: topic.clone(),
                number: (!empty).then_some(number),
            };
            self.oracle.note(records, change);
        }
        if !topic.starts_with("t/") {
            return;
        }
        let subscribers = self.oracle.subscriptions.iter();
        let subscribers: Vec<_> = subscribers
            .filter(|((_, filter), _)| filter == "t/#")
            .map(|((client, _), granted)| (*client, (*granted).min(qos)))
            .filter(|(_, qos)| *qos > 0)
            .collect();
        for (client, qos) in subscribers {
            let records = self.recorded_for(client, records);
            let change = Change::Owed {
                client,
                number,
                qos,
            };
            self.oracle.note(records, change);
        }
    }
}
