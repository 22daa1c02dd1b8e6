//! Takes batches of inputs from a transport, in turns of limited time and size.

use std::time::{Duration, Instant};

use statehouse_core::Now;
use statehouse_protocol::ConnectionId;

use super::{Server, Stepped};
use crate::limits;
use crate::transport::{Inbound, Intake};

/// The number of steps of a batch between two readings of the clock.
const STEPS_PER_CLOCK_READING: u32 = 4;

impl Server {
    /// Handles a part of a batch, until the end of the batch or the time `end`. Returns whether
    /// inputs are left. `begun` is the time at which the batch began, and `owner` is the connection
    /// of the batch, if it has only one; `disconnected` is set if that connection is being closed,
    /// so that the rest must be skipped.
    fn take_part(
        &self,
        owner: Option<ConnectionId>,
        (begun, end): (Instant, Option<Instant>),
        batch: &mut dyn Iterator<Item = Inbound<'_>>,
        disconnected: &mut bool,
    ) -> bool {
        let mut more = true;
        {
            let mut locked = self.lock();
            let now = Now {
                ms: locked.now_ms(),
                instant: begun,
            };
            locked.check_disk_space(&*self.journal);
            let next_expiry_ms = locked.core.store().next_expiry_ms();
            let mut reply_bytes = 0;
            let unreleased_max = locked.core.store_mut().quota().unreleased_bytes_max;
            let has_room = || owner.is_none_or(|it| self.gate.has_room(it, unreleased_max));
            locked.swaps.begin();
            locked.calls.begin(begun, Instant::now());
            let mut steps = 0_u32;
            // A turn ends after some bytes, so that the limit of a client sees its responses in
            // time.
            while *disconnected || reply_bytes <= limits::BATCH_REPLY_BYTES_MAX && has_room() {
                // The clock is not read at each step: most take some microseconds.
                steps += 1;
                let reads_clock = steps.is_multiple_of(STEPS_PER_CLOCK_READING) && !*disconnected;
                if reads_clock {
                    let now = Instant::now();
                    locked.calls.read(now);
                    if end.is_some_and(|end| now >= end) {
                        more = false;
                        break;
                    }
                }
                let Some(inbound) = batch.next() else {
                    more = false;
                    break;
                };
                if *disconnected {
                    self.skip(&mut locked, inbound);
                    continue;
                }
                match self.step(&mut locked, inbound, now) {
                    Stepped::Queued(bytes) => reply_bytes += bytes,
                    Stepped::Disconnected => *disconnected = true,
                }
            }
            locked.swaps.end();
            locked.calls.read(Instant::now());
            let after = locked.core.store().next_expiry_ms();
            if after.is_some() && (next_expiry_ms.is_none() || after < next_expiry_ms) {
                self.expiry.notify_one();
            }
        }
        self.release();
        more
    }
}

/// The present instant, and the one after this time; `None` if it is never reached.
fn from_now(time_max: Duration) -> (Instant, Option<Instant>) {
    let begun = Instant::now();
    (begun, begun.checked_add(time_max))
}

impl Intake for Server {
    fn take_within(&self, time_max: Duration, batch: &mut dyn Iterator<Item = Inbound<'_>>) {
        let time = from_now(time_max);
        let mut disconnected = false;
        while self.take_part(None, time, batch, &mut disconnected) {}
    }

    fn announce(&self, payloads: &mut dyn Iterator<Item = &[u8]>) {
        self.inspect(|store| store.prefetch(payloads));
    }

    fn take_some(&self, connection: ConnectionId, batch: &mut dyn Iterator<Item = Inbound<'_>>) {
        let time = from_now(limits::REQUESTS_PER_TURN_TIME);
        let mut disconnected = false;
        // Inputs after a request that ended its connection are never left over.
        while self.take_part(Some(connection), time, batch, &mut disconnected) && disconnected {}
    }
}
