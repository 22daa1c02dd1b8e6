//! Decodes and encodes the packets of MQTT 5 and of MQTT 3.1.1 (chapters 2 and 3 of both).
//!
//! The read buffer may hold any part of any number of packets. Decoded packets are complete, and
//! their variable parts are slices of it. The decoder must never allocate memory because of a
//! length field alone. So it checks type, direction and size of a packet before it waits for the
//! body. It has no state but the buffer; the caller knows the version of the connection.
//!
//! Packets of MQTT 3.1.1 become the same types as those of MQTT 5, with the defaults of MQTT 5 for
//! what the older version does not have. So only the codec distinguishes most packets.

mod connect;
mod decode;
mod encode;
mod publish;
mod reader;
mod subscribe;
#[cfg(test)]
mod tests;

pub(crate) use connect::{Answer, Connect, ConnectFault, Will};
pub(crate) use decode::{Ack, Auth, Bounds, Disconnect, Packet, decode, decode_connect};
pub(crate) use encode::{
    Connack, Delivery, ack, auth, connack, connack_bytes, connack_refused, disconnect, pingresp,
    publish, publish_bytes, reasons_bytes, short_ack, suback, unsuback,
};
pub(crate) use publish::{PUBLISH_PROPERTIES, Publish, parse};
pub(crate) use reader::{Reader, Span};
pub(crate) use subscribe::{Filter, RetainHandling, Subscribe, Unsubscribe};

use thiserror::Error;

use crate::ReasonCode;

/// A client's violation of the standard, and the reason code to report it with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{reason}: {text}")]
pub(crate) struct Violation {
    pub(crate) reason: ReasonCode,
    pub(crate) text: &'static str,
}

impl Violation {
    pub(crate) fn malformed(text: &'static str) -> Self {
        Self {
            reason: ReasonCode::MALFORMED_PACKET,
            text,
        }
    }

    pub(crate) fn protocol(text: &'static str) -> Self {
        Self {
            reason: ReasonCode::PROTOCOL_ERROR,
            text,
        }
    }
}

/// Control packet types (section 2.1.2).
pub(crate) mod packet_type {
    pub(crate) const CONNECT: u8 = 1;
    pub(crate) const CONNACK: u8 = 2;
    pub(crate) const PUBLISH: u8 = 3;
    pub(crate) const PUBACK: u8 = 4;
    pub(crate) const PUBREC: u8 = 5;
    pub(crate) const PUBREL: u8 = 6;
    pub(crate) const PUBCOMP: u8 = 7;
    pub(crate) const SUBSCRIBE: u8 = 8;
    pub(crate) const SUBACK: u8 = 9;
    pub(crate) const UNSUBSCRIBE: u8 = 10;
    pub(crate) const UNSUBACK: u8 = 11;
    pub(crate) const PINGREQ: u8 = 12;
    pub(crate) const PINGRESP: u8 = 13;
    pub(crate) const DISCONNECT: u8 = 14;
    pub(crate) const AUTH: u8 = 15;
}

/// Property identifiers (section 2.2.2.2).
pub(crate) mod property {
    pub(crate) const PAYLOAD_FORMAT: u8 = 0x01;
    pub(crate) const MESSAGE_EXPIRY: u8 = 0x02;
    pub(crate) const CONTENT_TYPE: u8 = 0x03;
    pub(crate) const RESPONSE_TOPIC: u8 = 0x08;
    pub(crate) const CORRELATION_DATA: u8 = 0x09;
    pub(crate) const SUBSCRIPTION_ID: u8 = 0x0B;
    pub(crate) const SESSION_EXPIRY: u8 = 0x11;
    pub(crate) const ASSIGNED_CLIENT_ID: u8 = 0x12;
    pub(crate) const SERVER_KEEP_ALIVE: u8 = 0x13;
    pub(crate) const AUTH_METHOD: u8 = 0x15;
    pub(crate) const AUTH_DATA: u8 = 0x16;
    pub(crate) const REQUEST_PROBLEM_INFO: u8 = 0x17;
    pub(crate) const WILL_DELAY: u8 = 0x18;
    pub(crate) const REQUEST_RESPONSE_INFO: u8 = 0x19;
    pub(crate) const RESPONSE_INFO: u8 = 0x1A;
    pub(crate) const SERVER_REFERENCE: u8 = 0x1C;
    pub(crate) const REASON_STRING: u8 = 0x1F;
    pub(crate) const RECEIVE_MAX: u8 = 0x21;
    pub(crate) const TOPIC_ALIAS_MAX: u8 = 0x22;
    pub(crate) const TOPIC_ALIAS: u8 = 0x23;
    pub(crate) const MAXIMUM_QOS: u8 = 0x24;
    pub(crate) const RETAIN_AVAILABLE: u8 = 0x25;
    pub(crate) const USER_PROPERTY: u8 = 0x26;
    pub(crate) const MAXIMUM_PACKET_SIZE: u8 = 0x27;
    pub(crate) const WILDCARD_AVAILABLE: u8 = 0x28;
    pub(crate) const SUBSCRIPTION_ID_AVAILABLE: u8 = 0x29;
    pub(crate) const SHARED_AVAILABLE: u8 = 0x2A;
}
