//! The output to a foreign broker: the link's bounded outlet, and the state about its messages.
//!
//! Puts the store's messages into the outlet, and reports what a PUBACK says about a watcher. The
//! memory of notifications must stay within `OutboxBounds::bytes_max`.

use std::collections::VecDeque;
use std::time::Instant;

use rumqttc::v5::mqttbytes::v5::{PubAck, PubAckReason};
use statehouse_link::{Accepted, Outlet, describe_reason};
use statehouse_mqtt::{LogThrottle, Message, ReasonCode};

use super::outgoing::{Outgoing, Recipient, Weights};
use crate::{Outbound, Ticket};
use statehouse_config::{OutboxBounds, limits};
use statehouse_core::store::Peer;

/// Reasons for lost connections that are remembered, so that each is logged once.
const LOGGED_LOSSES_MAX: usize = 8;

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) outlet: Outlet<Outgoing>,
    /// The bytes of all messages in the outlet, and their bounds.
    weights: Weights,
    bounds: OutboxBounds,
    /// Responses in the outlet since an earlier connection of the session. The broker redelivers
    /// their requests, which get the same response. Only one of both is published.
    earlier: Vec<u64>,
    /// Responses that the broker refuses, or because of which it closes the connection. It
    /// redelivers their requests, which get no response.
    hopeless: VecDeque<blake3::Hash>,
    /// Requests that the store has received and not acknowledged.
    pub(super) unsettled: usize,
    /// Whether the last connection resumed the session at the broker.
    pub(super) resumed: bool,
    mark_check: MarkCheck,
    /// When the broker took this run's mark, until the mark is due: see [`Self::is_mark_due`].
    mark_taken: Option<Instant>,
    /// Whether the log says that the broker does not deliver this run's mark.
    mark_undelivered: bool,
    /// Whether the broker refused this run's mark last.
    mark_refused: bool,
    /// The subscriptions that the broker refused last, except those of presence.
    refused_filters: Vec<String>,
    /// Whether the broker takes retained messages. Unknown before the first connection.
    retain_available: Option<bool>,
    /// Whether the broker has granted the subscription to requests over this connection.
    attached: bool,
    /// Whether the log says that the store is attached.
    announced: bool,
    /// Whether the last connection was lost before it was stable. Then this one is logged when it
    /// is stable.
    unstable: bool,
    /// The logged reasons for lost connections since the last stable one, the newest first.
    logged_losses: VecDeque<String>,
    pub(super) sums: Figures,
    pub(super) rule_log: LogThrottle,
    refused_log: LogThrottle,
    lost_log: LogThrottle,
}

/// The metrics of the connection to a foreign broker: sums since the start, and current values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Whether there is a connection.
    pub connected: bool,
    /// Connections made.
    pub connections: u64,
    /// Responses and notifications without a PUBACK of the broker.
    pub outstanding: u64,
    /// The same in bytes.
    pub outstanding_bytes: u64,
    /// Messages of the broker without a PUBACK of the store.
    pub unacknowledged: u64,
    /// Requests dropped because their properties break a rule of MQTT.
    pub malformed: u64,
    /// Requests dropped because their Response Topic has a wildcard or too many levels. The store
    /// counts those with a Response Topic of its own.
    pub kicked: u64,
    /// Responses and notifications that the broker refused.
    pub refused: u64,
    /// Notifications without a subscriber.
    pub unheard: u64,
    /// Notifications lost because too many waited for a PUBACK of the broker.
    pub lost: u64,
    /// Messages at QoS 0 dropped because there was too much output.
    pub dropped: u64,
}

/// Whether requests wait until a retained mark of a later run would have arrived.
#[derive(Debug, Default, PartialEq, Eq)]
enum MarkCheck {
    /// They do not wait.
    #[default]
    Done,
    /// The broker has not answered the SUBSCRIBE.
    Subscribing,
    /// The broker has not acknowledged this message, which was published after the SUBSCRIBE.
    /// Brokers send a retained mark before they do.
    Publishing(u64),
}

