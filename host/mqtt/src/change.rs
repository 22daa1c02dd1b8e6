//! Changes of durable state as bytes, and back.
//!
//! In come changes of sessions and retained messages; out goes a batch of them that an embedder keeps as one opaque
//! record, and the other way round. Every change is an absolute write of a register (message 7 of session 5 *is* this, or
//! is gone), so that one that is applied again over a later state is overwritten by those that follow it. A batch begins with
//! the version of this format. Reading is total: any bytes are a batch or a fault, and nothing is allocated that did not
//! come.

use std::borrow::Cow;

use bytes::Bytes;
use thiserror::Error;

use crate::{Message, QoS, ReasonCode, clock::Clock, codec::Will, router::Subscription};

/// The first byte of every batch.
const FORMAT: u8 = 1;

/// Why changes could not be applied: they are not what this broker has written.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{text}, {rest_bytes} bytes before the end of the changes")]
pub struct CorruptChanges {
    pub(crate) text: &'static str,
    pub(crate) rest_bytes: usize,
}

/// One change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Change<'a> {
    Session(u64, Part<'a>),
    /// The retained message of its topic is this.
    Retained {
        message: Content<'a>,
        from: Option<&'a str>,
    },
    /// A topic has no retained message.
    Forgotten {
        topic: &'a [u8],
    },
}

/// A change of one session. Those of a session that is not there mean nothing: it has ended since.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Part<'a> {
    /// Begins afresh, connected.
    Begin {
        client: &'a str,
        expiry_s: u32,
        will: Option<Testament<'a>>,
    },
    /// Has a connection again.
    Attach {
        expiry_s: u32,
        will: Option<Testament<'a>>,
    },
    Expiry(u32),
    /// The will is sent or not wanted any more.
    NoWill,
    /// Has no connection since this wall time.
    Detach {
        at_ms: u64,
    },
    End,
    Subscribe {
        filter: &'a [u8],
        subscription: Subscription,
    },
    Unsubscribe {
        filter: &'a [u8],
    },
    /// A message that waits.
    Message {
        number: u64,
        content: Content<'a>,
        subscription_ids: Cow<'a, [u32]>,
    },
    /// It was sent under this identifier.
    Sent {
        number: u64,
        packet_id: u16,
    },
    /// Its PUBREC came: what remains is its identifier.
    Released {
        number: u64,
        packet_id: u16,
    },
    /// It is acknowledged, or will never be sent.
    Gone {
        number: u64,
    },
    /// A QoS 2 PUBLISH of the client has this answer.
    Received {
        packet_id: u16,
        reason: ReasonCode,
    },
    /// Its PUBREL came.
    Completed {
        packet_id: u16,
    },
}

/// A message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Content<'a> {
    pub(crate) qos: QoS,
    pub(crate) retain: bool,
    /// Wall time.
    pub(crate) expires_ms: Option<u64>,
    /// None: those of the message before it in this batch, which went to many.
    pub(crate) bytes: Option<ContentBytes<'a>>,
}

/// Topic, payload and properties.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ContentBytes<'a> {
    pub(crate) topic: &'a [u8],
    pub(crate) payload: &'a [u8],
    pub(crate) properties: &'a [u8],
}

/// A will.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Testament<'a> {
    pub(crate) content: Content<'a>,
    pub(crate) delay_s: u32,
    pub(crate) expiry_s: Option<u32>,
}

impl<'a> Content<'a> {
    pub(crate) fn new(message: &'a Message, clock: &Clock) -> Self {
        Self {
            qos: message.qos,
            retain: message.retain,
            expires_ms: message.expires.map(|at| clock.wall_ms(at)),
            bytes: Some(ContentBytes {
                topic: &message.topic,
                payload: &message.payload,
                properties: &message.properties,
            }),
        }
    }
}

impl<'a> Testament<'a> {
    pub(crate) fn new(will: &'a Will, clock: &Clock) -> Self {
        Self {
            content: Content::new(&will.message, clock),
            delay_s: will.delay_s,
            expiry_s: will.expiry_s,
        }
    }
}

