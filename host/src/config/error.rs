//! Why there is no configuration.

use std::net::SocketAddr;
use std::path::PathBuf;

use super::{ADMIN_TOKEN, BrokerUrl, ListenError};
use crate::limits;
use statehouse_files::watch::FileError;

/// Why there is no configuration. Its text is a sentence for the operator.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read the configuration file {0}: {1}")]
    Read(PathBuf, std::io::Error),
    /// The file could not be read once more.
    #[error(transparent)]
    ReadAgain(#[from] FileError),
    /// The file is far too large to be one.
    #[error("the configuration file {0} is larger than {max} bytes", max = limits::CONFIG_FILE_BYTES_MAX)]
    Size(PathBuf),
    /// A key or a value of the file is wrong.
    #[error("the configuration file {0} is wrong.\n{text}", text = .1.to_string().trim_end())]
    File(PathBuf, Box<toml::de::Error>),
    /// A listener that cannot be.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// An administration that others can reach.
    #[error(
        "{0} can be reached from other machines, and the administration listens there only with a token of yours in the environment, as {ADMIN_TOKEN}; it is not encrypted. Or name an address such as 127.0.0.1:0 with --admin, and come from elsewhere through a tunnel, such as `ssh -L`"
    )]
    Admin(SocketAddr),
    /// A time out of bounds.
    #[error("{name} is at least {least} and at most {most}")]
    Time {
        /// The setting.
        name: &'static str,
        /// Its bounds, in words.
        least: &'static str,
        /// Its bounds, in words.
        most: &'static str,
    },
    /// Two settings that do not fit together.
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
    /// A value that would end the connection of whoever asks for it.
    #[error(
        "a client's queue of max_queue_bytes ({queue}) cannot hold an answer with a value of max_value_bytes ({value}), so whoever asked for one would be disconnected: raise max_queue_bytes or lower max_value_bytes"
    )]
    Queue {
        /// Longest value.
        value: u64,
        /// Queue of a client.
        queue: u64,
    },
    /// Listening and not.
    #[error("a store behind a foreign broker does not listen: give broker or listen, not both")]
    BrokerAndListen,
    /// Tokens of anybody for anybody.
    #[error(
        "token_keys needs token_audience: without it a token that was made for another service would open this one. Name what clients ask their tokens for, such as --token-audience aio-internal"
    )]
    TokenAudience,
    /// Tokens that nobody can check.
    #[error(
        "token_audience and token_issuer are about tokens, and no keys are named to check these with: add --token-keys FILE (a JWKS), or leave them out"
    )]
    TokenKeys,
    /// Users of a broker that is somebody else's.
    #[error(
        "users, certificates, tokens and allow_anonymous are for clients that connect here, and behind a foreign broker they connect to that one: configure them there, and leave them out here"
    )]
    AccessBehindBroker,
    /// A setting that means nothing without a foreign broker.
    #[error("{0} is about a foreign broker, and none is named: add --broker URL, or leave it out")]
    WithoutBroker(&'static str),
    /// A standby of nothing.
    #[error(
        "a standby goes on from the data directory of the store that ended, and --durability memory keeps none: use another durability, or leave out --standby"
    )]
    StandbyInMemory,
    /// A certificate without its key, or a key without its certificate.
    #[error("broker_cert and broker_key belong together: give both or none")]
    HalfCertificate,
    /// Certificates for a connection that is not encrypted.
    #[error(
        "certificates are for encrypted connections, and {0} is none: name the broker as mqtts:// or wss://"
    )]
    CertificateWithoutTls(BrokerUrl),
    /// The file with the password could not be read.
    #[error("cannot read the password file {0}: {1}")]
    Password(PathBuf, std::io::Error),
}
