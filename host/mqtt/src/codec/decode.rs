//! Decodes the fixed header, dispatches to the decoder of the packet type, and decodes the short
//! packets.

use bytes::{Buf, Bytes, BytesMut};

use super::{
    Connect, ConnectFault, Publish, Subscribe, Unsubscribe, Violation, connect,
    packet_type as kind, property as id, publish,
    reader::{Reader, Span, bits, padded, variable},
    subscribe,
};
use crate::{
    Enhanced,
    ProtocolVersion::{self, V311},
    ReasonCode,
};

/// A packet of a connected client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Packet {
    Publish(Publish),
    Puback(Ack),
    Pubrec(Ack),
    Pubrel(Ack),
    Pubcomp(Ack),
    Subscribe(Subscribe),
    Unsubscribe(Unsubscribe),
    Pingreq,
    Disconnect(Disconnect),
    Auth(Auth),
}

/// PUBACK, PUBREC, PUBREL or PUBCOMP (sections 3.4 to 3.7).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ack {
    pub(crate) packet_id: u16,
    pub(crate) reason: ReasonCode,
}

/// The client's DISCONNECT (section 3.14).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Disconnect {
    pub(crate) reason: ReasonCode,
    pub(crate) session_expiry_s: Option<u32>,
}

/// The client's AUTH (section 3.15).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Auth {
    pub(crate) reason: ReasonCode,
    pub(crate) enhanced: Option<Enhanced>,
}

/// The version of a connection, and what the decoder may buffer and produce.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    pub(crate) version: ProtocolVersion,
    pub(crate) packet_bytes_max: usize,
    pub(crate) filters_max: usize,
}

const AUTH_PROPERTIES: u64 = bits(&[
    id::AUTH_METHOD,
    id::AUTH_DATA,
    id::REASON_STRING,
    id::USER_PROPERTY,
]);

/// Removes the next packet of a connected client from the buffer; `None` if it is incomplete.
pub(crate) fn decode(buffer: &mut BytesMut, bounds: Bounds) -> Result<Option<Packet>, Violation> {
    let Some(&first) = buffer.first() else {
        return Ok(None);
    };
    let version = bounds.version;
    check_first(first, version)?;
    let read_length = match version {
        V311 => padded,
        ProtocolVersion::V5 => variable,
    };
    let Some(size) = frame_size(buffer, read_length)? else {
        return Ok(None);
    };
    if size.total > bounds.packet_bytes_max {
        return Err(Violation {
            reason: ReasonCode::PACKET_TOO_LARGE,
            text: "the packet is larger than allowed",
        });
    }
    if buffer.len() < size.total {
        return Ok(None);
    }
    if first >> 4 == kind::PUBLISH {
        let frame = buffer.split_to(size.total);
        return publish::read(first & 0xF, frame, size.header, version)
            .map(Packet::Publish)
            .map(Some);
    }
    let body = buffer.get(size.header..size.total).unwrap_or_default();
    let packet = match first >> 4 {
        kind::PUBACK => Packet::Puback(read_ack(body, version, PUBLISH_RESULTS)?),
        kind::PUBREC => Packet::Pubrec(read_ack(body, version, PUBLISH_RESULTS)?),
        kind::PUBREL => Packet::Pubrel(read_ack(body, version, RELEASE_RESULTS)?),
        kind::PUBCOMP => Packet::Pubcomp(read_ack(body, version, RELEASE_RESULTS)?),
        kind::SUBSCRIBE => Packet::Subscribe(subscribe::read_subscribe(body, bounds)?),
        kind::UNSUBSCRIBE => Packet::Unsubscribe(subscribe::read_unsubscribe(body, bounds)?),
        kind::PINGREQ if body.is_empty() => Packet::Pingreq,
        kind::PINGREQ => return Err(Violation::malformed("PINGREQ has a body")),
        // `check_first` has refused the packet types that a client must not send.
        kind::AUTH => Packet::Auth(read_auth(body)?),
        _ => Packet::Disconnect(read_disconnect(body, version)?),
    };
    buffer.advance(size.total);
    Ok(Some(packet))
}

/// Removes the CONNECT, which must be the first packet. Refuses any other packet by its first byte,
/// and a CONNECT that is too large by the first bytes of its body.
pub(crate) fn decode_connect(
    buffer: &mut BytesMut,
    bytes_max: usize,
) -> Result<Option<Connect>, ConnectFault> {
    let Some(&first) = buffer.first() else {
        return Ok(None);
    };
    if first != kind::CONNECT << 4 {
        let violation = Violation::protocol("the first packet is not a CONNECT");
        return Err(ConnectFault::silent(violation));
    }
    let Some(size) = frame_size(buffer, padded).map_err(ConnectFault::silent)? else {
        return Ok(None);
    };
    if size.total > bytes_max {
        let arrived = Bytes::copy_from_slice(&buffer[size.header..]);
        return connect::too_large(&arrived).map_or(Ok(None), Err);
    }
    if buffer.len() < size.total {
        return Ok(None);
    }
    let mut frame = buffer.split_to(size.total);
    let header = frame.split_to(size.header);
    let connect = connect::read(&frame.freeze())?;
    if connect.version != V311 {
        variable(&header[1..]).map_err(ConnectFault::silent)?;
    }
    Ok(Some(connect))
}

