//! The configuration of `serve`: flags over environment over a TOML file over defaults.
//!
//! What enters: what clap read of flags and environment, and the text of a file. What leaves: a
//! [`Config`] with every value checked, or an error that names the line and says what is allowed.

use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::path::PathBuf;

use crate::limits;
use crate::policy::GuardSettings;
use crate::request::Dialect;
use crate::store::{Mode, Retention, Supervision};
use clap::builder::BoolishValueParser;

mod access;
mod admin;
mod bounds;
mod file;
mod follow;
mod foreign;
mod listeners;
mod url;
mod values;

pub use access::{AccessConfig, AccessFlags, CertificateUsers, TokenConfig};
pub(crate) use admin::socket_path;
pub use admin::{AdminAddress, AdminPlace};
pub(crate) use bounds::named;
pub use bounds::{Bounds, LimitFlags};
pub use follow::follow;
pub use foreign::{ClientId, ForeignConfig, ForeignFlags, KickKind, PresenceKind, Window};
pub use listeners::{Listen, ListenConfig, ListenError, ListenFlags, Origin, TlsFiles};
pub use url::{BrokerUrl, Scheme, Secret, read_password};
pub use values::{
    DialectSetting, DropAction, Durability, KeyBytes, LogFormat, Node, PacketBytes, Span, Threads,
};

use file::File;

/// The variable with the administration's token, where it is to be known before the start. Not a flag, since others see these.
pub(crate) const ADMIN_TOKEN: &str = "STATEHOUSE_ADMIN_TOKEN";

