//! Runs Mosquitto with its defaults and a responder that uses rumqttc: the simplest store that a
//! user of a broker can write. The responder is this program in its own process.
//!
//! By default, both leave Nagle's algorithm on, which delays a lone request by some 40 ms. The
//! other variant turns it off. The responder answers GET and SET from a map, without versions,
//! fencing or durability, which favours it.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use bytes::Bytes;
use rumqttc::v5::mqttbytes::QoS;
use rumqttc::v5::mqttbytes::v5::{Packet, Publish, PublishProperties};
use rumqttc::v5::{AsyncClient, Event, MqttOptions};
use statehouse_core::request::REQUEST_TOPIC;

use crate::common::Running;
use crate::servers::{Process, mosquitto};

/// The maximum of queued answers. The broker has at most 20 requests in flight.
const QUEUE: usize = 1024;

/// The broker and the responder.
pub(crate) struct Mosquitto {
    pub(crate) broker: Process,
    _responder: Running,
}

impl Mosquitto {
    /// Returns `None` if Mosquitto is not installed.
    pub(crate) fn start(directory: &Path, nodelay: bool) -> Option<Self> {
        let broker = mosquitto(directory, nodelay)?;
        let option = match nodelay {
            false => "--responder",
            true => "--responder-nodelay",
        };
        let this = std::env::current_exe().expect("this program has a file");
        let responder = Command::new(this)
            .args([option, &broker.address.to_string()])
            .spawn()
            .expect("this program runs");
        // Requests are refused until the responder has subscribed. On loopback, this time is
        // enough.
        std::thread::sleep(Duration::from_millis(500));
        Some(Self {
            broker,
            _responder: Running(responder),
        })
    }
}

/// Answers requests until the broker ends.
pub(crate) fn respond(address: SocketAddr, nodelay: bool) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let mut options = MqttOptions::new("responder", address.ip().to_string(), address.port());
        options.set_keep_alive(Duration::from_secs(60));
        options.set_max_packet_size(Some(4 << 20));
        let (client, mut events) = AsyncClient::new(options, QUEUE);
        let mut network = events.options.network_options();
        network.set_tcp_nodelay(nodelay);
        events.options.set_network_options(network);
        client
            .subscribe(REQUEST_TOPIC, QoS::AtLeastOnce)
            .await
            .expect("the queue has room");
        let mut keys: HashMap<Bytes, Bytes> = HashMap::new();
        while let Ok(event) = events.poll().await {
            if let Event::Incoming(Packet::Publish(request)) = event {
                answer(&client, &mut keys, &request);
            }
        }
    });
}

fn answer(client: &AsyncClient, keys: &mut HashMap<Bytes, Bytes>, request: &Publish) {
    let Some(properties) = &request.properties else {
        return;
    };
    let (Some(topic), Some(correlation)) =
        (&properties.response_topic, &properties.correlation_data)
    else {
        return;
    };
    let arguments = arguments(&request.payload);
    let payload = match &arguments[..] {
        [verb, key, value] if &verb[..] == b"SET" => {
            keys.insert(key.clone(), value.clone());
            Bytes::from_static(b"+OK\r\n")
        }
        [verb, key] if &verb[..] == b"GET" => match keys.get(key) {
            None => Bytes::from_static(b"$-1\r\n"),
            Some(value) => {
                let mut payload = format!("${}\r\n", value.len()).into_bytes();
                payload.extend_from_slice(value);
                payload.extend_from_slice(b"\r\n");
                payload.into()
            }
        },
        _ => Bytes::from_static(b"-ERR unknown command\r\n"),
    };
    let properties = PublishProperties {
        correlation_data: Some(correlation.clone()),
        user_properties: vec![("__stat".into(), "200".into())],
        ..PublishProperties::default()
    };
    let qos = QoS::AtLeastOnce;
    // If the queue is full, the request gets no answer, and the load generator counts an error.
    let _ = client.try_publish_with_properties(topic, qos, false, payload, properties);
}

/// The bulk strings of a command. Malformed ones are omitted.
fn arguments(payload: &Bytes) -> Vec<Bytes> {
    let mut all = Vec::new();
    let line = |at: usize| Some(at + payload[at..].windows(2).position(|it| it == b"\r\n")?);
    let mut at = line(0).map_or(payload.len(), |end| end + 2);
    while at < payload.len()
        && let Some(end) = line(at)
        && let Some(length) = std::str::from_utf8(&payload[at + 1..end])
            .ok()
            .and_then(|text| text.parse::<usize>().ok())
        && end + 2 + length <= payload.len()
    {
        all.push(payload.slice(end + 2..end + 2 + length));
        at = end + 2 + length + 2;
    }
    all
}
