//! Waits a moment for the next requests of the clients that the last transaction answered, so that
//! their records share a transaction.
//!
//! A transaction costs the engine much the same for one record and for fifty. Clients that send one
//! request at a time would otherwise divide into two halves, which alternate. The wait is short, and
//! pauses if it does not help: clients that do not depend on a response send when they want.

use crate::limits;

/// What the last transaction committed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Answered {
    pub(super) groups: usize,
    pub(super) bytes: usize,
}

#[derive(Debug, Default)]
pub(super) struct Gathering {
    /// Transactions without a wait, after a wait in vain. Doubles with each.
    pause: u32,
    /// How many of them are still to come.
    left: u32,
}

impl Gathering {
    /// The number of groups to wait for, if `answered` groups were released and `waiting` ones have
    /// arrived since they were sent. None if the leader should not wait.
    pub(super) fn target(&mut self, answered: usize, waiting: usize) -> Option<usize> {
        if answered < 2 {
            return None;
        }
        if self.left > 0 {
            self.left -= 1;
            return None;
        }
        let all = answered + waiting;
        Some(all - all / limits::GATHER_DIVISOR).filter(|it| *it > waiting)
    }

    pub(super) fn ended(&mut self, is_complete: bool) {
        self.pause = match is_complete {
            true => 0,
            false => (2 * self.pause).clamp(1, limits::GATHER_PAUSE_MAX),
        };
        self.left = self.pause;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_client_never_waits() {
        let mut gathering = Gathering::default();
        assert_eq!(gathering.target(1, 0), None);
        assert_eq!(gathering.target(0, 5), None);
        assert_eq!(gathering.target(20, 30), Some(45));
        // Enough groups have arrived already.
        assert_eq!(gathering.target(2, 100), None);
    }

    #[test]
    fn waits_in_vain_become_rare() {
        let mut gathering = Gathering::default();
        let mut waits = 0;
        for _ in 0..10_000 {
            if gathering.target(10, 10).is_some() {
                waits += 1;
                gathering.ended(false);
            }
        }
        assert!(waits < 200, "{waits} waits");
        assert!((0..=limits::GATHER_PAUSE_MAX).any(|_| gathering.target(10, 10).is_some()));
        gathering.ended(true);
        assert!(gathering.target(10, 10).is_some());
    }
}
