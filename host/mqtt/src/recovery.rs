//! Changes back into state, before there is a broker.
//!
//! In come batches of changes and pieces of images, in their order; out goes what
//! [`Broker::restore`](crate::Broker::restore) begins with. Takes any bytes, and no more memory
//! than comes in. Knows no clock. Of the limits it knows those without which a start could take
//! more memory than there is ([`Recovery::within`]); the broker applies the other limits and drops
//! expired messages when it is made.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use bytes::Bytes;

use crate::{
    Limits, Message, ReasonCode,
    change::{Change, Content, CorruptChanges, Decoder, Part, Testament},
    codec::Will,
    outbox::Shared,
    router::Subscription,
};

/// Sessions and retained messages as their changes say.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Recovery {
    /// By number, so a later session of a client comes behind an earlier one.
    pub(crate) sessions: BTreeMap<u64, SavedSession>,
    pub(crate) retained: BTreeMap<Bytes, SavedRetained>,
    /// Sessions whose wills were dropped for the limit.
    pub(crate) without_will: Vec<u64>,
    /// Messages that were.
    pub(crate) lost_messages: usize,
    wills: Room,
    messages: Room,
}

/// What there may be of something.
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

/// One session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SavedSession {
    pub(crate) client: Arc<str>,
    /// The user; none where nobody in particular began it, or where that was not recorded yet.
    pub(crate) owner: Option<Box<str>>,
    pub(crate) expiry_s: u32,
    pub(crate) will: Option<Will>,
    /// None: connected.
    pub(crate) detached_ms: Option<u64>,
    pub(crate) subscriptions: HashMap<Bytes, Subscription>,
    pub(crate) messages: BTreeMap<u64, SavedMessage>,
    pub(crate) received: BTreeMap<u16, ReasonCode>,
}

/// A message of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SavedMessage {
    pub(crate) packet_id: Option<u16>,
    /// None once a PUBREC came.
    pub(crate) content: Option<SavedContent>,
}

/// A message that waits to be sent or acknowledged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SavedContent {
    /// Without its expiry.
    pub(crate) message: Message,
    pub(crate) expires_ms: Option<u64>,
    pub(crate) subscription_ids: Box<[u32]>,
    pub(crate) shared: Option<Box<Shared>>,
}

/// A retained message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SavedRetained {
    /// Without its expiry.
    pub(crate) message: Message,
    pub(crate) expires_ms: Option<u64>,
    pub(crate) from: Option<Arc<str>>,
}

impl Recovery {
    /// One that keeps no more than twice the wills, and the messages of sessions, that these limits allow. Twice, since the
    /// pieces of an image are of different times, so that all of them together may hold more than there ever was.
    #[must_use]
    pub fn within(limits: &Limits) -> Self {
        Self {
            wills: Room::of(limits.state_bytes_total_max.saturating_mul(2)),
            messages: Room::of(limits.queue_bytes_total_max),
            ..Self::default()
        }
    }

