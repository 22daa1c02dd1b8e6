//! Sends requests to the store, and checks each answer and its effects.
//!
//! Invariant: a redelivery must get the first answer again and must change nothing, and a new
//! request must be executed once by the policy that the assignment names.

use statehouse_core::clock::Stamp;
use statehouse_core::log::LogPosition;
use statehouse_core::policy::{CanaryRule, Digest, Repeat};
use statehouse_core::request::{Delivery, Incoming};
use statehouse_core::store::{Effects, Exceeded, Mode, Peer, Renotified, Rerun};
use statehouse_core::{Decision, Input, Outcome};
use statehouse_mqtt::QoS;

use statehouse_wal::Room;

use crate::client::{Client, PendingRequest, Response};
use crate::egress::PendingAnswer;
use crate::operation::Operation;
use crate::workload::ReadSubject;
use crate::world::{World, now};

/// A step of the store with a request.
struct Execution {
    delivery: Delivery,
    position: LogPosition,
    /// Whether the request must be durable before its answer leaves, even in interval mode.
    urgent: bool,
    operations: Vec<Operation>,
    effects: Effects,
}

/// The result of a request, for its checks.
struct Handled<'a> {
    /// The index of the client, and that of the request among those in flight.
    index: usize,
    at: usize,
    id: u64,
    copy: u32,
    /// The last record behind the request.
    record: u64,
    disk_full: bool,
    /// Whether the policy wants redeliveries to get the same answer.
    same_answer: bool,
    response: &'a Response,
    effects: &'a Effects,
}

impl World {
    /// Sends a request that must be redelivered, or else a new one. Connects the client first.
    pub(crate) fn send(&mut self, index: usize) {
        if self.mode == Mode::Foreign && self.clients[index].connection.is_none() {
            self.attach();
        }
        let client = &mut self.clients[index];
        if client.connection.is_none() {
            client.connection = Some(self.next_connection);
            self.next_connection = self.next_connection.next();
            self.trace
                .record(format!("{} connects: {:?}", client.name, client.connection));
        }
        let resent = client.next_to_resend();
        let at = resent.unwrap_or(client.in_flight.len());
        if resent.is_none() {
            if client.in_flight.len() as u64 >= self.in_flight_max {
                return;
            }
            client.create_request(self.next_id, self.now_ms, self.workload, &mut self.dice);
            self.next_id += 1;
        }
        self.handle_request(index, at);
    }

    /// Connects the store to its foreign broker again, which redelivers unacknowledged requests.
    fn attach(&mut self) {
        self.trace
            .record(format!("attaches: {}", self.next_connection));
        for client in &mut self.clients {
            client.connection = Some(self.next_connection);
        }
        self.next_connection = self.next_connection.next();
    }

    /// The peer that the store sees for a client.
    pub(crate) fn peer(&self, index: usize) -> Peer {
        let Client {
            name,
            session,
            connection,
            ..
        } = &self.clients[index];
        Peer {
            client: name.clone(),
            connection: match self.mode {
                Mode::Embedded => connection.expect("connected"),
                Mode::Foreign => session.only_connection(),
            },
            session: *session,
        }
    }

    /// Lets the store handle a request, checks the result and queues the outputs.
    pub(crate) fn handle_request(&mut self, index: usize, at: usize) {
        let disk_full = self.log.room() != Room::Plenty;
        self.core.store_mut().quota().journal_full = disk_full;
        let now_ms = self.now();
        let clock = self.core.store().state().hlc.last();
        let Execution {
            delivery,
            position,
            urgent,
            operations,
            mut effects,
        } = self.execute(index, at, now_ms);
        let record = self.log.appended().0;
        let client = &self.clients[index];
        let connection = client.connection.expect("connected");
        let pending = &client.in_flight[at];
        let answer = effects.answer.take().expect("every request has an answer");
        let (id, copy, packet_id) = (pending.id, pending.send_count, pending.packet_id);
        let until_ms = pending.until_ms;
        let mut first = (pending.executed.as_ref()).map(|(_, response)| response.clone());
        let response = (answer.payload, answer.version);
        self.trace.record(format!(
            "{} sends {id} ({}) over {connection} packet {packet_id} dup {} at {now_ms}: {:?} {:?} {:?}, record {record}",
            client.name, pending.summary, delivery.dup,
            String::from_utf8_lossy(&response.0).chars().take(30).collect::<String>(),
            response.1, effects.repeated,
        ));
        self.count_request(&effects, &response, disk_full);
        if first.is_some() && effects.repeated.is_none() && now_ms >= until_ms {
            // The protocol limits the retention of requests behind a foreign broker.
            assert_eq!(self.mode, Mode::Foreign, "request {id} is not remembered");
            self.tally.count("redeliveries after the retention");
            self.treat_as_new(index, at);
            first = None;
        }
        self.record_operations(operations, &effects);
        self.check_effects(clock, &effects, effects.renotified.is_some());
        assert!(
            !disk_full || !answer.put || effects.repeated.is_some(),
            "the disk is full, and {id} put something"
        );
        let handled = Handled {
            index,
            at,
            id,
            copy,
            record,
            disk_full,
            same_answer: answer.repeat == Repeat::Same,
            response: &response,
            effects: &effects,
        };
        let repeatable = match &first {
            Some(first) => {
                self.check_duplicate(&handled, first);
                true
            }
            None => self.check_new(&handled),
        };
        let pending_answer = PendingAnswer {
            rests_on: self.rests_on(index, at, &effects, &response),
            clock: if repeatable {
                self.core.store().state().hlc.last()
            } else {
                Stamp::default()
            },
            client: index,
            session: delivery.session,
            destination: delivery.connection,
            connection,
            id,
            copy,
            repeatable,
            urgent: urgent && answer.put,
            response,
        };
        let outputs = self
            .egress
            .push(position, &effects, record, Some(pending_answer));
        // One of them is the answer.
        self.tally.add_to("notifications", outputs - 1);
        self.capture_state();
    }

