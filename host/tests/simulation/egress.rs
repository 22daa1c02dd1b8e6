//! Bytes leave the broker. At that moment the log must hold what they reveal.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use statehouse_core::clock::Stamp;
use statehouse_mqtt::Direct;
use statehouse_wal::Log;

use crate::client::Link;
use crate::node::Node;
use crate::oracle::Change;
use crate::packet::{self, Ack, Packet, Publish};
use crate::policies;
use crate::world::World;

/// One write of the broker.
#[derive(Debug)]
pub(crate) struct Egress {
    link: u64,
    bytes: Vec<u8>,
    reached: Reached,
}

/// How far the log was when something left the host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reached {
    pub(crate) durable: u64,
    released: u64,
}

impl Reached {
    pub(crate) fn of(log: &Log) -> Self {
        Self {
            durable: log.durable().0,
            released: log.released().0,
        }
    }
}

/// The socket of a connection. Takes down every write with the position that was durable.
#[derive(Debug)]
pub(crate) struct Tap {
    link: u64,
    log: Arc<Log>,
    egress: Arc<Mutex<Vec<Egress>>>,
}

impl Tap {
    pub(crate) fn new(link: u64, node: &Node, egress: &Arc<Mutex<Vec<Egress>>>) -> Self {
        Self {
            link,
            log: node.log.clone(),
            egress: egress.clone(),
        }
    }
}

impl Direct for Tap {
    fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        let mut egress = self.egress.lock().unwrap_or_else(PoisonError::into_inner);
        egress.push(Egress {
            link: self.link,
            bytes: bytes.to_vec(),
            reached: Reached::of(&self.log),
        });
        Ok(bytes.len())
    }
}

/// The number at the end of a value, a message or a correlation, behind `prefix`.
pub(crate) fn number_in(text: &[u8], prefix: &str) -> Option<u64> {
    let text = std::str::from_utf8(text).ok()?;
    text.strip_prefix(prefix)?.parse().ok()
}

impl World {
    pub(crate) fn take_egress(&mut self) {
        self.take_departures();
        let egress = std::mem::take(&mut *self.egress.lock().expect("one thread"));
        for Egress {
            link,
            bytes,
            reached,
        } in egress
        {
            let of = |it: &Link| it.number == link;
            let place = (0..self.clients.len()).find_map(|who| {
                let at = self.clients[who].links.iter().position(of)?;
                Some((who, at))
            });
            let Some((who, at)) = place else { continue };
            let link = &mut self.clients[who].links[at];
            link.down.extend(&bytes);
            link.egress.extend(bytes);
            let level = link.level;
            while let Some(packet) = packet::decode(level, &mut self.clients[who].links[at].egress)
            {
                self.leaves(who, at, &packet, reached);
            }
        }
        let due = self.ledger.commits.saturating_sub(3);
        for (number, acked) in std::mem::take(&mut self.ledger.acked) {
            match acked <= due {
                true => self.check_notified(number, None),
                false => self.ledger.acked.push((number, acked)),
            }
        }
    }

    /// A packet leaves the broker for a connection of a client.
    fn leaves(&mut self, who: usize, at: usize, packet: &Packet, reached: Reached) {
        let lasts = self.clients[who].expiry_s > 0;
        let link = &self.clients[who].links[at];
        self.trace.add(|| {
            let shown = format!("{packet:?}");
            format!("  leaves for link {}: {shown:.150}", link.number)
        });
        let needed = match packet {
            Packet::Connack { .. } => link.connected_at,
            Packet::Suback { id, .. } => link.positions.get(id).copied().unwrap_or(0),
            Packet::Ack {
                kind: Ack::Puback | Ack::Pubrec,
                id,
                reason: 0..0x80,
            } => {
                let number = link.exchanges.get(id).copied();
                let number = number.unwrap_or_else(|| {
                    panic!("obligation 8: an acknowledgement for packet id {id}, which is unused")
                });
                // In this order over one connection. Others may wait for records of their own.
                let over = link.number;
                let needed = self.needed_for(number);
                self.check_notified(number, Some(over));
                self.ledger.acked.push((number, self.ledger.commits));
                if !self.plan.interval && self.ledger.unrecorded.remove(&number) {
                    // Its packet id was recorded before this PUBREC.
                    let response = self.oracle.response(number).cloned();
                    let change = Change::Done { number, response };
                    self.oracle.note((reached.durable, reached.durable), change);
                }
                needed
            }
            Packet::Publish(it) if it.topic.starts_with("r/") => self.check_response(it),
            Packet::Publish(it) if it.topic.starts_with("t/") => match lasts && it.qos == 2 {
                true => number_in(&it.payload, "m").map_or(0, |it| self.oracle.position(it)),
                false => 0,
            },
            Packet::Publish(it) if it.topic.starts_with("clients/") => {
                self.check_notification(who, at, it)
            }
            _ => 0,
        };
        let urgent = matches!(packet, Packet::Publish(it) if is_urgent_answer(it));
        self.check_left(needed, reached, urgent, || format!("{packet:?} for c{who}"));
        if let Packet::Publish(it) = packet {
            self.observe(it.user("__ts"));
        }
    }

    /// Obligation 7: an output depends on durable records, or on released ones in interval mode.
    pub(crate) fn check_left(
        &self,
        needed: u64,
        reached: Reached,
        urgent: bool,
        what: impl FnOnce() -> String,
    ) {
        let Reached { durable, released } = reached;
        let promised = urgent || !self.plan.interval;
        assert!(
            needed <= if promised { durable } else { released },
            "obligation 7: {} leaves with position {needed}, log is at {reached:?}",
            what()
        );
        assert!(
            self.plan.interval || released <= durable,
            "obligation 7: the log released a position that is not durable: {reached:?}"
        );
    }

