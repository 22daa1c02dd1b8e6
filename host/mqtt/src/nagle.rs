//! Recognizes clients that leave Nagle's algorithm on (RFC 896), such as paho, MQTT.js and rumqttc
//! as shipped.
//!
//! Such a client holds back a small segment until the previous one is acknowledged. If a read needs
//! no answer, such as a PUBACK alone, the kernel delays that acknowledgement by 40 ms, since it has
//! nothing to send with it.
//!
//! The broker then acknowledges at once, which costs a system call. Clients without Nagle's
//! algorithm must not pay it. So a connection acknowledges at once only for a number of reads after
//! such a pause. Then it skips one read to see whether the pause recurs.

use std::time::Instant;

use crate::limits::{DELAYED_ACK, QUICK_ACKS_MAX, QUICK_ACKS_MIN};

/// The timing of one connection's reads.
#[derive(Debug, Default)]
pub(crate) struct Nagle {
    /// When the last read was handled, if it needed no answer and was not acknowledged at once.
    unacknowledged: Option<Instant>,
    /// The number of further reads to acknowledge at once.
    left: u32,
    /// The value of `left` after the last pause.
    granted: u32,
}

impl Nagle {
    /// Records a read; `silent`: it needs no answer. Returns true if the read must be acknowledged
    /// at once.
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

    /// Simulates exchanges of a request and the PUBACK of its answer. The client pauses if that
    /// PUBACK was not acknowledged at once. Returns the numbers of quick acknowledgements and of
    /// pauses.
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
    fn client_with_nagle_pauses_less_and_less_often() {
        let (mut nagle, mut now) = (Nagle::default(), Instant::now());
        let (acknowledged, pauses) = exchanges(&mut nagle, &mut now, 10_000, 44);
        assert_eq!(acknowledged + pauses, 10_000);
        assert!(pauses < 20, "{pauses}");
    }

    #[test]
    fn client_without_nagle_costs_no_system_calls() {
        let (mut nagle, mut now) = (Nagle::default(), Instant::now());
        assert_eq!(exchanges(&mut nagle, &mut now, 10_000, 0).0, 0);
        // One pause for another reason costs some system calls.
        exchanges(&mut nagle, &mut now, 1, 44);
        assert_eq!(exchanges(&mut nagle, &mut now, 10_000, 0).0, QUICK_ACKS_MIN);
    }
}
