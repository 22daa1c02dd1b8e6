//! What a connection is made of.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::error::Error;
use crate::limits;

/// Where the state store is and how to speak with it.
///
/// ```
/// # use statehouse_client::Options;
/// let options = Options { host: "gateway.local".into(), ..Options::default() };
/// assert_eq!(options.port, 1883);
/// ```
#[derive(Debug, Clone)]
pub struct Options {
    /// Name or address of the host; default `127.0.0.1`.
    pub host: String,
    /// TCP port; default 1883.
    pub port: u16,
    /// How to encrypt; default: not at all.
    pub tls: Option<Tls>,
    /// The path of a WebSocket (MQTT 5 section 6), such as `/mqtt`; default: MQTT over TCP, or over TLS, itself.
    pub websocket: Option<String>,
    /// Who we are; default: nobody in particular.
    pub login: Option<Login>,
    /// MQTT client id; default `statehouse-` and 16 random digits. The store knows a client by it,
    /// so two that run at once must not share one.
    pub client_id: Option<String>,
    /// How long a request, or the first connection, may take; default 5 s. Sent with each request
    /// as its message expiry, so that a request that comes too late does not run.
    pub timeout: Duration,
    /// MQTT keep alive; default 15 s, kept within 5 s and 65 535 s. Two of it pass before a silent
    /// connection is given up.
    pub keep_alive: Duration,
    /// How long the broker keeps the session when the connection is lost; default 60 s. Only over a
    /// kept session can the store tell a request that is sent again from a new one.
    pub session_expiry: Duration,
}

/// The certificates of a connection, as files in PEM form. They are read when a client connects for the first time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tls {
    /// The authorities that the store's certificate is checked against; default: those of the system.
    pub ca: Option<PathBuf>,
    /// A certificate of the client's own and its key, for a store that asks for one.
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
        }
    }
}

impl Options {
    /// The client id to connect with: the given one, checked, or a random one.
    pub(crate) fn resolve_client_id(&self) -> Result<String, Error> {
        let Some(id) = &self.client_id else {
            return Ok(format!("statehouse-{:016x}", statehouse_link::random()));
        };
        // The id is a part of the response topic, which may hold no wildcard (the protocol, section 1).
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

    /// What the link needs to know.
    pub(crate) fn link(&self, client_id: &str) -> Result<statehouse_link::Options, Error> {
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
}
