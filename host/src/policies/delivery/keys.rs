//! Reads Ed25519 keys from settings and files, and generates them.
//!
//! A file is in wasmsign2's own format, DER or PEM. Every key is validated. A secret key must never
//! be printed, not even in an error.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use data_encoding::HEXLOWER_PERMISSIVE;
use wasmsign2::{KeyPair, PublicKey, SecretKey};

use statehouse_access::base64;
use statehouse_config::limits;

const PUBLIC_KEY_BYTES: usize = 32;

/// The byte before a public key in wasmsign2's format.
const PUBLIC_KEY_TAG: u8 = 0x01;

/// Why a key cannot be read. The text is a sentence for the operator.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The text is no key, and no file of this name can be read.
    #[error(
        "`{name}` is neither a public key (64 hexadecimal digits, or base64) nor a file with one: {error}. `statehouse policy keygen` makes keys"
    )]
    NoFile {
        /// The text of the setting.
        name: String,
        /// The error of the system.
        error: std::io::Error,
    },
    /// The secret key's file cannot be read.
    #[error("cannot read the secret key {0}: {1}. `statehouse policy keygen` makes one")]
    Read(String, std::io::Error),
    /// The file contains no key.
    #[error("{0} holds no {1} Ed25519 key in wasmsign2's format, DER or PEM")]
    Format(String, &'static str),
    /// The bytes are no point of the curve, or the two halves of a secret key do not match.
    #[error("`{0}` has the form of an Ed25519 key, but is not a valid one")]
    Invalid(String),
}

/// Reads a public key from a setting: its digits, or the name of the file with the key.
pub fn public_key(text: &str) -> Result<PublicKey, KeyError> {
    let key = match inline_key(text) {
        Some(bytes) => {
            PublicKey::from_bytes(&bytes).map_err(|_| KeyError::Invalid(text.to_owned()))?
        }
        None => {
            let file = read(Path::new(text)).map_err(|error| KeyError::NoFile {
                name: text.to_owned(),
                error,
            })?;
            PublicKey::from_any(&file).map_err(|_| KeyError::Format(text.to_owned(), "public"))?
        }
    };
    match key.pk.validate() {
        // The id lets a log line name the key that signed.
        Ok(()) => Ok(key.attach_default_key_id()),
        Err(_) => Err(KeyError::Invalid(text.to_owned())),
    }
}

/// The tagged bytes of a key that the setting itself contains.
fn inline_key(text: &str) -> Option<Vec<u8>> {
    let hex = HEXLOWER_PERMISSIVE.decode(text.as_bytes()).ok();
    let bytes = hex.or_else(|| base64::decode(text))?;
    match bytes.as_slice() {
        [PUBLIC_KEY_TAG, key @ ..] if key.len() == PUBLIC_KEY_BYTES => Some(bytes),
        key if key.len() == PUBLIC_KEY_BYTES => Some([&[PUBLIC_KEY_TAG], key].concat()),
        _ => None,
    }
}

/// Reads a secret key from its file.
pub fn secret_key(path: &Path) -> Result<SecretKey, KeyError> {
    let name = path.display().to_string();
    let file = read(path).map_err(|error| KeyError::Read(name.clone(), error))?;
    let key = SecretKey::from_any(&file).map_err(|_| KeyError::Format(name.clone(), "secret"))?;
    let public = key.sk.public_key();
    match key.sk.validate_public_key(&public) {
        Ok(()) => Ok(key),
        Err(_) => Err(KeyError::Invalid(name)),
    }
}

/// Generates a key pair from the system's randomness.
pub fn generate() -> KeyPair {
    let pair = KeyPair::generate();
    KeyPair {
        pk: pair.pk.attach_default_key_id(),
        sk: pair.sk,
    }
}

fn read(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?
        .take(limits::KEY_FILE_BYTES_MAX)
        .read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use data_encoding::{BASE64, BASE64_NOPAD, HEXLOWER, HEXUPPER};

    use super::*;

    #[test]
    fn a_key_is_the_same_in_every_form() {
        let pair = generate();
        let directory = tempfile::tempdir().unwrap();
        let raw = directory.path().join("raw");
        let pem = directory.path().join("pem");
        pair.pk.to_file(&raw).unwrap();
        std::fs::write(&pem, pair.pk.to_pem()).unwrap();
        let bytes = pair.pk.to_bytes();
        for text in [
            HEXLOWER.encode(&bytes[1..]),
            HEXUPPER.encode(&bytes),
            BASE64.encode(&bytes[1..]),
            BASE64_NOPAD.encode(&bytes[1..]),
            raw.display().to_string(),
            pem.display().to_string(),
        ] {
            assert_eq!(public_key(&text).unwrap(), pair.pk, "{text}");
        }
    }

    #[test]
    fn an_invalid_key_is_refused_with_its_reason() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("key");
        std::fs::write(&file, b"no key at all").unwrap();
        let name = file.display().to_string();
        let says = |text: &str| public_key(text).unwrap_err().to_string();
        assert!(says(&name).contains("holds no public"), "{}", says(&name));
        assert!(says("missing.pub").contains("keygen"));
        // A key that is not on the curve, or of small order, would accept forged signatures.
        assert!(says(&"00".repeat(32)).contains("is not a valid one"));
        assert!(says(&"ff".repeat(32)).contains("is not a valid one"));
        let pair = generate();
        pair.pk.to_file(&file).unwrap();
        let error = secret_key(&file).unwrap_err().to_string();
        assert!(error.contains("secret"), "{error}");
        pair.sk.to_file(&file).unwrap();
        assert_eq!(secret_key(&file).unwrap(), pair.sk);
    }
}
