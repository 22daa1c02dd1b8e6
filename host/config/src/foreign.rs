//! The settings of a store behind a foreign broker: its address, the store's credentials, and how
//! the store detects disconnected clients.
//!
//! Combines flags with the same keys of the file and yields a [`ForeignConfig`] of checked values,
//! or an error that names what is missing. It must never print a password.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::ArgAction;

use super::layer::settings;
use super::memory::Memory;
use super::switch::Switch;
use super::url::{BrokerUrl, Secret, password_variable, read_password};
use super::{ConfigError, Durability, Span, time};
use crate::limits;

/// Environment variable with the password, as an alternative to a file.
const PASSWORD: &str = "STATEHOUSE_BROKER_PASSWORD";

settings! {
    /// The settings of `serve` for a foreign broker.
    #[command(next_help_heading = "Foreign broker")]
    pub struct ForeignFlags {
        /// Serve through this MQTT 5 broker instead of listening:
        /// mqtt://[USER[:PASSWORD]@]HOST[:PORT], mqtts://, or ws:// and wss:// with a path
        #[arg(long, value_name = "URL", env = "STATEHOUSE_BROKER")]
        pub broker: Option<BrokerUrl>,

        /// User name at the broker
        #[arg(long, value_name = "NAME", env = "STATEHOUSE_BROKER_USER")]
        pub broker_user: Option<String>,

        /// A file with the password [default: STATEHOUSE_BROKER_PASSWORD, or the password in the
        /// URL]
        #[arg(long, value_name = "FILE", env = "STATEHOUSE_BROKER_PASSWORD_FILE")]
        pub broker_password_file: Option<PathBuf>,

        /// CA certificates (PEM) that the broker's certificate is verified against [default: the
        /// system's]
        #[arg(long, value_name = "FILE", env = "STATEHOUSE_BROKER_CA")]
        pub broker_ca: Option<PathBuf>,

        /// The client certificate (PEM) of the store, with --broker-key
        #[arg(long, value_name = "FILE", env = "STATEHOUSE_BROKER_CERT")]
        pub broker_cert: Option<PathBuf>,

        /// The private key of --broker-cert (PEM)
        #[arg(long, value_name = "FILE", env = "STATEHOUSE_BROKER_KEY")]
        pub broker_key: Option<PathBuf>,

        /// MQTT client id of the store [default: generated once and kept in the data directory]
        #[arg(long, value_name = "ID", env = "STATEHOUSE_BROKER_CLIENT_ID")]
        pub broker_client_id: Option<ClientId>,

        /// Maximum number of unacknowledged requests from the broker; they use at most this many
        /// times max_packet_bytes of memory [default: 64]
        #[arg(long, value_name = "N", env = "STATEHOUSE_BROKER_WINDOW")]
        pub broker_window: Option<Window>,

        /// Ping the broker after this time without a packet from it [default: 15s]
        #[arg(long, value_name = "TIME", env = "STATEHOUSE_BROKER_KEEP_ALIVE")]
        pub broker_keep_alive: Option<Span>,

        /// How the store detects that a client has disconnected, so that its watches end [default:
        /// auto]
        #[arg(long, value_name = "KIND", env = "STATEHOUSE_PRESENCE")]
        pub presence: Option<PresenceKind>,

        /// End the watches of a client that for this long sent no request and received no
        /// notification [default: never]
        #[arg(long, value_name = "TIME", env = "STATEHOUSE_WATCH_TTL")]
        pub watch_ttl: Option<Span>,

        /// Wait while another process uses the data directory, and take over when it ends
        #[arg(long, env = "STATEHOUSE_STANDBY", action = ArgAction::SetTrue, default_value = Switch::UNSET)]
        pub standby: Switch,
    }
}

