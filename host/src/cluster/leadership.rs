//! The leadership of this host, for operators.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::log::ClusterLog;

/// The present leadership.
pub struct Leadership {
    log: ClusterLog,
    history: Arc<AtomicU64>,
    hand_over: Box<dyn Fn() + Send + Sync>,
}

impl Leadership {
    /// The leadership of this log. `history` is the last record of this host's copy of the log.
    /// `hand_over` ends the leadership.
    pub fn new(
        log: ClusterLog,
        history: Arc<AtomicU64>,
        hand_over: impl Fn() + Send + Sync + 'static,
    ) -> Self {
        Self {
            log,
            history,
            hand_over: Box::new(hand_over),
        }
    }

    /// Its log.
    pub fn log(&self) -> &ClusterLog {
        &self.log
    }

    /// The last record of this host's copy of the log, or 0 if it keeps none.
    pub fn history(&self) -> u64 {
        self.history.load(Relaxed)
    }

    /// Begins to end the leadership, and returns at once.
    pub fn hand_over(&self) {
        (self.hand_over)();
    }
}
