//! The lock of the core. After each release the effects of the changes made under it must follow:
//! records, output and notifications.

use std::{
    ops::{Deref, DerefMut},
    sync::MutexGuard,
};

use super::Broker;
use crate::{core::Core, write_batch};

/// The core's lock. Releasing it appends the changes made under it, then writes or gathers the
/// output, and reports ended sessions to the service.
pub(crate) struct Guard<'a> {
    broker: &'a Broker,
    core: Option<MutexGuard<'a, Core>>,
    /// Whether the thread was already panicking when it took the lock. The state was consistent
    /// then.
    panicking: bool,
}

impl<'a> Guard<'a> {
    pub(super) fn new(broker: &'a Broker) -> Self {
        Self {
            broker,
            core: Some(broker.0.lock()),
            panicking: std::thread::panicking(),
        }
    }

    /// Releases the lock, calls the function, and takes the lock again.
    pub(crate) fn unlocked<R>(&mut self, f: impl FnOnce() -> R) -> R {
        self.release();
        let result = f();
        self.core = Some(self.broker.0.lock());
        result
    }

    fn release(&mut self) {
        let Some(mut core) = self.core.take() else {
            return;
        };
        let wakes = core.finish(&self.broker.0.write_batching);
        drop(core);
        write_batch::write(&wakes.writers);
        if wakes.timers {
            self.broker.0.earlier.notify_waiters();
        }
        // Calls of the service end no sessions, so this cannot recurse.
        if !wakes.ended.is_empty() {
            self.broker
                .service()
                .sessions_ended(self.broker, &wakes.ended);
        }
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if self.core.is_some() && !self.panicking && std::thread::panicking() {
            self.broker.0.state_is_lost();
        }
        self.release();
    }
}

impl Deref for Guard<'_> {
    type Target = Core;

    fn deref(&self) -> &Core {
        // Only `unlocked` takes it out, and puts it back before it returns.
        self.core.as_deref().expect("the lock is held")
    }
}

impl DerefMut for Guard<'_> {
    fn deref_mut(&mut self) -> &mut Core {
        self.core.as_deref_mut().expect("the lock is held")
    }
}
