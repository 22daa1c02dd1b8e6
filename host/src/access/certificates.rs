//! Who the owner of a client certificate is.
//!
//! In comes a chain that a listener has verified, and a table of subjects; out go a user and attributes. It checks no
//! signature, no date and no purpose: that is done.
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

use serde::Deserialize;
use statehouse_mqtt::Identity;
use x509_cert::Certificate;
use x509_cert::der::oid::db::rfc4519::CN;
use x509_cert::der::{Decode, Tag, Tagged};
use x509_cert::name::Name;

use crate::limits;
use crate::reload::{FileError, read_file};

/// Why a table is not taken. Its text is a sentence for the operator.
#[derive(Debug, thiserror::Error)]
pub enum CertificatesError {
    /// The file cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// It is no table of certificates.
    #[error("{0} is wrong.\n{1}")]
    Table(PathBuf, Box<dyn std::error::Error + Send + Sync>),
    /// A subject is none.
    #[error(
        "{0}: `{1}` is no subject: write it as `openssl x509 -noout -subject -nameopt RFC2253` prints it, such as \"CN=press-4,O=Contoso\""
    )]
    Subject(PathBuf, String),
    /// A subject stands twice.
    #[error("{0}: the subject `{1}` stands twice: put its user and attributes into one entry")]
    Twice(PathBuf, String),
    /// An entry gives nothing.
    #[error("{0}: the entry of `{1}` has neither a user nor attributes, so it means nothing")]
    Empty(PathBuf, String),
}

/// Gives certificates their owners.
pub enum Owners {
    /// The user is the Common Name.
    CommonName,
    /// The user and attributes are those of a table.
    Table(BTreeMap<Subject, Owner>),
}

/// The parts of a distinguished name, in no order: people write them from either end.
pub type Subject = Vec<String>;

/// What a subject gives.
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
    /// Reads a table.
    ///
    /// # Errors
    /// [`CertificatesError`], with the line where the file is no TOML.
    pub fn open(path: &Path) -> Result<Self, CertificatesError> {
        let wrong = |error| CertificatesError::Table(path.to_owned(), error);
        let bytes = read_file(path, limits::CERTIFICATE_USERS_FILE_BYTES_MAX)?;
        let text = String::from_utf8(bytes).map_err(|error| wrong(error.into()))?;
        let table: Table = toml::from_str(&text).map_err(|error| wrong(error.into()))?;
        let mut owners = BTreeMap::new();
        for owner in table.certificate {
            let shown = || (path.to_owned(), owner.subject.clone());
            let Some(subject) = written(&owner.subject) else {
                let (path, subject) = shown();
                return Err(CertificatesError::Subject(path, subject));
            };
            if owner.user.is_none() && owner.attributes.is_empty() {
                let (path, subject) = shown();
                return Err(CertificatesError::Empty(path, subject));
            }
            if let Some(twice) = owners.insert(subject, owner) {
                return Err(CertificatesError::Twice(path.to_owned(), twice.subject));
            }
        }
        Ok(Self::Table(owners))
    }

    /// Who has shown this chain, its own certificate first. None where that cannot be read, or names nobody although it
    /// should.
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
                // What is said of a certificate itself goes before what is said of those who signed it.
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
                    credential: 0,
                })
            }
        }
    }
}

fn subject(der: &[u8]) -> Option<Name> {
    if der.len() > limits::CERTIFICATE_BYTES_MAX {
        return None;
    }
    let certificate = Certificate::from_der(der).ok()?;
    Some(certificate.tbs_certificate.subject)
}

/// A distinguished name as people write it: with or without spaces around commas and equals signs.
fn written(text: &str) -> Option<Subject> {
    let mut plain = String::with_capacity(text.len());
    let mut escaped = false;
    for character in text.trim().chars() {
        match character {
            ',' | '+' | '=' if !escaped => {
                while plain.ends_with(' ') && !plain.ends_with("\\ ") {
                    plain.pop();
                }
                plain.push(character);
            }
            ' ' if !escaped && plain.ends_with([',', '+', '=']) && !plain.ends_with("\\,") => {}
            _ => plain.push(character),
        }
        escaped = character == '\\' && !escaped;
    }
    let name: Name = plain.parse().ok()?;
    if name.is_empty() {
        return None;
    }
    Some(parts(&name))
}

/// Which parts a name has.
fn parts(name: &Name) -> Subject {
    let all = name.0.iter().flat_map(|part| part.0.iter());
    let mut parts: Vec<_> = all.map(ToString::to_string).collect();
    parts.sort_unstable();
    parts
}

/// The one Common Name that a name has. With several, nobody could say which one counts.
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
