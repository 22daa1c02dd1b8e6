//! `statehouse policy push`: delivers a policy over MQTT by a signed order.
//!
//! Publishes the order and the chunks of its file, and waits for the status that the store
//! publishes. After a lost connection it publishes everything again; the store ignores repetitions.

use std::path::PathBuf;
use std::time::Duration;

use rumqttc::v5::mqttbytes::QoS;
use rumqttc::v5::mqttbytes::v5::{
    ConnectProperties, Packet, PubAck, PubAckReason, PublishProperties, SubAck, SubscribeReasonCode,
};
use rumqttc::v5::{AsyncClient, ConnectionError, Event, EventLoop, MqttOptions};
use serde_json::{Value as Json, json};
use statehouse_client::parse_duration;
use statehouse_link::{
    Attempts, Place, describe, describe_suback, is_refusal, is_unavailable, reason_name,
};
use statehouse_protocol::topics;
use tokio::time::{Instant, timeout_at};

use super::words;
use crate::cli::output::{Exit, Failure, emit, emit_json, one_line, printable};
use crate::cli::remote::Credentials;
use crate::policies::delivery::{self, Action, Order};
use statehouse_config::{BrokerUrl, ClientId, limits};
use statehouse_core::policy::Digest;
use statehouse_testkit::read_policy;

/// Bytes of a packet apart from its chunk.
const ENVELOPE_BYTES: usize = 512;

/// Maximum bytes of a status.
const STATUS_BYTES_MAX: u32 = 64 << 10;

/// The pause before a reconnect.
const RECONNECT_PAUSE: Duration = Duration::from_millis(500);

/// Deliver a signed policy to a store over MQTT
///
/// Publishes a signed order and then the file in chunks, and waits until the store reports the
/// result. The store must trust the key (`serve --trusted-keys`). The file is signed too, unless
/// this key has already signed it. Any MQTT 5 client of the store's broker can do the same: the
/// protocol document describes the topics.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse policy push --store gateway-7 --key gateway.key rule.wasm --promote
  statehouse policy push --broker mqtts://gateway-7:8883 --ca gateway-ca.crt \\
    --store gateway-7 --key gateway.key rule.wasm
  statehouse policy push --store gateway-7 --key gateway.key --rollback")]
pub(super) struct Args {
    /// The URL of the store's broker
    #[arg(long, value_name = "URL", env = "STATEHOUSE_POLICY_BROKER", default_value = "mqtt://127.0.0.1:1883", value_parser = broker)]
    broker: BrokerUrl,

    #[command(flatten)]
    credentials: Credentials,

    /// The secret key, as `policy keygen` writes it; wasmsign2's format, DER or PEM
    #[arg(long, value_name = "FILE", env = "STATEHOUSE_POLICY_KEY")]
    key: PathBuf,

    /// The name of a store that the order is for; required, and repeated for several stores
    ///
    /// The name is part of the signed order, and a store with another name refuses the order.
    /// `statehouse policy list` on the gateway shows the name, and the store logs it when it
    /// starts.
    #[arg(long = "store", value_name = "NAME")]
    stores: Vec<ClientId>,

    /// The module or component
    #[arg(
        value_name = "FILE",
        required_unless_present = "rollback",
        conflicts_with = "rollback"
    )]
    module: Option<PathBuf>,

    /// Make it the active policy at once
    #[arg(long, conflicts_with = "rollback")]
    promote: bool,

    /// Deliver no file: reactivate the policy before the active one
    #[arg(long)]
    rollback: bool,

    /// The serial number of the order; a store accepts only higher numbers than the last [default:
    /// the time in milliseconds]
    #[arg(long, value_name = "N")]
    serial: Option<u64>,

    /// How long to wait for the connection and for the result
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = parse_duration)]
    timeout: Duration,

    /// Print the store's last status as JSON
    #[arg(long)]
    json: bool,
}

