//! The configuration of `serve`: flags over environment over a TOML file over defaults.
//!
//! What enters: what clap read of flags and environment, and the text of a file. What leaves: a
//! [`Config`] with every value checked, or an error that names the line and says what is allowed.

use std::fmt;
use std::fs;
use std::io::Read;
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::str::FromStr;

use clap::builder::BoolishValueParser;
use serde::Deserialize;
use serde::de::{self, Deserializer};

use crate::limits;
use crate::request::Dialect;
use crate::store::Quota;

/// What `statehouse serve` accepts as flags, environment variables and, under the same names with
/// underscores, as keys of the file.
#[derive(clap::Args, Debug, Default)]
pub struct Flags {
    /// Where to listen; may be given more than once. Port 0 takes a free one
    #[arg(
        long,
        value_name = "ADDR:PORT",
        env = "STATEHOUSE_LISTEN",
        value_delimiter = ','
    )]
    pub listen: Vec<Listen>,

    /// A policy (.wasm component or core module) instead of the built-in standard one
    #[arg(long, value_name = "FILE", env = "STATEHOUSE_POLICY")]
    pub policy: Option<PathBuf>,

    /// A TOML file with any of these settings
    #[arg(long, value_name = "FILE", env = "STATEHOUSE_CONFIG")]
    pub config: Option<PathBuf>,

    /// How log lines look on standard error
    #[arg(long, value_name = "FORMAT", env = "STATEHOUSE_LOG")]
    pub log: Option<LogFormat>,

    /// What is logged: a level, or directives such as `warn,statehouse=debug`
    #[arg(long, value_name = "FILTER", env = "STATEHOUSE_LOG_FILTER")]
    pub log_filter: Option<String>,

    /// The form of the protocol on the current topic; `auto` chooses by each request's properties
    #[arg(long, value_name = "DIALECT", env = "STATEHOUSE_DIALECT")]
    pub dialect: Option<DialectSetting>,

    /// The name of this store in versions
    #[arg(long, value_name = "NAME", env = "STATEHOUSE_NODE")]
    pub node: Option<Node>,

    /// Listen beyond loopback although nobody has to authenticate
    #[arg(long, env = "STATEHOUSE_INSECURE", value_parser = BoolishValueParser::new())]
    pub insecure: bool,

    /// Most keys that the store holds
    #[arg(long, value_name = "N", env = "STATEHOUSE_MAX_KEYS")]
    pub max_keys: Option<NonZeroU64>,

    /// Most bytes of keys and values, each entry counted with 320 more
    #[arg(long, value_name = "BYTES", env = "STATEHOUSE_MAX_BYTES")]
    pub max_bytes: Option<NonZeroU64>,

    /// Longest key
    #[arg(long, value_name = "BYTES", env = "STATEHOUSE_MAX_KEY_BYTES")]
    pub max_key_bytes: Option<KeyBytes>,

    /// Longest value
    #[arg(long, value_name = "BYTES", env = "STATEHOUSE_MAX_VALUE_BYTES")]
    pub max_value_bytes: Option<NonZeroU64>,

    /// Longest MQTT packet
    #[arg(long, value_name = "BYTES", env = "STATEHOUSE_MAX_PACKET_BYTES")]
    pub max_packet_bytes: Option<PacketBytes>,

    /// Most bytes that wait for one client before it is disconnected
    #[arg(long, value_name = "BYTES", env = "STATEHOUSE_MAX_QUEUE_BYTES")]
    pub max_queue_bytes: Option<NonZeroU64>,

    /// Most connections at once
    #[arg(long, value_name = "N", env = "STATEHOUSE_MAX_CONNECTIONS")]
    pub max_connections: Option<NonZeroU64>,
}

