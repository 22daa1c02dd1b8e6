//! The rights of a client. Access control grants them, and the state machine checks them.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::marker::PhantomData;

/// A kind of access to a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Right {
    /// Read the value, or be notified of changes.
    Read,
    /// Change the key, or compare its value.
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

/// The rights of one client. They must never change: after a change of the rules, a client gets a
/// new object.
pub trait ClientRights: Send + Sync {
    /// The user that the client has authenticated as.
    fn user(&self) -> Option<&str>;

    /// Whether the store may send responses for the client to this topic. Without this check, a
    /// client could make the store publish to a topic that the client may not publish to.
    fn may_be_answered_at(&self, topic: &[u8]) -> bool;

    /// Whether the client has this right to the key.
    fn allow(&self, key: &[u8], right: Right) -> bool;

    /// Like [`allow`](Self::allow), for one of several clients. `answers` must be new, or come from
    /// calls with the same key and right: it has the answers of the parts that clients share.
    fn allow_once<'a>(&'a self, key: &[u8], right: Right, answers: &mut SharedAnswers<'a>) -> bool {
        let _ = answers;
        self.allow(key, right)
    }

    /// The number of patterns that a key is compared with, which determines the cost.
    fn patterns(&self, right: Right) -> usize;

    /// Encrypts a key for this client: the cursor of a SCAN may be a key that the client may not
    /// read.
    fn seal(&self, key: &[u8]) -> Vec<u8>;

    /// Decrypts the result of [`seal`](Self::seal); `None` for any other input.
    fn unseal(&self, sealed: &[u8]) -> Option<Vec<u8>>;
}

/// Whether parts of rights that several clients share allow one key. Each part is evaluated once,
/// so a change with many watchers under the same rules costs one comparison with their patterns.
///
/// The lifetime keeps all parts alive, because an address of a freed part could name another one.
#[derive(Debug, Default)]
pub struct SharedAnswers<'a> {
    by_address: BTreeMap<usize, bool>,
    parts: PhantomData<&'a ()>,
}

impl<'a> SharedAnswers<'a> {
    /// The answer of `part`. Calls `evaluate` only for the first call with this part.
    pub fn of<T>(&mut self, part: &'a Arc<T>, evaluate: impl FnOnce(&T) -> bool) -> bool {
        let address = Arc::as_ptr(part).addr();
        let answer = self.by_address.entry(address);
        *answer.or_insert_with(|| evaluate(part))
    }
}