/// What `statehouse serve` accepts as flags, environment variables and, under the same names with
/// underscores, as keys of the file.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Flags {
    /// A policy (.wasm component or core module), or `builtin` for the standard one; without this the policy
    /// that the data directory was last used with. A file that the host itself rolled back is held ready, and answers
    /// again after `statehouse policy promote`
    #[arg(long, value_name = "FILE", env = "STATEHOUSE_POLICY")]
    pub policy: Option<PathBuf>,

    /// Where the administration listens, for `statehouse policy` and for metrics, or `off`. Port 0 takes a free one; the file
    /// `admin` in the data directory says which, with a token that is new at each start. Metrics are scraped, and other machines
    /// come in, with a token of yours in STATEHOUSE_ADMIN_TOKEN. A socket of the file system (unix:/run/statehouse/admin) is for
    /// the store's own account and for root, without a token [default: 127.0.0.1:0]
    #[arg(
        long,
        value_name = "ADDR:PORT|unix:PATH",
        env = "STATEHOUSE_ADMIN",
        help_heading = "Policies"
    )]
    pub admin: Option<AdminAddress>,

    /// A public key (a file, or its digits) whose owner may ship policies; may be given more than once. Without one every
    /// policy is taken that reaches the store, and no order over MQTT
    #[arg(
        long,
        value_name = "KEY",
        env = "STATEHOUSE_TRUSTED_KEYS",
        value_delimiter = ',',
        help_heading = "Policies"
    )]
    pub trusted_keys: Vec<String>,

    /// Take unsigned policies although there are trusted keys; orders over MQTT need their signature all the same
    #[arg(long, env = "STATEHOUSE_ALLOW_UNSIGNED", value_parser = BoolishValueParser::new(), help_heading = "Policies")]
    pub allow_unsigned: bool,

    /// A directory that is watched: policies (*.wasm) that appear there are loaded
    #[arg(
        long,
        value_name = "DIR",
        env = "STATEHOUSE_POLICY_DROP",
        help_heading = "Policies"
    )]
    pub policy_drop: Option<PathBuf>,

    /// What becomes of them [default: load]
    #[arg(
        long,
        value_name = "ACTION",
        env = "STATEHOUSE_POLICY_DROP_ACTION",
        help_heading = "Policies"
    )]
    pub policy_drop_action: Option<DropAction>,

    /// Failed requests among its last 1000 that roll a policy back; 0 tolerates all [default: 10]
    #[arg(
        long,
        value_name = "N",
        env = "STATEHOUSE_GUARD_FAILURES",
        help_heading = "Policies"
    )]
    pub guard_failures: Option<u32>,

    /// Fuel of a request, on average over the last 1000, that rolls a policy back; 0 tolerates all [default: 0]
    #[arg(
        long,
        value_name = "FUEL",
        env = "STATEHOUSE_GUARD_FUEL",
        help_heading = "Policies"
    )]
    pub guard_fuel: Option<u64>,

    /// One of so many requests runs again on a fresh instance, to find hidden state; 0 means none [default: 1024]
    #[arg(
        long,
        value_name = "N",
        env = "STATEHOUSE_PURITY_SAMPLE",
        help_heading = "Policies"
    )]
    pub purity_sample: Option<u32>,

    /// Let each answer carry the user property policy=NAME@DIGEST
    #[arg(long, env = "STATEHOUSE_POLICY_PROPERTY", value_parser = BoolishValueParser::new(), help_heading = "Policies")]
    pub policy_property: bool,

    /// Where everything is kept; one process at a time can use a directory [default: statehouse-data]
    #[arg(
        long,
        value_name = "DIR",
        env = "STATEHOUSE_DATA",
        help_heading = "Durability"
    )]
    pub data: Option<PathBuf>,

    /// When a write is on disk [default: always]
    #[arg(
        long,
        value_name = "WHEN",
        env = "STATEHOUSE_DURABILITY",
        help_heading = "Durability"
    )]
    pub durability: Option<Durability>,

    /// How much a power cut may lose under --durability interval [default: 1s]
    #[arg(
        long,
        value_name = "TIME",
        env = "STATEHOUSE_SYNC_INTERVAL",
        help_heading = "Durability"
    )]
    pub sync_interval: Option<Span>,

    /// Wait this long for more writes to share a flush: spares flash, costs latency [default: 0ms]
    #[arg(
        long,
        value_name = "TIME",
        env = "STATEHOUSE_COMMIT_DELAY",
        help_heading = "Durability"
    )]
    pub commit_delay: Option<Span>,

    /// How far back `history`, `--as-of` and `replay` reach at most [default: 1d]
    #[arg(
        long,
        value_name = "TIME",
        env = "STATEHOUSE_HISTORY_RETENTION",
        help_heading = "Durability"
    )]
    pub history_retention: Option<Span>,

    /// Most bytes on disk that are kept for history alone [default: 268435456]
    #[arg(
        long,
        value_name = "BYTES",
        env = "STATEHOUSE_HISTORY_BYTES",
        help_heading = "Durability"
    )]
    pub history_bytes: Option<u64>,

    /// The longest an answered request is remembered, to answer a redelivery alike [default: 10m]
    #[arg(
        long,
        value_name = "TIME",
        env = "STATEHOUSE_DUPLICATE_WINDOW",
        help_heading = "Durability"
    )]
    pub duplicate_window: Option<Span>,

    /// Most requests that are remembered beyond the last ones of live sessions [default: 100000]
    #[arg(
        long,
        value_name = "N",
        env = "STATEHOUSE_MAX_DUPLICATES",
        help_heading = "Durability"
    )]
    pub max_duplicates: Option<NonZeroU64>,

    /// Most bytes of them [default: 67108864]
    #[arg(
        long,
        value_name = "BYTES",
        env = "STATEHOUSE_MAX_DUPLICATE_BYTES",
        help_heading = "Durability"
    )]
    pub max_duplicate_bytes: Option<NonZeroU64>,

    /// Start although the system clock is more than a minute behind the last recorded time
    #[arg(long, env = "STATEHOUSE_ACCEPT_CLOCK", value_parser = BoolishValueParser::new(), help_heading = "Durability")]
    pub accept_clock: bool,

    /// A TOML file with any of these settings. Limits in it may change while the store runs: it is read again within a second
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

    /// Threads that serve clients: more share the work of sockets and packets, and wait for each other where the store
    /// decides [default: half of the cores, 4 at most]
    #[arg(long, value_name = "N", env = "STATEHOUSE_THREADS")]
    pub threads: Option<Threads>,

    /// How much there may be.
    #[command(flatten)]
    pub limits: LimitFlags,

    /// Where clients connect.
    #[command(flatten)]
    pub listeners: ListenFlags,

    /// Who may connect.
    #[command(flatten)]
    pub access: AccessFlags,

    /// Instead of listening.
    #[command(flatten)]
    pub foreign: ForeignFlags,
}

