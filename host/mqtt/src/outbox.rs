//! Messages of one session on their way to its client: queued, then in flight until acknowledged (sections 4.3, 4.6).
//!
//! Both parts are session state and counted in bytes together, in the session and over all sessions. Packet identifiers
//! are given in a circle, so that one is used again as late as possible. What of it is durable is written to a [`Tape`] in
//! the method that changes it. Never encodes and never decides when to send.

use std::{collections::VecDeque, sync::Arc, time::Instant};

use bytes::Bytes;
use rustc_hash::FxHashMap;

use crate::{
    Message, QoS,
    change::Part,
    ledger::{Account, Holding},
    limits::{MESSAGE_OVERHEAD_BYTES, SPARE_ENTRIES_MAX},
    persist::Tape,
};

/// A message for one client. QoS and retain flag of the message are those to send it with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Queued {
    pub(crate) message: Message,
    pub(crate) subscription_ids: Box<[u32]>,
    pub(crate) scope: Scope,
    /// The client was chosen among others.
    pub(crate) shared: Option<Box<Shared>>,
}

/// What another session of a group needs of a message that one of them had and will not get.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shared {
    /// The group: the filter of its subscription, with `$share/NAME/`.
    pub(crate) filter: Bytes,
    /// As published.
    pub(crate) qos: QoS,
    /// As published.
    pub(crate) retain: bool,
}

/// A message as published, and the group that one session is to have it of.
#[derive(Debug)]
pub(crate) struct Orphan {
    pub(crate) filter: Bytes,
    pub(crate) message: Message,
}

/// How long a message waits to be sent, and when it is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// For the session: recorded at once.
    Session,
    /// For the session, an answer to the client itself: recorded where it cannot be sent at once. Else it stands before
    /// the acknowledgement of its request in the same output, and who did not get that asks again.
    Answer,
    /// For this connection only: dropped where it ends before the message was sent; recorded where it ends before the
    /// message was acknowledged.
    Connection,
}

impl Queued {
    /// Bytes that keeping it is counted with.
    pub(crate) fn cost_bytes(&self) -> usize {
        // A group may end before its messages do, which then are all that hold its filter.
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

/// A message with its place in the order of its session.
#[derive(Debug)]
struct Entry {
    /// Rises from message to message.
    number: u64,
    /// Whether the log knows it.
    recorded: bool,
    queued: Queued,
}

impl Entry {
    fn record(&mut self, tape: &mut Tape<'_>) {
        if tape.is_on() && !self.recorded && self.queued.message.qos != QoS::AtMostOnce {
            tape.message(self.number, &self.queued);
            self.recorded = true;
        }
    }
}

/// A QoS 1 or 2 message that was sent.
#[derive(Debug)]
pub(crate) struct InFlight {
    /// Its place in the order of its session, also that of a repetition.
    number: u64,
    recorded: bool,
    /// The connection it was last sent over.
    pub(crate) connection: u64,
    /// None once a PUBREC came: only PUBREL is repeated then.
    pub(crate) queued: Option<Queued>,
}

/// A message as recovery found it.
#[derive(Debug)]
pub(crate) struct Restored {
    pub(crate) number: u64,
    /// The identifier that it was sent under.
    pub(crate) packet_id: Option<u16>,
    /// None once a PUBREC came.
    pub(crate) queued: Option<Queued>,
}

impl Restored {
    /// The identifier that it was sent under at QoS 2.
    pub(crate) fn exactly_once(&self) -> Option<u16> {
        let queued = self.queued.as_ref()?;
        self.packet_id
            .filter(|_| queued.message.qos == QoS::ExactlyOnce)
    }
}

/// A recorded message, for an image.
#[derive(Debug)]
pub(crate) struct Recorded<'a> {
    pub(crate) number: u64,
    pub(crate) packet_id: Option<u16>,
    pub(crate) queued: Option<&'a Queued>,
}

/// Queue and window of one session.
#[derive(Debug)]
pub(crate) struct Outbox {
    queue: VecDeque<Entry>,
    in_flight: FxHashMap<u16, InFlight>,
    bytes: Holding,
    last_packet_id: u16,
    last_number: u64,
    pushed: u64,
    popped: u64,
}

impl Outbox {
    /// An empty one.
    pub(crate) fn new(bytes: Holding) -> Self {
        Self {
            queue: VecDeque::new(),
            in_flight: FxHashMap::default(),
            bytes,
            last_packet_id: 0,
            last_number: 0,
            pushed: 0,
            popped: 0,
        }
    }

