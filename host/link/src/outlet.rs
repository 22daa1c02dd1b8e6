//! The way out of a session: what its owner and its connection share, under the owner's lock.
//!
//! Enters: messages to publish, and which received ones are settled. Leaves: PUBLISH and PUBACK packets into rumqttc, as
//! far as the broker has room for them. It never waits: what finds no room goes when the next event of the connection
//! comes.

use std::collections::{BTreeSet, VecDeque};

use rumqttc::v5::mqttbytes::QoS;
use rumqttc::v5::mqttbytes::v5::{PubAck, Publish, PublishProperties};
use rumqttc::v5::{AsyncClient, Request as Outgoing};

use crate::ledger::Ledger;
use crate::link::Arrival;
use crate::loss::Blame;
use crate::receipts::Receipts;

/// What is kept of a message until its owner takes it out of the ledger.
pub trait Message: Send {
    /// The PUBLISH, to a topic name, at QoS 1 and without a packet id: the same bytes every time, but for the time that
    /// it has left. None where it is too late for it; then it is forgotten.
    fn publish(&self) -> Option<Publish>;

    /// The broker takes no packet of so many bytes. What to send in its place, which must be small enough; with none it
    /// is forgotten.
    fn too_large(self, bytes: usize, bytes_max: usize) -> Option<Self>
    where
        Self: Sized;
}

/// The messages of a session, and what receives them.
#[derive(Debug)]
pub struct Outlet<T> {
    ledger: Ledger<Kept<T>>,
    receipts: Receipts,
    /// Messages that received ones of an earlier connection led to. Those come again, and nobody knows which of the
    /// received ones they are: so nothing is acknowledged before these have left.
    orphans: BTreeSet<u64>,
    /// None without a connection.
    client: Option<AsyncClient>,
    packet_bytes_max: usize,
    /// PUBLISH packets that rumqttc may have at once.
    in_flight_max: usize,
}

#[derive(Debug)]
struct Kept<T> {
    message: T,
    /// The received message that led to it, which is acknowledged behind it.
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
            in_flight_max: 0,
        }
    }
}

impl<T: Message> Outlet<T> {
    /// Takes a message, which may be made of its number; `of` is the receipt of the message that led to it. It is to be
    /// sent: after that call [`Outlet::flush`].
    pub fn add(&mut self, of: Option<u64>, message: impl FnOnce(u64) -> T) -> u64 {
        if let Some(receipt) = of {
            self.receipts.led_to_one(receipt);
        }
        let kept = |number| Kept {
            message: message(number),
            of,
        };
        self.ledger.add(kept)
    }

    /// Takes a message out: nobody needs it any more. Where it is on its way nothing holds it back, but it is not sent
    /// again.
    pub fn remove(&mut self, number: u64) -> Option<T> {
        let Kept { message, of } = self.ledger.remove(number)?;
        self.done(number, of);
        Some(message)
    }

    /// A message is out of the ledger.
    fn done(&mut self, number: u64, of: Option<u64>) {
        self.orphans.remove(&number);
        if let Some(receipt) = of {
            self.receipts.one_is_done(receipt);
        }
    }

    /// Lets a message stand for one that another received message led to, as far as its acknowledgement goes.
    pub fn tie(&mut self, number: u64, receipt: u64) {
        let Some(kept) = self.ledger.get_mut(number) else {
            return;
        };
        self.receipts.led_to_one(receipt);
        if let Some(before) = kept.of.replace(receipt) {
            self.receipts.one_is_done(before);
        }
    }

    /// A message that is here.
    #[must_use]
    pub fn get(&self, number: u64) -> Option<&T> {
        self.ledger.get(number).map(|kept| &kept.message)
    }

