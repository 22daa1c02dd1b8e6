//! Encodes and decodes the packets of MQTT 3.1.1 that differ from those of MQTT 5. The decoder must
//! be strict, so that a packet that violates the standard fails the test.

use crate::{
    packet::{Packet, Publish, Reader, kind, packet},
    property::sized,
};

/// DISCONNECT, which only clients send.
pub const DISCONNECT: [u8; 2] = [0xE0, 0];

/// The return code of a SUBACK for a refused subscription.
pub const FAILURE: u8 = 0x80;

impl Publish {
    /// The bytes of the wire in MQTT 3.1.1, which has no properties.
    pub fn bytes3(&self) -> Vec<u8> {
        assert!(self.properties.is_empty(), "MQTT 3.1.1 has no properties");
        self.bytes_with(&[])
    }
}

impl Packet {
    /// Reads a PUBLISH of MQTT 3.1.1 from a server.
    pub fn publish3(&self) -> Publish {
        let publish = self.publish_with(|_| Vec::new());
        assert!(publish.qos < 3, "QoS 3: {self:?}");
        assert!(publish.qos > 0 || !publish.dup, "DUP at QoS 0: {self:?}");
        assert_eq!(publish.qos > 0, publish.packet_id > 0, "{self:?}");
        publish
    }

    /// Reads a CONNACK of MQTT 3.1.1: Session Present and the return code.
    pub fn connack3(&self) -> (bool, u8) {
        let (0x20, [flags, code]) = (self.head, &self.body[..]) else {
            panic!("{self:?} is not a CONNACK of MQTT 3.1.1");
        };
        assert!(*flags <= 1, "CONNACK flags {flags:#04x}");
        assert!(*code <= 5, "no return code: {code}");
        assert!(*code == 0 || *flags == 0, "refused, with a session");
        (*flags == 1, *code)
    }

    /// Reads a PUBACK, PUBREC, PUBREL, PUBCOMP or UNSUBACK of MQTT 3.1.1: the packet id.
    pub fn ack3(&self) -> u16 {
        let flags = if self.kind() == kind::PUBREL { 2 } else { 0 };
        assert_eq!(self.head & 0x0F, flags, "flags of {self:?}");
        let id = self.body[..].try_into();
        u16::from_be_bytes(id.unwrap_or_else(|_| panic!("{self:?} holds more than a packet id")))
    }

    /// Reads a SUBACK of MQTT 3.1.1: packet id and return codes.
    pub fn suback3(&self) -> (u16, Vec<u8>) {
        assert_eq!(self.head, 0x90, "{self:?} is not a SUBACK");
        let mut reader = Reader(&self.body);
        let id = reader.short();
        for code in reader.0 {
            assert!(matches!(code, 0..=2 | &FAILURE), "no return code: {code}");
        }
        (id, reader.0.to_vec())
    }
}

/// SUBSCRIBE to filters with their requested QoS.
pub fn subscribe(packet_id: u16, filters: &[(&str, u8)]) -> Vec<u8> {
    let mut body = packet_id.to_be_bytes().to_vec();
    for (filter, qos) in filters {
        body.extend(sized(filter.as_bytes()));
        body.push(*qos);
    }
    packet(0x82, &body)
}

pub fn unsubscribe(packet_id: u16, filters: &[&str]) -> Vec<u8> {
    let mut body = packet_id.to_be_bytes().to_vec();
    for filter in filters {
        body.extend(sized(filter.as_bytes()));
    }
    packet(0xA2, &body)
}