    /// Applies one batch of changes, or one piece of an image; returns the numbers of sessions that ended in it. Where it
    /// fails nothing can be said of the state any more.
    pub fn apply(&mut self, changes: &[u8]) -> Result<Vec<u64>, CorruptChanges> {
        let mut ended = Vec::new();
        // The message that those which share its bytes refer to.
        let mut last: Option<Message> = None;
        for change in Decoder::new(changes)? {
            match change? {
                Change::Session(number, Part::End) => {
                    if let Some(session) = self.sessions.remove(&number) {
                        self.forget(&session);
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
                    let session = SavedSession {
                        client: client.into(),
                        owner: None,
                        expiry_s,
                        will: saved_will(will)?,
                        detached_ms: None,
                        subscriptions: HashMap::new(),
                        messages: BTreeMap::new(),
                        received: BTreeMap::new(),
                    };
                    self.wills.bytes += session.will_bytes();
                    if let Some(old) = self.sessions.insert(number, session) {
                        self.forget(&old);
                    }
                    self.drop_wills();
                }
                Change::Session(
                    number,
                    Part::Message {
                        number: message,
                        content,
                        subscription_ids,
                        shared,
                    },
                ) => {
                    let (content, expires_ms) = saved(&content, &mut last)?;
                    let content = SavedContent {
                        message: content,
                        expires_ms,
                        subscription_ids: subscription_ids.into(),
                        shared: shared.map(|sharing| {
                            Box::new(Shared {
                                filter: Bytes::copy_from_slice(sharing.filter),
                                qos: sharing.qos,
                                retain: sharing.retain,
                            })
                        }),
                    };
                    // Read in any case: a message after it may share its bytes.
                    if let Some(session) = self.sessions.get_mut(&number) {
                        let bytes = content.message.cost_bytes();
                        if self.messages.bytes.saturating_add(bytes) > self.messages.bytes_max {
                            self.lost_messages += 1;
                            continue;
                        }
                        let saved = SavedMessage {
                            packet_id: None,
                            content: Some(content),
                        };
                        let old = session.messages.insert(message, saved);
                        let old = old.map_or(0, |old| old.bytes());
                        self.messages.bytes = self.messages.bytes + bytes - old;
                    }
                }
                Change::Session(number, part) => {
                    // Where it is not there, it had ended when the image was taken, and the record of that follows.
                    if let Some(session) = self.sessions.get_mut(&number) {
                        let old = session.will_bytes();
                        let gone = session.apply(part)?;
                        self.wills.bytes = self.wills.bytes + session.will_bytes() - old;
                        self.messages.bytes -= gone;
                        self.drop_wills();
                    }
                }
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
                Change::Forgotten { topic } => _ = self.retained.remove(topic),
            }
        }
        Ok(ended)
    }

    pub(crate) fn forget(&mut self, session: &SavedSession) {
        self.wills.bytes -= session.will_bytes();
        let messages = session.messages.values().map(SavedMessage::bytes);
        self.messages.bytes -= messages.sum::<usize>();
    }

    #[cfg(test)]
    pub(crate) fn held_bytes(&self) -> usize {
        self.wills.bytes + self.messages.bytes
    }

    /// Drops wills of the oldest sessions while there are too many.
    fn drop_wills(&mut self) {
        if self.wills.bytes <= self.wills.bytes_max {
            return;
        }
        // Down to half, so that few wills that come lead to a search.
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

    /// Whether there is a session of this number by now. Its beginning is recorded before anything that it asks for.
    #[must_use]
    pub fn has_session(&self, number: u64) -> bool {
        self.sessions.contains_key(&number)
    }

    /// The numbers of the sessions.
    pub fn session_numbers(&self) -> impl Iterator<Item = u64> {
        self.sessions.keys().copied()
    }

    /// How many sessions and retained messages there are.
    #[must_use]
    pub fn counts(&self) -> (usize, usize) {
        (self.sessions.len(), self.retained.len())
    }
}

impl SavedSession {
    fn will_bytes(&self) -> usize {
        let will = self.will.as_ref();
        will.map_or(0, |will| will.message.cost_bytes())
    }

    /// Returns the bytes of a message that is not needed any more.
    fn apply(&mut self, part: Part<'_>) -> Result<usize, CorruptChanges> {
        let mut gone = None;
        match part {
            Part::Attach { expiry_s, will } => {
                self.expiry_s = expiry_s;
                self.will = saved_will(will)?;
                self.detached_ms = None;
            }
            Part::Owner { user } => self.owner = Some(user.into()),
            Part::Expiry(expiry_s) => self.expiry_s = expiry_s,
            Part::NoWill => self.will = None,
            Part::Detach { at_ms } => self.detached_ms = Some(at_ms),
            Part::Subscribe {
                filter,
                subscription,
            } => {
                self.subscriptions
                    .insert(Bytes::copy_from_slice(filter), subscription);
            }
            Part::Unsubscribe { filter } => _ = self.subscriptions.remove(filter),
            Part::Sent { number, packet_id } => {
                if let Some(message) = self.messages.get_mut(&number) {
                    message.packet_id = Some(packet_id);
                }
            }
            Part::Released { number, packet_id } => {
                let saved = SavedMessage {
                    packet_id: Some(packet_id),
                    content: None,
                };
                gone = self.messages.insert(number, saved);
            }
            Part::Gone { number } => gone = self.messages.remove(&number),
            Part::Received { packet_id, reason } => _ = self.received.insert(packet_id, reason),
            Part::Completed { packet_id } => _ = self.received.remove(&packet_id),
            // These are changes of the table of sessions.
            Part::Begin { .. } | Part::End | Part::Message { .. } => {}
        }
        Ok(gone.map_or(0, |gone| gone.bytes()))
    }
}

impl SavedMessage {
    fn bytes(&self) -> usize {
        let content = self.content.as_ref();
        content.map_or(0, |content| content.message.cost_bytes())
    }
}

fn saved_will(will: Option<Testament<'_>>) -> Result<Option<Will>, CorruptChanges> {
    let Some(will) = will else { return Ok(None) };
    let (message, _) = saved(&will.content, &mut None)?;
    Ok(Some(Will {
        message,
        delay_s: will.delay_s,
        expiry_s: will.expiry_s,
    }))
}

/// The message of a change, and when it expires.
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
