//! The outgoing messages of one session: queued, then in flight until acknowledged (sections 4.3,
//! 4.6).
//!
//! Queued and in-flight messages are session state and share one byte count, which is limited per
//! session and in total. Packet ids rise and wrap around, so that an id is reused as late as
//! possible. Every change of durable messages must be written to the [`SessionLog`] in the same
//! method, or recovery loses it. The queue neither encodes messages nor decides when to send them.

use std::{collections::VecDeque, sync::Arc, time::Instant};

use bytes::Bytes;
use rustc_hash::FxHashMap;
use statehouse_protocol::ConnectionId;

use crate::{
    Message, QoS,
    change::Part,
    ledger::{Account, Holding},
    limits::{MESSAGE_OVERHEAD_BYTES, SPARE_ENTRIES_MAX},
    persist::SessionLog,
};

/// A message for one client. Its QoS and retain flag are those to send it with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Queued {
    pub(crate) message: Message,
    pub(crate) subscription_ids: Box<[u32]>,
    pub(crate) scope: Scope,
    /// Set if the message was sent to this client as a member of a shared subscription.
    pub(crate) shared: Option<Box<Shared>>,
}

/// What the broker needs to send a message to another session of the group if this one does not
/// receive it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shared {
    /// The filter of the shared subscription, including `$share/NAME/`.
    pub(crate) filter: Bytes,
    /// The QoS as published.
    pub(crate) qos: QoS,
    /// The retain flag as published.
    pub(crate) retain: bool,
}

/// A published message, and the filter of the group of which one session must receive it.
#[derive(Debug)]
pub(crate) struct Orphan {
    pub(crate) filter: Bytes,
    pub(crate) message: Message,
}

/// How long a message waits to be sent, and when it is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// For the session. Recorded at once.
    Session,
    /// For the session, an answer to the client's own request. Recorded only if it cannot be sent
    /// at once. Otherwise it precedes the acknowledgement of the request in the same output, so a
    /// client that loses both repeats the request. While the log has no room, the acknowledgement
    /// of a waiting answer waits with it.
    Answer,
    /// For this connection only, or for a session while the log has no room. Dropped if the
    /// connection ends before the message is sent; recorded if it ends before the message is
    /// acknowledged.
    Connection,
}

impl Queued {
    /// Memory that the message is charged with.
    pub(crate) fn cost_bytes(&self) -> usize {
        // A group may end before its messages do. Then these hold the only copy of its filter.
        let filter = self.shared.as_ref().map_or(0, |shared| shared.filter.len());
        self.message.cost_bytes() + size_of_val(&*self.subscription_ids) + filter
    }

    fn orphan(&self) -> Option<Orphan> {
        let shared = self.shared.as_ref()?;
        let mut message = self.message.clone();
        (message.qos, message.retain) = (shared.qos, shared.retain);
        Some(Orphan {
            filter: shared.filter.clone(),
            message,
        })
    }
}

/// A queued message and its position in the session's order.
#[derive(Debug)]
struct Entry {
    /// Rises with every message of the session.
    number: u64,
    /// Whether the log holds the message.
    recorded: bool,
    queued: Queued,
}

impl Entry {
    /// Whether the log of a durable session lacks the message.
    fn is_unrecorded(&self) -> bool {
        !self.recorded && self.queued.message.qos != QoS::AtMostOnce
    }

    fn is_unrecorded_answer(&self) -> bool {
        self.queued.scope == Scope::Answer && self.is_unrecorded()
    }

    fn record(&mut self, log: &mut SessionLog<'_>) {
        if log.is_on() && self.is_unrecorded() {
            log.message(self.number, &self.queued);
            self.recorded = true;
        }
    }
}

/// A sent QoS 1 or 2 message that is not acknowledged yet.
#[derive(Debug)]
pub(crate) struct InFlight {
    /// The position in the session's order, which redeliveries keep.
    number: u64,
    recorded: bool,
    /// The connection that it was last sent on.
    pub(crate) connection: ConnectionId,
    /// `None` after a PUBREC. Then only PUBREL is redelivered.
    pub(crate) queued: Option<Queued>,
}

