//! Maps client certificates to users and attributes.
//!
//! The caller must pass only chains that a listener has verified: this module checks no signature,
//! date or purpose. The table of subjects looks like this:
//!
//! ```toml
//! [[certificate]]
//! subject = "CN=press-4, O=Contoso"           # the client's own certificate: its user
//! user = "press-4"
//!
//! [[certificate]]
//! subject = "CN=Building 17 CA, O=Contoso"    # any certificate of the chain: attributes
//! attributes = { building = "17" }
//! ```

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde::Deserialize;
use statehouse_mqtt::{Identity, Proof};
use x509_cert::Certificate;
use x509_cert::attr::AttributeTypeAndValue;
use x509_cert::der::asn1::Any;
use x509_cert::der::oid::db::rfc4519::CN;
use x509_cert::der::{Decode, Tag, Tagged};
use x509_cert::name::Name;

use crate::limits;
use statehouse_files::watch::{FileError, Watched, read_file};

/// Why a table is refused. The text is a sentence for the operator.
#[derive(Debug, thiserror::Error)]
pub enum CertificatesError {
    /// The file cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file is not a table of certificates.
    #[error("{0} is wrong.\n{1}")]
    Table(PathBuf, Box<dyn std::error::Error + Send + Sync>),
    /// The subject is not a distinguished name.
    #[error(
        "{0}: `{1}` is not a subject: write it as `openssl x509 -noout -subject -nameopt RFC2253` prints it, such as \"CN=press-4,O=Contoso\", and a name that is not known as its OID, such as \"2.5.4.72=operator\""
    )]
    Subject(PathBuf, String),
    /// Two entries have the same subject.
    #[error("{0}: the subject `{1}` has two entries: put its user and attributes into one entry")]
    Duplicate(PathBuf, String),
    /// An entry has neither a user nor attributes.
    #[error("{0}: the entry of `{1}` has neither a user nor attributes: add one, or remove it")]
    Empty(PathBuf, String),
    /// The user of an entry has an empty name.
    #[error("{0}: the user of `{1}` is empty: name a user, or leave `user` out")]
    NoName(PathBuf, String),
}

/// The mapping of certificates to users and attributes.
pub enum Owners {
    /// The user is the Common Name.
    CommonName,
    /// A table gives the user and the attributes.
    Table(BTreeMap<Subject, Owner>),
}

/// The sorted parts of a distinguished name. Their order is ignored, because tools print it in
/// either direction.
pub type Subject = Vec<String>;

/// An entry of the table: the user and the attributes of a subject.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Owner {
    subject: String,
    user: Option<Box<str>>,
    #[serde(default)]
    attributes: BTreeMap<Box<str>, Box<str>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    #[serde(default)]
    certificate: Vec<Owner>,
}

impl Owners {
    /// Reads a table. An error names the line if the file is not valid TOML.
    pub fn open(path: &Path) -> Result<Self, CertificatesError> {
        let wrong = |error| CertificatesError::Table(path.to_owned(), error);
        let bytes = read_file(path, limits::CERTIFICATE_USERS_FILE_BYTES_MAX)?;
        let text = String::from_utf8(bytes).map_err(|error| wrong(error.into()))?;
        let table: Table = toml::from_str(&text).map_err(|error| wrong(error.into()))?;
        let mut owners = BTreeMap::new();
        for owner in table.certificate {
            let refuse = |error: fn(PathBuf, String) -> CertificatesError| {
                Err(error(path.to_owned(), owner.subject.clone()))
            };
            let Some(subject) = written(&owner.subject) else {
                return refuse(CertificatesError::Subject);
            };
            if owner.user.is_none() && owner.attributes.is_empty() {
                return refuse(CertificatesError::Empty);
            }
            // It would be a user for rules that apply to every user.
            if owner.user.as_deref() == Some("") {
                return refuse(CertificatesError::NoName);
            }
            if let Some(first) = owners.insert(subject, owner) {
                return Err(CertificatesError::Duplicate(path.to_owned(), first.subject));
            }
        }
        Ok(Self::Table(owners))
    }

