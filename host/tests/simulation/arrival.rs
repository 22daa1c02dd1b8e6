//! Packets arrive at a client, which answers as MQTT requires.

use crate::client::Sent;
use crate::egress::number_in;
use crate::operation::Operation;
use crate::packet::{self, Ack, Packet, Publish};
use crate::world::World;

impl World {
    /// Some bytes arrive at a client.
    pub(crate) fn deliver_down(&mut self, who: usize) {
        for _ in 0..1 + self.dice.below(4) {
            if !self.deliver_down_some(who) {
                break;
            }
        }
        let dice = &mut self.dice;
        if let Some(link) = self.clients[who].link()
            && !link.down.is_empty()
        {
            let some = dice.below(link.down.len() as u64) as usize;
            link.inbox.extend(link.down.drain(..some));
        }
    }

    /// One packet arrives. Returns false if there is none.
    pub(crate) fn deliver_down_some(&mut self, who: usize) -> bool {
        let Some(link) = self.clients[who].link() else {
            return false;
        };
        let packet = loop {
            if let Some(packet) = packet::decode(link.level, &mut link.inbox) {
                break packet;
            }
            match link.down.pop_front() {
                Some(byte) => link.inbox.push(byte),
                None => return false,
            }
        };
        self.trace.add(|| {
            let shown = format!("{packet:?}");
            format!("c{who} link {} receives {shown:.120}", link.number)
        });
        self.arrives(who, packet);
        true
    }

    fn arrives(&mut self, who: usize, packet: Packet) {
        match packet {
            Packet::Connack { present, reason } => {
                assert_eq!(reason, 0, "CONNECT is accepted");
                self.connacked(who, present);
            }
            Packet::Suback { reasons, .. } => {
                assert!(reasons.iter().all(|it| *it < 0x80), "{reasons:?}");
                self.clients[who].subscribed = true;
            }
            Packet::Publish(it) => self.published(who, it),
            Packet::Ack {
                kind: Ack::Pubrel,
                id,
                ..
            } => {
                let client = &mut self.clients[who];
                client.received.remove(&id);
                if let Some(link) = client.link() {
                    link.in_flight.remove(&id);
                    link.send(packet::ack(Ack::Pubcomp, id), Sent::Ack);
                }
            }
            Packet::Ack { kind, id, reason } => self.acknowledged(who, kind, id, reason),
            Packet::Disconnect { reason } => panic!("the broker disconnects c{who}: {reason:#x}"),
            Packet::Pingresp => panic!("no client has sent PINGREQ"),
        }
    }

    fn connacked(&mut self, who: usize, present: bool) {
        let client = &mut self.clients[who];
        let Some(link) = client.link() else { return };
        assert_eq!(
            present, link.resumed,
            "obligation 5: Session Present of c{who}"
        );
        assert!(!link.connacked, "obligation 8: a second CONNACK");
        link.connacked = true;
        // If the CONNACK of a new session is lost, Session Present of the next one is about that
        // session. A client cannot detect this; the simulation can, and begins again.
        let session = link.session;
        let known = std::mem::replace(&mut client.session, session) == session;
        let known = present && known;
        if !known {
            client.begin_session();
        }
        if !client.subscribed {
            client.subscribe();
        }
        if known {
            client.resend();
        }
    }

    fn acknowledged(&mut self, who: usize, kind: Ack, id: u16, reason: u8) {
        let client = &mut self.clients[who];
        let at = client
            .outgoing
            .iter()
            .position(|it| it.publish.packet_id == id);
        let Some(at) = at else {
            panic!("obligation 8: {kind:?} for packet id {id} of c{who}, which is unused");
        };
        let it = &mut client.outgoing[at];
        let number = it.number;
        let fits = match kind {
            Ack::Puback => it.publish.qos == 1,
            Ack::Pubrec => it.publish.qos == 2,
            _ => it.publish.qos == 2 && it.released,
        };
        assert!(fits, "obligation 8: {kind:?} for {number} of c{who}");
        assert!(
            reason < 0x80 || kind == Ack::Pubcomp && reason == 0x92,
            "{kind:?} of {number} has reason {reason:#x}"
        );
        let is_request = matches!(it.operation, Operation::Request { .. });
        let writes = it.operation.writes();
        if kind == Ack::Pubrec {
            it.released = true;
            let bytes = packet::ack(Ack::Pubrel, id);
            if let Some(link) = client.link() {
                link.send(bytes, Sent::Ack);
            }
        } else {
            let same = |it: &&crate::client::Outgoing| it.publish.qos == 1;
            let before = client.outgoing.iter().take(at).find(same);
            assert!(
                kind != Ack::Puback || before.is_none(),
                "obligation 8: PUBACK of {number} overtakes an earlier one"
            );
            client.outgoing.remove(at);
        }
        if kind == Ack::Pubcomp {
            return;
        }
        if is_request && client.receive_max == 100 {
            assert!(
                client.responses.contains_key(&number)
                    || self.ledger.unremembered.contains(&number),
                "obligation 2: request {number} of c{who} is acknowledged before its response"
            );
        }
        if writes {
            self.tally.count("acknowledged writes before a crash");
        }
        client.acknowledged.push(number);
        assert!(
            self.oracle.is_done(number) || self.ledger.unremembered.contains(&number),
            "obligation 1: {number} is acknowledged, and was not handled"
        );
    }