    /// Lets the store handle a request.
    fn execute(&mut self, index: usize, at: usize, now_ms: u64) -> Execution {
        let delivery = self.clients[index].send(at);
        let peer = self.peer(index);
        let pending = &self.clients[index].in_flight[at];
        let incoming = Incoming {
            topic: pending.topic,
            payload: &pending.payload,
            properties: &pending.properties,
            qos: QoS::AtLeastOnce,
            delivery,
            expires: None,
            peer: &peer,
            grants: None,
        };
        let decision = self.core.handle(Input::Publish(&incoming), now(now_ms));
        let Decision {
            position,
            outcome: Outcome::Handled(request, reply_to),
            effects,
            ..
        } = decision
        else {
            panic!("{} is not a request", pending.summary);
        };
        if effects.swept.is_some() || effects.handled.is_some() {
            self.recorded.2 = now_ms;
        }
        Execution {
            delivery,
            position,
            urgent: reply_to.is_urgent(),
            operations: Operation::of(Some(&request), &effects),
            effects,
        }
    }

    fn count_request(&mut self, effects: &Effects, response: &Response, disk_full: bool) {
        self.tally.count("requests");
        if matches!(effects.exceeded, Some(Exceeded::ClientKeys(_))) {
            self.tally
                .count("requests refused by the quota of a client");
        }
        if disk_full && *response.0 == *b"-ERR the quota has been exceeded\r\n" {
            self.tally.count("requests refused on a full disk");
        }
    }

    /// Checks a redelivery against the first response.
    fn check_duplicate(&mut self, handled: &Handled<'_>, first: &Response) {
        let Handled {
            id,
            response,
            effects,
            ..
        } = *handled;
        assert!(
            effects.handled.is_none(),
            "request {id} had an effect twice"
        );
        self.check_renotification(id, effects);
        assert_eq!(response, first, "request {id} had another answer before");
        match effects.repeated {
            Some(Rerun::Same) => self.tally.count("duplicates re-executed"),
            Some(Rerun::Stored) => {
                self.tally.count("duplicates answered from the record");
                assert!(
                    self.workload.large_values || self.fault_plan.missing_policy,
                    "{id} was not re-executed, although its policy and its reads exist"
                );
            }
            other => panic!("request {id}: {other:?}"),
        }
    }

    /// Checks a request that the store handled as a new one. Returns whether a redelivery must get
    /// the same answer.
    fn check_new(&mut self, handled: &Handled<'_>) -> bool {
        let Handled {
            index,
            at,
            id,
            copy,
            record,
            disk_full,
            same_answer,
            response,
            effects,
            ..
        } = *handled;
        assert_eq!(effects.repeated, None, "request {id} is not a duplicate");
        assert_eq!(effects.renotified, None, "request {id} is new");
        let by = effects.by.as_ref().expect("a policy answered");
        let expected = self.expected_policy(
            &self.clients[index].name,
            &self.clients[index].in_flight[at],
        );
        let well_formed = !response.0.starts_with(b"-ERR syntax error");
        if let Some(expected) = expected.filter(|_| well_formed) {
            let actual = Digest::from(by.digest);
            assert_eq!(actual, expected, "another policy answered {id}");
        }
        if Digest::from(by.digest) != self.assignment.active {
            self.tally.count("requests handled by a canary or a route");
        }
        let policy = by.digest;
        let mut repeatable = false;
        if let Some(effect) = &effects.handled {
            repeatable = effect.repeatable;
            assert_eq!(effect.remembered.context.policy, policy);
            if self.mode == Mode::Foreign {
                let (writes, notifications) = (&effect.writes, &effects.notifications);
                self.obligations
                    .expect_notifications((id, copy), record, writes, notifications);
            }
            self.check_executed_once(id, copy, record);
            let remembered = effect.remembered.clone();
            self.all_remembered
                .insert(remembered.number, (record, remembered));
        }
        // On a full disk, a request that writes nothing is not recorded.
        let wrote = effects.handled.as_ref();
        let wrote = wrote.is_some_and(|it| !it.writes.is_empty());
        let must_repeat = same_answer && (wrote || !disk_full);
        assert_eq!(
            repeatable, must_repeat,
            "request {id} is remembered, but should not be, or the reverse"
        );
        if repeatable {
            let pending = &mut self.clients[index].in_flight[at];
            pending.executed = Some((record, response.clone()));
            let until_ms = effects.handled.as_ref().map(|it| it.remembered.until_ms);
            pending.until_ms = until_ms.unwrap_or(0);
        }
        repeatable
    }

