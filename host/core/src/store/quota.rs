//! Limits on the table, on watches and on each request.
//!
//! Removals and shrinking writes must always be allowed, so that a full store can be emptied.

use std::fmt;

use crate::limits;
use crate::log::JournalRoom;

/// Limits, from the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Number of keys.
    pub keys_max: u64,
    /// Bytes of keys and values, including the overhead of entries.
    pub bytes_max: u64,
    /// Number of keys that one client owns.
    pub client_keys_max: u64,
    /// Bytes that one client owns, counted in the same way.
    pub client_bytes_max: u64,
    /// Bytes of one key.
    pub key_bytes_max: u64,
    /// Bytes of one value.
    pub value_bytes_max: u64,
    /// Watches of all connections.
    pub watches_max: u64,
    /// Watches of one connection.
    pub watches_per_connection_max: u64,
    /// Watches of all connections, in bytes.
    pub watch_bytes_max: u64,
    /// Bytes of recent changes.
    pub recent_bytes_max: u64,
    /// Bytes that may wait for the write-ahead log before requests are refused.
    pub unreleased_bytes_max: u64,
    /// Fuel of a first execution, in addition to the fuel for each payload byte.
    pub fuel_max: u64,
    /// What the write-ahead log has room for.
    pub journal: JournalRoom,
}

impl Default for Quota {
    /// The limits of `serve` without any configuration.
    fn default() -> Self {
        let all = Self {
            keys_max: limits::KEYS_MAX_DEFAULT,
            bytes_max: limits::BYTES_MAX_DEFAULT,
            client_keys_max: 0,
            client_bytes_max: 0,
            key_bytes_max: limits::KEY_BYTES_MAX_DEFAULT,
            value_bytes_max: limits::VALUE_BYTES_MAX_DEFAULT,
            watches_max: limits::WATCHES_MAX_DEFAULT,
            watches_per_connection_max: limits::WATCHES_PER_CONNECTION_MAX_DEFAULT,
            watch_bytes_max: limits::WATCH_BYTES_MAX,
            recent_bytes_max: limits::RECENT_BYTES_MAX,
            unreleased_bytes_max: limits::UNRELEASED_BYTES_MAX,
            fuel_max: limits::FUEL_PER_CALL_DEFAULT,
            journal: JournalRoom::Growth,
        };
        all.with_client(None, None)
    }
}

impl Quota {
    /// Sets the limits of one client. The default reserves a part of the store for other clients.
    #[must_use]
    pub fn with_client(self, keys_max: Option<u64>, bytes_max: Option<u64>) -> Self {
        // Every client may write the longest value.
        let longest = (self.key_bytes_max.saturating_add(self.value_bytes_max))
            .saturating_add(limits::ENTRY_OVERHEAD_BYTES);
        let bytes_part = all_but_one_part(self.bytes_max).max(longest);
        Self {
            client_keys_max: keys_max.unwrap_or(all_but_one_part(self.keys_max)),
            client_bytes_max: bytes_max.unwrap_or(bytes_part.min(self.bytes_max)),
            ..self
        }
    }

    /// Bytes of the watches of one connection: a part of the total, but enough for the longest key.
    pub fn watch_bytes_per_connection_max(&self) -> u64 {
        let part = self.watch_bytes_max / limits::CLIENT_PARTS_OF_TOTAL as u64;
        let least = (self.key_bytes_max).saturating_add(limits::WATCH_OVERHEAD_BYTES as u64);
        part.max(least)
            .min(limits::WATCH_BYTES_PER_CONNECTION_MAX as u64)
    }

    /// Checks the length of a key.
    pub fn check_key(&self, key: &[u8]) -> Result<(), Exceeded> {
        match key.len() as u64 > self.key_bytes_max {
            true => Err(Exceeded::KeyBytes(self.key_bytes_max)),
            false => Ok(()),
        }
    }

    /// Checks whether the table may grow from `before` to `after`, each given as keys and bytes.
    pub fn check(&self, before: (u64, u64), after: (u64, u64)) -> Result<(), Exceeded> {
        let keys_max = self.keys_max.min(limits::KEYS_MAX_MAX);
        if after.0 > keys_max && after.0 > before.0 {
            Err(Exceeded::Keys(keys_max))
        } else if after.1 > self.bytes_max && after.1 > before.1 {
            Err(Exceeded::Bytes(self.bytes_max))
        } else {
            Ok(())
        }
    }

    /// Checks whether one client's keys may grow from `before` to `after`, each given as keys and
    /// bytes.
    pub fn check_client(&self, before: (u64, u64), after: (u64, u64)) -> Result<(), Exceeded> {
        if after.0 > self.client_keys_max && after.0 > before.0 {
            Err(Exceeded::ClientKeys(self.client_keys_max))
        } else if after.1 > self.client_bytes_max && after.1 > before.1 {
            Err(Exceeded::ClientBytes(self.client_bytes_max))
        } else {
            Ok(())
        }
    }
}

