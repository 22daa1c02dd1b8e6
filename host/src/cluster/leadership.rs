//! The leadership of this host, for operators.

use super::log::ClusterLog;

/// The present leadership.
pub struct Leadership {
    log: ClusterLog,
    hand_over: Box<dyn Fn() + Send + Sync>,
}

impl Leadership {
    /// The leadership of this log. `hand_over` ends it.
    pub fn new(log: ClusterLog, hand_over: impl Fn() + Send + Sync + 'static) -> Self {
        Self {
            log,
            hand_over: Box::new(hand_over),
        }
    }

    /// Its number.
    pub fn epoch(&self) -> u64 {
        self.log.epoch()
    }

    /// The last record that is durable.
    pub fn position(&self) -> u64 {
        self.log.position()
    }

    /// The number of records that are not durable yet.
    pub fn unreleased(&self) -> u64 {
        self.log.unreleased()
    }

    /// Begins to end the leadership, and returns at once.
    pub fn hand_over(&self) {
        (self.hand_over)();
    }
}