    fn published(&mut self, who: usize, it: Publish) {
        let client = &mut self.clients[who];
        let (receive_max, lasts) = (client.receive_max, client.expiry_s > 0);
        if it.qos > 0 {
            let Some(link) = client.link() else { return };
            link.in_flight.insert(it.packet_id);
            assert!(
                link.in_flight.len() <= receive_max.into(),
                "obligation 8: c{who} has more than {receive_max} messages in flight"
            );
            let kind = if it.qos == 1 {
                Ack::Puback
            } else {
                Ack::Pubrec
            };
            if it.qos == 1 {
                link.in_flight.remove(&it.packet_id);
            }
            link.send(packet::ack(kind, it.packet_id), Sent::Ack);
        }
        if it.qos == 2 && !client.received.insert(it.packet_id) {
            assert!(
                it.dup || self.ledger.lossy,
                "obligation 8: packet id {} is in use",
                it.packet_id
            );
            return;
        }
        match it.topic.split('/').next() {
            Some("r") => self.response_arrives(who, &it),
            Some("clients") => self.followed(who, &it),
            Some("t") => self.message_arrives(who, &it, lasts),
            Some("will") => {
                let will = String::from_utf8_lossy(&it.payload).into_owned();
                *client.wills.entry(will).or_default() += 1;
            }
            Some("ret") => {
                let number = number_in(&it.payload, "m").expect("a retained message");
                self.ledger.retained.insert(it.topic, number);
            }
            _ => {}
        }
    }

    /// Obligation 2: a request has one response, however often it is sent.
    fn response_arrives(&mut self, who: usize, it: &Publish) {
        let correlation = it.correlation().unwrap_or_default();
        let number = number_in(correlation, "").expect("a request of this client");
        let version = it.user("__ts").map(str::to_owned);
        self.follow_answered(who, number, &it.payload, version.as_deref());
        let reads = self.ledger.reads.contains(&number);
        let response = (it.payload.clone(), version);
        let Some(before) = self.clients[who].responses.insert(number, response.clone()) else {
            return;
        };
        self.tally.count("responses seen twice");
        let in_memory = self.ledger.in_memory.contains(&number);
        let one_life = in_memory && !self.ledger.forgotten.contains(&number);
        let unremembered = self.ledger.unremembered.contains(&number) && !one_life;
        // In interval mode a crash may lose a request whose response has left.
        if reads || unremembered || self.ledger.lossy {
            return;
        }
        assert_eq!(
            (&before.0, &before.1),
            (&response.0, &response.1),
            "obligation 2: request {number} has two responses"
        );
    }

    /// Obligation 4: once at QoS 2, in the order of publication.
    fn message_arrives(&mut self, who: usize, it: &Publish, lasts: bool) {
        let number = number_in(&it.payload, "m").expect("a message of a client");
        let published = self.ledger.qos.get(&number).copied().unwrap_or(0);
        let qos2 = published == 2 && it.qos == 2;
        let client = &mut self.clients[who];
        let (times, _) = client.arrived.entry(number).or_insert((0, it.qos));
        *times += 1;
        let first = *times == 1;
        assert!(
            first || !qos2 || !lasts || self.ledger.lossy,
            "obligation 4: the QoS 2 message {number} arrived twice at c{who}"
        );
        // A publisher's repetition may come behind its later messages at a new subscriber.
        if first && it.qos > 0 && !self.ledger.repeated.contains(&number) && !self.ledger.lossy {
            let last = client
                .last
                .insert((it.topic.clone(), published, it.qos), number);
            assert!(
                last.is_none_or(|last| last < number),
                "obligation 4: message {number} on {} arrived at c{who} behind {last:?}",
                it.topic
            );
        }
    }
}
