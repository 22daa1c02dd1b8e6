//! The settings of the listeners: addresses, protocols, and the certificates on both sides.
//!
//! Combines flags with the same keys of the file and yields a [`ListenConfig`] of checked values,
//! or an error that names the settings to add. It opens no file.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use clap::ArgAction;
use hyper::http::uri::Authority;

use super::ConfigError;
use super::access::AccessConfig;
use super::layer::settings;
use super::switch::Switch;
use super::url::Scheme;
use super::values::socket_address;
use crate::limits;

settings! {
    /// The listener settings of `serve`.
    #[command(next_help_heading = "Listeners")]
    pub struct ListenFlags {
        /// Where to listen: ADDR:PORT, optionally with mqtt://, mqtts:// (TLS), ws:// (WebSocket)
        /// or wss:// in front; may be given more than once. Port 0 chooses a free port. Not with
        /// --broker [default: mqtt://127.0.0.1:1883]
        #[arg(
            long,
            value_name = "URL",
            env = "STATEHOUSE_LISTEN",
            value_delimiter = ','
        )]
        pub listen: Vec<Listen>,

        /// Listen beyond loopback without TLS or without authentication
        #[arg(long, env = "STATEHOUSE_INSECURE", action = ArgAction::SetTrue, default_value = Switch::UNSET)]
        pub insecure: Switch,

        /// The certificate (PEM) for mqtts:// and wss://, followed by its intermediate certificates
        #[arg(long, value_name = "FILE", env = "STATEHOUSE_TLS_CERT")]
        pub tls_cert: Option<PathBuf>,

        /// The private key of --tls-cert (PEM)
        #[arg(long, value_name = "FILE", env = "STATEHOUSE_TLS_KEY")]
        pub tls_key: Option<PathBuf>,

        /// CA certificates (PEM) that client certificates are verified against; the server then
        /// requests a certificate from each client
        #[arg(long, value_name = "FILE", env = "STATEHOUSE_TLS_CLIENT_CA")]
        pub tls_client_ca: Option<PathBuf>,

        /// Revoked client certificates (CRL, PEM); may be given more than once. Each CA in
        /// --tls-client-ca then needs its list
        #[arg(
            long,
            value_name = "FILE",
            env = "STATEHOUSE_TLS_CLIENT_CRL",
            value_delimiter = ','
        )]
        pub tls_client_crl: Vec<PathBuf>,

        /// Refuse TLS clients that have no certificate
        #[arg(long, env = "STATEHOUSE_TLS_CLIENT_REQUIRED", action = ArgAction::SetTrue, default_value = Switch::UNSET)]
        pub tls_client_required: Switch,

        /// An origin whose web pages may connect over WebSocket, such as https://panel.example; may
        /// be given more than once [default: pages of the same host]
        #[arg(
            long,
            value_name = "ORIGIN",
            env = "STATEHOUSE_WS_ORIGIN",
            value_delimiter = ','
        )]
        pub ws_origin: Vec<Origin>,
    }
}

/// Why the listeners cannot be set up. The text is a sentence for the operator.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ListenError {
    /// A listener that other machines can reach, without TLS or authentication.
    #[error(
        "{listener} can be reached from other machines, and {why}. Add {missing}; or listen on 127.0.0.1 or [::1]; or accept the risk with --insecure (in the file: insecure = true)"
    )]
    Insecure {
        /// The listener.
        listener: Listen,
        /// The problem.
        why: &'static str,
        /// The flags that fix it.
        missing: String,
    },
    /// TLS without a certificate.
    #[error("{listener} is TLS and needs a certificate: add {missing}")]
    NoCertificate {
        /// The listener or the admin API.
        listener: String,
        /// The flags that are missing.
        missing: &'static str,
    },
    /// A TLS setting, but no TLS listener.
    #[error(
        "{0} is about TLS, and no listener has it: add --listen mqtts://ADDR:PORT or --admin https://ADDR:PORT, or leave it out"
    )]
    WithoutTls(&'static str),
    /// A setting about client certificates, but clients are not asked for one.
    #[error(
        "{0} is about client certificates, but clients are asked for none: add --tls-client-ca FILE"
    )]
    WithoutClientCa(&'static str),
    /// A WebSocket setting, but no WebSocket listener.
    #[error(
        "ws_origin is about WebSocket, and no listener is: add --listen ws://ADDR:PORT, or leave it out"
    )]
    WithoutWebSocket,
}

