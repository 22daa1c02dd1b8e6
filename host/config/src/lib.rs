//! The configuration of `serve`. Flags take precedence over environment variables, these over a
//! TOML file, and that over defaults.
//!
//! Yields a [`Config`] whose values are all checked, or an error that names the line and the
//! allowed values. [`limits`] are the bounds of everything in the host, with their reasons; many are
//! defaults of settings. [`percent`] decodes and encodes parts of URLs.
#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use statehouse_core::policy::GuardSettings;
use statehouse_core::request::Dialect;
use statehouse_core::store::{Mode, Retention, Supervision};

mod access;
mod admin;
mod bounds;
#[cfg(feature = "cluster")]
mod cluster;
#[cfg(not(feature = "cluster"))]
#[path = "no_cluster.rs"]
mod cluster;
mod error;
mod file;
mod flags;
mod follow;
mod foreign;
mod layer;
pub mod limits;
mod listeners;
mod memory;
mod open_files;
pub mod percent;
mod switch;
mod traces;
mod url;
mod values;

pub use access::{AccessConfig, AccessFlags, CertificateUsers, TokenConfig};
pub use admin::socket_path;
pub use admin::{AdminAddress, AdminPlace, MetricsAddress};
pub use bounds::named;
pub use bounds::{Bounds, LimitFlags};
pub use cluster::*;
pub use error::ConfigError;
pub use file::similar;
pub use flags::{Flags, PolicyFlags, StorageFlags};
pub use follow::{Followed, check, load};
pub use foreign::{ClientId, ForeignConfig, ForeignFlags, OutboxBounds, PresenceKind, Window};
pub use listeners::{Listen, ListenConfig, ListenError, ListenFlags, Origin, TlsFiles};
pub use switch::Switch;
pub use traces::{CollectorUrl, Ratio, TraceFlags, TracesConfig};
pub use url::{BrokerUrl, Scheme, Secret, password_in, read_password};
pub use values::{
    DialectSetting, DropAction, Durability, Fuel, KeyBytes, LogFormat, Node, PacketBytes, Span,
    Threads, nonzero_size, size,
};

use layer::Layer;
use memory::Memory;

pub use open_files::{
    admin_arriving_max, connections_for_open_files, handshakes_max, open_files_max,
};

/// The environment variable that sets the admin API's token. There is no flag for it, since other
/// accounts can see the flags of a process.
pub const ADMIN_TOKEN: &str = "STATEHOUSE_ADMIN_TOKEN";

/// The memory that default limits are fractions of, in bytes; none if the system does not report
/// it.
pub fn memory_bytes() -> Option<u64> {
    Memory::here().bytes()
}

/// One of so many equal parts of that memory, but at most `most` bytes.
pub fn part_of_memory(parts: u64, most: u64) -> u64 {
    memory_bytes().map_or(most, |memory| most.min(memory / parts))
}

/// The largest policy file that a store takes, in bytes: a file and what checks it must fit beside
/// the store.
pub fn policy_file_bytes_max() -> u64 {
    part_of_memory(4, limits::POLICY_FILE_BYTES_MAX)
}

/// How clients reach the store.
#[derive(Debug)]
pub enum TransportChoice {
    /// They connect to the embedded broker.
    Embedded(ListenConfig),
    /// They and the store are clients of a foreign broker.
    Foreign(Box<ForeignConfig>),
}

impl TransportChoice {
    /// The kind of broker.
    pub fn mode(&self) -> Mode {
        match self {
            Self::Embedded(_) => Mode::Embedded,
            Self::Foreign(_) => Mode::Foreign,
        }
    }
}

