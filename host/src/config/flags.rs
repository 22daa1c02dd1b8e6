//! What `serve` takes as flags and environment variables.
//!
//! What enters: what clap reads. What leaves: what was given, each value by itself; it decides nothing.

use std::num::NonZeroU64;
use std::path::PathBuf;

use clap::builder::BoolishValueParser;

use super::{
    AccessFlags, AdminAddress, DialectSetting, DropAction, Durability, ForeignFlags, LimitFlags,
    ListenFlags, LogFormat, Node, Span, Threads,
};

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

    /// One of so many requests runs again on a fresh instance, to find hidden state (above 50000 requests per second no more than
    /// at 50000); 0 means none [default: 1024]
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

    /// Most bytes of them [default: a thirty-second of the memory, 64 MiB at most]
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

    /// A TOML file with any of these settings. Limits in it may change while the store runs: it is read again within a second or
    /// two
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
