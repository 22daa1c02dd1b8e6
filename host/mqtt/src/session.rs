//! The state of one client that outlives its connections (section 4.1).
//!
//! Every change of what a session has to remember is a method of this file or of outbox.rs.

use std::{
    collections::HashMap,
    sync::{Arc, atomic::AtomicUsize},
    time::Instant,
};

use bytes::Bytes;

use crate::{
    ReasonCode,
    codec::{Violation, Will},
    link::{Link, Received},
    outbox::Outbox,
    router::{Subscription, cost_bytes},
};

/// One session.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) client: Arc<str>,
    /// Session Expiry Interval: how long it lives without a connection.
    pub(crate) expiry_s: u32,
    subscriptions: HashMap<Bytes, Subscription>,
    /// What they cost the router, in bytes.
    subscription_bytes: usize,
    /// How many of these hold a wildcard.
    wildcards: usize,
    pub(crate) outbox: Outbox,
    pub(crate) received: HashMap<u16, Received>,
    pub(crate) will: Option<Will>,
    /// When the will is to be sent, once the connection is lost.
    pub(crate) will_due: Option<Instant>,
    /// When it ends, while there is no connection.
    pub(crate) ends: Option<Instant>,
    /// The entry of this session among the core's deadlines.
    pub(crate) deadline: Option<Instant>,
    pub(crate) link: Option<Link>,
    /// When its full queue was last searched for expired messages.
    pub(crate) searched: Option<Instant>,
    /// Whether a dropped message was logged since the last connection.
    pub(crate) drop_logged: bool,
}

/// What is to be done with a QoS 2 PUBLISH.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// Seen for the first time; the sequence of its PUBREC.
    New(u64),
    /// A repetition: answered, or to be answered with the original.
    Repeated,
}

impl Session {
    pub(crate) fn new(client: Arc<str>, total_bytes: Arc<AtomicUsize>) -> Self {
        Self {
            client,
            expiry_s: 0,
            subscriptions: HashMap::new(),
            subscription_bytes: 0,
            wildcards: 0,
            outbox: Outbox::new(total_bytes),
            received: HashMap::new(),
            will: None,
            will_due: None,
            ends: None,
            deadline: None,
            link: None,
            searched: None,
            drop_logged: false,
        }
    }

    /// Adds or replaces a subscription. True where it is new.
    pub(crate) fn subscribe(&mut self, filter: &Bytes, subscription: Subscription) -> bool {
        let new = self
            .subscriptions
            .insert(filter.clone(), subscription)
            .is_none();
        self.wildcards += usize::from(new && crate::topic::has_wildcard(filter));
        self.subscription_bytes += if new { cost_bytes(filter) } else { 0 };
        new
    }

    /// Removes a subscription. False where there was none.
    pub(crate) fn unsubscribe(&mut self, filter: &Bytes) -> bool {
        let existed = self.subscriptions.remove(filter).is_some();
        self.wildcards -= usize::from(existed && crate::topic::has_wildcard(filter));
        self.subscription_bytes -= if existed { cost_bytes(filter) } else { 0 };
        existed
    }

    pub(crate) fn subscription(&self, filter: &[u8]) -> Option<Subscription> {
        self.subscriptions.get(filter).copied()
    }

    pub(crate) fn filters(&self) -> impl Iterator<Item = &Bytes> {
        self.subscriptions.keys()
    }

    /// What all its subscriptions cost.
    pub(crate) fn subscription_bytes(&self) -> usize {
        self.subscription_bytes
    }

    pub(crate) fn subscription_count(&self) -> usize {
        self.subscriptions.len()
    }

    pub(crate) fn has_wildcards(&self) -> bool {
        self.wildcards > 0
    }

    /// What sending needs, side by side, while there is a connection.
    pub(crate) fn sending(
        &mut self,
    ) -> Option<(&mut Link, &mut Outbox, &mut HashMap<u16, Received>)> {
        Some((self.link.as_mut()?, &mut self.outbox, &mut self.received))
    }

    /// A QoS 2 PUBLISH over the current connection.
    pub(crate) fn receive(&mut self, packet_id: u16) -> Result<Arrival, Violation> {
        let Some(link) = &mut self.link else {
            return Ok(Arrival::Repeated);
        };
        let after = self.outbox.progress().0;
        // Unfinished exchanges of earlier connections do not count against the Receive Maximum, but they are kept.
        let full = self.received.len() >= 2 * link.receive_max;
        match self.received.get_mut(&packet_id) {
            None if full => {
                let text = "too many QoS 2 messages wait for their PUBREL";
                Err(Violation {
                    reason: ReasonCode::RECEIVE_MAXIMUM_EXCEEDED,
                    text,
                })
            }
            None => {
                let sequence = link.owe(packet_id, true)?;
                let owed = (link.connection, sequence);
                self.received.insert(
                    packet_id,
                    Received {
                        asked: owed,
                        owed,
                        answer: None,
                        counted_by: 0,
                    },
                );
                Ok(Arrival::New(sequence))
            }
            Some(entry) => {
                match entry.answer {
                    Some(reason) => {
                        let sequence = link.owe(packet_id, true)?;
                        link.answer(sequence, reason, None, after);
                    }
                    // The PUBREC that this connection owes anyway answers both.
                    None if entry.owed.0 == link.connection => {}
                    None => entry.owed = (link.connection, link.owe(packet_id, true)?),
                }
                Ok(Arrival::Repeated)
            }
        }
    }

    /// The answer to a QoS 2 PUBLISH is known. A failure frees its identifier (section 4.3.3).
    pub(crate) fn settle_received(
        &mut self,
        packet_id: u16,
        asked: (u64, u64),
        reason: ReasonCode,
        text: Option<&str>,
    ) {
        let Some(entry) = self.received.get_mut(&packet_id) else {
            return;
        };
        if entry.asked != asked || entry.answer.is_some() {
            return;
        }
        let owed = entry.owed;
        entry.answer = Some(reason);
        if reason.is_error() {
            self.received.remove(&packet_id);
        }
        self.answer(owed, reason, text);
    }

    /// Fills in an acknowledgement that the current connection owes; nothing where it is another's.
    pub(crate) fn answer(&mut self, owed: (u64, u64), reason: ReasonCode, text: Option<&str>) {
        let after = self.outbox.progress().0;
        if let Some(link) = self.link.as_mut().filter(|link| link.connection == owed.0) {
            link.answer(owed.1, reason, text, after);
        }
    }

    /// A PUBREL came. False where no answered message has that identifier.
    pub(crate) fn release_received(&mut self, packet_id: u16) -> bool {
        if self
            .received
            .get(&packet_id)
            .is_none_or(|entry| entry.answer.is_none())
        {
            return false;
        }
        if let (Some(entry), Some(link)) = (self.received.remove(&packet_id), &mut self.link)
            && entry.counted_by == link.connection
        {
            link.unreleased -= 1;
        }
        true
    }
}