/// The number of the receipt. The embedded broker's tickets never reach this transport, and the
/// store's own requests have no receipt.
fn receipt(ticket: Ticket) -> Option<u64> {
    match ticket {
        Ticket::Foreign(receipt) => Some(receipt),
        Ticket::Embedded(_) | Ticket::Own(_) => None,
    }
}

/// What the PUBACK of a notification says about its watcher.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Watcher {
    /// The topic of the notification has a subscriber.
    Subscribed(Peer),
    /// The topic of the notification for this key has no subscriber.
    Unsubscribed(Peer, Vec<u8>),
}

impl State {
    pub(super) fn new(bounds: OutboxBounds) -> Self {
        Self {
            bounds,
            ..Self::default()
        }
    }

    /// Whether the store must not execute further requests until the broker has acknowledged
    /// output.
    pub(super) fn is_full(&self) -> bool {
        self.outlet.len() >= limits::BROKER_OUTBOX_HOLD
            || self.weights.bytes() >= self.bounds.hold_bytes
    }

    /// Whether the store must not execute requests, because the broker may still send the mark of a
    /// later run. Ends with the PUBACK of a message, or with that message if it cannot be sent.
    pub(super) fn awaits_mark(&self) -> bool {
        match self.mark_check {
            MarkCheck::Done => false,
            MarkCheck::Subscribing => true,
            MarkCheck::Publishing(number) => self.outlet.get(number).is_some(),
        }
    }

    /// Whether the broker has acknowledged all output and got all PUBACKs, or there is no
    /// connection.
    pub(super) fn is_drained(&self) -> bool {
        !self.outlet.is_up() || (self.unsettled == 0 && self.outlet.is_empty())
    }

    /// Takes output of the store. Ignores a kick, which the caller handles.
    pub(super) fn take(&mut self, out: Outbound) {
        match out {
            Outbound::Response(message, of) => self.answer(message, of.and_then(receipt)),
            Outbound::Notification(peer, message, of) => {
                self.notify(peer, message, of.and_then(receipt));
            }
            Outbound::AcknowledgedResponse(message, ticket) => {
                self.answer(message, receipt(ticket));
                self.settle(ticket);
            }
            Outbound::Acknowledge(ticket, ..) => self.settle(ticket),
            Outbound::Disconnect(..) => {}
        }
    }

    fn settle(&mut self, ticket: Ticket) {
        self.unsettled = self.unsettled.saturating_sub(1);
        if let Some(receipt) = receipt(ticket) {
            self.outlet.settle(receipt);
        }
    }

    /// Publishes a mark of this run. Returns its number.
    pub(super) fn publish_mark(&mut self, message: Message) -> u64 {
        let number = self.add(message, Recipient::OtherRun, None);
        self.outlet.flush();
        number
    }

    fn add(&mut self, message: Message, to: Recipient, of: Option<u64>) -> u64 {
        let outgoing = self.weights.weigh(message, to);
        self.outlet.add(of, |_| outgoing)
    }

    fn answer(&mut self, message: Message, of: Option<u64>) {
        let outlet = &self.outlet;
        let is_same = |number: &u64| outlet.get(*number).is_some_and(|it| it.is_same(&message));
        if let Some(index) = self.earlier.iter().position(is_same) {
            let earlier = self.earlier.swap_remove(index);
            if let Some(receipt) = of {
                self.outlet.tie(earlier, receipt);
            }
            return;
        }
        if !self.hopeless.is_empty() && self.hopeless.contains(&fingerprint(&message)) {
            return;
        }
        self.add(message, Recipient::Requester, of);
    }

    /// Gives up a message that makes the broker close the connection each time.
    pub(super) fn hopeless(&mut self, outgoing: &Outgoing, why: &str) {
        self.sums.refused += 1;
        // This line is rare, because each message costs several connections.
        let topic = outgoing.shown_topic();
        tracing::error!(
            topic,
            why,
            "the broker closes the connection each time the store publishes this: it is lost"
        );
        self.forget_response(outgoing);
    }