/// The checked settings of a server.
#[derive(Debug)]
pub struct Config {
    /// How clients reach the store.
    pub transport: TransportChoice,
    /// The cluster that this host belongs to.
    pub cluster: Option<ClusterConfig>,
    /// Authentication and authorization.
    pub access: AccessConfig,
    /// The policy to start with.
    pub policy: PolicyChoice,
    /// Where commands on this machine reach the admin API, if they do.
    pub admin: Option<AdminPlace>,
    /// Where operators on other machines reach it, if they do.
    pub admin_tls: Option<AdminTls>,
    /// Where metrics and probes alone are served.
    pub metrics: Option<AdminPlace>,
    /// From which time on a request is slow.
    pub slow_threshold: Duration,
    /// Where traces go, if they are on.
    pub traces: Option<TracesConfig>,
    /// Trusted public keys of policy signatures, or files with them.
    pub trusted_keys: Vec<String>,
    /// Whether unsigned policies are accepted too.
    pub allow_unsigned: bool,
    /// The watched policy directory, and what to do with its policies.
    pub policy_drop: Option<(PathBuf, DropAction)>,
    /// Whether each response carries the policy property.
    pub policy_property: bool,
    /// Persistence settings.
    pub storage: Storage,
    /// The format of log lines.
    pub log: LogFormat,
    /// The log filter.
    pub log_filter: String,
    /// A dialect forced on the current topic.
    pub dialect: Option<Dialect>,
    /// The node name of the store in versions.
    pub node: String,
    /// The limits at the start.
    pub bounds: Bounds,
    /// Number of threads that serve clients.
    pub threads: usize,
}

/// The admin API over TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminTls {
    /// The address and port.
    pub address: SocketAddr,
    /// The certificates: those of the listeners.
    pub files: TlsFiles,
}

/// The policy to start with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicyChoice {
    /// The last active one; in a new data directory the built-in one.
    Last,
    /// The built-in one.
    BuiltIn,
    /// A file.
    File(PathBuf),
}

/// Persistence settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Storage {
    /// The data directory.
    pub directory: PathBuf,
    /// When a write becomes durable.
    pub durability: Durability,
    /// The longest interval between two flushes, in milliseconds, unless every write waits for a
    /// flush.
    pub sync_interval_ms: u64,
    /// How long a flush waits for more writes, in milliseconds.
    pub commit_delay_ms: u64,
    /// Maximum age of history, in milliseconds.
    pub history_ms: u64,
    /// Maximum bytes of history.
    pub history_bytes: u64,
    /// How long and how many answered requests are remembered.
    pub duplicates: Retention,
    /// The limits within which recovery restores sessions.
    pub sessions: statehouse_mqtt::Limits,
    /// Start although the clock is behind the last recorded time.
    pub accept_clock: bool,
}

impl Config {
    /// Combines all sources.
    pub fn load(flags: Flags) -> Result<Self, ConfigError> {
        let file = match &flags.config {
            Some(path) => file::settings(path, &file::text(path)?)?,
            None => Flags::default(),
        };
        Self::of(flags.over(file))?.with_secrets()
    }

    /// Reads the secrets that the settings need from the start.
    fn with_secrets(mut self) -> Result<Self, ConfigError> {
        if let TransportChoice::Foreign(foreign) = &mut self.transport {
            foreign.read_password()?;
        }
        Ok(self)
    }

    /// Reads no other file, so that limits can be reloaded if other files are missing.
    fn of(settings: Flags) -> Result<Self, ConfigError> {
        let (config, wrong) = Self::gather(settings);
        wrong.into_iter().next().map_or(Ok(config), Err)
    }

