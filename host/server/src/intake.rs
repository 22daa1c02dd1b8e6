//! Takes batches of inputs from a transport, in turns of limited time and size.

use std::time::Instant;

use statehouse_core::{Decision, Now, Outcome};
use statehouse_protocol::{ConnectionId, SessionId};

use super::{Server, Stepped};
use statehouse_config::limits;
use statehouse_transport::{Inbound, Intake};

/// The number of light steps of a batch between two readings of the clock: most take some
/// microseconds.
const STEPS_PER_CLOCK_READING: u32 = 8;

/// The bytes of outputs below which a step is light. Each notification has some hundred.
const LIGHT_OUTPUT_BYTES_MAX: usize = 4_096;

/// The fuel up to which a step is light: a GET or SET of the standard policy uses less.
const LIGHT_FUEL_MAX: u64 = 8_000;

/// Which outputs that wait for the log must be within their limits before the next step.
#[derive(Clone, Copy)]
pub(super) enum Room {
    /// None.
    Unlimited,
    /// Those of all connections.
    OfAll,
    /// Those that this connection caused, and those of all connections.
    Of(ConnectionId),
}

/// Whether a step takes some microseconds. Other steps are measured one by one, so that a turn ends
/// in time.
pub(super) fn is_light(decision: &Decision<'_>) -> bool {
    let effects = &decision.effects;
    matches!(decision.outcome, Outcome::Handled(..))
        && effects.fuel <= LIGHT_FUEL_MAX
        && effects.swept.is_none()
        && effects.repeated.is_none()
}

impl Server {
    /// Handles a part of a batch, until the end of the batch or the time `end`, and while there is
    /// `room`. Returns whether inputs are left. `begun` is the time at which the batch began;
    /// `disconnected` is set if the one connection of the batch is being closed, so that the rest
    /// must be skipped.
    pub(super) fn take_part(
        &self,
        room: Room,
        (begun, end): (Instant, Option<Instant>),
        batch: &mut dyn Iterator<Item = Inbound<'_>>,
        disconnected: &mut bool,
    ) -> bool {
        let mut more = true;
        {
            let mut locked = self.lock_with_room();
            let now = Now {
                ms: locked.now_ms(),
                instant: begun,
            };
            let next_expiry_ms = locked.core.store().next_expiry_ms();
            let mut reply_bytes = 0;
            let unreleased_max = locked.core.store_mut().quota().unreleased_bytes_max;
            let has_room = || self.has_room(room, unreleased_max);
            locked.swaps.begin();
            locked.calls.begin(begun, Instant::now());
            let mut steps_until_reading = STEPS_PER_CLOCK_READING;
            // A turn ends after some bytes, so that the limit of a client sees its responses in
            // time.
            while *disconnected || reply_bytes <= limits::BATCH_REPLY_BYTES_MAX && has_room() {
                if steps_until_reading == 0 && !*disconnected {
                    let now = Instant::now();
                    locked.calls.read(now);
                    if end.is_some_and(|end| now >= end) {
                        more = false;
                        break;
                    }
                    steps_until_reading = STEPS_PER_CLOCK_READING;
                }
                let Some(inbound) = batch.next() else {
                    more = false;
                    break;
                };
                if locked.is_short_of_room() {
                    // Each removal takes some of the reserve.
                    locked.check_disk_space(&*self.journal);
                }
                if *disconnected {
                    self.skip(&mut locked, inbound);
                    continue;
                }
                match self.step(&mut locked, inbound, now) {
                    Stepped::Queued { bytes, is_light } => {
                        reply_bytes += bytes;
                        steps_until_reading = match is_light && bytes < LIGHT_OUTPUT_BYTES_MAX {
                            true => steps_until_reading - 1,
                            false => 0,
                        };
                    }
                    Stepped::Disconnected => *disconnected = true,
                }
            }
            let ended = Instant::now();
            locked.swaps.end(ended);
            locked.calls.read(ended);
            let after = locked.core.store().next_expiry_ms();
            if after.is_some() && (next_expiry_ms.is_none() || after < next_expiry_ms) {
                self.expiry.notify_one();
            }
        }
        self.release();
        more
    }

    fn has_room(&self, room: Room, unreleased_max: u64) -> bool {
        match room {
            Room::Unlimited => true,
            Room::OfAll => self.gate.waiting_bytes() <= unreleased_max,
            Room::Of(connection) => self.gate.has_room(connection, unreleased_max),
        }
    }
}

impl Intake for Server {
    fn take(&self, batch: &mut dyn Iterator<Item = Inbound<'_>>) {
        let time = (Instant::now(), None);
        let mut disconnected = false;
        while self.take_part(Room::Unlimited, time, batch, &mut disconnected) {}
    }

    fn take_with_room(&self, batch: &mut dyn Iterator<Item = Inbound<'_>>) {
        let time = (Instant::now(), None);
        let unreleased_max = self.quota().unreleased_bytes_max;
        let mut disconnected = false;
        while self.take_part(Room::OfAll, time, batch, &mut disconnected)
            && self.has_room(Room::OfAll, unreleased_max)
        {}
    }

    fn announce(&self, session: SessionId, payloads: &mut dyn Iterator<Item = &[u8]>) {
        self.inspect(|store| store.prefetch(session, payloads));
    }

    fn take_some(&self, connection: ConnectionId, batch: &mut dyn Iterator<Item = Inbound<'_>>) {
        let begun = Instant::now();
        let time = (begun, Some(begun + limits::REQUESTS_PER_TURN_TIME));
        let mut disconnected = false;
        // Inputs after a request that ended its connection are never left over.
        let room = Room::Of(connection);
        while self.take_part(room, time, batch, &mut disconnected) && disconnected {}
    }
}