/// The settings of the listeners.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenConfig {
    /// The listeners, with their protocols.
    pub listeners: Vec<Listen>,
    /// The certificate files, if a listener or the admin API uses TLS.
    pub tls: Option<TlsFiles>,
    /// Origins whose pages may connect over WebSocket; if empty, pages of the requested host.
    pub ws_origins: Vec<Origin>,
}

/// The files for TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate chain of the server, its own certificate first.
    pub certificate: PathBuf,
    /// The private key of the certificate.
    pub key: PathBuf,
    /// The CAs of client certificates. `None`: clients are asked for no certificate.
    pub client_ca: Option<PathBuf>,
    /// The revocation lists of client certificates.
    pub client_crls: Vec<PathBuf>,
    /// Whether a client must present a certificate.
    pub client_required: bool,
}

impl TlsFiles {
    /// All of these files.
    #[must_use]
    pub fn all(&self) -> Vec<PathBuf> {
        let mut all = vec![self.certificate.clone(), self.key.clone()];
        all.extend(self.client_ca.clone());
        all.extend(self.client_crls.iter().cloned());
        all
    }
}

/// A listener: `mqtts://127.0.0.1:8883`. Without a scheme it is mqtt; `localhost` is 127.0.0.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listen {
    /// The protocol.
    pub scheme: Scheme,
    /// The address and port.
    pub address: SocketAddr,
}

impl Default for Listen {
    fn default() -> Self {
        Self {
            scheme: Scheme::default(),
            address: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 1883),
        }
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme.name(), self.address)
    }
}

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (scheme, place) = text.split_once("://").unwrap_or(("mqtt", text));
        let wrong = |why| format!("`{}` {why}", ConfigError::without_login(text));
        let scheme = Scheme::named(scheme)
            .ok_or_else(|| wrong("begins with none of mqtt://, mqtts://, ws:// and wss://"))?;
        let place = place.strip_suffix('/').unwrap_or(place);
        let address = socket_address(place)
            .ok_or_else(|| wrong("is not an address and port, such as 127.0.0.1:1883, mqtts://0.0.0.0:8883 or ws://[::1]:8080"))?;
        Ok(Self { scheme, address })
    }
}

/// An origin: scheme, host and port, as browsers send it (RFC 6454 section 6.2): in lower case, and
/// without the default port of the scheme.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin(pub String);

impl FromStr for Origin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let origin = origin(text).filter(|_| text.len() <= limits::WS_ORIGIN_BYTES_MAX);
        origin.map(Self).ok_or_else(|| {
            format!(
                "`{}` is not an origin that a browser sends: write only scheme, host and port, such as https://panel.example or http://10.0.0.7:8080, without a user, path, query, fragment or wildcard; a name that is not ASCII begins with xn--",
                ConfigError::without_login(text)
            )
        })
    }
}

/// The form in which browsers send an origin; none if it has other parts than scheme, host and
/// port.
fn origin(text: &str) -> Option<String> {
    let (scheme, place) = text.split_once("://")?;
    let default_port = match scheme {
        "https" => 443,
        "http" => 80,
        _ => return None,
    };
    let place: Authority = place.parse().ok()?;
    let host = place.host();
    // A user would be in front of the host.
    let port = place.as_str().strip_prefix(host)?;
    if host.is_empty() || host.contains('*') {
        return None;
    }
    let port = match port {
        "" => None,
        port => Some(port.strip_prefix(':')?.parse::<u16>().ok()?),
    };
    let host = host.to_ascii_lowercase();
    Some(match port.filter(|port| *port != default_port) {
        None => format!("{scheme}://{host}"),
        Some(port) => format!("{scheme}://{host}:{port}"),
    })
}

impl ListenFlags {
    /// The settings without a check, for the checks of what they name.
    pub(super) fn unchecked(self) -> ListenConfig {
        let pair = self.tls_cert.zip(self.tls_key);
        ListenConfig {
            listeners: self.listen,
            tls: pair.map(|(certificate, key)| TlsFiles {
                certificate,
                key,
                client_ca: self.tls_client_ca,
                client_crls: self.tls_client_crl,
                client_required: self.tls_client_required.is_on(),
            }),
            ws_origins: self.ws_origin,
        }
    }

