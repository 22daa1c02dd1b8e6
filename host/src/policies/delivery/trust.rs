//! Decides which modules and orders this store accepts, by the settings `trusted_keys` and
//! `allow_unsigned`.
//!
//! No other module may make this decision. Without keys every module is accepted, and no order is.

use data_encoding::{BASE64, HEXLOWER};
use ed25519_compact::Signature;
use wasmsign2::{PublicKey, SecretKey};

use super::keys::{KeyError, public_key};
use super::signature::{self, SignatureError};
use statehouse_access::base64;
use statehouse_config::limits;

/// The prefix of a signed order, so that the signature of anything else cannot pass as that of an
/// order.
const ORDER_DOMAIN: &[u8] = b"statehouse order v1\0";

/// Why a module or an order is refused. The text is a sentence for its sender.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// A setting contains no valid key.
    #[error("trusted_keys: {0}")]
    Key(#[from] KeyError),
    /// There are too many keys.
    #[error("trusted_keys: there are {0} keys, and at most {max} are allowed", max = limits::TRUSTED_KEYS_MAX)]
    Keys(usize),
    /// The module is unsigned, or an unknown key signed it.
    #[error(
        "{0}, and this store takes signed policies only: sign it with `statehouse policy sign` and a key that the store trusts, or start the store with --allow-unsigned"
    )]
    Module(SignatureError),
    /// The file is no module, so a signature would not help.
    #[error(transparent)]
    NoModule(SignatureError),
    /// The module was changed after it was signed.
    #[error("{0}. Get it again from its source")]
    Tampered(SignatureError),
    /// The store has no keys, so it cannot verify an order.
    #[error(
        "this store takes no orders over MQTT: it was started without trusted_keys, so it cannot verify their signatures"
    )]
    NoKeys,
    /// The signature of an order is missing or wrong.
    #[error("the order is not signed by a key that this store trusts")]
    Order,
}

/// The trusted keys, and whether unsigned modules are accepted.
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
        let keys = keys.iter().map(|text| public_key(text));
        Ok(Self {
            keys: keys.collect::<Result<_, _>>()?,
            allow_unsigned,
        })
    }

    /// The number of keys.
    pub fn keys(&self) -> usize {
        self.keys.len()
    }

    /// Checks whether a module may be loaded. Returns the id of the trusted key that signed it, if
    /// one did.
    pub fn check(&self, file: &[u8]) -> Result<Option<String>, TrustError> {
        if self.keys.is_empty() {
            return Ok(None);
        }
        match signature::verify(file, &self.keys) {
            Ok(key) => Ok(Some(id(key))),
            // A trusted key signed this module, and it was changed later. So it is not a module
            // that the operator meant to load unsigned.
            Err(error @ SignatureError::Tampered) => Err(TrustError::Tampered(error)),
            Err(_) if self.allow_unsigned => Ok(None),
            Err(error @ (SignatureError::NotWasm | SignatureError::Cut)) => {
                Err(TrustError::NoModule(error))
            }
            Err(error) => Err(TrustError::Module(error)),
        }
    }

    /// Checks the signature of an order. Returns the id of the key that signed it.
    /// `allow_unsigned` has no effect on orders, because any client may publish one.
    pub fn check_order(
        &self,
        payload: &[u8],
        signature: Option<&str>,
    ) -> Result<String, TrustError> {
        if self.keys.is_empty() {
            return Err(TrustError::NoKeys);
        }
        let signature = signature
            .and_then(base64::decode)
            .and_then(|bytes| Signature::from_slice(&bytes).ok())
            .ok_or(TrustError::Order)?;
        let message = [ORDER_DOMAIN, payload].concat();
        let signed = |key: &&PublicKey| key.pk.verify(&message, &signature).is_ok();
        let key = self.keys.iter().find(signed);
        key.map(id).ok_or(TrustError::Order)
    }
}

/// Signs an order. Returns the value of its user property.
pub fn sign_order(payload: &[u8], key: &SecretKey) -> String {
    let message = [ORDER_DOMAIN, payload].concat();
    BASE64.encode(key.sk.sign(message, None).as_ref())
}

/// A public key in the form of a setting.
pub fn digits(key: &PublicKey) -> String {
    HEXLOWER.encode(&*key.pk)
}

/// A key's id in hexadecimal.
pub fn id(key: &PublicKey) -> String {
    HEXLOWER.encode(&signature::key_id(key))
}

#[cfg(test)]
mod tests {
    use super::super::keys::generate;
    use super::*;
    use crate::STANDARD_POLICY;

    fn trust(keys: &[&PublicKey], allow_unsigned: bool) -> Trust {
        let keys: Vec<String> = keys.iter().map(|key| digits(key)).collect();
        Trust::new(&keys, allow_unsigned).unwrap()
    }

    #[test]
    fn every_module_is_accepted_unless_the_store_has_keys() {
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
        // Advice to sign it would not help.
        assert!(says(b"#!/bin/sh\n").ends_with("and a known version"));
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
        // A signature without the domain of orders is not that of an order.
        let raw = BASE64.encode(ours.sk.sk.sign(order, None).as_ref());
        assert!(trust.check_order(order, Some(&raw)).is_err());
        let without_keys = Trust::default().check_order(order, Some(&good));
        let error = without_keys.unwrap_err();
        assert!(error.to_string().contains("trusted_keys"));
    }
}
