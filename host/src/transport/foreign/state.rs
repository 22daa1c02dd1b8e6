//! What goes out to a foreign broker: the link's outlet, bounded, and what is known of it.
//!
//! What enters: what the store wants done, and PUBACKs. What leaves: messages into the outlet, and of a PUBACK what it
//! says about a watcher.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use rumqttc::v5::mqttbytes::v5::{PubAck, PubAckReason};
use statehouse_link::Outlet;
use statehouse_mqtt::Message;

use super::figures::Figures;
use super::outgoing::{Outgoing, To};
use super::quiet::Quiet;
use crate::limits;
use crate::transport::{Outbound, Ticket};
use statehouse_core::store::Peer;

/// What goes out.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) outlet: Outlet<Outgoing>,
    /// The bytes of all that is in it.
    pub(super) weight: Arc<AtomicUsize>,
    /// Answers that were given over an earlier connection of the session: their requests come again, and are answered
    /// the same. One of both is enough.
    given: Vec<u64>,
    /// Answers that the broker closes the connection for: their requests come again too, and are not answered.
    hopeless: VecDeque<blake3::Hash>,
    /// Requests that the store has and has not settled.
    pub(super) unsettled: usize,
    /// Whether the broker knew the session, at the last connection.
    pub(super) resumed: bool,
    /// Why there is no connection, as it was logged.
    pub(super) down: Option<String>,
    pub(super) sums: Figures,
    pub(super) rule_log: Quiet,
    refused_log: Quiet,
    lost_log: Quiet,
}

/// The number of the receipt; this transport gets nothing else back.
fn receipt(ticket: Ticket) -> Option<u64> {
    match ticket {
        Ticket::Foreign(receipt) => Some(receipt),
        Ticket::Embedded(_) => None,
    }
}

/// What the PUBACK of a notification says about its watcher.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Watcher {
    /// Somebody subscribed to it.
    Heard(Peer),
    /// Nobody did, and this is the key.
    Unheard(Peer, Vec<u8>),
}

impl State {
    /// Whether the store should decide nothing more until the broker has taken some of this.
    pub(super) fn is_full(&self) -> bool {
        self.outlet.len() >= limits::BROKER_OUTBOX_HOLD
            || self.weight.load(Relaxed) >= limits::BROKER_OUTBOX_BYTES_HOLD
    }

    /// Whether the broker has everything, as far as it can be had.
    pub(super) fn is_drained(&self) -> bool {
        !self.outlet.is_up() || (self.unsettled == 0 && self.outlet.is_empty())
    }

    /// Does what the store wants done. A kick is not done here.
    pub(super) fn take(&mut self, out: Outbound) {
        match out {
            Outbound::Answer(message, of) => self.answer(message, of.and_then(receipt)),
            Outbound::Notify(peer, message, of) => {
                self.notify(peer, message, of.and_then(receipt));
            }
            Outbound::Reply(message, ticket) => {
                self.answer(message, receipt(ticket));
                self.settle(ticket);
            }
            Outbound::Settle(ticket, ..) => self.settle(ticket),
            Outbound::Kick(..) => {}
        }
    }

    fn settle(&mut self, ticket: Ticket) {
        self.unsettled = self.unsettled.saturating_sub(1);
        if let Some(receipt) = receipt(ticket) {
            self.outlet.settle(receipt);
        }
    }

    /// Publishes, for who is not the store.
    pub(super) fn publish(&mut self, message: Message, to: To) {
        self.add(message, to, None);
        self.outlet.flush();
    }

    fn add(&mut self, message: Message, to: To, of: Option<u64>) {
        let outgoing = Outgoing::new(message, to, &self.weight);
        self.outlet.add(of, |_| outgoing);
    }

    fn answer(&mut self, message: Message, of: Option<u64>) {
        let outlet = &self.outlet;
        let is_same = |number: &u64| outlet.get(*number).is_some_and(|it| it.is_same(&message));
        if let Some(place) = self.given.iter().position(is_same) {
            let given = self.given.swap_remove(place);
            if let Some(receipt) = of {
                self.outlet.tie(given, receipt);
            }
            return;
        }
        if !self.hopeless.is_empty() && self.hopeless.contains(&fingerprint(&message)) {
            return;
        }
        self.add(message, To::Asker, of);
    }