/// The settings of a store behind a foreign broker.
#[derive(Clone, Debug)]
pub struct ForeignConfig {
    /// The address of the broker.
    pub broker: BrokerUrl,
    /// The user name at the broker.
    pub user: Option<String>,
    /// The password at the broker.
    pub password: Option<Secret>,
    /// CA certificates for the broker's certificate; without it the system's.
    pub ca: Option<PathBuf>,
    /// The client certificate and private key of the store.
    pub certificate: Option<(PathBuf, PathBuf)>,
    /// The file that holds the password.
    pub password_file: Option<PathBuf>,
    /// The configured client id; otherwise the one in the data directory is used.
    pub client_id: Option<String>,
    /// Whether a later run has the same client id, and therefore the same session.
    pub keeps_client_id: bool,
    /// The Receive Maximum that the store announces (MQTT 5 section 3.1.2.11.3).
    pub window: u16,
    /// The Keep Alive, in whole seconds.
    pub keep_alive: Duration,
    /// How the store detects disconnected clients.
    pub presence: PresenceKind,
    /// How long a watch lives without a request or a received notification.
    pub watch_ttl: Option<Duration>,
    /// Wait until the data directory is free.
    pub standby: bool,
    /// How much output may wait for the broker.
    pub outbox: OutboxBounds,
}

/// How much output may wait for PUBACKs of the broker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutboxBounds {
    /// From this number of bytes on, the store executes no further request.
    pub hold_bytes: usize,
    /// From this number of bytes on, notifications are lost.
    pub bytes_max: usize,
}

impl Default for OutboxBounds {
    /// The bounds of a machine with at least 2 GiB of memory.
    fn default() -> Self {
        Self {
            hold_bytes: limits::BROKER_OUTBOX_BYTES_HOLD,
            bytes_max: limits::BROKER_OUTBOX_BYTES_MAX,
        }
    }
}

impl OutboxBounds {
    /// The bounds for this memory. The embedded broker, which is absent, would take more of it.
    fn of(memory: Memory) -> Self {
        Self {
            hold_bytes: memory.usize_part(1, limits::BROKER_OUTBOX_BYTES_HOLD),
            bytes_max: memory.usize_part(8, limits::BROKER_OUTBOX_BYTES_MAX),
        }
    }
}

impl ForeignConfig {
    /// Reads the password file again, if there is one, since it may have changed.
    pub fn read_password(&mut self) -> Result<(), ConfigError> {
        if let Some(path) = &self.password_file {
            self.password = Some(read_password(path)?);
        }
        Ok(())
    }
}

/// An MQTT client id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientId(pub String);

impl FromStr for ClientId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty()
            || text.len() > limits::BROKER_CLIENT_ID_BYTES_MAX
            || text.contains(char::is_control)
        {
            return Err(format!(
                "a client id has 1 to {} bytes and no control characters",
                limits::BROKER_CLIENT_ID_BYTES_MAX
            ));
        }
        Ok(Self(text.to_owned()))
    }
}

/// How many requests may be unacknowledged at the broker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window(pub u16);

impl FromStr for Window {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(window @ 1..=limits::BROKER_WINDOW_MAX) => Ok(Self(window)),
            _ => Err(format!(
                "a window has 1 to {} requests",
                limits::BROKER_WINDOW_MAX
            )),
        }
    }
}

/// How the store detects that a client has disconnected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PresenceKind {
    /// By the connection log that Mosquitto publishes, if it does
    #[value(alias = "mosquitto")]
    #[serde(alias = "mosquitto")]
    Auto,
    /// Only by notifications that have no subscriber
    Off,
}

