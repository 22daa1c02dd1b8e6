//! Parses the configuration file into optional settings of the same types as the flags. An error
//! names the line.

use std::fs;
use std::io::{self, Read};
use std::num::{NonZeroU16, NonZeroU32, NonZeroU64};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::access::AccessKeys;
use super::{
    AdminAddress, BrokerUrl, ClientId, ConfigError, DialectSetting, DropAction, Durability,
    ForeignFlags, Fuel, KeyBytes, LimitFlags, Listen, ListenFlags, LogFormat, Node, Origin,
    PacketBytes, PresenceKind, Span, Threads, Window,
};
use crate::limits;
use statehouse_files::watch::read_file;

/// The keys of the file. Unknown keys are errors, since a misspelled setting would have no effect.
#[derive(Deserialize, Debug, Default)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    listen: Option<Vec<Listen>>,
    insecure: Option<bool>,
    tls_cert: Option<PathBuf>,
    tls_key: Option<PathBuf>,
    tls_client_ca: Option<PathBuf>,
    tls_client_crl: Option<Vec<PathBuf>>,
    tls_client_required: Option<bool>,
    ws_origin: Option<Vec<Origin>>,
    pub(super) policy: Option<PathBuf>,
    pub(super) admin: Option<AdminAddress>,
    pub(super) trusted_keys: Option<Vec<String>>,
    pub(super) allow_unsigned: Option<bool>,
    pub(super) policy_drop: Option<PathBuf>,
    pub(super) policy_drop_action: Option<DropAction>,
    pub(super) guard_failures: Option<u32>,
    pub(super) guard_fuel: Option<u64>,
    pub(super) purity_sample: Option<u32>,
    pub(super) policy_property: Option<bool>,
    pub(super) data: Option<PathBuf>,
    pub(super) durability: Option<Durability>,
    pub(super) sync_interval: Option<Span>,
    pub(super) commit_delay: Option<Span>,
    pub(super) history_retention: Option<Span>,
    pub(super) history_bytes: Option<u64>,
    pub(super) duplicate_window: Option<Span>,
    pub(super) max_duplicates: Option<NonZeroU64>,
    pub(super) max_duplicate_bytes: Option<NonZeroU64>,
    pub(super) accept_clock: Option<bool>,
    pub(super) log: Option<LogFormat>,
    pub(super) log_filter: Option<String>,
    pub(super) dialect: Option<DialectSetting>,
    pub(super) node: Option<Node>,
    max_keys: Option<NonZeroU64>,
    max_bytes: Option<NonZeroU64>,
    max_client_keys: Option<NonZeroU64>,
    max_client_bytes: Option<NonZeroU64>,
    max_key_bytes: Option<KeyBytes>,
    max_value_bytes: Option<NonZeroU64>,
    max_watches: Option<NonZeroU64>,
    max_client_watches: Option<NonZeroU64>,
    max_fuel: Option<Fuel>,
    max_packet_bytes: Option<PacketBytes>,
    max_queue_bytes: Option<NonZeroU64>,
    max_total_queue_bytes: Option<NonZeroU64>,
    max_connections: Option<NonZeroU64>,
    max_sessions: Option<NonZeroU64>,
    max_client_subscriptions: Option<NonZeroU64>,
    max_client_in_flight: Option<NonZeroU16>,
    max_client_rate: Option<NonZeroU32>,
    max_rate: Option<NonZeroU32>,
    pub(super) threads: Option<Threads>,
    users: Option<PathBuf>,
    allow_anonymous: Option<bool>,
    certificate_users: Option<PathBuf>,
    rules: Option<PathBuf>,
    token_keys: Option<PathBuf>,
    token_audience: Option<Vec<String>>,
    token_issuer: Option<Vec<String>>,
    broker: Option<BrokerUrl>,
    broker_user: Option<String>,
    broker_password_file: Option<PathBuf>,
    broker_ca: Option<PathBuf>,
    broker_cert: Option<PathBuf>,
    broker_key: Option<PathBuf>,
    broker_client_id: Option<ClientId>,
    broker_window: Option<Window>,
    broker_keep_alive: Option<Span>,
    presence: Option<PresenceKind>,
    watch_ttl: Option<Span>,
    standby: Option<bool>,
}

