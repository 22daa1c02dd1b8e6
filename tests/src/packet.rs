//! Encodes and decodes MQTT 5 packets. The encoder also writes invalid packets. The decoder must be
//! strict, so that a packet that violates the standard fails the test.

use crate::property::{self, Property, sized, variable};

/// Packet types: the high nibble of the first byte.
pub mod kind {
    pub const CONNECT: u8 = 1;
    pub const CONNACK: u8 = 2;
    pub const PUBLISH: u8 = 3;
    pub const PUBACK: u8 = 4;
    pub const PUBREC: u8 = 5;
    pub const PUBREL: u8 = 6;
    pub const PUBCOMP: u8 = 7;
    pub const SUBSCRIBE: u8 = 8;
    pub const SUBACK: u8 = 9;
    pub const UNSUBSCRIBE: u8 = 10;
    pub const UNSUBACK: u8 = 11;
    pub const PINGREQ: u8 = 12;
    pub const PINGRESP: u8 = 13;
    pub const DISCONNECT: u8 = 14;
    pub const AUTH: u8 = 15;
}

pub const PINGREQ: [u8; 2] = [0xC0, 0];

#[derive(Clone, PartialEq, Eq)]
pub struct Packet {
    /// The first byte: type and flags.
    pub head: u8,
    /// The bytes after the fixed header.
    pub body: Vec<u8>,
}

/// An acknowledgement, a CONNACK or a DISCONNECT: a reason with properties.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ack {
    /// 0 if the packet has none.
    pub packet_id: u16,
    /// CONNACK only.
    pub session_present: bool,
    /// 0 if the packet omits it.
    pub reason: u8,
    /// In the order of the wire.
    pub properties: Vec<Property>,
}

impl Ack {
    /// The Reason String, or an empty string.
    pub fn text(&self) -> String {
        property::reason_string(&self.properties).unwrap_or_default()
    }
}

impl Packet {
    /// Removes the first packet from the received bytes, if it is complete.
    pub fn cut(read: &mut Vec<u8>) -> Option<Packet> {
        let mut length = 0;
        let mut shift = 0;
        for (at, byte) in read.iter().enumerate().skip(1) {
            assert!(at <= 4, "a remaining length of more than four bytes");
            length |= usize::from(byte & 0x7F) << shift;
            shift += 7;
            if byte & 0x80 == 0 {
                let end = at + 1 + length;
                if read.len() < end {
                    return None;
                }
                let rest = read.split_off(end);
                let whole = std::mem::replace(read, rest);
                return Some(Packet {
                    head: whole[0],
                    body: whole[at + 1..].to_vec(),
                });
            }
        }
        None
    }

    pub fn bytes(&self) -> Vec<u8> {
        packet(self.head, &self.body)
    }

    pub fn kind(&self) -> u8 {
        self.head >> 4
    }

    /// Reads a CONNACK, PUBACK, PUBREC, PUBREL, PUBCOMP, DISCONNECT or AUTH.
    pub fn ack(&self) -> Ack {
        let mut reader = Reader(&self.body);
        let mut ack = Ack {
            packet_id: 0,
            session_present: false,
            reason: 0,
            properties: Vec::new(),
        };
        match self.kind() {
            kind::CONNACK => {
                let flags = reader.byte();
                assert!(flags <= 1, "CONNACK flags {flags:#04x}");
                ack.session_present = flags == 1;
            }
            kind::PUBACK | kind::PUBREC | kind::PUBREL | kind::PUBCOMP => {
                ack.packet_id = reader.short();
            }
            kind::DISCONNECT | kind::AUTH => {}
            _ => panic!("{self:?} is not an acknowledgement"),
        }
        if !reader.0.is_empty() {
            ack.reason = reader.byte();
        }
        if !reader.0.is_empty() {
            ack.properties = property::read(&mut reader);
        }
        assert!(reader.0.is_empty(), "bytes after {self:?}");
        ack
    }

    pub fn publish(&self) -> Publish {
        self.publish_with(property::read)
    }

