//! Changes as a broker records them, for tests of what an embedder does with its log.
//!
//! In comes the number of a session; out goes a batch of changes. Nothing of the broker itself is simulated.

use crate::change::{Change, Encoder, Part};

/// The session begins, and outlives its connections.
#[must_use]
pub fn session_began(number: u64, client: &str) -> Vec<u8> {
    batch(
        number,
        Part::Begin {
            client,
            expiry_s: u32::MAX,
            will: None,
        },
    )
}

/// The session ends.
#[must_use]
pub fn session_ended(number: u64) -> Vec<u8> {
    batch(number, Part::End)
}

fn batch(number: u64, part: Part<'_>) -> Vec<u8> {
    let mut encoder = Encoder::default();
    encoder.write(&Change::Session(number, part));
    encoder.take()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Recovery;

    #[test]
    fn a_recovery_says_which_sessions_live_and_which_ended() {
        let mut recovery = Recovery::default();
        for number in [3, 1 << 32, 7] {
            assert_eq!(recovery.apply(&session_began(number, "a")), Ok(Vec::new()));
        }
        assert!(recovery.has_session(7));
        assert_eq!(recovery.apply(&session_ended(7)), Ok(vec![7]));
        assert_eq!(recovery.apply(&session_ended(7)), Ok(Vec::new()));
        assert!(!recovery.has_session(7));
        assert!(recovery.session_numbers().eq([3, 1 << 32]));
    }
}
