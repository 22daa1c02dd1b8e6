//! Received messages that are acknowledged by hand, in the order of their receipt (MQTT 5 [MQTT-4.6.0-2]).
//!
//! Enters: packet ids, and which ones are settled. Leaves: the packet ids whose turn it is. Only the connection that a
//! message came over can acknowledge it, so its end forgets them all.

use std::collections::VecDeque;

/// What is not acknowledged.
#[derive(Debug, Default)]
pub(crate) struct Receipts {
    /// The number of the first that is here, or of the next where none is.
    first: u64,
    waiting: VecDeque<Receipt>,
}

#[derive(Debug)]
struct Receipt {
    packet_id: u16,
    /// Settled, once no message up to this number is in the ledger any more.
    behind: Option<u64>,
}

impl Receipts {
    /// Takes note of a message, and gives the number under which it is to be settled.
    pub(crate) fn add(&mut self, packet_id: u16) -> u64 {
        let receipt = Receipt {
            packet_id,
            behind: None,
        };
        self.waiting.push_back(receipt);
        self.first + self.waiting.len() as u64 - 1
    }

    /// The message may be acknowledged once no message up to `behind` is in the ledger. A number of an earlier connection
    /// means nothing.
    pub(crate) fn settle(&mut self, number: u64, behind: u64) {
        let place = number.checked_sub(self.first);
        let place = place.and_then(|it| usize::try_from(it).ok());
        if let Some(receipt) = place.and_then(|it| self.waiting.get_mut(it)) {
            receipt.behind.get_or_insert(behind);
        }
    }

    /// The packet id to acknowledge next, where messages from `oldest` on are still in the ledger.
    pub(crate) fn due(&self, oldest: Option<u64>) -> Option<u16> {
        let receipt = self.waiting.front()?;
        let behind = receipt.behind?;
        let gone = oldest.is_none_or(|oldest| behind < oldest);
        gone.then_some(receipt.packet_id)
    }

    /// The one that was due is acknowledged.
    pub(crate) fn acknowledged(&mut self) {
        if self.waiting.pop_front().is_some() {
            self.first += 1;
        }
    }

    /// The connection is lost: whoever settles one of them later means nothing any more.
    pub(crate) fn lost(&mut self) {
        self.first += self.waiting.len() as u64;
        self.waiting.clear();
    }

    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acknowledgements_keep_the_order_of_receipt() {
        let mut receipts = Receipts::default();
        let numbers = [11, 12, 13].map(|packet_id| receipts.add(packet_id));
        receipts.settle(numbers[1], 0);
        assert_eq!(receipts.due(None), None, "the first is not settled");
        receipts.settle(numbers[0], 0);
        for packet_id in [11, 12] {
            assert_eq!(receipts.due(None), Some(packet_id));
            receipts.acknowledged();
        }
        assert_eq!((receipts.due(None), receipts.len()), (None, 1));
    }

    #[test]
    fn a_message_is_acknowledged_behind_what_it_led_to() {
        let mut receipts = Receipts::default();
        let number = receipts.add(11);
        receipts.settle(number, 7);
        assert_eq!(receipts.due(Some(7)), None);
        assert_eq!(receipts.due(Some(8)), Some(11));
        // The first word counts: later messages of others do not hold it up.
        receipts.settle(number, 9);
        assert_eq!(receipts.due(Some(8)), Some(11));
    }

    #[test]
    fn what_came_over_an_earlier_connection_is_not_acknowledged() {
        let mut receipts = Receipts::default();
        let old = receipts.add(11);
        receipts.lost();
        let new = receipts.add(11);
        receipts.settle(old, 0);
        assert_eq!(receipts.due(None), None);
        receipts.settle(new, 0);
        assert_eq!(receipts.due(None), Some(11));
    }
}