    /// Gives up a message that the broker refused with this reason code. A redelivered request gets
    /// an error instead of a response that is too large: see [`Outgoing`]. Other responses are
    /// given up.
    pub(super) fn unacceptable(&mut self, outgoing: &Outgoing, code: u8) {
        self.sums.refused += 1;
        if let Some(more) = may_log(&mut self.refused_log) {
            let topic = outgoing.shown_topic();
            let (bytes, reason) = (outgoing.message.payload.len(), describe_reason(code));
            tracing::error!(
                topic,
                bytes,
                more,
                "the broker refused a message of the store: {reason}"
            );
        }
        if ReasonCode(code) != ReasonCode::PACKET_TOO_LARGE {
            self.forget_response(outgoing);
        }
    }

    /// Publishes this response no more.
    fn forget_response(&mut self, outgoing: &Outgoing) {
        if matches!(outgoing.to, Recipient::Requester) {
            self.hopeless.truncate(limits::BROKER_HOPELESS_MAX - 1);
            self.hopeless.push_front(fingerprint(&outgoing.message));
        }
    }

    fn notify(&mut self, peer: Peer, message: Message, of: Option<u64>) {
        if self.weights.bytes() >= self.bounds.bytes_max {
            self.sums.lost += 1;
            if let Some(more) = may_log(&mut self.lost_log) {
                tracing::error!(
                    more,
                    "a notification is lost: too many wait for an acknowledgement of the broker"
                );
            }
            return;
        }
        self.add(message, Recipient::Watcher(peer), of);
    }

    /// Handles a PUBACK of the broker, which accepts or refuses a message. Returns what it says
    /// about a watcher.
    pub(super) fn acknowledged(&mut self, number: u64, ack: &PubAck) -> Option<Watcher> {
        let outgoing = self.outlet.remove(number)?;
        self.earlier.retain(|earlier| *earlier != number);
        match (ack.reason, &outgoing.to) {
            (PubAckReason::Success, Recipient::Watcher(peer)) => {
                Some(Watcher::Subscribed(peer.clone()))
            }
            (PubAckReason::NoMatchingSubscribers, Recipient::Watcher(peer)) => {
                self.sums.unheard += 1;
                Some(Watcher::Unsubscribed(peer.clone(), outgoing.watched_key()?))
            }
            (PubAckReason::Success | PubAckReason::NoMatchingSubscribers, to) => {
                if matches!(to, Recipient::OtherRun) {
                    self.mark_refused = false;
                    self.mark_taken = Some(Instant::now());
                }
                None
            }
            (reason, Recipient::OtherRun) => {
                self.sums.refused += 1;
                if !std::mem::replace(&mut self.mark_refused, true) {
                    let topic = outgoing.shown_topic();
                    tracing::warn!(
                        topic,
                        ?reason,
                        "the broker does not take the store's own mark, so the store may not detect that another one took its client id: check the broker's access rules"
                    );
                }
                None
            }
            (reason, _) => {
                self.sums.refused += 1;
                if let Some(more) = may_log(&mut self.refused_log) {
                    let topic = outgoing.shown_topic();
                    tracing::warn!(
                        topic,
                        ?reason,
                        more,
                        "the broker does not take what the store publishes: does its access control allow it?"
                    );
                }
                None
            }
        }
    }

    /// Handles the loss of the connection, after which requests may be redelivered.
    pub(super) fn lost(&mut self) {
        let numbers = |is_it: fn(&Recipient) -> bool| {
            let all = self.outlet.iter();
            all.filter(|(_, outgoing)| is_it(&outgoing.to))
                .map(|(number, _)| number)
                .collect::<Vec<_>>()
        };
        self.earlier = numbers(|to| matches!(to, Recipient::Requester));
        self.mark_check = MarkCheck::Done;
        self.mark_taken = None;
        // An old mark over the next connection would replace the mark of a later run.
        for mark in numbers(|to| matches!(to, Recipient::OtherRun)) {
            self.outlet.remove(mark);
        }
    }

    /// Notes why the connection was lost or could not be established. Returns whether to log it.
    pub(super) fn note_loss(&mut self, why: &str) -> bool {
        if std::mem::take(&mut self.attached) {
            self.unstable = !self.outlet.is_stable();
            if !self.unstable {
                self.logged_losses.clear();
            }
        }
        let is_new = self.logged_losses.iter().all(|logged| logged != why);
        if is_new {
            self.logged_losses.truncate(LOGGED_LOSSES_MAX - 1);
            self.logged_losses.push_front(why.to_owned());
        }
        std::mem::take(&mut self.announced) || is_new
    }