    /// The broker closes the connection for this message, which is not sent any more.
    pub(super) fn hopeless(&mut self, outgoing: &Outgoing, why: &str) {
        self.sums.refused += 1;
        // Seldom: each costs some connections. A topic may be long.
        let message = &outgoing.message;
        let start = message.topic.get(..limits::BROKER_LOG_TOPIC_BYTES_MAX);
        let topic = start.unwrap_or(&message.topic).escape_ascii();
        tracing::error!(%topic, why, "the broker closes the connection each time the store publishes this: it is lost");
        if matches!(outgoing.to, To::Asker) {
            self.hopeless.truncate(limits::BROKER_HOPELESS_MAX - 1);
            self.hopeless.push_front(fingerprint(message));
        }
    }

    fn notify(&mut self, peer: Peer, message: Message, of: Option<u64>) {
        if self.weight.load(Relaxed) >= limits::BROKER_OUTBOX_BYTES_MAX {
            self.sums.lost += 1;
            if let Some(more) = self.lost_log.may_say(Instant::now()) {
                tracing::error!(
                    more,
                    "a notification is lost: the broker has not taken those before for too long"
                );
            }
            return;
        }
        self.add(message, To::Watcher(peer), of);
    }

    /// The broker has taken a message, or will not. Says what it means for a watcher.
    pub(super) fn acknowledged(&mut self, number: u64, ack: &PubAck) -> Option<Watcher> {
        let outgoing = self.outlet.remove(number)?;
        self.given.retain(|given| *given != number);
        match (ack.reason, &outgoing.to) {
            (PubAckReason::Success, To::Watcher(peer)) => Some(Watcher::Heard(peer.clone())),
            (PubAckReason::NoMatchingSubscribers, To::Watcher(peer)) => {
                self.sums.unheard += 1;
                Some(Watcher::Unheard(peer.clone(), outgoing.watched_key()?))
            }
            (PubAckReason::Success | PubAckReason::NoMatchingSubscribers, _) => None,
            (reason, _) => {
                self.sums.refused += 1;
                if let Some(more) = self.refused_log.may_say(Instant::now()) {
                    let topic = outgoing.message.topic.escape_ascii();
                    tracing::warn!(%topic, ?reason, more, "the broker does not take what the store publishes: does its access control allow it?");
                }
                None
            }
        }
    }

    /// The connection is lost: requests that were not acknowledged may come again.
    pub(super) fn lost(&mut self) {
        let numbers = |is_it: fn(&To) -> bool| {
            let all = self.outlet.iter();
            all.filter(|(_, outgoing)| is_it(&outgoing.to))
                .map(|(number, _)| number)
                .collect::<Vec<_>>()
        };
        self.given = numbers(|to| matches!(to, To::Asker));
        // It would be left in the place of a later one.
        for mark in numbers(|to| matches!(to, To::Heir)) {
            self.outlet.remove(mark);
        }
    }

    /// There is a connection.
    pub(super) fn connected(&mut self, session_present: bool) {
        self.sums.connections += 1;
        self.resumed = session_present;
        if !session_present {
            // Nothing comes again.
            self.given.clear();
            self.hopeless.clear();
        }
    }

    pub(super) fn figures(&self) -> Figures {
        Figures {
            connected: self.outlet.is_up(),
            outstanding: self.outlet.len() as u64,
            outstanding_bytes: self.weight.load(Relaxed) as u64,
            unacknowledged: self.outlet.unacknowledged() as u64,
            ..self.sums
        }
    }
}

/// What tells an answer from others, as [`Outgoing::is_same`] does.
fn fingerprint(message: &Message) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for part in [&message.topic, &message.properties, &message.payload] {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    hasher.finalize()
}

#[cfg(test)]
mod tests {
    use statehouse_mqtt::ReasonCode;

    use super::*;