    /// The identity of the client with this chain, its own certificate first. `None` if its own
    /// certificate cannot be read, or has no usable Common Name although that is the user.
    pub fn identify(&self, chain: &[Vec<u8>]) -> Option<Identity> {
        let (own, above) = chain.split_first()?;
        let own = subject(own)?;
        match self {
            Self::CommonName => Some(Identity {
                user: Some(common_name(&own)?.into()),
                ..Identity::default()
            }),
            Self::Table(owners) => {
                let above = above.iter().take(limits::CERTIFICATE_CHAIN_MAX);
                let own = parts(&own);
                let found = owners.get(&own);
                let above = above.filter_map(|der| owners.get(&parts(&subject(der)?)));
                // Attributes of the client's own certificate take precedence over those of its
                // issuers.
                let mut attributes: BTreeMap<_, _> = BTreeMap::new();
                for owner in found.into_iter().chain(above) {
                    for (name, value) in &owner.attributes {
                        attributes
                            .entry(name.clone())
                            .or_insert_with(|| value.clone());
                    }
                }
                Some(Identity {
                    user: found.and_then(|owner| owner.user.clone()),
                    attributes: attributes.into_iter().collect(),
                    proofs: Vec::new(),
                })
            }
        }
    }
}

/// The identity that a table gave a connected client. It ends when the table gives it another one.
struct Mapped {
    owners: Arc<Watched<Owners>>,
    chain: Arc<[Vec<u8>]>,
    /// False if a password says who the user is.
    names_user: bool,
    identity: Identity,
    /// The table that gave this identity last.
    given_by: Mutex<Arc<Owners>>,
}

impl Proof for Mapped {
    fn is_good(&self) -> bool {
        let current = self.owners.current();
        let mut given_by = self.given_by.lock().unwrap_or_else(PoisonError::into_inner);
        if Arc::ptr_eq(&given_by, &current) {
            return true;
        }
        let is_good = current.identify(&self.chain).is_some_and(|identity| {
            identity.attributes == self.identity.attributes
                && (!self.names_user || identity.user == self.identity.user)
        });
        if is_good {
            *given_by = current;
        }
        is_good
    }
}

/// Like [`Owners::identify`], by the current owners. With a table, a proof says whether a later one
/// still gives the same attributes and, if the certificate `names_user`, the same user.
pub(super) fn identify(
    owners: &Arc<Watched<Owners>>,
    chain: &Arc<[Vec<u8>]>,
    names_user: bool,
) -> Option<Identity> {
    let current = owners.current();
    let identity = match *current {
        // A certificate without a Common Name is good beside a password.
        Owners::CommonName if !names_user => Identity::default(),
        _ => current.identify(chain)?,
    };
    let proofs: Vec<Arc<dyn Proof>> = match *current {
        Owners::CommonName => Vec::new(),
        Owners::Table(_) => vec![Arc::new(Mapped {
            owners: owners.clone(),
            chain: chain.clone(),
            names_user,
            identity: identity.clone(),
            given_by: Mutex::new(current),
        })],
    };
    Some(Identity { proofs, ..identity })
}

fn subject(der: &[u8]) -> Option<Name> {
    if der.len() > limits::CERTIFICATE_BYTES_MAX {
        return None;
    }
    let certificate = Certificate::from_der(der).ok()?;
    Some(certificate.tbs_certificate.subject)
}

/// Names of attributes that openssl prints and x509-cert does not know, each with its OID.
const NAMES: [(&str, &str); 7] = [
    ("GN", "2.5.4.42"),
    ("organizationIdentifier", "2.5.4.97"),
    ("unstructuredName", "1.2.840.113549.1.9.2"),
    ("unstructuredAddress", "1.2.840.113549.1.9.8"),
    ("jurisdictionL", "1.3.6.1.4.1.311.60.2.1.1"),
    ("jurisdictionST", "1.3.6.1.4.1.311.60.2.1.2"),
    ("jurisdictionC", "1.3.6.1.4.1.311.60.2.1.3"),
];

/// Parses a distinguished name, with or without spaces around commas and equals signs.
fn written(text: &str) -> Option<Subject> {
    let mut plain = String::with_capacity(text.len());
    // Where the name of the attribute begins in `plain`. A value may contain equals signs.
    let mut name = Some(0);
    let (mut escaped, mut after_separator) = (false, true);
    for character in trimmed(text.trim_start()).chars() {
        let is_separator = !escaped
            && match character {
                ',' | '+' => true,
                '=' => name.is_some(),
                _ => false,
            };
        let is_space = !escaped && character == ' ';
        if is_separator {
            plain.truncate(trimmed(&plain).len());
            name = match name {
                Some(begin) if character == '=' => {
                    let known = NAMES
                        .iter()
                        .find(|it| it.0.eq_ignore_ascii_case(&plain[begin..]));
                    if let Some((_, oid)) = known {
                        plain.replace_range(begin.., oid);
                    }
                    None
                }
                _ => Some(plain.len() + 1),
            };
        }
        if !(is_space && after_separator) {
            plain.push(character);
        }
        after_separator = is_separator || (is_space && after_separator);
        escaped = character == '\\' && !escaped;
    }
    let name: Name = plain.parse().ok()?;
    if name.is_empty() {
        return None;
    }
    Some(parts(&name))
}

