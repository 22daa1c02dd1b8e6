//! The types of settings, which parse flags and keys of the file with the same error texts.

use std::fmt;
use std::net::SocketAddr;
use std::num::{NonZeroU16, NonZeroU32, NonZeroU64, NonZeroUsize};
use std::str::FromStr;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{self, Deserializer};

use super::admin::{AdminAddress, MetricsAddress};
use super::foreign::{ClientId, Window};
use super::listeners::{Listen, Origin};
use super::traces::{CollectorUrl, Ratio};
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

/// The node name in this store's versions. MQTT clients may refuse a string property that contains
/// control characters or noncharacters (MQTT 5 section 1.5.4), and versions are such properties.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node(pub(super) String);

impl FromStr for Node {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_noncharacter = |c: char| {
            let code = u32::from(c);
            (0xFDD0..=0xFDEF).contains(&code) || code & 0xFFFE == 0xFFFE
        };
        let is_forbidden = |c: char| c == ':' || c.is_control() || is_noncharacter(c);
        if text.is_empty() || text.len() > 64 || text.contains(is_forbidden) {
            let form = "no `:`, no control characters and no Unicode noncharacters";
            return Err(format!("a node name has 1 to 64 bytes, {form}"));
        }
        Ok(Self(text.to_owned()))
    }
}

/// A list in the file that must name at least one value. An empty one would count as not set, which
/// allows more than any list.
pub(super) fn nonempty<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    let list = Vec::<String>::deserialize(from)?;
    match list.is_empty() || list.iter().any(String::is_empty) {
        true => Err(de::Error::custom(
            "name at least one value, or remove the line: an empty list would restrict nothing",
        )),
        false => Ok(list),
    }
}

/// The type of a limit that is a number without a unit.
pub(super) trait Number: FromStr {
    /// The allowed values, for errors.
    const RANGE: &'static str;
}

impl Number for NonZeroU16 {
    const RANGE: &'static str = "from 1 to 65535";
}

/// Only rates have this type.
impl Number for NonZeroU32 {
    const RANGE: &'static str = "from 1 to 4294967295; leave it out for no limit";
}

impl Number for NonZeroU64 {
    const RANGE: &'static str = "from 1 to 18446744073709551615";
}

impl Number for u32 {
    const RANGE: &'static str = "from 0 to 4294967295";
}

impl Number for u64 {
    const RANGE: &'static str = "from 0 to 18446744073709551615";
}

/// A number in its range. An error of the type itself would name the type and not the range.
pub(super) fn number<N: Number>(text: &str) -> Result<N, String> {
    text.parse()
        .map_err(|_| format!("it must be a whole number {}", N::RANGE))
}

/// A [`number`] in the file.
pub(super) fn file_number<'de, N: Number, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<N>, D::Error> {
    from.deserialize_any(Parse(number)).map(Some)
}

/// A number of bytes, with or without a unit: `64`, `512MB` (a million bytes each), `4GiB`.
pub fn size(text: &str) -> Result<u64, String> {
    let end = text.find(|c: char| !c.is_ascii_digit());
    let (digits, unit) = text.split_at(end.unwrap_or(text.len()));
    let factor = match unit.trim_start().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        _ => 0,
    };
    let size = digits
        .parse()
        .ok()
        .and_then(|it: u64| it.checked_mul(factor));
    size.filter(|_| factor > 0).ok_or_else(|| {
        format!("`{text}` is not a number of bytes: write one such as 4194304, 512MB or 4MiB")
    })
}

/// Like [`size`], but not 0.
pub fn nonzero_size(text: &str) -> Result<NonZeroU64, String> {
    NonZeroU64::new(size(text)?).ok_or_else(|| "it must be at least 1 byte".to_owned())
}

/// A [`size`] in the file: a number or a string.
pub(super) fn file_size<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    from.deserialize_any(Parse(size)).map(Some)
}

/// A [`nonzero_size`] in the file: a number or a string.
pub(super) fn nonzero_file_size<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<NonZeroU64>, D::Error> {
    from.deserialize_any(Parse(nonzero_size)).map(Some)
}

/// The longest MQTT packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketBytes(pub(super) usize);

impl FromStr for PacketBytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // A smaller limit would exclude ordinary requests.
        match usize::try_from(size(text)?) {
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
        match size(text)? {
            bytes @ 1..=limits::KEY_BYTES_MAX_MAX => Ok(Self(bytes)),
            _ => Err(format!(
                "a key has 1 to {} bytes",
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
    /// Within --sync-interval: a power cut may lose the writes of that time, a crash the last ones
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
        // Zero is the same in every unit.
        if text == "0" {
            return Ok(Self(Duration::ZERO));
        }
        statehouse_client::parse_duration(text)
            .map(Self)
            .map_err(|error| format!("`{text}` is {error}"))
    }
}

impl Span {
    /// In milliseconds.
    pub fn ms(self) -> u64 {
        u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX)
    }
}

macro_rules! deserialize_by_parsing {
    ($($type:ty),*) => {$(
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_any(Parse(Self::from_str))
            }
        }
    )*};
}
deserialize_by_parsing!(
    Listen,
    Origin,
    AdminAddress,
    MetricsAddress,
    Node,
    PacketBytes,
    KeyBytes,
    Fuel,
    Span,
    Threads,
    BrokerUrl,
    ClientId,
    Window,
    CollectorUrl,
    Ratio
);

#[cfg(feature = "cluster")]
deserialize_by_parsing!(super::cluster::ClusterListen);

/// Parses a string or a number of the file like the value of a flag, so that both give the same
/// errors.
struct Parse<T>(fn(&str) -> Result<T, String>);

impl<T> de::Visitor<'_> for Parse<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a number")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        (self.0)(text).map_err(E::custom)
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<T, E> {
        self.visit_str(&number.to_string())
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<T, E> {
        self.visit_str(&number.to_string())
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<T, E> {
        self.visit_str(&number.to_string())
    }
}
