//! Errors of the configuration.

use std::net::SocketAddr;
use std::path::PathBuf;

use super::{ADMIN_TOKEN, BrokerUrl, ClusterError, CollectorUrl, ListenError};
use crate::limits;
use statehouse_files::watch::FileError;

/// Why the configuration is refused. The text is a sentence for the operator.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read the configuration file {0}: {1}")]
    Read(PathBuf, #[source] std::io::Error),
    /// The file could not be read again.
    #[error(transparent)]
    ReadAgain(#[from] FileError),
    /// The file exceeds its size limit.
    #[error("the configuration file {0} is larger than {max} bytes", max = limits::CONFIG_FILE_BYTES_MAX)]
    Size(PathBuf),
    /// A key or a value of the file is wrong.
    #[error("the configuration file {0} is wrong{why}", why = Self::place_and_reason(.1))]
    File(PathBuf, Box<toml::de::Error>),
    /// The listener settings are refused.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The settings of the cluster are refused.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// An admin API that other machines can reach.
    #[error(
        "{0} can be reached from other machines, and the admin API listens there only with a token of your own in the environment variable {ADMIN_TOKEN}; the connection is not encrypted. Or choose an address such as 127.0.0.1:0 with --admin, and connect from other machines through a tunnel, such as `ssh -L`; or use TLS: --admin https://{0}"
    )]
    Admin(SocketAddr),
    /// An admin API over TLS that no operator can use.
    #[error(
        "no operator could log in at https://{0}: add --users FILE, where `statehouse user add NAME --role read` makes an operator, or set a token in the environment variable {ADMIN_TOKEN}"
    )]
    AdminUsers(SocketAddr),
    /// A duration outside of its limits.
    #[error("{name} is at least {least} and at most {most}")]
    Time {
        /// The setting.
        name: &'static str,
        /// The lower limit, with its unit.
        least: &'static str,
        /// The upper limit, with its unit.
        most: &'static str,
    },
    /// Two settings that contradict each other.
    #[error(
        "max_value_bytes ({value}) and max_key_bytes ({key}) do not fit into one packet of max_packet_bytes ({packet}), so such a value could never be set: raise max_packet_bytes or lower the others"
    )]
    Packet {
        /// Longest value.
        value: u64,
        /// Longest key.
        key: u64,
        /// Longest packet.
        packet: u64,
    },
    /// A value whose response would disconnect the client that asks for it.
    #[error(
        "{name} ({queue}) cannot hold an answer with a value of max_value_bytes ({value}), so a client that asked for one would be disconnected: raise {name} to at least {least} or lower max_value_bytes",
        least = .value.saturating_add(limits::ENVELOPE_BYTES)
    )]
    Queue {
        /// The setting that limits the queue, of a client or of all clients.
        name: &'static str,
        /// Its value in bytes.
        queue: u64,
        /// Longest value.
        value: u64,
    },
    /// A limit that leaves too little for values, whose own limit is not set.
    #[error(
        "{name} ({bytes}) leaves less than {min} bytes for a value beside a key of max_key_bytes ({key}): raise {name} to at least {least}, or lower max_key_bytes",
        min = limits::VALUE_BYTES_DERIVED_MIN
    )]
    NoRoomForValues {
        /// The setting.
        name: &'static str,
        /// Its value in bytes.
        bytes: u64,
        /// Longest key.
        key: u64,
        /// The least value of the setting that is accepted.
        least: u64,
    },
    /// Both a foreign broker and listeners.
    #[error("a store behind a foreign broker does not listen: give broker or listen, not both")]
    BrokerAndListen,
    /// Token keys without an audience, which would accept tokens made for other services.
    #[error(
        "token_keys needs token_audience: without it this store would accept tokens that were made for other services. Name the audience that clients request, such as --token-audience aio-internal"
    )]
    TokenAudience,
    /// Tokens without keys to verify them.
    #[error(
        "token_audience and token_issuer need keys that verify tokens: add --token-keys FILE (a JWKS), or leave them out"
    )]
    TokenKeys,
    /// Authentication settings of a store whose clients connect to a foreign broker.
    #[error(
        "users, certificates, tokens and allow_anonymous apply to clients that connect to this store. Behind a foreign broker clients connect to the broker: configure them there, and remove them here. Users of the admin API need an address of it: add --admin https://ADDR:PORT"
    )]
    AccessBehindBroker,
    /// A setting of the embedded broker, which would have no effect behind a foreign one.
    #[error(
        "{0} is a setting of the embedded broker, and has no effect behind a foreign one: configure that broker, and remove {0}"
    )]
    BehindBroker(&'static str),
    /// A setting that requires a foreign broker.
    #[error("{0} requires a foreign broker: add --broker URL, or remove {0}")]
    WithoutBroker(&'static str),
    /// A standby without a data directory to take over.
    #[error(
        "a standby takes over the data directory of the store that ended, but --durability memory keeps none: use another durability, or remove --standby"
    )]
    StandbyInMemory,
    /// A certificate without its key, or a key without its certificate.
    #[error("broker_cert and broker_key belong together: give both or none")]
    HalfCertificate,
    /// Certificates for an unencrypted connection.
    #[error(
        "certificates require an encrypted connection, but {0} is unencrypted: name the broker as mqtts:// or wss://"
    )]
    CertificateWithoutTls(BrokerUrl),
    /// A setting that requires a trace collector.
    #[error("{0} requires a trace collector: add --traces URL, or remove {0}")]
    WithoutCollector(&'static str),
    /// Certificates for an unencrypted connection to the trace collector.
    #[error(
        "traces_ca requires an encrypted connection, but {0} is unencrypted: name the collector as https://"
    )]
    CollectorWithoutTls(CollectorUrl),
    /// A line that is not an HTTP header.
    #[error("line {1} of {0} is not an HTTP header: write one per line, as NAME: VALUE")]
    CollectorHeader(PathBuf, usize),
    /// The password file could not be read.
    #[error("cannot read the password file {0}: {1}")]
    Password(PathBuf, #[source] std::io::Error),
}

