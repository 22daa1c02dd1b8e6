//! What clients may take: bounds that change while the store runs.
//!
//! What enters: settings, and what somebody would do. What leaves: bounds in force, and which of them would say no.

use super::Server;
use statehouse_core::store::{Exceeded, Peer, Quota, Supervision};

impl Server {
    /// Takes other bounds into force, from the next request on. What is there stays.
    pub fn set_bounds(&self, quota: Quota, supervision: Supervision) {
        let mut core = self.lock();
        let journal_full = core.journal_full;
        *core.store.quota() = Quota {
            journal_full,
            ..quota
        };
        *core.store.supervision() = supervision;
    }

    /// Remembers what clients may send again that are told this Receive Maximum. Called before the first of them is.
    pub fn raise_receive_max(&self, receive_max: u16) {
        let mut core = self.lock();
        if core.store.raise_receive_max(receive_max) {
            core.recorder.record_receive_max(receive_max);
        }
    }

    /// The bounds of the table and its watches.
    pub fn quota(&self) -> Quota {
        *self.lock().store.quota()
    }

    /// Whether this client's SET of this key would be within the bounds at present, with a value that is not too long.
    ///
    /// # Errors
    /// The bound that says no.
    pub fn check_write(&self, client: &str, key: &[u8]) -> Result<(), Exceeded> {
        let mut core = self.lock();
        let quota = *core.store.quota();
        core.store.state().check_write(client, key, &quota)
    }

    /// Whether this connection could watch this key too at present.
    ///
    /// # Errors
    /// The bound that says no.
    pub fn check_watch(&self, peer: &Peer, key: &[u8]) -> Result<(), Exceeded> {
        let mut core = self.lock();
        let quota = *core.store.quota();
        quota.check_key(key)?;
        core.store.state().watches.check(peer, key, &quota)
    }
}
