//! The outgoing messages of a session and the packet ids under which they were sent. The ledger
//! does no I/O and reads no clock.
//!
//! rumqttc drops its messages when a reconnect finds no session, and it does not report which
//! packet belongs to which call. So every message must stay here until its owner removes it. The
//! packet id of a message is derived from the order, because rumqttc sends in the order of the
//! calls.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::limits;
use crate::loss::Blame;

/// All messages, numbered in the order of their creation.
#[derive(Debug)]
pub(crate) struct Ledger<T> {
    last_number: u64,
    messages: BTreeMap<u64, T>,
    /// Messages to resend, in order: they were sent over an earlier connection of the session. Each
    /// has the packet id that it must use again, or 0 for any. They must be sent before all others.
    resend: VecDeque<(u64, u16)>,
    /// Messages that were not yet passed to rumqttc, in order, and some that were removed.
    unsent: VecDeque<u64>,
    /// Messages that were passed to rumqttc but have no known packet id yet, in order. The flag
    /// says whether the message was sent before.
    queued: VecDeque<(u64, bool)>,
    /// Messages that were sent and not acknowledged, by packet id.
    packet_ids: HashMap<u16, u64>,
    /// How many connections ended while this message was in flight, in a way that a message can
    /// cause.
    blamed: HashMap<u64, u8>,
    /// Whether the broker has answered the SUBSCRIBE of this connection.
    subscribed: bool,
}

impl<T> Default for Ledger<T> {
    fn default() -> Self {
        Self {
            last_number: 0,
            messages: BTreeMap::new(),
            resend: VecDeque::new(),
            unsent: VecDeque::new(),
            queued: VecDeque::new(),
            packet_ids: HashMap::new(),
            blamed: HashMap::new(),
            subscribed: false,
        }
    }
}

impl<T> Ledger<T> {
    /// Adds a message to send, created from its number.
    pub(crate) fn add(&mut self, message: impl FnOnce(u64) -> T) -> u64 {
        // Without a connection nothing else takes the removed ones out.
        if self.unsent.len() > 2 * self.messages.len() + limits::UNSENT_REMOVED_MAX {
            let messages = &self.messages;
            self.unsent.retain(|number| messages.contains_key(number));
        }
        let number = self.number();
        self.messages.insert(number, message(number));
        self.unsent.push_back(number);
        number
    }

    /// Assigns a number to a message that is not stored.
    pub(crate) fn number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    pub(crate) fn get(&self, number: u64) -> Option<&T> {
        self.messages.get(&number)
    }

    pub(crate) fn get_mut(&mut self, number: u64) -> Option<&mut T> {
        self.messages.get_mut(&number)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        self.messages.iter().map(|(number, it)| (*number, it))
    }

