//! Received messages that are acknowledged by hand, in the order of their receipt (MQTT 5 [MQTT-4.6.0-2]).
//!
//! Enters: packet ids, what each led to, and which ones are settled. Leaves: the packet ids whose turn it is. Only the
//! connection that a message came over can acknowledge it, so its end forgets them all.

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
    settled: bool,
    /// Messages that it led to and that are under way.
    under_way: usize,
}

impl Receipts {
    /// Takes note of a message, and gives the number under which it is to be settled.
    pub(crate) fn add(&mut self, packet_id: u16) -> u64 {
        let receipt = Receipt {
            packet_id,
            settled: false,
            under_way: 0,
        };
        self.waiting.push_back(receipt);
        self.first + self.waiting.len() as u64 - 1
    }

    /// It led to one more message. Here as below a number of an earlier connection means nothing.
    pub(crate) fn led_to_one(&mut self, number: u64) {
        if let Some(receipt) = self.get(number) {
            receipt.under_way += 1;
        }
    }

    /// One of the messages that it led to is not under way any more.
    pub(crate) fn one_is_done(&mut self, number: u64) {
        if let Some(receipt) = self.get(number) {
            receipt.under_way = receipt.under_way.saturating_sub(1);
        }
    }

    /// Nothing more comes of it.
    pub(crate) fn settle(&mut self, number: u64) {
        if let Some(receipt) = self.get(number) {
            receipt.settled = true;
        }
    }

    /// The packet id to acknowledge next.
    pub(crate) fn due(&self) -> Option<u16> {
        let receipt = self.waiting.front()?;
        (receipt.settled && receipt.under_way == 0).then_some(receipt.packet_id)
    }

    /// The one that was due is acknowledged.
    pub(crate) fn acknowledged(&mut self) {
        if self.waiting.pop_front().is_some() {
            self.first += 1;
        }
    }

    /// The connection is lost.
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
        receipts.settle(numbers[1]);
        assert_eq!(receipts.due(), None, "the first is not settled");
        receipts.settle(numbers[0]);
        for packet_id in [11, 12] {
            assert_eq!(receipts.due(), Some(packet_id));
            receipts.acknowledged();
        }
        assert_eq!((receipts.due(), receipts.len()), (None, 1));
    }

    #[test]
    fn a_message_is_acknowledged_behind_what_it_led_to() {
        let mut receipts = Receipts::default();
        let number = receipts.add(11);
        receipts.led_to_one(number);
        receipts.led_to_one(number);
        receipts.one_is_done(number);
        receipts.settle(number);
        assert_eq!(receipts.due(), None);
        receipts.one_is_done(number);
        assert_eq!(receipts.due(), Some(11));
    }

    #[test]
    fn what_came_over_an_earlier_connection_is_not_acknowledged() {
        let mut receipts = Receipts::default();
        let old = receipts.add(11);
        receipts.led_to_one(old);
        receipts.lost();
        let new = receipts.add(11);
        receipts.settle(old);
        assert_eq!(receipts.due(), None);
        receipts.led_to_one(new);
        receipts.one_is_done(old);
        receipts.settle(new);
        assert_eq!(receipts.due(), None, "the message is the new one's");
        receipts.one_is_done(new);
        assert_eq!(receipts.due(), Some(11));
    }
}
