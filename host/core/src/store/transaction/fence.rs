//! Checks the fencing tokens that policies give to keys.
//!
//! A client must be able to send the token of a key, or it could not write, remove or import the
//! key.

use super::{Entry, Transaction};
use crate::limits;
use crate::policy::{Denial, Fault, Put};

/// The texts of the protocol, section 4.
const MALFORMED: &str = "malformed timestamp";
const AHEAD: &str = "the request fencing token timestamp is too far in the future; ensure that the client and broker system clocks are synchronized";

/// Whether a user property of MQTT can contain a token with this node (protocol, section 5).
fn is_node(node: &str) -> bool {
    let fits = (1..=limits::FENCE_NODE_BYTES_MAX).contains(&node.len());
    fits && !node.contains([':', '\0'])
}

impl Transaction {
    /// Checks the fence of a put, unless the key has the same one already: an earlier version of
    /// the program did not check it, and the clock may have been set back since.
    pub(super) fn check_fence(&self, put: &Put<'_>) -> Result<(), Denial> {
        let Some(fence) = &put.fence else {
            return Ok(());
        };
        let latest_ms = self.now_ms.saturating_add(limits::SKEW_MS_MAX);
        let why = match is_node(&fence.node) {
            true if fence.wall <= latest_ms => return Ok(()),
            true => AHEAD,
            false => MALFORMED,
        };
        let entry = self.view(put.key, self.is_hidden(put.key));
        match entry.and_then(Entry::fence) == put.fence {
            true => Ok(()),
            false => Err(Denial::Fault(Fault::Other(why.to_owned()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::{Fence, Stamp};
    use crate::policy::Host;
    use crate::store::read_set::{CapturedReads, ReadSet, Recording, Unrecorded};
    use crate::store::{Quota, State};

    fn fence(wall: u64, node: &str) -> Fence {
        Fence {
            wall,
            counter: u32::MAX,
            node: node.into(),
        }
    }

    fn put(it: &mut Transaction, fence: Fence) -> Result<Stamp, Denial> {
        it.put(Put {
            key: b"k",
            value: b"v",
            observed: None,
            fence: Some(fence),
            expires_ms: None,
        })
    }

    /// Fences, and the texts of their refusals.
    fn refused() -> Vec<(Fence, &'static str)> {
        let long = "n".repeat(limits::FENCE_NODE_BYTES_MAX + 1);
        let nodes = ["", "a:b", "a\0", &long[..]];
        let mut all: Vec<_> = nodes.map(|node| (fence(0, node), MALFORMED)).into();
        // The transactions begin at 10 ms.
        all.push((fence(60_011, "n"), AHEAD));
        all.push((fence(u64::MAX, "n"), AHEAD));
        all
    }

    #[test]
    fn fence_that_no_client_can_send_is_refused() {
        for (bad, text) in refused() {
            let mut it = Transaction::of_client(Box::default(), Quota::default(), "a");
            match put(&mut it, bad) {
                Err(Denial::Fault(Fault::Other(why))) => assert_eq!(why, text),
                done => panic!("{done:?}"),
            }
            assert!(it.staged().is_empty());
            let longest = "n".repeat(limits::FENCE_NODE_BYTES_MAX);
            put(&mut it, fence(60_010, &longest)).unwrap();
        }
    }

    #[test]
    fn fence_of_an_earlier_version_can_be_written_again() {
        for (bad, _) in refused() {
            let entry = Entry::new(b"k", b"", Stamp::default(), Some(&bad), None);
            let mut state = Box::<State>::default();
            state.table.insert(entry);
            let mut it = Transaction::of_client(state, Quota::default(), "a");
            put(&mut it, bad).unwrap();
        }
    }

    /// Otherwise a redelivery of a request that an earlier version handled would be answered
    /// otherwise.
    #[test]
    fn reexecution_checks_no_fence() {
        for (bad, _) in refused() {
            let mut it = Transaction::of_client(Box::default(), Quota::default(), "a");
            it.read_set = ReadSet::replaying(Recording {
                captured: CapturedReads::default(),
                unrecorded: Unrecorded::FromState,
            });
            put(&mut it, bad).unwrap();
        }
    }
}
