//! Rebuilds the state from recorded changes, before there is a broker.
//!
//! [`Broker::restore`](crate::Broker::restore) begins with the result. Recovery accepts any bytes
//! and takes no more memory than its input. It knows no clock, and only the limits that keep a
//! start from exceeding the memory ([`Recovery::within`]). The broker applies the other limits and
//! drops expired messages when it starts.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use bytes::Bytes;
use statehouse_protocol::SessionId;

use crate::{
    Limits, Message, QoS, ReasonCode,
    change::{Change, Content, CorruptChanges, Decoder, Part, RecordedWill, Sharing},
    codec::Will,
    router::Subscription,
    session_queue::Shared,
};

/// The sessions and retained messages that the recorded changes describe.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Recovery {
    /// By session number, so that a client's later session comes after an earlier one.
    pub(crate) sessions: BTreeMap<SessionId, SavedSession>,
    pub(crate) retained: BTreeMap<Bytes, SavedRetained>,
    /// Numbers of the sessions whose wills were dropped because of the limit.
    pub(crate) without_will: Vec<SessionId>,
    wills: Room,
    messages: Room,
}

/// A byte count and its limit.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Room {
    bytes: usize,
    bytes_max: usize,
}

impl Default for Room {
    fn default() -> Self {
        Self::of(usize::MAX)
    }
}

impl Room {
    fn of(bytes_max: usize) -> Self {
        Self {
            bytes: 0,
            bytes_max,
        }
    }
}

/// A recovered session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SavedSession {
    pub(crate) client: Arc<str>,
    /// The user who owns the session. `None` if an anonymous client began it, or if no
    /// owner was recorded yet.
    pub(crate) owner: Option<Box<str>>,
    pub(crate) expiry_s: u32,
    pub(crate) will: Option<Will>,
    /// When the connection was lost. `None` if the session was connected.
    pub(crate) detached_ms: Option<u64>,
    pub(crate) subscriptions: HashMap<Bytes, SavedSubscription>,
    pub(crate) messages: BTreeMap<u64, SavedMessage>,
    /// The messages that were dropped because of the limit, and that the log has not removed later.
    /// The broker must record what became of them. Those that were sent at QoS 2 are also in
    /// `messages`, as after a PUBREC: the client may remember the packet id. Bounded by the log and
    /// its snapshot, which hold each of these messages.
    pub(crate) lost: BTreeMap<u64, QoS>,
    pub(crate) received: BTreeMap<u16, ReasonCode>,
}

/// A recovered subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SavedSubscription {
    pub(crate) subscription: Subscription,
    pub(crate) retained_pending: bool,
}

/// A recovered message of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SavedMessage {
    pub(crate) packet_id: Option<u16>,
    /// `None` after a PUBREC.
    pub(crate) content: Option<SavedContent>,
}

/// The content of a message that waits to be sent or acknowledged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SavedContent {
    /// Without its expiry.
    pub(crate) message: Message,
    pub(crate) expires_ms: Option<u64>,
    pub(crate) subscription_ids: Box<[u32]>,
    pub(crate) shared: Option<Box<Shared>>,
}

/// A recovered retained message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SavedRetained {
    /// Without its expiry.
    pub(crate) message: Message,
    pub(crate) expires_ms: Option<u64>,
    pub(crate) from: Option<Arc<str>>,
}

impl Recovery {
    /// Creates a recovery that keeps at most twice the wills and messages of sessions that these
    /// limits allow. Twice, because the pieces of a snapshot are taken at different times and may
    /// together hold more than existed at any one time, and because connected clients may have had
    /// messages beyond the total, within their reserves. These are not added: at a start, all
    /// reserves together may exceed the memory.
    #[must_use]
    pub fn within(limits: &Limits) -> Self {
        Self {
            wills: Room::of(limits.state_bytes_total_max.saturating_mul(2)),
            messages: Room::of(limits.queue_bytes_total_max.saturating_mul(2)),
            ..Self::default()
        }
    }

    /// Ends the connections of all connected sessions at this time, in milliseconds since 1970.
    pub fn end_connections(&mut self, at_ms: u64) {
        for session in self.sessions.values_mut() {
            _ = session.detached_ms.get_or_insert(at_ms);
        }
    }

