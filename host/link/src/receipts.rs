//! Receipts of incoming messages that are acknowledged by hand, in the order of receipt (MQTT 5
//! [MQTT-4.6.0-2]).
//!
//! A message can be acknowledged only over the connection that delivered it, so the end of the
//! connection removes all receipts.

use std::collections::VecDeque;

#[derive(Debug, Default)]
pub(crate) struct Receipts {
    /// The number of the first receipt, or of the next one if there is none.
    first: u64,
    waiting: VecDeque<Receipt>,
}

#[derive(Debug)]
struct Receipt {
    packet_id: u16,
    completed: bool,
    /// The number of stored messages that it caused.
    dependents: usize,
}

impl Receipts {
    pub(crate) fn add(&mut self, packet_id: u16) -> u64 {
        let receipt = Receipt {
            packet_id,
            completed: false,
            dependents: 0,
        };
        self.waiting.push_back(receipt);
        self.first + self.waiting.len() as u64 - 1
    }

    /// Adds a message that it caused. This method and the following ones ignore numbers of earlier
    /// connections.
    pub(crate) fn add_dependent(&mut self, number: u64) {
        if let Some(receipt) = self.get(number) {
            receipt.dependents += 1;
        }
    }

    /// A message that it caused was removed.
    pub(crate) fn remove_dependent(&mut self, number: u64) {
        if let Some(receipt) = self.get(number) {
            receipt.dependents = receipt.dependents.saturating_sub(1);
        }
    }

    /// Marks the message as completed: it causes no further messages.
    pub(crate) fn complete(&mut self, number: u64) {
        if let Some(receipt) = self.get(number) {
            receipt.completed = true;
        }
    }

    /// The packet id to acknowledge next.
    pub(crate) fn due(&self) -> Option<u16> {
        let receipt = self.waiting.front()?;
        (receipt.completed && receipt.dependents == 0).then_some(receipt.packet_id)
    }

    /// The packet id that was due is acknowledged.
    pub(crate) fn acknowledged(&mut self) {
        if self.waiting.pop_front().is_some() {
            self.first += 1;
        }
    }

    pub(crate) fn lost(&mut self) {
        self.first += self.waiting.len() as u64;
        self.waiting.clear();
    }

    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    fn get(&mut self, number: u64) -> Option<&mut Receipt> {
        let place = usize::try_from(number.checked_sub(self.first)?).ok()?;
        self.waiting.get_mut(place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acknowledgements_keep_the_order_of_receipt() {
        let mut receipts = Receipts::default();
        let numbers = [11, 12, 13].map(|packet_id| receipts.add(packet_id));
        receipts.complete(numbers[1]);
        assert_eq!(receipts.due(), None, "the first is not completed");
        receipts.complete(numbers[0]);
        for packet_id in [11, 12] {
            assert_eq!(receipts.due(), Some(packet_id));
            receipts.acknowledged();
        }
        assert_eq!((receipts.due(), receipts.len()), (None, 1));
    }

    #[test]
    fn message_is_acknowledged_after_its_dependents() {
        let mut receipts = Receipts::default();
        let number = receipts.add(11);
        receipts.add_dependent(number);
        receipts.add_dependent(number);
        receipts.remove_dependent(number);
        receipts.complete(number);
        assert_eq!(receipts.due(), None);
        receipts.remove_dependent(number);
        assert_eq!(receipts.due(), Some(11));
    }

    #[test]
    fn receipt_of_an_earlier_connection_is_ignored() {
        let mut receipts = Receipts::default();
        let old = receipts.add(11);
        receipts.add_dependent(old);
        receipts.lost();
        let new = receipts.add(11);
        receipts.complete(old);
        assert_eq!(receipts.due(), None);
        receipts.add_dependent(new);
        receipts.remove_dependent(old);
        receipts.complete(new);
        assert_eq!(receipts.due(), None, "the message is the new one's");
        receipts.remove_dependent(new);
        assert_eq!(receipts.due(), Some(11));
    }
}
