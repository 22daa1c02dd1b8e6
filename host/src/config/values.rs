//! The types of settings, which parse flags and keys of the file with the same error texts.

use std::fmt;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::str::FromStr;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{self, Deserializer};

use super::admin::AdminAddress;
use super::foreign::{ClientId, Window};
use super::listeners::{Listen, Origin};
use super::url::BrokerUrl;
use crate::limits;

/// An address and port; `localhost` is 127.0.0.1.
pub(super) fn socket_address(text: &str) -> Option<SocketAddr> {
    match text.strip_prefix("localhost:") {
        Some(port) => format!("127.0.0.1:{port}").parse().ok(),
        None => text.parse().ok(),
    }
}

/// What to do with a policy that appears in the watched directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DropAction {
    /// Load it
    Load,
    /// Load it and compare it with the active policy
    Shadow,
    /// Load it and make it the active policy
    Promote,
}

/// The format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Readable text
    Text,
    /// One JSON object per line
    Json,
}

/// The protocol dialect of the current topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DialectSetting {
    /// Chosen by the properties of each request
    Auto,
    /// The dialect that the official client libraries parse
    Sdk,
    /// The dialect that the published article prints
    Documents,
}

/// The node name in this store's versions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node(pub(super) String);

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
pub struct PacketBytes(pub(super) usize);

impl FromStr for PacketBytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // A smaller limit would exclude ordinary requests.
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
pub struct KeyBytes(pub(super) u64);

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

/// The most fuel of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fuel(u64);

impl Fuel {
    /// In wasmtime's units; an instruction uses about one.
    pub fn get(self) -> u64 {
        self.0
    }
}

impl Default for Fuel {
    fn default() -> Self {
        Self(limits::FUEL_PER_CALL_DEFAULT)
    }
}

impl FromStr for Fuel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(fuel @ limits::FUEL_PER_CALL_MIN..=limits::FUEL_PER_CALL_MAX) => Ok(Self(fuel)),
            _ => Err(format!(
                "the fuel limit of a request must be {} to {}",
                limits::FUEL_PER_CALL_MIN,
                limits::FUEL_PER_CALL_MAX
            )),
        }
    }
}

/// Threads that serve clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Threads(pub(super) usize);

impl FromStr for Threads {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(count @ 1..=limits::SERVE_THREADS_MAX) => Ok(Self(count)),
            _ => Err(format!(
                "the store can serve clients with 1 to {} threads",
                limits::SERVE_THREADS_MAX
            )),
        }
    }
}

impl Default for Threads {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        Self((cores / 2).clamp(1, limits::SERVE_THREADS_DEFAULT_MAX))
    }
}

/// When a write becomes durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Durability {
    /// Before its response is sent: no acknowledged write is ever lost
    Always,
    /// Within --sync-interval: a power cut may lose the writes of that time
    Interval,
    /// Never: a restart loses everything
    Memory,
}

/// A duration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span(pub Duration);

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        statehouse_client::parse_duration(text)
            .map(Self)
            .map_err(|error| format!("`{text}` is {error}"))
    }
}

impl Span {
    /// In milliseconds.
    pub(super) fn ms(self) -> u64 {
        u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX)
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
deserialize_by_parsing!(
    Listen,
    Origin,
    AdminAddress,
    Node,
    PacketBytes,
    KeyBytes,
    Fuel,
    Span,
    Threads,
    BrokerUrl,
    ClientId,
    Window
);

/// Parses a string or a number of the file through `FromStr`, so that flags and file give the same
/// errors.
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