    /// Applies one batch of changes or one piece of a snapshot, and returns the numbers of the
    /// sessions that it ended. After an error the state is undefined.
    pub fn apply(&mut self, changes: &[u8]) -> Result<Vec<SessionId>, CorruptChanges> {
        let mut ended = Vec::new();
        // The last message with its own bytes. Messages that share these bytes refer to it.
        let mut last: Option<Message> = None;
        for change in Decoder::new(changes)? {
            match change? {
                Change::Session(number, Part::End) => {
                    if let Some(session) = self.sessions.remove(&number) {
                        self.subtract(&session);
                        ended.push(number);
                    }
                }
                Change::Session(
                    number,
                    Part::Begin {
                        client,
                        expiry_s,
                        will,
                    },
                ) => {
                    let session = SavedSession::new(client, expiry_s, saved_will(will)?);
                    self.begin(number, session);
                }
                Change::Session(
                    session,
                    Part::Message {
                        number,
                        content,
                        subscription_ids,
                        shared,
                    },
                ) => {
                    // Must be decoded even without a session, since a later message may share its
                    // bytes.
                    let (message, expires_ms) = saved(&content, &mut last)?;
                    let content = SavedContent {
                        message,
                        expires_ms,
                        subscription_ids: subscription_ids.into(),
                        shared: shared.map(|sharing| Box::new(sharing.into())),
                    };
                    self.add_message(session, number, content);
                }
                Change::Session(number, part) => self.change_session(number, part)?,
                Change::Retained { message, from } => {
                    let (message, expires_ms) = saved(&message, &mut None)?;
                    let topic = message.topic.clone();
                    let retained = SavedRetained {
                        message,
                        expires_ms,
                        from: from.map(Into::into),
                    };
                    self.retained.insert(topic, retained);
                }
                Change::RetainedRemoved(topic) => _ = self.retained.remove(topic),
            }
        }
        Ok(ended)
    }

    fn begin(&mut self, number: SessionId, session: SavedSession) {
        self.wills.bytes += session.will_bytes();
        if let Some(old) = self.sessions.insert(number, session) {
            self.subtract(&old);
        }
        self.drop_wills();
    }

    /// Applies a change that affects only the session itself. If the session is missing, it had
    /// ended when the snapshot was taken, and the record of its end follows.
    fn change_session(&mut self, number: SessionId, part: Part<'_>) -> Result<(), CorruptChanges> {
        if let Some(session) = self.sessions.get_mut(&number) {
            let old = session.will_bytes();
            let removed = session.apply(part)?;
            self.wills.bytes = self.wills.bytes + session.will_bytes() - old;
            self.messages.bytes -= removed;
            self.drop_wills();
        }
        Ok(())
    }

    /// Adds a message to a session, unless the messages of all sessions exceed their limit.
    fn add_message(&mut self, session: SessionId, number: u64, content: SavedContent) {
        let Some(session) = self.sessions.get_mut(&session) else {
            return;
        };
        // The snapshot may hold the message already.
        let old = session.messages.get(&number);
        let old_bytes = old.map_or(0, SavedMessage::bytes);
        let bytes = (self.messages.bytes - old_bytes).saturating_add(content.message.cost_bytes());
        if bytes > self.messages.bytes_max {
            if old.is_none() {
                session.lost.insert(number, content.message.qos);
            }
            return;
        }
        session.lost.remove(&number);
        let saved = SavedMessage {
            packet_id: None,
            content: Some(content),
        };
        session.messages.insert(number, saved);
        self.messages.bytes = bytes;
    }

    /// Subtracts a removed session from the sums.
    pub(crate) fn subtract(&mut self, session: &SavedSession) {
        self.wills.bytes -= session.will_bytes();
        let messages = session.messages.values().map(SavedMessage::bytes);
        self.messages.bytes -= messages.sum::<usize>();
    }

    #[cfg(test)]
    pub(crate) fn held_bytes(&self) -> usize {
        self.wills.bytes + self.messages.bytes
    }

    /// How many messages were dropped because of the limit.
    #[cfg(test)]
    pub(crate) fn lost_messages(&self) -> usize {
        self.sessions.values().map(|it| it.lost.len()).sum()
    }

    /// Drops wills of the oldest sessions while all wills exceed their limit.
    fn drop_wills(&mut self) {
        if self.wills.bytes <= self.wills.bytes_max {
            return;
        }
        // Down to half of the limit, so that the search is rare.
        for (number, session) in &mut self.sessions {
            if self.wills.bytes <= self.wills.bytes_max / 2 {
                return;
            }
            let bytes = session.will_bytes();
            if session.will.take().is_some() {
                self.wills.bytes -= bytes;
                self.without_will.push(*number);
            }
        }
    }

    /// Whether a session with this number exists. Its beginning is recorded before any of its
    /// requests.
    #[must_use]
    pub fn has_session(&self, number: SessionId) -> bool {
        self.sessions.contains_key(&number)
    }

