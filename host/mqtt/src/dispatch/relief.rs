//! Continues with waiting packets if their client cannot make room for them.
//!
//! A client may send its acknowledgements behind all PUBLISHes that its Receive Maximum allows: most
//! write in one order. If more packets wait than are kept, nothing more is read, and the
//! acknowledgements would never arrive. So the first packets are handled beyond the part of the
//! client's queue that is meant for them, and refused when the whole queue is full.

use std::time::Instant;

use super::{
    Dispatch, Turn,
    held_packet::{packet_bytes, request_bytes},
};
use crate::{
    Claim, ReasonCode,
    codec::{Packet, Violation},
    limits::work,
};

/// The answer to a PUBLISH for which the client's queue has no room.
const NO_ROOM: (ReasonCode, &str) = (
    ReasonCode::QUOTA_EXCEEDED,
    "the message queue of this client is full: acknowledge its messages first",
);

impl Dispatch {
    /// Handles the first waiting PUBLISH if only acknowledgements of the client can make room, and
    /// returns how the turn of a paused connection ends.
    pub(super) fn relieve(&mut self, now: Instant) -> Result<Turn, Violation> {
        let is_relieved = match self.requests.is_empty() {
            true => self.relieve_packet(now)?,
            false => self.relieve_request(),
        };
        // While packets of all connections use up their limit, others may need the room.
        Ok(match is_relieved && self.may_hold_more {
            true => Turn::More,
            false => Turn::Paused,
        })
    }

    fn relieve_packet(&mut self, now: Instant) -> Result<bool, Violation> {
        let key = self.session;
        let broker = self.broker.clone();
        let mut core = broker.lock();
        if core.has_room_for_answers(key) || !core.has_taken_output(key) {
            return Ok(false);
        }
        let front = self
            .packets
            .pop_front_if(|it| matches!(it.0, Packet::Publish(_)));
        let Some((packet, mut claim)) = front else {
            return Ok(false);
        };
        self.check_again(&packet, &mut claim);
        if let Packet::Publish(publish) = &packet
            && !core.has_room_for_own(key, packet_bytes(&packet))
            && (claim == Claim::Take || claim == Claim::Route && core.returns(key, &publish.topic))
        {
            claim = Claim::Refuse(NO_ROOM.0, NO_ROOM.1);
        }
        core.checkpoint();
        core.work_done(work::PACKET);
        self.handle_packet(packet, claim, now, &mut core)?;
        Ok(true)
    }

    /// Hands over the first request that has begun, or refuses it.
    fn relieve_request(&mut self) -> bool {
        let key = self.session;
        let bytes = self.requests.first().map_or(0, request_bytes);
        let has_room = {
            let core = self.broker.lock();
            if core.has_room_for_answers(key) || !core.has_taken_output(key) {
                return false;
            }
            core.has_room_for_own(key, bytes)
        };
        let rest = self.requests.split_off(1);
        let is_relieved = match has_room {
            true => self.hand_over(),
            false => {
                let tokens = self.requests.drain(..).filter_map(|it| it.token);
                self.broker.batch(|batch| {
                    tokens.for_each(|it| batch.acknowledge(it, NO_ROOM.0, Some(NO_ROOM.1)));
                });
                true
            }
        };
        self.requests.extend(rest);
        is_relieved
    }
}
