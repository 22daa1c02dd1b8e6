//! Packets that wait in the dispatch: which may overtake others, and the memory that they take.

use bytes::Bytes;

use super::Dispatch;
use crate::{
    Message, Properties, Request,
    broker::Guard,
    codec::{Filter, Packet, Publish},
    limits::MESSAGE_OVERHEAD_BYTES,
};

/// Waiting packets that are examined for one unit of work: some nanoseconds each.
pub(super) const WAITING_PER_WORK: u64 = 16;

impl Dispatch {
    /// Answers waiting PUBLISHes that repeat an unfinished one, before its PUBREL: behind the
    /// PUBREL they would be new messages. MQTT 3.1.1 allows repetitions at any time.
    pub(super) fn answer_repetitions(&mut self, packet_id: u16, core: &mut Guard<'_>) {
        let (key, connection) = (self.session, self.origin.connection);
        if !self.packets.has_exactly_once(packet_id)
            || !core.has_answered(key, connection, packet_id)
        {
            return;
        }
        core.work_done(self.packets.len() as u64 / WAITING_PER_WORK);
        for _ in 0..self.packets.remove_exactly_once(packet_id) {
            core.answer_again(key, packet_id);
        }
    }
}

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
        Packet::Publish(it) => publish_bytes(it),
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
        Packet::Auth(it) => {
            let enhanced = it.enhanced.as_ref();
            let bytes = enhanced.map_or(0, |it| it.method.len() + it.data.len());
            bytes + MESSAGE_OVERHEAD_BYTES
        }
        _ => MESSAGE_OVERHEAD_BYTES,
    }
}

pub(super) fn publish_bytes(it: &Publish) -> usize {
    message_bytes(&it.topic, &it.payload, &it.properties)
}

pub(super) fn request_bytes(it: &Request) -> usize {
    message_bytes(&it.topic, &it.payload, &it.properties)
}

fn message_bytes(topic: &Bytes, payload: &Bytes, properties: &Properties) -> usize {
    topic.len() + payload.len() + properties.raw().len() + MESSAGE_OVERHEAD_BYTES
}
