//! Whose broker it is that clients are connected to: what a store keeps of them depends on it.

/// Whose broker it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// This process is the broker. Its sessions are kept, and end where they end; watches end with a connection.
    #[default]
    Embedded,
    /// Another process is. Nothing is known of its sessions, and clients stay connected to it while this process is
    /// away: watches are kept.
    Foreign,
}

/// The bit that numbers of clients behind a foreign broker have and numbers of the embedded broker's sessions never.
const FOREIGN: u64 = 1 << 63;

impl Mode {
    /// The mode in which a session has this number.
    pub fn of_session(number: u64) -> Self {
        match number & FOREIGN {
            0 => Self::Embedded,
            _ => Self::Foreign,
        }
    }

    /// The number of a client behind a foreign broker, from the beginning of a digest of what it is told apart by.
    pub fn foreign_session(digest: u64) -> u64 {
        digest | FOREIGN
    }
}
