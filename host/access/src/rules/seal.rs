//! Encrypts the cursors of a SCAN, so that a cursor reveals no key.
//!
//! A page of a SCAN may end at a key that the client may not read, and the response contains that
//! key as the cursor. Encryption is deterministic: the same key gives the same bytes. Only this
//! process can decrypt a cursor, and it must refuse any bytes that it did not encrypt. The scheme
//! is a synthetic initialization vector, as in RFC 5297, with BLAKE3 for both halves.

use std::hash::{BuildHasher, RandomState};

/// The length of the tag before the encrypted key. Guessing another valid cursor is infeasible.
const TAG_BYTES: usize = 16;

/// The secret of one process.
#[derive(Debug)]
pub struct Seal([u8; 32]);

impl Default for Seal {
    /// A secret from the system's randomness, which the standard library draws for its hash tables.
    fn default() -> Self {
        let mut secret = [0; 32];
        for bytes in secret.chunks_mut(8) {
            bytes.copy_from_slice(&RandomState::new().hash_one(0).to_le_bytes());
        }
        Self(secret)
    }
}

impl Seal {
    pub(super) fn seal(&self, key: &[u8]) -> Vec<u8> {
        let tag = self.tag(key);
        let mut sealed = tag.to_vec();
        sealed.extend_from_slice(key);
        self.mix(&tag, &mut sealed[TAG_BYTES..]);
        sealed
    }

    /// Decrypts the result of [`seal`](Self::seal). `None` for any other input.
    pub(super) fn unseal(&self, sealed: &[u8]) -> Option<Vec<u8>> {
        let (tag, key) = sealed.split_first_chunk()?;
        let mut key = key.to_vec();
        self.mix(tag, &mut key);
        // The time of this comparison reveals nothing: it depends on the key that the client sent.
        (self.tag(&key) == *tag).then_some(key)
    }

    fn tag(&self, key: &[u8]) -> [u8; TAG_BYTES] {
        let mut tag = [0; TAG_BYTES];
        tag.copy_from_slice(&blake3::keyed_hash(&self.0, key).as_bytes()[..TAG_BYTES]);
        tag
    }

    fn mix(&self, tag: &[u8; TAG_BYTES], bytes: &mut [u8]) {
        let mut stream = vec![0; bytes.len()];
        // A separate secret, so that the keystream is independent of all tags.
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
    fn cursor_hides_its_key_and_opens_only_with_its_secret() {
        let seal = Seal::default();
        let secret = b"payroll/board/salaries";
        let cursor = seal.seal(secret);
        assert_eq!(seal.unseal(&cursor).as_deref(), Some(&secret[..]));
        assert!(
            !cursor
                .windows(4)
                .any(|it| secret.windows(4).any(|part| part == it))
        );
        assert_eq!(Seal::default().unseal(&cursor), None);
        for at in 0..cursor.len() {
            let mut changed = cursor.clone();
            changed[at] ^= 1;
            assert_eq!(seal.unseal(&changed), None, "byte {at}");
            assert_eq!(seal.unseal(&cursor[..at]), None, "{at} bytes");
        }
    }
}