    fn message(topic: &'static str, payload: &'static str) -> Message {
        Message {
            topic: topic.into(),
            payload: payload.into(),
            ..Message::default()
        }
    }

    fn ack(reason: PubAckReason) -> PubAck {
        PubAck {
            pkid: 1,
            reason,
            properties: None,
        }
    }

    fn watcher() -> Peer {
        super::super::identity::named("watcher")
    }

    fn oldest(state: &State) -> u64 {
        let (number, _) = state.outlet.iter().next().unwrap();
        number
    }

    #[test]
    fn a_puback_tells_whether_a_watcher_is_there() {
        let mut state = State::default();
        let topic = "clients/x/command/notify/6B";
        for _ in 0..2 {
            state.take(Outbound::Notify(watcher(), message(topic, "n"), None));
        }
        state.take(Outbound::Answer(message("answers", "a"), None));
        let first = oldest(&state);
        assert_eq!(
            state.acknowledged(first, &ack(PubAckReason::Success)),
            Some(Watcher::Heard(watcher()))
        );
        let nobody = ack(PubAckReason::NoMatchingSubscribers);
        assert_eq!(
            state.acknowledged(first + 1, &nobody),
            Some(Watcher::Unheard(watcher(), b"k".to_vec()))
        );
        assert_eq!(state.acknowledged(first + 2, &nobody), None);
        let figures = state.figures();
        assert_eq!((figures.unheard, figures.outstanding_bytes), (1, 0));
    }

    #[test]
    fn what_the_broker_refuses_is_counted_and_gone() {
        let mut state = State::default();
        state.take(Outbound::Answer(message("answers", "a"), None));
        let number = oldest(&state);
        let refused = ack(PubAckReason::NotAuthorized);
        assert_eq!(state.acknowledged(number, &refused), None);
        assert_eq!(state.figures().refused, 1);
        assert_eq!(state.figures().outstanding, 0);
    }

    #[test]
    fn an_answer_to_a_request_that_comes_again_is_kept_once() {
        let mut state = State::default();
        let answer = || Outbound::Answer(message("answers", "+OK\r\n"), None);
        state.take(answer());
        state.take(answer());
        assert_eq!(state.outlet.len(), 2, "two requests, two answers");
        state.lost();
        for _ in 0..3 {
            state.take(answer());
        }
        assert_eq!(state.outlet.len(), 3, "and a third request");
        // Where the broker has lost the session, nothing comes again: this is a new request.
        state.lost();
        state.connected(false);
        state.take(answer());
        assert_eq!(state.outlet.len(), 4);
    }

    #[test]
    fn an_answer_that_the_broker_closes_for_is_not_given_again() {
        let mut state = State::default();
        let answer = |topic| Outbound::Answer(message(topic, "+OK\r\n"), None);
        state.take(answer("answers/evil"));
        let evil = state.outlet.remove(1).unwrap();
        state.hopeless(&evil, "the broker closed it");
        assert_eq!(state.figures().refused, 1);
        state.lost();
        state.connected(true);
        // Its request comes again, since it was not acknowledged.
        state.take(answer("answers/evil"));
        assert_eq!(state.outlet.len(), 0);
        state.take(answer("answers/good"));
        assert_eq!(state.outlet.len(), 1);
    }

    #[test]
    fn the_store_is_held_up_where_too_much_is_on_its_way() {
        let mut state = State::default();
        for _ in 0..limits::BROKER_OUTBOX_HOLD {
            assert!(!state.is_full());
            state.take(Outbound::Notify(watcher(), message("t", "n"), None));
        }
        assert!(state.is_full());
        let number = oldest(&state);
        state.acknowledged(number, &ack(PubAckReason::Success));
        assert!(!state.is_full());
    }

    #[test]
    fn what_is_decided_is_out_before_the_end() {
        let mut state = State {
            unsettled: 1,
            ..State::default()
        };
        assert!(
            state.is_drained(),
            "without a connection nothing is waited for"
        );
        let settle = Outbound::Settle(Ticket::Foreign(0), ReasonCode::SUCCESS, None);
        state.take(settle);
        assert_eq!(state.unsettled, 0);
    }
}