/// The file. Unknown keys are errors, since a misspelt setting that does nothing is worse than none.
#[derive(Deserialize, Debug, Default)]
#[serde(deny_unknown_fields)]
struct File {
    listen: Option<Vec<Listen>>,
    policy: Option<PathBuf>,
    log: Option<LogFormat>,
    log_filter: Option<String>,
    dialect: Option<DialectSetting>,
    node: Option<Node>,
    insecure: Option<bool>,
    max_keys: Option<NonZeroU64>,
    max_bytes: Option<NonZeroU64>,
    max_key_bytes: Option<KeyBytes>,
    max_value_bytes: Option<NonZeroU64>,
    max_packet_bytes: Option<PacketBytes>,
    max_queue_bytes: Option<NonZeroU64>,
    max_connections: Option<NonZeroU64>,
}

/// The settings of a server, all checked.
#[derive(Debug)]
pub struct Config {
    /// Where to listen.
    pub listen: Vec<SocketAddr>,
    /// The policy file; none means the built-in one.
    pub policy: Option<PathBuf>,
    /// How log lines look.
    pub log: LogFormat,
    /// What is logged.
    pub log_filter: String,
    /// A dialect forced on the current topic.
    pub dialect: Option<Dialect>,
    /// The store's name in versions.
    pub node: String,
    /// Bounds of the table.
    pub quota: Quota,
    /// Bounds of the broker.
    pub broker: statehouse_mqtt::Limits,
}

/// Why there is no configuration. Its text is a sentence for the operator.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read the configuration file {0}: {1}")]
    Read(PathBuf, std::io::Error),
    /// The file is far too large to be one.
    #[error("the configuration file {0} is larger than {max} bytes", max = limits::CONFIG_FILE_BYTES_MAX)]
    Size(PathBuf),
    /// A key or a value of the file is wrong.
    #[error("the configuration file {0} is wrong.\n{1}")]
    File(PathBuf, Box<toml::de::Error>),
    /// An address that others can reach, and nobody who has to say who he is.
    #[error(
        "{0} can be reached from other machines, and this version lets every client read and write \
         everything without authentication. Listen on 127.0.0.1 or [::1], or accept the risk with \
         --insecure (in the file: insecure = true)"
    )]
    Insecure(SocketAddr),
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
}

impl Config {
    /// Puts the sources together.
    pub fn load(flags: Flags) -> Result<Self, ConfigError> {
        let file = match &flags.config {
            Some(path) => read(path)?,
            None => File::default(),
        };
        let listen = if flags.listen.is_empty() {
            file.listen
        } else {
            Some(flags.listen)
        };
        let listen =
            listen.unwrap_or_else(|| vec![Listen(SocketAddr::from(([127, 0, 0, 1], 1883)))]);
        let listen: Vec<SocketAddr> = listen.into_iter().map(|Listen(address)| address).collect();
        let insecure = flags.insecure || file.insecure.unwrap_or(false);
        if let Some(open) = listen.iter().find(|address| !address.ip().is_loopback())
            && !insecure
        {
            return Err(ConfigError::Insecure(*open));
        }

        let pick = |flag: Option<NonZeroU64>, file: Option<NonZeroU64>, default: u64| {
            flag.or(file).map_or(default, NonZeroU64::get)
        };
        let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let mut broker = statehouse_mqtt::Limits::default();
        if let Some(PacketBytes(bytes)) = flags.max_packet_bytes.or(file.max_packet_bytes) {
            broker.packet_bytes_max = bytes;
        }
        if let Some(bytes) = flags.max_queue_bytes.or(file.max_queue_bytes) {
            broker.queue_bytes_max = size(bytes.get());
            broker.retained_bytes_max = broker.retained_bytes_max.min(broker.queue_bytes_max / 2);
        }
        if let Some(count) = flags.max_connections.or(file.max_connections) {
            broker.connections_max = size(count.get());
        }
        let packet = broker.packet_bytes_max as u64;
        let key_bytes_max = flags.max_key_bytes.or(file.max_key_bytes).map_or(
            limits::KEY_BYTES_MAX_DEFAULT.min(packet / 2),
            |KeyBytes(bytes)| bytes,
        );
        // Where only the packet or the queue was made smaller, keys and values follow.
        let queue = broker.queue_bytes_max as u64;
        let room = packet.min(queue.saturating_sub(limits::ENVELOPE_BYTES));
        let value_bytes_max =
            limits::VALUE_BYTES_MAX_DEFAULT.min(room.saturating_sub(key_bytes_max));
        let quota = Quota {
            keys_max: pick(flags.max_keys, file.max_keys, limits::KEYS_MAX_DEFAULT),
            bytes_max: pick(flags.max_bytes, file.max_bytes, limits::BYTES_MAX_DEFAULT),
            key_bytes_max,
            value_bytes_max: pick(flags.max_value_bytes, file.max_value_bytes, value_bytes_max),
        };
        if quota.value_bytes_max.saturating_add(quota.key_bytes_max) > packet {
            let (value, key) = (quota.value_bytes_max, quota.key_bytes_max);
            return Err(ConfigError::Packet { value, key, packet });
        }
        if quota.value_bytes_max.saturating_add(limits::ENVELOPE_BYTES) > queue {
            let value = quota.value_bytes_max;
            return Err(ConfigError::Queue { value, queue });
        }
        Ok(Self {
            listen,
            policy: flags.policy.or(file.policy),
            log: flags.log.or(file.log).unwrap_or(LogFormat::Text),
            log_filter: flags
                .log_filter
                .or(file.log_filter)
                .unwrap_or_else(|| "info".into()),
            dialect: match flags
                .dialect
                .or(file.dialect)
                .unwrap_or(DialectSetting::Auto)
            {
                DialectSetting::Auto => None,
                DialectSetting::Sdk => Some(Dialect::Sdk),
                DialectSetting::Documents => Some(Dialect::Documents),
            },
            node: flags
                .node
                .or(file.node)
                .map_or_else(|| "StateStore".into(), |Node(name)| name),
            quota,
            broker,
        })
    }
}

