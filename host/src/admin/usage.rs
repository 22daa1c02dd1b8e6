//! Reports how many keys and bytes each client owns, with the limits and the room on the disk, for
//! `statehouse usage`.

use serde::{Deserialize, Serialize};

use super::Sources;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Usage {
    /// Keys of all clients.
    pub(crate) keys: Taken,
    /// Accounted bytes of all keys.
    pub(crate) bytes: Taken,
    /// The disk; none if the store has none of its own.
    #[serde(default)]
    pub(crate) disk: Option<DiskRoom>,
    pub(crate) max_client_keys: u64,
    pub(crate) max_client_bytes: u64,
    /// Number of clients that own at least one key.
    pub(crate) owners: u64,
    /// The clients that own the most bytes, in descending order.
    pub(crate) clients: Vec<Owner>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Taken {
    pub(crate) used: u64,
    pub(crate) max: u64,
}

/// The room on the disk of a store.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct DiskRoom {
    /// Free bytes of the file system.
    pub(crate) free: u64,
    /// Whether the file system has no free inodes. A server of an earlier version does not say.
    #[serde(default)]
    pub(crate) no_free_inodes: bool,
    /// Bytes of records that can be appended until writes are refused.
    pub(crate) room: u64,
    /// Whether writes are refused because the disk is full.
    pub(crate) full: bool,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Owner {
    /// The client id; empty for a client of a foreign broker that does not give it.
    pub(crate) client: Box<str>,
    /// Keys that the client wrote last.
    pub(crate) keys: u64,
    /// Accounted bytes of these keys.
    pub(crate) bytes: u64,
    /// Whether the client is connected; unknown behind a foreign broker.
    pub(crate) connected: Option<bool>,
    /// The user of the connection, if it has one.
    pub(crate) user: Option<Box<str>>,
}

/// The usage, with at most `clients` clients listed.
pub(super) fn usage(sources: &Sources, clients: usize) -> Usage {
    let quota = sources.server.quota();
    let taken = sources.server.usage(clients);
    let clients = taken.heaviest.into_iter().map(|it| {
        let standing =
            (sources.broker.as_ref()).and_then(|broker| broker.client_status(&it.client));
        let origin = standing.and_then(|standing| standing.origin);
        Owner {
            client: it.client,
            keys: it.keys,
            bytes: it.bytes,
            connected: sources.broker.as_ref().map(|_| origin.is_some()),
            user: origin.and_then(|origin| origin.identity.user.clone()),
        }
    });
    let disk = sources.disk.as_ref().map(|disk| disk.log().figures());
    let disk = disk.map(|it| DiskRoom {
        free: it.free,
        no_free_inodes: it.no_free_inodes,
        room: it.room,
        full: sources.server.stats().disk_full,
    });
    Usage {
        disk,
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
