//! The policies of a running store.
//!
//! Invariant: nothing here waits while it holds the lock.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::Server;
use crate::shadow::Observer;
use statehouse_config::limits;
use statehouse_core::log::LogPosition;
use statehouse_core::policy::{Absent, Assignment, Instance, Policy, Swap};
use statehouse_core::store::Transaction;

impl Server {
    /// The assignment, and all loaded policies.
    pub fn policies(&self) -> (Assignment, Vec<Arc<Policy<Transaction>>>) {
        let mut locked = self.lock();
        let registry = locked.core.store_mut().registry();
        let policies = registry.policies().cloned().collect();
        (registry.assignment().clone(), policies)
    }

    /// The policies whose modules are needed: those of the assignment, and those that handled a
    /// request that may be redelivered.
    pub fn needed_policies(&self) -> Vec<blake3::Hash> {
        let mut locked = self.lock();
        let store = locked.core.store_mut();
        let named = store.registry().assignment().all();
        let remembered = store.duplicates().policies();
        let named = named.into_iter().map(|digest| digest.0);
        named.chain(remembered).collect()
    }

    /// The most recent swaps of the active policy.
    pub fn swaps(&self) -> Vec<Swap> {
        self.lock().swaps.list()
    }

    /// Applies another assignment between two requests, if the present one is still `seen`, which
    /// the caller derived it from. `ready` are instances for it. The modules of new policies must
    /// be durable already. Returns the position of its record, for [`Self::wait_durable`].
    ///
    /// # Errors See [`AssignError`]; nothing was changed.
    pub fn assign(
        &self,
        seen: &Assignment,
        next: Assignment,
        ready: Vec<Instance<Transaction>>,
    ) -> Result<LogPosition, AssignError> {
        let mut locked = self.lock();
        if self.stopped.load(Relaxed) {
            return Err(AssignError::Stopped);
        }
        if locked.core.store_mut().registry().assignment() != seen {
            return Err(AssignError::Overtaken);
        }
        let assigned = locked.assign(next, ready);
        let (position, left) = assigned.map_err(AssignError::Absent)?;
        drop(locked);
        // An instance holds megabytes, so it is dropped outside the lock.
        drop(left);
        Ok(position)
    }

    /// Starts an instance of the policy that the next rollback would activate, so that no request
    /// waits for it. Blocks while an interpreter starts.
    pub fn warm_before(&self) {
        let Some(policy) = self.lock().core.store_mut().registry().cold_before() else {
            return;
        };
        match Instance::warm(policy.clone()) {
            Ok(instance) => {
                let left = self.lock().core.store_mut().registry().warmed(instance);
                drop(left);
            }
            Err(error) => {
                tracing::warn!(%policy, %error, "the policy that a rollback would activate does not start");
            }
        }
    }

    /// The shadow runs of live requests.
    pub fn observer(&self) -> &Observer {
        &self.observer
    }

    /// Waits until a record is durable. Must not be called by a thread that serves connections.
    ///
    /// # Errors Returns [`AssignError::Unknown`] if the server stops, because a closed log writes
    /// no records. The record may be durable all the same.
    pub fn wait_durable(&self, position: LogPosition) -> Result<(), AssignError> {
        while self.journal.released() < position {
            if self.stopped.load(Relaxed) {
                return Err(AssignError::Unknown);
            }
            std::thread::sleep(limits::ASSIGNED_POLL);
        }
        Ok(())
    }
}

/// Why an assignment is not applied.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum AssignError {
    /// Another assignment was applied since.
    #[error("the policies were assigned otherwise meanwhile: look at the list, and try again")]
    Overtaken,
    /// It names a policy that is not loaded.
    #[error("the policy {} is not loaded any more", .0.0)]
    Absent(Absent),
    /// The store is stopping.
    #[error("the store is stopping, so that nothing was changed: try again when it runs")]
    Stopped,
    /// The store stopped before the change was certainly durable.
    #[error(
        "the store is stopping: look at the list when it runs again, for the change may have been kept"
    )]
    Unknown,
}
