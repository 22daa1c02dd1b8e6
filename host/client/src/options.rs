//! The configuration of a client.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::error::Error;
use crate::limits;

/// The address of the state store and the settings of the connection.
///
/// ```
/// # use statehouse_client::Options;
/// let options = Options { host: "gateway.local".into(), ..Options::default() };
/// assert_eq!(options.port, 1883);
/// ```
#[derive(Debug, Clone)]
pub struct Options {
    /// Host name or address; default `127.0.0.1`.
    pub host: String,
    /// TCP port; default 1883.
    pub port: u16,
    /// TLS settings; default: no encryption.
    pub tls: Option<Tls>,
    /// The path for MQTT over a WebSocket (MQTT 5 section 6), such as `/mqtt`; default: MQTT
    /// directly over TCP or TLS. It is empty or begins with `/`.
    pub websocket: Option<String>,
    /// User name and password; default: none.
    pub login: Option<Login>,
    /// MQTT client id; default `statehouse-` and 16 random digits. It identifies the client to the
    /// store, so two running clients must not share one.
    pub client_id: Option<String>,
    /// Timeout of a request and of the first connection; default 5 s. It is sent with each request
    /// as its message expiry, so that a broker or store that keeps it for longer discards it. The
    /// time in the buffers of sockets does not count: a request may take effect after its timeout.
    pub timeout: Duration,
    /// MQTT keep alive; default 15 s, clamped to 5 s and 65 535 s. A silent connection is closed
    /// after twice this time.
    pub keep_alive: Duration,
    /// How long the broker keeps the session without a connection; default 60 s. The store
    /// recognizes a resent request only within its session.
    pub session_expiry: Duration,
    /// How often the client asks the store for the version of its last change, so that a watch
    /// without changes can be resumed after a lost connection; default 60 s, at least 10 ms. The
    /// store remembers changes for minutes.
    ///
    /// A watch from [`Client::watch`](crate::Client::watch) has no version to resume from until it
    /// reports a change, and this setting does not apply to it before it was resumed once. The
    /// other watches begin with a version.
    pub watch_refresh: Duration,
}

/// The certificates of a connection, as PEM files. They are read when the client connects for the
/// first time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tls {
    /// The trusted authorities for the store's certificate; default: those of the system.
    pub ca: Option<PathBuf>,
    /// The client's own certificate and key, for a store that requires them.
    pub certificate: Option<(PathBuf, PathBuf)>,
}

/// A user name and a password (MQTT 5 sections 3.1.3.5 and 3.1.3.6).
#[derive(Clone, PartialEq, Eq)]
pub struct Login {
    /// The name.
    pub user: String,
    /// The password; never shown.
    pub password: String,
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login")
            .field("user", &self.user)
            .finish_non_exhaustive()
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".into(),
            port: 1883,
            tls: None,
            websocket: None,
            login: None,
            client_id: None,
            timeout: Duration::from_secs(5),
            keep_alive: Duration::from_secs(15),
            session_expiry: Duration::from_secs(60),
            watch_refresh: Duration::from_secs(60),
        }
    }
}

impl Options {
    /// The client id to use: the configured one, after a check, or a random one.
    pub(crate) fn resolve_client_id(&self) -> Result<String, Error> {
        let Some(id) = &self.client_id else {
            return Ok(format!("statehouse-{:016x}", statehouse_link::random()));
        };
        // The id is part of the response topic, which must not contain a wildcard (the protocol,
        // section 1).
        if id.is_empty()
            || id.len() > limits::CLIENT_ID_BYTES_MAX
            || id.contains(['+', '#'])
            || id.contains(char::is_control)
        {
            return Err(Error::Invalid(format!(
                "the client id must have 1 to {} bytes and no '+', '#' or control character",
                limits::CLIENT_ID_BYTES_MAX
            )));
        }
        Ok(id.clone())
    }

    pub(crate) fn link(&self, client_id: &str) -> Result<statehouse_link::Options, Error> {
        // Other text would become a part of the port or host in the URL of the WebSocket.
        let path = self.websocket.as_deref().unwrap_or_default();
        if !path.is_empty() && !path.starts_with('/') {
            return Err(Error::Invalid(format!(
                "the path of the WebSocket must begin with '/', but it is {path:?}"
            )));
        }
        let tls = self.tls.as_ref().map(|tls| {
            let own = tls.certificate.as_ref();
            let own = own.map(|(certificate, key)| (certificate.as_path(), key.as_path()));
            statehouse_link::tls::config(tls.ca.as_deref(), own)
        });
        let tls = tls
            .transpose()
            .map_err(|error| Error::Invalid(error.to_string()))?;
        let login = self.login.clone();
        let place = statehouse_link::Place {
            host: self.host.clone(),
            port: self.port,
            tls,
            websocket: self.websocket.clone(),
            login: login.map(|Login { user, password }| (user, password)),
        };
        Ok(statehouse_link::Options {
            place,
            client_id: client_id.to_owned(),
            keep_alive: self.keep_alive,
            connect_timeout: self.timeout,
            session_expiry: self.session_expiry,
            resume: false,
            receive_max: limits::IN_FLIGHT_MAX,
            in_flight_max: limits::IN_FLIGHT_MAX,
            packet_bytes_max: u32::try_from(limits::PACKET_BYTES_MAX).unwrap_or(u32::MAX),
            sent_bytes_max: u32::try_from(limits::PACKET_BYTES_MAX).unwrap_or(u32::MAX),
            by_hand: false,
            pauses: (limits::RECONNECT_PAUSE_MIN, limits::RECONNECT_PAUSE_MAX),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_id(id: &str) -> Options {
        Options {
            client_id: Some(id.into()),
            ..Options::default()
        }
    }

    #[test]
    fn client_ids() {
        let random = Options::default().resolve_client_id().unwrap();
        assert!(random.starts_with("statehouse-"), "{random}");
        assert_eq!(with_id("a b/c").resolve_client_id().unwrap(), "a b/c");
        for bad in ["", "a+", "#", "a\0", &"x".repeat(1025)] {
            assert!(with_id(bad).resolve_client_id().is_err(), "{bad:?}");
        }
    }

    /// Regression: the path `0/mqtt` changed the port.
    #[test]
    fn websocket_path_begins_with_a_slash() {
        let link = |path: &str| {
            let options = Options {
                websocket: Some(path.into()),
                ..Options::default()
            };
            options.link("tester").map(|link| link.place.websocket)
        };
        for good in ["", "/", "/mqtt"] {
            assert_eq!(link(good), Ok(Some(good.to_owned())));
        }
        for bad in ["0/mqtt", "mqtt", "@example.org/"] {
            assert!(matches!(link(bad), Err(Error::Invalid(_))), "{bad}");
        }
    }
}
