//! The gate that every module passes before it is loaded, and before it gets a role.
//!
//! The signature of a module must be checked before anything else reads its bytes. It is checked
//! again before each new role, because an earlier start may have had other trusted keys.

use std::sync::Arc;

use crate::policies::manager::{Control, ControlError, PolicyView};
use statehouse_core::policy::Actor;

use super::trust::{Trust, TrustError};

/// Why a module was not loaded.
#[derive(Debug, thiserror::Error)]
pub enum ShipError {
    /// No trusted key signed the module.
    #[error(transparent)]
    Trust(#[from] TrustError),
    /// The module is no policy for this store, or there is no room for it.
    #[error(transparent)]
    Control(#[from] ControlError),
}

/// Checks the signature of a module, then loads it.
pub struct Gate {
    control: Arc<Control>,
    trust: Trust,
}

impl Gate {
    /// A gate to `control` for the modules that `trust` accepts. From now on `control` gives new
    /// roles only to these.
    pub fn new(control: Arc<Control>, trust: Trust) -> Self {
        if trust.keys() > 0 {
            let trust = trust.clone();
            control.check_with(Box::new(move |file: &[u8]| match trust.check(file) {
                Ok(_) => Ok(()),
                Err(error) => Err(error.to_string()),
            }));
        }
        Self { control, trust }
    }

    /// The same gate, for changes by this author.
    pub fn by(&self, by: Actor) -> Self {
        Self {
            control: self.control.by(by),
            trust: self.trust.clone(),
        }
    }

    /// Loads a policy if its signature is accepted. Blocks while the policy is compiled.
    pub fn load(&self, file: &[u8]) -> Result<PolicyView, ShipError> {
        let key = self.trust.check(file)?;
        let policy = self.control.load(file, key.as_deref())?;
        if let Some(key) = key {
            tracing::info!(digest = %blake3::hash(file), key, "the policy is signed by a trusted key");
        }
        Ok(policy)
    }

    /// The control for everything except loading.
    pub fn control(&self) -> &Control {
        &self.control
    }

    /// The keys that may sign policies and orders.
    pub fn trust(&self) -> &Trust {
        &self.trust
    }
}
