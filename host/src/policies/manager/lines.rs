//! The log lines of policies, and which of them an operator asks for.

use std::collections::HashSet;
use std::sync::Arc;

use super::{Control, ControlError};
use statehouse_core::policy::{Digest, Line, Lines, Selector};

impl Control {
    /// The recent log lines of all policies of this store.
    pub fn lines(&self) -> &Arc<Lines> {
        self.shared.engine.lines()
    }

    /// The policies that a selector matches, among the loaded ones and those that wrote `lines`: a
    /// name matches all its versions, and a policy that was unloaded since. Fails if there is none.
    pub fn writers(
        &self,
        which: &Selector,
        lines: &[Line],
    ) -> Result<HashSet<Digest>, ControlError> {
        let seen = self.seen();
        let candidates = seen.candidates().chain(lines.iter().map(Line::writer));
        let meant = candidates.filter(|it| which.matches(it));
        let digests: HashSet<Digest> = meant.map(|it| it.digest).collect();
        match digests.is_empty() {
            true => Ok(HashSet::from([seen.resolve(which)?])),
            false => Ok(digests),
        }
    }
}
