//! Verifies the tokens of Kubernetes service accounts, for the authentication method K8S-SAT.
//!
//! A valid JSON Web Token gives an identity and an expiry. The public keys come from a file (a
//! JWKS), and no server is asked over a network. So a token that is revoked early remains valid
//! until it expires.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use data_encoding::BASE64URL_NOPAD;
use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, JwkSet};
use jsonwebtoken::{Algorithm, DecodingKey, Validation, decode, decode_header};
use serde::Deserialize;
use statehouse_mqtt::{Identity, Proof};

use crate::limits;
use crate::settings::TokenConfig;
use statehouse_files::watch::{FileError, Watched, read_file};

/// The name of the method, as in Azure IoT Operations.
pub const METHOD: &str = "K8S-SAT";

/// The prefix of the subject of a service account.
const SERVICE_ACCOUNT: &str = "system:serviceaccount:";

/// Why a key file is refused. The text is a sentence for the operator.
#[derive(Debug, thiserror::Error)]
pub enum TokenKeysError {
    /// The file cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file is not a key set.
    #[error(
        "{0} is not a JSON Web Key Set ({1}): `kubectl get --raw /openid/v1/jwks` prints the one of a cluster"
    )]
    Form(PathBuf, serde_json::Error),
    /// The file has no keys, or too many.
    #[error("{0} has {1} keys, and 1 to {max} are allowed", max = limits::TOKEN_KEYS_MAX)]
    Count(PathBuf, usize),
    /// A key has an unsupported type.
    #[error(
        "{0}: key {1} is none of RSA (RS256), P-256 (ES256) and Ed25519 (EdDSA), or is not for signatures"
    )]
    Kind(PathBuf, usize),
}

/// The bearer of a valid token.
#[derive(Debug, PartialEq, Eq)]
pub struct Bearer {
    /// The user is the token's subject. The attributes are `namespace` and `serviceaccount`.
    pub identity: Identity,
    /// How long the token remains valid.
    pub remaining: Duration,
    /// The key that signed it.
    pub key: KeyNumber,
}

/// Identifies a key by a hash of its content, because its id (`kid`) may be missing or reused.
pub type KeyNumber = blake3::Hash;

/// A token that was valid when the client connected. The broker checks its expiry.
pub(super) struct Token {
    pub(super) keys: Arc<Watched<KeySet>>,
    pub(super) key: KeyNumber,
}

impl Proof for Token {
    fn is_good(&self) -> bool {
        self.keys.current().knows(&self.key)
    }
}

/// The keys of a file, and the accepted audiences and issuers.
pub struct KeySet {
    keys: Vec<Key>,
    audiences: Vec<String>,
    issuers: Vec<String>,
}

struct Key {
    id: Option<String>,
    number: KeyNumber,
    algorithm: Algorithm,
    key: DecodingKey,
}

#[derive(Deserialize)]
struct Claims {
    sub: String,
    exp: u64,
    /// Read so that a malformed one is refused: the validation would ignore it.
    #[serde(rename = "nbf")]
    _nbf: Option<f64>,
}

impl KeySet {
    /// Reads the keys. Fails if one key is unusable.
    pub fn open(config: &TokenConfig) -> Result<Self, TokenKeysError> {
        let bytes = read_file(&config.keys, limits::TOKEN_KEYS_FILE_BYTES_MAX)?;
        Ok(Self {
            keys: keys(&config.keys, &bytes)?,
            audiences: config.audiences.clone(),
            issuers: config.issuers.clone(),
        })
    }
}

fn keys(path: &Path, bytes: &[u8]) -> Result<Vec<Key>, TokenKeysError> {
    let set: JwkSet = serde_json::from_slice(bytes)
        .map_err(|error| TokenKeysError::Form(path.to_owned(), error))?;
    let count = set.keys.len();
    if !(1..=limits::TOKEN_KEYS_MAX).contains(&count) {
        return Err(TokenKeysError::Count(path.to_owned(), count));
    }
    let keys = set.keys.iter().enumerate();
    keys.map(|(at, jwk)| key(jwk).ok_or_else(|| TokenKeysError::Kind(path.to_owned(), at + 1)))
        .collect()
}

