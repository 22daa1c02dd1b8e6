//! Packets that wait in the dispatch: which may overtake others, and the memory that they take.

use bytes::Bytes;

use crate::{
    Message, Properties,
    codec::{Filter, Packet},
    limits::MESSAGE_OVERHEAD_BYTES,
};

/// Whether a packet frees memory, or takes none, and waits for no other packet.
#[inline]
pub(super) fn is_immediate(packet: &Packet) -> bool {
    matches!(
        packet,
        Packet::Puback(_)
            | Packet::Pubrec(_)
            | Packet::Pubrel(_)
            | Packet::Pubcomp(_)
            | Packet::Pingreq
    )
}

/// Copies a PUBLISH into memory of its own; other packets do not borrow the read buffer.
pub(super) fn detach(packet: &mut Packet) {
    if let Packet::Publish(it) = packet {
        copy(&mut it.topic, &mut it.payload, &mut it.properties);
    }
}

pub(super) fn copy(topic: &mut Bytes, payload: &mut Bytes, properties: &mut Properties) {
    let copy = Message::copied(topic, payload, properties.raw());
    (*topic, *payload, properties.raw) = (copy.topic, copy.payload, copy.properties);
}

/// The memory that a waiting packet takes.
pub(super) fn packet_bytes(packet: &Packet) -> usize {
    match packet {
        Packet::Publish(it) => publish_bytes(&it.topic, &it.payload, &it.properties),
        Packet::Subscribe(it) => {
            let filters = it.filters.iter();
            let filters = filters.map(|it| it.filter.len() + size_of::<Filter>());
            filters.sum::<usize>() + MESSAGE_OVERHEAD_BYTES
        }
        Packet::Unsubscribe(it) => {
            let filters = it.filters.iter();
            let filters = filters.map(|it| it.len() + size_of::<Bytes>());
            filters.sum::<usize>() + MESSAGE_OVERHEAD_BYTES
        }
        _ => MESSAGE_OVERHEAD_BYTES,
    }
}

pub(super) fn publish_bytes(topic: &Bytes, payload: &Bytes, properties: &Properties) -> usize {
    topic.len() + payload.len() + properties.raw().len() + MESSAGE_OVERHEAD_BYTES
}
