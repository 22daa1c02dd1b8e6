//! Encodes the packets that the broker sends, and appends them to an output buffer.

use bytes::{BufMut, BytesMut};

use super::{packet_type as kind, property as id};
use crate::{
    Message,
    ProtocolVersion::{self, V5, V311},
    QoS, ReasonCode,
    limits::REASON_TEXT_BYTES_MAX,
};

/// The content of a CONNACK in addition to its reason (section 3.2.2.3). Absent values have the
/// standard's defaults.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Connack<'a> {
    pub(crate) session_present: bool,
    pub(crate) session_expiry_s: Option<u32>,
    pub(crate) receive_max: Option<u16>,
    pub(crate) packet_bytes_max: u32,
    pub(crate) assigned_client_id: Option<&'a str>,
    pub(crate) topic_alias_max: u16,
    pub(crate) server_keep_alive_s: Option<u16>,
    /// The Authentication Method of the CONNECT.
    pub(crate) method: Option<&'a str>,
}

/// A CONNACK with success. In MQTT 3.1.1 it has no properties.
pub(crate) fn connack(out: &mut BytesMut, version: ProtocolVersion, connack: &Connack<'_>) {
    if version == V311 {
        return out.extend_from_slice(&[kind::CONNACK << 4, 2, connack.session_present.into(), 0]);
    }
    let mut properties = BytesMut::with_capacity(64);
    if let Some(value) = connack.session_expiry_s {
        properties.put_u8(id::SESSION_EXPIRY);
        properties.put_u32(value);
    }
    if let Some(value) = connack.receive_max {
        properties.put_u8(id::RECEIVE_MAX);
        properties.put_u16(value);
    }
    properties.put_u8(id::MAXIMUM_PACKET_SIZE);
    properties.put_u32(connack.packet_bytes_max);
    if let Some(value) = connack.assigned_client_id {
        put_text(&mut properties, id::ASSIGNED_CLIENT_ID, value);
    }
    if connack.topic_alias_max > 0 {
        properties.put_u8(id::TOPIC_ALIAS_MAX);
        properties.put_u16(connack.topic_alias_max);
    }
    if let Some(value) = connack.server_keep_alive_s {
        properties.put_u8(id::SERVER_KEEP_ALIVE);
        properties.put_u16(value);
    }
    if let Some(value) = connack.method {
        put_text(&mut properties, id::AUTH_METHOD, value);
    }
    out.put_u8(kind::CONNACK << 4);
    put_variable(out, 2 + variable_bytes(properties.len()) + properties.len());
    out.extend_from_slice(&[connack.session_present.into(), ReasonCode::SUCCESS.0]);
    put_variable(out, properties.len());
    out.extend_from_slice(&properties);
}

/// The encoded size of a CONNACK with success.
pub(crate) fn connack_bytes(version: ProtocolVersion, packet: &Connack<'_>) -> usize {
    let mut out = BytesMut::with_capacity(64);
    connack(&mut out, version, packet);
    out.len()
}

/// The return code of MQTT 3.1.1 (table 3.1) for a refused CONNECT; none if the standard has no
/// code and the connection is closed without a CONNACK (MQTT 3.1.1 [MQTT-3.2.2-6]).
fn return_code(reason: ReasonCode) -> Option<u8> {
    match reason {
        ReasonCode::UNSUPPORTED_PROTOCOL_VERSION => Some(1),
        ReasonCode::CLIENT_IDENTIFIER_NOT_VALID => Some(2),
        ReasonCode::UNSPECIFIED_ERROR
        | ReasonCode::SERVER_UNAVAILABLE
        | ReasonCode::SERVER_BUSY
        | ReasonCode::PACKET_TOO_LARGE
        | ReasonCode::QUOTA_EXCEEDED
        | ReasonCode::CONNECTION_RATE_EXCEEDED => Some(3),
        ReasonCode::BAD_USER_NAME_OR_PASSWORD => Some(4),
        ReasonCode::NOT_AUTHORIZED
        | ReasonCode::BANNED
        | ReasonCode::BAD_AUTHENTICATION_METHOD
        | ReasonCode::TOPIC_NAME_INVALID => Some(5),
        _ => None,
    }
}