fn all_but_one_part(of_store: u64) -> u64 {
    of_store - of_store / limits::PARTS_WITH_ONE_FOR_OTHERS
}

/// The limit that refused something, with its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exceeded {
    /// Keys of the table.
    Keys(u64),
    /// Bytes of the table.
    Bytes(u64),
    /// Keys of one client.
    ClientKeys(u64),
    /// Bytes of one client's keys.
    ClientBytes(u64),
    /// Bytes of one key.
    KeyBytes(u64),
    /// Bytes of one value.
    ValueBytes(u64),
    /// Watches of all connections.
    Watches(u64),
    /// Watches of one connection.
    ClientWatches(u64),
    /// Watches in bytes.
    WatchBytes(u64),
    /// The disk is full, or the quota of etcd in a cluster.
    Disk,
}

impl Exceeded {
    /// The setting that would raise the limit, or the exhausted resource.
    pub fn name(self) -> &'static str {
        match self {
            Self::Keys(_) => "max_keys",
            Self::Bytes(_) => "max_bytes",
            Self::ClientKeys(_) => "max_client_keys",
            Self::ClientBytes(_) => "max_client_bytes",
            Self::KeyBytes(_) => "max_key_bytes",
            Self::ValueBytes(_) => "max_value_bytes",
            Self::Watches(_) => "max_watches",
            Self::ClientWatches(_) => "max_client_watches",
            Self::WatchBytes(_) => "watch_bytes",
            Self::Disk => "disk",
        }
    }
}

impl fmt::Display for Exceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, max) = match self {
            Self::Keys(max) => ("the store holds max_keys", max),
            Self::Bytes(max) => ("the store would hold more than max_bytes", max),
            Self::ClientKeys(max) => ("it owns max_client_keys", max),
            Self::ClientBytes(max) => ("it would own more than max_client_bytes", max),
            Self::KeyBytes(max) => ("the key is longer than max_key_bytes", max),
            Self::ValueBytes(max) => ("the value is longer than max_value_bytes", max),
            Self::Watches(max) => ("all clients together hold max_watches", max),
            Self::ClientWatches(max) => ("it watches max_client_watches", max),
            Self::WatchBytes(max) => {
                return write!(
                    f,
                    "the watched keys would use more than {max} bytes, the limit"
                );
            }
            Self::Disk => {
                return f.write_str(
                    "the disk is full, or the quota of etcd in a cluster: only removals are accepted, while there is room for them",
                );
            }
        };
        write!(f, "{what}, which is {max}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::ENTRY_OVERHEAD_BYTES;

    #[test]
    fn growth_stops_at_the_limit_and_shrinking_is_allowed() {
        let quota = Quota {
            keys_max: 2,
            bytes_max: 100,
            ..Quota::default()
        };
        assert_eq!(quota.check((1, 50), (2, 100)), Ok(()));
        assert_eq!(quota.check((2, 50), (3, 60)), Err(Exceeded::Keys(2)));
        assert_eq!(quota.check((1, 50), (1, 101)), Err(Exceeded::Bytes(100)));
        // A lowered limit must not block entries that already exceed it.
        assert_eq!(quota.check((5, 300), (5, 300)), Ok(()));
        assert_eq!(quota.check((5, 300), (4, 200)), Ok(()));
        assert_eq!(quota.check((5, 300), (5, 301)), Err(Exceeded::Bytes(100)));
    }

    #[test]
    fn client_growth_stops_at_its_own_limits() {
        let quota = Quota {
            keys_max: 4,
            ..Quota::default()
        };
        let quota = quota.with_client(None, Some(100));
        let check = |before, after| quota.check_client(before, after);
        assert_eq!(check((2, 50), (3, 100)), Ok(()));
        assert_eq!(check((3, 50), (4, 60)), Err(Exceeded::ClientKeys(3)));
        assert_eq!(check((3, 50), (3, 101)), Err(Exceeded::ClientBytes(100)));
        assert_eq!(check((9, 300), (9, 300)), Ok(()));
        assert_eq!(check((9, 300), (8, 200)), Ok(()));
    }

    #[test]
    fn client_limits_default_to_three_quarters() {
        let of = |keys_max, bytes_max| {
            let quota = Quota {
                keys_max,
                bytes_max,
                key_bytes_max: 10,
                value_bytes_max: 62,
                ..Quota::default()
            };
            let quota = quota.with_client(None, None);
            (quota.client_keys_max, quota.client_bytes_max)
        };
        assert_eq!(of(4_000, 400_000), (3_000, 300_000));
        assert_eq!(of(2, 220), (2, 10 + 62 + ENTRY_OVERHEAD_BYTES));
        assert_eq!(of(1, 100), (1, 100));
        assert_eq!(of(u64::MAX, u64::MAX).0, u64::MAX - u64::MAX / 4);
    }
}