    /// Reads a PUBLISH whose properties `properties` reads.
    pub(crate) fn publish_with(
        &self,
        properties: impl FnOnce(&mut Reader<'_>) -> Vec<Property>,
    ) -> Publish {
        assert_eq!(self.kind(), kind::PUBLISH, "{self:?} is not a PUBLISH");
        let mut reader = Reader(&self.body);
        let qos = (self.head >> 1) & 3;
        Publish {
            qos,
            retain: self.head & 1 == 1,
            dup: self.head & 8 == 8,
            topic: reader.text(),
            packet_id: if qos > 0 { reader.short() } else { 0 },
            properties: properties(&mut reader),
            payload: reader.0.to_vec(),
        }
    }

    /// The QoS and the packet id of a PUBLISH, which are at the same place in all versions of MQTT.
    pub(crate) fn publish_qos_and_id(&self) -> (u8, u16) {
        let publish = self.publish_with(|reader| {
            reader.0 = &[];
            Vec::new()
        });
        (publish.qos, publish.packet_id)
    }

    /// The Clean Start flag of a CONNECT.
    pub fn clean_start(&self) -> bool {
        let mut reader = Reader(&self.body);
        let protocol = (self.head, reader.text(), reader.byte());
        assert_eq!(protocol, (0x10, "MQTT".into(), 5), "{self:?}");
        reader.byte() & 2 == 2
    }

    /// Reads a SUBSCRIBE: packet id and filters, without their options.
    pub fn subscribe(&self) -> (u16, Vec<String>) {
        assert_eq!(self.head, 0x82, "{self:?} is not a SUBSCRIBE");
        let mut reader = Reader(&self.body);
        let id = reader.short();
        property::read(&mut reader);
        let mut filters = Vec::new();
        while !reader.0.is_empty() {
            filters.push(reader.text());
            reader.byte();
        }
        (id, filters)
    }

    /// Reads a SUBACK or UNSUBACK: packet id and reasons.
    pub fn suback(&self) -> (u16, Vec<u8>) {
        assert!(
            matches!(self.kind(), kind::SUBACK | kind::UNSUBACK),
            "{self:?} is not a SUBACK"
        );
        let mut reader = Reader(&self.body);
        let id = reader.short();
        property::read(&mut reader);
        (id, reader.0.to_vec())
    }
}

impl std::fmt::Debug for Packet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        const NAMES: [&str; 16] = [
            "?",
            "CONNECT",
            "CONNACK",
            "PUBLISH",
            "PUBACK",
            "PUBREC",
            "PUBREL",
            "PUBCOMP",
            "SUBSCRIBE",
            "SUBACK",
            "UNSUBSCRIBE",
            "UNSUBACK",
            "PINGREQ",
            "PINGRESP",
            "DISCONNECT",
            "AUTH",
        ];
        let shown = &self.body[..self.body.len().min(600)];
        write!(
            f,
            "{} {:#04x} {} bytes \"{}\"",
            NAMES[usize::from(self.kind())],
            self.head,
            self.body.len(),
            shown.escape_ascii()
        )
    }
}

/// A PUBLISH, to send or received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Publish {
    pub topic: String,
    pub payload: Vec<u8>,
    /// 0, 1 or 2.
    pub qos: u8,
    pub retain: bool,
    pub dup: bool,
    /// 0 at QoS 0.
    pub packet_id: u16,
    /// In the order of the wire.
    pub properties: Vec<Property>,
}

impl Publish {
    /// The subscription identifiers in ascending order. Panics if there are other properties.
    pub fn subscription_ids(&self) -> Vec<u32> {
        let ids = self.properties.iter().map(|property| match property {
            Property::SubscriptionId(id) => *id,
            other => panic!("{other:?}"),
        });
        let mut ids: Vec<u32> = ids.collect();
        ids.sort_unstable();
        ids
    }

    /// QoS 0, no properties.
    pub fn new(topic: &str, payload: impl AsRef<[u8]>) -> Publish {
        Publish {
            topic: topic.into(),
            payload: payload.as_ref().to_vec(),
            qos: 0,
            retain: false,
            dup: false,
            packet_id: 0,
            properties: Vec::new(),
        }
    }

    /// With this QoS. The client assigns the packet id.
    #[must_use]
    pub fn qos(mut self, qos: u8) -> Publish {
        self.qos = qos;
        self
    }

    #[must_use]
    pub fn retained(mut self) -> Publish {
        self.retain = true;
        self
    }

    #[must_use]
    pub fn with(mut self, property: Property) -> Publish {
        self.properties.push(property);
        self
    }

    pub fn correlation(&self) -> Option<&[u8]> {
        self.properties.iter().find_map(|property| match property {
            Property::CorrelationData(data) => Some(&data[..]),
            _ => None,
        })
    }

