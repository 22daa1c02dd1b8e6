//! What a link is made of.

use std::fmt;
use std::net::Ipv6Addr;
use std::sync::Arc;
use std::time::Duration;

use rumqttc::v5::MqttOptions;
use rumqttc::v5::mqttbytes::v5::ConnectProperties;
use rumqttc::{NetworkOptions, TlsConfiguration, Transport};

use crate::limits;

/// Where a broker is, what is between, and who we are there.
#[derive(Clone)]
pub struct Place {
    /// Name or address of the broker, without brackets.
    pub host: String,
    /// Its TCP port.
    pub port: u16,
    /// How to encrypt; see [`crate::tls`].
    pub tls: Option<Arc<rustls::ClientConfig>>,
    /// The path of a WebSocket (MQTT 5 section 6), such as `/mqtt`. None: MQTT over the stream itself.
    pub websocket: Option<String>,
    /// User name and password; empty means none.
    pub login: Option<(String, String)>,
}

/// Without the password.
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
    /// The broker's address for people: `host:port`.
    #[must_use]
    pub fn address(&self) -> String {
        let Self { host, port, .. } = self;
        match host.parse::<Ipv6Addr>() {
            Ok(_) => format!("[{host}]:{port}"),
            Err(_) => format!("{host}:{port}"),
        }
    }

    /// rumqttc's options for a client of this id there.
    #[must_use]
    pub fn mqtt(&self, client_id: &str) -> MqttOptions {
        let tls = self.tls.clone().map(TlsConfiguration::Rustls);
        let (host, transport) = match (&self.websocket, tls) {
            // No brackets around an IPv6 address, though rumqttc joins host and port with a colon: the resolver divides
            // at the last one, and the name that the certificate is checked for has none.
            (None, None) => (self.host.clone(), Transport::tcp()),
            (None, Some(tls)) => (self.host.clone(), Transport::tls_with_config(tls)),
            // Here rumqttc wants the URL for the host.
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

/// How to speak with a broker.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where it is.
    pub place: Place,
    /// The client id: always our own, since rumqttc does not keep one that the broker assigned.
    pub client_id: String,
    /// Kept within [`limits::KEEP_ALIVE_MIN`] and [`limits::KEEP_ALIVE_MAX`]. A silent connection is given up after
    /// twice this.
    pub keep_alive: Duration,
    /// How long a connection may take, from TCP to CONNACK, in whole seconds.
    pub connect_timeout: Duration,
    /// How long the broker keeps the session without a connection, in whole seconds.
    pub session_expiry: Duration,
    /// Whether the first connection goes on with the session of an earlier process, too.
    pub resume: bool,
    /// Messages that the broker may send before the first is acknowledged: the Receive Maximum (MQTT 5 section
    /// 3.1.2.11.3).
    pub receive_max: u16,
    /// Messages that we send before the first is acknowledged, where the broker allows as many.
    pub in_flight_max: u16,
    /// The largest packet that is accepted, in bytes.
    pub packet_bytes_max: u32,
    /// The largest that is sent, where the broker takes as large ones.
    pub sent_bytes_max: u32,
    /// Whether the owner settles what it received; else it is acknowledged at once.
    pub by_hand: bool,
    /// The first and the longest pause between two attempts to connect. Each is cut at random, by up to a half.
    pub pauses: (Duration, Duration),
}

impl Options {
    /// What can be waiting in rumqttc's channel.
    pub(crate) fn channel(&self) -> usize {
        usize::from(self.in_flight_max) + usize::from(self.receive_max) + limits::CHANNEL_SPARE
    }

    /// rumqttc's options for ours.
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
