//! The rights of a request's client to keys.
//!
//! A re-execution must use the recorded rights of its original. Otherwise, after a change of the
//! rules, a redelivery would get another answer than the request that took effect.

use std::sync::Arc;

use super::read_set::ReadSet;
use statehouse_protocol::rights::{ClientRights, Right};

pub(super) enum Rights {
    /// Everything is allowed: there are no rules, or the host itself acts.
    All,
    /// The rules of this client.
    Granted(Arc<dyn ClientRights>),
    /// The recording. Keys that a candidate reads and the recorded run did not are checked against
    /// the rights that the client had in the recorded run, if these are known.
    Recorded(Option<Arc<dyn ClientRights>>),
}

impl Rights {
    /// The rights of a new request.
    pub(super) fn of(grants: Option<&Arc<dyn ClientRights>>) -> Self {
        grants.map_or(Self::All, |grants| Self::Granted(grants.clone()))
    }

    /// The rights of a re-execution.
    pub(super) fn recorded(self) -> Self {
        match self {
            Self::Granted(grants) => Self::Recorded(Some(grants)),
            _ => Self::Recorded(None),
        }
    }

    /// The rules of the client of a new request; `None` if there are none.
    pub(super) fn granted(&self) -> Option<&Arc<dyn ClientRights>> {
        match self {
            Self::Granted(grants) => Some(grants),
            Self::All | Self::Recorded(_) => None,
        }
    }

    /// Whether the client of a new request may read a key that the request did not name.
    pub(super) fn granted_now(&self, key: &[u8]) -> bool {
        self.granted().is_none_or(|it| it.allow(key, Right::Read))
    }

    /// The number of patterns that a key may be compared with.
    pub(super) fn tries(&self, right: Right) -> usize {
        match (self, right) {
            (Self::All | Self::Recorded(None), _) => 0,
            (Self::Granted(grants) | Self::Recorded(Some(grants)), right) => grants.patterns(right),
        }
    }

    pub(super) fn include(
        &self,
        key: &[u8],
        right: Right,
        read_set: &ReadSet,
        payload: &[u8],
    ) -> bool {
        let allows = |grants: &Arc<dyn ClientRights>| grants.allow(key, right);
        match self {
            Self::All => true,
            Self::Granted(grants) => allows(grants),
            Self::Recorded(grants) => {
                !read_set.was_denied(key, right, payload) && grants.as_ref().is_none_or(allows)
            }
        }
    }
}

/// Rights for tests.
#[cfg(test)]
pub(super) mod counted {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use statehouse_protocol::rights::SharedAnswers;

    use super::*;

    /// Grants the keys that start with `a`, and counts how many keys were compared.
    pub(in crate::store) struct CountedRights {
        pub(in crate::store) patterns: usize,
        /// The part that clients share.
        pub(in crate::store) compared: Arc<AtomicUsize>,
    }

    impl ClientRights for CountedRights {
        fn user(&self) -> Option<&str> {
            None
        }

        fn may_be_answered_at(&self, _: &[u8]) -> bool {
            true
        }

        fn allow(&self, key: &[u8], _: Right) -> bool {
            self.compared.fetch_add(1, Ordering::Relaxed);
            key.starts_with(b"a")
        }

        fn allow_once<'a>(
            &'a self,
            key: &[u8],
            right: Right,
            answers: &mut SharedAnswers<'a>,
        ) -> bool {
            answers.of(&self.compared, |_| self.allow(key, right))
        }

        fn patterns(&self, _: Right) -> usize {
            self.patterns
        }

        fn seal(&self, key: &[u8]) -> Vec<u8> {
            key.to_vec()
        }

        fn unseal(&self, sealed: &[u8]) -> Option<Vec<u8>> {
            Some(sealed.to_vec())
        }
    }
}
