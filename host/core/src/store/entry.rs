//! A key and its entry in one immutable block of memory.
//!
//! The table, queued records and remembered requests share blocks. A write creates a new block.

use std::fmt;

use bytes::Bytes;
use triomphe::ThinArc;

use crate::clock::{Fence, Stamp};
use crate::limits::ENTRY_OVERHEAD_BYTES;

/// A key: any bytes, at least one.
pub type Key = Bytes;

/// A key with its value and metadata. Clones share the block by reference counting.
///
/// With a million small entries, every separate allocation costs tens of megabytes. So all parts
/// are in one block, behind a pointer of eight bytes:
///
/// ```text
/// count ─ version, key length ─ length of the rest ─ key ─ flags ─ [expiry] ─ [fence] ─ value
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Entry(ThinArc<Head, u8>);

#[derive(Clone, Copy, PartialEq, Eq)]
struct Head {
    wall: u64,
    counter: u32,
    key_bytes: u32,
}

/// Flags in the byte after the key.
mod has {
    pub(super) const EXPIRY: u8 = 1;
    pub(super) const FENCE: u8 = 2;
}

/// The parts after the key.
struct Rest<'a> {
    expires_ms: Option<u64>,
    fence: Option<(Stamp, &'a [u8])>,
    value: &'a [u8],
}

impl Entry {
    /// Copies the parts into a block.
    pub fn new(
        key: &[u8],
        value: &[u8],
        version: Stamp,
        fence: Option<&Fence>,
        expires_ms: Option<u64>,
    ) -> Self {
        let node = fence.map_or(&b""[..], |fence| fence.node.as_bytes());
        let fixed = 1 + size_of::<u64>() + size_of::<u64>() + 2 * size_of::<u32>();
        let mut bytes = Vec::with_capacity(key.len() + fixed + node.len() + value.len());
        bytes.extend_from_slice(key);
        let bit = |there: bool, bit: u8| if there { bit } else { 0 };
        bytes.push(bit(expires_ms.is_some(), has::EXPIRY) | bit(fence.is_some(), has::FENCE));
        if let Some(expires_ms) = expires_ms {
            bytes.extend_from_slice(&expires_ms.to_le_bytes());
        }
        if let Some(fence) = fence {
            bytes.extend_from_slice(&fence.wall.to_le_bytes());
            bytes.extend_from_slice(&fence.counter.to_le_bytes());
            bytes.extend_from_slice(&length(node).to_le_bytes());
            bytes.extend_from_slice(node);
        }
        bytes.extend_from_slice(value);
        let head = Head {
            wall: version.wall,
            counter: version.counter,
            key_bytes: length(key),
        };
        Self(ThinArc::from_header_and_slice(head, &bytes))
    }

    /// The same entry with another key.
    pub(super) fn under(&self, key: &[u8]) -> Self {
        if self.key() == key {
            return self.clone();
        }
        self.with(key, self.expires_ms())
    }

    /// The same entry with this deadline.
    pub fn with_deadline(&self, expires_ms: u64) -> Self {
        self.with(self.key(), Some(expires_ms))
    }

    fn with(&self, key: &[u8], expires_ms: Option<u64>) -> Self {
        let (value, version, fence) = (self.value(), self.version(), self.fence());
        Self::new(key, value, version, fence.as_ref(), expires_ms)
    }

    /// The key.
    pub fn key(&self) -> &[u8] {
        &self.0.slice[..self.key_bytes()]
    }

    /// The value.
    pub fn value(&self) -> &[u8] {
        self.rest().value
    }

    /// The last byte of its block, which is that of the value unless the value is empty.
    pub(super) fn last_byte(&self) -> Option<u8> {
        self.0.slice.last().copied()
    }

    /// The version of the SET that wrote it.
    pub fn version(&self) -> Stamp {
        let Head { wall, counter, .. } = self.0.header.header;
        Stamp { wall, counter }
    }

    /// The highest fencing token that protects it.
    pub fn fence(&self) -> Option<Fence> {
        let (Stamp { wall, counter }, node) = self.rest().fence?;
        // The node was text when the entry was created.
        let node = String::from_utf8_lossy(node).into();
        Some(Fence {
            wall,
            counter,
            node,
        })
    }

    /// The time at which it expires, in milliseconds.
    pub fn expires_ms(&self) -> Option<u64> {
        self.rest().expires_ms
    }

    /// Whether it has expired at `now_ms`.
    pub fn expired(&self, now_ms: u64) -> bool {
        self.expires_ms()
            .is_some_and(|expires_ms| expires_ms <= now_ms)
    }

