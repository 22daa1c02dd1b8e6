//! What the client of a request may do. An access control decides it, and the state machine asks.

use alloc::vec::Vec;

/// What a key is touched for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Right {
    /// To see its value, or that it changes.
    Read,
    /// To change it, or to compare its value.
    Write,
}

impl Right {
    /// The verb of an error text, as in "may not read".
    pub fn verb(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// The rights of one client. They never change: new rules make new rights.
pub trait ClientRights: Send + Sync {
    /// The user behind the client, if it has authenticated as one.
    fn user(&self) -> Option<&str>;

    /// Whether a response of the store to the client may go to this topic. Without this check a client could let the store
    /// publish where it may not do so itself.
    fn may_be_answered_at(&self, topic: &[u8]) -> bool;

    /// Whether the client has this right over this key.
    fn allow(&self, key: &[u8], right: Right) -> bool;

    /// With how many patterns one key is compared to find out, which is what that costs.
    fn patterns(&self, right: Right) -> usize;

    /// Encrypts a key for this client. A page of a SCAN may end at a key that its client may not read.
    fn seal(&self, key: &[u8]) -> Vec<u8>;

    /// The key in what [`seal`](Self::seal) returned; none if it is anything else.
    fn unseal(&self, sealed: &[u8]) -> Option<Vec<u8>>;
}
