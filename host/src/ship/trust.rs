//! Whose modules and orders this store takes. The one place where that is decided.
//!
//! What enters: the settings `trusted_keys` and `allow_unsigned`, then modules and orders. What leaves: who signed,
//! or why it is refused. Without keys every module is taken that reaches this store, and no order.

use ed25519_compact::Signature;
use wasmsign2::reexports::ct_codecs::{Encoder, Hex};
use wasmsign2::{PublicKey, SecretKey};

use super::keys::{KeyError, decode_base64, encode_base64, public_key};
use super::signature::{self, SignatureError};
use crate::limits;

/// Before an order where it is signed, so that no signature of one thing can be shown as one of another.
const ORDER_DOMAIN: &[u8] = b"statehouse order v1\0";

/// Why something is refused. Its text is a sentence for whoever shipped it.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// A setting names no key.
    #[error("trusted_keys: {0}")]
    Key(#[from] KeyError),
    /// Too many of them.
    #[error("trusted_keys: there are {0}, and at most {max} are looked at", max = limits::TRUSTED_KEYS_MAX)]
    Keys(usize),
    /// Unsigned, or signed by others.
    #[error(
        "{0}, and this store takes signed policies only: sign it with `statehouse policy sign` and a key that the store trusts, or start the store with --allow-unsigned"
    )]
    Module(SignatureError),
    /// Somebody changed what was signed.
    #[error("{0}. Take it from where it was signed once more")]
    Tampered(SignatureError),
    /// Orders are worth nothing without keys.
    #[error(
        "this store takes no orders over MQTT, since it was started without trusted_keys: nobody could tell whose they are"
    )]
    NoKeys,
    /// The signature of an order is missing or wrong.
    #[error("the order is not signed by a key that this store trusts")]
    Order,
}

/// Who may ship.
#[derive(Clone, Debug, Default)]
pub struct Trust {
    keys: Vec<PublicKey>,
    allow_unsigned: bool,
}

impl Trust {
    /// Reads the keys that the settings name.
    pub fn new(keys: &[String], allow_unsigned: bool) -> Result<Self, TrustError> {
        if keys.len() > limits::TRUSTED_KEYS_MAX {
            return Err(TrustError::Keys(keys.len()));
        }
        let keys = keys
            .iter()
            .map(|text| public_key(text))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            keys,
            allow_unsigned,
        })
    }

    /// How many keys there are.
    pub fn keys(&self) -> usize {
        self.keys.len()
    }

    /// Whether this module may be loaded; the id of the key that signed it, where one did that is known here.
    pub fn check(&self, file: &[u8]) -> Result<Option<String>, TrustError> {
        if self.keys.is_empty() {
            return Ok(None);
        }
        match signature::verify(file, &self.keys) {
            Ok(key) => Ok(Some(id(key))),
            // What a trusted key signed and somebody changed is no unsigned module that somebody meant to load.
            Err(error @ SignatureError::Tampered) => Err(TrustError::Tampered(error)),
            Err(_) if self.allow_unsigned => Ok(None),
            Err(error) => Err(TrustError::Module(error)),
        }
    }

    /// Whether this order is one to obey. Whatever `allow_unsigned` says: anybody can publish.
    pub fn check_order(&self, payload: &[u8], signature: Option<&str>) -> Result<(), TrustError> {
        if self.keys.is_empty() {
            return Err(TrustError::NoKeys);
        }
        let signature = signature
            .and_then(decode_base64)
            .and_then(|bytes| Signature::from_slice(&bytes).ok())
            .ok_or(TrustError::Order)?;
        let message = [ORDER_DOMAIN, payload].concat();
        if self
            .keys
            .iter()
            .any(|key| key.pk.verify(&message, &signature).is_ok())
        {
            Ok(())
        } else {
            Err(TrustError::Order)
        }
    }
}

/// The signature of an order, as its user property.
pub fn sign_order(payload: &[u8], key: &SecretKey) -> String {
    let message = [ORDER_DOMAIN, payload].concat();
    encode_base64(key.sk.sign(message, None).as_ref())
}

/// A public key as a setting takes it.
pub fn digits(key: &PublicKey) -> String {
    // It fails for lengths near the end of the address space only.
    Hex::encode_to_string(*key.pk).unwrap_or_default()
}

/// A key's id as people read it.
pub fn id(key: &PublicKey) -> String {
    // It fails for lengths near the end of the address space only.
    Hex::encode_to_string(signature::key_id(key)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::keys::generate;
    use super::*;
    use crate::STANDARD_POLICY;

    fn trust(keys: &[&PublicKey], allow_unsigned: bool) -> Trust {
        let keys: Vec<String> = keys
            .iter()
            .map(|key| Hex::encode_to_string(key.to_bytes()).unwrap())
            .collect();
        Trust::new(&keys, allow_unsigned).unwrap()
    }

    #[test]
    fn without_keys_everything_is_taken_with_one_only_what_it_signed() {
        let (ours, other) = (generate(), generate());
        let signed = signature::sign(STANDARD_POLICY, &ours.sk).unwrap();
        let foreign = signature::sign(STANDARD_POLICY, &other.sk).unwrap();
        let mut tampered = signed.clone();
        *tampered.last_mut().unwrap() ^= 1;

        let open = trust(&[], false);
        for file in [STANDARD_POLICY, &signed, &foreign, &tampered] {
            assert_eq!(open.check(file).unwrap(), None);
        }
        let closed = trust(&[&ours.pk], false);
        assert_eq!(closed.check(&signed).unwrap(), Some(id(&ours.pk)));
        let says = |file: &[u8]| closed.check(file).unwrap_err().to_string();
        assert!(says(STANDARD_POLICY).starts_with("the module is not signed, and"));
        assert!(says(&foreign).contains("none of the keys"));
        assert!(says(&tampered).contains("changed or cut"));
        let lenient = trust(&[&ours.pk], true);
        assert_eq!(lenient.check(STANDARD_POLICY).unwrap(), None);
        assert_eq!(lenient.check(&foreign).unwrap(), None);
        assert_eq!(lenient.check(&signed).unwrap(), Some(id(&ours.pk)));
        assert!(lenient.check(&tampered).is_err());
    }

    #[test]
    fn orders_need_a_key_and_its_signature() {
        let (ours, other) = (generate(), generate());
        let trust = trust(&[&ours.pk], true);
        let order = b"{}";
        let good = sign_order(order, &ours.sk);
        trust.check_order(order, Some(&good)).unwrap();
        for (payload, signature) in [
            (&b"{ }"[..], Some(good.as_str())),
            (order, Some(&sign_order(order, &other.sk))),
            (order, Some("")),
            (order, Some("AAAA")),
            (order, Some("%%")),
            (order, None),
        ] {
            assert!(trust.check_order(payload, signature).is_err());
        }
        // What signs a module signs no order.
        let raw = encode_base64(ours.sk.sk.sign(order, None).as_ref());
        assert!(trust.check_order(order, Some(&raw)).is_err());
        let nobody = Trust::default().check_order(order, Some(&good));
        assert!(nobody.unwrap_err().to_string().contains("trusted_keys"));
    }
}
