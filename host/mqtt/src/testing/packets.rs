//! Packets of a client of MQTT 5.

use bytes::{Bytes, BytesMut};
use rumqttc::v5::mqttbytes::{QoS as Q, v5 as wire};
use wire::Packet;

/// The bytes of these packets.
pub(crate) fn bytes(packets: &[Packet]) -> BytesMut {
    let mut bytes = BytesMut::new();
    for packet in packets {
        packet.write(&mut bytes, None).unwrap();
    }
    bytes
}

pub(crate) fn publish(topic: &str, qos: Q, packet_id: u16, payload: &str) -> wire::Publish {
    let mut publish =
        wire::Publish::new(topic, qos, Bytes::copy_from_slice(payload.as_bytes()), None);
    publish.pkid = packet_id;
    publish
}

/// A PUBLISH of a message to retain.
pub(crate) fn retained(topic: &str, qos: Q, packet_id: u16, payload: &str) -> Packet {
    let mut publish = publish(topic, qos, packet_id, payload);
    publish.retain = true;
    Packet::Publish(publish)
}

/// A PUBLISH that is sent again.
pub(crate) fn repeated(topic: &str, qos: Q, packet_id: u16, payload: &str) -> Packet {
    let mut publish = publish(topic, qos, packet_id, payload);
    publish.dup = true;
    Packet::Publish(publish)
}

pub(crate) fn puback(packet_id: u16) -> Packet {
    Packet::PubAck(wire::PubAck::new(packet_id, None))
}

pub(crate) fn pubrec(packet_id: u16) -> Packet {
    Packet::PubRec(wire::PubRec::new(packet_id, None))
}

pub(crate) fn pubrel(packet_id: u16) -> Packet {
    Packet::PubRel(wire::PubRel::new(packet_id, None))
}

pub(crate) fn pubcomp(packet_id: u16) -> Packet {
    Packet::PubComp(wire::PubComp::new(packet_id, None))
}

pub(crate) fn ping() -> Packet {
    Packet::PingReq(wire::PingReq)
}

/// A SUBSCRIBE with one filter.
pub(crate) fn subscribe(filter: &str, qos: Q) -> Packet {
    subscribe_to([wire::Filter::new(filter, qos)], None)
}

pub(crate) fn subscribe_to(
    filters: impl IntoIterator<Item = wire::Filter>,
    id: Option<usize>,
) -> Packet {
    let properties = id.map(|id| wire::SubscribeProperties {
        id: Some(id),
        user_properties: Vec::new(),
    });
    let mut subscribe = wire::Subscribe::new_many(filters, properties);
    subscribe.pkid = 1;
    Packet::Subscribe(subscribe)
}

pub(crate) fn unsubscribe(filters: &[impl AsRef<str>]) -> Packet {
    Packet::Unsubscribe(wire::Unsubscribe {
        pkid: 2,
        filters: filters.iter().map(|it| it.as_ref().to_owned()).collect(),
        properties: None,
    })
}

/// A DISCONNECT that sets the Session Expiry Interval.
pub(crate) fn disconnect(reason_code: wire::DisconnectReasonCode, expiry_s: u32) -> Packet {
    let properties = wire::DisconnectProperties {
        session_expiry_interval: Some(expiry_s),
        reason_string: None,
        user_properties: Vec::new(),
        server_reference: None,
    };
    Packet::Disconnect(wire::Disconnect {
        reason_code,
        properties: Some(properties),
    })
}

/// The properties of a received message.
pub(crate) fn properties(message: &wire::Publish) -> &wire::PublishProperties {
    message.properties.as_ref().unwrap()
}

/// The reason of the DISCONNECT that is last.
pub(crate) fn disconnected(packets: &[Packet]) -> Option<wire::DisconnectReasonCode> {
    match packets.last() {
        Some(Packet::Disconnect(disconnect)) => Some(disconnect.reason_code),
        _ => None,
    }
}