/// A CONNACK that refuses. Omits the text if the packet would exceed the client's maximum
/// [MQTT-3.2.2-19], and writes nothing if it exceeds it even then [MQTT-3.1.2-24].
pub(crate) fn connack_refused(
    version: ProtocolVersion,
    reason: ReasonCode,
    text: &str,
    bytes_max: u32,
) -> BytesMut {
    let mut out = BytesMut::new();
    let (text, bytes_max) = (cut(text), bytes_max as usize);
    if version == V311 {
        if let Some(code) = return_code(reason) {
            out.extend_from_slice(&[kind::CONNACK << 4, 2, 0, code]);
        }
    } else if 10 + text.len() <= bytes_max {
        // Eight bytes in addition to the text, and two more if lengths take two bytes.
        out.put_u8(kind::CONNACK << 4);
        put_with_text(&mut out, &[0, reason.0], id::REASON_STRING, text);
    } else if bytes_max >= 5 {
        out.extend_from_slice(&[kind::CONNACK << 4, 3, 0, reason.0, 0]);
    }
    out
}

/// How to send a message to one client.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Delivery<'a> {
    pub(crate) qos: QoS,
    pub(crate) dup: bool,
    pub(crate) retain: bool,
    /// Ignored at QoS 0.
    pub(crate) packet_id: u16,
    pub(crate) subscription_ids: &'a [u32],
    /// The rest of the Message Expiry Interval.
    pub(crate) expiry_s: Option<u32>,
}

impl Delivery<'_> {
    fn property_bytes(&self, message: &Message) -> usize {
        let ids: usize = self
            .subscription_ids
            .iter()
            .map(|id| 1 + variable_bytes(*id as usize))
            .sum();
        message.properties.len() + ids + self.expiry_s.map_or(0, |_| 5)
    }
}

/// Remaining Length of a PUBLISH and length of its properties; none in MQTT 3.1.1.
fn publish_lengths(
    version: ProtocolVersion,
    message: &Message,
    delivery: &Delivery<'_>,
) -> (usize, Option<usize>) {
    let packet_id = match delivery.qos {
        QoS::AtMostOnce => 0,
        QoS::AtLeastOnce | QoS::ExactlyOnce => 2,
    };
    let bare = 2 + message.topic.len() + packet_id + message.payload.len();
    if version == V311 {
        return (bare, None);
    }
    let properties = delivery.property_bytes(message);
    let remaining = bare + variable_bytes(properties) + properties;
    (remaining, Some(properties))
}

pub(crate) fn publish_bytes(
    version: ProtocolVersion,
    message: &Message,
    delivery: &Delivery<'_>,
) -> usize {
    let (remaining, _) = publish_lengths(version, message, delivery);
    1 + variable_bytes(remaining) + remaining
}

/// A PUBLISH. Writes the message's properties unchanged, after the Message Expiry Interval and
/// before the Subscription Identifiers; none of these in MQTT 3.1.1. The caller must have checked
/// the size.
pub(crate) fn publish(
    out: &mut BytesMut,
    version: ProtocolVersion,
    message: &Message,
    delivery: &Delivery<'_>,
) {
    let (remaining, properties) = publish_lengths(version, message, delivery);
    out.reserve(5 + remaining);
    let flags = u8::from(delivery.dup) << 3 | (delivery.qos as u8) << 1 | u8::from(delivery.retain);
    out.put_u8(kind::PUBLISH << 4 | flags);
    put_variable(out, remaining);
    out.put_u16(message.topic.len() as u16);
    out.extend_from_slice(&message.topic);
    if delivery.qos != QoS::AtMostOnce {
        out.put_u16(delivery.packet_id);
    }
    if let Some(properties) = properties {
        put_variable(out, properties);
        if let Some(expiry_s) = delivery.expiry_s {
            out.put_u8(id::MESSAGE_EXPIRY);
            out.put_u32(expiry_s);
        }
        out.extend_from_slice(&message.properties);
        for subscription_id in delivery.subscription_ids {
            out.put_u8(id::SUBSCRIPTION_ID);
            put_variable(out, *subscription_id as usize);
        }
    }
    out.extend_from_slice(&message.payload);
}

/// PUBACK, PUBREC, PUBREL or PUBCOMP. Omits the text if the packet would exceed the client's
/// maximum (section 3.4.2.2.2). In MQTT 3.1.1 it has neither reason nor text.
pub(crate) fn ack(
    out: &mut BytesMut,
    version: ProtocolVersion,
    packet_type: u8,
    packet_id: u16,
    reason: ReasonCode,
    text: Option<&str>,
    bytes_max: usize,
) {
    let flags = if packet_type == kind::PUBREL { 2 } else { 0 };
    let first = packet_type << 4 | flags;
    let [high, low] = packet_id.to_be_bytes();
    if version == V311 {
        return out.extend_from_slice(&[first, 2, high, low]);
    }
    match text.map(cut).filter(|text| 12 + text.len() <= bytes_max) {
        None if reason == ReasonCode::SUCCESS => out.extend_from_slice(&[first, 2, high, low]),
        None => out.extend_from_slice(&[first, 3, high, low, reason.0]),
        Some(text) => {
            out.put_u8(first);
            put_with_text(out, &[high, low, reason.0], id::REASON_STRING, text);
        }
    }
}