    /// What it counts against `max_bytes`: every part whose length a client chooses, and a fixed
    /// overhead.
    pub fn weight(&self) -> u64 {
        self.key_bytes() as u64 + self.weight_without_key()
    }

    /// The weight if the key is counted elsewhere.
    pub(super) fn weight_without_key(&self) -> u64 {
        let Rest { fence, value, .. } = self.rest();
        let node_bytes = fence.map_or(0, |(_, node)| node.len());
        (value.len() + node_bytes) as u64 + ENTRY_OVERHEAD_BYTES
    }

    fn key_bytes(&self) -> usize {
        self.0.header.header.key_bytes as usize
    }

    fn rest(&self) -> Rest<'_> {
        let mut rest = &self.0.slice[self.key_bytes()..];
        let [which] = take(&mut rest);
        let expires_ms = (which & has::EXPIRY != 0).then(|| u64::from_le_bytes(take(&mut rest)));
        let fence = (which & has::FENCE != 0).then(|| {
            let wall = u64::from_le_bytes(take(&mut rest));
            let counter = u32::from_le_bytes(take(&mut rest));
            let node_bytes = u32::from_le_bytes(take(&mut rest));
            let (node, value) = rest.split_at(node_bytes as usize);
            rest = value;
            (Stamp { wall, counter }, node)
        });
        Rest {
            expires_ms,
            fence,
            value: rest,
        }
    }
}

fn length(part: &[u8]) -> u32 {
    u32::try_from(part.len()).expect("keys and nodes fit into a packet or a 32-bit memory")
}

fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    let (part, left) = rest
        .split_first_chunk()
        .expect("Entry::new wrote every part that the flags announce");
    *rest = left;
    *part
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entry")
            .field("key", &self.key().escape_ascii().to_string())
            .field("value", &self.value().escape_ascii().to_string())
            .field("version", &self.version())
            .field("fence", &self.fence())
            .field("expires_ms", &self.expires_ms())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn fence(node: &str) -> Fence {
        Fence {
            wall: 1,
            counter: 2,
            node: node.into(),
        }
    }

    proptest! {
        #[test]
        fn every_part_survives_a_round_trip(
            key in prop::collection::vec(any::<u8>(), 0..9),
            value in prop::collection::vec(any::<u8>(), 0..9),
            (wall, counter) in any::<(u64, u32)>(),
            fenced in prop::option::of((any::<u64>(), any::<u32>(), ".{0,9}")),
            expires_ms in any::<Option<u64>>(),
        ) {
            let version = Stamp { wall, counter };
            let fence = fenced.map(|(wall, counter, node)| Fence { wall, counter, node: node.into() });
            let entry = Entry::new(&key, &value, version, fence.as_ref(), expires_ms);
            prop_assert_eq!((entry.key(), entry.value()), (&key[..], &value[..]));
            prop_assert_eq!((entry.version(), entry.fence(), entry.expires_ms()), (version, fence, expires_ms));
            let elsewhere = entry.under(b"elsewhere");
            prop_assert_eq!((elsewhere.key(), elsewhere.value()), (&b"elsewhere"[..], &value[..]));
            prop_assert_eq!(elsewhere.under(&key), entry);
        }
    }

    #[test]
    fn entries_that_differ_in_a_part_are_unequal() {
        let of = |key: &str, value: &str, counter, node: Option<&str>, expires_ms| {
            let version = Stamp { wall: 7, counter };
            let fence = node.map(fence);
            Entry::new(
                key.as_bytes(),
                value.as_bytes(),
                version,
                fence.as_ref(),
                expires_ms,
            )
        };
        let all = [
            of("k", "v", 1, None, None),
            of("kv", "", 1, None, None),
            of("k", "w", 1, None, None),
            of("k", "v", 2, None, None),
            of("k", "v", 1, Some("a"), None),
            of("k", "v", 1, Some("b"), None),
            of("k", "v", 1, None, Some(9)),
        ];
        for (i, one) in all.iter().enumerate() {
            for (j, other) in all.iter().enumerate() {
                assert_eq!(one == other, i == j, "{one:?} {other:?}");
            }
        }
    }

    #[test]
    fn fence_node_counts_towards_the_weight() {
        let fence = fence(&"n".repeat(60_000));
        let fenced = Entry::new(b"key", b"v", Stamp::default(), Some(&fence), None);
        assert_eq!(fenced.weight(), 3 + 1 + 60_000 + ENTRY_OVERHEAD_BYTES);
    }

    #[test]
    fn optional_entry_is_pointer_sized() {
        assert_eq!(size_of::<Option<Entry>>(), size_of::<usize>());
    }
}