    /// All that are here, in order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        let all = self.ledger.iter();
        all.map(|(number, kept)| (number, &kept.message))
    }

    /// How many are here.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ledger.len()
    }

    /// Whether none is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ledger.is_empty()
    }

    /// Takes out everything, for the end.
    pub fn drain(&mut self) -> impl Iterator<Item = T> {
        self.ledger.drain().map(|kept| kept.message)
    }

    /// Whether there is a connection.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.client.is_some()
    }

    /// How many received messages are not acknowledged.
    #[must_use]
    pub fn unacknowledged(&self) -> usize {
        self.receipts.len()
    }

    /// Settles a received message: it is acknowledged once all messages that it led to have been taken out, as have those
    /// that an earlier connection left, and all received before it are acknowledged. After that call [`Outlet::flush`].
    pub fn settle(&mut self, receipt: u64) {
        self.receipts.settle(receipt);
    }

    /// Gives rumqttc what the broker has room for.
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

    /// Publishes at QoS 1 what nobody keeps: lost without a connection, or with it.
    pub fn send_unkept(&mut self, publish: impl FnOnce(u64) -> Publish) {
        if let Some(client) = &self.client {
            let number = self.ledger.number();
            if send(client, publish(number)) {
                self.ledger.queued(number);
            }
        }
    }

    /// Asks rumqttc to send DISCONNECT. False where there is nobody to send it to.
    pub(crate) fn say_goodbye(&self) -> bool {
        let client = self.client.as_ref();
        client.is_some_and(|client| client.try_disconnect().is_ok())
    }

    /// There is a connection.
    pub(crate) fn up(
        &mut self,
        client: AsyncClient,
        session_present: bool,
        packet_bytes_max: usize,
        receive_max: u16,
    ) {
        if !session_present {
            self.ledger.new_session();
            // Nothing comes again.
            self.orphans.clear();
        }
        self.packet_bytes_max = packet_bytes_max;
        // One less than the broker allows: where rumqttc has as many as that, it sends no PUBACKs either.
        self.in_flight_max = usize::from(receive_max.saturating_sub(1).max(1));
        self.client = Some(client);
    }

    /// The connection is lost; see [`Ledger::lost`].
    pub(crate) fn down(&mut self, anew: bool, blame: Blame) -> Option<T> {
        self.client = None;
        self.receipts.lost();
        let hopeless = self.ledger.lost(anew, blame);
        let of_requests = self.ledger.iter().filter(|(_, kept)| kept.of.is_some());
        self.orphans = of_requests.map(|(number, _)| number).collect();
        hopeless.map(|it| it.message)
    }

    /// Puts what is to be sent again into rumqttc's own queue, which goes before its channel and keeps packet ids.
    pub(crate) fn send_again(&mut self, pending: &mut VecDeque<Outgoing>) {
        while self.client.is_some()
            && self.ledger.in_flight() < self.in_flight_max
            && let Some((number, packet_id)) = self.ledger.next_again()
        {
            // Not there any more, if it is too late for it: then the next one is looked for.
            if let Some(mut publish) = self.prepare(number) {
                publish.pkid = packet_id;
                // MQTT 5 section 3.3.1.1: a PUBLISH that is sent again says so.
                publish.dup = true;
                self.ledger.queued_again();
                pending.push_back(Outgoing::Publish(publish));
            }
        }
    }

    /// rumqttc has sent a PUBLISH.
    pub(crate) fn sent(&mut self, packet_id: u16) {
        self.ledger.sent(packet_id);
    }

    /// A message came. With a receipt where it is to be acknowledged by hand.
    pub(crate) fn received(&mut self, publish: Publish, by_hand: bool) -> Arrival {
        let by_hand = by_hand && publish.qos != QoS::AtMostOnce;
        let receipt = by_hand.then(|| self.receipts.add(publish.pkid));
        Arrival::Message(publish, receipt)
    }

    /// A PUBACK came; none where nobody knows its packet id.
    pub(crate) fn acknowledged(&mut self, ack: PubAck) -> Option<Arrival> {
        let number = self.ledger.acknowledged(ack.pkid)?;
        // Brokers acknowledge in order (MQTT 5 [MQTT-4.6.0-2]). One that skips a message may never acknowledge it, and
        // what comes in is not held up for ever.
        self.orphans = self.orphans.split_off(&number);
        Some(Arrival::Acknowledged(number, ack))
    }

    /// The broker has answered the SUBSCRIBE.
    pub(crate) fn subscribed(&mut self) {
        self.ledger.subscribed();
    }

    /// Sends the PUBACKs whose turn it is. False where rumqttc has no room.
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

    /// The PUBLISH of a message; none where it is forgotten.
    fn prepare(&mut self, number: u64) -> Option<Publish> {
        let publish = self.get(number).and_then(Message::publish);
        let Some(mut publish) = publish else {
            self.remove(number);
            return None;
        };
        let bytes = size(&mut publish);
        if bytes <= self.packet_bytes_max {
            return Some(publish);
        }
        let Kept { message, of } = self.ledger.remove(number)?;
        let smaller = message.too_large(bytes, self.packet_bytes_max);
        let publish = smaller.as_ref().and_then(Message::publish);
        let publish =
            publish.and_then(|mut it| (size(&mut it) <= self.packet_bytes_max).then_some(it));
        match (smaller, of) {
            (Some(message), of) if publish.is_some() => {
                self.ledger.put_back(number, Kept { message, of });
            }
            (_, of) => self.done(number, of),
        }
        publish
    }
}

/// In bytes, with the packet id that it will have.
fn size(publish: &mut Publish) -> usize {
    publish.pkid = 1;
    let bytes = publish.size();
    publish.pkid = 0;
    bytes
}

/// False where rumqttc has no room, or would not send it anyway.
fn send(client: &AsyncClient, publish: Publish) -> bool {
    // A topic is UTF-8 in every packet that was read, and in every text that one is made of.
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