pub(super) async fn run(args: &Args) -> Result<Exit, Failure> {
    check_stores(&args.stores)?;
    let key = delivery::secret_key(&args.key).map_err(|error| Failure::usage(error.to_string()))?;
    let module = match &args.module {
        Some(path) => {
            let module = read_policy(path)?;
            let ours = [delivery::public(&key)];
            let signed = match delivery::verify(&module, &ours) {
                Ok(_) => Ok(module),
                Err(_) => delivery::sign(&module, &key),
            };
            signed.map_err(|error| Failure::usage(format!("{}: {error}", path.display())))?
        }
        None => Vec::new(),
    };
    let place = place(args)?;
    let serial = serial(args.serial, statehouse_core::clock::wall_ms())?;
    let deadline = Instant::now() + args.timeout;
    let (mut connected, mut lost) = (false, None);
    loop {
        let push = Push::new(args, &place, &key, &module, serial);
        let pushed = timeout_at(deadline, push.run(&mut connected)).await;
        match pushed {
            Ok(Ok(status)) => return report(args, &status),
            Ok(Err(Stop::Failed(failure))) => return Err(failure),
            Ok(Err(Stop::Lost(error))) if connected || is_unavailable(&error) => {
                lost = Some(describe(&error));
                tokio::time::sleep(RECONNECT_PAUSE).await;
            }
            Ok(Err(Stop::Lost(error))) if is_refusal(&error) => {
                let (broker, why) = (&args.broker, describe(&error));
                return Err(Failure::refused(format!(
                    "no connection to {broker}: {why}"
                )));
            }
            Ok(Err(Stop::Lost(error))) => return Err(unreached(args, &describe(&error))),
            Err(_) => {
                return Err(match lost {
                    // No connection was accepted, so the order was not sent.
                    Some(why) if !connected => unreached(args, &why),
                    lost => unreported(serial, lost),
                });
            }
        }
    }
}

/// The failure of an order that was not sent.
fn unreached(args: &Args, why: &str) -> Failure {
    Failure::transport(format!("cannot reach the broker {}: {why}", args.broker))
}

/// The failure of an order without a result in time. `lost` says why the last lost connection
/// ended; a later one may still exist.
fn unreported(serial: u64, lost: Option<String>) -> Failure {
    let failure = Failure::transport(format!(
        "the store did not report a result of the order {serial} in time: give a slow store more time with --timeout"
    ));
    match lost {
        Some(why) => failure.with(&format!("A connection was lost before: {why}")),
        None => failure,
    }
}

/// The failure of an order that the store took before it started again, or before another host took
/// over: no status will report its result.
fn forgotten(serial: u64) -> Failure {
    Failure::transport(format!(
        "the store took the order {serial}, but started again, or another host took over, before it reported the result: `statehouse policy list` shows whether it was carried out"
    ))
}

/// Checks the number of targets. clap's error for a missing option could not say where to find the
/// name.
fn check_stores(stores: &[ClientId]) -> Result<(), Failure> {
    match stores.len() {
        0 => Err(Failure::usage(
            "--store NAME is required: a signed order names the stores that it is for. `statehouse policy list` on the gateway shows the store's name, and the store logs it at its start",
        )),
        1..=limits::ORDER_STORES_MAX => Ok(()),
        count => Err(Failure::usage(format!(
            "--store is given {count} times, but an order may name at most {} stores",
            limits::ORDER_STORES_MAX
        ))),
    }
}

/// The serial of the order. A store refuses all lower ones afterwards, so that a number near the
/// maximum would block it for good. The time in nanoseconds is always high enough again.
fn serial(given: Option<u64>, now_ms: u64) -> Result<u64, Failure> {
    let max = now_ms.saturating_add(86_400_000).saturating_mul(1_000_000);
    match given {
        Some(serial) if serial > max => Err(Failure::usage(format!(
            "--serial {serial} would block later orders: the highest number that is accepted today is {max}, the time in nanoseconds"
        ))),
        Some(serial) => Ok(serial),
        None => Ok(now_ms),
    }
}

fn report(args: &Args, status: &Json) -> Result<Exit, Failure> {
    if args.json {
        emit_json(status)?;
    }
    if status["state"] == "failed" {
        let why = one_line(status["error"].as_str().unwrap_or_default());
        return Err(Failure::refused(format!("the store refused: {why}")));
    }
    if !args.json {
        let active = &status["active"];
        let line = format!(
            "order {} is carried out; active is {}\n",
            words::number(&status["serial"]),
            words::policy(active)
        );
        emit(line.as_bytes())?;
    }
    Ok(Exit::Done)
}

/// Why a connection ended.
enum Stop {
    /// A reconnect would not help.
    Failed(Failure),
    /// A reconnect may help.
    Lost(Box<ConnectionError>),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

/// The delivery over one connection.
struct Push<'a> {
    args: &'a Args,
    key: &'a wasmsign2::SecretKey,
    module: &'a [u8],
    serial: u64,
    place: &'a Place,
    id: String,
    client: AsyncClient,
    events: EventLoop,
    /// Messages to publish, in reverse order.
    waiting: Vec<(String, Vec<u8>, Option<String>)>,
}

