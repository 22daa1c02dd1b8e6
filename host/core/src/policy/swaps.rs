//! The most recent swaps of the active policy, and how long each of them delayed requests.

use std::collections::VecDeque;
use std::time::Instant;

use serde::Serialize;

use super::digest::Digest;
use crate::limits;

/// The most recent swaps of a running store.
#[derive(Debug, Default)]
pub struct Swaps {
    last: VecDeque<Swap>,
    /// When the last request ended.
    done: Option<Instant>,
    /// Whether no request has begun since the last swap.
    waits: bool,
}

/// One swap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Swap {
    /// The time in milliseconds.
    pub at_ms: u64,
    /// The policy that was active before.
    pub from: Digest,
    /// The policy that is active since.
    pub to: Digest,
    /// Microseconds between the last request before the swap and the first one after it: the swap
    /// itself, and any time without requests. `None` if there was no request before, or none yet
    /// since.
    pub gap_us: Option<u64>,
}

impl Swaps {
    /// Notes a swap.
    pub fn swapped(&mut self, at_ms: u64, from: Digest, to: Digest) {
        if self.last.len() >= limits::SWAPS_LISTED_MAX {
            self.last.pop_front();
        }
        self.last.push_back(Swap {
            at_ms,
            from,
            to,
            gap_us: None,
        });
        self.waits = self.done.is_some();
    }

    /// Notes that requests are about to be handled.
    pub fn begin(&mut self) {
        if !std::mem::take(&mut self.waits) {
            return;
        }
        if let (Some(swap), Some(done)) = (self.last.back_mut(), self.done) {
            swap.gap_us = u64::try_from(done.elapsed().as_micros()).ok();
        }
    }

    /// Notes that requests were handled until now.
    pub fn end(&mut self, now: Instant) {
        self.done = Some(now);
    }

    /// The swaps, the oldest first.
    pub fn list(&self) -> Vec<Swap> {
        self.last.iter().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gap_spans_two_requests_and_list_is_bounded() {
        let (one, two) = (Digest::of(b"one"), Digest::of(b"two"));
        let mut swaps = Swaps::default();
        // There was no request before.
        swaps.swapped(1, one, two);
        swaps.begin();
        swaps.end(Instant::now());
        swaps.swapped(2, two, one);
        let gaps = |swaps: &Swaps| -> Vec<bool> {
            let list = swaps.list();
            list.iter().map(|swap| swap.gap_us.is_some()).collect()
        };
        assert_eq!(gaps(&swaps), [false, false]);
        swaps.begin();
        assert_eq!(gaps(&swaps), [false, true]);
        let first = swaps.list()[1];
        // Later requests do not change it.
        swaps.end(Instant::now());
        swaps.begin();
        assert_eq!(swaps.list()[1], first);
        for at_ms in 3..2_000 {
            swaps.swapped(at_ms, one, two);
        }
        assert_eq!(swaps.list().len(), limits::SWAPS_LISTED_MAX);
        assert_eq!(swaps.list().last().unwrap().at_ms, 1_999);
    }
}
