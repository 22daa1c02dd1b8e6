//! The messages under way. Enters: new messages, and what became of them in rumqttc. Leaves: which ones to send, and
//! the one that a packet id belongs to. It knows no socket and no clock.
//!
//! rumqttc loses what it holds when a reconnect finds no session, and does not say which packet belongs to which call. So
//! every message stays here until its owner takes it out, and its packet id is learned from the order: rumqttc sends in
//! the order it was given.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::limits;
use crate::loss::Blame;

/// All messages, numbered in the order they were made.
#[derive(Debug)]
pub(crate) struct Ledger<T> {
    last_number: u64,
    messages: BTreeMap<u64, T>,
    /// Sent over an earlier connection of the session, each with the packet id that it must have again, or 0: any. They
    /// go before all others, in order.
    again: VecDeque<(u64, u16)>,
    /// Not given to rumqttc, in order.
    unsent: VecDeque<u64>,
    /// Given to rumqttc, which has not said the packet id yet, in order, and whether it was sent before.
    queued: VecDeque<(u64, bool)>,
    /// Sent and not acknowledged.
    packet_ids: HashMap<u16, u64>,
    /// How many connections ended, in a way that a message can bring about, while each of these was in flight.
    blamed: HashMap<u64, u8>,
    /// Whether the broker has answered the SUBSCRIBE of this connection.
    subscribed: bool,
}

impl<T> Default for Ledger<T> {
    fn default() -> Self {
        Self {
            last_number: 0,
            messages: BTreeMap::new(),
            again: VecDeque::new(),
            unsent: VecDeque::new(),
            queued: VecDeque::new(),
            packet_ids: HashMap::new(),
            blamed: HashMap::new(),
            subscribed: false,
        }
    }
}

impl<T> Ledger<T> {
    /// Takes a message, which may be made of its number. It is to be sent.
    pub(crate) fn add(&mut self, message: impl FnOnce(u64) -> T) -> u64 {
        let number = self.number();
        self.messages.insert(number, message(number));
        self.unsent.push_back(number);
        number
    }

    /// A number for a message that is not kept.
    pub(crate) fn number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// One that is here.
    pub(crate) fn get(&self, number: u64) -> Option<&T> {
        self.messages.get(&number)
    }

    /// The same, to change it.
    pub(crate) fn get_mut(&mut self, number: u64) -> Option<&mut T> {
        self.messages.get_mut(&number)
    }

