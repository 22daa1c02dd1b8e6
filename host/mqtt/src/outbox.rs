//! Messages of one session on their way to its client: queued, then in flight until acknowledged (sections 4.3, 4.6).
//!
//! Both parts are session state and counted in bytes together, in the session and over all sessions. Packet identifiers
//! are given in a circle, so that one is used again as late as possible. Never encodes and never decides when to send.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use crate::{Message, QoS};

/// A message for one client. QoS and retain flag of the message are those to send it with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Queued {
    pub(crate) message: Message,
    pub(crate) subscription_ids: Box<[u32]>,
    /// For this connection only: dropped where it ends before the message was sent.
    pub(crate) transient: bool,
}

impl Queued {
    /// Bytes that keeping it is counted with.
    pub(crate) fn cost_bytes(&self) -> usize {
        self.message.cost_bytes() + size_of_val(&*self.subscription_ids)
    }
}

/// A QoS 1 or 2 message that was sent.
#[derive(Debug)]
pub(crate) struct InFlight {
    /// Rises from message to message: the order of a repetition.
    order: u64,
    /// The connection it was last sent over.
    pub(crate) connection: u64,
    /// None once a PUBREC came: only PUBREL is repeated then.
    pub(crate) queued: Option<Queued>,
}

/// Queue and window of one session.
#[derive(Debug)]
pub(crate) struct Outbox {
    queue: VecDeque<Queued>,
    in_flight: HashMap<u16, InFlight>,
    bytes: usize,
    total_bytes: Arc<AtomicUsize>,
    last_packet_id: u16,
    pushed: u64,
    popped: u64,
}

impl Outbox {
    /// An empty one that counts into `total_bytes` too.
    pub(crate) fn new(total_bytes: Arc<AtomicUsize>) -> Self {
        Self {
            queue: VecDeque::new(),
            in_flight: HashMap::new(),
            bytes: 0,
            total_bytes,
            last_packet_id: 0,
            pushed: 0,
            popped: 0,
        }
    }

    /// Whether a message of that cost fits both bounds.
    pub(crate) fn has_room(
        &self,
        cost_bytes: usize,
        bytes_max: usize,
        total_bytes_max: usize,
    ) -> bool {
        self.bytes + cost_bytes <= bytes_max
            && self.total_bytes.load(Ordering::Relaxed) + cost_bytes <= total_bytes_max
    }

    /// What is queued and in flight, with overhead.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn push(&mut self, queued: Queued) {
        self.count(queued.cost_bytes());
        self.pushed += 1;
        self.queue.push_back(queued);
    }

    pub(crate) fn front(&self) -> Option<&Queued> {
        self.queue.front()
    }

    /// Drops the front of the queue: it was sent at QoS 0, has expired, or is too large for the client.
    pub(crate) fn pop(&mut self) {
        if let Some(queued) = self.queue.pop_front() {
            self.popped += 1;
            self.discount(&queued);
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

    /// Moves the front of the queue into the window.
    pub(crate) fn sent(&mut self, packet_id: u16, connection: u64) {
        if let Some(queued) = self.queue.pop_front() {
            self.popped += 1;
            self.last_packet_id = packet_id;
            self.in_flight.insert(
                packet_id,
                InFlight {
                    order: self.popped,
                    connection,
                    queued: Some(queued),
                },
            );
        }
    }

    pub(crate) fn in_flight(&mut self, packet_id: u16) -> Option<&mut InFlight> {
        self.in_flight.get_mut(&packet_id)
    }

    /// The exchange is over.
    pub(crate) fn complete(&mut self, packet_id: u16) -> Option<InFlight> {
        let entry = self.in_flight.remove(&packet_id)?;
        if let Some(queued) = &entry.queued {
            self.discount(queued);
        }
        Some(entry)
    }

    /// A PUBREC came: the message is not needed any more, its identifier is.
    pub(crate) fn release(&mut self, packet_id: u16) {
        if let Some(queued) = self
            .in_flight
            .get_mut(&packet_id)
            .and_then(|entry| entry.queued.take())
        {
            self.discount(&queued);
        }
    }

    /// The identifiers in flight in the order of their messages.
    pub(crate) fn in_order(&self) -> VecDeque<u16> {
        let mut ids: Vec<(u64, u16)> = self
            .in_flight
            .iter()
            .map(|(id, entry)| (entry.order, *id))
            .collect();
        ids.sort_unstable();
        ids.into_iter().map(|(_, id)| id).collect()
    }

    /// The connection has ended: what was for it only is dropped. Returns how many.
    pub(crate) fn drop_transient(&mut self) -> usize {
        self.drop_queued(|queued| queued.transient)
    }

    /// Drops queued messages that nobody will be sent any more. Returns how many.
    pub(crate) fn drop_expired(&mut self, now: Instant) -> usize {
        self.drop_queued(|queued| queued.message.is_expired(now))
    }

    fn drop_queued(&mut self, goes: impl Fn(&Queued) -> bool) -> usize {
        let before = self.queue.len();
        let mut freed = 0;
        self.queue.retain(|queued| {
            let goes = goes(queued);
            freed += if goes { queued.cost_bytes() } else { 0 };
            !goes
        });
        self.bytes -= freed;
        self.total_bytes.fetch_sub(freed, Ordering::Relaxed);
        self.popped = self.pushed - self.queue.len() as u64;
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
            .is_some_and(|queued| queued.message.qos != QoS::AtMostOnce)
    }

    pub(crate) fn is_queue_empty(&self) -> bool {
        self.queue.is_empty()
    }

    fn count(&mut self, bytes: usize) {
        self.bytes += bytes;
        self.total_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn discount(&mut self, queued: &Queued) {
        let bytes = queued.cost_bytes();
        self.bytes -= bytes;
        self.total_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        self.total_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
