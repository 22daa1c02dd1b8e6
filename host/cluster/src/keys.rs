//! The keys of a cluster in the engine.

use crate::engine::KeyRange;

/// Builds keys under `/statehouse/NAME/0/`. The 0 is the number of the partition; there is only
/// one.
#[derive(Clone, Debug)]
pub(crate) struct Keys {
    cluster: String,
    prefix: String,
}

impl Keys {
    pub(crate) fn new(cluster: &str) -> Self {
        Self {
            cluster: cluster.to_owned(),
            prefix: format!("/statehouse/{cluster}/0/"),
        }
    }

    /// The key that every transaction compares and changes.
    pub(crate) fn head(&self) -> Vec<u8> {
        format!("{}head", self.prefix).into_bytes()
    }

    /// The key that a follower, or a check, writes to ask the leader for a renewal.
    pub(crate) fn challenge(&self) -> Vec<u8> {
        format!("{}challenge", self.prefix).into_bytes()
    }

    pub(crate) fn frame(&self, seq: u64) -> Vec<u8> {
        format!("{}log/{seq:016x}", self.prefix).into_bytes()
    }

    pub(crate) fn frames(&self, from: u64, to: u64) -> KeyRange {
        KeyRange::new(self.frame(from), self.frame(to))
    }

    pub(crate) fn frames_from(&self, from: u64) -> KeyRange {
        KeyRange::new(self.frame(from), self.folder("log").to)
    }

    pub(crate) fn is_frame(&self, key: &[u8]) -> bool {
        key.strip_prefix(self.prefix.as_bytes())
            .is_some_and(|it| it.starts_with(b"log/"))
    }

    pub(crate) fn piece(&self, snapshot: u64, piece: u32) -> Vec<u8> {
        format!("{}snap/{snapshot:016x}/{piece:08x}", self.prefix).into_bytes()
    }

    /// The pieces of the snapshots `from..to`.
    pub(crate) fn snapshots(&self, from: u64, to: u64) -> KeyRange {
        let begin = |id: u64| format!("{}snap/{id:016x}/", self.prefix).into_bytes();
        KeyRange::new(begin(from), begin(to))
    }

    /// The pieces of a snapshot from `piece` on.
    pub(crate) fn pieces_from(&self, snapshot: u64, piece: u32) -> KeyRange {
        let all = self.folder(&format!("snap/{snapshot:016x}"));
        KeyRange::new(self.piece(snapshot, piece), all.to)
    }

    /// The head and the frames. In the order of keys, pieces of snapshots follow.
    pub(crate) fn followed(&self) -> KeyRange {
        KeyRange::new(self.head(), self.folder("log").to)
    }

    /// The random key that all hosts of the cluster share.
    pub(crate) fn secret(&self) -> Vec<u8> {
        format!("{}secret", self.prefix).into_bytes()
    }

    pub(crate) fn all_snapshots(&self) -> KeyRange {
        self.folder("snap")
    }

    pub(crate) fn module_piece(&self, digest: &[u8; 32], piece: u32) -> Vec<u8> {
        format!("{}module/{}/{piece:08x}", self.prefix, hex(digest)).into_bytes()
    }

    pub(crate) fn module_pieces(&self, digest: &[u8; 32]) -> KeyRange {
        self.folder(&format!("module/{}", hex(digest)))
    }

    pub(crate) fn module_begun(&self, digest: &[u8; 32]) -> Vec<u8> {
        format!("{}modules/{}/begun", self.prefix, hex(digest)).into_bytes()
    }

    pub(crate) fn module_stored(&self, digest: &[u8; 32]) -> Vec<u8> {
        format!("{}modules/{}/stored", self.prefix, hex(digest)).into_bytes()
    }

    /// A random number, new each time that the module is begun. Earlier versions ignore it.
    pub(crate) fn module_attempt(&self, digest: &[u8; 32]) -> Vec<u8> {
        format!("{}modules/{}/attempt", self.prefix, hex(digest)).into_bytes()
    }

    /// Both sizes of a module, and its attempt.
    pub(crate) fn module_sizes(&self, digest: &[u8; 32]) -> KeyRange {
        self.folder(&format!("modules/{}", hex(digest)))
    }

    /// The sizes and attempts of all modules.
    pub(crate) fn modules(&self) -> KeyRange {
        self.folder("modules")
    }

    /// The digest in the key of a size, and whether the size says that the module is complete.
    pub(crate) fn parse_module_size(&self, key: &[u8]) -> Option<([u8; 32], bool)> {
        let key = std::str::from_utf8(key).ok()?;
        let rest = key.strip_prefix(&self.prefix)?.strip_prefix("modules/")?;
        let (digest, kind) = rest.split_once('/')?;
        let is_complete = match kind {
            "begun" => false,
            "stored" => true,
            _ => return None,
        };
        Some((
            *blake3::Hash::from_hex(digest).ok()?.as_bytes(),
            is_complete,
        ))
    }

    pub(crate) fn member(&self, host: &str) -> Vec<u8> {
        format!("{}member/{host}", self.prefix).into_bytes()
    }

    pub(crate) fn members(&self) -> KeyRange {
        self.folder("member")
    }

    /// The name of the host in the key of its record.
    pub(crate) fn parse_member(&self, key: &[u8]) -> Option<String> {
        let key = std::str::from_utf8(key).ok()?;
        let host = key.strip_prefix(&self.prefix)?.strip_prefix("member/")?;
        Some(host.to_owned())
    }

    /// The key that a check of the engine writes and deletes.
    pub(crate) fn check(&self) -> Vec<u8> {
        format!("{}check", self.prefix).into_bytes()
    }

    pub(crate) fn cluster(&self) -> &str {
        &self.cluster
    }

    /// The keys below `path/`. "0" is the character after "/".
    fn folder(&self, path: &str) -> KeyRange {
        let key = |end: char| format!("{}{path}{end}", self.prefix).into_bytes();
        KeyRange::new(key('/'), key('0'))
    }
}

/// A digest in hexadecimal digits, as in keys.
pub(crate) fn hex(digest: &[u8; 32]) -> String {
    blake3::Hash::from_bytes(*digest).to_hex().to_string()
}
