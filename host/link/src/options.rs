//! What a link is made of.

use std::net::Ipv6Addr;
use std::sync::Arc;
use std::time::Duration;

use rumqttc::v5::MqttOptions;
use rumqttc::v5::mqttbytes::v5::ConnectProperties;
use rumqttc::{NetworkOptions, TlsConfiguration, Transport};

use crate::limits;

/// Where a broker is, and how to speak with it.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name or address of the broker, without brackets.
    pub host: String,
    /// Its TCP port.
    pub port: u16,
    /// How to encrypt; see [`crate::tls`].
    pub tls: Option<Arc<rustls::ClientConfig>>,
    /// User name and password; empty means none.
    pub login: Option<(String, String)>,
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
    /// The broker's address for people: `host:port`.
    #[must_use]
    pub fn address(&self) -> String {
        let Self { host, port, .. } = self;
        match host.parse::<Ipv6Addr>() {
            Ok(_) => format!("[{host}]:{port}"),
            Err(_) => format!("{host}:{port}"),
        }
    }

    /// What can be waiting in rumqttc's channel.
    pub(crate) fn channel(&self) -> usize {
        usize::from(self.in_flight_max) + usize::from(self.receive_max) + limits::CHANNEL_SPARE
    }

    /// rumqttc's options for ours.
    pub(crate) fn mqtt(&self) -> MqttOptions {
        // No brackets around an IPv6 address, though rumqttc joins host and port with a colon: the resolver divides at
        // the last one, and the name that the certificate is checked for has none.
        let mut mqtt = MqttOptions::new(&self.client_id, &self.host, self.port);
        let mut properties = ConnectProperties::new();
        let seconds = |time: Duration| u32::try_from(time.as_secs()).unwrap_or(u32::MAX);
        properties.session_expiry_interval = Some(seconds(self.session_expiry));
        properties.receive_maximum = Some(self.receive_max);
        properties.max_packet_size = Some(self.packet_bytes_max);
        let mut network = NetworkOptions::new();
        network.set_tcp_nodelay(true);
        let keep_alive = (self.keep_alive).clamp(limits::KEEP_ALIVE_MIN, limits::KEEP_ALIVE_MAX);
        mqtt.set_keep_alive(keep_alive)
            .set_clean_start(!self.resume)
            .set_connection_timeout(self.connect_timeout.as_secs().max(1))
            .set_connect_properties(properties)
            .set_network_options(network)
            .set_manual_acks(self.by_hand)
            .set_outgoing_inflight_upper_limit(self.in_flight_max);
        if let Some((user, password)) = &self.login {
            mqtt.set_credentials(user, password);
        }
        if let Some(tls) = &self.tls {
            let tls = TlsConfiguration::Rustls(Arc::clone(tls));
            mqtt.set_transport(Transport::tls_with_config(tls));
        }
        mqtt
    }
}
