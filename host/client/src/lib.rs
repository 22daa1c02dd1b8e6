#![doc = include_str!("../README.md")]
//!
//! # Where to start
//!
//! [`Client::get`], [`Client::set`], [`Client::del`], [`Client::vdel`], [`Client::scan`],
//! [`Client::watch`], [`Client::lock`], and [`Client::invoke`] for commands of policies.
//!
//! The path of a request: `client` builds the command with `resp`. `session` adds a timestamp of
//! the client's `clock` and stores it as a `request` until the response arrives. `statehouse_link`
//! sends it through rumqttc and returns the response. Section numbers in the comments of this crate
//! refer to the project's protocol document.
#![forbid(unsafe_code)]

mod client;
mod clock;
mod duration;
mod error;
mod inbox;
mod lease;
mod limits;
mod lock;
mod meta;
mod options;
mod request;
mod resp;
mod scan;
mod session;
mod topics;
mod version;
mod watch;
mod watches;

pub use client::{Client, Condition, Response, SetOptions, SetResult, Value, VdelResult};
pub use duration::{DurationError, parse_duration};
pub use error::Error;
pub use limits::PACKET_BYTES_MAX;
pub use lock::{Lock, LockOptions};
pub use meta::Meta;
pub use options::{Login, Options, Tls};
pub use resp::RespValue;
pub use scan::Scan;
pub use version::{Version, VersionError};
pub use watch::{GapCause, Watch, WatchEvent, Watched};
