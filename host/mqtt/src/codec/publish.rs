//! PUBLISH (section 3.3), and the properties that it shares with a will (section 3.1.3.2).

use std::time::Instant;

use bytes::{Buf, Bytes, BytesMut};

use super::{
    Violation, property as id,
    reader::{Reader, bits, scan},
};
use crate::{
    Properties,
    ProtocolVersion::{self, V5, V311},
    QoS, topic,
};

/// A PUBLISH as it was received. Topic, payload and properties are slices of the read buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Publish {
    pub(crate) dup: bool,
    pub(crate) qos: QoS,
    pub(crate) retain: bool,
    /// Empty if the PUBLISH has only a topic alias.
    pub(crate) topic: Bytes,
    /// 0 at QoS 0.
    pub(crate) packet_id: u16,
    pub(crate) properties: Properties,
    pub(crate) payload: Bytes,
    /// When the message expires. The dispatch sets it on arrival, because a packet may wait there.
    pub(crate) expires: Option<Instant>,
}

/// Reads a PUBLISH from its flags and its complete frame. The fixed header has `header` bytes.
pub(super) fn read(
    flags: u8,
    frame: BytesMut,
    header: usize,
    version: ProtocolVersion,
) -> Result<Publish, Violation> {
    let qos = QoS::from_bits(flags >> 1 & 3).ok_or(Violation::malformed("QoS 3 does not exist"))?;
    let dup = flags & 8 != 0;
    if dup && qos == QoS::AtMostOnce {
        return Err(Violation::malformed("DUP is set at QoS 0"));
    }
    let mut frame = frame;
    frame.advance(header);
    let body = frame.freeze();
    let mut reader = Reader::new(&body);
    let topic_span = reader.text()?;
    let packet_id = if qos == QoS::AtMostOnce {
        0
    } else {
        reader.packet_id()?
    };
    let properties = match version {
        V311 => Properties::default(),
        V5 => properties(&mut reader, &body, PUBLISH_PROPERTIES)?,
    };
    let payload = body.slice(reader.position()..);
    let topic = body.slice(topic_span.range());
    match (topic.is_empty(), properties.topic_alias) {
        (true, None) => {
            return Err(Violation::protocol(
                "the topic name is empty and there is no topic alias",
            ));
        }
        (true, Some(_)) => {}
        (false, _) => topic::check_name(&topic).map_err(Violation::protocol)?,
    }
    Ok(Publish {
        dup,
        qos,
        retain: flags & 1 != 0,
        topic,
        packet_id,
        properties,
        payload,
        expires: None,
    })
}

const SHARED: &[u8] = &[
    id::PAYLOAD_FORMAT,
    id::MESSAGE_EXPIRY,
    id::CONTENT_TYPE,
    id::RESPONSE_TOPIC,
    id::CORRELATION_DATA,
    id::USER_PROPERTY,
];
pub(crate) const PUBLISH_PROPERTIES: u64 =
    bits(SHARED) | bits(&[id::TOPIC_ALIAS, id::SUBSCRIPTION_ID]);
pub(super) const WILL_PROPERTIES: u64 = bits(SHARED) | bits(&[id::WILL_DELAY]);

/// Reads the property section at the reader, which reads `body`.
pub(super) fn properties(
    reader: &mut Reader<'_>,
    body: &Bytes,
    allowed: u64,
) -> Result<Properties, Violation> {
    let length = reader.variable()? as usize;
    let section = reader.skip(length)?;
    // An empty slice would still pin the read buffer.
    let raw = if length == 0 {
        Bytes::new()
    } else {
        body.slice(section.range())
    };
    parse(raw, allowed)
}

/// Checks properties without their length, and indexes those that the broker uses.
pub(crate) fn parse(raw: Bytes, allowed: u64) -> Result<Properties, Violation> {
    let mut found = Properties::default();
    scan(&raw, allowed, |item| {
        match item.id {
            id::PAYLOAD_FORMAT => found.payload_is_utf8 = item.flag()?,
            id::CONTENT_TYPE => found.content_type = item.value,
            id::RESPONSE_TOPIC => found.response_topic = item.value,
            id::CORRELATION_DATA => found.correlation_data = item.value,
            id::MESSAGE_EXPIRY => {
                found.message_expiry_s = Some(item.number);
                found.local[0] = Some(item.whole);
            }
            id::TOPIC_ALIAS => {
                found.topic_alias = u16::try_from(item.number).ok();
                found.local[1] = Some(item.whole);
            }
            id::WILL_DELAY => {
                found.will_delay_s = item.number;
                found.local[1] = Some(item.whole);
            }
            // [MQTT-3.3.4-6]
            id::SUBSCRIPTION_ID => {
                return Err(Violation::protocol(
                    "a subscription identifier in a PUBLISH of a client",
                ));
            }
            _ => {}
        }
        Ok(())
    })?;
    found.raw = raw;
    if let Some(topic) = found.response_topic.map(|span| span.of(&found.raw)) {
        topic::check_name(topic).map_err(|_| {
            Violation::protocol("the response topic is empty or contains a wildcard")
        })?;
    }
    Ok(found)
}
