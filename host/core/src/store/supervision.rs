//! The settings of the guard and of re-execution.

use crate::limits;
use crate::policy::GuardSettings;

/// How the active policy and a canary are supervised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Supervision {
    /// How many failures and how much fuel are tolerated.
    pub guard: GuardSettings,
    /// Re-executes one of this many requests of the active policy on a fresh instance to detect
    /// hidden state. Above [`limits::PURITY_REQUESTS_PER_SECOND_MAX`], the rate stays constant.
    /// Zero turns it off.
    pub purity_every: u32,
}

impl Default for Supervision {
    fn default() -> Self {
        Self {
            guard: GuardSettings::default(),
            purity_every: limits::PURITY_SAMPLE_DEFAULT,
        }
    }
}