    /// Notes that the store is attached. Returns whether to log it.
    pub(super) fn note_attached(&mut self) -> bool {
        self.attached = true;
        self.announced = !self.unstable;
        self.announced
    }

    /// Whether the store has a stable connection again, after others that it lost too soon. Returns
    /// true once.
    pub(super) fn note_stable(&mut self) -> bool {
        let is_stable = self.unstable && self.attached && self.outlet.is_stable();
        if is_stable {
            self.unstable = false;
            self.announced = true;
        }
        is_stable
    }

    /// Handles a new connection. If `checks_mark`, requests wait until the mark of a later run
    /// would have arrived.
    pub(super) fn connected(&mut self, accepted: Accepted, checks_mark: bool) {
        let session_present = accepted.session_present;
        self.sums.connections += 1;
        self.resumed = session_present;
        if checks_mark {
            self.mark_check = MarkCheck::Subscribing;
        }
        if !session_present {
            // Without the session the broker redelivers no request.
            self.earlier.clear();
            self.hopeless.clear();
        }
    }

    /// The broker has answered the SUBSCRIBE, and this run has published this mark since.
    pub(super) fn subscribed(&mut self, mark: Option<u64>) {
        if self.mark_check == MarkCheck::Subscribing {
            self.mark_check = mark.map_or(MarkCheck::Done, MarkCheck::Publishing);
        }
    }

    /// Whether the broker took this run's mark so long ago that it should have delivered it.
    /// Returns true once for each mark.
    pub(super) fn is_mark_due(&mut self, now: Instant) -> bool {
        let is_over =
            |at: &mut Instant| now.saturating_duration_since(*at) >= limits::BROKER_MARK_WAIT;
        self.mark_taken.take_if(is_over).is_some()
    }

    /// Remembers that the broker does not deliver this run's mark. Returns whether to log it: once,
    /// and not if the broker refused the subscription, because that was logged.
    pub(super) fn note_undelivered_mark(&mut self, topic: &str) -> bool {
        !self.is_refused(topic) && !std::mem::replace(&mut self.mark_undelivered, true)
    }

    /// Remembers whether the broker takes retained messages. Returns whether it does not now, and
    /// did before or was not known.
    pub(super) fn note_retain(&mut self, available: bool) -> bool {
        self.retain_available.replace(available) != Some(available) && !available
    }

    /// Whether the broker takes no retained messages, so that no mark can be left there.
    pub(super) fn lacks_retain(&self) -> bool {
        self.retain_available == Some(false)
    }

    /// Remembers whether the broker granted this subscription. Returns whether it has refused it
    /// now and not before.
    pub(super) fn note_subscription(&mut self, filter: &str, is_granted: bool) -> bool {
        let refused = self.refused_filters.iter().position(|it| it == filter);
        match (is_granted, refused) {
            (false, None) => self.refused_filters.push(filter.to_owned()),
            // The broker's rules may have changed since an earlier connection.
            (true, Some(index)) => _ = self.refused_filters.swap_remove(index),
            _ => {}
        }
        !is_granted && refused.is_none()
    }

    /// Whether the broker refused this subscription last.
    pub(super) fn is_refused(&self, filter: &str) -> bool {
        self.refused_filters.iter().any(|it| it == filter)
    }

    pub(super) fn figures(&self) -> Figures {
        Figures {
            connected: self.outlet.is_up(),
            outstanding: self.outlet.len() as u64,
            outstanding_bytes: self.weights.bytes() as u64,
            unacknowledged: self.outlet.unacknowledged() as u64,
            ..self.sums
        }
    }
}

/// The number of lines suppressed since the last one, unless this line must be suppressed too.
pub(super) fn may_log(throttle: &mut LogThrottle) -> Option<u64> {
    throttle.allow(Instant::now(), limits::BROKER_LOG_PAUSE)
}

/// A hash of the parts of a response that [`Outgoing::is_same`] compares.
fn fingerprint(message: &Message) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for part in [&message.topic, &message.properties, &message.payload] {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    hasher.finalize()
}

#[cfg(test)]
mod tests;
