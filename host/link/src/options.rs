//! The configuration of a link.

use std::fmt;
use std::future::ready;
use std::net::{Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use rumqttc::v5::MqttOptions;
use rumqttc::v5::mqttbytes::v5::ConnectProperties;
use rumqttc::{NetworkOptions, TlsConfiguration, Transport};

use crate::limits;

/// The address of a broker and the credentials to use there.
#[derive(Clone)]
pub struct Place {
    /// Host name or address of the broker, without brackets.
    pub host: String,
    /// The TCP port of the broker.
    pub port: u16,
    /// TLS settings, see [`crate::tls`]. `None` means no encryption.
    pub tls: Option<Arc<rustls::ClientConfig>>,
    /// The path for MQTT over a WebSocket (MQTT 5 section 6), such as `/mqtt`. It must be empty or
    /// begin with `/`, because it follows the port in a URL. `None` means MQTT directly over the
    /// stream.
    pub websocket: Option<String>,
    /// User name and password. An empty one is not sent.
    pub login: Option<(String, String)>,
}

/// Omits the password.
impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place")
            .field("address", &self.address())
            .field("tls", &self.tls.is_some())
            .field("websocket", &self.websocket)
            .field("user", &self.login.as_ref().map(|(user, _)| user))
            .finish()
    }
}

impl Place {
    /// The address of the broker as `host:port`, for messages.
    #[must_use]
    pub fn address(&self) -> String {
        let Self { host, port, .. } = self;
        match host.parse::<Ipv6Addr>() {
            Ok(_) => format!("[{host}]:{port}"),
            Err(_) => format!("{host}:{port}"),
        }
    }

    /// rumqttc's options for a client with this id.
    #[must_use]
    pub fn mqtt(&self, client_id: &str) -> MqttOptions {
        self.mqtt_to(client_id, self.host.clone(), &self.address())
    }

    /// The same for one address of the host. Over a WebSocket the broker gets the name all the
    /// same. Over TLS alone it would not, see [`crate::relay`].
    pub(crate) fn mqtt_at(&self, client_id: &str, address: SocketAddr) -> MqttOptions {
        let mut mqtt = self.mqtt_to(client_id, address.ip().to_string(), &address.to_string());
        if let Some(path) = &self.websocket {
            let authority = self.address();
            let scheme = if self.tls.is_some() { "wss" } else { "ws" };
            let url = format!("{scheme}://{authority}{path}");
            // TLS takes the name of the server from the URL, after rumqttc has connected.
            mqtt.set_request_modifier(move |mut request| {
                if let (Ok(url), Ok(authority)) = (url.parse(), authority.parse()) {
                    *request.uri_mut() = url;
                    request.headers_mut().insert("host", authority);
                }
                ready(request)
            });
        }
        mqtt
    }

    /// The same over the Unix socket of a relay.
    #[cfg(target_os = "linux")]
    pub(crate) fn mqtt_over(&self, client_id: &str, socket: String) -> MqttOptions {
        self.mqtt_with(client_id, socket, Transport::unix())
    }

    /// To a host without brackets, or to the authority of a URL.
    fn mqtt_to(&self, client_id: &str, host: String, authority: &str) -> MqttOptions {
        let tls = self.tls.clone().map(TlsConfiguration::Rustls);
        let (host, transport) = match (&self.websocket, tls) {
            // An IPv6 address must have no brackets here, although rumqttc joins host and port with
            // a colon: the resolver splits at the last colon, and the certificate is checked
            // against the name without brackets.
            (None, None) => (host, Transport::tcp()),
            (None, Some(tls)) => (host, Transport::tls_with_config(tls)),
            // With a WebSocket, rumqttc expects a URL as the host.
            (Some(path), None) => (format!("ws://{authority}{path}"), Transport::ws()),
            (Some(path), Some(tls)) => {
                let url = format!("wss://{authority}{path}");
                (url, Transport::wss_with_config(tls))
            }
        };
        self.mqtt_with(client_id, host, transport)
    }

    fn mqtt_with(&self, client_id: &str, host: String, transport: Transport) -> MqttOptions {
        let mut network = NetworkOptions::new();
        network.set_tcp_nodelay(true);
        let mut mqtt = MqttOptions::new(client_id, host, self.port);
        mqtt.set_transport(transport).set_network_options(network);
        if let Some((user, password)) = &self.login {
            mqtt.set_credentials(user, password);
        }
        mqtt
    }
}

/// The configuration of a session with a broker.
#[derive(Clone, Debug)]
pub struct Options {
    /// The broker.
    pub place: Place,
    /// The client id. It must not be empty, because rumqttc does not store an id that the broker
    /// assigned.
    pub client_id: String,
    /// Clamped to [`limits::KEEP_ALIVE_MIN`] and [`limits::KEEP_ALIVE_MAX`]. A silent connection is
    /// closed after twice this time.
    pub keep_alive: Duration,
    /// Time limit for establishing a connection, from TCP to CONNACK, in whole seconds.
    pub connect_timeout: Duration,
    /// How long the broker keeps the session without a connection, in whole seconds.
    pub session_expiry: Duration,
    /// Whether the first connection resumes the session of an earlier process. Otherwise the end of
    /// the link removes the subscriptions.
    pub resume: bool,
    /// The Receive Maximum: how many unacknowledged messages the broker may send (MQTT 5 section
    /// 3.1.2.11.3).
    pub receive_max: u16,
    /// How many unacknowledged messages this client sends, if the broker allows as many.
    pub in_flight_max: u16,
    /// The largest packet that is accepted, in bytes.
    pub packet_bytes_max: u32,
    /// The largest packet that is sent, if the broker accepts as large ones.
    pub sent_bytes_max: u32,
    /// Whether the owner acknowledges received messages by hand. Otherwise they are acknowledged at
    /// once.
    pub by_hand: bool,
    /// The first and the longest pause between two attempts to connect. Each is randomly reduced by
    /// up to a half.
    pub pauses: (Duration, Duration),
}

impl Options {
    /// The capacity that rumqttc's channel needs.
    pub(crate) fn channel(&self) -> usize {
        usize::from(self.in_flight_max) + usize::from(self.receive_max) + limits::CHANNEL_SPARE
    }

    /// rumqttc's options for this configuration. Each attempt to connect replaces them.
    pub(crate) fn mqtt(&self) -> MqttOptions {
        self.configured(self.place.mqtt(&self.client_id), !self.resume)
    }

    /// The keep alive that each CONNECT asks for.
    pub(crate) fn sent_keep_alive(&self) -> Duration {
        (self.keep_alive).clamp(limits::KEEP_ALIVE_MIN, limits::KEEP_ALIVE_MAX)
    }

    /// Adds this configuration to the options for a place.
    pub(crate) fn configured(&self, mut mqtt: MqttOptions, clean_start: bool) -> MqttOptions {
        let mut properties = ConnectProperties::new();
        let seconds = |time: Duration| u32::try_from(time.as_secs()).unwrap_or(u32::MAX);
        properties.session_expiry_interval = Some(seconds(self.session_expiry));
        properties.receive_maximum = Some(self.receive_max);
        properties.max_packet_size = Some(self.packet_bytes_max);
        mqtt.set_keep_alive(self.sent_keep_alive())
            .set_clean_start(clean_start)
            .set_connection_timeout(self.connect_timeout.as_secs().max(1))
            .set_connect_properties(properties)
            .set_manual_acks(self.by_hand)
            .set_outgoing_inflight_upper_limit(self.in_flight_max);
        mqtt
    }
}
