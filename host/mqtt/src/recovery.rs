//! Changes back into state, before there is a broker.
//!
//! In come batches of changes and pieces of images, in their order; out goes what [`Broker::restore`](crate::Broker::restore)
//! begins with. Takes any bytes, and no more memory than comes in. Knows no limits and no clock: what does not fit, and what
//! has expired, is left out when the broker is made.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use bytes::Bytes;

use crate::{
    Message, ReasonCode,
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
    /// Applies one batch of changes, or one piece of an image; returns the numbers of sessions that ended in it. Where it
    /// fails nothing can be said of the state any more.
    pub fn apply(&mut self, changes: &[u8]) -> Result<Vec<u64>, CorruptChanges> {
        let mut ended = Vec::new();
        // The message that those which share its bytes refer to.
        let mut last: Option<Message> = None;
        for change in Decoder::new(changes)? {
            match change? {
                Change::Session(number, Part::End) => {
                    ended.extend(self.sessions.remove(&number).map(|_| number));
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
                    self.sessions.insert(number, session);
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
                        let saved = SavedMessage {
                            packet_id: None,
                            content: Some(content),
                        };
                        session.messages.insert(message, saved);
                    }
                }
                Change::Session(number, part) => {
                    // Where it is not there, it had ended when the image was taken, and the record of that follows.
                    if let Some(session) = self.sessions.get_mut(&number) {
                        session.apply(part)?;
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
    fn apply(&mut self, part: Part<'_>) -> Result<(), CorruptChanges> {
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
                self.messages.insert(number, saved);
            }
            Part::Gone { number } => _ = self.messages.remove(&number),
            Part::Received { packet_id, reason } => _ = self.received.insert(packet_id, reason),
            Part::Completed { packet_id } => _ = self.received.remove(&packet_id),
            // These are changes of the table of sessions.
            Part::Begin { .. } | Part::End | Part::Message { .. } => {}
        }
        Ok(())
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
