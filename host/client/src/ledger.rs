//! The requests under way. Enters: new requests, and what became of them in rumqttc. Leaves: which
//! ones to send, and the one that a packet id or an answer belongs to. It knows no socket and no
//! clock.
//!
//! rumqttc loses what it holds when a reconnect finds no session, and does not say which packet
//! belongs to which call. So every request stays here until it is answered, and its packet id is
//! learned from the order: rumqttc sends in the order it was given.

use std::collections::{BTreeMap, HashMap, VecDeque};

use bytes::Bytes;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::error::Error;
use crate::version::Version;

/// What came back for a request.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) payload: Bytes,
    pub(crate) version: Option<Version>,
}

/// One request, as often as it must be sent.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) payload: Bytes,
    /// `__ts`: part of the identity of a duplicate (section 9), so it is never made anew.
    pub(crate) timestamp: String,
    /// `__ft`
    pub(crate) fence: Option<String>,
    pub(crate) deadline: Instant,
    pub(crate) done: oneshot::Sender<Result<Answer, Error>>,
}

/// All requests, numbered in the order they were made.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    last_number: u64,
    requests: BTreeMap<u64, Request>,
    /// Not given to rumqttc, in order.
    unsent: VecDeque<u64>,
    /// Given to rumqttc, which has not said the packet id yet, in order.
    queued: VecDeque<u64>,
    /// Sent and not acknowledged.
    packet_ids: HashMap<u16, u64>,
}

impl Ledger {
    /// A number for a message that nobody waits for; its answer finds no request.
    pub(crate) fn number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    pub(crate) fn add(&mut self, request: Request) -> u64 {
        let number = self.number();
        self.requests.insert(number, request);
        self.unsent.push_back(number);
        number
    }

    /// Takes a request out: it was answered, or nobody waits for it any more.
    pub(crate) fn remove(&mut self, number: u64) -> Option<Request> {
        self.requests.remove(&number)
    }

    /// The next request to give to rumqttc.
    pub(crate) fn next_unsent(&mut self) -> Option<(u64, &Request)> {
        while let Some(number) = self.unsent.front()
            && !self.requests.contains_key(number)
        {
            self.unsent.pop_front();
        }
        let number = *self.unsent.front()?;
        self.requests.get(&number).map(|request| (number, request))
    }

    /// rumqttc has taken `number`.
    pub(crate) fn queued(&mut self, number: u64) {
        if self.unsent.front() == Some(&number) {
            self.unsent.pop_front();
        }
        self.queued.push_back(number);
    }

    /// rumqttc has sent a PUBLISH with this packet id: a first time, or again.
    pub(crate) fn sent(&mut self, packet_id: u16) {
        if self.packet_ids.contains_key(&packet_id) {
            return;
        }
        if let Some(number) = self.queued.pop_front() {
            self.packet_ids.insert(packet_id, number);
        }
    }

    /// The PUBLISH with this packet id was acknowledged: it will not be sent again.
    pub(crate) fn acknowledged(&mut self, packet_id: u16) -> Option<u64> {
        self.packet_ids.remove(&packet_id)
    }

    /// The connection is lost. What rumqttc never sent is unsent again; packet ids that nobody
    /// waits for are forgotten, and must not be sent again: a request that makes the broker close
    /// the connection would do so for ever.
    pub(crate) fn lost(&mut self) {
        for number in self.queued.drain(..).rev() {
            self.unsent.push_front(number);
        }
        let requests = &self.requests;
        self.packet_ids
            .retain(|_, number| requests.contains_key(number));
    }

    /// The request behind an unacknowledged packet id.
    pub(crate) fn in_flight(&self, packet_id: u16) -> Option<u64> {
        self.packet_ids.get(&packet_id).copied()
    }

