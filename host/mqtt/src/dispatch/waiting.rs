//! The packets of one connection that were decoded but not handled, in their order.
//!
//! A paused connection may keep thousands of them. So they are counted as they come and leave: a
//! turn must not walk all of them, since other connections wait for its end.

use std::collections::{VecDeque, hash_map::Entry};

use rustc_hash::FxHashMap;

use super::held_packet::{detach, is_immediate, packet_bytes};
use crate::{Claim, QoS, codec::Packet, limits::SPARE_ENTRIES_MAX};

/// Waiting packets. Their sizes and packet ids must not change while they wait, or the counts are
/// wrong.
#[derive(Default)]
pub(super) struct WaitingPackets {
    packets: VecDeque<(Packet, Claim)>,
    /// The memory that they take.
    bytes: usize,
    /// How many may overtake the others.
    immediate: usize,
    /// How many PUBLISHes at QoS 2 have each packet id. No count is zero.
    exactly_once: FxHashMap<u16, usize>,
}

impl WaitingPackets {
    pub(super) fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.packets.len()
    }

    /// The memory that they take, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn front(&self) -> Option<&(Packet, Claim)> {
        self.packets.front()
    }

    #[inline]
    pub(super) fn push_back(&mut self, packet: Packet, claim: Claim) {
        self.add(&packet);
        self.packets.push_back((packet, claim));
    }

    pub(super) fn push_front(&mut self, packet: Packet, claim: Claim) {
        self.add(&packet);
        self.packets.push_front((packet, claim));
    }

    #[inline]
    pub(super) fn pop_front(&mut self) -> Option<(Packet, Claim)> {
        let first = self.packets.pop_front()?;
        self.subtract(&first.0);
        Some(first)
    }

    /// Moves those that may overtake the others, in their order.
    pub(super) fn move_immediate(&mut self, to: &mut VecDeque<(Packet, Claim)>) {
        if self.immediate == 0 {
            return;
        }
        for _ in 0..self.packets.len() {
            let Some((packet, claim)) = self.pop_front() else {
                return;
            };
            match is_immediate(&packet) {
                true => to.push_back((packet, claim)),
                false => self.push_back(packet, claim),
            }
        }
    }

    /// Whether a PUBLISH at QoS 2 has this packet id.
    pub(super) fn has_exactly_once(&self, packet_id: u16) -> bool {
        self.exactly_once.contains_key(&packet_id)
    }

    /// Removes all PUBLISHes at QoS 2 with this packet id, and returns their number. Walks all
    /// packets.
    pub(super) fn remove_exactly_once(&mut self, packet_id: u16) -> usize {
        let mut bytes = 0;
        self.packets.retain(|(packet, _)| {
            let stays = exactly_once(packet) != Some(packet_id);
            if !stays {
                bytes += packet_bytes(packet);
            }
            stays
        });
        self.bytes -= bytes;
        self.exactly_once.remove(&packet_id).unwrap_or_default()
    }

    /// Copies them into memory of their own.
    pub(super) fn detach(&mut self) {
        self.packets.iter_mut().for_each(|(it, _)| detach(it));
    }

    /// Returns spare memory after a burst.
    pub(super) fn trim(&mut self) {
        if self.packets.is_empty() {
            self.packets.shrink_to(SPARE_ENTRIES_MAX);
            self.exactly_once.shrink_to(SPARE_ENTRIES_MAX);
        }
    }

    pub(super) fn into_packets(self) -> impl Iterator<Item = Packet> {
        self.packets.into_iter().map(|(packet, _)| packet)
    }

    /// Whether the counts are those of the packets. Walks all packets.
    pub(super) fn is_counted(&self) -> bool {
        let mut counted = Self::default();
        self.packets.iter().for_each(|(it, _)| counted.add(it));
        (self.bytes, self.immediate) == (counted.bytes, counted.immediate)
            && self.exactly_once == counted.exactly_once
    }

    fn add(&mut self, packet: &Packet) {
        self.bytes += packet_bytes(packet);
        self.immediate += usize::from(is_immediate(packet));
        if let Some(packet_id) = exactly_once(packet) {
            *self.exactly_once.entry(packet_id).or_default() += 1;
        }
    }

    fn subtract(&mut self, packet: &Packet) {
        self.bytes -= packet_bytes(packet);
        self.immediate -= usize::from(is_immediate(packet));
        if let Some(packet_id) = exactly_once(packet)
            && let Entry::Occupied(mut count) = self.exactly_once.entry(packet_id)
        {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

/// The packet id of a PUBLISH at QoS 2.
fn exactly_once(packet: &Packet) -> Option<u16> {
    match packet {
        Packet::Publish(it) if it.qos == QoS::ExactlyOnce => Some(it.packet_id),
        _ => None,
    }
}