/// Reads a key. Symmetric keys are refused: a party that can verify a token with such a key can
/// also make one.
fn key(jwk: &Jwk) -> Option<Key> {
    use jsonwebtoken::jwk::{KeyAlgorithm, PublicKeyUse};
    let (algorithm, name) = match &jwk.algorithm {
        AlgorithmParameters::RSA(_) => (Algorithm::RS256, KeyAlgorithm::RS256),
        AlgorithmParameters::EllipticCurve(it) if it.curve == EllipticCurve::P256 => {
            (Algorithm::ES256, KeyAlgorithm::ES256)
        }
        AlgorithmParameters::OctetKeyPair(it) if it.curve == EllipticCurve::Ed25519 => {
            (Algorithm::EdDSA, KeyAlgorithm::EdDSA)
        }
        _ => return None,
    };
    let common = &jwk.common;
    let is_for_this = common.key_algorithm.is_none_or(|it| it == name)
        && (common.public_key_use.as_ref()).is_none_or(|it| *it == PublicKeyUse::Signature);
    if !is_for_this {
        return None;
    }
    Some(Key {
        id: common.key_id.clone(),
        number: blake3::hash(&serde_json::to_vec(&jwk.algorithm).ok()?),
        algorithm,
        key: DecodingKey::from_jwk(jwk).ok()?,
    })
}

impl KeySet {
    /// Verifies a token at this time, and returns its bearer. Fails with the reason of the refusal,
    /// as a text for the client.
    pub fn verify(&self, token: &[u8], now: SystemTime) -> Result<Bearer, &'static str> {
        const FORM: &str = "the authentication data is not a token";
        if token.len() > limits::TOKEN_BYTES_MAX {
            return Err(FORM);
        }
        let token = std::str::from_utf8(token).map_err(|_| FORM)?;
        let header = decode_header(token).map_err(|_| FORM)?;
        if has_critical_extensions(token).ok_or(FORM)? {
            return Err("the header of the token has `crit`, and no extension is supported here");
        }
        let named = self.keys.iter().filter(|key| {
            let is_named = header.kid.is_none() || key.id.is_none() || key.id == header.kid;
            is_named && key.algorithm == header.alg
        });
        let mut refusal = "no key that is known here has signed this token";
        for key in named {
            match decode::<Claims>(token, &key.key, &self.validation(key.algorithm)) {
                Ok(token) => return bearer(&token.claims, key.number, now),
                Err(error) => match words(error.kind()) {
                    Some(text) => return Err(text),
                    // Another key may have the same id.
                    None => refusal = "the signature of the token is wrong",
                },
            }
        }
        Err(refusal)
    }

    /// Whether tokens with a signature of this key are still accepted.
    fn knows(&self, key: &KeyNumber) -> bool {
        self.keys.iter().any(|it| it.number == *key)
    }

    fn validation(&self, algorithm: Algorithm) -> Validation {
        let mut validation = Validation::new(algorithm);
        // The leeway is for `nbf`, since clocks differ. It has no effect on `exp`, because
        // `bearer` checks that time again without leeway.
        validation.leeway = limits::TOKEN_LEEWAY_S;
        validation.validate_nbf = true;
        validation.set_audience(&self.audiences);
        let mut required = vec!["exp", "sub", "aud"];
        if !self.issuers.is_empty() {
            validation.set_issuer(&self.issuers);
            required.push("iss");
        }
        validation.set_required_spec_claims(&required);
        validation
    }
}

/// Whether the header has `crit`, which lists extensions that a verifier must understand (RFC 7515
/// section 4.1.11). The library does not look at it. None if the header is no JSON object in
/// base64url.
fn has_critical_extensions(token: &str) -> Option<bool> {
    let (header, _) = token.split_once('.')?;
    let header = BASE64URL_NOPAD.decode(header.as_bytes()).ok()?;
    let header: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&header).ok()?;
    Some(header.contains_key("crit"))
}

/// The text for an error in a token whose signature is right. `None` if the signature is wrong.
fn words(error: &ErrorKind) -> Option<&'static str> {
    Some(match error {
        ErrorKind::InvalidSignature => return None,
        ErrorKind::ExpiredSignature => EXPIRED,
        ErrorKind::ImmatureSignature => {
            "the token is not valid yet: is the clock of this store right?"
        }
        ErrorKind::InvalidAudience => "the token was made for another audience",
        ErrorKind::InvalidIssuer => "the token was made by another issuer",
        _ => "the token lacks a claim (exp, sub, aud or iss), or one is malformed",
    })
}

const EXPIRED: &str = "the token has expired";

