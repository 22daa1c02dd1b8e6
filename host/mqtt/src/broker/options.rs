//! The options of a broker.

use std::{fmt, sync::Arc};

use crate::{Access, Anyone, Lease, Limits, Persistence};

/// The options of a [`Broker`](crate::Broker).
#[derive(Clone)]
pub struct Options {
    /// The limits at the start.
    pub limits: Limits,
    /// Whether restored state beyond the limits is kept. Another host may have accepted it under
    /// limits of its own.
    pub keeps_all: bool,
    /// Receives changes of durable state. None: all state is lost at a restart.
    pub persistence: Option<Arc<dyn Persistence>>,
    /// The permission to decide. None: no other host can serve these clients.
    pub lease: Option<Arc<dyn Lease>>,
    /// The number of this run of the process, counted by the owner of the log. Numbers of
    /// connections and sessions begin at `(run << 32) + 1`, so that they never repeat over
    /// restarts.
    pub run: u32,
    /// Decides who may connect, publish and subscribe. The default is [`Anyone`].
    pub access: Arc<dyn Access>,
    /// Ends the process after a panic has left the broker's state half changed. Nothing that was
    /// changed since the lock was taken is appended or sent. The default exits with code 70
    /// (EX_SOFTWARE of sysexits.h).
    pub state_lost: fn() -> !,
}

fn exit_state_lost() -> ! {
    std::process::exit(70)
}

impl Default for Options {
    fn default() -> Self {
        Self {
            limits: Limits::default(),
            keeps_all: false,
            persistence: None,
            lease: None,
            run: 0,
            access: Arc::new(Anyone),
            state_lost: exit_state_lost,
        }
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("limits", &self.limits)
            .field("persistence", &self.persistence.is_some())
            .field("lease", &self.lease.is_some())
            .field("run", &self.run)
            .finish_non_exhaustive()
    }
}
