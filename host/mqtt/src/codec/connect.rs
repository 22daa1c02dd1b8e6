//! CONNECT (section 3.1).

use bytes::Bytes;

use super::{
    Violation, property as id, publish,
    reader::{Reader, Span, bits},
};
use crate::{
    Enhanced, Message, Properties,
    ProtocolVersion::{self, V5, V311},
    QoS, ReasonCode, topic,
};

/// A CONNECT as it was received. Admission moves the credentials out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Connect {
    pub(crate) version: ProtocolVersion,
    pub(crate) client_id: Box<str>,
    pub(crate) clean_start: bool,
    pub(crate) keep_alive_s: u16,
    pub(crate) session_expiry_s: u32,
    pub(crate) receive_max: u16,
    pub(crate) packet_bytes_max: u32,
    /// Whether the client wants Reason Strings in acknowledgements.
    pub(crate) problem_info: bool,
    pub(crate) user: Option<Box<str>>,
    pub(crate) password: Option<Bytes>,
    pub(crate) enhanced: Option<Enhanced>,
    pub(crate) will: Option<Will>,
}

/// The message to publish when the connection is lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Will {
    pub(crate) message: Message,
    pub(crate) delay_s: u32,
    /// Counts from the publication.
    pub(crate) expiry_s: Option<u32>,
}

/// Why a CONNECT was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ConnectFault {
    pub(crate) violation: Violation,
    pub(crate) answer: Answer,
}

impl ConnectFault {
    /// A fault that gets no answer.
    pub(crate) fn silent(violation: Violation) -> Self {
        Self {
            violation,
            answer: Answer::None,
        }
    }

    /// A fault that gets a CONNACK of this version, with at most `bytes_max` bytes.
    fn answered(violation: Violation, version: ProtocolVersion, bytes_max: u32) -> Self {
        Self {
            violation,
            answer: Answer::Connack { version, bytes_max },
        }
    }
}

/// How to answer a refused CONNECT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Not at all: the client does not seem to use MQTT.
    None,
    /// With a CONNACK of this version, if that version has a code for the reason. It has at most
    /// `bytes_max` bytes, the Maximum Packet Size if it was read.
    Connack {
        version: ProtocolVersion,
        bytes_max: u32,
    },
}

const PROPERTIES: u64 = bits(&[
    id::SESSION_EXPIRY,
    id::RECEIVE_MAX,
    id::MAXIMUM_PACKET_SIZE,
    id::TOPIC_ALIAS_MAX,
    id::REQUEST_RESPONSE_INFO,
    id::REQUEST_PROBLEM_INFO,
    id::USER_PROPERTY,
    id::AUTH_METHOD,
    id::AUTH_DATA,
]);

/// The flag in the protocol level of a Mosquitto bridge that speaks MQTT 3.1 or 3.1.1
/// (`try_private`, which is on by default).
const BRIDGE: u8 = 0x80;

/// The protocol name of MQTT 3.1, which no other name of MQTT exceeds in length.
const OLD_NAME: &[u8] = b"MQIsdp";

/// Reads the variable header and payload of a CONNECT.
pub(super) fn read(body: &Bytes) -> Result<Connect, ConnectFault> {
    let mut reader = Reader::new(body);
    let name = reader.binary().map_err(ConnectFault::silent)?;
    let level = reader.u8().map_err(ConnectFault::silent)?;
    let version = version(name.of(body), level)?;
    let mut bytes_max = u32::MAX;
    rest(reader, body, version, &mut bytes_max)
        .map_err(|violation| ConnectFault::answered(violation, version, bytes_max))
}

/// How to refuse a CONNECT that is too large, by the part of its body that has arrived. `None` if
/// that part does not show the version yet.
pub(super) fn too_large(arrived: &Bytes) -> Option<ConnectFault> {
    let violation = Violation {
        reason: ReasonCode::PACKET_TOO_LARGE,
        text: "the CONNECT, with its will, is larger than the broker allows: 64 KiB by default",
    };
    let name_bytes = u16::from_be_bytes(*arrived.first_chunk()?);
    if usize::from(name_bytes) > OLD_NAME.len() {
        return Some(ConnectFault::silent(violation));
    }
    let mut reader = Reader::new(arrived);
    let (name, level) = (reader.binary().ok()?, reader.u8().ok()?);
    let version = match version(name.of(arrived), level) {
        Ok(version) => version,
        Err(fault) => return Some(fault),
    };
    let mut bytes_max = u32::MAX;
    // Only for the Maximum Packet Size, if it has arrived.
    _ = rest(reader, arrived, version, &mut bytes_max);
    Some(ConnectFault::answered(violation, version, bytes_max))
}

/// The version of a CONNECT with this protocol name and protocol level.
fn version(name: &[u8], level: u8) -> Result<ProtocolVersion, ConnectFault> {
    match (name, level) {
        (b"MQTT", 4) => Ok(V311),
        (b"MQTT", 5) => Ok(V5),
        (b"MQTT" | OLD_NAME, _) => {
            let violation = Violation {
                reason: ReasonCode::UNSUPPORTED_PROTOCOL_VERSION,
                text: "this broker speaks MQTT 5 and MQTT 3.1.1 only",
            };
            // MQTT 3.1 has the same CONNACK as MQTT 3.1.1, so that its clients report the cause. A
            // bridge must get return code 1: it then connects again without its flag.
            let is_bridge = level & BRIDGE != 0;
            let version = if name == OLD_NAME || level < 4 || is_bridge {
                V311
            } else {
                V5
            };
            Err(ConnectFault::answered(violation, version, u32::MAX))
        }
        _ => {
            let violation = Violation::malformed("the protocol name is not MQTT");
            Err(ConnectFault::silent(violation))
        }
    }
}