    pub(crate) fn len(&self) -> usize {
        self.messages.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Removes a message. If it was already passed to rumqttc, it may still be sent, but it is not
    /// resent.
    pub(crate) fn remove(&mut self, number: u64) -> Option<T> {
        self.blamed.remove(&number);
        self.messages.remove(&number)
    }

    /// Inserts a replacement for a removed message under the same number.
    pub(crate) fn put_back(&mut self, number: u64, message: T) {
        self.messages.insert(number, message);
    }

    pub(crate) fn drain(&mut self) -> impl Iterator<Item = T> {
        self.resend.clear();
        self.unsent.clear();
        self.queued.clear();
        self.packet_ids.clear();
        self.blamed.clear();
        std::mem::take(&mut self.messages).into_values()
    }

    /// The number of messages that rumqttc has and that are not acknowledged.
    pub(crate) fn in_flight(&self) -> usize {
        self.queued.len() + self.packet_ids.len()
    }

    /// The next message to pass to rumqttc for the first time.
    pub(crate) fn next_unsent(&mut self) -> Option<u64> {
        if self.first_resend().is_some() {
            return None;
        }
        while let Some(number) = self.unsent.front()
            && !self.messages.contains_key(number)
        {
            self.unsent.pop_front();
        }
        self.unsent.front().copied().filter(|it| self.may_send(*it))
    }

    /// The next message to resend, with its packet id.
    pub(crate) fn next_resend(&mut self) -> Option<(u64, u16)> {
        self.first_resend()
            .filter(|(number, _)| self.may_send(*number))
    }

    fn first_resend(&mut self) -> Option<(u64, u16)> {
        while let Some((number, _)) = self.resend.front()
            && !self.messages.contains_key(number)
        {
            self.resend.pop_front();
        }
        self.resend.front().copied()
    }

    /// Whether a message may be sent now. A suspect must be sent alone and only after the SUBSCRIBE
    /// was answered: if the broker then closes the connection, the suspect is the cause.
    fn may_send(&self, number: u64) -> bool {
        if self.is_suspect(number) {
            return self.subscribed && self.in_flight() == 0;
        }
        self.suspect_in_flight().is_none()
    }

    fn is_suspect(&self, number: u64) -> bool {
        let blamed = self.blamed.get(&number);
        blamed.is_some_and(|times| *times >= limits::SUSPECT_AFTER)
    }

    /// The suspect that is in flight alone, if there is one.
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

    /// rumqttc has accepted `number` for the first time.
    pub(crate) fn queued(&mut self, number: u64) {
        if self.unsent.front() == Some(&number) {
            self.unsent.pop_front();
        }
        self.queued.push_back((number, false));
    }

    /// rumqttc has accepted the message that [`Self::next_resend`] returned.
    pub(crate) fn requeued(&mut self) {
        match self.resend.pop_front() {
            Some((number, 0)) => self.queued.push_back((number, true)),
            Some((number, packet_id)) => _ = self.packet_ids.insert(packet_id, number),
            None => {}
        }
    }

    /// rumqttc has sent or resent a PUBLISH with this packet id.
    pub(crate) fn sent(&mut self, packet_id: u16) {
        if self.packet_ids.contains_key(&packet_id) {
            return;
        }
        if let Some((number, _)) = self.queued.pop_front() {
            self.packet_ids.insert(packet_id, number);
        }
    }

    /// The PUBLISH with this packet id was acknowledged and will not be resent.
    pub(crate) fn acknowledged(&mut self, packet_id: u16) -> Option<u64> {
        let number = self.packet_ids.remove(&packet_id)?;
        self.blamed.remove(&number);
        Some(number)
    }

    /// Handles the loss of the connection. Messages that rumqttc never sent become unsent; messages
    /// that it sent are resent unless they were removed. If rumqttc was rebuilt (`rebuild`), the
    /// old packet ids are not reused, although the broker may still have the session.
    ///
    /// A message that makes the broker close the connection would do so for ever. It is removed and
    /// returned.
    pub(crate) fn lost(&mut self, rebuild: bool, blame: Blame) -> Option<T> {
        self.subscribed = false;
        let rejected = self.blame(blame).and_then(|number| self.remove(number));
        let mut again: Vec<(u64, u16)> = self.resend.drain(..).collect();
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
        if rebuild {
            again.iter_mut().for_each(|(_, packet_id)| *packet_id = 0);
        }
        self.resend = again.into();
        rejected
    }

    /// Counts the loss for every message in flight, since any of them may be the cause. Returns the
    /// message that certainly is.
    fn blame(&mut self, blame: Blame) -> Option<u64> {
        if blame == Blame::NoMessage {
            return None;
        }
        let suspect = self.suspect_in_flight();
        let is_refusal = matches!(blame, Blame::Puback(_));
        for number in self.packet_ids.values() {
            if self.messages.contains_key(number) {
                let times = self.blamed.entry(*number).or_default();
                *times = times.saturating_add(1);
                if is_refusal {
                    // One of them is the cause, so the next connection must find it.
                    *times = (*times).max(limits::SUSPECT_AFTER);
                }
            }
        }
        if is_refusal {
            return self.only_sent();
        }
        suspect.filter(|number| {
            let times = self.blamed.get(number).copied().unwrap_or_default();
            blame == Blame::Message || times >= limits::GIVE_UP_AFTER
        })
    }

    /// The only message that the broker may have received and not acknowledged.
    fn only_sent(&self) -> Option<u64> {
        let mut sent = self.packet_ids.values().copied();
        let number = sent.next().filter(|_| sent.next().is_none())?;
        self.messages.contains_key(&number).then_some(number)
    }

    /// The broker has no session, so every message is unsent.
    pub(crate) fn new_session(&mut self) {
        self.resend.clear();
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

    /// Passes everything unsent to a simulated rumqttc.
    fn queue_all(ledger: &mut Ledger<()>) -> Vec<u64> {
        let mut numbers = Vec::new();
        while let Some(number) = ledger.next_unsent() {
            ledger.queued(number);
            numbers.push(number);
        }
        numbers
    }

    /// Passes everything that must be resent to it.
    fn queue_resends(ledger: &mut Ledger<()>) -> Vec<(u64, u16)> {
        let mut again = Vec::new();
        while let Some(next) = ledger.next_resend() {
            ledger.requeued();
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
    fn resumed_session_keeps_packet_ids_and_order() {
        let (mut ledger, numbers) = ledger(3);
        ledger.queued(numbers[0]);
        ledger.sent(1);
        ledger.queued(numbers[1]);
        ledger.lost(false, Blame::NoMessage);
        assert_eq!(ledger.next_unsent(), None, "nothing overtakes");
        assert_eq!(queue_resends(&mut ledger), [(numbers[0], 1)]);
        ledger.sent(1);
        assert_eq!(queue_all(&mut ledger), numbers[1..]);
        ledger.sent(2);
        assert_eq!(ledger.acknowledged(2), Some(numbers[1]));
        assert_eq!(ledger.acknowledged(1), Some(numbers[0]));
    }

    #[test]
    fn new_session_sends_all_messages_again() {
        let (mut ledger, numbers) = ledger(3);
        queue_all(&mut ledger);
        ledger.sent(1);
        ledger.sent(2);
        ledger.acknowledged(1);
        ledger.lost(false, Blame::NoMessage);
        ledger.new_session();
        assert_eq!(ledger.next_resend(), None);
        assert_eq!(queue_all(&mut ledger), numbers);
        assert_eq!(ledger.acknowledged(2), None);
    }

    #[test]
    fn removed_message_is_not_resent() {
        let (mut ledger, numbers) = ledger(3);
        ledger.queued(numbers[0]);
        ledger.queued(numbers[1]);
        ledger.sent(1);
        for number in numbers {
            ledger.remove(number);
        }
        ledger.lost(false, Blame::NoMessage);
        assert_eq!(ledger.next_resend(), None);
        assert_eq!(ledger.next_unsent(), None);
        assert_eq!((ledger.in_flight(), ledger.len()), (0, 0));
    }

    /// Requests that are made and time out while the broker is away for days.
    #[test]
    fn messages_removed_without_a_connection_take_no_memory() {
        let (mut ledger, numbers) = ledger(1);
        for _ in 0..10_000 {
            let number = ledger.add(|_| ());
            ledger.remove(number);
        }
        let last = ledger.add(|_| ());
        assert!(ledger.unsent.len() <= limits::UNSENT_REMOVED_MAX + 4);
        assert_eq!(queue_all(&mut ledger), [numbers[0], last]);
    }

    #[test]
    fn rebuild_resends_in_flight_messages_first() {
        let (mut ledger, numbers) = ledger(3);
        ledger.queued(numbers[0]);
        ledger.queued(numbers[1]);
        ledger.sent(9);
        ledger.sent(3);
        ledger.lost(true, Blame::NoMessage);
        let again = [(numbers[0], 0), (numbers[1], 0)];
        assert_eq!(queue_resends(&mut ledger), again);
        // The connection is lost before the resend. The messages were sent once, so they must keep
        // the DUP flag.
        ledger.lost(false, Blame::NoMessage);
        assert_eq!(queue_resends(&mut ledger), again);
        ledger.sent(1);
        ledger.sent(2);
        assert_eq!(queue_all(&mut ledger), numbers[2..]);
        assert_eq!(ledger.acknowledged(2), Some(numbers[1]));
    }

    /// Passes everything that may be sent to a simulated rumqttc, which sends it.
    fn send_all(ledger: &mut Ledger<()>) -> Vec<u64> {
        let again = queue_resends(ledger).into_iter().map(|(number, _)| number);
        let all: Vec<_> = again.chain(queue_all(ledger)).collect();
        for packet_id in 1..=u16::try_from(all.len()).unwrap() {
            ledger.sent(packet_id);
        }
        all
    }

    #[test]
    fn message_that_ends_every_connection_is_removed() {
        let (mut ledger, numbers) = ledger(3);
        for _ in 0..limits::SUSPECT_AFTER {
            assert_eq!(send_all(&mut ledger), numbers);
            ledger.subscribed();
            assert_eq!(ledger.lost(false, Blame::Message), None);
        }
        assert_eq!(
            send_all(&mut ledger),
            [],
            "nothing is sent before the SUBACK"
        );
        ledger.subscribed();
        assert_eq!(send_all(&mut ledger), numbers[..1], "alone");
        assert_eq!(ledger.lost(false, Blame::Message), Some(()));
        assert!(ledger.get(numbers[0]).is_none());
        // The other messages become suspects too and are sent one by one until they are
        // acknowledged.
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
    fn loss_without_a_reason_needs_more_attempts() {
        let (mut ledger, _) = ledger(1);
        for _ in 1..limits::GIVE_UP_AFTER {
            ledger.subscribed();
            send_all(&mut ledger);
            assert_eq!(ledger.lost(false, Blame::Unknown), None);
        }
        ledger.subscribed();
        send_all(&mut ledger);
        assert_eq!(ledger.lost(false, Blame::Unknown), Some(()));
    }

    #[test]
    fn message_refused_alone_is_removed_at_once() {
        let (mut ledger, _) = ledger(1);
        send_all(&mut ledger);
        ledger.subscribed();
        assert_eq!(ledger.lost(false, Blame::Puback(0x95)), Some(()));
        assert!(ledger.is_empty());
    }

    #[test]
    fn message_refused_among_others_is_found_by_the_next_connection() {
        let (mut ledger, numbers) = ledger(2);
        send_all(&mut ledger);
        ledger.subscribed();
        assert_eq!(ledger.lost(false, Blame::Puback(0x95)), None);
        ledger.subscribed();
        assert_eq!(send_all(&mut ledger), numbers[..1], "alone");
        assert_eq!(ledger.lost(false, Blame::Puback(0x95)), Some(()));
        assert!(ledger.get(numbers[0]).is_none() && ledger.get(numbers[1]).is_some());
        // Its owner has removed the only message in flight, so there is nothing to remove.
        ledger.subscribed();
        assert_eq!(send_all(&mut ledger), numbers[1..]);
        ledger.remove(numbers[1]);
        assert_eq!(ledger.lost(false, Blame::Puback(0x95)), None);
    }

    #[test]
    fn network_failure_blames_no_message() {
        let (mut ledger, numbers) = ledger(2);
        for _ in 0..=u8::MAX {
            assert_eq!(send_all(&mut ledger), numbers);
            assert_eq!(ledger.lost(false, Blame::NoMessage), None);
        }
    }
}
