//! QoS 2 messages of one client between its PUBLISH and its PUBREL (section 4.3.3).
//!
//! A client decides when it sends its PUBREL, so a message that was answered is kept in a few bytes: its packet id and its
//! answer.

use rustc_hash::FxHashMap;

use crate::{ReasonCode, limits::SPARE_ENTRIES_MAX};

/// The unfinished exchanges of a session.
#[derive(Debug, Default)]
pub(crate) struct Exchanges {
    /// Handed over, and not answered yet.
    pending: FxHashMap<u16, Pending>,
    answered: FxHashMap<u16, Answered>,
    /// Most of both. Exchanges of earlier connections do not count against the Receive Maximum, but they are kept.
    max: usize,
    /// How many of these an earlier run left.
    restored: usize,
}

/// A message that has no answer yet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pending {
    /// Connection and sequence of the PUBLISH that was handed over.
    asked: (u64, u64),
    /// Connection and sequence of the pending PUBREC, which a repetition over a later connection
    /// moves.
    pub(crate) owed: (u64, u64),
}

#[derive(Debug, Clone, Copy)]
struct Answered {
    reason: ReasonCode,
    /// Whether the current connection counts it among those whose PUBREL has not come.
    counted: bool,
}

/// What is known of a packet id.
pub(crate) enum Known<'a> {
    Nothing,
    Pending(&'a mut Pending),
    Answered(ReasonCode),
}

/// A slot of a table, with its control byte and the slots that stay free.
const fn slot_bytes<T>() -> usize {
    (size_of::<(u16, T)>() + 1) * 8 / 7 + 1
}

const PENDING_BYTES: usize = slot_bytes::<Pending>();
const ANSWERED_BYTES: usize = slot_bytes::<Answered>();

impl Exchanges {
    /// What recovery found. There is no bound but that of the packet ids: one that is forgotten would be handed over twice.
    pub(crate) fn restore(&mut self, found: impl IntoIterator<Item = (u16, ReasonCode)>) {
        let found = found.into_iter().map(|(packet_id, reason)| {
            let counted = false;
            (packet_id, Answered { reason, counted })
        });
        self.answered.extend(found);
        self.restored = self.answered.len();
    }

    /// A connection begins. A client that forgot a full window of exchanges has room for another
    /// one, in addition to what an earlier run left, also if its Receive Maximum is smaller by now.
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

    /// A PUBLISH that was not seen before.
    pub(crate) fn begin(&mut self, packet_id: u16, asked: (u64, u64)) {
        self.pending
            .insert(packet_id, Pending { asked, owed: asked });
    }

    /// Its answer is known. Returns the pending PUBREC; none if it waits for no answer. A failure
    /// frees the packet id (section 4.3.3).
    pub(crate) fn answer(
        &mut self,
        packet_id: u16,
        asked: (u64, u64),
        reason: ReasonCode,
    ) -> Option<(u64, u64)> {
        let owed = self
            .pending
            .get(&packet_id)
            .filter(|it| it.asked == asked)?
            .owed;
        self.pending.remove(&packet_id);
        trim(&mut self.pending);
        if !reason.is_error() {
            let counted = false;
            self.answered
                .insert(packet_id, Answered { reason, counted });
        }
        Some(owed)
    }

    /// Its PUBREC leaves. True: from now on the connection waits for its PUBREL.
    pub(crate) fn leaves(&mut self, packet_id: u16) -> bool {
        let entry = self.answered.get_mut(&packet_id);
        entry.is_some_and(|entry| !std::mem::replace(&mut entry.counted, true))
    }

    /// Its PUBREL came. None if no answered message has that packet id, else whether the connection waited for it.
    pub(crate) fn release(&mut self, packet_id: u16) -> Option<bool> {
        let entry = self.answered.remove(&packet_id)?;
        trim(&mut self.answered);
        Some(entry.counted)
    }

    /// Those that have their answer.
    pub(crate) fn answered(&self) -> impl Iterator<Item = (u16, ReasonCode)> {
        self.answered.iter().map(|(id, entry)| (*id, entry.reason))
    }

    /// What the tables take.
    pub(crate) fn cost_bytes(&self) -> usize {
        self.pending.capacity() * PENDING_BYTES + self.answered.capacity() * ANSWERED_BYTES
    }

    /// What they take more once there is one exchange more.
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

/// Gives room back that a burst has left.
fn trim<T>(table: &mut FxHashMap<u16, T>) {
    if table.capacity() > SPARE_ENTRIES_MAX && table.len() < table.capacity() / 8 {
        table.shrink_to(2 * table.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answered_exchange_costs_a_few_bytes() {
        let mut exchanges = Exchanges::default();
        exchanges.connect(1024);
        for id in 0..1024 {
            exchanges.begin(id, (1, id.into()));
            assert!(
                exchanges
                    .answer(id, (1, id.into()), ReasonCode::SUCCESS)
                    .is_some()
            );
        }
        let cost = exchanges.cost_bytes();
        assert!((4 * 1024..16 * 1024).contains(&cost), "{cost}");
        for id in 1..1024 {
            assert_eq!(exchanges.release(id), Some(false));
        }
        assert!(exchanges.cost_bytes() < 1024, "room is given back");
        assert!(matches!(exchanges.get(0), Known::Answered(_)));
    }

    #[test]
    fn growth_is_predicted_before_it_happens() {
        let mut exchanges = Exchanges::default();
        for id in 0..5000 {
            let promised = exchanges.cost_bytes() + exchanges.growth_bytes();
            exchanges.begin(id, (1, 0));
            if id % 3 > 0 {
                exchanges.answer(id, (1, 0), ReasonCode::SUCCESS);
            }
            let cost = exchanges.cost_bytes();
            assert!(cost <= promised, "{id}: {cost} of {promised}");
        }
    }
}