/// Where clients are.
#[derive(Debug)]
pub enum TransportChoice {
    /// They connect here.
    Embedded(ListenConfig),
    /// They, and the store, are clients of a foreign broker.
    Foreign(Box<ForeignConfig>),
}

impl TransportChoice {
    /// Whose broker it is.
    pub fn mode(&self) -> Mode {
        match self {
            Self::Embedded(_) => Mode::Embedded,
            Self::Foreign(_) => Mode::Foreign,
        }
    }
}

/// The settings of a server, all checked.
#[derive(Debug)]
pub struct Config {
    /// Where clients are.
    pub transport: TransportChoice,
    /// Who may connect here.
    pub access: AccessConfig,
    /// Which policy is to answer.
    pub policy: PolicyChoice,
    /// Where the administration listens, if it does.
    pub admin: Option<AdminPlace>,
    /// Whose policies are taken: public keys, or files with them.
    pub trusted_keys: Vec<String>,
    /// Whether unsigned policies are taken too.
    pub allow_unsigned: bool,
    /// The directory that is watched for policies, and what becomes of them.
    pub policy_drop: Option<(PathBuf, DropAction)>,
    /// Whether each answer says which policy gave it.
    pub policy_property: bool,
    /// What is kept, and how.
    pub storage: Storage,
    /// How log lines look.
    pub log: LogFormat,
    /// What is logged.
    pub log_filter: String,
    /// A dialect forced on the current topic.
    pub dialect: Option<Dialect>,
    /// The store's name in versions.
    pub node: String,
    /// What clients may take, at the start.
    pub bounds: Bounds,
    /// How many threads serve clients.
    pub threads: usize,
}

/// Which policy is to answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicyChoice {
    /// The one that answered last; in a new data directory the built-in one.
    Last,
    /// The built-in one.
    BuiltIn,
    /// A file.
    File(PathBuf),
}

/// What is kept over a restart, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Storage {
    /// The data directory.
    pub directory: PathBuf,
    /// When a write is on disk.
    pub durability: Durability,
    /// The longest between two flushes, in milliseconds, where not every write waits for one.
    pub sync_interval_ms: u64,
    /// How long a flush waits for more writes, in milliseconds.
    pub commit_delay_ms: u64,
    /// How old history may become, in milliseconds.
    pub history_ms: u64,
    /// How large it may become.
    pub history_bytes: u64,
    /// What is remembered of answered requests.
    pub duplicates: Retention,
    /// Start with a clock that went back.
    pub accept_clock: bool,
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

impl Config {
    /// Puts the sources together.
    pub fn load(flags: Flags) -> Result<Self, ConfigError> {
        let file = match &flags.config {
            Some(path) => file::parse(path, &file::text(path)?)?,
            None => File::default(),
        };
        Self::of(flags, file)
    }