    /// Combines the settings, with defaults instead of wrong ones, and returns what is wrong.
    fn gather(settings: Flags) -> (Self, Vec<ConfigError>) {
        let mut wrong = Wrong::default();
        let cluster = wrong.or_else(ClusterConfig::load(&settings), || None);
        let durability = settings.storage.durability.unwrap_or(Durability::Always);
        let attached = settings.foreign.broker.is_some();
        let memory = Memory::here();
        let foreign = settings.foreign.clone();
        let foreign = wrong.or_else(foreign.load(durability, memory), || None);
        let access = settings.access.clone().load();
        let has_access = access.is_ok();
        let mut access = wrong.or_else(access, || settings.access.clone().without_tokens());
        let AdminAddress { local, tls } = settings.policies.admin.clone().unwrap_or_default();
        access.users_are_operators = attached && tls.is_some();
        access.behind_broker = attached;
        if attached && access.is_about_connecting() {
            wrong.add(ConfigError::AccessBehindBroker);
        }
        let mut listeners = settings.listeners.clone();
        // Without the access settings it is unknown whether clients authenticate.
        if !has_access {
            listeners.insecure = Switch::from(true);
        }
        if attached && !listeners.listen.is_empty() {
            wrong.add(ConfigError::BrokerAndListen);
        }
        for name in of_embedded_broker(&settings).filter(|_| attached) {
            wrong.add(ConfigError::BehindBroker(name));
        }
        access.client_certificates = listeners.tls_client_ca.is_some();
        let listeners = wrong.or_else(listeners.load(&access, tls), || {
            settings.listeners.clone().unchecked()
        });
        let admin_tls = wrong.or_else(admin_tls(tls, listeners.tls.clone(), &access), || None);

        let limits = settings.limits.clone();
        let bounds = limits.load(attached, supervision(&settings.policies), memory);
        let mut bounds = wrong.or_else(bounds, Bounds::default);
        if let Some(most) = connections_for_open_files() {
            bounds.broker.connections_max = bounds.broker.connections_max.min(most);
        }
        let retention = retention(&settings.storage, memory, &mut wrong);
        let per_session = match foreign {
            // A foreign broker does not reveal when a client can no longer resend a request.
            Some(_) => 0,
            // An earlier run may have announced a larger Receive Maximum; the log records it.
            None => {
                let least = limits::RECEIVE_MAX_REMEMBERED_MIN;
                bounds.broker.receive_max.max(least).into()
            }
        };
        let storage = Storage {
            duplicates: Retention {
                per_session,
                ..retention
            },
            sessions: bounds.broker.clone(),
            ..Storage::of(&settings.storage, durability, &mut wrong)
        };
        let policies = settings.policies;
        let drop_action = policies.policy_drop_action.unwrap_or(DropAction::Load);
        let config = Self {
            transport: match foreign {
                Some(foreign) => TransportChoice::Foreign(Box::new(foreign)),
                None => TransportChoice::Embedded(listeners),
            },
            cluster,
            access,
            policy_property: policies.policy_property.is_on(),
            policy: match settings.policy {
                None => PolicyChoice::Last,
                Some(name) if name.as_os_str() == "builtin" => PolicyChoice::BuiltIn,
                Some(path) => PolicyChoice::File(path),
            },
            admin: wrong.or_else(admin(local), || None),
            admin_tls,
            metrics: (settings.metrics).map(|MetricsAddress(it)| AdminPlace::Tcp(it)),
            slow_threshold: slow_threshold(settings.slow_threshold, &mut wrong),
            traces: wrong.or_else(settings.traces.load(), || None),
            trusted_keys: policies.trusted_keys,
            allow_unsigned: policies.allow_unsigned.is_on(),
            policy_drop: (policies.policy_drop).map(|directory| (directory, drop_action)),
            storage,
            log: settings.log.unwrap_or(LogFormat::Text),
            log_filter: settings.log_filter.unwrap_or_else(|| "info".into()),
            dialect: match settings.dialect.unwrap_or(DialectSetting::Auto) {
                DialectSetting::Auto => None,
                DialectSetting::Sdk => Some(Dialect::Sdk),
                DialectSetting::Documents => Some(Dialect::Documents),
            },
            node: settings
                .node
                .map_or_else(|| "StateStore".into(), |Node(name)| name),
            bounds,
            threads: settings.threads.unwrap_or_default().0,
        };
        (config, wrong.0)
    }
}

/// The errors of settings. Each is found with defaults instead of the settings that were wrong
/// before.
#[derive(Default)]
struct Wrong(Vec<ConfigError>);

impl Wrong {
    fn add(&mut self, error: ConfigError) {
        self.0.push(error);
    }

    fn or_else<T>(
        &mut self,
        checked: Result<T, impl Into<ConfigError>>,
        default: impl FnOnce() -> T,
    ) -> T {
        checked.unwrap_or_else(|error| {
            self.add(error.into());
            default()
        })
    }

    /// A duration, or its default.
    fn time(&mut self, set: Option<Span>, default_ms: u64, bounds: TimeBounds) -> u64 {
        self.or_else(time(set, default_ms, bounds), || default_ms)
    }
}

/// The given settings of the embedded broker that a store behind a foreign broker must not ignore
/// silently: the operator would count on them. Its limits of memory and of numbers are no such
/// settings, because they have defaults, and every broker has limits of its own.
fn of_embedded_broker(settings: &Flags) -> impl Iterator<Item = &'static str> {
    let limits = &settings.limits;
    let all = [
        ("max_rate", limits.max_rate.is_some()),
        ("max_client_rate", limits.max_client_rate.is_some()),
        ("insecure", settings.listeners.insecure.is_on()),
    ];
    all.into_iter()
        .filter_map(|(name, is_given)| is_given.then_some(name))
}

