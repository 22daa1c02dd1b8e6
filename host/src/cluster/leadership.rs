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

    /// Its log.
    pub fn log(&self) -> &ClusterLog {
        &self.log
    }

    /// Begins to end the leadership, and returns at once.
    pub fn hand_over(&self) {
        (self.hand_over)();
    }
}
