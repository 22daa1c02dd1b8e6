//! Cursors of a SCAN that tell nobody a key.
//!
//! A page ends at a key that the client may not read as often as at one that it may, and the cursor goes out with the answer.
//! So it is sealed: the same key gives the same bytes, only this process can open them, and what it did not seal it refuses
//! (a synthetic initialization vector, as in RFC 5297, with BLAKE3 for both halves).

use std::hash::{BuildHasher, RandomState};

/// What stands in front: enough that nobody finds another cursor by trying.
const TAG_BYTES: usize = 16;

/// The secret of one process.
#[derive(Debug)]
pub struct Seal([u8; 32]);

impl Default for Seal {
    /// From the system's randomness, which the standard library draws for its hash tables.
    fn default() -> Self {
        let mut secret = [0; 32];
        for bytes in secret.chunks_mut(8) {
            bytes.copy_from_slice(&RandomState::new().hash_one(0).to_le_bytes());
        }
        Self(secret)
    }
}

impl Seal {
    /// A key, so that only this process can read it.
    pub(super) fn close(&self, key: &[u8]) -> Vec<u8> {
        let tag = self.tag(key);
        let mut sealed = tag.to_vec();
        sealed.extend_from_slice(key);
        self.mix(&tag, &mut sealed[TAG_BYTES..]);
        sealed
    }

    /// The key of a cursor that [`close`](Self::close) gave.
    pub(super) fn open(&self, sealed: &[u8]) -> Option<Vec<u8>> {
        let (tag, key) = sealed.split_first_chunk()?;
        let mut key = key.to_vec();
        self.mix(tag, &mut key);
        // Whoever guesses learns nothing from how long this takes: what is compared is of his own key.
        (self.tag(&key) == *tag).then_some(key)
    }

    fn tag(&self, key: &[u8]) -> [u8; TAG_BYTES] {
        let mut tag = [0; TAG_BYTES];
        tag.copy_from_slice(&blake3::keyed_hash(&self.0, key).as_bytes()[..TAG_BYTES]);
        tag
    }

    fn mix(&self, tag: &[u8; TAG_BYTES], bytes: &mut [u8]) {
        let mut stream = vec![0; bytes.len()];
        // No key is hashed as its tag is: this one is of a secret of its own.
        let secret = blake3::derive_key("statehouse 2026 cursors of a scan", &self.0);
        let mut hasher = blake3::Hasher::new_keyed(&secret);
        hasher.update(tag).finalize_xof().fill(&mut stream);
        bytes
            .iter_mut()
            .zip(stream)
            .for_each(|(byte, mixed)| *byte ^= mixed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_is_good_where_it_was_made_and_shows_nothing_of_its_key() {
        let seal = Seal::default();
        let secret = b"payroll/board/salaries";
        let cursor = seal.close(secret);
        assert_eq!(seal.open(&cursor).as_deref(), Some(&secret[..]));
        assert!(
            !cursor
                .windows(4)
                .any(|it| secret.windows(4).any(|part| part == it))
        );
        assert_eq!(Seal::default().open(&cursor), None);
        for at in 0..cursor.len() {
            let mut changed = cursor.clone();
            changed[at] ^= 1;
            assert_eq!(seal.open(&changed), None, "byte {at}");
            assert_eq!(seal.open(&cursor[..at]), None, "{at} bytes");
        }
    }
}