/// Removes white space at the end, except an escaped space.
fn trimmed(text: &str) -> &str {
    let rest = text.trim_end();
    let escapes = rest.bytes().rev().take_while(|it| *it == b'\\').count();
    match escapes % 2 == 1 && text[rest.len()..].starts_with(' ') {
        true => &text[..=rest.len()],
        false => rest,
    }
}

fn parts(name: &Name) -> Subject {
    let all = name.0.iter().flat_map(|part| part.0.iter());
    let mut parts: Vec<_> = all.map(part).collect();
    parts.sort_unstable();
    parts
}

/// An attribute, to compare. Authorities choose the type of a text, so the type does not count.
fn part(attribute: &AttributeTypeAndValue) -> String {
    let (oid, value) = (&attribute.oid, &attribute.value);
    match text(value) {
        Some(text) => format!("{oid}={text}"),
        // The `#` keeps it apart from every text, which begins with an OID.
        None => format!("#{attribute}"),
    }
}

/// The value if it is a text of UTF-8, or of ASCII.
fn text(value: &Any) -> Option<&str> {
    let text = std::str::from_utf8(value.value()).ok()?;
    match value.tag() {
        Tag::Utf8String => Some(text),
        Tag::PrintableString | Tag::Ia5String | Tag::TeletexString => {
            Some(text).filter(|it| it.is_ascii())
        }
        _ => None,
    }
}