    fn of(flags: Flags, mut file: File) -> Result<Self, ConfigError> {
        let durability = flags
            .durability
            .or(file.durability)
            .unwrap_or(Durability::Always);
        let foreign = flags.foreign.over(file.foreign()).load(durability)?;
        let mut access = flags.access.over(file.access())?;
        if foreign.is_some() && access.is_about_connecting() {
            return Err(ConfigError::AccessBehindBroker);
        }
        let listeners = flags.listeners.over(file.listeners());
        if foreign.is_some() && !listeners.listen.is_empty() {
            return Err(ConfigError::BrokerAndListen);
        }
        access.client_certificates = listeners.tls_client_ca.is_some();
        let listeners = listeners.load(&access)?;

        let limits = flags.limits.over(file.limits());
        let admin = flags.admin.or(file.admin);
        let AdminAddress(admin) = admin.unwrap_or_default();
        if let Some(AdminPlace::Tcp(open)) = admin
            && !open.ip().is_loopback()
            && std::env::var_os(ADMIN_TOKEN).is_none()
        {
            return Err(ConfigError::Admin(open));
        }
        let trusted_keys = match flags.trusted_keys.is_empty() {
            true => file.trusted_keys.unwrap_or_default(),
            false => flags.trusted_keys,
        };
        let drop_action = flags.policy_drop_action.or(file.policy_drop_action);

        let default = Supervision::default();
        let supervision = Supervision {
            guard: GuardSettings {
                failures_max: (flags.guard_failures.or(file.guard_failures))
                    .unwrap_or(default.guard.failures_max),
                fuel_mean_max: (flags.guard_fuel.or(file.guard_fuel))
                    .unwrap_or(default.guard.fuel_mean_max),
            },
            purity_every: (flags.purity_sample.or(file.purity_sample))
                .unwrap_or(default.purity_every),
        };
        let bounds = limits.load(foreign.is_some(), supervision)?;
        let pick = |flag: Option<NonZeroU64>, file: Option<NonZeroU64>, default: u64| {
            flag.or(file).map_or(default, NonZeroU64::get)
        };
        let storage = Storage {
            directory: flags
                .data
                .or(file.data)
                .unwrap_or_else(|| PathBuf::from("statehouse-data")),
            durability,
            sync_interval_ms: time(
                flags.sync_interval.or(file.sync_interval),
                1_000,
                ("sync_interval", 1, "1ms", 3_600_000, "1h"),
            )?,
            commit_delay_ms: time(
                flags.commit_delay.or(file.commit_delay),
                0,
                ("commit_delay", 0, "0ms", 5, "5ms"),
            )?,
            history_ms: flags
                .history_retention
                .or(file.history_retention)
                .map_or(limits::HISTORY_MS_DEFAULT, Span::ms),
            history_bytes: flags
                .history_bytes
                .or(file.history_bytes)
                .unwrap_or(limits::HISTORY_BYTES_DEFAULT),
            duplicates: Retention {
                window_ms: time(
                    flags.duplicate_window.or(file.duplicate_window),
                    limits::DUPLICATE_WINDOW_MS_DEFAULT,
                    ("duplicate_window", 60_000, "1m", 7 * 86_400_000, "7d"),
                )?,
                count_max: pick(
                    flags.max_duplicates,
                    file.max_duplicates,
                    limits::DUPLICATES_MAX_DEFAULT,
                ),
                bytes_max: pick(
                    flags.max_duplicate_bytes,
                    file.max_duplicate_bytes,
                    limits::DUPLICATE_BYTES_MAX_DEFAULT,
                ),
                // Behind a foreign broker nothing tells when a client cannot send a request again any more.
                per_session: match foreign {
                    Some(_) => 0,
                    None => bounds.broker.receive_max.into(),
                },
            },
            accept_clock: flags.accept_clock || file.accept_clock.unwrap_or(false),
        };
        Ok(Self {
            transport: match foreign {
                Some(foreign) => TransportChoice::Foreign(Box::new(foreign)),
                None => TransportChoice::Embedded(listeners),
            },
            access,
            policy_property: flags.policy_property || file.policy_property.unwrap_or(false),
            policy: match flags.policy.or(file.policy) {
                None => PolicyChoice::Last,
                Some(name) if name.as_os_str() == "builtin" => PolicyChoice::BuiltIn,
                Some(path) => PolicyChoice::File(path),
            },
            admin,
            trusted_keys,
            allow_unsigned: flags.allow_unsigned || file.allow_unsigned.unwrap_or(false),
            policy_drop: flags
                .policy_drop
                .or(file.policy_drop)
                .map(|directory| (directory, drop_action.unwrap_or(DropAction::Load))),
            storage,
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
            bounds,
            threads: flags.threads.or(file.threads).unwrap_or_default().0,
        })
    }
}

/// A setting of time with a default, its name and its bounds in milliseconds and in words.
fn time(
    set: Option<Span>,
    default_ms: u64,
    (name, least_ms, least, most_ms, most): (&'static str, u64, &'static str, u64, &'static str),
) -> Result<u64, ConfigError> {
    match set.map_or(default_ms, Span::ms) {
        ms if (least_ms..=most_ms).contains(&ms) => Ok(ms),
        _ => Err(ConfigError::Time { name, least, most }),
    }
}

#[cfg(test)]
mod tests;