mod tag {
    pub(super) const BEGIN: u8 = 1;
    pub(super) const ATTACH: u8 = 2;
    pub(super) const EXPIRY: u8 = 3;
    pub(super) const NO_WILL: u8 = 4;
    pub(super) const DETACH: u8 = 5;
    pub(super) const END: u8 = 6;
    pub(super) const SUBSCRIBE: u8 = 7;
    pub(super) const UNSUBSCRIBE: u8 = 8;
    pub(super) const MESSAGE: u8 = 9;
    pub(super) const SENT: u8 = 10;
    pub(super) const RELEASED: u8 = 11;
    pub(super) const GONE: u8 = 12;
    pub(super) const RECEIVED: u8 = 13;
    pub(super) const COMPLETED: u8 = 14;
    pub(super) const RETAINED: u8 = 32;
    pub(super) const FORGOTTEN: u8 = 33;
}

// Bits of the byte before a message; the two lowest are its QoS.
const RETAIN: u8 = 4;
const EXPIRES: u8 = 8;
const SAME_BYTES: u8 = 16;

// Bits of the byte before a subscription; the two lowest are its QoS.
const NO_LOCAL: u8 = 4;
const AS_PUBLISHED: u8 = 8;
const HAS_ID: u8 = 16;

/// Collects the changes of one batch.
#[derive(Debug, Default)]
pub(crate) struct Encoder {
    bytes: Vec<u8>,
    /// The last message written. Held, so that its bytes are where they are for as long as others are compared with them.
    last: Option<Message>,
}

impl Encoder {
    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The batch; the encoder is empty again.
    pub(crate) fn take(&mut self) -> Vec<u8> {
        self.last = None;
        std::mem::take(&mut self.bytes)
    }

    /// The batch, to be looked at before [`clear`](Self::clear).
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Empty again, with its memory for the next batch.
    pub(crate) fn clear(&mut self) {
        self.last = None;
        self.bytes.clear();
    }

    /// A message of a session. The same bytes to many sessions are written once.
    pub(crate) fn message(
        &mut self,
        session: u64,
        number: u64,
        message: &Message,
        subscription_ids: &[u32],
        clock: &Clock,
    ) {
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
                subscription_ids: subscription_ids.into(),
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
                // No client identifier is empty.
                write_bytes(out, from.unwrap_or_default().as_bytes());
            }
            Change::Forgotten { topic } => {
                out.push(tag::FORGOTTEN);
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

fn write_part(out: &mut Vec<u8>, session: u64, part: &Part<'_>) {
    let mut head = |tag: u8| {
        out.push(tag);
        // Run and number in it apart: two small numbers.
        write_number(out, session >> 32);
        write_number(out, session & u64::from(u32::MAX));
    };
    match part {
        Part::Begin {
            client,
            expiry_s,
            will,
        } => {
            head(tag::BEGIN);
            write_bytes(out, client.as_bytes());
            write_number(out, (*expiry_s).into());
            write_will(out, will.as_ref());
        }
        Part::Attach { expiry_s, will } => {
            head(tag::ATTACH);
            write_number(out, (*expiry_s).into());
            write_will(out, will.as_ref());
        }
        Part::Expiry(expiry_s) => {
            head(tag::EXPIRY);
            write_number(out, (*expiry_s).into());
        }
        Part::NoWill => head(tag::NO_WILL),
        Part::Detach { at_ms } => {
            head(tag::DETACH);
            write_number(out, *at_ms);
        }
        Part::End => head(tag::END),
        Part::Subscribe {
            filter,
            subscription,
        } => {
            head(tag::SUBSCRIBE);
            let flag = |set: bool, bit: u8| if set { bit } else { 0 };
            out.push(
                subscription.qos as u8
                    | flag(subscription.no_local, NO_LOCAL)
                    | flag(subscription.retain_as_published, AS_PUBLISHED)
                    | flag(subscription.id.is_some(), HAS_ID),
            );
            write_bytes(out, filter);
            if let Some(id) = subscription.id {
                write_number(out, id.into());
            }
        }
        Part::Unsubscribe { filter } => {
            head(tag::UNSUBSCRIBE);
            write_bytes(out, filter);
        }
        Part::Message {
            number,
            content,
            subscription_ids,
        } => {
            head(tag::MESSAGE);
            write_number(out, *number);
            write_content(out, content);
            write_number(out, subscription_ids.len() as u64);
            for id in &**subscription_ids {
                write_number(out, (*id).into());
            }
        }
        Part::Sent { number, packet_id } => {
            head(tag::SENT);
            write_number(out, *number);
            write_number(out, (*packet_id).into());
        }
        Part::Released { number, packet_id } => {
            head(tag::RELEASED);
            write_number(out, *number);
            write_number(out, (*packet_id).into());
        }
        Part::Gone { number } => {
            head(tag::GONE);
            write_number(out, *number);
        }
        Part::Received { packet_id, reason } => {
            head(tag::RECEIVED);
            write_number(out, (*packet_id).into());
            out.push(reason.0);
        }
        Part::Completed { packet_id } => {
            head(tag::COMPLETED);
            write_number(out, (*packet_id).into());
        }
    }
}

fn write_will(out: &mut Vec<u8>, will: Option<&Testament<'_>>) {
    // The presence of a will, and of its expiry.
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

/// Seven bits in a byte, the lowest first.
fn write_number(out: &mut Vec<u8>, number: u64) {
    let mut rest = number;
    while rest > 0x7F {
        out.push(rest as u8 | 0x80);
        rest >>= 7;
    }
    out.push(rest as u8);
}

/// Reads the changes of one batch; ends after the first fault.
#[derive(Debug)]
pub(crate) struct Decoder<'a> {
    rest: &'a [u8],
    failed: bool,
}

impl<'a> Decoder<'a> {
    pub(crate) fn new(changes: &'a [u8]) -> Result<Self, CorruptChanges> {
        match changes.split_first() {
            Some((&FORMAT, rest)) => Ok(Self {
                rest,
                failed: false,
            }),
            Some(_) => Err(CorruptChanges {
                text: "changes of an unknown format",
                rest_bytes: changes.len(),
            }),
            None => Err(CorruptChanges {
                text: "no changes",
                rest_bytes: 0,
            }),
        }
    }
}

impl<'a> Iterator for Decoder<'a> {
    type Item = Result<Change<'a>, CorruptChanges>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() || self.failed {
            return None;
        }
        let change = read_change(&mut self.rest).map_err(|text| CorruptChanges {
            text,
            rest_bytes: self.rest.len(),
        });
        self.failed = change.is_err();
        Some(change)
    }
}

