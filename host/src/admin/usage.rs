//! How much of the store is taken, and by whom, for `statehouse usage`.
//!
//! What enters: how many clients are to be named. What leaves: sums beside their bounds, and those who own the most.

use serde::{Deserialize, Serialize};

use super::Sources;

/// What is taken.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Usage {
    /// Keys of all.
    pub(crate) keys: Taken,
    /// What they weigh, in bytes.
    pub(crate) bytes: Taken,
    /// Keys that one client may own.
    pub(crate) max_client_keys: u64,
    /// Bytes that one client may own.
    pub(crate) max_client_bytes: u64,
    /// Clients that own anything.
    pub(crate) owners: u64,
    /// Those of them that own the most bytes, the heaviest first.
    pub(crate) clients: Vec<Owner>,
}

/// How much there is of something, and may be.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Taken {
    /// At present.
    pub(crate) used: u64,
    /// The bound.
    pub(crate) max: u64,
}

/// A client that owns something.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Owner {
    /// Its client id; of a client of a foreign broker that does not say it, nothing.
    pub(crate) client: Box<str>,
    /// Keys that it wrote last.
    pub(crate) keys: u64,
    /// What they weigh, in bytes.
    pub(crate) bytes: u64,
    /// Whether it is connected; where the broker is a foreign one, nobody knows.
    pub(crate) connected: Option<bool>,
    /// Who it is then, where it said so.
    pub(crate) user: Option<Box<str>>,
}

/// Finds out, and names at most so many clients.
pub(super) fn usage(sources: &Sources, clients: usize) -> Usage {
    let quota = sources.server.quota();
    let taken = sources.server.usage(clients);
    let clients = taken.heaviest.into_iter().map(|it| {
        let standing = (sources.broker.as_ref()).and_then(|broker| broker.standing(&it.client));
        let origin = standing.and_then(|standing| standing.origin);
        Owner {
            client: it.client,
            keys: it.keys,
            bytes: it.bytes,
            connected: sources.broker.as_ref().map(|_| origin.is_some()),
            user: origin.and_then(|origin| origin.identity.user.clone()),
        }
    });
    Usage {
        keys: Taken {
            used: taken.keys,
            max: quota.keys_max,
        },
        bytes: Taken {
            used: taken.bytes,
            max: quota.bytes_max,
        },
        max_client_keys: quota.client_keys_max,
        max_client_bytes: quota.client_bytes_max,
        owners: taken.owners,
        clients: clients.collect(),
    }
}
