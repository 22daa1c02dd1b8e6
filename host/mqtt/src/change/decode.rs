//! Decodes changes without copying. Accepts any bytes and never panics.

use super::{
    AS_PUBLISHED, Change, Content, ContentBytes, CorruptChanges, EXPIRES, FORMAT, HAS_ID, NO_LOCAL,
    Part, RETAIN, RETAINED_PENDING, RecordedWill, SAME_BYTES, Sharing, tag,
};
use crate::{QoS, ReasonCode, limits::SUBSCRIPTION_ID_OVER, router::Subscription};
use statehouse_protocol::SessionId;

/// Reads the changes of one batch; ends after the first error.
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
                text: "changes of a later format (use the version of the program that wrote them, or a newer one)",
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
        tag::RETAINED_REMOVED => Ok(Change::RetainedRemoved(read_topic(rest)?)),
        tag => {
            let run = u64::from(read_u32(rest)?);
            let session = run << 32 | u64::from(read_u32(rest)?);
            Ok(Change::Session(SessionId(session), read_part(tag, rest)?))
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
        tag::OWNER => Part::Owner(read_text(rest)?),
        tag::EXPIRY => Part::Expiry(read_u32(rest)?),
        tag::NO_WILL => Part::NoWill,
        tag::DETACH => Part::Detach(read_number(rest)?),
        tag::END => Part::End,
        tag::SUBSCRIBE => read_subscribe(rest)?,
        tag::UNSUBSCRIBE => Part::Unsubscribe(read_topic(rest)?),
        tag::MESSAGE => read_message(rest, false)?,
        tag::SHARED_MESSAGE => read_message(rest, true)?,
        tag::SENT => Part::Sent {
            number: read_number(rest)?,
            packet_id: read_packet_id(rest)?,
        },
        tag::RELEASED => Part::Released {
            number: read_number(rest)?,
            packet_id: read_packet_id(rest)?,
        },
        tag::REMOVED => Part::Removed(read_number(rest)?),
        tag::RECEIVED => Part::Received {
            packet_id: read_packet_id(rest)?,
            reason: ReasonCode(read_byte(rest)?),
        },
        tag::COMPLETED => Part::Completed(read_packet_id(rest)?),
        _ => {
            return Err(
                "a change of a later kind (use the version of the program that wrote it, or a newer one)",
            );
        }
    })
}

fn read_subscribe<'a>(rest: &mut &'a [u8]) -> Read<Part<'a>> {
    let flags = read_byte(rest)?;
    if flags & !(3 | NO_LOCAL | AS_PUBLISHED | HAS_ID | RETAINED_PENDING) != 0 {
        return Err("a subscription has unknown options");
    }
    let filter = read_topic(rest)?;
    let id = read_if(flags & HAS_ID != 0, rest, read_subscription_id)?;
    Ok(Part::Subscribe {
        filter,
        subscription: Subscription {
            qos: read_qos(flags)?,
            no_local: flags & NO_LOCAL != 0,
            retain_as_published: flags & AS_PUBLISHED != 0,
            id,
        },
        retained_pending: flags & RETAINED_PENDING != 0,
    })
}

fn read_message<'a>(rest: &mut &'a [u8], is_shared: bool) -> Read<Part<'a>> {
    let number = read_number(rest)?;
    let content = read_content(rest)?;
    let count = read_number(rest)?;
    let mut subscription_ids = Vec::new();
    // Each identifier takes at least one byte, so the loop ends at the end of the bytes.
    for _ in 0..count {
        subscription_ids.push(read_subscription_id(rest)?);
    }
    Ok(Part::Message {
        number,
        content,
        subscription_ids: subscription_ids.into(),
        shared: read_if(is_shared, rest, read_sharing)?,
    })
}

fn read_will<'a>(rest: &mut &'a [u8]) -> Read<Option<RecordedWill<'a>>> {
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
    let expiry_s = read_if(presence == 2, rest, read_u32)?;
    Ok(Some(RecordedWill {
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
    let expires_ms = read_if(flags & EXPIRES != 0, rest, read_number)?;
    let bytes = read_if(flags & SAME_BYTES == 0, rest, read_content_bytes)?;
    Ok(Content {
        qos: read_qos(flags)?,
        retain: flags & RETAIN != 0,
        expires_ms,
        bytes,
    })
}

fn read_content_bytes<'a>(rest: &mut &'a [u8]) -> Read<ContentBytes<'a>> {
    Ok(ContentBytes {
        topic: read_topic(rest)?,
        payload: read_bytes(rest)?,
        properties: read_bytes(rest)?,
    })
}

fn read_sharing<'a>(rest: &mut &'a [u8]) -> Read<Sharing<'a>> {
    let flags = read_byte(rest)?;
    if flags & !(3 | RETAIN) != 0 {
        return Err("a message of a shared subscription has unknown options");
    }
    Ok(Sharing {
        filter: read_topic(rest)?,
        qos: read_qos(flags)?,
        retain: flags & RETAIN != 0,
    })
}

/// Reads a part that is there only if the part before it says so.
fn read_if<'a, T>(
    is_there: bool,
    rest: &mut &'a [u8],
    read: impl FnOnce(&mut &'a [u8]) -> Read<T>,
) -> Read<Option<T>> {
    is_there.then(|| read(rest)).transpose()
}

fn read_qos(flags: u8) -> Read<QoS> {
    QoS::from_bits(flags & 3).ok_or("QoS 3 does not exist")
}

/// At most 268 435 455 and never 0: four bytes of seven bits on the wire (section 3.8.2.1.2).
fn read_subscription_id(rest: &mut &[u8]) -> Read<u32> {
    match read_u32(rest)? {
        0 | SUBSCRIPTION_ID_OVER.. => Err("a subscription identifier is out of range"),
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
    std::str::from_utf8(read_bytes(rest)?)
        .map_err(|_| "a client identifier or a user name is not UTF-8")
}

/// A topic name or filter. Its length must fit two bytes on the wire.
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