impl File {
    /// Takes the listener settings.
    pub(super) fn listeners(&mut self) -> ListenFlags {
        ListenFlags {
            listen: self.listen.take().unwrap_or_default(),
            insecure: self.insecure.unwrap_or(false),
            tls_cert: self.tls_cert.take(),
            tls_key: self.tls_key.take(),
            tls_client_ca: self.tls_client_ca.take(),
            tls_client_crl: self.tls_client_crl.take().unwrap_or_default(),
            tls_client_required: self.tls_client_required.unwrap_or(false),
            ws_origin: self.ws_origin.take().unwrap_or_default(),
        }
    }

    /// The limit settings.
    pub(super) fn limits(&self) -> LimitFlags {
        LimitFlags {
            max_keys: self.max_keys,
            max_bytes: self.max_bytes,
            max_client_keys: self.max_client_keys,
            max_client_bytes: self.max_client_bytes,
            max_key_bytes: self.max_key_bytes,
            max_value_bytes: self.max_value_bytes,
            max_watches: self.max_watches,
            max_client_watches: self.max_client_watches,
            max_fuel: self.max_fuel,
            max_packet_bytes: self.max_packet_bytes,
            max_queue_bytes: self.max_queue_bytes,
            max_total_queue_bytes: self.max_total_queue_bytes,
            max_connections: self.max_connections,
            max_sessions: self.max_sessions,
            max_client_subscriptions: self.max_client_subscriptions,
            max_client_in_flight: self.max_client_in_flight,
            max_client_rate: self.max_client_rate,
            max_rate: self.max_rate,
        }
    }

    /// Takes the access settings.
    pub(super) fn access(&mut self) -> AccessKeys {
        AccessKeys {
            users: self.users.take(),
            allow_anonymous: self.allow_anonymous,
            certificate_users: self.certificate_users.take(),
            rules: self.rules.take(),
            token_keys: self.token_keys.take(),
            token_audience: self.token_audience.take(),
            token_issuer: self.token_issuer.take(),
        }
    }

    /// Takes the settings of a foreign broker.
    pub(super) fn foreign(&mut self) -> ForeignFlags {
        ForeignFlags {
            broker: self.broker.take(),
            broker_user: self.broker_user.take(),
            broker_password_file: self.broker_password_file.take(),
            broker_ca: self.broker_ca.take(),
            broker_cert: self.broker_cert.take(),
            broker_key: self.broker_key.take(),
            broker_client_id: self.broker_client_id.take(),
            broker_window: self.broker_window,
            broker_keep_alive: self.broker_keep_alive,
            presence: self.presence,
            watch_ttl: self.watch_ttl,
            standby: self.standby.unwrap_or(false),
        }
    }
}

/// The text of a file, which may be a pipe: it is read to its end.
pub(super) fn text(path: &Path) -> Result<String, ConfigError> {
    let failed = |error| ConfigError::Read(path.to_owned(), error);
    let mut text = String::new();
    let file = fs::File::open(path).map_err(failed)?;
    file.take(limits::CONFIG_FILE_BYTES_MAX + 1)
        .read_to_string(&mut text)
        .map_err(failed)?;
    if text.len() as u64 > limits::CONFIG_FILE_BYTES_MAX {
        return Err(ConfigError::Size(path.to_owned()));
    }
    Ok(text)
}

/// The text of a regular file that is read again. Another pipe read would block the thread that
/// reloads files.
pub(super) fn text_again(path: &Path) -> Result<String, ConfigError> {
    let bytes = read_file(path, limits::CONFIG_FILE_BYTES_MAX)?;
    String::from_utf8(bytes)
        .map_err(|error| ConfigError::Read(path.to_owned(), io::Error::other(error)))
}

/// Parses the text.
pub(super) fn parse<T: DeserializeOwned>(path: &Path, text: &str) -> Result<T, ConfigError> {
    toml::from_str(text).map_err(|error| ConfigError::File(path.to_owned(), Box::new(error)))
}