fn bearer(claims: &Claims, key: KeyNumber, now: SystemTime) -> Result<Bearer, &'static str> {
    let now_s = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let remaining_s = claims.exp.saturating_sub(now_s);
    if remaining_s == 0 {
        return Err(EXPIRED);
    }
    let account = claims.sub.strip_prefix(SERVICE_ACCOUNT);
    let account = account.and_then(|account| account.split_once(':'));
    let Some((namespace, name)) = account.filter(|(namespace, name)| {
        let is_name = |it: &str| !it.is_empty() && !it.contains(|it: char| it.is_control());
        is_name(namespace) && is_name(name) && !name.contains(':')
    }) else {
        return Err("the token is not one of a service account");
    };
    Ok(Bearer {
        identity: Identity {
            user: Some(claims.sub.as_str().into()),
            attributes: vec![
                ("namespace".into(), namespace.into()),
                ("serviceaccount".into(), name.into()),
            ],
            proofs: Vec::new(),
        },
        key,
        remaining: Duration::from_secs(remaining_s.min(limits::TOKEN_LIFE_S_MAX)),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use ed25519_compact::{KeyPair, Seed};
    use serde_json::{Value as Json, json};

    use super::*;

    const NOW_S: u64 = 2_000_000_000;
    const SUBJECT: &str = "system:serviceaccount:factory:press";

    fn pair(seed: u8) -> KeyPair {
        KeyPair::from_seed(Seed::new([seed; 32]))
    }

    fn jwk(pair: &KeyPair, id: &str) -> Json {
        json!({"kty": "OKP", "crv": "Ed25519", "kid": id, "x": BASE64URL_NOPAD.encode(&pair.pk[..])})
    }

    fn signed(pair: &KeyPair, header: &Json, claims: &Json) -> String {
        let part = |json: &Json| BASE64URL_NOPAD.encode(json.to_string().as_bytes());
        let message = format!("{}.{}", part(header), part(claims));
        let signature = pair.sk.sign(&message, None);
        format!("{message}.{}", BASE64URL_NOPAD.encode(&signature[..]))
    }

    fn open(keys: &str, issuers: &[&str]) -> Result<KeySet, String> {
        let directory = tempfile::tempdir().unwrap();
        let config = TokenConfig {
            keys: directory.path().join("keys"),
            audiences: vec!["statehouse".into(), "other".into()],
            issuers: issuers.iter().map(|it| (*it).into()).collect(),
        };
        fs::write(&config.keys, keys).unwrap();
        KeySet::open(&config).map_err(|error| error.to_string())
    }

    /// The system time, which the library uses.
    fn now_s() -> u64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        now.unwrap().as_secs()
    }

    fn claims(edit: impl FnOnce(&mut Json)) -> Json {
        let mut claims = json!({
            "sub": SUBJECT, "aud": ["statehouse"], "iss": "https://cluster", "exp": now_s() + 100, "nbf": now_s(),
        });
        edit(&mut claims);
        claims
    }

    #[test]
    fn tokens_of_kubernetes_are_accepted() {
        // Made by openssl, so that the test does not depend on the library's own encoder.
        let keys = open(include_str!("testdata/keys.jwks"), &[]).unwrap();
        for token in [
            include_str!("testdata/rs256.jwt"),
            include_str!("testdata/es256.jwt"),
        ] {
            let now = UNIX_EPOCH + Duration::from_secs(NOW_S);
            let bearer = keys.verify(token.as_bytes(), now).unwrap();
            let identity = bearer.identity;
            assert_eq!(identity.user.as_deref(), Some(SUBJECT));
            assert_eq!(identity.attribute("namespace"), Some("factory"));
            assert_eq!(identity.attribute("serviceaccount"), Some("press"));
            assert_eq!(bearer.remaining.as_secs(), limits::TOKEN_LIFE_S_MAX);
            // A change of any byte makes the token invalid.
            for at in (0..token.len()).step_by(7) {
                let mut other = token.as_bytes().to_vec();
                other[at] = if other[at] == b'A' { b'B' } else { b'A' };
                assert!(keys.verify(&other, now).is_err(), "byte {at}");
            }
        }
    }

    #[test]
    fn invalid_token_is_refused_with_the_reason() {
        let pair = pair(7);
        let set = json!({"keys": [jwk(&pair, "one")]}).to_string();
        let keys = open(&set, &["https://cluster"]).unwrap();
        let header = json!({"alg": "EdDSA", "kid": "one"});
        let verify = |token: &str| keys.verify(token.as_bytes(), SystemTime::now());
        let good = signed(&pair, &header, &claims(|_| {}));
        assert!(verify(&good).unwrap().remaining <= Duration::from_secs(100));
        type Edit = fn(&mut Json);
        let wrong: [(&str, Edit); 13] = [
            ("expired", |it| it["exp"] = json!(now_s() - 1)),
            ("expired", |it| it["exp"] = json!(1)),
            ("not valid yet", |it| it["nbf"] = json!(now_s() + 1000)),
            ("malformed", |it| it["nbf"] = json!("soon")),
            ("another audience", |it| it["aud"] = json!("else")),
            ("another issuer", |it| it["iss"] = json!("https://else")),
            ("lacks a claim", |it| {
                _ = it.as_object_mut().unwrap().remove("aud")
            }),
            ("lacks a claim", |it| {
                _ = it.as_object_mut().unwrap().remove("iss")
            }),
            ("lacks a claim", |it| {
                _ = it.as_object_mut().unwrap().remove("exp")
            }),
            ("lacks a claim", |it| {
                _ = it.as_object_mut().unwrap().remove("sub")
            }),
            ("lacks a claim", |it| it["sub"] = json!(["system"])),
            ("service account", |it| it["sub"] = json!("system:admin")),
            ("service account", |it| {
                it["sub"] = json!("system:serviceaccount:a:b:c")
            }),
        ];
        for (says, edit) in wrong {
            let claims = claims(edit);
            let error = verify(&signed(&pair, &header, &claims)).unwrap_err();
            assert!(error.contains(says), "{claims}: {error}");
        }
        // Signed with another key, not signed, or signed with the public key as a shared secret.
        let signature = verify(&signed(&super::tests::pair(8), &header, &claims(|_| {})));
        assert!(signature.unwrap_err().contains("signature"));
        for algorithm in ["none", "HS256", "RS256"] {
            let header = json!({"alg": algorithm, "kid": "one"});
            assert!(
                verify(&signed(&pair, &header, &claims(|_| {}))).is_err(),
                "{algorithm}"
            );
        }
        let header = json!({"alg": "EdDSA", "kid": "two"});
        let error = verify(&signed(&pair, &header, &claims(|_| {}))).unwrap_err();
        assert!(error.contains("no key"), "{error}");
        for nonsense in [
            "",
            ".",
            "..",
            "a.b.c",
            "\u{0}",
            &"a".repeat(limits::TOKEN_BYTES_MAX + 1),
        ] {
            assert!(verify(nonsense).unwrap_err().contains("not a token"));
        }
    }

    #[test]
    fn token_with_critical_extensions_is_refused() {
        let pair = pair(7);
        let keys = open(&json!({"keys": [jwk(&pair, "one")]}).to_string(), &[]).unwrap();
        for critical in [
            json!(["http://example.com/revoked-by"]),
            json!(["b64"]),
            json!(["exp"]),
            json!([]),
            json!("b64"),
            Json::Null,
        ] {
            let header = json!({"alg": "EdDSA", "kid": "one", "crit": critical, "b64": true});
            let token = signed(&pair, &header, &claims(|_| {}));
            let refused = keys.verify(token.as_bytes(), SystemTime::now());
            assert!(refused.unwrap_err().contains("`crit`"), "{header}");
        }
        // An extension that is not critical is ignored.
        let header = json!({"alg": "EdDSA", "kid": "one", "extension": ["crit"]});
        let token = signed(&pair, &header, &claims(|_| {}));
        keys.verify(token.as_bytes(), SystemTime::now()).unwrap();
    }

    #[test]
    fn bad_key_set_is_refused_with_the_reason() {
        let says = |set: Json| open(&set.to_string(), &[]).err().unwrap();
        let with = |name: &str, value: &str| {
            let mut key = jwk(&pair(7), "one");
            key[name] = json!(value);
            json!({"keys": [jwk(&pair(6), "zero"), key]})
        };
        assert!(says(json!([])).contains("is not a JSON Web Key Set"));
        assert!(says(json!({"keys": []})).contains("has 0 keys"));
        assert!(says(with("use", "enc")).contains("key 2 is none of"));
        assert!(says(with("alg", "RS256")).contains("key 2 is none of"));
        let shared = json!({"keys": [{"kty": "oct", "k": "c2VjcmV0", "alg": "HS256"}]});
        assert!(says(shared).contains("key 1 is none of"));
    }
}
