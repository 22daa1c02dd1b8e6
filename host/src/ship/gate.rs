//! The one way in for modules: whoever brings one, its signature is looked at before anything else is.

use std::sync::Arc;

use crate::control::{Control, ControlError, PolicyView};

use super::trust::{Trust, TrustError};

/// Why a module was not loaded.
#[derive(Debug, thiserror::Error)]
pub enum ShipError {
    /// Nobody who is trusted signed it.
    #[error(transparent)]
    Trust(#[from] TrustError),
    /// It is no policy for this store, or has no place.
    #[error(transparent)]
    Control(#[from] ControlError),
}

/// Checks signatures, then loads.
pub struct Gate {
    control: Arc<Control>,
    trust: Trust,
}

impl Gate {
    /// A way to `control` for what `trust` lets through.
    pub fn new(control: Arc<Control>, trust: Trust) -> Self {
        Self { control, trust }
    }

    /// Loads a policy, if it may be. It takes as long as compiling does.
    pub fn load(&self, file: &[u8]) -> Result<PolicyView, ShipError> {
        let key = self.trust.check(file)?;
        let policy = self.control.load(file)?;
        if let Some(key) = key {
            tracing::info!(digest = %blake3::hash(file), key, "the policy is signed by a trusted key");
        }
        Ok(policy)
    }

    /// What everything but loading goes to at once.
    pub fn control(&self) -> &Control {
        &self.control
    }

    /// Who may ship.
    pub fn trust(&self) -> &Trust {
        &self.trust
    }
}