impl<'a> Push<'a> {
    fn new(
        args: &'a Args,
        place: &'a Place,
        key: &'a wasmsign2::SecretKey,
        module: &'a [u8],
        serial: u64,
    ) -> Self {
        let id = format!("statehouse-push-{:x}-{serial:x}", std::process::id());
        let user = place.login.as_ref().map(|(user, _)| &**user);
        let id = topics::client_id_of(user, &id);
        let (client, events) = AsyncClient::new(configured(place.mqtt(&id)), 8);
        Self {
            args,
            key,
            module,
            serial,
            place,
            id,
            client,
            events,
            waiting: Vec::new(),
        }
    }

    /// Publishes everything, and returns the final status. `connected` is whether an earlier
    /// connection may have published the order.
    async fn run(mut self, connected: &mut bool) -> Result<Json, Stop> {
        let is_again = *connected;
        let mut attempts = Attempts::default();
        let connecting = attempts.connect(&mut self.events, self.place, &self.id, configured);
        let mut event = connecting.await;
        loop {
            match event.map_err(|error| Stop::Lost(Box::new(error)))? {
                Event::Incoming(Packet::ConnAck(ack)) => {
                    *connected = true;
                    let max = ack.properties.and_then(|it| it.max_packet_size);
                    self.prepare(max.unwrap_or(u32::MAX))?;
                    // If an earlier connection published everything, the retained status of this
                    // order already exists.
                    (self
                        .client
                        .try_subscribe(delivery::STATUS, QoS::AtLeastOnce))
                    .map_err(full)?;
                }
                Event::Incoming(Packet::SubAck(ack)) => {
                    subscribed(&ack)?;
                    self.publish_next()?;
                }
                Event::Incoming(Packet::PubAck(ack)) => {
                    accepted(&ack)?;
                    self.publish_next()?;
                }
                Event::Incoming(Packet::Publish(publish)) => {
                    let status: Json = serde_json::from_slice(&publish.payload).unwrap_or_default();
                    // An order whose pieces came too late, before this connection, is sent again.
                    let is_late = publish.retain && status["missing"].is_u64();
                    if self.is_result(&status) && !is_late {
                        return Ok(status);
                    }
                    // This store would refuse the order as an old one.
                    if is_again
                        && status["state"] == "idle"
                        && status["last_serial"].as_u64() == Some(self.serial)
                    {
                        return Err(forgotten(self.serial).into());
                    }
                }
                _ => {}
            }
            event = self.events.poll().await;
        }
    }

    /// Whether this is the result of this order. The retained status may be that of an earlier
    /// order with the same serial, because of which the store refuses this one.
    fn is_result(&self, status: &Json) -> bool {
        let ended = status["state"] == "done" || status["state"] == "failed";
        if !ended || status["serial"].as_u64() != Some(self.serial) {
            return false;
        }
        let module = self.args.module.as_ref();
        let digest = module.map(|_| Digest::of(self.module));
        // The status of a failure may lack both fields.
        let is_own = |name: &str, own: Json| status[name].is_null() || status[name] == own;
        is_own("action", json!(self.action())) && is_own("digest", json!(digest))
    }

    fn action(&self) -> Action {
        match (self.args.rollback, self.args.promote) {
            (true, _) => Action::Rollback,
            (_, true) => Action::Promote,
            (_, false) => Action::Load,
        }
    }

    /// Splits the file into chunks that fit into packets.
    fn prepare(&mut self, packet_bytes_max: u32) -> Result<(), Failure> {
        let room = usize::try_from(packet_bytes_max).unwrap_or(usize::MAX);
        let chunk_bytes = room
            .saturating_sub(ENVELOPE_BYTES)
            .clamp(1, limits::CHUNK_BYTES_MAX);
        let is_file = self.args.module.is_some();
        let digest = Digest::of(self.module);
        let chunks = self.module.chunks(chunk_bytes);
        let order = Order {
            serial: self.serial,
            stores: self.args.stores.iter().map(|it| it.0.clone()).collect(),
            action: self.action(),
            digest: is_file.then_some(digest),
            size: is_file.then_some(self.module.len() as u64),
            chunks: chunks.clone().map(Digest::of).collect(),
            per_mille: None,
            rule: None,
        };
        let payload = order.payload();
        if order.chunks.len() > limits::ORDER_CHUNKS_MAX
            || payload.len().saturating_add(ENVELOPE_BYTES) > room
        {
            return Err(Failure::usage(format!(
                "the broker accepts packets of at most {packet_bytes_max} bytes, which is too small for this policy of {} bytes: raise max_packet_bytes of the store",
                self.module.len()
            )));
        }
        let signature = delivery::sign_order(&payload, self.key);
        self.waiting = (chunks.enumerate())
            .map(|(index, chunk)| {
                (
                    format!("{}{digest}/{index}", topics::CHUNK_TOPICS),
                    chunk.to_vec(),
                    None,
                )
            })
            .rev()
            .collect();
        self.waiting
            .push((topics::ORDER_TOPIC.to_owned(), payload, Some(signature)));
        Ok(())
    }

