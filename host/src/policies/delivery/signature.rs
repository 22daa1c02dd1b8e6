//! Signatures of modules in wasmsign2's format: Ed25519 over the SHA-256 of all bytes after the
//! first section.
//!
//! The crate wasmsign2 signs, but this module verifies. The crate reserves as much memory as a file
//! claims to need. It also accepts the signed beginning of a module as the whole, as its format
//! demands. A policy must only be accepted if the signature covers the whole module.
//!
//! The format signs neither the signature itself nor the eight bytes of the header. The header says
//! whether the sections belong to a core module or to a component; no bytes are valid as both.

use data_encoding::HEXLOWER;
use ed25519_compact::Signature;
use wasmsign2::reexports::hmac_sha256;
use wasmsign2::{Module, PublicKey, SecretKey, WSError};

use statehouse_config::limits;
use statehouse_core::policy::LoadError;
use statehouse_core::policy::sections::{self, Reader};

/// The name of the section with the signatures.
const SECTION: &[u8] = b"signature";

/// The prefix of the signed message: the domain, the version of the format, modules, SHA-256.
const DOMAIN: &[u8] = b"wasmsig\x01\x01\x01";

/// The number of the algorithm in the format.
const ED25519: u8 = 1;

/// The length of a SHA-256.
const HASH_BYTES: usize = 32;

/// Why a signature is not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SignatureError {
    /// The file is not WebAssembly.
    #[error("the file is not WebAssembly: it does not begin with \\0asm and a known version")]
    NotWasm,
    /// The file is truncated.
    #[error("{}", LoadError::Cut)]
    Cut,
    /// The first section contains no signature.
    #[error("the module is not signed")]
    Unsigned,
    /// The signature section cannot be parsed.
    #[error("the signature of the module is malformed")]
    Malformed,
    /// No trusted key signed the module.
    #[error("the module is signed by none of the keys that are trusted here")]
    UnknownKey,
    /// A trusted key signed other bytes.
    #[error("the module is not what was signed: it was changed or cut afterwards")]
    Tampered,
}

/// Adds a signature in front of the module, or replaces the existing one. The same module and key
/// give the same bytes.
pub fn sign(file: &[u8], key: &SecretKey) -> Result<Vec<u8>, SignatureError> {
    // The crate's parser trusts lengths, so they are checked first.
    if !sections::are_whole(file) {
        return Err(match sections::of(file) {
            Some(_) => SignatureError::Cut,
            None => SignatureError::NotWasm,
        });
    }
    let signing = || {
        let module = Module::deserialize(&mut &file[..])?;
        let signed = key.sign(module, Some(&key_id(&public(key))))?;
        let mut out = Vec::with_capacity(file.len() + limits::SIGNATURE_SECTION_BYTES_MAX);
        signed.serialize(&mut out)?;
        Ok::<_, WSError>(out)
    };
    signing().map_err(|_| SignatureError::NotWasm)
}

/// The public key of a secret key.
pub fn public(key: &SecretKey) -> PublicKey {
    PublicKey {
        pk: key.sk.public_key(),
        key_id: None,
    }
}

/// The id of a key in a signature: short and not secret.
pub(super) fn key_id(key: &PublicKey) -> Vec<u8> {
    let key = key.clone().attach_default_key_id();
    // The id was just attached.
    key.key_id.unwrap_or_default()
}

/// The ids of the keys that a module claims as its signers, without verification; none if it is not
/// signed.
pub fn signers(file: &[u8]) -> Option<Vec<String>> {
    let (section, _) = signature_section(file).ok()?;
    let signatures = parse(section).unwrap_or_default().into_iter();
    Some(signatures.map(|(_, id, _)| HEXLOWER.encode(id)).collect())
}