impl ConfigError {
    /// A text to show, with `***` instead of the user and the password of a URL in it: instead of
    /// everything between the first `://` and the last `@`.
    #[must_use]
    pub fn without_login(text: &str) -> String {
        let ends = text
            .find("://")
            .map(|at| at + "://".len())
            .zip(text.rfind('@'));
        match ends {
            Some((from, to)) if from < to => format!("{}***{}", &text[..from], &text[to..]),
            _ => text.to_owned(),
        }
    }

    /// The place and the reason of an error of a file, in one line, as the end of a sentence. The
    /// error's own text repeats the line of the file, in which any value may be a secret.
    #[must_use]
    pub fn place_and_reason(error: &toml::de::Error) -> String {
        let text = error.to_string();
        let mut lines = text.lines();
        let place = lines.next();
        let place = place.and_then(|it| it.strip_prefix("TOML parse error at "));
        let reason = without_login_in_quotes(error.message());
        let Some(place) = place else {
            return format!(": {reason}");
        };
        // The next line is a margin. Then the line of the file follows, behind its number.
        let line = lines.nth(1).and_then(|it| it.split_once(" | "));
        let key = line.and_then(|(_, it)| it.split_once('='));
        let key = key.map(|(key, _)| key.trim());
        match key.filter(|it| is_key(it) && !reason.contains(&format!("`{it}`"))) {
            Some(key) => format!(" at {place}, in `{key}`: {reason}"),
            None => format!(" at {place}: {reason}"),
        }
    }
}

/// Whether this is a key without quotes.
fn is_key(text: &str) -> bool {
    let is_of_key = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    !text.is_empty() && text.chars().all(is_of_key)
}

/// A reason without the login of a URL in the value that it repeats. It repeats values in quotes or
/// backticks, and may name other URLs behind them.
fn without_login_in_quotes(reason: &str) -> String {
    let quotes = ['"', '`'];
    match (reason.find(quotes), reason.rfind(quotes)) {
        (Some(from), Some(to)) => {
            let value = ConfigError::without_login(&reason[from..to]);
            format!("{}{value}{}", &reason[..from], &reason[to..])
        }
        _ => reason.to_owned(),
    }
}
