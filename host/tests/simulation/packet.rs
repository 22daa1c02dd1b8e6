//! The packets of a client at either protocol level, encoded and decoded without code of the broker.

use statehouse_tests::{
    Property,
    packet::{self, Packet as Whole, kind},
    packet3,
};

pub(crate) use statehouse_tests::Publish;

/// The protocol level of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Level {
    /// MQTT 3.1.1.
    Four,
    /// MQTT 5.
    #[default]
    Five,
}

use Level::{Five, Four};

/// A packet from the broker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Packet {
    Connack { present: bool, reason: u8 },
    Publish(Publish),
    Ack { kind: Ack, id: u16, reason: u8 },
    Suback { id: u16, reasons: Vec<u8> },
    Pingresp,
    Disconnect { reason: u8 },
}

/// The four acknowledgements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ack {
    Puback = 4,
    Pubrec = 5,
    Pubrel = 6,
    Pubcomp = 7,
}

/// At level four the properties are lost.
pub(crate) fn publish(level: Level, it: &Publish) -> Vec<u8> {
    match level {
        Four => Publish {
            properties: Vec::new(),
            ..it.clone()
        }
        .bytes3(),
        Five => it.bytes(),
    }
}

pub(crate) fn ack(kind: Ack, id: u16) -> Vec<u8> {
    packet::acknowledge(kind as u8, id)
}

pub(crate) fn subscribe(level: Level, id: u16, filters: &[(String, u8)]) -> Vec<u8> {
    let filters: Vec<_> = filters
        .iter()
        .map(|(filter, qos)| (&**filter, *qos))
        .collect();
    match level {
        Four => packet3::subscribe(id, &filters),
        Five => packet::subscribe(id, &[], &filters),
    }
}

/// At level four the reason is always zero.
pub(crate) fn disconnect(level: Level, reason: u8) -> Vec<u8> {
    match level {
        Four => packet3::DISCONNECT.to_vec(),
        Five => packet::disconnect(reason, &[]),
    }
}

/// Takes the first packet from the buffer, if it is complete.
pub(crate) fn decode(level: Level, buffer: &mut Vec<u8>) -> Option<Packet> {
    let packet = Whole::cut(buffer)?;
    Some(match packet.kind() {
        kind::CONNACK => {
            let (present, reason) = match level {
                Four => packet.connack3(),
                Five => {
                    let it = packet.ack();
                    (it.session_present, it.reason)
                }
            };
            Packet::Connack { present, reason }
        }
        kind::PUBLISH => Packet::Publish(match level {
            Four => packet.publish3(),
            Five => {
                let it = packet.publish();
                assert!(it.properties.iter().all(is_expected), "{it:?}");
                it
            }
        }),
        kind @ kind::PUBACK..=kind::PUBCOMP => {
            let (id, reason) = match level {
                Four => (packet.ack3(), 0),
                Five => {
                    let it = packet.ack();
                    (it.packet_id, it.reason)
                }
            };
            let kinds = [Ack::Puback, Ack::Pubrec, Ack::Pubrel, Ack::Pubcomp];
            let kind = kinds[usize::from(kind - kind::PUBACK)];
            Packet::Ack { kind, id, reason }
        }
        kind::SUBACK => {
            let (id, reasons) = match level {
                Four => packet.suback3(),
                Five => packet.suback(),
            };
            Packet::Suback { id, reasons }
        }
        kind::PINGRESP => Packet::Pingresp,
        kind::DISCONNECT if level == Five => Packet::Disconnect {
            reason: packet.ack().reason,
        },
        _ => panic!("the broker sent {packet:?}"),
    })
}

/// Whether a PUBLISH to a client may have this property. No client allows topic aliases.
fn is_expected(property: &Property) -> bool {
    use Property::*;
    matches!(
        property,
        PayloadFormat(_)
            | MessageExpiry(_)
            | ContentType(_)
            | ResponseTopic(_)
            | CorrelationData(_)
            | SubscriptionId(_)
            | User(..)
    )
}