    /// Puts back a message that recovery found; they come in the order of their numbers. Nobody has acknowledged it over
    /// the connections of this run. An identifier that is taken cannot be (the log would be wrong), so the message is as
    /// good as unsent.
    pub(crate) fn restore(&mut self, restored: Restored) {
        let Restored {
            number,
            packet_id,
            queued,
        } = restored;
        self.last_number = self.last_number.max(number);
        let bytes = match (&queued, packet_id) {
            (Some(queued), _) => queued.cost_bytes(),
            (None, Some(_)) => MESSAGE_OVERHEAD_BYTES,
            (None, None) => 0,
        };
        self.bytes.add(bytes);
        let free = packet_id.filter(|id| !self.in_flight.contains_key(id));
        match (free, queued) {
            (Some(packet_id), queued) => {
                self.last_packet_id = packet_id;
                self.in_flight.insert(
                    packet_id,
                    InFlight {
                        number,
                        recorded: true,
                        connection: 0,
                        queued,
                    },
                );
            }
            (None, Some(queued)) => {
                self.pushed += 1;
                self.queue.push_back(Entry {
                    number,
                    recorded: true,
                    queued,
                });
            }
            (None, None) => {}
        }
    }

    /// Recorded messages from a number on, in order.
    pub(crate) fn recorded_from(&self, number: u64) -> impl Iterator<Item = Recorded<'_>> {
        let mut sent: Vec<(u64, u16)> = self
            .in_flight
            .iter()
            .filter(|(_, entry)| entry.recorded && entry.number >= number)
            .map(|(id, entry)| (entry.number, *id))
            .collect();
        sent.sort_unstable();
        let from = self.queue.partition_point(|entry| entry.number < number);
        // What was sent was queued before everything that still is.
        let sent = sent.into_iter().map(|(number, packet_id)| Recorded {
            number,
            packet_id: Some(packet_id),
            queued: self
                .in_flight
                .get(&packet_id)
                .and_then(|entry| entry.queued.as_ref()),
        });
        let queued = self.queue.range(from..).filter(|entry| entry.recorded);
        sent.chain(queued.map(|entry| Recorded {
            number: entry.number,
            packet_id: None,
            queued: Some(&entry.queued),
        }))
    }

    /// Whether a message of that cost fits the bounds of the session, of all sessions, and of an owner that holds more than
    /// `floor`.
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