/// Returns the key that signed this whole module.
pub fn verify<'k>(file: &[u8], keys: &'k [PublicKey]) -> Result<&'k PublicKey, SignatureError> {
    let (section, rest) = signature_section(file)?;
    let signatures = parse(section).ok_or(SignatureError::Malformed)?;
    let mut found = SignatureError::UnknownKey;
    let mut whole = None;
    for (hashes, _, signature) in &signatures {
        let message = [DOMAIN, hashes].concat();
        let Some(key) = keys
            .iter()
            .find(|key| key.pk.verify(&message, signature).is_ok())
        else {
            continue;
        };
        // The last hash covers the whole module. The hashes before it cover beginnings.
        let whole = whole.get_or_insert_with(|| hmac_sha256::Hash::hash(rest));
        if hashes.ends_with(&whole[..]) {
            return Ok(key);
        }
        found = SignatureError::Tampered;
    }
    Err(found)
}

/// The payload of the signature section, and all bytes after the section.
fn signature_section(file: &[u8]) -> Result<(&[u8], &[u8]), SignatureError> {
    let mut reader = sections::of(file).ok_or(SignatureError::NotWasm)?;
    if reader.byte() != Some(0) {
        return Err(SignatureError::Unsigned);
    }
    let mut section = Reader(reader.slice().ok_or(SignatureError::Unsigned)?);
    if section.slice() != Some(SECTION) {
        return Err(SignatureError::Unsigned);
    }
    if section.0.len() > limits::SIGNATURE_SECTION_BYTES_MAX {
        return Err(SignatureError::Malformed);
    }
    Ok((section.0, reader.0))
}

/// The hashes that a signature signs, the id of its key, and the signature.
type Signed<'a> = (&'a [u8], &'a [u8], Signature);

fn parse(section: &[u8]) -> Option<Vec<Signed<'_>>> {
    let mut reader = Reader(section);
    if reader.take(3)? != [1, 1, 1] {
        return None;
    }
    let mut signatures = Vec::new();
    for _ in 0..reader.number()? {
        let mut set = Reader(reader.slice()?);
        let count = set.number()?;
        let hashes = set.take(count.checked_mul(HASH_BYTES)?)?;
        if hashes.is_empty() {
            return None;
        }
        for _ in 0..set.number()? {
            let mut signature = Reader(set.slice()?);
            let id = signature.slice()?;
            if signature.byte()? == ED25519 {
                let bytes = signature.slice()?;
                signatures.push((hashes, id, Signature::from_slice(bytes).ok()?));
            }
        }
    }
    Some(signatures)
}

#[cfg(test)]
mod tests {
    use super::super::keys::generate;
    use super::*;
    use crate::STANDARD_POLICY;

    /// A core module with one custom section.
    fn core() -> Vec<u8> {
        let mut module = b"\0asm\x01\0\0\0".to_vec();
        module.extend(b"\0\x06\x04nameX");
        module
    }

    #[test]
    fn signed_modules_and_components_verify() {
        let (ours, other) = (generate(), generate());
        let keys = [other.pk.clone(), ours.pk.clone()];
        for file in [STANDARD_POLICY.to_vec(), core()] {
            assert_eq!(verify(&file, &keys), Err(SignatureError::Unsigned));
            let signed = sign(&file, &ours.sk).unwrap();
            assert_eq!(verify(&signed, &keys).unwrap(), &ours.pk);
            let id = HEXLOWER.encode(&key_id(&ours.pk));
            assert_eq!(signers(&signed), Some(vec![id]));
            assert_eq!(signers(&file), None);
            assert_eq!(verify(&signed, &keys[..1]), Err(SignatureError::UnknownKey));
            // The crate wasmsign2 accepts the signature too.
            ours.pk.verify(&mut &signed[..], None).unwrap();
            // The signature depends on no clock, and signing again replaces it.
            assert_eq!(sign(&signed, &ours.sk).unwrap(), signed);
            let again = sign(&signed, &other.sk).unwrap();
            assert_eq!(verify(&again, &keys).unwrap(), &other.pk);
            assert_eq!(again.len(), signed.len());
        }
    }