/// An acknowledgement without a text.
pub(crate) fn short_ack(
    out: &mut BytesMut,
    version: ProtocolVersion,
    packet_type: u8,
    packet_id: u16,
    reason: ReasonCode,
) {
    ack(
        out,
        version,
        packet_type,
        packet_id,
        reason,
        None,
        usize::MAX,
    );
}

/// SUBACK: one reason per filter.
pub(crate) fn suback(
    out: &mut BytesMut,
    version: ProtocolVersion,
    packet_id: u16,
    reasons: &[ReasonCode],
) {
    put_reasons(out, version, kind::SUBACK, packet_id, reasons);
}

/// UNSUBACK: one reason per filter, none in MQTT 3.1.1.
pub(crate) fn unsuback(
    out: &mut BytesMut,
    version: ProtocolVersion,
    packet_id: u16,
    reasons: &[ReasonCode],
) {
    let reasons = if version == V311 { &[] } else { reasons };
    put_reasons(out, version, kind::UNSUBACK, packet_id, reasons);
}

/// The encoded size of a SUBACK or UNSUBACK for this many filters; at most this in MQTT 3.1.1.
pub(crate) fn reasons_bytes(version: ProtocolVersion, filters: usize) -> usize {
    let property_length = usize::from(version == V5);
    let remaining = 2 + property_length + filters;
    1 + variable_bytes(remaining) + remaining
}

/// The code of every refused filter in a SUBACK of MQTT 3.1.1 (section 3.9.3 there).
const SUBACK_FAILURE: u8 = 0x80;

fn put_reasons(
    out: &mut BytesMut,
    version: ProtocolVersion,
    packet_type: u8,
    packet_id: u16,
    reasons: &[ReasonCode],
) {
    let (properties, code_max): (&[u8], _) = match version {
        V311 => (&[], SUBACK_FAILURE),
        V5 => (&[0], u8::MAX),
    };
    out.put_u8(packet_type << 4);
    put_variable(out, 2 + properties.len() + reasons.len());
    out.put_u16(packet_id);
    out.extend_from_slice(properties);
    out.extend(reasons.iter().map(|reason| reason.0.min(code_max)));
}

/// AUTH with success.
pub(crate) fn auth(out: &mut BytesMut, method: &str) {
    out.put_u8(kind::AUTH << 4);
    put_with_text(out, &[ReasonCode::SUCCESS.0], id::AUTH_METHOD, method);
}

pub(crate) fn pingresp(out: &mut BytesMut) {
    out.extend_from_slice(&[kind::PINGRESP << 4, 0]);
}

/// DISCONNECT; nothing in MQTT 3.1.1, where a server only closes the connection.
pub(crate) fn disconnect(
    out: &mut BytesMut,
    version: ProtocolVersion,
    reason: ReasonCode,
    text: Option<&str>,
    bytes_max: usize,
) {
    if version == V311 {
        return;
    }
    out.put_u8(kind::DISCONNECT << 4);
    match text.map(cut).filter(|text| 12 + text.len() <= bytes_max) {
        // The standard allows omitting the property length, but some clients then ignore the
        // reason.
        None => out.extend_from_slice(&[2, reason.0, 0]),
        Some(text) => put_with_text(out, &[reason.0], id::REASON_STRING, text),
    }
}

/// Shortens the text to the maximum length at a character boundary.
fn cut(text: &str) -> &str {
    let mut end = text.len().min(REASON_TEXT_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// A packet behind its first byte: these fields, and this property alone.
fn put_with_text(out: &mut BytesMut, fields: &[u8], property: u8, text: &str) {
    let properties = 3 + text.len();
    put_variable(out, fields.len() + variable_bytes(properties) + properties);
    out.extend_from_slice(fields);
    put_variable(out, properties);
    put_text(out, property, text);
}

fn put_text(out: &mut BytesMut, property: u8, text: &str) {
    out.put_u8(property);
    // Fits: client ids had a length field of two bytes, and texts are cut.
    out.put_u16(text.len() as u16);
    out.extend_from_slice(text.as_bytes());
}

fn variable_bytes(value: usize) -> usize {
    match value {
        0..=0x7F => 1,
        0x80..=0x3FFF => 2,
        0x4000..=0x1F_FFFF => 3,
        _ => 4,
    }
}

fn put_variable(out: &mut BytesMut, value: usize) {
    let mut rest = value;
    loop {
        let byte = (rest & 0x7F) as u8;
        rest >>= 7;
        out.put_u8(if rest > 0 { byte | 0x80 } else { byte });
        if rest == 0 {
            return;
        }
    }
}
