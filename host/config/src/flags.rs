//! The settings of `serve`, declared once: flags, environment variables and keys of the file. clap
//! checks each value alone; checks that concern several values are in the parent module.

use std::num::NonZeroU64;
use std::path::PathBuf;

use clap::ArgAction;

use super::layer::settings;
use super::switch::Switch;
use super::values;
use super::{
    AccessFlags, AdminAddress, ClusterFlags, DialectSetting, DropAction, Durability, ForeignFlags,
    LimitFlags, ListenFlags, LogFormat, MetricsAddress, Node, Span, Threads, TraceFlags,
};

settings! {
    /// Settings of `statehouse serve`: flags, environment variables and, under the same names with
    /// underscores, keys of the file.
    pub struct Flags {
        /// The active policy: a .wasm component or core module, or `builtin` for the standard
        /// policy [default: the policy that the data directory last used]. A policy that the host
        /// rolled back is only loaded; it becomes active again by `statehouse policy promote`
        #[arg(long, value_name = "FILE", env = "STATEHOUSE_POLICY")]
        pub policy: Option<PathBuf>,

        /// Also serve metrics and health probes at this address, without a token and nothing else:
        /// for scrapers. Whoever can connect can read them
        #[arg(long, value_name = "ADDR:PORT", env = "STATEHOUSE_METRICS")]
        pub metrics: Option<MetricsAddress>,

        /// A TOML file with any of these settings. The file is reloaded within two seconds of a
        /// change, and its limits then apply to the running store
        #[arg(long, value_name = "FILE", env = "STATEHOUSE_CONFIG")]
        #[serde(skip)]
        pub config: Option<PathBuf>,

        /// Format of log lines on standard error [default: text]
        #[arg(long, value_name = "FORMAT", env = "STATEHOUSE_LOG")]
        pub log: Option<LogFormat>,

        /// The log filter: a level, `off`, or directives such as `warn,statehouse=debug`
        /// [default: info]
        #[arg(long, value_name = "FILTER", env = "STATEHOUSE_LOG_FILTER")]
        pub log_filter: Option<String>,

        /// From which time on a request is slow, for `statehouse slow` [default: 100ms]
        #[arg(long, value_name = "TIME", env = "STATEHOUSE_SLOW_THRESHOLD")]
        pub slow_threshold: Option<Span>,

        /// The protocol dialect on the current topic; `auto` chooses by the properties of each
        /// request [default: auto]
        #[arg(long, value_name = "DIALECT", env = "STATEHOUSE_DIALECT")]
        pub dialect: Option<DialectSetting>,

        /// The node name of this store in versions. It also changes the versions of stored values, so
        /// versions and fencing tokens that clients hold no longer match [default: StateStore]
        #[arg(long, value_name = "NAME", env = "STATEHOUSE_NODE")]
        pub node: Option<Node>,

        /// Threads that serve clients. More threads share the work of sockets and packets, but
        /// decide requests one at a time [default: half of the cores, at most 4]
        #[arg(long, value_name = "N", env = "STATEHOUSE_THREADS")]
        pub threads: Option<Threads>,

        /// Policies from outside, their supervision, and the admin API.
        #[command(flatten)]
        #[serde(skip)]
        pub policies: PolicyFlags,

        /// The data directory.
        #[command(flatten)]
        #[serde(skip)]
        pub storage: StorageFlags,

        /// Limits of clients.
        #[command(flatten)]
        #[serde(skip)]
        pub limits: LimitFlags,

        /// Listeners.
        #[command(flatten)]
        #[serde(skip)]
        pub listeners: ListenFlags,

        /// Authentication and authorization.
        #[command(flatten)]
        #[serde(skip)]
        pub access: AccessFlags,

        /// The foreign broker, instead of listeners.
        #[command(flatten)]
        #[serde(skip)]
        pub foreign: ForeignFlags,

        /// The cluster, instead of a log on this machine.
        #[command(flatten)]
        #[serde(skip)]
        pub cluster: ClusterFlags,

        /// Traces of requests.
        #[command(flatten)]
        #[serde(skip)]
        pub traces: TraceFlags,
    }
}