type Read<T> = Result<T, &'static str>;

const SHORT: &str = "the changes end within a change";

fn read_change<'a>(rest: &mut &'a [u8]) -> Read<Change<'a>> {
    match read_byte(rest)? {
        tag::RETAINED => {
            let message = read_content(rest)?;
            let from = read_text(rest)?;
            let from = (!from.is_empty()).then_some(from);
            Ok(Change::Retained { message, from })
        }
        tag::FORGOTTEN => Ok(Change::Forgotten {
            topic: read_topic(rest)?,
        }),
        tag => {
            let run = u64::from(read_u32(rest)?);
            let session = run << 32 | u64::from(read_u32(rest)?);
            Ok(Change::Session(session, read_part(tag, rest)?))
        }
    }
}

fn read_part<'a>(tag: u8, rest: &mut &'a [u8]) -> Read<Part<'a>> {
    Ok(match tag {
        tag::BEGIN => Part::Begin {
            client: read_text(rest)?,
            expiry_s: read_u32(rest)?,
            will: read_will(rest)?,
        },
        tag::ATTACH => Part::Attach {
            expiry_s: read_u32(rest)?,
            will: read_will(rest)?,
        },
        tag::EXPIRY => Part::Expiry(read_u32(rest)?),
        tag::NO_WILL => Part::NoWill,
        tag::DETACH => Part::Detach {
            at_ms: read_number(rest)?,
        },
        tag::END => Part::End,
        tag::SUBSCRIBE => {
            let flags = read_byte(rest)?;
            if flags & !(3 | NO_LOCAL | AS_PUBLISHED | HAS_ID) != 0 {
                return Err("a subscription has unknown options");
            }
            let filter = read_topic(rest)?;
            let id = if flags & HAS_ID != 0 {
                Some(read_subscription_id(rest)?)
            } else {
                None
            };
            Part::Subscribe {
                filter,
                subscription: Subscription {
                    qos: read_qos(flags)?,
                    no_local: flags & NO_LOCAL != 0,
                    retain_as_published: flags & AS_PUBLISHED != 0,
                    id,
                },
            }
        }
        tag::UNSUBSCRIBE => Part::Unsubscribe {
            filter: read_topic(rest)?,
        },
        tag::MESSAGE => {
            let number = read_number(rest)?;
            let content = read_content(rest)?;
            let count = read_number(rest)?;
            let mut subscription_ids = Vec::new();
            // Each takes a byte at least, so the loop ends with the bytes.
            for _ in 0..count {
                subscription_ids.push(read_subscription_id(rest)?);
            }
            Part::Message {
                number,
                content,
                subscription_ids: subscription_ids.into(),
            }
        }
        tag::SENT => Part::Sent {
            number: read_number(rest)?,
            packet_id: read_packet_id(rest)?,
        },
        tag::RELEASED => Part::Released {
            number: read_number(rest)?,
            packet_id: read_packet_id(rest)?,
        },
        tag::GONE => Part::Gone {
            number: read_number(rest)?,
        },
        tag::RECEIVED => Part::Received {
            packet_id: read_packet_id(rest)?,
            reason: ReasonCode(read_byte(rest)?),
        },
        tag::COMPLETED => Part::Completed {
            packet_id: read_packet_id(rest)?,
        },
        _ => return Err("a change of an unknown kind"),
    })
}

