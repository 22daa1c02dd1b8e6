//! Verifies the tokens of Kubernetes service accounts, for the authentication method K8S-SAT.
//!
//! A valid JSON Web Token gives an identity and an expiry. The public keys come from a file (a
//! JWKS), and no server is asked over a network. So a token that is revoked early remains valid
//! until it expires.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use data_encoding::BASE64URL_NOPAD;
use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::jwk::{AlgorithmParameters, Jwk};
use jsonwebtoken::{Algorithm, DecodingKey, Validation, decode, decode_header};
use serde::Deserialize;
use serde_json::Value as Json;
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
    /// A key is not of the form of its type.
    #[error("{0}: key {1} is malformed: make the file again, or remove this key")]
    Key(PathBuf, usize),
    /// A key is a shared secret.
    #[error(
        "{0}: key {1} is symmetric (oct), so each program that verifies tokens with it can also make them: use a public key"
    )]
    Symmetric(PathBuf, usize),
    /// No key can verify tokens.
    #[error("{0} has no key that can be used: {1}")]
    Unsupported(PathBuf, String),
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
    /// Reads the keys. Logs a warning for each key of a kind that is not supported (RFC 7517
    /// section 5). Fails if a key is malformed or a shared secret, or if none is left.
    pub fn open(config: &TokenConfig) -> Result<Self, TokenKeysError> {
        let path = &config.keys;
        let bytes = read_file(path, limits::TOKEN_KEYS_FILE_BYTES_MAX)?;
        let (keys, unsupported) = keys(path, &bytes)?;
        // A refused file is read every second, so nothing is logged before.
        for why in unsupported {
            tracing::warn!("{}: {why}: tokens of this key are refused", path.display());
        }
        Ok(Self {
            keys,
            audiences: config.audiences.clone(),
            issuers: config.issuers.clone(),
        })
    }
}

/// A set of keys, which may be of any kind.
#[derive(Deserialize)]
struct Set {
    keys: Vec<Json>,
}

/// The members of a key that say what it is for (RFC 7517 section 4).
#[derive(Deserialize)]
struct Purpose {
    kty: String,
    crv: Option<String>,
    alg: Option<String>,
    #[serde(rename = "use")]
    usage: Option<String>,
}

/// Why a key verifies no tokens.
enum Flaw {
    Malformed,
    Symmetric,
    /// It is for another program, or of a kind that is not supported: this one.
    Unsupported(String),
}

/// The keys of a set, and why each other one is not supported.
fn keys(path: &Path, bytes: &[u8]) -> Result<(Vec<Key>, Vec<String>), TokenKeysError> {
    let set: Set = serde_json::from_slice(bytes)
        .map_err(|error| TokenKeysError::Form(path.to_owned(), error))?;
    let count = set.keys.len();
    if !(1..=limits::TOKEN_KEYS_MAX).contains(&count) {
        return Err(TokenKeysError::Count(path.to_owned(), count));
    }
    let (mut good, mut unsupported) = (Vec::new(), Vec::new());
    for (number, json) in (1..).zip(&set.keys) {
        match key(json) {
            Ok(key) => good.push(key),
            Err(Flaw::Malformed) => return Err(TokenKeysError::Key(path.to_owned(), number)),
            Err(Flaw::Symmetric) => return Err(TokenKeysError::Symmetric(path.to_owned(), number)),
            Err(Flaw::Unsupported(kind)) => {
                unsupported.push(format!("key {number} is not supported ({kind})"));
            }
        }
    }
    if good.is_empty() {
        let why = unsupported.join(", ");
        return Err(TokenKeysError::Unsupported(path.to_owned(), why));
    }
    Ok((good, unsupported))
}

fn key(json: &Json) -> Result<Key, Flaw> {
    let purpose = Purpose::deserialize(json).map_err(|_| Flaw::Malformed)?;
    // A party that can verify a token with such a key can also make one.
    if purpose.kty == "oct" {
        return Err(Flaw::Symmetric);
    }
    let algorithm = algorithm(&purpose).ok_or_else(|| Flaw::Unsupported(purpose.to_string()))?;
    let jwk = Jwk::deserialize(json).map_err(|_| Flaw::Malformed)?;
    if let AlgorithmParameters::RSA(rsa) = &jwk.algorithm {
        let modulus = BASE64URL_NOPAD.decode(rsa.n.as_bytes());
        let modulus = modulus.map_err(|_| Flaw::Malformed)?;
        // The library verifies no signature of other keys.
        if !(2048 / 8..=8192 / 8).contains(&modulus.len()) {
            let kind = "RSA with less than 2048 or more than 8192 bits";
            return Err(Flaw::Unsupported(kind.to_owned()));
        }
    }
    let content = serde_json::to_vec(&jwk.algorithm).map_err(|_| Flaw::Malformed)?;
    Ok(Key {
        number: blake3::hash(&content),
        key: DecodingKey::from_jwk(&jwk).map_err(|_| Flaw::Malformed)?,
        id: jwk.common.key_id,
        algorithm,
    })
}