    /// One message at a time, so that megabytes do not follow a refused order.
    fn publish_next(&mut self) -> Result<(), Failure> {
        let Some((topic, payload, signature)) = self.waiting.pop() else {
            return Ok(());
        };
        let user_properties = signature
            .map(|signature| (delivery::SIGNATURE.to_owned(), signature))
            .into_iter()
            .collect();
        let properties = PublishProperties {
            user_properties,
            ..PublishProperties::default()
        };
        self.client
            .try_publish_with_properties(topic, QoS::AtLeastOnce, false, payload, properties)
            .map_err(full)
    }
}

/// At most two requests are queued in the client at once.
fn full(error: rumqttc::v5::ClientError) -> Failure {
    Failure::transport(format!(
        "the request queue of the MQTT client is full: {error}"
    ))
}

/// Adds the settings of this client to its options.
fn configured(mut options: MqttOptions) -> MqttOptions {
    let mut properties = ConnectProperties::new();
    properties.max_packet_size = Some(STATUS_BYTES_MAX);
    options
        .set_clean_start(true)
        .set_keep_alive(Duration::from_secs(15))
        .set_connect_properties(properties);
    options
}

/// The result of the order arrives only through this subscription.
fn subscribed(ack: &SubAck) -> Result<(), Failure> {
    match ack.return_codes.first() {
        Some(SubscribeReasonCode::Success(_)) => Ok(()),
        other => Err(Failure::refused(format!(
            "the broker refused the subscription to {}: {}",
            delivery::STATUS,
            describe_suback(other)
        ))),
    }
}

fn accepted(ack: &PubAck) -> Result<(), Failure> {
    match ack.reason {
        PubAckReason::Success => Ok(()),
        PubAckReason::NoMatchingSubscribers => Err(Failure::transport(
            "this broker has no subscriber for orders: is it the broker of a state store?",
        )),
        other => {
            let properties = ack.properties.as_ref();
            let text = properties.and_then(|it| it.reason_string.as_deref());
            let text = text.map_or_else(|| reason_name(&other), |it| printable(it.as_bytes()));
            Err(Failure::refused(text))
        }
    }
}

/// Parses a URL, or only host and port.
fn broker(text: &str) -> Result<BrokerUrl, String> {
    match text.contains("://") {
        true => text.parse(),
        false => format!("mqtt://{text}").parse(),
    }
}

/// The address of the broker, and the credentials.
fn place(args: &Args) -> Result<Place, Failure> {
    let (url, credentials) = (&args.broker, &args.credentials);
    let tls = credentials.tls(url)?;
    let login = credentials.login(Some(url))?;
    Ok(Place {
        host: url.host.clone(),
        port: url.port,
        tls: tls.map(|_| credentials.client_config()).transpose()?,
        websocket: url.scheme.websocket.then(|| url.path.clone()),
        login: login.map(|login| (login.user, login.password)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The variables of `serve` may hold the store's own password or certificate.
    #[test]
    fn push_ignores_the_broker_variables_of_serve() {
        let command = <Args as clap::Args>::augment_args(clap::Command::new("push"));
        let broker = command.get_arguments().find(|it| it.get_id() == "broker");
        let variable = broker.and_then(clap::Arg::get_env);
        assert_eq!(variable, Some("STATEHOUSE_POLICY_BROKER".as_ref()));
    }

    #[test]
    fn serial_that_would_block_later_orders_is_refused() {
        let now_ms = 1_800_000_000_000;
        let taken = |given| serial(given, now_ms).ok();
        assert_eq!(taken(None), Some(now_ms));
        for good in [7, now_ms + 5, now_ms * 1_000_000] {
            assert_eq!(taken(Some(good)), Some(good));
        }
        assert_eq!(taken(Some(u64::MAX)), None);
    }

    #[test]
    fn a_broker_is_a_url_or_an_address() {
        for (text, shown) in [
            ("mqtt://gateway-7:1884", "mqtt://gateway-7:1884"),
            ("gateway-7", "mqtt://gateway-7:1883"),
            ("127.0.0.1:1", "mqtt://127.0.0.1:1"),
            ("mqtts://[::1]", "mqtts://[::1]:8883"),
        ] {
            assert_eq!(broker(text).unwrap().to_string(), shown);
        }
        for text in ["", "http://gateway:1", "mqtt://", "mqtt://a:b", ":1"] {
            assert!(broker(text).is_err(), "{text}");
        }
    }
}