    /// Packet ids mean nothing any more, the session may still be known: what was in flight is
    /// queued again, in order, and returned.
    pub(crate) fn requeue_in_flight(&mut self) -> Vec<(u64, &Request)> {
        let mut numbers: Vec<u64> = self.packet_ids.drain().map(|(_, number)| number).collect();
        numbers.sort_unstable();
        self.queued = numbers.iter().copied().collect();
        let requests = &self.requests;
        numbers
            .into_iter()
            .filter_map(|number| Some((number, requests.get(&number)?)))
            .collect()
    }

    /// The broker knows nothing of us: every request is unsent.
    pub(crate) fn new_session(&mut self) {
        self.packet_ids.clear();
        self.queued.clear();
        self.unsent = self.requests.keys().copied().collect();
    }

    /// Takes out everything, for the end.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = Request> {
        self.unsent.clear();
        self.queued.clear();
        self.packet_ids.clear();
        std::mem::take(&mut self.requests).into_values()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> Request {
        Request {
            payload: Bytes::new(),
            timestamp: "1:0:n".into(),
            fence: None,
            deadline: Instant::now(),
            done: oneshot::channel().0,
        }
    }

    /// Gives everything unsent to an imagined rumqttc.
    fn queue_all(ledger: &mut Ledger) -> Vec<u64> {
        let mut numbers = Vec::new();
        while let Some((number, _)) = ledger.next_unsent() {
            ledger.queued(number);
            numbers.push(number);
        }
        numbers
    }

    #[test]
    fn packet_ids_follow_the_order() {
        let mut ledger = Ledger::default();
        let (a, b) = (ledger.add(request()), ledger.add(request()));
        assert_eq!(queue_all(&mut ledger), [a, b]);
        ledger.sent(7);
        ledger.sent(8);
        assert_eq!(ledger.in_flight(8), Some(b));
        assert_eq!(ledger.acknowledged(7), Some(a));
        assert_eq!(ledger.acknowledged(7), None);
    }

    #[test]
    fn a_resumed_session_keeps_packet_ids_and_sends_the_rest() {
        let mut ledger = Ledger::default();
        let a = ledger.add(request());
        queue_all(&mut ledger);
        ledger.sent(1);
        let b = ledger.add(request());
        queue_all(&mut ledger);
        let c = ledger.add(request());
        ledger.lost();
        assert_eq!(ledger.in_flight(1), Some(a));
        ledger.sent(1);
        assert_eq!(queue_all(&mut ledger), [b, c]);
        ledger.sent(2);
        assert_eq!(ledger.in_flight(2), Some(b));
    }

    #[test]
    fn a_new_session_sends_everything_again() {
        let mut ledger = Ledger::default();
        let numbers = [(); 3].map(|()| ledger.add(request()));
        queue_all(&mut ledger);
        ledger.sent(1);
        ledger.sent(2);
        ledger.acknowledged(1);
        ledger.lost();
        ledger.new_session();
        assert_eq!(queue_all(&mut ledger), numbers);
        assert_eq!(ledger.in_flight(2), None);
    }

    #[test]
    fn what_nobody_waits_for_is_not_sent_again() {
        let mut ledger = Ledger::default();
        let (a, b) = (ledger.add(request()), ledger.add(request()));
        queue_all(&mut ledger);
        ledger.sent(1);
        ledger.remove(a);
        ledger.remove(b);
        ledger.lost();
        assert_eq!(ledger.in_flight(1), None);
        assert!(ledger.next_unsent().is_none());
    }

    #[test]
    fn after_a_rebuild_the_in_flight_ones_come_first() {
        let mut ledger = Ledger::default();
        let numbers = [(); 3].map(|()| ledger.add(request()));
        queue_all(&mut ledger);
        ledger.sent(9);
        ledger.sent(3);
        ledger.lost();
        let again: Vec<u64> = ledger.requeue_in_flight().iter().map(|(n, _)| *n).collect();
        assert_eq!(again, numbers[..2]);
        ledger.sent(1);
        ledger.sent(2);
        assert_eq!(ledger.in_flight(2), Some(numbers[1]));
        assert_eq!(queue_all(&mut ledger), numbers[2..]);
    }
}
