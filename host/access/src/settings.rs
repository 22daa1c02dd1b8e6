//! Settings of the access control, as the configuration gives them.

use std::path::PathBuf;

/// The checked access settings; the files are not read yet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessConfig {
    /// The users file.
    pub users: Option<PathBuf>,
    /// Whether clients without credentials are accepted although an authentication method is
    /// configured.
    pub allow_anonymous: bool,
    /// How client certificates are mapped to users.
    pub certificate_users: Option<CertificateUsers>,
    /// The rules file.
    pub rules: Option<PathBuf>,
    /// Which tokens are accepted.
    pub tokens: Option<TokenConfig>,
    /// Whether a listener asks clients for certificates.
    pub client_certificates: bool,
    /// Whether the users are operators alone, because clients connect to a foreign broker.
    pub users_are_operators: bool,
    /// Whether clients connect to a foreign broker, so that rules apply to the client ids alone
    /// that requests name.
    pub behind_broker: bool,
}

/// How client certificates are mapped to users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CertificateUsers {
    /// The user is the Common Name.
    CommonName,
    /// This file maps subjects to users.
    File(PathBuf),
}

/// Which tokens are accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenConfig {
    /// The file with the public keys.
    pub keys: PathBuf,
    /// The accepted audiences.
    pub audiences: Vec<String>,
    /// The accepted issuers; empty accepts any issuer with one of the keys.
    pub issuers: Vec<String>,
}

impl AccessConfig {
    /// Whether any setting concerns connections. Rules do not count: they also apply to clients of
    /// a foreign broker.
    #[must_use]
    pub fn is_about_connecting(&self) -> bool {
        self.authenticates() || self.certificate_users.is_some() || self.allow_anonymous
    }

    /// Whether an authentication method is configured. Anonymous clients are then refused unless
    /// they are allowed.
    #[must_use]
    pub fn authenticates(&self) -> bool {
        let has_users = self.users.is_some() && !self.users_are_operators;
        has_users || self.tokens.is_some() || self.client_certificates
    }
}
