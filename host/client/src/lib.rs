//! A typed client of the MQTT 5 state store.
//!
//! A [`Client`] holds one MQTT connection and any number of requests over it: [`Client::get`],
//! [`Client::set`], [`Client::del`], [`Client::vdel`], [`Client::scan`], [`Client::watch`],
//! [`Client::lock`], and [`Client::invoke`] for commands of policies. It reconnects automatically. Until its timeout, a pending request is resent
//! with the same correlation data, so that the store can recognize the duplicate.
//!
//! ```no_run
//! # async fn example() -> Result<(), statehouse_client::Error> {
//! use std::time::Duration;
//! use statehouse_client::{Client, Options, SetOptions};
//!
//! let client = Client::connect(Options::default()).await?;
//! let minute = SetOptions { expiry: Some(Duration::from_secs(60)), ..SetOptions::default() };
//! client.set("room/temperature", "21.5", minute).await?;
//! if let Some(value) = client.get("room/temperature").await? {
//!     println!("{:?} at {}", value.bytes, value.version);
//! }
//! client.close().await;
//! # Ok(())
//! # }
//! ```
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
mod invoke;
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

pub use client::{Client, Condition, SetOptions, SetResult, Value, VdelResult};
pub use duration::{DurationError, parse_duration};
pub use error::Error;
pub use invoke::{RespValue, Response};
pub use limits::PACKET_BYTES_MAX;
pub use lock::{Lock, LockOptions};
pub use meta::Meta;
pub use options::{Login, Options, Tls};
pub use scan::Scan;
pub use version::{Version, VersionError};
pub use watch::{GapCause, Watch, WatchEvent};