fn read(path: &PathBuf) -> Result<File, ConfigError> {
    let failed = |error| ConfigError::Read(path.clone(), error);
    let mut text = String::new();
    let file = fs::File::open(path).map_err(failed)?;
    file.take(limits::CONFIG_FILE_BYTES_MAX + 1)
        .read_to_string(&mut text)
        .map_err(failed)?;
    if text.len() as u64 > limits::CONFIG_FILE_BYTES_MAX {
        return Err(ConfigError::Size(path.clone()));
    }
    toml::from_str(&text).map_err(|error| ConfigError::File(path.clone(), Box::new(error)))
}

/// An address and port; `localhost` is 127.0.0.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listen(pub SocketAddr);

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numeric = match text.strip_prefix("localhost:") {
            Some(port) => format!("127.0.0.1:{port}"),
            None => text.to_owned(),
        };
        numeric.parse().map(Self).map_err(|_| {
            format!("`{text}` is not an address and port, such as 127.0.0.1:1883 or [::1]:1883")
        })
    }
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people
    Text,
    /// One JSON object a line
    Json,
}

/// Which form of the protocol the current topic speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DialectSetting {
    /// By each request's properties
    Auto,
    /// As the official client libraries parse it
    Sdk,
    /// As the published article prints it
    Documents,
}

/// The node of this store's versions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node(String);

impl FromStr for Node {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() || text.len() > 64 || text.contains([':', '\0']) {
            return Err("a node name has 1 to 64 bytes and no `:`".into());
        }
        Ok(Self(text.to_owned()))
    }
}

/// The longest MQTT packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketBytes(usize);

impl FromStr for PacketBytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // Below the first nothing works any more.
        match text.parse() {
            Ok(bytes @ 1_024..=limits::PACKET_BYTES_MAX_MAX) => Ok(Self(bytes)),
            _ => Err(format!(
                "a packet has at least 1024 and at most {} bytes",
                limits::PACKET_BYTES_MAX_MAX
            )),
        }
    }
}

/// The longest key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyBytes(u64);

impl FromStr for KeyBytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(bytes @ 1..=limits::KEY_BYTES_MAX_MAX) => Ok(Self(bytes)),
            _ => Err(format!(
                "a key has at most {} bytes",
                limits::KEY_BYTES_MAX_MAX
            )),
        }
    }
}