/// A recovered message.
#[derive(Debug)]
pub(crate) struct Restored {
    pub(crate) number: u64,
    /// The packet id that it was sent with.
    pub(crate) packet_id: Option<u16>,
    /// `None` after a PUBREC.
    pub(crate) queued: Option<Queued>,
}

impl Restored {
    /// The packet id if the message was sent at QoS 2.
    pub(crate) fn exactly_once(&self) -> Option<u16> {
        let queued = self.queued.as_ref()?;
        self.packet_id
            .filter(|_| queued.message.qos == QoS::ExactlyOnce)
    }
}

/// A recorded message, for a snapshot.
#[derive(Debug)]
pub(crate) struct Recorded<'a> {
    pub(crate) number: u64,
    pub(crate) packet_id: Option<u16>,
    pub(crate) queued: Option<&'a Queued>,
}

/// The queue and the send window of one session.
#[derive(Debug)]
pub(crate) struct SessionQueue {
    queue: VecDeque<Entry>,
    /// No queued message expires before this.
    expires: Option<Instant>,
    in_flight: FxHashMap<u16, InFlight>,
    bytes: Holding,
    last_packet_id: u16,
    last_number: u64,
    /// Set if answers wait that the log had no room for. No such answer has a lower number.
    unrecorded_from: Option<u64>,
}

impl SessionQueue {
    /// Creates an empty queue.
    pub(crate) fn new(bytes: Holding) -> Self {
        Self {
            queue: VecDeque::new(),
            expires: None,
            in_flight: FxHashMap::default(),
            bytes,
            last_packet_id: 0,
            last_number: 0,
            unrecorded_from: None,
        }
    }

    /// Continues the packet ids behind this one. After a restart it must not be one of the last
    /// that the previous run used: their records may be lost, and the client still holds their ids.
    pub(crate) fn continue_after(&mut self, packet_id: u16) {
        self.last_packet_id = packet_id;
    }

    /// Restores a recovered message. Messages must be restored in the order of their numbers. If a
    /// corrupt log uses a packet id twice, the later message is queued as if it was never sent.
    pub(crate) fn restore(&mut self, restored: Restored) {
        let (number, packet_id, queued) = (restored.number, restored.packet_id, restored.queued);
        self.last_number = self.last_number.max(number);
        let bytes = match (&queued, packet_id) {
            (Some(queued), _) => queued.cost_bytes(),
            (None, Some(_)) => MESSAGE_OVERHEAD_BYTES,
            (None, None) => 0,
        };
        self.bytes.add(bytes);
        if let Some(packet_id) = packet_id.filter(|id| !self.in_flight.contains_key(id)) {
            let sent = InFlight {
                number,
                recorded: true,
                connection: ConnectionId::NONE,
                queued,
            };
            self.in_flight.insert(packet_id, sent);
        } else if let Some(queued) = queued {
            self.push_back(Entry {
                number,
                recorded: true,
                queued,
            });
        }
    }