fn read_will<'a>(rest: &mut &'a [u8]) -> Read<Option<Testament<'a>>> {
    let presence = read_byte(rest)?;
    if presence > 2 {
        return Err("a will of an unknown form");
    }
    if presence == 0 {
        return Ok(None);
    }
    let content = read_content(rest)?;
    if content.bytes.is_none() {
        return Err("a will without bytes of its own");
    }
    let delay_s = read_u32(rest)?;
    let expiry_s = if presence == 2 {
        Some(read_u32(rest)?)
    } else {
        None
    };
    Ok(Some(Testament {
        content,
        delay_s,
        expiry_s,
    }))
}

fn read_content<'a>(rest: &mut &'a [u8]) -> Read<Content<'a>> {
    let flags = read_byte(rest)?;
    if flags & !(3 | RETAIN | EXPIRES | SAME_BYTES) != 0 {
        return Err("a message has unknown options");
    }
    let expires_ms = if flags & EXPIRES != 0 {
        Some(read_number(rest)?)
    } else {
        None
    };
    let bytes = if flags & SAME_BYTES != 0 {
        None
    } else {
        Some(ContentBytes {
            topic: read_topic(rest)?,
            payload: read_bytes(rest)?,
            properties: read_bytes(rest)?,
        })
    };
    Ok(Content {
        qos: read_qos(flags)?,
        retain: flags & RETAIN != 0,
        expires_ms,
        bytes,
    })
}

fn read_qos(flags: u8) -> Read<QoS> {
    QoS::from_bits(flags & 3).ok_or("QoS 3 does not exist")
}

/// At most 268 435 455 and never 0: four bytes of seven bits on the wire (section 3.8.2.1.2).
fn read_subscription_id(rest: &mut &[u8]) -> Read<u32> {
    match read_u32(rest)? {
        0 | crate::limits::SUBSCRIPTION_ID_OVER.. => {
            Err("a subscription identifier is out of range")
        }
        id => Ok(id),
    }
}

fn read_packet_id(rest: &mut &[u8]) -> Read<u16> {
    match u16::try_from(read_number(rest)?) {
        Ok(0) | Err(_) => Err("a packet identifier is out of range"),
        Ok(packet_id) => Ok(packet_id),
    }
}

fn read_text<'a>(rest: &mut &'a [u8]) -> Read<&'a str> {
    std::str::from_utf8(read_bytes(rest)?).map_err(|_| "a client identifier is not UTF-8")
}

/// A topic name or filter: it has two bytes of length on the wire.
fn read_topic<'a>(rest: &mut &'a [u8]) -> Read<&'a [u8]> {
    let topic = read_bytes(rest)?;
    if topic.len() > usize::from(u16::MAX) {
        return Err("a topic is too long");
    }
    Ok(topic)
}

fn read_bytes<'a>(rest: &mut &'a [u8]) -> Read<&'a [u8]> {
    let length = read_number(rest)?;
    let (bytes, behind) = usize::try_from(length)
        .ok()
        .and_then(|length| rest.split_at_checked(length))
        .ok_or(SHORT)?;
    *rest = behind;
    Ok(bytes)
}

fn read_byte(rest: &mut &[u8]) -> Read<u8> {
    let (first, behind) = rest.split_first().ok_or(SHORT)?;
    *rest = behind;
    Ok(*first)
}

fn read_u32(rest: &mut &[u8]) -> Read<u32> {
    u32::try_from(read_number(rest)?).map_err(|_| "a number is out of range")
}

fn read_number(rest: &mut &[u8]) -> Read<u64> {
    let mut number = 0_u64;
    for shift in (0..64).step_by(7) {
        let byte = read_byte(rest)?;
        let bits = u64::from(byte & 0x7F);
        if bits << shift >> shift != bits {
            return Err("a number is out of range");
        }
        number |= bits << shift;
        if byte & 0x80 == 0 {
            return Ok(number);
        }
    }
    Err("a number is out of range")
}
