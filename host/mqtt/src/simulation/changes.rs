//! Encodes changes as a broker records them, for tests of an embedder's log.
//!
//! Does not simulate any part of the broker itself.

use crate::change::{Change, Encoder, Part};

/// A session begins and outlives its connections.
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

/// A session ends.
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
    fn recovery_distinguishes_live_and_ended_sessions() {
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
