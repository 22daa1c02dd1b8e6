//! What the client of a request may do to a key.
//!
//! What enters: the grants of whoever asks, or what is recorded of a request that runs again. What leaves: yes or no. A
//! request that came again is answered by the rights that it had: it changed then what it may not change now, and a second
//! answer to one request would be a lie about the first.

use std::sync::Arc;

use super::capture::Capture;
use statehouse_protocol::rights::{ClientRights, Right};

/// Where the answer comes from.
pub(super) enum Rights {
    /// There are no rules, or nobody asked: the host itself acts.
    All,
    /// The rules of this client.
    Granted(Arc<dyn ClientRights>),
    /// The recording. Where a candidate asks for what the recorded run did not, it has the rights of the same client.
    Recorded(Option<Arc<dyn ClientRights>>),
}

impl Rights {
    /// Those of a request.
    pub(super) fn of(grants: Option<&Arc<dyn ClientRights>>) -> Self {
        grants.map_or(Self::All, |grants| Self::Granted(grants.clone()))
    }

    /// The same in a run that is played back.
    pub(super) fn recorded(self) -> Self {
        match self {
            Self::Granted(grants) => Self::Recorded(Some(grants)),
            _ => Self::Recorded(None),
        }
    }

    /// How many patterns a key may be compared with to find out whether they include this.
    pub(super) fn tries(&self, right: Right) -> usize {
        match (self, right) {
            (Self::All | Self::Recorded(None), _) => 0,
            (Self::Granted(grants) | Self::Recorded(Some(grants)), right) => grants.patterns(right),
        }
    }

    /// Whether they include this.
    pub(super) fn include(
        &self,
        key: &[u8],
        right: Right,
        capture: &Capture,
        payload: &[u8],
    ) -> bool {
        let allows = |grants: &Arc<dyn ClientRights>| grants.allow(key, right);
        match self {
            Self::All => true,
            Self::Granted(grants) => allows(grants),
            Self::Recorded(grants) => {
                !capture.was_denied(key, right, payload) && grants.as_ref().is_none_or(allows)
            }
        }
    }
}
