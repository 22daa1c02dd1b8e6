//! Recognizes clients that leave Nagle's algorithm on (RFC 896), such as paho, MQTT.js and rumqttc as shipped.
//!
//! Such a client holds back a small segment until the one before it is acknowledged. If a read asks for no answer, such as a
//! PUBACK alone, the kernel delays that acknowledgement by 40 ms for want of something to send with it. The broker then
//! acknowledges at once, which is a system call. Clients that send without delay must not pay it, so a connection does so
//! only for a number of reads after such a pause; then one read is left out to see whether the pause comes again.

use std::time::Instant;

use crate::limits::{DELAYED_ACK, QUICK_ACKS_MAX, QUICK_ACKS_MIN};

/// What the reads of one connection tell of its client.
#[derive(Debug, Default)]
pub(crate) struct Nagle {
    /// When a read asked for no answer and was not acknowledged at once, if that was the last one.
    unacknowledged: Option<Instant>,
    /// Reads that are still acknowledged at once.
    left: u32,
    /// How many were granted last.
    granted: u32,
}

impl Nagle {
    /// A read of this time is handled; `silent`: it asked for no answer. True where it is to be acknowledged at once.
    pub(crate) fn read(&mut self, now: Instant, silent: bool) -> bool {
        if let Some(before) = self.unacknowledged.take() {
            let pause = now.saturating_duration_since(before);
            self.granted = match DELAYED_ACK.contains(&pause) {
                true => (2 * self.granted).clamp(QUICK_ACKS_MIN, QUICK_ACKS_MAX),
                false => 0,
            };
            self.left = self.granted;
        }
        if !silent {
            return false;
        }
        if self.left == 0 {
            self.unacknowledged = Some(now);
            return false;
        }
        self.left -= 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// So many exchanges of a request and the acknowledgement of its answer, which pauses where it was not acknowledged. How
    /// often it was, and how often the client paused.
    fn exchanges(nagle: &mut Nagle, now: &mut Instant, count: u32, pause_ms: u64) -> (u32, u32) {
        let (mut acknowledged, mut pauses) = (0, 0);
        for _ in 0..count {
            nagle.read(*now, false);
            *now += Duration::from_micros(200);
            if nagle.read(*now, true) {
                acknowledged += 1;
            } else {
                pauses += 1;
                *now += Duration::from_millis(pause_ms);
            }
            *now += Duration::from_micros(200);
        }
        (acknowledged, pauses)
    }

    #[test]
    fn a_client_with_nagle_pauses_ever_more_seldom() {
        let (mut nagle, mut now) = (Nagle::default(), Instant::now());
        let (acknowledged, pauses) = exchanges(&mut nagle, &mut now, 10_000, 44);
        assert_eq!(acknowledged + pauses, 10_000);
        assert!(pauses < 20, "{pauses}");
    }

    #[test]
    fn a_client_without_nagle_costs_no_system_calls() {
        let (mut nagle, mut now) = (Nagle::default(), Instant::now());
        assert_eq!(exchanges(&mut nagle, &mut now, 10_000, 0).0, 0);
        // One that paused once for another reason costs some.
        exchanges(&mut nagle, &mut now, 1, 44);
        assert_eq!(exchanges(&mut nagle, &mut now, 10_000, 0).0, QUICK_ACKS_MIN);
    }
}
