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
    /// Records that a file of a drop directory was delivered.
    #[must_use]
    pub fn deliver(&self, delivered: Delivered) -> Self {
        let mut next = self.clone();
        next.delivered.retain(|it| *it != delivered);
        next.delivered.push(delivered);
        while next.delivered.len() > limits::DELIVERED_FILES_MAX {
            // A file that changes often must not displace the others.
            let all = &next.delivered;
            let is_replaced = |at: &usize| all[at + 1..].iter().any(|it| it.file == all[*at].file);
            let oldest = (0..all.len()).find(is_replaced).unwrap_or(0);
            next.delivered.remove(oldest);
        }
        next
    }
}
