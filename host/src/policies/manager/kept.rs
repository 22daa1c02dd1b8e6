//! Which saved policies may get a role.
//!
//! A store may start with other trusted keys than those with which its policies were loaded. Such a
//! policy keeps its roles, because the store must go on and must answer redeliveries alike. But
//! only a policy whose file a load would accept today may get a new role. Rollbacks are exempt, by
//! an operator or by the guard: they protect the store.

use super::{Control, ControlError, Seen};
use statehouse_core::policy::Assignment;

/// Checks the file of a policy as a load does. The error says why a load refuses it.
pub(crate) type Check = Box<dyn Fn(&[u8]) -> Result<(), String> + Send + Sync>;

impl Control {
    /// From now on, only policies whose saved files pass this check get new roles. A later call
    /// changes nothing.
    pub(crate) fn check_with(&self, check: Check) {
        // An error means that there is a check.
        let _ = self.shared.check.set(check);
    }

    /// Fails if `next` gives a new role to a policy whose file a load would refuse. Policies of a
    /// store without a data directory were all loaded by this process, and the built-in one is a
    /// part of the program.
    pub(super) fn check_roles(&self, seen: &Seen, next: &Assignment) -> Result<(), ControlError> {
        let (Some(modules), Some(check)) = (&self.shared.modules, self.shared.check.get()) else {
            return Ok(());
        };
        for digest in next.newly_assigned(&seen.assignment) {
            if digest == next.built_in {
                continue;
            }
            let unread = |error| format!("its saved file cannot be read: {error}");
            let file = modules.load(&digest.0).map_err(unread);
            if let Err(why) = file.and_then(|file| check(&file)) {
                let policy = seen.policy(digest)?.to_string();
                return Err(ControlError::Unverified(policy, why));
            }
        }
        Ok(())
    }
}