/// The algorithm of a key for signatures, if it is supported.
fn algorithm(purpose: &Purpose) -> Option<Algorithm> {
    let (algorithm, name) = match (&*purpose.kty, purpose.crv.as_deref()) {
        ("RSA", _) => (Algorithm::RS256, "RS256"),
        ("EC", Some("P-256")) => (Algorithm::ES256, "ES256"),
        ("OKP", Some("Ed25519")) => (Algorithm::EdDSA, "EdDSA"),
        _ => return None,
    };
    let is_for_this = purpose.alg.as_deref().is_none_or(|it| it == name)
        && purpose.usage.as_deref().is_none_or(|it| it == "sig");
    is_for_this.then_some(algorithm)
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kty {}", self.kty.escape_debug())?;
        let others = [("crv", &self.crv), ("alg", &self.alg), ("use", &self.usage)];
        for (name, value) in others {
            if let Some(value) = value {
                write!(f, ", {name} {}", value.escape_debug())?;
            }
        }
        Ok(())
    }
}

impl KeySet {
    /// Verifies a token at this time, and returns its bearer. Fails with the reason of the refusal,
    /// as a text for the client.
    pub fn verify(&self, token: &[u8], now: SystemTime) -> Result<Bearer, &'static str> {
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

/// The text for an error in a token. `None` if the signature is wrong.
fn words(error: &ErrorKind) -> Option<&'static str> {
    Some(match error {
        ErrorKind::InvalidSignature => return None,
        // Of the signature: the client added a line end, or sent only the beginning.
        ErrorKind::Base64(_) => FORM,
        ErrorKind::ExpiredSignature => EXPIRED,
        ErrorKind::ImmatureSignature => {
            "the token is not valid yet: is the clock of this store right?"
        }
        ErrorKind::InvalidAudience => "the token was made for another audience",
        ErrorKind::InvalidIssuer => "the token was made by another issuer",
        _ => "the token lacks a claim (exp, sub, aud or iss), or one is malformed",
    })
}

const FORM: &str = "the authentication data is not a token";

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
    use serde_json::json;

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
        // Regression: the client was told that a claim is missing.
        for damaged in [format!("{good}\n"), good[..good.len() - 1].to_owned()] {
            assert!(verify(&damaged).unwrap_err().contains("not a token"));
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
        assert!(says(with("x", "?")).contains("key 2 is malformed"));
        let mut no_type = with("kid", "two");
        no_type["keys"][1]["kty"] = Json::Null;
        assert!(says(no_type).contains("key 2 is malformed"));
        let shared = json!({"kty": "oct", "k": "c2VjcmV0", "alg": "HS256"});
        let both = json!({"keys": [jwk(&pair(6), "zero"), shared]});
        assert!(says(both).contains("key 2 is symmetric"));
        let [short, other] = [rsa(1024), json!({"kty": "EC", "crv": "P-384"})];
        let error = says(json!({"keys": [short, other]}));
        for part in ["has no key that can be used", "2048", "kty EC, crv P-384"] {
            assert!(error.contains(part), "{error}");
        }
    }

    /// An RSA key whose modulus has so many bits.
    fn rsa(bits: usize) -> Json {
        let modulus = BASE64URL_NOPAD.encode(&vec![0xC1; bits / 8]);
        json!({"kty": "RSA", "kid": "rsa", "alg": "RS256", "n": modulus, "e": "AQAB"})
    }

    /// Regression: one of these keys refused the whole file, so a removed key stayed valid.
    #[test]
    fn keys_of_other_kinds_are_left_out() {
        let pair = pair(7);
        let header = json!({"alg": "EdDSA", "kid": "one"});
        let token = signed(&pair, &header, &claims(|_| {}));
        let with = |name: &str, value: &str| {
            let mut key = jwk(&super::tests::pair(6), "zero");
            key[name] = json!(value);
            key
        };
        for other in [
            with("use", "enc"),
            with("alg", "RS256"),
            with("alg", "ML-DSA-65"),
            with("crv", "Ed448"),
            with("kty", "AKP"),
            json!({"kty": "EC", "crv": "secp256k1", "alg": "ES256K", "x": "AA", "y": "AA"}),
            json!({"kty": "EC", "crv": "P-384", "x": "AA", "y": "AA"}),
            rsa(1024),
        ] {
            let set = json!({"keys": [other, jwk(&pair, "one")]}).to_string();
            let keys = open(&set, &[]).unwrap();
            assert_eq!(keys.keys.len(), 1, "{other}");
            keys.verify(token.as_bytes(), SystemTime::now()).unwrap();
        }
        let set = json!({"keys": [rsa(2048), jwk(&pair, "one")]}).to_string();
        assert_eq!(open(&set, &[]).unwrap().keys.len(), 2);
    }
}
