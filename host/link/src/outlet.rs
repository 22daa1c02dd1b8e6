//! The outgoing side of a session. Its owner and its connection share it under the owner's lock.
//!
//! The outlet passes PUBLISH and PUBACK packets to rumqttc as far as the broker has room. It never
//! waits: the rest is sent at the next event of the connection.

use std::collections::{BTreeSet, VecDeque};

use rumqttc::v5::mqttbytes::QoS;
use rumqttc::v5::mqttbytes::v5::{Filter, PubAck, Publish, PublishProperties};
use rumqttc::v5::{AsyncClient, Request as Outgoing};
use tokio::time::Instant;

use crate::ledger::Ledger;
use crate::limits;
use crate::link::Arrival;
use crate::loss::{Blame, PACKET_TOO_LARGE};
use crate::receipts::Receipts;

/// A message that is stored until its owner removes it from the ledger.
pub trait Message: Send {
    /// The PUBLISH, to a topic name, at QoS 1 and without a packet id. It must return the same
    /// bytes each time, except for the remaining expiry time. Returns `None` if the message has
    /// expired; it is then removed.
    fn publish(&self) -> Option<Publish>;

    /// The broker does not accept a packet of this size, or a payload of this size if it has
    /// refused one lately. Returns a replacement, which must be small enough. If there is none, the
    /// message is removed.
    fn too_large(self, bytes: usize, bytes_max: usize) -> Option<Self>
    where
        Self: Sized;

    /// Whether the PUBACK of this message shows that the connection is of use, so that it counts as
    /// stable: see [`Outlet::is_stable`]. Must be false for a message that is published at each
    /// connection.
    fn proves_connection(&self) -> bool {
        true
    }
}

/// The outgoing messages of a session and the receipts of incoming ones.
#[derive(Debug)]
pub struct Outlet<T> {
    ledger: Ledger<Entry<T>>,
    receipts: Receipts,
    /// Messages caused by requests that were received over an earlier connection. The broker
    /// redelivers these requests, and it is unknown which of the new receipts they are. So nothing
    /// may be acknowledged before all of these messages are removed.
    orphans: BTreeSet<u64>,
    /// `None` without a connection.
    client: Option<AsyncClient>,
    packet_bytes_max: usize,
    /// The length of the payload that the broker refused last as too large, and when.
    refused: Option<(usize, Instant)>,
    /// The number of PUBLISH packets that rumqttc may have at once.
    in_flight_max: usize,
    /// From when on the connection is stable, or whether the last one was.
    stable_from: Option<Instant>,
}

#[derive(Debug)]
struct Entry<T> {
    message: T,
    /// The receipt of the message that caused this one. Its PUBACK must follow this message.
    of: Option<u64>,
}

impl<T> Default for Outlet<T> {
    fn default() -> Self {
        Self {
            ledger: Ledger::default(),
            receipts: Receipts::default(),
            orphans: BTreeSet::new(),
            client: None,
            packet_bytes_max: usize::MAX,
            refused: None,
            in_flight_max: 0,
            stable_from: None,
        }
    }
}

impl<T: Message> Outlet<T> {
    /// Adds a message to send, created from its number. `of` is the receipt of the message that
    /// caused it. The caller must call [`Outlet::flush`] afterwards.
    pub fn add(&mut self, of: Option<u64>, message: impl FnOnce(u64) -> T) -> u64 {
        if let Some(receipt) = of {
            self.receipts.add_dependent(receipt);
        }
        let entry = |number| Entry {
            message: message(number),
            of,
        };
        self.ledger.add(entry)
    }

    /// Removes a message. If it was already passed to rumqttc, it may still be sent, but it is not
    /// resent.
    pub fn remove(&mut self, number: u64) -> Option<T> {
        let Entry { message, of } = self.ledger.remove(number)?;
        self.done(number, of);
        Some(message)
    }

    /// Updates the receipts after a message was removed from the ledger.
    fn done(&mut self, number: u64, of: Option<u64>) {
        self.orphans.remove(&number);
        if let Some(receipt) = of {
            self.receipts.remove_dependent(receipt);
        }
    }

    /// Makes the acknowledgement of `receipt` wait for this message, instead of the receipt that
    /// caused it.
    pub fn tie(&mut self, number: u64, receipt: u64) {
        let Some(entry) = self.ledger.get_mut(number) else {
            return;
        };
        self.receipts.add_dependent(receipt);
        if let Some(before) = entry.of.replace(receipt) {
            self.receipts.remove_dependent(before);
        }
    }

