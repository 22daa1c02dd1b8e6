//! The keys of a cluster in the engine.

use crate::engine::KeyRange;

/// Builds keys under `/statehouse/NAME/0/`. The 0 is the number of the partition; there is only
/// one.
#[derive(Clone, Debug)]
pub(crate) struct Keys {
    prefix: String,
}

impl Keys {
    pub(crate) fn new(cluster: &str) -> Self {
        Self {
            prefix: format!("/statehouse/{cluster}/0/"),
        }
    }

    /// The key that every transaction compares and changes.
    pub(crate) fn head(&self) -> Vec<u8> {
        format!("{}head", self.prefix).into_bytes()
    }

    /// The key that a follower writes to ask the leader for a renewal.
    pub(crate) fn challenge(&self) -> Vec<u8> {
        format!("{}challenge", self.prefix).into_bytes()
    }

    pub(crate) fn frame(&self, seq: u64) -> Vec<u8> {
        format!("{}log/{seq:016x}", self.prefix).into_bytes()
    }

    /// The frames `from..to`.
    pub(crate) fn frames(&self, from: u64, to: u64) -> KeyRange {
        KeyRange {
            from: self.frame(from),
            to: self.frame(to),
        }
    }

    /// The frames from `from` on.
    pub(crate) fn frames_from(&self, from: u64) -> KeyRange {
        KeyRange {
            from: self.frame(from),
            to: self.after_frames(),
        }
    }

    /// Whether `key` is the key of a frame.
    pub(crate) fn is_frame(&self, key: &[u8]) -> bool {
        key.strip_prefix(self.prefix.as_bytes())
            .is_some_and(|it| it.starts_with(b"log/"))
    }

    pub(crate) fn piece(&self, snapshot: u64, piece: u32) -> Vec<u8> {
        format!("{}snap/{snapshot:016x}/{piece:08x}", self.prefix).into_bytes()
    }

    /// The pieces of the snapshots `from..to`.
    pub(crate) fn snapshots(&self, from: u64, to: u64) -> KeyRange {
        KeyRange {
            from: format!("{}snap/{from:016x}/", self.prefix).into_bytes(),
            to: format!("{}snap/{to:016x}/", self.prefix).into_bytes(),
        }
    }

    /// The pieces of a snapshot from `piece` on.
    pub(crate) fn pieces_from(&self, snapshot: u64, piece: u32) -> KeyRange {
        KeyRange {
            from: self.piece(snapshot, piece),
            to: format!("{}snap/{snapshot:016x}0", self.prefix).into_bytes(),
        }
    }

    /// The head and the frames. In the order of keys, pieces of snapshots follow.
    pub(crate) fn followed(&self) -> KeyRange {
        KeyRange {
            from: self.head(),
            to: self.after_frames(),
        }
    }

    /// "0" is the character after "/".
    fn after_frames(&self) -> Vec<u8> {
        format!("{}log0", self.prefix).into_bytes()
    }
}