/// The only Common Name of a name. `None` if there are several, since none of them is unambiguous.
fn common_name(name: &Name) -> Option<&str> {
    let all = name.0.iter().flat_map(|part| part.0.iter());
    let mut named = all.filter(|part| part.oid == CN);
    let (only, None) = (named.next()?, named.next()) else {
        return None;
    };
    let value = &only.value;
    let is_text = matches!(
        value.tag(),
        Tag::Utf8String | Tag::PrintableString | Tag::Ia5String
    );
    let text = std::str::from_utf8(value.value()).ok()?;
    let is_name = is_text
        && (1..=limits::USER_NAME_BYTES_MAX).contains(&text.len())
        && !text.contains(char::is_control);
    is_name.then_some(text)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use x509_cert::name::{RdnSequence, RelativeDistinguishedName};

    // Self-signed by openssl, because this module checks no signatures.
    const PRESS: &[u8] = include_bytes!("testdata/press.der");
    const CA: &[u8] = include_bytes!("testdata/ca.der");
    const TWO_NAMES: &[u8] = include_bytes!("testdata/two-names.der");

    fn table(text: &str) -> Result<Owners, String> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("owners.toml");
        fs::write(&path, text).unwrap();
        Owners::open(&path).map_err(|error| error.to_string())
    }

    fn identify(owners: &Owners, chain: &[&[u8]]) -> Option<Identity> {
        let chain: Vec<_> = chain.iter().map(|der| der.to_vec()).collect();
        owners.identify(&chain)
    }

    #[test]
    fn certificate_without_a_user_is_good_beside_a_password() {
        let read = || Ok::<_, String>(Owners::CommonName);
        let owners = Watched::open("certificate users", Vec::new(), read).unwrap();
        let chain: Arc<[Vec<u8>]> = [TWO_NAMES.to_vec()].into();
        assert!(super::identify(&owners, &chain, true).is_none());
        let identity = super::identify(&owners, &chain, false).unwrap();
        assert_eq!(identity, Identity::default());
    }

    #[test]
    fn own_certificate_gives_the_user_and_the_chain_attributes() {
        let owners = table(
            r#"
            [[certificate]]
            subject = "CN=Building 17 CA,O=Contoso\\, Inc."
            user = "unused: a CA does not connect"
            attributes = { building = "17", line = "?" }

            [[certificate]]
            subject = "C = DE, O = Contoso\\, Inc., OU = Line 3, CN = press-4"
            user = "press"
            attributes = { line = "3" }
            "#,
        )
        .unwrap();
        let press = identify(&owners, &[PRESS, CA]).unwrap();
        assert_eq!(press.user.as_deref(), Some("press"));
        // The own certificate takes precedence over its issuer.
        assert_eq!(press.attribute("line"), Some("3"));
        assert_eq!(press.attribute("building"), Some("17"));
        let alone = identify(&owners, &[PRESS]).unwrap();
        assert_eq!(alone.attribute("building"), None);
        let unknown = identify(&owners, &[TWO_NAMES, CA]).unwrap();
        assert_eq!(unknown.user, None);
        assert_eq!(unknown.attribute("building"), Some("17"));
    }

    #[test]
    fn common_name_is_the_user_only_if_there_is_exactly_one() {
        let user = |chain| identify(&Owners::CommonName, chain)?.user;
        assert_eq!(user(&[PRESS, CA]).as_deref(), Some("press-4"));
        // Choosing one of two names could admit the wrong client.
        assert_eq!(user(&[TWO_NAMES]), None);
        assert_eq!(user(&[]), None);
    }

    #[test]
    fn invalid_certificate_gives_no_identity() {
        let owners = table("").unwrap();
        assert!(identify(&owners, &[PRESS]).is_some());
        for end in 0..PRESS.len() {
            assert!(identify(&owners, &[&PRESS[..end]]).is_none(), "{end}");
        }
        for at in 0..PRESS.len() {
            for bit in 0..8 {
                let mut flipped = PRESS.to_vec();
                flipped[at] ^= 1 << bit;
                // Any result is right, but it must not panic.
                _ = identify(&Owners::CommonName, &[&flipped]);
            }
        }
        let large = [PRESS, &vec![0; limits::CERTIFICATE_BYTES_MAX]].concat();
        assert!(identify(&owners, &[&large]).is_none());
    }

    #[test]
    fn bad_table_is_refused_with_the_reason() {
        let says = |text: &str| table(text).err().unwrap();
        let entry = |subject: &str, gives: &str| {
            format!("[[certificate]]\nsubject = '{subject}'\n{gives}\n")
        };
        assert!(says("[[certificate]]\nuser = 'a'").contains("missing field `subject`"));
        assert!(says(&entry("CN=a", "users = 'a'")).contains("unknown field"));
        assert!(says(&entry("press-4", "user = 'a'")).contains("`press-4` is not a subject"));
        assert!(says(&entry("", "user = 'a'")).contains("is not a subject"));
        assert!(says(&entry("CN=a", "")).contains("neither a user nor attributes"));
        let no_name = entry("CN=a", "user = ''\nattributes = { line = '3' }");
        assert!(says(&no_name).contains("the user of `CN=a` is empty"));
        let twice = entry("CN=a,O=b", "user = 'a'") + &entry("O = b, CN = a", "user = 'b'");
        assert!(says(&twice).contains("has two entries"));
        assert!(says(&entry("role=x", "user = 'a'")).contains("such as \"2.5.4.72="));
    }

    /// A subject with this attribute, of this type.
    fn with(oid: &str, tag: Tag, value: &str) -> Subject {
        let attribute = AttributeTypeAndValue {
            oid: oid.parse().unwrap(),
            value: Any::new(tag, value.as_bytes()).unwrap(),
        };
        let set = RelativeDistinguishedName::try_from(vec![attribute]).unwrap();
        parts(&RdnSequence(vec![set]))
    }

    /// Regression: these were refused, or never matched. They are as openssl prints them.
    #[test]
    fn subjects_of_openssl_match_any_type_of_text() {
        for (subject, oid, value) in [
            ("organizationIdentifier=VATDE-1", "2.5.4.97", "VATDE-1"),
            ("2.5.4.97=VATDE-1", "2.5.4.97", "VATDE-1"),
            ("GN=Ann", "2.5.4.42", "Ann"),
            ("SN = Lee", "2.5.4.4", "Lee"),
            ("unstructuredName=un", "1.2.840.113549.1.9.2", "un"),
            ("jurisdictionC=DE", "1.3.6.1.4.1.311.60.2.1.3", "DE"),
            ("CN=trail\\ ", "2.5.4.3", "trail "),
            (" CN = trail\\  ", "2.5.4.3", "trail "),
            ("CN=end\\\\ ", "2.5.4.3", "end\\"),
            ("CN=a = b", "2.5.4.3", "a = b"),
        ] {
            for tag in [Tag::Utf8String, Tag::PrintableString, Tag::Ia5String] {
                assert_eq!(written(subject), Some(with(oid, tag, value)), "{subject}");
            }
        }
        let several = written("CN=gn,SN=Lee,GN=Ann").unwrap();
        assert_eq!(several, written("GN=Ann, SN=Lee, CN=gn").unwrap());
        assert_eq!(several.len(), 3);
        // Other bytes are not a text that looks like them.
        let bytes = with("2.5.4.97", Tag::BmpString, "\0a");
        assert_ne!(Some(bytes), written("2.5.4.97=\\#1e020061"));
    }
}