    #[test]
    fn a_change_of_any_byte_invalidates_the_signature() {
        let pair = generate();
        let keys = [pair.pk.clone()];
        let signed = sign(&core(), &pair.sk).unwrap();
        let (_, rest) = signature_section(&signed).unwrap();
        let end_of_signature = signed.len() - rest.len();
        for at in 8..signed.len() {
            let mut changed = signed.clone();
            changed[at] ^= 1;
            match verify(&changed, &keys) {
                Err(SignatureError::Tampered) => assert!(at >= end_of_signature),
                // The id of a key is only a hint.
                Ok(_) => assert!(at < end_of_signature),
                Err(_) => assert!(at < end_of_signature, "byte {at}"),
            }
        }
        for cut in 0..signed.len() {
            assert!(verify(&signed[..cut], &keys).is_err(), "cut at {cut}");
        }
        let longer = [&signed[..], b"\0\x02\x01x"].concat();
        assert_eq!(verify(&longer, &keys), Err(SignatureError::Tampered));
    }

    /// wasmsign2 can sign parts, and then accepts the signed beginning as a signed module.
    #[test]
    fn the_signed_beginning_of_a_module_is_refused() {
        let pair = generate();
        let keys = [pair.pk.clone()];
        let module = Module::deserialize(&mut &STANDARD_POLICY[..]).unwrap();
        let mut first = true;
        let parts = module
            .split(|_| std::mem::replace(&mut first, false))
            .unwrap();
        let (signed, _) = pair.sk.sign_multi(parts, None, false, false).unwrap();
        let mut file = Vec::new();
        signed.serialize(&mut file).unwrap();
        verify(&file, &keys).unwrap();

        let mut beginning = signed.clone();
        let mut sections = signed.sections.iter();
        let delimiter = sections.position(|section| section.is_signature_delimiter());
        beginning.sections.truncate(delimiter.unwrap() + 1);
        let mut cut = Vec::new();
        beginning.serialize(&mut cut).unwrap();
        assert!(cut.len() < file.len());
        pair.pk.verify(&mut &cut[..], None).unwrap();
        assert_eq!(verify(&cut, &keys), Err(SignatureError::Tampered));
    }

    #[test]
    fn a_malformed_signature_section_is_refused() {
        let keys = [generate().pk];
        let huge = b"\xff\xff\xff\xff\x0f";
        let section = |payload: &[u8]| {
            let mut content = vec![SECTION.len() as u8];
            content.extend(SECTION);
            content.extend(payload);
            let mut file = b"\0asm\x0d\0\x01\0".to_vec();
            file.extend([0, content.len() as u8]);
            file.extend(content);
            file
        };
        for payload in [
            &[][..],
            b"\x01\x01\x01",
            b"\x02\x01\x01\0",
            &[b"\x01\x01\x01", &huge[..]].concat(),
            &[b"\x01\x01\x01\x01", &huge[..]].concat(),
            &[b"\x01\x01\x01\x01\x05", &huge[..]].concat(),
            // A set without a hash would sign no bytes.
            b"\x01\x01\x01\x01\x02\0\0",
        ] {
            let file = section(payload);
            let refused = Err(SignatureError::Malformed);
            assert_eq!(verify(&file, &keys), refused, "{payload:?}");
        }
        let mut file = b"\0asm\x01\0\0\0".to_vec();
        file.push(0);
        file.extend(huge);
        assert_eq!(verify(&file, &keys), Err(SignatureError::Unsigned));
        assert_eq!(sign(&file, &generate().sk), Err(SignatureError::Cut));
        assert_eq!(SignatureError::Cut.to_string(), LoadError::Cut.to_string());
        let refused = sign(b"#!/bin/sh\n", &generate().sk);
        assert_eq!(refused, Err(SignatureError::NotWasm));
        assert_eq!(verify(b"\0asm", &keys), Err(SignatureError::NotWasm));
    }
}
