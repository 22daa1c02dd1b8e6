//! Limits that change while the store runs, and checks against them.

use super::Server;
use statehouse_core::store::{Exceeded, Peer, Quota, Scope, Supervision};

impl Server {
    /// Applies other limits from the next request on. Existing keys stay.
    pub fn set_bounds(&self, quota: Quota, supervision: Supervision) {
        let mut locked = self.lock();
        let journal = locked.journal;
        let store = locked.core.store_mut();
        *store.quota() = Quota { journal, ..quota };
        *store.supervision() = supervision;
    }

    /// Sizes the dedup table for this Receive Maximum. Must be called before a client is sent it.
    pub fn raise_receive_max(&self, receive_max: u16) {
        self.lock().core.raise_receive_max(receive_max);
    }

    /// The limits of the table and its watches.
    pub fn quota(&self) -> Quota {
        *self.lock().core.store_mut().quota()
    }

    /// Whether a SET of this key by this client is within the limits at present, if the value is
    /// not too long. Fails with the limit that refuses it.
    pub fn check_write(&self, client: &str, key: &[u8]) -> Result<(), Exceeded> {
        let mut locked = self.lock_with_room();
        let quota = *locked.core.store_mut().quota();
        let state = locked.core.store().state();
        state.check_write(client, key, &quota)
    }

    /// Whether this connection could also watch this key at present. Fails with the limit that
    /// refuses it.
    pub fn check_watch(&self, peer: &Peer, key: &[u8]) -> Result<(), Exceeded> {
        let mut locked = self.lock_with_room();
        let quota = *locked.core.store_mut().quota();
        quota.check_key(key)?;
        let watches = &locked.core.store().state().watches;
        watches.check(peer, Scope::Key, key, &quota)
    }
}