/// Reads everything after the protocol version. Sets `bytes_max` as soon as it is read, even if a
/// later field is malformed.
fn rest(
    mut reader: Reader<'_>,
    body: &Bytes,
    version: ProtocolVersion,
    bytes_max: &mut u32,
) -> Result<Connect, Violation> {
    let flags = reader.u8()?;
    if flags & 1 != 0 {
        return Err(Violation::malformed("the reserved flag of CONNECT is set"));
    }
    let keep_alive_s = reader.u16()?;
    let mut connect = Connect {
        version,
        client_id: Box::default(),
        clean_start: flags & 2 != 0,
        keep_alive_s,
        session_expiry_s: 0,
        receive_max: u16::MAX,
        packet_bytes_max: u32::MAX,
        problem_info: true,
        user: None,
        password: None,
        enhanced: None,
        will: None,
    };
    match version {
        V311 => without_properties(&mut connect, flags)?,
        V5 => properties(&mut connect, &mut reader, body, bytes_max)?,
    }
    connect.client_id = text(body, reader.text()?);
    connect.will = will(&mut reader, body, flags, version)?;
    if flags & USER != 0 {
        connect.user = Some(text(body, reader.text()?));
    }
    if flags & PASSWORD != 0 {
        connect.password = Some(body.slice(reader.binary()?.range()));
    }
    if !reader.is_empty() {
        return Err(Violation::malformed(
            "bytes follow the last field of CONNECT",
        ));
    }
    // MQTT 3.1.1 [MQTT-3.1.3-8]
    if version == V311 && connect.client_id.is_empty() && !connect.clean_start {
        return Err(Violation {
            reason: ReasonCode::CLIENT_IDENTIFIER_NOT_VALID,
            text: "a session that outlives its connection needs a client identifier",
        });
    }
    Ok(connect)
}

/// The flags of CONNECT for a user name and a password.
const USER: u8 = 0x80;
const PASSWORD: u8 = 0x40;

/// Sets what a CONNECT of MQTT 3.1.1 says without properties. Its session ends with the connection,
/// or lasts for as long as the broker allows (MQTT 3.1.1 section 3.1.2.4).
fn without_properties(connect: &mut Connect, flags: u8) -> Result<(), Violation> {
    // MQTT 3.1.1 [MQTT-3.1.2-22]
    if flags & (USER | PASSWORD) == PASSWORD {
        return Err(Violation::malformed("a password without a user name"));
    }
    connect.session_expiry_s = if connect.clean_start { 0 } else { u32::MAX };
    connect.problem_info = false;
    Ok(())
}

fn properties(
    connect: &mut Connect,
    reader: &mut Reader<'_>,
    body: &Bytes,
    bytes_max: &mut u32,
) -> Result<(), Violation> {
    let (mut method, mut data) = (None, None);
    let section = reader.property_section(PROPERTIES, |item| {
        match item.id {
            id::SESSION_EXPIRY => connect.session_expiry_s = item.number,
            id::RECEIVE_MAX => {
                connect.receive_max = u16::try_from(item.positive()?).unwrap_or(u16::MAX)
            }
            id::MAXIMUM_PACKET_SIZE => *bytes_max = item.positive()?,
            id::REQUEST_PROBLEM_INFO => connect.problem_info = item.flag()?,
            // The broker has no response information; its absence is an answer (section
            // 3.1.2.11.6).
            id::REQUEST_RESPONSE_INFO => _ = item.flag()?,
            id::AUTH_METHOD => method = item.value,
            id::AUTH_DATA => data = item.value,
            _ => {}
        }
        Ok(())
    })?;
    connect.packet_bytes_max = *bytes_max;
    if data.is_some() && method.is_none() {
        return Err(Violation::protocol(
            "authentication data without an authentication method",
        ));
    }
    let properties = body.slice(section.range());
    connect.enhanced = method.map(|method| Enhanced {
        method: text(&properties, method),
        data: data.map_or_else(Bytes::new, |data| properties.slice(data.range())),
    });
    Ok(())
}

/// Copies a string that was already checked.
fn text(body: &[u8], span: Span) -> Box<str> {
    String::from_utf8_lossy(span.of(body)).into()
}

fn will(
    reader: &mut Reader<'_>,
    body: &Bytes,
    flags: u8,
    version: ProtocolVersion,
) -> Result<Option<Will>, Violation> {
    let qos = QoS::from_bits(flags >> 3 & 3).ok_or(Violation::malformed("QoS 3 does not exist"))?;
    let retain = flags & 0x20 != 0;
    if flags & 4 == 0 {
        if retain || qos != QoS::AtMostOnce {
            return Err(Violation::malformed(
                "will QoS or will retain without a will",
            ));
        }
        return Ok(None);
    }
    let properties = match version {
        V311 => Properties::default(),
        V5 => publish::properties(reader, body, publish::WILL_PROPERTIES)?,
    };
    let topic = body.slice(reader.text()?.range());
    let payload = body.slice(reader.binary()?.range());
    // 0x90 is for names that are not malformed (section 3.2.2.2). Invalid strings were refused as
    // malformed already.
    topic::check_name(&topic).map_err(Violation::protocol)?;
    let message = Message {
        topic,
        payload,
        properties: properties.forwarded(),
        qos,
        retain,
        expires: None,
    };
    let (delay_s, expiry_s) = (properties.will_delay_s, properties.message_expiry_s);
    Ok(Some(Will {
        message: message.detached(),
        delay_s,
        expiry_s,
    }))
}