    /// A client sees a version. All later ones must be higher.
    pub(crate) fn observe(&mut self, version: Option<&str>) {
        let version = version.and_then(stamp).unwrap_or_default();
        self.ledger.observed = self.ledger.observed.max(version);
    }

    /// The position that the acknowledgement of an operation depends on.
    pub(crate) fn needed_for(&self, number: u64) -> u64 {
        match self.ledger.reads.contains(&number) {
            true => self.ledger.needed.get(&number).copied().unwrap_or(0),
            false => self.oracle.position(number),
        }
    }

    /// Obligation 9: the policy that the assignment named answers a request.
    pub(crate) fn check_policy(&mut self, number: u64, policy: Option<&str>) {
        let Some(by) = self.ledger.by.get(&number) else {
            return;
        };
        // The store does not know the name of a policy whose module is lost.
        let right = match policy {
            Some(policy) => by.iter().any(|it| policies::policy(*it).tag == policy),
            None => self.plan.missing_policy,
        };
        assert!(
            right,
            "obligation 9: {policy:?} answered {number}, not {by:?}"
        );
    }

    /// Obligation 3: a watcher is notified before the change is acknowledged.
    fn check_notified(&self, number: u64, over: Option<u64>) {
        for client in self.clients.iter().filter(|it| it.receive_max == 100) {
            for link in client.links.iter().filter(|it| it.is_served()) {
                if over.is_some_and(|it| it != link.number) {
                    continue;
                }
                let owed = link.owed.values().flatten();
                let mut missing = owed.filter(|(change, _)| *change == number);
                assert!(
                    missing.next().is_none(),
                    "obligation 3: {number} is acknowledged before {} is notified",
                    client.name
                );
            }
        }
    }

    /// Checks the response to a request against the oracle. Returns the position that it needs.
    pub(crate) fn check_response(&mut self, it: &Publish) -> u64 {
        let correlation = it.correlation().unwrap_or_default();
        let number = number_in(correlation, "").expect("a request of a client");
        let payload = it.payload.clone();
        self.check_policy(number, it.user("policy"));
        if payload.starts_with(b"$") && payload != b"$-1\r\n" {
            self.tally.count("GET hits");
        }
        if self.ledger.open.contains(&number) {
            // A crash made it unknown whether it was handled.
        } else if self.ledger.reads.contains(&number) || self.ledger.unremembered.contains(&number)
        {
            let possible = self.ledger.possible.get(&number);
            let found = possible.map(|it| it.get(&payload));
            assert_ne!(
                found,
                Some(None),
                "obligation 2: the response to request {number} was never right"
            );
            if let Some(needed) = found.flatten() {
                return *needed;
            }
        } else if !self.oracle.uncertain.contains(&number)
            && let Some(expected) = self.oracle.response(number)
        {
            assert_eq!(
                String::from_utf8_lossy(&it.payload),
                String::from_utf8_lossy(expected),
                "obligation 2: the response to request {number} (right: expected)"
            );
        }
        self.needed_for(number)
    }

    /// Checks a notification against the expected ones. Returns the position that it depends on.
    fn check_notification(&mut self, who: usize, at: usize, it: &Publish) -> u64 {
        self.tally.count("notifications");
        let (client, key, last) = notification(&it.topic, &it.payload);
        let name = self.clients[who].name.clone();
        assert_eq!(
            client, name,
            "obligation 3: a notification for another client"
        );
        if self.clients[who].follower.is_some() {
            return self.check_followed(it, &key, &last);
        }
        let link = &mut self.clients[who].links[at];
        let open = it.dup || link.open_keys.contains(&key);
        let owed = link.owed.entry(key.clone()).or_default();
        let expected = owed.front().map(|(_, value)| match value {
            Some(value) => String::from_utf8_lossy(value).into_owned(),
            None => "DELETE".to_owned(),
        });
        if expected.as_ref() != Some(&last) {
            assert!(
                open,
                "obligation 3: {name} receives {last:?} of {key}, and {expected:?} is next"
            );
            return 0;
        }
        let number = owed.pop_front().map_or(0, |(number, _)| number);
        let version = it.user("__ts").expect("a version").to_owned();
        let before = link.versions.insert(key, version.clone());
        assert!(
            before.is_none_or(|it| it < version),
            "obligation 3: versions must rise"
        );
        self.oracle.position(number)
    }
}

/// The client, the key and the new value of a notification.
pub(crate) fn notification(topic: &str, payload: &[u8]) -> (String, String, String) {
    let mut parts = topic.rsplit('/');
    let key = parts.next().map(unhex).expect("a key");
    let client = parts.nth(2).map(unhex).expect("a client");
    let lines = String::from_utf8_lossy(payload);
    let last = lines.lines().last().unwrap_or_default();
    (client, key, last.to_owned())
}

/// The version in a user property.
pub(crate) fn stamp(text: &str) -> Option<Stamp> {
    let mut parts = text.split(':').map_while(|it| it.parse().ok());
    let (wall, counter) = (parts.next()?, parts.next()?);
    let counter = u32::try_from(counter).ok()?;
    Some(Stamp { wall, counter })
}

/// Whether a response promises that a write is durable in any mode.
pub(crate) fn is_urgent_answer(it: &Publish) -> bool {
    it.user("persisted").is_some()
}

fn unhex(text: &str) -> String {
    let bytes = data_encoding::HEXUPPER.decode(text.as_bytes());
    String::from_utf8(bytes.expect("Base 16")).expect("UTF-8")
}