    /// Checks the settings against the configured authentication, and against the address of the
    /// admin API over TLS, which uses the same certificate.
    pub(super) fn load(
        mut self,
        access: &AccessConfig,
        admin: Option<SocketAddr>,
    ) -> Result<ListenConfig, ListenError> {
        let mut listeners = std::mem::take(&mut self.listen);
        if listeners.is_empty() {
            listeners.push(Listen::default());
        }
        let encrypted = listeners.iter().find(|it| it.scheme.tls);
        let encrypted = (encrypted.map(ToString::to_string))
            .or_else(|| admin.map(|admin| format!("https://{admin}")));
        let about_tls = [
            (self.tls_cert.is_some(), "tls_cert"),
            (self.tls_key.is_some(), "tls_key"),
            (self.tls_client_ca.is_some(), "tls_client_ca"),
            (!self.tls_client_crl.is_empty(), "tls_client_crl"),
            (self.tls_client_required.is_on(), "tls_client_required"),
        ];
        // Checked before the refusal of listeners without TLS, since a missing TLS listener may be
        // the cause.
        let given = about_tls.into_iter().find(|(is_given, _)| *is_given);
        if let (None, Some((_, name))) = (&encrypted, given) {
            return Err(ListenError::WithoutTls(name));
        }
        if self.tls_client_ca.is_none() {
            let owners = (access.certificate_users.is_some(), "certificate_users");
            let mut about_clients = about_tls.into_iter().skip(3).chain([owners]);
            if let Some((_, name)) = about_clients.find(|(is_given, _)| *is_given) {
                return Err(ListenError::WithoutClientCa(name));
            }
        }
        if !self.ws_origin.is_empty() && !listeners.iter().any(|it| it.scheme.websocket) {
            return Err(ListenError::WithoutWebSocket);
        }
        let open = listeners.iter().filter(|it| !it.address.ip().is_loopback());
        // All reachable listeners may use TLS; a required certificate then excludes anonymous
        // clients.
        let authenticates =
            self.tls_client_required.is_on() || (access.authenticates() && !access.allow_anonymous);
        for listener in open.filter(|_| !self.insecure.is_on()) {
            insecure(*listener, authenticates, self.tls_cert.is_some())?;
        }
        let missing = match (&self.tls_cert, &self.tls_key) {
            (Some(_), Some(_)) => None,
            (None, None) => Some("--tls-cert FILE and --tls-key FILE"),
            (None, _) => Some("--tls-cert FILE"),
            _ => Some("--tls-key FILE"),
        };
        if let (Some(listener), Some(missing)) = (encrypted, missing) {
            return Err(ListenError::NoCertificate { listener, missing });
        }
        self.listen = listeners;
        Ok(self.unchecked())
    }
}

/// The error for a reachable listener that is unencrypted or needs no authentication.
fn insecure(listener: Listen, authenticates: bool, certificate: bool) -> Result<(), ListenError> {
    let users = "--users FILE (or --token-keys FILE with --token-audience NAME, or --tls-client-ca FILE), without --allow-anonymous";
    let encrypted = Listen {
        scheme: Scheme {
            tls: true,
            ..listener.scheme
        },
        ..listener
    };
    let files = if certificate {
        ""
    } else {
        " --tls-cert FILE --tls-key FILE"
    };
    let (why, missing) = match (listener.scheme.tls, authenticates) {
        (true, true) => return Ok(()),
        (true, false) => (
            "every client could read and write everything without authentication",
            users.to_owned(),
        ),
        (false, true) => (
            "an attacker on the network could read passwords and change messages",
            format!("TLS: --listen {encrypted}{files}"),
        ),
        (false, false) => (
            "every client, and any attacker on the network, could read and write everything without authentication",
            format!("TLS: --listen {encrypted}{files}, and {users}"),
        ),
    };
    Err(ListenError::Insecure {
        listener,
        why,
        missing,
    })
}

#[cfg(test)]
mod tests;
