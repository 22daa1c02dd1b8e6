//! Policy digests: the identity of a policy, which its author cannot choose.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// The BLAKE3 digest of a policy's file, shown as 64 hex digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest(pub blake3::Hash);

impl Digest {
    /// The digest of a file.
    pub fn of(file: &[u8]) -> Self {
        Self(blake3::hash(file))
    }

    /// The first 16 hex digits: enough to distinguish policies, and short enough for every answer
    /// and log line.
    pub fn short(&self) -> String {
        self.0.to_hex()[..16].to_owned()
    }
}

impl From<blake3::Hash> for Digest {
    fn from(hash: blake3::Hash) -> Self {
        Self(hash)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.to_hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.short())
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0.to_hex())
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        blake3::Hash::from_hex(&text)
            .map(Self)
            .map_err(|_| de::Error::custom("a digest that is not 64 hex digits"))
    }
}