/// An admin API that other machines can reach needs a token.
fn admin(local: Option<AdminPlace>) -> Result<Option<AdminPlace>, ConfigError> {
    match local {
        Some(AdminPlace::Tcp(open))
            if !open.ip().is_loopback() && std::env::var_os(ADMIN_TOKEN).is_none() =>
        {
            Err(ConfigError::Admin(open))
        }
        admin => Ok(admin),
    }
}

/// An admin API over TLS needs a way to log in.
fn admin_tls(
    address: Option<SocketAddr>,
    files: Option<TlsFiles>,
    access: &AccessConfig,
) -> Result<Option<AdminTls>, ConfigError> {
    let Some((address, files)) = address.zip(files) else {
        return Ok(None);
    };
    match access.users.is_some() || std::env::var_os(ADMIN_TOKEN).is_some() {
        true => Ok(Some(AdminTls { address, files })),
        false => Err(ConfigError::AdminUsers(address)),
    }
}

fn slow_threshold(set: Option<Span>, wrong: &mut Wrong) -> Duration {
    // Cannot truncate: the default is far below the greatest time.
    let default_ms = limits::SLOW_THRESHOLD_DEFAULT.as_millis() as u64;
    let bounds = ("slow_threshold", 1, "1ms", 3_600_000, "1h");
    Duration::from_millis(wrong.time(set, default_ms, bounds))
}

fn supervision(settings: &PolicyFlags) -> Supervision {
    let default = Supervision::default();
    Supervision {
        guard: GuardSettings {
            failures_max: settings
                .guard_failures
                .unwrap_or(default.guard.failures_max),
            fuel_mean_max: settings.guard_fuel.unwrap_or(default.guard.fuel_mean_max),
        },
        purity_every: settings.purity_sample.unwrap_or(default.purity_every),
    }
}

fn retention(settings: &StorageFlags, memory: Memory, wrong: &mut Wrong) -> Retention {
    let or = |set: Option<NonZeroU64>, default: u64| set.map_or(default, NonZeroU64::get);
    let bytes_max = memory.part(1, limits::DUPLICATE_BYTES_MAX_DEFAULT);
    Retention {
        window_ms: wrong.time(
            settings.duplicate_window,
            limits::DUPLICATE_WINDOW_MS_DEFAULT,
            ("duplicate_window", 60_000, "1m", 7 * 86_400_000, "7d"),
        ),
        count_max: or(settings.max_duplicates, limits::DUPLICATES_MAX_DEFAULT),
        bytes_max: or(settings.max_duplicate_bytes, bytes_max),
        ..Retention::default()
    }
}

impl Storage {
    /// The settings that depend on no other part, and defaults for the others.
    fn of(settings: &StorageFlags, durability: Durability, wrong: &mut Wrong) -> Self {
        let directory = settings.data.clone();
        Self {
            directory: directory.unwrap_or_else(|| PathBuf::from("statehouse-data")),
            durability,
            sync_interval_ms: wrong.time(
                settings.sync_interval,
                1_000,
                ("sync_interval", 1, "1ms", 3_600_000, "1h"),
            ),
            commit_delay_ms: wrong.time(
                settings.commit_delay,
                0,
                ("commit_delay", 0, "0ms", 5, "5ms"),
            ),
            history_ms: settings
                .history_retention
                .map_or(limits::HISTORY_MS_DEFAULT, Span::ms),
            history_bytes: settings
                .history_bytes
                .unwrap_or(limits::HISTORY_BYTES_DEFAULT),
            sessions: statehouse_mqtt::Limits::default(),
            duplicates: Retention::default(),
            accept_clock: settings.accept_clock.is_on(),
        }
    }
}

/// The name of a duration, and its limits in milliseconds and with units.
type TimeBounds = (&'static str, u64, &'static str, u64, &'static str);

fn time(
    set: Option<Span>,
    default_ms: u64,
    (name, least_ms, least, most_ms, most): TimeBounds,
) -> Result<u64, ConfigError> {
    match set.map_or(default_ms, Span::ms) {
        ms if (least_ms..=most_ms).contains(&ms) => Ok(ms),
        _ => Err(ConfigError::Time { name, least, most }),
    }
}

#[cfg(test)]
mod tests;