settings! {
    /// The settings of `serve` for policies and for the admin API, which loads them.
    #[command(next_help_heading = "Policies")]
    pub struct PolicyFlags {
        /// Where the admin API listens (for `statehouse policy` and for metrics), or `off`. Port 0
        /// chooses a free port. The file `admin` in the data directory holds the address and a
        /// token that is new at each start. Set a token of your own in STATEHOUSE_ADMIN_TOKEN for
        /// metrics scrapers and other machines. A Unix socket (unix:/run/statehouse/admin) needs no
        /// token; only the store's own account and root can connect to it. For operators on other
        /// machines add https://ADDR:PORT, after a comma or alone: it uses --tls-cert and admits
        /// users with a role (`statehouse user add NAME --role read`) [default: 127.0.0.1:0]
        #[arg(long, value_name = "ADDR:PORT|unix:PATH|https://ADDR:PORT", env = "STATEHOUSE_ADMIN")]
        pub admin: Option<AdminAddress>,

        /// A public key (a file, or its digits) whose owner may deliver policies; may be given more
        /// than once. Without such keys the store accepts every policy from the admin API and the
        /// watched directory, and no orders over MQTT
        #[arg(long, value_name = "KEY", env = "STATEHOUSE_TRUSTED_KEYS", value_delimiter = ',')]
        #[serde(deserialize_with = "values::nonempty")]
        pub trusted_keys: Vec<String>,

        /// Accept unsigned policies although there are trusted keys; orders over MQTT still need a
        /// signature
        #[arg(long, env = "STATEHOUSE_ALLOW_UNSIGNED", action = ArgAction::SetTrue, default_value = Switch::UNSET)]
        pub allow_unsigned: Switch,

        /// A directory to watch: policies (*.wasm) that appear there are loaded
        #[arg(long, value_name = "DIR", env = "STATEHOUSE_POLICY_DROP")]
        pub policy_drop: Option<PathBuf>,

        /// What to do with policies from the watched directory [default: load]
        #[arg(long, value_name = "ACTION", env = "STATEHOUSE_POLICY_DROP_ACTION")]
        pub policy_drop_action: Option<DropAction>,

        /// Roll a policy back after this many failed requests among its last 1000; 0 means never
        /// [default: 10]
        #[arg(long, value_name = "N", value_parser = values::number::<u32>, env = "STATEHOUSE_GUARD_FAILURES")]
        #[serde(deserialize_with = "values::file_number")]
        pub guard_failures: Option<u32>,

        /// Roll a policy back if the average fuel of its last 1000 requests exceeds this; 0 means
        /// never [default: 0]
        #[arg(long, value_name = "FUEL", value_parser = values::number::<u64>, env = "STATEHOUSE_GUARD_FUEL")]
        #[serde(deserialize_with = "values::file_number")]
        pub guard_fuel: Option<u64>,

        /// Re-execute one of every N requests on a fresh instance to detect hidden state (above
        /// 50000 requests per second, no more than at 50000); 0 means none [default: 1024]
        #[arg(long, value_name = "N", value_parser = values::number::<u32>, env = "STATEHOUSE_PURITY_SAMPLE")]
        #[serde(deserialize_with = "values::file_number")]
        pub purity_sample: Option<u32>,

        /// Add the user property policy=NAME@DIGEST to each response
        #[arg(long, env = "STATEHOUSE_POLICY_PROPERTY", action = ArgAction::SetTrue, default_value = Switch::UNSET)]
        pub policy_property: Switch,
    }
}

settings! {
    /// The settings of `serve` for its data directory.
    #[command(next_help_heading = "Durability")]
    pub struct StorageFlags {
        /// The data directory; only one process at a time can use it [default: statehouse-data]
        #[arg(long, value_name = "DIR", env = "STATEHOUSE_DATA")]
        pub data: Option<PathBuf>,

        /// When a write becomes durable [default: always]
        #[arg(long, value_name = "WHEN", env = "STATEHOUSE_DURABILITY")]
        pub durability: Option<Durability>,

        /// The longest period of writes that a power cut may lose with --durability interval
        /// [default: 1s]
        #[arg(long, value_name = "TIME", env = "STATEHOUSE_SYNC_INTERVAL")]
        pub sync_interval: Option<Span>,

        /// Wait this long, at most 5ms, for more writes to share a flush; spares flash memory, adds
        /// latency [default: 0ms]
        #[arg(long, value_name = "TIME", env = "STATEHOUSE_COMMIT_DELAY")]
        pub commit_delay: Option<Span>,

        /// How long history is kept for `history`, `--as-of` and `replay`. That since the second
        /// newest snapshot is kept at any age, so a store with few writes keeps it longer [default:
        /// 1d]
        #[arg(long, value_name = "TIME", env = "STATEHOUSE_HISTORY_RETENTION")]
        pub history_retention: Option<Span>,

        /// Maximum bytes on disk that are kept only for history, beyond the second newest snapshot
        /// and its log [default: 268435456]
        #[arg(long, value_name = "BYTES", value_parser = values::size, env = "STATEHOUSE_HISTORY_BYTES")]
        #[serde(deserialize_with = "values::file_size")]
        pub history_bytes: Option<u64>,

        /// How long an answered request is remembered at most, so that a redelivery gets the same
        /// response [default: 10m]
        #[arg(long, value_name = "TIME", env = "STATEHOUSE_DUPLICATE_WINDOW")]
        pub duplicate_window: Option<Span>,

        /// Maximum number of remembered requests, beyond the latest ones of live sessions [default:
        /// 100000]
        #[arg(long, value_name = "N", value_parser = values::number::<NonZeroU64>, env = "STATEHOUSE_MAX_DUPLICATES")]
        #[serde(deserialize_with = "values::file_number")]
        pub max_duplicates: Option<NonZeroU64>,

        /// Maximum bytes of remembered requests [default: a thirty-second of the memory, at most 64
        /// MiB]
        #[arg(long, value_name = "BYTES", value_parser = values::nonzero_size, env = "STATEHOUSE_MAX_DUPLICATE_BYTES")]
        #[serde(deserialize_with = "values::nonzero_file_size")]
        pub max_duplicate_bytes: Option<NonZeroU64>,

        /// Start although the system clock is more than a minute behind the last recorded time
        #[arg(long, env = "STATEHOUSE_ACCEPT_CLOCK", action = ArgAction::SetTrue, default_value = Switch::UNSET)]
        pub accept_clock: Switch,
    }
}
