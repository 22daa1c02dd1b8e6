//! The version of the protocol that a connection uses.

/// A version of MQTT. The CONNECT chooses it, for its connection only: a session may be resumed
/// with another version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ProtocolVersion {
    /// MQTT 3.1.1, protocol level 4.
    V311,
    /// MQTT 5, protocol level 5.
    V5,
}

impl ProtocolVersion {
    /// The name of the version: `3.1.1` or `5`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::V311 => "3.1.1",
            Self::V5 => "5",
        }
    }
}