/// Checks type, direction and flags of a packet after CONNECT (section 2.1).
fn check_first(first: u8, version: ProtocolVersion) -> Result<(), Violation> {
    let flags = first & 0xF;
    let required = match first >> 4 {
        kind::PUBLISH => return Ok(()),
        kind::PUBREL | kind::SUBSCRIBE | kind::UNSUBSCRIBE => 2,
        kind::AUTH if version == V311 => {
            return Err(Violation::malformed(
                "packet type 15 does not exist in MQTT 3.1.1",
            ));
        }
        kind::PUBACK
        | kind::PUBREC
        | kind::PUBCOMP
        | kind::PINGREQ
        | kind::DISCONNECT
        | kind::AUTH => 0,
        kind::CONNECT => return Err(Violation::protocol("a second CONNECT")),
        kind::CONNACK | kind::SUBACK | kind::UNSUBACK | kind::PINGRESP => {
            return Err(Violation::protocol("a packet that only a server sends"));
        }
        _ => return Err(Violation::malformed("packet type 0 does not exist")),
    };
    if flags != required {
        return Err(Violation::malformed(
            "the flags of the fixed header are wrong",
        ));
    }
    Ok(())
}

struct FrameSize {
    header: usize,
    total: usize,
}

/// The size of the frame at the front; `None` if its header is incomplete. `read_length` reads the
/// Remaining Length. A frame that is too large must be refused before its body is received.
fn frame_size(
    buffer: &[u8],
    read_length: impl FnOnce(&[u8]) -> Result<Option<(u32, usize)>, Violation>,
) -> Result<Option<FrameSize>, Violation> {
    let size = read_length(buffer.get(1..).unwrap_or_default())?;
    Ok(size.map(|(remaining, length)| {
        let header = 1 + length;
        let total = header + remaining as usize;
        FrameSize { header, total }
    }))
}

/// The reason codes of PUBACK and PUBREC (sections 3.4.2.1 and 3.5.2.1).
const PUBLISH_RESULTS: &[u8] = &[0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99];

/// The reason codes of PUBREL and PUBCOMP (sections 3.6.2.1 and 3.7.2.1).
const RELEASE_RESULTS: &[u8] = &[0x00, 0x92];

/// The reason codes that a client may send in a DISCONNECT (section 3.14.2.1).
const DISCONNECT_REASONS: &[u8] = &[
    0x00, 0x04, 0x80, 0x81, 0x82, 0x83, 0x90, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98, 0x99,
];

/// Reads a reason code, which must be one of `allowed`. A client of MQTT 3.1.1 sends none.
fn read_reason(
    reader: &mut Reader<'_>,
    version: ProtocolVersion,
    allowed: &[u8],
) -> Result<ReasonCode, Violation> {
    if version == V311 || reader.is_empty() {
        return Ok(ReasonCode::SUCCESS);
    }
    let code = reader.u8()?;
    match allowed.contains(&code) {
        true => Ok(ReasonCode(code)),
        false => Err(Violation::protocol(
            "a reason code that this packet does not have",
        )),
    }
}

fn read_ack(body: &[u8], version: ProtocolVersion, allowed: &[u8]) -> Result<Ack, Violation> {
    let mut reader = Reader::new(body);
    let packet_id = reader.packet_id()?;
    let reason = read_reason(&mut reader, version, allowed)?;
    if version != V311 && !reader.is_empty() {
        reader.property_section(bits(&[id::REASON_STRING, id::USER_PROPERTY]), |_| Ok(()))?;
    }
    end(&reader)?;
    Ok(Ack { packet_id, reason })
}

fn read_disconnect(body: &[u8], version: ProtocolVersion) -> Result<Disconnect, Violation> {
    let mut reader = Reader::new(body);
    let reason = read_reason(&mut reader, version, DISCONNECT_REASONS)?;
    let mut session_expiry_s = None;
    if version != V311 && !reader.is_empty() {
        reader.property_section(
            bits(&[
                id::SESSION_EXPIRY,
                id::REASON_STRING,
                id::USER_PROPERTY,
                id::SERVER_REFERENCE,
            ]),
            |item| {
                match item.id {
                    id::SESSION_EXPIRY => session_expiry_s = Some(item.number),
                    // Section 3.14.2.2.5.
                    id::SERVER_REFERENCE => {
                        return Err(Violation::protocol(
                            "a server reference in a DISCONNECT of a client",
                        ));
                    }
                    _ => {}
                }
                Ok(())
            },
        )?;
    }
    end(&reader)?;
    Ok(Disconnect {
        reason,
        session_expiry_s,
    })
}

fn read_auth(body: &[u8]) -> Result<Auth, Violation> {
    let mut reader = Reader::new(body);
    let reason = if reader.is_empty() {
        ReasonCode::SUCCESS
    } else {
        ReasonCode(reader.u8()?)
    };
    let (mut method, mut data) = (None, None);
    let mut section = Span::default();
    if !reader.is_empty() {
        section = reader.property_section(AUTH_PROPERTIES, |item| {
            match item.id {
                id::AUTH_METHOD => method = item.value,
                id::AUTH_DATA => data = item.value,
                _ => {}
            }
            Ok(())
        })?;
    }
    end(&reader)?;
    let value = |span: Span| span.of(section.of(body));
    let enhanced = method.map(|method| Enhanced {
        method: String::from_utf8_lossy(value(method)).into(),
        data: data.map_or_else(Bytes::new, |data| Bytes::copy_from_slice(value(data))),
    });
    Ok(Auth { reason, enhanced })
}

fn end(reader: &Reader<'_>) -> Result<(), Violation> {
    if reader.is_empty() {
        Ok(())
    } else {
        Err(Violation::malformed(
            "bytes follow the last field of the packet",
        ))
    }
}
