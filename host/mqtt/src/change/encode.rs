//! Encodes changes.

use bytes::Bytes;
use statehouse_protocol::SessionId;

use super::{
    AS_PUBLISHED, Change, Content, EXPIRES, FORMAT, HAS_ID, NO_LOCAL, Part, RETAIN,
    RETAINED_PENDING, RecordedWill, SAME_BYTES, Sharing, tag,
};
use crate::{
    Message, clock::Clock, limits::BATCH_BYTES, router::Subscription, session_queue::Queued,
};

/// Collects the changes of one batch.
#[derive(Debug, Default)]
pub(crate) struct Encoder {
    bytes: Vec<u8>,
    /// The last message written. Holding it keeps its allocation in use, so that equal addresses
    /// mean equal bytes.
    last: Option<Message>,
}

impl Encoder {
    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Returns the batch and empties the encoder.
    pub(crate) fn take(&mut self) -> Vec<u8> {
        self.last = None;
        std::mem::take(&mut self.bytes)
    }

    /// The batch, to be read before [`clear`](Self::clear).
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Empties the encoder and reuses its memory for the next batch.
    pub(crate) fn clear(&mut self) {
        self.last = None;
        self.bytes.clear();
        self.bytes.shrink_to(BATCH_BYTES);
    }

    /// Writes a message of a session. Bytes that go to many sessions are written once.
    pub(crate) fn message(
        &mut self,
        session: SessionId,
        number: u64,
        queued: &Queued,
        clock: &Clock,
    ) {
        let message = &queued.message;
        let mut content = Content::new(message, clock);
        if self.last.as_ref().is_some_and(|last| shares(last, message)) {
            content.bytes = None;
        } else {
            self.last = Some(message.clone());
        }
        self.write(&Change::Session(
            session,
            Part::Message {
                number,
                content,
                subscription_ids: (&*queued.subscription_ids).into(),
                shared: queued.shared.as_deref().map(|shared| Sharing {
                    filter: &shared.filter,
                    qos: shared.qos,
                    retain: shared.retain,
                }),
            },
        ));
    }

    pub(crate) fn write(&mut self, change: &Change<'_>) {
        let out = &mut self.bytes;
        if out.is_empty() {
            out.push(FORMAT);
        }
        match change {
            Change::Session(session, part) => write_part(out, *session, part),
            Change::Retained { message, from } => {
                out.push(tag::RETAINED);
                write_content(out, message);
                // Empty if there is none, since no client identifier is empty.
                write_bytes(out, from.unwrap_or_default().as_bytes());
            }
            Change::RetainedRemoved(topic) => {
                out.push(tag::RETAINED_REMOVED);
                write_bytes(out, topic);
            }
        }
    }
}

fn shares(a: &Message, b: &Message) -> bool {
    let same =
        |a: &Bytes, b: &Bytes| a.len() == b.len() && (a.is_empty() || a.as_ptr() == b.as_ptr());
    same(&a.topic, &b.topic) && same(&a.payload, &b.payload) && same(&a.properties, &b.properties)
}

fn write_part(out: &mut Vec<u8>, session: SessionId, part: &Part<'_>) {
    out.push(part.tag());
    // Run and number within it separately, since both are small.
    write_number(out, session.0 >> 32);
    write_number(out, session.0 & u64::from(u32::MAX));
    match part {
        Part::Begin {
            client,
            expiry_s,
            will,
        } => {
            write_bytes(out, client.as_bytes());
            write_number(out, (*expiry_s).into());
            write_will(out, will.as_ref());
        }
        Part::Attach { expiry_s, will } => {
            write_number(out, (*expiry_s).into());
            write_will(out, will.as_ref());
        }
        Part::Owner(user) => write_bytes(out, user.as_bytes()),
        Part::Expiry(expiry_s) => write_number(out, (*expiry_s).into()),
        Part::NoWill | Part::End => {}
        Part::Detach(at_ms) => write_number(out, *at_ms),
        Part::Subscribe {
            filter,
            subscription,
            retained_pending,
        } => write_subscription(out, filter, subscription, *retained_pending),
        Part::Unsubscribe(filter) => write_bytes(out, filter),
        Part::Message {
            number,
            content,
            subscription_ids,
            shared,
        } => {
            write_number(out, *number);
            write_content(out, content);
            write_number(out, subscription_ids.len() as u64);
            for id in &**subscription_ids {
                write_number(out, (*id).into());
            }
            if let Some(shared) = shared {
                out.push(shared.qos as u8 | if shared.retain { RETAIN } else { 0 });
                write_bytes(out, shared.filter);
            }
        }
        Part::Sent { number, packet_id } | Part::Released { number, packet_id } => {
            write_number(out, *number);
            write_number(out, (*packet_id).into());
        }
        Part::Removed(number) => write_number(out, *number),
        Part::Received { packet_id, reason } => {
            write_number(out, (*packet_id).into());
            out.push(reason.0);
        }
        Part::Completed(packet_id) => write_number(out, (*packet_id).into()),
    }
}

fn write_subscription(
    out: &mut Vec<u8>,
    filter: &[u8],
    subscription: &Subscription,
    retained_pending: bool,
) {
    let flag = |set: bool, bit: u8| if set { bit } else { 0 };
    out.push(
        subscription.qos as u8
            | flag(subscription.no_local, NO_LOCAL)
            | flag(subscription.retain_as_published, AS_PUBLISHED)
            | flag(subscription.id.is_some(), HAS_ID)
            | flag(retained_pending, RETAINED_PENDING),
    );
    write_bytes(out, filter);
    if let Some(id) = subscription.id {
        write_number(out, id.into());
    }
}

fn write_will(out: &mut Vec<u8>, will: Option<&RecordedWill<'_>>) {
    // The first byte says whether there is a will and whether it expires.
    out.push(will.map_or(0, |will| 1 + u8::from(will.expiry_s.is_some())));
    if let Some(will) = will {
        write_content(out, &will.content);
        write_number(out, will.delay_s.into());
        if let Some(expiry_s) = will.expiry_s {
            write_number(out, expiry_s.into());
        }
    }
}

fn write_content(out: &mut Vec<u8>, content: &Content<'_>) {
    let mut flags = content.qos as u8;
    flags |= if content.retain { RETAIN } else { 0 };
    flags |= content.expires_ms.map_or(0, |_| EXPIRES);
    flags |= content.bytes.map_or(SAME_BYTES, |_| 0);
    out.push(flags);
    if let Some(expires_ms) = content.expires_ms {
        write_number(out, expires_ms);
    }
    if let Some(bytes) = &content.bytes {
        write_bytes(out, bytes.topic);
        write_bytes(out, bytes.payload);
        write_bytes(out, bytes.properties);
    }
}

fn write_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    write_number(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// Seven bits per byte, the lowest first.
fn write_number(out: &mut Vec<u8>, number: u64) {
    let mut rest = number;
    while rest > 0x7F {
        out.push(rest as u8 | 0x80);
        rest >>= 7;
    }
    out.push(rest as u8);
}
