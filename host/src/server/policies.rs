//! The policies of a running store, for whoever assigns them.
//!
//! What enters: assignments, with instances that are ready. What leaves: who answers what, and the position of the record that
//! says so. Nothing here waits while it holds the lock.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::Server;
use crate::limits;
use crate::shadow::Observer;
use statehouse_core::log::LogPosition;
use statehouse_core::policy::{Absent, Assignment, Instance, Policy, Swap};
use statehouse_core::store::Transaction;

impl Server {
    /// Who answers what, and all policies that are held ready.
    pub fn policies(&self) -> (Assignment, Vec<Arc<Policy<Transaction>>>) {
        let mut core = self.lock();
        let registry = core.store.registry();
        let policies = registry.policies().cloned().collect();
        (registry.assignment().clone(), policies)
    }

    /// The policies whose modules are needed: those that are named, and those that handled requests which may come
    /// again.
    pub fn needed_policies(&self) -> Vec<blake3::Hash> {
        let mut core = self.lock();
        let named = core.store.registry().assignment().all();
        let remembered = core.store.duplicates().policies();
        let named = named.into_iter().map(|digest| digest.0);
        named.chain(remembered).collect()
    }

    /// The last times that another policy became the active one.
    pub fn swaps(&self) -> Vec<Swap> {
        self.lock().swaps.list()
    }

    /// Takes another assignment into force between two requests, if it is still `seen` that it was made from. `ready`
    /// are instances for it; modules of new policies are durable already. Its record's position; it is to be waited
    /// for by [`Self::durable`].
    pub fn assign(
        &self,
        seen: &Assignment,
        next: Assignment,
        ready: Vec<Instance<Transaction>>,
    ) -> Result<LogPosition, AssignError> {
        let mut core = self.lock();
        if self.stopped.load(Relaxed) {
            return Err(AssignError::Stopped);
        }
        if core.store.registry().assignment() != seen {
            return Err(AssignError::Overtaken);
        }
        let (position, left) = core.assign(next, ready)?;
        drop(core);
        // An instance is megabytes to give back: while nobody waits.
        drop(left);
        Ok(position)
    }

    /// Starts an instance of the policy that the next rollback goes back to, so that no request waits for that. Blocks
    /// for as long as an interpreter takes to start.
    pub fn warm_before(&self) {
        let Some(policy) = self.lock().store.registry().cold_before() else {
            return;
        };
        match Instance::warm(policy.clone()) {
            Ok(instance) => {
                let left = self.lock().store.registry().warmed(instance);
                drop(left);
            }
            Err(error) => {
                tracing::warn!(%policy, %error, "the policy that a rollback goes back to does not start");
            }
        }
    }

    /// Runs live requests again, for a candidate in shadow and in search of hidden state.
    pub fn observer(&self) -> &Observer {
        &self.observer
    }

    /// Waits until a record is where records are kept. Blocks: not for a thread that serves connections. A server that
    /// stops ends the wait too, for nobody writes records any more once the journal is closed.
    ///
    /// # Errors
    /// [`AssignError::Unknown`]: the record may be kept all the same.
    pub fn durable(&self, position: LogPosition) -> Result<(), AssignError> {
        while self.journal.released() < position {
            if self.stopped.load(Relaxed) {
                return Err(AssignError::Unknown);
            }
            std::thread::sleep(limits::ASSIGNED_POLL);
        }
        Ok(())
    }
}

/// Why an assignment does not come into force.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum AssignError {
    /// Somebody else was faster.
    #[error("the policies were assigned otherwise meanwhile: look at the list, and try again")]
    Overtaken,
    /// It names what is not here.
    #[error("the policy {} is not loaded any more", .0.0)]
    Absent(Absent),
    /// The store ends.
    #[error("the store is stopping, so that nothing was changed: try again when it runs")]
    Stopped,
    /// The store ended before the change was certainly kept.
    #[error(
        "the store is stopping: look at the list when it runs again, for the change may have been kept"
    )]
    Unknown,
}
