//! QoS 2 messages from one client between PUBLISH and PUBREL (section 4.3.3).
//!
//! The client decides when it sends PUBREL. So an answered message takes only a few bytes: its
//! packet id and its reason code.

use rustc_hash::FxHashMap;

use crate::{ReasonCode, limits::SPARE_ENTRIES_MAX, link::AckPosition};

/// The unfinished exchanges of a session.
#[derive(Debug, Default)]
pub(crate) struct Exchanges {
    /// Handed over, but not answered.
    pending: FxHashMap<u16, Pending>,
    answered: FxHashMap<u16, Answered>,
    /// The maximum number of both. Exchanges of earlier connections are stored, but do not count
    /// against the Receive Maximum.
    max: usize,
    /// How many of these are from an earlier run.
    restored: usize,
}

/// A message without an answer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pending {
    /// Identifies the PUBLISH that was handed over.
    publish: AckPosition,
    /// The place of the pending PUBREC. A repeated PUBLISH over a later connection changes it.
    pub(crate) pubrec: AckPosition,
}

#[derive(Debug, Clone, Copy)]
struct Answered {
    reason: ReasonCode,
    /// Whether the current connection counts it as waiting for PUBREL.
    counted: bool,
}

/// The state of a packet id.
pub(crate) enum Known<'a> {
    Nothing,
    Pending(&'a mut Pending),
    Answered(ReasonCode),
}

/// The size of one table slot, with its control byte and a share of the slots that stay free.
const fn slot_bytes<T>() -> usize {
    (size_of::<(u16, T)>() + 1) * 8 / 7 + 1
}

const PENDING_BYTES: usize = slot_bytes::<Pending>();
const ANSWERED_BYTES: usize = slot_bytes::<Answered>();

impl Exchanges {
    /// Restores recovered exchanges. Their number is bounded only by the packet ids: a message that
    /// is not restored would be handed over twice.
    pub(crate) fn restore(&mut self, found: impl IntoIterator<Item = (u16, ReasonCode)>) {
        let found = found.into_iter().map(|(packet_id, reason)| {
            let counted = false;
            (packet_id, Answered { reason, counted })
        });
        self.answered.extend(found);
        self.restored = self.answered.len();
    }

    /// Begins a connection. A client that lost a full window of exchanges gets room for another
    /// one. That is in addition to exchanges of an earlier run, and applies even if its Receive
    /// Maximum is smaller now.
    pub(crate) fn connect(&mut self, receive_max: usize) {
        self.max = self.max.max(self.restored + 2 * receive_max);
        for entry in self.answered.values_mut() {
            entry.counted = false;
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pending.is_empty() && self.answered.is_empty()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.pending.len() + self.answered.len() >= self.max
    }

    pub(crate) fn get(&mut self, packet_id: u16) -> Known<'_> {
        if let Some(entry) = self.answered.get(&packet_id) {
            return Known::Answered(entry.reason);
        }
        match self.pending.get_mut(&packet_id) {
            Some(entry) => Known::Pending(entry),
            None => Known::Nothing,
        }
    }

    /// Begins an exchange for a PUBLISH with a new packet id.
    pub(crate) fn begin(&mut self, packet_id: u16, publish: AckPosition) {
        let pubrec = publish;
        self.pending.insert(packet_id, Pending { publish, pubrec });
    }

    /// Sets the answer. Returns the pending PUBREC; none if no such request is pending. A failure
    /// frees the packet id (section 4.3.3).
    pub(crate) fn answer(
        &mut self,
        packet_id: u16,
        publish: AckPosition,
        reason: ReasonCode,
    ) -> Option<AckPosition> {
        let pubrec = self
            .pending
            .get(&packet_id)
            .filter(|it| it.publish == publish)?
            .pubrec;
        self.pending.remove(&packet_id);
        trim(&mut self.pending);
        if !reason.is_error() {
            let counted = false;
            self.answered
                .insert(packet_id, Answered { reason, counted });
        }
        Some(pubrec)
    }

    /// Reports that the PUBREC is sent. Returns true if the connection starts to wait
    /// for its PUBREL.
    pub(crate) fn pubrec_sent(&mut self, packet_id: u16) -> bool {
        let entry = self.answered.get_mut(&packet_id);
        entry.is_some_and(|entry| !std::mem::replace(&mut entry.counted, true))
    }

    /// Ends an exchange after its PUBREL. Returns none if no answered message has that packet id,
    /// else whether the connection waited for it.
    pub(crate) fn release(&mut self, packet_id: u16) -> Option<bool> {
        let entry = self.answered.remove(&packet_id)?;
        trim(&mut self.answered);
        Some(entry.counted)
    }

    pub(crate) fn answered(&self) -> impl Iterator<Item = (u16, ReasonCode)> {
        self.answered.iter().map(|(id, entry)| (*id, entry.reason))
    }

    /// The memory of the tables.
    pub(crate) fn cost_bytes(&self) -> usize {
        self.pending.capacity() * PENDING_BYTES + self.answered.capacity() * ANSWERED_BYTES
    }

    /// The upper bound of the additional memory for one more exchange.
    pub(crate) fn growth_bytes(&self) -> usize {
        let (pending, answered) = (self.pending.capacity(), self.answered.capacity());
        let mut bytes = 0;
        if self.pending.len() == pending {
            bytes += (pending + 4) * PENDING_BYTES;
        }
        if self.pending.len() + self.answered.len() >= answered {
            bytes += (answered + 4) * ANSWERED_BYTES;
        }
        bytes
    }
}

/// Frees memory that remains after a burst.
fn trim<T>(table: &mut FxHashMap<u16, T>) {
    if table.capacity() > SPARE_ENTRIES_MAX && table.len() < table.capacity() / 8 {
        table.shrink_to(2 * table.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use statehouse_protocol::ConnectionId;

    fn position(sequence: u16) -> AckPosition {
        AckPosition {
            connection: ConnectionId(1),
            sequence: sequence.into(),
        }
    }

    #[test]
    fn answered_exchange_takes_a_few_bytes() {
        let mut exchanges = Exchanges::default();
        exchanges.connect(1024);
        for id in 0..1024 {
            exchanges.begin(id, position(id));
            let pubrec = exchanges.answer(id, position(id), ReasonCode::SUCCESS);
            assert!(pubrec.is_some());
        }
        let cost = exchanges.cost_bytes();
        assert!((4 * 1024..16 * 1024).contains(&cost), "{cost}");
        for id in 1..1024 {
            assert_eq!(exchanges.release(id), Some(false));
        }
        assert!(exchanges.cost_bytes() < 1024, "memory is freed");
        assert!(matches!(exchanges.get(0), Known::Answered(_)));
    }

    #[test]
    fn predicted_growth_bounds_the_next_exchange() {
        let mut exchanges = Exchanges::default();
        for id in 0..5000 {
            let predicted = exchanges.cost_bytes() + exchanges.growth_bytes();
            exchanges.begin(id, position(0));
            if id % 3 > 0 {
                exchanges.answer(id, position(0), ReasonCode::SUCCESS);
            }
            let cost = exchanges.cost_bytes();
            assert!(cost <= predicted, "{id}: {cost} of {predicted}");
        }
    }
}