macro_rules! deserialize_by_parsing {
    ($($type:ty),*) => {$(
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_any(Parse::<Self>(std::marker::PhantomData))
            }
        }
    )*};
}
deserialize_by_parsing!(Listen, Node, PacketBytes, KeyBytes);

/// Reads a string or a number of the file through `FromStr`, so that flags and file say the same of a bad value.
struct Parse<T>(std::marker::PhantomData<T>);

impl<T: FromStr<Err = String>> de::Visitor<'_> for Parse<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a whole number")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<T, E> {
        number.to_string().parse().map_err(E::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> Result<Config, ConfigError> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("statehouse.toml");
        fs::write(&path, text).unwrap();
        Config::load(Flags {
            config: Some(path),
            ..Flags::default()
        })
    }

    #[test]
    fn nothing_given_is_a_loopback_store() {
        let config = Config::load(Flags::default()).unwrap();
        assert_eq!(config.listen, ["127.0.0.1:1883".parse().unwrap()]);
        assert_eq!((config.node.as_str(), config.dialect), ("StateStore", None));
        assert_eq!(config.quota.keys_max, limits::KEYS_MAX_DEFAULT);
    }

    #[test]
    fn flags_win_over_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("statehouse.toml");
        fs::write(
            &path,
            "max_keys = 5\nmax_bytes = 7000\nnode = \"gateway-7\"\n",
        )
        .unwrap();
        let flags = Flags {
            config: Some(path),
            max_keys: NonZeroU64::new(9),
            ..Flags::default()
        };
        let config = Config::load(flags).unwrap();
        assert_eq!((config.quota.keys_max, config.quota.bytes_max), (9, 7000));
        assert_eq!(config.node, "gateway-7");
    }

    #[test]
    fn errors_name_the_line() {
        for (text, line, says) in [
            (
                "max_keys = 5\nmaxbytes = 7\n",
                2,
                "unknown field `maxbytes`",
            ),
            ("\n\nmax_keys = 0\n", 3, "nonzero"),
            (
                "max_keys = 5\nlisten = [\"here\"]\n",
                2,
                "is not an address and port",
            ),
            ("dialect = \"redis\"\n", 1, "unknown variant `redis`"),
            ("max_packet_bytes = 12\n", 1, "at least 1024"),
            ("node = \"a:b\"\n", 1, "no `:`"),
            (
                "max_key_bytes = 1000000\n",
                1,
                "a key has at most 65535 bytes",
            ),
        ] {
            let error = file(text).unwrap_err().to_string();
            assert!(
                error.contains(&format!("line {line},")) && error.contains(says),
                "{error}"
            );
        }
    }

    #[test]
    fn only_loopback_without_authentication() {
        let error = file("listen = [\"127.0.0.1:0\", \"0.0.0.0:1883\"]\n").unwrap_err();
        assert!(
            error.to_string().contains("0.0.0.0:1883") && error.to_string().contains("--insecure")
        );
        assert!(file("listen = [\"0.0.0.0:1883\"]\ninsecure = true\n").is_ok());
        assert!(file("listen = [\"[::1]:1883\", \"127.9.9.9:1\"]\n").is_ok());
    }

    #[test]
    fn a_value_must_fit_into_a_packet() {
        let config = file("max_packet_bytes = 100000\n").unwrap();
        assert_eq!(
            config.quota.value_bytes_max,
            100_000 - limits::KEY_BYTES_MAX_DEFAULT
        );
        let config = file("max_queue_bytes = 500000\n").unwrap();
        assert!(config.quota.value_bytes_max < 500_000);
        let error = file("max_queue_bytes = 500000\nmax_value_bytes = 499999\n").unwrap_err();
        assert!(
            error.to_string().contains("raise max_queue_bytes"),
            "{error}"
        );
        let error = file("max_value_bytes = 5000000\n").unwrap_err();
        assert!(
            error.to_string().contains("raise max_packet_bytes"),
            "{error}"
        );
    }
}
