//! The files that a drop directory delivered. Their number must stay bounded, because every record
//! of an assignment names them.

use serde::{Deserialize, Serialize};

use super::{Assignment, Digest};
use crate::limits;

/// A file that a drop directory delivered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Delivered {
    /// The name of the file, or its beginning.
    pub file: String,
    /// Its policy.
    pub policy: Digest,
}

impl Assignment {
    /// Records that a file of a drop directory was delivered. `present` are the names of the files
    /// that the directory has now, as in [`Delivered::file`].
    #[must_use]
    pub fn deliver(&self, delivered: Delivered, present: &[String]) -> Self {
        let mut next = self.clone();
        next.delivered.retain(|it| *it != delivered);
        next.delivered.push(delivered);
        while next.delivered.len() > limits::DELIVERED_FILES_MAX {
            // A file that changes often must not displace the others, and an absent file must not
            // displace a present one: the next start would deliver that again.
            let all = &next.delivered;
            let is_replaced = |at: &usize| all[at + 1..].iter().any(|it| it.file == all[*at].file);
            let is_absent = |at: &usize| !present.contains(&all[*at].file);
            let evicted = (0..all.len())
                .find(is_replaced)
                .or_else(|| (0..all.len()).find(is_absent));
            next.delivered.remove(evicted.unwrap_or(0));
        }
        next
    }
}
