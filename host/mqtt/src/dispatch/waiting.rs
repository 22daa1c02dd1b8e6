//! The packets of one connection that were decoded but not handled, in their order.
//!
//! A paused connection may keep thousands of them. So they are counted as they come and leave: a
//! turn must not walk all of them, since other connections wait for its end. Nothing is counted
//! before the first pause, since most packets leave in the turn in which they come.

use std::collections::{VecDeque, hash_map::Entry};

use rustc_hash::FxHashMap;

use super::held_packet::{detach, is_immediate, packet_bytes};
use crate::{Claim, QoS, codec::Packet, limits::SPARE_ENTRIES_MAX};

/// Waiting packets. Their sizes and packet ids must not change while they are counted.
#[derive(Default)]
pub(super) struct WaitingPackets {
    packets: VecDeque<(Packet, Claim)>,
    /// Since the connection was paused, until it is not and none waits.
    counts: Option<Counts>,
}

#[derive(Default, PartialEq)]
struct Counts {
    /// The memory that the packets take.
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

    /// Begins to count them. Walks all packets once.
    pub(super) fn count(&mut self) {
        if self.counts.is_none() {
            self.counts = Some(Counts::of(&self.packets));
        }
    }

    /// The memory that they take, in bytes, if they are counted.
    pub(super) fn bytes(&self) -> usize {
        self.counts.as_ref().map_or(0, |it| it.bytes)
    }

    pub(super) fn front(&self) -> Option<&(Packet, Claim)> {
        self.packets.front()
    }

    #[inline]
    pub(super) fn push_back(&mut self, packet: Packet, claim: Claim) {
        if let Some(counts) = &mut self.counts {
            counts.add(&packet);
        }
        self.packets.push_back((packet, claim));
    }

    pub(super) fn push_front(&mut self, packet: Packet, claim: Claim) {
        if let Some(counts) = &mut self.counts {
            counts.add(&packet);
        }
        self.packets.push_front((packet, claim));
    }

    #[inline]
    pub(super) fn pop_front(&mut self) -> Option<(Packet, Claim)> {
        let first = self.packets.pop_front()?;
        if let Some(counts) = &mut self.counts {
            counts.subtract(&first.0);
        }
        Some(first)
    }

    /// Moves those that may overtake the others, in their order.
    pub(super) fn move_immediate(&mut self, to: &mut VecDeque<(Packet, Claim)>) {
        if self.counts.as_ref().is_some_and(|it| it.immediate == 0) {
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

    /// Whether they are counted and a PUBLISH at QoS 2 has this packet id.
    pub(super) fn has_exactly_once(&self, packet_id: u16) -> bool {
        let counts = self.counts.as_ref();
        counts.is_some_and(|it| it.exactly_once.contains_key(&packet_id))
    }

    /// Removes all PUBLISHes at QoS 2 with this packet id, and returns their number. Walks all
    /// packets.
    pub(super) fn remove_exactly_once(&mut self, packet_id: u16) -> usize {
        let before = self.packets.len();
        self.packets.retain(|(packet, _)| {
            let stays = exactly_once(packet) != Some(packet_id);
            if !stays && let Some(counts) = &mut self.counts {
                counts.subtract(packet);
            }
            stays
        });
        before - self.packets.len()
    }

    /// Copies them into memory of their own.
    pub(super) fn detach(&mut self) {
        self.packets.iter_mut().for_each(|(it, _)| detach(it));
    }

    /// Returns spare memory after a burst, and stops counting if the connection is not paused.
    pub(super) fn trim(&mut self, is_paused: bool) {
        if self.packets.is_empty() {
            self.packets.shrink_to(SPARE_ENTRIES_MAX);
            if !is_paused {
                self.counts = None;
            }
        }
    }

    pub(super) fn into_packets(self) -> impl Iterator<Item = Packet> {
        self.packets.into_iter().map(|(packet, _)| packet)
    }

    /// Whether the counts, if there are any, are those of the packets. Walks all packets.
    pub(super) fn are_counts_right(&self) -> bool {
        let counts = self.counts.as_ref();
        counts.is_none_or(|it| *it == Counts::of(&self.packets))
    }
}

impl Counts {
    fn of(packets: &VecDeque<(Packet, Claim)>) -> Self {
        let mut counts = Self::default();
        packets.iter().for_each(|(it, _)| counts.add(it));
        counts
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
