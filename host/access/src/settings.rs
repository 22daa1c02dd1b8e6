//! Settings of the access control, as the configuration gives them.

use std::path::PathBuf;

/// Who may connect, all checked but the files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessConfig {
    /// The users file.
    pub users: Option<PathBuf>,
    /// Whether clients that show nothing are let in although others authenticate.
    pub allow_anonymous: bool,
    /// Who the owners of certificates are.
    pub certificate_users: Option<CertificateUsers>,
    /// What clients may do.
    pub rules: Option<PathBuf>,
    /// Whose tokens are taken.
    pub tokens: Option<TokenConfig>,
    /// Whether a listener asks clients for certificates.
    pub client_certificates: bool,
}

/// Who the owner of a client certificate is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CertificateUsers {
    /// The user of its Common Name.
    CommonName,
    /// Who this file says.
    File(PathBuf),
}

/// Whose tokens are taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenConfig {
    /// The file with the keys.
    pub keys: PathBuf,
    /// Whom they have to be made for: one of these.
    pub audiences: Vec<String>,
    /// Who has to have made them; empty for anybody with a key.
    pub issuers: Vec<String>,
}

impl AccessConfig {
    /// Whether it says anything of who may connect. Rules are for clients of another broker too.
    #[must_use]
    pub fn is_about_connecting(&self) -> bool {
        self.authenticates() || self.certificate_users.is_some() || self.allow_anonymous
    }

    /// Whether clients can show who they are, so that those who do not are refused unless they are allowed.
    #[must_use]
    pub fn authenticates(&self) -> bool {
        self.users.is_some() || self.tokens.is_some() || self.client_certificates
    }
}
