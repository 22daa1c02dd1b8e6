//! The settings of authentication and authorization: users, tokens, certificates, rules.
//!
//! Combines flags with the same keys of the file and yields an [`AccessConfig`], whose files are
//! not read yet.

use std::path::PathBuf;

use clap::ArgAction;
use clap::builder::NonEmptyStringValueParser;
pub use statehouse_access::settings::{AccessConfig, CertificateUsers, TokenConfig};

use super::ConfigError;
use super::layer::settings;
use super::switch::Switch;
use super::values;

settings! {
    /// The access settings of `serve`.
    #[command(next_help_heading = "Access")]
    pub struct AccessFlags {
        /// A file of users and password hashes, as `statehouse user` writes it. These users may
        /// connect with name and password
        #[arg(long, value_name = "FILE", env = "STATEHOUSE_USERS")]
        pub users: Option<PathBuf>,

        /// Accept clients without credentials although an authentication method is configured
        #[arg(long, env = "STATEHOUSE_ALLOW_ANONYMOUS", action = ArgAction::SetTrue, default_value = Switch::UNSET)]
        pub allow_anonymous: Switch,

        /// How to map client certificates to users: `cn` takes the Common Name as the user, a file
        /// (TOML) maps subjects to users and attributes
        #[arg(long, value_name = "cn|FILE", env = "STATEHOUSE_CERTIFICATE_USERS")]
        pub certificate_users: Option<PathBuf>,

        /// Authorization rules (TOML): with them everything is denied that no rule allows.
        /// `statehouse authz` explains the rules
        #[arg(long, value_name = "FILE", env = "STATEHOUSE_RULES")]
        pub rules: Option<PathBuf>,

        /// Public keys (a JWKS file) that verify service account tokens; clients send these with
        /// the authentication method K8S-SAT
        #[arg(long, value_name = "FILE", env = "STATEHOUSE_TOKEN_KEYS")]
        pub token_keys: Option<PathBuf>,

        /// An accepted audience (`aud`) of tokens; may be given more than once
        #[arg(
            long,
            value_name = "NAME",
            env = "STATEHOUSE_TOKEN_AUDIENCE",
            value_delimiter = ','
        )]
        pub token_audience: Vec<String>,

        /// An accepted issuer (`iss`) of tokens; may be given more than once [default: any issuer]
        #[arg(
            long,
            value_name = "URL",
            env = "STATEHOUSE_TOKEN_ISSUER",
            value_delimiter = ',',
            value_parser = NonEmptyStringValueParser::new()
        )]
        #[serde(deserialize_with = "values::nonempty")]
        pub token_issuer: Vec<String>,
    }
}

impl AccessFlags {
    /// The settings without those of tokens.
    pub(super) fn without_tokens(self) -> AccessConfig {
        AccessConfig {
            users: self.users,
            rules: self.rules,
            allow_anonymous: self.allow_anonymous.is_on(),
            certificate_users: self.certificate_users.map(certificate_users),
            tokens: None,
            client_certificates: false,
            users_are_operators: false,
            behind_broker: false,
        }
    }

    /// Checks that the settings are consistent.
    pub(super) fn load(mut self) -> Result<AccessConfig, ConfigError> {
        let audiences = std::mem::take(&mut self.token_audience);
        let issuers = std::mem::take(&mut self.token_issuer);
        // An empty variable is an empty audience, which no token has.
        let names_audience = !audiences.is_empty() && audiences.iter().all(|it| !it.is_empty());
        let tokens = match self.token_keys.take() {
            Some(_) if !names_audience => return Err(ConfigError::TokenAudience),
            Some(keys) => Some(TokenConfig {
                keys,
                audiences,
                issuers,
            }),
            None if audiences.is_empty() && issuers.is_empty() => None,
            None => return Err(ConfigError::TokenKeys),
        };
        Ok(AccessConfig {
            tokens,
            ..self.without_tokens()
        })
    }
}

fn certificate_users(name: PathBuf) -> CertificateUsers {
    match name.as_os_str() == "cn" {
        true => CertificateUsers::CommonName,
        false => CertificateUsers::File(name),
    }
}

#[cfg(test)]
mod tests {
    use clap::{Args, FromArgMatches};

    use super::super::layer::Layer;
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
        let load = AccessFlags::load;
        let tokens = load(flags()).unwrap().tokens.unwrap();
        assert_eq!(tokens.audiences, ["store"]);
        // An empty variable gives the second one.
        for audiences in [vec![], vec![String::new()]] {
            let for_anybody = AccessFlags {
                token_audience: audiences,
                ..flags()
            };
            let error = load(for_anybody).unwrap_err();
            assert!(error.to_string().contains("--token-audience"));
        }
        let unchecked = AccessFlags {
            token_keys: None,
            ..flags()
        };
        let error = load(unchecked).unwrap_err();
        assert!(error.to_string().contains("--token-keys"));
    }

    /// An empty variable reaches the same parser. No token would have an empty issuer.
    #[test]
    fn an_empty_issuer_is_refused() {
        let issuers = |value: &str| {
            let command = AccessFlags::augment_args(clap::Command::new("serve"));
            let matches = command
                .no_binary_name(true)
                .try_get_matches_from(["--token-issuer", value])?;
            Ok::<_, clap::Error>(AccessFlags::from_arg_matches(&matches)?.token_issuer)
        };
        assert_eq!(issuers("https://a,https://b").unwrap().len(), 2);
        assert!(issuers("").is_err() && issuers("https://a,").is_err());
    }

    #[test]
    fn flags_override_the_file_and_a_file_may_be_named_cn() {
        let owners = |flag: Option<&str>, key: &str| {
            let flags = AccessFlags {
                certificate_users: flag.map(Into::into),
                ..AccessFlags::default()
            };
            let keys = AccessFlags {
                certificate_users: Some(key.into()),
                ..AccessFlags::default()
            };
            flags.over(keys).load().unwrap().certificate_users.unwrap()
        };
        assert_eq!(owners(None, "cn"), CertificateUsers::CommonName);
        assert_eq!(owners(Some("cn"), "table"), CertificateUsers::CommonName);
        let file = |name: &str| CertificateUsers::File(name.into());
        assert_eq!(owners(Some("./cn"), "cn"), file("./cn"));
    }

    #[test]
    fn authentication_is_required_once_a_method_is_configured() {
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