    /// Recorded messages from this number on, in order.
    pub(crate) fn recorded_from(&self, number: u64) -> impl Iterator<Item = Recorded<'_>> {
        let in_flight = self.in_flight.iter();
        let mut sent: Vec<(&u16, &InFlight)> = in_flight
            .filter(|(_, entry)| entry.recorded && entry.number >= number)
            .collect();
        sent.sort_unstable_by_key(|(_, entry)| entry.number);
        let from = self.queue.partition_point(|entry| entry.number < number);
        // Messages in flight were queued before all messages that are still in the queue.
        let sent = sent.into_iter().map(|(packet_id, entry)| Recorded {
            number: entry.number,
            packet_id: Some(*packet_id),
            queued: entry.queued.as_ref(),
        });
        let queued = self.queue.range(from..).filter(|entry| entry.recorded);
        sent.chain(queued.map(|entry| Recorded {
            number: entry.number,
            packet_id: None,
            queued: Some(&entry.queued),
        }))
    }

    /// Whether a message of this cost fits the limits of the session and of all sessions. An owner
    /// above `floor` must also stay within its share.
    pub(crate) fn has_room(
        &self,
        cost_bytes: usize,
        bytes_max: usize,
        total_bytes_max: usize,
        floor: usize,
    ) -> bool {
        self.bytes.amount() + cost_bytes <= bytes_max
            && self.bytes.fits(cost_bytes, total_bytes_max, floor)
    }

    /// The number of queued and in-flight messages, and of those in flight.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let in_flight = self.in_flight.len();
        (self.queue.len() + in_flight, in_flight)
    }

    /// Memory of the queued and in-flight messages, with overhead.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.amount()
    }

    /// Charges the messages to this account from now on.
    pub(crate) fn transfer(&mut self, account: &Arc<Account>) {
        self.bytes.transfer(account);
    }

    /// Memory of the messages of all sessions.
    pub(crate) fn total_bytes(&self) -> usize {
        self.bytes.total()
    }

    pub(crate) fn push(&mut self, queued: Queued, log: &mut SessionLog<'_>) {
        self.bytes.add(queued.cost_bytes());
        self.last_number += 1;
        let mut entry = Entry {
            number: self.last_number,
            recorded: false,
            queued,
        };
        if entry.queued.scope == Scope::Session {
            entry.record(log);
        }
        self.push_back(entry);
    }

    fn push_back(&mut self, entry: Entry) {
        self.expires = earlier(self.expires, entry.queued.message.expires);
        self.queue.push_back(entry);
    }

    /// When the next queued message expires, or earlier if that message has left the queue.
    pub(crate) fn expires(&self) -> Option<Instant> {
        self.expires
    }

    /// Records the message at the back if it is an answer that could not be sent at once. If the
    /// log has no room, [`first_unrecorded_answer`](Self::first_unrecorded_answer) finds it.
    pub(crate) fn record_waiting_answer(&mut self, log_has_room: bool, log: &mut SessionLog<'_>) {
        let last = self.queue.back_mut();
        let Some(entry) = last.filter(|entry| entry.is_unrecorded_answer()) else {
            return;
        };
        if log_has_room {
            entry.record(log);
        } else if log.is_on() {
            self.unrecorded_from.get_or_insert(entry.number);
        }
    }

    /// The number of the first message that must leave before the acknowledgement of its request,
    /// because the log had no room for it. May be lower if such a message was dropped. Every search
    /// begins behind the end of the last one, so the calls take constant time on average.
    pub(crate) fn first_unrecorded_answer(&mut self) -> Option<u64> {
        if self.front_number()? > self.unrecorded_from? {
            let first = self.queue.iter().find(|it| it.is_unrecorded_answer());
            self.unrecorded_from = first.map(|entry| entry.number);
        }
        self.unrecorded_from
    }

    pub(crate) fn front(&self) -> Option<&Queued> {
        self.queue.front().map(|entry| &entry.queued)
    }

    /// Removes the front of the queue after it was sent at QoS 0, has expired or proved too large
    /// for the client.
    pub(crate) fn pop(&mut self, log: &mut SessionLog<'_>) {
        if let Some(entry) = self.queue.pop_front() {
            self.bytes.subtract(entry.queued.cost_bytes());
            record_removal(entry.number, entry.recorded, log);
            self.trim();
        }
    }

    /// The packet id for the next message. `None` if all 65,535 are in flight.
    pub(crate) fn next_packet_id(&self) -> Option<u16> {
        let mut id = self.last_packet_id;
        for _ in 0..=self.in_flight.len() {
            id = id.checked_add(1).unwrap_or(1);
            if !self.in_flight.contains_key(&id) {
                return Some(id);
            }
        }
        None
    }

    /// Moves the front of the queue into the window. A QoS 2 message is recorded, because the
    /// client remembers its packet id.
    pub(crate) fn sent(
        &mut self,
        packet_id: u16,
        connection: ConnectionId,
        log: &mut SessionLog<'_>,
    ) {
        if let Some(mut entry) = self.queue.pop_front() {
            self.last_packet_id = packet_id;
            if entry.queued.message.qos == QoS::ExactlyOnce {
                entry.record(log);
            }
            let number = entry.number;
            if entry.recorded {
                log.write(Part::Sent { number, packet_id });
            }
            let sent = InFlight {
                number,
                recorded: entry.recorded,
                connection,
                queued: Some(entry.queued),
            };
            self.in_flight.insert(packet_id, sent);
            self.trim();
        }
    }

    pub(crate) fn in_flight(&mut self, packet_id: u16) -> Option<&mut InFlight> {
        self.in_flight.get_mut(&packet_id)
    }

    /// Ends the exchange of a packet id.
    pub(crate) fn complete(
        &mut self,
        packet_id: u16,
        log: &mut SessionLog<'_>,
    ) -> Option<InFlight> {
        let entry = self.in_flight.remove(&packet_id)?;
        let bytes = entry.queued.as_ref().map(Queued::cost_bytes);
        self.bytes.subtract(bytes.unwrap_or(MESSAGE_OVERHEAD_BYTES));
        record_removal(entry.number, entry.recorded, log);
        self.trim();
        Some(entry)
    }

    /// Shrinks the tables after a burst.
    fn trim(&mut self) {
        let (len, capacity) = (self.queue.len(), self.queue.capacity());
        if capacity > SPARE_ENTRIES_MAX && len < capacity / 8 {
            self.queue.shrink_to(2 * len);
        }
        let (len, capacity) = (self.in_flight.len(), self.in_flight.capacity());
        if capacity > SPARE_ENTRIES_MAX && len < capacity / 8 {
            self.in_flight.shrink_to(2 * len);
        }
    }

    /// Handles a PUBREC: drops the message but keeps its packet id. The entry is still charged with
    /// its overhead until the PUBCOMP.
    pub(crate) fn release(&mut self, packet_id: u16, log: &mut SessionLog<'_>) {
        let Some(entry) = self.in_flight.get_mut(&packet_id) else {
            return;
        };
        if let Some(queued) = entry.queued.take() {
            if entry.recorded {
                let number = entry.number;
                log.write(Part::Released { number, packet_id });
            }
            self.bytes
                .subtract(queued.cost_bytes() - MESSAGE_OVERHEAD_BYTES);
        }
    }

    /// Records unacknowledged messages when their connection ends, because the session will
    /// redeliver them, and answers that wait since the log had no room.
    pub(crate) fn record_unrecorded(&mut self, log: &mut SessionLog<'_>) {
        if !log.is_on() {
            return;
        }
        let unknown = self
            .in_flight
            .iter_mut()
            .filter(|(_, entry)| !entry.recorded);
        for (packet_id, entry) in unknown {
            if let Some(queued) = &entry.queued {
                let (number, packet_id) = (entry.number, *packet_id);
                log.message(number, queued);
                log.write(Part::Sent { number, packet_id });
                entry.recorded = true;
            }
        }
        if let Some(number) = self.unrecorded_from.take() {
            let from = self.queue.partition_point(|entry| entry.number < number);
            let waiting = self.queue.range_mut(from..);
            for entry in waiting.filter(|entry| entry.is_unrecorded_answer()) {
                entry.record(log);
            }
        }
    }

    /// The packet ids in flight, in the order of their messages.
    pub(crate) fn in_order(&self) -> VecDeque<u16> {
        let in_flight = self.in_flight.iter();
        let mut ids: Vec<(u64, u16)> = in_flight.map(|(id, sent)| (sent.number, *id)).collect();
        ids.sort_unstable();
        ids.into_iter().map(|(_, id)| id).collect()
    }

    /// Drops messages that do not outlive the connection: those at QoS 0, and those for this
    /// connection only. Returns how many are lost, and those that another session may receive.
    pub(crate) fn drop_transient(&mut self, log: &mut SessionLog<'_>) -> (usize, Vec<Orphan>) {
        self.drop_or_orphan(log, |queued| {
            queued.scope == Scope::Connection || queued.message.qos == QoS::AtMostOnce
        })
    }

    /// Drops expired messages. Returns how many.
    pub(crate) fn drop_expired(&mut self, now: Instant, log: &mut SessionLog<'_>) -> usize {
        self.drop_queued(log, |queued| queued.message.is_expired(now))
    }

    /// Drops messages to topics that the client is no longer allowed to receive. Returns how many
    /// are lost, and those that another session may receive.
    pub(crate) fn drop_forbidden(
        &mut self,
        allowed: impl Fn(&[u8]) -> bool,
        log: &mut SessionLog<'_>,
    ) -> (usize, Vec<Orphan>) {
        self.drop_or_orphan(log, |queued| !allowed(&queued.message.topic))
    }

    /// The messages that another session of a group must receive after this session has ended
    /// (section 4.8.2), in order: those not sent, and those sent at QoS 1 and not acknowledged.
    /// Messages sent at QoS 2 must not go to another session [MQTT-4.8.2-5].
    pub(crate) fn into_orphans(self) -> Vec<Orphan> {
        let mut sent: Vec<(u64, &Queued)> = self
            .in_flight
            .values()
            .filter_map(|entry| Some((entry.number, entry.queued.as_ref()?)))
            .filter(|(_, queued)| queued.message.qos == QoS::AtLeastOnce)
            .collect();
        sent.sort_unstable_by_key(|(number, _)| *number);
        let sent = sent.into_iter().map(|(_, queued)| queued);
        let unsent = self.queue.iter().map(|entry| &entry.queued);
        sent.chain(unsent).filter_map(Queued::orphan).collect()
    }

    fn drop_or_orphan(
        &mut self,
        log: &mut SessionLog<'_>,
        should_drop: impl Fn(&Queued) -> bool,
    ) -> (usize, Vec<Orphan>) {
        let mut orphans = Vec::new();
        let dropped = self.drop_queued(log, |queued| {
            let should_drop = should_drop(queued);
            if should_drop {
                orphans.extend(queued.orphan());
            }
            should_drop
        });
        (dropped - orphans.len(), orphans)
    }

    fn drop_queued(
        &mut self,
        log: &mut SessionLog<'_>,
        mut should_drop: impl FnMut(&Queued) -> bool,
    ) -> usize {
        let before = self.queue.len();
        let (mut freed, mut expires) = (0, None);
        self.queue.retain(|entry| {
            let should_drop = should_drop(&entry.queued);
            if should_drop {
                freed += entry.queued.cost_bytes();
                record_removal(entry.number, entry.recorded, log);
            } else {
                expires = earlier(expires, entry.queued.message.expires);
            }
            !should_drop
        });
        self.expires = expires;
        self.bytes.subtract(freed);
        self.trim();
        before - self.queue.len()
    }

    /// The number of the newest message of the session. Numbers rise in the order of the queue.
    pub(crate) fn last_number(&self) -> u64 {
        self.last_number
    }

    /// The number of the message at the front of the queue.
    pub(crate) fn front_number(&self) -> Option<u64> {
        self.queue.front().map(|entry| entry.number)
    }

    /// Whether the front of the queue may have to wait for acknowledgements of earlier messages.
    pub(crate) fn front_needs_window(&self) -> bool {
        let front = self.front();
        front.is_some_and(|queued| queued.message.qos != QoS::AtMostOnce)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.in_flight.is_empty()
    }

    pub(crate) fn is_queue_empty(&self) -> bool {
        self.queue.is_empty()
    }
}

/// The earlier of two times that may be missing.
fn earlier(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    a.into_iter().chain(b).min()
}

fn record_removal(number: u64, recorded: bool, log: &mut SessionLog<'_>) {
    if recorded {
        log.write(Part::Removed(number));
    }
}