    /// The numbers of the sessions.
    pub fn session_numbers(&self) -> impl Iterator<Item = SessionId> {
        self.sessions.keys().copied()
    }

    /// The number of sessions and of retained messages.
    #[must_use]
    pub fn counts(&self) -> (usize, usize) {
        (self.sessions.len(), self.retained.len())
    }
}

impl SavedSession {
    fn new(client: &str, expiry_s: u32, will: Option<Will>) -> Self {
        Self {
            client: client.into(),
            owner: None,
            expiry_s,
            will,
            detached_ms: None,
            subscriptions: HashMap::new(),
            messages: BTreeMap::new(),
            lost: BTreeMap::new(),
            received: BTreeMap::new(),
        }
    }

    fn will_bytes(&self) -> usize {
        let will = self.will.as_ref();
        will.map_or(0, |will| will.message.cost_bytes())
    }

    /// Applies a change of this session. Returns the bytes of the message that it removed, if any.
    fn apply(&mut self, part: Part<'_>) -> Result<usize, CorruptChanges> {
        let mut removed = None;
        match part {
            Part::Attach { expiry_s, will } => {
                self.expiry_s = expiry_s;
                self.will = saved_will(will)?;
                self.detached_ms = None;
            }
            Part::Owner(user) => self.owner = Some(user.into()),
            Part::Expiry(expiry_s) => self.expiry_s = expiry_s,
            Part::NoWill => self.will = None,
            Part::Detach(at_ms) => self.detached_ms = Some(at_ms),
            Part::Subscribe {
                filter,
                subscription,
                retained_pending,
            } => {
                let saved = SavedSubscription {
                    subscription,
                    retained_pending,
                };
                self.subscriptions
                    .insert(Bytes::copy_from_slice(filter), saved);
            }
            Part::Unsubscribe(filter) => _ = self.subscriptions.remove(filter),
            Part::Sent { number, packet_id } => {
                if let Some(message) = self.messages.get_mut(&number) {
                    message.packet_id = Some(packet_id);
                } else if self.lost.get(&number) == Some(&QoS::ExactlyOnce) {
                    self.messages
                        .insert(number, SavedMessage::released(packet_id));
                }
            }
            Part::Released { number, packet_id } => {
                removed = self
                    .messages
                    .insert(number, SavedMessage::released(packet_id));
                self.lost.remove(&number);
            }
            Part::Removed(number) => {
                removed = self.messages.remove(&number);
                self.lost.remove(&number);
            }
            Part::Received { packet_id, reason } => _ = self.received.insert(packet_id, reason),
            Part::Completed(packet_id) => _ = self.received.remove(&packet_id),
            // [`Recovery::apply`] handles these, since they change the table of sessions.
            Part::Begin { .. } | Part::End | Part::Message { .. } => {}
        }
        Ok(removed.map_or(0, |removed| removed.bytes()))
    }
}

impl From<Sharing<'_>> for Shared {
    fn from(sharing: Sharing<'_>) -> Self {
        Self {
            filter: Bytes::copy_from_slice(sharing.filter),
            qos: sharing.qos,
            retain: sharing.retain,
        }
    }
}

impl SavedMessage {
    /// A message after its PUBREC.
    fn released(packet_id: u16) -> Self {
        Self {
            packet_id: Some(packet_id),
            content: None,
        }
    }

    fn bytes(&self) -> usize {
        let content = self.content.as_ref();
        content.map_or(0, |content| content.message.cost_bytes())
    }
}

fn saved_will(will: Option<RecordedWill<'_>>) -> Result<Option<Will>, CorruptChanges> {
    let Some(will) = will else { return Ok(None) };
    let (message, _) = saved(&will.content, &mut None)?;
    Ok(Some(Will {
        message,
        delay_s: will.delay_s,
        expiry_s: will.expiry_s,
    }))
}

/// Decodes the message of a change and its expiry time.
fn saved(
    content: &Content<'_>,
    last: &mut Option<Message>,
) -> Result<(Message, Option<u64>), CorruptChanges> {
    if let Some(bytes) = &content.bytes {
        *last = Some(Message::copied(
            bytes.topic,
            bytes.payload,
            bytes.properties,
        ));
    }
    let mut message = last.clone().ok_or(CorruptChanges {
        text: "a message shares the bytes of none",
        rest_bytes: 0,
    })?;
    (message.qos, message.retain) = (content.qos, content.retain);
    Ok((message, content.expires_ms))
}
