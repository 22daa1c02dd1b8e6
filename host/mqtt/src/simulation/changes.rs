//! Encodes changes as a broker records them, for tests of an embedder's log.
//!
//! Does not simulate any part of the broker itself.

use statehouse_protocol::SessionId;

use crate::change::{Change, Encoder, Part};

/// A session begins and outlives its connections.
#[must_use]
pub fn session_began(number: SessionId, client: &str) -> Vec<u8> {
    batch(
        number,
        Part::Begin {
            client,
            expiry_s: u32::MAX,
            will: None,
        },
    )
}

/// A session ends.
#[must_use]
pub fn session_ended(number: SessionId) -> Vec<u8> {
    batch(number, Part::End)
}

fn batch(number: SessionId, part: Part<'_>) -> Vec<u8> {
    let mut encoder = Encoder::default();
    encoder.write(&Change::Session(number, part));
    encoder.take()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Recovery;

    #[test]
    fn recovery_distinguishes_live_and_ended_sessions() {
        let mut recovery = Recovery::default();
        let [first, last, ended] = [3, 1 << 32, 7].map(SessionId);
        for session in [first, last, ended] {
            assert_eq!(recovery.apply(&session_began(session, "a")), Ok(Vec::new()));
        }
        assert!(recovery.has_session(ended));
        assert_eq!(recovery.apply(&session_ended(ended)), Ok(vec![ended]));
        assert_eq!(recovery.apply(&session_ended(ended)), Ok(Vec::new()));
        assert!(!recovery.has_session(ended));
        assert!(recovery.session_numbers().eq([first, last]));
    }
}