impl ForeignFlags {
    /// The checked settings, or none if no broker is configured.
    pub(super) fn load(
        self,
        durability: Durability,
        memory: Memory,
    ) -> Result<Option<ForeignConfig>, ConfigError> {
        let Some(broker) = self.broker else {
            return match self.first_set() {
                Some(name) => Err(ConfigError::WithoutBroker(name)),
                None => Ok(None),
            };
        };
        if self.standby.is_on() && durability == Durability::Memory {
            return Err(ConfigError::StandbyInMemory);
        }
        let certificate = match (self.broker_cert, self.broker_key) {
            (None, None) => None,
            (Some(certificate), Some(key)) => Some((certificate, key)),
            _ => return Err(ConfigError::HalfCertificate),
        };
        if !broker.scheme.tls && (self.broker_ca.is_some() || certificate.is_some()) {
            return Err(ConfigError::CertificateWithoutTls(broker));
        }
        // A password file takes precedence over both; it is read later.
        let password = password_variable(PASSWORD).or_else(|| broker.password.clone());
        let user = self.broker_user.or_else(|| broker.user.clone());
        let keep_alive_ms = time(
            self.broker_keep_alive,
            limits::BROKER_KEEP_ALIVE_MS_DEFAULT,
            ("broker_keep_alive", 5_000, "5s", 65_535_000, "65535s"),
        )?;
        let watch_ttl_ms = match self.watch_ttl {
            None => None,
            set => Some(time(
                set,
                0,
                ("watch_ttl", 10_000, "10s", 30 * 86_400_000, "30d"),
            )?),
        };
        Ok(Some(ForeignConfig {
            user,
            password,
            ca: self.broker_ca,
            certificate,
            password_file: self.broker_password_file,
            keeps_client_id: durability != Durability::Memory || self.broker_client_id.is_some(),
            client_id: self.broker_client_id.map(|ClientId(id)| id),
            window: (self.broker_window).map_or(limits::BROKER_WINDOW_DEFAULT, |Window(n)| n),
            // MQTT counts the Keep Alive in seconds.
            keep_alive: Duration::from_secs(keep_alive_ms / 1000),
            presence: self.presence.unwrap_or(PresenceKind::Auto),
            watch_ttl: watch_ttl_ms.map(Duration::from_millis),
            standby: self.standby.is_on(),
            outbox: OutboxBounds::of(memory),
            broker: BrokerUrl {
                user: None,
                password: None,
                ..broker
            },
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> BrokerUrl {
        text.parse().unwrap()
    }

    #[test]
    fn a_password_is_the_first_line_of_its_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "se cret\r\nnote\n").unwrap();
        let flags = ForeignFlags {
            broker: Some(parsed("mqtt://other:url@broker")),
            broker_user: Some("me".into()),
            broker_password_file: Some(file.path().to_owned()),
            ..ForeignFlags::default()
        };
        let memory = Memory::here();
        let mut config = flags.load(Durability::Always, memory).unwrap().unwrap();
        config.read_password().unwrap();
        assert_eq!(config.user.as_deref(), Some("me"));
        assert_eq!(config.password, Some(Secret("se cret".into())));
        // A standby may take over long after it read the password.
        std::fs::write(file.path(), "changed\n").unwrap();
        config.read_password().unwrap();
        assert_eq!(config.password, Some(Secret("changed".into())));
    }

    #[test]
    fn a_generated_client_id_in_memory_is_not_kept() {
        let keeps = |client_id: Option<&str>, durability| {
            let flags = ForeignFlags {
                broker: Some(parsed("mqtt://broker")),
                broker_client_id: client_id.map(|id| ClientId(id.into())),
                ..ForeignFlags::default()
            };
            let config = flags.load(durability, Memory::here()).unwrap();
            config.unwrap().keeps_client_id
        };
        assert!(keeps(None, Durability::Always));
        assert!(keeps(Some("id"), Durability::Memory));
        assert!(!keeps(None, Durability::Memory));
    }

    #[test]
    fn the_outbox_fits_the_memory_of_a_small_gateway() {
        let bounds = |bytes| {
            let flags = ForeignFlags {
                broker: Some(parsed("mqtt://broker")),
                ..ForeignFlags::default()
            };
            let config = flags.load(Durability::Always, Memory::of(bytes)).unwrap();
            config.unwrap().outbox
        };
        let small = OutboxBounds {
            hold_bytes: 2 << 20,
            bytes_max: 16 << 20,
        };
        assert_eq!(bounds(64 << 20), small);
        assert_eq!(bounds(2 << 30), OutboxBounds::default());
        assert_eq!(bounds(8 << 30), OutboxBounds::default());
    }
}