    /// All that are here, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        self.messages.iter().map(|(number, it)| (*number, it))
    }

    /// How many are here.
    pub(crate) fn len(&self) -> usize {
        self.messages.len()
    }

    /// Whether none is.
    pub(crate) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Takes a message out: nobody needs it any more. Where it is on its way nothing holds it back, but it is not sent
    /// again.
    pub(crate) fn remove(&mut self, number: u64) -> Option<T> {
        self.blamed.remove(&number);
        self.messages.remove(&number)
    }

    /// Puts another message in the place of one that was taken out.
    pub(crate) fn put_back(&mut self, number: u64, message: T) {
        self.messages.insert(number, message);
    }

    /// Takes out everything, for the end.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = T> {
        self.again.clear();
        self.unsent.clear();
        self.queued.clear();
        self.packet_ids.clear();
        self.blamed.clear();
        std::mem::take(&mut self.messages).into_values()
    }

    /// How many rumqttc has that are not acknowledged.
    pub(crate) fn in_flight(&self) -> usize {
        self.queued.len() + self.packet_ids.len()
    }

    /// The next message to give to rumqttc a first time.
    pub(crate) fn next_unsent(&mut self) -> Option<u64> {
        if self.first_again().is_some() {
            return None;
        }
        while let Some(number) = self.unsent.front()
            && !self.messages.contains_key(number)
        {
            self.unsent.pop_front();
        }
        self.unsent.front().copied().filter(|it| self.may_go(*it))
    }

    /// The next message to give to rumqttc again, and the packet id that it must have.
    pub(crate) fn next_again(&mut self) -> Option<(u64, u16)> {
        self.first_again()
            .filter(|(number, _)| self.may_go(*number))
    }

    fn first_again(&mut self) -> Option<(u64, u16)> {
        while let Some((number, _)) = self.again.front()
            && !self.messages.contains_key(number)
        {
            self.again.pop_front();
        }
        self.again.front().copied()
    }

    /// A suspect goes when nothing else is under way, the SUBSCRIBE neither, and nothing goes beside it: if the broker
    /// closes the connection then, it is because of this one.
    fn may_go(&self, number: u64) -> bool {
        if self.is_suspect(number) {
            return self.subscribed && self.in_flight() == 0;
        }
        self.suspect_in_flight().is_none()
    }

    fn is_suspect(&self, number: u64) -> bool {
        let blamed = self.blamed.get(&number);
        blamed.is_some_and(|times| *times >= limits::SUSPECT_AFTER)
    }

    /// The suspect that was sent, and nothing else was.
    fn suspect_in_flight(&self) -> Option<u64> {
        if self.blamed.is_empty() || self.in_flight() != 1 {
            return None;
        }
        let queued = self.queued.iter().map(|(number, _)| *number);
        let mut all = queued.chain(self.packet_ids.values().copied());
        all.find(|number| self.is_suspect(*number))
    }

    /// The broker has answered the SUBSCRIBE of this connection.
    pub(crate) fn subscribed(&mut self) {
        self.subscribed = true;
    }

    /// rumqttc has taken `number` a first time.
    pub(crate) fn queued(&mut self, number: u64) {
        if self.unsent.front() == Some(&number) {
            self.unsent.pop_front();
        }
        self.queued.push_back((number, false));
    }

    /// rumqttc has taken again what [`Self::next_again`] named.
    pub(crate) fn queued_again(&mut self) {
        match self.again.pop_front() {
            Some((number, 0)) => self.queued.push_back((number, true)),
            Some((number, packet_id)) => _ = self.packet_ids.insert(packet_id, number),
            None => {}
        }
    }

    /// rumqttc has sent a PUBLISH with this packet id: a first time, or again.
    pub(crate) fn sent(&mut self, packet_id: u16) {
        if self.packet_ids.contains_key(&packet_id) {
            return;
        }
        if let Some((number, _)) = self.queued.pop_front() {
            self.packet_ids.insert(packet_id, number);
        }
    }

    /// The PUBLISH with this packet id was acknowledged: it will not be sent again.
    pub(crate) fn acknowledged(&mut self, packet_id: u16) -> Option<u64> {
        let number = self.packet_ids.remove(&packet_id)?;
        self.blamed.remove(&number);
        Some(number)
    }

    /// The connection is lost. What rumqttc never sent is unsent again; what it sent is to be sent again, if it is still
    /// here. With `anew` packet ids mean nothing any more, although the broker may still know the session.
    ///
    /// A message that makes the broker close the connection would do so for ever: it is taken out, and given back.
    pub(crate) fn lost(&mut self, anew: bool, blame: Blame) -> Option<T> {
        self.subscribed = false;
        let hopeless = self.blame(blame).and_then(|number| self.remove(number));
        let mut again: Vec<(u64, u16)> = self.again.drain(..).collect();
        let sent = self.packet_ids.drain();
        again.extend(sent.map(|(packet_id, number)| (number, packet_id)));
        for (number, sent_before) in self.queued.drain(..).rev() {
            if sent_before {
                again.push((number, 0));
            } else {
                self.unsent.push_front(number);
            }
        }
        again.retain(|(number, _)| self.messages.contains_key(number));
        again.sort_unstable();
        if anew {
            again.iter_mut().for_each(|(_, packet_id)| *packet_id = 0);
        }
        self.again = again.into();
        hopeless
    }

    /// Notes that any message in flight may have ended the connection. Names the one that did.
    fn blame(&mut self, blame: Blame) -> Option<u64> {
        if blame == Blame::Nobody {
            return None;
        }
        let suspect = self.suspect_in_flight();
        for number in self.packet_ids.values() {
            if self.messages.contains_key(number) {
                let times = self.blamed.entry(*number).or_default();
                *times = times.saturating_add(1);
            }
        }
        suspect.filter(|number| {
            let times = self.blamed.get(number).copied().unwrap_or_default();
            blame == Blame::Message || times >= limits::GIVE_UP_AFTER
        })
    }

    /// The broker knows nothing of us: every message is unsent.
    pub(crate) fn new_session(&mut self) {
        self.again.clear();
        self.queued.clear();
        self.packet_ids.clear();
        self.unsent = self.messages.keys().copied().collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ledger(messages: usize) -> (Ledger<()>, Vec<u64>) {
        let mut ledger = Ledger::default();
        let numbers = (0..messages).map(|_| ledger.add(|_| ())).collect();
        (ledger, numbers)
    }

    /// Gives everything unsent to an imagined rumqttc.
    fn queue_all(ledger: &mut Ledger<()>) -> Vec<u64> {
        let mut numbers = Vec::new();
        while let Some(number) = ledger.next_unsent() {
            ledger.queued(number);
            numbers.push(number);
        }
        numbers
    }

    /// Gives it everything that is to be sent again.
    fn queue_again(ledger: &mut Ledger<()>) -> Vec<(u64, u16)> {
        let mut again = Vec::new();
        while let Some(next) = ledger.next_again() {
            ledger.queued_again();
            again.push(next);
        }
        again
    }

    #[test]
    fn packet_ids_follow_the_order() {
        let (mut ledger, numbers) = ledger(2);
        assert_eq!(queue_all(&mut ledger), numbers);
        assert_eq!(ledger.in_flight(), 2);
        ledger.sent(7);
        ledger.sent(8);
        assert_eq!(ledger.acknowledged(8), Some(numbers[1]));
        assert_eq!(ledger.acknowledged(7), Some(numbers[0]));
        assert_eq!(ledger.acknowledged(7), None);
        assert_eq!(ledger.in_flight(), 0);
    }

    #[test]
    fn a_resumed_session_keeps_packet_ids_and_sends_the_rest_afterwards() {
        let (mut ledger, numbers) = ledger(3);
        ledger.queued(numbers[0]);
        ledger.sent(1);
        ledger.queued(numbers[1]);
        ledger.lost(false, Blame::Nobody);
        assert_eq!(ledger.next_unsent(), None, "nothing overtakes");
        assert_eq!(queue_again(&mut ledger), [(numbers[0], 1)]);
        ledger.sent(1);
        assert_eq!(queue_all(&mut ledger), numbers[1..]);
        ledger.sent(2);
        assert_eq!(ledger.acknowledged(2), Some(numbers[1]));
        assert_eq!(ledger.acknowledged(1), Some(numbers[0]));
    }

    #[test]
    fn a_new_session_sends_everything_a_first_time() {
        let (mut ledger, numbers) = ledger(3);
        queue_all(&mut ledger);
        ledger.sent(1);
        ledger.sent(2);
        ledger.acknowledged(1);
        ledger.lost(false, Blame::Nobody);
        ledger.new_session();
        assert_eq!(ledger.next_again(), None);
        assert_eq!(queue_all(&mut ledger), numbers);
        assert_eq!(ledger.acknowledged(2), None);
    }

    #[test]
    fn what_nobody_needs_is_not_sent_again() {
        let (mut ledger, numbers) = ledger(3);
        ledger.queued(numbers[0]);
        ledger.queued(numbers[1]);
        ledger.sent(1);
        for number in numbers {
            ledger.remove(number);
        }
        ledger.lost(false, Blame::Nobody);
        assert_eq!(ledger.next_again(), None);
        assert_eq!(ledger.next_unsent(), None);
        assert_eq!((ledger.in_flight(), ledger.len()), (0, 0));
    }

    #[test]
    fn after_a_rebuild_those_in_flight_come_first_under_any_packet_id() {
        let (mut ledger, numbers) = ledger(3);
        ledger.queued(numbers[0]);
        ledger.queued(numbers[1]);
        ledger.sent(9);
        ledger.sent(3);
        ledger.lost(true, Blame::Nobody);
        let again = [(numbers[0], 0), (numbers[1], 0)];
        assert_eq!(queue_again(&mut ledger), again);
        // Lost again before it left: it was sent once, and the store must be able to tell.
        ledger.lost(false, Blame::Nobody);
        assert_eq!(queue_again(&mut ledger), again);
        ledger.sent(1);
        ledger.sent(2);
        assert_eq!(queue_all(&mut ledger), numbers[2..]);
        assert_eq!(ledger.acknowledged(2), Some(numbers[1]));
    }

    /// Gives what may go to an imagined rumqttc, which sends it.
    fn send_all(ledger: &mut Ledger<()>) -> Vec<u64> {
        let again = queue_again(ledger).into_iter().map(|(number, _)| number);
        let all: Vec<_> = again.chain(queue_all(ledger)).collect();
        for packet_id in 1..=u16::try_from(all.len()).unwrap() {
            ledger.sent(packet_id);
        }
        all
    }

    #[test]
    fn a_message_that_ends_every_connection_is_found_and_taken_out() {
        let (mut ledger, numbers) = ledger(3);
        for _ in 0..limits::SUSPECT_AFTER {
            assert_eq!(send_all(&mut ledger), numbers);
            ledger.subscribed();
            assert_eq!(ledger.lost(false, Blame::Message), None);
        }
        assert_eq!(send_all(&mut ledger), [], "nothing beside the SUBSCRIBE");
        ledger.subscribed();
        assert_eq!(send_all(&mut ledger), numbers[..1], "alone");
        assert_eq!(ledger.lost(false, Blame::Message), Some(()));
        assert!(ledger.get(numbers[0]).is_none());
        // The others are not to blame, and are sent one by one until that is known.
        ledger.subscribed();
        for number in &numbers[1..] {
            assert_eq!(send_all(&mut ledger), [*number]);
            let packet_id = *ledger.packet_ids.keys().next().unwrap();
            assert_eq!(ledger.acknowledged(packet_id), Some(*number));
            ledger.remove(*number);
        }
        assert!(ledger.blamed.is_empty());
    }

    #[test]
    fn a_broker_that_goes_without_a_word_is_asked_more_often() {
        let (mut ledger, _) = ledger(1);
        for _ in 1..limits::GIVE_UP_AFTER {
            ledger.subscribed();
            send_all(&mut ledger);
            assert_eq!(ledger.lost(false, Blame::Anybody), None);
        }
        ledger.subscribed();
        send_all(&mut ledger);
        assert_eq!(ledger.lost(false, Blame::Anybody), Some(()));
    }

    #[test]
    fn a_network_that_fails_is_nobodys_fault() {
        let (mut ledger, numbers) = ledger(2);
        for _ in 0..=u8::MAX {
            assert_eq!(send_all(&mut ledger), numbers);
            assert_eq!(ledger.lost(false, Blame::Nobody), None);
        }
    }
}
