//! Who may connect, and what they may do: users, tokens, certificates, rules.
//!
//! What enters: flags, and the same keys of the file. What leaves: [`AccessConfig`], whose files are not read yet.

pub use statehouse_access::settings::{AccessConfig, CertificateUsers, TokenConfig};
use std::path::PathBuf;

use clap::builder::BoolishValueParser;
use serde::Deserialize;

use super::ConfigError;

/// What `serve` takes about who may connect.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Access")]
pub struct AccessFlags {
    /// Users and hashes of their passwords, as `statehouse user` writes them. Who is in it may connect with name and password
    #[arg(long, value_name = "FILE", env = "STATEHOUSE_USERS")]
    pub users: Option<PathBuf>,

    /// Let clients in that show nothing, although others authenticate
    #[arg(long, env = "STATEHOUSE_ALLOW_ANONYMOUS", value_parser = BoolishValueParser::new())]
    pub allow_anonymous: bool,

    /// Who the owner of a client certificate is: `cn` takes the Common Name as user, a file (TOML) gives users and attributes
    /// to subjects
    #[arg(long, value_name = "cn|FILE", env = "STATEHOUSE_CERTIFICATE_USERS")]
    pub certificate_users: Option<PathBuf>,

    /// Rules (TOML) of what clients may do: then all is denied that none of them allows. `statehouse authz` explains them
    #[arg(long, value_name = "FILE", env = "STATEHOUSE_RULES")]
    pub rules: Option<PathBuf>,

    /// Public keys (a JWKS file) of whoever signs service account tokens; clients show these by the method K8S-SAT
    #[arg(long, value_name = "FILE", env = "STATEHOUSE_TOKEN_KEYS")]
    pub token_keys: Option<PathBuf>,

    /// Whom tokens have to be made for (`aud`); may be given more than once
    #[arg(
        long,
        value_name = "NAME",
        env = "STATEHOUSE_TOKEN_AUDIENCE",
        value_delimiter = ','
    )]
    pub token_audience: Vec<String>,

    /// Who has to have made them (`iss`); may be given more than once
    #[arg(
        long,
        value_name = "URL",
        env = "STATEHOUSE_TOKEN_ISSUER",
        value_delimiter = ','
    )]
    pub token_issuer: Vec<String>,
}

/// The same as keys of the file.
#[derive(Deserialize, Debug, Default)]
pub(super) struct AccessKeys {
    pub(super) users: Option<PathBuf>,
    pub(super) allow_anonymous: Option<bool>,
    pub(super) certificate_users: Option<PathBuf>,
    pub(super) rules: Option<PathBuf>,
    pub(super) token_keys: Option<PathBuf>,
    pub(super) token_audience: Option<Vec<String>>,
    pub(super) token_issuer: Option<Vec<String>>,
}

impl AccessFlags {
    /// Puts flags over keys.
    pub(super) fn over(self, keys: AccessKeys) -> Result<AccessConfig, ConfigError> {
        let list = |flags: Vec<String>, keys: Option<Vec<String>>| match flags.is_empty() {
            true => keys.unwrap_or_default(),
            false => flags,
        };
        let audiences = list(self.token_audience, keys.token_audience);
        let issuers = list(self.token_issuer, keys.token_issuer);
        let tokens = match self.token_keys.or(keys.token_keys) {
            Some(_) if audiences.is_empty() => return Err(ConfigError::TokenAudience),
            Some(keys) => Some(TokenConfig {
                keys,
                audiences,
                issuers,
            }),
            None if audiences.is_empty() && issuers.is_empty() => None,
            None => return Err(ConfigError::TokenKeys),
        };
        let certificate_users = self.certificate_users.or(keys.certificate_users);
        Ok(AccessConfig {
            users: self.users.or(keys.users),
            rules: self.rules.or(keys.rules),
            allow_anonymous: self.allow_anonymous || keys.allow_anonymous.unwrap_or(false),
            certificate_users: certificate_users.map(|name| match name.as_os_str() == "cn" {
                true => CertificateUsers::CommonName,
                false => CertificateUsers::File(name),
            }),
            tokens,
            client_certificates: false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags() -> AccessFlags {
        AccessFlags {
            token_keys: Some("keys".into()),
            token_audience: vec!["store".into()],
            ..AccessFlags::default()
        }
    }

    #[test]
    fn tokens_need_keys_and_an_audience() {
        let load = |flags: AccessFlags| flags.over(AccessKeys::default());
        let tokens = load(flags()).unwrap().tokens.unwrap();
        assert_eq!(tokens.audiences, ["store"]);
        let for_anybody = AccessFlags {
            token_audience: Vec::new(),
            ..flags()
        };
        let error = load(for_anybody).unwrap_err();
        assert!(error.to_string().contains("--token-audience"));
        let unchecked = AccessFlags {
            token_keys: None,
            ..flags()
        };
        let error = load(unchecked).unwrap_err();
        assert!(error.to_string().contains("--token-keys"));
    }

    #[test]
    fn flags_win_over_the_file_and_a_file_named_cn_can_still_be_named() {
        let owners = |flag: Option<&str>, key: &str| {
            let flags = AccessFlags {
                certificate_users: flag.map(Into::into),
                ..AccessFlags::default()
            };
            let keys = AccessKeys {
                certificate_users: Some(key.into()),
                ..AccessKeys::default()
            };
            flags.over(keys).unwrap().certificate_users.unwrap()
        };
        assert_eq!(owners(None, "cn"), CertificateUsers::CommonName);
        assert_eq!(owners(Some("cn"), "table"), CertificateUsers::CommonName);
        let file = |name: &str| CertificateUsers::File(name.into());
        assert_eq!(owners(Some("./cn"), "cn"), file("./cn"));
    }

    #[test]
    fn whoever_can_show_something_has_to() {
        let config = |edit: fn(&mut AccessConfig)| {
            let mut config = AccessConfig::default();
            edit(&mut config);
            config.authenticates()
        };
        assert!(!config(|_| {}));
        assert!(config(|it| it.users = Some("users".into())));
        assert!(config(|it| it.client_certificates = true));
        assert!(!config(|it| it.allow_anonymous = true));
    }
}