    /// What is queued and in flight, with overhead.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.amount()
    }

    /// It counts as this owner's from now on.
    pub(crate) fn transfer(&mut self, account: &Arc<Account>) {
        self.bytes.transfer(account);
    }

    /// The same of all sessions.
    pub(crate) fn total_bytes(&self) -> usize {
        self.bytes.total()
    }

    pub(crate) fn push(&mut self, queued: Queued, tape: &mut Tape<'_>) {
        self.bytes.add(queued.cost_bytes());
        self.pushed += 1;
        self.last_number += 1;
        let mut entry = Entry {
            number: self.last_number,
            recorded: false,
            queued,
        };
        if entry.queued.scope == Scope::Session {
            entry.record(tape);
        }
        self.queue.push_back(entry);
    }

    /// Records an answer that was pushed last and could not be sent at once.
    pub(crate) fn record_waiting_answer(&mut self, tape: &mut Tape<'_>) {
        let last = self.queue.back_mut();
        if let Some(entry) = last.filter(|entry| entry.queued.scope == Scope::Answer) {
            entry.record(tape);
        }
    }

    pub(crate) fn front(&self) -> Option<&Queued> {
        self.queue.front().map(|entry| &entry.queued)
    }

    /// Drops the front of the queue: it was sent at QoS 0, has expired, or is too large for the client.
    pub(crate) fn pop(&mut self, tape: &mut Tape<'_>) {
        if let Some(entry) = self.queue.pop_front() {
            self.popped += 1;
            self.bytes.subtract(entry.queued.cost_bytes());
            gone(entry.number, entry.recorded, tape);
            self.trim();
        }
    }

    /// The identifier that the next message will be sent with; none where all 65 535 are in flight.
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

    /// Moves the front of the queue into the window. What goes out at QoS 2 is recorded, since the client remembers its
    /// identifier.
    pub(crate) fn sent(&mut self, packet_id: u16, connection: u64, tape: &mut Tape<'_>) {
        if let Some(mut entry) = self.queue.pop_front() {
            self.popped += 1;
            self.last_packet_id = packet_id;
            if entry.queued.message.qos == QoS::ExactlyOnce {
                entry.record(tape);
            }
            let Entry {
                number,
                recorded,
                queued,
            } = entry;
            if recorded {
                tape.write(Part::Sent { number, packet_id });
            }
            self.in_flight.insert(
                packet_id,
                InFlight {
                    number,
                    recorded,
                    connection,
                    queued: Some(queued),
                },
            );
            self.trim();
        }
    }

    pub(crate) fn in_flight(&mut self, packet_id: u16) -> Option<&mut InFlight> {
        self.in_flight.get_mut(&packet_id)
    }

    /// The exchange is over.
    pub(crate) fn complete(&mut self, packet_id: u16, tape: &mut Tape<'_>) -> Option<InFlight> {
        let entry = self.in_flight.remove(&packet_id)?;
        let bytes = entry.queued.as_ref().map(Queued::cost_bytes);
        self.bytes.subtract(bytes.unwrap_or(MESSAGE_OVERHEAD_BYTES));
        gone(entry.number, entry.recorded, tape);
        self.trim();
        Some(entry)
    }

    /// Gives room back that a burst has left.
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

    /// A PUBREC came: the message is not needed any more, its identifier is. Its place costs the same until a PUBCOMP comes.
    pub(crate) fn release(&mut self, packet_id: u16, tape: &mut Tape<'_>) {
        let Some(entry) = self.in_flight.get_mut(&packet_id) else {
            return;
        };
        if let Some(queued) = entry.queued.take() {
            if entry.recorded {
                let number = entry.number;
                tape.write(Part::Released { number, packet_id });
            }
            self.bytes
                .subtract(queued.cost_bytes() - MESSAGE_OVERHEAD_BYTES);
        }
    }

    /// The connection has ended: what was sent over it and is not acknowledged will be repeated, so it is recorded.
    pub(crate) fn record_in_flight(&mut self, tape: &mut Tape<'_>) {
        if !tape.is_on() {
            return;
        }
        let unknown = self
            .in_flight
            .iter_mut()
            .filter(|(_, entry)| !entry.recorded);
        for (packet_id, entry) in unknown {
            if let Some(queued) = &entry.queued {
                let (number, packet_id) = (entry.number, *packet_id);
                tape.message(number, queued);
                tape.write(Part::Sent { number, packet_id });
                entry.recorded = true;
            }
        }
    }

    /// The identifiers in flight in the order of their messages.
    pub(crate) fn in_order(&self) -> VecDeque<u16> {
        let mut ids: Vec<(u64, u16)> = self
            .in_flight
            .iter()
            .map(|(id, entry)| (entry.number, *id))
            .collect();
        ids.sort_unstable();
        ids.into_iter().map(|(_, id)| id).collect()
    }

    /// The connection has ended: what was for it only is dropped. Returns how many.
    pub(crate) fn drop_transient(&mut self, tape: &mut Tape<'_>) -> usize {
        self.drop_queued(tape, |queued| queued.scope == Scope::Connection)
    }

    /// Drops queued messages that nobody will be sent any more. Returns how many.
    pub(crate) fn drop_expired(&mut self, now: Instant, tape: &mut Tape<'_>) -> usize {
        self.drop_queued(tape, |queued| queued.message.is_expired(now))
    }

    /// Drops queued messages to topics that the client may not hear of any more. Returns how many, and those that another
    /// session may have.
    pub(crate) fn drop_forbidden(
        &mut self,
        allowed: impl Fn(&[u8]) -> bool,
        tape: &mut Tape<'_>,
    ) -> (usize, Vec<Orphan>) {
        let mut orphans = Vec::new();
        let dropped = self.drop_queued(tape, |queued| {
            let goes = !allowed(&queued.message.topic);
            orphans.extend(queued.orphan().filter(|_| goes));
            goes
        });
        (dropped, orphans)
    }

    /// The session is no more. In order, what another one of a group should have instead (section 4.8.2): what was not
    /// sent, and what was sent at QoS 1 and not acknowledged. What was sent at QoS 2 may not go to anybody else
    /// [MQTT-4.8.2-5].
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

    fn drop_queued(&mut self, tape: &mut Tape<'_>, mut goes: impl FnMut(&Queued) -> bool) -> usize {
        let before = self.queue.len();
        let mut freed = 0;
        self.queue.retain(|entry| {
            let goes = goes(&entry.queued);
            if goes {
                freed += entry.queued.cost_bytes();
                gone(entry.number, entry.recorded, tape);
            }
            !goes
        });
        self.bytes.subtract(freed);
        self.popped = self.pushed - self.queue.len() as u64;
        self.trim();
        before - self.queue.len()
    }

    /// How many messages were ever queued, and how many of these have left the queue.
    pub(crate) fn progress(&self) -> (u64, u64) {
        (self.pushed, self.popped)
    }

    /// Whether the message at the front waits for acknowledgements of earlier ones.
    pub(crate) fn front_needs_window(&self) -> bool {
        self.queue
            .front()
            .is_some_and(|entry| entry.queued.message.qos != QoS::AtMostOnce)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.in_flight.is_empty()
    }

    pub(crate) fn is_queue_empty(&self) -> bool {
        self.queue.is_empty()
    }
}

fn gone(number: u64, recorded: bool, tape: &mut Tape<'_>) {
    if recorded {
        tape.write(Part::Gone { number });
    }
}
