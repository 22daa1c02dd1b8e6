//! MQTT 5 properties (section 2.2.2), kept in the order of the wire.

use crate::packet::Reader;

/// One property. The names are those of MQTT 5, table 2-4.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Property {
    PayloadFormat(u8),
    MessageExpiry(u32),
    ContentType(String),
    ResponseTopic(String),
    CorrelationData(Vec<u8>),
    SubscriptionId(u32),
    SessionExpiry(u32),
    AssignedClientId(String),
    ServerKeepAlive(u16),
    AuthMethod(String),
    AuthData(Vec<u8>),
    RequestProblemInfo(u8),
    WillDelay(u32),
    RequestResponseInfo(u8),
    ResponseInfo(String),
    ServerReference(String),
    ReasonString(String),
    ReceiveMaximum(u16),
    TopicAliasMaximum(u16),
    TopicAlias(u16),
    MaximumQos(u8),
    RetainAvailable(u8),
    User(String, String),
    MaximumPacketSize(u32),
    WildcardAvailable(u8),
    SubscriptionIdAvailable(u8),
    SharedAvailable(u8),
}

use Property as P;

impl Property {
    pub fn user(name: &str, value: &str) -> Property {
        P::User(name.into(), value.into())
    }

    fn write(&self, out: &mut Vec<u8>) {
        let byte = |out: &mut Vec<u8>, id, v: u8| out.extend([id, v]);
        let short = |out: &mut Vec<u8>, id, v: u16| {
            out.push(id);
            out.extend(v.to_be_bytes());
        };
        let long = |out: &mut Vec<u8>, id, v: u32| {
            out.push(id);
            out.extend(v.to_be_bytes());
        };
        let bytes = |out: &mut Vec<u8>, id, v: &[u8]| {
            out.push(id);
            out.extend(sized(v));
        };
        match self {
            P::PayloadFormat(v) => byte(out, 0x01, *v),
            P::MessageExpiry(v) => long(out, 0x02, *v),
            P::ContentType(v) => bytes(out, 0x03, v.as_bytes()),
            P::ResponseTopic(v) => bytes(out, 0x08, v.as_bytes()),
            P::CorrelationData(v) => bytes(out, 0x09, v),
            P::SubscriptionId(v) => {
                out.push(0x0B);
                out.extend(variable(*v));
            }
            P::SessionExpiry(v) => long(out, 0x11, *v),
            P::AssignedClientId(v) => bytes(out, 0x12, v.as_bytes()),
            P::ServerKeepAlive(v) => short(out, 0x13, *v),
            P::AuthMethod(v) => bytes(out, 0x15, v.as_bytes()),
            P::AuthData(v) => bytes(out, 0x16, v),
            P::RequestProblemInfo(v) => byte(out, 0x17, *v),
            P::WillDelay(v) => long(out, 0x18, *v),
            P::RequestResponseInfo(v) => byte(out, 0x19, *v),
            P::ResponseInfo(v) => bytes(out, 0x1A, v.as_bytes()),
            P::ServerReference(v) => bytes(out, 0x1C, v.as_bytes()),
            P::ReasonString(v) => bytes(out, 0x1F, v.as_bytes()),
            P::ReceiveMaximum(v) => short(out, 0x21, *v),
            P::TopicAliasMaximum(v) => short(out, 0x22, *v),
            P::TopicAlias(v) => short(out, 0x23, *v),
            P::MaximumQos(v) => byte(out, 0x24, *v),
            P::RetainAvailable(v) => byte(out, 0x25, *v),
            P::User(name, value) => {
                bytes(out, 0x26, name.as_bytes());
                out.extend(sized(value.as_bytes()));
            }
            P::MaximumPacketSize(v) => long(out, 0x27, *v),
            P::WildcardAvailable(v) => byte(out, 0x28, *v),
            P::SubscriptionIdAvailable(v) => byte(out, 0x29, *v),
            P::SharedAvailable(v) => byte(out, 0x2A, *v),
        }
    }

    fn read(reader: &mut Reader<'_>) -> Property {
        match reader.byte() {
            0x01 => P::PayloadFormat(reader.byte()),
            0x02 => P::MessageExpiry(reader.long()),
            0x03 => P::ContentType(reader.text()),
            0x08 => P::ResponseTopic(reader.text()),
            0x09 => P::CorrelationData(reader.sized().to_vec()),
            0x0B => P::SubscriptionId(reader.variable()),
            0x11 => P::SessionExpiry(reader.long()),
            0x12 => P::AssignedClientId(reader.text()),
            0x13 => P::ServerKeepAlive(reader.short()),
            0x15 => P::AuthMethod(reader.text()),
            0x16 => P::AuthData(reader.sized().to_vec()),
            0x17 => P::RequestProblemInfo(reader.byte()),
            0x18 => P::WillDelay(reader.long()),
            0x19 => P::RequestResponseInfo(reader.byte()),
            0x1A => P::ResponseInfo(reader.text()),
            0x1C => P::ServerReference(reader.text()),
            0x1F => P::ReasonString(reader.text()),
            0x21 => P::ReceiveMaximum(reader.short()),
            0x22 => P::TopicAliasMaximum(reader.short()),
            0x23 => P::TopicAlias(reader.short()),
            0x24 => P::MaximumQos(reader.byte()),
            0x25 => P::RetainAvailable(reader.byte()),
            0x26 => P::User(reader.text(), reader.text()),
            0x27 => P::MaximumPacketSize(reader.long()),
            0x28 => P::WildcardAvailable(reader.byte()),
            0x29 => P::SubscriptionIdAvailable(reader.byte()),
            0x2A => P::SharedAvailable(reader.byte()),
            other => panic!("MQTT 5 has no property {other:#04x}"),
        }
    }
}

/// Properties with their length before them, as they stand in a packet.
pub fn write(properties: &[Property]) -> Vec<u8> {
    let mut inner = Vec::new();
    properties.iter().for_each(|p| p.write(&mut inner));
    let mut out = variable(u32::try_from(inner.len()).unwrap());
    out.extend(inner);
    out
}

/// Reads the length and the properties.
pub fn read(reader: &mut Reader<'_>) -> Vec<Property> {
    let n = reader.variable() as usize;
    let mut inner = Reader(reader.take(n));
    let mut out = Vec::new();
    while !inner.0.is_empty() {
        out.push(Property::read(&mut inner));
    }
    out
}

/// The user properties, in the order of the wire.
pub fn users(properties: &[Property]) -> Vec<(String, String)> {
    properties
        .iter()
        .filter_map(|property| match property {
            P::User(name, value) => Some((name.clone(), value.clone())),
            _ => None,
        })
        .collect()
}

pub fn reason_string(properties: &[Property]) -> Option<String> {
    properties.iter().find_map(|property| match property {
        P::ReasonString(text) => Some(text.clone()),
        _ => None,
    })
}

/// Bytes with their two-byte length before them.
pub fn sized(bytes: &[u8]) -> Vec<u8> {
    let mut out = u16::try_from(bytes.len()).unwrap().to_be_bytes().to_vec();
    out.extend_from_slice(bytes);
    out
}

/// A variable byte integer (MQTT 5, section 1.5.5).
pub fn variable(mut value: u32) -> Vec<u8> {
    let mut out = Vec::new();
    loop {
        let byte = (value % 128) as u8;
        value /= 128;
        if value == 0 {
            out.push(byte);
            return out;
        }
        out.push(byte | 0x80);
    }
}