    /// The first user property with this name.
    pub fn user(&self, name: &str) -> Option<&str> {
        self.properties.iter().find_map(|property| match property {
            Property::User(found, value) if found == name => Some(&value[..]),
            _ => None,
        })
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.bytes_with(&property::write(&self.properties))
    }

    /// The bytes of the wire with these bytes between packet id and payload.
    pub(crate) fn bytes_with(&self, properties: &[u8]) -> Vec<u8> {
        let head = 0x30 | u8::from(self.dup) << 3 | self.qos << 1 | u8::from(self.retain);
        let mut body = sized(self.topic.as_bytes());
        if self.qos > 0 {
            body.extend(self.packet_id.to_be_bytes());
        }
        body.extend(properties);
        body.extend(&self.payload);
        packet(head, &body)
    }
}

/// Any packet: first byte, length, body.
pub fn packet(head: u8, body: &[u8]) -> Vec<u8> {
    let mut out = vec![head];
    out.extend(variable(u32::try_from(body.len()).unwrap()));
    out.extend_from_slice(body);
    out
}

/// CONNACK with reason 0.
pub fn connack(session_present: bool, properties: &[Property]) -> Vec<u8> {
    let mut body = vec![u8::from(session_present), 0];
    body.extend(property::write(properties));
    packet(0x20, &body)
}

/// SUBACK with a reason per filter.
pub fn suback(packet_id: u16, reasons: &[u8]) -> Vec<u8> {
    let mut body = packet_id.to_be_bytes().to_vec();
    body.push(0);
    body.extend(reasons);
    packet(0x90, &body)
}

pub fn puback(packet_id: u16, reason: u8, properties: &[Property]) -> Vec<u8> {
    let mut body = packet_id.to_be_bytes().to_vec();
    body.push(reason);
    body.extend(property::write(properties));
    packet(0x40, &body)
}

/// PUBACK, PUBREC, PUBREL or PUBCOMP with reason 0 in its short form.
pub fn acknowledge(kind: u8, packet_id: u16) -> Vec<u8> {
    let flags = if kind == kind::PUBREL { 2 } else { 0 };
    packet(kind << 4 | flags, &packet_id.to_be_bytes())
}

/// SUBSCRIBE to filters with their options byte.
pub fn subscribe(packet_id: u16, properties: &[Property], filters: &[(&str, u8)]) -> Vec<u8> {
    let mut body = packet_id.to_be_bytes().to_vec();
    body.extend(property::write(properties));
    for (filter, options) in filters {
        body.extend(sized(filter.as_bytes()));
        body.push(*options);
    }
    packet(0x82, &body)
}

pub fn unsubscribe(packet_id: u16, filter: &str) -> Vec<u8> {
    let mut body = packet_id.to_be_bytes().to_vec();
    body.push(0);
    body.extend(sized(filter.as_bytes()));
    packet(0xA2, &body)
}

pub fn disconnect(reason: u8, properties: &[Property]) -> Vec<u8> {
    let mut body = vec![reason];
    body.extend(property::write(properties));
    packet(0xE0, &body)
}

/// A cursor that panics at the end.
pub struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    pub fn take(&mut self, n: usize) -> &'a [u8] {
        assert!(n <= self.0.len(), "a packet ends too early");
        let (head, tail) = self.0.split_at(n);
        self.0 = tail;
        head
    }

    pub fn byte(&mut self) -> u8 {
        self.take(1)[0]
    }

    pub fn short(&mut self) -> u16 {
        u16::from_be_bytes(self.take(2).try_into().unwrap())
    }

    pub fn long(&mut self) -> u32 {
        u32::from_be_bytes(self.take(4).try_into().unwrap())
    }

    pub fn sized(&mut self) -> &'a [u8] {
        let n = self.short();
        self.take(n.into())
    }

    pub fn text(&mut self) -> String {
        String::from_utf8(self.sized().to_vec()).unwrap()
    }

    pub fn variable(&mut self) -> u32 {
        let mut value = 0;
        for shift in [0, 7, 14, 21] {
            let byte = self.byte();
            value |= u32::from(byte & 0x7F) << shift;
            if byte & 0x80 == 0 {
                return value;
            }
        }
        panic!("a variable byte integer of more than four bytes")
    }
}