    /// The message with this number.
    #[must_use]
    pub fn get(&self, number: u64) -> Option<&T> {
        self.ledger.get(number).map(|entry| &entry.message)
    }

    /// All messages, in order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        let all = self.ledger.iter();
        all.map(|(number, entry)| (number, &entry.message))
    }

    /// The number of messages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ledger.len()
    }

    /// Whether there are no messages.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ledger.is_empty()
    }

    /// Removes all messages, when the link ends.
    pub fn drain(&mut self) -> impl Iterator<Item = T> {
        self.ledger.drain().map(|entry| entry.message)
    }

    /// Whether there is a connection.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.client.is_some()
    }

    /// Whether the connection is stable: see [`limits::STABLE_AFTER`]. Without a connection, this
    /// is about the last one.
    #[must_use]
    pub fn is_stable(&self) -> bool {
        self.stable_from.is_some_and(|from| from <= Instant::now())
    }

    /// How many received messages are not acknowledged.
    #[must_use]
    pub fn unacknowledged(&self) -> usize {
        self.receipts.len()
    }

    /// Completes a received message. It is acknowledged when all messages that it caused are
    /// removed, all messages caused over an earlier connection are removed, and all earlier
    /// receipts are acknowledged. The caller must call [`Outlet::flush`] afterwards.
    pub fn settle(&mut self, receipt: u64) {
        self.receipts.complete(receipt);
    }

    /// Passes to rumqttc what the broker has room for.
    pub fn flush(&mut self) {
        let Some(client) = self.client.clone() else {
            return;
        };
        loop {
            if !self.acknowledge(&client) || self.ledger.in_flight() >= self.in_flight_max {
                return;
            }
            let Some(number) = self.ledger.next_unsent() else {
                return;
            };
            let Some(publish) = self.prepare(number) else {
                continue;
            };
            if !send(&client, publish) {
                return;
            }
            self.ledger.queued(number);
        }
    }

    /// Publishes a message at QoS 1 without storing it. It is lost with the connection. Returns
    /// false if it is not sent, because there is no connection or rumqttc has no room.
    #[must_use]
    pub fn send_unkept(&mut self, publish: impl FnOnce(u64) -> Publish) -> bool {
        let Some(client) = &self.client else {
            return false;
        };
        let number = self.ledger.number();
        let is_sent = send(client, publish(number));
        if is_sent {
            self.ledger.queued(number);
        }
        is_sent
    }

    /// Asks rumqttc to unsubscribe from these filters and to send DISCONNECT. Returns false without
    /// a connection.
    pub(crate) fn disconnect(&self, filters: Vec<Filter>) -> bool {
        let Some(client) = &self.client else {
            return false;
        };
        for filter in filters {
            // Without room for it, the session keeps its subscription until it expires.
            let _ = client.try_unsubscribe(filter.path);
        }
        client.try_disconnect().is_ok()
    }

    pub(crate) fn up(
        &mut self,
        client: AsyncClient,
        session_present: bool,
        packet_bytes_max: usize,
        receive_max: u16,
    ) {
        if !session_present {
            self.ledger.new_session();
            // Without a session the broker redelivers nothing.
            self.orphans.clear();
        }
        self.packet_bytes_max = packet_bytes_max;
        self.stable_from = None;
        // One less than the broker allows. At the full number rumqttc would send no PUBACKs either.
        self.in_flight_max = usize::from(receive_max.saturating_sub(1).max(1));
        self.client = Some(client);
    }

    /// The connection was lost; see [`Ledger::lost`].
    pub(crate) fn down(&mut self, rebuild: bool, blame: Blame) -> Option<T> {
        self.client = None;
        self.stable_from = self.stable_from.filter(|from| *from <= Instant::now());
        self.receipts.lost();
        let rejected = self.ledger.lost(rebuild, blame);
        if blame == Blame::Puback(PACKET_TOO_LARGE) {
            let publish = rejected.as_ref().and_then(|it| it.message.publish());
            if let Some(publish) = publish {
                self.refused = Some((publish.payload.len(), Instant::now()));
            }
        }
        let of_requests = self.ledger.iter().filter(|(_, entry)| entry.of.is_some());
        self.orphans = of_requests.map(|(number, _)| number).collect();
        rejected.map(|it| it.message)
    }

    /// Puts messages to resend into rumqttc's own queue, which precedes its channel and keeps
    /// packet ids.
    pub(crate) fn send_again(&mut self, pending: &mut VecDeque<Outgoing>) {
        while self.client.is_some()
            && self.ledger.in_flight() < self.in_flight_max
            && let Some((number, packet_id)) = self.ledger.next_resend()
        {
            // An expired message is removed by `prepare`; continue with the next one.
            if let Some(mut publish) = self.prepare(number) {
                publish.pkid = packet_id;
                // A PUBLISH that is resent must set DUP (MQTT 5 section 3.3.1.1).
                publish.dup = true;
                self.ledger.requeued();
                pending.push_back(Outgoing::Publish(publish));
            }
        }
    }

    pub(crate) fn sent(&mut self, packet_id: u16) {
        self.ledger.sent(packet_id);
    }

    /// Registers an incoming message. It gets a receipt if it is acknowledged by hand.
    pub(crate) fn received(&mut self, publish: Publish, by_hand: bool) -> Arrival {
        let by_hand = by_hand && publish.qos != QoS::AtMostOnce;
        let receipt = by_hand.then(|| self.receipts.add(publish.pkid));
        Arrival::Message(publish, receipt)
    }

    /// Registers a PUBACK. Returns `None` if its packet id is unknown.
    pub(crate) fn acknowledged(&mut self, ack: PubAck) -> Option<Arrival> {
        let number = self.ledger.acknowledged(ack.pkid)?;
        if self.get(number).is_some_and(Message::proves_connection) && self.stable_from.is_some() {
            self.stable_from = Some(Instant::now());
        }
        // Brokers acknowledge in order (MQTT 5 [MQTT-4.6.0-2]). A broker that skips a message may
        // never acknowledge it, and the PUBACKs must not wait for ever.
        self.orphans = self.orphans.split_off(&number);
        Some(Arrival::Acknowledged(number, ack))
    }

    pub(crate) fn subscribed(&mut self) {
        self.ledger.subscribed();
        self.stable_from = Some(Instant::now() + limits::STABLE_AFTER);
    }

    /// Sends the PUBACKs that are due. Returns false if rumqttc has no room.
    fn acknowledge(&mut self, client: &AsyncClient) -> bool {
        while self.orphans.is_empty()
            && let Some(packet_id) = self.receipts.due()
        {
            let received = Publish {
                pkid: packet_id,
                qos: QoS::AtLeastOnce,
                ..Publish::default()
            };
            if client.try_ack(&received).is_err() {
                return false;
            }
            self.receipts.acknowledged();
        }
        true
    }

    /// The PUBLISH of a message. Returns `None` if the message was removed.
    fn prepare(&mut self, number: u64) -> Option<Publish> {
        let publish = self.get(number).and_then(Message::publish);
        let Some(mut publish) = publish else {
            self.remove(number);
            return None;
        };
        let Some((bytes, bytes_max)) = self.excess(&mut publish) else {
            return Some(publish);
        };
        let Entry { message, of } = self.ledger.remove(number)?;
        let smaller = message.too_large(bytes, bytes_max);
        let publish = smaller.as_ref().and_then(Message::publish);
        let publish = publish.and_then(|mut it| self.excess(&mut it).is_none().then_some(it));
        match (smaller, of) {
            (Some(message), of) if publish.is_some() => {
                self.ledger.put_back(number, Entry { message, of });
            }
            (_, of) => self.done(number, of),
        }
        publish
    }

    /// The size of a packet that the broker does not accept, or of its payload, and the largest
    /// size that it may accept. `None` if it may accept this packet.
    fn excess(&mut self, publish: &mut Publish) -> Option<(usize, usize)> {
        let packet = size(publish);
        if packet > self.packet_bytes_max {
            return Some((packet, self.packet_bytes_max));
        }
        let is_over = |it: &mut (usize, Instant)| it.1.elapsed() >= limits::REFUSED_SIZE_TIME;
        self.refused.take_if(is_over);
        let (refused, _) = self.refused?;
        let payload = publish.payload.len();
        (payload >= refused).then(|| (payload, refused.saturating_sub(1)))
    }
}

/// The size in bytes, including a packet id.
fn size(publish: &mut Publish) -> usize {
    publish.pkid = 1;
    let bytes = publish.size();
    publish.pkid = 0;
    bytes
}

/// Passes a PUBLISH to rumqttc. Returns false if it has no room or rejects the message.
fn send(client: &AsyncClient, publish: Publish) -> bool {
    // Never lossy: topics come from packets that were checked or from strings.
    let topic = String::from_utf8_lossy(&publish.topic);
    let properties: PublishProperties = publish.properties.unwrap_or_default();
    let sent = client.try_publish_with_properties(
        topic,
        publish.qos,
        publish.retain,
        publish.payload,
        properties,
    );
    sent.is_ok()
}
