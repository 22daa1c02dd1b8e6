//! Continues with waiting packets if their client cannot make room for them.
//!
//! A client may send its acknowledgements behind all PUBLISHes that its Receive Maximum allows. If
//! more packets wait than are kept, nothing more is read, and the acknowledgements would never
//! arrive. So the first packets are handled beyond the part of the client's queue that is meant for
//! them, and refused when three quarters of the queue are used.

use std::time::Instant;

use super::{
    Dispatch, Turn,
    held_packet::{WAITING_PER_WORK, publish_bytes, request_bytes},
};
use crate::{
    Claim, ReasonCode,
    broker::Guard,
    codec::{Packet, Violation},
    core::Relief,
    limits::{WORK_PER_TURN_MAX, work},
};

/// The answer to a PUBLISH for which the client's queue has no room.
const NO_ROOM: (ReasonCode, &str) = (
    ReasonCode::QUOTA_EXCEEDED,
    "the message queue of this client is full: acknowledge its messages first",
);

impl Dispatch {
    /// Handles waiting PUBLISHes until more packets may be kept, if only acknowledgements of the
    /// client can make room. Returns how the turn of a paused connection ends.
    pub(super) fn relieve(&mut self, now: Instant) -> Result<Turn, Violation> {
        let broker = self.broker.clone();
        let work_end = broker.lock().work() + WORK_PER_TURN_MAX;
        let mut turn = Turn::Paused;
        loop {
            let is_relieved = match self.requests.is_empty() {
                true => self.relieve_packet(now, &mut broker.lock())?,
                false => self.relieve_requests(),
            };
            // While packets of all connections use up their limit, others may need the room.
            if !is_relieved || !self.may_hold_more {
                return Ok(turn);
            }
            turn = Turn::More;
            if self.accepts_input() {
                return Ok(turn);
            }
            if broker.lock().work() >= work_end {
                return Ok(Turn::Cut);
            }
        }
    }

    fn relieve_packet(&mut self, now: Instant, core: &mut Guard<'_>) -> Result<bool, Violation> {
        let key = self.session;
        let Some((Packet::Publish(publish), claim)) = self.packets.front() else {
            return Ok(false);
        };
        let bytes = publish_bytes(publish);
        let relief = match core.relief(key, bytes) {
            Relief::Wait => return Ok(false),
            // The client's queue does not grow.
            Relief::Refuse if *claim == Claim::Route && !core.returns(key, &publish.topic) => {
                Relief::Handle
            }
            relief => relief,
        };
        let Some((packet, mut claim)) = self.packets.pop_front() else {
            return Ok(false);
        };
        self.check_again(&packet, &mut claim);
        if relief == Relief::Refuse && !matches!(claim, Claim::Refuse(..)) {
            claim = Claim::Refuse(NO_ROOM.0, NO_ROOM.1);
        }
        core.checkpoint();
        core.work_done(work::PACKET);
        self.handle_packet(packet, claim, now, core)?;
        Ok(true)
    }

    /// Hands over requests that have begun, or refuses the first.
    fn relieve_requests(&mut self) -> bool {
        let first = self.requests.first().map_or(0, request_bytes);
        let broker = self.broker.clone();
        let mut core = broker.lock();
        match core.relief(self.session, first) {
            Relief::Wait => false,
            Relief::Handle => core.unlocked(|| self.hand_over()),
            Relief::Refuse => {
                core.work_done(work::PACKET + self.requests.len() as u64 / WAITING_PER_WORK);
                let token = self.requests.remove(0).token;
                self.requests_bytes -= first;
                core.refuse_begun(self.session, token, NO_ROOM.0, NO_ROOM.1);
                true
            }
        }
    }
}