    fn check_executed_once(&mut self, id: u64, copy: u32, record: u64) {
        let records = self.execution_records.entry(id).or_default();
        records.push(record);
        assert_eq!(records.len(), 1, "request {id} was executed twice");
        self.executed_in_run.insert(id, self.run);
        if copy > 1 {
            self.tally
                .count("requests lost in a crash and executed as new");
        }
    }

    /// Forgets the execution of a request, so that the store may execute it again.
    fn treat_as_new(&mut self, index: usize, at: usize) {
        let client = &mut self.clients[index];
        let pending = &mut client.in_flight[at];
        let id = pending.id;
        let executed = pending.executed.take();
        pending.earlier_execution = executed.map(|executed| (executed, pending.until_ms));
        client.supersede(id);
        for released in &mut self.in_transit {
            if let Some((.., arrival)) = &mut released.arrival {
                arrival.supersede(id);
            }
        }
        self.egress.supersede(id);
        self.execution_records.remove(&id);
        self.obligations.waive(id);
    }

    /// Checks that a duplicate notifies watchers only if an earlier run handled the request,
    /// because that run may have ended before it sent the notifications.
    fn check_renotification(&mut self, id: u64, effects: &Effects) {
        match effects.renotified {
            None => assert!(
                effects.notifications.is_empty(),
                "request {id} was notified twice"
            ),
            Some(_) if self.executed_in_run.get(&id) == Some(&self.run) => {
                panic!("request {id} was handled by this run");
            }
            Some(Renotified::Sent) => {
                self.tally
                    .count("requests of an earlier run that were renotified");
            }
            Some(Renotified::Incomplete) => {
                self.tally.count("requests that could not be renotified");
                assert_ne!(effects.repeated, Some(Rerun::Same));
                self.obligations.waive(id);
            }
        }
    }

    /// The policy that must handle a request by the assignment, or none if this depends on how a
    /// policy reads the request.
    fn expected_policy(&self, client: &str, pending: &PendingRequest) -> Option<Digest> {
        let words = statehouse_offline::words(&pending.payload)?;
        let key = match words[0] {
            b"HIDE" => return None,
            b"SCAN" => None,
            _ => Some(words[1]),
        };
        let routes = self.assignment.routes.iter();
        let matching = routes.filter(|it| key.is_some_and(|key| key.starts_with(&it.prefix.0)));
        if let Some(longest) = matching.max_by_key(|it| it.prefix.0.len()) {
            return Some(longest.policy);
        }
        let canary = self.assignment.canary.as_ref().filter(|it| match &it.rule {
            CanaryRule::Percent(percent) => *percent == 100,
            CanaryRule::Clients(name) => name == client,
            CanaryRule::Keys(name) => key == Some(name.as_bytes()),
        });
        Some(canary.map_or(self.assignment.active, |it| it.policy))
    }

    /// The last record that an answer depends on.
    fn rests_on(&self, index: usize, at: usize, effects: &Effects, response: &Response) -> u64 {
        let pending = &self.clients[index].in_flight[at];
        if let Some((record, _)) = &pending.executed
            && !self.is_always_durable()
        {
            // In interval mode the store promises at most the record of the request itself.
            return *record;
        }
        let on_everything = effects.handled.is_some() || effects.repeated.is_some();
        if on_everything || effects.swept.is_some() || effects.watches.is_some() {
            // The last record of an operation. No answer depends on the records of sessions.
            return self
                .operations
                .last_key_value()
                .map_or(0, |(record, _)| *record);
        }
        match &pending.subject {
            _ if response.0.starts_with(b"-ERR") => 0,
            ReadSubject::Key(key) => self.last_write.get(key).copied().unwrap_or(0),
            ReadSubject::Watch(key) => {
                let watched = (self.clients[index].name.clone(), key.clone());
                self.last_registration.get(&watched).copied().unwrap_or(0)
            }
            ReadSubject::All => self.last_write.values().max().copied().unwrap_or(0),
            ReadSubject::Nothing => 0,
        }
    }
}
