//! The configuration of a link.

use std::fmt;
use std::net::Ipv6Addr;
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
    /// The path for MQTT over a WebSocket (MQTT 5 section 6), such as `/mqtt`. `None` means MQTT
    /// directly over the stream.
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
        let tls = self.tls.clone().map(TlsConfiguration::Rustls);
        let (host, transport) = match (&self.websocket, tls) {
            // An IPv6 address must have no brackets here, although rumqttc joins host and port with
            // a colon: the resolver splits at the last colon, and the certificate is checked
            // against the name without brackets.
            (None, None) => (self.host.clone(), Transport::tcp()),
            (None, Some(tls)) => (self.host.clone(), Transport::tls_with_config(tls)),
            // With a WebSocket, rumqttc expects a URL as the host.
            (Some(path), None) => (format!("ws://{}{path}", self.address()), Transport::ws()),
            (Some(path), Some(tls)) => {
                let url = format!("wss://{}{path}", self.address());
                (url, Transport::wss_with_config(tls))
            }
        };
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

    /// rumqttc's options for this configuration.
    pub(crate) fn mqtt(&self) -> MqttOptions {
        let mut properties = ConnectProperties::new();
        let seconds = |time: Duration| u32::try_from(time.as_secs()).unwrap_or(u32::MAX);
        properties.session_expiry_interval = Some(seconds(self.session_expiry));
        properties.receive_maximum = Some(self.receive_max);
        properties.max_packet_size = Some(self.packet_bytes_max);
        let keep_alive = (self.keep_alive).clamp(limits::KEEP_ALIVE_MIN, limits::KEEP_ALIVE_MAX);
        let mut mqtt = self.place.mqtt(&self.client_id);
        mqtt.set_keep_alive(keep_alive)
            .set_clean_start(!self.resume)
            .set_connection_timeout(self.connect_timeout.as_secs().max(1))
            .set_connect_properties(properties)
            .set_manual_acks(self.by_hand)
            .set_outgoing_inflight_upper_limit(self.in_flight_max);
        mqtt
    }
}
